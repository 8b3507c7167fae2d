# Reads text files (sysfs, procfs) without a fork a file. POSIX sh; arguments: paths or glob patterns.
# Prints, for each match: "F path" and its lines, each after "|"; "L path" and "|target"; "D path"; "E path" and
# "|reason" (there, but not readable); "N pattern" (nothing there).
LC_ALL=C
export LC_ALL
IFS=
put() { printf '%s\n' "$1"; }
# The reason out of "cat: /path: Permission denied".
reason() { put "E $1"; put "|${2##*: }"; }

lines() {
  n=0
  while IFS= read -r line || [ -n "$line" ]; do
    [ $n = 0 ] && put "F $1"
    n=1
    put "|$line"
  done
  [ $n = 1 ]
}

file() {
  case $1 in
    # WHY: a shell reads byte by byte, and the kernel ends many sysctl files after the first read.
    /proc/sys/*) text=$(cat -- "$1" 2>&1) && { put "F $1"; [ -z "$text" ] || printf '%s\n' "$text" | while IFS= read -r line; do put "|$line"; done; return; }
      reason "$1" "$text" ;;
    # An empty file and a read error look alike to read, so cat has to say which it was.
    *) { lines "$1" < "$1"; } 2>/dev/null || if text=$(cat -- "$1" 2>&1 > /dev/null); then put "F $1"; else reason "$1" "$text"; fi ;;
  esac
}

link() { target=$(readlink -- "$1" 2>&1) && { put "L $1"; put "|$target"; } || reason "$1" "${target:-not readable}"; }

links() {
  [ $# = 0 ] && return
  targets=$(readlink -- "$@" 2> /dev/null)
  IFS='
'
  set -f
  n=0
  for target in $targets; do n=$((n + 1)); done
  if [ $n = $# ]; then
    for target in $targets; do put "L $1"; put "|$target"; shift; done
  else
    # One of them vanished or cannot be read: ask one by one, so that no target goes to the wrong link.
    for one in "$@"; do link "$one"; done
  fi
  set +f
  IFS=
}

nothing() {
  fixed=${1%%[*?[]*}
  dir=${fixed%/*}
  [ -n "$dir" ] || dir=/
  if [ -d "$dir" ]; then
    if [ ! -x "$dir" ] || { [ "$fixed" != "$1" ] && [ ! -r "$dir" ]; }; then reason "$1" "$dir: Permission denied"; else put "N $1"; fi
    return
  fi
  said=$(ls -d -- "$dir" 2>&1 > /dev/null)
  case $said in *denied*) reason "$1" "$said" ;; *) put "N $1" ;; esac
}

pattern() {
  p=$1
  set --
  for f in $p; do
    if [ -L "$f" ]; then set -- "$@" "$f"
    elif [ -d "$f" ]; then put "D $f"
    elif [ -f "$f" ]; then file "$f"
    elif [ -e "$f" ]; then reason "$f" "not a regular file"
    else nothing "$p"
    fi
  done
  links "$@"
}

for p in "$@"; do pattern "$p"; done
exit 0

# Tries to open each device node for reading and writing, as a program that uses it would. POSIX sh; arguments: paths.
# Prints one line each: "ok path", "absent path", or "error path reason".
LC_ALL=C
export LC_ALL
for p in "$@"; do
  if [ ! -e "$p" ] && [ ! -L "$p" ]; then
    printf 'absent %s\n' "$p"
  elif said=$( (: <> "$p") 2>&1 ); then
    printf 'ok %s\n' "$p"
  else
    printf 'error %s %s\n' "$p" "${said##*: }"
  fi
done
exit 0

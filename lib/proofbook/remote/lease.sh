# Who may change this machine now, and which approvals were used. POSIX sh; needs root and flock.
#
#   acquire RUN HOLDER TTL_S   takes it, or renews it when it is RUN's already
#   renew RUN TTL_S            holds it for TTL_S from now
#   release RUN                gives it back; nothing happens when it is another's
#   show                       says whose it is
#   break RUN WHO              takes it away from RUN, and from no other; WHO is kept in lease.log
#   use DIGEST RUN             uses an approval up; only under RUN's lease. RUN itself may repeat it
#
# Every verb prints how many approvals were used here and the lease that holds afterwards, as key=value lines. Exit status: 0 done; 64 used wrongly; 73 it could not
# be written; 75 another run has it, or (renew, break, use) the named run has not; 76 the approval was used before.
#
# WHY a lease that ran out is not simply taken: its run may sit in a reboot that takes longer than it thought, and two
# runs that change one machine are worse than a question to a person.

PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin LC_ALL=C
export PATH LC_ALL
umask 077
prefix=${PROOFBOOK_TEST_ROOT-}
proc=$prefix/proc
base=$prefix/var/lib/proofbook
file=$base/lease

report() {
  at=$(date +%s)
  printf 'now=%s\nboot_now=%s\n' "$at" "$boot_now"
  printf 'approvals=%s\n' "$(ls -- "$base/approvals" 2> /dev/null | grep -c '^[0-9a-f]*$')"
  if read_lease; then
    [ "$expires" -gt "$at" ] && expired=no || expired=yes
    printf 'run=%s\nholder=%s\ntaken=%s\nexpires=%s\nboot_id=%s\nexpired=%s\n' \
      "$run" "$holder" "$taken" "$expires" "$boot_id" "$expired"
  fi
  echo end
}
fail() {
  status=$1
  shift
  report
  printf '%s\n' "$*" >&2
  exit "$status"
}
flush() { sync -- "$@" 2> /dev/null || sync; }
boot_now=$(tr -d - < "$proc/sys/kernel/random/boot_id" 2> /dev/null) || boot_now=unknown

read_lease() {
  run= holder= taken=0 expires=0 boot_id=
  [ -f "$file" ] || return 1
  while IFS= read -r line; do
    value=${line#*=}
    case $line in
      run=*) run=$value ;;
      holder=*) holder=$value ;;
      taken=*) taken=$value ;;
      expires=*) expires=$value ;;
      boot_id=*) boot_id=$value ;;
    esac
  done < "$file"
  case $taken$expires in *[!0-9]*) taken=0 expires=0 ;; esac
  [ -n "$run" ]
}
write_lease() {
  text="run=$run
holder=$holder
taken=$taken
expires=$(($(date +%s) + $1))
boot_id=$boot_id"
  { printf '%s\n' "$text" > "$file.new" && flush "$file.new" && mv -f -- "$file.new" "$file"; } 2> /dev/null ||
    { rm -f -- "$file.new"; fail 73 "the lease cannot be written in $base (is the disk full?)"; }
  flush "$base"
}
lock() {
  command -v flock > /dev/null || fail 73 "flock (util-linux) is not there"
  [ -d "$base" ] || { mkdir -p -- "$base" && chmod 700 "$base"; } || fail 73 "$base cannot be made"
  exec 9< "$base"
  flock -w 20 9 || fail 75 "another process works on the lease of this machine; it was waited for 20 s"
}
ours() { read_lease || fail 75 "nobody has the lease, not run $1 either"; [ "$run" = "$1" ] || fail 75 "run $run has the lease, not run $1"; }
number() { case $1 in '' | *[!0-9]*) fail 64 "not a number of seconds: $1" ;; esac; }

acquire() {
  number "$3"
  lock
  if read_lease; then
    [ "$run" = "$1" ] || fail 75 "run $run has the lease"
  else
    taken=$(date +%s) boot_id=$boot_now
  fi
  run=$1 holder=$2
  write_lease "$3"
}
renew() {
  number "$2"
  lock
  ours "$1"
  write_lease "$2"
}
release() {
  lock
  ! read_lease || [ "$run" != "$1" ] || { rm -f -- "$file" && flush "$base"; }
}
break_it() {
  lock
  ours "$1"
  printf '%s broken run=%s holder=%s taken=%s expires=%s by=%s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$run" "$holder" "$taken" "$expires" "$2" \
    >> "$base/lease.log" || fail 73 "who broke the lease could not be written"
  flush "$base/lease.log"
  rm -f -- "$file"
  flush "$base"
}
# The name is taken by a link, which is there with its content or not at all, and which the second one cannot make.
use() {
  case $1 in *[!0-9a-f]* | '') fail 64 "not a digest: $1" ;; esac
  lock
  ours "$2"
  folder=$base/approvals
  mkdir -p -- "$folder" || fail 73 "$folder cannot be made"
  one=$folder/$1
  if [ ! -f "$one" ]; then
    { printf 'run=%s at=%s\n' "$2" "$(date +%s)" > "$one.new" && flush "$one.new" && ln -- "$one.new" "$one"; } 2> /dev/null ||
      { rm -f -- "$one.new"; fail 73 "the use of the approval could not be written"; }
    rm -f -- "$one.new"
    flush "$folder" "$base"
  fi
  read -r by at < "$one" || fail 73 "$one cannot be read"
  printf 'used_by=%s\nused_at=%s\n' "${by#run=}" "${at#at=}"
  [ "${by#run=}" = "$2" ] || fail 76 "the approval was used by run ${by#run=}"
}

# WHY: to one who may not look, everything seems to be absent.
[ -n "$prefix" ] || [ "$(id -u)" = 0 ] || { echo "this needs root" >&2; exit 64; }
verb=${1-}
[ $# -eq 0 ] || shift
case $verb/$# in
  acquire/3) acquire "$@" ;;
  renew/2) renew "$@" ;;
  release/1) release "$@" ;;
  show/0) ;;
  break/2) break_it "$@" ;;
  use/2) use "$@" ;;
  *) fail 64 "used wrongly: $verb with $# words" ;;
esac
report
exit 0

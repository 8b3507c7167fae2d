# Runs a long step of a run apart from whoever asked for it, and can say later how it stands. POSIX sh; root and systemd.
#
#   start RUN STEP SECONDS WORD ...   begins it, once: a step that was begun is not begun again
#   status RUN STEP                   never | running | ended with a status | lost, and why
#   stop RUN STEP                     ends it
#   clean RUN                         removes what the run's steps left
#
# The step is a transient unit, so it outlives the connection, and dies with the machine; then it is said to be lost.
# Its output goes to files, and systemd itself writes down how it ended (ExecStopPost), also when it was killed.
# Exit status: 0 done; 64 used wrongly; 69 systemd did not do its part; 73 something could not be written; 75 busy.

PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin LC_ALL=C SYSTEMD_COLORS=0 SYSTEMD_PAGER=
export PATH LC_ALL SYSTEMD_COLORS SYSTEMD_PAGER
umask 077
prefix=${PROOFBOOK_TEST_ROOT-}
proc=$prefix/proc
steps=$prefix/var/lib/proofbook/steps

fail() {
  status=$1
  shift
  printf '%s\n' "$*" >&2
  exit "$status"
}
flush() { sync -- "$@" 2> /dev/null || sync; }
# The boot id alone does not tell the life of this systemd: a container is started anew on a kernel that runs on.
get_life() {
  read -r life < "$proc/sys/kernel/random/boot_id" || life=unknown
  s=$(cat "$proc/1/stat" 2> /dev/null) || s=
  set -f
  set -- ${s##*) }
  set +f
  life=$life/${20-unknown}
}
lock() {
  command -v flock > /dev/null || fail 69 "flock (util-linux) is not there"
  [ -d "$steps" ] || { mkdir -p -- "$steps" && chmod 700 "$steps"; } || fail 73 "$steps cannot be made"
  exec 9< "$steps"
  flock -w 30 9 || fail 75 "another process works on the steps of this machine; it was waited for 30 s"
}
# A word in single quotes, for the script that the unit runs.
# WHY a script: systemd-run would expand dollar signs in the words that it is given.
quoted() {
  s=$(printf '%s.' "$1" | sed "s/'/'\\\\''/g")
  printf "'%s' " "${s%.}"
}

start() {
  seconds=$1
  shift
  lock
  [ ! -f "$d/begun" ] || return 0
  rm -rf -- "$d"
  mkdir -p -- "$d" || fail 73 "$d cannot be made"
  get_life
  {
    printf 'cd / && exec > %s 2> %s && exec ' "$(quoted "$d/out")" "$(quoted "$d/err")"
    for word; do quoted "$word"; done
    echo
  } > "$d/step.sh" || fail 73 "the step cannot be written (is the disk full?)"
  # WHY the manager's state: an orderly shutdown ends the step like any stop does, and it is not the step that ended then.
  cat > "$d/ended.sh" << END || fail 73 "the step cannot be written (is the disk full?)"
echo "\$(date +%s) \$SERVICE_RESULT \$EXIT_CODE \$EXIT_STATUS \$(systemctl is-system-running)" > $d/ended.new
sync $d/ended.new || sync
mv $d/ended.new $d/ended
END
  printf '%s %s\n' "$(date +%s)" "$life" > "$d/begun.new" || fail 73 "the step cannot be written (is the disk full?)"
  flush "$d/step.sh" "$d/ended.sh" "$d/begun.new"
  # WHY begun before it is run: of a step that may have been run nobody must think that it never was.
  mv -- "$d/begun.new" "$d/begun"
  flush "$d"
  systemd-run --quiet --unit="$unit" --collect --description="Step $step of proofbook run $run" --property=RuntimeMaxSec="$seconds" \
    --property=ExecStopPost="/bin/sh $d/ended.sh" /bin/sh "$d/step.sh" 9<&- > /dev/null 2> "$d/refused" ||
    { status=$(cat "$d/refused"); rm -rf -- "$d"; fail 69 "systemd-run did not start it: $status"; }
}
report() {
  if [ ! -f "$d/begun" ]; then echo "step never"; echo end; return; fi
  read -r began life_then < "$d/begun"
  get_life
  s=$(systemctl show --property=ActiveState -- "$unit" 2> /dev/null)
  printf 'began %s\nnow %s\n' "$began" "$(date +%s)"
  for one in out err; do [ ! -f "$d/$one" ] || printf '%s %s\n' "$one" "$(($(wc -c < "$d/$one")))"; done
  if [ -f "$d/ended" ]; then
    read -r ended result how code manager < "$d/ended"
    case $manager:$how in
      stopping:killed) printf 'step lost\nwhy the machine was shut down while it ran\n' ;;
      *) printf 'step ended\nended %s\nresult %s\nhow %s\nstatus %s\n' "$ended" "$result" "$how" "$code" ;;
    esac
  elif [ "$life" != "$life_then" ]; then
    printf 'step lost\nwhy the machine was started anew while it ran\n'
  else
    case $s in
      ActiveState=active | ActiveState=activating | ActiveState=deactivating | ActiveState=reloading) echo "step running" ;;
      ActiveState=*) if [ -f "$d/ended" ]; then report; return; fi; printf 'step lost\nwhy its unit is gone and did not say how it ended\n' ;;
      *) printf 'step unknown\nwhy systemd does not answer\n' ;;
    esac
  fi
  echo end
}

# WHY: to one who may not look, everything seems to be absent.
[ -n "$prefix" ] || [ "$(id -u)" = 0 ] || { echo "this needs root" >&2; exit 64; }
verb=${1-} run=${2-} step=${3-}
case $run in '' | *[!A-Za-z0-9_.-]* | [!A-Za-z0-9]*) fail 64 "not an id of a run: $run" ;; esac
case $verb:$step in clean:) ;; *:'' | *:*[!a-z0-9-]*) fail 64 "not the name of a step: $step" ;; esac
d=$steps/$run/$step
unit=proofbook-$run-$step.service
case $verb in
  start)
    [ $# -ge 5 ] || fail 64 "used wrongly: start without a command"
    shift 3
    start "$@"
    ;;
  status) ;;
  stop) systemctl stop -- "$unit" 2> /dev/null ;;
  clean) lock; rm -rf -- "${steps:?}/$run"; echo "step never"; echo end; exit 0 ;;
  *) fail 64 "used wrongly: $verb" ;;
esac
report
exit 0

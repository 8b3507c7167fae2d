# Changes files of a machine so that they change back by themselves unless somebody confirms in time. POSIX sh.
# Run as "guard VERB ID ...", and by systemd as "sh guard.sh due ID". Needs root, systemd, flock, base64, sha256sum.
#
#   stage ID UNIT     standard input: the new files (see remote/guard.py); keeps the old ones. Refuses when they are not as planned.
#                     UNIT is restarted when they come back; "-" for none. "reboot.target": when it is the guard that takes them
#                     back, it reboots the machine then; whoever fires by hand sees to that reboot himself
#   arm ID SECONDS    writes, enables and starts the guard, and has systemd run it once; only then it counts as armed
#   install ID        puts the new files in place. Only while the guard waits
#   suspend ID        the old files come back for a while, and the guard goes on waiting; "install" puts the new ones in place again
#   extend ID SECONDS the time runs anew from now
#   confirm ID        the new files stay: the guard, the old bytes and the folder go
#   fire ID           the old files come back, and the unit with them. Also what the guard itself does when its time is up
#   status ID         says what is; never fails
#   clean ID          removes what is left after "fire", or of a change that was never armed
#   due ID            what the timer runs: looks whether the time is up, and fires if so
#
# Every verb may be repeated, and ends by saying what is, as "status" does. Exit status: 0 done; 64 used wrongly; 65 the new
# files came damaged; 66 no such change; 69 systemd did not do its part; 73 something could not be written; 75 another
# process is at it; 76 a file is not as it should be; 77 not in this state; 1 taking back did not succeed.
#
# The order of writes is the whole point. "state" is the truth; it is replaced by renaming a link to a word that was written
# beforehand, since at the time when a crash loop has filled the disk, a new file cannot be had but a name still can.
# For the same reason "install" writes the file that "fire" will rename into place before it touches the present one.
#
# WHY one timer with four triggers, and a file that decides: OnActiveSec is immune to clock steps but starts anew at a boot;
# OnCalendar survives the boot (Persistent) but not a wrong clock; neither comes again after a power cut in the middle of
# taking back. So it is also run soon after boot and then every minute, and it decides by "deadline" whether to act.

PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin LC_ALL=C SYSTEMD_COLORS=0 SYSTEMD_PAGER=
export PATH LC_ALL SYSTEMD_COLORS SYSTEMD_PAGER
umask 077
N='
'
prefix=${PROOFBOOK_TEST_ROOT-}
base=$prefix/var/lib/proofbook
units=$prefix/etc/systemd/system
proc=$prefix/proc

# ------------------------------------------------------------------------------------------------ words and files

now() { date +%s; }
log() {
  [ ! -d "$d" ] || printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*" >> "$d/log" || :
  [ "$verb" != due ] || printf '%s\n' "$*" >&2
} 2> /dev/null
fail() {
  status=$1
  shift
  rm -f -- "$all/.request.$id"
  [ "$*" = "${why-}" ] || log "$verb: $*"
  report
  printf '%s\n' "$*" >&2
  exit "$status"
}
# Without arguments for sync (BusyBox built small) everything is flushed.
flush() { sync -- "$@" 2> /dev/null || sync; }
sum() {
  s=$(sha256sum < "$1") || return 1
  printf '%s\n' "${s%% *}"
}
# What is at a path now: a digest, "absent", or "odd" for a link, a folder, a device or what cannot be read.
present() {
  if [ -L "$1" ]; then echo odd
  elif [ ! -e "$1" ]; then echo absent
  elif [ -f "$1" ]; then sum "$1" 2> /dev/null || echo odd
  else echo odd; fi
}
# Replaces a small file as a whole: path, text, mode.
write() {
  { printf '%s\n' "$2" > "$1.new" && chmod "${3-600}" "$1.new" && flush "$1.new" && mv -f -- "$1.new" "$1"; } 2> /dev/null ||
    { rm -f -- "$1.new"; return 1; }
  flush "${1%/*}"
}
get_state() {
  state=none
  [ ! -f "$d/state" ] || read -r state < "$d/state" || state=none
}
put_state() {
  s=
  [ ! -f "$d/state" ] || read -r s < "$d/state"
  # WHY: a rename of one name of a file to another name of it does nothing, and mv calls that an error.
  [ "$s" != "$1" ] || { state=$1; return 0; }
  { ln -f -- "$d/words/$1" "$d/state.new" && mv -f -- "$d/state.new" "$d/state"; } 2> /dev/null || write "$d/state" "$1" || return 1
  rm -f -- "$d/state.new"
  state=$1
  flush "$d"
}
# One process at a time, in all changes of this machine: the folder above them is never removed, so its lock means the same to all.
lock() {
  command -v flock > /dev/null || fail 69 "flock (util-linux) is not there"
  [ -d "$all" ] || { mkdir -p -- "$all" && chmod 700 "$base" "$all"; } || fail 73 "$all cannot be made"
  exec 9< "$all"
  flock -w "$1" 9 || fail 75 "another process works on a change of this machine; it was waited for $1 s"
}
# A line of the manifest: old digest, new digest, mode, path. Only the path may hold blanks.
split() {
  old=${1%% *} rest=${1#* }
  new=${rest%% *} rest=${rest#* }
  mode=${rest%% *} path=${rest#* }
  dir=${path%/*}
  [ -n "$dir" ] || dir=/
  back=$dir/.proofbook-$id.$n.old
  next=$dir/.proofbook-$id.$n.new
}
relabel() { ! command -v restorecon > /dev/null || restorecon -- "$1" 2> /dev/null || :; }

# ------------------------------------------------------------------------------------------------------- the time

# The life of this systemd. The boot id alone does not tell: a container is started anew on a kernel that runs on.
get_life() {
  read -r life < "$proc/sys/kernel/random/boot_id" || life=unknown
  s=$(cat "$proc/1/stat" 2> /dev/null) || s=
  set -f
  set -- ${s##*) }
  set +f
  life=$life/${20-unknown}
  read -r up s < "$proc/uptime" || up=0
  up=${up%%.*}
}
put_deadline() {
  get_life
  write "$d/deadline" "$(($(now) + $1 + 1)) $1 $life $up $2"
}
# Seconds that are left, in $left. In the life in which it was armed the steady clock alone tells. In a later one: the wall
# clock, or, where that one went back, once the whole time has passed in this life too.
get_left() {
  left=0 epoch=0 seconds=0 at_life=unknown at_up=0 later=0
  read -r epoch seconds at_life at_up later < "$d/deadline" || return 1
  get_life
  if [ "$life" = "$at_life" ]; then
    left=$((at_up + seconds - up))
    [ "$later" = 0 ] || [ "$((epoch - $(now)))" -ge "$left" ] || left=$((epoch - $(now)))
  else
    left=$((epoch - $(now)))
    [ "$left" -le "$seconds" ] || left=$seconds
  fi
} 2> /dev/null
rebase() {
  get_left || return 0
  [ "$life" != "$at_life" ] || return 0
  write "$d/deadline" "$epoch $seconds $life $up 1"
}

# --------------------------------------------------------------------------------------------------------- status

report() {
  get_state
  printf 'state %s\nnow %s\n' "$state" "$(now)"
  if [ "$state" != none ]; then
    read -r unit was_active < "$d/unit" || unit=- was_active=0
    printf 'unit %s\nwas_active %s\n' "$unit" "$was_active"
    [ "$unit" = - ] || printf 'active %s\n' "$(systemctl show --property=ActiveState -- "$unit" 2> /dev/null | sed s/^ActiveState=//)"
    [ ! -f "$d/installing" ] || echo touched 1
    if get_left; then printf 'deadline %s\nleft %s\n' "$epoch" "$left"; fi
    n=0
    while IFS= read -r line; do
      n=$((n + 1))
      split "$line"
      has=$(present "$path")
      case $has in
        "$new") has=new ;;
        "$old") has=old ;;
        absent) ;;
        *) has=other ;;
      esac
      printf 'file %s %s %s %s\n' "$has" "$old" "$new" "$path"
      for s in "$d/other.$n".* "$dir/.proofbook-$id.$n.theirs".*; do
        if [ -e "$s" ] || [ -L "$s" ]; then printf 'kept %s\n' "$s"; fi
      done
    done < "$d/manifest"
    tail -n 20 "$d/log" 2> /dev/null | sed 's/^/log /'
  fi
  for s in "$base/theirs/$id"/*; do
    if [ -e "$s" ] || [ -L "$s" ]; then printf 'kept %s\n' "$s"; fi
  done
  s=$(systemctl show --property=LoadState --property=ActiveState --property=SubState --property=UnitFileState -- "$guard.timer" 2> /dev/null | tr '\n' ' ')
  printf 'guard %s\n' "$s"
  printf 'storage %s\n' "$(storage)"
  if read -r s < "$base/outcomes/$id"; then printf 'outcome %s\n' "$s"; fi
  echo end
} 2> /dev/null
volatile() { case $(stat -f -c %T -- "$1" 2> /dev/null) in tmpfs | ramfs) ;; *) return 1 ;; esac; }
storage() {
  for s in "$all" "$units"; do
    [ -d "$s" ] || s=${s%/*}
    if volatile "$s"; then echo "volatile $s"; return; fi
  done
  stat -f -c 'lasting %T' -- "$base" 2> /dev/null || echo unknown
}

# ---------------------------------------------------------------------------------------------------------- stage

# Decodes the next line of the request into a file, which must then have the digest: digest, file.
take() {
  IFS= read -r data || fail 65 "the new files came incomplete"
  printf '%s\n' "$data" | base64 -d > /dev/null 2>&1 || fail 65 "what should be $2 came damaged"
  { printf '%s\n' "$data" | base64 -d > "$2"; } 2> /dev/null || fail 73 "$2 cannot be written (is the disk full?)"
  [ "$(sum "$2")" = "$1" ] || fail 65 "what should be $2 came damaged"
}
# Keeps the present file of the manifest's line, which must be as planned, and notes the folders that it would need.
keep() {
  has=$(present "$path")
  case $has in
    odd) [ ! -L "$path" ] || fail 76 "$path is a symbolic link to $(readlink -- "$path"): name the file that it leads to"
      fail 76 "$path is not a file that can be read" ;;
    absent) [ "$old" = absent ] || fail 76 "$path is gone; the plan saw it with sha256 $old" ;;
    *) [ "$old" != absent ] || fail 76 "$path is there now; the plan saw none" ;;
  esac
  if [ "$has" != absent ]; then
    cp -p -- "$path" "$d/old/$n" || fail 73 "$path cannot be kept in $d (is the disk full?)"
    # WHY the copy and not the file: whoever changes the file in between is found out all the same.
    has=$(sum "$d/old/$n")
    [ "$has" = "$old" ] || fail 76 "$path has changed: sha256 $has, the plan saw $old"
    flush "$d/old/$n"
  fi
  up=$dir missing=
  while [ ! -d "$up" ]; do
    if [ -e "$up" ] || [ -L "$up" ]; then fail 76 "$up is not a folder"; fi
    missing="$up$N$missing" up=${up%/*}
    [ -n "$up" ] || up=/
  done
  printf %s "$missing" >> "$d/folders"
  volatile "$up" || lasting=1
  nobody_else
}
# A file that another change may still take back is not ours to change: whichever of the two goes back last would win.
nobody_else() {
  for other in "$all"/*/manifest; do
    theirs=${other%/manifest}
    [ "$theirs" != "$d" ] && [ -f "$other" ] && [ -f "$theirs/state" ] || continue
    read -r s < "$theirs/state"
    case $s in armed | firing | failed) ;; *) continue ;; esac
    while IFS= read -r line; do
      line=${line#* } line=${line#* }
      [ "${line#* }" != "$path" ] || fail 77 "$path belongs to the change ${theirs##*/}, which is $s: confirm it or take it back first"
    done < "$other"
  done
}

stage() {
  lock 60
  get_state
  rm -rf -- "$all"/.gone.*
  request=$all/.request.$id
  cat > "$request" || fail 73 "the new files cannot be written below $base (is the disk full?)"
  manifest=$(sed -n 's/^file //p' "$request")
  [ "$(tail -n 1 "$request")" = "end $(($(printf '%s\n' "$manifest" | wc -l)))" ] || fail 65 "the new files came incomplete"
  case $state in
    none | staged) ;;
    *)
      if [ "$state" = armed ] && [ "$manifest" = "$(cat "$d/manifest")" ]; then rm -f -- "$request"; return; fi
      fail 77 "there is a change $id already, and it is $state" ;;
  esac
  drop_guard
  rm -rf -- "$d"
  mkdir -p -- "$d/old" "$d/new" "$d/words" && : > "$d/folders" || fail 73 "$d cannot be made"
  n=0 lasting=
  while IFS= read -r line; do
    case $line in
      "program "*) take "${line#* }" "$d/guard.sh" ;;
      "file "*)
        n=$((n + 1))
        split "${line#* }"
        [ "$new" = absent ] || { take "$new" "$d/new/$n" && flush "$d/new/$n"; }
        keep ;;
    esac
  done < "$request"
  if [ -n "$lasting" ]; then
    for s in "$base" "$units"; do
      ! volatile "$s" || fail 69 "$s is lost at a reboot, and the files that are changed are not: no guard could take them back"
    done
  fi
  for s in staged armed firing fired failed confirmed; do
    printf '%s\n' "$s" > "$d/words/$s" || fail 73 "$d cannot be written (is the disk full?)"
  done
  was_active=0
  [ "$1" = - ] || case $(active_state "$1") in active | activating | reloading) was_active=1 ;; esac
  printf '%s\n' "$manifest" > "$d/manifest" && printf '%s %s\n' "$1" "$was_active" > "$d/unit" ||
    fail 73 "$d cannot be written (is the disk full?)"
  : >> "$d/log"
  flush "$d/manifest" "$d/unit" "$d/folders" "$d/guard.sh" "$d"/words/*
  flush "$d/old" "$d/new" "$d/words" "$all" "$base" "${base%/*}"
  put_state staged || fail 73 "$d cannot be written (is the disk full?)"
  rm -f -- "$request"
  log "stage: $n file(s) kept"
}

# ------------------------------------------------------------------------------------------------ the guard itself

active_state() { systemctl show --property=ActiveState -- "$1" 2> /dev/null | sed s/^ActiveState=//; }

write_units() {
  write "$units/$guard.service" "# Written by proofbook; it removes itself when the change was confirmed or taken back.
[Unit]
Description=Take back the change of proofbook run $id unless it is confirmed in time
RequiresMountsFor=/var/lib/proofbook
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart=/bin/sh /var/lib/proofbook/changes/$id/guard.sh due $id
SyslogIdentifier=proofbook-guard
# It looks every minute; only what it does is worth a line.
SyslogLevel=notice
LogLevelMax=notice" 644 && write "$units/$guard.timer" "# Written by proofbook; it removes itself when the change was confirmed or taken back.
[Unit]
Description=When the change of proofbook run $id is taken back

[Timer]
OnActiveSec=$wanted
OnCalendar=$(date -u -d "@$1" '+%Y-%m-%d %H:%M:%S UTC')
Persistent=true
OnBootSec=20
OnUnitInactiveSec=60
AccuracySec=1s

[Install]
WantedBy=timers.target" 644
}
arm() {
  wanted=$1
  lock 60
  get_state
  case $verb/$state in
    arm/staged | arm/armed | extend/armed) ;;
    *) fail 77 "a change that is $state cannot be guarded" ;;
  esac
  if [ "$state" = armed ]; then
    get_left && [ "$left" -gt 0 ] || fail 77 "its time is up"
  fi
  mkdir -p -- "$units" && put_deadline "$wanted" 0 || fail 73 "the deadline cannot be written (is the disk full?)"
  read -r epoch s < "$d/deadline"
  write_units "$epoch" || fail 73 "the guard cannot be written in $units (is it read-only, or full?)"
  systemctl daemon-reload && systemctl --quiet enable "$guard.timer" && systemctl restart "$guard.timer" ||
    fail 69 "systemd did not take the guard"
  flush "$units" "$units/timers.target.wants"
  # WHY it is run once now: that systemd can read and run it must not turn out when it is needed. It sees "staged" and does nothing.
  [ "$state" = armed ] || systemctl start "$guard.service" || fail 69 "systemd could not run the guard: see systemctl status $guard.service"
  waits || fail 69 "the guard's timer does not wait"
  put_state armed || fail 73 "$d cannot be written"
  log "$verb: taken back in $wanted s unless confirmed"
}
waits() {
  systemctl is-active --quiet "$guard.timer" && systemctl is-enabled --quiet "$guard.timer"
}
drop_guard() {
  rm -f -- "$units/$guard.service.new" "$units/$guard.timer.new"
  [ -e "$units/$guard.timer" ] || [ -e "$units/$guard.service" ] || [ -L "$units/timers.target.wants/$guard.timer" ] || return 0
  systemctl --quiet disable "$guard.timer"
  systemctl stop "$guard.timer"
  rm -f -- "$units/timers.target.wants/$guard.timer" "$units/$guard.timer" "$units/$guard.service" \
    "$prefix/var/lib/systemd/timers/stamp-$guard.timer"
  flush "$units"
  systemctl daemon-reload
  systemctl reset-failed "$guard.timer" "$guard.service"
  return 0
} 2> /dev/null

# -------------------------------------------------------------------------------------------------------- install

# Both ways are prepared beside the file before it is touched; the names say whose they are, and systemd does not read them.
prepare() {
  if [ "$old" != absent ] && [ "$(present "$back")" != "$old" ]; then
    cp -p -- "$d/old/$n" "$back" && flush "$back" && [ "$(sum "$back")" = "$old" ] || fail 73 "the way back of $path cannot be written (is the disk full?)"
  fi
  [ "$(present "$path")" != "$new" ] && [ "$new" != absent ] || return 0
  cp -- "$d/new/$n" "$next" && chmod "$mode" -- "$next" || fail 73 "$next cannot be written (is the disk full?)"
  [ "$old" = absent ] || chown "$(stat -c %u:%g -- "$path")" -- "$next" || fail 73 "the owner of $path cannot be kept"
  flush "$next"
  [ "$(sum "$next")" = "$new" ] || fail 73 "$next cannot be written (is the disk full?)"
}
put_in_place() {
  [ "$(present "$path")" != "$new" ] || return 0
  if [ "$new" = absent ]; then rm -f -- "$path"; else mv -f -- "$next" "$path"; fi || fail 73 "$path cannot be replaced"
  relabel "$path"
  flush "$dir"
}
each() {
  n=0
  while IFS= read -r line <&8; do
    n=$((n + 1))
    split "$line"
    "$1"
  done 8< "$d/manifest"
}
as_planned() {
  has=$(present "$path")
  [ "$has" = "$old" ] || [ "$has" = "$new" ] || fail 76 "$path is neither as it was nor as the change has it: $has"
}
install_files() {
  lock 60
  get_state
  [ "$state" = armed ] || fail 77 "a change that is $state cannot be put in place"
  waits || fail 77 "the guard does not wait"
  get_left && [ "$left" -gt 0 ] || fail 77 "its time is up"
  each as_planned
  while IFS= read -r s; do
    [ -d "$s" ] || { mkdir -- "$s" && chmod 755 -- "$s" && relabel "$s" && flush "${s%/*}/"; } || fail 73 "$s cannot be made"
  done < "$d/folders"
  each prepare
  [ -f "$d/installing" ] || { : > "$d/installing" && flush "$d"; } || fail 73 "$d cannot be written"
  each put_in_place
  systemctl daemon-reload || fail 69 "systemd did not read its units again"
  log "install: the new files are in place"
}

# -------------------------------------------------------------------------------------------------------- suspend

put_back() {
  [ "$(present "$path")" != "$old" ] || return 0
  if [ "$old" = absent ]; then rm -f -- "$path"; else mv -f -- "$back" "$path"; fi || fail 73 "$path cannot be replaced"
  relabel "$path"
  flush "$dir"
}
prepare_back() {
  [ "$old" != absent ] && [ "$(present "$path")" != "$old" ] && [ "$(present "$back")" != "$old" ] || return 0
  cp -p -- "$d/old/$n" "$back" && flush "$back" && [ "$(sum "$back")" = "$old" ] || fail 73 "the way back of $path cannot be written (is the disk full?)"
}
# WHY "installing" stays: the unit may still run with the new files, so whoever takes the change back must restart it.
suspend_files() {
  lock 60
  get_state
  [ "$state" = armed ] || fail 77 "a change that is $state cannot be suspended"
  [ -f "$d/installing" ] || fail 77 "it was not put in place"
  waits || fail 77 "the guard does not wait"
  get_left && [ "$left" -gt 0 ] || fail 77 "its time is up"
  each as_planned
  each prepare_back
  each put_back
  each forget_ways
  remove_folders
  systemctl daemon-reload || fail 69 "systemd did not read its units again"
  log "suspend: the old files are back for a while"
}

# ----------------------------------------------------------------------------------------------------------- fire

# A name that is not taken: what it begins with, and the time.
free_name() {
  s=$(now)
  while [ -e "$1.$s" ] || [ -L "$1.$s" ]; do s=$((s + 1)); done
  printf '%s\n' "$1.$s"
}
# Keeps what somebody else wrote at a path of the change: it may be the only copy. What holds it then is named by "kept".
keep_theirs() {
  [ ! -d "$path" ] || [ -L "$path" ] || { log "fire: $path is a folder now"; return 1; }
  for kept in "$d/other.$n".*; do # a guard that tries again every minute keeps it once
    if [ "$has" != odd ] && [ "$(present "$kept")" = "$has" ]; then return 0; fi
  done
  kept=$(free_name "$d/other.$n")
  # No copy of a pipe or a device: reading it may never end.
  if { [ -L "$path" ] || [ -f "$path" ]; } && cp -pP -- "$path" "$kept" && [ "$(present "$kept")" = "$has" ]; then
    flush "$kept" "$d"
  else
    # A full disk has no room for a copy, but a name can be had, beside it.
    rm -f -- "$kept"
    kept=$(free_name "$dir/.proofbook-$id.$n.theirs")
    mv -- "$path" "$kept" && flush "$dir" || { log "fire: $path was written by somebody else and cannot be kept"; return 1; }
  fi
  log "fire: $path was neither old nor new; what it held is kept in $kept"
} 2> /dev/null
give_back() {
  has=$(present "$path")
  if [ "$has" != "$old" ]; then
    # The way back first: without it, what is there stays, whosever it is. A unit without its file is worse than either.
    if [ "$old" != absent ]; then
      [ -d "$dir" ] || { mkdir -p -- "$dir" && chmod 755 -- "$dir"; }
      [ "$(present "$back")" = "$old" ] || { cp -p -- "$d/old/$n" "$back" && flush "$back"; }
      [ "$(present "$back")" = "$old" ] || { log "fire: the way back of $path cannot be written (is the disk full?)"; bad=1; return; }
    fi
    case $has in
      absent | "$new") ;;
      *) keep_theirs || { bad=1; return; } ;;
    esac
    # A link that leads to a folder would take the file in.
    if [ "$old" = absent ] || [ -L "$path" ]; then rm -f -- "$path"; fi
    [ "$old" = absent ] || { mv -f -- "$back" "$path" && relabel "$path"; }
    flush "$dir"
    has=$(present "$path")
  fi 2> /dev/null
  if [ "$has" = "$old" ]; then rm -f -- "$back" "$next"; else log "fire: $path could not be brought back: it is $has"; bad=1; fi
}
# The folders that the change has made, the innermost first; one that somebody else uses meanwhile stays.
remove_folders() {
  sed '1!G;h;$!d' "$d/folders" | while IFS= read -r s; do rmdir -- "$s" && flush "${s%/*}/"; done 2> /dev/null
}
# Called with the lock.
fire_now() {
  touched= why=
  [ ! -f "$d/installing" ] || touched=1
  read -r unit was_active < "$d/unit" || unit=- was_active=0
  case $state/$verb in
    firing/* | failed/*) log "fire: taking back again" ;;
    */due) log "fire: taking back, since its time is up" ;;
    *) log "fire: taking back, as asked" ;;
  esac
  put_state firing
  bad=
  each give_back
  remove_folders
  # Left armed, it is tried again every minute: a disk does not stay full for ever.
  [ -z "$bad" ] || why="not everything could be brought back; tried again in a minute"
  [ -n "$why" ] || systemctl daemon-reload || why="systemd did not read its units again; tried again in a minute"
  if [ -z "$why" ] && ! set_unit; then
    s=$(active_state "$unit")
    why="the old files are back, but $unit is ${s:-in a state that systemd does not tell}"
    # Where systemd answers, it has the matter in hand (Restart=); the guard would only get in the way of a person.
    [ -z "$s" ] || drop_guard
  fi
  [ -z "$why" ] || { put_state failed; log "fire: $why"; return 1; }
  log "fire: the old files are back; $unit is $(active_state "$unit")"
  put_outcome fired
  put_state fired
  drop_guard
  # WHY last: a power cut before it is the reboot that was wanted, and the next boot finds nothing more to do.
  [ "$unit" != reboot.target ] || [ "$verb" != due ] || systemctl reboot || systemctl reboot --force
}
# WHY reset-failed: a new configuration that crashed in a loop has used up the starts that systemd allows, and the old one
# would be refused with "start request repeated too quickly".
set_unit() {
  case $unit in - | reboot.target) return 0 ;; esac
  if [ "$was_active" = 1 ]; then
    [ -n "$touched" ] || case $(active_state "$unit") in active | activating | reloading) return 0 ;; esac
    systemctl reset-failed -- "$unit" 2> /dev/null
    systemctl restart -- "$unit"
  elif [ -n "$touched" ]; then
    systemctl stop -- "$unit" 2> /dev/null
    case $(active_state "$unit") in inactive | failed) ;; *) return 1 ;; esac
  fi
}
put_outcome() {
  mkdir -p -- "$base/outcomes" && write "$base/outcomes/$id" "$1 $(now)"
}
fire() {
  lock 600
  get_state
  case $state in
    none) fail 66 "nothing is known here of a change $id" ;;
    fired) drop_guard; return ;;
    confirmed) fail 77 "it was confirmed" ;;
  esac
  fire_now || fail 1 "$why"
}
due() {
  get_state
  get_left || left=0
  case $state in
    confirmed) lock 300; get_state; [ "$state" != confirmed ] || finish ;;
    fired) lock 300; drop_guard ;;
    staged) # Never armed: nothing was changed, and nobody came back for it.
      if [ "$left" -le -3600 ]; then lock 300; get_state; [ "$state" != staged ] || drop_guard; fi ;;
    armed)
      if [ "$life" != "$at_life" ]; then
        lock 300
        rebase
        exec 9<&-
      fi
      get_left || left=0
      # WHY it waits here: a trigger that comes while this runs is lost, and the next one is a minute away.
      [ "$left" -le 5 ] || return 0
      [ "$left" -le 0 ] || sleep "$left"
      lock 600
      get_state
      get_left || left=0
      [ "$state" != armed ] || [ "$left" -gt 0 ] || fire_now ;;
    firing | failed) lock 600; get_state; case $state in firing | failed) fire_now ;; esac ;;
  esac
}

# --------------------------------------------------------------------------------------------------------- the end

as_new() {
  [ "$(present "$path")" = "$new" ] || fail 76 "$path is not as it was installed"
}
forget_ways() { rm -f -- "$back" "$next"; }
# Called with the lock, in the state "confirmed": from here on it only goes forward.
finish() {
  put_outcome confirmed || fail 73 "the outcome cannot be written (is the disk full?)"
  drop_guard
  each forget_ways
  remove
}
remove() {
  for s in "$d"/other.*; do # it may be the only copy of what somebody else wrote, so it outlives the change
    [ -e "$s" ] || [ -L "$s" ] || continue
    mkdir -p -- "$base/theirs/$id" && mv -- "$s" "$(free_name "$base/theirs/$id/$(echo "${s##*/}" | cut -d. -f1,2)")" ||
      fail 73 "what somebody else wrote cannot be kept elsewhere: $s"
    flush "$base/theirs/$id" "$base/theirs" "$base"
  done
  mv -- "$d" "$all/.gone.$id" || fail 73 "$d cannot be removed"
  flush "$all"
  rm -rf -- "$all/.gone.$id"
}
confirm() {
  lock 60
  get_state
  case $state in
    none)
      s=
      [ ! -f "$base/outcomes/$id" ] || read -r s < "$base/outcomes/$id"
      case $s in "confirmed "*) return ;; *) fail 66 "nothing is known here of a change $id" ;; esac ;;
    armed)
      [ -f "$d/installing" ] || fail 77 "it was not put in place"
      each as_new
      put_state confirmed || fail 73 "$d cannot be written" ;;
    confirmed) ;;
    *) fail 77 "a change that is $state cannot be confirmed" ;;
  esac
  finish
}
clean() {
  lock 60
  get_state
  case $state in
    none | staged | fired) drop_guard; [ ! -d "$d" ] || { [ "$state" = none ] || each forget_ways; remove; } ;;
    confirmed) finish ;;
    *) fail 77 "a change that is $state is not removed: its old files may be the only copy" ;;
  esac
  rm -rf -- "$all"/.gone.*
}

# ----------------------------------------------------------------------------------------------------------------

main() {
  # WHY: to one who may not look, everything seems to be absent.
  [ -n "$prefix" ] || [ "$(id -u)" = 0 ] || { echo "this needs root" >&2; exit 64; }
  verb=${1-} id=${2-}
  d=
  all=$base/changes
  case $id in '' | [!A-Za-z0-9]* | *[!A-Za-z0-9_.-]*) printf 'not an id of a run: %s\n' "$id" >&2; exit 64 ;; esac
  d=$all/$id guard=proofbook-guard-$id
  case $verb in arm | extend) case ${3-} in '' | *[!0-9]* | ???????*) fail 64 "not a number of seconds: ${3-}" ;; esac ;; esac
  case $verb/$# in
    stage/3) stage "$3" ;;
    arm/3 | extend/3) arm "$3" ;;
    install/2) install_files ;;
    suspend/2) suspend_files ;;
    confirm/2) confirm ;;
    fire/2) fire ;;
    status/2) ;;
    clean/2) clean ;;
    due/2) due; exit ;;
    *) fail 64 "used wrongly: $verb with $# words" ;;
  esac
  report
  exit 0
}
main "$@"

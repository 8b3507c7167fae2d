# Runs many read-only commands at once and answers for all of them. POSIX sh; the request comes on standard input,
# which stays open: its end means that nobody waits any more.
#
# WHY it looks like this: the program travels inside single quotes through whatever login shell the account has. csh
# takes no newline there and expands exclamation marks, fish treats backslashes as special, and the quote itself would
# end it. So the lines are joined by blanks (every statement ends in its own semicolon) and the code has none of these;
# only the process id of the last background command, which csh knows and leaves alone.
#
# Lanes (subshells) claim one command after the other. The main shell is an event loop on a FIFO:
#   r number deadline start            a lane has claimed a command (said first: the command may kill its lane)
#   p number pid                       its process
#   e number status start end full     it has ended; full: 1 when nothing more can be written here
#   t                                  time to look at the deadlines
#   x                                  standard input has ended
# Times are hundredths of a second of uptime: reading /proc/uptime needs no fork, and no clock step can bend it.

N=$(echo; echo .); N=${N%.};
LC_ALL=C; PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin; SYSTEMD_COLORS=0; SYSTEMD_PAGER=;
export LC_ALL PATH SYSTEMD_COLORS SYSTEMD_PAGER;
umask 077; set -f; exec 3<&0;

IFS=$N; set -- $(sed /^end$/q); IFS=" $N";
nonce=${1:-}; width=${2:-}; last=; for line; do last=$line; done;
case $last in end) ;; *) echo "refused the request came incomplete"; exit 65 ;; esac;
shift 2; count=$(($# - 1)); left=$count;

d=;
for base in /dev/shm /run "${TMPDIR:-/tmp}" /tmp /var/tmp; do
  d=$(mktemp -d "$base/proofbook.XXXXXX" 2> /dev/null) || { d=; continue; };
  { echo "$nonce" > "$d/s" && mkfifo "$d/events"; } 2> /dev/null && break;
  rm -rf "$d"; d=;
done;
case $d in "") echo "refused no temporary folder can be written in /dev/shm, /run, ${TMPDIR:-/tmp} or /var/tmp"; exit 73 ;; esac;
cd "$d";

uid=$(id -u); apart=; command -v setsid > /dev/null && apart=setsid;
clock() { read -r up rest < /proc/uptime || up=$(date +%s).00; cs=${up#*.}; cs=$((${up%.*} * 100 + ${cs#0})); } 2> /dev/null;
clock; anchor=$cs; wall=$(date +%s.%N);

live=; helpers=; lanes=0; out=;
entry() { IFS=:; set -- $1; IFS=" $N"; number=$1; pid=$2; deadline=$3; stage=$4; began=$5; };
signal() {
  case $pid in -) return ;; esac;
  kill -s "$1" -- "-$pid" || kill -s "$1" "$pid" || case $uid in 0) ;; *) sudo -n kill -s "$1" -- "-$pid" ;; esac;
} 2> /dev/null;
finish() {
  trap "" HUP INT TERM PIPE; trap - EXIT;
  kill -s KILL $helpers;
  for one in $live; do entry "$one"; signal TERM; done;
  case $live in ?*) sleep 1; for one in $live; do entry "$one"; signal KILL; done ;; esac;
  cd /; rm -rf "$d"; exit 0;
} 2> /dev/null;
trap finish EXIT HUP INT TERM PIPE;
exec 4<> events; set -C;

child() {
  number=$1; eval "set -- $2"; room=$1; root=$2; input=$3; shift 3;
  case $input in ?*) printf %b "$input" > "$d/$number.i"; exec < "$d/$number.i" ;; esac;
  ulimit -f "$(((room + 1048576) / 512))";
  case $root$uid in 0* | 10) ;; *) set -- sudo -n -- "$@" ;; esac;
  cd /; exec 3<&- 4>&- $apart "$@";
};
lane() {
  trap - EXIT HUP INT TERM; number=0;
  while [ "$number" -lt "$count" ]; do
    line=$1; shift; number=$((number + 1));
    { true > "$number.c"; } 2> /dev/null || continue;
    clock; start=$cs;
    echo "r $number $((start + ${line%% *})) $start" >&4;
    ( child "$number" "${line#* }" ) < /dev/null > "$number.o" 2> "$number.e" & pid=$!;
    echo "p $number $pid" >&4;
    wait "$pid"; status=$?; clock;
    kill -s KILL -- "-$pid" 2> /dev/null;
    full=0; { echo >> "$number.c"; } 2> /dev/null || full=1;
    echo "e $number $status $start $cs $full" >&4;
  done;
};
open_lane() { lanes=$((lanes + 1)); ( exec > /dev/null 2>&1; lane "$@" ) & helpers="$helpers $!"; };
forget() { kept=; for one in $live; do case $one in "$1":*) ;; *) kept="$kept $one" ;; esac; done; live=$kept; };

on_tick() {
  clock; now=$cs; kept=; stuck=0;
  for one in $live; do
    entry "$one";
    if [ "$now" -ge "$deadline" ]; then
      case $stage in
        0) signal TERM; kept="$kept $number:$pid:$((now + 200)):1:$began" ;;
        1) signal KILL; kept="$kept $number:$pid:$((now + 200)):2:$began" ;;
        2) out="$out$number - $began $now 3$N"; left=$((left - 1)); stuck=$((stuck + 1)) ;;
      esac;
    else kept="$kept $one"; fi;
  done;
  live=$kept;
};

( while sleep 0.2 || sleep 1; do kill -0 $$ || exit; echo t >&4; done ) < /dev/null > /dev/null 2>&1 3<&- & helpers=$!;
( read -r line <&3; echo x >&4 ) > /dev/null 2>&1 & helpers="$helpers $!";
while [ "$lanes" -lt "$width" ] && [ "$lanes" -lt "$count" ]; do open_lane "$@"; done;

gone=;
while [ "$left" -gt 0 ]; do
  read -r event said a b c full <&4;
  case $event in
    r) live="$live $said:-:$a:0:$b" ;;
    p)
      kept=;
      for one in $live; do case $one in "$said":-:*) kept="$kept $said:$a:${one#*:-:}" ;; *) kept="$kept $one" ;; esac; done;
      live=$kept ;;
    e)
      flag=;
      for one in $live; do case $one in "$said":*:0:*) flag=$full ;; "$said":*) flag=2 ;; esac; done;
      case $flag in ?*) forget "$said"; out="$out$said $a $b $c $flag$N"; left=$((left - 1)) ;; esac ;;
    t) on_tick; while [ "$stuck" -gt 0 ]; do open_lane "$@"; stuck=$((stuck - 1)); done ;;
    x) gone=1; left=0 ;;
  esac;
done;
case $gone in ?*) exit ;; esac;

number=0; names=;
while [ "$number" -lt "$count" ]; do number=$((number + 1)); names="$names $number.o s $number.e s"; done;
echo "$nonce"; echo "$wall $anchor $uid"; echo "$out$nonce";
cat $names 2> /dev/null;
echo end;

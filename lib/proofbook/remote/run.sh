# Runs one command, passes its output on as it comes, and says at the end how it ended. POSIX sh; standard input:
# the request, then the input of the command; it stays open, and its end means that nobody waits any more.
#
# WHY no quote, backslash, exclamation mark or newline: see gather.sh.
#
# WHY "listen" is in a background of its own: dash waits for every process of a pipeline, and this one outlives the
# command. It reads on after a command that wants no more input, since only the end of file has a meaning.
# The nonce stands before and after the output on both streams: what the start files of the login shell say is not the command's,
# and nobody has to wait for a daemon that keeps them open.
# "stop" is called at the deadline or when the client is gone, and again every two seconds: TERM, then KILL, then give up.

LC_ALL=C; PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin; SYSTEMD_COLORS=0; SYSTEMD_PAGER=;
export LC_ALL PATH SYSTEMD_COLORS SYSTEMD_PAGER;
N=$(echo; echo .); N=${N%.};
exec 3<&0 5>&2 < /dev/null 2> /dev/null;
read -r nonce size <&3; IFS= read -r line <&3 || { echo "refused the request came incomplete"; exit 65; };
uid=$(id -u); apart=; command -v setsid > /dev/null && apart=setsid;
clock() { read -r up rest < /proc/uptime || up=$(date +%s).00; cs=${up#*.}; cs=$((${up%.*} * 100 + ${cs#0})); } 2> /dev/null;

child() {
  eval "set -- $1"; root=$2; shift 2;
  case $root$uid in 0* | 10) ;; *) set -- sudo -n -- "$@" ;; esac;
  cd /; exec 2>&5 3<&- 5>&- $apart "$@";
};
signal() {
  kill -s "$1" -- "-$pid" || kill -s "$1" "$pid" || case $uid in 0) ;; *) sudo -n kill -s "$1" -- "-$pid" ;; esac;
};
report() { clock; echo "$nonce"; echo "$nonce $1 $wall $start $cs $stage $uid" >&5; };
stop() {
  stage=$((stage + 1));
  case $stage in
    1) signal TERM ;;
    2) signal KILL ;;
    *) report -; kill -s KILL $helpers; exit ;;
  esac;
};
insist() { for n in 1 2 3; do kill -s USR1 $$ && sleep 2 || exit; done; };
wake() { kill "$nap"; exit; };
watch() { nap=; trap wake TERM; sleep "$1" & nap=$!; wait "$nap"; trap - TERM; insist; };
listen() {
  case $size in 0) ;; *) head -c "$size" ;; esac;
  exec > /dev/null; cat; kill -0 $$ && insist;
};

status=127; stage=0; pid=; helpers=; clock; start=$cs; wall=$(date +%s.%N);
trap : PIPE; trap stop USR1 HUP TERM INT;
echo "$nonce"; echo "$nonce" >&5;

case $size in
  0) ( child "$line" ) < /dev/null & pid=$!; ( exec > /dev/null 5>&-; listen <&3 ) & helpers=$! ;;
  *) ( exec 5>&-; listen <&3 & ) | child "$line" & pid=$! ;;
esac;
( exec > /dev/null 3<&- 5>&-; watch "${line%% *}" ) & helpers="$helpers $!";
while
  seen=$stage; wait "$pid"; code=$?;
  case $code in 127) ;; *) status=$code ;; esac;
  [ "$stage" -gt "$seen" ];
do :; done;
report "$status"; kill -s TERM $helpers;
exit 0;

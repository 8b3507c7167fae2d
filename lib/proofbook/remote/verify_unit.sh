# What systemd-analyze says of a unit that is not installed: verify_unit.sh UNIT
# Standard input holds the unit's files: `F UNIT` or `F UNIT.d/NAME.conf`, then every line of the file as `|line`.
# They lie in a folder of their own under /tmp that only root can read, and that is gone at the end; nothing is loaded.
set -u
unit=$1
umask 077
folder=$(mktemp -d /tmp/proofbook-verify.XXXXXXXX) || exit 73
trap 'rm -rf "$folder"' EXIT
trap 'exit 129' HUP INT TERM PIPE
mkdir "$folder/units" "$folder/units/$unit.d" || exit 73
target=
while IFS= read -r line; do
  case $line in
    "F $unit.d/"*/*) exit 65 ;;
    "F $unit" | "F $unit.d/"*.conf) target=$folder/units/${line#F }; : >"$target" || exit 73 ;;
    "|"*) [ -n "$target" ] || exit 65; printf '%s\n' "${line#|}" >>"$target" || exit 73 ;;
    *) exit 65 ;;
  esac
done
# The folder comes first on the way on which units and drop-ins are looked for; the machine's own follow (the last colon).
SYSTEMD_UNIT_PATH="$folder/units:" SYSTEMD_LOG_TARGET=console SYSTEMD_LOG_LEVEL=notice SYSTEMD_COLORS=0 \
  systemd-analyze verify --man=no "$folder/units/$unit" </dev/null >"$folder/said" 2>&1
status=$?
sed "s|$folder/units/||g" "$folder/said"
printf 'exit %s\n' "$status"

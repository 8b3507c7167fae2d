# Sets the iommu groups of some devices to a type before any driver binds them: at the one boot for which it was armed.
# Run by gpu-iommu-identity.service as "sh iommu_identity.sh TYPE ADDRESS...", before udev starts to load drivers. POSIX sh.
#
# What it does and when goes line by line into /run/gpu-iommu-identity.log (which this boot alone keeps) and to standard
# output, which is the journal. Each line begins with the seconds since the kernel started:
#
#   begin TYPE ADDRESS...        not-armed                     not-disarmed WHY
#   disarmed                     group ADDRESS NUMBER TYPE     refused ADDRESS WHY
#   set ADDRESS TYPE             kept ADDRESS TYPE WHY         end done | refused | partly | idle
#
# Exit status: 0 every group has the type, or there was nothing to do; 1 not; 64 used wrongly.
#
# WHY the flag goes first, and is seen to be gone: whatever happens afterwards, the next boot is a clean one. Where it cannot
# go (the root is still read-only, say), a machine that hangs from what follows would hang at every boot; so nothing is done.
# WHY the groups are looked up here: their numbers change from boot to boot, addresses rarely do.

PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin LC_ALL=C
export PATH LC_ALL
prefix=${PROOFBOOK_TEST_ROOT-}
home=$prefix/etc/gpu-iommu-identity
flag=$home/armed
log=$prefix/run/gpu-iommu-identity.log
sys=$prefix/sys

say() {
  up=0
  read -r up rest < "$prefix/proc/uptime" || :
  printf '%s %s\n' "$up" "$*"
  # shellcheck disable=SC2320
  printf '%s %s\n' "$up" "$*" >> "$log" || :
} 2> /dev/null

disarm() {
  rm -f -- "$flag" 2> /dev/null
  if [ -e "$flag" ] || [ -L "$flag" ]; then
    say "not-disarmed the flag $flag cannot be removed (is the root still read-only?)"
    say "end idle"
    exit 1
  fi
  if ! { sync -- "$home" || sync; } 2> /dev/null; then
    say "not-disarmed that the flag is gone may not have reached the disk"
    say "end idle"
    exit 1
  fi
  say disarmed
}

# Why a group must not be touched, in $why; "" when it may.
look() {
  why='' device=$sys/bus/pci/devices/$1
  [ -e "$device" ] || { why="it is not on the bus"; return; }
  group=$(readlink -- "$device/iommu_group") || { why="it is in no iommu group"; return; }
  group=${group##*/}
  type=$sys/kernel/iommu_groups/$group/type was=
  read -r was < "$type" || { why="this kernel does not say the type of group $group"; return; }
  say "group $1 $group $was"
  for member in "$sys/kernel/iommu_groups/$group/devices/"*; do
    name=${member##*/}
    case " $planned " in
      *" $name "*) ;;
      *) why="group $group also holds $name, which is not in the plan"; return ;;
    esac
    if driver=$(readlink -- "$sys/bus/pci/devices/$name/driver"); then
      why="$name of its group is bound to ${driver##*/} already"
      [ "$name" != "$1" ] || why="it is bound to ${driver##*/} already"
      return
    fi
  done
} 2> /dev/null

# WHY tee: a shell's own words for a write that failed need not say the kernel's error, and old and new kernels differ in it.
put() {
  is=
  said=$(printf '%s\n' "$wanted" | tee -- "$type" 2>&1 > /dev/null) || refusal="the kernel refused the write${said:+:${said##*:}}"
  { read -r is < "$type"; } 2> /dev/null || refusal="the type cannot be read back"
  if [ "$is" = "$wanted" ]; then say "set $1 $is"; else say "kept $1 ${is:-unknown} ${refusal:-the write had no effect}"; bad=1; fi
}

main() {
  [ "$#" -ge 2 ] || { echo "used wrongly: TYPE ADDRESS..." >&2; exit 64; }
  wanted=$1
  shift
  planned=$*
  say "begin $wanted $planned"
  [ -e "$flag" ] || { say not-armed; say "end idle"; exit 0; }
  disarm
  # All are looked at before one is written: a part of the plan would be another experiment.
  bad=
  for address in "$@"; do
    look "$address"
    [ -z "$why" ] || { say "refused $address $why"; bad=1; }
  done
  [ -z "$bad" ] || { say "end refused"; exit 1; }
  for address in "$@"; do
    refusal=
    look "$address"
    if [ -n "$why" ]; then say "refused $address $why"; bad=1; else put "$address"; fi
  done
  [ -z "$bad" ] || { say "end partly"; exit 1; }
  say "end done"
}
main "$@"

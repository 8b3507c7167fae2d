#!/bin/sh
# Process 1 of a box's namespaces: mounts what the container needs where only it is seen, and starts it again when it reboots.
#   box.sh NAME ROOTFS SEED HOME GROUP
# ROOTFS is only read; everything that the machine writes lies in memory, on top of it and of the files of SEED.
set -eu
name=$1 rootfs=$2 seed=$3 home=$4 group=$5

ip link set lo up
# Whatever this machine has there (often the old hierarchies beside the new one): the container gets the new one alone.
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p "/sys/fs/cgroup/$group/machine"
echo $$ > "/sys/fs/cgroup/$group/machine/cgroup.procs"
# systemd-nspawn refuses to clean up its folder under /run at a reboot when that lies on a disk.
mkdir -p /run/systemd
mount -t tmpfs -o mode=755 lab-run /run/systemd

mount -t tmpfs -o mode=755,size=2g lab-layer "$home/layer"
mkdir "$home/layer/upper" "$home/layer/work"
cp -a "$seed/." "$home/layer/upper/"
chown -R 0:0 "$home/layer/upper"
mount -t overlay -o "lowerdir=$rootfs,upperdir=$home/layer/upper,workdir=$home/layer/work" lab-root "$home/root"

trap 'exit 143' TERM
while :; do
  # 133: it wants to be rebooted. The file power-off is a cable that is pulled: the machine is dead until it goes away, and
  # the file dark says that it is.
  status=0
  systemd-nspawn --quiet --boot --directory="$home/root" --machine="$name" --register=no --keep-unit --link-journal=no \
    --resolv-conf=off --timezone=off --console=read-only --capability=CAP_NET_ADMIN --kill-signal=SIGRTMIN+3 </dev/null || status=$?
  if [ -e "$home/power-off" ]; then
    : > "$home/dark"
    while [ -e "$home/power-off" ]; do sleep 0.05; done
    # WHY: a control group remembers that it was killed, and some kernels (seen: 6.18) then also kill what a systemd 257 in
    # it starts in a younger group. A machine that was switched on again begins with none.
    find "/sys/fs/cgroup/$group/machine" -mindepth 1 -depth -type d -exec rmdir {} + 2>/dev/null || true
    rm -f "$home/dark"
  elif [ "$status" -ne 133 ]; then
    exit "$status"
  fi
done

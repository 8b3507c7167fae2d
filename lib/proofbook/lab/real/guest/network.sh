#!/bin/sh
# The one network of a virtual machine: QEMU's own, on the card that is QEMU's; other cards are there to be looked at.
modprobe virtio_net
until card=$(grep -l DRIVER=virtio_net /sys/class/net/eth*/device/uevent 2>/dev/null | head -n 1) && [ -n "$card" ]; do
  sleep 0.05
done
card=${card#/sys/class/net/}
card=${card%%/*}
ip link set lo up
ip address replace 10.0.2.15/24 dev "$card"
ip link set "$card" up

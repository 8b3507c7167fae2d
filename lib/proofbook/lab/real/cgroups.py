"""The control groups of the boxes: looked at, frozen, killed and removed, wherever this machine has its cgroup2 hierarchy."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from proofbook.lab.real.packages import tool

__all__ = ["left", "remove"]

#: Finds the group in a cgroup2 mount that only this shell sees, ends what is in it, and removes it from the leaves up.
_REMOVE = """\
mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit 0
cd "/sys/fs/cgroup/$1" 2>/dev/null || exit 0
[ ! -e cgroup.kill ] || echo 1 > cgroup.kill
tries=0
while [ -d "/sys/fs/cgroup/$1" ] && [ $tries -lt 100 ]; do
  find "/sys/fs/cgroup/$1" -depth -type d -exec rmdir {} + 2>/dev/null
  [ -d "/sys/fs/cgroup/$1" ] && sleep 0.02
  tries=$((tries + 1))
done
cd /
[ ! -d "/sys/fs/cgroup/$1" ]
"""


def remove(group: str) -> None:
    """End what still runs in a group, and remove the group. Nothing happens when there is none."""
    argv = [tool("unshare"), "--mount", "--propagation", "private", "sh", "-c", _REMOVE, "remove", group]
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=30)


def left(group: str) -> bool:
    """Whether a group is there now, as far as a cgroup2 hierarchy is mounted where this process can see it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            with contextlib.suppress(OSError):
                if os.path.isdir(Path(before.split()[4]) / group):
                    return True
    return False

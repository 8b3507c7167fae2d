"""What keeps even root from writing on a simulated machine: immutable files, a file system that is read-only, or full.

It comes about as on a real one (``chattr +i``, ``mount -o remount,ro /``, ``fallocate``), and goes the same way.
"""

from __future__ import annotations

import posixpath

from proofbook.lab.sim.os_state import System
from proofbook.lab.sim.vfs import os_error

#: Free on the root file system of an untouched machine, KiB; and all of it.
_FREE_KIB, SIZE_KIB = 871_088_128, 912_345_088


def why_not(system: System, path: str, *, grows: bool = True) -> OSError | None:
    """Why a file cannot be written, replaced or removed; None when it can. ``grows``: bytes are needed that were not there."""
    if system.read_only:
        return os_error("EROFS", path)
    if path in system.immutable or posixpath.dirname(path) in system.immutable:
        return os_error("EPERM", path)
    return os_error("ENOSPC", path) if grows and free_kib(system) <= 0 else None


def free_kib(system: System) -> int:
    """Free on the root file system of a userland."""
    claimed = sum(n.bytes_claimed for p, n in system.files.items() if n is not None and not p.startswith("/models/"))
    return _FREE_KIB - claimed // 1024

"""The lab's clock: real time passes 1:1, and what is skipped while somebody waits on purpose is added to it.

The clock is one small file that both sides map: the machine writes, everybody reads. ``now`` is then a memory read, and
nothing that a run does depends on how slow its runner is.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("=ddd")  # lab time at the base, CLOCK_MONOTONIC at the base, seconds skipped since


class SharedClock:
    """The clock file. The lab's process opens it with ``writable=True``; there is one such process."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o600)
        if writable and os.fstat(self._fd).st_size < _LAYOUT.size:
            os.pwrite(self._fd, _LAYOUT.pack(time.time(), time.monotonic(), 0.0), 0)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(self._fd, _LAYOUT.size, access=access)
        # WHY a view: struct.pack_into clears the place before it writes, and a reader may look in between. An element of a
        # view is read and written as one aligned 8-byte word.
        self._words = memoryview(self._map).cast("d")

    def now(self) -> float:
        """Lab time in seconds since the epoch."""
        base, monotonic, skipped = self._words
        return float(base + (time.monotonic() - monotonic) + skipped)

    @property
    def skipped(self) -> float:
        """Seconds that passed in the lab and not outside."""
        return float(self._words[2])

    def skip(self, seconds: float) -> None:
        """Let ``seconds`` pass at once. The one writer is the lab's process."""
        self._words[2] = self.skipped + seconds

    def set(self, lab_time: float) -> None:
        """Start from ``lab_time`` anew (only before anybody reads: CLOCK_MONOTONIC does not outlive the runner's boot)."""
        _LAYOUT.pack_into(self._map, 0, lab_time, time.monotonic(), 0.0)

"""The lab's clock is read by others while it is moved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from proofbook.lab.sim.clock import SharedClock

_MOVER = """
import sys
from pathlib import Path
from proofbook.lab.sim.clock import SharedClock
clock = SharedClock(Path(sys.argv[1]), writable=True)
for _ in range(60_000):
    clock.skip(0.001)
"""


def test_no_reader_sees_a_time_that_never_was(tmp_path: Path) -> None:
    SharedClock(tmp_path / "clock", writable=True).skip(400.0)
    reader = SharedClock(tmp_path / "clock")
    mover = subprocess.Popen([sys.executable, "-c", _MOVER, str(tmp_path / "clock")])
    seen, reads = 400.0, 0
    while mover.poll() is None:
        now = reader.skipped
        assert now >= seen
        seen, reads = now, reads + 1
    assert reads and abs(reader.skipped - 460.0) < 0.01

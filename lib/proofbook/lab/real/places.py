"""Where the real lab keeps things: machines in the state folder, what was built in the cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proofbook.errors import LabError

__all__ = ["Places", "held", "locked"]


@dataclass(frozen=True, slots=True)
class Places:
    """``state`` holds a folder for each machine, ``cache`` what was built; the cache can be removed at any time."""

    state: Path
    cache: Path

    @classmethod
    def default(cls) -> Places:
        """``$PROOFBOOK_LAB_DIR`` and its ``cache``, else the user's own state and cache folders."""
        named = os.environ.get("PROOFBOOK_LAB_DIR")
        if named:
            return cls(Path(named) / "real", Path(named) / "cache")
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(state / "proofbook" / "lab" / "real", cache / "proofbook")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; it is made with its folder, and waits for whoever holds it. Raises LabError when it cannot be made."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LabError(f"{path} cannot be used: {error}", hint="set PROOFBOOK_LAB_DIR to a folder that can be written") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def held(path: Path) -> bool:
    """Whether some process holds the lock file now. The kernel lets go of it for a process that was killed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False

"""Commands that look where no program of the machine does by itself: a unit held against systemd, the packages of a Python."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proofbook.errors import CannotTell
from proofbook.model import Command, Result
from proofbook.remote.ask import _program

__all__ = ["SGLANG_VERSION", "VERIFY_UNIT", "Packages", "Verified", "parse_packages", "parse_verified", "verify_unit"]

VERIFY_UNIT = _program("verify_unit.sh")
SGLANG_VERSION = _program("sglang_version.py")


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``systemd-analyze verify`` said. WHY both: it warns of ignored lines and exits with 0."""

    exit_status: int
    lines: tuple[str, ...]


def verify_unit(unit: str, files: Sequence[tuple[str, bytes]], *, root: bool = True, timeout_s: float = 60.0) -> Command:
    """Ask systemd-analyze about ``files``: the main one named as the unit, drop-ins by their file name alone (``50-x.conf``).

    The bytes travel on standard input, which is kept nowhere. Raises ValueError for a name that is no file name.
    """
    parts = []
    for name, data in files:
        if "/" in name or "\n" in name or (name != unit and not name.endswith(".conf")):
            raise ValueError(f"not a file of a unit: {name!r}")
        parts.append(b"F " + (name if name == unit else f"{unit}.d/{name}").encode() + b"\n")
        parts += [b"|" + line + b"\n" for line in data.removesuffix(b"\n").split(b"\n")]
    return Command(
        ("sh", "-c", VERIFY_UNIT, "proofbook-verify-unit", unit), timeout_s=timeout_s, root=root, stdin=b"".join(parts)
    )


def parse_verified(result: Result) -> Verified:
    """Read the answer to :func:`verify_unit`. Raises CannotTell when systemd-analyze did not run or did not end."""
    lines = result.expect().splitlines()
    found = re.fullmatch(r"exit (\d+)", lines[-1]) if lines else None
    if not found:
        raise CannotTell("systemd-analyze verify did not come to its end")
    status = int(found[1])
    if status in (126, 127):
        raise CannotTell(f"systemd-analyze is not there: {' '.join(lines[:-1])[:200] or f'exit status {status}'}")
    return Verified(status, tuple(line for line in lines[:-1] if line.strip()))


@dataclass(frozen=True, slots=True)
class Packages:
    """The version of a Python and of the packages that it would import; None for one that is not installed."""

    python: str
    versions: Mapping[str, str | None]


def parse_packages(result: Result) -> Packages:
    """Read what SGLANG_VERSION printed. Raises CannotTell when it is not that."""
    text = result.expect()
    try:
        said = json.loads(text.strip().splitlines()[-1])
        return Packages(str(said["python"]), {str(k): None if v is None else str(v) for k, v in said["packages"].items()})
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CannotTell(f"not an answer about packages: {text[:200]!r}") from error

"""lease.sh: who may change a machine now, and which approvals were used; what goes there and comes back.

Every verb answers with the machine's time and boot, how many approvals were used, and the lease where there is one::

    now=1775661015
    boot_now=7c0e2c5b3f0e4f0a9c550a4b1d2e3f40
    approvals=3
    run=20260408T150412Z-3f2a
    holder=mira@laptop
    taken=1775660652
    expires=1775664252
    boot_id=7c0e2c5b3f0e4f0a9c550a4b1d2e3f40
    expired=no
    end
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from proofbook.errors import CannotTell
from proofbook.model import Command, Result
from proofbook.remote.ask import _program
from proofbook.remote.guard import check_id

__all__ = ["HELD", "LEASE", "USED", "Lease", "Use", "lease_command", "parse_approvals", "parse_lease", "parse_use"]

#: Text of lease.sh.
LEASE = _program("lease.sh")

#: Exit statuses: held by another run (or by none, where ours is needed); the approval was used before.
HELD, USED = 75, 76
_EXIT = (0, 64, 73, HELD, USED)


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may change the machine. ``expired`` and ``other_boot`` are the machine's own judgement, by its own clock."""

    run: str
    holder: str
    taken: datetime
    expires: datetime
    boot_id: str  # 32 hex digits: the boot in which it was taken
    now: datetime  # the machine's clock when it answered
    expired: bool
    other_boot: bool  # the machine was rebooted since it was taken


@dataclass(frozen=True, slots=True)
class Use:
    """By whom an approval was used, and when."""

    run: str
    at: datetime


def lease_command(verb: str, *words: str, timeout_s: float = 30.0) -> Command:
    """A verb of lease.sh: acquire RUN HOLDER TTL_S · renew RUN TTL_S · release RUN · show · break RUN WHO · use DIGEST RUN."""
    return Command(("sh", "-c", LEASE, "proofbook-lease", verb, *words), timeout_s=timeout_s, root=True)


def holder_name(text: str) -> str:
    """A person's name as one line. Raises ValueError when nothing readable is left."""
    name = " ".join(re.sub(r"[\x00-\x1f\x7f]", " ", text).split())[:200]
    if not name:
        raise ValueError("a lease has a holder")
    return name


def _pairs(result: Result) -> dict[str, str]:
    text = result.expect(*_EXIT)
    lines = text.splitlines()
    if not lines or lines[-1] != "end":
        said = (result.error_text.strip() or text.strip()).splitlines()
        raise CannotTell("no whole answer of the lease program" + (f": {said[-1][:300]}" if said else ""))
    if result.exit_status in (64, 73):
        raise CannotTell(f"the lease could not be worked on: {result.error_text.strip()[:300]}")
    return dict(line.partition("=")[::2] for line in lines[:-1])


def parse_lease(result: Result) -> Lease | None:
    """The lease that holds after a verb; None when there is none. Raises CannotTell."""
    one = _pairs(result)
    if "run" not in one:
        return None
    try:
        return Lease(
            run=check_id(one["run"]),
            holder=one["holder"],
            taken=_time(one["taken"]),
            expires=_time(one["expires"]),
            boot_id=one["boot_id"],
            now=_time(one["now"]),
            expired=one["expired"] == "yes",
            other_boot=one["boot_id"] != one["boot_now"],
        )
    except (KeyError, ValueError) as error:
        raise CannotTell(f"not an answer of the lease program: {result.text[:200]!r}") from error


def parse_approvals(result: Result) -> int:
    """How many approvals were ever used on the machine. Raises CannotTell."""
    one = _pairs(result)
    try:
        return int(one["approvals"])
    except (KeyError, ValueError) as error:
        raise CannotTell(f"not an answer of the lease program: {result.text[:200]!r}") from error


def parse_use(result: Result) -> Use | None:
    """By whom an approval was used, as the verb ``use`` says it; None when the lease was not ours. Raises CannotTell."""
    one = _pairs(result)
    try:
        return Use(one["used_by"], _time(one["used_at"])) if "used_by" in one else None
    except (KeyError, ValueError) as error:
        raise CannotTell(f"not an answer of the lease program: {result.text[:200]!r}") from error


def _time(epoch: str) -> datetime:
    return datetime.fromtimestamp(int(epoch), UTC)

"""Is another run at work on the machine? Known at the first look, not only when the gate has been passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import tell, unseen
from proofbook.intent import ContainerSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.change_state import Held, HeldMachine

__all__ = ["HeldByNobody"]


@dataclass(frozen=True)
class HeldByNobody(Check):
    """No other run holds the machine's lease; where one does, what becomes of its change and what to type.

    ``container``: where its change would be looked for; the lease is the host's.
    """

    container: ContainerSpec | None = None
    name: ClassVar[str] = "machine.HeldByNobody"
    title: ClassVar[str] = "Does no other run change this machine?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (HeldMachine(self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        held, why = tell(seen, HeldMachine(self.container)).pair
        if held is None:
            return [unseen(self, f"whether another run holds this machine: {why}")]
        if held.lease is None:
            return [self.passed("no other run holds this machine")]
        lease = held.lease
        until = f"{'which ran out at' if lease.expired else 'until'} {lease.expires:%Y-%m-%d %H:%M:%S} UTC"
        return [
            self.failed(
                f"run {lease.run} of {lease.holder} holds this machine's lease {until}; whether it still lives is not known from "
                f"here; {_guard(held)}",
                subject=lease.run,
                observed=held.guard.state if held.guard is not None else "not known",
                action=Suggested.WAIT,
                what_to_do=f"When it is at work, let it end. When it is dead: `proofbook resume {lease.run}` goes on with it, "
                f"`proofbook rollback {lease.run}` undoes it; either gives the lease back.",
            )
        ]


def _guard(held: Held) -> str:
    """What the machine itself will do about that run's change."""
    guard = held.guard
    if guard is None:
        return f"what it has changed is not known: {held.guard_unknown}"
    if guard.guarded:
        at = f" at {guard.deadline:%Y-%m-%d %H:%M:%S} UTC" if guard.deadline is not None else ""
        return f"its guard takes the change of {guard.unit or 'its unit'} back{at} unless it is kept"
    if guard.state == "none":
        return "no guarded change of it is waiting here"
    return f"its change of {guard.unit or 'its unit'} is {guard.state}"

"""A change that must not be made: its plan is empty and says why, so that a gate asks nobody to approve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.model import Applied, Change, Identity, Plan, Probe, Seen

__all__ = ["NotToBeMade"]


@dataclass(frozen=True)
class NotToBeMade(Change):
    """What was wanted, and why it is not done."""

    wanted: str
    reasons: tuple[str, ...]
    name: ClassVar[str] = "nothing"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def plan(self, seen: Seen, host: Identity) -> Plan:
        facts = tuple(f"not possible: {reason}" for reason in self.reasons)
        return Plan(self.name, f"{self.wanted}: not done", host, {}, (), (), "", (), 0.0, facts)

    def apply(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        return Applied(plan, "nothing-to-do", plan.title)

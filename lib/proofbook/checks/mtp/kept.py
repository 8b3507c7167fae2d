"""A change that was kept before: whoever goes on with its run finds nothing left to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import tell, unseen
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Decision, Finding, Probe, Seen, Suggested
from proofbook.probes.change_state import GuardState
from proofbook.probes.systemd import UnitState

__all__ = ["KeptBefore"]


@dataclass(frozen=True)
class KeptBefore(Check):
    """The machine says that the change of run ``origin`` was kept; ``decision`` is why, as that run wrote it down."""

    service: ServiceSpec
    container: ContainerSpec | None
    origin: str
    decision: Decision | None = field(default=None, repr=False)
    name: ClassVar[str] = "mtp.KeptBefore"
    title: ClassVar[str] = "What became of the change?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (GuardState(self.origin, self.container), UnitState(self.service.name, self.container))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        status, why = tell(seen, GuardState(self.origin, self.container)).pair
        if status is None:
            return [unseen(self, why, self.service.spec)]
        at = f" at {status.outcome_at:%Y-%m-%d %H:%M} UTC" if status.outcome_at is not None else ""
        because = f" ({self.decision.rung}: {self.decision.because})" if self.decision is not None else ""
        found = [
            self.passed(
                f"it was kept{at} by run {self.origin}{because}; that stands, and none of its questions is asked again",
                subject=self.service.spec,
                observed=status.outcome or status.state,
            )
        ]
        unit, unknown = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [*found, unseen(self, unknown, self.service.spec)]
        if unit.active != "active":
            found.append(
                self.failed(
                    f"it does not run now: {unit.active} ({unit.sub}), result {unit.result}",
                    subject=self.service.spec,
                    action=Suggested.ROLL_BACK,
                    what_to_do=f"Read its journal; `proofbook rollback {self.origin}` brings the old configuration back.",
                )
            )
        return found

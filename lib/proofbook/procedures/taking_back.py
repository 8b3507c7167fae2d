"""Taking back what another run began: no runbook of its own, since it is done when there is no time for one.

``proofbook rollback RUN`` says its steps: reach the machine, undo from the plan, look whether the old state is back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from proofbook.model import Applied, Check, Finding, Plan, Probe, Seen, Suggested
from proofbook.procedures.base import Procedure, ProcedureParameters


class Parameters(ProcedureParameters):
    host: str = Field(description="the machine of the run that is taken back")
    run: str = Field(description="the run that is taken back")
    approver: str = Field(default="", description="whose decision it is")


PROCEDURE = Procedure(
    name="rollback",
    title="Taking back a change",
    purpose="Undo what an earlier run began or kept, and show by evidence that the old state is back.",
    changes_host=True,
    undo="none: run the runbook again to make the change anew",
    takes="as long as the service needs to start",
    parameters=Parameters,
    accepts=lambda _parameters, _spec: None,
)


@dataclass(frozen=True)
class TakenBack(Check):
    """The undo's own proof: what it read back after it had restored everything."""

    undone: Applied
    name: ClassVar[str] = "taken-back"
    title: ClassVar[str] = "Is the old state back?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> list[Finding]:
        if self.undone.outcome in ("rolled-back", "restored"):
            return [self.passed(self.undone.summary, observed=dict(self.undone.facts))]
        by_hand = self.undone.facts.get("by_hand", ())
        return [
            self.failed(
                self.undone.summary,
                action=Suggested.CONSOLE,
                what_to_do="on the machine, by hand: " + "; ".join(by_hand) if by_hand else "look at the machine on its console",
            )
        ]


def not_looked_at(plan: Plan, host: str) -> str:
    """What is left open when a change was taken back, and what answers it."""
    if any("reboot" in word for action in plan.undo for word in action.argv):
        return (
            "whether the services of the machine serve again, and what comes later than its boot: "
            f"`proofbook run reboot-verification --host {host}` answers it"
        )
    return "how the service answers under load, and whether it goes on doing so"


def checks(undone: Applied) -> tuple[Check, ...]:
    return (TakenBack(undone),)

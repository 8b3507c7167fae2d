"""A plan without actions: the speculation is there already, or the change cannot be made. Nothing else is asked then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import join
from proofbook.intent import ServiceSpec
from proofbook.model import Check, Finding, Plan, Probe, Seen, Suggested

__all__ = ["NOT_ASKED", "NothingToChange"]

#: What a run that changes nothing leaves open.
NOT_ASKED = "whether drafts are accepted, whether answers are right, whether it holds under load, and what it gains"


@dataclass(frozen=True)
class NothingToChange(Check):
    """Why ``plan`` has no actions. ``there``: unit and process have what was wanted; ``kept_by``: the run that kept it, or ""."""

    service: ServiceSpec
    plan: Plan = field(repr=False)
    there: bool = False
    kept_by: str = ""
    name: ClassVar[str] = "mtp.NothingToChange"
    title: ClassVar[str] = "Is there anything to change?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        about = {"subject": self.service.spec}
        if not self.there:
            return [
                self.failed(
                    f"the change cannot be planned: {join(self.plan.facts, 3)}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Mend what is said here, then run it again.",
                    **about,
                )
            ]
        by = f"run {self.kept_by} kept it" if self.kept_by else "which run put it there is not known here"
        return [
            self.passed(f"it has this speculation already ({by}): there is nothing to do", **about),
            self.not_checked(f"in this run: {NOT_ASKED}", **about),
        ]

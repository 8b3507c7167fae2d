"""Resets of a GPU that did not start in the experiment's boot: what may be tried, and what an attempt came to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.identity.rule import Attempt, Came
from proofbook.checks.looking import tell, unseen
from proofbook.model import Check, Finding, Probe, Seen
from proofbook.probes.pci import ResetMethods

__all__ = ["ResetsListed", "not_verified", "shared_out"]


def shared_out(
    wanted: Sequence[str], treated: Sequence[str], listed: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, tuple[str, ...]], tuple[Attempt, ...]]:
    """What may be tried on each treated GPU, in the order in which it was asked for; and what may not, with the reason."""
    may = {pci: tuple(m for m in wanted if m in listed.get(pci, ())) for pci in treated}
    not_listed = [
        Attempt(pci, m, Came.NOT_TRIED, f"it is not in its reset_method ({' '.join(listed.get(pci, ())) or 'which is empty'})")
        for pci in treated
        for m in wanted
        if m not in may[pci]
    ]
    return may, tuple(not_listed)


def not_verified(attempts: Sequence[Attempt], *, asked: bool) -> str:
    """What the record must say was not verified about resets."""
    if not asked:
        return (
            "No reset of a GPU was tried in boot A: a function-level reset can leave such a GPU dead until a power cycle, "
            "so whether one would clear a refusal is not known."
        )
    tried = [a for a in attempts if a.came is not Came.NOT_TRIED]
    not_tried = [a for a in attempts if a.came is Came.NOT_TRIED]
    said = f"Tried: {'; '.join(map(str, tried)) or 'nothing'}."
    if not_tried:
        said += f" {'; '.join(map(str, not_tried))}. Whether one of these would clear a refusal is not known."
    return f"{said} Each was tried once, in one boot; a method that is not named here was not tried."


@dataclass(frozen=True)
class ResetsListed(Check):
    """Which of the methods that are asked for the kernel has for each treated GPU. What it does not list will not be tried."""

    treated: tuple[str, ...]
    methods: tuple[str, ...]
    name: ClassVar[str] = "identity.ResetsListed"
    title: ClassVar[str] = "Which of the resets that are asked for does the kernel have for these GPUs?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (ResetMethods(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        listed, why = tell(seen, ResetMethods()).pair
        if listed is None:
            return [unseen(self, why)]
        may, not_listed = shared_out(self.methods, self.treated, listed)
        findings = [
            self.passed(
                f"{', '.join(methods)}: would be tried if it does not start in boot A", subject=pci, observed=list(methods)
            )
            for pci, methods in may.items()
            if methods
        ]
        return [*findings, *(self.not_checked(str(a), subject=a.pci) for a in not_listed)]

"""Does the server answer us? Where the baseline was not answered there is nothing to compare with, and nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join
from proofbook.checks.mtp.fit import KEY
from proofbook.intent import ServiceSpec
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["CanBeAsked"]


@dataclass(frozen=True)
class CanBeAsked(Check):
    """The baseline's requests were answered. A server that wants an API key, or another one, says so at the first of them."""

    measurement: Measurement = field(repr=False)
    service: ServiceSpec
    name: ClassVar[str] = "mtp.CanBeAsked"
    title: ClassVar[str] = "Does the server answer what we ask?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        value = self.measurement.value
        about: dict[str, Any] = {"subject": self.service.spec, "evidence": self.measurement.evidence}
        refused = value.get("refused")
        if refused:
            given = self.service.has_key
            return [
                self.failed(
                    f"it refuses us ({refused}): "
                    + ("the API key that was given is not the one that it demands" if given else "it demands an API key"),
                    action=Suggested.FIX_CONFIG,
                    what_to_do=(
                        "See which key its clients use, and whether what api_key_env or api_key_file names is that one."
                        if given
                        else KEY
                    ),
                    **about,
                )
            ]
        levels = [level for level in value.get("levels", ()) if not level.get("skipped") or level.get("completed")]
        answered = sum(int(level["completed"]) for level in levels)
        if not answered:
            why = next(iter(self.measurement.problems), "nothing was asked")
            return [
                self.failed(
                    f"no request was answered, so there is nothing to compare with: {why}",
                    action=Suggested.LOOK,
                    what_to_do="Bring it to answer as it is, before anything is changed.",
                    **about,
                )
            ]
        cut = [
            f"{level['completed']} of {level['asked']} at concurrency {level['level']}"
            for level in levels
            if not level["complete"]
        ]
        if cut:
            return [
                self.warned(
                    f"not every request was answered: {join(cut, 4)}",
                    action=Suggested.LOOK,
                    what_to_do="There is no gain to be shown at these concurrencies.",
                    **about,
                )
            ]
        return [self.passed(f"all {counted(answered, 'request')} were answered", **about)]

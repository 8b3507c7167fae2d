"""Is it worth it? Only where the lower bound of the interval lies above "no faster" is there a gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import join
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["WorthIt"]


@dataclass(frozen=True)
class WorthIt(Check):
    """Paired speed-ups per concurrency, each with its 95 % interval. ``wanted``: concurrencies that must gain (none: any one).

    A level that got slower is a limit; one that must gain and does not, or none that gains, means that it does not pay.
    """

    measurement: Measurement = field(repr=False)
    subject: str = ""
    wanted: tuple[int, ...] = ()
    again: Measurement | None = field(default=None, repr=False)
    name: ClassVar[str] = "mtp.WorthIt"
    title: ClassVar[str] = "Is it worth it?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        value = self.measurement.value
        levels = value.get("levels", ())
        measured = [level for level in levels if level.get("verdict") != "not-measured"]
        if not measured:
            why = (
                join([str(level.get("skipped") or "not both arms were complete") for level in levels], 3)
                or "no level was measured"
            )
            return [self.unknown(f"no concurrency was measured in both arms: {why}", **self._about())]
        found = [self._level(level) for level in levels]
        return [self._whole(value, measured), *found, *self._fair(value), *self._drift()]

    def _about(self, **more: Any) -> dict[str, Any]:
        return {"subject": self.subject, "evidence": self.measurement.evidence, **more}

    def _whole(self, value: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> Finding:
        gains = [int(n) for n in value.get("gains_at", ())]
        missing = [n for n in self.wanted if n not in gains]
        best = max(
            (level for level in measured if level.get("speedup")), key=lambda s: float(s["speedup"]["estimate"]), default=None
        )
        about = self._about(expected=list(self.wanted) or "any", observed=gains)
        what = "Take it back: a change that does not pay only adds ways to fail."
        if not gains:
            said = f"; the best is {_words(best)}" if best else ""
            return self.failed(f"no gain is shown at any concurrency{said}", action=Suggested.ROLL_BACK, what_to_do=what, **about)
        if missing:
            return self.failed(
                f"no gain is shown at the concurrency that counts ({join(map(str, missing))}); gains at {join(map(str, gains))}",
                action=Suggested.ROLL_BACK,
                what_to_do=what,
                **about,
            )
        return self.passed(f"gains at concurrency {join(map(str, gains))}; the best is {_words(best)}", **about)

    def _level(self, level: Mapping[str, Any]) -> Finding:
        n, verdict = level.get("level"), level.get("verdict")
        if verdict == "not-measured":
            return self.not_checked(
                f"concurrency {n} was not measured: {level.get('skipped') or 'an arm was not complete'}", **self._about()
            )
        about = self._about(expected="interval above 1", observed=level.get("speedup"))
        words = f"{_words(level)}, {level.get('pairs')} pairs of prompts"
        if not level.get("enough", True):
            return self.warned(f"{words}: too few for a verdict", **about)
        if verdict == "gain":
            return self.passed(words, **about)
        if verdict == "loss":
            return self.warned(
                f"{words}: slower than before",
                action=Suggested.FIX_CONFIG,
                what_to_do="Keep the load below it, or use fewer steps.",
                **about,
            )
        return self.warned(f"{words}: no gain is shown, the interval holds 1", **about)

    def _fair(self, value: Mapping[str, Any]) -> list[Finding]:
        if value.get("fair", True):
            return []
        others = join([str(name) for name in value.get("confounders", ())], 4)
        sentence = str(value.get("fairness") or "more changed between the arms than speculation")
        return [
            self.warned(
                f"{sentence} ({others}): the gain is that of all of it together",
                action=Suggested.LOOK,
                what_to_do=(
                    "For speculation alone, measure a baseline with the same mamba strategy and overlap, without speculation."
                ),
                **self._about(),
            )
        ]

    def _drift(self) -> list[Finding]:
        if self.again is None:
            return [
                self.not_checked("the first configuration was not measured a second time (A-B-A), so slow drift is not excluded")
            ]
        drifted = self.again.value.get("drifted_at", ())
        if drifted:
            return [
                self.warned(
                    "the first configuration was not as fast the second time at concurrency "
                    f"{join(map(str, drifted))}: the machine drifts",
                    action=Suggested.LOOK,
                    what_to_do="See what else ran, and the clocks; measure once more.",
                    **self._about(),
                )
            ]
        return [self.passed("measured a second time, the first configuration is as fast as before", **self._about())]


def _words(level: Mapping[str, Any] | None) -> str:
    """``1.35x at concurrency 1 (95 % interval 1.28 to 1.42)``."""
    if level is None or not level.get("speedup"):
        return "not told"
    speed = level["speedup"]
    return (
        f"{float(speed['estimate']):.2f}x at concurrency {level.get('level')} "
        f"(95 % interval {float(speed['low']):.2f} to {float(speed['high']):.2f})"
    )

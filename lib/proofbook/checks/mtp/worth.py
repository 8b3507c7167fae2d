"""Is it worth it? Only where the lower bound of the interval lies above "no faster" is there a gain.

And is it the change? A machine that became faster meanwhile, or an old server that any restart would have made faster, gives a
gain too. It is told apart by measuring the old configuration a second time (A-B-A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import join
from proofbook.model import Applied, Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["NotDrift", "WorthIt"]

#: How far the old configuration may be from its first measurement before it is worth a warning. WHY not any difference that is
#: more than chance: with enough prompts a tenth of a percent is, and nobody would act on it.
DRIFT = 0.02


@dataclass(frozen=True)
class WorthIt(Check):
    """Paired speed-ups per concurrency, each with its 95 % interval. ``wanted``: concurrencies that must gain (none: any one).

    A level that got slower is a limit; one that must gain and does not, or none that gains, means that it does not pay.
    ``again_follows``: whether the old configuration will be measured a second time, see :class:`NotDrift`.
    """

    measurement: Measurement = field(repr=False)
    subject: str = ""
    wanted: tuple[int, ...] = ()
    again_follows: bool = False
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
        if self.again_follows:
            return []
        return [self.not_checked("the first configuration was not measured a second time (A-B-A), so slow drift is not excluded")]


@dataclass(frozen=True)
class NotDrift(Check):
    """A gain counts when it holds against the old configuration measured before the change, and measured again after it.

    ``suspended``: how the old configuration was brought back for that. ``wanted``: as for :class:`WorthIt`.
    """

    suspended: Applied = field(repr=False)
    gain: Measurement = field(repr=False)
    again: Measurement | None = field(repr=False)
    subject: str = ""
    wanted: tuple[int, ...] = ()
    name: ClassVar[str] = "mtp.NotDrift"
    title: ClassVar[str] = "Is it the change, or did the machine drift?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        if self.suspended.outcome != "suspended" or self.again is None:
            return [
                self.unknown(f"the old configuration was not measured a second time: {self.suspended.summary}", **self._about())
            ]
        value = self.again.value
        if value.get("fair") is None or value.get("changed"):
            differs = join([f"{name} {a} -> {b}" for name, (a, b) in value.get("changed", {}).items()], 4)
            why = f"it differs in {differs}" if differs else str(value.get("fairness"))
            return [
                self.unknown(
                    f"what was measured the second time is not shown to be the old configuration: {why}", **self._about()
                )
            ]
        return [self._whole(value), *(self._drift(level, speedup) for level, speedup in value.get("drift", {}).items())]

    def _about(self, **more: Any) -> dict[str, Any]:
        evidence = self.again.evidence if self.again is not None else ()
        return {"subject": self.subject, "evidence": evidence, **more}

    def _whole(self, value: Mapping[str, Any]) -> Finding:
        first = [int(n) for n in self.gain.value.get("gains_at", ())]
        second = {int(level["level"]): level for level in value.get("against_second", ())}
        both = [n for n in first if n in value.get("gains_against_second_at", ())]
        asked = self.wanted or tuple(first)
        unmeasured = [n for n in asked if second.get(n, {}).get("verdict", "not-measured") == "not-measured"]
        about = self._about(expected=list(self.wanted) or "any", observed=both)
        if (self.wanted and set(self.wanted) <= set(both)) or (both and not self.wanted):
            best = max((second[n] for n in both), key=lambda level: float(level["speedup"]["estimate"]))
            return self.passed(
                f"gains at concurrency {join(map(str, both))} against the old configuration measured again too; "
                f"the best is {_words(best)}",
                **about,
            )
        if unmeasured:
            return self.unknown(
                f"the second measurement of the old configuration was not complete at concurrency {join(map(str, unmeasured))}",
                **about,
            )
        lost = next((second[n] for n in asked if n not in both), None)
        return self.failed(
            "the gain does not hold against the old configuration measured again"
            + (f": {_words(lost)}, {self._at_first(lost)} before" if lost else "")
            + "; what changed meanwhile, or a restart alone, explains it",
            action=Suggested.ROLL_BACK,
            what_to_do="Take it back. See what made the old server slow (age, neighbours, clocks), and measure once more.",
            **about,
        )

    def _at_first(self, lost: Mapping[str, Any]) -> str:
        levels = self.gain.value.get("levels", ())
        return next(
            (
                f"{float(one['speedup']['estimate']):.2f}x"
                for one in levels
                if one["level"] == lost["level"] and one.get("speedup")
            ),
            "not measured",
        )

    def _drift(self, level: str, speedup: Mapping[str, Any] | None) -> Finding:
        if not speedup:
            return self.not_checked(f"the drift at concurrency {level} is not known: an arm was not complete", **self._about())
        words = (
            f"the old configuration, measured again, runs at {float(speedup['estimate']):.2f} times its first speed at "
            f"concurrency {level} (95 % interval {float(speedup['low']):.2f} to {float(speedup['high']):.2f})"
        )
        about = self._about(expected=f"within {DRIFT:.0%}", observed=dict(speedup))
        certain = float(speedup["low"]) > 1 or float(speedup["high"]) < 1
        if certain and abs(float(speedup["estimate"]) - 1) > DRIFT:
            return self.warned(
                f"{words}: the machine drifts",
                action=Suggested.LOOK,
                what_to_do="See what else ran, how old the first server was, and the clocks.",
                **about,
            )
        return self.passed(words, **about)


def _words(level: Mapping[str, Any] | None) -> str:
    """``1.35x at concurrency 1 (95 % interval 1.28 to 1.42)``."""
    if level is None or not level.get("speedup"):
        return "not told"
    speed = level["speedup"]
    return (
        f"{float(speed['estimate']):.2f}x at concurrency {level.get('level')} "
        f"(95 % interval {float(speed['low']):.2f} to {float(speed['high']):.2f})"
    )

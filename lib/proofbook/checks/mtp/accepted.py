"""Are drafts accepted? Judged by what the server did with a control prompt, whose text can be predicted almost without a miss.

A health address makes one token in the prefill and never meets a draft; loaded draft weights may be the wrong ones. Only
tokens that came from accepted drafts are a proof: tokens per verification step, the accept length. It is 1.00 when no draft
is ever accepted, and comes near ``steps + 1`` on a text that counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["AnswersAreRight", "DraftsAreAccepted", "LivedThrough", "SpeculationWasUsed"]

#: Below this no draft helps; up to DOUBTFUL the weights or the prompts are in doubt.
BROKEN, DOUBTFUL = 1.2, 1.5
#: On the control prompt a healthy server comes at least this near to steps + 1.
NEAR = 0.6
#: More than steps + 1 no step can give; the first token of an answer, which comes before any step, is what lies between.
CANNOT_BE = 1.05
#: Nor less than one, but for the steps of a request that ended in their middle.
LEAST = 0.95


@dataclass(frozen=True)
class _OfControl(Check):
    """A check of one run of the control prompts; it asks the machine nothing."""

    measurement: Measurement = field(repr=False)
    subject: str = ""

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    @property
    def value(self) -> Mapping[str, Any]:
        return self.measurement.value

    def case(self, name: str) -> Mapping[str, Any]:
        return next((c for c in self.value.get("cases", ()) if c.get("case") == name), {})

    def about(self, **more: Any) -> dict[str, Any]:
        return {"subject": self.subject, "evidence": self.measurement.evidence, **more}


@dataclass(frozen=True)
class SpeculationWasUsed(_OfControl):
    """The server verified drafts at all: its answers count verification steps."""

    name: ClassVar[str] = "mtp.SpeculationWasUsed"
    title: ClassVar[str] = "Does the server verify drafts at all?"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        greedy = self.case("greedy")
        steps, tokens = greedy.get("verify_ct"), greedy.get("tokens") or 0
        if not greedy.get("completed"):
            return [self.unknown(f"no control prompt was answered: {_problem(greedy)}", **self.about())]
        if self.value.get("speculation") == "off" or not steps:
            return [
                self.failed(
                    f"{tokens} tokens were made and no draft was verified: speculation is off",
                    action=Suggested.ROLL_BACK,
                    what_to_do="Take it back; the start of the log says why (a flag, a variable, the release).",
                    **self.about(observed=steps),
                )
            ]
        return [self.passed(f"{tokens} tokens in {steps} verification steps", **self.about(observed=steps))]


@dataclass(frozen=True)
class DraftsAreAccepted(_OfControl):
    """The accept length of the greedy control prompt: below 1.2 broken, up to 1.5 doubtful, near steps + 1 healthy.

    Where acceptance thresholds are below 1.0 the length is bought with changed answers, which is said.
    """

    name: ClassVar[str] = "mtp.DraftsAreAccepted"
    title: ClassVar[str] = "Are drafts accepted?"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        found = [self._greedy(), *self._lossy()]
        return [*found, *self._cases()] if found[0].verdict != "UNKNOWN" else found

    def _greedy(self) -> Finding:
        greedy = self.case("greedy")
        length = greedy.get("accept_length")
        full = self.value.get("steps_plus_one")
        about = self.about(expected=full, observed=length)
        if not greedy.get("completed"):
            return self.unknown(f"no control prompt was answered: {_problem(greedy)}", **about)
        if greedy.get("completed") != greedy.get("asked"):
            return self.unknown(
                f"only {greedy.get('completed')} of {greedy.get('asked')} control prompts were answered: {_problem(greedy)}",
                **about,
            )
        if length is None:
            return self.unknown("the answers say nothing about verification steps, so no accept length can be told", **about)
        lowest = greedy.get("lowest_accept_length")
        words = f"{length:.2f} tokens a step on the control prompt (lowest {lowest if lowest is None else f'{lowest:.2f}'})"
        if length < LEAST or (full and length > CANNOT_BE * full):
            bounds = f"1 at least and {full} at most" if full else "1 at least"
            return self.unknown(f"{words}, where a step gives {bounds}: the server's counts cannot be believed", **about)
        if length < BROKEN:
            return self.failed(
                f"{words}: no draft is accepted, each step costs more and gives nothing",
                action=Suggested.ROLL_BACK,
                what_to_do="Take it back. Draft weights that are missing or of another model load without a word: look at the "
                "checkpoint's mtp.* tensors.",
                **about,
            )
        if length <= DOUBTFUL:
            return self.warned(
                f"{words}: doubtful, a text that counts should come near {full or 'steps + 1'}",
                action=Suggested.LOOK,
                what_to_do=(
                    "See whether the draft belongs to this model (conversion, quantisation), and measure the gain closely."
                ),
                **about,
            )
        if full and length < NEAR * full:
            return self.warned(
                f"{words}: accepted, but far from the {full} that {full - 1} steps could give",
                action=Suggested.LOOK,
                what_to_do="Fewer steps may serve better: compare the gain with 2 or 3.",
                **about,
            )
        limit = f" of at most {full}" if full else ""
        return self.passed(f"{words}{limit}: drafts are accepted", **about)

    def _lossy(self) -> list[Finding]:
        config = self.value.get("config", {})
        names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        low = [f"{n}={config[n]:g}" for n in names if isinstance(config.get(n), int | float) and config[n] < 1.0]
        if not low:
            return []
        return [
            self.warned(
                f"drafts are accepted below full agreement ({', '.join(low)}): answers differ from those without speculation",
                action=Suggested.FIX_CONFIG,
                what_to_do="Leave both thresholds at 1.0 unless somebody has decided otherwise.",
                **self.about(),
            )
        ]

    def _cases(self) -> list[Finding]:
        """The other kinds of requests: a low length there is a limit of the gain, not a fault."""
        lengths = [
            f"{c['case']} {c['accept_length']:.2f}"
            for c in self.value.get("cases", ())
            if c.get("case") not in ("greedy",) and c.get("accept_length") is not None
        ]
        skipped = [f"{c['case']}: {c['skipped']}" for c in self.value.get("cases", ()) if c.get("skipped")]
        found = [self.passed(f"other requests, tokens a step: {join(lengths)}", **self.about())] if lengths else []
        return [*found, *(self.not_checked(f"not asked: {text}", **self.about()) for text in skipped)]


@dataclass(frozen=True)
class AnswersAreRight(_OfControl):
    """Greedy answers agree with those before the change, and each control case holds what was asked of it.

    WHY words and not only tokens: verification in batches changes the order of sums, so a text may part late from the
    earlier one without being wrong. What must agree says the measure.
    """

    name: ClassVar[str] = "mtp.AnswersAreRight"
    title: ClassVar[str] = "Are the answers still right?"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        found = []
        for case in self.value.get("cases", ()):
            for expect in case.get("expect", ()):
                if expect.get("held") is False and case.get("completed", 0) < case.get("asked", 0):
                    # WHY: what never came is no wrong answer; that the server did not live through it is said by its own check
                    found.append(
                        self.not_checked(
                            f"{case.get('title') or case['case']}: not judged, since not all of it was answered: {_said(expect)}",
                            **self.about(),
                        )
                    )
                elif expect.get("held") is False:
                    found.append(
                        self.failed(
                            f"{case.get('title') or case['case']}: expected, and not so: {_said(expect)}",
                            action=Suggested.ROLL_BACK,
                            what_to_do="Take it back: speculation must not change what is answered.",
                            **self.about(observed=case["case"]),
                        )
                    )
                elif expect.get("held") is None:
                    found.append(
                        self.not_checked(
                            f"{case.get('title') or case['case']}: could not be told: {_said(expect)}", **self.about()
                        )
                    )
        found += self._agreement()
        if not any(f.verdict in ("FAIL", "UNKNOWN") for f in found):
            held = sum(e.get("held") is True for c in self.value.get("cases", ()) for e in c.get("expect", ()))
            if held:
                found.append(self.passed(f"{counted(held, 'expectation')} of the control prompts held", **self.about()))
            else:
                found.append(self.unknown("no control prompt was answered, so no answer was judged", **self.about()))
        return found

    def _agreement(self) -> list[Finding]:
        agreement = self.value.get("agreement", ())
        if not agreement:
            return [self.not_checked("answers were not compared with those before the change: there are none", **self.about())]
        bad = [a for a in agreement if a.get("must_agree") and not a.get("same")]
        if bad:
            parts = [f"{a['prompt']} ({a.get('reason') or 'differs'})" for a in bad]
            return [
                self.failed(
                    f"{counted(len(bad), 'greedy answer')} of {len(agreement)} are not those of the baseline: {join(parts, 4)}",
                    action=Suggested.ROLL_BACK,
                    what_to_do="Take it back, and hold the answers side by side: a wrong cache or a lossy threshold shows there.",
                    **self.about(count=len(bad)),
                )
            ]
        same = sum(bool(a.get("same")) for a in agreement)
        return [
            self.passed(
                f"{same} of {len(agreement)} greedy answers are those of the baseline; none parts where it must not",
                **self.about(),
            )
        ]


@dataclass(frozen=True)
class LivedThrough(_OfControl):
    """The same process answered all of it: no crash behind an automatic restart, no request that never came back."""

    name: ClassVar[str] = "mtp.LivedThrough"
    title: ClassVar[str] = "Did one and the same server answer all control prompts?"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        return [*judge_steady(self, self.value.get("steady", {}), self.about()), *self._answered()]

    def _answered(self) -> list[Finding]:
        requests = [r for c in self.value.get("cases", ()) for r in c.get("requests", ())]
        return judge_answered(self, requests, self.about())


def judge_steady(check: Check, steady: Mapping[str, Any], about: Mapping[str, Any]) -> list[Finding]:
    """Same main process and invocation, no restart, over a measure."""
    lives = steady.get("lives", ())
    if steady.get("steady") is False:
        return [
            check.failed(
                f"the server did not live through it: {join(steady.get('changes', ()), 3)}",
                action=Suggested.ROLL_BACK,
                what_to_do="Take it back; the journal of the invocation that ended says why, an automatic restart hides it.",
                **about,
            )
        ]
    if steady.get("steady") is None or not lives:
        why = next((life.get("unknown") for life in lives if life.get("unknown")), "nobody looked")
        return [check.unknown(f"whether it was one and the same process all the time is not known: {why}", **about)]
    first = lives[0]
    return [
        check.passed(
            f"process {first.get('main_pid')} of one invocation all the time, {counted(len(lives), 'look')}, no restart", **about
        )
    ]


#: How a request ended that says the server hangs, and that it is gone.
_HANGS, _GONE = frozenset({"deadline"}), frozenset({"refused", "closed", "lost"})


def judge_answered(check: Check, requests: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Finding]:
    """Every request came back whole. A hang is told apart from a crash: behind it the health address may stay well."""
    asked = [r for r in requests if r.get("trouble") != "not-asked"]
    bad = [r for r in asked if not r.get("ok")]
    if not asked:
        return [check.unknown("nothing was asked", **about)]
    if not bad:
        return [check.passed(f"all {counted(len(asked), 'request')} were answered whole", **about)]
    first = bad[0]
    hangs = [r for r in bad if r.get("trouble") in _HANGS]
    what = (
        "Take it back. A hang: a rank is gone or stuck, and health addresses do not tell."
        if hangs
        else "Take it back; read its log."
    )
    kind = "hangs" if hangs and not any(r.get("trouble") in _GONE for r in bad[:1]) else "fails"
    return [
        check.failed(
            f"{len(bad)} of {counted(len(asked), 'request')} were not answered; it {kind}, first at {first.get('prompt')}: "
            f"{first.get('problem') or first.get('trouble')}",
            action=Suggested.ROLL_BACK,
            what_to_do=what,
            count=len(bad),
            observed="hang" if kind == "hangs" else "failure",
            **about,
        )
    ]


def _problem(case: Mapping[str, Any]) -> str:
    return str(case.get("problem") or case.get("skipped") or "nothing was asked")


def _said(expect: Mapping[str, Any]) -> str:
    reason = expect.get("reason")
    return f"{expect.get('what')}" + (f" ({reason})" if reason else "")

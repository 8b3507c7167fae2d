"""Keep it, or take it back: the ladder, climbed from the bottom. The first rung that fails decides; doubt is no reason to keep.

===================  =====================================================================================
PREFLIGHT_FAIL       the release does not know a flag, the checkpoint has no draft, it cannot fit, or it does not answer us
FAIL_STARTUP         it did not come up, or what runs is not what was planned
FAIL_ZOMBIE          it came up, and a rank is gone, or it hangs behind a healthy address
FAIL_SPEC_OFF        no draft is loaded, or none is verified
FAIL_INEFFECTIVE     drafts are verified, and not accepted
FAIL_CORRECTNESS     answers are wrong
FAIL_UNSTABLE        process, invocation or logs changed under load
FAIL_NO_GAIN         no gain is shown, or drift explains it
INCONCLUSIVE         nothing failed, and something that had to be shown was not
PASS_WITH_LIMITS     worth keeping, within what is said
PASS                 worth keeping
NOTHING_TO_DO        beside the ladder: it has this speculation already, so nothing was changed and nothing was judged
===================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proofbook.checks.mtp.fit import SIMULATE
from proofbook.model import Decision, Finding, Verdict

__all__ = ["NEEDED", "NOTHING_TO_DO", "RUNGS", "decide", "rung_of"]

#: From the bottom to the top.
RUNGS = (
    "PREFLIGHT_FAIL", "FAIL_STARTUP", "FAIL_ZOMBIE", "FAIL_SPEC_OFF", "FAIL_INEFFECTIVE", "FAIL_CORRECTNESS", "FAIL_UNSTABLE",
    "FAIL_NO_GAIN", "INCONCLUSIVE", "PASS_WITH_LIMITS", "PASS",
)  # fmt: skip

#: What it came to where nothing was to be done.
NOTHING_TO_DO = "NOTHING_TO_DO"

_RUNG_OF = {
    "machine.HeldByNobody": "PREFLIGHT_FAIL",
    "mtp.FitToChange": "PREFLIGHT_FAIL",
    "mtp.NothingToChange": "PREFLIGHT_FAIL",
    "mtp.CanBeAsked": "PREFLIGHT_FAIL",
    "mtp.Started": "FAIL_STARTUP",
    "mtp.RunsAsPlanned": "FAIL_STARTUP",
    "mtp.IsWhole": "FAIL_ZOMBIE",
    "mtp.SpeculationIsOn": "FAIL_SPEC_OFF",
    "mtp.WhyThatFast": "FAIL_STARTUP",
    "mtp.SpeculationWasUsed": "FAIL_SPEC_OFF",
    "mtp.DraftsAreAccepted": "FAIL_INEFFECTIVE",
    "mtp.AnswersAreRight": "FAIL_CORRECTNESS",
    "mtp.LivedThrough": "FAIL_UNSTABLE",
    "mtp.Holds": "FAIL_UNSTABLE",
    "mtp.WorthIt": "FAIL_NO_GAIN",
    "mtp.NotDrift": "FAIL_NO_GAIN",
}
#: What a line of the start's log stands for, where it says more than that something is wrong.
_RUNG_OF_SIGNATURE = {
    "sglang-spec-off": "FAIL_SPEC_OFF",
    "sglang-spec-v1": "FAIL_SPEC_OFF",
    "sglang-accept-nothing": "FAIL_INEFFECTIVE",
    "sglang-simulated-acceptance": "FAIL_INEFFECTIVE",
    "spec-accepts-nothing": "FAIL_INEFFECTIVE",
    "spec-weights-missing": "FAIL_INEFFECTIVE",
    "sglang-weights-skipped": "FAIL_INEFFECTIVE",
    "sglang-port-taken": "FAIL_STARTUP",
}
#: What must have been judged before anything is kept.
NEEDED = (
    "mtp.Started", "mtp.RunsAsPlanned", "mtp.IsWhole", "mtp.SpeculationIsOn", "mtp.SpeculationWasUsed", "mtp.DraftsAreAccepted",
    "mtp.AnswersAreRight", "mtp.LivedThrough", "mtp.Holds", "mtp.WorthIt",
)  # fmt: skip


def rung_of(finding: Finding) -> str:
    """The rung that a failed finding stands for. A fault in a log at the start, or a hang, says more than its check's name."""
    if finding.reason.startswith(SIMULATE):  # seen in the environment before any number is made up
        return "FAIL_INEFFECTIVE"
    if finding.check in ("mtp.LivedThrough", "mtp.Holds") and finding.observed == "hang":
        return "FAIL_ZOMBIE"
    if finding.check == "mtp.SpeculationIsOn" and finding.signature:
        return _RUNG_OF_SIGNATURE.get(finding.signature, "FAIL_UNSTABLE")
    return _RUNG_OF.get(finding.check, "FAIL_UNSTABLE")


def decide(
    findings: Iterable[Finding], *, scope: Sequence[str] = (), not_verified: Sequence[str] = (), needed: Sequence[str] = NEEDED
) -> Decision:
    """Climb the ladder. ``scope``: what the conclusion holds for (release, model, GPUs, concurrency, context).

    ``needed``: checks that must have been made.
    """
    said = list(findings)
    limits = (*(f"holds for: {text}" for text in scope), *_not_verified(said, not_verified))
    failed = sorted((f for f in said if f.verdict is Verdict.FAIL), key=lambda f: RUNGS.index(rung_of(f)))
    if failed:
        return Decision(False, rung_of(failed[0]), _because(failed), limits)
    missing = [name for name in needed if not any(f.check == name and f.verdict is not Verdict.NOT_CHECKED for f in said)]
    unknown = [f for f in said if f.verdict is Verdict.UNKNOWN and f.check in {*needed, *_RUNG_OF}]
    if missing or unknown:
        return Decision(False, "INCONCLUSIVE", _doubt(missing, unknown), limits)
    warned = [f for f in said if f.verdict is Verdict.WARN and f.check in _RUNG_OF]
    best = next(
        (f.reason for f in said if f.check == "mtp.WorthIt" and f.verdict is Verdict.PASS), "everything that was asked held"
    )
    if warned:
        words = tuple(f"{f.subject + ': ' if f.subject else ''}{f.reason}" for f in warned)
        return Decision(True, "PASS_WITH_LIMITS", f"{best}; {_count(len(warned), 'limit')}: {words[0]}", (*words, *limits))
    return Decision(True, "PASS", best, limits)


def _because(failed: Sequence[Finding]) -> str:
    first = failed[0]
    more = [f for f in failed[1:] if f.reason != first.reason]
    return first.reason + (f" (and {_count(len(more), 'further failure')})" if more else "")


def _doubt(missing: Sequence[str], unknown: Sequence[Finding]) -> str:
    parts = [f.reason for f in unknown[:2]]
    if missing:
        parts.append(f"not judged: {', '.join(name.removeprefix('mtp.') for name in missing[:4])}")
    return "nothing failed, and it is not shown that it works: " + "; ".join(parts)


def _not_verified(said: Sequence[Finding], more: Sequence[str]) -> tuple[str, ...]:
    open_ = [f.reason for f in said if f.verdict in (Verdict.NOT_CHECKED, Verdict.UNKNOWN)]
    return tuple(f"not verified: {text}" for text in dict.fromkeys([*open_, *more]))


def _count(n: int, one: str) -> str:
    return f"{n} {one}{'' if n == 1 else 's'}"

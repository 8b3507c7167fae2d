"""Accepted, held, worth it: measurements judged; and the ladder that decides."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.checks.mtp.accepted import AnswersAreRight, DraftsAreAccepted, LivedThrough, SpeculationWasUsed
from proofbook.checks.mtp.asked import CanBeAsked
from proofbook.checks.mtp.budget import GIB, Wish, budget, let_in, shape_of
from proofbook.checks.mtp.effect import took_effect
from proofbook.checks.mtp.holds import Holds
from proofbook.checks.mtp.kept import KeptBefore
from proofbook.checks.mtp.ladder import NEEDED, RUNGS, decide, rung_of
from proofbook.checks.mtp.worth import NotDrift, WorthIt
from proofbook.errors import CannotTell
from proofbook.lab.standin.engine import Server
from proofbook.model import Decision, Finding, Measurement, Verdict
from proofbook.probes.change_state import GuardState
from proofbook.probes.journal import JournalEntry, UnitJournal, UnitLog
from proofbook.probes.kernel_log import KernelLine, KernelLog
from proofbook.probes.memory import GpuMemory
from proofbook.probes.sglang import Processes, ProcessTable, ServerFacts, ServerInfo, release
from proofbook.probes.systemd import UnitState
from proofbook.remote.guard import GuardStatus

from .conftest import (
    CONFIG,
    CONTAINER,
    GPUS,
    INFO,
    INVOCATION,
    LIFE,
    SERVICE,
    STEADY,
    T0,
    TABLE,
    UNIT,
    URL,
    WANTED,
    applied,
    control,
    entries,
    judged,
    measurement,
    request,
    said,
    unit,
    with_case,
    worst_of,
)

# ------------------------------------------------------------------------------------------------------ accepted


@pytest.mark.parametrize(
    ("length", "verdict", "why"),
    [
        (0.5, "UNKNOWN", "a step gives 1 at least"),
        (1.0, "FAIL", "no draft is accepted"),
        (1.19, "FAIL", "no draft is accepted"),
        (1.2, "WARN", "doubtful"),
        (1.5, "WARN", "doubtful"),
        (1.6, "WARN", "far from the 6 that 5 steps could give"),
        (6.1, "PASS", "6.10 tokens a step"),
        (6.4, "UNKNOWN", "where a step gives 1 at least and 6 at most: the server's counts cannot be believed"),
        (5.0, "PASS", "5.00 tokens a step on the control prompt (lowest 4.90) of at most 6"),
    ],
)
def test_the_accept_length(length: float, verdict: str, why: str) -> None:
    value = with_case("greedy", accept_length=length)
    findings = judged(DraftsAreAccepted(measurement(value)))
    assert (str(findings[0].verdict), why in findings[0].reason) == (verdict, True), said(findings)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"completed": 0, "accept_length": None, "problem": "no answer within 120 s"}, "no answer within 120 s"),
        ({"completed": 2, "problem": "HTTP 500"}, "only 2 of 3"),
        ({"accept_length": None}, "no accept length"),
    ],
)
def test_no_accept_length_is_no_pass(more: dict[str, Any], why: str) -> None:
    findings = judged(DraftsAreAccepted(measurement(with_case("greedy", **more))))
    assert (len(findings), str(findings[0].verdict), why in findings[0].reason) == (1, "UNKNOWN", True)


def test_lossy_thresholds_are_said() -> None:
    value = {**control(), "config": {"speculative_accept_threshold_single": 0.8, "speculative_accept_threshold_acc": 1.0}}
    assert "speculative_accept_threshold_single=0.8" in said(judged(DraftsAreAccepted(measurement(value))))


def test_speculation_that_is_off_makes_no_verification_steps() -> None:
    value = {**with_case("greedy", verify_ct=None), "speculation": "off"}
    assert "768 tokens were made and no draft was verified" in said(judged(SpeculationWasUsed(measurement(value))))
    assert worst_of(judged(SpeculationWasUsed(measurement(control())))) == "PASS"
    assert worst_of(judged(SpeculationWasUsed(measurement(with_case("greedy", completed=0))))) == "UNKNOWN"


def test_an_answer_that_never_came_is_no_wrong_answer() -> None:
    cut = with_case("structured", completed=0, expect=[{"what": "all were answered", "held": False, "reason": "0 of 3"}])
    findings = judged(AnswersAreRight(measurement(cut)))
    assert not [f for f in findings if f.verdict == "FAIL"]
    assert "not judged, since not all of it was answered" in said(findings)


def test_wrong_answers() -> None:
    lost = with_case("structured", expect=[{"what": "is JSON of the wanted form", "held": False, "reason": "it ends early"}])
    findings = judged(AnswersAreRight(measurement(lost)))
    assert "JSON: expected, and not so: is JSON of the wanted form (it ends early)" in said(findings)
    parted = {
        **control(),
        "agreement": [{"prompt": "math", "must_agree": True, "same": False, "reason": "parts at token 3 of 200"}],
    }
    findings = judged(AnswersAreRight(measurement(parted)))
    assert "1 greedy answer of 1 are not those of the baseline: math (parts at token 3 of 200)" in said(findings)
    may = {**control(), "agreement": [{"prompt": "prose", "must_agree": False, "same": False}]}
    assert worst_of(judged(AnswersAreRight(measurement(may)))) == "PASS"
    assert worst_of(judged(AnswersAreRight(measurement({**control(), "cases": []})))) == "UNKNOWN"


def test_a_crash_behind_an_automatic_restart() -> None:
    value = {
        **control(),
        "steady": {"steady": False, "changes": ["after 'structured': main process 812 -> 999"], "lives": [LIFE]},
    }
    assert "main process 812 -> 999" in said(judged(LivedThrough(measurement(value))))
    unsure = {**control(), "steady": {"steady": None, "changes": [], "lives": [{**LIFE, "known": False, "unknown": "lost"}]}}
    assert worst_of(judged(LivedThrough(measurement(unsure)))) == "UNKNOWN"


@pytest.mark.parametrize(
    ("trouble", "rung"), [("deadline", "FAIL_ZOMBIE"), ("closed", "FAIL_UNSTABLE"), ("http", "FAIL_UNSTABLE")]
)
def test_a_hang_is_told_apart_from_a_crash(trouble: str, rung: str) -> None:
    bad = request(ok=False, trouble=trouble, problem="no answer within 120 s")
    value = with_case("greedy", requests=[request(), bad, request(ok=False, trouble="not-asked")])
    findings = judged(LivedThrough(measurement(value)))
    (failed,) = [f for f in findings if f.verdict == "FAIL"]
    assert "1 of 5 requests were not answered" in failed.reason
    assert rung_of(failed) == rung


# --------------------------------------------------------------------------------------------------------- holds


def window(**more: Any) -> dict[str, Any]:
    load = {
        "waves": 20, "asked": 240, "completed": 240, "tokens": 61440, "busy_share": 0.9, "s_per_token_first": 0.01,
        "s_per_token_last": 0.0101, "accept_length": 4.2, "lowest_accept_length": 2.0, "requests_failed": [],
    }  # fmt: skip
    return {
        "minutes": 10,
        "lasted_s": 601.0,
        "steady": STEADY,
        "load": {**load, **more.pop("load", {})},
        "ended_early": "",
        **more,
    }


def holds(value: dict[str, Any], values: dict[Any, Any]) -> list[Finding]:
    return judged(Holds(SERVICE, CONTAINER, measurement(value, "serving.Stability")), values)


def test_a_quiet_window_holds(values: dict[Any, Any]) -> None:
    findings = holds(window(), values)
    assert worst_of(findings) == "PASS", said(findings)
    assert "10 min under load: 240 requests, 61440 tokens, busy 90% of the time" in said(findings)
    assert "no fault in 1 new kernel line" in said(findings)


@pytest.mark.parametrize(
    ("value", "verdict", "why"),
    [
        (window(lasted_s=100.0, ended_early="the server stopped answering"), "UNKNOWN", "cut after 100 s of 600 s"),
        (window(load={"asked": 0, "completed": 0}), "UNKNOWN", "no load in the window"),
        (
            window(load={"completed": 239, "requests_failed": [request(ok=False, trouble="deadline", problem="no answer")]}),
            "FAIL",
            "it hangs",
        ),
        (window(load={"s_per_token_last": 0.02}), "WARN", "it wears out"),
        (window(load={"accept_length": 1.1}), "WARN", "drafts hardly help"),
        (
            window(steady={"steady": False, "changes": ["restarted"], "lives": [LIFE]}),
            "FAIL",
            "did not live through it: restarted",
        ),
    ],
)
def test_a_window_that_does_not_hold(values: dict[Any, Any], value: dict[str, Any], verdict: str, why: str) -> None:
    findings = holds(value, values)
    assert worst_of(findings) == verdict, said(findings)
    assert any(why in f.reason for f in findings if f.verdict == verdict), said(findings)


def test_another_process_after_the_window(values: dict[Any, Any]) -> None:
    values[UnitState(UNIT, CONTAINER)] = unit(main_pid=4444, invocation_id="d4" * 16)
    assert "in it, it was 812" in said(holds(window(), values))


def test_errors_in_its_log_and_in_the_kernels(values: dict[Any, Any]) -> None:
    crash = JournalEntry(
        T0, 500.0, 6, "[2026-03-09 16:05:00 TP0] Detected errors during sampling! NaN in the logits.", "python", 812, "stdout"
    )
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, (*entries(), crash), True)
    assert "in its log: " in said([f for f in holds(window(), values) if f.verdict != "PASS"])
    xid = KernelLine(5000.0, T0 + timedelta(minutes=5), 3, "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")
    values[KernelLog()] = replace(values[KernelLog()], lines=(*values[KernelLog()].lines, xid))
    bad = [f for f in holds(window(), values) if f.verdict == "FAIL"]
    assert any(f.subject == "0000:41:00.0" and f.signature == "xid-79" for f in bad), said(bad)


def test_an_old_kernel_line_is_not_of_this_window(values: dict[Any, Any]) -> None:
    old = KernelLine(2.0, T0 - timedelta(hours=2), 3, "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")
    values[KernelLog()] = replace(values[KernelLog()], lines=(old, *values[KernelLog()].lines))
    assert worst_of(holds(window(), values)) == "PASS"


def test_a_log_that_is_not_whole_proves_nothing(values: dict[Any, Any]) -> None:
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, entries(), False, ("Suppressed 9 messages from x",))
    assert worst_of(holds(window(), values)) == "UNKNOWN"


def test_a_lost_rank_and_little_memory(values: dict[Any, Any]) -> None:
    values[Processes(UNIT, CONTAINER)] = ProcessTable(UNIT, "/x", TABLE.processes[:1])
    values[GpuMemory()] = (replace(GPUS[0], free_mib=900), *GPUS[1:])
    text = said(holds(window(), values))
    assert "FAIL after the load a process is lost: no scheduler lives" in text
    assert "WARN only 0.9 GiB are free on GPU 0" in text


# --------------------------------------------------------------------------------------------------------- worth


def level(n: int, estimate: float, low: float, high: float, verdict: str = "gain", **more: Any) -> dict[str, Any]:
    speedup = {"estimate": estimate, "low": low, "high": high}
    return {"level": n, "pairs": 12, "prompts": 12, "enough": True, "skipped": "", "speedup": speedup, "verdict": verdict, **more}


def gain(*levels: dict[str, Any], **more: Any) -> Measurement:
    gains = [x["level"] for x in levels if x["verdict"] == "gain"]
    return measurement({"levels": list(levels), "gains_at": gains, "fair": True, **more}, "serving.Gain")


def again(*against: dict[str, Any], drift: float = 1.0, **more: Any) -> Measurement:
    """The old configuration measured again; ``against``: the levels of the change against it."""
    told = {str(x["level"]): {"estimate": drift, "low": drift - 0.005, "high": drift + 0.005} for x in against}
    gains = [x["level"] for x in against if x["verdict"] == "gain"]
    value = {"drift": told, "against_second": list(against), "gains_against_second_at": gains, "fair": True, "changed": {}}
    return measurement({**value, **more}, "serving.GainAgain")


SUSPENDED = applied("suspended", "it serves with the old command again")


def test_a_gain_everywhere() -> None:
    findings = judged(WorthIt(gain(level(1, 1.45, 1.38, 1.52), level(4, 1.2, 1.1, 1.3)), again_follows=True))
    assert worst_of(findings) == "PASS", said(findings)
    assert findings[0].reason == "gains at concurrency 1, 4; the best is 1.45x at concurrency 1 (95 % interval 1.38 to 1.52)"


def test_a_gain_at_low_concurrency_alone() -> None:
    measured = gain(level(1, 1.45, 1.38, 1.52), level(8, 0.8, 0.75, 0.86, "loss"))
    findings = judged(WorthIt(measured, again_follows=True))
    assert worst_of(findings) == "WARN"
    assert "0.80x at concurrency 8 (95 % interval 0.75 to 0.86), 12 pairs of prompts: slower than before" in said(findings)
    assert "does not count" not in said(judged(WorthIt(measured, wanted=(1,))))
    assert "no gain is shown at the concurrency that counts (8)" in said(judged(WorthIt(measured, wanted=(8,))))


def test_no_gain() -> None:
    findings = judged(WorthIt(gain(level(1, 1.02, 0.97, 1.07, "none-shown"))))
    assert findings[0].verdict == "FAIL"
    assert "no gain is shown at any concurrency; the best is 1.02x" in findings[0].reason


def test_nothing_measured_and_an_unfair_baseline_and_drift() -> None:
    none = gain({"level": 1, "verdict": "not-measured", "skipped": "the server did not answer any more", "speedup": None})
    assert worst_of(judged(WorthIt(none))) == "UNKNOWN"
    unfair = gain(level(1, 1.4, 1.3, 1.5), fair=False, confounders=["disable_overlap_schedule"], fairness="overlap changed too")
    assert "overlap changed too (disable_overlap_schedule)" in said(judged(WorthIt(unfair)))
    assert "so slow drift is not excluded" in said(judged(WorthIt(gain(level(1, 1.4, 1.3, 1.5)))))
    few = gain(level(1, 1.4, 1.3, 1.5, enough=False))
    assert "too few for a verdict" in said(judged(WorthIt(few)))


def test_a_gain_over_both_measurements_of_the_old_configuration() -> None:
    first = gain(level(1, 1.45, 1.38, 1.52), level(8, 0.8, 0.7, 0.9, "loss"))
    steady = again(level(1, 1.44, 1.37, 1.51), level(8, 0.81, 0.7, 0.9, "loss"), drift=1.004)
    findings = judged(NotDrift(SUSPENDED, first, steady, "x.service"))
    assert worst_of(findings) == "PASS", said(findings)
    assert "gains at concurrency 1 against the old configuration measured again too; the best is 1.44x" in findings[0].reason
    assert "measured again, runs at 1.00 times its first speed at concurrency 1" in said(findings)
    faster = judged(NotDrift(SUSPENDED, first, again(level(1, 1.3, 1.2, 1.4), drift=1.11)))
    assert (faster[0].verdict, worst_of(faster)) == ("PASS", "WARN"), "it drifts, and the gain is more than that"
    assert "1.11 times its first speed at concurrency 1 (95 % interval 1.11 to 1.11): the machine drifts" in said(faster)


def test_a_gain_that_drift_explains() -> None:
    first = gain(level(1, 1.9, 1.8, 2.0), level(4, 1.5, 1.4, 1.6))
    gone = again(level(1, 0.99, 0.95, 1.03, "none-shown"), level(4, 1.2, 1.1, 1.3), drift=1.95)
    for wanted in ((1,), (1, 4)):
        (whole, *_) = judged(NotDrift(SUSPENDED, first, gone, wanted=wanted))
        assert (whole.verdict, rung_of(whole)) == ("FAIL", "FAIL_NO_GAIN")
        assert "measured again: 0.99x at concurrency 1 (95 % interval 0.95 to 1.03), 1.90x before" in whole.reason
    assert judged(NotDrift(SUSPENDED, first, gone))[0].verdict == "PASS", "one concurrency is enough where none must gain"
    one = gain(level(1, 1.9, 1.8, 2.0))
    assert judged(NotDrift(SUSPENDED, one, again(level(1, 0.99, 0.95, 1.03, "none-shown"))))[0].verdict == "FAIL"


def test_a_second_measurement_that_says_nothing() -> None:
    first = gain(level(1, 1.9, 1.8, 2.0))
    failed = applied("failed", "the old server did not become ready again: it died")
    cut = {"level": 1, "verdict": "not-measured", "skipped": "", "speedup": None, "pairs": 3}
    for check, why in (
        (NotDrift(failed, first, None), "did not become ready again: it died"),
        (NotDrift(SUSPENDED, first, None), "was not measured a second time"),
        (
            NotDrift(SUSPENDED, first, again(level(1, 1.9, 1.8, 2.0), changed={"version": ["0.5.9", "0.5.10"]})),
            "version 0.5.9 -> 0.5.10",
        ),
        (NotDrift(SUSPENDED, first, again(level(1, 1.9, 1.8, 2.0), fair=None, fairness="it told nothing")), "it told nothing"),
        (NotDrift(SUSPENDED, first, again(cut, drift=1.0)), "was not complete at concurrency 1"),
    ):
        (whole, *_) = judged(check)
        assert (str(whole.verdict), why in whole.reason) == ("UNKNOWN", True), whole.reason
        decision = decide([*judged(WorthIt(first)), whole], needed=("mtp.WorthIt", "mtp.NotDrift"))
        assert (decision.keep, decision.rung) == (False, "INCONCLUSIVE")


# ---------------------------------------------------------------------------------------------------------- kept


def test_what_became_of_a_change_that_was_kept(values: dict[Any, Any]) -> None:
    at = datetime(2026, 4, 8, 15, 10, tzinfo=UTC)
    values[GuardState("r1", CONTAINER)] = GuardStatus("none", at, outcome="confirmed", outcome_at=at)
    check = KeptBefore(SERVICE, CONTAINER, "r1", Decision(True, "PASS", "gains at concurrency 1"))
    (finding,) = judged(check, values)
    assert finding.verdict == "PASS"
    assert finding.reason.startswith("it was kept at 2026-04-08 15:10 UTC by run r1 (PASS: gains at concurrency 1); that stands")
    assert "(PASS" not in judged(replace(check, decision=None), values)[0].reason
    values[UnitState(UNIT, CONTAINER)] = unit(active="failed", sub="failed", result="exit-code")
    assert "it does not run now: failed" in said(judged(check, values))
    values[GuardState("r1", CONTAINER)] = "?it cannot be entered"
    assert worst_of(judged(check, values)) == "UNKNOWN"


# --------------------------------------------------------------------------------------------------------- asked


def asked_at(n: int, completed: int, asked: int = 36, skipped: str = "") -> dict[str, Any]:
    return {"level": n, "completed": completed, "asked": asked, "complete": completed == asked, "skipped": skipped}


@pytest.mark.parametrize(
    ("value", "verdict", "why"),
    [
        ({"levels": [asked_at(1, 36), asked_at(8, 0, skipped="above the effective cap of 6")]}, "PASS", "all 36 requests"),
        ({"levels": [asked_at(1, 36), asked_at(8, 30)]}, "WARN", "30 of 36 at concurrency 8"),
        ({"levels": [asked_at(1, 0)]}, "FAIL", "no request was answered"),
        ({}, "FAIL", "no request was answered, so there is nothing to compare with: nothing was asked"),
        ({"refused": "HTTP 401: Unauthorized"}, "FAIL", "it refuses us (HTTP 401: Unauthorized): it demands an API key"),
    ],
)
def test_whether_the_server_answers_us(value: dict[str, Any], verdict: str, why: str) -> None:
    (finding,) = judged(CanBeAsked(measurement(value, "serving.Baseline"), SERVICE))
    assert (str(finding.verdict), why in finding.reason) == (verdict, True), finding.reason
    assert verdict != "FAIL" or decide([finding]).rung == "PREFLIGHT_FAIL"


def test_a_key_that_is_not_the_servers() -> None:
    given = SERVICE.model_copy(update={"api_key_file": "/root/key"})
    (finding,) = judged(CanBeAsked(measurement({"refused": "HTTP 401: Unauthorized"}, "serving.Baseline"), given))
    assert "the API key that was given is not the one that it demands" in finding.reason
    assert "what api_key_env or api_key_file names" in finding.what_to_do


# -------------------------------------------------------------------------------------------------------- ladder


def everything(values: dict[Any, Any], **measured: Any) -> list[Finding]:
    """All findings of a run after the change."""
    prompts = measurement(measured.get("control", control()))
    worth = measured.get("gain", gain(level(1, 1.45, 1.38, 1.52)))
    checks = [
        *took_effect(SERVICE, CONTAINER, WANTED, measured.get("applied", applied())),
        SpeculationWasUsed(prompts),
        DraftsAreAccepted(prompts),
        AnswersAreRight(prompts),
        LivedThrough(prompts),
        Holds(SERVICE, CONTAINER, measurement(measured.get("window", window()), "serving.Stability")),
        WorthIt(worth, again_follows=True),
    ]
    return [finding for check in checks for finding in judged(check, values)]


def test_a_healthy_change_is_kept_with_its_scope(values: dict[Any, Any]) -> None:
    decision = decide(everything(values), scope=("SGLang 0.5.10",), not_verified=("prompts longer than 8 k tokens",))
    assert (decision.keep, decision.rung) == (True, "PASS"), decision
    assert decision.because.startswith("gains at concurrency 1")
    assert "holds for: SGLang 0.5.10" in decision.limits
    assert "not verified: prompts longer than 8 k tokens" in decision.limits


OFF = ServerFacts("/server_info", {**INFO, "speculative_algorithm": None})


@pytest.mark.parametrize(
    ("probe", "answer", "measured", "rung"),
    [
        (None, None, {"applied": applied("failed", "did not become ready", start="died")}, "FAIL_STARTUP"),
        (Processes(UNIT, CONTAINER), replace(TABLE, processes=TABLE.processes[:3]), {}, "FAIL_ZOMBIE"),
        (ServerInfo(URL, CONTAINER), OFF, {}, "FAIL_SPEC_OFF"),
        (None, None, {"control": with_case("greedy", accept_length=1.0)}, "FAIL_INEFFECTIVE"),
        (
            None,
            None,
            {"control": {**control(), "agreement": [{"prompt": "math", "must_agree": True, "same": False}]}},
            "FAIL_CORRECTNESS",
        ),
        (None, None, {"window": window(steady={"steady": False, "changes": ["restarted"], "lives": [LIFE]})}, "FAIL_UNSTABLE"),
        (None, None, {"gain": gain(level(1, 0.7, 0.6, 0.8, "loss"))}, "FAIL_NO_GAIN"),
        (
            UnitJournal(UNIT, CONTAINER),
            UnitLog(UNIT, INVOCATION, entries(), False, ("Suppressed 9 messages",)),
            {},
            "INCONCLUSIVE",
        ),
        (None, None, {"gain": gain(level(1, 1.4, 1.3, 1.5), level(8, 0.8, 0.7, 0.9, "loss"))}, "PASS_WITH_LIMITS"),
    ],
)
def test_each_rung(values: dict[Any, Any], probe: Any, answer: Any, measured: dict[str, Any], rung: str) -> None:
    if probe is not None:
        values[probe] = answer
    decision = decide(everything(values, **measured))
    assert decision.rung == rung, decision
    assert decision.keep is (rung == "PASS_WITH_LIMITS")
    assert decision.because


def test_the_lowest_rung_decides_and_the_rest_is_counted() -> None:
    findings = [
        Finding("mtp.WorthIt", Verdict.FAIL, "no gain"),
        Finding("mtp.Started", Verdict.FAIL, "it died"),
        Finding("mtp.IsWhole", Verdict.FAIL, "a rank is gone"),
    ]
    decision = decide(findings)
    assert (decision.rung, decision.because) == ("FAIL_STARTUP", "it died (and 2 further failures)")


def test_what_was_not_judged_is_no_pass() -> None:
    decision = decide([])
    assert (decision.keep, decision.rung) == (False, "INCONCLUSIVE")
    assert "not judged: Started" in decision.because
    fit = Finding("mtp.FitToChange", Verdict.FAIL, "an unknown flag")
    assert decide([fit]).rung == "PREFLIGHT_FAIL"


def test_every_needed_check_has_a_rung() -> None:
    for name in NEEDED:
        assert rung_of(Finding(name, Verdict.FAIL, "x")) in RUNGS


# -------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize(
    ("version", "fraction", "draft_tokens", "running", "expected"),
    [
        ((0, 5, 9), 0.75, 6, None, (8, 115)),
        ((0, 5, 9), 0.80, 6, None, (23, 331)),
        ((0, 5, 9), 0.85, 6, None, (39, 550)),
        ((0, 5, 10), 0.75, 6, None, (6, 115)),
        ((0, 5, 13), 0.75, 6, None, (15, 597)),
        ((0, 5, 14), 0.75, 6, None, (13, 502)),
        ((0, 5, 9), 0.75, 6, 16, (16, 431)),
        ((0, 5, 9), 0.75, 0, None, (33, 588)),
    ],
)
def test_the_arithmetic_of_the_releases(
    version: tuple[int, ...], fraction: float, draft_tokens: int, running: int | None, expected: tuple[int, int]
) -> None:
    wish = Wish(version, fraction, draft_tokens, running, "extra_buffer")
    found = budget(shape_of(CONFIG, 4), wish, free=94.5, weights=58.1)
    assert (found.running, found.tokens // 1000) == expected


def test_sizes_of_the_model() -> None:
    shape = shape_of(CONFIG, 4)
    assert (shape.kv_token, shape.draft_kv_token, shape.state_slot) == (12288, 1024, 38412288)
    assert shape.draft_weights / GIB == pytest.approx(1.913, abs=0.01)
    dense = shape_of({"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, 2)
    assert (dense.hybrid, dense.kv_token) == (False, 32 * 4 * 2 * 128 * 2)
    with pytest.raises(CannotTell, match="num_key_value_heads"):
        shape_of({"num_hidden_layers": 1, "hidden_size": 1, "num_attention_heads": 1}, 1)


@pytest.mark.parametrize(
    ("version", "asked", "tokens", "context", "running"),
    [
        ((0, 5, 9), None, 115_000, 262144, 2048),
        ((0, 5, 9), None, 1_500_000, 262144, 2929),
        ((0, 5, 9), None, 9_000_000, 262144, 4096),
        ((0, 5, 9), None, 1_000, 0, 2048),
        ((0, 5, 10), None, 1_000, 262144, 500),
        ((0, 5, 9), 48, 50, 262144, 48),
        ((0, 5, 10), 3000, 115_000, 262144, 2048),
        ((0, 5, 13), 3000, 115_000, 262144, 2048),
        ((0, 5, 14), 3000, 115_000, 262144, 3000),
        ((0, 5, 23), 48, 50, 262144, 25),
        ((0, 5, 23), None, 115_000, 262144, 2048),
    ],
)
def test_how_many_requests_are_let_in(
    version: tuple[int, ...], asked: int | None, tokens: int, context: int, running: int
) -> None:
    assert let_in(version, asked, tokens, context) == running


MTP = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1")
_RUNNING = re.compile(r"\bmax_total_num_tokens=(\d+),.*\bmax_running_requests=(\d+), context_len=(\d+)")
_SLOTS = re.compile(r"max_mamba_cache_size: (\d+)")


@pytest.mark.parametrize("version", ("0.5.9", "0.5.10", "0.5.13", "0.5.14", "0.5.17", "0.5.20", "0.5.23"))
@pytest.mark.parametrize("speculative", (False, True))
@pytest.mark.parametrize("more", ((), ("--max-running-requests", "16"), ("--disable-radix-cache",)), ids=str)
def test_the_arithmetic_and_the_stand_ins_log_agree(version: str, speculative: bool, more: tuple[str, ...]) -> None:
    """Two who know nothing of each other read the same sources: what is judged with, and what the lab's servers print."""
    radix = "--disable-radix-cache" not in more
    now = release(version)
    strategy = "--mamba-radix-cache-strategy" if now >= (0, 5, 14) else "--mamba-scheduler-strategy"
    argv = ("python", "-m", "sglang.launch_server", "--model-path", "/models/Qwen3.5-122B-A10B", "--tp-size", "4")
    argv += ("--mem-fraction-static", "0.85", *more, *((strategy, "extra_buffer") if radix else ()))
    argv += (*MTP, "--speculative-num-draft-tokens", "6") if speculative else ()
    one = Server(argv, {"SGLANG_ENABLE_SPEC_V2": "1"}, version)
    assert one.resolved is not None and one.budget is not None
    text = "\n".join(line for _, line in one.startup())
    ((tokens, running, context),) = {tuple(map(int, found)) for found in _RUNNING.findall(text)}
    wish = Wish(
        one.resolved.version, 0.85, 6 if speculative else 0, 16 if "16" in more else None, one.resolved.strategy,
        one.resolved.overlap, radix, context,
    )  # fmt: skip
    said = budget(shape_of(CONFIG, 4), wish, free=one.budget.free, weights=one.budget.weights)
    assert said.running == running
    assert {said.slots} == set(map(int, _SLOTS.findall(text)))
    assert said.tokens == pytest.approx(tokens, rel=0.01)
    if not speculative and radix and not more:
        assert running > 48, "the line about 48 belongs to speculation"
    assert ("reset to 48" in text) is (speculative and "16" not in more)
    _hold_why_fewer(text, now, running, 16 if "16" in more else 48 if speculative else None, said.slots)


def _hold_why_fewer(text: str, version: tuple[int, ...], running: int, asked: int | None, slots: int) -> None:
    """The sentences of the releases about fewer requests than asked for."""
    capped = re.search(r"is capped to (\d+) by the mamba state cache \(max_mamba_cache_size=(\d+), (\d+) state slots", text)
    reduced = re.search(r"was reduced from the requested (\d+) to (\d+) \(per dp worker\)", text)
    finalized = re.search(r"from the finalized token capacity: max_num_reqs=(\d+)\.", text)
    fewer = asked is None or running < asked
    if version >= (0, 5, 17) and fewer:
        assert capped is not None
        assert [int(number) for number in capped.groups()] == [running, slots, slots // running]
        assert reduced is None
    else:
        assert capped is None
        expected = [asked, running] if version >= (0, 5, 14) and asked is not None and fewer else None
        assert (list(map(int, reduced.groups())) if reduced else None) == expected
    assert (int(finalized[1]) if finalized else None) == (running if version == (0, 5, 13) else None)


def test_a_model_without_states_is_not_limited_by_them() -> None:
    dense = shape_of({"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}, 1)
    found = budget(dense, Wish((0, 5, 9), 0.8, 4), free=80.0, weights=20.0)
    assert (found.running, found.slots, found.fits) == (48, 0, True)
    plain = budget(dense, Wish((0, 5, 9), 0.8, context=32768), free=80.0, weights=20.0)
    assert (plain.running, plain.slots) == (max(2048, min(int(plain.tokens / 32768 * 512), 4096)), 0)

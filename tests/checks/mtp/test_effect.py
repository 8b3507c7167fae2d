"""Did it take effect? Every false proof must be seen through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.mtp.effect import IsWhole, RunsAsPlanned, SpeculationIsOn, Started, WhyThatFast, took_effect
from proofbook.checks.mtp.start import StartReader, read_start
from proofbook.probes.journal import JournalEntry, UnitJournal, UnitLog
from proofbook.probes.sglang import Listener, PortOwner, Processes, ServedCache, ServerFacts, ServerInfo
from proofbook.probes.start_log import MoreLines
from proofbook.probes.systemd import UnitProcess, UnitState

from .conftest import (
    CONTAINER,
    INFO,
    INVOCATION,
    OLD,
    PLAIN,
    SERVICE,
    T0,
    TABLE,
    UNIT,
    URL,
    WANTED,
    WITH,
    applied,
    entries,
    judged,
    measurement,
    process,
    said,
    unit,
    worst_of,
)

RUNS = RunsAsPlanned(SERVICE, CONTAINER, applied())
WHOLE = IsWhole(SERVICE, CONTAINER)
ON = SpeculationIsOn(SERVICE, CONTAINER, WANTED, applied())
FAST = WhyThatFast(SERVICE, CONTAINER, applied())
#: What a client of it was told, where it demands a key.
CLIENT = measurement({"path": "/server_info", "said": INFO, "why": ""}, "serving.ServerSays")


def test_a_healthy_server_passes_all(values: dict[Any, Any]) -> None:
    for check in took_effect(SERVICE, CONTAINER, WANTED, applied()):
        findings = judged(check, values)
        assert worst_of(findings) == "PASS", f"{check.name}\n{said(findings)}"


@pytest.mark.parametrize("release", ["0.5.9", "0.5.13", "0.5.20", "0.5.23"])
def test_starts_of_other_releases_are_read(values: dict[Any, Any], release: str) -> None:
    renamed = {"--mamba-scheduler-strategy": "--mamba-radix-cache-strategy"} if release in ("0.5.20", "0.5.23") else {}
    argv = tuple(renamed.get(word, word) for word in WITH)
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, entries(argv, release), True)
    findings = judged(ON, values)
    assert worst_of(findings) == "PASS", said(findings)
    assert "Qwen3_5ForCausalLMMTP, 1.91 GiB) on all 4 ranks" in said(findings)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda v: v.update({UnitProcess(UNIT, CONTAINER): process(PLAIN)}),
            "is not the planned one: --mem-fraction-static: 0.75 → 0.85",
        ),
        (
            lambda v: v.update({UnitProcess(UNIT, CONTAINER): process(WITH[:-2])}),
            "--mamba-scheduler-strategy: extra_buffer → absent",
        ),
        (lambda v: v.update({UnitState(UNIT, CONTAINER): unit(need_daemon_reload=True)}), "NeedDaemonReload=yes"),
        (lambda v: v.update({UnitState(UNIT, CONTAINER): unit(n_restarts=2)}), "restarted it 2 times"),
        (lambda v: v.update({UnitState(UNIT, CONTAINER): unit(invocation_id="d4" * 16)}), "another invocation"),
        (lambda v: v.update({UnitState(UNIT, CONTAINER): unit(active="failed", main_pid=0)}), "does not run any more"),
        (
            lambda v: v.update({UnitProcess(UNIT, CONTAINER): replace(process(), environ={})}),
            "SGLANG_ENABLE_SPEC_V2 is not set, not 1",
        ),
        (lambda v: v.update({UnitProcess(UNIT, CONTAINER): process(WITH, SGLANG_SIMULATE_ACC_LEN="4")}), "acceptance is made up"),
        (
            lambda v: v.update({PortOwner(30000, CONTAINER): (Listener("0.0.0.0", 30000, ((700, "python"),)),)}),
            "port 30000 belongs to python (pid 700), not to its main process 812",
        ),
        (lambda v: v.update({PortOwner(30000, CONTAINER): ()}), "nobody listens"),
    ],
)
def test_what_runs_is_not_the_plan(values: dict[Any, Any], change: Any, why: str) -> None:
    change(values)
    findings = judged(RUNS, values)
    assert any(f.verdict == "FAIL" and why in f.reason for f in findings), said(findings)


def test_secrets_of_a_command_are_not_shown(values: dict[Any, Any]) -> None:
    values[UnitProcess(UNIT, CONTAINER)] = process((*WITH, "--api-key", "sk-verysecretvalue"))
    assert "sk-verysecretvalue" not in said(judged(RUNS, values))
    assert "--api-key" in said(judged(RUNS, values))


def test_a_rank_is_gone_behind_an_active_unit(values: dict[Any, Any]) -> None:
    without = tuple(p for p in TABLE.processes if p.rank != "TP2")
    values[Processes(UNIT, CONTAINER)] = replace(TABLE, processes=without)
    (bad,) = [f for f in judged(WHOLE, values) if f.verdict == "FAIL"]
    assert bad.reason == "3 of 4 schedulers live (TP0, TP1, TP3)"
    zombie = tuple(replace(p, state="Z") if p.rank == "TP2" else p for p in TABLE.processes)
    values[Processes(UNIT, CONTAINER)] = replace(TABLE, processes=zombie)
    assert "ended and not collected: sglang::scheduler_TP2" in said(judged(WHOLE, values))


def test_a_scheduler_that_does_not_answer(values: dict[Any, Any]) -> None:
    values[ServerInfo(URL, CONTAINER)] = f"?{URL}/server_info: no answer within 10 s"
    assert worst_of(judged(WHOLE, values)) == "FAIL"
    values[ServerInfo(URL, CONTAINER)] = f"?{URL}/server_info: HTTP 401 (it wants an API key)"
    for check in (IsWhole(SERVICE, CONTAINER, CLIENT), SpeculationIsOn(SERVICE, CONTAINER, WANTED, applied(), CLIENT)):
        assert worst_of(judged(check, values)) == "PASS", "asked as a client it told all of it"
        assert ServerInfo(URL, CONTAINER) not in check.needs()
    silent = replace(CLIENT, value={"path": "/server_info", "said": None, "why": "no answer within 30 s"})
    assert "its scheduler does not answer: /server_info: no answer within 30 s" in said(
        judged(IsWhole(SERVICE, CONTAINER, silent), values)
    )
    assert worst_of(judged(WHOLE, values)) == "UNKNOWN"


def test_speculation_that_is_silently_off(values: dict[Any, Any]) -> None:
    values[ServerInfo(URL, CONTAINER)] = ServerFacts("/server_info", {**INFO, "speculative_algorithm": None})
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, entries(faults={"silently-off": {}}), True)
    findings = judged(ON, values)
    reasons = [f.reason for f in findings if f.verdict == "FAIL"]
    assert any("speculation is off" in r for r in reasons), said(findings)
    assert any("no rank says that it loaded draft weights" in r for r in reasons), said(findings)


def test_the_line_about_48_requests_alone_proves_nothing(values: dict[Any, Any]) -> None:
    log = tuple(e for e in entries() if "reset to 48" in e.text)
    assert log
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, log, True)
    findings = judged(ON, values)
    assert any(f.verdict == "UNKNOWN" and "no line about loaded weights" in f.reason for f in findings), said(findings)


def test_a_tail_that_looks_healthy_is_not_whole(values: dict[Any, Any]) -> None:
    values[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, INVOCATION, entries()[-8:], False, ("earlier lines were rotated away",))
    findings = judged(ON, values)
    assert worst_of(findings) == "UNKNOWN", said(findings)
    assert "rotated away" in said(findings)


def test_other_numbers_than_wanted(values: dict[Any, Any]) -> None:
    values[ServerInfo(URL, CONTAINER)] = ServerFacts("/server_info", {**INFO, "speculative_num_steps": 3})
    assert "speculative_num_steps is 3, not 5" in said(judged(ON, values))


def test_how_many_requests_really_run(values: dict[Any, Any]) -> None:
    assert "6 requests really run at once, of 48" in said(judged(ON, values))


def test_a_start_that_failed() -> None:
    story = Started(
        SERVICE, applied("failed", "did not become ready: out of memory", start="died", said=[{"reason": "GPU full"}])
    )
    (log,) = story.needs()
    (finding,) = judged(story, {log: MoreLines((JournalEntry(T0, 100.0, 3, "out of memory"),), "s=1")})
    assert (finding.verdict, finding.lines[0]) == ("FAIL", "GPU full")
    assert finding.lines[1].endswith(": 1 journal line of it kept"), "before the next start buries it"
    (finding,) = judged(story, {})
    assert "its journal: " in finding.lines[1]
    assert Started(SERVICE, applied("failed", "not even stopped", invocation="")).needs() == ()
    assert worst_of(judged(Started(SERVICE, applied(stop_not_verified=["the GPUs: no nvidia-smi"])), {})) == "WARN"
    assert worst_of(judged(Started(SERVICE, applied("nothing-to-do", "so already")), {})) == "NOT_CHECKED"


def test_why_that_fast(values: dict[Any, Any]) -> None:
    text = said(judged(FAST, values))
    assert "a new process (700 → 812) of a new invocation; its GPUs were empty before it (at most 3 MiB in use)" in text
    assert "weights in 10 s (22.7 GiB a second)" in text
    assert "100% of them in the page cache: read from memory" in text
    probe = ServedCache(UNIT, CONTAINER)
    values[probe] = replace(values[probe], resident=0)
    findings = judged(FAST, values)
    assert worst_of(findings) == "WARN" and "with only 0%" in said(findings)
    values[probe] = replace(values[probe], resident=None, why_not="fincore is not there")
    assert "the whole page cache is 227 GiB" in said(judged(FAST, values))
    values[probe] = "?no folder"
    assert "was not explained: no folder" in said(judged(FAST, values))


def test_nothing_was_restarted(values: dict[Any, Any]) -> None:
    values[UnitState(UNIT, CONTAINER)] = unit(invocation_id=OLD)
    assert "nothing was restarted" in said(judged(FAST, values))
    slow = WhyThatFast(SERVICE, CONTAINER, applied(timeline=[{"key": "weights", "from_s": 10.0, "to_s": 310.0}], start_s=400.0))
    values[UnitState(UNIT, CONTAINER)] = unit()
    probe = ServedCache(UNIT, CONTAINER)
    values[probe] = replace(values[probe], resident=0)
    assert "no faster than a disk reads" in said(judged(slow, values))


def test_gpus_that_were_not_empty(values: dict[Any, Any]) -> None:
    full = WhyThatFast(SERVICE, CONTAINER, applied(gpu_used_mib_before_start={"0000:01:00.0": 90000}))
    assert "90000 MiB were in use" in said(judged(full, values))


def test_milestones_are_told_once_and_in_order() -> None:
    reader = StartReader(UNIT)
    lines = entries()
    reader.add(lines[:20])
    first = reader.news(reader.read())
    reader.add(lines[20:])
    rest = reader.news(reader.read())
    assert first and rest and not set(first) & set(rest)
    assert rest[-1].startswith("Ready after")
    assert reader.news(reader.read()) == []


def test_the_cause_of_an_end_is_the_fault_that_is_named() -> None:
    story = read_start(entries(faults={"draft-oom": {}}), UNIT)
    assert story.cause is not None
    assert story.cause.signature == "cuda-out-of-memory"

"""By which rules a pair matrix becomes a conclusion, and when it counts at all."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.checks.p2p import (
    FallbackInEffect,
    GpusAreFree,
    GpusAreKnown,
    LeftAsItWas,
    PairsUsable,
    ValidlyRun,
    concluded,
    failed_in_short,
    fallback_rows,
    usable,
    weighed,
)
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Finding, Measurement, Observation, Probe, Seen, Verdict
from proofbook.probes.journal import JournalEntry, UnitJournal, UnitLog
from proofbook.probes.memory import GpuProcess, GpuProcesses
from proofbook.probes.systemd import ProcessFacts, UnitProcess

NOW = datetime(2026, 4, 8, 15, 0, tzinfo=UTC)
A, B = "0000:01:00.0", "0000:41:00.0"
BOOT = "4f" * 16


def cell(src: str, dst: str, state: str = "verified", control: str = "verified", **more: Any) -> dict[str, Any]:
    paths = {"staged": {"state": control, "reason": "", "size": 0, "process": 0}}
    return {"src": src, "dst": dst, "state": state, "reason": "why", "faults": [], "silence": "", "paths": paths, **more}


def measured(*cells: Mapping[str, Any], allowed: bool | None = None, **run: Any) -> Measurement:
    said = {
        "ended": True, "stopped": "", "refused": "", "unfit": {}, "windows": 9, "results": 70, "boot_id": BOOT,
        "boot_now": BOOT, "restarted": False, "unrested": [], "disturbed": [],
        "company_not_known": "", "driver": 13020, "library": "libcuda.so.1",
    }  # fmt: skip
    value = {
        "gpus": [A, B] if cells else [A], "cells": list(cells), "together": run.pop("together", []),
        "foreign": run.pop("foreign", []), "locals": run.pop("locals", {A: "", B: ""}),
        "judged": {"allowed": allowed, "verdict": "UNKNOWN", "reason": "so it was judged", "limits": []},
        "run": {**said, **run},
    }  # fmt: skip
    return Measurement("p2p.Matrix", "", "pairs", {}, value, NOW, 1.0)


GOOD = (cell(A, B), cell(B, A))


@pytest.mark.parametrize(
    ("taken", "outcome", "because"),
    [
        (None, "blocked", "not tried: a server is on them"),
        (measured(), "blocked", "1 GPU: there is no pair"),
        (measured(*GOOD, allowed=True), "supported", "so it was judged"),
        (measured(cell(A, B, "wrong data"), cell(B, A), allowed=False), "refuted", "1 of 2 ordered pairs: wrong data"),
        (measured(cell(A, B, "wrong data", faults=["x"]), cell(B, A), allowed=False), "refuted", "faults of 1 of these pairs"),
        (measured(cell(A, B, "hung", control="not run"), cell(B, A, "not run")), "refuted", "1 of 2 ordered pairs: hung"),
        (measured(cell(A, B, "wrong data", control="wrong data"), cell(B, A), allowed=False), "inconclusive", "judged"),
        (measured(cell(A, B, "invalid"), cell(B, A), allowed=False), "inconclusive", "so it was judged"),
        (measured(cell(A, B, "not run"), cell(B, A)), "inconclusive", "so it was judged"),
        (measured(*GOOD, restarted=True), "refuted", "the machine restarted in the middle of it"),
        (
            measured(*GOOD, together=[{"phase": "both-directions", "src": A, "dst": B, "state": "hung", "path": "ce-push"}]),
            "refuted",
            "both-directions: hung in 1 pair that passed alone",
        ),
    ],
)
def test_the_conclusion_follows_from_the_pairs(taken: Measurement | None, outcome: str, because: str) -> None:
    said = concluded(taken, why_not="a server is on them", scope="this machine")
    assert said["outcome"] == outcome
    assert because in said["because"]
    assert (said["peer_to_peer"], said["scope"]) == ("allowed" if outcome == "supported" else "off", "this machine")


def verdicts(check: Any, seen: Seen | None = None) -> dict[Verdict, list[str]]:
    found: dict[Verdict, list[str]] = {}
    for finding in check.judge(seen if seen is not None else Seen()):
        assert isinstance(finding, Finding)
        found.setdefault(finding.verdict, []).append(finding.reason)
    return found


def test_lost_data_is_no_failure_of_the_run() -> None:
    assert set(verdicts(ValidlyRun(measured(cell(A, B, "wrong data"), cell(B, A, "fault"))))) == {Verdict.PASS}


@pytest.mark.parametrize(
    ("taken", "verdict", "words"),
    [
        (measured(refused="no libcuda"), Verdict.UNKNOWN, "did not run: no libcuda"),
        (measured(), Verdict.NOT_CHECKED, "there is no pair"),
        (measured(*GOOD, ended=False), Verdict.UNKNOWN, "was cut off"),
        (measured(*GOOD, ended=False, restarted=True), Verdict.WARN, "restarted under it"),
        (measured(cell(A, B, "hung"), cell(B, A, "not run"), unfit={B: "busy"}), Verdict.WARN, "1 of 2 ordered pairs tried"),
        (measured(*GOOD, locals={A: "error 46", B: ""}), Verdict.WARN, f"{A} (error 46)"),
        (measured(cell(A, B, control="wrong data"), cell(B, A)), Verdict.FAIL, "through host memory fails too"),
        (measured(cell(A, B, "invalid"), cell(B, A)), Verdict.FAIL, "cannot be true"),
        (measured(cell(A, B, silence="no IOMMU"), cell(B, A)), Verdict.NOT_CHECKED, "proves nothing here: no IOMMU"),
        (measured(*GOOD, foreign=["a fault of a NIC"]), Verdict.WARN, "no pair's: a fault of a NIC"),
    ],
)
def test_what_makes_the_run_doubtful(taken: Measurement, verdict: Verdict, words: str) -> None:
    assert any(words in reason for reason in verdicts(ValidlyRun(taken)).get(verdict, ()))


def test_the_machine_is_left_as_it_was_or_the_run_fails() -> None:
    assert set(verdicts(LeftAsItWas(measured(*GOOD)))) == {Verdict.PASS}
    restarted = verdicts(LeftAsItWas(measured(*GOOD, restarted=True, boot_now="a1" * 16)))
    assert "restarted in the middle" in restarted[Verdict.FAIL][0]
    busy = verdicts(LeftAsItWas(measured(*GOOD, unrested=[B], unfit={B: "busy at 100 %"})))
    assert f"{B} did not come to rest: busy at 100 %" in busy[Verdict.FAIL][0]
    before = verdicts(LeftAsItWas(measured(*GOOD, unfit={B: "its baseline failed"})))
    assert Verdict.FAIL not in before, "what was broken before is not the test's doing"


# --------------------------------------------------------------------------------------------- which pairs may be used


def broken(**sizes: list[int]) -> dict[str, Any]:
    """Paths that lost data, by name: in which sizes. A dash of a path's name is written as an underscore."""
    return {
        path.replace("_", "-"): {"state": "wrong data", "reason": "byte 0", "size": of[0], "process": 1, "failed": of}
        for path, of in sizes.items()
    }


def lost(src: str, dst: str) -> dict[str, Any]:
    return cell(src, dst, "wrong data") | {"paths": broken(ce_push=[4, 64 * 2**20], sm_store=[4, 64 * 2**20], ce_pull=[4099])}


def test_pairs_that_lose_data_stand_by_name_among_the_findings() -> None:
    (found,) = PairsUsable(measured(lost(A, B), cell(B, A), allowed=False)).judge(Seen())
    assert found.verdict is Verdict.WARN
    said = f"1 of 2 ordered pairs: wrong data: {A} to {B} (4 B, 64 MiB; ce-push, sm-store and 4099 B; ce-pull)"
    assert found.reason == f"{said}: peer-to-peer stays off"
    assert "NCCL_P2P_DISABLE=1" in found.what_to_do and "--disable-custom-all-reduce" in found.what_to_do
    assert list(found.observed) == [f"{A} to {B}"]


def test_a_pair_that_fails_only_among_others_is_told_apart() -> None:
    at_once = [{"phase": "all-at-once", "src": A, "dst": B, "state": "hung", "path": path} for path in ("ce-push", "ce-pull")]
    (found,) = PairsUsable(measured(*GOOD, together=at_once, allowed=False)).judge(Seen())
    assert found.reason.startswith(
        f"1 of 2 ordered pairs: hung in all-at-once, though right alone: {A} to {B} (ce-push, ce-pull)"
    )
    assert found.verdict is Verdict.WARN


def test_nothing_bad_passes_only_where_everything_was_shown_to_be_good() -> None:
    assert set(verdicts(PairsUsable(measured(*GOOD, allowed=True)))) == {Verdict.PASS}
    open_ = verdicts(PairsUsable(measured(cell(A, B, "not run"), cell(B, A))))
    assert "no pair is shown to be bad" in open_[Verdict.NOT_CHECKED][0]
    assert set(verdicts(PairsUsable(measured()))) == {Verdict.NOT_CHECKED}


def test_an_earlier_record_without_every_size_is_still_told() -> None:
    old = {"ce-push": {"state": "wrong data", "reason": "byte 0", "size": 4096, "process": 1}}
    assert failed_in_short(cell(A, B, "wrong data") | {"paths": old}) == "4 KiB; ce-push"
    assert failed_in_short(cell(A, B)) == ""


def test_one_direction_alone_makes_no_pair_usable() -> None:
    third = "0000:81:00.0"
    said = usable(measured(lost(A, B), cell(B, A), cell(A, third), cell(third, A)).value)
    assert f"only if both directions pass: 1 of 2 pairs ({A} and {third})" in said
    assert said.endswith(f"unusable although one direction passes: {B} to {A}")
    together = [{"phase": "both-directions", "src": A, "dst": B, "state": "hung", "path": "ce-push"}]
    assert "0 of 1 pair;" in usable(measured(*GOOD, together=together).value), "what fails among others is not usable"


def test_what_the_vendor_does_not_support_is_weighed_against_what_was_shown() -> None:
    value = {**measured(*GOOD, allowed=True).value, "iommu": {A: "DMA-FQ", B: "DMA-FQ"}}
    assert "shown to work here, in this state (IOMMU DMA-FQ)" in weighed(value) and "IO_PAGE_FAULT" in weighed(value)
    assert weighed({**value, "iommu": {A: "identity", B: "identity"}}) == ""
    assert weighed({**value, "iommu": {}}) == ""
    refuted = {**measured(lost(A, B), cell(B, A), allowed=False).value, "iommu": {A: "DMA-FQ"}}
    assert weighed(refuted) == "", "where it is off there is nothing to weigh"


# ------------------------------------------------------------------------------------------------- who is in the way

UNIT = ServiceSpec(name="sglang.service", container="")
BOX = ContainerSpec(name="llm", kind="pct", id="102", devices=())


def seen(probe: Probe[Any], value: Any, unknown: str = "") -> Observation[Any]:
    return Observation(probe, value, unknown, NOW, BOOT)


def process(cgroup: str, pid: int = 7) -> GpuProcess:
    return GpuProcess(pid=pid, pci=A, process="python", used_mib=1, cgroup=cgroup, inner_pid=None, started_s=None)


def test_only_a_service_that_is_known_may_be_in_the_way() -> None:
    check = GpusAreKnown(((UNIT, None),))
    ours = process("/system.slice/sglang.service")
    assert list(verdicts(check, Seen([seen(GpuProcesses(), ())]))) == [Verdict.PASS]
    assert "only sglang.service" in verdicts(check, Seen([seen(GpuProcesses(), (ours,))]))[Verdict.PASS][0]
    stranger = process("/user.slice/session-4.scope", 8)
    assert "nobody that the inventory knows" in verdicts(check, Seen([seen(GpuProcesses(), (ours, stranger))]))[Verdict.FAIL][0]
    other = ServiceSpec(name="vllm.service", container="")
    two = GpusAreKnown(((UNIT, None), (other, None)))
    both = (ours, process("/system.slice/vllm.service", 9))
    assert "2 services" in verdicts(two, Seen([seen(GpuProcesses(), both)]))[Verdict.FAIL][0]
    with pytest.raises(CannotTell):
        check.judge(Seen([seen(GpuProcesses(), None, "nvidia-smi is not there")]))


def test_free_means_that_somebody_looked() -> None:
    assert list(verdicts(GpusAreFree(), Seen([seen(GpuProcesses(), ())]))) == [Verdict.PASS]
    assert list(verdicts(GpusAreFree(), Seen([seen(GpuProcesses(), (process("/x"),))]))) == [Verdict.FAIL]
    assert list(verdicts(GpusAreFree(), Seen([seen(GpuProcesses(), None, "no answer")]))) == [Verdict.UNKNOWN]


# ------------------------------------------------------------------------------------------------------ the fallback


def running(argv: tuple[str, ...], environ: Mapping[str, str], *lines: str) -> Seen:
    facts = ProcessFacts("sglang.service", 9, argv, dict(environ), "", 1.0)
    entries = tuple(JournalEntry(NOW, 1.0, 6, text) for text in lines)
    log = UnitLog("sglang.service", "i", entries, True)
    return Seen([seen(UnitProcess("sglang.service", None), facts), seen(UnitJournal("sglang.service", None), log)])


def test_the_fallback_is_held_against_the_running_process() -> None:
    check, off = FallbackInEffect(UNIT), {"NCCL_P2P_DISABLE": "1"}
    good = verdicts(
        check, running(("python", "--disable-custom-all-reduce"), off, "NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct")
    )
    assert set(good) == {Verdict.PASS}
    half = verdicts(check, running(("python",), off))
    assert "does not carry --disable-custom-all-reduce" in half[Verdict.WARN][0]
    assert Verdict.NOT_CHECKED in half, "no line of NCCL shows nothing"
    lies = verdicts(
        check, running(("python", "--disable-custom-all-reduce"), off, "NCCL INFO Channel 00 : 1[1] -> 0[0] via P2P/IPC")
    )
    assert "still go via P2P" in lies[Verdict.WARN][0]


def test_the_fallback_names_every_server_and_its_proof() -> None:
    text = " ".join(f"{where} {what}" for where, what in fallback_rows())
    for word in (
        "NCCL_P2P_DISABLE=1",
        "SGLang",
        "vLLM",
        "--disable-custom-all-reduce",
        "via P2P/",
        "VLLM_ENABLE_PCIE_ALLREDUCE=0",
    ):
        assert word in text

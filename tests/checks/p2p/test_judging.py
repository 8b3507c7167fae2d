"""Whose fault it was, what a cell says, what a figure is worth, and what that means for serving."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.checks.p2p import (
    P2pMatrix,
    State,
    changed,
    class_of,
    findings,
    judge_matrix,
    judge_p2p,
    logs_of,
    prove_transport,
)
from proofbook.model import Verdict
from proofbook.probes.iommu import IommuFacts
from proofbook.probes.kernel_log import KernelLine, KernelMessages
from proofbook.remote.p2p import Rest

from . import conftest as host
from .conftest import BOOT, GPUS, NIC, PAIRS, A, B, C, D, Told, fault

Result = dict[str, Any]


def matrix_of(told: Told, **more: Any) -> P2pMatrix:
    known = {"topology": host.topology(), "iommu": host.iommu(), "boot_now": BOOT}
    return judge_matrix(told.run(), **{**known, **more})


def altered(pair: tuple[str, str], path: str = "ce-push", *, least: int = 0, phase: str = "pairs", **values: Any) -> Any:
    """A change of the results of one path of one pair from a size on."""

    def change(result: Result) -> Result:
        same = (result["src"], result["dst"], result["phase"]) == (*pair, phase)
        return {**result, **values} if same and path in (result["path"], "*") and result["size"] >= least else result

    return change


def states(matrix: P2pMatrix, but: State = State.VERIFIED) -> dict[tuple[str, str], State]:
    return {pair: cell.state for pair, cell in matrix.cells.items() if cell.state is not but}


# -------------------------------------------------------------------------------------------------------------- healthy


def test_a_healthy_host_may_use_it(told: Told) -> None:
    matrix = matrix_of(told)
    verdict = judge_p2p(matrix)
    assert (verdict.allowed, verdict.verdict, verdict.fallback) == (True, Verdict.PASS, None)
    assert verdict.reason == "all 12 ordered pairs pass every path, alone and together"
    assert matrix.counts() == {"verified": 12}
    cell = matrix.cells[A, B]
    assert (cell.klass, cell.silence, cell.slow) == ("same NUMA node", "", ())
    assert cell.advertised == "r OK, w OK, driver: can access"
    assert cell.speeds["ce-push"].figure.gbps == 55.0
    assert not any("proves nothing" in limit for limit in verdict.limits)
    assert {f.verdict for f in findings(matrix)} == {Verdict.PASS, Verdict.NOT_CHECKED}


def test_one_gpu_has_no_pair() -> None:
    matrix = matrix_of(Told(gpus=(A,)))
    assert judge_p2p(matrix).verdict is Verdict.NOT_CHECKED
    assert judge_p2p(matrix).allowed is None


def test_two_gpus_lack_nothing_when_never_more_than_both_directions_ran() -> None:
    assert judge_p2p(matrix_of(Told(gpus=(A, B)))).allowed is True
    assert not any("not tried" in limit for limit in judge_p2p(matrix_of(Told(gpus=(A, B)))).limits)


# --------------------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"outcome": "wrong-data", "bad": {"count": 8, "first_offset": 0, "kind": "poison", "outside": 0}}, State.WRONG_DATA),
        ({"outcome": "error", "code": 205, "call": "cuMemcpyPeerAsync"}, State.ERROR),
        ({"outcome": "crashed", "why": "died of signal 11"}, State.ERROR),
        ({"outcome": "hung", "code": 600, "call": "cuStreamQuery"}, State.HUNG),
    ],
)
@pytest.mark.parametrize("process", [1, 2])
def test_one_bad_pair_forbids_all_and_says_what_to_serve_with(told: Told, values: Result, state: State, process: int) -> None:
    change = altered((C, A), "sm-load", least=524288, **values)
    told.change = lambda result: change(result) if result["process"] == process else result
    matrix = matrix_of(told)
    assert states(matrix) == {(C, A): state}
    assert matrix.cells[C, A].paths["sm-load"].size == 524288
    verdict = judge_p2p(matrix)
    assert (verdict.allowed, verdict.verdict) == (False, Verdict.FAIL)
    assert f"1 of 12 ordered pairs: {state}" in verdict.reason
    assert verdict.fallback is not None
    assert verdict.fallback.environment["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in verdict.fallback.sglang and "--disable-custom-all-reduce" in verdict.fallback.vllm
    assert "NCCL_P2P_DISABLE=1" in findings(matrix)[0].what_to_do


def test_lost_writes_with_an_empty_log_fail_all_the_same(told: Told) -> None:
    told.change = altered((A, B), outcome="wrong-data", bad={"count": 4, "first_offset": 0, "kind": "poison", "outside": 0})
    matrix = matrix_of(told)
    assert matrix.cells[A, B].reason.startswith("ce-push: 4 bytes never arrived, the first at offset 0")
    assert not matrix.cells[A, B].faults


def test_a_pair_that_was_not_tested_to_the_end_is_not_verified(told: Told) -> None:
    told.change = lambda r: None if (r["src"], r["dst"], r["path"], r["process"]) == (A, B, "sm-store", 2) else r
    matrix = matrix_of(told)
    assert states(matrix) == {(A, B): State.NOT_RUN}
    assert (judge_p2p(matrix).allowed, judge_p2p(matrix).verdict) == (None, Verdict.UNKNOWN)
    assert judge_p2p(matrix).fallback is not None


def test_where_the_control_fails_too_it_says_so(told: Told) -> None:
    told.change = altered((A, B), "*", outcome="wrong-data", bad={"count": 4, "first_offset": 0, "kind": "other", "outside": 0})
    assert "not peer-to-peer's fault alone" in matrix_of(told).cells[A, B].reason


def test_a_hang_of_both_directions_alone_forbids_it(told: Told) -> None:
    told.change = altered((A, B), "sm-store", phase="both-directions", outcome="hung")
    matrix = matrix_of(told)
    assert not states(matrix)
    assert judge_p2p(matrix).reason == "both-directions: hung in 1 pair"
    assert judge_p2p(matrix).allowed is False


def test_a_gpu_that_does_not_come_to_rest_is_wedged(told: Told) -> None:
    window = 4 + 1 + PAIRS.index((A, B))
    run = told.run()
    run = replace(run, rests=(Rest(window, B, True, 100, 120.0, ""),), unfit={B: "busy at 100 % with nothing left to do"})
    matrix = judge_matrix(run, topology=host.topology(), iommu=host.iommu(), boot_now=BOOT)
    assert states(matrix) == {(A, B): State.HUNG}
    assert f"{B} was left alone" in judge_p2p(matrix).reason


def test_a_restart_in_the_middle_is_a_result(told: Told) -> None:
    told.end = False
    told.extra = [{"event": "about", "phase": "pairs", "src": D, "dst": C, "path": "sm-store", "size": 4, "process": 1}]
    matrix = matrix_of(told, boot_now="a1" * 16)
    assert matrix.cells[D, C].reason == "the machine restarted while sm-store was under way"
    assert judge_p2p(matrix).allowed is False
    assert any("restarted in the middle" in problem for problem in matrix.problems)


def test_a_run_that_was_cut_off_is_unknown(told: Told) -> None:
    told.end = False
    verdict = judge_p2p(matrix_of(told))
    assert (verdict.allowed, verdict.verdict) == (None, Verdict.UNKNOWN)
    assert "cut off" in verdict.reason


# ---------------------------------------------------------------------------------------------------------- attribution


def test_the_pair_of_the_window_is_to_blame(told: Told) -> None:
    told.lines = {(A, C): [fault(A), "amd_iommu_report_page_fault: 10432 callbacks suppressed", fault(A)]}
    matrix = matrix_of(told)
    assert states(matrix) == {(A, C): State.FAULT}
    (found,) = matrix.cells[A, C].faults
    assert (found.requester, found.write, found.count, found.at_least) == (A, True, 10434, True)
    assert "at least 10434 lines" in matrix.cells[A, C].reason
    assert "the only pair that was active" in found.how


def test_a_peer_bar_names_the_peer(told: Told) -> None:
    told.lines = {(A, C): [fault(A, host.BARS[C][0][0] + 0x1000)]}
    (found,) = matrix_of(told).cells[A, C].faults
    assert found.how.endswith(f"the address lies in a BAR of its peer {C}")


def test_the_bar_of_a_third_gpu_clears_the_pair(told: Told) -> None:
    told.lines = {(A, C): [fault(A, host.BARS[D][0][0])]}
    matrix = matrix_of(told)
    assert not states(matrix)
    assert D in matrix.foreign[0].why
    assert judge_p2p(matrix).allowed is False  # a GPU faulted, and nobody can say in which pair


def test_the_fault_of_a_nic_in_the_window_is_not_the_pairs(told: Told) -> None:
    told.lines = {(A, C): [fault(NIC, driver="ice")]}
    matrix = matrix_of(told)
    assert not states(matrix)
    assert (matrix.foreign[0].device, judge_p2p(matrix).allowed) == (NIC, True)
    assert Verdict.WARN in {f.verdict for f in findings(matrix) if f.subject == NIC}
    assert Verdict.FAIL not in {f.verdict for f in findings(matrix)}


@pytest.mark.parametrize(("write", "pair"), [(True, (B, A)), (False, (A, B))])
def test_with_both_directions_active_the_flags_tell_which(told: Told, write: bool, pair: tuple[str, str]) -> None:
    told.lines = {("both-directions", A, B): [fault(B, write=write)]}
    assert states(matrix_of(told)) == {pair: State.FAULT}


def test_with_all_active_only_the_address_can_tell(told: Told) -> None:
    told.lines = {("all-at-once", *GPUS): [fault(A, host.BARS[C][0][0])]}
    assert states(matrix_of(told)) == {(A, C): State.FAULT}
    told.lines = {("all-at-once", *GPUS): [fault(A)]}
    matrix = matrix_of(told)
    assert not states(matrix)
    assert set(matrix.shared[0].pairs) == {pair for pair in PAIRS if A in pair}
    assert judge_p2p(matrix).allowed is False


def test_an_xid_of_a_gpu_of_the_pair_is_its_fault(told: Told) -> None:
    told.lines = {(A, B): ["NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."]}
    matrix = matrix_of(told)
    assert states(matrix) == {(A, B): State.FAULT}
    assert matrix.cells[A, B].faults[0].signature == "xid-79"


def test_a_fault_between_windows_is_nobodys_and_not_forgotten(told: Told) -> None:
    late = {"event": "kernel", "window": None, "seq": 1, "priority": 4, "monotonic_s": 1.0, "text": fault(A)}
    told.extra = [late]
    matrix = matrix_of(told)
    assert not states(matrix)
    assert matrix.foreign[0].why == "it came between two windows"
    assert judge_p2p(matrix).allowed is False


@pytest.mark.parametrize(
    ("iommu", "why"),
    [
        (None, "not known"),
        (IommuFacts({}, {}), "no IOMMU is at work"),
        (host.iommu("identity"), "does not translate for"),
    ],
)
def test_where_no_fault_can_be_logged_silence_proves_nothing(told: Told, iommu: IommuFacts | None, why: str) -> None:
    matrix = matrix_of(told, iommu=iommu)
    assert all(why in cell.silence for cell in matrix.cells.values())
    verdict = judge_p2p(matrix)
    assert verdict.allowed is True  # the data was compared; that is what counts
    assert any("a clean kernel log proves nothing here" in limit for limit in verdict.limits)


def test_lines_that_were_lost_make_silence_worthless(told: Told) -> None:
    told.lost = 1
    assert "overwritten" in matrix_of(told).cells[A, B].silence
    holes = Told(unread="/dev/kmsg: Operation not permitted")
    assert "Operation not permitted" in matrix_of(holes).cells[A, B].silence


def test_the_journal_stands_in_where_the_probe_could_not_read(told: Told) -> None:
    told.unread = "/dev/kmsg: Operation not permitted"
    run = told.run()
    window = next(w for w in run.windows if w.pairs == ((B, D),))
    at = [window.opened_s - 1, window.opened_s + 1]
    lines = tuple(KernelLine(t, datetime(2026, 1, 1, tzinfo=UTC), 4, fault(B)) for t in at)
    messages = KernelMessages(lines, True, (), "journal", BOOT)
    matrix = matrix_of(told, logs=logs_of(run, messages))
    assert matrix.cells[B, D].state is State.FAULT
    assert matrix.cells[B, D].faults[0].count == 1
    other_boot = KernelMessages(lines, True, (), "journal", "a1" * 16)
    assert not logs_of(run, other_boot)


# ------------------------------------------------------------------------------------------------------------ bandwidth


def scaled(pair: tuple[str, str], factor: float, path: str = "ce-push") -> Any:
    def change(result: Result) -> Result:
        if (result["src"], result["dst"], result["path"]) != (*pair, path):
            return result
        return {**result, "gbps": [g * factor for g in result["gbps"]]}

    return change


def test_more_than_the_link_carries_is_no_record(told: Told) -> None:
    told.change = scaled((A, B), 103.88 / 55)
    matrix = matrix_of(told)
    assert states(matrix) == {(A, B): State.INVALID}
    assert "no measurement" in matrix.cells[A, B].reason
    assert ((A, B), "ce-push") not in matrix.figures
    assert judge_p2p(matrix).allowed is False


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, Verdict.PASS), (0.7, Verdict.WARN), (0.4, Verdict.FAIL)])
def test_an_outlier_is_held_against_its_class(told: Told, factor: float, verdict: Verdict) -> None:
    told.change = scaled((A, C), factor)
    matrix = matrix_of(told)
    assert not states(matrix)
    assert (judge_p2p(matrix).verdict, judge_p2p(matrix).allowed) == (verdict, True)
    assert bool(matrix.cells[A, C].slow) is (verdict is not Verdict.PASS)


def test_a_whole_host_that_got_slow_is_held_against_its_last_good_run(told: Told) -> None:
    good = matrix_of(Told()).figures
    told.change = lambda r: {**r, "gbps": [g * 0.83 for g in r["gbps"]]}
    assert not any("median" in s for s in matrix_of(told).cells[A, C].slow)
    assert "last good run" in matrix_of(told, baseline=good).cells[A, C].slow[0]


def test_the_floors_hold_for_a_link_of_that_speed_only(told: Told) -> None:
    told.change = lambda r: {**r, "gbps": [g * 0.5 for g in r["gbps"]]}
    assert any("floor of 45 GB/s" in s for s in matrix_of(told).cells[A, B].slow)
    gen4 = host.topology(limit_gbps=dict.fromkeys(GPUS, 31.508))
    assert not matrix_of(told, topology=gen4).cells[A, B].slow


def test_a_small_copy_that_takes_as_long_as_through_the_host_is_suspect(told: Told) -> None:
    told.change = altered((A, B), us=[14.2])
    assert "through host memory" in matrix_of(told).cells[A, B].slow[0]


def test_the_class_of_a_pair() -> None:
    links = {(A, B): "PIX", (A, C): "SYS", (A, D): "NV4", (B, C): ""}
    known = host.topology(links=links)
    assert [class_of(known, pair) for pair in links] == ["same switch", "cross socket", "NVLink", "cross socket"]
    assert class_of(host.topology(links={}, numa={}), (A, B)) == class_of(None, (A, B)) == "unknown"


# --------------------------------------------------------------------------------------------------- compare and prove


def test_what_another_driver_changed(told: Told) -> None:
    before = matrix_of(Told())
    told.change = altered((A, B), outcome="hung")
    assert changed(before, matrix_of(told)) == (f"{A} to {B}: hung, before verified",)
    assert changed(before, before) == ("all 12 pairs as before",)


def test_a_matrix_is_json(told: Told) -> None:
    value = json.loads(json.dumps(matrix_of(told).value()))
    assert value["counts"] == {"verified": 12}
    assert value["cells"][0]["gbps"]["ce-push"] == [55.0, 54.45, 55.55]


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (["NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct"], Verdict.PASS),
        (["NCCL INFO Channel 00 : 1[1] -> 0[0] via P2P/CUMEM", "Channel 01 : 0[0] -> 1[1] via SHM/direct/direct"], Verdict.FAIL),
        (["NCCL INFO Init COMPLETE"], Verdict.UNKNOWN),
    ],
)
def test_the_fallback_is_proven_by_nccls_own_lines(lines: list[str], verdict: Verdict) -> None:
    assert prove_transport(lines)[0] is verdict

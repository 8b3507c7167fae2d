"""The peer-to-peer probe runs for real against a stand-in for the driver library, which makes of its copies what a plan says."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proofbook.checks.p2p import FALLBACK, judge_matrix, judge_p2p
from proofbook.errors import CannotTell
from proofbook.probes.iommu import IommuFacts, IommuGroup
from proofbook.remote import p2p
from proofbook.remote.p2p import CopyResult, P2pRun, read_p2p
from proofbook.remote.p2p_probe import CALLS, PTX

SOURCE = Path(__file__).parents[1] / "fake_cuda" / "libcuda.c"
# In CUDA's order, which is not that of the addresses: what is judged by ordinal is judged wrong.
C, A, B = "0000:c1:00.0", "0000:01:00.0", "0000:41:00.0"
UUIDS = {C: "3" * 32, A: "1" * 32, B: "2" * 32}
MIB = 1048576
SIZES = [4, 4099, 4096, MIB]
PEER_PATHS = ("ce-push", "ce-pull", "sm-store", "sm-load")


@dataclass
class Machine:
    """A machine with the stand-in: ``run`` runs the probe there to its end."""

    library: Path
    folder: Path
    python: str = sys.executable
    program: str = p2p.P2P_PROBE

    def plan(self, *statements: str, gpus: Sequence[str] = (C, A)) -> None:
        devices = [f"device {pci} {UUIDS[pci]} 4096 Fake GPU" for pci in gpus]
        (self.folder / "plan").write_text("\n".join((*devices, *statements)) + "\n")

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        quick = {"grace_s": 0, "smi": "", "kmsg": "", "sizes": SIZES, "together_size": MIB, "gone_s": 5, "idle_s": 0}
        env = {"PATH": os.environ["PATH"], "FAKE_CUDA_PLAN": str(self.folder / "plan"), "PROOFBOOK_LIBCUDA": str(self.library)}
        argv = [self.python, "-c", self.program, json.dumps({**quick, **options})]
        return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *, status: int = 0, stdin: bytes = b"", **options: Any) -> P2pRun:
        process = self.start(**options)
        out, err = process.communicate(stdin, timeout=120)
        assert (process.returncode, err) == (status, b"")
        return read_p2p(out.splitlines(keepends=True))


@pytest.fixture
def machine(fake_libcuda: Path, tmp_path: Path) -> Machine:
    made = Machine(fake_libcuda, tmp_path)
    made.plan()
    return made


def outcomes(results: Sequence[CopyResult]) -> set[str]:
    return {r.outcome for r in results}


def of(run: P2pRun, src: str, dst: str, path: str = "", process: int = 0, phase: str = "pairs") -> list[CopyResult]:
    return [
        r
        for r in run.results
        if (r.phase, r.src, r.dst) == (phase, src, dst) and path in ("", r.path) and process in (0, r.process)
    ]


# ------------------------------------------------------------------------------------------------------------- healthy


def test_everything_is_copied_by_every_path_and_compared(machine: Machine) -> None:
    machine.plan(f"link {C} {A} 40 0.7", gpus=(C, A, B))
    run = machine.run()
    assert (run.ended, run.stopped, run.unfit, run.under_way) == (True, "", {}, None)
    assert run.boot_id == run.end_boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert [(d.ordinal, d.pci) for d in run.devices] == [(0, C), (1, A), (2, B)]
    assert run.devices[1].uuid == "GPU-11111111-1111-1111-1111-111111111111"
    assert outcomes(run.results) == {"ok"}
    pairs = [(a, b) for a in (C, A, B) for b in (C, A, B) if a != b]
    for pair in pairs:
        told = {(r.path, r.size, r.process) for r in of(run, *pair)}
        assert told == {(path, n, k) for path in PEER_PATHS for n in SIZES for k in (1, 2)} | {("staged", n, 1) for n in SIZES}
    assert {r.pair for r in run.results if r.phase == "all-at-once"} == set(pairs)
    assert len([w for w in run.windows if w.phase == "both-directions"]) == 3
    assert [local.ok for local in run.locals] == [True] * 3
    (slow,) = of(run, C, A, "ce-push", 1)[-1:]
    assert all(38 < g < 41 for g in slow.gbps) and len(slow.gbps) == 5
    assert all(0.6 < u < 0.9 for u in of(run, C, A, "sm-load", 1)[0].us)


def test_every_step_is_on_the_disk_before_it_begins(machine: Machine, tmp_path: Path) -> None:
    state = tmp_path / "deep" / "folder" / "p2p.jsonl"
    process = machine.start(state=str(state), phases=["pairs"], pairs=[[A, C]], repeats=1)
    out, _ = process.communicate(timeout=120)
    assert state.read_bytes() == out
    assert state.parent.stat().st_mode & 0o777 == 0o700
    events = [json.loads(line) for line in out.splitlines()]
    told = [(e["event"], e["path"], e["size"]) for e in events if e["event"] in ("about", "result") and "path" in e]
    assert told == [(event, path, n) for path in p2p.P2P_PATHS for n in SIZES for event in ("about", "result")]
    assert {r.pair for r in read_p2p(out.splitlines(keepends=True)).results} == {(A, C)}


#: The probe with an fsync that says on stderr how much the file holds that goes to the disk.
SPYING = """
import os, sys
from proofbook.remote import p2p_probe
sync = os.fsync
def fsync(descriptor):
    os.write(2, b"%d " % os.fstat(descriptor).st_size)
    sync(descriptor)
os.fsync = fsync
sys.exit(p2p_probe.main(sys.argv))
"""


def test_what_a_step_follows_is_on_the_disk_before_it_begins(machine: Machine, tmp_path: Path) -> None:
    machine.program = SPYING
    options: dict[str, Any] = {"phases": ["pairs"], "sizes": [4], "pairs": [[A, C]], "repeats": 1}
    out, err = machine.start(state=str(tmp_path / "p2p.jsonl"), **options).communicate(timeout=120)
    written, synced = 0, {int(n) for n in err.split()}
    for line in out.splitlines(keepends=True):
        written += len(line)
        if json.loads(line)["event"] in ("about", "window", "closed", "end"):
            assert written in synced


# ------------------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("lost", {"kind": "poison", "count": MIB, "first_offset": 0, "outside": 0}),
        ("zeros", {"kind": "zeros", "count": MIB, "first_offset": 0, "outside": 0}),
        ("garbage 3", {"kind": "other", "count": 12, "first_offset": 0, "outside": 0}),
        ("shift 8", {"kind": "other", "count": MIB, "first_offset": 0, "outside": 8}),
    ],
)
@pytest.mark.parametrize("path", PEER_PATHS)
def test_wrong_data_is_found_where_it_is_and_nowhere_else(
    machine: Machine, kind: str, expected: dict[str, Any], path: str
) -> None:
    machine.plan(f"fault {A} {C} {path} 524288 1e12 {kind}")
    run = machine.run(phases=["pairs"])
    wrong = [r for r in run.results if r.outcome != "ok"]
    assert {(r.src, r.dst, r.path, r.size, r.outcome) for r in wrong} == {(A, C, path, MIB, "wrong-data")}
    assert {r.process for r in wrong} == {1, 2}
    for result in wrong:
        assert result.bad is not None
        assert {name: result.bad[name] for name in expected} == expected


def test_a_copy_that_is_right_the_first_time_only_is_found(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} ce-push {MIB} {MIB} from 1 lost")
    (found,) = [r for r in machine.run(phases=["pairs"], repeats=1).results if r.outcome != "ok"]
    assert (found.path, found.size, found.outcome) == ("ce-push", MIB, "wrong-data")


def test_a_pair_that_is_wrong_in_one_process_only_is_found(machine: Machine, tmp_path: Path) -> None:
    machine.plan(f"fault {A} {C} sm-store 4096 4096 once-wrong {tmp_path / 'mark'}")
    wrong = [(r.process, r.path, r.size) for r in machine.run(phases=["pairs"]).results if r.outcome != "ok"]
    assert wrong == [(1, "sm-store", 4096)]


def test_an_error_costs_the_rest_of_its_path_and_the_next_path_goes_on(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} ce-pull 4096 4096 error 205", f"fault {A} {C} sm-store 4 4 error 700")
    run = machine.run(phases=["pairs"], repeats=1)
    assert [(r.size, r.outcome) for r in of(run, A, C, "ce-pull")] == [
        (4, "ok"), (4099, "ok"), (4096, "error"), (MIB, "not-run")
    ]  # fmt: skip
    failed = next(r for r in of(run, A, C, "ce-pull") if r.outcome == "error")
    assert (failed.code, failed.call, failed.why) == (
        205, "cuMemcpyPeerAsync", "cuMemcpyPeerAsync returned 205 CUDA_ERROR_MAP_FAILED"
    )  # fmt: skip
    assert [r.outcome for r in of(run, A, C, "sm-store")] == ["error", "not-run", "not-run", "not-run"]
    assert outcomes(of(run, A, C, "sm-load")) == outcomes(of(run, A, C, "staged")) == outcomes(of(run, C, A)) == {"ok"}


def test_a_pair_that_failed_alone_is_not_tried_together_with_others(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} sm-store 4 4 error 719", gpus=(C, A, B))
    run = machine.run(sizes=[4])
    both = {(r.pair, r.path, r.outcome) for r in run.results if r.phase == "both-directions" and {A, C} == set(r.pair)}
    assert both == {((A, C), "*", "not-run")}
    together = [r for r in run.results if r.phase == "all-at-once"]
    assert {r.pair for r in together if r.outcome == "not-run"} == {(A, C)}
    assert {r.pair for r in together if r.outcome == "ok"} >= {(C, A), (A, B), (B, C)}


def test_where_kernels_cannot_be_compiled_the_copy_engines_are_tested_all_the_same(machine: Machine) -> None:
    machine.plan("fault * * module 0 0 error 221")
    run = machine.run(phases=["pairs"], repeats=1)
    assert outcomes(of(run, A, C, "ce-push")) == {"ok"}
    assert [bool(r.us) for r in of(run, A, C, "ce-push")] == [False, False, False, True]
    failed = [r for r in of(run, A, C, "sm-store") if r.outcome == "error"]
    assert [(r.code, r.call) for r in failed] == [(221, "cuModuleLoadData")]


def test_a_crash_is_the_outcome_of_its_step(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} sm-load 4096 4096 crash")
    run = machine.run(phases=["pairs"], repeats=1)
    assert [r.outcome for r in of(run, A, C, "sm-load")] == ["ok", "ok", "crashed", "not-run"]
    assert "signal 11" in of(run, A, C, "sm-load")[2].why
    assert outcomes(of(run, A, C, "staged")) == outcomes(of(run, C, A)) == {"ok"}


def test_after_a_hang_the_pair_is_left_alone_and_its_gpus_must_prove_themselves(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} ce-pull 4096 4096 hang", gpus=(C, A, B))
    run = machine.run(step_deadline_s=0.2, phases=["pairs"])
    assert [r.outcome for r in of(run, A, C, "ce-pull")] == ["ok", "ok", "hung", "not-run"]
    assert outcomes(of(run, A, C, "sm-store")) == outcomes(of(run, A, C, "staged")) == {"not-run"}
    assert not of(run, A, C, process=2)
    assert {local.pci for local in run.locals} == {A, C}  # rechecked, and well: the others go on
    assert outcomes([r for r in run.results if r.pair != (A, C)]) == {"ok"}


def test_a_gpu_that_does_not_come_back_is_left_alone(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} ce-pull 4096 4096 hang", f"fault {A} {A} local 0 1e12 hang", gpus=(C, A, B))
    run = machine.run(step_deadline_s=0.2, phases=["pairs"])
    assert set(run.unfit) == {A}
    later = [r for r in run.results if A in r.pair and r.path == "*"]
    assert {r.pair for r in later} == {(A, B), (B, A)}
    assert outcomes(later) == {"not-run"}
    assert outcomes(of(run, B, C) + of(run, C, B)) == {"ok"}


def test_a_process_that_no_signal_ends_stops_the_matrix(machine: Machine, tmp_path: Path) -> None:
    machine.plan(f"fault {C} {A} sm-store 0 1e12 stall", f"proc {tmp_path}")
    run = machine.run(status=3, proc=str(tmp_path), pair_deadline_s=6, gone_s=0.1, phases=["pairs"])
    assert run.stopped.startswith("child in D state: process ")
    assert run.ended
    assert not of(run, A, C)
    assert run.windows[-1].closed_s is None
    last = run.results[-1]
    assert (last.pair, last.path, last.outcome, last.why) == ((C, A), "sm-store", "hung", run.stopped)
    assert judge_matrix(run).cells[C, A].state == "hung"


def test_when_its_time_is_over_a_window_is_cut_off_and_nothing_is_called_hung_for_that(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} sm-store 0 1e12 stall", gpus=(A, C, B))
    run = machine.run(status=3, most_s=8, window_s=0.01, pair_deadline_s=60, gone_s=1, phases=["pairs"])
    assert run.stopped.startswith("the time that it had is over (8 s), in the middle of a window")
    assert (run.ended, run.windows[-1].closed_s, run.windows[-1].pairs) == (True, None, ((A, C),))
    assert "hung" not in outcomes(run.results)
    judged = judge_matrix(run)
    assert judged.cells[A, C].state == "not run"
    assert judge_p2p(judged).allowed is None


def test_no_window_is_opened_that_may_outlast_its_time(machine: Machine) -> None:
    run = machine.run(status=3, most_s=1000, window_s=1001, phases=["pairs"])
    assert (run.windows, run.results) == ((), ())
    assert "but for less than a window may take" in run.stopped
    assert judge_p2p(judge_matrix(run)).allowed is None


def test_a_stuck_process_of_several_pairs_stops_the_matrix_too(machine: Machine, tmp_path: Path) -> None:
    machine.plan(f"fault {A} {C} ce-pull 5 1e12 stall", f"proc {tmp_path}")
    run = machine.run(status=3, proc=str(tmp_path), pair_deadline_s=6, gone_s=0.1, phases=["both-directions"], sizes=[MIB])
    assert {(r.pair, r.path, r.outcome) for r in run.results if r.outcome != "ok"} == {
        ((A, C), "ce-pull", "hung"), ((C, A), "ce-pull", "hung")
    }  # fmt: skip
    assert run.stopped.startswith("child in D state")


def test_a_driver_that_never_answers_stops_it_before_the_first_pair(machine: Machine) -> None:
    machine.plan("fault * * init 0 0 hang")
    run = machine.run(status=3, pair_deadline_s=0.3)
    assert "no end within its deadline" in run.stopped
    assert not run.results


def test_a_gpu_whose_baseline_fails_is_in_no_pair(machine: Machine) -> None:
    machine.plan(f"fault {B} * context 0 0 error 46", gpus=(C, A, B))
    run = machine.run()
    assert [(local.pci, local.ok) for local in run.locals] == [(C, True), (A, True), (B, False)]
    assert "46" in run.locals[2].why
    assert {r.outcome for r in run.results if B in r.pair} == {"not-run"}
    assert {r.outcome for r in run.results if B not in r.pair} == {"ok"}


def test_where_the_driver_refuses_only_the_control_runs(machine: Machine) -> None:
    machine.plan(f"deny {A} {C}")
    run = machine.run(phases=["pairs"], repeats=1)
    claims = run.claims[A, C]
    assert (claims.can_access, claims.access) == (False, False)
    for path in PEER_PATHS:
        assert {(r.outcome, r.code, r.call) for r in of(run, A, C, path)} == {("error", 217, "cuCtxEnablePeerAccess")}
    assert outcomes(of(run, A, C, "staged")) == {"ok"}


def test_a_hang_of_both_directions_alone_is_found(machine: Machine) -> None:
    machine.plan("fault * * sm-store 65536 1e12 together hang")
    run = machine.run(step_deadline_s=0.2)
    assert outcomes([r for r in run.results if r.phase == "pairs"]) == {"ok"}
    both = {(r.path, r.outcome) for r in run.results if r.phase == "both-directions"}
    assert both == {("ce-push", "ok"), ("ce-pull", "ok"), ("sm-store", "hung"), ("sm-store", "not-run")}


def test_impossible_speed_is_told_as_it_was_measured(machine: Machine) -> None:
    machine.plan(f"fault {A} {C} ce-push {MIB} 1e12 gbps 1000000")
    run = machine.run(phases=["pairs"], repeats=1)
    assert min(of(run, A, C, "ce-push")[-1].gbps) > 1000
    assert max(of(run, C, A, "ce-push")[-1].gbps) < 60


def test_too_little_memory_says_nothing_of_the_pair(machine: Machine) -> None:
    run = machine.run(sizes=[4, 8 << 30], phases=["pairs"], repeats=1)
    assert outcomes(run.results) == {"not-run"}
    assert {(r.code, r.call) for r in run.results if r.code} == {(2, "cuMemAlloc_v2")}


# ---------------------------------------------------------------------------------------- the kernel's log, and at rest


def test_lines_of_the_kernel_belong_to_the_window_in_which_they_came(machine: Machine, tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("6,1,100,-;a line from before\n")
    line = "nvidia %a: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"
    machine.plan(f"kmsg {kmsg}", f"fault {C} {A} ce-pull {MIB} {MIB} line {line}")
    run = machine.run(kmsg=str(kmsg), phases=["pairs"], repeats=1)
    first, second = run.windows
    assert (first.pairs, second.pairs) == (((C, A),), ((A, C),))
    assert first.lines and not second.lines and not run.outside
    assert first.lines[0].text == line.replace("%a", A)
    assert first.opened_s <= first.lines[0].monotonic_s <= (first.closed_s or 0)
    assert first.unread == ""


def test_where_the_kernel_log_cannot_be_read_it_says_so(machine: Machine, tmp_path: Path) -> None:
    run = machine.run(kmsg=str(tmp_path / "none"), phases=["pairs"], repeats=1, sizes=[4])
    assert {w.unread for w in run.windows} == {f"{tmp_path / 'none'}: No such file or directory"}


SMI = """#!/bin/sh
echo '00000000:C1:00.0, 0, 80.5'
echo '00000000:01:00.0, {busy}, [N/A]'
"""


@pytest.mark.parametrize(("utilisation", "unfit"), [(0, set()), (100, {A})])
def test_a_gpu_that_does_not_come_to_rest_is_left_alone(
    machine: Machine, tmp_path: Path, utilisation: int, unfit: set[str]
) -> None:
    smi = tmp_path / "smi"
    smi.write_text(SMI.format(busy=utilisation))
    smi.chmod(0o755)
    run = machine.run(smi=str(smi), phases=["pairs"], repeats=1, sizes=[4])
    assert set(run.unfit) == unfit
    assert [(r.pci, r.busy, r.watts) for r in run.rests][:2] == [(C, False, 80.5), (A, bool(unfit), None)]
    assert outcomes(of(run, A, C)) == ({"not-run"} if unfit else {"ok"})


def test_where_nobody_tells_whether_they_are_at_rest_it_says_so(machine: Machine) -> None:
    run = machine.run(smi="/nonexistent/nvidia-smi", phases=["pairs"], repeats=1, sizes=[4])
    assert {r.busy for r in run.rests} == {None}
    assert "No such file" in run.rests[0].why
    assert outcomes(run.results) == {"ok"}


# ------------------------------------------------------------------------------------------------------- how it is led


def test_in_lockstep_no_window_opens_or_closes_without_a_word(machine: Machine) -> None:
    words = b"".join(b"go %d\ngo %d\n" % (n, n) for n in (1, 2))
    options: dict[str, Any] = {"lockstep": True, "phases": ["pairs"], "repeats": 1, "sizes": [4]}
    assert machine.run(stdin=words, **options).ended
    run = machine.run(status=3, stdin=words[:10], **options)
    assert run.stopped == "expected 'go 2', got ''"
    assert {r.pair for r in run.results} == {(C, A)}


def child_of(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def lines_until_hanging(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert process.stdout
    for line in process.stdout:
        yield line
        if b'"event":"about","path":"ce-pull"' in line:
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_what_was_known_is_on_the_disk_when_it_is_cut_off_and_no_process_is_left(
    machine: Machine, tmp_path: Path, number: signal.Signals
) -> None:
    machine.plan(f"fault {C} {A} ce-pull 0 1e12 hang")
    state = tmp_path / "p2p.jsonl"
    process = machine.start(state=str(state), phases=["pairs"], sizes=[4])
    list(lines_until_hanging(process))
    child = child_of(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    run = read_p2p(state.read_bytes().splitlines(keepends=True))
    assert outcomes(of(run, C, A, "ce-push")) == {"ok"}
    if number is signal.SIGKILL:
        assert (run.ended, (run.under_way or {})["path"]) == (False, "ce-pull")
    else:
        assert (run.ended, run.stopped, process.returncode) == (True, f"signal {int(number)}", 3)
    gone = subprocess.run(["timeout", "60", "tail", f"--pid={child}", "-f", os.devnull], check=False)
    assert gone.returncode == 0


def test_when_nobody_listens_any_more_no_further_pair_is_touched(machine: Machine, tmp_path: Path) -> None:
    state = tmp_path / "p2p.jsonl"
    process = machine.start(state=str(state), sizes=[4])
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 3
    run = read_p2p(state.read_bytes().splitlines(keepends=True))
    assert run.stopped == "nobody reads the answers any more"
    assert len({r.pair for r in run.results}) <= 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pears": "all"}, "unknown options: pears"),
        ({"paths": ["nvlink"]}, "paths must be some of"),
        ({"pairs": [["here", "there"]]}, "not a PCI address"),
        ({"sizes": [300001]}, "at most 262081"),
        ({"repeats": 0}, "repeats must be more than 0"),
        ({"state": "/proc/none/p2p.jsonl"}, "/proc/none"),
    ],
)
def test_what_makes_no_sense_is_refused(machine: Machine, options: dict[str, Any], why: str) -> None:
    run = machine.run(status=2, **options)
    assert why in run.refused
    assert not run.gpus


def test_a_pair_that_is_not_there_is_refused(machine: Machine) -> None:
    assert machine.run(status=3, pairs=[[A, B]]).stopped == f"CUDA has no device at {B}"


def test_a_library_without_the_calls_is_no_driver(machine: Machine) -> None:
    machine.library = Path("libc.so.6")
    assert "undefined symbol: cuInit" in machine.run(status=3).stopped


# ---------------------------------------------------------------------------------------- the calls, and the program


def kind_of(argument: Any) -> str:
    """p pointer, i 32 bits, l 64 bits."""
    if argument in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(argument, ctypes._Pointer):
        return "p"
    return {4: "i", 8: "l"}[ctypes.sizeof(argument)]


def prototypes() -> dict[str, list[str]]:
    """{call: kinds of its arguments} of the stand-in, which the compiler holds against the real header."""
    found = {}
    for name, arguments in re.findall(r"^CUresult (cu\w+)\(([^)]*)\)", SOURCE.read_text(), re.MULTILINE):
        kinds = []
        for argument in arguments.split(","):
            kind = argument.strip()
            pointer = "*" in kind or re.match(r"CU(context|stream|event|module|function)\b", kind)
            kinds.append("p" if pointer else "l" if re.match(r"(size_t|CUdeviceptr)\b", kind) else "i")
        found[name] = kinds
    return found


def test_the_table_of_calls_is_that_of_the_prototypes() -> None:
    assert {name: [kind_of(a) for a in arguments] for name, arguments in CALLS.items()} == prototypes()


def test_the_stand_in_has_the_prototypes_of_the_real_header() -> None:
    headers = [*Path("/usr/local").glob("cuda*/include/cuda.h"), *Path("/usr/include").glob("cuda.h")]
    if not headers or shutil.which("cc") is None:
        pytest.skip("NOT TESTED: no cuda.h or no compiler here")
    argv = ["cc", "-std=c11", "-fsyntax-only", "-Werror", "-DWITH_CUDA_H", f"-I{headers[0].parent}", str(SOURCE)]
    subprocess.run(argv, check=True)


def test_the_kernels_assemble(tmp_path: Path) -> None:
    assemblers = sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    if not assemblers:
        pytest.skip("NOT TESTED: no ptxas here")
    (tmp_path / "k.ptx").write_text(PTX)
    subprocess.run([assemblers[0], "-arch=sm_120", "-o", tmp_path / "k.cubin", tmp_path / "k.ptx"], check=True)


#: Calls that are not in the table, or lack an argument: neither may reach the library.
FORBIDDEN = """
import ctypes, sys
from proofbook.remote.p2p_probe import Driver
driver = Driver(sys.argv[1])
for wrong in (lambda: driver.cuCtxDestroy_v2(1), lambda: driver.cuMemAlloc_v2(1), lambda: driver.cuDeviceGet()):
    try:
        wrong()
    except (AttributeError, TypeError, ctypes.ArgumentError) as error:
        print(type(error).__name__)
"""


def test_a_call_that_the_table_does_not_have_cannot_be_made(machine: Machine) -> None:
    env = {"FAKE_CUDA_PLAN": str(machine.folder / "plan")}
    argv = [sys.executable, "-c", FORBIDDEN, str(machine.library)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AttributeError", "TypeError", "TypeError"]


def test_it_needs_no_newer_python_than_it_says(machine: Machine) -> None:
    ast.parse(p2p.P2P_PROBE, feature_version=(3, 8))
    oldest = shutil.which("python3.8")
    if oldest is None or subprocess.run([oldest, "-c", ""], env={"PATH": os.environ["PATH"]}, check=False).returncode:
        pytest.skip("NOT TESTED: no Python 3.8 here; its syntax was parsed")
    machine.python = str(oldest)
    assert outcomes(machine.run(sizes=[4, MIB], repeats=1).results) == {"ok"}


def test_it_fits_into_one_argument_of_a_command() -> None:
    argv = p2p.p2p_probe(state="/var/lib/proofbook/changes/r1/p2p.jsonl", pairs=[("01:00.0", C)], lockstep=True).argv
    assert argv[:2] == ("python3", "-c")
    assert len(argv[2].encode()) < 128 * 1024  # MAX_ARG_STRLEN of Linux
    assert json.loads(argv[3])["pairs"] == [[A, C]]


# ------------------------------------------------------------------------------------------------------------- reading


def test_a_file_that_ends_in_the_middle_of_a_line_is_read_up_to_there(machine: Machine) -> None:
    out, _ = machine.start(phases=["pairs"], sizes=[4], repeats=1).communicate(timeout=60)
    lines = out.splitlines(keepends=True)
    cut = read_p2p([*lines[:8], lines[8][:20]])
    assert (cut.cut, cut.ended) == (True, False)
    whole = read_p2p(lines[:8])
    assert (whole.cut, whole.results) == (False, cut.results)
    for bad in ([b"{}\n"], [b'{"event":"surprise"}\n'], [lines[0][:10], lines[1]]):
        with pytest.raises(CannotTell, match="not an event"):
            read_p2p(bad)


# -------------------------------------------------------------------------------------------- from the copy to the verdict


def test_partial_remapping_forbids_peer_to_peer_on_the_whole_host(machine: Machine, tmp_path: Path) -> None:
    """Some pairs fault, their writes are lost, every call says success: what the kernel said finds its pair."""
    kmsg = tmp_path / "kmsg"
    kmsg.touch()
    line = "nvidia %a: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"
    faults = [f"fault {A} {B} {path} 0 1e12 {kind}" for path in ("ce-push", "sm-store") for kind in ("lost", f"line {line}")]
    machine.plan(*faults, f"kmsg {kmsg}", gpus=(C, A, B))
    run = machine.run(kmsg=str(kmsg), sizes=[4, MIB])
    groups = {n: IommuGroup("DMA-FQ", (pci,)) for n, pci in enumerate((A, B, C))}
    iommu = IommuFacts(groups, dict.fromkeys((A, B, C), "DMA-FQ"))
    matrix = judge_matrix(run, iommu=iommu, boot_now=run.boot_id)
    assert {pair: str(cell.state) for pair, cell in matrix.cells.items() if not cell.passed} == {(A, B): "wrong data"}
    cell = matrix.cells[A, B]
    assert {name: str(p.state) for name, p in cell.paths.items() if p.state != "verified"} == {
        "ce-push": "wrong data", "sm-store": "wrong data"
    }  # fmt: skip
    assert {fault.requester for fault in cell.faults} == {A}
    assert all(other.silence == "" and not other.faults for pair, other in matrix.cells.items() if pair != (A, B))
    verdict = judge_p2p(matrix)
    assert (verdict.allowed, verdict.fallback) == (False, FALLBACK)

"""The peer-to-peer probe on simulated machines: what it meets there, and that its words are those of the real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proofbook.lab.sim import scenario
from proofbook.remote.p2p import P2P_PROBE, P2pRun, p2p_probe, read_p2p

MIB = 1048576
STATE = "/var/lib/proofbook/p2p/run.jsonl"
QUICK: dict[str, Any] = {"state": STATE, "sizes": (4, 4096, MIB), "repeats": 1, "together_size": MIB}
A, B, C, D = (f"0000:{bus}:00.0" for bus in ("01", "41", "81", "c1"))


def probed(machine: Any, **options: Any) -> P2pRun:
    answer = machine.argv(*p2p_probe(**{**QUICK, **options}).argv)
    assert answer.stderr == b""
    return read_p2p(answer.stdout.splitlines(keepends=True))


def wrong(run: P2pRun, phase: str = "pairs") -> dict[tuple[str, str], set[str]]:
    """The pairs that did not come out right, and their outcomes."""
    found: dict[tuple[str, str], set[str]] = {}
    for result in run.results:
        if result.phase == phase and result.outcome != "ok":
            found.setdefault(result.pair, set()).add(result.outcome)
    return found


def lines(run: P2pRun, *pair: str) -> list[str]:
    """What the kernel said while one pair was active alone."""
    return [line.text for window in run.windows if window.pairs == ((pair[0], pair[1]),) for line in window.lines]


def healthy(run: P2pRun) -> None:
    assert (run.ended, run.stopped, run.unfit, wrong(run), len(run.claims)) == (True, "", {}, {}, 12)
    assert {window.phase for window in run.windows} == {"local", "pairs", "both-directions", "all-at-once"}
    near, far = (next(g for r in run.results if r.pair == p and r.path == "ce-push" for g in r.gbps) for p in ((A, B), (A, C)))
    assert 45 < far < near < 63


def eight(run: P2pRun) -> None:
    assert (len(run.gpus), len(run.claims), wrong(run)) == (8, 56, {})


def partial(run: P2pRun) -> None:
    faulty = {(A, C), (A, D), (B, D), (C, A), (D, B)}
    assert wrong(run) == {key: {"wrong-data"} for key in faulty}
    for src, dst in faulty:
        said = lines(run, src, dst)
        assert any(src in text and "IO_PAGE_FAULT" in text and "flags=0x0020" in text for text in said), "the source pushes"
        assert any(dst in text and "IO_PAGE_FAULT" in text and "flags=0x0000" in text for text in said), "the destination pulls"
        assert any("callbacks suppressed" in text for text in said)
    assert not lines(run, A, B)


def lost(run: P2pRun) -> None:
    bad = [r.bad for r in run.results if r.outcome == "wrong-data"]
    assert wrong(run).keys() == {(A, C), (B, C)} and all(b and b["kind"] == "poison" for b in bad)
    assert {r.path for r in run.results if r.outcome == "wrong-data"} == {"ce-push", "sm-store"}
    assert not any(window.lines for window in run.windows)


def two_ranks(run: P2pRun) -> None:
    assert wrong(run) == {}
    assert wrong(run, "both-directions").keys() == {(B, C), (C, B)}


def wedged(run: P2pRun) -> None:
    assert C in run.unfit and "hung" in wrong(run)[C, A]
    assert [rest.busy for rest in run.rests if rest.pci == C][-1] is True
    assert wrong(run)[D, C] == {"not-run"}


def resets(run: P2pRun) -> None:
    assert (run.ended, run.stopped) == (False, "")
    assert run.under_way is not None and (run.under_way["src"], run.under_way["path"]) == (C, "sm-store")


def iommu_off(run: P2pRun) -> None:
    healthy(run)


def one_gpu(run: P2pRun) -> None:
    assert (run.ended, run.gpus, run.results) == (True, (A,), ())


def outlier(run: P2pRun) -> None:
    pair = ("0000:21:00.0", "0000:61:00.0")
    assert wrong(run) == {}
    assert all(g < 30 for r in run.results if r.pair == pair and r.path == "ce-push" and r.phase == "pairs" for g in r.gbps)


def impossible(run: P2pRun) -> None:
    assert any(g > 63 for r in run.results if r.pair == (A, B) for g in r.gbps) and wrong(run) == {}


def nic(run: P2pRun) -> None:
    assert any("0000:22:00.0" in text and "IO_PAGE_FAULT" in text for text in lines(run, B, A)) and wrong(run) == {}


#: scenario: what the probe meets on it
MEETS: dict[str, Callable[[P2pRun], None]] = {
    "p2p-healthy": healthy,
    "p2p-healthy-eight": eight,
    "p2p-partial-faults": partial,
    "p2p-lost-writes": lost,
    "p2p-hang-two-ranks": two_ranks,
    "p2p-wedged-gpu": wedged,
    "p2p-host-resets": resets,
    "p2p-iommu-off": iommu_off,
    "p2p-one-gpu": one_gpu,
    "p2p-bandwidth-outlier": outlier,
    "p2p-impossible-bandwidth": impossible,
    "p2p-nic-fault": nic,
}


def test_each_scenario_has_a_look_at_what_the_probe_meets() -> None:
    assert {name for name in scenario.names() if "p2p-pair-matrix" in scenario.load(name).expect} == MEETS.keys()


@pytest.mark.parametrize("name", sorted(MEETS))
def test_the_probe_meets_the_fault(bench: Callable[[str], Any], name: str) -> None:
    machine = bench(name)
    before = machine.life.machine.boot.id
    run = probed(machine)
    assert run.boot_id == before
    MEETS[name](run)
    assert machine.unknown == []


def test_what_was_told_is_on_the_disk_also_after_a_restart(bench: Callable[[str], Any]) -> None:
    machine = bench("p2p-host-resets")
    answer = machine.argv(*p2p_probe(**QUICK).argv)
    machine.wait(600)
    assert len(machine.life.machine.boots) == 3 and not machine.life.machine.boots[-2].orderly
    assert machine.argv("cat", STATE).stdout == answer.stdout
    assert wrong(probed(machine)) == {}, "what restarted it does so once"


def test_a_module_that_maps_no_peers_faults_where_an_iommu_translates(bench: Callable[[str], Any]) -> None:
    machine = bench("p2p-healthy")
    machine.life.machine.hw.nvidia.params["DmaRemapPeerMmio"] = "0"
    assert len(wrong(probed(machine, phases=["pairs"]))) == 12
    machine.life.machine.hw.iommu_on = False
    assert wrong(probed(machine, phases=["pairs"])) == {}


def test_pairs_that_the_driver_denies_are_errors_and_their_control_is_right(bench: Callable[[str], Any]) -> None:
    machine = bench("p2p-healthy")
    machine.life.machine.hw.p2p[A, B] = machine.life.machine.hw.p2p[B, A] = "CNS"
    run = probed(machine, phases=["pairs"], pairs=[(A, B)])
    assert {r.code for r in run.results if r.path != "staged"} == {217}
    assert {r.outcome for r in run.results if r.path == "staged"} == {"ok"}
    assert run.claims[A, B].can_access is False


def test_options_that_make_no_sense_are_refused(bench: Callable[[str], Any]) -> None:
    answer = bench("p2p-healthy").argv("python3", "-c", P2P_PROBE, json.dumps({"sises": [4]}))
    assert answer.status == 2
    assert "unknown options: sises" in read_p2p(answer.stdout.splitlines(keepends=True)).refused


# ---------------------------------------------------------------------------------------- as the real program has it


def shapes(said: bytes) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The keys of every kind of event; of results also by outcome."""
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for line in said.splitlines():
        event = json.loads(line)
        kind = (event["event"], event.get("phase", "") if event["event"] == "about" else event.get("outcome", ""))
        found.setdefault(kind, set()).add(tuple(sorted(event)))
    return found


@pytest.mark.parametrize("name", ["p2p-healthy", "p2p-lost-writes", "p2p-hang-two-ranks"])
def test_events_have_the_shape_of_the_real_probes(
    bench: Callable[[str], Any], fake_libcuda: Path, tmp_path: Path, name: str
) -> None:
    """The real program with the stand-in library makes the same kinds of events, with the same keys."""
    rules = {
        "p2p-healthy": [],
        "p2p-lost-writes": [f"fault {a} {C} {path} 4096 1e12 lost" for a in (A, B) for path in ("ce-push", "sm-store")],
        "p2p-hang-two-ranks": [f"fault {B} {C} ce-push 65536 1e12 together hang"],
    }[name]
    devices = [f"device {pci} {str(n) * 32} 4096 Fake GPU" for n, pci in enumerate((A, B, C, D), 1)]
    (tmp_path / "plan").write_text("\n".join([*devices, *rules]) + "\n")
    options = {**QUICK, "state": "", "grace_s": 0, "step_deadline_s": 1, "smi": "", "kmsg": "", "gone_s": 5}
    env = {"PATH": os.environ["PATH"], "FAKE_CUDA_PLAN": str(tmp_path / "plan"), "PROOFBOOK_LIBCUDA": str(fake_libcuda)}
    real = subprocess.run(
        [sys.executable, "-c", P2P_PROBE, json.dumps(options)], env=env, capture_output=True, check=False, timeout=120
    )
    assert real.stderr == b""
    played = bench(name).argv(*p2p_probe(**options).argv).stdout
    theirs, ours = shapes(real.stdout), shapes(played)
    assert ours.keys() == theirs.keys()
    assert {kind: keys for kind, keys in ours.items() if not keys <= theirs[kind]} == {}

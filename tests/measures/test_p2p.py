"""The pair matrix as a measure: what comes over the connection, what is on the disk when it breaks, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.changes.guard import GuardStatus
from proofbook.checks.p2p import ValidlyRun
from proofbook.errors import ConnectionLost, TransportError
from proofbook.measures.p2p import FOLDER, Matrix, figures_from
from proofbook.model import Command, Identity, Observation, Probe, Result, Seen, Verdict
from proofbook.probes.change_state import GuardState
from proofbook.probes.iommu import IommuFacts, IommuGroup, IommuGroups
from proofbook.probes.memory import GpuProcess, GpuProcesses
from proofbook.probes.p2p import Topology, TopologyFacts

A, B = "0000:01:00.0", "0000:41:00.0"
BOOT, OTHER = "1" * 32, "2" * 32
GUARD = GuardState("r1")
MIB = 1048576
PATHS = ("ce-push", "ce-pull", "sm-store", "sm-load", "staged")
CLOCKS = {"monotonic_s": 1.0, "utc": 1.0}


def events(bad: tuple[str, str] | None = None) -> list[dict[str, Any]]:
    """What a probe of two GPUs says; ``bad``: the path and size whose data never arrives, from A to B."""
    options = {"pairs": "all", "paths": list(PATHS), "sizes": [4, MIB], "repeats": 1}
    devices = [{"ordinal": n, "pci": pci, "uuid": f"GPU-{n}", "name": "RTX", "memory": 1} for n, pci in enumerate((A, B))]
    out: list[dict[str, Any]] = [
        {"event": "open", "boot_id": BOOT, "library": "libcuda.so.1", "driver": 13020, "devices": devices, "options": options}
    ]
    for n, (src, dst) in enumerate(((A, B), (B, A)), 1):
        out.append({"event": "window", "n": n, "phase": "pairs", "pairs": [[src, dst]], **CLOCKS})
        for path in PATHS:
            for size in (4, MIB):
                where = {"phase": "pairs", "src": src, "dst": dst, "process": 1, "path": path, "size": size}
                out.append({"event": "about", **where})
                lost = {"count": size, "first_offset": 0, "kind": "poison", "outside": 0}
                wrong = (path, str(size)) == bad and src == A
                figures = {"gbps": [50.0] if size == MIB and not wrong else [], "us": [] if wrong else [0.4]}
                said = {"outcome": "wrong-data" if wrong else "ok", "bad": lost if wrong else None, "code": 0, "call": ""}
                out.append({"event": "result", **where, **said, **figures})
        out.append({"event": "closed", "n": n, "unread": "", "lost": 0, **CLOCKS})
        out += [{"event": "idle", "pci": pci, "busy": False, "utilisation": 0, "watts": 40.0} for pci in (A, B)]
    out.append({"event": "end", "boot_id": BOOT, "stopped": "", "unfit": {}, "windows": 2})
    return out


def lines(said: Sequence[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in said]


class Machine:
    """A host and its transport: says ``said`` until it breaks, and has ``disk`` in the state file."""

    def __init__(self, said: Sequence[bytes], *, breaks: bool = False, disk: Sequence[bytes] = (), status: int = 0) -> None:
        self.said, self.breaks, self.disk, self.status = said, breaks, [b"".join(disk)], status
        self.stderr = b""
        self.name, self.transport, self.clock = "box", self, self
        self.boot, self.comes_back, self.restarts = BOOT, True, False
        self.time = datetime(2026, 4, 8, tzinfo=UTC)
        self.asked: list[Command] = []

    @property
    def identity(self) -> Identity:
        return Identity("box", "box", "m" * 32, self.boot, "key", "root", 0)

    def now(self) -> datetime:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)

    def boot_id_now(self) -> str:
        return self.boot

    def await_up(self, *, patience_s: float, tell: Any) -> Identity | None:
        self.boot = OTHER if self.restarts else BOOT
        return self.identity if self.comes_back else None

    def stream(self, command: Command) -> Iterator[bytes]:
        self.asked.append(command)
        yield from self.said
        if self.breaks:
            raise ConnectionLost("the way broke")
        return Result(command, self.status, b"", self.stderr, self.time, 1.0)  # type: ignore[return-value]

    def run(self, command: Command) -> Result:
        self.asked.append(command)
        data = self.disk.pop(0) if len(self.disk) > 1 else self.disk[0]
        return Result(command, 0 if data else 1, data, b"" if data else b"cat: no such file\n", self.time, 0.1)


class Bench:
    def __init__(
        self, machine: Machine, guards: Sequence[GuardStatus] = (), on_the_gpus: tuple[GpuProcess, ...] | str = ()
    ) -> None:
        """``guards``: how the guard stands, each time it is asked. ``on_the_gpus``: who computes at the end, or why not known."""
        self.host: Any = machine
        self.guards, self.on_the_gpus = list(guards), on_the_gpus
        self.kept: list[Result] = []
        self.notes: list[str] = []
        self.told: list[str] = []

    def look(self, *probes: Probe[Any]) -> Seen:
        pairs = ((A, B), (B, A))
        topology = TopologyFacts(
            (A, B), links=dict.fromkeys(pairs, "NODE"), status={"r": dict.fromkeys(pairs, "OK")}, numa={A: 0, B: 0},
            limit_gbps={A: 63.0, B: 63.0},
        )  # fmt: skip
        groups = {n: IommuGroup("DMA-FQ", (pci,)) for n, pci in enumerate((A, B))}
        values: dict[Probe[Any], Any] = {Topology(): topology, IommuGroups(): IommuFacts(groups, dict.fromkeys((A, B), "DMA-FQ"))}
        if not isinstance(self.on_the_gpus, str):
            values[GpuProcesses()] = self.on_the_gpus
        if GUARD in probes:
            values[GUARD] = self.guards.pop(0)
        return Seen(Observation(p, values.get(p), "" if p in values else "not asked here", self.host.now(), BOOT) for p in probes)

    def keep_answer(self, name: str, answer: Result) -> str:
        self.kept.append(answer)
        return f"e{len(self.kept)}"

    def proven(self, note: str) -> None:
        self.notes.append(note)

    def tell(self, text: str) -> None:
        self.told.append(text)


def taken(machine: Machine, bench: Any = None, **more: Any) -> tuple[Any, Bench]:
    bench = bench or Bench(machine)
    found = Matrix(run_id="r1", sizes=(4, MIB), repeats=1, phases=("pairs",), **more).take(bench)
    json.dumps(dict(found.value), allow_nan=False)
    return found, bench


def test_what_the_probe_said_becomes_a_matrix() -> None:
    found, bench = taken(Machine(lines(events())))
    assert (found.problems, found.value["counts"]) == ((), {"verified": 2})
    assert found.value["claims"] == {f"{A} {B}": {"r": "OK"}, f"{B} {A}": {"r": "OK"}}
    assert found.value["run"] | {} == {**found.value["run"], "ended": True, "restarted": False, "results": 20, "windows": 2}
    assert [answer.stdout for answer in bench.kept] == [b"".join(lines(events()))], "its words are kept as they came"
    assert bench.told == [f"window 1, pairs: {A} to {B}", f"window 2, pairs: {B} to {A}"]
    options = json.loads(bench.host.asked[0].argv[3])
    assert (options["state"], options["pairs"], options["sizes"]) == (f"{FOLDER}/r1.jsonl", "all", [4, MIB])


def test_only_the_pairs_of_chosen_gpus_are_asked_for() -> None:
    _, bench = taken(Machine(lines(events())), gpus=(A, B))
    assert json.loads(bench.host.asked[0].argv[3])["pairs"] == [[A, B], [B, A]]


def waits(left_s: int) -> GuardStatus:
    guard = {"ActiveState": "active", "UnitFileState": "enabled"}
    return GuardStatus("armed", datetime.now(UTC), "sglang-qwen.service", left_s=left_s, guard=guard)


def test_no_window_is_begun_that_could_outlast_the_guard() -> None:
    machine = Machine(lines(events()))
    found, bench = taken(machine, Bench(machine, [waits(600), waits(500)]), guard=GUARD, pair_deadline_s=60.0, grace_s=5.0)
    options = json.loads(bench.host.asked[0].argv[3])
    assert (options["most_s"], options["window_s"]) == (600 - 120, 60 + 30 + 5 + 30), "over two minutes before the guard fires"
    assert (found.value["run"]["disturbed"], found.value["judged"]["allowed"]) == ([], True)


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        (waits(304), "comes back in 304 s, and one window may take 305 s"),
        (replace(waits(100), state="fired"), "is not held back by a guard that waits"),
    ],
)
def test_nothing_is_tested_when_the_guard_leaves_no_time(guard: GuardStatus, says: str) -> None:
    machine = Machine(lines(events()))
    found, bench = taken(machine, Bench(machine, [guard, guard]), guard=GUARD)
    assert bench.host.asked == []
    assert says in found.value["run"]["refused"]
    assert found.value["judged"]["allowed"] is None


def test_a_service_that_came_back_in_the_middle_spoils_it() -> None:
    machine, fired = Machine(lines(events())), replace(waits(0), state="fired")
    server = GpuProcess(4711, A, "sglang::scheduler", None, "", None, None)
    found, _ = taken(machine, Bench(machine, [waits(6000), fired], (server,)), guard=GUARD)
    who = [
        "sglang-qwen.service was brought back by its guard (fired)",
        f"sglang::scheduler (pid 4711) is on {A}",
    ]
    assert found.value["run"]["disturbed"] == who
    assert found.value["judged"]["allowed"] is None, "every copy was right, and that counts for nothing"
    (failed,) = [f for f in ValidlyRun(found).judge(Seen()) if f.verdict is Verdict.FAIL]
    assert who[0] in failed.reason


def test_whether_it_was_alone_may_not_be_known() -> None:
    machine = Machine(lines(events()))
    found, _ = taken(machine, Bench(machine, on_the_gpus="not told"))
    assert found.value["run"]["company_not_known"] == "who is on the GPUs: not asked here"
    assert Verdict.UNKNOWN in {f.verdict for f in ValidlyRun(found).judge(Seen())}


def test_lost_data_is_found_and_no_problem_of_the_measure() -> None:
    found, _ = taken(Machine(lines(events(bad=("sm-store", str(MIB))))))
    assert found.problems == ()
    assert found.value["counts"] == {"verified": 1, "wrong data": 1}
    assert found.value["judged"]["allowed"] is False


def test_a_machine_that_restarts_leaves_what_it_knew_on_its_disk() -> None:
    whole = lines(events())
    machine = Machine(whole[:3], breaks=True, disk=[*whole[:14], whole[14][:20]])
    machine.restarts = True
    found, bench = taken(machine)
    assert found.value["run"]["restarted"] is True
    assert found.value["run"]["results"] == len([x for x in whole[:14] if b'"result"' in x]) > 0
    assert "THE MACHINE RESTARTED" in bench.notes[0]
    assert any("the machine restarted in the middle" in p for p in found.problems)
    assert machine.asked[-1].argv == ("cat", f"{FOLDER}/r1.jsonl")
    assert len(bench.kept) == 2


def test_a_connection_that_breaks_is_waited_for_until_the_probe_has_ended() -> None:
    whole = lines(events())
    machine = Machine(whole[:3], breaks=True)
    machine.disk = [b"".join(whole[:8]), b"".join(whole[:20]), b"".join(whole)]
    found, bench = taken(machine)
    assert (found.value["run"]["ended"], found.value["run"]["restarted"]) == (True, False)
    assert found.value["counts"] == {"verified": 2}
    assert [c.argv[0] for c in machine.asked] == ["python3", "cat", "cat", "cat"]
    assert "the connection broke" in found.problems[0]
    assert "RESTARTED" not in bench.notes[0]


def test_a_disk_that_holds_nothing_leaves_what_was_heard() -> None:
    machine = Machine(lines(events())[:5], breaks=True)
    found, bench = taken(machine)
    assert found.value["run"]["ended"] is False
    assert any("is of no use (cat: no such file)" in text for text in bench.told)
    assert any("was cut off during pairs" in p for p in found.problems)


def test_a_machine_that_does_not_come_back_is_lost() -> None:
    machine = Machine(lines(events())[:3], breaks=True)
    machine.comes_back = False
    with pytest.raises(TransportError, match="did not come back"):
        taken(machine)


def test_a_program_that_cannot_run_is_no_empty_matrix() -> None:
    machine = Machine([], status=127)
    machine.stderr = b"python3: not found\n"
    found, _ = taken(machine)
    assert found.value["run"]["refused"] == "it said nothing (python3: not found)"
    assert found.value["judged"]["allowed"] is None


def test_words_that_are_not_the_probes_are_told() -> None:
    found, _ = taken(Machine([b"bash: warning: setlocale\n", *lines(events())]))
    assert "not an event of the peer-to-peer probe" in found.problems[0]
    assert found.value["counts"] == {"not run": 2} or not found.value["counts"].get("verified")


def test_figures_of_pairs_that_passed_are_a_baseline() -> None:
    found, _ = taken(Machine(lines(events(bad=("sm-store", str(MIB))))))
    stored = {"sizes": [4, MIB], "cells": found.value["cells"]}
    figures = figures_from(stored)
    assert {pair for pair, _ in figures} == {(B, A)}
    assert (figures[(B, A), "ce-push"].gbps, figures[(B, A), "ce-push"].size) == (50.0, MIB)
    slower = lines([{**e, "gbps": [20.0]} if e.get("gbps") else e for e in events()])
    again, _ = taken(Machine(slower), baseline=figures)
    assert any("this host's last good run" in text for cell in again.value["cells"] for text in cell["slow"])

"""What is really known of each ordered pair: claimed, copied and compared, wrong, faulted, hung, or never run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from proofbook.checks.looking import counted, join, short_id
from proofbook.checks.p2p.attribution import Foreign, PairFault, WindowLog, WindowVerdict, attribute, is_iommu_stuck, logs_of
from proofbook.checks.p2p.bandwidth import Figure, Speed, class_of, figures_of, speeds
from proofbook.model import Verdict
from proofbook.probes.iommu import IommuFacts
from proofbook.probes.p2p import CopyResult, P2pRun, TopologyFacts, Window

__all__ = ["Cell", "P2pMatrix", "PathCell", "State", "Together", "changed", "judge_matrix", "state_changes"]

Pair = tuple[str, str]
CONTROL = "staged"


class State(StrEnum):
    """What one cell of the matrix says. Only VERIFIED is a reason to trust a pair."""

    VERIFIED = "verified"
    ADVERTISED = "advertised"  # claimed by the driver, and not tried
    NOT_RUN = "not run"
    INVALID = "invalid"  # the data was right, the figures cannot be
    ERROR = "error"
    FAULT = "fault"
    WRONG_DATA = "wrong data"
    HUNG = "hung"


_BADNESS = {state: n for n, state in enumerate(State)}
_OUTCOMES = {
    "ok": State.VERIFIED,
    "wrong-data": State.WRONG_DATA,
    "error": State.ERROR,
    "crashed": State.ERROR,
    "hung": State.HUNG,
    "not-run": State.NOT_RUN,
}
#: States that show something broken, unlike those that show nothing.
BROKEN = frozenset({State.INVALID, State.ERROR, State.FAULT, State.WRONG_DATA, State.HUNG})
#: States that refute that a pair works: something was copied, and it came out wrong.
REFUTES = BROKEN - {State.INVALID}


@dataclass(frozen=True, slots=True)
class PathCell:
    """One path of one pair: the worst of its sizes and processes, where that was, and every size (bytes) that came out broken."""

    path: str
    state: State
    reason: str  # "" when verified
    size: int = 0
    process: int = 0
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One ordered pair. ``advertised``: what nvidia-smi and the driver claim. ``silence``: why the kernel's silence about it
    proves nothing, "" when it would prove something. ``slow``: figures below what they should be; they break nothing."""

    pair: Pair
    state: State
    reason: str
    advertised: str
    klass: str
    paths: Mapping[str, PathCell]
    speeds: Mapping[str, Speed]
    faults: tuple[PairFault, ...] = ()
    slow: tuple[str, ...] = ()
    silence: str = ""

    @property
    def passed(self) -> bool:
        return self.state is State.VERIFIED


@dataclass(frozen=True, slots=True)
class Together:
    """One pair while others were active too: phase ``both-directions`` or ``all-at-once``."""

    phase: str
    pair: Pair
    path: str
    state: State
    reason: str
    gbps: float | None


@dataclass(frozen=True)
class P2pMatrix:
    """Everything that is known of the pairs of one host in one run.

    ``problems``: why the run as a whole cannot be trusted or did not come to its end, as sentences. ``foreign``: faults in its
    windows that are no pair's. ``shared``: faults that are of one of several pairs which were active together.
    """

    gpus: tuple[str, ...]
    cells: Mapping[Pair, Cell]
    together: tuple[Together, ...] = ()
    locals: Mapping[str, str] = field(default_factory=dict)  # GPU -> "" or why it does not copy by itself
    shared: tuple[PairFault, ...] = ()
    foreign: tuple[Foreign, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[tuple[Pair, str], Figure]:
        """What a later run may be held against: the valid figures of the pairs that passed."""
        return {
            (pair, path): speed.figure
            for pair, cell in self.cells.items()
            if cell.passed
            for path, speed in cell.speeds.items()
            if not speed.invalid
        }

    def counts(self) -> dict[str, int]:
        """How many pairs are in each state."""
        states = [cell.state for cell in self.cells.values()]
        return {str(state): states.count(state) for state in State if state in states}

    def value(self) -> dict[str, Any]:
        """The matrix as JSON values, for a measurement or a table.

        {gpus: [pci], counts: {state: n}, problems: [text], locals: {pci: why}, cells: [{src, dst, state, reason, advertised,
        class, silence, slow: [text], faults: [text], paths: {path: {state, reason, size, process, failed: [bytes]}}, gbps: {path:
        [median, low, high]}, us: {path: x}}], together: [{phase, src, dst, path, state, reason, gbps}], foreign: [text]}
        """
        return {
            "gpus": list(self.gpus),
            "counts": self.counts(),
            "problems": list(self.problems),
            "locals": dict(self.locals),
            "cells": [_cell_value(cell) for cell in self.cells.values()],
            "together": [
                {"phase": t.phase, "src": t.pair[0], "dst": t.pair[1], "path": t.path, "state": str(t.state), "reason": t.reason,
                 "gbps": t.gbps} for t in self.together
            ],
            "foreign": [f"{f.signature} of {f.device or 'no named device'}: {f.why}" for f in self.foreign],
        }  # fmt: skip


def _cell_value(cell: Cell) -> dict[str, Any]:
    return {
        "src": cell.pair[0],
        "dst": cell.pair[1],
        "state": str(cell.state),
        "reason": cell.reason,
        "advertised": cell.advertised,
        "class": cell.klass,
        "silence": cell.silence,
        "slow": list(cell.slow),
        "faults": [fault.told for fault in cell.faults],
        "paths": {
            name: {"state": str(p.state), "reason": p.reason, "size": p.size, "process": p.process, "failed": list(p.failed)}
            for name, p in cell.paths.items()
        },
        "gbps": {path: [s.figure.gbps, s.figure.low, s.figure.high] for path, s in cell.speeds.items()},
        "us": {path: s.figure.us for path, s in cell.speeds.items() if s.figure.us is not None},
    }


def judge_matrix(
    run: P2pRun,
    *,
    logs: Mapping[int, WindowLog] | None = None,
    topology: TopologyFacts | None = None,
    iommu: IommuFacts | None = None,
    baseline: Mapping[tuple[Pair, str], Figure] | None = None,
    boot_now: str = "",
) -> P2pMatrix:
    """The matrix of a run. Pure.

    ``run``: :func:`proofbook.remote.p2p.read_p2p` of the probe's lines, or of its state file when the connection was lost.
    ``logs``: :func:`proofbook.checks.p2p.logs_of`; None uses what the probe read of the kernel's log itself. ``topology`` and
    ``iommu``: values of the probes ``p2p.Topology`` and ``iommu.IommuGroups`` taken before the run; None: nobody looked.
    ``baseline``: ``P2pMatrix.figures`` of this host's last good run. ``boot_now``: the machine's boot id after the run (32 hex
    digits); another one than the run's means that it restarted in the middle, which is a result.
    """
    between = Window(0, "between", (), 0.0, None, "", 0, run.outside)
    own = logs_of(replace(run, windows=(between,)))
    said = {**(logs_of(run) if logs is None else logs), **own}
    windows = attribute((*run.windows, *([between] if run.outside else [])), said, topology, iommu, run.gpus)
    judged = speeds(figures_of(run.results), topology, baseline)
    restarted = bool(boot_now and run.boot_id and boot_now != run.boot_id)
    pairs = _pairs(run, topology)
    cells = {pair: _cell(pair, run, windows, judged, topology, restarted) for pair in pairs}
    return P2pMatrix(
        gpus=run.gpus or (topology.gpus if topology else ()),
        cells=cells,
        together=tuple(_together(run, windows)),
        locals=_locals(run, windows),
        shared=tuple(fault for window in windows for fault in window.faults if len(fault.pairs) > 1),
        foreign=tuple(f for window in windows for f in window.foreign),
        problems=tuple(_problems(run, windows, restarted, boot_now)),
    )


def _pairs(run: P2pRun, topology: TopologyFacts | None) -> list[Pair]:
    """The pairs that were meant: those of the options, else every ordered pair of the GPUs."""
    wanted = run.options.get("pairs", "all")
    if wanted != "all":
        return [(a, b) for a, b in wanted]
    gpus = run.gpus or (topology.gpus if topology else ())
    return [(a, b) for a in gpus for b in gpus if a != b]


# --------------------------------------------------------------------------------------------------------------- cells


def _cell(
    pair: Pair,
    run: P2pRun,
    windows: Sequence[WindowVerdict],
    judged: Mapping[tuple[Pair, str], Speed],
    topology: TopologyFacts | None,
    restarted: bool,
) -> Cell:
    paths = _paths(pair, run)
    own = [w for w in windows if w.phase == "pairs" and w.pairs == (pair,)]
    faults = tuple(fault for w in windows for fault in w.faults if fault.pairs == (pair,))
    of_pair = {path: speed for (p, path), speed in judged.items() if p == pair}
    said = [(p.state, f"{p.path}: {p.reason}") for p in paths.values() if p.state is not State.VERIFIED]
    said += [(State.FAULT, f"the kernel says {fault.told}") for fault in faults]
    said += [(State.INVALID, f"{path}: {s.reasons[0]}") for path, s in of_pair.items() if s.invalid]
    if restarted and _was_under_way(run, pair):
        said.append((State.ERROR, f"the machine restarted while {run.under_way and run.under_way.get('path')} was under way"))
    said += [(State.HUNG, f"{rest.pci} did not come to rest: {_unrest(rest.utilisation, rest.why)}") for rest in run.rests
             if rest.busy and rest.pci in pair and any(w.window == rest.window for w in own)]  # fmt: skip
    claim = _advertised(pair, run, topology)
    if not any(result.pair == pair and result.phase == "pairs" for result in run.results) and not own:
        said.append((State.ADVERTISED, "it was never tried"))
    state = max((s for s, _ in said), key=_BADNESS.__getitem__, default=State.VERIFIED)
    reasons = [reason for s, reason in said if s is state][:3]
    control = paths.get(CONTROL)
    if control is not None and control.state in BROKEN:
        reasons.append("the control through host memory fails too, so this is not peer-to-peer's fault alone")
    slow = tuple(
        f"{path}: {r}" for path, s in of_pair.items() if not s.invalid and s.verdict is not Verdict.PASS for r in s.reasons
    )
    silence = next((w.silence for w in own if w.silence), "" if own else "no window was opened for it")
    klass = class_of(topology, pair)
    return Cell(pair, state, "; ".join(reasons), claim, klass, paths, of_pair, faults, slow, silence)


def _unrest(utilisation: int | None, why: str) -> str:
    return why or (f"{utilisation} % busy with nothing left to do" if utilisation is not None else "no reason given")


def _was_under_way(run: P2pRun, pair: Pair) -> bool:
    begun = run.under_way or {}
    return (begun.get("src"), begun.get("dst")) == pair or list(pair) in begun.get("pairs", [])


def _paths(pair: Pair, run: P2pRun) -> dict[str, PathCell]:
    """Each path: the worst of what was asked, and NOT_RUN where an answer is missing."""
    results = [r for r in run.results if r.pair == pair and r.phase == "pairs"]
    untouched = next((r for r in results if r.path == "*"), None)
    repeats = int(run.options.get("repeats", 1))
    cells = {}
    for path in run.options.get("paths", ()):
        told = {(r.process, r.size): r for r in results if r.path == path}
        processes = 1 if path == CONTROL else repeats
        asked = [(k, n) for k in range(1, processes + 1) for n in run.options.get("sizes", ())]
        if untouched is not None:
            cells[path] = PathCell(path, State.NOT_RUN, untouched.why)
        else:
            cells[path] = _worst(path, told, asked)
    return cells


def _worst(path: str, told: Mapping[tuple[int, int], CopyResult], asked: Iterable[tuple[int, int]]) -> PathCell:
    worst, failed = PathCell(path, State.VERIFIED, ""), set()
    for process, size in asked:
        result = told.get((process, size))
        state = _OUTCOMES[result.outcome] if result else State.NOT_RUN
        if _BADNESS[state] > _BADNESS[worst.state]:
            why = result.why if result else "the probe never came to it"
            worst = PathCell(path, state, f"{why} ({size} bytes, process {process})", size, process)
        if state in BROKEN:
            failed.add(size)
    return replace(worst, failed=tuple(sorted(failed)))


def _advertised(pair: Pair, run: P2pRun, topology: TopologyFacts | None) -> str:
    claims = run.claims.get(pair)
    said = [f"{c} {topology.status[c][pair]}" for c in ("r", "w") if topology and pair in topology.status.get(c, {})]
    if claims is not None:
        said.append("driver: can access" if claims.can_access else "driver: cannot access")
    return ", ".join(said) or "nothing"


def _together(run: P2pRun, windows: Sequence[WindowVerdict]) -> list[Together]:
    faulted = {(w.phase, pair): f for w in windows for f in w.faults for pair in f.pairs if len(f.pairs) == 1}
    out = []
    for r in run.results:
        if r.phase not in ("both-directions", "all-at-once"):
            continue
        state, reason = _OUTCOMES[r.outcome], r.why
        fault = faulted.get((r.phase, r.pair))
        if fault is not None and _BADNESS[State.FAULT] > _BADNESS[state]:
            state, reason = State.FAULT, f"the kernel says {fault.told}"
        out.append(Together(r.phase, r.pair, r.path, state, reason, r.gbps[0] if r.gbps else None))
    return out


def _locals(run: P2pRun, windows: Sequence[WindowVerdict]) -> dict[str, str]:
    """Each GPU by itself; a later recheck counts over the first look."""
    found = {local.pci: local.why for local in run.locals}
    for window in windows:
        for fault in window.faults if window.phase == "local" else ():
            found[fault.requester] = f"the kernel says {fault.told}"
    return found


#: Why a probe stops without a fault of what it tested.
_NO_FAULT = ("the time that it had is over", "nobody reads the answers any more")


def _problems(run: P2pRun, windows: Sequence[WindowVerdict], restarted: bool, boot_now: str) -> list[str]:
    problems = []
    if run.refused:
        problems.append(f"the probe refused to run: {run.refused}")
    if restarted:
        problems.append(f"the machine restarted in the middle: boot {short_id(run.boot_id)}… began, {short_id(boot_now)}… runs")
    if run.stopped.startswith(_NO_FAULT):
        problems.append(f"the probe did not come to its end: {run.stopped}")
    elif run.stopped:
        problems.append(f"the probe stopped before its end: {run.stopped}")
    elif not run.ended and not run.refused:
        begun = run.under_way or {}
        step = " ".join(str(begun[k]) for k in ("phase", "src", "dst", "path", "size") if k in begun)
        problems.append(f"the probe was cut off{f' during {step}' if step else ''}")
    if run.ended and run.end_boot_id != run.boot_id:
        problems.append("the boot id at its end is not the one at its beginning")
    problems += [f"{pci} was left alone: {why}" for pci, why in run.unfit.items()]
    signatures = {f.signature for w in windows for f in w.foreign} | {f.signature for w in windows for f in w.faults}
    stuck = sorted(signature for signature in signatures if is_iommu_stuck(signature))
    if stuck:
        problems.append(f"the IOMMU itself no longer moves ({join(stuck)})")
    return problems


def changed(before: P2pMatrix, after: P2pMatrix) -> tuple[str, ...]:
    """What differs between two runs of one host (another driver, another parameter), a sentence a pair."""
    return state_changes({p: str(c.state) for p, c in before.cells.items()}, {p: str(c.state) for p, c in after.cells.items()})


def state_changes(before: Mapping[Pair, str], after: Mapping[Pair, str]) -> tuple[str, ...]:
    """The same of the states alone, as an earlier run stored them."""
    said = []
    for pair in sorted({*before, *after}):
        then, now = before.get(pair, "not there"), after.get(pair, "not there")
        if then != now:
            said.append(f"{pair[0]} to {pair[1]}: {now}, before {then}")
    if not said and before:
        return (f"all {counted(len(after), 'pair')} as before",)
    return tuple(said)

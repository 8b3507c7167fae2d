"""The pair matrix: the peer-to-peer probe runs on the machine, and what it said is held against bus, IOMMU and kernel log.

``Matrix.value``: ``gpus`` ``counts`` ``problems`` ``locals`` ``cells`` ``together`` ``foreign`` (see
:meth:`proofbook.checks.p2p.P2pMatrix.value`) · ``judged``: {``allowed`` (None: cannot be told) ``verdict`` ``reason``
``limits``} · ``claims``: {"source destination": {capability: text}} of ``nvidia-smi topo -p2p`` · ``run``: {``ended``
``stopped`` ``refused`` ``unfit`` ``windows`` ``results`` ``boot_id`` ``boot_now`` ``restarted`` ``driver`` ``library``
``unrested`` ``disturbed`` (who was on the GPUs at its end; [] nobody) ``company_not_known`` (why that cannot be told)} ·
``fleet``: [{pci, uuid, name}] · ``iommu``: {pci: type}
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from proofbook.checks.p2p import Figure, P2pMatrix, judge_matrix, judge_p2p, logs_of
from proofbook.errors import CannotTell, TransportError
from proofbook.host import Bench
from proofbook.model import Command, Measure, Measurement, Probe, Result, Seen
from proofbook.probes.change_state import GuardState
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.memory import GpuProcesses
from proofbook.probes.p2p import P2pRun, Topology, TopologyFacts
from proofbook.remote.p2p import P2P_PATHS, P2P_SIZES, p2p_probe, read_p2p

__all__ = ["FOLDER", "Matrix", "figures_from", "window_at_worst_s"]

Pair = tuple[str, str]

#: Where the probe's events stay on the machine, one file a run.
FOLDER = "/var/lib/proofbook/p2p"
#: How long a machine that went away in the middle may take to answer again, and an unread probe to come to its end, seconds.
_BACK_S, _END_S, _POLL_S = 1800.0, 900.0, 10.0
_MOST = 256 * 1024 * 1024
#: What a killed process may take to disappear, and the GPUs to come to rest after a window, seconds.
_GONE_S = 30.0
#: Before the guard's time is up the probe must be over, whatever it was doing: a last process killed (twice waited for), the
#: grace of its window, the way back, seconds.
_OVER_S = 2 * _GONE_S + 60.0


@dataclass
class _Heard:
    """What came over the connection."""

    lines: list[bytes] = field(default_factory=list)
    answer: Result | None = None  # how the program ended; its stdout is in the lines
    lost: str = ""  # why the connection broke

    @property
    def data(self) -> bytes:
        return b"".join(self.lines)


@dataclass(frozen=True)
class Matrix(Measure):
    """Every ordered pair by every path, alone, both ways at once, and all at once.

    ``baseline`` are figures of an earlier good run of this host. A connection that breaks ends the probe at its next window;
    a machine that restarts takes it along. In both cases the state file on the machine is read afterwards.

    ``guard``: that of the service which stands still for this. No window is begun that could last beyond its time.
    """

    run_id: str
    gpus: tuple[str, ...] = ()  # only pairs of these; empty: of all
    paths: tuple[str, ...] = P2P_PATHS
    sizes: tuple[int, ...] = P2P_SIZES
    repeats: int = 2
    phases: tuple[str, ...] = ("local", "pairs", "both-directions", "all-at-once")
    grace_s: float = 5.0
    pair_deadline_s: float = 120.0
    baseline: Mapping[tuple[Pair, str], Figure] | None = field(default=None, repr=False)
    guard: GuardState | None = None
    name: ClassVar[str] = "p2p.Matrix"
    title: ClassVar[str] = "Which pairs of GPUs really reach each other's memory?"

    @property
    def state(self) -> str:
        return f"{FOLDER}/{self.run_id}.jsonl"

    def take(self, bench: Bench) -> Measurement:
        clock = bench.host.clock
        started = clock.now()
        before = bench.look(Topology(), IommuGroups())
        topology, iommu = _known(before, Topology()), _known(before, IommuGroups())
        left_s = self._left_s(bench)
        heard = _Heard()
        if left_s is None or left_s > self.window_s:
            command = self._command(None if left_s is None else left_s - _OVER_S)
            heard = self._listen(bench, command)
            if heard.lost:
                self._fetch(bench, command, heard)
            run, unread = _read(heard)
        else:
            comes = f"comes back in {left_s:.0f} s" if left_s else "is not held back by a guard that waits"
            why = f"the service that stands still for it {comes}, and one window may take {self.window_s:.0f} s"
            run, unread = P2pRun(refused=why), [why]
        problems = [heard.lost] if heard.lost else []
        problems += unread
        disturbed, not_known = self._company(bench)
        matrix = self._judge(bench, run, topology, iommu)
        matrix = replace(matrix, problems=(*matrix.problems, *(f"the test was not alone: {one}" for one in disturbed)))
        return Measurement(
            name=self.name,
            title=self.title,
            unit="pairs",
            conditions=self._conditions(run),
            value=_value(run, matrix, topology, iommu, bench.host.identity.boot_id, disturbed, not_known),
            taken_at=started,
            took_s=round((clock.now() - started).total_seconds(), 3),
            problems=(*problems, *matrix.problems),
        )

    @property
    def window_s(self) -> float:
        """What must be left of the guard's time for a window to be begun."""
        return window_at_worst_s(self.repeats, self.pair_deadline_s, self.grace_s) + _OVER_S

    def _left_s(self, bench: Bench) -> float | None:
        """Seconds until the machine starts the service again by itself, 0 when that is not known; None when none stands still."""
        if self.guard is None:
            return None
        status = _known(bench.look(self.guard), self.guard)
        return float(status.left_s or 0) if status is not None and status.guarded else 0.0

    def _company(self, bench: Bench) -> tuple[list[str], str]:
        """Who is on the GPUs at the end, or was meanwhile; and why that cannot be told."""
        probes: list[Probe[Any]] = [GpuProcesses(), *([self.guard] if self.guard is not None else [])]
        seen, found, unknown = bench.look(*probes), [], []
        try:
            found += sorted({f"{p.process} (pid {p.pid}) is on {p.pci}" for p in seen.value(GpuProcesses())})
        except CannotTell as why:
            unknown.append(f"who is on the GPUs: {why}")
        try:
            if self.guard is not None and not (status := seen.value(self.guard)).guarded:
                back = status.state in ("firing", "fired") or status.outcome == "fired"
                how = "was brought back by its guard" if back else "was not held back to the end"
                found.insert(0, f"{status.unit or 'the service'} {how} ({status.state})")
        except CannotTell as why:
            unknown.append(f"whether its guard still waits: {why}")
        return found, "; ".join(unknown)

    def _command(self, most_s: float | None) -> Command:
        pairs = [(a, b) for a in self.gpus for b in self.gpus if a != b] if self.gpus else None
        window_s = round(self.window_s - _OVER_S)
        limits = {"most_s": max(1, int(most_s)), "window_s": window_s} if most_s is not None else {}
        command = p2p_probe(
            state=self.state, pairs=pairs, paths=self.paths, sizes=self.sizes, repeats=self.repeats, phases=list(self.phases),
            grace_s=self.grace_s, pair_deadline_s=self.pair_deadline_s, **limits,
        )  # fmt: skip
        return replace(command, max_output=_MOST)

    # -- the probe's own words

    def _listen(self, bench: Bench, command: Command) -> _Heard:
        heard = _Heard()
        progress = _Progress(bench)
        try:
            for line in _ended(bench.host.transport.stream(command), heard):
                heard.lines.append(line)
                progress(line)
        except TransportError as error:
            heard.lost = f"the connection broke while the probe ran: {str(error).splitlines()[0]}"
        answer = heard.answer or Result(command, None, b"", b"", bench.host.clock.now(), 0.0, trouble=heard.lost)
        bench.keep_answer(self.name, replace(answer, stdout=heard.data))
        return heard

    def _fetch(self, bench: Bench, command: Command, heard: _Heard) -> None:
        """The machine answers again: what the probe had written to its disk by then is the truth of this run."""
        bench.tell(f"{heard.lost}; what the probe wrote to {self.state} is read when the machine answers again")
        before = bench.host.identity.boot_id
        if bench.host.await_up(patience_s=_BACK_S, tell=bench.tell) is None:
            raise TransportError(
                f"{bench.host.name} did not come back within {_BACK_S:.0f} s of the peer-to-peer probe's end",
                hint=f"look at its console; when it is up again, {self.state} there says how far the probe came",
            )
        again = bench.host.identity.boot_id
        bench.proven("after the probe's connection broke" + ("; THE MACHINE RESTARTED" if again != before else ""))
        until = bench.host.clock.now().timestamp() + _END_S
        while True:
            read = bench.host.transport.run(Command(("cat", self.state), timeout_s=120, root=True, max_output=_MOST))
            over = b'{"event":"end"' in read.stdout or again != before
            if over or not read.ok or bench.host.clock.now().timestamp() > until:
                break
            bench.host.clock.sleep(_POLL_S)
        bench.keep_answer(self.name, read)
        if read.ok and len(read.stdout) >= len(heard.data):
            heard.lines = read.stdout.splitlines(keepends=True)
        else:
            bench.tell(f"{self.state} is of no use ({read.trouble or read.error_text.strip() or 'shorter than what was heard'})")

    def _judge(self, bench: Bench, run: P2pRun, topology: TopologyFacts | None, iommu: IommuFacts | None) -> P2pMatrix:
        logs = None
        if any(window.unread for window in run.windows if window.closed_s is not None):
            logs = logs_of(run, _known(bench.look(KernelLog()), KernelLog()))
        boot_now = bench.host.boot_id_now()
        return judge_matrix(run, logs=logs, topology=topology, iommu=iommu, baseline=self.baseline, boot_now=boot_now)

    def _conditions(self, run: P2pRun) -> dict[str, Any]:
        return {
            "paths": list(self.paths),
            "sizes": list(self.sizes),
            "processes": self.repeats,
            "phases": list(self.phases),
            "grace_s": self.grace_s,
            "pair_deadline_s": self.pair_deadline_s,
            "cuda_driver": run.driver,
            "state_file": self.state,
        }


def window_at_worst_s(repeats: int, pair_deadline_s: float, grace_s: float) -> float:
    """Seconds that the window of a pair may last: each process runs into its deadline, is killed, and takes its time to go.

    One may last longer (rechecks, several paths lost, all pairs at once); then it is cut off when the probe's time is over.
    """
    return repeats * (pair_deadline_s + _GONE_S) + grace_s + _GONE_S


def figures_from(measured: Measurement | Mapping[str, Any]) -> dict[tuple[Pair, str], Figure]:
    """The figures of pairs that passed in an earlier run, for ``baseline``: {``sizes``, ``cells``} of what it stored."""
    value = measured.value if isinstance(measured, Measurement) else measured
    size = max(int(n) for n in value["sizes"])
    figures = {}
    for cell in value["cells"]:
        for path, (median, low, high) in cell["gbps"].items() if cell["state"] == "verified" else ():
            pair = (str(cell["src"]), str(cell["dst"]))
            figures[pair, path] = Figure(pair, path, size, float(median), float(low), float(high), cell["us"].get(path))
    return figures


def _known(seen: Seen, probe: Any) -> Any:
    """The value of a probe, None when there is no answer: the judging says what it could not hold the run against."""
    try:
        return seen.value(probe)
    except CannotTell:
        return None


def _ended(lines: Iterator[bytes], heard: _Heard) -> Iterator[bytes]:
    """The lines; how the command ended goes to ``heard``."""
    heard.answer = yield from cast("Generator[bytes, None, Result | None]", lines)


def _read(heard: _Heard) -> tuple[P2pRun, list[str]]:
    """The run as values, and what is wrong with how it came."""
    answer = heard.answer
    try:
        run = read_p2p(heard.lines)
    except CannotTell as why:
        return P2pRun(refused=str(why)), [str(why)]
    if heard.lines or heard.lost or answer is None:
        return run, []
    why_nothing = answer.trouble or answer.error_text.strip() or f"exit status {answer.exit_status}"
    refused = f"it said nothing ({why_nothing.splitlines()[-1][:300]})"
    return replace(run, refused=refused), []


class _Progress:
    """One line a window: what runs now."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def __call__(self, line: bytes) -> None:
        if not line.startswith(b'{"event":"window"'):
            return
        window = read_p2p([line]).windows[0]
        (first, *others) = window.pairs or (("", ""),)
        who = first[0] if window.phase == "local" else f"{first[0]} to {first[1]}"
        self.bench.tell(f"window {window.n}, {window.phase}: {who}" + (f" and {len(others)} more" if others else ""))


def _value(
    run: P2pRun,
    matrix: P2pMatrix,
    topology: TopologyFacts | None,
    iommu: IommuFacts | None,
    boot_now: str,
    disturbed: Sequence[str],
    not_known: str,
) -> dict[str, Any]:
    said = judge_p2p(matrix)
    return {
        **matrix.value(),
        "judged": {
            "allowed": said.allowed,
            "verdict": str(said.verdict),
            "reason": said.reason,
            "limits": list(said.limits),
        },
        "claims": _claims(matrix.gpus, topology),
        "fleet": [{"pci": d.pci, "uuid": d.uuid, "name": d.name} for d in run.devices],
        "iommu": {pci: iommu.by_device.get(pci, "no group") for pci in matrix.gpus} if iommu is not None and iommu.on else {},
        "run": {
            "ended": run.ended,
            "stopped": run.stopped,
            "refused": run.refused,
            "unfit": dict(run.unfit),
            "windows": len(run.windows),
            "results": len(run.results),
            "driver": run.driver,
            "library": run.library,
            "boot_id": run.boot_id,
            "boot_now": boot_now,
            "restarted": bool(run.boot_id) and run.boot_id != boot_now,
            "unrested": [rest.pci for rest in run.rests if rest.busy],
            "disturbed": list(disturbed),
            "company_not_known": not_known,
        },
    }


def _claims(gpus: Sequence[str], topology: TopologyFacts | None) -> dict[str, dict[str, str]]:
    if topology is None:
        return {}
    pairs = [(a, b) for a in gpus for b in gpus if a != b]
    return {f"{a} {b}": {c: said[a, b] for c, said in topology.status.items() if (a, b) in said} for a, b in pairs}

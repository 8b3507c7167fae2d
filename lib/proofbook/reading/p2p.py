"""What records of the pair matrix say together: each pair over the runs, what changed and in what, whose faults, how fast.

Nothing is measured or judged anew: states, figures and verdicts are the runs' own. The lines of the kernel are read from the
bytes that are in a record, and held against the window in which they came by the same rule as in the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from proofbook.checks.looking import counted, join
from proofbook.checks.p2p import Figure, PairFault, attribute, logs_of
from proofbook.checks.p2p.attribution import Foreign, WindowVerdict
from proofbook.checks.p2p.bandwidth import FEWEST, WARN_BELOW
from proofbook.errors import CannotTell, NoSuchRun
from proofbook.measures.p2p import figures_from
from proofbook.model import Probe, Seen
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.p2p import P2pRun, Topology, TopologyFacts, Window
from proofbook.reading import Nothing, Reading, Shelf, pick
from proofbook.remote import parse_files
from proofbook.remote.p2p import read_p2p
from proofbook.signatures import LogContext, LogLine, judge, load
from proofbook.view import Picture, Shown, faults_over_time, pair_figures_chart, pairs_over_runs, table

__all__ = ["Fault", "Matrices", "PairRun", "matrices"]

Pair = tuple[str, str]
T = TypeVar("T")

_RUNBOOK = "p2p-pair-matrix"
_MEASURED, _STORED = "p2p.Matrix", "p2p.matrix"
_SUPPRESSED = re.compile(r"(?:^|\s)(\w+): (\d+) callbacks suppressed")
_CMDLINE, _WORDS = "/proc/cmdline", "kernel command line"
_LIBRARY = re.compile(r"libcuda\.so\.([\d.]+)$")
#: The path whose figures are compared: what a copy engine pushes.
_PATH = "ce-push"
_TOGETHER = {"both-directions": "both directions at once", "all-at-once": "all pairs at once"}


# --------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the kernel in a window of the test. ``at_s``: seconds since the first window opened.

    ``suppressed``: how many more lines the kernel says that it did not print; it names no device then.
    """

    window: int
    at_s: float
    signature: str
    device: str
    text: str
    suppressed: int = 0


class PairRun:
    """One run of the pair matrix: what it found, under what, and the kernel's lines of its windows."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.record = reading.record
        found = reading.measurement(_MEASURED)
        if found is None:
            raise CannotTell(f"{self.record.run_id} tested no pair")
        self.measured = found
        self.value: Mapping[str, Any] = found["value"]

    @property
    def name(self) -> str:
        """When it was, what it concluded, and the end of the run's id, which finds it in the archive."""
        when = self.record.opened_at[:16].replace("T", " ")
        return f"{when}, {self.record.conclusion_word or self.record.status} ({self.tail})"

    @property
    def tail(self) -> str:
        return self.record.run_id[-6:]

    @property
    def titled(self) -> str:
        """The name, and below it what most often explains a difference."""
        said = self.conditions
        return f"{self.name}\ndriver {said['driver']}, IOMMU {said['IOMMU']}, remap {said['DmaRemapPeerMmio']}"

    @cached_property
    def cells(self) -> dict[Pair, Mapping[str, Any]]:
        """Every ordered pair as it came out."""
        return {(c["src"], c["dst"]): c for c in self.value["cells"]}

    @cached_property
    def figures(self) -> dict[tuple[Pair, str], Figure]:
        """The figures of pairs that passed, by pair and path: what a later run may be held against."""
        return figures_from({"sizes": self.measured["conditions"]["sizes"], "cells": self.value["cells"]})

    @cached_property
    def conditions(self) -> dict[str, str]:
        """What the run was taken under, in the words of its record."""
        run, identity = self.value["run"], self.record.before
        library = _LIBRARY.search(str(run["library"]))
        names = sorted({d["name"] for d in self.value["fleet"]})
        stored = self.record.values.get(_STORED, {}).get("value", {})
        asked = self.measured["conditions"]
        return {
            "machine": f"{identity.get('hostname', '?')}, machine-id {self.record.machine_id[:8]}",
            "GPUs": f"{len(self.value['gpus'])} x {', '.join(names) or 'a name that was not told'}",
            "boot": str(run["boot_id"])[:8] or "not said",
            "kernel": str(identity.get("kernel", "")) or "not said",
            _WORDS: self._command_line,
            "driver": library[1] if library else "not told",
            "IOMMU": ", ".join(sorted(set(self.value["iommu"].values()))) or "off",
            "DmaRemapPeerMmio": str(stored.get("remap", "not said")),
            "sizes, bytes": ", ".join(str(size) for size in asked["sizes"]),
            "processes a pair": str(asked["processes"]),
        }

    @property
    def _command_line(self) -> str:
        for evidence in self.reading.asked_by("p2p.PeerConfig"):
            if _CMDLINE in evidence["argv"]:
                return parse_files(self.reading.result(evidence)).files.get(_CMDLINE, "not said").strip()
        return "not said"

    # -- the windows of the test, from the bytes in the record

    @property
    def _asked(self) -> list[Mapping[str, Any]]:
        own = set(self.measured["evidence"])
        return [e for e in self.record.evidence if e["id"] in own]

    @cached_property
    def probe(self) -> P2pRun:
        """What the probe said, window by window. Raises CannotTell when the record does not hold it."""
        said = [e for e in self._asked if e.get("probe") == _MEASURED]
        if not said:
            raise CannotTell("the record does not hold what the probe said")
        # WHY the longest: after a broken connection the machine's own file was read too, and holds the rest.
        return read_p2p(max((self.reading.printed(e) for e in said), key=len).splitlines(keepends=True))

    @cached_property
    def _seen(self) -> Seen:
        return self.reading.look([Topology(), IommuGroups()], self._asked)

    @property
    def topology(self) -> TopologyFacts | None:
        return _known(self._seen, Topology())

    @property
    def iommu(self) -> IommuFacts | None:
        """The groups as they were before the test; None when nobody looked."""
        return _known(self._seen, IommuGroups())

    @cached_property
    def windows(self) -> tuple[WindowVerdict, ...]:
        """Whose fault each one was: the same rule on the same bytes as in the run."""
        return attribute(self.probe.windows, logs_of(self.probe), self.topology, self.iommu, self.probe.gpus)

    @property
    def faults(self) -> tuple[PairFault, ...]:
        """Of one pair, or of one of several that were active together."""
        return tuple(fault for window in self.windows for fault in window.faults)

    @property
    def foreign(self) -> tuple[Foreign, ...]:
        """In a window of the test, and no pair's."""
        return tuple(fault for window in self.windows for fault in window.foreign)

    @cached_property
    def lines(self) -> tuple[Fault, ...]:
        """Every line of a fault that the kernel printed in a window, and every note that it printed fewer than there were."""
        known = {(f.window, f.signature, f.requester) for f in self.faults}
        known |= {(f.window, f.signature, f.device) for f in self.foreign}
        blinked = self.iommu.by_device if self.iommu is not None else None
        context = LogContext(gpus=frozenset(self.probe.gpus), iommu=blinked, snippet=True)
        began = min((w.opened_s for w in self.probe.windows), default=0.0)
        said: list[Fault] = []
        for window in self.probe.windows:
            for line in window.lines:
                at = line.monotonic_s - began
                if more := _SUPPRESSED.search(line.text):
                    said += [Fault(window.n, at, name, "", line.text, int(more[2])) for name in _suppressible(more[1])]
                    continue
                alone = judge([LogLine(line.text, line.monotonic_s, n=1)], context=context).findings
                said += [
                    Fault(window.n, at, f.signature, f.device, line.text)
                    for f in alone
                    if (window.n, f.signature, f.device) in known
                ]
        return tuple(said)

    # -- one run's answers

    @property
    def states(self) -> Picture:
        """The matrix of this run alone."""
        return pairs_over_runs([(self.titled, self.value)], title="What was shown of each pair")

    @property
    def by_pair(self) -> Shown:
        """Faults by pair: who asked its peer for what, how often it was printed, and how often at least it happened."""
        rows = [self._pair_row(pair, own) for pair, own in self._alone().items()]
        rows += [self._together_row(window) for window in self.windows if window.phase in _TOGETHER and window.faults]
        note = (
            "Suppressed: lines that the kernel counted and did not print. It names no device there, so they are told by window; "
            "printed and suppressed together are a lower bound, for it forgets some too."
            if rows
            else "No fault of a pair is in the kernel's lines of this run."
        )
        return table(("copy", "who asked whom", "printed", "suppressed", "at least", "how the pair is known"), rows, note=note)

    def _alone(self) -> dict[Pair, list[PairFault]]:
        """Faults of pairs that were tested by themselves."""
        found: dict[Pair, list[PairFault]] = {}
        phases = {w.n: w.phase for w in self.probe.windows}
        for fault in self.faults:
            if phases[fault.window] == "pairs":
                found.setdefault(fault.pairs[0], []).append(fault)
        return found

    def _pair_row(self, pair: Pair, faults: Sequence[PairFault]) -> tuple[Any, ...]:
        who = [f"{_asking(f)}: {self._printed(f)}" for f in faults]
        printed = sum(self._printed(f) for f in faults)
        suppressed = self._suppressed({f.window for f in faults})
        how = dict.fromkeys(part for f in faults for part in f.how.split("; "))
        return " to ".join(pair), "; ".join(who), printed, suppressed, printed + suppressed, "; ".join(how)

    def _together_row(self, window: WindowVerdict) -> tuple[Any, ...]:
        printed = sum(self._printed(f) for f in window.faults)
        suppressed = self._suppressed({window.window})
        who = Counter(f.requester for f in window.faults)
        told = [pair for f in window.faults for pair in f.pairs if len(f.pairs) == 1]
        open_ = sum(len(f.pairs) > 1 for f in window.faults)
        how = f"{counted(len(set(told)), 'pair')} told apart by who asked, what and where"
        how += f"; {counted(open_, 'fault')} of one of several pairs" if open_ else ""
        pairs = join((" and ".join(pair) for pair in sorted({_unordered(p) for p in window.pairs})), 2)
        return f"{_TOGETHER[window.phase]}: {pairs}", join(sorted(who), 4), printed, suppressed, printed + suppressed, how

    def _printed(self, fault: PairFault | Foreign) -> int:
        device = fault.requester if isinstance(fault, PairFault) else fault.device
        key = (fault.window, fault.signature, device)
        return sum((line.window, line.signature, line.device) == key and not line.suppressed for line in self.lines)

    def _suppressed(self, windows: Iterable[int]) -> int:
        inside = set(windows)
        return sum(line.suppressed for line in self.lines if line.window in inside)

    @property
    def by_group(self) -> Shown:
        """Faults by the IOMMU group of the device that asked. The numbers of groups hold for one boot."""
        iommu = self.iommu
        if iommu is None or not iommu.on:
            return table(("group", "type"), (), note="No IOMMU is at work: there is no group, and no fault can be logged.")
        printed = Counter(line.device for line in self.lines if line.device)
        pairs: dict[str, set[Pair]] = {}
        for fault in self.faults:
            pairs.setdefault(fault.requester, set()).update(fault.pairs)
        gpus = set(self.value["gpus"])
        rows = [
            (n, group.type, join(group.devices, 3), count, _of_whom(group.devices, pairs, gpus))
            for n, group in iommu.groups.items()
            if (count := sum(printed[d] for d in group.devices)) or gpus & set(group.devices)
        ]
        return table(("group", "type", "its devices", "printed", "of which copies"), rows)

    @property
    def others(self) -> Shown:
        """Faults in a window of the test that are no pair's, each with the pair that ran meanwhile."""
        active = {w.window: w for w in self.windows}
        rows = [
            (
                f.device or "no named device",
                f.signature,
                self._printed(f),
                _active(active[f.window]),
                f.why,
                next(iter(f.lines), ""),
            )
            for f in self.foreign
        ]
        columns = ("device", "what", "printed", "active meanwhile", "why it is no pair's", "line")
        return table(columns, rows, note="" if rows else "In no window did another device fault.")

    @property
    def timeline(self) -> Picture:
        """Fault lines over time, each in the window of the pair that was active; other devices on a row of their own."""
        began = min((w.opened_s for w in self.probe.windows), default=0.0)
        windows = [(_row(w), w.opened_s - began, (w.closed_s if w.closed_s is not None else w.opened_s) - began)
                   for w in self.probe.windows]  # fmt: skip
        rows = {w.n: _row(w) for w in self.probe.windows}
        others = {(f.window, f.signature, f.device) for f in self.foreign}
        marks = []
        for line in self.lines:
            if line.suppressed:
                marks.append((rows[line.window], line.at_s, "suppressed", line.suppressed))
            elif (line.window, line.signature, line.device) in others:
                marks.append((f"other: {line.device or 'no device'}", line.at_s, "other", 1))
            else:
                marks.append((rows[line.window], line.at_s, "pair", 1))
        return faults_over_time(windows, marks, title=f"The kernel's lines by window: {self.name}")

    @property
    def speeds(self) -> Shown:
        """Each pair's bandwidth and latency beside the median of its class; the worst share first."""
        middle = self.class_medians
        rows = []
        for pair, cell in self.cells.items():
            if _PATH in cell["gbps"]:
                gbps, low, high = cell["gbps"][_PATH]
                share = gbps / middle[cell["class"]] if cell["class"] in middle else None
                said = "cannot be true" if cell["state"] == "invalid" else "slow" if cell["slow"] else ""
                rows.append((" to ".join(pair), cell["class"], f"{gbps:.1f}", f"{low:.1f} to {high:.1f}", _percent(share),
                             _two(cell["us"].get(_PATH)), said))  # fmt: skip
        rows.sort(key=lambda row: (row[6] == "", row[0]))
        medians = ", ".join(f"{name} {number:.1f}" for name, number in sorted(middle.items()))
        note = (
            f"Median of the class in GB/s: {medians or 'none (too few figures)'}." if rows else "Nothing was timed in this run."
        )
        columns = ("pair", "where", "GB/s", "spread", "of its class", "us a small copy", "remark")
        return table(columns, rows, note=note)

    @property
    def class_medians(self) -> dict[str, float]:
        """GB/s by class, of figures that can be true; only where there are enough of them to be a median."""
        valid: dict[str, list[float]] = {}
        for cell in self.cells.values():
            if _PATH in cell["gbps"] and cell["state"] != "invalid":
                valid.setdefault(cell["class"], []).append(cell["gbps"][_PATH][0])
        return {name: median(figures) for name, figures in valid.items() if len(figures) >= FEWEST}


def _known(seen: Seen, probe: Probe[T]) -> T | None:
    try:
        return seen.value(probe)
    except CannotTell:
        return None


def _suppressible(function: str) -> tuple[str, ...]:
    """The signature whose lines this function of the kernel suppresses; () where none is known."""
    suppression = load().suppressions.get(function)
    return suppression.of[:1] if suppression else ()


def _asking(fault: PairFault) -> str:
    """``0000:01:00.0 wrote to 0000:81:00.0``: the requester is the one that an IOMMU names."""
    (src, dst) = fault.pairs[0]
    peer = dst if fault.requester == src else src
    verb = "asked something of" if fault.write is None else "wrote to" if fault.write else "read from"
    return f"{fault.requester} {verb} {peer}"


def _unordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def _of_whom(devices: Sequence[str], pairs: Mapping[str, set[Pair]], gpus: set[str]) -> str:
    own = sorted({pair for device in devices for pair in pairs.get(device, ())})
    if own:
        return "; ".join(" to ".join(pair) for pair in own)
    return "none" if gpus & set(devices) else "none: no GPU is in it"


def _active(window: WindowVerdict) -> str:
    if window.phase == "local":
        return f"{window.pairs[0][0]} alone" if window.pairs else "a GPU alone"
    return _TOGETHER.get(window.phase) or (" to ".join(window.pairs[0]) if window.pairs else "nothing: between two windows")


def _row(window: Window) -> str:
    """The row of a window in the picture."""
    if window.phase in _TOGETHER:
        return _TOGETHER[window.phase]
    if window.phase == "pairs" and window.pairs:
        return " to ".join(window.pairs[0])
    return "each GPU by itself"


def _has(shares: Sequence[float]) -> str:
    return "has" if len(shares) == 1 else "have"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _two(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


# -------------------------------------------------------------------------------------------------- many runs


def matrices(shelf: Shelf) -> Matrices:
    """The runs of an archive that tested pairs, oldest first. Raises NoSuchRun when there is none."""
    readings = [shelf.read(brief.run_id) for brief in reversed(shelf.archive.runs()) if brief.runbook == _RUNBOOK]
    tested = [PairRun(r) for r in readings if (found := r.measurement(_MEASURED)) and found["value"]["cells"]]
    if not tested:
        raise NoSuchRun(
            "no run in this archive tested a pair of GPUs",
            hint="a run that stopped at its gate, or found one GPU only, has no pair to show",
        )
    return Matrices(tested)


class Matrices:
    """Several runs of the pair matrix beside one another. Each attribute answers one question."""

    def __init__(self, runs: Sequence[PairRun]) -> None:
        self.runs = tuple(runs)

    def __iter__(self) -> Iterator[PairRun]:
        return iter(self.runs)

    def read(self, run: str) -> PairRun:
        """One of them, by an end of its id. Raises NoSuchRun."""
        found = next((r for r in self.runs if run and r.record.run_id.endswith(run)), None)
        if found is None:
            raise NoSuchRun(f"no pair matrix here is {run!r}", hint="there are " + ", ".join(r.name for r in self.runs))
        return found

    @property
    def latest(self) -> PairRun:
        return self.runs[-1]

    @property
    def faulty(self) -> PairRun | Nothing:
        """The latest with faults of its pairs in the kernel's log."""
        return pick(reversed(self.runs), lambda r: r.faults, "no run with faults of a pair in the kernel's log")

    @property
    def with_foreign(self) -> PairRun | Nothing:
        """The latest in whose windows another device than a pair's faulted."""
        return pick(reversed(self.runs), lambda r: r.foreign, "no run with a fault of another device")

    @property
    def latest_against_first(self) -> Shown | Nothing:
        """The latest against the first of the same machine."""
        same = [r for r in self.runs[:-1] if r.record.machine_id == self.latest.record.machine_id]
        return self.against(self.latest.tail, same[0].tail) if same else Nothing("one run of its machine alone")

    @property
    def seals(self) -> Shown:
        """Whether each record is as it was sealed."""
        return table(("run", "on", "seal"), [(r.name, r.record.host, str(r.reading.seal)) for r in self.runs])

    @property
    def concluded(self) -> Shown:
        """What each concluded, and why; with the verdict on the run itself."""
        rows = [
            (
                r.name,
                (r.record.conclusion or {}).get("peer_to_peer", ""),
                (r.record.conclusion or {}).get("because", ""),
                r.record.verdict,
            )
            for r in self.runs
        ]
        return table(("run", "peer-to-peer", "because", "the run itself"), rows)

    @property
    def conditions(self) -> Shown:
        """What each was taken under. What differs comes first, and is the only thing that may explain a difference."""
        names = list(self.runs[0].conditions)
        said = {name: [r.conditions[name] for r in self.runs] for name in names}
        said[_WORDS] = _beyond_shared(said[_WORDS])
        differing = [name for name in names if len(set(said[name])) > 1]
        rows = [(name, *said[name]) for name in differing]
        same = [f"{name}: {self.runs[0].conditions[name]}" for name in names if name not in differing]
        return table(("what", *(r.tail for r in self.runs)), rows, note=f"The same in all: {'; '.join(same)}." if same else "")

    @property
    def pairs(self) -> Picture:
        """Every ordered pair over the runs: one matrix a run."""
        return pairs_over_runs([(r.titled, r.value) for r in self.runs])

    @property
    def changes(self) -> Shown:
        """Each run against the one before it on the same machine: which pairs changed, in what, and what else differed."""
        rows = []
        for run, other in self._steps():
            first, *more = self._against(run, other)
            rows += [first, *((*row[:2], "as above", *row[3:]) for row in more)]
        alone = [r.name for r in self.runs if r not in {run for run, _ in self._steps()}]
        note = f"With nothing before it on its machine: {'; '.join(alone)}." if alone else ""
        return table(("run", "against", "also differs", "pairs", "in what"), rows, note=note)

    def against(self, run: str, other: str) -> Shown:
        """One run against another, by ends of their ids. Raises NoSuchRun."""
        rows = [row[2:] for row in self._against(self.read(run), self.read(other))]
        return table(("also differs", "pairs", "in what"), rows)

    def _steps(self) -> list[tuple[PairRun, PairRun]]:
        found = []
        for number, run in enumerate(self.runs):
            earlier = [r for r in self.runs[:number] if r.record.machine_id == run.record.machine_id]
            found += [(run, earlier[-1])] if earlier else []
        return found

    def _against(self, run: PairRun, other: PairRun) -> list[tuple[str, str, str, str, str]]:
        """A row for each way in which pairs changed, the pairs that changed so together."""
        differs = "; ".join(_differing(other.conditions, run.conditions)) or "nothing that is recorded"
        grouped: dict[str, list[Pair]] = {}
        for pair in sorted({*run.cells, *other.cells}):
            for text in _changes(other.cells.get(pair), run.cells.get(pair)):
                grouped.setdefault(text, []).append(pair)
        every = len(run.cells)
        rows = [
            (run.tail, other.tail, differs, f"all {every}" if len(of) == every else "; ".join(" to ".join(p) for p in of), text)
            for text, of in grouped.items()
        ]
        return rows or [(run.tail, other.tail, differs, "none", "every pair as before")]

    @property
    def figures(self) -> Picture:
        """Bandwidth and latency by pair, a mark for each run that timed its copies, with the medians of the classes."""
        timed = [r for r in self.runs if any(_PATH in c["gbps"] for c in r.cells.values())]
        limits = [limit for r in timed if r.topology is not None for limit in r.topology.limit_gbps.values()]
        return pair_figures_chart(
            [(r.name, r.value) for r in timed], path=_PATH, limit=min(limits) if limits else None, medians=self._medians(timed)
        )

    def _medians(self, timed: Sequence[PairRun]) -> dict[str, float]:
        """Of each class the median of the runs' medians: where to look for a pair, no measurement."""
        found: dict[str, list[float]] = {}
        for run in timed:
            for name, number in run.class_medians.items():
                found.setdefault(name, []).append(number)
        return {name: median(numbers) for name, numbers in found.items()}

    @property
    def since_good(self) -> Shown:
        """Each pair of each run against the same pair's figures in the machine's last good run: what stands out, and how far."""
        rows, unheld = [], []
        for number, run in enumerate(self.runs):
            if not any(_PATH in c["gbps"] for c in run.cells.values()):
                unheld.append(f"{run.tail} timed nothing")
                continue
            shares: list[float] = []
            out = []
            for pair, cell in run.cells.items():
                good = self._last_good(number, pair)
                if good is None or _PATH not in cell["gbps"]:
                    continue
                gbps, before = cell["gbps"][_PATH][0], good[1].gbps
                if cell["state"] == "invalid" or gbps < WARN_BELOW * before:
                    out.append(
                        (run.tail, " to ".join(pair), f"{gbps:.1f}", f"{before:.1f}", _percent(gbps / before), good[0].tail)
                    )
                else:
                    shares.append(gbps / before)
            rows += out
            if shares:
                what = f"each of {'the other ' if out else ''}{counted(len(shares), 'pair')} that {_has(shares)} a good run"
                rows.append((run.tail, what, "", "", f"{min(shares):.1%} or more", ""))
            elif not out:
                unheld.append(f"{run.tail} has no good run before it")
        note = "Not held against a good run: " + "; ".join(unheld) + "." if unheld else ""
        return table(("run", "pair", "GB/s", "then", "of it", "good run"), rows, note=note)

    def _last_good(self, number: int, pair: Pair) -> tuple[PairRun, Figure] | None:
        """The latest earlier run of the same machine in which this pair passed and was timed at the same size."""
        run = self.runs[number]
        size = max(run.measured["conditions"]["sizes"])
        for earlier in reversed(self.runs[:number]):
            figure = earlier.figures.get((pair, _PATH))
            if earlier.record.machine_id == run.record.machine_id and figure is not None and figure.size == size:
                return earlier, figure
        return None

    @property
    def blind(self) -> Shown:
        """What these records cannot show: silence that proves nothing, pairs that did not run, what was not timed."""
        told: dict[tuple[str, str], list[str]] = {}
        for run in self.runs:
            for row in dict.fromkeys(_blind(run)):
                told.setdefault(row, []).append(run.tail)
        rows = [(*row, "all" if len(of) == len(self.runs) else of) for row, of in told.items()]
        rows.sort(key=lambda row: _BLIND.index(row[0]))
        return table(("kind", "what", "of"), rows)


#: What a reader must know first, comes first.
_BLIND = (
    "no fault could be logged",
    "not run",
    "not timed",
    "could not tell",
    "not checked",
    "remark",
    "run ended early",
    "limit",
)


def _blind(run: PairRun) -> Iterator[tuple[str, str]]:
    silent: dict[str, list[Pair]] = {}
    untried: dict[str, list[Pair]] = {}
    for pair, cell in run.cells.items():
        if cell["state"] in ("not run", "advertised"):
            untried.setdefault(_why_untried(cell), []).append(pair)
        elif cell["silence"]:
            silent.setdefault(cell["silence"], []).append(pair)
    for why, pairs in untried.items():
        yield "not run", f"{'; '.join(' to '.join(pair) for pair in pairs)} ({why})"
    for why, pairs in silent.items():
        who = "every pair that ran" if len(pairs) > 1 else " to ".join(pairs[0])
        yield "no fault could be logged", f"{why}: the clean log of {who} proves nothing"
    if not any(_PATH in c["gbps"] for c in run.cells.values()):
        yield "not timed", "no size was large enough to be timed, so a slow pair would not be seen"
    for gap in run.record.not_verified:
        kind = gap["kind"] if gap["kind"] in _BLIND else "remark"
        if not any(cell["silence"] and cell["silence"] in gap["why"] for cell in run.cells.values()):
            yield kind, gap["why"] if gap["what"].lower() in gap["why"].lower() else f"{gap['what']}: {gap['why']}"
    for limit in run.value["judged"]["limits"]:
        if not limit.startswith("a clean kernel log"):
            yield "limit", limit


def _why_untried(cell: Mapping[str, Any]) -> str:
    """The reason of one path stands for all: nothing of the pair was tried."""
    reasons = [path["reason"] for path in cell["paths"].values() if path["state"] == "not run"]
    return next(iter(reasons), "") or cell["reason"] or "no reason is in the record"


def _changes(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[str]:
    """In what one pair changed: its state, the paths that did it, its faults, what its silence is worth, its figures."""
    if then is None or now is None:
        yield "tested now, not there then" if then is None else "not tested now"
        return
    if then["state"] != now["state"]:
        faults = f"; {_faulted(then)} then, {_faulted(now)} now" if bool(then["faults"]) != bool(now["faults"]) else ""
        yield f"{then['state']} then, {now['state']} now{_by_path(then, now)}{faults}"
    if then["silence"] != now["silence"] and "not run" not in (then["state"], now["state"]):
        yield f"a clean log proves nothing now: {now['silence']}" if now["silence"] else "a clean log proves something again"
    if _PATH in then["gbps"] and _PATH in now["gbps"]:
        before, after = then["gbps"][_PATH][0], now["gbps"][_PATH][0]
        if not WARN_BELOW <= after / before <= 1 / WARN_BELOW:
            yield f"{before:.1f} GB/s then, {after:.1f} now ({after / before:.0%})"


def _by_path(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The paths whose own state changed, by what they came to."""
    came: dict[str, list[str]] = {}
    for name, path in now["paths"].items():
        if then["paths"].get(name, path)["state"] != path["state"]:
            came.setdefault(path["state"], []).append(name)
    return " (" + "; ".join(f"{state}: {', '.join(names)}" for state, names in came.items()) + ")" if came else ""


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """What differs of the conditions; of a command line only the words."""
    for name in then:
        if then[name] == now[name]:
            continue
        before, after = _beyond_shared([then[name], now[name]]) if name == _WORDS else (then[name], now[name])
        yield f"{name}: {before or 'without'} then, {after or 'without'} now"


def _beyond_shared(lines: Sequence[str]) -> list[str]:
    """Of each line the words that not all of them have."""
    shared = set.intersection(*(set(line.split()) for line in lines))
    return [" ".join(word for word in line.split() if word not in shared) for line in lines]


def _faulted(cell: Mapping[str, Any]) -> str:
    return "faults" if cell["faults"] else "no fault"

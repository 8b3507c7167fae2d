"""Whose fault was it? Lines of the kernel, held against the pair that was active when they came.

The device that an IOMMU names is the *requester*: it did the access. Which pair it was follows from the window, where exactly one
pair was active; else from the address, when it lies in a peer's BAR. An address is no proof by itself: where the driver maps
peers through the IOMMU it is an IOVA and need not equal the BAR.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from proofbook.checks.looking import counted, join
from proofbook.model import Verdict
from proofbook.probes.iommu import IommuFacts
from proofbook.probes.kernel_log import KernelMessages
from proofbook.probes.p2p import P2pRun, TopologyFacts, Window
from proofbook.signatures import LogContext, LogLine, SignatureFinding, judge, load

__all__ = ["Foreign", "PairFault", "WindowLog", "WindowVerdict", "attribute", "logs_of"]

Pair = tuple[str, str]
_ADDRESS = re.compile(r"\baddress=(0x[0-9a-fA-F]+)|\bfault addr (?:0x)?([0-9a-fA-F]+)|\biova: (0x[0-9a-fA-F]+)")
_WRITE = 0x20  # of an AMD IOMMU's flags


@dataclass(frozen=True, slots=True)
class WindowLog:
    """The kernel's lines of one window. ``gaps``: why silence in them proves nothing; empty when they are complete."""

    lines: tuple[LogLine, ...]
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairFault:
    """A fault that is of one pair: who asked for the access, and why it is this pair's.

    ``count`` is what was printed plus what the kernel says it suppressed; ``at_least``: then it is a lower bound. ``write`` None
    and ``address`` None: the line does not say. ``pairs`` holds one pair, or all that it may be of when it cannot be told apart.
    """

    window: int
    pairs: tuple[Pair, ...]
    signature: str
    requester: str
    address: int | None
    write: bool | None
    count: int
    at_least: bool
    how: str
    lines: tuple[str, ...]

    @property
    def told(self) -> str:
        """A sentence: how many, of whom, and whose."""
        least = "at least " if self.at_least else ""
        return f"{least}{counted(self.count, 'line')} {self.signature} of {self.requester or 'no named device'} ({self.how})"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A fault in a window that is not its pairs': of another device, or of none."""

    window: int
    signature: str
    device: str
    verdict: Verdict
    count: int
    at_least: bool
    why: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WindowVerdict:
    """What the kernel said in one window. ``silence``: "" when its silence about a pair would prove something, else why not."""

    window: int
    phase: str
    pairs: tuple[Pair, ...]
    faults: tuple[PairFault, ...]
    foreign: tuple[Foreign, ...]
    silence: str


def logs_of(run: P2pRun, messages: KernelMessages | None = None) -> dict[int, WindowLog]:
    """The log of each window: what the probe read itself, else the lines of ``messages`` (the journal) that came meanwhile.

    A window whose lines are not known is absent. Cutting the journal by time is the weaker way, and is noted as a gap when the
    journal has gaps of its own: a line near the edge may belong to the window beside.
    """
    logs = {}
    for window in run.windows:
        if not window.unread:
            logs[window.n] = _own(window)
        elif messages is not None and messages.boot_id == run.boot_id and window.closed_s is not None:
            logs[window.n] = _cut(window, messages)
    return logs


def _own(window: Window) -> WindowLog:
    lines = tuple(LogLine(line.text, line.monotonic_s, n=n) for n, line in enumerate(window.lines, 1))
    numbers = [line.seq for line in window.lines]
    missing = sum(b - a - 1 for a, b in pairwise(numbers) if b > a)
    gaps = []
    if window.lost:
        gaps.append("lines of the kernel were overwritten before they could be read")
    if missing:
        gaps.append(f"{counted(missing, 'line')} of the kernel are missing by their numbers")
    return WindowLog(lines, tuple(gaps))


def _cut(window: Window, messages: KernelMessages) -> WindowLog:
    closed = window.closed_s if window.closed_s is not None else float("inf")
    inside = [m for m in messages.lines if m.monotonic_s is not None and window.opened_s <= m.monotonic_s <= closed]
    lines = tuple(LogLine(m.text, m.monotonic_s, m.time, n=n) for n, m in enumerate(inside, 1))
    return WindowLog(lines, messages.gaps if not messages.complete else ())


def attribute(
    windows: Iterable[Window],
    logs: Mapping[int, WindowLog],
    topology: TopologyFacts | None,
    iommu: IommuFacts | None,
    gpus: Sequence[str],
) -> tuple[WindowVerdict, ...]:
    """Judge the log of every window. Pure; ``iommu`` None: nobody looked, ``topology`` None: no BAR is known."""
    context = LogContext(gpus=frozenset(gpus), iommu=iommu.by_device if iommu is not None else None, snippet=True)
    return tuple(_window(window, logs.get(window.n), topology, iommu, context) for window in windows)


def _window(
    window: Window, log: WindowLog | None, topology: TopologyFacts | None, iommu: IommuFacts | None, context: LogContext
) -> WindowVerdict:
    faults: list[PairFault] = []
    foreign: list[Foreign] = []
    gaps = list(log.gaps) if log else [window.unread or "the lines of this window are not known"]
    if log is not None:
        judgement = judge(log.lines, context=context)
        for finding in judgement.findings:
            if finding.kind == "gap":
                gaps.append(finding.reason)
            elif finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN):
                said = _one(window, finding, topology)
                if isinstance(said, PairFault):
                    faults.append(said)
                else:
                    foreign.append(said)
    silence = _silence(window, tuple(dict.fromkeys(gaps)), iommu)
    return WindowVerdict(window.n, window.phase, window.pairs, tuple(faults), tuple(foreign), silence)


def _one(window: Window, finding: SignatureFinding, topology: TopologyFacts | None) -> PairFault | Foreign:
    involved = [pair for pair in window.pairs if finding.device in pair]
    address = _address_of(finding)
    target = topology.owner(address) if topology is not None and address is not None else ""
    target = "" if target == finding.device else target
    if not finding.device:
        why = "it names no device"
    elif finding.verdict is Verdict.WARN and involved:
        why = "it is a warning of a device of the pair, and no fault"
    elif not involved:
        why = f"{finding.device} is in no pair of this window" if window.pairs else "it came between two windows"
    elif target and not any({finding.device, target} == set(pair) for pair in involved):
        why = f"the address lies in a BAR of {target}, which this window's pair has nothing to do with"
    else:
        pairs, how = _whose(window, involved, finding, target)
        return PairFault(
            window.n, pairs, finding.signature, finding.device, address, _is_write(finding), finding.count, finding.at_least,
            how, finding.lines,
        )  # fmt: skip
    return Foreign(
        window.n, finding.signature, finding.device, finding.verdict, finding.count, finding.at_least, why, finding.lines
    )


def _whose(window: Window, involved: Sequence[Pair], finding: SignatureFinding, target: str) -> tuple[tuple[Pair, ...], str]:
    """The pair, or the pairs that it may be, and how that is known."""
    bar = f"; the address lies in a BAR of its peer {target}" if target else ""
    if len(window.pairs) == 1:
        return window.pairs, f"the requester is of the only pair that was active{bar}"
    peers = {target} if target else {pci for pair in involved for pci in pair} - {finding.device}
    write = _is_write(finding)
    if len(peers) == 1 and write is not None:
        (peer,) = peers
        # Who writes pushes or stores to its peer; who reads pulls or loads from it.
        pair = (finding.device, peer) if write else (peer, finding.device)
        if pair in involved:
            verb = "wrote to" if write else "read from"
            return (pair,), f"several pairs were active, and {finding.device} {verb} {peer}{bar}"
    if len(involved) == 1:
        return tuple(involved), f"the requester is of one active pair only{bar}"
    return tuple(involved), f"one of {len(involved)} pairs that were active with this requester"


def _address_of(finding: SignatureFinding) -> int | None:
    for line in finding.lines:
        if found := _ADDRESS.search(line):
            return int(next(group for group in found.groups() if group), 16)
    return None


def _is_write(finding: SignatureFinding) -> bool | None:
    flags = finding.fields.get("flags", "")
    if flags.startswith("0x"):
        return bool(int(flags, 16) & _WRITE)
    text = finding.lines[0] if finding.lines else ""
    if "DMA Write" in text or "data write" in text:
        return True
    return False if "DMA Read" in text or "data read" in text else None


def _silence(window: Window, gaps: Sequence[str], iommu: IommuFacts | None) -> str:
    """Why a clean log would prove nothing, "" when it would.

    Without translation no fault can be raised, so none is expected, whatever happened to the data.
    """
    devices = sorted({pci for pair in window.pairs for pci in pair})
    if iommu is None:
        return "whether an IOMMU translates for these GPUs is not known"
    if not iommu.on:
        return "no IOMMU is at work, so no fault can be logged"
    blind = {pci: iommu.by_device.get(pci, "no group") for pci in devices}
    blind = {pci: kind for pci, kind in blind.items() if kind not in ("DMA", "DMA-FQ")}
    if blind:
        shown = join(f"{pci} ({kind or 'unknown'})" for pci, kind in blind.items())
        return f"the IOMMU does not translate for {shown}"
    return f"the kernel's log is not complete: {join(gaps, 2)}" if gaps else ""


def is_iommu_stuck(signature: str) -> bool:
    """Whether a signature says that the IOMMU itself no longer moves: then every pair is in danger."""
    return "iommu-stuck" in load()[signature].tags

"""Is it as fast as it should be, and can it be true at all?

Published for RTX PRO 6000 Blackwell on PCIe Gen5 x16 (community measurements): 53-56.6 GB/s one way under one switch or NUMA
node, 39-51 across sockets, 0.36-0.52 us a small copy; through host memory about 14 us. A pair that failed its data check was
published with 103.88 GB/s: what is more than the link carries is no record but a copy that did not take place.

WHY a small copy is not held against one inside a GPU: those published figures have 2 us for the local one, more than for a peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from proofbook.model import Verdict
from proofbook.probes.p2p import CopyResult, TopologyFacts

__all__ = ["GEN5_X16", "Figure", "Speed", "class_of", "figures_of", "speeds"]

Pair = tuple[str, str]
#: GB/s one way of PCIe Gen5 with 16 lanes, the link that the floors were published for.
GEN5_X16 = 63.0
#: Against the median of the class, and against this host's own last good run.
WARN_BELOW, FAIL_BELOW = 0.85, 0.50
#: GB/s of a copy engine on Gen5 x16; on another link they shrink with it.
FLOORS = {"same switch": 45.0, "same NUMA node": 45.0, "cross socket": 30.0}
#: A small copy that takes this long (microseconds) went through host memory.
STAGED_US = 10.0
#: A median of fewer figures than this says nothing about one of them.
FEWEST = 3
_CLASSES = {"PIX": "same switch", "PXB": "same switch", "PHB": "same NUMA node", "NODE": "same NUMA node", "SYS": "cross socket"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One pair by one path: the median of its repeats at the largest size that was timed, with its spread, in GB/s and us."""

    pair: Pair
    path: str
    size: int
    gbps: float
    low: float
    high: float
    us: float | None  # of the smallest size


@dataclass(frozen=True, slots=True)
class Speed:
    """A figure judged. ``invalid``: it cannot be true, so it measures nothing. ``reasons`` hold the numbers."""

    figure: Figure
    klass: str
    verdict: Verdict
    invalid: bool
    reasons: tuple[str, ...]


def class_of(topology: TopologyFacts | None, pair: Pair) -> str:
    """``NVLink``, ``same switch``, ``same NUMA node``, ``cross socket``, or ``unknown``."""
    if topology is None:
        return "unknown"
    link = topology.links.get(pair, "")
    if link.startswith("NV"):
        return "NVLink"
    nodes = {topology.numa.get(pci) for pci in pair}
    by_node = "unknown" if None in nodes else "same NUMA node" if len(nodes) == 1 else "cross socket"
    return _CLASSES.get(link, by_node)


def figures_of(results: Iterable[CopyResult]) -> dict[tuple[Pair, str], Figure]:
    """The figures of the pairs alone, by pair and path; only of copies whose data was right."""
    timed: dict[tuple[Pair, str], list[CopyResult]] = {}
    for result in results:
        if result.phase == "pairs" and result.outcome == "ok":
            timed.setdefault((result.pair, result.path), []).append(result)
    figures = {}
    for (pair, path), all_sizes in timed.items():
        largest = max((r.size for r in all_sizes if r.gbps), default=0)
        smallest = min(r.size for r in all_sizes)
        gbps = [g for r in all_sizes if r.size == largest for g in r.gbps]
        us = [u for r in all_sizes if r.size == smallest for u in r.us]
        if gbps:
            spread = (round(median(gbps), 3), min(gbps), max(gbps))
            figures[pair, path] = Figure(pair, path, largest, *spread, round(median(us), 3) if us else None)
    return figures


def speeds(
    figures: Mapping[tuple[Pair, str], Figure],
    topology: TopologyFacts | None,
    baseline: Mapping[tuple[Pair, str], Figure] | None = None,
) -> dict[tuple[Pair, str], Speed]:
    """Every figure against what the link carries, the median of its class, the floors, and the last good run."""
    valid: dict[tuple[str, str], list[float]] = {}
    for (pair, path), figure in figures.items():
        if not _impossible(figure, topology):
            valid.setdefault((class_of(topology, pair), path), []).append(figure.gbps)
    judged = {}
    for (pair, path), figure in figures.items():
        klass = class_of(topology, pair)
        peers = valid.get((klass, path), [])
        judged[pair, path] = _speed(figure, klass, peers, topology, (baseline or {}).get((pair, path)))
    return judged


def _speed(figure: Figure, klass: str, peers: list[float], topology: TopologyFacts | None, before: Figure | None) -> Speed:
    if impossible := _impossible(figure, topology):
        return Speed(figure, klass, Verdict.FAIL, True, (impossible,))
    said: list[tuple[Verdict, str]] = []
    if len(peers) >= FEWEST and klass != "unknown":
        said += _against(figure.gbps, median(peers), f"the median of its class ({klass}, {len(peers)} figures)")
    if before is not None and before.size == figure.size:
        said += _against(figure.gbps, before.gbps, "this host's last good run")
    if (floor := _floor(figure, klass, topology)) and figure.gbps < floor:
        said.append((Verdict.WARN, f"{figure.gbps:g} GB/s is below the floor of {floor:g} GB/s ({klass})"))
    if figure.us is not None and figure.us >= STAGED_US and figure.path.startswith("ce-"):
        said.append((Verdict.WARN, f"{figure.us:g} us a small copy is what a way through host memory takes"))
    verdict = Verdict.FAIL if any(v is Verdict.FAIL for v, _ in said) else Verdict.WARN if said else Verdict.PASS
    return Speed(figure, klass, verdict, False, tuple(reason for _, reason in said))


def _against(gbps: float, other: float, what: str) -> list[tuple[Verdict, str]]:
    share = gbps / other if other > 0 else 1.0
    if share >= WARN_BELOW:
        return []
    verdict = Verdict.FAIL if share < FAIL_BELOW else Verdict.WARN
    return [(verdict, f"{gbps:g} GB/s is {share:.0%} of {other:g} GB/s, {what}")]


def _limit(figure: Figure, topology: TopologyFacts | None) -> float | None:
    """What the narrower of the two links carries one way. None: over NVLink, or where a link is not known."""
    if topology is None or class_of(topology, figure.pair) == "NVLink":
        return None
    limits = [topology.limit_gbps.get(pci) for pci in figure.pair]
    known = [limit for limit in limits if limit]
    return min(known) if len(known) == len(limits) else None


def _impossible(figure: Figure, topology: TopologyFacts | None) -> str:
    """Why a figure cannot be true, "" when it can. Every repeat counts: one impossible copy makes the rest doubtful."""
    if figure.path == "staged":
        return ""
    limit = _limit(figure, topology)
    if limit and figure.high > limit:
        return f"{figure.high:g} GB/s one way is more than the link carries ({limit:g} GB/s): no measurement"
    if figure.low <= 0 or (figure.us is not None and figure.us <= 0):
        return "a copy that takes no time is no measurement"
    return ""


def _floor(figure: Figure, klass: str, topology: TopologyFacts | None) -> float:
    limit = _limit(figure, topology)
    if limit is None or not figure.path.startswith("ce-"):
        return 0.0
    return round(FLOORS.get(klass, 0.0) * min(1.0, limit / GEN5_X16), 1)

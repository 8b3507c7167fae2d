"""A host with four GPUs on two sockets and what the probe says of it; each test breaks one thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from proofbook.probes.iommu import IommuFacts, IommuGroup
from proofbook.probes.p2p import P2pRun, TopologyFacts
from proofbook.remote.p2p import read_p2p

A, B, C, D = "0000:01:00.0", "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0"
NIC = "0000:22:00.0"
GPUS = (A, B, C, D)
BOOT = "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"
BARS = {pci: ((n << 40, (n << 40) + (128 << 30) - 1),) for n, pci in enumerate(GPUS, 1)}
PATHS = ("ce-push", "ce-pull", "sm-store", "sm-load", "staged")
SIZES = (4, 524288, 268435456)
PAIRS = [(a, b) for a in GPUS for b in GPUS if a != b]
#: GB/s one way, and microseconds of a small copy.
SAME, CROSS, STAGED = (55.0, 0.45), (50.0, 0.44), (20.0, 14.0)


def fault(device: str, address: int = 0x4D7201180, *, write: bool = True, driver: str = "nvidia") -> str:
    flags = "0x0020" if write else "0x0000"
    return f"{driver} {device}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address={address:#x} flags={flags}]"


@dataclass
class Told:
    """The probe's events, as they would come. ``change`` is given every result before it is told."""

    gpus: tuple[str, ...] = GPUS
    lines: dict[Any, list[str]] = field(default_factory=dict)  # pair or phase -> kernel lines of its window
    options: dict[str, Any] = field(default_factory=dict)
    unread: str = ""
    lost: int = 0
    change: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda result: result
    end: bool = True
    extra: list[dict[str, Any]] = field(default_factory=list)  # told before the end

    def run(self) -> P2pRun:
        return read_p2p(json.dumps(event).encode() + b"\n" for event in self.events())

    def events(self) -> Iterator[dict[str, Any]]:
        pairs = [(a, b) for a in self.gpus for b in self.gpus if a != b]
        options = {"pairs": "all", "paths": list(PATHS), "sizes": list(SIZES), "repeats": 2, **self.options}
        devices = [{"ordinal": n, "pci": g, "uuid": f"GPU-{n}", "name": "GPU", "memory": 1} for n, g in enumerate(self.gpus)]
        yield {"event": "open", "boot_id": BOOT, "library": "l", "driver": 13000, "devices": devices, "options": options}
        n = 0
        for gpu in self.gpus:
            n += 1
            local = {"event": "local", "pci": gpu, "ok": True, "gbps": [1400.0], "us": [2.0]}
            yield from self.window(n, "local", [(gpu, gpu)], [local])
        for pair in pairs:
            n += 1
            claims = {"event": "attributes", "src": pair[0], "dst": pair[1], "can_access": True, "rank": 0, "access": 1}
            yield from self.window(n, "pairs", [pair], [{**claims, "atomics": 0}, *self.results(pair)])
        for phase, groups in (
            ("both-directions", [[(a, b), (b, a)] for a, b in pairs if a < b]),
            ("all-at-once", [pairs] if len(self.gpus) > 2 else []),
        ):
            for group in groups:
                n += 1
                yield from self.window(n, phase, group, [r for pair in group for r in self.at_once(phase, pair)])
        yield from self.extra
        if self.end:
            yield {"event": "end", "boot_id": BOOT, "stopped": "", "unfit": {}, "windows": n}

    def window(self, n: int, phase: str, pairs: list[Any], inside: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        key = pairs[0] if phase == "pairs" else (phase, *sorted({g for p in pairs for g in p}))
        yield {"event": "window", "n": n, "phase": phase, "pairs": [list(p) for p in pairs], "monotonic_s": 100.0 * n, "utc": 1}
        yield from inside
        for seq, text in enumerate(self.lines.get(key, [])):
            yield {
                "event": "kernel",
                "window": n,
                "seq": 1000 * n + seq,
                "priority": 4,
                "monotonic_s": 100.0 * n + 1,
                "text": text,
            }
        yield {"event": "closed", "n": n, "unread": self.unread, "lost": self.lost, "monotonic_s": 100.0 * n + 90, "utc": 1}

    def results(self, pair: tuple[str, str]) -> list[dict[str, Any]]:
        told = []
        for process in (1, 2):
            for path in PATHS:
                for size in SIZES:
                    if path == "staged" and process == 2:
                        continue
                    told.append(self.result("pairs", pair, path, size, process))
        return [r for r in told if r is not None]

    def at_once(self, phase: str, pair: tuple[str, str]) -> list[dict[str, Any]]:
        told = [self.result(phase, pair, path, 67108864, 1) for path in PATHS if path != "staged"]
        return [r for r in told if r is not None]

    def result(self, phase: str, pair: tuple[str, str], path: str, size: int, process: int) -> dict[str, Any] | None:
        near = (pair[0] < C) == (pair[1] < C)
        gbps, us = STAGED if path == "staged" else SAME if near else CROSS
        return self.change({
            "event": "result", "phase": phase, "src": pair[0], "dst": pair[1], "process": process, "path": path, "size": size,
            "outcome": "ok", "code": 0, "call": "", "bad": None, "why": "",
            "gbps": [gbps, gbps * 0.99, gbps * 1.01] if size >= 1 << 20 else [], "us": [us],
        })  # fmt: skip


def topology(**more: Any) -> TopologyFacts:
    near = {(A, B), (B, A), (C, D), (D, C)}
    values: dict[str, Any] = {
        "gpus": GPUS,
        "links": {pair: "NODE" if pair in near else "SYS" for pair in PAIRS},
        "status": {c: dict.fromkeys(PAIRS, "OK") for c in "rw"},
        "bars": BARS,
        "numa": {A: 0, B: 0, C: 1, D: 1},
        "limit_gbps": dict.fromkeys(GPUS, 63.015),
    }
    return TopologyFacts(**{**values, **more})


def iommu(kind: str = "DMA-FQ", **others: str) -> IommuFacts:
    types = {**dict.fromkeys(GPUS, kind), **others}
    return IommuFacts({n: IommuGroup(t, (pci,)) for n, (pci, t) in enumerate(types.items())}, types)


@pytest.fixture
def told() -> Told:
    return Told()

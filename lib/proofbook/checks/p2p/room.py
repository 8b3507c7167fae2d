"""Who computes on the GPUs: a copy test among other people's work shows neither of the two rightly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.memory import GpuProcess, GpuProcesses

__all__ = ["GpusAreFree", "GpusAreKnown", "users_of"]

Service = tuple[ServiceSpec, ContainerSpec | None]


def users_of(seen: Seen, services: Sequence[Service]) -> tuple[list[Service], list[str]]:
    """The services that compute on the GPUs, and others by name. Raises CannotTell when nobody could say."""
    processes = seen.value(GpuProcesses())
    found = [(s, c) for s, c in services if any(p.of_unit(s.name, c) for p in processes)]
    others = [p for p in processes if not any(p.of_unit(s.name, c) for s, c in services)]
    return found, sorted({_named(p) for p in others})


def _named(process: GpuProcess) -> str:
    return f"{process.process} (pid {process.pid}) on {process.pci}"


@dataclass(frozen=True)
class GpusAreKnown(Check):
    """Every process on the GPUs is of a service that may be stopped, or there is none.

    PASS says that the test can be made room for, not that there is room now.
    """

    services: tuple[Service, ...]
    name: ClassVar[str] = "p2p.GpusAreKnown"
    title: ClassVar[str] = "Who computes on the GPUs now?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (GpuProcesses(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        ours, others = users_of(seen, self.services)
        if others:
            return [
                self.failed(
                    f"{counted(len(others), 'process', 'processes')} of nobody that the inventory knows: {join(others, 4)}",
                    action=Suggested.LOOK,
                    what_to_do="Stop them, or test later: their work and this test would spoil each other.",
                )
            ]
        if len(ours) > 1:
            names = join(s.spec for s, _ in ours)
            return [
                self.failed(
                    f"{len(ours)} services compute on them: {names}",
                    action=Suggested.LOOK,
                    what_to_do="This run stops one service under guard; stop the others by hand first.",
                )
            ]
        if ours:
            return [self.passed(f"only {ours[0][0].spec}, which can be stopped behind the gate")]
        return [self.passed("nobody: nothing has to be stopped")]


@dataclass(frozen=True)
class GpusAreFree(Check):
    """Nobody computes on the GPUs at this moment."""

    name: ClassVar[str] = "p2p.GpusAreFree"
    title: ClassVar[str] = "Are the GPUs free now?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (GpuProcesses(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        try:
            left = sorted({_named(p) for p in seen.value(GpuProcesses())})
        except CannotTell as why:
            return [self.unknown(f"who computes on them could not be seen: {why}")]
        if left:
            return [self.failed(f"{join(left, 4)}", action=Suggested.LOOK, what_to_do="Nothing is tested beside other work.")]
        return [self.passed("no process is on any GPU")]

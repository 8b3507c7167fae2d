"""Containers: do they run, and can they really use the devices that they were given?"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """``cuInit(0)`` inside: ``code`` 0 is success; None with ``error`` when the library is missing or the call hung."""

    library: str
    code: int | None
    devices: int | None
    error: str

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A container as its manager has it. Nothing inside is asked while it does not run.

    ``devices``: "ok", "absent" or the reason why opening failed, by path. ``cuda`` is None when it was not asked (no
    devices expected) or has no answer. ``unknown`` says why ``devices`` or ``cuda`` could not be had.
    """

    name: str
    kind: str
    id: str
    running: bool
    status: str  # in the manager's own word
    devices: dict[str, str]
    cuda: CudaFacts | None
    starts_at_boot: bool | None  # None where the manager was not asked
    config: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ContainerState(Probe[ContainerFacts]):
    """The state of one container, its devices opened and CUDA initialised inside."""

    spec: ContainerSpec
    name: ClassVar[str] = "containers.ContainerState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ContainerFacts]: ...

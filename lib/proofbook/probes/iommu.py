"""IOMMU groups and their types: the truth about translation, whatever the command line or the boot log say."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class IommuGroup:
    """``type`` is as the kernel prints it: DMA, DMA-FQ, identity, unmanaged, blocked, unknown; "" on kernels before 5.11."""

    type: str
    devices: tuple[str, ...]  # PCI addresses, sorted


@dataclass(frozen=True, slots=True)
class IommuFacts:
    """The groups by number, and the type of each device's group by PCI address. Group numbers change between boots."""

    groups: dict[int, IommuGroup]
    by_device: dict[str, str]

    @property
    def on(self) -> bool:
        """Whether an IOMMU translates at all: without one there are no groups."""
        return bool(self.groups)


@dataclass(frozen=True)
class IommuGroups(Probe[IommuFacts]):
    """The IOMMU groups of the machine."""

    name: ClassVar[str] = "iommu.IommuGroups"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], IommuFacts]: ...

"""The PCI devices as the kernel has them in sysfs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A PCIe link. Speeds in GT/s, None for "Unknown"; widths in lanes. 63 lanes is an all-ones read: the device is gone."""

    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None


@dataclass(frozen=True, slots=True)
class PciFacts:
    """One device. ``driver`` is "" when none is bound, ``iommu_group`` None when it is in none, ``link`` None when it has no link."""

    address: str  # "0000:41:00.0"
    vendor: int  # 0x10de
    device: int  # 0x2bb5
    class_code: int  # 0x030200
    driver: str
    iommu_group: int | None
    numa_node: int | None
    link: LinkFacts | None


@dataclass(frozen=True, slots=True)
class AerTotals:
    """Errors since boot that the kernel counted for one device by Advanced Error Reporting."""

    correctable: int
    nonfatal: int
    fatal: int


@dataclass(frozen=True)
class PciDevices(Probe[dict[str, PciFacts]]):
    """Every PCI device by its address."""

    name: ClassVar[str] = "pci.PciDevices"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, PciFacts]]: ...


@dataclass(frozen=True)
class AerCounters(Probe[dict[str, AerTotals]]):
    """AER totals by address, for the devices that have counters."""

    name: ClassVar[str] = "pci.AerCounters"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, AerTotals]]: ...

"""IOMMU groups and their types: the truth about translation, whatever the command line or the boot log say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, pci_address

__all__ = ["IommuFacts", "IommuGroup", "IommuGroups"]


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
    """The IOMMU groups of the machine.

    ``/sys/kernel/iommu_groups/21/type`` says ``DMA-FQ`` and ``…/21/devices/0000:41:00.0`` is a link there: group 21 is
    ``IommuGroup("DMA-FQ", ("0000:41:00.0",))``. WHY not the boot log: "Default domain type: Translated" is printed even
    with ``iommu=off``; a machine without groups has no IOMMU at work.
    """

    name: ClassVar[str] = "iommu.IommuGroups"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], IommuFacts]:
        base = "/sys/kernel/iommu_groups"
        (answer,) = yield [remote.read_files("/sys/bus/pci", f"{base}/*/type", f"{base}/*/devices/*")]
        return _iommu_facts(remote.parse_files(answer))


def _iommu_facts(files: remote.Files) -> IommuFacts:
    # WHY: "no groups" means "no IOMMU" only where sysfs itself is there to be looked at.
    if "/sys/bus/pci" not in files.dirs:
        raise CannotTell("sysfs shows no PCI bus here, so the absence of IOMMU groups would mean nothing")
    if files.unreadable:
        path, why = next(iter(files.unreadable.items()))
        raise CannotTell(f"{path} cannot be read: {why}")
    members: dict[int, list[str]] = defaultdict(list)
    types: dict[int, str] = {}
    for path in (*files.links, *files.dirs):
        if found := re.fullmatch(r"/sys/kernel/iommu_groups/(\d+)/devices/([0-9a-fA-F]{4,}:[0-9a-fA-F:.]+)", path):
            members[int(found[1])].append(pci_address(found[2]))
    for path, text in files.files.items():
        if found := re.fullmatch(r"/sys/kernel/iommu_groups/(\d+)/type", path):
            types[int(found[1])] = text.strip()
    groups = {n: IommuGroup(types.get(n, ""), tuple(sorted(members[n]))) for n in sorted({*members, *types})}
    return IommuFacts(groups, {device: group.type for group in groups.values() for device in group.devices})

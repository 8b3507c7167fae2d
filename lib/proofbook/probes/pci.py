"""The PCI devices as the kernel has them in sysfs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, pci_address

__all__ = ["AerCounters", "AerTotals", "LinkFacts", "PciDevices", "PciFacts", "ResetMethods"]

_BASE = "/sys/bus/pci/devices"
_FILES = (
    "vendor",
    "device",
    "class",
    "numa_node",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
)
_LINKS = ("driver", "iommu_group")
_AER = {"correctable": "aer_dev_correctable", "nonfatal": "aer_dev_nonfatal", "fatal": "aer_dev_fatal"}


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A PCIe link. Speeds in GT/s, None for "Unknown"; widths in lanes. 63 lanes is an all-ones read: the device is gone."""

    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None


@dataclass(frozen=True, slots=True)
class PciFacts:
    """One device. ``driver`` is "" when none is bound; ``iommu_group`` and ``link`` are None when it has none."""

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
    """Errors since boot that the kernel counted for one device by Advanced Error Reporting.

    A counter that is there and cannot be read is 0 here; ``unread`` names it and says why.
    """

    correctable: int
    nonfatal: int
    fatal: int
    unread: str = ""


@dataclass(frozen=True)
class PciDevices(Probe[dict[str, PciFacts]]):
    """Every PCI device by its address.

    ``vendor`` ``0x10de``, ``class`` ``0x030200``, ``current_link_speed`` ``2.5 GT/s PCIe``, ``current_link_width`` ``16``,
    ``driver`` a link to ``…/drivers/nvidia``: a GPU with its link at rest. WHY sysfs and not lspci: no text to guess at, no
    package that may be missing, and one read for all.
    """

    name: ClassVar[str] = "pci.PciDevices"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, PciFacts]]:
        (answer,) = yield [remote.read_files(*(f"{_BASE}/*/{name}" for name in (*_FILES, *_LINKS)))]
        return _pci_devices(remote.parse_files(answer))


@dataclass(frozen=True)
class AerCounters(Probe[dict[str, AerTotals]]):
    """AER totals by address, for the devices that have counters.

    WHY: where the firmware keeps AER to itself no device has them; then "no AER lines in the log" proves nothing.
    """

    name: ClassVar[str] = "pci.AerCounters"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, AerTotals]]:
        (answer,) = yield [remote.read_files(f"{_BASE}/*/vendor", *(f"{_BASE}/*/{name}" for name in _AER.values()))]
        return _aer_totals(remote.parse_files(answer))


@dataclass(frozen=True)
class ResetMethods(Probe[dict[str, tuple[str, ...]]]):
    """The ways to reset each device that the kernel has for it, in the order in which it would try them; () for none.

    ``/sys/bus/pci/devices/0000:41:00.0/reset_method`` says ``flr bus``. WHY it matters: a method that is not in the file was
    never tried, whatever somebody remembers to have done.
    """

    name: ClassVar[str] = "pci.ResetMethods"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, tuple[str, ...]]]:
        (answer,) = yield [remote.read_files(f"{_BASE}/*/vendor", f"{_BASE}/*/reset_method")]
        files = remote.parse_files(answer)
        values, refused = _by_device(files.files), _by_device(files.unreadable)
        if not values:
            raise CannotTell("sysfs shows no PCI device, so it cannot be said how one may be reset")
        if hidden := sorted(refused):
            raise CannotTell(f"sysfs does not let us read how {', '.join(hidden)} may be reset: {refused[hidden[0]]}")
        return {address: tuple(texts.get("reset_method", "").split()) for address, texts in sorted(values.items())}


# ------------------------------------------------------------------------------------------------------ reading


def _by_device(found: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """{address: {file name: value}} of everything directly below a device's folder."""
    devices: dict[str, dict[str, str]] = defaultdict(dict)
    for path, value in found.items():
        folder, _, name = path.rpartition("/")
        base, _, address = folder.rpartition("/")
        if base == _BASE:
            devices[pci_address(address)][name] = value.strip()
    return devices


def _pci_devices(files: remote.Files) -> dict[str, PciFacts]:
    values, links, refused = _by_device(files.files), _by_device(files.links), _by_device(files.unreadable)
    if not values:
        raise CannotTell("sysfs shows no PCI device: this is no machine with a PCI bus, or its sysfs is hidden from us")
    if hidden := sorted({*links, *refused} - set(values)):
        raise CannotTell(
            f"sysfs has {', '.join(hidden)}, but none of their files can be read: {refused[hidden[0]] or 'no reason given'}"
        )
    return {address: _pci_facts(address, values[address], links[address]) for address in sorted(values)}


def _pci_facts(address: str, values: Mapping[str, str], links: Mapping[str, str]) -> PciFacts:
    missing = [name for name in ("vendor", "device", "class") if name not in values]
    if missing:
        raise CannotTell(f"sysfs does not say {' and '.join(missing)} of {address}")
    node = int(values.get("numa_node", "-1"))
    return PciFacts(
        address=address,
        vendor=int(values["vendor"], 16),
        device=int(values["device"], 16),
        class_code=int(values["class"], 16),
        driver=links.get("driver", "").rpartition("/")[2],
        iommu_group=int(links["iommu_group"].rpartition("/")[2]) if "iommu_group" in links else None,
        numa_node=node if node >= 0 else None,  # the kernel says -1 for "none"
        link=_link(values),
    )


def _link(values: Mapping[str, str]) -> LinkFacts | None:
    """The link, or None for a device without one (the files are then absent, or all "Unknown" and 0 lanes)."""
    link = LinkFacts(
        speed=_speed(values.get("current_link_speed", "")),
        width=_width(values.get("current_link_width", "")),
        max_speed=_speed(values.get("max_link_speed", "")),
        max_width=_width(values.get("max_link_width", "")),
    )
    return link if any((link.speed, link.width, link.max_speed, link.max_width)) else None


def _speed(text: str) -> float | None:
    """``32.0 GT/s PCIe`` -> 32.0; "Unknown", "Unknown speed" and "" -> None."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", text)
    return float(found[1]) if found else None


def _width(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _aer_totals(files: remote.Files) -> dict[str, AerTotals]:
    """Each file lists its kinds of error with a total at the end, ``TOTAL_ERR_COR 0``.

    A device without any of the files has no counters; one with a file that says no total has some that are not known.
    """
    values, refused = _by_device(files.files), _by_device(files.unreadable)
    if not values:
        raise CannotTell("sysfs shows no PCI device, so it cannot be said whether the kernel counts AER errors")
    totals = {}
    for address, texts in sorted(values.items()):
        there = {**texts, **refused[address]}
        found = {kind: re.search(r"^TOTAL_ERR_\w+ (\d+)$", texts.get(name, ""), re.MULTILINE) for kind, name in _AER.items()}
        counted = {kind: int(total[1]) if total else 0 for kind, total in found.items()}
        unread = [
            f"{_AER[kind]}: {refused[address].get(_AER[kind]) or ('it says no total' if _AER[kind] in texts else 'not there')}"
            for kind, total in found.items()
            if not total
        ]
        if any(name in there for name in _AER.values()):
            totals[address] = AerTotals(**counted, unread="; ".join(unread))
    return totals

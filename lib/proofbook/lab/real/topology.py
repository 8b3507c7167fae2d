"""What is plugged into a virtual machine, as data: ``topologies/*.toml``, turned into QEMU's words."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from proofbook.errors import BadParameter

__all__ = ["DEFAULT", "Port", "Topology", "load", "names"]

DEFAULT = "four-gpus"

#: The first slot of the root complex that the topology's ports take; QEMU's own devices lie below.
_FIRST_SLOT = 0x8

#: kind → QEMU's device and what else it wants. The edu device moves data by DMA where it is told to, which makes real faults.
_KINDS = {
    "gpu": ("edu", ",dma_mask=0xffffffffffffffff"),
    "nic": ("e1000e", ",romfile="),
    "nvme": ("nvme", ",serial=lab,drive=drive-{id}"),
}


@dataclass(frozen=True, slots=True)
class Port:
    """A PCIe root port. Without more it has one device.

    With ``bridge`` a PCIe-to-PCI bridge is below it, behind which all devices share one IOMMU group; with ``functions`` they are
    the functions of one device, which share one too.
    """

    devices: tuple[str, ...]
    bridge: bool = False
    functions: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    name: str
    title: str
    ports: tuple[Port, ...]

    def gpus(self) -> tuple[str, ...]:
        """The PCI addresses of the stand-in GPUs, as firmware numbers the buses: a port takes one, a bridge one more."""
        return tuple(address for kind, address in self._places() if kind == "gpu")

    def _places(self) -> Iterator[tuple[str, str]]:
        bus = 1
        for port in self.ports:
            if port.bridge:
                yield from ((kind, f"0000:{bus + 1:02x}:{slot:02x}.0") for slot, kind in enumerate(port.devices, 1))
            elif port.functions:
                yield from ((kind, f"0000:{bus:02x}:00.{function}") for function, kind in enumerate(port.devices))
            elif port.devices:
                yield port.devices[0], f"0000:{bus:02x}:00.0"
            bus += 2 if port.bridge else 1

    def arguments(self, unplugged: Sequence[str] = ()) -> list[str]:
        """QEMU's arguments. ``unplugged`` names PCI addresses of stand-ins that are taken out; their ports stay."""
        words: list[str] = []
        places = iter(self._places())
        for number, port in enumerate(self.ports, 1):
            slot = _FIRST_SLOT + number - 1
            words += ["-device", f"pcie-root-port,id=port{number},chassis={number},slot={number},addr={slot:#x}"]
            bus = f"port{number}"
            if port.bridge:
                words += ["-device", f"pcie-pci-bridge,id=bridge{number},bus=port{number}"]
                bus = f"bridge{number}"
            for place, kind in enumerate(port.devices, 1):
                _, address = next(places)
                if address not in unplugged:
                    where = f"{place:#x}" if port.bridge else f"0x0.{address[-1]}"
                    several = ",multifunction=on" if port.functions else ""
                    words += _device(kind, f"{kind}{number}-{place}", bus, where + several)
        return words


def _device(kind: str, name: str, bus: str, slot: str) -> list[str]:
    device, more = _KINDS[kind]
    words = []
    if kind == "nvme":
        words += ["-drive", f"if=none,id=drive-{name},driver=null-co,size=64M,read-zeroes=on"]
    return [*words, "-device", f"{device},id={name},bus={bus},addr={slot}{more.format(id=name)}"]


def names() -> tuple[str, ...]:
    folder = resources.files("proofbook.lab.real") / "topologies"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load(name: str) -> Topology:
    """A topology by name. Raises BadParameter."""
    if name not in names():
        raise BadParameter(f"there is no topology {name!r}", hint=f"topologies: {', '.join(names())}")
    table = tomllib.loads((resources.files("proofbook.lab.real") / "topologies" / f"{name}.toml").read_text())
    ports = tuple(
        Port(tuple(port.get("devices", ())), bool(port.get("bridge", False)), bool(port.get("functions", False)))
        for port in table["ports"]
    )
    return Topology(name, table["title"], ports)

"""How the devices of a simulated machine hang together: order, bridges, groups, interrupts, link bandwidth."""

from __future__ import annotations

from proofbook.lab.sim.state import Hardware, PciDevice


def roots(hw: Hardware) -> list[int]:
    """The bus numbers of the host bridges, in the order of the firmware's tables."""
    found = sorted({int(d.address[5:7], 16) for d in hw.pci.values() if not d.parent})
    return list(hw.root_order) or found


def probe_order(hw: Hardware) -> list[PciDevice]:
    """The present devices in the order in which the kernel meets them: by host bridge, then by address."""
    position = {bus: n for n, bus in enumerate(roots(hw))}
    return sorted(hw.present(), key=lambda d: (position.get(int(root_port(hw, d).address[5:7], 16), 99), d.address))


def root_port(hw: Hardware, device: PciDevice) -> PciDevice:
    while device.parent and device.parent in hw.pci:
        device = hw.pci[device.parent]
    return device


def bridge_buses(hw: Hardware, bridge: PciDevice) -> tuple[int, int, int]:
    """Primary, secondary and last (subordinate) bus number of a bridge.

    A port with nothing below it was given the next number that no device uses; the board alone decides it.
    """
    primary = int(bridge.address[5:7], 16)
    below = [int(d.address[5:7], 16) for d in hw.pci.values() if _is_below(hw, d, bridge.address)]
    return (primary, min(below), max(below)) if below else (primary, primary, primary)


def _is_below(hw: Hardware, device: PciDevice, port: str) -> bool:
    parent = device.parent
    while parent:
        if parent == port:
            return True
        parent = hw.pci[parent].parent if parent in hw.pci else ""
    return False


def irq(hw: Hardware, device: PciDevice) -> int:
    """A stable interrupt number: the position of the device in the address order, whoever else is missing."""
    return 40 + sorted(hw.pci).index(device.address)


def iommu_groups(hw: Hardware) -> dict[int, list[PciDevice]]:
    """The groups that exist now, with their members by address."""
    groups: dict[int, list[PciDevice]] = {}
    for device in hw.present():
        if hw.iommu_on and device.iommu_group is not None:
            groups.setdefault(device.iommu_group, []).append(device)
    return dict(sorted(groups.items()))


def bar_flags(device: PciDevice, address: int) -> tuple[str, str]:
    """Above 4 GiB: a prefetchable 64-bit BAR. Below: not prefetchable, 64-bit only for NVMe and xHCI."""
    if address >= 1 << 32:
        return "64-bit", "prefetchable"
    return ("64-bit" if device.class_code >> 8 in (0x0108, 0x0C03) else "32-bit"), "non-prefetchable"


def speed_text(speed: float) -> str:
    """A link speed as sysfs prints it: ``32.0 GT/s PCIe``."""
    return f"{speed:.1f} GT/s PCIe"


def bandwidth_mbps(speed: float, width: int) -> int:
    """Usable Mb/s of a link as the kernel counts it: 8b/10b up to 5 GT/s, 128b/130b above."""
    lane = int(speed * 1000 * 8 / 10) if speed <= 5.0 else int(speed * 1000 * 128 / 130)
    return lane * width

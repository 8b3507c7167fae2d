"""An identity experiment on a simulated machine: what its unit does at its one boot, and what the GPUs make of that.

What lies on the machine's disk decides, as on a real one: without unit, pull-in and flag nothing happens. The words are
those of iommu_identity.sh; a test holds the two against each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofbook.lab.sim import fault_lines, units
from proofbook.lab.sim.changing import Disk
from proofbook.lab.sim.fault_lines import Line
from proofbook.lab.sim.os_state import Machine, Unit
from proofbook.lab.sim.state import PciDevice
from proofbook.remote.iommu_identity import FLAG, LOG, PROGRAM, PULL, UNIT, UNIT_PATH

if TYPE_CHECKING:
    from proofbook.lab.sim.life import Life

#: When the unit runs, and when a driver in the initramfs would have bound: seconds since the kernel started.
RUNS_S = 3.41
#: ``fsp-refuses-identity`` (pci, stays: also in the boots after it) · ``link-lost-in-identity`` (pci) ·
#: ``driver-in-initramfs``: the driver binds before any unit runs · ``several-devices-refused``: the kernel is one of those
#: that give no new type to a group of several devices. The resets are said in :mod:`proofbook.lab.sim.resets`.
KINDS = frozenset(
    {
        "fsp-refuses-identity",
        "link-lost-in-identity",
        "driver-in-initramfs",
        "several-devices-refused",
        "reset-clears",
        "reset-kills",
        "reset-hangs",
    }
)

_ALL_ONES = (0xFFFFFFFF,) * 5


def at_power_on(life: Life) -> None:
    """Before the drivers load: the unit, if it is there and armed; then what the GPUs will make of their domains."""
    m = life.machine
    for device in m.hw.pci.values():
        # WHY: a device that does not answer is not found by a boot that leaves the power on.
        device.present = device.present and f"dead {device.address}" not in m.happened
    m.host.units.pop(UNIT, None)
    disk = Disk(life, m.host)
    if all(disk.node(path) is not None for path in (UNIT_PATH, PULL, PROGRAM)):
        _unit(life, disk)
    for kind, pci in _stricken(m):
        m.hw.gpus[pci].condition = "uninitialised"
        fault = m.fault(kind)
        if fault is not None and fault.parameters.get("stays"):
            m.happened.add(f"{kind} {pci}")


def after_power_on(life: Life, boot_lines: list[tuple[float, int, str]]) -> None:
    """What the driver says of the GPUs that it cannot start: just before its own module gives up on them."""
    for kind, pci in _stricken(life.machine):
        gpu_id = f"[GPU ID 0x{int(pci[5:7], 16) << 8:08x}] Failed to allocate"
        gives_up = next((s for s, _, text in boot_lines if gpu_id in text), RUNS_S + 6.0)
        for n, line in enumerate(_said(life.machine, kind, pci)):
            life.at(life.now + gives_up - 0.5 + n * 0.0002, "kernel", line.priority, line.text)


def _stricken(m: Machine) -> list[tuple[str, str]]:
    """(kind of fault, GPU) for the GPUs that do not start in this boot."""
    found = []
    for kind in ("fsp-refuses-identity", "link-lost-in-identity"):
        fault = m.fault(kind)
        if fault is None:
            continue
        named = fault.parameters.get("pci")
        for pci in sorted(m.hw.gpus):
            here = m.hw.pci[pci].iommu_type == "identity" or f"{kind} {pci}" in m.happened
            if here and named in (None, pci):
                found.append((kind, pci))
    return found


def says_of(m: Machine, pci: str) -> list[Line]:
    """What the driver says when it tries again to start a GPU that it cannot start in this boot."""
    return [line for kind, stricken in _stricken(m) if stricken == pci for line in _said(m, kind, pci)]


def _said(m: Machine, kind: str, pci: str) -> list[Line]:
    gpu = m.hw.gpus[pci]
    index = sorted(m.hw.gpus).index(pci)
    if kind == "link-lost-in-identity":
        return [
            *fault_lines.fsp_boot_timeout(pci, _ALL_ONES),
            *fault_lines.fsp_boot_failed(pci, gpu.minor, code=0xFFFFFFFF, index=index),
        ]
    return fault_lines.fsp_boot_failed(pci, gpu.minor, index=index)


# ------------------------------------------------------------------------------------------------- the program


def _unit(life: Life, disk: Disk) -> None:
    m = life.machine
    unit = units.load(m.host, UNIT, Unit(UNIT, "Set the iommu type of chosen GPUs for one boot", type="oneshot"))
    assert unit is not None
    m.host.units[UNIT] = unit
    if disk.node(FLAG) is None:
        return  # ConditionPathExists=
    (argv, *_), _ = units.exec_starts([disk.text(UNIT_PATH)])
    said, done = _program(life, disk, argv[2], argv[3:])
    disk.write(LOG, "".join(f"{line}\n" for line in said), mode=0o644)
    life.at(life.now + RUNS_S, "identity_unit", tuple(said), done)


def ran(life: Life, said: tuple[str, ...], done: bool) -> None:
    """systemd starts the unit, and the journal has its words."""
    host = life.machine.host
    unit = host.units[UNIT]
    life.start(host, unit)
    for line in said:
        life.says(host, unit, line)
    if not done:
        unit.active, unit.sub, unit.result, unit.exec_status = "failed", "failed", "exit-code", 1


def _program(life: Life, disk: Disk, wanted: str, addresses: list[str]) -> tuple[list[str], bool]:
    """The lines of iommu_identity.sh, and whether every group got its type."""
    said = [f"{RUNS_S:.2f} begin {wanted} {' '.join(addresses)}"]
    disk.remove(FLAG)
    said.append(f"{RUNS_S + 0.01:.2f} disarmed")
    done = True
    for pci in addresses:
        seen, why = _look(life.machine, pci, addresses, RUNS_S + 0.02)
        said += seen
        if why:
            said.append(f"{RUNS_S + 0.02:.2f} refused {pci} {why}")
            done = False
    if not done:
        return [*said, f"{RUNS_S + 0.03:.2f} end refused"], False
    for pci in addresses:
        seen, _ = _look(life.machine, pci, addresses, RUNS_S + 0.03)
        said += seen
        line, ok = _put(life, pci, wanted)
        said.append(line)
        done = done and ok
    return [*said, f"{RUNS_S + 0.05:.2f} end {'done' if done else 'partly'}"], done


def _members(m: Machine, pci: str) -> list[PciDevice]:
    return [d for d in m.hw.present() if d.iommu_group == m.hw.pci[pci].iommu_group]


def _look(m: Machine, pci: str, planned: list[str], at: float) -> tuple[list[str], str]:
    """What the program says when it looks at a group, and why the group must not be touched."""
    device = m.hw.pci.get(pci)
    if device is None or not device.present:
        return [], "it is not on the bus"
    if device.iommu_group is None:
        return [], "it is in no iommu group"
    said = [f"{at:.2f} group {pci} {device.iommu_group} {device.iommu_type}"]
    for member in _members(m, pci):
        if member.address not in planned:
            return said, f"group {device.iommu_group} also holds {member.address}, which is not in the plan"
        if member.driver == "nvidia" and m.fault("driver-in-initramfs"):
            whose = "it" if member.address == pci else f"{member.address} of its group"
            return said, f"{whose} is bound to nvidia already"
    return said, ""


def _put(life: Life, pci: str, wanted: str) -> tuple[str, bool]:
    """The write of a group's type: what the program says of it, and whether the type is there then."""
    m, at = life.machine, RUNS_S + 0.04
    members = _members(m, pci)
    if len(members) > 1 and m.fault("several-devices-refused"):
        refusal = "Cannot change default domain: Group has more than one device"
        life.at(life.now + at, "kernel", fault_lines.ERR, f"iommu: {refusal}")
        return f"{at:.2f} kept {pci} {m.hw.pci[pci].iommu_type} the kernel refused the write: Invalid argument", False
    for member in members:
        member.iommu_type = wanted
    return f"{at:.2f} set {pci} {wanted}", True

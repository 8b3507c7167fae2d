"""Two kernels and other topologies: what each answers, and that the probes read it right.

Debian's old and new stable kernel refuse the same write with different errors. A machine is booted for each, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proofbook.lab.real import debian, topology
from proofbook.probes.boot import Boots
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import PciDevices

from .conftest import Kept, VirtualMachine, until
from .contract import A_VM, EVERYWHERE, LESS, Reasons, Simulated, ask, rows, unexplained
from .runs import reboot_verification

pytestmark = pytest.mark.vm

ALONE, *TOGETHER = topology.load("shared-group").gpus()
#: What the kernel says to a new type for a group whose device has a driver, and for a group of several devices without one.
REFUSALS = {"bookworm": ("EBUSY", "EINVAL"), "trixie": ("EPERM", "")}


#: Where Debian's new release answers otherwise than the simulated machine, which is as its old one.
NEWER: Reasons = (
    (r"journalctl .*--show-cursor .*", r"exit status 1 simulated, 0 real", "systemd 257 calls nothing found no failure"),
    (r"lsattr .*", r"exit status 0 simulated, 127 real", "a small Debian 13 comes without it"),
)

#: A release, and a machine of it.
Suited = tuple[str, VirtualMachine]


@pytest.fixture(scope="module", params=debian.SUITES)
def shared_group(request: pytest.FixtureRequest, kept: Kept) -> Iterator[Suited]:
    with kept.ready("vm-shared-group", request.param) as machine:
        yield request.param, machine


@pytest.fixture(scope="module")
def in_tree(kept: Kept) -> Iterator[VirtualMachine]:
    with kept.ready("vm-nic-and-nvme", "trixie") as machine:
        yield machine


def types(machine: VirtualMachine) -> dict[str, str]:
    found: dict[str, str] = machine.value(IommuGroups()).by_device
    return found


# The tests of one machine run in this order; the last ones take devices from their drivers.


def test_each_release_has_its_kernel(shared_group: Suited) -> None:
    suite, machine = shared_group
    assert machine.value(MachineProbe()).kernel.startswith(debian.SUITES[suite] + ".")
    assert machine.value(KernelLog()).complete


def test_two_functions_behind_a_bridge_share_a_group(shared_group: Suited) -> None:
    _, machine = shared_group
    devices, groups = machine.value(PciDevices()), machine.value(IommuGroups())
    assert {devices[pci].driver for pci in (ALONE, *TOGETHER)} == {"nvidia"}
    (shared,) = {devices[pci].iommu_group for pci in TOGETHER}
    assert set(TOGETHER) <= set(groups.groups[shared].devices)
    assert groups.groups[devices[ALONE].iommu_group].devices == (ALONE,)
    assert {groups.by_device[pci] for pci in (ALONE, *TOGETHER)} <= {"DMA", "DMA-FQ"}


def test_a_bound_device_keeps_the_type_of_its_group(shared_group: Suited) -> None:
    suite, machine = shared_group
    before = types(machine)
    assert machine.refusal(machine.group(ALONE) + "/type", "identity") == REFUSALS[suite][0]
    assert types(machine) == before


def test_a_fault_behind_a_bridge_names_the_bridge(shared_group: Suited, tmp_path: Path) -> None:
    # WHY: a PCIe-to-PCI bridge puts its own requester id in place of the device's, and the IOMMU sees nothing else.
    _, machine = shared_group
    machine.fault(TOGETHER[1])
    lines = until(lambda: [x.text for x in machine.value(KernelLog()).lines if "fault addr" in x.text], "the kernel says it")
    assert f"Request device [{TOGETHER[1][5:8]}00.0]" in lines[0]
    told = reboot_verification("lab:vm-shared-group", tmp_path / "out", reboot=False)
    assert told.summary == ("completed", "FAIL", 1)
    assert [line for line in told.worst_of("FAIL") if line.startswith("iommu.DmaFaults") and f"{TOGETHER[1][5:8]}00.0" in line]


def test_a_group_of_several_devices_without_a_driver(shared_group: Suited) -> None:
    suite, machine = shared_group
    machine.unbind(ALONE, *TOGETHER)
    before = types(machine)
    assert machine.refusal(machine.group(TOGETHER[0]) + "/type", "identity") == REFUSALS[suite][1]
    assert machine.refusal(machine.group(ALONE) + "/type", "identity") == ""
    after = types(machine)
    assert after[ALONE] == "identity"
    for pci in TOGETHER:
        assert after[pci] == (before[pci] if REFUSALS[suite][1] else "identity")


def test_devices_with_drivers_of_the_kernel_itself(in_tree: VirtualMachine) -> None:
    devices, groups = in_tree.value(PciDevices()), in_tree.value(IommuGroups())
    for driver, class_code in (("e1000e", 0x020000), ("nvme", 0x010802)):
        (found,) = (device for device in devices.values() if device.driver == driver)
        assert found.class_code == class_code
        assert groups.groups[found.iommu_group].devices == (found.address,)
        assert in_tree.refusal(in_tree.group(found.address) + "/type", "identity") == REFUSALS["trixie"][0]
    assert in_tree.sh("ls /sys/class/nvme; test -b /dev/nvme0n1") == "nvme0"


def test_the_new_release_answers_as_the_simulated_machine_does(in_tree: VirtualMachine, simulated: Simulated) -> None:
    with in_tree.transport() as transport:
        real = ask(transport.gather, simulated=False)
    left = unexplained(rows(simulated["root"], real), EVERYWHERE + LESS + A_VM + NEWER)
    assert not left, "\n".join(left)


@pytest.mark.long
def test_the_new_kernel_and_systemd_reboot_and_are_as_before(in_tree: VirtualMachine, tmp_path: Path) -> None:
    told = reboot_verification("lab:vm-nic-and-nvme", tmp_path / "out", reboot=True)
    assert told.outcome.status == "completed"
    assert told.worst_of("FAIL") + told.worst_of("UNKNOWN") == []
    for check in ("boot.Rebooted", "boot.OrderlyShutdown", "nvidia.GpusPresent", "iommu.IommuTypes"):
        assert set(told.verdicts(check).values()) == {"PASS"}, (check, told.verdicts(check))
    assert len(in_tree.value(Boots())) == 2

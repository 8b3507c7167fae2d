from __future__ import annotations

from typing import Any

import pytest

from proofbook.probes.iommu import IommuGroup, IommuGroups
from proofbook.probes.pci import AerCounters, AerTotals, LinkFacts, PciDevices, ResetMethods

BASE = "/sys/bus/pci/devices"
GROUPS = "/sys/kernel/iommu_groups"


def plug(machine: Any, address: str, files: dict[str, str] | None = None, *, driver: str = "", group: int | None = None) -> None:
    values = {"vendor": "0x10de", "device": "0x2bb5", "class": "0x030200", "numa_node": "0", **(files or {})}
    machine.files |= {f"{BASE}/{address}/{name}": value for name, value in values.items()}
    if driver:
        machine.links[f"{BASE}/{address}/driver"] = f"../../../../bus/pci/drivers/{driver}"
    if group is not None:
        machine.links[f"{BASE}/{address}/iommu_group"] = f"../../../../kernel/iommu_groups/{group}"
        machine.links[f"{GROUPS}/{group}/devices/{address}"] = f"../../../../devices/pci0000:40/{address}"


LINK = {
    "current_link_speed": "2.5 GT/s PCIe",
    "current_link_width": "16",
    "max_link_speed": "32.0 GT/s PCIe",
    "max_link_width": "16",
}


def test_a_gpu(machine: Any) -> None:
    plug(machine, "0000:41:00.0", LINK, driver="nvidia", group=21)
    device = machine.value(PciDevices())["0000:41:00.0"]
    assert (device.vendor, device.device, device.class_code) == (0x10DE, 0x2BB5, 0x030200)
    assert (device.driver, device.iommu_group, device.numa_node) == ("nvidia", 21, 0)
    assert device.link == LinkFacts(2.5, 16, 32.0, 16)


def test_a_device_with_nothing(machine: Any) -> None:
    plug(machine, "0000:00:00.0", {"numa_node": "-1", "current_link_speed": "Unknown", "current_link_width": "0"})
    device = machine.value(PciDevices())["0000:00:00.0"]
    assert (device.driver, device.iommu_group, device.numa_node, device.link) == ("", None, None, None)


def test_a_dead_link_reads_all_ones(machine: Any) -> None:
    plug(machine, "0000:41:00.0", {**LINK, "current_link_speed": "Unknown", "current_link_width": "63"})
    assert machine.value(PciDevices())["0000:41:00.0"].link == LinkFacts(None, 63, 32.0, 16)


def test_wide_domains_and_order(machine: Any) -> None:
    plug(machine, "10001:02:00.0")
    plug(machine, "0000:02:00.0")
    assert list(machine.value(PciDevices())) == ["0000:02:00.0", "10001:02:00.0"]


def test_three_hundred_devices_in_one_question(machine: Any) -> None:
    for bus in range(300):
        plug(machine, f"{bus // 256:04x}:{bus % 256:02x}:00.0", LINK, driver="pcieport", group=bus)
    assert len(machine.value(PciDevices())) == 300
    assert len(machine.asked()) == 1


def test_no_bus_or_a_hidden_device_is_unknown(machine: Any) -> None:
    assert "shows no PCI device" in machine.unknown(PciDevices())
    plug(machine, "0000:01:00.0")
    machine.unreadable[f"{BASE}/0000:02:00.0/vendor"] = "Permission denied"
    assert "0000:02:00.0, but none of their files can be read: {'vendor': 'Permission denied'}" in machine.unknown(PciDevices())


@pytest.mark.parametrize(("name", "value"), [("vendor", "ten"), ("class", ""), ("numa_node", "x")])
def test_a_file_that_holds_something_else_is_unknown(machine: Any, name: str, value: str) -> None:
    plug(machine, "0000:01:00.0", {name: value})
    assert "cannot read the answer: ValueError" in machine.unknown(PciDevices())


def test_a_device_that_vanishes_while_it_is_read_is_unknown(machine: Any) -> None:
    plug(machine, "0000:01:00.0")
    del machine.files[f"{BASE}/0000:01:00.0/class"]
    assert "does not say class of 0000:01:00.0" in machine.unknown(PciDevices())


def test_aer_totals(machine: Any) -> None:
    counted = {
        "aer_dev_correctable": "RxErr 0\nBadTLP 3\nTOTAL_ERR_COR 3",
        "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
        "aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 1",
    }
    plug(machine, "0000:41:00.0", counted)
    plug(machine, "0000:42:00.0")
    assert machine.value(AerCounters()) == {"0000:41:00.0": AerTotals(3, 0, 1)}


def test_an_aer_counter_that_may_not_be_read_is_not_zero(machine: Any) -> None:
    plug(machine, "0000:41:00.0", {"aer_dev_correctable": "TOTAL_ERR_COR 3", "aer_dev_nonfatal": "garbled"})
    machine.unreadable["/sys/bus/pci/devices/0000:41:00.0/aer_dev_fatal"] = "Permission denied"
    unread = "aer_dev_nonfatal: it says no total; aer_dev_fatal: Permission denied"
    assert machine.value(AerCounters()) == {"0000:41:00.0": AerTotals(3, 0, 0, unread)}


def test_no_aer_counters_is_an_answer_but_no_bus_is_not(machine: Any) -> None:
    assert "shows no PCI device" in machine.unknown(AerCounters())
    plug(machine, "0000:41:00.0")
    assert machine.value(AerCounters()) == {}


def test_how_devices_may_be_reset(machine: Any) -> None:
    plug(machine, "0000:41:00.0", {"reset_method": "flr bus"})
    plug(machine, "0000:42:00.0")
    assert machine.value(ResetMethods()) == {"0000:41:00.0": ("flr", "bus"), "0000:42:00.0": ()}


def test_how_devices_may_be_reset_is_unknown_where_it_cannot_be_read(machine: Any) -> None:
    assert "shows no PCI device" in machine.unknown(ResetMethods())
    plug(machine, "0000:41:00.0")
    machine.unreadable[f"{BASE}/0000:41:00.0/reset_method"] = "Permission denied"
    assert "0000:41:00.0 may be reset" in machine.unknown(ResetMethods())


def test_iommu_groups(machine: Any) -> None:
    plug(machine, "0000:41:00.1", group=21)
    plug(machine, "0000:41:00.0", group=21)
    plug(machine, "0000:61:00.0", group=7)
    machine.files |= {f"{GROUPS}/21/type": "DMA-FQ", f"{GROUPS}/7/type": "identity"}
    facts = machine.value(IommuGroups())
    assert facts.on
    assert facts.groups == {
        7: IommuGroup("identity", ("0000:61:00.0",)),
        21: IommuGroup("DMA-FQ", ("0000:41:00.0", "0000:41:00.1")),
    }
    assert facts.by_device == {"0000:61:00.0": "identity", "0000:41:00.0": "DMA-FQ", "0000:41:00.1": "DMA-FQ"}


def test_platform_devices_in_a_group_have_no_address(machine: Any) -> None:
    plug(machine, "0000:41:00.0")
    machine.links[f"{GROUPS}/3/devices/arm-smmu-v3.5.auto"] = "x"
    machine.files[f"{GROUPS}/3/type"] = "DMA"
    assert machine.value(IommuGroups()).groups == {3: IommuGroup("DMA", ())}


def test_no_groups_mean_no_iommu_only_where_there_is_a_bus(machine: Any) -> None:
    assert "absence of IOMMU groups would mean nothing" in machine.unknown(IommuGroups())
    plug(machine, "0000:41:00.0")
    facts = machine.value(IommuGroups())
    assert not facts.on and facts.by_device == {}


def test_an_old_kernel_does_not_say_the_type_and_a_hidden_one_is_unknown(machine: Any) -> None:
    plug(machine, "0000:41:00.0", group=1)
    assert machine.value(IommuGroups()).by_device == {"0000:41:00.0": ""}
    machine.unreadable[f"{GROUPS}/1/type"] = "Permission denied"
    assert f"{GROUPS}/1/type cannot be read: Permission denied" in machine.unknown(IommuGroups())

"""A real kernel: its IOMMU and its faults, its reboot, and reboot verification when something is wrong with it.

One machine for all: it is booted once, its state is saved, and every test begins there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proofbook.errors import ConnectionLost
from proofbook.lab.real import topology
from proofbook.lab.real.places import Places
from proofbook.lab.real.vm import Vm
from proofbook.model import command
from proofbook.probes.boot import Boots, Shutdown
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.pci import PciDevices
from proofbook.probes.service import Endpoint

from .conftest import Machine, until
from .contract import A_VM, EVERYWHERE, PROBES, Simulated, ask, rows, unexplained
from .runs import Told, reboot_verification

pytestmark = pytest.mark.vm

UNIT = "sglang-qwen.service"
GPUS = topology.load("four-gpus").gpus()
SERVES = Endpoint("http://127.0.0.1:30000/health")
#: Addresses that nobody mapped: the IOMMU stops a device that writes there.
UNMAPPED = "0x7f00000000"


class Started(Machine):
    """A virtual machine with hands."""

    def __init__(self, vm: Vm) -> None:
        super().__init__(vm)
        self.vm = vm

    def fault(self, pci: str) -> None:
        """Let a stand-in write where it must not."""
        self.sh(f"echo {UNMAPPED} > /sys/bus/pci/devices/{pci}/stand_in_dma")


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "cache").symlink_to(Places.default().cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(folder))
        vm = Vm("vm", Places.default())
        try:
            vm.up(owner=os.getpid())
            machine = Started(vm)
            machine.booted()
            until(
                lambda: machine.sh("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/health || true") == "200",
                "it serves",
                300,
            )
            vm.save()
            yield machine
        finally:
            vm.down()


@pytest.fixture
def machine(booted: Started) -> Iterator[Started]:
    booted.vm.restore()
    yield booted
    booted.close()


# ------------------------------------------------------------------------------------------------ what is there


def test_hardware_as_the_kernel_sees_it(machine: Started) -> None:
    devices, groups = machine.value(PciDevices()), machine.value(IommuGroups())
    assert {devices[pci].driver for pci in GPUS} == {"nvidia"}
    assert len({devices[pci].iommu_group for pci in GPUS}) == 4
    assert {groups.by_device[pci] for pci in GPUS} <= {"DMA", "DMA-FQ"}
    table, driver = machine.value(Gpus()), machine.value(Driver())
    assert tuple(table.rows) == GPUS
    assert not table.problems
    assert "stand-in" in driver.flavour_line
    assert driver.loaded_srcversion == driver.disk_srcversion is not None
    log = machine.value(KernelLog())
    assert log.complete, log.gaps
    assert any("stand-in of the proofbook lab" in line.text for line in log.lines)


def test_a_device_that_its_driver_lost(machine: Started) -> None:
    machine.sh(f"echo {GPUS[1]} > /sys/bus/pci/drivers/nvidia/unbind")
    assert machine.value(PciDevices())[GPUS[1]].driver == ""
    assert GPUS[1] not in machine.value(Gpus()).rows


def test_a_group_type_can_be_written_only_without_a_driver(machine: Started) -> None:
    write = f"g=$(readlink -f /sys/bus/pci/devices/{GPUS[0]}/iommu_group); echo identity > $g/type && cat $g/type"
    assert "identity" not in machine.sh(write, check=False)
    assert machine.sh(f"echo {GPUS[0]} > /sys/bus/pci/drivers/nvidia/unbind; {write}") == "identity"
    assert machine.value(IommuGroups()).by_device[GPUS[0]] == "identity"


def test_a_fault_is_a_line_where_the_iommu_translates(machine: Started) -> None:
    machine.fault(GPUS[0])
    lines = until(lambda: [x.text for x in machine.value(KernelLog()).lines if "fault addr" in x.text], "the kernel says it")
    assert f"Request device [{GPUS[0][5:]}] fault addr {UNMAPPED}" in lines[0]


def test_a_login_without_rights_reads_no_kernel_log(machine: Started) -> None:
    answer = machine.ask(KernelLog(), user="plain")
    assert not answer.known or not answer.value.complete


def test_a_frozen_guest_is_a_lost_connection(machine: Started) -> None:
    with machine.transport(keepalive_s=1.0, silence_s=5.0) as transport:
        transport.open()
        machine.vm.freeze()
        try:
            with pytest.raises(ConnectionLost):
                transport.run(command("true", timeout_s=120))
        finally:
            machine.vm.thaw()


def test_a_power_cut(machine: Started) -> None:
    before = machine.value(MachineProbe())
    machine.sh("sync; journalctl --sync")
    machine.vm.power_off()
    machine.vm.power_on()
    machine.vm.await_ssh()
    machine.booted()
    after = machine.value(MachineProbe())
    assert after.boot_id != before.boot_id
    assert after.machine_id == before.machine_id
    assert [b.boot_id for b in machine.value(Boots())][-2:] == [before.boot_id, after.boot_id]
    assert not machine.value(Shutdown(before.boot_id)).orderly


# ------------------------------------------------------------------------------------------------ reboot verification


def verify(machine: Started, folder: Path, *, reboot: bool = True) -> Told:
    return reboot_verification("lab:vm", folder / "out", reboot=reboot)


def test_a_healthy_machine_reboots_and_is_as_before(machine: Started, tmp_path: Path) -> None:
    told = verify(machine, tmp_path)
    assert told.outcome.status == "completed"
    assert told.worst_of("FAIL") == []
    for check in ("boot.Rebooted", "boot.OrderlyShutdown", "boot.KernelAndCommandLine", "nvidia.GpusPresent", "iommu.IommuTypes"):
        assert set(told.verdicts(check).values()) == {"PASS"}, (check, told.verdicts(check))
    assert set(told.verdicts("kernel_log.KernelLogClean").values()) <= {"PASS", "WARN"}


def test_a_gpu_that_is_gone_after_the_boot(machine: Started, tmp_path: Path) -> None:
    machine.vm.unplug(GPUS[2])
    told = verify(machine, tmp_path)
    assert told.summary == ("completed", "FAIL", 1)
    assert any(GPUS[2] in line for line in told.worst_of("FAIL"))


def test_another_kernel_command_line(machine: Started, tmp_path: Path) -> None:
    machine.vm.cmdline("iommu=pt")
    told = verify(machine, tmp_path)
    assert told.outcome.verdict == "FAIL"
    assert told.verdicts("boot.KernelAndCommandLine")["kernel command line"] in ("WARN", "FAIL")
    # With iommu=pt the kernel boots in passthrough: the types themselves are others now.
    assert any(line.startswith("iommu.IommuTypes") for line in told.worst_of("FAIL") + told.worst_of("WARN"))


def test_a_service_that_crashes_and_one_that_nobody_enabled(machine: Started, tmp_path: Path) -> None:
    machine.write(f"/etc/systemd/system/{UNIT}.d/broken.conf", '[Service]\nExecStartPre=/bin/sh -c "exit 3"\n')
    machine.sh("systemctl daemon-reload; sync")
    told = verify(machine, tmp_path)
    assert told.summary == ("completed", "FAIL", 1)
    assert told.verdicts("systemd.ServiceStable") == {UNIT: "FAIL"}
    machine.sh(f"rm -r /etc/systemd/system/{UNIT}.d; systemctl daemon-reload; systemctl disable -q {UNIT}")
    told = verify(machine, tmp_path, reboot=False)
    assert told.verdicts("systemd.ServiceEnabled") == {UNIT: "FAIL"}


def test_a_dma_fault(machine: Started, tmp_path: Path) -> None:
    machine.fault(GPUS[3])
    told = verify(machine, tmp_path, reboot=False)
    assert told.summary == ("completed", "FAIL", 1)
    assert any(line.startswith("iommu.DmaFaults") for line in told.worst_of("FAIL"))


def test_a_power_cut_in_the_middle_of_the_shutdown(machine: Started, tmp_path: Path) -> None:
    machine.write(
        "/etc/systemd/system/slow.service",
        '[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\nExecStop=/bin/sh -c "journalctl --sync; sync; '
        'echo stopping > /dev/ttyS0; sleep 14"\n[Install]\nWantedBy=multi-user.target\n',
    )
    machine.sh("systemctl enable -q --now slow.service; sync")
    done = threading.Event()
    cut = threading.Thread(target=cut_power_when_it_stops, args=(machine.vm, done))
    cut.start()
    try:
        told = verify(machine, tmp_path)
    finally:
        done.set()
        cut.join()
    assert told.outcome.status == "completed"
    assert list(told.verdicts("boot.OrderlyShutdown").values()) == ["WARN"]


def cut_power_when_it_stops(vm: Vm, done: threading.Event) -> None:
    serial = vm.home / "serial.log"
    while not done.is_set() and "stopping" not in serial.read_text(errors="replace"):
        time.sleep(0.05)
    if not done.is_set():
        vm.power_off()
        vm.power_on()


def test_another_host_key_after_the_boot(machine: Started, tmp_path: Path) -> None:
    machine.write(
        "/etc/systemd/system/new-key.service",
        "[Unit]\nBefore=ssh.service\n[Service]\nType=oneshot\n"
        "ExecStart=/bin/sh -c \"rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key\"\n"
        "[Install]\nWantedBy=multi-user.target\n",
    )
    machine.sh("systemctl enable -q new-key.service; sync")
    told = verify(machine, tmp_path)
    assert (told.outcome.status, told.outcome.exit_code) == ("aborted", 7)


def test_journald_stopped_while_we_look(machine: Started, tmp_path: Path) -> None:
    machine.sh("systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service")
    told = verify(machine, tmp_path, reboot=False)
    assert told.outcome.status == "completed"
    # The ring buffer still has the kernel's lines, and is read instead; the services' own journals cannot be.
    assert told.outcome.verdict in ("UNKNOWN", "FAIL")


# ------------------------------------------------------------------------------------------------ the simulated lab


def test_a_vm_answers_as_the_simulated_machine_does(machine: Started, simulated: Simulated) -> None:
    with machine.transport() as transport:
        real = ask(PROBES, transport.gather)
    assert unexplained(rows(simulated.results, real.results), EVERYWHERE + A_VM) == []
    for probe, why in simulated.unknown.items():
        assert bool(why) == bool(real.unknown[probe]), (probe, why, real.unknown[probe])

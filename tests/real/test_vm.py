"""A real kernel: its IOMMU and its faults, its reboot, and reboot verification when something is wrong with it.

One machine for all: it is booted once, its state is saved, and every test begins there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proofbook.errors import ConnectionLost
from proofbook.lab.real import topology
from proofbook.lab.real.vm import Vm
from proofbook.model import command
from proofbook.probes.boot import Boots, Shutdown
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.pci import PciDevices

from .conftest import UNMAPPED, Kept, VirtualMachine, until
from .contract import A_VM, EVERYWHERE, LESS, NOT_REAL, Simulated, ask, known_by_one, rows, unexplained
from .runs import Told, reboot_verification

pytestmark = pytest.mark.vm

UNIT = "sglang-qwen.service"
GPUS = topology.load("four-gpus").gpus()


@pytest.fixture(scope="module")
def booted(kept: Kept) -> Iterator[VirtualMachine]:
    with kept.ready() as machine:
        yield machine


@pytest.fixture
def machine(booted: VirtualMachine) -> Iterator[VirtualMachine]:
    booted.vm.restore()
    yield booted
    booted.close()


# ------------------------------------------------------------------------------------------------ what is there


def test_hardware_as_the_kernel_sees_it(machine: VirtualMachine) -> None:
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
    assert any(line.text.startswith("EXT4-fs (vda): re-mounted") for line in log.lines)


def test_a_device_that_its_driver_lost(machine: VirtualMachine) -> None:
    machine.unbind(GPUS[1])
    assert machine.value(PciDevices())[GPUS[1]].driver == ""
    assert GPUS[1] not in machine.value(Gpus()).rows


def test_a_fault_is_a_line_only_where_the_iommu_translates(machine: VirtualMachine) -> None:
    machine.unbind(GPUS[1])
    assert machine.refusal(machine.group(GPUS[1]) + "/type", "identity") == ""
    machine.sh(f"echo {GPUS[1]} > /sys/bus/pci/drivers/nvidia/bind")
    assert machine.value(IommuGroups()).by_device[GPUS[1]] == "identity"
    machine.fault(GPUS[1])
    machine.fault(GPUS[0])
    lines = until(lambda: [x.text for x in machine.value(KernelLog()).lines if "fault addr" in x.text], "the kernel says it")
    assert f"Request device [{GPUS[0][5:]}] fault addr {UNMAPPED}" in lines[0]
    assert not [line for line in lines if f"[{GPUS[1][5:]}]" in line]


def test_who_may_read_the_kernel_log(machine: VirtualMachine) -> None:
    assert machine.sh("sysctl -n kernel.dmesg_restrict") == "1"
    with_sudo = machine.value(KernelLog(), user="ops")
    assert with_sudo.complete, with_sudo.gaps
    for user in ("plain", "careful"):  # neither group nor sudo; sudo only for who types a password
        answer = machine.ask(KernelLog(), user=user)
        assert not answer.known
        assert "Operation not permitted" in answer.unknown or "permission" in answer.unknown, answer.unknown


def test_a_frozen_guest_is_a_lost_connection(machine: VirtualMachine) -> None:
    with machine.transport(keepalive_s=1.0, silence_s=5.0) as transport:
        transport.open()
        machine.vm.freeze()
        try:
            with pytest.raises(ConnectionLost):
                transport.run(command("true", timeout_s=120))
        finally:
            machine.vm.thaw()


def test_a_power_cut(machine: VirtualMachine) -> None:
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


def test_a_copy_of_a_saved_state_is_another_machine(machine: VirtualMachine) -> None:
    here = machine.value(MachineProbe())
    copy = VirtualMachine(Vm("vm-four-gpus", machine.vm.places))
    try:
        copy.vm.up_as_copy(machine.vm)
        there = copy.value(MachineProbe())
        assert (there.hostname, there.kernel, there.cmdline) == ("vm-four-gpus", here.kernel, here.cmdline)
        assert {there.machine_id, there.boot_id}.isdisjoint({here.machine_id, here.boot_id})
        assert [boot.boot_id for boot in copy.value(Boots())] == [there.boot_id]
        log = copy.value(KernelLog())
        assert (log.boot_id, log.complete) == (there.boot_id, True), log.gaps
        assert tuple(copy.value(Gpus()).rows) == GPUS
    finally:
        copy.close()
        copy.vm.down()
    assert machine.value(MachineProbe()).boot_id == here.boot_id


# ------------------------------------------------------------------------------------------------ reboot verification

#: The digest of the plan to reboot the saved machine, once it was read: the machine is the same each time, so the plan is.
_read_plan: dict[str, str] = {}


def verify(machine: VirtualMachine, folder: Path, *, reboot: bool = True) -> Told:
    machine_id = machine.sh("cat /etc/machine-id")
    known = _read_plan.get(machine_id, "") if reboot else ""
    approval = {"approved": known, "approver": "tester"} if known else {}
    told = reboot_verification("lab:vm", folder / "out", reboot=reboot, **approval)
    if told.digest:
        _read_plan[machine_id] = told.digest
    return told


@contextmanager
def when_it_says(vm: Vm, word: str, act: Callable[[], None]) -> Iterator[None]:
    """Do something as soon as a word appears on the machine's console."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if word in (vm.home / "serial.log").read_text(errors="replace"):
                act()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


#: Runs before anything may write, and says whether anything could.
EARLY = """\
[Unit]
DefaultDependencies=no
Before=systemd-remount-fs.service
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'if touch /etc/early; then echo writable; else echo read-only; fi > /run/early'
[Install]
WantedBy=sysinit.target
"""


def test_a_healthy_machine_reboots_and_is_as_before(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.write("/etc/systemd/system/early.service", EARLY)
    machine.sh("systemctl enable -q early.service; sync")
    told = verify(machine, tmp_path)
    assert told.outcome.status == "completed"
    assert told.worst_of("FAIL") == []
    for check in ("boot.Rebooted", "boot.OrderlyShutdown", "boot.KernelAndCommandLine", "nvidia.GpusPresent", "iommu.IommuTypes"):
        assert set(told.verdicts(check).values()) == {"PASS"}, (check, told.verdicts(check))
    assert set(told.verdicts("kernel_log.KernelLogClean").values()) <= {"PASS", "WARN"}
    assert machine.sh("cat /run/early; touch /etc/late") == "read-only"


@pytest.mark.long
def test_a_gpu_that_is_gone_after_the_boot(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.vm.unplug(GPUS[2])
    told = verify(machine, tmp_path)
    assert told.summary == ("completed", "FAIL", 1)
    present = told.verdicts("nvidia.GpusPresent")
    assert {pci: present[pci] for pci in GPUS} == {pci: "FAIL" if pci == GPUS[2] else "PASS" for pci in GPUS}


@pytest.mark.long
def test_another_kernel_command_line(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.vm.cmdline("iommu=pt")
    told = verify(machine, tmp_path)
    assert told.summary == ("completed", "FAIL", 1)
    assert told.verdicts("boot.KernelAndCommandLine") == {"kernel": "PASS", "kernel command line": "WARN"}
    # With iommu=pt the kernel boots in passthrough: the types themselves are others now.
    assert set(told.verdicts("iommu.IommuTypes").values()) == {"FAIL"}


@pytest.mark.long
def test_a_service_that_crashes_again_and_again_and_one_that_nobody_enabled(machine: VirtualMachine, tmp_path: Path) -> None:
    other = "other.service"
    broken = '[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestartSec=3\nExecStartPre=/bin/sh -c "exit 3"\n'
    machine.write(f"/etc/systemd/system/{UNIT}.d/broken.conf", broken)
    machine.write(
        f"/etc/systemd/system/{other}", "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
    )
    machine.sh(f"systemctl daemon-reload; systemctl start {other}; sync")
    told = reboot_verification("lab:vm", tmp_path / "out", reboot=True, services=f"{UNIT},{other}")
    # Whatever moment of the loop the look meets, a start or the wait for it, it is told as the loop that it is.
    assert told.summary == ("completed", "FAIL", 1)
    assert told.verdicts("systemd.ServiceEnabled") == {UNIT: "PASS", other: "FAIL"}
    assert told.verdicts("systemd.ServiceStable") == {UNIT: "FAIL", other: "FAIL"}
    assert told.verdicts("service.ServiceAnswers")[UNIT] == "FAIL"
    (loop,) = (line for line in told.worst_of("FAIL") if line.startswith(f"systemd.ServiceStable {UNIT}"))
    assert "crash loop" in loop


def test_a_dma_fault(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.fault(GPUS[3])
    told = verify(machine, tmp_path, reboot=False)
    assert told.summary == ("completed", "FAIL", 1)
    assert any(line.startswith(f"iommu.DmaFaults {GPUS[3]}") for line in told.worst_of("FAIL"))


@pytest.mark.long
def test_a_slow_and_lossy_link_is_only_slow(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.sh("modprobe sch_netem && tc qdisc add dev eth0 root netem delay 300ms 50ms loss 2% rate 1mbit")
    told = verify(machine, tmp_path, reboot=False)
    assert told.outcome.status == "completed"
    assert told.worst_of("FAIL") + told.worst_of("UNKNOWN") == []
    assert "netem" in machine.sh("tc qdisc show dev eth0")


@pytest.mark.long
def test_a_power_cut_in_the_middle_of_the_shutdown(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.write(
        "/etc/systemd/system/slow.service",
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\nTimeoutStopSec=infinity\n"
        'ExecStop=/bin/sh -c "journalctl --sync; sync; echo shutdown-waits > /dev/ttyS0; sleep infinity"\n'
        "[Install]\nWantedBy=multi-user.target\n",
    )
    machine.sh("systemctl enable -q --now slow.service; sync")

    def cut() -> None:
        machine.vm.power_off()
        machine.vm.power_on()

    with when_it_says(machine.vm, "shutdown-waits", cut):
        told = verify(machine, tmp_path)
    # What the boot before left open is no hole in the log of this one.
    assert told.summary == ("completed", "WARN", 0)
    assert list(told.verdicts("boot.OrderlyShutdown").values()) == ["WARN"]
    assert told.verdicts("boot.Rebooted") == {"boot-id": "PASS", "number of boots": "PASS"}


@pytest.mark.long
def test_a_guest_that_freezes_while_it_is_looked_at(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.sh("mv /usr/bin/nvidia-smi /usr/bin/nvidia-smi.real")
    slow = '#!/bin/sh\necho asked-for-gpus > /dev/ttyS0\nsleep 20\nexec nvidia-smi.real "$@"\n'
    machine.write("/usr/bin/nvidia-smi", slow)
    machine.sh("chmod 755 /usr/bin/nvidia-smi")
    with when_it_says(machine.vm, "asked-for-gpus", machine.vm.freeze):
        told = verify(machine, tmp_path, reboot=False)
    assert told.summary == ("completed", "UNKNOWN", 4)
    assert told.worst_of("FAIL") == []


@pytest.mark.long
def test_another_host_key_after_the_boot(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.write(
        "/etc/systemd/system/new-key.service",
        "[Unit]\nBefore=ssh.service\n[Service]\nType=oneshot\n"
        "ExecStart=/bin/sh -c \"rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key\"\n"
        "[Install]\nWantedBy=multi-user.target\n",
    )
    machine.sh("systemctl enable -q new-key.service; sync")
    told = verify(machine, tmp_path)
    assert (told.outcome.status, told.outcome.exit_code) == ("aborted", 7)


@pytest.mark.long
def test_a_fault_that_journald_never_saw(machine: VirtualMachine, tmp_path: Path) -> None:
    # WHY its sockets too: they would start it again.
    machine.sh("systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service")
    machine.fault(GPUS[0])
    told = verify(machine, tmp_path, reboot=False)
    assert machine.sh("systemctl is-active systemd-journald.service", check=False) == "inactive"
    assert told.summary == ("completed", "FAIL", 1)
    assert any(line.startswith(f"iommu.DmaFaults {GPUS[0]}") for line in told.worst_of("FAIL"))
    log = machine.value(KernelLog())
    assert log.complete, log.gaps
    assert "from the ring buffer: the journal does not have them" in " ".join(log.notes)


# ------------------------------------------------------------------------------------------------ the simulated lab


def test_a_vm_answers_as_the_simulated_machine_does(machine: VirtualMachine, simulated: Simulated) -> None:
    with machine.transport() as transport:
        real = ask(transport.gather, simulated=False)
    left = unexplained(rows(simulated["root"], real), EVERYWHERE + LESS + A_VM)
    assert not left, "\n".join(left)
    left = known_by_one(simulated["root"], real, NOT_REAL)
    assert not left, "\n".join(left)

"""The identity experiment on a real kernel: the real unit at a real boot, its one boot, its guard, and what it refuses.

The stand-in driver plays the FSP: it says the lines that the real one would, where the domain is identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook import launch
from proofbook.changes.guard import FileChange, Guard
from proofbook.errors import LabError
from proofbook.lab.real import debian, topology
from proofbook.lab.sim import fault_lines
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.iommu_identity import IdentityFacts, IdentityState
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import PciDevices, ResetMethods
from proofbook.remote.gpu_reset import ResetLog, parse_reset, reset_command
from proofbook.remote.iommu_identity import FLAG, HOME, IDENTITY, PROGRAM, PULL, UNIT, UNIT_PATH, pull, unit

from .conftest import Kept, VirtualMachine, until
from .runs import Told

pytestmark = pytest.mark.vm

RUNBOOK = "iommu-identity-experiment"
GPUS = topology.load("four-gpus").gpus()
ALONE, *TOGETHER = topology.load("shared-group").gpus()
FUNCTIONS = topology.load("two-functions").gpus()[1:]
ONE = GPUS[0]
RUN = "20261129T120000Z-vm01"


@pytest.fixture(scope="module")
def booted(kept: Kept) -> Iterator[VirtualMachine]:
    with kept.ready() as machine:
        yield machine


@pytest.fixture
def machine(booted: VirtualMachine) -> Iterator[VirtualMachine]:
    booted.vm.restore()
    yield booted
    booted.close()


@pytest.fixture(scope="module", params=debian.SUITES)
def shared_group(request: pytest.FixtureRequest, kept: Kept) -> Iterator[VirtualMachine]:
    with kept.ready("vm-shared-group", request.param) as machine:
        yield machine


@pytest.fixture(scope="module", params=debian.SUITES)
def two_functions(request: pytest.FixtureRequest, kept: Kept) -> Iterator[tuple[str, VirtualMachine]]:
    with kept.ready("vm-two-functions", request.param) as machine:
        yield request.param, machine


def lay_down(machine: VirtualMachine, *addresses: str) -> None:
    for path, text in ((PROGRAM, IDENTITY), (UNIT_PATH, unit(addresses)), (PULL, pull()), (FLAG, "armed\n")):
        machine.write(path, text)
    machine.sh("systemctl daemon-reload; sync")


def boot_id(machine: VirtualMachine) -> str:
    found: str = machine.value(MachineProbe()).boot_id
    return found


def reboot(machine: VirtualMachine) -> None:
    before = boot_id(machine)
    machine.sh("systemctl reboot", check=False)
    another_boot(machine, before)


def another_boot(machine: VirtualMachine, before: str) -> None:
    """Wait for it. WHY through await_ssh: logging in again and again starves a machine that is starting under emulation."""

    def came() -> bool:
        try:
            machine.vm.await_ssh()
        except LabError:
            return False  # between two lives of its emulator
        said = machine.sh("cat /proc/sys/kernel/random/boot_id", check=False).replace("-", "")
        return said not in ("", before)

    until(came, "it is in another boot", 600)
    machine.booted()


def kinds(machine: VirtualMachine) -> dict[str, str]:
    found: dict[str, str] = machine.value(IommuGroups()).by_device
    return found


def state(machine: VirtualMachine) -> IdentityFacts:
    found: IdentityFacts = machine.value(IdentityState())
    return found


def experiment(host: str, outputs: Path, **parameters: Any) -> Told:
    """The runbook, headless, approved as by a person who read the plan."""
    given = {"host": host, "settle_minutes": 0.0, "console_confirmed": True, **parameters}
    outcome = launch.launch(RUNBOOK, given, outputs=outputs)
    if outcome.waiting_for:
        outcome = launch.launch(
            RUNBOOK, {**given, "approved": outcome.waiting_for["digest"], "approver": "tester"}, outputs=outputs
        )
    return Told(outcome, outputs)


@pytest.mark.long
def test_the_unit_sets_the_type_before_the_driver_binds_and_only_once(machine: VirtualMachine) -> None:
    before = kinds(machine)
    lay_down(machine, ONE)
    reboot(machine)
    log = state(machine).log
    assert log is not None
    assert (log.end, set(log.set), log.refused) == ("done", {ONE}, {})
    assert not state(machine).armed
    assert kinds(machine) == {**before, ONE: "identity"}
    assert machine.value(PciDevices())[ONE].driver == "nvidia"
    loaded = next(x.monotonic_s for x in machine.value(KernelLog()).lines if x.text.startswith("nvidia: loading out-of-tree"))
    assert log.set[ONE] < loaded
    assert "end done" in machine.sh(f"journalctl -b 0 -o cat --no-pager -u {UNIT}")
    reboot(machine)  # the files are there, the flag is not
    assert state(machine).log is None
    assert kinds(machine) == before


@pytest.mark.long
def test_a_guard_that_nobody_answers_takes_the_files_back_and_reboots(machine: VirtualMachine) -> None:
    before = kinds(machine)
    guard = Guard(RUN, "reboot.target")
    files = [
        FileChange(path, None, text.encode())
        for path, text in ((PROGRAM, IDENTITY), (UNIT_PATH, unit([ONE])), (PULL, pull()), (FLAG, "armed\n"))
    ]
    with machine.transport() as transport:
        transport.open()
        guard.done(transport.run(guard.stage(files)))
        assert guard.done(transport.run(guard.arm(3600))).guarded
        guard.done(transport.run(guard.install()))
    reboot(machine)
    assert kinds(machine)[ONE] == "identity"
    boot_a = boot_id(machine)
    with machine.transport() as transport:
        transport.open()
        # WHY only now: how long a boot takes here is not known, and a guard whose time was over meanwhile has acted already.
        assert guard.done(transport.run(guard.extend(10))).guarded
    another_boot(machine, boot_a)  # nobody says anything more
    assert kinds(machine) == before
    facts = state(machine)
    assert (facts.present, facts.log) == ((), None)
    assert machine.sh(f"ls -d {HOME}", check=False) == ""
    with machine.transport() as transport:
        transport.open()
        assert guard.parse(transport.run(guard.status())).outcome == "fired"


@pytest.mark.long
def test_a_bound_driver_and_a_shared_group_are_refused(shared_group: VirtualMachine) -> None:
    machine = shared_group
    before = kinds(machine)
    for addresses, why in (([ALONE], "it is bound to nvidia already"), ([TOGETHER[0]], "which is not in the plan")):
        lay_down(machine, *addresses)
        machine.sh(f"rm -f /run/gpu-iommu-identity.log; sh {PROGRAM} identity {' '.join(addresses)}", check=False)
        log = state(machine).log
        assert log is not None and log.end == "refused"
        assert why in log.refused[addresses[0]]
        assert not state(machine).armed
        assert kinds(machine) == before


def test_a_shared_group_is_never_planned(shared_group: VirtualMachine, tmp_path: Path) -> None:
    told = experiment("lab:vm-shared-group", tmp_path / "out", gpus=TOGETHER[0])
    assert told.summary == ("completed", "FAIL", 1)
    assert told.outcome.conclusion == "inconclusive"
    assert any(TOGETHER[1] in line for line in told.worst_of("FAIL"))


@pytest.mark.long
def test_functions_of_one_device_are_set_together_where_the_kernel_does_it(two_functions: tuple[str, VirtualMachine]) -> None:
    """Both are bound when it is asked for, and neither when the unit runs: that is what a boot is needed for."""
    suite, machine = two_functions
    before = kinds(machine)
    groups = machine.value(IommuGroups()).groups
    assert [g.devices for g in groups.values() if FUNCTIONS[0] in g.devices] == [FUNCTIONS]
    lay_down(machine, *FUNCTIONS)
    reboot(machine)
    log = state(machine).log
    assert log is not None
    devices = machine.value(PciDevices())
    assert {devices[pci].driver for pci in FUNCTIONS} == {"nvidia"}
    if suite == "bookworm":  # one of those that refuse a group of several devices
        kept_its = "the kernel refused the write: Invalid argument; its type is "
        assert log.end == "partly" and all(log.refused[pci].startswith(kept_its) for pci in FUNCTIONS)
        assert kinds(machine) == before
        assert "Group has more than one device" in machine.sh("dmesg | grep 'Cannot change default domain'")
    else:
        assert (log.end, set(log.set), log.refused) == ("done", set(FUNCTIONS), {})
        assert kinds(machine) == {**before, **dict.fromkeys(FUNCTIONS, "identity")}
        loaded = next(x.monotonic_s for x in machine.value(KernelLog()).lines if x.text.startswith("nvidia: loading out-of-tree"))
        assert all(log.set[pci] < loaded for pci in FUNCTIONS)
    reboot(machine)
    assert kinds(machine) == before and state(machine).log is None


def attempt(machine: VirtualMachine, method: str) -> ResetLog:
    command = reset_command(ONE, method)
    return parse_reset(machine.run(*command.argv, timeout_s=command.timeout_s, root=True))


def test_a_reset_of_a_real_device_by_what_its_kernel_lists(machine: VirtualMachine) -> None:
    listed = machine.value(ResetMethods())[ONE]
    assert "bus" in listed and "cxl_bus" not in listed
    log = attempt(machine, "bus")
    assert (log.done, log.errors, log.blocked) == (("unbind", "method", "reset", "put-back", "bind"), {}, "")
    assert log.listed == log.listed_after == listed and log.driver == "nvidia" and not log.lost
    assert log.vendor_before == log.vendor_after == "0x1234"  # who it really is; sysfs repeats what its driver says
    assert machine.value(PciDevices())[ONE].vendor == 0x10DE
    assert attempt(machine, "cxl_bus").refused == f"cxl_bus is not in its reset_method ({' '.join(listed)})"


@pytest.mark.long
def test_where_the_gpu_starts_the_hypothesis_is_supported(machine: VirtualMachine, tmp_path: Path) -> None:
    before = kinds(machine)
    told = experiment("lab:vm", tmp_path / "out")
    assert told.worst_of("FAIL") + told.worst_of("UNKNOWN") == []
    assert (told.outcome.status, told.outcome.exit_code, told.outcome.conclusion) == ("completed", 0, "supported")
    assert kinds(machine) == before
    assert (state(machine).present, state(machine).log) == ((), None)


#: The FSP of a GPU in the identity domain, played: the driver's lines, and no row in nvidia-smi.
PLAY = """\
[Unit]
After=sysinit.target
Before=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh /usr/local/lib/lab/play-fsp.sh
[Install]
WantedBy=multi-user.target
"""


@pytest.mark.long
def test_an_fsp_that_refuses_blocks_it_and_everything_is_put_back(machine: VirtualMachine, tmp_path: Path) -> None:
    before = kinds(machine)
    device = f"/sys/bus/pci/devices/{ONE}"
    says = "\n".join(f"echo '{line.text}' > {device}/stand_in_line" for line in fault_lines.fsp_boot_failed(ONE, 0))
    script = f'[ "$(cat {device}/iommu_group/type)" = identity ] || exit 0\ntouch /run/fsp-refused\n{says}\n'
    machine.write("/usr/local/lib/lab/play-fsp.sh", script)
    machine.write("/etc/systemd/system/play-fsp.service", PLAY)
    program = "/opt/nvidia-smi-stand-in/nvidia_smi.py"
    anchor = "    try:\n        found.nvidia.module_version"
    edit = f"    if Path('/run/fsp-refused').exists():\n        found.gpus['{ONE}'].condition = 'uninitialised'\n{anchor}"
    machine.sh(
        f"python3 - <<'END'\nfrom pathlib import Path\np = Path('{program}')\ns = p.read_text()\n"
        f"assert {anchor!r} in s\np.write_text(s.replace({anchor!r}, {edit!r}))\nEND\n"
        "systemctl enable -q play-fsp.service; sync"
    )
    told = experiment("lab:vm", tmp_path / "out")
    assert told.worst_of("FAIL") + told.worst_of("UNKNOWN") == []
    assert (told.outcome.status, told.outcome.exit_code, told.outcome.conclusion) == ("completed", 0, "blocked")
    assert "0x177" in told.record["conclusion"]["because"]
    assert kinds(machine) == before
    assert state(machine).present == ()

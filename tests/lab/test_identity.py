"""What a machine of the lab does at the one boot for which the identity experiment's files are laid down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from proofbook.changes.guard import FileChange
from proofbook.checks.identity.evidence import first_error
from proofbook.checks.identity.rule import Kind
from proofbook.lab.sim import scenario
from proofbook.lab.sim.changing import Change, Disk
from proofbook.remote.guard import stage_request
from proofbook.remote.iommu_identity import FLAG, IDENTITY, LOG, PATHS, PROGRAM, PULL, UNIT, UNIT_PATH, parse_log, pull, unit
from proofbook.signatures import LogContext, LogLine, judge

from .conftest import Bench

ONE, TWO = "0000:01:00.0", "0000:41:00.0"
ABOUT = sorted(n for n in scenario.names() if "iommu-identity-experiment" in scenario.load(n).expect)
WHOLE_BOOT = 14 + 95 + 60


def files(*addresses: str) -> dict[str, str]:
    return {PROGRAM: IDENTITY, UNIT_PATH: unit(addresses), PULL: pull(), FLAG: "armed\n"}


def laid_down(name: str, *addresses: str, without: str = "") -> Bench:
    machine = Bench(name)
    disk = Disk(machine.life, machine.life.machine.host)
    for path, text in files(*addresses).items():
        if path != without:
            disk.write(path, text, mode=0o644)
    return machine


def kind(machine: Bench, pci: str) -> str:
    text: str = machine.say(f"cat /sys/bus/pci/devices/{pci}/iommu_group/type")
    return text.strip()


def test_each_scenario_says_how_the_experiment_ends() -> None:
    assert len(ABOUT) == 8
    said = {scenario.load(n).expect["iommu-identity-experiment"].conclusion for n in ABOUT}
    assert said == {"blocked", "supported", "inconclusive"}


def test_it_acts_at_one_boot_and_at_no_other() -> None:
    machine = laid_down("identity-works", ONE)
    assert kind(machine, ONE) == "DMA-FQ"
    machine.reboot(WHOLE_BOOT)
    assert (kind(machine, ONE), kind(machine, TWO)) == ("identity", "DMA-FQ")
    log = parse_log(machine.say(f"cat {LOG}"))
    assert log.end == "done" and set(log.set) == {ONE}
    assert "end done" in machine.say(f"journalctl -b 0 -o cat --no-pager -u {UNIT}")
    assert machine.say(f"systemctl show {UNIT} --property=ActiveState") == "ActiveState=active\n"
    machine.reboot(WHOLE_BOOT)
    assert kind(machine, ONE) == "DMA-FQ"
    assert machine.run(f"cat {LOG}").status != 0
    assert machine.unknown == []


@pytest.mark.parametrize("path", PATHS)
def test_without_one_of_its_files_it_does_nothing(path: str) -> None:
    machine = laid_down("identity-works", ONE, without=path)
    machine.reboot(WHOLE_BOOT)
    assert kind(machine, ONE) == "DMA-FQ"


def first(machine: Bench, pci: str) -> Kind | None:
    text = machine.say("journalctl -k -b 0 -o cat --no-pager")
    at = [line.monotonic_s for line in machine.life.machine.boot.kernel_log]
    lines = [LogLine(t, s) for t, s in zip(text.splitlines(), at, strict=True)]
    error = first_error(judge(lines, context=LogContext(gpus=frozenset({ONE, TWO}))).findings, pci)
    return error.kind if error else None


def test_an_fsp_that_refuses_says_so_first_and_only_in_the_identity_domain() -> None:
    machine = laid_down("identity-fsp-0x177", ONE)
    machine.reboot(WHOLE_BOOT)
    assert "Error code: 0x177" in machine.say("journalctl -k -b 0 -o cat --no-pager")
    assert (first(machine, ONE), first(machine, TWO)) == (Kind.FSP, None)
    assert machine.say("nvidia-smi -L | wc -l") == "3\n"
    machine.reboot(WHOLE_BOOT)
    assert machine.say("nvidia-smi -L | wc -l") == "4\n" and first(machine, ONE) is None


def test_a_lost_link_is_told_from_an_fsp_that_refuses() -> None:
    machine = laid_down("identity-lost-link", ONE)
    machine.reboot(WHOLE_BOOT)
    assert "FSP" in machine.say("journalctl -k -b 0 -o cat --no-pager")
    assert first(machine, ONE) is Kind.LINK


def test_a_gpu_that_stays_wedged_does_not_start_translated_either() -> None:
    machine = laid_down("identity-restore-fails", ONE)
    for _ in range(2):
        machine.reboot(WHOLE_BOOT)
        assert machine.say("nvidia-smi -L | wc -l") == "3\n"
    assert kind(machine, ONE) == "DMA-FQ"


def test_a_driver_in_the_initramfs_was_there_first() -> None:
    machine = laid_down("identity-too-late", ONE)
    machine.reboot(WHOLE_BOOT)
    assert kind(machine, ONE) == "DMA-FQ"
    assert parse_log(machine.say(f"cat {LOG}")).refused == {ONE: "it is bound to nvidia already"}
    assert machine.say(f"systemctl show {UNIT} --property=ActiveState") == "ActiveState=failed\n"


def test_a_shared_group_is_left_alone() -> None:
    machine = laid_down("identity-group-shared", ONE)
    machine.reboot(WHOLE_BOOT)
    assert kind(machine, ONE) == "DMA-FQ"
    assert TWO in parse_log(machine.say(f"cat {LOG}")).refused[ONE]


def test_its_guard_takes_the_files_back_and_reboots() -> None:
    machine = Bench("identity-works")
    change = Change(machine.life, machine.life.machine.host, "20260408T150412Z-3f2a")
    request = [FileChange(path, None, text.encode()) for path, text in files(ONE).items()]
    change.stage("reboot.target", stage_request(request))
    change.arm("arm", 3600)
    change.install()
    machine.reboot(WHOLE_BOOT)
    assert kind(machine, ONE) == "identity"
    boots = len(machine.life.machine.boots)
    machine.wait(3600 + WHOLE_BOOT)
    assert len(machine.life.machine.boots) == boots + 1
    assert kind(machine, ONE) == "DMA-FQ"
    assert change.state == "fired" and not [p for p in PATHS if Disk(machine.life, machine.life.machine.host).node(p)]


def test_the_lab_says_what_the_program_says(tmp_path: Path) -> None:
    """The same plan on a sysfs in a folder: the same lines, but for their times."""
    machine = laid_down("identity-works", ONE)
    group = os.path.basename(machine.say(f"readlink /sys/bus/pci/devices/{ONE}/iommu_group").strip())
    machine.reboot(WHOLE_BOOT)
    there, device = tmp_path / "sys/kernel/iommu_groups" / group, tmp_path / "sys/bus/pci/devices" / ONE
    for folder in (there / "devices", device, tmp_path / "etc/gpu-iommu-identity", tmp_path / "run", tmp_path / "proc"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/uptime").write_text("3.41 9.9\n")
    (tmp_path / FLAG[1:]).touch()
    (there / "type").write_text("DMA-FQ\n")
    (there / "devices" / ONE).symlink_to(device)
    (device / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")
    environment = {"PATH": os.environ["PATH"], "PROOFBOOK_TEST_ROOT": str(tmp_path)}
    real = subprocess.run(
        ["sh", "-c", IDENTITY, "program", "identity", ONE], env=environment, capture_output=True, text=True, check=True
    )
    told = [line.partition(" ")[2] for line in machine.say(f"cat {LOG}").splitlines()]
    assert told == [line.partition(" ")[2] for line in real.stdout.splitlines()]

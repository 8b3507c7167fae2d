"""What a machine of the lab does at the one boot for which the identity experiment's files are laid down."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.changes.guard import FileChange
from proofbook.checks.identity.evidence import first_error
from proofbook.checks.identity.rule import Kind
from proofbook.lab.sim import scenario
from proofbook.lab.sim.changing import Change, Disk
from proofbook.model import Result
from proofbook.remote.gpu_reset import ResetLog, parse_reset, reset_command
from proofbook.remote.guard import stage_request
from proofbook.remote.iommu_identity import FLAG, IDENTITY, LOG, PATHS, PROGRAM, PULL, UNIT, UNIT_PATH, parse_log, pull, unit
from proofbook.signatures import LogContext, LogLine, judge

from .conftest import Bench

ONE, TWO, AUDIO = "0000:01:00.0", "0000:41:00.0", "0000:01:00.1"
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
    assert len(ABOUT) == 13
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


def test_an_audio_function_shares_the_group_of_its_gpu_and_its_type() -> None:
    machine = laid_down("identity-with-audio", ONE, AUDIO)
    assert [kind(machine, a) for a in (ONE, AUDIO)] == ["DMA-FQ", "DMA-FQ"]
    for address in (ONE, TWO):
        assert machine.say(f"lspci -nn -s {address[5:]}").startswith(f"{address[5:]} VGA compatible controller [0300]: NVIDIA")
    assert "Audio device [0403]: NVIDIA Corporation Device [10de:22e8]" in machine.say("lspci -nn -s 01:00.1")
    machine.reboot(WHOLE_BOOT)
    assert [kind(machine, a) for a in (ONE, AUDIO, TWO)] == ["identity", "identity", "DMA-FQ"]
    assert machine.say(f"readlink /sys/bus/pci/devices/{AUDIO}/driver").endswith("/snd_hda_intel\n")
    assert set(parse_log(machine.say(f"cat {LOG}")).set) == {ONE, AUDIO}
    assert machine.unknown == []


def test_without_its_audio_function_in_the_plan_the_group_is_left_alone() -> None:
    machine = laid_down("identity-with-audio", ONE)
    machine.reboot(WHOLE_BOOT)
    assert AUDIO in parse_log(machine.say(f"cat {LOG}")).refused[ONE] and kind(machine, ONE) == "DMA-FQ"


def test_an_older_kernel_refuses_a_group_of_several_and_says_so() -> None:
    machine = laid_down("identity-old-kernel", ONE, AUDIO)
    machine.reboot(WHOLE_BOOT)
    assert [kind(machine, a) for a in (ONE, AUDIO)] == ["DMA-FQ", "DMA-FQ"]
    log = parse_log(machine.say(f"cat {LOG}"))
    assert log.end == "partly" and log.refused[ONE] == "the kernel refused the write: Invalid argument; its type is DMA-FQ"
    assert "iommu: Cannot change default domain: Group has more than one device" in machine.say("dmesg")


def refused_in_boot_a(name: str) -> Bench:
    """A machine in boot A, whose GPU does not start there."""
    machine = laid_down(name, ONE)
    machine.reboot(WHOLE_BOOT)
    assert machine.say("nvidia-smi -L | wc -l") == "3\n"
    return machine


def attempt(machine: Bench, method: str, address: str = ONE) -> ResetLog:
    command = reset_command(address, method)
    answer = machine.argv(*command.argv)
    return parse_reset(Result(command, answer.status, answer.stdout, answer.stderr, datetime.now(UTC), 1.0))


def test_a_reset_that_changes_nothing_lets_the_driver_fail_again() -> None:
    machine = refused_in_boot_a("identity-reset-stays")
    before = machine.say("dmesg").count("Error code: 0x177")
    log = attempt(machine, "flr")
    assert (log.done, log.errors, log.driver) == (("unbind", "method", "reset", "put-back", "bind"), {}, "nvidia")
    assert log.listed == log.listed_after == ("flr", "bus") and not log.lost
    assert machine.say("dmesg").count("Error code: 0x177") == before + 1
    assert machine.say("nvidia-smi -L | wc -l") == "3\n" and kind(machine, ONE) == "identity"
    assert attempt(machine, "cxl_bus").refused == "cxl_bus is not in its reset_method (flr bus)"
    assert machine.unknown == []


def test_a_reset_that_clears_lets_the_gpu_start_in_this_boot_and_no_longer() -> None:
    machine = refused_in_boot_a("identity-reset-clears")
    attempt(machine, "flr")
    assert machine.say("nvidia-smi -L | wc -l") == "3\n"
    attempt(machine, "bus")
    assert machine.say("nvidia-smi -L | wc -l") == "4\n" and kind(machine, ONE) == "identity"
    machine.reboot(WHOLE_BOOT)
    assert machine.say("nvidia-smi -L | wc -l") == "4\n" and kind(machine, ONE) == "DMA-FQ"


def test_a_reset_that_kills_leaves_a_gpu_that_a_reboot_does_not_find() -> None:
    machine = refused_in_boot_a("identity-reset-kills")
    log = attempt(machine, "flr")
    assert log.lost and (log.vendor_before, log.vendor_after, log.driver) == ("0x10de", "0xffff", "")
    assert log.errors == {"reset": "ENOTTY (Inappropriate ioctl for device)"}
    assert machine.say(f"cat /sys/bus/pci/devices/{ONE}/vendor") == "0x10de\n"  # what the kernel once read
    assert "not ready 65535ms after FLR; giving up" in machine.say("dmesg")
    assert attempt(machine, "bus").refused.startswith("it reads as all ones already")
    for _ in range(2):
        machine.reboot(WHOLE_BOOT)
        assert machine.run(f"cat /sys/bus/pci/devices/{ONE}/vendor").status != 0
        assert machine.say("lspci -d 10de: | wc -l") == "3\n"


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


def in_a_folder(root: Path, machine: Bench, *addresses: str) -> str:
    """A sysfs in ``root`` with the groups of these addresses as the machine has them; the folder of the first one's group."""
    for folder in ("etc/gpu-iommu-identity", "run", "proc"):
        (root / folder).mkdir(parents=True)
    (root / "proc/uptime").write_text("3.41 9.9\n")
    (root / FLAG[1:]).touch()
    for address in addresses:
        group = os.path.basename(machine.say(f"readlink /sys/bus/pci/devices/{address}/iommu_group").strip())
        there, device = root / "sys/kernel/iommu_groups" / group, root / "sys/bus/pci/devices" / address
        (there / "devices").mkdir(parents=True, exist_ok=True)
        device.mkdir(parents=True)
        (there / "type").write_text("DMA-FQ\n")
        (there / "devices" / address).symlink_to(device)
        (device / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")
    return str(root)


@pytest.mark.parametrize(
    ("name", "there", "planned"),
    [
        ("identity-works", [ONE], [ONE]),
        ("identity-with-audio", [ONE, AUDIO], [ONE, AUDIO]),
        ("identity-with-audio", [ONE, AUDIO], [ONE]),
        ("identity-old-kernel", [ONE, AUDIO], [ONE, AUDIO]),
    ],
)
def test_the_lab_says_what_the_program_says(name: str, there: list[str], planned: list[str], tmp_path: Path) -> None:
    """The same plan on a sysfs in a folder: the same lines, but for their times."""
    machine = laid_down(name, *planned)
    root = in_a_folder(tmp_path / "root", machine, *there)
    environment = {"PATH": os.environ["PATH"], "PROOFBOOK_TEST_ROOT": root}
    if name == "identity-old-kernel":  # a write that such a kernel refuses, as tee tells it
        (tmp_path / "tee").write_text('#!/bin/sh\necho "tee: $2: Invalid argument" >&2\nexit 1\n')
        (tmp_path / "tee").chmod(0o755)
        environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    machine.reboot(WHOLE_BOOT)
    real = subprocess.run(
        ["sh", "-c", IDENTITY, "program", "identity", *planned], env=environment, capture_output=True, text=True, check=False
    )
    told = [line.partition(" ")[2] for line in machine.say(f"cat {LOG}").splitlines()]
    assert told == [line.partition(" ")[2] for line in real.stdout.splitlines()]

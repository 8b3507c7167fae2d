"""iommu_identity.sh on a sysfs that lies in a folder: what it does, what it refuses, and in which order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from proofbook.errors import CannotTell
from proofbook.remote.iommu_identity import FLAG, IDENTITY, LOG, PROGRAM, PULL, UNIT_PATH, IdentityLog, parse_log, pull, unit

ONE, TWO, AUDIO = "0000:41:00.0", "0000:81:00.0", "0000:41:00.1"
SHELLS = [s for s in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(s[0])]


class Machine:
    """A root folder with what the program looks at."""

    def __init__(self, root: Path, shell: list[str]) -> None:
        self.root, self.shell, self.path = root, shell, os.environ["PATH"]
        for folder in ("etc/gpu-iommu-identity", "run", "proc", "sys/bus/pci/drivers/nvidia"):
            (root / folder).mkdir(parents=True)
        (root / "proc/uptime").write_text("12.34 99.00\n")
        (root / FLAG[1:]).write_text("armed\n")

    def device(self, address: str, group: int, kind: str = "DMA-FQ", driver: str = "") -> None:
        there = self.root / f"sys/kernel/iommu_groups/{group}"
        (there / "devices").mkdir(parents=True, exist_ok=True)
        (there / "type").write_text(kind + "\n")
        device = self.root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")
        (there / "devices" / address).symlink_to(device)
        if driver:
            (device / "driver").symlink_to(f"../../drivers/{driver}")

    def kind(self, group: int) -> str:
        return (self.root / f"sys/kernel/iommu_groups/{group}/type").read_text().strip()

    @property
    def armed(self) -> bool:
        return (self.root / FLAG[1:]).exists()

    def stub(self, name: str, body: str) -> None:
        """A program of this name that does ``body`` instead."""
        folder = self.root / "stubs"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def run(self, *words: str) -> tuple[int, IdentityLog]:
        program = self.root / "program.sh"
        program.write_text(IDENTITY)
        environment = {"PATH": self.path, "PROOFBOOK_TEST_ROOT": str(self.root)}
        done = subprocess.run([*self.shell, str(program), *words], env=environment, capture_output=True, text=True, check=False)
        text = (self.root / LOG[1:]).read_text()
        assert text.endswith(done.stdout)  # the journal and the file say the same
        return done.returncode, parse_log(done.stdout)


@pytest.fixture(params=SHELLS, ids=lambda s: s[0])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path / "root", request.param)


def test_it_sets_the_type_and_reads_it_back(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.device(TWO, 22)
    code, log = machine.run("identity", ONE)
    assert (code, log.end, log.set, log.groups) == (0, "done", {ONE: 12.34}, {ONE: (21, "DMA-FQ")})
    assert (machine.kind(21), machine.kind(22)) == ("identity", "DMA-FQ")
    assert not machine.armed


def test_the_second_run_does_nothing(machine: Machine) -> None:
    machine.device(ONE, 21)
    assert machine.run("identity", ONE)[0] == 0
    (machine.root / "sys/kernel/iommu_groups/21/type").write_text("DMA-FQ\n")
    code, log = machine.run("identity", ONE)
    assert (code, log.end, log.trouble, log.set) == (0, "idle", "it was not armed", {})
    assert machine.kind(21) == "DMA-FQ"


def test_a_flag_that_cannot_go_keeps_it_from_acting(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.stub("rm", "exit 1")
    code, log = machine.run("identity", ONE)
    assert (code, log.end, log.disarmed_s) == (1, "idle", None)
    assert "cannot be removed" in log.trouble and machine.kind(21) == "DMA-FQ"


def test_a_removal_that_may_not_last_keeps_it_from_acting(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.stub("sync", "exit 1")
    code, log = machine.run("identity", ONE)
    assert (code, log.end) == (1, "idle") and machine.kind(21) == "DMA-FQ"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare for a read-only root")
def test_on_a_root_that_is_read_only_it_does_not_act(machine: Machine) -> None:
    machine.device(ONE, 21)
    home = machine.root / "etc/gpu-iommu-identity"
    program = machine.root / "program.sh"
    program.write_text(IDENTITY)
    mount = f"mount -t tmpfs none {home} && touch {home}/armed && mount -o remount,ro {home} || exit 77"
    act = f"PROOFBOOK_TEST_ROOT={machine.root} {' '.join(machine.shell)} {program} identity {ONE}"
    script = f"{mount}; {act}; echo status $?; ls {home}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    assert "not-disarmed" in done.stdout and "end idle\nstatus 1\narmed\n" in done.stdout
    assert machine.kind(21) == "DMA-FQ"


def test_a_shared_group_is_refused_and_nothing_is_set(machine: Machine) -> None:
    machine.device(TWO, 22)
    machine.device(ONE, 21)
    machine.device(AUDIO, 21)
    code, log = machine.run("identity", TWO, ONE)
    assert (code, log.end, log.set) == (1, "refused", {})
    assert AUDIO in log.refused[ONE] and (machine.kind(21), machine.kind(22)) == ("DMA-FQ", "DMA-FQ")
    assert not machine.armed  # the next boot is a clean one all the same


def test_a_whole_group_that_is_in_the_plan_is_set(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.device(AUDIO, 21)
    code, log = machine.run("identity", ONE, AUDIO)
    assert (code, log.end, set(log.set)) == (0, "done", {ONE, AUDIO}) and machine.kind(21) == "identity"


def test_a_bound_driver_is_refused_by_name(machine: Machine) -> None:
    machine.device(ONE, 21, driver="nvidia")
    code, log = machine.run("identity", ONE)
    assert (code, log.end) == (1, "refused") and log.refused[ONE] == "it is bound to nvidia already"
    assert machine.kind(21) == "DMA-FQ"


def test_a_device_that_is_not_there_or_in_no_group_is_refused(machine: Machine) -> None:
    assert machine.run("identity", ONE)[1].refused == {ONE: "it is not on the bus"}


def test_a_device_without_a_group_is_refused(machine: Machine) -> None:
    (machine.root / "sys/bus/pci/devices" / ONE).mkdir(parents=True)
    assert machine.run("identity", ONE)[1].refused == {ONE: "it is in no iommu group"}


def test_a_write_without_effect_is_not_taken_for_success(machine: Machine) -> None:
    machine.device(ONE, 21)
    kind = machine.root / "sys/kernel/iommu_groups/21/type"
    kind.unlink()
    kind.symlink_to("/proc/sys/kernel/ostype")  # readable, and refuses what is written
    code, log = machine.run("identity", ONE)
    assert (code, log.end, log.set) == (1, "partly", {})
    assert "its type is Linux" in log.refused[ONE]


def test_the_kernels_own_error_is_told(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.device(AUDIO, 21)
    kind = machine.root / "sys/kernel/iommu_groups/21/type"
    kind.unlink()
    kind.symlink_to("/proc/self/oom_score_adj")  # readable, and what is no number is answered with EINVAL
    code, log = machine.run("identity", ONE, AUDIO)
    assert (code, log.end, log.set, set(log.refused)) == (1, "partly", {}, {ONE, AUDIO})
    assert log.refused[AUDIO].startswith("the kernel refused the write: Invalid argument; its type is ")


def test_a_function_that_has_its_driver_already_is_refused_for_the_whole_group(machine: Machine) -> None:
    machine.device(ONE, 21)
    machine.device(AUDIO, 21, driver="snd_hda_intel")
    code, log = machine.run("identity", ONE, AUDIO)
    assert (code, log.end, log.set) == (1, "refused", {})
    assert log.refused == {
        ONE: f"{AUDIO} of its group is bound to snd_hda_intel already",
        AUDIO: "it is bound to snd_hda_intel already",
    }
    assert machine.kind(21) == "DMA-FQ"


def test_the_unit_runs_before_anything_loads_a_driver_and_only_when_armed() -> None:
    text = unit(["41:00.0"])
    for line in (
        "DefaultDependencies=no",
        "Before=systemd-udev-trigger.service systemd-modules-load.service sysinit.target",
        f"ConditionPathExists={FLAG}",
        "After=systemd-remount-fs.service",
        f"ExecStart=/bin/sh {PROGRAM} identity {ONE}",
    ):
        assert line in text.splitlines()
    assert pull().endswith("Wants=gpu-iommu-identity.service\n")
    assert all(p.startswith("/etc/") for p in (UNIT_PATH, PULL, PROGRAM, FLAG))  # the root file system is there first


@pytest.mark.parametrize("text", ["", "12.3 hello\n", "x begin identity\n", "12.3 set 0000:41:00.0 identity\n", "12.3\n"])
def test_what_is_not_its_log_is_not_read_as_one(text: str) -> None:
    with pytest.raises(CannotTell):
        parse_log(text)


def test_a_log_that_was_cut_off_has_no_end() -> None:
    assert parse_log(f"1.0 begin identity {ONE}\n1.1 disarmed\n").end == ""

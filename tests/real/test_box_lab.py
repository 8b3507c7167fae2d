"""The boxes themselves: each its own machine, and nothing left when they go, however they go."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proofbook.errors import LabError
from proofbook.lab.real import cgroups, image
from proofbook.lab.real.box import Box
from proofbook.lab.real.places import Places
from proofbook.lab.real.processes import started
from proofbook.probes.boot import Boots, Shutdown
from proofbook.probes.boot import Machine as MachineProbe

from .conftest import Machine, machine_in, until

pytestmark = pytest.mark.box


def remains(box: Box) -> list[str]:
    """Processes, mounts and control groups of a box that are there now."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(box.home) in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            mounts = (process / "mountinfo").read_text()
        except OSError:
            continue
        if str(box.home) in words or f"{box.home}/root" in mounts:
            found.append(f"{process.name}: {' '.join(words)[:100]}")
    if cgroups.left(box.group):
        found.append(f"control group {box.group}")
    return found


#: The container's first process is the child of the one that the keeper knows: its PID namespace is "for children" there.
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "uts")


def namespaces(process: str) -> set[str]:
    """The namespaces that a process is in, as the kernel names them ("net:[4026532213]")."""
    found = set()
    for kind in NAMESPACES:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{process}/ns/{kind}"))
    return found


def kept(these: set[str]) -> list[str]:
    """Processes that keep one of some namespaces alive, and mounts that do."""
    found = [p.name for p in Path("/proc").glob("[0-9]*") if namespaces(p.name) & these]
    return found + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if any(n in line for n in these)]


def test_two_boxes_are_two_machines(tmp_path: Path) -> None:
    with machine_in(tmp_path, "one") as one, machine_in(tmp_path, "two") as two:
        first, second = one.value(MachineProbe()), two.value(MachineProbe())
        assert first.virtualization == second.virtualization == "systemd-nspawn"
        assert first.machine_id != second.machine_id
        assert first.boot_id != second.boot_id
        assert (first.hostname, second.hostname) == ("one", "two")
        with one.transport() as a, two.transport() as b:
            assert a.open().host_key != b.open().host_key
        # Each has a loopback of its own: the same port serves in both.
        assert one.sh("ss -Hltn sport = :30000 | wc -l") == two.sh("ss -Hltn sport = :30000 | wc -l") == "1"
        assert one.sh("ip -o link | wc -l") == "1"


def test_a_reboot_is_a_reboot(fresh: Machine) -> None:
    before = fresh.value(MachineProbe())
    old, new = fresh.box.reboot()
    fresh.booted()
    after = fresh.value(MachineProbe())
    assert (old.replace("-", ""), new.replace("-", "")) == (before.boot_id, after.boot_id)
    assert before.boot_id != after.boot_id
    assert before.machine_id == after.machine_id
    boots = fresh.value(Boots())
    assert [b.boot_id for b in boots] == [before.boot_id, after.boot_id]
    assert fresh.value(Shutdown(before.boot_id)).orderly


def test_a_power_cut_is_no_shutdown(fresh: Machine) -> None:
    before = fresh.value(MachineProbe())
    fresh.sh("touch /var/tmp/written; journalctl --sync")
    fresh.box.power_off()
    assert not answers(fresh)
    with pytest.raises(LabError, match="its plug was pulled"):
        fresh.box.up()
    fresh.box.power_on()
    fresh.box.up()
    fresh.booted()
    after = fresh.value(MachineProbe())
    assert after.boot_id != before.boot_id
    ended = fresh.value(Shutdown(before.boot_id))
    assert not ended.orderly
    assert "nothing of a shutdown" in ended.why
    assert fresh.sh("ls /var/tmp/written") == "/var/tmp/written"


def answers(machine: Machine) -> bool:
    argv = machine.box.ssh_command("true")
    return subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 0


def test_down_leaves_nothing_and_up_is_the_same_machine_anew(tmp_path: Path) -> None:
    with machine_in(tmp_path, "again") as machine:
        box = machine.box
        first = machine.value(MachineProbe())
        machine.sh("touch /root/changed")
        assert remains(box)
        assert box.down()
        assert remains(box) == []
        assert not box.down()
        box.up(owner=os.getpid())
        machine.booted()
        second = machine.value(MachineProbe())
        assert (first.machine_id, first.hostname) == (second.machine_id, second.hostname)
        assert first.boot_id != second.boot_id
        assert machine.sh("ls /root/changed 2>/dev/null | wc -l") == "0"


def test_a_killed_keeper_takes_its_box_along(tmp_path: Path) -> None:
    with machine_in(tmp_path, "killed") as machine:
        box = machine.box
        about = box.alive()
        assert about is not None
        own = namespaces(about["box"]) - namespaces("self")
        assert {name.partition(":")[0] for name in own} >= {"mnt", "net", "pid", "ipc", "uts"}
        os.kill(about["pid"], signal.SIGKILL)
        until(lambda: not started(about["box"]), "the container is gone")
        until(lambda: kept(own) == [], "nothing keeps its namespaces")
        until(lambda: all(line.startswith("control group") for line in remains(box)), "processes and mounts are gone")
        assert box.status() is None
        assert box.leftovers
        box.up(owner=os.getpid())
        machine.booted()
        assert not box.leftovers
        box.down()
        assert remains(box) == []


def test_a_box_ends_with_its_owner(tmp_path: Path) -> None:
    places = Places(tmp_path, Places.default().cache)
    box = Box("owned", places)
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom proofbook.lab.real.box import Box\n"
        "from proofbook.lab.real.places import Places\n"
        "Box('owned', Places(Path(sys.argv[1]), Places.default().cache)).up(owner=os.getpid())\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert box.status() is not None
        owner.kill()
        owner.wait()
        until(lambda: remains(box) == [], "everything of it is gone")
        assert box.status() is None
    finally:
        owner.kill()
        owner.wait()
        box.down()


def test_a_box_that_powers_itself_off_is_down(fresh: Machine) -> None:
    fresh.sh("systemctl poweroff", check=False)
    until(lambda: fresh.box.status() is None, "it is down")
    until(lambda: remains(fresh.box) == [], "nothing is left")
    with pytest.raises(LabError, match="is not up"):
        fresh.box.ssh_command()


def test_the_file_system_is_built_once_for_a_recipe(monkeypatch: pytest.MonkeyPatch, shared: Machine) -> None:
    places = shared.box.places
    suite = "bookworm"
    before = image._folder(suite, places)
    monkeypatch.setattr("proofbook.lab.real.packages.GUEST", ("systemd", "one-more"))
    assert image._folder(suite, places) != before

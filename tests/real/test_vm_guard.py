"""The guard on a real kernel: its runner is gone, and so is the boot in which it was armed. The machine still takes it back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Kept, VirtualMachine, until
from .test_box_guard import UNIT, Change

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def machine(kept: Kept) -> Iterator[VirtualMachine]:
    with kept.ready() as machine:
        yield machine


def test_nobody_is_there_any_more(machine: VirtualMachine) -> None:
    change = Change(machine)
    change.files = change.files[:1]
    change.installed(600)
    machine.sh(f"systemctl restart {UNIT}")
    assert "0.61" in machine.sh(f"tr '\\0' ' ' < /proc/{change.main_pid()}/cmdline")
    change.do(change.guard.extend(5))
    machine.close()  # this was the last that the machine heard of its runner
    until(lambda: change.state().state == "fired", "the guard takes it back", 300)
    assert change.state().outcome == "fired"
    assert change.is_old()
    change.do(change.guard.clean())


@pytest.mark.long
def test_it_outlives_the_boot_in_which_it_was_armed(machine: VirtualMachine) -> None:
    change = Change(machine)
    change.files = change.files[:1]
    before = machine.sh("cat /proc/sys/kernel/random/boot_id")
    change.installed(150)  # long enough to be in place on a slow machine, and over soon after its boot
    machine.sh("systemctl reboot", check=False)
    machine.close()
    until(lambda: _boot_id(machine) not in ("", before), "the machine is back in another boot", 600)
    until(lambda: change.state().state == "fired", "the guard takes it back after the boot", 300)
    assert change.is_old()


def _boot_id(machine: VirtualMachine) -> str:
    try:
        return machine.sh("cat /proc/sys/kernel/random/boot_id", check=False).strip()
    except Exception:  # whatever a machine that is down makes of a login
        return ""

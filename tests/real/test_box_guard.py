"""The guard, the lease and detached steps on a real systemd: what takes itself back when nobody says anything, and when not."""

from __future__ import annotations

import hashlib
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.changes import detached, lease
from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.errors import LeaseHeld
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Result
from proofbook.probes.change_state import GuardState, StepState
from proofbook.probes.change_state import LeaseHeld as LeaseProbe
from proofbook.remote.guard import parse_guard

from .conftest import Machine, until

pytestmark = pytest.mark.box

UNIT = "sglang-qwen.service"
PATH = f"/etc/systemd/system/{UNIT}"
DROP_IN = f"{PATH}.d/50 mtp.conf"
#: With this drop-in the unit crashes in a loop, as a wrong flag makes it.
CRASHES = b"[Service]\nExecStart=\nExecStart=/bin/sh -c 'exit 2'\nRestartSec=50ms\n"


def content(machine: Machine, path: str = PATH) -> bytes:
    return machine.run("cat", path).stdout


class Change:
    """The main file edited, and a drop-in beside it that makes the unit crash."""

    def __init__(self, machine: Machine, run_id: str = "run-1") -> None:
        self.machine, self.guard = machine, Guard(run_id, UNIT)
        self.old = content(machine)
        assert b"launch_server" in self.old
        self.new = self.old.replace(b"launch_server", b"launch_server --mem-fraction-static 0.61")
        self.files = (
            FileChange(PATH, hashlib.sha256(self.old).hexdigest(), self.new),
            FileChange(DROP_IN, None, CRASHES),
        )
        self.pid = self.main_pid()

    def main_pid(self) -> str:
        return self.machine.sh(f"systemctl show -P MainPID {UNIT}")

    def ask(self, asked: Command) -> Result:
        with self.machine.transport() as transport:
            return transport.run(asked)

    def do(self, *asked: Command) -> GuardStatus:
        for one in asked:
            status = self.guard.done(self.ask(one))
        return status

    def installed(self, seconds: int) -> None:
        assert self.do(self.guard.stage(self.files), self.guard.arm(seconds)).guarded
        assert self.do(self.guard.install()).all_new

    def is_old(self) -> bool:
        """Byte for byte the old state, nothing beside it, and the unit serves with a process that the old file started."""
        assert content(self.machine) == self.old
        left = self.machine.sh(
            "find /etc/systemd /run/systemd/system -name '*proofbook*' -o -name '*mtp*'; ls /var/lib/systemd/timers"
        )
        assert "proofbook" not in left and "mtp" not in left, left
        assert self.machine.sh(f"test -e {PATH}.d || echo none") == "none"
        shown = self.machine.sh(f"systemctl show -p NeedDaemonReload -p ActiveState {UNIT}").split()
        assert sorted(shown) == ["ActiveState=active", "NeedDaemonReload=no"]
        cmdline = self.machine.sh(f"tr '\\0' ' ' < /proc/{self.main_pid()}/cmdline")
        assert "launch_server" in cmdline and "0.61" not in cmdline, cmdline
        return True

    def state(self) -> GuardStatus:
        value: GuardStatus = self.machine.value(GuardState(self.guard.run_id))
        return value


@pytest.fixture
def change(fresh: Machine) -> Change:
    return Change(fresh)


def test_nobody_confirms(change: Change) -> None:
    """The runner dies after the change; the new configuration crashes in a loop until systemd gives up. The guard does not."""
    change.installed(600)
    change.machine.sh(f"systemctl restart {UNIT} || true")
    until(lambda: change.machine.sh(f"systemctl show -P ActiveState {UNIT}") == "failed", "systemd gives up on the new unit")
    assert change.machine.sh(f"systemctl start {UNIT}", check=False) == ""
    assert change.machine.sh(f"systemctl show -P Result {UNIT}") != "success"
    change.do(change.guard.extend(3))
    until(lambda: change.state().state == "fired", "the guard takes it back")
    status = change.state()
    assert (status.outcome, status.all_old) == ("fired", True)
    assert change.is_old()
    assert change.main_pid() not in ("0", change.pid)
    assert change.do(change.guard.clean()).state == "none"
    assert change.machine.sh("ls -A /var/lib/proofbook/changes") == ""


def test_confirmed_in_time(change: Change) -> None:
    change.files = change.files[:1]
    change.installed(600)
    assert change.do(change.guard.confirm()).outcome == "confirmed"
    change.machine.sh("systemctl daemon-reload")
    assert content(change.machine) == change.new
    assert change.machine.sh("systemctl list-timers --all --no-legend 'proofbook*'; find /etc/systemd -name '*proofbook*'") == ""
    assert change.machine.sh("ls -A /var/lib/proofbook/changes; ls /var/lib/systemd/timers").find("proofbook") < 0
    assert change.main_pid() == change.pid, "to confirm restarts nothing"


def test_a_reboot_in_between_and_the_time_runs_out_after_it(change: Change) -> None:
    change.installed(60)
    change.machine.box.reboot()
    change.machine.booted()
    status = change.state()
    assert (status.state, status.all_new, status.guarded) == ("armed", True, True), status
    until(lambda: change.state().state == "fired", "the guard takes it back in the next life", limit_s=120)
    assert change.is_old()


def test_the_power_was_off_when_the_time_ran_out(change: Change) -> None:
    change.installed(600)
    deadline = change.do(change.guard.extend(30)).deadline
    assert deadline is not None
    change.machine.box.power_off()
    until(lambda: datetime.now(UTC) > deadline, "the time runs out while it is dark")
    change.machine.box.power_on()
    change.machine.box.up()
    change.machine.booted()
    until(lambda: change.state().state == "fired", "the guard takes it back at the boot")
    assert change.is_old()


@pytest.mark.parametrize("at", [1, 4, 6, 8])
def test_killed_in_the_middle_of_installing(fresh: Machine, at: int) -> None:
    """kill -9 of the program at its ``at``-th write; then the guard's way back."""
    change = Change(fresh)
    change.do(change.guard.stage(change.files), change.guard.arm(600))
    fresh.write(
        "/tmp/deadly/mv",
        f'#!/bin/sh\necho x >> /tmp/deadly/n\n[ "$(wc -l < /tmp/deadly/n)" != {at} ] || kill -9 $PPID\nexec /usr/bin/mv "$@"\n',
    )
    fresh.sh("chmod +x /tmp/deadly/mv; cp /tmp/deadly/mv /tmp/deadly/sync; sed -i s,/usr/bin/mv,/usr/bin/sync, /tmp/deadly/sync")
    asked = change.guard.install()
    killed = change.ask(Command(("env", "PATH=/tmp/deadly:/usr/bin:/bin", *asked.argv), root=True))
    assert killed.exit_status == 137, killed
    assert change.state().state == "armed"
    assert change.do(change.guard.fire()).all_old
    assert change.is_old()
    change.do(change.guard.clean())
    assert change.do(change.guard.stage(change.files), change.guard.arm(600), change.guard.install()).all_new


def test_the_guards_own_process_is_killed_while_it_takes_back(change: Change) -> None:
    """As after a power cut: "firing" is written, nothing more was done. It is looked at again by itself."""
    change.installed(600)
    change.machine.sh("ln -f /var/lib/proofbook/changes/run-1/words/firing /var/lib/proofbook/changes/run-1/state")
    change.machine.box.reboot()
    change.machine.booted()
    until(lambda: change.state().state == "fired", "it goes on after the boot", limit_s=120)
    assert change.is_old()


def test_two_at_once(change: Change) -> None:
    change.installed(600)
    answers: list[Result] = []
    threads = [threading.Thread(target=lambda: answers.append(change.ask(change.guard.fire()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [parse_guard(a).state for a in answers] == ["fired", "fired"], answers
    starts = change.machine.sh(f"journalctl -u {UNIT} -o cat --no-pager | grep -c '^Started '")
    assert starts == "2", "once at the boot, once by the two"
    assert change.is_old()


def test_drift_is_refused_and_a_link_is_named(change: Change) -> None:
    change.machine.sh(f"echo '# by hand' >> {PATH}")
    status = parse_guard(change.ask(change.guard.stage(change.files)))
    assert (status.code, status.state) == (76, "none")
    change.machine.sh(f"mv {PATH} /opt/real.service; ln -s /opt/real.service {PATH}")
    status = parse_guard(change.ask(change.guard.stage(change.files)))
    assert status.code == 76
    assert "/opt/real.service" in status.refused


def test_more_time_and_by_an_ordinary_user(change: Change) -> None:
    with change.machine.transport("ops") as transport:
        for asked in (change.guard.stage(change.files), change.guard.arm(20), change.guard.extend(900), change.guard.status()):
            status = change.guard.done(transport.run(asked))
        assert status.left_s is not None
        assert status.left_s > 800
        assert change.guard.done(transport.run(change.guard.fire())).outcome == "fired"
    with change.machine.transport("plain") as transport:
        assert transport.run(change.guard.status()).exit_status != 0


def test_a_full_disk(change: Change) -> None:
    """The new configuration fills the disk with its log; the way back needs no byte."""
    change.machine.sh(
        "mkdir -p /var/lib/proofbook && mount -t tmpfs -o size=2m small /var/lib/proofbook && "
        "mkdir -p /opt/units && mount -t tmpfs -o size=1m small /opt/units && cp " + PATH + " /opt/units/"
    )
    where = f"/opt/units/{UNIT}"
    files = (FileChange(where, hashlib.sha256(change.old).hexdigest(), change.new),)
    change.do(change.guard.stage(files), change.guard.arm(600), change.guard.install())
    for folder in ("/opt/units", "/var/lib/proofbook"):
        change.machine.sh(f"dd if=/dev/zero of={folder}/full bs=4k 2> /dev/null || true; ! echo x > {folder}/more", check=False)
    status = parse_guard(change.ask(change.guard.fire()))
    assert (status.state, status.all_old) == ("fired", True), status
    assert content(change.machine, where) == change.old


def test_what_would_not_survive_a_reboot_is_refused(change: Change) -> None:
    change.machine.sh("mkdir -p /var/lib/proofbook && mount -t tmpfs small /var/lib/proofbook")
    status = parse_guard(change.ask(change.guard.stage(change.files)))
    assert status.code == 69
    assert "/var/lib/proofbook is lost at a reboot" in status.refused


# ---------------------------------------------------------------------------------------------------------- lease


def test_one_run_has_the_lease(fresh: Machine) -> None:
    results: dict[str, Result] = {}

    def ask(name: str) -> None:
        with fresh.transport() as transport:
            results[name] = transport.run(lease.acquire(name, f"{name}@laptop", 600))

    threads = [threading.Thread(target=ask, args=(f"run-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [name for name, result in results.items() if result.exit_status == 0]
    assert len(won) == 1, results
    for name, result in results.items():
        if name not in won:
            with pytest.raises(LeaseHeld, match=won[0]):
                lease.obtained(result, name)
    held: Any = fresh.value(LeaseProbe())
    assert (held.run, held.other_boot) == (won[0], False)
    fresh.box.reboot()
    fresh.booted()
    held = fresh.value(LeaseProbe())
    assert held.run == won[0], "a run may reboot its machine"
    fresh.run(*lease.break_lease(won[0], "mira").argv)
    assert fresh.value(LeaseProbe()) is None
    assert "by=mira" in fresh.sh("cat /var/lib/proofbook/lease.log")


# ------------------------------------------------------------------------------------------------- detached steps


def test_detached_steps(fresh: Machine) -> None:
    def ask(asked: Command) -> Any:
        with fresh.transport() as transport:
            return detached.parse(transport.run(asked))

    words = ["sh", "-c", 'echo "$0 $HOME it\'s 100%% $$"; echo err >&2; exit 3', "a  b"]
    assert ask(detached.status("run-1", "count")).state == "never"
    ask(detached.start("run-1", "count", words, None, 60))
    until(lambda: fresh.value(StepState("run-1", "count")).state == "ended", "the step ends")
    ended = fresh.value(StepState("run-1", "count"))
    assert (ended.exit_status, ended.result) == (3, "exit-code")
    assert ask(detached.start("run-1", "count", words, None, 60)).state == "ended", "what was run is not run again"
    with fresh.transport() as transport:
        out = transport.run(detached.output("run-1", "count")).text
        assert transport.run(detached.output("run-1", "count", stream="err")).text == "err\n"
    assert out.startswith("a  b ")
    assert "it's 100%% " in out, "no word of it was expanded on the way"

    assert ask(detached.start("run-1", "killed", ["sleep", "1000"], None, 600)).state == "running"
    # WHY not `systemctl kill`: some kernels (seen: 6.18) let nothing more start in a control group that was killed as a whole.
    fresh.sh(f"kill -KILL $(systemctl show -P MainPID {detached.unit_of('run-1', 'killed')})")
    until(lambda: ask(detached.status("run-1", "killed")).state == "ended", "systemd says how it ended")
    killed = ask(detached.status("run-1", "killed"))
    assert (killed.exit_status, killed.result) == (137, "signal")

    ask(detached.start("run-1", "slow", ["sleep", "1000"], None, 1))
    until(lambda: ask(detached.status("run-1", "slow")).state == "ended", "its time is used up")
    assert ask(detached.status("run-1", "slow")).result == "timeout"

    ask(detached.start("run-1", "lost", ["sleep", "1000"], None, 600))
    fresh.box.reboot()
    fresh.booted()
    lost = ask(detached.status("run-1", "lost"))
    assert (lost.state, "shut down" in lost.why) == ("lost", True)
    ask(detached.start("run-1", "dark", ["sleep", "1000"], None, 600))
    fresh.box.power_off()
    fresh.box.power_on()
    fresh.box.up()
    fresh.booted()
    dark = ask(detached.status("run-1", "dark"))
    assert (dark.state, "started anew" in dark.why) == ("lost", True)
    assert fresh.sh("systemctl list-units --all --no-legend 'proofbook*'") == ""
    assert ask(detached.clean("run-1")).state == "never"


def test_behind_a_prefix(shared: Machine) -> None:
    """As it is said to a container: the words go through another program's hands."""
    guard = Guard("run-9", UNIT, ContainerSpec(name="x", kind="lxc"))
    assert guard.status().argv[:4] == ("lxc-attach", "--name", "x", "--")
    inner = guard.status().argv[4:]
    assert parse_guard(shared.run("env", "--", *inner)).state == "none"

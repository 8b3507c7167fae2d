"""Guarded changes, the lease and detached steps on a simulated machine: as the programs do it to a real one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from proofbook.changes import detached, lease
from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.errors import ApprovalUsed, LeaseHeld
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Result
from proofbook.remote.guard import parse_guard

from ..remote.change_lab import Root

UNIT = "sglang-qwen.service"
PATH = f"/etc/systemd/system/{UNIT}"
DROP_IN = f"{PATH}.d/50-mtp.conf"
INSIDE = ContainerSpec(name="llm-two", kind="pct", id="102")


def ask(machine: Any, asked: Command) -> Result:
    answer = machine.argv(*asked.argv, stdin=asked.stdin)
    return Result(asked, answer.status, answer.stdout, answer.stderr, datetime.now(UTC), 0.0)


class Change:
    def __init__(self, machine: Any) -> None:
        self.machine, self.guard = machine, Guard("run-1", UNIT, INSIDE)
        self.old = self.read()
        self.new = self.old.replace(b"launch_server", b"launch_server --mem-fraction-static 0.7")
        assert self.new != self.old
        self.files = (
            FileChange(PATH, hashlib.sha256(self.old).hexdigest(), self.new, 0o640),
            FileChange(DROP_IN, None, b"[Service]\nEnvironment=A=1\n"),
        )

    def read(self) -> bytes:
        content: bytes = self.machine.argv("pct", "exec", "102", "--", "cat", PATH).stdout
        return content

    def do(self, *asked: Command) -> GuardStatus:
        for one in asked:
            status = self.guard.done(ask(self.machine, one))
        return status

    def status(self) -> GuardStatus:
        return parse_guard(ask(self.machine, self.guard.status()))

    def shown(self, name: str) -> str:
        text: str = self.machine.say(f"pct exec 102 -- systemctl show {UNIT} --property={name} --value")
        return text.strip()

    def installed(self, seconds: int) -> None:
        assert self.do(self.guard.stage(self.files), self.guard.arm(seconds)).guarded
        assert self.do(self.guard.install()).all_new
        self.machine.say(f"pct exec 102 -- systemctl restart {UNIT}")


@pytest.fixture
def change(bench: Callable[[str], Any]) -> Change:
    return Change(bench("healthy"))


def test_nobody_confirms(change: Change) -> None:
    change.installed(900)
    assert "0.7" in change.shown("ExecStart")
    changed = change.shown("InvocationID")
    change.machine.wait(890)
    assert change.status().state == "armed"
    change.machine.wait(100)
    status = change.status()
    assert (status.state, status.outcome, status.all_old, status.active) == ("fired", "fired", True, "active")
    assert change.read() == change.old
    assert "--mem-fraction-static 0.7 " not in change.shown("ExecStart") + " "
    assert change.shown("InvocationID") != changed
    assert change.do(change.guard.clean()).state == "none"


def test_confirmed(change: Change) -> None:
    change.installed(900)
    running = change.shown("InvocationID")
    assert change.do(change.guard.confirm()).outcome == "confirmed"
    assert change.do(change.guard.confirm()).outcome == "confirmed"
    change.machine.wait(2000)
    assert change.read() == change.new
    assert change.shown("InvocationID") == running


def test_more_time(change: Change) -> None:
    change.installed(900)
    change.machine.wait(800)
    assert change.do(change.guard.extend(900)).left_s == 900
    change.machine.wait(800)
    assert change.status().state == "armed"
    change.machine.wait(200)
    assert change.status().state == "fired"


def test_taken_back_at_once(change: Change) -> None:
    change.installed(900)
    assert change.do(change.guard.fire()).all_old
    assert change.do(change.guard.fire()).state == "fired"
    assert change.read() == change.old
    assert change.machine.argv("pct", "exec", "102", "--", "ls", f"{PATH}.d").status != 0


def test_suspended_for_a_while(change: Change) -> None:
    change.installed(900)
    suspended = change.do(change.guard.suspend())
    assert (suspended.all_old, suspended.guarded, change.read()) == (True, True, change.old)
    assert "0.7" not in change.shown("ExecStart"), "systemd has read the old files"
    assert change.do(change.guard.install()).all_new
    assert change.read() == change.new
    change.do(change.guard.suspend())
    change.machine.wait(1000)
    assert (change.status().state, change.read()) == ("fired", change.old)


@pytest.mark.parametrize("how", ["machine", "container"])
def test_it_survives_a_reboot(change: Change, how: str) -> None:
    change.installed(3000)
    if how == "machine":
        change.machine.reboot(600)
    else:
        change.machine.say("pct stop 102 && pct start 102")
        change.machine.wait(100)
    assert "0.7" in change.shown("ExecStart"), "the new file is what the boot started"
    assert change.status().guarded
    change.machine.wait(3000)
    assert (change.status().state, change.read()) == ("fired", change.old)


def test_the_deadline_passed_while_the_machine_was_down(change: Change) -> None:
    change.installed(30)
    change.machine.reboot(600)
    assert (change.status().state, change.read()) == ("fired", change.old)
    assert "0.7" not in change.shown("ExecStart")


def test_drift_links_and_other_changes_are_refused(change: Change) -> None:
    other = Guard("run-2", UNIT, INSIDE)
    change.do(change.guard.stage(change.files), change.guard.arm(900))
    assert parse_guard(ask(change.machine, other.stage(change.files))).code == 77
    change.do(change.guard.fire())
    change.machine.say(f"pct exec 102 -- sh -c 'echo \"# by hand\" >> {PATH}'")
    assert parse_guard(ask(change.machine, other.stage(change.files))).code == 76
    change.machine.say(f"pct exec 102 -- sh -c 'mv {PATH} /opt/real.service; ln -s /opt/real.service {PATH}'")
    refused = parse_guard(ask(change.machine, other.stage(change.files)))
    assert (refused.code, "/opt/real.service" in refused.refused) == (76, True)
    for verb, code in [(other.arm(60), 77), (other.install(), 77), (other.confirm(), 66), (other.fire(), 66)]:
        assert parse_guard(ask(change.machine, verb)).code == code


def test_the_simulated_guard_says_what_the_real_program_says(change: Change, tmp_path: Path) -> None:
    """Step by step, also the refusals: everything but times, the timer's name for its waiting and the file system."""
    root = Root(tmp_path)
    unit = root.etc / UNIT
    unit.write_bytes(change.old)
    root.active(UNIT, "active")
    digest = hashlib.sha256(change.old).hexdigest()
    real_files = (FileChange(str(unit), digest, change.new, 0o640), FileChange(f"{unit}.d/50-mtp.conf", None, b"x"))
    real_guard = Guard("run-1", UNIT)

    def said(status: GuardStatus) -> tuple[object, ...]:
        log = [line.split(" ", 1)[1].replace(str(tmp_path), "") for line in status.log]
        content = [f.content for f in status.files]
        return (
            status.state,
            status.unit,
            status.was_active,
            status.touched,
            content,
            log,
            status.outcome,
            status.code,
            status.refused.replace(str(tmp_path), ""),
        )

    verbs: list[tuple[str, tuple[int, ...]]] = [
        ("status", ()), ("confirm", ()), ("arm", (60,)), ("suspend", ()), ("stage", ()), ("confirm", ()), ("install", ()),
        ("arm", (600,)), ("confirm", ()), ("suspend", ()), ("clean", ()), ("install", ()), ("stage", ()), ("extend", (900,)),
        ("suspend", ()), ("suspend", ()), ("confirm", ()), ("install", ()), ("fire", ()), ("install", ()), ("suspend", ()),
        ("confirm", ()), ("clean", ()), ("fire", ()), ("stage", ()), ("arm", (600,)), ("install", ()), ("suspend", ()),
        ("install", ()), ("confirm", ()), ("confirm", ()), ("suspend", ()), ("status", ()),
    ]  # fmt: skip
    for verb, words in verbs:
        mine = change.guard.stage(change.files) if verb == "stage" else getattr(change.guard, verb)(*words)
        real = real_guard.stage(real_files) if verb == "stage" else getattr(real_guard, verb)(*words)
        assert said(parse_guard(ask(change.machine, mine))) == said(parse_guard(root.run(real))), verb


def test_the_lease_and_approvals(change: Change) -> None:
    machine, digest = change.machine, "sha256:" + "ab" * 32
    first = lease.obtained(ask(machine, lease.acquire("run-1", "mira@laptop", 600)), "run-1")
    assert (first.run, first.expired, first.other_boot) == ("run-1", False, False)
    with pytest.raises(LeaseHeld, match="mira@laptop"):
        lease.obtained(ask(machine, lease.acquire("run-2", "noa", 600)), "run-2")
    assert lease.used(ask(machine, lease.use(digest, "run-1")), digest, "run-1").run == "run-1"
    assert lease.used(ask(machine, lease.use(digest, "run-1")), digest, "run-1").run == "run-1"
    machine.wait(700)
    held = lease.held(ask(machine, lease.show()))
    assert held is not None
    assert held.expired
    assert "ran out" in lease.explain(held, held.now)
    assert lease.held(ask(machine, lease.break_lease("run-1", "noa"))) is None
    with pytest.raises(LeaseHeld, match="broke it"):
        lease.obtained(ask(machine, lease.renew("run-1", 600)), "run-1")
    lease.obtained(ask(machine, lease.acquire("run-2", "noa", 600)), "run-2")
    with pytest.raises(ApprovalUsed, match="run-1"):
        lease.used(ask(machine, lease.use(digest, "run-2")), digest, "run-2")
    machine.reboot()
    held = lease.held(ask(machine, lease.show()))
    assert held is not None
    assert held.other_boot
    assert lease.held(ask(machine, lease.release("run-2"))) is None


def test_detached_steps(change: Change) -> None:
    machine = change.machine

    def step(asked: Command) -> Any:
        return detached.parse(ask(machine, asked))

    assert step(detached.status("run-1", "wait", INSIDE)).state == "never"
    assert step(detached.start("run-1", "wait", ["sleep", "60"], INSIDE, 600)).state == "running"
    machine.wait(61)
    ended = step(detached.status("run-1", "wait", INSIDE))
    assert (ended.state, ended.exit_status, ended.result) == ("ended", 0, "success")
    assert step(detached.start("run-1", "wait", ["sleep", "60"], INSIDE, 600)).state == "ended"
    assert step(detached.start("run-1", "cat", ["cat", "/etc/hostname", "/none"], None, 60)).exit_status == 1
    assert ask(machine, detached.output("run-1", "cat", after=2)).text == machine.say("hostname")[2:]
    step(detached.start("run-1", "late", ["sleep", "600"], None, 30))
    machine.wait(31)
    assert (step(detached.status("run-1", "late")).exit_status, step(detached.status("run-1", "late")).result) == (143, "timeout")
    step(detached.start("run-1", "lost", ["sleep", "6000"], None, 9000))
    machine.reboot(400)
    assert step(detached.status("run-1", "lost")).state == "lost"
    assert step(detached.clean("run-1")).state == "never"

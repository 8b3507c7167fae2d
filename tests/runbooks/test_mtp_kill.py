"""kill -9 of a run that changes a server, at the boundaries of its journal: then it is gone on with, or taken back.

The player (``player.py``) is launcher and kernel in one process; it dies at a line of the journal. The change is carried out
on a simulated machine as always, what is measured around it is not. After every death each of the unit's files is as it was,
byte for byte, or as the change has it; after ``resume`` all are new, after ``rollback`` all are old.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proofbook import leases
from proofbook.archive import Archive
from proofbook.begun import next_steps
from proofbook.changes import lease
from proofbook.changes.unit_edit import drop_in_paths
from proofbook.host import Host
from proofbook.inventory import connect, load_inventory
from proofbook.journal import JOURNAL, read_journal
from proofbook.lab.sim import client
from proofbook.model import Observation, Seen, command
from proofbook.probes.base import drive
from proofbook.probes.change_state import GuardState, LeaseHeld
from proofbook.probes.systemd import UnitProcess
from proofbook.probes.unit_files import UnitFiles
from proofbook.record import RunRecord
from proofbook.remote.guard import GuardStatus
from proofbook.remote.lease import Lease

pytestmark = [pytest.mark.lab, pytest.mark.runbook]

SCENARIO = "healthy"
NAME = f"lab:{SCENARIO}"
SPEC = load_inventory().resolve(NAME)
(SERVICE,) = SPEC.services
CONTAINER = next(c for c in SPEC.containers if c.name == SERVICE.container)
#: The shortest guard that the runbook accepts here: nobody waits longer for it than needed.
PARAMETERS = {"host": NAME, "concurrency": "1", "stability_minutes": 1.0, "guard_minutes": 50.0}

#: With the third arm: the old configuration comes back for a while before the change is kept.
AGAIN = {**PARAMETERS, "measure_again": True, "guard_minutes": 85.0}

#: Every act of the change, in order; an undisturbed run is held against it.
ACTS = (
    "take the machine's lease",
    "use the approval up, on the machine itself",
    "keep the old files and bring the new ones",
    "arm the guard for 50 min",
    "put the new files in place",
    f"stop {SERVICE.name}",
    f"forget earlier failures of {SERVICE.name}",
    f"start {SERVICE.name}",
    "hold the machine's lease for longer",
    "keep the change: take the guard away",
    "give the machine's lease back",
)


# ------------------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True)
class Found:
    """What the machine holds: the unit's files, the running command, and what is left of a change."""

    files: Mapping[str, str]
    argv: tuple[str, ...]
    guard: GuardStatus
    lease: Lease | None
    boot_id: str

    @property
    def left(self) -> list[str]:
        """What a finished change must not leave behind."""
        guard = [f"change {self.guard.state}"] if self.guard.state != "none" else []
        timer = [f"timer {self.guard.guard}"] if self.guard.guard.get("ActiveState") == "active" else []
        return [*guard, *timer, *([f"lease of {self.lease.run}"] if self.lease else [])]


def found(run: str = "nobody") -> Found:
    files = UnitFiles(SERVICE.name, CONTAINER, drop_in_paths(SERVICE.name))
    process, guard, lease = UnitProcess(SERVICE.name, CONTAINER), GuardState(run, CONTAINER), LeaseHeld()
    with reached() as host:
        seen = Seen(
            Observation(p, a.value, a.unknown, host.clock.now(), host.identity.boot_id)
            for p, a in drive([files, process, guard, lease], host.gather).items()
        )
    running = seen[process].value  # none while it is down between its stop and its start
    return Found(
        {f.path: f.text for f in seen.value(files).files},
        running.argv if running else (),
        seen.value(guard),
        seen.value(lease),
        seen[guard].boot_id,
    )


class reached:
    """A login of the test's own, beside the runs."""

    def __enter__(self) -> Host:
        self._host = Host(NAME, *connect(SPEC))
        self._host.prove()
        return self._host

    def __exit__(self, *_: object) -> None:
        self._host.close()


def on_the_machine(*argv: str) -> str:
    with reached() as host:
        return host.transport.run(command(*CONTAINER.enter(), *argv, root=True)).expect()


def let_pass(minutes: float) -> None:
    client.LabClock(client.folder(SCENARIO)).sleep(minutes * 60)


# -------------------------------------------------------------------------------------------------- the player


class Player:
    """The program that plays runs; see ``player.py``."""

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs
        program = [sys.executable, str(Path(__file__).with_name("player.py"))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asked = 0

    def begin(self, verb: str, **request: Any) -> None:
        """Ask for a run and do not wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, "outputs": str(self.outputs), **request}) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert not said["error"], said["error"]
        return said

    def play(self, verb: str, **request: Any) -> dict[str, Any]:
        """A run that lives to its end: how it came out."""
        self.begin(verb, **request)
        said = self.end()
        assert not said["killed"]
        outcome: dict[str, Any] = said["outcome"]
        return outcome

    def run(self, *, at: Mapping[str, Any] | None = None, **request: Any) -> dict[str, Any]:
        return self.play("run", parameters=PARAMETERS, plain=True, at=at, **request)

    def resume(self, run: str, *, plain: bool = True) -> dict[str, Any]:
        return self.play("resume", run=run, plain=plain)

    def roll_back(self, run: str) -> dict[str, Any]:
        return self.play("rollback", run=run)

    def dies(self, event: str, nth: int, when: str, verb: str = "run", **request: Any) -> str:
        """A run that is killed at a boundary of its journal; its id."""
        before = {b.run_id for b in self.book.runs()}
        at = {"event": event, "nth": nth, "when": when, "what": "kill"}
        self.begin(verb, **{"parameters": PARAMETERS, "plain": True, "approve": "alice", "at": at, **request})
        assert self.end()["killed"], "the boundary never came"
        (run,) = [b.run_id for b in self.book.runs() if b.run_id not in before]
        return run

    @property
    def book(self) -> Archive:
        return Archive(self.outputs)

    def record(self, outcome: Mapping[str, Any]) -> RunRecord:
        return self.book.load(outcome["run_id"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def players(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """One player for all the deaths."""
    here = Player(tmp_path_factory.mktemp("outputs"))
    yield here
    here.close()


@dataclass(frozen=True)
class Ends:
    """The machine before the change, and with it."""

    old: Found
    new: Found
    acts: tuple[str, ...]


@pytest.fixture(scope="module")
def ends(players: Player) -> Ends:
    """An undisturbed run, taken back afterwards: its acts are the boundaries, its files the only two states that may be seen."""
    client.reset(SCENARIO)
    old = found()
    kept = players.run(approve="alice")
    assert kept["status"] == "completed"
    new = found(kept["run_id"])
    folder = players.book.folder_of(kept["run_id"])
    assert folder is not None
    acts = [e["data"]["what"] for e in read_journal(folder / JOURNAL).events if e["event"] == "act.intent"]
    assert players.roll_back(kept["run_id"])["status"] == "completed"
    assert found(kept["run_id"]).files == old.files
    return Ends(old, new, tuple(acts))


@pytest.fixture(autouse=True)
def old(ends: Ends) -> None:
    """Every test begins on a machine that nobody has changed."""
    with reached() as host:
        changes = host.gather([command(*CONTAINER.enter(), "ls", "/var/lib/proofbook/changes", root=True)])[0].text
    now = found()
    if (now.files, now.argv, now.lease) != (ends.old.files, ends.old.argv, None) or changes.strip():
        client.reset(SCENARIO)


def test_these_are_the_acts(ends: Ends) -> None:
    assert ends.acts == ACTS
    assert ends.new.files != ends.old.files
    assert ends.new.argv != ends.old.argv
    assert ends.new.left == []


# --------------------------------------------------------------------------------------------------- the deaths


# Only one of the acts that leave the machine alike is died at; begun.py is held against every line of a journal.
@pytest.mark.parametrize("act", (3, 4, 5, 6, 8, 10))
def test_killed_when_an_act_was_done_and_not_told_then_taken_back(players: Player, ends: Ends, act: int) -> None:
    run = players.dies("act.outcome", act, "instead")
    assert found(run).files in (ends.old.files, ends.new.files)
    undone = players.roll_back(run)
    assert (undone["status"], undone["exit_code"], undone["message"]) == ("completed", 0, "")
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.old.files, ends.old.argv, [])
    again = players.roll_back(run)
    assert (again["status"], again["exit_code"]) == ("refused", 2)
    assert f"was taken back already by run {undone['run_id']}" in again["message"]
    assert "was taken back already" in players.resume(run)["message"]


@pytest.mark.parametrize("act", (1, 4, 5, 7, 10, 11))
def test_killed_when_an_act_was_meant_and_not_begun_then_gone_on_with(players: Player, ends: Ends, act: int) -> None:
    run = players.dies("act.intent", act, "after")
    assert found(run).files in (ends.old.files, ends.new.files)
    went_on = players.resume(run)
    assert (went_on["status"], went_on["exit_code"], went_on["message"]) == ("completed", 0, "")
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.new.files, ends.new.argv, [])
    again = players.resume(run)
    assert (again["status"], again["exit_code"]) == ("refused", 2)
    assert f"by run {went_on['run_id']}, which is completed" in again["message"]


def test_what_was_gone_on_with_is_taken_back_by_its_first_name(players: Player, ends: Ends) -> None:
    run = players.dies("decision", 1, "after")
    assert players.resume(run)["status"] == "completed"
    undone = players.roll_back(run)
    assert (undone["status"], undone["verdict"]) == ("completed", "PASS")
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.old.files, ends.old.argv, [])
    assert players.record(undone).summary.startswith(f"Run {run}: the old files are back byte for byte")


def test_a_rollback_that_is_killed_is_said_again(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    half = players.dies("act.intent", 3, "after", verb="rollback", run=run)
    assert found(run).files in (ends.old.files, ends.new.files)
    assert f"name that one: proofbook rollback {run}" in players.roll_back(half)["message"]
    assert players.roll_back(run)["status"] == "completed"
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.old.files, ends.old.argv, [])


#: The guard's word that it stays is given and not told; told; and the machine not let go.
KEPT = (("act.outcome", 10, "instead"), ("applied", 2, "after"), ("act.intent", 11, "after"))


@pytest.mark.parametrize("boundary", KEPT)
def test_killed_when_it_was_kept_then_nothing_is_asked_again(players: Player, ends: Ends, boundary: tuple[str, int, str]) -> None:
    run = players.dies(*boundary)
    now = found(run)
    assert (now.files, now.guard.outcome) == (ends.new.files, "confirmed")
    went_on = players.resume(run, plain=False)
    assert (went_on["status"], went_on["exit_code"], went_on["verdict"], went_on["message"]) == ("completed", 0, "PASS", "")
    record = players.record(went_on)
    assert [f["check"] for f in record.findings] == ["mtp.KeptBefore"]
    assert f"by run {run} (PASS: " in record.findings[0]["reason"]
    assert not record.measurements
    assert [a["what"] for p in record.plans for a in p["acts"]] == [ACTS[0], ACTS[1], ACTS[-1]], "it lets the machine go"
    assert record.summary.startswith("This change was kept already at ")
    assert "The decision stands (PASS)" in record.summary
    assert found(run).left == []
    assert (found(run).files, found(run).argv) == (ends.new.files, ends.new.argv)
    assert players.book.verify(run) == []
    assert "which is completed" in players.resume(run)["message"]
    assert players.roll_back(run)["status"] == "completed"


# ------------------------------------------------------------------------------------------------ the third arm

#: Boundaries between the suspension and the end: old files put back and not told, old server serving, new files put in
#: place again and not told.
BETWEEN = (("act.outcome", 11, "instead"), ("applied", 2, "after"), ("act.outcome", 17, "instead"))


def test_these_are_the_acts_of_the_third_arm(players: Player, ends: Ends) -> None:
    kept = players.play("run", parameters=AGAIN, plain=True, approve="alice")
    assert kept["status"] == "completed"
    acts = [a["what"] for p in players.record(kept).plans for a in p["acts"]]
    restart = [f"stop {SERVICE.name}", f"forget earlier failures of {SERVICE.name}", f"start {SERVICE.name}"]
    hold = ["hold the machine's lease for longer", "give the guard its whole time again"]
    between = [*hold, "put the old files back for a while", *restart, *hold, "put the new files in place", *restart]
    assert acts[8:20] == between
    assert acts[20:] == list(ACTS[8:])
    now = found(kept["run_id"])
    assert (now.files, now.argv, now.left) == (ends.new.files, ends.new.argv, [])
    assert players.roll_back(kept["run_id"])["status"] == "completed"
    assert found(kept["run_id"]).files == ends.old.files


@pytest.mark.parametrize("boundary", BETWEEN)
@pytest.mark.parametrize("then", ("rollback", "resume"))
def test_killed_in_the_third_arm(players: Player, ends: Ends, boundary: tuple[str, int, str], then: str) -> None:
    run = players.dies(*boundary, parameters=AGAIN)
    half = found(run)
    assert half.files in (ends.old.files, ends.new.files)
    assert half.guard.guarded, "left alone the machine ends with the old state"
    if then == "resume":
        outcome, end = players.resume(run), ends.new
    else:
        outcome, end = players.roll_back(run), ends.old
    assert (outcome["status"], outcome["exit_code"], outcome["message"]) == ("completed", 0, "")
    now = found(run)
    assert (now.files, now.argv, now.left) == (end.files, end.argv, [])


def test_killed_in_the_third_arm_and_nobody_comes_back(players: Player, ends: Ends) -> None:
    run = players.dies("applied", 2, "after", parameters=AGAIN)
    let_pass(95)
    now = found(run)
    assert (now.files, now.argv, now.guard.state) == (ends.old.files, ends.old.argv, "fired")
    told = players.resume(run)
    assert (told["status"], told["exit_code"]) == ("rolled-back", 5)
    assert found(run).left == []


# ------------------------------------------------------------------------------------- what happens in between


def test_rebooted_between_death_and_resume(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 5, "after")
    with reached() as host:
        boot = host.identity.boot_id
        host.transport.run(command("systemctl", "reboot", root=True))
    let_pass(10)
    assert found(run).guard.guarded, "the guard survives the reboot"
    went_on = players.resume(run)
    assert (went_on["status"], found(run).files) == ("completed", ends.new.files)
    record = players.record(went_on)
    assert any("was rebooted since the change was planned" in line["text"] for line in record.timeline)
    assert found(run).left == []
    assert found(run).boot_id != boot


def test_the_guard_fired_before_anybody_came_back(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    let_pass(60)
    now = found(run)
    assert (now.files, now.guard.state) == (ends.old.files, "fired")
    told = players.resume(run, plain=False)
    assert (told["status"], told["exit_code"]) == ("rolled-back", 5)
    record = players.record(told)
    assert record.summary.startswith("The guard on the machine took this change back by itself at ")
    acts = [act["what"] for plan in record.plans for act in plan["acts"]]
    assert not set(acts) & {*ACTS[2:8]}, "nothing was applied again"
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.old.files, ends.old.argv, [])
    assert "was taken back already" in players.resume(run)["message"]


def test_somebody_else_wrote_into_the_drop_in_meanwhile(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    (path,) = ends.new.files.keys() - ends.old.files.keys()
    on_the_machine("sh", "-c", f"echo '# theirs' >> {path}")
    theirs = found(run).files
    went_on = players.resume(run)
    assert (went_on["status"], found(run).files) == ("aborted", theirs)
    assert "somebody else changed it" in went_on["message"]
    undone = players.roll_back(run)
    assert (undone["status"], undone["exit_code"]) == ("rollback-failed", 6)
    assert f"somebody else has changed {path} meanwhile" in undone["message"]
    assert found(run).files == theirs, "nothing was overwritten"
    by_hand = [line.strip() for line in undone["message"].splitlines() if line.strip().startswith("pct exec")]
    assert f"cp -p -- {path} {path}.theirs" in by_hand[0]
    inside = "".join(f"{line.removeprefix('pct exec 102 -- ')}; " for line in by_hand)
    on_the_machine("sh", "-c", inside)
    let_pass(5)
    assert players.roll_back(run)["status"] == "completed", "after it was done by hand, it is verified"
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.old.files, ends.old.argv, [])


def test_the_guard_keeps_what_somebody_else_wrote(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    (path,) = ends.new.files.keys() - ends.old.files.keys()
    on_the_machine("sh", "-c", f"echo '# theirs' >> {path}")
    let_pass(60)
    undone = players.roll_back(run)
    assert undone["status"] == "completed"
    assert "what somebody else had written there is kept: /var/lib/proofbook/theirs/" in players.record(undone).summary
    kept = on_the_machine("sh", "-c", f"cat /var/lib/proofbook/theirs/{run}/other.*")
    assert kept.endswith("# theirs\n")


def test_interrupted_while_it_is_put_in_effect(players: Player, ends: Ends) -> None:
    at = {"event": "act.outcome", "nth": 8, "when": "after", "what": "interrupt"}
    stopped = players.run(approve="alice", at=at)
    run = stopped["run_id"]
    assert (stopped["status"], stopped["exit_code"]) == ("aborted", 7)
    for text in (stopped["message"], players.record(stopped).summary):
        assert "interrupted" in text
        assert f"`proofbook rollback {run}` undoes it now, `proofbook resume {run}` goes on with it" in text
    now = found(run)
    assert now.guard.guarded
    assert now.lease is not None
    assert players.book.verify(run) == []
    assert players.roll_back(run)["status"] == "completed"
    assert found(run).files == ends.old.files


def test_the_answer_to_an_act_is_lost_with_the_connection(players: Player, ends: Ends) -> None:
    at = {"event": "act.intent", "nth": 5, "when": "after", "what": "cut"}
    lost = players.run(approve="alice", at=at)
    run = lost["run_id"]
    assert (lost["status"], lost["exit_code"]) == ("aborted", 7)
    assert lost["message"].startswith("the connection went away")
    assert f"`proofbook resume {run}` goes on with it" in lost["message"]
    now = found(run)
    assert (now.files, now.argv, now.guard.guarded) == (ends.new.files, ends.old.argv, True)
    (unheard,) = [a for p in players.record(lost).plans for a in p["acts"] if a["outcome"] == "unknown"]
    assert unheard["what"] == ACTS[4]
    assert players.resume(run)["status"] == "completed"
    now = found(run)
    assert (now.files, now.argv, now.left) == (ends.new.files, ends.new.argv, [])


def test_the_answer_to_the_keeping_is_lost_with_the_connection(players: Player, ends: Ends) -> None:
    kept = players.run(approve="alice", at={"event": "act.intent", "nth": 10, "when": "after", "what": "cut"})
    assert (kept["status"], kept["exit_code"], kept["message"]) == ("completed", 0, "")
    (unheard,) = [a for p in players.record(kept).plans for a in p["acts"] if a["outcome"] == "unknown"]
    assert unheard["what"] == ACTS[9]
    now = found(kept["run_id"])
    assert (now.files, now.argv, now.left) == (ends.new.files, ends.new.argv, [])


def test_the_record_is_removed_while_the_change_is_open(players: Player, ends: Ends) -> None:
    gone = players.run(approve="alice", at={"event": "act.outcome", "nth": 5, "when": "after", "what": "remove"})
    assert (gone["status"], gone["exit_code"], gone["record"]) == ("aborted", 7, None)
    assert "had begun to change the machine (the last that was sent: " in gone["message"]
    assert "its guard there takes it back when its time is over" in gone["message"]
    let_pass(60)
    assert found().files == ends.old.files


def test_a_run_that_died_at_its_own_taking_back_is_not_told_as_one_that_was_forgotten(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    players.dies("act.outcome", 3, "after", verb="rollback", run=run)
    went_on = players.resume(run)
    assert players.record(went_on).summary.startswith("A run had this change taken back before it ended at ")
    assert "nobody had kept it in time" not in players.record(went_on).summary
    assert found(run).files == ends.old.files


def test_the_disk_of_the_runner_runs_full_before_an_act(players: Player, ends: Ends) -> None:
    at = {"event": "act.intent", "nth": 5, "when": "instead", "what": "full"}
    full = players.run(approve="alice", at=at)
    assert (full["status"], full["exit_code"]) == ("aborted", 7)
    assert "free some space" in full["message"]
    assert f"proofbook rollback {full['run_id']}" in full["message"]
    assert players.book.verify(full["run_id"]) == []
    now = found(full["run_id"])
    assert (now.files, now.guard.guarded) == (ends.old.files, True), "what could not be written down was not done"
    assert players.resume(full["run_id"])["status"] == "completed"
    assert found(full["run_id"]).files == ends.new.files


# -------------------------------------------------------------------------------------- leases and approvals


def test_two_runners_at_once(players: Player, ends: Ends) -> None:
    at = {"event": "act.outcome", "nth": 4, "when": "after", "what": "pause"}
    second = Player(players.outputs)
    players.begin("run", parameters=PARAMETERS, plain=True, approve="alice", at=at)
    try:
        wait_for(players.outputs / "waiting")
        (first,) = [b.run_id for b in players.book.runs(status="running")]
        other = second.run(approve="bob")
        assert (other["status"], other["exit_code"]) == ("aborted", 7)
        assert f"another run changes this machine: run {first} of " in other["message"]
        assert f"proofbook lease show {NAME}" in other["message"]
        assert "Nothing was changed on the machine" in second.record(other).summary
        assert next_steps(players.book, first, NAME) == [f"run {first} is still at work: let it end, or stop it"]
        for refused in (second.resume(first), second.roll_back(first)):
            assert (refused["status"], refused["exit_code"]) == ("refused", 2)
            assert f"run {first} is still at work on it (process " in refused["message"]
    finally:
        (players.outputs / "go").touch()
        ended = players.end()
        second.close()
        for name in ("waiting", "go"):
            (players.outputs / name).unlink(missing_ok=True)
    assert ended["outcome"]["status"] == "completed"
    assert players.roll_back(first)["status"] == "completed"


def test_the_lease_of_a_dead_run_is_explained_and_broken_on_purpose(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 2, "after")
    held = leases.show(NAME)
    assert held is not None and held.run == run
    said = "\n".join(next_steps(players.book, run, NAME))
    for command_line in (f"proofbook resume {run}", f"proofbook rollback {run}", f"proofbook lease break {NAME} {run} --who"):
        assert command_line in said
    assert "is not in" in "\n".join(next_steps(Archive(players.outputs / "elsewhere"), run, NAME))
    assert leases.break_it(NAME, run, "mira at the console").run == run
    assert leases.show(NAME) is None


def test_what_another_run_holds_is_not_taken_back_and_it_is_said_what_to_type(players: Player, ends: Ends) -> None:
    run = players.dies("act.outcome", 8, "after")
    with reached() as host:
        host.transport.run(lease.break_lease(run, "mira"))
        lease.obtained(host.transport.run(lease.acquire("r-other", "mira@laptop", 600)), "r-other")
    told = players.roll_back(run)
    assert (told["status"], told["exit_code"]) == ("aborted", 7)
    assert "another run changes this machine: run r-other of mira@laptop has its lease" in told["message"]
    assert f"proofbook lease break {NAME} r-other --who YOUR-NAME" in told["message"]
    assert told["message"].splitlines()[-1] == f"  → then: proofbook rollback {run}"
    assert found(run).files == ends.new.files, "nothing was touched"
    leases.break_it(NAME, "r-other", "mira")
    assert players.roll_back(run)["status"] == "completed"
    assert found(run).files == ends.old.files


def test_an_approval_lets_one_run_through_and_a_new_one_the_next(players: Player, ends: Ends) -> None:
    waiting = players.run()
    digest = waiting["waiting_for"]["digest"]
    approved = {"parameters": {**PARAMETERS, "approved": digest, "approver": "alice"}, "plain": True}
    kept = players.play("run", **approved)
    assert kept["status"] == "completed"
    assert players.roll_back(kept["run_id"])["status"] == "completed"
    again = players.play("run", **approved)
    assert (again["status"], again["exit_code"]) == ("aborted", 7)
    assert "the approvals that were used there differ from what was read" in again["message"]
    assert found(kept["run_id"]).left == [], "a refused run holds nothing"
    anew = players.run()
    assert anew["waiting_for"]["digest"] != digest, "the same machine and the same change, but an approval was used since"
    assert players.run()["waiting_for"]["digest"] == anew["waiting_for"]["digest"], "nothing was used between these two"
    approved["parameters"]["approved"] = anew["waiting_for"]["digest"]
    kept = players.play("run", **approved)
    assert kept["status"] == "completed", kept["message"]
    assert players.roll_back(kept["run_id"])["status"] == "completed"


def test_an_approval_is_for_the_rule_too_by_which_it_would_be_kept(players: Player, ends: Ends) -> None:
    rule = {**PARAMETERS, "concurrency": "1,8", "must_gain_at": "8", "stability_minutes": 30.0, "guard_minutes": 90.0}
    waiting = players.play("run", parameters=rule, plain=True)
    given = {"approved": waiting["waiting_for"]["digest"], "approver": "alice"}
    other = players.play(
        "run", parameters={**rule, **given, "concurrency": "1", "must_gain_at": "", "stability_minutes": 0.05}, plain=True
    )
    assert (other["status"], "does not open this gate" in other["message"]) == ("aborted", True)
    assert found(other["run_id"]).left == []


def test_a_new_run_says_at_its_first_look_that_a_dead_one_holds_the_machine(players: Player, ends: Ends) -> None:
    dead = players.dies("act.outcome", 8, "after")
    new = players.play("run", parameters=PARAMETERS)
    assert (new["status"], new["verdict"]) == ("completed", "FAIL"), new["message"]
    record = players.record(new)
    (said,) = [f for f in record.findings if f["check"] == "machine.HeldByNobody"]
    assert (said["look"], said["verdict"]) == ("before", "FAIL")
    assert f"run {dead} of " in said["reason"] and "its guard takes the change of" in said["reason"]
    assert f"`proofbook resume {dead}`" in said["what_to_do"] and f"`proofbook rollback {dead}`" in said["what_to_do"]
    assert [p["actions"] for p in record.plans] == [[]], "no plan is offered"
    assert not record.measurements, "and no baseline of a server in mid-change is taken"
    assert players.roll_back(dead)["status"] == "completed"


def test_the_machine_changed_between_the_gate_and_the_act(players: Player, ends: Ends) -> None:
    at = {"event": "act.outcome", "nth": 2, "when": "after", "what": "pause"}
    players.begin("run", parameters=PARAMETERS, plain=True, approve="alice", at=at)
    try:
        wait_for(players.outputs / "waiting")
        on_the_machine("sh", "-c", f"echo '# theirs' >> /etc/systemd/system/{SERVICE.name}")
    finally:
        (players.outputs / "go").touch()
        drifted = players.end()["outcome"]
        for name in ("waiting", "go"):
            (players.outputs / name).unlink(missing_ok=True)
    assert (drifted["status"], drifted["exit_code"]) == ("aborted", 7)
    assert "no longer as the plan saw it" in drifted["message"]
    assert "Nothing was changed on the machine" in players.record(drifted).summary
    now = found(drifted["run_id"])
    assert (now.files.keys(), now.left) == (ends.old.files.keys(), [])


def wait_for(path: Path, patience_s: float = 120.0) -> None:
    deadline = time.monotonic() + patience_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)

"""What may be gone on with and what may be taken back, from the journals of runs that ended anywhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proofbook import begun
from proofbook.archive import Archive, new_run_dir
from proofbook.errors import NoSuchRun, RecordError
from proofbook.journal import JOURNAL, Journal, Writer, read_journal
from proofbook.model import Action, Identity, Measurement, Plan
from proofbook.record import finish, render
from proofbook.redact import Redactor
from proofbook.run import runner_facts

START = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)
HOST = Identity("gpu01", "gpu01", "0123456789abcdef" * 2, "f" * 32, "ssh-ed25519 SHA256:one", "root", 0)
PLAN = Plan(
    change="set-word",
    title="The word",
    host=HOST,
    pre_state={"word": "old"},
    actions=(Action("set the word"),),
    undo=(Action("set it back"),),
    diff="-old\n+new",
    cannot_undo=(),
    expected_s=60.0,
    settings={"unit": "word.service"},
)
BASELINE = Measurement("loudness", "How loud is it?", "dB", {}, {"loud": 7}, START, 1.0)

Event = tuple[str, Mapping[str, Any]]


def act(number: int, what: str, *, digest: str = PLAN.digest) -> list[Event]:
    told = {"act": number, "outcome": "ok", "exit_status": 0, "note": "", "evidence": []}
    return [
        ("act.intent", {"act": number, "what": what, "argv": ["set"], "host": "gpu01", "digest": digest}),
        ("act.outcome", told),
    ]


def applied(outcome: str, **facts: Any) -> Event:
    return "applied", {"change": PLAN.change, "outcome": outcome, "summary": outcome, "facts": facts, "digest": PLAN.digest}


def closing(status: str, summary: str = "it is over") -> Event:
    return "run.closing", {"status": status, "verdict": "PASS", "summary": summary, "exit_code": 0}


def plan_event(plan: Plan = PLAN) -> Event:
    return "plan", {**msgspec.to_builtins(plan), "digest": PLAN.digest, "issued_at": START.isoformat()}


def gate_event(decision: str = "approved") -> Event:
    who = {"approver": "alice", "how": "parameter", "at": START.isoformat(), "issued_by": "r0"} if decision == "approved" else {}
    return "gate", {"digest": PLAN.digest, "decision": decision, "approver": "", "how": "", "text": PLAN.title, **who}


#: An undisturbed run, line by line.
UNDISTURBED: tuple[Event, ...] = (
    ("host.proven", {"name": "gpu01", "identity": msgspec.to_builtins(HOST), "peer": None, "note": "first contact"}),
    ("measurement", {**msgspec.to_builtins(BASELINE), "from_run": ""}),
    plan_event(),
    gate_event(),
    *act(1, "take the machine's lease"),
    *act(2, "set the word"),
    applied("done"),
    ("measurement", {**msgspec.to_builtins(replace(BASELINE, value={"loud": 11})), "from_run": ""}),
    *act(3, "keep it"),
    applied("confirmed"),
    *act(4, "give the machine's lease back"),
    closing("completed"),
)
#: Without run.opened; the first line that says that something may have been done.
FIRST_ACT = [event for event, _ in UNDISTURBED].index("act.intent")

DEAD = {"pid_started": "another process"}


def write(
    outputs: Path,
    number: int,
    events: Sequence[Event],
    *,
    runbook: str = "word-enablement",
    continues: str | None = None,
    origin: str = "",
    alive: bool = False,
    **parameters: Any,
) -> str:
    """A run's folder as its runner left it: sealed when the events end in a closing, open otherwise."""
    when = START + timedelta(minutes=number)
    run_id = f"{when:%Y%m%dT%H%M%SZ}-{runbook}-gpu01-{number:06x}"
    folder = new_run_dir(outputs, runbook, "gpu01", when, run_id)
    writer = Writer(folder, Redactor())
    journal = Journal(writer, run_id, lambda: when)
    opened = {
        "run_id": run_id,
        "runbook": runbook,
        "title": runbook,
        "purpose": "",
        "host": "gpu01",
        "parameters": {"host": "gpu01", **parameters},
        "mode": "headless",
        "runner": runner_facts() if alive else runner_facts() | DEAD,
        "clock": "wall",
        "changes_host": True,
        "parent": None,
        "continues": continues,
        "origin": origin or run_id,
        "annotations": {},
    }
    for event, data in [("run.opened", opened), *events]:
        journal.append(event, data)
    if events and events[-1][0] == "run.closing":
        finish(folder, journal, writer)
    else:
        render(folder, writer=writer)
        journal.close()
    return run_id


def undoing(outputs: Path, number: int, of: str, status: str = "completed", **more: Any) -> str:
    events = () if status == "running" else (closing(status),)
    return write(outputs, number, events, runbook="rollback", continues=of, origin=of, run=of, **more)


def died(outputs: Path, number: int = 0, **more: Any) -> str:
    """A run that died with its change half done."""
    return write(outputs, number, UNDISTURBED[: FIRST_ACT + 3], **more)


def refused(outputs: Path, run: str, *, undo: bool) -> str:
    with pytest.raises(NoSuchRun) as error:
        begun.load(Archive(outputs), run, undo=undo)
    return str(error.value)


# ------------------------------------------------------------------------------------------- one run, cut anywhere


@pytest.mark.parametrize("lines", range(len(UNDISTURBED) + 1))
@pytest.mark.parametrize("torn", [False, True])
def test_a_journal_that_ends_at_any_line(tmp_path: Path, lines: int, torn: bool) -> None:
    run = write(tmp_path, 0, [e for e in UNDISTURBED[:lines] if e[0] != "run.closing"])
    folder = Archive(tmp_path).folder_of(run)
    assert folder is not None
    closed = lines == len(UNDISTURBED)
    if closed:  # it died between its last line and its seal
        last = Journal(Writer(folder, Redactor()), run, lambda: START)
        last.append(*UNDISTURBED[-1])
        last.close()
    if torn:
        with (folder / JOURNAL).open("ab") as journal:
            journal.write(b'{"v":1,"seq":')
    if lines <= FIRST_ACT:
        for undo in (False, True):
            assert "open a new run instead" in refused(tmp_path, run, undo=undo)
        return
    earlier = begun.load(Archive(tmp_path), run, undo=True)
    assert earlier.approved_plan == PLAN
    if closed:
        assert "is completed: there is nothing to go on with" in refused(tmp_path, run, undo=False)
        return
    earlier = begun.load(Archive(tmp_path), run, undo=False)
    assert (earlier.run_id, earlier.origin, earlier.record.status) == (run, run, "lost")
    assert earlier.plan(PLAN.change) == PLAN
    assert earlier.plan("another") is None
    approval = earlier.approval(PLAN.digest)
    assert approval is not None
    assert (approval.approver, approval.at, approval.issued_by) == ("alice", START, "r0")
    assert earlier.approval("sha256:other") is None
    assert earlier.measurement("loudness") == BASELINE, "the one from before the change, whatever was measured later"
    assert earlier.measurement("brightness") is None
    kept = ("applied", applied("confirmed")[1]) in UNDISTURBED[:lines]
    words = f"`proofbook resume {run}` looks, and lets it go" if kept else f"`proofbook rollback {run}` undoes it now"
    assert words in earlier.record.summary
    assert Archive(tmp_path).verify(run) == []


def test_a_plan_that_was_not_approved_is_nothing_to_take_back(tmp_path: Path) -> None:
    waiting = write(tmp_path, 0, [plan_event(), gate_event("waiting"), closing("stopped-at-gate")])
    assert "has no approved plan that could be taken back" in refused(tmp_path, waiting, undo=True)


def test_a_plan_that_is_not_the_approved_one_is_not_acted_on(tmp_path: Path) -> None:
    changed = replace(PLAN, settings={"unit": "other.service"})
    run = write(tmp_path, 0, [plan_event(changed), gate_event(), *act(1, "set the word")])
    with pytest.raises(RecordError, match="its digest differs"):
        begun.load(Archive(tmp_path), run, undo=True)


def test_a_run_that_is_still_at_work_is_left_alone(tmp_path: Path) -> None:
    run = died(tmp_path, alive=True)
    for undo in (False, True):
        said = refused(tmp_path, run, undo=undo)
        assert f"run {run} is still at work on it (process {os.getpid()} on " in said
        assert "let it end, or stop it" in said
    assert Archive(tmp_path).load(run).status == "running"


@pytest.mark.parametrize(
    ("status", "resumes", "undoes"),
    [("aborted", True, True), ("rollback-failed", True, True), ("completed", False, True), ("rolled-back", False, False)],
)
def test_how_a_run_ended_says_what_is_left_to_do(tmp_path: Path, status: str, resumes: bool, undoes: bool) -> None:
    run = write(tmp_path, 0, [*UNDISTURBED[:-1], closing(status)])
    for undo, allowed in ((False, resumes), (True, undoes)):
        if allowed:
            assert begun.load(Archive(tmp_path), run, undo=undo).run_id == run
        else:
            assert "already" in refused(tmp_path, run, undo=undo) or "nothing to go on with" in refused(tmp_path, run, undo=undo)


def test_a_part_of_the_name_is_enough(tmp_path: Path) -> None:
    run = died(tmp_path)
    assert begun.load(Archive(tmp_path), run[-6:], undo=True).run_id == run


# ------------------------------------------------------------------------------------------ several runs, one change


def test_what_was_taken_back_is_not_taken_back_twice(tmp_path: Path) -> None:
    run = died(tmp_path)
    other = undoing(tmp_path, 1, run)
    for undo in (False, True):
        assert f"run {run} was taken back already by run {other}" in refused(tmp_path, run, undo=undo)


@pytest.mark.parametrize("status", ["running", "aborted", "rollback-failed"])
def test_a_taking_back_that_did_not_come_to_its_end_is_said_again(tmp_path: Path, status: str) -> None:
    run = died(tmp_path)
    other = undoing(tmp_path, 1, run, status)
    assert begun.load(Archive(tmp_path), run, undo=True).run_id == run
    said = refused(tmp_path, other, undo=True)
    assert f"is itself the taking back of run {run}" in said
    assert f"proofbook rollback {run}" in said


def test_what_was_gone_on_with_is_not_gone_on_with_twice(tmp_path: Path) -> None:
    run = died(tmp_path)
    on = write(tmp_path, 1, UNDISTURBED, continues=run, origin=run)
    assert f"run {run} was gone on with by run {on}, which is completed" in refused(tmp_path, run, undo=False)
    for name in (run, on):
        assert begun.load(Archive(tmp_path), name, undo=True).origin == run
    undone = undoing(tmp_path, 2, on)
    for name in (run, on):
        assert f"taken back already by run {undone}" in refused(tmp_path, name, undo=True)


def test_going_on_may_die_too(tmp_path: Path) -> None:
    run = died(tmp_path)
    on = died(tmp_path, 1, continues=run, origin=run)
    assert begun.load(Archive(tmp_path), run, undo=False).origin == run
    assert begun.load(Archive(tmp_path), on, undo=False).origin == run
    assert Archive(tmp_path).load(on).status == "lost"


def decision_event(rung: str, *, acted: bool = True) -> Event:
    return "decision", {
        "keep": True,
        "rung": rung,
        "because": "it pays",
        "limits": ["one"],
        "digest": PLAN.digest,
        "acted": acted,
    }


def test_what_was_decided_is_found_in_whichever_run_decided_it(tmp_path: Path) -> None:
    run = died(tmp_path)
    assert begun.load(Archive(tmp_path), run, undo=False).decision is None
    kept = [*UNDISTURBED[: FIRST_ACT + 6], decision_event("PASS"), *act(3, "keep it"), applied("confirmed")]
    on = write(tmp_path, 1, kept, continues=run, origin=run)
    write(tmp_path, 2, [*kept[:-1], decision_event("LATER", acted=False)], continues=on, origin=run)
    for name in (run, on):
        decision = begun.load(Archive(tmp_path), name, undo=False).decision
        assert decision is not None
        assert (decision.keep, decision.rung, decision.because, decision.limits) == (True, "PASS", "it pays", ("one",))


def test_another_run_of_the_change_that_is_at_work_is_waited_for(tmp_path: Path) -> None:
    run = died(tmp_path)
    on = died(tmp_path, 1, continues=run, origin=run, alive=True)
    for undo in (False, True):
        assert f"run {on} is still at work on it" in refused(tmp_path, run, undo=undo)


def test_a_run_of_another_change_is_no_obstacle(tmp_path: Path) -> None:
    run = died(tmp_path)
    died(tmp_path, 1, alive=True)
    kept = write(tmp_path, 2, UNDISTURBED)
    undoing(tmp_path, 3, kept)
    assert begun.load(Archive(tmp_path), run, undo=False).run_id == run


def test_two_that_begin_at_the_same_time_see_each_other(tmp_path: Path) -> None:
    run = died(tmp_path)
    earlier = begun.load(Archive(tmp_path), run, undo=False)
    one = write(tmp_path, 1, [], continues=run, origin=run, alive=True)
    begun.refuse_two(Archive(tmp_path), earlier, one)
    two = write(tmp_path, 2, [], continues=run, origin=run, alive=True)
    with pytest.raises(NoSuchRun, match=f"run {one} is still at work"):
        begun.refuse_two(Archive(tmp_path), earlier, two)


# ------------------------------------------------------------------------------------------------- what to do next


def test_what_to_do_about_the_run_that_holds_a_machine(tmp_path: Path) -> None:
    run = died(tmp_path)
    said = begun.next_steps(Archive(tmp_path), run, "gpu01")
    assert [line.rpartition(": ")[2] for line in said[1:]] == [
        f"proofbook resume {run}",
        f"proofbook rollback {run}",
        f"proofbook lease break gpu01 {run} --who YOUR-NAME",
    ]
    on = died(tmp_path, 1, continues=run, origin=run, alive=True)
    assert begun.next_steps(Archive(tmp_path), run, "gpu01") == [f"run {on} is still at work: let it end, or stop it"]


def test_what_to_do_about_a_run_that_this_archive_does_not_know(tmp_path: Path) -> None:
    run = died(tmp_path / "theirs")
    said = begun.next_steps(Archive(tmp_path / "ours"), run, "gpu01")
    assert f"run {run} is not in {tmp_path / 'ours'}" in said[0]
    shutil.copytree(tmp_path / "theirs", tmp_path / "damaged")
    folder = Archive(tmp_path / "damaged").folder_of(run)
    assert folder is not None
    assert read_journal(folder / JOURNAL).intact
    (folder / JOURNAL).unlink()
    assert "is not in" in begun.next_steps(Archive(tmp_path / "damaged"), run, "gpu01")[0]


def briefs(outputs: Path) -> dict[str, str]:
    return begun.later(Archive(outputs).runs())


def test_a_kept_run_says_that_it_was_taken_back_later(tmp_path: Path) -> None:
    kept = write(tmp_path, 0, UNDISTURBED)
    assert briefs(tmp_path) == {}
    first = undoing(tmp_path, 1, kept, status="rollback-failed")
    assert briefs(tmp_path) == {kept: f"taking back was tried by {first} (rollback-failed)"}
    second = undoing(tmp_path, 2, kept)
    assert briefs(tmp_path) == {kept: f"taken back by {second}"}


def test_a_lost_run_says_that_it_was_gone_on_with_and_what_came_of_that(tmp_path: Path) -> None:
    lost = died(tmp_path)
    on = write(tmp_path, 1, UNDISTURBED, continues=lost, origin=lost)
    assert briefs(tmp_path) == {lost: f"gone on with by {on} (completed)"}
    back = undoing(tmp_path, 2, on)
    assert briefs(tmp_path) == {lost: f"taken back by {back}", on: f"taken back by {back}"}


def test_a_run_that_only_waited_at_its_gate_was_not_taken_back(tmp_path: Path) -> None:
    waited = write(tmp_path, 0, [plan_event(), gate_event("waiting"), closing("stopped-at-gate")])
    kept = write(tmp_path, 1, UNDISTURBED, continues=waited)
    back = undoing(tmp_path, 2, kept)
    assert briefs(tmp_path) == {waited: f"gone on with by {kept} (completed)", kept: f"taken back by {back}"}


def test_an_open_run_is_running_only_while_its_process_lives(tmp_path: Path) -> None:
    book = Archive(tmp_path)
    assert begun.not_ended(book, died(tmp_path, alive=True)) == ("running", "")
    dead = died(tmp_path, 1)
    stands, remark = begun.not_ended(book, dead)
    assert stands == begun.NOT_ENDED
    assert f"`proofbook resume {dead}`" in remark and f"`proofbook rollback {dead}`" in remark
    _, looked_only = begun.not_ended(book, write(tmp_path, 2, []))
    assert looked_only == "its process is gone. No change was begun"

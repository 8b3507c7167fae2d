"""The verbs of a run: journaled acts, a gate that refuses, results that are stored, and ends that are sealed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from proofbook.errors import ConnectionLost, LeaseHeld, NotApproved, OtherMachine, PlanDrifted, Sealed, StoppedAtGate
from proofbook.host import Host
from proofbook.journal import Journal, Writer, read_journal, read_output
from proofbook.model import (
    Action,
    Applied,
    Approval,
    Change,
    Check,
    Command,
    Decision,
    Finding,
    Identity,
    Measure,
    Measurement,
    Plan,
    Probe,
    Result,
    RunStatus,
    Seen,
    Verdict,
    command,
)
from proofbook.record import load_record
from proofbook.redact import Redactor
from proofbook.run import About, NoMemory, Run
from proofbook.transports.base import Peer, Put

MACHINE = "0123456789abcdef0123456789abcdef"
START = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)


@dataclass
class FakeClock:
    at: datetime = START

    def now(self) -> datetime:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@dataclass
class FakeMachine:
    """A transport over a dictionary: argv → stdout. ``on`` sees every command before it is answered."""

    says: dict[tuple[str, ...], bytes]
    host_key: str = "ssh-ed25519 SHA256:one"
    on: Callable[[Command], None] | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)
    down: bool = False

    def open(self, *, timeout_s: float = 15.0) -> Peer:
        if self.down:
            raise ConnectionLost("no route to host")
        return Peer("192.0.2.7:22", self.host_key, "OpenSSH_9.2p1")

    reopen = open

    def close(self) -> None:
        pass

    def run(self, command: Command) -> Result:
        if self.down:
            raise ConnectionLost("the connection went away")
        self.asked.append(command.argv)
        if self.on:
            self.on(command)
        known = command.argv in self.says
        return Result(command, 0 if known else 127, self.says.get(command.argv, b""), b"" if known else b"not found", START, 0.01)

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        return [self.run(c) for c in commands]

    def stream(self, command: Command) -> Iterator[bytes]:
        yield from self.run(command).stdout.splitlines(keepends=True)

    def put(self, data: bytes, path: str, *, mode: int = 0o644, backup: bool = True, root: bool = True) -> Put:
        raise AssertionError("nothing here writes files")

    @contextmanager
    def tunnel(self, port: int, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
        raise AssertionError("nothing here tunnels")
        yield host, port


@dataclass(frozen=True)
class Word(Probe[str]):
    what: str = "word"
    name: ClassVar[str] = "test.Word"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], str]:
        (result,) = yield [command("say", self.what)]
        return result.expect().strip()


@dataclass(frozen=True)
class WordIs(Check):
    wanted: str
    name: ClassVar[str] = "word"
    title: ClassVar[str] = "Is the word right?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Word(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        said = seen.value(Word())
        return [self.passed(f"it says {said}") if said == self.wanted else self.failed(f"it says {said}, not {self.wanted}")]


@dataclass(frozen=True)
class JudgesNothing(WordIs):
    def judge(self, seen: Seen) -> Sequence[Finding]:
        return []


@dataclass(frozen=True)
class SetWord(Change):
    to: str
    name: ClassVar[str] = "set-word"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Word(),)

    def plan(self, seen: Seen, host: Identity) -> Plan:
        before = seen.value(Word())
        actions = () if before == self.to else (Action("set it", ("set", self.to)),)
        title, diff = f"Set the word to {self.to}", f"-{before}\n+{self.to}"
        return Plan(self.name, title, host, {"word": before}, actions, (), diff, (), 1.0)

    def apply(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        result = hands.act("set it", command("set", self.to), loss_expected=True)
        tell("it was set")
        return Applied(plan, "done" if result else "unconfirmed", "set")


@dataclass
class Says:
    """A person at the gate who gives this name."""

    name: str
    shown: list[Plan] = field(default_factory=list)

    def show(self, plan: Plan) -> None:
        self.shown.append(plan)

    def ask(self, plan: Plan) -> tuple[str, str]:
        assert plan in self.shown
        return self.name, "typed"


def machine(**says: bytes) -> FakeMachine:
    answers = {("say", "word"): b"old\n", ("set", "new"): b"", ("approvals",): b"0"} | {("say", k): v for k, v in says.items()}
    answers |= {
        ("cat", "/etc/machine-id"): MACHINE.encode() + b"\n",
        ("cat", "/proc/sys/kernel/random/boot_id"): b"11111111-2222-4333-8444-555555555555\n",
        ("hostname",): b"gpu01\n",
        ("id", "-un"): b"root\n",
        ("id", "-u"): b"0\n",
        ("uname", "-r"): b"6.8.12\n",
    }
    return FakeMachine(answers)


@dataclass
class Setting:
    run: Run
    machine: FakeMachine
    folder: Path
    clock: FakeClock

    def events(self, name: str = "") -> list[Mapping[str, Any]]:
        reading = read_journal(self.folder / "journal.jsonl")
        assert reading.intact, reading.trouble
        return [e for e in reading.events if not name or e["event"] == name]


def setting(
    tmp_path: Path,
    fake: FakeMachine | None = None,
    *,
    mode: str = "headless",
    memory: Any = None,
    person: Any = None,
    custody: Any = None,
    earlier: Any = None,
) -> Setting:
    fake = fake or machine()
    clock = FakeClock()
    folder = tmp_path / "run.partial"
    redactor = Redactor()
    writer = Writer(folder, redactor)
    run = Run(
        About("r1", "test", "A test", mode, True),
        folder=folder,
        writer=writer,
        journal=Journal(writer, "r1", clock.now),
        redactor=redactor,
        host=Host("gpu01", fake, clock),
        intent=None,
        parameters=None,
        memory=memory,
        person=person,
        custody=custody,
        earlier=earlier,
    )
    run.opened({"run_id": "r1"})
    run.reach()
    return Setting(run, fake, folder, clock)


def test_a_check_keeps_its_evidence_and_says_what_it_stands_on(tmp_path: Path) -> None:
    s = setting(tmp_path)
    findings = s.run.check(WordIs("old"))
    assert [f.verdict for f in findings] == [Verdict.PASS]
    (evidence,) = [e["data"] for e in s.events("evidence")]
    assert findings[0].evidence == (evidence["id"],)
    assert (s.folder / evidence["stdout_file"]).read_bytes() == b"old\n"
    assert evidence["boot_id"] == "11111111222243338444555555555555"


def test_a_log_is_kept_once_and_small(tmp_path: Path) -> None:
    fake = machine()
    fake.says["say", "word"] = b"a long word" * 10_000
    s = setting(tmp_path, fake)
    s.run.observe(Word())
    (evidence,) = [e["data"] for e in s.events("evidence")]
    assert evidence["stdout_file"].endswith(".out.gz") and evidence["stdout_bytes"] == 110_000
    assert read_output(s.folder / evidence["stdout_file"]) == fake.says["say", "word"]
    (observation,) = [e["data"] for e in s.events("observation")]
    assert (observation["known"], observation["value"], observation["value_bytes"]) == (True, None, 110_002)
    assert observation["evidence"] == [evidence["id"]]


def test_what_cannot_be_told_is_unknown_and_never_a_pass(tmp_path: Path) -> None:
    fake = machine()
    del fake.says["say", "word"]
    s = setting(tmp_path, fake)
    (finding,) = s.run.check(WordIs("old"))
    assert finding.verdict is Verdict.UNKNOWN
    assert "127" in finding.reason or "not there" in finding.reason


def test_judging_nothing_is_unknown(tmp_path: Path) -> None:
    (finding,) = setting(tmp_path).run.check(JudgesNothing("old"))
    assert finding.verdict is Verdict.UNKNOWN


def test_a_lost_machine_makes_answers_unknown_and_does_not_end_the_run(tmp_path: Path) -> None:
    s = setting(tmp_path)
    s.machine.down = True
    (finding,) = s.run.check(WordIs("old"))
    assert finding.verdict is Verdict.UNKNOWN
    assert "cannot be asked" in finding.reason
    assert s.run.close().status is RunStatus.COMPLETED


def test_a_done_verb_returns_its_stored_result_and_asks_nothing(tmp_path: Path) -> None:
    s = setting(tmp_path)
    first = s.run.check(WordIs("old"))
    asked = len(s.machine.asked)
    assert s.run.check(WordIs("old")) is first
    assert len(s.machine.asked) == asked
    assert s.run.check(WordIs("old"), again=True) is not first


def test_headless_without_an_approval_the_run_stops_sealed_and_nothing_is_done(tmp_path: Path) -> None:
    s = setting(tmp_path)
    view = s.run.plan(SetWord("new"))
    with pytest.raises(StoppedAtGate) as stopped:
        s.run.gate(view)
    assert stopped.value.digest == view.digest
    assert s.run.status is RunStatus.STOPPED_AT_GATE
    assert ("set", "new") not in s.machine.asked
    with pytest.raises(Sealed):
        s.run.apply(view)
    assert s.events("run.closing")[0]["data"]["exit_code"] == 3


def test_apply_itself_refuses_whatever_the_cells_did(tmp_path: Path) -> None:
    s = setting(tmp_path, mode="live")
    view = s.run.plan(SetWord("new"))
    with pytest.raises(NotApproved):
        s.run.apply(view)
    assert ("set", "new") not in s.machine.asked


@pytest.mark.parametrize(
    ("approver", "approved", "why"),
    [("", "{digest}", "who approves"), ("alice", "sha256:" + "0" * 64, "it is for another plan than that of now")],
)
def test_an_approval_must_name_a_person_and_exactly_this_plan(tmp_path: Path, approver: str, approved: str, why: str) -> None:
    s = setting(tmp_path)
    view = s.run.plan(SetWord("new"))
    with pytest.raises(NotApproved, match=why):
        s.run.gate(view, approver=approver, approved=approved.format(digest=view.digest))
    assert s.run.status is RunStatus.ABORTED


def test_an_old_plan_cannot_be_approved(tmp_path: Path) -> None:
    class LongAgo(NoMemory):
        def issued(self, digest: str) -> Any:
            return "r0", datetime.now(UTC) - timedelta(hours=5)

    s = setting(tmp_path, memory=LongAgo())
    view = s.run.plan(SetWord("new"))
    with pytest.raises(NotApproved, match="good for"):
        s.run.gate(view, approver="alice", approved=view.digest)


def test_an_approved_plan_is_acted_on_once_with_the_intent_journaled_first(tmp_path: Path) -> None:
    s = setting(tmp_path)
    intents_when_acting: list[int] = []

    def watch(asked: Command) -> None:
        if asked.argv == ("set", "new"):
            intents_when_acting.append(len(s.events("act.intent")))

    s.machine.on = watch
    view = s.run.plan(SetWord("new"))
    s.run.gate(view, approver="alice", approved=view.digest)
    applied = s.run.apply(view)
    assert applied.outcome == "done"
    assert s.run.apply(view) is applied
    assert intents_when_acting == [1]
    assert s.machine.asked.count(("set", "new")) == 1
    assert [e["data"]["outcome"] for e in s.events("act.outcome")] == ["ok"]


def test_a_machine_that_changed_since_the_plan_is_not_touched(tmp_path: Path) -> None:
    s = setting(tmp_path)
    view = s.run.plan(SetWord("new"))
    s.run.gate(view, approver="alice", approved=view.digest)
    s.machine.says["say", "word"] = b"somebody was here\n"
    with pytest.raises(PlanDrifted):
        s.run.apply(view)
    assert ("set", "new") not in s.machine.asked


def test_an_act_whose_connection_is_lost_has_an_unknown_outcome(tmp_path: Path) -> None:
    s = setting(tmp_path)

    def cut(asked: Command) -> None:
        if asked.argv == ("set", "new"):
            raise ConnectionLost("reset by peer")

    s.machine.on = cut
    view = s.run.plan(SetWord("new"))
    s.run.gate(view, approver="alice", approved=view.digest)
    assert s.run.apply(view).outcome == "unconfirmed"
    assert [e["data"]["outcome"] for e in s.events("act.outcome")] == ["unknown"]


def test_a_plan_without_actions_needs_no_approval(tmp_path: Path) -> None:
    s = setting(tmp_path)
    view = s.run.plan(SetWord("old"))
    s.run.gate(view)
    assert s.run.apply(view).outcome == "nothing-to-do"


def test_another_machine_under_the_same_name_ends_the_run(tmp_path: Path) -> None:
    s = setting(tmp_path, mode="live")
    s.machine.says["cat", "/etc/machine-id"] = b"f" * 32 + b"\n"

    def cut_once(asked: Command) -> None:
        s.machine.on = None
        raise ConnectionLost("reset by peer")

    s.machine.on = cut_once
    with pytest.raises(OtherMachine):
        s.run.check(WordIs("old"))
    assert s.run.status is RunStatus.ABORTED


def test_the_typed_gate_lets_a_person_through_or_stops(tmp_path: Path) -> None:
    yes = setting(tmp_path / "yes", mode="live", person=Says("alice"))
    view = yes.run.plan(SetWord("new"))
    yes.run.gate(view)
    assert yes.run.apply(view).outcome == "done"
    assert yes.events("gate")[0]["data"]["approver"] == "alice"
    no = setting(tmp_path / "no", mode="live", person=Says(""))
    with pytest.raises(StoppedAtGate):
        no.run.gate(no.run.plan(SetWord("new")))
    assert no.run.status is RunStatus.STOPPED_AT_GATE
    assert no.events("gate")[0]["data"]["decision"] == "declined"
    record = load_record(no.folder)
    assert record.waiting_for is None
    assert record.headline == "Declined at the gate"


def test_a_secret_in_an_answer_reaches_neither_journal_nor_evidence(tmp_path: Path) -> None:
    secret = "hf_" + "Ab3dEf6hIj9kLm2nOp5qRs8t"
    s = setting(tmp_path, machine(word=f"HF_TOKEN={secret}\n".encode()))
    (finding,) = s.run.check(WordIs("old"))
    s.run.close()
    assert secret not in finding.reason
    for path in s.folder.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_full_disk_ends_the_run_as_aborted_with_a_readable_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting(tmp_path)
    real = os.replace

    def full(src: Any, dst: Any, **kw: Any) -> None:
        if "evidence" in str(dst):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(src, dst, **kw)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Exception, match="no space left"):
        s.run.check(WordIs("old"))
    assert s.run.status is RunStatus.ABORTED
    assert s.events("trouble")[-1]["data"]["error"] == "DiskFull"
    assert s.events("run.closing")[-1]["data"]["exit_code"] == 7


def test_the_verdict_of_a_run_that_checked_nothing_is_unknown(tmp_path: Path) -> None:
    s = setting(tmp_path)
    s.run.close()
    assert s.events("run.closing")[-1]["data"]["verdict"] == "UNKNOWN"
    assert s.events("run.closing")[-1]["data"]["exit_code"] == 4


def test_a_run_that_did_not_complete_is_never_judged_better_than_unknown(tmp_path: Path) -> None:
    good = setting(tmp_path / "good")
    good.run.check(WordIs("old"))
    good.run.abort("told to stop")
    assert good.events("run.closing")[-1]["data"]["verdict"] == "UNKNOWN"
    bad = setting(tmp_path / "bad")
    bad.run.check(WordIs("other"))
    bad.run.abort("told to stop")
    assert bad.events("run.closing")[-1]["data"]["verdict"] == "FAIL"


# ------------------------------------------------------------------------- measuring, keeping, taking back


@dataclass(frozen=True)
class Loudness(Measure):
    name: ClassVar[str] = "loudness"
    title: ClassVar[str] = "How loud is it?"

    def take(self, bench: Any) -> Measurement:
        said = bench.look(Word()).value(Word())
        raw = bench.keep("answer", b"raw answer", "GET /loudness")
        bench.tell("listened")
        return Measurement(
            self.name, self.title, "dB", {"word": said}, {"loud": 7}, bench.host.clock.now(), 1.0, ("a bird",), (raw,)
        )


@dataclass(frozen=True)
class Guarded(SetWord):
    """Sets the word; can be confirmed, and taken back from its plan alone."""

    breaks: str = ""

    def plan(self, seen: Seen, host: Identity) -> Plan:
        plan = super().plan(seen, host)
        undo = (Action("set it back", ("set", str(plan.pre_state["word"]))),)
        return replace(plan, undo=undo if plan.actions else ())

    def apply(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        if self.breaks == "apply":
            hands.act("half of it", command("set", self.to))
            raise ConnectionLost("the connection went away")
        return super().apply(plan, hands, tell)

    def suspend(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        hands.act("set it back for a while", command(*plan.undo[0].argv))
        return Applied(plan, "suspended", "set back for a while")

    def confirm(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        hands.act("take the guard away", command("unguard", hands.run_id))
        if self.breaks == "confirm":
            raise ConnectionLost("the connection went away")
        return Applied(plan, "confirmed", "kept")

    def rollback(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        result = hands.act("set it back", command(*plan.undo[0].argv))
        assert result is not None
        by_hand = {} if result.ok else {"by_hand": ["set " + str(plan.pre_state["word"])]}
        return Applied(plan, "rolled-back" if result.ok else "rollback-failed", "taken back", by_hand)


@dataclass(frozen=True)
class Used(Probe[int]):
    """How many approvals were used on the machine."""

    name: ClassVar[str] = "used"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], int]:
        (answer,) = yield [command("approvals")]
        return int(answer.expect())


@dataclass
class Lease:
    """Custody that remembers what was asked of it."""

    approvals: ClassVar[Probe[int]] = Used()
    held_by: str = ""
    said: list[str] = field(default_factory=list)

    def take(self, hands: Any, approval: Approval) -> None:
        if self.held_by:
            raise LeaseHeld(f"run {self.held_by} is changing this machine")
        self.said.append(f"take {hands.run_id}")

    def hold(self, hands: Any) -> None:
        if self.held_by:
            raise LeaseHeld(f"run {self.held_by} is changing this machine")
        self.said.append("hold")

    def release(self, hands: Any) -> None:
        self.said.append("release")


@dataclass
class Before:
    """An earlier run that had begun this plan."""

    begun: Plan
    run_id: str = "r0"
    origin: str = "r0"
    measured: Measurement | None = None
    decision: Decision | None = None

    def plan(self, change: str) -> Plan | None:
        return self.begun if change == self.begun.change else None

    def approval(self, digest: str) -> Approval | None:
        return Approval(digest, "alice", "parameter", START) if digest == self.begun.digest else None

    def measurement(self, name: str) -> Measurement | None:
        return self.measured if self.measured is not None and name == self.measured.name else None


KEEP = Decision(True, "PASS", "it pays", ("one model only",))
TAKE_BACK = Decision(False, "FAIL_SPEC_OFF", "no draft was accepted")


def changed(tmp_path: Path, change: SetWord, **more: Any) -> tuple[Setting, Applied]:
    fake = machine()
    fake.says |= {("set", "old"): b"", ("unguard", "r1"): b"", ("unguard", "r0"): b""}
    s = setting(tmp_path, fake, **more)
    view = s.run.plan(change)
    s.run.gate(view, approver="alice", approved=view.digest)
    return s, s.run.apply(view)


def test_a_measurement_is_journaled_with_its_evidence_and_taken_once(tmp_path: Path) -> None:
    s = setting(tmp_path)
    measured = s.run.measure(Loudness())
    assert s.run.measure(Loudness()) is measured
    (event,) = s.events("measurement")
    assert event["data"]["value"] == {"loud": 7}
    assert event["data"]["problems"] == ["a bird"]
    kept = {e["data"]["id"]: e["data"] for e in s.events("evidence")}
    assert [kept[i]["argv"] for i in measured.evidence] == [["http", "GET /loudness"], ["say", "word"]]
    assert (s.folder / kept[measured.evidence[0]]["stdout_file"]).read_bytes() == b"raw answer"


def test_a_kept_change_is_confirmed_over_a_fresh_login_and_the_machine_is_let_go(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    logins = len(s.events("host.proven"))
    assert s.run.confirm(applied, KEEP).outcome == "confirmed"
    assert len(s.events("host.proven")) == logins + 1
    assert ("unguard", "r1") in s.machine.asked
    s.run.close()
    assert s.run.status is RunStatus.COMPLETED
    assert lease.said == ["take r1", "hold", "release"]
    assert s.events("decision")[0]["data"]["limits"] == ["one model only"]


def test_a_run_whose_lease_was_broken_keeps_nothing(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    lease.held_by = "r7"
    with pytest.raises(LeaseHeld):
        s.run.confirm(applied, KEEP)
    assert ("unguard", "r1") not in s.machine.asked
    closing = s.events("run.closing")[0]["data"]
    assert closing["status"] == "aborted"
    assert "its guard on the machine takes it back" in closing["summary"]


def test_a_keeping_whose_answer_never_came_may_have_kept_it(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new", breaks="confirm"))
    with pytest.raises(ConnectionLost):
        s.run.confirm(applied, KEEP)
    closing = s.events("run.closing")[0]["data"]
    assert closing["status"] == "aborted"
    assert (
        "Keeping the change was asked for and its answer never came: it is kept, or its guard takes it back" in closing["summary"]
    )
    assert "`proofbook rollback r1` undoes it either way" in closing["summary"]


def test_a_plan_that_no_record_can_hold_is_not_approved(tmp_path: Path) -> None:
    secret = "ghp_" + "a1B2" * 9
    with pytest.raises(NotApproved, match="something in it is held for a secret"):
        changed(tmp_path, Guarded(secret))
    s = tmp_path / "run.partial" / "journal.jsonl"
    assert secret not in s.read_text()
    assert [e["data"]["decision"] for e in read_journal(s).events if e["event"] == "gate"] == ["refused"]


def test_a_change_that_does_not_hold_is_taken_back_and_the_status_says_so(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new"))
    assert s.run.confirm(applied, TAKE_BACK).outcome == "rolled-back"
    s.run.close()
    assert s.run.status is RunStatus.ROLLED_BACK
    closing = s.events("run.closing")[0]["data"]
    assert closing["exit_code"] == 5
    assert closing["summary"].startswith("Taken back (FAIL_SPEC_OFF): no draft was accepted")


def test_an_undo_that_fails_is_its_own_end_and_keeps_the_machine_held(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    del s.machine.says["set", "old"]
    assert s.run.confirm(applied, TAKE_BACK).facts["by_hand"] == ["set old"]
    s.run.close()
    assert s.run.status is RunStatus.ROLLBACK_FAILED
    assert lease.said == ["take r1"]


def test_a_change_is_suspended_and_put_in_effect_again_under_the_same_lease(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    suspended = s.run.suspend(applied)
    assert suspended is not None and suspended.outcome == "suspended"
    assert s.run.suspend(applied) is suspended, "said again it touches nothing"
    reinstated = s.run.reinstate(suspended)
    assert reinstated is not None and reinstated.outcome == "done"
    assert [argv for argv in s.machine.asked if argv[0] == "set"] == [("set", "new"), ("set", "old"), ("set", "new")]
    assert lease.said == ["take r1", "hold", "hold"]
    assert [e["data"]["outcome"] for e in s.events("applied")] == ["done", "suspended", "done"]
    assert s.run.confirm(applied, KEEP).outcome == "confirmed"
    s.run.close()
    assert s.run.status is RunStatus.COMPLETED


def test_nobody_asks_for_a_suspension(tmp_path: Path) -> None:
    s, _ = changed(tmp_path, Guarded("new"))
    assert s.run.suspend(None) is None
    assert s.run.reinstate(None) is None


def test_a_suspended_change_that_is_not_decided_on_ends_with_the_old_state(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new"))
    s.run.suspend(applied)
    s.run.close()
    assert s.run.status is RunStatus.ROLLED_BACK


def test_only_what_is_in_effect_under_guard_is_suspended(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new"), mode="live")
    s.run.confirm(applied, KEEP)
    with pytest.raises(NotApproved, match="not in effect under guard"):
        s.run.suspend(applied)
    other = setting(tmp_path / "other", mode="live")
    with pytest.raises(NotApproved, match="not in effect under guard"):
        other.run.suspend(applied)


def test_a_run_whose_lease_was_broken_suspends_nothing(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    lease.held_by = "r7"
    with pytest.raises(LeaseHeld):
        s.run.suspend(applied)
    assert ("set", "old") not in s.machine.asked
    assert "its guard on the machine takes it back" in s.events("run.closing")[0]["data"]["summary"]


@dataclass(frozen=True)
class Louder:
    """A further part of a change."""

    title: str = "Say it louder"

    def act(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        hands.act("louder", command("shout", str(plan.pre_state["word"])))
        return Applied(plan, "done", "said louder")


def test_a_further_part_acts_under_the_same_approval_and_leaves_the_decision_open(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    went = s.run.further(applied, Louder())
    assert went is not None and went.summary == "said louder"
    assert s.run.further(applied, Louder()) is went, "said again it touches nothing"
    assert [argv for argv in s.machine.asked if argv[0] == "shout"] == [("shout", "old")]
    assert lease.said == ["take r1", "hold"]
    assert {e["data"]["digest"] for e in s.events("act.intent")} == {applied.plan.digest}
    s.run.close()
    assert s.run.status is RunStatus.ROLLED_BACK  # nobody decided, so it is taken back


def test_there_may_be_no_further_part(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new"))
    assert s.run.further(applied, None) is None


def test_a_further_part_acts_only_on_what_is_in_effect_under_guard(tmp_path: Path) -> None:
    s, applied = changed(tmp_path, Guarded("new"), mode="live")
    other = setting(tmp_path / "other", mode="live")
    with pytest.raises(NotApproved, match="not in effect under guard"):
        other.run.further(applied, Louder())
    assert not [argv for argv in other.machine.asked if argv[0] == "shout"]
    s.run.confirm(applied, TAKE_BACK)
    with pytest.raises(NotApproved, match="not in effect under guard"):
        s.run.further(applied, Louder())
    assert not [argv for argv in s.machine.asked if argv[0] == "shout"]


def test_a_run_whose_lease_was_broken_goes_no_further(tmp_path: Path) -> None:
    lease = Lease()
    s, applied = changed(tmp_path, Guarded("new"), custody=lease)
    lease.held_by = "r7"
    with pytest.raises(LeaseHeld):
        s.run.further(applied, Louder())
    assert not [argv for argv in s.machine.asked if argv[0] == "shout"]


def test_closing_without_a_decision_takes_the_change_back(tmp_path: Path) -> None:
    s, _ = changed(tmp_path, Guarded("new"))
    s.run.close()
    assert s.run.status is RunStatus.ROLLED_BACK
    assert ("set", "old") in s.machine.asked


def test_a_run_that_dies_while_acting_says_that_the_guard_is_armed_and_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost):
        changed(tmp_path, Guarded("new", breaks="apply"))
    closing = read_journal(tmp_path / "run.partial" / "journal.jsonl").events[-1]["data"]
    assert closing["status"] == "aborted"
    assert "proofbook resume r1" in closing["summary"]
    assert "proofbook rollback r1" in closing["summary"]


def test_a_machine_that_another_run_is_changing_is_not_touched(tmp_path: Path) -> None:
    with pytest.raises(LeaseHeld, match="r7"):
        changed(tmp_path, Guarded("new"), custody=Lease(held_by="r7"))


def test_once_an_approval_was_used_the_same_plan_has_another_digest(tmp_path: Path) -> None:
    def digest(name: str, used: bytes) -> str:
        s = setting(tmp_path / name, custody=Lease())
        s.machine.says["approvals",] = used
        return s.run.plan(Guarded("new")).digest

    first = digest("first", b"0")
    assert digest("nothing was used since", b"0") == first
    assert len({first, digest("one use later", b"1"), digest("two uses later", b"2"), digest("not told", b"?")}) == 4


def test_its_own_approval_is_no_drift(tmp_path: Path) -> None:
    s = setting(tmp_path, custody=Lease())
    view = s.run.plan(Guarded("new"))
    s.run.gate(view, approver="alice", approved=view.digest)
    s.machine.says["approvals",] = b"1"
    assert s.run.apply(view).outcome == "done"


def test_a_drifted_machine_is_let_go_again(tmp_path: Path) -> None:
    lease = Lease()
    s = setting(tmp_path, custody=lease)
    view = s.run.plan(Guarded("new"))
    s.run.gate(view, approver="alice", approved=view.digest)
    s.machine.says["say", "word"] = b"somebody was here\n"
    with pytest.raises(PlanDrifted):
        s.run.apply(view)
    assert lease.said == ["take r1", "release"]


def test_going_on_uses_the_plan_the_approval_and_the_baseline_of_the_run_that_died(tmp_path: Path) -> None:
    first = setting(tmp_path / "first")
    begun = first.run.plan(Guarded("new")).plan
    measured = first.run.measure(Loudness())
    fake = machine(word=b"half way\n")
    fake.says["unguard", "r0"] = b""
    s = setting(tmp_path / "second", fake, earlier=Before(begun, measured=measured))
    assert s.run.measure(Loudness()) == measured
    assert s.events("measurement")[0]["data"]["from_run"] == "r0"
    view = s.run.plan(Guarded("new"))
    assert view.digest == begun.digest
    s.run.gate(view)
    assert s.events("gate")[0]["data"]["approver"] == "alice"
    applied = s.run.apply(view)
    assert applied.outcome == "done"
    assert s.run.confirm(applied, KEEP).outcome == "confirmed"
    assert ("unguard", "r0") in s.machine.asked


def test_a_change_begun_on_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    begun = setting(tmp_path / "first").run.plan(Guarded("new")).plan
    other = replace(begun, host=replace(begun.host, machine_id="f" * 32))
    s = setting(tmp_path / "second", earlier=Before(other))
    with pytest.raises(OtherMachine, match="r0"):
        s.run.plan(Guarded("new"))


@dataclass(frozen=True)
class KeptBefore(Guarded):
    def apply(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        return Applied(plan, "nothing-to-do", "this change was kept already; nothing was applied again")


def test_a_change_that_was_kept_before_is_told_with_its_decision(tmp_path: Path) -> None:
    begun = setting(tmp_path / "first").run.plan(Guarded("new")).plan
    s = setting(tmp_path / "second", earlier=Before(begun, decision=KEEP))
    assert s.run.earlier_decision == KEEP
    view = s.run.plan(KeptBefore("new"))
    s.run.gate(view)
    applied = s.run.apply(view)
    assert s.run.confirm(applied, KEEP) is applied
    s.run.close()
    assert s.run.status is RunStatus.COMPLETED
    closing = s.events("run.closing")[0]["data"]["summary"]
    assert closing.startswith("This change was kept already; nothing was applied again. The decision stands (PASS): it pays")
    assert ("set", "new") not in s.machine.asked


def test_what_another_run_began_is_taken_back_from_its_plan(tmp_path: Path) -> None:
    begun = setting(tmp_path / "first").run.plan(Guarded("new")).plan
    fake = machine()
    fake.says["set", "old"] = b""
    s = setting(tmp_path / "second", fake, earlier=Before(begun))
    assert s.run.rollback(Guarded(""), begun).outcome == "rolled-back"
    s.run.close()
    assert s.run.status is RunStatus.COMPLETED  # that was what this run was for


def test_an_approval_belongs_to_the_plan_that_was_read_not_to_every_plan_that_looks_like_it() -> None:
    digest = "sha256:" + "a" * 64
    one, other = (Approval(digest, "alice", "parameter", START, issued_by=run) for run in ("r1", "r2"))
    assert one.mark != other.mark
    assert one.mark == replace(one, approver="bob", how="typed").mark
    assert replace(one, issued_by="").mark == "a" * 64

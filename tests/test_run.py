"""The verbs of a run: journaled acts, a gate that refuses, results that are stored, and ends that are sealed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from proofbook.errors import ConnectionLost, NotApproved, OtherMachine, PlanDrifted, Sealed, StoppedAtGate
from proofbook.host import Host
from proofbook.journal import Journal, Writer, read_journal
from proofbook.model import (
    Action,
    Applied,
    Change,
    Check,
    Command,
    Finding,
    Identity,
    Plan,
    Probe,
    Result,
    RunStatus,
    Seen,
    Verdict,
    command,
)
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
    answers = {("say", "word"): b"old\n", ("set", "new"): b""} | {("say", k): v for k, v in says.items()}
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
    tmp_path: Path, fake: FakeMachine | None = None, *, mode: str = "headless", memory: Any = None, person: Any = None
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
    [("", "{digest}", "who approves"), ("alice", "sha256:" + "0" * 64, "it is for sha256:0000")],
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

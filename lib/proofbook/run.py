"""The verbs that a runbook says, and the run that they belong to.

A :class:`Run` knows no concrete probe, check or change. Whatever it does is journaled: an act before it happens, and
its outcome after. The archive, the live view and the record are *listeners*; they read the journal's events.

Verbs are keyed by what they are asked: saying a done verb again returns its stored result and touches nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from proofbook.errors import (
    CannotTell,
    DiskFull,
    GuardRefused,
    NoSuchRun,
    NotApproved,
    OtherMachine,
    PlanDrifted,
    ProofbookError,
    Sealed,
    StoppedAtGate,
    TransportError,
)
from proofbook.host import Hands, Host
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.journal import LONG, Journal, Writer, plain
from proofbook.model import (
    Applied,
    Approval,
    Change,
    Check,
    Command,
    Decision,
    Evidence,
    Finding,
    Measure,
    Measurement,
    Observation,
    Plan,
    Probe,
    Result,
    RunStatus,
    Seen,
    Verdict,
    command,
    exit_code,
    worst,
)
from proofbook.probes.base import Answer, drive
from proofbook.redact import Redactor
from proofbook.remote import put_command

T = TypeVar("T")

#: Errors that bring no words of their own, for people.
_NAMELESS = {"KeyboardInterrupt": "interrupted (Ctrl-C, or the kernel was told to stop)"}

#: An approval is good for this long after its plan was made (wall clock: people read gates, whatever the lab's clock does).
APPROVAL_GOOD_FOR = timedelta(hours=4)
#: Part of a plan's state before: once an approval was used, the next plan has another digest, also when all else is as it was.
_APPROVALS = "approvals used on this machine"


class Listener(Protocol):
    """Somebody who follows a run: the record, the live view, a notifier."""

    def __call__(self, event: str, data: Mapping[str, Any]) -> None: ...


class Person(Protocol):
    """Whoever steps through a live run."""

    def show(self, plan: Plan) -> None:
        """A plan was made: let it be decided on beside it."""
        ...

    def ask(self, plan: Plan) -> tuple[str, str]:
        """Who approves ("" = nobody), and how it was said."""
        ...


class Memory(Protocol):
    """What earlier runs left: the archive, as a run sees it."""

    def issued(self, digest: str) -> tuple[str, datetime] | None:
        """The run that stopped at the gate with this digest, and when (wall clock) its plan was made."""
        ...

    def last_kept(self, machine_id: str, service: str) -> tuple[str, Mapping[str, Any]] | None:
        """The newest run whose configuration of ``service`` was kept, and that configuration (argv, environment)."""
        ...

    def last_stored(self, machine_id: str, runbook: str, name: str) -> tuple[str, Mapping[str, Any]] | None:
        """The newest completed run of a runbook on this machine that stored something under ``name``, and that."""
        ...

    def stored_value(self, run_id: str, name: str, *, machine_id: str = "") -> Mapping[str, Any]:
        """The value that run ``run_id`` stored under ``name`` (schema, value); with ``machine_id`` only of that machine.

        Raises NoSuchRun.
        """
        ...


class Part(Protocol):
    """A part of a change that depends on what its first acts showed. It does what the approved plan lists, or less."""

    @property
    def title(self) -> str: ...

    def act(self, plan: Plan, hands: Hands, tell: Callable[[str], None]) -> Applied: ...


class Custody(Protocol):
    """One mutating run a machine: the lease that is held there, and the approvals that were used there."""

    @property
    def approvals(self) -> Probe[int]:
        """How many approvals were ever used there."""
        ...

    def take(self, hands: Hands, approval: Approval) -> None:
        """Hold the machine for this run, and use up the approval there. Raises LeaseHeld, ApprovalUsed: then it holds nothing."""
        ...

    def hold(self, hands: Hands) -> None:
        """Hold it for as long again. Raises LeaseHeld when somebody took it away: then this run must change nothing more."""
        ...

    def release(self, hands: Hands) -> None:
        """Let the machine go."""
        ...


class Earlier(Protocol):
    """The run that this one goes on with: what it planned, who approved it, and what it measured before the change."""

    run_id: str
    origin: str  # the run that began the change: what it left on the machine carries this id

    def plan(self, change: str) -> Plan | None: ...

    def approval(self, digest: str) -> Approval | None:
        """The approval that opened its gate for exactly this plan."""
        ...

    def measurement(self, name: str) -> Measurement | None: ...

    @property
    def decision(self) -> Decision | None:
        """What was decided of the change, by this run or by one that went on with it."""
        ...


class NoMemory:
    """A run without an archive remembers nothing."""

    def issued(self, digest: str) -> None:
        return None

    def last_kept(self, machine_id: str, service: str) -> None:
        return None

    def last_stored(self, machine_id: str, runbook: str, name: str) -> None:
        return None

    def stored_value(self, run_id: str, name: str, *, machine_id: str = "") -> Mapping[str, Any]:
        raise NoSuchRun(f"there is no archive to look for run {run_id!r} in")


class Findings(tuple[Finding, ...]):
    """What a check step came to; shows itself as a table in a notebook."""

    look: str = ""

    @property
    def verdict(self) -> Verdict:
        return worst(f.verdict for f in self)

    def _repr_html_(self) -> str:
        from proofbook.view import findings_html

        return findings_html(self)

    def __repr__(self) -> str:
        from proofbook.view import findings_text

        return findings_text(self)


@dataclass(frozen=True)
class PlanView:
    """A plan as a person reads it."""

    plan: Plan

    @property
    def digest(self) -> str:
        return self.plan.digest

    def _repr_html_(self) -> str:
        from proofbook.view import plan_html

        return plan_html(self.plan)

    def __repr__(self) -> str:
        from proofbook.view import plan_text

        return plan_text(self.plan)


@dataclass(frozen=True)
class About:
    """What a run is of: fixed when it opens."""

    run_id: str
    runbook: str
    title: str
    mode: str  # "live" or "headless"
    changes_host: bool


def _slug(argv: Sequence[str]) -> str:
    words = [a for a in argv if len(a) < 60 and "\n" not in a]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", " ".join(words))[:48].strip("-.") or "output"


class Run:
    """One pass of one runbook over one host."""

    def __init__(
        self,
        about: About,
        *,
        folder: Path,
        writer: Writer,
        journal: Journal,
        redactor: Redactor,
        host: Host,
        intent: Any,
        parameters: Any,
        listeners: Sequence[Listener] = (),
        memory: Memory | None = None,
        person: Person | None = None,
        custody: Custody | None = None,
        earlier: Earlier | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """``keys``: the API keys of services by their spec; the redactor must know them already."""
        self.about = about
        self.folder = folder
        self.host = host
        self.intent = intent
        self.parameters = parameters
        self._writer = writer
        self._journal = journal
        self._redactor = redactor
        self._listeners = list(listeners)
        self.memory: Memory = memory or NoMemory()
        self._person = person
        self._custody = custody
        self._earlier = earlier
        self._keys = dict(keys or {})
        self._holds_for: Plan | None = None  # the plan for which this run holds the machine's lease
        self._unconfirmed: Applied | None = None
        self._came_to = RunStatus.COMPLETED
        self._decision: Decision | None = None
        self._decided_on_nothing = False
        self._settled = ""  # how an approved change was found to have ended before this run came to act
        self._done: dict[tuple[str, str], Any] = {}
        self._steps = 0
        self._acts = 0
        self._custodial = 0  # acts that only hold the machine, or let it go
        self._evidence = 0
        self._findings: list[Finding] = []
        self._approved: dict[str, Approval] = {}
        self._used: set[str] = set()
        self._plan_seen: dict[str, datetime] = {}
        self._written: dict[str, str] = {}  # digest of a plan → digest of what the journal holds of it
        self._maybe_kept = False
        self._back = ""  # how the state before is back
        self._changes: dict[str, Change] = {}
        self._status = RunStatus.RUNNING
        self._conclusion: Mapping[str, Any] | None = None
        self.seen = Seen()

    # -------------------------------------------------------------------------------------------- state

    @property
    def status(self) -> RunStatus:
        return self._status

    @property
    def resuming(self) -> bool:
        """Whether this run goes on with what another one had begun."""
        return self._earlier is not None

    @property
    def origin(self) -> str:
        """The run that began the change: this one, or the one that it goes on with."""
        return self._earlier.origin if self._earlier is not None else self.about.run_id

    @property
    def earlier_decision(self) -> Decision | None:
        """What was decided of the change before this run went on with it; None when nothing was, or it goes on with nothing."""
        return self._earlier.decision if self._earlier is not None else None

    @property
    def open(self) -> bool:
        return self._status is RunStatus.RUNNING

    @property
    def verdict(self) -> Verdict:
        return worst(f.verdict for f in self._findings)

    @property
    def findings(self) -> Findings:
        return Findings(self._findings)

    def __repr__(self) -> str:
        so_far = "so far " if self.open else ""
        return f"<Run {self.about.run_id} of {self.about.runbook} on {self.host.name}: {self._status}, {so_far}{self.verdict}>"

    def _say(self, event: str, data: Mapping[str, Any], *, durable: bool = False) -> Mapping[str, Any]:
        clean = self._journal.clean(data)
        self._journal.append(event, clean, durable, cleaned=True)
        for listener in self._listeners:
            listener(event, clean)
        return clean

    def tell(self, text: str) -> None:
        """One line of progress: shown now, kept in the journal's timeline."""
        self._say("progress", {"text": text})

    # ------------------------------------------------------------------------------------------- opening

    def opened(self, facts: Mapping[str, Any]) -> None:
        """Journal the opening. Called once, by :func:`proofbook.notebook.open_run`."""
        self._say("run.opened", facts, durable=True)

    def reach(self) -> None:
        """First contact: learn which machine answers. A machine that cannot be reached ends the run as aborted."""

        def first() -> None:
            identity = self.host.prove()
            self._say(
                "host.proven", {"name": self.host.name, "identity": identity, "peer": self.host.peer, "note": "first contact"}
            )

        self._step("reach", "reach", "Which machine answers?", first)

    # --------------------------------------------------------------------------------------------- steps

    def _step(self, verb: str, key: str, title: str, do: Callable[[], T], *, again: bool = False) -> T:
        if (verb, key) in self._done and not again:
            if self.open:
                self._say(
                    "step.ended",
                    {"step": self._steps, "key": key, "verb": verb, "outcome": "skipped", "error": None, "reused": True},
                )
            stored: T = self._done[(verb, key)]
            return stored
        if not self.open:
            raise Sealed(
                f"run {self.about.run_id} has ended ({self._status}); its record is sealed",
                hint="open a new run: execute the cell with open_run again",
            )
        self._steps += 1
        step = self._steps
        started = self.host.clock.now()
        self._say("step.started", {"step": step, "key": key, "verb": verb, "title": title})
        try:
            value = do()
        except BaseException as error:
            self._step_failed(step, key, verb, error, started)
            raise
        self._done[(verb, key)] = value
        took = (self.host.clock.now() - started).total_seconds()
        self._say(
            "step.ended",
            {"step": step, "key": key, "verb": verb, "outcome": "ok", "error": None, "duration_s": took, "reused": False},
        )
        return value

    def _step_failed(self, step: int, key: str, verb: str, error: BaseException, started: datetime) -> None:
        if not self.open:
            return
        if isinstance(error, DiskFull):
            self._end_on_full_disk(step, verb, error)
            return
        took = (self.host.clock.now() - started).total_seconds()
        text = str(error) or type(error).__name__
        outcome = "stopped" if isinstance(error, StoppedAtGate) else "failed"
        self._say(
            "step.ended",
            {"step": step, "key": key, "verb": verb, "outcome": outcome, "error": text, "duration_s": took, "reused": False},
        )
        if isinstance(error, StoppedAtGate):
            summary = "The plan was declined." if error.declined else f"Waiting for an approval of {error.digest}."
            self._end(RunStatus.STOPPED_AT_GATE, summary)
        elif self._is_final(error):
            message = str(error.args[0]) if error.args else _NAMELESS.get(type(error).__name__, type(error).__name__)
            hint = self._what_now(error.hint if isinstance(error, ProofbookError) else "")
            self._say("trouble", {"error": type(error).__name__, "message": message, "hint": hint, "step": step}, durable=True)
            self._end(RunStatus.ABORTED, f"Aborted in step {step} ({verb}): {message.splitlines()[0]}{self._acts_sent()}")
        else:
            self._say("trouble", {"error": type(error).__name__, "message": text, "hint": "", "step": step}, durable=True)

    def _acts_sent(self) -> str:
        """What an ended run must not hide: that something was already asked of the machine."""
        acts = self._acts - self._custodial
        if not acts:
            return ". Nothing was changed on the machine" if self._custodial else ""
        if self._unconfirmed is not None and self._maybe_kept:
            return (
                f". Keeping the change was asked for and its answer never came: it is kept, or its guard takes it back; "
                f"`proofbook resume {self.about.run_id}` finds out, `proofbook rollback {self.about.run_id}` undoes it either way"
            )
        if self._unconfirmed is not None:
            plan, run = self._unconfirmed.plan, self.about.run_id
            minutes = plan.settings.get("guard_s", 0) / 60
            when = f"{minutes:g} min after it was armed" if minutes else "when its time is over"
            return (
                f". In effect or half done, and not confirmed: {plan.title}; its guard on the machine takes it back {when}; "
                f"`proofbook rollback {run}` undoes it now, `proofbook resume {run}` goes on with it"
            )
        return f". {acts} act(s) had been sent to the machine by then; look what it does now before anything else"

    def _what_now(self, hint: str) -> str:
        """What to do after the end of this run: the error's own hint, and what a change that it had begun needs."""
        return "\n  → ".join(filter(None, (hint, self._acts_sent().removeprefix(". "))))

    def _end_on_full_disk(self, step: int, verb: str, error: DiskFull) -> None:
        """The journal keeps a reserve for this: say that the disk is full, and stop. What was written stays readable."""
        trouble = {"error": "DiskFull", "message": str(error.args[0]), "hint": self._what_now(error.hint), "step": step}
        with suppress(DiskFull):
            self._say("trouble", trouble, durable=True)
        with suppress(DiskFull):
            self._end(RunStatus.ABORTED, f"Aborted in step {step} ({verb}): {error.args[0]}{self._acts_sent()}")

    def _is_final(self, error: BaseException) -> bool:
        """Live, a person may mend a mistake and say the verb again; headless nobody will."""
        if self.about.mode == "headless":
            return True
        return isinstance(error, OtherMachine | KeyboardInterrupt | SystemExit)

    # ------------------------------------------------------------------------------------------- looking

    def _keep(self, result: Result, probe: str, boot_id: str) -> Evidence:
        self._evidence += 1
        number = f"e{self._evidence:04d}"
        slug = self._redactor.text(_slug(result.command.argv), "file names")
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", slug)
        kept: dict[str, Any] = {}
        redactions = 0
        for stream, data in (("stdout", result.stdout), ("stderr", result.stderr)):
            path, digest, size = "", "", 0
            if data:
                written = self._writer.write_output(f"evidence/{number}-{slug}.{'out' if stream == 'stdout' else 'err'}", data)
                path, digest, size = written.path, written.sha256, written.size
                redactions += written.redactions
            kept |= {f"{stream}_file": path, f"{stream}_sha256": digest, f"{stream}_bytes": size}
        evidence = Evidence(
            id=number,
            host=self.host.name,
            argv=result.command.argv,
            exit_status=result.exit_status,
            started_at=result.started_at,
            duration_s=round(result.duration_s, 6),
            boot_id=boot_id,
            timed_out=result.timed_out,
            truncated=bool(result.lost_stdout or result.lost_stderr),
            redactions=redactions,
            trouble=result.trouble,
            **kept,
        )
        self._say("evidence", {**msgspec.to_builtins(evidence), "probe": probe})
        return evidence

    def look(self, *probes: Probe[Any], look: str = "") -> Seen:
        """Ask probes, keep their evidence, return their observations. A lost machine makes every answer unknown."""
        boot_id = self.host.identity.boot_id if self.host.peer else ""
        try:
            answers = self._drive(probes)
            boot_id = self.host.identity.boot_id
        except TransportError as error:
            reason = f"{self.host.name} cannot be asked: {str(error).splitlines()[0]}"
            answers = {p: Answer(None, reason, ()) for p in probes}
        kept: dict[int, Evidence] = {}
        observations = []
        for probe, answer in answers.items():
            evidence = []
            for result in answer.results:
                if id(result) not in kept:
                    kept[id(result)] = self._keep(result, probe.name, boot_id)
                evidence.append(kept[id(result)])
            observation = Observation(probe, answer.value, answer.unknown, self.host.clock.now(), boot_id, tuple(evidence))
            observations.append(observation)
            value = plain(observation.value)
            size = len(msgspec.json.encode(value))
            # WHY: the lines of a log are in its evidence already, from which the probe reads them at any time.
            told = {"value": None, "value_bytes": size} if size >= LONG and evidence else {"value": value}
            self._say(
                "observation",
                {
                    "probe": probe.name,
                    "asked": repr(probe),
                    "known": observation.known,
                    "unknown": observation.unknown,
                    **told,
                    "evidence": [e.id for e in evidence],
                    "boot_id": boot_id,
                    "look": look,
                },
            )
        return Seen(observations)

    def _drive(self, probes: Sequence[Probe[Any]]) -> Mapping[Probe[Any], Answer[Any]]:
        """Ask; after a lost connection log in once more (to the same machine only) and ask again: reads may be repeated."""
        try:
            return drive(probes, self.host.gather)
        except TransportError as error:
            lost = str(error).splitlines()[0]
        boot_before = self.host.identity.boot_id
        self.host.reopen()
        rebooted = "" if self.host.identity.boot_id == boot_before else "; THE BOOT-ID CHANGED MEANWHILE"
        self.proven(f"logged in again after: {lost}{rebooted}")
        return drive(probes, self.host.gather)

    def observe(self, *probes: Probe[Any], look: str = "now", title: str = "", again: bool = False) -> Seen:
        """Verb: ask read-only questions. Keyed by the questions and the look."""

        def do() -> Seen:
            seen = self.look(*dict.fromkeys(probes), look=look)
            self.seen = self.seen.merged(seen)
            return seen

        return self._step("observe", f"{look}:{sorted(map(repr, probes))}", title or f"Observe ({look})", do, again=again)

    def check(self, *checks: Check, look: str = "now", title: str = "", again: bool = False) -> Findings:
        """Verb: hold expectations against fresh observations. All checks of one step share one look."""

        if not checks:
            return Findings()

        def do() -> Findings:
            needed = dict.fromkeys(p for check in checks for p in check.needs())
            seen = self.look(*needed, look=look)
            self.seen = self.seen.merged(seen)
            found = [f for check in checks for f in self._judge(check, seen, look)]
            self._findings.extend(found)
            findings = Findings(found)
            findings.look = look
            return findings

        return self._step("check", f"{look}:{sorted(map(repr, checks))}", title or f"Check ({look})", do, again=again)

    def _judge(self, check: Check, seen: Seen, look: str) -> list[Finding]:
        try:
            drafts = list(check.judge(seen))
        except CannotTell as error:
            drafts = [check.unknown(str(error))]
        if not drafts:
            drafts = [check.unknown("there was nothing to judge, and nothing is not a pass")]
        asked = [seen[p] for p in check.needs() if p in seen]
        evidence = tuple(dict.fromkeys(e.id for o in asked for e in o.evidence))
        findings = []
        for draft in drafts:
            finding = replace(
                draft,
                look=look,
                probes=draft.probes or tuple(dict.fromkeys(o.probe.name for o in asked)),
                evidence=draft.evidence or evidence,
            )
            said = self._say("finding", {**msgspec.to_builtins(finding), "title": check.title})
            findings.append(msgspec.convert({k: v for k, v in said.items() if k != "title"}, Finding))
        return findings

    # ----------------------------------------------------------------------------------------- measuring

    def measure(self, measure: Measure | None, *, title: str = "", again: bool = False) -> Measurement | None:
        """Verb: experiment on the live system. What an earlier run measured before its change is taken from there.

        None means that there is nothing to measure at this point; whoever says so has noted why.
        """
        if measure is None:
            return None

        def do() -> Measurement:
            stored = self._earlier.measurement(measure.name) if self._earlier is not None else None
            if stored is not None and self._earlier is not None:
                self._say("measurement", {**msgspec.to_builtins(stored), "from_run": self._earlier.run_id}, durable=True)
                return stored
            bench = _RunBench(self, measure.name)
            taken = measure.take(bench)
            measured = replace(taken, evidence=tuple(dict.fromkeys([*taken.evidence, *bench.kept])))
            self._say("measurement", {**msgspec.to_builtins(measured), "from_run": ""}, durable=True)
            return measured

        return self._step("measure", repr(measure), title or measure.title, do, again=again)

    def picture(self, name: str, title: str, png: bytes, alt: str) -> None:
        """Put a picture (PNG) into the record. ``alt`` says in words what it shows."""
        path = f"pictures/{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.png"
        self._writer.write_bytes(path, png)
        self._say("picture", {"name": name, "title": title, "file": path, "alt": alt})

    # ------------------------------------------------------------------------------------------ changing

    def plan(self, change: Change, *, title: str = "") -> PlanView:
        """Verb: what would be done, what takes it back, what cannot be taken back. Nothing is changed."""

        def do() -> PlanView:
            approvals = [self._custody.approvals] if self._custody is not None else []
            seen = self.look(*change.needs(), *approvals, look="plan")
            self.seen = self.seen.merged(seen)
            plan = self._begun(change) or self._numbered(change.plan(seen, self.host.identity), seen)
            issued = datetime.now(UTC)
            self._changes[plan.digest] = change
            self._plan_seen[plan.digest] = issued
            about = {**msgspec.to_builtins(plan), "digest": plan.digest, "issued_at": issued.isoformat()}
            self._written[plan.digest] = msgspec.convert(self._say("plan", about, durable=True), Plan).digest
            return PlanView(plan)

        view = self._step("plan", repr(change), title or f"What would change: {change.name}", do)
        if self._person is not None and self.open:
            self._person.show(view.plan)
        return view

    def _numbered(self, plan: Plan, seen: Seen) -> Plan:
        """The plan with the count of approvals that were used there; an empty one asks for none."""
        if self._custody is None or plan.empty:
            return plan
        try:
            used: int | str = seen.value(self._custody.approvals)
        except CannotTell:
            used = "not known"
        return replace(plan, pre_state={**plan.pre_state, _APPROVALS: used})

    def _begun(self, change: Change) -> Plan | None:
        """The plan that the earlier run had begun to act on; the machine may be anywhere between its two ends now."""
        if self._earlier is None:
            return None
        plan = self._earlier.plan(change.name)
        if plan is None or self._earlier.approval(plan.digest) is None:
            return None
        now = self.host.identity
        if (plan.host.machine_id, plan.host.host_key) != (now.machine_id, now.host_key):
            raise OtherMachine(
                f"run {self._earlier.run_id} was of another machine (machine-id {plan.host.machine_id})",
                hint=f"{self.host.name} is {now.machine_id}; go on where that run began",
            )
        if plan.host.boot_id != now.boot_id:
            self.tell("the machine was rebooted since the change was planned: what is on its disk is looked at as it is now")
        return plan

    def gate(self, view: PlanView, *, approver: str = "", approved: str = "") -> None:
        """Verb: let exactly this plan through, or stop. ``approved`` is the digest of the plan that was read."""
        plan = view.plan
        self._step("gate", plan.digest, f"Gate: {plan.title}", lambda: self._gate(plan, approver.strip(), approved.strip()))

    def _gate(self, plan: Plan, approver: str, approved: str) -> None:
        if plan.empty:
            self._say("gate", {"digest": plan.digest, "decision": "nothing-to-do", "approver": "", "how": "", "text": plan.title})
            return
        if self._written.get(plan.digest, plan.digest) != plan.digest:
            reason = (
                "something in it is held for a secret, and is in no record; so no other run could go on with it or take it back"
            )
            refused = {"digest": plan.digest, "decision": "refused", "approver": approver, "how": "", "text": reason}
            self._say("gate", refused, durable=True)
            raise NotApproved(
                f"{plan.title} cannot be approved: {reason}",
                hint="look for [redacted: in the plan of the record: a password or key that is also a name there must be another",
            )
        how = "parameter"
        before = self._earlier.approval(plan.digest) if self._earlier is not None else None
        if before is not None and self._earlier is not None:
            approver, approved, how = before.approver, before.digest, f"given in run {self._earlier.run_id}"
        if not approved and self._person is not None:
            approver, how = self._person.ask(plan)
            approved = plan.digest if approver else ""
        if not approved:
            declined = self._person is not None  # somebody was there and said no
            decision, by = ("declined", how) if declined else ("waiting", "")
            self._say(
                "gate",
                {"digest": plan.digest, "decision": decision, "approver": "", "how": by, "text": plan.title},
                durable=True,
            )
            if declined:
                raise StoppedAtGate(
                    f"{plan.title} was not approved; {plan.host.hostname} was left as it is",
                    digest=plan.digest,
                    declined=True,
                    hint="to do it after all, open a new run: execute the cells again from the one with open_run",
                )
            raise StoppedAtGate(
                f"{plan.title} needs an approval",
                digest=plan.digest,
                hint=f"read the plan, then run again with approved={plan.digest} and approver=<your name>",
            )
        reason = self._why_not(plan, approver, approved)
        if reason:
            self._say(
                "gate",
                {"digest": plan.digest, "decision": "refused", "approver": approver, "how": how, "text": reason},
                durable=True,
            )
            raise NotApproved(
                f"the approval does not open this gate: {reason}",
                hint="run again without --approve: it shows the plan of now, and what to type to approve that one",
            )
        approval = Approval(plan.digest, approver, how, datetime.now(UTC), self._issuer(plan, how))
        self._approved[plan.digest] = approval
        self._say(
            "gate",
            {
                "digest": plan.digest,
                "decision": "approved",
                "approver": approver,
                "how": how,
                "text": plan.title,
                "at": approval.at.isoformat(),
                "issued_by": approval.issued_by,
            },
            durable=True,
        )

    def _issuer(self, plan: Plan, how: str) -> str:
        """The run whose plan was read by the one who approved it, "" when no record says it."""
        before = self._earlier.approval(plan.digest) if self._earlier is not None else None
        if before is not None:
            return before.issued_by
        issued = self.memory.issued(plan.digest) if how == "parameter" else (self.about.run_id, None)
        return issued[0] if issued else ""

    def _why_not(self, plan: Plan, approver: str, approved: str) -> str:
        if not approver:
            return "it does not say who approves (approver is empty)"
        if approved != plan.digest:
            differs = "the machine, the parameters, or the approvals that were used there differ from what was read"
            return f"it is for another plan than that of now ({differs}): {approved[:19]}…, not {plan.digest[:19]}…"
        issued = self.memory.issued(approved)
        if self._earlier is not None and self._earlier.approval(approved) is not None:
            return ""  # the change was begun in time; leaving it half done helps nobody
        if issued and datetime.now(UTC) - issued[1] > APPROVAL_GOOD_FOR:
            return (
                f"the plan was made at {issued[1]:%Y-%m-%d %H:%M} UTC in {issued[0]}; approvals are good for {APPROVAL_GOOD_FOR}"
            )
        return ""

    def apply(self, view: PlanView) -> Applied:
        """Verb: act on an approved plan, once. Refuses without an approval, or when the machine changed since the plan."""
        plan = view.plan
        return self._step("apply", plan.digest, f"Apply: {plan.title}", lambda: self._apply(plan))

    def _apply(self, plan: Plan) -> Applied:
        if plan.empty:
            applied = Applied(plan, "nothing-to-do", plan.title)
            self._say("applied", _without_plan(applied))
            return applied
        if plan.digest not in self._approved:
            raise NotApproved(
                f"{plan.title} was not approved in this run",
                hint="run the gate cell first; it refuses without an approval of this plan",
            )
        if plan.digest in self._used:
            raise NotApproved("this approval was used already", hint="make a new plan and have it approved")
        change = self._changes[plan.digest]
        hands = _RunHands(self, plan)
        if self._custody is not None:
            self._take(hands, self._approved[plan.digest])
        if not self._is_begun(plan):
            self._refuse_drift(change, plan)
        self._used.add(plan.digest)
        self._unconfirmed = Applied(plan, "unconfirmed", f"{plan.title}: begun") if plan.undo else None
        applied = change.apply(plan, hands, self.tell)
        if applied.outcome == "rolled-back":  # not by this run: it found it so
            self._settled = applied.summary
            self.came_to(applied)
            return applied
        if applied.outcome == "nothing-to-do":
            self._settled = applied.summary
        self._unconfirmed = applied if plan.undo and not self._settled else None
        self._say("applied", _without_plan(applied), durable=True)
        return applied

    def _take(self, hands: _RunHands, approval: Approval) -> None:
        """Hold the machine. What is sent to it for that changes nothing of it, so it does not count as an act of the change."""
        if self._custody is None:
            return
        acts = self._acts
        try:
            self._custody.take(hands, approval)
            self._holds_for = hands.plan
        finally:
            self._custodial += self._acts - acts

    def suspend(self, applied: Applied | None) -> Applied | None:
        """Verb: the state before the change for a while, under the same guard and lease. None: nobody asks for that."""
        if applied is None:
            return None
        plan = applied.plan
        return self._step("suspend", plan.digest, f"Suspend: {plan.title}", lambda: self._go_between(plan, back=True))

    def reinstate(self, suspended: Applied | None) -> Applied | None:
        """Verb: put a suspended change in effect again. None: it was not suspended, or is not wanted again."""
        if suspended is None:
            return None
        plan = suspended.plan
        return self._step(
            "reinstate", plan.digest, f"Put in effect again: {plan.title}", lambda: self._go_between(plan, back=False)
        )

    def _go_between(self, plan: Plan, *, back: bool) -> Applied:
        """Between the two ends of a change that is guarded and not decided on: whatever ends here, the guard takes it back."""
        if plan.digest not in self._used or self._unconfirmed is None:
            raise NotApproved(
                f"{plan.title} is not in effect under guard in this run",
                hint="only a change that was applied here can be suspended",
            )
        change, hands = self._changes[plan.digest], _RunHands(self, plan)
        self._hold(hands)
        applied = (change.suspend if back else change.apply)(plan, hands, self.tell)
        if applied.outcome == "rolled-back":  # the guard was faster
            self._settled = applied.summary
        self.came_to(applied)
        return applied

    def further(self, applied: Applied, part: Part | None) -> Applied | None:
        """Verb: the part of an approved change that waited for what its first acts showed. None: there is nothing to do.

        It is of the same approval, under the same guard and lease; whatever it comes to, the change is still to be decided on.
        """
        if part is None:
            return None
        plan = applied.plan

        def do() -> Applied:
            if plan.digest not in self._used or self._unconfirmed is None:
                raise NotApproved(
                    f"{plan.title} is not in effect under guard in this run",
                    hint="only a change that was applied here has a further part",
                )
            hands = _RunHands(self, plan)
            self._hold(hands)
            went = part.act(plan, hands, self.tell)
            self._say("applied", _without_plan(went), durable=True)
            return went

        return self._step("further", f"{plan.digest}:{part!r}", f"{part.title}: {plan.title}", do)

    def _hold(self, hands: _RunHands) -> None:
        if self._custody is None:
            return
        acts = self._acts
        try:
            self._custody.hold(hands)
        finally:
            self._custodial += self._acts - acts

    def _is_begun(self, plan: Plan) -> bool:
        return self._earlier is not None and self._earlier.approval(plan.digest) is not None

    def _refuse_drift(self, change: Change, plan: Plan) -> None:
        seen = self.look(*change.needs(), look="before the act")
        again = change.plan(seen, self.host.identity)
        if _APPROVALS in plan.pre_state and not again.empty:  # by now its own approval is among those that were used
            again = replace(again, pre_state={**again.pre_state, _APPROVALS: plan.pre_state[_APPROVALS]})
        if again.digest != plan.digest:
            self._let_go()
            raise PlanDrifted(
                f"the machine is no longer as the plan saw it (plan {plan.digest[:19]}…, now {again.digest[:19]}…)",
                hint="make a new plan, read it, and have it approved",
            )

    def confirm(self, applied: Applied, decision: Decision) -> Applied:
        """Verb: keep what was applied, or take it back, as ``decision`` says. Keeping needs a fresh login first."""
        plan = applied.plan
        title = f"{'Keep' if decision.keep else 'Take back'}: {plan.title}"
        return self._step("confirm", plan.digest, title, lambda: self._confirm(applied, decision))

    def _confirm(self, applied: Applied, decision: Decision) -> Applied:
        plan = applied.plan
        if applied.outcome == "rolled-back":  # found so by a run that went on with it: nothing is left to decide
            return applied
        acted = applied.outcome != "nothing-to-do"
        self._decision, self._decided_on_nothing = decision, not acted
        self._say("decision", {**msgspec.to_builtins(decision), "digest": plan.digest, "acted": acted}, durable=True)
        if not acted:
            return applied
        change, hands = self._changes[plan.digest], _RunHands(self, plan)
        if decision.keep:
            self.host.reopen()
            self.proven("a fresh login before the change is kept")
            self._hold(hands)  # whoever broke our lease has the machine now, and may be at work on the same files
            came_to = self._kept(change, plan, hands)
        else:
            came_to = change.rollback(plan, hands, self.tell)
        self.came_to(came_to)
        if came_to.facts.get("start") == "ready":  # a service was started for that, and followed until it was ready
            self._back = came_to.summary
        return came_to

    def _kept(self, change: Change, plan: Plan, hands: _RunHands) -> Applied:
        try:
            return change.confirm(plan, hands, self.tell)
        except (GuardRefused, PlanDrifted):
            raise  # the machine itself said no
        except BaseException:  # Ctrl-C and a full disk of ours too: the word was on its way
            self._maybe_kept = True
            raise

    def rollback(self, change: Change, plan: Plan) -> Applied:
        """Verb: undo what another run of ours had begun, from its plan."""

        def do() -> Applied:
            about = {**msgspec.to_builtins(plan), "digest": plan.digest, "issued_at": datetime.now(UTC).isoformat()}
            self._say("plan", about, durable=True)
            hands = _RunHands(self, plan)
            approval = self._earlier.approval(plan.digest) if self._earlier is not None else None
            if approval is None:
                raise NotApproved(f"{plan.title} was never approved, so there is nothing of it to take back")
            self._take(hands, approval)
            self._unconfirmed = Applied(plan, "unconfirmed", f"{plan.title}: begun by an earlier run")
            undone = change.rollback(plan, hands, self.tell)
            self.came_to(undone)
            if undone.outcome == "rolled-back":
                self._came_to = RunStatus.COMPLETED  # that was what this run was for
            return undone

        return self._step("rollback", plan.digest, f"Take back: {plan.title}", do)

    def came_to(self, applied: Applied) -> None:
        """How the change ended, for the record and for the run's status."""
        self._say("applied", _without_plan(applied), durable=True)
        ends = {"rolled-back": RunStatus.ROLLED_BACK, "rollback-failed": RunStatus.ROLLBACK_FAILED}
        self._came_to = ends.get(applied.outcome, self._came_to)
        if applied.outcome in ("confirmed", "rolled-back", "restored"):
            self._unconfirmed = None

    def _let_go(self) -> None:
        held_for, self._holds_for = self._holds_for, None
        if self._custody is not None and held_for is not None:
            acts = self._acts
            try:
                self._custody.release(_RunHands(self, held_for))
            finally:
                self._custodial += self._acts - acts

    def proven(self, note: str) -> None:
        """Journal who answers now (after a reconnect)."""
        self._say(
            "host.proven",
            {"name": self.host.name, "identity": self.host.identity, "peer": self.host.peer, "note": note},
            durable=True,
        )

    # ------------------------------------------------------------------------------------ words and waits

    def wait(self, minutes: float, *, why: str) -> None:
        """Verb: let the host's time pass."""
        if minutes <= 0:
            return

        def do() -> None:
            left = minutes * 60
            while left > 0:
                portion = min(60.0, left)
                self.host.clock.sleep(portion)
                left -= portion
                if left > 0:
                    self.tell(f"{left / 60:.0f} min left: {why}")

        self._step("wait", f"{why}:{minutes}", f"Wait {minutes:g} min: {why}", do)

    def note(self, text: str, *, kind: str = "operator", title: str = "") -> None:
        """Verb: a person's own words, or what was not verified, for the record."""
        if text.strip():
            self._say("note", {"kind": kind, "text": text, "title": title}, durable=True)

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> None:
        """Put a table into the record."""
        self._say(
            "table", {"name": name, "title": title, "columns": list(columns), "rows": [list(r) for r in rows], "note": note}
        )

    def value(self, name: str, schema: int, value: Any) -> None:
        """Store a structured value under a name, for later runs to compare with."""
        self._say("value", {"name": name, "schema": schema, "value": value}, durable=True)

    def configuration(self, services: Mapping[str, Any]) -> None:
        """Store what was found running: service → argv and environment."""
        if services:
            self._say("configuration", services, durable=True)

    def conclude(self, conclusion: Mapping[str, Any]) -> None:
        """The conclusion of an experiment."""
        self._conclusion = conclusion
        self._say("conclusion", conclusion, durable=True)

    # ------------------------------------------------------------------------------------------- closing

    def close(self, summary: str = "") -> Run:
        """Verb: end the run and seal its record. A later close changes nothing."""
        if self.open:
            if self._unconfirmed is not None and self._came_to is RunStatus.COMPLETED:
                self._take_back_unconfirmed(self._unconfirmed)
            self._end(self._came_to, summary)
        return self

    def _take_back_unconfirmed(self, applied: Applied) -> None:
        """A change that nobody confirmed is not kept: the guard would undo it later, so it is done now and seen to work."""
        decision = Decision(False, "NOT_CONFIRMED", "the run was closed without a decision to keep the change")
        with suppress(ProofbookError):  # the step's failure is journaled; the status below says the rest
            self.confirm(applied, decision)
        if self._unconfirmed is not None:
            self._came_to = RunStatus.ROLLBACK_FAILED

    def abort(self, why: str) -> None:
        """End the run as aborted (the kernel goes away, somebody interrupts)."""
        if self.open:
            trouble = {"error": "Aborted", "message": why, "hint": self._what_now(""), "step": self._steps}
            self._say("trouble", trouble, durable=True)
            self._end(RunStatus.ABORTED, why + self._acts_sent())

    def _end(self, status: RunStatus, summary: str) -> None:
        if self._unconfirmed is None:
            with suppress(ProofbookError):  # a lease that cannot be given back runs out; the act is journaled either way
                self._let_go()
        self._status = status
        # WHY: what was checked before the end is not the whole; a run that did not complete is never judged better than UNKNOWN.
        verdict = self.verdict if status is RunStatus.COMPLETED else worst([self.verdict, Verdict.UNKNOWN])
        self._say(
            "run.closing",
            {
                "status": status,
                "verdict": verdict,
                "summary": " ".join(filter(None, (summary or self._summary(status, verdict), self._how_it_is_back()))),
                "exit_code": exit_code(status, verdict),
            },
            durable=True,
        )
        self.host.close()

    def _how_it_is_back(self) -> str:
        """A sentence on what serves again, after what was done was taken back; "" otherwise."""
        return f"{self._back[0].upper()}{self._back[1:]}." if self._back else ""

    def _summary(self, status: RunStatus, verdict: Verdict) -> str:
        once = {(f.check, f.subject, f.verdict, f.reason) for f in self._findings}  # the same at both looks counts once
        counts = {v: sum(verdict is v for _, _, verdict, _ in once) for v in Verdict}
        told = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
        if self._decision is not None and self._decided_on_nothing and self._settled:
            before = f"{self._settled[0].upper()}{self._settled[1:]}"
            return f"{before}. The decision stands ({self._decision.rung}): {self._decision.because} ({told})."
        if self._decision is not None:
            kept = "Kept" if self._decision.keep else "Put back as planned"
            kept = "Nothing was changed" if self._decided_on_nothing else kept
            done = {RunStatus.ROLLED_BACK: "Taken back", RunStatus.ROLLBACK_FAILED: "COULD NOT BE TAKEN BACK"}.get(status, kept)
            return f"{done} ({self._decision.rung}): {self._decision.because} ({told})."
        if self._settled:
            return f"{self._settled[0].upper()}{self._settled[1:]} ({told or 'nothing was checked'})."
        worst_finding = next(
            (f for v in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN) for f in self._findings if f.verdict is v), None
        )
        head = f"{verdict}"
        if worst_finding and verdict is worst_finding.verdict:
            about = f"{worst_finding.subject}: " if worst_finding.subject else ""
            head = f"{verdict}: {about}{worst_finding.reason}"
        return f"{head} ({told or 'nothing was checked'})."


def _without_plan(applied: Applied) -> Mapping[str, Any]:
    return {
        "change": applied.plan.change,
        "outcome": applied.outcome,
        "summary": applied.summary,
        "facts": applied.facts,
        "digest": applied.plan.digest,
    }


class _RunHands:
    """The hands of an approved plan: see :class:`proofbook.host.Hands`."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run = run
        self.plan = plan
        self._digest = plan.digest

    @property
    def host(self) -> Host:
        return self._run.host

    @property
    def run_id(self) -> str:
        return self._run.origin

    def put(
        self,
        what: str,
        path: str,
        data: bytes,
        *,
        container: ContainerSpec | None = None,
        mode: int = 0o644,
        backup: bool = False,
    ) -> Result:
        do = put_command(data, path, mode=mode, backup=backup, root=True)
        argv = (*(container.enter() if container else ()), *do.argv)
        result = self.act(what, replace(do, argv=argv))
        assert result is not None  # act gives None only where a loss was expected
        return result

    def look(self, *probes: Probe[Any]) -> Seen:
        return self._run.look(*probes, look="acting")

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        run = self._run
        run._acts += 1
        act = run._acts
        about = {"act": act, "what": what, "argv": list(do.argv), "host": run.host.name, "digest": self._digest}
        run._say("act.intent", about, durable=True)
        try:
            result = run.host.transport.run(do)
        except TransportError as error:
            note = str(error).splitlines()[0]
            run._say(
                "act.outcome", {"act": act, "outcome": "unknown", "exit_status": None, "note": note, "evidence": []}, durable=True
            )
            if loss_expected:
                return None
            raise
        evidence = run._keep(result, "act", run.host.identity.boot_id)
        outcome = "ok" if result.ok else "failed"
        run._say(
            "act.outcome",
            {
                "act": act,
                "outcome": outcome,
                "exit_status": result.exit_status,
                "note": result.trouble,
                "evidence": [evidence.id],
            },
            durable=True,
        )
        return result

    def peek(self, *probes: Probe[Any]) -> Seen:
        run = self._run
        answers = drive(probes, run.host.gather)
        boot_id, now = run.host.identity.boot_id, run.host.clock.now()
        return Seen(Observation(p, a.value, a.unknown, now, boot_id) for p, a in answers.items())

    def proven(self, note: str) -> None:
        self._run.proven(note)


class _RunBench:
    """What a measure experiments with: see :class:`proofbook.host.Bench`."""

    def __init__(self, run: Run, measure: str) -> None:
        self._run = run
        self._measure = measure
        self.kept: list[str] = []

    @property
    def host(self) -> Host:
        return self._run.host

    def look(self, *probes: Probe[Any]) -> Seen:
        seen = self._run.look(*probes, look=self._measure)
        self.kept += [e.id for o in seen.values() for e in o.evidence]
        return seen

    def tunnel(self, port: int, container: ContainerSpec | None = None) -> AbstractContextManager[tuple[str, int]]:
        return self._run.host.transport.tunnel(port, self._address_of(container) if container else "127.0.0.1")

    def key(self, service: ServiceSpec) -> str:
        return self._run._keys.get(service.spec, "")

    def _address_of(self, container: ContainerSpec) -> str:
        """The first address that the container gives itself: its loopback is not the machine's."""
        (result,) = self._run.host.gather([command(*container.enter(), "hostname", "-I", root=True)])
        self.kept.append(self._run._keep(result, self._measure, self._run.host.identity.boot_id).id)
        addresses = result.expect().split()
        if not addresses:
            raise CannotTell(f"container {container.name} has no address of its own (`hostname -I` says nothing)")
        return addresses[0]

    def keep(self, name: str, data: bytes, what: str) -> str:
        run = self._run
        asked = Command(("http", what), root=False)
        return self.keep_answer(name, Result(asked, 0, data, b"", run.host.clock.now(), 0.0))

    def keep_answer(self, name: str, answer: Result) -> str:
        kept = self._run._keep(answer, name, self._run.host.identity.boot_id)
        self.kept.append(kept.id)
        return kept.id

    def proven(self, note: str) -> None:
        self._run.proven(note)

    def tell(self, text: str) -> None:
        self._run.tell(text)


def runner_facts() -> dict[str, Any]:
    """Who runs this: host, user, process and its start, so that a sweep can tell a dead runner from a busy one."""
    import getpass
    import socket
    import sys

    from proofbook import __version__

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return {
        # PROOFBOOK_RUNNER_NAME: for a runner in a container, whose host name says nothing. Each runner needs a name of its own,
        # since a sweep judges only the runs of the runner that it is on.
        "host": os.environ.get("PROOFBOOK_RUNNER_NAME") or socket.gethostname(),
        "user": user,
        "pid": os.getpid(),
        "pid_started": pid_started(os.getpid()),
        "boot_id": _runner_boot_id(),
        "python": sys.version.split()[0],
        "proofbook": __version__,
        "executable": os.path.basename(sys.executable),
    }


def pid_started(pid: int) -> str:
    """When a process of this machine started, in clock ticks since boot ("" where /proc does not tell): pids are reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rsplit(")", 1)[-1].split()[19]


def _runner_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""

"""The nouns of proofbook as frozen values, and the bases Probe, Check and Change. No I/O happens here.

A run is a chain of values: a :class:`Command` is answered by a :class:`Result`; results that a run keeps are
:class:`Evidence`; a :class:`Probe` turns results into an :class:`Observation`; a :class:`Check` holds observations
against an expectation and says :class:`Finding`; a :class:`Change` turns observations into a :class:`Plan`.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from proofbook.errors import CannotTell

T = TypeVar("T")

#: The most bytes of one output that a run keeps (16 MiB); what came after is counted, not kept.
MAX_OUTPUT = 16 * 1024 * 1024


class Verdict(StrEnum):
    """How an expectation came out.

    ``UNKNOWN``: looked, could not tell (evidence missing, cut, rotated, permission).
    ``NOT_CHECKED``: deliberately not looked at, or not observable on this machine; never lowers nor raises a verdict.
    """

    PASS = "PASS"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    FAIL = "FAIL"
    NOT_CHECKED = "NOT_CHECKED"


_BADNESS = {Verdict.PASS: 0, Verdict.WARN: 1, Verdict.UNKNOWN: 2, Verdict.FAIL: 3}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of some verdicts: PASS < WARN < UNKNOWN < FAIL. NOT_CHECKED does not count; the worst of nothing is UNKNOWN."""
    counted = [v for v in verdicts if v is not Verdict.NOT_CHECKED]
    return max(counted, key=_BADNESS.__getitem__) if counted else Verdict.UNKNOWN


class RunStatus(StrEnum):
    """How far a run came; never mixed up with its verdict."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED_AT_GATE = "stopped-at-gate"
    ROLLED_BACK = "rolled-back"
    ROLLBACK_FAILED = "rollback-failed"
    ABORTED = "aborted"
    LOST = "lost"
    REFUSED = "refused"  # said before contact: there is no record


def exit_code(status: RunStatus, verdict: Verdict) -> int:
    """The exit code of a run: status first, then the verdict."""
    by_status = {
        RunStatus.REFUSED: 2,
        RunStatus.STOPPED_AT_GATE: 3,
        RunStatus.ROLLBACK_FAILED: 6,
        RunStatus.ROLLED_BACK: 5,
        RunStatus.ABORTED: 7,
        RunStatus.LOST: 7,
        RunStatus.RUNNING: 7,
    }
    if status in by_status:
        return by_status[status]
    return {Verdict.PASS: 0, Verdict.WARN: 0, Verdict.FAIL: 1}.get(verdict, 4)


class Suggested(StrEnum):
    """What a finding suggests to do: a closed vocabulary, so that machines can count and people can sort."""

    NONE = "none"
    LOOK = "look-closer"
    WAIT = "wait-and-look-again"
    GRANT = "grant-permission"
    RESTART_SERVICE = "restart-service"
    FIX_CONFIG = "fix-configuration"
    FIX_SOFTWARE = "fix-software"
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    POWER_CYCLE = "power-cycle"
    CHECK_HARDWARE = "check-hardware"
    CONSOLE = "use-console"
    ROLL_BACK = "roll-back"


_PCI = re.compile(r"^(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<bus>[0-9a-fA-F]{1,2}):(?P<slot>[0-9a-fA-F]{1,2})(?:\.(?P<fn>[0-7]))?$")


def pci_address(text: str) -> str:
    """Normalise a PCI address: ``00000000:41:00.0``, ``41:00.0`` and ``0000:41:00`` all become ``0000:41:00.0``.

    Raises ValueError for anything else.
    """
    found = _PCI.match(text.strip())
    if not found:
        raise ValueError(f"not a PCI address: {text!r} (expected e.g. 0000:41:00.0)")
    domain = int(found["domain"] or "0", 16)
    return f"{domain:04x}:{int(found['bus'], 16):02x}:{int(found['slot'], 16):02x}.{found['fn'] or 0}"


def hypothesis_word(outcome: str) -> str:
    """What stands before a hypothesis or its reason, so that neither is read as a fact: ``Hypothesis refuted``.

    Refuted and supported are said of it; blocked and inconclusive are what became of the attempt, in brackets.
    """
    return f"Hypothesis {outcome}" if outcome in ("refuted", "supported") else f"Hypothesis ({outcome})"


# ---------------------------------------------------------------------------------------------- asking


@dataclass(frozen=True, slots=True)
class Command:
    """One command for one machine.

    ``argv`` is passed as it is, never through a shell. ``root`` says that only root gets the whole answer: the
    transport then uses ``sudo -n`` when it is not root. ``timeout_s`` counts on the machine's side, from its start.
    """

    argv: tuple[str, ...]
    timeout_s: float = 20.0
    root: bool = False
    stdin: bytes = b""
    max_output: int = MAX_OUTPUT

    def __post_init__(self) -> None:
        if not self.argv or not all(isinstance(a, str) and "\0" not in a for a in self.argv):
            raise ValueError(f"a command is a non-empty tuple of strings without NUL: {self.argv!r}")


def command(*argv: str, timeout_s: float = 20.0, root: bool = False) -> Command:
    """Shorthand: ``command("uname", "-r")``."""
    return Command(tuple(argv), timeout_s=timeout_s, root=root)


@dataclass(frozen=True, slots=True)
class Result:
    """What came back for one :class:`Command`, bytes as they came.

    ``exit_status`` is None when the command never ended by itself (timed out, connection lost, never started);
    ``trouble`` then says why. A signal ``n`` is ``128 + n``, as the shell has it; 127 is "not found".
    ``started_at`` is the machine's own clock (UTC), ``duration_s`` is measured on the machine.
    """

    command: Command
    exit_status: int | None
    stdout: bytes
    stderr: bytes
    started_at: datetime
    duration_s: float
    timed_out: bool = False
    lost_stdout: int = 0  # bytes beyond max_output that were not kept
    lost_stderr: int = 0
    as_root: bool = False
    trouble: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_status == 0 and not self.timed_out and not self.lost_stdout

    @property
    def text(self) -> str:
        """stdout decoded for reading; undecodable bytes become ``\\xNN``, so nothing is silently replaced."""
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "backslashreplace")

    def expect(self, *allowed: int) -> str:
        """The decoded stdout if the exit status is one of ``allowed`` (default 0), else CannotTell with the reason."""
        what = " ".join(self.command.argv)[:200]
        if self.trouble or self.exit_status is None:
            raise CannotTell(f"`{what}` gave no answer: {self.trouble or 'it did not end'}")
        if self.timed_out:
            raise CannotTell(f"`{what}` did not finish within {self.command.timeout_s:g} s")
        if self.exit_status not in (allowed or (0,)):
            said = (self.error_text.strip() or self.text.strip()).splitlines()
            raise CannotTell(f"`{what}` ended with exit status {self.exit_status}" + (f": {said[-1][:300]}" if said else ""))
        if self.lost_stdout:
            raise CannotTell(f"`{what}` said more than {self.command.max_output} bytes; {self.lost_stdout} bytes were not kept")
        return self.text


@dataclass(frozen=True, slots=True)
class Evidence:
    """A :class:`Result` that a run keeps: where its bytes are, and when and on which boot of which machine it was taken.

    A file whose name ends with ``.gz`` is compressed (gzip); digests and sizes are those of the output itself.
    """

    id: str  # "e0012"
    host: str
    argv: tuple[str, ...]
    exit_status: int | None
    started_at: datetime
    duration_s: float
    boot_id: str
    stdout_file: str  # relative to the run's folder; "" when empty
    stdout_sha256: str
    stdout_bytes: int
    stderr_file: str
    stderr_sha256: str
    stderr_bytes: int
    timed_out: bool = False
    truncated: bool = False
    redactions: int = 0
    trouble: str = ""


class Probe(ABC, Generic[T]):
    """A read-only question to a machine. Subclasses are frozen dataclasses: equal questions are asked once.

    ``ask`` is a generator: it yields batches of commands, is sent their results in the same order, and returns the
    value. The batches of all probes that are asked together travel in one round trip. It raises CannotTell when the
    answer cannot be known; it never guesses.
    """

    name: ClassVar[str]

    @abstractmethod
    def ask(self) -> Generator[Sequence[Command], Sequence[Result], T]: ...


@dataclass(frozen=True, slots=True)
class Observation(Generic[T]):
    """The answer to a :class:`Probe`: a value, or why it is unknown; always with its evidence."""

    probe: Probe[T]
    value: T | None
    unknown: str  # "" when the value is known
    taken_at: datetime
    boot_id: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def known(self) -> bool:
        return not self.unknown


class Seen(Mapping[Probe[Any], Observation[Any]]):
    """Observations by their probe. ``seen.value(probe)`` is the value, or raises CannotTell with the reason."""

    def __init__(self, observations: Iterable[Observation[Any]] = ()) -> None:
        self._by_probe = {o.probe: o for o in observations}

    def __getitem__(self, probe: Probe[T]) -> Observation[T]:
        return self._by_probe[probe]

    def __iter__(self) -> Any:
        return iter(self._by_probe)

    def __len__(self) -> int:
        return len(self._by_probe)

    def value(self, probe: Probe[T]) -> T:
        """The known value of ``probe``. Raises CannotTell when it was not asked or has no answer."""
        observation = self._by_probe.get(probe)
        if observation is None:
            raise CannotTell(f"{probe.name} was not asked")
        if observation.unknown:
            raise CannotTell(observation.unknown)
        return observation.value  # type: ignore[return-value]

    def merged(self, other: Seen) -> Seen:
        """Both together; where both have an answer, ``other`` (the later look) wins."""
        return Seen([*self.values(), *other.values()])


# --------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class Finding:
    """An expectation and how it came out: the verdict, one sentence with the numbers, and what to do next."""

    check: str
    verdict: Verdict
    reason: str
    subject: str = ""  # what it is about: a PCI address, a unit, …
    action: Suggested = Suggested.NONE
    what_to_do: str = ""
    expected: Any = None  # JSON values, for tables
    observed: Any = None
    count: int | None = None
    at_least: bool = False  # the count is a lower bound
    signature: str = ""
    caused_by: str = ""
    lines: tuple[str, ...] = ()  # the log lines that it stands on (at most a handful)
    probes: tuple[str, ...] = ()  # names of the probes it looked at; filled in by the run when empty
    evidence: tuple[str, ...] = ()  # ids; filled in by the run from the check's observations
    look: str = ""  # "before", "after", "after settling": filled in by the run
    expires: datetime | None = None  # when the observation stops being believable


class Check(ABC):
    """An expectation. It names the probes that it needs and judges what they saw; it never reaches a machine.

    Subclasses are frozen dataclasses. ``judge`` may raise CannotTell: the run turns that into UNKNOWN with the reason.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # the expectation as a question, e.g. "Is every expected GPU there?"

    @abstractmethod
    def needs(self) -> tuple[Probe[Any], ...]: ...

    @abstractmethod
    def judge(self, seen: Seen) -> Sequence[Finding]: ...

    # helpers, so that a check reads as its sentence
    def passed(self, reason: str, **more: Any) -> Finding:
        return Finding(self.name, Verdict.PASS, reason, **more)

    def warned(self, reason: str, **more: Any) -> Finding:
        return Finding(self.name, Verdict.WARN, reason, **more)

    def failed(self, reason: str, **more: Any) -> Finding:
        return Finding(self.name, Verdict.FAIL, reason, **more)

    def unknown(self, reason: str, **more: Any) -> Finding:
        return Finding(self.name, Verdict.UNKNOWN, reason, **more)

    def not_checked(self, reason: str, **more: Any) -> Finding:
        return Finding(self.name, Verdict.NOT_CHECKED, reason, **more)


# ------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a :class:`Measure` found: numbers with their conditions, never a verdict.

    ``value`` holds JSON values only; its shape is the measure's own and said in its docstring. ``problems`` says what
    went wrong while measuring (a request that hung, an arm that was cut short); a check decides what that means.
    """

    name: str
    title: str
    unit: str  # of the main number: "ms/token", "tokens/step", …
    conditions: Mapping[str, Any]  # what the numbers hold for: prompts, concurrency, repeats, versions
    value: Mapping[str, Any]
    taken_at: datetime
    took_s: float
    problems: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


class Measure(ABC):
    """An experiment on a live system that is neither a read nor a change. Subclasses are frozen dataclasses.

    ``bench`` is :class:`proofbook.host.Bench`. A measure ends by its own deadlines and tells its trouble in
    ``Measurement.problems``; it raises only when the machine itself is lost (TransportError).
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def take(self, bench: Any) -> Measurement: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Keep a change or take it back: the rung of the procedure's ladder that was reached, and why."""

    keep: bool
    rung: str
    because: str
    limits: tuple[str, ...] = ()  # what it holds for, and what was not verified


# -------------------------------------------------------------------------------------------- changing


@dataclass(frozen=True, slots=True)
class Identity:
    """Which machine this is. ``machine_id`` and ``host_key`` must stay the same; ``boot_id`` changes with every boot."""

    name: str  # as it was asked for
    hostname: str  # as it calls itself
    machine_id: str
    boot_id: str  # 32 hex digits without dashes, as the journal has it
    host_key: str  # "ssh-ed25519 SHA256:…"
    user: str
    uid: int
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a plan would do, readable before and checkable after."""

    what: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a change would do, what would take it back, and what cannot be taken back.

    The digest covers the machine (machine-id, host key), the canonical state before (no times, PIDs or measurements)
    and the actions: who approved it, approved exactly this.
    """

    change: str
    title: str
    host: Identity
    pre_state: Mapping[str, Any]
    actions: tuple[Action, ...]
    undo: tuple[Action, ...]
    diff: str
    cannot_undo: tuple[str, ...]
    expected_s: float
    facts: tuple[str, ...] = ()  # shown at the gate: what runs there now, what was not checked, how to get the console
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.actions

    @property
    def digest(self) -> str:
        canonical = json.dumps(
            {
                "change": self.change,
                "machine_id": self.host.machine_id,
                "host_key": self.host.host_key,
                "boot_id": self.host.boot_id,
                "pre_state": self.pre_state,
                "actions": [[a.what, list(a.argv)] for a in self.actions],
                "undo": [[a.what, list(a.argv)] for a in self.undo],
                "settings": self.settings,
            },
            sort_keys=True,
            separators=(",", ":"),
            default=str,
        )
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Approval:
    """A person, or a signed token, let exactly this digest through."""

    digest: str
    approver: str
    how: str  # "parameter", "typed", "button"
    at: datetime
    issued_by: str = ""  # the run whose plan was read; "" when that is not known

    @property
    def mark(self) -> str:
        """Under what the machine remembers that this approval was used: 64 hex digits.

        WHY not the digest alone: after a change was taken back, the same plan has the same digest again. Read and approved
        anew it may be carried out anew; the old approval may not.
        """
        if not self.issued_by:
            return self.digest.removeprefix("sha256:")
        return hashlib.sha256(f"{self.digest} of {self.issued_by}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    """What acting on a plan came to.

    ``outcome``: done · nothing-to-do · unconfirmed (acted, result not seen) · failed (the steps did not go through) ·
    suspended (the state before is back for a while, and the guard waits on) ·
    confirmed · rolled-back · restored (the way back that was part of the plan, as after an experiment) · rollback-failed
    (``facts["by_hand"]`` then lists the commands for a person).
    """

    plan: Plan
    outcome: str
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Change(ABC):
    """From what is seen to what would be done. Acting is done by the run with the host's hands, guarded and journaled."""

    name: ClassVar[str]

    @abstractmethod
    def needs(self) -> tuple[Probe[Any], ...]: ...

    @abstractmethod
    def plan(self, seen: Seen, host: Identity) -> Plan: ...

    @abstractmethod
    def apply(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        """Act. ``hands`` is :class:`proofbook.host.Hands`: every act through it is journaled before and after."""

    def suspend(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        """The state before for a while, under the same guard; ``apply`` puts the change in effect again. Outcome: suspended.

        Only a plan that says so may be suspended: it was approved as a whole.
        """
        return Applied(plan, "failed", f"{plan.title} cannot be suspended")

    def confirm(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        """Keep what was applied: take the guard away. A change without a guard has nothing to confirm."""
        return Applied(plan, "confirmed", f"{plan.title}: kept")

    def rollback(self, plan: Plan, hands: Any, tell: Callable[[str], None]) -> Applied:
        """Bring back the state before, from the plan alone, and prove it. Outcome: rolled-back or rollback-failed."""
        return Applied(plan, "rollback-failed", f"{plan.title}: cannot be undone", {"by_hand": list(plan.cannot_undo)})

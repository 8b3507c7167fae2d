"""systemd units: their state, their processes, and the state of the whole."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root, said, text_of

__all__ = [
    "ExecCommand",
    "FailedUnits",
    "ProcessFacts",
    "RunningServices",
    "ServiceRow",
    "Services",
    "SystemState",
    "UnitFacts",
    "UnitProcess",
    "UnitRow",
    "UnitState",
    "unit_blocks",
    "utc_stamp",
]

_PROPERTIES = (
    "Id,Description,LoadState,ActiveState,SubState,Result,Type,MainPID,NRestarts,InvocationID,UnitFileState,NeedDaemonReload,"
    "ExecStart,Environment,FragmentPath,DropInPaths,StandardOutput,StandardError,ExecMainCode,ExecMainStatus,"
    "ExecMainStartTimestampMonotonic,ActiveEnterTimestamp,ActiveEnterTimestampMonotonic,InactiveExitTimestampMonotonic"
)


@dataclass(frozen=True, slots=True)
class ExecCommand:
    """One ExecStart=. systemd prints the argv joined by blanks: ``text`` is that, ``tokens`` are its words.

    Where an argument holds a blank the words are not the argv; the true argv is that of the running process.
    """

    path: str
    text: str

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self.text.split())


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """A unit as ``systemctl show`` has it. Seconds are since boot (CLOCK_MONOTONIC), None for "never"."""

    unit: str
    load: str  # loaded, not-found, masked, error, bad-setting
    active: str  # active, inactive, failed, activating, deactivating, reloading
    sub: str  # running, exited, dead, auto-restart, …
    result: str  # success, exit-code, signal, oom-kill, start-limit-hit, …
    type: str  # simple, exec, notify, oneshot, …
    main_pid: int  # 0 when there is none
    n_restarts: int | None
    invocation_id: str
    enabled: str  # UnitFileState: enabled, disabled, static, masked, … "" when it has no file
    need_daemon_reload: bool
    exec_start: tuple[ExecCommand, ...]
    environment: dict[str, str]
    fragment_path: str
    drop_ins: tuple[str, ...]
    description: str
    exit_code: str  # of the last main process: "exited", "killed", "dumped"; "" when it has none
    exit_status: int | None
    main_started_s: float | None  # ExecMainStartTimestamp
    active_enter_s: float | None
    inactive_exit_s: float | None  # when it began to start
    active_enter: datetime | None = None  # UTC; None when never, or when the machine does not print UTC
    standard_output: str = ""  # "journal", "inherit", "append:/var/log/x.log", …
    standard_error: str = ""

    @property
    def exists(self) -> bool:
        return self.load != "not-found"


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One line of ``systemctl list-units``."""

    unit: str
    load: str
    active: str
    sub: str
    description: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The main process of a unit. ``environ`` is None when it may not be read; ``environ_unknown`` says why.

    Values of ``environ`` may be secrets: only the record's writer redacts them.
    """

    unit: str
    pid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str] | None
    environ_unknown: str
    started_s: float | None  # seconds since boot

    def variable(self, key: str) -> str | None:
        """The value of an environment variable, None when it is not set. Raises CannotTell when the environment is unknown."""
        if self.environ is None:
            raise CannotTell(self.environ_unknown)
        return self.environ.get(key)


@dataclass(frozen=True)
class UnitState(Probe[UnitFacts]):
    """The state of one unit, on the host or in a container.

    ::

        LoadState=loaded
        ActiveState=active
        ExecStart={ path=/opt/s/bin/python ; argv[]=/opt/s/bin/python -m sglang.launch_server --tp 2 ; ignore_errors=no ; … }
        Environment=NCCL_P2P_DISABLE=1 "GREETING=good morning"
    """

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.UnitState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitFacts]:
        (answer,) = yield [inside(self.container, command("systemctl", "show", self.unit, f"--property={_PROPERTIES}"))]
        return _unit_facts(self.unit, _properties(text_of(answer)))


@dataclass(frozen=True)
class FailedUnits(Probe[tuple[UnitRow, ...]]):
    """The units that failed."""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.FailedUnits"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitRow, ...]]:
        (answer,) = yield [inside(self.container, _list_units("--failed"))]
        return _unit_rows(text_of(answer))


@dataclass(frozen=True)
class RunningServices(Probe[tuple[UnitRow, ...]]):
    """The services that run."""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.RunningServices"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitRow, ...]]:
        (answer,) = yield [inside(self.container, _list_units("--type=service", "--state=running"))]
        return _unit_rows(text_of(answer))


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """A service that is not simply inactive. ``lasting``: it is meant to go on running, whoever asks for it or not."""

    unit: str
    active: str
    sub: str
    lasting: bool


@dataclass(frozen=True)
class Services(Probe[dict[str, ServiceRow]]):
    """Every service that runs, starts, has failed or has done its work, by name; which of them are meant to go on running.

    ::

        Type=notify
        BusName=
        Id=ssh.service
        WantedBy=multi-user.target
        TriggeredBy=
        ActiveState=active
        SubState=running
        Transient=no

    WHY not all that run: a oneshot is done after a while; what a timer, a socket or the bus starts comes and goes with the
    demand, unless the boot wants it too; a transient unit does not outlive the boot.
    """

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.Services"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], dict[str, ServiceRow]]:
        shown = "Id,ActiveState,SubState,Type,Transient,TriggeredBy,BusName,WantedBy,RequiredBy"
        (answer,) = yield [inside(self.container, command("systemctl", "show", "*.service", f"--property={shown}"))]
        rows = {unit: _service_row(unit, values) for unit, values in unit_blocks(text_of(answer)).items()}
        if not rows:
            raise CannotTell("systemctl show '*.service' named no service")
        return rows


_OF_SESSIONS = ("run-", "user@", "user-runtime-dir@")


def _service_row(unit: str, values: Mapping[str, str]) -> ServiceRow:
    on_demand = (values.get("TriggeredBy") or values.get("BusName")) and not (values.get("WantedBy") or values.get("RequiredBy"))
    passing = values.get("Type") == "oneshot" or values.get("Transient") == "yes" or unit.startswith(_OF_SESSIONS)
    return ServiceRow(unit, values.get("ActiveState", ""), values.get("SubState", ""), not on_demand and not passing)


@dataclass(frozen=True)
class SystemState(Probe[str]):
    """``systemctl is-system-running``: running, degraded, starting, stopping, maintenance, …"""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.SystemState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], str]:
        (answer,) = yield [inside(self.container, command("systemctl", "is-system-running"))]
        # WHY: it exits with 1 for every state but "running"; the word is the answer.
        word = text_of(answer, 0, 1).strip()
        if not re.fullmatch(r"[a-z]+", word):
            raise CannotTell(f"systemd does not say how the system is: {said(answer)}")
        return word


@dataclass(frozen=True)
class UnitProcess(Probe[ProcessFacts]):
    """The true argv and environment of a unit's main process. Unknown when there is none."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.UnitProcess"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ProcessFacts]:
        state = yield from UnitState(self.unit, self.container).ask()
        if not state.main_pid:
            raise CannotTell(f"{self.unit} has no main process: it is {state.load}, {state.active} ({state.sub})")
        proc = f"/proc/{state.main_pid}"
        asked = [command("cat", f"{proc}/{file}", root=True) for file in ("cmdline", "environ")]
        cmdline, environ = yield from prefer_root(*(inside(self.container, c) for c in asked))
        try:
            variables, why = _environ(text_of(environ)), ""
        except CannotTell as error:
            variables, why = None, f"the environment of process {state.main_pid} cannot be read: {error}"
        return ProcessFacts(
            unit=self.unit,
            pid=state.main_pid,
            argv=_argv(text_of(cmdline), state.main_pid),
            environ=variables,
            environ_unknown=why,
            started_s=state.main_started_s,
        )


# ------------------------------------------------------------------------------------------------------ reading


def _list_units(*which: str) -> Command:
    return command("systemctl", "list-units", *which, "--plain", "--no-legend", "--no-pager")


def _unit_rows(text: str) -> tuple[UnitRow, ...]:
    """``sglang.service loaded failed failed Qwen on two GPUs`` for each line. Raises CannotTell for a line that is none."""
    rows = []
    for line in text.splitlines():
        words = line.lstrip("\u25cf\u00d7* ").split(maxsplit=4)  # old versions print a bullet even when asked for plain
        if not words:
            continue
        if len(words) < 4:
            raise CannotTell(f"systemctl list-units said a line that is no unit: {line[:200]!r}")
        rows.append(UnitRow(words[0], words[1], words[2], words[3], words[4].strip() if len(words) == 5 else ""))
    return tuple(rows)


def _properties(text: str) -> dict[str, list[str]]:
    """``Key=value`` lines; a key may come several times (ExecStart=). A line without a key belongs to the value before."""
    found: dict[str, list[str]] = defaultdict(list)
    last = ""
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z0-9]+", key):
            found[key].append(value)
            last = key
        elif last:
            found[last][-1] += "\n" + line
    return found


def unit_blocks(text: str) -> dict[str, dict[str, str]]:
    """Several units of one ``systemctl show``, by their Id: an empty line parts them. Of a repeated property, the last value."""
    blocks = ({key: values[-1] for key, values in _properties(block).items()} for block in text.split("\n\n"))
    return {block["Id"]: block for block in blocks if block.get("Id")}


def _unit_facts(unit: str, properties: Mapping[str, list[str]]) -> UnitFacts:
    def one(key: str) -> str:
        return properties[key][0] if key in properties else ""

    if not one("LoadState") or not one("ActiveState"):
        raise CannotTell(f"systemctl show {unit} said neither LoadState nor ActiveState")
    code = int(number) if (number := one("ExecMainCode")).isdecimal() else 0
    return UnitFacts(
        unit=unit,
        load=one("LoadState"),
        active=one("ActiveState"),
        sub=one("SubState"),
        result=one("Result"),
        type=one("Type"),
        main_pid=int(pid) if (pid := one("MainPID")).isdecimal() else 0,
        n_restarts=int(count) if (count := one("NRestarts")).isdecimal() else None,
        invocation_id=one("InvocationID").replace("-", "").lower(),
        enabled=one("UnitFileState"),
        need_daemon_reload=one("NeedDaemonReload") == "yes",
        exec_start=tuple(_exec_command(value) for value in properties.get("ExecStart", ())),
        environment=dict(word.partition("=")[::2] for word in _words(one("Environment"))),
        fragment_path=one("FragmentPath"),
        drop_ins=tuple(_words(one("DropInPaths"))),
        description=one("Description"),
        exit_code={1: "exited", 2: "killed", 3: "dumped"}.get(code, ""),  # CLD_EXITED, CLD_KILLED, CLD_DUMPED
        exit_status=int(one("ExecMainStatus")) if code and one("ExecMainStatus").isdecimal() else None,
        main_started_s=_since_boot(one("ExecMainStartTimestampMonotonic")),
        active_enter_s=_since_boot(one("ActiveEnterTimestampMonotonic")),
        inactive_exit_s=_since_boot(one("InactiveExitTimestampMonotonic")),
        active_enter=utc_stamp(one("ActiveEnterTimestamp")),
        standard_output=one("StandardOutput"),
        standard_error=one("StandardError"),
    )


def _exec_command(value: str) -> ExecCommand:
    found = re.match(r"\{ path=(?P<path>.*?) ; argv\[\]=(?P<argv>.*?) ; ignore_errors=(?:yes|no) ;", value, re.DOTALL)
    if not found:
        raise CannotTell(f"systemctl show said an ExecStart that cannot be read: {value[:200]!r}")
    return ExecCommand(found["path"], found["argv"])


def _since_boot(microseconds: str) -> float | None:
    """Seconds since boot; systemd says 0 for "never"."""
    return int(microseconds) / 1e6 if microseconds.isdecimal() and microseconds != "0" else None


def utc_stamp(text: str) -> datetime | None:
    """``Wed 2026-04-08 15:10:15 UTC``. None for "never", and for a local zone: its abbreviation does not tell the offset."""
    found = re.fullmatch(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? UTC", text)
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if found else None


_WORD = re.compile(
    r"""\$'(?P<ansi>(?:[^'\\]|\\.)*)'"""
    r"""|"(?P<double>(?:[^"\\]|\\.)*)\""""
    r"""|'(?P<single>[^']*)'"""
    r"""|\\(?P<escaped>.)"""
    r"""|(?P<plain>[^\s"'\\$]+|\$)""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def _words(text: str) -> list[str]:
    """A list property as systemctl prints it: blank-separated, an element in quotes ("…" or $'…') where it needs them."""
    words: list[str] = []
    end = -1
    for piece in _WORD.finditer(text):
        ansi, double, single, escaped, plain = piece.groups()
        if ansi is not None:
            value = re.sub(r"\\(x[0-9a-fA-F]{2}|.)", _unescape, ansi, flags=re.DOTALL)
        elif double is not None:
            value = re.sub(r"\\(.)", r"\1", double, flags=re.DOTALL)
        else:
            value = next(v for v in (single, escaped, plain) if v is not None)
        if piece.start() == end and words:
            words[-1] += value
        else:
            words.append(value)
        end = piece.end()
    return words


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) == 3 else _ESCAPES.get(code, code)


def _argv(text: str, pid: int) -> tuple[str, ...]:
    """/proc/PID/cmdline: each argument ends with a NUL. Empty for a zombie or a kernel thread."""
    if not text:
        raise CannotTell(f"process {pid} has no command line any more (it is ending)")
    return tuple(text.removesuffix("\0").split("\0"))


def _environ(text: str) -> dict[str, str]:
    """/proc/PID/environ: NUL-separated, as it was at the start of the process.

    WHY the form is checked: a process that rewrites its title (sshd, setproctitle) writes it over its own environment.
    Raises CannotTell then.
    """
    items = [item for item in text.split("\0") if item]
    if any(not re.match(r"[A-Za-z_][A-Za-z0-9_.%()-]*=", item) for item in items):
        raise CannotTell("the process has overwritten it, as programs do that set their own title")
    return dict(item.partition("=")[::2] for item in items)

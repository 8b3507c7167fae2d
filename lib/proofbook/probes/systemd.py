"""systemd units: their state, their processes, and the state of the whole."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result


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


@dataclass(frozen=True)
class UnitState(Probe[UnitFacts]):
    """The state of one unit, on the host or in a container."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.UnitState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitFacts]: ...


@dataclass(frozen=True)
class FailedUnits(Probe[tuple[UnitRow, ...]]):
    """The units that failed."""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.FailedUnits"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitRow, ...]]: ...


@dataclass(frozen=True)
class RunningServices(Probe[tuple[UnitRow, ...]]):
    """The services that run."""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.RunningServices"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitRow, ...]]: ...


@dataclass(frozen=True)
class SystemState(Probe[str]):
    """``systemctl is-system-running``: running, degraded, starting, stopping, maintenance, …"""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.SystemState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], str]: ...


@dataclass(frozen=True)
class UnitProcess(Probe[ProcessFacts]):
    """The true argv and environment of a unit's main process. Unknown when there is none."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.UnitProcess"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ProcessFacts]: ...

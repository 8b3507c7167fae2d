"""A unit as it lies on the disk: its files byte by byte, how systemd is set to treat it, and what it would say of other bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root, said, text_of
from proofbook.probes.systemd import UnitFacts, UnitState, _properties
from proofbook.probes.unit_text import EffectiveUnit, effective_unit
from proofbook.remote.looking import Verified, parse_verified, verify_unit

__all__ = [
    "CandidateVerified",
    "Edit",
    "UnitFile",
    "UnitFileSet",
    "UnitFiles",
    "UnitSettings",
    "UnitSettingsFacts",
    "seconds",
]

_SETTINGS = (
    "ControlGroup,EnvironmentFiles,WorkingDirectory,RootDirectory,User,Group,Restart,RestartUSec,TimeoutStartUSec,"
    "TimeoutStopUSec,KillMode,KillSignal,SendSIGKILL,OOMPolicy,StartLimitIntervalUSec,StartLimitBurst,MemoryMax,PrivateTmp"
)


# -------------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True)
class UnitSettingsFacts:
    """How systemd is set to start, stop and restart a unit. Seconds are None for "infinity" and where it does not say."""

    unit: str
    control_group: str  # "/system.slice/x.service"; "" when it does not run
    environment_files: tuple[tuple[str, bool], ...]  # path, may it be missing
    working_directory: str
    root_directory: str
    user: str  # "" is root
    restart: str  # no, on-failure, always, …
    restart_s: float | None
    start_limit_s: float | None
    start_limit_burst: int | None
    timeout_start_s: float | None
    timeout_stop_s: float | None
    kill_mode: str  # control-group, mixed, process, none
    send_sigkill: bool
    said: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def keeps_children(self) -> bool:
        """Whether a stop leaves processes of the service behind on purpose."""
        return self.kill_mode in ("process", "none") or not self.send_sigkill


@dataclass(frozen=True)
class UnitSettings(Probe[UnitSettingsFacts]):
    """How a unit is restarted and stopped, and which control group it has.

    ``Restart=on-failure``, ``RestartUSec=10s``, ``TimeoutStopUSec=1min 30s``, ``EnvironmentFiles=/etc/x (ignore_errors=yes)``.
    """

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "unit_files.UnitSettings"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitSettingsFacts]:
        (answer,) = yield [inside(self.container, command("systemctl", "show", self.unit, f"--property={_SETTINGS}"))]
        return _settings(self.unit, _properties(text_of(answer)))


def _settings(unit: str, properties: Mapping[str, list[str]]) -> UnitSettingsFacts:
    def one(key: str) -> str:
        return properties[key][0].strip() if properties.get(key) else ""

    if "Restart" not in properties:
        raise CannotTell(f"systemctl show {unit} does not say how it is restarted: is it a service?")
    return UnitSettingsFacts(
        unit=unit,
        control_group=one("ControlGroup"),
        environment_files=tuple(_env_file(value) for value in properties.get("EnvironmentFiles", ()) if value.strip()),
        working_directory=one("WorkingDirectory"),
        root_directory=one("RootDirectory"),
        user=one("User"),
        restart=one("Restart"),
        restart_s=seconds(one("RestartUSec")),
        start_limit_s=seconds(one("StartLimitIntervalUSec")),
        start_limit_burst=int(burst) if (burst := one("StartLimitBurst")).isdecimal() else None,
        timeout_start_s=seconds(one("TimeoutStartUSec")),
        timeout_stop_s=seconds(one("TimeoutStopUSec")),
        kill_mode=one("KillMode"),
        send_sigkill=one("SendSIGKILL") != "no",
        said={key: values[0] for key, values in properties.items()},
    )


def _env_file(value: str) -> tuple[str, bool]:
    """``/etc/default/sglang (ignore_errors=yes)``."""
    found = re.fullmatch(r"(?P<path>.*?) \(ignore_errors=(?P<optional>yes|no)\)", value.strip())
    if not found:
        raise CannotTell(f"systemctl show said an environment file that cannot be read: {value[:120]!r}")
    return found["path"], found["optional"] == "yes"


_UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip


def seconds(text: str) -> float | None:
    """A time span as systemctl prints it (``1min 30s``, ``100ms``, ``0``); None for "infinity" and for nothing."""
    if text in ("", "infinity"):
        return None
    if text == "0":
        return 0.0
    total = 0.0
    for part in text.split():
        found = re.fullmatch(r"([\d.]+)(us|ms|s|min|h|d|w|month|y)", part)
        if not found:
            raise CannotTell(f"systemctl said a time span that cannot be read: {text!r}")
        total += float(found[1]) * _UNITS[found[2]]
    return total


# ----------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class UnitFile:
    """One file of a unit. ``target`` is where a symbolic link leads, "" for a regular file. Its bytes may hold secrets."""

    path: str
    data: bytes = field(repr=False)
    sha256: str
    owner: str
    group: str
    mode: int
    target: str = ""

    @property
    def text(self) -> str:
        """For reading as a unit: systemd refuses a file that is not UTF-8, so what cannot be decoded is shown as such."""
        return self.data.decode("utf-8", "surrogateescape")

    @property
    def managed_by(self) -> str:
        """What the file's own head says of a tool that writes it, "" when it says nothing."""
        for line in self.text.splitlines()[:12]:
            if line.lstrip().startswith(("#", ";")) and (found := _MANAGED.search(line)):
                return found[0]
        return ""


_MANAGED = re.compile(
    r"(?:managed|generated|created|deployed|controlled) (?:automatically )?by [\w ./-]{2,40}|ansible[ _]managed"
    r"|do not edit|puppet|saltstack|cfengine",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class UnitFileSet:
    """The files that make a unit, in the order in which systemd applies them.

    ``environment`` is the content of its environment files (None: not there); ``also`` are further paths that were asked
    about (None: nothing is there). ``unreadable`` says why something could not be read.
    """

    unit: str
    main: UnitFile
    drop_ins: tuple[UnitFile, ...]
    environment: Mapping[str, str | None] = field(repr=False, hash=False)
    also: Mapping[str, UnitFile | None] = field(hash=False, default_factory=dict)
    unreadable: Mapping[str, str] = field(hash=False, default_factory=dict)
    need_daemon_reload: bool = False

    @property
    def files(self) -> tuple[UnitFile, ...]:
        return (self.main, *self.drop_ins)

    @property
    def effective(self) -> EffectiveUnit:
        """The unit that the files make together."""
        return effective_unit(self.unit, [(f.path, f.text) for f in self.files])

    def get(self, path: str) -> UnitFile | None:
        """The file at ``path``, None when nothing is there. Raises CannotTell when nobody looked or it cannot be read."""
        for file in self.files:
            if file.path == path:
                return file
        if path in self.unreadable:
            raise CannotTell(f"{path} cannot be read: {self.unreadable[path]}")
        if path not in self.also:
            raise CannotTell(f"{path} was not asked for")
        return self.also[path]


@dataclass(frozen=True)
class UnitFiles(Probe[UnitFileSet]):
    """The main file and the drop-ins of a unit, with their bytes, owners and modes, and its environment files.

    ``also``: paths that a change would write; they are read even where systemd has not loaded them.

    ``stat`` says ``regular file|root|root|644|812|/etc/systemd/system/sglang-qwen.service``.
    """

    unit: str
    container: ContainerSpec | None = None
    also: tuple[str, ...] = ()
    name: ClassVar[str] = "unit_files.UnitFiles"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitFileSet]:
        state, settings = yield from _both(self.unit, self.container)
        paths = [state.fragment_path, *state.drop_ins]
        environment = [path for path, _ in settings.environment_files if not re.search(r"[*?\[]", path)]
        wanted = list(dict.fromkeys([*paths, *environment, *self.also]))
        asked = [command("stat", "-c", "%F|%U|%G|%a|%s|%n", *wanted, root=True)]
        asked += [command("cat", path, root=True) for path in wanted]
        stated, *contents = yield from prefer_root(*(inside(self.container, c) for c in asked))
        facts = _stated(stated)
        links = [path for path, stat in facts.items() if stat.kind == "symbolic link"]
        targets: dict[str, str] = {}
        if links:
            (answer,) = yield [inside(self.container, command("readlink", "-f", *links))]
            found = text_of(answer).splitlines()
            if len(found) != len(links):
                raise CannotTell(f"readlink said {len(found)} paths for {len(links)} links")
            targets = dict(zip(links, found, strict=True))
        files: dict[str, UnitFile | None] = {}
        unreadable: dict[str, str] = {}
        for path, content in zip(wanted, contents, strict=True):
            if path not in facts:
                files[path] = None
                continue
            try:
                text_of(content)
            except CannotTell as why:
                unreadable[path] = str(why)
                continue
            files[path] = _file(path, content.stdout, facts[path], targets.get(path, ""))
        for path in paths:
            if path in unreadable:
                raise CannotTell(f"{path} cannot be read: {unreadable[path]}")
            if files[path] is None:
                raise CannotTell(
                    f"{path} is a file of {self.unit} by systemd's word, and is not there: reload systemd and look again"
                )
        main, *drop_ins = (file for path in paths if (file := files[path]) is not None)
        return UnitFileSet(
            unit=self.unit,
            main=main,
            drop_ins=tuple(drop_ins),
            environment={p: None if (f := files[p]) is None else f.text for p in environment if p in files},
            also={p: files[p] for p in self.also if p in files},
            unreadable=unreadable,
            need_daemon_reload=state.need_daemon_reload,
        )


def _both(
    unit: str, container: ContainerSpec | None
) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitFacts, UnitSettingsFacts]]:
    """The state and the settings of a unit that has a file. Raises CannotTell for one that has none."""
    state = yield from UnitState(unit, container).ask()
    if not state.exists:
        raise CannotTell(f"there is no unit {unit}")
    if not state.fragment_path:
        raise CannotTell(f"{unit} has no file: it is {state.load}, and made by something else than a unit file")
    settings = yield from UnitSettings(unit, container).ask()
    return state, settings


@dataclass(frozen=True, slots=True)
class _Stat:
    kind: str
    owner: str
    group: str
    mode: int


def _stated(result: Result) -> dict[str, _Stat]:
    """What ``stat`` said, by path; paths that do not exist are not in it. Raises CannotTell for any other complaint."""
    text = text_of(result, 0, 1)
    complaints = [line for line in result.error_text.splitlines() if line and not line.endswith("No such file or directory")]
    if complaints:
        raise CannotTell(f"`stat` complained: {complaints[0][:200]}")
    found = {}
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) != 6 or not re.fullmatch(r"[0-7]{1,4}", parts[3]):
            raise CannotTell(f"`stat` said a line that cannot be read: {line[:200]!r}")
        found[parts[5]] = _Stat(parts[0], parts[1], parts[2], int(parts[3], 8))
    return found


def _file(path: str, data: bytes, stat: _Stat, target: str) -> UnitFile:
    return UnitFile(path, data, hashlib.sha256(data).hexdigest(), stat.owner, stat.group, stat.mode, target)


# ------------------------------------------------------------------------------------------------------ verifying


class Edit(Protocol):
    """Something that says which bytes a unit's files would have. Hashable, so that equal questions are asked once."""

    def __hash__(self) -> int: ...

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitFileSet, Mapping[str, bytes]]]:
        """The files as they are, and path to the bytes that they would have. Raises CannotTell when it cannot be made."""
        ...


@dataclass(frozen=True)
class CandidateVerified(Probe[Verified]):
    """What ``systemd-analyze verify`` says of a unit as ``edit`` would make it, before anything is written where it counts.

    ``sglang.service:8: Missing '=', ignoring line.`` comes with exit status 0.
    """

    unit: str
    container: ContainerSpec | None
    edit: Edit
    name: ClassVar[str] = "unit_files.CandidateVerified"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], Verified]:
        now, changed = yield from self.edit.ask()
        wanted = {file.path: file.data for file in now.files} | dict(changed)
        named = [(self.unit if path == now.main.path else path.rpartition("/")[2], data) for path, data in wanted.items()]
        (answer,) = yield [inside(self.container, verify_unit(self.unit, named))]
        if answer.exit_status in (65, 73):
            raise CannotTell(
                f"the unit could not be laid out for systemd-analyze: {said(answer) or f'exit {answer.exit_status}'}"
            )
        text_of(answer)
        return parse_verified(answer)

"""The systemd journal: entries as values, and the journal of one invocation of a unit.

``journalctl -o json`` prints one object a line. Fields are strings, ``null`` when they were too long, arrays of bytes
when they are not UTF-8, arrays of those when a field was given several times.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root, said, text_of
from proofbook.probes.systemd import UnitFacts, UnitState, unit_blocks, utc_stamp

__all__ = [
    "JOURNALD",
    "Entries",
    "JournalEntry",
    "Journald",
    "JournaldFacts",
    "UnitJournal",
    "UnitLog",
    "deaf",
    "lost_messages",
    "read_entries",
]

_SERVICE = "systemd-journald.service"
_SHOWN = "Id,LoadState,ActiveState,SubState,NRestarts,InactiveEnterTimestamp"
#: How systemd is asked for journald and its sockets; probes that ask it together ask it once.
JOURNALD = command(
    "systemctl", "show", _SERVICE, "systemd-journald.socket", "systemd-journald-dev-log.socket", f"--property={_SHOWN}"
)

#: What journalctl says on stderr when the reader's rights hide entries from it.
_NOT_PERMITTED = (
    "insufficient permissions",
    "not seeing messages from other users",
    "permission denied",
)
#: systemd-journald's own notes that messages never reached the journal (of the kernel; of a unit over its rate limit).
_LOST = re.compile(r"^(?:Missed \d+ kernel messages|Suppressed \d+ messages from \S+)")
#: How long after its unit began to start the first line of an invocation may come before earlier ones must be missing.
_FIRST_LINE_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry. ``monotonic_s`` are seconds since boot (for kernel lines the kernel's own stamp), ``time`` is UTC.

    ``text`` is "" and ``text_lost`` is True when the journal holds the entry but not its message (too long for the output).
    """

    time: datetime
    monotonic_s: float | None
    priority: int | None  # 0 emergency … 7 debug
    text: str
    identifier: str = ""  # "kernel", "systemd", "python3", …
    pid: int | None = None
    transport: str = ""  # "kernel", "stdout", "syslog", "journal", "driver"
    boot_id: str = ""
    message_id: str = ""
    invocation_id: str = ""
    text_lost: bool = False
    uid: int | None = None  # of the process that said it; None for the kernel


@dataclass(frozen=True, slots=True)
class Entries:
    """What one ``journalctl -o json`` said. ``gaps`` say what is known to be missing from it; empty means nothing known."""

    entries: tuple[JournalEntry, ...]
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitLog:
    """The journal of the current (or last) invocation of a unit, systemd's own lines about it included.

    ``complete`` is False as soon as anything says that lines are missing; ``gaps`` say what.
    """

    unit: str
    invocation_id: str
    entries: tuple[JournalEntry, ...]
    complete: bool
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitJournal(Probe[UnitLog]):
    """Everything that the current (or last) invocation of ``unit`` said, and whether that is all of it.

    WHY the invocation: after an automatic restart ``-u UNIT`` mixes the lines of the process that died with those of the
    one that runs. The process's lines carry ``_SYSTEMD_INVOCATION_ID``, systemd's own about the unit ``INVOCATION_ID``,
    and journald's note that it suppressed some of them ``OBJECT_SYSTEMD_INVOCATION_ID``. WHY journald itself: what is said
    while it is stopped is in no journal, and the journal does not say so.
    """

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "journal.UnitJournal"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitLog]:
        state = yield from UnitState(self.unit, self.container).ask()
        if not state.exists:
            raise CannotTell(f"there is no unit {self.unit}")
        run = state.invocation_id
        if not run:
            raise CannotTell(f"{self.unit} has not been started since the boot, so it has no journal of its own")
        matches = (f"_SYSTEMD_INVOCATION_ID={run}", "+", f"INVOCATION_ID={run}", "+", f"OBJECT_SYSTEMD_INVOCATION_ID={run}")
        asked = command("journalctl", "--all", "-o", "json", "--no-pager", *matches, timeout_s=60, root=True)
        answer, journald = yield from prefer_root(inside(self.container, asked), inside(self.container, JOURNALD))
        read = read_entries(answer)
        gaps = [*read.gaps, *lost_messages(read.entries), *_what_the_unit_hides(state, read.entries)]
        if why := deaf(journald):
            gaps.append(why)
        return UnitLog(self.unit, run, read.entries, not gaps, tuple(gaps))


def _what_the_unit_hides(state: UnitFacts, entries: Sequence[JournalEntry]) -> list[str]:
    """Why the journal of an invocation cannot be whole, from how the unit was set up and when it started."""
    gaps = [
        f"its {stream} goes to {where}, not to the journal"
        for stream, where in (("output", state.standard_output), ("error output", state.standard_error))
        if where.startswith(("file", "append", "truncate", "null", "tty", "socket", "fd"))
    ]
    if not entries:
        return [*gaps, "the journal has no line of this invocation"]
    first, began = entries[0].monotonic_s, state.inactive_exit_s
    if first is not None and began is not None and first > began + _FIRST_LINE_WITHIN_S:
        gaps.append(f"its first line came {first - began:.0f} s after the unit began to start: earlier lines were rotated away")
    return gaps


# ----------------------------------------------------------------------------------------------------- journald


@dataclass(frozen=True, slots=True)
class JournaldFacts:
    """systemd-journald as systemd has it, and what it does with what it hears.

    ``load`` is "not-found" on a machine without it. ``sockets``: ActiveState of those that exist, by name. ``persistent``:
    whether the journal outlives a reboot, None when ``storage_unknown`` says why that cannot be told. ``settings``: the last
    word of all configuration files on each setting.
    """

    load: str
    active: str
    sub: str
    since: datetime | None  # when it was last stopped (UTC), None when it was not, or when the machine does not print UTC
    n_restarts: int | None
    sockets: dict[str, str]
    settings: dict[str, str]
    persistent: bool | None
    storage_unknown: str = ""


_CONF = "systemd/journald.conf"
#: A drop-in hides those of its name in the folders before it.
_CONF_FOLDERS = ("/usr/lib", "/usr/local/lib", "/run", "/etc")
_MACHINE_ID, _ON_DISK = "/etc/machine-id", "/var/log/journal"


@dataclass(frozen=True)
class Journald(Probe[JournaldFacts]):
    """Whether anything is written down at all.

    ::

        Id=systemd-journald.service
        ActiveState=inactive
        SubState=dead

    WHY: a stopped journald says nothing of it anywhere, and everything that is concluded from the silence of a journal is
    then concluded from nothing. Kept on disk is what goes to the folder of this machine's id below ``/var/log/journal``.
    """

    name: ClassVar[str] = "journal.Journald"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], JournaldFacts]:
        conf = [f"{folder}/{_CONF}" for folder in _CONF_FOLDERS]
        patterns = (*conf, *(f"{c}.d/*.conf" for c in conf), _MACHINE_ID, f"{_ON_DISK}/*")
        shown, read = yield [JOURNALD, remote.read_files(*patterns)]
        units, files = unit_blocks(text_of(shown)), remote.parse_files(read)
        journald = units.get(_SERVICE, {})
        if not journald.get("LoadState") or not journald.get("ActiveState"):
            raise CannotTell(f"systemctl show {_SERVICE} said neither LoadState nor ActiveState")
        settings = _settings(files)
        persistent, why = _persistent(files, settings)
        return JournaldFacts(
            load=journald["LoadState"],
            active=journald["ActiveState"],
            sub=journald.get("SubState", ""),
            since=utc_stamp(journald.get("InactiveEnterTimestamp", "")),
            n_restarts=int(count) if (count := journald.get("NRestarts", "")).isdecimal() else None,
            sockets={
                name: unit.get("ActiveState", "")
                for name, unit in units.items()
                if name != _SERVICE and unit.get("LoadState") != "not-found"
            },
            settings=settings,
            persistent=persistent,
            storage_unknown=why,
        )


def deaf(shown: Result) -> str:
    """Why what is said now reaches no journal, from the answer to :data:`JOURNALD`; "" when journald runs."""
    try:
        journald = unit_blocks(text_of(shown)).get(_SERVICE, {})
    except CannotTell as why:
        return f"whether journald runs is not known: {why}"
    active = journald.get("ActiveState", "")
    if active in ("active", "reloading"):
        return ""
    if not active:
        return f"whether journald runs is not known: systemctl show {_SERVICE} did not say it"
    stopped = utc_stamp(journald.get("InactiveEnterTimestamp", ""))
    since = f" since {stopped:%Y-%m-%dT%H:%M:%SZ}" if stopped else ""
    state = "there is no systemd-journald" if journald.get("LoadState") == "not-found" else f"systemd-journald is {active}{since}"
    return f"{state}: what was said meanwhile is in no journal"


def _settings(files: remote.Files) -> dict[str, str]:
    """The settings of journald.conf and its drop-ins: the main file first, then the drop-ins by name; a later word holds."""
    main = [text for folder in _CONF_FOLDERS if (text := files.files.get(f"{folder}/{_CONF}")) is not None]
    drop_ins: dict[str, str] = {}
    for folder in _CONF_FOLDERS:
        prefix = f"{folder}/{_CONF}.d/"
        drop_ins |= {path.removeprefix(prefix): text for path, text in files.files.items() if path.startswith(prefix)}
    settings: dict[str, str] = {}
    for text in (*main[-1:], *(drop_ins[name] for name in sorted(drop_ins))):
        lines = (line.strip().partition("=") for line in text.splitlines() if not line.lstrip().startswith(("#", ";", "[")))
        settings |= {key.strip(): value.strip() for key, equals, value in lines if equals}
    return settings


def _persistent(files: remote.Files, settings: Mapping[str, str]) -> tuple[bool | None, str]:
    """Whether entries go to the disk, and why that cannot be told."""
    if settings.get("Storage", "").lower() in ("volatile", "none"):
        return False, ""
    machine_id = files.files.get(_MACHINE_ID, "").strip()
    if f"{_ON_DISK}/{machine_id}" in files.dirs and machine_id:
        return True, ""
    refused = files.unreadable.get(f"{_ON_DISK}/*") or files.unreadable.get(_ON_DISK)
    if refused or not machine_id:
        return None, f"{_ON_DISK if refused else _MACHINE_ID} cannot be read: {refused or 'it holds no id'}"
    return False, ""


# ------------------------------------------------------------------------------------------------------ reading


def read_entries(result: Result) -> Entries:
    """The entries of a ``journalctl -o json`` answer, oldest first, and what is known to be missing.

    Raises CannotTell when there is no journal, when it may not be read at all, or when journalctl failed. An answer cut
    at the output limit is read as far as it goes, with a gap (what was cut are the newest lines).
    """
    gaps = []
    refused = next((line for line in result.error_text.splitlines() if any(p in line.lower() for p in _NOT_PERMITTED)), "")
    if "No journal files were" in result.error_text:
        raise CannotTell(refused or "the machine keeps no journal: no journal files were found")
    if result.lost_stdout:
        gaps.append(f"the answer was cut after {len(result.stdout)} bytes: the newest lines are missing")
    else:
        text_of(result)
    entries, unreadable = _decode(result.stdout.split(b"\n"), cut=bool(result.lost_stdout))
    if refused:
        gaps.append(f"not all entries may be read: {refused.removeprefix('Hint: ').strip()}")
    elif gap := _one_login_alone(result, entries):
        gaps.append(gap)
    if "corrupt" in result.error_text.lower() or "truncated" in result.error_text.lower():
        gaps.append(f"journal files are damaged: {said(result)}")
    if unreadable:
        gaps.append(f"{unreadable} of the journal's lines could not be read")
    if lost := sum(e.text_lost for e in entries):
        gaps.append(f"{lost} entries came without their message (it was too long)")
    return Entries(tuple(entries), tuple(gaps))


def _one_login_alone(result: Result, entries: Sequence[JournalEntry]) -> str:
    """Why an answer to an ordinary login may be a part of the journal only; "" when it shows that it is not.

    WHY: journalctl warns of that only where people read; with ``-o json`` it prints the login's own entries and is content.
    A login that may read everything (group adm or systemd-journal) sees lines of the kernel or of root among them.
    """
    owners = {entry.uid for entry in entries}
    if result.as_root or len(owners) != 1 or owners & {None, 0}:
        return ""
    return f"all entries are of user id {owners.pop()}: this login may not see the others (groups adm, systemd-journal)"


def lost_messages(entries: Iterable[JournalEntry]) -> list[str]:
    """journald's own notes among ``entries`` that messages were lost."""
    return [e.text for e in entries if _LOST.match(e.text)]


class _Raw(msgspec.Struct):
    """The fields of an entry that are used; each may be a string, null, bytes as numbers, or a list of those."""

    realtime: Any = msgspec.field(default=None, name="__REALTIME_TIMESTAMP")
    monotonic: Any = msgspec.field(default=None, name="__MONOTONIC_TIMESTAMP")
    source_monotonic: Any = msgspec.field(default=None, name="_SOURCE_MONOTONIC_TIMESTAMP")
    priority: Any = msgspec.field(default=None, name="PRIORITY")
    message: Any = msgspec.field(default="", name="MESSAGE")
    identifier: Any = msgspec.field(default="", name="SYSLOG_IDENTIFIER")
    pid: Any = msgspec.field(default=None, name="_PID")
    claimed_pid: Any = msgspec.field(default=None, name="SYSLOG_PID")
    transport: Any = msgspec.field(default="", name="_TRANSPORT")
    boot_id: Any = msgspec.field(default="", name="_BOOT_ID")
    message_id: Any = msgspec.field(default="", name="MESSAGE_ID")
    process_invocation: Any = msgspec.field(default="", name="_SYSTEMD_INVOCATION_ID")
    unit_invocation: Any = msgspec.field(default="", name="INVOCATION_ID")
    uid: Any = msgspec.field(default="", name="_UID")


def _decode(lines: Sequence[bytes], *, cut: bool) -> tuple[list[JournalEntry], int]:
    """The entries, and how many lines were none. The last line of a cut answer is half a line and not counted."""
    decode = msgspec.json.Decoder(_Raw).decode
    entries, unreadable = [], 0
    for line in lines[:-1] if cut else lines:
        if not line.strip() or line.startswith(b"-- "):  # "-- No entries --", "-- Boot … --"
            continue
        try:
            entries.append(_entry(decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, OverflowError):
            unreadable += 1
    return entries, unreadable


def _entry(raw: _Raw) -> JournalEntry:
    received = _seconds(raw.monotonic)
    # WHY: journald stamps an entry when it receives it, so all lines of the early boot would bear the moment at which
    # journald came up; the kernel's own stamp says when the line was written.
    written = _seconds(raw.source_monotonic)
    time = datetime.fromtimestamp(int(_text(raw.realtime)) / 1e6, UTC)
    if written is not None and received is not None:
        time -= timedelta(seconds=received - written)
    return JournalEntry(
        time=time,
        monotonic_s=written if written is not None else received,
        priority=int(level) if (level := _text(raw.priority)).isdecimal() else None,
        text=_text(raw.message),
        identifier=_text(raw.identifier),
        pid=int(pid) if (pid := _text(raw.pid) or _text(raw.claimed_pid)).isdecimal() else None,
        transport=_text(raw.transport),
        boot_id=_text(raw.boot_id),
        message_id=_text(raw.message_id),
        invocation_id=_text(raw.process_invocation) or _text(raw.unit_invocation),
        text_lost=raw.message is None,
        uid=int(uid) if (uid := _text(raw.uid)).isdecimal() else None,
    )


def _seconds(value: Any) -> float | None:
    text = _text(value)
    return int(text) / 1e6 if text.isdecimal() else None


def _text(value: Any) -> str:
    """A field as text: undecodable bytes become ``\\xNN``; of several values, all, each on a line of its own."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if value and all(isinstance(v, int) and 0 <= v <= 255 for v in value):
            return bytes(value).decode("utf-8", "backslashreplace")
        return "\n".join(_text(v) for v in value)
    return "" if value is None else str(value)

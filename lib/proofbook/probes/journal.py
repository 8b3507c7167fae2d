"""The systemd journal: entries as values, and the journal of one invocation of a unit.

``journalctl -o json`` prints one object a line. Fields are strings, ``null`` when they were too long, arrays of bytes
when they are not UTF-8, arrays of those when a field was given several times.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root, said, text_of
from proofbook.probes.systemd import UnitFacts, UnitState

__all__ = ["Entries", "JournalEntry", "UnitJournal", "UnitLog", "lost_messages", "read_entries"]

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
    and journald's note that it suppressed some of them ``OBJECT_SYSTEMD_INVOCATION_ID``.
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
        (answer,) = yield from prefer_root(inside(self.container, asked))
        read = read_entries(answer)
        gaps = (*read.gaps, *lost_messages(read.entries), *_what_the_unit_hides(state, read.entries))
        return UnitLog(self.unit, run, read.entries, not gaps, gaps)


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

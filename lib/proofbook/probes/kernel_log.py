"""The kernel log of one boot, and whether it is all there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import prefer_root, said, text_of
from proofbook.probes.boot import boot_id
from proofbook.probes.journal import JOURNALD, JournalEntry, deaf, lost_messages, read_entries

__all__ = ["KernelLine", "KernelLog", "KernelMessages"]

_BOOT_ID, _UPTIME = "/proc/sys/kernel/random/boot_id", "/proc/uptime"
#: The boot's first line is among the first few: early microcode and ARM's "Booting Linux" may come before it.
_FIRST_LINE, _WITHIN = "Linux version ", 16
#: The ring buffer may start this much after the journal's last line without a hole between the two.
_JOURNAL_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of the kernel: seconds since boot, UTC, syslog priority (0 … 7; None where the source does not say), text."""

    monotonic_s: float | None
    time: datetime | None
    priority: int | None
    text: str


@dataclass(frozen=True, slots=True)
class KernelMessages:
    """The kernel log of boot ``boot_id`` (32 hex digits), oldest line first.

    ``complete`` is True only when it starts with the boot's first line and nothing says that lines were lost; ``gaps``
    say why it is not. Absence of a line proves something only in a complete log.
    """

    lines: tuple[KernelLine, ...]
    complete: bool
    gaps: tuple[str, ...]
    source: str  # "journal" or "dmesg"
    boot_id: str
    notes: tuple[str, ...] = ()  # where lines come from, when not simply all from the journal
    unheard: int = 0  # lines of the ring buffer that the journal should have by now, and does not


@dataclass(frozen=True)
class KernelLog(Probe[KernelMessages]):
    """The kernel log of ``boot``: "0" is the current boot, "-1" the one before, or a boot id.

    The journal is asked first; for the current boot also the kernel's ring buffer (dmesg), which holds what journald
    missed, and lacks what it has overwritten. Together they say whether lines are missing:

    * the journal is whole when it starts with ``Linux version …`` and has no note of lost messages. WHY its notes are
      asked for by themselves: "Missed 27 kernel messages" is journald's own line, which ``-k`` does not show;
    * the ring buffer is whole when it starts with ``Linux version …``: it drops the oldest lines first.

    WHY journald is asked for: where the ring buffer may not be read, a journal that nobody writes any more looks whole.
    """

    boot: str = "0"
    name: ClassVar[str] = "kernel_log.KernelLog"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], KernelMessages]:
        which = self.boot if re.fullmatch(r"-?\d{1,6}", self.boot) else boot_id(self.boot)
        kernel = command("journalctl", "-k", "-b", which, "-o", "json", "--no-pager", timeout_s=60, root=True)
        notes = command("journalctl", "-b", which, "-o", "json", "--no-pager", "_TRANSPORT=driver", timeout_s=60, root=True)
        if which != "0":
            kernel_answer, notes_answer = yield from prefer_root(kernel, notes)
            return _from_journal(_journal(kernel_answer, notes_answer), which)
        kernel_answer, notes_answer, dmesg, files, journald = yield from prefer_root(
            kernel, notes, command("dmesg", timeout_s=60, root=True), remote.read_files(_BOOT_ID, _UPTIME), JOURNALD
        )
        now = remote.parse_files(files)
        current, uptime_s = boot_id(now.get(_BOOT_ID)), float(now.get(_UPTIME).split()[0])
        ring = _dmesg(dmesg, files.started_at - timedelta(seconds=uptime_s))
        return _current_boot(_journal(kernel_answer, notes_answer), ring, current, uptime_s, deaf(journald))


# ------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class _Source:
    """One source's lines, or why it has none."""

    lines: tuple[KernelLine, ...] = ()
    gaps: tuple[str, ...] = ()
    boot_ids: frozenset[str] = frozenset()
    unknown: str = ""

    @property
    def from_the_start(self) -> bool:
        return any(line.text.startswith(_FIRST_LINE) for line in self.lines[:_WITHIN])


def _journal(kernel: Result, notes: Result) -> _Source:
    try:
        read = read_entries(kernel)
    except CannotTell as why:
        return _Source(unknown=str(why))
    lines = tuple(KernelLine(e.monotonic_s, e.time, e.priority, _as_in_the_ring(e)) for e in read.entries)
    gaps = [*read.gaps, *lost_messages(read.entries)]
    gaps += [gap for gap in _notes_on_the_kernel(notes) if gap not in gaps]
    if lines and not _Source(lines).from_the_start:
        gaps.append(f"the journal starts late, with {lines[0].text[:80]!r}: earlier lines were rotated away or never arrived")
    return _Source(lines, tuple(gaps), frozenset(e.boot_id for e in read.entries))


def _as_in_the_ring(entry: JournalEntry) -> str:
    """journald takes the writer's name off lines that a process wrote to /dev/kmsg; with it they are no kernel's words."""
    if entry.identifier in ("kernel", ""):
        return entry.text
    return f"{entry.identifier}[{entry.pid}]: {entry.text}" if entry.pid else f"{entry.identifier}: {entry.text}"


def _notes_on_the_kernel(notes: Result) -> list[str]:
    """journald's notes that it missed kernel messages (it also notes suppressed ones of services: not the kernel's)."""
    try:
        read = read_entries(notes)
    except CannotTell as why:
        return [f"journald's own notes on lost messages cannot be read: {why}"]
    if read.gaps:
        return [f"journald's own notes on lost messages cannot be read whole: {'; '.join(read.gaps)}"]
    return [text for text in lost_messages(read.entries) if "kernel messages" in text]


_STAMPED = re.compile(r"^(?:<(?P<level>\d+)>)?\[\s*(?P<seconds>\d+\.\d+)\](?:\[\s*[TC]\d+\])? ?(?P<text>.*)$")


def _dmesg(result: Result, booted_at: datetime) -> _Source:
    """``[   12.345678] text`` as lines; a line without a stamp goes on with the one before."""
    if result.exit_status != 0 and "Operation not permitted" in result.error_text:
        return _Source(unknown=f"the kernel's ring buffer may only be read by root: {said(result)}")
    try:
        text = text_of(result)
    except CannotTell as why:
        return _Source(unknown=str(why))
    lines: list[KernelLine] = []
    for raw in text.splitlines():
        if found := _STAMPED.match(raw):
            seconds = float(found["seconds"])
            level = int(found["level"]) & 7 if found["level"] else None
            lines.append(KernelLine(seconds, booted_at + timedelta(seconds=seconds), level, found["text"]))
        elif lines:
            last = lines[-1]
            lines[-1] = KernelLine(last.monotonic_s, last.time, last.priority, f"{last.text}\n{raw.strip()}")
        elif raw.strip():
            return _Source(unknown=f"dmesg prints no time stamps, so its lines cannot be placed: {raw[:80]!r}")
    return _Source(tuple(lines)) if lines else _Source(unknown="the kernel's ring buffer is empty")


# -------------------------------------------------------------------------------------------- holding both together


def _from_journal(journal: _Source, which: str) -> KernelMessages:
    """A boot that is over: only the journal can know it."""
    if journal.unknown:
        raise CannotTell(journal.unknown)
    if not journal.lines:
        raise CannotTell("; ".join((f"the journal holds no kernel line of boot {which}", *journal.gaps)))
    if len(journal.boot_ids) != 1:
        raise CannotTell(f"the journal answered with lines of {len(journal.boot_ids)} boots where one was asked for")
    answered = boot_id(next(iter(journal.boot_ids)))
    if len(which) == 32 and answered != which:
        raise CannotTell(f"asked for boot {which}, the journal answered with {answered}")
    return KernelMessages(journal.lines, not journal.gaps, journal.gaps, "journal", answered)


def _current_boot(journal: _Source, ring: _Source, current: str, uptime_s: float, not_written: str) -> KernelMessages:
    """The current boot: the journal where it can be had, with what only the ring buffer holds; else the ring buffer.

    ``not_written``: why nothing is added to the journal now; the ring buffer makes up for that where it can be read.
    """
    if journal.unknown or not journal.lines:
        why = journal.unknown or "; ".join(("the journal holds no kernel line of this boot", *journal.gaps))
        if ring.unknown:
            raise CannotTell(f"{why}; {ring.unknown}")
        return _from_ring(ring, current, why)
    if others := journal.boot_ids - {current}:
        raise CannotTell(f"the machine runs boot {current}, the journal answered with {', '.join(sorted(others)) or 'none'}")
    if not journal.from_the_start and ring.from_the_start:
        return _from_ring(ring, current, journal.gaps[-1])
    extra = _only_in_ring(journal.lines, ring.lines)
    gaps = (*journal.gaps, *_holes(journal, ring, extra), *([not_written] if ring.unknown and not_written else []))
    lines = tuple(sorted((*journal.lines, *extra), key=_seconds)) if extra else journal.lines
    notes = (f"{len(extra)} lines are from the ring buffer: the journal does not have them",) if extra else ()
    # Older ones may have been rotated away, and the newest may still be on their way.
    unheard = sum(_seconds(journal.lines[0]) <= _seconds(line) < uptime_s - _JOURNAL_DELAY_S for line in extra)
    notes = (*notes, *([ring.unknown] if ring.unknown else []))
    return KernelMessages(lines, not gaps, gaps, "journal", current, notes, unheard)


def _from_ring(ring: _Source, current: str, why: str) -> KernelMessages:
    gaps: tuple[str, ...] = ()
    if not ring.from_the_start:
        gaps = (why, f"the kernel's ring buffer starts late, with {ring.lines[0].text[:80]!r}: it has overwritten earlier lines")
    return KernelMessages(ring.lines, not gaps, gaps, "dmesg", current, (f"not from the journal: {why}",))


def _holes(journal: _Source, ring: _Source, extra: Sequence[KernelLine]) -> list[str]:
    """What the ring buffer shows to be missing from both; nothing is when it reaches back to the start of the boot."""
    if not ring.lines or ring.from_the_start:
        return []
    last = _seconds(journal.lines[-1])
    if _seconds(ring.lines[0]) > last + _JOURNAL_DELAY_S:
        return [f"the journal ends {last:.0f} s after the boot, the ring buffer starts {_seconds(ring.lines[0]):.0f} s after it"]
    if missed := [line for line in extra if _seconds(line) <= last]:
        first = missed[0].text[:80]
        return [
            f"{len(missed)} lines of the ring buffer never reached the journal (the first: {first!r}); older ones may be lost"
        ]
    return []


def _only_in_ring(journal: Sequence[KernelLine], ring: Sequence[KernelLine]) -> list[KernelLine]:
    """The ring buffer's lines that the journal does not have, each as often as it is missing.

    WHY journald's own lines do not count: it writes to the ring buffer itself and does not take those in again.
    """
    same = Counter(line.text for line in journal)
    extra = [line for line in ring if not _take(same, line.text)]
    if not extra:
        return []
    # Only what differs as it stands is compared without what the two write differently: most logs never come here.
    alike = Counter(_plain(text) for text in same.elements())
    missing = []
    for line in extra:
        text = _plain(line.text)
        if text and not line.text.startswith("systemd-journald[") and not _take(alike, text):
            missing.append(line)
    return missing


def _take(left: Counter[str], text: str) -> bool:
    """Take ``text`` out of ``left`` once, if it is there."""
    if left[text] <= 0:
        return False
    left[text] -= 1
    return True


def _plain(text: str) -> str:
    """A line without what the two sources write differently: blanks, escapes, and the process that wrote to /dev/kmsg."""
    return " ".join(_DIFFERS.sub(" ", text).split())


_DIFFERS = re.compile(r"^[\w.@-]+\[\d+\]: |\\x[0-9a-f]{2}|[^\x20-\x7e]")


def _seconds(line: KernelLine) -> float:
    return line.monotonic_s or 0.0

"""The systemd journal: entries as values, and the journal of one invocation of a unit.

``journalctl -o json`` prints one object a line. Fields are strings, ``null`` when they were too long, arrays of bytes
when they are not UTF-8, arrays of those when a field was given several times.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result


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
    """Everything that the current invocation of ``unit`` said."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "journal.UnitJournal"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], UnitLog]: ...

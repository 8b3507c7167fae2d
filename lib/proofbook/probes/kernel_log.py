"""The kernel log of one boot, and whether it is all there."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from proofbook.model import Command, Probe, Result


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


@dataclass(frozen=True)
class KernelLog(Probe[KernelMessages]):
    """The kernel log of ``boot``: "0" is the current boot, "-1" the one before, or a boot id."""

    boot: str = "0"
    name: ClassVar[str] = "kernel_log.KernelLog"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], KernelMessages]: ...

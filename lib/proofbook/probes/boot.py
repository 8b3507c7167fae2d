"""The machine and its boots: who it is, since when it is up, and how the boot before ended."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Which machine this is and how it was booted. Board, product and BIOS are "" where the firmware does not say."""

    hostname: str
    machine_id: str  # 32 hex digits
    boot_id: str  # 32 hex digits, without dashes
    kernel: str  # as `uname -r`
    cmdline: str
    uptime_s: float
    booted_at: datetime  # UTC, to a second or so
    board: str = ""
    product: str = ""
    bios: str = ""
    virtualization: str = ""  # "" on bare metal as far as the firmware's strings tell; else "qemu", "lxc", …

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel command line as tokens."""
        return tuple(self.cmdline.split())


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot that the journal knows: 0 is the current one, -1 the one before. The times are of its entries (UTC), None if unread."""

    index: int
    boot_id: str
    first: datetime | None = None
    last: datetime | None = None


@dataclass(frozen=True, slots=True)
class ShutdownFacts:
    """How a boot ended. ``orderly``: systemd was seen going down to the end; ``why`` names the line or its absence."""

    boot_id: str
    orderly: bool
    why: str
    last_at: datetime | None
    last_lines: tuple[str, ...]


@dataclass(frozen=True)
class Machine(Probe[MachineFacts]):
    """Identity, kernel, command line and firmware of the machine."""

    name: ClassVar[str] = "boot.Machine"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], MachineFacts]: ...


@dataclass(frozen=True)
class Boots(Probe[tuple[Boot, ...]]):
    """The boots that the journal keeps, oldest first."""

    name: ClassVar[str] = "boot.Boots"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Boot, ...]]: ...


@dataclass(frozen=True)
class Shutdown(Probe[ShutdownFacts]):
    """How the boot ``boot_id`` ended: orderly, or cut off."""

    boot_id: str
    name: ClassVar[str] = "boot.Shutdown"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ShutdownFacts]: ...

"""The machine and its boots: who it is, since when it is up, and how the boot before ended."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import prefer_root, said, text_of
from proofbook.probes.journal import JournalEntry, read_entries

__all__ = ["Boot", "Boots", "Machine", "MachineFacts", "Shutdown", "ShutdownFacts", "boot_id"]

_KERNEL = "/proc/sys/kernel"
_DMI = "/sys/class/dmi/id"
_MACHINE_FILES = (
    f"{_KERNEL}/hostname",
    f"{_KERNEL}/osrelease",
    f"{_KERNEL}/random/boot_id",
    "/etc/machine-id",
    "/proc/cmdline",
    "/proc/uptime",
    f"{_DMI}/sys_vendor",
    f"{_DMI}/board_name",
    f"{_DMI}/product_name",
    f"{_DMI}/bios_version",
    "/run/systemd/container",
)
#: What virtual machines call themselves in the firmware's strings (vendor or product), lower case.
_VIRTUAL = (
    "qemu",
    "kvm",
    "vmware",
    "virtualbox",
    "xen",
    "bochs",
    "amazon ec2",
    "google compute engine",
    "virtual machine",
    "openstack",
)


def boot_id(text: str) -> str:
    """A boot id as the journal has it: 32 hex digits without dashes (the kernel prints dashes). Raises CannotTell."""
    plain = text.strip().replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", plain) or not plain.strip("0"):
        raise CannotTell(f"not a boot id: {text.strip()[:80]!r} (expected 32 hex digits)")
    return plain


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
    """One boot that the journal knows: 0 is the current one, -1 the one before. Times of its entries (UTC), None if unread."""

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
    """Identity, kernel, command line and firmware of the machine.

    ``/proc/sys/kernel/random/boot_id`` says ``7c0e2c5b-3f0e-4f0a-9c55-0a4b1d2e3f40``, the journal
    ``7c0e2c5b3f0e4f0a9c550a4b1d2e3f40``: compared without dashes. No file needs root, no program is run.
    """

    name: ClassVar[str] = "boot.Machine"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], MachineFacts]:
        (answer,) = yield [remote.read_files(*_MACHINE_FILES)]
        return _machine_facts(remote.parse_files(answer), answer.started_at)


def _machine_facts(files: remote.Files, read_at: datetime) -> MachineFacts:
    machine_id = files.get("/etc/machine-id").strip().lower()
    if not re.fullmatch(r"[0-9a-f]{32}", machine_id):
        raise CannotTell(f"/etc/machine-id holds no machine id: {machine_id[:80]!r} (expected 32 hex digits)")
    uptime = files.get("/proc/uptime").split()
    if not uptime or not re.fullmatch(r"\d+(\.\d+)?", uptime[0]):
        raise CannotTell(f"/proc/uptime holds no number: {' '.join(uptime)[:80]!r}")

    def firmware(name: str) -> str:
        return files.files.get(f"{_DMI}/{name}", "").strip()

    return MachineFacts(
        hostname=files.get(f"{_KERNEL}/hostname").strip(),
        machine_id=machine_id,
        boot_id=boot_id(files.get(f"{_KERNEL}/random/boot_id")),
        kernel=files.get(f"{_KERNEL}/osrelease").strip(),
        cmdline=files.get("/proc/cmdline").strip(),
        uptime_s=float(uptime[0]),
        booted_at=read_at - timedelta(seconds=float(uptime[0])),
        board=firmware("board_name"),
        product=firmware("product_name"),
        bios=firmware("bios_version"),
        virtualization=_virtualization(files, f"{firmware('sys_vendor')} {firmware('product_name')}"),
    )


def _virtualization(files: remote.Files, firmware: str) -> str:
    """systemd's word where it runs in a container ("lxc"), else the virtual machine that the firmware names, else ""."""
    if container := files.files.get("/run/systemd/container", "").strip():
        return container
    return next((name for name in _VIRTUAL if name in firmware.lower()), "")


@dataclass(frozen=True)
class Boots(Probe[tuple[Boot, ...]]):
    """The boots that the journal keeps, oldest first.

    ``-1 0b1c…  Mon 2026-04-06 10:00:00 UTC—Mon 2026-04-06 11:00:00 UTC`` up to systemd 253; newer ones print a heading
    and two columns. One boot alone can mean a first boot, or a journal that does not outlive one.
    """

    name: ClassVar[str] = "boot.Boots"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Boot, ...]]:
        (answer,) = yield from prefer_root(command("journalctl", "--list-boots", "--no-pager", timeout_s=60, root=True))
        return _boots(answer)


_BOOT = re.compile(r"^\s*(-?\d+)\s+([0-9a-f]{32})\b(.*)$")
_STAMP = re.compile(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? ([A-Z]\w*|[+-]\d\d(?::?\d\d)?)")


def _boots(answer: Result) -> tuple[Boot, ...]:
    if "insufficient permissions" in answer.error_text or "No journal files were found" in answer.error_text:
        raise CannotTell(f"the journal's boots cannot be listed: {said(answer)}")
    if "not seeing messages from other users" in answer.error_text:
        raise CannotTell("of the journal's boots this login sees its own entries alone (groups adm, systemd-journal)")
    boots = []
    for line in text_of(answer).splitlines():
        if found := _BOOT.match(line):
            first, last = _span(found[3])
            boots.append(Boot(int(found[1]), boot_id(found[2]), first, last))
        elif line.strip() and not line.lstrip().startswith("IDX"):
            raise CannotTell(f"journalctl --list-boots said a line that is no boot: {line[:200]!r}")
    if not boots:
        raise CannotTell(f"the journal knows no boot: {said(answer) or 'it is empty'}")
    return tuple(boots)


def _span(text: str) -> tuple[datetime | None, datetime | None]:
    """First and last entry, where they are in UTC: the short name of another zone does not tell its offset."""
    stamps = [
        datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if zone == "UTC" else None
        for stamp, zone in _STAMP.findall(text)
    ]
    return (stamps[0], stamps[1]) if len(stamps) == 2 else (None, None)


@dataclass(frozen=True)
class Shutdown(Probe[ShutdownFacts]):
    """How the boot ``boot_id`` ended: orderly, or cut off.

    An orderly end leaves ``Reached target reboot.target - System Reboot.``, ``Shutting down.`` and
    ``Journal stopped`` as its last lines; a reset or a loss of power leaves whatever happened to be last.
    """

    boot_id: str
    name: ClassVar[str] = "boot.Shutdown"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ShutdownFacts]:
        wanted = boot_id(self.boot_id)
        last = command("journalctl", "-b", wanted, "-n", "400", "-o", "json", "--no-pager", timeout_s=60, root=True)
        (answer,) = yield from prefer_root(last)
        return _shutdown_facts(wanted, answer)


_TARGET_DOWN = re.compile(
    r"^Reached target .*\b(?:shutdown|reboot|power-?off|power off|halt|kexec|final step|final)\b", re.IGNORECASE
)
# WHY so narrow: "Finished … Record System Boot/Shutdown in UTMP" is a line of every boot.
_SERVICE_DOWN = re.compile(
    r"^(?:Finished|Started) (?:systemd-(?:reboot|poweroff|halt)\.service - )?(?:System )?(?:Reboot|Power[ -]?Off|Halt)\b.?$",
    re.IGNORECASE,
)
_JOURNAL_STOP, _JOURNAL_START = "d93fb3c9c24d451a97cea615ce59c00b", "f77379a8490b408bbe5f6940505a777b"
_LAST_LINES = 10


def _shutdown_facts(wanted: str, answer: Result) -> ShutdownFacts:
    if answer.exit_status not in (0, None) and "boot" in answer.error_text.lower():
        raise CannotTell(f"the journal does not keep boot {wanted}: {said(answer)}")
    read = read_entries(answer)
    entries = read.entries
    if not entries:
        raise CannotTell(f"the journal holds nothing of boot {wanted}{': ' + said(answer) if answer.stderr else ''}")
    if others := {e.boot_id for e in entries} - {wanted}:
        raise CannotTell(f"asked for boot {wanted}, journalctl answered with {', '.join(sorted(others)) or 'none'}")
    if read.gaps:
        raise CannotTell(f"the end of boot {wanted} cannot be told: {'; '.join(read.gaps)}")
    down = _going_down(entries)
    if down is None and (stopped := _journal_stopped(entries)):
        raise CannotTell(
            f"the journal of boot {wanted} was stopped at {stopped.time:%Y-%m-%dT%H:%M:%SZ}, and nothing before that says that "
            "the machine was going down: what happened then was not written down"
        )
    return ShutdownFacts(
        boot_id=wanted,
        orderly=down is not None,
        why=f"{down.identifier}: {down.text}" if down else f"nothing of a shutdown in its last {len(entries)} entries",
        last_at=entries[-1].time,
        last_lines=tuple(f"{e.time:%Y-%m-%dT%H:%M:%SZ} {e.identifier}: {e.text}" for e in entries[-_LAST_LINES:]),
    )


def _going_down(entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """The last entry that proves an orderly end, None when there is none.

    WHY "Journal stopped" alone is none: journald also stops when it is restarted, updated, or stopped by a hand.
    """
    proof = None
    for entry in entries:
        if _says(entry, _JOURNAL_START, "Journal started"):
            proof = None
        elif _ends_a_boot(entry) or (proof and _says(entry, _JOURNAL_STOP, "Journal stopped")):
            proof = entry
    return proof


def _journal_stopped(entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """journald's word that it stopped, if it is its last one."""
    own = [e for e in entries if _says(e, _JOURNAL_STOP, "Journal stopped") or _says(e, _JOURNAL_START, "Journal started")]
    return own[-1] if own and _says(own[-1], _JOURNAL_STOP, "Journal stopped") else None


def _says(entry: JournalEntry, message_id: str, text: str) -> bool:
    """Whether this is that word of journald about itself."""
    return entry.identifier == "systemd-journald" and (entry.message_id == message_id or entry.text == text)


def _ends_a_boot(entry: JournalEntry) -> bool:
    if entry.identifier == "systemd" and entry.pid == 1:  # other pids are users' own managers: they end with each logout
        return bool(entry.text == "Shutting down." or _TARGET_DOWN.match(entry.text) or _SERVICE_DOWN.match(entry.text))
    # By its sender: PID 1 has this name only while the machine goes down, and stops nothing by hand.
    return entry.identifier == "systemd-shutdown" or entry.text.startswith("Received SIGTERM from PID 1 (systemd-shutdow")

"""Did this machine, and no other, reboot once and orderly, into the kernel that was meant?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.baseline import Baseline
from proofbook.checks.looking import counted, join, short_id, tell, unseen, well_formed_id
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.boot import Boot, Boots, Machine, MachineFacts, Shutdown

__all__ = ["KernelAndCommandLine", "OrderlyShutdown", "Rebooted", "SameMachine", "StillUp"]

_LOOK_AT_JOURNAL = "Make the journal persistent (Storage=persistent in journald.conf) and readable by this user."


@dataclass(frozen=True)
class SameMachine(Check):
    """The machine-id is the one from before. The host key, the other half of the identity, is proven by the connection.

    ``machine_id`` (e.g. from the inventory) is asked for when there is no baseline.
    """

    baseline: Baseline | None
    machine_id: str = ""
    name: ClassVar[str] = "boot.SameMachine"
    title: ClassVar[str] = "Is this the machine that we mean?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        machine, why = tell(seen, Machine()).pair
        if machine is None:
            return [unseen(self, why, "machine-id")]
        subject = machine.hostname
        if not well_formed_id(machine.machine_id):
            return [
                self.unknown(
                    f"the machine-id {machine.machine_id!r} is not 32 hex digits: it identifies nothing", subject=subject
                )
            ]
        before = self.baseline.machine if self.baseline else None
        expected = before.machine_id if before else self.machine_id
        if not expected:
            if self.baseline is not None:
                why = self.baseline.unknown.get("machine", "it was not looked at")
                return [self.unknown(f"the machine-id of before is not known: {why}", subject=subject)]
            reason = f"machine-id {machine.machine_id}; there is no earlier look to hold it against"
            return [self.not_checked(reason, subject=subject, observed=machine.machine_id)]
        compared = {"subject": subject, "expected": expected, "observed": machine.machine_id}
        if expected != machine.machine_id:
            return [
                self.failed(
                    f"another machine answers: machine-id {short_id(machine.machine_id)}… instead of {short_id(expected)}…",
                    action=Suggested.LOOK,
                    what_to_do="Stop. Find out which machine has this address now; was it reinstalled, or its image cloned?",
                    **compared,
                )
            ]
        return [self.passed(f"machine-id {short_id(expected)}… as before", **compared)]


@dataclass(frozen=True)
class Rebooted(Check):
    """The boot-id is well-formed and another one, and exactly one boot began since the baseline.

    ``planned``: this run asked for the one reboot, so a second one is a fault. Against an older record, further reboots
    may have been asked for by others: a warning.
    """

    baseline: Baseline | None
    planned: bool = True
    name: ClassVar[str] = "boot.Rebooted"
    title: ClassVar[str] = "Did it really reboot, and only once?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(), Boots())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        machine, why = tell(seen, Machine()).pair
        if machine is None:
            return [unseen(self, why, "boot-id")]
        if self.baseline is None:
            reason = (
                f"up {_duration(machine.uptime_s)} on boot {short_id(machine.boot_id)}…; there is no earlier look to compare with"
            )
            return [self.not_checked(reason, subject="boot-id", observed=machine.boot_id)]
        before, now = self.baseline.boot_id, machine.boot_id
        if not before:
            why = self.baseline.unknown.get("machine", "it was not looked at")
            return [self.unknown(f"the boot-id of before is not known: {why}", subject="boot-id")]
        for which, boot_id in (("before", before), ("now", now)):
            if not well_formed_id(boot_id):
                return [
                    self.unknown(
                        f"the boot-id {which}, {boot_id!r}, is not 32 hex digits: nothing follows from it", subject="boot-id"
                    )
                ]
        compared: dict[str, Any] = {"subject": "boot-id", "expected": f"not {before}", "observed": now}
        if before == now:
            return [
                self.failed(
                    f"it did not reboot: still boot {short_id(now)}…, up {_duration(machine.uptime_s)}",
                    action=Suggested.CONSOLE,
                    what_to_do="Look at the console: is a shutdown job waiting (`systemctl list-jobs`), or did an "
                    "inhibitor refuse it?",
                    **compared,
                )
            ]
        changed = self.passed(
            f"boot {short_id(now)}… is new (before: {short_id(before)}…), up {_duration(machine.uptime_s)}", **compared
        )
        return [changed, self._how_often(seen, before, now)]

    def _how_often(self, seen: Seen, before: str, now: str) -> Finding:
        subject = "number of boots"
        boots, why = tell(seen, Boots()).pair
        if boots is None:
            return self.unknown(
                f"whether it booted only once cannot be told: {why}",
                subject=subject,
                action=Suggested.GRANT,
                what_to_do=_LOOK_AT_JOURNAL,
            )
        ids = [b.boot_id for b in sorted(boots, key=lambda b: b.index)]
        if not ids or ids[-1] != now:
            return self.unknown(
                f"the newest of {counted(len(ids), 'boot')} in the journal is not the running one: the list is not of this boot",
                subject=subject,
                action=Suggested.WAIT,
                what_to_do="Look again once journald runs; a clock far in the past can also put the boots out of order.",
            )
        if before not in ids:
            return self.unknown(
                f"the journal keeps {counted(len(ids), 'boot')} and no longer boot {short_id(before)}…: others may "
                "have come and gone",
                subject=subject,
                what_to_do=_LOOK_AT_JOURNAL,
            )
        since = ids[ids.index(before) + 1 :]
        found: dict[str, Any] = {"subject": subject, "expected": 1, "observed": len(since), "count": len(since)}
        if len(since) == 1:
            return self.passed("exactly one boot since then", **found)
        reason = (
            f"{len(since)} boots since then, and only the last one runs: "
            f"{join(_described(b) for b in boots if b.boot_id in since)}"
        )
        if self.planned:
            return self.failed(
                f"{reason}. One reboot was asked for; the others came by themselves",
                action=Suggested.CHECK_HARDWARE,
                what_to_do="Read the end of the first new boot (`journalctl -b -1 -e`) and the BMC's event log: what "
                "reset the machine?",
                **found,
            )
        return self.warned(
            f"{reason}. Whether each was wanted is not known",
            action=Suggested.LOOK,
            what_to_do="Ask who rebooted it; `last -x reboot shutdown` shows when.",
            **found,
        )


@dataclass(frozen=True)
class StillUp(Check):
    """Between the first look after the boot and this one, the machine did not reset. A host can reset without any log line."""

    first: Baseline = field(repr=False)
    name: ClassVar[str] = "boot.StillUp"
    title: ClassVar[str] = "Has it stayed up since the first look?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        machine, why = tell(seen, Machine()).pair
        if machine is None:
            return [unseen(self, why, "boot-id")]
        first = self.first.boot_id
        if not well_formed_id(first) or not well_formed_id(machine.boot_id):
            return [
                self.unknown(f"boot-id {first!r} then, {machine.boot_id!r} now: nothing follows from them", subject="boot-id")
            ]
        compared: dict[str, Any] = {"subject": "boot-id", "expected": first, "observed": machine.boot_id}
        if first != machine.boot_id:
            return [
                self.failed(
                    f"it reset again after the first look: boot {short_id(first)}… then, {short_id(machine.boot_id)}… now, "
                    f"up {_duration(machine.uptime_s)}",
                    action=Suggested.CHECK_HARDWARE,
                    what_to_do="Read the end of the boot before (`journalctl -b -1 -e`) and the BMC's event log.",
                    **compared,
                )
            ]
        return [self.passed(f"still boot {short_id(first)}…, up {_duration(machine.uptime_s)}", **compared)]


@dataclass(frozen=True)
class OrderlyShutdown(Check):
    """The boot before ended with systemd going down, not in the middle of a line.

    ``boot_id``: the boot whose end is judged (the baseline's); "" when nobody knows which one was before, and the list of
    boots says why.
    """

    boot_id: str
    name: ClassVar[str] = "boot.OrderlyShutdown"
    title: ClassVar[str] = "Did the boot before end orderly?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(), Shutdown(self.boot_id)) if self.boot_id else (Boots(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        if not self.boot_id:
            return [self._none_before(seen)]
        subject = f"boot {short_id(self.boot_id)}"
        machine = tell(seen, Machine()).value
        if machine is not None and machine.boot_id == self.boot_id:
            return [self.not_checked("it still runs, so it has not ended", subject=subject)]
        facts, why = tell(seen, Shutdown(self.boot_id)).pair
        if facts is None:
            return [
                self.unknown(
                    f"how it ended cannot be told: {why}", subject=subject, action=Suggested.GRANT, what_to_do=_LOOK_AT_JOURNAL
                )
            ]
        if facts.orderly:
            return [self.passed(f"orderly: {facts.why}", subject=subject, lines=facts.last_lines[-3:])]
        ended = f" at {facts.last_at.isoformat(timespec='seconds')}" if facts.last_at else ""
        return [
            self.warned(
                f"unclean: its log ends{ended} without a shutdown ({facts.why}). The machine was reset or cut off, "
                "and not by the plan",
                subject=subject,
                lines=facts.last_lines[-5:],
                action=Suggested.CHECK_HARDWARE,
                what_to_do="Look at the BMC's event log (power, watchdog, memory) and at the last lines; expect file "
                "systems to be repaired.",
            )
        ]

    def _none_before(self, seen: Seen) -> Finding:
        boots, why = tell(seen, Boots()).pair
        if boots is None:
            return self.unknown(
                f"which boot was the one before cannot be told: {why}", action=Suggested.GRANT, what_to_do=_LOOK_AT_JOURNAL
            )
        if any(b.index < 0 for b in boots):
            return self.unknown("which boot was the one before became known too late to ask for its end", action=Suggested.WAIT)
        return self.not_checked("the journal knows this boot alone: it is the first one, or the journal does not outlive a boot")


#: Options of the kernel command line that decide what these runbooks are about.
_WEIGHTY = ("iommu", "amd_iommu", "intel_iommu", "pci", "pcie_", "nvidia", "vfio", "modprobe.blacklist", "module_blacklist")


@dataclass(frozen=True)
class KernelAndCommandLine(Check):
    """The kernel and its command line are the ones that were meant (``kernel``, ``options``), else those of before.

    ``options``: words that ``/proc/cmdline`` must hold. WHY /proc/cmdline: the file that was edited may be one that this
    machine's boot loader never reads (GRUB and systemd-boot have different ones).
    """

    baseline: Baseline | None
    kernel: str = ""
    options: tuple[str, ...] = ()
    name: ClassVar[str] = "boot.KernelAndCommandLine"
    title: ClassVar[str] = "Is it the kernel and the command line that were meant?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        machine, why = tell(seen, Machine()).pair
        if machine is None:
            return [unseen(self, why, "kernel")]
        before = self.baseline.machine if self.baseline else None
        if self.baseline is not None and before is None and not (self.kernel and self.options):
            reason = f"the kernel of before is not known: {self.baseline.unknown.get('machine', 'it was not looked at')}"
            return [self.unknown(reason, subject="kernel")]
        findings = [self._kernel(machine, before), self._options(machine, before)]
        odd = _without_effect(machine.arguments)
        if odd:
            findings.append(
                self.warned(
                    f"on the command line, but without the effect it seems to have: {'; '.join(odd)}",
                    subject="kernel command line",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Take these words out; judge the IOMMU by the types of its groups, never by the command line.",
                )
            )
        return findings

    def _kernel(self, machine: MachineFacts, before: MachineFacts | None) -> Finding:
        expected = self.kernel or (before.kernel if before else "")
        compared: dict[str, Any] = {"subject": "kernel", "expected": expected or None, "observed": machine.kernel}
        if not machine.kernel:
            return self.unknown("the running kernel's release is not known", subject="kernel")
        if not expected:
            return self.not_checked(f"{machine.kernel}; nobody said which one is meant", **compared)
        if machine.kernel == expected:
            return self.passed(f"{machine.kernel}, as {'meant' if self.kernel else 'before'}", **compared)
        if self.kernel:
            return self.failed(
                f"{machine.kernel} runs instead of {expected}",
                action=Suggested.FIX_CONFIG,
                what_to_do="Is the meant kernel installed, and is it the boot loader's default (`proxmox-boot-tool "
                "kernel list`, GRUB_DEFAULT)?",
                **compared,
            )
        return self.warned(
            f"{machine.kernel} runs; before it was {expected}. That is right only if the change was meant",
            action=Suggested.LOOK,
            what_to_do="If it was not: choose the old kernel in the boot loader. Out-of-tree modules must have been "
            "built for the new one.",
            **compared,
        )

    def _options(self, machine: MachineFacts, before: MachineFacts | None) -> Finding:
        subject = "kernel command line"
        missing = [o for o in self.options if o not in machine.arguments]
        if missing:
            return self.failed(
                f"{join(missing)} is not on the command line of this boot",
                subject=subject,
                expected=list(self.options),
                observed=machine.cmdline,
                action=Suggested.FIX_CONFIG,
                what_to_do="Was the file edited that this boot loader reads, and was it written out (update-grub, "
                "proxmox-boot-tool refresh)?",
            )
        if before is None:
            if self.options:
                return self.passed(f"it holds {join(self.options)}", subject=subject, observed=machine.cmdline)
            return self.not_checked("nobody said which one is meant", subject=subject, observed=machine.cmdline)
        gone, come = _differing(before.arguments, machine.arguments)
        compared: dict[str, Any] = {"subject": subject, "expected": before.cmdline, "observed": machine.cmdline}
        if not gone and not come:
            return self.passed("as before" + (f", and it holds {join(self.options)}" if self.options else ""), **compared)
        weighty = [w for w in (*gone, *come) if w.startswith(_WEIGHTY)]
        changes = "; ".join(filter(None, (f"gone: {join(gone)}" if gone else "", f"new: {join(come)}" if come else "")))
        return self.warned(
            f"changed since before ({changes})" + (f"; {join(weighty)} bears on the GPUs" if weighty else ""),
            action=Suggested.LOOK,
            what_to_do="If nobody meant this: an edit of the boot loader's configuration has waited for this reboot.",
            **compared,
        )


def _differing(before: Sequence[str], now: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that went and words that came. The kernel's image is left out: it follows the kernel, which is judged by itself."""
    ours = [[w for w in words if not w.startswith(("BOOT_IMAGE=", "initrd="))] for words in (before, now)]
    gone, come = ([w for w in x if w not in y] for x, y in (ours, ours[::-1]))
    if not gone and not come and ours[0] != ours[1]:
        return ["the order of before"], [join(ours[1])]  # of an option that is given twice, the last one wins
    return gone, come


def _without_effect(words: Sequence[str]) -> list[str]:
    """Options that the kernel ignores or overrides."""
    odd = []
    for word in words:
        option, _, value = word.partition("=")
        if option == "amd_iommu" and value in ("on", "pt"):
            odd.append(f"{word} is no option of the AMD IOMMU driver (it is on unless switched off) and is ignored")
    for option in ("iommu", "iommu.passthrough", "iommu.strict", "amd_iommu", "intel_iommu"):
        values = [w.partition("=")[2] for w in words if w.partition("=")[0] == option]
        if len(set(values)) > 1:
            odd.append(f"{option} is given {len(values)} times ({', '.join(values)}): the last one wins")
    return odd


def _described(boot: Boot) -> str:
    times = [t.isoformat(timespec="seconds") for t in (boot.first, boot.last) if t]
    return f"{short_id(boot.boot_id)}… ({' to '.join(times)})" if times else f"{short_id(boot.boot_id)}…"


def _duration(seconds: float) -> str:
    """``98.4`` is "98 s", ``4000`` is "66 min", a day and more in hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 86_400 else f"{seconds / 3600:.0f} h"

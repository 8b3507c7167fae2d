"""Is what happens on this machine written down, so that silence in its journal means something?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.journal import Journald, JournaldFacts
from proofbook.probes.kernel_log import KernelLog

__all__ = ["JournalKept"]

_SUBJECT = "systemd-journald"
#: MaxLevelStore= that keeps what drivers and services say when all is well; lower ones make their silence worthless.
_LEVELS = ("", "info", "debug", "6", "7")
_NO = ("no", "n", "false", "f", "off", "0")


@dataclass(frozen=True)
class JournalKept(Check):
    """journald runs and is reached, takes in the kernel's lines, and keeps everything over a reboot.

    WHY: a stopped journald says nothing of it. What stands on its silence (no fault, no late restart, an orderly end of the
    boot before) would then stand on nothing.
    """

    name: ClassVar[str] = "journal.JournalKept"
    title: ClassVar[str] = "Is what happens here written down?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Journald(), KernelLog())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        facts, why = tell(seen, Journald()).pair
        if facts is None:
            return [unseen(self, why, _SUBJECT)]
        if facts.load == "not-found" and facts.active != "active":
            return [
                self.not_checked(
                    "this machine has no systemd-journald; of the kernel its ring buffer alone was read, of services nothing",
                    subject=_SUBJECT,
                )
            ]
        if facts.active not in ("active", "reloading"):
            return [self._stopped(facts)]
        return [self._running(facts), self._kernel(seen, facts), self._storage(facts)]

    def _stopped(self, facts: JournaldFacts) -> Finding:
        since = f" since {facts.since:%Y-%m-%dT%H:%M:%SZ}" if facts.since else ""
        return self.unknown(
            f"it is {facts.active} ({facts.sub}){since}: what services said meanwhile is written nowhere, and that the journal "
            "shows nothing bad proves nothing",
            subject=_SUBJECT,
            expected="active",
            observed=facts.active,
            action=Suggested.RESTART_SERVICE,
            what_to_do="`systemctl start systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service`, find "
            "out who stopped it, then look again.",
        )

    def _running(self, facts: JournaldFacts) -> Finding:
        doubts = []
        if closed := sorted(name for name, active in facts.sockets.items() if active != "active"):
            doubts.append(f"{join(closed)} {'is' if len(closed) == 1 else 'are'} not active, so not everybody reaches it")
        if facts.n_restarts:
            doubts.append(f"systemd had to restart it {counted(facts.n_restarts, 'time')}: lines of those moments may be lost")
        if (level := facts.settings.get("MaxLevelStore", "").lower()) not in _LEVELS:
            doubts.append(f"MaxLevelStore={level} lets it drop every line that is less important")
        if facts.settings.get("Storage", "").lower() == "none":
            doubts.append("Storage=none lets it keep nothing at all")
        about: dict[str, Any] = {"subject": _SUBJECT, "expected": "active", "observed": facts.active}
        if doubts:
            return self.warned(
                f"it runs, but {'; '.join(doubts)}",
                action=Suggested.FIX_CONFIG,
                what_to_do="`systemctl status systemd-journald.service systemd-journald.socket`; journald.conf and its drop-ins "
                "(`systemd-analyze cat-config systemd/journald.conf`).",
                **about,
            )
        return self.passed(f"{facts.active} ({facts.sub}), reached through {counted(len(facts.sockets), 'socket')}", **about)

    def _kernel(self, seen: Seen, facts: JournaldFacts) -> Finding:
        subject = "kernel lines"
        messages, why = tell(seen, KernelLog()).pair
        about: dict[str, Any] = {
            "subject": subject,
            "action": Suggested.LOOK,
            "what_to_do": "Compare `dmesg` with `journalctl -k -b`; the ring buffer overwrites its oldest lines.",
        }
        if facts.settings.get("ReadKMsg", "").lower() in _NO:
            return self.warned("ReadKMsg=no: what the kernel says is not taken into the journal", **about)
        if messages is None:
            return self.not_checked(f"whether they reach the journal cannot be told: {why}", subject=subject)
        if messages.source != "journal":
            return self.warned(f"they are not in the journal, as far as it can be read: {'; '.join(messages.notes)}", **about)
        if messages.unheard:
            what = f"{counted(messages.unheard, 'line')} of the kernel's ring buffer never reached the journal"
            return self.warned(f"{what}: it does not keep up, or no longer listens", count=messages.unheard, **about)
        return self.passed("those of this boot are in the journal", subject=subject)

    def _storage(self, facts: JournaldFacts) -> Finding:
        subject = "storage"
        if facts.persistent is None:
            return unseen(self, facts.storage_unknown, subject)
        if not facts.persistent:
            return self.warned(
                "the journal is not kept on disk: nobody will know how this boot ended, and how often the machine booted",
                subject=subject,
                expected="/var/log/journal",
                observed=facts.settings.get("Storage") or "/run/log/journal",
                action=Suggested.FIX_CONFIG,
                what_to_do="Storage=persistent in journald.conf, then `systemctl restart systemd-journald`.",
            )
        return self.passed("kept in /var/log/journal", subject=subject)

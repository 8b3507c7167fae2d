from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.checks.journal import JournalKept
from proofbook.model import Suggested, Verdict
from proofbook.probes.journal import Journald
from proofbook.probes.kernel_log import KernelLog

PASS, WARN, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.UNKNOWN, Verdict.NOT_CHECKED
STOPPED = datetime(2026, 3, 9, 14, 0, tzinfo=UTC)


def test_a_journal_that_is_kept(world: Any) -> None:
    findings = world.judge(JournalKept())
    assert [(f.verdict, f.subject) for f in findings] == [
        (PASS, "systemd-journald"),
        (PASS, "kernel lines"),
        (PASS, "storage"),
    ]


def test_a_stopped_journald_is_no_quiet_machine(world: Any) -> None:
    world.change(Journald(), active="inactive", sub="dead", since=STOPPED)
    (finding,) = world.judge(JournalKept())
    assert finding.verdict is UNKNOWN and finding.action is Suggested.RESTART_SERVICE
    assert "it is inactive (dead) since 2026-03-09T14:00:00Z" in finding.reason
    assert "systemctl start systemd-journald.socket" in finding.what_to_do


def test_a_machine_without_one_is_not_checked(world: Any) -> None:
    world.change(Journald(), load="not-found", active="inactive", sub="dead", sockets={})
    (finding,) = world.judge(JournalKept())
    assert finding.verdict is NOT_CHECKED and "no systemd-journald" in finding.reason


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        ({"sockets": {"systemd-journald.socket": "failed"}}, "systemd-journald", "systemd-journald.socket is not active"),
        ({"n_restarts": 2}, "systemd-journald", "restart it 2 times"),
        ({"settings": {"MaxLevelStore": "warning"}}, "systemd-journald", "MaxLevelStore=warning"),
        ({"settings": {"Storage": "none"}, "persistent": False}, "systemd-journald", "Storage=none"),
        ({"settings": {"ReadKMsg": "no"}}, "kernel lines", "ReadKMsg=no"),
        ({"persistent": False}, "storage", "not kept on disk"),
    ],
)
def test_what_lets_lines_get_lost_is_said(world: Any, change: dict[str, Any], subject: str, words: str) -> None:
    findings = {f.subject: f for f in world.change(Journald(), **change).judge(JournalKept())}
    assert findings[subject].verdict is WARN and words in findings[subject].reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unheard": 3}, "3 lines of the kernel's ring buffer never reached the journal"),
        ({"source": "dmesg", "notes": ("not from the journal: the machine keeps no journal",)}, "the machine keeps no journal"),
    ],
)
def test_kernel_lines_that_do_not_arrive(world: Any, change: dict[str, Any], words: str) -> None:
    (finding,) = [f for f in world.change(KernelLog(), **change).judge(JournalKept()) if f.subject == "kernel lines"]
    assert finding.verdict is WARN and words in finding.reason


def test_where_it_cannot_look(world: Any) -> None:
    world.blind(KernelLog()).change(
        Journald(), persistent=None, storage_unknown="/var/log/journal cannot be read: Permission denied"
    )
    found = {f.subject: f for f in world.judge(JournalKept())}
    assert found["kernel lines"].verdict is NOT_CHECKED and "permission denied" in found["kernel lines"].reason
    assert found["storage"].verdict is UNKNOWN and found["storage"].action is Suggested.GRANT
    assert world.blind(Journald()).verdict(JournalKept()) is UNKNOWN

from __future__ import annotations

from typing import Any

import pytest

from proofbook.intent import ContainerSpec
from proofbook.probes.journal import Journald, UnitJournal

RUNS = "Id=systemd-journald.service\nLoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\n"
RUN = "4f6c1f9f3d0e4f5d9b0a1c2d3e4f5a6b"
UNIT = "sglang-qwen.service"
HERE = {"_SYSTEMD_INVOCATION_ID": RUN, "_TRANSPORT": "stdout", "SYSLOG_IDENTIFIER": "python", "_PID": "812"}


@pytest.fixture
def unit(machine: Any, sample: Any, entry: Any) -> Any:
    """The unit of the sample, with a journal of ``lines`` (seconds since boot, text) and changed properties."""

    def says(*lines: tuple[float, str], show: dict[str, str] | None = None, **said: Any) -> Any:
        text = sample("systemctl-show.txt")
        for key, value in (show or {}).items():
            text = "\n".join(f"{key}={value}" if line.startswith(key + "=") else line for line in text.splitlines())
        machine.on("systemctl", "show", UNIT, stdout=text)
        machine.on("systemctl", "show", "systemd-journald.service", stdout=RUNS)
        machine.on(f"_SYSTEMD_INVOCATION_ID={RUN}", **{"stdout": "".join(entry(s, t, **HERE) for s, t in lines), **said})
        return machine

    return says


START = (96.401, "Started sglang-qwen.service - SGLang: Qwen on two GPUs.")


def test_the_journal_of_an_invocation(unit: Any) -> None:
    log = unit(START, (97.0, "server_args=ServerArgs(...)")).value(UnitJournal(UNIT))
    assert log.complete and log.invocation_id == RUN
    assert [(e.monotonic_s, e.text, e.pid, e.identifier) for e in log.entries] == [
        (96.401, START[1], 812, "python"),
        (97.0, "server_args=ServerArgs(...)", 812, "python"),
    ]


def test_what_is_asked(unit: Any) -> None:
    spec = ContainerSpec(name="llm-two", kind="pct", id="102")
    machine = unit(START)
    machine.value(UnitJournal(UNIT, spec))
    show, journal, journald = machine.asked()
    assert show.argv[:6] == ("pct", "exec", "102", "--", "systemctl", "show")
    ours = (f"_SYSTEMD_INVOCATION_ID={RUN}", "+", f"INVOCATION_ID={RUN}", "+", f"OBJECT_SYSTEMD_INVOCATION_ID={RUN}")
    assert journald.argv[:7] == ("pct", "exec", "102", "--", "systemctl", "show", "systemd-journald.service")
    assert journal.argv == ("pct", "exec", "102", "--", "journalctl", "--all", "-o", "json", "--no-pager", *ours)


@pytest.mark.parametrize(
    ("lines", "show", "gap"),
    [
        (
            [START, (99.0, "Suppressed 312 messages from sglang-qwen.service")],
            {},
            "Suppressed 312 messages from sglang-qwen.service",
        ),
        ([(500.0, "late")], {}, "its first line came 404 s after the unit began to start"),
        ([], {}, "the journal has no line of this invocation"),
        ([START], {"StandardOutput": "append:/var/log/sglang.log"}, "its output goes to append:/var/log/sglang.log"),
        ([START], {"StandardError": "null"}, "its error output goes to null"),
    ],
)
def test_why_it_is_not_whole(unit: Any, lines: list[tuple[float, str]], show: dict[str, str], gap: str) -> None:
    log = unit(*lines, show=show).value(UnitJournal(UNIT))
    assert not log.complete
    assert any(g.startswith(gap) for g in log.gaps), log.gaps


def test_a_unit_that_is_not_there_or_never_ran(unit: Any, machine: Any, sample: Any) -> None:
    assert "has not been started since the boot" in unit(show={"InvocationID": ""}).unknown(UnitJournal(UNIT))
    machine.on("systemctl", "show", "ghost.service", stdout=sample("systemctl-show-not-found.txt"))
    assert "there is no unit ghost.service" in machine.unknown(UnitJournal("ghost.service"))


def test_not_permitted(unit: Any) -> None:
    said = "No journal files were opened due to insufficient permissions.\n"
    assert "insufficient permissions" in unit(START, stdout="", stderr=said, status=1).unknown(UnitJournal(UNIT))


def test_a_damaged_journal_is_not_whole(unit: Any) -> None:
    said = "Journal file /var/log/journal/1/system.journal is truncated, ignoring file.\n"
    log = unit(START, stderr=said).value(UnitJournal(UNIT))
    assert "journal files are damaged" in log.gaps[0]


# ----------------------------------------------------------------------------------------------------- journald

JOURNALD = """\
Id=systemd-journald.service
LoadState=loaded
ActiveState=active
SubState=running
NRestarts=0
InactiveEnterTimestamp=

Id=systemd-journald.socket
LoadState=loaded
ActiveState=active
SubState=running
InactiveEnterTimestamp=

Id=systemd-journald-dev-log.socket
LoadState=loaded
ActiveState=active
SubState=running
InactiveEnterTimestamp=
"""
ID = "4f6c1f9f3d0e4f5d9b0a1c2d3e4f5a6b"


@pytest.fixture
def journald(machine: Any) -> Any:
    machine.on("systemctl", "show", "systemd-journald.service", stdout=JOURNALD)
    machine.files["/etc/machine-id"] = ID
    machine.directories = [f"/var/log/journal/{ID}"]
    return machine


def test_a_journal_that_is_kept(journald: Any) -> None:
    facts = journald.value(Journald())
    assert (facts.load, facts.active, facts.sub, facts.since, facts.n_restarts) == ("loaded", "active", "running", None, 0)
    assert facts.sockets == {"systemd-journald.socket": "active", "systemd-journald-dev-log.socket": "active"}
    assert (facts.persistent, facts.settings, facts.storage_unknown) == (True, {}, "")
    assert len(journald.rounds) == 1


def test_a_stopped_journald(journald: Any) -> None:
    stopped = JOURNALD.replace("active", "inactive", 1).replace("Timestamp=\n", "Timestamp=Wed 2026-04-08 14:00:00 UTC\n", 1)
    journald.on("systemctl", "show", "systemd-journald.service", stdout=stopped.replace("State=active", "State=inactive"))
    facts = journald.value(Journald())
    assert facts.active == "inactive" and facts.since.isoformat() == "2026-04-08T14:00:00+00:00"
    assert set(facts.sockets.values()) == {"inactive"}


def test_a_machine_without_journald(journald: Any) -> None:
    nothing = "\n".join(
        f"Id={name}\nLoadState=not-found\nActiveState=inactive\n" for name in ("systemd-journald.service", "x.socket")
    )
    facts = journald.on("systemctl", "show", "systemd-journald.service", stdout=nothing).value(Journald())
    assert (facts.load, facts.sockets) == ("not-found", {})


def test_the_last_word_on_a_setting_holds(journald: Any) -> None:
    journald.files |= {
        "/usr/lib/systemd/journald.conf": "[Journal]\nStorage=none\n",
        "/etc/systemd/journald.conf": "[Journal]\n#Storage=none\nStorage=persistent\nMaxLevelStore=debug\n",
        "/usr/lib/systemd/journald.conf.d/10-site.conf": "[Journal]\nMaxLevelStore=crit\n",
        "/etc/systemd/journald.conf.d/10-site.conf": "[Journal]\nMaxLevelStore = warning\n",
        "/run/systemd/journald.conf.d/20-later.conf": "[Journal]\nReadKMsg=no\n",
    }
    facts = journald.value(Journald())
    assert facts.settings == {"Storage": "persistent", "MaxLevelStore": "warning", "ReadKMsg": "no"}
    assert facts.persistent


@pytest.mark.parametrize(
    ("change", "persistent", "why"),
    [
        (lambda m: m.files.update({"/etc/systemd/journald.conf": "[Journal]\nStorage=volatile\n"}), False, ""),
        (lambda m: m.directories.clear(), False, ""),
        (lambda m: m.files.pop("/etc/machine-id"), None, "/etc/machine-id cannot be read"),
        (
            lambda m: (m.directories.clear(), m.unreadable.update({"/var/log/journal/*": "Permission denied"})),
            None,
            "/var/log/journal cannot be read: Permission denied",
        ),
    ],
)
def test_whether_it_outlives_a_reboot(journald: Any, change: Any, persistent: bool | None, why: str) -> None:
    change(journald)
    facts = journald.value(Journald())
    assert facts.persistent is persistent
    assert facts.storage_unknown.startswith(why)


def test_an_answer_without_a_state_is_unknown(journald: Any) -> None:
    assert "neither LoadState nor" in journald.on("systemctl", "show", "systemd-journald.service").unknown(Journald())

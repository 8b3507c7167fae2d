from __future__ import annotations

from typing import Any

import pytest

from proofbook.intent import ContainerSpec
from proofbook.probes.journal import UnitJournal

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
    show, journal = machine.asked()
    assert show.argv[:6] == ("pct", "exec", "102", "--", "systemctl", "show")
    ours = (f"_SYSTEMD_INVOCATION_ID={RUN}", "+", f"INVOCATION_ID={RUN}", "+", f"OBJECT_SYSTEMD_INVOCATION_ID={RUN}")
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

from __future__ import annotations

import re
from typing import Any

import pytest

from proofbook.probes.kernel_log import KernelLog

JOURNALD_RUNS = "Id=systemd-journald.service\nLoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\n"
FIRST = "Linux version 6.17.0-9-example (build@example)"
BEFORE = "5e4d3c2b1a0f4e9d8c7b6a5f4e3d2c1b"


@pytest.fixture
def host(machine: Any, kernel_entry: Any) -> Any:
    """An hour after its boot; ``says`` sets journal, ring buffer and journald's notes."""

    def says(journal: Any = None, ring: str | None = None, notes: str = "", **journal_said: Any) -> Any:
        machine.files |= {
            "/proc/sys/kernel/random/boot_id": "7c0e2c5b-3f0e-4f0a-9c55-0a4b1d2e3f40",
            "/proc/uptime": "3600.00 1.0",
        }
        text = "".join(kernel_entry(s, t) for s, t in journal or [])
        machine.on("journalctl", "-k", "-b", "0", **{"stdout": text, **journal_said})
        machine.on("_TRANSPORT=driver", stdout=notes)
        machine.on("systemctl", "show", "systemd-journald.service", stdout=JOURNALD_RUNS)
        if ring is None:
            machine.on("dmesg", stderr="dmesg: read kernel buffer failed: Operation not permitted\n", status=1)
        else:
            machine.on("dmesg", stdout=ring)
        return machine

    return says


LINES = [(0.0, FIRST), (2.292429, "acpi ACPI0016:00: _OSC: platform does not support [AER LTR DPC]"), (8.09, "nvidia: loading")]
RING = "".join(f"[{s:12.6f}] {t}\n" for s, t in LINES)


def test_a_whole_journal(host: Any, boot: str) -> None:
    log = host(LINES, RING).value(KernelLog())
    assert log.complete and log.gaps == () and log.notes == ()
    assert (log.source, log.boot_id) == ("journal", boot)
    assert [(line.monotonic_s, line.text) for line in log.lines] == LINES
    assert log.lines[0].priority == 6
    assert log.lines[2].time is not None and log.lines[1].time is not None
    assert (log.lines[2].time - log.lines[1].time).total_seconds() == pytest.approx(8.09 - 2.292429)  # not when journald came up


def test_the_whole_journal_alone_is_enough(host: Any) -> None:
    log = host(LINES).value(KernelLog())
    assert log.complete
    assert "only be read by root" in log.notes[0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"stdout": "Id=systemd-journald.service\nLoadState=loaded\nActiveState=inactive\nInactiveEnterTimestamp="
             "Wed 2026-04-08 14:00:00 UTC\n"},
            "systemd-journald is inactive since 2026-04-08T14:00:00Z",
        ),
        ({"stdout": "Id=systemd-journald.service\nLoadState=not-found\nActiveState=inactive\n"}, "there is no systemd-journald"),
        ({"stdout": "", "stderr": "Failed to connect to bus\n", "status": 1}, "whether journald runs is not known"),
        ({"stdout": ""}, "whether journald runs is not known"),
    ],
)  # fmt: skip
def test_a_journal_that_nobody_writes_is_whole_only_with_the_ring(host: Any, state: dict[str, Any], words: str) -> None:
    machine = host(LINES).on("systemctl", "show", "systemd-journald.service", **state)
    log = machine.value(KernelLog())
    assert not log.complete and words in log.gaps[0]
    assert host(LINES, RING).on("systemctl", "show", "systemd-journald.service", **state).value(KernelLog()).complete


def test_lines_that_never_reached_the_journal_are_counted(host: Any) -> None:
    ring = RING + "[  900.000000] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\n[ 3599.000000] just now\n"
    log = host(LINES, ring).value(KernelLog())
    assert log.complete and log.unheard == 1, "what came a second ago may still be on its way"
    rotated = host(LINES[1:], RING).value(KernelLog())
    assert rotated.unheard == 0, "what was rotated away had reached it"


def test_lines_before_the_version_are_the_start_too(host: Any) -> None:
    early = [(0.0, "microcode: updated early: 0x0a10113e -> 0x0a101148"), *LINES]
    assert host(early).value(KernelLog()).complete


def test_a_journal_that_starts_late_without_a_ring(host: Any) -> None:
    log = host(LINES[1:]).value(KernelLog())
    assert not log.complete
    assert "the journal starts late" in log.gaps[0] and "_OSC" in log.gaps[0]


def test_a_journal_that_starts_late_is_replaced_by_a_whole_ring(host: Any) -> None:
    log = host(LINES[1:], RING).value(KernelLog())
    assert log.complete and log.source == "dmesg"
    assert [line.text for line in log.lines] == [t for _, t in LINES]
    assert "not from the journal: the journal starts late" in log.notes[0]


def test_both_start_late(host: Any) -> None:
    log = host(LINES[1:], RING.partition("\n")[2]).value(KernelLog())
    assert not log.complete and log.source == "journal"


@pytest.mark.parametrize("text", ["Missed 27 kernel messages", "Missed 1 kernel messages"])
def test_missed_messages_are_in_journalds_own_notes(host: Any, entry: Any, text: str) -> None:
    log = host(LINES, RING, entry(9, text, _TRANSPORT="driver")).value(KernelLog())
    assert not log.complete
    assert log.gaps == (text,)


def test_a_note_between_the_kernels_lines_counts_once(host: Any, entry: Any) -> None:
    log = host([*LINES, (9.0, "Missed 3 kernel messages")], notes=entry(9, "Missed 3 kernel messages")).value(KernelLog())
    assert log.gaps == ("Missed 3 kernel messages",)


def test_what_was_suppressed_of_a_service_is_not_the_kernels(host: Any, entry: Any) -> None:
    assert host(LINES, RING, entry(9, "Suppressed 312 messages from sglang-qwen.service")).value(KernelLog()).complete


def test_notes_that_cannot_be_read_are_a_gap(host: Any) -> None:
    machine = host(LINES, RING)
    machine.on("_TRANSPORT=driver", status=1, stderr="Failed to add match\n")
    assert "own notes on lost messages cannot be read" in machine.value(KernelLog()).gaps[0]


def test_notes_that_are_hidden_are_a_gap(host: Any) -> None:
    machine = host(LINES, RING)
    hint = "Hint: You are currently not seeing messages from other users and the system.\n"
    machine.on("_TRANSPORT=driver", stderr=hint)
    (gap,) = machine.value(KernelLog()).gaps
    assert "cannot be read whole" in gap and "not seeing messages from other users" in gap


@pytest.mark.parametrize(
    "said",
    [
        {"stdout": "", "stderr": "No journal files were found.\n"},
        {"stdout": "", "stderr": "No journal files were opened due to insufficient permissions.\n", "status": 1},
        {"stdout": "", "stderr": "sh: 1: journalctl: not found\n", "status": 127},
        {"stdout": "", "stderr": "", "status": None, "trouble": "it never started"},
        {"stdout": "-- No entries --\n"},
    ],
)
def test_without_a_journal_the_ring_buffer_speaks(host: Any, boot: str, said: dict[str, Any]) -> None:
    log = host(ring=RING, **said).value(KernelLog())
    assert log.complete and log.source == "dmesg" and log.boot_id == boot
    assert log.lines[-1].priority is None
    late = host(ring=RING.partition("\n")[2], **said).value(KernelLog())
    assert not late.complete
    assert "ring buffer starts late" in late.gaps[1]


def test_neither_may_be_read(host: Any) -> None:
    reason = host(stderr="No journal files were opened due to insufficient permissions.\n", status=1).unknown(KernelLog())
    assert "insufficient permissions" in reason and "only be read by root" in reason


def test_a_partly_hidden_journal_is_not_whole(host: Any) -> None:
    hint = (
        "Hint: You are currently not seeing messages from other users and the system.\n      Users in groups 'adm' can see all.\n"
    )
    log = host(LINES, stderr=hint).value(KernelLog())
    assert not log.complete
    assert "not all entries may be read: You are currently not seeing" in log.gaps[0]


def test_an_entirely_hidden_journal_says_that_it_is_hidden(host: Any) -> None:
    hint = "Hint: You are currently not seeing messages from other users and the system.\n"
    assert "not all entries may be read" in host(stdout="", stderr=hint).unknown(KernelLog())


def test_sudo_refused_is_asked_again_without_root(host: Any) -> None:
    machine = host(LINES, RING)
    machine.on("dmesg", stderr="sudo: a password is required\n", status=1)
    assert machine.value(KernelLog()).complete
    assert [(c.argv[0], c.root) for c in machine.rounds[1]] == [("dmesg", False)]


def test_another_boot_is_no_answer(host: Any, kernel_entry: Any) -> None:
    said = host(stdout=kernel_entry(0.0, FIRST, _BOOT_ID=BEFORE)).unknown(KernelLog())
    assert f"the journal answered with {BEFORE}" in said


def test_a_cut_answer_is_read_as_far_as_it_goes(host: Any, kernel_entry: Any) -> None:
    text = "".join(kernel_entry(s, t) for s, t in LINES)[:-40]
    log = host(stdout=text, lost=1000).value(KernelLog())
    assert [line.text for line in log.lines] == [t for _, t in LINES[:2]]
    assert not log.complete and "the newest lines are missing" in log.gaps[0]


def test_messages_in_every_shape(host: Any, kernel_entry: Any) -> None:
    odd: list[Any] = [FIRST, None, [110, 118, 255, 10], ["two", "values"], "NVRM: \u001b[31m\ud7ff", "", [300], {"a": 1}]
    log = host(stdout="".join(kernel_entry(float(n), t) for n, t in enumerate(odd))).value(KernelLog())
    assert [line.text for line in log.lines][:4] == [FIRST, "", "nv\\xff\n", "two\nvalues"]
    assert not log.complete and "1 entries came without their message" in log.gaps[0]


@pytest.mark.parametrize(
    "broken", ["{", "[]", "null", '{"MESSAGE":"x"}', '{"__REALTIME_TIMESTAMP":"9' + "9" * 30 + '"}', "\x00", '"x"']
)
def test_broken_lines_are_counted_not_guessed(host: Any, kernel_entry: Any, broken: str) -> None:
    log = host(stdout=kernel_entry(0.0, FIRST) + broken + "\n" + kernel_entry(1.0, "b")).value(KernelLog())
    assert len(log.lines) == 2
    assert log.gaps == ("1 of the journal's lines could not be read",)


# ------------------------------------------------------------------------------------------------- held against dmesg


def test_the_ring_buffer_as_a_real_machine_prints_it_agrees_with_its_journal(host: Any, kernel_entry: Any, sample: Any) -> None:
    ring = sample("dmesg-start.txt")
    journal = ""
    for seconds, text in re.findall(r"^\[\s*([\d.]+)\] (.*)$", ring, re.MULTILINE):
        if text.startswith("systemd-journald["):
            continue  # journald does not take in its own lines
        fields = {}
        if found := re.match(r"(systemd)\[(1)\]: (.*)", text):
            fields = {"SYSLOG_IDENTIFIER": found[1], "SYSLOG_PID": found[2]}
            text = found[3]
        journal += kernel_entry(float(seconds), text, **fields)
    wrapped = ring.split("\n", 2)[2]  # so that differences would count
    log = host(stdout=journal, ring=wrapped).value(KernelLog())
    assert log.complete and log.notes == ()
    assert "systemd[1]: Inserted module 'autofs4'" in [line.text for line in log.lines]


def test_newer_lines_of_the_ring_buffer_are_added(host: Any) -> None:
    log = host(LINES, RING + "[ 3599.500000] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\n").value(KernelLog())
    assert log.complete
    assert log.lines[-1].text.startswith("NVRM: Xid")
    assert log.notes == ("1 lines are from the ring buffer: the journal does not have them",)


def test_lines_that_never_reached_the_journal_are_added_in_their_place(host: Any) -> None:
    ring = RING.replace("[    8.09", "[    5.000000] NVRM: Xid (PCI:0000:41:00): 79\n[    8.09")
    log = host(LINES, ring).value(KernelLog())
    assert [line.monotonic_s for line in log.lines] == [0.0, 2.292429, 5.0, 8.09]
    assert log.complete  # the ring buffer reaches back to the first line: together they hold all
    wrapped = host(LINES, ring.partition("\n")[2]).value(KernelLog())
    assert not wrapped.complete
    assert "1 lines of the ring buffer never reached the journal" in wrapped.gaps[0]


def test_a_hole_between_journal_and_ring_buffer(host: Any) -> None:
    log = host(LINES, "[ 3000.000000] a\n[ 3001.000000] b\n").value(KernelLog())
    assert not log.complete
    assert log.gaps == ("the journal ends 8 s after the boot, the ring buffer starts 3000 s after it",)
    assert log.lines[-1].text == "b"


def test_repeated_lines_count_as_often_as_they_come(host: Any) -> None:
    log = host([*LINES, (9.0, "x")], RING + "[    9.000000] x\n[   10.000000] x\n").value(KernelLog())
    assert [line.text for line in log.lines].count("x") == 2


def test_continuation_lines_and_other_stamps(host: Any) -> None:
    ring = f"[    0.000000] {FIRST}\n[    1.000000][    T1] one\n       two\n<4>[    2.000000] three\n"
    log = host(ring=ring, stderr="No journal files were found.\n").value(KernelLog())
    assert [(line.text, line.priority) for line in log.lines] == [(FIRST, None), ("one\ntwo", None), ("three", 4)]


@pytest.mark.parametrize("ring", ["", "no stamps here\n"])
def test_a_ring_buffer_that_says_nothing_is_unknown(host: Any, ring: str) -> None:
    reason = host(ring=ring, stderr="No journal files were found.\n").unknown(KernelLog())
    assert "ring buffer is empty" in reason or "no time stamps" in reason


# ------------------------------------------------------------------------------------------------- boots that are over


def test_the_boot_before_is_the_journals_alone(machine: Any, kernel_entry: Any) -> None:
    machine.on("journalctl", "-k", "-b", "-1", stdout=kernel_entry(0.0, FIRST, _BOOT_ID=BEFORE))
    machine.on("_TRANSPORT=driver")
    log = machine.value(KernelLog("-1"))
    assert log.complete and log.boot_id == BEFORE
    assert [c.argv[0] for c in machine.asked()] == ["journalctl", "journalctl"]


def test_a_boot_by_its_id(machine: Any, kernel_entry: Any, boot: str) -> None:
    machine.on("_TRANSPORT=driver").on("journalctl", "-k", "-b", BEFORE, stdout=kernel_entry(0.0, FIRST, _BOOT_ID=BEFORE))
    assert machine.value(KernelLog("5E4d3c2b-1a0f-4e9d-8c7b-6a5f4e3d2c1b")).boot_id == BEFORE
    machine.on("journalctl", "-k", "-b", BEFORE, stdout=kernel_entry(0.0, FIRST, _BOOT_ID=boot))
    assert f"asked for boot {BEFORE}" in machine.unknown(KernelLog(BEFORE))
    both = kernel_entry(0.0, FIRST, _BOOT_ID=boot) + kernel_entry(0.0, FIRST, _BOOT_ID=BEFORE)
    machine.on("journalctl", "-k", "-b", BEFORE, stdout=both)
    assert "lines of 2 boots" in machine.unknown(KernelLog(BEFORE))
    machine.on("journalctl", "-k", "-b", BEFORE, stdout="")
    assert "holds no kernel line of boot" in machine.unknown(KernelLog(BEFORE))
    assert "not a boot id" in machine.unknown(KernelLog("yesterday"))

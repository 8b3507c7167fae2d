from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.probes.boot import Boots, Machine, Shutdown, boot_id

DMI = "/sys/class/dmi/id"


@pytest.fixture
def healthy(machine: Any) -> Any:
    machine.files |= {
        "/proc/sys/kernel/hostname": "gpu01",
        "/proc/sys/kernel/osrelease": "6.17.0-9-example",
        "/proc/sys/kernel/random/boot_id": "7c0e2c5b-3f0e-4f0a-9c55-0a4b1d2e3f40",
        "/etc/machine-id": "11112222333344445555666677778888",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro iommu=pt iommu=nopt",
        "/proc/uptime": "3600.25 180000.00",
        f"{DMI}/sys_vendor": "ASRockRack",
        f"{DMI}/board_name": "GENOA2D24G-2L+",
        f"{DMI}/product_name": "4U8G",
        f"{DMI}/bios_version": "2.09",
    }
    return machine


def test_the_machine(healthy: Any) -> None:
    facts = healthy.value(Machine())
    assert facts.boot_id == "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"
    assert (facts.hostname, facts.kernel, facts.board, facts.bios) == ("gpu01", "6.17.0-9-example", "GENOA2D24G-2L+", "2.09")
    assert facts.arguments == ("BOOT_IMAGE=/vmlinuz", "ro", "iommu=pt", "iommu=nopt")
    assert facts.booted_at == datetime(2026, 4, 8, 15, 10, 15, tzinfo=UTC) - timedelta(seconds=3600.25)
    assert facts.virtualization == ""
    assert len(healthy.asked()) == 1 and not healthy.asked()[0].root


@pytest.mark.parametrize(
    ("vendor", "container", "expected"), [("QEMU", "", "qemu"), ("QEMU", "lxc", "lxc"), ("Dell Inc.", "", "")]
)
def test_what_it_runs_in(healthy: Any, vendor: str, container: str, expected: str) -> None:
    healthy.files[f"{DMI}/sys_vendor"] = vendor
    if container:
        healthy.files["/run/systemd/container"] = container
    assert healthy.value(Machine()).virtualization == expected


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("/proc/sys/kernel/random/boot_id", "7c0e2c5b-3f0e", "not a boot id: '7c0e2c5b-3f0e'"),
        ("/proc/sys/kernel/random/boot_id", "00000000-0000-0000-0000-000000000000", "not a boot id"),
        ("/proc/sys/kernel/random/boot_id", "7c0e2c5b-3f0e-4f0a-9c55-0a4b1d2e3f40x", "not a boot id"),
        ("/etc/machine-id", "uninitialized", "holds no machine id: 'uninitialized'"),
        ("/etc/machine-id", "", "holds no machine id"),
        ("/proc/uptime", "-", "holds no number"),
        ("/proc/uptime", "", "holds no number"),
    ],
)
def test_what_is_no_identity_is_unknown(healthy: Any, path: str, text: str, reason: str) -> None:
    healthy.files[path] = text
    assert reason in healthy.unknown(Machine())


def test_a_missing_or_hidden_boot_id_is_unknown(healthy: Any) -> None:
    del healthy.files["/proc/sys/kernel/random/boot_id"]
    assert "does not exist" in healthy.unknown(Machine())
    healthy.unreadable["/proc/sys/kernel/random/boot_id"] = "Permission denied"
    assert "Permission denied" in healthy.unknown(Machine())


def test_boot_ids_are_compared_without_dashes() -> None:
    assert boot_id(" 7C0E2C5B-3f0e-4f0a-9c55-0a4b1d2e3f40\n") == "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"
    with pytest.raises(CannotTell):
        boot_id("latest")


def test_boots_up_to_systemd_253(machine: Any, sample: Any) -> None:
    boots = machine.on("journalctl", "--list-boots", stdout=sample("list-boots-252.txt")).value(Boots())
    assert [b.index for b in boots] == [-2, -1, 0]
    assert boots[1].boot_id == "5e4d3c2b1a0f4e9d8c7b6a5f4e3d2c1b"
    assert boots[1].last == datetime(2026, 4, 8, 14, 7, 12, tzinfo=UTC)
    assert boots[2].first == datetime(2026, 4, 8, 14, 10, 15, tzinfo=UTC)


def test_boots_of_newer_systemd_in_a_local_zone(machine: Any, sample: Any) -> None:
    boots = machine.on("journalctl", "--list-boots", stdout=sample("list-boots-257.txt")).value(Boots())
    assert [(b.index, b.boot_id) for b in boots] == [
        (-1, "5e4d3c2b1a0f4e9d8c7b6a5f4e3d2c1b"),
        (0, "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"),
    ]
    assert boots[0].first is None  # CEST does not say its offset


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"stderr": "No journal files were found.\n"}, "No journal files were found"),
        ({"stderr": "No journal files were opened due to insufficient permissions.\n", "status": 1}, "insufficient permissions"),
        ({"stdout": ""}, "the journal knows no boot"),
        ({"stdout": "IDX BOOT ID FIRST ENTRY LAST ENTRY\n"}, "the journal knows no boot"),
        ({"stdout": "Segmentation fault\n"}, "a line that is no boot: 'Segmentation fault'"),
    ],
)
def test_boots_that_cannot_be_listed(machine: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in machine.on("journalctl", "--list-boots", **said).unknown(Boots())


# ------------------------------------------------------------------------------------------------- how a boot ended

BEFORE = "5e4d3c2b1a0f4e9d8c7b6a5f4e3d2c1b"


@pytest.fixture
def ended(machine: Any, entry: Any) -> Any:
    """Ask how the boot before ended, given its last entries as (identifier, pid, text[, message id])."""

    def ask(*lines: tuple[str, ...]) -> Any:
        text = ""
        for n, (identifier, pid, message, *more) in enumerate(lines):
            fields = {"SYSLOG_IDENTIFIER": identifier, "_PID": pid, "_TRANSPORT": "journal"}
            text += entry(900.0 + n, message, boot_id=BEFORE, **fields, **({"MESSAGE_ID": more[0]} if more else {}))
        machine.on("journalctl", "-b", BEFORE, "-n", "400", stdout=text)
        return machine.value(Shutdown(BEFORE))

    return ask


USUAL = ("sglang", "812", "Decode batch. #running-req: 4")


@pytest.mark.parametrize(
    "end",
    [
        ("systemd", "1", "Reached target reboot.target - System Reboot."),
        ("systemd", "1", "Reached target Reboot."),
        ("systemd", "1", "Reached target Power-Off."),
        ("systemd", "1", "Reached target poweroff.target - System Power Off."),
        ("systemd", "1", "Reached target shutdown.target - System Shutdown."),
        ("systemd", "1", "Finished systemd-reboot.service - System Reboot."),
        ("systemd", "1", "Shutting down."),
        ("systemd-shutdown", "1", "Sending SIGTERM to remaining processes..."),
        ("systemd-journald", "310", "Received SIGTERM from PID 1 (systemd-shutdow)."),
    ],
)
def test_an_orderly_end(ended: Any, end: tuple[str, ...]) -> None:
    facts = ended(USUAL, end)
    assert facts.orderly
    assert facts.why == f"{end[0]}: {end[2]}"
    assert facts.last_lines[-1].endswith(f"Z {end[0]}: {end[2]}")


def test_the_journals_own_end_comes_last(ended: Any) -> None:
    end = ("systemd-journald", "310", "Journal gestoppt", "d93fb3c9c24d451a97cea615ce59c00b")
    assert ended(("systemd", "1", "Shutting down."), end).why == "systemd-journald: Journal gestoppt"


def test_a_journal_that_was_stopped_alone_does_not_know_the_end(machine: Any, entry: Any) -> None:
    """Somebody stops journald, and the machine is cut off days later."""
    stopped = {"SYSLOG_IDENTIFIER": "systemd-journald", "_PID": "310"}
    last = entry(900, "Received SIGTERM from PID 1 (systemd).", boot_id=BEFORE, **stopped)
    last += entry(901, "Journal stopped", boot_id=BEFORE, **stopped)
    machine.on("journalctl", "-b", BEFORE, "-n", "400", stdout=entry(800, "x", boot_id=BEFORE) + last)
    assert "was stopped at" in machine.unknown(Shutdown(BEFORE))


@pytest.mark.parametrize(
    "last",
    [
        USUAL,
        ("systemd", "1", "Finished systemd-update-utmp.service - Record System Boot/Shutdown in UTMP."),
        ("systemd", "4711", "Reached target shutdown.target - Shutdown."),  # a user's own manager at a logout
        ("systemd", "1", "Starting systemd-reboot.service - System Reboot..."),
        ("systemd", "1", "Reached target multi-user.target - Multi-User System."),
        ("systemd", "1", "Started reboot-notifier.service - Notify on reboot."),
        ("kernel", "", "Reached target reboot.target - System Reboot."),
        ("sshd", "990", "Journal stopped"),
    ],
)
def test_a_cut_off_end(ended: Any, last: tuple[str, ...]) -> None:
    facts = ended(USUAL, last)
    assert not facts.orderly
    assert "nothing of a shutdown in its last 2 entries" in facts.why


def test_a_journald_that_was_restarted_is_no_end(ended: Any) -> None:
    assert not ended(
        ("systemd-journald", "310", "Journal stopped"), ("systemd-journald", "991", "Journal started"), USUAL
    ).orderly


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"stderr": f"No journal boot entry found from the specified boot ID {BEFORE}.\n", "status": 1}, "does not keep boot"),
        (
            {"stderr": "Specifying boot ID or boot offset has no effect, no persistent journal was found.\n", "status": 1},
            "does not keep",
        ),
        ({"stdout": "", "stderr": "No journal files were found.\n"}, "no journal files"),
        ({"stdout": "-- No entries --\n"}, "holds nothing of boot"),
        ({"stdout": '{"MESSAGE": "x"}\n'}, "holds nothing of boot"),
    ],
)
def test_an_end_that_nobody_kept_is_unknown(machine: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in machine.on("journalctl", "-b", BEFORE, **said).unknown(Shutdown(BEFORE))


def test_the_answer_must_be_of_the_boot_that_was_asked(machine: Any, entry: Any, boot: str) -> None:
    machine.on("journalctl", "-b", BEFORE, stdout=entry(5, "x", boot_id=boot))
    assert f"asked for boot {BEFORE}, journalctl answered with {boot}" in machine.unknown(Shutdown(BEFORE))


def test_a_half_readable_end_is_unknown(machine: Any, entry: Any) -> None:
    line = entry(5, "x", boot_id=BEFORE)
    machine.on("journalctl", "-b", BEFORE, stdout=line + "{broken\n")
    assert "1 of the journal's lines could not be read" in machine.unknown(Shutdown(BEFORE))


def test_no_boot_id_is_asked_for(machine: Any) -> None:
    assert "not a boot id" in machine.unknown(Shutdown("-1"))
    assert machine.rounds == []

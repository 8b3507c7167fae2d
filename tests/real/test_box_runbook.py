"""Reboot verification over a box: a real systemd goes down and comes back, well or not. What a box cannot show stays unknown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proofbook.lab.real.box import Box
from proofbook.lab.real.places import Places

from .conftest import Machine, machine_in
from .runs import reboot_verification

pytestmark = pytest.mark.box

UNIT = "sglang-qwen.service"

#: What a container on somebody else's kernel cannot show, and a machine without GPUs does not have.
NOT_TO_BE_SEEN = (
    "nvidia.GpusPresent",
    "kernel_log.KernelLogClean",
    "iommu.DmaFaults",
    "iommu.IommuTypes",
    "pci.PcieErrors",
    "pci.LinkWidth",
    "pci.LinkSpeed",
)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The machine that `lab:box` names in this test, in a lab of its own with the user's own cache."""
    cache = Places.default().cache
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "cache").symlink_to(cache)
    monkeypatch.setenv("PROOFBOOK_LAB_DIR", str(lab))
    with machine_in(Places.default().state, "box") as machine:
        yield machine


def test_a_healthy_box(box: Machine, tmp_path: Path) -> None:
    told = reboot_verification("lab:box", tmp_path / "out", reboot=True)
    assert told.summary == ("completed", "UNKNOWN", 4)
    assert told.worst_of("FAIL") == []
    assert told.worst_of("WARN") == []
    assert [line for line in told.worst_of("UNKNOWN") if not line.startswith(NOT_TO_BE_SEEN)] == []
    assert set(told.verdicts("boot.Rebooted").values()) == {"PASS"}
    for check in ("boot.SameMachine", "boot.OrderlyShutdown", "systemd.ServiceStartedByBoot", "service.ServiceAnswers"):
        assert set(told.verdicts(check).values()) == {"PASS"}, check
    # No claim about a kernel that is not its own.
    for check in NOT_TO_BE_SEEN:
        assert "PASS" not in told.verdicts(check).values(), check


def test_a_service_that_nobody_enabled(box: Machine, tmp_path: Path) -> None:
    box.sh(f"systemctl disable {UNIT}")
    told = reboot_verification("lab:box", tmp_path / "out", reboot=True)
    assert told.summary == ("completed", "FAIL", 1)
    assert told.verdicts("systemd.ServiceEnabled") == {UNIT: "FAIL"}
    assert told.verdicts("systemd.ServiceStable") == {UNIT: "FAIL"}


def test_a_service_that_crashes_at_every_start(box: Machine, tmp_path: Path) -> None:
    box.write(f"/etc/systemd/system/{UNIT}.d/broken.conf", '[Service]\nExecStartPre=/bin/sh -c "exit 3"\n')
    box.sh("systemctl daemon-reload")
    told = reboot_verification("lab:box", tmp_path / "out", reboot=True)
    assert told.summary == ("completed", "FAIL", 1)
    assert told.verdicts("systemd.ServiceStable") == {UNIT: "FAIL"}
    assert "FAIL" in told.verdicts("systemd.NoFailedUnits").values()


NEW_KEY = """\
[Unit]
Before=ssh.service

[Service]
Type=oneshot
ExecStart=/bin/sh -c "rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key"

[Install]
WantedBy=multi-user.target
"""


def test_another_host_key_after_the_boot(box: Machine, tmp_path: Path) -> None:
    box.write("/etc/systemd/system/new-key.service", NEW_KEY)
    box.sh("systemctl enable -q new-key.service")
    told = reboot_verification("lab:box", tmp_path / "out", reboot=True)
    assert (told.outcome.status, told.outcome.exit_code) == ("aborted", 7)
    assert "another machine" in told.outcome.message + str(told.record["trouble"])
    assert not told.record["findings"]


SLOW = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/sh -c "journalctl --sync; touch /var/tmp/stopping; sleep 10"

[Install]
WantedBy=multi-user.target
"""


def test_the_power_fails_in_the_middle_of_the_shutdown(box: Machine, tmp_path: Path) -> None:
    box.write("/etc/systemd/system/slow.service", SLOW)
    box.sh("systemctl enable -q --now slow.service")
    done = threading.Event()
    cut = threading.Thread(target=cut_power_when_it_stops, args=(box.box, done))
    cut.start()
    try:
        told = reboot_verification("lab:box", tmp_path / "out", reboot=True)
    finally:
        done.set()
        cut.join()
    assert told.outcome.status == "completed"
    assert list(told.verdicts("boot.OrderlyShutdown").values()) == ["WARN"]
    assert set(told.verdicts("boot.SameMachine").values()) == {"PASS"}


def cut_power_when_it_stops(box: Box, done: threading.Event) -> None:
    about = box.alive()
    assert about is not None
    marker = Path(f"/proc/{about['box']}/root{box.home}/root/var/tmp/stopping")
    while not done.is_set() and not os.path.exists(marker):
        time.sleep(0.01)
    if not done.is_set():
        box.power_off()
        box.power_on()


def test_journald_stopped_while_we_look(box: Machine, tmp_path: Path) -> None:
    box.sh("systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service")
    told = reboot_verification("lab:box", tmp_path / "out", reboot=False)
    assert told.outcome.status == "completed"
    assert told.outcome.verdict in ("UNKNOWN", "FAIL")
    assert told.verdicts("journal.JournalKept") == {"systemd-journald": "UNKNOWN"}
    assert set(told.verdicts("service.ServiceAnswers").values()) == {"PASS"}

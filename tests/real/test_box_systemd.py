"""The probes on a real systemd and journald."""

from __future__ import annotations

import pytest

from proofbook.probes.access import Access
from proofbook.probes.boot import Boots
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.journal import UnitJournal
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.service import Endpoint
from proofbook.probes.systemd import FailedUnits, RunningServices, SystemState, UnitProcess, UnitState

from .conftest import Machine, until

pytestmark = pytest.mark.box

UNIT = "sglang-qwen.service"


def test_a_service_that_runs(shared: Machine) -> None:
    until(lambda: shared.ask(Endpoint("http://127.0.0.1:30000/health")).value.http_status == 200, "it serves")
    unit = shared.value(UnitState(UNIT))
    assert (unit.load, unit.active, unit.sub, unit.result) == ("loaded", "active", "running", "success")
    assert (unit.enabled, unit.n_restarts, unit.need_daemon_reload) == ("enabled", 0, False)
    assert unit.fragment_path == f"/etc/systemd/system/{UNIT}"
    assert unit.environment["NCCL_P2P_DISABLE"] == "1"
    process = shared.value(UnitProcess(UNIT))
    assert process.pid == unit.main_pid
    assert process.argv[:3] == ("/usr/bin/python3", "-m", "sglang.launch_server")
    assert "NEXTN" in process.argv
    assert process.environ is not None
    assert process.environ["NCCL_P2P_DISABLE"] == "1"
    assert process.started_s is not None
    assert process.started_s == pytest.approx(unit.main_started_s, abs=1.0)
    assert UNIT in [row.unit for row in shared.value(RunningServices())]


def test_its_journal_is_that_of_this_start_alone(fresh: Machine) -> None:
    first = fresh.value(UnitJournal(UNIT))
    fresh.sh(f"systemctl restart {UNIT}")
    until(lambda: "fired up" in fresh.sh(f"journalctl -u {UNIT} -o cat | tail -n 3"), "it is ready again")
    second = fresh.value(UnitJournal(UNIT))
    assert first.invocation_id != second.invocation_id
    assert {e.invocation_id for e in second.entries} == {second.invocation_id}
    texts = [e.text for e in second.entries]
    assert any("stand-in for SGLang" in text for text in texts)
    assert sum("fired up and ready to roll" in text for text in texts) == 1
    assert second.complete, second.gaps


def test_disabled(fresh: Machine) -> None:
    fresh.sh(f"systemctl disable --now {UNIT}")
    unit = fresh.value(UnitState(UNIT))
    assert (unit.enabled, unit.active, unit.sub, unit.main_pid) == ("disabled", "inactive", "dead", 0)
    answer = fresh.ask(Endpoint("http://127.0.0.1:30000/health"))
    assert answer.known
    assert answer.value.http_status is None
    assert answer.value.error


def test_a_crash_loop(fresh: Machine) -> None:
    fresh.sh(
        f"mkdir -p /etc/systemd/system/{UNIT}.d; printf '[Service]\\nExecStart=\\n"
        'ExecStart=/bin/sh -c "echo CUDA error; exit 3"\\nRestartSec=200ms\\n\' '
        f"> /etc/systemd/system/{UNIT}.d/broken.conf; systemctl daemon-reload; systemctl restart {UNIT} || true"
    )
    unit = until(lambda: (u := fresh.value(UnitState(UNIT))).active == "failed" and u, "systemd gives up")
    assert (unit.sub, unit.result) == ("failed", "exit-code")
    assert unit.n_restarts is not None
    assert unit.n_restarts >= 4
    assert (unit.exit_code, unit.exit_status) == ("exited", 3)
    assert unit.drop_ins == (f"/etc/systemd/system/{UNIT}.d/broken.conf",)
    assert [row.unit for row in fresh.value(FailedUnits())] == [UNIT]
    assert fresh.value(SystemState()) == "degraded"


def test_changed_on_disk_and_not_read_again(fresh: Machine) -> None:
    fresh.sh(f"sed -i s/--tp-size.4/--tp-size\\ 2/ /etc/systemd/system/{UNIT}")
    unit = fresh.value(UnitState(UNIT))
    assert unit.need_daemon_reload
    assert "4" in fresh.value(UnitProcess(UNIT)).argv


def test_a_unit_that_does_not_exist(shared: Machine) -> None:
    answer = shared.ask(UnitState("no-such.service"))
    assert answer.known
    assert (answer.value.load, answer.value.active) == ("not-found", "inactive")


def test_started_by_hand_beside_the_unit(fresh: Machine) -> None:
    fresh.sh(
        f"systemctl stop {UNIT}; cd /opt/sglang-stand-in; nohup setsid "
        "python3 -m sglang.launch_server --model-path /models/Q --tp-size 4 --port 30000 >/dev/null 2>&1 </dev/null &"
    )
    until(lambda: fresh.ask(Endpoint("http://127.0.0.1:30000/health")).value.http_status == 200, "it serves")
    unit = fresh.value(UnitState(UNIT))
    assert (unit.active, unit.main_pid) == ("inactive", 0)


def test_journald_stopped(fresh: Machine) -> None:
    fresh.sh(f"systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald; systemctl restart {UNIT}")
    answer = fresh.ask(UnitJournal(UNIT))
    # The new start's lines are lost: that must never look like a quiet, complete journal.
    assert not answer.known or not answer.value.complete, answer.value
    assert fresh.value(UnitState("systemd-journald.service")).active == "inactive"
    assert fresh.value(Boots())


def test_what_a_box_cannot_show_is_unknown_or_absent(shared: Machine) -> None:
    log = shared.ask(KernelLog())
    assert not log.known or not log.value.complete
    for probe in (Driver(), Gpus()):
        answer = shared.ask(probe)
        assert not answer.known or not answer.value.module_version if probe == Driver() else not answer.known
    assert shared.ask(IommuGroups()).known


def test_who_may_do_what(shared: Machine) -> None:
    root, ops = shared.value(Access()), shared.value(Access(), user="ops")
    assert (root.uid, root.sudo) == (0, True)
    assert (ops.user, ops.sudo) == ("ops", True)
    assert ops.uid >= 1000
    for user in ("careful", "plain"):
        access = shared.value(Access(), user=user)
        assert not access.sudo
        assert "sudo" in access.sudo_unknown or "password" in access.sudo_unknown
    assert root.tools["python3"] == "/usr/bin/python3"
    assert root.tools["nvidia-smi"] is None


def test_a_login_without_root_says_what_it_cannot_see(shared: Machine) -> None:
    assert shared.value(UnitState(UNIT), user="plain").active == "active"
    journal = shared.ask(UnitJournal(UNIT), user="plain")
    assert not journal.known or not journal.value.complete
    assert not shared.ask(Boots(), user="plain").known
    process = shared.value(UnitProcess(UNIT), user="plain")
    assert process.environ is None
    assert process.environ_unknown
    assert shared.value(UnitProcess(UNIT), user="ops").environ


@pytest.mark.parametrize("user", ["root", "ops", "dash", "csh"])
def test_any_login_shell_and_user_gives_the_same_facts(shared: Machine, user: str) -> None:
    unit, machine = shared.value(UnitState(UNIT), user=user), shared.value(MachineProbe(), user=user)
    assert (unit.active, unit.enabled) == ("active", "enabled")
    assert machine.hostname == "shared"
    assert shared.value(Boots(), user=user)[-1].boot_id == machine.boot_id

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.probes.systemd import (
    FailedUnits,
    RunningServices,
    ServiceRow,
    Services,
    SystemState,
    UnitProcess,
    UnitRow,
    UnitState,
    _environ,
)

UNIT = "sglang-qwen.service"
CONTAINER = ContainerSpec(name="llm-two", kind="pct", id="102")


@pytest.fixture
def shown(machine: Any, sample: Any) -> Any:
    return machine.on("systemctl", "show", UNIT, stdout=sample("systemctl-show.txt"))


def test_a_unit(shown: Any) -> None:
    unit = shown.value(UnitState(UNIT))
    assert (unit.load, unit.active, unit.sub, unit.result, unit.type, unit.enabled) == (
        "loaded", "active", "running", "success", "simple", "enabled",
    )  # fmt: skip
    assert (unit.main_pid, unit.n_restarts, unit.invocation_id) == (812, 3, "4f6c1f9f3d0e4f5d9b0a1c2d3e4f5a6b")
    assert (unit.main_started_s, unit.inactive_exit_s, unit.active_enter_s) == (96.412345, 96.401, 96.4124)
    assert unit.active_enter == datetime(2026, 4, 8, 14, 11, 51, tzinfo=UTC)
    assert unit.exit_code == "" and unit.exit_status is None
    assert unit.exists and not unit.need_daemon_reload


def test_its_command_is_text_and_words(shown: Any) -> None:
    (command,) = shown.value(UnitState(UNIT)).exec_start
    assert command.path == "/opt/sglang/bin/python"
    assert command.text.endswith("--speculative-algorithm NEXTN --chat-template {% a ; b %}")
    assert command.tokens[:3] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")


def test_its_environment_and_drop_ins_are_unquoted(shown: Any) -> None:
    unit = shown.value(UnitState(UNIT))
    assert unit.environment == {
        "NCCL_P2P_DISABLE": "1",
        "GREETING": 'good "morning" \\o/',
        "TABBED": "a\tb",
        "EMPTY": "",
        "OPTS": "--a=1",
    }
    base = "/etc/systemd/system/sglang-qwen.service.d"
    assert unit.drop_ins == (f"{base}/10-mtp.conf", f"{base}/20 odd.conf")


def test_a_unit_that_is_not_there(machine: Any, sample: Any) -> None:
    unit = machine.on("systemctl", "show", stdout=sample("systemctl-show-not-found.txt")).value(UnitState("ghost.service"))
    assert not unit.exists
    assert (unit.main_pid, unit.exec_start, unit.active_enter, unit.active_enter_s, unit.enabled) == (0, (), None, None, "")


@pytest.mark.parametrize(
    ("code", "status", "expected"), [("1", "1", ("exited", 1)), ("2", "9", ("killed", 9)), ("3", "6", ("dumped", 6))]
)
def test_how_the_last_process_ended(machine: Any, code: str, status: str, expected: tuple[str, int]) -> None:
    text = f"LoadState=loaded\nActiveState=failed\nExecMainCode={code}\nExecMainStatus={status}\n"
    unit = machine.on("systemctl", "show", stdout=text).value(UnitState(UNIT))
    assert (unit.exit_code, unit.exit_status) == expected


def test_several_commands_and_a_newline_in_a_value(machine: Any) -> None:
    text = (
        "LoadState=loaded\nActiveState=inactive\n"
        "ExecStart={ path=/bin/sh ; argv[]=/bin/sh -c echo a\necho b ; ignore_errors=no ; start_time=[n/a] ; pid=0 }\n"
        "ExecStart={ path=/bin/true ; argv[]=/bin/true ; ignore_errors=yes ; start_time=[n/a] ; pid=0 }\n"
    )
    unit = machine.on("systemctl", "show", stdout=text).value(UnitState(UNIT))
    assert [c.text for c in unit.exec_start] == ["/bin/sh -c echo a\necho b", "/bin/true"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"stderr": "Failed to connect to bus: Host is down\n", "status": 1}, "Failed to connect to bus"),
        ({"stdout": ""}, "neither LoadState nor ActiveState"),
        ({"stdout": "LoadState=loaded\nActiveState=active\nExecStart={ odd }\n"}, "an ExecStart that cannot be read"),
        ({"stderr": "CT 102 not running\n", "status": 255}, "CT 102 not running"),
    ],
)
def test_a_unit_that_cannot_be_shown(machine: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in machine.on("systemctl", "show", **said).unknown(UnitState(UNIT, CONTAINER))


def test_lists_of_units(machine: Any) -> None:
    machine.on(
        "--failed",
        stdout="\u25cf sglang-qwen.service loaded failed failed SGLang: Qwen on two GPUs\nghost.mount not-found failed failed\n",
    )
    machine.on("--state=running", stdout="ssh.service loaded active running OpenBSD Secure Shell server\n")
    assert machine.value(FailedUnits()) == (
        UnitRow("sglang-qwen.service", "loaded", "failed", "failed", "SGLang: Qwen on two GPUs"),
        UnitRow("ghost.mount", "not-found", "failed", "failed", ""),
    )
    assert machine.value(RunningServices(CONTAINER))[0].description == "OpenBSD Secure Shell server"
    assert machine.asked()[-1].argv[:4] == CONTAINER.enter()


def test_no_failed_unit_is_an_answer_and_noise_is_not(machine: Any) -> None:
    assert machine.on("--failed", stdout="\n").value(FailedUnits()) == ()
    assert "a line that is no unit" in machine.on("--failed", stdout="what is this\n").unknown(FailedUnits())


@pytest.mark.parametrize(("word", "status"), [("running", 0), ("degraded", 1), ("starting", 1), ("offline", 1)])
def test_the_state_of_the_system(machine: Any, word: str, status: int) -> None:
    assert machine.on("is-system-running", stdout=word + "\n", status=status).value(SystemState()) == word


@pytest.mark.parametrize("said", [{"stderr": "System has not been booted with systemd\n", "status": 1}, {"status": 127}])
def test_a_system_without_systemd(machine: Any, said: dict[str, Any]) -> None:
    machine.on("is-system-running", **said)
    assert machine.unknown(SystemState())


# ------------------------------------------------------------------------------------------------------ its process

ARGV = b"/opt/sglang/bin/python\0-m\0sglang.launch_server\0--chat-template\0{% a b %}\0\0"
ENVIRON = b"PATH=/usr/bin\0HF_TOKEN=hf_example\0EMPTY=\0TWO=a=b\0"


def test_a_process(shown: Any) -> None:
    shown.on("/proc/812/cmdline", stdout=ARGV).on("/proc/812/environ", stdout=ENVIRON)
    process = shown.value(UnitProcess(UNIT, CONTAINER))
    assert process.pid == 812 and process.started_s == 96.412345
    assert process.argv == ("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--chat-template", "{% a b %}", "")
    assert process.variable("TWO") == "a=b" and process.variable("EMPTY") == "" and process.variable("NOPE") is None
    assert [len(batch) for batch in shown.rounds] == [1, 2]
    assert shown.rounds[1][0].argv == ("pct", "exec", "102", "--", "cat", "/proc/812/cmdline")


def test_an_environment_that_may_not_be_read(shown: Any) -> None:
    denied = {"stderr": "cat: /proc/812/environ: Permission denied\n", "status": 1}
    shown.on("/proc/812/cmdline", stdout=ARGV).on("/proc/812/environ", **denied)
    process = shown.value(UnitProcess(UNIT))
    assert process.argv and process.environ is None
    with pytest.raises(CannotTell, match=r"environment of process 812 cannot be read: .*Permission denied"):
        process.variable("PATH")


def test_no_process_is_no_command_line(shown: Any, machine: Any, sample: Any) -> None:
    shown.on("/proc/812/environ", stdout=b"").on("/proc/812/cmdline", stdout=b"")
    assert "no command line any more" in shown.unknown(UnitProcess(UNIT))
    shown.on("/proc/812/cmdline", stderr="cat: /proc/812/cmdline: No such file or directory\n", status=1)
    assert "No such file" in shown.unknown(UnitProcess(UNIT))
    machine.on("systemctl", "show", stdout=sample("systemctl-show-not-found.txt"))
    assert "has no main process: it is not-found, inactive (dead)" in machine.unknown(UnitProcess("ghost.service"))


def test_an_environment_that_the_process_wrote_over_is_not_taken_for_one() -> None:
    assert _environ("A=1\0B=x=y\0") == {"A": "1", "B": "x=y"}
    assert _environ("") == {}
    with pytest.raises(CannotTell, match="overwritten"):
        _environ("hd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups\0")


# ----------------------------------------------------------------------------------------------- which services last


def test_what_is_meant_to_go_on_running(machine: Any, sample: Any) -> None:
    services = machine.on("systemctl", "show", "*.service", stdout=sample("systemctl-show-services.txt")).value(Services())
    running = {s.unit for s in services.values() if s.lasting and s.active == "active"}
    wanted = {"ssh.service", "sglang-qwen.service", "dbus.service", "systemd-logind.service", "systemd-journald.service"}
    assert running == wanted, "a socket or a name on the bus does not make on-demand what the boot wants too"
    assert services["broken.service"] == ServiceRow("broken.service", "failed", "failed", True)
    for passing in (
        "tick.service",
        "nightly.service",
        "systemd-hostnamed.service",
        "user@0.service",
        "systemd-update-utmp.service",
    ):
        assert not services[passing].lasting, passing


def test_no_services_at_all_is_no_answer(machine: Any) -> None:
    assert "named no service" in machine.on("systemctl", "show", "*.service", stdout="\n").unknown(Services())
    assert "Host is down" in machine.on("systemctl", "show", stderr="Host is down\n", status=1).unknown(Services(CONTAINER))

"""A unit's files, its settings, and what systemd would say of other bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Result
from proofbook.probes.unit_files import CandidateVerified, UnitFiles, UnitFileSet, UnitSettings, seconds
from proofbook.remote.looking import parse_packages, verify_unit

UNIT = "sglang-qwen.service"
MAIN = f"/etc/systemd/system/{UNIT}"
DROP = f"{MAIN}.d/10-mtp.conf"
OURS = f"{MAIN}.d/90-proofbook-mtp.conf"
TEXT = "# Ansible managed\n[Service]\nEnvironmentFile=-/etc/default/qwen\nExecStart=/v/bin/python -m sglang.launch_server\n"
SETTINGS = """\
ControlGroup=/system.slice/sglang-qwen.service
EnvironmentFiles=/etc/default/qwen (ignore_errors=yes)
User=
Restart=on-failure
RestartUSec=10s
TimeoutStartUSec=infinity
TimeoutStopUSec=1min 30s
KillMode=process
KillSignal=15
SendSIGKILL=yes
StartLimitIntervalUSec=10s
StartLimitBurst=5
"""


@pytest.fixture
def unit(machine: Any) -> Any:
    machine.on(
        "systemctl", "show", UNIT, stdout=f"LoadState=loaded\nActiveState=active\nFragmentPath={MAIN}\nDropInPaths={DROP}\n"
    )
    machine.rules.insert(
        0, (("systemctl", "show", UNIT, f"--property={_settings_of(UNIT)}"), machine.rules[0][1].__class__(SETTINGS))
    )
    machine.on(
        "stat",
        stdout=f"regular file|root|root|644|{len(TEXT)}|{MAIN}\nsymbolic link|root|root|777|30|{DROP}\n"
        "regular file|root|root|600|9|/etc/default/qwen\n",
        stderr=f"stat: cannot statx '{OURS}': No such file or directory\n",
        status=1,
    )
    machine.on("readlink", "-f", DROP, stdout="/srv/units/mtp.conf\n")
    machine.on("cat", MAIN, stdout=TEXT)
    machine.on("cat", DROP, stdout="[Service]\nEnvironment=A=1\n")
    machine.on("cat", "/etc/default/qwen", stdout="B=2\n")
    machine.on("cat", OURS, stderr="cat: no such file\n", status=1)
    return machine


def _settings_of(unit: str) -> str:
    batch = next(UnitSettings(unit).ask())
    return batch[0].argv[-1].removeprefix("--property=")


def test_the_files_of_a_unit(unit: Any) -> None:
    files = unit.value(UnitFiles(UNIT, also=(OURS,)))
    assert [f.path for f in files.files] == [MAIN, DROP]
    assert files.main.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (files.main.owner, files.main.mode, files.main.target) == ("root", 0o644, "")
    assert files.drop_ins[0].target == "/srv/units/mtp.conf"
    assert files.environment == {"/etc/default/qwen": "B=2\n"}
    assert files.also == {OURS: None}
    assert files.get(OURS) is None
    assert files.main.managed_by == "Ansible managed"
    assert files.effective.environment_with(files.environment) == {"A": "1", "B": "2"}
    with pytest.raises(CannotTell, match="was not asked for"):
        files.get("/etc/passwd")


def test_bytes_do_not_show(unit: Any) -> None:
    assert "sglang.launch_server" not in repr(unit.value(UnitFiles(UNIT)))


def test_a_file_that_may_not_be_read(unit: Any) -> None:
    unit.on("cat", MAIN, stderr="cat: Permission denied\n", status=1)
    assert "Permission denied" in unit.unknown(UnitFiles(UNIT))


def test_settings(unit: Any) -> None:
    settings = unit.value(UnitSettings(UNIT))
    assert (settings.restart, settings.restart_s, settings.timeout_start_s, settings.timeout_stop_s) == (
        "on-failure",
        10,
        None,
        90,
    )
    assert settings.control_group == "/system.slice/sglang-qwen.service"
    assert settings.environment_files == (("/etc/default/qwen", True),)
    assert settings.keeps_children


def test_inside_a_container_everything_is_asked_there(unit: Any) -> None:
    container = ContainerSpec(name="llm-two", kind="pct", id="102")
    unit.value(UnitFiles(UNIT, container, (OURS,)))
    assert all(command.argv[:4] == ("pct", "exec", "102", "--") and command.root for command in unit.asked())


@pytest.mark.parametrize(
    ("text", "value"),
    [("1min 30s", 90), ("100ms", 0.1), ("infinity", None), ("", None), ("0", 0), ("1h 2min 3.5s", 3723.5), ("2d", 172800)],
)
def test_time_spans(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_a_time_span_that_is_none() -> None:
    with pytest.raises(CannotTell, match="soon"):
        seconds("soon")


@dataclass(frozen=True)
class _Edit:
    """Adds a drop-in."""

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitFileSet, Mapping[str, bytes]]]:
        now = yield from UnitFiles(UNIT, None, (OURS,)).ask()
        return now, {OURS: b"[Service]\nTimeoutStopSec=9\n"}


def test_what_systemd_would_say(unit: Any) -> None:
    said = f"{UNIT}:3: Missing '=', ignoring line.\nexit 0\n"
    unit.on("proofbook-verify-unit", UNIT, stdout=said)
    verified = unit.value(CandidateVerified(UNIT, None, _Edit()))
    assert (verified.exit_status, verified.lines) == (0, (f"{UNIT}:3: Missing '=', ignoring line.",))
    asked = next(c for c in unit.asked() if "proofbook-verify-unit" in c.argv)
    assert f"F {UNIT}\n|# Ansible managed\n".encode() in asked.stdin
    assert f"F {UNIT}.d/90-proofbook-mtp.conf\n|[Service]\n|TimeoutStopSec=9\n".encode() in asked.stdin
    assert not any(b"sglang.launch_server" in word.encode() for word in asked.argv), "what a unit holds may be a secret"


@pytest.mark.parametrize(
    ("said", "why"),
    [("", "did not come to its end"), ("half a line", "did not come to its end"), ("sh: not found\nexit 127\n", "not there")],
)
def test_systemd_said_nothing_whole(unit: Any, said: str, why: str) -> None:
    unit.on("proofbook-verify-unit", UNIT, stdout=said)
    assert why in unit.unknown(CandidateVerified(UNIT, None, _Edit()))


def test_names_that_are_no_files_of_a_unit() -> None:
    with pytest.raises(ValueError, match="not a file"):
        verify_unit(UNIT, [("../../etc/passwd.conf", b"")])
    with pytest.raises(ValueError, match="not a file"):
        verify_unit(UNIT, [("other.service", b"")])


def test_packages_that_are_no_packages(machine: Any) -> None:
    machine.on("python3", stdout="hello\n")
    (result,) = machine.gather([Command(("python3",))])
    with pytest.raises(CannotTell, match="not an answer about packages"):
        parse_packages(result)

"""The transport against a real sshd with its real limits, and against peers that stall, lie or are replaced."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess

import pytest

from proofbook.errors import ChangedHostKey, ConnectionLost, OtherMachine, TransportError
from proofbook.model import Command, command
from proofbook.probes import drive
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.systemd import UnitState

from .conftest import Machine, until

pytestmark = pytest.mark.box

UNIT = "sglang-qwen.service"


def sshd(machine: Machine, *lines: str) -> None:
    """Change sshd's settings. The first of the included files wins."""
    text = "".join(f"{line}\\n" for line in lines)
    machine.sh(f"printf '{text}' > /etc/ssh/sshd_config.d/00-test.conf; systemctl restart ssh")
    machine.box.up()  # waits until it answers again


def test_one_session_at_a_time_is_enough(fresh: Machine) -> None:
    sshd(fresh, "MaxSessions 1")
    with fresh.transport() as transport:
        for _ in range(3):
            asked = [MachineProbe(), UnitState(UNIT)]
            answers = drive(asked, transport.gather)
            assert all(answers[probe].known for probe in asked), [answers[p].unknown for p in asked]
            assert transport.run(command("hostname")).text.strip() == "fresh"


def test_no_session_allowed_is_said(fresh: Machine) -> None:
    sshd(fresh, "MaxSessions 0")
    with fresh.transport() as transport, pytest.raises(TransportError):
        transport.run(command("true"))


def test_a_forced_command_is_no_answer(fresh: Machine) -> None:
    sshd(fresh, "Match User ops", "ForceCommand echo This account is restricted")
    result = fresh.run("hostname", user="ops")
    assert result.exit_status is None
    assert "restricted" in result.trouble


def test_a_nologin_shell(fresh: Machine) -> None:
    fresh.sh("usermod -s /usr/sbin/nologin plain")
    result = fresh.run("hostname", user="plain")
    assert result.exit_status is None
    assert "not available" in result.trouble


CHATTER = (
    "sed -i '1i echo Welcome to the machine; echo again >&2' /etc/bash.bashrc /home/ops/.bashrc; echo 'echo hi' >> /etc/profile"
)


def test_chatter_of_the_login_does_not_reach_an_answer(fresh: Machine) -> None:
    fresh.sh(CHATTER)
    argv = fresh.box.ssh_command("true", user="ops")
    heard = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "Welcome" in heard.stdout
    assert "again" in heard.stderr
    said = command("sh", "-c", "hostname; id -un >&2")
    with fresh.transport("ops") as transport:
        for result in (transport.run(said), *transport.gather([said])):
            assert (result.stdout, result.stderr) == (b"fresh\n", b"ops\n")
        assert list(transport.stream(said)) == [b"fresh\n"]


def test_without_python(fresh: Machine) -> None:
    fresh.sh("systemctl stop sglang-qwen; chmod 0 /usr/bin/python3.*; rm /usr/bin/python3")
    assert fresh.value(MachineProbe()).hostname == "fresh"
    assert fresh.value(UnitState(UNIT)).active == "inactive"
    result = fresh.run("python3", "-c", "print(1)")
    assert result.exit_status == 127
    with fresh.transport() as transport:
        put = transport.put(b"a\n", "/etc/lab-put")
        assert put.sha256 == hashlib.sha256(b"a\n").hexdigest()
        assert transport.run(command("cat", "/etc/lab-put")).stdout == b"a\n"


def test_output_that_is_not_utf8_comes_as_it_is(shared: Machine) -> None:
    result = shared.run("printf", r"caf\351 \377\376\n")
    assert result.stdout == b"caf\xe9 \xff\xfe\n"
    assert result.text == "caf\\xe9 \\xff\\xfe\n"


@pytest.mark.parametrize("locale", ["LANG=de_DE.ISO-8859-1", "LC_ALL=tr_TR.UTF-8", "LC_ALL=C"])
def test_the_locale_of_the_machine_changes_no_answer(fresh: Machine, locale: str) -> None:
    fresh.sh(f"echo {locale} > /etc/default/locale; printf 'export {locale}\\n' > /etc/profile.d/locale.sh")
    unit = fresh.value(UnitState(UNIT), user="ops")
    assert (unit.active, unit.enabled) == ("active", "enabled")
    assert fresh.value(MachineProbe(), user="ops").uptime_s > 0


def test_fifty_megabytes(shared: Machine) -> None:
    wanted = 50_000_000
    with shared.transport() as transport:
        whole = transport.run(Command(("head", "-c", str(wanted), "/dev/zero"), timeout_s=120, max_output=wanted + 1))
        assert (len(whole.stdout), whole.lost_stdout, whole.exit_status) == (wanted, 0, 0)
        cut = transport.run(Command(("head", "-c", str(wanted), "/dev/zero"), timeout_s=120, max_output=1_000_000))
        assert (len(cut.stdout), cut.lost_stdout, cut.exit_status) == (1_000_000, wanted - 1_000_000, 0)
        assert not cut.ok


def test_what_is_left_behind_by_a_timeout_is_ended(shared: Machine) -> None:
    with shared.transport() as transport:
        result = transport.run(command("sh", "-c", "sleep 4711 & sleep 4711", timeout_s=1))
        assert result.timed_out
    until(lambda: shared.sh("pgrep -fc '^sleep 471[1]' || true") == "0", "nothing of it runs")


def test_a_slow_link_is_only_slow(shared: Machine) -> None:
    shared.box.slow_down(150)
    try:
        assert shared.value(MachineProbe()).hostname == "shared"
    finally:
        shared.box.slow_down(0)


def test_a_frozen_machine_is_a_lost_connection(fresh: Machine) -> None:
    with fresh.transport(keepalive_s=0.5, silence_s=2.0) as transport:
        transport.open()
        fresh.box.freeze()
        try:
            with pytest.raises(ConnectionLost):
                transport.run(command("true", timeout_s=60))
        finally:
            fresh.box.thaw()
        assert transport.reopen().software.startswith("OpenSSH")


def test_a_replaced_host_key_is_another_machine(fresh: Machine) -> None:
    with fresh.transport() as transport:
        transport.open()
        fresh.sh(
            "rm /etc/ssh/ssh_host_ed25519_key*; "
            "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; systemctl restart ssh"
        )
        with pytest.raises(OtherMachine):
            transport.reopen()
    with pytest.raises(ChangedHostKey), fresh.transport() as transport:
        transport.open()


def test_a_reboot_loses_the_connection_and_reopens_to_the_same_machine(fresh: Machine) -> None:
    with fresh.transport() as transport:
        first = transport.open()
        before = transport.run(command("cat", "/proc/sys/kernel/random/boot_id")).text
        with contextlib.suppress(ConnectionLost):  # systemctl may not get to say anything before sshd goes
            transport.run(command("systemctl", "reboot"))
        fresh.box.up()
        second = until(lambda: reopened(transport), "it lets us in again")
        assert (second.host_key, second.address) == (first.host_key, first.address)
        assert transport.run(command("cat", "/proc/sys/kernel/random/boot_id")).text != before


def reopened(transport: object) -> object:
    try:
        return transport.reopen(timeout_s=5.0)  # type: ignore[attr-defined]
    except TransportError:
        return None


def test_openssh_agrees(shared: Machine) -> None:
    done = subprocess.run(shared.box.ssh_command("hostname", user="ops"), capture_output=True, text=True, check=True)
    assert done.stdout == "shared\n"

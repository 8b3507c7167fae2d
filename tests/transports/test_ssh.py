"""The SSH transport against a real OpenSSH server: every trap that it closes."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proofbook.errors import (
    BadParameter,
    CannotConnect,
    ChangedHostKey,
    ConnectionLost,
    LoginFailed,
    OtherMachine,
    TransportError,
    UnknownHostKey,
)
from proofbook.model import Command, command
from proofbook.transports.ssh import SshTransport

from .sshd import Sshd, make_key, processes, wait_until

pytestmark = pytest.mark.sshd

HOSTILE = (
    "",
    " ",
    "a b",
    "'",
    '"',
    "$HOME",
    "$(touch /tmp/x)",
    "`id`",
    ";id",
    "&",
    "*",
    "~",
    "!x",
    "\\",
    "\\n",
    "a\nb",
    "\n",
    "é\x01\x7f",
    "-n",
    "%s",
)


@pytest.fixture
def odd() -> Iterator[str]:
    """A number of seconds that no other process sleeps for."""
    yield f"9{uuid.uuid4().int % 10**8}"


# -------------------------------------------------------------------------------------------- host keys


def test_opening_proves_the_host_key_and_says_who_answered(sshd: Sshd) -> None:
    with sshd.transport() as ssh:
        peer = ssh.open()
        assert peer.address == f"127.0.0.1:{sshd.port}"
        assert peer.host_key == f"ssh-ed25519 {sshd.fingerprint}"
        assert peer.software.startswith("OpenSSH_")
        assert len(sshd.sessions()) == 1


def test_an_unknown_host_key_is_refused_with_the_way_to_trust_it(sshd: Sshd) -> None:
    sshd.known_hosts.write_text("")
    with pytest.raises(UnknownHostKey) as refused:
        sshd.transport().open()
    assert sshd.fingerprint in str(refused.value)
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in str(refused.value)
    (typed,) = re.findall(r"echo .* >> \S+", str(refused.value))
    subprocess.run(["sh", "-c", typed], check=True)
    with sshd.transport() as ssh:
        assert ssh.run(command("true")).ok


def test_a_changed_host_key_is_always_refused_and_both_are_shown(sshd: Sshd) -> None:
    old = sshd.fingerprint
    sshd.stop()
    sshd.new_host_key()
    sshd.start()
    with pytest.raises(ChangedHostKey) as refused:
        sshd.transport().open()
    assert old in str(refused.value)
    assert sshd.fingerprint in str(refused.value)
    (typed,) = re.findall(r"ssh-keygen -R .*?(?=  )", str(refused.value))
    subprocess.run(["sh", "-c", typed], check=True, capture_output=True)
    with pytest.raises(UnknownHostKey):
        sshd.transport().open()


def test_another_key_type_than_the_trusted_one_is_a_changed_key(sshd: Sshd, tmp_path: Path) -> None:
    other = " ".join(make_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text().split()[:2])
    sshd.known_hosts.write_text(f"{sshd.name} {other}\n")
    with pytest.raises(ChangedHostKey, match="ssh-rsa SHA256:"):
        sshd.transport().open()


def test_the_key_type_that_is_trusted_is_asked_for_first(sshd: Sshd, tmp_path: Path) -> None:
    rsa = make_key(tmp_path / "rsa", "rsa")
    sshd.stop()
    sshd.start(f"HostKey {rsa}")
    sshd.known_hosts.write_text(f"{sshd.name} {' '.join(rsa.with_suffix('.pub').read_text().split()[:2])}\n")
    with sshd.transport() as ssh:
        assert ssh.open().host_key.startswith("ssh-rsa SHA256:")


def test_hashed_names_are_found(sshd: Sshd) -> None:
    subprocess.run(["ssh-keygen", "-H", "-f", sshd.known_hosts], check=True, capture_output=True)
    assert "127.0.0.1" not in sshd.known_hosts.read_text()
    with sshd.transport() as ssh:
        assert ssh.run(command("true")).ok


def test_a_revoked_key_is_refused(sshd: Sshd) -> None:
    sshd.known_hosts.write_text(f"{sshd.name} {sshd.public_key}\n@revoked * {sshd.public_key}\n")
    with pytest.raises(ChangedHostKey, match="revoked"):
        sshd.transport().open()


# ----------------------------------------------------------------------------------- ~/.ssh/config, jumps


def write_config(path: Path, sshd: Sshd, alias: str, *lines: str) -> None:
    text = path.read_text() if path.exists() else ""
    own = [f"Host {alias}", "HostName 127.0.0.1", f"Port {sshd.port}", "User root", f"IdentityFile {sshd.user_key}"]
    own += ["IdentitiesOnly yes", f"UserKnownHostsFile {sshd.known_hosts}", "GlobalKnownHostsFile none", *lines]
    path.write_text(text + "\n  ".join(own) + "\n")


def test_the_ssh_config_is_honoured_with_includes(sshd: Sshd, tmp_path: Path) -> None:
    write_config(tmp_path / "included", sshd, "gpu01")
    (tmp_path / "config").write_text(f"Include {tmp_path}/included\n")
    with SshTransport("gpu01", ssh_config=str(tmp_path / "config")) as ssh:
        assert ssh.open().address == f"127.0.0.1:{sshd.port}"
        assert ssh.run(command("true")).ok


def test_no_checking_in_the_ssh_config_does_not_switch_checking_off(sshd: Sshd, tmp_path: Path) -> None:
    sshd.known_hosts.write_text("")
    write_config(tmp_path / "config", sshd, "gpu01", "StrictHostKeyChecking no")
    with pytest.raises(UnknownHostKey, match="gpu01"):
        SshTransport("gpu01", ssh_config=str(tmp_path / "config")).open()
    assert sshd.known_hosts.read_text() == ""


def test_a_host_key_alias_is_the_name_to_look_up(sshd: Sshd, tmp_path: Path) -> None:
    sshd.known_hosts.write_text(f"the-machine {sshd.public_key}\n")
    write_config(tmp_path / "config", sshd, "gpu01", "HostKeyAlias the-machine")
    with SshTransport("gpu01", ssh_config=str(tmp_path / "config")) as ssh:
        assert ssh.run(command("true")).ok


def test_a_jump_goes_through_the_gateway_and_checks_its_key_too(new_sshd: Callable[[str], Sshd], tmp_path: Path) -> None:
    gateway, target = new_sshd("gateway"), new_sshd("target")
    gateway.start()
    target.start()
    config = tmp_path / "config"
    write_config(config, gateway, "bastion")
    write_config(config, target, "gpu01", "ProxyJump bastion")
    with SshTransport("gpu01", ssh_config=str(config)) as ssh:
        assert ssh.open().host_key == f"ssh-ed25519 {target.fingerprint}"
        assert ssh.run(command("true")).ok
        assert len(gateway.sessions()) == 1
    gateway.known_hosts.write_text("")
    with pytest.raises(UnknownHostKey, match="bastion"):
        SshTransport("gpu01", ssh_config=str(config)).open()
    gateway.trust()
    target.known_hosts.write_text(f"{target.name} {gateway.public_key}\n")
    with pytest.raises(ChangedHostKey, match="gpu01"):
        SshTransport("gpu01", ssh_config=str(config)).open()


def test_a_frozen_gateway_is_noticed(new_sshd: Callable[[str], Sshd], tmp_path: Path) -> None:
    gateway, target = new_sshd("gateway"), new_sshd("target")
    gateway.start()
    target.start()
    config = tmp_path / "config"
    write_config(config, gateway, "bastion")
    write_config(config, target, "gpu01", "ProxyJump bastion")
    with SshTransport("gpu01", ssh_config=str(config), keepalive_s=0.2, silence_s=0.6) as ssh:
        assert ssh.run(command("true")).ok
        for pid in gateway.sessions():
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="no sign of life"):
            ssh.run(command("true"))


def test_a_proxy_command_knows_host_and_port(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "proxy.py").write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    write_config(tmp_path / "config", sshd, "gpu01", f"ProxyCommand {sys.executable} {tmp_path}/proxy.py %h %p")
    with SshTransport("gpu01", ssh_config=str(tmp_path / "config")) as ssh:
        assert ssh.run(command("echo", "hello")).text == "hello\n"


@pytest.mark.parametrize("name", ["", "-oProxyCommand=touch /tmp/x", "a b", "a;b", "a'b"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match="host name"):
        SshTransport(name).open()


# ------------------------------------------------------------------------------------------- connecting


def test_a_machine_that_accepts_and_says_nothing_is_given_up_in_time(sshd: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CannotConnect):
        sshd.transport(port=silent.getsockname()[1]).open(timeout_s=0.4)


def test_a_closed_port_and_an_unknown_name_say_so(sshd: Sshd) -> None:
    sshd.stop()
    with pytest.raises(CannotConnect, match="Connection refused"):
        sshd.transport().open()
    with pytest.raises(CannotConnect, match="does not resolve"):
        SshTransport("no-such-host.invalid", ssh_config=False).open()


def test_a_refused_login_is_told_apart(sshd: Sshd, tmp_path: Path) -> None:
    with pytest.raises(LoginFailed, match="does not let us in"):
        sshd.transport(identity_file=str(make_key(tmp_path / "stranger"))).open()
    with pytest.raises(LoginFailed, match="does not let us in"):
        sshd.transport(identity_file=str(tmp_path / "no-such-key")).open()


def test_first_use_from_many_threads_makes_one_connection(sshd: Sshd) -> None:
    ssh = sshd.transport()
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda n: ssh.run(command("echo", str(n))).text, range(24)))
    assert results == [f"{n}\n" for n in range(24)]
    assert len(sshd.sessions()) == 1
    ssh.close()


@pytest.mark.parametrize(
    ("offered", "taken"),
    [("aes256-ctr,aes128-gcm@openssh.com", "aes128-gcm@openssh.com"), ("aes256-ctr,aes128-ctr", "aes128-ctr")],
)
def test_the_cipher_that_costs_least_is_taken_where_it_is_offered(sshd: Sshd, offered: str, taken: str) -> None:
    sshd.stop()
    sshd.start(f"Ciphers {offered}")
    with sshd.transport() as transport:
        assert transport.run(command("seq", "20000")).expect().endswith("20000\n")
        assert transport._link is not None
        assert transport._link.transport.local_cipher == transport._link.transport.remote_cipher == taken


def test_a_server_with_few_sessions_is_waited_for_and_one_with_none_is_told(sshd: Sshd) -> None:
    sshd.stop()
    sshd.start("MaxSessions 1")
    with sshd.transport() as ssh:
        assert [ssh.run(command("echo", str(n))).text for n in range(10)] == [f"{n}\n" for n in range(10)]
    sshd.stop()
    sshd.start("MaxSessions 0")
    with sshd.transport() as ssh, pytest.raises(TransportError, match="refuses another session"):
        ssh.run(command("true"))


def test_a_lost_connection_is_an_error_and_is_not_made_anew_by_itself(sshd: Sshd, ssh: SshTransport, odd: str) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ssh.run(command("sleep", odd))
        except ConnectionLost as error:
            failed.append(error)

    waiting = threading.Thread(target=run)
    waiting.start()
    wait_until(lambda: bool(processes(odd)), "the command runs")
    for pid in sshd.sessions():
        os.kill(pid, signal.SIGKILL)
    waiting.join(10)
    assert len(failed) == 1
    for call in (
        lambda: ssh.run(command("true")),
        lambda: ssh.gather([command("true")]),
        ssh.open,
        lambda: list(ssh.stream(command("true"))),
    ):
        with pytest.raises(ConnectionLost):
            call()
    wait_until(lambda: not processes(odd), "the command of the lost connection has ended")
    assert ssh.reopen().host_key == f"ssh-ed25519 {sshd.fingerprint}"
    assert ssh.run(command("true")).ok


def test_reopening_takes_only_the_key_that_answered_first(sshd: Sshd, ssh: SshTransport) -> None:
    first = sshd.fingerprint
    sshd.stop()
    sshd.new_host_key()
    sshd.trust()
    sshd.start()
    with pytest.raises(OtherMachine) as refused:
        ssh.reopen()
    assert first in str(refused.value)
    assert sshd.fingerprint in str(refused.value)


def test_a_frozen_peer_is_noticed_while_a_command_runs(sshd: Sshd, odd: str) -> None:
    with sshd.transport(keepalive_s=0.2, silence_s=0.6) as ssh:
        assert ssh.run(command("true")).ok
        lines = ssh.stream(command("sh", "-c", f"echo started; exec sleep {odd}"))
        assert next(lines) == b"started\n"
        for pid in sshd.sessions():
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="no sign of life"):
            next(lines)
        with pytest.raises(ConnectionLost):
            ssh.run(command("true"))


def test_a_quiet_but_living_peer_is_not_given_up(sshd: Sshd) -> None:
    with sshd.transport(keepalive_s=0.1, silence_s=0.5) as ssh:
        assert ssh.run(command("sleep", "1.2")).ok


# ---------------------------------------------------------------------------------------------- running


def test_arguments_arrive_as_they_are(ssh: SshTransport) -> None:
    printed = command("printf", "%s\\0", *HOSTILE)
    want = b"".join(a.encode() + b"\0" for a in HOSTILE)
    assert ssh.run(printed).stdout == want
    assert ssh.gather([printed, printed])[1].stdout == want


def test_bytes_stay_bytes_in_both_directions(ssh: SshTransport) -> None:
    every = bytes(range(256)) * 3
    echo = Command(("sh", "-c", "tee /dev/stderr"), stdin=every)
    for result in (ssh.run(echo), *ssh.gather([echo])):
        assert result.stdout == every
        assert result.stderr == every


def test_a_big_input_is_taken_while_output_comes(ssh: SshTransport) -> None:
    data = os.urandom(5_000_000)
    assert ssh.run(Command(("cat",), stdin=data)).stdout == data


def test_a_command_that_wants_no_input_ends_by_itself(ssh: SshTransport) -> None:
    result = ssh.run(Command(("sh", "-c", "head -c 3; sleep 0.2; echo done"), stdin=b"abc" * 500_000))
    assert (result.exit_status, result.text) == (0, "abcdone\n")


def test_exit_status_signal_and_not_found(ssh: SshTransport) -> None:
    asked = [command("sh", "-c", "exit 7"), command("sh", "-c", "kill -9 $$"), command("no-such-program"), command("/etc/passwd")]
    for results in ([ssh.run(c) for c in asked], ssh.gather(asked)):
        assert [r.exit_status for r in results] == [7, 137, 127, 126]
        assert "no-such-program" in results[2].error_text
        assert not any(r.trouble for r in results)


def test_output_over_the_limit_is_counted_and_not_kept(ssh: SshTransport) -> None:
    result = ssh.run(Command(("head", "-c", "5000000", "/dev/zero"), max_output=1000))
    assert (result.exit_status, result.stdout, result.lost_stdout) == (0, bytes(1000), 4_999_000)
    assert not result.ok
    (gathered,) = ssh.gather([Command(("head", "-c", "5000", "/dev/zero"), max_output=1000)])
    assert (gathered.exit_status, gathered.stdout, gathered.lost_stdout) == (0, bytes(1000), 4000)


def test_a_command_is_ended_at_its_deadline_with_its_children(ssh: SshTransport, odd: str) -> None:
    hanging = command("sh", "-c", f"sleep {odd} & echo early; wait", timeout_s=0.3)
    for result in (ssh.run(hanging), *ssh.gather([hanging])):
        assert result.timed_out
        assert result.exit_status is None
        assert "0.3 s" in result.trouble
        assert result.stdout == b"early\n"
        wait_until(lambda: not processes(odd), "the sleep was ended")


def test_a_command_that_ignores_sigterm_is_killed(ssh: SshTransport, odd: str) -> None:
    deaf = command("sh", "-c", f"trap '' TERM; sleep {odd}", timeout_s=0.2)
    assert ssh.run(deaf).timed_out
    wait_until(lambda: not processes(odd), "the sleep was killed")


def test_the_clock_is_the_machines(ssh: SshTransport) -> None:
    for result in (ssh.run(command("date", "+%s.%N")), *ssh.gather([command("date", "+%s.%N")])):
        assert abs(result.started_at.timestamp() - float(result.text)) < 5
        assert 0 <= result.duration_s < 30


def test_a_daemon_that_keeps_the_output_open_does_not_hold_the_answer(ssh: SshTransport, odd: str) -> None:
    result = ssh.run(command("sh", "-c", f"echo ready; sleep {odd} &"))
    assert (result.exit_status, result.text) == (0, "ready\n")
    for pid in processes(odd):
        os.kill(pid, signal.SIGKILL)


def test_the_client_killed_leaves_no_command_behind(sshd: Sshd, odd: str) -> None:
    program = f"""
import threading
from proofbook.model import command
from proofbook.transports.ssh import SshTransport
ssh = SshTransport(
    "127.0.0.1", port={sshd.port}, identity_file={str(sshd.user_key)!r}, known_hosts={str(sshd.known_hosts)!r}, ssh_config=False
)
threading.Thread(target=ssh.run, args=(command("sleep", "{odd}1", timeout_s=900),), daemon=True).start()
ssh.gather([command("sleep", "{odd}2", timeout_s=900)])
"""
    client = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: bool(processes(f"{odd}1") and processes(f"{odd}2")), "both commands run")
    client.kill()
    client.wait()
    wait_until(lambda: not processes(f"{odd}1") and not processes(f"{odd}2"), "both commands have ended")


def test_an_interrupt_comes_through_at_once_and_ends_the_command(sshd: Sshd, ssh: SshTransport, odd: str) -> None:
    def interrupt() -> None:
        wait_until(lambda: bool(processes(odd)), "the command runs")
        os.kill(os.getpid(), signal.SIGINT)

    # WHY: a test run that was started in the background inherits that interrupts are ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ssh.run(command("sleep", odd, timeout_s=60))
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: not processes(odd), "the command has ended")
    assert ssh.run(command("true")).ok


# --------------------------------------------------------------------------------------------- gathering


def test_gathered_commands_do_not_harm_each_other(ssh: SshTransport, odd: str) -> None:
    asked = [
        command("echo", "first"),
        command("sleep", odd, timeout_s=0.3),
        Command(("yes",), max_output=1000),
        command("sh", "-c", "kill -9 $$"),
        command("sh", "-c", "exit 3"),
        command("no-such-program"),
        command("sh", "-c", "echo x >&2"),
        *(command("echo", str(n)) for n in range(20)),
    ]
    results = ssh.gather(asked)
    assert [r.command for r in results] == asked
    assert [r.exit_status for r in results[:7]] == [0, None, None, 137, 3, 127, 0]
    assert results[1].timed_out
    assert results[2].stdout == b"y\n" * 500
    assert "more than 1000 bytes" in results[2].trouble
    assert results[2].lost_stdout > 0
    assert results[6].stderr == b"x\n"
    assert [r.text for r in results[7:]] == [f"{n}\n" for n in range(20)]
    assert not processes(odd)


def test_a_gathered_command_that_kills_its_lane_costs_only_itself(ssh: SshTransport) -> None:
    results = ssh.gather([command("sh", "-c", "kill -9 $PPID", timeout_s=0.3), *(command("echo", str(n)) for n in range(8))])
    assert results[0].exit_status is None
    assert results[0].trouble
    assert [r.text for r in results[1:]] == [f"{n}\n" for n in range(8)]


def test_gather_leaves_no_folder_behind(ssh: SshTransport, odd: str, tmp_path: Path) -> None:
    where = "readlink /proc/$PPID/cwd"
    (result,) = ssh.gather([command("sh", "-c", where)])
    assert "/proofbook." in result.text
    wait_until(lambda: not Path(result.text.strip()).exists(), "the folder is gone")

    def ask() -> None:
        with pytest.raises(ConnectionLost):
            ssh.gather([command("sh", "-c", f"{where} > {tmp_path}/where; sleep {odd}")])

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bool(processes(odd)), "the command runs")
    folder = Path((tmp_path / "where").read_text().strip())
    assert folder.exists()
    ssh.close()
    thread.join()
    wait_until(lambda: not processes(odd) and not folder.exists(), "command and folder are gone")


def test_gathering_nothing_asks_nothing() -> None:
    assert SshTransport("no-such-host.invalid", ssh_config=False).gather([]) == []


def test_an_account_that_runs_no_commands_is_trouble_and_no_answer(sshd: Sshd) -> None:
    sshd.stop()
    sshd.start("ForceCommand echo This account is closed; exit 1")
    with sshd.transport() as ssh:
        for result in (ssh.run(command("true")), *ssh.gather([command("true")])):
            assert result.exit_status is None
            assert "This account is closed" in result.trouble
        with pytest.raises(StopIteration) as ended:
            next(ssh.stream(command("true")))
        assert "This account is closed" in ended.value.value.trouble


LOGINS = ['echo "Welcome to end"; echo noise >&2', "printf 'no line end'; printf more >&2", "yes | head -c 300000"]


@pytest.mark.parametrize("words", LOGINS)
def test_words_of_the_login_scripts_do_not_get_into_an_answer(sshd: Sshd, words: str) -> None:
    sshd.stop()
    sshd.start(f'ForceCommand {words}; eval "$SSH_ORIGINAL_COMMAND"')
    said = Command(("sh", "-c", "printf 'one\\ntwo'; echo err >&2; exit 4"), max_output=100)
    with sshd.transport() as ssh:
        for result in (ssh.run(said), *ssh.gather([said])):
            assert (result.exit_status, result.stdout, result.stderr, result.lost_stdout) == (4, b"one\ntwo", b"err\n", 0)
        lines = ssh.stream(said)
        assert [next(lines), next(lines)] == [b"one\n", b"two"]
        with pytest.raises(StopIteration) as ended:
            next(lines)
        assert (ended.value.value.exit_status, ended.value.value.stderr) == (4, b"err\n")


def test_a_session_that_ends_while_the_command_runs_is_no_refusal(ssh: SshTransport) -> None:
    """Whether it did its work is unknown: it must not read as if nothing had been run."""
    killed = command("sh", "-c", "echo working; kill -9 $PPID; sleep 1")
    result = ssh.run(killed)
    assert (result.exit_status, result.timed_out) == (None, False)
    assert "unknown" in result.trouble
    assert "did not run" not in result.trouble


# -------------------------------------------------------------------------------------------- streaming


def test_lines_come_as_they_are_said(ssh: SshTransport, tmp_path: Path) -> None:
    script = f"echo one; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; printf 'two\\n\\nthree'; echo e >&2; exit 4"
    lines = ssh.stream(command("sh", "-c", script))
    assert next(lines) == b"one\n"
    (tmp_path / "go").touch()
    assert [next(lines), next(lines), next(lines)] == [b"two\n", b"\n", b"three"]
    with pytest.raises(StopIteration) as ended:
        next(lines)
    assert ended.value.value.exit_status == 4
    assert ended.value.value.stderr == b"e\n"


def test_closing_the_stream_ends_the_command(ssh: SshTransport, odd: str) -> None:
    lines = ssh.stream(command("sh", "-c", f"echo one; exec sleep {odd}", timeout_s=900))
    assert next(lines) == b"one\n"
    wait_until(lambda: bool(processes(odd)), "the shell has become the sleeping program")
    lines.close()
    wait_until(lambda: not processes(odd), "the command has ended")


# ---------------------------------------------------------------------------------------------- writing


def test_a_file_is_written_with_its_mode_and_a_backup(ssh: SshTransport, tmp_path: Path) -> None:
    path = tmp_path / "it's a $file"
    data = os.urandom(300_000)
    first = ssh.put(data, str(path), mode=0o640)
    assert first.backup == ""
    assert first.sha256 == hashlib.sha256(data).hexdigest()
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o640
    backups = [ssh.put(text, str(path)).backup for text in (b"", b"third")]
    assert [Path(b).read_bytes() for b in backups] == [data, b""]
    assert len(set(backups)) == 2
    assert path.read_bytes() == b"third"
    assert ssh.put(b"fourth", str(path), backup=False).backup == ""
    assert sorted(p.name for p in tmp_path.iterdir() if "$file" in p.name or p.name.startswith(".proofbook")) == sorted(
        [path.name, *(Path(b).name for b in backups)]
    )


def test_a_file_keeps_its_owner(ssh: SshTransport, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    path = tmp_path / "owned"
    path.write_text("old")
    os.chown(path, 65534, 65534)
    ssh.put(b"new", str(path))
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


def test_what_cannot_be_written_says_why_and_changes_nothing(ssh: SshTransport, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(TransportError, match="symbolic link to target"):
        ssh.put(b"new", str(tmp_path / "link"))
    with pytest.raises(TransportError, match="not a folder"):
        ssh.put(b"new", str(tmp_path / "nowhere" / "file"))
    with pytest.raises(TransportError, match="not a regular file"):
        ssh.put(b"new", str(tmp_path))
    with pytest.raises(ValueError, match="absolute"):
        ssh.put(b"new", "relative")
    assert (tmp_path / "target").read_text() == "old"


# ---------------------------------------------------------------------------------------------- tunnels


def test_a_tunnel_carries_several_connections_and_closes(ssh: SshTransport) -> None:
    def serve(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(sock,), daemon=True).start()

    def echo(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(65536):
                sock.sendall(data.upper())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with ssh.tunnel(listener.getsockname()[1]) as address:
            first, second = socket.create_connection(address), socket.create_connection(address)
            with first, second:
                first.sendall(b"one")
                second.sendall(b"two")
                assert (second.recv(10), first.recv(10)) == (b"TWO", b"ONE")
                first.shutdown(socket.SHUT_WR)
                assert first.recv(10) == b""
            left = socket.create_connection(address)
            left.sendall(b"x")
            assert left.recv(10) == b"X"
        with left:
            assert left.recv(10) == b""
        with pytest.raises(OSError):
            socket.create_connection(address, timeout=2)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_tunnel_to_a_closed_port_closes_the_connection(ssh: SshTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ssh.tunnel(port) as address, socket.create_connection(address) as sock:
        assert sock.recv(10) == b""


def test_quoting_is_only_for_us_to_see(ssh: SshTransport) -> None:
    """The host's process list shows a command as it was asked for, not wrapped in a shell."""
    seen = ssh.run(command("sh", "-c", "tr '\\0' ' ' < /proc/$$/cmdline", "my-name", "an arg"))
    assert shlex.split(seen.text)[0] == "sh"
    assert seen.text.endswith("my-name an arg ")

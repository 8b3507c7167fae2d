"""The machine behind SSH: started once, shared, waited for on its own clock, killed and gone on with."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from proofbook.errors import LabError
from proofbook.lab.sim import client
from proofbook.lab.sim.client import Endpoint, LabClock
from proofbook.model import command
from proofbook.transports.ssh import SshTransport

from .conftest import ssh

pytestmark = pytest.mark.lab

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def boot_id(place: Endpoint) -> str:
    answer = ssh(place, BOOT_ID)
    assert answer.returncode == 0, answer.stderr
    text: str = answer.stdout.decode()
    return text.strip()


def pid_of(place: Endpoint) -> int:
    (one,) = [s for s in client.status() if s["scenario"] == place.scenario]
    return int(one["pid"])


def until(holds: Callable[[], bool], what: str, most_s: float = 20.0) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {most_s} s: {what}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def transport(place: Endpoint) -> SshTransport:
    return SshTransport(
        place.address,
        port=place.port,
        user=place.user,
        identity_file=place.identity_file,
        known_hosts=place.known_hosts,
        ssh_config=False,
    )


def listening(pid: int) -> set[str]:
    """The addresses that a process listens on, as /proc/net/tcp has them."""
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(fd))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def test_a_machine_is_started_once_shared_and_put_away(lab: Path) -> None:
    client.reset("healthy")
    first = client.ensure("healthy")
    again = client.ensure("healthy")
    assert (first.reused, again.reused) == (False, True)
    assert first.port == again.port
    assert listening(pid_of(first)) == {"0100007F"}  # 127.0.0.1
    assert ssh(first, "hostname; exit 3").stdout == b"gpu-hv1\n"
    assert ssh(first, "exit 3").returncode == 3
    assert ssh(first, "cat > /root/x; wc -c < /root/x", stdin=bytes(range(256))).stdout == b"256\n"
    assert ssh(first, "cat /root/x").stdout == bytes(range(256))
    assert ssh(first, "true", user="somebody").returncode == 255
    assert not (lab / "healthy" / "unknown_commands.log").exists()
    assert ssh(first, "nosuchthing").returncode == 127
    assert "nosuchthing" in client.unknown_commands("healthy")[0]
    assert oct((lab / "healthy").stat().st_mode & 0o777) == "0o700"
    assert client.stop("healthy") == ["healthy"]
    assert client.status() == []
    assert client.stop("healthy") == []


def test_two_at_once_get_the_same_machine(lab: Path) -> None:
    client.stop("healthy")
    program = "from proofbook.lab.sim import client; e = client.ensure('healthy'); print(e.port, e.reused)"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in both]
    assert said[0][0] == said[1][0]
    assert sorted(reused for _, reused in said) == ["False", "True"]


def test_the_transport_gathers_runs_puts_and_tunnels(lab: Path) -> None:
    place = client.ensure("healthy")
    way = transport(place)
    try:
        way.open()
        results = way.gather(
            [
                command("hostname"),
                command("pct", "exec", "102", "--", "hostname"),
                command("cat", "/nothing"),
                command("id", "-u", root=True),
                command("sleep", "30", timeout_s=0.3),
            ]
        )
        assert [r.text for r in results[:4]] == ["gpu-hv1\n", "llm-two\n", "", "0\n"]
        assert (results[2].exit_status, results[2].error_text) == (1, "cat: /nothing: No such file or directory\n")
        assert results[4].timed_out
        assert abs((results[0].started_at - LabClock(place.state_dir).now()).total_seconds()) < 60
        put = way.put(b"options nvidia x=1\n", "/etc/modprobe.d/nvidia.conf")
        assert put.backup
        assert way.run(command("cat", "/etc/modprobe.d/nvidia.conf")).text == "options nvidia x=1\n"
        with way.tunnel(30000, "llm-two") as (address, port):
            assert urllib.request.urlopen(f"http://{address}:{port}/health", timeout=20).status == 200
    finally:
        way.close()
    assert [line for line in client.unknown_commands("healthy") if "nosuchthing" not in line] == []


def test_a_wait_on_purpose_runs_fast_and_things_happen_on_the_way(lab: Path) -> None:
    place = client.ensure("healthy")
    clock = LabClock(place.state_dir)
    before, real = clock.now(), time.monotonic()
    clock.sleep(600)
    assert (clock.now() - before).total_seconds() >= 600
    assert time.monotonic() - real < 600 / 10  # far from timing anything: it must only not be real time
    uptime = float(ssh(place, "cat /proc/uptime").stdout.split()[0])
    assert uptime > 9.3 * 86400 + 600 - 1


def test_a_reboot_over_ssh(lab: Path) -> None:
    place = client.ensure("healthy")
    clock = LabClock(place.state_dir)
    before = boot_id(place)
    assert ssh(place, "systemctl reboot").returncode == 0
    clock.sleep(5)
    with socket.socket() as knock, pytest.raises(ConnectionRefusedError):
        knock.connect((place.address, place.port))
    clock.sleep(60)
    assert ssh(place, "true").returncode == 255
    clock.sleep(75)
    after = boot_id(place)
    assert after != before
    clock.sleep(60)
    health = ssh(place, "pct exec 102 -- curl -sS -m 10 -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/health")
    assert health.stdout == b"200"


def test_an_open_connection_is_cut_by_the_reboot(lab: Path) -> None:
    place = client.ensure("healthy")
    words = [
        "ssh",
        "-F",
        "none",
        "-p",
        str(place.port),
        "-i",
        place.identity_file,
        "-o",
        f"UserKnownHostsFile={place.known_hosts}",
        "-o",
        "BatchMode=yes",
        f"{place.user}@{place.address}",
    ]
    follower = subprocess.Popen([*words, "journalctl -f -o cat --no-pager"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert follower.stdout is not None
    follower.stdout.readline()
    ssh(place, "systemctl reboot")
    # read on while time passes as everywhere: a wait on purpose could skip to the cut before the follower looks again
    assert any(b"The system will reboot now!" in line for line in follower.stdout)
    LabClock(place.state_dir).sleep(3)
    assert follower.wait(timeout=20) == 255


def test_a_killed_process_goes_on_with_the_saved_machine(lab: Path) -> None:
    client.reset("healthy")
    place = client.ensure("healthy")
    clock = LabClock(place.state_dir)
    ssh(place, "echo kept > /root/kept; systemctl reboot")
    clock.sleep(200)
    rebooted, then = boot_id(place), clock.now()
    (lab / "healthy" / "state.pickle").stat()
    os.kill(pid_of(place), signal.SIGKILL)
    until(lambda: place.scenario not in [s["scenario"] for s in client.status()], "the killed process is gone")
    assert (lab / "healthy" / "daemon.json").exists()  # stale, and recognised as such
    with pytest.raises(LabError):
        clock.sleep(1)
    again = client.ensure("healthy")
    assert (again.reused, again.resumed, again.port) == (False, True, place.port)
    assert boot_id(again) == rebooted
    assert ssh(again, "cat /root/kept").stdout == b"kept\n"
    assert LabClock(again.state_dir).now() >= then


def test_a_damaged_state_is_no_obstacle(lab: Path) -> None:
    place = client.ensure("healthy")
    os.kill(pid_of(place), signal.SIGKILL)
    until(lambda: place.scenario not in [s["scenario"] for s in client.status()], "the killed process is gone")
    (lab / "healthy" / "state.pickle").write_bytes(b"\x80\x05no pickle")
    again = client.ensure("healthy")
    assert not again.resumed
    assert boot_id(again)


def test_a_reset_machine_is_new_and_still_itself(lab: Path) -> None:
    place = client.ensure("gpu-missing")
    identity = ssh(place, "cat /etc/machine-id").stdout
    ssh(place, "echo x > /root/x; systemctl reboot")
    LabClock(place.state_dir).sleep(150)
    assert b"2c85f3e1" not in ssh(place, "nvidia-smi -L").stdout
    assert client.reset("gpu-missing") == ["gpu-missing"]
    assert "gpu-missing" not in [s["scenario"] for s in client.status()]
    new = client.ensure("gpu-missing")
    assert not new.reused
    assert ssh(new, "cat /etc/machine-id").stdout == identity
    assert ssh(new, "ls /root/x").returncode == 2
    assert b"2c85f3e1" in ssh(new, "nvidia-smi -L").stdout


def test_a_machine_that_nobody_uses_goes_away(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.stop("healthy")
    monkeypatch.setenv("PROOFBOOK_LAB_IDLE_S", "0.1")
    place = client.ensure("healthy")
    pid = pid_of(place)
    until(lambda: not (lab / "healthy" / "daemon.json").exists(), "the idle machine is put away")
    until(lambda: not _runs(pid), "its process ended")
    assert place.scenario not in [s["scenario"] for s in client.status()]


def test_a_machine_whose_folder_is_cleared_away_ends(lab: Path) -> None:
    place = client.ensure("idle-gen1")
    pid = pid_of(place)
    shutil.rmtree(place.state_dir)
    until(lambda: not _runs(pid), "its process ended")


def test_another_host_key_is_refused_by_a_strict_client(lab: Path) -> None:
    place = client.ensure("host-key-changed")
    boot_id(place)
    ssh(place, "systemctl reboot")
    LabClock(place.state_dir).sleep(200)
    refused = ssh(place, "true")
    assert refused.returncode == 255
    assert b"HOST IDENTIFICATION HAS CHANGED" in refused.stderr or b"Host key verification failed" in refused.stderr


def test_a_machine_that_is_down_is_not_said_to_run(lab: Path) -> None:
    def up() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "proofbook.cli", "lab", "up", "never-comes-back"], capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    client.reset("never-comes-back")
    place = client.ensure("never-comes-back")
    assert (place.reachable, place.answers_in_s) == (True, None)
    ssh(place, "systemctl reboot")
    until(lambda: not client.ensure("never-comes-back").reachable, "it goes down")
    status, said = up()
    assert status == 7 and "lab:never-comes-back is down, and does not come back by itself" in said
    assert "proofbook lab reset never-comes-back" in said
    pid = pid_of(place)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _runs(pid), "its process is gone")
    assert "is down" in up()[1], "a new process does not heal it"
    client.reset("never-comes-back")
    assert up()[0] == 0


def test_a_machine_that_reboots_says_when_it_is_back(lab: Path) -> None:
    client.reset("healthy")
    place = client.ensure("healthy")
    ssh(place, "systemctl reboot")
    until(lambda: not client.ensure("healthy").reachable, "it goes down")
    down = client.ensure("healthy")
    assert down.answers_in_s is not None and 60 < down.answers_in_s <= 14 + 95 + 24
    LabClock(place.state_dir).sleep(down.answers_in_s + 0.5)
    assert client.ensure("healthy").reachable


def test_what_is_expected_is_not_in_the_machines_folder(lab: Path) -> None:
    client.ensure("late-xid79")
    client.stop("late-xid79")
    for path in (lab / "late-xid79").iterdir():
        text = path.read_bytes()
        assert b"verdict" not in text, path
        assert b"reboot-verification" not in text, path


def test_a_person_gets_a_prompt(lab: Path) -> None:
    place = client.ensure("healthy")
    words = [
        "ssh",
        "-tt",
        "-F",
        "none",
        "-p",
        str(place.port),
        "-i",
        place.identity_file,
        "-o",
        f"UserKnownHostsFile={place.known_hosts}",
        "-o",
        "BatchMode=yes",
        f"{place.user}@{place.address}",
    ]
    talk = subprocess.run(words, input=b"cd /etc\ncat hostname\nexit\n", capture_output=True, timeout=60)
    assert b"SIMULATED" in talk.stdout
    assert b"root@gpu-hv1:/etc# " in talk.stdout
    assert b"root@gpu-hv1:/etc# gpu-hv1\r\n" in talk.stdout
    assert talk.returncode == 0


def test_a_folder_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROOFBOOK_LAB_DIR", "/proc/nowhere")
    with pytest.raises(LabError, match="PROOFBOOK_LAB_DIR"):
        client.ensure("healthy")

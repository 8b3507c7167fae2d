"""The tiny shell and the ordinary commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def machine() -> Any:
    from .conftest import Bench

    return Bench("healthy")


@pytest.mark.parametrize(
    ("line", "stdout"),
    [
        ("echo a b | tr a-z A-Z 2>/dev/null | wc -w", "2\n"),
        ("printf '%s\\n' b a c | sort | head -n 2 | tail -1", "b\n"),
        ("true && echo yes || echo no", "yes\n"),
        ("false && echo yes || echo no", "no\n"),
        ("false; echo $?", "1\n"),
        ("x='a b'; echo \"$x\" '$x' \\$x", "a b $x $x\n"),
        ("for f in 1 2; do echo n$f; done | grep -c n", "2\n"),
        ("if [ -e /etc/hostname ]; then cat /etc/hostname; else echo none; fi", "gpu-hv1\n"),
        ("echo $(hostname)-$(id -u)", "gpu-hv1-0\n"),
        ("uname -r; id -un", "6.17.13-1-pve\nroot\n"),
        ("(cd /etc; pwd); pwd", "/etc\n/\n"),
        ("sh -c 'echo $0 $1' name one", "name one\n"),
        ("echo err 1>&2 2>/dev/null; cat /nothing 2>&1 | grep -o 'No such.*'", "No such file or directory\n"),
        ("echo ${NOT_SET:-default}; y=1; echo ${y:+set}", "default\nset\n"),
        ("n=0; while [ $n != 3 ]; do n=3; echo once; done", "once\n"),
        ("echo /sys/class/dmi/id/board_[nv]*", "/sys/class/dmi/id/board_name /sys/class/dmi/id/board_vendor\n"),
        ("echo 'a;b' \"c|d\" # a comment", "a;b c|d\n"),
        ("sudo -n -- id -u; timeout -k 5 20 hostname", "0\ngpu-hv1\n"),
        ("grep -E 'NAME=|ID=' /etc/os-release | head -1", 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n'),
        ("dmesg | grep -ci 'linux version'", "1\n"),
        ("command -v nvidia-smi", "/usr/bin/nvidia-smi\n"),
    ],
)
def test_lines(machine: Any, line: str, stdout: str) -> None:
    answer = machine.run(line)
    assert answer.stdout.decode() == stdout, answer.stderr


def test_files_are_written_moved_and_removed(machine: Any) -> None:
    machine.say("mkdir -p /root/d && echo one > /root/d/f && echo two >> /root/d/f")
    assert machine.say("cp /root/d/f /root/g && mv /root/g /root/h && cat /root/h") == "one\ntwo\n"
    assert machine.say("chmod 600 /root/h; stat -c '%a %s %F' /root/h") == "600 8 regular file\n"
    assert machine.run("rm -r /root/d /root/h; ls /root/d").status == 2
    assert machine.run("echo x > /proc/cmdline").stderr == b"sh: 1: cannot create /proc/cmdline: Permission denied\n"


def test_an_unknown_command_is_loud_and_noted(bench: Callable[[str], Any]) -> None:
    machine = bench("healthy")
    answer = machine.run("ls / > /dev/null; frobnicate --now")
    assert answer.status == 127
    assert answer.stderr == b"lab: command not found in this simulated machine: frobnicate\n"
    assert machine.unknown == ["frobnicate --now"]


def test_a_broken_line_is_a_syntax_error(machine: Any) -> None:
    for line in ("echo 'open", "if true; then", "| head", "echo $("):
        assert machine.run(line).status == 2


def test_an_ordinary_user_is_kept_out(bench: Callable[[str], Any]) -> None:
    machine = bench("no-dmesg-permission")
    assert machine.say("id -u") == "1000\n"
    assert machine.run("dmesg").stderr == b"dmesg: read kernel buffer failed: Operation not permitted\n"
    assert machine.run("sudo -n -- dmesg").stderr == b"sudo: a password is required\n"
    journal = machine.run("journalctl -k -b 0 -o json --no-pager")
    assert (journal.status, journal.stdout) == (1, b"")  # nobody of this user's has said anything yet
    assert journal.stderr == b"No journal files were opened due to insufficient permissions.\n"
    pid = machine.say("pgrep -f sglang.launch_server").split()[0]
    assert machine.run(f"cat /proc/{pid}/environ").stderr.endswith(b"Permission denied\n")
    assert b"sglang.launch_server" in machine.run(f"cat /proc/{pid}/cmdline").stdout

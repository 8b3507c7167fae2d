"""The agents under every shell that a machine may have as ``sh``, and through every login shell that passes them on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook import remote
from proofbook.model import Command, Result, command

NONCE = "00112233445566778899aabbccddeeff"
SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"], ["ksh"], ["mksh"]]
LOGIN_SHELLS = ["sh", "bash", "dash", "zsh", "fish", "tcsh", "csh", "ksh"]
EVERY_BYTE = bytes(range(256))


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    argv: list[str] = request.param
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    return argv


def spoken(argv: Sequence[str], request: bytes, *, env: dict[str, str] | None = None) -> tuple[bytes, bytes]:
    """Run an agent, give it a request, and close its input only when it has ended."""
    agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert agent.stdin and agent.stdout and agent.stderr
    with ThreadPoolExecutor(2) as pool, agent.stdin:
        said = [pool.submit(stream.read) for stream in (agent.stdout, agent.stderr)]
        agent.stdin.write(request)
        agent.stdin.flush()
        agent.wait(30)
        agent.stdin.close()
        return said[0].result(), said[1].result()


def gathered(argv: Sequence[str], commands: Sequence[Command], *, env: dict[str, str] | None = None) -> list[Result]:
    out, err = spoken(argv, remote.gather_request(commands, NONCE), env=env)
    results = remote.parse_gather(out, commands, NONCE)
    assert results is not None, (out, err)
    return results


def ran(argv: Sequence[str], asked: Command, *, env: dict[str, str] | None = None) -> Result:
    out, err = spoken(argv, remote.run_request(asked, NONCE), env=env)
    assert out.count(NONCE.encode()) == err.count(NONCE.encode()) == 2, (out, err)
    stdout, rest = out.split(NONCE.encode() + b"\n")[1:]
    stderr, line = err.partition(NONCE.encode() + b"\n")[2].split(NONCE.encode())
    assert rest == b""
    return remote.run_result(asked, stdout, stderr, line.decode())


COMMANDS = [
    command("printf", "%s|", "it's", "a\nb", "", "*", "$HOME", "\\n", "é\x01\x7f", "\n"),
    Command(("cat",), stdin=EVERY_BYTE),
    command("sh", "-c", "printf 'a\\0b'; printf 'c\\377' >&2; exit 3"),
    command("sh", "-c", "kill -9 $$"),
    command("no-such-program"),
    command("sh", "-c", "echo early; sleep 600", timeout_s=1.0),
    command("sh", "-c", "echo $LC_ALL; pwd"),
]


def judged(results: Sequence[Result]) -> None:
    assert results[0].stdout == b"it's|a\nb||*|$HOME|\\n|\xc3\xa9\x01\x7f|\n|"
    assert results[1].stdout == EVERY_BYTE
    assert (results[2].exit_status, results[2].stdout, results[2].stderr) == (3, b"a\0b", b"c\xff")
    assert (results[3].exit_status, results[3].stdout, results[3].stderr) == (137, b"", b"")
    assert results[4].exit_status == 127
    assert (results[5].timed_out, results[5].exit_status, results[5].stdout) == (True, None, b"early\n")
    assert results[6].text == "C\n/\n"


def test_gather_under_this_shell(shell: list[str]) -> None:
    judged(gathered([*shell, "-c", remote.GATHER, "proofbook-gather"], COMMANDS))


def test_run_under_this_shell(shell: list[str]) -> None:
    judged([ran([*shell, "-c", remote.RUN, "proofbook-run"], c) for c in COMMANDS])


@pytest.mark.parametrize("login", LOGIN_SHELLS)
def test_this_login_shell_passes_the_agents_on(login: str, tmp_path: Path) -> None:
    if shutil.which(login) is None:
        pytest.skip(f"{login} is not installed")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    (result,) = gathered([login, "-c", remote.GATHER_COMMAND], [COMMANDS[0]], env=env)
    assert result.stdout.startswith(b"it's|a\nb|")
    assert ran([login, "-c", remote.RUN_COMMAND], COMMANDS[0], env=env).stdout == result.stdout


#: What start files do to whoever logs in: words with and without a line end, on both streams.
CHATTY = "echo Welcome; printf 'no line end'; echo noise >&2; printf more >&2; "


def test_what_the_login_shell_says_first_is_not_the_commands(shell: list[str]) -> None:
    said = command("sh", "-c", "echo out; echo err >&2; exit 3")
    for result in (
        ran(["sh", "-c", CHATTY + 'exec "$@"', "login", *shell, "-c", remote.RUN, "proofbook-run"], said),
        gathered(["sh", "-c", CHATTY + 'exec "$@"', "login", *shell, "-c", remote.GATHER, "proofbook-gather"], [said])[0],
    ):
        assert (result.exit_status, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


def test_sudo_is_understood_after_the_words_of_a_login_shell(tmp_path: Path) -> None:
    for name, text in {"id": "echo 1000", "sudo": "echo 'sudo: a password is required' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = ran(["sh", "-c", CHATTY + 'exec "$@"', "login", "sh", "-c", remote.RUN], command("true", root=True), env=env)
    assert "`sudo -n` refuses: sudo: a password is required" in result.trouble


@pytest.mark.parametrize("line", [remote.GATHER_COMMAND, remote.RUN_COMMAND])
def test_nothing_in_the_command_line_means_anything_to_a_login_shell(line: str) -> None:
    assert line.count("'") == 2
    assert not set("\\!\n\t`") & set(line.replace("$!", ""))  # csh knows $! and leaves it alone
    assert line.isascii()


def test_a_command_that_says_too_much_is_ended(shell: list[str]) -> None:
    flood, mute = gathered([*shell, "-c", remote.GATHER], [Command(("yes",), max_output=100), command("true")])
    assert (flood.exit_status, flood.stdout) == (None, b"y\n" * 50)
    assert flood.lost_stdout >= 1024 * 1024 - 100
    assert "more than 100 bytes" in flood.trouble
    assert mute.ok


#: A kernel in which no signal reaches a process, as when it is stuck in a driver.
NO_SIGNALS = 'kill() { case $1 in -0) command kill "$@" ;; esac; }; '
#: The same for run, whose helpers speak to each other by USR1.
ONLY_USR1 = 'kill() { case $2 in USR1 | "$$") command kill "$@" ;; esac; }; '


def test_a_command_that_nothing_ends_holds_up_nobody() -> None:
    stuck = command("sleep", "6", timeout_s=0.1)
    results = gathered(["sh", "-c", NO_SIGNALS + remote.GATHER], [stuck] * 5 + [command("echo", "well")])
    for result in results[:5]:
        assert result.timed_out
        assert "not even SIGKILL" in result.trouble
        assert result.duration_s >= 0.1
        assert abs((datetime.now(UTC) - result.started_at).total_seconds()) < 600
    assert results[5].text == "well\n"
    ran_out = ran(["sh", "-c", ONLY_USR1 + remote.RUN], stuck)
    assert "not even SIGKILL" in ran_out.trouble


# ------------------------------------------------------------------------------------------------- root

FAKE_SUDO = {
    "grants": '#!/bin/sh\n[ "$1" = -n ] && [ "$2" = -- ] && shift 2 && exec env BECAME=root "$@"\n',
    "asks": "#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n",
}


@pytest.fixture(params=["grants", "asks", "missing"])
def sudo(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A PATH whose ``id`` says 1000 and whose ``sudo`` behaves as the name says."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    for name in ("sh", "sed", "cat", "date", "mktemp", "mkfifo", "rm", "setsid", "sleep", "head", "env", "printenv", "echo"):
        (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    if request.param != "missing":
        (tools / "sudo").write_text(FAKE_SUDO[request.param])
    for name in ("id", "sudo"):
        if (tools / name).exists():
            (tools / name).chmod(0o755)
    return request.param, {"PATH": str(tools)}


def test_root_is_asked_of_sudo_only_where_it_is_needed(sudo: tuple[str, dict[str, str]]) -> None:
    kind, env = sudo
    needs_root, plain = command("printenv", "BECAME", root=True), command("echo", "plain")
    gather = ["/bin/sh", "-c", remote.GATHER]
    run = ["/bin/sh", "-c", remote.RUN]
    for results in (gathered(gather, [needs_root, plain], env=env), [ran(run, needs_root, env=env), ran(run, plain, env=env)]):
        assert (results[1].text, results[1].as_root) == ("plain\n", False)
        if kind == "grants":
            assert (results[0].text, results[0].as_root, results[0].trouble) == ("root\n", True, "")
        else:
            assert results[0].exit_status is None
            assert not results[0].as_root
            assert "needs root" in results[0].trouble
            assert "sudo" in results[0].trouble


def test_a_command_of_root_may_say_that_it_failed(tmp_path: Path) -> None:
    """A failure of the command itself is its answer, not a refusal of sudo."""
    asked = command("sh", "-c", "echo 'no such unit' >&2; exit 1", root=True)
    result = remote.run_result(asked, b"", b"no such unit\n", "1 1700000000.5 100 101 0 1000")
    assert (result.exit_status, result.trouble, result.as_root) == (1, "", True)


# ------------------------------------------------------------------------------------- nowhere to write


def test_without_a_temporary_folder_the_machine_says_so(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "mktemp").write_text("#!/bin/sh\nexit 1\n")
    (tools / "mktemp").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    out, err = spoken(["sh", "-c", remote.GATHER], remote.gather_request([command("true")], NONCE), env=env)
    assert remote.parse_gather(out, [command("true")], NONCE) is None
    assert remote.refusal(out, err).startswith("no temporary folder can be written in /dev/shm")


@pytest.mark.parametrize("program", [remote.GATHER, remote.RUN])
def test_a_request_that_came_only_in_part_runs_nothing(program: str, tmp_path: Path) -> None:
    touch = command("touch", str(tmp_path / "touched"))
    whole = remote.gather_request([touch], NONCE) if program is remote.GATHER else remote.run_request(touch, NONCE)
    for size in (0, 5, len(whole) - 4):
        done = subprocess.run(["sh", "-c", program], input=whole[:size], capture_output=True, timeout=20, check=False)
        assert remote.refusal(done.stdout) == "the request came incomplete"
    assert not (tmp_path / "touched").exists()

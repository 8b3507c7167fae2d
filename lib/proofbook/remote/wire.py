"""How requests and answers of the two agents (gather.sh, run.sh) look on the wire; both directions.

gather, the request (lines; then standard input stays open until the answer is there)::

    <nonce>
    <lanes>
    <timeout in 1/100 s> <max_output in bytes> <root: 0 or 1> <input> <argument> …      one line a command
    end

and the answer; the nonce alone on a line separates its parts, so that output may hold any bytes::

    (whatever the login scripts print) <nonce>
    <clock of the machine, epoch seconds> <uptime at that time, 1/100 s> <uid>
    <number> <exit status or -> <start, uptime in 1/100 s> <end> <flag>                  one line a command, any order
    <nonce> (stdout of 1) <nonce> (stderr of 1) <nonce> … end

run, the request: ``<nonce> <size of the input>``, then ``<timeout in s> <root> <argument> …``, then the input's bytes.
The answer on both channels: whatever the login scripts print, then the nonce and a newline, then the command's own output; then
stdout ends with the nonce on a line, and stderr with ``<nonce> <exit status or -> <clock> <start> <end> <stage> <uid>``.

Arguments are shell words: in single quotes, a quote as ``"'"`` and a newline as ``"$N"``, so that a command is a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from proofbook.errors import TransportError
from proofbook.model import Command, Result

#: What a flag in gather's answer says.
ENDED, NO_SPACE, TIMED_OUT, UNKILLABLE = "0", "1", "2", "3"
#: How far over max_output a gathered command may write before it is ended: the temporary folder is memory.
SLACK = 1024 * 1024
#: Exit status of a command that SIGXFSZ ended.
_TOO_MUCH = 128 + 25

_WORD = re.compile(rb"""(?:'[^']*'|"'"|"\$N")+""")
_PIECE = re.compile(rb"""'([^']*)'|"(')"|"(\$N)\"""")


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """What the client asked of gather.sh."""

    nonce: str
    lanes: int
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the client asked of run.sh."""

    nonce: str
    command: Command


# ------------------------------------------------------------------------------------------------ words


def _word(argument: bytes) -> bytes:
    return b"'" + argument.replace(b"'", b"""'"'"'""").replace(b"\n", b"""'"$N"'""") + b"'"


def _words(arguments: Iterable[str]) -> bytes:
    return b" ".join(_word(a.encode("utf-8", "surrogateescape")) for a in arguments)


def _unword(word: bytes) -> str:
    plain = b"".join(m[1] if m[1] is not None else (m[2] or b"\n") for m in _PIECE.finditer(word))
    return plain.decode("utf-8", "surrogateescape")


def _unwords(text: bytes) -> tuple[str, ...]:
    return tuple(_unword(m[0]) for m in _WORD.finditer(text))


def _input(data: bytes) -> bytes:
    """Bytes as an argument of ``printf %b``, the one way to write a NUL in POSIX sh."""
    return re.sub(rb"[^A-Za-z0-9 ./_-]", lambda m: b"\\0%03o" % m[0][0], data)


def _uninput(text: bytes) -> bytes:
    return re.sub(rb"\\0([0-7]{3})", lambda m: bytes((int(m[1], 8),)), text)


# ----------------------------------------------------------------------------------------------- gather


def gather_request(commands: Sequence[Command], nonce: str, *, lanes: int = 4) -> bytes:
    """The bytes for gather.sh's standard input. ``nonce``: hex digits that no output can hold by chance."""
    lines = [nonce.encode(), str(max(1, lanes)).encode()]
    for c in commands:
        numbers = f"{round(c.timeout_s * 100)} {c.max_output} {int(c.root)} ".encode()
        lines.append(numbers + _word(_input(c.stdin)) + b" " + _words(c.argv))
    return b"\n".join([*lines, b"end", b""])


def read_gather_request(data: bytes) -> GatherRequest | None:
    """The request in ``data``, or None while it is not complete. Raises TransportError for anything else."""
    if not data.endswith(b"\nend\n"):
        return None
    nonce, lanes, *lines = data[: -len(b"\nend\n")].split(b"\n")
    try:
        commands = tuple(_gather_line(line) for line in lines)
        return GatherRequest(nonce.decode("ascii"), int(lanes), commands)
    except ValueError as error:
        raise TransportError(f"not a request of gather: {error}") from error


def _gather_line(line: bytes) -> Command:
    timeout, room, root, words = line.split(b" ", 3)
    first, *_ = _WORD.findall(words)
    _, *argv = _unwords(words)
    stdin = _uninput(_unword(first).encode("utf-8", "surrogateescape"))
    return Command(tuple(argv), int(timeout) / 100, root == b"1", stdin, int(room))


def write_gather_answer(request: GatherRequest, results: Sequence[Result], *, uid: int) -> bytes:
    """What gather.sh would answer: the same framing, for a machine that is simulated."""
    epoch = min((r.started_at for r in results), default=datetime.fromtimestamp(0, UTC))
    separator = request.nonce.encode() + b"\n"
    table = "".join(
        f"{n} {'-' if r.exit_status is None else r.exit_status} {_cs(r.started_at - epoch)} "
        f"{_cs(r.started_at - epoch) + round(r.duration_s * 100)} {TIMED_OUT if r.timed_out else ENDED}\n"
        for n, r in enumerate(results, 1)
    )
    parts = [b"", f"{epoch.timestamp():.6f} 0 {uid}\n{table}".encode()]
    for r in results:
        parts += [r.stdout, r.stderr]
    return separator.join([*parts, b"end\n"])


def parse_gather(data: bytes, commands: Sequence[Command], nonce: str) -> list[Result] | None:
    """The results, one a command in the same order, or None while the answer is not complete.

    Raises TransportError when the machine refused (no temporary folder, no usable shell, …) or answers out of frame.
    """
    separator = nonce.encode() + b"\n"
    if not data.endswith(separator + b"end\n"):
        return None
    parts = data.split(separator)
    if len(parts) < 3:
        return None
    _, head, *outputs, _ = parts
    clock, *table = head.decode("ascii", "replace").splitlines()
    # WHY: an output of exactly "end" looks like the end of the answer while it is the last thing that has come
    if len(outputs) < 2 * len(table):
        return None
    wall, anchor, uid = clock.split()
    rows = {int(row[0]): row[1:] for row in (line.split() for line in table) if row}
    if len(outputs) != 2 * len(commands) or rows.keys() != set(range(1, len(commands) + 1)):
        raise TransportError(
            f"the answer of gather is out of frame: {len(outputs)} outputs, {len(rows)} rows for {len(commands)} commands"
        )
    epoch = _epoch(wall)
    results = []
    for n, c in enumerate(commands, 1):
        status, start, end, flag = rows[n]
        result = Result(
            c,
            None if status == "-" or flag in (TIMED_OUT, UNKILLABLE) else int(status),
            outputs[2 * n - 2],
            outputs[2 * n - 1],
            epoch + timedelta(seconds=(int(start) - int(anchor)) / 100),
            (int(end) - int(start)) / 100,
            timed_out=flag in (TIMED_OUT, UNKILLABLE),
        )
        results.append(_judged(_capped(result), flag, int(uid)))
    return results


def refusal(data: bytes, stderr: bytes = b"") -> str:
    """Why an agent gave no answer, out of what came instead."""
    said = data.decode("utf-8", "backslashreplace").strip().splitlines()
    refused = [line.removeprefix("refused ") for line in said if line.startswith("refused ")]
    if refused:
        return refused[-1]
    last = said + stderr.decode("utf-8", "backslashreplace").strip().splitlines()
    return f"the login shell did not run the command: {last[-1][:300]}" if last else "the login shell ended without a word"


# -------------------------------------------------------------------------------------------------- run


def run_request(command: Command, nonce: str) -> bytes:
    """The bytes for run.sh's standard input, the command's own input included."""
    head = f"{nonce} {len(command.stdin)}\n{command.timeout_s:.10g} {int(command.root)} "
    return head.encode() + _words(command.argv) + b"\n" + command.stdin


def read_run_request(data: bytes) -> RunRequest | None:
    """The request in ``data``, or None while it is not complete. Raises TransportError for anything else."""
    head, found, rest = data.partition(b"\n")
    line, found, stdin = rest.partition(b"\n")
    if not found:
        return None
    try:
        nonce, size = head.decode("ascii").split()
        timeout, root, words = line.split(b" ", 2)
        if len(stdin) < int(size):
            return None
        return RunRequest(nonce, Command(_unwords(words), float(timeout), root == b"1", stdin[: int(size)]))
    except ValueError as error:
        raise TransportError(f"not a request of run: {error}") from error


def write_run_start(request: RunRequest) -> bytes:
    """What run.sh says on stdout and on stderr before the command's own output, for a machine that is simulated."""
    return request.nonce.encode() + b"\n"


def write_run_answer(request: RunRequest, result: Result, *, uid: int) -> tuple[bytes, bytes]:
    """What run.sh would answer on stdout and stderr after that, for a machine that is simulated."""
    status = "-" if result.exit_status is None else str(result.exit_status)
    times = f"{result.started_at.timestamp():.6f} 0 {round(result.duration_s * 100)}"
    tail = f"{request.nonce} {status} {times} {int(result.timed_out)} {uid}\n"
    return result.stdout + f"{request.nonce}\n".encode(), result.stderr + tail.encode()


def run_result(command: Command, stdout: bytes, stderr: bytes, tail: str, lost: tuple[int, int] = (0, 0)) -> Result:
    """The result out of the output and the last line on stderr (without the nonce). ``lost``: bytes not kept."""
    status, wall, start, end, stage, uid = tail.split()
    timed_out = int(stage) > 0
    result = Result(
        command,
        None if status == "-" or timed_out else int(status),
        stdout,
        stderr,
        _epoch(wall),
        (int(end) - int(start)) / 100,
        timed_out=timed_out,
        lost_stdout=lost[0],
        lost_stderr=lost[1],
    )
    return _judged(result, UNKILLABLE if status == "-" else TIMED_OUT if timed_out else ENDED, int(uid))


# --------------------------------------------------------------------------------------------- together


def _cs(span: timedelta) -> int:
    return round(span.total_seconds() * 100)


def _epoch(text: str) -> datetime:
    """``date +%s.%N``; a date without ``%N`` (busybox) prints the letter, and the whole second must do."""
    seconds, _, fraction = text.partition(".")
    micro = int(fraction[:6].ljust(6, "0")) if fraction.isdigit() else 0
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=micro)


def _capped(result: Result) -> Result:
    most = result.command.max_output
    return replace(
        result,
        stdout=result.stdout[:most],
        stderr=result.stderr[:most],
        lost_stdout=max(0, len(result.stdout) - most),
        lost_stderr=max(0, len(result.stderr) - most),
    )


def _judged(result: Result, flag: str, uid: int) -> Result:
    """The result with its trouble, if it has one, and whether root ran it."""
    c = result.command
    trouble = ""
    if flag == UNKILLABLE:
        trouble = f"it did not finish within {c.timeout_s:g} s, and not even SIGKILL ended it (a process stuck in the kernel?)"
    elif flag == TIMED_OUT:
        trouble = f"it did not finish within {c.timeout_s:g} s and was ended"
    elif flag == NO_SPACE:
        trouble = "the machine's temporary folder ran full, so its output may be cut"
    elif result.exit_status == _TOO_MUCH and (result.lost_stdout or result.lost_stderr):
        more = result.lost_stdout + result.lost_stderr
        trouble = f"it was ended because it said more than {c.max_output} bytes (at least {more} more)"
    elif c.root and uid != 0:
        trouble = _sudo_trouble(result)
    if trouble:
        return replace(result, exit_status=None, trouble=trouble, as_root=uid == 0)
    return replace(result, as_root=c.root or uid == 0)


_SUDO_REFUSES = re.compile(
    r"sudo: (?:a password is required|a terminal is required|sorry, you must have a tty|no tty present)"
    r"|.* is not in the sudoers file|Sorry, user .* (?:is not allowed to execute|may not run sudo)"
    r"|setsid: failed to execute sudo|.*\bsudo: not found"
)


def _sudo_trouble(result: Result) -> str:
    said = result.error_text.strip().splitlines()
    if result.exit_status in (1, 127) and not result.stdout and said and _SUDO_REFUSES.match(said[0]):
        return f"it needs root, and `sudo -n` refuses: {said[0][:200]} (allow it without a password, or log in as root)"
    return ""

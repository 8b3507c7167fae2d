"""The framing of the agents: every request and answer can be read back, and what is out of frame is no answer."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook import remote
from proofbook.errors import TransportError
from proofbook.model import Command, Result, command

NONCE = "00112233445566778899aabbccddeeff"
THEN = datetime(2026, 3, 1, 3, 12, 44, 120000, UTC)

arguments = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
commands = st.builds(
    Command,
    argv=st.lists(arguments, min_size=1, max_size=5).map(tuple),
    timeout_s=st.integers(1, 100_000).map(lambda cs: cs / 100),
    root=st.booleans(),
    stdin=st.binary(max_size=300),
    max_output=st.integers(0, 1 << 30),
)
results = st.builds(
    Result,
    command=commands,
    exit_status=st.integers(0, 255),
    stdout=st.binary(max_size=300),
    stderr=st.binary(max_size=300),
    started_at=st.integers(0, 10_000).map(lambda cs: THEN + timedelta(milliseconds=10 * cs)),
    duration_s=st.integers(0, 10_000).map(lambda cs: cs / 100),
)


def whole(results: list[Result] | None) -> list[Result]:
    assert results is not None, "the answer is not complete"
    return results


@given(st.lists(commands, max_size=5))
def test_a_gather_request_reads_back(asked: list[Command]) -> None:
    request = remote.read_gather_request(remote.gather_request(asked, NONCE, lanes=3))
    assert request == remote.GatherRequest(NONCE, 3, tuple(asked))


@given(commands)
def test_a_run_request_reads_back(asked: Command) -> None:
    request = remote.read_run_request(remote.run_request(asked, NONCE))
    assert request is not None
    assert request.nonce == NONCE
    assert replace(request.command, max_output=asked.max_output) == asked


@given(commands)
def test_a_request_that_is_not_complete_is_none_yet(asked: Command) -> None:
    gather = remote.gather_request([asked], NONCE)
    assert all(remote.read_gather_request(gather[:n]) is None for n in range(len(gather)))
    run = remote.run_request(asked, NONCE)
    assert all(remote.read_run_request(run[:n]) is None for n in range(len(run)))


@given(st.lists(results, min_size=1, max_size=4), st.sampled_from([0, 1000]))
def test_a_gather_answer_reads_back(said: list[Result], uid: int) -> None:
    said = [replace(r, command=replace(r.command, root=False, max_output=300)) for r in said]
    asked = [r.command for r in said]
    answer = remote.write_gather_answer(remote.GatherRequest(NONCE, 4, tuple(asked)), said, uid=uid)
    for noise in (b"", b"Welcome\nend\n"):
        got = remote.parse_gather(noise + answer, asked, NONCE)
        assert got == [replace(r, as_root=uid == 0) for r in said]
    assert all(remote.parse_gather(answer[:n], asked, NONCE) is None for n in range(len(answer)))


def test_a_run_answer_reads_back() -> None:
    asked = command("true")
    said = Result(asked, 3, b"out", b"err", THEN, 0.25)
    request = remote.RunRequest(NONCE, asked)
    assert remote.write_run_start(request) == NONCE.encode() + b"\n"
    stdout, stderr = remote.write_run_answer(request, said, uid=1000)
    assert stdout == b"out" + NONCE.encode() + b"\n"
    text, _, line = stderr.partition(NONCE.encode())
    assert remote.run_result(asked, b"out", text, line.decode()) == said


def test_a_timed_out_answer_has_no_exit_status() -> None:
    asked = command("sleep", "9", timeout_s=2)
    said = Result(asked, None, b"part", b"", THEN, 2.5, timed_out=True)
    answer = remote.write_gather_answer(remote.GatherRequest(NONCE, 4, (asked,)), [said], uid=0)
    (gathered,) = whole(remote.parse_gather(answer, [asked], NONCE))
    stderr = remote.write_run_answer(remote.RunRequest(NONCE, asked), said, uid=0)[1]
    ran = remote.run_result(asked, b"part", b"", stderr.decode().removeprefix(NONCE))
    for result in (gathered, ran):
        assert (result.timed_out, result.exit_status, result.stdout) == (True, None, b"part")
        assert "2 s" in result.trouble


def test_an_answer_for_other_commands_is_out_of_frame() -> None:
    asked = command("true")
    said = Result(asked, 0, b"", b"", THEN, 0.0)
    answer = remote.write_gather_answer(remote.GatherRequest(NONCE, 4, (asked,)), [said], uid=0)
    with pytest.raises(TransportError, match="out of frame"):
        remote.parse_gather(answer, [asked, asked], NONCE)


@pytest.mark.parametrize(
    ("flag", "status", "trouble"),
    [("1", "0", "ran full"), ("2", "143", "was ended"), ("3", "-", "not even SIGKILL")],
)
def test_a_flag_is_trouble_and_no_exit_status(flag: str, status: str, trouble: str) -> None:
    n = NONCE.encode() + b"\n"
    answer = b"".join([n, f"1700000000.5 100 0\n1 {status} 100 150 {flag}\n".encode(), n, b"out", n, b"", n, b"end\n"])
    (result,) = whole(remote.parse_gather(answer, [command("x")], NONCE))
    assert result.exit_status is None
    assert trouble in result.trouble
    assert (result.started_at.timestamp(), result.duration_s) == (1700000000.5, 0.5)


def test_a_date_without_nanoseconds_will_do() -> None:
    result = remote.run_result(command("true"), b"", b"", "0 1700000000.%N 100 101 0 0")
    assert result.started_at == datetime.fromtimestamp(1700000000, UTC)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"refused no temporary folder\n", "no temporary folder"),
        (
            b"This account is currently not available.\n",
            "the login shell did not run the command: This account is currently not available.",
        ),
        (b"", "the login shell ended without a word"),
    ],
)
def test_what_comes_instead_of_an_answer_is_told(said: bytes, why: str) -> None:
    assert remote.refusal(said) == why


def test_an_output_that_says_end_is_not_the_end() -> None:
    asked = [command("echo", "end"), command("true")]
    said = [Result(asked[0], 0, b"end\n", b"", THEN, 0.0), Result(asked[1], 0, b"", b"", THEN, 0.0)]
    answer = remote.write_gather_answer(remote.GatherRequest(NONCE, 4, tuple(asked)), said, uid=0)
    cut = answer[: answer.index(b"end\n") + 4]
    assert remote.parse_gather(cut, asked, NONCE) is None
    results = remote.parse_gather(answer, asked, NONCE)
    assert results is not None and [r.stdout for r in results] == [b"end\n", b""]

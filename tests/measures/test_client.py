"""The load client: every trouble of a server is an answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from proofbook.measures.client import Ask, Client, Reply
from proofbook.measures.prompts import load

WARM = load().warm_up


def asked(bench: Any, *asks: Ask, at_once: int = 1, **more: Any) -> list[Reply]:
    with Client("127.0.0.1", bench.port, bench.host.clock, answer_s=60) as client:
        return list(client.all(asks, at_once=at_once, **more))


def test_a_good_answer_comes_whole(bench: Any, sglang: Any) -> None:
    (reply,) = asked(bench, Ask.generate(WARM))
    assert reply.ok
    assert reply.http == 200
    assert reply.json()["meta_info"]["completion_tokens"] == 32
    assert sglang.bodies[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 32}
    assert sglang.bodies[0]["text"].startswith("<|im_start|>user\nName the four")


def test_as_many_are_in_flight_as_asked_for_and_no_more(bench: Any, sglang: Any) -> None:
    import threading

    # Each of three waits for the other two: fewer in flight would hang, and with a fourth the count below would say so.
    meet = threading.Barrier(3, timeout=20)
    sglang.before_answer = lambda _n, _body: meet.wait() * 0 or None
    replies = asked(bench, *[Ask.generate(WARM)] * 9, at_once=3)
    assert [r.ok for r in replies] == [True] * 9
    assert sglang.most_at_once == 3


def test_a_hang_ends_by_the_hosts_clock(bench: Any, sglang: Any, clock: Any) -> None:
    sglang.before_answer = lambda _n, _body: "hang"
    sglang.on_hang = lambda: clock.push(61)
    (reply,) = asked(bench, Ask.generate(WARM))
    assert (reply.trouble, reply.problem) == ("deadline", "no answer within 60 s")


def test_a_hang_ends_by_the_real_clock_too(bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda _n, _body: "hang"
    with Client("127.0.0.1", bench.port, bench.host.clock, answer_s=0.2) as client:
        assert client.one(Ask.generate(WARM)).trouble == "deadline"


def test_a_server_that_drips_for_ever_ends_too(bench: Any, sglang: Any, clock: Any) -> None:
    sglang.before_answer = lambda _n, _body: "drip"
    sglang.on_hang = lambda: clock.push(61)
    (reply,) = asked(bench, Ask.generate(WARM))
    assert reply.trouble == "deadline"


def test_a_connection_that_is_closed_without_an_answer(bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda _n, _body: "close"
    (reply,) = asked(bench, Ask.generate(WARM))
    assert (reply.trouble, reply.http) == ("closed", None)
    assert "closed without a whole answer" in reply.problem


def test_nobody_listens(clock: Any) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else is given the port
        with Client("127.0.0.1", held.getsockname()[1], clock) as client:
            reply = client.get("/server_info")
    assert reply.trouble == "refused"
    assert reply.problem.startswith("no connection")


def test_what_a_server_sets_comes_back_in_no_request(bench: Any, sglang: Any) -> None:
    sglang.headers["Set-Cookie"] = "a=\xe9\xff"
    replies = asked(bench, *[Ask.generate(WARM)] * 3, at_once=2)
    assert [r.trouble for r in replies] == [""] * 3


def test_an_answer_that_breaks_the_reader_is_no_traceback(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "not in range")

    monkeypatch.setattr(Client, "_send", broken)
    replies = asked(bench, *[Ask.generate(WARM)] * 3, at_once=2)
    assert [r.trouble for r in replies] == ["unreadable"] * 3
    assert replies[0].problem.startswith("its answer could not be read: UnicodeEncodeError: 'ascii' codec")


def test_an_http_error_is_an_answer(bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda _n, _body: 503
    (reply,) = asked(bench, Ask.generate(WARM))
    assert (reply.trouble, reply.http, reply.ok) == ("", 503, False)


def test_after_stop_nothing_more_is_sent(bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda n, _body: "close" if n == 3 else None
    replies = asked(bench, *[Ask.generate(WARM)] * 9, stop=lambda r: bool(r.trouble))
    assert [r.trouble for r in replies] == ["", "", "closed"]
    assert len(sglang.bodies) == 3


def test_an_answer_without_an_end_is_cut(bench: Any, sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proofbook.measures.client._MOST_BYTES", 100)
    (reply,) = asked(bench, Ask.generate(WARM))
    assert (reply.trouble, reply.body) == ("too-big", b"")


def test_a_proxy_in_the_environment_is_not_asked(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    (reply,) = asked(bench, Ask.generate(WARM))
    assert reply.ok


def test_it_works_inside_a_loop_that_runs_already(bench: Any) -> None:
    async def cell() -> list[Reply]:
        return asked(bench, Ask.generate(WARM))

    assert asyncio.run(cell())[0].ok


def test_going_away_takes_back_what_is_in_flight(bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda n, _body: "hang" if n > 1 else None
    with Client("127.0.0.1", bench.port, bench.host.clock, answer_s=600) as client:
        replies = client.all([Ask.generate(WARM)] * 3, at_once=1)
        assert next(replies).ok
        replies.close()  # type: ignore[attr-defined]
    assert len(sglang.bodies) <= 2

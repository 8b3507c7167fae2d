"""Reading answers, and watching the unit meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.host import WallClock
from proofbook.measures.client import Ask, Reply
from proofbook.measures.live import Live, completed, on_the_bench, request_of, speculation_of
from proofbook.measures.prompts import load
from proofbook.measures.serving import Baseline

GREEDY = load().control["greedy"]
GOOD = {
    "finish_reason": {"type": "length", "length": 256}, "prompt_tokens": 40, "completion_tokens": 256, "cached_tokens": 0,
    "e2e_latency": 1.28,
}  # fmt: skip


def reply(meta: Any = None, *, text: Any = "1, 2", http: int = 200, body: bytes | None = None) -> Reply:
    said = json.dumps({"text": text, "meta_info": GOOD if meta is None else meta}).encode() if body is None else body
    return Reply(Ask.generate(GREEDY), http=http, body=said)


NAMES = [*GOOD, "text", "meta_info"]

#: What releases say of speculation in meta_info, after the table of names by version.
SPECULATIVE = {
    "0.5.3": {"spec_verify_ct": 64},
    "0.5.5": {"spec_verify_ct": 64, "spec_accept_rate": 0.66, "spec_accept_length": 4.0},
    "0.5.9": {
        "spec_verify_ct": 64, "spec_accept_rate": 0.66, "spec_accept_length": 4.0, "spec_accept_token_num": 256,
        "spec_draft_token_num": 384, "spec_accept_histogram": [1, 2],
    },
    "0.5.11": {
        "spec_verify_ct": 64, "spec_accept_rate": 0.6, "spec_accept_length": 4.0, "spec_accepted_drafts": 192,
        "spec_proposed_drafts": 320,
    },
    "0.5.23": {
        "spec_verify_ct": 64, "spec_accept_rate": 0.6, "spec_accept_length": 4.0, "spec_num_correct_drafts": 192,
        "spec_num_proposed_drafts": 320,
    },
}  # fmt: skip


@pytest.mark.parametrize("version", SPECULATIVE)
def test_the_accept_length_needs_no_version(version: str) -> None:
    request = request_of(reply({**GOOD, **SPECULATIVE[version]}))
    assert (request["ok"], request["verify_ct"], request["accept_length"]) == (True, 64, 4.0)
    assert request["s_per_token"] == pytest.approx(0.005)
    assert speculation_of([request]) == "on"


def test_without_verify_steps_speculation_is_off() -> None:
    request = request_of(reply())
    assert (request["verify_ct"], request["accept_length"]) == (None, None)
    assert speculation_of([request]) == "off"


def test_an_answer_of_one_token_tells_nothing_of_speculation() -> None:
    assert speculation_of([request_of(reply({**GOOD, "completion_tokens": 1}))]) == "unknown"
    assert speculation_of([]) == "unknown"


@pytest.mark.parametrize(
    ("bad", "trouble", "words"),
    [
        (reply(body=b"<html>"), "answer", "not one of /generate"),
        (reply(body=b"[]"), "answer", "not one of /generate"),
        (reply(body=b'{"text": "x"}'), "answer", "no meta_info"),
        (reply(text=None), "answer", "no text"),
        (reply({**GOOD, "completion_tokens": 0}), "answer", "no token"),
        (reply({**GOOD, "completion_tokens": "256"}), "answer", "no token"),
        (reply({**GOOD, "finish_reason": {"type": "abort", "message": "out of slots"}}), "aborted", "out of slots"),
        (reply({**GOOD, "finish_reason": {"type": "abort"}}), "aborted", "no reason given"),
        (reply({**GOOD, "completion_tokens": 4000}), "answer", "generated 4000 tokens where 256 were asked for"),
        (reply(body=b"[" * 100_000), "answer", "not one of /generate"),
        (reply({**GOOD, "completion_tokens": int("9" * 400)}), "answer", "has no token"),
        (reply(http=500, body=b'{"error": {"message": "NaN in the logits"}}'), "http", "HTTP 500: NaN in the logits"),
        (reply(http=422, body=b'{"detail": "bad schema"}'), "http", "HTTP 422: bad schema"),
        (reply(http=401, body=b""), "unauthorized", "HTTP 401: no text"),
        (reply(http=403, body=b'{"error": "Forbidden"}'), "unauthorized", "HTTP 403: Forbidden"),
        (Reply(Ask.generate(GREEDY), trouble="deadline", problem="no answer within 120 s"), "deadline", "within 120 s"),
    ],
)
def test_what_is_no_good_answer_says_so(bad: Reply, trouble: str, words: str) -> None:
    request = request_of(bad)
    assert (request["ok"], request["trouble"]) == (False, trouble)
    assert words in request["problem"]
    assert completed([request]) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "text", "meta_info"]), inner, max_size=6)
        ),
        max_leaves=12,
    )
)
def test_whatever_a_server_says_is_read_without_a_traceback(said: Any) -> None:
    request = request_of(reply(body=json.dumps(said).encode()))
    assert request["ok"] is not bool(request["trouble"])
    json.dumps(request, allow_nan=False)


# ------------------------------------------------------------------------------------------------------------ live


@pytest.fixture
def live(bench: Any, service: Any) -> Any:
    with on_the_bench(Baseline(service), bench, service, None, 60) as opened:
        yield opened


def test_the_port_is_that_of_the_service(live: Live, bench: Any) -> None:
    assert bench.tunnelled == [(31000, None)]


def test_every_answer_is_kept_byte_for_byte(live: Live, bench: Any) -> None:
    requests, replies = live.ask("greedy", [Ask.generate(GREEDY)] * 3, at_once=2)
    (kept,) = bench.kept.values()
    lines = [json.loads(line) for line in kept.splitlines()]
    assert len(lines) == len(requests) == 3
    assert [line["answer"].encode() for line in lines] == [r.body for r in replies]
    assert lines[0]["body"]["text"] == GREEDY.body()["text"]
    assert live.evidence == ["e0001"]


def test_what_is_not_utf8_is_kept_too(live: Live, bench: Any) -> None:
    live._keep("odd", [Reply(Ask("/x"), http=200, body=b"\xff\xfe")])
    assert json.loads(next(iter(bench.kept.values())))["answer_base64"] == "//4="


def test_a_server_that_goes_away_is_not_asked_the_rest(live: Live, bench: Any, sglang: Any) -> None:
    sglang.before_answer = lambda n, _body: "close" if n == 2 else None
    requests, _ = live.ask("load", [Ask.generate(GREEDY)] * 6, at_once=1)
    assert len(requests) == 2
    assert live.problems == [
        "load: 1 of 6 requests were answered; control-count: the connection was closed without a whole answer"
    ]
    assert live.ask("more", [Ask.generate(GREEDY)], at_once=1) == ([], [])
    assert len(sglang.bodies) == 2


def test_an_http_error_is_no_reason_to_stop(live: Live, sglang: Any) -> None:
    sglang.before_answer = lambda n, _body: 500 if n == 1 else None
    requests, _ = live.ask("load", [Ask.generate(GREEDY)] * 3, at_once=1)
    assert [r["ok"] for r in requests] == [False, True, True]
    assert not live.gone


def test_a_service_without_a_way_to_it_is_a_problem_and_no_error(bench: Any, service: Any) -> None:
    bench.no_way = "the container's address cannot be learnt"
    with on_the_bench(Baseline(service), bench, service, None, 60) as live:
        requests, _ = live.ask("load", [Ask.generate(GREEDY)] * 6, at_once=2)
        assert [r["trouble"] for r in requests] == ["not-asked"]
        assert "cannot be learnt" in live.problems[0]
        assert not live.config()["known"]


@pytest.mark.parametrize(
    ("then", "change"),
    [
        ({"main_pid": 5000}, "main process 4711 -> 5000"),
        ({"n_restarts": 1}, "automatic restarts 0 -> 1"),
        ({"invocation_id": "c" * 32}, "invocation aaaaaaaa -> cccccccc"),
        ({"active": "failed", "sub": "failed", "result": "signal"}, "the unit is failed (failed), result signal"),
    ],
)
def test_another_process_is_a_change(
    live: Live, bench: Any, facts: Callable[..., Any], then: dict[str, Any], change: str
) -> None:
    bench.unit = lambda n: facts() if n == 1 else facts(**then)
    live.look("before")
    live.look("after 'long'")
    steady = live.steady()
    assert steady["steady"] is False
    assert steady["changes"] == [f"after 'long': {change}"]
    assert live.problems == steady["changes"]


def test_a_look_without_an_answer_is_not_steady_but_unknown(live: Live, bench: Any, facts: Callable[..., Any]) -> None:
    bench.unit = lambda n: "the machine cannot be asked" if n == 2 else facts()
    for when in ("one", "two", "three"):
        live.look(when)
    assert live.steady()["steady"] is None
    assert [life["known"] for life in live.lives] == [True, False, True]


def test_a_restart_behind_a_look_without_an_answer_is_found(live: Live, bench: Any, facts: Callable[..., Any]) -> None:
    bench.unit = lambda n: {1: facts(), 2: "no answer", 3: facts(main_pid=9)}[n]
    for when in ("one", "two", "three"):
        live.look(when)
    assert live.steady()["changes"] == ["three: main process 4711 -> 9"]


def test_one_look_alone_shows_nothing(live: Live) -> None:
    live.look("once")
    assert live.steady()["steady"] is None


def test_the_older_name_of_server_info_is_tried(live: Live, sglang: Any) -> None:
    sglang.info_path = "/get_server_info"
    sglang.info |= {
        "speculative_algorithm": "EAGLE", "speculative_num_steps": 5, "mamba_scheduler_strategy": "extra_buffer",
        "internal_states": [{"effective_max_running_requests_per_dp": 6, "avg_spec_accept_length": 3.4}],
    }  # fmt: skip
    config = live.config()
    assert (config["known"], config["endpoint"]) == (True, "/get_server_info")
    assert (config["speculative_algorithm"], config["mamba_strategy"]) == ("EAGLE", "extra_buffer")
    assert (config["effective_max_running"], config["avg_accept_length"]) == (6, 3.4)
    assert config["disable_radix_cache"] is None


def test_traffic_does_not_change_the_digest_of_the_arguments(live: Live, sglang: Any) -> None:
    sglang.info["internal_states"] = [{"avg_spec_accept_length": 3.4}]
    before = live.config()["sha256"]
    sglang.info["internal_states"] = [{"avg_spec_accept_length": 1.0}]
    assert live.config()["sha256"] == before
    sglang.info["tp_size"] = 8
    assert live.config()["sha256"] != before


def test_a_server_that_does_not_tell_its_arguments(live: Live, sglang: Any) -> None:
    sglang.info_path = "/nowhere"
    config = live.config()
    assert (config["known"], config["effective_max_running"]) == (False, None)
    assert "HTTP 404" in config["unknown"]


def test_a_flush_that_is_refused_is_tried_again_and_then_told(live: Live, sglang: Any, clock: Any) -> None:
    sglang.flush_status = 400
    assert live.flush() is False
    assert sglang.flushes == 5
    assert clock.slept == [1.0] * 5


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_a_number_without_end_is_none(digits: int) -> None:
    body = b'{"text": "1", "meta_info": {"completion_tokens": 3, "e2e_latency": %s}}' % (b"9" * digits)
    request = request_of(reply(body=body))
    assert (request["ok"], request["tokens"], request["e2e_s"]) == (True, 3, None)


@pytest.mark.parametrize("states", [7, "7", None, [7, None, {"avg_spec_accept_length": 10**30}]])
def test_whatever_a_server_says_of_its_state(live: Live, sglang: Any, states: Any) -> None:
    sglang.info["internal_states"] = states
    assert live.config()["effective_max_running"] is None


def test_a_servers_time_far_shorter_than_the_wait_is_not_believed(bench: Any, service: Any, sglang: Any) -> None:
    bench.host.clock = WallClock()
    with on_the_bench(Baseline(service), bench, service, None, 60) as live:
        requests: list[dict[str, Any]] = [{**request_of(reply()), "e2e_s": 0.001, "client_s": 9.0}]
        live._judge("load", requests, 1)
    assert any("far shorter than was waited for here (first: 0.001 s against 9.000 s)" in p for p in live.problems)
    assert requests[0]["s_per_token"] is None, "no figure is made of it"


def test_a_servers_time_longer_than_the_wait_is_not_believed(bench: Any, service: Any, sglang: Any) -> None:
    sglang.pace_s = 10.0
    for clock, told in ((bench.host.clock, False), (WallClock(), True)):
        bench.host.clock = clock
        with on_the_bench(Baseline(service), bench, service, None, 60) as live:
            live.ask(f"load {told}", [Ask.generate(GREEDY)], at_once=1)
        assert any("cannot be believed" in p for p in live.problems) is told

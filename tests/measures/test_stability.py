"""The stability window, on a real HTTP server and a clock that is pushed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from proofbook.measures.stability import Stability
from proofbook.model import Measurement, Probe


@dataclass(frozen=True)
class Memory(Probe[int]):
    name: ClassVar[str] = "test.Memory"

    def ask(self) -> Any:
        raise AssertionError("the bench answers it")


@pytest.fixture
def stability(bench: Any, service: Any) -> Callable[..., Measurement]:
    return lambda **more: Stability(service, **{"minutes": 2, "concurrency": 2, **more}).take(bench)


def test_it_holds(stability: Callable[..., Measurement], bench: Any, sglang: Any) -> None:
    sglang.accept = 4.0
    found = stability()
    value, load = found.value, found.value["load"]
    assert found.problems == ()
    assert value["steady"]["steady"] is True
    assert (value["lasted_s"], value["ended_early"], value["looks"]) == (120.0, "", 5)
    assert load["completed"] == load["asked"] == load["waves"] * 6 > 100
    assert load["accept_length"] == pytest.approx(4.0, abs=0.3)
    assert load["lowest_accept_length"] <= load["accept_length"]
    assert load["s_per_token_first"] == pytest.approx(load["s_per_token_last"], rel=0.1)
    assert load["requests_failed"] == []
    assert sglang.most_at_once <= 2
    assert bench.told[-1].startswith("minute 2.0 of 2:")
    json.dumps(value, allow_nan=False)


def test_how_much_of_the_window_was_under_load_is_told(stability: Callable[..., Measurement], sglang: Any, clock: Any) -> None:
    sglang.before_answer = lambda _n, _body: clock.push(0.25)
    busy = stability().value["load"]
    # 8 waves of 6 requests of a quarter second fill 12 of each 30 seconds
    assert busy["busy_share"] == pytest.approx(0.4)


def test_a_crash_after_minutes_ends_it(
    stability: Callable[..., Measurement], bench: Any, sglang: Any, facts: Callable[..., Any], clock: Any
) -> None:
    start = clock.now()
    sglang.before_answer = lambda _n, _body: "close" if (clock.now() - start).total_seconds() >= 60 else None
    bench.unit = lambda n: facts() if n < 4 else facts(main_pid=9, n_restarts=1)
    found = stability()
    assert found.value["ended_early"].startswith("minute 1")
    assert "closed without a whole answer" in found.value["ended_early"]
    assert found.value["steady"]["steady"] is False
    assert found.value["lasted_s"] < 120
    assert found.value["load"]["requests_failed"][0]["trouble"] == "closed"


def test_a_restart_without_a_lost_request_ends_it_too(
    stability: Callable[..., Measurement], bench: Any, facts: Callable[..., Any]
) -> None:
    bench.unit = lambda n: facts() if n < 3 else facts(n_restarts=1)
    found = stability()
    assert found.value["ended_early"] == "minute 1.0: automatic restarts 0 -> 1"
    assert found.value["load"]["requests_failed"] == []


def test_errors_that_the_server_survives_are_counted_not_fatal(stability: Callable[..., Measurement], sglang: Any) -> None:
    sglang.before_answer = lambda n, _body: 500 if n == 7 else None
    found = stability()
    assert (found.value["ended_early"], found.value["steady"]["steady"]) == ("", True)
    assert found.value["load"]["asked"] - found.value["load"]["completed"] == 1
    assert "HTTP 500" in found.problems[0]


def test_it_gets_slower(stability: Callable[..., Measurement], sglang: Any, clock: Any) -> None:
    start = clock.now()
    sglang.meta = lambda meta, _body: {
        **meta, "e2e_latency": meta["e2e_latency"] * (1 + (clock.now() - start).total_seconds() / 60)
    }  # fmt: skip
    load = stability().value["load"]
    assert load["s_per_token_last"] > 1.5 * load["s_per_token_first"]


def test_what_is_watched_is_looked_at_each_time(stability: Callable[..., Measurement], bench: Any) -> None:
    answers = iter([70, 71, "nvidia-smi does not answer", 72, 73])
    bench.other = lambda _probe: next(answers)
    seen = stability(watch=(Memory(),)).value["watched"]["test.Memory"]
    assert [s["value"] for s in seen] == [70, 71, None, 72, 73]
    assert seen[2]["unknown"] == "nvidia-smi does not answer"


def test_a_window_without_a_way_to_the_server(stability: Callable[..., Measurement], bench: Any) -> None:
    bench.no_way = "the container is not running"
    found = stability()
    assert "did not answer any more" in found.value["ended_early"]
    assert found.value["load"]["completed"] == 0
    assert found.value["load"]["s_per_token_first"] is None

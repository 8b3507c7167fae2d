"""Control prompts, on a real HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proofbook.measures.control import ControlPrompts
from proofbook.measures.serving import Baseline
from proofbook.model import Measurement

CASES = ["greedy", "sampled", "structured", "repeated", "long", "burst", "last"]


@pytest.fixture
def control(bench: Any, service: Any) -> Callable[..., Measurement]:
    return lambda **more: ControlPrompts(service, **more).take(bench)


@pytest.fixture
def healthy(sglang: Any) -> Any:
    sglang.accept = 5.2
    sglang.info |= {
        "speculative_algorithm": "EAGLE", "speculative_num_steps": 5,
        "internal_states": [{"effective_max_running_requests_per_dp": 6, "avg_spec_accept_length": 4.1}],
    }  # fmt: skip
    return sglang


def case(measurement: Measurement, name: str) -> dict[str, Any]:
    (found,) = (c for c in measurement.value["cases"] if c["case"] == name)
    return found


def held(measurement: Measurement, name: str) -> dict[str, bool | None]:
    return {e["what"]: e["held"] for e in case(measurement, name)["expect"]}


def test_a_healthy_server(control: Callable[..., Measurement], healthy: Any, bench: Any) -> None:
    found = control()
    assert found.problems == ()
    assert [c["case"] for c in found.value["cases"]] == CASES
    assert all(c["completed"] == c["asked"] > 0 for c in found.value["cases"])
    assert all(e["held"] for c in found.value["cases"] for e in c["expect"])
    assert found.value["speculation"] == "on"
    assert found.value["accept_length"] == pytest.approx(5.2, abs=0.1)
    assert found.value["steps_plus_one"] == 6
    assert case(found, "greedy")["tokens"] == 3 * 256
    assert case(found, "sampled")["temperature"] == 0.8
    assert case(found, "burst")["asked"] == 10
    assert found.value["steady"]["steady"] is True
    assert bench.looks == 1 + len(CASES), "a look before, and one after each case"
    assert sum(c["asked"] for c in found.value["cases"]) > 17
    json.dumps(found.value, allow_nan=False)


def test_speculation_that_is_off_shows_as_off(control: Callable[..., Measurement]) -> None:
    found = control()
    assert (found.value["speculation"], found.value["accept_length"], found.value["steps_plus_one"]) == ("off", None, None)


def test_drafts_that_are_never_accepted(control: Callable[..., Measurement], healthy: Any) -> None:
    healthy.accept = 1.0
    assert control().value["accept_length"] == 1.0


def test_a_miscount_is_found(control: Callable[..., Measurement], healthy: Any) -> None:
    healthy.text = lambda prompt, _n: ", ".join(map(str, [1, 2, 3, *range(5, 300)])) if "Count from 1" in prompt else None
    found = control()
    assert held(found, "greedy") == {"counts on without a mistake": False}
    assert found.problems[0] == "greedy: not so: counts on without a mistake: number 4 is 5, expected 4"


def test_a_structured_answer_that_is_no_json(control: Callable[..., Measurement], healthy: Any) -> None:
    healthy.meta = lambda meta, body: meta
    healthy.text = lambda prompt, _n: "the host is gpu07" if "Report as JSON" in prompt else None
    assert held(control(), "structured") == {"is JSON of the wanted form": False}


def test_an_answer_that_changes_after_a_cache_hit(control: Callable[..., Measurement], healthy: Any) -> None:
    seen: set[str] = set()

    def text(prompt: str, _n: int) -> str | None:
        if "list of parts" not in prompt:
            return None
        first = prompt not in seen
        seen.add(prompt)
        return "bolt washer nut" if first else "bolt washer bolt bolt"

    healthy.text = text
    found = control()
    assert held(found, "repeated") == {"says the same as before the cache held it": False}


def test_without_a_cache_hit_nothing_is_said_of_answers_after_one(control: Callable[..., Measurement], healthy: Any) -> None:
    healthy.meta = lambda meta, _body: {**meta, "cached_tokens": 0}
    found = control()
    assert held(found, "repeated") == {"says the same as before the cache held it": None}
    assert found.problems == ()


def test_a_long_context_that_is_forgotten(control: Callable[..., Measurement], healthy: Any) -> None:
    healthy.text = lambda prompt, _n: "I do not know" if "access code" in prompt else None
    assert held(control(), "long") == {"finds what stands far up in the prompt": False}


def test_a_burst_above_a_cap_that_nobody_knows(control: Callable[..., Measurement], healthy: Any) -> None:
    del healthy.info["internal_states"]
    found = control()
    assert held(found, "burst") == {"all were answered": True, "more than the server runs at once": None}


def test_a_crash_on_structured_output_ends_it_there(
    control: Callable[..., Measurement], healthy: Any, bench: Any, facts: Callable[..., Any], clock: Any
) -> None:
    healthy.before_answer = lambda _n, body: "close" if "json_schema" in body["sampling_params"] else None
    bench.unit = lambda n: facts() if n < 4 else facts(active="failed", sub="failed", result="signal", main_pid=0)
    found = control()
    assert case(found, "structured")["problem"] == "the connection was closed without a whole answer"
    assert case(found, "structured")["completed"] == 0
    assert [c["case"] for c in found.value["cases"] if c["skipped"]] == CASES[3:]
    assert found.value["steady"]["changes"][0] == "after 'structured': the unit is failed (failed), result signal"
    assert 5.0 in clock.slept, "a dying process was given its moment before the look"
    assert found.value["accept_length"] == pytest.approx(5.2, abs=0.1), "what was seen before the crash stays"


def test_a_hang_is_a_problem_and_ends_it(control: Callable[..., Measurement], healthy: Any, clock: Any) -> None:
    healthy.before_answer = lambda _n, _body: "hang"
    healthy.on_hang = lambda: clock.push(121)
    found = control()
    assert case(found, "greedy")["requests"][0]["trouble"] == "deadline"
    assert all(c["skipped"] for c in found.value["cases"][1:])
    assert found.value["speculation"] == "unknown"


def test_a_restart_between_two_cases_is_seen(
    control: Callable[..., Measurement], healthy: Any, bench: Any, facts: Callable[..., Any]
) -> None:
    bench.unit = lambda n: facts() if n < 6 else facts(main_pid=9, invocation_id="c" * 32, n_restarts=1)
    found = control()
    assert found.value["steady"]["changes"] == [
        "after 'long': main process 4711 -> 9",
        "after 'long': automatic restarts 0 -> 1",
        "after 'long': invocation aaaaaaaa -> cccccccc",
    ]


def test_answers_are_held_against_the_baseline(
    control: Callable[..., Measurement], bench: Any, service: Any, healthy: Any
) -> None:
    before = Baseline(service, concurrency=(1,)).take(bench)
    agreed = control(before=before).value
    assert {a["prompt"] for a in agreed["agreement"]} == {
        "control-count", "control-structured", "control-repeated", "control-long"
    }  # fmt: skip
    assert agreed["disagreeing"] == []
    healthy.text = lambda prompt, _n: "bolt, washer, nut, nut" if "list of parts" in prompt else None
    found = control(before=before).value
    assert found["disagreeing"] == ["control-repeated"]


def test_answers_to_other_prompts_are_not_compared(
    control: Callable[..., Measurement], bench: Any, service: Any, healthy: Any
) -> None:
    before = Baseline(service, concurrency=(1,), template="plain").take(bench)
    assert control(before=before).value["agreement"] == []

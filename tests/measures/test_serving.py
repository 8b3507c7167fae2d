"""Baseline, Gain and the second baseline, on a real HTTP server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from proofbook.host import WallClock
from proofbook.measures.client import Client
from proofbook.measures.paired import MIN_PAIRS
from proofbook.measures.prompts import load
from proofbook.measures.said import ServerSays
from proofbook.measures.serving import Baseline, Gain, GainAgain, compare
from proofbook.model import Measurement

PROMPTS = len(load().timing)


@pytest.fixture
def baseline(bench: Any, service: Any) -> Callable[..., Measurement]:
    def take(**more: Any) -> Measurement:
        return Baseline(service, **{"concurrency": (1, 2), **more}).take(bench)

    return take


@pytest.fixture
def gain(bench: Any, service: Any) -> Callable[[Measurement], Measurement]:
    return lambda before: Gain(service, before=before).take(bench)


def levels(measurement: Measurement) -> dict[int, dict[str, Any]]:
    return {level["level"]: level for level in measurement.value["levels"]}


def test_a_baseline_says_what_it_asked_and_how_fast_it_was(baseline: Callable[..., Measurement], bench: Any, sglang: Any) -> None:
    before = baseline()
    assert before.problems == ()
    assert before.unit == "s/token"
    assert before.conditions["rounds"] == 3
    assert before.conditions["version"] == "0.5.10"
    assert (before.conditions["concurrency"], before.conditions["prompts"]) == ([1, 2], PROMPTS)
    assert before.value["speculation"] == "off"
    assert before.value["steady"]["steady"] is True
    for level in levels(before).values():
        assert (level["asked"], level["completed"], level["complete"]) == (3 * PROMPTS, 3 * PROMPTS, True)
        assert 0.010 <= level["s_per_token"] <= 0.011
        assert level["tokens_per_s"] == pytest.approx(1 / level["s_per_token"])
        assert level["flushed"] is True
        assert all(r["cached_tokens"] == 0 for r in level["requests"])
    assert set(before.evidence) == {f"e{n:04d}" for n in range(1, len(bench.kept) + 1)}
    json.dumps(before.value, allow_nan=False)


def test_a_baseline_keeps_the_greedy_answers_of_a_batch_of_one(baseline: Callable[..., Measurement]) -> None:
    answers = baseline().value["answers"]
    controls = {p.id for p in load().control.values()} - {"control-sampled", "control-burst"}
    assert set(answers) == {p.id for p in load().timing} | controls
    assert answers["control-count"]["text"].startswith("1, 2, 3")
    assert len(answers["control-count"]["ids"]) == 256
    assert "control-count" in answers
    assert not [a for a in baseline(concurrency=(2,)).value["answers"] if not a.startswith("control-")]


def test_a_level_above_the_effective_cap_is_not_asked(baseline: Callable[..., Measurement], sglang: Any) -> None:
    sglang.info["internal_states"] = [{"effective_max_running_requests_per_dp": 1}]
    found = levels(baseline())
    assert found[1]["complete"]
    assert (found[2]["skipped"], found[2]["requests"]) == ("above the effective cap of 1", [])


def test_a_gain_is_one_where_the_lower_bound_is_above_one(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    before = baseline()
    sglang.pace_s, sglang.accept = 0.007, 3.5
    sglang.info |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 5, "max_running_requests": 48}
    after = gain(before)
    assert after.value["gains_at"] == [1, 2]
    assert after.value["losses_at"] == after.value["no_gain_shown_at"] == after.value["not_measured_at"] == []
    for level in levels(after).values():
        assert (level["pairs"], level["prompts"], level["rounds"]) == (PROMPTS, PROMPTS, 3)
        assert level["enough"]
        assert level["speedup"]["estimate"] == pytest.approx(10 / 7)
        assert 1 < level["speedup"]["low"] <= level["speedup"]["high"]
        assert set(level["by_kind"]) == {p.kind for p in load().timing}
    assert after.value["arm"]["speculation"] == "on"
    assert after.value["arm"]["levels"][0]["accept_length"] == pytest.approx(3.5, abs=0.1)
    assert (after.value["fair"], after.value["confounders"]) == (True, [])
    assert after.value["changed"]["speculative_algorithm"] == [None, "EAGLE"]
    assert all(a["same"] for a in after.value["agreement"])
    json.dumps(after.value, allow_nan=False)


def test_slower_than_before_is_a_loss(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    before = baseline()
    sglang.pace_s = 0.014
    assert gain(before).value["losses_at"] == [1, 2]


def test_the_same_server_twice_shows_no_gain(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    def noisy(meta: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        # another wobble in each arm: up to 40 % either way, by the prompt and the number of requests so far
        seed = hashlib.sha256(f"{body['text']}{len(sglang.bodies) // 80}".encode()).hexdigest()
        return {**meta, "e2e_latency": meta["e2e_latency"] * (0.6 + int(seed[:4], 16) / 65536 * 0.8)}

    sglang.meta = noisy
    found = gain(baseline(concurrency=(1,))).value
    (level,) = found["levels"]
    assert level["speedup"]["low"] <= 1 <= level["speedup"]["high"]
    assert found["no_gain_shown_at"] == [1]


def test_a_gain_at_low_concurrency_only_is_told_by_level(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    before = baseline()
    sglang.meta = lambda meta, body: {**meta, "e2e_latency": meta["e2e_latency"] * sglang.bent}
    sglang.bent = 0.7
    sglang.before_answer = lambda n, _body: setattr(sglang, "bent", 0.7 if n <= first + 1 + 3 * PROMPTS else 1.3)
    first = len(sglang.bodies)
    found = gain(before).value
    assert (found["gains_at"], found["losses_at"]) == ([1], [2])


def test_an_arm_with_a_lost_request_is_not_measured(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    before = baseline(concurrency=(1,))
    sglang.pace_s = 0.005
    first = len(sglang.bodies)
    sglang.before_answer = lambda n, _body: 500 if n == first + 9 else None
    after = gain(before)
    (level,) = after.value["levels"]
    assert (level["verdict"], level["speedup"], level["complete"]) == ("not-measured", None, False)
    assert level["pairs"] == PROMPTS
    assert "35 of 36" in after.problems[0]


def test_a_server_that_hangs_ends_the_arm(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any, clock: Any
) -> None:
    before = baseline()
    first = len(sglang.bodies)
    sglang.before_answer = lambda n, _body: "hang" if n == first + 9 else None
    sglang.on_hang = lambda: clock.push(121)
    after = gain(before)
    found = {level["level"]: level for level in after.value["arm"]["levels"]}
    assert found[1]["completed"] == 7
    assert found[1]["requests"][-1]["trouble"] == "deadline"
    assert "did not answer any more: no answer within 120 s" in found[2]["skipped"]
    assert after.value["not_measured_at"] == [1, 2]
    assert len(sglang.bodies) == first + 9


def test_a_service_that_cannot_be_reached_gives_an_empty_baseline(baseline: Callable[..., Measurement], bench: Any) -> None:
    bench.no_way = "the container is not running"
    before = baseline()
    assert before.value["speculation"] == "unknown"
    assert not any(level["complete"] for level in levels(before).values())
    assert before.value["answers"] == {}
    assert "the container is not running" in before.problems[0]


def test_a_gain_over_a_baseline_that_has_nothing_is_not_measured(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], bench: Any
) -> None:
    bench.no_way = "the container is not running"
    before = baseline()
    bench.no_way = ""
    after = gain(before)
    assert after.value["not_measured_at"] == [1, 2]
    assert all(level["complete"] for level in after.value["arm"]["levels"])
    assert (after.value["fair"], after.value["agreement"]) == (None, [])


def test_a_restart_under_the_load_is_in_the_arm(
    baseline: Callable[..., Measurement], bench: Any, facts: Callable[..., Any]
) -> None:
    bench.unit = lambda n: facts() if n < 3 else facts(main_pid=9, n_restarts=1)
    before = baseline()
    assert before.value["steady"]["steady"] is False
    assert before.value["steady"]["changes"][0] == "after level 2: main process 4711 -> 9"


def test_what_else_changed_is_named(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    sglang.info |= {"disable_overlap_schedule": True, "mamba_scheduler_strategy": "no_buffer"}
    before = baseline(concurrency=(1,))
    sglang.info |= {
        "disable_overlap_schedule": False, "mamba_scheduler_strategy": "extra_buffer", "speculative_algorithm": "EAGLE"
    }  # fmt: skip
    found = gain(before).value
    assert (found["fair"], found["confounders"]) == (False, ["mamba_strategy", "disable_overlap_schedule"])
    assert "overlap scheduling alone makes decoding faster" in found["fairness"]


def test_a_server_that_does_not_tell_its_arguments_leaves_fairness_open(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], sglang: Any
) -> None:
    before = baseline(concurrency=(1,))
    sglang.info_path = "/nowhere"
    assert gain(before).value["fair"] is None


def test_other_prompts_make_no_pair(baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement]) -> None:
    before = baseline(concurrency=(1,))
    before.value["prompt_set"] = "0" * 64  # type: ignore[index]
    after = gain(before)
    assert after.value["not_measured_at"] == [1]
    assert "other prompts" in after.problems[0]


KEY = "s3rver-Key-which-nobody-knows"


def test_a_server_that_demands_a_key_is_asked_with_it(baseline: Callable[..., Measurement], sglang: Any, bench: Any) -> None:
    sglang.key = bench.given = KEY
    sglang.info |= {"api_key": KEY}
    found = baseline(concurrency=(1,))
    assert (found.value["refused"], levels(found)[1]["complete"], found.problems) == ("", True, ())
    assert set(sglang.brought) == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(found.value)
    before = found.value["config"]["sha256"]
    sglang.info |= {"api_key": "another"}
    assert baseline(concurrency=(1,)).value["config"]["sha256"] == before, "no digest tells of the key"


@pytest.mark.parametrize("given", ("", "another-key-than-its-own"))
def test_a_server_that_refuses_us_is_not_asked_the_rest(
    baseline: Callable[..., Measurement], sglang: Any, bench: Any, given: str
) -> None:
    sglang.key, bench.given = KEY, given
    found = baseline(concurrency=(1, 4))
    assert found.value["refused"] == "HTTP 401: Unauthorized"
    assert len(sglang.brought) == 1
    assert [level["completed"] for level in found.value["levels"]] == [0, 0]
    assert given not in json.dumps(msgspec.to_builtins(found)) or not given


def test_a_key_is_not_in_what_a_client_says_of_itself() -> None:
    assert KEY not in repr(Client("127.0.0.1", 1, WallClock(), key=KEY))


@pytest.mark.parametrize(
    ("info", "said", "why"),
    [
        ({"version": "0.5.10", "api_key": KEY}, {"version": "0.5.10"}, ""),
        ([1], None, "HTTP 200"),
    ],
)
def test_what_a_server_says_of_itself(bench: Any, service: Any, sglang: Any, info: Any, said: Any, why: str) -> None:
    sglang.key = bench.given = KEY
    sglang.info = info
    found = ServerSays(service).take(bench)
    assert found.value["said"] == said
    assert why in found.value["why"]
    sglang.info_path = "/get_server_info"
    assert ServerSays(service).take(bench).value["path"] == "/get_server_info"


def test_a_cache_that_cannot_be_emptied_is_told(baseline: Callable[..., Measurement], sglang: Any) -> None:
    sglang.flush_status = 404
    before = baseline(concurrency=(1,))
    assert not levels(before)[1]["flushed"]
    assert "could not be emptied" in before.problems[0]


def test_a_drift_meanwhile_is_seen_by_the_second_a(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], bench: Any, service: Any, sglang: Any
) -> None:
    before = baseline(concurrency=(1,))
    sglang.pace_s = 0.009
    changed = gain(before)
    assert changed.value["gains_at"] == [1]
    sglang.pace_s = 0.008  # the old configuration is faster now than it was: the machine drifted
    again = GainAgain(service, before=before, gain=changed).take(bench)
    assert again.value["drifted_at"] == [1]
    assert again.value["drift"]["1"]["estimate"] == pytest.approx(10 / 8)
    assert again.value["gains_at"] != [1]
    assert again.value["levels"][0]["rounds"] == 3
    assert again.value["gains_against_second_at"] == [], "8 ms a token now, and 9 with the change"
    assert again.value["against_second"][0]["speedup"]["estimate"] == pytest.approx(8 / 9)


def test_a_second_a_that_is_as_the_first_confirms_the_gain(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement], bench: Any, service: Any, sglang: Any
) -> None:
    before = baseline(concurrency=(1,))
    sglang.pace_s = 0.007
    changed = gain(before)
    sglang.pace_s = 0.010
    again = GainAgain(service, before=before, gain=changed).take(bench)
    assert (again.value["drifted_at"], again.value["gains_at"], again.value["fair"]) == ([], [1], True)
    assert (again.value["gains_against_second_at"], again.value["changed"]) == ([1], {})


def test_a_measurement_that_went_through_a_journal_is_as_good(
    baseline: Callable[..., Measurement], gain: Callable[[Measurement], Measurement]
) -> None:
    import msgspec

    before = baseline(concurrency=(1,))
    stored = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(before))), Measurement)
    assert gain(stored).value["levels"][0]["pairs"] == PROMPTS


def test_two_arms_that_share_too_few_prompts_are_not_measured(baseline: Callable[..., Measurement]) -> None:
    arm = json.loads(json.dumps(baseline(concurrency=(1,)).value))
    few = {p.id for p in load().timing[: MIN_PAIRS - 1]}
    for level in arm["levels"]:
        level["requests"] = [r for r in level["requests"] if r["prompt"] in few]
    (level,) = compare([arm], [arm])
    assert (level["verdict"], level["enough"], level["pairs"]) == ("not-measured", False, MIN_PAIRS - 1)


def test_the_question_is_its_key_without_the_numbers_in_it(service: Any, baseline: Callable[..., Measurement]) -> None:
    assert "s_per_token" not in repr(Gain(service, before=baseline(concurrency=(1,))))

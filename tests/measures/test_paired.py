"""Paired ratios and their intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.measures.paired import MIN_PAIRS, MIN_ROUNDS, Interval, by_prompt, interval, ratios


def arm(pace: float, *, prompts: int = 12, rounds: int = 3, noise: float = 0.02, seed: int = 1) -> dict[str, list[float]]:
    chance = random.Random(seed)
    return {f"p{n}": [pace * (1 + n / 10) * (1 + chance.uniform(-noise, noise)) for _ in range(rounds)] for n in range(prompts)}


def test_a_clear_gain_has_its_lower_bound_above_one() -> None:
    found = interval(arm(0.010, seed=1), arm(0.0077, seed=2))
    assert found is not None
    assert 1 < found.low <= found.estimate <= found.high
    assert found.estimate == pytest.approx(0.010 / 0.0077, rel=0.03)


def test_what_is_the_same_shows_no_gain() -> None:
    found = interval(arm(0.010, seed=1, noise=0.1), arm(0.010, seed=2, noise=0.1))
    assert found is not None
    assert found.low <= 1 <= found.high


def test_of_many_comparisons_of_the_same_with_the_same_hardly_one_shows_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proofbook.measures.paired.DRAWS", 200)
    found = [interval(arm(0.01, noise=0.1, seed=2 * n), arm(0.01, noise=0.1, seed=2 * n + 1)) for n in range(60)]
    assert sum(1 for f in found if f is not None and f.low > 1) <= 2
    assert sum(1 for f in found if f is not None and f.low <= 1 <= f.high) >= 56


def test_the_same_numbers_give_the_same_interval() -> None:
    before, after = arm(0.010, seed=3), arm(0.009, seed=4)
    assert interval(before, after) == interval(before, after)


def test_turned_around_it_is_the_reciprocal() -> None:
    before, after = arm(0.010, seed=5), arm(0.008, seed=6)
    there, back = ratios(before, after), ratios(after, before)
    assert all(there[p] * back[p] == pytest.approx(1) for p in there)


def test_one_wild_round_moves_the_estimate_hardly_and_is_not_dropped() -> None:
    before, after = arm(0.010, seed=7), arm(0.008, seed=8)
    calm = interval(before, after)
    wild = interval(before, {**after, "p0": [after["p0"][0] * 50, *after["p0"][1:]]})
    assert calm is not None
    assert wild is not None
    assert wild.estimate == pytest.approx(calm.estimate, rel=0.02)
    assert ratios(before, {"p0": [after["p0"][0] * 50] * 3})["p0"] < 0.1


def test_rounds_that_scatter_widen_the_interval() -> None:
    """Prompts that all have the same ratio of medians: only the draw over rounds can see the noise."""
    before = {f"p{n}": [0.5, 1.0, 2.0] for n in range(12)}
    calm = {f"p{n}": [1.0, 1.0, 1.0] for n in range(12)}
    found = interval(before, calm)
    assert found is not None
    assert found.estimate == 1
    assert found.low < 1 < found.high


@pytest.mark.parametrize(("prompts", "rounds"), [(MIN_PAIRS - 1, MIN_ROUNDS), (MIN_PAIRS, MIN_ROUNDS - 1)])
def test_too_few_pairs_or_rounds_claim_nothing(prompts: int, rounds: int) -> None:
    few = arm(0.01, prompts=prompts, rounds=rounds)
    assert interval(few, few) is None


def test_only_prompts_of_both_arms_make_pairs() -> None:
    assert set(ratios({"a": [1.0], "b": [1.0]}, {"b": [0.5], "c": [1.0]})) == {"b"}


def test_only_completed_requests_count() -> None:
    good = {"prompt": "p", "ok": True, "s_per_token": 0.01}
    requests = [good, {**good, "ok": False, "s_per_token": 9.0}, {**good, "s_per_token": None}, {**good, "s_per_token": 0.02}]
    assert by_prompt(requests) == {"p": [0.01, 0.02]}


@given(st.lists(st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3), min_size=6, max_size=8), st.floats(0.2, 5.0))
def test_the_bounds_hold_the_estimate_and_scale_with_it(rows: list[list[float]], factor: float) -> None:
    before = {f"p{n}": row for n, row in enumerate(rows)}
    after = {p: [v * factor for v in row] for p, row in before.items()}
    plain, scaled = _quick(before, before), _quick(before, after)
    assert plain.low <= plain.estimate <= plain.high
    assert scaled.estimate == pytest.approx(plain.estimate / factor)
    assert scaled.low == pytest.approx(plain.low / factor)


def _quick(before: dict[str, list[float]], after: dict[str, list[float]]) -> Interval:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proofbook.measures.paired.DRAWS", 200)
        found = interval(before, after)
    assert found is not None
    return found

"""The fixed prompts."""

from __future__ import annotations

import json

import pytest

from proofbook.measures.paired import MIN_PAIRS
from proofbook.measures.prompts import load


def test_there_are_enough_for_an_interval_and_of_every_kind() -> None:
    timing = load().timing
    assert len({p.id for p in timing}) == len(timing) >= MIN_PAIRS
    assert {p.kind for p in timing} == {"code", "prose", "math", "json", "tool", "long", "count"}
    assert len({p.text for p in timing}) == len(timing)


def test_every_round_asks_every_prompt_once_and_no_two_share_a_beginning() -> None:
    prompts = load()
    asked = prompts.rounds(3)
    assert len(asked) == 3 * len(prompts.timing)
    for number in range(3):
        assert sorted(p.id for n, p in asked if n == number) == sorted(p.id for p in prompts.timing)
    heads = {p.body()["text"].partition("Exercise ")[2][:1] for _, p in asked}
    assert heads == {"1", "2", "3"}
    assert all(p.body()["text"].startswith("<|im_start|>user\nExercise ") for _, p in asked)


def test_the_order_is_mixed_and_always_the_same() -> None:
    prompts = load()
    first, again = prompts.rounds(2), load().rounds(2)
    assert [p.id for _, p in first] == [p.id for _, p in again]
    one, two = [p.id for n, p in first if n == 0], [p.id for n, p in first if n == 1]
    assert one != two
    assert one != [p.id for p in prompts.timing]


def test_answers_end_where_the_model_ends_them() -> None:
    for prompt in (*load().timing, *load().control.values()):
        assert "ignore_eos" not in prompt.body()["sampling_params"]
        assert not prompt.body()["stream"]


def test_the_control_prompts_are_what_their_cases_say() -> None:
    control = load().control
    assert set(control) == {"greedy", "sampled", "structured", "repeated", "long", "burst"}
    assert (control["greedy"].temperature, control["greedy"].max_tokens) == (0.0, 256)
    assert control["sampled"].body()["sampling_params"]["top_p"] == 0.95
    assert json.loads(control["structured"].body()["sampling_params"]["json_schema"])["required"] == ["host", "gpus", "healthy"]
    assert len(control["long"].text) > 30_000
    assert control["long"].text.count("7-4-1-9") == 1
    assert "{" not in control["long"].text
    assert len({p.text for p in load().burst(12)}) == 12


def test_another_template_is_another_set() -> None:
    plain = load("plain")
    assert plain.digest != load().digest
    assert plain.warm_up.body()["text"] == "Name the four seasons of the year, one word a line.\n"


def test_a_template_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="chatml, plain"):
        load("jinja")

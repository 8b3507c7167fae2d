"""Answers held against each other and against what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from proofbook.measures.answers import agreement, all_same, counts_on, is_of_form, parting
from proofbook.measures.prompts import load

SCHEMA = load().control["structured"].json_schema


def answer(text: str, ids: list[int] | None = None) -> dict[str, Any]:
    return {"text": text, "ids": ids}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (answer("a b c", [1, 2, 3]), answer("a b c", [1, 2, 3]), (None, "tokens", 3)),
        (answer("a b c", [1, 2, 3]), answer("a x c", [1, 9, 3]), (1, "tokens", 3)),
        (answer("a b", [1, 2]), answer("a b c", [1, 2, 3]), (2, "tokens", 2)),
        (answer("a b c", [1, 2, 3]), answer("a b d"), (2, "words", 3)),  # one version sends no ids: words are compared
        (answer("a  b"), answer("a b"), (None, "words", 2)),
    ],
)
def test_where_two_answers_part(before: dict[str, Any], after: dict[str, Any], expected: tuple[int | None, str, int]) -> None:
    assert parting(before, after) == expected


def test_agreement_says_which_had_to_agree() -> None:
    before = {
        "control-count": answer("1, 2, 3", [1, 2, 3]),
        "prose-lighthouse": answer("It was", [5, 6]),
        "only-before": answer("x"),
    }
    after = {"control-count": answer("1, 2, 4", [1, 2, 4]), "prose-lighthouse": answer("It is", [5, 7])}
    count, prose = agreement(before, after, load())
    assert (count["prompt"], count["must_agree"], count["same"], count["first_difference"]) == ("control-count", True, False, 2)
    assert "determined" in count["reason"]
    assert (prose["must_agree"], prose["first_difference"], prose["of"]) == (False, 1, 2)
    assert "near tie" in prose["reason"]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (", ".join(map(str, range(1, 100))), True),
        (", ".join(map(str, range(1, 100))) + ", 10", True),  # the last number is cut by the token limit
        ("1, 2, 3, 5, 6, " + ", ".join(map(str, range(7, 40))), False),
        ("1, 1, 1, 1, 1, 1", False),
        ("1, 2, 3", False),
        ("", False),
        ("Sure! Here is the list you asked for", False),
    ],
)
def test_counting(text: str, held: bool) -> None:
    assert counts_on(text)[0] is held


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"host": "gpu07", "gpus": 4, "healthy": true}', ""),
        ('{"host": "gpu07", "gpus": "4", "healthy": true}', "gpus is '4'"),
        ('{"host": "gpu07", "gpus": true, "healthy": true}', "gpus is True"),
        ('{"host": "gpu07", "healthy": true}', "gpus is None"),
        ('{"host": "gpu07", "gpus": 4, "healthy": true, "note": 1}', "note"),
        ('{"host": "gpu07", "gpus": 4, "heal', "no JSON"),
        ("[1]", "not an object"),
    ],
)
def test_structured_output(text: str, why: str) -> None:
    held, reason = is_of_form(text, SCHEMA)
    assert held is (not why)
    assert why in reason


def test_all_the_same() -> None:
    assert all_same([answer("a b"), answer("a b")])[0] is True
    held, reason = all_same([answer("a b"), answer("a c")])
    assert (held, "as the first for 1 of 2 words" in reason) == (False, True)
    assert all_same([answer("a b"), None])[0] is None

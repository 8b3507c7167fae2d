"""What a hostile machine says is shown and not obeyed."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.visible import capped, json_text, visible


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\x00b\rc\x7f", "a␀b␍c␡"),
        ("\x9b31m", "\\x9b31m"),
        ("safe\u202eexe.txt", "safe\\u202eexe.txt"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("half \udce9", "half \\udce9"),
        ("\U000e0041", "\\U000e0041"),
        ("two\n\tlines, ünïcödé, 日本, 👩\u200d🚀", "two\n\tlines, ünïcödé, 日本, 👩\u200d🚀"),
    ],
)
def test_what_acts_is_shown(raw: str, shown: str) -> None:
    assert visible(raw) == shown
    assert visible(shown) == shown


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    left = {unicodedata.category(c) for c in visible(text).replace("\n", "").replace("\t", "")}
    assert not left & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(c) for c in visible(text)} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    }


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_json_is_of_the_same_value_and_acts_on_no_terminal(text: str) -> None:
    told = json_text({"reason": text})
    assert json.loads(told) == {"reason": text}
    assert visible(told) == told and "\n" not in told


def test_a_long_sentence_is_cut_and_says_so() -> None:
    assert capped("short") == "short"
    assert capped("x" * 1510) == "x" * 1500 + "… (10 more characters in record.json)"

"""The benchmark's own file, read as second evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.measures.sglang_bench import parse_bench, second_evidence


def line(**more: Any) -> str:
    said = {
        "tag": None, "backend": "sglang", "dataset_name": "custom", "request_rate": "inf", "max_concurrency": 4,
        "sharegpt_output_len": None, "random_input_len": 1024, "random_output_len": 1024, "random_range_ratio": 0.0,
        "duration": 61.2, "completed": 48, "total_input_tokens": 9120, "total_output_tokens": 11840,
        "total_output_tokens_retokenized": 11836, "request_throughput": 0.78, "input_throughput": 149.0,
        "output_throughput": 193.4, "mean_e2e_latency_ms": 5012.1, "median_e2e_latency_ms": 4900.0,
        "mean_tpot_ms": 20.1, "median_tpot_ms": 18.9, "std_tpot_ms": 2.2, "p99_tpot_ms": 31.0, "concurrency": 3.92,
        "accept_length": None,
    }  # fmt: skip
    return json.dumps({**said, **more})


def runs(*lines: str) -> Any:
    return parse_bench("\n".join(lines)).runs


def test_a_line_is_read() -> None:
    (run,) = runs(line(accept_length=3.1, tag="mtp"))
    assert (run.tag, run.concurrency, run.completed, run.median_tpot_ms) == ("mtp", 4, 48, 18.9)
    assert (run.accept_length, run.output_throughput, run.asked, run.complete) == (3.1, 193.4, None, None)


def test_details_say_whether_all_were_answered() -> None:
    good, bad = runs(line(errors=[""] * 48), line(completed=47, errors=[""] * 47 + ["Connection reset"]))
    assert (good.asked, good.complete) == (48, True)
    assert (bad.asked, bad.complete, bad.errors) == (48, False, ("Connection reset",))


def test_what_is_no_result_is_told_and_the_rest_is_read() -> None:
    found = parse_bench("\n".join([line(), '{"tag": 1, "comp', "[]", '{"completed": "48"}', "", line()]))
    assert len(found.runs) == 2
    assert [p.split(" is")[0] for p in found.problems] == ["line 2", "line 3", "line 4"]
    assert "cut off" in found.problems[0]


def test_the_speedup_by_concurrency() -> None:
    before = runs(line(errors=[""] * 48), line(max_concurrency=1, median_tpot_ms=10.0, errors=[""] * 48))
    after = runs(line(median_tpot_ms=14.0, errors=[""] * 48), line(max_concurrency=8, errors=[""] * 48))
    assert second_evidence(before, after) == [
        {"level": 4, "speedup": pytest.approx(18.9 / 14), "before_ms": 18.9, "after_ms": 14.0, "problems": []}
    ]


def test_the_last_run_of_a_concurrency_counts() -> None:
    after = runs(line(median_tpot_ms=30.0), line(median_tpot_ms=9.45))
    assert second_evidence(runs(line()), after)[0]["speedup"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"dataset_name": "random"}, "not the same work: dataset_name custom -> random"),
        ({"total_input_tokens": 9000}, "not the same work: total_input_tokens 9120 -> 9000"),
        ({"completed": 40, "errors": [""] * 48}, "after: 40 of 48 requests were answered"),
        ({"errors": ["boom"] + [""] * 47}, "first error: boom"),
        ({"median_tpot_ms": None}, "no time per output token"),
    ],
)
def test_what_cannot_be_compared_is_not(after: dict[str, Any], words: str) -> None:
    (found,) = second_evidence(runs(line(errors=[""] * 48)), runs(line(**after)))
    assert found["speedup"] is None
    assert any(words in p for p in found["problems"])


def test_without_details_it_says_what_is_not_known() -> None:
    (found,) = second_evidence(runs(line()), runs(line()))
    assert found["speedup"] == 1
    assert len(found["problems"]) == 2


@given(
    st.text(max_size=60),
    st.dictionaries(st.sampled_from(list(json.loads(line()))), st.none() | st.text(max_size=3) | st.floats()),
)
def test_any_text_and_any_values_are_read_without_a_traceback(text: str, values: dict[str, Any]) -> None:
    parse_bench(text)
    found = parse_bench(line(**values)).runs
    second_evidence(found, found)

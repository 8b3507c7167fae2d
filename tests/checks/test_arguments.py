"""Command lines and environments compared as programs read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.checks.arguments import changes, environment_changes, hold_arguments, hold_environment, parse


def held(wanted: str, running: str, known: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    outcome = hold_arguments(wanted.split(), running.split(), known)
    return [str(c) for c in outcome.unmet], bool(outcome.assumed)


@pytest.mark.parametrize(
    ("wanted", "running", "unmet"),
    [
        ("--tp-size 4", "serve --tp-size 4", []),
        ("--tp-size 4", "serve --tp-size=4", []),
        ("--tp-size=4", "serve --tp-size 4", []),
        ("--tp-size 4", "serve --tp 4", []),  # another spelling of the same option
        ("--tp-size 4", "serve --tp-size 2", ["--tp-size: 4 → 2"]),
        ("--tp-size 4", "serve", ["--tp-size: 4 → absent"]),
        ("--tp-size 4", "serve --tp-size 4 --tp-size 2", ["--tp-size: 4 → 2 (given 2 times; the last one counts)"]),
        ("--tp-size 4", "serve --tp-size 2 --tp-size 4", []),
        ("--mem-fraction-static 0.75", "serve --mem-fraction-static 0.750", []),
        ("--enable-metrics", "serve --enable-metrics", []),
        ("--enable-metrics", "serve", ["--enable-metrics: given → absent"]),
        ("--enable-metrics", "serve --enable-metrics true", []),
        ("--override {\"a\":1}", "serve --override {\"a\":1.0}", []),
        ("--override {\"a\":1}", "serve --override {\"a\":2}", ['--override: {"a":1} → {"a":2}']),
        ("--ids 1 2 3", "serve --ids 1 2 3", []),
        ("--ids 1 2 3", "serve --ids 1 2", ["--ids: 1 2 3 → 1 2"]),
        ("--seed -1", "serve --seed -1", []),
        ("serve", "sglang serve --port 1", []),
        ("serve", "sglang launch --port 1", ["word 'serve': serve → absent"]),
        ("--api-key a", "serve --api-key b", ["--api-key: (hidden) → (hidden)"]),
        ("--api-key [redacted:flag]", "serve --api-key b", []),
    ],
)  # fmt: skip
def test_wanted_arguments(wanted: str, running: str, unmet: list[str]) -> None:
    assert held(wanted, running)[0] == unmet


def test_abbreviations() -> None:
    full, short = "--speculative-algorithm NEXTN", "serve --speculative-algo NEXTN"
    assert held(full, short) == ([], True)
    known = ("--speculative-algorithm", "--speculative-num-steps", "--log-level", "--log-level-http")
    assert held(full, short, known) == ([], False)
    # An exact option is never an abbreviation of a longer one.
    assert held("--log-level-http error", "serve --log-level error", known)[0] == ["--log-level-http: error → absent"]
    # argparse refuses a prefix of several options, so it cannot be what runs.
    assert held("--speculative-num-steps 5", "serve --speculative 5", known)[0] == ["--speculative-num-steps: 5 → absent"]
    assert held("--speculative-algorithm NEXTN", "serve --speculative-algo EAGLE")[0] == [
        "--speculative-algorithm: NEXTN → EAGLE"
    ]


def test_parse_keeps_words_flags_and_what_follows_a_double_dash() -> None:
    words, flags = parse(["python", "-m", "sglang.launch_server", "--a=1", "two", "--b", "--", "--c", "3"])
    assert words == ("python", "two", "--c", "3")
    assert [(f.name, f.values) for f in flags] == [("-m", ("sglang.launch_server",)), ("--a", ("1",)), ("--b", ())]


def test_changes_name_what_came_what_went_and_what_differs() -> None:
    before = ["serve", "--a", "1", "--b", "2", "--c"]
    after = ["serve", "--a", "1", "--b", "3", "--d", "4"]
    assert [str(c) for c in changes(before, after)] == ["--b: 2 → 3", "--c: given → absent", "--d: absent → 4"]
    assert [str(c) for c in changes(["python", "x"], ["python3", "x"])] == ["program: python x → python3 x"]


def test_environments() -> None:
    held = hold_environment({"A": "1", "B": "2"}, {"A": "1", "B": "[redacted:variable]", "C": "3"})
    assert (held.unmet, held.hidden) == ((), ("B",))
    # A variable is text: "1" and "1.0" are two values.
    assert [str(c) for c in hold_environment({"A": "1"}, {"A": "1.0"}).unmet] == ["A: 1 → 1.0"]
    found = environment_changes({"A": "1", "GONE": "x", "INVOCATION_ID": "1"}, {"A": "2", "NEW": "y", "INVOCATION_ID": "2"})
    assert [str(c) for c in found] == ["A: 1 → 2", "GONE: x → absent", "NEW: absent → y"]


token = st.text('ab-=1.{}[]"x ', max_size=6)


@given(st.lists(token, max_size=8))
def test_a_command_line_never_differs_from_itself(argv: list[str]) -> None:
    assert changes(argv, argv) == []


@given(st.lists(token, max_size=6), st.lists(token, max_size=6))
def test_what_is_there_is_found_and_nothing_blows_up(wanted: list[str], running: list[str]) -> None:
    hold_arguments(wanted, running)
    _, flags = parse(wanted)
    if len({f.name for f in flags}) == len(flags) and "--" not in wanted:
        assert not hold_arguments(wanted, wanted).unmet


@given(st.dictionaries(token, token, max_size=4), st.dictionaries(token, token, max_size=4))
def test_environment_changes_are_empty_exactly_when_nothing_changed(a: dict[str, str], b: dict[str, str]) -> None:
    assert environment_changes(a, a) == []
    assert bool(environment_changes(a, b)) == (a != b)

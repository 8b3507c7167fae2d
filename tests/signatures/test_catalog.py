"""The signatures as data: every example is claimed by its own signature alone, and the filter can hold nothing back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from re import _constants as sre  # type: ignore[attr-defined]  # the compiler's own names: there are no public ones
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from proofbook.model import Suggested, Verdict
from proofbook.signatures import BadSignature, load
from proofbook.signatures.catalog import Family, Signature, compile_tables

SIGNATURES = load()
EXAMPLES = [(s.id, example) for s in SIGNATURES for example in s.examples]


def allowed(one: str, other: str) -> bool:
    """Whether ``other`` may claim a line of ``one``: it is declared, or it only says what the line is part of."""
    a, b = SIGNATURES[one], SIGNATURES[other]
    return one == other or other in a.overlaps or one in b.overlaps or b.kind == "benign"


@pytest.mark.parametrize(("signature_id", "example"), EXAMPLES)
def test_an_example_is_claimed_by_its_own_signature_and_no_other(signature_id: str, example: str) -> None:
    claimed = {s.id for s, _ in SIGNATURES.match(example)}
    assert signature_id in claimed
    assert not [other for other in claimed if not allowed(signature_id, other)]


@pytest.mark.parametrize(("signature_id", "example"), EXAMPLES)
def test_the_anchors_of_an_example_are_in_it(signature_id: str, example: str) -> None:
    assert any(anchor in example for anchor in SIGNATURES[signature_id].anchors)


# ------------------------------------------------------------- the filter is a superset, by proof and not by trial


def must_contain(pattern: str, limit: int = 4000) -> list[list[str]]:
    """For each way through ``pattern``, the literal runs that every match on that way contains."""
    ways: list[tuple[list[str], str]] = [([], "")]

    def close(run: tuple[list[str], str]) -> tuple[list[str], str]:
        runs, current = run
        return ([*runs, current] if current else runs, "")

    def walk(items: Sequence[Any], ways: list[tuple[list[str], str]]) -> list[tuple[list[str], str]]:
        for op, av in items:
            if op is sre.LITERAL:
                ways = [(r, c + chr(av)) for r, c in ways]
            elif op is sre.SUBPATTERN:
                ways = walk(av[-1], ways)
            elif op is sre.ATOMIC_GROUP:
                ways = walk(av, ways)
            elif op is sre.BRANCH:
                ways = [w for branch in av[1] for w in walk(branch, ways)]
            elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
                low, high, inner = av
                if low == 0 and high == 1:
                    ways = walk(inner, ways) + ways  # with it, and without it
                elif low == 0:
                    ways = [close(w) for w in ways]
                else:
                    ways = walk(inner, ways) if high == low == 1 else [close(w) for w in walk(inner, [close(w) for w in ways])]
            elif op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
                continue
            else:
                ways = [close(w) for w in ways]
            seen = {(tuple(r), c) for r, c in ways}
            ways = [(list(r), c) for r, c in seen]
            assert len(ways) <= limit, f"too many ways through {pattern!r}"
        return ways

    return [close(w)[0] for w in walk(list(parser.parse(pattern)), ways)]


def matchers() -> Iterator[tuple[str, re.Pattern[str], tuple[str, ...]]]:
    for matcher in SIGNATURES.matchers:
        yield (matcher.name if isinstance(matcher, Family) else matcher.id), matcher.pattern, matcher.anchors
    for join in SIGNATURES.joins:
        yield f"join {join.id} starts", join.starts, join.anchors
        yield f"join {join.id} continues", join.continues, join.anchors
    for suspicion in SIGNATURES.suspicions:
        yield f"suspicion {suspicion.id}", suspicion.pattern, suspicion.anchors


@pytest.mark.parametrize(("name", "pattern", "anchors"), matchers(), ids=lambda x: x if isinstance(x, str) else "")
def test_every_match_contains_an_anchor(name: str, pattern: re.Pattern[str], anchors: tuple[str, ...]) -> None:
    bare = [runs for runs in must_contain(pattern.pattern) if not any(a in run for a in anchors for run in runs)]
    assert not bare, f"{name}: a line that holds only these would be held back by the filter"


# ------------------------------------------------------------------------------------------------- the data itself


def test_the_hard_xids_are_there_each_with_its_number() -> None:
    hard = [8, 13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 94, 95, 109, 119, 120, 140, 143, 154, 167, 168, 169, 176]
    assert [n for n in hard if f"xid-{n}" not in SIGNATURES.signatures] == []
    assert {SIGNATURES[f"xid-{n}"].verdict for n in (79, 119, 143, 154, 48, 95)} == {Verdict.FAIL}


def test_an_unpublished_xid_is_unknown_and_keeps_its_number() -> None:
    (signature, match), *_ = SIGNATURES.match("NVRM: Xid (PCI:0000:41:00): 7777, pid=1, name=x, something")
    assert (signature.id, match["code"], signature.verdict) == ("xid-unknown", "7777", Verdict.UNKNOWN)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00): 79, pid=0, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00 GPU-I:05): 79, pid=4242, name=python3, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00 GPU-I:05 GPU-CI:01): 79, GPU has fallen off the bus.",
        "NVRM: Xid (0000:41:00): 79",
    ],
)
def test_an_xid_line_is_read_in_every_form_that_drivers_print(line: str) -> None:
    (signature, match), *_ = SIGNATURES.match(line)
    assert (signature.id, match["pci"]) == ("xid-79", "0000:41:00")


@pytest.mark.parametrize("signature", list(SIGNATURES), ids=lambda s: s.id)
def test_a_signature_says_what_it_means_and_what_to_do(signature: Signature) -> None:
    assert signature.meaning.endswith("."), "one sentence"
    if signature.kind in ("fault", "consequence") and signature.verdict in (Verdict.FAIL, Verdict.WARN):
        assert signature.action in Suggested
        assert signature.action is not Suggested.NONE or "SMBPBI" in signature.examples[0]
    if signature.kind in ("benign", "fact"):
        assert signature.verdict is Verdict.PASS


def test_two_families_of_memory_errors_ask_for_opposite_cures() -> None:
    assert SIGNATURES["cuda-out-of-memory"].what_to_do.startswith("LOWER")
    assert SIGNATURES["sglang-raise-mem-fraction"].what_to_do.startswith("RAISE")
    assert SIGNATURES["sglang-graph-capture-failed"].what_to_do.startswith("LOWER")


GOOD = {"id": "x", "pattern": "abc (?P<code>\\d+)", "anchors": ["abc "], "meaning": "M.", "origin": "o", "example": "abc 1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pattern": "("}, "missing"),
        ({"anchors": []}, "no anchors"),
        ({"anchors": ['a"b']}, "no quote"),
        ({"anchors": ["é-x"]}, "ASCII"),
        ({"verdict": "BAD"}, "BAD"),
        ({"action": "pray"}, "pray"),
        ({"kind": "odd"}, "odd"),
        ({"sources": ["moon"]}, "moon"),
        ({"caused_by": ["nobody"]}, "nobody"),
        ({"caused_by": ["#nothing"]}, "#nothing"),
        ({"surprise": 1}, "surprise"),
        ({"meaning": ""}, "meaning"),
        ({"example": None}, "example"),
    ],
)
def test_a_damaged_file_is_refused_with_the_name_of_the_signature(change: dict[str, Any], says: str) -> None:
    table = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    with pytest.raises(BadSignature, match="x") as refused:
        compile_tables({"f.toml": {"signature": [table]}})
    assert says in str(refused.value)


def test_an_id_is_given_once() -> None:
    with pytest.raises(BadSignature, match="is taken by"):
        compile_tables({"f.toml": {"signature": [GOOD, GOOD]}})

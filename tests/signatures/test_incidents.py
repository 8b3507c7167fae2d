"""Public incidents, each with the verdict that it deserves, held against the judge as it reads a paste.

``incidents.jsonl`` holds the incidents that have lines, what was said of each there, and the verdict that follows by the table
below. ``rule`` says where the lines are from:

``lines``     literal lines of the thread
``xids``      the Xids that the text names, in its order, each as the driver prints it
``named``     the message that the text names, as its program prints it
``figures``   the figures that the text gives, in the line that prints such figures
``sequence``  two or three events of the text, in their order, each as its program prints it

``not-covered.jsonl`` holds the others, with the reason: what no log says, no reader of logs can judge. A third (``held_out``,
picked by a hash of the name) changed no signature after the first run. They are no blind test: whoever wrote the signatures
knew these threads.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proofbook.model import Verdict
from proofbook.triage import judge_paste

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (HERE / name).read_text("utf-8").splitlines()]


INCIDENTS, NOT_COVERED = rows("incidents.jsonl"), rows("not-covered.jsonl")
RULES = {"lines", "xids", "named", "figures", "sequence"}

#: The words of those who judged the incidents, and ours. "blocked" is a machine that cannot go on: FAIL.
WORDS = {
    "pass": Verdict.PASS,
    "warn": Verdict.WARN,
    "fail": Verdict.FAIL,
    "blocked": Verdict.FAIL,
    "inconclusive": Verdict.UNKNOWN,
    "PASS": Verdict.PASS,
    "PASS_WITH_LIMITS": Verdict.WARN,
    "PREFLIGHT_FAIL": Verdict.FAIL,
    "FAIL_STARTUP": Verdict.FAIL,
    "FAIL_INEFFECTIVE": Verdict.FAIL,
    "FAIL_CORRECTNESS": Verdict.FAIL,
    "FAIL_UNSTABLE": Verdict.FAIL,
    "FAIL_ZOMBIE": Verdict.FAIL,
    "INCONCLUSIVE": Verdict.UNKNOWN,
}


def got(incident: dict[str, Any]) -> Verdict:
    return judge_paste("\n".join(incident["lines"])).verdict


def test_the_expected_column_follows_from_the_words() -> None:
    assert [i["id"] for i in INCIDENTS if WORDS[i["said"]] != i["expected"]] == []
    assert {i["rule"] for i in INCIDENTS} <= RULES


def test_every_incident_is_covered_or_counted_with_a_reason() -> None:
    covered, others = {i["id"] for i in INCIDENTS}, {i["id"] for i in NOT_COVERED}
    assert not covered & others
    assert all(i["why"] for i in NOT_COVERED)
    by_rule = Counter(i["rule"] for i in INCIDENTS)
    assert (len(covered), len(others), by_rule["lines"]) == (61, 50, 48)


@pytest.mark.parametrize("incident", [i for i in INCIDENTS if not i["held_out"]], ids=lambda i: i["id"])
def test_incident(incident: dict[str, Any]) -> None:
    assert got(incident) == incident["expected"]


@pytest.mark.parametrize("incident", [i for i in INCIDENTS if i["held_out"]], ids=lambda i: i["id"])
def test_incident_that_changed_no_signature(incident: dict[str, Any]) -> None:
    assert got(incident) == incident["expected"]


def table() -> str:
    """Case, expected, got; the held-out third apart: ``python tests/signatures/test_incidents.py``."""
    lines = []
    for title, held_out in (("tuned on", False), ("held out", True)):
        some = [(i["id"], i["rule"], i["expected"], got(i).value) for i in INCIDENTS if i["held_out"] is held_out]
        right = sum(expected == verdict for *_, expected, verdict in some)
        lines.append(f"{title}: {right} of {len(some)} as expected")
        lines += [
            f"  {name:32} {rule:9} {expected:8} {verdict:8} {'' if expected == verdict else '<-'}"
            for name, rule, expected, verdict in some
        ]
    lines.append(f"not covered: {len(NOT_COVERED)}")
    lines += [f"  {count:3} {why}" for why, count in Counter(i["why"] for i in NOT_COVERED).most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

"""Public incidents, each with the verdict that it deserves, held against the judge.

``incidents.jsonl`` holds literal log lines of public threads, what was said of each there, and the verdict that follows by
the table below. A third of them (``held_out``, picked by a hash of the name) changed no signature after the first run. They
are no blind test: whoever wrote the signatures knew these threads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proofbook.model import Verdict
from proofbook.signatures import LogLine, judge

INCIDENTS: list[dict[str, Any]] = [
    json.loads(x) for x in (Path(__file__).parent / "incidents.jsonl").read_text("utf-8").splitlines()
]

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
    "INCONCLUSIVE": Verdict.UNKNOWN,
}


def got(incident: dict[str, Any]) -> Verdict:
    return judge(LogLine(line, source="") for line in incident["lines"]).verdict


def test_the_expected_column_follows_from_the_words() -> None:
    assert [i["id"] for i in INCIDENTS if WORDS[i["said"]] != i["expected"]] == []


@pytest.mark.parametrize("incident", [i for i in INCIDENTS if not i["held_out"]], ids=lambda i: i["id"])
def test_incident(incident: dict[str, Any]) -> None:
    assert got(incident) == incident["expected"]


@pytest.mark.parametrize("incident", [i for i in INCIDENTS if i["held_out"]], ids=lambda i: i["id"])
def test_incident_that_changed_no_signature(incident: dict[str, Any]) -> None:
    assert got(incident) == incident["expected"]

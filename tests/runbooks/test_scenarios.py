"""Every scenario of the lab comes out as its file says: the exam of reboot verification."""

from __future__ import annotations

from pathlib import Path

import pytest

from proofbook.archive import Archive
from proofbook.lab.sim import client

from .conftest import expectations, run_scenario

SCENARIOS = list(expectations())

#: What the record must say besides the verdict: (check or signature word, verdict, words of the reason).
SAYS = {
    "gpu-missing": ("FAIL", "0000:"),
    "late-xid79": ("FAIL", "79"),
    "page-fault-storm": ("FAIL", "at least"),
    "mtp-silently-off": ("FAIL", "speculative"),
    "link-x8": ("FAIL", "x8"),
    "never-comes-back": ("UNKNOWN", "console"),
    "journal-stopped": ("UNKNOWN", "written nowhere"),
    "undeclared-service-gone": ("WARN", "chrony.service it ran before"),
    "aer-firmware": ("NOT_CHECKED", "firmware"),
}


def test_there_is_a_scenario_for_each_way_to_go_wrong() -> None:
    assert len(SCENARIOS) >= 25


@pytest.mark.lab
@pytest.mark.runbook
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, lab: Path, outputs: Path) -> None:
    right = expectations()[scenario]
    record = run_scenario(scenario, outputs)
    came = {"verdict": record.verdict, "status": record.status, "exit_code": record.exit_code}
    assert came == {k: right[k] for k in came}, record.headline
    assert Archive(outputs).verify(record.run_id) == []
    assert client.unknown_commands(scenario) == []
    client.stop(scenario)
    if scenario in SAYS:
        verdict, words = SAYS[scenario]
        told = [f"{f['subject']} {f['reason']} {f['what_to_do']}" for f in record.findings if f["verdict"] == verdict]
        assert any(words.lower() in text.lower() for text in told), told

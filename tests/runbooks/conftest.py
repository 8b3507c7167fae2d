"""Whole runbooks on simulated machines: one lab for the test run, records in a temporary folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook import launch
from proofbook.archive import Archive
from proofbook.lab.sim import client
from proofbook.launch import Outcome

RUNBOOK = "reboot-verification"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of this test run's own, stopped when it ends."""
    folder = tmp_path_factory.mktemp("lab")
    before = os.environ.get("PROOFBOOK_LAB_DIR")
    os.environ["PROOFBOOK_LAB_DIR"] = str(folder)
    yield folder
    client.stop()
    if before is None:
        del os.environ["PROOFBOOK_LAB_DIR"]
    else:
        os.environ["PROOFBOOK_LAB_DIR"] = before


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def expectation(scenario: str) -> dict[str, Any]:
    """How reboot verification should come out on a scenario, and the parameters to run it with."""
    (info,) = [i for i in client.scenarios() if i.scenario == scenario]
    right: dict[str, Any] = info.as_json()["runbooks"][RUNBOOK]
    return right


def run_scenario(scenario: str, outputs: Path, **parameters: Any) -> Outcome:
    """Run headless on a fresh machine of the scenario; a gate is approved as a person would who read the plan."""
    client.reset(scenario)
    given = {**expectation(scenario)["parameters"], **parameters, "host": f"lab:{scenario}"}
    outcome = launch.launch(RUNBOOK, given, outputs=outputs)
    if outcome.waiting_for:
        approval = {"approved": outcome.waiting_for["digest"], "approver": "tester"}
        outcome = launch.launch(RUNBOOK, {**given, **approval}, outputs=outputs)
    return outcome


def record_of(outcome: Outcome, outputs: Path) -> dict[str, Any]:
    assert outcome.run_id
    found: dict[str, Any] = Archive(outputs).load(outcome.run_id).as_json()
    return found

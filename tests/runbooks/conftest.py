"""Whole runbooks on simulated machines: one lab for the test run, records in a temporary folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proofbook import notebook
from proofbook.archive import Archive
from proofbook.errors import ProofbookError
from proofbook.lab.sim import client
from proofbook.launch import runbook_file
from proofbook.record import Keeper, RunRecord

RUNBOOK = "reboot-verification"


@pytest.fixture(scope="session")
def lab(nursery: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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


@pytest.fixture(autouse=True)
def seldom_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open record is rendered at its beginning, and hardly again before its end: a tenth of all this time is too much."""
    monkeypatch.setattr(Keeper, "_SHARE", 0.005)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@cache
def expectations() -> dict[str, dict[str, Any]]:
    """How reboot verification should come out on each scenario, and the parameters to run it with."""
    return {info.scenario: info.as_json()["runbooks"][RUNBOOK] for info in client.scenarios() if RUNBOOK in info.runbooks}


def code_cells(**parameters: Any) -> list[str]:
    """The code cells of the runbook, with a person's edits of the parameters cell."""
    cells = [c for c in json.loads(runbook_file(RUNBOOK).read_text())["cells"] if c["cell_type"] == "code"]
    sources = ["".join(c["source"]) for c in cells]
    edits = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    return [f"{sources[0]}\n{edits}", *sources[1:]]


def execute(outputs: Path, **parameters: Any) -> RunRecord:
    """The notebook's cells in this process, in order, until one raises: quicker than a kernel, and the same code.

    With an ``approver`` and no digest, the gate is opened as by a person who read the plan in the cell before.
    """
    before = {r.run_id for r in Archive(outputs).runs()}
    notebook._current.clear()
    names: dict[str, Any] = {"__name__": "__main__"}
    os.environ["PROOFBOOK_OUTPUTS"] = str(outputs)
    try:
        for source in code_cells(**parameters):
            exec(compile(source, RUNBOOK, "exec"), names)
            if "run.plan(" in source and parameters.get("approver") and not parameters.get("approved"):
                names["approved"] = names["plan"].digest
    except ProofbookError:
        pass  # what it came to is in the record
    finally:
        del os.environ["PROOFBOOK_OUTPUTS"]
    (new,) = [r for r in Archive(outputs).runs() if r.run_id not in before]
    return Archive(outputs).load(new.run_id)


def run_scenario(scenario: str, outputs: Path) -> RunRecord:
    """Run on a fresh machine of the scenario, and open its gate."""
    client.reset(scenario)
    given = expectations()[scenario]["parameters"]
    return execute(outputs, **given, host=f"lab:{scenario}", **({"approver": "tester"} if given.get("reboot") else {}))

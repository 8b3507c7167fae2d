"""MTP enablement on every scenario that is about it: the right rung of the ladder, kept or taken back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from proofbook import notebook
from proofbook.archive import Archive
from proofbook.errors import ProofbookError
from proofbook.lab.sim import client
from proofbook.launch import runbook_file
from proofbook.record import RunRecord

RUNBOOK = "mtp-enablement"
EXPECTED = {i.scenario: i.as_json()["runbooks"][RUNBOOK] for i in client.scenarios() if RUNBOOK in i.runbooks}
#: Played in test_mtp_key.py, with the key and without.
ELSEWHERE = {"mtp-api-key", "mtp-api-key-not-given"}
#: One concurrency and a short window: what the scenarios are about shows there too, but for those that are about just that.
QUICK: dict[str, Any] = {"concurrency": "1", "stability_minutes": 1.0}
OWN: dict[str, dict[str, Any]] = {
    "mtp-gain-only-low-concurrency": {"concurrency": "1,8"},
    "mtp-crash-after-minutes": {"stability_minutes": 10.0},
}


def play(scenario: str, outputs: Path, *, reset: bool = True) -> RunRecord:
    """The notebook's cells in this process; the gate is opened as by a person who read the plan in the cell before."""
    if reset:
        client.reset(scenario)
    before = {run.run_id for run in Archive(outputs).runs()}
    cells = [c for c in json.loads(runbook_file(RUNBOOK).read_text())["cells"] if c["cell_type"] == "code"]
    given = {
        **QUICK,
        **OWN.get(scenario, {}),
        **EXPECTED[scenario]["parameters"],
        "host": f"lab:{scenario}",
        "approver": "tester",
    }
    names: dict[str, Any] = {"__name__": "__main__"}
    notebook._current.clear()
    os.environ["PROOFBOOK_OUTPUTS"] = str(outputs)
    try:
        for source in ["".join(c["source"]) for c in cells]:
            exec(compile(source, RUNBOOK, "exec"), names)
            if source.startswith("# parameters"):
                names |= given
            if "run.plan(" in source:
                names["approved"] = names["plan"].digest
    except ProofbookError:
        pass  # what it came to is in the record
    finally:
        del os.environ["PROOFBOOK_OUTPUTS"]
    (only,) = [run for run in Archive(outputs).runs() if run.run_id not in before]
    return Archive(outputs).load(only.run_id)


@pytest.mark.lab
@pytest.mark.runbook
def test_a_gain_over_both_measurements_of_the_old_configuration_is_kept(
    lab: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OWN, "healthy", {"measure_again": True})
    record = play("healthy", outputs)
    assert (record.status, record.decisions[-1]["rung"]) == ("completed", "PASS_WITH_LIMITS"), record.summary
    assert [m["name"] for m in record.measurements] == [
        "serving.Baseline", "serving.ControlPrompts", "serving.Stability", "serving.Gain", "serving.GainAgain",
        "serving.ControlPrompts",
    ]  # fmt: skip
    again = [f for f in record.findings if f["check"] == "mtp.NotDrift"]
    assert [f["verdict"] for f in again] == ["PASS", "PASS"], again
    assert "runs at 1.00 times its first speed" in again[1]["reason"]
    assert {f["check"] for f in record.findings if f["look"] == "in effect again"} >= {"mtp.Started", "mtp.SpeculationIsOn"}
    assert "gain-again" in [p["name"] for p in record.pictures]
    client.stop("healthy")


@pytest.mark.lab
@pytest.mark.runbook
def test_what_was_kept_is_there_already_and_nothing_is_judged_or_taken_back(lab: Path, outputs: Path) -> None:
    kept = play("healthy", outputs)
    assert (kept.status, kept.decisions[-1]["keep"]) == ("completed", True), kept.summary
    (plan,) = kept.plans
    assert plan["actions"][-1]["what"].startswith("kept only if: the control prompts (set ")
    (room,) = [fact for fact in plan["facts"] if fact.startswith("requests at once: ")]
    assert " now → about " in room and "; KV cache: about " in room
    limits = [limit for limit in kept.decisions[-1]["limits"] if "a server with less room, requests at once: " in limit]
    assert bool(limits) == ("% less" in room)
    again = play("healthy", outputs, reset=False)
    assert (again.status, again.verdict, again.exit_code) == ("completed", "PASS", 0), again.summary
    assert f"has this speculation already (run {kept.run_id} kept it)" in again.summary
    (decision,) = again.decisions
    assert (decision["rung"], decision["acted"]) == ("NOTHING_TO_DO", False)
    assert not [f for f in again.findings if f["verdict"] in ("FAIL", "UNKNOWN")]
    assert not again.measurements and not [act for p in again.plans for act in p["acts"]]
    client.stop("healthy")


@pytest.mark.lab
@pytest.mark.runbook
@pytest.mark.parametrize("scenario", [s for s in EXPECTED if s not in ELSEWHERE])
def test_scenario(scenario: str, lab: Path, outputs: Path) -> None:
    right = EXPECTED[scenario]
    record = play(scenario, outputs)
    rung = record.decisions[-1]["rung"] if record.decisions else ""
    came = {"verdict": record.verdict, "status": record.status, "exit_code": record.exit_code, "rung": rung}
    assert came == {k: right.get(k, "") for k in came}, record.summary
    assert Archive(outputs).verify(record.run_id) == []
    assert client.unknown_commands(scenario) == []
    client.stop(scenario)

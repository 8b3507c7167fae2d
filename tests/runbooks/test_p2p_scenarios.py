"""The pair matrix on every scenario that is about it: verdict, conclusion, and what the record says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proofbook import notebook
from proofbook.archive import Archive
from proofbook.errors import ProofbookError
from proofbook.lab.sim import client, scenario
from proofbook.launch import runbook_file
from proofbook.record import RunRecord

RUNBOOK = "p2p-pair-matrix"
SCENARIOS = sorted(name for name in scenario.names() if RUNBOOK in scenario.load(name).expect)
#: A short ladder: what the scenarios are about shows at these sizes too.
QUICK: dict[str, Any] = {"sizes": "4,1048576", "repeats": 1}

#: Words that the conclusion gives as its reason.
BECAUSE = {
    "p2p-healthy": "all 12 ordered pairs pass every path, alone and together",
    "p2p-healthy-eight": "all 56 ordered pairs pass every path",
    "p2p-partial-faults": "5 of 12 ordered pairs: wrong data, the kernel's log has faults of 5 of these pairs",
    "p2p-lost-writes": "2 of 12 ordered pairs: wrong data. ",
    "p2p-hang-two-ranks": "both-directions: hung in 1 pair that passed alone",
    "p2p-wedged-gpu": "1 of 12 ordered pairs: hung",
    "p2p-host-resets": "the machine restarted in the middle of it",
    "p2p-iommu-off": "all 12 ordered pairs pass",
    "p2p-one-gpu": "1 GPU: there is no pair",
    "p2p-bandwidth-outlier": "1 pair is slow: 0000:21:00.0 to 0000:61:00.0",
    "p2p-impossible-bandwidth": "12 ordered pairs: invalid",
    "p2p-nic-fault": "all 12 ordered pairs pass",
}
#: Words of a finding, with its verdict.
FINDS = {
    "p2p-partial-faults": ("WARN", "5 of 12 ordered pairs: wrong data: 0000:"),
    "p2p-lost-writes": ("WARN", "2 of 12 ordered pairs: wrong data: 0000:"),
    "p2p-hang-two-ranks": ("WARN", "hung in both-directions, though right alone: 0000:"),
    "p2p-healthy": ("WARN", "the IOMMU translates for the GPUs"),
    "p2p-wedged-gpu": ("FAIL", "0000:81:00.0 did not come to rest"),
    "p2p-host-resets": ("FAIL", "it restarted in the middle"),
    "p2p-iommu-off": ("NOT_CHECKED", "a clean kernel log proves nothing here: no IOMMU is at work"),
    "p2p-one-gpu": ("NOT_CHECKED", "there is no pair"),
    "p2p-impossible-bandwidth": ("FAIL", "more than the link carries"),
    "p2p-nic-fault": ("WARN", "0000:22:00.0 is in no pair of this window"),
}


def execute(outputs: Path, **parameters: Any) -> RunRecord:
    before = {r.run_id for r in Archive(outputs).runs()}
    notebook._current.clear()
    cells = [c for c in json.loads(runbook_file(RUNBOOK).read_text())["cells"] if c["cell_type"] == "code"]
    first, *rest = ["".join(c["source"]) for c in cells]
    edits = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_OUTPUTS", str(outputs))
        try:
            for source in (f"{first}\n{edits}", *rest):
                exec(compile(source, RUNBOOK, "exec"), names)
        except ProofbookError:
            pass  # what it came to is in the record
    (new,) = [r for r in Archive(outputs).runs() if r.run_id not in before]
    return Archive(outputs).load(new.run_id)


def test_each_scenario_has_its_reason() -> None:
    assert set(SCENARIOS) == BECAUSE.keys()


@pytest.mark.lab
@pytest.mark.runbook
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, lab: Path, outputs: Path) -> None:
    client.reset(name)
    right = scenario.load(name).expect[RUNBOOK]
    given = {**QUICK, **right.parameters, "host": f"lab:{name}"}
    record = execute(outputs, **given)
    if record.waiting_for:
        assert record.exit_code == 3
        record = execute(outputs, **given, approved=record.waiting_for["digest"], approver="tester")
    came = (record.verdict, record.status, record.exit_code, record.conclusion_word)
    assert came == (right.verdict, right.status, right.exit_code, right.conclusion), record.summary
    assert record.conclusion is not None
    assert BECAUSE[name] in record.conclusion["because"]
    told = [(f["verdict"], f["reason"]) for f in record.findings]
    if name in FINDS:
        assert any(verdict == FINDS[name][0] and FINDS[name][1] in reason for verdict, reason in told), told
    else:
        assert not [reason for verdict, reason in told if verdict in ("FAIL", "UNKNOWN")]
    assert Archive(outputs).verify(record.run_id) == []
    assert client.unknown_commands(name) == []
    if name in LOOKS:
        LOOKS[name](record)
    client.stop(name)


def off_and_serving_again(record: RunRecord) -> None:
    """The story of the machine that it is all about: some pairs fault, peer-to-peer stays off, and the server is back."""
    assert record.conclusion is not None
    assert record.conclusion["peer_to_peer"] == "off"
    tables = {t["name"]: t for t in record.tables}
    assert any("NCCL_P2P_DISABLE=1" in str(row) for row in tables["fallback"]["rows"])
    states = [row[4] for row in tables["pairs"]["rows"]]
    assert (states.count("verified"), states.count("wrong data")) == (7, 5)
    (plan,) = record.plans
    assert plan["applied"]["outcome"] == "restored"
    assert any("a copy may reset the host" in text for text in plan["cannot_undo"])
    assert record.summary.startswith("Hypothesis refuted: 5 of 12 ordered pairs: wrong data")
    assert "Bad: 0000:" in record.summary and "NCCL_P2P_DISABLE=1" in record.summary
    assert record.conclusion["limits"] == [], "off needs no weighing"
    assert "a pair is usable only if both directions pass" in str(tables["fallback"]["rows"][0])
    assert "is ready after" in plan["applied"]["summary"]
    assert ("PASS", True) in {(f["verdict"], "its process carries" in f["reason"]) for f in record.findings}
    assert {p["name"] for p in record.pictures} == {"p2p-pairs", "p2p-speed"}


def weighed_against_the_vendor(record: RunRecord) -> None:
    """What was shown and what the vendor supports stand beside one another; the gate named the danger."""
    assert not [n for n in record.notes if n["kind"] == "warning"], "the gate has said it"
    assert record.conclusion is not None
    (limit,) = record.conclusion["limits"]
    assert "NVIDIA does not support" in limit
    assert any(f["check"] == "p2p.PairsUsable" and f["verdict"] == "PASS" for f in record.findings)


LOOKS: dict[str, Callable[[RunRecord], None]] = {
    "p2p-partial-faults": off_and_serving_again,
    "p2p-healthy": weighed_against_the_vendor,
}


@pytest.mark.lab
@pytest.mark.runbook
def test_a_later_run_is_held_against_the_one_before(lab: Path, outputs: Path) -> None:
    name = "p2p-host-resets"
    client.reset(name)
    given = {**QUICK, "host": f"lab:{name}"}
    assert execute(outputs, **given).conclusion_word == "refuted"
    again = execute(outputs, **given)
    assert not any(p["gates"] and p["actions"] for p in again.plans)
    (note,) = [n for n in again.notes if n["kind"] == "warning"]
    assert "a copy may reset the host" in note["text"], "nothing was stopped, so no gate has named the danger"
    assert again.conclusion_word == "supported", "what restarted it does so once"
    (since,) = [t for t in again.tables if t["name"] == "since"]
    assert any("verified, before error" in row[0] for row in since["rows"])
    client.stop(name)

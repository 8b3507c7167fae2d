"""MTP enablement stepped cell by cell by a person who types the approval: the same record as headless, but for who and when."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook.archive import Archive
from proofbook.lab.sim import client
from proofbook.launch import launch, runbook_file

from .test_stepping import Stepper, acts, only_record

pytestmark = [pytest.mark.lab, pytest.mark.runbook]

RUNBOOK = "mtp-enablement"
GIVEN: dict[str, Any] = {"host": "lab:healthy", "concurrency": "1", "stability_minutes": 0.2}


@pytest.fixture
def stepper(lab: Path, outputs: Path) -> Iterator[Stepper]:
    here = Stepper({**os.environ, "PROOFBOOK_OUTPUTS": str(outputs), "PROOFBOOK_LAB_DIR": str(lab)})
    yield here
    here.close()


def cells() -> list[str]:
    """The code cells, with a person's edits of the parameters cell."""
    code = [c for c in json.loads(runbook_file(RUNBOOK).read_text())["cells"] if c["cell_type"] == "code"]
    first, *others = ["".join(c["source"]) for c in code]
    edits = "\n".join(f"{name} = {value!r}" for name, value in GIVEN.items())
    return [f"{first}\n{edits}", *others]


def shape(record: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on how it was run: everything but times, numbers of this one run, and who approved."""
    (plan,) = record["plans"]
    return {
        "findings": [
            (f["check"], re.sub("[0-9a-f]{8}", "<id>", f["subject"]), f["verdict"], f["look"]) for f in record["findings"]
        ],
        "measured": [(m["name"], m["unit"], sorted(m["value"]), m["problems"]) for m in record["measurements"]],
        "plan": (plan["digest"], plan["applied"]["outcome"]),
        "acts": [(a["what"], a["outcome"]) for a in plan["acts"]],
        "pictures": [p["name"] for p in record["pictures"]],
        "not verified": sorted(n["title"] for n in record["notes"]),
        "end": (record["verdict"], record["status"], record["exit_code"]),
    }


def test_stepped_live_and_headless_leave_the_same_record(stepper: Stepper, outputs: Path) -> None:
    client.reset("healthy")
    for source in cells():
        reply = stepper.step(source, answer="gpu-hv1")
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
    assert len(stepper.questions) == 1
    assert "Do not approve: press Enter" in stepper.questions[0]
    live = only_record(outputs)
    assert live["plans"][0]["gates"][-1]["how"] == "typed"
    assert "keep the change: take the guard away" in [act["what"] for act in acts(live)]

    client.reset("healthy")  # the same machine again, so the plan that was read is the plan of now
    approved = {"approved": live["plans"][0]["digest"], "approver": "tester"}
    elsewhere = outputs.with_name("headless")  # an archive that knows nothing of the live run
    done = launch(RUNBOOK, {**GIVEN, **approved}, outputs=elsewhere)
    assert done.run_id, done.message
    assert shape(Archive(elsewhere).load(done.run_id).as_json()) == shape(live)

"""Reboot verification as an engineer steps through it: real JupyterLab, real kernel, real clicks, a simulated machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from proofbook.archive import Archive
from proofbook.lab.sim import client
from proofbook.launch import runbook_file
from proofbook.record import RunRecord

from .jupyterlab import JupyterLab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.lab]

SCENARIO = "healthy"
MACHINE = "gpu-hv1"


def parameters(**edits: Any) -> str:
    """The parameters cell as a person leaves it: some defaults changed, in place."""
    notebook = json.loads(runbook_file("reboot-verification").read_text())
    (source,) = ["".join(c["source"]) for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    for name, value in edits.items():
        source, found = re.subn(rf"^({name}: \w+ = )\S+", lambda m, v=value: m[1] + repr(v), source, flags=re.M)
        assert found == 1
    return source


@pytest.fixture
def notebook(page: Page, jupyterlab: JupyterLab, request: pytest.FixtureRequest) -> Notebook:
    """The runbook, opened on a fresh machine, with the parameters typed in."""
    client.reset(SCENARIO)
    name = f"{request.node.name}.ipynb"
    opened = Notebook(page, jupyterlab.put(runbook_file("reboot-verification"), name))
    opened.replace(opened.code("# parameters"), parameters(host=f"lab:{SCENARIO}", reboot=True, settle_minutes=0.5))
    return opened


def newest(outputs: Path) -> RunRecord:
    """The newest record, which must be sealed and whole."""
    archive = Archive(outputs)
    (brief,) = archive.runs(limit=1)
    assert archive.verify(brief.run_id) == []
    return archive.load(brief.run_id)


def decision(record: RunRecord) -> tuple[str, str]:
    """What was decided at the gate, and how it was said."""
    (plan,) = record.plans
    (gate,) = plan["gates"]
    return gate["decision"], gate["how"]


def to_the_gate(notebook: Notebook) -> None:
    for words in ("# parameters", "open_run(", "run.observe("):
        notebook.run(notebook.code(words))


def test_approve_by_button_and_go_on_to_the_end(notebook: Notebook, outputs: Path) -> None:
    to_the_gate(notebook)
    plan = notebook.code("run.plan(")
    shown = notebook.run(plan)
    expect(shown.first).to_contain_text("systemctl reboot")
    expect(shown.first).to_contain_text("Cannot be undone")
    buttons = shown.last
    expect(buttons.get_by_role("button")).to_have_text([f"Do not: leave {MACHINE} as it is", f"Approve: Reboot {MACHINE}"])
    buttons.get_by_role("button", name="Approve").click()
    expect(buttons).to_contain_text("Approved by")
    notebook.run(notebook.code("run.gate("))
    steps = ("run.apply(", "rv.first_look(", "rv.second_look(", "rv.table(", "run.note(", "run.close(")
    told = {words: notebook.run(notebook.code(words)) for words in steps}
    record = newest(outputs)
    assert (record.status, record.verdict) == ("completed", "PASS"), record.summary
    assert decision(record) == ("approved", "button")
    expect(told["run.apply("].first).to_contain_text("it lets us in again")
    expect(told["rv.first_look("].first.locator("summary")).to_contain_text("PASS")
    expect(told["rv.table("].first).to_contain_text("new, as it must be")
    sealed = told["run.close("].filter(has_text="Not verified")  # among what the last acts said, and the run itself
    expect(sealed.first).to_contain_text(record.run_id)


def test_do_not_stops_and_what_follows_touches_nothing(notebook: Notebook, outputs: Path) -> None:
    to_the_gate(notebook)
    buttons = notebook.run(notebook.code("run.plan(")).last
    buttons.get_by_role("button", name="Do not").click()
    expect(buttons).to_contain_text("Not approved")
    gate = notebook.run(notebook.code("run.gate("))
    expect(gate.last).to_contain_text("StoppedAtGate")
    after = notebook.run(notebook.code("run.apply("))
    expect(after.last).to_contain_text("Sealed")
    record = newest(outputs)
    assert record.status == "stopped-at-gate"
    assert decision(record) == ("declined", "button")
    (plan,) = record.plans
    assert plan["acts"] == []
    (machine,) = client.status()
    assert machine["boot_id"] == record.before["boot_id"]


def test_run_all_waits_at_the_gate_for_the_name_of_the_machine(notebook: Notebook, outputs: Path) -> None:
    notebook.run_all()
    box = notebook.page.locator(".jp-Stdin-input")
    expect(box).to_be_visible()
    box.fill("gpu-hv2")
    box.press("Enter")
    expect(notebook.output(notebook.code("run.gate(")).filter(has_text="not the name of this machine")).to_have_count(1)
    # the answered box may stand beside the new one for a moment
    expect(box.last).to_have_value("")
    box.last.fill(MACHINE)
    box.last.press("Enter")
    expect(notebook.output(notebook.code("run.close(")).last).to_contain_text("completed")
    record = newest(outputs)
    assert (record.status, record.verdict) == ("completed", "PASS"), record.summary
    assert decision(record) == ("approved", "typed")

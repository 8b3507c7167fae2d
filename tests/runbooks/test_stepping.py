"""The same notebook stepped cell by cell in a real kernel, with stdin allowed, as JupyterLab does it."""

from __future__ import annotations

import os
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from proofbook.archive import Archive
from proofbook.lab.sim import client
from proofbook.launch import launch

from .conftest import RUNBOOK, code_cells

pytestmark = [pytest.mark.lab, pytest.mark.runbook]


class Stepper:
    """A front end that allows stdin and executes one cell at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=environment)
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.questions: list[str] = []

    def step(self, source: str, answer: str = "") -> dict[str, Any]:
        """Execute one cell, answering whatever it asks; returns the execute reply with the texts that it showed."""
        asked = self.client.execute(source, allow_stdin=True)
        shown: list[str] = []
        while True:
            try:
                question = self.client.get_stdin_msg(timeout=0.05)
            except queue.Empty:
                pass
            else:
                self.questions.append(question["content"]["prompt"])
                self.client.input(answer)
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            if message["msg_type"] in ("display_data", "execute_result", "update_display_data"):
                shown.append(
                    content["data"].get("text/html") or content["data"].get("text/markdown") or content["data"]["text/plain"]
                )
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        while True:  # answers to the questions of the start may still be waiting there
            reply = self.client.get_shell_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == asked:
                return {**reply["content"], "shown": shown}

    def close(self) -> None:
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=False)


@pytest.fixture
def stepper(lab: Path, outputs: Path) -> Iterator[Stepper]:
    here = Stepper({**os.environ, "PROOFBOOK_OUTPUTS": str(outputs), "PROOFBOOK_LAB_DIR": str(lab)})
    yield here
    here.close()


def shape(record: dict[str, Any]) -> Any:
    """What must not depend on how it was run: everything but times, identities of this one run, and who approved."""
    findings = [(f["check"], re.sub("[0-9a-f]{8}", "<id>", f["subject"]), f["verdict"], f["look"]) for f in record["findings"]]
    return findings, record["verdict"], record["status"]


def only_record(outputs: Path) -> dict[str, Any]:
    (brief,) = Archive(outputs).runs()
    return Archive(outputs).load(brief.run_id).as_json()


def acts(record: dict[str, Any]) -> list[Any]:
    return [act for plan in record["plans"] for act in plan["acts"]]


def launched(outputs: Path) -> dict[str, Any]:
    """The same through our launcher and papermill: stopped at the gate, approved, done."""
    client.reset("healthy")
    given = {"host": "lab:healthy", "reboot": True, "settle_minutes": 1.0}
    waiting = launch(RUNBOOK, given, outputs=outputs)
    assert (waiting.status, waiting.exit_code) == ("stopped-at-gate", 3)
    assert waiting.waiting_for
    done = launch(RUNBOOK, {**given, "approved": waiting.waiting_for["digest"], "approver": "tester"}, outputs=outputs)
    assert (done.status, done.verdict, done.exit_code) == ("completed", "PASS", 0)
    assert done.run_id
    record = Archive(outputs).load(done.run_id).as_json()
    assert record["continues"] == waiting.run_id
    return record


def test_stepped_live_and_headless_leave_the_same_record(stepper: Stepper, outputs: Path) -> None:
    client.reset("healthy")
    for source in code_cells(host="lab:healthy", reboot=True, settle_minutes=1.0):
        reply = stepper.step(source, answer="gpu-hv1")
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
    assert len(stepper.questions) == 1
    assert "Do not approve: press Enter" in stepper.questions[0]
    live = only_record(outputs)
    assert live["plans"][0]["gates"][-1]["how"] == "typed"
    # WHY another archive: the live run's configuration would be the "last kept" one of the second run, a check more
    headless = launched(outputs.with_name("headless"))
    assert set(shape(live)[0]) ^ set(shape(headless)[0]) == set()
    assert shape(live) == shape(headless)


def test_enter_at_the_gate_stops_and_the_next_cells_touch_nothing(stepper: Stepper, outputs: Path) -> None:
    client.reset("healthy")
    replies = []
    for source in code_cells(host="lab:healthy", reboot=True, settle_minutes=0.0):
        replies.append(stepper.step(source, answer=""))
    assert [r["ename"] for r in replies if r["status"] == "error"][:2] == ["StoppedAtGate", "Sealed"]
    record = only_record(outputs)
    assert (record["status"], record["exit_code"], acts(record)) == ("stopped-at-gate", 3, [])


def test_a_cell_that_is_run_again_does_not_act_again(stepper: Stepper, outputs: Path) -> None:
    client.reset("healthy")
    sources = code_cells(host="lab:healthy", reboot=True, settle_minutes=0.0)
    apply_at = next(i for i, s in enumerate(sources) if "run.apply" in s)
    for source in sources[: apply_at + 1]:
        assert stepper.step(source, answer="gpu-hv1")["status"] == "ok"
    assert stepper.step(sources[apply_at])["status"] == "ok"
    for source in sources[apply_at + 1 :]:
        assert stepper.step(source)["status"] == "ok"
    assert [act["what"] for act in acts(only_record(outputs))] == [
        "take the machine's lease",
        "use the approval up, on the machine itself",
        "ask systemd for an orderly reboot",
        "give the machine's lease back",
    ]


def test_a_wrong_parameter_is_refused_in_the_notebook_too(stepper: Stepper, outputs: Path) -> None:
    reply = [stepper.step(s) for s in code_cells(host="lab:healthy", settle_minutes="soon")[:2]][-1]
    assert reply["ename"] == "BadParameter"
    assert "settle_minutes" in reply["evalue"]
    assert not outputs.exists() or not any(outputs.rglob("journal.jsonl"))

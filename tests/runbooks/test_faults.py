"""What is left when a run is stopped, killed, or started by plain papermill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proofbook.archive import Archive
from proofbook.journal import read_journal
from proofbook.lab.sim import client
from proofbook.launch import runbook_file

from .conftest import RUNBOOK

pytestmark = [pytest.mark.lab, pytest.mark.runbook]


def start(outputs: Path) -> subprocess.Popen[str]:
    """A run that only verifies and then waits for hours of lab time."""
    client.reset("healthy")
    command = [sys.executable, "-m", "proofbook.cli", "run", RUNBOOK, "--host", "lab:healthy", "--json"]
    command += ["--outputs", str(outputs), "-p", "settle_minutes=240"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def journals(outputs: Path) -> list[Path]:
    return sorted(outputs.rglob("journal.jsonl"))


def wait_for(what: Callable[[], Any], patience_s: float = 90.0) -> Any:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come")


def waits(outputs: Path) -> list[dict[str, Any]]:
    """The events of the run, once it is in its waiting step."""
    for path in journals(outputs):
        events = read_journal(path).events
        if any(e["event"] == "step.started" and e["data"]["verb"] == "wait" for e in events):
            return list(events)
    return []


def kernel_of(events: list[dict[str, Any]]) -> int:
    pid: int = events[0]["data"]["runner"]["pid"]
    return pid


def test_a_run_that_is_told_to_stop_closes_its_record(lab: Path, outputs: Path) -> None:
    running = start(outputs)
    wait_for(lambda: waits(outputs))
    running.send_signal(signal.SIGTERM)
    answer = json.loads(running.communicate(timeout=60)[0].splitlines()[-1])
    assert (answer["status"], answer["verdict"], answer["exit_code"]) == ("aborted", "UNKNOWN", 7)
    assert running.returncode == 7
    assert Archive(outputs).verify(answer["run_id"]) == []
    assert answer["not_verified"] == Archive(outputs).load(answer["run_id"]).not_verified
    assert any("before the last reboot was not verified" in line for line in answer["not_checked"]), "the record's remarks too"


def test_a_killed_kernel_is_a_lost_run(lab: Path, outputs: Path) -> None:
    running = start(outputs)
    os.kill(kernel_of(wait_for(lambda: waits(outputs))), signal.SIGKILL)
    answer = json.loads(running.communicate(timeout=60)[0].splitlines()[-1])
    assert (answer["status"], answer["exit_code"]) == ("lost", 7)


def test_a_killed_runner_leaves_a_journal_that_says_how_far_it_came_and_the_sweep_seals_it(lab: Path, outputs: Path) -> None:
    running = start(outputs)
    kernel = kernel_of(wait_for(lambda: waits(outputs)))
    running.kill()
    running.communicate()
    wait_for(lambda: not Path(f"/proc/{kernel}").exists())
    (journal,) = journals(outputs)
    assert journal.parent.name.endswith(".partial")
    assert read_journal(journal).intact
    (lost,) = Archive(outputs).sweep()
    record = Archive(outputs).load(lost)
    assert (record.status, record.exit_code) == ("lost", 7)
    assert Archive(outputs).verify(lost) == []
    assert Archive(outputs).sweep() == []


def papermill(tmp_path: Path, outputs: Path, **parameters: str) -> subprocess.CompletedProcess[str]:
    words = [w for name, value in parameters.items() for w in ("-p", name, value)]
    command = [sys.executable, "-m", "papermill", str(runbook_file(RUNBOOK)), str(tmp_path / "out.ipynb"), "--no-progress-bar"]
    environment = {**os.environ, "PROOFBOOK_OUTPUTS": str(outputs)}
    return subprocess.run([*command, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_plain_papermill_leaves_the_same_record(lab: Path, outputs: Path, tmp_path: Path) -> None:
    client.reset("healthy")
    done = papermill(tmp_path, outputs, host="lab:healthy", settle_minutes="1")
    assert done.returncode == 0, done.stderr
    (run,) = Archive(outputs).runs()
    assert (run.status, run.verdict) == ("completed", "PASS")


def test_plain_papermill_with_a_misspelt_parameter_contacts_nobody(lab: Path, outputs: Path, tmp_path: Path) -> None:
    done = papermill(tmp_path, outputs, host="lab:healthy", settle_minute="1")
    assert done.returncode != 0
    assert "did you mean 'settle_minutes'" in done.stderr
    assert not journals(outputs)

"""Whole runbooks on real machines, and what their records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proofbook import launch
from proofbook.archive import Archive
from proofbook.launch import Outcome

RUNBOOK = "reboot-verification"


class Told:
    """An outcome and its record; ``digest`` is that of the plan that was read at the gate, "" when there was no need to."""

    def __init__(self, outcome: Outcome, outputs: Path, digest: str = "") -> None:
        self.outcome = outcome
        self.digest = digest
        assert outcome.run_id, outcome.message
        self.record: dict[str, Any] = Archive(outputs).load(outcome.run_id).as_json()

    def verdicts(self, check: str, look: str = "first look") -> dict[str, str]:
        """Subject → verdict of one check in one look."""
        return {f["subject"]: f["verdict"] for f in self.record["findings"] if f["check"] == check and f["look"] == look}

    def worst_of(self, verdict: str) -> list[str]:
        """What has a verdict, as "check subject: reason"."""
        found = [f for f in self.record["findings"] if f["verdict"] == verdict]
        return [f"{f['check']} {f['subject']}: {f['reason']}" for f in found]

    @property
    def summary(self) -> tuple[str, str, int]:
        return self.outcome.status, self.outcome.verdict, self.outcome.exit_code


def reboot_verification(host: str, outputs: Path, **parameters: Any) -> Told:
    """Run it headless; a gate is approved as a person would who read the plan."""
    given = {"host": host, "settle_minutes": 0.0, **parameters}
    outcome = launch.launch(RUNBOOK, given, outputs=outputs)
    digest = ""
    if outcome.waiting_for:
        digest = outcome.waiting_for["digest"]
        outcome = launch.launch(RUNBOOK, {**given, "approved": digest, "approver": "tester"}, outputs=outputs)
    return Told(outcome, outputs, digest)

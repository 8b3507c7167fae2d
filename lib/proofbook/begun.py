"""A run that ended between its approval and its confirmation: what another run needs to go on with it, or to undo it.

Everything comes from the dead run's journal. Where the change stands now is not known from there: the machine is asked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from proofbook.archive import Archive
from proofbook.errors import NoSuchRun, RecordError
from proofbook.model import Approval, Measurement, Plan, RunStatus
from proofbook.record import PARTIAL, RunRecord

__all__ = ["Begun", "load"]

#: A run that ended like this may have left a change half done.
_UNFINISHED = (RunStatus.ABORTED, RunStatus.LOST, RunStatus.ROLLBACK_FAILED)


class Begun:
    """What an earlier run planned, who approved it, and what it measured before; see :class:`proofbook.run.Earlier`."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.run_id = record.run_id
        self.origin = record.origin or record.run_id

    def plan(self, change: str) -> Plan | None:
        for told in reversed(self.record.plans):
            if told.get("change") == change:
                return _plan(told, self.run_id)
        return None

    def approval(self, digest: str) -> Approval | None:
        for told in self.record.plans:
            for gate in told["gates"]:
                if gate["decision"] == "approved" and gate["digest"] == digest:
                    at = datetime.fromisoformat(gate["at"])
                    return Approval(digest, gate["approver"], gate["how"], at, gate.get("issued_by") or "")
        return None

    def measurement(self, name: str) -> Measurement | None:
        """The first of this name: the one from before the change, whatever was measured later."""
        begun_at = min((g["ts"] for p in self.record.plans for g in p["gates"] if g["decision"] == "approved"), default="")
        for told in self.record.measurements:
            if told["name"] == name and (not begun_at or told["ts"] <= begun_at):
                return msgspec.convert(dict(told), Measurement)
        return None

    @property
    def approved_plan(self) -> Plan:
        """The plan that was approved and has an undo. Raises NoSuchRun when the run never came that far."""
        for told in reversed(self.record.plans):
            if any(g["decision"] == "approved" for g in told["gates"]) and told.get("undo"):
                return _plan(told, self.run_id)
        raise NoSuchRun(
            f"run {self.run_id} has no approved plan that could be taken back",
            hint="nothing behind its gate was done; open a new run instead",
        )


def _plan(told: Any, run_id: str) -> Plan:
    plan = msgspec.convert(dict(told), Plan)
    if plan.digest != told["digest"]:
        raise RecordError(
            f"the plan in the journal of run {run_id} is not the one that was approved (its digest differs)",
            hint="the journal was changed, or was written by another version; undo by hand, with what the record says",
        )
    return plan


def load(archive: Archive, run: str, *, undo: bool) -> Begun:
    """The run to go on with or (``undo``) to take back. Raises NoSuchRun when there is nothing of the kind to do.

    A run whose runner died is closed as lost first.
    """
    run_id = archive.find(run)
    folder = archive.folder_of(run_id)
    if folder is not None and folder.name.endswith(PARTIAL):
        if archive.runner_alive(folder):
            runner = archive.load(run_id).runner
            raise NoSuchRun(
                f"run {run_id} is still going on (process {runner.get('pid')} on {runner.get('host')})",
                hint="stop it first, or let it end",
            )
        archive.sweep(only=run_id)
    begun = Begun(archive.load(run_id))
    plan = begun.approved_plan
    status = RunStatus(begun.record.status)
    if status is RunStatus.ROLLED_BACK:
        raise NoSuchRun(f"run {run_id} was taken back already: {begun.record.summary}")
    if not undo and status not in _UNFINISHED:
        raise NoSuchRun(
            f"run {run_id} is {status}: there is nothing to go on with",
            hint=f"to undo what it did: proofbook rollback {run_id}",
        )
    if not any(told["acts"] for told in begun.record.plans if told["digest"] == plan.digest):
        raise NoSuchRun(f"run {run_id} had not begun to act; nothing is half done", hint="open a new run instead")
    return begun

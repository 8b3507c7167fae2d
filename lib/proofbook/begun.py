"""A run that ended between its approval and its confirmation: what another run needs to go on with it, or to undo it.

Everything comes from the dead run's journal. Where the change stands now is not known from there: the machine is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from proofbook.archive import Archive, Brief, half_done
from proofbook.errors import NoSuchRun, ProofbookError, RecordError
from proofbook.model import Approval, Decision, Measurement, Plan, RunStatus
from proofbook.procedures import taking_back
from proofbook.record import PARTIAL, RunRecord
from proofbook.run import runner_facts

__all__ = ["NOT_ENDED", "Begun", "later", "load", "next_steps", "not_ended", "refuse_two"]

#: How a run stands whose record is open and whose process is gone.
NOT_ENDED = "begun, not ended"

#: A run that ended like this may have left a change half done.
_UNFINISHED = (RunStatus.ABORTED, RunStatus.LOST, RunStatus.ROLLBACK_FAILED)


class Begun:
    """What an earlier run planned, who approved it, and what it measured before; see :class:`proofbook.run.Earlier`."""

    def __init__(self, record: RunRecord, others: Sequence[RunRecord] = ()) -> None:
        """``others``: the runs that went on with the change, oldest first."""
        self.record, self._others = record, others
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
    def decision(self) -> Decision | None:
        """The last that was decided of the change itself, by this run or by one that went on with it."""
        for record in (*reversed(self._others), self.record):
            for told in reversed(record.decisions):
                if told.get("acted", True):
                    return Decision(bool(told["keep"]), str(told["rung"]), str(told["because"]), tuple(told.get("limits", ())))
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

    A run whose runner died is closed as lost first, and so are those that went on with it.
    """
    run_id = archive.find(run)
    _settle(archive, run_id)
    begun = Begun(archive.load(run_id))
    _refuse_undoing(begun.record)
    plan = begun.approved_plan
    if not any(told["acts"] for told in begun.record.plans if told["digest"] == plan.digest):
        raise NoSuchRun(f"run {run_id} had not begun to act; nothing is half done", hint="open a new run instead")
    others = _went_on(archive, begun)
    for brief in [_brief_of(begun.record), *others]:
        _refuse_ended(brief, run_id, undo=undo)
    records = [archive.load(brief.run_id) for brief in others]
    for record in (begun.record, *records):
        _refuse_restored(record, plan.digest)
    return Begun(begun.record, records)


def refuse_two(archive: Archive, begun: Begun, own: str) -> None:
    """Two that go on with one change at once would hold one lease. Raises NoSuchRun when another one does so too."""
    for brief in _went_on(archive, begun, settle=False):
        if brief.run_id != own and _busy(archive, brief.run_id):
            raise _still_busy(archive, brief.run_id)


def next_steps(archive: Archive, run: str, host: str) -> list[str]:
    """What a person can do about the run that holds ``host``, as far as this archive knows it; one thing a line."""
    breaking = f"proofbook lease break {host} {run} --who YOUR-NAME"
    try:
        record = archive.load(run) if archive.folder_of(run) is not None else None
    except ProofbookError:  # a damaged record tells nothing; what the machine said stands above
        record = None
    if record is None:
        return [
            f"run {run} is not in {archive.outputs}: ask its holder, or look where it was started",
            f"only when it is really over: {breaking}",
        ]
    family = [run, *(b.run_id for b in _went_on(archive, Begun(record), settle=False))]
    busy = [one for one in family if _busy(archive, one)]
    if busy:
        return [f"run {busy[0]} is still at work: let it end, or stop it"]
    return [
        "nobody works on it any more, as far as this archive knows; either of these gives the lease back:",
        f"  to go on with it: proofbook resume {run}",
        f"  to undo what it did: proofbook rollback {run}",
        f"only when neither can: {breaking}",
    ]


def later(briefs: Iterable[Brief]) -> dict[str, str]:
    """What became of runs by later ones: run id → "taken back by …" or "gone on with by … (status)". Runs left as they were
    are left out. ``briefs``: all that might belong together, in any order."""
    by_id = {brief.run_id: brief for brief in briefs}
    said: dict[str, str] = {}
    for brief in sorted(by_id.values(), key=lambda b: b.opened_at):
        undoing = brief.runbook == taking_back.PROCEDURE.name
        back = brief.status == RunStatus.ROLLED_BACK or (undoing and brief.status == RunStatus.COMPLETED)
        how = "taken back by" if back else "taking back was tried by" if undoing else "gone on with by"
        status = "not ended" if brief.status == RunStatus.RUNNING else brief.status
        told = f"{how} {brief.run_id}" + ("" if back else f" ({status})")
        earlier, seen = by_id.get(brief.continues or ""), {brief.run_id}
        while earlier is not None and earlier.run_id not in seen:
            at_gate = earlier.status == RunStatus.STOPPED_AT_GATE
            if not at_gate or earlier.run_id == brief.continues:  # a run that only waited did nothing that could be taken back
                said[earlier.run_id] = f"gone on with by {brief.run_id} ({status})" if at_gate else told
            seen.add(earlier.run_id)
            earlier = by_id.get(earlier.continues or "")
    return said


def not_ended(archive: Archive, run_id: str) -> tuple[str, str]:
    """How an open run stands, (status, remark): running, or :data:`NOT_ENDED` with what a person can do about it."""
    folder = archive.folder_of(run_id)
    record = archive.load(run_id)
    if folder is None or not folder.name.endswith(PARTIAL):
        return record.status, ""
    if not archive.runner_alive(folder):
        acts = [act["what"] for plan in record.plans for act in plan["acts"]]
        open_end = f"Its last act was: {acts[-1]}; look what came of it, then open a new run" if acts else "No change was begun"
        what = half_done(record).removeprefix(". ") or open_end
        return NOT_ENDED, f"its process is gone. {what}"
    where = str(record.runner.get("host", ""))
    if where != runner_facts()["host"]:
        return record.status, f"its process is on {where}: only there can be told whether it lives"
    return record.status, ""


def _went_on(archive: Archive, begun: Begun, *, settle: bool = True) -> list[Brief]:
    """Every run that went on with this change or took it back, oldest first. ``settle``: close those whose runner died."""
    family, found = {begun.origin, begun.run_id}, []
    for brief in reversed(archive.since(begun.origin)):
        if brief.continues in family and brief.run_id != begun.run_id:
            family.add(brief.run_id)
            found.append(brief)
    if not settle:
        return found
    for brief in found:
        _settle(archive, brief.run_id)
    return [_brief_of(archive.load(b.run_id)) if b.status == RunStatus.RUNNING else b for b in found]


def _brief_of(record: RunRecord) -> Brief:
    return msgspec.convert(record.as_json(), Brief)


def _busy(archive: Archive, run_id: str) -> bool:
    folder = archive.folder_of(run_id)
    return folder is not None and folder.name.endswith(PARTIAL) and archive.runner_alive(folder)


def _still_busy(archive: Archive, run_id: str) -> NoSuchRun:
    runner = archive.load(run_id).runner
    return NoSuchRun(
        f"run {run_id} is still at work on it (process {runner.get('pid')} on {runner.get('host')})",
        hint="let it end, or stop it (Ctrl-C there; kill that process) and say this again",
    )


def _settle(archive: Archive, run_id: str) -> None:
    folder = archive.folder_of(run_id)
    if folder is None or not folder.name.endswith(PARTIAL):
        return
    if archive.runner_alive(folder):
        raise _still_busy(archive, run_id)
    archive.sweep(only=run_id)


def _refuse_undoing(record: RunRecord) -> None:
    if record.runbook == taking_back.PROCEDURE.name:
        undone = str(record.parameters.get("run", ""))
        raise NoSuchRun(
            f"run {record.run_id} ({record.status}) is itself the taking back of run {undone}",
            hint=f"name that one: proofbook rollback {undone}",
        )


def _refuse_restored(record: RunRecord, digest: str) -> None:
    """A test or an experiment puts everything back itself: then there is nothing to go on with, nor to undo."""
    for told in record.plans:
        applied = told["applied"] if told["digest"] == digest else None
        if applied and applied["outcome"] == "restored":
            raise NoSuchRun(
                f"run {record.run_id} has put everything back itself: {applied['summary']}", hint="nothing of it is left to undo"
            )


def _refuse_ended(brief: Brief, run_id: str, *, undo: bool) -> None:
    """Why there is nothing to do any more, judged by one run of the change: the first one, or one that went on with it."""
    status = RunStatus(brief.status)
    undoing = brief.runbook == taking_back.PROCEDURE.name
    other = "" if brief.run_id == run_id else f" by run {brief.run_id}"
    at = f" ({brief.closed_at})" if brief.closed_at else ""
    if status is RunStatus.ROLLED_BACK or (undoing and status is RunStatus.COMPLETED):
        because = "" if undoing else f": {brief.summary}"
        raise NoSuchRun(
            f"run {run_id} was taken back already{other}{at}{because}",
            hint="to make the change after all, run the runbook anew and approve its plan",
        )
    if not undo and not undoing and status not in _UNFINISHED:
        ended = f"run {run_id} is {status}" if not other else f"run {run_id} was gone on with{other}, which is {status}{at}"
        raise NoSuchRun(f"{ended}: there is nothing to go on with", hint=f"to undo what it did: proofbook rollback {run_id}")

"""After a dead laptop or a killed kernel: go on with a change that was half done, or take it back.

Both first find out on the machine what happened; the journal of the dead run says only what was meant.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proofbook import begun, changes, launch, notebook
from proofbook.archive import Archive
from proofbook.errors import BadParameter, LeaseHeld, ProofbookError, Refused, TransportError
from proofbook.inventory import load_inventory
from proofbook.model import Plan, RunStatus, Verdict, exit_code
from proofbook.procedures import taking_back

Tell = Callable[[Mapping[str, Any]], None]


def resume(run: str, *, outputs: Path | None = None, tell: Tell | None = None) -> launch.Outcome:
    """Run the runbook of ``run`` again, headless, going on with what that run had begun.

    Its plan, its approval and what it measured before the change are taken from its journal; everything else is looked
    at anew. Never raises for what a run can come to.
    """
    folder = (outputs or notebook.outputs_folder()).resolve()
    try:
        earlier = begun.load(Archive(folder), run, undo=False)
    except ProofbookError as error:
        return launch.refused("resume", "", error)
    record = earlier.record
    parameters = {n: v for n, v in record.parameters.items() if n not in ("approved", "approver")}
    with launch.environment({"PROOFBOOK_RESUME": earlier.run_id}):
        return launch.launch(record.runbook, parameters, outputs=folder, parent=record.parent, tell=tell)


def roll_back(run: str, *, who: str = "", outputs: Path | None = None, tell: Tell | None = None) -> launch.Outcome:
    """Undo what ``run`` did, verify the old state, and leave a record of its own. Never raises for what it can come to.

    ``who``: whose decision it is, for the record.
    """
    folder = (outputs or notebook.outputs_folder()).resolve()
    book = Archive(folder)
    try:
        earlier = begun.load(book, run, undo=True)
        spec = load_inventory().resolve(earlier.record.host)
        plan = earlier.approved_plan
        change = changes.acting(plan)
    except Refused as error:
        return launch.refused("rollback", "", error)
    except ProofbookError as error:
        return launch.refused("rollback", run, BadParameter(str(error)))
    parameters = taking_back.PROCEDURE.validate({"host": spec.name, "run": earlier.run_id, "approver": who})
    run_id = notebook.new_run_id(taking_back.PROCEDURE.name, spec.name, datetime.now(UTC))
    with launch.environment({"PROOFBOOK_OUTPUTS": str(folder), "PROOFBOOK_RUN_ID": run_id}), launch.followed(book, run_id, tell):
        undoing = notebook.assemble(taking_back.PROCEDURE, parameters, spec, attended=False, earlier=earlier)
        trouble = ""
        try:
            notebook.alone(undoing, earlier)
            undoing.reach()
            undoing.tell(what_it_costs(plan))
            undone = undoing.rollback(change, plan)
            undoing.check(*taking_back.checks(undone), look="after taking back")
            undoing.note(taking_back.not_looked_at(plan, spec.name), kind="not-verified", title="beside what was taken back")
            undoing.close(f"Run {earlier.run_id}: {undone.summary}.")
        except ProofbookError as error:  # the run has said so in its journal
            ways = [*_who_holds(book, error, spec.name, earlier.run_id), *_unreached(error, plan, earlier.run_id, spec.console)]
            trouble = "\n".join([str(error), *ways])
            undoing.abort(trouble)
    return _outcome(book, run_id, spec.name, trouble)


def what_it_costs(plan: Plan) -> str:
    """What taking a change back will do to whoever uses the machine now, in a line, said before it is done."""
    ways = [list(action.argv) for action in plan.undo]
    reboots = any("reboot" in argv for argv in ways)
    units = sorted({argv[-1] for argv in ways if "restart" in argv})
    if reboots:
        cost = "; the machine will be rebooted, and everything on it stops meanwhile"
    elif units:
        cost = f"; {', '.join(units)} will be restarted, and answers nobody meanwhile"
    else:
        cost = ""
    return f"about to take back: {plan.title}{cost}"


def _who_holds(book: Archive, error: ProofbookError, host: str, undone: str) -> list[str]:
    """What to do about the run that has the machine's lease, before this taking back is said again."""
    if not isinstance(error, LeaseHeld) or not error.run:
        return []
    then = f"then: proofbook rollback {undone}"
    return [f"  → {line}" for line in (*begun.next_steps(book, error.run, host), then)]


def _unreached(error: ProofbookError, plan: Plan, undone: str, console: str) -> list[str]:
    """What to do when the machine does not let us in: it may be rebooting, or never come back by itself."""
    if not isinstance(error, TransportError):
        return []
    guard = plan.settings.get("guard_s")
    itself = f"; its guard takes it back by itself {guard / 60:g} min after it was armed" if guard else ""
    by_hand = [" ".join(filter(None, (action.what, shlex.join(action.argv)))) for action in plan.undo]
    return [
        f"  → this did not bring it back{itself}",
        f"  → if the machine reboots just now, say `proofbook rollback {undone}` again in a few minutes",
        f"  → if it stays away, look at its console ({console or 'the inventory names none'}); what undoes the change there:",
        *(f"      {line}" for line in by_hand),
    ]


def _outcome(book: Archive, run_id: str, host: str, trouble: str) -> launch.Outcome:
    found = book.load(run_id)
    folder = book.folder_of(run_id)
    message = launch.left_by_hand(found) or trouble
    return launch.Outcome(
        run_id=run_id,
        runbook=taking_back.PROCEDURE.name,
        host=host,
        status=found.status,
        verdict=found.verdict,
        conclusion=None,
        exit_code=exit_code(RunStatus(found.status), Verdict(found.verdict)),
        not_checked=found.not_checked_reasons,
        waiting_for=None,
        record=str(folder) if folder else None,
        message=message,
        not_verified=found.not_verified,
        **launch.told(found),
    )


__all__ = ["resume", "roll_back", "what_it_costs"]

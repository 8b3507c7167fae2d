"""``open_run``: the one place where the parts of a run are put together.

A runbook's import cell ends in ``run = open_run("<runbook>")``. It reads the parameters cell's names from the
notebook, validates them again (whichever way they came: a person, our launcher, or plain papermill), opens the record,
and makes first contact. Until the parameters are right no host is contacted and no record is begun.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import signal
import sys
import threading
import types
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proofbook import archive, begun, live, procedures, record
from proofbook.changes.custody import MachineCustody
from proofbook.errors import BadParameter, ProofbookError
from proofbook.host import Host
from proofbook.inventory import HostSpec, api_key, connect, load_inventory
from proofbook.journal import Journal, Writer
from proofbook.procedures.base import Procedure, refuse_secrets
from proofbook.redact import Redactor
from proofbook.run import About, Run, runner_facts

#: papermill marks the cell that it adds with this comment; what it sets are parameters, whatever their names.
_INJECTED = re.compile(r"\A\s*# Parameters\s*\n(?P<body>.*)", re.S)
_ASSIGNED = re.compile(r"^(?P<name>[A-Za-z_]\w*)\s*(?::[^=\n]+)?=(?!=)", re.M)

#: What is said of a run that nobody closed.
LEFT_OPEN = "the notebook ended before the run was closed"

_current: dict[str, Run] = {}


def outputs_folder() -> Path:
    """Where records go: $PROOFBOOK_OUTPUTS, else ``outputs/`` of the checkout that we are in, else ``./outputs``."""
    named = os.environ.get("PROOFBOOK_OUTPUTS")
    if named:
        return Path(named).expanduser().resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "runbooks").is_dir() and (folder / "outputs").is_dir():
            return folder / "outputs"
    return here / "outputs"


def open_run(runbook: str, namespace: Mapping[str, Any] | None = None) -> Run:
    """Open a run of ``runbook`` with the parameters that the notebook holds.

    Raises BadParameter or BadInventory before any contact; TransportError or OtherMachine after it (then there is a
    record that says so).
    """
    shell = live.shell()
    names: Mapping[str, Any] = namespace if namespace is not None else (shell.user_ns if shell else sys._getframe(1).f_globals)
    attended = live.somebody_is_there()
    procedure = procedures.load(runbook)
    given = _given(procedure, names, attended=attended)
    parameters = procedure.validate(given)
    spec = load_inventory().resolve(parameters.host)
    procedure.accepts(parameters, spec)

    already = _current.get(runbook)
    if already is not None and already.open:
        if already.parameters == parameters:
            already.tell("open_run was said again with the same parameters: going on with the open run")
            return already
        already.abort("a new run was opened with other parameters")
    earlier = _earlier(procedure, parameters)
    run = assemble(procedure, parameters, spec, attended=attended, earlier=earlier)
    _current[runbook] = run
    if earlier is not None:
        alone(run, earlier)
    run.reach()
    return run


# ------------------------------------------------------------------------------------------ parameters


def _given(procedure: Procedure, names: Mapping[str, Any], *, attended: bool) -> dict[str, Any]:
    """The declared parameters as the notebook holds them; a name that nobody declared is refused, not ignored."""
    declared = procedure.parameters.model_fields
    injected = _injected_names(names)
    foreign = [n for n in injected if n not in declared]
    scratch = [n for n, v in names.items() if n not in declared and n not in injected and _is_plain(n, v)]
    # WHY: an engineer's scratch variable is no mistake, a near miss of a parameter's name is; unattended, every name is meant.
    foreign += scratch if not attended else [n for n in scratch if difflib.get_close_matches(n, declared, n=1, cutoff=0.8)]
    refuse_secrets(dict.fromkeys(foreign))
    if foreign:
        procedure.validate({foreign[0]: None})
    return {n: names[n] for n in declared if n in names}


def _injected_names(names: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for cell in names.get("In", []) or []:
        match = _INJECTED.match(cell) if isinstance(cell, str) else None
        if match:
            found += [m["name"] for m in _ASSIGNED.finditer(match["body"])]
    return found


def _is_plain(name: str, value: Any) -> bool:
    """A plain value under a public name: what a parameter looks like, unlike an import, a function or IPython's own."""
    if name.startswith("_") or name in {"In", "Out", "exit", "quit", "get_ipython", "open", "annotations"}:
        return False
    if isinstance(value, types.ModuleType | types.FunctionType | type):
        return False
    return value is None or isinstance(value, str | int | float | bool | list | tuple | dict)


# --------------------------------------------------------------------------------------------- assembly


def _earlier(procedure: Procedure, parameters: Any) -> begun.Begun | None:
    """The run to go on with ($PROOFBOOK_RESUME), checked to be of the same runbook and the same parameters."""
    named = os.environ.pop("PROOFBOOK_RESUME", "")
    if not named:
        return None
    earlier = begun.load(archive.Archive(outputs_folder()), named, undo=False)
    then, now = dict(earlier.record.parameters), parameters.model_dump()
    different = sorted(n for n in now if n not in ("approved", "approver") and then.get(n, now[n]) != now[n])
    if earlier.record.runbook != procedure.name or different:
        raise BadParameter(
            f"run {earlier.run_id} of {earlier.record.runbook} cannot be gone on with: "
            f"{', '.join(different) or 'the runbook'} differs",
            hint=f"say `proofbook resume {earlier.run_id}`; it takes the parameters of that run",
        )
    return earlier


def alone(run: Run, earlier: begun.Begun) -> None:
    """End this run when another one goes on with the same change too. Looked at once its own record is there to be seen."""
    try:
        begun.refuse_two(archive.Archive(outputs_folder()), earlier, run.about.run_id)
    except ProofbookError as error:
        run.abort(str(error))
        raise


def assemble(procedure: Procedure, parameters: Any, spec: HostSpec, *, attended: bool, earlier: begun.Begun | None = None) -> Run:
    """Put a run together and open its record. Nothing is contacted yet.

    Raises BadInventory, before there is a record, when the key of a service that the runbook speaks to cannot be had.
    """
    keys = {service.spec: api_key(service) for service in procedure.services(parameters, spec)}
    outputs = outputs_folder()
    transport, clock = connect(spec)
    host = Host(spec.name, transport, clock)
    book = archive.Archive(outputs)
    run_id = os.environ.pop("PROOFBOOK_RUN_ID", "") or new_run_id(procedure.name, spec.name, datetime.now(UTC))
    begun = datetime.strptime(run_id.split("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    folder = archive.new_run_dir(outputs, procedure.name, spec.name, begun, run_id)
    redactor = Redactor()
    for key in keys.values():
        redactor.learn("api-key", key)
    writer = Writer(folder, redactor)
    journal = Journal(writer, run_id, clock.now)
    approved = str(getattr(parameters, "approved", "") or "")
    waiting = book.stopped_at_gate(approved) if approved else None
    keeper = record.Keeper(folder, journal, writer)
    run = Run(
        About(run_id, procedure.name, procedure.title, "live" if attended else "headless", procedure.changes_host),
        folder=folder,
        writer=writer,
        journal=journal,
        redactor=redactor,
        host=host,
        intent=spec,
        parameters=parameters,
        listeners=[keeper, *([live.Screen(keeper)] if attended else [])],
        memory=book,
        person=live.LiveGate(str(getattr(parameters, "approver", ""))) if attended else None,
        custody=MachineCustody(run_id, procedure.lease_s(parameters)) if procedure.changes_host else None,
        earlier=earlier,
        keys=keys,
    )
    run.opened(
        {
            "run_id": run_id,
            "runbook": procedure.name,
            "title": procedure.title,
            "purpose": procedure.purpose,
            "host": spec.name,
            "parameters": parameters.model_dump(),
            "mode": run.about.mode,
            "runner": runner_facts(),
            "clock": getattr(clock, "describe", "wall"),
            "changes_host": procedure.changes_host,
            "parent": os.environ.get("PROOFBOOK_PARENT") or None,
            "continues": earlier.run_id if earlier else (waiting.run_id if waiting else None),
            "origin": run.origin,
            "annotations": {},
        }
    )
    _when_the_kernel_ends(run)
    return run


def new_run_id(runbook: str, host: str, when: datetime) -> str:
    """``20261129T111544Z-reboot-verification-gpu01-7f3a2c``: sortable, and unique by its last six digits."""
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", host).strip("-")
    return f"{when:%Y%m%dT%H%M%SZ}-{runbook}-{safe}-{uuid.uuid4().hex[:6]}"


def _when_the_kernel_ends(run: Run) -> None:
    """A run that nobody closed says so; a kernel that is told to stop aborts its run instead of vanishing."""
    atexit.register(_left_open, run)
    if run.about.mode == "headless" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _left_open(run: Run) -> None:
    try:
        run.abort(LEFT_OPEN)
    except ProofbookError as error:
        print(f"proofbook: the run could not be closed: {error}", file=sys.stderr)


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt("told to stop (SIGTERM)")


__all__ = ["BadParameter", "new_run_id", "open_run", "outputs_folder"]

"""Plays runs in child processes that can be made to die at a line of their journal. A program for tests, not a test.

It reads requests, one JSON object a line, and answers each with one. Everything is imported once, and each request is
played by a fork of this process: launcher and kernel in one, so that its death is the death of both. Of a launch only
papermill is left out, and the renderings of the record.

``{"verb": "run" | "resume" | "rollback", "outputs": folder, "run": …, "parameters": {…}, "approve": name, "plain": bool,
"at": {…}}``. ``approve``: who reads the plan at the gate and lets it through; without it a run stops there. ``plain``: the
change itself is real, what is asked and measured around it is not, and it is kept when it was made.

``at`` is a boundary: ``{"event": name, "nth": from 1, "when": "after" | "instead", "what": …}``. ``after``: when that line of
the journal is on the disk; ``instead``: just before it would be written. ``what`` happens there: ``kill`` (SIGKILL of this
process), ``interrupt`` (Ctrl-C), ``full`` (no space left for the record), ``cut`` (the next answer is lost with its
connection), ``remove`` (of all records), ``pause`` (until the file ``go`` is in the outputs).

The answer is ``{"killed": bool, "outcome": {…} or null, "error": text}``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from proofbook import journal, launch, record, recover, signatures
from proofbook import notebook as kernel
from proofbook.errors import ConnectionLost, ProofbookError
from proofbook.inventory import load_inventory
from proofbook.journal import Journal
from proofbook.model import Check, Command, Decision, Finding, Measure, Measurement, Plan, Probe, Result, Seen
from proofbook.procedures import mtp_enablement as mtp
from proofbook.run import PlanView, Run
from proofbook.transports.ssh import SshTransport


def play(cells_of: Path, parameters: Mapping[str, Any]) -> str:
    """The code cells of a notebook in this process, in order, until one raises. What was raised, "" for nothing."""
    cells = [c for c in json.loads(cells_of.read_text())["cells"] if c["cell_type"] == "code"]
    first, *others = ["".join(c["source"]) for c in cells]
    given = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in [f"{first}\n{given}", *others]:
        try:
            exec(compile(source, cells_of.stem, "exec"), names)
        except (ProofbookError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def execute(notebook: Path, parameters: dict[str, Any], run_id: str) -> tuple[str, str]:
    """Instead of papermill and a kernel: the same cells here, and what a kernel does with an open run when it ends."""
    trouble = play(notebook, parameters)
    for run in kernel._current.values():
        kernel._left_open(run)
    return "", trouble


@dataclass(frozen=True)
class Reader:
    """Somebody at the gate who reads every plan and approves it."""

    name: str

    def show(self, plan: Plan) -> None:
        """Nothing to be shown."""

    def ask(self, plan: Plan) -> tuple[str, str]:
        return self.name, "typed"


def attend(name: str) -> None:
    gate = Run.gate

    def attended(self: Run, view: PlanView, *, approver: str = "", approved: str = "") -> None:
        self._person = Reader(name)
        gate(self, view, approver=approver, approved=approved)

    Run.gate = attended  # type: ignore[method-assign]


# --------------------------------------------------------------------------------------------------- boundaries


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _full() -> None:
    """From now on every write into the record finds the disk full, but for what the journal's reserve makes room for."""

    def write_whole(self: Journal, line: bytes) -> None:
        if (self._writer.run_dir / journal._RESERVE).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, line)

    write = Journal._write_whole
    Journal._write_whole = write_whole  # type: ignore[method-assign]


def _cut() -> None:
    """The next command is carried out on the machine, and its answer never comes."""
    run = SshTransport.run

    def unheard(self: SshTransport, command: Command) -> Result:
        SshTransport.run = run  # type: ignore[method-assign]
        run(self, command)
        self.close()
        raise ConnectionLost("the connection went away")

    SshTransport.run = unheard  # type: ignore[method-assign]


def _remove(outputs: Path) -> Callable[[], None]:
    return lambda: shutil.rmtree(outputs / "runs")


def _pause(outputs: Path) -> Callable[[], None]:
    def wait() -> None:
        (outputs / "waiting").touch()
        while not (outputs / "go").exists():
            time.sleep(0.02)

    return wait


def at_boundary(about: Mapping[str, Any], outputs: Path) -> None:
    """Let something happen at one line of the journal that this process is about to write."""
    fixed = {"kill": _kill, "interrupt": _interrupt, "full": _full, "cut": _cut}
    happens = {**fixed, "remove": _remove(outputs), "pause": _pause(outputs)}[about["what"]]
    counted: Counter[str] = Counter()
    append = Journal.append

    def watched(self: Journal, event: str, data: Mapping[str, Any], durable: bool = False, *, cleaned: bool = False) -> int:
        counted[event] += 1
        here = event == about["event"] and counted[event] == about["nth"]
        if here and about["when"] == "instead":
            happens()
        seq = append(self, event, data, durable, cleaned=cleaned)
        if here and about["when"] == "after":
            happens()
        return seq

    Journal.append = watched  # type: ignore[method-assign]


# --------------------------------------------------------------------------------------- nothing but the change


@dataclass(frozen=True)
class _Asked(Check):
    name: ClassVar[str] = "asked"
    title: ClassVar[str] = "Was it asked?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        return [self.passed("it was asked")]


@dataclass(frozen=True)
class _Measured(Measure):
    name: ClassVar[str] = "serving.Baseline"
    title: ClassVar[str] = "Was it measured?"

    def take(self, bench: Any) -> Measurement:
        return Measurement(self.name, self.title, "s", {}, {"by": os.getpid()}, datetime.now(UTC), 0.0)


def without_renderings() -> None:
    """The record for people costs more than the run itself, and it is looked at elsewhere; ``record.json`` stays."""
    record._html = lambda *_: ""
    record._notebook = lambda *_: {}
    record.RunRecord.as_markdown = lambda *_: ""  # type: ignore[method-assign]


def only_the_change() -> None:
    mtp.fit = lambda run: (_Asked(),)
    mtp.baseline = lambda run, ready: _Measured()
    mtp.effect = lambda run, applied, said: ()
    for left_out in ("control", "stability", "gain", "gain_again", "control_again"):
        setattr(mtp, left_out, lambda *_: None)
    for unasked in ("asked", "not_drift", "effect_again"):
        setattr(mtp, unasked, lambda *_: ())
    mtp.to_suspend = lambda run, applied, *_: applied if run.parameters.measure_again and applied.outcome == "done" else None
    mtp.to_reinstate = lambda suspended, drift: suspended if suspended and suspended.outcome == "suspended" else None
    mtp.decide = lambda run, applied, *findings: Decision(
        applied.outcome != "failed", "PASS" if applied.outcome != "failed" else "FAIL_START", applied.summary
    )


# ------------------------------------------------------------------------------------------------------ requests


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    outputs = Path(request["outputs"])
    without_renderings()
    if request.get("plain"):
        only_the_change()
    if request.get("approve"):
        attend(request["approve"])
    if request.get("at"):
        at_boundary(request["at"], outputs)
    launch._execute = execute
    match request["verb"]:
        case "run":
            outcome = launch.launch("mtp-enablement", request["parameters"], outputs=outputs)
        case "resume":
            outcome = recover.resume(request["run"], outputs=outputs)
        case _:
            outcome = recover.roll_back(request["run"], outputs=outputs)
    return outcome.__dict__


def warm_up() -> None:
    """What every run loads late is loaded once, before the forks."""
    load_inventory().resolve("lab:healthy")
    signatures.load()


def forked(request: Mapping[str, Any]) -> dict[str, Any]:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        said: dict[str, Any] = {"outcome": None, "error": ""}
        try:
            said["outcome"] = answer(request)
        except BaseException:
            said["error"] = traceback.format_exc()
        with os.fdopen(writable, "w") as pipe:
            json.dump(said, pipe, default=str)
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    return {"killed": killed, **(json.loads(text) if text else {"outcome": None, "error": ""})}


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)

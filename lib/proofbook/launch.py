"""Run a runbook headless: papermill executes the notebook, our journal says what happened. The only papermill import.

papermill's own status cannot be trusted (cells that never ran are saved as "completed"), so the outcome comes from the
run's journal alone. Its executed copy is kept beside the record, and reaches the disk through the redacting writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from proofbook import archive, errors, procedures
from proofbook.errors import BadParameter, ProofbookError, RecordError, Refused
from proofbook.inventory import api_key, load_inventory
from proofbook.model import RunStatus, Verdict, exit_code, worst
from proofbook.notebook import LEFT_OPEN, new_run_id, outputs_folder
from proofbook.record import QUARANTINE, RunRecord
from proofbook.redact import Redactor
from proofbook.visible import json_text

Tell = Callable[[Mapping[str, Any]], None]

#: Outcomes of a change after which nothing of it is left open on the machine.
_OVER = ("confirmed", "rolled-back", "restored", "nothing-to-do")


@dataclass(frozen=True)
class Outcome:
    """What ``proofbook run --json`` prints as its last line. ``not_verified`` is the list that the record shows first.

    ``summary`` is the run in a sentence; ``concluded`` an experiment's {outcome, hypothesis, because, scope}; ``problems`` what
    is not fine, worst first, as {verdict, subject, reason, what_to_do}.
    """

    run_id: str | None
    runbook: str
    host: str
    status: str
    verdict: str
    conclusion: str | None
    exit_code: int
    not_checked: list[str]
    waiting_for: dict[str, str] | None
    record: str | None
    message: str = ""
    not_verified: list[dict[str, str]] = field(default_factory=list)
    summary: str = ""
    concluded: dict[str, str] | None = None
    problems: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> str:
        return json_text(self.__dict__)


def told(found: RunRecord) -> dict[str, Any]:
    """What an outcome says of a record in words: its sentence, its conclusion and its problems."""
    said = found.conclusion
    keys = ("outcome", "hypothesis", "because", "scope")
    concluded = {k: str(said.get(k) or "") for k in keys} if said else None
    return {"summary": found.summary, "concluded": concluded, "problems": found.problems}


def refused(runbook: str, host: str, error: ProofbookError) -> Outcome:
    """The outcome of a request that was refused before any host was contacted."""
    code = exit_code(RunStatus.REFUSED, Verdict.UNKNOWN)
    return Outcome(None, runbook, host, RunStatus.REFUSED, Verdict.UNKNOWN, None, code, [], None, None, str(error))


def runbook_file(name: str) -> Path:
    """The notebook of a runbook: from the checkout that this package runs from, else as installed with it."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent.parent / "runbooks", package / "_runbooks"):
        path = folder / f"{name}.ipynb"
        if path.is_file():
            return path
    raise BadParameter(
        f"the notebook of runbook {name!r} is not installed", hint="reinstall proofbook, or run it from its checkout"
    )


def launch(
    runbook: str,
    parameters: Mapping[str, Any],
    *,
    outputs: Path | None = None,
    parent: str | None = None,
    tell: Tell | None = None,
) -> Outcome:
    """Validate, execute, and say how it came out. Never raises for what a run can come to; see the exit codes.

    ``parameters`` are typed values. ``tell`` is called with every journal line as it is written.
    """
    host = str(parameters.get("host", ""))
    try:
        procedure = procedures.load(runbook)
        typed = procedure.validate(parameters)
        spec = load_inventory().resolve(typed.host)
        procedure.accepts(typed, spec)
        keys = [api_key(service) for service in procedure.services(typed, spec)]  # the kernel reads them again by itself
        notebook = runbook_file(runbook)
        folder = (outputs or outputs_folder()).resolve()
        archive.refuse_unwritable(folder)
    except Refused as error:
        return refused(runbook, host, error)
    run_id = new_run_id(runbook, spec.name, datetime.now(UTC))
    book = archive.Archive(folder)
    follower = _Follower(book, run_id, tell)
    settings = {
        "PROOFBOOK_OUTPUTS": str(folder),
        "PROOFBOOK_RUN_ID": run_id,
        "PROOFBOOK_PARENT": parent or "",
        "JPY_SESSION_NAME": None,
    }
    with environment(settings), follower, _Stops(follower) as stops:
        trouble = _execute(notebook, typed.model_dump(), run_id)
    try:
        return _outcome(book, run_id, runbook, spec.name, trouble, stopped=stops.asked, keys=keys, left=follower.left)
    except RecordError as error:  # a full disk, a record that somebody removed: what the machine was left with must still be said
        return _without_record(runbook, spec.name, f"{error}{follower.left}")


# -------------------------------------------------------------------------------------------- papermill


def _execute(notebook: Path, parameters: dict[str, Any], run_id: str) -> tuple[str, str]:
    """Execute the notebook; the executed copy as JSON is held in memory. Returns (executed notebook, trouble)."""
    # WHY: jsonschema's format checker would build a whole grammar on import (about 2 s of CPU); notebooks need none of it.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from papermill.iorw import papermill_io

    kept = _InMemory()
    papermill_io.register("proofbook-memory://", kept)
    trouble = ""
    with tempfile.TemporaryDirectory(prefix="proofbook-kernel-") as sockets:
        try:
            papermill.execute_notebook(
                str(notebook),
                f"proofbook-memory://{run_id}.ipynb",
                parameters=parameters,
                progress_bar=False,
                log_output=False,
                kernel_name="python3",
                kernel_manager_class=_manager_over_ipc(sockets),
                start_timeout=120,
            )
        except PapermillExecutionError as error:
            ours = hasattr(errors, error.ename)  # then the sentence says it all
            trouble = str(error.evalue) if ours else f"{error.ename}: {error.evalue}"
        except KeyboardInterrupt:
            trouble = "interrupted"
        except Exception as error:  # papermill and its kernel client raise many kinds; the journal decides, this is its footnote
            trouble = f"{type(error).__name__}: {error}"
    return kept.last, trouble


class _InMemory:
    """A papermill output handler: nothing reaches the disk but through our redacting writer."""

    def __init__(self) -> None:
        self.last = ""

    def write(self, buf: str, _path: str, *_more: Any, **_named: Any) -> None:
        self.last = buf

    def read(self, _path: str) -> str:
        return self.last

    def listdir(self, _path: str) -> list[str]:
        return []

    def pretty_path(self, path: str) -> str:
        return path


def _manager_over_ipc(folder: str) -> type:
    """A kernel manager that talks over Unix sockets in a folder of its own.

    WHY: over TCP about one run in a hundred lost the race for a port, and the traffic was open to every local user.
    """
    from jupyter_client.manager import AsyncKernelManager

    class OverIpc(AsyncKernelManager):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            self.transport = "ipc"
            self.ip = os.path.join(folder, "k")

    return OverIpc


# ------------------------------------------------------------------------------------------ following it


class _Follower(contextlib.AbstractContextManager["_Follower"]):
    """Reads the journal while the kernel writes it, and passes each line on."""

    def __init__(self, book: archive.Archive, run_id: str, tell: Tell | None) -> None:
        self._book = book
        self._run_id = run_id
        self._tell = tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="proofbook-follow", daemon=True)
        self.kernel_pid: int | None = None
        self._begun = ""  # what was last asked of the machine, while a change is neither kept nor taken back
        self._verbs: set[str] = set()  # of the guard, that were sent for it

    @property
    def left(self) -> str:
        """What the machine was left with when no record can say it, as the end of a message; "" when that is nothing."""
        if not self._begun:
            return ""
        begun = f"\n  → run {self._run_id} had begun to change the machine (the last that was sent: {self._begun})"
        when = "`systemctl list-timers 'proofbook-guard-*'` on the machine says when"
        if "confirm" in self._verbs:
            return f"{begun}: it is kept, or its guard there takes it back; {when}, or that it is gone"
        if "arm" in self._verbs:
            return f"{begun}, and nothing was confirmed: its guard there takes it back when its time is over; {when}"
        if "stage" in self._verbs:
            return f"{begun}: the new files were brought there, and nothing was put in place"
        return f"{begun}: look what it does now before anything else"

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _follow(self) -> None:
        offset = 0
        while True:
            last_round = self._stop.is_set()
            folder = self._book.folder_of(self._run_id)
            if folder is not None:
                offset = self._pass_on(folder / "journal.jsonl", offset)
            if last_round:
                return
            self._stop.wait(0.05)

    def _pass_on(self, path: Path, offset: int) -> int:
        try:
            with path.open("rb") as journal:
                journal.seek(offset)
                data = journal.read()
        except FileNotFoundError:  # renamed while it was sealed; the next round finds it under its final name
            return offset
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            entry = json.loads(line)
            if entry["event"] == "run.opened":
                self.kernel_pid = entry["data"]["runner"]["pid"]
            self._note(entry["event"], entry["data"])
            if self._tell is not None:
                self._tell(entry)
        return offset + whole

    def _note(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "act.intent" and "proofbook-lease" not in data["argv"]:
            self._begun, words = str(data["what"]), list(data["argv"])
            if "proofbook-guard" in words:
                self._verbs.add(words[words.index("proofbook-guard") + 1])
        elif event == "applied" and data["outcome"] in _OVER:
            self._begun = ""
            self._verbs.clear()


def followed(book: archive.Archive, run_id: str, tell: Tell | None) -> contextlib.AbstractContextManager[Any]:
    """Pass on the journal lines of a run that is carried out in this process."""
    return _Follower(book, run_id, tell)


class _Stops(contextlib.AbstractContextManager["_Stops"]):
    """Ctrl-C and SIGTERM reach the kernel as an interrupt, so that the run ends as aborted and sealed, not torn."""

    def __init__(self, follower: _Follower) -> None:
        self._follower = follower
        self._before: dict[int, Any] = {}
        self.asked = 0

    def __enter__(self) -> _Stops:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self.asked += 1
        pid = self._follower.kernel_pid
        if self.asked > 1 or pid is None:
            raise KeyboardInterrupt
        print("proofbook: stopping; the run is being closed (once more to stop without waiting)", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or, with None, drop) variables for the kernel that is about to start, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -------------------------------------------------------------------------------------------- the outcome


def _outcome(
    book: archive.Archive,
    run_id: str,
    runbook: str,
    host: str,
    executed: tuple[str, str],
    *,
    stopped: int,
    keys: Sequence[str] = (),
    left: str = "",
) -> Outcome:
    redactor = Redactor()
    for key in filter(None, keys):
        redactor.learn("api-key", key)
    copy, trouble = executed[0], redactor.text(executed[1], "message")
    folder = _settle(book, run_id)
    if folder is None:
        gone = (
            f"the record of run {run_id} is gone from {book.outputs}" if left else "the notebook ended before the run was opened"
        )
        return _without_record(runbook, host, (trouble or gone) + left)
    found = book.load(run_id)
    message = _what_went_wrong(found) or left_by_hand(found) or ("" if found.status == RunStatus.COMPLETED else trouble)
    if found.status == RunStatus.LOST:
        message = f"{found.summary}\n{trouble}".strip()
    if found.trouble == LEFT_OPEN and trouble:
        # what a cell raised outside of a verb: the run itself never saw it
        message = _what_went_wrong(found).replace(LEFT_OPEN, trouble, 1)
    if folder.name.endswith(QUARANTINE):
        return _quarantined(found, runbook, host, folder)
    if copy:
        try:
            archive.keep_beside(folder, "executed.ipynb", copy, redactor)
        except RecordError as error:  # the record is sealed and whole without it
            message = message or f"the executed notebook could not be kept beside the record: {error}"
    if stopped and not message:
        message = "interrupted"
    return Outcome(
        run_id=run_id,
        runbook=runbook,
        host=host,
        status=found.status,
        verdict=found.verdict,
        conclusion=found.conclusion_word,
        exit_code=found.exit_code,
        not_checked=found.not_checked_reasons,
        waiting_for=found.waiting_for,
        record=str(folder),
        message=message,
        not_verified=found.not_verified,
        **told(found),
    )


def _without_record(runbook: str, host: str, message: str) -> Outcome:
    """A run whose record was never opened, or cannot be read any more."""
    code = exit_code(RunStatus.ABORTED, Verdict.UNKNOWN)
    return Outcome(None, runbook, host, RunStatus.ABORTED, Verdict.UNKNOWN, None, code, [], None, None, message)


def _quarantined(found: RunRecord, runbook: str, host: str, folder: Path) -> Outcome:
    """A record that a secret got into is not sealed: whatever was found, this run did not end well."""
    verdict = worst([Verdict(found.verdict), Verdict.UNKNOWN])
    return Outcome(
        run_id=found.run_id,
        runbook=runbook,
        host=host,
        status=RunStatus.ABORTED,
        verdict=verdict,
        conclusion=None,
        exit_code=exit_code(RunStatus.ABORTED, verdict),
        not_checked=found.not_checked_reasons,
        waiting_for=None,
        record=str(folder),
        message=f"a secret was found in the record, and it was not sealed but put in quarantine: {folder}\n"
        "  → only you can read it; see what the secret is, change it where it is used, and remove the folder",
        not_verified=found.not_verified,
        **told(found),
    )


def _what_went_wrong(found: RunRecord) -> str:
    """What ended the run, with what to do about it; "" when nothing did."""
    if not found.trouble:
        return ""
    hint = str(found.troubles[-1].get("hint") or "") if found.troubles else ""
    return f"{found.trouble}\n  → {hint}" if hint else found.trouble


def left_by_hand(found: RunRecord) -> str:
    """What kept a change from being taken back, and the commands that a person has to type; "" when nothing was left so."""
    for applied in (p["applied"] for p in found.plans if p["applied"]):
        facts = applied.get("facts") or {}
        if applied["outcome"] != "rollback-failed" or not facts.get("by_hand"):
            continue
        undone = str(found.parameters.get("run") or found.origin or found.run_id)
        return "\n".join(
            [
                applied["summary"],
                *(f"  in the way: {one}" for one in facts.get("in_the_way", ())),
                f"  → to do it by hand, on {found.host} as root:",
                *(f"  {line}" for line in facts["by_hand"]),
                f"  → then: proofbook rollback {undone} (it verifies the old state, and gives the machine's lease back)",
            ]
        )
    return ""


def _settle(book: archive.Archive, run_id: str, patience_s: float = 5.0) -> Path | None:
    """The run's folder once it is sealed; a run whose kernel died unsealed is marked as lost."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        folder = book.folder_of(run_id)
        if folder is None or not folder.name.endswith(".partial"):
            return folder
        if not book.runner_alive(folder):
            break
        time.sleep(0.05)
    book.sweep(only=run_id)
    return book.folder_of(run_id)

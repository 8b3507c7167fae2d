"""outputs/ as an archive: where records live, how they are found again, and what happens to runs whose runner died.

::

    outputs/runs/2026/11/29/20261129T111544Z_reboot-verification_gpu01_7f3a2c/   sealed, never written again
    outputs/runs/2026/11/29/20261129T111544Z_reboot-verification_gpu01_7f3a2c.partial/   still open
    outputs/annotations/<run-id>/   what was said about a record later: outside the seal, append-only

The folders are the truth. Nothing here needs an index: a run id holds its date, so one run is found by looking into one
folder, and a list reads one small part of each ``record.json``.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from proofbook.errors import BadParameter, NoSuchRun, ProofbookError, RecordError
from proofbook.journal import JOURNAL, MANIFEST, Journal, JournalReading, Writer, indented, read_journal, read_output, utc_text
from proofbook.model import RunStatus, Verdict, exit_code, worst
from proofbook.record import PARTIAL, QUARANTINE, SCHEMA, RunRecord, finish, from_events, load_record, seal
from proofbook.redact import Redactor
from proofbook.run import pid_started, runner_facts

__all__ = ["Archive", "Brief", "half_done", "keep_beside", "new_run_dir"]

_RUN_ID = re.compile(r"(?P<when>\d{8}T\d{6}Z)-(?P<name>.+)-(?P<tail>[0-9a-z]+)")
_KEPT = (Verdict.PASS.value, Verdict.WARN.value)


class Brief(msgspec.Struct, frozen=True):
    """What a list needs of a record; reading only this skips the rest of ``record.json``."""

    schema: int
    run_id: str
    runbook: str
    host: str
    status: str
    verdict: str
    exit_code: int
    summary: str
    opened_at: str
    closed_at: str
    machine_id: str
    counts: dict[str, int]
    continues: str | None = None
    parent: str | None = None
    waiting_for: dict[str, str] | None = None
    conclusion: dict[str, Any] | None = None

    def brief(self) -> dict[str, Any]:
        """As JSON, for ``proofbook runs --json``."""
        own: dict[str, Any] = msgspec.to_builtins(self)
        return {**own, "conclusion": self.conclusion["outcome"] if self.conclusion else None}


class _Configured(msgspec.Struct, frozen=True):
    run_id: str
    configuration: dict[str, Any]


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "host"


def new_run_dir(outputs: Path, runbook: str, host: str, when: datetime, run_id: str) -> Path:
    """Make the folder ``….partial`` of a new run. Raises BadParameter for a run id that does not fit, RecordError if there."""
    form = _RUN_ID.fullmatch(run_id)
    stamp = f"{when.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    if form is None or form["when"] != stamp:
        raise BadParameter(f"run id {run_id!r} does not begin with its time {stamp} and end in letters or digits")
    day = outputs / "runs" / f"{stamp[:4]}/{stamp[4:6]}/{stamp[6:8]}"
    folder = day / f"{stamp}_{_safe(runbook)}_{_safe(host)}_{form['tail']}{PARTIAL}"
    try:
        day.mkdir(parents=True, exist_ok=True)
        if folder.with_name(folder.name.removesuffix(PARTIAL)).exists():
            raise RecordError(f"there is a record of run {run_id} already: {folder}")
        folder.mkdir()
    except FileExistsError:
        raise RecordError(f"there is a record of run {run_id} already: {folder}") from None
    except OSError as error:
        raise RecordError(f"cannot begin a record in {outputs}: {error.strerror or error}", hint=NAME_ANOTHER) from error
    return folder


def keep_beside(folder: Path, name: str, text: str, redactor: Redactor | None = None) -> Path:
    """Keep a file of a sealed record that came too late for its seal (the executed notebook), redacted. Returns its path.

    ``redactor``: one that knows the run's secrets.
    """
    outputs, run_id = folder.parents[4], load_record(folder).run_id
    writer = Writer(outputs / "annotations" / run_id, redactor or Redactor())
    try:
        cleaned = writer.redactor.value(json.loads(text), name)
    except ValueError:
        writer.write_text(name, text)
    else:
        writer.write_text(name, indented(cleaned), clean=False)
    return writer.run_dir / name


NAME_ANOTHER = "name a folder that can be written, with --outputs or PROOFBOOK_OUTPUTS"


def refuse_unwritable(outputs: Path) -> None:
    """Raises BadParameter when no record can be begun there; asked before any machine is contacted."""
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=outputs):
            pass
    except OSError as error:
        raise BadParameter(f"no record can be written in {outputs}: {error.strerror or error}", hint=NAME_ANOTHER) from error


class Archive:
    """The records under one ``outputs/`` folder. Reading needs no lock; writing is only ever done to a run's own folder."""

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs

    # -------------------------------------------------------------------------------------------- finding

    def folders(self) -> Iterator[Path]:
        """Every run's folder, newest first: sealed, still open, and in quarantine."""
        root = self.outputs / "runs"
        for year in _newest_first(root):
            for month in _newest_first(year):
                for day in _newest_first(month):
                    yield from _newest_first(day)

    def runs(
        self, *, runbook: str = "", host: str = "", status: str = "", verdict: str = "", limit: int | None = None
    ) -> list[Brief]:
        """Records, newest first, filtered by equality. Folders without a readable record are left out (see :meth:`damaged`)."""
        wanted = {"runbook": runbook, "host": host, "status": status, "verdict": verdict}
        found: list[Brief] = []
        for brief in self._briefs():
            if all(not value or getattr(brief, name) == value for name, value in wanted.items()):
                found.append(brief)
                if limit is not None and len(found) >= limit:
                    break
        return found

    def damaged(self) -> list[tuple[Path, str]]:
        """Folders that hold no readable record, with the reason; quarantined ones among them."""
        troubles = []
        for folder in self.folders():
            if folder.name.endswith(QUARANTINE):
                troubles.append((folder, "in quarantine: something that looks like a secret is in it"))
            elif _brief(folder) is None and not (folder.name.endswith(PARTIAL) and self.runner_alive(folder)):
                troubles.append((folder, "no readable record.json"))
        return troubles

    def since(self, run_id: str) -> list[Brief]:
        """Records of runs that were opened no earlier than this one, newest first, without looking at older folders."""
        found: list[Brief] = []
        for brief in self._briefs():
            if brief.run_id.partition("-")[0] < run_id.partition("-")[0]:
                break
            found.append(brief)
        return found

    def _briefs(self) -> Iterator[Brief]:
        for folder in self.folders():
            brief = None if folder.name.endswith(QUARANTINE) else _brief(folder)
            if brief is not None:
                yield brief

    def folder_of(self, run_id: str) -> Path | None:
        """The folder of exactly this run, or None. Looks into one day's folder only."""
        form = _RUN_ID.fullmatch(run_id)
        if form is None:
            return None
        when = form["when"]
        day = self.outputs / "runs" / f"{when[:4]}/{when[4:6]}/{when[6:8]}"
        for _attempt in range(2):  # a seal renames the folder; a look in between finds it the second time
            for suffix in ("", PARTIAL, QUARANTINE):
                for folder in day.glob(f"{when}_*_{form['tail']}{suffix}"):
                    return folder
        return None

    def find(self, run: str) -> str:
        """The full id of a run from its id, or from a beginning or an end of it that fits no other. Raises NoSuchRun."""
        if self.folder_of(run) is not None:
            return run
        ids = [b.run_id for b in self._briefs()]
        fitting = [i for i in ids if i.startswith(run) or i.endswith(run)] if run else []
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise NoSuchRun(f"{run!r} fits {len(fitting)} runs: {', '.join(fitting[:5])}", hint="give more of the run id")
        near = difflib.get_close_matches(run, ids, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`proofbook runs` lists what there is"
        raise NoSuchRun(f"there is no run {run!r} in {self.outputs}", hint=hint)

    def load(self, run: str) -> RunRecord:
        """The whole record of a run, read from its journal. Raises NoSuchRun, RecordError."""
        return load_record(self._folder(run))

    def _folder(self, run: str) -> Path:
        folder = self.folder_of(self.find(run))
        if folder is None:
            raise NoSuchRun(f"there is no run {run!r} in {self.outputs}")
        return folder

    # ------------------------------------------------------------------------------- what runs ask of runs

    def stopped_at_gate(self, digest: str) -> RunRecord | None:
        """The newest run that stopped at its gate with a plan of this digest."""
        for brief in self._briefs():
            if brief.waiting_for is not None and brief.waiting_for.get("digest") == digest:
                return self.load(brief.run_id)
        return None

    def issued(self, digest: str) -> tuple[str, datetime] | None:
        """The run that stopped at the gate with this plan, and when its plan was made."""
        for brief in self._briefs():
            if brief.waiting_for is not None and brief.waiting_for.get("digest") == digest and brief.waiting_for.get("issued_at"):
                return brief.run_id, datetime.fromisoformat(brief.waiting_for["issued_at"])
        return None

    def last_kept(self, machine_id: str, service: str) -> tuple[str, Mapping[str, Any]] | None:
        """How a service was found running by the newest completed PASS or WARN run of this machine: (run id, configuration)."""
        for brief in self._briefs():
            if brief.machine_id != machine_id or brief.status != RunStatus.COMPLETED or brief.verdict not in _KEPT:
                continue
            folder = self.folder_of(brief.run_id)
            if folder is None:
                continue
            configured = _decoded(folder, _Configured)
            if configured is not None and service in configured.configuration:
                return brief.run_id, configured.configuration[service]
        return None

    def stored_value(self, run: str, name: str, *, machine_id: str = "") -> Mapping[str, Any]:
        """What a run stored under a name: {schema, value}; with ``machine_id`` only where that is the run's machine.

        Raises NoSuchRun when it stored nothing of this name, or was of another machine.
        """
        record = self.load(run)
        if machine_id and record.machine_id != machine_id:
            raise NoSuchRun(
                f"run {record.run_id} is of another machine ({record.machine_id[:8] or 'one that is not known'}…, {record.host})",
                hint="compare with a run of this machine, or with none",
            )
        if name not in record.values:
            held = ", ".join(record.values) or "none"
            raise NoSuchRun(f"run {record.run_id} stored no value {name!r}", hint=f"its values are: {held}")
        value: Mapping[str, Any] = record.values[name]
        return value

    def last_stored(self, machine_id: str, runbook: str, name: str) -> tuple[str, Mapping[str, Any]] | None:
        """What the newest completed run of a runbook on this machine stored under a name: (run id, {schema, value})."""
        for brief in self._briefs():
            if (brief.machine_id, brief.runbook, brief.status) == (machine_id, runbook, RunStatus.COMPLETED):
                values = self.load(brief.run_id).values
                if name in values:
                    return brief.run_id, values[name]
        return None

    def baseline(self, run: str) -> RunRecord | None:
        """What a run compares with: the newest earlier completed PASS or WARN run of the same runbook on the same machine."""
        own = self.load(run)
        for brief in self._briefs():
            same = brief.runbook == own.runbook and brief.machine_id == own.machine_id and bool(own.machine_id)
            if same and brief.opened_at < own.opened_at and brief.status == RunStatus.COMPLETED and brief.verdict in _KEPT:
                return self.load(brief.run_id)
        return None

    # ------------------------------------------------------------------------------------------ verifying

    def verify(self, run: str) -> list[str]:
        """What is wrong with a record; empty if every file is as it was sealed and the journal's chain is whole."""
        folder = self._folder(run)
        if folder.name.endswith(QUARANTINE):
            return ["in quarantine: it was never sealed"]
        if not (folder / MANIFEST).exists():
            return [
                "not sealed: there is no manifest"
                + (" (the run is still open, or its runner died)" if folder.name.endswith(PARTIAL) else "")
            ]
        troubles = list(_against_manifest(folder))
        try:
            reading = read_journal(folder / JOURNAL)
        except RecordError as error:
            return [*troubles, str(error)]
        if reading.trouble:
            troubles.append(f"{JOURNAL}: {reading.trouble}")
        elif not reading.sealed:
            troubles.append(f"{JOURNAL}: it has no seal")
        troubles += [t for t in _against_journal(folder, reading) if t.split(": ")[0] not in {x.split(": ")[0] for x in troubles}]
        if reading.intact and not any(t.startswith("record.json: ") for t in troubles):
            troubles += _retold(folder, from_events(reading.events, reading))
        return troubles

    # ------------------------------------------------------------------------------------------- sweeping

    def runner_alive(self, folder: Path) -> bool:
        """Whether the process that writes this run still lives.

        A runner on another machine counts as alive: only its own machine can tell (by pid, the pid's start, and its boot-id).
        """
        try:
            reading = read_journal(folder / JOURNAL)
        except RecordError:
            return False
        opened = next((e["data"] for e in reading.events if e["event"] == "run.opened"), None)
        if opened is None:
            return False
        then, now = opened.get("runner") or {}, runner_facts()
        if then.get("host") != now["host"]:
            return True
        if then.get("boot_id") != now["boot_id"]:
            return False
        return bool(then.get("pid_started")) and pid_started(int(then.get("pid", 0))) == then["pid_started"]

    def sweep(self, *, only: str = "") -> list[str]:
        """Close every open run whose runner died as lost, and seal it. Returns their run ids. Two sweeps at once do no harm."""
        swept = []
        with self._one_sweep():
            folders = [self.folder_of(only)] if only else list(self.folders())
            for folder in folders:
                if folder is not None and folder.name.endswith(PARTIAL) and not self.runner_alive(folder):
                    try:
                        run_id = _close_lost(folder)
                    except (ProofbookError, OSError):
                        if only:
                            raise
                        continue  # one that cannot be closed must not keep the others open; `damaged` lists it
                    if run_id:
                        swept.append(run_id)
        return swept

    @contextlib.contextmanager
    def _one_sweep(self) -> Iterator[None]:
        self.outputs.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.outputs / ".sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # ----------------------------------------------------------------------------------------- annotating

    def annotate(self, run: str, text: str, *, author: str, kind: str = "remark") -> None:
        """Say something about a record later: dated, beside the seal, append-only. Never edits what was sealed."""
        run_id = self.find(run)
        line = {"ts": utc_text(datetime.now(UTC)), "author": author, "kind": kind, "text": Redactor().text(text, "annotations")}
        folder = self.outputs / "annotations" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "annotations.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def annotations(self, run: str) -> list[dict[str, str]]:
        """What was said about a record, oldest first: {ts, author, kind, text}."""
        path = self.outputs / "annotations" / self.find(run) / "annotations.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# -------------------------------------------------------------------------------------------------- parts


def _newest_first(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names, reverse=True)]


def _decoded(folder: Path, kind: type[Any]) -> Any:
    """``record.json`` as ``kind``; None when there is none yet, or it is of another schema, or it was renamed while we looked."""
    file = folder / "record.json"
    if file.exists() and not file.is_file():
        return None  # a pipe would be waited for
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _brief(folder: Path) -> Brief | None:
    brief: Brief | None = _decoded(folder, Brief)
    return brief if brief is not None and brief.schema <= SCHEMA else None


def _against_manifest(folder: Path) -> Iterator[str]:
    listed: dict[str, str] = {}
    try:
        lines = (folder / MANIFEST).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        yield f"{MANIFEST}: cannot be read: {error}"
        return
    for line in lines:
        digest, _, path = line.partition("  ")
        listed[path] = digest
    present = set()
    for found in folder.rglob("*"):
        path = found.relative_to(folder).as_posix()
        # WHY not only files: a link may lead anywhere, and a pipe would be waited for; a record has neither.
        if found.is_symlink() or not (found.is_file() or found.is_dir()):
            yield f"{path}: not a plain file; a record has only such"
            listed.pop(path, None)
        elif found.is_file() and path != MANIFEST:
            present.add(path)
        elif found.is_dir() and not any(known.startswith(f"{path}/") for known in listed):
            yield f"{path}: a folder that the manifest does not know"
    for path in sorted(listed.keys() - present):
        yield f"{path}: missing"
    for path in sorted(present - listed.keys()):
        yield f"{path}: not in the manifest, it was added after the seal"
    for path in sorted(present & listed.keys()):
        with (folder / path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != listed[path]:
                yield f"{path}: changed since the seal"


def _against_journal(folder: Path, reading: JournalReading) -> Iterator[str]:
    """The journal holds every evidence file's digest too: a manifest that was rewritten with the file gives itself away."""
    for event in reading.events:
        if event["event"] != "evidence":
            continue
        for stream in ("stdout", "stderr"):
            path, digest = event["data"].get(f"{stream}_file"), event["data"].get(f"{stream}_sha256")
            if not path:
                continue
            file = folder / path
            if not file.is_file() or file.is_symlink():
                yield f"{path}: missing, and the journal speaks of it"
                continue
            try:
                kept = hashlib.sha256(read_output(file)).hexdigest()
            except OSError as error:
                yield f"{path}: cannot be read: {error.strerror}"
                continue
            if kept != digest:
                yield f"{path}: not what the journal saw"


def _retold(folder: Path, record: RunRecord) -> Iterator[str]:
    """record.json is a rendering of the journal: what it says must be what the journal says, or somebody rewrote it."""
    try:
        told = json.loads((folder / "record.json").read_bytes())
    except (OSError, ValueError) as error:
        yield f"record.json: cannot be read: {error}"
        return
    if not isinstance(told, dict):
        yield "record.json: not a record"
        return
    truth = json.loads(json.dumps(record.as_json()))
    # What another version of this program wrote may lack a key, or have one that is gone, and may have worded otherwise what it
    # says itself: the headline, and what stands before a reason. What these are made of is held against it.
    for said in (told, truth):
        said["not_verified"] = [one.get("why") for one in said.get("not_verified", ()) if isinstance(one, dict)]
    differs = sorted(key for key in told.keys() & truth.keys() - {"journal", "headline"} if told[key] != truth[key])
    if differs:
        yield f"record.json: not what the journal says ({', '.join(differs)})"


def half_done(record: RunRecord) -> str:
    """What a person must know of a change that nobody ended: it may stand, half stand, or be taken back by its guard."""
    begun = [p for p in record.plans if p.get("undo") and p["acts"]]
    if not begun:
        return ""
    if all((p["applied"] or {}).get("outcome") == "confirmed" for p in begun):
        return (
            f". The change was kept, and the machine may still be held: `proofbook resume {record.run_id}` looks, and lets it go"
        )
    run = str(record.parameters.get("run") or record.run_id)  # a taking back is said again for the run that it takes back
    on = "" if run != record.run_id else f"`proofbook resume {run}` goes on with it, "
    return f". The change was begun and not ended: {on}`proofbook rollback {run}` undoes it now"


def _close_lost(folder: Path) -> str:
    """Finish what a dead runner left; "" when there is nothing in it that could be told."""
    if (folder / MANIFEST).exists():  # it died between its manifest and its rename
        run_id = load_record(folder).run_id
        seal(folder)
        return run_id
    try:
        reading = read_journal(folder / JOURNAL)
    except RecordError:
        return ""
    so_far = from_events(reading.events, reading)
    if not so_far.run_id or not reading.intact:
        return ""  # stays as it is, for a person: `damaged` lists it
    writer = Writer(folder, Redactor())
    if reading.sealed:
        from proofbook.record import render

        render(folder, writer=writer, final=True)
        seal(folder, writer.redactor)
        return so_far.run_id
    # WHY: the machine's clock, by which the run wrote, may be ahead of ours; no record ends before its last line.
    last_at = datetime.fromisoformat(so_far.last_at)
    journal = Journal(writer, so_far.run_id, lambda: max(datetime.now(UTC), last_at))
    if not so_far.closed_at:
        verdict = worst([*(Verdict(f["verdict"]) for f in so_far.findings), Verdict.UNKNOWN])
        last = so_far.timeline[-1]["text"] if so_far.timeline else "nothing"
        summary = f"The runner died at or after {so_far.last_at}; the last that it wrote was: {last}{half_done(so_far)}"
        closing = {
            "status": RunStatus.LOST,
            "verdict": verdict,
            "summary": summary,
            "exit_code": exit_code(RunStatus.LOST, verdict),
        }
        journal.append("run.closing", closing, durable=True)
    finish(folder, journal, writer)
    return so_far.run_id

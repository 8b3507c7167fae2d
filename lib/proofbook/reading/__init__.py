"""Records as a reviewer reads them in a notebook: one attribute a question, each answer a table, a text or a picture.

Nothing here judges anew. It shows what a sealed record says, what was not verified before anything that was, and whether
the record is still as it was sealed.
"""

from __future__ import annotations

import html
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from proofbook.archive import Archive
from proofbook.errors import CannotTell, NoSuchRun, RecordError
from proofbook.journal import read_output
from proofbook.model import Command, Observation, Probe, Result, Seen, Verdict, command
from proofbook.probes.base import drive
from proofbook.record import RunRecord
from proofbook.view import (
    VERDICTS,
    Picture,
    Shown,
    card,
    duration_text,
    findings_html,
    findings_text,
    shown,
    table,
    table_html,
    table_text,
    timeline_png,
    worst_first,
)

__all__ = ["Nothing", "Reading", "Shelf", "differences", "open_archive", "pick"]

T = TypeVar("T")

#: Lines of one evidence file that are shown; the file has them all.
_LINES = 6
#: Characters of such a line.
_WIDE = 110
#: An argument that is a whole program is named, not printed.
_LONG = 100
#: When what was never asked was answered.
_NEVER = datetime.min.replace(tzinfo=UTC)


def open_archive(path: str | Path) -> Shelf:
    """Open an ``outputs/`` folder, or a tar of one that somebody sent. Raises RecordError when it is neither.

    A tar is unpacked into a temporary folder that goes with the Shelf and its last Reading; nothing in it can reach outside
    of that folder.
    """
    where = Path(path).expanduser()
    if (where / "runs").is_dir():
        return Shelf(where)
    if not where.is_file():
        raise RecordError(
            f"{where} is no archive: no runs/ folder is in it",
            hint="name an outputs/ folder, or a tar of one (.tar, .tar.gz, .tar.xz)",
        )
    unpacked = tempfile.TemporaryDirectory(prefix="proofbook-archive-")
    try:
        with tarfile.open(where) as packed:
            packed.extractall(unpacked.name, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise RecordError(f"{where} cannot be unpacked: {error}") from error
    if not (Path(unpacked.name) / "runs").is_dir():
        raise RecordError(f"{where} holds no archive: its top has no runs/ folder")
    return Shelf(Path(unpacked.name), str(path), unpacked)


class Nothing:
    """Stands where an archive holds no such run: whatever is asked of it, it shows the sentence that says so.

    WHY no error: a notebook is read on archives other than its example, and one section without a run is no reason to stop.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a notebook asks every object for its own ways to be shown
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **named: Any) -> Nothing:
        return self

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"There is {self._what} in this archive, so there is nothing to show here."

    def _repr_html_(self) -> str:
        return f"<i>{html.escape(repr(self))}</i>"


def pick(runs: Iterable[T], fits: Callable[[T], object], none: str) -> T | Nothing:
    """The first of ``runs`` that ``fits``; where there is none, what stands for it: ``none`` as in ``no run that was refuted``.

    A run whose record cannot tell does not fit.
    """
    for run in runs:
        try:
            if fits(run):
                return run
        except CannotTell:
            continue
    return Nothing(none)


class Shelf:
    """An archive to read from. Shows itself as the list of its runs, newest first."""

    def __init__(self, folder: Path, name: str = "", holds: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.archive = Archive(folder)
        self._name = name or str(folder)
        self._holds = holds  # the unpacked files live as long as this does

    def _listed(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        runs = self.archive.runs()
        rows = [(r.opened_at[:16].replace("T", " "), r.runbook, r.host, r.status, r.verdict, r.run_id) for r in runs]
        return f"{len(runs)} runs in {self._name}", ("opened (UTC)", "runbook", "host", "status", "verdict", "run"), rows

    def _repr_html_(self) -> str:
        title, columns, rows = self._listed()
        return table_html(columns, rows, title=title)

    def __repr__(self) -> str:
        title, columns, rows = self._listed()
        return table_text(columns, rows, title=title, widest=80)

    def read(self, run: str) -> Reading:
        """A run, by its id or by a beginning or an end of it. Raises NoSuchRun."""
        run_id = self.archive.find(run)
        folder = self.archive.folder_of(run_id)
        if folder is None:
            raise NoSuchRun(f"there is no run {run!r} in {self._name}")
        return Reading(self.archive, folder, self.archive.load(run_id), self._holds)


class Reading:
    """One record, opened for reading."""

    def __init__(
        self, archive: Archive, folder: Path, record: RunRecord, holds: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self._archive = archive
        self._holds = holds  # whoever keeps a Reading and drops its Shelf keeps the files too
        self.folder = folder
        self.record = record

    def __repr__(self) -> str:
        return f"<Reading of {self.record.run_id}: {self.record.headline}>"

    @property
    def verdict(self) -> Shown:
        """How it came out, after what was not verified."""
        return card(self.record.as_json())

    @property
    def not_verified(self) -> Shown:
        """What a reader must not take for shown."""
        listed = [(n["kind"], n["what"], n["why"]) for n in self.record.not_verified]
        return table(("kind", "what", "why"), listed, note="" if listed else "Nothing was left out.")

    @property
    def seal(self) -> Shown:
        """Whether every file is as it was sealed, and the journal's chain is whole."""
        troubles = self._archive.verify(self.record.run_id)
        files = sum(1 for p in self.folder.rglob("*") if p.is_file())
        if not troubles:
            return _text(
                f"Unchanged since it was sealed: {files} files, and the chain of {self.record.journal['lines']} journal lines."
            )
        return _text("\n".join(["NOT as it was sealed:", *(f"  - {trouble}" for trouble in troubles)]))

    @property
    def approvals(self) -> Shown:
        """What was to be changed, who let it through and how, and what came of it."""
        rows = [
            (p["title"], g["decision"], g["approver"], g["how"], (p["applied"] or {}).get("summary", ""))
            for p in self.record.plans
            for g in p["gates"]
        ]
        return table(("plan", "decision", "by", "how", "outcome"), rows, note="" if rows else "There was no gate.")

    @property
    def decisions(self) -> Shown:
        """What was kept or taken back: by which rung of the procedure's ladder, why, and what it holds for."""
        rows = [
            ("kept" if d["keep"] else "taken back", d["rung"], d["because"], "; ".join(d["limits"]))
            for d in self.record.decisions
        ]
        return table(("decision", "rung", "why", "holds for"), rows, note="" if rows else "Nothing was there to be decided.")

    def measurement(self, name: str) -> Mapping[str, Any] | None:
        """The last measurement of this name, with its conditions and problems; None when it was not taken."""
        return next((m for m in reversed(self.record.measurements) if m["name"] == name), None)

    def asked_by(self, probe: str) -> list[Mapping[str, Any]]:
        """The evidence that a probe's questions left, oldest first."""
        return [e for e in self.record.evidence if e.get("probe") == probe]

    def printed(self, evidence: Mapping[str, Any]) -> bytes:
        """What that command printed, as it is in the record; b"" when it printed nothing."""
        return read_output(self.folder / evidence["stdout_file"]) if evidence["stdout_file"] else b""

    def result(self, evidence: Mapping[str, Any]) -> Result:
        """That command's result, as it was when the run read it; what the record cut off is lost."""
        stderr = read_output(self.folder / evidence["stderr_file"]) if evidence["stderr_file"] else b""
        return Result(
            command(*evidence["argv"]),
            evidence["exit_status"],
            self.printed(evidence),
            stderr,
            _time(evidence["started_at"]),
            evidence["duration_s"],
            timed_out=evidence["timed_out"],
            trouble=evidence["trouble"],
        )

    def look(self, probes: Iterable[Probe[Any]], among: Iterable[Mapping[str, Any]]) -> Seen:
        """What probes saw, read anew from the answers ``among`` some evidence; of several answers the last.

        A probe whose questions were not asked there is unknown, and says so. An observation's time is that of its last answer.
        """
        asked = {_question(e["argv"]): e for e in among}
        answers = drive(probes, lambda commands: [self._answer(c, asked) for c in commands])
        boots = {e["boot_id"] for e in asked.values()}
        boot_id = boots.pop() if len(boots) == 1 else ""
        return Seen(
            Observation(
                probe,
                answer.value,
                answer.unknown,
                max((r.started_at for r in answer.results), default=_NEVER),
                boot_id,
            )
            for probe, answer in answers.items()
        )

    def _answer(self, wanted: Command, asked: Mapping[tuple[str, ...], Mapping[str, Any]]) -> Result:
        question = _question(wanted.argv)
        evidence = asked.get(question) or asked.get(_nearest(question, asked))
        if evidence is None:
            return Result(wanted, None, b"", b"", _NEVER, 0.0, trouble="the record holds no answer to it")
        return self.result(evidence)

    @property
    def findings(self) -> Shown:
        """Every finding, worst first."""
        return Shown(findings_html(self.record.findings), findings_text(self.record.findings))

    @property
    def problems(self) -> Shown:
        """The findings that are no pass and were looked at, worst first: what a person has to act on."""
        found = [f for f in self.record.findings if f["verdict"] not in (Verdict.PASS, Verdict.NOT_CHECKED)]
        if not found:
            return _text("No finding calls for anybody.")
        return Shown(findings_html(found), findings_text(found))

    def evidence(self, words: str) -> Shown:
        """What a finding rests on: the commands that were run, and of their output the lines that it speaks of.

        It is the worst finding whose check, subject, signature or reason holds ``words``. Raises NoSuchRun for none.
        """
        finding = next((f for f in worst_first(self.record.findings) if _says(f, words)), None)
        if finding is None:
            raise NoSuchRun(f"no finding of this record holds {words!r}", hint="the attribute findings lists them all")
        known = {e["id"]: e for e in self.record.evidence}
        told = [f"{finding['verdict']} · {finding['check']} · {finding['subject'] or self.record.host}: {finding['reason']}"]
        told += ["It rests on:" if finding["evidence"] else "It rests on no command."]
        for number in finding["evidence"]:
            told += self._told(known[number], finding)
        return _text("\n".join(told))

    def _told(self, evidence: Mapping[str, Any], finding: Mapping[str, Any]) -> Iterator[str]:
        wanted = [w for w in finding["lines"] or [finding["subject"]] if w]
        ended = "ran past its deadline" if evidence["timed_out"] else f"exit status {evidence['exit_status']}"
        path = evidence["stdout_file"] or evidence["stderr_file"]
        yield f"{evidence['id']}  {evidence['started_at'][:19].replace('T', ' ')} UTC  $ {_argv(evidence['argv'])}"
        yield f"       {ended}; {path or 'it printed nothing'}"
        if path:
            lines = read_output(self.folder / path).decode("utf-8", "replace").splitlines()
            yield from (f"       | {line}" for line in _around(lines, wanted) or _short(lines if not finding["lines"] else ()))

    @property
    def before_after(self) -> Shown:
        """The record's tables of before and after; what changed comes first."""
        tables = [t for t in self.record.tables if t["name"] == "before-after"]
        if not tables:
            return _text("This run compared no before with an after.")
        last = tables[-1]
        rows = sorted(last["rows"], key=lambda row: row[-1] == "same")
        return table(last["columns"], rows, note=last["note"])

    @property
    def changed(self) -> Shown:
        """Of the table of before and after, only what is not the same."""
        tables = [t for t in self.record.tables if t["name"] == "before-after"]
        rows = [row for t in tables[-1:] for row in t["rows"] if row[-1] != "same"]
        same = sum(len(t["rows"]) for t in tables[-1:]) - len(rows)
        columns = tables[-1]["columns"] if tables else ("what", "before", "after")
        return table(columns, rows, note=f"{same} more are the same before and after." if tables else "No before and after here.")

    @property
    def timeline(self) -> Picture:
        """The steps over time."""
        steps = [s for s in self.record.steps if s.get("duration_s") is not None]
        told = [f"{s['title']}: {duration_text(s['duration_s'])}, {s['outcome']}" for s in steps]
        return Picture(timeline_png(steps, title=f"{self.record.title} on {self.record.host}"), "\n".join(told))

    def compared_with(self, other: Reading) -> Shown:
        """What differs between this record and an ``other``: how they ended, what was asked, and every finding that changed."""
        rows, same = differences(other.record, self.record)
        columns = ("what", other.record.run_id[-6:], self.record.run_id[-6:])
        return table(columns, rows, note=f"{same} findings came out the same in both.")


def differences(old: RunRecord, new: RunRecord) -> tuple[list[tuple[str, str, str]], int]:
    """Rows (what, in the old record, in the new) of what differs, and how many findings came out the same in both.

    A finding is known by its check and its subject; of several looks the worst counts.
    """
    facts = [("status", old.status, new.status), ("verdict", old.verdict, new.verdict)]
    names = dict.fromkeys([*old.parameters, *new.parameters])
    facts += [(f"parameter {n}", shown(old.parameters.get(n)), shown(new.parameters.get(n))) for n in names]
    facts += [(n, shown(old.after.get(n)), shown(new.after.get(n))) for n in ("hostname", "machine_id", "kernel")]
    before, after = _worst_by_subject(old), _worst_by_subject(new)
    keys = sorted(dict.fromkeys([*before, *after]), key=lambda k: _rank(after.get(k)))
    judged = [
        (f"{check} {subject}".strip(), _word(before.get((check, subject))), _word(after.get((check, subject))))
        for check, subject in keys
    ]
    changed = [row for row in judged if row[1].split(":")[0] != row[2].split(":")[0]]
    return [row for row in facts if row[1] != row[2]] + changed, len(judged) - len(changed)


def _worst_by_subject(record: RunRecord) -> dict[tuple[str, str], Mapping[str, Any]]:
    worst: dict[tuple[str, str], Mapping[str, Any]] = {}
    for finding in worst_first(record.findings):
        worst.setdefault((finding["check"], finding["subject"]), finding)
    return worst


def _rank(finding: Mapping[str, Any] | None) -> int:
    return VERDICTS.index(Verdict(finding["verdict"])) if finding else len(VERDICTS)


def _word(finding: Mapping[str, Any] | None) -> str:
    if finding is None:
        return "no such finding"
    verdict = finding["verdict"].replace("_", " ")
    return verdict if finding["verdict"] == Verdict.PASS else f"{verdict}: {finding['reason']}"


def _says(finding: Mapping[str, Any], words: str) -> bool:
    return any(words.lower() in str(finding[part]).lower() for part in ("check", "subject", "signature", "reason"))


def _around(lines: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The first lines that hold something wanted, cut to what stands around it."""
    cut = []
    for number, line in enumerate(lines):
        at = next((line.find(w) for w in wanted if w in line), -1)
        if at < 0:
            continue
        value = (
            lines[number + 1] if number + 1 < len(lines) and lines[number + 1].startswith("|") else ""
        )  # of a file that was read
        cut.append(_cut(line, at) + (f"  {value}" if value else ""))
    return cut[:_LINES]


def _short(lines: Sequence[str]) -> list[str]:
    """All of an output that is short; nothing of a long one."""
    return [_cut(line, 0) for line in lines] if len(lines) <= _LINES else []


def _cut(line: str, at: int) -> str:
    start = max(0, min(at - 30, len(line) - _WIDE))
    return ("…" if start else "") + line[start : start + _WIDE] + ("…" if start + _WIDE < len(line) else "")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _question(argv: Sequence[str]) -> tuple[str, ...]:
    """A command without the text of its program: another release asks the same question with another program."""
    return tuple("<program>" if "\n" in word else word for word in argv)


def _nearest(question: tuple[str, ...], asked: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The question that is most like it: the same program, and most of the same files; () when there is none.

    WHY: a release that reads one more file of each device must still be able to read the records of the one before it.
    """
    program, files = question[:4], frozenset(question[4:])
    alike = [other for other in asked if other[:4] == program and 2 * len(files & frozenset(other[4:])) > len(files)]
    return max(alike, key=lambda other: len(files & frozenset(other[4:])), default=())


def _argv(argv: Sequence[str]) -> str:
    return " ".join(a if len(a) <= _LONG and "\n" not in a else "<program>" for a in argv)


def _text(text: str) -> Shown:
    from markupsafe import Markup

    return Shown(Markup('<pre style="white-space:pre-wrap;margin:0">{}</pre>').format(text), text)

"""The record of a run: the journal, told so that a stranger can judge the run a year later; and the seal.

:class:`RunRecord` is made from journal events alone, by a pure function. From it come ``record.json`` (for machines),
``record.html`` (for people: one file, no script, nothing from outside), ``record.md`` (for a ticket), ``checks.junit.xml`` (for
whoever counts) and ``notebook.ipynb`` (the run as a notebook). :func:`render` writes them, after every step, so that a run that
dies has a record too; :func:`seal` looks for secrets once more, writes ``manifest-sha256.txt`` and takes the ``.partial`` off the
folder's name.

A manifest shows that nothing changed since the seal; it does not show that what was written was true, nor when it was written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import textwrap
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup, escape

from proofbook.errors import RecordError, Sealed
from proofbook.journal import (
    JOURNAL,
    MANIFEST,
    Journal,
    JournalReading,
    Writer,
    indented,
    parse_journal,
    plain,
    read_journal,
    read_output,
)
from proofbook.model import Plan, RunStatus, Suggested, Verdict, exit_code, hypothesis_word, worst
from proofbook.redact import Hit, Redactor
from proofbook.view import (
    SIGNS,
    VERDICTS,
    duration_text,
    findings_html,
    findings_text,
    plan_html,
    plan_text,
    shown,
    table_html,
    table_text,
    worst_first,
)
from proofbook.visible import SENTENCE, capped, short_digests, visible

__all__ = ["PARTIAL", "SCHEMA", "Keeper", "RunRecord", "from_events", "load_record", "render", "seal"]

#: The schema of record.json. A reader that knows only lower numbers must refuse.
SCHEMA = 1
PARTIAL = ".partial"
QUARANTINE = ".quarantine"

#: The most of one output, or of a measurement's figures, that is shown in the HTML and in the notebook; the rest is in its
#: evidence file, or in record.json. WHY so little: a run keeps hundreds of outputs, and a page must open at once.
SHOWN_IN_HTML = 4 * 1024
SHOWN_IN_NOTEBOOK = 4 * 1024

#: The most lines of a plan's difference that a terminal or a ticket shows.
SHOWN_OF_DIFF = 60

Event = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------ model


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run left, as JSON-like values. Times are ISO 8601 texts in UTC, durations seconds."""

    run_id: str
    runbook: str = ""
    title: str = ""
    purpose: str = ""
    host: str = ""
    mode: str = ""
    clock: str = "wall"
    changes_host: bool = False
    parent: str | None = None
    continues: str | None = None
    origin: str = ""  # the run that began the change, when this one goes on with it
    parameters: Mapping[str, Any] = field(default_factory=dict)
    runner: Mapping[str, Any] = field(default_factory=dict)
    opened_at: str = ""
    closed_at: str = ""  # "" while it runs
    last_at: str = ""  # of the last journal line
    status: str = RunStatus.RUNNING.value
    verdict: str = Verdict.UNKNOWN.value
    exit_code: int = exit_code(RunStatus.RUNNING, Verdict.UNKNOWN)
    summary: str = ""
    trouble: str = ""  # what aborted it, "" if nothing did
    troubles: Sequence[Mapping[str, Any]] = ()
    conclusion: Mapping[str, Any] | None = None
    identities: Sequence[Mapping[str, Any]] = ()  # every proof of who answers, in order: {ts, note, identity, peer}
    steps: Sequence[Mapping[str, Any]] = ()
    findings: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    plans: Sequence[Mapping[str, Any]] = ()  # each with its gates, acts and outcome
    decisions: Sequence[Mapping[str, Any]] = ()  # keep or take back: {keep, rung, because, limits, ts}
    measurements: Sequence[Mapping[str, Any]] = ()
    pictures: Sequence[Mapping[str, Any]] = ()  # {name, title, file, alt}
    notes: Sequence[Mapping[str, Any]] = ()
    timeline: Sequence[Mapping[str, Any]] = ()
    configuration: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()
    redactions: Sequence[Mapping[str, Any]] = ()  # {rule, file, count}
    journal: Mapping[str, Any] = field(default_factory=dict)

    # -- what a reader asks

    @property
    def went_away(self) -> bool:
        """Whether a reboot was asked for and this machine was not seen again: its boot of now is then not known."""
        asked = any(act["argv"][:2] == ["systemctl", "reboot"] for plan in self.plans for act in plan["acts"])
        outcomes = [plan["applied"]["facts"] for plan in self.plans if plan.get("applied")]
        back = any(facts.get("came_back") or facts.get("went_down") is False for facts in outcomes)
        return asked and not back and len(self.identities) < 2

    @property
    def boots(self) -> list[str]:
        """Every boot in which the machine answered, in order: an experiment's own boot lies between the first and the last."""
        return list(dict.fromkeys(proof["identity"]["boot_id"] for proof in self.identities))

    @property
    def before(self) -> Mapping[str, Any]:
        """The identity at first contact; empty if there was none."""
        return self.identities[0]["identity"] if self.identities else {}

    @property
    def after(self) -> Mapping[str, Any]:
        """The identity at last contact."""
        return self.identities[-1]["identity"] if self.identities else {}

    @property
    def machine_id(self) -> str:
        return str(self.before.get("machine_id", ""))

    @property
    def duration_s(self) -> float | None:
        if not self.opened_at or not (self.closed_at or self.last_at):
            return None
        return (datetime.fromisoformat(self.closed_at or self.last_at) - datetime.fromisoformat(self.opened_at)).total_seconds()

    @property
    def not_checked(self) -> list[Mapping[str, Any]]:
        return [f for f in self.findings if f["verdict"] == Verdict.NOT_CHECKED]

    @property
    def not_checked_reasons(self) -> list[str]:
        """One line each: what was not looked at, and why: the list of :attr:`not_verified` without what could not be told,
        which is a finding of its own."""
        return list(dict.fromkeys(n["why"] for n in self.not_verified if n["kind"] != _COULD_NOT_TELL))

    @property
    def not_verified(self) -> list[dict[str, str]]:
        """What a reader must not take for shown, as {what, why, kind}: could not tell, not looked at, the run's own remarks."""
        listed = [
            {"kind": _COULD_NOT_TELL, "what": f.get("title") or f["check"], "why": _about(f) + f["reason"]}
            for f in self.findings
            if f["verdict"] == Verdict.UNKNOWN
        ]
        listed += [
            {"kind": "not checked", "what": f.get("title") or f["check"], "why": _about(f) + f["reason"]}
            for f in self.not_checked
        ]
        listed += [
            {"kind": "remark", "what": n.get("title") or "Remark", "why": n["text"]}
            for n in self.notes
            if n["kind"] == "not-verified"
        ]
        if self.status not in (RunStatus.COMPLETED, RunStatus.RUNNING):
            why = _ENDED_EARLY.get(RunStatus(self.status), "")
            listed.insert(0, {"kind": "run ended early", "what": "Everything after the last step below", "why": why})
        return list({(n["what"], n["why"]): n for n in listed}.values())

    @property
    def taken_back(self) -> bool:
        """Whether this run itself has seen its change away again."""
        ends = {(p["applied"] or {}).get("outcome") for p in self.plans}
        return self.status != RunStatus.ROLLBACK_FAILED and bool(ends & {"rolled-back", "restored"})

    @property
    def problems(self) -> list[dict[str, str]]:
        """What is not fine, worst first, as {verdict, subject, reason, what_to_do}; the same at two looks is said once."""
        keys = ("verdict", "subject", "reason", "what_to_do")
        bad = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN)
        told = [{k: str(f.get(k) or "") for k in keys} for f in self.told if f["verdict"] in bad]
        return list({tuple(t.values()): t for t in told}.values())

    @property
    def reservations(self) -> list[str]:
        """How far a conclusion and the last decision reach: what they hold for, and what they do not show."""
        concluded = self.conclusion or {}
        scope = [f"scope: {concluded['scope']}"] if concluded.get("scope") else []
        said = [*scope, *concluded.get("limits", ()), *(limit for d in self.decisions[-1:] for limit in d.get("limits", ()))]
        return list(dict.fromkeys(map(str, said)))

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each verdict, worst first; verdicts that did not occur are left out."""
        counted = Counter(f["verdict"] for f in told_once(self.findings))
        return {v.value: counted[v.value] for v in VERDICTS if counted[v.value]}

    @property
    def conclusion_word(self) -> str | None:
        return str(self.conclusion["outcome"]) if self.conclusion else None

    @property
    def waiting_for(self) -> dict[str, str] | None:
        """The approval that a run at a gate waits for: {digest, title, host, issued_at}."""
        if self.status != RunStatus.STOPPED_AT_GATE:
            return None
        for plan in reversed(self.plans):
            if any(g["decision"] == "waiting" for g in plan["gates"]):
                keys = ("digest", "title", "issued_at")
                return {**{k: str(plan.get(k, "")) for k in keys}, "host": str(plan.get("host", {}).get("hostname", self.host))}
        return None

    @property
    def tone(self) -> str:
        """Which of fail · unknown · warn · pass · wait · running the whole record looks like."""
        if self.status == RunStatus.COMPLETED:
            return {"FAIL": "fail", "UNKNOWN": "unknown", "WARN": "warn", "PASS": "pass"}.get(self.verdict, "unknown")
        if self.status == RunStatus.RUNNING:
            return "running"
        if self.status == RunStatus.STOPPED_AT_GATE:
            return "wait"
        if self.status == RunStatus.ROLLBACK_FAILED or self.verdict == Verdict.FAIL:
            return "fail"
        return "warn" if self.status == RunStatus.ROLLED_BACK else "unknown"

    @property
    def sign(self) -> str:
        return {"fail": "✗", "unknown": "?", "warn": "!", "pass": "✓", "wait": "‖", "running": "…"}[self.tone]

    @property
    def headline(self) -> str:
        """The outcome in words, without colour or sign."""
        so_far = "" if not self.findings else f" · so far {self.verdict}"
        return {
            RunStatus.COMPLETED: self._completed,
            RunStatus.RUNNING: f"Not finished{so_far}",
            RunStatus.STOPPED_AT_GATE: "Waiting for an approval" if self.waiting_for else "Declined at the gate",
            RunStatus.ROLLED_BACK: f"Rolled back · {self.verdict}",
            RunStatus.ROLLBACK_FAILED: f"ROLLBACK FAILED · {self.verdict}",
            RunStatus.ABORTED: f"Aborted{so_far}",
            RunStatus.LOST: f"Lost: the runner died{so_far}",
        }.get(RunStatus(self.status), self.status)

    @property
    def _completed(self) -> str:
        if self.conclusion_word and self.verdict == Verdict.FAIL and not self._started:
            return f"{self.conclusion_word.upper()} · {_NOT_STARTED}"
        if self.conclusion_word:  # of an experiment: what it found comes first, and the verdict says whether that counts
            return f"{self.conclusion_word.upper()} · {_CONCLUDED[self.verdict]}"
        return _COMPLETED[self.verdict] if not self.not_checked or self.verdict != "PASS" else _PASS_IN_PART

    @property
    def _started(self) -> bool:
        """Whether an experiment came further than its questions: it acted, or it measured."""
        return bool(self.measurements) or any(plan["acts"] for plan in self.plans)

    # -- as text

    def brief(self) -> dict[str, Any]:
        """One line of the archive's list."""
        keys = (
            "run_id",
            "runbook",
            "host",
            "status",
            "verdict",
            "exit_code",
            "summary",
            "opened_at",
            "closed_at",
            "continues",
            "parent",
        )
        return {
            **{k: getattr(self, k) for k in keys},
            "machine_id": self.machine_id,
            "conclusion": self.conclusion_word,
            "counts": self.counts,
        }

    def as_json(self) -> dict[str, Any]:
        """The whole record, as ``record.json`` has it."""
        own = {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}
        return {
            "schema": SCHEMA,
            **own,
            "machine_id": self.machine_id,
            "identity": {"before": plain(self.before), "after": plain(self.after)},
            "duration_s": self.duration_s,
            "headline": self.headline,
            "counts": self.counts,
            # WHY not the longer list: verify holds sealed records against this one, and theirs means these findings alone.
            "not_checked": list(dict.fromkeys(_about(f) + f["reason"] for f in self.not_checked)),
            "not_verified": self.not_verified,
            "waiting_for": self.waiting_for,
        }

    def as_markdown(self) -> str:
        """A page that fits into a ticket: fewer than 60 lines, and at a gate its plan besides."""
        return self._page("record.md.j2")

    def as_text(self) -> str:
        """The same page for a terminal, without marks and escapes."""
        return self._page("record.txt.j2")

    def _page(self, template: str) -> str:
        findings = [f for f in self.told if f["verdict"] != Verdict.PASS]
        at_gate = [p for p in self.plans if self.waiting_for and p["digest"] == self.waiting_for["digest"]][-1:]
        return visible(str(_environment().get_template(template).render(r=self, findings=findings, at_gate=at_gate)))

    @property
    def told(self) -> list[dict[str, Any]]:
        """The findings for a reader, worst first; advice to take a change back is left out where that was done."""
        told = [dict(f) for f in worst_first(told_once(self.findings))]
        if self.taken_back:
            for f in told:
                if f.get("action") == Suggested.ROLL_BACK:
                    f["what_to_do"] = _without_taking_back(f["what_to_do"])
        return told


_COULD_NOT_TELL = "could not tell"
_TAKE_BACK = re.compile(r"(?:^|(?<=; ))take it back(?:[;.]|, and|,)? *", re.IGNORECASE)
_COMPLETED = {
    "PASS": "PASS · it is as it should be",
    "WARN": "WARN · usable, with something to look at",
    "UNKNOWN": "UNKNOWN · it could not be shown",
    "FAIL": "FAIL · it is not as it should be",
}
_CONCLUDED = {
    "PASS": "PASS, validly run and the machine as it was",
    "WARN": "WARN, validly run, with something to look at",
    "UNKNOWN": "UNKNOWN, whether it was validly run could not be shown",
    "FAIL": "FAIL, not validly run, or the machine is not as it was",
}
_NOT_STARTED = "FAIL, not started; the machine was not touched"
_PASS_IN_PART = "PASS · all that was checked is as it should be"
_ENDED_EARLY = {
    RunStatus.STOPPED_AT_GATE: "The run stopped at its gate; nothing was changed, and nothing behind the gate was looked at.",
    RunStatus.ABORTED: "The run was aborted; later steps were not carried out.",
    RunStatus.LOST: "The runner died; later steps were not carried out, and the last act may have no outcome here.",
    RunStatus.ROLLED_BACK: "The change was taken back; what was shown with it in place no longer holds.",
    RunStatus.ROLLBACK_FAILED: "The change could not be taken back; the machine is in a state that this run did not verify.",
}


def _without_taking_back(advice: str) -> str:
    """What remains to be done once the change is away: nothing, if taking it back was the whole advice (with its reason)."""
    if re.match("take it back:", advice, re.IGNORECASE):
        return ""
    rest = _TAKE_BACK.sub("", advice).strip().removesuffix(";")
    return rest[:1].upper() + rest[1:]


def _about(finding: Mapping[str, Any]) -> str:
    return f"{finding['subject']}: " if finding.get("subject") and finding["subject"] not in finding["reason"] else ""


# ----------------------------------------------------------------------------------------- from events


def told_once(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Findings for a reader: what came out the same at several looks is said once, with its looks. The data keep each."""
    told: dict[tuple[Any, ...], dict[str, Any]] = {}
    for f in findings:
        key = (f["check"], f["subject"], f["verdict"], f["reason"])
        if key not in told:
            told[key] = dict(f)
        elif f.get("look") and f["look"] not in told[key]["look"].split(", "):
            told[key]["look"] = f"{told[key]['look']}, {f['look']}"
            told[key]["evidence"] = [*told[key]["evidence"], *(e for e in f["evidence"] if e not in told[key]["evidence"])]
    return list(told.values())


def from_events(events: Iterable[Event], reading: JournalReading | None = None) -> RunRecord:
    """The record that some journal events amount to. Pure: the same events give the same record.

    Events of kinds that this version does not know are left out; the journal keeps them.
    """
    builder = _Builder()
    for event in events:
        builder.take(event)
    return builder.record(reading)


class _Builder:
    def __init__(self) -> None:
        self.own: dict[str, Any] = {"run_id": ""}
        self.lists: dict[str, list[Any]] = {
            name: []
            for name in (
                "troubles",
                "identities",
                "steps",
                "findings",
                "plans",
                "decisions",
                "measurements",
                "notes",
                "timeline",
                "evidence",
                "redactions",
            )
        }
        self.pictures: dict[str, Mapping[str, Any]] = {}
        self.tables: dict[str, Mapping[str, Any]] = {}
        self.values: dict[str, Any] = {}
        self.configuration: dict[str, Any] = {}
        self.step: dict[str, Any] | None = None
        self.acts: dict[int, dict[str, Any]] = {}
        self.lines = 0

    def take(self, event: Event) -> None:
        self.lines += 1
        self.own["last_at"] = event["ts"]
        handler = getattr(self, "_on_" + event["event"].replace(".", "_"), None)
        if handler is not None:
            handler(event["ts"], event["data"])

    def record(self, reading: JournalReading | None) -> RunRecord:
        if "verdict" not in self.own:
            self.own["verdict"] = worst(Verdict(f["verdict"]) for f in self.lists["findings"]).value
        status = RunStatus(self.own.get("status", RunStatus.RUNNING))
        self.own.setdefault("exit_code", exit_code(status, Verdict(self.own["verdict"])))
        if status is not RunStatus.COMPLETED and self.lists["troubles"]:
            self.own["trouble"] = self.lists["troubles"][-1]["message"]
        journal: dict[str, Any] = {"lines": self.lines}
        if reading is not None:
            journal |= {"last": reading.last, "sealed": reading.sealed, "intact": reading.intact, "trouble": reading.trouble}
        lists: dict[str, Any] = {name: tuple(items) for name, items in self.lists.items()}
        return RunRecord(
            **self.own,
            **lists,
            tables=tuple(self.tables.values()),
            pictures=tuple(self.pictures.values()),
            values=self.values,
            configuration=self.configuration,
            journal=journal,
        )

    def _mark(self, ts: str, kind: str, text: str) -> None:
        self.lists["timeline"].append({"ts": ts, "kind": kind, "text": text, "step": self.step["step"] if self.step else None})

    # one method an event

    def _on_run_opened(self, ts: str, data: Mapping[str, Any]) -> None:
        names = (
            "run_id",
            "runbook",
            "title",
            "purpose",
            "host",
            "mode",
            "clock",
            "changes_host",
            "parent",
            "continues",
            "origin",
            "parameters",
            "runner",
        )
        self.own |= {name: data[name] for name in names if name in data} | {"opened_at": ts}
        self._mark(ts, "run", "Run opened" + (f", going on from {data['continues']}" if data.get("continues") else ""))

    def _on_host_proven(self, ts: str, data: Mapping[str, Any]) -> None:
        before = self.lists["identities"][-1]["identity"]["boot_id"] if self.lists["identities"] else None
        self.lists["identities"].append(
            {"ts": ts, "note": data.get("note", ""), "identity": data["identity"], "peer": data.get("peer") or {}}
        )
        identity = data["identity"]
        boot = "" if before is None else (", same boot" if before == identity["boot_id"] else ", a NEW boot")
        self._mark(
            ts,
            "contact",
            f"{identity['hostname']} answers: machine-id {identity['machine_id'][:12]}, boot {identity['boot_id'][:12]}{boot}",
        )

    def _on_step_started(self, ts: str, data: Mapping[str, Any]) -> None:
        self.step = {**data, "started_at": ts, "outcome": "unfinished", "duration_s": None, "error": None}
        self.lists["steps"].append(self.step)
        self._mark(ts, "step", f"Step {data['step']}: {data['title']}")

    def _on_step_ended(self, ts: str, data: Mapping[str, Any]) -> None:
        if data.get("outcome") == "skipped":
            return  # a done step was said again: its stored result was returned
        for step in reversed(self.lists["steps"]):
            if step["step"] == data["step"]:
                step |= {k: data.get(k) for k in ("outcome", "error", "duration_s")} | {"ended_at": ts}
                break
        if data.get("outcome") not in ("ok", None):
            kind = "gate" if data["outcome"] == "stopped" else "trouble"
            self._mark(ts, kind, f"Step {data['step']} {data['outcome']}: {_first_line(data.get('error') or '')}")
        self.step = None

    def _on_evidence(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["evidence"].append({**data, "step": self.step["step"] if self.step else None})

    def _on_finding(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["findings"].append({**data, "ts": ts, "step": self.step["step"] if self.step else None})
        if data["verdict"] in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN):
            self._mark(ts, "finding", f"{data['verdict']}: {_about(data)}{data['reason']}")

    def _on_table(self, ts: str, data: Mapping[str, Any]) -> None:
        self.tables[data["name"]] = data  # told again: the later one holds

    def _on_measurement(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["measurements"].append({**data, "ts": ts, "step": self.step["step"] if self.step else None})
        whence = f", taken over from {data['from_run']}" if data.get("from_run") else ""
        trouble = f"; {len(data['problems'])} problem(s)" if data.get("problems") else ""
        self._mark(ts, "measurement", f"Measured: {data['title']} ({duration_text(data['took_s'])}{whence}{trouble})")

    def _on_picture(self, ts: str, data: Mapping[str, Any]) -> None:
        self.pictures[data["name"]] = data  # drawn again: the later one holds

    def _on_decision(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["decisions"].append({**data, "ts": ts})
        self._mark(ts, "gate", f"Decision: {_decided(data)} ({data['rung']}): {data['because']}")

    def _on_plan(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["plans"].append({**data, "ts": ts, "gates": [], "acts": [], "applied": None})
        self._mark(ts, "plan", f"Plan: {data['title']}" if data["actions"] else f"Plan: nothing to do ({data['title']})")

    def _plan(self, digest: str | None) -> dict[str, Any]:
        for plan in reversed(self.lists["plans"]):
            if plan["digest"] == digest or digest is None:
                found: dict[str, Any] = plan
                return found
        empty: dict[str, Any] = {name: [] for name in ("actions", "undo", "cannot_undo", "facts", "gates", "acts")}
        orphan = {"digest": digest or "", "title": "(plan not in this journal)", "diff": "", "applied": None, **empty}
        self.lists["plans"].append(orphan)
        return orphan

    def _on_gate(self, ts: str, data: Mapping[str, Any]) -> None:
        self._plan(data["digest"])["gates"].append({**data, "ts": ts})
        said = {
            "approved": f"Approved by {data.get('approver') or '?'} ({data.get('how') or 'unknown way'})",
            "waiting": "Gate: waiting for an approval",
            "declined": f"Gate: declined ({data.get('how') or 'unknown way'})",
            "refused": f"Gate refused: {data.get('text', '')}",
            "nothing-to-do": "Gate: nothing to do, nothing to approve",
        }
        self._mark(ts, "gate", said.get(data["decision"], f"Gate: {data['decision']}"))

    def _on_act_intent(self, ts: str, data: Mapping[str, Any]) -> None:
        act = {
            **data,
            "started_at": ts,
            "outcome": "unknown",
            "exit_status": None,
            "note": "no outcome was written",
            "evidence": [],
        }
        self.acts[data["act"]] = act
        self._plan(data.get("digest"))["acts"].append(act)
        self._mark(ts, "act", f"Acting: {data['what']}")

    def _on_act_outcome(self, ts: str, data: Mapping[str, Any]) -> None:
        act = self.acts.get(data["act"])
        if act is not None:
            act |= {**data, "ended_at": ts}
        if data["outcome"] != "ok":
            self._mark(
                ts, "act", f"Act {data['act']} came out {data['outcome']}" + (f": {data['note']}" if data.get("note") else "")
            )

    def _on_applied(self, ts: str, data: Mapping[str, Any]) -> None:
        self._plan(data.get("digest"))["applied"] = {**data, "ts": ts}
        self._mark(ts, "act", f"Applied ({data['outcome']}): {data.get('summary', '')}")

    def _on_progress(self, ts: str, data: Mapping[str, Any]) -> None:
        self._mark(ts, "progress", data["text"])

    def _on_note(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["notes"].append(
            {"kind": data.get("kind", "note"), "title": data.get("title", ""), "text": data.get("text", ""), "ts": ts}
        )
        self._mark(ts, "note", f"{data.get('title') or data.get('kind', 'note')}: {_first_line(data.get('text', ''))}")

    def _on_configuration(self, ts: str, data: Mapping[str, Any]) -> None:
        self.configuration |= data

    def _on_value(self, ts: str, data: Mapping[str, Any]) -> None:
        self.values[data["name"]] = {"schema": data.get("schema"), "value": data.get("value")}

    def _on_conclusion(self, ts: str, data: Mapping[str, Any]) -> None:
        self.own["conclusion"] = data
        self._mark(ts, "conclusion", f"Conclusion: {data.get('outcome')}")

    def _on_trouble(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["troubles"].append({**data, "ts": ts})
        self._mark(ts, "trouble", _first_line(data.get("message", "")))

    def _on_redactions(self, ts: str, data: Mapping[str, Any]) -> None:
        self.lists["redactions"] = list(data["ledger"])

    def _on_run_closing(self, ts: str, data: Mapping[str, Any]) -> None:
        self.own |= {k: data[k] for k in ("status", "verdict", "summary", "exit_code") if k in data} | {"closed_at": ts}
        self._mark(ts, "run", f"Run closed: {data['status']}, {data['verdict']}")


def _decided(data: Mapping[str, Any]) -> str:
    """A decision in words; where nothing was changed there is nothing to keep or to take back."""
    return "nothing was changed" if not data.get("acted", True) else ("keep" if data["keep"] else "take back")


def some_lines(text: str, most: int = SHOWN_OF_DIFF) -> str:
    """At most ``most`` lines of a difference, and how many more there are."""
    lines = text.rstrip("\n").split("\n")
    more = len(lines) - most
    return "\n".join([*lines[:most], *([f"… {more} more lines in record.json"] if more > 0 else [])])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def load_record(run_dir: Path) -> RunRecord:
    """The record of a run's folder, from its journal. Raises RecordError when the journal cannot be read at all."""
    reading = read_journal(run_dir / JOURNAL)
    return from_events(reading.events, reading)


def _after(text: Any, title: Any) -> str:
    """A text without the title that it begins with, to stand behind that title."""
    return str(text).removeprefix(f"{title}: ")


# -------------------------------------------------------------------------------------------- rendering


def render(
    run_dir: Path, *, writer: Writer | None = None, events: Sequence[Event] | None = None, final: bool = False
) -> RunRecord:
    """Write the record's files beside the journal; ``final`` adds evidence in the HTML, JUnit XML and the notebook.

    ``events`` saves reading the journal again. Raises DiskFull, Sealed, RecordError.
    """
    writer = writer or Writer(run_dir, Redactor())
    if events is None:
        reading = read_journal(run_dir / JOURNAL)
        events, record = reading.events, from_events(reading.events, reading)
    else:
        record = from_events(events)
    excerpts = _Excerpts(run_dir, record) if final else None
    # WHY clean=False: all of it comes from journal lines, which were cleaned when they were written
    writer.write_text("record.json", indented(record.as_json()), clean=False)
    writer.write_text("record.md", record.as_markdown(), clean=False)
    writer.write_text("record.html", _html(record, excerpts), clean=False)
    if excerpts is not None:
        writer.write_bytes("checks.junit.xml", _junit(record), clean=False)
        writer.write_text("notebook.ipynb", indented(_notebook(record, events, excerpts)), clean=False)
    return record


@lru_cache(maxsize=1)
def _environment() -> Any:
    """The templates. HTML is escaped always; Markdown by its own filter."""
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("proofbook", "templates"),
        autoescape=lambda name: bool(name and name.startswith("record.html")),
        undefined=ChainableUndefined,  # a record of an older version lacks a key: show the rest
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "shown": lambda value: capped(shown(value)),
        "brief": lambda text: capped(str(text)),
        "figures": lambda value: capped(json.dumps(value, ensure_ascii=False, indent=1), SHOWN_IN_HTML),
        "lines": lambda lines: "\n".join(map(capped, lines)),
        "duration": duration_text,
        "clock": lambda ts: ts[11:19] if ts else "",
        "day": lambda ts: ts[:10] if ts else "",
        "utc": lambda ts: f"{ts[:10]} {ts[11:19]} UTC" if ts else "–",
        "size": _size_text,
        "md": _markdown_text,
        "plain": lambda value: capped(" ".join(shown(value).split())),
        "short": short_digests,
        "some_lines": some_lines,
        "prose": _prose,
        "argv": argv_text,
        "after": _after,
        "sentence": lambda text: text if str(text).rstrip().endswith((".", "!", "?")) else f"{str(text).rstrip()}.",
        "hypothesis": hypothesis_word,
        "first_line": _first_line,
        "decided": _decided,
    }
    environment.filters.update(filters)
    environment.tests["changed"] = _changed
    environment.globals |= {"SIGNS": {v.value: s for v, s in SIGNS.items()}}
    return environment


def _changed(row: Sequence[Any]) -> bool:
    """Whether a before-and-after row says, in its last cell, that something changed."""
    return bool(row) and (row[-1] is False or str(row[-1]).lower() in ("no", "changed", "differs", "different"))


def _size_text(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    return f"{size / 1024:.1f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"


def _markdown_text(value: Any) -> str:
    """Text that means itself in Markdown, on one line."""
    text = capped(re.sub(r"\s+", " ", shown(value)).strip())
    return re.sub(r"([\\`*_|<>\[\]#~])", r"\\\1", text)


def _prose(text: Any, most: int = SENTENCE) -> Markup:
    """A sentence for HTML: escaped, of at most so many characters, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`\n]{1,300})`", r"<code>\1</code>", str(escape(capped(str(text), most)))))


def argv_text(argv: Sequence[str]) -> str:
    """A command as a person would type it; programs given as text to ``sh -c`` are cut to their first line."""
    import shlex

    words = [f"{_first_line(a)[:60]} …" if "\n" in a or len(a) > 200 else a for a in argv]
    return " ".join(w if w.endswith(" …") else shlex.quote(w) for w in words)


def _html(record: RunRecord, excerpts: _Excerpts | None) -> str:
    told = record.told
    groups = [(v.value, found) for v in VERDICTS if (found := [f for f in told if f["verdict"] == v])]
    template = _environment().get_template("record.html.j2")
    shown_parts: dict[str, Any] = {"excerpt": excerpts.html, "drawn": excerpts.picture} if excerpts else {}
    # WHY the whole page: a host chooses its name, its units' names, its files' names; each of them is shown somewhere
    return visible(str(template.render(r=record, groups=groups, looks=_looks(record), manifest=MANIFEST, **shown_parts)))


def _looks(record: RunRecord) -> dict[str, Any]:
    """Each expectation at each look (the worst of its subjects), when there were several: {looks, rows: [(title, [verdict])]}."""
    looks = list(dict.fromkeys(f.get("look") or "" for f in record.findings))
    rows: dict[str, dict[str, str]] = {}
    for f in record.findings:
        row, look = rows.setdefault(f.get("title") or f["check"], {}), f.get("look") or ""
        row[look] = max((Verdict(row.get(look, f["verdict"])), Verdict(f["verdict"])), key=_badness).value
    listed = [(title, [by.get(look, "") for look in looks]) for title, by in rows.items() if len(by) > 1]
    listed.sort(key=lambda row: -max(_badness(Verdict(v)) for v in row[1] if v))
    return {"looks": looks, "rows": listed} if listed else {}


def _badness(verdict: Verdict) -> int:
    return len(VERDICTS) - VERDICTS.index(verdict)


class _Excerpts:
    """What is shown of an output: all of it if it is short, else its head, its tail, and the lines that findings stand on."""

    def __init__(self, run_dir: Path, record: RunRecord) -> None:
        self._run_dir = run_dir
        self._wanted = {line.strip() for f in record.findings for line in f.get("lines") or () if line.strip()}
        self._wanted_text = "\n".join(self._wanted)
        self._texts: dict[str, str] = {}  # each is shown twice: on the page and in the notebook

    def html(self, path: str) -> str:
        return self.of(path, SHOWN_IN_HTML)

    def of(self, path: str, limit: int) -> str:
        """The excerpt of one evidence file, at most about ``limit`` characters."""
        # WHY: a record may come from elsewhere; a path in it must not fetch what lies outside its evidence
        if not path.startswith("evidence/") or ".." in path.split("/") or (self._run_dir / path).is_symlink():
            return f"(not a file of this record's evidence: {path})"
        if path not in self._texts:
            try:
                data = read_output(self._run_dir / path)
            except OSError as error:
                return f"(the file {path} cannot be read: {error.strerror})"
            # WHY a new line: it parts arguments and variables in /proc/PID/cmdline and environ
            self._texts[path] = visible(data.decode("utf-8", "backslashreplace").replace("\0", "\0\n"))
        text = self._texts[path]
        if len(text) <= limit:
            return text
        lines = text.splitlines()
        part = limit * 2 // 5
        head, tail = _fitting(lines, part), _fitting(reversed(lines), part)[::-1]
        rest = lines[len(head) : len(lines) - len(tail)]
        matched = _fitting((x for x in rest if self._matters(x)), limit - 2 * part)
        left_out = (
            f"[… {len(rest)} lines left out here; the whole output is in {path}"
            + ("; those that findings stand on:" if matched else "")
            + " …]"
        )
        return "\n".join([*head, left_out, *matched, *(["[…]"] if matched else []), *tail])

    def picture(self, path: str) -> str:
        """A picture's bytes in base64, "" when it is not a readable PNG of this record."""
        if not re.fullmatch(r"pictures/[A-Za-z0-9._-]+\.png", path) or (self._run_dir / path).is_symlink():
            return ""
        try:
            data = (self._run_dir / path).read_bytes()
        except OSError:
            return ""
        return base64.b64encode(data).decode() if data.startswith(b"\x89PNG") else ""

    def _matters(self, line: str) -> bool:
        stripped = line.strip()
        return bool(stripped) and (any(map(line.__contains__, self._wanted)) or stripped in self._wanted_text)


def _fitting(lines: Iterable[str], budget: int) -> list[str]:
    kept: list[str] = []
    for line in lines:
        line = line if len(line) <= 2000 else line[:2000] + " …"
        budget -= len(line) + 1
        if budget < 0:
            break
        kept.append(line)
    return kept


# ------------------------------------------------------------------------------------------------ JUnit


def _junit(record: RunRecord) -> bytes:
    """JUnit XML: FAIL is a failure, UNKNOWN an error, NOT_CHECKED skipped; WARN passes, with its reason as a property."""
    count = Counter(f["verdict"] for f in record.findings)
    totals = {
        "tests": str(len(record.findings)),
        "failures": str(count["FAIL"]),
        "errors": str(count["UNKNOWN"]),
        "skipped": str(count["NOT_CHECKED"]),
        "time": f"{record.duration_s or 0:.3f}",
    }
    root = ET.Element("testsuites", {"name": "proofbook", **totals})
    suite = ET.SubElement(
        root, "testsuite", {"name": record.runbook, **totals, "hostname": record.host, "timestamp": record.opened_at.rstrip("Z")}
    )
    facts = {
        "run_id": record.run_id,
        "status": record.status,
        "verdict": record.verdict,
        "machine_id": record.machine_id,
        "proofbook": record.runner.get("proofbook", ""),
    }
    properties = ET.SubElement(suite, "properties")
    for name, value in facts.items():
        ET.SubElement(properties, "property", {"name": name, "value": _xml_text(str(value))})
    for f in record.findings:
        about = " ".join(filter(None, (f["check"], f.get("subject"), f"[{f['look']}]" if f.get("look") else "")))
        case = ET.SubElement(
            suite, "testcase", {"classname": _xml_text(f"{record.runbook}.{record.host}"), "name": _xml_text(about), "time": "0"}
        )
        _junit_outcome(case, f)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _junit_outcome(case: ET.Element, finding: Mapping[str, Any]) -> None:
    reason = _xml_text(capped(finding["reason"]))
    advice = ["do next: " + finding["what_to_do"]] if finding.get("what_to_do") else []
    detail = _xml_text("\n".join(map(capped, [*(finding.get("lines") or ()), *advice])))
    match finding["verdict"]:
        case Verdict.FAIL:
            ET.SubElement(case, "failure", {"message": reason, "type": finding["check"]}).text = detail
        case Verdict.UNKNOWN:
            ET.SubElement(case, "error", {"message": reason, "type": "CannotTell"}).text = detail
        case Verdict.NOT_CHECKED:
            ET.SubElement(case, "skipped", {"message": f"NOT CHECKED: {reason}"})
        case Verdict.WARN:
            ET.SubElement(ET.SubElement(case, "properties"), "property", {"name": "warning", "value": reason})
            ET.SubElement(case, "system-out").text = f"WARN: {reason}\n{detail}".rstrip()
        case _:
            ET.SubElement(case, "system-out").text = reason


def _xml_text(text: str) -> str:
    """Text without the control characters, which XML 1.0 cannot hold, and without those that act in a view."""
    return re.sub(r"[\ufffe\uffff]", "�", visible(text))


# --------------------------------------------------------------------------------------------- notebook


def _notebook(record: RunRecord, events: Sequence[Event], excerpts: _Excerpts) -> dict[str, Any]:
    """The run as a notebook (nbformat 4.5): what each step asked, saw and found. It is a rendering and cannot be run."""
    cells: list[dict[str, Any]] = []

    def markdown(text: str) -> None:
        cells.append({"cell_type": "markdown", "id": f"c{len(cells):04d}", "metadata": {}, "source": visible(text)})

    def code(number: int, source: str, outputs: list[dict[str, Any]]) -> None:
        cells.append(
            {
                "cell_type": "code", "id": f"c{len(cells):04d}", "metadata": {}, "execution_count": number, "source": source,
                "outputs": outputs,
            }
        )  # fmt: skip

    opening = [
        f"# {record.sign} {record.headline} · {record.title}",
        "",
        f"`{record.run_id}` on **{_markdown_text(record.host)}**",
        "",
    ]
    opening += [
        _markdown_text(record.summary),
        "",
        "*Rendered from the run's journal. It shows what was done; it is not meant to be run again.*",
    ]
    markdown("\n".join(opening))
    if record.not_verified:
        markdown(
            "\n".join(
                [
                    "## Not verified",
                    *[
                        f"- **{_markdown_text(n['what'])}**: {_markdown_text(_after(n['why'], n['what']))}"
                        for n in record.not_verified
                    ],
                ]
            )
        )
    for step, inner in _by_step(events):
        markdown(f"## {step['step']} · {_markdown_text(step['title'])}")
        code(
            step["step"],
            f"# {visible(textwrap.shorten(step['verb'] + ' · ' + step['key'], 120, placeholder=' …'))}",
            list(_outputs(inner, excerpts)),
        )
    for note in record.notes:
        if note["kind"] in ("operator", "procedure", "note"):
            markdown(f"### {_markdown_text(note['title'] or 'Operation note')}\n\n{_markdown_text(note['text'])}")
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
            "proofbook": {"run_id": record.run_id, "status": record.status, "verdict": record.verdict, "rendered_from": JOURNAL},
        },
        "cells": cells,
    }


def _by_step(events: Sequence[Event]) -> Iterator[tuple[Mapping[str, Any], list[Event]]]:
    step: Mapping[str, Any] | None = None
    inner: list[Event] = []
    for event in events:
        if event["event"] == "step.started":
            if step is not None:
                yield step, inner
            step, inner = event["data"], []
        elif step is not None:
            inner.append(event)
            if event["event"] == "step.ended":
                yield step, inner
                step, inner = None, []
    if step is not None:
        yield step, inner


def _outputs(events: Sequence[Event], excerpts: _Excerpts) -> Iterator[dict[str, Any]]:
    findings = [e["data"] for e in events if e["event"] == "finding"]
    said = "".join(f"{e['ts'][11:19]} {capped(text)}\n" for e in events if (text := _spoken(e["event"], e["data"])))
    if said:
        yield {"output_type": "stream", "name": "stdout", "text": visible(said)}
    if findings:
        yield _display(findings_html(findings), findings_text(findings))
    for event in events:
        data = event["data"]
        if event["event"] == "plan":
            with suppress(msgspec.ValidationError):  # a plan of another version: the line above names it, and record.json has it
                plan = msgspec.convert(data, Plan)
                yield _display(plan_html(plan), plan_text(plan))
        elif event["event"] == "table":
            told: dict[str, Any] = {"title": data["title"], "note": data.get("note", "")}
            yield _display(table_html(data["columns"], data["rows"], **told), table_text(data["columns"], data["rows"], **told))
        elif event["event"] == "picture":
            if drawn := excerpts.picture(data["file"]):
                yield {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"image/png": drawn, "text/plain": f"{data['title']}: {data['alt']}"},
                }
        elif event["event"] == "measurement":
            html = Markup("<details><summary>{}</summary><pre>{}</pre></details>")
            told_value = capped(json.dumps(data["value"], ensure_ascii=False, indent=1), SHOWN_IN_NOTEBOOK)
            yield _display(html.format(f"{data['title']} ({data['unit']})", told_value), told_value)
        elif event["event"] == "step.ended" and data.get("outcome") == "failed":
            error = visible(capped(str(data.get("error") or "failed")))
            yield {"output_type": "error", "ename": "StepFailed", "evalue": error, "traceback": error.splitlines()}
    kept = [_evidence_told(e["data"], excerpts) for e in events if e["event"] == "evidence"]
    if kept:
        # WHY: what was concluded stands in the open, what it rests on is one click away; folded, a step fits on a screen.
        folded = Markup(
            '<details><summary style="cursor:pointer;overflow-wrap:anywhere">{}</summary>'
            '<pre style="white-space:pre-wrap">{}</pre></details>'
        )
        html = Markup("").join(folded.format(head, text) for head, text in kept)
        yield _display(html, f"{len(kept)} outputs are kept: {', '.join(head.split(' · ')[0] for head, _text in kept)}")


def _display(html: str, text: str) -> dict[str, Any]:
    shows = {"text/html": visible(str(html)), "text/plain": visible(text)}
    return {"output_type": "display_data", "metadata": {}, "data": shows}


def _spoken(event: str, data: Mapping[str, Any]) -> str:
    match event:
        case "progress":
            return str(data["text"])
        case "host.proven":
            who = data["identity"]
            return f"{who['hostname']} answers: machine-id {who['machine_id']}, boot {who['boot_id']}"
        case "observation":
            return (
                f"{data['probe']}: "
                + ("known" if data["known"] else f"UNKNOWN: {data['unknown']}")
                + f"  [{', '.join(data['evidence'])}]"
            )
        case "plan":
            return f"plan {data['digest']}: {data['title']}"
        case "gate":
            return f"gate: {data['decision']} {data.get('approver', '')}".rstrip()
        case "act.intent":
            return f"acting ({data['act']}): {data['what']}: {argv_text(data['argv'])}"
        case "act.outcome":
            return f"act {data['act']} came out {data['outcome']} {data.get('note', '')}".rstrip()
        case "decision":
            return f"decision: {_decided(data)} ({data['rung']}): {data['because']}"
        case "measurement":
            problems = "".join(f"\n  problem: {problem}" for problem in data.get("problems") or ())
            return f"measured: {data['title']}{problems}"
        case "applied":
            return f"applied: {data['outcome']}: {data.get('summary', '')}"
        case _:
            return ""


def _evidence_told(data: Mapping[str, Any], excerpts: _Excerpts) -> tuple[str, str]:
    """One command in a line, and what it printed (an excerpt of it, if that is long)."""
    ended = "no exit status" if data["exit_status"] is None else f"exit status {data['exit_status']}"
    head = f"{data['id']} · {argv_text(data['argv'])} · {ended} · {data['duration_s']:.3f} s"
    printed = []
    for stream in ("stdout", "stderr"):
        if data[f"{stream}_file"]:
            excerpt = excerpts.of(data[f"{stream}_file"], SHOWN_IN_NOTEBOOK).rstrip("\n")
            printed.append(excerpt if stream == "stdout" else f"stderr:\n{excerpt}")
    return head, "\n".join(printed) or "(it printed nothing)"


# ------------------------------------------------------------------------------------------------- seal


def seal(run_dir: Path, redactor: Redactor | None = None) -> Path:
    """Close a run's folder for ever and return its final path.

    Looks for secrets once more (a hit puts the folder into quarantine), writes the manifest, takes write permission away, and
    renames ``….partial`` to its final name. Going on after a crash between these steps is safe.

    Raises Sealed, RecordError, DiskFull.
    """
    if not run_dir.name.endswith(PARTIAL):
        raise Sealed(f"{run_dir.name} is sealed already")
    final = run_dir.with_name(run_dir.name.removesuffix(PARTIAL))
    if final.exists():
        raise Sealed(f"{final} exists already; nothing sealed is ever overwritten")
    writer = Writer(run_dir, redactor or Redactor())
    if not writer.sealed:
        _remove_leftovers(run_dir)
        hits = list(_secrets_left(run_dir, writer.redactor))
        if hits:
            raise _quarantined(run_dir, hits)
        manifest = "".join(f"{digest}  {path}\n" for path, digest in sorted(_digests(run_dir)))
        writer.write_text(MANIFEST, manifest, durable=True, clean=False)
    for path in [*run_dir.rglob("*"), run_dir]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    os.rename(run_dir, final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return final


def _remove_leftovers(run_dir: Path) -> None:
    for path in run_dir.rglob(".*"):
        if path.is_file() and (path.name == ".reserve" or ".tmp-" in path.name):
            path.unlink()


def _digests(run_dir: Path) -> Iterator[tuple[str, str]]:
    for path in run_dir.rglob("*"):
        if path.is_symlink():
            raise RecordError(f"{path} is a link; a record holds files only")
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                yield path.relative_to(run_dir).as_posix(), hashlib.file_digest(file, "sha256").hexdigest()


_RENDERED = {"record.json", "record.html", "record.md", "checks.junit.xml", "notebook.ipynb"}


def _secrets_left(run_dir: Path, redactor: Redactor) -> Iterator[Hit]:
    for path in sorted(run_dir.rglob("*")):
        if path.is_file():
            relative = path.relative_to(run_dir).as_posix()
            yield from redactor.scan(relative.encode(), "a file name", rendered=True)
            yield from redactor.scan(read_output(path), relative, rendered=relative in _RENDERED)


def _quarantined(run_dir: Path, hits: Sequence[Hit]) -> RecordError:
    kept = run_dir.with_name(run_dir.name.removesuffix(PARTIAL) + QUARANTINE)
    os.rename(run_dir, kept)
    kept.chmod(0o700)
    told = ", ".join(f"{h.count} × {h.rule} in {h.where}" for h in hits[:5])
    return RecordError(
        f"the record was not sealed: something that looks like a secret is still in it ({told})",
        hint=f"only you can read {kept} now; look, rotate the secret if it is one, then delete the folder",
    )


# ----------------------------------------------------------------------------------------------- keeper


class Keeper:
    """The listener that keeps a run's record up to date: rendered after its steps, sealed when the run closes.

    WHY not after every step at once: rendering is given a tenth of a run's time. What a short step brought is rendered with
    the next word of the run, such as the progress of a long one; the journal has all of it at any time.
    """

    _SHARE = 0.1

    def __init__(self, folder: Path, journal: Journal, writer: Writer) -> None:
        self.folder = folder
        self._journal = journal
        self._writer = writer
        self._events: list[dict[str, Any]] = []
        self._read = 0
        self._stale = False
        self._again_at = 0.0  # of time.monotonic()

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "run.closing":
            self._finish()
            return
        self._stale = self._stale or event in ("run.opened", "step.ended")
        if self._stale and time.monotonic() >= self._again_at:
            began = time.monotonic()
            render(self.folder, writer=self._writer, events=self._so_far())
            self._stale, ended = False, time.monotonic()
            self._again_at = ended + (ended - began) / self._SHARE

    def _so_far(self) -> Sequence[Event]:
        """All events, reading only what was appended since the last time."""
        try:
            with (self.folder / JOURNAL).open("rb") as journal:
                journal.seek(self._read)
                data = journal.read()
        except OSError as error:
            raise RecordError(f"the record of this run cannot be written on: {error.strerror}: {self.folder}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._events += [json.loads(line) for line in whole.splitlines()]
        self._read += len(whole)
        return self._events

    def _finish(self) -> None:
        self.folder = finish(self.folder, self._journal, self._writer)


def finish(folder: Path, journal: Journal, writer: Writer) -> Path:
    """Write the ledger of redactions, close the journal, render everything, and seal. Returns the final folder."""
    ledger = [{"rule": r, "file": f, "count": n} for r, files in writer.redactor.ledger.items() for f, n in files.items()]
    journal.append("redactions", {"ledger": ledger})
    journal.seal()
    render(folder, writer=writer, final=True)
    return seal(folder, writer.redactor)


def parse_record(data: bytes) -> RunRecord:
    """The record of a journal's bytes (for records that were copied elsewhere)."""
    reading = parse_journal(data)
    return from_events(reading.events, reading)

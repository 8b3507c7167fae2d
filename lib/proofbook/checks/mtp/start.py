"""One start of a server, read from the journal of its invocation: how far it came, what it said of itself, why it died."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from proofbook.model import Verdict
from proofbook.probes.journal import JournalEntry
from proofbook.signatures import LogContext, LogLine, SignatureFinding, load
from proofbook.signatures.judge import Judging
from proofbook.signatures.sglang import ServerLog, Start, findings_of

__all__ = ["StartReader", "StartStory"]

_SOURCES = {"kernel": "kernel", "driver": "journald"}
#: Signatures that say that something failed, and not what.
_GENERAL = frozenset(
    {"sglang-scheduler-exception", "python-traceback", "unit-exited", "unit-killed", "unit-failed", "service-error"}
)


@dataclass(frozen=True)
class StartStory:
    """What an invocation's lines tell. ``start`` is None while the server has said nothing that is known."""

    start: Start | None
    findings: tuple[SignatureFinding, ...]
    timeline: tuple[dict[str, Any], ...]  # key, title, from_s, to_s (seconds since the first line; None = not told), detail
    lines: int

    @property
    def cause(self) -> SignatureFinding | None:
        """What explains its end best, where a known line tells it: a fault that is named, before one that only says "failed"."""
        bad = [f for f in self.findings if f.verdict is Verdict.FAIL and f.kind != "gap"]
        named = [f for f in bad if f.signature not in _GENERAL and f.kind == "fault"]
        return next((f for f in (*named, *(f for f in bad if f.root), *bad)), None)


class StartReader:
    """Collects the entries of one invocation, in order, and tells what is new among the milestones."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.entries: list[JournalEntry] = []
        self._told: set[str] = set()

    def add(self, entries: Iterable[JournalEntry]) -> None:
        self.entries += entries

    def news(self, story: StartStory) -> list[str]:
        """A sentence for each milestone that was not told before."""
        if story.start is None:
            return []
        out = []
        for step in story.timeline:
            if step["key"] not in self._told:
                self._told.add(step["key"])
                after = f" after {step['from_s']:.0f} s" if step["from_s"] is not None else ""
                out.append(f"{step['title']}{after}" + (f": {step['detail']}" if step["detail"] else ""))
        return out

    def read(self) -> StartStory:
        """What the entries so far tell."""
        return read_start(self.entries, self.unit)


def read_start(entries: Sequence[JournalEntry], unit: str) -> StartStory:
    """Judge the entries of ONE invocation. What several starts in them would mean nobody knows: the last one counts."""
    reader = ServerLog()
    judging = Judging(load(), LogContext(snippet=True), reader)
    for n, entry in enumerate(entries, start=1):
        judging.feed(line_of(entry, unit, n))
    judgement = judging.finish()
    start = reader.starts[-1] if reader.starts else None
    findings = (*judgement.findings, *findings_of(reader.starts, judgement.findings))
    return StartStory(start, findings, _timeline(start, entries) if start else (), len(entries))


def line_of(entry: JournalEntry, unit: str, n: int) -> LogLine:
    """A journal entry as the judge takes it."""
    source = _SOURCES.get(entry.transport, "systemd" if entry.identifier == "systemd" else "service")
    if entry.identifier == "systemd-journald":
        source = "journald"
    return LogLine(entry.text, entry.monotonic_s, entry.time, unit, entry.boot_id or None, entry.invocation_id or None, source, n)


def _timeline(start: Start, entries: Sequence[JournalEntry]) -> tuple[dict[str, Any], ...]:
    """WHY by the journal's clock: SGLang's own stamps bear no zone and no fraction."""
    first = entries[0].time

    def seconds(line: int) -> float | None:
        return round((entries[line - 1].time - first).total_seconds(), 3) if 0 < line <= len(entries) else None

    steps = sorted(start.milestones.values(), key=lambda m: m.line)
    out = []
    for step in steps:
        began = seconds(step.line)
        length = step.seconds()
        ended = None if began is None or length is None else round(began + length, 3)
        out.append({"key": step.key, "title": step.title, "from_s": began, "to_s": ended, "detail": step.detail})
    return tuple(out)

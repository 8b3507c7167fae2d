"""A triage for a terminal and for a notebook: verdict, findings with causes first, what the log cannot show, what nobody knows,
and how an inference server started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from proofbook.model import Verdict
from proofbook.signatures import Moment, SignatureFinding
from proofbook.signatures.sglang import Start
from proofbook.triage import Triage, moment_text
from proofbook.view import SIGNS, Picture, Shown, duration_text, spans_png, start_chart, table

__all__ = ["configuration", "findings", "gaps", "picture", "rendered", "start_picture", "start_rows", "start_table", "write"]

_STYLE = {Verdict.FAIL: "bold red", Verdict.UNKNOWN: "bold magenta", Verdict.WARN: "bold yellow", Verdict.PASS: "bold green"}
_MOST = 40


def write(said: Triage, console: Console) -> None:
    console.print(rendered(said))


def rendered(said: Triage) -> RenderableType:
    return Group(*_parts(said))


def _parts(said: Triage) -> Iterator[RenderableType]:
    head = Text.assemble((f"{SIGNS[said.verdict]} {said.verdict}", _STYLE[said.verdict]), f"  {said.sentence}")
    yield head
    kinds = ", ".join(said.kinds) or "nothing that is known"
    boots = f", {len(said.boots)} boots" if len(said.boots) > 1 else ""
    yield Text(f"read: {kinds}; {said.lines} lines{boots}", style="dim")
    if len(said.sources) > 1:
        yield Text("; ".join(f"{name} from line {first}" for name, first in said.sources), style="dim")
    if said.findings:
        yield _findings(said.findings)
    for title, lines in (
        ("What this log cannot show", said.not_observable),
        (_unknown_title(said.unknown_lines, len(said.unknown_samples)), said.unknown_samples),
    ):
        if lines:
            yield Text(f"\n{title}", style="bold")
            yield from (Text(f"  – {line}") for line in lines)
    if said.scary:
        words = "lines look bad and are" if said.scary != 1 else "line looks bad and is"
        yield Text(f"\n{said.scary} {words} known to be harmless.", style="dim")
    for n, start in enumerate(said.starts, 1):
        if len(start.milestones) > 1 or start.arguments:
            yield from _start(start, n, len(said.starts))


def _unknown_title(count: int, shown: int) -> str:
    some = f" (the first {shown})" if shown < count else ""
    return f"{count} line{'s' if count != 1 else ''} that nobody knows{some}"


def _findings(findings: tuple[SignatureFinding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), show_edge=False, show_header=False)
    table.add_column(overflow="fold", max_width=30)
    table.add_column(overflow="fold", ratio=1)
    for f in findings[:_MOST]:
        about = f.device or f.unit
        times = f"{'at least ' if f.at_least else ''}{f.count} ×"
        left = Text.assemble((f"{SIGNS[f.verdict]} {f.verdict}", _STYLE[f.verdict]), f"  {times}\n")
        left.append(f"{'└ ' if f.caused_by else ''}{f.signature}", style="bold")
        left.append(f"\n{about}" if about else "")
        right = Text(f.reason.removeprefix(f"{about}: "))
        when = moment_text(f.first) if f.first.n else ""
        right.append(f"  {when}{f' … {moment_text(f.last)}' if f.last.n != f.first.n else ''}", style="dim")
        if f.lines:
            right.append(f"\n{f.lines[0].strip()[:240]}", style="dim italic")
        if f.action != "none" and not (f.caused_by and f.verdict is not Verdict.FAIL):
            right.append("\ndo: ", style="bold")
            right.append(f"{f.what_to_do} ({f.action})" if f.what_to_do else str(f.action))
        table.add_row(left, right)
    if len(findings) > _MOST:
        table.add_row("", f"… and {len(findings) - _MOST} more; the JSON output has all of them")
    return table


def start_rows(start: Start) -> list[tuple[str, str, str, str]]:
    """Milestones as rows: step, when after the first one, how long it took, what is said of it."""
    steps = sorted(start.milestones.values(), key=lambda m: m.line)
    times = [m.begun for m in steps if m.begun]
    origin = min(times) if times else None
    rows = []
    for m in steps:
        after = f"+{duration_text((m.begun - origin).total_seconds())}" if origin and m.begun and m.begun != origin else ""
        took = duration_text(m.seconds()) if m.seconds() else ""
        ranks = f"{len(m.ranks)} rank{'s' if len(m.ranks) != 1 else ''}" if m.ranks else ""
        rows.append((m.title, after or ("start" if m.begun else "–"), took, "; ".join(x for x in (m.detail, ranks) if x)))
    return rows


def _start(start: Start, n: int, of: int) -> Iterator[RenderableType]:
    number = f" {n} of {of}" if of > 1 else ""
    state = "" if start.ready or start.acceptance.lines else ", not ready in this log"
    yield Text(f"\nSGLang start{number} (line {start.line}){state}", style="bold")
    steps = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for column in ("step", "after", "took", ""):
        steps.add_column(column)
    for row in start_rows(start):
        steps.add_row(*(escape(x) for x in row))
    yield steps
    effective = start.effective()
    if effective:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, title_justify="left")
        table.add_column("effective configuration")
        table.add_column("")
        for name, value in effective:
            table.add_row(escape(name), escape(value))
        yield Text("")
        yield table


# ------------------------------------------------------------------------------------------------ in a notebook


def findings(said: Triage) -> Shown:
    """The findings as a table, causes first."""
    rows = [
        (
            f"{SIGNS[f.verdict]} {f.verdict}",
            f"{'└ ' if f.caused_by else ''}{f.signature}",
            f.device or f.unit,
            f"{'at least ' if f.at_least else ''}{f.count}",
            f.reason.removeprefix(f"{f.device or f.unit}: "),
            f.what_to_do or f.action.value,
        )
        for f in said.findings
    ]
    columns = ("verdict", "signature", "about", "lines", "what it means", "what to do")
    return table(
        columns, rows, title=f"{SIGNS[said.verdict]} {said.verdict}: {said.sentence}", note=f"read: {', '.join(said.kinds)}"
    )


def gaps(said: Triage) -> Shown:
    """What the log cannot show, and lines that nobody knows."""
    rows = [("cannot be seen", x) for x in said.not_observable] + [("nobody knows", x) for x in said.unknown_samples]
    return table(("kind", "what"), rows or [("", "nothing is left open")], title="What this log does not tell")


def picture(said: Triage) -> Picture:
    """The findings over time: UTC or seconds since the boot where all of them have it, else the lines of the log."""
    shown = [f for f in said.findings if f.first.n]
    axis, place = _axis(shown)
    spans = [
        {
            "title": f"{'└ ' if f.caused_by else ''}{f.signature}{f' {f.device}' if f.device else ''}",
            "start": place(f.first),
            "end": place(f.last),
            "note": f"{'≥ ' if f.at_least else ''}{f.count}",
            "verdict": f.verdict.value,
        }
        for f in shown
    ]
    words = [f"{s['title']}: {s['start']:g} to {s['end']:g} ({s['note']})" for s in spans]
    return Picture(spans_png(spans, axis=axis, title=said.sentence), "\n".join([axis, *words]))


def _axis(shown: list[SignatureFinding]) -> tuple[str, Callable[[Moment], float]]:
    moments = [m for f in shown for m in (f.first, f.last)]
    times = [m.time for m in moments if m.time is not None]
    if times and len(times) == len(moments):
        origin = min(times)
        return f"seconds since {origin:%Y-%m-%d %H:%M:%S} UTC", lambda m: (m.time - origin).total_seconds() if m.time else 0.0
    if moments and all(m.monotonic_s is not None for m in moments):
        return "seconds since the boot", lambda m: m.monotonic_s or 0.0
    return "line of the log", lambda m: float(m.n)


def start_table(start: Start) -> Shown:
    """The milestones of a server's start."""
    return table(
        ("step", "after", "took", "detail"), start_rows(start), title=f"SGLang start{'' if start.ready else ', not ready'}"
    )


def configuration(start: Start) -> Shown:
    """With what the server really runs."""
    return table(("effective configuration", "value"), start.effective())


def start_picture(start: Start) -> Picture:
    """The milestones over time."""
    return start_chart(start)

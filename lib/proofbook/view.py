"""Values as tables and pictures: HTML that survives offline, untrusted and for years, and the same as text.

A notebook front end strips ``<style>`` and scripts from untrusted output, so colours are inline; and no meaning hangs on a
colour: every verdict is written out, with its own sign. pandas and matplotlib are imported only inside the functions that
need them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from proofbook.journal import plain
from proofbook.model import Finding, Plan, Verdict, worst

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from proofbook.signatures.sglang import Start

__all__ = [
    "SIGNS",
    "VERDICTS",
    "Picture",
    "Shown",
    "accept_chart",
    "before_after_html",
    "card",
    "duration_text",
    "findings_frame",
    "findings_html",
    "findings_text",
    "gain_chart",
    "plan_html",
    "plan_text",
    "shown",
    "spans_png",
    "start_chart",
    "table",
    "table_html",
    "table_text",
    "timeline_png",
    "worst_first",
]

#: Worst first; NOT_CHECKED stands before PASS, since a reader must not miss it.
VERDICTS = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN, Verdict.NOT_CHECKED, Verdict.PASS)

#: One sign per verdict, so that a record in black and white still tells them apart.
SIGNS = {Verdict.FAIL: "✗", Verdict.UNKNOWN: "?", Verdict.WARN: "!", Verdict.NOT_CHECKED: "–", Verdict.PASS: "✓"}

#: Badge colours with a contrast of at least 4.5:1 against white text, and apart for colour-blind readers.
_COLOURS = {
    Verdict.FAIL: "#b42318",
    Verdict.UNKNOWN: "#6941c6",
    Verdict.WARN: "#8a5a00",
    Verdict.NOT_CHECKED: "#545d69",
    Verdict.PASS: "#0b6e4f",
}

#: So many passes stand in the open; more are folded away, so that what is no pass, and the verdict, stay in sight.
_OPEN_PASSES = 5

_CELL = "padding:4px 10px 4px 0;vertical-align:top;text-align:left"
_MUTED = "opacity:.75"


class Shown:
    """What a cell shows: HTML for a notebook, and the same as text for whoever shows no HTML."""

    def __init__(self, html: str, text: str) -> None:
        self._html = str(html)
        self._text = text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class Picture:
    """A PNG, and in words (``alt``) what is on it."""

    def __init__(self, png: bytes, text: str) -> None:
        self.png = png
        self.alt = text

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return self.alt


def worst_first(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Findings as mappings, worst verdict first, otherwise in their order."""
    return sorted(findings, key=lambda f: VERDICTS.index(Verdict(f["verdict"])))


def shown(value: Any) -> str:
    """A JSON value as a person writes it: ``–`` for nothing, ``yes``/``no``, lists with commas, numbers without noise."""
    if value is None or value == "" or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(v) for v in value)
    return str(value)


def duration_text(seconds: float | None) -> str:
    """``21 ms``, ``2.4 s``, ``38 s``, ``3 min 12 s``, ``2 h 5 min``."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# ------------------------------------------------------------------------------------------------- HTML


def _badge(verdict: Verdict) -> Markup:
    return Markup(
        '<span style="display:inline-block;background-color:{};color:#ffffff;font-weight:600;padding:1px 8px;border-radius:9px;'
        'white-space:nowrap">{} {}</span>'
    ).format(_COLOURS[verdict], SIGNS[verdict], verdict.value.replace("_", " "))


def _as_dicts(findings: Iterable[Finding | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [f if isinstance(f, Mapping) else plain(f) for f in findings]


def findings_html(findings: Iterable[Finding | Mapping[str, Any]]) -> str:
    """A table of findings, worst first, with the overall verdict above. Passes come last, folded away when they are many."""
    found = worst_first(_as_dicts(findings))
    overall = worst(Verdict(f["verdict"]) for f in found)
    counts = [f"{n} {v.value.replace('_', ' ')}" for v in VERDICTS if (n := sum(f["verdict"] == v for f in found))]
    head = Markup('<div style="margin:2px 0 6px">{} <span style="{}">{}</span></div>').format(
        _badge(overall), _MUTED, ", ".join(counts) or "nothing was checked: that is no pass"
    )
    passed = [f for f in found if f["verdict"] == Verdict.PASS]
    folded = passed if len(passed) > _OPEN_PASSES else []
    table = _findings_table([f for f in found if f not in folded])
    if folded:
        table += Markup('<details><summary style="cursor:pointer">{} {} PASS</summary>{}</details>').format(
            "and" if len(folded) < len(found) else "all", len(folded), _findings_table(folded)
        )
    return str(head + table)


def _findings_table(findings: Sequence[Mapping[str, Any]]) -> Markup:
    if not findings:
        return Markup("")
    return Markup(
        '<table style="border-collapse:collapse;text-align:left"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
    ).format(
        Markup("").join(
            Markup('<th scope="col" style="{}">{}</th>').format(_CELL, c) for c in ("verdict", "about", "what was found")
        ),
        Markup("").join(_finding_row(f) for f in findings),
    )


def _finding_row(finding: Mapping[str, Any]) -> Markup:
    more = Markup("")
    if finding.get("what_to_do"):
        more += Markup("<div><b>Do next:</b> {}</div>").format(finding["what_to_do"])
    if finding.get("lines"):
        more += Markup('<pre style="margin:4px 0;white-space:pre-wrap">{}</pre>').format("\n".join(finding["lines"][:5]))
    about = Markup("{}<br><span style='{}'>{}</span>").format(finding["check"], _MUTED, finding.get("subject") or "")
    return Markup('<tr><td style="{c}">{}</td><td style="{c}">{}</td><td style="{c}">{}{}</td></tr>').format(
        _badge(Verdict(finding["verdict"])), about, finding["reason"], more, c=_CELL
    )


def table_html(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", note: str = "") -> str:
    """Any table, escaped; ``title`` becomes its caption and ``note`` stands below."""
    caption = (
        Markup('<caption style="text-align:left;font-weight:600;caption-side:top">{}</caption>').format(title)
        if title
        else Markup("")
    )
    head = Markup("").join(Markup('<th scope="col" style="{}">{}</th>').format(_CELL, c) for c in columns)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup('<td style="{}">{}</td>').format(_CELL, shown(v)) for v in row))
        for row in rows
    )
    below = Markup('<div style="{}">{}</div>').format(_MUTED, note) if note else Markup("")
    return str(
        Markup(
            '<table style="border-collapse:collapse;text-align:left">{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}'
        ).format(caption, head, body, below)
    )


def before_after_html(before: Mapping[str, Any], after: Mapping[str, Any], *, title: str = "Before and after") -> str:
    """Two mappings side by side: what changed first, each row saying in words whether it changed."""
    names = list(dict.fromkeys([*before, *after]))
    rows = [(n, before.get(n), after.get(n), "same" if before.get(n) == after.get(n) else "CHANGED") for n in names]
    rows.sort(key=lambda row: row[3] == "same")
    return table_html(("what", "before", "after", "changed?"), rows, title=title)


def plan_html(plan: Plan) -> str:
    """A plan as it has to be read before it is approved: what happens, where, what it costs, what cannot be undone."""

    def listed(items: Sequence[Markup | str], empty: str) -> Markup:
        if not items:
            return Markup("<i>{}</i>").format(empty)
        return Markup('<ul style="margin:0;padding-left:18px">{}</ul>').format(
            Markup("").join(Markup("<li>{}</li>").format(i) for i in items)
        )

    no_way_back = "nothing takes it back" if plan.cannot_undo else "nothing to take back"

    def action(what: str, argv: Sequence[str]) -> Markup:
        return Markup("{} <code>{}</code>").format(what, " ".join(argv)) if argv else Markup(escape(what))

    rows = [
        ("Would do", listed([action(a.what, a.argv) for a in plan.actions], "nothing: it is already as wanted")),
        (
            "On",
            Markup("<b>{}</b> ({}), machine-id <code>{}</code>").format(plan.host.hostname, plan.host.name, plan.host.machine_id),
        ),
        ("Now there", listed(plan.facts, "nothing was said about it")),
        ("Cannot be undone", listed(plan.cannot_undo, "all of it can be undone")),
        (
            "Taken back by",
            listed([action(a.what, a.argv) for a in plan.undo], no_way_back),
        ),
        ("Expected time", Markup(escape(duration_text(plan.expected_s)))),
        ("Digest", Markup("<code>{}</code>").format(plan.digest)),
    ]
    diff = (
        Markup('<pre style="margin:6px 0;white-space:pre-wrap">{}</pre>').format(plan.diff) if plan.diff.strip() else Markup("")
    )
    body = Markup("").join(
        Markup('<tr><th scope="row" style="{c};white-space:nowrap">{}</th><td style="{c}">{}</td></tr>').format(n, v, c=_CELL)
        for n, v in rows
    )
    return str(
        Markup(
            '<div style="font-weight:600;margin:2px 0 4px">{}</div>'
            '<table style="border-collapse:collapse;text-align:left">{}</table>{}'
        ).format(plan.title, body, diff)
    )


def card(record: Mapping[str, Any], where: str = "") -> Shown:
    """A whole record at a glance, from :meth:`proofbook.record.RunRecord.as_json`: how it came out, what was not verified
    (before anything that was), and ``where`` it is."""
    verdict = Verdict(record["verdict"])
    counts = ", ".join(f"{n} {v.replace('_', ' ')}" for v, n in record["counts"].items()) or "nothing was checked"
    facts = (
        ("Run", f"{record['run_id']} ({record['title'] or record['runbook']} on {record['host']})"),
        ("Status", f"{record['status']}, exit code {record['exit_code']}, {counts}"),
        ("In words", record["summary"]),
        *((("Record", where),) if where else ()),
    )
    unverified = [f"{n['what']}: {n['why']}" for n in record["not_verified"]]
    not_verified = (
        Markup('<ul style="margin:0;padding-left:18px">{}</ul>').format(
            Markup("").join(Markup("<li>{}</li>").format(line) for line in unverified)
        )
        if unverified
        else Markup("<i>nothing was left out</i>")
    )
    rows = [("Not verified", not_verified), *((name, Markup(escape(value))) for name, value in facts)]
    html = Markup(
        '<div style="margin:2px 0 6px">{} <b>{}</b></div><table style="border-collapse:collapse;text-align:left">{}</table>'
    )
    body = Markup("").join(
        Markup('<tr><th scope="row" style="{c};white-space:nowrap">{}</th><td style="{c}">{}</td></tr>').format(n, v, c=_CELL)
        for n, v in rows
    )
    text = [f"{SIGNS[verdict]} {record['headline']}", *_labelled("not verified", unverified or ["nothing was left out"])]
    for name, value in facts:
        text += _labelled(name.lower(), [value])
    return Shown(html.format(_badge(verdict), record["headline"], body), "\n".join(text))


def _labelled(label: str, items: Sequence[str]) -> list[str]:
    """Items as wrapped lines, the label before the first of them."""
    lines = []
    for number, item in enumerate(items):
        head = f"  {label if number == 0 else '':<13} "
        lines.append(textwrap.fill(item, 110, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False))
    return lines


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", note: str = "") -> Shown:
    """Any table, to be shown in a cell."""
    return Shown(table_html(columns, rows, title=title, note=note), table_text(columns, rows, title=title, note=note))


# ------------------------------------------------------------------------------------------------- text


def table_text(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", note: str = "", widest: int = 52
) -> str:
    """The same as text: columns in line, long cells wrapped at ``widest`` characters."""
    cells = [[textwrap.wrap(shown(v), widest) or [""] for v in row] for row in [columns, *rows]]
    widths = [max((len(line) for row in cells for line in row[i]), default=0) for i in range(len(columns))]
    lines = [title] if title else []
    for number, row in enumerate(cells):
        for line in range(max(len(cell) for cell in row)):
            parts = [f"{cell[line] if line < len(cell) else '':<{width}}" for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join([*lines, note] if note else lines)


def findings_text(findings: Iterable[Finding | Mapping[str, Any]]) -> str:
    """The same as text, for terminals and plain outputs; at most 110 columns."""
    found = worst_first(_as_dicts(findings))
    if not found:
        return "UNKNOWN: nothing was checked, and nothing is no pass"
    lines = []
    for f in found:
        label = f"{SIGNS[Verdict(f['verdict'])]} {f['verdict'].replace('_', ' '):<11} "
        about = f"{f['subject']}: " if f.get("subject") else ""
        lines.append(textwrap.fill(about + f["reason"], 110, initial_indent=label, subsequent_indent=" " * len(label)))
        if f.get("what_to_do"):
            lines.append(textwrap.fill("do next: " + f["what_to_do"], 110, initial_indent=" " * 14, subsequent_indent=" " * 14))
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """A plan as text."""
    lines = [f"{plan.title} on {plan.host.hostname} ({plan.host.name}), machine-id {plan.host.machine_id}"]
    lines += [f"  would do:         {a.what}" + (f"  [{' '.join(a.argv)}]" if a.argv else "") for a in plan.actions] or [
        "  nothing to do"
    ]
    lines += [f"  now there:        {fact}" for fact in plan.facts]
    lines += [f"  cannot be undone: {text}" for text in plan.cannot_undo]
    lines += [f"  taken back by:    {a.what}" + (f"  [{' '.join(a.argv)}]" if a.argv else "") for a in plan.undo]
    lines += [f"  expected time:    {duration_text(plan.expected_s)}", f"  digest:           {plan.digest}"]
    if plan.diff.strip():
        lines += ["", textwrap.indent(plan.diff.rstrip(), "  ")]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- frames and pictures


def findings_frame(findings: Iterable[Finding | Mapping[str, Any]]) -> pandas.DataFrame:
    """Findings as a pandas DataFrame (one row each, worst first), for investigations over many runs."""
    import pandas as pd

    columns = ["verdict", "check", "subject", "reason", "action", "what_to_do", "count", "signature", "look"]
    return pd.DataFrame([{c: f.get(c) for c in columns} for f in worst_first(_as_dicts(findings))], columns=columns)


def timeline_png(steps: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """A picture of a run's steps over time (PNG). ``steps`` have ``title``, ``started_at`` (ISO), ``duration_s``, ``outcome``."""
    import io

    from matplotlib.figure import Figure

    drawn = [s for s in steps if s.get("duration_s") is not None]
    figure = Figure(figsize=(8, 0.6 + 0.35 * max(len(drawn), 1)), layout="constrained")
    axes = figure.subplots()
    if drawn:
        start = datetime.fromisoformat(drawn[0]["started_at"])
        for row, step in enumerate(drawn):
            left = (datetime.fromisoformat(step["started_at"]) - start).total_seconds() / 60
            width = max(step["duration_s"] / 60, 0.01)
            good = step["outcome"] == "ok"
            colour = _COLOURS[Verdict.PASS if good else Verdict.FAIL]
            axes.barh(row, width, left=left, color=colour, hatch="" if good else "//")
            axes.text(
                left + width,
                row,
                f" {duration_text(step['duration_s'])}{'' if good else ' · ' + step['outcome']}",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(drawn)), [textwrap.shorten(s["title"], 46) for s in drawn], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.2)
    axes.set_xlabel("minutes since the first step")
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def spans_png(spans: Sequence[Mapping[str, Any]], *, axis: str, title: str = "") -> bytes:
    """A picture of when things were so (PNG), one row each, in the order given.

    ``spans`` have ``title``, ``start`` and ``end`` (numbers on the ``axis``), ``note``, and a ``verdict`` or none. A span of no
    length is a mark. The verdict is written beside each row too: no meaning hangs on a colour.
    """
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.35 * max(len(spans), 1)), layout="constrained")
    axes = figure.subplots()
    for row, span in enumerate(spans):
        verdict = Verdict(span["verdict"]) if span.get("verdict") else None
        colour = _COLOURS[verdict] if verdict else "#3b5b8c"
        axes.plot([span["start"], span["end"]], [row, row], color=colour, linewidth=6, solid_capstyle="butt")
        axes.plot([span["start"]], [row], marker="D", color=colour, markersize=6)
        said = f"{SIGNS[verdict]} {span.get('note', '')}" if verdict else span.get("note", "")
        axes.annotate(said, (span["end"], row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(spans)), [textwrap.shorten(str(s["title"]), 46) for s in spans], fontsize=8)
    axes.set_ylim(len(spans) - 0.4, -0.6)
    axes.margins(x=0.25)
    axes.set_xlabel(axis)
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


# ------------------------------------------------------------------------------------------- pictures of measurements

#: How a level came out: colour, marker and words. The marker and the words say it without the colour.
_OUTCOMES = {
    "gain": ("#0b6e4f", "^", "gain"),
    "loss": ("#b42318", "v", "loss"),
    "none-shown": ("#545d69", "D", "no gain shown"),
}

#: Words beside a mark, readable where they cross a line.
_BESIDE: dict[str, Any] = {
    "textcoords": "offset points",
    "fontsize": 8,
    "zorder": 1.5,  # over lines, under marks
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
}

#: Below the first a draft is broken, up to the second doubtful.
_ACCEPT_MARKS = ((1.2, "broken"), (1.5, "doubtful"))


def gain_chart(gain: Mapping[str, Any], *, title: str = "How much faster each request became") -> Picture:
    """Gain per concurrency level with its 95 % interval, and each prompt as a faint ring.

    ``gain`` is ``Measurement.value`` of a gain: its ``levels`` have ``level``, ``speedup`` ({estimate, low, high} or None),
    ``verdict``, ``ratios``, ``pairs`` and ``skipped``. A level without an interval stands there with its reason.
    """
    figure, axes = _canvas(8, 4)
    words = []
    for place, level in enumerate(gain["levels"]):
        said = _level_words(level)
        label = "\n".join(textwrap.fill(part, 22) for part in said)
        words.append(f"concurrency {level['level']}: {', '.join(said)}")
        percents = [(ratio - 1) * 100 for ratio in level["ratios"].values()]
        if level["speedup"] is None:
            axes.annotate(label, (place, 0), xytext=(0, 6), ha="center", va="bottom", style="italic", **_BESIDE)
            continue
        axes.plot([place - 0.12] * len(percents), percents, "o", mfc="none", mec="#7a8699", ms=4, mew=0.8, alpha=0.7)
        colour, marker, _ = _OUTCOMES[level["verdict"]]
        estimate, low, high = ((level["speedup"][name] - 1) * 100 for name in ("estimate", "low", "high"))
        reach = [[max(0, estimate - low)], [max(0, high - estimate)]]
        axes.errorbar([place], [estimate], reach, fmt=marker, color=colour, ms=9, capsize=5, lw=2)
        axes.annotate(label, (place, estimate), xytext=(12, 0), va="center", **_BESIDE)
    axes.axhline(0, color="black", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(gain["levels"])), [str(level["level"]) for level in gain["levels"]])
    axes.set_xlim(-0.5, max(len(gain["levels"]), 1) - 0.2)
    axes.margins(y=0.15)
    axes.set_xlabel("requests in flight   (rings: each prompt; bars: 95 % interval of the median)")
    axes.set_ylabel("tokens a second for each request,\nchange in %")
    axes.set_title(title, fontsize=10, loc="left")
    return Picture(_png(figure), "\n".join([title, *words]))


def _level_words(level: Mapping[str, Any]) -> tuple[str, ...]:
    if level["speedup"] is None:
        return "not measured", level["skipped"] or _why_no_interval(level)
    estimate, low, high = ((level["speedup"][name] - 1) * 100 for name in ("estimate", "low", "high"))
    return _OUTCOMES[level["verdict"]][2], f"{estimate:+.0f} % ({low:+.0f} to {high:+.0f})", f"{level['pairs']} pairs"


def _why_no_interval(level: Mapping[str, Any]) -> str:
    return "requests were lost" if not level["complete"] else f"{level['pairs']} pairs only"


def accept_chart(control: Mapping[str, Any], *, title: str = "How many tokens each verify step gave") -> Picture:
    """Accept length by case of the control prompts: each request a ring, the median a bar.

    ``control`` is ``Measurement.value`` of the control prompts: its ``cases`` have ``title``, ``accept_length``, ``requests``
    and ``skipped``; ``steps_plus_one`` is the most that a step can give.
    """
    cases = control["cases"]
    figure, axes = _canvas(8, 1.3 + 0.45 * max(len(cases), 1))
    most = control["steps_plus_one"]
    words = [f"at most {most}: draft steps plus one"] if most else []
    for row, case in enumerate(cases):
        length = case["accept_length"]
        said = _accept_words(case)
        words.append(f"{case['title']}: {said}")
        if length is not None:
            axes.barh(row, length, height=0.5, color="#9db4d6", edgecolor="#27477a", zorder=0.5)
            rings = [r["accept_length"] for r in case["requests"] if r["accept_length"] is not None]
            axes.plot(rings, [row] * len(rings), "o", mfc="white", mec="#27477a", ms=5, zorder=2)
            axes.annotate(said, (max([length, *rings]), row), xytext=(8, 0), va="center", **_BESIDE)
        else:
            axes.annotate(said, (0, row), xytext=(8, 0), va="center", style="italic", **_BESIDE)
    _accept_marks(axes, most)
    axes.set_yticks(range(len(cases)), [textwrap.fill(case["title"], 34) for case in cases], fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    longest = max((c["accept_length"] for c in cases if c["accept_length"] is not None), default=2.0)
    axes.set_xlim(0, max(most or 0, longest, 2.0) * 1.2)
    axes.set_xlabel("accept length: tokens for each verify step   (rings: each request; bar: median)")
    axes.set_title(title, fontsize=10, loc="left", pad=18)
    return Picture(_png(figure), "\n".join([title, *words]))


def _accept_words(case: Mapping[str, Any]) -> str:
    if case["accept_length"] is not None:
        return f"{case['accept_length']:.2f}"
    return "not asked" if case["skipped"] else "no answer" if not case["completed"] else "no verify step counted"


def _accept_marks(axes: Axes, most: int | None) -> None:
    marks = [(at, f"{word} below {at:g}", ":", "right" if at < 1.3 else "left") for at, word in _ACCEPT_MARKS]
    marks += [(float(most), f"most: {most}", "--", "center")] if most else []
    for at, said, style, side in marks:
        axes.axvline(at, color="black", linewidth=0.8, linestyle=style, zorder=1)
        axes.annotate(
            said, (at, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points", ha=side, fontsize=7
        )


def start_chart(start: Start, *, title: str = "How the server started") -> Picture:
    """The milestones of a server's start over time, from the server's own log times."""
    steps = [m for m in sorted(start.milestones.values(), key=lambda m: m.line) if m.begun]
    origin = min((m.begun for m in steps if m.begun), default=None)
    spans = [
        {
            "title": m.title,
            "start": (m.begun - origin).total_seconds(),
            "end": ((m.ended or m.begun) - origin).total_seconds(),
            "note": m.detail,
        }
        for m in steps
        if m.begun and origin
    ]
    words = [f"{s['title']}: {s['start']:g} to {s['end']:g} s" for s in spans]
    return Picture(spans_png(spans, axis="seconds since the first step", title=title), "\n".join(words))


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()

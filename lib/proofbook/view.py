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
from proofbook.visible import capped, short_digests, visible

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
    "boots_over_time",
    "capacity_chart",
    "card",
    "compared_accepts",
    "compared_gains",
    "compared_starts",
    "duration_text",
    "faults_over_time",
    "findings_frame",
    "findings_html",
    "findings_text",
    "gain_chart",
    "p2p_pairs_chart",
    "p2p_speed_chart",
    "pair_figures_chart",
    "pairs_over_runs",
    "plan_html",
    "plan_text",
    "shown",
    "spans_png",
    "start_chart",
    "table",
    "table_html",
    "table_text",
    "timeline_png",
    "types_by_boot",
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
        self._html = visible(str(html))
        self._text = visible(text)

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
    return visible(str(head + table))


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
        more += Markup("<div><b>Do next:</b> {}</div>").format(capped(finding["what_to_do"]))
    if finding.get("lines"):
        lines = "\n".join(map(capped, finding["lines"][:5]))
        more += Markup('<pre style="margin:4px 0;white-space:pre-wrap">{}</pre>').format(lines)
    about = Markup("{}<br><span style='{}'>{}</span>").format(finding["check"], _MUTED, finding.get("subject") or "")
    return Markup('<tr><td style="{c}">{}</td><td style="{c}">{}</td><td style="{c}">{}{}</td></tr>').format(
        _badge(Verdict(finding["verdict"])), about, capped(finding["reason"]), more, c=_CELL
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
    return visible(
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
        told, words = short_digests(what), short_digests(" ".join(argv))
        return Markup("{} <code>{}</code>").format(told, words) if argv else Markup(escape(told))

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
    return visible(
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
    unverified = [capped(f"{n['what']}: {n['why']}") for n in record["not_verified"]]
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
    return visible("\n".join([*lines, note] if note else lines))


def findings_text(findings: Iterable[Finding | Mapping[str, Any]]) -> str:
    """The same as text, for terminals and plain outputs; at most 110 columns."""
    found = worst_first(_as_dicts(findings))
    if not found:
        return "UNKNOWN: nothing was checked, and nothing is no pass"
    lines = []
    for f in found:
        label = f"{SIGNS[Verdict(f['verdict'])]} {f['verdict'].replace('_', ' '):<11} "
        about = f"{f['subject']}: " if f.get("subject") else ""
        lines.append(textwrap.fill(capped(about + f["reason"]), 110, initial_indent=label, subsequent_indent=" " * len(label)))
        if f.get("what_to_do"):
            lines.append(
                textwrap.fill(capped("do next: " + f["what_to_do"]), 110, initial_indent=" " * 14, subsequent_indent=" " * 14)
            )
    return visible("\n".join(lines))


def plan_text(plan: Plan) -> str:
    """A plan as text."""
    lines = [f"{plan.title} on {plan.host.hostname} ({plan.host.name}), machine-id {plan.host.machine_id}"]
    lines += [
        short_digests(f"  would do:         {a.what}" + (f"  [{' '.join(a.argv)}]" if a.argv else "")) for a in plan.actions
    ] or ["  nothing to do"]
    lines += [f"  now there:        {fact}" for fact in plan.facts]
    lines += [f"  cannot be undone: {text}" for text in plan.cannot_undo]
    lines += [short_digests(f"  taken back by:    {a.what}" + (f"  [{' '.join(a.argv)}]" if a.argv else "")) for a in plan.undo]
    lines += [f"  expected time:    {duration_text(plan.expected_s)}", f"  digest:           {plan.digest}"]
    if plan.diff.strip():
        lines += ["", textwrap.indent(plan.diff.rstrip(), "  ")]
    return visible("\n".join(lines))


# ----------------------------------------------------------------------------------- frames and pictures


def findings_frame(findings: Iterable[Finding | Mapping[str, Any]]) -> pandas.DataFrame:
    """Findings as a pandas DataFrame (one row each, worst first), for investigations over many runs."""
    import pandas as pd

    columns = ["verdict", "check", "subject", "reason", "action", "what_to_do", "count", "signature", "look"]
    return pd.DataFrame([{c: f.get(c) for c in columns} for f in worst_first(_as_dicts(findings))], columns=columns)


def timeline_png(steps: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """A picture of a run's steps over time (PNG). ``steps`` have ``title``, ``started_at`` (ISO), ``duration_s``, ``outcome``."""
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
    return _png(figure)


def spans_png(spans: Sequence[Mapping[str, Any]], *, axis: str, title: str = "") -> bytes:
    """A picture of when things were so (PNG), one row each, in the order given.

    ``spans`` have ``title``, ``start`` and ``end`` (numbers on the ``axis``), ``note``, and a ``verdict`` or none. A span of no
    length is a mark. The verdict is written beside each row too: no meaning hangs on a colour.
    """
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
    return _png(figure)


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
    words = _draw_gain(axes, gain)
    axes.set_xlabel("requests in flight   (rings: each prompt; bars: 95 % interval of the median)")
    axes.set_ylabel("tokens a second for each request,\nchange in %")
    axes.set_title(title, fontsize=10, loc="left")
    return Picture(_png(figure), "\n".join([title, *words]))


def _draw_gain(axes: Axes, gain: Mapping[str, Any], *, brief: bool = False) -> list[str]:
    """The levels of one gain, and the same in words. ``brief``: beside each mark only the numbers."""
    words = []
    for place, level in enumerate(gain["levels"]):
        said = _level_words(level)
        beside = said[1].split(" (") if brief and level["speedup"] is not None else said
        label = "\n".join(textwrap.fill(part.rstrip(")"), 22) if brief else textwrap.fill(part, 22) for part in beside)
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
    return words


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


# ------------------------------------------------------------------------------------- the same of several runs, side by side

#: One mark and one colour for each run of a comparison; the mark says it without the colour.
_RUN_MARKS = (("o", "#27477a"), ("s", "#b05a00"), ("^", "#0b6e4f"), ("D", "#6941c6"), ("v", "#545d69"), ("P", "#8a1f3d"))


def compared_gains(runs: Sequence[tuple[str, Mapping[str, Any] | None, str]], *, title: str = "") -> Picture:
    """Gain per concurrency, one panel a run on one scale. ``runs`` are (name, value of the gain or None, why it is None)."""
    title = title or "How much faster each request became, run by run"
    measured = [(name, gain) for name, gain, _ in runs if gain is not None]
    without = [f"{name}: not measured, {why}" for name, gain, why in runs if gain is None]
    figure, panels = _panels(len(measured), 3.9, 3.6, share_x=False)
    words = [title]
    for axes, (name, gain) in zip(panels, measured, strict=False):
        axes.set_title(textwrap.fill(name, 44), fontsize=8, loc="left")
        words += [f"{name}, {line}" for line in _draw_gain(axes, gain, brief=True)]
        axes.set_xlabel("requests in flight", fontsize=8)
    panels[0].set_ylabel("tokens a second for each request,\nchange in %", fontsize=8)
    below = "\n".join(textwrap.fill(line, 150) for line in without)
    figure.supxlabel(below, fontsize=8, x=0.01, ha="left", style="italic")
    figure.suptitle(f"{title}\n(rings: each prompt; bars: 95 % interval of the median)", fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join([*words, *without]))


def compared_accepts(runs: Sequence[tuple[str, Mapping[str, Any]]], *, title: str = "") -> Picture:
    """Accept length by case, a mark for each run. ``runs`` are (name, value of the control prompts)."""
    title = title or "How many tokens each verify step gave, run by run"
    titles: dict[str, list[str]] = {}
    for case in (case for _, control in runs for case in control["cases"]):
        titles.setdefault(case["case"], []).append(case["title"])
    names = list(titles)
    figure, axes = _canvas(8.5, 1.7 + 0.55 * max(len(names), 1))
    words = [title]
    for number, (run, control) in enumerate(runs):
        marker, colour = _RUN_MARKS[number % len(_RUN_MARKS)]
        shift = (number - (len(runs) - 1) / 2) * 0.26
        lengths = {case["case"]: case["accept_length"] for case in control["cases"]}
        words += [f"{run}, {case['title']}: {_accept_words(case)}" for case in control["cases"]]
        drawn = [(name, length) for name, length in lengths.items() if length is not None]
        rows = [names.index(name) + shift for name, _ in drawn]
        axes.plot([length for _, length in drawn], rows, marker, color=colour, ms=6, ls="none", label=run)
        for (_, length), row in zip(drawn, rows, strict=True):
            axes.annotate(f"{length:.2f}", (length, row), xytext=(7, 0), va="center", **_BESIDE)
    most = max((control["steps_plus_one"] or 0 for _, control in runs), default=0)
    _accept_marks(axes, most or None)
    # WHY: the burst's size follows from what a server runs at once, so its title differs from run to run.
    labels = [textwrap.fill(" / ".join(dict.fromkeys(titles[name])), 34) for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(most, 2.0) * 1.2)
    axes.set_xlabel("accept length: tokens for each verify step, median of a case")
    axes.set_title(title, fontsize=10, loc="left", pad=18)
    if runs:
        figure.legend(loc="outside lower left", fontsize=8, ncols=1, frameon=False)
    return Picture(_png(figure), "\n".join(words))


def compared_starts(starts: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], *, title: str = "") -> Picture:
    """Milestones of several starts, one panel each on one scale.

    ``starts`` are (name, steps); a step has ``title``, ``from_s`` and ``to_s`` (seconds since the start's first line, or None).
    What comes long after ``ready``, as the first request of a server that idled for days, is at the edge and says so: it is no
    part of the start, and would squeeze all of it into a line.
    """
    title = title or "How each start went: seconds since the first line of its journal"
    edge = _edge_of_start([step for _, steps in starts for step in steps])
    begun = [(step["from_s"], step["title"]) for _, steps in starts for step in steps if step["from_s"] is not None]
    names = list(dict.fromkeys(name for _, name in sorted(begun, key=lambda one: one[0])))
    figure, panels = _panels(len(starts), 2.6, 1.2 + 0.26 * max(len(names), 1))
    words = [title]
    for axes, (start, steps) in zip(panels, starts, strict=False):
        axes.set_title(textwrap.fill(start, 34), fontsize=8, loc="left")
        for step in steps:
            if step["from_s"] is None:
                continue
            row, end = names.index(step["title"]), step["to_s"] if step["to_s"] is not None else step["from_s"]
            said = f"{start}, {step['title']}: {step['from_s']:.0f} to {end:.0f} s"
            if step["from_s"] > edge:
                axes.plot([edge], [row], marker=">", color="#8a5a00", markersize=5)
                axes.annotate(f"{end:.0f}, not drawn", (edge, row), xytext=(-6, 0), va="center", ha="right", **_BESIDE)
                words.append(f"{said}, long after it was ready: not drawn to scale")
                continue
            axes.plot([step["from_s"], end], [row, row], color="#3b5b8c", linewidth=5, solid_capstyle="butt")
            axes.plot([step["from_s"]], [row], marker="D", color="#3b5b8c", markersize=4)
            axes.annotate(f"{end:.0f}", (end, row), xytext=(6, 0), va="center", **_BESIDE)
            words.append(said)
        axes.set_xlabel("seconds", fontsize=8)
        axes.margins(x=0.2)
        axes.grid(axis="y", linewidth=0.3)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


def _edge_of_start(steps: Sequence[Mapping[str, Any]]) -> float:
    """Seconds beyond which a step is no part of a start: half as long again as the latest ``ready``; none ready: no such edge."""
    ready = [step["from_s"] for step in steps if step.get("key") == "ready" and step["from_s"] is not None]
    return 1.5 * max(ready) if ready else float("inf")


def capacity_chart(series: Sequence[tuple[str, Sequence[tuple[float, int, int]]]], *, title: str = "") -> Picture:
    """What fits over the memory fraction: requests at once, and tokens in the cache, one line each a release.

    ``series`` are (name, points); a point is (fraction, requests at once, tokens), 0 requests where it does not fit.
    """
    title = title or "What fits, by the fraction of GPU memory"
    figure, panels = _panels(2, 4.4, 3.8, share_y=False)
    words = [title]
    for number, (name, points) in enumerate(series):
        marker, colour = _RUN_MARKS[number % len(_RUN_MARKS)]
        style = ("-", "--", ":", "-.")[number % 4]
        fractions = [p[0] for p in points]
        size = max(4, 11 - 2 * number)  # a mark that lies under another stays in sight
        panels[0].plot(fractions, [p[1] for p in points], marker=marker, ls=style, color=colour, ms=size, label=name)
        panels[1].plot(fractions, [p[2] / 1000 for p in points], marker=marker, ls=style, color=colour, ms=size)
        words += [
            f"{name}, fraction {f:g}: " + (f"{n} requests, {t // 1000} k tokens" if n else "does not fit") for f, n, t in points
        ]
    for axes, what in zip(panels, ("requests that really run at once", "tokens in the KV cache, thousands"), strict=True):
        axes.set_xlabel("--mem-fraction-static", fontsize=8)
        axes.set_title(f"{what}   (0: does not fit)", fontsize=8, loc="left")
        axes.set_xticks(sorted({f for _, points in series for f, _, _ in points}))
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.3)
    if series:
        figure.legend(loc="outside lower left", fontsize=8, ncols=len(series), frameon=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


def _panels(
    many: int, width: float, height: float, *, share_x: bool = True, share_y: bool = True
) -> tuple[Figure, Sequence[Axes]]:
    """Panels in one row; ``width`` and ``height`` of each in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(many, 1) * width + 1, height + 0.6), layout="constrained")
    panels = figure.subplots(1, max(many, 1), sharex=share_x, sharey=share_y, squeeze=False)[0]
    for axes in panels:
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, list(panels)


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


# ------------------------------------------------------------------------------------------------- matrices of pairs

#: How a pair came out: one sign, a colour, and whether white text is readable on it. The sign says it without the colour.
_PAIR_STATES = {
    "verified": ("✓", "#0b6e4f", True),
    "advertised": ("a", "#d9dee5", False),
    "not run": ("–", "#f4f5f7", False),
    "invalid": ("!", "#e0b04a", False),
    "error": ("E", "#8a5a00", True),
    "fault": ("F", "#b42318", True),
    "wrong data": ("W", "#7a1fa2", True),
    "hung": ("H", "#1f2937", True),
}
_CLAIMED = {"OK": ("OK", "#d3e8df", False), "": ("?", "#f4f5f7", False)}


def p2p_pairs_chart(value: Mapping[str, Any], *, title: str = "What is claimed of each pair, and what was shown") -> Picture:
    """Two matrices side by side: reads and writes as claimed, and each ordered pair as it came out.

    ``value`` is ``Measurement.value`` of a pair matrix: ``gpus``, ``cells`` (src, dst, state), ``claims``.
    """
    gpus = list(value["gpus"])
    figure, (left, right) = _matrix_canvas(len(gpus), 2)
    claims = {tuple(pair.split()): said for pair, said in value["claims"].items()}
    denied = 0
    for row, src in enumerate(gpus):
        for column, dst in enumerate(gpus):
            said = claims.get((src, dst), {})
            worst_said = next((said[c] for c in ("w", "r") if said.get(c, "OK") != "OK"), "OK" if said else "")
            if src != dst:
                denied += worst_said not in ("OK", "")
                _pair_cell(left, row, column, *_CLAIMED.get(worst_said, (worst_said, "#e0b04a", False)))
    states = {(c["src"], c["dst"]): c["state"] for c in value["cells"]}
    faulted = {(c["src"], c["dst"]) for c in value["cells"] if c["faults"] and c["state"] != "fault"}
    for (src, dst), state in states.items():
        sign, colour, on_dark = _PAIR_STATES[state]
        also = " F" if (src, dst) in faulted else ""
        _pair_cell(right, gpus.index(src), gpus.index(dst), sign + also, colour, on_dark)
    counts = {state: list(states.values()).count(state) for state in _PAIR_STATES if state in states.values()}
    entries = [f"{_PAIR_STATES[state][0]} {state}: {n}" for state, n in counts.items()]
    entries += [f"F beside it, a fault of the pair: {len(faulted)}"] if faulted else []
    in_line = 2 if len(gpus) <= 4 else 4
    legend = "\n".join("   ".join(entries[n : n + in_line]) for n in range(0, len(entries), in_line))
    _matrix_axes(left, gpus, "claimed (nvidia-smi topo -p2p)")
    _matrix_axes(right, gpus, f"shown\n{legend}")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    words = [
        title,
        f"claimed for all but {denied} of {len(states)} ordered pairs" if claims else "nothing is known of what is claimed",
    ]
    words += [f"{state}: {n} of {len(states)} ordered pairs" for state, n in counts.items()]
    words += [f"{len(faulted)} of them with a fault of the pair in the kernel's log"] if faulted else []
    words += [f"{a} to {b}: {state}" for (a, b), state in states.items() if state != "verified"][:60]
    return Picture(_png(figure), "\n".join(words))


def p2p_speed_chart(value: Mapping[str, Any], *, path: str = "ce-push", title: str = "") -> Picture:
    """Bandwidth (GB/s) and latency of small copies (us) by ordered pair, for one path. Invalid figures are struck through.

    ``value`` as for :func:`p2p_pairs_chart`; its cells have ``gbps`` {path: [median, low, high]}, ``us`` and ``class``.
    """
    title = title or f"How fast each pair copies ({path})"
    gpus = list(value["gpus"])
    figure, axes = _matrix_canvas(len(gpus), 2)
    cells = [c for c in value["cells"] if path in c["gbps"]]
    figures: dict[str, list[float]] = {}
    for cell in cells:
        if cell["state"] != "invalid":
            figures.setdefault(cell["class"], []).append(cell["gbps"][path][0])
    middle = {name: sorted(numbers)[len(numbers) // 2] for name, numbers in figures.items()}
    for cell in cells:
        place = (gpus.index(cell["src"]), gpus.index(cell["dst"]))
        gbps, share = cell["gbps"][path][0], cell["gbps"][path][0] / middle.get(cell["class"], cell["gbps"][path][0])
        bad, slow = cell["state"] == "invalid", share < 0.85
        colour = "#e0b04a" if bad else "#f3c4bd" if slow else "#d3e8df"
        _pair_cell(axes[0], *place, f"{gbps:.1f}{' !' if bad else ' ↓' if slow else ''}", colour, False)
        if path in cell["us"]:
            _pair_cell(axes[1], *place, f"{cell['us'][path]:.2f}", "#e6ebf3", False)
    medians = ", ".join(f"{name} {number:.1f}" for name, number in middle.items())
    _matrix_axes(axes[0], gpus, f"GB/s one way, median of the repeats\n{medians}")
    _matrix_axes(axes[1], gpus, "microseconds a copy of the smallest size")
    figure.suptitle(f"{title}   (↓ below 85 % of its class, ! cannot be true)", fontsize=10, x=0.01, ha="left")
    words = [title, f"class medians in GB/s: {medians or 'none'}"]
    words += [f"{c['src']} to {c['dst']}: {c['gbps'][path][0]:.1f} GB/s ({c['state']}), {'; '.join(c['slow'])}" for c in cells
              if c["slow"] or c["state"] == "invalid"]  # fmt: skip
    return Picture(_png(figure), "\n".join(words))


def _matrix_canvas(many: int, panels: int) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    side = max(2.6, 0.9 + 0.52 * many)
    figure = Figure(figsize=(panels * (side + 0.4), side + 1.1), layout="constrained")
    return figure, list(figure.subplots(1, panels))


def _pair_cell(axes: Axes, row: int, column: int, text: str, colour: str, on_dark: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, facecolor=colour, edgecolor="#8b95a3", linewidth=0.5))
    ink = "white" if on_dark else "black"
    axes.text(column, row, text, ha="center", va="center", fontsize=8 if len(text) > 3 else 10, color=ink)


def _matrix_axes(axes: Axes, gpus: Sequence[str], title: str) -> None:
    """Sources are rows, destinations columns; addresses without the domain that they share."""
    shared = len({pci[:5] for pci in gpus}) == 1
    names = [pci[5:].removesuffix(".0") if shared else pci for pci in gpus]
    axes.set_xticks(range(len(gpus)), names, fontsize=7)
    axes.set_yticks(range(len(gpus)), names, fontsize=7)
    axes.set_xlim(-0.6, max(len(gpus), 1) - 0.4)
    axes.set_ylim(max(len(gpus), 1) - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.set_xlabel("to", fontsize=8)
    axes.set_ylabel("from", fontsize=8)
    axes.set_title(title, fontsize=8, loc="left")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


# ------------------------------------------------------------------------------------ matrices of several runs, side by side


def pairs_over_runs(runs: Sequence[tuple[str, Mapping[str, Any]]], *, title: str = "") -> Picture:
    """The matrix of each run, three in a row. ``runs`` are (name, value as for :func:`p2p_pairs_chart`).

    A cell with a hatched edge is a pair whose clean log would prove nothing.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    title = title or "What was shown of each pair, run by run"
    most = max((len(value["gpus"]) for _, value in runs), default=1)
    across = min(max(len(runs), 1), 3 if most <= 4 else 2)
    down = -(-max(len(runs), 1) // across)
    side = max(2.6, 0.9 + 0.44 * most)
    figure = Figure(figsize=(across * (side + 0.55), down * (side + 0.7) + 0.9), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    words, seen = [title], set()
    for axes, (name, value) in zip(panels, runs, strict=False):
        gpus = list(value["gpus"])
        for cell in value["cells"]:
            sign, colour, on_dark = _PAIR_STATES[cell["state"]]
            faulted = bool(cell["faults"]) and cell["state"] != "fault"
            place = (gpus.index(cell["src"]), gpus.index(cell["dst"]))
            _pair_cell(axes, *place, sign + (" F" if faulted else ""), colour, on_dark)
            seen |= {cell["state"]} | ({"F"} if faulted else set())
            if cell["silence"] and cell["state"] not in ("not run", "advertised"):
                corner = (place[1] - 0.48, place[0] + 0.24)  # the lower edge: the sign above it stays readable
                axes.add_patch(Rectangle(corner, 0.96, 0.24, fill=False, hatch="////", edgecolor="#ffffff", linewidth=0))
                seen.add("silent")
        _matrix_axes(axes, gpus, "\n".join(textwrap.fill(line, 42) for line in name.splitlines()))
        states = [cell["state"] for cell in value["cells"]]
        silent = sorted({c["silence"] for c in value["cells"] if c["silence"] and c["state"] not in ("not run", "advertised")})
        told = name.replace("\n", ", ")
        words.append(f"{told}: " + ", ".join(f"{states.count(s)} {s}" for s in _PAIR_STATES if s in states))
        words += [f"{told}: a clean log proves nothing, {why}" for why in silent]
        words += [f"{told}, {c['src']} to {c['dst']}: {c['state']}" for c in value["cells"] if c["state"] != "verified"][:60]
    for axes in list(panels)[len(runs) :]:
        axes.set_axis_off()
    legend = [f"{sign} {state}" for state, (sign, _, _) in _PAIR_STATES.items() if state in seen]
    notes = ["F beside it: a fault of the pair in the kernel's log"] if "F" in seen else []
    notes += ["hatched edge: its clean log proves nothing"] if "silent" in seen else []
    below = "\n".join("     ".join(entries) for entries in (legend, notes) if entries)
    figure.supxlabel(below, fontsize=9, x=0.01, ha="left")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


#: How a line of the kernel is drawn over time: a mark, a colour, what it says.
_LINE_MARKS = {
    "pair": ("|", "#b42318", "a fault of the pair"),
    "suppressed": ("D", "#8a5a00", "the kernel says that it printed fewer than there were"),
    "other": ("X", "#6941c6", "a fault of another device"),
}


def faults_over_time(
    windows: Sequence[tuple[str, float, float]], marks: Sequence[tuple[str, float, str, int]], *, title: str = ""
) -> Picture:
    """Lines of the kernel over time, in the windows of the pairs that were active.

    ``windows`` are (row, from, to) and ``marks`` (row, at, kind, count) in seconds since the first window; a kind is ``pair``,
    ``suppressed`` or ``other``. Rows come in the order of their first window; those without one come first.
    """
    title = title or "The kernel's lines, by window"
    own = list(dict.fromkeys(row for row, _, _ in windows))
    foreign = list(dict.fromkeys(row for row, _, _, _ in marks if row not in own))
    rows = foreign + own
    figure, axes = _canvas(9.5, 1.6 + 0.24 * max(len(rows), 1))
    for row, begun, ended in windows:
        axes.plot([begun, ended], [rows.index(row)] * 2, color="#c3ccd8", linewidth=8, solid_capstyle="butt", zorder=1)
    for kind, (marker, colour, said) in _LINE_MARKS.items():
        drawn = [(at, rows.index(row)) for row, at, k, _ in marks if k == kind]
        if drawn:
            size = 11 if marker == "|" else 6
            axes.plot([a for a, _ in drawn], [r for _, r in drawn], marker, color=colour, ms=size, mew=1.4, label=said, zorder=3)
    words = [title]
    for row in rows:
        told = [f"{sum(k == kind for r, _, k, _ in marks if r == row)} {kind}" for kind in _LINE_MARKS]
        for at in sorted({a for r, a, kind, _ in marks if r == row and kind == "other"}):
            for active in dict.fromkeys(r for r, begun, ended in windows if begun <= at <= ended):
                axes.plot(
                    [at, at], [rows.index(row), rows.index(active)], color="#6941c6", linewidth=0.8, linestyle=":", zorder=2
                )
                told.append(f"while {active} was active")
        kept = [text for text in dict.fromkeys(told) if not text.startswith("0 ")]
        hidden = sum(count for r, _, kind, count in marks if r == row and kind == "suppressed")
        if kept:
            words.append(f"{row}: {', '.join(kept)}" + (f" ({hidden} lines not printed)" if hidden else ""))
            text = f"{hidden:,} not printed".replace(",", " ") if hidden else ""
            end = max([at for r, at, _, _ in marks if r == row] + [to for r, _, to in windows if r == row])
            axes.annotate(text, (end, rows.index(row)), xytext=(8, 0), va="center", **_BESIDE)
    if len(words) == 1:
        words.append("no line of a fault")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds since the first window opened", fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    if marks:
        figure.legend(loc="outside lower left", fontsize=8, ncols=3, frameon=False)
    return Picture(_png(figure), "\n".join(words))


def pair_figures_chart(
    runs: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    path: str = "ce-push",
    limit: float | None = None,
    medians: Mapping[str, float] | None = None,
    title: str = "",
) -> Picture:
    """Bandwidth and latency of each pair by one path, a mark a run; the median of its class is a bar, the link's limit a line.

    ``runs`` are (name, value as for :func:`p2p_pairs_chart`); ``limit`` in GB/s; ``medians``: GB/s by class.
    """
    title = title or f"How fast each pair copies ({path}), run by run"
    classes = {(c["src"], c["dst"]): c["class"] for _, value in runs for c in value["cells"]}
    pairs = sorted(classes, key=lambda pair: (classes[pair], pair))
    figure, panels = _panels(2, 4.4, 1.5 + 0.28 * max(len(pairs), 1), share_x=False)
    words = [title, *(f"median of {name}: {number:.1f} GB/s" for name, number in sorted((medians or {}).items()))]
    for row, pair in enumerate(pairs):
        if medians and classes[pair] in medians:
            panels[0].plot([medians[classes[pair]]] * 2, [row - 0.42, row + 0.42], color="#8b95a3", linewidth=3, zorder=1)
    for number, (name, value) in enumerate(runs):
        marker, colour = _RUN_MARKS[number % len(_RUN_MARKS)]
        cells = [c for c in value["cells"] if path in c["gbps"]]
        rows = [pairs.index((c["src"], c["dst"])) + (number - (len(runs) - 1) / 2) * 0.22 for c in cells]
        panels[0].plot([c["gbps"][path][0] for c in cells], rows, marker, color=colour, ms=5, ls="none", label=name)
        panels[1].plot([c["us"].get(path, float("nan")) for c in cells], rows, marker, color=colour, ms=5, ls="none")
        for cell, row_at in zip(cells, rows, strict=True):
            invalid = cell["state"] == "invalid"
            if invalid or cell["slow"]:
                said = f"{cell['gbps'][path][0]:.1f} {'cannot be true' if invalid else 'slow'}"
                panels[0].annotate(
                    said, (cell["gbps"][path][0], row_at), xytext=(-7, 0), va="center", **{**_BESIDE, "ha": "right"}
                )
                words.append(f"{name}, {cell['src']} to {cell['dst']}: {said}")
        spread = [c["gbps"][path][0] for c in cells if c["state"] != "invalid"]
        if spread:
            words.append(f"{name}: {min(spread):.1f} to {max(spread):.1f} GB/s over {len(spread)} pairs")
    if limit:
        panels[0].axvline(limit, color="#b42318", linewidth=1, linestyle="--", zorder=0)
        panels[0].annotate(
            f"the link: {limit:.0f}", (limit, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=7,
        )  # fmt: skip
        words.append(f"the link carries {limit:.0f} GB/s one way")
    panels[0].set_yticks(range(len(pairs)), [f"{src} to {dst}" for src, dst in pairs], fontsize=7)
    panels[0].set_ylim(len(pairs) - 0.4, -0.6)
    for axes, what in zip(
        panels, ("GB/s one way, median of the repeats", "microseconds, a copy of the smallest size"), strict=True
    ):
        axes.set_xlim(0, axes.get_xlim()[1] * 1.05)
        axes.set_xlabel(what, fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
    if runs:
        figure.legend(loc="outside lower left", fontsize=8, ncols=2, frameon=False)
    figure.suptitle(f"{title}\n(grey bar: the median of the pair's class)", fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


# --------------------------------------------------------------------------------------------- boots of an experiment

#: Whether a step held: a mark, a colour, a word.
_HELD_MARKS = {
    True: ("o", "#0b6e4f", "held"),
    False: ("X", "#b42318", "did not hold"),
    None: ("$?$", "#6941c6", "not seen, or not known"),
}
#: Types of an iommu group: a colour, and whether white text is readable on it.
_TYPE_COLOURS = {"identity": ("#27477a", True), "DMA-FQ": ("#d3e8df", False), "DMA": ("#d3e8df", False)}


def boots_over_time(boots: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], *, title: str = "") -> Picture:
    """Steps of several boots, one panel a boot, on one scale of seconds since the kernel started.

    ``boots`` are (label, steps); a step has ``label``, ``at_s`` (None: nobody saw it), ``held`` (None: not known) and ``note``,
    a few words.
    """
    from matplotlib.figure import Figure

    title = title or "What was seen in each boot, and when"
    heights = [max(len(steps), 1) for _, steps in boots]
    figure = Figure(figsize=(9.5, 1.7 + 0.27 * sum(heights) + 0.3 * len(boots)), layout="constrained")
    panels = figure.subplots(len(boots), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    words, used = [title], set()
    for axes, (name, steps) in zip(panels, boots, strict=True):
        for row, step in enumerate(steps):
            marker, colour, said = _HELD_MARKS[step["held"]]
            at = step["at_s"]
            note = f": {step['note']}" if step["note"] else ""
            words.append(f"{name}, {step['label']}: {said}" + (f" at {at:.2f} s{note}" if at is not None else ""))
            if at is None:
                axes.annotate("not seen", (0.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=colour)
                continue
            used.add(step["held"])
            axes.plot([at], [row], marker, color=colour, ms=7, zorder=3)
            axes.annotate(
                f"{at:.2f} s{note}" if at < 100 else f"{at:.0f} s{note}", (at, row), xytext=(9, 0), va="center", **_BESIDE
            )
        axes.set_yticks(range(len(steps)), [step["label"] for step in steps], fontsize=8)
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xscale("log")
        axes.grid(axis="both", linewidth=0.3)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    times = [step["at_s"] for _, steps in boots for step in steps if step["at_s"]]
    panels[-1].set_xlim(min(times, default=1.0) / 1.6, max(times, default=10.0) * 2.4)
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[-1].set_xlabel("seconds since the kernel of that boot started, logarithmic", fontsize=8)
    legend = [f"{'●' if held else '✖' if held is False else '?'} {_HELD_MARKS[held][2]}" for held in _HELD_MARKS if held in used]
    figure.supxlabel("     ".join(legend), fontsize=8, x=0.01, ha="left")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


def types_by_boot(
    experiments: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, str, Sequence[tuple[str | None, bool | None]]]]]],
    *,
    title: str = "The type of each GPU's iommu group, boot by boot",
) -> Picture:
    """A panel an experiment: GPUs as rows, boots as columns; a cell says the type, and whether the GPU started.

    ``experiments`` are (name, labels of the boots, rows); a row is (PCI address, role, (type, started) a boot), a type None where
    nobody saw the boot, started None where it is not known.
    """
    from matplotlib.figure import Figure

    across = min(max(len(experiments), 1), 2)
    down = -(-max(len(experiments), 1) // across)
    most = max((len(rows) for _, _, rows in experiments), default=1)
    figure = Figure(figsize=(across * 4.9, down * (0.95 + 0.36 * most) + 0.7), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    words = [title]
    for axes, (name, labels, rows) in zip(panels, experiments, strict=False):
        for row, (pci, role, boots) in enumerate(rows):
            for column, (kind, up) in enumerate(boots):
                colour, on_dark = _TYPE_COLOURS.get(kind or "", ("#f4f5f7", False))
                sign = "not seen" if kind is None else f"{kind} {'✓' if up else '?' if up is None else '✗'}"
                if kind is not None and up is False:
                    colour, on_dark = "#b42318", True
                _type_cell(axes, row, column, sign, colour, on_dark)
                words.append(f"{name}, {pci} ({role}), {labels[column]}: {_type_words(kind, up)}")
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_yticks(range(len(rows)), [f"{pci}\n{role}" for pci, role, _ in rows], fontsize=7)
        axes.xaxis.tick_top()
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.set_title(textwrap.fill(name, 58), fontsize=8, loc="left")
        for side in axes.spines.values():
            side.set_visible(False)
    for axes in panels[len(experiments) :]:
        axes.set_axis_off()
    figure.supxlabel("✓ started     ✗ did not start     ? not known", fontsize=8, x=0.01, ha="left")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return Picture(_png(figure), "\n".join(words))


def _type_words(kind: str | None, up: bool | None) -> str:
    if kind is None:
        return "not seen"
    return f"{kind}, {'started' if up else 'not known whether it started' if up is None else 'did not start'}"


def _type_cell(axes: Axes, row: int, column: int, text: str, colour: str, on_dark: bool) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column - 0.48, row - 0.44), 0.96, 0.88, facecolor=colour, edgecolor="#8b95a3", linewidth=0.5))
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if on_dark else "black")


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    figure.set_dpi(110)
    # WHY not savefig: it draws everything twice, the first time for nobody.
    FigureCanvasAgg(figure).print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()

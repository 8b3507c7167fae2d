"""Tables and pictures that keep their meaning without colour, script or trust."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.model import Action, Finding, Identity, Plan, Verdict
from proofbook.signatures.sglang import Milestone, Start
from proofbook.view import (
    SIGNS,
    accept_chart,
    before_after_html,
    capacity_chart,
    compared_accepts,
    compared_gains,
    compared_starts,
    duration_text,
    findings_frame,
    findings_html,
    findings_text,
    gain_chart,
    plan_html,
    plan_text,
    shown,
    start_chart,
    table_html,
    timeline_png,
)

FINDINGS = (
    Finding("a", Verdict.PASS, "fine"),
    Finding("b", Verdict.NOT_CHECKED, "not here"),
    Finding("c", Verdict.FAIL, "<b>gone</b>", subject="0000:c1:00.0", what_to_do="reseat it", lines=("Xid 79",)),
    Finding("d", Verdict.UNKNOWN, "cannot tell"),
)
PLAN = Plan(
    change="reboot",
    title="Reboot gpu01",
    host=Identity("gpu01", "gpu-hv1", "m" * 32, "b" * 32, "k", "root", 0),
    pre_state={},
    actions=(Action("reboot", ("systemctl", "reboot")),),
    undo=(),
    diff="- a\n+ <b>",
    cannot_undo=("it cannot be undone",),
    expected_s=240,
    facts=("uptime 41 d",),
)


def test_findings_come_worst_first_with_words() -> None:
    html = findings_html(FINDINGS)
    assert html.index("FAIL") < html.index("cannot tell") < html.index("not here") < html.index("fine")
    assert "&lt;b&gt;gone&lt;/b&gt;" in html and "Do next:" in html
    assert all(f"{SIGNS[v]} {v.value.replace('_', ' ')}" in html for v in (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.PASS))
    assert "<style" not in html and "<script" not in html
    text = findings_text(FINDINGS).splitlines()
    assert text[0] == "✗ FAIL        0000:c1:00.0: <b>gone</b>"
    assert text[-1] == "✓ PASS        fine"


def test_nothing_checked_is_no_pass() -> None:
    assert "UNKNOWN" in findings_html(()) and "no pass" in findings_html(())
    assert findings_text(()).startswith("UNKNOWN")


def test_a_plan_shows_what_where_and_what_cannot_be_undone() -> None:
    for told in (plan_html(PLAN), plan_text(PLAN)):
        for part in ("systemctl reboot", "gpu-hv1", "m" * 32, "uptime 41 d", "it cannot be undone", "4 min", PLAN.digest):
            assert part in told
    assert "&lt;b&gt;" in plan_html(PLAN)


def test_tables_escape_and_say_what_changed() -> None:
    assert "&lt;i&gt;" in table_html(("c",), [("<i>",)], title="<t>")
    html = before_after_html({"a": 1, "b": 2}, {"a": 1, "b": 3})
    assert html.index("CHANGED") < html.index("same")


def test_values_and_durations_as_people_write_them() -> None:
    assert [shown(v) for v in (None, True, 0, 1.5, [1, 2], {"a": None}, "")] == ["–", "yes", "0", "1.5", "1, 2", "a=–", "–"]
    assert [duration_text(s) for s in (None, 0.021, 2.44, 38, 60, 192, 7500)] == [
        "–",
        "21 ms",
        "2.4 s",
        "38 s",
        "1 min",
        "3 min 12 s",
        "2 h 5 min",
    ]


def test_frames_and_pictures() -> None:
    frame = findings_frame(FINDINGS)
    assert list(frame["verdict"]) == ["FAIL", "UNKNOWN", "NOT_CHECKED", "PASS"]
    steps: list[dict[str, Any]] = [
        {"title": "look", "started_at": "2026-11-29T11:15:44Z", "duration_s": 2.0, "outcome": "ok"},
        {"title": "reboot", "started_at": "2026-11-29T11:15:46Z", "duration_s": 108.0, "outcome": "failed"},
        {"title": "never ended", "started_at": "2026-11-29T11:17:46Z", "duration_s": None, "outcome": "unfinished"},
    ]
    assert timeline_png(steps).startswith(b"\x89PNG")
    assert timeline_png([]).startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------- pictures of measurements


def level(number: int, verdict: str, speedup: tuple[float, float, float] | None = None, **more: Any) -> dict[str, Any]:
    bounds = dict(zip(("low", "estimate", "high"), speedup, strict=True)) if speedup else None
    ratios = {f"p{n}": speedup[1] + n / 100 for n in range(12)} if speedup else {}
    said = {"level": number, "verdict": verdict, "speedup": bounds, "ratios": ratios, "pairs": len(ratios)}
    return {**said, "skipped": "", "complete": True, **more}


def test_a_gain_says_in_words_what_the_picture_shows() -> None:
    drawn = gain_chart(
        {
            "levels": [
                level(1, "gain", (1.29, 1.38, 1.47)),
                level(2, "none-shown", (0.96, 1.03, 1.1)),
                level(4, "loss", (0.86, 0.91, 0.96)),
                level(8, "not-measured", skipped="above the effective cap of 6", complete=False),
                level(16, "not-measured", complete=False),
                level(32, "not-measured", pairs=5),
            ]
        }
    )
    assert drawn.png.startswith(b"\x89PNG")
    assert drawn.alt.splitlines()[1:] == [
        "concurrency 1: gain, +38 % (+29 to +47), 12 pairs",
        "concurrency 2: no gain shown, +3 % (-4 to +10), 12 pairs",
        "concurrency 4: loss, -9 % (-14 to -4), 12 pairs",
        "concurrency 8: not measured, above the effective cap of 6",
        "concurrency 16: not measured, requests were lost",
        "concurrency 32: not measured, 5 pairs only",
    ]
    assert gain_chart({"levels": []}).png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"accept_length": 5.4, "requests": [{"accept_length": 5.3}, {"accept_length": None}]}, "A case: 5.40"),
        ({"accept_length": None}, "A case: no verify step counted"),
        ({"accept_length": None, "completed": 0}, "A case: no answer"),
        ({"accept_length": None, "skipped": "the server is gone"}, "A case: not asked"),
    ],
)
def test_accept_lengths_say_in_words_what_the_picture_shows(case: dict[str, Any], words: str) -> None:
    whole = {"title": "A case", "skipped": "", "completed": 1, "requests": [], **case}
    drawn = accept_chart({"steps_plus_one": 6, "cases": [whole]})
    assert drawn.png.startswith(b"\x89PNG")
    assert drawn.alt.splitlines()[1:] == ["at most 6: draft steps plus one", words]
    assert accept_chart({"steps_plus_one": None, "cases": []}).png.startswith(b"\x89PNG")


def test_a_start_is_drawn_from_its_milestones() -> None:
    at = datetime(2026, 3, 9, 16, 1, 40, tzinfo=UTC)
    weights = Milestone("weights", "Weights", 4, begun=at, ended=at.replace(second=53), detail="4 ranks")
    drawn = start_chart(Start(1, milestones={"weights": weights, "untimed": Milestone("untimed", "Untimed", 2)}))
    assert drawn.png.startswith(b"\x89PNG")
    assert drawn.alt == "Weights: 0 to 13 s"
    assert start_chart(Start(1)).png.startswith(b"\x89PNG")


def _level(level: int, percent: float) -> dict[str, Any]:
    ratio = 1 + percent / 100
    interval = {"estimate": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
    verdict = "gain" if percent > 10 else "loss" if percent < -10 else "none-shown"
    return {
        "level": level, "speedup": interval, "verdict": verdict, "ratios": {"a": ratio}, "pairs": 12, "skipped": "",
        "complete": True,
    }  # fmt: skip


def test_runs_beside_one_another_keep_their_names_and_what_is_missing() -> None:
    drawn = compared_gains([("one", {"levels": [_level(1, 40), _level(4, -20)]}, ""), ("two", None, "it never came up")])
    assert "one, concurrency 1: gain, +40 % (+30 to +50), 12 pairs" in drawn.alt
    assert "one, concurrency 4: loss" in drawn.alt
    assert drawn.alt.splitlines()[-1] == "two: not measured, it never came up"
    assert compared_gains([("two", None, "it never came up")]).png.startswith(b"\x89PNG")


def test_cases_of_several_runs_share_a_row_although_their_titles_differ() -> None:
    def control(title: str, length: float | None) -> dict[str, Any]:
        case: dict[str, Any] = {
            "case": "burst",
            "title": title,
            "accept_length": length,
            "requests": [],
            "skipped": "",
            "completed": 3,
        }
        return {"steps_plus_one": 6, "cases": [case]}

    drawn = compared_accepts([("one", control("35 at once", 2.9)), ("two", control("30 at once", None))])
    assert drawn.alt.splitlines()[1:] == ["one, 35 at once: 2.90", "two, 30 at once: no verify step counted"]
    assert compared_accepts([]).png.startswith(b"\x89PNG")


def test_starts_and_capacities_say_what_is_not_known_and_what_does_not_fit() -> None:
    steps: list[dict[str, Any]] = [
        {"title": "Weights", "from_s": 17.0, "to_s": 27.0, "detail": ""},
        {"title": "Ready", "from_s": None, "to_s": None, "detail": ""},
    ]
    assert compared_starts([("one", steps)]).alt.splitlines()[1:] == ["one, Weights: 17 to 27 s"]
    assert compared_starts([]).png.startswith(b"\x89PNG")
    drawn = capacity_chart([("0.5.9", [(0.7, 0, 0), (0.8, 23, 331000)])])
    assert drawn.alt.splitlines()[1:] == [
        "0.5.9, fraction 0.7: does not fit",
        "0.5.9, fraction 0.8: 23 requests, 331 k tokens",
    ]

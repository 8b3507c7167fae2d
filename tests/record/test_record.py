"""A record tells the run: in JSON, HTML, Markdown, JUnit XML and as a notebook; and nobody can change it unnoticed."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from proofbook.errors import RecordError, Sealed
from proofbook.journal import JOURNAL, MANIFEST, Writer, read_journal, read_output
from proofbook.model import Finding, Suggested, Verdict
from proofbook.record import SCHEMA, Keeper, from_events, load_record, render, seal
from proofbook.redact import Redactor
from proofbook.visible import visible

SECRET = "hf_QmFzZTY0VG9rZW5Gb3JUZXN0cw0123456"


def test_the_record_says_what_happened(reboot_run: Path) -> None:
    record = load_record(reboot_run)
    assert (record.status, record.verdict, record.exit_code) == ("completed", "FAIL", 1)
    assert record.before["boot_id"] != record.after["boot_id"]
    assert record.counts == {"FAIL": 2, "UNKNOWN": 1, "WARN": 1, "NOT_CHECKED": 1, "PASS": 4}
    assert [n["kind"] for n in record.not_verified] == ["could not tell", "not checked", "remark"]
    nvlink, remark = record.not_checked_reasons
    assert nvlink == "no second NVLink bridge is in this machine; peer access needs its own runbook"
    assert remark == record.not_verified[-1]["why"], "a remark that something was not verified stands in every list of such"
    (plan,) = record.plans
    assert [g["decision"] for g in plan["gates"]] == ["approved"]
    assert [(a["outcome"], a["exit_status"]) for a in plan["acts"]] == [("unknown", None)]
    assert plan["applied"]["outcome"] == "done"
    assert record.journal["sealed"] and record.journal["intact"]
    assert record.duration_s == pytest.approx(112.9, abs=1)
    assert [s["outcome"] for s in record.steps][:3] == ["ok", "ok", "ok"]


def test_the_record_is_a_pure_function_of_the_events(reboot_run: Path) -> None:
    events = read_journal(reboot_run / JOURNAL).events
    before = json.dumps(events)
    assert from_events(events) == from_events(json.loads(before))
    assert json.dumps(events) == before


def test_json_carries_its_schema_and_everything_that_machines_ask(reboot_run: Path) -> None:
    told = json.loads((reboot_run / "record.json").read_text())
    assert told["schema"] == SCHEMA
    assert told["identity"]["after"]["boot_id"] == "7be2951d0f3a4c68b5d1e2f3a4b5c6d7"
    assert told["machine_id"] == "3f1c9a52d0b84e6f9a1177c2e05d4b38"
    assert told["configuration"]["llm-two/sglang-qwen.service"]["argv"][-2:] == ["--api-key", "[redacted:api-key]"]
    assert {"rule": "variable", "file": "evidence/e0002-pct.out", "count": 1} in told["redactions"]
    assert told["continues"] == "20261129T105500Z-reboot-verification-gpu01-00c4de"


def test_no_secret_is_in_any_file(reboot_run: Path) -> None:
    for path in reboot_run.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert b"k-991" not in path.read_bytes(), path


# ------------------------------------------------------------------------------------------------ HTML


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(path: Path) -> Page:
    parser = Page()
    parser.feed(path.read_text())
    parser.close()
    assert parser.open == []
    return parser


def test_html_needs_nothing_from_outside(reboot_run: Path) -> None:
    html = (reboot_run / "record.html").read_text()
    tags = page(reboot_run / "record.html").tags
    assert not {t for t, _ in tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _tag, attributes in tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert not re.match(r"(?i)\s*(?:[a-z+]+:)?//", attributes.get(name) or "")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", html)
    assert "default-src 'none'" in html


def test_html_links_lead_to_what_is_there(reboot_run: Path) -> None:
    tags = page(reboot_run / "record.html").tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    for _tag, attributes in tags:
        target = attributes.get("href") or ""
        if target.startswith("#"):
            assert target[1:] in ids
        elif target:
            assert (reboot_run / target).is_file()


def test_html_says_the_outcome_in_words_and_what_was_not_verified_first(reboot_run: Path) -> None:
    html = (reboot_run / "record.html").read_text()
    order = [
        "FAIL · it is not as it should be",
        'id="not-verified"',
        'id="findings"',
        'id="tables"',
        'id="done"',
        'id="timeline"',
        'id="machine"',
    ]
    places = [html.index(x) for x in order]
    assert places == sorted(places)
    findings = html[html.index('id="findings"') :]
    assert (
        findings.index("article")
        < findings.index("finding FAIL")
        < findings.index("finding UNKNOWN")
        < findings.index("finding WARN")
    )
    assert "alice" in html and "systemctl reboot" in html
    assert "<code>dmesg</code> ended with exit status 1" in html


def test_html_escapes_what_machines_say(script: Callable[..., object]) -> None:
    s = script()
    s.open(title="<script>alert(1)</script>")
    s.step("check", "<img src=x onerror=alert(1)>")
    evidence = s.evidence(("sh", "-c", "<b>"), b"</pre><script>alert(2)</script>\x1b[31m\xff")
    bad = Finding(
        "c", Verdict.FAIL, "`<i>`<script>", subject='"><svg>', what_to_do="<a>", lines=("</pre><b>",), evidence=(evidence,)
    )
    s.finding("<u>", bad)
    s.done()
    folder = s.close("completed", "FAIL", "<marquee>", 1)
    tags = {t for t, _ in page(folder / "record.html").tags}
    assert not tags & {"script", "img", "svg", "i", "u", "marquee"}
    ET.parse(folder / "checks.junit.xml")


HOSTILE = "\x1b[2Jcleared \u202etxt.exe \x00 \x9b31m \u200b"


def test_nothing_that_a_machine_says_acts_in_a_view(script: Callable[..., object]) -> None:
    s = script()
    s.open(title=HOSTILE)
    s.step("check", HOSTILE)
    evidence = s.evidence(("cat", HOSTILE.replace("\0", "")), HOSTILE.encode())
    bad = Finding(
        "c",
        Verdict.FAIL,
        HOSTILE,
        subject=HOSTILE,
        what_to_do=HOSTILE,
        lines=(HOSTILE,),
        observed=[HOSTILE],
        evidence=(evidence,),
    )
    s.finding(HOSTILE, bad)
    s.finding("t", Finding("u", Verdict.UNKNOWN, HOSTILE))
    s.done()
    folder = s.close("completed", "FAIL", HOSTILE, 1)
    shown = "␛[2Jcleared \\u202etxt.exe ␀"
    for name in ("record.html", "record.md", "checks.junit.xml"):
        text = (folder / name).read_text()
        assert visible(text) == text, name
        assert shown in text.replace("\\\\", "\\").replace("\\[", "["), name
    notebook = json.loads((folder / "notebook.ipynb").read_text())
    said = "".join(json.dumps(c, ensure_ascii=False) for c in notebook["cells"])
    assert visible(said) == said and "\\u001b" not in said and "␛" in said
    assert json.loads((folder / "record.json").read_text())["findings"][0]["reason"] == HOSTILE, "data stay as they are"
    assert (folder / load_record(folder).evidence[0]["stdout_file"]).read_bytes() == HOSTILE.encode()


def test_a_sentence_without_an_end_is_cut_in_views(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.step("check", "long")
    long = "x" * 1_000_000
    s.finding("t", Finding("c", Verdict.FAIL, long, what_to_do=long, lines=(long,)))
    s.finding("t", Finding("u", Verdict.UNKNOWN, long))
    s.done()
    folder = s.close("completed", "FAIL", "x", 1)
    for name in ("record.html", "record.md", "checks.junit.xml", "notebook.ipynb"):
        text = (folder / name).read_text()
        assert len(text) < 60_000, name
        assert "more characters in record.json" in text, name


def test_big_outputs_are_cut_around_the_lines_that_matter(reboot_run: Path) -> None:
    html = (reboot_run / "record.html").read_text()
    notebook = (reboot_run / "notebook.ipynb").read_text()
    kept = reboot_run / "evidence/e0004-journalctl.out.gz"
    assert len(read_output(kept)) > 250_000 > 5 * kept.stat().st_size
    assert len(html) < 60_000 and len(notebook) < 120_000
    for text in (html, notebook):
        assert "lines left out here" in text
        assert text.count("GPU has fallen off the bus") >= 2


# ---------------------------------------------------------------------------------- the other renderings


def test_markdown_fits_into_a_ticket(reboot_run: Path, script: Callable[..., object]) -> None:
    text = (reboot_run / "record.md").read_text()
    assert len(text.splitlines()) < 60
    assert text.index("**Not verified**") < text.index("**Findings**")
    assert "| ✗ FAIL | 0000:c1:00.0 |" in text
    s = script()
    s.open()
    s.step("check", "many")
    for n in range(80):
        s.finding("t", Finding(f"c{n}", Verdict.UNKNOWN, "a | b\nc", what_to_do="x"))
    s.done()
    for n in range(30):
        s.say("note", {"kind": "operator", "title": "", "text": f"note {n}\nmore"})
    many = (s.close("completed", "UNKNOWN", "s", 4) / "record.md").read_text()
    assert len(many.splitlines()) < 60
    assert "and 65 more in record.html" in many
    assert r"a \| b c" in many


def test_a_blocked_hypothesis_is_not_written_as_a_fact(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.proven("first contact")
    for s.boot, why in (("a" * 32, "boot A"), ("b" * 32, "boot B")):
        s.proven(why)
    s.say("note", {"kind": "procedure", "title": "written down before", "text": "Hypothesis: it starts."})
    concluded = {
        "outcome": "blocked",
        "hypothesis": "it starts.",
        "because": "its FSP refused",
        "what_to_do": "Leave it translated.",
    }
    s.say("conclusion", concluded)
    folder = s.close("completed", "PASS", "s", 0)
    html, ticket = (folder / "record.html").read_text(), (folder / "record.md").read_text()
    assert "<b>Hypothesis (blocked)</b>: it starts." in html and "<p>Leave it translated.</p>" in html
    assert "Hypothesis \\(blocked\\)**: it starts" in ticket or "Hypothesis (blocked)**: it starts" in ticket
    assert "3 of them" in html and "aaaaaaaa… → bbbbbbbb…" in html, "an experiment's own boot is none to be skipped"
    assert f"`{'a' * 12}` → `{'b' * 12}`" in ticket
    assert "The runbook · " in html and "Operator · " not in html, "the hypothesis is the runbook's own note"


def test_junit_maps_the_verdicts(reboot_run: Path) -> None:
    suite = ET.parse(reboot_run / "checks.junit.xml").getroot().find("testsuite")
    assert suite is not None
    cases = {c.get("name"): c for c in suite.findall("testcase")}
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("9", "2", "1", "1")
    assert cases["gpus-present 0000:c1:00.0 [after]"].find("failure") is not None
    assert cases["pcie-link 0000:81:00.0 [after]"].find("error") is not None
    assert cases["p2p [after]"].find("skipped") is not None
    warned = cases["service-restarts llm-two/sglang-qwen.service [after]"]
    assert [e.tag for e in warned] == ["properties", "system-out"]
    assert warned.findtext("system-out", "").startswith("WARN: ")
    assert [e.tag for e in cases["units [after]"]] == ["system-out"]


def test_junit_is_what_its_readers_expect(reboot_run: Path) -> None:
    junitparser = pytest.importorskip("junitparser")
    (suite,) = junitparser.JUnitXml.fromfile(str(reboot_run / "checks.junit.xml"))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (9, 2, 1, 1)
    assert sum(case.is_passed for case in suite) == 5
    assert {p.name: p.value for p in suite.properties()}["verdict"] == "FAIL"


def test_the_notebook_is_valid_and_shows_each_step(reboot_run: Path) -> None:
    import nbformat

    notebook = nbformat.read(reboot_run / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [1, 2, 3, 4, 5, 6, 7]
    assert code[5].outputs[0].data["text/plain"].startswith("✗ FAIL")
    assert "Not verified" in notebook.cells[1].source
    outputs = [o.data["text/html"] for c in code for o in c.outputs if o.output_type == "display_data"]
    assert any("Cannot be undone" in html for html in outputs)
    kept = [html for html in outputs if html.startswith("<details>")]
    assert kept and all("exit status" in html for html in kept)


# ------------------------------------------------------------------------------- runs that did not get through


def test_a_run_at_its_gate_says_how_to_go_on(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.proven("first contact")
    s.step("gate", "Gate")
    nothing: dict[str, list[str]] = {name: [] for name in ("actions", "undo", "cannot_undo", "facts")}
    plan = {
        "digest": "sha256:abc",
        "title": "Reboot gpu01",
        "diff": "",
        "expected_s": 1.0,
        "host": {"hostname": "gpu-hv1"},
        **nothing,
    }
    s.say("plan", {**plan, "issued_at": "2026-11-29T11:15:50+00:00"})
    s.say("gate", {"digest": "sha256:abc", "decision": "waiting", "approver": "", "how": "", "text": ""})
    s.done(outcome="stopped", error="needs an approval")
    record = load_record(s.close("stopped-at-gate", "UNKNOWN", "Waiting.", 3))
    assert record.waiting_for == {
        "digest": "sha256:abc",
        "title": "Reboot gpu01",
        "issued_at": "2026-11-29T11:15:50+00:00",
        "host": "gpu-hv1",
    }
    assert record.tone == "wait"
    assert "--approve sha256:abc" in record.as_markdown()
    assert record.not_verified[0]["kind"] == "run ended early"


def unit_plan(lines: int = 3) -> dict[str, object]:
    digest = "0123456789ab" + "c" * 52
    return {
        "digest": "sha256:" + "d" * 64,
        "title": "Extra flags for llm.service",
        "diff": "--- old\n+++ new\n" + "\n".join(f"+line {n}" for n in range(lines)),
        "expected_s": 60.0,
        "host": {"hostname": "gpu-hv1"},
        "issued_at": "2026-11-29T11:15:50+00:00",
        "actions": [{"what": f"install the drop-in (new → {digest})", "argv": ["install-file", digest]}],
        "undo": [{"what": "remove the drop-in", "argv": []}],
        "cannot_undo": ["requests in flight are lost"],
        "facts": ["llm.service serves on port 30000"],
    }


@pytest.mark.parametrize("form", ["as_markdown", "as_text"])
def test_a_plan_that_waits_is_told_with_its_difference(script: Callable[..., object], form: str) -> None:
    s = script()
    s.open()
    s.step("gate", "Gate")
    plan = unit_plan(lines=100)
    s.say("plan", plan)
    s.say("gate", {"digest": plan["digest"], "decision": "waiting", "approver": "", "how": "", "text": ""})
    s.done(outcome="stopped", error="needs an approval")
    folder = s.close("stopped-at-gate", "UNKNOWN", "Waiting.", 3)
    told = getattr(load_record(folder), form)()
    for part in ("install the drop-in", "remove the drop-in", "requests in flight are lost", "serves on port 30000"):
        assert part in told
    assert f"--approve {plan['digest']}" in told, "what is typed is whole"
    assert "0123456789ab…" in told and "0123456789abc" not in told, "what is read is short"
    assert "+line 57" in told and "+line 58" not in told and "… 42 more lines in record.json" in told
    assert "0123456789abc" in (folder / "record.json").read_text()


@pytest.mark.parametrize("form", ["as_markdown", "as_text"])
def test_every_page_has_the_caveats_of_a_conclusion(script: Callable[..., object], form: str) -> None:
    s = script()
    s.open()
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.PASS, "fine"))
    s.done()
    said = {
        "outcome": "refuted",
        "hypothesis": "it pays",
        "because": "it costs",
        "scope": "this release",
        "limits": ["not the other"],
    }
    s.say("conclusion", said)
    s.say("decision", {"keep": False, "rung": "LIMITS", "because": "no gain", "limits": ["a short look"], "acted": True})
    folder = s.close("completed", "PASS", "Refuted.", 0)
    told = getattr(load_record(folder), form)()
    html = (folder / "record.html").read_text()
    for part in ("it pays", "it costs", "this release", "not the other", "a short look"):
        assert part in told and part in html
    assert "nothing was left open" not in told
    assert "what that does not show stands below" in told


def test_a_page_for_the_terminal_has_no_marks_of_a_ticket(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.FAIL, "no_buffer -> extra_buffer | x", what_to_do="see `a_b`"))
    s.done()
    record = load_record(s.close("completed", "FAIL", "PASS_WITH_LIMITS was not reached.", 1))
    assert "PASS_WITH_LIMITS was not reached." in record.as_text()
    assert "✗ FAIL · c: no_buffer -> extra_buffer | x" in record.as_text()
    assert "→ see `a_b`" in record.as_text()
    assert "\\" not in record.as_text() and "**" not in record.as_text()
    assert r"PASS\_WITH\_LIMITS" in record.as_markdown()


def test_an_experiment_that_was_not_started_touched_nothing(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.FAIL, "a job runs there"))
    s.done()
    s.say("conclusion", {"outcome": "blocked", "hypothesis": "h", "because": "a job runs there"})
    folder = s.close("completed", "FAIL", "Blocked.", 1)
    assert load_record(folder).headline == "BLOCKED · FAIL, not started; the machine was not touched"
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    acting = {"act": 1, "what": "w", "argv": ["reboot"], "host": "h", "digest": "sha256:none"}
    acted = from_events([*events[:-3], {**events[-4], "event": "act.intent", "data": acting}, *events[-3:]])
    assert "not validly run, or the machine is not as it was" in acted.headline


@pytest.mark.parametrize(
    ("advice", "left"),
    [
        ("Take it back: a change that does not pay only adds ways to fail.", ""),
        ("Take it back.", ""),
        ("Take it back; the start of the log says why (a flag).", "The start of the log says why (a flag)."),
        ("Take it back, and see how the unit is written.", "See how the unit is written."),
        ("It died behind a living main process; take it back.", "It died behind a living main process"),
    ],
)
def test_nobody_is_told_to_take_back_what_was_taken_back(script: Callable[..., object], advice: str, left: str) -> None:
    s = script()
    s.open()
    plan = unit_plan()
    s.say("plan", plan)
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.FAIL, "no gain", action=Suggested.ROLL_BACK, what_to_do=advice))
    s.finding("t", Finding("d", Verdict.WARN, "odd", what_to_do="Look closer."))
    s.done()
    events = [json.loads(line) for line in (s.folder / "journal.jsonl").read_text().splitlines()]
    assert [p["what_to_do"] for p in from_events(events).problems] == [advice, "Look closer."]
    s.say("applied", {"change": "c", "outcome": "rolled-back", "summary": "as before", "facts": {}, "digest": plan["digest"]})
    record = load_record(s.close("rolled-back", "FAIL", "Taken back.", 5))
    assert [p["what_to_do"] for p in record.problems] == [left, "Look closer."]
    assert record.findings[0]["what_to_do"] == advice, "the data stay"


def test_what_a_short_step_brought_is_rendered_with_the_next_word(
    script: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([*[0.0] * 2, 1.0, 1.0, 10.9, 11.1, 11.1, 12.1])  # of each look at the clock; a render takes a second
    monkeypatch.setattr("proofbook.record.time.monotonic", lambda: next(now))
    s: Any = script()
    s.open()
    s.step("check", "first")
    s.done()  # 1.0: the first render ended just now, and is given a tenth of the time

    def steps() -> int:
        return len(json.loads((s.folder / "record.json").read_text())["steps"])

    assert steps() == 0
    s.say("progress", {"text": "a long step goes on"})  # 10.9
    assert steps() == 0
    s.say("progress", {"text": "and on"})  # 11.1
    assert steps() == 1
    s.say("progress", {"text": "nothing is stale"})


def test_an_open_run_has_a_record_after_every_step(script: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "_SHARE", float("inf"))
    s = script()
    s.open()
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.PASS, "fine"))
    s.done()
    told = json.loads((s.folder / "record.json").read_text())
    assert (told["status"], told["verdict"], told["exit_code"]) == ("running", "PASS", 7)
    assert told["headline"] == "Not finished · so far PASS"
    assert "Not finished" in page(s.folder / "record.html").text[0] + (s.folder / "record.html").read_text()
    assert not (s.folder / MANIFEST).exists()


def test_a_pass_that_was_aborted_does_not_look_like_a_pass(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.PASS, "fine"))
    s.say("trouble", {"error": "ConnectionLost", "message": "gone", "hint": "use the console", "step": 1})
    s.done(outcome="failed", error="gone")
    record = load_record(s.close("aborted", "PASS", "Aborted in step 1.", 7))
    assert (record.tone, record.headline, record.trouble) == ("unknown", "Aborted · so far PASS", "gone")


def test_an_unknown_event_or_an_orphan_act_does_not_break_the_record(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.say("from.the.future", {"x": 1})
    s.say("act.intent", {"act": 1, "what": "w", "argv": ["reboot"], "host": "h", "digest": "sha256:none"})
    record = load_record(s.close("lost", "UNKNOWN", "", 7))
    assert record.plans[0]["acts"][0]["outcome"] == "unknown"
    assert record.plans[0]["acts"][0]["note"] == "no outcome was written"


# ------------------------------------------------------------------------------------------------ the seal


def test_the_manifest_is_for_sha256sum(reboot_run: Path) -> None:
    checked = subprocess.run(["sha256sum", "--strict", "-c", MANIFEST], cwd=reboot_run, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = {line.partition("  ")[2] for line in (reboot_run / MANIFEST).read_text().splitlines()}
    assert listed == {p.relative_to(reboot_run).as_posix() for p in reboot_run.rglob("*") if p.is_file()} - {MANIFEST}
    assert not [p for p in listed if "/." in p or p.startswith(".")]


def test_sealed_means_read_only_and_final(reboot_run: Path) -> None:
    assert not reboot_run.name.endswith(".partial")
    assert [p for p in [reboot_run, *reboot_run.rglob("*")] if stat.S_IMODE(p.stat().st_mode) & 0o222] == []
    with pytest.raises(Sealed):
        seal(reboot_run)
    with pytest.raises(Sealed):
        render(reboot_run)
    with pytest.raises(Sealed):
        Writer(reboot_run, Redactor()).write_text("more.txt", "x")


def test_a_secret_that_slipped_through_stops_the_seal(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    (s.folder / "evidence").mkdir()
    (s.folder / "evidence" / "by-hand.txt").write_text(f"login with {SECRET}")
    with pytest.raises(RecordError, match=r"1 × hugging-face-token in evidence/by-hand.txt") as told:
        s.close("completed", "PASS", "", 0)
    assert SECRET not in str(told.value)
    kept = s.folder.with_name(s.folder.name.removesuffix(".partial") + ".quarantine")
    assert kept.is_dir() and stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert not s.folder.exists()


def test_a_value_learned_late_is_found_in_what_was_written_before(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.evidence(("cat", "x"), b"opaque q8Zr71mPx0Lw here")
    s.redactor.learn("HUB_TOKEN", "q8Zr71mPx0Lw")
    with pytest.raises(RecordError, match=r"learned in evidence/e0001-cat.out"):
        s.close("completed", "PASS", "", 0)


def test_a_value_learned_late_is_found_in_what_is_compressed(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.evidence(("cat", "x"), b"opaque q8Zr71mPx0Lw here\n" + b"x" * 100_000)
    s.redactor.learn("HUB_TOKEN", "q8Zr71mPx0Lw")
    with pytest.raises(RecordError, match=r"learned in evidence/e0001-cat.out.gz"):
        s.close("completed", "PASS", "", 0)


def test_nothing_sealed_is_overwritten(script: Callable[..., object]) -> None:
    s = script()
    s.open()
    s.folder.with_name(s.folder.name.removesuffix(".partial")).mkdir()
    with pytest.raises(Sealed, match="ever overwritten"):
        s.close("completed", "PASS", "", 0)

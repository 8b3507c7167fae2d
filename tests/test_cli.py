"""The command's machine-readable faces: other programs depend on their shape and on the exit codes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from proofbook.archive import Archive, new_run_dir
from proofbook.cli import Progress, SafeConsole, _print_outcome, app
from proofbook.errors import BadParameter, NoSuchRun
from proofbook.journal import Journal, Writer, plain
from proofbook.launch import Outcome, told
from proofbook.model import Finding, Verdict
from proofbook.record import finish, render
from proofbook.redact import Redactor
from proofbook.run import runner_facts


def call(*words: str, code: int = 0) -> Any:
    """The JSON value on the last line of stdout."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.splitlines()[-1])


def opened(
    outputs: Path, run_id: str, *, runbook: str = "mtp-enablement", continues: str | None = None
) -> tuple[Writer, Journal]:
    """A run whose process is gone, as far as its first finding."""
    when = datetime.strptime(run_id[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    writer = Writer(new_run_dir(outputs, runbook, "gpu01", when, run_id), Redactor())
    journal = Journal(writer, run_id, lambda: when)
    runner = runner_facts() | {"pid_started": "another process"}
    about = {"run_id": run_id, "runbook": runbook, "host": "gpu01", "parameters": {}, "runner": runner, "continues": continues}
    journal.append("run.opened", about)
    journal.append("finding", plain(Finding("c", Verdict.PASS, "fine")))
    render(writer.run_dir, writer=writer)
    return writer, journal


def closed(outputs: Path, run_id: str, *, summary: str, **more: Any) -> Path:
    writer, journal = opened(outputs, run_id, **more)
    journal.append("run.closing", {"status": "completed", "verdict": "PASS", "summary": summary, "exit_code": 0})
    return finish(writer.run_dir, journal, writer)


def test_runbooks_say_what_they_take() -> None:
    (reboot,) = [r for r in call("runbooks", "--json") if r["name"] == "reboot-verification"]
    assert reboot["changes_the_host"] is True
    assert reboot["purpose"]
    parameters = {p["name"]: p for p in reboot["parameters"]}
    assert set(parameters) == {"host", "reboot", "services", "settle_minutes", "baseline", "approver", "approved"}
    assert parameters["host"]["required"] is True
    assert parameters["settle_minutes"] | {"help": ""} == {
        "name": "settle_minutes",
        "type": "float",
        "required": False,
        "default": 10.0,
        "help": "",
    }


def test_the_lab_says_what_is_wrong_and_how_each_runbook_is_right_to_come_out() -> None:
    listed = call("lab", "list", "--json")
    by_name = {one["scenario"]: one for one in listed}
    right = by_name["gpu-missing"]["runbooks"]["reboot-verification"]
    assert right["parameters"]["reboot"] is True
    assert (right["verdict"], right["status"], right["exit_code"]) == ("FAIL", "completed", 1)
    assert all(one["wrong"] or one["runbooks"]["reboot-verification"]["verdict"] == "PASS" for one in listed)


@pytest.mark.parametrize(
    "words",
    [
        ("reboot-verification",),
        ("reboot-verifcation", "--host", "lab:healthy"),
        ("reboot-verification", "--host", "lab:helthy"),
        ("reboot-verification", "--host", "lab:healthy", "-p", "settle_minute=1"),
        ("reboot-verification", "--host", "lab:healthy", "-p", "settle_minutes=soon"),
        ("reboot-verification", "--host", "lab:healthy", "-p", "settle_minutes"),
        ("reboot-verification", "--host", "lab:healthy", "-p", "reboot=true", "-p", "reboot=false"),
        ("reboot-verification", "--host", "lab:healthy", "-p", "host=lab:gpu-missing"),
        ("reboot-verification", "--host", "lab:healthy", "--approve", "sha256:" + "0" * 64),
        ("reboot-verification", "--host", "no-such-host.invalid"),
    ],
)
def test_what_is_wrong_is_refused_before_contact_and_leaves_no_record(words: tuple[str, ...], tmp_path: Path) -> None:
    answer = call("run", *words, "--json", "--outputs", str(tmp_path / "outputs"), code=2)
    assert answer["status"] == "refused"
    assert answer["exit_code"] == 2
    assert answer["record"] is None
    assert "→" in answer["message"], "a refusal says what to do"
    assert not (tmp_path / "outputs").exists()


def test_an_unknown_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["show", "7f3a2c", "--outputs", str(tmp_path)])
    assert isinstance(done.exception, NoSuchRun)
    assert not isinstance(done.exception, BadParameter)


def test_what_a_machine_calls_itself_is_never_taken_for_markup() -> None:
    said = io.StringIO()
    progress = Progress(SafeConsole(file=said, width=200))
    identity = {"hostname": "[/bold]", "machine_id": "0" * 32, "boot_id": "1" * 32}
    entry = {"ts": "2026-11-29T03:00:00.000Z", "event": "host.proven", "data": {"identity": identity, "note": "first contact"}}
    progress(entry)
    finding = {"verdict": "FAIL", "subject": "[red]", "reason": "[/] said \x1b[31mred", "what_to_do": ""}
    progress({**entry, "event": "finding", "data": finding})
    assert "[/bold] answers" in said.getvalue()
    assert "[red]: [/] said ␛[31mred" in said.getvalue()


def test_a_terminal_obeys_no_machine() -> None:
    said = io.StringIO()
    console = SafeConsole(file=said, width=200, force_terminal=True, highlight=False)
    hostile = "\x1b]0;owned\x07 \x9b2J \r\b\x00 exe.\u202etxt"
    table = Table()
    table.add_column("host")
    table.add_row(Text(hostile))
    console.print(table)
    console.print(hostile, markup=False, style="bold")
    assert "\x1b[1m" in said.getvalue(), "our own colours stay"
    assert not set("\x07\x9b\r\b\x00\u202e") & set(said.getvalue())
    assert "\x1b]" not in said.getvalue()
    assert "␛]0;owned␇ \\x9b2J ␍␈␀ exe.\\u202etxt" in said.getvalue()


def test_a_long_reason_is_cut_on_the_terminal() -> None:
    said = io.StringIO()
    finding = {"verdict": "FAIL", "subject": "", "reason": "x" * 100_000, "what_to_do": ""}
    Progress(SafeConsole(file=said, width=200))({"ts": "2026-11-29T03:00:00.000Z", "event": "finding", "data": finding})
    assert len(said.getvalue()) < 2000 and "(98500 more characters in record.json)" in said.getvalue()


def test_a_run_that_did_not_end_has_no_verdict_and_a_kept_one_says_what_became_of_it(tmp_path: Path) -> None:
    kept, back, dead = (f"20261129T0{n}0000Z-mtp-enablement-gpu01-00000{n}" for n in (1, 2, 3))
    closed(tmp_path, kept, summary="Kept: PASS_WITH_LIMITS.")
    closed(tmp_path, back, runbook="rollback", continues=kept, summary="Taken back.")
    opened(tmp_path, dead)[1].close()
    words = ("--outputs", str(tmp_path))
    listed = {one["run_id"]: one for one in call("runs", "--json", *words)}
    assert (listed[dead]["verdict"], listed[dead]["stands"]) == (None, "begun, not ended")
    assert "its process is gone" in listed[dead]["remark"]
    assert (listed[kept]["verdict"], listed[kept]["later"]) == ("PASS", f"taken back by {back}")
    lines = CliRunner().invoke(app, ["runs", *words]).stdout.splitlines()
    assert lines[0].split() == ["–", "begun,", "not", "ended", "gpu01", dead]
    assert f"later: taken back by {back}" in lines[-1]
    shown = CliRunner().invoke(app, ["show", kept, *words]).stdout
    assert "Kept: PASS_WITH_LIMITS." in shown and f"later: taken back by {back}" in shown
    assert "its process is gone" in CliRunner().invoke(app, ["show", dead, *words]).stdout
    assert call("show", kept, "--json", *words)["later"] == f"taken back by {back}"


OUTCOME = Outcome("r1", "mtp-enablement", "gpu01", "completed", "WARN", None, 0, [], None, "/records/r1")


def printed(outcome: Outcome, capsys: pytest.CaptureFixture[str], plan: dict[str, Any] | None = None) -> list[str]:
    progress = Progress()
    progress.plan = plan
    _print_outcome(outcome, progress, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_the_last_lines_begin_with_the_outcome_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"verdict": "WARN", "subject": "llm", "reason": "slower than said", "what_to_do": "Look closer."}
    lines = printed(replace(OUTCOME, summary="Kept: PASS_WITH_LIMITS (the gain is 1.4).", problems=[bad]), capsys)
    assert lines == [
        "Kept: PASS_WITH_LIMITS (the gain is 1.4).",
        "WARN · completed · exit code 0",
        "WARN    llm: slower than said",
        "        → Look closer.",
        "record: /records/r1",
    ]


def test_a_conclusion_is_told_with_its_hypothesis_its_reason_and_its_scope(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "outcome": "refuted",
        "hypothesis": "every pair is direct.",
        "because": "two go through host memory",
        "scope": "gpu01",
    }
    lines = printed(replace(OUTCOME, conclusion="refuted", concluded=said), capsys)
    assert lines[:3] == [
        "Hypothesis refuted: every pair is direct. Refuted: two go through host memory",
        "  holds for: gpu01",
        "concluded: REFUTED · WARN · completed · exit code 0",
    ]


def test_a_gate_shows_the_difference_and_short_digests(capsys: pytest.CaptureFixture[str]) -> None:
    digest = "0123456789ab" + "c" * 52
    plan = {
        "title": "Extra flags",
        "host": {"name": "gpu01"},
        "actions": [{"what": "install", "argv": ["install-file", f"/etc/[x] {digest}"]}],
        "undo": [{"what": f"put back {digest}"}],
        "facts": [],
        "cannot_undo": [],
        "expected_s": 60.0,
        "diff": "--- old\n+++ new\n" + "\n".join(f"+[bold]line {n}" for n in range(100)),
    }
    waiting = {"digest": f"sha256:{digest}", "title": "Extra flags", "host": "gpu01", "issued_at": ""}
    lines = printed(replace(OUTCOME, status="stopped-at-gate", waiting_for=waiting), capsys, plan)
    assert "  would do: install  install-file /etc/[x] 0123456789ab…" in lines
    assert "  taken back by: put back 0123456789ab…" in lines
    assert lines[lines.index("  the difference:") + 1] == "    --- old"
    assert "    +[bold]line 57" in lines and "    +[bold]line 58" not in lines
    assert "    … 42 more lines in /records/r1/record.html" in lines
    assert f"  --approve sha256:{digest} --approver YOUR-NAME" in lines, "what is typed is whole"


def test_what_is_printed_is_what_the_record_says(tmp_path: Path) -> None:
    run_id = "20261129T010000Z-mtp-enablement-gpu01-000001"
    closed(tmp_path, run_id, summary="Kept.")
    found = told(Archive(tmp_path).load(run_id))
    assert found == {"summary": "Kept.", "concluded": None, "problems": []}
    assert json.loads(replace(OUTCOME, **found).to_json())["summary"] == "Kept."


def test_the_lab_lists_the_scenarios_of_one_runbook_one_a_line() -> None:
    done = CliRunner().invoke(app, ["lab", "list", "--runbook", "p2p-pair-matrix"])
    lines = done.stdout.splitlines()
    assert lines and all(len(line.split("\t")) == 3 and line.startswith("lab:") for line in lines)
    assert all(line.split("\t")[2].startswith("p2p-pair-matrix: ") for line in lines)
    assert len(lines) == len(call("lab", "list", "--json", "--runbook", "p2p-pair-matrix"))
    assert len(lines) < len(call("lab", "list", "--json"))
    assert isinstance(CliRunner().invoke(app, ["lab", "list", "--runbook", "p2p"]).exception, BadParameter)

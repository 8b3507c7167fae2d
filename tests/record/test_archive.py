"""Finding records again, and closing what dead runners left."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.archive import Archive, keep_beside, new_run_dir
from proofbook.errors import BadParameter, NoSuchRun, RecordError
from proofbook.journal import MANIFEST
from proofbook.model import Finding, Verdict
from proofbook.run import runner_facts

MACHINE = "3f1c9a52d0b84e6f9a1177c2e05d4b38"
RUN = "20261129T111544Z-reboot-verification-gpu01-7f3a2c"
AT = datetime(2026, 11, 29, 11, 15, 44, tzinfo=UTC)


def test_folders_are_by_date_and_say_what_is_in_them(outputs: Path) -> None:
    folder = new_run_dir(
        outputs, "reboot-verification", "lab:healthy", AT, "20261129T111544Z-reboot-verification-lab-healthy-7f3a2c"
    )
    assert (
        folder.relative_to(outputs).as_posix()
        == "runs/2026/11/29/20261129T111544Z_reboot-verification_lab-healthy_7f3a2c.partial"
    )
    with pytest.raises(RecordError, match="already"):
        new_run_dir(outputs, "reboot-verification", "lab:healthy", AT, "20261129T111544Z-reboot-verification-lab-healthy-7f3a2c")
    for bad in ("x", "20261129T111545Z-r-h-7f", "../../20261129T111544Z-r-h-7f", "20261129T111544Z-r-h-../x"):
        with pytest.raises(BadParameter):
            new_run_dir(outputs, "r", "h", AT, bad)
    hostile = new_run_dir(outputs, "r", "../../etc/é x", AT, "20261129T111544Z-r-h-7f")
    assert hostile.parent == folder.parent


def test_a_run_is_found_by_its_id_a_beginning_or_an_end(outputs: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run()
    other = write_run(run_id="20261129T111544Z-reboot-verification-gpu01-beef01")
    book = Archive(outputs)
    assert book.folder_of(RUN) == folder
    assert book.find("7f3a2c") == RUN
    assert book.load("beef01").run_id == other.name.replace("_", "-")
    with pytest.raises(NoSuchRun, match="fits 2 runs"):
        book.find("20261129T11")
    with pytest.raises(NoSuchRun) as told:
        book.load("20261129T111544Z-reboot-verification-gpu01-7f3a2d")
    assert "7f3a2c" in told.value.hint
    for text in ("", "nothing", "../..", "*"):
        with pytest.raises(NoSuchRun):
            book.find(text)


def test_lists_are_newest_first_and_filtered(
    outputs: Path, write_run: Callable[..., Path], script: Callable[..., object]
) -> None:
    write_run()
    s = script()
    s.open()
    book = Archive(outputs)
    assert [(b.run_id[-6:], b.status, b.verdict) for b in book.runs()] == [
        ("aaaaaa", "running", "UNKNOWN"),
        ("7f3a2c", "completed", "FAIL"),
    ]
    assert [b.run_id for b in book.runs(verdict="FAIL")] == [RUN]
    assert [b.run_id for b in book.runs(status="completed", host="gpu01", runbook="reboot-verification")] == [RUN]
    assert book.runs(host="gpu02") == []
    assert len(book.runs(limit=1)) == 1
    assert json.loads(json.dumps(book.runs()[1].brief()))["counts"]["FAIL"] == 2
    assert Archive(outputs / "nowhere").runs() == []


def test_a_damaged_folder_does_not_hide_the_others(outputs: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run()
    bad = folder.with_name("20261129T111544Z_x_y_000000")
    bad.mkdir()
    (bad / "record.json").write_text('{"schema": 1, ')
    newer = folder.with_name("20261129T111544Z_x_y_000001")
    newer.mkdir()
    (newer / "record.json").write_text((folder / "record.json").read_text().replace('"schema": 1', '"schema": 99', 1))
    book = Archive(outputs)
    assert [b.run_id for b in book.runs()] == [RUN]
    assert {p.name for p, _ in book.damaged()} == {bad.name, newer.name}


# ------------------------------------------------------------------------------------------- verifying


def test_evidence_that_was_changed_together_with_its_manifest_is_found_by_the_journal(
    outputs: Path, write_run: Callable[..., Path]
) -> None:
    folder = write_run()
    folder.chmod(0o755)
    (evidence, *_) = sorted(p for p in (folder / "evidence").iterdir() if p.is_file())
    for path in (evidence, folder / MANIFEST):
        path.chmod(0o644)
    before = hashlib.sha256(evidence.read_bytes()).hexdigest()
    evidence.write_bytes(b"all is well\n")
    after = hashlib.sha256(evidence.read_bytes()).hexdigest()
    manifest = (folder / MANIFEST).read_text()
    line = f"{before}  evidence/{evidence.name}\n"
    assert line in manifest
    (folder / MANIFEST).write_text(manifest.replace(line, line.replace(before, after)))
    assert Archive(outputs).verify("7f3a2c") == [f"evidence/{evidence.name}: not what the journal saw"]


@pytest.mark.parametrize("spoilt", [gzip.compress(b"all is well\n"), b"not gzip at all"], ids=["other bytes", "no gzip"])
def test_compressed_evidence_that_was_changed_with_its_manifest_is_found_by_the_journal(
    outputs: Path, write_run: Callable[..., Path], spoilt: bytes
) -> None:
    folder = opened_up(write_run())
    (evidence,) = (folder / "evidence").glob("*.gz")
    before = hashlib.sha256(evidence.read_bytes()).hexdigest()
    evidence.write_bytes(spoilt)
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text().replace(before, hashlib.sha256(spoilt).hexdigest()))
    (trouble,) = Archive(outputs).verify("7f3a2c")
    assert trouble.startswith(f"evidence/{evidence.name}: ")


def opened_up(folder: Path) -> Path:
    """A sealed record whose files may be written again."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def test_a_record_that_was_rewritten_with_its_manifest_is_found_by_the_journal(
    outputs: Path, write_run: Callable[..., Path]
) -> None:
    folder = opened_up(write_run())
    record, manifest = folder / "record.json", folder / "manifest-sha256.txt"
    before = hashlib.sha256(record.read_bytes()).hexdigest()
    told = json.loads(record.read_bytes())
    told["verdict"], told["exit_code"] = "PASS" if told["verdict"] != "PASS" else "FAIL", 9
    record.write_text(json.dumps(told))
    manifest.write_text(manifest.read_text().replace(before, hashlib.sha256(record.read_bytes()).hexdigest()))
    assert Archive(outputs).verify("7f3a2c") == ["record.json: not what the journal says (exit_code, verdict)"]


def test_how_another_version_worded_its_own_sentences_is_no_damage(outputs: Path, write_run: Callable[..., Path]) -> None:
    folder = opened_up(write_run())
    record, manifest = folder / "record.json", folder / "manifest-sha256.txt"
    before = record.read_bytes()
    told = json.loads(before)
    assert told["not_verified"], "a run that leaves something open"

    def verified() -> list[str]:
        record.write_text(json.dumps(told))
        digest, then = (hashlib.sha256(data).hexdigest() for data in (record.read_bytes(), before))
        manifest.write_text(manifest_text.replace(then, digest))
        return Archive(outputs).verify("7f3a2c")

    manifest_text = manifest.read_text()
    told["headline"], told["not_verified"][0]["what"] = "In other words", "In other words"
    assert verified() == []
    told["not_verified"][0]["why"] = "Nothing of the kind"
    assert verified() == ["record.json: not what the journal says (not_verified)"]


def test_links_pipes_and_strange_folders_are_no_part_of_a_record(outputs: Path, write_run: Callable[..., Path]) -> None:
    folder = opened_up(write_run())
    (folder / "evidence" / "link").symlink_to("/etc/hostname")
    os.mkfifo(folder / "pipe")
    (folder / "strange").mkdir()
    assert sorted(Archive(outputs).verify("7f3a2c")) == [
        "evidence/link: not a plain file; a record has only such",
        "pipe: not a plain file; a record has only such",
        "strange: a folder that the manifest does not know",
    ]


def test_a_manifest_that_is_no_text_is_damage_not_a_traceback(outputs: Path, write_run: Callable[..., Path]) -> None:
    (opened_up(write_run()) / "manifest-sha256.txt").write_bytes(b"\xff\xfe\n")
    assert Archive(outputs).verify("7f3a2c")[0].startswith("manifest-sha256.txt: cannot be read")


def test_an_untouched_record_verifies(outputs: Path, write_run: Callable[..., Path]) -> None:
    write_run()
    assert Archive(outputs).verify("7f3a2c") == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("edit", ["record.html: changed since the seal"]),
        ("remove", ["record.md: missing"]),
        ("add", ["extra.txt: not in the manifest, it was added after the seal"]),
        ("journal", ["journal.jsonl: changed since the seal", "journal.jsonl: line 5 does not continue line 4"]),
    ],
)
def test_a_touched_record_does_not(outputs: Path, write_run: Callable[..., Path], what: str, told: list[str]) -> None:
    folder = write_run()
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    if what == "edit":
        (folder / "record.html").write_text((folder / "record.html").read_text().replace("FAIL", "PASS"))
    elif what == "remove":
        (folder / "record.md").unlink()
    elif what == "add":
        (folder / "extra.txt").write_text("x")
    else:
        journal = (folder / "journal.jsonl").read_text()
        lines = journal.splitlines(keepends=True)
        lines[3] = lines[3].replace('"step"', '"stop"')
        (folder / "journal.jsonl").write_text("".join(lines))
    troubles = Archive(outputs).verify("7f3a2c")
    assert len(troubles) == len(told)
    for trouble, start in zip(troubles, told, strict=True):
        assert trouble.startswith(start)


def test_an_open_run_is_not_sealed(outputs: Path, script: Callable[..., object]) -> None:
    s = script()
    s.open()
    assert Archive(outputs).verify("aaaaaa")[0].startswith("not sealed")


# ------------------------------------------------------------------------------- what runs ask of runs


def stopped(s: object, digest: str) -> Path:
    s.open()
    s.proven("first contact")
    plan = {
        "digest": digest,
        "title": "Reboot",
        "actions": [],
        "undo": [],
        "diff": "",
        "cannot_undo": [],
        "facts": [],
        "expected_s": 1.0,
    }
    s.say("plan", {**plan, "issued_at": "2026-11-29T11:15:50+00:00", "host": {"hostname": "gpu-hv1"}})
    s.say("gate", {"digest": digest, "decision": "waiting", "approver": "", "how": "", "text": ""})
    return s.close("stopped-at-gate", "UNKNOWN", "Waiting.", 3)


def test_a_run_at_its_gate_is_found_by_its_digest(
    outputs: Path, script: Callable[..., object], write_run: Callable[..., Path]
) -> None:
    write_run()
    stopped(script(), "sha256:abc")
    book = Archive(outputs)
    found = book.stopped_at_gate("sha256:abc")
    assert found is not None and found.run_id.endswith("aaaaaa")
    assert book.issued("sha256:abc") == (found.run_id, datetime(2026, 11, 29, 11, 15, 50, tzinfo=UTC))
    assert book.stopped_at_gate("sha256:other") is None
    assert book.issued("sha256:other") is None


def kept(s: object, verdict: str, value: str) -> Path:
    s.open()
    s.proven("first contact")
    s.say("configuration", {"x.service": {"argv": ["serve", value], "environment": {"A": "1"}}})
    s.say("value", {"name": "baseline", "schema": 1, "value": {"v": value}})
    return s.close("completed", verdict, "", 0)


def test_the_last_kept_configuration_is_of_a_good_run_of_this_machine(outputs: Path, script: Callable[..., object]) -> None:
    kept(script("20261129T111544Z-reboot-verification-gpu01-000001"), "PASS", "one")
    kept(script("20261129T111544Z-reboot-verification-gpu01-000002"), "WARN", "two")
    kept(script("20261129T111544Z-reboot-verification-gpu01-000003"), "FAIL", "three")
    book = Archive(outputs)
    run_id, found = book.last_kept(MACHINE, "x.service") or ("", {})
    assert (run_id[-6:], found["argv"]) == ("000002", ["serve", "two"])
    assert book.last_kept(MACHINE, "y.service") is None
    assert book.last_kept("another", "x.service") is None
    assert book.stored_value("000001", "baseline") == {"schema": 1, "value": {"v": "one"}}
    with pytest.raises(NoSuchRun, match="stored no value"):
        book.stored_value("000001", "other")
    assert book.stored_value("000001", "baseline", machine_id=MACHINE)["schema"] == 1
    with pytest.raises(NoSuchRun, match="of another machine"):
        book.stored_value("000001", "baseline", machine_id="another")
    run_id, stored = book.last_stored(MACHINE, "reboot-verification", "baseline") or ("", {})
    assert (run_id[-6:], stored["value"]) == ("000003", {"v": "three"}), "of the newest that completed, however it was judged"
    assert book.last_stored("another", "reboot-verification", "baseline") is None
    assert book.last_stored(MACHINE, "reboot-verification", "other") is None


# ------------------------------------------------------------------------------------------- dead runners


def dead_runner() -> dict[str, object]:
    """A process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    facts = {**runner_facts(), "pid": child.pid, "pid_started": "1"}
    child.wait()
    return facts


def test_a_sweep_closes_what_a_dead_runner_left(outputs: Path, script: Callable[..., object]) -> None:
    s = script()
    s.open(runner=dead_runner())
    s.proven("first contact")
    s.step("check", "first")
    s.finding("t", Finding("c", Verdict.PASS, "fine"))
    s.done()
    s.step("apply", "Reboot")
    s.say("act.intent", {"act": 1, "what": "reboot", "argv": ["systemctl", "reboot"], "host": "gpu01", "digest": None})
    s.journal.close()
    with (s.folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"v":1,"seq":')
    book = Archive(outputs)
    assert book.sweep() == [s.run_id]
    record = book.load(s.run_id)
    assert (record.status, record.verdict, record.exit_code) == ("lost", "UNKNOWN", 7)
    assert "Acting: reboot" in record.summary
    assert book.verify(s.run_id) == []
    assert book.sweep() == []


def test_a_sweep_leaves_living_runs_and_other_runners_alone(outputs: Path, script: Callable[..., object]) -> None:
    mine = script("20261129T111544Z-reboot-verification-gpu01-000001")
    mine.open(runner=runner_facts())
    theirs = script("20261129T111544Z-reboot-verification-gpu01-000002")
    theirs.open(runner={**dead_runner(), "host": "another-runner"})
    unopened = script("20261129T111544Z-reboot-verification-gpu01-000003")
    book = Archive(outputs)
    assert book.sweep() == []
    assert book.runner_alive(mine.folder) and book.runner_alive(theirs.folder)
    assert unopened.folder.exists()


def test_a_reused_pid_and_a_rebooted_runner_are_dead(outputs: Path, script: Callable[..., object]) -> None:
    reused = script("20261129T111544Z-reboot-verification-gpu01-000001")
    reused.open(runner={**runner_facts(), "pid_started": "1"})
    rebooted = script("20261129T111544Z-reboot-verification-gpu01-000002")
    rebooted.open(runner={**runner_facts(), "boot_id": "0" * 32})
    book = Archive(outputs)
    assert not book.runner_alive(reused.folder)
    assert not book.runner_alive(rebooted.folder)
    assert book.sweep(only=reused.run_id) == [reused.run_id]
    assert book.sweep() == [rebooted.run_id]


def test_a_sweep_finishes_a_seal_that_was_interrupted(outputs: Path, script: Callable[..., object]) -> None:
    s = script()
    s.open(runner=dead_runner())
    folder = s.close("completed", "PASS", "", 0)
    os.rename(folder, folder.with_name(folder.name + ".partial"))
    book = Archive(outputs)
    assert book.sweep() == [s.run_id]
    assert book.verify(s.run_id) == []


def test_a_closed_run_keeps_its_own_status(outputs: Path, script: Callable[..., object]) -> None:
    s = script()
    s.open(runner=dead_runner())
    s.journal.append("run.closing", {"status": "completed", "verdict": "PASS", "summary": "fine", "exit_code": 0})
    book = Archive(outputs)
    assert book.sweep() == [s.run_id]
    assert book.load(s.run_id).status == "completed"


# ------------------------------------------------------------------------------------- beside the seal


def test_annotations_stay_outside_the_seal(outputs: Path, write_run: Callable[..., Path]) -> None:
    write_run()
    book = Archive(outputs)
    assert book.annotations(RUN) == []
    book.annotate("7f3a2c", "riser replaced; HF_TOKEN=abc123", author="bob")
    book.annotate("7f3a2c", "seen again", author="alice", kind="follow-up")
    assert [(a["author"], a["kind"], a["text"]) for a in book.annotations(RUN)] == [
        ("bob", "remark", "riser replaced; HF_TOKEN=[redacted:HF_TOKEN]"),
        ("alice", "follow-up", "seen again"),
    ]
    assert book.verify(RUN) == []


def test_an_executed_notebook_is_kept_beside_and_redacted(outputs: Path, write_run: Callable[..., Path]) -> None:
    folder = write_run()
    secret = "hf_" + "a1" * 17
    path = keep_beside(folder, "executed.ipynb", json.dumps({"cells": [{"source": f"HF_TOKEN='{secret}'\n"}]}))
    assert path == outputs / "annotations" / RUN / "executed.ipynb"
    assert secret not in path.read_text()
    assert json.loads(path.read_text())["cells"]
    assert Archive(outputs).verify(RUN) == []

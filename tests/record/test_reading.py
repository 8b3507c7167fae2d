"""A reviewer reads records: what was not verified first, evidence under every finding, and whether the seal still holds."""

from __future__ import annotations

import gc
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from proofbook.errors import NoSuchRun, RecordError
from proofbook.reading import Reading, Shelf, differences, open_archive

EXAMPLE = Path(__file__).resolve().parents[2] / "notebooks" / "example-archive.tar.xz"


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return open_archive(EXAMPLE)


@pytest.fixture(scope="module")
def runs(shelf: Shelf) -> tuple[Reading, Reading, Reading]:
    """The example's three runs, oldest first: verified, stopped at the gate, rebooted."""
    verified, stopped, rebooted = (shelf.read(b.run_id) for b in reversed(shelf.archive.runs()))
    return verified, stopped, rebooted


def test_the_example_verifies_and_tells_its_story(runs: tuple[Reading, Reading, Reading]) -> None:
    assert [(r.record.status, r.record.verdict) for r in runs] == [
        ("completed", "PASS"),
        ("stopped-at-gate", "UNKNOWN"),
        ("completed", "FAIL"),
    ]
    for reading in runs:
        assert repr(reading.seal).startswith("Unchanged since it was sealed")
    assert runs[2].record.continues == runs[1].record.run_id


def test_what_was_not_verified_stands_before_everything_else(runs: tuple[Reading, Reading, Reading]) -> None:
    told = repr(runs[2].verdict).splitlines()
    assert told[0].startswith("✗ FAIL")
    assert told[1].startswith("  not verified")
    assert "run ended early" in repr(runs[1].not_verified)


def test_evidence_names_the_command_the_file_and_the_line(runs: tuple[Reading, Reading, Reading]) -> None:
    told = repr(runs[2].evidence("xid-79"))
    assert "$ journalctl -k -b 0 -o json --no-pager" in told
    (line,) = [line for line in told.splitlines() if line.startswith("       | [")]
    assert line.endswith("79, GPU has fallen off the bus.")
    file = next(word for word in told.split() if word.startswith("evidence/"))
    assert (runs[2].folder / file).is_file()


def test_evidence_shows_all_of_a_short_output_that_names_nothing(runs: tuple[Reading, Reading, Reading]) -> None:
    assert "| status: running" in repr(runs[2].evidence("CUDA"))


def test_evidence_of_nothing_is_refused(runs: tuple[Reading, Reading, Reading]) -> None:
    with pytest.raises(NoSuchRun, match="frobnicate"):
        runs[0].evidence("frobnicate")


def test_only_what_changed_is_shown_and_the_rest_is_counted(runs: tuple[Reading, Reading, Reading]) -> None:
    told = repr(runs[2].changed)
    assert "link width" in told and "kernel command line" not in told
    assert told.splitlines()[-1].endswith("more are the same before and after.")
    assert "kernel command line" in repr(runs[2].before_after)
    assert "compared no before" in repr(runs[1].before_after)


def test_a_comparison_lists_differences_alone(runs: tuple[Reading, Reading, Reading]) -> None:
    rows, same = differences(runs[0].record, runs[2].record)
    told = {row[0]: row[1:] for row in rows}
    assert told["verdict"] == ("PASS", "FAIL")
    assert told["nvidia.GpusPresent 0000:41:00.0"][0] == "PASS"
    assert "machine_id" not in told and "status" not in told
    assert same > 20
    assert differences(runs[2].record, runs[2].record)[0] == []


def test_everything_reads_as_text_and_as_plain_html(shelf: Shelf, runs: tuple[Reading, Reading, Reading]) -> None:
    reading = runs[2]
    shown = (shelf, reading.verdict, reading.not_verified, reading.seal, reading.approvals, reading.findings, reading.problems)
    for each in (*shown, reading.changed, reading.before_after, reading.compared_with(runs[0])):
        assert "<style" not in each._repr_html_() and "<script" not in each._repr_html_()
        assert "object at 0x" not in repr(each)
    assert reading.timeline.png.startswith(b"\x89PNG")
    assert "Apply: Reboot gpu-hv1" in repr(reading.timeline)


def test_a_changed_file_is_told(runs: tuple[Reading, Reading, Reading], tmp_path: Path) -> None:
    own = tmp_path / "outputs"
    shutil.copytree(runs[0].folder.parents[4], own)
    copy = open_archive(own).read(runs[0].record.run_id)
    (copy.folder / "record.md").write_text("all is well")
    assert repr(copy.seal).splitlines() == ["NOT as it was sealed:", "  - record.md: changed since the seal"]


def test_a_record_outlives_the_shelf_that_it_came_from(runs: tuple[Reading, Reading, Reading]) -> None:
    reading = open_archive(EXAMPLE).read(runs[0].record.run_id)
    gc.collect()
    assert repr(reading.seal).startswith("Unchanged since it was sealed")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no runs/ folder"):
        open_archive(tmp_path)
    (tmp_path / "x.tar").write_bytes(b"nothing of the kind")
    with pytest.raises(RecordError, match="cannot be unpacked"):
        open_archive(tmp_path / "x.tar")


def test_a_tar_cannot_write_outside_of_its_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as packed:
        member = tarfile.TarInfo("../escaped")
        member.size = 4
        packed.addfile(member, io.BytesIO(b"oops"))
    with pytest.raises(RecordError, match="cannot be unpacked"):
        open_archive(tmp_path / "bad.tar")
    assert not (tmp_path.parent / "escaped").exists()

"""The journal survives what kills runs, and shows what was done to it."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.errors import DiskFull, RecordError, Sealed
from proofbook.journal import GENESIS, JOURNAL, MANIFEST, Journal, Writer, parse_journal, plain, read_journal, read_output
from proofbook.model import Finding, Verdict
from proofbook.redact import Redactor

AT = datetime(2026, 11, 29, 11, 15, 44, 5000, tzinfo=UTC)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "run.partial", Redactor())


@pytest.fixture
def journal(writer: Writer) -> Journal:
    return Journal(writer, "r1", lambda: AT)


def lines(writer: Writer) -> list[bytes]:
    return (writer.run_dir / JOURNAL).read_bytes().splitlines()


def test_a_line_is_what_the_schema_says(writer: Writer, journal: Journal) -> None:
    assert journal.append("finding", {"verdict": Verdict.FAIL, "at": AT, "rows": (1, 2)}) == 0
    assert journal.append("note", {"text": "HF_TOKEN=abc123 über"}, durable=True) == 1
    first, second = (json.loads(line) for line in lines(writer))
    assert list(first) == ["v", "seq", "ts", "run", "event", "data", "prev"]
    assert first["ts"] == "2026-11-29T11:15:44.005Z"
    assert first["prev"] == GENESIS
    assert first["data"] == {"verdict": "FAIL", "at": "2026-11-29T11:15:44.005000Z", "rows": [1, 2]}
    assert second["data"] == {"text": "HF_TOKEN=[redacted:HF_TOKEN] über"}
    reading = read_journal(writer.run_dir / JOURNAL)
    assert (reading.intact, reading.trouble, reading.sealed, len(reading.events)) == (True, "", False, 2)


def test_nan_and_undecodable_text_stay_json(writer: Writer, journal: Journal) -> None:
    journal.append("value", {"x": float("nan"), "y": [float("inf")], "s": b"\x80".decode("utf-8", "surrogateescape")})
    assert json.loads(lines(writer)[0])["data"] == {"x": None, "y": [None], "s": "\udc80"}


def test_the_seal_is_the_last_line(writer: Writer, journal: Journal) -> None:
    journal.append("note", {"text": "x"})
    journal.seal()
    reading = read_journal(writer.run_dir / JOURNAL)
    assert reading.sealed and reading.intact
    assert reading.events[-1]["data"]["lines"] == 1
    with pytest.raises(Sealed):
        journal.append("note", {"text": "y"})
    with (writer.run_dir / JOURNAL).open("ab") as file:
        file.write(b"{}")
    assert "follow the seal" in read_journal(writer.run_dir / JOURNAL).trouble


@pytest.mark.parametrize("what", ["edit", "drop", "swap", "insert"])
def test_tampering_breaks_the_chain(writer: Writer, journal: Journal, what: str) -> None:
    for n in range(4):
        journal.append("note", {"text": f"n{n}"})
    journal.seal()
    kept = lines(writer)
    if what == "edit":
        kept[1] = kept[1].replace(b"n1", b"nX")
    elif what == "drop":
        del kept[1]
    elif what == "swap":
        kept[1], kept[2] = kept[2], kept[1]
    else:
        kept.insert(2, kept[2])
    reading = parse_journal(b"\n".join(kept) + b"\n")
    assert not reading.intact
    assert reading.trouble
    assert len(reading.events) < 5


def test_every_cut_is_readable(writer: Writer, journal: Journal) -> None:
    for n in range(3):
        journal.append("note", {"text": f"n{n} ü"})
    data = (writer.run_dir / JOURNAL).read_bytes()
    for cut in range(len(data) + 1):
        reading = parse_journal(data[:cut])
        assert reading.intact
        assert len(reading.events) == data[:cut].count(b"\n")
        assert bool(reading.trouble) == bool(cut and data[cut - 1 : cut] != b"\n")


@given(st.binary(max_size=300))
def test_rubbish_never_raises(data: bytes) -> None:
    assert len(parse_journal(data).events) <= data.count(b"\n") + 1


def test_going_on_after_a_torn_line(writer: Writer, journal: Journal) -> None:
    journal.append("note", {"text": "whole"})
    journal.close()
    with (writer.run_dir / JOURNAL).open("ab") as file:
        file.write(b'{"v":1,"seq":1,"ts":"2026')
    again = Journal(writer, "r1", lambda: AT)
    again.append("note", {"text": "after"})
    again.seal()
    reading = read_journal(writer.run_dir / JOURNAL)
    assert reading.intact and reading.sealed
    assert [e["data"].get("text") for e in reading.events][:3] == [
        "whole",
        "25 bytes of an unfinished last line were cut off",
        "after",
    ]


def test_a_killed_writer_leaves_a_readable_journal(tmp_path: Path) -> None:
    program = (
        "import sys, datetime, pathlib\n"
        "from proofbook.journal import *; from proofbook.redact import Redactor\n"
        "j = Journal(Writer(pathlib.Path(sys.argv[1]), Redactor()), 'r', lambda: datetime.datetime.now(datetime.UTC))\n"
        "while True:\n"
        "    n = j.append('note', {'text': 'x' * 500})\n"
        "    if n == 50: print('go', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "lib")}
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "r.partial")], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"go\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    reading = read_journal(tmp_path / "r.partial" / JOURNAL)
    assert reading.intact
    assert len(reading.events) > 50


def test_threads_do_not_tear_the_chain(writer: Writer, journal: Journal) -> None:
    threads = [threading.Thread(target=lambda n=n: [journal.append("note", {"n": n}) for _ in range(50)]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = read_journal(writer.run_dir / JOURNAL)
    assert reading.intact and len(reading.events) == 400


def test_a_full_disk_is_told_and_leaves_whole_lines(writer: Writer, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append("note", {"text": "before"})
    write, room = os.write, [20]

    def nearly_full(fd: int, data: Any) -> int:
        if (writer.run_dir / ".reserve").exists():
            if room[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = bytes(data[: room[0]])
            room[0] -= len(part)
            return write(fd, part)
        return write(fd, data)

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(DiskFull, match="reserve"):
        journal.append("run.closing", {"status": "aborted"})
    reading = read_journal(writer.run_dir / JOURNAL)
    assert reading.intact and reading.torn == 0
    assert [e["event"] for e in reading.events] == ["note", "run.closing"]
    journal.append("note", {"text": "room enough for one more"})
    assert read_journal(writer.run_dir / JOURNAL).intact, "what follows continues the line that was written from the reserve"

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull, match="no space left"):
        journal.append("note", {"text": "lost"})
    assert len(read_journal(writer.run_dir / JOURNAL).events) == 3


# ---------------------------------------------------------------------------------------------- writer


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_nothing_is_written_outside(writer: Writer, path: str) -> None:
    with pytest.raises(RecordError):
        writer.write_text(path, "x")


def test_links_do_not_lead_out(writer: Writer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (writer.run_dir / "evidence").symlink_to(tmp_path / "elsewhere")
    (writer.run_dir / "f").symlink_to(tmp_path / "target")
    for path in ("evidence/x", "f"):
        with pytest.raises(RecordError, match="link"):
            writer.write_text(path, "x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_sealed_folder_refuses(writer: Writer) -> None:
    writer.write_text(MANIFEST, "")
    with pytest.raises(Sealed):
        writer.write_text("x", "x")


def test_a_failed_write_keeps_the_old_file(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.write_text("f", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskFull):
        writer.write_text("f", "new")
    assert (writer.run_dir / "f").read_text() == "old"
    assert [p.name for p in writer.run_dir.iterdir()] == ["f"]


def test_what_was_written_is_told(writer: Writer) -> None:
    written = writer.write_bytes("evidence/e1.out", b"A=1\0API_KEY=k9\0", durable=True)
    on_disk = (writer.run_dir / "evidence/e1.out").read_bytes()
    assert on_disk == b"A=1\0API_KEY=[redacted:API_KEY]\0"
    assert (written.size, written.redactions) == (len(on_disk), 1)
    assert writer.redactor.ledger == {"variable": {"evidence/e1.out": 1}}


def test_a_long_output_is_kept_compressed_and_told_as_it_was(writer: Writer) -> None:
    said = b"API_KEY=k9 and the same again, and again\n" * 10_000
    short, long = writer.write_output("evidence/e1.out", b"short"), writer.write_output("evidence/e2.out", said)
    assert (writer.run_dir / short.path).read_bytes() == b"short" and short.path == "evidence/e1.out"
    assert long.path == "evidence/e2.out.gz" and (writer.run_dir / long.path).stat().st_size < len(said) / 50
    kept = read_output(writer.run_dir / long.path)
    assert kept == said.replace(b"k9", b"[redacted:API_KEY]")
    assert (long.sha256, long.size, long.redactions) == (hashlib.sha256(kept).hexdigest(), len(kept), 10_000)
    assert gzip.decompress((writer.run_dir / long.path).read_bytes()) == kept, "any gzip reads it"
    again = writer.write_output("evidence/e3.out", said)
    assert (writer.run_dir / again.path).read_bytes() == (writer.run_dir / long.path).read_bytes(), "no time is in it"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-4], "it is cut"),
        (lambda data: data + b"more", "something behind its end"),
        (lambda data: b"not gzip", "it is damaged"),
        (lambda data: data[:40] + bytes([data[40] ^ 0xFF]) + data[41:], "it is"),
        (lambda data: gzip.compress(bytes(300 * 1024 * 1024), 1), "too large"),
    ],
)
def test_a_spoilt_output_is_no_output(writer: Writer, spoil: Callable[[bytes], bytes], says: str) -> None:
    path = writer.run_dir / writer.write_output("evidence/e1.out", os.urandom(64_000)).path
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(OSError, match=says):
        read_output(path)


def test_a_pair_as_a_key_becomes_its_words() -> None:
    found = Finding("a", Verdict.PASS, "fine", observed={("0000:01:00.0", "0000:41:00.0"): {"OK"}})
    said = plain({"value": found, "at": AT})
    assert said["value"]["observed"] == {"0000:01:00.0 0000:41:00.0": ["OK"]}
    assert (said["value"]["verdict"], said["at"]) == ("PASS", plain(AT))
    with pytest.raises((TypeError, NotImplementedError)):
        plain({"value": object()})

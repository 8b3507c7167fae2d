"""A server that demands an API key: asked with it, refused without it before anything is changed, and it is in no file."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook.archive import Archive
from proofbook.lab.sim import client
from proofbook.launch import launch
from proofbook.record import RunRecord

from . import test_mtp_scenarios as scenarios

pytestmark = [pytest.mark.lab, pytest.mark.runbook]

SCENARIO = "mtp-api-key"
KEY = "lab-example-Zq4vX9sKd2mWz8fR"
_BLOB = re.compile(rb"[A-Za-z0-9+/_-]{24,}")


def with_the_key(folder: Path) -> list[str]:
    """Files that hold the key: as it is, in hex, or in base64 wherever it begins there."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and _holds(p.read_bytes()))


def _holds(data: bytes) -> bool:
    if KEY.encode() in data or KEY.encode().hex().encode() in data.lower():
        return True
    # WHY from four places: a blob may stand behind characters that belong to its alphabet
    return any(KEY.encode() in _decoded(blob[0][n:]) for blob in _BLOB.finditer(data) for n in range(4))


def _decoded(blob: bytes) -> bytes:
    """With its last, unpadded characters too."""
    return base64.b64decode((blob + b"A" * (-len(blob) % 4)).replace(b"-", b"+").replace(b"_", b"/"))


@pytest.fixture
def machine(lab: Path) -> Iterator[Path]:
    yield client.folder(SCENARIO)
    client.stop(SCENARIO)


def changed(record: RunRecord) -> list[str]:
    return [act["what"] for plan in record.plans for act in plan["acts"]]


def test_the_search_would_find_it(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_bytes(b'{"answer_base64":"' + base64.b64encode(b"x" * n + KEY.encode() + b"\xff") + b'"}')
    (tmp_path / "plain").write_bytes(b"\0" + KEY.encode())
    (tmp_path / "hex").write_text(KEY.encode().hex().upper())
    (tmp_path / "innocent").write_bytes(base64.b64encode(bytes(range(256))))
    assert with_the_key(tmp_path) == ["0.jsonl", "1.jsonl", "2.jsonl", "hex", "plain"]


def test_asked_with_its_key_which_is_in_no_file(machine: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_API_KEY", KEY)
    record = scenarios.play(SCENARIO, outputs)
    right = scenarios.EXPECTED[SCENARIO]
    came = {
        "verdict": record.verdict,
        "status": record.status,
        "exit_code": record.exit_code,
        "rung": record.decisions[-1]["rung"],
    }
    assert came == {name: right[name] for name in came}
    assert "serving.ServerSays" in [m["name"] for m in record.measurements]
    assert with_the_key(outputs) == []
    assert record.redactions, "it was there, and was taken out"
    for name in ("log", "unknown_commands.log"):
        assert not (machine / name).exists() or not _holds((machine / name).read_bytes())
    assert client.unknown_commands(SCENARIO) == []


def test_another_key_than_the_servers(machine: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_API_KEY", "not-the-key-of-this-server")
    record = scenarios.play(SCENARIO, outputs)
    assert (record.verdict, record.status, record.exit_code) == ("FAIL", "completed", 1)
    assert record.decisions[-1]["rung"] == "PREFLIGHT_FAIL"
    assert "the API key that was given is not the one that it demands" in record.summary
    assert changed(record) == []
    assert with_the_key(outputs) == []


def test_none_given(lab: Path, outputs: Path) -> None:
    record = scenarios.play("mtp-api-key-not-given", outputs)
    right = scenarios.EXPECTED["mtp-api-key-not-given"]
    assert (record.verdict, record.status, record.exit_code) == (right["verdict"], right["status"], right["exit_code"])
    assert record.decisions[-1]["rung"] == right["rung"]
    assert "demands an API key (--api-key) and none is given" in record.summary
    assert changed(record) == []
    assert not record.measurements
    assert any("api_key_env=NAME or api_key_file=PATH" in f["what_to_do"] for f in record.findings)
    assert with_the_key(outputs) == [], "nobody told us the key, and it stands in its unit, its argv and its log"
    client.stop("mtp-api-key-not-given")


def refused(outputs: Path, **given: Any) -> str:
    told = launch("mtp-enablement", {"host": f"lab:{SCENARIO}", **given}, outputs=outputs)
    assert (told.status, told.exit_code, told.run_id) == ("refused", 2, None)
    assert Archive(outputs).runs() == []
    return told.message


def test_a_key_that_cannot_be_had_is_said_before_any_contact(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAB_API_KEY", raising=False)
    assert "the variable LAB_API_KEY that api_key_env names is not set here" in refused(outputs)
    file = tmp_path / "key"
    file.write_text(KEY)
    os.chmod(file, 0o644)
    assert f"chmod 600 {file}" in refused(outputs, api_key_file=str(file))
    assert "api_key_env and api_key_file are both given" in refused(outputs, api_key_file=str(file), api_key_env="LAB_API_KEY")
    for mistaken in (KEY, KEY.replace("-", "_")):
        assert mistaken not in refused(outputs, api_key_env=mistaken)

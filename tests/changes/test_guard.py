"""What the guard's builders say, and how its answers become a value or an error."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.changes.guard import FileChange, Guard
from proofbook.errors import CannotTell, GuardRefused, PlanDrifted
from proofbook.intent import ContainerSpec
from proofbook.model import Result

FILES = (FileChange("/etc/systemd/system/x y.service", "a" * 64, b"new"), FileChange("/etc/systemd/system/z.conf", None, b"new"))
INSIDE = ContainerSpec(name="llm-two", kind="pct", id="102")


def answer(code: int, error: str = "", text: str = "state staged\nnow 1775661015\nend\n") -> Result:
    return Result(Guard("r", "x.service").status(), code, text.encode(), error.encode(), datetime.now(UTC), 0.0)


def test_every_verb_is_asked_as_root_and_of_the_system_in_which_the_unit_lives() -> None:
    guard = Guard("run-1", "x.service", INSIDE)
    verbs = [guard.stage(FILES), guard.arm(60), guard.install(), guard.extend(60), guard.confirm(), guard.fire(), guard.status()]
    for asked in [*verbs, guard.clean()]:
        assert asked.root
        assert asked.argv[:5] == ("pct", "exec", "102", "--", "sh")
    assert b"file " + b"a" * 64 in guard.stage(FILES).stdin
    assert b"new" not in guard.stage(FILES).stdin.split(b"\n")
    assert "new" not in " ".join(guard.stage(FILES).argv[8:]), "no content of a file is ever an argument"


def test_seconds_have_bounds() -> None:
    for seconds in (0, -5, 8 * 86400):
        with pytest.raises(ValueError, match="a guard waits"):
            Guard("r", "x.service").arm(seconds)


def test_refusals_are_errors_with_the_machines_words() -> None:
    guard = Guard("r", "x.service")
    assert guard.done(answer(0)).state == "staged"
    with pytest.raises(PlanDrifted, match="has changed: sha256"):
        guard.done(answer(76, "/etc/x has changed: sha256 1, the plan saw 2\n"))
    with pytest.raises(GuardRefused, match="the guard does not wait") as refused:
        guard.done(answer(77, "the guard does not wait\n"))
    assert guard.timer in refused.value.hint
    with pytest.raises(CannotTell):
        guard.done(answer(137, "Killed"))
    with pytest.raises(CannotTell):
        guard.done(answer(0, text="state staged\n"))


def test_what_to_type_by_hand_works_as_it_is_printed(tmp_path: Path) -> None:
    lines = Guard("r", "x.service").by_hand(FILES)
    assert lines[-1].startswith("systemctl disable --now proofbook-guard-r"), "the guard may still succeed until then"
    old = tmp_path / "var/lib/proofbook/changes/r/old"
    old.mkdir(parents=True)
    etc = tmp_path / "etc/systemd/system"
    etc.mkdir(parents=True)
    (old / "1").write_text("old")
    (etc / "x y.service").write_text("new")
    (etc / "z.conf").write_text("new")
    for line in lines:
        if "systemctl" not in line:
            subprocess.run(
                ["sh", "-c", line.replace("/var/lib", f"{tmp_path}/var/lib").replace("/etc", f"{tmp_path}/etc")], check=True
            )
    assert (etc / "x y.service").read_text() == "old"
    assert not (etc / "z.conf").exists()
    assert all(line.startswith("pct exec 102 -- ") for line in Guard("r", "x.service", INSIDE).by_hand(FILES))
    assert any(line.startswith("systemctl stop") for line in Guard("r", "x.service").by_hand(FILES, was_active=False))

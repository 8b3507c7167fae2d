"""Going on and taking back as the command says them: what is asked of the launcher, what is refused, and what is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from proofbook import begun, changes, launch, notebook, recover
from proofbook.archive import Archive, new_run_dir
from proofbook.errors import CannotConnect, LeaseHeld, NoSuchRun
from proofbook.journal import Journal, Writer
from proofbook.model import Action, Identity, Plan, RunStatus, Verdict
from proofbook.record import RunRecord, finish
from proofbook.redact import Redactor

RUN = "20261129T030000Z-mtp-enablement-gpu01-abc123"
WHEN = datetime(2026, 11, 29, 4, 0, tzinfo=UTC)
OUTCOME = launch.Outcome("r1", "mtp-enablement", "gpu01", "completed", "PASS", None, 0, [], None, None)


class Earlier:
    """A run that died, as the archive knows it."""

    run_id = RUN
    record = RunRecord(
        run_id=RUN,
        runbook="mtp-enablement",
        host="gpu01",
        parent="fleet-7",
        parameters={"host": "gpu01", "num_steps": 5, "approved": "sha256:" + "a" * 64, "approver": "alice"},
    )


def test_a_run_is_gone_on_with_by_its_own_runbook_and_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def launched(runbook: str, parameters: Mapping[str, Any], *, outputs: Path, parent: str | None, tell: Any) -> launch.Outcome:
        asked.append((runbook, dict(parameters), outputs, parent, os.environ.get("PROOFBOOK_RESUME")))
        return OUTCOME

    monkeypatch.setattr(begun, "load", lambda _archive, run, *, undo: Earlier())
    monkeypatch.setattr(launch, "launch", launched)
    assert recover.resume(RUN, outputs=tmp_path) == OUTCOME
    # WHY without the approval: it is used up; the run that goes on takes it from the journal.
    assert asked == [("mtp-enablement", {"host": "gpu01", "num_steps": 5}, tmp_path, "fleet-7", RUN)]
    assert "PROOFBOOK_RESUME" not in os.environ


@pytest.mark.parametrize("say", [recover.resume, recover.roll_back])
def test_a_run_that_is_not_there_is_refused_before_any_contact(say: Any, tmp_path: Path) -> None:
    told = say(RUN, outputs=tmp_path)
    assert (told.status, told.exit_code, told.run_id) == (RunStatus.REFUSED, 2, None)
    assert f"there is no run '{RUN}'" in told.message
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_another_run_of_the_same_change_ends_this_one_before_it_reaches_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Opened:
        about = type("About", (), {"run_id": "r2"})

        def abort(self, why: str) -> None:
            ended.append(why)

    def refuse(_archive: Archive, _earlier: Any, own: str) -> None:
        raise NoSuchRun(f"run r1 is still at work, not {own}")

    monkeypatch.setenv("PROOFBOOK_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(begun, "refuse_two", refuse)
    with pytest.raises(NoSuchRun, match="not r2"):
        notebook.alone(Opened(), Earlier())  # type: ignore[arg-type]
    assert ended == ["run r1 is still at work, not r2"]


def undone(outputs: Path, came_to: str, facts: Mapping[str, Any]) -> str:
    """A run of `rollback` that ended."""
    run_id = "20261129T040000Z-rollback-gpu01-def456"
    folder = new_run_dir(outputs, "rollback", "gpu01", WHEN, run_id)
    writer = Writer(folder, Redactor())
    journal = Journal(writer, run_id, lambda: WHEN)
    status = RunStatus.COMPLETED if came_to == "rolled-back" else RunStatus.ROLLBACK_FAILED
    verdict = Verdict.PASS if came_to == "rolled-back" else Verdict.FAIL
    told = {"change": "x", "outcome": came_to, "summary": "not taken back: it is odd", "facts": facts, "digest": "sha256:1"}
    closing = {"status": status, "verdict": verdict, "summary": "over", "exit_code": 0}
    journal.append("run.opened", {"run_id": run_id, "runbook": "rollback", "host": "gpu01", "parameters": {"run": RUN}})
    journal.append("applied", told)
    journal.append("run.closing", closing)
    finish(folder, journal, writer)
    return run_id


def test_what_is_left_to_be_done_by_hand_stands_in_the_message(tmp_path: Path) -> None:
    facts = {
        "by_hand": ["cp -p /var/a /etc/a", "systemctl restart a.service"],
        "in_the_way": ["/etc/a is immutable (chattr +i)", "train.py (pid 7) holds GPU 0000:01:00.0"],
    }
    run_id = undone(tmp_path, "rollback-failed", facts)
    told = recover._outcome(Archive(tmp_path), run_id, "gpu01", "")
    assert (told.status, told.verdict, told.exit_code) == ("rollback-failed", "FAIL", 6)
    assert told.message.splitlines() == [
        "not taken back: it is odd",
        "  in the way: /etc/a is immutable (chattr +i)",
        "  in the way: train.py (pid 7) holds GPU 0000:01:00.0",
        "  → to do it by hand, on gpu01 as root:",
        "  cp -p /var/a /etc/a",
        "  systemctl restart a.service",
        f"  → then: proofbook rollback {RUN} (it verifies the old state, and gives the machine's lease back)",
    ]


def test_what_ended_a_taking_back_stands_in_the_message(tmp_path: Path) -> None:
    run_id = undone(tmp_path, "rolled-back", {})
    assert recover._outcome(Archive(tmp_path), run_id, "gpu01", "no route to host").message == "no route to host"
    assert recover._outcome(Archive(tmp_path), run_id, "gpu01", "").exit_code == 0


def test_the_run_that_holds_the_machine_is_named_with_what_to_type(tmp_path: Path) -> None:
    book = Archive(tmp_path)
    held = LeaseHeld("another run changes this machine", run="r7")
    lines = recover._who_holds(book, held, "gpu01", RUN)
    assert lines[0].startswith("  → run r7 is not in ")
    assert "proofbook lease break gpu01 r7 --who YOUR-NAME" in lines[1]
    assert lines[-1] == f"  → then: proofbook rollback {RUN}"
    assert recover._who_holds(book, NoSuchRun("x"), "gpu01", RUN) == []


def test_a_machine_that_does_not_let_us_in_may_be_rebooting(tmp_path: Path) -> None:
    host = Identity("gpu01", "gpu-hv1", "4f" * 16, "c3" * 16, "ssh-ed25519 SHA256:x", "root", 0)
    undo = (Action("take the files back"), Action("boot B", ("systemctl", "reboot")))
    plan = Plan("iommu-identity", "x", host, {}, (), undo, "", (), 0.0, settings={"guard_s": 5400})
    lines = recover._unreached(CannotConnect("cannot connect"), plan, RUN, "10.0.0.7")
    assert "its guard takes it back by itself 90 min after it was armed" in lines[0]
    assert f"say `proofbook rollback {RUN}` again in a few minutes" in lines[1]
    assert "its console (10.0.0.7)" in lines[2]
    assert lines[3:] == ["      take the files back", "      boot B systemctl reboot"]
    assert recover._unreached(LeaseHeld("held"), plan, RUN, "") == []


@pytest.mark.parametrize(
    ("undo", "cost"),
    [
        ((), ""),
        ((("rm", "x"), ("systemctl", "restart", "llm.service")), "; llm.service will be restarted, and answers nobody meanwhile"),
        ((("systemctl", "reboot"),), "; the machine will be rebooted, and everything on it stops meanwhile"),
    ],
)
def test_what_a_taking_back_costs_is_said_before_it_is_done(undo: tuple[tuple[str, ...], ...], cost: str) -> None:
    host = Identity("gpu01", "gpu01", "0" * 32, "f" * 32, "ssh-ed25519 SHA256:one", "root", 0)
    actions = tuple(Action("a", argv) for argv in undo)
    plan = Plan("x", "Extra flags", host, {}, (Action("do"),), actions, "", (), 1.0)
    assert recover.what_it_costs(plan) == f"about to take back: Extra flags{cost}"


def test_whose_decision_a_taking_back_is_goes_into_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def assemble(_procedure: Any, parameters: Any, _spec: Any, **_more: Any) -> None:
        raise Stop(parameters.approver)

    earlier = type("Begun", (Earlier,), {"record": RunRecord(run_id=RUN, host="lab:healthy"), "approved_plan": None})
    monkeypatch.setattr(begun, "load", lambda _archive, run, *, undo: earlier())
    monkeypatch.setattr(changes, "acting", lambda _plan: None)
    monkeypatch.setattr(notebook, "assemble", assemble)
    with pytest.raises(Stop, match="alice"):
        recover.roll_back(RUN, who="alice", outputs=tmp_path)

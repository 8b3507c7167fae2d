"""Speculation turned on by a unit's file, on a simulated machine: planned, put in effect, gone on with, kept, taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.changes import lease
from proofbook.changes.unit_edit import Style
from proofbook.changes.unit_file import EnableMTP, argv_digest, undo_splices, undone
from proofbook.checks.mtp.speculation import Speculation
from proofbook.errors import PlanDrifted
from proofbook.host import Host
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import Inventory, connect
from proofbook.lab.sim import client
from proofbook.model import Applied, Command, Observation, Plan, Probe, Result, Seen, command
from proofbook.probes import drive
from proofbook.probes.change_state import GuardState
from proofbook.probes.systemd import UnitProcess, UnitState
from proofbook.probes.unit_files import UnitFiles

pytestmark = pytest.mark.lab
MTP = Speculation(mem_fraction_static=0.75)


class RunnerDied(BaseException):
    """The runner was killed."""


@dataclass
class Hands:
    """What a run gives to a change, without its journal. ``dies_before``: the act before which the runner dies."""

    host: Host
    run_id: str = "r1"
    dies_before: int = -1
    acts: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        if len(self.acts) == self.dies_before:
            raise RunnerDied(what)
        self.acts.append(what)
        return self.host.transport.run(do)

    def look(self, *probes: Probe[Any]) -> Seen:
        answers = drive(probes, self.host.gather)
        return Seen(Observation(p, a.value, a.unknown, datetime.now(UTC), "") for p, a in answers.items())

    peek = look

    def proven(self, note: str) -> None:
        self.told.append(note)


@dataclass
class Cut(Hands):
    """The connection breaks at the first act: before it arrives, or before its answer does."""

    arrives: bool = True

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        first = not self.acts
        self.acts.append(what)
        if first and not self.arrives:
            return None
        result = self.host.transport.run(do)
        return None if first else result


@dataclass
class Lab:
    """A machine, its server and the change that is wanted of it."""

    host: Host
    service: ServiceSpec
    container: ContainerSpec

    def change(self, **more: Any) -> EnableMTP:
        return EnableMTP(self.service, self.container, MTP, **more)

    def hands(self, **more: Any) -> Hands:
        return Hands(self.host, **more)

    def ask(self, probe: Probe[Any]) -> Any:
        return drive([probe], self.host.gather)[probe].value

    def plan(self, change: EnableMTP) -> Plan:
        return change.plan(self.hands().look(*change.needs()), self.host.identity)

    def files(self) -> list[tuple[str, str]]:
        return [(f.path, f.sha256) for f in self.ask(UnitFiles(self.service.name, self.container)).files]

    def argv(self) -> tuple[str, ...]:
        argv: tuple[str, ...] = self.ask(UnitProcess(self.service.name, self.container)).argv
        return argv


@contextmanager
def machine(scenario: str) -> Iterator[Lab]:
    client.reset(scenario)
    spec = Inventory().resolve(f"lab:{scenario}")
    transport, clock = connect(spec)
    host = Host(scenario, transport, clock)
    host.prove()
    try:
        service = replace_ready(spec.services[0])
        yield Lab(host, service, next(c for c in spec.containers if c.name == service.container))
    finally:
        transport.close()


def replace_ready(service: ServiceSpec) -> ServiceSpec:
    """With patience enough for a slow start."""
    return service.model_copy(update={"ready_s": 300.0})


@pytest.fixture(scope="module", autouse=True)
def lab_folder(nursery: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(tmp_path_factory.mktemp("lab")))
        try:
            yield
        finally:
            client.stop()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with machine("healthy") as found:
        yield found


def test_turned_on_kept_and_taken_back_later(lab: Lab) -> None:
    before, change = lab.files(), lab.change(style="edit")
    plan = lab.plan(change)
    assert plan.actions, plan.facts
    assert plan.digest == lab.plan(change).digest
    assert any("systemd-analyze verify: exit 0" in fact for fact in plan.facts)
    hands = lab.hands()
    applied = change.apply(plan, hands, hands.told.append)
    assert (applied.outcome, applied.facts["ready_by"]) == ("done", "its log")
    assert applied.facts["leftovers"] == [] and applied.facts["stop_not_verified"] == []
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"]
    assert any(text.startswith("Draft weights") for text in hands.told)
    assert lab.ask(GuardState("r1", lab.container)).guarded
    again = change.apply(plan, hands, hands.told.append)
    assert (again.outcome, again.facts["restarted"]) == ("done", False)
    assert change.confirm(plan, hands, hands.told.append).outcome == "confirmed"
    there = lab.plan(change)
    assert (there.empty, there.settings) == (True, {"there": True})
    undone_ = change.rollback(plan, hands, hands.told.append)
    assert undone_.outcome == "rolled-back", undone_
    assert lab.files() == before


@pytest.mark.parametrize(("style", "dies_before"), [*(("edit", n) for n in range(6)), ("drop-in", 3), ("drop-in", 5)])
def test_undoing_a_kept_change_may_die_at_every_act_and_is_gone_on_with(style: Style, dies_before: int) -> None:
    with machine("healthy") as lab:
        before = lab.files()
        change, plan, _ = kept_change(lab, style=style, guard_minutes=5)
        dying = lab.hands(dies_before=dies_before)
        with pytest.raises(RunnerDied):
            change.rollback(plan, dying, dying.told.append)
        on = lab.hands()
        undone_ = change.rollback(plan, on, on.told.append)
        assert undone_.outcome == "rolled-back", undone_
        assert lab.files() == before
        assert argv_digest(lab.argv()) == plan.settings["argv_before_sha256"]
        assert not lab.ask(GuardState("r1", lab.container)).guarded
        lab.host.clock.sleep(2 * plan.settings["guard_s"])
        assert lab.files() == before, "no guard is left that would bring the change back"


@pytest.mark.parametrize("style", ["edit", "drop-in"])
def test_an_undoing_whose_own_guard_fired_begins_anew_and_loses_nobodys_bytes(style: Style) -> None:
    with machine("healthy") as lab:
        before = lab.files()
        change, plan, hands = kept_change(lab, style=style, guard_minutes=5)
        with pytest.raises(RunnerDied):
            change.rollback(plan, lab.hands(dies_before=3), print)
        path = plan.settings["files"][0]["path"]
        on_the_machine(lab, "sh", "-c", f"mkdir -p {path.rpartition('/')[0]}; echo '# theirs' >> {path}")
        lab.host.clock.sleep(2 * plan.settings["guard_s"])
        assert argv_digest(lab.argv()) == plan.settings["argv_sha256"], "the change is back in effect"
        with pytest.raises(RunnerDied):  # just after it has cleared away what the guard left
            change.rollback(plan, lab.hands(dies_before=1), print)
        undone_ = change.rollback(plan, hands, hands.told.append)
        assert undone_.outcome == "rolled-back", undone_
        assert lab.files() == before
        (kept,) = undone_.facts["written_by_others"]
        assert on_the_machine(lab, "cat", kept).endswith("# theirs\n")


def test_what_was_kept_and_taken_back_is_not_kept_already(lab: Lab) -> None:
    change, plan, hands = kept_change(lab)
    assert change.rollback(plan, hands, print).outcome == "rolled-back"
    again = change.apply(plan, hands, print)
    assert (again.outcome, again.summary) == (
        "rolled-back", "this change was kept, and taken back since; nothing was applied again"
    )  # fmt: skip


def test_the_way_by_hand_out_of_a_half_undone_kept_change(lab: Lab) -> None:
    before = lab.files()
    change, plan, hands = kept_change(lab, style="edit")
    with pytest.raises(RunnerDied):
        change.rollback(plan, lab.hands(dies_before=2), print)
    path = plan.settings["files"][0]["path"]
    on_the_machine(lab, "sh", "-c", f"echo '# theirs' >> {path}")
    failed = change.rollback(plan, hands, hands.told.append)
    assert failed.outcome == "rollback-failed"
    assert failed.summary.startswith(f"not taken back: somebody else has changed {path} meanwhile")
    by_hand(lab, failed)
    assert lab.files() == before
    assert on_the_machine(lab, "cat", f"{path}.theirs").endswith("# theirs\n")


@pytest.mark.parametrize("arrives", [True, False])
def test_the_answer_to_the_keeping_may_be_lost(lab: Lab, arrives: bool) -> None:
    change, plan, _ = in_effect(lab, guard_minutes=5)
    cut = Cut(lab.host, arrives=arrives)
    kept = change.confirm(plan, cut, cut.told.append)
    assert (kept.outcome, kept.summary) == ("confirmed", f"{plan.title}: kept; its guard is gone")
    assert any("the connection was lost while it is kept" in text for text in cut.told)
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"]
    lab.host.clock.sleep(2 * plan.settings["guard_s"])
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"]


def test_the_rule_for_keeping_it_is_part_of_what_is_approved(lab: Lab) -> None:
    plan, other = (lab.plan(lab.change(kept_only_if=rule)) for rule in ("it holds for 30 min", "it holds for 1 min"))
    assert plan.actions[-1].what == "kept only if: it holds for 30 min; otherwise it is taken back"
    assert plan.digest != other.digest
    noted = lab.plan(lab.change(kept_only_if="it holds for 30 min", notes=("requests at once: 48 now",)))
    assert (noted.facts[0], noted.digest) == ("requests at once: 48 now", plan.digest), "a fact is read, and not approved"


@pytest.mark.parametrize("dies_before", range(7))
def test_at_every_act_the_runner_may_die(dies_before: int) -> None:
    with machine("healthy") as lab:
        before, change = lab.files(), lab.change()
        plan = lab.plan(change)
        first = lab.hands(dies_before=dies_before)
        if dies_before < 6:
            with pytest.raises(RunnerDied):
                change.apply(plan, first, first.told.append)
        else:
            assert change.apply(plan, first, first.told.append).outcome == "done"
            assert len(first.acts) == 6, "an act more: let it die there too"
        on = lab.hands()
        applied = change.apply(plan, on, on.told.append)
        assert applied.outcome == "done", applied
        assert argv_digest(lab.argv()) == plan.settings["argv_sha256"]
        assert change.rollback(plan, on, on.told.append).outcome == "rolled-back"
        assert lab.files() == before
        assert argv_digest(lab.argv()) == plan.settings["argv_before_sha256"]


def test_suspended_for_a_while_and_put_in_effect_again(lab: Lab) -> None:
    before, change = lab.files(), lab.change(measure_again=True, again_s=120.0)
    plan, without = lab.plan(change), lab.plan(lab.change())
    assert plan.expected_s == 3 * without.expected_s + 120
    assert "measure the old configuration a second time" in str([a.what for a in plan.actions])
    assert any("is down twice more" in text for text in plan.cannot_undo)
    hands = lab.hands()
    assert change.apply(plan, hands, print).outcome == "done"
    first = lab.ask(UnitState(lab.service.name, lab.container))
    suspended = change.suspend(plan, hands, hands.told.append)
    assert (suspended.outcome, suspended.facts["leftovers"]) == ("suspended", []), suspended
    assert lab.files() == before
    assert argv_digest(lab.argv()) == plan.settings["argv_before_sha256"]
    assert lab.ask(UnitState(lab.service.name, lab.container)).invocation_id != first.invocation_id
    assert lab.ask(GuardState("r1", lab.container)).guarded
    with pytest.raises(PlanDrifted, match="not as it was installed"):
        change.confirm(plan, hands, print)
    assert change.apply(plan, hands, print).outcome == "done"
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"]
    assert change.suspend(plan, hands, print).outcome == "suspended"
    assert change.rollback(plan, hands, print).outcome == "rolled-back"
    assert lab.files() == before
    late = change.suspend(plan, hands, print)
    assert late.outcome == "rolled-back", "what was taken back is not suspended"


def test_what_a_plan_does_not_say_is_not_done(lab: Lab) -> None:
    change = lab.change()
    plan, hands = lab.plan(change), lab.hands()
    assert change.apply(plan, hands, print).outcome == "done"
    acts = len(hands.acts)
    suspended = lab.change(measure_again=True).suspend(plan, hands, print)
    assert (suspended.outcome, len(hands.acts)) == ("failed", acts)
    assert "does not say that it may be suspended" in suspended.summary


def test_what_somebody_else_wrote_meanwhile_is_not_suspended(lab: Lab) -> None:
    change = lab.change(measure_again=True)
    plan, hands = lab.plan(change), lab.hands()
    assert change.apply(plan, hands, print).outcome == "done"
    path = plan.settings["files"][0]["path"]
    lab.host.transport.run(command(*lab.container.enter(), "sh", "-c", f"echo '# theirs' >> {path}", root=True))
    suspended = change.suspend(plan, hands, print)
    assert (suspended.outcome, "neither as it was nor as the change has it" in suspended.summary) == ("failed", True)
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"], "it serves as before"


def test_the_unit_changed_after_the_plan(lab: Lab) -> None:
    change = lab.change(style="edit")
    plan = lab.plan(change)
    other = replace(plan, settings={**plan.settings, "files": [{**plan.settings["files"][0], "new_sha256": "0" * 64}]})
    with pytest.raises(PlanDrifted, match="would not become what the plan says"):
        change.apply(other, lab.hands(), print)
    assert lab.ask(GuardState("r1", lab.container)).state == "none"


def test_a_plan_that_must_not_be_carried_out_has_no_actions(lab: Lab) -> None:
    change = EnableMTP(lab.service, lab.container, Speculation(more=(("--speculative-draft-epsilon", "0.2"),)))
    plan = lab.plan(change)
    assert (plan.empty, plan.settings) == (True, {})
    assert any("--speculative-accept-threshold-single" in fact for fact in plan.facts)
    applied = change.apply(plan, lab.hands(), print) if plan.actions else None
    assert applied is None


def test_a_start_that_dies_is_named_and_taken_back() -> None:
    with machine("mtp-draft-out-of-memory") as lab:
        before, change = lab.files(), lab.change()
        plan, hands = lab.plan(change), lab.hands()
        applied = change.apply(plan, hands, hands.told.append)
        assert applied.outcome == "failed"
        assert "torch.OutOfMemoryError" in applied.summary
        assert change.rollback(plan, hands, hands.told.append).outcome == "rolled-back"
        assert lab.files() == before
        assert lab.ask(UnitState(lab.service.name, lab.container)).active == "active"


# ------------------------------------------------------------------------------------ when it is not taken back


def on_the_machine(lab: Lab, *argv: str) -> str:
    text: str = lab.host.transport.run(command(*lab.container.enter(), *argv, root=True)).expect()
    return text


def by_hand(lab: Lab, applied: Applied) -> None:
    """Every line that is printed, typed on the host."""
    for line in applied.facts["by_hand"]:
        lab.host.transport.run(Command(("sh", "-c", line), root=True)).expect(0, 3)
    lab.host.clock.sleep(300)


def in_effect(lab: Lab, **more: Any) -> tuple[EnableMTP, Plan, Hands]:
    change = lab.change(**more)
    plan, hands = lab.plan(change), lab.hands()
    assert change.apply(plan, hands, print).outcome == "done"
    return change, plan, hands


def kept_change(lab: Lab, **more: Any) -> tuple[EnableMTP, Plan, Hands]:
    change, plan, hands = in_effect(lab, **more)
    assert change.confirm(plan, hands, print).outcome == "confirmed"
    return change, plan, hands


@pytest.mark.parametrize(
    ("lock", "names", "unlock"),
    [
        (("chattr", "+i", "{path}"), "{path} is immutable (chattr +i)", "chattr -i -- {path}"),
        (("mount", "-o", "remount,ro", "/"), "the file system at / (zfs) is read-only", "mount -o remount,rw /"),
    ],
)
def test_what_keeps_the_old_files_away_is_named_and_what_is_typed_helps(
    lab: Lab, lock: tuple[str, ...], names: str, unlock: str
) -> None:
    before = lab.files()
    change, plan, hands = in_effect(lab)
    path = plan.settings["files"][0]["path"]
    on_the_machine(lab, *(word.format(path=path) for word in lock))
    failed = change.rollback(plan, hands, hands.told.append)
    assert failed.outcome == "rollback-failed"
    assert "not everything could be brought back" in failed.summary
    assert f"{path} is as this change made it" in failed.facts["in_the_way"]
    assert names.format(path=path) in failed.facts["in_the_way"]
    assert failed.facts["by_hand"][0] == f"pct exec 102 -- {unlock.format(path=path)}"
    assert lab.files() != before
    by_hand(lab, failed)
    assert lab.files() == before
    again = change.rollback(plan, hands, hands.told.append)
    assert again.outcome == "rolled-back", again.summary
    assert lab.argv() and argv_digest(lab.argv()) == plan.settings["argv_before_sha256"]


def test_the_guard_succeeds_by_itself_when_what_was_in_its_way_is_gone(lab: Lab) -> None:
    before = lab.files()
    change, plan, hands = in_effect(lab)
    path = plan.settings["files"][0]["path"]
    on_the_machine(lab, "chattr", "+i", path)
    assert change.rollback(plan, hands, hands.told.append).outcome == "rollback-failed"
    assert lab.ask(GuardState("r1", lab.container)).state == "failed"
    on_the_machine(lab, "chattr", "-i", path)
    lab.host.clock.sleep(300)
    assert (lab.files(), lab.ask(GuardState("r1", lab.container)).state) == (before, "fired")
    assert change.rollback(plan, hands, hands.told.append).outcome == "rolled-back"


def test_a_full_disk_is_named_when_a_kept_change_is_taken_back(lab: Lab) -> None:
    before = lab.files()
    change, plan, hands = in_effect(lab, style="edit")
    assert change.confirm(plan, hands, print).outcome == "confirmed"
    on_the_machine(lab, "fallocate", "-l", str(871_088_128 * 1024), "/var/log/huge")
    failed = change.rollback(plan, hands, hands.told.append)
    assert failed.outcome == "rollback-failed"
    assert "the file system at / has no space left" in failed.facts["in_the_way"]
    assert failed.facts["by_hand"][0] == "pct exec 102 -- df -h /"
    assert argv_digest(lab.argv()) == plan.settings["argv_sha256"], "it serves as before"
    on_the_machine(lab, "rm", "/var/log/huge")
    assert change.rollback(plan, hands, hands.told.append).outcome == "rolled-back"
    assert lab.files() == before


def test_a_file_that_somebody_else_wrote_after_the_guard_had_fired(lab: Lab) -> None:
    change, plan, hands = in_effect(lab)
    path = plan.settings["files"][0]["path"]
    assert change.rollback(plan, hands, print).outcome == "rolled-back"
    on_the_machine(lab, "sh", "-c", f"mkdir -p {path.rpartition('/')[0]}; echo '# theirs' > {path}")
    failed = change.rollback(plan, hands, hands.told.append)
    assert failed.outcome == "rollback-failed"
    assert any(one.startswith(f"{path} was written by somebody else (sha256 ") for one in failed.facts["in_the_way"])
    saved, removed = f"pct exec 102 -- cp -p -- {path} {path}.theirs", f"pct exec 102 -- rm -f -- {path}"
    assert [line for line in failed.facts["by_hand"] if path in line] == [saved, removed], "saved before it is removed"


def test_a_run_that_holds_the_machine_is_named(lab: Lab) -> None:
    change, plan, hands = in_effect(lab)
    taken = lease.acquire("r7", "mira@laptop", 600)
    lease.obtained(lab.host.transport.run(taken), "r7")
    path = plan.settings["files"][0]["path"]
    on_the_machine(lab, "sh", "-c", f"echo '# theirs' >> {path}")
    failed = change.rollback(plan, hands, hands.told.append)
    assert failed.facts["in_the_way"][0] == "run r7 of mira@laptop has the machine's lease, so it may be at work on this too"
    assert f"somebody else has changed {path} meanwhile" in failed.summary


def test_old_bytes_come_back_from_the_new_ones() -> None:
    old = "[Service]\nExecStart=/bin/a --key SECRET --tp 4 \\\n  --x 1\nRestart=no\n"
    new = "[Service]\nEnvironment=A=1\nExecStart=/bin/a --key SECRET --tp 8 \\\n  --x 1 \\\n  --y 2\nRestart=no\n"
    splices = undo_splices(old, new)
    assert undone(new, splices) == old
    assert "SECRET" not in str(splices)

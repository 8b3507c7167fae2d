"""A service that stands still for a while, on a simulated machine: held back, started again, by the machine itself if need be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.changes import acting
from proofbook.changes.service import HELD_BACK, StandStill, held_back_by
from proofbook.host import Host
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import Inventory, connect
from proofbook.lab.sim import client
from proofbook.model import Command, Observation, Plan, Probe, Result, Seen, command
from proofbook.probes import drive
from proofbook.probes.change_state import GuardState
from proofbook.probes.memory import GpuProcess, GpuProcesses
from proofbook.probes.systemd import UnitState

pytestmark = pytest.mark.lab


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
class Lab:
    host: Host
    service: ServiceSpec
    container: ContainerSpec

    @property
    def change(self) -> StandStill:
        return StandStill(self.service, self.container, guard_minutes=30)

    def hands(self, **more: Any) -> Any:
        return Hands(self.host, **more)

    def plan(self) -> Plan:
        return self.change.plan(self.hands().look(*self.change.needs()), self.host.identity)

    def state(self) -> str:
        probe = UnitState(self.service.name, self.container)
        return str(self.hands().look(probe).value(probe).active)

    def guard(self) -> str:
        probe = GuardState("r1", self.container)
        return str(self.hands().look(probe).value(probe).state)

    def held(self) -> bool:
        asked = command(*self.container.enter(), "cat", held_back_by(self.service.name), root=True)
        return self.host.transport.run(asked).stdout == HELD_BACK


@contextmanager
def machine() -> Iterator[Lab]:
    client.reset("p2p-healthy")
    spec = Inventory().resolve("lab:p2p-healthy")
    transport, clock = connect(spec)
    host = Host("p2p-healthy", transport, clock)
    host.prove()
    try:
        yield Lab(host, spec.services[0], spec.containers[0])
    finally:
        transport.close()


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
    with machine() as found:
        yield found


def test_it_stands_still_and_is_started_again(lab: Lab) -> None:
    plan, hands = lab.plan(), lab.hands()
    assert [a.what.split()[0] for a in plan.actions] == ["arm", "write", "stop"]
    applied = lab.change.apply(plan, hands, hands.told.append)
    assert (applied.outcome, applied.facts["leftovers"], lab.state(), lab.guard(), lab.held()) == (
        "done",
        [],
        "inactive",
        "armed",
        True,
    )
    assert lab.hands().look(GpuProcesses()).value(GpuProcesses()) == ()
    back = acting(plan).rollback(plan, hands, hands.told.append)
    assert (back.outcome, lab.state(), lab.guard(), lab.held()) == ("restored", "active", "none", False)
    assert "is ready after" in back.summary
    assert lab.plan().digest == plan.digest, "as it was before"


def test_the_machine_starts_it_when_nobody_does(lab: Lab) -> None:
    plan, hands = lab.plan(), lab.hands()
    lab.change.apply(plan, hands, hands.told.append)
    lab.host.clock.sleep(31 * 60)
    assert (lab.state(), lab.guard(), lab.held()) == ("active", "fired", False)
    assert lab.change.apply(plan, hands, hands.told.append).outcome == "failed", "it does not stop it a second time"
    back = lab.change.rollback(plan, hands, hands.told.append)
    assert (back.outcome, lab.guard()) == ("restored", "none")


@pytest.mark.parametrize("dies_before", (1, 3))
def test_a_runner_may_die_before_any_act(lab: Lab, dies_before: int) -> None:
    plan, hands = lab.plan(), lab.hands(dies_before=dies_before)
    with pytest.raises(RunnerDied):
        lab.change.apply(plan, hands, hands.told.append)
    again = lab.hands()
    assert lab.change.apply(plan, again, again.told.append).outcome == "done"
    assert (lab.state(), lab.held()) == ("inactive", True)
    assert lab.change.rollback(plan, again, again.told.append).outcome == "restored"
    assert (lab.state(), lab.guard(), lab.held()) == ("active", "none", False)


def test_nothing_is_planned_where_it_does_not_run_or_others_compute(lab: Lab) -> None:
    seen = lab.hands().look(*lab.change.needs())
    stranger = GpuProcess(7, "0000:01:00.0", "train", 1, "/user.slice", None, None)
    crowd = Observation(GpuProcesses(), (stranger,), "", datetime.now(UTC), "")
    plan = lab.change.plan(seen.merged(Seen([crowd])), lab.host.identity)
    assert (plan.empty, plan.facts) == (True, ("not possible: others compute too: train on 0000:01:00.0",))
    lab.host.transport.run(command(*lab.container.enter(), "systemctl", "stop", lab.service.name, root=True))
    lab.host.clock.sleep(130)
    assert lab.plan().empty
    idle = StandStill(None)
    assert idle.plan(Seen(), lab.host.identity).title == "No service has to be stopped"
    assert idle.needs() == ()

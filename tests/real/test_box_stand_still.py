"""A service that stands still while its GPUs are tested, on a real systemd: nobody starts it, and it always comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from proofbook.changes.service import StandStill, held_back_by
from proofbook.host import Host, WallClock
from proofbook.model import Plan, Probe, Seen
from proofbook.probes.memory import GpuProcesses

from .conftest import Machine, until
from .test_box_mtp import SERVICE, UNIT, URL, Hands

pytestmark = pytest.mark.box

DROP_IN = held_back_by(UNIT)


class OnNoGpu(Hands):
    """As for any change; a container cannot say who is on the GPUs, so that is answered here: nobody."""

    def look(self, *probes: Probe[Any]) -> Seen:
        seen = super().look(*probes)
        return Seen(replace(o, value=(), unknown="") if o.probe == GpuProcesses() else o for o in seen.values())

    peek = look


@contextmanager
def standing_still(machine: Machine, run_id: str, minutes: float) -> Iterator[tuple[StandStill, Plan, OnNoGpu]]:
    """The change, put in effect."""
    change = StandStill(SERVICE, None, minutes)
    with machine.transport() as transport:
        host = Host("box", transport, WallClock())
        host.prove()
        hands = OnNoGpu(host, run_id)
        plan = change.plan(hands.look(*change.needs()), host.identity)
        assert plan.actions, plan.facts
        applied = change.apply(plan, hands, hands.told.append)
        assert applied.outcome == "done", applied
        yield change, plan, hands


def state(machine: Machine) -> str:
    return machine.sh(f"systemctl show -P ActiveState {UNIT}")


def serves(machine: Machine) -> bool:
    return machine.sh(f"curl -s -o /dev/null -w '%{{http_code}}' {URL} || true") == "200"


@pytest.fixture
def serving(shared: Machine) -> Machine:
    shared.sh(f"systemctl reset-failed {UNIT} || true; systemctl start {UNIT}")
    until(lambda: serves(shared), "it serves")
    return shared


def test_nobody_starts_it_meanwhile_and_afterwards_it_serves_again(serving: Machine) -> None:
    with standing_still(serving, "still", 30) as (change, plan, hands):
        assert state(serving) == "inactive"
        serving.sh(f"systemctl start {UNIT}; systemctl restart {UNIT}")
        assert state(serving) == "inactive", "a start finds a condition that does not hold"
        assert serving.sh(f"systemctl show -P ConditionResult {UNIT}") == "no"
        over = change.rollback(plan, hands, hands.told.append)  # type: ignore[arg-type]
    assert (over.outcome, "was started again and is ready" in over.summary) == ("restored", True)
    assert serves(serving)
    assert serving.sh(f"test -e {DROP_IN} || echo gone") == "gone"
    assert serving.sh("ls /var/lib/proofbook/changes; ls /etc/systemd/system | grep proofbook || true") == ""


def test_when_nobody_comes_back_the_machine_starts_it(serving: Machine) -> None:
    with standing_still(serving, "forgotten", 0.2) as (change, plan, hands):
        until(lambda: serves(serving), "the guard starts it", 120)
        over = change.rollback(plan, hands, hands.told.append)  # type: ignore[arg-type]
    assert over.outcome == "restored"
    assert over.summary.startswith(f"the guard had started {UNIT} by itself at ")
    assert "before the test was over" in over.summary
    assert serving.sh(f"test -e {DROP_IN} || echo gone") == "gone"

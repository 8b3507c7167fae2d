"""The simulated lab against a real systemd: every question of the probes, answered by both, in the same shape."""

from __future__ import annotations

import pytest

from .conftest import Machine
from .contract import A_BOX, EVERYWHERE, PROBES, Simulated, ask, rows, unexplained

pytestmark = pytest.mark.box

#: Probes that a container cannot answer.
NOT_HERE = ("KernelLog", "Gpus", "ComputeApps")


def test_a_container_answers_as_the_simulated_machine_does(shared: Machine, simulated: Simulated) -> None:
    with shared.transport() as transport:
        real = ask(PROBES, transport.gather)
    compared = rows(simulated.results, real.results)
    assert len(compared) >= 25
    assert unexplained(compared, EVERYWHERE + A_BOX) == []
    for probe, why in simulated.unknown.items():
        if not probe.startswith(NOT_HERE):
            assert bool(why) == bool(real.unknown[probe]), (probe, why, real.unknown[probe])

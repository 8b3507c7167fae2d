"""The simulated lab against a real systemd: every question of the probes, answered by both, in the same shape."""

from __future__ import annotations

import re

import pytest

from proofbook.probes.service import Endpoint

from .conftest import Machine, until
from .contract import (
    A_BOX,
    A_VM,
    EVERYWHERE,
    LESS,
    NOT_IN_A_BOX,
    Reasons,
    Said,
    Simulated,
    ask,
    known_by_one,
    rows,
    stale,
    unexplained,
)


@pytest.mark.lab
def test_every_probe_is_asked_and_every_reason_is_about_a_question(simulated: Simulated) -> None:
    """Needs no real machine: a new probe that nobody can ask, or a reason about what nobody asks, fails here."""
    asked = {question for said in simulated.values() for question in said.questions}
    assert len(asked) >= 60
    assert [why for q, _, why in EVERYWHERE + A_BOX + A_VM if not any(re.fullmatch(q, one, re.S) for one in asked)] == []


@pytest.mark.lab
def test_every_question_is_compared_on_one_of_the_real_machines(simulated: Simulated) -> None:
    """What is not compared at all, neither in a container nor in a virtual machine, is so everywhere, for a reason."""

    def given_up(reasons: Reasons) -> set[str]:
        whole = [q for q, difference, _ in reasons if difference == r".*"]
        return {one for said in simulated.values() for one in said.questions if any(re.fullmatch(q, one, re.S) for q in whole)}

    assert given_up(A_BOX) & given_up(A_VM) == set()


def agrees(simulated: Said, real: Said) -> None:
    left = unexplained(rows(simulated, real), EVERYWHERE + LESS + A_BOX)
    assert not left, "\n".join(left)
    left = known_by_one(simulated, real, NOT_IN_A_BOX)
    assert not left, "\n".join(left)


@pytest.mark.box
def test_a_container_answers_as_the_simulated_machine_does(shared: Machine, simulated: Simulated) -> None:
    until(lambda: shared.ask(Endpoint("http://127.0.0.1:30000/health")).value.http_status == 200, "its server serves")
    with shared.transport() as transport:
        real = ask(transport.gather, simulated=False)
    agrees(simulated["root"], real)
    assert stale(rows(simulated["root"], real), EVERYWHERE + A_BOX) == []


@pytest.mark.box
def test_a_login_without_root_is_told_as_little_by_both(shared: Machine, simulated: Simulated) -> None:
    # An account that has logged in before has a journal of its own, and journalctl then says nothing of what it hides.
    shared.sh("true", user="plain")
    until(lambda: shared.sh("journalctl _UID=$(id -u) -n 1 -o cat", user="plain", check=False), "its journal has begun")
    with shared.transport("plain") as transport:
        real = ask(transport.gather, simulated=False, root=False)
    agrees(simulated["ordinary"], real)

"""What a machine holds of a run that changes it."""

from __future__ import annotations

from typing import Any

import pytest

from proofbook.intent import ContainerSpec
from proofbook.model import Probe
from proofbook.probes.change_state import ApprovalsUsed, GuardState, LeaseHeld, StepState

from .conftest import TalkingMachine

STATUS = (
    "state armed\nnow 1775661015\nunit sglang-qwen.service\nwas_active 1\nactive active\n"
    "touched 1\ndeadline 1775661612\nleft 597\n"
    f"file new absent {'5f' * 32} /etc/systemd/system/sglang-qwen.service.d/50 mtp.conf\n"
    "log 2026-04-08T15:10:12Z install: the new files are in place\n"
    "guard LoadState=loaded ActiveState=active SubState=waiting UnitFileState=enabled \nstorage lasting ext2/ext3\nend\n"
)
LEASE = (
    "run=run-1\nholder=mira@laptop\ntaken=1775660652\nexpires=1775664252\nboot_id=7c0e\nnow=1775661015\nboot_now=7c0e\n"
    "expired=no\nend\n"
)


def test_a_guarded_change() -> None:
    inside = ContainerSpec(name="llm-two", kind="pct", id="102")
    machine = TalkingMachine().on("proofbook-guard", "status", "run-1", stdout=STATUS)
    answer = machine.ask(GuardState("run-1", inside))
    assert answer.known, answer.unknown
    assert answer.value.guarded
    assert (answer.value.left_s, answer.value.files[0].content) == (597, "new")
    assert answer.value.files[0].path.endswith("/50 mtp.conf")
    assert machine.rounds[0][0].argv[:4] == ("pct", "exec", "102", "--")
    assert machine.rounds[0][0].root


def test_the_lease() -> None:
    answer = TalkingMachine().on("proofbook-lease", "show", stdout=LEASE).ask(LeaseHeld())
    assert answer.known, answer.unknown
    assert (answer.value.run, answer.value.holder, answer.value.expired) == ("run-1", "mira@laptop", False)
    nobody = TalkingMachine().on("proofbook-lease", "show", stdout="now=1775661015\nboot_now=7c0e\nend\n").ask(LeaseHeld())
    used = TalkingMachine().on("proofbook-lease", "show", stdout="now=1775661015\nboot_now=7c0e\napprovals=3\nend\n")
    assert used.ask(ApprovalsUsed()).value == 3
    assert nobody.known
    assert nobody.value is None


def test_a_step() -> None:
    machine = TalkingMachine().on("proofbook-detached", "status", "run-1", "wait", stdout="began 1\nnow 2\nstep running\nend\n")
    answer = machine.ask(StepState("run-1", "wait"))
    assert answer.known, answer.unknown
    assert answer.value.state == "running"


@pytest.mark.parametrize("probe", [GuardState("run-1"), LeaseHeld(), StepState("run-1", "wait")], ids=lambda p: p.name)
def test_unknown_is_said(probe: Probe[Any]) -> None:
    for said in (
        {"status": 1, "stderr": "sudo: a password is required\n"},
        {"stdout": "state ar"},
        {"status": None, "trouble": "x"},
    ):
        answer = TalkingMachine().on("sh", "-c", **said).ask(probe)
        assert not answer.known

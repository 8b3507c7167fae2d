"""Does no other run change this machine? And: is there anything to change?"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from proofbook.checks.held import HeldByNobody
from proofbook.checks.mtp.nothing import NothingToChange
from proofbook.model import Identity, Plan
from proofbook.probes.change_state import Held, HeldMachine
from proofbook.remote.guard import GuardStatus
from proofbook.remote.lease import Lease

from .conftest import CONTAINER, SERVICE, T0, UNIT, judged, said

HELD = HeldByNobody(CONTAINER)
ARMED = GuardStatus(
    "armed", T0, UNIT, deadline=T0 + timedelta(minutes=42), guard={"ActiveState": "active", "UnitFileState": "enabled"}
)


def lease(**more: Any) -> Lease:
    values: dict[str, Any] = {"run": "r7", "holder": "mira@laptop", "taken": T0, "expires": T0 + timedelta(hours=2)}
    return Lease(**{**values, "boot_id": "c3" * 16, "now": T0, "expired": False, "other_boot": False, **more})


def answered(held: Any) -> dict[Any, Any]:
    return {HeldMachine(CONTAINER): held}


def test_nobody_holds_it() -> None:
    assert said(judged(HELD, answered(Held(None)))) == "PASS no other run holds this machine"


def test_a_run_that_may_be_dead_is_named_with_its_guard_and_what_to_type() -> None:
    (found,) = judged(HELD, answered(Held(lease(), ARMED)))
    assert found.verdict == "FAIL"
    assert "run r7 of mira@laptop holds this machine's lease until 2026-03-09 18:00:00 UTC" in found.reason
    assert "whether it still lives is not known" in found.reason
    assert f"its guard takes the change of {UNIT} back at 2026-03-09 16:42:00 UTC" in found.reason
    assert "`proofbook resume r7`" in found.what_to_do and "`proofbook rollback r7`" in found.what_to_do


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (Held(lease(expired=True), GuardStatus("none", T0)), "lease which ran out at 2026-03-09 18:00:00 UTC"),
        (Held(lease(), GuardStatus("none", T0)), "no guarded change of it is waiting here"),
        (Held(lease(), GuardStatus("failed", T0, UNIT)), f"its change of {UNIT} is failed"),
        (Held(lease(), None, "the container is stopped"), "what it has changed is not known: the container is stopped"),
    ],
)
def test_whatever_is_left_of_it(held: Held, why: str) -> None:
    (found,) = judged(HELD, answered(held))
    assert found.verdict == "FAIL" and why in found.reason


def test_nobody_could_say() -> None:
    assert judged(HELD, answered("?it needs root"))[0].verdict == "UNKNOWN"


def plan(*facts: str) -> Plan:
    host = Identity("h", "h", "4f" * 16, "c3" * 16, "ssh-ed25519 SHA256:x", "root", 0)
    return Plan("enable-mtp", "x", host, {}, (), (), "", (), 0.0, facts)


def test_what_is_there_already_is_no_failure() -> None:
    there, open_ = judged(NothingToChange(SERVICE, plan(), there=True, kept_by="r3"), {})
    assert there.verdict == "PASS" and "has this speculation already (run r3 kept it)" in there.reason
    assert open_.verdict == "NOT_CHECKED" and "whether drafts are accepted" in open_.reason
    assert "which run put it there is not known" in judged(NothingToChange(SERVICE, plan(), there=True), {})[0].reason


def test_what_cannot_be_planned_is_a_failure() -> None:
    (found,) = judged(NothingToChange(SERVICE, plan("not possible: the unit is masked")), {})
    assert found.verdict == "FAIL" and "the unit is masked" in found.reason

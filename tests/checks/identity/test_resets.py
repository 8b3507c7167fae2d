"""Which resets may be tried, and what the record says of those that were and of those that were not."""

from __future__ import annotations

from datetime import UTC, datetime

from proofbook.checks.identity.resets import ResetsListed, not_verified, shared_out
from proofbook.checks.identity.rule import Attempt, Came
from proofbook.model import Observation, Seen, Verdict
from proofbook.probes.pci import ResetMethods

ONE, TWO = "0000:01:00.0", "0000:41:00.0"
LISTED = {ONE: ("flr", "bus"), TWO: ("pm",)}


def seen(listed: dict[str, tuple[str, ...]] | None, why: str = "") -> Seen:
    return Seen([Observation(ResetMethods(), listed, why, datetime(2026, 3, 9, tzinfo=UTC), "a1" * 16)])


def test_what_is_listed_may_be_tried_in_the_order_in_which_it_was_asked_for() -> None:
    may, not_listed = shared_out(("bus", "flr"), (ONE, TWO), LISTED)
    assert may == {ONE: ("bus", "flr"), TWO: ()}
    assert [(a.pci, a.method, a.came) for a in not_listed] == [(TWO, "bus", Came.NOT_TRIED), (TWO, "flr", Came.NOT_TRIED)]
    assert {a.why for a in not_listed} == {"it is not in its reset_method (pm)"}


def test_a_device_without_any_is_told_as_such() -> None:
    _, (attempt,) = shared_out(("flr",), (ONE,), {ONE: ()})
    assert str(attempt) == f"flr on {ONE}: NOT TRIED (it is not in its reset_method (which is empty))"


def test_what_is_not_listed_is_said_before_and_lowers_nothing() -> None:
    found = list(ResetsListed((ONE, TWO), ("flr", "cxl_bus")).judge(seen(LISTED)))
    assert [(f.subject, f.verdict) for f in found] == [
        (ONE, Verdict.PASS),
        (ONE, Verdict.NOT_CHECKED),
        (TWO, Verdict.NOT_CHECKED),
        (TWO, Verdict.NOT_CHECKED),
    ]
    assert all("NOT TRIED" in f.reason for f in found if f.verdict is Verdict.NOT_CHECKED)


def test_what_the_machine_does_not_say_is_unknown() -> None:
    (found,) = ResetsListed((ONE,), ("flr",)).judge(seen(None, "sysfs shows no PCI device"))
    assert found.verdict is Verdict.UNKNOWN


def test_the_record_says_what_was_not_tried_and_never_more() -> None:
    assert "whether one would clear a refusal is not known" in not_verified((), asked=False)
    stayed, not_tried = (
        Attempt(ONE, "flr", Came.STAYED),
        Attempt(ONE, "bus", Came.NOT_TRIED, "it is not in its reset_method (flr)"),
    )
    said = not_verified((stayed, not_tried), asked=True)
    assert f"Tried: flr on {ONE}: did not clear." in said
    assert f"bus on {ONE}: NOT TRIED" in said and "is not known" in said
    assert "is not known" not in not_verified((stayed,), asked=True)
    assert "Tried: nothing." in not_verified((not_tried,), asked=True)

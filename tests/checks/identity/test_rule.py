"""The rule of the identity experiment: every way to a conclusion, and every way that must not lead to one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofbook.checks.identity.rule import (
    Attempt,
    Before,
    Came,
    Conclusion,
    FirstError,
    Function,
    GpuBoot,
    Kind,
    Outcome,
    Restored,
    Trial,
    conclude,
    control,
)

ONE, TWO, THREE = "0000:01:00.0", "0000:41:00.0", "0000:81:00.0"
SAME = {"kernel": "6.17.13-1-pve", "command line": "quiet", "driver": "595.58.03"}
WHOLE = Restored(True)


def fine(pci: str, kind: str = "DMA-FQ") -> GpuBoot:
    return GpuBoot(pci, kind, "nvidia", True)


def failed(pci: str, kind: Kind = Kind.FSP, code: str = "0x177") -> GpuBoot:
    return GpuBoot(pci, "identity", "nvidia", False, FirstError(kind, "some-signature", f"NVRM: {kind}", code, 8.1))


BEFORE = Before((fine(ONE), fine(TWO)), SAME)
REFUSED = Trial(True, (failed(ONE),), (fine(TWO),), {ONE: 3.4}, 7.6, (), SAME)


def came_to(trial: Trial, before: Before = BEFORE, restored: Restored = WHOLE) -> Conclusion:
    return conclude(before, trial, restored)


def test_an_fsp_that_refuses_first_with_a_control_beside_it_is_blocked() -> None:
    found = came_to(REFUSED)
    assert (found.outcome, found.damaged) == (Outcome.BLOCKED, False)
    assert "0x177" in found.because and any("stayed translated" in r for r in found.reasons)


def test_the_code_is_data_and_decides_nothing() -> None:
    assert came_to(replace(REFUSED, treated=(failed(ONE, code="0x9e"),))).outcome is Outcome.BLOCKED
    assert came_to(replace(REFUSED, treated=(failed(ONE, code=""),))).outcome is Outcome.BLOCKED


def test_a_gpu_that_starts_supports_it_with_or_without_a_control() -> None:
    works = replace(REFUSED, treated=(fine(ONE, "identity"),))
    assert came_to(works).outcome is Outcome.SUPPORTED
    assert came_to(replace(works, others=(), conditions={})).outcome is Outcome.SUPPORTED


@pytest.mark.parametrize("kind", [Kind.FIRMWARE, Kind.OTHER])
def test_a_failure_that_is_not_the_fsps_refutes_it(kind: Kind) -> None:
    assert came_to(replace(REFUSED, treated=(failed(ONE, kind),))).outcome is Outcome.REFUTED


INVALID = {
    "the group is translated": {"treated": (replace(failed(ONE), iommu_type="DMA-FQ"),)},
    "the type is not known": {"treated": (replace(failed(ONE), iommu_type=""),)},
    "nobody said who set it": {"set_s": {}},
    "set after the driver": {"set_s": {ONE: 9.0}},
    "set when the driver was loaded": {"set_s": {ONE: 7.6}},
    "the order is not known": {"driver_s": None},
    "bound to another driver": {"treated": (replace(failed(ONE), driver="vfio-pci"),)},
    "bound to none": {"treated": (replace(failed(ONE), driver=""),)},
    "the unit did not act": {"why_not": "the unit did not act: the flag cannot be removed"},
    "a function of it is of another type": {
        "treated": (replace(failed(ONE), functions=(Function("0000:01:00.1", "DMA-FQ", "snd_hda_intel"),)),)
    },
    "the type of a function of it is not known": {
        "treated": (replace(failed(ONE), functions=(Function("0000:01:00.1", "", ""),)),)
    },
    "no GPU was treated": {"treated": ()},
    "it did not come back": {"came_back": False},
    "the link was lost": {"treated": (failed(ONE, Kind.LINK),)},
    "no first error": {"treated": (replace(failed(ONE), first=None),)},
    "the start is not known": {"treated": (replace(failed(ONE), started=None),)},
    "the log has a gap": {"log_gaps": ("Missed 27 kernel messages",)},
    "the control failed too": {"others": (replace(fine(TWO), started=False),)},
    "the control is not known": {"others": (replace(fine(TWO), started=None),)},
    "one of two controls failed": {"others": (fine(TWO), replace(fine(THREE), started=False))},
    "no control, and another kernel": {"others": (), "conditions": {**SAME, "kernel": "6.18.0"}},
    "no control, and nothing known of the boot": {"others": (), "conditions": {}},
}


@pytest.mark.parametrize("what", INVALID)
def test_what_shows_nothing_is_inconclusive(what: str) -> None:
    found = came_to(replace(REFUSED, **INVALID[what]))  # type: ignore[arg-type]
    assert found.outcome is Outcome.INCONCLUSIVE, what
    assert found.because


def test_the_boot_before_is_a_control_where_nothing_else_changed() -> None:
    alone = replace(REFUSED, others=())
    assert came_to(alone).outcome is Outcome.BLOCKED
    assert came_to(alone, Before((replace(fine(ONE), started=False),), SAME)).outcome is Outcome.INCONCLUSIVE
    assert came_to(alone, Before((fine(TWO),), SAME)).outcome is Outcome.INCONCLUSIVE
    assert came_to(alone, Before((fine(ONE, "identity"),), SAME)).outcome is Outcome.INCONCLUSIVE
    assert came_to(alone, Before((fine(ONE),), {})).outcome is Outcome.INCONCLUSIVE


def test_a_gpu_that_was_not_translated_is_no_control() -> None:
    held, how = control(Before(()), replace(REFUSED, others=(fine(TWO, "identity"),)))
    assert not held and "no other translated GPU" in how


def test_two_gpus_that_came_out_differently_prove_neither() -> None:
    two = replace(REFUSED, treated=(failed(ONE), fine(TWO, "identity")), others=(fine(THREE),), set_s={ONE: 3.4, TWO: 3.4})
    assert came_to(two).outcome is Outcome.INCONCLUSIVE
    mixed = replace(two, treated=(failed(ONE), failed(TWO, Kind.OTHER)))
    assert came_to(mixed).outcome is Outcome.INCONCLUSIVE
    assert came_to(replace(two, treated=(failed(ONE), failed(TWO)))).outcome is Outcome.BLOCKED
    one_lost = replace(two, treated=(failed(ONE), failed(TWO, Kind.LINK)))
    assert came_to(one_lost).outcome is Outcome.INCONCLUSIVE


def test_what_is_not_restored_is_damaged_and_said_with_the_conclusion() -> None:
    found = came_to(REFUSED, restored=Restored(True, (f"{ONE}: it does not start any more",)))
    assert (found.outcome, found.damaged) == (Outcome.BLOCKED, True)
    assert "DAMAGED" in found.because and any("does not start any more" in r for r in found.reasons)
    unseen = came_to(REFUSED, restored=Restored(False))
    assert (unseen.outcome, unseen.damaged) == (Outcome.BLOCKED, None)
    assert "NOT SEEN TO BE RESTORED" in unseen.because


def test_a_failure_that_may_be_the_damages_own_refutes_nothing() -> None:
    other = replace(REFUSED, treated=(failed(ONE, Kind.OTHER),))
    assert came_to(other, restored=Restored(True, ("it does not start any more",))).outcome is Outcome.INCONCLUSIVE


def reset(came: Came, method: str = "flr") -> Attempt:
    return Attempt(ONE, method, came, "as it was seen")


@pytest.mark.parametrize("came", [c for c in Came if c is not Came.CLEARED])
def test_a_reset_that_does_not_start_it_changes_no_conclusion_and_is_told(came: Came) -> None:
    found = conclude(BEFORE, REFUSED, WHOLE, (reset(came),))
    assert (found.outcome, found.damaged) == (Outcome.BLOCKED, False)
    assert f"reset: flr on {ONE}: {came} (as it was seen)" in found.reasons


@pytest.mark.parametrize("kind", [Kind.FSP, Kind.FIRMWARE])
def test_a_gpu_that_a_reset_brings_up_in_the_identity_domain_was_not_kept_by_it_alone(kind: Kind) -> None:
    trial = replace(REFUSED, treated=(failed(ONE, kind),))
    found = conclude(BEFORE, trial, WHOLE, (reset(Came.STAYED), reset(Came.CLEARED, "bus")))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert f"({ONE} by bus) it started, still in the identity domain" in found.because


def test_a_gpu_that_a_reset_has_lost_asks_for_the_power_to_be_cut() -> None:
    gone = Restored(True, (f"{ONE}: it does not start any more",))
    found = conclude(BEFORE, REFUSED, gone, (reset(Came.LOST), reset(Came.NOT_TRIED, "bus")))
    assert (found.outcome, found.damaged) == (Outcome.BLOCKED, True)
    assert f"a reset lost {ONE} by flr: cut the power" in found.because
    back = conclude(BEFORE, REFUSED, WHOLE, (reset(Came.LOST),))
    assert "cut the power" not in back.because and back.damaged is False  # boot B had brought it back


def test_what_was_not_made_damaged_nothing() -> None:
    found = came_to(Trial(False, why_not="not fit", made=False), restored=Restored(False))
    assert (found.outcome, found.damaged) == (Outcome.INCONCLUSIVE, False)


@given(
    came_back=st.booleans(),
    kind=st.sampled_from(["identity", "DMA-FQ", ""]),
    driver=st.sampled_from(["nvidia", "", "vfio-pci"]),
    started=st.sampled_from([True, False, None]),
    first=st.sampled_from([None, *Kind]),
    set_s=st.sampled_from([None, 3.4, 9.0]),
    driver_s=st.sampled_from([None, 7.6]),
    control_started=st.sampled_from([True, False, None]),
    gaps=st.sampled_from([(), ("rotated",)]),
    whole=st.sampled_from([Restored(True), Restored(False), Restored(True, ("broken",))]),
)
def test_no_conclusion_without_what_it_needs(
    came_back: bool,
    kind: str,
    driver: str,
    started: bool | None,
    first: Kind | None,
    set_s: float | None,
    driver_s: float | None,
    control_started: bool | None,
    gaps: tuple[str, ...],
    whole: Restored,
) -> None:
    error = FirstError(first, "s", "text") if first else None
    gpu = GpuBoot(ONE, kind, driver, started, error)
    others = (GpuBoot(TWO, "DMA-FQ", "nvidia", control_started),)
    trial = Trial(came_back, (gpu,), others, {ONE: set_s} if set_s else {}, driver_s, gaps, SAME)
    found = conclude(BEFORE, trial, whole)
    valid = came_back and kind == "identity" and driver == "nvidia" and set_s == 3.4 and driver_s == 7.6
    if found.outcome is not Outcome.INCONCLUSIVE:
        assert valid and started is not None
    if found.outcome is Outcome.BLOCKED:
        assert first is Kind.FSP and started is False and control_started and not gaps
    if found.outcome is Outcome.REFUTED:
        assert first in (Kind.FIRMWARE, Kind.OTHER) and control_started and not gaps and whole.whole
    if valid and started:
        assert found.outcome is Outcome.SUPPORTED
    assert (found.damaged is False) == whole.whole

"""What the identity experiment takes, refuses, and says at its gate; a stored plan is enough to take it back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from proofbook import changes, procedures
from proofbook.changes.iommu_identity import RISK, IommuIdentity
from proofbook.checks.identity.rule import Before, Function, GpuBoot
from proofbook.errors import BadParameter
from proofbook.inventory import HostSpec
from proofbook.model import Identity, Observation, Plan, Seen
from proofbook.probes.pci import ResetMethods
from proofbook.remote.iommu_identity import PATHS, PROGRAM

ONE, TWO, AUDIO = "0000:01:00.0", "0000:41:00.0", "0000:01:00.1"
BEFORE = Before((GpuBoot(ONE, "DMA-FQ", "nvidia", True), GpuBoot(TWO, "DMA", "nvidia", False)), {})
HOST = Identity("gpu01", "gpu01", "4f" * 16, "a1" * 16, "ssh-ed25519 SHA256:x", "root", 0, "6.17")
PROCEDURE = procedures.load("iommu-identity-experiment")


@pytest.mark.parametrize("gpus", ["", "all", "node:0", "0000:01:00.0", "01:00.0, 0000:41:00.0"])
def test_which_gpus_may_be_named(gpus: str) -> None:
    assert PROCEDURE.validate({"host": "gpu01", "gpus": gpus}).gpus == gpus


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpus", "first"),
        ("gpus", "node:"),
        ("gpus", "0000:zz:00.0"),
        ("guard_minutes", 30.0),
        ("approved", "yes"),
        ("settle_minutes", -1.0),
        ("reset_methods", "flr,bus"),
        ("reset_methods", "flr flr"),
        ("reset_methods", "flr /sys"),
        ("reset_methods", "FLR"),
    ],
)
def test_what_is_not_usable_is_refused(name: str, value: object) -> None:
    with pytest.raises(BadParameter, match=f"{name}="):
        PROCEDURE.validate({"host": "gpu01", name: value})


def test_what_does_not_fit_the_host_is_refused() -> None:
    with pytest.raises(BadParameter, match="no kernel of its own"):
        PROCEDURE.accepts(PROCEDURE.validate({"host": "llm-two"}), HostSpec(name="llm-two", runs_on="gpu01"))
    with pytest.raises(BadParameter, match="without approver"):
        PROCEDURE.accepts(PROCEDURE.validate({"host": "gpu01", "approved": "sha256:" + "0" * 64}), HostSpec(name="gpu01"))


def test_the_console_is_not_confirmed_unless_somebody_says_so() -> None:
    assert PROCEDURE.validate({"host": "gpu01"}).console_confirmed is False


def test_no_reset_is_asked_for_unless_somebody_says_so_twice() -> None:
    assert PROCEDURE.validate({"host": "gpu01"}).resets == ()
    asked = PROCEDURE.validate({"host": "gpu01", "reset_methods": "flr  bus"})
    assert asked.resets == ("flr", "bus")
    with pytest.raises(BadParameter, match="dead until the power is cut"):
        PROCEDURE.accepts(asked, HostSpec(name="gpu01"))
    PROCEDURE.accepts(asked.model_copy(update={"reset_may_kill": True}), HostSpec(name="gpu01"))


def test_the_lease_outlives_the_guard_and_both_boots() -> None:
    parameters = PROCEDURE.validate({"host": "gpu01"})
    assert PROCEDURE.lease_s(parameters) > parameters.guard_minutes * 60 + 2 * 1800


def test_a_plan_says_every_file_both_boots_and_who_is_the_control() -> None:
    plan = IommuIdentity((ONE,), BEFORE).plan(Seen(), HOST)
    assert all(path in plan.diff for path in PATHS)
    assert sum("reboot" in action.argv for action in (*plan.actions, *plan.undo)) == 2
    assert any(f"treated: {ONE}; control: {TWO}" in fact for fact in plan.facts)
    assert any("power cycle" in text for text in plan.cannot_undo)


def test_the_approval_is_of_the_gpus_the_guard_and_what_was_found() -> None:
    digests = {
        change.plan(Seen(), HOST).digest
        for change in (
            IommuIdentity((ONE,), BEFORE),
            IommuIdentity((TWO,), BEFORE),
            IommuIdentity((ONE,), BEFORE, guard_minutes=120.0),
            IommuIdentity((ONE,), Before(BEFORE.gpus[:1])),
        )
    }
    assert len(digests) == 4


def test_a_stored_plan_is_enough_to_take_it_back() -> None:
    change = changes.acting(IommuIdentity((ONE,), BEFORE, 120.0).plan(Seen(), HOST))
    assert isinstance(change, IommuIdentity)
    assert (change.treated, change.guard_minutes) == ((ONE,), 120.0)
    assert [(g.pci, g.iommu_type, g.started) for g in change.before.gpus] == [(ONE, "DMA-FQ", True), (TWO, "DMA", False)]


WITH_AUDIO = Before(
    (GpuBoot(ONE, "DMA-FQ", "nvidia", True, None, (Function(AUDIO, "DMA-FQ", "snd_hda_intel"),)), BEFORE.gpus[1]), {}
)


def test_a_plan_names_the_functions_of_a_gpu_and_its_unit_sets_them_too() -> None:
    plan = IommuIdentity((ONE,), WITH_AUDIO).plan(Seen(), HOST)
    assert f"ExecStart=/bin/sh {PROGRAM} identity {ONE} {AUDIO}" in plan.diff
    assert any(f"{AUDIO} (snd_hda_intel)" in fact for fact in plan.facts)
    assert plan.digest != IommuIdentity((ONE,), BEFORE).plan(Seen(), HOST).digest
    assert AUDIO not in IommuIdentity((TWO,), WITH_AUDIO).plan(Seen(), HOST).diff  # the control's is left alone


def test_the_approval_is_of_the_functions_drivers_too() -> None:
    other = Before((GpuBoot(ONE, "DMA-FQ", "nvidia", True, None, (Function(AUDIO, "DMA-FQ", ""),)), BEFORE.gpus[1]), {})
    assert IommuIdentity((ONE,), WITH_AUDIO).plan(Seen(), HOST).digest != IommuIdentity((ONE,), other).plan(Seen(), HOST).digest


def test_a_stored_plan_knows_the_functions_that_must_be_back() -> None:
    change = changes.acting(IommuIdentity((ONE,), WITH_AUDIO).plan(Seen(), HOST))
    assert isinstance(change, IommuIdentity)
    assert [g.functions for g in change.before.gpus] == [g.functions for g in WITH_AUDIO.gpus]
    assert change.addresses == (ONE, AUDIO)


def with_resets(listed: dict[str, tuple[str, ...]], *methods: str) -> Plan:
    look = Seen([Observation(ResetMethods(), listed, "", datetime(2026, 3, 9, tzinfo=UTC), "a1" * 16)])
    return IommuIdentity((ONE,), BEFORE, reset_methods=methods).plan(look, HOST)


def test_a_plan_lists_each_reset_and_what_it_may_cost() -> None:
    plan = with_resets({ONE: ("flr", "bus"), TWO: ("flr",)}, "bus", "cxl_bus")
    assert [a.what.split(" (")[0] for a in plan.actions[3:]] == [f"in boot A, only if {ONE} does not start: reset it by bus"]
    assert RISK in plan.cannot_undo
    assert f"cxl_bus on {ONE}: NOT TRIED (it is not in its reset_method (flr bus))" in plan.facts
    assert plan.settings["resets"] == {ONE: ["bus"]}  # nothing of the control
    assert any("the listed resets once each" in fact for fact in plan.facts)


def test_a_plan_without_resets_has_none_and_says_so() -> None:
    plan = IommuIdentity((ONE,), BEFORE).plan(Seen(), HOST)
    assert len(plan.actions) == 3 and RISK not in plan.cannot_undo and "resets" not in plan.settings
    assert any("no reset of a GPU" in fact for fact in plan.facts)


def test_where_nothing_that_was_asked_for_is_listed_nothing_is_at_risk() -> None:
    plan = with_resets({ONE: ("pm",)}, "flr")
    assert len(plan.actions) == 3 and RISK not in plan.cannot_undo
    assert any("flr on 0000:01:00.0: NOT TRIED" in fact for fact in plan.facts)
    unseen = IommuIdentity((ONE,), BEFORE, reset_methods=("flr",)).plan(Seen(), HOST)
    assert len(unseen.actions) == 3 and any("NOT TRIED" in fact for fact in unseen.facts)


def test_the_approval_is_of_the_resets_and_of_what_the_machine_lists() -> None:
    both: dict[str, tuple[str, ...]] = {ONE: ("flr", "bus")}
    plans = [
        with_resets(both, "flr"),
        with_resets(both, "bus"),
        with_resets(both, "flr", "bus"),
        with_resets(both, "bus", "flr"),
        with_resets({ONE: ("flr", "bus", "pm")}, "flr"),
        IommuIdentity((ONE,), BEFORE).plan(Seen(), HOST),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)

"""The two looks of a reboot verification, and what must hold for every check of them: nothing unseen is ever a PASS."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proofbook.checks.baseline import Scope
from proofbook.checks.boot import OrderlyShutdown
from proofbook.checks.reboot import CameBack, Situation, first_look, second_look
from proofbook.checks.systemd import ServiceRunsAsConfigured
from proofbook.model import Check, Finding, Observation, Probe, Seen, Verdict, worst
from proofbook.probes.boot import Boots, Machine
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import Gpus
from proofbook.probes.pci import PciDevices
from proofbook.probes.systemd import UnitState

PASS, FAIL, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN


def looks(w: Any) -> tuple[tuple[Check, ...], tuple[Check, ...]]:
    scope = Scope(w.GPUS, (w.CONTAINER,), (w.SERVICE,))
    kept = {w.SERVICE.spec: ("20260308T120000Z-x", {"argv": w.SERVER.split(), "environment": w.ENVIRONMENT})}
    situation = Situation(rebooted_by_us=True, boot_id_before=w.OLD, kept=kept, controls_reboot=True)
    before = w.baseline()
    return first_look(scope, before, situation), second_look(scope, before, situation, w.seen())


def judged(check: Check, seen: Seen) -> list[Finding]:
    return list(check.judge(seen))


def test_a_healthy_machine_passes_both_looks(world: Any) -> None:
    for look in looks(world):
        for check in look:
            assert {f.verdict for f in world.judge(check)} <= {PASS, Verdict.NOT_CHECKED}
        assert worst(world.verdict(check) for check in look if check.name != "pci.LinkSpeed") is PASS


def test_every_check_has_a_name_a_question_and_well_formed_findings(world: Any) -> None:
    for check in (*looks(world)[0], *looks(world)[1], CameBack("it went down")):
        assert check.title.endswith("?")
        module, _, name = check.name.partition(".")
        assert type(check).__name__ == name
        assert type(check).__module__ == f"proofbook.checks.{module}"
        if check.name != "contact.CameBack":
            findings = world.judge(check)
            assert findings
            assert all(f.check == check.name and f.reason for f in findings)


#: What a check may do without: it only explains, or narrows down, what the other answers decide.
HELPS_ONLY: dict[str, set[Probe[Any]]] = {
    "boot.OrderlyShutdown": {Machine()},
    "journal.JournalKept": {KernelLog()},
    "kernel_log.KernelLogClean": {Machine(), PciDevices(), IommuGroups()},
    "iommu.IommuTypes": {KernelLog(), PciDevices()},
    "iommu.DmaFaults": {Machine(), PciDevices()},
    "pci.PcieErrors": {Machine(), PciDevices(), IommuGroups()},
    "service.ServiceAnswers": {Machine()},
}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_combination_of_unknown_answers_passes(world: Any, data: st.DataObject) -> None:
    for check in (*looks(world)[0], *looks(world)[1]):
        needed = sorted(check.needs(), key=repr)
        missing = set(data.draw(st.lists(st.sampled_from(needed), unique=True, min_size=1)))
        seen = Seen(
            Observation(
                o.probe,
                None if o.probe in missing else o.value,
                "permission denied" if o.probe in missing else "",
                o.taken_at,
                "",
            )
            for o in world.seen().values()
        )
        findings = judged(check, seen)
        verdict = worst(f.verdict for f in findings)
        assert verdict is not FAIL, f"{check.name} calls a missing answer a fault: {findings}"
        if not missing <= HELPS_ONLY.get(check.name, set()):
            assert verdict is UNKNOWN, f"{check.name} passes without {missing}: {findings}"
        if len(missing) == len(needed):
            assert PASS not in {f.verdict for f in findings}


def test_nothing_asked_is_nothing_known(world: Any) -> None:
    for check in (*looks(world)[0], *looks(world)[1]):
        assert {f.verdict for f in judged(check, Seen())} <= {UNKNOWN, Verdict.NOT_CHECKED}


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (lambda w: w.without(w.B).no_row(w.B), {"nvidia.GpusPresent"}),
        (lambda w: w.iommu_off(), {"iommu.IommuTypes"}),
        (lambda w: w.change(Machine(), boot_id=w.OLD).change(KernelLog(), boot_id=w.OLD), {"boot.Rebooted"}),
        (lambda w: w.change(w.PROCESS, argv=("/opt/serve",)), {"systemd.ServiceRunsAsConfigured"}),
        (lambda w: w.change(Gpus(), rows={}, problems={"": "API mismatch"}, exit_status=18), {"nvidia.GpusPresent"}),
        # Nothing fails in systemd's eyes when somebody runs the command from a shell; the unit never started.
        (
            lambda w: w.change(
                w.UNIT, active="inactive", sub="dead", main_pid=0, inactive_exit_s=None, main_started_s=None, active_enter_s=None
            ).blind(w.PROCESS),
            {"systemd.ServiceStartedByBoot", "systemd.ServiceStable", "service.ServiceAnswers"},
        ),
    ],
)
def test_one_fault_is_found_by_the_check_that_is_about_it(world: Any, broken: Any, failing: set[str]) -> None:
    first, _ = looks(world)
    seen = broken(world).seen()
    found = {check.name for check in first if worst(f.verdict for f in judged(check, seen)) is FAIL}
    assert found == failing


def test_the_second_look_knows_the_first(world: Any) -> None:
    _, second = looks(world)
    world.change(world.UNIT, n_restarts=1, invocation_id="22" * 16).change(Machine(), boot_id=world.OTHER)
    failed = {c.name for c in second if worst(f.verdict for f in judged(c, world.seen())) is FAIL}
    assert {"boot.StillUp", "systemd.ServiceStable"} <= failed


def test_the_same_look_has_the_same_name_however_often_it_is_composed(world: Any) -> None:
    """A run keys a step by its checks: what was seen meanwhile must not make it another step."""
    before = list(map(repr, looks(world)[1]))
    world.change(world.UNIT, n_restarts=5).change(Machine(), uptime_s=999.0)
    assert list(map(repr, looks(world)[1])) == before


def test_without_a_baseline_the_boot_before_is_the_journals(world: Any) -> None:
    scope = Scope(world.GPUS, (world.CONTAINER,), (world.SERVICE,))
    checks = first_look(scope, None, Situation(), world.seen())
    assert OrderlyShutdown(world.OLD) in checks
    assert OrderlyShutdown("") in first_look(scope, None, Situation())
    assert OrderlyShutdown("") in first_look(scope, None, Situation(), world.blind(Boots()).seen())
    assert all(UNKNOWN is not world.verdict(c) for c in checks if c.name.startswith("systemd."))


def test_what_was_kept_reaches_the_check(world: Any) -> None:
    check = next(c for c in looks(world)[0] if isinstance(c, ServiceRunsAsConfigured))
    assert check.kept is not None
    assert check.kept.argv == tuple(world.SERVER.split())
    assert check.before is not None
    assert UnitState(world.SERVICE.name, world.CONTAINER) in check.needs()

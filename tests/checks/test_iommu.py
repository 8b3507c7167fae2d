"""The types of iommu groups, and what a log without faults is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.iommu import DmaFaults, IommuTypes
from proofbook.intent import GpuSpec
from proofbook.model import Verdict
from proofbook.probes.iommu import IommuFacts, IommuGroup, IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import PciDevices

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
FAULT = "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"
NIC_FAULT = "ice 0000:22:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0011 address=0xd0000000 flags=0x0000]"


def of(w: Any, pci: str, check: Any) -> Any:
    return next(f for f in w.judge(check) if f.subject == pci)


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (lambda w: w, PASS, "as the inventory has it"),
        (lambda w: w.iommu(b="identity"), FAIL, "identity instead of DMA-FQ (the inventory)"),
        (lambda w: w.iommu(b="DMA"), FAIL, "DMA instead of DMA-FQ"),
        (lambda w: w.iommu(b=None), FAIL, "in no iommu group, while 2 groups exist"),
        (lambda w: w.iommu_off(), FAIL, "although the kernel log says 'iommu: Default domain type: Translated'"),
        (lambda w: w.iommu_off().blind(KernelLog()), FAIL, "there are no groups at all; the inventory"),
        (lambda w: w.iommu(b=""), UNKNOWN, "since 5.11"),
        (lambda w: w.iommu(b="unknown"), UNKNOWN, "does not say"),
        (lambda w: w.without(w.B).iommu(b=None), UNKNOWN, "not there"),
    ],
)
def test_types_against_the_inventory(world: Any, broken: Callable[[Any], Any], verdict: Verdict, says: str) -> None:
    before = world.baseline()
    finding = of(broken(world), world.B, IommuTypes(world.GPUS, before))
    assert finding.verdict is verdict
    assert says in finding.reason


@pytest.mark.parametrize(
    ("then", "now", "verdict", "says"),
    [
        (lambda w: w, lambda w: w, PASS, "as the look before has it"),
        (lambda w: w, lambda w: w.iommu(b="identity"), FAIL, "identity instead of DMA-FQ (the look before)"),
        (lambda w: w, lambda w: w.iommu(b="DMA"), WARN, "flush policy"),
        (lambda w: w, lambda w: w.iommu_off(), FAIL, "the IOMMU is off"),
        (lambda w: w.iommu_off(), lambda w: w.iommu_off(), PASS, "the IOMMU is off, as before"),
        (lambda w: w.iommu(b=None), lambda w: w, PASS, "in no iommu group, as before"),
        (lambda w: w.iommu(b=None), lambda w: w.put(IommuGroups(), type(w)().values[IommuGroups()]), WARN, "it was in no group"),
        (lambda w: w.blind(IommuGroups()), lambda w: w, UNKNOWN, "of before are not known: permission denied"),
    ],
)
def test_types_against_the_look_before(world: Any, then: Any, now: Any, verdict: Verdict, says: str) -> None:
    before = then(world).baseline()
    world.reasons.clear()
    finding = of(now(world), world.B, IommuTypes((), before))
    assert finding.verdict is verdict
    assert says in finding.reason


def test_a_passed_through_device_changes_with_its_virtual_machine(world: Any) -> None:
    world.device(world.B, driver="vfio-pci").iommu(b="unmanaged")
    before = world.baseline()
    assert world.verdict(IommuTypes((GpuSpec(pci=world.B, driver="vfio-pci"),), before)) is PASS
    world.iommu(b="DMA-FQ")
    (finding,) = world.judge(IommuTypes((GpuSpec(pci=world.B, driver="vfio-pci"),), before))
    assert finding.verdict is NOT_CHECKED


def test_types_that_nobody_declared(world: Any) -> None:
    (finding,) = world.judge(IommuTypes((), None))
    assert finding.verdict is NOT_CHECKED
    assert finding.observed == {world.A: "DMA-FQ", world.B: "DMA-FQ"}
    bare = tuple(GpuSpec(pci=g.pci) for g in world.GPUS)
    assert {f.verdict for f in world.judge(IommuTypes(bare, None))} == {NOT_CHECKED}
    assert world.iommu_off().verdict(IommuTypes((), None)) is WARN
    assert world.without(world.A).without(world.B).verdict(IommuTypes((), None)) is UNKNOWN
    assert world.blind(PciDevices()).verdict(IommuTypes((), None)) is UNKNOWN


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda w: w, {("", PASS)}),
        (lambda w: w.says(FAULT), {("0000:41:00.0", FAIL), ("", PASS)}),
        (lambda w: w.says(NIC_FAULT), {("0000:22:00.0", WARN), ("", PASS)}),
        (lambda w: w.iommu_off(), {("", NOT_CHECKED)}),
        (lambda w: w.iommu(a="identity", b="identity"), {("", NOT_CHECKED)}),
        (lambda w: w.iommu(b="identity"), {("", NOT_CHECKED), ("", PASS)}),
        (lambda w: w.change(KernelLog(), complete=False, gaps=("Missed 312 kernel messages",)), {("", UNKNOWN)}),
        (lambda w: w.change(KernelLog(), complete=False), {("", UNKNOWN)}),
        (lambda w: w.blind(IommuGroups()), {("", UNKNOWN)}),
        (lambda w: w.says(FAULT).blind(IommuGroups()), {("0000:41:00.0", FAIL), ("", UNKNOWN)}),
    ],
)
def test_dma_faults(world: Any, broken: Callable[[Any], Any], expected: set[tuple[str, Verdict]]) -> None:
    findings = broken(world).judge(DmaFaults(world.GPUS))
    assert {(f.subject, f.verdict) for f in findings} == expected


def test_a_partly_translated_machine_says_which_part(world: Any) -> None:
    findings = world.iommu(b="identity").judge(DmaFaults(world.GPUS))
    reasons = {f.verdict: f.reason for f in findings}
    assert "0000:41:00.0 (identity)" in reasons[NOT_CHECKED]
    assert "1 translated GPU (0000:01:00.0)" in reasons[PASS]


def test_suppressed_lines_make_a_lower_bound(world: Any) -> None:
    world.says(FAULT, FAULT, "amd_iommu_report_page_fault: 10432 callbacks suppressed", FAULT)
    finding = of(world, world.B, DmaFaults(world.GPUS))
    assert (finding.count, finding.at_least, finding.signature) == (10435, True, "amdvi-io-page-fault")
    assert finding.lines


def test_a_fault_of_a_bridge_may_be_one_of_what_is_behind_it(world: Any) -> None:
    requester, behind = "0000:43:00.0", "0000:43:02.0"
    world.says(
        f"DMAR: [DMA Write NO_PASID] Request device [{requester[5:]}] fault addr 0x7f00000000 [fault reason 0x05] no write"
    )
    devices = world.seen().value(PciDevices())
    world.put(
        PciDevices(), {**{a: d for a, d in devices.items() if a != world.B}, behind: replace(devices[world.B], address=behind)}
    )
    groups = {21: IommuGroup("DMA-FQ", (world.A,)), 22: IommuGroup("DMA-FQ", (behind,))}
    world.put(IommuGroups(), IommuFacts(groups, {world.A: "DMA-FQ", behind: "DMA-FQ"}))
    specs = (world.GPUS[0], world.GPUS[1].model_copy(update={"pci": behind}))
    findings = {f.subject: f for f in world.judge(DmaFaults(specs))}
    assert findings[requester].verdict is FAIL
    assert f"A PCIe-to-PCI bridge gives this address to all that is behind it: {behind}" in findings[requester].reason
    assert f"no fault of 1 translated GPU ({world.A})" in findings[""].reason


def test_no_gpu_at_all_is_no_pass(world: Any) -> None:
    world.without(world.A).without(world.B)
    world.log("Linux version 6.17", world.GRANTED)
    assert world.verdict(DmaFaults(())) is UNKNOWN


def test_a_log_of_another_boot_is_not_judged(world: Any) -> None:
    world.change(KernelLog(), boot_id=world.OLD)
    (finding,) = world.judge(DmaFaults(world.GPUS))
    assert finding.verdict is UNKNOWN
    assert "is of boot a1a1a1a1" in finding.reason


def test_types_of_some_gpus_from_the_inventory_others_from_before(world: Any) -> None:
    declared = (replace_type(world.GPUS[0], "identity"), replace_type(world.GPUS[1], ""))
    before = world.baseline()
    findings = {f.subject: f for f in world.judge(IommuTypes(declared, before))}
    assert findings[world.A].verdict is FAIL
    assert findings[world.B].reason == "DMA-FQ, as the look before has it"
    blind = replace(before, iommu=None)
    findings = {f.subject: f for f in world.judge(IommuTypes(declared, blind))}
    assert (findings[world.A].verdict, findings[world.B].verdict) == (FAIL, UNKNOWN)


def replace_type(spec: GpuSpec, kind: Any) -> GpuSpec:
    return spec.model_copy(update={"iommu_type": kind})

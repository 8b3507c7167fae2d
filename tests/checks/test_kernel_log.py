"""The kernel log: faults, gaps, lines that only look bad, and lines that nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proofbook.checks.kernel_log import KernelLogClean
from proofbook.intent import GpuSpec
from proofbook.model import Verdict
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import PciDevices

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
XID79 = "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID154 = "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
PAGE_FAULT = "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"
AER = "pcieport 0000:40:01.1: AER: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"


def check(w: Any) -> KernelLogClean:
    return KernelLogClean(w.GPUS)


@pytest.mark.parametrize(
    ("broken", "verdicts"),
    [
        (lambda w: w, {PASS}),
        (lambda w: w.says(XID79), {FAIL}),
        (lambda w: w.change(KernelLog(), complete=False, gaps=("Missed 312 kernel messages",)), {UNKNOWN}),
        (lambda w: w.change(KernelLog(), complete=False), {UNKNOWN}),
        (lambda w: w.log(), {UNKNOWN}),
        (lambda w: w.says(XID79).change(KernelLog(), complete=False, gaps=("starts late",)), {FAIL, UNKNOWN}),
        # Whether these devices are GPUs is also said by the log and by the inventory.
        (lambda w: w.says(XID79).blind(PciDevices(), IommuGroups()), {FAIL}),
    ],
)
def test_verdicts(world: Any, broken: Callable[[Any], Any], verdicts: set[Verdict]) -> None:
    assert {f.verdict for f in broken(world).judge(check(world))} == verdicts


def test_a_fault_names_its_gpu_its_lines_and_what_it_follows_from(world: Any) -> None:
    world.says(XID79, XID154)
    first, second = world.judge(check(world))
    assert (first.signature, first.subject, first.verdict, first.caused_by) == ("xid-79", world.B, FAIL, "")
    assert first.lines == (XID79,)
    assert (second.signature, second.caused_by) == ("xid-154", "xid-79")


def test_iommu_and_pcie_faults_are_left_to_their_own_checks(world: Any) -> None:
    findings = world.says(PAGE_FAULT, AER).judge(check(world))
    assert [f.verdict for f in findings] == [PASS]


def test_harmless_lines_are_counted_and_no_fault(world: Any) -> None:
    (finding,) = world.judge(check(world))
    assert "3 of them look bad and are known to be harmless" in finding.reason


def test_a_line_that_nobody_knows_is_shown(world: Any) -> None:
    world.says("NVRM: GPU 0000:41:00.0: flux capacitor failed with error 0x88")
    (finding,) = world.judge(check(world))
    assert finding.verdict is WARN
    assert "flux capacitor" in finding.lines[0]


def test_a_log_of_another_boot_is_none(world: Any) -> None:
    world.change(KernelLog(), boot_id=world.OTHER)
    (finding,) = world.judge(check(world))
    assert finding.verdict is UNKNOWN
    assert "the kernel log is of boot" in finding.reason


NOT_CALLED = "NVRM: The NVIDIA probe routine was not called for {} device(s)."


@pytest.mark.parametrize(
    ("devices", "passed_through", "verdict"), [(1, 1, PASS), (1, 2, PASS), (2, 1, FAIL), (1, 0, FAIL), (2, 2, PASS)]
)
def test_gpus_that_the_driver_does_not_get_are_right_where_passthrough_is_meant(
    world: Any, devices: int, passed_through: int, verdict: Verdict
) -> None:
    world.says(NOT_CALLED.format(devices))
    gpus = tuple(GpuSpec(pci=g.pci, driver="vfio-pci" if n < passed_through else "nvidia") for n, g in enumerate(world.GPUS))
    assert world.verdict(KernelLogClean(gpus)) is verdict


def test_gpus_that_the_driver_does_not_get_when_nobody_said_what_is_meant(world: Any) -> None:
    world.says(NOT_CALLED.format(1))
    assert world.verdict(KernelLogClean()) is WARN


def test_no_gpu_for_the_driver_is_right_only_when_all_are_passed_through(world: Any) -> None:
    world.says(NOT_CALLED.format(2), "NVRM: No NVIDIA devices probed.")
    both = tuple(GpuSpec(pci=g.pci, driver="vfio-pci") for g in world.GPUS)
    assert world.verdict(KernelLogClean(both)) is PASS
    assert world.verdict(KernelLogClean(world.GPUS)) is FAIL

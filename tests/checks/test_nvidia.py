"""GPUs by address and name, and the driver as one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.nvidia import DriverConsistent, GpusPresent
from proofbook.intent import GpuSpec
from proofbook.model import Suggested, Verdict
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.pci import PciDevices

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
HANDLE = "Unable to determine the device handle for GPU1: 0000:41:00.0: Unknown Error"
Break = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("broken", "verdict", "says", "action"),
    [
        (lambda w: w, PASS, "recovery action None", Suggested.NONE),
        (lambda w: w.without(w.B), FAIL, "not on the PCI bus", Suggested.POWER_CYCLE),
        (lambda w: w.device(w.B, vendor=0xFFFF, device=0xFFFF), FAIL, "reads all ones", Suggested.POWER_CYCLE),
        (lambda w: w.device(w.B, vendor=0x8086), FAIL, "no NVIDIA GPU (vendor 8086)", Suggested.FIX_CONFIG),
        (lambda w: w.device(w.B, driver="vfio-pci"), FAIL, "bound to vfio-pci; the inventory has nvidia", Suggested.FIX_CONFIG),
        (lambda w: w.device(w.B, driver=""), FAIL, "bound to no driver", Suggested.FIX_CONFIG),
        (lambda w: w.no_row(w.B, HANDLE), FAIL, "Unable to determine the device handle", Suggested.LOOK),
        (lambda w: w.no_row(w.B), FAIL, "no row in nvidia-smi, which has 1", Suggested.LOOK),
        (lambda w: w.row(w.B, recovery_action="Reset"), FAIL, "recovery action: Reset", Suggested.RESET_GPU),
        (lambda w: w.row(w.B, recovery_action="Reboot"), FAIL, "recovery action: Reboot", Suggested.REBOOT),
        (lambda w: w.row(w.B, recovery_action="Something New"), FAIL, "Something New", Suggested.LOOK),
        (lambda w: w.row(w.B, recovery_action=""), PASS, "not reported", Suggested.NONE),
        (lambda w: w.row(w.B, detailed=False), FAIL, "nvidia-smi -q does not list it", Suggested.LOOK),
        (lambda w: w.row(w.B, detailed=None), PASS, "recovery action None", Suggested.NONE),
        (lambda w: w.row(w.B, broken={"pstate": "[GPU requires reset]"}), FAIL, "[GPU requires reset]", Suggested.RESET_GPU),
        (
            lambda w: w.row(w.B, uuid="GPU-00000000-0000-0000-0000-000000000000"),
            FAIL,
            "instead of GPU-e94d7a08",
            Suggested.FIX_CONFIG,
        ),
        (lambda w: w.row(w.B, uuid=""), UNKNOWN, "gives no UUID", Suggested.NONE),
        (lambda w: w.change(Gpus(), proc={}), UNKNOWN, "has no information of it", Suggested.NONE),
        (lambda w: w.change(Gpus(), proc={w.A: {}, w.B: {"GPU Excluded": "Yes"}}), FAIL, "excludes it", Suggested.FIX_CONFIG),
        (lambda w: w.blind(Gpus()), UNKNOWN, "the driver could not be asked: permission denied", Suggested.NONE),
        (lambda w: w.blind(PciDevices()), UNKNOWN, "PCI could not be read", Suggested.NONE),
        # A fault that is seen is not hidden by an answer that is missing.
        (lambda w: w.without(w.B).blind(Gpus()), FAIL, "not on the PCI bus (not known: the driver", Suggested.POWER_CYCLE),
        (lambda w: w.blind(PciDevices()).no_row(w.B), FAIL, "no row in nvidia-smi", Suggested.LOOK),
    ],
)
def test_one_gpu(world: Any, broken: Break, verdict: Verdict, says: str, action: Suggested) -> None:
    finding = next(f for f in broken(world).judge(GpusPresent(world.GPUS, None)) if f.subject == world.B)
    assert (finding.verdict, finding.action) == (verdict, action)
    assert says in finding.reason
    assert verdict is not FAIL or finding.what_to_do


def test_the_other_gpus_are_judged_beside_a_broken_one(world: Any) -> None:
    findings = world.no_row(world.B, HANDLE).judge(GpusPresent(world.GPUS, None))
    assert [(f.subject, f.verdict) for f in findings] == [(world.A, PASS), (world.B, FAIL)]


def test_swapped_cards_are_named(world: Any) -> None:
    world.row(world.A, uuid=world.UUIDS[world.B]).row(world.B, uuid=world.UUIDS[world.A])
    first, second = world.judge(GpusPresent(world.GPUS, None))
    assert f"that one is now at {world.B}" in first.reason
    assert f"that one is now at {world.A}" in second.reason


def test_passthrough_is_right_where_it_is_meant(world: Any) -> None:
    world.device(world.B, driver="vfio-pci").no_row(world.B)
    specs = (world.GPUS[0], GpuSpec(pci=world.B, driver="vfio-pci"))
    assert world.verdict(GpusPresent(specs, None)) is PASS
    assert world.verdict(GpusPresent(world.GPUS, None)) is FAIL


def test_a_gpu_back_in_host_hands_is_wrong_where_passthrough_is_meant(world: Any) -> None:
    specs = (world.GPUS[0], GpuSpec(pci=world.B, driver="vfio-pci"))
    assert world.verdict(GpusPresent(specs, None)) is FAIL


def test_who_is_expected_comes_from_before_when_nobody_declared(world: Any) -> None:
    before = world.baseline()
    world.without(world.B).no_row(world.B)
    assert world.verdict(GpusPresent((), before)) is FAIL
    assert world.verdict(GpusPresent((), None)) is UNKNOWN  # one GPU is visible, and well


def test_nothing_of_nothing_is_unknown(world: Any) -> None:
    world.without(world.A).without(world.B).change(Gpus(), rows={}, proc={})
    (finding,) = world.judge(GpusPresent((), None))
    assert finding.verdict is UNKNOWN
    assert "0 GPUs can be seen" in finding.reason
    assert world.blind(Gpus(), PciDevices()).verdict(GpusPresent(world.GPUS, None)) is UNKNOWN


def test_a_fault_shows_even_when_nobody_declared(world: Any) -> None:
    world.no_row(world.B, HANDLE)
    findings = world.judge(GpusPresent((), None))
    assert [(f.subject, f.verdict) for f in findings] == [(world.B, FAIL), ("", UNKNOWN)]


def test_nvidia_smi_as_a_whole_may_fail(world: Any) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    world.change(Gpus(), rows={}, problems={"": f"{said}\nNVML library version: 595.71"}, exit_status=18, proc={})
    findings = world.judge(GpusPresent(world.GPUS, None))
    assert (findings[0].subject, findings[0].verdict) == ("nvidia-smi", FAIL)
    assert f"{said}; NVML library version: 595.71 (exit status 18)" in findings[0].reason
    passthrough = tuple(GpuSpec(pci=g.pci, driver="vfio-pci") for g in world.GPUS)
    world.device(world.A, driver="vfio-pci").device(world.B, driver="vfio-pci")
    assert world.verdict(GpusPresent(passthrough, None)) is PASS


def test_an_extra_gpu_is_a_warning_and_a_vga_of_the_board_is_none(world: Any) -> None:
    findings = world.judge(GpusPresent(world.GPUS[:1], None))
    assert [(f.subject, f.verdict) for f in findings] == [(world.A, PASS), (world.B, WARN)]


@pytest.mark.parametrize(
    ("broken", "subject", "after", "before"),
    [
        (lambda w: w, "versions", PASS, PASS),
        (lambda w: w.change(Driver(), library_version="595.71.05"), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), library_version="595.71"), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), library_version="595.58"), "versions", PASS, PASS),  # the short form is no other version
        (lambda w: w.change(Driver(), library_version="595.5"), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), disk_version="595.71.05"), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), disk_srcversion="0000"), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), disk_version=None, problems={"disk_version": "no modinfo"}), "versions", UNKNOWN, UNKNOWN),
        (lambda w: w.change(Driver(), library_version=None), "versions", UNKNOWN, UNKNOWN),
        (lambda w: w.change(Driver(), loaded_srcversion=None), "versions", UNKNOWN, UNKNOWN),
        # What is known to differ counts, whatever else is missing.
        (lambda w: w.change(Driver(), library_version="1.2", disk_version=None), "versions", FAIL, WARN),
        (lambda w: w.change(Driver(), open_module=False), "flavour", FAIL, FAIL),
        (lambda w: w.change(Driver(), open_module=None), "flavour", UNKNOWN, UNKNOWN),
        (lambda w: w.blind(PciDevices()), "flavour", UNKNOWN, UNKNOWN),
        (lambda w: w.device(w.A, device=0x2330).device(w.B, device=0x2330), "flavour", NOT_CHECKED, NOT_CHECKED),
        (lambda w: w.change(Driver(), module_version=""), "module", FAIL, FAIL),
    ],
)
def test_driver(world: Any, broken: Break, subject: str, after: Verdict, before: Verdict) -> None:
    world = broken(world)
    for early, verdict in ((False, after), (True, before)):
        findings = {f.subject: f for f in world.judge(DriverConsistent(world.GPUS, None, before_reboot=early))}
        assert findings[subject].verdict is verdict


def test_a_differing_version_names_all_three(world: Any) -> None:
    world.change(Driver(), library_version="595.71.05")
    reason = world.judge(DriverConsistent(world.GPUS))[0].reason
    assert "loaded module 595.58.03, module on disk 595.58.03, library 595.71.05" in reason


def test_no_module_is_right_when_every_gpu_is_passed_through(world: Any) -> None:
    world.change(Driver(), module_version="", open_module=None)
    passthrough = tuple(GpuSpec(pci=g.pci, driver="vfio-pci") for g in world.GPUS)
    assert {f.verdict for f in world.judge(DriverConsistent(passthrough))} == {NOT_CHECKED}
    world.change(Driver(), problems={"module_version": "permission denied"})
    assert world.verdict(DriverConsistent(world.GPUS)) is UNKNOWN


def test_a_machine_without_gpus_needs_no_module(world: Any) -> None:
    world.without(world.A).without(world.B).change(Driver(), module_version="")
    assert {f.verdict for f in world.judge(DriverConsistent())} == {NOT_CHECKED}


@pytest.mark.parametrize(("on_disk_before", "verdict"), [("595.58.03", PASS), ("570.124", WARN)])
def test_a_new_version_is_explained_by_what_lay_on_disk(world: Any, on_disk_before: str, verdict: Verdict) -> None:
    before = world.baseline()
    assert before.driver is not None
    before = replace(before, driver=replace(before.driver, module_version="570.124", disk_version=on_disk_before))
    findings = {f.subject: f for f in world.judge(DriverConsistent(world.GPUS, before))}
    assert findings["change"].verdict is verdict

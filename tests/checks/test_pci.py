"""Widths, speeds and errors of links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proofbook.checks.pci import LinkSpeed, LinkWidth, PcieErrors
from proofbook.intent import GpuSpec
from proofbook.model import Suggested, Verdict
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import AerCounters, AerTotals, LinkFacts, PciDevices

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
Break = Callable[[Any], Any]


def link(speed: float | None = 2.5, width: int | None = 16, max_width: int | None = 16) -> Break:
    return lambda w: w.device(w.B, link=LinkFacts(speed, width, 32.0, max_width))


def same(w: Any) -> Any:
    return w


@pytest.mark.parametrize(
    ("declared", "before", "now", "verdict", "says"),
    [
        (16, same, same, PASS, "as the inventory has it"),
        (16, same, link(width=8), FAIL, "x8 instead of x16 (the inventory)"),
        (8, same, link(width=8), PASS, "as the inventory has it"),
        (8, same, same, WARN, "more than the x8 of the inventory"),
        (None, same, same, PASS, "x16 of x16"),
        (None, same, link(width=8), FAIL, "x8 instead of x16 (the look before)"),
        (None, link(width=8), link(width=8), WARN, "as before: it may never have had"),
        (None, link(width=8), link(), PASS, "x16 of x16"),
        (None, same, link(max_width=63), PASS, "as before"),
        (16, same, link(width=63), FAIL, "does not answer"),
        (16, same, link(speed=None), FAIL, "speed Unknown: the device does not answer"),
        (16, same, link(width=None), FAIL, "width Unknown"),
        (16, same, link(width=0), FAIL, "does not answer"),
        (16, same, lambda w: w.device(w.B, link=None), UNKNOWN, "no PCIe link"),
        (16, same, lambda w: w.without(w.B), UNKNOWN, "not there"),
        # All ones in the look before is no width that anything could be held against.
        (None, link(width=63), link(width=8), FAIL, "x8 of the x16"),
    ],
)
def test_width(world: Any, declared: Any, before: Break, now: Break, verdict: Verdict, says: str) -> None:
    baseline = before(world).baseline()
    finding = next(
        f for f in now(world).judge(LinkWidth((GpuSpec(pci=world.B, link_width=declared),), baseline)) if f.subject == world.B
    )
    assert finding.verdict is verdict
    assert says in finding.reason


@pytest.mark.parametrize(
    ("now", "verdict"),
    [(same, PASS), (link(width=8), FAIL), (link(width=63), FAIL), (link(max_width=None), UNKNOWN), (link(max_width=63), UNKNOWN)],
)
def test_width_that_nobody_declared_is_held_against_its_maximum(world: Any, now: Break, verdict: Verdict) -> None:
    assert now(world).verdict(LinkWidth((), None)) is verdict


def test_no_gpu_no_width(world: Any) -> None:
    world.without(world.A).without(world.B)
    assert world.verdict(LinkWidth((), None)) is UNKNOWN
    assert world.verdict(LinkSpeed((), None)) is UNKNOWN


@pytest.mark.parametrize("speed", [2.5, 32.0, None])
def test_speed_is_never_judged_at_idle(world: Any, speed: float | None) -> None:
    (finding,) = link(speed=speed)(world).judge(LinkSpeed(world.GPUS, None))
    assert finding.verdict is NOT_CHECKED
    assert "needs load" in finding.reason


CORRECTED = "pcieport 0000:40:01.1: AER: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
UNCORRECTED = "nvidia 0000:41:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)"


def without_osc(w: Any) -> Any:
    return w.log(*(x.text for x in w.values[KernelLog()].lines if "_OSC" not in x.text))


@pytest.mark.parametrize(
    ("broken", "verdicts", "says"),
    [
        (same, [PASS], "all counters of 2 GPUs are 0"),
        (lambda w: w.says(CORRECTED), [WARN], "corrected"),
        (lambda w: w.says(UNCORRECTED), [FAIL], "0000:41:00.0"),
        (lambda w: without_osc(w).says(w.KEPT), [NOT_CHECKED, WARN], "firmware keeps AER"),
        (lambda w: w.says(w.KEPT), [NOT_CHECKED, WARN], "1 of 2 host bridges"),
        (lambda w: w.says("Kernel command line: ro pci=noaer"), [NOT_CHECKED, WARN], "pci=noaer"),
        (without_osc, [NOT_CHECKED, WARN], "does not say that the operating system owns AER"),
        (lambda w: without_osc(w).change(KernelLog(), complete=False, gaps=("starts late",)), [UNKNOWN], "starts late"),
        (lambda w: w.change(KernelLog(), complete=False, gaps=("starts late",)), [UNKNOWN], "starts late"),
        (lambda w: w.blind(KernelLog()), [UNKNOWN], "without the kernel log"),
        (lambda w: w.blind(AerCounters()), [UNKNOWN], "counters could not be read"),
        (lambda w: w.put(AerCounters(), {}), [PASS], "no error counters of 0000:01:00.0, 0000:41:00.0"),
        (
            lambda w: w.put(
                AerCounters(), {w.A: AerTotals(0, 0, 0), w.B: AerTotals(0, 0, 0, "aer_dev_fatal: Permission denied")}
            ),
            [UNKNOWN],
            "not all counters could be read: 0000:41:00.0 (aer_dev_fatal: Permission denied)",
        ),
        (lambda w: w.put(AerCounters(), {w.B: AerTotals(0, 0, 1)}), [FAIL], "1 fatal"),
        (lambda w: w.put(AerCounters(), {w.B: AerTotals(0, 2, 0)}), [FAIL], "2 non-fatal"),
        (lambda w: w.put(AerCounters(), {w.B: AerTotals(7, 0, 0)}), [WARN], "7 corrected"),
        (lambda w: w.put(AerCounters(), {w.NIC: AerTotals(0, 0, 1)}), [WARN], "not of a GPU"),
        # Where the firmware keeps AER, a counter that moved all the same still counts.
        (
            lambda w: without_osc(w).says(w.KEPT).put(AerCounters(), {w.B: AerTotals(0, 0, 1)}),
            [FAIL, NOT_CHECKED, WARN],
            "1 fatal",
        ),
    ],
)
def test_errors(world: Any, broken: Break, verdicts: list[Verdict], says: str) -> None:
    findings = broken(world).judge(PcieErrors(world.GPUS, None))
    assert [f.verdict for f in findings] == verdicts
    assert any(says in f"{f.subject} {f.reason}" for f in findings)


def test_unreadable_pci_is_not_judged(world: Any) -> None:
    world.blind(PciDevices())
    for check in (LinkWidth(world.GPUS, None), LinkSpeed(world.GPUS, None)):
        (finding,) = world.judge(check)
        assert (finding.verdict, finding.action) == (UNKNOWN, Suggested.GRANT)

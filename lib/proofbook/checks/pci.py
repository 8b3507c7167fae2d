"""PCIe: width, speed and errors of the GPUs' links, and what of it can be judged on an idle machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.baseline import Baseline, is_gpu
from proofbook.checks.expected import DECLARE_GPUS, INVENTORY, ExpectedGpu, expected_gpus
from proofbook.checks.kernel_log import AER_TAGS, JudgedLog, findings_of, judge_log, tagged
from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.errors import CannotTell
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested, Verdict
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import AerCounters, AerTotals, LinkFacts, PciDevices, PciFacts

__all__ = ["LinkSpeed", "LinkWidth", "PcieErrors"]

#: The widest link that PCIe has. A width of 63 is a register that reads all ones: nobody answers.
_WIDEST = 32


def _to_look_at(
    declared: Sequence[GpuSpec], baseline: Baseline | None, devices: Mapping[str, PciFacts]
) -> tuple[ExpectedGpu, ...]:
    """The expected GPUs; without any, the ones that are there, of which then only the obvious can be judged."""
    expected = expected_gpus(declared, baseline)
    if expected:
        return expected
    return tuple(ExpectedGpu(a, d.driver, "", "", "", "", None, "", "PCI") for a, d in sorted(devices.items()) if is_gpu(d))


@dataclass(frozen=True)
class LinkWidth(Check):
    """Every GPU has all its lanes. Width can be judged at idle (speed cannot): lanes do not come back under load."""

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None
    name: ClassVar[str] = "pci.LinkWidth"
    title: ClassVar[str] = "Has every GPU all its lanes?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (PciDevices(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        devices, why = tell(seen, PciDevices()).pair
        if devices is None:
            return [unseen(self, why)]
        gpus = _to_look_at(self.gpus, self.baseline, devices)
        if not gpus:
            return [self.unknown("there is no GPU whose lanes could be counted", what_to_do=DECLARE_GPUS)]
        return [self._one(gpu, devices.get(gpu.pci)) for gpu in gpus]

    def _one(self, gpu: ExpectedGpu, device: PciFacts | None) -> Finding:
        link = device.link if device else None
        compared: dict[str, Any] = {
            "subject": gpu.pci,
            "expected": gpu.link_width or (link.max_width if link else None),
            "observed": link.width if link else None,
        }
        if device is None:
            return self.unknown("the device is not there, so it has no link to measure", **compared)
        if link is None:
            return self.unknown(
                "the kernel shows no PCIe link of it (a virtual function, or a virtual machine's device?)", **compared
            )
        width = link.width
        if width is None or not 0 < width <= _WIDEST or link.speed is None:
            return self._not_answering(link, compared)
        if gpu.link_width is not None and width < gpu.link_width:
            return self._too_narrow(f"x{width} instead of x{gpu.link_width} ({gpu.width_by})", compared)
        if gpu.link_width is not None and gpu.width_by == INVENTORY:
            return self._as_declared(gpu, link, compared)
        return self._against_its_maximum(gpu, width, link.max_width, compared)

    def _not_answering(self, link: LinkFacts, compared: dict[str, Any]) -> Finding:
        speed = "Unknown" if link.speed is None else f"{link.speed:g} GT/s"
        return self.failed(
            f"the link reads width {'Unknown' if link.width is None else link.width}, speed {speed}: the device does not answer",
            action=Suggested.POWER_CYCLE,
            what_to_do="It fell off the bus or lost power: look at the kernel log (Xid 79), then power the machine off and on.",
            **compared,
        )

    def _too_narrow(self, reason: str, compared: dict[str, Any]) -> Finding:
        return self.failed(
            reason,
            action=Suggested.CHECK_HARDWARE,
            what_to_do="Lanes are missing: reseat card, riser and cable; look at the slot's bifurcation in the firmware's setup.",
            **compared,
        )

    def _as_declared(self, gpu: ExpectedGpu, link: LinkFacts, compared: dict[str, Any]) -> Finding:
        if link.width == gpu.link_width:
            return self.passed(f"x{link.width}, as the inventory has it", **compared)
        return self.warned(
            f"x{link.width}, more than the x{gpu.link_width} of the inventory",
            action=Suggested.FIX_CONFIG,
            what_to_do="Correct the inventory, or a loss of lanes down to that width will go unnoticed.",
            **compared,
        )

    def _against_its_maximum(self, gpu: ExpectedGpu, width: int, most: int | None, compared: dict[str, Any]) -> Finding:
        if not most or most > _WIDEST:
            if gpu.link_width is None:
                return self.unknown(f"x{width}, but how many lanes it can have is not known", **compared)
            return self.passed(f"x{width}, as before", **compared)
        if width >= most:
            return self.passed(f"x{width} of x{most}", **compared)
        if gpu.link_width is None:
            return self._too_narrow(f"x{width} of the x{most} that it can have; nobody said that this is meant", compared)
        return self.warned(
            f"x{width} of x{most}, as before: it may never have had all its lanes",
            action=Suggested.CHECK_HARDWARE,
            what_to_do="Is the slot wired for fewer lanes? Then say so (link_width in the inventory); else reseat the card.",
            **compared,
        )


@dataclass(frozen=True)
class LinkSpeed(Check):
    """Speed is not judged at idle: Gen1 is then power management. It needs load, and several samples."""

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None
    name: ClassVar[str] = "pci.LinkSpeed"
    title: ClassVar[str] = "Does every GPU's link reach its full speed?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (PciDevices(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        devices, why = tell(seen, PciDevices()).pair
        if devices is None:
            return [unseen(self, why)]
        gpus = _to_look_at(self.gpus, self.baseline, devices)
        links = {g.pci: link for g in gpus if (device := devices.get(g.pci)) and (link := device.link)}
        if not links:
            return [self.unknown("there is no GPU whose link could be read", what_to_do=DECLARE_GPUS)]
        now = {a: {"speed": link.speed, "max_speed": link.max_speed} for a, link in links.items()}
        shown = join(f"{a} {_speed(link.speed)} of {_speed(link.max_speed)}" for a, link in links.items())
        return [
            self.not_checked(
                f"needs load: {shown} at idle, where a low speed is power management",
                observed=now,
                what_to_do="Measure under load, several times: the speed must be the maximum in every sample.",
            )
        ]


def _speed(value: float | None) -> str:
    return "Unknown" if value is None else f"{value:g} GT/s"


@dataclass(frozen=True)
class PcieErrors(Check):
    """No PCIe error was reported, and the operating system was the one to whom they are reported.

    WHY: where firmware keeps AER to itself (``_OSC: platform does not support [AER …]``) the kernel never hears of an
    error, so neither a clean log nor counters at zero prove anything.
    """

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None
    name: ClassVar[str] = "pci.PcieErrors"
    title: ClassVar[str] = "Were there PCIe errors?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (KernelLog(), AerCounters(), PciDevices(), IommuGroups(), Machine())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        counters, no_counters = tell(seen, AerCounters()).pair
        try:
            judged = judge_log(seen, self.gpus, self.baseline)
        except CannotTell as why:
            reason = f"who owns AER is not known without the kernel log: {why}"
            return [*self._counted(counters, frozenset()), unseen(self, reason)]
        found = findings_of(self, [f for f in judged.judgement.findings if tagged(f, AER_TAGS)])
        found += self._counted(counters, judged.gpus)
        hidden, undecided = self._not_ours(judged)
        if undecided:
            return [*found, self.unknown(undecided)]
        if hidden:
            return [*found, *self._not_observable(hidden)]
        if any(f.verdict in (Verdict.FAIL, Verdict.WARN) for f in found):
            return found
        if judged.gaps:
            reason = f"no PCIe error in the lines that are there, but the kernel log is incomplete: {join(judged.gaps, 3)}"
            return [*found, self.unknown(reason)]
        if counters is None:
            return [*found, self.unknown(f"no PCIe error in the kernel log, but its counters could not be read: {no_counters}")]
        unread = sorted(gpu for gpu in judged.gpus & set(counters) if counters[gpu].unread)
        if unread:
            whose = f"{join(unread)} ({counters[unread[0]].unread})"
            return [*found, self.unknown(f"no PCIe error in the kernel log, but not all counters could be read: {whose}")]
        covered = sorted(judged.gpus & set(counters))
        bare = sorted(judged.gpus - set(counters))
        if bare or not covered:
            reason = f"no PCIe error in the kernel log, which hears of them; no error counters of {join(bare) or 'any GPU'}"
            return [*found, self.passed(reason)]
        return [
            *found,
            self.passed(f"none in the kernel log, which hears of them, and all counters of {counted(len(covered), 'GPU')} are 0"),
        ]

    def _not_ours(self, judged: JudgedLog) -> tuple[str, str]:
        """Why errors cannot reach the kernel here, and why that cannot be decided; both "" when the kernel owns AER."""
        facts = judged.judgement.facts
        granted, refused = facts.get("osc-aer-granted", 0), facts.get("osc-no-aer", 0)
        if "aer-off" in facts:
            return "AER is switched off on the kernel command line (pci=noaer)", ""
        if refused and granted:
            return (
                f"firmware keeps AER of {refused} of {refused + granted} host bridges, and which GPUs are below them "
                "is not known",
                "",
            )
        if refused:
            return "firmware keeps AER", ""
        if granted:
            return "", ""
        if judged.gaps:
            return (
                "",
                f"the lines that say who owns AER (_OSC) are not in the kernel log, which is incomplete: {join(judged.gaps, 2)}",
            )
        return "the kernel log does not say that the operating system owns AER (no _OSC line grants it)", ""

    def _not_observable(self, why: str) -> list[Finding]:
        return [
            self.not_checked(f"not observable: {why}"),
            self.warned(
                f"PCIe errors would go unseen by the kernel ({why}); that there is no line proves nothing",
                action=Suggested.LOOK,
                what_to_do="Look in the BMC's event log for PCIe errors; some firmware can hand AER to the operating "
                "system (setup option).",
            ),
        ]

    def _counted(self, counters: Mapping[str, AerTotals] | None, gpus: frozenset[str]) -> list[Finding]:
        """Counters that are not zero count, whoever owns AER."""
        findings = []
        for address, totals in sorted((counters or {}).items()):
            severe = totals.fatal + totals.nonfatal
            if not severe and not totals.correctable:
                continue
            about: dict[str, Any] = {
                "subject": address,
                "expected": 0,
                "observed": {"correctable": totals.correctable, "nonfatal": totals.nonfatal, "fatal": totals.fatal},
                "count": severe or totals.correctable,
                "action": Suggested.CHECK_HARDWARE,
                "what_to_do": "Reseat the card, its riser and its cable; a count that grows under load is a bad link.",
            }
            reason = (
                f"since boot the kernel counted {totals.fatal} fatal, {totals.nonfatal} non-fatal, "
                f"{totals.correctable} corrected errors"
            )
            if severe and address in gpus:
                findings.append(self.failed(reason, **about))
            else:
                findings.append(self.warned(reason if address in gpus else f"{reason} (not of a GPU)", **about))
        return findings

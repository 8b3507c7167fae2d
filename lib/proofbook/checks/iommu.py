"""Is the IOMMU as it is meant to be, device by device, and could it have shown a fault at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.baseline import Baseline, is_gpu
from proofbook.checks.expected import DECLARE_GPUS, INVENTORY, ExpectedGpu, expected_gpus
from proofbook.checks.kernel_log import IOMMU_TAGS, findings_of, judge_log, tagged
from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.errors import CannotTell
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested, Verdict
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.pci import PciDevices
from proofbook.signatures.judge import stands_for

__all__ = ["DmaFaults", "IommuTypes"]

_DEFAULT_DOMAIN = "iommu: Default domain type:"


@dataclass(frozen=True)
class IommuTypes(Check):
    """Every GPU's iommu group has the type that the inventory wants, else the type of before.

    The only truth is ``/sys/kernel/iommu_groups/*/type``. WHY not the log: "Default domain type: Translated" is printed
    even when the IOMMU is switched off, and then there are no groups at all.
    """

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None
    name: ClassVar[str] = "iommu.IommuTypes"
    title: ClassVar[str] = "Is the IOMMU as it is meant to be for each GPU?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (IommuGroups(), PciDevices(), KernelLog())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        iommu, why = tell(seen, IommuGroups()).pair
        if iommu is None:
            return [unseen(self, why)]
        claimed = _claimed(seen)
        expected = expected_gpus(self.gpus, self.baseline)
        if not expected:
            return self._nobody_said(seen, iommu, claimed)
        if self.baseline is not None and self.baseline.iommu is None and not all(e.iommu_by == INVENTORY for e in expected):
            why = self.baseline.unknown.get("IOMMU groups", "they were not looked at")
            blind = f"the IOMMU types of before are not known: {why}"
        else:
            blind = ""
        return [self._one(gpu, seen, iommu, claimed, blind) for gpu in expected]

    def _nobody_said(self, seen: Seen, iommu: IommuFacts, claimed: str) -> list[Finding]:
        devices, why = tell(seen, PciDevices()).pair
        if devices is None:
            return [self.unknown(f"which devices are GPUs is not known: {why}")]
        present = sorted(a for a, d in devices.items() if is_gpu(d))
        if not present:
            return [self.unknown("no GPU was seen, and nobody said how many there should be", what_to_do=DECLARE_GPUS)]
        if not iommu.on and claimed:
            return [
                self.warned(
                    f"there are no iommu groups, so the IOMMU is off, although the kernel log says {claimed!r}; "
                    "nobody said what is meant",
                    action=Suggested.LOOK,
                    what_to_do=DECLARE_GPUS,
                )
            ]
        types = {a: iommu.by_device.get(a, "no group") for a in present}
        shown = join(f"{a} {t}" for a, t in types.items()) if iommu.on else "the IOMMU is off (no groups)"
        return [self.not_checked(f"{shown}; nobody said what is meant", observed=types, what_to_do=DECLARE_GPUS)]

    def _one(self, gpu: ExpectedGpu, seen: Seen, iommu: IommuFacts, claimed: str, blind: str) -> Finding:
        observed = iommu.by_device.get(gpu.pci)
        devices = tell(seen, PciDevices()).value
        was_off = self.baseline is not None and self.baseline.iommu is not None and gpu.pci not in self.baseline.iommu
        compared: dict[str, Any] = {
            "subject": gpu.pci,
            "expected": gpu.iommu_type or ("no group" if was_off else None),
            "observed": observed if observed is not None else "no group",
        }
        if devices is not None and gpu.pci not in devices:
            return self.unknown("the device is not there, so its group has no type", **compared)
        if not gpu.iommu_type:
            return self._against_nothing(observed, iommu, was_off, blind, compared)
        if observed is None:
            return self._not_translated(gpu, iommu, claimed, compared)
        if observed in ("", "unknown"):
            return self.unknown("the kernel does not say the type of its group (kernels say it since 5.11)", **compared)
        if observed == gpu.iommu_type:
            return self.passed(f"{observed}, as {gpu.iommu_by} has it", **compared)
        return self._other_type(gpu, observed, compared)

    def _against_nothing(
        self, observed: str | None, iommu: IommuFacts, was_off: bool, blind: str, compared: dict[str, Any]
    ) -> Finding:
        if blind:
            return self.unknown(blind, **compared)
        if not was_off:
            state = observed if observed is not None else "in no group" if iommu.on else "the IOMMU is off"
            return self.not_checked(f"{state}; nobody said what is meant", what_to_do=DECLARE_GPUS, **compared)
        if observed is None:
            return self.passed("in no iommu group, as before" if iommu.on else "the IOMMU is off, as before", **compared)
        return self.warned(
            f"{observed}; before, it was in no group",
            action=Suggested.LOOK,
            what_to_do="The IOMMU came on with this boot (firmware setup or command line): peer-to-peer copies behave "
            "differently now.",
            **compared,
        )

    def _not_translated(self, gpu: ExpectedGpu, iommu: IommuFacts, claimed: str, compared: dict[str, Any]) -> Finding:
        if iommu.on:
            reason = (
                f"it is in no iommu group, while {counted(len(iommu.groups), 'group')} exist; {gpu.iommu_by} has {gpu.iommu_type}"
            )
        else:
            although = f", although the kernel log says {claimed!r}" if claimed else ""
            reason = f"the IOMMU is off: there are no groups at all{although}; {gpu.iommu_by} has {gpu.iommu_type}"
        return self.failed(
            reason,
            action=Suggested.FIX_CONFIG,
            what_to_do="Look for amd_iommu=off, intel_iommu=off or iommu=off in /proc/cmdline, and for the IOMMU in "
            "the firmware's setup.",
            **compared,
        )

    def _other_type(self, gpu: ExpectedGpu, observed: str, compared: dict[str, Any]) -> Finding:
        if gpu.driver == "vfio-pci" and gpu.iommu_by != INVENTORY and "unmanaged" in (observed, gpu.iommu_type):
            # WHY: the group of a passed-through device is "unmanaged" exactly while a virtual machine holds it.
            return self.not_checked(
                f"{observed}, before {gpu.iommu_type}: it changes as virtual machines start and stop", **compared
            )
        if {observed, gpu.iommu_type} == {"DMA", "DMA-FQ"} and gpu.iommu_by != INVENTORY:
            return self.warned(
                f"{observed} instead of {gpu.iommu_type}: translated as before, but the flush policy (strict or lazy) changed",
                action=Suggested.LOOK,
                what_to_do="Look for iommu.strict= on the command line; the policy costs or gains speed, not correctness.",
                **compared,
            )
        return self.failed(
            f"{observed} instead of {gpu.iommu_type} ({gpu.iommu_by})",
            action=Suggested.FIX_CONFIG,
            what_to_do="Was the type set before the driver bound? A group of a bound device refuses the change (EBUSY or EPERM): "
            "compare the order in the journal, and /proc/cmdline.",
            **compared,
        )


def _claimed(seen: Seen) -> str:
    """What the kernel log says of the default domain, "" when it says nothing (or cannot be read)."""
    messages = tell(seen, KernelLog()).value
    lines = messages.lines if messages else ()
    return next((line.text for line in reversed(lines) if line.text.startswith(_DEFAULT_DOMAIN)), "")


@dataclass(frozen=True)
class DmaFaults(Check):
    """No device was stopped by the IOMMU in this boot; and the IOMMU was in a position to see it.

    A GPU behind an identity domain, or without an IOMMU, cannot cause a fault line: then silence proves nothing.
    """

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None = None
    name: ClassVar[str] = "iommu.DmaFaults"
    title: ClassVar[str] = "Did the IOMMU stop a memory access?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (KernelLog(), IommuGroups(), PciDevices(), Machine())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        try:
            judged = judge_log(seen, self.gpus, self.baseline)
        except CannotTell as error:
            return [unseen(self, str(error))]
        found = findings_of(self, [f for f in judged.judgement.findings if tagged(f, IOMMU_TAGS)])
        faulting = {f.subject for f in found if f.verdict is Verdict.FAIL}
        findings = list(found)
        iommu, why = tell(seen, IommuGroups()).pair
        quiet = sorted(gpu for gpu in judged.gpus - faulting if not any(stands_for(other, gpu) for other in faulting))
        if iommu is None:
            findings.append(self.unknown(f"whether an IOMMU watches the GPUs is not known: {why}"))
        elif not judged.gpus:
            findings.append(self.unknown("no GPU is known on this machine, so no silence can be judged", what_to_do=DECLARE_GPUS))
        elif not iommu.on:
            findings.append(
                self.not_checked("not observable: the IOMMU is off, so no fault can be logged; a clean log proves nothing")
            )
        else:
            findings += self._silence(quiet, iommu, judged.gaps)
        return findings

    def _silence(self, quiet: Sequence[str], iommu: IommuFacts, gaps: Sequence[str]) -> list[Finding]:
        """What the silence of these GPUs is worth."""
        watched = [a for a in quiet if iommu.by_device.get(a, "") in ("DMA", "DMA-FQ")]
        blind = {
            a: iommu.by_device.get(a, "no group") or "a type that the kernel does not say" for a in quiet if a not in watched
        }
        findings = []
        if blind:
            shown = join(f"{a} ({t})" for a, t in blind.items())
            findings.append(
                self.not_checked(
                    f"not observable for {shown}: nothing of it is translated by the kernel, so a clean log proves nothing"
                )
            )
        if watched and gaps:
            findings.append(
                self.unknown(
                    f"no fault of {join(watched)} in the lines that are there, but the kernel log is incomplete: {join(gaps, 3)}",
                    action=Suggested.LOOK,
                    what_to_do="Make the journal keep the whole boot (SystemMaxUse=, RateLimitBurst=), or read the "
                    "console's log.",
                )
            )
        elif watched:
            findings.append(self.passed(f"no fault of {counted(len(watched), 'translated GPU')} ({join(watched)}) in this boot"))
        return findings

"""Can an identity experiment with these GPUs show anything, and can it be survived?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.identity.evidence import gpus_seen, started
from proofbook.checks.identity.rule import TRANSLATED
from proofbook.checks.looking import join, tell, unseen
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.iommu_identity import EarlyModules, IdentityState
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import Gpus
from proofbook.probes.pci import PciDevices, PciFacts

__all__ = ["FitForIdentity"]

# WHY: with SEV-SNP the kernel refuses identity domains (a device table entry without a mode); with other memory encryption it
# only takes them back as the default (drivers/iommu/amd/iommu.c, drivers/iommu/iommu.c).
_SNP = re.compile(r"SEV-SNP: (?:RMP table|enabled|host support)|AMD-Vi: SNP enabled", re.I)
_ENCRYPTED = re.compile(r"Memory Encryption Features active:.*\b(?:SME|SEV)|Memory encryption detected", re.I)


@dataclass(frozen=True)
class FitForIdentity(Check):
    """Everything about an identity experiment that can be known before: the group, the driver, the kernel, the way back."""

    treated: tuple[str, ...]
    console_confirmed: bool
    console: str = ""
    declared: tuple[GpuSpec, ...] = ()
    name: ClassVar[str] = "identity.FitForIdentity"
    title: ClassVar[str] = "Can this experiment show anything, and be survived?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (PciDevices(), IommuGroups(), Gpus(), Machine(), KernelLog(), IdentityState(), EarlyModules())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        devices, why = tell(seen, PciDevices()).pair
        iommu, why_iommu = tell(seen, IommuGroups()).pair
        if devices is None or iommu is None:
            return [unseen(self, why or why_iommu)]
        findings = [self._gpu(pci, seen, devices, iommu) for pci in self.treated]
        return [
            *findings,
            self._control(seen, iommu),
            self._early(seen),
            self._encryption(seen),
            self._leftovers(seen),
            self._console(),
        ]

    def _gpu(self, pci: str, seen: Seen, devices: dict[str, PciFacts], iommu: IommuFacts) -> Finding:
        why = self._why_not(pci, seen, devices, iommu)
        if why:
            return self.failed(why, subject=pci, action=Suggested.LOOK)
        group = devices[pci].iommu_group
        return self.passed(f"alone in iommu group {group}, {iommu.by_device[pci]}, bound to nvidia, started", subject=pci)

    def _why_not(self, pci: str, seen: Seen, devices: dict[str, PciFacts], iommu: IommuFacts) -> str:
        if pci not in devices:
            return "it is not on the bus"
        kind = iommu.by_device.get(pci)
        if kind is None:
            return "it is in no iommu group: without an IOMMU there is no domain to choose"
        if not kind:
            return "this kernel does not say the type of a group (kernels do since 5.11), so it cannot be set"
        if kind not in TRANSLATED:
            return f"its group is {kind} already: there is no translated state to compare with"
        members = next((g.devices for g in iommu.groups.values() if pci in g.devices), ())
        if strangers := [m for m in members if m not in self.treated]:
            return (
                f"its group also holds {join(strangers)}: the type belongs to the whole group, and older kernels "
                "refuse to change a group of several devices (EINVAL)"
            )
        if devices[pci].driver != "nvidia":
            return f"it is bound to {devices[pci].driver or 'no driver'}, so whether nvidia could start it would not be seen"
        up = started(seen, pci)
        if up is not True:
            return (
                "it does not run now, so that a failure in the experiment would show nothing"
                if up is False
                else "whether it runs now is not known"
            )
        return ""

    def _control(self, seen: Seen, iommu: IommuFacts) -> Finding:
        others = [
            p
            for p in gpus_seen(seen, self.declared)
            if p not in self.treated and started(seen, p) and iommu.by_device.get(p) in TRANSLATED
        ]
        if others:
            return self.passed(f"control in the same boot: {join(others)}", observed=others)
        return self.warned(
            "no other GPU stays translated as a control; only the boot before can be one, and only if nothing else changes "
            "(kernel, command line, driver)"
        )

    def _early(self, seen: Seen) -> Finding:
        lines, why = tell(seen, EarlyModules()).pair
        if lines is None:
            return unseen(self, why)
        if lines:
            return self.warned(
                f"the initramfs is made to load the driver, which would bind before any unit runs: {join(lines, 3)}",
                action=Suggested.FIX_CONFIG,
                what_to_do="Take the module out of the initramfs first, or the unit will be too late.",
            )
        return self.passed("no configuration puts the driver into the initramfs; udev loads it, after the unit")

    def _encryption(self, seen: Seen) -> Finding:
        log, why = tell(seen, KernelLog()).pair
        if log is None:
            return unseen(self, why)
        snp, encrypted = (next((ln.text for ln in log.lines if p.search(ln.text)), "") for p in (_SNP, _ENCRYPTED))
        if snp:
            return self.failed("SEV-SNP is on: the kernel gives no device an identity domain then", lines=(snp,))
        if encrypted:
            return self.warned("memory is encrypted: the kernel may refuse the identity domain", lines=(encrypted,))
        if not log.complete:
            return self.not_checked("the kernel log is not whole, so memory encryption would not be seen in it")
        return self.passed("no memory encryption, which would forbid the identity domain")

    def _leftovers(self, seen: Seen) -> Finding:
        facts, why = tell(seen, IdentityState()).pair
        if facts is None:
            return unseen(self, why)
        if facts.present:
            return self.failed(
                f"files of another experiment are there: {join(facts.present)}", what_to_do="Take that one back first."
            )
        return self.passed("no files of an earlier experiment")

    def _console(self) -> Finding:
        where = self.console or "none is named in the inventory"
        if not self.console_confirmed:
            return self.failed(
                f"nobody confirmed that the console can be reached ({where})",
                action=Suggested.CONSOLE,
                what_to_do="Log in there, make sure that the power can be cycled, then set console_confirmed.",
            )
        return self.passed(f"the operator confirmed that the console can be reached ({where})")

"""Can an identity experiment with these GPUs show anything, and can it be survived?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.identity.evidence import functions_of, gpus_seen, members_of, of_one_device, started
from proofbook.checks.identity.rule import TRANSLATED
from proofbook.checks.looking import counted, join, tell, unseen
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

# WHY two versions and nothing about those in between: drivers/iommu/iommu.c at about 6.2 refuses a new type for a group of
# several devices, at 6.8 it gives it when none of them has a driver; Debian's 6.1 refused and its 6.12 gave it when tried.
# Where that changed, and what a distribution has brought back into an older kernel, is not known here.
_STILL_REFUSES, _CHANGES_SINCE = (6, 2), (6, 8)


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
            *(self._shared(pci, functions, seen, devices) for pci in self.treated if (functions := functions_of(pci, iommu))),
            self._control(seen, iommu),
            self._early(seen, devices, iommu),
            self._encryption(seen),
            self._leftovers(seen),
            self._console(),
        ]

    def _gpu(self, pci: str, seen: Seen, devices: dict[str, PciFacts], iommu: IommuFacts) -> Finding:
        why = self._why_not(pci, seen, devices, iommu)
        if why:
            return self.failed(why, subject=pci, action=Suggested.LOOK)
        functions = functions_of(pci, iommu)
        alone = f"alone with {counted(len(functions), 'function')} of its own" if functions else "alone"
        where = f"{alone} in iommu group {devices[pci].iommu_group}"
        return self.passed(f"{where}, {iommu.by_device[pci]}, bound to nvidia, started", subject=pci)

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
        if strangers := [m for m in members_of(iommu, pci) if not any(of_one_device(m, gpu) for gpu in self.treated)]:
            return (
                f"its group also holds {join(strangers)}: the type belongs to the whole group, and that is no function of a GPU "
                "that is treated"
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

    def _shared(self, pci: str, functions: tuple[str, ...], seen: Seen, devices: dict[str, PciFacts]) -> Finding:
        """What this kernel may answer when the type of a group of several devices is written."""
        held = join(f"{a} ({devices[a].driver or 'no driver'})" if a in devices else a for a in functions)
        about = f"its group is also that of its own {held}, whose type changes with it"
        facts = tell(seen, Machine()).value
        kernel = facts.kernel if facts is not None else "not known"
        version = _version(kernel)
        if version is not None and version >= _CHANGES_SINCE:
            return self.passed(
                f"{about}; kernels from about 6.8 do that while none of them has a driver, and this one is {kernel}", subject=pci
            )
        if version is not None and version <= _STILL_REFUSES:
            answer = "kernels up to about 6.2 refuse that for a group of several devices (EINVAL)"
        else:
            answer = "up to about 6.2 kernels refuse that (EINVAL), from about 6.8 they do it; in between it is not known"
        return self.warned(
            f"{about}; {answer}, and this one is {kernel}",
            subject=pci,
            action=Suggested.LOOK,
            what_to_do="Both reboots happen all the same. If the kernel refuses, the type stays as it is and nothing is tried: "
            "the conclusion is then inconclusive. A newer kernel saves the downtime.",
        )

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

    def _early(self, seen: Seen, devices: dict[str, PciFacts], iommu: IommuFacts) -> Finding:
        every, why = tell(seen, EarlyModules()).pair
        if every is None:
            return unseen(self, why)
        functions = [a for pci in self.treated for a in functions_of(pci, iommu)]
        drivers = {"nvidia", *(devices[a].driver for a in functions if a in devices and devices[a].driver)}
        if lines := [line for line in every if any(driver in line.replace("-", "_") for driver in drivers)]:
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
                what_to_do="Log in there, make sure that the power can be cycled, then say so: -p console_confirmed=true.",
            )
        return self.passed(f"the operator confirmed that the console can be reached ({where})")


def _version(kernel: str) -> tuple[int, int] | None:
    """``6.17.13-1-pve`` is (6, 17); None for what is no release of a kernel."""
    found = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(found[1]), int(found[2])) if found else None

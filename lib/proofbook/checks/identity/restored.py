"""Is nothing of the experiment left, and is every GPU as it was before it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.identity.evidence import started
from proofbook.checks.identity.rule import Before, Function, Restored
from proofbook.checks.looking import join, tell
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.iommu_identity import IdentityState
from proofbook.probes.nvidia import Gpus
from proofbook.probes.pci import PciDevices

__all__ = ["PROBES", "PutBack", "restored"]

PROBES: tuple[Probe[Any], ...] = (IommuGroups(), PciDevices(), Gpus(), IdentityState())

_COLD = (
    "Cut the power for half a minute (not a warm reboot: the GPU's firmware keeps its state over that), then run reboot "
    "verification. The unit and its flag are no part of it: the program removes its flag before it acts."
)


def wrong_with(seen: Seen, before: Before) -> dict[str, list[str]]:
    """What is not as it was, by PCI address, and "" for the machine. Unknown answers are wrong here: restored is to be shown."""
    wrong: dict[str, list[str]] = {"": []}
    iommu, why_iommu = tell(seen, IommuGroups()).pair
    for gpu in before.gpus:
        said = wrong.setdefault(gpu.pci, [])
        now = iommu.by_device.get(gpu.pci, "no type") if iommu is not None else f"not known ({why_iommu})"
        if now != gpu.iommu_type:
            said.append(f"the type of its group is {now}, before {gpu.iommu_type or 'none'}")
        if gpu.started and (up := started(seen, gpu.pci)) is not True:
            said.append("it does not start any more" if up is False else "whether it starts is not known")
        for function in gpu.functions:
            said += _wrong_with_function(seen, function)
    facts, why = tell(seen, IdentityState()).pair
    if facts is None:
        wrong[""].append(f"whether files are left is not known ({why})")
    elif facts.present:
        wrong[""].append(f"files are left: {join(facts.present)}")
    elif facts.log is not None:
        wrong[""].append("the program ran in this boot too")
    return wrong


def _wrong_with_function(seen: Seen, before: Function) -> list[str]:
    iommu, devices = tell(seen, IommuGroups()).value, tell(seen, PciDevices()).value
    said = []
    kind = iommu.by_device.get(before.pci, "no type") if iommu is not None else "not known"
    if kind != before.iommu_type:
        said.append(f"the type of the group of its function {before.pci} is {kind}, before {before.iommu_type or 'none'}")
    if devices is None:
        said.append(f"which driver its function {before.pci} has is not known")
    elif before.pci not in devices:
        said.append(f"its function {before.pci} is not on the bus")
    elif (driver := devices[before.pci].driver) != before.driver:
        said.append(f"its function {before.pci} is bound to {driver or 'no driver'}, before {before.driver or 'no driver'}")
    return said


def restored(seen: Seen, before: Before) -> Restored:
    """As the rule wants it."""
    needed: list[Probe[Any]] = [IommuGroups(), IdentityState()]
    if any(gpu.functions for gpu in before.gpus):
        needed.append(PciDevices())
    known = all(tell(seen, probe).value is not None for probe in needed)
    wrong = tuple(f"{pci}: {text}" if pci else text for pci, texts in wrong_with(seen, before).items() for text in texts)
    return Restored(known, wrong if known else ())


@dataclass(frozen=True)
class PutBack(Check):
    """Every GPU's group has its old type again, every GPU that started before starts, and no file of the experiment is left."""

    before: Before
    name: ClassVar[str] = "identity.PutBack"
    title: ClassVar[str] = "Is everything as it was before the experiment?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return PROBES

    def __repr__(self) -> str:
        return f"PutBack({', '.join(g.pci for g in self.before.gpus)})"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        wrong = wrong_with(seen, self.before)
        if not restored(seen, self.before).seen:
            texts = "; ".join(text for some in wrong.values() for text in some)
            return [self.failed(f"NOT SEEN TO BE RESTORED: {texts}", action=Suggested.CONSOLE, what_to_do=_COLD)]
        findings = []
        for gpu in self.before.gpus:
            if wrong[gpu.pci]:
                reason = f"NOT RESTORED: {'; '.join(wrong[gpu.pci])}"
                findings.append(self.failed(reason, subject=gpu.pci, action=Suggested.POWER_CYCLE, what_to_do=_COLD))
            else:
                state = "and started" if gpu.started else "as before"
                functions = "".join(f"; {f.pci} bound to {f.driver or 'no driver'}, as before" for f in gpu.functions)
                findings.append(self.passed(f"{gpu.iommu_type or 'no group'} again, {state}{functions}", subject=gpu.pci))
        if wrong[""]:
            findings.append(self.failed(f"NOT RESTORED: {'; '.join(wrong[''])}", action=Suggested.ROLL_BACK))
        else:
            findings.append(self.passed("no file of the experiment is left"))
        return findings

"""Was the experiment's boot an experiment, and what did it show?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.identity.evidence import PROBES, the_trial
from proofbook.checks.identity.rule import Before, Function, GpuBoot, Kind, Trial, control
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested

__all__ = ["ValidTrial"]


@dataclass(frozen=True)
class ValidTrial(Check):
    """The type was identity when the driver bound, the order is known, and a control tells what any failure means.

    A GPU that does not start is no fault here: it is what the experiment asked. ``boot_id``: the boot that was to be looked at.
    """

    treated: tuple[str, ...]
    before: Before
    declared: tuple[GpuSpec, ...] = ()
    name: ClassVar[str] = "identity.ValidTrial"
    title: ClassVar[str] = "Was it an experiment, and what did it show?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return PROBES

    def __repr__(self) -> str:
        return f"ValidTrial({', '.join(self.treated)})"

    def judge(self, seen: Seen) -> Sequence[Finding]:
        trial = the_trial(seen, self.treated, self.declared)
        findings = [self._treatment(gpu, trial) for gpu in trial.treated]
        if trial.why_not:
            findings.insert(0, self.failed(trial.why_not, action=Suggested.LOOK))
        findings += [self._function(gpu, function) for gpu in trial.treated for function in gpu.functions]
        return [*findings, *(self._outcome(gpu, trial) for gpu in trial.treated), self._control(trial)]

    def _treatment(self, gpu: GpuBoot, trial: Trial) -> Finding:
        compared: dict[str, Any] = {"subject": gpu.pci, "expected": "identity", "observed": gpu.iommu_type or "not known"}
        if gpu.iommu_type != "identity":
            return self.failed(f"its group reads {gpu.iommu_type or 'nothing'}, not identity: nothing was tried", **compared)
        set_s = trial.set_s.get(gpu.pci)
        if set_s is None or trial.driver_s is None:
            return self.unknown("identity, but when it was set and when the driver was loaded is not known", **compared)
        if set_s >= trial.driver_s:
            return self.failed(f"set at {set_s:g} s, after the driver was loaded at {trial.driver_s:g} s", **compared)
        if gpu.driver != "nvidia":
            return self.failed(f"identity, and bound to {gpu.driver or 'no driver'} instead of nvidia", **compared)
        return self.passed(f"identity, set at {set_s:g} s; the driver was loaded at {trial.driver_s:g} s and bound", **compared)

    def _function(self, gpu: GpuBoot, function: Function) -> Finding:
        """WHY a missing driver is a WARN only: whether the GPU starts does not hang on it, and its group's type is told."""
        now = f"{function.iommu_type or 'nothing'}, bound to {function.driver or 'no driver'}"
        compared: dict[str, Any] = {
            "subject": function.pci,
            "expected": "identity",
            "observed": function.iommu_type or "not known",
        }
        if function.iommu_type != "identity":
            return self.failed(f"its group reads {now}, although it is a function of {gpu.pci}", **compared)
        known = {f.pci: f.driver for g in self.before.gpus for f in g.functions}
        if function.driver != known.get(function.pci):
            was = known.get(function.pci) or "no driver"
            return self.warned(f"{now}, before to {was}: the type was read back without that", **compared)
        return self.passed(f"{now}, as before", **compared)

    def _outcome(self, gpu: GpuBoot, trial: Trial) -> Finding:
        if gpu.started is None:
            return self.unknown("whether it started is not known", subject=gpu.pci)
        if gpu.started:
            return self.passed("it started", subject=gpu.pci)
        if gpu.iommu_type != "identity":
            return self.unknown("it did not start, and it was not in the identity domain", subject=gpu.pci)
        if gpu.first is None:
            return self.unknown("it did not start, and the kernel log does not say why", subject=gpu.pci)
        about: dict[str, Any] = {"subject": gpu.pci, "signature": gpu.first.signature, "lines": (gpu.first.text,)}
        if gpu.first.kind is Kind.LINK:
            return self.unknown(
                "its link was lost first: whatever the driver reports of its firmware was read from nothing",
                action=Suggested.CHECK_HARDWARE,
                what_to_do="Slot, riser, power, AER: find out why the link went, then try again.",
                **about,
            )
        if trial.log_gaps:
            return self.unknown(
                f"it did not start; the log is not whole, so its first error may be missing: {trial.log_gaps[0]}", **about
            )
        code = f", code {gpu.first.code}" if gpu.first.code else ""
        what = "its FSP refused first" if gpu.first.kind is Kind.FSP else f"the first error is not its FSP's ({gpu.first.kind})"
        return self.passed(f"it did not start: {what}{code}", observed=gpu.first.code or None, **about)

    def _control(self, trial: Trial) -> Finding:
        if trial.treated and all(g.started for g in trial.treated):
            return self.not_checked("every treated GPU started, so no control is needed to say why not")
        held, how = control(self.before, trial)
        return self.passed(how) if held else self.unknown(f"no control: {how}")

"""What the kernel said in this boot: faults of GPUs and of others, and errors that nobody knows.

Three checks share the kernel log, so that nothing is said twice: IOMMU faults belong to :mod:`proofbook.checks.iommu`,
PCIe errors (AER) to :mod:`proofbook.checks.pci`, everything else is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from proofbook.checks.baseline import Baseline, is_gpu
from proofbook.checks.expected import expected_gpus, merge_addresses
from proofbook.checks.looking import counted, join, short_id, tell, unseen
from proofbook.errors import CannotTell
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested, Verdict
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog, KernelMessages
from proofbook.probes.pci import PciDevices
from proofbook.signatures import Judgement, LogContext, LogLine, SignatureFinding, judge, load

__all__ = ["AER_TAGS", "IOMMU_TAGS", "JudgedLog", "KernelLogClean", "findings_of", "judge_log", "tagged"]

IOMMU_TAGS = frozenset({"iommu-fault", "iommu-stuck"})
AER_TAGS = frozenset({"aer"})
_MAX_LINES = 6
_DEVICES = re.compile(r"was not called for (\d+) device")


@dataclass(frozen=True)
class JudgedLog:
    """The kernel log of this boot, judged. ``gaps``: why silence in it proves nothing; empty when it is complete."""

    messages: KernelMessages
    judgement: Judgement
    gaps: tuple[str, ...]
    gpus: frozenset[str]


def judge_log(seen: Seen, declared: Sequence[GpuSpec], baseline: Baseline | None) -> JudgedLog:
    """Judge the kernel log. Raises CannotTell when there is none, or when it is of another boot than the running one."""
    messages = seen.value(KernelLog())
    machine = tell(seen, Machine()).value
    if machine is not None and messages.boot_id and messages.boot_id != machine.boot_id:
        raise CannotTell(
            f"the kernel log is of boot {short_id(messages.boot_id)}…, the machine runs {short_id(machine.boot_id)}…"
        )
    devices = tell(seen, PciDevices()).value
    iommu = tell(seen, IommuGroups()).value
    gpus = merge_addresses(expected_gpus(declared, baseline), [a for a, d in (devices or {}).items() if is_gpu(d)])
    context = LogContext(gpus=gpus, iommu=iommu.by_device if iommu is not None else None, gaps=messages.gaps)
    lines = (LogLine(line.text, line.monotonic_s, line.time, source="kernel") for line in messages.lines)
    judgement = judge(lines, context=context)
    return JudgedLog(messages, judgement, _gaps(messages, judgement), gpus)


def _gaps(messages: KernelMessages, judgement: Judgement) -> tuple[str, ...]:
    gaps = [*messages.gaps, *(f.reason for f in judgement.findings if f.kind == "gap")]
    if not messages.lines:
        gaps.append("it holds no line")
    elif not messages.complete and not gaps:
        gaps.append("its reader says that it is not complete")
    return tuple(dict.fromkeys(gaps))


def tagged(finding: SignatureFinding, tags: frozenset[str]) -> bool:
    """Whether a finding belongs to a family. Corrected PCIe errors are of the AER family by name alone."""
    if tags is AER_TAGS and finding.signature.startswith("aer-"):
        return True
    return bool(load()[finding.signature].tags & tags)


def findings_of(check: Check, said: Iterable[SignatureFinding]) -> list[Finding]:
    """Signature findings as findings of ``check``; the count is a lower bound where the kernel suppressed lines."""
    return [
        Finding(
            check=check.name,
            verdict=f.verdict,
            reason=f.reason.removeprefix(f"{f.device}: "),
            subject=f.device or f.unit,
            action=f.action,
            what_to_do=f.what_to_do,
            observed=f.code or None,
            count=f.count,
            at_least=f.at_least,
            signature=f.signature,
            caused_by=f.caused_by or "",
            lines=f.lines[:_MAX_LINES],
        )
        for f in said
    ]


@dataclass(frozen=True)
class KernelLogClean(Check):
    """The kernel log of this boot holds no fault, and it is whole.

    A fault of a GPU is a FAIL, of another device a WARN. Absence proves something only in a complete log: a gap is UNKNOWN
    beside whatever was found. Lines that look bad and are not (unsigned module, no display, I/O windows) are known as such.
    """

    gpus: tuple[GpuSpec, ...] = ()
    baseline: Baseline | None = None
    name: ClassVar[str] = "kernel_log.KernelLogClean"
    title: ClassVar[str] = "Did the kernel report a fault in this boot?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (KernelLog(), Machine(), PciDevices(), IommuGroups())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        try:
            judged = judge_log(seen, self.gpus, self.baseline)
        except CannotTell as error:
            return [unseen(self, str(error))]
        judgement = judged.judgement
        ours = [f for f in judgement.findings if f.kind != "gap" and not tagged(f, IOMMU_TAGS) and not tagged(f, AER_TAGS)]
        findings = self._as_meant(findings_of(self, ours))
        if judgement.unknown_lines:
            findings.append(self._unknown_lines(judgement))
        if judged.gaps:
            findings.append(
                self.unknown(
                    f"the kernel log is incomplete, so what it does not show may still have happened: {join(judged.gaps, 3)}",
                    action=Suggested.LOOK,
                    what_to_do="Read the console's or the BMC's log; let journald keep the whole boot (persistent, "
                    "larger SystemMaxUse=).",
                    observed=list(judged.gaps[:10]),
                )
            )
        if not any(f.verdict in (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN) for f in findings):
            scary = sum(judgement.benign.values())
            known = (
                f"; {scary} of them {'looks' if scary == 1 else 'look'} bad and {'is' if scary == 1 else 'are'} known "
                "to be harmless"
                if scary
                else ""
            )
            lines = counted(len(judged.messages.lines), "line")
            findings.append(self.passed(f"no fault in {lines} of a complete log ({judged.messages.source}){known}"))
        return findings

    def _as_meant(self, findings: list[Finding]) -> list[Finding]:
        """The driver complains of GPUs that it does not get; where they are meant for virtual machines, that is right."""
        expected = expected_gpus(self.gpus, self.baseline)
        passed_through = [gpu for gpu in expected if gpu.driver == "vfio-pci"]
        out = []
        for finding in findings:
            if finding.signature == "nvrm-probe-not-called":
                missed = max((int(n) for line in finding.lines for n in _DEVICES.findall(line)), default=0)
                right = 0 < missed <= len(passed_through)
            else:
                right = finding.signature == "nvrm-no-devices" and bool(expected) and len(passed_through) == len(expected)
            if right:
                whose = join(g.pci for g in passed_through)
                finding = self.passed(f"the driver gets no hold of {whose}, which is meant: passed through", lines=finding.lines)
            elif finding.signature == "nvrm-probe-not-called" and not expected:
                words = f"{finding.reason} Whether that is meant (passthrough), nobody said"
                finding = replace(finding, verdict=Verdict.WARN, reason=words)
            out.append(finding)
        return out

    def _unknown_lines(self, judgement: Judgement) -> Finding:
        return self.warned(
            f"{counted(judgement.unknown_lines, 'line')} that {'looks' if judgement.unknown_lines == 1 else 'look'} "
            "like an error "
            "of the driver or the platform, and that no signature knows",
            count=judgement.unknown_lines,
            lines=judgement.unknown_samples[:_MAX_LINES],
            action=Suggested.LOOK,
            what_to_do="Read them; were they there in the boot before? Add a signature once it is known what they mean.",
        )

"""The conclusion of an identity experiment, by rule. Pure: what was seen goes in, the conclusion and its reasons come out.

The hypothesis is that a GPU starts with its iommu group in the identity domain from boot. Then

* **supported**: it did start so, and its group read identity after the driver bound;
* **blocked**: it did not, the first thing that the driver said of it was an error of its firmware security processor (FSP),
  and a control shows that nothing else was the matter;
* **refuted**: it did not, for another reason that the driver gives, and a control shows the same;
* **inconclusive**: anything else. The type was not identity, or set too late; no control; a lost link (its registers read as all
  ones, so that what looks like an FSP error is none); a log that is not whole; an order of events that is not known; a GPU that
  did start in the identity domain once it was reset.

A machine that is not as it was afterwards is *damaged*, whatever was concluded; and then a failure that may be the damage's own
refutes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Attempt",
    "Before",
    "Came",
    "Conclusion",
    "FirstError",
    "Function",
    "GpuBoot",
    "Kind",
    "Outcome",
    "Restored",
    "Trial",
    "conclude",
    "control",
    "what_to_do",
]

TRANSLATED = ("DMA", "DMA-FQ")


class Kind(StrEnum):
    """What the first error of a GPU in a boot is about."""

    FSP = "fsp"
    LINK = "link-lost"
    FIRMWARE = "gsp"
    OTHER = "other"


class Outcome(StrEnum):
    SUPPORTED = "supported"
    REFUTED = "refuted"
    BLOCKED = "blocked"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class FirstError:
    """The first thing that went wrong with a GPU in a boot. ``at_s``: seconds since the kernel started, None if not told."""

    kind: Kind
    signature: str
    text: str
    code: str = ""  # as it was printed: data, never part of the rule
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """Another function of a GPU's device that shares the GPU's iommu group, as its audio function does, in one boot."""

    pci: str
    iommu_type: str
    driver: str


@dataclass(frozen=True, slots=True)
class GpuBoot:
    """One GPU in one boot. ``iommu_type`` is "" when its group has none or it is not known; ``started`` None: not known."""

    pci: str
    iommu_type: str
    driver: str
    started: bool | None
    first: FirstError | None = None
    functions: tuple[Function, ...] = ()


@dataclass(frozen=True, slots=True)
class Before:
    """The boot before the experiment. ``conditions``: kernel, command line, driver."""

    gpus: tuple[GpuBoot, ...]
    conditions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """The experiment's boot.

    ``set_s``: when each group's type was read back as identity; ``driver_s``: when the driver was loaded. Both in seconds
    since the kernel started.
    """

    came_back: bool
    treated: tuple[GpuBoot, ...] = ()
    others: tuple[GpuBoot, ...] = ()
    set_s: Mapping[str, float] = field(default_factory=dict)
    driver_s: float | None = None
    log_gaps: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""  # why it did not act, or was not made at all
    made: bool = True  # False: nothing was ever changed


class Came(StrEnum):
    """What an attempt came to."""

    CLEARED = "cleared"  # the driver starts it now, its group still in the identity domain
    STAYED = "did not clear"
    REFUSED = "the kernel refused"
    LOST = "lost"  # it does not answer as what it was
    BLOCKED = "did not return"
    UNKNOWN = "not known"
    NOT_TRIED = "NOT TRIED"


@dataclass(frozen=True, slots=True, repr=False)
class Attempt:
    """One method on one GPU. ``why``: what was seen, or why it was not tried. Vendor ids as the device itself says them."""

    pci: str
    method: str
    came: Came
    why: str = ""
    vendor_before: str = ""
    vendor_after: str = ""
    driver_after: str = ""
    first: FirstError | None = None  # the first thing that went wrong with it after the reset

    def __str__(self) -> str:
        return f"{self.method} on {self.pci}: {self.came}{f' ({self.why})' if self.why else ''}"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, slots=True)
class Restored:
    """The boot after it. ``wrong``: what is not as it was, in words; ``seen`` False: nobody could look."""

    seen: bool
    wrong: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.seen and not self.wrong


@dataclass(frozen=True, slots=True)
class Conclusion:
    """``because`` is one sentence; ``reasons`` are the steps of the rule; ``damaged`` None: it was not seen whether."""

    outcome: Outcome
    because: str
    reasons: tuple[str, ...]
    damaged: bool | None


def what_to_do(found: Conclusion) -> str:
    """What follows for whoever runs the machine: a sentence. A machine that is not as it was comes before everything else."""
    if found.damaged is not False:
        return "See to the machine first: it was not seen to be as it was."
    if found.outcome is Outcome.SUPPORTED:
        return "The group is translated again; identity may be planned for this GPU, on what the conclusion holds for alone."
    return "Leave the group translated."


def conclude(before: Before, trial: Trial, restored: Restored, attempts: Sequence[Attempt] = ()) -> Conclusion:
    """``attempts``: the resets of boot A, those that were not tried among them."""
    outcome, because, reasons = _of_the_trial(before, trial)
    damaged = None if not restored.seen else bool(restored.wrong)
    if not trial.made:
        return Conclusion(outcome, because, reasons, False)
    reasons = (*reasons, *(f"reset: {attempt}" for attempt in attempts))
    cleared = [a for a in attempts if a.came is Came.CLEARED]
    if cleared and outcome in (Outcome.BLOCKED, Outcome.REFUTED):
        outcome = Outcome.INCONCLUSIVE
        how = ", ".join(f"{a.pci} by {a.method}" for a in cleared)
        because = f"{because}; but after a reset in the same boot ({how}) it started, still in the identity domain"
    if damaged:
        because, reasons = f"{because}. DAMAGED: the machine is not as it was", (*reasons, *restored.wrong)
        if lost := [f"{a.pci} by {a.method}" for a in attempts if a.came is Came.LOST]:
            because = f"{because}; a reset lost {', '.join(lost)}: cut the power, a reboot does not bring it back"
    elif damaged is None:
        because, reasons = f"{because}. NOT SEEN TO BE RESTORED", (*reasons, "nobody could look whether the machine is as it was")
    if not restored.whole and outcome is Outcome.REFUTED:
        outcome = Outcome.INCONCLUSIVE
        because = f"it failed, but it was not seen whole afterwards, so that its failure may have another cause: {because}"
    return Conclusion(outcome, because, reasons, damaged)


def _of_the_trial(before: Before, trial: Trial) -> tuple[Outcome, str, tuple[str, ...]]:
    invalid = _invalid(trial)
    if invalid:
        return Outcome.INCONCLUSIVE, invalid[0], tuple(invalid)
    valid = f"the group read identity after the driver bound, for {', '.join(map(_with_functions, trial.treated))}"
    unknown = [g.pci for g in trial.treated if g.started is None]
    if unknown:
        return Outcome.INCONCLUSIVE, f"whether {', '.join(unknown)} started is not known", (valid,)
    failed = [g for g in trial.treated if not g.started]
    if not failed:
        return Outcome.SUPPORTED, f"{_names(trial.treated)} started with its group in the identity domain", (valid,)
    if len(failed) < len(trial.treated):
        worked = [g for g in trial.treated if g.started]
        because = f"{_names(failed)} did not start, and {_names(worked)} did, both in the identity domain"
        return Outcome.INCONCLUSIVE, because, (valid, because)
    return _of_the_failure(before, trial, valid)


def _of_the_failure(before: Before, trial: Trial, valid: str) -> tuple[Outcome, str, tuple[str, ...]]:
    def open_(because: str) -> tuple[Outcome, str, tuple[str, ...]]:
        return Outcome.INCONCLUSIVE, because, (valid, *said, because)

    said = tuple(f"{g.pci}: first error: {g.first.text}" for g in trial.treated if g.first)
    silent = [g.pci for g in trial.treated if g.first is None]
    if silent:
        return open_(f"{', '.join(silent)} did not start, and the kernel log does not say why")
    kinds = {g.first.kind for g in trial.treated if g.first}
    if Kind.LINK in kinds:
        lost = [g.pci for g in trial.treated if g.first and g.first.kind is Kind.LINK]
        return open_(f"the link of {', '.join(lost)} was lost first: what reads as all ones is no answer of the firmware")
    if trial.log_gaps:
        return open_(f"the kernel log is not whole, so that the first error may not be the first: {trial.log_gaps[0]}")
    held, how = control(before, trial)
    if not held:
        return open_(f"no control: {how}")
    codes = ", ".join(dict.fromkeys(g.first.code for g in trial.treated if g.first and g.first.code))
    with_code = f" (code {codes})" if codes else ""
    if kinds == {Kind.FSP}:
        because = f"{_names(trial.treated)} did not start: its FSP refused first{with_code}"
        return Outcome.BLOCKED, because, (valid, *said, how)
    if Kind.FSP in kinds:
        return open_("some GPUs failed at their FSP and others elsewhere: one cause does not explain both")
    because = f"{_names(trial.treated)} did not start, and not because of its FSP{with_code}"
    return Outcome.REFUTED, because, (valid, *said, how)


def _invalid(trial: Trial) -> list[str]:
    """Why the boot was no experiment."""
    if trial.why_not:
        return [trial.why_not]
    if not trial.came_back:
        return ["the machine did not come back from the experiment's boot, so nothing of it was seen"]
    if not trial.treated:
        return ["no GPU was treated"]
    wrong = []
    for gpu in trial.treated:
        if gpu.iommu_type != "identity":
            wrong.append(f"the group of {gpu.pci} is {gpu.iommu_type or 'of a type that is not known'}, not identity")
        elif gpu.pci not in trial.set_s:
            wrong.append(f"who set the group of {gpu.pci} to identity, and when, is not known")
        elif gpu.driver != "nvidia":
            wrong.append(f"{gpu.pci} is bound to {gpu.driver or 'no driver'}, not nvidia")
        elif other := next((f for f in gpu.functions if f.iommu_type != "identity"), None):
            kind = other.iommu_type or "of a type that is not known"
            wrong.append(f"the group of {other.pci}, a function of {gpu.pci}, is {kind}, not identity")
        elif trial.driver_s is None:
            wrong.append("when the driver was loaded is not known, so neither is the order")
        elif trial.set_s[gpu.pci] >= trial.driver_s:
            wrong.append(
                f"the type of {gpu.pci} was set after the driver was loaded ({trial.set_s[gpu.pci]:g} s, {trial.driver_s:g} s)"
            )
    return wrong


def control(before: Before, trial: Trial) -> tuple[bool, str]:
    """Whether something shows that only the treatment differed, and what: other GPUs in the same boot, else the boot before."""
    others = [g for g in trial.others if g.iommu_type in TRANSLATED]
    if others:
        dead = [g.pci for g in others if g.started is not True]
        if dead:
            return False, f"{', '.join(dead)} did not start either, although it stayed translated"
        return True, f"control: {_names(others)} stayed translated and started in the same boot"
    differs = sorted(k for k in {*before.conditions, *trial.conditions} if before.conditions.get(k) != trial.conditions.get(k))
    if not before.conditions or differs:
        what = f"the boot before differs in {', '.join(differs)}" if differs else "nothing is known of the boot before"
        return False, f"no other translated GPU in the same boot, and {what}"
    known = {g.pci: g for g in before.gpus}
    if not all(g.pci in known and known[g.pci].started and known[g.pci].iommu_type in TRANSLATED for g in trial.treated):
        return (
            False,
            "no other translated GPU in the same boot, and it is not known to have started translated in the boot before",
        )
    return True, "control: the same GPU started translated in the boot before, with the same kernel, command line and driver"


def _with_functions(gpu: GpuBoot) -> str:
    functions = ", ".join(f"{f.pci} bound to {f.driver or 'no driver'}" for f in gpu.functions)
    return f"{gpu.pci} (with {functions})" if functions else gpu.pci


def _names(gpus: Sequence[GpuBoot]) -> str:
    return ", ".join(g.pci for g in gpus)

"""IOMMU identity experiment: does a GPU start with its iommu group in the identity domain from boot? Always put back.

The cells of ``runbooks/iommu-identity-experiment.ipynb`` say these compositions in one line each. The hypothesis, what it
predicts and when to stop are in the record before anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, field_validator

from proofbook.changes.gpu_reset import ResetAttempts
from proofbook.changes.iommu_identity import LONGEST_BOOT_S, IommuIdentity, stop_rule
from proofbook.changes.nothing import NotToBeMade
from proofbook.checks import reboot as reboot_checks
from proofbook.checks.baseline import BASELINE_SCHEMA, Baseline, Scope, baseline_from, baseline_to_json, before_after
from proofbook.checks.boot import Rebooted
from proofbook.checks.held import HeldByNobody
from proofbook.checks.identity.evidence import PROBES, choose, gpus_seen, the_boot_before, the_trial
from proofbook.checks.identity.preflight import FitForIdentity
from proofbook.checks.identity.resets import ResetsListed, not_verified
from proofbook.checks.identity.restored import PutBack, restored
from proofbook.checks.identity.rule import Attempt, Before, Came, Conclusion, GpuBoot, Restored, Trial, conclude, what_to_do
from proofbook.checks.identity.trial import ValidTrial
from proofbook.errors import BadParameter, CannotTell
from proofbook.inventory import HostSpec
from proofbook.model import Applied, Change, Check, Decision, Probe, Seen, Verdict, hypothesis_word, pci_address
from proofbook.procedures.base import PlanDigest, Procedure, ProcedureParameters, refuse_nameless
from proofbook.run import Findings, Run

_NODE = re.compile(r"node:\d{1,3}")
_METHOD = re.compile(r"[a-z][a-z0-9_]{0,19}")


class Parameters(ProcedureParameters):
    host: str = Field(description="a name from proofbook.toml or ~/.ssh/config, or lab:<scenario>; no default on purpose")
    gpus: str = Field(
        "", description="GPUs to treat: empty for one (the first by address), PCI addresses separated by commas, node:0, or all"
    )
    console_confirmed: bool = Field(
        False, description="true: you are logged in on the console and can cycle the power from there"
    )
    settle_minutes: float = Field(10.0, ge=0, le=240, description="how long until the second look after the way back, 0-240")
    guard_minutes: float = Field(
        90.0, ge=60, le=1440, description="after so many minutes the machine takes it back by itself and reboots, 60-1440"
    )
    reset_methods: str = Field(
        "",
        max_length=100,
        description="resets to try in boot A on what does not start, in this order: flr bus; empty for none",
    )
    reset_may_kill: bool = Field(False, description="true: you know that a reset can leave a GPU dead until the power is cut")
    approver: str = Field("", max_length=200, description="who approves the two reboots (headless)")
    approved: PlanDigest = Field("", description="the digest of the plan that was read; empty stops at the gate")

    @field_validator("gpus")
    @classmethod
    def _names_gpus(cls, value: str) -> str:
        if value in ("", "all") or _NODE.fullmatch(value):
            return value
        for text in value.split(","):
            pci_address(text)  # raises ValueError
        return value

    @field_validator("reset_methods")
    @classmethod
    def _names_methods(cls, value: str) -> str:
        methods = value.split()
        if wrong := [m for m in methods if not _METHOD.fullmatch(m)]:
            raise ValueError(f"{wrong[0]!r} is no reset method; they are words like flr or bus, with spaces between them")
        if len(set(methods)) != len(methods):
            raise ValueError("each method is tried once, so it is named once")
        return value

    @property
    def resets(self) -> tuple[str, ...]:
        return tuple(self.reset_methods.split())


def accepts(parameters: Parameters, spec: HostSpec) -> None:
    """Refuse, before any contact, what cannot be done on this host."""
    if spec.runs_on:
        raise BadParameter(
            f"{spec.name} has no kernel of its own: it runs on {spec.runs_on}, whose iommu groups these are",
            hint=f"use host={spec.runs_on}",
        )
    if parameters.resets and not parameters.reset_may_kill:
        raise BadParameter(
            f"reset_methods={parameters.reset_methods!r} without reset_may_kill: a reset can leave such a GPU dead until the "
            "power is cut",
            hint="set reset_may_kill when that may happen to the treated GPUs, or leave reset_methods empty",
        )
    refuse_nameless(parameters)


PROCEDURE = Procedure(
    name="iommu-identity-experiment",
    title="IOMMU identity experiment",
    purpose="Find out whether a GPU starts with its iommu group in the identity domain from boot; two reboots, always put back.",
    changes_host=True,
    undo="boot B of the run itself, the guard on the machine, or `proofbook rollback`: files gone, every group as before",
    takes="30 to 90 minutes, most of it two reboots; nothing is served meanwhile",
    parameters=Parameters,
    accepts=accepts,
    lease_s=lambda parameters: float(parameters.guard_minutes) * 60 + 2 * LONGEST_BOOT_S,
)


@dataclass(frozen=True)
class Start:
    """What the run begins from: the GPUs that are treated, every GPU as it was, and the machine as reboot verification has it."""

    treated: tuple[str, ...]
    before: Before
    baseline: Baseline

    def __repr__(self) -> str:
        others = [g.pci for g in self.before.gpus if g.pci not in self.treated]
        return f"<treated: {', '.join(self.treated) or 'none'}; control: {', '.join(others) or 'none'}>"


# ----------------------------------------------------------------------------------------- compositions


def scope(run: Run) -> Scope:
    return Scope(gpus=run.intent.gpus, containers=run.intent.containers, services=run.intent.services)


def state(run: Run) -> tuple[Probe[Any], ...]:
    """Everything that is compared over the boots."""
    return tuple(dict.fromkeys([*scope(run).probes(), *PROBES]))


def begin(run: Run, seen: Seen) -> Start:
    """Choose the GPUs; write down hypothesis, prediction and stop rule before anything is done.

    Raises BadParameter when it should go on with another run's experiment.
    """
    if run.resuming:
        raise BadParameter(
            "an experiment that was interrupted is not gone on with: what was true in its boot may be no longer",
            hint=f"take it back with `proofbook rollback {run.origin}`, then open a new run",
        )
    try:
        treated = choose(run.parameters.gpus, seen, run.intent.gpus)
    except ValueError as why:
        raise BadParameter(f"gpus={run.parameters.gpus!r}: {why}") from None
    start = Start(treated, the_boot_before(seen, gpus_seen(seen, run.intent.gpus)), baseline_from(scope(run), seen))
    run.value("baseline", BASELINE_SCHEMA, baseline_to_json(start.baseline))
    run.note(
        f"Hypothesis: {hypothesis(treated)} Prediction: in boot A each of their groups reads identity after the driver bound, "
        "and nvidia-smi shows each of them. It is blocked if the first thing that the driver says of such a GPU is an error of "
        f"its FSP, while a control starts. Stop rule: one boot A, no second try, {stop_rule(bool(run.parameters.resets))}, "
        "then boot B in any case.",
        kind="procedure",
        title="written down before",
    )
    return start


def hypothesis(treated: tuple[str, ...]) -> str:
    return f"{', '.join(treated)} start{'s' if len(treated) == 1 else ''} with the iommu group in the identity domain from boot."


def fit(run: Run, start: Start) -> tuple[Check, ...]:
    own = FitForIdentity(start.treated, run.parameters.console_confirmed, run.intent.console, run.intent.gpus)
    resets = (ResetsListed(start.treated, run.parameters.resets),) if run.parameters.resets else ()
    return (HeldByNobody(), own, *resets)


def change(run: Run, start: Start, ready: Findings) -> Change:
    """The experiment, or none when it could show nothing, or not be survived."""
    reasons = tuple(
        f"{f.subject}: {f.reason}" if f.subject else f.reason for f in ready if f.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    )
    if reasons:
        return NotToBeMade("Identity experiment", reasons)
    return IommuIdentity(
        start.treated,
        start.before,
        run.parameters.guard_minutes,
        run.intent.services,
        run.intent.containers,
        run.intent.console,
        run.parameters.resets,
    )


def trial(run: Run, start: Start, applied: Applied) -> tuple[Check, ...]:
    """What boot A showed."""
    if _not_made(applied):
        return ()
    if applied.outcome != "done":
        return (reboot_checks.CameBack(applied.summary, run.intent.console),)
    return (ValidTrial(start.treated, start.before, run.intent.gpus),)


def saw(run: Run, start: Start, applied: Applied) -> Trial:
    """What the rule gets of boot A. To be taken before the way back: afterwards the latest look is of boot B."""
    if _not_made(applied):
        return Trial(False, why_not="the experiment was not made: it was not fit to be", made=False)
    if applied.outcome != "done":
        return Trial(False, why_not="" if applied.facts.get("went_down") else applied.summary)
    try:
        return the_trial(run.seen, start.treated, run.intent.gpus)
    except CannotTell as why:
        return Trial(True, why_not=f"what boot A did cannot be read: {why}")


def resets(run: Run, start: Start, tried: Trial, applied: Applied) -> ResetAttempts | None:
    """The attempts on what did not start in boot A; None where none was asked for, or where boot A was no experiment."""
    if not run.parameters.resets or tried.why_not or not tried.came_back:
        return None
    failed = tuple(g.pci for g in tried.treated if g.started is False and g.iommu_type == "identity")
    return ResetAttempts(failed, run.intent.gpus) if failed else None


def attempts(run: Run, applied: Applied, went: Applied | None) -> tuple[Attempt, ...]:
    """Every reset that was asked for and what it came to, also those that were not tried; into the record."""
    if _not_made(applied) or not run.parameters.resets:
        return ()
    made: tuple[Attempt, ...] = went.facts["attempts"] if went is not None else ()
    planned = [(pci, m) for pci, methods in applied.plan.settings["resets"].items() for m in methods]
    spared = [(pci, m, "it was not seen to fail in a valid boot A") for pci, m in planned if pci not in {a.pci for a in made}]
    not_tried = [Attempt(pci, m, Came.NOT_TRIED, why) for pci, m, why in (*spared, *applied.plan.settings["resets not listed"])]
    found = (*made, *not_tried)
    rows = [
        [a.pci, a.method, str(a.came), a.why, a.vendor_before, a.vendor_after, a.driver_after, a.first.text if a.first else ""]
        for a in found
    ]
    columns = ("GPU", "method", "came to", "what was seen", "vendor before", "vendor after", "driver after", "first error after")
    run.table("resets", "Resets in boot A", columns, rows)
    return found


def way_back(applied: Applied) -> Decision:
    """Always: an experiment is not kept, whatever it showed."""
    return Decision(False, "RESTORE", "an experiment is always put back, whatever it showed")


def put_back(run: Run, start: Start, applied: Applied, back: Applied, *, again: bool = False) -> tuple[Check, ...]:
    """Boot B: as before the experiment, by its own check and by those of reboot verification."""
    if _not_made(applied):
        return ()
    if again and (back.outcome != "restored" or run.parameters.settle_minutes == 0):
        return ()
    own = PutBack(start.before)
    if back.facts.get("boot") != "B" and back.outcome != "restored":
        return (own,)
    situation = reboot_checks.Situation(True, str(back.facts.get("boot_id_before", "")), {}, True)
    if again:
        return (own, *reboot_checks.second_look(scope(run), start.baseline, situation, run.seen))
    first = reboot_checks.first_look(scope(run), start.baseline, situation, run.seen)
    return (own, *(_since_boot_a(check, start, situation.boot_id_before) for check in first))


def _since_boot_a(check: Check, start: Start, boot_a: str) -> Check:
    """Boots are counted from boot A: since the baseline there are two, as planned."""
    machine = start.baseline.machine
    if not isinstance(check, Rebooted) or machine is None or not boot_a:
        return check
    return Rebooted(replace(start.baseline, machine=replace(machine, boot_id=boot_a)), planned=True)


def settle(run: Run, applied: Applied, back: Applied) -> float:
    """The minutes to wait; none where there is nothing to look at again."""
    if _not_made(applied) or back.outcome != "restored":
        return 0.0
    if run.parameters.settle_minutes == 0:
        run.note(
            "settle_minutes is 0: there was no second look after the way back. A GPU that falls off the bus minutes later "
            "would not have been seen.",
            kind="not-verified",
            title="no settling time",
        )
    return float(run.parameters.settle_minutes)


def conclusion(run: Run, start: Start, tried: Trial, back: Applied, tried_resets: Sequence[Attempt] = ()) -> Conclusion:
    """By the rule, with its scope; into the record."""
    came = Restored(False) if not tried.made else restored(run.seen, start.before)
    if tried.made and back.outcome != "restored" and not came.wrong and came.seen:
        came = Restored(False)  # the look is of an earlier boot: the way back itself did not go through
    found = conclude(start.before, tried, came, tried_resets)
    if tried.came_back:
        said = not_verified(tried_resets, asked=bool(run.parameters.resets))
        run.note(said, kind="not-verified", title="resets")
    run.conclude(
        {
            "outcome": str(found.outcome),
            "hypothesis": hypothesis(start.treated),
            "because": found.because,
            "what_to_do": what_to_do(found),
            "reasons": list(found.reasons),
            "scope": "; ".join(_scope(run, start)),
            "damaged": found.damaged,
        }
    )
    rows = [[g.pci, _role(g.pci, start), g.iommu_type, _word(g.started)] for g in start.before.gpus]
    boot_a = {g.pci: g for g in (*tried.treated, *tried.others)}
    for row in rows:
        gpu = boot_a.get(row[0])
        row += [gpu.iommu_type, _word(gpu.started), gpu.first.text if gpu.first else ""] if gpu else ["", "not seen", ""]
    columns = ("GPU", "role", "type before", "started before", "type in boot A", "started in boot A", "first error in boot A")
    run.table("boots", "Each GPU before and in boot A", columns, rows)
    if functions := _functions(start, boot_a):
        of_functions = ("function", "of GPU", "type before", "driver before", "type in boot A", "driver in boot A")
        run.table("functions", "What shares a GPU's group, and is of its device", of_functions, functions)
    if tried.made:
        run.table(
            "before-after",
            "The machine before and after",
            ("what", "before", "after", "same?"),
            before_after(start.baseline, baseline_from(scope(run), run.seen)),
        )
    return found


def _functions(start: Start, boot_a: Mapping[str, GpuBoot]) -> list[list[str]]:
    """Each other function of a GPU in its group: before, and in boot A ("not seen" where nobody could look)."""
    rows = []
    for gpu in start.before.gpus:
        later = {f.pci: f for f in boot_a[gpu.pci].functions} if gpu.pci in boot_a else {}
        for was in gpu.functions:
            now = later.get(was.pci)
            seen = [now.iommu_type, now.driver or "none"] if now else ["not seen", "not seen"]
            rows.append([was.pci, gpu.pci, was.iommu_type, was.driver or "none", *seen])
    return rows


def _scope(run: Run, start: Start) -> list[str]:
    """What the conclusion holds for, as it was before: a GPU that is gone says nothing of its VBIOS."""
    was = start.baseline
    said = [f"GPU {', '.join(start.treated)} of {run.host.identity.hostname}"]
    functions = [f.pci for g in start.before.gpus if g.pci in start.treated for f in g.functions]
    said += [f"with {', '.join(functions)} in the same group"] if functions else []
    rows = [was.gpus.rows[pci] for pci in start.treated if was.gpus is not None and pci in was.gpus.rows]
    said += [f"{name}, VBIOS {vbios}" for name, vbios in dict.fromkeys((r.name, r.vbios) for r in rows)]
    if was.driver is not None:
        said.append(f"driver {was.driver.module_version}")
    if was.machine is not None:
        board, bios = was.machine.board or "not known", was.machine.bios or "not known"
        said += [f"kernel {was.machine.kernel}", f"board {board}, BIOS {bios}", f"command line {was.machine.cmdline}"]
    return [*said, "one boot"]


def summary(found: Conclusion, back: Applied) -> str:
    """The run in a sentence. That the machine is not as it was comes before everything else, with what to do."""
    said = f"{hypothesis_word(found.outcome)}: {found.because}"
    if back.outcome == "rollback-failed":
        by_hand = back.facts.get("by_hand", ())
        return f"{back.summary}. ACT NOW: {'; '.join(by_hand[:2])}. The experiment itself came out {said}."
    return f"{said}; the machine is as it was. {what_to_do(found)}" if found.damaged is False else f"{said}. {what_to_do(found)}"


def _role(pci: str, start: Start) -> str:
    return "treated" if pci in start.treated else "control"


def _word(started: bool | None) -> str:
    return "not known" if started is None else "yes" if started else "NO"


def _not_made(applied: Applied) -> bool:
    return applied.outcome == "nothing-to-do"


__all__ = [
    "PROCEDURE",
    "Parameters",
    "attempts",
    "begin",
    "change",
    "conclusion",
    "fit",
    "put_back",
    "resets",
    "saw",
    "settle",
    "state",
    "summary",
    "trial",
    "way_back",
]

"""Reboot verification: was it rebooted, is it the same machine, and does everything run as it did and as intended?

The cells of ``runbooks/reboot-verification.ipynb`` say these compositions in one line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from proofbook.changes.reboot import Reboot
from proofbook.checks import reboot as checks
from proofbook.checks.baseline import (
    BASELINE_SCHEMA,
    Baseline,
    Scope,
    baseline_from,
    baseline_from_json,
    baseline_to_json,
    before_after,
)
from proofbook.errors import BadParameter, CannotTell, NoSuchRun
from proofbook.intent import ServiceSpec
from proofbook.inventory import HostSpec
from proofbook.model import Applied, Check, Probe, Seen
from proofbook.probes.systemd import UnitProcess
from proofbook.procedures.base import PlanDigest, Procedure, ProcedureParameters, refuse_nameless
from proofbook.run import Findings, PlanView, Run


class Parameters(ProcedureParameters):
    host: str = Field(description="a name from proofbook.toml or ~/.ssh/config, or lab:<scenario>; no default on purpose")
    reboot: bool = Field(False, description="true reboots the machine (behind a gate); false only verifies")
    services: str = Field(
        "", description="services to verify, [container/]unit, separated by commas; empty: those of the inventory"
    )
    settle_minutes: float = Field(
        10.0, ge=0, le=240, description="how long until the second look, 0-240; 0 skips it, and the record says so"
    )
    baseline: str = Field("now", description="what to compare with: now (taken before the reboot), or the id of an earlier run")
    approver: str = Field("", max_length=200, description="who approves the reboot (headless)")
    approved: PlanDigest = Field("", description="the digest of the plan that was read; empty stops at the gate")

    @property
    def service_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.services.split(",") if name.strip()))


def accepts(parameters: Parameters, spec: HostSpec) -> None:
    """Refuse, before any contact, what cannot be verified on this host."""
    if spec.runs_on:
        raise BadParameter(
            f"{spec.name} has no kernel of its own: it runs on {spec.runs_on}, and a reboot concerns the machine",
            hint=f"use host={spec.runs_on} and services={spec.name}/<unit>",
        )
    for name in parameters.service_names:
        spec.service(name)
    refuse_nameless(parameters)
    if parameters.reboot and parameters.baseline not in ("", "now"):
        raise BadParameter(
            "a run that reboots takes its own baseline",
            hint="leave baseline=now, or verify only (reboot=false) against that earlier run",
        )


PROCEDURE = Procedure(
    name="reboot-verification",
    title="Reboot verification",
    purpose="Reboot a GPU server, or look at one that was rebooted, and show by evidence that it came back as intended.",
    changes_host=True,
    undo="none: a reboot cannot be undone; the gate says what it stops",
    takes="10 to 40 minutes, most of it waiting",
    parameters=Parameters,
    accepts=accepts,
)

# ----------------------------------------------------------------------------------------- compositions


def services(run: Run) -> tuple[ServiceSpec, ...]:
    """The services in question: those that were named, else those of the inventory."""
    named = run.parameters.service_names
    return tuple(run.intent.service(n) for n in named) if named else run.intent.services


def scope(run: Run) -> Scope:
    """What is meant to be on this machine, as far as the inventory says."""
    return Scope(gpus=run.intent.gpus, containers=run.intent.containers, services=services(run))


def state(run: Run) -> tuple[Probe[Any], ...]:
    """Everything that is compared before and after."""
    return scope(run).probes()


def baseline(run: Run, seen: Seen) -> Baseline | None:
    """What to compare with: this look (when the run reboots), an earlier run's, or nothing (verify only)."""
    found = _found_running(run, seen)
    if not run.parameters.reboot:
        run.configuration(found)
    if run.parameters.baseline not in ("", "now"):
        return _stored(run, run.parameters.baseline)
    taken = baseline_from(scope(run), seen)
    run.value("baseline", BASELINE_SCHEMA, baseline_to_json(taken))
    if run.parameters.reboot:
        return taken
    run.note(
        "There is no baseline from before a boot: what is found now is held against the inventory alone. "
        "Whether it differs from before the last reboot was not verified.",
        kind="not-verified",
        title="no baseline from before",
    )
    return None


def _stored(run: Run, run_id: str) -> Baseline:
    stored = run.memory.stored_value(run_id, "baseline")
    taken = baseline_from_json(stored["value"])
    if taken.machine_id and taken.machine_id != run.host.identity.machine_id:
        raise NoSuchRun(
            f"the baseline of {run_id} is of another machine (machine-id {taken.machine_id})",
            hint=f"{run.host.name} is {run.host.identity.machine_id}; name a run of this machine, or baseline=now",
        )
    return taken


def reboot(run: Run) -> Reboot:
    """The change: a reboot, or none when the run only verifies."""
    return Reboot(run.parameters.reboot, services(run), run.intent.containers, run.intent.console)


def first_look(run: Run, before: Baseline | None, applied: Applied) -> tuple[Check, ...]:
    """Everything that can be judged as soon as the services had their time to start."""
    if applied.facts.get("came_back") is False:
        return (checks.CameBack(applied.summary, run.intent.console),)
    if not services(run):
        run.note(
            "No service is declared for this host and none was named: whether what ran before runs again was not verified.",
            kind="not-verified",
            title="no services to verify",
        )
    return checks.first_look(scope(run), before, _situation(run, applied), run.seen)


def second_look(run: Run, before: Baseline | None, applied: Applied, first: Findings) -> tuple[Check, ...]:
    """What tends to go wrong late: kernel log, GPUs, services; and whether anything restarted since the first look."""
    if run.parameters.settle_minutes == 0:
        return ()
    if applied.facts.get("came_back") is False:
        return (checks.CameBack(applied.summary, run.intent.console),)
    return checks.second_look(scope(run), before, _situation(run, applied), run.seen)


def settle(run: Run) -> float:
    """The minutes to wait; without a wait the record says what was not seen."""
    minutes: float = run.parameters.settle_minutes
    if minutes == 0:
        run.note(
            "settle_minutes is 0: there was no second look after a settling time. "
            "Late Xids, and services that die after minutes, would not have been seen.",
            kind="not-verified",
            title="no settling time",
        )
    return minutes


def _situation(run: Run, applied: Applied) -> checks.Situation:
    machine = run.host.identity.machine_id
    kept: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for service in services(run):
        found = run.memory.last_kept(machine, service.spec)
        if found is not None:
            kept[service.spec] = found
    return checks.Situation(
        rebooted_by_us=applied.outcome != "nothing-to-do",
        boot_id_before=str(applied.facts.get("boot_id_before", "")),
        kept=kept,
        controls_reboot=run.parameters.reboot,
    )


def table(run: Run, before: Baseline | None) -> None:
    """Before and after, side by side, into the record."""
    now = baseline_from(scope(run), run.seen)
    run.table("before-after", "Before and after", ("what", "before", "after", "same?"), before_after(before, now))
    if run.parameters.reboot:
        run.configuration(_found_running(run, run.seen))


def _found_running(run: Run, seen: Seen) -> dict[str, Any]:
    """Service → argv and environment of its running process, where known."""
    found: dict[str, Any] = {}
    for service in services(run):
        probe = UnitProcess(service.name, scope(run).container(service.container))
        try:
            process = seen.value(probe)
        except CannotTell:
            continue
        found[service.spec] = {"argv": list(process.argv), "environment": dict(process.environ or {})}
    return found


__all__ = ["PROCEDURE", "Parameters", "PlanView", "baseline", "first_look", "reboot", "second_look", "settle", "state", "table"]

"""The checks of a reboot verification, composed: a first look when the machine is back, a second one after it has settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proofbook.checks.baseline import Baseline, Scope, baseline_from
from proofbook.checks.boot import KernelAndCommandLine, OrderlyShutdown, Rebooted, SameMachine, StillUp
from proofbook.checks.contact import CameBack
from proofbook.checks.containers import ContainerUp
from proofbook.checks.iommu import DmaFaults, IommuTypes
from proofbook.checks.journal import JournalKept
from proofbook.checks.kernel_log import KernelLogClean
from proofbook.checks.looking import tell
from proofbook.checks.nvidia import DriverConsistent, GpusPresent
from proofbook.checks.pci import LinkSpeed, LinkWidth, PcieErrors
from proofbook.checks.service import ServiceAnswers
from proofbook.checks.systemd import (
    Configuration,
    NoFailedUnits,
    ServiceEnabled,
    ServiceRunsAsConfigured,
    ServicesAsBefore,
    ServiceStable,
    ServiceStartedByBoot,
)
from proofbook.intent import ServiceSpec
from proofbook.model import Check, Seen
from proofbook.probes.boot import Boots

__all__ = ["CameBack", "Situation", "first_look", "second_look"]


@dataclass(frozen=True)
class Situation:
    """How the looks came about.

    ``controls_reboot``: this run is one that reboots; ``rebooted_by_us``: it did ask for the reboot. ``kept``: service →
    (run, {argv, environment}) of the configuration that was last kept.
    """

    rebooted_by_us: bool = False
    boot_id_before: str = ""
    kept: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    controls_reboot: bool = False

    def configuration(self, service: ServiceSpec) -> Configuration | None:
        found = self.kept.get(service.spec)
        if found is None:
            return None
        run_id, values = found
        environment = values.get("environment")
        return Configuration(run_id, tuple(map(str, values.get("argv") or ())), dict(environment) if environment else None)


def first_look(scope: Scope, before: Baseline | None, situation: Situation, seen: Seen | None = None) -> tuple[Check, ...]:
    """Everything that can be judged once the services had their time to start.

    ``seen``: earlier observations, from which the boot before is known when there is no baseline.
    """
    boot_before = situation.boot_id_before or (before.boot_id if before else "") or _boot_before(seen)
    return (
        SameMachine(before),
        Rebooted(before, planned=situation.controls_reboot),
        OrderlyShutdown(boot_before),
        KernelAndCommandLine(before),
        JournalKept(),
        DriverConsistent(scope.gpus, before),
        *_hardware(scope, before),
        IommuTypes(scope.gpus, before),
        LinkWidth(scope.gpus, before),
        LinkSpeed(scope.gpus, before),
        *(ContainerUp(container) for container in scope.containers),
        *(check for service in scope.services for check in _service(scope, service, before, situation)),
        *_failed_units(scope, before),
        *_services_as_before(scope, before),
    )


def second_look(scope: Scope, before: Baseline | None, situation: Situation, seen: Seen) -> tuple[Check, ...]:
    """What shows late: kernel log, GPUs, services, and whether anything restarted since the first look (``seen``)."""
    first = baseline_from(scope, seen)
    services: list[Check] = []
    for service in scope.services:
        where = scope.container(service.container)
        services += [ServiceStable(service, where, first.units.get(service.spec)), ServiceAnswers(service, where)]
    return (
        StillUp(first),
        JournalKept(),
        *_hardware(scope, before),
        LinkWidth(scope.gpus, before),
        *(ContainerUp(container) for container in scope.containers),
        *services,
        *_failed_units(scope, before),
        *_services_as_before(scope, before),
    )


def _hardware(scope: Scope, before: Baseline | None) -> tuple[Check, ...]:
    gpus = scope.gpus
    return (GpusPresent(gpus, before), KernelLogClean(gpus, before), DmaFaults(gpus, before), PcieErrors(gpus, before))


def _service(scope: Scope, service: ServiceSpec, before: Baseline | None, situation: Situation) -> tuple[Check, ...]:
    where = scope.container(service.container)
    return (
        ServiceEnabled(service, where),
        ServiceStartedByBoot(service, where, after_reboot=situation.controls_reboot or before is not None),
        ServiceStable(service, where),
        ServiceAnswers(service, where),
        ServiceRunsAsConfigured(
            service, where, situation.configuration(service), before.processes.get(service.spec) if before else None
        ),
    )


def _failed_units(scope: Scope, before: Baseline | None) -> tuple[Check, ...]:
    failed = before.failed if before else {}
    return (NoFailedUnits(None, failed.get("")), *(NoFailedUnits(c, failed.get(c.name)) for c in scope.containers))


def _services_as_before(scope: Scope, before: Baseline | None) -> tuple[Check, ...]:
    """What nobody declared is held against the look before, where there was one."""
    if before is None:
        return ()
    places = [("", None), *((c.name, c) for c in scope.containers)]
    return tuple(
        ServicesAsBefore(place, before.running.get(name), tuple(s.name for s in scope.services if s.container == name))
        for name, place in places
    )


def _boot_before(seen: Seen | None) -> str:
    if seen is None:
        return ""
    boots = tell(seen, Boots()).value
    return next((b.boot_id for b in boots or () if b.index == -1), "")

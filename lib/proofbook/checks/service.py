"""Does a service do what it is for: answer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import tell, there, unseen
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.boot import Machine
from proofbook.probes.service import Endpoint, EndpointFacts
from proofbook.probes.systemd import UnitFacts, UnitState

__all__ = ["ServiceAnswers"]


@dataclass(frozen=True)
class ServiceAnswers(Check):
    """Its health address answers 200. "active" only says that a process was started; a model takes minutes to load."""

    service: ServiceSpec
    container: ContainerSpec | None = None
    name: ClassVar[str] = "service.ServiceAnswers"
    title: ClassVar[str] = "Does this service answer?"

    def needs(self) -> tuple[Probe[Any], ...]:
        if not self.service.url:
            return ()
        return (Endpoint(self.service.url, self.container), UnitState(self.service.name, self.container), Machine())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        service = self.service
        if not service.url:
            return [
                self.not_checked(
                    "no health address is known, so nobody asked it",
                    subject=service.spec,
                    what_to_do="Give the service a url in the inventory (one that answers 200 when it is ready).",
                )
            ]
        answer, why = tell(seen, Endpoint(service.url, self.container)).pair
        unit, no_unit = tell(seen, UnitState(service.name, self.container)).pair
        if answer is None:
            return [unseen(self, why, service.spec)]
        about: dict[str, Any] = {"subject": service.spec, "expected": 200, "observed": answer.http_status or answer.error}
        if answer.http_status == 200:
            return [self._answered(answer, unit, no_unit, about)]
        said = f"HTTP {answer.http_status}" if answer.http_status is not None else answer.error or "no answer"
        state = f"it is {unit.active} ({unit.sub})" if unit else "its unit's state is not known"
        age = self._age(seen, unit)
        if unit and _may_still_come(unit) and age is not None and age < service.ready_s:
            reason = (
                f"{service.url}: {said}; {state} and started {age:.0f} s ago, of the {service.ready_s:.0f} s that it may take"
            )
            return [
                self.failed(
                    reason, action=Suggested.WAIT, what_to_do="It may still be loading; its journal says how far.", **about
                )
            ]
        return [
            self.failed(
                f"{service.url}: {said}, although {state}"
                if unit and unit.active == "active"
                else f"{service.url}: {said}; {state}",
                action=Suggested.LOOK,
                what_to_do=f"Read {there(self.container, f'journalctl -b -u {service.name}')}: "
                "does it still load, does it hang, or listen elsewhere?",
                **about,
            )
        ]

    def _answered(self, answer: EndpointFacts, unit: UnitFacts | None, no_unit: str, about: dict[str, Any]) -> Finding:
        if unit is None:
            return self.unknown(
                f"{answer.url} answers 200, but whether it is this unit that answers is not known: {no_unit}", **about
            )
        if unit.active not in ("active", "reloading", "activating"):
            return self.failed(
                f"{answer.url} answers 200, but the unit is {unit.active} ({unit.sub}): something else answers there",
                action=Suggested.LOOK,
                what_to_do="See who listens on that port (`ss -ltnp`): an old process, or one that was started by hand.",
                **about,
            )
        return self.passed(f"{answer.url} answered 200 in {answer.took_s:.2f} s", **about)

    @staticmethod
    def _age(seen: Seen, unit: UnitFacts | None) -> float | None:
        """Seconds since its process started."""
        machine = tell(seen, Machine()).value
        if machine is None or unit is None or unit.main_started_s is None:
            return None
        return max(0.0, machine.uptime_s - unit.main_started_s)


def _may_still_come(unit: UnitFacts) -> bool:
    """Whether waiting can help: its first start is under way. A loop begins anew each time and never gets further."""
    return unit.active in ("active", "activating") and not unit.sub.startswith("auto-restart") and not unit.n_restarts

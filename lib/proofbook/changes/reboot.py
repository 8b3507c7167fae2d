"""A reboot as a plan: what it stops, what cannot be undone, and how it is followed until the services answer again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, TypeVar

from proofbook.errors import CannotTell, ConnectionLost
from proofbook.host import Hands, Host
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Action, Applied, Change, Identity, Plan, Probe, Seen, command
from proofbook.probes.access import Access
from proofbook.probes.boot import Machine
from proofbook.probes.containers import ContainerState
from proofbook.probes.nvidia import ComputeApps
from proofbook.probes.service import Endpoint
from proofbook.probes.systemd import RunningServices, SystemState, UnitFacts, UnitState

T = TypeVar("T")

#: How long a machine may take to go down after `systemctl reboot` returned: stopping a serving stack drains requests.
DOWN_PATIENCE_S = 600.0
#: How long until it must let us in again. Servers with much memory train it for many minutes.
UP_PATIENCE_S = 1800.0
POLL_S = 5.0
#: How long systemd may say nothing of its own state after the login, seconds.
_SILENT_S = 60.0
#: A unit that systemd had to restart this often since the boot is in a loop; its checks will say so.
HOPELESS_RESTARTS = 5

REBOOT = command("systemctl", "reboot", root=True, timeout_s=60)


@dataclass(frozen=True)
class Reboot(Change):
    """Reboot the machine, or, with ``wanted`` false, change nothing."""

    wanted: bool
    services: tuple[ServiceSpec, ...] = ()
    containers: tuple[ContainerSpec, ...] = ()
    console: str = ""
    name: ClassVar[str] = "reboot"

    def _container(self, name: str) -> ContainerSpec | None:
        return next((c for c in self.containers if c.name == name), None)

    def _units(self) -> dict[str, UnitState]:
        return {s.spec: UnitState(s.name, self._container(s.container)) for s in self.services}

    def needs(self) -> tuple[Probe[Any], ...]:
        if not self.wanted:
            return ()
        return (
            Machine(),
            Access(),
            RunningServices(),
            ComputeApps(),
            *self._units().values(),
            *(ContainerState(c) for c in self.containers),
        )

    def plan(self, seen: Seen, host: Identity) -> Plan:
        if not self.wanted:
            return Plan(self.name, "Verify only: nothing is changed", host, {}, (), (), "", (), 0.0)
        slowest = max((s.ready_s for s in self.services), default=60.0)
        return Plan(
            change=self.name,
            title=f"Reboot {host.hostname}",
            host=host,
            pre_state=self._pre_state(seen, host),
            actions=(Action("ask systemd for an orderly reboot", REBOOT.argv),),
            undo=(),
            diff=f"-boot {host.boot_id}\n+a new boot of the same machine",
            cannot_undo=(
                "work that runs now is stopped, and what it holds in memory is lost",
                "a machine that does not come back needs its console or a power cycle",
            ),
            expected_s=300.0 + slowest,
            facts=tuple(self._facts(seen)),
            settings={"down_patience_s": DOWN_PATIENCE_S, "up_patience_s": UP_PATIENCE_S},
        )

    def _pre_state(self, seen: Seen, host: Identity) -> Mapping[str, Any]:
        """What the approval is bound to. An answer that is not known is part of it, as such."""
        state: dict[str, Any] = {"hostname": host.hostname, "kernel": host.kernel}
        for spec, probe in self._units().items():
            state[f"service {spec}"] = _read(seen, probe, lambda unit: unit.active)
        # by name and GPU, never by pid: what a person read that a reboot kills is part of what was approved
        state["on the GPUs"] = _read(seen, ComputeApps(), lambda apps: sorted({f"{a.process} on {a.pci}" for a in apps}))
        for container in self.containers:
            state[f"container {container.name}"] = _read(seen, ContainerState(container), lambda c: c.running)
        return state

    def _facts(self, seen: Seen) -> list[str]:
        facts = [_read(seen, Machine(), lambda m: f"it has been up for {_days(m.uptime_s)}", "uptime: not known")]
        for spec, probe in self._units().items():
            facts.append(f"{spec} is " + _read(seen, probe, lambda unit: f"{unit.active}/{unit.sub}"))
        facts.append(_read(seen, ComputeApps(), _on_the_gpus, "processes on the GPUs: not known"))
        facts.append(_read(seen, RunningServices(), _running, "running services: not known"))
        facts.append(
            f"console: {self.console}"
            if self.console
            else "console: NOT STATED in the inventory; make sure that you can reach one before you approve"
        )
        facts.append(
            "not checked: jobs of other schedulers, open sessions of other people's tools, disks that need a passphrase at boot"
        )
        return facts

    # ---------------------------------------------------------------------------------------------- acting

    def apply(self, plan: Plan, hands: Hands, tell: Callable[[str], None]) -> Applied:
        host, before = hands.host, hands.host.identity
        asked_at = host.clock.now()
        answer = hands.act(plan.actions[0].what, REBOOT, loss_expected=True)
        facts: dict[str, Any] = {"boot_id_before": before.boot_id, "asked_at": asked_at.isoformat()}
        if answer is not None and not answer.ok:
            # WHY: `systemctl reboot` may print "Call to Reboot failed" and reboot all the same; only the boot-id tells.
            tell(f"systemctl reboot ended with {answer.exit_status}; waiting to see what the machine does")
        if not host.await_down(patience_s=DOWN_PATIENCE_S, tell=tell):
            waited = f"still runs boot {before.boot_id[:12]}… after {DOWN_PATIENCE_S / 60:.0f} min"
            summary = f"{before.hostname} was asked to reboot and {waited}; the reboot may still happen at any moment"
            return Applied(plan, "unconfirmed", summary, {**facts, "went_down": False})
        facts |= {"went_down": True, "down_after_s": _since(asked_at, host)}
        tell(f"the machine went down after {facts['down_after_s']:.0f} s")
        identity = host.await_up(patience_s=UP_PATIENCE_S, tell=tell)
        if identity is None:
            summary = f"{before.hostname} went down and did not let us in again within {UP_PATIENCE_S / 60:.0f} min"
            return Applied(plan, "unconfirmed", summary, {**facts, "came_back": False})
        hands.proven("after the reboot")
        facts |= {"came_back": True, "up_after_s": _since(asked_at, host), "boot_id_after": identity.boot_id}
        tell(f"it lets us in again after {facts['up_after_s']:.0f} s, boot {identity.boot_id[:12]}…")
        facts |= self._await_services(hands, tell)
        facts["ready_after_s"] = _since(asked_at, host)
        return Applied(
            plan, "done", f"{before.hostname} was rebooted; it answered again after {facts['up_after_s']:.0f} s", facts
        )

    def _await_services(self, hands: Hands, tell: Callable[[str], None]) -> Mapping[str, Any]:
        """Wait until systemd has finished starting and every service answers, or its patience is used up. Judges nothing."""
        host = hands.host
        started = host.clock.now()
        waiting: dict[str, ServiceSpec] = {s.spec: s for s in self.services}
        ready: dict[str, float] = {}
        booting = True
        while booting or waiting:
            probes: dict[str, Probe[Any]] = {spec: self._readiness(service) for spec, service in waiting.items()}
            units = {spec: unit for spec, unit in self._units().items() if spec in waiting}
            try:
                seen = hands.peek(*dict.fromkeys([*probes.values(), *units.values()]), SystemState())
            except ConnectionLost as error:
                tell(f"the connection was lost while the services start: {str(error).splitlines()[0]}")
                if host.await_up(patience_s=UP_PATIENCE_S, tell=tell) is None:
                    break
                hands.proven("after a lost connection")
                continue
            passed = _since(started, host)
            # WHY no answer counts too, for a while: right after the login systemd may not be ready to say anything
            said = _read(seen, SystemState(), str, "")
            booting = said in ("starting", "initializing") or (not said and passed < _SILENT_S)
            for spec, probe in probes.items():
                if _is_ready(seen, probe):
                    ready[spec] = passed
                    tell(f"{spec} is ready {passed:.0f} s after the login")
                    del waiting[spec]
                elif hopeless := "" if booting else _read(seen, units[spec], _why_hopeless, ""):
                    tell(f"{spec} is not waited for any longer: {hopeless}")
                    del waiting[spec]
                elif passed >= waiting[spec].ready_s:
                    tell(f"{spec} is not ready after {passed:.0f} s; its patience of {waiting[spec].ready_s:.0f} s is used up")
                    del waiting[spec]
            if booting and not waiting and passed > 600:
                tell("systemd says that it is still starting after 10 min; looking at what is there")
                break
            if booting or waiting:
                host.clock.sleep(POLL_S)
        return {
            "services_ready_after_login_s": ready,
            "services_not_ready": [s.spec for s in self.services if s.spec not in ready],
        }

    def _readiness(self, service: ServiceSpec) -> Probe[Any]:
        container = self._container(service.container)
        return Endpoint(service.url, container) if service.url else UnitState(service.name, container)


def _is_ready(seen: Seen, probe: Probe[Any]) -> bool:
    try:
        value = seen.value(probe)
    except CannotTell:
        return False
    return bool(value.ok) if isinstance(probe, Endpoint) else value.active == "active"


def _why_hopeless(unit: UnitFacts) -> str:
    """Why waiting for a unit is in vain once systemd has finished starting; "" when it may still become ready."""
    if unit.active in ("inactive", "failed") or not unit.exists:
        return f"systemd has finished starting, and it is {unit.active} ({unit.load}, {unit.enabled or 'no state at boot'})"
    if unit.sub == "auto-restart" and (unit.n_restarts or 0) >= HOPELESS_RESTARTS:
        return f"it was restarted {unit.n_restarts} times since the boot"
    return ""


def _read(seen: Seen, probe: Probe[T], what: Callable[[T], Any], otherwise: str = "not known") -> Any:
    """Something of an answer, or words for its being unknown: what is shown at a gate must not fail for one answer."""
    try:
        return what(seen.value(probe))
    except CannotTell:
        return otherwise


def _since(start: datetime, host: Host) -> float:
    return round((host.clock.now() - start).total_seconds(), 1)


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 86400 else f"{seconds / 3600:.1f} hours"


def _on_the_gpus(apps: Any) -> str:
    if not apps:
        return "no process computes on a GPU"
    return f"{len(apps)} process(es) compute on GPUs: " + ", ".join(f"{a.process} ({a.pci})" for a in apps[:6])


def _running(units: Any) -> str:
    names = [u.unit for u in units]
    return f"{len(names)} services run: " + ", ".join(names[:12]) + (" …" if len(names) > 12 else "")

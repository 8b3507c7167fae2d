"""A service stands still for a while: stopped under a guard, kept stopped, and started again when the work is done.

While it stands still a drop-in holds it back (a condition that is never true), so that neither a restart by systemd, nor a
dependency, nor a boot in the middle brings it onto the GPUs. The drop-in is a guarded file: when nobody says in time that the
work is over, the machine removes it and starts the service by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.changes.following import follow_start, stop_unit, wait_stopped
from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.errors import CannotTell, GuardRefused, PlanDrifted
from proofbook.host import Hands
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Action, Applied, Change, Command, Identity, Plan, Probe, Seen
from proofbook.probes.change_state import GuardState
from proofbook.probes.memory import GpuProcesses
from proofbook.probes.systemd import UnitState
from proofbook.probes.unit_files import UnitFiles, UnitSettings
from proofbook.remote.guard import GuardedFile

__all__ = ["StandStill", "held_back_by"]

Tell = Callable[[str], None]

#: The root folder always exists, so this condition never holds.
HELD_BACK = b"""# The unit stays stopped while something is tested on the GPUs. This file goes by itself when the test is over.
[Unit]
ConditionPathExists=!/
"""
_STOP_MARGIN_S, _STOP_AT_MOST_S = 60.0, 1800.0


def held_back_by(unit: str) -> str:
    """The drop-in that keeps a unit stopped."""
    return f"/etc/systemd/system/{unit}.d/95-proofbook-stands-still.conf"


@dataclass(frozen=True)
class StandStill(Change):
    """Stop ``service`` for at most ``guard_minutes``. None: nobody is in the way, and nothing has to be stopped.

    ``dangers``: what the work that is made room for may do to the machine, in words; who approves must have read it.
    Taking it back is part of the plan: the work is over, the service is started again and seen to serve. There is no keeping it.
    """

    service: ServiceSpec | None
    container: ContainerSpec | None = None
    guard_minutes: float = 120.0
    dangers: tuple[str, ...] = ()
    name: ClassVar[str] = "stand-still"

    def needs(self) -> tuple[Probe[Any], ...]:
        if self.service is None:
            return ()
        unit, container = self.service.name, self.container
        held = UnitFiles(unit, container, (held_back_by(unit),))
        return UnitState(unit, container), UnitSettings(unit, container), held, GpuProcesses()

    def plan(self, seen: Seen, host: Identity) -> Plan:
        if self.service is None:
            return self._nothing(host, "No service has to be stopped", "nobody computes on the GPUs")
        unit, container = self.service.name, self.container
        try:
            state, settings = seen.value(UnitState(unit, container)), seen.value(UnitSettings(unit, container))
            held = seen.value(UnitFiles(unit, container, (held_back_by(unit),))).get(held_back_by(unit))
            processes = seen.value(GpuProcesses())
        except CannotTell as why:
            return self._nothing(host, f"{self.service.spec} cannot be stopped", f"not possible: {why}")
        others = sorted({f"{p.process} on {p.pci}" for p in processes if not p.of_unit(unit, container)})
        if held is not None or others:
            # WHY also when it does not run: the guard of whoever holds it back would start it in the middle of the test
            there = f"{held_back_by(unit)} exists already: another run holds it back"
            reason = f"others compute too: {', '.join(others[:4])}" if others else there
            return self._nothing(host, f"{self.service.spec} is not stopped", f"not possible: {reason}")
        if state.active != "active":
            return self._nothing(host, f"{self.service.spec} does not run ({state.active})", "there is nothing to stop")
        stop_s = min((settings.timeout_stop_s or _STOP_AT_MOST_S) + _STOP_MARGIN_S, _STOP_AT_MOST_S)
        return self._planned(self.service, host, f"{state.active}/{state.sub}, {state.enabled}", stop_s)

    def _nothing(self, host: Identity, title: str, fact: str) -> Plan:
        return Plan(self.name, title, host, {}, (), (), "", (), 0.0, (fact,))

    def _planned(self, service: ServiceSpec, host: Identity, state: str, stop_s: float) -> Plan:
        unit, path, minutes = service.name, held_back_by(service.name), self.guard_minutes
        start = Action(f"remove {path}, start {unit} and see that it serves", ("systemctl", "start", unit))
        return Plan(
            change=self.name,
            title=f"{service.spec} stands still while the GPUs are tested",
            host=host,
            pre_state={"state": state, path: "absent"},
            actions=(
                Action(f"arm the guard: after {minutes:g} min the machine starts {unit} by itself"),
                Action(f"write {path}: whatever starts it meanwhile finds a condition that does not hold"),
                Action(f"stop {unit} and wait until nothing of it is left on the GPUs", ("systemctl", "stop", unit)),
            ),
            undo=(start,),
            diff="".join(f"+{line}\n" for line in HELD_BACK.decode().splitlines()),
            cannot_undo=(
                f"{service.spec} is down from its stop until the test is over and it is ready again",
                "requests that run are drained until the stop's time is up, then cut; what the caches hold is lost",
                *self.dangers,
            ),
            expected_s=stop_s + service.ready_s,
            facts=(
                "nobody else computes on the GPUs",
                "not checked: who sends requests, and whether a load balancer takes this server out while it is down",
            ),
            settings={
                "unit": unit,
                "container": self.container.model_dump() if self.container else None,
                "guard_s": round(minutes * 60),
                "stop_s": stop_s,
                "ready_s": service.ready_s,
                "url": service.url,
            },
        )

    def apply(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        return _Acting(plan, hands, tell).apply()

    def confirm(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        return _Acting(plan, hands, tell).start_again()

    def rollback(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        return _Acting(plan, hands, tell).start_again()


class _Acting:
    """The steps of a plan; what the machine is like is looked up before each, so that the same call goes on after a crash."""

    def __init__(self, plan: Plan, hands: Hands, tell: Tell) -> None:
        self.plan, self.hands, self.tell = plan, hands, tell
        self.settings = plan.settings
        self.unit = str(self.settings["unit"])
        inside = self.settings["container"]
        self.container = ContainerSpec(**inside) if inside else None
        self.guard = Guard(hands.run_id, self.unit, self.container)
        self.file = FileChange(held_back_by(self.unit), None, HELD_BACK)

    def _guarded(self, what: str, do: Command) -> GuardStatus:
        result = self.hands.act(what, do)
        if result is None:
            raise CannotTell(f"{what}: the connection was lost")
        return self.guard.done(result)

    def _status(self) -> GuardStatus:
        probe = GuardState(self.hands.run_id, self.container)
        return self.hands.look(probe).value(probe)

    def apply(self) -> Applied:
        status = self._status()
        if status.outcome or status.state in ("firing", "fired", "failed"):
            return Applied(self.plan, "failed", f"the guard has started {self.unit} again already", {"guard": status.state})
        if status.state == "none":
            status = self._guarded("bring the drop-in that holds it back", self.guard.stage((self.file,)))
        seconds = int(self.settings["guard_s"])
        arm = self.guard.extend(seconds) if status.state == "armed" else self.guard.arm(seconds)
        status = self._guarded(f"arm the guard for {seconds / 60:g} min", arm)
        if not status.guarded:
            raise GuardRefused("the guard does not wait although it was armed", hint=f"systemctl status {self.guard.timer}")
        if not status.all_new:
            self._guarded("put the drop-in in place", self.guard.install())
        return self._stopped()

    def _stopped(self) -> Applied:
        known: frozenset[int] = frozenset()
        try:
            processes = self.hands.look(GpuProcesses()).value(GpuProcesses())
            known = frozenset(p.pid for p in processes if p.of_unit(self.unit, self.container))
        except CannotTell as why:
            self.tell(f"not known which processes it has on the GPUs: {why}")
        stop_unit(self.hands, self.unit, self.container)
        stopped = wait_stopped(
            self.hands, self.unit, self.container, patience_s=float(self.settings["stop_s"]), known_gpu_pids=known,
            may_kill=False, tell=self.tell,
        )  # fmt: skip
        facts = {"stop_s": stopped.seconds, "leftovers": list(stopped.left), "others_on_gpus": list(stopped.others)}
        if not stopped.done:
            left = "; ".join(stopped.left[:4])
            return Applied(self.plan, "failed", f"{stopped.seconds:.0f} s after the stop this is left: {left}", facts)
        summary = f"{self.unit} is stopped and nothing of it is left, after {stopped.seconds:.0f} s"
        return Applied(self.plan, "done", summary, facts)

    def start_again(self) -> Applied:
        """The service back, by the guard's own way; then it must serve."""
        try:
            early = self._fire()
            followed = follow_start(
                self.hands, self._service(), self.container, before="", patience_s=float(self.settings["ready_s"]), tell=self.tell
            )  # fmt: skip
        except (CannotTell, GuardRefused, PlanDrifted) as why:
            return self._by_hand(str(why))
        if not followed.ready:
            return self._by_hand(f"{self.unit} was started and does not serve: {followed.why}")
        summary = f"{self.unit} was started again and is ready after {followed.seconds:.0f} s"
        if early:
            summary = f"{early}; it is ready, {followed.seconds:.0f} s after its start"
        return Applied(self.plan, "restored", summary, followed.facts() | ({"guard": early} if early else {}))

    def _fire(self) -> str:
        """Remove the drop-in and start it; a connection that breaks meanwhile changes nothing of that.

        Returns words when the machine had done so before it was asked.
        """
        status, early = self._status(), ""
        if status.fired_by == "its time":
            at = f" at {status.outcome_at:%H:%M:%S} UTC" if status.outcome_at is not None else ""
            early = f"the guard had started {self.unit} by itself{at}, before the test was over"
            self.tell(early)
        if status.state in ("staged", "armed", "firing", "failed"):
            result = self.hands.act("remove the drop-in and start the service", self.guard.fire(), loss_expected=True)
            if result is not None:
                self.guard.done(result)
            else:
                self._await()
            status = self._status()
        if status.state == "fired":
            cleared = self._guarded("remove what was kept for taking it back", self.guard.clean())
            if cleared.kept:
                self.tell(f"what somebody else had written there is kept: {', '.join(cleared.kept)}")
        return early

    def _await(self) -> None:
        self.tell("the connection was lost while the service is started again; the machine goes on by itself")
        if self.hands.host.await_up(patience_s=600, tell=self.tell) is None:
            raise CannotTell("the machine does not answer any more, so whether the service runs again is not known")
        self.hands.proven("after a lost connection")

    def _service(self) -> ServiceSpec:
        inside = self.container.name if self.container else ""
        return ServiceSpec(name=self.unit, container=inside, url=self.settings["url"], ready_s=self.settings["ready_s"])

    def _by_hand(self, why: str) -> Applied:
        digest = hashlib.sha256(HELD_BACK).hexdigest()
        lines = self.guard.by_hand([GuardedFile(self.file.path, "other", None, digest)])
        return Applied(self.plan, "rollback-failed", f"the service is not back: {why}", {"why": why, "by_hand": list(lines)})

"""An identity experiment as a plan: one boot with a GPU's iommu group in the identity domain, and the boot that puts it back.

What is laid down acts at one boot only: its program removes its flag before it does anything. A guard on the machine takes
the files back and reboots, unless this run, or another in its place, has done so by then; so that a machine that comes up
without a network comes back all the same.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.changes.reboot import REBOOT, Reboot
from proofbook.checks.identity.evidence import members_of
from proofbook.checks.identity.resets import shared_out
from proofbook.checks.identity.restored import PROBES as RESTORED
from proofbook.checks.identity.restored import wrong_with
from proofbook.checks.identity.rule import Attempt, Before, Came, Function, GpuBoot
from proofbook.checks.looking import tell as told
from proofbook.errors import CannotTell, GuardRefused, PlanDrifted, TransportError
from proofbook.host import Hands
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Action, Applied, Change, Identity, Plan, Probe, Seen
from proofbook.probes.change_state import GuardState
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.iommu_identity import IdentityState
from proofbook.probes.nvidia import Gpus
from proofbook.probes.pci import PciDevices, ResetMethods
from proofbook.remote.gpu_reset import RESET_ATTEMPT, RESET_S
from proofbook.remote.iommu_identity import FLAG, HOME, IDENTITY, PROGRAM, PULL, UNIT, UNIT_PATH, pull, unit

__all__ = ["RISK", "IommuIdentity", "stop_rule"]

Tell = Callable[[str], None]

#: What an approval of a plan with resets takes upon itself.
RISK = (
    "A RESET CAN KILL: after a function-level reset GPUs of this generation were seen not to answer any more until the power was "
    "cut, and others to come back by one; a reboot does not undo it"
)
#: How long the machine may take to come back from a boot, in seconds; the guard's time must be longer.
LONGEST_BOOT_S = 2400.0


@dataclass(frozen=True)
class IommuIdentity(Change):
    """Boot once with the groups of ``treated`` in the identity domain. :meth:`rollback` is the way back, and always taken.

    ``before``: every GPU as it was found, with the other functions of its device in its group, which is what must be again.
    ``services``: waited for after the boot back. ``reset_methods``: what may be tried in boot A on a treated GPU that does not
    start, where the kernel lists it for that GPU; :class:`ResetAttempts` makes the attempts.
    """

    treated: tuple[str, ...]
    before: Before
    guard_minutes: float = 90.0
    services: tuple[ServiceSpec, ...] = ()
    containers: tuple[ContainerSpec, ...] = ()
    console: str = ""
    reset_methods: tuple[str, ...] = ()
    name: ClassVar[str] = "iommu-identity"

    def __repr__(self) -> str:
        resets = f", reset_methods={' '.join(self.reset_methods)}" if self.reset_methods else ""
        return f"IommuIdentity({', '.join(self.treated)}, guard_minutes={self.guard_minutes:g}{resets})"

    @classmethod
    def from_plan(cls, plan: Plan) -> IommuIdentity:
        """Able to take back from the stored plan alone; services are then not waited for."""
        functions: Mapping[str, Mapping[str, Any]] = plan.settings.get("functions", {})
        before = tuple(
            GpuBoot(pci, str(kind), "", bool(up), None, tuple(Function(a, k, d) for a, (k, d) in functions.get(pci, {}).items()))
            for pci, (kind, up) in plan.settings["before"].items()
        )
        return cls(tuple(plan.settings["treated"]), Before(before), float(plan.settings["guard_s"]) / 60)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What the unit is told: each treated GPU, and the functions of its device that share its group."""
        functions = {gpu.pci: [f.pci for f in gpu.functions] for gpu in self.before.gpus}
        return tuple(dict.fromkeys(a for pci in self.treated for a in (pci, *functions.get(pci, ()))))

    def _reboot(self, services: tuple[ServiceSpec, ...]) -> Reboot:
        return Reboot(True, services, self.containers, self.console)

    @property
    def _files(self) -> tuple[FileChange, ...]:
        armed = f"The next boot sets these to identity, once: {' '.join(self.addresses)}\n"
        return (
            FileChange(PROGRAM, None, IDENTITY.encode(), 0o755),
            FileChange(UNIT_PATH, None, unit(self.addresses).encode()),
            FileChange(PULL, None, pull().encode()),
            FileChange(FLAG, None, armed.encode()),
        )

    # ------------------------------------------------------------------------------------------- planning

    def needs(self) -> tuple[Probe[Any], ...]:
        ours: tuple[Probe[Any], ...] = (IommuGroups(), PciDevices(), Gpus(), IdentityState())
        resets: tuple[Probe[Any], ...] = (ResetMethods(),) if self.reset_methods else ()
        return tuple(dict.fromkeys([*ours, *resets, *self._reboot(self.services).needs()]))

    def plan(self, seen: Seen, host: Identity) -> Plan:
        reboot = self._reboot(self.services).plan(seen, host)
        resets = self._resets(seen)
        minutes = f"{self.guard_minutes:g} min"
        return Plan(
            change=self.name,
            title=f"Boot {host.hostname} once with {', '.join(self.treated)} in the identity domain, then boot it back",
            host=host,
            pre_state={**reboot.pre_state, **self._pre_state(seen)},
            actions=(
                Action(f"lay down {UNIT}, its program and the flag that arms it for one boot"),
                Action(f"arm the guard: after {minutes} the machine takes the files back by itself and reboots"),
                Action("boot A, the experiment: ask systemd for an orderly reboot", REBOOT.argv),
                *(
                    Action(
                        f"in boot A, only if {pci} does not start: reset it by {method} (off its driver, {method} into its "
                        "reset_method, 1 into its reset, reset_method as before, back to its driver)"
                    )
                    for pci, methods in resets.may.items()
                    for method in methods
                ),
            ),
            undo=(
                Action("take the files back, byte for byte, and the guard away"),
                Action("boot B, the way back, always: ask systemd for an orderly reboot", REBOOT.argv),
                Action("read back: every group's type as before, every GPU started, no file left"),
            ),
            diff=self._diff(),
            cannot_undo=(
                *reboot.cannot_undo,
                "the machine goes down twice, and services with it",
                "a GPU whose firmware is wedged by the experiment may need a cold power cycle; a warm reboot need not clear it",
                *((RISK,) if resets.any else ()),
            ),
            expected_s=2 * reboot.expected_s + 300.0 + resets.count * RESET_S,
            facts=(*self._hypothesis(resets), *reboot.facts),
            settings={
                **reboot.settings,
                "treated": list(self.treated),
                "before": {g.pci: [g.iommu_type, bool(g.started)] for g in self.before.gpus},
                "functions": {
                    g.pci: {f.pci: [f.iommu_type, f.driver] for f in g.functions} for g in self.before.gpus if g.functions
                },
                "guard_s": round(self.guard_minutes * 60),
                "files": {f.path: f.new_sha256 for f in self._files},
                **resets.settings,
            },
        )

    def _resets(self, seen: Seen) -> _Resets:
        if not self.reset_methods:
            return _Resets({}, ())
        listed, why = told(seen, ResetMethods()).pair
        if listed is None:
            return _Resets({}, tuple(Attempt(pci, m, Came.NOT_TRIED, why) for pci in self.treated for m in self.reset_methods))
        return _Resets(*shared_out(self.reset_methods, self.treated, listed))

    def _hypothesis(self, resets: _Resets) -> tuple[str, ...]:
        others = [g.pci for g in self.before.gpus if g.pci not in self.treated]
        treated = [g for g in self.before.gpus if g.pci in self.treated]
        functions = [f"{f.pci} ({f.driver or 'no driver'})" for g in treated for f in g.functions]
        with_them = (f"set with them, of the same device and group: {', '.join(functions)}",) if functions else ()
        return (
            f"treated: {', '.join(self.treated)}; control: {', '.join(others) or 'none in the same boot'}",
            *with_them,
            "the program removes its flag before it acts: the boot after boot A is a clean one, whatever happens",
            f"stop rule: one boot; no second try, {stop_rule(resets.any)}, boot B whatever boot A showed",
            *(str(attempt) for attempt in resets.not_listed),
        )

    def _pre_state(self, seen: Seen) -> Mapping[str, Any]:
        """The groups' types and members with their drivers, never the groups' numbers."""
        state: dict[str, Any] = {}
        try:
            iommu, devices = seen.value(IommuGroups()), seen.value(PciDevices())
            for pci in self.treated:
                members = [f"{a} {devices[a].driver}" if a in devices else a for a in members_of(iommu, pci)]
                state[f"group of {pci}"] = [iommu.by_device.get(pci, "none"), members]
            state["files there"] = list(seen.value(IdentityState()).present)
        except CannotTell as why:
            state["groups"] = f"not known: {why}"
        if self.reset_methods:
            listed, unknown = told(seen, ResetMethods()).pair
            state["reset methods"] = (
                {pci: list(listed.get(pci, ())) for pci in self.treated} if listed is not None else f"not known: {unknown}"
            )
        return state

    def _diff(self) -> str:
        lines: list[str] = []
        for one in self._files:
            text = (one.new or b"").decode()
            if one.path == PROGRAM:  # a constant of this version: its digest says which
                digest = hashlib.sha256(text.encode()).hexdigest()
                lines += [
                    "--- /dev/null",
                    f"+++ {one.path}",
                    f"+ iommu_identity.sh, sha256 {digest[:16]}…, {text.count(chr(10))} lines",
                ]
                continue
            lines += difflib.unified_diff([], text.splitlines(), "/dev/null", one.path, lineterm="")
        return "\n".join(lines)

    # --------------------------------------------------------------------------------------------- acting

    def apply(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        return _Acting(self, plan, hands, tell).experiment()

    def confirm(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """An experiment is never kept."""
        return self.rollback(plan, hands, tell)

    def rollback(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """Boot B: files gone, reboot, and everything read back. Outcome: restored, or rollback-failed with what to do by hand."""
        return _Acting(self, plan, hands, tell).restore()


@dataclass(frozen=True)
class _Resets:
    """What a plan may try on each treated GPU, and what was asked for and is not listed."""

    may: Mapping[str, tuple[str, ...]]
    not_listed: tuple[Attempt, ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.may.values()))

    @property
    def any(self) -> bool:
        return self.count > 0

    @property
    def settings(self) -> dict[str, Any]:
        if not self.may and not self.not_listed:
            return {}
        return {
            "resets": {pci: list(methods) for pci, methods in self.may.items()},
            "resets not listed": [[a.pci, a.method, a.why] for a in self.not_listed],
            "reset program": hashlib.sha256(RESET_ATTEMPT.encode()).hexdigest(),
        }


def stop_rule(resets: bool) -> str:
    """What is written down about resets before anything is done."""
    if not resets:
        return "no reset of a GPU"
    return "the listed resets once each on what did not start, none after the first that loses a GPU, none of a control"


@dataclass
class _Acting:
    change: IommuIdentity
    plan: Plan
    hands: Hands
    tell: Tell
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def guard(self) -> Guard:
        return Guard(self.hands.run_id, "reboot.target")

    def _guarded(self, what: str, do: Any) -> GuardStatus:
        result = self.hands.act(what, do)
        assert result is not None
        return self.guard.done(result)

    def _status(self) -> GuardStatus:
        probe = GuardState(self.hands.run_id)
        return self.hands.look(probe).value(probe)

    def experiment(self) -> Applied:
        seconds = int(self.plan.settings["guard_s"])
        self._guarded("bring the unit, its program and its flag", self.guard.stage(self.change._files))
        armed = self._guarded(f"arm the guard for {seconds / 60:g} min", self.guard.arm(seconds))
        if not armed.guarded:
            raise GuardRefused("the guard does not wait, so nothing was put in place", hint=f"look at {self.guard.timer}")
        self._guarded("put the files in place: from here on the next boot is the experiment's", self.guard.install())
        booted = self._boot(2, ())
        return replace(booted, plan=self.plan, facts={**booted.facts, "boot": "A"})

    def _boot(self, action: int, services: tuple[ServiceSpec, ...]) -> Applied:
        """One reboot, followed until the machine lets us in again (and ``services`` answer)."""
        actions = self.plan.actions if action == 2 else self.plan.undo
        wanted = actions[2 if action == 2 else 1]
        return self.change._reboot(services).apply(replace(self.plan, actions=(wanted,)), self.hands, self.tell)

    # -------------------------------------------------------------------------------------------- backwards

    def restore(self) -> Applied:
        try:
            return self._restore()
        except (CannotTell, GuardRefused, PlanDrifted, TransportError) as why:
            return self._by_hand(str(why).splitlines()[0])

    def _restore(self) -> Applied:
        self._reach()
        before = self._files_back()
        if self._boot_is_needed():
            booted = self._boot(1, self.change.services)
            self.facts |= {**booted.facts, "boot": "B"}
            if booted.outcome != "done":
                return self._by_hand(f"boot B: {booted.summary}")
        else:
            why = "the files were taken back before" if before else "the program of the experiment did not run in this boot"
            self.tell(f"no reboot is needed: {why}, and no group is in the identity domain")
        return self._read_back()

    def _reach(self) -> None:
        """A machine that was not back in time may be by now."""
        try:
            self.hands.peek(IdentityState())
        except TransportError:
            self.tell("the machine does not answer; its guard takes the files back and reboots when its time is up")
            left = float(self.plan.settings["guard_s"]) + LONGEST_BOOT_S
            if self.hands.host.await_up(patience_s=left, tell=self.tell) is None:
                raise CannotTell(f"it did not let us in for {left / 60:.0f} min, guard included") from None
            self.hands.proven("it answers again")

    def _files_back(self) -> bool:
        """True when that had been done before, by the machine's guard or by another run."""
        status = self._status()
        before = status.state == "fired" or status.outcome == "fired"
        if status.state in ("staged", "armed", "firing", "failed"):
            self._guarded("take the files back", self.guard.fire())
            status = self._status()
        if status.state in ("fired", "staged"):
            cleared = self._guarded("remove what was kept for taking them back", self.guard.clean())
            if cleared.kept:
                self.tell(f"what somebody else had written there is kept: {', '.join(cleared.kept)}")
        return before

    def _boot_is_needed(self) -> bool:
        """Not when the machine has had its boot back already: no type is identity, and the program did not run."""
        seen = self.hands.look(IommuGroups(), IdentityState())
        types = seen.value(IommuGroups()).by_device
        ran = seen.value(IdentityState()).log is not None
        return ran or any(types.get(pci) == "identity" for pci in self.change.treated)

    def _read_back(self) -> Applied:
        seen = self.hands.look(*RESTORED)
        wrong = wrong_with(seen, self.change.before)
        said = [f"{pci}: {text}" if pci else text for pci, texts in wrong.items() for text in texts]
        if said:
            return self._by_hand("; ".join(said))
        kinds = ", ".join(f"{g.pci} {g.iommu_type}" for g in self.change.before.gpus)
        functions = [f"{f.pci} {f.driver or 'no driver'}" for g in self.change.before.gpus for f in g.functions]
        also = f"; {', '.join(functions)}" if functions else ""
        return Applied(
            self.plan, "restored", f"as before: {kinds}{also}; every GPU started, no file of the experiment left", self.facts
        )

    def _by_hand(self, why: str) -> Applied:
        by_hand = [
            f"on the console ({self.change.console or 'none is named'}): look whether the machine runs, and which boot it is in",
            "power it off for half a minute, then on: the flag is gone, so it boots as it did before",
            *Guard(self.hands.run_id, "").by_hand(self.change._files),
            f"rmdir {HOME}",
            "cat /sys/bus/pci/devices/<address>/iommu_group/type",
        ]
        return Applied(self.plan, "rollback-failed", f"NOT RESTORED: {why}", {**self.facts, "why": why, "by_hand": by_hand})

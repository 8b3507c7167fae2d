"""What a machine holds of a run that changes it: the guarded change, the lease, the detached steps."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result
from proofbook.probes.base import inside, text_of
from proofbook.remote.detached import StepStatus, detached_command, parse_step, step_name
from proofbook.remote.guard import EXIT, GuardStatus, guard_command, parse_guard
from proofbook.remote.lease import Lease, lease_command, parse_approvals, parse_lease

__all__ = ["ApprovalsUsed", "GuardState", "Held", "HeldMachine", "LeaseHeld", "StepState"]


@dataclass(frozen=True)
class GuardState(Probe[GuardStatus]):
    """The guarded change of a run, where its unit lives. A run that changed nothing has the state "none".

    ::

        state armed
        left 597
        file new absent 5f0c… /etc/systemd/system/sglang-qwen.service.d/50-mtp.conf
        guard LoadState=loaded ActiveState=active SubState=waiting UnitFileState=enabled
        end
    """

    run_id: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "change.GuardState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], GuardStatus]:
        (answer,) = yield [inside(self.container, guard_command("status", self.run_id))]
        text_of(answer, *EXIT)
        return parse_guard(answer)


@dataclass(frozen=True)
class LeaseHeld(Probe[Lease | None]):
    """Who may change the machine now; None when nobody does. The lease is the host's, never a container's.

    ::

        run=20260408T150412Z-3f2a
        holder=mira@laptop
        expires=1775664252
        expired=no
        end
    """

    name: ClassVar[str] = "change.LeaseHeld"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], Lease | None]:
        (answer,) = yield [lease_command("show")]
        text_of(answer)
        return parse_lease(answer)


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds the machine, None when nobody does; and how that run's guarded change stands, None with the reason."""

    lease: Lease | None
    guard: GuardStatus | None = None
    guard_unknown: str = ""


@dataclass(frozen=True)
class HeldMachine(Probe[Held]):
    """Who holds the machine, and what its guard would do: two round trips, since only the first says whose change it is.

    ``container``: where the change is looked for, beside the host itself. The answers are those of :class:`LeaseHeld` and
    :class:`GuardState`.
    """

    container: ContainerSpec | None = None
    name: ClassVar[str] = "change.HeldMachine"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], Held]:
        (answer,) = yield [lease_command("show")]
        text_of(answer)
        lease = parse_lease(answer)
        if lease is None:
            return Held(None)
        places = dict.fromkeys((self.container, None))
        answers = yield [inside(place, guard_command("status", lease.run)) for place in places]
        try:
            for answer in answers:
                text_of(answer, *EXIT)
            told = [parse_guard(answer) for answer in answers]
        except CannotTell as why:
            return Held(lease, None, str(why))
        return Held(lease, next((one for one in told if one.state != "none"), told[0]))


@dataclass(frozen=True)
class ApprovalsUsed(Probe[int]):
    """How many approvals were ever used on the machine. A plan holds it, so that each use makes the next plan another one.

    ::

        approvals=3
        end
    """

    name: ClassVar[str] = "change.ApprovalsUsed"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], int]:
        (answer,) = yield [lease_command("show")]
        text_of(answer)
        return parse_approvals(answer)


@dataclass(frozen=True)
class StepState(Probe[StepStatus]):
    """How a detached step of a run stands.

    ::

        began 1775661015
        step running
        end
    """

    run_id: str
    step: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "change.StepState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], StepStatus]:
        (answer,) = yield [inside(self.container, detached_command("status", self.run_id, step_name(self.step)))]
        text_of(answer)
        return parse_step(answer)

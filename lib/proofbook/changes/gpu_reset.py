"""Resets of GPUs that did not start in the experiment's boot: the attempts that an approved plan lists, one act each.

They come after boot A was looked at and before boot B, which undoes what they leave in the kernel: a driver that is not bound, a
list of methods in another order. What they leave in a GPU only a power cycle may undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from proofbook.checks.identity.evidence import first_error_after, started
from proofbook.checks.identity.rule import Attempt, Came, FirstError
from proofbook.checks.looking import tell as told
from proofbook.errors import CannotTell
from proofbook.host import Hands
from proofbook.intent import GpuSpec
from proofbook.model import Applied, Plan, Probe, Seen
from proofbook.probes.boot import Machine
from proofbook.probes.change_state import GuardState
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog, KernelMessages
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.pci import PciDevices
from proofbook.remote.gpu_reset import RESET_S, ResetLog, parse_reset, reset_command

__all__ = ["ResetAttempts"]

Tell = Callable[[str], None]

#: What an attempt is followed by a look at.
_AFTER: tuple[Probe[Any], ...] = (KernelLog(), Machine(), PciDevices(), IommuGroups(), Driver(), Gpus())
#: The guard must leave time for an attempt and for the looks around it, in seconds.
_MARGIN_S = RESET_S + 180.0


@dataclass(frozen=True)
class ResetAttempts:
    """The attempts of a plan on ``failed``: the treated GPUs that were seen not to start, with their group in identity.

    What may be tried is the plan's alone (``settings["resets"]``: GPU to methods); ``failed`` only narrows it. After an attempt
    that starts a GPU no other is made on it; after one that loses a GPU, or does not return, none is made at all.
    """

    failed: tuple[str, ...]
    declared: tuple[GpuSpec, ...] = ()
    title: ClassVar[str] = "Reset what did not start"

    def __repr__(self) -> str:
        return f"ResetAttempts({', '.join(self.failed)})"

    def act(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """``facts["attempts"]``: one :class:`Attempt` for each that the plan lists for these GPUs, made or not."""
        attempts: list[Attempt] = []
        stopped, started_by = "", dict[str, str]()
        for pci, method in self._listed(plan):
            why = stopped or (f"it started after {started_by[pci]} already" if pci in started_by else "")
            if why or (why := self._no_time(hands)):
                attempts.append(Attempt(pci, method, Came.NOT_TRIED, why))
                continue
            attempt, over = self._one(pci, method, hands)
            attempts.append(attempt)
            tell(str(attempt))
            if attempt.came is Came.CLEARED:
                started_by[pci] = method
            stopped = f"nothing was tried after {method} on {pci}: {attempt.came}" if over else ""
        made = [a for a in attempts if a.came is not Came.NOT_TRIED]
        summary = "; ".join(map(str, made)) or "no reset was tried"
        return Applied(plan, "done", summary, {"attempts": tuple(attempts)})

    def _listed(self, plan: Plan) -> Iterator[tuple[str, str]]:
        resets: Mapping[str, Sequence[str]] = plan.settings.get("resets", {})
        treated = plan.settings.get("treated", ())
        for pci in self.failed:
            if pci in treated:  # a control is never touched, whoever asks
                yield from ((pci, method) for method in resets.get(pci, ()))

    def _no_time(self, hands: Hands) -> str:
        """Why no attempt may begin now: the guard would reboot in the middle of it."""
        try:
            guard = hands.look(probe := GuardState(hands.run_id)).value(probe)
        except CannotTell as why:
            return f"whether the guard waits is not known: {why}"
        if not guard.guarded:
            return f"the guard does not wait (it is {guard.state})"
        if guard.left_s is None or guard.left_s < _MARGIN_S:
            return f"the guard reboots in {guard.left_s or 0} s, and an attempt may take {_MARGIN_S:.0f} s"
        return ""

    def _one(self, pci: str, method: str, hands: Hands) -> tuple[Attempt, bool]:
        """The attempt, and whether nothing may be tried after it."""
        before = told(hands.look(KernelLog()), KernelLog()).value
        result = hands.act(
            f"reset {pci} by {method}: off its driver, {method} into reset_method, 1 into reset, back to its driver",
            reset_command(pci, method),
            loss_expected=True,
        )
        if result is None:
            return Attempt(pci, method, Came.UNKNOWN, "the connection was lost in the middle of it"), True
        try:
            log = parse_reset(result)
        except CannotTell as why:
            return Attempt(pci, method, Came.UNKNOWN, str(why)), True
        if not log.ended:
            return _from(pci, method, log, Came.UNKNOWN, "its program was cut off in the middle"), True
        attempt = _by_its_words(pci, method, log)
        if attempt.came is Came.NOT_TRIED:
            return attempt, False
        seen = hands.look(*_AFTER)
        first, unread = _first(before, seen, pci, self.declared)
        attempt = replace(attempt, first=first)
        if attempt.came in (Came.LOST, Came.BLOCKED):
            return attempt, True
        return _by_the_look(attempt, log, seen, unread), False


def _from(pci: str, method: str, log: ResetLog, came: Came, why: str) -> Attempt:
    return Attempt(pci, method, came, why, log.vendor_before, log.vendor_after or "", log.driver or "")


def _by_its_words(pci: str, method: str, log: ResetLog) -> Attempt:
    """What an attempt came to as its program tells it: ``STAYED`` until it is looked whether the GPU starts."""
    if log.refused:
        return _from(pci, method, log, Came.NOT_TRIED, log.refused)
    errors = "; ".join(f"{step}: {error}" for step, error in log.errors.items())
    if log.blocked:
        return _from(pci, method, log, Came.BLOCKED, f"{log.blocked} has not returned in its time")
    if log.lost:
        now = f"its vendor id was {log.vendor_before} and is {log.vendor_after or 'not to be read'}"
        return _from(pci, method, log, Came.LOST, f"{now}; {errors}" if errors else now)
    if "unbind" in log.errors or "method" in log.errors:
        return _from(pci, method, log, Came.NOT_TRIED, f"the kernel refused what comes before it, {errors}")
    if "reset" in log.errors:
        return _from(pci, method, log, Came.REFUSED, errors)
    return _from(pci, method, log, Came.STAYED, errors)


def _first(before: KernelMessages | None, seen: Seen, pci: str, declared: Sequence[GpuSpec]) -> tuple[FirstError | None, str]:
    """The first error since the attempt began, and why it is not known."""
    if before is None:
        return None, "the kernel's log of before is not known"
    try:
        return first_error_after(before, seen, pci, declared), ""
    except CannotTell as why:
        return None, str(why)


def _by_the_look(attempt: Attempt, log: ResetLog, seen: Seen, unread: str) -> Attempt:
    """Whether the GPU starts now. It counts only while its group is still in the identity domain."""
    facts = told(seen, IommuGroups()).value
    kind = facts.by_device.get(attempt.pci, "no type") if facts is not None else "not known"
    up = started(seen, attempt.pci)
    if up and kind == "identity":
        # WHY also where the kernel refused the reset: then it was enough to take it off its driver and give it back.
        return replace(attempt, came=Came.CLEARED)
    said = [attempt.why] if attempt.why else []
    if up:
        said.append(f"it starts, and its group is {kind}")
    elif up is None:
        said.append("whether it starts is not known")
    elif log.driver_before and not log.driver:
        said.append("it was not bound again")
    elif attempt.first is not None:
        said.append(f"first error after it: {attempt.first.text}")
    else:
        said.append(f"it does not start, and why is not known{f': {unread}' if unread else ''}")
    if log.listed_after is not None and log.listed_after != log.listed:
        said.append(f"its reset_method reads {' '.join(log.listed_after)}, before {' '.join(log.listed)}, until boot B")
    unknown = attempt.came is Came.STAYED and (up is None or up)
    return replace(attempt, came=Came.UNKNOWN if unknown else attempt.came, why="; ".join(said))

"""Commit-confirmed for files of a machine: the new ones stay only if somebody says so in time.

The order of a guarded change, each step a command that may be repeated::

    guard = Guard(run_id, "sglang-qwen.service", container)
    hands.act("keep the old files and bring the new ones", guard.stage(files))
    hands.act("arm the guard", guard.arm(900))          # from here on the machine takes the change back by itself
    hands.act("put the new files in place", guard.install())
    …                                                   # restart, look, measure; guard.extend(…) where more time is needed
    hands.act("keep", guard.confirm())                  # or guard.fire(): take it back now

``guard.done(result)`` reads each answer. All of it acts on the userland in which the unit lives: the host, or a container.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proofbook.errors import GuardRefused, PlanDrifted
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Result
from proofbook.probes.base import inside
from proofbook.remote.guard import (
    CHANGES,
    EXIT,
    FileChange,
    Files,
    GuardedFile,
    GuardStatus,
    check_id,
    guard_command,
    parse_guard,
    stage_request,
    timer_of,
)

__all__ = ["FileChange", "Files", "Guard", "GuardStatus", "GuardedFile"]

#: The shortest and longest time that a guard may wait, in seconds.
SHORTEST_S, LONGEST_S = 1, 7 * 86400
#: How long `fire` may take: the unit's stop may use its whole TimeoutStopSec, and then it is started.
FIRE_S = 600.0

_DRIFTED = 76


@dataclass(frozen=True)
class Guard:
    """The guard of one run's change. ``unit`` is restarted when the change is taken back ("": none is).

    ``reboot.target`` as the unit: the guard reboots the machine when its time is up, for files that only a boot undoes.
    """

    run_id: str
    unit: str
    container: ContainerSpec | None = None

    def __post_init__(self) -> None:
        check_id(self.run_id)

    @property
    def timer(self) -> str:
        """The timer's name, for `systemctl status` by hand."""
        return timer_of(self.run_id)

    @property
    def folder(self) -> str:
        """Where the machine keeps the old bytes, the new ones and the log."""
        return f"{CHANGES}/{self.run_id}"

    def _verb(self, verb: str, *words: str, stdin: bytes = b"", timeout_s: float = 60.0) -> Command:
        return inside(self.container, guard_command(verb, self.run_id, *words, stdin=stdin, timeout_s=timeout_s))

    def stage(self, files: Sequence[FileChange]) -> Command:
        """Bring the new files and keep the old ones; changes nothing else. Refused (76) when a file is not as planned."""
        return self._verb("stage", self.unit or "-", stdin=stage_request(files), timeout_s=120)

    def arm(self, seconds: int) -> Command:
        """From now on, unless it is confirmed within ``seconds``, the machine takes the change back."""
        return self._verb("arm", str(_span(seconds)), timeout_s=120)

    def install(self) -> Command:
        """Put the new files in place, and have systemd read them. Refused (77) while no guard waits."""
        return self._verb("install", timeout_s=120)

    def suspend(self) -> Command:
        """Put the old files in place for a while; the guard goes on waiting, and :meth:`install` brings the new ones again.

        The unit is not touched: whoever asks for this restarts it. Refused (76) when a file is neither old nor new, (77) while
        no guard waits.
        """
        return self._verb("suspend", timeout_s=120)

    def extend(self, seconds: int) -> Command:
        """The time runs anew: ``seconds`` from now."""
        return self._verb("extend", str(_span(seconds)), timeout_s=120)

    def confirm(self) -> Command:
        """The new files stay. Refused (77) when they were taken back already, (76) when a file is not as installed."""
        return self._verb("confirm", timeout_s=120)

    def fire(self) -> Command:
        """Take it back now: the old files, byte for byte, and the unit as it was (running, or stopped)."""
        return self._verb("fire", timeout_s=FIRE_S)

    def status(self) -> Command:
        return self._verb("status")

    def clean(self) -> Command:
        """Remove what is left after :meth:`fire`, or of a change that was never armed."""
        return self._verb("clean", timeout_s=120)

    # ------------------------------------------------------------------------------------------------ reading

    parse = staticmethod(parse_guard)

    def done(self, result: Result) -> GuardStatus:
        """The status after a verb that did its part. Raises PlanDrifted, GuardRefused, or CannotTell for no answer."""
        status = parse_guard(result)
        if status.code == 0:
            return status
        message = f"{EXIT[status.code]}: {status.refused}"
        if status.code == _DRIFTED:
            raise PlanDrifted(
                message, hint="somebody else changed it: look at what they wrote before anything is put in its place"
            )
        raise GuardRefused(message, hint=f"what the machine did is in {self.folder}/log; its guard is {self.timer}")

    def by_hand(
        self,
        files: Sequence[FileChange | GuardedFile],
        *,
        was_active: bool = True,
        done: Collection[str] = (),
        forwards: bool = False,
    ) -> tuple[str, ...]:
        """Lines for a root shell on the host that take the change back when nothing else can. ``done``: paths that are right.

        ``forwards``: they bring the new files instead, for a guarded change that is itself the undoing of one.

        The guard is disarmed last: until then it may still succeed by itself.
        """
        enter = self.container.enter() if self.container else ()
        lines: list[tuple[str, ...]] = []
        for n, one in enumerate(files, 1):
            if one.path in done:
                continue
            wanted = one.new_sha256 if forwards else one.old_sha256
            if wanted is None:
                lines.append(("rm", "-f", "--", one.path))
            elif forwards:  # without -p: what came from elsewhere has neither the file's mode nor its owner
                lines += [("cp", "--", f"{self.folder}/new/{n}", one.path), ("sha256sum", one.path)]
            else:
                lines += [("cp", "-p", "--", f"{self.folder}/old/{n}", one.path), ("sha256sum", one.path)]
        lines.append(("systemctl", "daemon-reload"))
        if self.unit:
            lines += [("systemctl", "reset-failed", self.unit), ("systemctl", "restart" if was_active else "stop", self.unit)]
        lines.append(("systemctl", "disable", "--now", self.timer))
        return tuple(shlex.join((*enter, *line)) for line in lines)


def _span(seconds: int) -> int:
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ValueError(f"a guard waits {SHORTEST_S} to {LONGEST_S} s, not {seconds}")
    return int(seconds)

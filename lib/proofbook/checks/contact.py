"""Did the machine let us in again? The one question that is left when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.boot import Machine

__all__ = ["CameBack"]


@dataclass(frozen=True)
class CameBack(Check):
    """The machine went down for its reboot and did not let us in within the patience of the run.

    That is UNKNOWN and not FAIL: a machine that nobody can ask may be training its memory, wait for a passphrase, or have
    lost its network only. Nothing else about it can be told.
    """

    what_happened: str
    console: str = ""
    name: ClassVar[str] = "contact.CameBack"
    title: ClassVar[str] = "Did the machine come back?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Machine(),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        where = f"its console ({self.console})" if self.console else "its console (none is stated in the inventory)"
        observation = seen[Machine()]
        if observation.known:
            late = "; by now it answers again, later than this run was willing to wait, and nothing of it was verified"
            todo = "Verify it now with a run of its own: reboot=false, baseline=<the id of this run>."
            return [self.unknown(self.what_happened + late, action=Suggested.LOOK, what_to_do=todo)]
        todo = (
            f"Look at {where}: firmware still testing, a passphrase prompt, a kernel panic, no network? Power "
            "cycle only after that look."
        )
        rest = "; whether its GPUs and services are well is not known"
        return [self.unknown(self.what_happened + rest, action=Suggested.CONSOLE, what_to_do=todo)]

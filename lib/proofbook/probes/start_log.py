"""The lines of one invocation of a unit as they come, for following a start: never a tail, never a window of time."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root
from proofbook.probes.journal import JournalEntry, read_entries

__all__ = ["MoreLines", "StartLines"]


@dataclass(frozen=True, slots=True)
class MoreLines:
    """The next entries of an invocation, and the cursor to go on from ("" while there is none)."""

    entries: tuple[JournalEntry, ...]
    cursor: str
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartLines(Probe[MoreLines]):
    """Everything that ``invocation`` said behind the cursor ``after`` ("" = from its first line).

    ``journalctl --show-cursor`` ends with ``-- cursor: s=…;i=…;b=…;m=…;t=…;x=…``.
    """

    unit: str
    container: ContainerSpec | None
    invocation: str
    after: str = ""
    name: ClassVar[str] = "start_log.StartLines"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], MoreLines]:
        run = self.invocation
        matches = (f"_SYSTEMD_INVOCATION_ID={run}", "+", f"INVOCATION_ID={run}", "+", f"OBJECT_SYSTEMD_INVOCATION_ID={run}")
        since = (f"--after-cursor={self.after}",) if self.after else ()
        asked = command(
            "journalctl", "--all", "-o", "json", "--no-pager", "--show-cursor", *since, *matches, timeout_s=60, root=True
        )
        (answer,) = yield from prefer_root(inside(self.container, asked))
        # WHY: before the first line there is no cursor to show, and journalctl ends with 1 and without a word.
        if answer.exit_status == 1 and not answer.stdout.strip() and not answer.stderr.strip():
            return MoreLines((), self.after)
        read = read_entries(answer)
        found = re.findall(r"^-- cursor: (\S+)$", answer.text, re.MULTILINE)
        return MoreLines(read.entries, found[-1] if found else self.after, read.gaps)

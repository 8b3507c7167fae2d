"""guard.sh: files of a machine that change back by themselves unless somebody confirms in time; what goes there and comes back.

The verb ``stage`` reads the new files from standard input, in lines, a file's bytes as one line of base64::

    program <sha256 of guard.sh>
    <base64>
    file <sha256 of the present file, or absent> <sha256 of the new one, or absent> <mode> <path>
    <base64>                                          not for a file that is to go
    end <number of files>

Every verb answers with what is, whether it did its part or not::

    state armed
    now 1775661015
    unit sglang-qwen.service
    was_active 1
    active active
    touched 1
    deadline 1775661612
    left 597
    file new absent 5f0c… /etc/systemd/system/sglang-qwen.service.d/50-mtp.conf
    kept /var/lib/proofbook/changes/…/other.1.1775661300      only after "fire" found what somebody else had written there
    log 2026-04-08T15:10:12Z install: the new files are in place
    guard LoadState=loaded ActiveState=active SubState=waiting UnitFileState=enabled
    storage lasting ext2/ext3
    end
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, cast, get_args

from proofbook.errors import CannotTell
from proofbook.model import Command, Result
from proofbook.remote.ask import _program

__all__ = [
    "CHANGES",
    "EXIT",
    "GUARD",
    "FileChange",
    "Files",
    "GuardState",
    "GuardStatus",
    "GuardedFile",
    "guard_command",
    "parse_guard",
    "stage_request",
    "timer_of",
]

#: Text of guard.sh.
GUARD = _program("guard.sh")
#: Where a change lives on the machine: a folder named after the run's id below this one.
CHANGES = "/var/lib/proofbook/changes"

#: What an exit status of guard.sh means.
EXIT = {
    0: "done",
    1: "taking back did not succeed",
    64: "used wrongly",
    65: "the new files came damaged",
    66: "no such change",
    69: "systemd did not do its part",
    73: "something could not be written",
    75: "another process is at it",
    76: "a file is not as it should be",
    77: "not in this state",
}

GuardState = Literal["none", "staged", "armed", "confirmed", "firing", "fired", "failed"]
Content = Literal["old", "new", "other", "absent"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PATH = re.compile(r"(?:/[^/\n\0]+)+")
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}\.[a-z]+")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file of a change. ``old_sha256`` is what it must be now (None: absent); ``new`` what it becomes (None: it goes).

    The old bytes never leave the machine. ``mode`` counts for the new file; its owner stays, or is root.
    Raises ValueError for a path that is not absolute and plain.
    """

    path: str
    old_sha256: str | None
    new: bytes | None
    mode: int = 0o644

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path) or {".", ".."} & set(self.path.split("/")):
            raise ValueError(f"not the absolute, plain path of a file: {self.path!r}")
        if self.old_sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", self.old_sha256):
            raise ValueError(f"not a sha256 in hex: {self.old_sha256!r}")

    @property
    def new_sha256(self) -> str | None:
        return None if self.new is None else hashlib.sha256(self.new).hexdigest()


Files = tuple[FileChange, ...]


@dataclass(frozen=True, slots=True)
class GuardedFile:
    """A file of a change as it is now.

    ``content``: "old" as it was before the change (also when it was absent and is), "new" as the change has it (also when
    it was to go and is gone), "absent" or "other" when it is neither.
    """

    path: str
    content: Content
    old_sha256: str | None
    new_sha256: str | None


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """What the machine says of one change.

    ``state``: none · staged (the bytes are there, nothing is changed) · armed (it will take itself back) · confirmed (being
    cleared away) · firing (being taken back now, or it was interrupted and goes on by itself) · fired (taken back) · failed
    (could not be taken back, or the old unit did not start; see ``log``). ``outcome`` outlives the folder: "confirmed", "fired".
    """

    state: GuardState
    now: datetime  # the machine's clock
    unit: str = ""  # "" when the change has none
    was_active: bool = False  # before the change
    active: str = ""  # systemd's ActiveState of the unit now; "" when it did not say
    touched: bool = False  # whether "install" has begun to put files in place
    deadline: datetime | None = None  # by the wall clock; the guard itself counts by the steady one, see left_s
    left_s: int | None = None
    files: tuple[GuardedFile, ...] = ()
    kept: tuple[str, ...] = ()  # files that hold what somebody else had written where the old ones came back
    log: tuple[str, ...] = ()  # its last lines, oldest first, each with its time
    guard: dict[str, str] = field(default_factory=dict)  # LoadState, ActiveState, SubState, UnitFileState of the timer
    storage: str = ""  # "lasting ext2/ext3", "volatile /var/lib/…" (lost at a reboot), "unknown"
    outcome: str = ""
    outcome_at: datetime | None = None
    code: int = 0  # exit status of the verb, see EXIT
    refused: str = ""  # why the verb did not do its part, in the machine's words

    @property
    def guarded(self) -> bool:
        """Whether the timer waits, so that what was changed will be taken back."""
        return (
            self.state == "armed" and self.guard.get("ActiveState") == "active" and self.guard.get("UnitFileState") == "enabled"
        )

    @property
    def fired_by(self) -> Literal["its time", "a run", ""]:
        """Who began to take it back; "" when the log does not say."""
        for line in self.log:
            if line.endswith(" fire: taking back, since its time is up"):
                return "its time"
            if line.endswith(" fire: taking back, as asked"):
                return "a run"
        return ""

    @property
    def all_old(self) -> bool:
        return bool(self.files) and all(f.content == "old" for f in self.files)

    @property
    def all_new(self) -> bool:
        return bool(self.files) and all(f.content == "new" for f in self.files)


def check_id(run_id: str) -> str:
    """The id, when it can name a folder and a unit. Raises ValueError."""
    if not _ID.fullmatch(run_id):
        raise ValueError(f"not an id of a run: {run_id!r}")
    return run_id


def timer_of(run_id: str) -> str:
    """The name of the timer that guards a run's change."""
    return f"proofbook-guard-{check_id(run_id)}.timer"


def guard_command(verb: str, run_id: str, *words: str, stdin: bytes = b"", timeout_s: float = 60.0) -> Command:
    """A verb of guard.sh for the change of a run."""
    argv = ("sh", "-c", GUARD, "proofbook-guard", verb, check_id(run_id), *words)
    return Command(argv, timeout_s=timeout_s, root=True, stdin=stdin)


def stage_request(files: Sequence[FileChange]) -> bytes:
    """Standard input of ``stage``. Raises ValueError for no file, or one that is named twice."""
    if not files or len({f.path for f in files}) != len(files):
        raise ValueError("a change has at least one file, and each of them once")
    lines = [f"program {hashlib.sha256(GUARD.encode()).hexdigest()}", base64.b64encode(GUARD.encode()).decode()]
    for one in files:
        lines.append(f"file {one.old_sha256 or 'absent'} {one.new_sha256 or 'absent'} {one.mode:04o} {one.path}")
        if one.new is not None:
            lines.append(base64.b64encode(one.new).decode())
    return "".join(line + "\n" for line in [*lines, f"end {len(files)}"]).encode()


def parse_guard(result: Result) -> GuardStatus:
    """Read the answer to any verb. Raises CannotTell when there is none; a refusal is a value (``code``, ``refused``)."""
    text = result.expect(*EXIT)
    lines = text.splitlines()
    if not lines or lines[-1] != "end":
        said = (result.error_text.strip() or text.strip()).splitlines()
        raise CannotTell("no whole answer of the guard" + (f": {said[-1][:300]}" if said else ""))
    one: dict[str, str] = {}
    files, kept, log = [], [], []
    for line in lines[:-1]:
        key, _, value = line.partition(" ")
        if key == "file":
            files.append(_file(value))
        elif key == "kept":
            kept.append(value)
        elif key == "log":
            log.append(value)
        else:
            one[key] = value
    try:
        state, now = one["state"], _time(one["now"])
        if state not in get_args(GuardState):
            raise ValueError(state)
        outcome, _, outcome_at = one.get("outcome", "").partition(" ")
        return GuardStatus(
            state=cast(GuardState, state),
            now=now,
            unit="" if (unit := one.get("unit", "-")) == "-" else unit,
            was_active=one.get("was_active") == "1",
            active=one.get("active", ""),
            touched=one.get("touched") == "1",
            deadline=_time(one["deadline"]) if "deadline" in one else None,
            left_s=int(one["left"]) if "left" in one else None,
            files=tuple(files),
            kept=tuple(kept),
            log=tuple(log),
            guard=dict(word.partition("=")[::2] for word in one.get("guard", "").split()),
            storage=one.get("storage", ""),
            outcome=outcome,
            outcome_at=_time(outcome_at) if outcome_at else None,
            code=result.exit_status or 0,
            refused=_reason(result),
        )
    except (KeyError, ValueError) as error:
        raise CannotTell(f"not an answer of the guard: {text[:200]!r}") from error


def _reason(result: Result) -> str:
    if not result.exit_status:
        return ""
    said = result.error_text.strip().splitlines()
    return said[-1][:500] if said else EXIT[result.exit_status]


def _time(epoch: str) -> datetime:
    return datetime.fromtimestamp(int(epoch), UTC)


def _file(value: str) -> GuardedFile:
    """``new absent 5f0c… /etc/systemd/system/x.service.d/50-mtp.conf``."""
    words = value.split(" ", 3)
    if len(words) != 4 or words[0] not in get_args(Content):
        raise CannotTell(f"not an answer of the guard: {value[:200]!r}")
    content, old, new, path = words
    before, after = (None if digest == "absent" else digest for digest in (old, new))
    if content == "absent":
        content = "new" if after is None else "old" if before is None else "absent"
    return GuardedFile(path, cast(Content, content), before, after)

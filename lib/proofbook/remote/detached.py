"""detached.sh: a long step that runs apart from whoever asked for it; what goes there and comes back.

::

    began 1775661015
    now 1775661075
    out 1841
    err 0
    step ended
    ended 1775661060
    result success
    how exited
    status 0
    end
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, cast

from proofbook.errors import CannotTell
from proofbook.model import Command, Result
from proofbook.remote.ask import _program
from proofbook.remote.guard import check_id

__all__ = ["DETACHED", "STEPS", "StepStatus", "detached_command", "parse_step", "step_file"]

#: Text of detached.sh.
DETACHED = _program("detached.sh")
#: Where the output of detached steps lies: ``<run>/<step>/out`` and ``err``.
STEPS = "/var/lib/proofbook/steps"

_STEP = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")
#: Signals by the names that systemd gives them, as a shell counts them.
_SIGNALS = {
    "HUP": 1,
    "INT": 2,
    "QUIT": 3,
    "ILL": 4,
    "ABRT": 6,
    "BUS": 7,
    "KILL": 9,
    "SEGV": 11,
    "PIPE": 13,
    "ALRM": 14,
    "TERM": 15,
}


@dataclass(frozen=True, slots=True)
class StepStatus:
    """How a detached step stands.

    ``state``: never (it was not begun) · running · ended · lost (nobody can say how it ended: see ``why``). ``exit_status``
    as a shell has it, 128 + n for signal n; ``result`` is systemd's word: success, exit-code, signal, timeout, oom-kill.
    """

    state: Literal["never", "running", "ended", "lost"]
    began_at: datetime | None = None
    ended_at: datetime | None = None
    exit_status: int | None = None
    result: str = ""
    why: str = ""
    out_bytes: int = 0
    err_bytes: int = 0


def step_name(step: str) -> str:
    """The name, when it can be part of a unit's name. Raises ValueError."""
    if not _STEP.fullmatch(step):
        raise ValueError(f"not the name of a step: {step!r} (a-z, 0-9 and '-')")
    return step


def detached_command(verb: str, run_id: str, *words: str, timeout_s: float = 60.0) -> Command:
    """A verb of detached.sh: start STEP SECONDS WORD… · status STEP · stop STEP · clean."""
    return Command(("sh", "-c", DETACHED, "proofbook-detached", verb, check_id(run_id), *words), timeout_s=timeout_s, root=True)


def step_file(run_id: str, step: str, stream: Literal["out", "err"], after: int) -> Command:
    """The bytes of a step's output beyond the first ``after``."""
    path = f"{STEPS}/{check_id(run_id)}/{step_name(step)}/{stream}"
    return Command(("tail", "-c", f"+{after + 1}", path), timeout_s=30, root=True)


def parse_step(result: Result) -> StepStatus:
    """Read the answer to ``start``, ``status`` or ``stop``. Raises CannotTell when there is none or systemd did not say."""
    text = result.expect()
    lines = text.splitlines()
    if not lines or lines[-1] != "end":
        raise CannotTell(f"no whole answer about the step: {text[-200:]!r}")
    one: dict[str, str] = dict(cast("Sequence[tuple[str, str]]", [line.partition(" ")[::2] for line in lines[:-1]]))
    state = one.get("step", "")
    if state not in ("never", "running", "ended", "lost"):
        raise CannotTell(f"how the step stands is not known: {one.get('why') or text[:200]!r}")
    try:
        return StepStatus(
            state=cast(Literal["never", "running", "ended", "lost"], state),
            began_at=_time(one.get("began")),
            ended_at=_time(one.get("ended")),
            exit_status=_status(one["how"], one["status"]) if state == "ended" else None,
            result=one.get("result", ""),
            why=one.get("why", ""),
            out_bytes=int(one.get("out", "0")),
            err_bytes=int(one.get("err", "0")),
        )
    except (KeyError, ValueError) as error:
        raise CannotTell(f"not an answer about a step: {text[:200]!r}") from error


def _status(how: str, status: str) -> int:
    """systemd's $EXIT_CODE and $EXIT_STATUS: "exited 3", "killed TERM"."""
    return int(status) if how == "exited" else 128 + _SIGNALS.get(status, 0)


def _time(epoch: str | None) -> datetime | None:
    return datetime.fromtimestamp(int(epoch), UTC) if epoch else None


def _check(argv: Sequence[str]) -> tuple[str, ...]:
    if not argv:
        raise ValueError("a step runs a command")
    return tuple(argv)


def start_command(run_id: str, step: str, argv: Sequence[str], seconds: float) -> Command:
    """``start``: the step is ended when it is not over after ``seconds``."""
    return detached_command("start", run_id, step_name(step), str(max(1, round(seconds))), *_check(argv))

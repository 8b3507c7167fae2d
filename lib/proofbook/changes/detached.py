"""Long steps of a change that run on the machine by themselves, and can be found again after the runner died.

A step has a name that follows from the run and the step, so asking twice begins it once. It is a transient unit: it
outlives the connection and the runner, and dies with the machine, which is then said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from proofbook.intent import ContainerSpec
from proofbook.model import Command
from proofbook.probes.base import inside
from proofbook.remote.detached import StepStatus, detached_command, parse_step, start_command, step_file, step_name

__all__ = ["StepStatus", "clean", "output", "parse", "start", "status", "stop", "unit_of"]

#: Reads the answer to start, status and stop. Raises CannotTell.
parse = parse_step


def start(run_id: str, step: str, argv: Sequence[str], container: ContainerSpec | None, timeout_s: float) -> Command:
    """Begin ``argv`` as a step, unless it was begun; it is ended when it is not over after ``timeout_s``."""
    return inside(container, start_command(run_id, step, argv, timeout_s))


def status(run_id: str, step: str, container: ContainerSpec | None = None) -> Command:
    """How the step stands: never begun, running, ended with a status, or lost."""
    return inside(container, detached_command("status", run_id, step_name(step)))


def output(
    run_id: str, step: str, container: ContainerSpec | None = None, *, stream: Literal["out", "err"] = "out", after: int = 0
) -> Command:
    """What the step has written beyond the first ``after`` bytes."""
    return inside(container, step_file(run_id, step, stream, after))


def stop(run_id: str, step: str, container: ContainerSpec | None = None) -> Command:
    """End the step; as a unit's stop may, it takes up to a minute and a half."""
    return inside(container, detached_command("stop", run_id, step_name(step), timeout_s=120))


def clean(run_id: str, container: ContainerSpec | None = None) -> Command:
    """Remove what the run's steps wrote."""
    return inside(container, detached_command("clean", run_id))


def unit_of(run_id: str, step: str) -> str:
    """The transient unit of a step, for `systemctl status` and `journalctl -u` by hand."""
    return f"proofbook-{run_id}-{step_name(step)}.service"

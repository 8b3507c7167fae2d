"""Every error of proofbook, one tree.

::

    ProofbookError
    ├── Refused                   bad input; no host was contacted (exit code 2)
    │   ├── BadParameter          a parameter is unknown, missing, mistyped or out of range
    │   ├── BadInventory          proofbook.toml cannot be used as it stands
    │   ├── NoSuchRun             the archive holds no such run
    │   └── NotEquipped           this computer lacks the programs or the rights for the real lab (a LabError too)
    ├── StoppedAtGate             the run waits for an approval (exit code 3)
    ├── NotApproved               an act without the approval that it needs
    │   └── ApprovalUsed          the approval was used before; the machine itself says so
    ├── LeaseHeld                 another run is changing this machine
    ├── PlanDrifted               the machine is no longer as the plan saw it
    ├── GuardRefused              the machine could not carry out a step of a guarded change, or refused it
    ├── TransportError            the way to the machine
    │   ├── CannotConnect         no answer, refused, or no way there
    │   │   ├── UnknownHostKey    the host key is in no known_hosts file
    │   │   ├── ChangedHostKey    the host key differs from the trusted one
    │   │   └── LoginFailed       the machine answers, the login does not
    │   ├── ConnectionLost        it was there, and went away
    │   └── DeadlinePassed        it is there, but did not finish in time
    ├── OtherMachine              another machine answers under this name (exit code 7)
    ├── CannotTell                an observation has no answer (becomes UNKNOWN, ends no run)
    ├── RecordError               a record could not be written, or is damaged
    │   ├── DiskFull              the runner has no space left for the record
    │   └── Sealed                somebody tried to write into a sealed record
    └── LabError                  the lab could not start, or was asked something it does not know

Foreign errors (paramiko, OSError, pydantic, …) are translated where they enter; nothing above that border sees them.
Every message says what was wrong, what is allowed, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ApprovalUsed",
    "BadInventory",
    "BadParameter",
    "CannotConnect",
    "CannotTell",
    "ChangedHostKey",
    "ConnectionLost",
    "DeadlinePassed",
    "DiskFull",
    "GuardRefused",
    "LabError",
    "LeaseHeld",
    "LoginFailed",
    "NoSuchRun",
    "NotApproved",
    "NotEquipped",
    "OtherMachine",
    "PlanDrifted",
    "ProofbookError",
    "RecordError",
    "Refused",
    "Sealed",
    "StoppedAtGate",
    "TransportError",
    "UnknownHostKey",
]


class ProofbookError(Exception):
    """Base of all; ``hint`` says what the reader can do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  → {self.hint}" if self.hint else message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it: the message alone. It is written for the reader, who needs no way through our code."""
        return [f"\033[1;31m{type(self).__name__}\033[0m: {self}"]


class Refused(ProofbookError):
    """The request cannot be carried out as asked; no host was contacted."""


class BadParameter(Refused):
    """A parameter is unknown, missing, mistyped or out of range."""


class BadInventory(Refused):
    """The inventory cannot be used as it stands."""


class NoSuchRun(Refused):
    """The archive holds no such run."""


class StoppedAtGate(ProofbookError):
    """The run waits for an approval of exactly this plan, or somebody declined it."""

    def __init__(self, message: str, *, digest: str, declined: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.digest = digest
        self.declined = declined


class NotApproved(ProofbookError):
    """An act was asked for without the approval that it needs."""


class ApprovalUsed(NotApproved):
    """The approval was used before; the machine itself keeps the list."""


class LeaseHeld(ProofbookError):
    """Another run is changing this machine; only one does at a time. ``run``: which, where that is known."""

    def __init__(self, message: str, *, hint: str = "", run: str = "") -> None:
        super().__init__(message, hint=hint)
        self.run = run


class PlanDrifted(ProofbookError):
    """The machine is no longer as the plan saw it; a new plan is needed."""


class GuardRefused(ProofbookError):
    """The machine could not carry out a step of a guarded change, or refused it; the message is the machine's own."""


class TransportError(ProofbookError):
    """The way to the machine failed."""


class CannotConnect(TransportError):
    """No connection could be made."""


class UnknownHostKey(CannotConnect):
    """The machine's host key is in no known_hosts file."""


class ChangedHostKey(CannotConnect):
    """The machine's host key differs from the trusted one."""


class LoginFailed(CannotConnect):
    """The machine answers, but does not let us in."""


class ConnectionLost(TransportError):
    """The connection was there, and went away."""


class DeadlinePassed(TransportError):
    """The machine did not finish in time."""


class OtherMachine(ProofbookError):
    """Another machine answers under this name (host key or machine-id differ)."""


class CannotTell(ProofbookError):
    """An observation has no answer: evidence missing, cut, rotated, or not permitted."""


class RecordError(ProofbookError):
    """A record could not be written, or is damaged."""


class DiskFull(RecordError):
    """The runner has no space left for the record."""


class Sealed(RecordError):
    """Somebody tried to write into a sealed record."""


class LabError(ProofbookError):
    """The lab could not start, or was asked something that it does not know."""


class NotEquipped(Refused, LabError):
    """This computer lacks the programs, or the user the rights, that the real lab needs; nothing was started."""

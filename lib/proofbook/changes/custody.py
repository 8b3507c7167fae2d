"""Custody of a machine: the lease that one changing run holds, and the approvals that it uses up there."""

from __future__ import annotations

import getpass
import os
import socket
from typing import ClassVar

from proofbook.changes import lease
from proofbook.errors import ApprovalUsed
from proofbook.host import Hands
from proofbook.model import Approval, Probe
from proofbook.probes.change_state import ApprovalsUsed

__all__ = ["MachineCustody"]

#: A lease is taken for this long beyond what the plan expects; a run whose runner died lets go of nothing by itself.
MARGIN_S = 1800


class MachineCustody:
    """The lease of one run on its machine; see :class:`proofbook.run.Custody`. It is the host's, also for its containers."""

    approvals: ClassVar[Probe[int]] = ApprovalsUsed()

    def __init__(self, run_id: str, ttl_s: float = 0.0) -> None:
        """``ttl_s``: how long the change may take until it is confirmed, seconds."""
        self._run_id = run_id
        self._ttl_s = int(min(max(ttl_s + MARGIN_S, 60), 7 * 86400))

    def take(self, hands: Hands, approval: Approval) -> None:
        """Raises LeaseHeld when another run holds the machine, ApprovalUsed when this approval was used by another one.

        Either way this run then holds nothing.
        """
        held = hands.act("take the machine's lease", lease.acquire(hands.run_id, _holder(self._run_id), self._ttl_s))
        assert held is not None  # no loss is expected here: a lost connection is raised
        lease.obtained(held, hands.run_id, hands.host.name)
        used = hands.act("use the approval up, on the machine itself", lease.use(approval.mark, hands.run_id))
        assert used is not None
        try:
            lease.used(used, approval.digest, hands.run_id, hands.host.name)
        except ApprovalUsed:
            self.release(hands)
            raise

    def hold(self, hands: Hands) -> None:
        """Raises LeaseHeld when the lease is gone or another run's: somebody broke it, on purpose."""
        held = hands.act("hold the machine's lease for longer", lease.renew(hands.run_id, self._ttl_s))
        assert held is not None
        lease.obtained(held, hands.run_id, hands.host.name)

    def release(self, hands: Hands) -> None:
        hands.act("give the machine's lease back", lease.release(hands.run_id))


def _holder(run_id: str) -> str:
    """Who a person at the machine would look for: the user, the runner's host and process, and the run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    where = os.environ.get("PROOFBOOK_RUNNER_NAME") or socket.gethostname()
    return f"{user}@{where} pid {os.getpid()} ({run_id})"

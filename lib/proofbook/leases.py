"""``proofbook lease``: who may change a machine now, and how a lease that nobody holds any more is broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proofbook.changes import lease
from proofbook.changes.lease import Lease
from proofbook.errors import BadParameter, LeaseHeld
from proofbook.host import Host
from proofbook.inventory import Connect, connect, load_inventory

__all__ = ["break_it", "show"]


@contextmanager
def _reached(name: str, by: Connect) -> Iterator[Host]:
    spec = load_inventory().resolve(name)
    transport, clock = by(spec)
    host = Host(spec.name, transport, clock)
    try:
        host.prove()
        yield host
    finally:
        host.close()


def show(name: str, *, by: Connect = connect) -> Lease | None:
    """The lease of a machine; None when no run may change it now. Raises TransportError, CannotTell."""
    with _reached(name, by) as host:
        return lease.held(host.transport.run(lease.show()))


def break_it(name: str, run_id: str, who: str, *, by: Connect = connect) -> Lease:
    """Take the lease away from ``run_id``, and from no other run; the machine keeps who did it. The lease as it was.

    Raises BadParameter when nobody is named or there is no such lease, LeaseHeld when another run has it.
    """
    if not who.strip():
        raise BadParameter("it does not say who breaks the lease", hint="--who YOUR-NAME; the machine keeps it")
    with _reached(name, by) as host:
        before = lease.held(host.transport.run(lease.show()))
        if before is None:
            raise BadParameter(f"no run holds {name}", hint="there is nothing to break")
        if before.run != run_id:
            raise LeaseHeld(lease.explain(before, before.now), hint=f"name that run to break its lease, not {run_id}")
        result = host.transport.run(lease.break_lease(run_id, who.strip()))
        if lease.held(result) is not None or not result.ok:
            raise LeaseHeld(f"the machine did not give up the lease of run {run_id}: {result.error_text.strip()[:200]}")
        return before

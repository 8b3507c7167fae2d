"""One mutating run a machine: the lease that the machine itself holds, and the list of approvals that were used on it.

It lives on the host, also when a change happens in one of its containers. Runs that only read need none.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from proofbook.errors import ApprovalUsed, LeaseHeld
from proofbook.model import Command, Result
from proofbook.remote.guard import check_id
from proofbook.remote.lease import HELD, USED, Lease, Use, holder_name, lease_command, parse_lease, parse_use

__all__ = ["Lease", "Use", "acquire", "break_lease", "explain", "held", "obtained", "release", "renew", "show", "use", "used"]

_TTL_S = range(10, 7 * 86400 + 1)


def acquire(run_id: str, holder: str, ttl_s: int) -> Command:
    """Take the lease, or renew it when it is ours. ``holder``: who runs this, and from where."""
    return lease_command("acquire", check_id(run_id), holder_name(holder), str(_ttl(ttl_s)))


def renew(run_id: str, ttl_s: int) -> Command:
    """Hold it for ``ttl_s`` from now. Refused when somebody broke it: then this run must change nothing more."""
    return lease_command("renew", check_id(run_id), str(_ttl(ttl_s)))


def release(run_id: str) -> Command:
    """Give it back; nothing happens when it is not ours."""
    return lease_command("release", check_id(run_id))


def show() -> Command:
    return lease_command("show")


def break_lease(run_id: str, who: str) -> Command:
    """Take the lease away from ``run_id``, and from no other. The machine keeps who did it."""
    return lease_command("break", check_id(run_id), holder_name(who))


def use(mark: str, run_id: str) -> Command:
    """Use an approval up (``mark``: :attr:`proofbook.model.Approval.mark`). Only under our lease; the same run may repeat it."""
    hexadecimal = mark.removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", hexadecimal):
        raise ValueError(f"not the mark of an approval: {mark!r}")
    return lease_command("use", hexadecimal, check_id(run_id))


def _ttl(seconds: int) -> int:
    if seconds not in _TTL_S:
        raise ValueError(f"a lease is held for {_TTL_S[0]} to {_TTL_S[-1]} s at a time, not {seconds}")
    return int(seconds)


# ---------------------------------------------------------------------------------------------------- reading


def held(result: Result) -> Lease | None:
    """The lease after any verb; None when there is none. Raises CannotTell."""
    return parse_lease(result)


def obtained(result: Result, run_id: str, host: str = "HOST") -> Lease:
    """The lease after ``acquire`` or ``renew``, which must be ours. Raises LeaseHeld that explains whose it is, CannotTell.

    ``host``: the machine's name, for what to type.
    """
    lease = parse_lease(result)
    if lease is not None and lease.run == run_id and result.exit_status == 0:
        return lease
    if lease is None:
        raise LeaseHeld(
            f"the lease of run {run_id} is gone: somebody broke it, or the machine lost it",
            hint="this run changes nothing more; look at what it has done so far",
        )
    raise LeaseHeld(
        f"another run changes this machine: {explain(lease, lease.now)}",
        hint=f"`proofbook lease show {host}` says whether run {lease.run} is still at work, and what to do when it is not",
        run=lease.run,
    )


def used(result: Result, digest: str, run_id: str, host: str = "HOST") -> Use:
    """That an approval is now used by ``run_id``. Raises ApprovalUsed, LeaseHeld, CannotTell."""
    by = parse_use(result)
    if result.exit_status == USED and by is not None:
        raise ApprovalUsed(
            f"the approval of {digest[:19]}… was used by run {by.run} at {by.at:%Y-%m-%d %H:%M:%S} UTC",
            hint="an approval lets one run through, once; run it again without one, read the plan at its gate, and approve that",
        )
    if result.exit_status == HELD or by is None:
        obtained(result, run_id, host)
        raise LeaseHeld(f"the machine did not take the approval from run {run_id}")
    return by


def explain(lease: Lease, now: datetime) -> str:
    """Who holds it, since when, and whether that looks as if nobody were there any more."""
    since = f"{lease.taken:%Y-%m-%d %H:%M:%S} UTC ({_ago(now - lease.taken)})"
    text = f"run {lease.run} of {lease.holder} has its lease since {since}"
    if not lease.expired:
        text += f"; it runs for another {_span(lease.expires - now)} unless it is renewed"
    else:
        text += f"; its lease ran out {_ago(now - lease.expires)}, so it has probably ended without releasing it"
    if lease.other_boot:
        text += "; the machine was rebooted since it was taken"
    return text


def _ago(span: timedelta) -> str:
    return f"{_span(span)} ago"


def _span(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    return f"{seconds / 3600:.1f} h"

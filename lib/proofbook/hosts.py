"""``proofbook hosts check``: can each machine be reached, is it the trusted one, and what may we do there?

One bad machine never hides the others: its row says what went wrong and what to do. Nothing is changed anywhere, and no
host key is learnt on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from proofbook.errors import (
    BadInventory,
    ChangedHostKey,
    LoginFailed,
    ProofbookError,
    TransportError,
    UnknownHostKey,
)
from proofbook.inventory import Connect, HostSpec, Inventory, connect, load_inventory
from proofbook.model import Probe
from proofbook.probes.access import Access, AccessFacts
from proofbook.probes.base import Answer, drive
from proofbook.transports.base import Transport

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["HostAccess", "HostKey", "Privileges", "Reach", "check", "check_host", "table"]

#: Machines asked at the same time: enough to hide one that does not answer, few enough for a jump host's session limit.
AT_ONCE = 8


class Reach(StrEnum):
    """How far we came."""

    YES = "yes"  # logged in, commands run
    NO = "no"  # nothing usable answers at the address
    KEY_REFUSED = "refused its key"  # something answers that is not the trusted machine, or not yet
    LOST = "lost on the way"  # logged in, and gone before it answered
    LOGIN_REFUSED = "login refused"  # the trusted machine answers and does not let us in
    NOT_TRIED = "not tried"  # the lab or the inventory could not say how


class HostKey(StrEnum):
    """What known_hosts says to the key that the machine proved to hold."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "CHANGED"
    NOT_SEEN = "not seen"  # the connection ended before a key was shown


class Privileges(StrEnum):
    """What the login may do there; many answers need root."""

    ROOT = "root"
    SUDO = "sudo"  # `sudo -n` works, without a password
    NONE = "none"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class HostAccess:
    """What `hosts check` found for one machine."""

    name: str
    target: str  # what SSH was asked for
    reach: Reach
    host_key: HostKey
    privileges: Privileges = Privileges.CANNOT_TELL
    user: str = ""
    fingerprint: str = ""  # "ssh-ed25519 SHA256:…" of the machine that let us in
    tools: Mapping[str, bool] = field(default_factory=dict)  # program → is it there?
    trouble: str = ""  # what went wrong, in one line
    what_to_do: str = ""

    @property
    def usable(self) -> bool:
        """Whether a runbook that only looks can be run against it with full answers: reached, known, root or sudo, and a way
        into every declared container."""
        return (
            self.reach is Reach.YES
            and self.host_key is HostKey.KNOWN
            and self.privileges in (Privileges.ROOT, Privileges.SUDO)
            and not self.trouble
        )

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values; ``usable`` and ``missing_tools`` included."""
        return {**asdict(self), "usable": self.usable, "missing_tools": list(self.missing_tools)}

    @property
    def missing_tools(self) -> tuple[str, ...]:
        return tuple(name for name, there in self.tools.items() if not there)


def check(
    names: Sequence[str] | None = None,
    *,
    inventory: Inventory | None = None,
    connect: Connect = connect,
    timeout_s: float = 15.0,
) -> tuple[HostAccess, ...]:
    """Ask the machines of these names (default: all of the inventory), several at once; answers in the order of the names.

    Never raises for one machine, nor for one unknown name: its row says so. Raises BadInventory when the inventory itself
    cannot be used, or when no names are given and it holds none.
    """
    book = inventory if inventory is not None else load_inventory()
    wanted = list(dict.fromkeys(names or book.hosts))
    if not wanted:
        raise BadInventory(
            f"{book.path} names no host" if book.path else "no inventory was found, and no host was named",
            hint="name hosts (`proofbook hosts check gpu01`), or put [hosts.gpu01] into proofbook.toml",
        )
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(wanted)), thread_name_prefix="hosts-check") as pool:
        return tuple(pool.map(lambda name: _check_name(name, book, connect, timeout_s), wanted))


def _check_name(name: str, book: Inventory, connect: Connect, timeout_s: float) -> HostAccess:
    try:
        spec = book.resolve(name)
    except Exception as error:
        return _failed(HostSpec(name=name), error, Reach.NOT_TRIED, HostKey.NOT_SEEN)
    return check_host(spec, connect=connect, timeout_s=timeout_s)


def check_host(spec: HostSpec, *, connect: Connect = connect, timeout_s: float = 15.0) -> HostAccess:
    """Reach one machine and ask what may be done there; whatever goes wrong is in the answer."""
    try:
        transport, _clock = connect(spec)
    except Exception as error:
        return _failed(spec, error, Reach.NOT_TRIED, HostKey.NOT_SEEN)
    try:
        with closing(transport):
            return _ask(spec, transport, timeout_s)
    except Exception as error:  # one machine that breaks the reader must not cost the rows of the others
        return _failed(spec, error, Reach.NO, HostKey.NOT_SEEN)


def _ask(spec: HostSpec, transport: Transport, timeout_s: float) -> HostAccess:
    try:
        peer = transport.open(timeout_s=timeout_s)
    except UnknownHostKey as error:
        return _failed(spec, error, Reach.KEY_REFUSED, HostKey.UNKNOWN)
    except ChangedHostKey as error:
        return _failed(spec, error, Reach.KEY_REFUSED, HostKey.CHANGED)
    except LoginFailed as error:
        return _failed(spec, error, Reach.LOGIN_REFUSED, HostKey.KNOWN)
    probe: Probe[AccessFacts] = Access(tuple(program for container in spec.containers for program in container.programs))
    try:
        return _reached(spec, peer.host_key, drive([probe], transport.gather)[probe])
    except TransportError as error:
        return _failed(spec, error, Reach.LOST, HostKey.KNOWN)


def _reached(spec: HostSpec, fingerprint: str, answer: Answer[AccessFacts]) -> HostAccess:
    facts = answer.value
    if facts is None:
        return HostAccess(
            spec.name,
            spec.target,
            Reach.YES,
            HostKey.KNOWN,
            fingerprint=fingerprint,
            trouble=f"logged in, but cannot tell what may be done there: {answer.unknown}",
            what_to_do="log in by hand and look: `id -u; sudo -n true`",
        )
    if facts.uid == 0:
        privileges, why_not = Privileges.ROOT, ""
    elif facts.sudo:
        privileges, why_not = Privileges.SUDO, ""
    else:
        privileges, why_not = (
            Privileges.NONE,
            facts.sudo_unknown or f"{facts.user or 'the user'} may not use sudo without a password",
        )
    closed = [] if why_not else _closed(spec, facts)  # an ordinary login may not even see where they are
    advice = [f"{why_not}; without root many checks can only say UNKNOWN"] if why_not else []
    advice += ["install it there, or correct the container's kind in proofbook.toml"] if closed else []
    return HostAccess(
        spec.name,
        spec.target,
        Reach.YES,
        HostKey.KNOWN,
        privileges,
        facts.user,
        fingerprint,
        {name: path is not None for name, path in facts.tools.items()},
        trouble="; ".join(closed),
        what_to_do="; ".join(advice),
    )


def _closed(spec: HostSpec, facts: AccessFacts) -> list[str]:
    """Which declared containers nobody can look into: what enters them is not there. All about them would be UNKNOWN."""
    missing = {c: [p for p in c.programs if facts.tools.get(p) is None] for c in spec.containers}
    return [
        f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} not there, and container {container.name} ({container.kind}) "
        "cannot be looked into without"
        for container, gone in missing.items()
        if gone
    ]


def _failed(spec: HostSpec, error: Exception, reach: Reach, key: HostKey) -> HostAccess:
    """The row of a machine that could not be asked. An error that is not ours is named by its type: it is a defect to report."""
    if isinstance(error, ProofbookError):
        message, hint = str(error.args[0]), error.hint
    else:
        message, hint = f"{type(error).__name__}: {error}", "this is not the machine's fault: please report it"
    return HostAccess(spec.name, spec.target, reach, key, trouble=" ".join(message.split()), what_to_do=" ".join(hint.split()))


def table(checked: Iterable[HostAccess]) -> RenderableType:
    """The answers for a terminal: one machine a row, and below what to do where something is wrong.

    Colours only repeat what the words say.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    for column in ("host", "reachable", "host key", "privileges", "missing tools"):
        rows.add_column(column, overflow="fold")
    advice: list[Text] = []
    for row in checked:
        reach_style = "green" if row.reach is Reach.YES else "red"
        key_style = {HostKey.KNOWN: "green", HostKey.NOT_SEEN: "dim"}.get(row.host_key, "red")
        privileges_style = {Privileges.NONE: "yellow", Privileges.CANNOT_TELL: "dim"}.get(row.privileges, "green")
        who = f" ({row.user})" if row.user and row.privileges is not Privileges.ROOT else ""
        # WHY: Text, not markup: what a machine says may hold square brackets.
        rows.add_row(
            Text(row.name if row.target == row.name else f"{row.name} at {row.target}"),
            Text(row.reach, reach_style),
            Text(row.host_key, key_style),
            Text(row.privileges + who, privileges_style),
            Text((", ".join(row.missing_tools) or "none") if row.tools else "not asked"),
        )
        if row.trouble or row.what_to_do:
            said = "\n  → ".join(part for part in (row.trouble, row.what_to_do) if part)
            advice.append(Text.assemble("\n", (row.name, "bold"), f": {said}"))
    return Group(rows, *advice)

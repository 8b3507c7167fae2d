"""A Host: a transport, the identity that the machine proved, and the clock that it lives by.

The name in the inventory is only how a machine is called. What it *is* are its host key and its machine-id; which
life it lives is its boot-id. A Host learns all three on first contact and refuses to talk to anything else later.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from proofbook.errors import CannotConnect, ChangedHostKey, ConnectionLost, OtherMachine, TransportError
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Command, Identity, Probe, Result, Seen, command
from proofbook.transports.base import Clock, Peer, Transport

_HEX32 = re.compile(r"^[0-9a-f]{32}$")

#: The questions that identify a machine, in this order.
IDENTIFY: tuple[Command, ...] = (
    command("cat", "/etc/machine-id"),
    command("cat", "/proc/sys/kernel/random/boot_id"),
    command("hostname"),
    command("id", "-un"),
    command("id", "-u"),
    command("uname", "-r"),
)


def _ticks() -> float:
    """Seconds that only ever go forward, a suspended laptop's included where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class WallClock:
    """The clock of real machines: this computer's time when it was made, and what passed since.

    WHY: a wall clock that is set while a machine reboots would cut a patience short, or stretch it by hours.
    """

    def __init__(self) -> None:
        self._began, self._ticks = datetime.now(UTC), _ticks()

    def now(self) -> datetime:
        return self._began + timedelta(seconds=_ticks() - self._ticks)

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class Hands(Protocol):
    """What a change is given to act with. Every act is journaled before it happens, and its outcome after."""

    @property
    def host(self) -> Host: ...

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        """Change something. None when the connection went away during the act and ``loss_expected`` allows that."""
        ...

    @property
    def run_id(self) -> str:
        """The run that these hands belong to; after a crash, that of the run that began the change."""
        ...

    def put(
        self,
        what: str,
        path: str,
        data: bytes,
        *,
        container: ContainerSpec | None = None,
        mode: int = 0o644,
        backup: bool = False,
    ) -> Result:
        """Write a file atomically, as an act. The path goes into the journal, the bytes do not: they may hold secrets."""
        ...

    def look(self, *probes: Probe[Any]) -> Seen:
        """Read-only questions whose evidence is kept. A lost machine makes every answer unknown."""
        ...

    def peek(self, *probes: Probe[Any]) -> Seen:
        """Read-only questions for waiting between acts; not kept as evidence. Raises ConnectionLost."""
        ...

    def proven(self, note: str) -> None:
        """Journal who answers now, after a reconnect."""
        ...


class Bench(Protocol):
    """What a measure is given to experiment with. Nothing on it changes the machine's configuration."""

    @property
    def host(self) -> Host: ...

    def look(self, *probes: Probe[Any]) -> Seen:
        """Ask probes; their evidence is kept. A lost machine makes every answer unknown."""
        ...

    def tunnel(self, port: int, container: ContainerSpec | None = None) -> AbstractContextManager[tuple[str, int]]:
        """A loopback address here that leads to ``port`` as the service's own userland has it: ``with … as (address, port)``.

        Raises CannotTell when the container's address cannot be learnt, TransportError when the machine is lost.
        """
        ...

    def key(self, service: ServiceSpec) -> str:
        """The API key that the service demands of us, "" for none. Only ever to be sent to that service."""
        ...

    def keep(self, name: str, data: bytes, what: str) -> str:
        """Keep raw bytes (an HTTP answer) as evidence under ``evidence/``; the id of it."""
        ...

    def keep_answer(self, name: str, answer: Result) -> str:
        """Keep what a command of the measure's own said as evidence; the id of it."""
        ...

    def proven(self, note: str) -> None:
        """Journal who answers now, after a reconnect."""
        ...

    def tell(self, text: str) -> None:
        """One line of progress."""
        ...


def _identity_of(name: str, peer: Peer, results: Sequence[Result]) -> Identity:
    said = [r.text.strip() if r.ok else "" for r in results]
    machine_id, boot_id = said[0].lower(), said[1].replace("-", "").lower()
    for what, value in (("machine-id", machine_id), ("boot-id", boot_id)):
        if not _HEX32.match(value):
            raise CannotConnect(
                f"{name} answered, but its {what} cannot be read (it said {value[:80]!r})",
                hint="a machine that cannot be identified is not worked on; look at /etc/machine-id and /proc there",
            )
    return Identity(
        name=name,
        hostname=said[2] or "?",
        machine_id=machine_id,
        boot_id=boot_id,
        host_key=peer.host_key,
        user=said[3] or "?",
        uid=int(said[4]) if said[4].isdigit() else -1,
        kernel=said[5],
    )


class Host:
    """One machine that we can reach. ``known`` is the identity that it must have, when an earlier run learnt it."""

    def __init__(self, name: str, transport: Transport, clock: Clock, *, known: Identity | None = None) -> None:
        self.name = name
        self.transport = transport
        self.clock = clock
        self.peer: Peer | None = None
        self._identity = known

    @property
    def identity(self) -> Identity:
        if self._identity is None:
            raise CannotConnect(f"{self.name} has not been reached yet")
        return self._identity

    def prove(self, *, timeout_s: float = 15.0) -> Identity:
        """Connect and learn, or re-prove, who answers. Raises OtherMachine when the machine-id or host key changed."""
        return self._prove(self.transport.open(timeout_s=timeout_s))

    def reopen(self, *, timeout_s: float = 10.0) -> Identity:
        """A fresh login, to the same machine only. The boot-id may have changed; nothing else may."""
        try:
            peer = self.transport.reopen(timeout_s=timeout_s)
        except ChangedHostKey as error:
            raise OtherMachine(
                f"another machine answers as {self.name}: its host key is not the one that answered before\n{error}",
                hint="do not go on: find out on the console which machine has this address now",
            ) from error
        return self._prove(peer)

    def _prove(self, peer: Peer) -> Identity:
        now = _identity_of(self.name, peer, self.transport.gather(IDENTIFY))
        before = self._identity
        if before is not None:
            for what, old, new in (
                ("machine-id", before.machine_id, now.machine_id),
                ("host key", before.host_key, now.host_key),
            ):
                if old != new:
                    self.transport.close()
                    raise OtherMachine(
                        f"another machine answers as {self.name}: {what} was {old}, now {new}",
                        hint="do not go on: find out on the console which machine has this address now",
                    )
        self.peer, self._identity = peer, now
        return now

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        """Many reads in one round trip; see :meth:`Transport.gather`."""
        return self.transport.gather(commands)

    def close(self) -> None:
        self.transport.close()

    # ------------------------------------------------------------------------------------- across a reboot

    def boot_id_now(self) -> str:
        """The boot-id at this moment over the open connection, "" when it cannot be read. Raises TransportError."""
        # WHY gather: its answer is framed, so that what a login shell prints of its own cannot be taken for it
        (result,) = self.transport.gather([command("cat", "/proc/sys/kernel/random/boot_id", timeout_s=10)])
        said = result.text.strip().replace("-", "").lower()
        return said if result.ok and _HEX32.match(said) else ""

    def await_down(self, *, patience_s: float, tell: Callable[[str], None], poll_s: float = 2.0) -> bool:
        """Wait until the connection is lost or the boot-id changed. False: it still answers with the same boot-id."""
        boot_before = self.identity.boot_id
        started = last_told = self.clock.now().timestamp()
        while True:
            try:
                seen = self.boot_id_now()
            except TransportError:
                self.transport.close()
                return True
            if seen and seen != boot_before:
                return True
            now = self.clock.now().timestamp()
            if now - started >= patience_s:
                return False
            if now - last_told >= 60:
                tell(f"still up on the old boot after {now - started:.0f} s")
                last_told = now
            self.clock.sleep(poll_s)

    def await_up(self, *, patience_s: float, tell: Callable[[str], None], poll_s: float = 5.0) -> Identity | None:
        """Wait until the machine lets us in again. None: it did not within ``patience_s``.

        Raises OtherMachine when something else answers under its name.
        """
        started = self.clock.now().timestamp()
        last_told, trouble = started, ""
        while True:
            try:
                return self.reopen()
            except (CannotConnect, ConnectionLost, TransportError) as error:
                trouble = str(error).splitlines()[0]
            now = self.clock.now().timestamp()
            if now - started >= patience_s:
                tell(f"still no login after {now - started:.0f} s: {trouble}")
                return None
            if now - last_told >= 60:
                tell(f"down for {now - started:.0f} s: {trouble}")
                last_told = now
            self.clock.sleep(poll_s)

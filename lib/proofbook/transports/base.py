"""A transport: a way to run commands on a machine. Production code knows only this protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from proofbook.model import Command, Result


class Clock(Protocol):
    """The time that a host lives in: the wall clock, or the lab's."""

    def now(self) -> datetime:
        """UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` of the host's time pass (the lab's clock runs fast while somebody waits)."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Who answered: the host key that it proved to hold, and where."""

    address: str  # "192.0.2.7:22"
    host_key: str  # "ssh-ed25519 SHA256:…"
    software: str  # "OpenSSH_9.2p1 Debian-2+deb12u3"


@dataclass(frozen=True, slots=True)
class Put:
    """A file that was written there: its backup is the path of the old content, "" if there was none."""

    path: str
    sha256: str
    backup: str


class Transport(Protocol):
    """How to reach one machine. Not thread-safe unless an implementation says so."""

    def open(self, *, timeout_s: float = 15.0) -> Peer:
        """Connect and prove the host key. Idempotent. Raises CannotConnect and its kinds."""
        ...

    def reopen(self, *, timeout_s: float = 15.0) -> Peer:
        """Connect anew, and only to the host key that answered first. Raises OtherMachine for another key."""
        ...

    def close(self) -> None: ...

    def run(self, command: Command) -> Result:
        """Run one command. Raises ConnectionLost when the way breaks; a timeout is in the result."""
        ...

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        """Run many read-only commands in one round trip over one channel; results in the same order.

        A command that hangs, floods or dies does not harm the others. Raises ConnectionLost when the way breaks.
        """
        ...

    def stream(self, command: Command) -> Iterator[bytes]:
        """Lines of stdout as they come, each with its newline; ends with the command, or when the iterator is closed."""
        ...

    def put(self, data: bytes, path: str, *, mode: int = 0o644, backup: bool = True, root: bool = True) -> Put:
        """Write a file there atomically (temporary file, fsync, rename), keeping the old content as a backup."""
        ...

    def tunnel(self, port: int, host: str = "127.0.0.1") -> AbstractContextManager[tuple[str, int]]:
        """A local loopback port that leads to ``host:port`` as the machine sees it: ``with … as (address, port)``."""
        ...

"""What this login may do on the machine, which tools are there, and who else is on it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class AccessFacts:
    """Who we are there. ``sudo`` says whether root can be had (True for root itself); ``sudo_unknown`` why not."""

    uid: int
    user: str
    sudo: bool
    sudo_unknown: str
    tools: dict[str, str | None]  # name: path, None when it is not in the PATH


@dataclass(frozen=True, slots=True)
class Login:
    """One line of ``who``: somebody is logged in."""

    user: str
    terminal: str
    since: str
    origin: str  # the address it came from, "" for a console


@dataclass(frozen=True)
class Access(Probe[AccessFacts]):
    """The login, root, and the programs that the other probes need."""

    name: ClassVar[str] = "access.Access"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], AccessFacts]: ...


@dataclass(frozen=True)
class Logins(Probe[tuple[Login, ...]]):
    """Who is logged in now, ourselves perhaps included."""

    name: ClassVar[str] = "access.Logins"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Login, ...]]: ...

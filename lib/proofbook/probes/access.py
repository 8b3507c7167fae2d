"""What this login may do on the machine, which tools are there, and who else is on it."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import said, text_of

__all__ = ["Access", "AccessFacts", "Login", "Logins"]

#: The programs that the other probes run.
TOOLS = ("journalctl", "systemctl", "dmesg", "nvidia-smi", "modinfo", "curl", "pct", "python3")


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
    """The login, root, and the programs that the other probes need; ``also``: others that somebody needs there.

    WHY they are looked for as root too: an ordinary login often has no /usr/sbin in its PATH, and runs them by sudo.
    """

    also: tuple[str, ...] = ()
    name: ClassVar[str] = "access.Access"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], AccessFacts]:
        tools = tuple(dict.fromkeys((*TOOLS, *self.also)))
        me, name, root, which, root_which = yield [
            command("id", "-u"),
            command("id", "-un"),
            command("id", "-u", root=True),
            command("which", *tools),
            command("which", *tools, root=True),
        ]
        uid = text_of(me).strip()
        if not uid.isdecimal():
            raise CannotTell(f"`id -u` said no number: {uid[:80]!r}")
        is_root = root.exit_status == 0 and root.text.strip() == "0"
        return AccessFacts(
            uid=int(uid),
            user=text_of(name).strip(),
            sudo=is_root,
            sudo_unknown="" if is_root else said(root) or root.trouble or f"asked as root, `id -u` said {root.text.strip()!r}",
            tools=_tools(tools, text_of(which, 0, 1), root_which.text if is_root else ""),
        )


def _tools(wanted: Sequence[str], *printed: str) -> dict[str, str | None]:
    """``which`` prints the path of each program that it finds, and ends with 1 when it misses any."""
    found = {path.rpartition("/")[2]: path for text in printed for path in text.splitlines() if path.startswith("/")}
    return {tool: found.get(tool) for tool in wanted}


@dataclass(frozen=True)
class Logins(Probe[tuple[Login, ...]]):
    """Who is logged in now, ourselves perhaps included."""

    name: ClassVar[str] = "access.Logins"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Login, ...]]:
        (answer,) = yield [command("who")]
        return tuple(_login(line) for line in text_of(answer).splitlines() if line.strip())


def _login(line: str) -> Login:
    """``ana      pts/0        2026-04-08 15:02 (192.0.2.10)`` (or ``Apr  8 15:02``, by locale)."""
    found = re.fullmatch(r"(\S+)\s+(?:[+-] )?(\S+)\s+(\S.*?)(?:\s+\((.*)\))?\s*", line)
    if not found:
        raise CannotTell(f"`who` said a line that is no login: {line[:200]!r}")
    user, terminal, since, origin = found.groups()
    return Login(user, terminal, since, origin or "")

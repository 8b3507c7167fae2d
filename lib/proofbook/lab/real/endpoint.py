"""How a machine of the real lab is reached."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from proofbook.lab.real.packages import tool

__all__ = ["Endpoint", "answers_as_ssh"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A machine's sshd on this machine's loopback. ``reused``: it ran already, and may have been changed since."""

    name: str
    address: str
    port: int
    user: str
    identity_file: str
    known_hosts: str
    state_dir: Path
    reused: bool
    started_at: datetime

    def ssh_command(self, *words: str, user: str = "") -> list[str]:
        """The argv of an OpenSSH client that logs in there, or runs ``words``; it trusts that machine's key alone."""
        options = (
            f"UserKnownHostsFile={self.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "LogLevel=ERROR",
        )
        chosen = [word for option in options for word in ("-o", option)]
        where = ["-i", self.identity_file, "-p", str(self.port), f"{user or self.user}@{self.address}"]
        return [tool("ssh"), "-F", "/dev/null", *chosen, *where, *words]


def answers_as_ssh(address: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether an SSH server says its first line there."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as way:
            way.settimeout(timeout_s)
            return way.recv(4) == b"SSH-"
    except OSError:
        return False

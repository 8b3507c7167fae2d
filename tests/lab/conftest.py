"""Machines of the lab: in this process for what they say, behind SSH for how they are reached."""

from __future__ import annotations

import asyncio
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proofbook.lab.sim import client, scenario
from proofbook.lab.sim.build import build
from proofbook.lab.sim.client import Endpoint
from proofbook.lab.sim.commands import make_shell
from proofbook.lab.sim.files import Files
from proofbook.lab.sim.shell import Answer, Context, Shell


class Bench:
    """A machine in this process: commands are run on it, and its time passes when the test says so."""

    def __init__(self, name: str) -> None:
        self.life = build(scenario.load(name).served(), time.time(), str(uuid.uuid4()))
        self.files = Files(self.life)
        self.shell: Shell = make_shell()
        self.unknown: list[str] = []

    def context(self, stdin: bytes = b"") -> Context:
        m = self.life.machine
        return Context(
            self.life, self.files, m.host, m.user, self.unknown.append, cwd="/", env={"HOME": m.user.home}, stdin=stdin
        )

    def run(self, text: str, stdin: bytes = b"") -> Answer:
        """A line of shell."""
        return asyncio.run(self.shell.run_text(self.context(stdin), text))

    def argv(self, *argv: str, stdin: bytes = b"") -> Answer:
        return asyncio.run(self.shell.run_argv(self.context(stdin), argv))

    def say(self, text: str) -> str:
        """stdout of a line of shell that must succeed."""
        answer = self.run(text)
        assert answer.status == 0, answer
        return answer.stdout.decode()

    def wait(self, seconds: float) -> None:
        self.life.advance(self.life.now + seconds)

    def reboot(self, wait_s: float = 300.0) -> None:
        """Reboot, and let so much time pass."""
        assert self.run("systemctl reboot").status == 0
        self.wait(wait_s)


@pytest.fixture
def bench() -> Callable[[str], Bench]:
    return Bench


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of this module's own, put away at its end. Its path is long on purpose: a socket's may be 107 bytes."""
    home = tmp_path_factory.mktemp("lab") / ("deep-" * 12) / "lab"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(home))
        yield home
        client.stop()


def ssh(place: Endpoint, line: str, *, user: str = "", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The OpenSSH client, as strict as an administrator would have it."""
    options = {
        "UserKnownHostsFile": place.known_hosts,
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "ConnectTimeout": "10",
        "LogLevel": "ERROR",
    }
    words = ["ssh", "-F", "none", "-p", str(place.port), "-i", place.identity_file]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    return subprocess.run([*words, f"{user or place.user}@{place.address}", line], input=stdin, capture_output=True, timeout=60)

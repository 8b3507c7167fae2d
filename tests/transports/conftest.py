"""A real OpenSSH server on loopback, and a transport that is connected to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proofbook.transports.ssh import SshTransport

from .sshd import SSHD, Sshd, make_key


@pytest.fixture(scope="session")
def user_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("user") / "id")


@pytest.fixture(scope="session")
def _may_start_sshd() -> None:
    if not os.path.exists(SSHD):
        pytest.skip("needs an OpenSSH server (Debian: openssh-server)")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)


@pytest.fixture
def new_sshd(tmp_path: Path, user_key: Path, _may_start_sshd: None) -> Iterator[Callable[[str], Sshd]]:
    """Makes servers that are not started yet; all are stopped at the end."""
    made: list[Sshd] = []

    def make(name: str) -> Sshd:
        (tmp_path / name).mkdir()
        made.append(Sshd(tmp_path / name, user_key))
        return made[-1]

    yield make
    for sshd in made:
        sshd.stop()


@pytest.fixture
def sshd(new_sshd: Callable[[str], Sshd]) -> Sshd:
    server = new_sshd("sshd")
    server.start()
    return server


@pytest.fixture
def ssh(sshd: Sshd) -> Iterator[SshTransport]:
    with sshd.transport() as transport:
        yield transport

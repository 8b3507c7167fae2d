"""A real OpenSSH server on loopback, with its own configuration and keys."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from proofbook.transports.ssh import SshTransport

SSHD = "/usr/sbin/sshd"


def wait_until(true: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"it never came true: {what}"
        time.sleep(0.02)


def make_key(path: Path, kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", path], check=True)
    return path


def processes(word: str) -> list[int]:
    """The processes that have ``word`` as an argument of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in argv:
                found.append(int(entry.name))
    return found


class Sshd:
    """One server: ``start``, ``stop``, ``sessions`` (the processes that serve a connection each)."""

    def __init__(self, folder: Path, user_key: Path) -> None:
        self.folder = folder
        self.user_key = user_key
        self.known_hosts = folder / "known_hosts"
        self.host_key = make_key(folder / "host_key")
        self.port = self.free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.trust()

    @staticmethod
    def free_port() -> int:
        """A port below those that the kernel gives to connections: a server that restarts must find its own port still free."""
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        while True:
            port = random.randrange(10_000, max(first_given, 20_000))
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port

    @property
    def name(self) -> str:
        return f"[127.0.0.1]:{self.port}"

    @property
    def public_key(self) -> str:
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        said = subprocess.run(["ssh-keygen", "-lf", self.folder / "host_key.pub"], capture_output=True, text=True, check=True)
        return said.stdout.split()[1]

    def trust(self) -> None:
        self.known_hosts.write_text(f"{self.name} {self.public_key}\n")

    def new_host_key(self) -> None:
        self.host_key.unlink()
        make_key(self.host_key)

    def start(self, *options: str) -> None:
        (self.folder / "authorized_keys").write_text(self.user_key.with_suffix(".pub").read_text())
        settings = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "PermitRootLogin prohibit-password",
            # Else bash takes itself for a login over the network and runs the developer's ~/.bashrc for every command.
            "SetEnv SHLVL=3",
            *options,
        ]
        (self.folder / "sshd_config").write_text("\n".join(settings) + "\n")
        log = (self.folder / "log").open("ab")
        before = self._times_listening()
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", self.folder / "sshd_config"], stdin=subprocess.DEVNULL, stderr=log
        )
        log.close()
        wait_until(lambda: self._times_listening() > before, f"sshd listens (its log: {self.folder}/log)")

    def _times_listening(self) -> int:
        """What this server said itself: that something answers at the port would not prove that it is this one."""
        assert self.process is None or self.process.poll() is None, (self.folder / "log").read_text()
        return (self.folder / "log").read_bytes().count(b"Server listening on 127.0.0.1")

    def sessions(self) -> list[int]:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def stop(self) -> None:
        if self.process is None:
            return
        for pid in self.sessions():
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.kill()
        self.process.wait()
        self.process = None

    def transport(self, **more: object) -> SshTransport:
        settings: dict[str, object] = {
            "port": self.port,
            "identity_file": str(self.user_key),
            "known_hosts": str(self.known_hosts),
            "ssh_config": False,
            **more,
        }
        return SshTransport("127.0.0.1", **settings)  # type: ignore[arg-type]

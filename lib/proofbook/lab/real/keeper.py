"""The process that keeps one box: it holds the container, leads connections into its network, and clears up when it ends.

The container and everything in it live in namespaces of their own. When the keeper dies, even by ``kill -9``, the kernel ends
them and their mounts with it; only empty control groups are left then, which the next command of the lab removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from proofbook.lab.real import cgroups, image, packages
from proofbook.lab.real.processes import started

_CLONE_NEWNET = 0x40000000
_CHUNK = 1 << 16


class Door:
    """A port on this machine's loopback that leads to port 22 of the box's own loopback."""

    def __init__(self, network: Path, delay: Path, port: int) -> None:
        self._network, self._delay = network, delay
        self.open_ways = 0
        self.last_used = time.monotonic()
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind(("127.0.0.1", port))
        except OSError:
            self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def let_in(self) -> None:
        near, _ = self.listener.accept()
        threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        """Both ways until both ends are done. A box without sshd refuses, and so does the port."""
        self.open_ways += 1
        try:
            with near, self._inside() as far:
                for way in (near, far):
                    way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
                back.start()
                self._pump(near, far)
                back.join()
        except OSError:
            # The other end is not there (it boots, or its sshd is gone): closing is the answer, as a real port would give it.
            _reset(near)
        finally:
            self.open_ways -= 1
            self.last_used = time.monotonic()

    def _inside(self) -> socket.socket:
        """A connection made from within the box's network; only this thread enters it."""
        network = os.open(self._network, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(network)
        return socket.create_connection(("127.0.0.1", 22), timeout=None)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if wait_s := self._delay_s():
                    time.sleep(wait_s)
                sink.sendall(chunk)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _delay_s(self) -> float:
        try:
            return float(self._delay.read_text()) / 1000
        except (OSError, ValueError):
            return 0.0


def _reset(way: socket.socket) -> None:
    with contextlib.suppress(OSError):
        way.close()


def keep(home: Path) -> None:
    """Keep the box of a folder until it ends, is told to end, loses its owner, or nobody used it for long."""
    plan = json.loads((home / "plan.json").read_text())
    rootfs = Path(plan["rootfs"])
    used = image.use(rootfs)
    held = os.open(home / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    stop, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, frame: os.write(wake, b"."))
    with (home / "console.log").open("wb") as console:
        box = subprocess.Popen(
            image.contained(
                ["sh", "-c", (resources.files("proofbook.lab.real") / "box.sh").read_text(), "box.sh",
                 plan["machine"], str(rootfs), str(home / "seed"), str(home), plan["group"]],
                "--net", "--ipc", "--uts",
            ),
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, env={"PATH": packages.search_path(), "LANG": "C.UTF-8"},
        )  # fmt: skip
    try:
        _await_network(box.pid)
        door = Door(Path(f"/proc/{box.pid}/ns/net"), home / "delay_ms", plan["port"])
        _announce(home, door.port, box.pid)
        _serve(door, box, stop, plan)
    finally:
        box.kill()
        box.wait()
        cgroups.remove(plan["group"])
        (home / "box.json").unlink(missing_ok=True)
        os.close(used)


def _await_network(pid: int) -> None:
    """Wait until the child has left this process's network; its own is made within milliseconds."""
    ours = os.readlink("/proc/self/ns/net")
    for _ in range(500):
        if os.readlink(f"/proc/{pid}/ns/net") != ours:
            return
        time.sleep(0.01)
    raise OSError("the box got no network of its own")


def _announce(home: Path, port: int, box: int) -> None:
    about = {
        "pid": os.getpid(),
        "pid_started": started(os.getpid()),
        "box": box,
        "box_started": started(box),
        "port": port,
        "started_at": datetime.now(UTC).isoformat(),
    }
    part = home / "box.json.part"
    part.write_text(json.dumps(about))
    part.rename(home / "box.json")


def _serve(door: Door, box: subprocess.Popen[bytes], stop: int, plan: dict[str, object]) -> None:
    watched = [door.listener.fileno(), stop, ended := os.pidfd_open(box.pid)]
    owner = -1
    if plan["owner"]:
        try:
            owner = os.pidfd_open(int(str(plan["owner"])))
        except ProcessLookupError:
            return
        watched.append(owner)
    idle_s = float(str(plan["idle_s"]))
    while True:
        ready, _, _ = select.select(watched, [], [], 30.0)
        if {stop, ended, owner} & set(ready):
            return
        if door.listener.fileno() in ready:
            door.let_in()
        elif not door.open_ways and time.monotonic() - door.last_used > idle_s:
            return


if __name__ == "__main__":
    keep(Path(sys.argv[1]))

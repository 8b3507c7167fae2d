"""The process that keeps one virtual machine: it runs QEMU, again after each reboot of the guest, and ends with its owner.

QEMU ends when the guest reboots, and is started anew: what was plugged in or out, or written on the kernel's command line
meanwhile, is there then, as on a real machine. When this process dies, even by ``kill -9``, the kernel ends QEMU with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from proofbook.lab.real import image, packages, qmp
from proofbook.lab.real.processes import started


def keep(home: Path) -> None:
    held = os.open(home / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    stop, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, frame: os.write(wake, b"."))
    plan = json.loads((home / "plan.json").read_text())
    used = image.use(Path(plan["kernel"]).parent)
    owner = -1
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(plan["owner"]) if plan["owner"] else -1
    if plan["owner"] and owner == -1:
        return
    try:
        again = True
        while again:
            again = _run_once(home, stop, owner)
            while again and (home / "power-off").exists():
                (home / "dark").touch()
                if select.select([fd for fd in (stop, owner) if fd >= 0], [], [], 0.05)[0]:
                    again = False
            (home / "dark").unlink(missing_ok=True)
    finally:
        (home / "vm.json").unlink(missing_ok=True)
        os.close(used)


def _run_once(home: Path, stop: int, owner: int) -> bool:
    """One life of QEMU; whether there is to be another."""
    plan = json.loads((home / "plan.json").read_text())
    for name in ("control.sock", "events.sock"):
        (home / name).unlink(missing_ok=True)
    setpriv = [packages.tool("setpriv"), "--pdeathsig", "KILL"]
    with (home / "qemu.log").open("ab") as log:
        machine = subprocess.Popen([*setpriv, *plan["argv"]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home)
    try:
        with qmp.Channel(home, "events.sock", patience_s=60.0, process=machine) as events:
            _announce(home, machine.pid, plan["port"])
            reason = ""
            ended = os.pidfd_open(machine.pid)
            try:
                last_used = time.monotonic()
                while True:
                    watched = [fd for fd in (stop, owner, ended, events.fileno()) if fd >= 0]
                    ready, _, _ = select.select(watched, [], [], 30.0)
                    if {stop, owner} & set(ready):
                        return False
                    if {events.fileno(), ended} & set(ready):
                        reason = _shutdown_reason(events) or reason
                    if ended in ready:
                        return reason == "guest-reset" or (home / "power-off").exists()
                    if _connections(plan["port"]):
                        last_used = time.monotonic()
                    elif time.monotonic() - last_used > plan["idle_s"]:
                        return False
            finally:
                os.close(ended)
    finally:
        machine.kill()
        machine.wait()


def _shutdown_reason(events: qmp.Channel) -> str:
    """Why QEMU says that it ends, "" when what it says is something else."""
    found = ""
    for event in events.events():
        if event.get("event") == "SHUTDOWN":
            found = event["data"]["reason"]
    return found


def _announce(home: Path, qemu: int, port: int) -> None:
    about = {
        "pid": os.getpid(),
        "pid_started": started(os.getpid()),
        "qemu": qemu,
        "qemu_started": started(qemu),
        "port": port,
        "started_at": datetime.now(UTC).isoformat(),
    }
    part = home / "vm.json.part"
    part.write_text(json.dumps(about))
    part.rename(home / "vm.json")


def _connections(port: int) -> int:
    """Established TCP connections to a port of this machine's loopback."""
    mine = f"0100007F:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(1 for row in rows if row[1] == mine and row[3] == "01")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))

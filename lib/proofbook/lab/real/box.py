"""Boxes: systemd containers that boot in about a second. Real systemd, journald, sshd, sudo; the kernel is this machine's.

A box is a folder ``<state>/box/<name>`` with its identity, which it keeps; and a keeper process while it is up. Nothing that the
machine writes survives ``down``: the next ``up`` is the same machine (machine-id, host key), freshly installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from proofbook.errors import LabError
from proofbook.lab.real import cgroups, debian, image, packages, settings
from proofbook.lab.real.endpoint import Endpoint, answers_as_ssh
from proofbook.lab.real.kept import KeptMachine
from proofbook.lab.real.places import Places, locked

__all__ = ["Box", "boxes"]

#: A box that nobody talks to for this long ends (seconds).
IDLE_S = 1800.0
#: How long a box may take until its sshd answers (seconds); it takes about one, more on a busy machine.
START_S = 120.0


@dataclass(frozen=True)
class Box(KeptMachine):
    """One box, up or not."""

    kind: ClassVar[str] = "box"
    called: ClassVar[str] = "box"
    keeper: ClassVar[str] = "proofbook.lab.real.keeper"
    keeper_s: ClassVar[float] = 30.0
    logs: ClassVar[tuple[str, ...]] = ("keeper.log", "console.log")

    @property
    def group(self) -> str:
        """Its control group; two labs in two folders never share one."""
        return f"proofbook-{self.name}-{hashlib.sha256(str(self.home.resolve()).encode()).hexdigest()[:8]}"

    # ------------------------------------------------------------------------------------------ up and down

    def up(self, *, suite: str = "", owner: int | None = None, say: Callable[[str], None] = lambda text: None) -> Endpoint:
        """Start it if it is not up, and wait until its sshd answers. Raises LabError, also when its plug is pulled.

        With ``owner`` it ends when that process ends, however that happens.
        """
        packages.require_root("a box")
        packages.require(packages.BOX_TOOLS, "a box")
        rootfs = image.rootfs(suite or debian.default_suite(), self.places, say)
        with locked(self.home / "lock"):
            about = self.alive()
            reused = about is not None
            if about is None:
                self.clear()
                about = self._start(rootfs, owner)
        self.refuse_if_off()
        endpoint = self.endpoint(about, reused=reused)
        self._await_ssh(endpoint)
        return endpoint

    @property
    def leftovers(self) -> bool:
        """Whether a killed keeper left something that ``down`` or the next ``up`` will clear."""
        return self.alive() is None and ((self.home / "box.json").exists() or cgroups.left(self.group))

    def reboot(self) -> tuple[str, str]:
        """Reboot it by its own systemctl; the boot-id before and after. Raises LabError when it does not come back."""
        before = self._boot_id()
        # WHY no look at the outcome: the connection may go before systemctl has said anything. The boot-id decides.
        subprocess.run(self.ssh_command("systemctl", "reboot"), capture_output=True, check=False, timeout=60)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (after := self._boot_id()) not in ("", before):
                return before, after
            time.sleep(0.05)
        raise LabError(f"{self.name} did not come back within {START_S:.0f} s", hint=f"see {self.home / 'console.log'}")

    # ------------------------------------------------------------------------------------------ what befalls a machine

    def power_off(self) -> None:
        """Pull the plug: everything in it dies in this instant. It stays off until :meth:`power_on`. Raises LabError."""
        group = self._machine_group()
        (self.home / "power-off").touch()
        (group / "cgroup.kill").write_text("1")
        self.await_dark()

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does: its port still takes connections, and nobody answers."""
        (self._machine_group() / "cgroup.freeze").write_text("1")

    def thaw(self) -> None:
        (self._machine_group() / "cgroup.freeze").write_text("0")

    def slow_down(self, delay_ms: float) -> None:
        """Make the way to it slow: each piece of data waits this long, each way; 0 makes it fast again."""
        (self.home / "delay_ms").write_text(str(delay_ms))

    # ------------------------------------------------------------------------------------------ inside

    def _start(self, rootfs: Path, owner: int | None) -> dict[str, Any]:
        who = settings.identity(self.home / "identity")
        seed = self.home / "seed"
        settings.write(seed, {**settings.common(who, self.name), **settings.mask(_NOT_IN_A_CONTAINER)})
        for folder in ("layer", "root"):
            (self.home / folder).mkdir(exist_ok=True)
        plan = {
            "machine": self.name,
            "rootfs": str(rootfs),
            "group": self.group,
            "port": _last_port(who.known_hosts),
            "owner": owner or 0,
            "idle_s": float(os.environ.get("PROOFBOOK_LAB_IDLE_S", IDLE_S)),
        }
        (self.home / "plan.json").write_text(json.dumps(plan))
        about = self.start_keeper()
        who.trust("127.0.0.1", about["port"])
        return about

    def _await_ssh(self, endpoint: Endpoint) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if answers_as_ssh(endpoint.address, endpoint.port):
                return
            if self.alive() is None:
                raise self.failed("it ended while it started")
            time.sleep(0.02)
        raise self.failed(f"its sshd did not answer within {START_S:.0f} s")

    def clear(self) -> None:
        """Remove what belongs to one life of the box; its identity stays."""
        cgroups.remove(self.group)
        for name in ("box.json", "plan.json", "power-off", "dark", "delay_ms", "alive", ".#root.lck"):
            (self.home / name).unlink(missing_ok=True)
        for name in ("seed", "layer", "root"):
            shutil.rmtree(self.home / name, ignore_errors=True)

    def _boot_id(self) -> str:
        """As the machine says it; "" when it does not answer."""
        argv = self.ssh_command("cat", "/proc/sys/kernel/random/boot_id")
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def _machine_group(self) -> Path:
        """The control group of everything in the container, seen through the eyes of its keeper's child."""
        return Path(f"/proc/{self.about()['box']}/root/sys/fs/cgroup/{self.group}/machine/payload")


def boxes(places: Places) -> list[Box]:
    """Every box that there ever was in this lab, by name."""
    return [Box(folder.name, places) for folder in sorted((places.state / "box").glob("*")) if folder.is_dir()]


def _last_port(known_hosts: Path) -> int:
    """The port of last time, so that a known_hosts line and an open window still fit; 0 for any."""
    found = re.match(r"\[[0-9.]+\]:(\d+) ", known_hosts.read_text()) if known_hosts.exists() else None
    return int(found[1]) if found else 0


#: What only makes sense with a kernel of one's own.
_NOT_IN_A_CONTAINER = (
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-modules-load.service",
    "kmod-static-nodes.service",
)

"""Virtual machines under QEMU's software emulation: a kernel, an IOMMU, a reboot and a power switch of their own.

A VM is a folder ``<state>/vm/<name>`` with its identity, which it keeps; and a keeper process with QEMU while it is up. Its disk
is made for each ``up`` anew. A state that was saved can be gone back to in seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from proofbook.errors import BadParameter, LabError
from proofbook.lab.real import debian, image, kernel, packages, qmp, settings, topology
from proofbook.lab.real.endpoint import Endpoint, answers_as_ssh
from proofbook.lab.real.kernel import Kernel
from proofbook.lab.real.places import Places, held, locked
from proofbook.lab.real.processes import Process, started
from proofbook.lab.real.settings import File

__all__ = ["Vm", "vms"]

IDLE_S = 1800.0
#: A boot takes 15-30 s on an idle machine, four times that on a busy one, and much more where many share it.
START_S = 600.0
MEMORY_MB = 768
SAVED = "saved"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")

#: What makes a boot under software emulation bearable, and the log like that of a server.
_CMDLINE = (
    "root=/dev/vda ro console=ttyS0 quiet loglevel=4 net.ifnames=0 nokaslr audit=0 mitigations=off tsc=reliable no_timer_check "
    "noreplace-smp rcupdate.rcu_expedited=1 systemd.show_status=false intel_iommu=on"
)

_NETWORK = """\
[Unit]
Description=Static address on QEMU's user network
DefaultDependencies=no
After=systemd-udevd.service
Before=network.target ssh.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh /usr/local/lib/lab/network.sh

[Install]
WantedBy=sysinit.target
"""

#: After a saved state came back: the clock stands where it stood then, and the edu devices have forgotten their registers' place.
_AFTER_RESTORE = """\
import os, struct, sys, time
time.clock_settime(time.CLOCK_REALTIME, float(sys.argv[1]))
root = "/sys/bus/pci/devices"
for name in os.listdir(root):
    folder = f"{root}/{name}"
    if open(folder + "/config", "rb").read(4) == bytes.fromhex("3412e811"):
        start = int(open(folder + "/resource").readline().split()[0], 16)
        with open(folder + "/config", "r+b", buffering=0) as config:
            config.seek(0x10)
            config.write(struct.pack("<I", start))
            config.seek(4)
            command, = struct.unpack("<H", config.read(2))
            config.seek(4)
            config.write(struct.pack("<H", command | 6))
"""


@dataclass(frozen=True)
class Vm:
    """One virtual machine, up or not. ``topology`` says what is plugged into it."""

    name: str
    places: Places
    topology: str = topology.DEFAULT

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadParameter(f"not a VM's name: {self.name!r}", hint="small letters, digits and '-', e.g. vm or vm-two")
        topology.load(self.topology)

    @property
    def home(self) -> Path:
        return self.places.state / "vm" / self.name

    # ------------------------------------------------------------------------------------------ up and down

    def up(self, *, suite: str = "", owner: int | None = None, say: Callable[[str], None] = lambda text: None) -> Endpoint:
        """Start it if it is not up, and wait until its sshd answers. Raises LabError.

        With ``owner`` it ends when that process ends, however that happens.
        """
        packages.require_root("a virtual machine")
        packages.require(packages.VM_TOOLS, "a virtual machine")
        suite = suite or debian.default_suite()
        rootfs = image.rootfs(suite, self.places, say)
        linux = kernel.kernel(suite, self.places, say)
        with locked(self.home / "lock"):
            about = self._alive()
            reused = about is not None
            if about is None:
                self._clear()
                say(f"starting {self.name}: its own {linux.release}, half a minute or more")
                about = self._start(rootfs, linux, owner)
        endpoint = self._endpoint(about, reused)
        self.await_ssh()
        return endpoint

    def down(self) -> bool:
        """End it and clear up; whether it was up."""
        if not self.home.exists():
            return False
        with locked(self.home / "lock"):
            about = self._alive()
            if about:
                Process(about["pid"], about["pid_started"]).end()
            self._clear()
        return about is not None

    def status(self) -> Endpoint | None:
        """How to reach it; None when it is not up."""
        about = self._alive()
        return self._endpoint(about, True) if about else None

    @property
    def leftovers(self) -> bool:
        """Whether a killed keeper left files that ``down`` or the next ``up`` will clear."""
        return self._alive() is None and (self.home / "vm.json").exists()

    def await_ssh(self) -> None:
        """Wait until its sshd answers. Raises LabError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            about = self._alive()
            if about is None:
                raise self._failed("it ended")
            if answers_as_ssh("127.0.0.1", about["port"], timeout_s=5.0):
                return
            time.sleep(0.1)
        raise self._failed(f"its sshd did not answer within {START_S:.0f} s")

    def ssh_command(self, *words: str, user: str = "") -> list[str]:
        """The argv of an OpenSSH client that logs in, or runs ``words`` there. Raises LabError when it is not up."""
        endpoint = self.status()
        if endpoint is None:
            raise LabError(f"{self.name} is not up", hint=f"proofbook lab vm up {self.name}")
        return endpoint.ssh_command(*words, user=user)

    # ------------------------------------------------------------------------------------------ what befalls a machine

    def power_off(self) -> None:
        """Pull the plug. What it had not written to its disk is lost. It stays off until :meth:`power_on`. Raises LabError."""
        about = self._about()
        (self.home / "power-off").touch()
        Process(about["qemu"], about["qemu_started"]).kill()
        deadline = time.monotonic() + 30.0
        while not (self.home / "dark").exists():
            if time.monotonic() > deadline:
                raise LabError(f"{self.name} did not go dark", hint=f"see {self.home / 'qemu.log'}")
            time.sleep(0.01)

    def power_on(self) -> None:
        """Put the plug back; :meth:`await_ssh` waits until it answers."""
        (self.home / "power-off").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Stop its processors: its port still takes connections, and nobody answers."""
        self._monitor(lambda channel: channel.command("stop"))

    def thaw(self) -> None:
        self._monitor(lambda channel: channel.command("cont"))

    def unplug(self, *addresses: str) -> None:
        """From its next boot on these stand-ins are not there, all others are; without any, nothing is missing."""
        self._replan(unplugged=list(addresses))

    def cmdline(self, more: str) -> None:
        """From its next boot on the kernel's command line ends with ``more``."""
        self._replan(more=more)

    def save(self) -> None:
        """Keep its state, memory and all; there is one such state."""
        self._monitor(lambda channel: channel.monitor(f"savevm {SAVED}"))

    def restore(self) -> None:
        """Go back to the state of :meth:`save`, whatever it has done since. Raises LabError.

        WHY QEMU starts anew: the saved state says nothing of the stand-ins, so those that were unplugged would be missing.
        """
        self._replan(unplugged=[], more="", restore=True)
        self.power_off()
        self.power_on()
        self._await_qemu()
        self._replan(restore=False)
        self.await_ssh()
        done = subprocess.run(
            self.ssh_command("python3", "-", str(time.time())), input=_AFTER_RESTORE, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            raise LabError(f"{self.name} did not come back from its saved state: {done.stderr.strip()[-300:]}")

    # ------------------------------------------------------------------------------------------ inside

    def _start(self, rootfs: Path, linux: Kernel, owner: int | None) -> dict[str, Any]:
        who = settings.identity(self.home / "identity")
        self._make_disk(rootfs, linux, who)
        port = _free_port(who)
        who.trust("127.0.0.1", port)
        plan = {
            "kernel": str(linux.image),
            "initrd": str(linux.initrd),
            "port": port,
            "owner": owner or 0,
            "idle_s": float(os.environ.get("PROOFBOOK_LAB_IDLE_S", IDLE_S)),
            "unplugged": [],
            "more": "",
            "restore": False,
        }
        self._write_plan(plan)
        library = str(Path(str(resources.files("proofbook"))).parent)
        with (self.home / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "proofbook.lab.real.vm_keeper", str(self.home)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env={"PATH": packages.search_path(), "PYTHONPATH": library, "LANG": "C.UTF-8"},
            )  # fmt: skip
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            if about := self._alive():
                return about
            if keeper.poll() is not None:
                break
            time.sleep(0.02)
        raise self._failed("its keeper ended")

    def _make_disk(self, rootfs: Path, linux: Kernel, who: settings.Identity) -> None:
        """The machine's disk, from folders: no image is mounted, no loop device used; only mkfs sees them merged."""
        seed, raw = self.home / "seed", self.home / "disk.raw"
        settings.write(seed, {**settings.common(who, self.name), **_vm_files()})
        for folder in ("layer", "root"):
            (self.home / folder).mkdir(exist_ok=True)
        lower = f"lowerdir={seed}:{linux.modules}:{rootfs}"
        merge = 'mount -t overlay -o "$1" lab-root "$2" && exec mkfs.ext4 -q -F -L root -m 0 -J size=16 -d "$2" "$3" 3g'
        raw.unlink(missing_ok=True)
        argv = image.contained(["sh", "-c", merge, "merge", lower, str(self.home / "root"), str(raw)])
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={"PATH": packages.search_path(), "LANG": "C.UTF-8"}
        )
        if done.returncode:
            raise LabError(f"the disk of {self.name} could not be made: {done.stderr.strip()[-400:]}")
        disk = self.home / "disk.qcow2"
        disk.unlink(missing_ok=True)
        convert = [packages.tool("qemu-img"), "create", "-q", "-f", "qcow2", "-b", str(raw), "-F", "raw", str(disk)]
        subprocess.run(convert, check=True, capture_output=True)

    def _write_plan(self, plan: dict[str, Any]) -> None:
        plan["argv"] = self._argv(plan)
        part = self.home / "plan.json.part"
        part.write_text(json.dumps(plan))
        part.rename(self.home / "plan.json")

    def _argv(self, plan: dict[str, Any]) -> list[str]:
        devices = topology.load(self.topology).arguments(plan["unplugged"])
        return [
            packages.tool("qemu-system-x86_64"), "-name", self.name, "-machine", "q35,kernel-irqchip=split",
            "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem", "-smp", "2", "-m", str(MEMORY_MB),
            "-nodefaults", "-no-user-config", "-display", "none", "-action", "reboot=shutdown",
            "-device", "intel-iommu,intremap=on",
            "-kernel", plan["kernel"], "-initrd", plan["initrd"], "-append", f"{_CMDLINE} {plan['more']}".strip(),
            "-drive", "if=none,id=disk,file=disk.qcow2,format=qcow2,cache=unsafe,discard=unmap",
            "-device", "virtio-blk-pci,drive=disk,addr=0x3",
            "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{plan['port']}-:22",
            "-device", "virtio-net-pci,netdev=net,romfile=,addr=0x4", "-device", "virtio-rng-pci,addr=0x5",
            "-serial", "file:serial.log",
            "-qmp", "unix:control.sock,server=on,wait=off", "-qmp", "unix:events.sock,server=on,wait=off",
            *(["-loadvm", SAVED] if plan["restore"] else []),
            *devices,
        ]  # fmt: skip

    def _replan(self, **changes: object) -> None:
        self._about()
        self._write_plan({**json.loads((self.home / "plan.json").read_text()), **changes})

    def _await_qemu(self) -> None:
        """Wait until QEMU has read its plan and serves."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            about = self._about()
            if not (self.home / "dark").exists() and started(about["qemu"]) == about["qemu_started"]:
                return
            time.sleep(0.02)
        raise self._failed("QEMU did not start again")

    def _monitor(self, act: Callable[[qmp.Channel], object]) -> None:
        self._about()
        with qmp.Channel(self.home, "control.sock") as channel:
            act(channel)

    def _about(self) -> dict[str, Any]:
        about = self._alive()
        if about is None:
            raise LabError(f"{self.name} is not up", hint=f"proofbook lab vm up {self.name}")
        return about

    def _alive(self) -> dict[str, Any] | None:
        """What its keeper announced, if that very process still runs."""
        try:
            about: dict[str, Any] = json.loads((self.home / "vm.json").read_text())
        except (OSError, ValueError):
            return None
        if started(about["pid"]) != about["pid_started"] or not held(self.home / "alive"):
            return None
        return about

    def _clear(self) -> None:
        """Remove what belongs to one life of the machine; its identity stays."""
        for path in self.home.iterdir() if self.home.exists() else ():
            if path.name in ("seed", "layer", "root"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in ("identity", "lock") and not path.name.endswith(".log"):
                path.unlink(missing_ok=True)

    def _failed(self, why: str) -> LabError:
        said: list[str] = []
        for log in ("keeper.log", "qemu.log", "serial.log"):
            if (self.home / log).exists():
                said += (self.home / log).read_text(errors="replace").strip().splitlines()[-3:]
        return LabError(f"{self.name} is not reachable: {why}: {' / '.join(said)[-800:]}", hint=f"see the logs in {self.home}")

    def _endpoint(self, about: dict[str, Any], reused: bool) -> Endpoint:
        who = settings.Identity(self.home / "identity")
        return Endpoint(
            name=self.name,
            address="127.0.0.1",
            port=about["port"],
            user="root",
            identity_file=str(who.client_key),
            known_hosts=str(who.known_hosts),
            state_dir=self.home,
            reused=reused,
            started_at=datetime.fromisoformat(about["started_at"]),
        )


def vms(places: Places) -> list[Vm]:
    """Every virtual machine that there ever was in this lab, by name."""
    return [Vm(folder.name, places) for folder in sorted((places.state / "vm").glob("*")) if folder.is_dir()]


def _free_port(who: settings.Identity) -> int:
    """The port of last time when it is free, else any."""
    found = re.match(r"\[[0-9.]+\]:(\d+) ", who.known_hosts.read_text()) if who.known_hosts.exists() else None
    for port in (int(found[1]) if found else 0, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
            except OSError:
                continue
    raise LabError("no port is free on this machine's loopback")


#: What the stand-in nvidia-smi is made of: the simulated lab's renderer, and what that stands on.
_RENDERER = (
    "errors.py",
    "model.py",
    "lab/sim/boards.py",
    "lab/sim/fault_lines.py",
    "lab/sim/render_nvidia.py",
    "lab/sim/smi_csv.py",
    "lab/sim/smi_query.py",
    "lab/sim/smi_rows.py",
    "lab/sim/state.py",
    "lab/sim/topology.py",
    "lab/sim/vfs.py",
)


def _vm_files() -> dict[str, File]:
    """What a machine with a kernel of its own gets besides."""
    library = resources.files("proofbook")
    home = "/opt/nvidia-smi-stand-in"
    program = (library / "lab/real/guest/nvidia_smi.py").read_bytes()
    start = f'#!/bin/sh\n# A stand-in of the proofbook lab.\nPYTHONPATH={home} exec python3 {home}/nvidia_smi.py "$@"\n'
    return {
        "/etc/fstab": File(b"/dev/vda / ext4 rw,noatime 0 0\n"),
        "/usr/local/lib/lab/network.sh": File((library / "lab/real/guest/network.sh").read_bytes()),
        "/etc/systemd/system/lab-network.service": File(_NETWORK.encode()),
        **settings.wanted_by("sysinit.target", "lab-network.service"),
        **settings.mask(("serial-getty@ttyS0.service", "systemd-udev-settle.service")),
        "/usr/bin/nvidia-smi": File(start.encode(), 0o755),
        f"{home}/nvidia_smi.py": File(program),
        **{f"{home}/proofbook/{path}": File((library / path).read_bytes()) for path in _RENDERER},
        **{f"{home}/proofbook/{path}/__init__.py".replace("//", "/"): File() for path in ("", "lab", "lab/sim")},
    }

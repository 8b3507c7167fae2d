"""Virtual machines under QEMU's software emulation: a kernel, an IOMMU, a reboot and a power switch of their own.

A VM is a folder ``<state>/vm/<name>`` with its identity, which it keeps; and a keeper process with QEMU while it is up. Its disk
is made for each ``up`` anew. A state that was saved can be gone back to in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from proofbook.errors import LabError
from proofbook.lab.real import debian, image, kernel, packages, qmp, settings, topology
from proofbook.lab.real.endpoint import Endpoint, answers_as_ssh
from proofbook.lab.real.kept import KeptMachine
from proofbook.lab.real.kernel import Kernel
from proofbook.lab.real.places import Places, locked
from proofbook.lab.real.processes import Process, run, started
from proofbook.lab.real.vm_files import guest_program, vm_files

__all__ = ["Vm", "vms"]

IDLE_S = 1800.0
#: A boot takes 15-30 s on an idle machine, four times that on a busy one, and much more where many share it.
START_S = 600.0
#: How long a program of the lab may take inside, on a machine that is busy.
GUEST_S = 180.0
MEMORY_MB = 768
DISK_GB = 3
SAVED = "saved"

#: What makes a boot under software emulation bearable, and the log like that of a server.
_CMDLINE = (
    "root=/dev/vda ro console=ttyS0 quiet loglevel=4 net.ifnames=0 nokaslr audit=0 mitigations=off tsc=reliable no_timer_check "
    "noreplace-smp rcupdate.rcu_expedited=1 systemd.show_status=false intel_iommu=on"
)


@dataclass(frozen=True)
class Vm(KeptMachine):
    """One virtual machine, up or not. ``topology`` says what is plugged into it."""

    topology: str = topology.DEFAULT

    kind: ClassVar[str] = "vm"
    called: ClassVar[str] = "VM"
    keeper: ClassVar[str] = "proofbook.lab.real.vm_keeper"
    keeper_s: ClassVar[float] = 60.0
    logs: ClassVar[tuple[str, ...]] = ("keeper.log", "qemu.log", "serial.log")

    def __post_init__(self) -> None:
        super().__post_init__()
        topology.load(self.topology)

    # ------------------------------------------------------------------------------------------ up and down

    def up(self, *, suite: str = "", owner: int | None = None, say: Callable[[str], None] = lambda text: None) -> Endpoint:
        """Start it if it is not up, and wait until its sshd answers. Raises LabError, also when its plug is pulled.

        With ``owner`` it ends when that process ends, however that happens.
        """
        packages.require_root("a virtual machine")
        packages.require(packages.VM_TOOLS, "a virtual machine")
        suite = suite or debian.default_suite()
        rootfs = image.rootfs(suite, self.places, say)
        linux = kernel.kernel(suite, self.places, say)
        with locked(self.home / "lock"):
            about = self.alive()
            reused = about is not None
            if about is None:
                self.clear()
                say(f"starting {self.name}: its own {linux.release}, half a minute or more")
                about = self._start(rootfs, linux, owner)
        self.refuse_if_off()
        endpoint = self.endpoint(about, reused=reused)
        self.await_ssh()
        return endpoint

    @property
    def leftovers(self) -> bool:
        """Whether a killed keeper left files that ``down`` or the next ``up`` will clear."""
        return self.alive() is None and (self.home / "vm.json").exists()

    def await_ssh(self) -> None:
        """Wait until its sshd answers. Raises LabError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            about = self.alive()
            if about is None:
                raise self.failed("it ended")
            if answers_as_ssh("127.0.0.1", about["port"], timeout_s=5.0):
                return
            time.sleep(0.1)
        raise self.failed(f"its sshd did not answer within {START_S:.0f} s")

    # ------------------------------------------------------------------------------------------ what befalls a machine

    def power_off(self) -> None:
        """Pull the plug. What it had not written to its disk is lost. It stays off until :meth:`power_on`. Raises LabError."""
        about = self.about()
        (self.home / "power-off").touch()
        Process(about["qemu"], about["qemu_started"]).kill()
        self.await_dark()

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
        self._run_guest(self.endpoint(self.about(), reused=True), "after_restore.py", str(time.time()))

    def up_as_copy(self, other: Vm, *, owner: int | None = None) -> Endpoint:
        """Start it from what another one saved, disk and memory, with an identity of its own. Raises LabError.

        Host key, machine-id, boot id and journal are its own from then on; until it reboots, all else is as it was there.
        """
        with locked(self.home / "lock"):
            if self.alive() is not None:
                raise LabError(f"{self.name} is up already", hint=f"proofbook lab vm down {self.name}")
            self.clear()
            theirs = other._copy_disk(self.home)
            about = self._launch({"kernel": theirs["kernel"], "initrd": theirs["initrd"], "restore": True}, owner)
        self._replan(restore=False)
        self.await_ssh()
        parent, who = other.identity, self.identity
        (self.home / "parent").write_text(parent.known("127.0.0.1", about["port"]))
        endpoint = self.endpoint(about, reused=False)
        as_it_was = replace(endpoint, identity_file=str(parent.client_key), known_hosts=str(self.home / "parent"))
        self._run_guest(as_it_was, "after_restore.py", str(time.time()))
        self._run_guest(as_it_was, "become_another.py", told=_another(who, self.name))
        self.await_ssh()
        return endpoint

    # ------------------------------------------------------------------------------------------ inside

    def _start(self, rootfs: Path, linux: Kernel, owner: int | None) -> dict[str, Any]:
        self._make_disk(rootfs, linux)
        return self._launch({"kernel": str(linux.image), "initrd": str(linux.initrd)}, owner)

    def _launch(self, plan: Mapping[str, Any], owner: int | None) -> dict[str, Any]:
        """Start the keeper, and with it QEMU, on the disk that is there."""
        who = settings.identity(self.home / "identity")
        port = _free_port(who)
        who.trust("127.0.0.1", port)
        idle_s = float(os.environ.get("PROOFBOOK_LAB_IDLE_S", IDLE_S))
        usual = {"port": port, "owner": owner or 0, "idle_s": idle_s, "unplugged": [], "more": "", "restore": False}
        self._write_plan({**usual, **plan})
        return self.start_keeper()

    def _make_disk(self, rootfs: Path, linux: Kernel) -> None:
        """The machine's disk, from folders: no image is mounted, no loop device used; only mkfs sees them merged."""
        who = settings.identity(self.home / "identity")
        seed, raw = self.home / "seed", self.home / "disk.raw"
        settings.write(seed, {**settings.common(who, self.name), **vm_files()})
        (self.home / "root").mkdir(exist_ok=True)
        lower = f"lowerdir={seed}:{linux.modules}:{rootfs}"
        merge = 'mount -t overlay -o "$1" lab-root "$2" && exec mkfs.ext4 -q -F -L root -m 0 -J size=16 -d "$2" "$3" "$4"'
        raw.unlink(missing_ok=True)
        argv = image.contained(["sh", "-c", merge, "merge", lower, str(self.home / "root"), str(raw), f"{DISK_GB}g"])
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={"PATH": packages.search_path(), "LANG": "C.UTF-8"}
        )
        if done.returncode:
            raise LabError(f"the disk of {self.name} could not be made: {done.stderr.strip()[-400:]}")
        disk = self.home / "disk.qcow2"
        disk.unlink(missing_ok=True)
        # WHY a name without a folder: QEMU looks for it beside the disk, also beside a copy of it.
        run("qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", raw.name, "-F", "raw", str(disk), f"{DISK_GB}G")

    def _copy_disk(self, folder: Path) -> dict[str, Any]:
        """Copy its disk into a folder, with the saved state in it; its plan. Raises LabError."""
        self.about()
        with qmp.Channel(self.home, "control.sock") as channel:
            if SAVED not in channel.monitor("info snapshots"):
                raise LabError(f"{self.name} has no saved state to start another machine from")
            channel.command("stop")  # QEMU also writes out then what it keeps of the disk's own structure
            try:
                shutil.copyfile(self.home / "disk.qcow2", folder / "disk.qcow2")
                (folder / "disk.raw").hardlink_to(self.home / "disk.raw")
            finally:
                channel.command("cont")
        plan: dict[str, Any] = json.loads((self.home / "plan.json").read_text())
        return plan

    def _run_guest(self, way: Endpoint, program: str, *arguments: str, told: str = "") -> None:
        """Run one of ``guest/`` inside; ``told`` is its stdin. Raises LabError."""
        argv = way.ssh_command("python3", "-c", shlex.quote(guest_program(program)), *arguments)
        done = subprocess.run(argv, input=told, capture_output=True, text=True, timeout=GUEST_S, check=False)
        if done.returncode:
            raise LabError(f"{self.name} did not come back from a saved state: {program}: {done.stderr.strip()[-300:]}")

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
        self.about()
        self._write_plan({**json.loads((self.home / "plan.json").read_text()), **changes})

    def _await_qemu(self) -> None:
        """Wait until QEMU has read its plan and serves."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            about = self.about()
            if not (self.home / "dark").exists() and started(about["qemu"]) == about["qemu_started"]:
                return
            time.sleep(0.02)
        raise self.failed("QEMU did not start again")

    def _monitor(self, act: Callable[[qmp.Channel], object]) -> None:
        self.about()
        with qmp.Channel(self.home, "control.sock") as channel:
            act(channel)

    def clear(self) -> None:
        """Remove what belongs to one life of the machine; its identity stays."""
        for path in self.home.iterdir() if self.home.exists() else ():
            if path.name in ("seed", "root"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in ("identity", "lock") and not path.name.endswith(".log"):
                path.unlink(missing_ok=True)


def vms(places: Places) -> list[Vm]:
    """Every virtual machine that there ever was in this lab, by name."""
    return [Vm(folder.name, places) for folder in sorted((places.state / "vm").glob("*")) if folder.is_dir()]


def _free_port(who: settings.Identity) -> int:
    """The port of last time when it is free, else another. Raises LabError.

    WHY below the range that the kernel picks from: while the machine reboots its port is nobody's, and must not be given away.
    """
    last = re.match(r"\[[0-9.]+\]:(\d+) ", who.known_hosts.read_text()) if who.known_hosts.exists() else None
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    others = random.sample(range(max(1024, end - 10_000), end), 100)
    for port in (*([int(last[1])] if last else []), *others):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LabError("no port is free on this machine's loopback")


def _another(who: settings.Identity, hostname: str) -> str:
    """What ``guest/become_another.py`` is told: the files that make a machine itself, and a boot id."""
    files = {path: (file.content.decode(), file.mode) for path, file in settings.own(who, hostname).items()}
    return json.dumps({"files": files, "hostname": hostname, "boot_id": str(uuid.uuid4())})

"""The file system of a simulated machine: rendered from its state for each of its userlands."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from proofbook.lab.sim.life import Life
from proofbook.lab.sim.os_state import Container, Process, System
from proofbook.lab.sim.render_nvidia import nvidia_files
from proofbook.lab.sim.render_pci import below_their_bridges, pci_files
from proofbook.lab.sim.state import NvidiaDriver
from proofbook.lab.sim.vfs import FileNode, Tree, device, directory, file, link

#: Kernel clock ticks in a second (``getconf CLK_TCK``).
TICKS = 100

_DIRECTORIES = (
    "/boot",
    "/dev/shm",
    "/etc/modprobe.d",
    "/etc/ssh",
    "/home",
    "/mnt",
    "/opt",
    "/proc/sys/net",
    "/root",
    "/run",
    "/srv",
    "/sys/kernel/iommu_groups",
    "/sys/fs/cgroup",
    "/tmp",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/var/lib",
    "/var/log",
    "/var/tmp",
)


class Files:
    """Makes the trees, and keeps them until the machine's state changes."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._revision = -1
        self._trees: dict[tuple[str, int], Tree] = {}
        self._bus = b""
        self._bus_tree = Tree([])

    def tree(self, system: System, uid: int) -> Tree:
        """The files of a userland as a user sees them."""
        machine = self._life.machine
        if machine.revision != self._revision:
            self._trees.clear()
            self._revision = machine.revision
        key = (system.name, uid)
        if key not in self._trees:
            self._trees[key] = Tree(self._layers(system, uid), uid, self._of_the_bus())
        return self._trees[key]

    def _of_the_bus(self) -> Tree:
        """The files of the PCI devices and of the IOMMU, which are most of all and hardly ever change."""
        # WHY rendered from what is left: so they can follow from nothing that is not in the key.
        hw = replace(self._life.machine.hw, gpus={}, nvidia=NvidiaDriver(), p2p={})
        bus = pickle.dumps(hw)
        if bus != self._bus:
            self._bus, self._bus_tree = bus, Tree([below_their_bridges(hw, pci_files(hw))])
        return self._bus_tree

    def _layers(self, system: System, uid: int) -> list[dict[str, FileNode] | dict[str, FileNode | None]]:
        hw = self._life.machine.hw
        nvidia = nvidia_files(hw)
        if isinstance(system, Container):
            nvidia = _in_container(system, nvidia)
        basics = {
            p: directory(0o1777 if p in ("/tmp", "/var/tmp", "/dev/shm") else 0o700 if p == "/root" else 0o755)
            for p in _DIRECTORIES
        }
        home = {self._life.machine.user.home: FileNode("dir", mode=0o700, uid=self._life.machine.user.uid)}
        return [
            basics,
            home,
            self._etc(system),
            self._dmi(),
            self._kernel(system),
            self._processes(system),
            nvidia,
            system.files,
        ]

    def _etc(self, system: System) -> dict[str, FileNode]:
        m = self._life.machine
        return {
            "/etc/hostname": file(system.hostname + "\n", 0o644),
            "/etc/machine-id": file(system.machine_id + "\n"),
            "/etc/systemd/journald.conf": file("# The compile-time defaults are shown.\n\n[Journal]\n#Storage=auto\n", 0o644),
            f"/var/log/journal/{system.machine_id}": directory(0o755),
            "/etc/os-release": link("../usr/lib/os-release"),
            "/usr/lib/os-release": file(system.os_release, 0o644),
            "/dev/null": device(1, 3),
            "/dev/zero": device(1, 5),
            "/dev/kmsg": device(1, 11, 0o644),
            "/bin": link("usr/bin"),
            "/sbin": link("usr/sbin"),
            f"/boot/vmlinuz-{m.kernel}": file(b"", 0o644),
            f"/boot/initrd.img-{m.kernel}": file(b"", 0o644),
        }

    def _dmi(self) -> dict[str, FileNode]:
        hw = self._life.machine.hw
        values = {
            "board_name": hw.board,
            "board_vendor": "ASRockRack",
            "product_name": hw.product,
            "sys_vendor": "To Be Filled By O.E.M.",
            "bios_version": hw.bios,
            "bios_vendor": "American Megatrends International, LLC.",
            "bios_date": "09/12/2025",
        }
        return {f"/sys/class/dmi/id/{k}": file(v + "\n") for k, v in values.items()} | {
            "/sys/class/dmi/id/product_serial": file("LAB0000001\n", 0o400),
            "/sys/class/dmi/id/product_uuid": file("00000000-0000-4000-8000-00000001ab00\n", 0o400),
        }

    def _kernel(self, system: System) -> dict[str, FileNode]:
        m, life = self._life.machine, self._life
        gib = m.hw.memory_gib
        nvidia = m.hw.nvidia
        majors = f"  1 mem\n  5 /dev/tty\n 10 misc\n195 nvidia\n{nvidia.caps_major} nvidia-caps\n{nvidia.uvm_major} nvidia-uvm\n"
        modules = "".join(
            f"{name} {size} {users} - Live 0x0000000000000000 {flags}\n" for name, size, users, flags in self._modules()
        )
        return {
            "/proc/sys/kernel/random/boot_id": file(m.boot.dashed_id + "\n"),
            "/proc/sys/kernel/osrelease": file(m.kernel + "\n"),
            "/proc/sys/kernel/ostype": file("Linux\n"),
            "/proc/sys/kernel/hostname": file(system.hostname + "\n"),
            "/proc/sys/kernel/tainted": file("12289\n"),
            "/proc/cmdline": file(m.boot.cmdline + "\n"),
            "/proc/version": file(
                f"Linux version {m.kernel} (build@proxmox) (gcc (Debian 14.2.0-19) 14.2.0) {m.kernel_version}\n"
            ),
            "/proc/uptime": file(
                lambda: f"{life.now - m.boot.started_at:.2f} {(life.now - m.boot.started_at) * 180:.2f}\n".encode()
            ),
            "/proc/loadavg": file("1.12 1.08 1.02 2/3127 48213\n"),
            "/proc/meminfo": file(
                f"MemTotal:       {gib * 1048576} kB\nMemFree:        {gib * 721420} kB\nMemAvailable:   {gib * 880803} kB\n"
                f"Buffers:        {gib * 2048} kB\nCached:         {gib * 301465} kB\n"
            ),
            "/proc/stat": file(f"cpu  0 0 0 0 0 0 0 0 0 0\nbtime {int(m.boot.started_at)}\nprocesses 48213\n"),
            "/proc/devices": file("Character devices:\n" + majors + "\nBlock devices:\n259 blkext\n"),
            "/proc/modules": file(modules),
            "/proc/mounts": file("rpool/ROOT/pve-1 / zfs rw,relatime,xattr,posixacl 0 0\nproc /proc proc rw,nosuid 0 0\n"),
        }

    def _modules(self) -> list[tuple[str, int, int, str]]:
        hw = self._life.machine.hw
        found = [("zfs", 6881280, 6, "(PO)"), ("mlx5_core", 2924544, 1, ""), ("nvme", 65536, 4, "")]
        if hw.nvidia.loaded:
            flags = "(OE)" if hw.nvidia.open_module else "(POE)"
            found += [("nvidia_uvm", 2084864, 8, flags), ("nvidia_drm", 143360, 0, flags), ("nvidia", 14401536, 98, flags)]
        if any(d.driver == "vfio-pci" for d in hw.pci.values()):
            found.append(("vfio_pci", 20480, 1, ""))
        return found

    def _processes(self, system: System) -> dict[str, FileNode]:
        nodes: dict[str, FileNode] = {}
        groups: dict[str, list[int]] = {}
        for process in visible_processes(self._life, system):
            nodes |= self._process(*process)
            groups.setdefault(process[3], []).append(process[0])
        for group, pids in groups.items():
            nodes[f"/sys/fs/cgroup{group}/cgroup.procs"] = file("".join(f"{pid}\n" for pid in pids), 0o644)
        return nodes

    def _process(self, pid: int, ppid: int, process: Process, cgroup: str) -> dict[str, FileNode]:
        base, comm = f"/proc/{pid}", process.comm[:15]
        ids = f"{pid}\t{process.pid}" if pid != process.pid else str(pid)  # a container's process has two, seen from the host
        ticks = round((process.started_at - self._life.machine.boot.started_at) * TICKS)
        rest = [
            ppid,
            pid,
            pid,
            0,
            -1,
            4194560,
            1,
            0,
            0,
            0,
            812,
            97,
            0,
            0,
            20,
            0,
            1,
            0,
            ticks,
            process.rss_kib * 4096,
            process.rss_kib // 4,
        ]
        stat = f"{pid} ({comm}) S " + " ".join(map(str, rest + [18446744073709551615] + [0] * 27)) + "\n"
        status = (
            f"Name:\t{comm}\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t{pid}\nPid:\t{pid}\nPPid:\t{ppid}\nTracerPid:\t0\n"
            f"Uid:\t{process.uid}\t{process.uid}\t{process.uid}\t{process.uid}\nGid:\t{process.uid}\t{process.uid}\t{process.uid}\t{process.uid}\n"
            f"NStgid:\t{ids}\nNSpid:\t{ids}\nVmSize:\t{process.rss_kib * 4} kB\nVmRSS:\t{process.rss_kib} kB\nThreads:\t1\n"
        )
        environ = b"".join(f"{k}={v}".encode() + b"\0" for k, v in process.environ.items())
        return {
            base: FileNode("dir", mode=0o555, uid=process.uid),
            f"{base}/cmdline": file(b"".join(a.encode() + b"\0" for a in process.argv)),
            f"{base}/comm": file(comm + "\n", 0o644),
            f"{base}/environ": FileNode("file", environ, mode=0o400, uid=process.uid),
            f"{base}/stat": file(stat),
            f"{base}/status": file(status),
            f"{base}/cgroup": file(f"0::{cgroup}\n"),
            f"{base}/exe": link(process.exe or "/usr/lib/systemd/systemd"),
        }


def visible_processes(life: Life, system: System) -> list[tuple[int, int, Process, str]]:
    """(pid, ppid, process, cgroup) as a userland sees them; the host sees those of its containers too."""
    seen = [(p.pid, p.ppid, p, p.cgroup) for p in system.processes.values()]
    if system is life.machine.host:
        if system.state != "off":
            init = Process(
                1,
                1,
                0,
                ["/sbin/init"],
                {"HOME": "/", "TERM": "linux"},
                life.machine.boot.started_at,
                "/init.scope",
                comm="systemd",
            )
            seen.insert(0, (1, 0, init, "/init.scope"))
        for container in life.machine.containers.values():
            first = container.processes.get(1)
            parent = first.host_pid if first else 1
            seen += [
                (p.host_pid, 1 if p.pid == 1 else parent, p, f"/lxc/{container.id}/ns{p.cgroup}")
                for p in container.processes.values()
            ]
    return sorted(seen, key=lambda s: s[0])


def _in_container(container: Container, nodes: dict[str, FileNode]) -> dict[str, FileNode]:
    """Of the host's device nodes only those that its configuration lets in, with the access that the devices cgroup gives."""
    seen: dict[str, FileNode] = {}
    for path, node in nodes.items():
        if not path.startswith("/dev/"):
            seen[path] = node
        elif path in container.devices:
            attributes: dict[str, Any] = {**vars(node)}
            attributes["error"] = container.devices[path] or node.error
            seen[path] = FileNode(**attributes)
    return seen

"""From a scenario's machine table to a :class:`~proofbook.lab.sim.os_state.Machine` that has been up for a while.

The machine's past is lived, not written: an earlier boot, its orderly end and the present boot are played on the lab's
clock, so that journal, boots and services agree with one another in every detail.
"""

from __future__ import annotations

import uuid
from typing import Any

from proofbook.errors import LabError
from proofbook.lab.sim import boards, checkpoint, faults, units
from proofbook.lab.sim.life import JOURNAL_SOCKETS, Life
from proofbook.lab.sim.os_state import Container, Fault, Machine, System, Timing, User
from proofbook.lab.sim.state import Hardware
from proofbook.lab.sim.vfs import FileNode

_BOARDS = {
    "four-gpu-epyc": boards.four_gpu_epyc,
    "four-gpu-workstation": boards.four_gpu_workstation,
    "eight-gpu-epyc": boards.eight_gpu_epyc,
}

#: What the Python of a container's services has installed.
_PACKAGES = {
    "sglang": "0.5.10",
    "torch": "2.9.1",
    "transformers": "5.3.0",
    "flashinfer-python": "0.6.7",
    "sgl-kernel": "0.3.21",
    "xgrammar": "0.1.32",
}

_DAY = 86400.0
_MULTI_USER = "\n[Install]\nWantedBy=multi-user.target\n"

#: Units of a host: (name, description, seconds after the kernel's start, type, command, enabled by an [Install] section).
_HOST_UNITS: tuple[tuple[str, str, float | None, str, str, bool], ...] = (
    ("systemd-journald.service", "Journal Service", 4.2, "notify", "/usr/lib/systemd/systemd-journald", False),
    (
        "systemd-udevd.service",
        "Rule-based Manager for Device Events and Files",
        4.6,
        "notify",
        "/usr/lib/systemd/systemd-udevd",
        False,
    ),
    ("systemd-modules-load.service", "Load Kernel Modules", 4.8, "oneshot", "/usr/lib/systemd/systemd-modules-load", False),
    ("zfs-mount.service", "Mount ZFS filesystems", 8.1, "oneshot", "/sbin/zfs mount -a", True),
    ("dbus.service", "D-Bus System Message Bus", 9.0, "notify", "/usr/bin/dbus-daemon --system --nofork", False),
    ("systemd-logind.service", "User Login Management", 9.2, "notify", "/usr/lib/systemd/systemd-logind", False),
    ("chrony.service", "chrony, an NTP client/server", 9.4, "forking", "/usr/sbin/chronyd -F 1", True),
    (
        "nvidia-persistenced.service",
        "NVIDIA Persistence Daemon",
        19.0,
        "forking",
        "/usr/bin/nvidia-persistenced --user nvpd",
        True,
    ),
    ("ssh.service", "OpenBSD Secure Shell server", 20.5, "notify", "/usr/sbin/sshd -D", True),
    ("cron.service", "Regular background program processing daemon", 21.0, "simple", "/usr/sbin/cron -f", True),
    ("pve-cluster.service", "The Proxmox VE cluster filesystem", 21.4, "forking", "/usr/bin/pmxcfs", True),
    ("pveproxy.service", "PVE API Proxy Server", 23.0, "forking", "/usr/bin/pveproxy start", True),
    ("pve-guests.service", "PVE guests", 25.0, "oneshot", "/usr/bin/pvesh --nooutput create /nodes/localhost/startall", True),
    ("getty@tty1.service", "Getty on tty1", 24.0, "simple", "/sbin/agetty -o -p -- \\u --noclear - linux", True),
)

#: Units of a container, seconds after its start.
_CONTAINER_UNITS: tuple[tuple[str, str, float | None, str, str, bool], ...] = (
    ("systemd-journald.service", "Journal Service", 0.4, "notify", "/usr/lib/systemd/systemd-journald", False),
    ("dbus.service", "D-Bus System Message Bus", 1.2, "notify", "/usr/bin/dbus-daemon --system --nofork", False),
    ("systemd-logind.service", "User Login Management", 1.4, "notify", "/usr/lib/systemd/systemd-logind", False),
    ("ssh.service", "OpenBSD Secure Shell server", 1.9, "notify", "/usr/sbin/sshd -D", True),
    ("cron.service", "Regular background program processing daemon", 1.8, "simple", "/usr/sbin/cron -f", True),
)


def build(data: dict[str, Any], now: float, seed: str) -> Life:
    """The machine of a scenario at ``now`` (seconds, the lab's clock), up since its table's ``uptime_s``.

    ``data`` is {"machine": table, "faults": [tables]}. Raises LabError for what the lab cannot build.
    """
    table = data["machine"]
    try:
        machine = _machine(data, table, seed)
    except KeyError as missing:
        raise LabError(f"the machine's table lacks {missing}") from missing
    uptime = float(table.get("uptime_s", 9.3 * _DAY))
    life = Life(machine, now - uptime - 21 * _DAY)
    life.on_power_on()
    life.advance(now - uptime - machine.timing.firmware_s)
    life.on_stop_ssh()
    for container in machine.containers.values():
        life.on_stop_container(container.id)
    life.on_halt()
    life.advance(now)
    return life


def _machine(data: dict[str, Any], table: dict[str, Any], seed: str) -> Machine:
    board = _board(table["board"])
    host = System("", table["hostname"], _stable_id(seed, "host"))
    _add_units(host, _HOST_UNITS)
    _add_sockets(host, 4.1)
    _add_targets(host)
    _host_files(host, table)
    machine = Machine(
        name=table["hostname"],
        board=board,
        hw=board,
        host=host,
        containers={c["id"]: _container(c, seed, board) for c in table.get("containers", [])},
        kernel=table["kernel"],
        kernel_version=table["kernel_version"],
        cmdline=table["cmdline"],
        user=_user(table.get("user", "root")),
        timing=Timing(**table.get("timing", {})),
        faults=[_fault(f) for f in data.get("faults", [])],
        seed=seed,
    )
    return machine


def _fault(table: dict[str, Any]) -> Fault:
    parameters = {k: v for k, v in table.items() if k not in ("kind", "when")}
    return faults.validate(Fault(table["kind"], table.get("when", "always"), parameters))


def _board(name: str) -> Hardware:
    if name not in _BOARDS:
        raise LabError(f"no such board: {name!r}", hint=f"the lab has {', '.join(sorted(_BOARDS))}")
    return _BOARDS[name]()


def _stable_id(seed: str, what: str) -> str:
    return uuid.uuid5(uuid.UUID(seed), f"machine-id {what}").hex


def _user(name: str) -> User:
    return User("root", 0, "/root", True) if name == "root" else User(name, 1000, f"/home/{name}", False)


def _add_units(system: System, table: tuple[tuple[str, str, float | None, str, str, bool], ...]) -> None:
    for name, description, offset, kind, argv, installable in table:
        text = f"[Unit]\nDescription={description}\n\n[Service]\nType={kind}\nExecStart={argv}\n"
        units.write(system, f"/usr/lib/systemd/system/{name}", text + (_MULTI_USER if installable else ""))
        units.enable(system, name)
        unit = units.load(system, name)
        if unit is not None:
            unit.boot_offset_s = offset
            system.units[name] = unit


def _add_sockets(system: System, offset_s: float) -> None:
    """The sockets through which journald is reached; they are there a little before it."""
    for name in JOURNAL_SOCKETS:
        units.write(system, f"/usr/lib/systemd/system/{name}", "[Unit]\nDescription=Journal Socket\n\n[Socket]\nAccept=no\n")
        unit = units.load(system, name)
        if unit is not None:
            unit.boot_offset_s = offset_s
            system.units[name] = unit


def _add_targets(system: System) -> None:
    for name, description in (("multi-user.target", "Multi-User System"), ("graphical.target", "Graphical Interface")):
        units.write(system, f"/usr/lib/systemd/system/{name}", f"[Unit]\nDescription={description}\nAllowIsolate=yes\n")
        unit = units.load(system, name)
        if unit is not None:
            system.units[name] = unit


def _host_files(host: System, table: dict[str, Any]) -> None:
    for path, text in table.get("files", {}).items():
        units.write(host, path, text)
    units.write(host, "/root/.bashrc", "# ~/.bashrc: executed by bash(1) for non-login shells.\n")
    units.write(host, "/etc/kernel/cmdline", table["cmdline"] + "\n")


def _container(table: dict[str, Any], seed: str, board: Hardware) -> Container:
    devices = dict.fromkeys(table["devices"], "")
    container = Container(
        name=table["id"],
        hostname=table["hostname"],
        machine_id=_stable_id(seed, table["id"]),
        id=table["id"],
        kind=table.get("kind", "pct"),
        devices=devices,
        onboot=table.get("onboot", True),
        os_release='PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nVERSION_ID="24.04"\n',
    )
    container.config = _pct_config(table, board)
    container.address = table.get("address", "10.20.30.174")
    container.packages = {**_PACKAGES, **table.get("packages", {})}
    container.page_cache = dict.fromkeys(table.get("cached", []), 1.0)
    for model in table.get("models", []):
        container.files |= checkpoint.files(model["path"], mtp=model.get("mtp", True))
    _add_units(container, _CONTAINER_UNITS)
    _add_sockets(container, 0.3)
    _add_targets(container)
    for service in table.get("services", []):
        _service(container, service)
    return container


def _pct_config(table: dict[str, Any], board: Hardware) -> str:
    """What ``pct config`` prints: keys in alphabetical order, the raw lxc lines last."""
    lines = [
        "arch: amd64",
        "cores: 64",
        "features: nesting=1",
        f"hostname: {table['hostname']}",
        "memory: 393216",
        "mp0: /tank/models,mp=/models",
        "net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:5E:02:66,"
        f"ip={table.get('address', '10.20.30.174')}/24,gw=10.20.30.1,type=veth",
        f"onboot: {int(table.get('onboot', True))}",
        "ostype: ubuntu",
        f"rootfs: local-zfs:subvol-{table['id']}-disk-0,size=256G",
        "swap: 0",
    ]
    for major in (195, board.nvidia.uvm_major, board.nvidia.caps_major):
        lines.append(f"lxc.cgroup2.devices.allow: c {major}:* rwm")
    lines += [f"lxc.mount.entry: {p} {p[1:]} none bind,optional,create=file" for p in table["devices"]]
    return "\n".join(lines) + "\n"


def _service(container: Container, table: dict[str, Any]) -> None:
    """A service of the scenario: its unit file is written, enabled and loaded, as an administrator would."""
    environment = "".join(f"Environment={k}={v}\n" for k, v in table.get("environment", {}).items())
    for path in table.get("environment_files", {}):
        environment += f"EnvironmentFile=-{path}\n"
        units.write(container, path, table["environment_files"][path])
    settings = "".join(f"{k}={v}\n" for k, v in table.get("settings", {}).items())
    program = table["command"].split()[0]
    if program.startswith("/"):
        container.files.setdefault(program, FileNode("file", b"\x7fELF", mode=0o755))
    arguments = " ".join([table["command"], *table.get("args", [])])
    text = (
        f"[Unit]\nDescription={table['description']}\nAfter=network-online.target\nWants=network-online.target\n\n"
        f"[Service]\nType=simple\n{environment}ExecStart={arguments}\nRestart=on-failure\nRestartSec=10\n"
        f"SyslogIdentifier={table['name'].removesuffix('.service')}\nTimeoutStopSec=120\n{settings}{_MULTI_USER}"
    )
    units.write(container, f"/etc/systemd/system/{table['name']}", text)
    units.enable(container, table["name"])
    unit = units.load(container, table["name"])
    if unit is not None:
        unit.boot_offset_s = float(table.get("start_s", 3.0))
        container.units[unit.name] = unit

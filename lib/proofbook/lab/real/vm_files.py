"""The files that a virtual machine gets besides those of every machine of the real lab: its network, the stand-in nvidia-smi."""

from __future__ import annotations

from importlib import resources

from proofbook.lab.real import settings
from proofbook.lab.real.settings import File

__all__ = ["guest_program", "vm_files"]

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


def vm_files() -> dict[str, File]:
    """What a machine with a kernel of its own gets besides."""
    library = resources.files("proofbook")
    home = "/opt/nvidia-smi-stand-in"
    start = f'#!/bin/sh\n# A stand-in of the proofbook lab.\nPYTHONPATH={home} exec python3 {home}/nvidia_smi.py "$@"\n'
    return {
        "/etc/fstab": File(b"/dev/vda / ext4 rw,noatime 0 0\n"),
        "/usr/local/lib/lab/network.sh": File(guest_program("network.sh").encode()),
        "/etc/systemd/system/lab-network.service": File(_NETWORK.encode()),
        **settings.wanted_by("sysinit.target", "lab-network.service"),
        **settings.mask(("serial-getty@ttyS0.service", "systemd-udev-settle.service")),
        "/usr/bin/nvidia-smi": File(start.encode(), 0o755),
        f"{home}/nvidia_smi.py": File(guest_program("nvidia_smi.py").encode()),
        **{f"{home}/proofbook/{path}": File((library / path).read_bytes()) for path in _RENDERER},
        **{f"{home}/proofbook/{path}/__init__.py".replace("//", "/"): File() for path in ("", "lab", "lab/sim")},
    }


def guest_program(name: str) -> str:
    """The text of a program that runs inside, from ``guest/``."""
    return (resources.files("proofbook.lab.real.guest") / name).read_text()

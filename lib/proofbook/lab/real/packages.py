"""The Debian packages of the real lab: what this machine needs, and what the machines inside are made of. Named here alone.

Imports nothing but the standard library, so that :func:`tell_missing` can be asked before there is an environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from proofbook.errors import NotEquipped

__all__ = ["BOX_TOOLS", "GUEST", "VM_TOOLS", "missing", "require", "require_root", "search_path", "tell_missing", "tool"]

#: program → package, on this machine
BOX_TOOLS: Mapping[str, str] = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
VM_TOOLS: Mapping[str, str] = {
    "mmdebstrap": "mmdebstrap",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "modprobe": "kmod",
    "depmod": "kmod",
    "zstd": "zstd",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}

#: inside the machines: what a small server has, and two login shells that are not bash
GUEST = (
    "systemd",
    "systemd-sysv",
    "udev",
    "dbus",
    "openssh-server",
    "python3",
    "sudo",
    "iproute2",
    "pciutils",
    "kmod",
    "procps",
    "curl",
    "dash",
    "tcsh",
)

#: Debian's keys, which say that what the mirror gave is Debian's
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
KEYRING_PACKAGE = "debian-archive-keyring"

# WHY: an ordinary user's PATH, and that of some services, misses these; mkfs and modprobe live there.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def search_path() -> str:
    """The PATH that the lab's programs get."""
    return _PATH


def tool(program: str) -> str:
    """The path of a program of this machine. Raises NotEquipped when it is missing."""
    found = shutil.which(program, path=_PATH)
    if found is None:
        package = {**BOX_TOOLS, **VM_TOOLS}.get(program, program)
        raise NotEquipped(f"{program} is missing on this machine", hint=f"apt-get install {package}")
    return found


def missing(tools: Mapping[str, str]) -> dict[str, str]:
    """Of these programs (and Debian's keys) those that are not here, each with its package."""
    found = {program: package for program, package in tools.items() if shutil.which(program, path=_PATH) is None}
    return found if os.path.exists(KEYRING) else found | {KEYRING: KEYRING_PACKAGE}


def require(tools: Mapping[str, str], what: str) -> None:
    """Raises NotEquipped that names everything that is missing, and the one command that brings it."""
    lacking = missing(tools)
    if lacking:
        packages = " ".join(sorted(set(lacking.values())))
        raise NotEquipped(
            f"{what} needs programs that are missing here: {', '.join(sorted(lacking))}",
            hint=f"apt-get install --no-install-recommends {packages}   (Debian bookworm or trixie)",
        )


def require_root(what: str) -> None:
    """Raises NotEquipped for anybody but root."""
    if os.geteuid() != 0:
        raise NotEquipped(
            f"{what} needs root: it makes namespaces, mounts and control groups", hint="run it as root, e.g. with sudo"
        )


def tell_missing() -> None:
    """Print the packages that real machines of either kind need and that are missing here, one a line."""
    for package in sorted(set(missing({**BOX_TOOLS, **VM_TOOLS}).values())):
        print(package)

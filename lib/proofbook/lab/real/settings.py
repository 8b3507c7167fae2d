"""What one machine gets on top of the root file system, as files: its identity, its settings, its services."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from proofbook.lab.real.image import USERS
from proofbook.lab.real.places import locked
from proofbook.lab.real.processes import run

__all__ = ["SERVICE", "File", "Identity", "common", "identity", "mask", "own", "wanted_by", "write"]

SERVICE = "sglang-qwen.service"

#: The release that the stand-in for SGLang speaks as.
SGLANG = "0.5.10"

#: Units that a machine for practice does not need; each costs start time, and most of it under software emulation.
_NOT_NEEDED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "console-setup.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "keyboard-setup.service",
    "ldconfig.service",
    "modprobe@configfs.service",
    "modprobe@dm_mod.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "modprobe@fuse.service",
    "modprobe@loop.service",
    "proc-sys-fs-binfmt_misc.automount",
    "proc-sys-fs-binfmt_misc.mount",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-boot-update.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-networkd.service",
    "systemd-pcrphase.service",
    "systemd-pstore.service",
    "systemd-resolved.service",
    "systemd-rfkill.socket",
    "systemd-timesyncd.service",
    "systemd-tpm2-setup-early.service",
    "systemd-tpm2-setup.service",
)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the machine; with ``link`` a symbolic link instead."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a machine is: made once for a name, and kept, so that it stays the same machine over every ``down`` and ``up``."""

    folder: Path

    @property
    def machine_id(self) -> str:
        return (self.folder / "machine-id").read_text().strip()

    @property
    def client_key(self) -> Path:
        return self.folder / "client_key"

    @property
    def host_key(self) -> Path:
        return self.folder / "host_key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def trust(self, address: str, port: int) -> None:
        """Write the known_hosts file that knows this machine alone."""
        self.known_hosts.write_text(self.known(address, port))

    def known(self, address: str, port: int) -> str:
        """The line of a known_hosts file that knows this machine at an address."""
        kind, key = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return f"[{address}]:{port} {kind} {key}\n"


def identity(folder: Path) -> Identity:
    """The identity in a folder; made when it is not there yet."""
    who = Identity(folder)
    with locked(folder / "lock"):
        for key in (who.client_key, who.host_key):
            if not key.with_suffix(".pub").exists():
                key.unlink(missing_ok=True)
                run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(key))
        if not (folder / "machine-id").exists():
            # systemd wants a random version 4 UUID without its dashes.
            number = bytearray(os.urandom(16))
            number[6], number[8] = number[6] & 0x0F | 0x40, number[8] & 0x3F | 0x80
            (folder / "machine-id").write_text(number.hex() + "\n")
    return who


def own(who: Identity, hostname: str) -> dict[str, File]:
    """The files that make a machine itself, by path: no two machines have them alike."""
    return {
        "/etc/machine-id": File((who.machine_id + "\n").encode(), 0o444),
        "/etc/hostname": File(f"{hostname}\n".encode()),
        "/etc/hosts": File(f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost\n".encode()),
        "/etc/ssh/ssh_host_ed25519_key": File(who.host_key.read_bytes(), 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": File(who.host_key.with_suffix(".pub").read_bytes()),
        "/etc/ssh/authorized_keys/all": File(who.client_key.with_suffix(".pub").read_bytes()),
    }


def common(who: Identity, hostname: str) -> dict[str, File]:
    """The files that every machine gets, by path."""
    files = {
        **own(who, hostname),
        "/etc/ssh/sshd_config.d/lab.conf": File(_SSHD),
        "/etc/systemd/journald.conf.d/lab.conf": File(
            b"[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nSystemMaxUse=200M\n"
        ),
        "/etc/systemd/system.conf.d/lab.conf": File(_MANAGER),
        "/etc/systemd/system/default.target": File(link="/usr/lib/systemd/system/multi-user.target"),
        f"/etc/systemd/system/{SERVICE}": File(_guest("sglang-qwen.service")),
        **_stand_in(),
        "/var/log/journal/.keep": File(),  # the folder is what makes the journal outlive a boot
        **mask(_NOT_NEEDED),
        **wanted_by("multi-user.target", SERVICE),
        **wanted_by("multi-user.target", "ssh.service", unit="/usr/lib/systemd/system/ssh.service"),
    }
    return files


# One file of keys for everybody: it spares a home folder each, and sshd insists that nobody but root can write there.
_SSHD = b"""\
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys/all
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
MaxStartups 200:30:400
MaxSessions 64
"""


_JOURNALD = b"[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nSystemMaxUse=200M\n"
_MANAGER = b"[Manager]\nDefaultTimeoutStartSec=60s\nDefaultTimeoutStopSec=15s\n"


def _stand_in() -> dict[str, File]:
    """The stand-in for SGLang as an installed package, which a look from outside finds with a version."""
    where = "/opt/sglang-stand-in"
    about = f"Metadata-Version: 2.1\nName: sglang\nVersion: {SGLANG}\nSummary: A stand-in, not SGLang.\n"
    files = {
        f"{where}/sglang/__init__.py": File(b'"""A stand-in, not SGLang."""\n'),
        f"{where}/sglang/launch_server.py": File(_guest("launch_server.py")),
        f"{where}/sglang-{SGLANG}.dist-info/METADATA": File(about.encode()),
    }
    for source in resources.files("proofbook.lab.standin").iterdir():
        if source.name.endswith((".py", ".json")):
            files[f"{where}/sglang/standin/{source.name}"] = File(source.read_bytes())
    return files


def _guest(name: str) -> bytes:
    return (resources.files("proofbook.lab.real.guest") / name).read_bytes()


def mask(units: Iterable[str]) -> dict[str, File]:
    return {f"/etc/systemd/system/{unit}": File(link="/dev/null") for unit in units}


def wanted_by(target: str, name: str, *, unit: str = "") -> dict[str, File]:
    """A unit that is enabled, as ``systemctl enable`` does it."""
    return {f"/etc/systemd/system/{target}.wants/{name}": File(link=unit or f"/etc/systemd/system/{name}")}


def write(root: Path, files: Mapping[str, File]) -> None:
    """Write files below a folder, owned by root; what is there is replaced."""
    for path, file in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if file.link:
            target.symlink_to(file.link)
        else:
            target.write_bytes(file.content)
            target.chmod(file.mode)


#: The accounts that a machine has beside root.
LOGINS = tuple(name for name, _, _ in USERS)

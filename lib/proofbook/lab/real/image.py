"""The one recipe of the machines' file system: Debian, small, without documentation, with the lab's users.

A root file system is a folder in the cache, named after a digest of everything that went into it; another recipe makes another
folder. It holds no key and no machine-id: each machine gets its own when it starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from proofbook.errors import LabError
from proofbook.lab.real import debian, packages
from proofbook.lab.real.places import Places, locked

__all__ = ["PASSWORD", "UNSAFE_IO", "contained", "has_rootfs", "remove_others", "rootfs", "use"]

#: What ``careful`` types for sudo. No secret: the machines answer on loopback only, and their sshd takes keys alone.
PASSWORD = "proofbook-lab"

#: name, login shell, what it is for
USERS = (
    ("ops", "/bin/bash", "sudo without a password"),
    ("careful", "/bin/bash", "sudo with a password"),
    ("plain", "/bin/bash", "no sudo, no journal group"),
    ("dash", "/bin/dash", "sudo without a password, a POSIX shell"),
    ("csh", "/bin/tcsh", "sudo without a password, no POSIX shell"),
)

_SUDOERS = """\
ops ALL=(ALL:ALL) NOPASSWD: ALL
dash ALL=(ALL:ALL) NOPASSWD: ALL
csh ALL=(ALL:ALL) NOPASSWD: ALL
careful ALL=(ALL:ALL) ALL
"""

#: dpkg does not wait for the disk: a tree that a crash cut short is thrown away as a whole.
UNSAFE_IO = "--dpkgopt=force-unsafe-io"
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/i18n/*", "/usr/share/info/*")


def _customize() -> str:
    """The program that mmdebstrap runs on the finished tree; ``$1`` is its root."""
    users = "\n".join(f'chroot "$1" useradd --create-home --shell {shell} --comment {why!r} {name}' for name, shell, why in USERS)
    return f"""\
set -eu
{users}
printf 'careful:{PASSWORD}\\n' | chroot "$1" chpasswd
cat > "$1/etc/sudoers.d/lab" <<'END'
{_SUDOERS}END
chmod 440 "$1/etc/sudoers.d/lab"
rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/machine-id" "$1/etc/hostname" "$1/var/lib/dbus/machine-id"
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/log/*.log "$1"/var/log/apt
touch "$1/etc/.updated" "$1/var/.updated"
"""


def _digest(suite: str) -> str:
    made_of = "\0".join((suite, *packages.GUEST, *_LEFT_OUT, _customize()))
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


def _folder(suite: str, places: Places) -> Path:
    return places.cache / f"rootfs-{suite}-{_digest(suite)}"


def has_rootfs(suite: str, places: Places) -> bool:
    return _folder(suite, places).is_dir()


def rootfs(suite: str, places: Places, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a release's root file system; built when there is none for this recipe. Raises LabError.

    Older ones of the same release go away, unless a machine uses one.
    """
    folder = _folder(suite, places)
    with locked(places.cache / "rootfs.lock"):
        if folder.is_dir():
            return folder
        for half in places.cache.glob("rootfs-*.part"):  # of a build that was killed
            shutil.rmtree(half)
        say(f"building a {suite} file system of {len(packages.GUEST)} packages and what they need; once, about a minute")
        began = time.monotonic()
        _build(suite, folder, places.cache / f"rootfs-{suite}.log")
        say(f"built {folder} in {time.monotonic() - began:.0f} s")
        remove_others(folder, f"rootfs-{suite}-*")
    return folder


def remove_others(folder: Path, pattern: str) -> None:
    """Remove the builds beside ``folder`` that match, but for those that a machine uses."""
    for old in folder.parent.glob(pattern):
        if old.is_dir() and old != folder and not _in_use(old):
            shutil.rmtree(old)
            _lock_of(old).unlink(missing_ok=True)


def _build(suite: str, folder: Path, log: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    hook = part.with_name(part.name + ".sh")
    scratch = part.with_name(part.name.removesuffix(".part") + ".tmp.part")
    scratch.mkdir(exist_ok=True)
    hook.write_text(_customize())
    argv = [
        packages.tool("mmdebstrap"),
        "--variant=minbase",
        "--mode=root",
        f"--include={','.join(packages.GUEST)}",
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--aptopt={option}" for option in debian.apt_options()),
        UNSAFE_IO,
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        f'--customize-hook=sh {hook} "$1"',
        suite,
        str(part),
        *debian.mirror().lines(suite),
    ]
    try:
        with log.open("wb") as out:
            done = subprocess.run(
                contained(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=False,
                env={**os.environ, "PATH": packages.search_path(), "TMPDIR": str(scratch)},
            )
    finally:
        hook.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise LabError(f"mmdebstrap made no {suite} file system: {last}", hint=f"see {log}")
    part.rename(folder)


def contained(argv: list[str], *more: str) -> list[str]:
    """``argv`` in mount and process namespaces of its own: when whoever started it dies, also by kill -9, it all goes away."""
    setpriv, unshare = packages.tool("setpriv"), packages.tool("unshare")
    return [setpriv, "--pdeathsig", "KILL", unshare, "--mount", "--propagation", "private", *more,
            "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--", *argv]  # fmt: skip


def use(folder: Path) -> int:
    """Mark a root file system or a kernel as used for as long as this process lives, or the returned descriptor is open."""
    descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _in_use(folder: Path) -> bool:
    with os.fdopen(os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".used")

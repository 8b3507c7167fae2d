"""A Debian kernel for the virtual machines: uncompressed, with a small initrd, few modules, and the stand-in driver built for it.

Debian's own initrd is too big to boot in time under software emulation, and so is unpacking the kernel inside the machine.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from proofbook.errors import LabError
from proofbook.lab.real import debian, image, packages
from proofbook.lab.real.places import Places, locked
from proofbook.lab.real.processes import run

__all__ = ["Kernel", "kernel"]

#: What a machine needs to find its disk, before its root file system is there.
_EARLY = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
#: What it has besides: its network, and drivers for every device of the topologies.
_LATER = ("virtio_net", "virtio_rng", "autofs4", "e1000e", "nvme", "vfio-pci", "vfio_iommu_type1", "sch_netem", "ipmi_devintf")

#: Mounts the root file system as the command line says, `ro` as real hosts do, and hands over.
_INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
while read module; do /bin/busybox insmod /modules/$module; done < /modules/list
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 500 ]; do /bin/busybox usleep 20000; tries=$((tries + 1)); done
mode=rw
for word in $(/bin/busybox cat /proc/cmdline); do [ "$word" = ro ] && mode=ro; done
/bin/busybox mount -t ext4 -o $mode,noatime /dev/vda /root || exec /bin/busybox sh
for mount in dev proc sys; do /bin/busybox mount --move /$mount /root/$mount; done
exec /bin/busybox switch_root /root /sbin/init
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in the cache."""

    folder: Path

    @property
    def release(self) -> str:
        return (self.folder / "release").read_text().strip()

    @property
    def image(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def modules(self) -> Path:
        """A tree that goes over the root file system: usr/lib/modules/<release>."""
        return self.folder / "tree"


def kernel(suite: str, places: Places, say: Callable[[str], None] = lambda text: None) -> Kernel:
    """The kernel of a release, built when there is none for this recipe. Raises LabError.

    Older ones of the same release go away, unless a machine uses one.
    """
    folder = places.cache / f"kernel-{suite}-{_digest(suite)}"
    with locked(places.cache / "kernel.lock"):
        if not folder.is_dir():
            for half in places.cache.glob("kernel-*.part"):  # of a build that was killed
                shutil.rmtree(half)
            say(f"building a kernel of {suite}, with its initrd and the stand-in driver; once, about two minutes")
            began = time.monotonic()
            _build(suite, folder, places.cache / f"kernel-{suite}.log")
            say(f"built {folder} in {time.monotonic() - began:.0f} s")
            image.remove_others(folder, f"kernel-{suite}-*")
    return Kernel(folder)


def _digest(suite: str) -> str:
    made_of = "\0".join((suite, *_EARLY, *_LATER, _INIT, _source(), _workshop("")))
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


def _source() -> str:
    return (resources.files("proofbook.lab.real.guest") / "nvidia.c").read_text()


def _workshop(out: str) -> str:
    """The program that builds the module and fetches the kernel in a throw-away system of that release; ``$1`` is its root."""
    return f"""\
set -eu
mkdir "$1/work"
cp {out}/nvidia.c "$1/work/"
echo 'obj-m := nvidia.o' > "$1/work/Makefile"
chroot "$1" sh -euc '
  build=$(ls -d /lib/modules/*/build | tail -n 1)
  release=$(basename "$(dirname "$build")")
  make -C "$build" M=/work modules
  cd /work
  apt-get download "linux-image-$release"
  echo "$release" > release
'
cp "$1"/work/nvidia.ko "$1"/work/release "$1"/work/*.deb "$1/bin/busybox" {out}/
"""


def _build(suite: str, folder: Path, log: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    part.mkdir()
    try:
        (part / "nvidia.c").write_text(_source())
        (part / "workshop.sh").write_text(_workshop(str(part)))
        argv = [
            packages.tool("mmdebstrap"),
            "--variant=apt",
            "--mode=root",
            "--format=null",
            "--include=linux-headers-amd64,gcc,make,kmod,busybox-static",
            '--aptopt=Acquire::Languages "none"',
            '--aptopt=APT::Install-Recommends "false"',
            *(f"--aptopt={option}" for option in debian.apt_options()),
            image.UNSAFE_IO,
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            f'--customize-hook=sh {part / "workshop.sh"} "$1"',
            suite,
            "-",
            *debian.mirror().lines(suite),
        ]
        # The throw-away system lies in the same folder, so that nothing of it stays when this is killed.
        environment = {**os.environ, "PATH": packages.search_path(), "TMPDIR": str(part)}
        with log.open("wb") as out:
            done = subprocess.run(
                image.contained(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False, env=environment
            )
        if done.returncode != 0:
            last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-4:])
            raise LabError(f"no kernel of {suite} could be made: {last}", hint=f"see {log}")
        _assemble(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _assemble(part: Path) -> None:
    """From the package and the built module: vmlinux, initrd and the module tree; the rest goes away."""
    release = (part / "release").read_text().strip()
    (package,) = part.glob("*.deb")
    whole = part / "whole"
    run("dpkg-deb", "-x", str(package), str(whole))
    _merge_usr(whole)
    run("depmod", "-b", str(whole), release)
    (part / "vmlinux").write_bytes(_uncompressed((whole / "boot" / f"vmlinuz-{release}").read_bytes()))
    modules = part / "tree" / "usr" / "lib" / "modules" / release
    modules.mkdir(parents=True)
    source = whole / "lib" / "modules" / release
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / name, modules / name)
    for module in _with_needs(whole, release, (*_EARLY, *_LATER)):
        target = modules / module.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, target)
    (modules / "updates").mkdir()
    shutil.copy(part / "nvidia.ko", modules / "updates" / "nvidia.ko")
    _merge_usr(part / "tree")
    run("depmod", "-b", str(part / "tree"), release)
    (part / "tree" / "lib").unlink()
    (part / "initrd").write_bytes(_initrd(part / "busybox", _with_needs(whole, release, _EARLY)))
    shutil.rmtree(whole)
    package.unlink()


def _merge_usr(root: Path) -> None:
    """kmod looks below lib, newer packages lie below usr/lib: let both paths lead to the same place."""
    (root / "usr" / "lib").mkdir(parents=True, exist_ok=True)
    if (root / "lib").is_dir() and not (root / "lib").is_symlink():
        for entry in (root / "lib").iterdir():
            entry.rename(root / "usr" / "lib" / entry.name)
        (root / "lib").rmdir()
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")


def _with_needs(root: Path, release: str, names: tuple[str, ...]) -> list[Path]:
    """The files of modules and of all that they need, in the order in which they are loaded; what is built in needs none."""
    found: dict[Path, None] = {}
    for name in names:
        argv = [packages.tool("modprobe"), "-d", str(root), "-S", release, "--show-depends", name]
        said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        found.update((Path(line.split()[1]).resolve(), None) for line in said.splitlines() if line.startswith("insmod "))
    source = (root / "lib" / "modules" / release).resolve()
    return [root / "lib" / "modules" / release / path.relative_to(source) for path in found]


def _initrd(busybox: Path, modules: list[Path]) -> bytes:
    files: dict[str, tuple[int, bytes]] = dict.fromkeys(("bin", "dev", "proc", "sys", "root", "modules"), (16877, b""))
    files["bin/busybox"] = (0o100755, busybox.read_bytes())
    files["init"] = (0o100755, _INIT.encode())
    names = []
    for module in modules:
        data = module.read_bytes()
        name = module.name.removesuffix(".xz")
        files[f"modules/{name}"] = (0o100644, lzma.decompress(data) if module.suffix == ".xz" else data)
        names.append(name)
    files["modules/list"] = (0o100644, "".join(f"{name}\n" for name in names).encode())
    return b"".join(_cpio(files))


def _cpio(files: dict[str, tuple[int, bytes]]) -> Iterator[bytes]:
    """The archive format that the kernel reads ("newc"): a header of hexadecimal numbers, name and content padded to four."""
    for number, (name, (mode, data)) in enumerate({**files, "TRAILER!!!": (0, b"")}.items(), 1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        entry = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        entry += b"\0" * (-len(entry) % 4)
        yield entry + data + b"\0" * (-len(data) % 4)


def _uncompressed(bzimage: bytes) -> bytes:
    """The ELF kernel inside a bzImage; its place is told by the boot protocol's header. Raises LabError."""
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = (int.from_bytes(bzimage[at : at + 4], "little") for at in (0x248, 0x24C))
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        kernel = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        kernel = zlib.decompressobj(31).decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd"):
        kernel = run("zstd", "-dcq", stdin=payload[:-4])  # the last four bytes are the uncompressed size
    else:
        raise LabError(f"the kernel is compressed in a way that the lab does not know: {payload[:6].hex()}")
    if not kernel.startswith(b"\x7fELF"):
        raise LabError("what came out of the kernel's image is no ELF file")
    return kernel

"""Commands that carry a program of this folder, and what their output means."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proofbook.errors import CannotTell
from proofbook.model import Command, Result


def _program(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


READ_FILES = _program("read_files.sh")
OPEN_DEVICES = _program("open_devices.sh")
CU_INIT = _program("cu_init.py")
PUT = _program("put.sh")


@dataclass(frozen=True, slots=True)
class Files:
    """What :func:`read_files` found. ``files``: path to content (lines joined by newlines, no final one)."""

    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    dirs: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def get(self, path: str) -> str:
        """The content of ``path``. Raises CannotTell that says why there is none."""
        if path in self.files:
            return self.files[path]
        if path in self.unreadable:
            raise CannotTell(f"{path} cannot be read: {self.unreadable[path]}")
        if path in self.absent:
            raise CannotTell(f"{path} does not exist")
        if path in self.links:
            raise CannotTell(f"{path} is a link to {self.links[path]}")
        if path in self.dirs:
            raise CannotTell(f"{path} is a folder")
        raise CannotTell(f"{path} was not asked for")


def read_files(*patterns: str, root: bool = False, timeout_s: float = 20.0) -> Command:
    """Read text files (sysfs, procfs) by path or glob pattern, without a process a file."""
    return Command(("sh", "-c", READ_FILES, "proofbook-read-files", *patterns), timeout_s=timeout_s, root=root)


def parse_files(result: Result) -> Files:
    """Read the answer to :func:`read_files`. Raises CannotTell when there is none, or when it is not one.

    ::

        F /sys/bus/pci/devices/0000:41:00.0/vendor
        |0x10de
        L /sys/bus/pci/devices/0000:41:00.0/driver
        |../../../../bus/pci/drivers/nvidia
        D /sys/kernel/iommu_groups/12
        E /sys/bus/pci/devices/0000:41:00.0/vpd
        |Input/output error
        N /sys/class/nvme/*
    """
    lines = result.expect().split("\n")
    found: dict[str, dict[str, list[str]]] = {"F": {}, "L": {}, "E": {}, "D": {}, "N": {}}
    body: list[str] | None = None
    for line in lines[:-1]:
        if line.startswith("|") and body is not None:
            body.append(line[1:])
        elif line[:1] in found and line[1:2] == " ":
            body = found[line[0]].setdefault(line[2:], [])
            body.clear()
        else:
            raise CannotTell(f"not an answer of read_files: {line[:200]!r}")
    if lines[-1]:
        raise CannotTell("the answer of read_files was cut")
    return Files(
        files={path: "\n".join(text) for path, text in found["F"].items()},
        links={path: "\n".join(text) for path, text in found["L"].items()},
        dirs=frozenset(found["D"]),
        unreadable={path: "\n".join(text) for path, text in found["E"].items()},
        absent=tuple(found["N"]),
    )


def open_devices(*paths: str, root: bool = False, timeout_s: float = 20.0) -> Command:
    """Try to open each device node for reading and writing, as a program that uses it would."""
    return Command(("sh", "-c", OPEN_DEVICES, "proofbook-open-devices", *paths), timeout_s=timeout_s, root=root)


def parse_open_devices(result: Result) -> dict[str, str]:
    """Path to ``"ok"``, ``"absent"`` or the reason why it cannot be opened ("Operation not permitted").

    Raises CannotTell when there is no answer for every path that was asked.
    """
    answer: dict[str, str] = {}
    asked = result.command.argv[result.command.argv.index("proofbook-open-devices") + 1 :]
    said = result.expect().splitlines()
    if len(said) != len(asked):
        raise CannotTell(f"{len(said)} answers for {len(asked)} device nodes")
    for path, line in zip(asked, said, strict=True):
        kind, _, rest = line.partition(" ")
        if kind in ("ok", "absent") and rest == path:
            answer[path] = kind
        elif kind == "error" and rest.startswith(path + " "):
            answer[path] = rest[len(path) + 1 :]
        else:
            raise CannotTell(f"not an answer of open_devices: {line[:200]!r}")
    return answer


@dataclass(frozen=True, slots=True)
class CuInit:
    """What the CUDA driver library says: ``code`` 0 is success; None where it could not be called (see ``error``)."""

    library: str | None
    code: int | None
    devices: int | None
    error: str | None


def cu_init(*, root: bool = False, timeout_s: float = 30.0) -> Command:
    """Call cuInit(0) and cuDeviceGetCount in a process of its own with a deadline of 15 s. Needs python3 there."""
    return Command(("python3", "-c", CU_INIT), timeout_s=timeout_s, root=root)


def parse_cu_init(result: Result) -> CuInit:
    """Read the answer to :func:`cu_init`. Raises CannotTell when there is none."""
    text = result.expect()
    try:
        said = json.loads(text)
        return CuInit(said["library"], said["cuInit"], said["devices"], said["error"])
    except (ValueError, KeyError, TypeError) as error:
        raise CannotTell(f"not an answer of cu_init: {text[:200]!r}") from error


def put_command(data: bytes, path: str, *, mode: int, backup: bool, root: bool, timeout_s: float = 60.0) -> Command:
    """Write ``data`` to ``path`` atomically; see put.sh."""
    if not re.match(r"/.*[^/]$", path, re.DOTALL):
        raise ValueError(f"the path of a file must be absolute: {path!r}")
    digest = hashlib.sha256(data).hexdigest()
    argv = ("sh", "-c", PUT, "proofbook-put", path, f"{mode:04o}", str(int(backup)), digest)
    return Command(argv, timeout_s=timeout_s, root=root, stdin=data)

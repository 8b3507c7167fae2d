"""Memory that a model needs: of the GPUs, who holds it, and whether a checkpoint lies in the page cache.

nvidia-smi says MiB; SGLang's log says "GB" and means GiB (2**30 bytes). Everything here is GiB or bytes, and says which.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command, pci_address
from proofbook.probes.base import inside, prefer_root, text_of
from proofbook.probes.nvidia import ComputeApp, ComputeApps

__all__ = ["CacheFacts", "GpuMemory", "GpuProcess", "GpuProcesses", "MemoryRow", "PageCache", "clock_ticks", "list_shards"]

_QUERY = command(
    "nvidia-smi",
    "--query-gpu=index,pci.bus_id,uuid,name,memory.total,memory.used,memory.free",
    "--format=csv,noheader,nounits",
    timeout_s=60,
)
#: /proc/PID/stat counts in USER_HZ, which is 100 on every architecture that has GPUs of this kind.
clock_ticks = 100.0


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of one GPU, in MiB. ``reserved`` (total - used - free) is the driver's own."""

    index: int
    pci: str
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    free_mib: int

    @property
    def free_gib(self) -> float:
        return self.free_mib / 1024

    @property
    def total_gib(self) -> float:
        return self.total_mib / 1024


@dataclass(frozen=True)
class GpuMemory(Probe[tuple[MemoryRow, ...]]):
    """The memory of every GPU: ``0, 00000000:01:00.0, GPU-…, NVIDIA RTX PRO 6000 …, 97887, 91320, 5940``."""

    name: ClassVar[str] = "memory.GpuMemory"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[MemoryRow, ...]]:
        (answer,) = yield [_QUERY]
        rows = []
        for line in text_of(answer).splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != 7 or not all(c.isdecimal() for c in (cells[0], *cells[4:])):
                raise CannotTell(f"nvidia-smi said a row without numbers, so its table is not whole: {line[:160]!r}")
            rows.append(MemoryRow(int(cells[0]), pci_address(cells[1]), cells[2], cells[3], *(int(c) for c in cells[4:])))
        if not rows:
            raise CannotTell("nvidia-smi printed no GPU")
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU, as the machine's own kernel knows it.

    ``cgroup`` is its path there, e.g. ``/lxc/102/ns/system.slice/sglang-qwen.service``; ``inner_pid`` is its number in the
    innermost PID namespace. ``started_s`` counts from the boot. "" and None where the process was gone when we looked.
    """

    pid: int
    pci: str
    process: str
    used_mib: int | None
    cgroup: str
    inner_pid: int | None
    started_s: float | None

    def of_unit(self, unit: str, container: ContainerSpec | None) -> bool:
        """Whether it runs inside the control group of ``unit`` in that container (None: on the host itself)."""
        parts = self.cgroup.split("/")
        if unit not in parts:
            return False
        above = parts[: parts.index(unit)]
        if container is None:
            return not any(re.match(r"(lxc|docker|libpod|machine)", part) for part in above)
        ids = {container.name, container.tool_id}
        name = "|".join(map(re.escape, ids))
        named = [part for part in above if re.search(rf"(^|[.@-])({name})([.-]|$)", part)]
        # WHY the second half: docker and podman name the group by a hash that the inventory does not know.
        return bool(named) or (container.kind in ("docker", "podman") and any(re.search(r"docker|libpod", p) for p in above))


@dataclass(frozen=True)
class GpuProcesses(Probe[tuple[GpuProcess, ...]]):
    """Who computes on the GPUs, with the control group of each: the only honest way to say whose a process is.

    Asked on the machine that owns the kernel: in a container nvidia-smi shows no processes, or numbers that mean nothing.
    """

    name: ClassVar[str] = "memory.GpuProcesses"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[GpuProcess, ...]]:
        apps = yield from ComputeApps().ask()
        if not apps:
            return ()
        paths = [f"/proc/{pid}/{name}" for pid in dict.fromkeys(a.pid for a in apps) for name in ("cgroup", "status", "stat")]
        (answer,) = yield from prefer_root(remote.read_files(*paths, root=True))
        text_of(answer)
        files = remote.parse_files(answer)
        return tuple(_gpu_process(app, files) for app in apps)


def _gpu_process(app: ComputeApp, files: remote.Files) -> GpuProcess:
    cgroup = files.files.get(f"/proc/{app.pid}/cgroup", "")
    status = files.files.get(f"/proc/{app.pid}/status", "")
    numbers = re.search(r"^NSpid:\s*(.+)$", status, re.MULTILINE)
    return GpuProcess(
        pid=app.pid,
        pci=app.pci,
        process=app.process,
        used_mib=app.used_mib,
        cgroup=_cgroup_path(cgroup),
        inner_pid=int(numbers[1].split()[-1]) if numbers else None,
        started_s=start_time(files.files.get(f"/proc/{app.pid}/stat", "")),
    )


def _cgroup_path(text: str) -> str:
    """The path in the unified hierarchy (``0::/…``), else in systemd's own (``1:name=systemd:/…``)."""
    by_hierarchy = {}
    for line in text.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        by_hierarchy["unified" if number == "0" else controllers] = path
    unified = by_hierarchy.get("unified", "")
    return unified if unified not in ("", "/") else by_hierarchy.get("name=systemd", unified)


def start_time(stat: str) -> float | None:
    """Seconds from the boot to the start of a process, from its /proc/PID/stat; None when that is no such line."""
    # WHY rpartition: the second field is the name in parentheses, and a name may hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) / clock_ticks if len(fields) > 19 and fields[19].isdecimal() else None


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """How much of a checkpoint lies in the page cache. ``resident`` is None (bytes) where nothing on the machine can tell;
    ``at_most`` is then the page cache's whole size, an upper bound.
    """

    path: str
    size: int  # bytes of all shards
    shards: int
    resident: int | None
    why_not: str
    at_most: int | None
    memory_total: int | None

    @property
    def share(self) -> float | None:
        """0 to 1."""
        return None if self.resident is None or not self.size else self.resident / self.size


@dataclass(frozen=True)
class PageCache(Probe[CacheFacts]):
    """Whether a checkpoint would be read from memory: ``fincore`` says ``5036572672 5036572672 /models/q/model-1.safetensors``.

    WHY it matters: a start that is much faster than the last one is suspicious until something explains it.
    """

    path: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "memory.PageCache"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], CacheFacts]:
        if not self.path.startswith("/"):
            raise CannotTell(f"{self.path} is no folder of the machine, so its page cache cannot be asked for")
        listed, meminfo = yield [
            inside(self.container, list_shards(self.path)),
            inside(self.container, remote.read_files("/proc/meminfo")),
        ]
        shards = read_shards(listed)
        if not shards:
            raise CannotTell(f"there are no *.safetensors in {self.path}")
        memory = _meminfo(remote.parse_files(meminfo))
        files = [f"{self.path.rstrip('/')}/{name}" for name in shards]
        (answer,) = yield [inside(self.container, command("fincore", "-b", "-n", "-o", "RES,SIZE,FILE", *files, timeout_s=60))]
        resident, why_not = None, ""
        try:
            resident = _resident(text_of(answer), len(files))
        except CannotTell as why:
            why_not = str(why)
        return CacheFacts(
            self.path, sum(shards.values()), len(shards), resident, why_not, memory.get("Cached"), memory.get("MemTotal")
        )


def list_shards(path: str) -> Command:
    """The weight files of a checkpoint with their sizes, links followed: ``4999999999 model-00001-of-00039.safetensors``."""
    return command("find", "-L", path, "-maxdepth", "1", "-type", "f", "-name", "*.safetensors", "-printf", "%s %f\\n")


def read_shards(result: Result) -> dict[str, int]:
    """Name to size in bytes, by name. Raises CannotTell when the folder is not there, or the answer is none."""
    shards = {}
    for line in text_of(result).splitlines():
        size, blank, name = line.partition(" ")
        if not blank or not size.isdecimal():
            raise CannotTell(f"find said a line that is no file: {line[:160]!r}")
        shards[name] = int(size)
    return dict(sorted(shards.items()))


def _meminfo(files: remote.Files) -> Mapping[str, int]:
    """Bytes by name."""
    lines = files.files.get("/proc/meminfo", "").splitlines()
    pairs = (re.match(r"(\w+):\s+(\d+) kB", line) for line in lines)
    return {m[1]: int(m[2]) * 1024 for m in pairs if m}


def _resident(text: str, expected: int) -> int:
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.strip()]
    if len(lines) != expected or not all(len(x) == 3 and x[0].isdecimal() for x in lines):
        raise CannotTell(f"fincore said {len(lines)} lines for {expected} files")
    return sum(int(x[0]) for x in lines)

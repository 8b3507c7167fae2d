"""What the machine says of peer-to-peer between its GPUs: claims, and where they are on the bus. None of it is a proof."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, command, pci_address
from proofbook.probes.base import said, text_of

# Checks judge what the probe program said; they know probes, not the programs.
from proofbook.remote.p2p import CopyResult as CopyResult
from proofbook.remote.p2p import LocalCopy as LocalCopy
from proofbook.remote.p2p import P2pRun as P2pRun
from proofbook.remote.p2p import Window as Window
from proofbook.remote.p2p import WindowLine as WindowLine

__all__ = [
    "CopyResult",
    "LocalCopy",
    "P2pRun",
    "PeerConfig",
    "PeerConfigFacts",
    "Topology",
    "TopologyFacts",
    "Window",
    "WindowLine",
]

Pair = tuple[str, str]

#: r reads, w writes, n NVLink, a atomics, p "prop" (over PCIe), as ``nvidia-smi topo -p2p`` names them.
CAPABILITIES = ("r", "w", "n", "a", "p")
_INDEX = command("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader", timeout_s=60)
_MATRIX = command("nvidia-smi", "topo", "-m", timeout_s=60)
_STATUS = tuple(command("nvidia-smi", "topo", "-p2p", capability, timeout_s=60) for capability in CAPABILITIES)
_DETAILS = command("nvidia-smi", "-q", "-x", timeout_s=60)
_ACS = command("lspci", "-Dvvv", timeout_s=60, root=True)
_SYSFS = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class TopologyFacts:
    """Where the GPUs are, and what is claimed of them. Keys are PCI addresses, and ordered pairs of them.

    ``links``: NV2, PIX, PXB, PHB, NODE or SYS. ``status``: by capability (r, w, n, a, p) OK, CNS, GNS, TNS, NS, DR or U.
    ``bars``: memory ranges, first and last byte. ``upstream``: the bridges above it, from the root down. ``acs``: control bits
    that are on, of each device that has the capability. ``limit_gbps``: what its link carries one way at most, GB/s.
    What could not be had is missing, and ``problems`` says why under the name of its field.
    """

    gpus: tuple[str, ...]
    links: Mapping[Pair, str] = field(default_factory=dict)
    status: Mapping[str, Mapping[Pair, str]] = field(default_factory=dict)
    bars: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    upstream: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numa: Mapping[str, int] = field(default_factory=dict)
    acs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    limit_gbps: Mapping[str, float] = field(default_factory=dict)
    bar1_mib: Mapping[str, int] = field(default_factory=dict)
    framebuffer_mib: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    def owner(self, address: int) -> str:
        """The device in whose BAR an address lies, "" when in none that is known."""
        inside = (pci for pci, ranges in self.bars.items() if any(first <= address <= last for first, last in ranges))
        return next(inside, "")


@dataclass(frozen=True)
class Topology(Probe[TopologyFacts]):
    """How the GPUs hang together, by PCI address.

    ``GPU0  X  NODE  SYS …`` of ``topo -m``, ``GPU0  X  OK  CNS …`` of ``topo -p2p r``, ``ACSCtl: SrcValid+ ReqRedir-`` of a
    bridge, ``0x… 0x… 0x14220c`` of a BAR. WHY the index is asked for: topo prints GPU0, GPU1 and no address, and a lost GPU
    leaves a hole in them.
    """

    name: ClassVar[str] = "p2p.Topology"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], TopologyFacts]:
        names = ("vendor", "class", "resource", "numa_node", "max_link_speed", "max_link_width")
        sysfs = remote.read_files(f"{_SYSFS}/*", *(f"{_SYSFS}/*/{name}" for name in names))
        index, matrix, *status, details, acs, files = yield [_INDEX, _MATRIX, *_STATUS, _DETAILS, _ACS, sysfs]
        return _topology(index, matrix, status, details, acs, remote.parse_files(files))


@dataclass(frozen=True, slots=True)
class PeerConfigFacts:
    """The module options that decide over peer-to-peer, along their way from the text to the running module.

    ``text``: what the files under /etc/modprobe.d and the kernel command line say, e.g. {"NVreg_DmaRemapPeerMmio": "1"}; a key
    that is absent was never said. ``running``: /proc/driver/nvidia/params. ``initramfs``: files of /etc/modprobe.d in the image
    that this kernel started from; None: not known, ``problems["initramfs"]`` says why.

    WHY the text matters: DmaRemapPeerMmio is 1 by default, so reading 1 back does not show that a file took effect.
    """

    text: Mapping[str, str]
    sources: Mapping[str, str]  # key -> the file, or "/proc/cmdline", that said it last
    running: Mapping[str, str]
    initramfs: tuple[str, ...] | None
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def remaps_peers(self) -> bool | None:
        """Whether the running module maps peers' MMIO through the IOMMU; None when it does not say."""
        return {"1": True, "0": False}.get(self.running.get("DmaRemapPeerMmio", ""))

    @property
    def remap_is_default(self) -> bool:
        """Nobody asked for it: what runs is the driver's own choice."""
        return "NVreg_DmaRemapPeerMmio" not in self.text


@dataclass(frozen=True)
class PeerConfig(Probe[PeerConfigFacts]):
    """``options nvidia NVreg_DmaRemapPeerMmio=1`` in a file, ``DmaRemapPeerMmio: 1`` in the running module, and between them."""

    name: ClassVar[str] = "p2p.PeerConfig"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], PeerConfigFacts]:
        params, cmdline = "/proc/driver/nvidia/params", "/proc/cmdline"
        answer, kernel = yield [
            remote.read_files("/etc/modprobe.d/*.conf", cmdline, params, root=True),
            command("uname", "-r"),
        ]
        files = remote.parse_files(answer)
        image = f"/boot/initrd.img-{text_of(kernel).strip()}"
        (listing,) = yield [command("lsinitramfs", image, timeout_s=60, root=True)]
        problems = dict(files.unreadable)
        initramfs: tuple[str, ...] | None = None
        try:
            initramfs = tuple(sorted(set(re.findall(r"^(?:.*/)?(etc/modprobe\.d/\S+)$", text_of(listing), re.MULTILINE))))
        except CannotTell as why:
            problems["initramfs"] = str(why)
        if params not in files.files:
            problems["running"] = f"{params} does not exist: the module is not loaded"
        text, sources = _options(files, cmdline)
        running = dict(re.findall(r'^(\w+): "?(.*?)"?$', files.files.get(params, ""), re.MULTILINE))
        return PeerConfigFacts(text, sources, running, initramfs, problems)


# ------------------------------------------------------------------------------------------------------------- reading


def _options(files: remote.Files, cmdline: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options of the nvidia module by key, the last word of each, and who said it. The command line comes last."""
    found: list[tuple[str, str, str]] = []
    for path in sorted(files.files):
        if path.startswith("/etc/modprobe.d/"):
            for line in files.files[path].splitlines():
                if re.match(r"\s*options\s+nvidia\s", line):
                    found += [(key, value, path) for key, value in re.findall(r'(NVreg_\w+)="?([^"\s]*)"?', line)]
    found += [(k, v, cmdline) for k, v in re.findall(r'\bnvidia\.(NVreg_\w+)="?([^"\s]*)"?', files.files.get(cmdline, ""))]
    return {key: value for key, value, _ in found}, {key: source for key, _, source in found}


def _topology(
    index: Result, matrix: Result, status: Sequence[Result], details: Result, acs: Result, files: remote.Files
) -> TopologyFacts:
    problems: dict[str, str] = {}

    def had(name: str, result: Result) -> str:
        try:
            return text_of(result)
        except CannotTell as why:
            problems[name] = str(why)
            return result.text  # a lost GPU ends nvidia-smi badly after it printed the others

    by_index = {
        f"GPU{number}": pci_address(address)
        for number, address in re.findall(r"^(\d+), ([0-9a-fA-F:.]+)$", had("gpus", index), re.MULTILINE)
    }
    if not by_index:
        raise CannotTell(f"nvidia-smi lists no GPU: {said(index) or index.trouble or 'it said nothing'}")
    devices = _by_device(files)
    gpus = tuple(sorted(by_index.values()))
    bar1, framebuffer = _memory(had("bar1_mib", details))
    for name, values in (("bars", "resource"), ("numa", "numa_node")):
        if not any(values in found for found in devices.values()):
            problems.setdefault(name, f"sysfs has no {values} file that can be read")
    return TopologyFacts(
        gpus=gpus,
        links=_table(had("links", matrix), by_index),
        status={
            capability: _table(had(f"status {capability}", result), by_index)
            for capability, result in zip(CAPABILITIES, status, strict=True)
        },
        bars={pci: _bars(found.get("resource", "")) for pci, found in devices.items() if found.get("resource")},
        upstream=_upstream(files),
        numa={pci: int(found["numa_node"]) for pci, found in devices.items() if found.get("numa_node", "-1") != "-1"},
        acs=_acs(had("acs", acs)),
        limit_gbps={pci: limit for pci in gpus if (limit := _limit(devices.get(pci, {})))},
        bar1_mib=bar1,
        framebuffer_mib=framebuffer,
        problems=problems,
    )


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def _table(text: str, by_index: Mapping[str, str]) -> dict[Pair, str]:
    """A matrix of nvidia-smi topo: its header begins with an escape sequence, its cells are parted by tabs."""
    found: dict[Pair, str] = {}
    columns: list[str] = []
    for line in _ESCAPES.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0] in by_index and columns:
            for column, cell in zip(columns, cells[1:], strict=False):  # further columns hold affinities
                if column in by_index and column != cells[0] and cell:
                    found[by_index[cells[0]], by_index[column]] = cell
        elif not cells[0] and any(re.fullmatch(r"GPU\d+", cell) for cell in cells):
            columns = [cell for cell in cells if cell]
    return found


def _by_device(files: remote.Files) -> dict[str, dict[str, str]]:
    devices: dict[str, dict[str, str]] = {}
    for path, value in files.files.items():
        folder, _, name = path.rpartition("/")
        if folder.rpartition("/")[0] == _SYSFS:
            devices.setdefault(pci_address(folder.rpartition("/")[2]), {})[name] = value.strip()
    return devices


def _bars(resource: str) -> tuple[tuple[int, int], ...]:
    """The memory ranges among the first six lines of a ``resource`` file: first byte, last byte, flags (0x200 is memory)."""
    ranges = []
    for line in resource.splitlines()[:6]:
        words = line.split()
        if len(words) == 3 and int(words[2], 16) & 0x200:
            ranges.append((int(words[0], 16), int(words[1], 16)))
    return tuple(ranges)


def _upstream(files: remote.Files) -> dict[str, tuple[str, ...]]:
    """The bridges above each device, from where the kernel's links lead: ``…/pci0000:00/0000:00:01.1/0000:01:00.0``."""
    found = {}
    for path, target in files.links.items():
        if path.startswith(_SYSFS + "/"):
            steps = re.findall(r"(?<=/)[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)", target)
            if steps:
                found[pci_address(steps[-1])] = tuple(pci_address(step) for step in steps[:-1])
    return found


def _acs(text: str) -> dict[str, frozenset[str]]:
    """Control bits that are on: ``ACSCtl: SrcValid+ TransBlk- ReqRedir+`` is {"SrcValid", "ReqRedir"}."""
    found = {}
    device = ""
    for line in text.splitlines():
        if head := re.match(r"([0-9a-fA-F:]+\.[0-7]) ", line):
            device = pci_address(head[1])
        elif device and (control := re.match(r"\s+ACSCtl:\s*(.*)", line)):
            found[device] = frozenset(re.findall(r"(\w+)\+", control[1]))
    return found


def _limit(found: Mapping[str, str]) -> float | None:
    """GB/s one way of a link at its best: 32 GT/s and 16 lanes carry 63.0 (128b/130b; 8b/10b up to 5 GT/s)."""
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", found.get("max_link_speed", ""))
    width = found.get("max_link_width", "")
    if not speed or not width.isdecimal() or not 0 < int(width) <= 32:
        return None
    coding = 128 / 130 if float(speed[1]) > 5 else 8 / 10
    return round(float(speed[1]) * int(width) * coding / 8, 3)


def _memory(xml: str) -> tuple[dict[str, int], dict[str, int]]:
    """Total BAR1 and framebuffer in MiB by GPU, from ``nvidia-smi -q -x``."""
    bar1: dict[str, int] = {}
    framebuffer: dict[str, int] = {}
    for gpu in re.split(r'<gpu id="', xml)[1:]:
        pci = pci_address(gpu.partition('"')[0])
        for name, into in (("bar1_memory_usage", bar1), ("fb_memory_usage", framebuffer)):
            if total := re.search(rf"<{name}>\s*<total>(\d+) MiB</total>", gpu):
                into[pci] = int(total[1])
    return bar1, framebuffer

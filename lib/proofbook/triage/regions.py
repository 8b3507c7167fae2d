"""Answers of tools that stand in a paste: blocks whose lines mean something only together with the lines above them.

A region is found by its own words, and read by one function that says single statements: the line (or what several lines
amount to), and the device or unit that it is about. The judge holds these against the signatures as it does with any line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from proofbook.model import pci_address
from proofbook.signatures.formats import clean
from proofbook.signatures.judge import Judging

__all__ = ["ANCHORS", "Region", "Statement", "find_regions"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a region: ``line`` is its place in the region, from 0."""

    line: int
    text: str
    device: str = ""
    unit: str = ""


Reader = Callable[[list[str], Judging], Iterator[Statement]]


@dataclass(frozen=True, slots=True)
class Region:
    """``data[start:end]`` of a buffer, and who reads it; its lines are judged through what the reader says of them alone."""

    start: int
    end: int
    read: Reader


#: The widest link that PCIe has; a wider one is a register that reads all ones.
_WIDEST = 32
#: One way, a Gen5 link of 16 lanes carries no more (GB/s).
MOST_GBS = 63.0
#: Below this share of what the others reach, a GPU is slow to every peer; below so many GB/s, a collective of so large
#: messages took no peer-to-peer.
SLOW_SHARE, NCCL_GBS, LARGE_BYTES = 0.95, 22.0, 64 * 1024 * 1024
_BROKEN = ("ERR!", "Unknown Error", "GPU is lost", "requires reset")


# --------------------------------------------------------------------------------------------------- nvidia-smi

_GPU = re.compile(r"^GPU (?P<pci>[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_ATTACHED = re.compile(r"^Attached GPUs\s+: (?P<count>\d+)")


def read_smi_q(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """``nvidia-smi -q``: keys and values by indentation, one block a GPU."""
    device, widest = "", 0
    attached: int | None = None
    shown: set[str] = set()
    above: dict[int, str] = {}
    for n, line in enumerate(lines):
        head = _GPU.match(line)
        if head:
            device, above = pci_address(head["pci"]), {}
            judging.learn_row(device)
            shown.add(device)
            continue
        count = _ATTACHED.match(line)
        if count:
            attached = int(count["count"])
        indent = len(line) - len(line.lstrip())
        key, colon, value = line.partition(" : ")
        key, value = key.strip(), value.strip()
        above = {i: k for i, k in above.items() if i < indent}
        path = [k for _, k in sorted(above.items())]
        above[indent] = key
        if not colon:
            continue
        if path[-1:] == ["Link Width"]:
            lanes = int(value.rstrip("x")) if value.rstrip("x").isdigit() else 0
            if key == "Max":
                widest = lanes
            elif key == "Current" and lanes > _WIDEST:
                yield Statement(n, f"LnkSta: Width x{lanes}", device)
            elif key == "Current" and 0 < lanes < widest:
                yield Statement(n, f"Link Width: Max {widest}x, Current {lanes}x", device)
        elif "Remapped Rows" in path and value == "Yes":
            yield Statement(n, f"Remapped Rows / {key}: Yes", device)
        elif "ECC Errors" in path and "Uncorrect" in key and value.isdigit() and int(value):
            kind = next((p for p in path if p in ("Volatile", "Aggregate")), "Volatile")
            yield Statement(n, f"ECC Errors / {kind} / {key}: {value}", device)
        elif key == "GPU Recovery Action" or any(word in value for word in _BROKEN):
            yield Statement(n, line, device)
    yield from _fewer(len(lines) - 1, shown, attached)


_XML_ATTACHED = re.compile(r"<attached_gpus>(?P<count>\d+)<")
_XML_GPU = re.compile(r'<gpu id="(?P<pci>[0-9A-Fa-f:.]+)"')
_XML_VALUE = re.compile(r"<(?P<key>max_link_width|current_link_width|gpu_recovery_action)>(?P<value>[^<]*)<")


def read_smi_xml(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """``nvidia-smi -q -x``, one element a line."""
    device, widest = "", 0
    attached: int | None = None
    shown: set[str] = set()
    for n, line in enumerate(lines):
        gpu = _XML_GPU.search(line)
        if gpu:
            device, widest = pci_address(gpu["pci"]), 0
            judging.learn_row(device)
            shown.add(device)
            continue
        if count := _XML_ATTACHED.search(line):
            attached = int(count["count"])
        found = _XML_VALUE.search(line)
        if found and found["key"] != "gpu_recovery_action":
            lanes = int(found["value"].rstrip("x")) if found["value"].rstrip("x").isdigit() else 0
            if found["key"] == "max_link_width":
                widest = lanes
            elif lanes > _WIDEST:
                yield Statement(n, f"LnkSta: Width x{lanes}", device)
            elif 0 < lanes < widest:
                yield Statement(n, f"Link Width: Max {widest}x, Current {lanes}x", device)
        elif found or any(word in line for word in _BROKEN):
            yield Statement(n, line, device)
    yield from _fewer(len(lines) - 1, shown, attached)


def _fewer(n: int, shown: set[str], attached: int | None) -> Iterator[Statement]:
    if attached is not None and shown and len(shown) < attached:
        yield Statement(n, f"nvidia-smi: {len(shown)} of {attached} attached GPUs are shown")


_ROW = re.compile(r"^\|\s+\d+\s+.*?(?P<pci>[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_UTIL = re.compile(r"\|\s+(?P<util>\d+)%\s+\S+")


def read_smi_table(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """The table of a bare ``nvidia-smi``: two rows a GPU, then the processes."""
    device = ""
    busy: list[tuple[int, str, str]] = []
    for n, line in enumerate(lines):
        row = _ROW.match(line)
        if row:
            device = pci_address(row["pci"])
            judging.learn_row(device)
        if any(word in line for word in _BROKEN):
            yield Statement(n, line, device)
        util = _UTIL.search(line)
        if util and device and int(util["util"]) >= 99:
            busy.append((n, device, util["util"]))
        if "No running processes found" in line:
            for at, where, percent in busy:
                yield Statement(at, f"GPU-Util {percent}% and no running process", where)
        if line.startswith(("Unable to determine", "No devices were found", "Failed to initialize")):
            yield Statement(n, line)


# -------------------------------------------------------------------------------------------------------- lspci

_LSPCI = re.compile(r"^(?P<pci>(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<what>[^:]+): ?(?P<who>.*)")
_BUSES = re.compile(r"Bus: primary=[0-9a-f]{2}, secondary=(?P<first>[0-9a-f]{2}), subordinate=(?P<last>[0-9a-f]{2})")


def read_lspci(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """``lspci``, however many v: one block a device. Only GPUs are held against what a link should be."""
    device, gpu = "", False
    for n, line in enumerate(lines):
        head = _LSPCI.match(line)
        if head:
            device = pci_address(head["pci"])
            # WHY: a device that reads all ones still shows its name, from the cache of the kernel.
            gpu = ("NVIDIA" in head["who"] or "[10de:" in head["who"]) and ("3D" in head["what"] or "VGA" in head["what"])
            if gpu:
                judging.learn_gpu(device)
            else:
                judging.learn_other(device, head["what"])
            if "(rev ff)" in line:
                yield Statement(n, line, device)
            continue
        if gpu and line.strip() == "Kernel driver in use: nvidia":
            judging.learn_bound(device)
        buses = _BUSES.search(line)
        if buses:
            judging.learn_bridge(device, int(buses["first"], 16), int(buses["last"], 16))
        if "Unknown header type" in line or (gpu and ("LnkSta:" in line or "UESta:" in line)):
            yield Statement(n, line, device)


# ------------------------------------------------------------------------------------------------------ systemd

_UNIT = re.compile(r"^\s*(?:\S )?(?P<unit>[\w@.\\:-]+\.(?:service|socket|mount|target|timer|scope))(?: - .*)?$")


def read_status(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """``systemctl status``: the head of one unit; the journal lines below it are judged as any others."""
    unit = ""
    for n, line in enumerate(lines):
        head = _UNIT.match(line)
        if head:
            unit = head["unit"]
        elif line.lstrip().startswith(("Active:", "Main PID:", "Process:")):
            yield Statement(n, line, unit=unit)


# ----------------------------------------------------------------------------------------------- tables of figures

_ROW_OF_FIGURES = re.compile(r"^\s*(?P<index>\d{1,2})((?:\s+\d+\.\d+){2,})\s*$")
_NCCL_ROW = re.compile(
    r"^\s*(?P<size>\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+(?P<bus>[\d.]+)\s+(?P<wrong>\d+|N/A)"
    r"(?:\s+[\d.]+\s+[\d.]+\s+(?P<bus2>[\d.]+)\s+(?P<wrong2>\d+|N/A))?"
)


def read_matrix(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """A matrix of bandwidths, as p2pBandwidthLatencyTest prints it. The diagonal is local memory."""
    title = lines[0] if "Matrix" in lines[0] else ""
    if "Latency" in title or "Disabled" in title or "Bidirectional" in title:
        return
    rows = {int(m["index"]): [float(x) for x in m[2].split()] for line in lines if (m := _ROW_OF_FIGURES.match(line))}
    pairs = {(i, j): value for i, row in rows.items() for j, value in enumerate(row) if i != j}
    if not pairs:
        return
    for (i, j), value in pairs.items():
        if "Unidirectional" in title and value > MOST_GBS:
            yield Statement(0, f"P2P bandwidth GPU{i}->GPU{j}: {value:g} GB/s one way is more than the link can carry")
    for gpu in sorted({i for pair in pairs for i in pair}):
        own = [v for pair, v in pairs.items() if gpu in pair]
        others = [v for pair, v in pairs.items() if gpu not in pair]
        if len(own) >= 3 and len(others) >= 2 and max(own) < SLOW_SHARE * median(others) and min(others) > max(own):
            yield Statement(
                0, f"P2P bandwidth of GPU{gpu}: at most {max(own):g} GB/s to every peer, the others {median(others):g} GB/s"
            )


def read_nccl_tests(lines: list[str], judging: Judging) -> Iterator[Statement]:
    """The table of nccl-tests: wrong data first, then the bus bandwidth of large messages."""
    best = 0.0
    for n, line in enumerate(lines):
        if line.startswith("# Out of bounds"):
            yield Statement(n, line)
        row = _NCCL_ROW.match(line)
        if not row:
            continue
        wrong = sum(int(x) for x in (row["wrong"], row["wrong2"]) if x and x.isdigit())
        if wrong:
            yield Statement(n, f"#wrong: {wrong} of {int(row['size'])}")
        if int(row["size"]) >= LARGE_BYTES:
            best = max(best, float(row["bus"]), float(row["bus2"] or 0))
    if 0 < best < NCCL_GBS:
        yield Statement(0, f"nccl-tests: best bus bandwidth {best:g} GB/s")


# ------------------------------------------------------------------------------------------------------ finding them

_LSPCI_LINE = re.compile(rb"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9]|^\t|^\s*$|^ {8}")
_SMI_Q_LINE = re.compile(rb"^\s*$|^\s+\S|^GPU [0-9A-Fa-f]{8}:|^[A-Z][\w /]+\s+: |^=+")
_XML_LINE = re.compile(rb"^\s*<|^\s*$")
_TABLE_LINE = re.compile(rb"^[|+ ]|^\s*$|^[A-Z]\w{2} [A-Z]\w{2}")
_STATUS_LINE = re.compile(rb"^\s+\S|^\S{1,3} [\w@.\\:-]+\.\w+( - |$)")
_FIGURES_LINE = re.compile(rb"^\s*\d{1,2}(\s+\d+\.\d+){2,}\s*$|^\s+D\\D|^\s*$")
_NCCL_LINE = re.compile(rb"^#|^\s+\d+\s+\d+\s+\w+\s+\w+\s")

#: Words that stand in a region, which lines belong to it, and who reads it.
_SPECS: tuple[tuple[bytes, re.Pattern[bytes], Reader], ...] = (
    (b"NVSMI LOG", _SMI_Q_LINE, read_smi_q),
    (b"GPU Recovery Action", _SMI_Q_LINE, read_smi_q),
    (b"<nvidia_smi_log", _XML_LINE, read_smi_xml),
    (b"<gpu id=", _XML_LINE, read_smi_xml),
    (b"NVIDIA-SMI ", _TABLE_LINE, read_smi_table),
    (b"LnkSta:", _LSPCI_LINE, read_lspci),
    (b"(rev ff)", _LSPCI_LINE, read_lspci),
    (b"Unknown header type", _LSPCI_LINE, read_lspci),
    (b"Kernel driver in use: ", _LSPCI_LINE, read_lspci),
    (b"Active: ", _STATUS_LINE, read_status),
    (b" Matrix (GB/s)", _FIGURES_LINE, read_matrix),
    (b"# Avg bus bandwidth", _NCCL_LINE, read_nccl_tests),
)
ANCHORS = tuple(word.decode() for word, *_ in _SPECS)


def find_regions(data: bytes) -> list[Region]:
    """The regions of a buffer, in order, none inside another."""
    found: list[Region] = []
    for word, belongs, reader in _SPECS:
        at = data.find(word)
        while at >= 0:
            taken = next((r for r in found if r.start <= at < r.end), None)
            if taken is None:
                region = _around(data, at, belongs, reader)
                if not any(r.start < region.end and region.start < r.end for r in found):
                    found.append(region)
                at = data.find(word, max(region.end, at + 1))
            else:
                at = data.find(word, taken.end)
    if not found and (bare := _bare_figures(data)):
        found.append(bare)
    return sorted(found, key=lambda r: r.start)


def _around(data: bytes, at: int, belongs: re.Pattern[bytes], reader: Reader) -> Region:
    """The lines around ``at`` that belong together: upwards and downwards until one does not."""
    start = data.rfind(b"\n", 0, at) + 1
    end = _line_end(data, at)
    if reader not in (read_matrix, read_smi_table):
        while start > 0:
            before = data.rfind(b"\n", 0, start - 1) + 1
            line = data[before : start - 1]
            if not belongs.match(line) or (reader in (read_status, read_nccl_tests) and not line.strip()):
                break
            start = before
            if reader is read_status and not line.startswith((b" ", b"\t")):
                break
    while end < len(data):
        after = _line_end(data, end + 1)
        line = data[end + 1 : after]
        if not belongs.match(line.rstrip(b"\r")) or (reader is read_status and not line.strip()):
            break
        end = after
    # Blank lines at its ends belong to nobody: two answers that one of them parts are two regions.
    blank = len(data[start:end]) - len(data[start:end].lstrip(b"\r\n"))
    end -= len(data[start:end]) - len(data[start:end].rstrip(b"\r\n"))
    return Region(start + blank, min(end + 1, len(data)), reader)


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    return len(data) if end < 0 else end


def _bare_figures(data: bytes) -> Region | None:
    """Rows of a matrix, or of nccl-tests, that somebody pasted without their heading; only in something short."""
    if len(data) > 4096:
        return None
    lines = [x for x in data.decode("utf-8", "replace").splitlines() if x.strip()]
    if lines and all(_ROW_OF_FIGURES.match(x) for x in lines):
        return Region(0, len(data), read_matrix)
    return None


def lines_of(data: bytes, region: Region) -> list[str]:
    """A region's lines, decoded."""
    text = data[region.start : region.end].decode("utf-8", "backslashreplace")
    return [clean(x) for x in text.removesuffix("\n").split("\n")]

"""What nvidia-smi knows of every GPU: rows, problems and values, as NVML would give them.

What a GPU's state does to the answers:

- not present, or bound to another driver: it has no row anywhere, and the indices of the others close the gap
- ``lost``: NVML counts it but cannot give its handle. A line stands where its row would be, its index is skipped, and
  the exit status is ``NvidiaDriver.lost_exit_status``: the manual page says 15 for a lost GPU, field reports disagree.
  In the plain table the line comes before everything else (seen with driver 610); in a CSV table it stands between the
  rows (field reports). Where it stands in ``-q`` and ``-q -x`` no report says; here: in place of the GPU's block, which
  keeps the XML well-formed.
- ``needs-reset``: identity and memory sizes are known, what has to be measured reads ``[GPU requires reset]``
- ``uninitialised``: the driver holds the device but could not start it: no row; ``/proc`` shows question marks
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime

from proofbook.lab.sim.state import Gpu, Hardware, Link, PciDevice

DEPRECATED = "Requested functionality has been deprecated"
RESET_NEEDED = "GPU requires reset"
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


@dataclass(frozen=True)
class Row:
    """One GPU as NVML counts it. ``problem``: the line that is printed instead of its row."""

    index: int
    gpu: Gpu
    device: PciDevice
    problem: str = ""

    @property
    def bus_id(self) -> str:
        """Eight digits of domain, upper case: ``00000000:C1:00.0``."""
        return f"0000{self.gpu.pci}".upper()

    @property
    def needs_reset(self) -> bool:
        return self.gpu.condition == "needs-reset"


def smi_rows(hw: Hardware) -> list[Row]:
    """The GPUs that NVML counts, by PCI address, with their indices."""
    noise = dict(hw.nvidia.smi_noise)
    counted = [gpu for gpu in hw.live_gpus() if gpu.condition != "uninitialised"]
    rows = []
    for index, gpu in enumerate(counted):
        problem = noise.get(gpu.pci, "")
        if not problem and (gpu.condition == "lost" or hw.pci[gpu.pci].dead):
            problem = hw.nvidia.handle_error.format(pci=gpu.pci.upper(), index=index)
        rows.append(Row(index, gpu, hw.pci[gpu.pci], problem))
    return rows


class Refusal(Exception):
    """nvidia-smi refuses the arguments; the text is what it says."""


@dataclass
class Call:
    mode: str = "table"
    selected: str = ""
    fields: list[str] = field(default_factory=list)
    format: list[str] = field(default_factory=list)
    display: list[str] = field(default_factory=list)
    capability: str = ""


def generation(speed: float) -> int:
    return _GENERATION[speed]


def link_of(row: Row) -> Link:
    """The link as the driver reports it: busy GPUs run at the speed that they trained to."""
    return row.device.link or Link()


def memory_of(gpu: Gpu) -> tuple[int, int, int, int]:
    """Total, reserved, used and free frame buffer memory, MiB."""
    used = min(gpu.used_mib, gpu.fb_mib - gpu.fb_reserved_mib)
    return gpu.fb_mib, gpu.fb_reserved_mib, used, gpu.fb_mib - gpu.fb_reserved_mib - used


def clocks_of(gpu: Gpu) -> tuple[int, int, int]:
    """Graphics, memory and video clock, MHz, by performance state."""
    return (180, 405, 600) if gpu.pstate == "P8" else (2430, 12481, 2107)


def measured(row: Row, value: str) -> str:
    """A value that has to be measured on the GPU, or why it cannot be."""
    return RESET_NEEDED if row.needs_reset else value


def pdi_of(gpu: Gpu) -> str:
    return f"0x{hashlib.sha256(gpu.uuid.encode()).hexdigest()[:16]}"


def host_speed(hw: Hardware, row: Row) -> float:
    """What the port above the GPU can do, GT/s."""
    port = hw.pci.get(row.device.parent)
    return port.link.max_speed if port and port.link else link_of(row).max_speed


def library_version(hw: Hardware, in_container: bool) -> str:
    nvidia = hw.nvidia
    return (nvidia.container_library_version if in_container else "") or nvidia.library_version


def speaks_of_kmd(hw: Hardware, in_container: bool) -> bool:
    """Since driver 610 the header speaks of the kernel-mode and the CUDA user-mode driver."""
    return int(library_version(hw, in_container).split(".")[0]) >= 610


def timestamp(now: datetime) -> str:
    """As C's ctime prints it: ``Wed Apr  8 15:10:15 2026``."""
    return f"{now:%a %b} {now.day:2} {now:%H:%M:%S %Y}"

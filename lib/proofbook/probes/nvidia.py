"""The NVIDIA driver and what it says of its GPUs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from proofbook.model import Command, Probe, Result


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The kernel module as it is loaded, as it lies on disk, and the user-space library.

    ``module_version`` is "" when no module is loaded. A value that could not be had is None, and ``problems`` says why
    under the name of its field.
    """

    module_version: str  # "595.58.03"
    open_module: bool | None  # from the version file's first line; None when not loaded
    flavour_line: str  # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  …"
    params: dict[str, str]  # /proc/driver/nvidia/params, e.g. {"DmaRemapPeerMmio": "1"}
    loaded_srcversion: str | None
    disk_srcversion: str | None
    disk_version: str | None
    library_version: str | None  # of NVML
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        return bool(self.module_version)


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU that nvidia-smi has a row for. None (or "") is a value that it does not report.

    ``broken`` holds the fields where an error stands instead of a value, e.g. {"pstate": "[GPU requires reset]"}.
    """

    pci: str
    index: int | None
    uuid: str
    name: str
    vbios: str
    pstate: str  # "P8"
    gen_current: int | None  # PCIe generation now (1 when idle) and at most
    gen_max: int | None
    width_current: int | None  # lanes
    width_max: int | None
    recovery_action: str = ""  # None, Reset, Reboot, Drain P2P, Drain and Reset; "" when not reported
    minor: int | None = None  # N of /dev/nvidiaN
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    persistence: bool | None = None
    broken: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuTable:
    """Every GPU by PCI address. ``problems``: what nvidia-smi said instead of a row, by PCI address, "" for the whole.

    ``proc`` is /proc/driver/nvidia/gpus/<pci>/information of the GPUs that the module has probed (a directory there does
    not mean initialised).
    """

    rows: dict[str, GpuRow]
    problems: dict[str, str]
    driver_version: str  # "" when nvidia-smi did not get that far
    exit_status: int
    proc: dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class ComputeApp:
    """A process that computes on a GPU. ``used_mib`` is None where the driver does not say (in containers)."""

    pid: int
    pci: str
    process: str
    used_mib: int | None


@dataclass(frozen=True)
class Driver(Probe[DriverFacts]):
    """The NVIDIA driver's versions, flavour and parameters."""

    name: ClassVar[str] = "nvidia.Driver"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], DriverFacts]: ...


@dataclass(frozen=True)
class Gpus(Probe[GpuTable]):
    """What nvidia-smi and the driver say of every GPU."""

    name: ClassVar[str] = "nvidia.Gpus"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], GpuTable]: ...


@dataclass(frozen=True)
class ComputeApps(Probe[tuple[ComputeApp, ...]]):
    """The processes that compute on the GPUs now."""

    name: ClassVar[str] = "nvidia.ComputeApps"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[ComputeApp, ...]]: ...

"""The hardware side of a simulated GPU server: ONE state, from which every answer is rendered.

Take a GPU away here and lspci, sysfs, nvidia-smi, /proc and the kernel log all change. What a scenario *expects*
(verdicts) and what its owner *intends* (inventory) are not here: they never reach the served machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Link:
    """A PCIe link. Speeds in GT/s; a dead device reads 63 lanes and an unknown speed (all ones)."""

    max_speed: float = 32.0
    max_width: int = 16
    speed: float = 2.5  # idle: Gen1 is power management
    width: int = 16
    load_speed: float = 32.0  # what it trains to under load


@dataclass
class PciDevice:
    address: str  # "0000:41:00.0"
    vendor: int  # 0x10de
    device: int  # 0x2bb5
    class_code: int  # 0x030200
    name: str  # as lspci prints it: "NVIDIA Corporation Device 2bb5"
    class_name: str  # "3D controller"
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    revision: int = 0xA1
    driver: str = ""  # bound driver, "" if none
    modules: tuple[str, ...] = ()
    numa_node: int = 0
    iommu_group: int | None = None  # None: no IOMMU
    iommu_type: str = "DMA-FQ"  # DMA, DMA-FQ, identity, unmanaged, blocked
    parent: str = ""  # address of the port above, "" for the root complex
    link: Link | None = None
    bars: tuple[tuple[int, int, int], ...] = ()  # (index, address, bytes), 64-bit prefetchable memory
    present: bool = True
    config_dead: bool = False  # config space reads all ones
    aer_correctable: int = 0
    aer_fatal: int = 0
    acs: bool = False
    reset_method: str = "flr bus"
    subsystem_name: str = ""  # "" prints "<vendor> Device <id>"
    slot: str = ""  # "Physical Slot:" of lspci -v
    kind: str = "PCIe Endpoint"  # as the kernel prints it at enumeration
    serial: str = ""  # what the driver prints about it: a MAC address, a serial number

    @property
    def dead(self) -> bool:
        """It is still in the kernel's list, but config space reads all ones."""
        return self.present and self.config_dead


@dataclass
class Gpu:
    """What the NVIDIA driver knows of one GPU. ``condition``: ok · lost · needs-reset · uninitialised."""

    pci: str
    uuid: str
    minor: int
    serial: str
    name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    vbios: str = "98.02.67.00.0A"
    fb_mib: int = 97887
    fb_reserved_mib: int = 636
    bar1_mib: int = 131072
    condition: str = "ok"
    recovery_action: str = "None"  # None · Reset · Reboot · Drain P2P · Drain and Reset
    pstate: str = "P8"
    utilization: int = 0
    power_w: float = 39.2
    power_limit_w: float = 600.0
    temperature_c: int = 27
    processes: list[tuple[int, str, int]] = field(default_factory=list)  # (host pid, name, MiB)
    replays: int = 0  # PCIe replays since reset
    ecc_uncorrectable: int = 0  # volatile, DRAM
    remap_pending: bool = False

    @property
    def used_mib(self) -> int:
        return sum(mib for _, _, mib in self.processes)


@dataclass
class NvidiaDriver:
    module_version: str = "595.58.03"
    library_version: str = "595.58.03"
    cuda_version: str = "13.2"
    gsp_firmware: str = "595.58.03"
    open_module: bool = True
    loaded: bool = True
    srcversion: str = "8F2A41C09D5E7B36A1C4D02"
    disk_srcversion: str = "8F2A41C09D5E7B36A1C4D02"
    disk_version: str = "595.58.03"
    params: dict[str, str] = field(
        default_factory=lambda: {
            "DmaRemapPeerMmio": "1",
            "EnableResizableBar": "0",
            "EnableGpuFirmware": "18",
            "OpenRmEnableUnsupportedGpus": "1",
            "PreserveVideoMemoryAllocations": "0",
            "RegistryDwords": '""',
            "RegistryDwordsPerDevice": '""',
        }
    )
    uvm_major: int = 511
    caps_major: int = 238
    smi_noise: list[tuple[str, str]] = field(default_factory=list)  # (pci, line) printed instead of that GPU's row
    # The line for a GPU whose handle cannot be had. Seen in two forms: "GPU0000:41:00.0:" and "GPU1: 0000:41:00.0:".
    handle_error: str = "Unable to determine the device handle for GPU{pci}: Unknown Error"  # {pci}, {index}
    # The manual says 15 for a lost GPU; field reports disagree, so a scenario may set another one.
    lost_exit_status: int = 15
    container_library_version: str = ""  # "": the same library as on the host
    container_error: str = ""  # what NVML says inside the container, e.g. "Unknown Error" after a lost cgroup rule


@dataclass
class Hardware:
    """The board with everything that is plugged into it."""

    board: str = "GENOA2D24G-2L+"
    product: str = "4U8G GPU server"
    bios: str = "2.09"
    cpu: str = "AMD EPYC 9554 64-Core Processor"
    sockets: int = 2
    memory_gib: int = 755
    pci: dict[str, PciDevice] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    nvidia: NvidiaDriver = field(default_factory=NvidiaDriver)
    os_controls_aer: bool = True  # False: firmware keeps AER (_OSC "platform does not support [AER LTR DPC]")
    iommu_on: bool = True
    board_vendor: str = "ASRockRack"
    bios_date: str = "11/18/2024"
    cores_per_socket: int = 64
    root_order: tuple[int, ...] = ()  # bus numbers of the host bridges in the order the firmware lists them
    p2p: dict[tuple[str, str], str] = field(default_factory=dict)  # `topo -p2p` per ordered pair, where it is not "OK"

    def present(self) -> list[PciDevice]:
        """The devices that answer on the bus, by address."""
        return [self.pci[a] for a in sorted(self.pci) if self.pci[a].present]

    def live_gpus(self) -> list[Gpu]:
        """The GPUs whose device is present and bound to nvidia, by PCI address."""
        return [
            self.gpus[a] for a in sorted(self.gpus) if a in self.pci and self.pci[a].present and self.pci[a].driver == "nvidia"
        ]

    def driver_loaded(self) -> bool:
        """The nvidia module is loaded. With no device to bind it refuses to load ("No NVIDIA devices probed")."""
        return self.nvidia.loaded and bool(self.live_gpus())

    def cpus(self, node: int) -> str:
        """The CPUs of a NUMA node as a list with their SMT siblings: ``0-63,128-191``. One node a socket."""
        first, cores = node * self.cores_per_socket, self.cores_per_socket
        sibling = self.sockets * cores + first
        return f"{first}-{first + cores - 1},{sibling}-{sibling + cores - 1}"

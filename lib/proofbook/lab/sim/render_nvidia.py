"""The NVIDIA side of the simulated machine: ``nvidia-smi``, ``/proc/driver/nvidia``, device nodes, the driver's boot log.

What a GPU's state does to the answers is told in ``smi_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from proofbook.lab.sim import fault_lines, vfs
from proofbook.lab.sim.fault_lines import INFO, WARNING
from proofbook.lab.sim.smi_csv import ALIASES, APP_FIELDS, GPU_FIELDS, query_apps, query_gpu
from proofbook.lab.sim.smi_query import query_text, query_xml
from proofbook.lab.sim.smi_rows import Call, Refusal, Row, library_version, memory_of, smi_rows, timestamp
from proofbook.lab.sim.state import Gpu, Hardware, NvidiaDriver, PciDevice
from proofbook.lab.sim.topology import irq, probe_order, root_port
from proofbook.lab.sim.vfs import FileNode
from proofbook.model import pci_address

__all__ = ["character_majors", "driver_boot_lines", "nvidia_files", "nvidia_smi"]

SUCCESS, BAD_ARGUMENT, NOT_FOUND, NO_DRIVER, MISMATCH, UNKNOWN = 0, 2, 6, 9, 18, 255


# ------------------------------------------------------------------------------------------------------ entry


def nvidia_smi(hw: Hardware, argv: Sequence[str], now: datetime, *, in_container: bool = False) -> tuple[int, bytes, bytes]:
    """Answer ``nvidia-smi`` (``argv`` without the program's name). Returns exit status, stdout, stderr.

    Known: no arguments, -L, -q with -x, -i and -d, --query-gpu=, --query-compute-apps=, topo -m, topo -p2p r|w|n|a|p,
    --version, -h. nvidia-smi prints its errors on stdout.
    """
    status, text = _answer(hw, list(argv), now, in_container)
    return status, text.encode(), b""


def _answer(hw: Hardware, argv: list[str], now: datetime, in_container: bool) -> tuple[int, str]:
    try:
        call = _parse(argv)
    except Refusal as refusal:
        return BAD_ARGUMENT, f"{refusal}\n"
    if call.mode == "help":
        return SUCCESS, _HELP.format(version=library_version(hw, in_container))
    trouble = _nvml_trouble(hw, in_container)
    if trouble:
        return trouble
    rows = smi_rows(hw)
    if call.selected:
        rows = _select(rows, call.selected)
    if not rows:
        return NOT_FOUND, "No devices were found\n"
    status = hw.nvidia.lost_exit_status if any(r.problem for r in rows) else SUCCESS
    try:
        return status, _MODES[call.mode](hw, rows, call, now, in_container)
    except Refusal as refusal:
        return BAD_ARGUMENT, f"{refusal}\n"


def _nvml_trouble(hw: Hardware, in_container: bool) -> tuple[int, str] | None:
    """Why NVML cannot start, if so: exit status and text."""
    if not hw.driver_loaded():
        return NO_DRIVER, (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
            "driver is installed and running.\n\n"
        )
    if in_container and hw.nvidia.container_error:
        return UNKNOWN, f"Failed to initialize NVML: {hw.nvidia.container_error}\n"
    library = library_version(hw, in_container)
    if library != hw.nvidia.module_version:
        # The library's version is printed without its last part: "NVML library version: 595.71" for 595.71.05.
        short = ".".join(library.split(".")[:2])
        return MISMATCH, f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {short}\n"
    return None


def _select(rows: list[Row], wanted: str) -> list[Row]:
    """The rows that ``-i`` names: indices, UUIDs or PCI addresses, separated by commas."""
    names = {name.strip() for name in wanted.split(",")}
    addresses = set()
    for name in names:
        with suppress(ValueError):  # an index or a UUID is no address
            addresses.add(pci_address(name))
    return [r for r in rows if str(r.index) in names or r.gpu.uuid in names or r.gpu.pci in addresses]


# -------------------------------------------------------------------------------------------------- arguments


def _unrecognised(option: str) -> Refusal:
    return Refusal(f"ERROR: Option {option} is not recognized. Please run 'nvidia-smi -h' for help.\n")


def _combination() -> Refusal:
    return Refusal("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")


def _parse(argv: list[str]) -> Call:
    if argv[:1] == ["topo"]:
        return _parse_topo(argv[1:])
    call, words, xml = Call(), list(argv), False

    def value(option: str, inline: str) -> str:
        if inline:
            return inline
        if not words:
            raise Refusal(f"ERROR: Option {option} requires an argument. Please run 'nvidia-smi -h' for help.\n")
        return words.pop(0)

    def mode(name: str) -> None:
        if call.mode != "table":
            raise _combination()
        call.mode = name

    while words:
        word = words.pop(0)
        option, _, inline = word.partition("=")
        if option in ("-h", "--help"):
            return Call("help")
        if option == "--version":
            mode("version")
        elif option in ("-L", "--list-gpus"):
            mode("list")
        elif option in ("-q", "--query"):
            mode("query")
        elif option in ("-x", "--xml-format"):
            xml = True
        elif option in ("-i", "--id"):
            call.selected = value(option, inline)
        elif option in ("-d", "--display"):
            call.display = [d.strip().upper() for d in value(option, inline).split(",")]
        elif option in ("--query-gpu", "--query-compute-apps"):
            mode("gpu" if option == "--query-gpu" else "apps")
            call.fields = [f.strip() for f in value(option, inline).split(",")]
        elif option == "--format":
            call.format = [f.strip() for f in value(option, inline).split(",")]
        else:
            raise _unrecognised(word)
    return _checked(call, xml)


def _checked(call: Call, xml: bool) -> Call:
    if xml and call.mode != "query":
        raise _combination()
    if xml:
        call.mode = "xml"
    if call.mode in ("gpu", "apps"):
        if "csv" not in call.format:
            raise Refusal('"--format=" switch is missing. Consider adding "--format=csv[,noheader][,nounits]"\n')
        for word in call.format:
            if word not in ("csv", "noheader", "nounits"):
                raise Refusal(f'Invalid format specifier "{word}".\n')
        known = GPU_FIELDS if call.mode == "gpu" else APP_FIELDS
        for name in call.fields:
            if ALIASES.get(name, name) not in known:
                raise Refusal(f'Field "{name}" is not a valid field to query.\n')
    elif call.format:
        raise _combination()
    return call


def _parse_topo(words: list[str]) -> Call:
    if words in (["-m"], ["--matrix"]):
        return Call("topo")
    if len(words) == 2 and words[0] in ("-p2p", "--p2pstatus") and words[1] in ("r", "w", "n", "a", "p"):
        return Call("p2p", capability=words[1])
    raise _combination()


_HELP = """NVIDIA System Management Interface -- v{version}

nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...

    -h,   --help                Print usage information and exit.
          --version             Print version information and exit.
    -L,   --list-gpus           Display a list of GPUs connected to the system.
    -q,   --query               Display GPU or Unit info.
    -i,   --id=                 Target a specific GPU or Unit.
    -x,   --xml-format          Produce XML output.
    -d,   --display=            Display only selected information.
          --query-gpu=          Information about GPU.
          --query-compute-apps= List of currently active compute processes.
          --format=             csv, noheader, nounits
    topo                        Displays device/system topology.
"""


# ------------------------------------------------------------------------------------------------ plain answers


def _list(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    return "".join(f"{r.problem or f'GPU {r.index}: {r.gpu.name} (UUID: {r.gpu.uuid})'}\n" for r in rows)


def _version(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    nvidia, library = hw.nvidia, library_version(hw, in_container)
    return (
        f"NVIDIA-SMI version  : {library}\nNVML version        : {'.'.join(library.split('.')[:2])}\n"
        f"DRIVER version      : {nvidia.module_version}\nCUDA Version        : {nvidia.cuda_version}\n"
    )


def _table(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    rule, split = f"+{'-' * 89}+", f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    lines = [r.problem for r in rows if r.problem]
    lines += [f"{timestamp(now)}       ", rule, _versions(hw.nvidia, library_version(hw, in_container)), split]
    lines += [
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|",
    ]
    for row in rows:
        if not row.problem:
            lines += [*_table_row(row), split]
    lines += ["", rule, f"| {'Processes:':<88}|"]
    lines += [
        "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
        "|        ID   ID                                                               Usage      |",
        f"|{'=' * 89}|",
    ]
    processes = [] if in_container else [p for r in rows if not r.problem for p in _table_processes(r)]
    lines += processes or [f"|  {'No running processes found':<87}|"]
    return "\n".join([*lines, rule]) + "\n"


def _versions(nvidia: NvidiaDriver, library: str) -> str:
    """The header; since driver 610 it names the kernel driver and the CUDA user driver."""
    if int(library.split(".")[0]) >= 610:
        parts = f"KMD Version: {nvidia.module_version:<14}CUDA UMD Version: {nvidia.cuda_version:<9}"
    else:
        parts = f"Driver Version: {nvidia.module_version:<15}CUDA Version: {nvidia.cuda_version:<9}"
    return f"| NVIDIA-SMI {library:<23}{parts}|"


def _table_row(row: Row) -> list[str]:
    gpu = row.gpu
    name = gpu.name if len(gpu.name) <= 27 else f"{gpu.name[:24]}..."
    total, _, used, _ = memory_of(gpu)
    measured = not row.needs_reset
    ecc = str(gpu.ecc_uncorrectable) if measured else "ERR!"
    temperature = f"{gpu.temperature_c}C" if measured else "ERR!"
    state = gpu.pstate if measured else "ERR!"
    power = f"{gpu.power_w:.0f}W" if measured else "ERR!"
    usage = f"{gpu.utilization}%" if measured else "ERR!"
    return [
        f"| {row.index:>3}  {name:<27}    On  |   {row.bus_id} Off | {ecc:>20} |",
        f"| N/A  {temperature:>4}   {state:>3}         {power:>7} / {gpu.power_limit_w:>4.0f}W |"
        f" {used:>7}MiB / {total:>6}MiB | {usage:>7}      Default |",
        f"| {'':39} | {'':22} | {'Disabled':>20} |",
    ]


def _table_processes(row: Row) -> Iterator[str]:
    for pid, name, mib in row.gpu.processes:
        shown = name if len(name) <= 36 else f"...{name[-33:]}"
        yield f"|  {row.index:>3}   N/A  N/A{pid:>16}      C   {shown:<36} {mib:>6}MiB |"


# ----------------------------------------------------------------------------------------------------- topology


def _topo(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    gpus = [r for r in rows if not r.problem]
    nics = [d for d in probe_order(hw) if d.driver == "mlx5_core"]
    columns: list[tuple[str, PciDevice]] = [(f"GPU{r.index}", r.device) for r in gpus]
    columns += [(f"NIC{n}", d) for n, d in enumerate(sorted(nics, key=lambda d: d.address))]
    heads = "\t".join(name for name, _ in columns)
    lines = [r.problem for r in rows if r.problem]
    lines.append(f"\t\x1b[4m{heads}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m")
    for name, device in columns:
        cells = "\t".join(" X " if other is device else _path(hw, device, other) for _, other in columns)
        affinity = f"\t{hw.cpus(device.numa_node)}\t{device.numa_node}\t\tN/A" if name.startswith("GPU") else "\t\t\t"
        lines.append(f"{name}\t{cells}{affinity}")
    legend = [
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
        "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node",
        "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
        "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
        "  PIX  = Connection traversing at most a single PCIe bridge",
        "  NV#  = Connection traversing a bonded set of # NVLinks",
    ]
    if nics:
        legend += ["", "NIC Legend:", "", *(f"  NIC{n}: mlx5_{n}" for n in range(len(nics)))]
    return "\n".join([*lines, *legend, ""]) + "\n"


def _path(hw: Hardware, one: PciDevice, other: PciDevice) -> str:
    """How two devices reach each other, from the tree of bridges."""
    if one.numa_node != other.numa_node:
        return "SYS"
    if one.parent and one.parent == other.parent:
        return "PIX"
    first, second = root_port(hw, one), root_port(hw, other)
    if first.address == second.address:
        return "PXB"
    return "PHB" if first.address[:7] == second.address[:7] else "NODE"


def _p2p(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    gpus = [r for r in rows if not r.problem]
    lines = [r.problem for r in rows if r.problem]
    lines.append(" \t" + "".join(f"GPU{r.index}\t" for r in gpus))
    for row in gpus:
        lines.append(f" GPU{row.index}\t" + "".join(f"{_p2p_status(hw, row, other, call.capability)}\t" for other in gpus))
    meanings = {"X": "Self", "OK": "Status Ok", "CNS": "Chipset not supported", "GNS": "GPU not supported",
                "TNS": "Topology not supported", "NS": "Not supported", "U": "Unknown"}  # fmt: skip
    legend = ["", "Legend:", "", *(f"  {code:<4} = {meaning}" for code, meaning in meanings.items()), ""]
    return "\n".join([*lines, *legend]) + "\n"


def _p2p_status(hw: Hardware, row: Row, other: Row, capability: str) -> str:
    if row.index == other.index:
        return "X"
    if capability == "n":  # NVLink: these cards have none
        return "NS"
    return hw.p2p.get((row.gpu.pci, other.gpu.pci), "OK")


_MODES: dict[str, Callable[[Hardware, list[Row], Call, datetime, bool], str]] = {
    "table": _table, "list": _list, "version": _version, "query": query_text, "xml": query_xml, "gpu": query_gpu,
    "apps": query_apps, "topo": _topo, "p2p": _p2p,
}  # fmt: skip


# ------------------------------------------------------------------------------------------ /proc, /sys and /dev

_BUILT = "Tue Mar 17 19:55:10 UTC 2026"
_MODESET_BUILT = "Tue Mar 17 19:39:14 UTC 2026"

#: Module parameters as /proc prints them, in its order; the state's own values come in their place.
_PARAMS = {
    "ResmanDebugLevel": "4294967295", "RmLogonRC": "1", "ModifyDeviceFiles": "1", "DeviceFileUID": "0", "DeviceFileGID": "0",
    "DeviceFileMode": "438", "InitializeSystemMemoryAllocations": "1", "UsePageAttributeTable": "4294967295", "EnableMSI": "1",
    "EnablePCIeGen3": "0", "MemoryPoolSize": "0", "KMallocHeapMaxSize": "0", "VMallocHeapMaxSize": "0", "IgnoreMMIOCheck": "0",
    "EnableStreamMemOPs": "0", "EnableUserNUMAManagement": "1", "NvLinkDisable": "0", "RmProfilingAdminOnly": "1",
    "PreserveVideoMemoryAllocations": "0", "EnableS0ixPowerManagement": "0", "S0ixPowerManagementVideoMemoryThreshold": "256",
    "DynamicPowerManagement": "3", "DynamicPowerManagementVideoMemoryThreshold": "200", "RegisterPCIDriver": "1",
    "EnablePCIERelaxedOrderingMode": "0", "EnableResizableBar": "0", "EnableGpuFirmware": "18", "EnableGpuFirmwareLogs": "2",
    "EnableDbgBreakpoint": "0", "OpenRmEnableUnsupportedGpus": "1", "DmaRemapPeerMmio": "1", "ImexChannelCount": "2048",
    "CreateImexChannel0": "0", "GrdmaPciTopoCheckOverride": "0", "RegistryDwords": '""', "RegistryDwordsPerDevice": '""',
    "RmMsg": '""', "GpuBlacklist": '""', "TemporaryFilePath": '""', "ExcludedGpus": '""',
}  # fmt: skip


def flavour(nvidia: NvidiaDriver) -> str:
    """How the driver calls itself: ``NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build  (…)  date``."""
    kind = "NVIDIA UNIX Open Kernel Module for x86_64" if nvidia.open_module else "NVIDIA UNIX x86_64 Kernel Module"
    return f"{kind}  {nvidia.module_version}  Release Build  (root@builder)  {_BUILT}"


def character_majors(hw: Hardware) -> dict[str, int]:
    """The driver's character devices with their majors, as ``/proc/devices`` lists them. Two of them are dynamic."""
    if not hw.driver_loaded():
        return {}
    return {
        "nvidia": 195,
        "nvidia-modeset": 195,
        "nvidiactl": 195,
        "nvidia-caps": hw.nvidia.caps_major,
        "nvidia-nvlink": 510,
        "nvidia-uvm": hw.nvidia.uvm_major,
    }


def nvidia_files(hw: Hardware) -> dict[str, FileNode]:
    """What the NVIDIA driver puts into ``/proc``, ``/sys/module`` and ``/dev``; nothing when it is not loaded."""
    if not hw.driver_loaded():
        return {}
    nvidia = hw.nvidia
    params = _PARAMS | nvidia.params
    files: dict[str, FileNode] = {
        "/proc/driver/nvidia/version": vfs.file(
            f"NVRM version: {flavour(nvidia)}\nGCC version:  gcc version 14.2.0 (Debian 14.2.0-19) \n"
        ),
        "/proc/driver/nvidia/params": vfs.file("".join(f"{k}: {v}\n" for k, v in params.items())),
        "/proc/driver/nvidia/registry": vfs.file('Binary: ""\n', 0o600),
        "/proc/driver/nvidia/gpus": vfs.directory(0o555),
        "/sys/module/nvidia/version": vfs.file(f"{nvidia.module_version}\n"),
        "/sys/module/nvidia/srcversion": vfs.file(f"{nvidia.srcversion}\n"),
        "/sys/module/nvidia/initstate": vfs.file("live\n"),
        "/sys/module/nvidia/refcnt": vfs.file(f"{4 + sum(len(g.processes) for g in hw.live_gpus())}\n"),
        "/sys/module/nvidia/taint": vfs.file("OE\n" if nvidia.open_module else "POE\n"),
        "/sys/module/nvidia_uvm/version": vfs.file(f"{nvidia.module_version}\n"),
        "/sys/module/nvidia_modeset/version": vfs.file(f"{nvidia.module_version}\n"),
        "/dev/nvidiactl": vfs.device(195, 255),
        "/dev/nvidia-modeset": vfs.device(195, 254),
        "/dev/nvidia-uvm": vfs.device(nvidia.uvm_major, 0),
        "/dev/nvidia-uvm-tools": vfs.device(nvidia.uvm_major, 1),
        "/dev/nvidia-caps": vfs.directory(),
        "/dev/nvidia-caps/nvidia-cap1": vfs.device(nvidia.caps_major, 1, 0o400),
        "/dev/nvidia-caps/nvidia-cap2": vfs.device(nvidia.caps_major, 2, 0o444),
    }
    for gpu in hw.live_gpus():
        directory = f"/proc/driver/nvidia/gpus/{gpu.pci}"
        files[directory] = vfs.directory(0o555)
        files[f"{directory}/information"] = vfs.file(_information(hw, gpu))
        files[f"/dev/nvidia{gpu.minor}"] = vfs.device(195, gpu.minor, error="EIO" if _unusable(hw, gpu) else "")
    return files


def _unusable(hw: Hardware, gpu: Gpu) -> bool:
    """Opening its device node fails: the driver cannot start it, or it is gone."""
    return gpu.condition in ("lost", "uninitialised") or hw.pci[gpu.pci].dead


def _information(hw: Hardware, gpu: Gpu) -> str:
    """``/proc/driver/nvidia/gpus/<address>/information``. The directory says "probed", not "initialised"."""
    started = gpu.condition != "uninitialised"
    firmware = f"GPU Firmware: \t {hw.nvidia.gsp_firmware if started else 'N/A'}\n"
    return (
        f"Model: \t\t {gpu.name}\n"
        f"IRQ:   \t\t {irq(hw, hw.pci[gpu.pci])}\n"
        f"GPU UUID: \t {gpu.uuid if started else 'GPU-????????-????-????-????-????????????'}\n"
        f"Video BIOS: \t {gpu.vbios.lower() if started else '??.??.??.??.??'}\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 52 bits\n"
        "DMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {gpu.pci}\n"
        f"Device Minor: \t {gpu.minor}\n"
        f"{firmware}"
        "GPU Excluded:\t No\n"
    )


# ----------------------------------------------------------------------------------------------- kernel log of a boot


def driver_boot_lines(hw: Hardware) -> list[tuple[float, int, str]]:
    """What the NVIDIA modules say at boot: (seconds after the line before, priority, text).

    A GPU whose condition is ``uninitialised`` shows here only in that nvidia-drm cannot allocate its device; the
    reason for it (FSP, WPR2, …) is a fault's text.
    """
    nvidia, lines = hw.nvidia, _DriverLog()
    gpus = [d for d in probe_order(hw) if d.vendor == 0x10DE and d.class_code >> 16 == 0x03]
    if not nvidia.loaded or not gpus:
        return []
    bound = [d for d in gpus if d.driver == "nvidia"]
    lines.say("nvidia: loading out-of-tree module taints kernel.", WARNING)
    if not nvidia.open_module:
        lines.say("nvidia: module license 'NVIDIA' taints kernel.", WARNING)
    lines.say("nvidia: module verification failed: signature and/or required key missing - tainting kernel", WARNING)
    lines.say("nvidia-nvlink: Nvlink Core is being initialized, major device number 510", INFO, 0.07)
    for device in bound:
        lines.say(f"nvidia {device.address}: enabling device (0000 -> 0002)", INFO, 0.011)
    if len(bound) < len(gpus):
        lines.add(fault_lines.probe_not_called(len(gpus) - len(bound)))
    if not bound:
        lines.add(fault_lines.no_devices_probed())
        return lines.lines
    lines.say(f"NVRM: loading {flavour(nvidia)}", WARNING, 0.012)
    kind = "Open Kernel Mode Setting Driver for x86_64" if nvidia.open_module else "Kernel Mode Setting Driver for UNIX platforms"
    prefix = "NVIDIA UNIX " if nvidia.open_module else "NVIDIA "
    lines.say(
        f"nvidia-modeset: Loading {prefix}{kind}  {nvidia.module_version}  Release Build  (root@builder)  {_MODESET_BUILT}",
        INFO,
        0.05,
    )
    lines.say(f"nvidia-uvm: Loaded the UVM driver, major device number {nvidia.uvm_major}.", INFO, 0.06)
    minor = 1
    for device in bound:
        gpu_id = f"[GPU ID 0x{int(device.address[5:7], 16) << 8:08x}]"
        lines.say(f"[drm] [nvidia-drm] {gpu_id} Loading driver", INFO, 0.02)
        gpu = hw.gpus.get(device.address)
        if gpu and gpu.condition == "uninitialised":
            lines.say(f"[drm:nv_drm_dev_load [nvidia_drm]] *ERROR* [nvidia-drm] {gpu_id} Failed to allocate NvKmsKapiDevice",
                      fault_lines.ERR, 1.1)  # fmt: skip
            continue
        lines.say(f"[drm] Initialized nvidia-drm 0.0.0 for {device.address} on minor {minor}", INFO, 1.7)
        lines.say(f"nvidia {device.address}: [drm] No compatible format found", INFO, 0.00003)
        lines.say(f"nvidia {device.address}: [drm] Cannot find any crtc or sizes", INFO, 0.00001)
        minor += 1
    return lines.lines


@dataclass
class _DriverLog:
    lines: list[tuple[float, int, str]] = field(default_factory=list)

    def say(self, text: str, priority: int, after: float = 0.0001) -> None:
        self.lines.append((after, priority, text))

    def add(self, lines: list[fault_lines.Line]) -> None:
        for line in lines:
            self.say(line.text, line.priority)

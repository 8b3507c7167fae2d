"""The NVIDIA side of the simulated machine: ``nvidia-smi``, ``/proc/driver/nvidia``, device nodes, the driver's boot log.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from xml.sax.saxutils import escape

from proofbook.lab.sim import fault_lines, vfs
from proofbook.lab.sim.fault_lines import INFO, WARNING
from proofbook.lab.sim.state import Gpu, Hardware, Link, NvidiaDriver, PciDevice
from proofbook.lab.sim.topology import irq, probe_order, root_port
from proofbook.lab.sim.vfs import FileNode
from proofbook.model import pci_address

__all__ = ["driver_boot_lines", "nvidia_files", "nvidia_smi", "nvidia_smi_rows"]

_DEPRECATED = "Requested functionality has been deprecated"
_RESET = "GPU requires reset"
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

SUCCESS, BAD_ARGUMENT, NOT_FOUND, NO_DRIVER, MISMATCH, UNKNOWN = 0, 2, 6, 9, 18, 255


# ---------------------------------------------------------------------------------------------- rows of the table


@dataclass(frozen=True)
class _Row:
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


def nvidia_smi_rows(hw: Hardware) -> list[_Row]:
    """The GPUs that NVML counts, by PCI address, with their indices."""
    noise = dict(hw.nvidia.smi_noise)
    counted = [gpu for gpu in hw.live_gpus() if gpu.condition != "uninitialised"]
    rows = []
    for index, gpu in enumerate(counted):
        problem = noise.get(gpu.pci, "")
        if not problem and (gpu.condition == "lost" or hw.pci[gpu.pci].dead):
            problem = hw.nvidia.handle_error.format(pci=gpu.pci.upper(), index=index)
        rows.append(_Row(index, gpu, hw.pci[gpu.pci], problem))
    return rows


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
    except _Refusal as refusal:
        return BAD_ARGUMENT, f"{refusal}\n"
    if call.mode == "help":
        return SUCCESS, _HELP.format(version=_library(hw, in_container))
    trouble = _nvml_trouble(hw, in_container)
    if trouble:
        return trouble
    rows = nvidia_smi_rows(hw)
    if call.selected:
        rows = _select(rows, call.selected)
    if not rows:
        return NOT_FOUND, "No devices were found\n"
    status = hw.nvidia.lost_exit_status if any(r.problem for r in rows) else SUCCESS
    try:
        return status, _MODES[call.mode](hw, rows, call, now, in_container)
    except _Refusal as refusal:
        return BAD_ARGUMENT, f"{refusal}\n"


def _library(hw: Hardware, in_container: bool) -> str:
    nvidia = hw.nvidia
    return (nvidia.container_library_version if in_container else "") or nvidia.library_version


def _nvml_trouble(hw: Hardware, in_container: bool) -> tuple[int, str] | None:
    """Why NVML cannot start, if so: exit status and text."""
    if not hw.driver_loaded():
        return NO_DRIVER, (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
            "driver is installed and running.\n\n"
        )
    if in_container and hw.nvidia.container_error:
        return UNKNOWN, f"Failed to initialize NVML: {hw.nvidia.container_error}\n"
    library = _library(hw, in_container)
    if library != hw.nvidia.module_version:
        # The library's version is printed without its last part: "NVML library version: 595.71" for 595.71.05.
        short = ".".join(library.split(".")[:2])
        return MISMATCH, f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {short}\n"
    return None


def _select(rows: list[_Row], wanted: str) -> list[_Row]:
    """The rows that ``-i`` names: indices, UUIDs or PCI addresses, separated by commas."""
    names = {name.strip() for name in wanted.split(",")}
    addresses = set()
    for name in names:
        with suppress(ValueError):  # an index or a UUID is no address
            addresses.add(pci_address(name))
    return [r for r in rows if str(r.index) in names or r.gpu.uuid in names or r.gpu.pci in addresses]


# -------------------------------------------------------------------------------------------------- arguments


class _Refusal(Exception):
    """nvidia-smi refuses the arguments; the text is what it says."""


@dataclass
class _Call:
    mode: str = "table"
    selected: str = ""
    fields: list[str] = field(default_factory=list)
    format: list[str] = field(default_factory=list)
    display: list[str] = field(default_factory=list)
    capability: str = ""


def _unrecognised(option: str) -> _Refusal:
    return _Refusal(f"ERROR: Option {option} is not recognized. Please run 'nvidia-smi -h' for help.\n")


def _combination() -> _Refusal:
    return _Refusal("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")


def _parse(argv: list[str]) -> _Call:
    if argv[:1] == ["topo"]:
        return _parse_topo(argv[1:])
    call, words, xml = _Call(), list(argv), False

    def value(option: str, inline: str) -> str:
        if inline:
            return inline
        if not words:
            raise _Refusal(f"ERROR: Option {option} requires an argument. Please run 'nvidia-smi -h' for help.\n")
        return words.pop(0)

    def mode(name: str) -> None:
        if call.mode != "table":
            raise _combination()
        call.mode = name

    while words:
        word = words.pop(0)
        option, _, inline = word.partition("=")
        if option in ("-h", "--help"):
            return _Call("help")
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


def _checked(call: _Call, xml: bool) -> _Call:
    if xml and call.mode != "query":
        raise _combination()
    if xml:
        call.mode = "xml"
    if call.mode in ("gpu", "apps"):
        if "csv" not in call.format:
            raise _Refusal('"--format=" switch is missing. Consider adding "--format=csv[,noheader][,nounits]"\n')
        for word in call.format:
            if word not in ("csv", "noheader", "nounits"):
                raise _Refusal(f'Invalid format specifier "{word}".\n')
        known = _GPU_FIELDS if call.mode == "gpu" else _APP_FIELDS
        for name in call.fields:
            if _ALIASES.get(name, name) not in known:
                raise _Refusal(f'Field "{name}" is not a valid field to query.\n')
    elif call.format:
        raise _combination()
    return call


def _parse_topo(words: list[str]) -> _Call:
    if words in (["-m"], ["--matrix"]):
        return _Call("topo")
    if len(words) == 2 and words[0] in ("-p2p", "--p2pstatus") and words[1] in ("r", "w", "n", "a", "p"):
        return _Call("p2p", capability=words[1])
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


# --------------------------------------------------------------------------------------------- values of a GPU


def _generation(speed: float) -> int:
    return _GENERATION[speed]


def _link(row: _Row) -> Link:
    """The link as the driver reports it: busy GPUs run at the speed that they trained to."""
    return row.device.link or Link()


def _memory(gpu: Gpu) -> tuple[int, int, int, int]:
    """Total, reserved, used and free frame buffer memory, MiB."""
    used = min(gpu.used_mib, gpu.fb_mib - gpu.fb_reserved_mib)
    return gpu.fb_mib, gpu.fb_reserved_mib, used, gpu.fb_mib - gpu.fb_reserved_mib - used


def _clocks(gpu: Gpu) -> tuple[int, int, int]:
    """Graphics, memory and video clock, MHz, by performance state."""
    return (180, 405, 600) if gpu.pstate == "P8" else (2430, 12481, 2107)


def _measured(row: _Row, value: str) -> str:
    """A value that has to be measured on the GPU, or why it cannot be."""
    return _RESET if row.needs_reset else value


def _pdi(gpu: Gpu) -> str:
    return f"0x{hashlib.sha256(gpu.uuid.encode()).hexdigest()[:16]}"


# -------------------------------------------------------------------------------------------------- CSV queries

_Value = Callable[[Hardware, _Row], str]
_GPU_FIELDS: dict[str, tuple[str, _Value]] = {}  # name -> unit, value
_ALIASES = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_serial": "serial", "gpu_bus_id": "pci.bus_id",
    "pcie.link.gen.gpucurrent": "pcie.link.gen.current", "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm", "clocks.mem": "clocks.current.memory", "clocks.video": "clocks.current.video",
    "clocks.max.mem": "clocks.max.memory", "clocks.max.gr": "clocks.max.graphics",
    "used_memory": "used_gpu_memory", "process_name": "process_name",
}  # fmt: skip


def _add(name: str, value: _Value, unit: str = "") -> None:
    _GPU_FIELDS[name] = (unit, value)


def _bracket(text: str) -> str:
    return f"[{text}]" if text in (_RESET, "N/A", "Not Supported", _DEPRECATED) else text


def _register_fields() -> None:
    """Every field that can be queried, in the order of ``--help-query-gpu``."""
    _add("timestamp", lambda hw, r: "")
    _add("driver_version", lambda hw, r: hw.nvidia.module_version)
    _add("count", lambda hw, r: str(len(nvidia_smi_rows(hw))))
    _add("name", lambda hw, r: r.gpu.name)
    _add("serial", lambda hw, r: r.gpu.serial)
    _add("uuid", lambda hw, r: r.gpu.uuid)
    _add("pci.bus_id", lambda hw, r: r.bus_id)
    _add("pci.domain", lambda hw, r: f"0x{r.bus_id[4:8]}")
    _add("pci.bus", lambda hw, r: f"0x{r.bus_id[9:11]}")
    _add("pci.device", lambda hw, r: f"0x{r.bus_id[12:14]}")
    _add("pci.device_id", lambda hw, r: f"0x{r.device.device:04X}{r.device.vendor:04X}")
    _add("pci.sub_device_id", lambda hw, r: f"0x{r.device.subsystem_device:04X}{r.device.subsystem_vendor:04X}")
    _add("pcie.link.gen.current", lambda hw, r: _measured(r, str(_generation(_link(r).speed))))
    _add("pcie.link.gen.max", lambda hw, r: str(_generation(_link(r).max_speed)))
    _add("pcie.link.gen.gpumax", lambda hw, r: str(_generation(_link(r).max_speed)))
    _add("pcie.link.gen.hostmax", lambda hw, r: str(_generation(_host_speed(hw, r))))
    _add("pcie.link.width.current", lambda hw, r: _measured(r, str(_link(r).width)))
    _add("pcie.link.width.max", lambda hw, r: str(_link(r).max_width))
    _add("index", lambda hw, r: str(r.index))
    _add("display_mode", lambda hw, r: _DEPRECATED)
    _add("display_attached", lambda hw, r: "Yes")
    _add("display_active", lambda hw, r: "Disabled")
    _add("persistence_mode", lambda hw, r: "Enabled")
    _add("addressing_mode", lambda hw, r: "None")
    _add("accounting.mode", lambda hw, r: "Disabled")
    _add("accounting.buffer_size", lambda hw, r: "4000")
    _add("driver_model.current", lambda hw, r: "N/A")
    _add("vbios_version", lambda hw, r: r.gpu.vbios)
    _add("inforom.img", lambda hw, r: "G153.0210.00.02")
    _add("inforom.oem", lambda hw, r: "2.1")
    _add("inforom.ecc", lambda hw, r: "7.16")
    _add("inforom.pwr", lambda hw, r: "N/A")
    _add("gpu_recovery_action", lambda hw, r: r.gpu.recovery_action)
    _add("reset_status.reset_required", lambda hw, r: _DEPRECATED)
    _add("reset_status.drain_and_reset_recommended", lambda hw, r: _DEPRECATED)
    _add("fan.speed", lambda hw, r: "N/A", "%")
    _add("pstate", lambda hw, r: _measured(r, r.gpu.pstate))
    _add("clocks_event_reasons.active", lambda hw, r: _measured(r, "0x0000000000000000"))
    for reason in ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
                   "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost"):  # fmt: skip
        _add(f"clocks_event_reasons.{reason}", lambda hw, r: _measured(r, "Not Active"))
    _add("memory.total", lambda hw, r: f"{_memory(r.gpu)[0]} MiB", "MiB")
    _add("memory.reserved", lambda hw, r: f"{_memory(r.gpu)[1]} MiB", "MiB")
    _add("memory.used", lambda hw, r: f"{_memory(r.gpu)[2]} MiB", "MiB")
    _add("memory.free", lambda hw, r: f"{_memory(r.gpu)[3]} MiB", "MiB")
    _add("compute_mode", lambda hw, r: "Default")
    _add("compute_cap", lambda hw, r: "12.0")
    _add("utilization.gpu", lambda hw, r: _measured(r, f"{r.gpu.utilization} %"), "%")
    _add("utilization.memory", lambda hw, r: _measured(r, f"{r.gpu.utilization // 2} %"), "%")
    _add("ecc.mode.current", lambda hw, r: "Enabled")
    _add("ecc.mode.pending", lambda hw, r: "Enabled")
    _add("ecc.errors.corrected.volatile.total", lambda hw, r: _measured(r, "0"))
    _add("ecc.errors.uncorrected.volatile.total", lambda hw, r: _measured(r, str(r.gpu.ecc_uncorrectable)))
    _add("ecc.errors.uncorrected.volatile.dram", lambda hw, r: _measured(r, str(r.gpu.ecc_uncorrectable)))
    _add("temperature.gpu", lambda hw, r: _measured(r, str(r.gpu.temperature_c)))
    _add("temperature.gpu.tlimit", lambda hw, r: _measured(r, str(85 - r.gpu.temperature_c)))
    _add("temperature.memory", lambda hw, r: "N/A")
    _add("power.draw", lambda hw, r: _measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    _add("power.draw.average", lambda hw, r: _measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    _add("power.draw.instant", lambda hw, r: _measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    for limit in ("power.limit", "enforced.power.limit", "power.default_limit", "power.max_limit"):
        _add(limit, lambda hw, r: f"{r.gpu.power_limit_w:.2f} W", "W")
    _add("power.min_limit", lambda hw, r: "300.00 W", "W")
    _add("clocks.current.graphics", lambda hw, r: _measured(r, f"{_clocks(r.gpu)[0]} MHz"), "MHz")
    _add("clocks.current.sm", lambda hw, r: _measured(r, f"{_clocks(r.gpu)[0]} MHz"), "MHz")
    _add("clocks.current.memory", lambda hw, r: _measured(r, f"{_clocks(r.gpu)[1]} MHz"), "MHz")
    _add("clocks.current.video", lambda hw, r: _measured(r, f"{_clocks(r.gpu)[2]} MHz"), "MHz")
    _add("clocks.max.graphics", lambda hw, r: "2430 MHz", "MHz")
    _add("clocks.max.sm", lambda hw, r: "2430 MHz", "MHz")
    _add("clocks.max.memory", lambda hw, r: "12481 MHz", "MHz")
    _add("mig.mode.current", lambda hw, r: "Disabled")
    _add("mig.mode.pending", lambda hw, r: "Disabled")
    _add("gsp.mode.current", lambda hw, r: "Enabled")


_register_fields()


def _host_speed(hw: Hardware, row: _Row) -> float:
    """What the port above the GPU can do, GT/s."""
    port = hw.pci.get(row.device.parent)
    return port.link.max_speed if port and port.link else _link(row).max_speed


def _cell(text: str, nounits: bool, unit: str) -> str:
    text = _bracket(text)
    return text.removesuffix(f" {unit}") if nounits and unit else text


def _query_gpu(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    names = [_ALIASES.get(f, f) for f in call.fields]
    nounits = "nounits" in call.format
    lines = []
    if "noheader" not in call.format:
        lines.append(", ".join(f"{n} [{_GPU_FIELDS[n][0]}]" if _GPU_FIELDS[n][0] else n for n in names))
    for row in rows:
        if row.problem:
            lines.append(row.problem)
            continue
        cells = []
        for name in names:
            unit, value = _GPU_FIELDS[name]
            text = (
                now.strftime("%Y/%m/%d %H:%M:%S.") + f"{now.microsecond // 1000:03d}" if name == "timestamp" else value(hw, row)
            )
            cells.append(_cell(text, nounits, unit))
        lines.append(", ".join(cells))
    return "\n".join(lines) + "\n"


_APP_FIELDS = {"timestamp": "", "gpu_name": "", "pci.bus_id": "", "serial": "", "uuid": "", "name": "", "pid": "",
               "process_name": "", "used_gpu_memory": "MiB"}  # fmt: skip
_APP_HEADERS = {"pci.bus_id": "gpu_bus_id", "serial": "gpu_serial", "uuid": "gpu_uuid"}


def _query_apps(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    # WHY: here "name" is the process, "gpu_name" the GPU.
    names = ["process_name" if f == "name" else "gpu_name" if f == "gpu_name" else _ALIASES.get(f, f) for f in call.fields]
    nounits = "nounits" in call.format
    lines = []
    if "noheader" not in call.format:
        heads = [_APP_HEADERS.get(n, n) for n in names]
        lines.append(", ".join(f"{h} [MiB]" if h == "used_gpu_memory" else h for h in heads))
    for row in rows:
        if row.problem:
            lines.append(row.problem)
            continue
        for pid, process, mib in row.gpu.processes:
            values = {
                "timestamp": now.strftime("%Y/%m/%d %H:%M:%S.") + f"{now.microsecond // 1000:03d}",
                "gpu_name": row.gpu.name,
                "pci.bus_id": row.bus_id,
                "serial": row.gpu.serial,
                "uuid": row.gpu.uuid,
                "pid": str(pid),
                # WHY: a container has its own process numbers; NVML knows the host's and finds no name for them.
                "process_name": "[Not Found]" if in_container else process,
                "used_gpu_memory": str(mib) if nounits else f"{mib} MiB",
            }
            lines.append(", ".join(values[n] for n in names))
    return "\n".join(lines) + "\n" if lines else ""


# ------------------------------------------------------------------------------------------------ plain answers


def _list(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    return "".join(f"{r.problem or f'GPU {r.index}: {r.gpu.name} (UUID: {r.gpu.uuid})'}\n" for r in rows)


def _version(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    nvidia, library = hw.nvidia, _library(hw, in_container)
    return (
        f"NVIDIA-SMI version  : {library}\nNVML version        : {'.'.join(library.split('.')[:2])}\n"
        f"DRIVER version      : {nvidia.module_version}\nCUDA Version        : {nvidia.cuda_version}\n"
    )


def _timestamp(now: datetime) -> str:
    """As C's ctime prints it: ``Wed Apr  8 15:10:15 2026``."""
    return f"{now:%a %b} {now.day:2} {now:%H:%M:%S %Y}"


def _table(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    rule, split = f"+{'-' * 89}+", f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    lines = [r.problem for r in rows if r.problem]
    lines += [f"{_timestamp(now)}       ", rule, _versions(hw.nvidia, _library(hw, in_container)), split]
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


def _table_row(row: _Row) -> list[str]:
    gpu = row.gpu
    name = gpu.name if len(gpu.name) <= 27 else f"{gpu.name[:24]}..."
    total, _, used, _ = _memory(gpu)
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


def _table_processes(row: _Row) -> Iterator[str]:
    for pid, name, mib in row.gpu.processes:
        shown = name if len(name) <= 36 else f"...{name[-33:]}"
        yield f"|  {row.index:>3}   N/A  N/A{pid:>16}      C   {shown:<36} {mib:>6}MiB |"


# ----------------------------------------------------------------------------------------------------- topology


def _topo(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
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


def _p2p(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    gpus = [r for r in rows if not r.problem]
    lines = [r.problem for r in rows if r.problem]
    lines.append(" \t" + "".join(f"GPU{r.index}\t" for r in gpus))
    for row in gpus:
        lines.append(f" GPU{row.index}\t" + "".join(f"{_p2p_status(hw, row, other, call.capability)}\t" for other in gpus))
    legend = ["", "Legend:", "", "  X    = Self", "  OK   = Status Ok", "  CNS  = Chipset not supported",
              "  GNS  = GPU not supported", "  TNS  = Topology not supported", "  NS   = Not supported", "  U    = Unknown", ""]  # fmt: skip
    return "\n".join([*lines, *legend]) + "\n"


def _p2p_status(hw: Hardware, row: _Row, other: _Row, capability: str) -> str:
    if row.index == other.index:
        return "X"
    if capability == "n":  # NVLink: these cards have none
        return "NS"
    return hw.p2p.get((row.gpu.pci, other.gpu.pci), "OK")


# ------------------------------------------------------------------------------------------- -q as text and XML


@dataclass
class _Item:
    """One entry of the ``-q`` tree. ``key`` is its name in text ("" = only in XML), ``tag`` in XML ("" = only in text)."""

    key: str
    tag: str
    value: str | None = None
    xml: str | None = None  # the XML's value where it differs from the text's
    children: list[_Item] = field(default_factory=list)


def _leaf(key: str, tag: str, value: str, xml: str | None = None) -> _Item:
    return _Item(key, tag, value, xml)


def _group(key: str, tag: str, *children: _Item) -> _Item:
    return _Item(key, tag, children=list(children))


def _na(*pairs: tuple[str, str]) -> list[_Item]:
    return [_leaf(key, tag, "N/A") for key, tag in pairs]


def _xml_only(tag: str, value: str = "N/A") -> _Item:
    return _leaf("", tag, value)


def _tree(hw: Hardware, row: _Row, in_container: bool) -> list[_Item]:
    """Everything that ``-q`` says of one GPU.

    The order and the names in text follow driver 595 on an eight-GPU host, the XML tags driver 575. Tags of entries
    that are newer than 575 (PDI, repair, fabric summary, EDPp) are formed by the same rule and not verified.
    """
    return [*_identity(hw, row), *_bus(hw, row), *_activity(row), *_errors(row), *_power(row), *_rest(row, in_container)]


def _identity(hw: Hardware, row: _Row) -> list[_Item]:
    gpu = row.gpu
    return [
        _leaf("Product Name", "product_name", gpu.name),
        _leaf("Product Brand", "product_brand", "NVIDIA"),
        _leaf("Product Architecture", "product_architecture", "Blackwell"),
        _leaf("Display Mode", "display_mode", _DEPRECATED),
        _leaf("Display Attached", "display_attached", "Yes"),
        _leaf("Display Active", "display_active", "Disabled"),
        _leaf("Persistence Mode", "persistence_mode", "Enabled"),
        _leaf("Addressing Mode", "addressing_mode", "None"),
        _group("MIG Mode", "mig_mode", _leaf("Current", "current_mig", "Disabled"), _leaf("Pending", "pending_mig", "Disabled")),
        _Item("", "mig_devices", xml="None"),
        _leaf("Accounting Mode", "accounting_mode", "Disabled"),
        _leaf("Accounting Mode Buffer Size", "accounting_mode_buffer_size", "4000"),
        _group("Driver Model", "driver_model", *_na(("Current", "current_dm"), ("Pending", "pending_dm"))),
        _leaf("Serial Number", "serial", gpu.serial),
        _leaf("GPU UUID", "uuid", gpu.uuid),
        _leaf("GPU PDI", "gpu_pdi", _pdi(gpu)),
        _leaf("Minor Number", "minor_number", str(gpu.minor)),
        _leaf("VBIOS Version", "vbios_version", gpu.vbios),
        _leaf("MultiGPU Board", "multigpu_board", "No"),
        _leaf("Board ID", "board_id", f"0x{int(gpu.pci[5:7], 16) << 8:x}"),
        _leaf("Board Part Number", "board_part_number", "900-2G153-0000-000"),
        _leaf("GPU Part Number", "gpu_part_number", "2BB5-895-A1"),
        _leaf("FRU Part Number", "gpu_fru_part_number", "N/A"),
        _group(
            "Platform Info",
            "platformInfo",
            _leaf("Chassis Serial Number", "chassis_serial_number", ""),
            _leaf("Slot Number", "slot_number", "0"),
            _leaf("Tray Index", "tray_index", "0"),
            _leaf("Host ID", "host_id", "1"),
            _leaf("Peer Type", "peer_type", "Direct Connected"),
            _leaf("Module Id", "module_id", "1"),
            _leaf("GPU Fabric GUID", "gpu_fabric_guid", "0x0000000000000000"),
        ),
        _group(
            "Inforom Version",
            "inforom_version",
            _leaf("Image Version", "img_version", "G153.0210.00.02"),
            _leaf("OEM Object", "oem_object", "2.1"),
            _leaf("ECC Object", "ecc_object", "7.16"),
            _leaf("Power Management Object", "pwr_object", "N/A"),
        ),
        _group(
            "Inforom BBX Object Flush",
            "inforom_bbx_flush",
            *_na(("Latest Timestamp", "latest_timestamp"), ("Latest Duration", "latest_duration")),
        ),
        _group("GPU Operation Mode", "gpu_operation_mode", *_na(("Current", "current_gom"), ("Pending", "pending_gom"))),
        _leaf("GPU C2C Mode", "c2c_mode", "Disabled"),
        _group(
            "GPU Virtualization Mode",
            "gpu_virtualization_mode",
            _leaf("Virtualization Mode", "virtualization_mode", "None"),
            *_na(("Host VGPU Mode", "host_vgpu_mode"), ("vGPU Heterogeneous Mode", "vgpu_heterogeneous_mode")),
        ),
        _group(
            "",
            "gpu_reset_status",
            _xml_only("reset_required", _DEPRECATED),
            _xml_only("drain_and_reset_recommended", _DEPRECATED),
        ),
        _leaf("GPU Recovery Action", "gpu_recovery_action", gpu.recovery_action),
        _leaf("GSP Firmware Version", "gsp_firmware_version", hw.nvidia.gsp_firmware),
        _group("IBMNPU", "ibmnpu", *_na(("Relaxed Ordering Mode", "relaxed_ordering_mode"))),
    ]


def _bus(hw: Hardware, row: _Row) -> list[_Item]:
    device, link, bus_id = row.device, _link(row), row.bus_id
    ids = f"{device.device:04X}{device.vendor:04X}"
    subsystem = f"{device.subsystem_device:04X}{device.subsystem_vendor:04X}"
    current = _measured(row, str(_generation(link.speed)))
    best = str(min(_generation(link.max_speed), _generation(_host_speed(hw, row))))
    base, sub = device.class_code >> 16, device.class_code >> 8 & 0xFF
    return [
        _group(
            "PCI",
            "pci",
            _leaf("Bus", "pci_bus", f"0x{bus_id[9:11]}", bus_id[9:11]),
            _leaf("Device", "pci_device", f"0x{bus_id[12:14]}", bus_id[12:14]),
            _leaf("Domain", "pci_domain", f"0x{bus_id[4:8]}", bus_id[4:8]),
            _leaf("Base Classcode", "pci_base_class", f"0x{base:X}", f"{base:X}"),
            _leaf("Sub Classcode", "pci_sub_class", f"0x{sub:X}", f"{sub:X}"),
            _leaf("Device Id", "pci_device_id", f"0x{ids}", ids),
            _leaf("Bus Id", "pci_bus_id", bus_id),
            _leaf("Sub System Id", "pci_sub_system_id", f"0x{subsystem}", subsystem),
            _group(
                "GPU Link Info",
                "pci_gpu_link_info",
                _group(
                    "PCIe Generation",
                    "pcie_gen",
                    _leaf("Max", "max_link_gen", best),
                    _leaf("Current", "current_link_gen", current),
                    _leaf("Device Current", "device_current_link_gen", current),
                    _leaf("Device Max", "max_device_link_gen", str(_generation(link.max_speed))),
                    _leaf("Host Max", "max_host_link_gen", str(_generation(_host_speed(hw, row)))),
                ),
                _group(
                    "Link Width",
                    "link_widths",
                    _leaf("Max", "max_link_width", f"{link.max_width}x"),
                    _leaf("Current", "current_link_width", _measured(row, f"{link.width}x")),
                ),
            ),
            _group("Bridge Chip", "pci_bridge_chip", *_na(("Type", "bridge_chip_type"), ("Firmware", "bridge_chip_fw"))),
            _leaf("Replays Since Reset", "replay_counter", _measured(row, str(row.gpu.replays))),
            _leaf("Replay Number Rollovers", "replay_rollover_counter", _measured(row, "0")),
            _leaf("Tx Throughput", "tx_util", _measured(row, f"{760 + row.index * 3} KB/s")),
            _leaf("Rx Throughput", "rx_util", _measured(row, f"{540 + row.index * 7} KB/s")),
            _leaf("Atomic Caps Outbound", "atomic_caps_outbound", "N/A"),
            _leaf("Atomic Caps Inbound", "atomic_caps_inbound", "FETCHADD_32 FETCHADD_64 SWAP_32 SWAP_64 CAS_32 CAS_64 "),
        )
    ]


def _activity(row: _Row) -> list[_Item]:
    gpu = row.gpu
    total, reserved, used, free = _memory(gpu)
    slow = "\x00"  # marks the two reasons that are printed one level deeper in text
    reasons = [
        ("Idle", "gpu_idle"),
        ("Applications Clocks Setting", "applications_clocks_setting"),
        ("SW Power Cap", "sw_power_cap"),
        ("HW Slowdown", "hw_slowdown"),
        (f"{slow}HW Thermal Slowdown", "hw_thermal_slowdown"),
        (f"{slow}HW Power Brake Slowdown", "hw_power_brake_slowdown"),
        ("Sync Boost", "sync_boost"),
        ("SW Thermal Slowdown", "sw_thermal_slowdown"),
        ("Display Clock Setting", "display_clocks_setting"),
    ]
    counters = [
        ("SW Power Capping", "sw_power_cap"),
        ("Sync Boost", "sync_boost"),
        ("SW Thermal Slowdown", "sw_therm_slowdown"),
        ("HW Thermal Slowdown", "hw_therm_slowdown"),
        ("HW Power Braking", "hw_power_brake"),
    ]

    def memory(total_mib: int, used_mib: int, free_mib: int) -> list[_Item]:
        return [
            _leaf("Total", "total", f"{total_mib} MiB"),
            _leaf("Used", "used", f"{used_mib} MiB"),
            _leaf("Free", "free", f"{free_mib} MiB"),
        ]

    frame_buffer = memory(total, used, free)
    frame_buffer.insert(1, _leaf("Reserved", "reserved", f"{reserved} MiB"))
    bar1_used = 2 if gpu.processes else 0
    sessions = [("Active Sessions", "session_count"), ("Average FPS", "average_fps"), ("Average Latency", "average_latency")]
    return [
        _leaf("Fan Speed", "fan_speed", "N/A"),
        _leaf("Performance State", "performance_state", _measured(row, gpu.pstate)),
        _group(
            "Clocks Event Reasons",
            "clocks_event_reasons",
            *(_leaf(k, f"clocks_event_reason_{t}", _measured(row, "Not Active")) for k, t in reasons),
        ),
        _group(
            "Clocks Event Reasons Counters",
            "clocks_event_reasons_counters",
            *(_leaf(k, f"clocks_event_reasons_counters_{t}", _measured(row, "0 us")) for k, t in counters),
        ),
        _leaf("Sparse Operation Mode", "sparse_operation_mode", "N/A"),
        _group("FB Memory Usage", "fb_memory_usage", *frame_buffer),
        _group("BAR1 Memory Usage", "bar1_memory_usage", *memory(gpu.bar1_mib, bar1_used, gpu.bar1_mib - bar1_used)),
        _group("Conf Compute Protected Memory Usage", "cc_protected_memory_usage", *memory(0, 0, 0)),
        _leaf("Compute Mode", "compute_mode", "Default"),
        _group(
            "Utilization",
            "utilization",
            _leaf("GPU", "gpu_util", _measured(row, f"{gpu.utilization} %")),
            _leaf("Memory", "memory_util", _measured(row, f"{gpu.utilization // 2} %")),
            *(
                _leaf(key, tag, _measured(row, "0 %"))
                for key, tag in (
                    ("Encoder", "encoder_util"),
                    ("Decoder", "decoder_util"),
                    ("JPEG", "jpeg_util"),
                    ("OFA", "ofa_util"),
                )
            ),
        ),
        _group("Encoder Stats", "encoder_stats", *(_leaf(k, t, "0") for k, t in sessions)),
        _group("FBC Stats", "fbc_stats", *(_leaf(k, t, "0") for k, t in sessions)),
    ]


def _errors(row: _Row) -> list[_Item]:
    def both(key: str, tag: str, short: str, value: str) -> _Item:
        return _group(key, tag, _leaf("Current", f"current_{short}", value), _leaf("Pending", f"pending_{short}", value))

    def counts(dram_uncorrectable: int) -> list[_Item]:
        names = [
            ("SRAM Correctable", "sram_correctable", 0),
            ("SRAM Uncorrectable Parity", "sram_uncorrectable_parity", 0),
            ("SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded", 0),
            ("DRAM Correctable", "dram_correctable", 0),
            ("DRAM Uncorrectable", "dram_uncorrectable", dram_uncorrectable),
        ]
        return [_leaf(key, tag, _measured(row, str(n))) for key, tag, n in names]

    sources = [("SRAM L2", "sram_l2"), ("SRAM SM", "sram_sm"), ("SRAM Microcontroller", "sram_microcontroller"),
               ("SRAM PCIE", "sram_pcie"), ("SRAM Other", "sram_other")]  # fmt: skip
    retired = _group("", "x", *(_xml_only(t) for t in ("retired_count", "retired_pagelist"))).children
    pending = "Yes" if row.gpu.remap_pending else "No"
    histogram = [("Max", "max", 512), ("High", "high", 0), ("Partial", "partial", 0), ("Low", "low", 0), ("None", "none", 0)]
    return [
        both("DRAM Encryption Mode", "dram_encryption_mode", "dram_encryption", "Disabled"),
        both("ECC Mode", "ecc_mode", "ecc", "Enabled"),
        _group(
            "ECC Errors",
            "ecc_errors",
            _group("Volatile", "volatile", *counts(row.gpu.ecc_uncorrectable)),
            _group(
                "Aggregate",
                "aggregate",
                *counts(row.gpu.ecc_uncorrectable),
                _leaf("SRAM Threshold Exceeded", "sram_threshold_exceeded", _measured(row, "No")),
            ),
            _group(
                "Aggregate Uncorrectable SRAM Sources",
                "aggregate_uncorrectable_sram_sources",
                *(_leaf(k, t, _measured(row, "0")) for k, t in sources),
            ),
            _leaf("Channel Repair Pending", "channel_repair_pending", "No"),
            _leaf("TPC Repair Pending", "tpc_repair_pending", "No"),
            _leaf("Unrepairable Memory", "unrepairable_memory", "No"),
        ),
        _group(
            "Retired Pages",
            "retired_pages",
            _Item("Single Bit ECC", "multiple_single_bit_retirement", "N/A", children=list(retired)),
            _Item("Double Bit ECC", "double_bit_retirement", "N/A", children=list(retired)),
            _leaf("Pending Page Blacklist", "pending_blacklist", "N/A"),
            _xml_only("pending_retirement"),
        ),
        _group(
            "Remapped Rows",
            "remapped_rows",
            _leaf("Correctable Error", "remapped_row_corr", "0"),
            _leaf("Uncorrectable Error", "remapped_row_unc", "1" if row.gpu.remap_pending else "0"),
            _leaf("Pending", "remapped_row_pending", pending),
            _leaf("Remapping Failure Occurred", "remapped_row_failure", "No"),
            _group(
                "Bank Remap Availability Histogram",
                "row_remapper_histogram",
                *(_leaf(k, f"row_remapper_histogram_{t}", f"{n} bank(s)") for k, t, n in histogram),
            ),
        ),
    ]


def _power(row: _Row) -> list[_Item]:
    gpu = row.gpu
    draw = [("Average Power Draw", "average_power_draw"), ("Instantaneous Power Draw", "instant_power_draw")]
    limits = [
        ("Current Power Limit", "current_power_limit"),
        ("Requested Power Limit", "requested_power_limit"),
        ("Default Power Limit", "default_power_limit"),
        ("Min Power Limit", "min_power_limit"),
        ("Max Power Limit", "max_power_limit"),
    ]
    limit = [300.0 if key.startswith("Min") else gpu.power_limit_w for key, _ in limits]
    state = _xml_only("power_state", _measured(row, gpu.pstate))
    return [
        _group(
            "Temperature",
            "temperature",
            _leaf("GPU Current Temp", "gpu_temp", _measured(row, f"{gpu.temperature_c} C")),
            _leaf("GPU T.Limit Temp", "gpu_temp_tlimit", _measured(row, f"{85 - gpu.temperature_c} C")),
            _leaf("GPU Shutdown T.Limit Temp", "gpu_temp_max_tlimit_threshold", "-5 C"),
            _leaf("GPU Slowdown T.Limit Temp", "gpu_temp_slow_tlimit_threshold", "-2 C"),
            _leaf("GPU Max Operating T.Limit Temp", "gpu_temp_max_gpu_tlimit_threshold", "0 C"),
            _leaf("GPU Target Temperature", "gpu_target_temperature", "N/A"),
            _leaf("Memory Current Temp", "memory_temp", "N/A"),
            _leaf("Memory Max Operating T.Limit Temp", "gpu_temp_max_mem_tlimit_threshold", "N/A"),
        ),
        _group("", "supported_gpu_target_temp", _xml_only("gpu_target_temp_min"), _xml_only("gpu_target_temp_max")),
        _group(
            "GPU Power Readings",
            "gpu_power_readings",
            state,
            *(_leaf(k, t, _measured(row, f"{gpu.power_w:.2f} W")) for k, t in draw),
            *(_leaf(k, t, f"{watts:.2f} W") for (k, t), watts in zip(limits, limit, strict=True)),
        ),
        # WHY the space at the end: nvidia-smi prints one.
        _group("GPU Memory Power Readings ", "gpu_memory_power_readings", *_na(*draw)),
        _group("Module Power Readings", "module_power_readings", state, *_na(*draw, *limits)),
        _leaf("Power Smoothing", "power_smoothing", "N/A"),
        _group(
            "Workload Power Profiles",
            "power_profiles",
            *_na(
                ("Requested Profiles", "power_profile_requested_profiles"),
                ("Enforced Profiles", "power_profile_enforced_profiles"),
            ),
        ),
        _leaf("EDPp Multiplier", "edpp_multiplier", "N/A"),
    ]


def _rest(row: _Row, in_container: bool) -> list[_Item]:
    graphics, memory, video = _clocks(row.gpu)

    def clocks(key: str, tag: str, values: Sequence[int]) -> _Item:
        names = [("Graphics", "graphics_clock"), ("SM", "sm_clock"), ("Memory", "mem_clock"), ("Video", "video_clock")]
        return _group(key, tag, *(_leaf(k, t, _measured(row, f"{v} MHz")) for (k, t), v in zip(names, values, strict=True)))

    def deprecated(key: str, tag: str) -> _Item:
        return _group(key, tag, _leaf("Graphics", "graphics_clock", _DEPRECATED), _leaf("Memory", "mem_clock", _DEPRECATED))

    return [
        clocks("Clocks", "clocks", (graphics, graphics, memory, video)),
        deprecated("Applications Clocks", "applications_clocks"),
        deprecated("Default Applications Clocks", "default_applications_clocks"),
        _group("Deferred Clocks", "deferred_clocks", *_na(("Memory", "mem_clock"))),
        clocks("Max Clocks", "max_clocks", (2430, 2430, 12481, 2107)),
        _group("Max Customer Boost Clocks", "max_customer_boost_clocks", _leaf("Graphics", "graphics_clock", "2430 MHz")),
        _group("Clock Policy", "clock_policy", *_na(("Auto Boost", "auto_boost"), ("Auto Boost Default", "auto_boost_default"))),
        _group("", "voltage", _xml_only("graphics_volt", _DEPRECATED)),
        _group(
            "Fabric",
            "fabric",
            *_na(("State", "state"), ("Status", "status"), ("CliqueId", "cliqueId"), ("ClusterUUID", "clusterUuid")),
            _group(
                "Health",
                "health",
                *_na(
                    ("Summary", "summary"),
                    ("Bandwidth", "bandwidth"),
                    ("Route Recovery in progress", "route_recovery_in_progress"),
                    ("Route Unhealthy", "route_unhealthy"),
                    ("Access Timeout Recovery", "access_timeout_recovery"),
                    ("Incorrect Configuration", "incorrect_configuration"),
                    ("Partition Assigned", "partition_assigned"),
                ),
            ),
        ),
        _processes(row, in_container),
        _group("", "accounted_processes"),
        _group("Capabilities", "capabilities", _leaf("EGM", "egm", "disabled")),
    ]


def _processes(row: _Row, in_container: bool) -> _Item:
    processes = row.gpu.processes
    if not processes:
        return _Item("Processes", "processes", "None", "")
    entries = []
    for pid, name, mib in processes:
        shown = "[Not Found]" if in_container else name
        entries.append(
            _group(
                "",
                "process_info",
                _leaf("GPU instance ID", "gpu_instance_id", "N/A"),
                _leaf("Compute instance ID", "compute_instance_id", "N/A"),
                _leaf("Process ID", "pid", str(pid)),
                _leaf("Type", "type", "C"),
                _leaf("Name", "process_name", shown),
                _leaf("Used GPU Memory", "used_memory", f"{mib} MiB"),
            )
        )
    return _group("Processes", "processes", *entries)


def _query_text(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    lines = ["", "==============NVSMI LOG==============", "", *_text_line(0, "Timestamp", _timestamp(now))]
    kernel_driver, cuda = ("KMD Version", "CUDA UMD Version") if _modern(hw, in_container) else ("Driver Version", "CUDA Version")
    lines += [*_text_line(0, kernel_driver, hw.nvidia.module_version), *_text_line(0, cuda, hw.nvidia.cuda_version), ""]
    lines += _text_line(0, "Attached GPUs", str(len(nvidia_smi_rows(hw))))
    for row in rows:
        if row.problem:
            lines += [row.problem, ""]
            continue
        items = _shown(_tree(hw, row, in_container), call.display)
        lines += [f"GPU {row.bus_id}", *(line for item in items for line in _text_item(item, 1)), ""]
    return "\n".join(lines) + "\n"


def _modern(hw: Hardware, in_container: bool) -> bool:
    """Since driver 610 the header speaks of the kernel-mode and the CUDA user-mode driver."""
    return int(_library(hw, in_container).split(".")[0]) >= 610


_SECTIONS = {
    "MEMORY": ("FB Memory Usage", "BAR1 Memory Usage", "Conf Compute Protected Memory Usage"),
    "UTILIZATION": ("Utilization",),
    "ECC": ("DRAM Encryption Mode", "ECC Mode", "ECC Errors"),
    "TEMPERATURE": ("Temperature",),
    "POWER": ("GPU Power Readings", "GPU Memory Power Readings ", "Module Power Readings", "Power Smoothing"),
    "CLOCK": ("Clocks", "Applications Clocks", "Default Applications Clocks", "Deferred Clocks", "Max Clocks"),
    "COMPUTE": ("Compute Mode",),
    "PIDS": ("Processes",),
    "PERFORMANCE": ("Performance State", "Clocks Event Reasons", "Sparse Operation Mode"),
    "PAGE_RETIREMENT": ("Retired Pages",),
    "ROW_REMAPPER": ("Remapped Rows",),
    "RESET_STATUS": ("GPU Recovery Action",),
}


def _shown(items: list[_Item], display: list[str]) -> list[_Item]:
    """The sections that ``-d`` asks for; all without it."""
    if not display:
        return items
    for name in display:
        if name not in _SECTIONS:
            raise _Refusal(f"Invalid display type specified: {name}. Please run 'nvidia-smi -h' for help.\n")
    wanted = {key for name in display for key in _SECTIONS[name]}
    return [item for item in items if item.key in wanted]


def _text_line(depth: int, key: str, value: str) -> list[str]:
    return [f"{'    ' * depth + key:<55}: {value}"]


def _text_item(item: _Item, depth: int) -> Iterator[str]:
    if not item.key:
        # A process has no heading of its own; entries that only XML has are silent.
        for child in item.children if item.tag == "process_info" else []:
            yield from _text_item(_leaf(child.key, child.tag, child.value or ""), depth)
        return
    key, level = (item.key[1:], depth + 1) if item.key.startswith("\x00") else (item.key, depth)
    if item.value is not None:
        yield from _text_line(level, key, item.value)
        return
    yield f"{'    ' * level}{key}"
    for child in item.children:
        yield from _text_item(child, depth + 1)


def _query_xml(hw: Hardware, rows: list[_Row], call: _Call, now: datetime, in_container: bool) -> str:
    lines = [
        '<?xml version="1.0" ?>',
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        "<nvidia_smi_log>",
        f"\t<timestamp>{_timestamp(now)}</timestamp>",
        f"\t<driver_version>{hw.nvidia.module_version}</driver_version>",
        f"\t<cuda_version>{hw.nvidia.cuda_version}</cuda_version>",
        f"\t<attached_gpus>{len(nvidia_smi_rows(hw))}</attached_gpus>",
    ]
    for row in rows:
        if row.problem:
            lines.append(escape(row.problem))
            continue
        items = _shown(_tree(hw, row, in_container), call.display)
        lines += [f'\t<gpu id="{row.bus_id}">', *(line for item in items for line in _xml_item(item, 2)), "\t</gpu>", ""]
    return "\n".join([*lines, "</nvidia_smi_log>"]) + "\n"


def _xml_item(item: _Item, depth: int) -> Iterator[str]:
    indent = "\t" * depth
    if not item.tag:
        return
    value = item.value if item.xml is None else item.xml
    if item.children:
        yield f"{indent}<{item.tag}>"
        for child in item.children:
            yield from _xml_item(child, depth + 1)
        yield f"{indent}</{item.tag}>"
    elif item.value is None or item.tag == "processes":
        # A list without entries: the closing tag stands on its own line, with the word "None" between for MIG devices.
        yield f"{indent}<{item.tag}>"
        if value:
            yield f"{indent}\t{escape(value)}"
        yield f"{indent}</{item.tag}>"
    else:
        yield f"{indent}<{item.tag}>{escape(value or '')}</{item.tag}>"


_MODES: dict[str, Callable[[Hardware, list[_Row], _Call, datetime, bool], str]] = {
    "table": _table, "list": _list, "version": _version, "query": _query_text, "xml": _query_xml, "gpu": _query_gpu,
    "apps": _query_apps, "topo": _topo, "p2p": _p2p,
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

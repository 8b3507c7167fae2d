"""``nvidia-smi --query-gpu=`` and ``--query-compute-apps=``: fields, units and CSV."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from proofbook.lab.sim.smi_rows import (
    DEPRECATED,
    RESET_NEEDED,
    Call,
    Row,
    clocks_of,
    generation,
    host_speed,
    link_of,
    measured,
    memory_of,
    smi_rows,
)
from proofbook.lab.sim.state import Hardware

_Value = Callable[[Hardware, Row], str]
GPU_FIELDS: dict[str, tuple[str, _Value]] = {}  # name -> unit, value
ALIASES = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_serial": "serial", "gpu_bus_id": "pci.bus_id",
    "pcie.link.gen.gpucurrent": "pcie.link.gen.current", "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm", "clocks.mem": "clocks.current.memory", "clocks.video": "clocks.current.video",
    "clocks.max.mem": "clocks.max.memory", "clocks.max.gr": "clocks.max.graphics",
    "used_memory": "used_gpu_memory", "process_name": "process_name",
}  # fmt: skip


def _add(name: str, value: _Value, unit: str = "") -> None:
    GPU_FIELDS[name] = (unit, value)


def _bracket(text: str) -> str:
    return f"[{text}]" if text in (RESET_NEEDED, "N/A", "Not Supported", DEPRECATED) else text


def _register_fields() -> None:
    """Every field that can be queried, in the order of ``--help-query-gpu``."""
    _add("timestamp", lambda hw, r: "")
    _add("driver_version", lambda hw, r: hw.nvidia.module_version)
    _add("count", lambda hw, r: str(len(smi_rows(hw))))
    _add("name", lambda hw, r: r.gpu.name)
    _add("serial", lambda hw, r: r.gpu.serial)
    _add("uuid", lambda hw, r: r.gpu.uuid)
    _add("pci.bus_id", lambda hw, r: r.bus_id)
    _add("pci.domain", lambda hw, r: f"0x{r.bus_id[4:8]}")
    _add("pci.bus", lambda hw, r: f"0x{r.bus_id[9:11]}")
    _add("pci.device", lambda hw, r: f"0x{r.bus_id[12:14]}")
    _add("pci.device_id", lambda hw, r: f"0x{r.device.device:04X}{r.device.vendor:04X}")
    _add("pci.sub_device_id", lambda hw, r: f"0x{r.device.subsystem_device:04X}{r.device.subsystem_vendor:04X}")
    _add("pcie.link.gen.current", lambda hw, r: measured(r, str(generation(link_of(r).speed))))
    _add("pcie.link.gen.max", lambda hw, r: str(generation(link_of(r).max_speed)))
    _add("pcie.link.gen.gpumax", lambda hw, r: str(generation(link_of(r).max_speed)))
    _add("pcie.link.gen.hostmax", lambda hw, r: str(generation(host_speed(hw, r))))
    _add("pcie.link.width.current", lambda hw, r: measured(r, str(link_of(r).width)))
    _add("pcie.link.width.max", lambda hw, r: str(link_of(r).max_width))
    _add("index", lambda hw, r: str(r.index))
    _add("display_mode", lambda hw, r: DEPRECATED)
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
    _add("reset_status.reset_required", lambda hw, r: DEPRECATED)
    _add("reset_status.drain_and_reset_recommended", lambda hw, r: DEPRECATED)
    _add("fan.speed", lambda hw, r: "N/A", "%")
    _add("pstate", lambda hw, r: measured(r, r.gpu.pstate))
    _add("clocks_event_reasons.active", lambda hw, r: measured(r, "0x0000000000000000"))
    for reason in ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
                   "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost"):  # fmt: skip
        _add(f"clocks_event_reasons.{reason}", lambda hw, r: measured(r, "Not Active"))
    _add("memory.total", lambda hw, r: f"{memory_of(r.gpu)[0]} MiB", "MiB")
    _add("memory.reserved", lambda hw, r: f"{memory_of(r.gpu)[1]} MiB", "MiB")
    _add("memory.used", lambda hw, r: f"{memory_of(r.gpu)[2]} MiB", "MiB")
    _add("memory.free", lambda hw, r: f"{memory_of(r.gpu)[3]} MiB", "MiB")
    _add("compute_mode", lambda hw, r: "Default")
    _add("compute_cap", lambda hw, r: "12.0")
    _add("utilization.gpu", lambda hw, r: measured(r, f"{r.gpu.utilization} %"), "%")
    _add("utilization.memory", lambda hw, r: measured(r, f"{r.gpu.utilization // 2} %"), "%")
    _add("ecc.mode.current", lambda hw, r: "Enabled")
    _add("ecc.mode.pending", lambda hw, r: "Enabled")
    _add("ecc.errors.corrected.volatile.total", lambda hw, r: measured(r, "0"))
    _add("ecc.errors.uncorrected.volatile.total", lambda hw, r: measured(r, str(r.gpu.ecc_uncorrectable)))
    _add("ecc.errors.uncorrected.volatile.dram", lambda hw, r: measured(r, str(r.gpu.ecc_uncorrectable)))
    _add("temperature.gpu", lambda hw, r: measured(r, str(r.gpu.temperature_c)))
    _add("temperature.gpu.tlimit", lambda hw, r: measured(r, str(85 - r.gpu.temperature_c)))
    _add("temperature.memory", lambda hw, r: "N/A")
    _add("power.draw", lambda hw, r: measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    _add("power.draw.average", lambda hw, r: measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    _add("power.draw.instant", lambda hw, r: measured(r, f"{r.gpu.power_w:.2f} W"), "W")
    for limit in ("power.limit", "enforced.power.limit", "power.default_limit", "power.max_limit"):
        _add(limit, lambda hw, r: f"{r.gpu.power_limit_w:.2f} W", "W")
    _add("power.min_limit", lambda hw, r: "300.00 W", "W")
    _add("clocks.current.graphics", lambda hw, r: measured(r, f"{clocks_of(r.gpu)[0]} MHz"), "MHz")
    _add("clocks.current.sm", lambda hw, r: measured(r, f"{clocks_of(r.gpu)[0]} MHz"), "MHz")
    _add("clocks.current.memory", lambda hw, r: measured(r, f"{clocks_of(r.gpu)[1]} MHz"), "MHz")
    _add("clocks.current.video", lambda hw, r: measured(r, f"{clocks_of(r.gpu)[2]} MHz"), "MHz")
    _add("clocks.max.graphics", lambda hw, r: "2430 MHz", "MHz")
    _add("clocks.max.sm", lambda hw, r: "2430 MHz", "MHz")
    _add("clocks.max.memory", lambda hw, r: "12481 MHz", "MHz")
    _add("mig.mode.current", lambda hw, r: "Disabled")
    _add("mig.mode.pending", lambda hw, r: "Disabled")
    _add("gsp.mode.current", lambda hw, r: "Enabled")


_register_fields()


def _cell(text: str, nounits: bool, unit: str) -> str:
    text = _bracket(text)
    return text.removesuffix(f" {unit}") if nounits and unit else text


def query_gpu(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    names = [ALIASES.get(f, f) for f in call.fields]
    nounits = "nounits" in call.format
    lines = []
    if "noheader" not in call.format:
        lines.append(", ".join(f"{n} [{GPU_FIELDS[n][0]}]" if GPU_FIELDS[n][0] else n for n in names))
    for row in rows:
        if row.problem:
            lines.append(row.problem)
            continue
        cells = []
        for name in names:
            unit, value = GPU_FIELDS[name]
            text = (
                now.strftime("%Y/%m/%d %H:%M:%S.") + f"{now.microsecond // 1000:03d}" if name == "timestamp" else value(hw, row)
            )
            cells.append(_cell(text, nounits, unit))
        lines.append(", ".join(cells))
    return "\n".join(lines) + "\n"


APP_FIELDS = {"timestamp": "", "gpu_name": "", "pci.bus_id": "", "serial": "", "uuid": "", "name": "", "pid": "",
               "process_name": "", "used_gpu_memory": "MiB"}  # fmt: skip
_APP_HEADERS = {"pci.bus_id": "gpu_bus_id", "serial": "gpu_serial", "uuid": "gpu_uuid"}


def query_apps(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    # WHY: here "name" is the process, "gpu_name" the GPU.
    names = ["process_name" if f == "name" else "gpu_name" if f == "gpu_name" else ALIASES.get(f, f) for f in call.fields]
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

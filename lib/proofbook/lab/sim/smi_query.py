"""``nvidia-smi -q`` as text and as XML: one tree, printed two ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape  # not xml.sax.saxutils: it loads an HTTP client, which every call in an emulated machine would wait for

from proofbook.lab.sim.smi_rows import (
    DEPRECATED,
    Call,
    Refusal,
    Row,
    clocks_of,
    generation,
    host_speed,
    link_of,
    measured,
    memory_of,
    pdi_of,
    smi_rows,
    speaks_of_kmd,
    timestamp,
)
from proofbook.lab.sim.state import Hardware


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


def _tree(hw: Hardware, row: Row, in_container: bool) -> list[_Item]:
    """Everything that ``-q`` says of one GPU.

    The order and the names in text follow driver 595 on an eight-GPU host, the XML tags driver 575. Tags of entries
    that are newer than 575 (PDI, repair, fabric summary, EDPp) are formed by the same rule and not verified.
    """
    return [*_identity(hw, row), *_bus(hw, row), *_activity(row), *_errors(row), *_power(row), *_rest(row, in_container)]


def _identity(hw: Hardware, row: Row) -> list[_Item]:
    gpu = row.gpu
    return [
        _leaf("Product Name", "product_name", gpu.name),
        _leaf("Product Brand", "product_brand", "NVIDIA"),
        _leaf("Product Architecture", "product_architecture", "Blackwell"),
        _leaf("Display Mode", "display_mode", DEPRECATED),
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
        _leaf("GPU PDI", "gpu_pdi", pdi_of(gpu)),
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
            _xml_only("reset_required", DEPRECATED),
            _xml_only("drain_and_reset_recommended", DEPRECATED),
        ),
        _leaf("GPU Recovery Action", "gpu_recovery_action", gpu.recovery_action),
        _leaf("GSP Firmware Version", "gsp_firmware_version", hw.nvidia.gsp_firmware),
        _group("IBMNPU", "ibmnpu", *_na(("Relaxed Ordering Mode", "relaxed_ordering_mode"))),
    ]


def _bus(hw: Hardware, row: Row) -> list[_Item]:
    device, link, bus_id = row.device, link_of(row), row.bus_id
    ids = f"{device.device:04X}{device.vendor:04X}"
    subsystem = f"{device.subsystem_device:04X}{device.subsystem_vendor:04X}"
    current = measured(row, str(generation(link.speed)))
    best = str(min(generation(link.max_speed), generation(host_speed(hw, row))))
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
                    _leaf("Device Max", "max_device_link_gen", str(generation(link.max_speed))),
                    _leaf("Host Max", "max_host_link_gen", str(generation(host_speed(hw, row)))),
                ),
                _group(
                    "Link Width",
                    "link_widths",
                    _leaf("Max", "max_link_width", f"{link.max_width}x"),
                    _leaf("Current", "current_link_width", measured(row, f"{link.width}x")),
                ),
            ),
            _group("Bridge Chip", "pci_bridge_chip", *_na(("Type", "bridge_chip_type"), ("Firmware", "bridge_chip_fw"))),
            _leaf("Replays Since Reset", "replay_counter", measured(row, str(row.gpu.replays))),
            _leaf("Replay Number Rollovers", "replay_rollover_counter", measured(row, "0")),
            _leaf("Tx Throughput", "tx_util", measured(row, f"{760 + row.index * 3} KB/s")),
            _leaf("Rx Throughput", "rx_util", measured(row, f"{540 + row.index * 7} KB/s")),
            _leaf("Atomic Caps Outbound", "atomic_caps_outbound", "N/A"),
            _leaf("Atomic Caps Inbound", "atomic_caps_inbound", "FETCHADD_32 FETCHADD_64 SWAP_32 SWAP_64 CAS_32 CAS_64 "),
        )
    ]


def _activity(row: Row) -> list[_Item]:
    gpu = row.gpu
    total, reserved, used, free = memory_of(gpu)
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
        _leaf("Performance State", "performance_state", measured(row, gpu.pstate)),
        _group(
            "Clocks Event Reasons",
            "clocks_event_reasons",
            *(_leaf(k, f"clocks_event_reason_{t}", measured(row, "Not Active")) for k, t in reasons),
        ),
        _group(
            "Clocks Event Reasons Counters",
            "clocks_event_reasons_counters",
            *(_leaf(k, f"clocks_event_reasons_counters_{t}", measured(row, "0 us")) for k, t in counters),
        ),
        _leaf("Sparse Operation Mode", "sparse_operation_mode", "N/A"),
        _group("FB Memory Usage", "fb_memory_usage", *frame_buffer),
        _group("BAR1 Memory Usage", "bar1_memory_usage", *memory(gpu.bar1_mib, bar1_used, gpu.bar1_mib - bar1_used)),
        _group("Conf Compute Protected Memory Usage", "cc_protected_memory_usage", *memory(0, 0, 0)),
        _leaf("Compute Mode", "compute_mode", "Default"),
        _group(
            "Utilization",
            "utilization",
            _leaf("GPU", "gpu_util", measured(row, f"{gpu.utilization} %")),
            _leaf("Memory", "memory_util", measured(row, f"{gpu.utilization // 2} %")),
            *(
                _leaf(key, tag, measured(row, "0 %"))
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


def _errors(row: Row) -> list[_Item]:
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
        return [_leaf(key, tag, measured(row, str(n))) for key, tag, n in names]

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
                _leaf("SRAM Threshold Exceeded", "sram_threshold_exceeded", measured(row, "No")),
            ),
            _group(
                "Aggregate Uncorrectable SRAM Sources",
                "aggregate_uncorrectable_sram_sources",
                *(_leaf(k, t, measured(row, "0")) for k, t in sources),
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


def _power(row: Row) -> list[_Item]:
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
    state = _xml_only("power_state", measured(row, gpu.pstate))
    return [
        _group(
            "Temperature",
            "temperature",
            _leaf("GPU Current Temp", "gpu_temp", measured(row, f"{gpu.temperature_c} C")),
            _leaf("GPU T.Limit Temp", "gpu_temp_tlimit", measured(row, f"{85 - gpu.temperature_c} C")),
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
            *(_leaf(k, t, measured(row, f"{gpu.power_w:.2f} W")) for k, t in draw),
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


def _rest(row: Row, in_container: bool) -> list[_Item]:
    graphics, memory, video = clocks_of(row.gpu)

    def clocks(key: str, tag: str, values: Sequence[int]) -> _Item:
        names = [("Graphics", "graphics_clock"), ("SM", "sm_clock"), ("Memory", "mem_clock"), ("Video", "video_clock")]
        return _group(key, tag, *(_leaf(k, t, measured(row, f"{v} MHz")) for (k, t), v in zip(names, values, strict=True)))

    def deprecated(key: str, tag: str) -> _Item:
        return _group(key, tag, _leaf("Graphics", "graphics_clock", DEPRECATED), _leaf("Memory", "mem_clock", DEPRECATED))

    return [
        clocks("Clocks", "clocks", (graphics, graphics, memory, video)),
        deprecated("Applications Clocks", "applications_clocks"),
        deprecated("Default Applications Clocks", "default_applications_clocks"),
        _group("Deferred Clocks", "deferred_clocks", *_na(("Memory", "mem_clock"))),
        clocks("Max Clocks", "max_clocks", (2430, 2430, 12481, 2107)),
        _group("Max Customer Boost Clocks", "max_customer_boost_clocks", _leaf("Graphics", "graphics_clock", "2430 MHz")),
        _group("Clock Policy", "clock_policy", *_na(("Auto Boost", "auto_boost"), ("Auto Boost Default", "auto_boost_default"))),
        _group("", "voltage", _xml_only("graphics_volt", DEPRECATED)),
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


def _processes(row: Row, in_container: bool) -> _Item:
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


def query_text(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    lines = ["", "==============NVSMI LOG==============", "", *_text_line(0, "Timestamp", timestamp(now))]
    kernel_driver, cuda = "Driver Version", "CUDA Version"
    if speaks_of_kmd(hw, in_container):
        kernel_driver, cuda = "KMD Version", "CUDA UMD Version"
    lines += [*_text_line(0, kernel_driver, hw.nvidia.module_version), *_text_line(0, cuda, hw.nvidia.cuda_version), ""]
    lines += _text_line(0, "Attached GPUs", str(len(smi_rows(hw))))
    for row in rows:
        if row.problem:
            lines += [row.problem, ""]
            continue
        items = _shown(_tree(hw, row, in_container), call.display)
        lines += [f"GPU {row.bus_id}", *(line for item in items for line in _text_item(item, 1)), ""]
    return "\n".join(lines) + "\n"


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
            raise Refusal(f"Invalid display type specified: {name}. Please run 'nvidia-smi -h' for help.\n")
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


def query_xml(hw: Hardware, rows: list[Row], call: Call, now: datetime, in_container: bool) -> str:
    lines = [
        '<?xml version="1.0" ?>',
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        "<nvidia_smi_log>",
        f"\t<timestamp>{timestamp(now)}</timestamp>",
        f"\t<driver_version>{hw.nvidia.module_version}</driver_version>",
        f"\t<cuda_version>{hw.nvidia.cuda_version}</cuda_version>",
        f"\t<attached_gpus>{len(smi_rows(hw))}</attached_gpus>",
    ]
    for row in rows:
        if row.problem:
            lines.append(escape(row.problem, quote=False))
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
            yield f"{indent}\t{escape(value, quote=False)}"
        yield f"{indent}</{item.tag}>"
    else:
        yield f"{indent}<{item.tag}>{escape(value or '', quote=False)}</{item.tag}>"

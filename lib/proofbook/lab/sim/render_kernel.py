"""The kernel log of a boot of the simulated machine, from one :class:`Hardware`.

What is not there is not in the log: a missing device is not enumerated, not put into a group, not probed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from proofbook.lab.sim.fault_lines import DEBUG, INFO, NOTICE
from proofbook.lab.sim.render_nvidia import driver_boot_lines
from proofbook.lab.sim.state import Hardware, PciDevice
from proofbook.lab.sim.topology import bandwidth_mbps, bar_flags, bridge_buses, irq, probe_order, root_port, roots, speed_text


@dataclass
class _Log:
    """Kernel messages with growing time stamps."""

    now: float = 0.0
    lines: list[tuple[float, int, str]] = field(default_factory=list)

    def say(self, text: str, priority: int = INFO, after: float = 0.00011) -> None:
        # Real spacing is uneven; the text decides it here, so that the same boot always looks the same.
        self.now = round(self.now + after * (0.55 + zlib.crc32(text.encode()) % 1000 / 1000), 6)
        self.lines.append((self.now, priority, text))

    def at(self, seconds: float) -> None:
        self.now = max(self.now, seconds)


def kernel_boot_lines(hw: Hardware, cmdline: str, kernel: str) -> list[tuple[float, int, str]]:
    """The kernel log of one boot of this machine: (seconds since start, priority 0-7, text), in order.

    ``cmdline`` is printed and its IOMMU options are honoured; ``kernel`` is the release ("6.17.13-1-pve"). Faults are
    not part of a boot: see ``fault_lines``.
    """
    log = _Log()
    _start(log, hw, cmdline, kernel)
    _enumeration(log, hw)
    _iommu_policy(log, hw, cmdline)
    _iommu_groups_log(log, hw, cmdline)
    _drivers(log, hw)
    log.at(7.1)
    log.say("EXT4-fs (dm-1): re-mounted 3f0c2a57-6b1e-4d80-9a44-7c15e2b860fd r/w.")
    log.at(7.6)
    for pause, priority, text in driver_boot_lines(hw):
        log.say(text, priority, pause)
    bridge = "bridge: filtering via arp/ip/ip6tables is no longer available by default."
    log.say(f"{bridge} Update your scripts to load br_netfilter if you need this.", INFO, 0.9)
    return log.lines


def _start(log: _Log, hw: Hardware, cmdline: str, kernel: str) -> None:
    pve = kernel.endswith("-pve")
    build = f"#1 SMP PREEMPT_DYNAMIC PMX {kernel.removesuffix('-pve')} (2026-02-10T08:06Z)" if pve else "#1 SMP PREEMPT_DYNAMIC"
    compiler = "gcc (Debian 14.2.0-19) 14.2.0, GNU ld (GNU Binutils for Debian) 2.44"
    log.say(f"Linux version {kernel} (build@builder) ({compiler}) {build}", NOTICE, 0.0)
    log.say(f"Command line: {cmdline}", INFO, 0.0)
    for name in ("KERNEL supported cpus:", "  Intel GenuineIntel", "  AMD AuthenticAMD", "  Hygon HygonGenuine"):
        log.say(name, INFO, 0.0)
    log.say("BIOS-provided physical RAM map:", INFO, 0.0)
    top = (hw.memory_gib << 30) + (1 << 32) - 1
    for start, end, what in (
        (0x0, 0x9FFFF, "usable"),
        (0xA0000, 0xFFFFF, "reserved"),
        (0x100000, 0x75DAFFFF, "usable"),
        (0x75DB0000, 0x75FFFFFF, "reserved"),
        (0x76000000, 0xA4FFFFFF, "usable"),
        (0xA5000000, 0xAFFFFFFF, "reserved"),
        (0x100000000, top, "usable"),
    ):
        log.say(f"BIOS-e820: [mem 0x{start:016x}-0x{end:016x}] {what}", INFO, 0.0)
    log.say("NX (Execute Disable) protection: active", INFO, 0.0)
    log.say("efi: EFI v2.9 by American Megatrends", INFO, 0.0)
    log.say("SMBIOS 3.7.0 present.", INFO, 0.0)
    log.say(f"DMI: {hw.board_vendor} {hw.product}/{hw.board}, BIOS {hw.bios} {hw.bios_date}", INFO, 0.0)
    log.say("tsc: Detected 3100.004 MHz processor", INFO, 0.0)
    log.say("secureboot: Secure boot disabled", INFO, 0.0012)
    log.say("ACPI: IVRS 0x00000000A8D31000 0006A4 (v02 AMD    AmdTable 00000001 AMD  00000001)", INFO, 0.0031)
    log.say(f"CPU topo: Max. logical packages:   {hw.sockets}", INFO, 0.3)
    log.say("Booting paravirtualized kernel on bare hardware")
    log.say(f"Kernel command line: {cmdline}", NOTICE, 0.006)
    log.say("printk: log buffer data + meta data: 2097152 + 7340032 = 9437184 bytes")
    if not hw.iommu_on:
        log.say("x2apic: IRQ remapping doesn't support X2APIC mode", INFO, 1.2)
    log.at(1.6)
    log.say(f"smpboot: CPU0: {hw.cpu} (family: 0x19, model: 0x11, stepping: 0x1)")
    cpus = 2 * hw.sockets * hw.cores_per_socket
    log.say(f"smp: Brought up {hw.sockets} nodes, {cpus} CPUs", INFO, 0.31)
    log.say("ACPI: bus type PCI registered", INFO, 0.002)
    log.say("ACPI: Interpreter enabled", INFO, 0.05)


def _enumeration(log: _Log, hw: Hardware) -> None:
    devices = probe_order(hw)
    for position, bus in enumerate(roots(hw)):
        name = f"PNP0A08:{position:02x}"
        last = bus + 0x1F
        log.say(f"ACPI: PCI Root Bridge [PC{position:02X}] (domain 0000 [bus {bus:02x}-{last:02x}])", INFO, 0.006)
        log.say(f"acpi {name}: _OSC: OS supports [ExtendedConfig ASPM ClockPM Segments MSI EDR HPX-Type3]")
        if hw.os_controls_aer:
            log.say(f"acpi {name}: _OSC: platform does not support [LTR]")
            log.say(f"acpi {name}: _OSC: OS now controls [PCIeHotplug SHPCHotplug PME AER PCIeCapability DPC]")
        else:
            log.say(f"acpi {name}: _OSC: platform does not support [AER LTR DPC]")
            log.say(f"acpi {name}: _OSC: OS now controls [PCIeHotplug SHPCHotplug PME PCIeCapability]")
        log.say(f"PCI host bridge to bus 0000:{bus:02x}")
        log.say(f"pci_bus 0000:{bus:02x}: root bus resource [bus {bus:02x}-{last:02x}]")
        for device in devices:
            if int(root_port(hw, device).address[5:7], 16) == bus:
                _found(log, hw, device)
        node = next(d.numa_node for d in hw.pci.values() if d.address.startswith(f"0000:{bus:02x}:"))
        log.say(f"pci_bus 0000:{bus:02x}: on NUMA node {node}", DEBUG)


def _found(log: _Log, hw: Hardware, device: PciDevice) -> None:
    header = "01" if device.class_code == 0x060400 else "00"
    ids = f"[{device.vendor:04x}:{device.device:04x}]"
    log.say(f"pci {device.address}: {ids} type {header} class 0x{device.class_code:06x} {device.kind}")
    for index, address, size in device.bars:
        width, prefetch = bar_flags(device, address)
        flags = (" 64bit" if width == "64-bit" else "") + (" pref" if prefetch == "prefetchable" else "")
        log.say(f"pci {device.address}: BAR {index} [mem 0x{address:08x}-0x{address + size - 1:08x}{flags}]")
    if header == "01":
        _, first, last = bridge_buses(hw, device)
        log.say(f"pci {device.address}: PCI bridge to [bus {first:02x}{f'-{last:02x}' if last != first else ''}]")
        log.say(f"pci {device.address}: PME# supported from D0 D3hot D3cold")
    elif device.vendor == 0x10DE:
        log.say(f"pci {device.address}: PME# supported from D0 D3hot")
    limited = limited_bandwidth(hw, device)
    if limited:
        log.say(limited)


def limited_bandwidth(hw: Hardware, device: PciDevice) -> str:
    """The line that the kernel prints when a device's link trained below what the device can; "" when it did not.

    At boot a link runs at the speed that it trains to under load, not at the idle speed.
    """
    link = device.link
    if not link or not device.parent or device.class_code == 0x060400 or device.dead:
        return ""
    now, able = bandwidth_mbps(link.load_speed, link.width), bandwidth_mbps(link.max_speed, link.max_width)
    if now >= able:
        return ""
    return (
        f"pci {device.address}: {now // 1000}.{now % 1000:03d} Gb/s available PCIe bandwidth, limited by "
        f"{speed_text(link.load_speed)} x{link.width} link at {device.parent} (capable of {able // 1000}.{able % 1000:03d} Gb/s "
        f"with {speed_text(link.max_speed)} x{link.max_width} link)"
    )


# WHY: the list that drivers/iommu/amd/init.c accepts; anything else, "on" and "pt" included, is reported as unknown.
_AMD_IOMMU_OPTIONS = (
    "off", "fullflush", "force_isolation", "force_enable", "pgtbl_v1", "pgtbl_v2", "irtcachedis", "nohugepages",
    "v2_pgsizes_only",
)  # fmt: skip


@dataclass(frozen=True)
class IommuOptions:
    """What a kernel command line says about the IOMMU; the last word wins."""

    passthrough: bool = False
    passthrough_set: bool = False
    strict: bool = False
    strict_set: bool = False
    off: bool = False
    unknown_amd: tuple[str, ...] = ()


def iommu_options(cmdline: str) -> IommuOptions:
    """Read ``iommu=``, ``iommu.passthrough=``, ``iommu.strict=`` and ``amd_iommu=`` from a kernel command line."""
    passthrough = strict = off = passthrough_set = strict_set = False
    unknown: list[str] = []
    for word in cmdline.split():
        key, _, value = word.partition("=")
        for part in value.split(","):
            if key == "iommu.passthrough" or (key == "iommu" and part in ("pt", "nopt")):
                passthrough, passthrough_set = part in ("1", "pt"), True
            elif key == "iommu.strict":
                strict, strict_set = part == "1", True
            elif key in ("iommu", "amd_iommu") and part == "off":
                off = True
            elif key == "amd_iommu" and part == "fullflush":
                strict, strict_set = True, True
            elif key == "amd_iommu" and part not in _AMD_IOMMU_OPTIONS:
                unknown.append(part)
    return IommuOptions(passthrough, passthrough_set, strict, strict_set, off, tuple(unknown))


def _iommu_policy(log: _Log, hw: Hardware, cmdline: str) -> None:
    options = iommu_options(cmdline)
    for option in options.unknown_amd:
        log.say(f"AMD-Vi: Unknown option - '{option}'", NOTICE)
    # WHY: these two lines are printed even when there is no IOMMU at all; the groups directory is the truth.
    domain = "Passthrough" if options.passthrough else "Translated"
    log.say(
        f"iommu: Default domain type: {domain}{' (set via kernel command line)' if options.passthrough_set else ''}", INFO, 0.01
    )
    policy = "strict mode" if options.strict else "lazy mode"
    log.say(
        f"iommu: DMA domain TLB invalidation policy: {policy}{' (set via kernel command line)' if options.strict_set else ''}"
    )
    for line in ("SCSI subsystem initialized", "libata version 3.00 loaded.", "ACPI: bus type USB registered"):
        log.say(line)
    log.say("PCI: Using ACPI for IRQ routing", INFO, 0.004)
    for device in hw.present():
        if device.class_code == 0x030000:
            # WHY not a GPU: the firmware shows itself on the management controller's display.
            boots = device.vendor != 0x10DE
            does = "setting as boot VGA device" if boots else "VGA device added: decodes=io+mem,owns=none,locks=none"
            log.say(f"pci {device.address}: vgaarb: {does}")
    log.say("vgaarb: loaded")
    log.say("clocksource: Switched to clocksource tsc-early", INFO, 0.003)


def _iommu_groups_log(log: _Log, hw: Hardware, cmdline: str) -> None:
    iommus = [d for d in probe_order(hw) if d.class_code == 0x080600]
    if hw.iommu_on:
        for device in iommus:
            log.say(f"pci {device.address}: AMD-Vi: IOMMU performance counters supported", INFO, 0.02)
        for device in probe_order(hw):
            if device.iommu_group is not None:
                log.say(f"pci {device.address}: Adding to iommu group {device.iommu_group}", INFO, 0.00002)
        for device in iommus:
            log.say(f"pci {device.address}: AMD-Vi: Found IOMMU cap 0x40")
        log.say("AMD-Vi: Extended features (0x25bf732fa2295afe, 0x1d): PPR X2APIC NX GT [5] IA GA PC GA_vAPIC")
        log.say("AMD-Vi: Interrupt remapping enabled")
        log.say("AMD-Vi: X2APIC enabled")
        log.say("AMD-Vi: Virtual APIC enabled")
    log.say("PCI-DMA: Using software bounce buffering for IO (SWIOTLB)")
    log.say("software IO TLB: mapped [mem 0x0000000094000000-0x0000000098000000] (64MB)")
    log.say("LVT offset 0 assigned for vector 0x400")
    log.say("perf: AMD IBS detected (0x00000bff)")
    if hw.iommu_on:
        for position in range(len(iommus)):
            log.say(f"perf/amd_iommu: Detected AMD IOMMU #{position} (2 banks, 4 counters/bank).")


def _drivers(log: _Log, hw: Hardware) -> None:
    devices = probe_order(hw)
    for device in devices:
        if device.driver == "pcieport" and device.kind == "PCIe Root Port":
            log.say(f"pcieport {device.address}: PME: Signaling with IRQ {irq(hw, device)}", INFO, 0.001)
            if hw.os_controls_aer:
                log.say(f"pcieport {device.address}: AER: enabled with IRQ {irq(hw, device)}")
                log.say(f"pcieport {device.address}: DPC: enabled with IRQ {irq(hw, device)}")
    log.at(2.9)
    buses = 1
    for device in devices:
        if device.driver == "xhci_hcd":
            log.say(f"xhci_hcd {device.address}: xHCI Host Controller", INFO, 0.01)
            log.say(f"xhci_hcd {device.address}: new USB bus registered, assigned bus number {buses}")
            buses += 2
    for position, device in enumerate(d for d in devices if d.driver == "nvme"):
        log.say(f"nvme nvme{position}: pci function {device.address}", INFO, 0.002)
        log.say(f"nvme nvme{position}: 128/0/0 default/read/poll queues", INFO, 0.04)
    _network(log, devices)
    log.at(6.2)
    if any(d.driver == "vfio-pci" for d in devices):
        log.say("VFIO - User Level meta-driver version: 0.3")
    for device in devices:
        if device.driver == "ast":
            log.say(f"ast {device.address}: AST 2600 detected", INFO, 0.2)
            log.say(f"[drm] Initialized ast 0.1.0 for {device.address} on minor 0")
    for device in devices:
        if device.driver == "snd_hda_intel":
            log.say(f"snd_hda_intel {device.address}: enabling device (0000 -> 0002)", INFO, 0.01)
            log.say(f"snd_hda_intel {device.address}: Disabling MSI")
            log.say(f"snd_hda_intel {device.address}: Handle vga_switcheroo audio client")


def _network(log: _Log, devices: list[PciDevice]) -> None:
    position = 0
    for device in devices:
        if device.class_code >> 8 != 0x0200 or not device.driver:
            continue
        if device.driver == "mlx5_core" and device.link:
            link = device.link
            rate = bandwidth_mbps(link.load_speed, link.width)
            log.say(f"mlx5_core {device.address}: firmware version: 22.43.2566", INFO, 0.03)
            log.say(
                f"mlx5_core {device.address}: {rate // 1000}.{rate % 1000:03d} Gb/s available PCIe bandwidth "
                f"({speed_text(link.load_speed)} x{link.width} link)"
            )
            log.say(f"mlx5_core {device.address}: Rate limit: 127 rates are supported, range: 0Mbps to 97656Mbps", INFO, 0.3)
            log.say(f"mlx5_core {device.address}: E-Switch: Total vports 2, per vport: max uc(128) max mc(2048)")
            log.say(f"mlx5_core {device.address}: Port module event: module {device.address[-1]}, Cable plugged")
        elif device.driver == "bnxt_en":
            log.say(
                f"bnxt_en {device.address} eth{position}: Broadcom BCM57416 NetXtreme-E 10GBase-T Ethernet found at mem "
                f"{device.bars[0][1]:x}, node addr {device.serial}",
                INFO,
                0.2,
            )
        log.say(f"{device.driver} {device.address} {interface_name(device)}: renamed from eth{position}", INFO, 0.05)
        position += 1


def interface_name(device: PciDevice) -> str:
    """The predictable name of a network function: 0000:22:00.1 is ``enp34s0f1np1``."""
    function = device.address[-1]
    return f"enp{int(device.address[5:7], 16)}s{int(device.address[8:10], 16)}f{function}np{function}"

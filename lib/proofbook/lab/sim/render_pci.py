"""The PCI side of the simulated machine: ``lspci`` and sysfs, from one :class:`Hardware`.

What is known about a dead device (config space reads all ones) and kept here: the kernel caches vendor, device, class
and revision at enumeration (``pci-sysfs.c``: ``pci_config_attr``), so sysfs goes on showing them; what it reads live
(link width 63, link speed "Unknown", the ``config`` file) and what lspci reads from config space ("rev ff",
"Unknown header type 7f") shows the death.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proofbook.lab.sim import vfs
from proofbook.lab.sim.render_kernel import kernel_boot_lines
from proofbook.lab.sim.state import Hardware, Link, PciDevice
from proofbook.lab.sim.topology import bar_flags, bridge_buses, iommu_groups, irq, speed_text
from proofbook.lab.sim.vfs import FileNode

__all__ = ["below_their_bridges", "kernel_boot_lines", "lspci", "pci_files"]

#: Vendor names as in pci.ids.
VENDORS = {
    0x1000: "Broadcom / LSI",
    0x1022: "Advanced Micro Devices, Inc. [AMD]",
    0x10DE: "NVIDIA Corporation",
    0x144D: "Samsung Electronics Co Ltd",
    0x14E4: "Broadcom Inc. and subsidiaries",
    0x15B3: "Mellanox Technologies",
    0x1849: "ASRock Incorporation",
    0x1A03: "ASPEED Technology, Inc.",
    0x8086: "Intel Corporation",
}

_PROG_IF = {0x060400: "Normal decode", 0x010802: "NVM Express", 0x0C0330: "XHCI", 0x030000: "VGA controller"}

#: Classes that lspci cannot name: it prints the number even without -n.
_UNNAMED_CLASS = {0x0807: "Generic system peripheral", 0x1300: "Non-Essential Instrumentation"}


# ------------------------------------------------------------------------------------------------------- lspci


@dataclass
class _LspciOptions:
    domain: bool = False
    numeric: int = 0  # -n: 1, -nn: 2
    kernel: bool = False
    verbose: int = 0
    slot: str = ""
    ident: str = ""


class _UsageError(Exception):
    """lspci would refuse these arguments; the text is what it says."""


_USAGE = """Usage: lspci [<switches>]

Basic display modes:
-mm\t\tProduce machine-readable output (single -m for an obsolete format)
-t\t\tShow bus tree

Display options:
-v\t\tBe verbose (-vv or -vvv for higher verbosity)
-k\t\tShow kernel drivers handling each device
-D\t\tAlways show domain numbers

Resolving of device ID's to names:
-n\t\tShow numeric ID's
-nn\t\tShow both textual and numeric ID's (names & numbers)

Selection of devices:
-s [[[[<domain>]:]<bus>]:][<slot>][.[<func>]]\tShow only devices in selected slots
-d [<vendor>]:[<device>][:<class>[:<prog-if>]]\tShow only devices with specified ID's
"""


def lspci(hw: Hardware, argv: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Answer ``lspci`` (``argv`` without the program's name). Returns exit status, stdout, stderr.

    Options: -D, -n, -nn, -k, -v (-vv, -vvv), -s SLOT, -d ID; they combine as in ``-Dnnk``. Any other option is refused.
    """
    try:
        options = _parse_lspci(argv)
        chosen = [d for d in hw.present() if _slot_matches(options.slot, d) and _id_matches(options.ident, d)]
    except _UsageError as error:
        return 1, b"", str(error).encode()
    blocks = ["\n".join(_lspci_block(hw, d, options)) + "\n" for d in chosen]
    return 0, ("\n" if options.verbose else "").join(blocks).encode() + (b"\n" if options.verbose and blocks else b""), b""


def _parse_lspci(argv: Sequence[str]) -> _LspciOptions:
    options = _LspciOptions()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            raise _UsageError(_USAGE)
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "sd":
                value = letters or (rest.pop(0) if rest else "")
                if not value:
                    raise _UsageError(f"lspci: option requires an argument -- '{letter}'\n{_USAGE}")
                setattr(options, "slot" if letter == "s" else "ident", value)
                letters = ""
            elif letter == "D":
                options.domain = True
            elif letter == "n":
                options.numeric += 1
            elif letter == "k":
                options.kernel = True
            elif letter == "v":
                options.verbose += 1
            else:
                raise _UsageError(f"lspci: invalid option -- '{letter}'\n{_USAGE}")
    return options


_SLOT = re.compile(
    r"^(?:(?:(?P<domain>[0-9a-fA-F]{1,8}|\*)?:)?(?P<bus>[0-9a-fA-F]{1,2}|\*)?:)?(?P<slot>[0-9a-fA-F]{1,2}|\*)?(?:\.(?P<fn>[0-7]|\*)?)?$"
)
_IDENT = re.compile(r"^(?P<vendor>[0-9a-fA-F]{1,4}|\*)?:(?P<device>[0-9a-fA-F]{1,4}|\*)?(?::(?P<cls>[0-9a-fA-F]{1,4}|\*)?)?$")


def _slot_matches(wanted: str, device: PciDevice) -> bool:
    if not wanted:
        return True
    found = _SLOT.match(wanted)
    if not found:
        raise _UsageError("lspci: -s: Invalid slot number\n")
    domain, bus, rest = device.address.split(":")
    slot, function = rest.split(".")
    have = {"domain": domain, "bus": bus, "slot": slot, "fn": function}
    return all(found[k] in (None, "*") or int(found[k], 16) == int(v, 16) for k, v in have.items())


def _id_matches(wanted: str, device: PciDevice) -> bool:
    if not wanted:
        return True
    found = _IDENT.match(wanted)
    if not found:
        raise _UsageError("lspci: -d: Invalid syntax\n")
    have = {"vendor": device.vendor, "device": device.device, "cls": device.class_code >> 8}
    return all(found[k] in (None, "*", "") or int(found[k], 16) == v for k, v in have.items())


def _lspci_block(hw: Hardware, device: PciDevice, options: _LspciOptions) -> Iterator[str]:
    yield _lspci_headline(hw, device, options)
    if device.dead:
        # WHY: this is all that lspci can say; with -k it still knows the driver, from sysfs.
        if options.verbose:
            yield "\t!!! Unknown header type 7f"
        if options.verbose and device.slot:
            yield f"\tPhysical Slot: {device.slot}"
    elif options.verbose or options.kernel:
        if device.subsystem_vendor:
            yield f"\tSubsystem: {_subsystem(device, options.numeric)}"
        if options.verbose:
            yield from _lspci_verbose(hw, device, options.verbose)
    if options.verbose or options.kernel:
        if device.driver:
            yield f"\tKernel driver in use: {device.driver}"
        if device.modules:
            yield f"\tKernel modules: {', '.join(device.modules)}"


def _lspci_headline(hw: Hardware, device: PciDevice, options: _LspciOptions) -> str:
    # WHY: without -D lspci leaves the domain out as long as every device is in domain 0.
    domains = options.domain or any(not d.address.startswith("0000:") for d in hw.present())
    address = device.address if domains else device.address[5:]
    number = f"{device.class_code >> 8:04x}"
    class_name = device.class_name
    if options.numeric == 1:
        class_name = number
    elif options.numeric > 1 or (device.class_code >> 8) in _UNNAMED_CLASS:
        class_name = f"{device.class_name} [{number}]"
    line = f"{address} {class_name}: {_name(device, options.numeric)}"
    revision = 0xFF if device.dead else device.revision
    if revision:
        line += f" (rev {revision:02x})"
    if options.verbose:
        if device.dead:
            line += " (prog-if ff)"
        elif device.class_code in _PROG_IF:
            line += f" (prog-if {device.class_code & 0xFF:02x} [{_PROG_IF[device.class_code]}])"
    return line


def _name(device: PciDevice, numeric: int) -> str:
    ids = f"{device.vendor:04x}:{device.device:04x}"
    if numeric == 1:
        return ids
    if numeric == 0:
        return device.name
    unknown = f"Device {device.device:04x}"
    name = device.name.removesuffix(f" {device.device:04x}") if device.name.endswith(unknown) else device.name
    return f"{name} [{ids}]"


def _subsystem(device: PciDevice, numeric: int) -> str:
    ids = f"{device.subsystem_vendor:04x}:{device.subsystem_device:04x}"
    if numeric == 1:
        return ids
    vendor = VENDORS.get(device.subsystem_vendor, f"Device {device.subsystem_vendor:04x}")
    if numeric == 0:
        return device.subsystem_name or f"{vendor} Device {device.subsystem_device:04x}"
    return f"{device.subsystem_name or f'{vendor} Device'} [{ids}]"


def _lspci_verbose(hw: Hardware, device: PciDevice, level: int) -> Iterator[str]:
    bound = bool(device.driver)
    if device.slot:
        yield f"\tPhysical Slot: {device.slot}"
    if level == 1:
        flags = (["bus master"] if bound else []) + ["fast devsel", "latency 0"] + ([f"IRQ {irq(hw, device)}"] if bound else [])
        group = [f"IOMMU group {device.iommu_group}"] if hw.iommu_on and device.iommu_group is not None else []
        yield f"\tFlags: {', '.join([*flags, f'NUMA node {device.numa_node}', *group])}"
        yield from _regions(device)
        if device.link:
            yield f"\tCapabilities: [60] Express {_express_kind(device)}, MSI 00"
        return
    on = "+" if bound else "-"
    yield (f"\tControl: I/O- Mem{on} BusMaster{on} SpecCycle- MemWINV- VGASnoop- ParErr- Stepping- SERR- FastB2B- DisINTx{on}")
    yield "\tStatus: Cap+ 66MHz- UDF- FastB2B- ParErr- DEVSEL=fast >TAbort- <TAbort- <MAbort- >SERR- <PERR- INTx-"
    if bound:
        yield "\tLatency: 0"
        yield f"\tInterrupt: pin A routed to IRQ {irq(hw, device)}"
    yield f"\tNUMA node: {device.numa_node}"
    if hw.iommu_on and device.iommu_group is not None:
        yield f"\tIOMMU group: {device.iommu_group}"
    if device.class_code == 0x060400:
        primary, secondary, last = bridge_buses(hw, device)
        yield f"\tBus: primary={primary:02x}, secondary={secondary:02x}, subordinate={last:02x}, sec-latency=0"
    yield from _regions(device)
    if device.link:
        yield from _express(device, device.link)
        yield from _aer_capability(hw, device)
    if device.acs:
        yield "\tCapabilities: [2a0 v1] Access Control Services"
        yield "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+"
        # WHY: the kernel enables redirection only when an IOMMU isolates; redirected peer traffic goes up to the root.
        redirect = "+" if hw.iommu_on else "-"
        yield (f"\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir{redirect} CmpltRedir{redirect} UpstreamFwd+ EgressCtrl- DirectTrans-")


def _regions(device: PciDevice) -> Iterator[str]:
    for index, address, size in device.bars:
        yield f"\tRegion {index}: Memory at {address:08x} ({', '.join(bar_flags(device, address))}) [size={_size(size)}]"


def _size(size: int) -> str:
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def _express_kind(device: PciDevice) -> str:
    if device.kind == "PCIe Root Port":
        return "(v2) Root Port (Slot+)"
    if device.kind == "PCIe to PCI/PCI-X bridge":
        return "(v2) PCI-Express to PCI/PCI-X Bridge"
    return f"(v2) {device.kind.removeprefix('PCIe ')}"


def _express(device: PciDevice, link: Link) -> Iterator[str]:
    yield f"\tCapabilities: [60] Express {_express_kind(device)}, MSI 00"
    yield "\t\tDevCap:\tMaxPayload 256 bytes, PhantFunc 0, Latency L0s <64ns, L1 unlimited"
    reset = "+" if "flr" in device.reset_method else "-"
    yield f"\t\t\tExtTag+ AttnBtn- AttnInd- PwrInd- RBE+ FLReset{reset}"
    yield "\t\tDevCtl:\tCorrErr+ NonFatalErr+ FatalErr+ UnsupReq-"
    yield "\t\t\tRlxdOrd+ ExtTag+ PhantFunc- AuxPwr- NoSnoop+" + (f" FLReset{'-'}" if reset == "+" else "")
    yield "\t\t\tMaxPayload 256 bytes, MaxReadReq 512 bytes"
    seen = "+" if device.aer_correctable else "-"
    fatal = "+" if device.aer_fatal else "-"
    yield f"\t\tDevSta:\tCorrErr{seen} NonFatalErr- FatalErr{fatal} UnsupReq- AuxPwr- TransPend-"
    yield f"\t\tLnkCap:\tPort #0, Speed {link.max_speed:g}GT/s, Width x{link.max_width}, ASPM L1, Exit Latency L1 unlimited"
    yield "\t\t\tClockPM+ Surprise- LLActRep- BwNot- ASPMOptComp+"
    yield "\t\tLnkCtl:\tASPM Disabled; RCB 64 bytes, Disabled- CommClk-"
    yield "\t\t\tExtSynch- ClockPM- AutWidDis- BWInt- AutBWInt-"
    slow = " (downgraded)" if link.speed < link.max_speed else ""
    narrow = " (downgraded)" if link.width < link.max_width else ""
    yield f"\t\tLnkSta:\tSpeed {link.speed:g}GT/s{slow}, Width x{link.width}{narrow}"
    yield "\t\t\tTrErr- Train- SlotClk+ DLActive- BWMgmt- ABWMgmt-"
    yield f"\t\tLnkCap2: Supported Link Speeds: 2.5-{link.max_speed:g}GT/s, Crosslink- Retimer+ 2Retimers+ DRS-"
    yield f"\t\tLnkCtl2: Target Link Speed: {link.max_speed:g}GT/s, EnterCompliance- SpeedDis-"


def _aer_capability(hw: Hardware, device: PciDevice) -> Iterator[str]:
    clear = "DLP- SDES- TLP- FCP- CmpltTO- CmpltAbrt- UnxCmplt- RxOF- MalfTLP- ECRC- UnsupReq- ACSViol-"
    yield "\tCapabilities: [1b8 v2] Advanced Error Reporting"
    yield f"\t\tUESta:\t{clear}"
    yield f"\t\tUEMsk:\t{clear}"
    yield "\t\tUESvrt:\tDLP+ SDES+ TLP- FCP+ CmpltTO+ CmpltAbrt- UnxCmplt+ RxOF+ MalfTLP+ ECRC+ UnsupReq- ACSViol-"
    yield "\t\tCESta:\tRxErr- BadTLP- BadDLLP- Rollover- Timeout- AdvNonFatalErr-"
    yield "\t\tCEMsk:\tRxErr- BadTLP- BadDLLP- Rollover- Timeout- AdvNonFatalErr+"
    yield "\t\tAERCap:\tFirst Error Pointer: 00, ECRCGenCap+ ECRCGenEn+ ECRCChkCap+ ECRCChkEn+"
    yield "\t\t\tMultHdrRecCap- MultHdrRecEn- TLPPfxPres- HdrLogCap-"
    yield "\t\tHeaderLog: 00000000 00000000 00000000 00000000"
    if device.kind == "PCIe Root Port":
        native = "+" if hw.os_controls_aer else "-"
        yield f"\t\tRootCmd: CERptEn{native} NFERptEn{native} FERptEn{native}"


# ------------------------------------------------------------------------------------------------------- sysfs

_CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF")
_UNCORRECTABLE = (
    "Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt", "UnxCmplt", "RxOF", "MalfTLP", "ECRC", "UnsupReq",
    "ACSViol", "UncorrIntErr", "BlockedTLP", "AtomicOpBlocked", "TLPBlockedErr", "PoisonTLPBlocked",
)  # fmt: skip
_DEVICES = "/sys/bus/pci/devices"
_GROUPS = "/sys/kernel/iommu_groups"


def pci_files(hw: Hardware) -> dict[str, FileNode]:
    """sysfs as far as PCI and the IOMMU go: ``/sys/bus/pci`` and ``/sys/kernel/iommu_groups``.

    The attributes of a device lie directly below ``/sys/bus/pci/devices/<address>``. Without an IOMMU the groups
    directory is there and empty, and no device has an ``iommu_group`` link.
    """
    files: dict[str, FileNode] = {_DEVICES: vfs.directory(), _GROUPS: vfs.directory(), "/sys/bus/pci/drivers": vfs.directory()}
    for device in hw.present():
        files.update(_device_files(hw, device))
    if hw.iommu_on:
        for number, members in iommu_groups(hw).items():
            files.update(_group_files(number, members))
    return files


def below_their_bridges(hw: Hardware, files: Mapping[str, FileNode]) -> dict[str, FileNode]:
    """The same as the kernel keeps them: each device's folder below those of its bridges, and links to them on the bus.

    ``/sys/bus/pci/devices/0000:01:00.0`` leads to ``/sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0``.
    """
    real = {device.address: _place(hw, device) for device in hw.present()}
    placed: dict[str, FileNode] = {}
    for path, node in files.items():
        address, slash, name = path.removeprefix(_DEVICES + "/").partition("/")
        if not path.startswith(_DEVICES + "/") or address not in real:
            placed[path] = node
        elif not slash:
            placed |= {real[address]: node, path: vfs.link(posixpath.relpath(real[address], _DEVICES))}
        else:
            if node.kind == "link":
                leads = posixpath.normpath(posixpath.join(_DEVICES, address, node.target))
                node = vfs.link(posixpath.relpath(leads, real[address]))
            placed[f"{real[address]}/{name}"] = node
    return placed


def _place(hw: Hardware, device: PciDevice) -> str:
    chain = [device.address]
    while device.parent and device.parent in hw.pci:
        device = hw.pci[device.parent]
        chain.insert(0, device.address)
    return f"/sys/devices/pci{device.address[:7]}/" + "/".join(chain)


def _group_files(number: int, members: list[PciDevice]) -> dict[str, FileNode]:
    base = f"{_GROUPS}/{number}"
    # WHY: one domain serves the whole group, so every member has the same type; the first one speaks for all.
    files = {
        base: vfs.directory(),
        f"{base}/devices": vfs.directory(),
        f"{base}/type": vfs.file(f"{members[0].iommu_type}\n", 0o644),
    }
    files[f"{base}/reserved_regions"] = vfs.file(
        "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved\n"
    )
    for device in members:
        files[f"{base}/devices/{device.address}"] = vfs.link(f"../../../../bus/pci/devices/{device.address}")
    return files


def _device_files(hw: Hardware, device: PciDevice) -> dict[str, FileNode]:
    base = f"{_DEVICES}/{device.address}"
    texts = {
        "vendor": f"0x{device.vendor:04x}",
        "device": f"0x{device.device:04x}",
        "class": f"0x{device.class_code:06x}",
        "revision": f"0x{device.revision:02x}",
        "subsystem_vendor": f"0x{device.subsystem_vendor:04x}",
        "subsystem_device": f"0x{device.subsystem_device:04x}",
        "numa_node": str(device.numa_node),
        "local_cpulist": hw.cpus(device.numa_node),
        "enable": "1" if device.driver else "0",
        "irq": str(irq(hw, device) if device.driver else 0),
        "driver_override": device.driver if device.driver == "vfio-pci" else "(null)",
        "resource": _resource(device),
        "modalias": _modalias(device),
        "power_state": "unknown" if device.dead else "D0",
    }
    if device.link:
        texts |= _link_texts(device, device.link) | _aer_texts(hw, device)
    if device.reset_method:
        texts["reset_method"] = device.reset_method
    writable = {"enable", "driver_override", "reset_method", "numa_node"}
    files = {f"{base}/{name}": vfs.file(f"{text}\n", 0o644 if name in writable else 0o444) for name, text in texts.items()}
    files[base] = vfs.directory()
    files[f"{base}/config"] = vfs.file(_config(device), 0o644)
    if device.reset_method:
        files[f"{base}/reset"] = vfs.file(b"", 0o200, error="EIO" if device.dead else "")
    if device.driver:
        files[f"{base}/driver"] = vfs.link(f"../../drivers/{device.driver}")
        files[f"/sys/bus/pci/drivers/{device.driver}"] = vfs.directory()
        files[f"/sys/bus/pci/drivers/{device.driver}/{device.address}"] = vfs.link(f"../../devices/{device.address}")
    if hw.iommu_on and device.iommu_group is not None:
        files[f"{base}/iommu_group"] = vfs.link(f"../../../../kernel/iommu_groups/{device.iommu_group}")
    return files


def _link_texts(device: PciDevice, link: Link) -> dict[str, str]:
    if device.dead:
        # WHY: all ones in LnkSta and LnkCap read as 63 lanes; the supported speeds are cached since Linux 6.13.
        return {
            "current_link_speed": "Unknown",
            "current_link_width": "63",
            "max_link_speed": speed_text(link.max_speed),
            "max_link_width": "63",
        }
    return {
        "current_link_speed": speed_text(link.speed),
        "current_link_width": str(link.width),
        "max_link_speed": speed_text(link.max_speed),
        "max_link_width": str(link.max_width),
    }


def _aer_texts(hw: Hardware, device: PciDevice) -> dict[str, str]:
    """The AER counters. When the firmware keeps AER they are there and stay at zero: nobody counts."""
    correctable = device.aer_correctable if hw.os_controls_aer else 0
    fatal = device.aer_fatal if hw.os_controls_aer else 0
    return {
        "aer_dev_correctable": _counters(_CORRECTABLE, "BadTLP", correctable, "TOTAL_ERR_COR"),
        "aer_dev_fatal": _counters(_UNCORRECTABLE, "CmpltTO", fatal, "TOTAL_ERR_FATAL"),
        "aer_dev_nonfatal": _counters(_UNCORRECTABLE, "", 0, "TOTAL_ERR_NONFATAL"),
    }


def _counters(names: Sequence[str], counted: str, count: int, total: str) -> str:
    return "\n".join([*(f"{n} {count if n == counted else 0}" for n in names), f"{total} {count}"])


def _resource(device: PciDevice) -> str:
    """Start, end and flags of BAR 0-5 and the ROM, a line each."""
    by_index = {index: (address, size) for index, address, size in device.bars}
    lines = []
    for index in range(7):
        if index not in by_index:
            lines.append("0x0000000000000000 0x0000000000000000 0x0000000000000000")
            continue
        address, size = by_index[index]
        width, prefetch = bar_flags(device, address)
        flags = 0x40200 | (0x100004 if width == "64-bit" else 0) | (0x2008 if prefetch == "prefetchable" else 0)
        lines.append(f"0x{address:016x} 0x{address + size - 1:016x} 0x{flags:016x}")
    return "\n".join(lines)


def _modalias(device: PciDevice) -> str:
    cls = device.class_code
    return (
        f"pci:v{device.vendor:08X}d{device.device:08X}sv{device.subsystem_vendor:08X}sd{device.subsystem_device:08X}"
        f"bc{cls >> 16:02X}sc{cls >> 8 & 0xFF:02X}i{cls & 0xFF:02X}"
    )


def _config(device: PciDevice) -> bytes:
    """The first 64 bytes of config space; all ones when the device is dead."""
    if device.dead:
        return b"\xff" * 64
    head = bytearray(64)
    head[0:4] = device.vendor.to_bytes(2, "little") + device.device.to_bytes(2, "little")
    head[4:6] = (0x0406 if device.driver else 0x0400).to_bytes(2, "little")
    head[6:8] = (0x0010).to_bytes(2, "little")
    head[8:12] = bytes([device.revision]) + device.class_code.to_bytes(3, "little")
    head[14] = 1 if device.class_code == 0x060400 else 0
    head[0x2C:0x30] = device.subsystem_vendor.to_bytes(2, "little") + device.subsystem_device.to_bytes(2, "little")
    return bytes(head)

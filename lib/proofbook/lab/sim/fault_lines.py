"""What the kernel says when hardware fails: the text of one event as log lines, in order, without time stamps.

Every function returns a list of :class:`Line` (priority 0-7, text). The wording follows the sources and reports named
at each function; addresses, counts and identifiers are the caller's. Nothing here changes the machine's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EMERG, ALERT, CRIT, ERR, WARNING, NOTICE, INFO, DEBUG = range(8)

#: The recovery actions of Xid 154, with the number that the driver prints.
RECOVERY_ACTIONS = {
    "None": "0x0 (None)",
    "Reset": "0x1 (GPU Reset Required)",
    "Reboot": "0x2 (Node Reboot Required)",
    "Drain P2P": "0x3 (Drain P2P)",
    "Drain and Reset": "0x4 (Drain and Reset)",
}


class Line(NamedTuple):
    """One kernel message."""

    priority: int
    text: str


def _bus(pci: str) -> str:
    """NVIDIA prints the address without its function: ``0000:41:00``."""
    return pci.rsplit(".", 1)[0]


# ------------------------------------------------------------------------------------------------------ NVIDIA


def xid(pci: str, number: int, text: str, *, pid: str = "", name: str = "") -> list[Line]:
    """``NVRM: Xid (PCI:0000:41:00): 31, pid=4242, name=python3, text``.

    ``pid`` is printed as given: a number, or ``'<unknown>'`` with its quotes, as some drivers do.
    """
    process = (f" pid={pid}," if pid else "") + (f" name={name}," if name else "")
    return [Line(ERR, f"NVRM: Xid (PCI:{_bus(pci)}): {number},{process} {text}")]


def xid79(pci: str, uuid: str, *, pid: str = "", name: str = "", serial: str = "") -> list[Line]:
    """A GPU fell off the bus. The UUID line names the card, the second repeats without the Xid."""
    return [
        Line(ERR, f"NVRM: GPU at PCI:{_bus(pci)}: {uuid}"),
        *([Line(ERR, f"NVRM: GPU Board Serial Number: {serial}")] if serial else []),
        *xid(pci, 79, "GPU has fallen off the bus.", pid=pid, name=name),
        Line(ERR, f"NVRM: GPU {pci}: GPU has fallen off the bus."),
        Line(ERR, f"NVRM: GPU {pci}: GPU serial number is {serial or 0}."),
    ]


def xid154(pci: str, action: str, before: str = "None") -> list[Line]:
    """The driver changed what it recommends; a consequence of another event. ``action``: a key of RECOVERY_ACTIONS."""
    return xid(pci, 154, f"GPU recovery action changed from {RECOVERY_ACTIONS[before]} to {RECOVERY_ACTIONS[action]}")


def consequences(pci: str, index: int = 0) -> list[Line]:
    """What follows on a lost GPU seconds later, when the driver tries to free what it holds (status 0x0f: GPU lost)."""
    prefix = f"NVRM: GPU{index}"
    return [
        *xid154(pci, "Reboot"),
        Line(ERR, f"{prefix} _issueRpcAndWait: rpcSendMessage failed with status 0x0000000f for fn 10!"),
        Line(ERR, f"{prefix} rpcRmApiFree_GSP: GspRmFree failed: hClient=0xc1d0002c; hObject=0x5c000013; "
                  "paramsStatus=0x00000000; status=0x0000000f"),
        Line(ERR, "NVRM: nvAssertFailedNoLog: Assertion failed: (status == NV_OK) || (status == NV_ERR_GPU_IN_FULLCHIP_RESET) "
                  "@ rs_client.c:844"),
    ]  # fmt: skip


def xid119(pci: str, function: int = 103, seconds: int = 45, index: int = 0) -> list[Line]:
    """The GPU's system processor did not answer an RPC."""
    return xid(
        pci,
        119,
        f"Timeout after {seconds}s of waiting for RPC response from GPU{index} GSP! Expected function {function} (GSP_RM_ALLOC) "
        "(0x2080 0x4).",
        pid="'<unknown>'",
        name="<unknown>",
    )


def fallen_off_at_probe(pci: str, device: int = 0x2BB5) -> list[Line]:
    """A GPU that answers with all ones when the driver is loaded: no Xid at all, three lines that belong together."""
    return [
        Line(ERR, f"NVRM: The NVIDIA GPU {pci}"),
        Line(ERR, f"NVRM: (PCI ID: 10de:{device:04x}) installed in this system has"),
        Line(ERR, "NVRM: fallen off the bus and is not responding to commands."),
        Line(WARNING, f"nvidia {pci}: probe with driver nvidia failed with error -1"),
        *probe_failed(1),
    ]


def probe_not_called(count: int) -> list[Line]:
    """``count`` NVIDIA devices belong to another driver (vfio-pci for example) when nvidia is loaded."""
    return [
        Line(WARNING, f"NVRM: The NVIDIA probe routine was not called for {count} device(s)."),
        Line(WARNING, "NVRM: This can occur when another driver was loaded and "),
        Line(WARNING, "NVRM: obtained ownership of the NVIDIA device(s)."),
        Line(WARNING, "NVRM: Try unloading the conflicting kernel module (and/or"),
        Line(WARNING, "NVRM: reconfigure your kernel without the conflicting"),
        Line(WARNING, "NVRM: driver(s)), then try loading the NVIDIA kernel module"),
        Line(WARNING, "NVRM: again."),
    ]


def probe_failed(count: int) -> list[Line]:
    """The driver met ``count`` devices and could not take them."""
    return [Line(ERR, f"NVRM: The NVIDIA probe routine failed for {count} device(s).")]


def no_devices_probed() -> list[Line]:
    """The driver found nothing to bind, and refuses to load."""
    return [
        Line(ERR, "NVRM: No NVIDIA devices probed."),
        Line(INFO, "nvidia-nvlink: Unregistered Nvlink Core, major device number 510"),
    ]


def init_failed(pci: str, minor: int, triple: str = "0x62:0x40:2168", index: int = 0) -> list[Line]:
    """RM could not initialise a GPU. The triple is (stage : NV_STATUS : source line); the line changes with each driver."""
    return [
        Line(ERR, f"NVRM: GPU{index} RmInitAdapter: Cannot initialize GSP firmware RM"),
        Line(ERR, f"NVRM: GPU {pci}: RmInitAdapter failed! ({triple})"),
        Line(ERR, f"NVRM: GPU {pci}: rm_init_adapter failed, device minor number {minor}"),
    ]


def fsp_boot_failed(pci: str, minor: int, *, code: int = 0x177, index: int = 0, triple: str = "0x62:0x0:2168") -> list[Line]:
    """The firmware security processor refused the chain of trust (command 0x14), which carries a system memory address.

    Format of the lines: ``kern_fsp_gh100.c``. ``code`` is data: 0x177 was observed with an identity IOMMU domain, and no
    public source names it.
    """
    return [
        Line(ERR, f"NVRM: GPU{index} kfspProcessCommandResponse_GH100: FSP response reported error. Task ID: 0x1 Command type: "
                  f"0x14 Error code: {code:#x}"),
        Line(ERR, f"NVRM: GPU{index} kfspSendBootCommands_GH100: Sent following content to FSP: "),
        Line(ERR, f"NVRM: GPU{index} kfspSendBootCommands_GH100: version=0x1, size=0x35c, gspFmcSysmemOffset=0x1f8c40000"),
        Line(ERR, f"NVRM: GPU{index} kgspBootstrap_GH100: FSP boot cmds failed. RM cannot boot."),
        *init_failed(pci, minor, triple, index),
    ]  # fmt: skip


def fsp_boot_timeout(pci: str, scratch: Sequence[int] = (0x0, 0x9F, 0x110186, 0x1103C0, 0x5)) -> list[Line]:
    """Xid 143: the security processor did not report its own boot in time (``kern_fsp_gb202.c``, 5 s poll).

    All ones in ``scratch`` mean that the link was already gone.
    """
    values = ", ".join(f"{value:#x}" for value in scratch)
    return xid(pci, 143, f"Error status 0x65 while polling for FSP boot complete, {values}")


def wpr2_still_up(pci: str, minor: int, index: int = 0) -> list[Line]:
    """A protected region of an earlier boot survived; it takes a function reset or a cold start."""
    return [
        Line(ERR, f"NVRM: GPU{index} _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP"),
        Line(ERR, f"NVRM: GPU{index} _kgspBootGspRm: (the GPU is likely in a bad state and may need to be reset)"),
        *init_failed(pci, minor, "0x62:0x40:2168", index),
    ]


def api_mismatch(library: str, module: str, *, client: str = "nvidia-smi", pid: int = 4711) -> list[Line]:
    """A user library of another version talked to the kernel module; one message of several lines."""
    return [
        Line(ERR, f"NVRM: API mismatch: the client '{client}' (pid {pid})"),
        Line(ERR, f"NVRM: has the version {library}, but this kernel module has the version {module}.  Please"),
        Line(ERR, "NVRM: make sure that this kernel module and all NVIDIA driver"),
        Line(ERR, "NVRM: components have the same version."),
    ]


def invalid_bar(pci: str, bar: int = 1) -> list[Line]:
    """The firmware gave the GPU no room for a BAR."""
    return [
        Line(ERR, "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:"),
        Line(ERR, f"NVRM: BAR{bar} is 0M @ 0x0 (PCI:{pci})"),
        *probe_failed(1),
    ]


# ------------------------------------------------------------------------------------------------------- IOMMU


def io_page_fault(driver: str, pci: str, domain: int, address: int, write: bool) -> list[Line]:
    """One AMD IO_PAGE_FAULT. ``pci`` is the requester, ``driver`` the one bound to it ("pci" when none is).

    Flag bit 0x20: the device wanted to write (``drivers/iommu/amd/iommu.c``).
    """
    event = f"IO_PAGE_FAULT domain=0x{domain:04x} address={address:#x} flags=0x{0x20 if write else 0:04x}"
    return [Line(ERR, f"{driver} {pci}: AMD-Vi: Event logged [{event}]")]


def io_page_fault_unknown_device(pci: str, domain: int, address: int, write: bool) -> list[Line]:
    """The same for a requester that the kernel has no device for."""
    flags = 0x20 if write else 0
    event = f"IO_PAGE_FAULT device={pci} domain=0x{domain:04x} address={address:#x} flags=0x{flags:04x}"
    return [Line(ERR, f"AMD-Vi: Event logged [{event}]")]


def suppressed(count: int, function: str = "amd_iommu_report_page_fault") -> list[Line]:
    """The rate limit's summary: ``count`` further lines were not printed. It comes late, after the limit's window (5 s)."""
    return [Line(WARNING, f"{function}: {count} callbacks suppressed")]


def page_fault_burst(driver: str, pci: str, domain: int, address: int, write: bool, count: int) -> list[Line]:
    """``count`` faults on following pages as the log shows them: ten lines, then the count of the rest."""
    shown = [line for n in range(min(count, 10)) for line in io_page_fault(driver, pci, domain, address + n * 0x1000, write)]
    return shown + (suppressed(count - 10) if count > 10 else [])


def iotlb_timeout(pci: str, address: int, unit: int = 0) -> list[Line]:
    """A device did not answer an invalidation of its translation cache."""
    return [
        Line(ERR, f"iommu ivhd{unit}: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device={pci} address={address:#x}]"),
        Line(ERR, "AMD-Vi: Completion-Wait loop timed out"),
    ]


def dmar_fault(pci: str, address: int, write: bool, *, suppressed_count: int = 0) -> list[Line]:
    """The same kind of fault on an Intel machine (Linux 6.x wording)."""
    kind, reason = ("Write", "0x05] PTE Write") if write else ("Read", "0x06] PTE Read")
    request = f"[DMA {kind} NO_PASID] Request device [{pci[5:]}] fault addr {address:#x}"
    lines = [
        Line(ERR, "DMAR: DRHD: handling fault status reg 2"),
        Line(ERR, f"DMAR: {request} [fault reason {reason} access is not set"),
    ]
    return lines + (suppressed(suppressed_count, "dmar_fault") if suppressed_count else [])


# --------------------------------------------------------------------------------------------------------- PCI

_CORRECTABLE_BITS = {"RxErr": (0, "Physical Layer"), "BadTLP": (6, "Data Link Layer"), "BadDLLP": (7, "Data Link Layer"),
                     "Rollover": (8, "Data Link Layer"), "Timeout": (12, "Data Link Layer")}  # fmt: skip
_UNCORRECTABLE_BITS = {"DLP": (4, "Data Link Layer"), "SDES": (5, "Transaction Layer"), "CmpltTO": (14, "Transaction Layer"),
                       "UnsupReq": (20, "Transaction Layer"), "ACSViol": (21, "Transaction Layer")}  # fmt: skip


def aer_correctable(port: str, driver: str, pci: str, ids: tuple[int, int], error: str = "BadTLP") -> list[Line]:
    """A corrected PCIe error of the device ``pci``, reported by its root port."""
    bit, layer = _CORRECTABLE_BITS[error]
    who = f"{driver} {pci}"
    return [
        Line(WARNING, f"pcieport {port}: AER: Correctable error message received from {pci}"),
        Line(WARNING, f"{who}: PCIe Bus Error: severity=Correctable, type={layer}, (Receiver ID)"),
        Line(WARNING, f"{who}:   device [{ids[0]:04x}:{ids[1]:04x}] error status/mask={1 << bit:08x}/0000e000"),
        Line(WARNING, f"{who}:    [{bit:2}] {error}"),
    ]


def aer_uncorrectable(
    port: str, driver: str, pci: str, ids: tuple[int, int], *, fatal: bool, error: str = "CmpltTO"
) -> list[Line]:
    """An uncorrected PCIe error. The NVIDIA driver has no ``error_detected`` callback, so recovery fails for it."""
    bit, layer = _UNCORRECTABLE_BITS[error]
    severity = "Uncorrectable (Fatal)" if fatal else "Uncorrectable (Non-Fatal)"
    who = f"{driver} {pci}"
    lines = [
        Line(ERR, f"pcieport {port}: AER: {severity} error message received from {pci}"),
        Line(ERR, f"{who}: PCIe Bus Error: severity={severity}, type={layer}, (Requester ID)"),
        Line(ERR, f"{who}:   device [{ids[0]:04x}:{ids[1]:04x}] error status/mask={1 << bit:08x}/00000000"),
        Line(ERR, f"{who}:    [{bit:2}] {error:<22} (First)"),
    ]
    if driver == "nvidia":
        lines.append(Line(INFO, f"{who}: AER: can't recover (no error_detected callback)"))
        lines.append(Line(INFO, f"pcieport {port}: AER: device recovery failed"))
    return lines


def dpc_event(port: str, ids: tuple[int, int]) -> list[Line]:
    """The root port contained a link that went down by itself (Surprise Down Error)."""
    who = f"pcieport {port}"
    return [
        Line(WARNING, f"{who}: DPC: containment event, status:0x1f01 source:0x0000"),
        Line(WARNING, f"{who}: DPC: unmasked uncorrectable error detected"),
        Line(ERR, f"{who}: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)"),
        Line(ERR, f"{who}:   device [{ids[0]:04x}:{ids[1]:04x}] error status/mask=00000020/04004000"),
        Line(ERR, f"{who}:    [ 5] SDES                   (First)"),
    ]


def stuck_after_reset(pci: str, driver: str = "vfio-pci", reset: str = "FLR") -> list[Line]:
    """A device that does not come back after a reset. ``driver``: the one that has it, "pci" when none has."""
    return [
        Line(WARNING, f"{driver} {pci}: not ready 65535ms after {reset}; giving up"),
        Line(ERR, f"{driver} {pci}: Unable to change power state from D3cold to D0, device inaccessible"),
    ]


# -------------------------------------------------------------------------------------------------------- NICs


def nic_fault(driver: str, pci: str, interface: str, domain: int, address: int) -> list[Line]:
    """A network card's own page fault, with the transmit queue that then stands still. No GPU is involved."""
    return [
        *io_page_fault(driver, pci, domain, address, write=True),
        Line(CRIT, f"{driver} {pci} {interface}: NETDEV WATCHDOG: CPU: 17: transmit queue 5 timed out 5120 ms"),
        Line(ERR, f"{driver} {pci} {interface}: TX timeout detected, starting reset task!"),
    ]


def mlx5_health(pci: str) -> list[Line]:
    """A ConnectX whose firmware stopped (``mlx5/core/health.c``)."""
    who = f"mlx5_core {pci}"
    return [
        Line(ERR, f"{who}: poll_health:825:(pid 0): Fatal error 1 detected"),
        Line(ERR, f"{who}: print_health_info:431:(pid 0): PCI slot is unavailable"),
        Line(ERR, f"{who}: mlx5_error_sw_reset:236:(pid 1893): start"),
    ]


def mlx5_command_failed(pci: str, count: int = 1) -> list[Line]:
    """The firmware refuses a command: frequent on busy hosts, and no sign of a broken card."""
    one = Line(
        ERR,
        f"mlx5_core {pci}: mlx5_cmd_out_err:800:(pid 233522): CREATE_MKEY(0x200) op_mod(0x0) failed, "
        "status limits exceeded(0x8), syndrome (0x18af6), err(-12)",
    )
    return [one] * min(count, 10) + (suppressed(count - 10, "mlx5_cmd_out_err") if count > 10 else [])


def nic_link(driver: str, pci: str, interface: str, up: bool) -> list[Line]:
    """A network link changed."""
    if driver == "mlx5_core":
        return [Line(INFO, f"mlx5_core {pci} {interface}: Link {'up' if up else 'down'}")]
    more = ", 10000 Mbps (NRZ) full duplex, Flow control: none" if up else ""
    return [Line(INFO, f"{driver} {pci} {interface}: NIC Link is {'Up' if up else 'Down'}{more}")]


# -------------------------------------------------------------------------------------------------------- gaps


def missed(count: int) -> list[Line]:
    """journald could not keep up with the kernel: ``count`` messages are lost for good.

    WHY it matters where it goes: journald writes this itself (identifier ``systemd-journald``, ``_TRANSPORT=driver``,
    MESSAGE_ID e9bf28e6e834481bb6f48f548ad13606), so ``journalctl -k`` alone does not show it.
    """
    return [Line(WARNING, f"Missed {count} kernel messages")]


def printk_dropped(count: int) -> list[Line]:
    """A console was too slow and lost messages; the ring buffer itself may still have them."""
    return [Line(WARNING, f"printk: console [ttyS0] ** {count} printk messages dropped **")]

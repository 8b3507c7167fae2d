"""The machines that the lab knows how to build: AMD EPYC 9004 boards with four or eight RTX PRO 6000.

Every host bridge ("root complex") of an EPYC 9004 socket brings its own IOMMU, a row of dummy host bridges, real root
ports below some of them, and an internal port with the SoC's own functions. A GPU sits alone below its root port, so
it is alone in its IOMMU group. Serial numbers, UUIDs and MAC addresses here are made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proofbook.lab.sim.state import Gpu, Hardware, Link, PciDevice

GIB = 1 << 30
MIB = 1 << 20

AMD, NVIDIA, MELLANOX, BROADCOM, SAMSUNG, ASPEED = 0x1022, 0x10DE, 0x15B3, 0x14E4, 0x144D, 0x1A03
ASROCK_RACK = 0x1849

_HOST_BRIDGES = (0x00, 0x20, 0x40, 0x60, 0x80, 0xA0, 0xC0, 0xE0)
_GPU_MODULES = ("nvidiafb", "nouveau", "nvidia_drm", "nvidia")

_GPUS = (  # uuid, board serial
    ("GPU-6b1f0c52-3a7d-4e19-9c84-20d5e7f1a036", "1793224018851"),
    ("GPU-e94d7a08-51c6-4b2f-8d3e-7f60b9a2c415", "1793224018902"),
    ("GPU-2c85f3e1-9b40-47d8-a6f2-0d1e38c7b95a", "1793224018877"),
    ("GPU-b70a46d9-e2f3-4c51-8e97-64a1d80f3b2c", "1793224018916"),
    ("GPU-08e3b5f7-6d92-4a1c-b45f-93c7e0d1286e", "1793224019004"),
    ("GPU-d51c928a-07be-4f63-9a28-ec14b6f70d39", "1793224019017"),
    ("GPU-47f6a0b3-c8d5-4e7a-81b9-5a2d9e6c03f1", "1793224019042"),
    ("GPU-9ad20e64-f17b-43c8-bd50-186fc3a97e25", "1793224019058"),
)


def four_gpu_epyc() -> Hardware:
    """Two sockets, two GPUs on each: 01:00.0 and 41:00.0 on NUMA node 0, 81:00.0 and c1:00.0 on node 1.

    IOMMU on and translated (DMA-FQ). Also a ConnectX-6 Dx (mlx5_core, node 0), a BCM57416 (bnxt_en, node 1), two NVMe,
    the BMC's VGA and two xHCI controllers. The operating system controls AER.
    """
    return _epyc((0x00, 0x40, 0x80, 0xC0), _HOST_BRIDGES)


def four_gpu_workstation() -> Hardware:
    """Like :func:`four_gpu_epyc`, with Workstation Edition cards: each has an audio function too, in the GPU's iommu group."""
    hw = four_gpu_epyc()
    hw.product = "4-GPU workstation"
    for gpu in hw.gpus.values():
        gpu.name = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
        display = hw.pci[gpu.pci]
        display.device, display.class_code = 0x2BB1, 0x030000
        display.name, display.class_name = "NVIDIA Corporation Device 2bb1", "VGA compatible controller"
        display.reset_method = "flr"  # WHY no bus: the kernel has none for a device where it would hit another function too
        audio = _audio_function(display)
        hw.pci[audio.address] = audio
    hw.pci = dict(sorted(hw.pci.items()))
    _number_iommu_groups(hw)
    return hw


def eight_gpu_epyc() -> Hardware:
    """Like :func:`four_gpu_epyc`, with a GPU below every host bridge.

    The firmware lists the host bridges out of order, so the driver's minor numbers and nvidia-smi's indices (which
    follow the PCI address) differ, as on many eight-GPU boards.
    """
    hw = _epyc(_HOST_BRIDGES, (0x60, 0x40, 0x20, 0x00, 0xE0, 0xC0, 0xA0, 0x80))
    hw.product = "8-GPU server"
    return hw


def _epyc(gpu_roots: Sequence[int], root_order: tuple[int, ...]) -> Hardware:
    devices: list[PciDevice] = []
    for root in _HOST_BRIDGES:
        devices += _root_complex(root)
    devices += _chipset()
    for position, root in enumerate(gpu_roots):
        devices += _gpu_slot(root, position)
    devices += _nics()
    devices += [*_drive(0x60, "S676NF0W204117"), *_drive(0xE0, "S676NF0W204163")]
    devices += _bmc()

    hw = Hardware(pci={d.address: d for d in sorted(devices, key=lambda d: d.address)}, root_order=root_order)
    _number_iommu_groups(hw)
    probed = sorted(gpu_roots, key=root_order.index)
    for position, root in enumerate(gpu_roots):
        uuid, serial = _GPUS[position]
        hw.gpus[f"0000:{root + 1:02x}:00.0"] = Gpu(
            pci=f"0000:{root + 1:02x}:00.0", uuid=uuid, minor=probed.index(root), serial=serial
        )
    return hw


def _node(root: int) -> int:
    return 0 if root < 0x80 else 1


def _amd(
    address: str, device: int, class_code: int, class_name: str, node: int, *, revision: int = 0, **more: object
) -> PciDevice:
    return PciDevice(
        address,
        AMD,
        device,
        class_code,
        f"Advanced Micro Devices, Inc. [AMD] Device {device:04x}",
        class_name,
        subsystem_vendor=AMD,
        subsystem_device=device,
        revision=revision,
        numa_node=node,
        **more,  # type: ignore[arg-type]
    )


def _root_port(address: str, node: int, link: Link) -> PciDevice:
    port = _amd(address, 0x14AB, 0x060400, "PCI bridge", node, revision=1, driver="pcieport", link=link, acs=True)
    port.subsystem_device = 0x1453
    port.kind = "PCIe Root Port"
    port.reset_method = "pm"
    return port


def _root_complex(root: int) -> Iterator[PciDevice]:
    """What every host bridge of the socket brings, before anything is plugged in."""
    node, bus = _node(root), f"0000:{root:02x}"
    old = "conventional PCI endpoint"
    yield _amd(f"{bus}:00.0", 0x14A4, 0x060000, "Host bridge", node, revision=1, kind=old)
    yield _amd(f"{bus}:00.2", 0x149E, 0x080600, "IOMMU", node, revision=1, kind=old)
    event_collector = "PCIe Root Complex Event Collector"
    yield _amd(f"{bus}:00.3", 0x14A6, 0x080700, "Generic system peripheral", node, driver="pcieport", kind=event_collector)
    for slot in (1, 2, 3, 4, 5, 7):
        yield _amd(f"{bus}:{slot:02x}.0", 0x149F, 0x060000, "Host bridge", node, revision=1, kind=old)
    internal = _root_port(f"{bus}:07.1", node, Link(32.0, 16, 32.0, 16))
    internal.device, internal.name = 0x14A7, "Advanced Micro Devices, Inc. [AMD] Device 14a7"
    yield internal
    child = f"0000:{root + 7:02x}"
    fixed = Link(32.0, 16, 32.0, 16)
    yield _amd(
        f"{child}:00.0", 0x14AC, 0x130000, "Non-Essential Instrumentation", node, revision=1, parent=internal.address, link=fixed
    )
    if root in (0x00, 0x80):
        yield _amd(
            f"{child}:00.4",
            0x14C9,
            0x0C0330,
            "USB controller",
            node,
            revision=0xDA,
            parent=internal.address,
            link=Link(32.0, 16, 32.0, 16),
            driver="xhci_hcd",
            modules=("xhci_pci",),
            bars=((0, 0xA8C00000 if root else 0xB8C00000, MIB),),
        )


def _chipset() -> Iterator[PciDevice]:
    """SMBus and LPC of the FCH, and the data fabric functions of both sockets: all on bus 00."""
    smbus = PciDevice(
        "0000:00:14.0", AMD, 0x790B, 0x0C0500, "Advanced Micro Devices, Inc. [AMD] FCH SMBus Controller", "SMBus",
        subsystem_vendor=ASROCK_RACK, subsystem_device=0xFFFF, revision=0x71, driver="piix4_smbus",
        modules=("i2c_piix4", "sp5100_tco"), kind="conventional PCI endpoint", reset_method="",
    )  # fmt: skip
    lpc = PciDevice(
        "0000:00:14.3", AMD, 0x790E, 0x060100, "Advanced Micro Devices, Inc. [AMD] FCH LPC Bridge", "ISA bridge",
        subsystem_vendor=ASROCK_RACK, subsystem_device=0xFFFF, revision=0x51, kind="conventional PCI endpoint", reset_method="",
    )  # fmt: skip
    yield smbus
    yield lpc
    for socket, slot in ((0, 0x18), (1, 0x19)):
        for function in range(8):
            fabric = _amd(f"0000:00:{slot:02x}.{function}", 0x14AD + function, 0x060000, "Host bridge", socket)
            fabric.kind, fabric.reset_method, fabric.subsystem_vendor, fabric.subsystem_device = (
                "conventional PCI endpoint",
                "",
                0,
                0,
            )
            if function == 3:
                fabric.driver, fabric.modules = "k10temp", ("k10temp",)
            yield fabric


def _gpu_slot(root: int, position: int) -> Iterator[PciDevice]:
    """A root port and the GPU below it. BAR 0 64 MiB, BAR 2 (the CUDA "BAR1") 128 GiB, BAR 4 32 MiB."""
    node = _node(root)
    port = _root_port(f"0000:{root:02x}:01.1", node, Link())
    window = 0x20000000000 + position * 256 * GIB
    yield port
    yield PciDevice(
        f"0000:{root + 1:02x}:00.0",
        NVIDIA,
        0x2BB5,
        0x030200,
        "NVIDIA Corporation Device 2bb5",
        "3D controller",
        subsystem_vendor=NVIDIA,
        subsystem_device=0x204E,
        driver="nvidia",
        modules=_GPU_MODULES,
        numa_node=node,
        parent=port.address,
        link=Link(),
        bars=((0, window + 128 * GIB, 64 * MIB), (2, window, 128 * GIB), (4, window + 128 * GIB + 64 * MIB, 32 * MIB)),
        slot=str(position + 1),
        kind="PCIe Legacy Endpoint",
    )


def _audio_function(display: PciDevice) -> PciDevice:
    """The sound over a card's connectors: function 1 of the device."""
    return PciDevice(
        f"{display.address[:-1]}1",
        NVIDIA,
        0x22E8,
        0x040300,
        "NVIDIA Corporation Device 22e8",
        "Audio device",
        subsystem_vendor=NVIDIA,
        subsystem_device=display.subsystem_device,
        driver="snd_hda_intel",
        modules=("snd_hda_intel",),
        numa_node=display.numa_node,
        parent=display.parent,
        link=Link(),
        bars=((0, 0xC0000000 + (int(display.address[5:7], 16) << 16), 16 * 1024),),
        slot=display.slot,
        reset_method="pm",
    )


def _nics() -> Iterator[PciDevice]:
    mlx_port = _root_port("0000:20:03.1", 0, Link(32.0, 16, 16.0, 16))
    bcm_port = _root_port("0000:a0:03.1", 1, Link(32.0, 8, 8.0, 8))
    yield mlx_port
    for function, mac in ((0, "b8:3f:d2:6a:10:c4"), (1, "b8:3f:d2:6a:10:c5")):
        yield PciDevice(
            f"0000:22:00.{function}",
            MELLANOX,
            0x101D,
            0x020000,
            "Mellanox Technologies MT2892 Family [ConnectX-6 Dx]",
            "Ethernet controller",
            subsystem_vendor=MELLANOX,
            subsystem_device=0x0016,
            revision=0,
            driver="mlx5_core",
            modules=("mlx5_core",),
            numa_node=0,
            parent=mlx_port.address,
            link=Link(16.0, 16, 16.0, 16, 16.0),
            bars=((0, 0x60000000000 + function * 32 * MIB, 32 * MIB),),
            slot="9",
            serial=mac,
        )
    yield bcm_port
    for function, mac in ((0, "9c:6b:00:41:7e:20"), (1, "9c:6b:00:41:7e:21")):
        yield PciDevice(
            f"0000:a2:00.{function}",
            BROADCOM,
            0x16D8,
            0x020000,
            "Broadcom Inc. and subsidiaries BCM57416 NetXtreme-E Dual-Media 10G RDMA Ethernet Controller",
            "Ethernet controller",
            subsystem_vendor=ASROCK_RACK,
            subsystem_device=0x16D8,
            revision=1,
            driver="bnxt_en",
            modules=("bnxt_en",),
            numa_node=1,
            parent=bcm_port.address,
            link=Link(8.0, 8, 8.0, 8, 8.0),
            bars=(
                (0, 0x68000110000 + function * 64 * 1024, 64 * 1024),
                (2, 0x68000000000 + function * MIB // 2, MIB // 2),
                (4, 0x68000130000 + function * 8 * 1024, 8 * 1024),
            ),
            serial=mac,
        )


def _drive(root: int, serial: str) -> Iterator[PciDevice]:
    node = _node(root)
    port = _root_port(f"0000:{root:02x}:03.1", node, Link(32.0, 4, 16.0, 4))
    yield port
    yield PciDevice(
        f"0000:{root + 2:02x}:00.0",
        SAMSUNG,
        0xA80A,
        0x010802,
        "Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO",
        "Non-Volatile memory controller",
        subsystem_vendor=SAMSUNG,
        subsystem_device=0xA813,
        subsystem_name="Samsung Electronics Co Ltd General DC NVMe PM9A3",
        revision=0,
        driver="nvme",
        modules=("nvme",),
        numa_node=node,
        parent=port.address,
        link=Link(16.0, 4, 16.0, 4, 16.0),
        bars=((0, 0xB6100000 if root == 0x60 else 0xAA300000, 16 * 1024),),
        serial=serial,
    )


def _bmc() -> Iterator[PciDevice]:
    port = _root_port("0000:60:05.2", 0, Link(8.0, 2, 5.0, 1, 5.0))
    yield port
    yield PciDevice(
        "0000:63:00.0", ASPEED, 0x1150, 0x060400, "ASPEED Technology, Inc. AST1150 PCI-to-PCI Bridge", "PCI bridge",
        subsystem_vendor=ASPEED, subsystem_device=0x1150, revision=0x06, numa_node=0, parent=port.address,
        link=Link(5.0, 1, 5.0, 1, 5.0), kind="PCIe to PCI/PCI-X bridge", reset_method="pm bus",
    )  # fmt: skip
    yield PciDevice(
        "0000:64:00.0", ASPEED, 0x2000, 0x030000, "ASPEED Technology, Inc. ASPEED Graphics Family", "VGA compatible controller",
        subsystem_vendor=ASPEED, subsystem_device=0x2000, subsystem_name="ASPEED Technology, Inc. ASPEED Graphics Family",
        revision=0x52, driver="ast", modules=("ast",), numa_node=0, parent="0000:63:00.0",
        bars=((0, 0xB0000000, 64 * MIB), (1, 0xB4000000, 256 * 1024)), kind="conventional PCI endpoint", reset_method="pm",
    )  # fmt: skip


def _number_iommu_groups(hw: Hardware) -> None:
    """Number the groups in the order in which the kernel meets the devices.

    WHY: functions of one slot without ACS share a group (FCH, data fabric, a graphics card's), as does everything behind a
    PCIe-to-PCI bridge, because their requester id is the bridge's. The IOMMU itself is in no group.
    """
    groups: dict[str, int] = {}
    order = {bus: position for position, bus in enumerate(hw.root_order)}
    for device in sorted(hw.pci.values(), key=lambda d: (order[int(d.address[5:7], 16) & 0xE0], d.address)):
        if device.class_code == 0x080600:
            continue
        key = device.address
        if device.vendor == NVIDIA or (device.kind == "conventional PCI endpoint" and device.address[8:10] in ("14", "18", "19")):
            key = device.address[:-2]
        elif device.parent and hw.pci[device.parent].kind == "PCIe to PCI/PCI-X bridge":
            key = device.parent
        device.iommu_group = groups.setdefault(key, len(groups))

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proofbook.probes.p2p import PeerConfig, Topology

A, B, C, D = "0000:01:00.0", "0000:41:00.0", "0000:81:00.0", "0000:c1:00.0"
DWORDS = 'NVreg_RegistryDwords="ForceP2P=17;RMForceP2PType=1"'
SYSFS = "/sys/bus/pci/devices"
SAMPLES = Path(__file__).parents[1] / "samples"
INDEX = f"0, 0000{A}\n1, 0000{B}\n2, 0000{C}\n3, 0000{D}\n".upper()
STATUS = (
    " \tGPU0\tGPU1\tGPU2\tGPU3\t\n GPU0\tX\tOK\tCNS\tCNS\t\n GPU1\tOK\tX\tCNS\tCNS\t\n"
    " GPU2\tCNS\tCNS\tX\tOK\t\n GPU3\tCNS\tCNS\tOK\tX\t\n\nLegend:\n\n  X    = Self\n"
)
#: The root port and the GPU below it; BAR1 is 128 GiB at 0xe000000000, and an I/O range that is none of memory.
LSPCI = f"""0000:00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 153d (rev 01)
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-

{A} 3D controller: NVIDIA Corporation GB202GL
"""
RESOURCE = (
    "0x000000e000000000 0x000000ffffffffff 0x000000000014220c\n0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
    "0x0000000000001000 0x000000000000107f 0x0000000000040101\n" + "0x0 0x0 0x0\n" * 4
)


@pytest.fixture
def answering(machine: Any) -> Any:
    machine.on("nvidia-smi", "--query-gpu=index,pci.bus_id", stdout=INDEX)
    machine.on("topo", "-m", stdout=(SAMPLES / "lab_nvidia_smi_topo_m.txt").read_text())
    machine.on("topo", "-p2p", stdout=STATUS)
    machine.on("nvidia-smi", "-q", "-x", stdout=(SAMPLES / "lab_nvidia_smi_q_x_4gpu.xml").read_text())
    machine.on("lspci", "-Dvvv", stdout=LSPCI)
    machine.files |= {
        f"{SYSFS}/{A}/resource": RESOURCE,
        f"{SYSFS}/{A}/numa_node": "0",
        f"{SYSFS}/{A}/max_link_speed": "32.0 GT/s PCIe",
        f"{SYSFS}/{A}/max_link_width": "16",
        f"{SYSFS}/{B}/max_link_speed": "5.0 GT/s PCIe",
        f"{SYSFS}/{B}/max_link_width": "8",
        f"{SYSFS}/{B}/numa_node": "-1",
    }
    machine.links[f"{SYSFS}/{A}"] = f"../../../devices/pci0000:00/0000:00:01.1/{A}"
    return machine


def test_everything_is_by_address(answering: Any) -> None:
    facts = answering.value(Topology())
    assert facts.gpus == (A, B, C, D)
    assert (facts.links[A, B], facts.links[B, C], facts.links[D, C]) == ("NODE", "SYS", "NODE")
    assert (A, A) not in facts.links and len(facts.links) == 12
    assert {c: facts.status[c][A, C] for c in "rwnap"} == dict.fromkeys("rwnap", "CNS")
    assert facts.bars == {A: ((0xE000000000, 0xFFFFFFFFFF),)}
    assert (facts.owner(0xE000001000), facts.owner(0x1000)) == (A, "")
    assert facts.upstream == {A: ("0000:00:01.1",)}
    assert facts.numa == {A: 0}
    assert facts.acs == {"0000:00:01.1": frozenset({"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"})}
    assert facts.limit_gbps == {A: 63.015, B: 4.0}
    assert set(facts.bar1_mib) == set(facts.framebuffer_mib) == {A, B, C, D}
    assert facts.bar1_mib[A] >= facts.framebuffer_mib[A] > 90000
    assert facts.problems == {}


def test_a_hole_in_the_indices_moves_nothing(answering: Any) -> None:
    rows = f"0, 0000{A}\nUnable to determine the device handle\n2, {C}\n"
    answering.on("nvidia-smi", "--query-gpu=index,pci.bus_id", stdout=rows)
    facts = answering.value(Topology())
    assert facts.links == {(A, C): "SYS", (C, A): "SYS"}


def test_what_cannot_be_had_is_missing_with_its_reason(answering: Any) -> None:
    answering.on("topo", "-m", status=127, stderr="sh: nvidia-smi: not found")
    answering.on("lspci", "-Dvvv", status=None, trouble="needs root, and `sudo -n` refuses: a password is required")
    facts = answering.value(Topology())
    assert (facts.links, facts.acs) == ({}, {})
    assert "not there" in facts.problems["links"]
    assert "root" in facts.problems["acs"]
    assert facts.status["r"]


def test_without_gpus_there_is_no_topology(answering: Any) -> None:
    answering.on("nvidia-smi", "--query-gpu=index,pci.bus_id", status=6, stdout="No devices were found\n")
    assert answering.unknown(Topology()) == "nvidia-smi lists no GPU: No devices were found"


# ------------------------------------------------------------------------------------------------------- configuration


@pytest.fixture
def configured(machine: Any) -> Any:
    machine.on("uname", "-r", stdout="6.17.13-1-pve\n")
    machine.on("lsinitramfs", stdout="etc\netc/modprobe.d/nvidia.conf\nusr/lib/modules/6.17.13-1-pve/kernel/x.ko\n")
    machine.files |= {
        "/etc/modprobe.d/a.conf": "# options nvidia NVreg_X=1\noptions snd x=1\noptions nvidia NVreg_DmaRemapPeerMmio=0",
        "/etc/modprobe.d/nvidia.conf": f"options nvidia {DWORDS} NVreg_DmaRemapPeerMmio=1",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 nvidia.NVreg_EnableResizableBar=1",
        "/proc/driver/nvidia/params": 'DmaRemapPeerMmio: 1\nRegistryDwords: "ForceP2P=17"\nRegistryDwordsPerDevice: ""',
    }
    return machine


def test_an_option_is_followed_from_its_text_to_the_running_module(configured: Any) -> None:
    facts = configured.value(PeerConfig())
    assert facts.text == {
        "NVreg_DmaRemapPeerMmio": "1",
        "NVreg_RegistryDwords": "ForceP2P=17;RMForceP2PType=1",
        "NVreg_EnableResizableBar": "1",
    }
    assert facts.sources["NVreg_DmaRemapPeerMmio"] == "/etc/modprobe.d/nvidia.conf"
    assert facts.sources["NVreg_EnableResizableBar"] == "/proc/cmdline"
    assert (facts.running["RegistryDwords"], facts.running["RegistryDwordsPerDevice"]) == ("ForceP2P=17", "")
    assert facts.initramfs == ("etc/modprobe.d/nvidia.conf",)
    assert (facts.remaps_peers, facts.remap_is_default) == (True, False)


def test_what_nobody_asked_for_is_the_drivers_own_choice(configured: Any) -> None:
    for path in [path for path in configured.files if path.startswith("/etc")]:
        del configured.files[path]
    facts = configured.value(PeerConfig())
    assert (facts.remaps_peers, facts.remap_is_default) == (True, True)


def test_an_initramfs_that_cannot_be_read_is_unknown(configured: Any) -> None:
    configured.on("lsinitramfs", status=127, stderr="sh: lsinitramfs: not found")
    del configured.files["/proc/driver/nvidia/params"]
    facts = configured.value(PeerConfig())
    assert (facts.initramfs, facts.remaps_peers) == (None, None)
    assert set(facts.problems) == {"initramfs", "running"}

"""The samples of the simulated machine in tests/samples/lab_*: other tests read them, this one keeps them true.

When a renderer changes on purpose: ``python tests/lab/test_render_samples.py`` writes them anew; read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.lab.sim.boards import four_gpu_epyc
from proofbook.lab.sim.render_nvidia import nvidia_smi
from proofbook.lab.sim.render_pci import kernel_boot_lines, lspci, pci_files
from proofbook.lab.sim.state import Hardware

FOLDER = Path(__file__).parent.parent / "samples"
NOW = datetime(2026, 3, 9, 16, 2, 1, tzinfo=UTC)
FIELDS = (
    "index,pci.bus_id,uuid,name,driver_version,vbios_version,pstate,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
)
CSV = (f"--query-gpu={FIELDS}", "--format=csv,noheader")
APPS = ("--query-compute-apps=pid,gpu_bus_id,process_name,used_memory", "--format=csv,noheader")


def _serving() -> Hardware:
    """Four GPUs, each with one rank of a model server."""
    hw = four_gpu_epyc()
    for rank, gpu in enumerate(hw.gpus.values()):
        gpu.processes.append((9321 + rank, f"sglang::scheduler_TP{rank}", 72614))
    return hw


def _one_lost() -> Hardware:
    hw = _serving()
    hw.gpus["0000:41:00.0"].condition = "lost"
    hw.pci["0000:41:00.0"].config_dead = True
    return hw


def _one_needs_reset() -> Hardware:
    hw = four_gpu_epyc()
    hw.gpus["0000:81:00.0"].condition, hw.gpus["0000:81:00.0"].recovery_action = "needs-reset", "Reset"
    return hw


def _one_passed_through() -> Hardware:
    hw = four_gpu_epyc()
    hw.pci["0000:c1:00.0"].driver = "vfio-pci"
    return hw


def _mismatch() -> Hardware:
    hw = four_gpu_epyc()
    hw.nvidia.library_version = "595.71.05"
    return hw


def _smi(hw: Hardware, *argv: str) -> str:
    return nvidia_smi(hw, argv, NOW)[1].decode()


def _iommu_tree(hw: Hardware) -> str:
    """The groups of the GPUs as lines ``path = content`` and ``path -> target``."""
    lines = []
    files = pci_files(hw)
    groups = {f"/sys/kernel/iommu_groups/{hw.pci[gpu].iommu_group}/" for gpu in hw.gpus}
    for path, node in files.items():
        device = path.removeprefix("/sys/bus/pci/devices/").split("/")[0]
        if path.startswith(tuple(groups)) or (
            device in hw.gpus and path.endswith(("/driver", "/iommu_group", "/vendor", "width"))
        ):
            if node.kind == "link":
                lines.append(f"{path} -> {node.target}")
            elif node.kind == "file":
                lines.append(f"{path} = {' '.join(node.read().decode().split(chr(10))).strip()}")
    return "\n".join(sorted(lines)) + "\n"


def _dmesg(hw: Hardware) -> str:
    """Excerpt: how the log starts, and what it says of the IOMMU, AER, the GPUs and the NVIDIA driver."""
    words = ("_OSC", "iommu", "AMD-Vi", "NVRM", "nvidia", "VFIO", *hw.gpus)
    lines = kernel_boot_lines(hw, "BOOT_IMAGE=/boot/vmlinuz-6.17.13-1-pve root=/dev/mapper/pve-root ro quiet", "6.17.13-1-pve")
    shown = [line for n, line in enumerate(lines) if n < 12 or any(word in line[2] for word in words)]
    return "".join(f"[{seconds:12.6f}] {text}\n" for seconds, _, text in shown)


SAMPLES: dict[str, Callable[[], str]] = {
    "lab_nvidia_smi_q_x_4gpu.xml": lambda: _smi(_serving(), "-q", "-x"),
    "lab_nvidia_smi_q_x_needs_reset.xml": lambda: _smi(_one_needs_reset(), "-q", "-x"),
    "lab_nvidia_smi_4gpu.csv": lambda: _smi(four_gpu_epyc(), *CSV),
    "lab_nvidia_smi_lost_row.csv": lambda: _smi(_one_lost(), *CSV),
    "lab_nvidia_smi_needs_reset.csv": lambda: _smi(_one_needs_reset(), *CSV),
    "lab_nvidia_smi_apps.csv": lambda: _smi(_serving(), *APPS),
    "lab_nvidia_smi_mismatch.txt": lambda: _smi(_mismatch(), *CSV),
    "lab_nvidia_smi_topo_m.txt": lambda: _smi(four_gpu_epyc(), "topo", "-m"),
    "lab_lspci_Dnnk_gpus.txt": lambda: lspci(_one_lost(), ["-Dnnk", "-d", "10de:"])[1].decode(),
    "lab_iommu_tree.txt": lambda: _iommu_tree(_one_lost()),
    "lab_dmesg_boot.txt": lambda: _dmesg(four_gpu_epyc()),
    "lab_dmesg_boot_vfio.txt": lambda: _dmesg(_one_passed_through()),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sample_is_what_the_machine_says(name: str) -> None:
    assert (FOLDER / name).read_text() == SAMPLES[name]()


if __name__ == "__main__":
    for name, render in SAMPLES.items():
        (FOLDER / name).write_text(render())

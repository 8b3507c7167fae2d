"""lspci, sysfs and the kernel log of a boot, read back with parsers of their own."""

from __future__ import annotations

import itertools
import posixpath
import re

import pytest

from proofbook.lab.sim.boards import eight_gpu_epyc, four_gpu_epyc
from proofbook.lab.sim.render_pci import kernel_boot_lines, lspci, pci_files
from proofbook.lab.sim.state import Hardware
from proofbook.lab.sim.vfs import FileNode

GPU = "0000:41:00.0"
CMDLINE = "BOOT_IMAGE=/boot/vmlinuz-6.17.13-1-pve root=/dev/mapper/pve-root ro quiet"
KERNEL = "6.17.13-1-pve"


def ask(hw: Hardware, *argv: str) -> str:
    status, stdout, stderr = lspci(hw, argv)
    assert (status, stderr) == (0, b"")
    return stdout.decode()


def text(files: dict[str, FileNode], name: str, address: str = GPU) -> str:
    return files[f"/sys/bus/pci/devices/{address}/{name}"].read().decode().rstrip("\n")


def log(hw: Hardware, cmdline: str = CMDLINE) -> list[str]:
    return [line for _, _, line in kernel_boot_lines(hw, cmdline, KERNEL)]


# ------------------------------------------------------------------------------------------------------- lspci


def test_dnnk_of_one_gpu() -> None:
    assert ask(four_gpu_epyc(), "-Dnnk", "-s", "41:00.0").splitlines() == [
        "0000:41:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)",
        "\tSubsystem: NVIDIA Corporation Device [10de:204e]",
        "\tKernel driver in use: nvidia",
        "\tKernel modules: nvidiafb, nouveau, nvidia_drm, nvidia",
    ]


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (("-s", "41:"), "41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)"),
        (("-n", "-s", "0000:41:00.0"), "41:00.0 0302: 10de:2bb5 (rev a1)"),
        (("-D", "-d", "15b3:"), "0000:22:00.0 Ethernet controller: Mellanox Technologies MT2892 Family [ConnectX-6 Dx]"),
        (("-nnd::0108",), "62:00.0 Non-Volatile memory controller [0108]: Samsung Electronics Co Ltd NVMe SSD Controller "
                          "PM9A1/PM9A3/980PRO [144d:a80a]"),
        (("-s", "00:00.3"), "00:00.3 Generic system peripheral [0807]: Advanced Micro Devices, Inc. [AMD] Device 14a6"),
    ],
)  # fmt: skip
def test_selection_and_numbers(argv: tuple[str, ...], first: str) -> None:
    assert ask(four_gpu_epyc(), *argv).splitlines()[0] == first


def test_every_device_has_one_line() -> None:
    hw = eight_gpu_epyc()
    assert [line.split(" ", 1)[0] for line in ask(hw, "-D").splitlines()] == sorted(hw.pci)


def test_verbose_of_a_gpu_that_idles_at_gen1() -> None:
    block = ask(four_gpu_epyc(), "-vvv", "-s", "41:00.0")
    assert "\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16\n" in block
    assert "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1" in block
    assert "\tRegion 2: Memory at 24000000000 (64-bit, prefetchable) [size=128G]\n" in block
    assert "\tIOMMU group: " in block and "Access Control Services" not in block
    assert "Access Control Services" in ask(four_gpu_epyc(), "-vvv", "-s", "40:01.1")
    assert ask(four_gpu_epyc(), "-v", "-s", "41:00.0").count("\n") > 5


def test_a_dead_device_reads_ff_and_keeps_its_name() -> None:
    hw = four_gpu_epyc()
    hw.pci[GPU].config_dead = True
    lines = ask(hw, "-vvv", "-s", "41:00.0").splitlines()
    assert lines[0] == "41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev ff) (prog-if ff)"
    assert lines[1] == "\t!!! Unknown header type 7f"
    assert "\tKernel driver in use: nvidia" in lines


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-Q"], "lspci: invalid option -- 'Q'"),
        (["-s", "zz"], "lspci: -s: Invalid"),
        (["-s"], "lspci: option requires an argument -- 's'"),
        (["-d", "x"], "lspci: -d: "),
    ],
)
def test_bad_options(argv: list[str], says: str) -> None:
    status, stdout, stderr = lspci(four_gpu_epyc(), argv)
    assert status == 1 and stdout == b"" and stderr.decode().startswith(says)


# ------------------------------------------------------------------------------------------------------- sysfs


def test_attributes_of_a_gpu() -> None:
    files = pci_files(four_gpu_epyc())
    expected = {
        "vendor": "0x10de",
        "device": "0x2bb5",
        "class": "0x030200",
        "revision": "0xa1",
        "subsystem_device": "0x204e",
        "numa_node": "0",
        "current_link_speed": "2.5 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
        "reset_method": "flr bus",
        "enable": "1",
    }
    assert {name: text(files, name) for name in expected} == expected
    start, end, flags = text(files, "resource").splitlines()[2].split()
    assert int(end, 16) - int(start, 16) + 1 == 128 << 30 and flags == "0x000000000014220c"
    assert text(files, "aer_dev_correctable").splitlines()[-1] == "TOTAL_ERR_COR 0"


def test_bars_do_not_overlap() -> None:
    for hw in (four_gpu_epyc(), eight_gpu_epyc()):
        spans = sorted((address, address + size) for d in hw.pci.values() for _, address, size in d.bars)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(address % size == 0 for d in hw.pci.values() for _, address, size in d.bars), "a BAR is aligned to its size"


def test_every_link_leads_to_a_node() -> None:
    files = pci_files(four_gpu_epyc())
    links = {path: node.target for path, node in files.items() if node.kind == "link"}
    assert len(links) > 200
    for path, target in links.items():
        assert posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) in files, path


def test_a_gpu_is_alone_in_its_group_and_the_fabric_is_not() -> None:
    hw = four_gpu_epyc()
    files = pci_files(hw)
    number = files[f"/sys/bus/pci/devices/{GPU}/iommu_group"].target.rsplit("/", 1)[1]
    members = [path for path in files if path.startswith(f"/sys/kernel/iommu_groups/{number}/devices/")]
    assert members == [f"/sys/kernel/iommu_groups/{number}/devices/{GPU}"]
    assert files[f"/sys/kernel/iommu_groups/{number}/type"].read() == b"DMA-FQ\n"
    assert len({hw.pci[f"0000:00:18.{n}"].iommu_group for n in range(8)}) == 1
    assert hw.pci["0000:64:00.0"].iommu_group == hw.pci["0000:63:00.0"].iommu_group
    assert hw.pci["0000:00:00.2"].iommu_group is None, "an IOMMU does not translate itself"


def test_iommu_off_leaves_an_empty_directory_and_a_log_that_still_says_translated() -> None:
    hw = four_gpu_epyc()
    hw.iommu_on = False
    files = pci_files(hw)
    assert [path for path in files if path.startswith("/sys/kernel/iommu_groups")] == ["/sys/kernel/iommu_groups"]
    assert not any(path.endswith("/iommu_group") for path in files)
    lines = log(hw, f"{CMDLINE} amd_iommu=off iommu=off")
    assert "iommu: Default domain type: Translated" in lines
    assert not any("iommu group" in line or "AMD-Vi: Interrupt" in line for line in lines)


def test_all_ones_show_in_what_the_kernel_reads_live() -> None:
    """vendor is cached at enumeration; width 63, speed and config come from the device."""
    hw = four_gpu_epyc()
    hw.pci[GPU].config_dead = True
    files = pci_files(hw)
    assert (text(files, "current_link_width"), text(files, "current_link_speed")) == ("63", "Unknown")
    assert files[f"/sys/bus/pci/devices/{GPU}/config"].read() == b"\xff" * 64
    assert text(files, "vendor") == "0x10de"


def test_nobody_counts_errors_when_the_firmware_keeps_aer() -> None:
    hw = four_gpu_epyc()
    hw.pci[GPU].aer_correctable = 12
    assert text(pci_files(hw), "aer_dev_correctable").splitlines()[-1] == "TOTAL_ERR_COR 12"
    hw.os_controls_aer = False
    assert text(pci_files(hw), "aer_dev_correctable").splitlines()[-1] == "TOTAL_ERR_COR 0"


# -------------------------------------------------------------------------------------------------- kernel log


def test_the_log_starts_with_the_kernel_and_its_times_grow() -> None:
    lines = kernel_boot_lines(four_gpu_epyc(), CMDLINE, KERNEL)
    assert lines[0][2].startswith(f"Linux version {KERNEL} (") and lines[1][2] == f"Command line: {CMDLINE}"
    times = [seconds for seconds, _, _ in lines]
    assert times == sorted(times) and 8 < times[-1] < 60
    assert {priority for _, priority, _ in lines} <= set(range(8))
    assert lines == kernel_boot_lines(four_gpu_epyc(), CMDLINE, KERNEL), "the same boot twice looks the same"


def test_each_device_joins_its_group_once() -> None:
    hw = four_gpu_epyc()
    joined = [re.fullmatch(r"pci (\S+): Adding to iommu group (\d+)", line) for line in log(hw)]
    assert {m[1]: int(m[2]) for m in joined if m} == {a: d.iommu_group for a, d in hw.pci.items() if d.iommu_group is not None}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", ["iommu: Default domain type: Translated", "iommu: DMA domain TLB invalidation policy: lazy mode"]),
        ("iommu=pt", ["iommu: Default domain type: Passthrough (set via kernel command line)"]),
        ("iommu=pt iommu=nopt", ["iommu: Default domain type: Translated (set via kernel command line)"]),
        ("iommu.strict=1", ["iommu: DMA domain TLB invalidation policy: strict mode (set via kernel command line)"]),
        ("amd_iommu=on", ["AMD-Vi: Unknown option - 'on'"]),
        ("amd_iommu=pgtbl_v2", ["iommu: Default domain type: Translated"]),
    ],
)
def test_iommu_words_of_the_command_line(words: str, says: list[str]) -> None:
    lines = log(four_gpu_epyc(), f"{CMDLINE} {words}")
    assert all(line in lines for line in says)
    assert ("AMD-Vi: Unknown option - 'on'" in lines) == ("amd_iommu=on" in words)


def test_who_controls_aer() -> None:
    hw = four_gpu_epyc()
    assert sum("_OSC: OS now controls" in line and " AER " in line for line in log(hw)) == 8
    hw.os_controls_aer = False
    lines = log(hw)
    assert sum("_OSC: platform does not support [AER LTR DPC]" in line for line in lines) == 8
    assert not any("AER: enabled" in line or ("OS now controls" in line and "AER" in line) for line in lines)


def test_a_passed_through_gpu_is_counted_by_the_driver() -> None:
    hw = four_gpu_epyc()
    for address in (GPU, "0000:81:00.0"):
        hw.pci[address].driver = "vfio-pci"
    lines = log(hw)
    assert "NVRM: The NVIDIA probe routine was not called for 2 device(s)." in lines
    assert f"nvidia {GPU}: enabling device (0000 -> 0002)" not in lines
    assert any(line.startswith("NVRM: loading NVIDIA UNIX Open Kernel Module") for line in lines)


def test_a_driver_without_devices_does_not_load() -> None:
    hw = four_gpu_epyc()
    for address in hw.gpus:
        hw.pci[address].driver = "vfio-pci"
    lines = log(hw)
    assert "NVRM: No NVIDIA devices probed." in lines
    assert not any("NVRM: loading" in line or "nvidia-uvm" in line for line in lines)


def test_an_uninitialised_gpu_gets_no_drm_device() -> None:
    hw = four_gpu_epyc()
    hw.gpus[GPU].condition = "uninitialised"
    lines = log(hw)
    assert not any("Initialized nvidia-drm" in line and GPU in line for line in lines)
    assert any("[GPU ID 0x00004100] Failed to allocate NvKmsKapiDevice" in line for line in lines)


def test_a_link_that_trained_low_is_reported_with_the_kernels_arithmetic() -> None:
    hw = four_gpu_epyc()
    assert not any("available PCIe bandwidth, limited" in line for line in log(hw)), "Gen1 at idle is no limit"
    link = hw.pci[GPU].link
    assert link is not None
    link.load_speed = 16.0
    assert (
        "pci 0000:41:00.0: 252.048 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x16 link at 0000:40:01.1 "
        "(capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)"
    ) in log(hw)

"""nvidia-smi, /proc/driver/nvidia and device nodes, read back with parsers of their own."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from proofbook.lab.sim.boards import eight_gpu_epyc, four_gpu_epyc
from proofbook.lab.sim.render_nvidia import character_majors, nvidia_files, nvidia_smi
from proofbook.lab.sim.state import Hardware

NOW = datetime(2026, 3, 9, 16, 2, 1, 250000, tzinfo=UTC)
SAMPLES = Path(__file__).parent.parent / "samples"
LOST = "0000:41:00.0"


def smi(hw: Hardware, *argv: str, in_container: bool = False) -> tuple[int, str]:
    status, stdout, stderr = nvidia_smi(hw, argv, NOW, in_container=in_container)
    assert stderr == b"", "nvidia-smi prints its errors on stdout"
    return status, stdout.decode()


def xml(hw: Hardware, *more: str) -> ElementTree.Element:
    return ElementTree.fromstring(smi(hw, "-q", "-x", *more)[1])


def rows(hw: Hardware, fields: str) -> list[list[str]]:
    text = smi(hw, f"--query-gpu={fields}", "--format=csv,noheader")[1]
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]


# ------------------------------------------------------------------------------------------------------ shapes


def _keys(text: str) -> list[str]:
    """The keys of one GPU's block of ``-q``, with their indentation."""
    block = text.split("\nGPU 0000", 1)[1].split("\n", 1)[1].split("\n\n", 1)[0]
    return [line.split(" :")[0].rstrip() for line in block.splitlines()]


def test_the_keys_of_q_are_those_of_a_real_host_in_its_order() -> None:
    assert _keys(smi(four_gpu_epyc(), "-q")[1]) == (SAMPLES / "nvidia_smi_q_keys.txt").read_text().splitlines()


def test_values_of_q_stand_in_one_column() -> None:
    lines = [line for line in smi(four_gpu_epyc(), "-q")[1].splitlines() if ": " in line]
    assert len(lines) > 600
    assert {line.index(":", 40) for line in lines} == {55}


def test_the_lines_of_the_table_have_one_width() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].processes.append((4711, "/opt/venv/bin/python3 -m sglang.launch_server --port 30000", 90112))
    table = [line for line in smi(hw)[1].splitlines() if line.startswith(("|", "+"))]
    assert {len(line) for line in table} == {91}
    assert sum("4711" in line for line in table) == 1


def test_xml_holds_what_the_state_holds() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].processes.append((4711, "python3 <&>", 90112))
    hw.gpus[LOST].recovery_action = "Drain and Reset"
    root = xml(hw)
    assert root.findtext("driver_version") == "595.58.03" and root.findtext("cuda_version") == "13.2"
    assert root.findtext("attached_gpus") == "4"
    ids = [gpu.get("id") for gpu in root.iterfind("gpu")]
    assert ids == ["00000000:01:00.0", "00000000:41:00.0", "00000000:81:00.0", "00000000:C1:00.0"]
    gpu = root.findall("gpu")[1]
    expected = {
        "uuid": hw.gpus[LOST].uuid,
        "minor_number": "1",
        "vbios_version": "98.02.67.00.0A",
        "gpu_recovery_action": "Drain and Reset",
        "gsp_firmware_version": "595.58.03",
        "pci/pci_bus_id": "00000000:41:00.0",
        "pci/pci_device_id": "2BB510DE",
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "5",
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "1",
        "pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
        "fb_memory_usage/total": "97887 MiB",
        "fb_memory_usage/used": "90112 MiB",
        "bar1_memory_usage/total": "131072 MiB",
        "utilization/gpu_util": "0 %",
        "ecc_errors/volatile/dram_uncorrectable": "0",
        "temperature/gpu_temp": "27 C",
        "gpu_power_readings/current_power_limit": "600.00 W",
        "clocks/sm_clock": "180 MHz",
        "processes/process_info/pid": "4711",
        "processes/process_info/process_name": "python3 <&>",
        "processes/process_info/used_memory": "90112 MiB",
    }
    assert {path: gpu.findtext(path) for path in expected} == expected
    assert (root.findall("gpu")[0].find("processes") or [None])[0] is None, "a GPU without processes has an empty list"


def test_memory_adds_up() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].processes.append((4711, "python3", 90112))
    for line in rows(hw, "memory.total,memory.reserved,memory.used,memory.free"):
        total, *parts = [int(cell.removesuffix(" MiB")) for cell in line]
        assert total == sum(parts)


def test_csv_headers_units_and_aliases() -> None:
    hw = four_gpu_epyc()
    status, text = smi(hw, "-i", "0", "--query-gpu=index,gpu_uuid,memory.total,power.draw,timestamp", "--format=csv")
    head, row = text.splitlines()
    assert status == 0
    assert head == "index, uuid, memory.total [MiB], power.draw [W], timestamp"
    assert row == f"0, {hw.gpus['0000:01:00.0'].uuid}, 97887 MiB, 39.20 W, 2026/03/09 16:02:01.250"
    assert smi(hw, "-i", "0", "--query-gpu=memory.total,power.draw", "--format=csv,noheader,nounits")[1] == "97887, 39.20\n"


@pytest.mark.parametrize("who", ["1", "00000000:41:00.0", "41:00.0", "GPU-e94d7a08-51c6-4b2f-8d3e-7f60b9a2c415"])
def test_one_gpu_is_chosen_by_index_address_or_uuid(who: str) -> None:
    text = smi(four_gpu_epyc(), "-i", who, "--query-gpu=pci.bus_id", "--format=csv,noheader")[1]
    assert text == "00000000:41:00.0\n"


def test_compute_apps() -> None:
    hw = four_gpu_epyc()
    ask = ("--query-compute-apps=pid,gpu_bus_id,process_name,used_memory", "--format=csv,noheader")
    assert smi(hw, *ask) == (0, "")
    hw.gpus[LOST].processes.append((4711, "sglang::scheduler_TP1", 90112))
    assert smi(hw, *ask)[1] == "4711, 00000000:41:00.0, sglang::scheduler_TP1, 90112 MiB\n"
    assert "[Not Found]" in smi(hw, *ask, in_container=True)[1]
    assert smi(hw, ask[0], "--format=csv")[1].splitlines()[0] == "pid, gpu_bus_id, process_name, used_gpu_memory [MiB]"


def test_minor_numbers_are_not_indices_on_the_eight_gpu_board() -> None:
    hw = eight_gpu_epyc()
    minors = [int(gpu.findtext("minor_number") or "-1") for gpu in xml(hw).iterfind("gpu")]
    assert sorted(minors) == list(range(8)) and minors != sorted(minors)
    assert {f"/dev/nvidia{n}" for n in minors} <= nvidia_files(hw).keys()


def test_topology_of_two_sockets() -> None:
    lines = smi(four_gpu_epyc(), "topo", "-m")[1].splitlines()
    assert lines[0].startswith("\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0") and lines[0].endswith("GPU NUMA ID\x1b[0m")
    assert lines[1].split("\t")[:5] == ["GPU0", " X ", "NODE", "SYS", "SYS"]
    assert lines[1].split("\t")[-5:] == ["NODE", "0-63,128-191", "0", "", "N/A"]
    assert lines[3].split("\t")[1:5] == ["SYS", "SYS", " X ", "NODE"]


def test_p2p_status_of_a_pair_has_a_direction() -> None:
    hw = four_gpu_epyc()
    hw.p2p[("0000:01:00.0", "0000:81:00.0")] = "TNS"
    lines = smi(hw, "topo", "-p2p", "w")[1].splitlines()
    assert lines[1].split("\t")[:5] == [" GPU0", "X", "OK", "TNS", "OK"]
    assert lines[3].split("\t")[:5] == [" GPU2", "OK", "OK", "X", "OK"]
    assert smi(hw, "topo", "-p2p", "n")[1].splitlines()[1].split("\t")[2] == "NS"


# ------------------------------------------------------------------------------------------------ refused questions


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--query-gpu=index,bogus", "--format=csv"], 'Field "bogus" is not a valid field to query.'),
        (["--frobnicate"], "ERROR: Option --frobnicate is not recognized. Please run 'nvidia-smi -h' for help."),
        (["-L", "-q"], "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."),
        (["-x"], "Invalid combination of input arguments."),
        (["topo", "-p2p", "z"], "Invalid combination of input arguments."),
        (["--query-gpu=index"], '"--format=" switch is missing.'),
        (["-q", "-d", "NONSENSE"], "Invalid display type specified: NONSENSE."),
    ],
)
def test_bad_arguments_end_with_2(argv: list[str], says: str) -> None:
    status, text = smi(four_gpu_epyc(), *argv)
    assert status == 2 and text.startswith(says)


def test_a_gpu_that_does_not_exist_is_not_found() -> None:
    assert smi(four_gpu_epyc(), "-i", "7", "-q") == (6, "No devices were found\n")


# ------------------------------------------------------------------------------------------------- broken machines


def test_a_lost_gpu_leaves_a_line_between_the_rows() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].condition = "lost"
    line = "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error"
    status, text = smi(hw, "--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    assert status == 15
    assert text.splitlines() == ["0, 00000000:01:00.0", line, "2, 00000000:81:00.0", "3, 00000000:C1:00.0"]
    assert smi(hw)[1].splitlines()[0] == line
    root = xml(hw)
    assert root.findtext("attached_gpus") == "4" and len(root.findall("gpu")) == 3
    assert line in smi(hw, "-q", "-x")[1]


def test_dead_config_space_loses_the_gpu_too() -> None:
    hw = four_gpu_epyc()
    hw.pci[LOST].config_dead = True
    assert "for GPU0000:41:00.0: Unknown Error" in smi(hw, "-L")[1]


def test_the_error_line_and_the_exit_status_are_the_scenarios() -> None:
    hw = four_gpu_epyc()
    hw.gpus["0000:c1:00.0"].condition = "lost"
    hw.nvidia.handle_error = "Unable to determine the device handle for GPU{index}: {pci}: Unknown Error"
    hw.nvidia.lost_exit_status = 0
    hw.nvidia.smi_noise.append(("0000:01:00.0", "GPU 0000:01:00.0: Not Found"))
    status, text = smi(hw, "-L")
    assert status == 0
    assert "Unable to determine the device handle for GPU3: 0000:C1:00.0: Unknown Error" in text.splitlines()
    assert text.startswith("GPU 0000:01:00.0: Not Found\n")


def test_a_gpu_that_needs_a_reset_keeps_its_identity() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].condition, hw.gpus[LOST].recovery_action = "needs-reset", "Reset"
    need = "[GPU requires reset]"
    fields = "index,uuid,pstate,temperature.gpu,utilization.gpu,power.draw,pcie.link.gen.current,memory.used,gpu_recovery_action"
    assert rows(hw, fields)[1] == ["1", hw.gpus[LOST].uuid, need, need, need, need, need, "0 MiB", "Reset"]
    gpu = xml(hw).findall("gpu")[1]
    assert gpu.findtext("performance_state") == "GPU requires reset"
    assert gpu.findtext("pci/pci_gpu_link_info/link_widths/max_link_width") == "16x"
    assert smi(hw, "-i", "1")[1].count("ERR!") == 5


def test_an_uninitialised_gpu_has_no_row_and_question_marks_in_proc() -> None:
    hw = four_gpu_epyc()
    hw.gpus[LOST].condition = "uninitialised"
    assert [r[0] for r in rows(hw, "pci.bus_id")] == ["00000000:01:00.0", "00000000:81:00.0", "00000000:C1:00.0"]
    assert xml(hw).findtext("attached_gpus") == "3"
    information = nvidia_files(hw)[f"/proc/driver/nvidia/gpus/{LOST}/information"].read().decode()
    assert re.search(r"^GPU UUID: \t GPU-\?{8}-\?{4}-", information, re.M)
    assert re.search(r"^Video BIOS: \t \?\?\.\?\?", information, re.M)
    assert nvidia_files(hw)["/dev/nvidia1"].error == "EIO"


def test_no_initialised_gpu_is_no_device() -> None:
    hw = four_gpu_epyc()
    for gpu in hw.gpus.values():
        gpu.condition = "uninitialised"
    assert smi(hw) == (6, "No devices were found\n")


@pytest.mark.parametrize("how", ["not loaded", "all passed through", "all gone"])
def test_without_a_loaded_driver(how: str) -> None:
    hw = four_gpu_epyc()
    for address in hw.gpus:
        if how == "all passed through":
            hw.pci[address].driver = "vfio-pci"
        elif how == "all gone":
            hw.pci[address].present = False
    hw.nvidia.loaded = how != "not loaded"
    status, text = smi(hw, "-q", "-x")
    assert status == 9
    assert text.startswith("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert nvidia_files(hw) == {} and character_majors(hw) == {}


def test_library_of_another_version() -> None:
    hw = four_gpu_epyc()
    hw.nvidia.library_version = "595.71.05"
    says = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.71\n"
    assert smi(hw, "-L") == (18, says)
    hw.nvidia.library_version, hw.nvidia.container_library_version = "595.58.03", "590.48.01"
    assert smi(hw, "-L")[0] == 0
    assert smi(hw, "-L", in_container=True)[0] == 18


def test_only_the_container_lost_the_gpus() -> None:
    hw = four_gpu_epyc()
    hw.nvidia.container_error = "Unknown Error"
    assert smi(hw, "-L")[0] == 0
    assert smi(hw, "-L", in_container=True) == (255, "Failed to initialize NVML: Unknown Error\n")


# -------------------------------------------------------------------------------------------------------- files


def test_driver_files() -> None:
    hw = four_gpu_epyc()
    hw.nvidia.params["RegistryDwords"] = '"ForceP2P=17"'
    files = nvidia_files(hw)
    first = files["/proc/driver/nvidia/version"].read().decode().splitlines()[0]
    assert first.startswith("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build  (")
    params = dict(line.split(": ", 1) for line in files["/proc/driver/nvidia/params"].read().decode().splitlines())
    assert params["DmaRemapPeerMmio"] == "1" and params["RegistryDwords"] == '"ForceP2P=17"' and len(params) > 30
    information = files[f"/proc/driver/nvidia/gpus/{LOST}/information"].read().decode()
    read = {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in information.splitlines())}
    assert read["GPU UUID"] == hw.gpus[LOST].uuid and read["Bus Location"] == LOST and read["Device Minor"] == "1"
    assert read["Video BIOS"] == "98.02.67.00.0a" and read["GPU Excluded"] == "No"
    uvm = files["/dev/nvidia-uvm"]
    assert (uvm.kind, uvm.major, uvm.minor) == ("device", hw.nvidia.uvm_major, 0)
    assert (files["/dev/nvidia1"].major, files["/dev/nvidia1"].minor) == (195, 1)
    assert files["/sys/module/nvidia/srcversion"].read() == f"{hw.nvidia.srcversion}\n".encode()


def test_the_proprietary_flavour_says_so() -> None:
    hw = four_gpu_epyc()
    hw.nvidia.open_module = False
    assert b"NVIDIA UNIX x86_64 Kernel Module  595.58.03" in nvidia_files(hw)["/proc/driver/nvidia/version"].read()


def test_driver_610_names_kernel_and_user_driver() -> None:
    hw = four_gpu_epyc()
    hw.nvidia.module_version = hw.nvidia.library_version = "610.43.02"
    assert "KMD Version: 610.43.02     CUDA UMD Version: 13.2" in smi(hw)[1]
    assert "\nCUDA UMD Version                                       : 13.2\n" in smi(hw, "-q")[1]

from __future__ import annotations

from typing import Any

import pytest

from proofbook.probes import drive
from proofbook.probes.nvidia import ComputeApp, ComputeApps, Driver, Gpus

PROC = "/proc/driver/nvidia"
MODULE = "/sys/module/nvidia"
GPU = "GPU-11111111-2222-4333-8444-000000000001"
ROW = f"0, 00000000:01:00.0, {GPU}, NVIDIA RTX PRO 6000 Blackwell Server Edition, 595.58.03, 98.02.67.00.0A, P8, 1, 5, 16, 16\n"
QUERY = (
    "--query-gpu=index,pci.bus_id,uuid,name,driver_version,vbios_version,pstate,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.71\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)


@pytest.fixture
def smi(machine: Any) -> Any:
    """``nvidia-smi`` answers the query with ``query``, the XML with ``xml``."""

    def says(query: str = ROW, xml: str = "", *, status: int = 0, **more: Any) -> Any:
        machine.on("nvidia-smi", "-q", "-x", stdout=xml, status=status)
        return machine.on("nvidia-smi", QUERY, **{"stdout": query, "status": status, **more})

    return says


# ------------------------------------------------------------------------------------------------------------- GPUs


def test_rows_problems_and_details(smi: Any, sample: Any) -> None:
    table = smi(sample("nvidia-smi-query-lost.txt"), sample("nvidia-smi-q.xml")).value(Gpus())
    assert list(table.rows) == ["0000:01:00.0", "0000:41:00.0", "0000:61:00.0"]
    good = table.rows["0000:01:00.0"]
    assert (good.index, good.uuid, good.pstate, good.vbios) == (0, GPU, "P8", "98.02.67.00.0A")
    assert (good.gen_current, good.gen_max, good.width_current, good.width_max) == (1, 5, 16, 16)
    assert (good.recovery_action, good.minor, good.memory_mib, good.memory_used_mib, good.persistence) == (
        "None",
        0,
        97887,
        12,
        True,
    )
    assert good.broken == {} and good.detailed
    assert table.rows["0000:61:00.0"].detailed is False, "the document does not list it"
    assert table.problems == {"0000:21:00.0": "Unable to determine the device handle for GPU1: 0000:21:00.0: Unknown Error"}
    assert (table.driver_version, table.exit_status) == ("595.58.03", 0)


def test_an_error_in_the_place_of_a_value_is_no_value(smi: Any, sample: Any) -> None:
    rows = smi(sample("nvidia-smi-query-lost.txt"), sample("nvidia-smi-q.xml")).value(Gpus()).rows
    reset, errors = rows["0000:41:00.0"], rows["0000:61:00.0"]
    assert (reset.pstate, reset.vbios, reset.recovery_action, reset.persistence) == ("", "", "Reset", False)
    assert reset.broken == {"pstate": "[GPU requires reset]", "fb_memory_usage/total": "[GPU requires reset]"}
    assert (errors.gen_current, errors.width_current, errors.recovery_action) == (None, None, "")
    assert errors.broken == {"gen_current": "ERR!", "width_current": "[Unknown Error]"}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("Unable to determine the device handle for GPU 0000:01:00.0: Not Found", "0000:01:00.0"),
        ("Unable to determine the device handle for GPU0000:25:00.0: Unknown Error", "0000:25:00.0"),
        ("Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error", "0000:04:00.0"),
        ("Unable to determine the device handle for GPU 00000000:C1:00.0: GPU is lost.  Reboot the system", "0000:c1:00.0"),
        ("No devices were found", ""),
    ],
)
def test_whose_problem_a_line_is(smi: Any, line: str, key: str) -> None:
    table = smi(ROW + line + "\n").value(Gpus())
    assert table.problems[key] == line
    assert list(table.rows) == ["0000:01:00.0"]


@pytest.mark.parametrize(("text", "status"), [(NO_DRIVER, 9), (MISMATCH, 18), ("No devices were found\n", 6)])
def test_nvidia_smi_that_fails_as_a_whole_is_an_answer(smi: Any, text: str, status: int) -> None:
    table = smi(text, text, status=status).value(Gpus())
    assert table.rows == {} and table.exit_status == status
    assert table.problems == {"": text.strip()}  # once, though both queries said it
    on_stderr = smi("", "", status=status, stderr=text).value(Gpus())
    assert on_stderr.problems[""].startswith(text.splitlines()[0])


def test_silence_is_a_problem(smi: Any) -> None:
    assert smi("", "").value(Gpus()).problems[""]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"status": 127, "stderr": "sh: 1: nvidia-smi: not found\n"}, "`nvidia-smi` is not there"),
        ({"timed_out": True, "status": None}, "gave no answer"),
        ({"timed_out": True, "status": 124}, "did not finish within 60 s"),
    ],
)
def test_nvidia_smi_that_is_missing_or_hangs_is_unknown(smi: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in smi("", **said).unknown(Gpus())


@pytest.mark.parametrize(
    ("xml", "problem"),
    [
        ('<?xml version="1.0" ?><nvidia_smi_log><gpu id="00000000:01:00.0"><uuid>', "a broken document"),
        ('<?xml version="1.0" ?><nvidia_smi_log><gpu id="x"/></nvidia_smi_log>', "a GPU without an address: 'x'"),
        ("", "gave no document"),
    ],
)
def test_broken_documents_cost_only_the_details(smi: Any, xml: str, problem: str) -> None:
    table = smi(ROW, xml).value(Gpus())
    row = table.rows["0000:01:00.0"]
    assert (row.recovery_action, row.detailed) == ("", False if '<gpu id="x"' in xml else None)
    assert problem in table.problems[""]


def test_a_document_with_entities_is_not_expanded(smi: Any) -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><nvidia_smi_log>&b;</nvidia_smi_log>'
    assert "defines entities" in smi(ROW, bomb).unknown(Gpus())


def test_what_the_module_says_of_each_gpu(smi: Any, sample: Any) -> None:
    machine = smi()
    machine.files[f"{PROC}/gpus/0000:01:00.0/information"] = sample("nvidia-information.txt")
    machine.unreadable[f"{PROC}/gpus/0000:21:00.0/information"] = "Input/output error"
    proc = machine.value(Gpus()).proc
    assert proc["0000:01:00.0"]["GPU UUID"] == GPU
    assert proc["0000:01:00.0"]["GPU Excluded"] == "No"
    assert proc["0000:21:00.0"] == {"unreadable": "Input/output error"}


# ----------------------------------------------------------------------------------------------------------- driver


@pytest.fixture
def loaded(smi: Any, sample: Any) -> Any:
    machine = smi()
    machine.files |= {
        f"{PROC}/version": sample("nvidia-version-open.txt"),
        f"{PROC}/params": 'DmaRemapPeerMmio: 1\nRegistryDwords: "ForceP2P=17"\nRegistryDwordsPerDevice: ""\n',
        f"{MODULE}/version": "595.58.03",
        f"{MODULE}/srcversion": "8F2A41C09D5E7B36A1C4D02",
    }
    machine.on("modinfo", "-F", "version", "nvidia", stdout="595.71.05\n")
    machine.on("modinfo", "-F", "srcversion", "nvidia", stdout="0123456789ABCDEF0123456\n")
    return machine


def test_the_driver(loaded: Any) -> None:
    driver = loaded.value(Driver())
    assert (driver.module_version, driver.open_module, driver.loaded) == ("595.58.03", True, True)
    assert driver.flavour_line.startswith("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64")
    assert driver.params == {"DmaRemapPeerMmio": "1", "RegistryDwords": "ForceP2P=17", "RegistryDwordsPerDevice": ""}
    assert (driver.loaded_srcversion, driver.disk_srcversion) == ("8F2A41C09D5E7B36A1C4D02", "0123456789ABCDEF0123456")
    assert (driver.disk_version, driver.library_version, driver.problems) == ("595.71.05", "595.58.03", {})


def test_the_closed_flavour(loaded: Any, sample: Any) -> None:
    loaded.files[f"{PROC}/version"] = sample("nvidia-version-closed.txt")
    driver = loaded.value(Driver())
    assert (driver.module_version, driver.open_module) == ("550.163.01", False)


def test_no_module_is_an_answer(smi: Any) -> None:
    machine = smi(NO_DRIVER, status=9)
    machine.on("modinfo", stderr="modinfo: ERROR: Module nvidia not found.\n", status=1)
    driver = machine.value(Driver())
    assert not driver.loaded and driver.open_module is None and driver.params == {}
    assert driver.disk_version is None and "Module nvidia not found" in driver.problems["disk_version"]
    assert driver.library_version is None and "couldn't communicate" in driver.problems["library_version"]


def test_the_library_says_its_version_on_a_mismatch(loaded: Any, smi: Any) -> None:
    smi(MISMATCH, status=18)
    assert loaded.value(Driver()).library_version == "595.71"


def test_a_hidden_version_is_unknown(loaded: Any) -> None:
    del loaded.files[f"{PROC}/version"]
    loaded.unreadable[f"{PROC}/version"] = "Permission denied"
    assert "Permission denied" in loaded.unknown(Driver())


def test_driver_and_gpus_share_their_query(loaded: Any) -> None:
    drive([Driver(), Gpus()], loaded.gather)
    assert [c.argv[1] for c in loaded.asked() if c.argv[0] == "nvidia-smi"] == [QUERY, "-q"]


# -------------------------------------------------------------------------------------------------------- processes


def test_compute_apps(machine: Any) -> None:
    text = "4711, 00000000:41:00.0, /usr/bin/python3, -m, x, 91234 MiB\n4712, 00000000:61:00.0, [Not Found], [N/A]\n"
    apps = machine.on("nvidia-smi", stdout=text).value(ComputeApps())
    assert apps == (
        ComputeApp(4711, "0000:41:00.0", "/usr/bin/python3, -m, x", 91234),
        ComputeApp(4712, "0000:61:00.0", "[Not Found]", None),
    )


@pytest.mark.parametrize("text", ["", "\n", "No running processes found\n"])
def test_no_compute_app(machine: Any, text: str) -> None:
    assert machine.on("nvidia-smi", stdout=text).value(ComputeApps()) == ()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"stdout": "Unable to determine the device handle for GPU1: 0000:21:00.0: Unknown Error\n"}, "may not be whole"),
        ({"stdout": NO_DRIVER, "status": 9}, "exit status 9: NVIDIA-SMI has failed"),
        ({"status": 127}, "is not there"),
    ],
)
def test_compute_apps_that_cannot_be_listed(machine: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in machine.on("nvidia-smi", **said).unknown(ComputeApps())

"""One state, many answers: whatever is done to the GPUs, every renderer tells the same story."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from proofbook.lab.sim.boards import eight_gpu_epyc, four_gpu_epyc
from proofbook.lab.sim.render_nvidia import nvidia_files, nvidia_smi
from proofbook.lab.sim.render_pci import kernel_boot_lines, lspci, pci_files
from proofbook.lab.sim.state import Hardware

NOW = datetime(2026, 3, 9, 16, 2, 1, tzinfo=UTC)
FATES = ("ok", "gone", "vfio", "unbound", "lost", "dead", "needs-reset", "uninitialised")


def _apply(hw: Hardware, address: str, fate: str) -> None:
    device = hw.pci[address]
    if fate == "gone":
        device.present = False
    elif fate == "dead":
        device.config_dead = True
    elif fate in ("vfio", "unbound"):
        device.driver = "vfio-pci" if fate == "vfio" else ""
    else:
        hw.gpus[address].condition = fate


@st.composite
def machines(draw: st.DrawFn) -> tuple[Hardware, dict[str, str]]:
    hw = draw(st.sampled_from((four_gpu_epyc, eight_gpu_epyc)))()
    fates = {address: draw(st.sampled_from(FATES)) for address in hw.gpus}
    for address, fate in fates.items():
        _apply(hw, address, fate)
    hw.iommu_on = draw(st.booleans())
    return hw, fates


@settings(max_examples=60, deadline=None)
@given(machines())
def test_every_answer_tells_of_the_same_gpus(drawn: tuple[Hardware, dict[str, str]]) -> None:
    hw, fates = drawn
    there = {a for a, fate in fates.items() if fate != "gone"}
    bound = {a for a in there if fates[a] not in ("vfio", "unbound")}
    counted = {a for a in bound if fates[a] != "uninitialised"}
    with_row = {a for a in counted if fates[a] not in ("lost", "dead")}
    sysfs, driver = pci_files(hw), nvidia_files(hw)
    boot = [text for _, _, text in kernel_boot_lines(hw, "ro quiet", "6.17.13-1-pve")]

    # the bus
    shown = lspci(hw, ["-D", "-d", "10de:"])[1].decode().splitlines()
    assert {line.split(" ", 1)[0] for line in shown} == there
    assert {line.split(" ", 1)[0] for line in shown if "(rev ff)" in line} == {a for a in there if fates[a] == "dead"}
    assert {path.split("/")[5] for path in sysfs if path.startswith("/sys/bus/pci/devices/")} & fates.keys() == there
    assert {a for a in fates if f"/sys/bus/pci/drivers/nvidia/{a}" in sysfs} == bound
    grouped = {path.rsplit("/", 1)[1] for path in sysfs if re.match(r"/sys/kernel/iommu_groups/\d+/devices/.", path)}
    assert grouped & fates.keys() == (there if hw.iommu_on else set())

    # the boot log
    assert {a for a in fates if any(line.startswith(f"pci {a}: [10de:2bb5]") for line in boot)} == there
    assert {a for a in fates if f"nvidia {a}: enabling device (0000 -> 0002)" in boot} == bound
    assert any("probe routine was not called" in line for line in boot) == bool(there - bound)
    assert {a for a in fates if any(a in line for line in boot)} == there

    # the driver
    assert {a for a in fates if f"/proc/driver/nvidia/gpus/{a}/information" in driver} == bound
    assert {a for a in fates if f"/dev/nvidia{hw.gpus[a].minor}" in driver} == bound
    assert ("/dev/nvidiactl" in driver) == bool(bound)

    # nvidia-smi
    status, table, _ = nvidia_smi(hw, ["--query-gpu=pci.bus_id", "--format=csv,noheader"], NOW)
    listed, document = nvidia_smi(hw, ["-L"], NOW)[1].decode(), nvidia_smi(hw, ["-q", "-x"], NOW)[1].decode()
    if not bound:
        assert status == 9
    elif not counted:
        assert status == 6
    else:
        assert status == (15 if counted - with_row else 0)
        lines = table.decode().splitlines()
        assert len(lines) == len(counted) == len(listed.splitlines())
        assert {line[4:].lower() for line in lines if line.startswith("00000000:")} == with_row
        assert {a for a in fates if any("device handle" in line and a.upper() in line for line in lines)} == counted - with_row
        root = ElementTree.fromstring(document)
        assert {gpu.get("id", "")[4:].lower() for gpu in root.iterfind("gpu")} == with_row
        assert root.findtext("attached_gpus") == str(len(counted))
        assert {gpu.findtext("uuid") for gpu in root.iterfind("gpu")} == {hw.gpus[a].uuid for a in with_row}

"""The pair matrix on a real kernel: its IOMMU really stops a stand-in's DMA, in the window of the pair that is to blame.

The probe and the whole runbook run as on any machine. The driver library is a stand-in; to it, a copy by the pair that is to fail
is a word in a file of the stand-in device, which then writes to its peer's memory, where it must not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook import launch
from proofbook.lab.real import topology
from proofbook.lab.real.guest.nvidia_smi import uuid
from proofbook.probes.pci import PciDevices

from .conftest import Kept, VirtualMachine
from .runs import Told

pytestmark = pytest.mark.vm

GPUS = topology.load("four-gpus").gpus()
ONE, TWO, BYSTANDER = GPUS[:3]
SIZES = "4,4096"


@pytest.fixture
def machine(kept: Kept, fake_libcuda: Path) -> Iterator[VirtualMachine]:
    with kept.ready() as machine:
        argv = machine.vm.ssh_command("cat > /usr/lib/x86_64-linux-gnu/libcuda.so.1")
        subprocess.run(argv, input=fake_libcuda.read_bytes(), check=True, timeout=120)
        yield machine


def plan(machine: VirtualMachine, *statements: str) -> None:
    """What the driver library does there; its devices are in another order than the machine's."""
    devices = [f"device {pci} {uuid(pci).removeprefix('GPU-').replace('-', '')} 4096 Stand-in" for pci in reversed(GPUS)]
    machine.write("/etc/fake-cuda.plan", "\n".join((*devices, *statements)) + "\n")


def memory_of(machine: VirtualMachine, pci: str) -> int:
    """Where a device's own memory begins, as its peers see it."""
    return int(machine.sh(f"head -n 1 /sys/bus/pci/devices/{pci}/resource").split()[0], 16)


def matrix(folder: Path, **parameters: Any) -> Told:
    given = {"host": "lab:vm", "gpus": ",".join((ONE, TWO, BYSTANDER)), "sizes": SIZES, "repeats": 1, "grace_s": 2.0}
    return Told(launch.launch("p2p-pair-matrix", {**given, **parameters}, outputs=folder), folder)


def cells(told: Told) -> dict[tuple[str, str], tuple[str, str]]:
    """Ordered pair → how it came out, and why."""
    (found,) = [m["value"] for m in told.record["measurements"] if m["name"] == "p2p.Matrix"]
    return {(cell["src"], cell["dst"]): (cell["state"], cell["reason"]) for cell in found["cells"]}


def states(told: Told) -> set[str]:
    return {state for state, _ in cells(told).values()}


@pytest.mark.long
def test_a_real_fault_is_its_pairs_and_no_other(machine: VirtualMachine, tmp_path: Path) -> None:
    poke = f"poke /sys/bus/pci/devices/%a/stand_in_dma {memory_of(machine, TWO) + 0x100:#x}"
    plan(machine, f"fault {ONE} {TWO} ce-push 4096 4096 {poke}")
    told = matrix(tmp_path / "out")
    assert told.outcome.status == "completed"
    found = cells(told)
    state, why = found.pop((ONE, TWO))
    assert state == "fault"
    assert f"dmar-fault of {ONE}" in why
    assert f"the only pair that was active; the address lies in a BAR of its peer {TWO}" in why
    assert {state for state, _ in found.values()} == {"verified"}, found
    assert told.outcome.conclusion == "refuted"


def test_a_fault_of_a_device_that_no_pair_has_is_no_pairs(machine: VirtualMachine, tmp_path: Path) -> None:
    other = GPUS[3]
    plan(machine, f"fault {ONE} {TWO} ce-push 4096 4096 poke /sys/bus/pci/devices/{other}/stand_in_dma 0x7f00000000")
    told = matrix(tmp_path / "out", gpus=f"{ONE},{TWO}")
    assert states(told) == {"verified"}
    assert any(other in f["reason"] for f in told.record["findings"]), told.record["findings"]
    assert machine.value(PciDevices())[other].driver == "nvidia"

"""Every probe over SSH against a simulated machine: each knows its answer, and the machine knows each question."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from proofbook import probes as package
from proofbook.changes.unit_edit import UnitEdit
from proofbook.checks.mtp.speculation import Speculation
from proofbook.inventory import Inventory, connect
from proofbook.lab.sim import client
from proofbook.model import Probe
from proofbook.probes import Answer, drive
from proofbook.probes.access import Access, Logins
from proofbook.probes.boot import Boots, Machine, Shutdown
from proofbook.probes.change_state import ApprovalsUsed, GuardState, HeldMachine, LeaseHeld, StepState
from proofbook.probes.containers import ContainerState
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.iommu_identity import EarlyModules, IdentityState
from proofbook.probes.journal import Journald, UnitJournal
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.memory import GpuMemory, GpuProcesses, PageCache
from proofbook.probes.nvidia import ComputeApps, Driver, Gpus
from proofbook.probes.obstacles import Obstacles
from proofbook.probes.p2p import PeerConfig, Topology
from proofbook.probes.pci import AerCounters, PciDevices, ResetMethods
from proofbook.probes.service import Endpoint
from proofbook.probes.sglang import (
    Checkpoint,
    LauncherHelp,
    ModelInfo,
    PortOwner,
    Processes,
    ServedCache,
    ServedCheckpoint,
    ServerInfo,
    Version,
)
from proofbook.probes.start_log import StartLines
from proofbook.probes.systemd import FailedUnits, RunningServices, Services, SystemState, UnitProcess, UnitState
from proofbook.probes.unit_files import CandidateVerified, UnitFiles, UnitSettings

pytestmark = pytest.mark.lab
SCENARIO = "healthy"
MODEL = "/models/Qwen3.5-122B-A10B"
Answers = dict[Probe[Any], Answer[Any]]


@pytest.fixture(scope="module")
def lab(nursery: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(tmp_path_factory.mktemp("lab")))
        try:
            yield
        finally:
            client.stop()


def ask_everything(scenario: str) -> Answers:
    """Every probe that there is, on the host and for each of its containers and services; then those of the boot before."""
    spec = Inventory().resolve(f"lab:{scenario}")
    containers = {c.name: c for c in spec.containers}
    asked: list[Probe[Any]] = [
        *(Machine(), Boots(), KernelLog(), KernelLog("-1"), Journald(), PciDevices(), AerCounters(), IommuGroups()),
        ResetMethods(),
        *(Driver(), Gpus(), ComputeApps(), FailedUnits(), RunningServices(), Services(), SystemState(), Access(), Logins()),
    ]
    for container in containers.values():
        asked += [ContainerState(container), FailedUnits(container), RunningServices(container), SystemState(container)]
        asked.append(Services(container))
    for service in spec.services:
        where = containers.get(service.container)
        asked += [UnitState(service.name, where), UnitProcess(service.name, where), UnitJournal(service.name, where)]
        asked += [Endpoint(service.url, where), UnitSettings(service.name, where), UnitFiles(service.name, where)]
        edit = UnitEdit(service.name, where, Speculation(num_steps=3), "drop-in")
        asked += [CandidateVerified(service.name, where, edit), GuardState("r1", where), StepState("r1", "load", where)]
        asked += [Version(service.name, where), LauncherHelp(service.name, where), Processes(service.name, where)]
        asked += [ServedCheckpoint(service.name, where), ServedCache(service.name, where), PortOwner(30000, where)]
        asked += [ServerInfo("http://127.0.0.1:30000", where), ModelInfo("http://127.0.0.1:30000", where)]
        asked += [Checkpoint(MODEL, where), PageCache(MODEL, where)]
        asked.append(HeldMachine(where))
        asked.append(Obstacles((f"/etc/systemd/system/{service.name}",), where))
    asked += [ApprovalsUsed(), HeldMachine()]
    asked += [GpuMemory(), GpuProcesses(), LeaseHeld(), IdentityState(), EarlyModules(), Topology(), PeerConfig()]
    asked += [Topology(), PeerConfig()]
    transport, _ = connect(spec)
    transport.open()
    try:
        answers = drive(asked, transport.gather)
        boots = answers[Boots()].value or ()
        runs = [
            (p.unit, p.container, a.value.invocation_id) for p, a in answers.items() if isinstance(p, UnitJournal) and a.value
        ]
        later: list[Probe[Any]] = [Shutdown(b.boot_id) for b in boots if b.index == -1]
        return answers | drive([*later, *(StartLines(*run) for run in runs)], transport.gather)
    finally:
        transport.close()


@pytest.fixture(scope="module")
def answers(lab: None) -> Answers:
    return ask_everything(SCENARIO)


def test_no_answer_is_unknown(answers: Answers) -> None:
    assert {p: a.unknown for p, a in answers.items() if not a.known} == {}


def test_the_machine_knows_every_question(answers: Answers) -> None:
    assert client.unknown_commands(SCENARIO) == []


def test_no_probe_is_forgotten_here(answers: Answers) -> None:
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
    kinds = {
        k
        for m in modules
        for k in vars(m).values()
        if isinstance(k, type) and issubclass(k, Probe) and k.__module__ == m.__name__
    }
    assert kinds == {type(p) for p in answers}


def test_where_the_gpus_hang_and_what_decides_over_peers_is_known_whole(answers: Answers) -> None:
    topology: Any = answers[Topology()].value
    config: Any = answers[PeerConfig()].value
    assert (len(topology.gpus), len(topology.links), topology.problems) == (4, 12, {})
    assert topology.upstream["0000:41:00.0"] == ("0000:40:01.1",)
    assert topology.bar1_mib.keys() == topology.framebuffer_mib.keys() == topology.limit_gbps.keys() == set(topology.gpus)
    assert (config.remaps_peers, config.initramfs, config.problems) == (True, ("etc/modprobe.d/nvidia.conf",), {})


def test_the_answers_agree_with_one_another_and_with_what_is_meant_to_be_there(answers: Answers) -> None:
    def said(probe: Probe[Any]) -> Any:
        return answers[probe].value

    spec = Inventory().resolve(f"lab:{SCENARIO}")
    meant = {g.pci for g in spec.gpus}
    gpus, devices, groups = (said(p) for p in (Gpus(), PciDevices(), IommuGroups()))
    assert set(gpus.rows) == meant == set(gpus.proc) and gpus.problems == {}
    assert {devices[pci].driver for pci in meant} == {"nvidia"}
    assert all(devices[pci].iommu_group is not None and groups.by_device[pci] for pci in meant)
    assert {a.pci for a in said(ComputeApps())} <= meant

    machine, boots, log = (said(p) for p in (Machine(), Boots(), KernelLog()))
    assert boots[-1].boot_id == machine.boot_id == log.boot_id
    assert log.complete and log.gaps == () and log.notes == ()
    assert said(KernelLog("-1")).boot_id == boots[-2].boot_id
    assert said(Shutdown(boots[-2].boot_id)).orderly

    driver = said(Driver())
    assert driver.problems == {} and driver.open_module
    assert driver.module_version == driver.disk_version == driver.library_version == gpus.driver_version

    (container,) = spec.containers
    inside = said(ContainerState(container))
    assert inside.running and set(inside.devices.values()) == {"ok"} and inside.cuda.ok and inside.unknown == {}
    (service,) = spec.services
    unit, process, journal = (said(p(service.name, container)) for p in (UnitState, UnitProcess, UnitJournal))
    assert unit.active == "active" and unit.main_pid == process.pid
    assert unit.exec_start[0].tokens == process.argv
    assert journal.complete and journal.invocation_id == unit.invocation_id
    assert said(Endpoint(service.url, container)).http_status == 200


def test_without_root_the_answers_are_unknown_and_say_why(lab: None) -> None:
    answers = ask_everything("no-dmesg-permission")
    unknown = {probe: answer.unknown for probe, answer in answers.items()}
    (container,) = Inventory().resolve("lab:no-dmesg-permission").containers
    assert "only be read by root" in unknown[KernelLog()]
    assert "not seeing messages" in unknown[KernelLog("-1")] or "insufficient permissions" in unknown[KernelLog("-1")]
    assert "needs root" in unknown[ContainerState(container)]
    assert unknown[Machine()] == unknown[PciDevices()] == unknown[IommuGroups()] == ""
    access = answers[Access()].value
    assert access is not None and not access.sudo and "sudo" in access.sudo_unknown
    assert client.unknown_commands("no-dmesg-permission") == []

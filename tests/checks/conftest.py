"""A healthy machine as observations; each test breaks one thing and says what must be found."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.checks.baseline import Baseline, Scope, baseline_from
from proofbook.intent import ContainerSpec, GpuSpec, ServiceSpec
from proofbook.model import Check, Finding, Observation, Probe, Seen, Verdict, worst
from proofbook.probes.boot import Boot, Boots, Machine, MachineFacts, Shutdown, ShutdownFacts
from proofbook.probes.containers import ContainerFacts, ContainerState, CudaFacts
from proofbook.probes.iommu import IommuFacts, IommuGroup, IommuGroups
from proofbook.probes.journal import Journald, JournaldFacts
from proofbook.probes.kernel_log import KernelLine, KernelLog, KernelMessages
from proofbook.probes.nvidia import Driver, DriverFacts, GpuRow, Gpus, GpuTable
from proofbook.probes.pci import AerCounters, AerTotals, LinkFacts, PciDevices, PciFacts
from proofbook.probes.service import Endpoint, EndpointFacts
from proofbook.probes.systemd import (
    ExecCommand,
    FailedUnits,
    ProcessFacts,
    ServiceRow,
    Services,
    UnitFacts,
    UnitProcess,
    UnitRow,
    UnitState,
)

T0 = datetime(2026, 3, 9, 16, 0, tzinfo=UTC)
OLD, NEW, OTHER = "a1" * 16, "b2" * 16, "c3" * 16
MACHINE_ID = "4f" + "3a" * 15
A, B = "0000:01:00.0", "0000:41:00.0"
UUIDS = {A: "GPU-6b1f0c52-3a7d-4e19-9c84-20d5e7f1a036", B: "GPU-e94d7a08-51c6-4b2f-8d3e-7f60b9a2c415"}
NIC = "0000:22:00.0"
KERNEL = "6.17.13-1-pve"
CMDLINE = f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=ZFS=rpool/ROOT/pve-1 ro quiet"
SERVER = "/opt/sglang/venv/bin/python -m sglang.launch_server --model-path /models/qwen --tp-size 2 --speculative-algorithm NEXTN"
ENVIRONMENT = {"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "hf_abcdefghijklmnop", "INVOCATION_ID": "11" * 16}
GRANTED = "acpi PNP0A08:00: _OSC: OS now controls [PCIeHotplug SHPCHotplug PME AER PCIeCapability LTR DPC]"
KEPT = "acpi PNP0A08:00: _OSC: platform does not support [AER LTR DPC]"

CONTAINER = ContainerSpec(
    name="llm-two", kind="pct", id="102", devices=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
)
SERVICE = ServiceSpec(
    name="sglang-qwen.service",
    container="llm-two",
    url="http://127.0.0.1:30000/health",
    args=("--speculative-algorithm", "NEXTN"),
    environment={"NCCL_P2P_DISABLE": "1"},
)
GPUS = tuple(GpuSpec(pci=p, uuid=UUIDS[p], iommu_type="DMA-FQ", link_width=16) for p in (A, B))

UNIT, PROCESS = UnitState(SERVICE.name, CONTAINER), UnitProcess(SERVICE.name, CONTAINER)
TARGET = UnitState("multi-user.target", CONTAINER)


def gpu(address: str, **more: Any) -> PciFacts:
    values: dict[str, Any] = {
        "address": address,
        "vendor": 0x10DE,
        "device": 0x2BB5,
        "class_code": 0x030200,
        "driver": "nvidia",
        "iommu_group": int(address[5:7], 16),
        "numa_node": 0,
        "link": LinkFacts(2.5, 16, 32.0, 16),
    }
    return PciFacts(**{**values, **more})


def unit(name: str, **more: Any) -> UnitFacts:
    values: dict[str, Any] = {
        "unit": name,
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "result": "success",
        "type": "simple",
        "main_pid": 15462,
        "n_restarts": 0,
        "invocation_id": "11" * 16,
        "enabled": "enabled",
        "need_daemon_reload": False,
        "exec_start": (ExecCommand("/opt/sglang/venv/bin/python", SERVER),),
        "environment": {"NCCL_P2P_DISABLE": "1"},
        "fragment_path": f"/etc/systemd/system/{name}",
        "drop_ins": (),
        "description": "SGLang Qwen (MTP enabled)",
        "exit_code": "",
        "exit_status": None,
        "main_started_s": 33.0,
        "active_enter_s": 33.0,
        "inactive_exit_s": 32.5,
    }
    return UnitFacts(**{**values, **more})


def services(*names: str, **more: Any) -> dict[str, ServiceRow]:
    values: dict[str, Any] = {"active": "active", "sub": "running", "lasting": True, **more}
    return {name: ServiceRow(name, **values) for name in names}


def lines(*texts: str) -> tuple[KernelLine, ...]:
    return tuple(KernelLine(float(n), T0, 6, text) for n, text in enumerate(texts))


HEALTHY_LOG = (
    f"Linux version {KERNEL} (build@proxmox) (gcc 14.2.0) #1 SMP PREEMPT_DYNAMIC",
    f"Command line: {CMDLINE}",
    GRANTED,
    f"pci {A}: [10de:2bb5] type 00 class 0x030200 PCIe Endpoint",
    f"pci {B}: [10de:2bb5] type 00 class 0x030200 PCIe Endpoint",
    f"pci {NIC}: [8086:159b] type 00 class 0x020000 PCIe Endpoint",
    "iommu: Default domain type: Translated",
    f"pci {A}: Adding to iommu group 1",
    f"pci {B}: Adding to iommu group 65",
    "nvidia: module verification failed: signature and/or required key missing - tainting kernel",
    f"nvidia {A}: [drm] No compatible format found",
    "pci 0000:70:01.1: bridge window [io  size 0x5000]: can't assign; no space",
)


class World:
    """Observations by probe; ``reasons`` holds why an answer is unknown. Names that the tests need hang on it too."""

    OLD, NEW, OTHER, MACHINE_ID, KERNEL = OLD, NEW, OTHER, MACHINE_ID, KERNEL
    A, B, NIC, GPUS, UUIDS = A, B, NIC, GPUS, UUIDS
    CONTAINER, SERVICE, SERVER, ENVIRONMENT = CONTAINER, SERVICE, SERVER, ENVIRONMENT
    UNIT, PROCESS, TARGET, ENDPOINT = UNIT, PROCESS, TARGET, Endpoint(SERVICE.url, CONTAINER)
    STATE = ContainerState(CONTAINER)
    KEPT, GRANTED = KEPT, GRANTED
    gpu, unit, lines, services = staticmethod(gpu), staticmethod(unit), staticmethod(lines), staticmethod(services)

    def __init__(self) -> None:
        table = GpuTable(
            rows={
                p: GpuRow(p, n, u, "RTX PRO 6000", "98.02", "P8", 1, 5, 16, 16, "None", n)
                for n, (p, u) in enumerate(UUIDS.items())
            },
            problems={},
            driver_version="595.58.03",
            exit_status=0,
            proc={p: {"GPU UUID": UUIDS[p], "GPU Excluded": "No"} for p in (A, B)},
        )
        nic = gpu(NIC, vendor=0x8086, device=0x159B, class_code=0x020000, driver="ice")
        bmc = gpu("0000:63:00.0", vendor=0x1A03, device=0x2000, class_code=0x030000, driver="ast", iommu_group=9, link=None)
        self.values: dict[Probe[Any], Any] = {
            Machine(): MachineFacts("gpu-hv1", MACHINE_ID, NEW, KERNEL, CMDLINE, 180.0, T0, "GENOA2D24G", "4U8G", "2.09"),
            Boots(): (Boot(-1, OLD), Boot(0, NEW)),
            Shutdown(OLD): ShutdownFacts(OLD, True, "systemd: Shutting down.", T0, ("Journal stopped",)),
            PciDevices(): {A: gpu(A), B: gpu(B), NIC: nic, bmc.address: bmc},
            IommuGroups(): IommuFacts(
                {1: IommuGroup("DMA-FQ", (A,)), 65: IommuGroup("DMA-FQ", (B,)), 34: IommuGroup("DMA-FQ", (NIC,))},
                {A: "DMA-FQ", B: "DMA-FQ", NIC: "DMA-FQ"},
            ),
            AerCounters(): {p: AerTotals(0, 0, 0) for p in (A, B, NIC)},
            Gpus(): table,
            Driver(): DriverFacts(
                "595.58.03", True, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03",
                {"DmaRemapPeerMmio": "1"},
                "8F2A41C09D5E7B36A1C4D02", "8F2A41C09D5E7B36A1C4D02", "595.58.03", "595.58.03",
            ),
            KernelLog(): KernelMessages(lines(*HEALTHY_LOG), True, (), "journal", NEW),
            Journald(): JournaldFacts(
                "loaded", "active", "running", None, 0,
                {"systemd-journald.socket": "active", "systemd-journald-dev-log.socket": "active"}, {}, True,
            ),
            FailedUnits(): (),
            FailedUnits(CONTAINER): (),
            Services(): services("ssh.service", "cron.service", "docker.service"),
            Services(CONTAINER): services("ssh.service", SERVICE.name),
            ContainerState(CONTAINER): ContainerFacts(
                "llm-two", "pct", "102", True, "running", dict.fromkeys(CONTAINER.devices, "ok"),
                CudaFacts("/usr/lib/libcuda.so.1", 0, 2, ""), True,
            ),
            UNIT: unit(SERVICE.name),
            TARGET: unit("multi-user.target", sub="active", active_enter_s=41.0, n_restarts=None, exec_start=()),
            PROCESS: ProcessFacts(SERVICE.name, 15462, tuple(SERVER.split()), ENVIRONMENT, "", 33.0),
            Endpoint(SERVICE.url, CONTAINER): EndpointFacts(SERVICE.url, 200, "", 0.02),
        }  # fmt: skip
        self.reasons: dict[Probe[Any], str] = {}

    def change(self, probe: Probe[Any], **fields: Any) -> World:
        self.values[probe] = replace(self.values[probe], **fields)
        return self

    def put(self, probe: Probe[Any], value: Any) -> World:
        self.values[probe] = value
        return self

    def blind(self, *probes: Probe[Any], why: str = "permission denied") -> World:
        self.reasons |= dict.fromkeys(probes, why)
        return self

    def device(self, address: str, **fields: Any) -> World:
        devices = self.values[PciDevices()]
        return self.put(PciDevices(), {**devices, address: replace(devices[address], **fields)})

    def without(self, address: str) -> World:
        return self.put(PciDevices(), {a: d for a, d in self.values[PciDevices()].items() if a != address})

    def row(self, address: str, **fields: Any) -> World:
        rows = self.values[Gpus()].rows
        return self.change(Gpus(), rows={**rows, address: replace(rows[address], **fields)})

    def no_row(self, address: str, problem: str = "", **fields: Any) -> World:
        rows = {a: r for a, r in self.values[Gpus()].rows.items() if a != address}
        return self.change(Gpus(), rows=rows, problems={address: problem} if problem else {}, **fields)

    def iommu(self, **types: str | None) -> World:
        """``iommu(a="identity")``; None takes the device out of its group."""
        names = {"a": A, "b": B, "nic": NIC}
        by_device = dict(self.values[IommuGroups()].by_device)
        for name, kind in types.items():
            by_device.pop(names[name])
            if kind is not None:
                by_device[names[name]] = kind
        groups = {n: IommuGroup(t, (a,)) for n, (a, t) in enumerate(sorted(by_device.items()))}
        return self.put(IommuGroups(), IommuFacts(groups, by_device))

    def iommu_off(self) -> World:
        return self.put(IommuGroups(), IommuFacts({}, {}))

    def says(self, *texts: str) -> World:
        """More lines at the end of the kernel log."""
        log = self.values[KernelLog()]
        return self.change(KernelLog(), lines=lines(*(x.text for x in log.lines), *texts))

    def log(self, *texts: str, **fields: Any) -> World:
        return self.change(KernelLog(), lines=lines(*texts), **fields)

    def fails(self, *names: str) -> World:
        return self.put(FailedUnits(), tuple(UnitRow(n, "loaded", "failed", "failed", n) for n in names))

    def seen(self) -> Seen:
        return Seen(
            Observation(p, None if p in self.reasons else v, self.reasons.get(p, ""), T0, NEW) for p, v in self.values.items()
        )

    def judge(self, check: Check) -> list[Finding]:
        missing = [p for p in check.needs() if p not in self.values]
        assert not missing, f"this world knows nothing of {missing}"
        return list(check.judge(self.seen()))

    def verdict(self, check: Check) -> Verdict:
        return worst(f.verdict for f in self.judge(check))

    def baseline(self, *, boot_id: str = OLD) -> Baseline:
        """This world as it was before the reboot."""
        before = World()
        before.values, before.reasons = dict(self.values), dict(self.reasons)
        before.change(Machine(), boot_id=boot_id).put(Boots(), (Boot(0, boot_id),))
        return baseline_from(Scope(GPUS, (CONTAINER,), (SERVICE,)), before.seen())


@pytest.fixture
def world() -> World:
    return World()

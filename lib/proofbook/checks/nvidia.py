"""Is every GPU there, by address and name, and is the driver one piece?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from proofbook.checks.baseline import Baseline, is_gpu
from proofbook.checks.expected import DECLARE_GPUS, ExpectedGpu, expected_gpus
from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.intent import GpuSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.nvidia import Driver, DriverFacts, GpuRow, Gpus, GpuTable
from proofbook.probes.pci import PciDevices, PciFacts

__all__ = ["DriverConsistent", "GpusPresent", "needs_open_module"]

_RECOVERY = {
    "reset": (Suggested.RESET_GPU, "Drain the GPU and reset it (`nvidia-smi --gpu-reset -i <uuid>`), or reboot."),
    "gpu reset required": (Suggested.RESET_GPU, "Drain the GPU and reset it (`nvidia-smi --gpu-reset -i <uuid>`), or reboot."),
    "drain and reset": (Suggested.RESET_GPU, "Stop the work on this GPU, then reset it (`nvidia-smi --gpu-reset -i <uuid>`)."),
    "reboot": (Suggested.REBOOT, "The driver asks for a reboot of the machine; a GPU reset is not enough."),
    "node reboot required": (Suggested.REBOOT, "The driver asks for a reboot of the machine; a GPU reset is not enough."),
    "drain p2p": (Suggested.LOOK, "Stop peer-to-peer traffic of this GPU and look at the kernel log."),
}


def needs_open_module(device: PciFacts) -> bool:
    """Blackwell GPUs (device ids 2b.. and 29..) work with the open kernel module only."""
    return device.vendor == 0x10DE and device.device >> 8 in (0x2B, 0x29)


@dataclass(frozen=True)
class GpusPresent(Check):
    """Every expected GPU is on the bus, has its driver, is known to it by its UUID, and asks for nothing.

    Who is expected comes from the inventory, else from the look before; never from what is visible now, or a GPU that is
    gone would not be missed.
    """

    gpus: tuple[GpuSpec, ...]
    baseline: Baseline | None
    name: ClassVar[str] = "nvidia.GpusPresent"
    title: ClassVar[str] = "Is every expected GPU there, and well?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (PciDevices(), Gpus())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        devices, no_pci = tell(seen, PciDevices()).pair
        table, no_table = tell(seen, Gpus()).pair
        if devices is None and table is None:
            return [self.unknown(f"neither PCI nor the driver could be asked: {no_pci}; {no_table}")]
        expected = expected_gpus(self.gpus, self.baseline)
        present = sorted({a for a, d in (devices or {}).items() if is_gpu(d)} | set(table.rows if table else ()))
        findings = []
        if table is not None and "" in table.problems:
            findings += self._whole_table(table, expected or None)
        if not expected:
            return [*findings, *self._nobody_said(present, devices, table, no_pci, no_table)]
        findings += [_Look(self, gpu, devices, table, no_pci, no_table).finding() for gpu in expected]
        extra = [a for a in present if a not in {e.pci for e in expected}]
        for address in extra:
            findings.append(
                self.warned(
                    f"a GPU that {expected[0].by} does not have",
                    subject=address,
                    expected="absent",
                    observed=self._named(address, table),
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Was it added, or did an address move? Correct the inventory, or look which slot it is in.",
                )
            )
            # WHY: its place in the inventory may be missing, and the GPU broken all the same.
            if bad := self._as_it_is(address, devices, table, no_pci, no_table):
                findings.append(bad)
        return findings

    def _as_it_is(
        self, address: str, devices: Mapping[str, PciFacts] | None, table: GpuTable | None, no_pci: str, no_table: str
    ) -> Finding | None:
        """What is wrong with a GPU of which nobody said how it should be; None when nothing is."""
        driver = devices[address].driver if devices and address in devices else "nvidia"
        there = ExpectedGpu(address, driver, "", "", "", "", None, "", "PCI")
        return _Look(self, there, devices, table, no_pci, no_table).bad()

    @staticmethod
    def _named(address: str, table: GpuTable | None) -> str:
        row = table.rows.get(address) if table else None
        return row.uuid or row.name if row else "on the bus"

    def _whole_table(self, table: GpuTable, expected: Sequence[ExpectedGpu] | None) -> list[Finding]:
        """What nvidia-smi said of the whole, not of one GPU. It does not matter when every GPU is passed through."""
        if expected is not None and all(e.driver == "vfio-pci" for e in expected):
            return []
        return [
            self.failed(
                f"nvidia-smi: {'; '.join(table.problems[''].splitlines())} (exit status {table.exit_status})",
                subject="nvidia-smi",
                observed=table.problems[""],
                action=Suggested.FIX_SOFTWARE,
                what_to_do="Is the module loaded (`lsmod`), does it match the library, and what does the kernel log say of NVRM?",
            )
        ]

    def _nobody_said(
        self, present: Sequence[str], devices: Mapping[str, PciFacts] | None, table: GpuTable | None, no_pci: str, no_table: str
    ) -> list[Finding]:
        """Without an expectation a fault can be seen, but not that everything is there."""
        findings = []
        for address in sorted({*present, *(a for a in (table.problems if table else ()) if a)}):
            if finding := self._as_it_is(address, devices, table, no_pci, no_table):
                findings.append(finding)
        findings.append(
            self.unknown(
                f"{counted(len(present), 'GPU')} can be seen, but nobody said how many there should be",
                observed=list(present),
                action=Suggested.FIX_CONFIG,
                what_to_do=DECLARE_GPUS,
            )
        )
        return findings


@dataclass
class _Look:
    """One expected GPU, held against PCI and the driver: ``wrong`` and ``blind`` collect what is said of it."""

    check: GpusPresent
    gpu: ExpectedGpu
    devices: Mapping[str, PciFacts] | None
    table: GpuTable | None
    no_pci: str
    no_table: str
    wrong: list[tuple[str, Suggested, str]] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)
    fine: list[str] = field(default_factory=list)

    def bad(self) -> Finding | None:
        """The finding if something is wrong, else None."""
        self._on_the_bus()
        if self.gpu.driver != "vfio-pci":
            self._in_the_driver()
        return self._failed() if self.wrong else None

    def finding(self) -> Finding:
        failed = self.bad()
        if failed:
            return failed
        compared = self._compared()
        if self.table is not None and self.table.exit_status != 0 and not self.table.problems and self.gpu.driver != "vfio-pci":
            # WHY: rows that came before it died are no word that it is well
            self.blind.append(f"nvidia-smi gave its row and then ended with exit status {self.table.exit_status}")
        if self.blind:
            return self.check.unknown(f"cannot be told: {'; '.join(self.blind)}", **compared)
        return self.check.passed(", ".join(self.fine), **compared)

    def _failed(self) -> Finding:
        reasons, actions = "; ".join(w[0] for w in self.wrong), self.wrong[0]
        unseen = f" (not known: {'; '.join(self.blind)})" if self.blind else ""
        return self.check.failed(reasons + unseen, action=actions[1], what_to_do=actions[2], **self._compared())

    def _compared(self) -> dict[str, Any]:
        device = (self.devices or {}).get(self.gpu.pci)
        row = self.table.rows.get(self.gpu.pci) if self.table else None
        return {
            "subject": self.gpu.pci,
            "expected": {"driver": self.gpu.driver or None, "uuid": self.gpu.uuid or None, "by": self.gpu.by},
            "observed": {"driver": device.driver if device else None, "uuid": row.uuid if row else None},
        }

    def _on_the_bus(self) -> None:
        if self.devices is None:
            self.blind.append(f"PCI could not be read: {self.no_pci}")
            return
        device = self.devices.get(self.gpu.pci)
        if device is None:
            what = "Power the machine off and on; then look at slot, riser and power cable, and at the firmware's PCI settings."
            self.wrong.append(("not on the PCI bus", Suggested.POWER_CYCLE, what))
            return
        if device.vendor == 0xFFFF or device.device == 0xFFFF:
            what = "A GPU that answers with all ones often needs a power cycle; a warm reboot may not be enough."
            self.wrong.append(("its configuration space reads all ones: it does not answer", Suggested.POWER_CYCLE, what))
            return
        if device.vendor != 0x10DE:
            what = "Another device has this address now: compare slots and the inventory."
            self.wrong.append((f"the device there is no NVIDIA GPU (vendor {device.vendor:04x})", Suggested.FIX_CONFIG, what))
            return
        if self.gpu.driver and device.driver != self.gpu.driver:
            what = "See who claims it: driver_override, vfio-pci ids=, a blacklist, or a module that failed to load (kernel log)."
            bound = f"bound to {device.driver}" if device.driver else "bound to no driver"
            self.wrong.append((f"{bound}; {self.gpu.by} has {self.gpu.driver}", Suggested.FIX_CONFIG, what))
            return
        self.fine.append(f"on the bus, {'bound to ' + device.driver if device.driver else 'bound to no driver'}")

    def _in_the_driver(self) -> None:
        if self.table is None:
            self.blind.append(f"the driver could not be asked: {self.no_table}")
            return
        problem, row = self.table.problems.get(self.gpu.pci, ""), self.table.rows.get(self.gpu.pci)
        if problem:
            what = "Look at the kernel log for the first message about this GPU; it names the cause."
            self.wrong.append((f"nvidia-smi says {problem!r}", Suggested.LOOK, what))
        if row is None:
            if not problem:
                what = (
                    "The driver does not know it, or could not initialise it: read the kernel log (NVRM, Xid) for this address."
                )
                self.wrong.append((f"no row in nvidia-smi, which has {len(self.table.rows)}", Suggested.LOOK, what))
            return
        self._row(row)
        self._proc(self.table)

    def _row(self, row: GpuRow) -> None:
        if row.detailed is False:
            what = "The driver half knows it: read the kernel log (NVRM, Xid) for this address before anything runs on it."
            self.wrong.append(("nvidia-smi -q does not list it, though it has a row in the table", Suggested.LOOK, what))
        for name, text in sorted(row.broken.items()):
            self.wrong.append((f"nvidia-smi shows {text!r} as {name}", Suggested.RESET_GPU, _RECOVERY["reset"][1]))
        self._uuid(row)
        action = row.recovery_action
        if not action:
            self.fine.append("recovery action not reported by this driver")
        elif action.lower() == "none":
            self.fine.append("recovery action None")
        else:
            todo = _RECOVERY.get(action.lower(), (Suggested.LOOK, "Look up this recovery action in the driver's release notes."))
            self.wrong.append((f"the driver wants a recovery action: {action}", *todo))

    def _uuid(self, row: GpuRow) -> None:
        expected, observed = self.gpu.uuid.lower(), row.uuid.lower()
        if not observed:
            self.blind.append("the driver gives no UUID")
        elif not expected:
            self.fine.append(f"{row.uuid} (no UUID to compare it with)")
        elif expected == observed:
            self.fine.append(f"UUID as {self.gpu.uuid_by} has it")
        else:
            moved = next((a for a, r in (self.table.rows if self.table else {}).items() if r.uuid.lower() == expected), "")
            where = f"; that one is now at {moved}" if moved else ""
            what = (
                "Were cards swapped or addresses renumbered? Correct the inventory, or the slots; key everything "
                "by UUID until then."
            )
            self.wrong.append(
                (f"UUID {row.uuid} instead of {self.gpu.uuid} ({self.gpu.uuid_by}){where}", Suggested.FIX_CONFIG, what)
            )

    def _proc(self, table: GpuTable) -> None:
        information = table.proc.get(self.gpu.pci)
        if information is None:
            self.blind.append(
                f"/proc/driver/nvidia/gpus has no information of it, while nvidia-smi has a row ({len(table.proc)} there)"
            )
        elif information.get("GPU Excluded", "No").strip().lower() == "yes":
            what = "Look for NVreg_ExcludedGpus in /etc/modprobe.d and in the initramfs."
            self.wrong.append(("the driver excludes it (GPU Excluded: Yes)", Suggested.FIX_CONFIG, what))


def _one_version(versions: Sequence[str]) -> bool:
    """Whether all are one version. WHY parts: at a mismatch NVML calls itself 595.71 where its file says 595.71.05."""
    parts = sorted((v.split(".") for v in versions), key=len)
    return all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(parts))


@dataclass(frozen=True)
class DriverConsistent(Check):
    """The loaded module, the module on disk and the user-space library are one version, of the flavour that the GPUs need.

    ``before_reboot``: a difference is then what an upgrade leaves until the reboot (WARN); after it, it is a fault.
    """

    gpus: tuple[GpuSpec, ...] = ()
    baseline: Baseline | None = None
    before_reboot: bool = False
    name: ClassVar[str] = "nvidia.DriverConsistent"
    title: ClassVar[str] = "Are the driver's module, its file on disk and its library one piece?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Driver(), PciDevices())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        driver, no_driver = tell(seen, Driver()).pair
        if driver is None:
            return [unseen(self, no_driver)]
        devices, why = tell(seen, PciDevices()).pair
        expected = expected_gpus(self.gpus, self.baseline)
        if not driver.loaded:
            return [self._not_loaded(driver, expected, devices)]
        findings = [self._versions(driver), self._flavour(driver, devices, why)]
        changed = self._changed(driver)
        return [*findings, changed] if changed else findings

    def _not_loaded(
        self, driver: DriverFacts, expected: Sequence[ExpectedGpu], devices: Mapping[str, PciFacts] | None
    ) -> Finding:
        """Without a module: right when all GPUs are passed through or there are none, else a fault."""
        if expected and all(e.driver == "vfio-pci" for e in expected):
            return self.not_checked("no nvidia module is loaded; every GPU is meant for passthrough")
        if not expected and devices is not None and not any(is_gpu(d) and d.driver in ("", "nvidia") for d in devices.values()):
            return self.not_checked("no nvidia module is loaded, and no GPU here needs one")
        if "module_version" in driver.problems:
            return self.unknown(f"whether the nvidia module is loaded cannot be told: {driver.problems['module_version']}")
        return self.failed(
            "the nvidia module is not loaded",
            subject="module",
            action=Suggested.FIX_SOFTWARE,
            what_to_do="Was it built for this kernel (`dkms status`), and is its signature accepted (`modprobe "
            "nvidia`, kernel log)?",
        )

    def _versions(self, driver: DriverFacts) -> Finding:
        versions = {
            "loaded module": driver.module_version,
            "module on disk": driver.disk_version,
            "library": driver.library_version,
        }
        sources = {"loaded": driver.loaded_srcversion, "on disk": driver.disk_srcversion}
        differ = not _one_version([v for v in versions.values() if v])
        sources_known = {v for v in sources.values() if v}
        shown = ", ".join(f"{k} {v or 'not known'}" for k, v in versions.items())
        compared: dict[str, Any] = {
            "subject": "versions",
            "expected": driver.module_version,
            "observed": {**versions, "srcversion": sources},
        }
        if differ or len(sources_known) > 1:
            reason = shown if differ else f"{shown}, but the loaded module was built from another source than the one on disk"
            if self.before_reboot:
                return self.warned(f"{reason}: an upgrade waits for the reboot", action=Suggested.REBOOT, **compared)
            return self.failed(
                f"{reason}: a reboot did not make them one",
                action=Suggested.FIX_SOFTWARE,
                what_to_do="An old module in the initramfs (rebuild it: update-initramfs -u, dracut -f), or two "
                "installations of the driver?",
                **compared,
            )
        names = {"disk_version": "module on disk", "library_version": "library", "loaded_srcversion": "", "disk_srcversion": ""}
        missing = [n for n in names if getattr(driver, n) in (None, "")]
        if missing:
            reasons = "; ".join(f"{n}: {driver.problems.get(n, 'not said')}" for n in missing)
            return self.unknown(f"{shown}; what is known agrees, but {reasons}", **compared)
        return self.passed(
            f"{driver.module_version} loaded, on disk and as library; srcversion {driver.loaded_srcversion}", **compared
        )

    def _flavour(self, driver: DriverFacts, devices: Mapping[str, PciFacts] | None, why: str) -> Finding:
        if devices is None:
            return self.unknown(f"which flavour the GPUs need is not known: {why}", subject="flavour")
        picky = sorted(a for a, d in devices.items() if needs_open_module(d) and is_gpu(d))
        compared: dict[str, Any] = {"subject": "flavour", "expected": "open" if picky else None, "observed": driver.flavour_line}
        if not picky:
            return self.not_checked("no GPU here needs a particular flavour of the module", **compared)
        if driver.open_module is None:
            return self.unknown(
                f"whether the module is the open one cannot be told: {driver.problems.get('open_module', 'not said')}", **compared
            )
        if not driver.open_module:
            return self.failed(
                f"the proprietary module is loaded; {counted(len(picky), 'Blackwell GPU')} ({join(picky)}) need the open one",
                action=Suggested.FIX_SOFTWARE,
                what_to_do="Install the open kernel modules of the same version (package names end in -open), then reboot.",
                **compared,
            )
        return self.passed(f"the open module, which {counted(len(picky), 'Blackwell GPU')} here need", **compared)

    def _changed(self, driver: DriverFacts) -> Finding | None:
        before = self.baseline.driver if self.baseline else None
        if before is None or not before.loaded or before.module_version == driver.module_version:
            return None
        compared = {"subject": "change", "expected": before.module_version, "observed": driver.module_version}
        if before.disk_version == driver.module_version:
            return self.passed(
                f"{before.module_version} became {driver.module_version}, which lay on disk before the reboot", **compared
            )
        return self.warned(
            f"{before.module_version} became {driver.module_version}, which was not on disk before",
            action=Suggested.LOOK,
            what_to_do="Who installed it, and was it meant? An unattended upgrade may have.",
            **compared,
        )

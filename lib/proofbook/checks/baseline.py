"""A machine at one moment, as the checks compare it with a later one.

A :class:`Baseline` is taken from observations by a pure function, and survives JSON, so that it can come from the look
before the reboot, from the first look after it, or from the record of an earlier run. In a record, secrets are
``[redacted:…]``; comparisons treat such a value as equal to any other of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import msgspec

from proofbook.checks.arguments import changes, environment_changes
from proofbook.checks.looking import join, tell
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, GpuSpec, ServiceSpec
from proofbook.model import Probe, Seen
from proofbook.probes.boot import Boot, Boots, Machine, MachineFacts
from proofbook.probes.containers import ContainerFacts, ContainerState
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.nvidia import Driver, DriverFacts, Gpus, GpuTable
from proofbook.probes.pci import AerCounters, AerTotals, PciDevices, PciFacts
from proofbook.probes.systemd import FailedUnits, ProcessFacts, Services, UnitFacts, UnitProcess, UnitState

__all__ = [
    "BASELINE_SCHEMA",
    "Baseline",
    "Row",
    "Scope",
    "baseline_from",
    "baseline_from_json",
    "baseline_to_json",
    "before_after",
    "is_gpu",
    "is_nic",
]

T = TypeVar("T")

#: Raised when a field changes its meaning; fields that are only added keep it.
BASELINE_SCHEMA = 1


def is_gpu(device: PciFacts) -> bool:
    """An NVIDIA display controller. The vendor counts too: the board's management controller is a VGA device."""
    return device.vendor == 0x10DE and device.class_code >> 16 == 0x03


def is_nic(device: PciFacts) -> bool:
    return device.class_code >> 16 == 0x02


@dataclass(frozen=True)
class Baseline:
    """What was seen of a machine. None (or a missing key) is what was not seen; ``unknown`` says why, by a readable name.

    ``pci`` and ``iommu`` hold GPUs, network cards and the devices of the inventory only. Services are named
    ``container/unit`` or ``unit``; ``failed`` and ``running`` (the services that are meant to go on running, and do) are by
    container, "" being the host.
    """

    taken_at: datetime | None
    machine: MachineFacts | None = None
    boots: tuple[Boot, ...] | None = None
    pci: dict[str, PciFacts] | None = None
    iommu: dict[str, str] | None = None
    aer: dict[str, AerTotals] | None = None
    gpus: GpuTable | None = None
    driver: DriverFacts | None = None
    units: dict[str, UnitFacts] = field(default_factory=dict)
    processes: dict[str, ProcessFacts] = field(default_factory=dict)
    containers: dict[str, ContainerFacts] = field(default_factory=dict)
    failed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    running: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def boot_id(self) -> str:
        """32 hex digits, "" when the machine facts are unknown."""
        return self.machine.boot_id if self.machine else ""

    @property
    def machine_id(self) -> str:
        """32 hex digits, "" when the machine facts are unknown."""
        return self.machine.machine_id if self.machine else ""

    @property
    def gpu_addresses(self) -> tuple[str, ...]:
        """Every GPU that PCI or nvidia-smi showed, by address."""
        on_bus = {a for a, d in (self.pci or {}).items() if is_gpu(d)}
        in_table = set(self.gpus.rows) if self.gpus else set()
        return tuple(sorted(on_bus | in_table))

    def __repr__(self) -> str:
        taken = self.taken_at.isoformat(timespec="seconds") if self.taken_at else "never"
        return f"<Baseline of boot {self.boot_id or 'unknown'} taken {taken}, {len(self.gpu_addresses)} GPUs>"


@dataclass(frozen=True)
class Scope:
    """What is meant to be on the machine and is looked at: the inventory's word, or what a person named."""

    gpus: tuple[GpuSpec, ...] = ()
    containers: tuple[ContainerSpec, ...] = ()
    services: tuple[ServiceSpec, ...] = ()

    def container(self, name: str) -> ContainerSpec | None:
        """The container of that name; None for "", which is the host itself. Raises CannotTell when it is not declared."""
        if not name:
            return None
        found = next((c for c in self.containers if c.name == name), None)
        if found is None:
            raise CannotTell(f"the container {name} is not declared, so nobody knows how to look into it")
        return found

    def probes(self) -> tuple[Probe[Any], ...]:
        """The probes that :func:`baseline_from` reads."""
        probes: list[Probe[Any]] = [
            Machine(),
            Boots(),
            PciDevices(),
            IommuGroups(),
            AerCounters(),
            Gpus(),
            Driver(),
            FailedUnits(),
            Services(),
        ]
        for container in self.containers:
            probes += [ContainerState(container), FailedUnits(container), Services(container)]
        for service in self.services:
            where = self.container(service.container)
            probes += [UnitState(service.name, where), UnitProcess(service.name, where)]
        return tuple(dict.fromkeys(probes))


def baseline_from(scope: Scope, seen: Seen) -> Baseline:
    """A baseline from what was seen; what is unknown stays out of it, with the reason."""
    unknown: dict[str, str] = {}

    def read(name: str, probe: Probe[T]) -> T | None:
        value, why = tell(seen, probe).pair
        if why:
            unknown[name] = why
        return value

    devices = read("PCI devices", PciDevices())
    iommu = read("IOMMU groups", IommuGroups())
    counters = read("AER counters", AerCounters())
    interesting = {g.pci for g in scope.gpus} | {a for a, d in (devices or {}).items() if is_gpu(d) or is_nic(d)}
    units, processes, states, failed, running = {}, {}, {}, {}, {}
    for service in scope.services:
        where = scope.container(service.container)
        if (unit := read(f"unit {service.spec}", UnitState(service.name, where))) is not None:
            units[service.spec] = unit
        if (process := read(f"process of {service.spec}", UnitProcess(service.name, where))) is not None:
            processes[service.spec] = process
    for container in scope.containers:
        if (state := read(f"container {container.name}", ContainerState(container))) is not None:
            states[container.name] = state
    for name, place in [("", None), *((c.name, c) for c in scope.containers)]:
        if (rows := read(f"failed units of {name or 'the host'}", FailedUnits(place))) is not None:
            failed[name] = tuple(sorted(r.unit for r in rows))
        if (found := read(f"services of {name or 'the host'}", Services(place))) is not None:
            running[name] = tuple(sorted(s.unit for s in found.values() if s.lasting and s.active == "active"))
    return Baseline(
        taken_at=min((o.taken_at for o in seen.values()), default=None),
        machine=read("machine", Machine()),
        boots=read("boots", Boots()),
        pci=None if devices is None else {a: d for a, d in sorted(devices.items()) if a in interesting},
        iommu=None if iommu is None else {a: t for a, t in sorted(iommu.by_device.items()) if a in interesting},
        aer=None if counters is None else {a: t for a, t in sorted(counters.items()) if a in interesting},
        gpus=read("GPUs", Gpus()),
        driver=read("driver", Driver()),
        units=units,
        processes=processes,
        containers=states,
        failed=failed,
        running=running,
        unknown=unknown,
    )


def baseline_to_json(baseline: Baseline) -> dict[str, Any]:
    """As JSON values. The environments of processes are in it, so it goes to disk through the redactor only."""
    plain: dict[str, Any] = msgspec.to_builtins(baseline, str_keys=True)
    return plain


def baseline_from_json(data: Mapping[str, Any]) -> Baseline:
    """Back from JSON values. Raises CannotTell when they are no baseline."""
    try:
        return msgspec.convert(data, Baseline, str_keys=True)
    except msgspec.ValidationError as error:
        raise CannotTell(f"the recorded baseline cannot be read: {error}") from None


# ------------------------------------------------------------------------------------------- before and after


class Row(NamedTuple):
    """One line of a before/after table. ``same``: "same", "changed", "new, as it must be", or "not known"."""

    what: str
    before: str
    after: str
    same: str


#: The columns of the table that :func:`before_after` fills.
COLUMNS = ("what", "before", "after", "same?")

_MISSING = "not known"


def before_after(before: Baseline | None, now: Baseline) -> list[Row]:
    """The two side by side: everything that can be compared, the changed and the unchanged alike."""
    before = before or Baseline(None)
    rows = [_row(what, *values) for what, *values in _machine_values(before, now)]
    rows += _boot_row(before, now)
    for address in sorted({*before.gpu_addresses, *now.gpu_addresses}):
        rows += [_row(f"{address} {what}", b, a) for what, b, a in _gpu_values(before, now, address)]
    for name in sorted({*before.containers, *now.containers}):
        rows.append(_row(f"container {name}", *(_container_value(x, name) for x in (before, now))))
    for spec in sorted({*before.units, *now.units}):
        rows.append(_row(f"{spec} state", *(_unit_value(x, spec) for x in (before, now))))
        rows.append(_row(f"{spec} at boot", *(x.units[spec].enabled if spec in x.units else None for x in (before, now))))
        rows.append(_configuration_row(before, now, spec))
    for name in sorted({*before.failed, *now.failed}):
        values = (join(x.failed[name]) or "none" if name in x.failed else None for x in (before, now))
        rows.append(_row(f"failed units{' in ' + name if name else ''}", *values))
    rows += [_running_row(before, now, name) for name in sorted({*before.running, *now.running})]
    return rows


def _running_row(before: Baseline, now: Baseline, name: str) -> Row:
    """One line for all services: how many, and which of them at that time alone."""
    then, today = before.running.get(name), now.running.get(name)

    def told(units: tuple[str, ...] | None, others: tuple[str, ...] | None) -> str | None:
        if units is None:
            return None
        alone = [u for u in units if others is not None and u not in others]
        return f"{len(units)}" + (f", of which only then: {join(alone)}" if alone else "")

    return _row(f"running services{' in ' + name if name else ''}", told(then, today), told(today, then))


def _row(what: str, before: str | None, after: str | None) -> Row:
    same = _MISSING if before is None or after is None else "same" if before == after else "changed"
    return Row(what, before if before is not None else _MISSING, after if after is not None else _MISSING, same)


def _machine_values(before: Baseline, now: Baseline) -> list[tuple[str, str | None, str | None]]:
    def both(what: str, field_name: str, of: str) -> tuple[str, str | None, str | None]:
        owners = (getattr(before, of), getattr(now, of))
        b, a = (None if o is None else getattr(o, field_name) for o in owners)
        return what, _text(b), _text(a)

    return [
        both("machine-id", "machine_id", "machine"),
        both("kernel", "kernel", "machine"),
        both("kernel command line", "cmdline", "machine"),
        both("BIOS", "bios", "machine"),
        both("NVIDIA module", "module_version", "driver"),
        both("NVIDIA module on disk", "disk_version", "driver"),
        both("NVIDIA library", "library_version", "driver"),
    ]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _boot_row(before: Baseline, now: Baseline) -> list[Row]:
    row = _row("boot-id", before.boot_id or None, now.boot_id or None)
    return [row._replace(same="new, as it must be") if row.same == "changed" else row]


def _gpu_values(before: Baseline, now: Baseline, address: str) -> list[tuple[str, str | None, str | None]]:
    def both(what: str, of: Any) -> tuple[str, str | None, str | None]:
        return what, of(before), of(now)

    def on_bus(x: Baseline) -> str | None:
        if x.pci is None:
            return None
        device = x.pci.get(address)
        return "absent" if device is None else f"{device.vendor:04x}:{device.device:04x}, {device.driver or 'no driver'}"

    def width(x: Baseline) -> str | None:
        device = (x.pci or {}).get(address)
        return f"x{device.link.width}" if device and device.link and device.link.width is not None else None

    def iommu(x: Baseline) -> str | None:
        return None if x.iommu is None else x.iommu.get(address, "in no group")

    def uuid(x: Baseline) -> str | None:
        if x.gpus is None:
            return None
        row = x.gpus.rows.get(address)
        return row.uuid or None if row else x.gpus.problems.get(address, "no row in nvidia-smi")

    def recovery(x: Baseline) -> str | None:
        row = x.gpus.rows.get(address) if x.gpus else None
        return row.recovery_action or None if row else None

    return [
        both("PCI", on_bus),
        both("link width", width),
        both("IOMMU type", iommu),
        both("UUID", uuid),
        both("recovery action", recovery),
    ]


def _container_value(x: Baseline, name: str) -> str | None:
    state = x.containers.get(name)
    if state is None:
        return None
    unusable = sorted(path for path, how in state.devices.items() if how != "ok")
    return state.status + (f", cannot open {join(unusable)}" if unusable else "")


def _unit_value(x: Baseline, spec: str) -> str | None:
    unit = x.units.get(spec)
    if unit is None:
        return None
    return f"{unit.active} ({unit.sub}), restarts {'not known' if unit.n_restarts is None else unit.n_restarts}"


def _configuration_row(before: Baseline, now: Baseline, spec: str) -> Row:
    """One line for argv and environment together; their text is long, so only what differs is shown."""
    b, a = before.processes.get(spec), now.processes.get(spec)
    if b is None or a is None:
        return _row(f"{spec} configuration", *(None if x is None else f"{len(x.argv)} words" for x in (b, a)))
    differing = changes(b.argv, a.argv)
    if b.environ is not None and a.environ is not None:
        differing += environment_changes(b.environ, a.environ)
    elif not differing:
        return Row(f"{spec} configuration", f"{len(b.argv)} words", f"{len(a.argv)} words; environment unreadable", _MISSING)
    if not differing:
        return _row(f"{spec} configuration", f"{len(b.argv)} words", f"{len(b.argv)} words")
    texts = ("; ".join(f"{c.what}: {c.before}" for c in differing), "; ".join(f"{c.what}: {c.after}" for c in differing))
    return Row(f"{spec} configuration", *texts, "changed")

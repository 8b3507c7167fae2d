"""From observations of one boot to what the rule needs: each GPU's type, driver, start and first error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from proofbook.checks.baseline import is_gpu
from proofbook.checks.identity.rule import Before, FirstError, Function, GpuBoot, Kind, Trial
from proofbook.checks.kernel_log import AER_TAGS, judge_log, tagged
from proofbook.checks.looking import tell
from proofbook.errors import CannotTell
from proofbook.intent import GpuSpec
from proofbook.model import Probe, Seen, pci_address
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.iommu_identity import IdentityState
from proofbook.probes.kernel_log import KernelLog, KernelMessages
from proofbook.probes.nvidia import Driver, Gpus
from proofbook.probes.pci import PciDevices
from proofbook.signatures import SignatureFinding, load

__all__ = [
    "PROBES",
    "choose",
    "first_error_after",
    "functions_of",
    "gpus_seen",
    "members_of",
    "of_one_device",
    "started",
    "the_boot_before",
    "the_trial",
]

#: What the rule is fed from.
PROBES: tuple[Probe[Any], ...] = (Machine(), KernelLog(), PciDevices(), IommuGroups(), Driver(), Gpus(), IdentityState())

#: How long one attempt to start a GPU keeps the driver talking, in seconds and in lines.
_ATTEMPT_S, _ATTEMPT_LINES = 1.0, 12
_DRIVER_LOADS = "nvidia: loading out-of-tree module"
_NVRM_LOADS = "NVRM: loading "


def choose(wanted: str, seen: Seen, declared: Sequence[GpuSpec] = ()) -> tuple[str, ...]:
    """The GPUs that are treated: "" one (the first by address), "all", "node:0" all of a NUMA node, else addresses.

    ``declared``: devices that are GPUs because the inventory says so.

    Raises CannotTell when the machine's GPUs are not known, ValueError for what does not name any.
    """
    devices = seen.value(PciDevices())
    gpus = {pci: devices[pci] for pci in gpus_seen(seen, declared)}
    if not gpus:
        raise CannotTell("this machine shows no GPU")
    if not wanted:
        return (min(gpus),)
    if wanted == "all":
        return tuple(sorted(gpus))
    if wanted.startswith("node:"):
        node = int(wanted.removeprefix("node:"))
        of_node = tuple(sorted(a for a, d in gpus.items() if d.numa_node == node))
        if not of_node:
            raise ValueError(f"no GPU is on NUMA node {node}")
        return of_node
    named = tuple(dict.fromkeys(pci_address(text) for text in wanted.split(",") if text.strip()))
    if strangers := [a for a in named if a not in gpus]:
        raise ValueError(f"{', '.join(strangers)} is no GPU of this machine; it has {', '.join(sorted(gpus))}")
    return named


def gpus_seen(seen: Seen, declared: Sequence[GpuSpec] = ()) -> tuple[str, ...]:
    """Every GPU on the bus: what shows itself as one, and what is ``declared`` to be one."""
    devices = tell(seen, PciDevices()).value or {}
    meant = {g.pci for g in declared}
    return tuple(sorted(a for a, d in devices.items() if is_gpu(d) or a in meant))


def of_one_device(one: str, other: str) -> bool:
    """Whether two PCI addresses are functions of the same device: they differ in nothing but the function's number."""
    return one.rpartition(".")[0] == other.rpartition(".")[0]


def members_of(iommu: IommuFacts, pci: str) -> tuple[str, ...]:
    """Everything that shares the iommu group of ``pci``, itself included; () where it is in none."""
    return next((g.devices for g in iommu.groups.values() if pci in g.devices), ())


def functions_of(pci: str, iommu: IommuFacts) -> tuple[str, ...]:
    """The other functions of a GPU's device that share its iommu group, as its audio function does."""
    return tuple(a for a in members_of(iommu, pci) if a != pci and of_one_device(a, pci))


def started(seen: Seen, pci: str) -> bool | None:
    """Whether the driver has brought this GPU up: it has a row, with a UUID, without an error. None: nvidia-smi did not say."""
    table = tell(seen, Gpus()).value
    if table is None:
        return None
    row = table.rows.get(pci)
    return row is not None and bool(row.uuid) and pci not in table.problems and not row.broken


def the_boot_before(seen: Seen, gpus: Iterable[str]) -> Before:
    return Before(tuple(_gpu(seen, pci, None) for pci in gpus), _conditions(seen))


def the_trial(seen: Seen, treated: Sequence[str], declared: Sequence[GpuSpec]) -> Trial:
    """What the experiment's boot shows. Raises CannotTell when even the experiment's own traces cannot be read."""
    log = seen.value(IdentityState()).log
    gaps: tuple[str, ...]
    firsts: dict[str, FirstError | None] = {}
    try:
        judged = judge_log(seen, declared, None)
        gaps = judged.gaps
        firsts = {pci: first_error(judged.judgement.findings, pci) for pci in {*treated, *judged.gpus}}
    except CannotTell as why:
        gaps = (str(why),)
    others = [pci for pci in gpus_seen(seen, declared) if pci not in treated]
    why_not = ""
    if log is None:
        why_not = "the unit did not run in this boot: it left no log"
    elif log.trouble:
        why_not = f"the unit did not act: {log.trouble}"
    elif log.end in ("refused", "partly"):
        said = "the unit refused" if log.end == "refused" else "the kernel did not set every type"
        why_not = f"{said}: " + "; ".join(f"{pci}: {why}" for pci, why in log.refused.items())
    return Trial(
        came_back=True,
        treated=tuple(_gpu(seen, pci, firsts.get(pci)) for pci in treated),
        others=tuple(_gpu(seen, pci, firsts.get(pci)) for pci in others),
        set_s=dict(log.set) if log else {},
        driver_s=_driver_loaded_s(seen),
        log_gaps=gaps,
        conditions=_conditions(seen),
        why_not=why_not,
    )


def first_error(findings: Iterable[SignatureFinding], pci: str) -> FirstError | None:
    """The earliest fault of one GPU.

    An FSP error that comes together with a lost link is the lost link: the driver reads the FSP's registers to tell what is
    wrong, and only when they read as all ones it turns out that nobody was there to refuse anything.
    """
    faults = [f for f in findings if f.device == pci and f.kind not in ("gap", "detail") and (_of_gpu(f) or tagged(f, AER_TAGS))]
    if not faults:
        return None
    first = min(faults, key=lambda f: f.first.n)
    lost = [f for f in faults if _kind(f) is Kind.LINK and _together(first, f)]
    if _kind(first) is Kind.FSP and lost:
        first = lost[0]
    kind = _kind(first)
    text = first.lines[0] if first.lines else first.reason
    return FirstError(kind, first.signature, text, first.code, first.first.monotonic_s)


def first_error_after(before: KernelMessages, seen: Seen, pci: str, declared: Sequence[GpuSpec] = ()) -> FirstError | None:
    """The first thing that went wrong with a GPU since the kernel's log was last looked at.

    WHY by the lines of before and not by the clock: the driver may have tried and failed a moment earlier.
    Raises CannotTell when the log of now does not go on from there.
    """
    observation = seen[KernelLog()]
    messages = seen.value(KernelLog())
    known = len(before.lines)
    if messages.boot_id != before.boot_id or messages.lines[:known] != before.lines:
        raise CannotTell("the kernel's log does not go on where it was before")
    later = replace(messages, lines=messages.lines[known:])
    if not later.lines:
        return None
    judged = judge_log(seen.merged(Seen([replace(observation, value=later)])), declared, None)
    return first_error(judged.judgement.findings, pci)


def _together(one: SignatureFinding, other: SignatureFinding) -> bool:
    """Whether two faults are of one attempt to start a GPU. Without times: a few lines apart."""
    if one.first.monotonic_s is None or other.first.monotonic_s is None:
        return other.first.n - one.first.n <= _ATTEMPT_LINES
    return other.first.monotonic_s - one.first.monotonic_s <= _ATTEMPT_S


def _of_gpu(finding: SignatureFinding) -> bool:
    return bool(load()[finding.signature].tags & {"gpu-fault", "fsp", "gsp", "link-lost", "init-failed"})


def _kind(finding: SignatureFinding) -> Kind:
    tags = load()[finding.signature].tags
    if "link-lost" in tags or tagged(finding, AER_TAGS):
        return Kind.LINK
    if "fsp" in tags:
        return Kind.FSP
    return Kind.FIRMWARE if "gsp" in tags else Kind.OTHER


def _gpu(seen: Seen, pci: str, first: FirstError | None) -> GpuBoot:
    iommu, devices = tell(seen, IommuGroups()).value, tell(seen, PciDevices()).value

    def kind(address: str) -> str:
        return iommu.by_device.get(address, "") if iommu is not None else ""

    def driver(address: str) -> str:
        return devices[address].driver if devices is not None and address in devices else ""

    functions = tuple(Function(a, kind(a), driver(a)) for a in functions_of(pci, iommu)) if iommu is not None else ()
    return GpuBoot(pci, kind(pci), driver(pci), started(seen, pci), first, functions)


def _conditions(seen: Seen) -> dict[str, str]:
    machine, driver = tell(seen, Machine()).value, tell(seen, Driver()).value
    if machine is None or driver is None:
        return {}
    return {"kernel": machine.kernel, "command line": machine.cmdline, "driver": driver.module_version}


def _driver_loaded_s(seen: Seen) -> float | None:
    """When the driver first said anything in this boot, seconds since the kernel started."""
    messages = tell(seen, KernelLog()).value
    lines = messages.lines if messages is not None else ()
    return next((ln.monotonic_s for ln in lines if ln.text.startswith((_DRIVER_LOADS, _NVRM_LOADS))), None)

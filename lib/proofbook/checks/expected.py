"""Which GPUs there should be, and how: the inventory says it, else the look before, else nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proofbook.checks.baseline import Baseline
from proofbook.intent import GpuSpec

__all__ = ["DECLARE_GPUS", "ExpectedGpu", "expected_gpus", "merge_addresses"]

DECLARE_GPUS = "Declare the GPUs as [[hosts.<name>.gpus]] in proofbook.toml (pci, uuid, iommu_type, link_width)."


@dataclass(frozen=True, slots=True)
class ExpectedGpu:
    """One GPU that should be there. "" and None are no opinion; each ``*_by`` says who expects it."""

    pci: str
    driver: str
    uuid: str
    uuid_by: str
    iommu_type: str
    iommu_by: str
    link_width: int | None
    width_by: str
    by: str


INVENTORY, BEFORE = "the inventory", "the look before"


def expected_gpus(declared: Sequence[GpuSpec], baseline: Baseline | None) -> tuple[ExpectedGpu, ...]:
    """The declared GPUs, completed by what was seen of them before; without any declared, the GPUs that were there before."""
    if declared:
        return tuple(_declared(spec, baseline) for spec in sorted(declared, key=lambda s: s.pci))
    if baseline is None:
        return ()
    return tuple(_seen_before(address, baseline) for address in baseline.gpu_addresses)


def merge_addresses(expected: Sequence[ExpectedGpu], present: Sequence[str]) -> frozenset[str]:
    """All addresses that are GPUs: the expected ones, even those that are gone, and the present ones."""
    return frozenset({e.pci for e in expected} | set(present))


def _declared(spec: GpuSpec, baseline: Baseline | None) -> ExpectedGpu:
    before = _seen_before(spec.pci, baseline) if baseline else None
    return ExpectedGpu(
        pci=spec.pci,
        driver=spec.driver,
        uuid=spec.uuid or (before.uuid if before else ""),
        uuid_by=INVENTORY if spec.uuid else BEFORE,
        iommu_type=spec.iommu_type or (before.iommu_type if before else ""),
        iommu_by=INVENTORY if spec.iommu_type else BEFORE,
        link_width=spec.link_width or (before.link_width if before else None),
        width_by=INVENTORY if spec.link_width else BEFORE,
        by=INVENTORY,
    )


def _seen_before(address: str, baseline: Baseline) -> ExpectedGpu:
    device = (baseline.pci or {}).get(address)
    row = baseline.gpus.rows.get(address) if baseline.gpus else None
    link = device.link if device else None
    width = link.width if link else None
    return ExpectedGpu(
        pci=address,
        driver=device.driver if device else "nvidia",
        uuid=row.uuid if row else "",
        uuid_by=BEFORE,
        iommu_type=(baseline.iommu or {}).get(address, ""),
        iommu_by=BEFORE,
        link_width=width if width and width <= 32 else None,
        width_by=BEFORE,
        by=BEFORE,
    )

"""Changes: observations in, a plan out; and how an approved plan is acted on, kept, and taken back."""

from __future__ import annotations

from proofbook.errors import RecordError
from proofbook.intent import ServiceSpec
from proofbook.model import Change, Plan

__all__ = ["acting"]


def acting(plan: Plan) -> Change:
    """The change that a stored plan is of, able to keep it or to take it back from the plan alone.

    Raises RecordError for a change that cannot be undone, or that this version does not know.
    """
    if plan.change == "enable-mtp":
        from proofbook.changes.unit_file import EnableMTP

        return EnableMTP(ServiceSpec(name=str(plan.settings["unit"])))
    if plan.change == "iommu-identity":
        from proofbook.changes.iommu_identity import IommuIdentity

        return IommuIdentity.from_plan(plan)
    if plan.change == "stand-still":
        from proofbook.changes.service import StandStill

        return StandStill(ServiceSpec(name=str(plan.settings["unit"])))
    raise RecordError(
        f"a change named {plan.change!r} cannot be taken back by this version",
        hint="undo it by hand, with what the record says",
    )

"""The procedures, one module a runbook. Nothing here registers itself: the table below names what there is."""

from __future__ import annotations

import difflib
from importlib import import_module

from proofbook.errors import BadParameter
from proofbook.procedures.base import Procedure

#: Runbook name → module of this package.
TABLE: dict[str, str] = {
    "reboot-verification": "reboot_verification",
    "mtp-enablement": "mtp_enablement",
    "p2p-pair-matrix": "p2p_pair_matrix",
    "iommu-identity-experiment": "iommu_identity_experiment",
}


def names() -> list[str]:
    return list(TABLE)


def load(name: str) -> Procedure:
    """The procedure of a runbook. Raises BadParameter for a name that there is not."""
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=1)
        raise BadParameter(
            f"there is no runbook {name!r}",
            hint=(f"did you mean {near[0]!r}? " if near else "") + f"the runbooks are: {', '.join(TABLE)}",
        )
    procedure: Procedure = import_module(f"proofbook.procedures.{TABLE[name]}").PROCEDURE
    return procedure

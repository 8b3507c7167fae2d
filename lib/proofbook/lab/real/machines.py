"""The names of the real lab's machines, as hosts like any other: ``box``, ``box-<any>``, ``vm``, ``vm-<topology>``."""

from __future__ import annotations

from typing import Any

from proofbook.errors import BadParameter
from proofbook.lab.real.box import Box
from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.places import Places
from proofbook.lab.real.settings import SERVICE

__all__ = ["ensure", "host_table", "knows", "names"]


def knows(name: str) -> bool:
    """Whether ``lab:<name>`` is a machine of the real lab."""
    return name == "box" or name.startswith("box-")


def names() -> tuple[str, ...]:
    """The machines that can be asked for without giving one a name of its own."""
    return ("box",)


def ensure(name: str, places: Places | None = None) -> Endpoint:
    """The machine, started if it is not up. Raises LabError, BadParameter for a name that is none."""
    _known(name)
    return Box(name, places or Places.default()).up()


def host_table(name: str) -> dict[str, Any]:
    """What is meant to be on it: the inventory's table of the host. A box has no GPU."""
    _known(name)
    return {"user": "root", "roles": ["lab"], "services": [_SGLANG]}


def _known(name: str) -> None:
    if not knows(name):
        raise BadParameter(f"the real lab has no machine {name!r}", hint="machines: " + ", ".join(names()))


#: A start of the stand-in takes a second; many times that on a machine that is busy.
_SGLANG: dict[str, Any] = {
    "name": SERVICE,
    "url": "http://127.0.0.1:30000/health",
    "args": ["--tp-size", "4", "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5"],
    "environment": {"NCCL_P2P_DISABLE": "1"},
    "enabled": True,
    "ready_s": 120,
}

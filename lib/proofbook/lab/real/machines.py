"""The names of the real lab's machines, as hosts like any other: ``box``, ``box-<any>``, ``vm``, ``vm-<topology>``."""

from __future__ import annotations

from typing import Any

from proofbook.errors import BadParameter
from proofbook.lab.real import topology
from proofbook.lab.real.box import Box
from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.places import Places
from proofbook.lab.real.settings import SERVICE
from proofbook.lab.real.vm import Vm

__all__ = ["ensure", "host_table", "knows", "machine", "names"]


def knows(name: str) -> bool:
    """Whether ``lab:<name>`` belongs to the real lab; whether there is such a machine is said when it is asked for."""
    return name in ("box", "vm") or name.startswith(("box-", "vm-"))


def names() -> tuple[str, ...]:
    """The machines that can be asked for without giving one a name of its own."""
    return ("box", "vm", *(f"vm-{name}" for name in topology.names()))


def machine(name: str, places: Places | None = None) -> Box | Vm:
    """The machine of a name, up or not. Raises BadParameter for a name that is none."""
    where = places or Places.default()
    if name == "box" or name.startswith("box-"):
        return Box(name, where)
    if name == "vm" or name.removeprefix("vm-") in topology.names():
        return Vm(name, where, name.removeprefix("vm-") if name != "vm" else topology.DEFAULT)
    raise BadParameter(f"the real lab has no machine {name!r}", hint="machines: " + ", ".join(names()))


def ensure(name: str, places: Places | None = None) -> Endpoint:
    """The machine, started if it is not up. Raises LabError, BadParameter for a name that is none."""
    return machine(name, places).up()


def host_table(name: str) -> dict[str, Any]:
    """What is meant to be on it: the inventory's table of the host. A box has no GPU, a virtual machine stand-ins."""
    asked = machine(name)
    if isinstance(asked, Box):
        return {"user": "root", "roles": ["lab"], "services": [{**_SGLANG, "ready_s": 60}]}
    # WHY here: it stands on the renderer of nvidia-smi's answers, which naming a machine must not cost.
    from proofbook.lab.real.guest.nvidia_smi import uuid

    gpus = [{"pci": pci, "uuid": uuid(pci), "driver": "nvidia"} for pci in topology.load(asked.topology).gpus()]
    return {"user": "root", "roles": ["lab", "gpu"], "gpus": gpus, "services": [{**_SGLANG, "ready_s": 240}]}


#: How long a start may take is said above: the stand-in takes a second, many times that on a machine that is busy or emulated.
_SGLANG: dict[str, Any] = {
    "name": SERVICE,
    "url": "http://127.0.0.1:30000/health",
    "args": ["--tp-size", "4", "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5"],
    "environment": {"NCCL_P2P_DISABLE": "1"},
    "enabled": True,
}

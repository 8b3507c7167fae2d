"""Containers: do they run, and can they really use the devices that they were given?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, said, text_of

__all__ = ["ContainerFacts", "ContainerState", "CudaFacts"]


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """``cuInit(0)`` inside: ``code`` 0 is success; None with ``error`` when the library is missing or the call hung."""

    library: str
    code: int | None
    devices: int | None
    error: str

    @property
    def ok(self) -> bool:
        return self.code == 0


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A container as its manager has it. Nothing inside is asked while it does not run.

    ``devices``: "ok", "absent" or the reason why opening failed, by path. ``cuda`` is None when it was not asked (no
    devices expected) or has no answer. ``unknown`` says why ``devices`` or ``cuda`` could not be had.
    """

    name: str
    kind: str
    id: str
    running: bool
    status: str  # in the manager's own word
    devices: dict[str, str]
    cuda: CudaFacts | None
    starts_at_boot: bool | None  # None where the manager was not asked
    config: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ContainerState(Probe[ContainerFacts]):
    """The state of one container, its devices opened and CUDA initialised inside.

    ``pct status 102`` says ``status: running``, ``pct config 102`` ``onboot: 1``. WHY open the devices: a node can be
    there and refuse (EPERM) when the major number of nvidia-uvm changed with the reboot and the container's device
    rule did not; and nvidia-smi works inside where CUDA does not.
    """

    spec: ContainerSpec
    name: ClassVar[str] = "containers.ContainerState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ContainerFacts]:
        spec, facts = self.spec, {}
        status_command, config_command = _manager(spec)
        answers = yield [status_command, *([config_command] if config_command else [])]
        status = _status(spec, answers[0])
        running = status in _RUNNING
        unknown: dict[str, str] = {}
        config = _config(answers[1], unknown) if config_command and status != "absent" else {}
        if running and spec.devices:
            opened, cuda = yield [inside(spec, remote.open_devices(*spec.devices)), inside(spec, remote.cu_init())]
            facts = {"devices": opened, "cuda": cuda}
        return ContainerFacts(
            name=spec.name,
            kind=spec.kind,
            id=spec.tool_id,
            running=running,
            status=status,
            devices=_devices(facts["devices"], unknown) if facts else {},
            cuda=_cuda(facts["cuda"], unknown) if facts else None,
            starts_at_boot=_starts_at_boot(config) if config else None,
            config=config,
            unknown=unknown,
        )


# ------------------------------------------------------------------------------------------------------ reading

_RUNNING = {"running", "Running", "RUNNING"}


def _manager(spec: ContainerSpec) -> tuple[Command, Command | None]:
    """How the container's manager is asked for its state, and (Proxmox) for its configuration."""
    name = spec.tool_id
    match spec.kind:
        case "pct":
            return command("pct", "status", name, root=True), command("pct", "config", name, root=True)
        case "lxc":
            return command("lxc-info", "--name", name, "--state", "--no-humanize", root=True), None
        case "incus":
            return command("incus", "list", f"^{re.escape(name)}$", "--format=csv", "--columns=s", root=True), None
        case "docker" | "podman":
            return command(spec.kind, "inspect", "--format={{.State.Status}}", name, root=True), None
        case "nspawn":
            return command("machinectl", "show", name, "--property=State", "--value", root=True), None


def _status(spec: ContainerSpec, result: Result) -> str:
    """The manager's word for the state; "absent" when it knows no such container. Raises CannotTell when it fails otherwise."""
    words = f"{result.error_text}\n{result.text}".lower()
    unknown_name = ("does not exist", "no such object", "no such container", "no machine", "doesn't exist")
    if result.exit_status not in (0, 126, 127, None) and any(text in words for text in unknown_name):
        # WHY for machinectl: it only knows machines that run, so it cannot tell "stopped" from "never was".
        return "stopped" if spec.kind == "nspawn" else "absent"
    status = text_of(result).strip().removeprefix("status:").strip()
    if not status and spec.kind == "incus":
        return "absent"
    if not re.fullmatch(r"[A-Za-z-]+", status):
        raise CannotTell(f"{result.command.argv[0]} gave no state of {spec.name}: {status[:100]!r} {said(result)}".rstrip())
    return status


def _config(result: Result, unknown: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """``pct config``: ``key: value`` lines; a raw LXC key may come several times (``lxc.cgroup2.devices.allow``)."""
    try:
        text = text_of(result)
    except CannotTell as why:
        unknown["config"] = str(why)
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and re.fullmatch(r"[\w.]+", key):
            found[key].append(value.strip())
    if not found:
        unknown["config"] = f"`{' '.join(result.command.argv)}` named no setting"
    return {key: tuple(values) for key, values in found.items()}


def _starts_at_boot(config: dict[str, tuple[str, ...]]) -> bool:
    return config.get("onboot", ("0",))[0] == "1"  # Proxmox leaves it out when it is not set


def _devices(result: Result, unknown: dict[str, str]) -> dict[str, str]:
    try:
        text_of(result)
        return remote.parse_open_devices(result)
    except CannotTell as why:
        unknown["devices"] = f"the devices could not be tried inside: {why}"
        return {}


def _cuda(result: Result, unknown: dict[str, str]) -> CudaFacts | None:
    try:
        text_of(result)
        answer = remote.parse_cu_init(result)
    except CannotTell as why:
        unknown["cuda"] = f"cuInit could not be tried inside: {why}"
        return None
    return CudaFacts(answer.library or "", answer.code, answer.devices, answer.error or "")

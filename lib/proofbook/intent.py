"""What is meant to be on a machine: its GPUs, its containers and its services, as frozen values.

Probes, checks and the inventory share these; nothing here reaches a machine. Everything is optional that can be
left out honestly: an empty string or None means "no opinion", and a check that needs an opinion says NOT_CHECKED.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from proofbook.model import pci_address

__all__ = ["ContainerKind", "ContainerSpec", "GpuSpec", "ServiceSpec", "parse_service", "unit_name"]

ContainerKind = Literal["pct", "lxc", "incus", "docker", "podman", "nspawn"]

_GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CONTAINER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_UNIT_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}")
_UNIT_SUFFIXES = (
    ".service",
    ".socket",
    ".target",
    ".timer",
    ".path",
    ".mount",
    ".automount",
    ".swap",
    ".slice",
    ".scope",
    ".device",
)

# WHY: systemd-run expands `$` in the command's arguments (always before systemd 254), and `machinectl shell` loses the
# exit status; entering the namespaces of the container's leader leaves both alone. `$0` is the machine's name.
_ENTER_NSPAWN = (
    'leader=$(machinectl show -p Leader --value "$0") || exit 125; '
    '[ -n "$leader" ] || { echo "machine $0 is not running" >&2; exit 125; }; '
    'exec nsenter --target "$leader" --all --root --wd -- "$@"'
)


class _Spec(BaseModel):
    """Frozen and strict: a key that is not declared is an error, never silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class GpuSpec(_Spec):
    """One GPU that should be there.

    ``driver`` is the kernel driver that should be bound: ``nvidia`` for use on this machine, ``vfio-pci`` when the GPU is
    passed through to a virtual machine (and is then not expected in nvidia-smi).
    """

    pci: str  # normalised: 0000:41:00.0
    uuid: str = ""  # GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
    driver: Literal["nvidia", "vfio-pci"] = "nvidia"
    iommu_type: Literal["", "identity", "DMA", "DMA-FQ"] = ""  # as /sys/kernel/iommu_groups/<n>/type says it
    link_width: Literal[1, 2, 4, 8, 16, 32] | None = None  # lanes

    @field_validator("pci")
    @classmethod
    def _normal_pci(cls, value: str) -> str:
        return pci_address(value)

    @field_validator("uuid")
    @classmethod
    def _normal_uuid(cls, value: str) -> str:
        if not value:
            return value
        normal = "GPU-" + value[4:].lower() if value[:4].upper() == "GPU-" else value
        if not _GPU_UUID.fullmatch(normal):
            raise ValueError(
                f"not a GPU UUID: {value!r} (expected as `nvidia-smi -L` says it, GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)"
            )
        return normal

    @property
    def passed_through(self) -> bool:
        """Whether the GPU belongs to a virtual machine rather than to this machine's nvidia driver."""
        return self.driver == "vfio-pci"


class ContainerSpec(_Spec):
    """A container that should run on the machine, and the device nodes that must work inside it."""

    name: str
    kind: ContainerKind
    id: str = ""  # what its tool calls it (pct: a number); the name when left out
    devices: tuple[str, ...] = ()  # paths as seen inside the container

    @field_validator("id", mode="before")
    @classmethod
    def _id_as_text(cls, value: object) -> object:
        # WHY: Proxmox ids are numbers, and `id = 102` in TOML is what everybody writes first.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _CONTAINER_NAME.fullmatch(value):
            raise ValueError(
                f"not a container name: {value!r} (letters, digits, '.', '_' and '-', starting with a letter or digit)"
            )
        return value

    @field_validator("devices")
    @classmethod
    def _device_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not path.startswith("/dev/") or ".." in PurePosixPath(path).parts:
                raise ValueError(f"not a device path: {path!r} (expected /dev/…, as seen inside the container)")
        return value

    @model_validator(mode="after")
    def _usable_id(self) -> ContainerSpec:
        if self.kind == "pct" and not re.fullmatch(r"[1-9][0-9]{2,8}", self.tool_id):
            raise ValueError(f'a pct container needs its number, e.g. id = "102"; it has {self.tool_id!r} (`pct list` says it)')
        if not _CONTAINER_NAME.fullmatch(self.tool_id):
            raise ValueError(
                f"not a container id: {self.tool_id!r} (letters, digits, '.', '_' and '-', starting with a letter or digit)"
            )
        return self

    @property
    def tool_id(self) -> str:
        """What the container's own tool calls it."""
        return self.id or self.name

    def enter(self) -> tuple[str, ...]:
        """The words that run a command inside the container when put before its argv; they need root.

        The command's own exit status, stdout, stderr and stdin pass through. Shells see nothing of the command.
        """
        match self.kind:
            case "pct":
                return ("pct", "exec", self.tool_id, "--")
            case "lxc":
                return ("lxc-attach", "--name", self.tool_id, "--")
            case "incus":
                return ("incus", "exec", self.tool_id, "--")
            case "docker" | "podman":
                # WHY: without -i stdin is not passed on; the first word after the id ends their own options, so no `--`.
                return (self.kind, "exec", "-i", self.tool_id)
            case "nspawn":
                return ("sh", "-c", _ENTER_NSPAWN, self.tool_id)

    @property
    def programs(self) -> tuple[str, ...]:
        """The programs on the machine with which a container of this kind is looked at and entered."""
        return {"lxc": ("lxc-info", "lxc-attach"), "nspawn": ("machinectl", "systemd-run")}.get(self.kind, (self.kind,))


class ServiceSpec(_Spec):
    """A systemd unit that should run, where, and with what in effect.

    ``args`` and ``environment`` are held against the RUNNING process (its argv and environ), not against the unit file: a
    unit that was edited but not restarted is found that way. ``url`` is asked from where the service runs.

    ``api_key_env`` and ``api_key_file`` say where the API key is that the service demands of us: they name a variable, or a file
    that only its owner can read, of the computer that runs proofbook. The key itself is never a value here.
    """

    name: str  # with its suffix: sglang-qwen.service
    container: str = ""  # the name of a container of the same host; "" = on the host itself
    url: str = ""  # a health address that answers 200 when ready
    args: tuple[str, ...] = ()  # a subset, in flag-value order: ("--speculative-algorithm", "NEXTN")
    environment: Mapping[str, str] = Field(default_factory=dict)  # a subset
    enabled: bool = True  # should start at boot
    ready_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0  # seconds from the unit's start until it must be ready
    api_key_env: str = ""
    api_key_file: str = ""

    def __hash__(self) -> int:
        environment = tuple(sorted(self.environment.items()))
        key_from = (self.api_key_env, self.api_key_file)
        return hash((self.name, self.container, self.url, self.args, environment, self.enabled, self.ready_s, key_from))

    @field_validator("name")
    @classmethod
    def _full_unit_name(cls, value: str) -> str:
        return unit_name(value)

    @field_validator("container")
    @classmethod
    def _plain_container(cls, value: str) -> str:
        if value and not _CONTAINER_NAME.fullmatch(value):
            raise ValueError(f"not a container name: {value!r} (letters, digits, '.', '_' and '-')")
        return value

    @field_validator("url")
    @classmethod
    def _plain_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", value):
            raise ValueError(
                f"not a usable health address: {value!r} (expected http://127.0.0.1:30000/health; no user or password in it)"
            )
        return value

    @field_validator("args", mode="before")
    @classmethod
    def _args_as_text(cls, value: object) -> object:
        # WHY: a process has only text arguments; ["--tp", 2] means ["--tp", "2"].
        if not isinstance(value, list | tuple):
            return value
        return tuple(str(a) if isinstance(a, int | float) and not isinstance(a, bool) else a for a in value)

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            # WHY the value is not told: it may be the key itself, put there by mistake.
            raise ValueError("not the name of a variable (letters, digits and '_'); the key itself belongs nowhere but there")
        return value

    @model_validator(mode="after")
    def _one_place_for_the_key(self) -> ServiceSpec:
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file are both given; the key is in one of the two")
        return self

    @property
    def has_key(self) -> bool:
        """Whether it is said where its API key is."""
        return bool(self.api_key_env or self.api_key_file)

    @property
    def spec(self) -> str:
        """How people name it: ``llm-two/sglang-qwen.service``, or ``sglang-qwen.service`` on the host itself."""
        return f"{self.container}/{self.name}" if self.container else self.name


def unit_name(text: str) -> str:
    """A systemd unit's full name; without a suffix it is a service, as for systemctl. Raises ValueError."""
    text = text.strip()
    full = text if text.endswith(_UNIT_SUFFIXES) else f"{text}.service"
    if not text or text.startswith((".", "-")) or not _UNIT_NAME.fullmatch(full):
        raise ValueError(f"not a systemd unit: {text!r} (expected e.g. sglang-qwen.service)")
    return full


def parse_service(text: str) -> ServiceSpec:
    """``[container/]unit`` as a ServiceSpec with defaults: ``parse_service("llm-two/sglang-qwen.service")``.

    Raises ValueError when it is neither a unit nor a container and a unit.
    """
    container, slash, unit = text.strip().rpartition("/")
    if "/" in container or (slash and not container):
        raise ValueError(f"not a service: {text!r} (expected unit.service, or container/unit.service)")
    return ServiceSpec(name=unit_name(unit), container=container)

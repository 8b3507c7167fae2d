"""Names to machines: proofbook.toml, ``~/.ssh/config`` and ``lab:<scenario>``.

A name is looked up in this order::

    lab:<scenario>        a simulated machine; what should be on it comes from the scenario
    [hosts.<name>]        in the inventory: $PROOFBOOK_INVENTORY, or proofbook.toml here or in a folder above,
                          or ~/.config/proofbook/proofbook.toml
    Host <name>           in ~/.ssh/config (patterns count, but not `Host *`)
    an address            an IP address, or a name that this machine can resolve

Looking a name up contacts no machine. What is wrong in the file is refused as a whole, every problem with its place,
what is allowed, and the nearest known name. Secrets have no place in the inventory: it ends up in records.
"""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
import os
import re
import shlex
import socket
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from proofbook.errors import BadInventory, BadParameter
from proofbook.host import WallClock
from proofbook.intent import ContainerSpec, GpuSpec, ServiceSpec, parse_service
from proofbook.redact import secret_name
from proofbook.transports.base import Clock, Transport

__all__ = ["HostSpec", "Inventory", "api_key", "connect", "find_inventory", "load_inventory", "ssh_config_knows"]

LAB_PREFIX = "lab:"

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class HostTable(BaseModel):
    """One ``[hosts.<name>]`` table, as a person writes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    address: str = ""  # default: the name itself, through ~/.ssh/config
    user: str = ""  # default: what ~/.ssh/config says, else the user that runs proofbook
    port: Annotated[int, Field(ge=1, le=65535)] | None = None  # default: what ~/.ssh/config says, else 22
    identity_file: str = ""  # a path, ~ allowed
    known_hosts: str = ""  # a path; default: the user's and the system's known_hosts files
    roles: tuple[str, ...] = ()
    runs_on: str = ""  # the host whose kernel this machine shares: kernel matters are asked there
    console: str = ""  # where a person gets at it when SSH does not: a BMC's address, a rack position
    gpus: tuple[GpuSpec, ...] = ()
    containers: tuple[ContainerSpec, ...] = ()
    services: tuple[ServiceSpec, ...] = ()

    @field_validator("address", "user")
    @classmethod
    def _one_word(cls, value: str) -> str:
        # WHY: OpenSSH itself refuses such names; a leading dash would become an option of a ProxyCommand.
        if value.startswith("-") or re.search(r"[\s@'\"`$\\;&<>|(){}]", value):
            raise ValueError(f"not usable: {value!r} (one word, without '@', quotes or a leading '-')")
        return value

    @model_validator(mode="after")
    def _parts_fit_together(self) -> HostTable:
        problems = [
            *_twice("gpus", "PCI address", (g.pci for g in self.gpus)),
            *_twice("gpus", "UUID", (g.uuid for g in self.gpus if g.uuid)),
            *_twice("containers", "name", (c.name for c in self.containers)),
            *_twice("containers", "id", (f"{c.kind} {c.tool_id}" for c in self.containers)),
            *_twice("services", "service", (s.spec for s in self.services)),
        ]
        names = [c.name for c in self.containers]
        for service in self.services:
            if service.container and service.container not in names:
                problems.append(
                    f"services: {service.name} is in container {service.container!r}, which is not declared here"
                    f"{_nearest(service.container, names)}; containers: {', '.join(names) or 'none'}"
                )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class HostSpec(HostTable):
    """A machine that can be asked for by name: how to reach it, and what should be on it."""

    name: str
    source: str = ""  # where it was found, for messages: the file, "~/.ssh/config", "lab", "address"
    lab: str = ""  # the scenario, for a simulated machine

    @property
    def target(self) -> str:
        """What SSH is asked for; ``~/.ssh/config`` may still map it to another address."""
        return self.address or self.name

    def container(self, name: str) -> ContainerSpec:
        """The declared container of that name. Raises BadParameter with the nearest names."""
        for container in self.containers:
            if container.name == name:
                return container
        names = [c.name for c in self.containers]
        raise BadParameter(
            f"{self.name} has no container {name!r}{_nearest(name, names)}; containers: {', '.join(names) or 'none'}",
            hint=f"declare it as [[hosts.{self.name}.containers]] in proofbook.toml, with its kind",
        )

    def service(self, text: str) -> ServiceSpec:
        """The declared service ``[container/]unit``; an undeclared one on the host or in a declared container gets defaults.

        Raises BadParameter when it is no service name, or names a container that is not declared.
        """
        try:
            asked = parse_service(text)
        except ValueError as wrong:
            raise BadParameter(_plain(wrong), hint="name it as systemctl does, or container/unit.service") from None
        for service in self.services:
            if service.spec == asked.spec:
                return service
        if asked.container:
            self.container(asked.container)
        return asked


@dataclass(frozen=True)
class Inventory:
    """The hosts of one proofbook.toml; ``path`` is None when there is none."""

    path: Path | None = None
    hosts: Mapping[str, HostSpec] = field(default_factory=dict)

    def resolve(self, name: str) -> HostSpec:
        """The machine of that name. Raises BadParameter for an empty or unknown name, BadInventory for an unusable entry."""
        name = name.strip()
        if not name:
            raise BadParameter("no host was named", hint=f"give one of: {self._choices()}")
        if name.startswith(LAB_PREFIX):
            return _lab_host(name)
        if name in self.hosts:
            return self.hosts[name]
        if "@" in name:
            raise BadParameter(
                f"{name!r} names a user and a host",
                hint="give the host alone; its user belongs into proofbook.toml or ~/.ssh/config",
            )
        if ssh_config_knows(name):
            return HostSpec(name=name, source="~/.ssh/config")
        if not re.search(r"^-|\s", name) and _resolves(name):
            return HostSpec(name=name, address=name, source="address")
        known = [*self.hosts, *_ssh_config_aliases(_user_ssh_config())]
        raise BadParameter(
            f"unknown host {name!r}{_nearest(name, known)}: it is not in {self.path or 'an inventory (none was found)'}, "
            "not in ~/.ssh/config, and does not resolve to an address",
            hint=f"add [hosts.{name}] to proofbook.toml, or give one of: {self._choices()}",
        )

    def kernel_host(self, spec: HostSpec) -> HostSpec:
        """The machine that owns the kernel that ``spec`` runs under: the end of its ``runs_on`` chain, or itself."""
        seen = {spec.name}
        while spec.runs_on and spec.runs_on in self.hosts:
            spec = self.hosts[spec.runs_on]
            if spec.name in seen:
                raise BadInventory(f"runs_on goes round in a circle at {spec.name}")
            seen.add(spec.name)
        return spec

    def _choices(self) -> str:
        return ", ".join([*self.hosts, "lab:<scenario>", "a Host of ~/.ssh/config"])


def find_inventory(start: Path | None = None) -> Path | None:
    """The proofbook.toml that counts: $PROOFBOOK_INVENTORY, else here or above, else the user's own; None if there is none."""
    asked = os.environ.get("PROOFBOOK_INVENTORY", "")
    if asked:
        return Path(asked).expanduser()
    here = (start or Path.cwd()).absolute()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    candidates = [*(folder / "proofbook.toml" for folder in (here, *here.parents)), config / "proofbook" / "proofbook.toml"]
    return next((path for path in candidates if path.is_file()), None)


def load_inventory(path: Path | str | None = None) -> Inventory:
    """Read an inventory, or the one that :func:`find_inventory` finds; without any, an empty one.

    Raises BadInventory with every problem of the file, each with its key.
    """
    found = Path(path).expanduser() if path else find_inventory()
    if found is None:
        return Inventory()
    raw = _read_toml(found)
    problems = [*_unknown_tables(raw), *_secrets(raw)]
    tables = raw.get("hosts", {})
    if not isinstance(tables, dict):
        problems.append("hosts: must be tables such as [hosts.gpu01]")
        tables = {}
    if problems:
        raise _refusal(found, problems)
    hosts: dict[str, HostSpec] = {}
    for name, table in tables.items():
        spec = _host_from_table(name, table, str(found), problems)
        if spec:
            hosts[name] = spec
    problems.extend(_kernel_problems(hosts, tables))
    if problems:
        raise _refusal(found, problems)
    return Inventory(found, hosts)


def connect(spec: HostSpec) -> tuple[Transport, Clock]:
    """A transport to the machine, not yet opened, and the clock that it lives by. Starts a lab machine if need be.

    Raises LabError when the lab cannot start. Opening the transport is what contacts the machine.
    """
    # WHY: both pull in an SSH library each; naming a host must not cost that.
    from proofbook.transports.ssh import SshTransport

    if spec.lab:
        from proofbook.lab import real
        from proofbook.lab.sim import client

        lab = real.ensure(spec.lab) if real.knows(spec.lab) else client.ensure(spec.lab)
        transport = SshTransport(
            lab.address,
            port=lab.port,
            user=lab.user,
            identity_file=str(lab.identity_file),
            known_hosts=str(lab.known_hosts),
            ssh_config=False,
        )
        return transport, WallClock() if real.knows(spec.lab) else client.LabClock(lab.state_dir)
    return (
        SshTransport(
            spec.target,
            port=spec.port,
            user=spec.user or None,
            identity_file=_expanded(spec.identity_file),
            known_hosts=_expanded(spec.known_hosts),
        ),
        WallClock(),
    )


# ------------------------------------------------------------------------------------------ a service's key

#: Shorter ones could not be kept out of a record: they would be found in words that are no secret.
_SHORTEST_KEY = 8
_LONGEST_KEY = 4096
#: Names that may be told; anything else that stands where a name should be may be the key itself.
_TELLING = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")


def api_key(service: ServiceSpec) -> str:
    """The API key that a service demands, read anew from where its entry says; "" where it says nothing.

    Raises BadInventory with what to do. No message shows a value.
    """
    if service.api_key_env:
        named = f" {service.api_key_env}" if _TELLING.fullmatch(service.api_key_env) else ""
        value = os.environ.get(service.api_key_env)
        if not value:
            raise BadInventory(
                f"{service.spec} wants an API key, and the variable{named} that api_key_env names is not set here",
                hint="set it for the program that runs proofbook (the one that started JupyterLab, when you step through), "
                "or put the key into a file with mode 600 and name that: api_key_file",
            )
        return _usable_key(service, value, f"the variable{named}")
    if service.api_key_file:
        return _usable_key(service, _key_in(service, Path(service.api_key_file).expanduser()), str(service.api_key_file))
    return ""


def _key_in(service: ServiceSpec, path: Path) -> str:
    try:
        with path.open("rb") as file:
            about, data = os.fstat(file.fileno()), file.read(_LONGEST_KEY + 1)
    except OSError as wrong:
        raise BadInventory(
            f"{service.spec} wants an API key, and the file that api_key_file names cannot be read: {wrong.strerror}",
            hint="api_key_file is the path of a file of this computer that holds the key and nothing else",
        ) from None
    if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077 or about.st_uid not in (0, os.getuid()):
        raise BadInventory(
            f"the file with the API key of {service.spec} is not its owner's alone",
            hint=f"it must be yours, or root's, and closed to everybody else: chmod 600 {shlex.quote(str(path))}",
        )
    return data.decode("utf-8", "replace").removesuffix("\n")


def _usable_key(service: ServiceSpec, key: str, where: str) -> str:
    if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY or not re.fullmatch(r"[!-~]+", key):
        raise BadInventory(
            f"what {where} holds cannot be the API key of {service.spec}",
            hint=f"a key is one word of {_SHORTEST_KEY} or more printable ASCII characters: a shorter one could not be kept out "
            "of the record, for it would be found in words that are no secret",
        )
    return key


# ------------------------------------------------------------------------------------------ reading the file


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as wrong:
        named = os.environ.get("PROOFBOOK_INVENTORY", "")
        came_from = " (named by $PROOFBOOK_INVENTORY)" if named and Path(named).expanduser() == path else ""
        raise BadInventory(
            f"{path}{came_from} cannot be read: {wrong.strerror or wrong}", hint="name a file that is there"
        ) from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        # WHY: the inventory says which machine is called what and how a container is entered as root.
        raise BadInventory(f"{path} is writable by everyone on this machine", hint=f"chmod o-w {shlex.quote(str(path))}")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise BadInventory(f"{path} is not TOML: {wrong}", hint="mend it there; `[hosts.gpu01]` starts a host") from None


def _refusal(path: Path, problems: Sequence[str]) -> BadInventory:
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return BadInventory(f"{path} cannot be used, {count}:{lines}", hint="mend the file; no machine was contacted")


def _unknown_tables(raw: Mapping[str, Any]) -> Iterator[str]:
    for key in raw:
        if key != "hosts":
            yield f"{key}: unknown{_nearest(key, ['hosts'])}; the file holds [hosts.<name>] tables only"


def _secrets(value: Any, path: str = "") -> Iterator[str]:
    """Places that look like secrets: keys by their name, words of a process's argv, key material, user:password in addresses."""
    if isinstance(value, dict):
        for key, inner in value.items():
            place = f"{path}.{key}" if path else key
            # A host or service may be called what it likes; only keys with a value are judged.
            if not isinstance(inner, dict | list) and secret_name(key):
                yield f"{place}: a secret has no place in the inventory, it ends up in records; use SSH keys or an agent"
            else:
                yield from _secrets(inner, place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            place = f"{path}[{index}]"
            if isinstance(inner, str) and inner.startswith("-") and secret_name(inner.partition("=")[0]):
                yield f"{place}: {inner.partition('=')[0]} takes a secret, which has no place in the inventory; leave it out"
            else:
                yield from _secrets(inner, place)
    elif isinstance(value, str):
        if "PRIVATE KEY-----" in value:
            yield f"{path}: holds key material; name the key's file instead"
        elif re.search(r"\w+://[^/\s@]*:[^/\s@]+@", value):
            yield f"{path}: an address with a password in it; leave user and password out"


def _host_from_table(name: str, table: Any, source: str, problems: list[str]) -> HostSpec | None:
    """The host of one table; what is wrong with it is added to ``problems``."""
    place = f"hosts.{name}"
    if not _HOST_NAME.fullmatch(name):
        problems.append(f"{place}: not a host name (letters, digits, '.', '_' and '-', starting with a letter or digit)")
        return None
    if not isinstance(table, dict):
        problems.append(f"{place}: must be a table, [hosts.{name}]")
        return None
    try:
        # Through the table's own model first: name, source and lab are not a person's to set.
        HostTable.model_validate(table)
        return HostSpec(**table, name=name, source=source)
    except ValidationError as wrong:
        problems.extend(_explain(place, error) for error in wrong.errors(include_url=False))
        return None


_MODELS: Mapping[str, type[BaseModel]] = {"gpus": GpuSpec, "containers": ContainerSpec, "services": ServiceSpec}


def _explain(place: str, error: Any) -> str:
    """One pydantic error as a sentence: where, what was wrong, what is allowed, what is near."""
    loc: tuple[str | int, ...] = error["loc"]
    model = _MODELS.get(str(loc[0]), HostTable) if len(loc) > 1 else HostTable
    where = place + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    match error["type"]:
        case "extra_forbidden":
            allowed = list(model.model_fields)
            return f"{where}: unknown key{_nearest(str(loc[-1]), allowed)}; allowed: {', '.join(allowed)}"
        case "missing":
            return f"{where}: is missing; every entry needs it"
        case "literal_error":
            options = [str(o) for o in _options(model, str(loc[-1])) if o not in ("", None)]
            given = error["input"]
            return f"{where}: {given!r} is not one of {', '.join(options)}{_nearest(str(given), options)}"
        case "value_error":
            return f"{where}: {_plain(error['ctx']['error'])}"
        case _:
            return f"{where}: {_lowered(error['msg'])}; it is {error['input']!r}"


def _options(model: type[BaseModel], name: str) -> Iterable[Any]:
    """The allowed values of a Literal field, also inside ``| None``."""
    if name not in model.model_fields:
        return ()
    annotation = model.model_fields[name].annotation
    parts = [a for a in get_args(annotation) if get_args(a)]
    return [v for part in parts for v in get_args(part)] if parts else get_args(annotation)


def _kernel_problems(hosts: Mapping[str, HostSpec], tables: Mapping[str, Any]) -> Iterator[str]:
    for name, spec in hosts.items():
        if not spec.runs_on:
            continue
        if spec.runs_on not in tables:
            near = _nearest(spec.runs_on, list(tables))
            yield f"hosts.{name}.runs_on: {spec.runs_on!r} is not a host of this file{near}; hosts: {', '.join(tables)}"
            continue
        chain = [name]
        while (following := hosts.get(chain[-1])) and following.runs_on:
            chain.append(following.runs_on)
            if chain[-1] in chain[:-1]:
                yield f"hosts.{name}.runs_on: goes round in a circle: {' → '.join(chain)}"
                break


# ------------------------------------------------------------------------------------------ other sources of names


def _lab_host(name: str) -> HostSpec:
    from proofbook.lab import real
    from proofbook.lab.sim import client
    from proofbook.lab.sim import scenario as scenarios

    scenario = name.removeprefix(LAB_PREFIX)
    if real.knows(scenario):
        return HostSpec(**real.host_table(scenario), name=name, source="lab", lab=scenario)
    known = scenarios.names()
    if scenario not in known:
        raise BadParameter(
            f"the lab has no scenario {scenario!r}{_nearest(scenario, known)}",
            hint="`proofbook lab list` says which there are",
        )
    problems: list[str] = []
    table = client.host_table(scenario)
    try:
        HostTable.model_validate(table)
    except ValidationError as wrong:
        problems.extend(_explain("intent", error) for error in wrong.errors(include_url=False))
        raise BadInventory(f"the lab scenario {scenario} declares an unusable host: {'; '.join(problems)}") from None
    return HostSpec(**table, name=name, source="lab", lab=scenario)


def _user_ssh_config() -> Path:
    return Path.home() / ".ssh" / "config"


def ssh_config_knows(name: str, config: Path | None = None) -> bool:
    """Whether a ``Host`` line of the SSH config names it; ``Host *`` names nobody in particular. Follows ``Include``."""
    for patterns in _ssh_host_lines(config or _user_ssh_config()):
        if any(fnmatch.fnmatchcase(name, p[1:]) for p in patterns if p.startswith("!")):
            continue
        if any(fnmatch.fnmatchcase(name, p) for p in patterns if not p.startswith("!") and p.strip("*")):
            return True
    return False


def _ssh_config_aliases(config: Path) -> list[str]:
    """The names that ``Host`` lines spell out, without patterns."""
    return [p for patterns in _ssh_host_lines(config) for p in patterns if not any(c in p for c in "*?!")]


def _ssh_host_lines(config: Path, depth: int = 0) -> Iterator[list[str]]:
    """The patterns of each ``Host`` line. A file that cannot be read names nobody, as for ssh itself."""
    try:
        text = config.read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        found = re.match(r"\s*(host|include)(?:\s*=\s*|\s+)(.+)", line, re.IGNORECASE)
        if not found:
            continue
        try:
            words = shlex.split(found[2], comments=True)
        except ValueError:
            continue  # an unbalanced quote: ssh refuses that line too
        if found[1].lower() == "host":
            yield words
        elif depth < 16:  # as deep as ssh itself goes
            for word in words:
                pattern = Path(word).expanduser()
                base = pattern if pattern.is_absolute() else config.parent / pattern
                for included in sorted(Path(base.anchor).glob(str(base.relative_to(base.anchor)))):
                    yield from _ssh_host_lines(included, depth + 1)


def _resolves(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        pass
    try:
        return bool(socket.getaddrinfo(name, 22, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


# ------------------------------------------------------------------------------------------ small helpers


def _twice(where: str, what: str, values: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            yield f"{where}: {what} {value} is there twice"
        seen.add(value)


def _nearest(name: str, known: Sequence[str]) -> str:
    """``; did you mean gpu01?`` or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _plain(wrong: Exception) -> str:
    """The message of a ValueError, also of those that pydantic wraps."""
    if isinstance(wrong, ValidationError):
        first = wrong.errors(include_url=False)[0]
        return str(first["ctx"]["error"]) if first["type"] == "value_error" else str(first["msg"])
    return str(wrong)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _expanded(path: str) -> str | None:
    return str(Path(path).expanduser()) if path else None


#: How a connection is made; what takes one can be given another in tests.
Connect = Callable[[HostSpec], tuple[Transport, Clock]]

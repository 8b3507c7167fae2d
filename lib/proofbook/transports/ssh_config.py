"""Where a host name leads: what OpenSSH itself makes of ~/.ssh/config and /etc/ssh/ssh_config.

WHY ``ssh -G`` and not paramiko's parser: that one knows no Include and prints no default known_hosts files, so a name
could lead somewhere else here than in the operator's terminal.
"""

from __future__ import annotations

import getpass
import os
import re
from dataclasses import dataclass, field

from proofbook.errors import BadParameter, CannotConnect

_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach one host. ``jumps``: the hosts to go through, the nearest first."""

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = _IDENTITIES
    use_agent: bool = True
    known_hosts: tuple[str, ...] = _KNOWN_HOSTS
    host_key_alias: str = ""
    connect_timeout_s: float | None = None
    proxy_command: str = ""
    jumps: tuple[Route, ...] = field(default=())

    @property
    def key_name(self) -> tuple[str, int]:
        """Host and port as the known_hosts files know them. An alias stands alone, whatever the port."""
        return (self.host_key_alias, 22) if self.host_key_alias else (self.hostname, self.port)


def resolve(
    name: str,
    *,
    user: str | None = None,
    port: int | None = None,
    identity_file: str | None = None,
    known_hosts: str | None = None,
    config: bool | str = True,
) -> Route:
    """The route to ``name``. What is given wins over the configuration.

    ``config``: True for OpenSSH's own files, a path for that file alone, False for none.
    ``known_hosts``: the only file to trust for the host itself (gateways keep their own).
    Raises BadParameter for a name that is none, CannotConnect when the configuration cannot be read.
    """
    _refuse_odd(name)
    route = _read(name, user, port, config, depth=0)
    changes: dict[str, object] = {}
    if identity_file:
        changes["identity_files"] = (identity_file,)
        changes["use_agent"] = False
    if known_hosts:
        changes["known_hosts"] = (known_hosts,)
    return _replace(route, **changes)


def _replace(route: Route, **changes: object) -> Route:
    from dataclasses import replace

    return replace(route, **changes)  # type: ignore[arg-type]


def _refuse_odd(name: str) -> None:
    # A name that begins with a dash would be an option of ssh; blanks and quotes could leave a ProxyCommand.
    if not re.fullmatch(r"[A-Za-z0-9_\[:.%][A-Za-z0-9_.:%\[\]-]*", name):
        raise BadParameter(
            f"not a host name: {name!r}", hint="a name from proofbook.toml or ~/.ssh/config, a DNS name or an address"
        )


def _read(name: str, user: str | None, port: int | None, config: bool | str, depth: int) -> Route:
    if config is False:
        return Route(name, name, port or 22, user or getpass.getuser())
    if depth > 8:
        raise CannotConnect(f"the ProxyJump of {name} leads in a circle", hint="look at it with: ssh -G " + name)
    said = _ssh_g(name, user, port, config)
    agent = said.get("identityagent", [""])[0]
    route = Route(
        name=name,
        hostname=said["hostname"][0],
        port=int(said["port"][0]),
        user=said["user"][0],
        identity_files=tuple(said.get("identityfile", _IDENTITIES)),
        use_agent=said.get("identitiesonly") != ["yes"] and agent != "none",
        known_hosts=_files(said, "userknownhostsfile") + _files(said, "globalknownhostsfile"),
        host_key_alias=said.get("hostkeyalias", [""])[0],
        connect_timeout_s=_seconds(said.get("connecttimeout", ["none"])[0]),
    )
    jumps = said.get("proxyjump", ["none"])[0]
    command = said.get("proxycommand", ["none"])[0]
    if jumps != "none":
        return _replace(route, jumps=_jumps(jumps, config, depth))
    if command != "none":
        return _replace(route, proxy_command=_expand(command, route))
    return route


def _ssh_g(name: str, user: str | None, port: int | None, config: bool | str) -> dict[str, list[str]]:
    import subprocess  # not every connection needs it

    argv = ["ssh", "-G"]
    if isinstance(config, str):
        argv += ["-F", os.path.expanduser(config)]
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", str(port)]
    try:
        done = subprocess.run(
            [*argv, "--", name], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise CannotConnect(
            "the program `ssh` is not installed, and only it knows what ~/.ssh/config means", hint="install the OpenSSH client"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CannotConnect(f"`ssh -G {name}` does not end", hint="a `Match exec` in ~/.ssh/config hangs?") from error
    if done.returncode != 0:
        raise CannotConnect(
            f"the SSH configuration cannot be used: {done.stderr.strip()[-500:]}", hint=f"look at it with: ssh -G {name}"
        )
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    return said


def _files(said: dict[str, list[str]], key: str) -> tuple[str, ...]:
    return tuple(f for value in said.get(key, []) for f in value.split() if f not in ("none", "/dev/null"))


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _jumps(text: str, config: bool | str, depth: int) -> tuple[Route, ...]:
    """``[user@]host[:port]`` or an ssh:// address, separated by commas; the first hop may have a ProxyJump of its own."""
    hops: list[Route] = []
    for hop in text.split(","):
        found = re.fullmatch(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d+))?/?", hop.strip())
        if not found:
            raise CannotConnect(f"not a ProxyJump: {hop!r}", hint="[user@]host[:port], separated by commas")
        host = found["host"].strip("[]")
        _refuse_odd(host)
        route = _read(host, found["user"], int(found["port"]) if found["port"] else None, config, depth + 1)
        hops += [*(route.jumps if not hops else ()), _replace(route, jumps=(), proxy_command="" if hops else route.proxy_command)]
    return tuple(hops)


def _expand(command: str, route: Route) -> str:
    values = {
        "h": route.hostname,
        "p": str(route.port),
        "r": route.user,
        "n": route.name,
        "%": "%",
        "d": os.path.expanduser("~"),
        "u": getpass.getuser(),
    }
    return re.sub(r"%(.)", lambda m: values.get(m[1], m[0]), command)

"""``proofbook lab box …`` and ``proofbook lab vm …``: the real lab's machines from the command line.

The whole's command line mounts both: ``lab_app.add_typer(box_app, name="box")``.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from proofbook.errors import BadParameter
from proofbook.lab.real import debian, image, kernel, packages, topology
from proofbook.lab.real.box import Box, boxes
from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.machines import machine
from proofbook.lab.real.places import Places
from proofbook.lab.real.vm import Vm, vms

__all__ = ["box_app", "vm_app"]

box_app = typer.Typer(
    help="Containers with a real systemd, journald, sshd and sudo; up in about a second. Needs root.", no_args_is_help=True
)
vm_app = typer.Typer(
    help="Virtual machines with a kernel, an IOMMU and stand-in GPUs of their own; up in half a minute. Needs root.",
    no_args_is_help=True,
)

BoxName = Annotated[str, typer.Argument(help="Which; several can be up at once (box-two, …).")]
VmName = Annotated[str, typer.Argument(help=f"vm, or vm-<topology>: {', '.join(topology.names())}.")]
Suite = Annotated[str, typer.Option("--suite", help="Debian release (default: the newest that apt here is configured for).")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON (one value, the last line of stdout).")]
All = Annotated[bool, typer.Option("--all", help="Every one, and what killed ones left.")]
User = Annotated[str, typer.Option("--user", "-l", help="Log in as.")]
Switch = Annotated[str, typer.Argument(help="off or on.")]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _place(endpoint: Endpoint, off: bool = False) -> str:
    state = "off, its plug is pulled" if off else f"up since {endpoint.started_at:%Y-%m-%d %H:%M:%S}Z"
    return f"lab:{endpoint.name}  {endpoint.address}:{endpoint.port}  {state}"


def _up(one: Box | Vm, suite: str) -> None:
    """Who asks for a machine wants it to run: one whose plug was pulled gets it back."""
    if one.off:
        _say(f"{one.name} was off: its plug is put back")
        one.power_on()
    typer.echo(_place(one.up(suite=suite, say=_say)))


def _box(name: str) -> Box:
    found = machine(name)
    if not isinstance(found, Box):
        raise BadParameter(f"{name!r} is no box", hint="boxes are called box, or box-<anything>")
    return found


def _vm(name: str) -> Vm:
    found = machine(name)
    if not isinstance(found, Vm):
        raise BadParameter(f"{name!r} is no virtual machine", hint="they are called vm, or vm-<topology>")
    return found


def _end(machines: list[Box] | list[Vm]) -> None:
    for one in machines:
        typer.echo(f"lab:{one.name}  {'ended' if one.down() else 'was not up'}")


def _show(machines: list[Box] | list[Vm], as_json: bool, none: str) -> None:
    if as_json:
        typer.echo(json.dumps([_summary(one) for one in machines]))
        return
    for one in machines:
        endpoint = one.status()
        if endpoint:
            typer.echo(_place(endpoint, one.off))
        elif one.leftovers:
            typer.echo(f"lab:{one.name}  was killed; `down {one.name}` clears what it left")
    if not any(one.status() for one in machines):
        typer.echo(none)


def _summary(one: Box | Vm) -> dict[str, object]:
    endpoint = one.status()
    port = endpoint.port if endpoint else None
    return {
        "name": one.name,
        "up": endpoint is not None and not one.off,
        "off": one.off,
        "port": port,
        "leftovers": one.leftovers,
    }


def _login(one: Box | Vm, words: list[str], user: str) -> None:
    argv = one.ssh_command(*words, user=user)
    os.execv(argv[0], argv)


def _power(one: Box | Vm, switch: str) -> None:
    if switch not in ("off", "on"):
        raise BadParameter(f"a plug is off or on, not {switch!r}")
    one.power_off() if switch == "off" else one.power_on()


# ---------------------------------------------------------------------------------------------------- box


@box_app.command("build")
def box_build(suite: Suite = "") -> None:
    """Build the file system that boxes start from, if it is not there yet."""
    packages.require_root("building")
    packages.require(packages.BOX_TOOLS, "a box")
    typer.echo(image.rootfs(suite or debian.default_suite(), Places.default(), _say))


@box_app.command("up")
def box_up(name: BoxName = "box", suite: Suite = "") -> None:
    """Start a box, if it is not up, and say how to reach it. It ends by itself after half an hour without a connection."""
    _up(_box(name), suite)


@box_app.command("down")
def box_down(name: BoxName = "box", every: All = False) -> None:
    """End a box and everything that belongs to it."""
    _end(boxes(Places.default()) if every else [_box(name)])


@box_app.command("status")
def box_status(as_json: JsonFlag = False) -> None:
    """Which boxes are up, and which were killed and left something behind."""
    _show(boxes(Places.default()), as_json, "no box is up")


@box_app.command("ssh", context_settings=PASS_ON)
def box_ssh(context: typer.Context, name: BoxName = "box", user: User = "root") -> None:
    """Log in to a box, or run a command there: `proofbook lab box ssh box uptime`."""
    _login(_box(name), context.args, user)


@box_app.command("reboot")
def box_reboot(name: BoxName = "box") -> None:
    """Reboot it the orderly way, and wait until it is back with another boot-id."""
    typer.echo("boot-id " + " → ".join(_box(name).reboot()))


@box_app.command("power")
def box_power(name: BoxName, switch: Switch) -> None:
    """Pull the plug (off), and put it back (on)."""
    _power(_box(name), switch)


# ----------------------------------------------------------------------------------------------------- vm


@vm_app.command("build")
def vm_build(suite: Suite = "") -> None:
    """Build the file system, the kernel and the stand-in driver that virtual machines start from, if they are not there yet."""
    packages.require_root("building")
    packages.require(packages.VM_TOOLS, "a virtual machine")
    release = suite or debian.default_suite()
    typer.echo(image.rootfs(release, Places.default(), _say))
    typer.echo(kernel.kernel(release, Places.default(), _say).folder)


@vm_app.command("up")
def vm_up(name: VmName = "vm", suite: Suite = "") -> None:
    """Start a virtual machine, if it is not up, and say how to reach it. It ends after half an hour without a connection."""
    _up(_vm(name), suite)


@vm_app.command("down")
def vm_down(name: VmName = "vm", every: All = False) -> None:
    """End a virtual machine and everything that belongs to it."""
    _end(vms(Places.default()) if every else [_vm(name)])


@vm_app.command("status")
def vm_status(as_json: JsonFlag = False) -> None:
    """Which virtual machines are up."""
    _show(vms(Places.default()), as_json, "no virtual machine is up")


@vm_app.command("ssh", context_settings=PASS_ON)
def vm_ssh(context: typer.Context, name: VmName = "vm", user: User = "root") -> None:
    """Log in to a virtual machine, or run a command there: `proofbook lab vm ssh vm lspci`."""
    _login(_vm(name), context.args, user)


@vm_app.command("power")
def vm_power(name: VmName, switch: Switch) -> None:
    """Pull the plug (off), and put it back (on)."""
    _power(_vm(name), switch)

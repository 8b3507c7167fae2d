"""``proofbook lab box …``: the real lab's machines from the command line. Mounted by the command line of the whole."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from proofbook.errors import LabError
from proofbook.lab.real import debian, image, packages
from proofbook.lab.real.box import Box, boxes
from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.places import Places

__all__ = ["box_app"]

box_app = typer.Typer(
    help="Containers with a real systemd, journald, sshd and sudo; up in about a second. Needs root.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Which; several can be up at once (box-two, …).")]
Suite = Annotated[str, typer.Option("--suite", help="Debian release (default: the newest that apt here is configured for).")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON (one value, the last line of stdout).")]


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _place(endpoint: Endpoint) -> str:
    return f"lab:{endpoint.name}  {endpoint.address}:{endpoint.port}  up since {endpoint.started_at:%Y-%m-%d %H:%M:%S}Z"


def _summary(box: Box) -> dict[str, object]:
    endpoint = box.status()
    port = endpoint.port if endpoint else None
    return {"name": box.name, "up": endpoint is not None, "port": port, "leftovers": box.leftovers}


@box_app.command("build")
def box_build(suite: Suite = "") -> None:
    """Build the file system that boxes start from, if it is not there yet."""
    packages.require_root("building")
    packages.require(packages.BOX_TOOLS, "a box")
    typer.echo(image.rootfs(suite or debian.default_suite(), Places.default(), _say))


@box_app.command("up")
def box_up(name: Name = "box", suite: Suite = "") -> None:
    """Start a box, if it is not up, and say how to reach it. It ends by itself after half an hour without a connection."""
    typer.echo(_place(Box(name, Places.default()).up(suite=suite, say=_say)))


@box_app.command("down")
def box_down(
    name: Name = "box", every: Annotated[bool, typer.Option("--all", help="All boxes, and what killed ones left.")] = False
) -> None:
    """End a box and everything that belongs to it."""
    places = Places.default()
    for box in boxes(places) if every else [Box(name, places)]:
        typer.echo(f"lab:{box.name}  {'ended' if box.down() else 'was not up'}")


@box_app.command("status")
def box_status(as_json: JsonFlag = False) -> None:
    """Which boxes are up, and which were killed and left something behind."""
    known = boxes(Places.default())
    if as_json:
        typer.echo(json.dumps([_summary(box) for box in known]))
        return
    for box in known:
        endpoint = box.status()
        if endpoint:
            typer.echo(_place(endpoint))
        elif box.leftovers:
            typer.echo(f"lab:{box.name}  was killed; `proofbook lab box down {box.name}` clears what it left")
    if not any(box.status() for box in known):
        typer.echo("no box is up")


@box_app.command("ssh", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def box_ssh(
    context: typer.Context, name: Name = "box", user: Annotated[str, typer.Option("--user", "-l", help="Log in as.")] = "root"
) -> None:
    """Log in to a box, or run a command there: `proofbook lab box ssh box uptime`."""
    argv = Box(name, Places.default()).ssh_command(*context.args, user=user)
    os.execv(argv[0], argv)


@box_app.command("reboot")
def box_reboot(name: Name = "box") -> None:
    """Reboot it the orderly way, and wait until it is back with another boot-id."""
    typer.echo("boot-id " + " → ".join(Box(name, Places.default()).reboot()))


@box_app.command("power")
def box_power(name: Name, switch: Annotated[str, typer.Argument(help="off or on.")]) -> None:
    """Pull the plug (off), and put it back (on)."""
    box = Box(name, Places.default())
    if switch not in ("off", "on"):
        raise LabError(f"a plug is off or on, not {switch!r}")
    box.power_off() if switch == "off" else box.power_on()

"""What keeps root from writing a file: an attribute that makes it immutable, a file system that is read-only or full."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside

__all__ = ["Obstacle", "Obstacles"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in the way of a write. ``way``: a command, to be typed where the file is, that clears or shows it."""

    what: str
    way: tuple[str, ...]


@dataclass(frozen=True)
class Obstacles(Probe[tuple[Obstacle, ...]]):
    """What is in the way of writing ``paths`` (files, there or not) and the folders that they are in; () when nothing was seen.

    ::

        $ lsattr -d -- /etc/systemd/system/x.service
        ----i---------e------- /etc/systemd/system/x.service
        $ findmnt -n -r -o TARGET,FSTYPE,OPTIONS --target /etc/systemd/system
        / ext4 ro,relatime
        $ df -P -k -- /etc/systemd/system
        Filesystem     1024-blocks     Used Available Capacity Mounted on
        /dev/vda1         20511312 20511312         0     100% /

    A tool that is not there, or a file system without such attributes, shows nothing: this explains a failure, and proves none.
    """

    paths: tuple[str, ...]
    container: ContainerSpec | None = None
    name: ClassVar[str] = "obstacles.Obstacles"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Obstacle, ...]]:
        folders = tuple(dict.fromkeys(posixpath.dirname(path) for path in self.paths))
        above = tuple(dict.fromkeys([*folders, *(posixpath.dirname(folder) for folder in folders)]))
        asked = [command("lsattr", "-d", "--", *self.paths, *above, root=True)]
        for folder in above:
            asked.append(command("findmnt", "-n", "-r", "-o", "TARGET,FSTYPE,OPTIONS", "--target", folder, root=True))
            asked += [command("df", "-P", kind, "--", folder, root=True) for kind in ("-k", "-i")]
        answers = yield [inside(self.container, one) for one in asked]
        attributes, *others = (answer.text for answer in answers)
        found = [*_attributes(attributes)]
        for n in range(len(above)):
            mount, blocks, inodes = others[3 * n : 3 * n + 3]
            found += [*_mount(mount), *_space(blocks, "space"), *_space(inodes, "inodes")]
        return tuple(dict.fromkeys(found))


def _attributes(text: str) -> Iterable[Obstacle]:
    for line in text.splitlines():
        flags, blank, path = line.partition(" ")
        if not blank or not path.startswith("/") or not re.fullmatch(r"[-A-Za-z]+", flags):
            continue
        if "i" in flags:
            yield Obstacle(f"{path} is immutable (chattr +i)", ("chattr", "-i", "--", path))
        if "a" in flags:
            yield Obstacle(f"{path} can only be appended to (chattr +a)", ("chattr", "-a", "--", path))


def _mount(text: str) -> Iterable[Obstacle]:
    words = text.split("\n")[0].split(" ")
    if len(words) == 3 and "ro" in words[2].split(","):
        where = words[0].replace("\\x20", " ")
        yield Obstacle(f"the file system at {where} ({words[1]}) is read-only", ("mount", "-o", "remount,rw", where))


def _space(text: str, what: str) -> Iterable[Obstacle]:
    """The last line of ``df -P``: device, size, used, available, capacity, where."""
    words = text.strip().split("\n")[-1].split(None, 5)
    # WHY the size too: file systems that make inodes as they need them say 0 of 0
    if len(words) == 6 and words[3] == "0" and words[1] not in ("0", "-") and words[1].isdigit():
        yield Obstacle(f"the file system at {words[5]} has no {what} left", ("df", "-h" if what == "space" else "-i", words[5]))


def typed(obstacle: Obstacle, container: ContainerSpec | None) -> str:
    """The command of an obstacle as it is typed on the host."""
    return shlex.join((*(container.enter() if container else ()), *obstacle.way))

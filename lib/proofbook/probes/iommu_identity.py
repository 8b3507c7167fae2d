"""What a machine holds of an identity experiment: its files, whether it is armed, and what its program did in this boot."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result
from proofbook.remote.iommu_identity import FLAG, LOG, PATHS, IdentityLog, parse_log

__all__ = ["EarlyModules", "IdentityFacts", "IdentityState"]

#: The drivers of a GPU's functions: display, and sound over its connectors.
_DRIVERS = re.compile(r"nvidia|snd[-_]hda[-_]intel")
_INITRAMFS = ("/etc/initramfs-tools/modules", "/etc/dracut.conf", "/etc/dracut.conf.d/*.conf", "/etc/mkinitcpio.conf")


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """``present``: those of the experiment's files that are there. ``log``: None when the program did not run in this boot."""

    present: tuple[str, ...]
    log: IdentityLog | None

    @property
    def armed(self) -> bool:
        """Whether the next boot would be the experiment's."""
        return FLAG in self.present


@dataclass(frozen=True)
class IdentityState(Probe[IdentityFacts]):
    """The experiment's files and log.

    ``/run/gpu-iommu-identity.log`` holds ``12.41 set 0000:41:00.0 identity``. WHY ``/run``: a log that is there is this boot's.
    """

    name: ClassVar[str] = "iommu_identity.IdentityState"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], IdentityFacts]:
        (answer,) = yield [remote.read_files("/run", *PATHS, LOG)]
        files = remote.parse_files(answer)
        if "/run" not in files.dirs:
            raise CannotTell("/run is not there to be looked at")
        if files.unreadable:
            path, why = next(iter(files.unreadable.items()))
            raise CannotTell(f"{path} cannot be read: {why}")
        there = {*files.files, *files.links, *files.dirs}
        text = files.files.get(LOG)
        return IdentityFacts(tuple(p for p in PATHS if p in there), parse_log(text) if text is not None else None)


@dataclass(frozen=True)
class EarlyModules(Probe[tuple[str, ...]]):
    """Which configuration puts a GPU's driver into the initramfs, as ``path: line``. There it binds before any unit runs.

    A line ``nvidia`` in ``/etc/initramfs-tools/modules`` does, ``add_drivers+=" nvidia "`` in ``/etc/dracut.conf.d/`` too; and
    ``snd_hda_intel`` for the audio function of a GPU. What an image holds that was built before the file was changed is not seen.
    """

    name: ClassVar[str] = "iommu_identity.EarlyModules"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[str, ...]]:
        (answer,) = yield [remote.read_files(*_INITRAMFS)]
        found = []
        for path, text in remote.parse_files(answer).files.items():
            for line in text.splitlines():
                setting = line.partition("#")[0]
                if _DRIVERS.search(setting) and not setting.lstrip().startswith(("omit_drivers", "blacklist")):
                    found.append(f"{path}: {setting.strip()}")
        return tuple(found)

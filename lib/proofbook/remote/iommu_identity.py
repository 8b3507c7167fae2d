"""iommu_identity.sh: what is laid down on a machine for one boot, and what the program says it did at that boot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proofbook.errors import CannotTell
from proofbook.model import pci_address
from proofbook.remote.ask import _program

__all__ = [
    "FLAG",
    "HOME",
    "IDENTITY",
    "LOG",
    "PATHS",
    "PROGRAM",
    "PULL",
    "UNIT",
    "UNIT_PATH",
    "IdentityLog",
    "parse_log",
    "pull",
    "unit",
]

#: Text of iommu_identity.sh.
IDENTITY = _program("iommu_identity.sh")
UNIT = "gpu-iommu-identity.service"
#: WHY below /etc: the program runs before anything but the root file system is sure to be mounted.
HOME = "/etc/gpu-iommu-identity"
PROGRAM = f"{HOME}/iommu_identity.sh"
#: While it is there, the next boot is the one. The program removes it before it acts.
FLAG = f"{HOME}/armed"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
#: WHY a drop-in and not a link in sysinit.target.wants: a guard keeps and takes back plain files.
PULL = "/etc/systemd/system/sysinit.target.d/50-gpu-iommu-identity.conf"
#: What the program said in this boot; gone with it.
LOG = "/run/gpu-iommu-identity.log"
#: Everything that must be gone in the end.
PATHS = (UNIT_PATH, PULL, PROGRAM, FLAG)


def unit(addresses: Sequence[str], kind: str = "identity") -> str:
    """The unit's file: the program for these PCI addresses, before a driver can have bound them."""
    return f"""# Written by proofbook for one boot. It does nothing once {FLAG} is gone.
[Unit]
Description=Set the iommu type of chosen GPUs for one boot
DefaultDependencies=no
ConditionPathExists={FLAG}
ConditionPathExists=/sys/kernel/iommu_groups
After=systemd-remount-fs.service
Before=systemd-udev-trigger.service systemd-modules-load.service sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=30
ExecStart=/bin/sh {PROGRAM} {kind} {" ".join(map(pci_address, addresses))}
"""


def pull() -> str:
    """The drop-in that makes systemd start the unit at boot."""
    return f"# Written by proofbook for one boot.\n[Unit]\nWants={UNIT}\n"


@dataclass(frozen=True, slots=True)
class IdentityLog:
    """What the program says of one boot. Times are seconds since the kernel started, as the kernel log has them.

    ``groups``: PCI address to (group number, type before). ``set``: address to when its type was read back as wanted.
    ``refused``: address to why its group was not touched, or kept its type. ``end``: done · refused · partly · idle, ""
    when it never came to its end. ``trouble``: why it did not act at all.
    """

    wanted: str
    addresses: tuple[str, ...]
    began_s: float
    disarmed_s: float | None = None
    groups: dict[str, tuple[int, str]] = field(default_factory=dict)
    set: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    end: str = ""
    trouble: str = ""


def parse_log(text: str) -> IdentityLog:
    """Read :data:`LOG`. Raises CannotTell for text that is not the program's."""
    began: tuple[float, str, tuple[str, ...]] | None = None
    disarmed: float | None = None
    groups: dict[str, tuple[int, str]] = {}
    done: dict[str, float] = {}
    refused: dict[str, str] = {}
    end = trouble = ""
    for line in text.splitlines():
        try:
            at, verb, *words = line.split(" ")
            match verb, words:
                case "begin", [wanted, *addresses]:
                    began = (float(at), wanted, tuple(addresses))
                case "disarmed", []:
                    disarmed = float(at)
                case "not-armed", []:
                    trouble = "it was not armed"
                case "not-disarmed", [*why]:
                    trouble = " ".join(why)
                case "group", [address, number, kind]:
                    groups[address] = (int(number), kind)
                case "set", [address, _]:
                    done[address] = float(at)
                case "refused", [address, *why]:
                    refused[address] = " ".join(why)
                case "kept", [address, kind, *why]:
                    refused[address] = f"{' '.join(why)}; its type is {kind}"
                case "end", [word]:
                    end = word
                case _:
                    raise ValueError(line)
        except ValueError:
            raise CannotTell(f"{LOG} holds a line that is not the program's: {line[:120]!r}") from None
    if began is None:
        raise CannotTell(f"{LOG} does not say what was begun")
    return IdentityLog(began[1], began[2], began[0], disarmed, groups, done, refused, end, trouble)

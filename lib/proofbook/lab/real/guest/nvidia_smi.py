"""A stand-in for nvidia-smi inside the lab's virtual machines: it prints what the stand-in driver has bound.

It lies beside the lab's renderer of nvidia-smi's answers, and fills the renderer's hardware from sysfs: a device that is not
bound, or not there, is not printed. ``--stand-in`` says what it is.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from proofbook.lab.sim.render_nvidia import nvidia_smi
from proofbook.lab.sim.state import Gpu, Hardware, Link, PciDevice

DRIVER = Path("/sys/bus/pci/drivers/nvidia")


def bound() -> list[str]:
    return sorted(path.name for path in DRIVER.glob("????:??:??.?"))


def hardware(addresses: list[str]) -> Hardware:
    """The renderer's hardware, of what is bound now."""
    found = Hardware()
    for minor, address in enumerate(addresses):
        found.pci[address] = PciDevice(
            address, 0x1234, 0x11E8, 0x030200, "stand-in", "3D controller", driver="nvidia", link=Link()
        )
        found.gpus[address] = Gpu(
            pci=address, uuid=uuid(address), minor=minor, serial=f"{minor:013d}", name="Stand-in of the proofbook lab"
        )
    try:
        found.nvidia.module_version = found.nvidia.library_version = Path("/sys/module/nvidia/version").read_text().strip()
    except FileNotFoundError:
        found.nvidia.loaded = False
    return found


def uuid(address: str) -> str:
    """As the stand-in driver says it in /proc/driver/nvidia/gpus/<address>/information."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return f"GPU-00000000-57a4-4d14-8000-0000{domain}{bus}{int(slot, 16) << 3 | int(function):02x}"


def main() -> int:
    if sys.argv[1:] == ["--stand-in"]:
        print("a stand-in of the proofbook lab, not NVIDIA's nvidia-smi")
        return 0
    status, out, err = nvidia_smi(hardware(bound()), sys.argv[1:], datetime.now(UTC))
    os.write(1, out)
    os.write(2, err)
    return status


if __name__ == "__main__":
    sys.exit(main())

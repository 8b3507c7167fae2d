"""A reset of a GPU on a simulated machine: the program itself decides what comes after what, the machine what each write does.

Without a fault a reset works and changes nothing: what kept the GPU from starting keeps it from starting. The scenario's faults,
each of one ``method``:

``reset-clears``   the GPU starts once it is bound again
``reset-kills``    the GPU answers with all ones from then on; a reboot does not find it any more
``reset-hangs``    the write never returns
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
from collections.abc import Callable

from proofbook.lab.sim import fault_lines, identity
from proofbook.lab.sim.shell import Answer, Context, said
from proofbook.lab.sim.state import PciDevice
from proofbook.remote.reset_attempt import Attempt, Blocked, Sysfs, read_options

__all__ = ["play"]


def play(ctx: Context, words: list[str]) -> Answer:
    """What ``python3 -c <the program> OPTIONS`` does on this machine."""
    lines: list[str] = []
    try:
        options = read_options(words[0] if words else "{}")
    except (ValueError, TypeError) as error:
        return said(json.dumps({"event": "refused", "why": str(error)}, separators=(",", ":")) + "\n", status=64)
    status = Attempt(options, _Played(ctx), lambda e: lines.append(json.dumps(e, separators=(",", ":")))).run()
    return said("".join(f"{line}\n" for line in lines), status=status)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class _Played(Sysfs):
    """The files of the simulated kernel, and what writing to them does."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.machine = ctx, ctx.life.machine

    def read(self, path: str, most: int = 4096) -> bytes:
        return self.ctx.tree.read(path)[:most]

    def target(self, path: str) -> str:
        try:
            _, node = self.ctx.tree.lookup(path, follow=False)
        except OSError:
            return ""
        return node.target.rpartition("/")[2]

    def bounded(self, do: Callable[[], bytes], seconds: float) -> bytes:
        return do()

    def write(self, path: str, text: str) -> None:
        if self.ctx.user.uid != 0:
            raise _error(errno.EACCES)
        name = posixpath.basename(path)
        address = text if name == "bind" else path.split("/")[5]
        device = self.machine.hw.pci[address]
        match name:
            case "unbind":
                device.driver = ""
            case "bind":
                self._bind(device, path.split("/")[5])
            case "reset_method":
                self._choose(device, text)
            case "reset":
                self._reset(device)
            case _:
                raise _error(errno.EACCES)
        self.machine.revision += 1

    def _bind(self, device: PciDevice, driver: str) -> None:
        device.driver = driver
        gpu = self.machine.hw.gpus.get(device.address)
        if gpu is not None and gpu.condition == "uninitialised":
            for line in identity.says_of(self.machine, device.address):
                self.ctx.life.on_kernel(line.priority, line.text)

    def _choose(self, device: PciDevice, text: str) -> None:
        able = self.machine.board.pci[device.address].reset_method.split()
        if not set(text.split()) <= set(able):
            raise _error(errno.EINVAL)
        device.reset_method = text

    def _reset(self, device: PciDevice) -> None:
        method = device.reset_method.split()[0]
        gpu = self.machine.hw.gpus[device.address]
        if self._fault("reset-hangs", method):
            raise Blocked
        if self._fault("reset-kills", method):
            device.config_dead, gpu.condition = True, "lost"
            self.machine.happened.add(f"dead {device.address}")
            for line in fault_lines.stuck_after_reset(device.address, "pci", "bus reset" if method == "bus" else method.upper()):
                self.ctx.life.on_kernel(line.priority, line.text)
            raise _error(errno.ENOTTY)
        if self._fault("reset-clears", method):
            gpu.condition = "ok"

    def _fault(self, kind: str, method: str) -> bool:
        fault = self.machine.fault(kind)
        return fault is not None and fault.parameters["method"] == method

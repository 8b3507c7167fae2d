"""One reset of one PCI device by one method, told step by step: does it change anything, and does the device survive it?

``python3 -c <this text> '{"address": "0000:41:00.0", "method": "flr"}'``, as root (see DEFAULTS for the other options). Needs
Python 3.8 or newer and no package. Every line on stdout is one JSON event; ``proofbook/remote/gpu_reset.py`` says what they hold.

How it is built, and why:

* Only a method that the kernel lists for this very device is asked for. What is not listed is refused and was not tried.
* Who the device is comes from its configuration space. The file ``vendor`` holds what the kernel read when it found the device,
  and goes on saying so when nobody answers any more.
* Each write is made by a child process that is waited for only so long. A driver's unbind, a reset or a probe of a wedged device
  may never return, and a process that is stuck in the kernel cannot be killed. After such a write nothing more is touched.
* The driver is taken off first: a device that is reset under its driver is another experiment.
* A device that does not answer as before is not given back to its driver: the driver would only talk to nobody.
* The list of methods is put back as it was, whatever came of the reset.
"""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Callable
from typing import Any

DEFAULTS: dict[str, Any] = {
    "address": "",
    "method": "",
    "read_s": 20,  # seconds for one read of the configuration space
    "unbind_s": 60,
    "reset_s": 150,  # the kernel itself waits a minute for a device to answer after a reset
    "bind_s": 90,
}
_DEVICES, _DRIVERS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers"


class Blocked(Exception):
    """What was begun has not returned in its time."""


class Sysfs:
    """The kernel's files, as far as a reset needs them. A path that cannot be read or written raises OSError."""

    def __init__(self, root: str = "") -> None:
        self.root = root

    def read(self, path: str, most: int = 4096) -> bytes:
        handle = os.open(self.root + path, os.O_RDONLY)
        try:
            return os.read(handle, most)
        finally:
            os.close(handle)

    def target(self, path: str) -> str:
        """The last part of where a link leads, "" where there is none."""
        try:
            return os.readlink(self.root + path).rpartition("/")[2]
        except OSError:
            return ""

    def write(self, path: str, text: str) -> None:
        handle = os.open(self.root + path, os.O_WRONLY)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def bounded(self, do: Callable[[], bytes], seconds: float) -> bytes:
        """``do`` in a child process. Raises OSError as it did there, Blocked when it has not returned by then."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _in_the_child(do, writing)
        os.close(writing)
        try:
            if not select.select([reading], [], [], seconds)[0]:
                raise Blocked
            said = os.read(reading, 8192)
        finally:
            os.close(reading)
        os.waitpid(child, 0)
        if said[:1] == b"=":
            return said[1:]
        number = int(said[1:] or errno.EIO)
        raise OSError(number, os.strerror(number))


def _in_the_child(do: Callable[[], bytes], writing: int) -> None:
    """Ends the process in any case: one that comes back late, when nobody waits any more, must not go on with the next step."""
    try:
        # WHY no stream of the caller's stays open: a child that is stuck would hold open what the other end waits on.
        os.dup2(writing, 3)
        os.closerange(4, 1024)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            said = b"=" + do()
        except OSError as error:
            said = b"!%d" % (error.errno or errno.EIO)
        os.write(3, said)
    finally:
        os._exit(0)


def read_options(text: str) -> dict[str, Any]:
    """Raises ValueError for what the program does not know."""
    given = json.loads(text)
    unknown = set(given) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"unknown options: {', '.join(sorted(unknown))}")
    return {**DEFAULTS, **given}


class Attempt:
    """One reset. ``emit`` gets each event as it happens."""

    def __init__(self, options: dict[str, Any], sysfs: Sysfs, emit: Callable[[dict[str, Any]], None]) -> None:
        self.options, self.sysfs, self._emit = options, sysfs, emit
        self.address, self.method = str(options["address"]), str(options["method"])
        self.device = f"{_DEVICES}/{self.address}"
        self.driver = ""
        self.blocked = ""

    def run(self) -> int:
        """0 when it was made to its end, 1 when it was not begun, 2 when something did not return."""
        vendor = self._begin()
        if not vendor:
            return 1
        try:
            self._between(vendor)
        except Blocked:
            self.tell("blocked", step=self.blocked)
            return 2
        self.tell("end", driver=self.sysfs.target(f"{self.device}/driver"))
        return 0

    def tell(self, event: str, **facts: Any) -> None:
        self._emit({"event": event, **facts})

    # ------------------------------------------------------------------------------------------------ steps

    def _begin(self) -> str:
        """The vendor id as the device says it; "" when nothing is to be done, which was then told."""
        try:
            listed = self.sysfs.read(f"{self.device}/reset_method").decode().split()
        except OSError as error:
            self.tell("refused", why=f"the kernel lists no reset method for it: {_words(error)}")
            return ""
        if self.method not in listed:
            self.tell("refused", why=f"{self.method} is not in its reset_method ({' '.join(listed) or 'empty'})")
            return ""
        try:
            vendor = self._vendor()
        except OSError as error:
            self.tell("refused", why=f"its configuration space cannot be read: {_words(error)}")
            return ""
        except Blocked:
            self.tell("refused", why="a read of its configuration space does not return")
            return ""
        if vendor == "0xffff":
            self.tell("refused", why="it reads as all ones already, so there is nobody to reset")
            return ""
        self.driver = self.sysfs.target(f"{self.device}/driver")
        self.tell("begin", address=self.address, method=self.method, listed=listed, vendor=vendor, driver=self.driver)
        return vendor

    def _between(self, vendor: str) -> None:
        if self.driver and not self._write("unbind", f"{self.device}/driver/unbind", self.address):
            return
        before = self.sysfs.read(f"{self.device}/reset_method").decode().strip()
        after = vendor
        if self._write("method", f"{self.device}/reset_method", self.method):
            self._write("reset", f"{self.device}/reset", "1")
            after = self._vendor_after()
            self._write("put-back", f"{self.device}/reset_method", before)
            self.tell("listed", listed=self.sysfs.read(f"{self.device}/reset_method").decode().split())
        if self.driver and after == vendor:
            self._write("bind", f"{_DRIVERS}/{self.driver}/bind", self.address)

    def _write(self, step: str, path: str, text: str) -> bool:
        """Whether the kernel took it; told either way. Raises Blocked."""
        seconds = float(self.options[{"unbind": "unbind_s", "reset": "reset_s", "bind": "bind_s"}.get(step, "read_s")])

        def do() -> bytes:
            self.sysfs.write(path, text)
            return b""

        self.blocked = step
        try:
            self.sysfs.bounded(do, seconds)
        except OSError as error:
            self.tell("step", step=step, error=_words(error))
            return False
        self.tell("step", step=step, error="")
        return True

    def _vendor(self) -> str:
        """``0x10de``; ``0xffff`` when nobody answers."""
        head = self.sysfs.bounded(lambda: self.sysfs.read(f"{self.device}/config", 2), float(self.options["read_s"]))
        if len(head) != 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return f"0x{int.from_bytes(head, 'little'):04x}"

    def _vendor_after(self) -> str:
        self.blocked = "config"
        try:
            vendor = self._vendor()
        except OSError as error:
            self.tell("vendor", vendor="", error=_words(error))
            return ""
        self.tell("vendor", vendor=vendor, error="")
        return vendor


def _words(error: OSError) -> str:
    """``ENOTTY (Inappropriate ioctl for device)``."""
    number = error.errno or 0
    return f"{errno.errorcode.get(number, number)} ({error.strerror or os.strerror(number)})"


def main() -> int:
    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event, separators=(",", ":")), flush=True)

    try:
        options = read_options(sys.argv[1] if len(sys.argv) > 1 else "{}")
    except (ValueError, TypeError) as error:
        emit({"event": "refused", "why": str(error)})
        return 64
    return Attempt(options, Sysfs(os.environ.get("PROOFBOOK_TEST_ROOT", "")), emit).run()


if __name__ == "__main__":
    sys.exit(main())

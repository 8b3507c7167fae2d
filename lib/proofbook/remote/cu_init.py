"""Asks the CUDA driver library for its devices, as any CUDA program would first do. Prints one JSON line.

The call is made in a child with a deadline: on a wedged driver cuInit hangs in the kernel, where no signal reaches it.
Runs on whatever Python 3 the machine has, so it uses nothing newer than 3.6.
"""
# ruff: noqa: UP006, UP035, UP037, UP045

import ctypes
import json
import os
import select
import signal
import sys
from typing import Any, Dict, Optional

DEADLINE_S = 15


def ask() -> "Dict[str, Any]":
    answer: "Dict[str, Any]" = {"library": None, "cuInit": None, "devices": None, "error": None}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        answer["error"] = str(error)
        return answer
    answer["library"] = loaded_from() or "libcuda.so.1"
    answer["cuInit"] = library.cuInit(0)
    if answer["cuInit"] == 0:
        count = ctypes.c_int(-1)
        code = library.cuDeviceGetCount(ctypes.byref(count))
        if code == 0:
            answer["devices"] = count.value
        else:
            answer["error"] = f"cuDeviceGetCount returned {code}"
    else:
        text = ctypes.c_char_p()
        if library.cuGetErrorString(answer["cuInit"], ctypes.byref(text)) == 0 and text.value:
            answer["error"] = text.value.decode("ascii", "replace")
    return answer


def loaded_from() -> "Optional[str]":
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip()
            if os.path.basename(path).startswith("libcuda.so"):
                return path
    return None


def main() -> None:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        os.write(writable, json.dumps(ask()).encode())
        os._exit(0)
    os.close(writable)
    said = b""
    ready, _, _ = select.select([readable], [], [], DEADLINE_S)
    if ready:
        said = os.read(readable, 65536)
    failed: "Dict[str, Any]" = {"library": None, "cuInit": None, "devices": None}
    if not ready:
        # No wait for the child: where the driver is wedged, even SIGKILL does not end it.
        os.kill(child, signal.SIGKILL)
        failed["error"] = f"cuInit did not return within {DEADLINE_S} s"
    elif not said:
        status = os.waitpid(child, 0)[1]
        failed["error"] = f"the process that called cuInit died of signal {status & 0x7F}"
    print(said.decode() if said else json.dumps(failed))
    sys.stdout.flush()
    os._exit(0)


main()

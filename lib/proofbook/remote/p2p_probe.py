"""Which GPU pairs can really reach each other's memory? Every copy is made, and what arrived is read back and compared.

``python3 -c <this text> '{"state": "/var/lib/…/p2p.jsonl", …}'`` (see DEFAULTS for the options). Needs Python 3.8 or newer and
the CUDA driver library; no toolkit, no package. Every line on stdout is one JSON event; the same lines are in the state file,
and they are on its disk before the next step begins, so that a machine that resets in the middle leaves what it knew.

How it is built, and why:

* The program itself never loads the driver. Each ordered pair has a process of its own in a session of its own, with a deadline,
  because a call into a wedged driver may never return. After SIGKILL it is looked whether the process is gone; one that is stuck
  in the kernel (state D) ends the whole matrix.
* Devices are told apart by PCI address and UUID. CUDA's ordinals are only used inside one process.
* The destination is filled with poison first, the source with a pattern that belongs to this pair, path and process, without
  a word twice in a period: bytes that never came (poison), came as zeros, or came from elsewhere are told apart. Around the
  destination stand guards, which show a copy that went astray.
* What arrived is read by the host out of the destination, never by the peer: a peer read could be wrong in the same way.
* Four ways between two GPUs (copy engine: push by the source, pull by the destination; kernels: store by the source, load by
  the destination) and one through host memory, as the control: if that one fails, it is not peer-to-peer's fault.

What the events are (``open``, ``window``, ``about``, ``result``, …) and what they hold is said in ``proofbook/remote/p2p.py``.
"""
# ruff: noqa: B905  (zip is strict only from Python 3.10 on)

from __future__ import annotations

import array
import ctypes
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

DEFAULTS: dict[str, Any] = {
    "state": "",  # the file that every event is appended to; "" keeps none
    "pairs": "all",  # or [[source, destination], …] by PCI address
    "paths": ["ce-push", "ce-pull", "sm-store", "sm-load", "staged"],
    "sizes": [4, 4096, 4099, 524288, 1048576, 268435456],  # bytes; one that is no multiple of 4 is copied between odd addresses
    "repeats": 2,  # processes that a pair is tested in, one after the other; the path staged only in the first
    "phases": ["local", "pairs", "both-directions", "all-at-once"],
    "together_size": 67108864,  # bytes of each copy while several run at once
    "pair_deadline_s": 120,  # for one process
    "step_deadline_s": 30,  # for what is queued on a GPU to come to its end
    "gone_s": 30,  # for a killed process to disappear: the kernel takes down what it held on the GPU
    "grace_s": 5,  # after each window, for the kernel's late lines (it tells what it suppressed only afterwards)
    "most_s": 0,  # everything is over after so many seconds, in the middle of a window too; 0: however long it takes
    "window_s": 0,  # no window is opened with less of that left
    "idle_s": 10,  # after each window, for the GPUs to come to rest
    "lockstep": False,  # True: before each window and after it, wait for a line "go <number of the window>" on stdin
    "library": "",  # the driver library; "" is $PROOFBOOK_LIBCUDA, else libcuda.so.1
    "smi": "nvidia-smi",  # asked whether the GPUs came to rest; "" asks nobody
    "kmsg": "/dev/kmsg",  # the kernel's log, read along; "" reads none
    "proc": "/proc",
}
PATHS = ("ce-push", "ce-pull", "sm-store", "sm-load", "staged")
PHASES = ("local", "pairs", "both-directions", "all-at-once")

# ------------------------------------------------------------------------------------------------- the driver's calls

_int, _uint, _size, _str, _ptr = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
_address = ctypes.c_uint64  # CUdeviceptr
_out_int, _out_address, _out_handle, _out_float = (
    ctypes.POINTER(_int), ctypes.POINTER(_address), ctypes.POINTER(_ptr), ctypes.POINTER(ctypes.c_float)
)  # fmt: skip

#: Argument types of every call that can be made, from cuda.h of CUDA 13.0 (CUDA_VERSION 13000). All of them return a CUresult.
#: Names are those of the exported symbols: ``cuMemAlloc_v2`` is what the header's macro turns ``cuMemAlloc`` into. Contexts,
#: streams, events, modules and functions are opaque pointers; a CUdevice is an int; a CUuuid is 16 bytes.
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_out_int,),
    "cuGetErrorName": (_int, ctypes.POINTER(_str)),
    "cuDeviceGetCount": (_out_int,),
    "cuDeviceGet": (_out_int, _int),
    "cuDeviceGetName": (_ptr, _int, _int),
    "cuDeviceGetUuid": (_ptr, _int),
    "cuDeviceGetPCIBusId": (_ptr, _int, _int),
    "cuDeviceTotalMem_v2": (ctypes.POINTER(_size), _int),
    "cuDeviceCanAccessPeer": (_out_int, _int, _int),
    "cuDeviceGetP2PAttribute": (_out_int, _int, _int, _int),
    "cuDevicePrimaryCtxRetain": (_out_handle, _int),
    "cuCtxSetCurrent": (_ptr,),
    "cuCtxEnablePeerAccess": (_ptr, _uint),
    "cuMemAlloc_v2": (_out_address, _size),
    "cuMemHostAlloc": (_out_handle, _size, _uint),
    "cuMemsetD32Async": (_address, _uint, _size, _ptr),
    "cuMemcpyHtoDAsync_v2": (_address, _ptr, _size, _ptr),
    "cuMemcpyDtoHAsync_v2": (_ptr, _address, _size, _ptr),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _ptr),
    "cuMemcpyPeerAsync": (_address, _ptr, _address, _ptr, _size, _ptr),
    "cuStreamCreate": (_out_handle, _uint),
    "cuStreamQuery": (_ptr,),
    "cuEventCreate": (_out_handle, _uint),
    "cuEventRecord": (_ptr, _ptr),
    "cuEventElapsedTime": (_out_float, _ptr, _ptr),
    "cuModuleLoadData": (_out_handle, _ptr),
    "cuModuleGetFunction": (_out_handle, _ptr, _str),
    "cuLaunchKernel": (_ptr, _uint, _uint, _uint, _uint, _uint, _uint, _uint, _ptr, _out_handle, _out_handle),
}  # fmt: skip

# CUresult and CUdevice_P2PAttribute, from the same header.
OUT_OF_MEMORY, NOT_READY, ALREADY_ENABLED = 2, 600, 704
RANK, ACCESS, ATOMICS = 1, 2, 3
NON_BLOCKING, PORTABLE, MAPPED = 1, 1, 2
PR_SET_PDEATHSIG = 1  # linux/prctl.h

#: Threads copy 16, 4 or 1 bytes each, the whole grid striding along. ``gate`` holds a stream back until the host opens it, at
#: most two seconds, so that what is timed is the GPU's work and not how fast the host can ask for it.
_COPY = """
.visible .entry proofbook_copy{width}(.param .u64 dst, .param .u64 src, .param .u64 count)
{{
    .reg .pred %p; .reg .b32 %r<5>; .reg .b64 %d<10>; {registers}
    ld.param.u64 %d1, [dst]; ld.param.u64 %d2, [src]; ld.param.u64 %d3, [count];
    cvta.to.global.u64 %d1, %d1; cvta.to.global.u64 %d2, %d2;
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %nctaid.x;
    cvt.u64.u32 %d4, %r3; mul.wide.u32 %d5, %r1, %r2; add.u64 %d4, %d4, %d5; mul.wide.u32 %d6, %r4, %r2;
AGAIN:
    setp.ge.u64 %p, %d4, %d3; @%p bra DONE;
    mul.lo.u64 %d7, %d4, {width}; add.u64 %d8, %d2, %d7; add.u64 %d9, %d1, %d7;
    ld.global.{type} {value}, [%d8]; st.global.{type} [%d9], {value};
    add.u64 %d4, %d4, %d6; bra AGAIN;
DONE:
    ret;
}}
"""
_GATE = """
.visible .entry proofbook_gate(.param .u64 flag)
{
    .reg .pred %p; .reg .b32 %r1; .reg .b64 %d<4>;
    ld.param.u64 %d1, [flag]; mov.u64 %d2, %globaltimer; add.u64 %d2, %d2, 2000000000;
WAIT:
    ld.volatile.u32 %r1, [%d1]; setp.ne.u32 %p, %r1, 0; @%p bra OPEN;
    mov.u64 %d3, %globaltimer; setp.lt.u64 %p, %d3, %d2; @%p bra WAIT;
OPEN:
    ret;
}
"""
_WIDTHS = (
    (16, "v4.u32", ".reg .b32 %v<5>;", "{%v1, %v2, %v3, %v4}"),
    (4, "u32", ".reg .b32 %v;", "%v"),
    (1, "u8", ".reg .b16 %v;", "%v"),
)
PTX = (
    ".version 6.4\n.target sm_70\n.address_size 64\n"
    + _GATE
    + "".join(_COPY.format(width=width, type=kind, registers=registers, value=value) for width, kind, registers, value in _WIDTHS)
)
_BLOCKS, _THREADS = 512, 256


class Trouble(Exception):
    """A call that failed, or work that did not end (``code`` NOT_READY)."""

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} returned {code} {name}".strip())
        self.call, self.code, self.name = call, code, name


class Driver:
    """The driver library. Only the calls of CALLS exist on it; each raises Trouble unless it succeeds."""

    def __init__(self, library: str) -> None:
        # WHY here: whoever logs in may have set these, and then devices would be hidden, or our kernels never compiled.
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DISABLE_PTX_JIT", "CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH"):
            os.environ.pop(name, None)
        # WHY eager: a kernel that is loaded at its first launch waits for the GPU, which waits for our gate.
        os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_CACHE_DISABLE="1", CUDA_MODULE_LOADING="EAGER")
        loaded = ctypes.CDLL(library)
        self._calls: dict[str, Callable[..., int]] = {}
        for name, types in CALLS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, _int
            self._calls[name] = function
        self.cuInit(0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in self.__dict__.get("_calls", {}):
            raise AttributeError(f"{name} is not in the table of calls")
        function = self._calls[name]

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise Trouble(name, code, self.error_name(code))

        self.__dict__[name] = call
        return call

    def query(self, stream: Any) -> int:
        return self._calls["cuStreamQuery"](stream)

    def error_name(self, code: int) -> str:
        text = _str()
        said = self._calls["cuGetErrorName"](code, ctypes.byref(text)) == 0 and text.value
        return said.decode("ascii", "replace") if said else ""

    def number(self, name: str, *arguments: Any) -> int:
        value = _int(0)
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value.value

    def handle(self, name: str, *arguments: Any) -> Any:
        value = _ptr()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value

    def text(self, name: str, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        getattr(self, name)(buffer, 256, device)
        return buffer.value.decode("utf-8", "replace")


def address_of(text: str) -> str:
    """A PCI address as the kernel writes it: ``0000:41:00.0`` (CUDA writes upper case)."""
    found = re.match(r"^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?$", text.strip())
    if not found:
        raise ValueError(f"not a PCI address: {text!r}")
    return f"{int(found[1] or '0', 16):04x}:{found[2]}:{found[3]}.{found[4] or 0}".lower()


def devices_of(driver: Driver) -> list[dict[str, Any]]:
    found = []
    for ordinal in range(driver.number("cuDeviceGetCount")):
        device = driver.number("cuDeviceGet", ordinal)
        raw, memory = ctypes.create_string_buffer(16), _size(0)
        driver.cuDeviceGetUuid(raw, device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        digits = raw.raw.hex()
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        found.append({
            "ordinal": ordinal,
            "pci": address_of(driver.text("cuDeviceGetPCIBusId", device)),
            "uuid": "GPU-" + uuid,
            "name": driver.text("cuDeviceGetName", device),
            "memory": memory.value,
        })  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------------ patterns

#: Words of a pattern. It repeats after that, and 65521 is a prime: no shift by pages, lines or words maps it onto itself.
WORDS = 65521
PERIOD = 4 * WORDS
#: What is read back at once: whole periods, so that every piece must hold the same bytes.
PIECE = 4 * PERIOD
POISON = 0xDEADBEEF
GUARD = 4096
#: Source and destination of a copy of odd size start this many bytes after an aligned address.
ODD_SOURCE, ODD_DESTINATION = 3, 1
#: Copies of at least this size are timed one by one; smaller ones in rows.
LARGE = 1048576
REPEATS, ROW = 5, 20

# Odd multiples modulo 2^28 are all different. The highest digit is 1, that of poison is 13 and that of zero is 0.
_BASE = int.from_bytes(array.array("I", ((n * 0x9E3779B1 & 0x0FFFFFFF) | 0x10000000 for n in range(WORDS))).tobytes(), "little")
_ONES = int.from_bytes(b"\x01\x00\x00\x00" * WORDS, "little")


def pattern(*names: object) -> bytes:
    """PERIOD bytes that belong to ``names``: no word twice, none of them poison or zero."""
    seed = 2166136261
    for byte in repr(names).encode():
        seed = (seed ^ byte) * 16777619 & 0xFFFFFFFF
    return (_BASE ^ _ONES * (seed & 0x0FFFFFFF)).to_bytes(PERIOD, "little")


class Bad:
    """The bytes that are not what they should be, counted in words of 4 (single bytes at an end that is no whole word)."""

    def __init__(self) -> None:
        self.first = -1
        self.counts = {"poison": 0, "zeros": 0, "other": 0}
        self.outside = 0

    def add(self, offset: int, seen: bytes, expected: bytes, poison: bytes) -> None:
        """Compare one piece; ``poison`` is the word that stands where nothing arrived."""
        whole = len(seen) // 4 * 4
        for kind, word in (("poison", poison), ("zeros", b"\0\0\0\0")):
            if whole and seen[:whole] == word * (whole // 4):
                self._found(offset, kind, whole)
                break
        else:
            words = (array.array("I", seen[:whole]), array.array("I", expected[:whole]))
            named = {int.from_bytes(poison, sys.byteorder): "poison", 0: "zeros"}
            for n, (value, wanted) in enumerate(zip(*words)):
                if value != wanted:
                    self._found(offset + 4 * n, named.get(value, "other"), 4)
        for n in range(whole, len(seen)):
            if seen[n] != expected[n]:
                kind = "poison" if seen[n] == poison[n % 4] else "zeros" if seen[n] == 0 else "other"
                self._found(offset + n, kind, 1)

    def _found(self, offset: int, kind: str, size: int) -> None:
        if self.first < 0:
            self.first = offset
        self.counts[kind] += size

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def told(self) -> dict[str, Any] | None:
        """None when all is well. ``kind`` is poison or zeros when every bad byte is, else other."""
        if not self.count and not self.outside:
            return None
        kinds = [kind for kind, count in self.counts.items() if count]
        kind = kinds[0] if len(kinds) == 1 and not self.outside else "other"
        return dict(self.counts, count=self.count, first_offset=self.first, kind=kind, outside=self.outside)


# ------------------------------------------------------------------------------------------- GPUs, inside one process


class Card:
    """One GPU inside one process: its context, and a stream of its own."""

    def __init__(self, driver: Driver, ordinal: int, deadline_s: float) -> None:
        self.driver, self.deadline_s = driver, deadline_s
        self.device = driver.number("cuDeviceGet", ordinal)
        self.context = driver.handle("cuDevicePrimaryCtxRetain", self.device)
        self.use()
        self.stream = self.new_stream()
        self.events = (self.new_event(), self.new_event())
        self.piece = driver.handle("cuMemHostAlloc", PIECE, PORTABLE | MAPPED)
        self.functions: dict[str, Any] = {}

    def use(self) -> None:
        self.driver.cuCtxSetCurrent(self.context)

    def new_stream(self) -> Any:
        return self.driver.handle("cuStreamCreate", NON_BLOCKING)

    def new_event(self) -> Any:
        return self.driver.handle("cuEventCreate", 0)

    def function(self, name: str) -> Any:
        if not self.functions:
            self.use()
            module = self.driver.handle("cuModuleLoadData", ctypes.c_char_p(PTX.encode()))
            for kernel in ("proofbook_gate", "proofbook_copy16", "proofbook_copy4", "proofbook_copy1"):
                self.functions[kernel] = self.driver.handle("cuModuleGetFunction", module, kernel.encode())
        return self.functions[name]

    def can_launch(self) -> bool:
        """Whether our kernels load here: the driver's compiler for PTX may not be installed."""
        try:
            self.function("proofbook_gate")
        except Trouble:
            return False
        return True

    def launch(self, name: str, blocks: int, threads: int, stream: Any, *arguments: int) -> None:
        function = self.function(name)
        values = [_address(value) for value in arguments]
        pointers = (_ptr * len(values))(*(ctypes.addressof(value) for value in values))
        self.use()
        self.driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def allocate(self, size: int) -> int:
        self.use()
        address = _address(0)
        self.driver.cuMemAlloc_v2(ctypes.byref(address), size)
        return address.value

    def wait(self, *streams: Any) -> None:
        """Until ``streams`` (default: its own) have nothing left to do. Raises Trouble (NOT_READY) at the deadline.

        WHY no synchronize: it has no deadline, and on a wedged GPU it never comes back.
        """
        until = time.monotonic() + self.deadline_s
        pause = 0.0
        for stream in streams or (self.stream,):
            while True:
                code = self.driver.query(stream)
                if code == 0:
                    break
                if code != NOT_READY:
                    raise Trouble("cuStreamQuery", code, self.driver.error_name(code))
                if time.monotonic() > until:
                    raise Trouble("cuStreamQuery", NOT_READY, f"still not ready after {self.deadline_s:g} s")
                time.sleep(pause)
                pause = min(0.001, pause + 0.00001)

    def elapsed_s(self, first: Any, last: Any) -> float:
        milliseconds = ctypes.c_float(0)
        self.driver.cuEventElapsedTime(ctypes.byref(milliseconds), first, last)
        return milliseconds.value / 1000

    def fill(self, address: int, size: int, block: bytes) -> None:
        """Put a pattern there: one period is uploaded, the rest doubled on the GPU."""
        self.use()
        first = min(size, PERIOD)
        ctypes.memmove(self.piece, block, first)
        self.driver.cuMemcpyHtoDAsync_v2(address, self.piece, first, self.stream)
        done = first
        while done < size:
            more = min(done, size - done)
            self.driver.cuMemcpyDtoDAsync_v2(address + done, address, more, self.stream)
            done += more
        self.wait()

    def read(self, address: int, size: int) -> int:
        """Up to PIECE bytes of the GPU, read by the host; the address of where they lie until the next read."""
        self.use()
        self.driver.cuMemcpyDtoHAsync_v2(self.piece, address, size, self.stream)
        self.wait()
        return int(self.piece.value)


class Target:
    """A destination on a card: room for ``size`` bytes between two guards."""

    def __init__(self, card: Card, size: int) -> None:
        self.card, self.room = card, size
        self.base = card.allocate(size + 8 + 2 * GUARD)

    def start(self, size: int) -> int:
        return self.base + GUARD + (ODD_DESTINATION if size % 4 else 0)

    def poison(self, size: int) -> None:
        self.card.use()
        words = (size + 8 + 2 * GUARD) // 4
        self.card.driver.cuMemsetD32Async(self.base, POISON, words, self.card.stream)
        self.card.wait()

    def compare(self, size: int, block: bytes, whole: bool) -> dict[str, Any] | None:
        """What is wrong with it, None when all is well. ``whole`` False looks at samples of a large one."""
        bad = Bad()
        start = self.start(size)
        word = POISON.to_bytes(4, sys.byteorder)
        lead = start - self.base
        for address, length in ((self.base, lead), (start + size, GUARD)):
            seen = ctypes.string_at(self.card.read(address, length), length)
            turn = (address - self.base) % 4
            wanted = (word * (length // 4 + 2))[turn : turn + length]
            if seen != wanted:
                bad.outside += sum(1 for a, b in zip(seen, wanted) if a != b)
        poison = (word * 2)[lead % 4 : lead % 4 + 4]
        expected = (block * 2)[ODD_SOURCE : ODD_SOURCE + size] if size % 4 else block * (PIECE // PERIOD)
        for offset, length in _pieces(size, whole):
            at = self.card.read(start + offset, length)
            if _memcmp(at, expected, length):
                bad.add(offset, ctypes.string_at(at, length), expected[:length], poison)
        return bad.told()


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (_ptr, _str, _size), _int


def _pieces(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Offset and length of what is read back; all of it, or 64 KiB in each of up to 32 places and the end."""
    if whole:
        for offset in range(0, size, PIECE):
            yield offset, min(PIECE, size - offset)
        return
    periods = (size - 1) // PERIOD
    for n in sorted({periods * k // 31 for k in range(32)}):
        yield n * PERIOD, min(65536 if n < periods else PERIOD, size - n * PERIOD)


class Flow:
    """One direction of one pair: a source with its pattern, a destination, and the ways between them."""

    def __init__(self, source: Card, target: Card, size: int, staged: bool) -> None:
        self.source, self.target = source, target
        self.from_ = source.allocate(size + 8)
        self.to = Target(target, size)
        self.size = size
        self.streams = {}
        for card in {source, target}:
            card.use()
            self.streams[card] = (card.new_stream(), card.new_event(), card.new_event())
        self.staging = source.piece if staged else None

    def prepare(self, names: Sequence[object]) -> None:
        self.block = pattern(*names)
        self.source.fill(self.from_, self.size + 8, self.block)

    def actor(self, path: str) -> Card:
        """The GPU that does the work: the one that pushes, pulls, stores or loads. It is the requester on the bus."""
        return self.target if path in ("ce-pull", "sm-load") else self.source

    def queue(self, path: str, size: int) -> None:
        """Ask for one copy. All paths but ``staged`` return at once."""
        card = self.actor(path)
        stream = self.streams[card][0]
        to, from_ = self.to.start(size), self.from_ + (ODD_SOURCE if size % 4 else 0)
        if path in ("ce-push", "ce-pull"):
            card.use()
            if self.source is self.target:
                card.driver.cuMemcpyDtoDAsync_v2(to, from_, size, stream)
            else:
                card.driver.cuMemcpyPeerAsync(to, self.target.context, from_, self.source.context, size, stream)
        elif path in ("sm-store", "sm-load"):
            width = 16 if size % 16 == 0 else 4 if size % 4 == 0 else 1
            threads = min(_THREADS, max(1, size // width))
            blocks = min(_BLOCKS, max(1, size // width // threads))
            card.launch(f"proofbook_copy{width}", blocks, threads, stream, to, from_, size // width)
        else:
            self._stage(to, from_, size)

    def _stage(self, to: int, from_: int, size: int) -> None:
        for offset in range(0, size, PIECE):
            length = min(PIECE, size - offset)
            self.source.read(from_ + offset, length)
            self.target.use()
            self.target.driver.cuMemcpyHtoDAsync_v2(to + offset, self.staging, length, self.target.stream)
            self.target.wait()

    def wait(self, path: str) -> None:
        if path != "staged":
            card = self.actor(path)
            card.use()
            card.wait(self.streams[card][0])

    def once(self, path: str, size: int) -> None:
        self.queue(path, size)
        self.wait(path)

    def time(self, path: str, size: int) -> tuple[list[float], list[float]]:
        """GB/s (empty below LARGE) and microseconds a copy, one figure a repeat."""
        seconds = []
        if path == "staged":
            began = time.perf_counter()
            self.once(path, size)
            seconds.append(time.perf_counter() - began)
        else:
            row = 1 if size >= LARGE else ROW
            if row > 1 and not self.actor(path).can_launch():
                self.once(path, size)
                return [], []  # without the gate a row of small copies would time how fast we ask
            seconds = [self._timed(path, size, row) / row for _ in range(REPEATS)]
        gbps = [round(size / s / 1e9, 3) for s in seconds if s > 0] if size >= LARGE else []
        return gbps, [round(s * 1e6, 3) for s in seconds]

    def _timed(self, path: str, size: int, row: int) -> float:
        card = self.actor(path)
        stream, first, last = self.streams[card]
        with Gate(card, [stream]):
            card.driver.cuEventRecord(first, stream)
            for _ in range(row):
                self.queue(path, size)
            card.driver.cuEventRecord(last, stream)
        self.wait(path)
        return card.elapsed_s(first, last)


class Gate:
    """Holds streams of ``card`` back while more is queued on them."""

    def __init__(self, card: Card, streams: Sequence[Any], flag: Any = None) -> None:
        self.card, self.streams = card, streams
        self.flag = flag or ctypes.c_uint32.from_address(int(card.piece.value))

    def __enter__(self) -> Gate:
        self.flag.value = 0
        for stream in self.streams if self.card.can_launch() else ():
            self.card.launch("proofbook_gate", 1, 1, stream, ctypes.addressof(self.flag))
        return self

    def __exit__(self, *error: object) -> None:
        self.flag.value = 1


# ----------------------------------------------------------------------------------------------------------- reporting


class Report:
    """Where events go: to the state file, and to a descriptor (stdout, or in a child the pipe to its parent)."""

    def __init__(self, state: int, out: int) -> None:
        self.state, self.out = state, out
        self.heard = True

    def __call__(self, event: str, **more: Any) -> dict[str, Any]:
        """Tell one event. ``about`` and the parent's own events are on the disk when this returns."""
        told = dict(event=event, **more)
        line = json.dumps(told, separators=(",", ":")).encode() + b"\n"
        if self.state >= 0:
            _write(self.state, line)
            # A result is on the disk before the next step begins: that step's ``about`` is written out after it.
            if event not in ("result", "kernel", "attributes"):
                os.fsync(self.state)
        self.relay(line)
        return told

    def relay(self, line: bytes) -> None:
        """Pass a line on. When nobody reads any more, say so once: the matrix ends at the next window."""
        try:
            if self.heard:
                _write(self.out, line)
        except OSError:
            self.heard = False


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class Kernel:
    """The kernel's log, read along, so that every line is known to be of one window: no clock has to be compared."""

    def __init__(self, path: str) -> None:
        self.unread, self.lost, self.rest = "", 0, b""
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path else -1
            if self.descriptor >= 0:
                os.lseek(self.descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.unread = f"{path}: {error.strerror}"
        if not path:
            self.unread = "not asked for"

    def lines(self) -> Iterator[dict[str, Any]]:
        while self.descriptor >= 0:
            try:
                data = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.lost += 1  # records were overwritten before they were read; how many, the sequence numbers tell
                continue
            if not data:
                return
            *whole, self.rest = (self.rest + data).split(b"\n")
            for line in whole:
                found = re.match(rb"(\d+),(\d+),(\d+),[^;]*;(.*)", line)
                if found:
                    yield {
                        "priority": int(found[1]) & 7,
                        "seq": int(found[2]),
                        "monotonic_s": int(found[3]) / 1e6,
                        "text": found[4].decode("utf-8", "backslashreplace"),
                    }


# ------------------------------------------------------------------------------------------- work, inside one process


class Asked:
    """What one process has to do, and how it says that it came to its end."""

    def __init__(self, options: dict[str, Any], report: Report) -> None:
        self.options, self.report = options, report
        self.driver = Driver(library_of(options))
        self.ordinals = {device["pci"]: device["ordinal"] for device in devices_of(self.driver)}

    def card(self, pci: str) -> Card:
        return Card(self.driver, self.ordinals[pci], self.options["step_deadline_s"])


def library_of(options: dict[str, Any]) -> str:
    return options["library"] or os.environ.get("PROOFBOOK_LIBCUDA", "") or "libcuda.so.1"


def failure(trouble: Trouble) -> dict[str, Any]:
    """A result's fields for a call that failed. Too little memory says nothing of the pair."""
    outcome = "hung" if trouble.code == NOT_READY else "not-run" if trouble.code == OUT_OF_MEMORY else "error"
    return {"outcome": outcome, "code": trouble.code, "call": trouble.call, "name": trouble.name}


def look(options: dict[str, Any], report: Report) -> None:
    """The devices that there are."""
    asked = Asked(options, report)
    report(
        "open",
        boot_id=boot_id(),
        library=loaded_from("libcuda") or library_of(options),
        driver=asked.driver.number("cuDriverGetVersion"),
        devices=devices_of(asked.driver),
        options=options,
        python=sys.version.split()[0],
        pid=os.getppid(),
    )


def local(options: dict[str, Any], report: Report, pci: str, phase: str) -> None:
    """One GPU by itself: its context, copy engine and kernels, on its own memory."""
    size = min(max(options["sizes"]), options["together_size"])
    told: dict[str, Any] = {"phase": phase, "pci": pci, "size": size, "ok": False, "code": 0, "call": "", "gbps": [], "us": []}
    try:
        card = Asked(options, report).card(pci)
        flow = Flow(card, card, size, staged=False)
        flow.prepare((pci, "local"))
        for path in ("ce-push", "sm-store") if card.can_launch() else ("ce-push",):
            flow.to.poison(size)
            flow.once(path, size)
            told["bad"] = flow.to.compare(size, flow.block, whole=True)
            if told["bad"]:
                break
        else:
            told["gbps"], told["us"] = flow.time("ce-push", size)[0], flow.time("ce-push", 4)[1]
            told["ok"] = True
    except Trouble as trouble:
        told.update(failure(trouble))
    report("local", **told)


def pair(
    options: dict[str, Any], report: Report, phase: str, src: str, dst: str, process: int, steps: list[tuple[str, int]]
) -> None:
    """One ordered pair, step by step. After a call that failed the context may be lost, so the process ends there."""
    where = {"phase": phase, "src": src, "dst": dst, "process": process}
    flow: Flow | None = None
    enabled: Trouble | None = None
    prepared = ""
    for path, size in steps:
        report("about", path=path, size=size, **where)
        told: dict[str, Any] = {"outcome": "ok", "code": 0, "call": "", "bad": None, "gbps": [], "us": []}
        try:
            if flow is None:
                asked = Asked(options, report)
                source, target = asked.card(src), asked.card(dst)
                enabled = connect(asked, where, source, target)
                flow = Flow(source, target, max(size for _, size in steps), staged=True)
            if enabled is not None and path != "staged":
                raise enabled
            if prepared != path:
                flow.prepare((src, dst, process, path))
                prepared = path
            told.update(one_step(flow, path, size))
        except Trouble as trouble:
            told.update(failure(trouble))
        report("result", path=path, size=size, **dict(where, **told))
        if told["code"] and (enabled is None or path == "staged"):
            return


def connect(asked: Asked, where: dict[str, Any], source: Card, target: Card) -> Trouble | None:
    """Say what the driver claims of this pair, and let each of the two reach the other's memory."""
    driver = asked.driver
    claims: dict[str, Any] = {"can_access": bool(driver.number("cuDeviceCanAccessPeer", source.device, target.device))}
    for name, attribute in (("rank", RANK), ("access", ACCESS), ("atomics", ATOMICS)):
        claims[name] = driver.number("cuDeviceGetP2PAttribute", attribute, source.device, target.device)
    if where["process"] == 1:
        asked.report("attributes", src=where["src"], dst=where["dst"], **claims)
    for own, peer in ((source, target), (target, source)):
        own.use()
        try:
            driver.cuCtxEnablePeerAccess(peer.context, 0)
        except Trouble as trouble:
            if trouble.code != ALREADY_ENABLED:
                return trouble
    return None


def one_step(flow: Flow, path: str, size: int) -> dict[str, Any]:
    """Copy, look, copy in repeats with a clock, look again."""
    flow.to.poison(size)
    flow.once(path, size)
    bad = flow.to.compare(size, flow.block, whole=True)
    if bad:
        return {"outcome": "wrong-data", "bad": bad}
    flow.to.poison(size)
    gbps, us = flow.time(path, size)
    bad = flow.to.compare(size, flow.block, whole=size <= LARGE)
    return {"outcome": "wrong-data" if bad else "ok", "bad": bad, "gbps": gbps, "us": us}


def together(options: dict[str, Any], report: Report, phase: str, pairs: list[tuple[str, str]], path: str) -> None:
    """Several ordered pairs at once, by one path."""
    size = min(max(options["sizes"]), options["together_size"])
    size -= size % 4
    report("about", phase=phase, path=path, size=size, pairs=[list(p) for p in pairs])
    told: dict[tuple[str, str], dict[str, Any]] = {p: {"outcome": "ok", "code": 0, "call": "", "bad": None} for p in pairs}
    current = pairs[0]
    try:
        asked = Asked(options, report)
        cards = {pci: asked.card(pci) for pci in sorted({pci for p in pairs for pci in p})}
        flows = {}
        for current in pairs:
            source, target = cards[current[0]], cards[current[1]]
            trouble = connect(asked, {"process": 0}, source, target)
            if trouble is not None:
                raise trouble
            flows[current] = flow = Flow(source, target, size, staged=False)
            flow.prepare((*current, phase, path))
            flow.once(path, 4)
            flow.to.poison(size)
        for current, flow in start(flows, path, size):  # noqa: B007
            flow.wait(path)
        for current, flow in flows.items():
            card = flow.actor(path)
            seconds = card.elapsed_s(*flow.streams[card][1:])
            told[current]["us"] = [round(seconds * 1e6 / REPEATS, 3)]
            told[current]["gbps"] = [round(REPEATS * size / seconds / 1e9, 3)] if seconds > 0 else []
            bad = flow.to.compare(size, flow.block, whole=True)
            told[current].update(looked=True, outcome="wrong-data" if bad else "ok", bad=bad)
    except Trouble as trouble:
        failed = failure(trouble)
        # The others were under way with it: what became of them was not looked at.
        others = {"outcome": "not-run", "why": f"{trouble} ({current[0]} to {current[1]})"}
        for each in told:
            if "looked" not in told[each]:
                told[each].update(failed if each == current else others)
    for (src, dst), result in told.items():
        result = dict({"gbps": [], "us": []}, **result)
        result.pop("looked", None)
        report("result", phase=phase, src=src, dst=dst, process=1, path=path, size=size, **result)


def start(flows: dict[tuple[str, str], Flow], path: str, size: int) -> list[tuple[tuple[str, str], Flow]]:
    """Queue REPEATS copies on every flow behind one gate, then open it."""
    first = next(iter(flows.values()))
    flag = ctypes.c_uint32.from_address(int(first.source.piece.value))
    gates = []
    for flow in flows.values():
        card = flow.actor(path)
        stream, began, ended = flow.streams[card]
        gates.append(Gate(card, [stream], flag).__enter__())
        card.driver.cuEventRecord(began, stream)
        for _ in range(REPEATS):
            flow.queue(path, size)
        card.use()
        card.driver.cuEventRecord(ended, stream)
    for gate in gates:
        gate.__exit__()
    return list(flows.items())


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip().replace("-", "")


def loaded_from(name: str) -> str:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip()
            if os.path.basename(path).startswith(name):
                return path
    return ""


# ------------------------------------------------------------------------------------------------ children, and the end


class Stop(Exception):
    """No further pair may be touched."""


class Stuck(Stop):
    """A process is there that nothing ends: what it was doing hung."""


class Child:
    """A process of its own session that runs ``work(report)``; its lines are passed on as they come."""

    def __init__(self, probe: Probe, work: Callable[[Report], None]) -> None:
        self.probe = probe
        readable, writable = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(probe, work, readable, writable)
        os.close(writable)
        self.readable = readable
        self.status: int | None = None
        self.timed_out = self.killed = False
        self.interrupted = True  # until its lines were read to their end

    @staticmethod
    def _live(probe: Probe, work: Callable[[Report], None], readable: int, writable: int) -> None:
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # WHY: if the probe itself is killed, nobody is left who would end a process that hangs.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(readable)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)  # WHY: the driver library may print; stdout is for events alone
            work(Report(probe.report.state, writable))
            status = 0
        except BaseException as error:
            _write(writable, json.dumps({"event": "_failed", "why": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            # WHY no ordinary end: taking a context down may hang on a wedged GPU, and then no answer would ever come.
            os._exit(status)

    def lines(self, deadline_s: float) -> Iterator[bytes]:
        """The lines until the process closes its end, or the deadline. ``end`` must follow."""
        until, rest = time.monotonic() + deadline_s, b""
        while True:
            ready, _, _ = select.select([self.readable], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.readable, 65536) if ready else b""
            if not data:
                self.timed_out, self.interrupted = not ready, False
                return
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line + b"\n"

    def end(self) -> None:
        """Let it end, or make it: SIGKILL to its whole session. Then look whether it is gone; raises Stop where it is not."""
        os.close(self.readable)
        patience = self.probe.options["gone_s"]
        # What has said its last word is given time: the kernel takes its memory on the GPU down, which is no trouble yet.
        if self.timed_out or self.interrupted or not self._wait(self._reaped, patience):
            self.killed = not self._reaped()
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.killed = False
        if not self._wait(lambda: self._reaped() and not self._state(), patience):
            state = self._state()
            why = "child in D state" if state == "D" else f"child survives SIGKILL (state {state or 'unknown'})"
            raise Stuck(f"{why}: process {self.pid} does not end, and no signal reaches it")

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        until, pause = time.monotonic() + seconds, 0.0005
        while not done():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        return True

    def _reaped(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def _state(self) -> str:
        """The letter of its state as the kernel has it, "" when there is no such process."""
        try:
            with open(f"{self.probe.options['proc']}/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def ended(self) -> str:
        """How it ended, when not by itself: "" or words."""
        if self.timed_out:
            return "no end within its deadline"
        if self.status is not None and os.WIFSIGNALED(self.status) and not self.killed:
            return f"died of signal {os.WTERMSIG(self.status)}"
        if self.status and not self.killed:
            return f"ended with exit status {os.WEXITSTATUS(self.status)}"
        return ""


# ------------------------------------------------------------------------------------------------------------ the probe


class Probe:
    """The whole matrix: windows one after the other, in each of them one pair (or several at once)."""

    def __init__(self, options: dict[str, Any], report: Report, kernel: Kernel | None = None) -> None:
        self.options, self.report = options, report
        self.kernel = kernel or Kernel(options["kmsg"])
        self.window = 0
        self.began = 0.0
        self.unfit: dict[str, str] = {}  # GPUs that no further pair may use, and why
        self.broken: dict[tuple[str, str], str] = {}  # pairs that are not tried together with others, and why
        self.suspect: set[str] = set()
        self.gpus: list[str] = []
        self.events: list[dict[str, Any]] = []  # of the last process

    def run(self) -> int:
        """Returns the exit status: 0 came to its end, 3 stopped before."""
        stopped = ""
        self.began = self.clocks()["monotonic_s"]
        try:
            self.open()
            for phase in PHASES:
                if phase in self.options["phases"]:
                    getattr(self, "phase_" + phase.replace("-", "_"))(phase)
        except Stop as why:
            stopped = str(why)
            self.report("stopped", why=stopped, window=self.window)
        self.report("end", boot_id=self.boot_id(), stopped=stopped, unfit=self.unfit, windows=self.window)
        return 3 if stopped else 0

    def open(self) -> None:
        self.report("about", phase="open")
        opened = self.ask(partial(look, self.options))
        found = next((event for event in opened if event["event"] == "open"), None)
        if found is None:
            raise Stop("the driver cannot be asked: " + (self.why or "no answer"))
        self.gpus = [device["pci"] for device in found["devices"]]
        wanted = self.options["pairs"]
        self.pairs = (
            [(a, b) for a in self.gpus for b in self.gpus if a != b] if wanted == "all" else [(p[0], p[1]) for p in wanted]
        )
        absent = sorted({pci for p in self.pairs for pci in p} - set(self.gpus))
        if absent:
            raise Stop(f"CUDA has no device at {', '.join(absent)}")
        self.used = [pci for pci in self.gpus if wanted == "all" or any(pci in p for p in self.pairs)]

    # -- the machine's time, and which boot it lives

    def clocks(self) -> dict[str, Any]:
        return now()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def boot_id(self) -> str:
        return boot_id()

    # -- windows

    def opened(self, phase: str, pairs: Sequence[tuple[str, str]]) -> None:
        """Begin a window: from here on, what the kernel says belongs to ``pairs``."""
        if not self.report.heard:
            raise Stop("nobody reads the answers any more")
        if self.left_s() < self.options["window_s"]:
            raise Stop(f"the time that it had is over ({self.options['most_s']:.0f} s), but for less than a window may take")
        self.window += 1
        self.drain(None)
        self.report("window", n=self.window, phase=phase, pairs=[list(p) for p in pairs], **self.clocks())
        self.in_step()

    def closed(self, pcis: Sequence[str]) -> None:
        """End the window, after the grace period; then the GPUs must be at rest."""
        self.sleep(self.options["grace_s"])
        self.drain(self.window)
        self.report("closed", n=self.window, unread=self.kernel.unread, lost=self.kernel.lost, **self.clocks())
        self.kernel.lost = 0
        self.in_step()
        self.rest(pcis)

    def drain(self, window: int | None) -> None:
        for line in self.kernel.lines():
            self.report("kernel", window=window, **line)

    def in_step(self) -> None:
        """Wait for ``go <window>`` where the caller asked for it."""
        if self.options["lockstep"]:
            line = sys.stdin.readline()
            if line.split() != ["go", str(self.window)]:
                raise Stop(f"expected 'go {self.window}', got {line!r}")

    def ask(self, work: Callable[[Report], None]) -> list[dict[str, Any]]:
        """Run ``work`` in a process of its own. Its events, passed on; ``self.why`` says why it did not end well."""
        self.events = events = []
        self.why, self.failed = "", False
        self.in_time()
        child = Child(self, work)
        try:
            for line in child.lines(min(self.options["pair_deadline_s"], max(0.0, self.left_s()))):
                event = json.loads(line)
                if event["event"] == "_failed":
                    self.why, self.failed = event["why"], True
                    continue
                self.report.relay(line)
                events.append(event)
        finally:
            child.end()
        if child.timed_out:
            self.in_time()  # cut off by that, it is no copy that hung
        self.why = self.why or child.ended()
        self.timed_out, self.lingered = child.timed_out, child.killed
        return events

    # -- the time that it has

    def left_s(self) -> float:
        """Seconds until everything must be over."""
        most = self.options["most_s"]
        return most - (self.clocks()["monotonic_s"] - self.began) if most else float("inf")

    def in_time(self) -> None:
        if self.left_s() <= 0:
            raise Stop(f"the time that it had is over ({self.options['most_s']:.0f} s), in the middle of a window")

    # -- are they at rest?

    def rest(self, pcis: Sequence[str]) -> None:
        """Each GPU of the window must come to rest. One that was left in the middle of work must also copy by itself again."""
        for pci in sorted(self.suspect & set(pcis)):
            if pci not in self.unfit and not self.baseline(pci, "recheck"):
                self.unfit[pci] = "it no longer copies by itself"
                self.report("idle", pci=pci, busy=True, why=self.unfit[pci])
        self.suspect -= set(pcis)
        if not self.options["smi"]:
            return
        until = self.clocks()["monotonic_s"] + self.options["idle_s"]
        busy = dict.fromkeys(pcis, True)
        seen: dict[str, dict[str, Any]] = {}
        while any(busy.values()):
            seen = self.ask_smi()
            busy = {pci: seen.get(pci, {}).get("utilisation", 0) >= 90 for pci in pcis}
            if self.clocks()["monotonic_s"] > until:
                break
            if any(busy.values()):
                self.sleep(1)
        for pci in pcis:
            if pci not in seen:
                self.report("idle", pci=pci, busy=None, why=self.why or "nvidia-smi has no row for it")
                continue
            self.report("idle", pci=pci, busy=busy[pci], **seen[pci])
            if busy[pci]:
                self.unfit[pci] = f"busy at {seen[pci]['utilisation']} % with nothing left to do"

    def ask_smi(self) -> dict[str, dict[str, Any]]:
        """Utilisation (%) and power (W) by PCI address, of what nvidia-smi has a row for."""

        def work(report: Report) -> None:
            os.dup2(report.out, 1)
            query = "--query-gpu=pci.bus_id,utilization.gpu,power.draw"
            os.execvp(self.options["smi"], [self.options["smi"], query, "--format=csv,noheader,nounits"])

        rows, said = {}, b""
        child = Child(self, work)
        try:
            for line in child.lines(min(self.options["pair_deadline_s"], max(0.0, self.left_s()))):
                said = line
                cells = [cell.strip() for cell in line.decode("utf-8", "replace").split(",")]
                if len(cells) == 3 and re.match(r"^[0-9a-fA-F:.]+$", cells[0]) and cells[1].isdigit():
                    watts = float(cells[2]) if re.match(r"^\d+(\.\d+)?$", cells[2]) else None
                    rows[address_of(cells[0])] = {"utilisation": int(cells[1]), "watts": watts}
        finally:
            child.end()
        self.why = child.ended() and f"nvidia-smi {child.ended()}: {said.decode('utf-8', 'replace').strip()[:200]}"
        return rows

    def baseline(self, pci: str, phase: str) -> bool:
        self.report("about", phase=phase, src=pci, dst=pci)
        stuck: Stuck | None = None
        try:
            self.ask(partial(local, self.options, pci=pci, phase=phase))
        except Stuck as why:
            stuck = why
        told = next((event for event in self.events if event["event"] == "local"), None)
        if told is None:
            why_not = str(stuck or self.why or "no answer")
            told = self.report("local", phase=phase, pci=pci, ok=False, code=0, call="", why=why_not, gbps=[], us=[])
        if stuck is not None:
            raise stuck
        return bool(told["ok"])

    # -- phases

    def phase_local(self, phase: str) -> None:
        for pci in self.used:
            self.opened(phase, [(pci, pci)])
            if not self.baseline(pci, phase):
                self.unfit[pci] = "its baseline failed"
            self.closed([pci])

    def phase_pairs(self, phase: str) -> None:
        for src, dst in self.pairs:
            if self.skipped(phase, src, dst):
                continue
            self.opened(phase, [(src, dst)])
            for process in range(1, self.options["repeats"] + 1):
                if not self.one_pair(phase, src, dst, process):
                    break
            self.closed([src, dst])

    def skipped(self, phase: str, src: str, dst: str) -> bool:
        whys = [f"{pci}: {self.unfit[pci]}" for pci in (src, dst) if pci in self.unfit]
        if (src, dst) in self.broken:
            whys.append(self.broken[src, dst])
        for why in whys[:1]:
            self.report("result", phase=phase, src=src, dst=dst, process=0, path="*", size=0, outcome="not-run", code=0, call="",
                        bad=None, gbps=[], us=[], why=why)  # fmt: skip
        return bool(whys)

    def one_pair(self, phase: str, src: str, dst: str, process: int) -> bool:
        """All steps of a pair in as few processes as it takes: one that was lost is followed by one for the paths that are left.

        False when the pair must be left alone: something on it hung.
        """
        # The control through host memory needs no second process: what comes and goes with processes is a peer's mapping.
        paths = [path for path in self.options["paths"] if process == 1 or path != "staged"]
        steps = [(path, size) for path in paths for size in self.options["sizes"]]
        while steps:
            work = partial(pair, self.options, phase=phase, src=src, dst=dst, process=process, steps=steps)
            try:
                events = self.ask(work)
            except Stuck as why:
                for step in steps[sum(event["event"] == "result" for event in self.events) :][:1]:
                    self.tell(phase, src, dst, process, step, "hung", str(why))
                raise
            results = [event for event in events if event["event"] == "result"]
            done = len(results)
            last = results[-1]["outcome"] if results else ""
            if done == len(steps):
                if last == "hung" or self.why or self.lingered:
                    self.suspect |= {src, dst}
                if any(event["outcome"] in ("error", "hung") and event["path"] != "staged" for event in results):
                    self.broken[src, dst] = "it failed when it was alone"
                return last != "hung"
            if self.why or last not in ("hung", "error", "not-run"):
                last = self.lost()
                self.tell(phase, src, dst, process, steps[done], last, self.why)
                done += 1
            self.suspect |= {src, dst}
            if last != "not-run" and steps[done - 1][0] != "staged":
                self.broken[src, dst] = f"{last} when it was alone"
            path = steps[done - 1][0]
            rest = [step for step in steps[done:] if step[0] != path] if last != "hung" else []
            for step in steps[done:]:
                if step not in rest:
                    self.tell(phase, src, dst, process, step, "not-run", f"{path}: {last} before it")
            if last == "hung":
                return False
            steps = rest
        return True

    def lost(self) -> str:
        """The outcome of a step whose process never told one."""
        return "hung" if self.timed_out else "error" if self.failed else "crashed"

    def tell(self, phase: str, src: str, dst: str, process: int, step: tuple[str, int], outcome: str, why: str) -> None:
        self.report("result", phase=phase, src=src, dst=dst, process=process, path=step[0], size=step[1], outcome=outcome, code=0,
                    call="", bad=None, gbps=[], us=[], why=why)  # fmt: skip

    def phase_both_directions(self, phase: str) -> None:
        for src, dst in self.pairs:
            if src > dst or (dst, src) not in self.pairs:
                continue
            skipped = [self.skipped(phase, src, dst), self.skipped(phase, dst, src)]
            if not any(skipped):
                self.at_once(phase, [(src, dst), (dst, src)])

    def phase_all_at_once(self, phase: str) -> None:
        fit = [p for p in self.pairs if not self.skipped(phase, *p)]
        if len(fit) > 2:
            self.at_once(phase, fit)

    def at_once(self, phase: str, pairs: list[tuple[str, str]]) -> None:
        self.opened(phase, pairs)
        pcis = sorted({pci for p in pairs for pci in p})
        for path in (path for path in self.options["paths"] if path != "staged"):
            stuck: Stuck | None = None
            try:
                self.ask(partial(together, self.options, phase=phase, pairs=pairs, path=path))
            except Stuck as why:
                stuck = why
            results = [event for event in self.events if event["event"] == "result"]
            if stuck is not None or len(results) < len(pairs):
                outcome, reason = ("hung", str(stuck)) if stuck is not None else (self.lost(), self.why)
                size = min(max(self.options["sizes"]), self.options["together_size"]) // 4 * 4
                told = {(event["src"], event["dst"]) for event in results}
                for src, dst in (p for p in pairs if p not in told):
                    self.tell(phase, src, dst, 1, (path, size), outcome, reason)
                if stuck is not None:
                    raise stuck
                self.suspect |= set(pcis)
                break
            if any(event["outcome"] in ("hung", "error") for event in results):
                self.suspect |= set(pcis)
            if any(event["outcome"] == "hung" for event in results):
                break
        self.closed(pcis)


def now() -> dict[str, Any]:
    """The machine's clocks: seconds since boot as journald has them, and UTC."""
    return {"monotonic_s": round(time.clock_gettime(time.CLOCK_MONOTONIC), 6), "utc": round(time.time(), 6)}


# ------------------------------------------------------------------------------------------------------------- options


def read_options(text: str) -> dict[str, Any]:
    """The options with their defaults. Raises ValueError for one that is unknown or makes no sense."""
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("the options must be one JSON object")
    unknown = sorted(set(said) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"unknown options: {', '.join(unknown)}")
    options = dict(DEFAULTS, **said)
    for name, known in (("paths", PATHS), ("phases", PHASES)):
        wrong = [word for word in options[name] if word not in known]
        if wrong or not options[name]:
            raise ValueError(f"{name} must be some of {', '.join(known)}, not {options[name]!r}")
    sizes = options["sizes"]
    if not sizes or not all(isinstance(n, int) and n > 0 and (n % 4 == 0 or n <= PERIOD - ODD_SOURCE) for n in sizes):
        raise ValueError(f"sizes are bytes; one that is no multiple of 4 is at most {PERIOD - ODD_SOURCE}: {sizes!r}")
    if options["pairs"] != "all":
        options["pairs"] = [[address_of(a), address_of(b)] for a, b in options["pairs"]]
        if not options["pairs"] or any(a == b for a, b in options["pairs"]):
            raise ValueError("pairs are of two different GPUs")
    if options["most_s"] < 0 or options["window_s"] < 0:
        raise ValueError("most_s and window_s must not be negative")
    for name in ("pair_deadline_s", "step_deadline_s", "gone_s", "repeats", "together_size"):
        if not options[name] > 0:
            raise ValueError(f"{name} must be more than 0")
    return options


def main(arguments: list[str]) -> int:
    out = Report(-1, 1)
    try:
        options = read_options(arguments[1] if len(arguments) > 1 else "{}")
        state = -1
        if options["state"]:
            os.makedirs(os.path.dirname(options["state"]), mode=0o700, exist_ok=True)
            state = os.open(options["state"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError, TypeError) as error:
        # WHY no run without its state file: what a reset in the middle leaves behind is half of the evidence.
        out("refused", why=str(error))
        return 2

    def leave(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stop(f"signal {number}")

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return Probe(options, Report(state, 1)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv))

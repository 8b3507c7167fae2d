"""The peer-to-peer probe on a simulated machine: its own code decides what comes after what, the machine what each copy does.

The probe's windows, its order of pairs, and what it does after a hang or a crash are the program's own (:class:`Probe` is
imported, not imitated). Played are the things below it: the driver, the kernel's log, ``nvidia-smi``, and time. What a copy
does follows from the hardware (NUMA nodes, IOMMU types, module parameters, ``topo -p2p``) and from the scenario's faults:

``pair-page-faults``   pairs, paths                       the requester faults in the IOMMU; a write is lost, a read gives ones
``pair-lost-writes``   pairs, paths, from_bytes           the call succeeds, nothing arrives, and no log has a line of it
``pair-hangs``         pairs, paths, phases, wedges       what is queued never ends; ``wedges``: the GPU that stays busy for ever
``pair-resets-host``   pairs, paths                       the machine restarts in the middle of a copy, and no log says why
``pair-speed``         pairs, paths, share or gbps        a copy that is slower than its like, or faster than can be
``foreign-fault``      pairs, pci                         another device (a network card) faults while these pairs are active

``pairs``: [[source, destination], …], absent for every pair. ``paths``: absent for the four between two GPUs.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from proofbook.lab.sim import fault_lines
from proofbook.lab.sim.faults import BETWEEN_PEERS
from proofbook.lab.sim.os_state import Fault, Machine
from proofbook.lab.sim.render_kernel import interface_name
from proofbook.lab.sim.shell import Answer, Context, said
from proofbook.lab.sim.state import Gpu
from proofbook.lab.sim.vfs import FileNode
from proofbook.remote import p2p_probe
from proofbook.remote.p2p_probe import LARGE, NOT_READY, REPEATS, Kernel, Probe, Report, read_options

__all__ = ["play"]

T = TypeVar("T")
Pair = tuple[str, str]

#: Published for RTX PRO 6000 on PCIe Gen5 x16 (community measurements), GB/s of a copy engine one way, and microseconds.
_SAME_NODE, _CROSS_SOCKET, _LOCAL, _STAGED = 55.2, 50.4, 1410.0, 21.5
_PEER_US, _CROSS_US, _LOCAL_US, _STAGED_US = 0.42, 0.49, 2.0, 14.2
#: What the other paths reach of a push by the copy engine.
_SHARE = {"ce-push": 1.0, "ce-pull": 0.985, "sm-store": 0.965, "sm-load": 0.94}
_READS = ("ce-pull", "sm-load")
_PAGE = 4096
#: The kernel prints so many faults of a device in five seconds, and counts the rest.
_BURST = 10
#: Seconds of the machine that a process of the probe takes.
_PROCESS_S = 1.0
_BUSY, _BUSY_WATTS = 100, 121.4
_CUDA_ERRORS = {100: "CUDA_ERROR_NO_DEVICE", 803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 999: "CUDA_ERROR_UNKNOWN"}
_UNSUPPORTED = 217


async def play(ctx: Context, words: list[str]) -> Answer:
    """What ``python3 -c <the probe> OPTIONS`` does on this machine. The lines go out as they come."""
    try:
        options = read_options(words[0] if words else "{}")
    except (ValueError, TypeError) as error:
        return said(json.dumps({"event": "refused", "why": str(error)}, separators=(",", ":")) + "\n", status=2)
    player = _Player(ctx, options, asyncio.get_running_loop())
    try:
        status = await asyncio.to_thread(player.run)
    finally:
        player.gone = True
        player.save()
    if player.power_lost:
        # The machine is down: its connections are cut, and no exit status comes over them.
        await ctx.until(lambda: False, 3600.0)
    return Answer(status, b"" if ctx.emit is not None else bytes(player.told))


class _Gone(Exception):
    """Nobody waits for the probe any more, or its machine went down under it."""


class _Player:
    """One probe on one machine. Its thread asks the lab's loop for everything that touches the machine."""

    def __init__(self, ctx: Context, options: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.ctx, self.options, self.loop = ctx, options, loop
        self.told = bytearray()  # all of it, as the state file has it
        self.sent = 0
        self.gone = self.power_lost = False
        self.boot = self.machine.boot
        self.cuda = _cuda(ctx)

    @property
    def machine(self) -> Machine:
        return self.ctx.life.machine

    def run(self) -> int:
        try:
            status = _Probe(self).run()
            self.send()
            return status
        except _Gone:
            return 255

    def on_loop(self, do: Callable[[], T]) -> T:
        """``do`` on the lab's own thread: nobody else looks at the machine meanwhile."""

        async def once() -> T:
            return do()

        if self.gone:
            raise _Gone
        return asyncio.run_coroutine_threadsafe(once(), self.loop).result()

    def let_pass(self, seconds: float) -> None:
        """Let the machine's time pass; its connections and events go on meanwhile."""
        if self.gone:
            raise _Gone
        self.send()
        if seconds > 0:
            asyncio.run_coroutine_threadsafe(self.ctx.until(lambda: False, seconds), self.loop).result()
        if self.machine.boot is not self.boot:
            raise _Gone

    def send(self) -> None:
        """Bring out what was told since the last time."""
        new, self.sent = bytes(self.told[self.sent :]), len(self.told)
        if new and self.ctx.emit is not None:
            asyncio.run_coroutine_threadsafe(self._emit(new), self.loop).result()

    async def _emit(self, data: bytes) -> None:
        if self.ctx.emit is not None:
            await self.ctx.emit(data)

    def save(self) -> None:
        """The state file, as the disk has it."""
        path = self.options["state"]
        if path and self.told:
            folder = posixpath.dirname(path)
            if not self.ctx.tree.exists(folder):
                self.ctx.change(folder, FileNode("dir", mode=0o700))
            self.ctx.change(path, FileNode("file", bytes(self.told), mode=0o600, mtime=self.ctx.life.now))

    def lose_power(self) -> None:
        """The machine restarts, and takes the probe and every connection with it."""

        def now() -> None:
            self.save()
            self.machine.happened.add("pair-resets-host")
            self.machine.reachable = False
            self.machine.connections_epoch += 1
            self.ctx.life.on_power_lost()
            self.machine.revision += 1

        self.send()
        self.on_loop(now)
        self.power_lost = True
        raise _Gone


def _cuda(ctx: Context) -> tuple[int, int, str]:
    from proofbook.lab.sim.agents import cuda  # it knows the programs, this one among them

    return cuda(ctx)


class _Report(Report):
    """Events go to the simulated disk and connection."""

    def __init__(self, player: _Player) -> None:
        super().__init__(-1, -1)
        self.player = player

    def relay(self, line: bytes) -> None:
        self.player.told += line


class _Log(Kernel):
    """The simulated kernel's log, read along. A line's number is its place in this boot."""

    def __init__(self, player: _Player) -> None:
        super().__init__("")
        self.player, self.unread = player, ""
        self.next = len(player.boot.kernel_log)

    def lines(self) -> Iterator[dict[str, Any]]:
        log = self.player.on_loop(lambda: list(self.player.boot.kernel_log))
        if len(log) < self.next:
            self.lost, self.next = self.lost + 1, 0  # the ring buffer overran
        for seq, line in enumerate(log[self.next :], self.next):
            yield {"priority": line.priority, "seq": seq, "monotonic_s": round(line.monotonic_s, 6), "text": line.text}
        self.next = len(log)


class _Probe(Probe):
    """The probe with the simulated machine below it."""

    def __init__(self, player: _Player) -> None:
        super().__init__(player.options, _Report(player), _Log(player))
        self.player = player
        self.faults = [f for f in player.machine.active_faults() if f.kind in BETWEEN_PEERS and not _over(player.machine, f)]
        self.faulted: dict[str, int] = {}  # requester: how many faults it had in this window
        self.why, self.failed, self.timed_out, self.lingered = "", False, False, False

    # -- the machine below

    def clocks(self) -> dict[str, Any]:
        life = self.player.ctx.life
        now = self.player.on_loop(lambda: life.now)
        return {"monotonic_s": round(now - self.player.boot.started_at, 6), "utc": round(now, 6)}

    def sleep(self, seconds: float) -> None:
        self.player.let_pass(seconds)
        self.player.on_loop(self._suppressed)

    def boot_id(self) -> str:
        return self.player.machine.boot.id

    def _suppressed(self) -> None:
        """The kernel tells late what it did not print."""
        for count in self.faulted.values():
            if count > _BURST:
                self._say(fault_lines.suppressed(count - _BURST))
        self.faulted.clear()

    def _say(self, lines: Sequence[fault_lines.Line]) -> None:
        for line in lines:
            self.player.ctx.life.on_kernel(line.priority, line.text)
        self.player.machine.revision += 1

    @property
    def cards(self) -> list[Gpu]:
        machine = self.player.machine
        return [gpu for gpu in machine.gpus_of(self.player.ctx.system) if gpu.condition == "ok"]

    def ask(self, work: Callable[[Report], None]) -> list[dict[str, Any]]:
        """What a process of the probe says: the machine is asked instead of a driver."""
        self.in_time()
        self.events = []
        self.why, self.failed, self.timed_out, self.lingered = "", False, False, False
        code, _, _ = self.player.cuda
        if code:
            self.why, self.failed = f"Trouble: cuInit returned {code} {_CUDA_ERRORS.get(code, '')}".strip(), True
            return []
        self.player.let_pass(_PROCESS_S)
        asked = cast("partial[None]", work)
        does: dict[object, Callable[..., None]] = {
            p2p_probe.look: self._look,
            p2p_probe.local: self._local,
            p2p_probe.pair: self._pair,
            p2p_probe.together: self._together,
        }
        does[asked.func](**asked.keywords)
        return self.events

    def _tell(self, event: str, **more: Any) -> dict[str, Any]:
        told = self.report(event, **more)
        self.events.append(told)
        return told

    def _look(self) -> None:
        driver = self.player.machine.hw.nvidia
        major, minor = driver.cuda_version.split(".")
        devices = [
            {"ordinal": n, "pci": gpu.pci, "uuid": gpu.uuid, "name": gpu.name, "memory": gpu.fb_mib * LARGE}
            for n, gpu in enumerate(self.cards)
        ]
        self._tell(
            "open",
            boot_id=self.boot_id(),
            library=f"/usr/lib/x86_64-linux-gnu/libcuda.so.{driver.library_version}",
            driver=int(major) * 1000 + int(minor) * 10,
            devices=devices,
            options=self.options,
            python="3.13.5",
            pid=self.player.machine.host.next_pid,
        )

    def _local(self, pci: str, phase: str) -> None:
        size = min(max(self.options["sizes"]), self.options["together_size"])
        told: dict[str, Any] = {
            "phase": phase,
            "pci": pci,
            "size": size,
            "ok": False,
            "code": 0,
            "call": "",
            "gbps": [],
            "us": [],
        }
        if self._is_wedged(pci):
            self.player.let_pass(self.options["step_deadline_s"])
            told.update(self._hung())
        else:
            gbps = self._spread(_LOCAL, "local", pci)
            told.update(bad=None, gbps=gbps if size >= LARGE else [], us=self._spread(_LOCAL_US, "local us", pci), ok=True)
        self._tell("local", **told)

    def _pair(self, phase: str, src: str, dst: str, process: int, steps: list[tuple[str, int]]) -> None:
        where = {"phase": phase, "src": src, "dst": dst, "process": process}
        peers = self._claims(src, dst, told=process == 1)
        for path, size in steps:
            self._tell("about", path=path, size=size, **where)
            told: dict[str, Any] = {"outcome": "ok", "code": 0, "call": "", "bad": None, "gbps": [], "us": []}
            if path != "staged" and not peers:
                told.update(
                    outcome="error", code=_UNSUPPORTED, call="cuCtxEnablePeerAccess", name="CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
                )
            else:
                told.update(self._copy(phase, (src, dst), path, size, process))
            self._tell("result", path=path, size=size, **{**where, **told})
            if told["code"] and (peers or path == "staged"):
                return

    def _claims(self, src: str, dst: str, *, told: bool) -> bool:
        """Whether the driver lets the two reach each other; what it claims is told once a pair."""
        hw = self.player.machine.hw
        peers = hw.p2p.get((src, dst), "OK") == hw.p2p.get((dst, src), "OK") == "OK"
        if told:
            node = {hw.pci[pci].numa_node for pci in (src, dst)}
            rank = 0 if len(node) == 1 else 1
            self._tell("attributes", src=src, dst=dst, can_access=peers, rank=rank, access=int(peers), atomics=0)
        return peers

    def _together(self, phase: str, pairs: list[Pair], path: str) -> None:
        size = min(max(self.options["sizes"]), self.options["together_size"]) // 4 * 4
        self._tell("about", phase=phase, path=path, size=size, pairs=[list(p) for p in pairs])
        busiest = max(sum(pci in pair for pair in pairs) for pci in {pci for pair in pairs for pci in pair}) // 2
        told = {pair: self._copy(phase, pair, path, size, 1, crowd=busiest) for pair in pairs}
        hung = next((pair for pair, result in told.items() if result["outcome"] == "hung"), None)
        for (src, dst), result in told.items():
            if hung is not None and (src, dst) != hung:
                why = f"cuStreamQuery returned {NOT_READY} {told[hung]['name']} ({hung[0]} to {hung[1]})"
                result = {"outcome": "not-run", "code": 0, "call": "", "bad": None, "why": why}
            given = {"gbps": [], "us": [], "code": 0, "call": "", "bad": None, **result}
            given |= {name: given[name][:1] for name in ("gbps", "us")}
            self._tell("result", phase=phase, src=src, dst=dst, process=1, path=path, size=size, **given)

    def ask_smi(self) -> dict[str, dict[str, Any]]:
        self.why = ""
        return {gpu.pci: {"utilisation": gpu.utilization, "watts": gpu.power_w} for gpu in self.cards}

    # -- what a copy does

    def _copy(self, phase: str, pair: Pair, path: str, size: int, process: int, crowd: int = 1) -> dict[str, Any]:
        for fault in self.faults:
            if fault.kind == "foreign-fault" and _is_of(fault, phase, pair, path):
                self.player.on_loop(lambda fault=fault: self._foreign(fault))  # type: ignore[misc]
        if self._hangs(phase, pair, path):
            self.player.let_pass(self.options["step_deadline_s"])
            return self._hung()
        if self._of("pair-resets-host", phase, pair, path):
            self.player.lose_power()
        if self._faults(phase, pair, path):
            self.player.on_loop(lambda: self._page_faults(pair, path, size))
            return {"outcome": "wrong-data", "bad": _bad(size, "other" if path in _READS else "poison")}
        lost = self._of("pair-lost-writes", phase, pair, path)
        if lost is not None and size >= int(lost.parameters.get("from_bytes", 0)):
            return {"outcome": "wrong-data", "bad": _bad(size, "poison")}
        gbps, us = self._speed(phase, pair, path, size, process, crowd)
        return {"outcome": "ok", "code": 0, "call": "", "bad": None, "gbps": gbps, "us": us}

    def _of(self, kind: str, phase: str, pair: Pair, path: str) -> Fault | None:
        return next((f for f in self.faults if f.kind == kind and _is_of(f, phase, pair, path)), None)

    def _hangs(self, phase: str, pair: Pair, path: str) -> bool:
        if any(self._is_wedged(pci) for pci in pair):
            return True
        fault = self._of("pair-hangs", phase, pair, path)
        if fault is None:
            return False
        if wedged := fault.parameters.get("wedges", ""):
            gpu = self.player.machine.hw.gpus[wedged]
            gpu.utilization, gpu.power_w, gpu.pstate = _BUSY, _BUSY_WATTS, "P1"
        return True

    def _is_wedged(self, pci: str) -> bool:
        """It works on something that never ends, and no process is there that could be killed."""
        gpu = self.player.machine.hw.gpus[pci]
        return gpu.utilization == _BUSY and not gpu.processes

    def _hung(self) -> dict[str, Any]:
        name = f"still not ready after {self.options['step_deadline_s']:g} s"
        return {"outcome": "hung", "code": NOT_READY, "call": "cuStreamQuery", "name": name}

    def _faults(self, phase: str, pair: Pair, path: str) -> bool:
        """Whether the IOMMU refuses the requester: a fault of the scenario, or peers whose memory it was never told of."""
        if path == "staged" or not self._translated(_requester(pair, path)):
            return False
        untold = self.player.machine.hw.nvidia.params.get("DmaRemapPeerMmio") == "0"
        return untold or self._of("pair-page-faults", phase, pair, path) is not None

    def _translated(self, pci: str) -> bool:
        hw = self.player.machine.hw
        return hw.iommu_on and hw.pci[pci].iommu_type in ("DMA", "DMA-FQ")

    def _page_faults(self, pair: Pair, path: str, size: int) -> None:
        """Ten lines of a requester in five seconds; the rest is counted."""
        hw = self.player.machine.hw
        who = hw.pci[_requester(pair, path)]
        peer = hw.pci[pair[0] if path in _READS else pair[1]]
        _, base, _ = max(peer.bars, key=lambda bar: bar[2])
        before = self.faulted.get(who.address, 0)
        pages = max(1, size // _PAGE)
        for n in range(min(pages, max(0, _BURST - before))):
            address = base + 0x4D7201000 + (before + n) * _PAGE
            write = path not in _READS
            self._say(fault_lines.io_page_fault(who.driver, who.address, (who.iommu_group or 0) + 2, address, write))
        self.faulted[who.address] = before + pages

    def _foreign(self, fault: Fault) -> None:
        """Another device's own fault, once."""
        device = self.player.machine.hw.pci[fault.parameters["pci"]]
        self.faults = [f for f in self.faults if f is not fault]
        domain = (device.iommu_group or 0) + 2
        self._say(fault_lines.nic_fault(device.driver, device.address, interface_name(device), domain, 0xFFF2A000))

    def _speed(self, phase: str, pair: Pair, path: str, size: int, process: int, crowd: int) -> tuple[list[float], list[float]]:
        """GB/s (of copies of 1 MiB and more) and microseconds a copy, one figure a repeat."""
        pci = self.player.machine.hw.pci
        near = pci[pair[0]].numa_node == pci[pair[1]].numa_node
        peak, wait = (_SAME_NODE, _PEER_US) if near else (_CROSS_SOCKET, _CROSS_US)
        peak, wait = (_STAGED, _STAGED_US) if path == "staged" else (peak * _SHARE[path], wait)
        if crowd > 1:
            peak = peak * 1.1 / crowd  # several flows share each link
        elif phase == "both-directions":
            peak *= 0.95
        fault = self._of("pair-speed", phase, pair, path)
        if fault is not None:
            peak = float(fault.parameters.get("gbps", peak * float(fault.parameters.get("share", 1.0))))
        seconds = wait / 1e6 + size / (peak * 1e9)
        many = 1 if path == "staged" else REPEATS
        us = self._spread(seconds * 1e6, phase, *pair, path, size, process)[:many]
        gbps = [round(size / u / 1e3, 3) for u in us] if size >= LARGE else []
        return gbps, us

    def _spread(self, middle: float, *names: object) -> list[float]:
        """Repeats around a value, the same at every run of one machine."""
        seed = zlib.crc32(repr((self.player.machine.seed, names)).encode())
        return [round(middle * (1 + ((seed >> 5 * n & 31) - 15.5) / 2500), 3) for n in range(REPEATS)]


def _over(machine: Machine, fault: Fault) -> bool:
    """A machine that restarted does not do so again: what made it was the first copy after days."""
    return fault.kind in machine.happened


def _requester(pair: Pair, path: str) -> str:
    """Who asks on the bus: the source pushes and stores, the destination pulls and loads."""
    return pair[1] if path in _READS else pair[0]


def _is_of(fault: Fault, phase: str, pair: Pair, path: str) -> bool:
    p = fault.parameters
    wanted = p.get("paths", tuple(_SHARE))
    return (
        ("pairs" not in p or list(pair) in p["pairs"])
        and path in wanted
        and phase in p.get("phases", ("pairs", "both-directions", "all-at-once"))
    )


def _bad(size: int, kind: str) -> dict[str, Any]:
    """Every byte is wrong, in one way."""
    counts = {"poison": 0, "zeros": 0, "other": 0, kind: size}
    return {**counts, "count": size, "first_offset": 0, "kind": kind, "outside": 0}

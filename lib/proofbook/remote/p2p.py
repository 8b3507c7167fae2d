"""The peer-to-peer probe: its command, and its events as values.

Every event is one JSON object with ``event``; PCI addresses are as everywhere (``0000:41:00.0``), sizes are bytes, clocks are the
machine's (``monotonic_s``: CLOCK_MONOTONIC, ``utc``: seconds since 1970). In the order in which they come:

``refused``     why                                            the options make no sense, or the state file cannot be written
``about``       phase, src, dst, path, size, process           a step is about to begin; on the machine's disk before it does
``open``        boot_id, library, driver (13000), devices: [{ordinal, pci, uuid, name, memory}], options, python, pid
``window``      n, phase, pairs: [[src, dst], …], clocks       from here on, what the kernel says belongs to these pairs
``local``       phase (local, recheck), pci, ok, size, gbps, us, code, call, bad, why      one GPU by itself
``attributes``  src, dst, can_access, rank, access, atomics    what the driver claims
``result``      phase, src, dst, process, path, size, outcome, code, call, name, bad, gbps, us, why
``kernel``      window (None: between two), seq, priority, monotonic_s, text               a line of the kernel's log
``closed``      n, unread (why the kernel's log was not read), lost (times that lines were overwritten), clocks
``idle``        pci, busy (None: could not be told), utilisation (%), watts, why
``stopped``     why, window                                    no further pair was touched
``end``         boot_id, stopped, unfit: {pci: why}, windows

``outcome``: ok · wrong-data · error (``code`` is the CUresult of ``call``) · hung · crashed · not-run (``why``). A result with
path ``*`` and process 0 is a pair that was not touched at all. ``bad``: None, or {count, first_offset, kind: poison (never
arrived) | zeros | other, poison, zeros, other, outside}, in bytes. ``gbps`` (GB/s, only of copies of 1 MiB and more) and ``us``
(microseconds a copy; of small ones, copies in a row divided by their number) hold one figure a repeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proofbook.errors import CannotTell
from proofbook.model import Command, pci_address
from proofbook.remote.ask import _program

__all__ = [
    "P2P_PATHS",
    "P2P_PROBE",
    "P2P_SIZES",
    "CopyResult",
    "CudaDevice",
    "LocalCopy",
    "P2pRun",
    "PeerClaims",
    "Rest",
    "Window",
    "WindowLine",
    "p2p_probe",
    "read_p2p",
]

P2P_PROBE = _program("p2p_probe.py")
#: Paths between two GPUs, and the control through host memory.
P2P_PATHS = ("ce-push", "ce-pull", "sm-store", "sm-load", "staged")
#: The ladder: one word, a page, odd addresses, the size from which one library failed, the size from which copies are timed one
#: by one, and one that does not fit any cache.
P2P_SIZES = (4, 4096, 4099, 524288, 1048576, 268435456)

Pair = tuple[str, str]


def p2p_probe(
    *,
    state: str,
    pairs: Sequence[Pair] | None = None,
    paths: Sequence[str] = P2P_PATHS,
    sizes: Sequence[int] = P2P_SIZES,
    repeats: int = 2,
    grace_s: float = 5.0,
    pair_deadline_s: float = 120.0,
    timeout_s: float = 7200.0,
    **more: Any,
) -> Command:
    """The probe as a command for a transport's ``stream``. ``pairs`` None is every ordered pair of what CUDA sees.

    ``state`` is an absolute path there. ``more`` are further options of the program (its DEFAULTS say which); it refuses one that
    it does not know. Root: /dev/kmsg and the state folder are root's.
    """
    options: dict[str, Any] = {
        "state": state,
        "pairs": "all" if pairs is None else [[pci_address(a), pci_address(b)] for a, b in pairs],
        "paths": list(paths),
        "sizes": list(sizes),
        "repeats": repeats,
        "grace_s": grace_s,
        "pair_deadline_s": pair_deadline_s,
        **more,
    }
    # WHY -c and not standard input: there, a line "go" can still be sent.
    argv = ("python3", "-c", P2P_PROBE, json.dumps(options, separators=(",", ":")))
    return Command(argv, timeout_s=timeout_s, root=True)


# ------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU as CUDA has it. ``ordinal`` holds for one process only; ``memory`` is in bytes."""

    pci: str
    ordinal: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """One GPU by itself: its context, copy engine and kernels on its own memory. ``why`` it is not ok."""

    pci: str
    ok: bool
    gbps: tuple[float, ...]
    us: tuple[float, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PeerClaims:
    """What the driver says that ``src`` can do with ``dst``; a claim, not evidence."""

    src: str
    dst: str
    can_access: bool
    rank: int
    access: bool
    atomics: bool


@dataclass(frozen=True, slots=True)
class CopyResult:
    """One path at one size in one process, in one window. See the module's head for the words."""

    phase: str
    src: str
    dst: str
    process: int
    path: str
    size: int
    outcome: str
    code: int
    call: str
    bad: Mapping[str, Any] | None
    gbps: tuple[float, ...]
    us: tuple[float, ...]
    why: str
    window: int  # 0: in none

    @property
    def pair(self) -> Pair:
        return (self.src, self.dst)

    @property
    def initiator(self) -> str:
        """Who does the work and is the requester on the bus: the source pushes and stores, the destination pulls and loads."""
        return self.dst if self.path in ("ce-pull", "sm-load") else self.src


@dataclass(frozen=True, slots=True)
class WindowLine:
    """A line of the kernel's log. ``seq`` is the kernel's own number of it; a hole in them is a lost line."""

    seq: int
    priority: int
    monotonic_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in which only ``pairs`` were active. ``closed_s`` None: it never ended.

    ``unread``: why the probe did not read the kernel's log itself; "" when it did, and ``lines`` are then all of the window.
    ``lost``: how often lines were overwritten before they were read.
    """

    n: int
    phase: str
    pairs: tuple[Pair, ...]
    opened_s: float
    closed_s: float | None = None
    unread: str = "the window never closed"
    lost: int = 0
    lines: tuple[WindowLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Rest:
    """Whether a GPU came to rest after a window; ``busy`` None: it could not be told."""

    window: int
    pci: str
    busy: bool | None
    utilisation: int | None
    watts: float | None
    why: str


@dataclass(frozen=True)
class P2pRun:
    """All that a probe said. ``ended`` False: it was cut off, and ``under_way`` is what had begun then, or when it
    ``stopped`` (None: nothing).

    ``outside`` are kernel lines between windows: they are nobody's. ``unfit``: GPUs that were left alone from some point on.
    """

    boot_id: str = ""
    library: str = ""
    driver: int = 0
    devices: tuple[CudaDevice, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    locals: tuple[LocalCopy, ...] = ()
    claims: Mapping[Pair, PeerClaims] = field(default_factory=dict)
    results: tuple[CopyResult, ...] = ()
    windows: tuple[Window, ...] = ()
    outside: tuple[WindowLine, ...] = ()
    rests: tuple[Rest, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    stopped: str = ""
    ended: bool = False
    end_boot_id: str = ""
    under_way: Mapping[str, Any] | None = None
    cut: bool = False  # the last line is not whole: the machine or the connection went in the middle of it

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(device.pci for device in self.devices)


# ------------------------------------------------------------------------------------------------------------ reading


def read_p2p(lines: Iterable[bytes]) -> P2pRun:
    """The events of a run, from the stream or from its state file. Raises CannotTell for what is not of the probe.

    The last line may be cut: a machine that resets in the middle writes such files.
    """
    reader = _Reader()
    pending: bytes | None = None
    for line in lines:
        if pending is not None:
            reader.feed(pending, last=False)
        pending = line
    if pending is not None:
        reader.feed(pending, last=True)
    return reader.run()


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.locals: list[LocalCopy] = []
        self.claims: dict[Pair, PeerClaims] = {}
        self.results: list[CopyResult] = []
        self.windows: dict[int, dict[str, Any]] = {}
        self.kernel: dict[int | None, list[WindowLine]] = {}
        self.rests: list[Rest] = []
        self.window = 0
        self.closed = True

    def feed(self, line: bytes, *, last: bool) -> None:
        try:
            said = json.loads(line)
            kind = said["event"]
            handler = getattr(self, f"_{kind}", None)
            if handler is None:
                raise KeyError(f"unknown event {kind!r}")
            handler(said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if last and not line.endswith(b"\n"):
                self.values["cut"] = True
                return
            raise CannotTell(f"not an event of the peer-to-peer probe: {line[:200]!r} ({error})") from error

    def run(self) -> P2pRun:
        windows = tuple(
            Window(**{**values, "lines": tuple(self.kernel.get(n, ()))}) for n, values in sorted(self.windows.items())
        )
        return P2pRun(
            locals=tuple(self.locals),
            claims=self.claims,
            results=tuple(self.results),
            windows=windows,
            outside=tuple(self.kernel.get(None, ())),
            rests=tuple(self.rests),
            **self.values,
        )

    def _done(self) -> None:
        self.values["under_way"] = None

    def _refused(self, said: Mapping[str, Any]) -> None:
        self.values["refused"] = str(said["why"])

    def _about(self, said: Mapping[str, Any]) -> None:
        self.values["under_way"] = {k: v for k, v in said.items() if k != "event"}

    def _open(self, said: Mapping[str, Any]) -> None:
        self._done()
        devices = tuple(
            CudaDevice(pci_address(d["pci"]), int(d["ordinal"]), str(d["uuid"]), str(d["name"]), int(d["memory"]))
            for d in said["devices"]
        )
        self.values.update(
            boot_id=said["boot_id"], library=said["library"], driver=said["driver"], devices=devices, options=said["options"]
        )

    def _window(self, said: Mapping[str, Any]) -> None:
        self.window, self.closed = int(said["n"]), False
        pairs = tuple((pci_address(a), pci_address(b)) for a, b in said["pairs"])
        self.windows[self.window] = {
            "n": self.window, "phase": said["phase"], "pairs": pairs, "opened_s": float(said["monotonic_s"])
        }  # fmt: skip

    def _closed(self, said: Mapping[str, Any]) -> None:
        self._done()
        self.closed = True
        self.windows[int(said["n"])].update(
            closed_s=float(said["monotonic_s"]), unread=str(said["unread"]), lost=int(said["lost"])
        )

    def _local(self, said: Mapping[str, Any]) -> None:
        self._done()
        why = "" if said["ok"] else _why(said)
        pci = pci_address(said["pci"])
        self.locals.append(LocalCopy(pci, bool(said["ok"]), tuple(said["gbps"]), tuple(said["us"]), why))

    def _attributes(self, said: Mapping[str, Any]) -> None:
        pair = (pci_address(said["src"]), pci_address(said["dst"]))
        self.claims[pair] = PeerClaims(
            *pair, bool(said["can_access"]), int(said["rank"]), bool(said["access"]), bool(said["atomics"])
        )

    def _result(self, said: Mapping[str, Any]) -> None:
        self._done()
        self.results.append(
            CopyResult(
                phase=str(said["phase"]),
                src=pci_address(said["src"]),
                dst=pci_address(said["dst"]),
                process=int(said["process"]),
                path=str(said["path"]),
                size=int(said["size"]),
                outcome=str(said["outcome"]),
                code=int(said["code"]),
                call=str(said["call"]),
                bad=said["bad"],
                gbps=tuple(float(x) for x in said["gbps"]),
                us=tuple(float(x) for x in said["us"]),
                why="" if said["outcome"] == "ok" else _why(said),
                window=0 if self.closed else self.window,
            )
        )

    def _kernel(self, said: Mapping[str, Any]) -> None:
        line = WindowLine(int(said["seq"]), int(said["priority"]), float(said["monotonic_s"]), str(said["text"]))
        self.kernel.setdefault(said["window"], []).append(line)

    def _idle(self, said: Mapping[str, Any]) -> None:
        self.rests.append(
            Rest(
                self.window,
                pci_address(said["pci"]),
                said["busy"],
                said.get("utilisation"),
                said.get("watts"),
                said.get("why", ""),
            )
        )

    def _stopped(self, said: Mapping[str, Any]) -> None:
        self.values["stopped"] = str(said["why"])

    def _end(self, said: Mapping[str, Any]) -> None:
        if not said["stopped"]:
            self._done()
        self.values.update(ended=True, end_boot_id=said["boot_id"], unfit=said["unfit"], stopped=str(said["stopped"]))


def _why(said: Mapping[str, Any]) -> str:
    """Why something did not go well, in words: bytes, call and code, or the probe's own reason."""
    bad = said.get("bad")
    if bad:
        kind = {"poison": "never arrived", "zeros": "arrived as zeros"}.get(bad["kind"], "are others than were sent")
        away = f"; {bad['outside']} bytes around the destination were overwritten" if bad["outside"] else ""
        return f"{bad['count']} bytes {kind}, the first at offset {bad['first_offset']}{away}"
    if said.get("code"):
        return f"{said['call']} returned {said['code']} {said.get('name', '')}".strip()
    return str(said.get("why", ""))

"""Hold log lines against the signatures: what was found, which of it is the cause, and what this log cannot show.

The judge sees lines in the order of the log. It joins messages that were split, names devices by PCI address only (the
``GPU0`` that the NVIDIA driver prints is its own index and says nothing), counts what was printed plus what the kernel says it
suppressed (then the count is a lower bound), and finds the first cause of each chain. It keeps a handful of lines a finding
however many there were.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from itertools import islice

from proofbook.model import Suggested, Verdict, pci_address, worst
from proofbook.signatures.catalog import Signature, SignatureSet, load
from proofbook.signatures.prefilter import prefilter

#: Lines kept of one finding: the first ones and the last ones.
FIRST_LINES, LAST_LINES = 4, 2
#: Different codes, and different findings, that are told apart before they are lumped together.
MAX_CODES, MAX_FINDINGS = 16, 4096
#: How far apart (seconds) a kernel message and a service message may be to belong to one chain.
CHAIN_S = 900.0
#: How far apart (lines) the parts of a split message, or of one GPU's failed initialisation, may be.
JOIN_LINES, INIT_LINES = 12, 400
UNKNOWN_SAMPLES = 10
#: Lines that are filtered together.
BATCH = 20_000


def stands_for(requester: str, device: str) -> bool:
    """Whether a requester's address may be what a PCIe-to-PCI bridge puts in place of ``device``'s: function 0 of its bus.

    Bus 0 belongs to the root complex, which does no such thing. Source: Linux drivers/pci/search.c, pci_for_each_dma_alias.
    """
    bus = device[:8]
    return requester != device and requester == f"{bus}00.0" and not bus.endswith(":00:")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One message of a log, without its time, host and program name.

    ``source``: ``kernel``, ``service``, ``systemd``, ``journald``, ``tool``, or ``""`` when the log does not say.
    ``n`` is its place in the log; 0 means "after the one before".
    """

    text: str
    monotonic_s: float | None = None
    time: datetime | None = None
    unit: str | None = None
    boot_id: str | None = None
    invocation: str | None = None
    source: str = "kernel"
    n: int = 0
    device: str = ""  # the PCI address that the lines around it name, where the line itself does not

    def at(self, n: int) -> LogLine:
        """The same line at its place in the log. (dataclasses.replace does it too, at several times the cost.)"""
        return LogLine(
            self.text, self.monotonic_s, self.time, self.unit, self.boot_id, self.invocation, self.source, n, self.device
        )


@dataclass(frozen=True)
class LogContext:
    """What is known besides the log.

    ``gpus``: the PCI addresses of the GPUs; empty: learn them from the log. ``passthrough``: those that are meant for
    another driver (vfio-pci). ``iommu``: type of the iommu group by PCI address,
    an empty mapping when there are no groups, None when nobody looked. ``aer_native``: does the operating system own AER.
    ``gaps``: why the log is incomplete, as its reader found. ``boot_id``, ``unit``, ``invocation``, ``since``, ``until``,
    ``since_s``, ``until_s`` (seconds since boot) restrict the judgement; with a window, "the log starts late" is no gap.
    """

    gpus: frozenset[str] = frozenset()
    passthrough: frozenset[str] = frozenset()
    iommu: Mapping[str, str] | None = None
    aer_native: bool | None = None
    gaps: tuple[str, ...] = ()
    boot_id: str = ""
    unit: str = ""
    invocation: str = ""
    since: datetime | None = None
    until: datetime | None = None
    since_s: float | None = None
    until_s: float | None = None
    snippet: bool = False  # a few lines that somebody cut out: they never begin at the boot

    @property
    def windowed(self) -> bool:
        return self.snippet or any(x is not None for x in (self.since, self.until, self.since_s, self.until_s))


@dataclass(frozen=True, slots=True)
class Moment:
    """Where in the log something stands."""

    n: int
    monotonic_s: float | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class SignatureFinding:
    """One signature on one device: how often, from when to when, and whether it is the first cause of its chain.

    ``caused_by`` is the id of the earliest thing that explains it, None for a root. ``fields`` are the pattern's other named
    groups of the first line (address, flags, domain, …). ``at_least``: ``count`` is a lower bound.
    """

    signature: str
    verdict: Verdict
    device: str
    count: int
    at_least: bool
    first: Moment
    last: Moment
    root: bool
    caused_by: str | None
    reason: str
    action: Suggested
    code: str
    lines: tuple[str, ...]
    what_to_do: str = ""
    kind: str = "fault"
    codes: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    boot_id: str = ""
    unit: str = ""
    tail: str = ""  # of a traceback: its last line


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a log says. ``verdict`` is the worst of the findings and of ``unknown_verdict``.

    ``unknown_lines`` are lines that no signature claims although they look like an error, or come from the GPU's driver or an
    IOMMU; ``unknown_verdict`` is the most that they are worth: UNKNOWN when one reads as an error of what is judged here (driver,
    IOMMU, inference server), WARN for an error of any other program, PASS for words of the driver that do not sound like one.
    """

    findings: tuple[SignatureFinding, ...]
    not_observable: tuple[str, ...]
    unknown_lines: int
    unknown_samples: tuple[str, ...]
    benign: Mapping[str, int]
    facts: Mapping[str, int]
    lines: int  # lines that the log has
    gpus: tuple[str, ...]  # PCI addresses known to be GPUs, from the context and the log
    unknown_verdict: Verdict = Verdict.PASS
    boots: tuple[str, ...] = ()  # the boots that the log holds, in its order; empty where it does not tell any apart

    @property
    def verdict(self) -> Verdict:
        said = [f.verdict for f in self.findings]
        if self.unknown_lines:
            said.append(self.unknown_verdict)
        if said:
            return worst(said)
        return Verdict.PASS if self.lines else Verdict.UNKNOWN

    @property
    def roots(self) -> tuple[SignatureFinding, ...]:
        return tuple(f for f in self.findings if f.root)


def judge(lines: Iterable[LogLine], *, context: LogContext | None = None, signatures: SignatureSet | None = None) -> Judgement:
    """Judge lines that were already read. Whole files: :mod:`proofbook.signatures.streams`."""
    judging = Judging(signatures or load(), context or LogContext())
    return judging.judge_all(lines)


# ------------------------------------------------------------------------------------------------ the working parts


@dataclass(slots=True)
class _Group:
    """All lines of one signature on one device, as they are counted."""

    signature: Signature
    device: str
    boot_id: str
    unit: str
    source: str
    first: LogLine
    last: LogLine
    counts: dict[int, int] = field(default_factory=dict)  # by section: the same log may be in a paste twice
    suppressed: int = 0
    at_least: bool = False
    codes: dict[str, int] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    driver: str = ""
    tail: str = ""
    note: str = ""  # what the log as a whole adds to the meaning
    cause: _Group | None = None

    @property
    def count(self) -> int:
        """Lines of the section that has the most: sections may repeat each other, so this is what surely was said."""
        return max(self.counts.values(), default=0)

    def more(self, weight: int, section: int) -> None:
        self.counts[section] = self.counts.get(section, 0) + weight

    def add(self, line: LogLine, weight: int, code: str, section: int = 0) -> None:
        self.more(weight, section)
        self.last = line
        if code and (code in self.codes or len(self.codes) < MAX_CODES):
            self.codes[code] = self.codes.get(code, 0) + weight
        if len(self.head) < FIRST_LINES:
            self.head.append(line.text)
        else:
            self.recent.append(line.text)

    def worsen(self, reading: Signature) -> None:
        """Of several readings of one signature, the worst one stands."""
        if worst([self.signature.verdict, reading.verdict]) is not self.signature.verdict or (
            reading.verdict is self.signature.verdict and _SEVERITY.index(reading.action) > _SEVERITY.index(self.signature.action)
        ):
            self.signature = reading

    def take_over(self, other: _Group) -> None:
        """Merge ``other`` (the same signature, seen before its device was known) into this one."""
        if other.first.n < self.first.n:
            self.first = other.first
        if other.last.n > self.last.n:
            self.last = other.last
        for section, weight in other.counts.items():
            self.more(weight, section)
        for code, times in other.codes.items():
            self.codes[code] = self.codes.get(code, 0) + times
        self.head = (self.head + other.head)[:FIRST_LINES]
        self.recent.extend(other.recent)


@dataclass(slots=True)
class _Open:
    """A message whose further lines may still come."""

    first: LogLine
    parts: list[str]
    last_n: int


@dataclass(slots=True)
class _Acceptance:
    """Accepted drafts over the log: one length each time that the server printed one."""

    values: int = 0
    low: int = 0
    low_in_a_row: int = 0
    best: float = 0.0
    last: float = 0.0

    def add(self, length: float) -> None:
        self.values += 1
        self.low += length < LOW_ACCEPT
        self.low_in_a_row = self.low_in_a_row + 1 if length < LOW_ACCEPT else 0
        self.best = max(self.best, length)
        self.last = length

    def note(self, lines: int) -> str | None:
        """What so many poor lines mean among all; None: nothing, they are the few that every good log has."""
        if self.values <= lines:
            return ""  # every line is poor, or no line says how long
        if self.low_in_a_row >= COLLAPSE_LINES and self.best >= 2 * LOW_ACCEPT:
            return f"The accept length fell from {self.best:g} to {self.last:g} and stayed there: read what it answers."
        if lines < self.values / 2:
            return None
        return f"{lines} of {self.values} readings are that low."


@dataclass(slots=True)
class _Boot:
    """What is kept of one boot: its facts, how it begins, and whether it was shut down in order."""

    label: str
    facts: dict[str, int] = field(default_factory=dict)
    fields: dict[str, dict[str, str]] = field(default_factory=dict)
    first_kernel: LogLine | None = None
    kernel_lines: int = 0
    kernel_lines_before: int = 0  # in earlier sections of the paste
    systemd_lines: int = 0
    lines: int = 0
    last: LogLine | None = None


_BDF = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
#: Told of every known fact as it is read: ``(signature id, match, line)``.
Listener = Callable[[str, re.Match[str], LogLine], None]

_REPEATED = re.compile(r"^message repeated (\d+) times: \[ ?(.*)\]$")
_LAST_REPEATED = re.compile(r"^last message repeated (\d+) times$")
#: journalctl's own lines between two boots; and the kernel's first one.
_BOOT_MARK = re.compile(r"^-- (?:Boot (?P<id>[0-9a-f]{32}) --|Reboot --)")
_BOOT_LINE = "Linux version "
#: A clock that falls back to less than this (seconds since boot) is a new boot's.
BOOT_PHASE_S = 30.0
_BRIDGE = re.compile(rf"pci (?P<pci>{_BDF}): PCI bridge to \[bus (?P<first>[0-9a-f]{{2}})(?:-(?P<last>[0-9a-f]{{2}}))?\]")
_REPORTED = re.compile(rf"pcieport (?P<port>{_BDF}): AER: .*(?:received: |received from )(?P<pci>{_BDF})")
#: A port whose bridge lines are not in the log is taken for the one above a GPU that dies within so many seconds or lines.
PORT_S, PORT_LINES = 60.0, 50
#: Below this accept length speculation costs more than it gives; so many low readings in a row are a collapse.
LOW_ACCEPT, COLLAPSE_LINES = 1.2, 3
_ACCEPT = re.compile(r"(?:accept len|Mean acceptance length): (?P<length>\d+\.\d+)")
_SUPPRESSED = re.compile(r"(?:^|\s)(?P<function>\w+): (?P<count>\d+) callbacks suppressed")
_RM_INDEX = re.compile(r"NVRM: GPU(\d+) ")
_INIT_NAMED = re.compile(r"NVRM: GPU (?P<pci>[0-9a-fA-F:.]+): (?:RmInitAdapter|rm_init_adapter) failed")
_CLASS = re.compile(
    rf"pci (?P<pci>{_BDF}): \[(?P<vendor>[0-9a-f]{{4}}):[0-9a-f]{{4}}\] type \S+ class 0x(?P<class>[0-9a-f]{{6}})"
)
_NVRM_DEVICE = re.compile(
    r"NVRM: GPU at PCI:(?P<pci>[0-9a-fA-F:.]+): GPU-"
    r"|NVRM: Xid \(PCI:(?P<xid>[0-9a-fA-F:.]+)"
    rf"|NVRM: GPU (?P<gpu>{_BDF})"
    rf"|NVRM: The NVIDIA GPU (?P<probed>{_BDF})"
    rf"|^nvidia (?P<bound>{_BDF}):"
)
_OTHER_DRIVER = re.compile(rf"^(?P<driver>[a-z][\w-]*) (?P<pci>{_BDF}):")
#: Prefixes that name no owner: the PCI core, its services, and passthrough (which may well hold a GPU).
_NO_OWNER = {"pci", "pcieport", "vfio-pci", "iommu", "nvidia", "shpchp", "pcie_mp2_amd"}
_KERNEL = frozenset({"kernel"})
#: Signatures that name the port above the device that they are about; and how far below (bus numbers) that one may be.
_OF_PORTS = {"dpc-triggered", "pciehp-link-down"}
MOST_BUSES = 16
_ZOMBIE = "sglang-zombie"
_TRACEBACK = "Traceback (most recent call last):"
_LOG_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z0-9 ]+)?\] ")


class Judging:
    """A judgement under way: ``feed`` lines in order, then ``finish`` once."""

    def __init__(self, signatures: SignatureSet, context: LogContext, listen: Listener | None = None) -> None:
        self.signatures = signatures
        self.context = context
        self._listen = listen
        self._join_words = tuple({anchor for join in signatures.joins for anchor in join.anchors})
        self._groups: dict[tuple[str, str, str, str], _Group] = {}
        self._pending: dict[str, _Group] = {}  # initialisation messages that name no device yet
        self._pending_index: set[str] = set()
        self._open: dict[str, _Open] = {}
        self._suppressed: dict[str, tuple[int, int]] = {}  # function: (count, place) waiting for the next line of its signature
        self._traceback: dict[str, tuple[LogLine, _Group | None, list[str]]] = {}
        self._unknown = 0
        self._unknown_verdict = Verdict.PASS
        self._samples: list[str] = []
        self._benign: dict[str, int] = {}
        self._boots: dict[str, _Boot] = {}
        self._boot = ""  # the boot that lines without an id of their own belong to
        self._clock: float | None = None
        self._bridges: dict[str, tuple[int, int]] = {}  # port: the buses below it
        self._reported: set[tuple[str, str]] = set()  # (port, the device below it that it spoke for)
        self._units: set[str] = set()  # units by their true name; a program's name in a text log is only a guess at one
        self._latest: tuple[int, list[_Group]] = (0, [])
        self._accept = _Acceptance()
        self._section = 0
        self._started_at = 0  # where the inference server was started last
        self._healthy: LogLine | None = None  # the last answer of the server's health endpoint
        self._gaps: list[str] = list(context.gaps)
        self._gpus: set[str] = {pci_address(p) for p in context.gpus}
        self._listed: set[str] = set()  # by nvidia-smi
        self._bound: set[str] = set()  # to the nvidia driver, as lspci has it
        self._others: dict[str, str] = {}  # PCI address: driver or class that shows it is no GPU
        self._n = 0
        self._lines = 0
        self._overflow = False

    # ------------------------------------------------------------------------------------------ feeding

    def judge_all(self, lines: Iterable[LogLine]) -> Judgement:
        """Feed all lines that the filter lets through, and finish."""
        candidates = prefilter(self.signatures.anchors)
        total, n = 0, 0
        numbered = iter(lines)
        while batch := list(islice(numbered, BATCH)):
            ours = []
            for line in batch:
                n = line.n or n + 1
                if self._in_scope(line):
                    ours.append(line if line.n else line.at(n))
            if ours and not total:
                self.begins_with(ours[0])
            total += len(ours)
            # WHY: a message may hold newlines; its parts are told apart by feed(), and must count as one line here.
            folded = "\n".join(line.text.replace("\n", "\v") for line in ours).encode("utf-8", "replace")
            for at, _, _, anchors in candidates.lines(folded):
                self.feed(ours[at], anchors)
        return self.finish(lines=total)

    def feed(self, line: LogLine, hint: Iterable[str] | None = None) -> None:
        """One more line. ``hint``: the anchors that the pre-filter saw in it (None: not filtered)."""
        self._n = line.n or self._n + 1
        if line.n != self._n:
            line = line.at(self._n)
        if not self._in_scope(line):
            return
        if "\n" in line.text:
            for part in line.text.split("\n"):
                if part:
                    self._one(replace(line, text=part), None)
            return
        self._one(line, hint)

    def begins_with(self, line: LogLine) -> None:
        """The log's first line, told once before any other, where the filter may keep it back."""
        boot = self._boot_of(line)
        if line.source in ("kernel", "") and boot.first_kernel is None and self._in_scope(line):
            boot.first_kernel = line
            boot.kernel_lines += line.source == "kernel"

    def begin_section(self) -> None:
        """What follows is another log, or another look at the same one: nothing is counted twice, no message goes on into it."""
        for key in list(self._open):
            self._close(key)
        self._traceback.clear()
        self._section += 1
        self._clock = None
        boot = self._boots.get(self._boot)
        if boot is not None:
            boot.kernel_lines_before, boot.kernel_lines = boot.kernel_lines_before + boot.kernel_lines, 0

    def _in_scope(self, line: LogLine) -> bool:
        c = self.context
        if c.boot_id and line.boot_id and line.boot_id.replace("-", "") != c.boot_id.replace("-", ""):
            return False
        if c.unit and line.unit and line.unit != c.unit:
            return False
        if c.invocation and line.invocation and line.invocation != c.invocation:
            return False
        if line.time is not None and ((c.since and line.time < c.since) or (c.until and line.time > c.until)):
            return False
        s = line.monotonic_s
        return s is None or not ((c.since_s is not None and s < c.since_s) or (c.until_s is not None and s > c.until_s))

    def _one(self, line: LogLine, hint: Iterable[str] | None) -> None:
        self._lines += 1
        if self._marks_a_boot(line):
            return
        if self._boot and not line.boot_id:
            line = replace(line, boot_id=self._boot)
        boot = self._boot_of(line)
        boot.lines += 1
        boot.last = line
        boot.systemd_lines += line.source == "systemd"
        if line.source in ("kernel", ""):
            boot.kernel_lines += line.source == "kernel"
            if boot.first_kernel is None:
                boot.first_kernel = line
            self._learn(line.text)
        if line.invocation and line.unit:
            self._units.add(line.unit)
        folded = _LAST_REPEATED.match(line.text)
        if folded:
            if self._latest[0] == line.n - 1:
                for group in self._latest[1]:
                    group.more(int(folded[1]), self._section)
            return
        weight = 1
        repeated = _REPEATED.match(line.text)
        if repeated:
            weight, line, hint = int(repeated[1]), replace(line, text=repeated[2]), None
        self._expire(line)
        if self._in_traceback(line):
            return
        if self._joined(line):
            return
        self._judge_text(line, weight, hint)

    # ------------------------------------------------------------------------------------------ boots

    def _boot_of(self, line: LogLine) -> _Boot:
        label = (line.boot_id or "").replace("-", "") or self._boot
        boot = self._boots.get(label)
        if boot is None:
            boot = self._boots[label] = _Boot(label)
        return boot

    def _marks_a_boot(self, line: LogLine) -> bool:
        """Whether the line only says that a new boot begins; a kernel's first line says so too, and is judged as any other."""
        if line.boot_id:
            return False
        mark = _BOOT_MARK.match(line.text)
        if mark:
            self._new_boot(mark["id"] or "")
            return True
        seconds = line.monotonic_s if line.source == "kernel" else None
        boot = self._boots.get(self._boot)
        fell_back = seconds is not None and self._clock is not None and seconds < BOOT_PHASE_S < self._clock - seconds
        begins = line.source in ("kernel", "") and line.text.startswith(_BOOT_LINE)
        if boot is not None and boot.lines and (fell_back or (begins and boot.kernel_lines)):
            self._new_boot("")
        if seconds is not None:
            self._clock = seconds
        return False

    def _new_boot(self, boot_id: str) -> None:
        now = self._boots.get(self._boot)
        if now is not None and now.lines and not self._boot:
            self._relabel("", "boot 1")
        elif now is not None and not now.lines and not self._boot:
            del self._boots[""]
        for key in list(self._open):
            self._close(key)
        self._clock = None
        self._boot = boot_id or f"boot {len([b for b in self._boots.values() if b.lines]) + 1}"
        self._boots.setdefault(self._boot, _Boot(self._boot))

    def _relabel(self, old: str, new: str) -> None:
        """What was taken for the only boot turns out to be the first of several."""
        boot = self._boots.pop(old)
        boot.label = new
        self._boots = {new: boot, **self._boots}
        for key, group in list(self._groups.items()):
            if key[2] == old:
                group.boot_id = new
                del self._groups[key]
                self._groups[key[0], key[1], new, key[3]] = group
        for group in self._pending.values():
            group.boot_id = group.boot_id or new

    # ---------------------------------------------------------------------------------------- devices and ports

    def _learn(self, text: str) -> None:
        """Which devices are GPUs, which are surely not, and which port is above which bus."""
        # WHY: of a long log most lines hold none of these words, and looking for a word is far cheaper than for a pattern.
        bridge = _BRIDGE.search(text) if "[bus " in text else None
        if bridge:
            self.learn_bridge(bridge["pci"], int(bridge["first"], 16), int(bridge["last"] or bridge["first"], 16))
            return
        reported = _REPORTED.search(text) if "AER: " in text else None
        if reported:
            self._reported.add((reported["port"], reported["pci"]))
        found = _CLASS.search(text) if "] type " in text else None
        if found:
            address = found["pci"]
            # WHY: 0x03 is the display class; a BMC's VGA device is one too, so the vendor decides.
            if found["class"].startswith("03") and found["vendor"] == "10de":
                self._gpus.add(address)
            else:
                self._others.setdefault(address, f"class 0x{found['class']}")
            return
        nvidia = _NVRM_DEVICE.search(text) if "NVRM: " in text or text.startswith("nvidia ") else None
        if nvidia:
            address = _address(next(g for g in nvidia.groups() if g))
            if address:
                self._gpus.add(address)
            return
        other = _OTHER_DRIVER.match(text)
        if other and other["driver"] not in _NO_OWNER:
            self._others[other["pci"]] = other["driver"]

    def answered(self, line: LogLine) -> None:
        """The server's health endpoint answered here; told from outside, because such lines are too many to judge one by one."""
        if self._healthy is None or line.n > self._healthy.n:
            self._healthy = line

    def learn_bridge(self, port: str, first: int, last: int) -> None:
        """Told by the kernel at boot, or by lspci: these buses are below this port."""
        self._bridges[port] = (first, last)

    def learn_gpu(self, address: str) -> None:
        """Told by a tool's answer: this address is a GPU's."""
        self._gpus.add(pci_address(address))

    def learn_row(self, address: str) -> None:
        """Told by nvidia-smi: the driver has this GPU in its list."""
        self.learn_gpu(address)
        self._listed.add(pci_address(address))

    def learn_bound(self, address: str) -> None:
        """Told by lspci: the nvidia driver holds this GPU."""
        self._bound.add(pci_address(address))

    def learn_other(self, address: str, what: str) -> None:
        """Told by a tool's answer: this address is no GPU's."""
        self._others.setdefault(pci_address(address), what)

    def _above(self, port: str, device: str) -> bool:
        """Whether ``port`` is a bridge on the way to ``device``."""
        if (port, device) in self._reported:
            return True
        buses = self._bridges.get(port)
        return buses is not None and port[:4] == device[:4] and buses[0] <= int(device[5:7], 16) <= buses[1]

    def _same_place(self, earlier: _Group, later: _Group) -> bool:
        """Whether a fault at one device can be felt at another: it is the same one, or the port above it."""
        a, b = earlier.device, later.device
        if not a or not b or a == b or self._above(a, b):
            return True
        port = earlier.driver == "pcieport" or earlier.signature.id in _OF_PORTS
        if not port or a in self._bridges or any(p == a for p, _ in self._reported):
            return False
        if a[:4] != b[:4] or not 0 < int(b[5:7], 16) - int(a[5:7], 16) <= MOST_BUSES:
            return False
        first, second = earlier.first.monotonic_s, later.first.monotonic_s
        near = second - first <= PORT_S if first is not None and second is not None else False
        if near or later.first.n - earlier.first.n <= PORT_LINES:
            later.note = later.note or f"That {a} is the port above it is taken from time and bus number; no line says so."
            return True
        return False

    # ------------------------------------------------------------------------------- messages over several lines

    def _expire(self, line: LogLine) -> None:
        if self._open:
            for key in [k for k, o in self._open.items() if line.n - o.last_n > JOIN_LINES]:
                self._close(key)

    def _joined(self, line: LogLine) -> bool:
        """Take the line into a message that is split over lines, if it begins or continues one."""
        if line.source not in ("kernel", "") or not any(word in line.text for word in self._join_words):
            return False
        for join in self.signatures.joins:
            if not any(a in line.text for a in join.anchors):
                continue
            key = f"{join.id}|{line.boot_id or ''}"
            if join.starts.search(line.text):
                self._close(key)
                self._open[key] = _Open(line, [line.text], line.n)
                return True
            under_way = self._open.get(key)
            if under_way and len(under_way.parts) < join.lines and join.continues.search(line.text):
                under_way.parts.append(join.strip.sub("", line.text))
                under_way.last_n = line.n
                return True
        return False

    def _close(self, key: str) -> None:
        under_way = self._open.pop(key, None)
        if under_way:
            whole = " ".join(p.strip() for p in under_way.parts)
            self._judge_text(replace(under_way.first, text=whole), 1, None)

    def _in_traceback(self, line: LogLine) -> bool:
        """Follow a Python traceback to its last line; that line names the error."""
        if not self._traceback:
            return False
        key = f"{line.unit or ''}|{line.invocation or ''}|{line.boot_id or ''}"
        under_way = self._traceback.get(key)
        if under_way is None or line.source not in ("service", ""):
            return False
        _, group, inner = under_way
        text = _LOG_PREFIX.sub("", line.text)
        if text.startswith((" ", "\t")) or not text.strip() or text.startswith(("During handling of", "The above exception was")):
            if len(inner) < 400:
                inner.append(text)
            return True
        if text.startswith(_TRACEBACK):
            return True
        del self._traceback[key]
        if group is not None:
            group.tail = text[:500]
        return False  # the last line itself is judged as any other

    def _opens_traceback(self, line: LogLine, group: _Group | None) -> None:
        if _TRACEBACK in line.text:
            key = f"{line.unit or ''}|{line.invocation or ''}|{line.boot_id or ''}"
            self._traceback.setdefault(key, (line, group, []))

    # ---------------------------------------------------------------------------------------------- judging

    def _judge_text(self, line: LogLine, weight: int, hint: Iterable[str] | None) -> None:
        if " callbacks suppressed" in line.text:
            self._note_suppression(line)
        found = self.signatures.match(line.text, line.source, hint)
        real = [f for f in found if f[0].kind != "benign"] or found
        if not line.source and any(s.sources == _KERNEL for s, _ in real):
            self._boot_of(line).kernel_lines += 1
        touched = []
        for signature, match in real:
            group = self._record(signature, match, line, weight)
            if group is not None:
                touched.append(group)
        if touched:
            self._latest = (line.n, touched)
        if not real:
            self._perhaps_unknown(line, weight)
            self._opens_traceback(line, None)
        named = _INIT_NAMED.search(line.text) if "dapter failed" in line.text or "_adapter" in line.text else None
        if named and _address(named["pci"]):
            self._adopt(_address(named["pci"]), line)

    def _note_suppression(self, line: LogLine) -> None:
        found = _SUPPRESSED.search(line.text)
        if not found:
            return
        function, count = found["function"], int(found["count"])
        if function in self.signatures.suppressions:
            before, _ = self._suppressed.get(function, (0, 0))
            self._suppressed[function] = (before + count, line.n)
        else:
            self._gap(f"the kernel suppressed {count} messages of {function}")

    def _perhaps_unknown(self, line: LogLine, weight: int) -> None:
        if _SUPPRESSED.search(line.text):
            return
        for suspicion in self.signatures.suspicions:
            if line.source and suspicion.sources and line.source not in suspicion.sources:
                continue
            if any(a in line.text for a in suspicion.anchors) and suspicion.pattern.search(line.text):
                self._unknown += weight
                self._unknown_verdict = worst([self._unknown_verdict, suspicion.worth(line.text)])
                if len(self._samples) < UNKNOWN_SAMPLES and line.text not in self._samples:
                    self._samples.append(line.text)
                return

    def _record(self, signature: Signature, match: re.Match[str], line: LogLine, weight: int) -> _Group | None:
        groups = {k: v for k, v in match.groupdict().items() if v is not None}
        meant = "passthrough" in signature.tags and 0 < int(groups.get("devices", 0)) <= len(self.context.passthrough)
        if signature.kind == "benign" or meant:
            self._benign[signature.id] = self._benign.get(signature.id, 0) + weight
            return None
        if signature.kind == "fact":
            self._fact(signature, match, groups, line, weight)
            return None
        device = self._device(groups) or line.device
        code = groups.pop("code", "") or groups.pop("code2", "")  # two ways to say it, in one pattern
        driver = groups.pop("driver", "")
        stated = groups.pop("count", "")
        if stated.isdigit() and signature.kind != "gap":
            weight *= int(stated)
        unit = groups.get("unit") or line.unit or ""
        if groups.get("unit"):
            self._units.add(unit)
        if signature.init and not device:
            group = self._pending.get(signature.id)
            if group is None:
                group = self._pending[signature.id] = self._new(signature, "", line, unit)
            index = _RM_INDEX.search(line.text)
            if index:
                self._pending_index.add(index[1])
        else:
            group = self._group(signature, device, line, unit)
        if not group.count:
            group.fields, group.driver = groups, driver
            group.signature = signature.read(line.text)
        elif signature.variants:
            group.worsen(signature.read(line.text))
        group.add(line, weight, code, self._section)
        self._settle_suppression(signature, group)
        self._opens_traceback(line, group)
        if signature.kind == "gap":
            self._gap(f"{signature.meaning} ({line.text.strip()[:160]})")
        return group

    def _fact(self, signature: Signature, match: re.Match[str], groups: dict[str, str], line: LogLine, weight: int) -> None:
        boot = self._boot_of(line)
        boot.facts[signature.id] = boot.facts.get(signature.id, 0) + weight
        boot.fields.setdefault(signature.id, {}).update(groups)
        if signature.id == "sglang-args":
            self._started_at = line.n
        if "accept" in signature.tags:
            accepted = _ACCEPT.search(line.text)
            if accepted:
                self._accept.add(float(accepted["length"]))
        if self._listen is not None:
            self._listen(signature.id, match, line)

    def _new(self, signature: Signature, device: str, line: LogLine, unit: str) -> _Group:
        return _Group(signature, device, (line.boot_id or "").replace("-", ""), unit, line.source, line, line)

    def _group(self, signature: Signature, device: str, line: LogLine, unit: str) -> _Group:
        key = (signature.id, device, (line.boot_id or "").replace("-", ""), unit)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= MAX_FINDINGS:
                self._overflow = True
                key = (signature.id, "", "", "")
                group = self._groups.get(key)
                if group is not None:
                    return group
                device, unit = "", ""
            group = self._groups[key] = self._new(signature, device, line, unit)
        return group

    @staticmethod
    def _device(groups: dict[str, str]) -> str:
        for name in ("pci", "pci2", "pci3"):
            text = groups.pop(name, "")
            if text and _address(text):
                return _address(text)
        return ""

    def _settle_suppression(self, signature: Signature, group: _Group) -> None:
        # WHY: the kernel prints "N callbacks suppressed" when the next message of the same device may pass again, so the
        # count belongs to the device that the next line names.
        for function, (count, _) in list(self._suppressed.items()):
            if signature.id in self.signatures.suppressions[function].of:
                group.suppressed += count
                group.at_least = True
                del self._suppressed[function]

    def _adopt(self, device: str, line: LogLine) -> None:
        """The initialisation that just failed names its device: what was said on the way there was about it."""
        pending, self._pending = self._pending, {}
        several = len(self._pending_index) > 1
        self._pending_index = set()
        for group in pending.values():
            near = line.n - group.last.n <= INIT_LINES
            owner = device if near and not several else ""
            target = self._group(group.signature, owner, group.first, group.unit)
            if not target.count:
                target.fields, target.driver = group.fields, group.driver
            target.take_over(group)

    def _gap(self, reason: str) -> None:
        if reason not in self._gaps and len(self._gaps) < 50:
            self._gaps.append(reason)

    # ---------------------------------------------------------------------------------------------- finishing

    def finish(self, *, lines: int = 0, gaps: Iterable[str] = ()) -> Judgement:
        """Close what is open, find the causes, and say what the log cannot show.

        ``lines``: how many lines the log has, where only some were fed; ``gaps``: holes that its reader found.
        """
        for gap in gaps:
            self._gap(gap)
        for key in list(self._open):
            self._close(key)
        for group in self._pending.values():
            self._group(group.signature, "", group.first, group.unit).take_over(group)
        self._pending = {}
        self._last_suppressions()
        self._weigh_acceptance()
        groups = self._without_details(sorted(self._groups.values(), key=lambda g: (g.first.n, _RANK[g.signature.kind])))
        zombie = self._zombie(groups)
        if zombie is not None:
            groups.append(zombie)
        self._chain(groups)
        lost = any(g.signature.kind == "gap" and g.source in ("kernel", "journald", "") for g in groups)
        for group in groups:
            # WHY: a log that lost messages may have lost more of these.
            group.at_least = group.at_least or (lost and group.signature.kind != "gap" and group.source == "kernel")
        findings = tuple(self._finding(g) for g in groups)
        return Judgement(
            findings=findings,
            not_observable=tuple(self._not_observable(findings)),
            unknown_lines=self._unknown,
            unknown_samples=tuple(self._samples),
            benign=dict(self._benign),
            facts=self._all_facts(),
            lines=max(lines, self._lines),
            gpus=tuple(sorted(self._gpus)),
            unknown_verdict=self._unknown_verdict,
            boots=tuple(b.label for b in self._boots.values() if b.label and b.lines),
        )

    def unlisted_gpus(self) -> tuple[str, ...]:
        """GPUs that the nvidia driver holds and that no answer of nvidia-smi lists, by address.

        None when the two have no GPU in common: then they are of two machines.
        """
        return tuple(sorted(self._bound - self._listed)) if self._bound & self._listed else ()

    def unclean_boots(self) -> list[SignatureFinding]:
        """Boots that another one follows and that were not shut down in order, where systemd's own lines would have said so."""
        boots = [b for b in self._boots.values() if b.lines]
        out = []
        for boot in boots[:-1]:
            if not boot.systemd_lines or "boot-shutdown" in boot.facts or boot.last is None:
                continue
            at = Moment(boot.last.n, boot.last.monotonic_s, boot.last.time)
            out.append(
                SignatureFinding(
                    signature="boot-ended-unclean",
                    verdict=Verdict.UNKNOWN,
                    device="",
                    count=1,
                    at_least=False,
                    first=at,
                    last=at,
                    root=False,
                    caused_by=None,
                    reason=f"{boot.label} ends without a shutdown, and the next one begins: a reset or a loss of power. "
                    "What came last before it may never have been written.",
                    action=Suggested.LOOK,
                    code="",
                    lines=(boot.last.text,),
                    what_to_do="Read the BMC's event log and the console of that time; an empty kernel log proves nothing here.",
                    kind="gap",
                    boot_id=boot.label,
                )
            )
        return out

    def _all_facts(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for boot in self._boots.values():
            for name, times in boot.facts.items():
                out[name] = out.get(name, 0) + times
        return out

    def _weigh_acceptance(self) -> None:
        """One step with few accepted drafts is nothing; most of them, or all since some moment, is a fault."""
        for key, group in list(self._groups.items()):
            if "accept" not in group.signature.tags:
                continue
            note = self._accept.note(group.count)
            if note is None:
                del self._groups[key]
            else:
                group.note = note

    def _zombie(self, groups: list[_Group]) -> _Group | None:
        """The scheduler died, nothing ended the server, and its health endpoint still answers: alive to look at, dead to use."""
        if self._healthy is None or any(g.signature.id == _ZOMBIE for g in groups):
            return None
        died = [g for g in groups if "scheduler-died" in g.signature.tags]
        ended = [g for g in groups if g.signature.tags & {"unit-ended", "self-kill", "unit-failed"}]
        after = max((g.last.n for g in died), default=None)
        if after is None or self._healthy.n <= after or any(g.last.n >= after for g in ended):
            return None
        if self._started_at > after:
            return None
        group = self._new(self.signatures[_ZOMBIE], "", self._healthy, died[0].unit)
        group.add(self._healthy, 1, "")
        group.note = "No process that was seen here says <defunct>: it follows from answers after the death of the scheduler."
        return group

    def _last_suppressions(self) -> None:
        """A suppression at the end of the log belongs to the device that spoke last before it."""
        for function, (count, place) in self._suppressed.items():
            ids = self.signatures.suppressions[function].of
            before = [g for g in self._groups.values() if g.signature.id in ids and g.last.n <= place]
            if before:
                last = max(before, key=lambda g: g.last.n)
                last.suppressed += count
                last.at_least = True
            else:
                self._gap(f"the kernel suppressed {count} messages of {function}, and the log holds none of them")

    @staticmethod
    def _without_details(groups: list[_Group]) -> list[_Group]:
        ids = {g.signature.id for g in groups}
        return [g for g in groups if not (g.signature.detail_of and ids & set(g.signature.detail_of))]

    def _chain(self, groups: list[_Group]) -> None:
        """For each group, the earliest thing that explains it; ``groups`` are in the order of the log."""
        explains = {g.signature.id: self.signatures.expand(g.signature.caused_by) for g in groups}
        # Only wall time orders messages of two logs; inside one log the place is exact. Of two readings of one line, the
        # one that says so (overlaps) goes first: it corrects the other.
        mixed = len({g.source for g in groups}) > 1 and all(g.first.time is not None for g in groups)
        groups.sort(
            key=lambda g: (
                g.first.time.timestamp() if mixed and g.first.time is not None else 0.0,
                g.first.n,
                not g.signature.overlaps,
                _RANK[g.signature.kind],
            )
        )
        for i, group in enumerate(groups):
            previous = group.fields.get("previous")
            if previous:
                explains[group.signature.id] |= {f"xid-{previous}"}
            for earlier in groups[:i]:
                if earlier.signature.id in explains[group.signature.id] and self._may_cause(earlier, group):
                    group.cause = earlier
                    break

    def _may_cause(self, earlier: _Group, later: _Group) -> bool:
        if earlier.boot_id and later.boot_id and earlier.boot_id != later.boot_id:
            return False
        if not self._same_place(earlier, later):
            return False
        if earlier.unit != later.unit and {earlier.unit, later.unit} <= self._units:
            return False
        a, b = earlier.first, later.first
        if earlier.source == later.source:
            return a.n <= b.n
        if a.time is not None and b.time is not None:
            return 0 <= (b.time - a.time).total_seconds() <= CHAIN_S
        if a.monotonic_s is not None and b.monotonic_s is not None:
            return 0 <= b.monotonic_s - a.monotonic_s <= CHAIN_S
        return a.n <= b.n

    def _finding(self, group: _Group) -> SignatureFinding:
        signature = group.signature
        verdict, action, what = signature.verdict, signature.action, signature.what_to_do
        words = signature.meaning
        if signature.requester and group.device:
            owner = self._owner(group)
            if owner:
                words = f"{words} The requester is no GPU ({owner})."
                if verdict is Verdict.FAIL:
                    verdict, action, what = Verdict.WARN, Suggested.LOOK, "Look at this device; it says nothing about the GPUs."
            elif behind := self._behind(group.device):
                words += f" A PCIe-to-PCI bridge gives this address to all that is behind it: {', '.join(behind)}."
            elif group.device not in self._gpus and group.driver not in ("nvidia", "pcieport"):
                words += " This log does not say what kind of device it is."
        if group.note:
            words += f" {group.note}"
        cause = group.cause
        if cause is None and signature.kind == "consequence":
            words += " It follows something else; what, this log does not show."
        count = group.count + group.suppressed
        group.at_least = group.at_least or len(group.counts) > 1
        codes = tuple(group.codes)
        return SignatureFinding(
            signature=signature.id,
            verdict=verdict,
            device=group.device,
            count=count,
            at_least=group.at_least or bool(group.suppressed),
            first=Moment(group.first.n, group.first.monotonic_s, group.first.time),
            last=Moment(group.last.n, group.last.monotonic_s, group.last.time),
            root=cause is None and signature.kind in ("fault", "consequence", "detail"),
            caused_by=None if cause is None else cause.signature.id,
            reason=_reason(words, group, count, cause, codes),
            action=action,
            code=codes[0] if codes else "",
            lines=(*group.head, *group.recent),
            what_to_do=what,
            kind=signature.kind,
            codes=codes,
            fields=group.fields,
            boot_id=group.boot_id,
            unit=group.unit,
            tail=group.tail,
        )

    def _behind(self, requester: str) -> list[str]:
        """The GPUs that a bridge may have given this address to; [] when it is a GPU's own."""
        return [] if requester in self._gpus else sorted(gpu for gpu in self._gpus if stands_for(requester, gpu))

    def _owner(self, group: _Group) -> str:
        """What shows that the device is no GPU; ``""`` when it is one, or nothing is known."""
        if group.device in self._gpus or group.driver == "nvidia":
            return ""
        if group.driver and group.driver not in _NO_OWNER:
            return group.driver
        buses = self._bridges.get(group.device)
        if buses is not None and self._gpus:
            below = [g for g in self._gpus if self._above(group.device, g)]
            return "" if below else "a port with no GPU below it"
        if group.device in self._others:
            return self._others[group.device]
        if self._behind(group.device):
            return ""
        return "it is not among the host's GPUs" if self.context.gpus else ""

    # -------------------------------------------------------------------------------- what cannot be seen

    def _not_observable(self, findings: tuple[SignatureFinding, ...]) -> list[str]:
        out = list(self._gaps)
        boots = [b for b in self._boots.values() if b.lines or b.first_kernel is not None]
        several = sum(bool(b.lines) for b in boots) > 1
        for boot in boots:
            if boot.kernel_lines + boot.kernel_lines_before and boot.first_kernel is not None:
                own = tuple(f for f in findings if f.boot_id == boot.label)
                about = f"{boot.label}: " if several and boot.label else ""
                out += [about + text for text in self._not_observable_in(boot, boot.first_kernel, own)]
        facts = self._all_facts()
        fields: dict[str, dict[str, str]] = {}
        for boot in boots:
            fields.update(boot.fields)
        asked = fields.get("sglang-args", {}).get("algorithm", "None")
        if asked not in ("None", "null", "") and "sglang-decode" not in facts:
            out.append(
                f"whether drafts are accepted: speculation ({asked}) is asked for, but no Decode line was printed yet "
                "(one comes every 40 decode steps)"
            )
        if self._overflow:
            out.append(f"more than {MAX_FINDINGS} different findings; the rest is lumped together without its device")
        return out

    def _not_observable_in(self, boot: _Boot, first: LogLine, findings: tuple[SignatureFinding, ...]) -> list[str]:
        """What the kernel's log of one boot cannot show."""
        c, facts = self.context, boot.facts
        out = []
        if "kernel-boot-start" not in facts and not c.windowed:
            at = first.monotonic_s
            since = f" (its first line is {at:.0f} s after the boot)" if at is not None and at >= 1 else ""
            out.append(f"the log does not begin at the boot{since}: what came before cannot be seen")
        out += self._no_iommu_faults(facts, boot.fields, findings)
        if c.aer_native is False:
            out.append("AER errors: the operating system does not own AER on this machine (_OSC), so no line is no evidence")
        elif c.aer_native is None and "osc-no-aer" in facts and "osc-aer-granted" not in facts:
            out.append("AER errors: the firmware keeps AER to itself (_OSC), so no line is no evidence")
        elif "aer-off" in facts:
            out.append("AER errors: pci=noaer is on the kernel command line")
        return out

    def _no_iommu_faults(
        self, facts: Mapping[str, int], fields: Mapping[str, Mapping[str, str]], findings: tuple[SignatureFinding, ...]
    ) -> list[str]:
        if any("iommu-fault" in self.signatures[f.signature].tags for f in findings):
            return []
        types = self.context.iommu
        if types is not None:
            if not types:
                return ["IOMMU faults: there are no iommu groups (no IOMMU, or off), so none can be logged"]
            watched = {pci_address(p) for p in self.context.gpus} or set(types)
            identity = sorted(d for d in watched if types.get(d) == "identity")
            if identity:
                return [f"IOMMU faults of {', '.join(identity)}: an identity domain translates nothing, so none can be logged"]
            return []
        domain = fields.get("iommu-default-domain", {}).get("type", "")
        if domain == "Passthrough":
            return ["IOMMU faults: the default domain type is Passthrough, so none are expected; read the group types"]
        off = "iommu-off-option" in facts
        if off or ("kernel-boot-start" in facts and "iommu-group-added" not in facts and not self.context.windowed):
            return ["IOMMU faults: no device was added to an iommu group in this boot (no IOMMU, or off), so none can be logged"]
        return []


#: Actions from the mildest to the most drastic.
_SEVERITY = tuple(Suggested)
_RANK = {"fault": 0, "consequence": 1, "detail": 2, "gap": 3, "fact": 4, "benign": 5}


@lru_cache(maxsize=4096)
def _address(text: str) -> str:
    """A PCI address, normalised; ``""`` for what is none, as the stump of a line that was cut."""
    try:
        return pci_address(text)
    except ValueError:
        return ""


def _reason(words: str, group: _Group, count: int, cause: _Group | None, codes: tuple[str, ...]) -> str:
    where = f"{group.device}: " if group.device else f"{group.unit}: " if group.unit else ""
    times = f"{'at least ' if group.suppressed or group.at_least else ''}{count} line{'s' if count != 1 else ''}"
    if group.suppressed:
        times += f", {group.suppressed} of them suppressed by the kernel"
    said = f", code {', '.join(codes)}" if codes else ""
    elsewhere = f" on {cause.device}" if cause and cause.device and cause.device != group.device else ""
    after = f" Caused by {cause.signature.id}{elsewhere}." if cause else ""
    tail = f" It ends in: {group.tail}" if group.tail else ""
    return f"{where}{words} ({times}{said}){after}{tail}"

"""What the simulated lab says, held against what a real machine says to the very same commands.

The commands are those that the probes themselves ask; nobody keeps a list of them. Two answers are compared by their shape: exit
status, the names and kinds of values, the fields of a journal's entries, the order of a table; never by what they happen to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proofbook.model import Command, Probe, Result
from proofbook.probes import drive
from proofbook.probes.access import Access, Logins
from proofbook.probes.boot import Boots
from proofbook.probes.boot import Machine as MachineProbe
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.journal import UnitJournal, _Raw
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import ComputeApps, Driver, Gpus
from proofbook.probes.pci import PciDevices
from proofbook.probes.service import Endpoint
from proofbook.probes.systemd import FailedUnits, RunningServices, SystemState, UnitProcess, UnitState

Gather = Callable[[Any], Any]

_NUMBERED = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"/proc/\d+"), "/proc/<pid>"),
)


@dataclass(frozen=True)
class Row:
    """A question, as both machines were asked it, and their answers."""

    question: str
    simulated: Result | None
    real: Result | None


def question(command: Command) -> str:
    """A command without what differs from machine to machine; a program of ours by its name."""
    argv = command.argv[3:] if command.argv[:2] == ("sh", "-c") else command.argv
    if command.argv[:2] == ("python3", "-c"):
        argv = ("python3", "<program>", *command.argv[3:])
    text = " ".join(argv)
    for pattern, name in _NUMBERED:
        text = pattern.sub(name, text)
    return text


@dataclass(frozen=True)
class Said:
    """What one machine said: question → answer, and probe → why its value is unknown ("" when it is known)."""

    results: dict[str, Result]
    unknown: dict[str, str]


Simulated = Said


def ask(probes: Iterable[Probe[Any]], gather: Gather) -> Said:
    answers = drive(list(probes), gather)
    results = {question(r.command): r for a in answers.values() for r in a.results}
    return Said(results, {repr(probe): answer.unknown for probe, answer in answers.items()})


def rows(simulated: Mapping[str, Result], real: Mapping[str, Result]) -> list[Row]:
    return [Row(q, simulated.get(q), real.get(q)) for q in sorted({*simulated, *real})]


def differences(row: Row) -> list[str]:
    """How the shapes of the two answers differ; empty when they agree."""
    a, b = row.simulated, row.real
    assert a is not None and b is not None
    if a.exit_status != b.exit_status:
        return [f"exit status {a.exit_status} simulated, {b.exit_status} real"]
    words = row.question.split()
    if words[:2] == ["systemctl", "show"]:
        return list(_properties(_pairs(a.text), _pairs(b.text)))
    if "-o json" in row.question:
        return list(_entries(a.text, b.text))
    if words[:2] == ["systemctl", "list-units"]:
        return list(_table(a.text, "simulated")) + list(_table(b.text, "real"))
    if "--list-boots" in words:
        return list(_boots(a.text, "simulated")) + list(_boots(b.text, "real"))
    if words[0] == "proofbook-read-files":
        return list(_files(a.text, b.text))
    if words[0] == "dmesg":
        return [f"{who}: {line!r}" for who, r in (("simulated", a), ("real", b)) for line in _strange_kernel_lines(r.text)]
    if kind(a.text.strip()) != kind(b.text.strip()):
        return [f"{kind(a.text.strip())} simulated, {kind(b.text.strip())} real"]
    return []


# ------------------------------------------------------------------------------------------------ kinds of values

_KINDS = (
    ("nothing", r""),
    ("number", r"-?\d+"),
    ("id", r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    ("decimal", r"\d+\.\d+( \d+\.\d+)?"),
    ("hexadecimal", r"0x[0-9a-f]+"),
    ("version", r"\d+\.\d+\.\d+\S*"),
    ("yes or no", r"yes|no"),
    ("path", r"/\S*"),
    ("time", r"\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+"),
    ("command", r"\{ path=.* \}"),
)


def kind(value: str) -> str:
    return next((name for name, pattern in _KINDS if re.fullmatch(pattern, value, re.S)), "text")


def _pairs(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def _properties(simulated: Mapping[str, str], real: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*simulated, *real}):
        if name not in simulated:
            yield f"{name} is real, not simulated"
        elif name not in real:
            yield f"{name} is simulated, not real"
        elif kind(simulated[name]) != kind(real[name]):
            a, b = simulated[name], real[name]
            yield f"{name}: {kind(a)} simulated ({a[:60]!r}), {kind(b)} real ({b[:60]!r})"


# ------------------------------------------------------------------------------------------------ journals

#: The fields that the probes read; the others are not the probes' business, but must not be invented.
READ = frozenset(field.encode_name for field in msgspec.structs.fields(_Raw))
#: Fields of newer releases of systemd than the real machine's.
NEWER = frozenset({"__SEQNUM", "__SEQNUM_ID", "_RUNTIME_SCOPE"})


def _fields(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """Transport → fields that some of its entries have, and fields that all have."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for line in text.splitlines():
        entry = json.loads(line)
        some, every = found.setdefault(entry.get("_TRANSPORT", ""), (set(), set(entry)))
        some.update(entry)
        every.intersection_update(entry)
    return found


def _entries(simulated: str, real: str) -> Iterator[str]:
    a, b = _fields(simulated), _fields(real)
    for transport in sorted(a.keys() & b.keys()):
        invented = a[transport][0] - b[transport][0] - NEWER
        if invented:
            yield f"{transport}: simulated, not real: {', '.join(sorted(invented))}"
        missing = (b[transport][1] - a[transport][0]) & READ
        if missing:
            yield f"{transport}: real, read by probes, not simulated: {', '.join(sorted(missing))}"


# ------------------------------------------------------------------------------------------------ tables, files, lines


def _table(text: str, who: str) -> Iterator[str]:
    units = [line.split()[0] for line in text.splitlines()]
    yield from (f"{who}: no row of five columns: {line!r}" for line in text.splitlines() if len(line.split(None, 4)) != 5)
    if units != sorted(units):
        yield f"{who}: the units are not in the order of their names"


def _boots(text: str, who: str) -> Iterator[str]:
    head, *lines = text.splitlines()
    if head.split() != ["IDX", "BOOT", "ID", "FIRST", "ENTRY", "LAST", "ENTRY"]:
        yield f"{who}: the heading is {head!r}"
    stamp = r"\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    yield from (
        f"{who}: no boot: {line!r}" for line in lines if not re.fullmatch(rf"\s*-?\d+ [0-9a-f]{{32}} {stamp} {stamp}\s*", line)
    )


def _strange_kernel_lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if not re.match(r"\[ *\d+\.\d{6}\] ", line))


def _kinds_of_files(text: str) -> dict[str, set[str]]:
    """Path, with addresses and numbers taken out → what was found there, and the kinds of its content."""
    found: dict[str, set[str]] = {}
    place = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if found[place] & {"F"}:
                found[place].add(kind(line[1:]) if not place.startswith("/proc/driver") else "text")
            continue
        letter, _, path = line.partition(" ")
        place = re.sub(
            r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", "<pci>", re.sub(r"/iommu_groups/\d+", "/iommu_groups/<n>", path)
        )
        found.setdefault(place, set()).add(letter)
    return found


def _files(simulated: str, real: str) -> Iterator[str]:
    a, b = _kinds_of_files(simulated), _kinds_of_files(real)
    for place in sorted(a.keys() & b.keys()):
        if strange := a[place] - b[place]:
            yield f"{place}: {', '.join(sorted(strange))} simulated, never real (real: {', '.join(sorted(b[place]))})"


# ------------------------------------------------------------------------------------------------ what is compared

PROBES: tuple[Probe[Any], ...] = (
    Access(),
    Logins(),
    MachineProbe(),
    Boots(),
    UnitState("ssh.service"),
    UnitState("no-such.service"),
    FailedUnits(),
    RunningServices(),
    SystemState(),
    UnitProcess("ssh.service"),
    UnitJournal("ssh.service"),
    KernelLog(),
    Endpoint("http://127.0.0.1:1/health"),
    PciDevices(),
    IommuGroups(),
    Driver(),
    Gpus(),
    ComputeApps(),
)

#: Where a machine cannot be compared, and why: (question, what differs, reason).
EVERYWHERE = (
    (
        r"cat /proc/<pid>/(cmdline|environ)",
        r"path simulated, text real",
        "OpenSSH writes its state over its arguments",
    ),
    (r"which .*", r"exit status 0 simulated, 1 real", "the simulated machine is a Proxmox host, with pct"),
    (r"proofbook-read-files .*", r"/sys/class/dmi/id/.*", "no real machine has the simulated one's board"),
    (r"proofbook-read-files .*", r"/run/systemd/container: .*", "a container says that it is one"),
    (r"journalctl .*_TRANSPORT=driver", r".*_SYSTEMD_INVOCATION_ID", "journald's own lines are read for their message alone"),
)
A_BOX = (
    (r"dmesg|journalctl -k .*", r".*", "a container reads no kernel log"),
    (r"modinfo .*|nvidia-smi .*", r".*", "a container has no GPU"),
    (r"proofbook-read-files /proc/driver/nvidia.*", r".*", "a container has no GPU"),
)
A_VM = ((r"nvidia-smi --query-compute-apps.*", r"text simulated, nothing real", "nothing computes on a stand-in"),)


def unexplained(compared: list[Row], reasons: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Every difference, and every question that only one was asked, without a reason."""
    found = []
    for row in compared:
        alone = row.simulated is None or row.real is None
        said = [f"only {'real' if row.simulated is None else 'simulated'}"] if alone else differences(row)
        for text in said:
            if not any(re.fullmatch(q, row.question, re.S) and re.fullmatch(d, text, re.S) for q, d, _ in reasons):
                found.append(f"{row.question[:120]}: {text}")
    return found

"""What the simulated lab says, held against what a real machine says to the very same commands.

Nobody keeps a list of the commands: every probe that there is gets asked, on the simulated machine and on a real one, and what
it asks for is compared. Two answers are compared by their shape: exit status, the names and kinds of values, the fields of a
journal's entries, the order of a table; never by what they happen to say. What cannot be compared carries its reason, below.

What the comparison found, and what was mended for it:

* journalctl told an ordinary login nothing in the lab. A real one shows it its own entries, lists "its" boots, and with
  ``-o json`` keeps silent about the rest: a shutdown was judged from them. The probes now know such an answer; the lab gives it.
* journalctl ends with 1 and no word where it has no cursor to show yet: a start was unknown until its first line came. Probe and
  lab know it; behind a cursor with nothing new, the lab shows that cursor again, as it is there.
* journald's own lines had no user id in the lab.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

import proofbook.probes
from proofbook import remote
from proofbook.host import IDENTIFY
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result
from proofbook.probes.base import Gather, drive, inside
from proofbook.probes.boot import Machine
from proofbook.probes.journal import _Raw
from proofbook.probes.systemd import UnitState

_NUMBERED = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"/proc/\d+"), "/proc/<pid>"),
    (re.compile(r"--after-cursor=\S+"), "--after-cursor=<cursor>"),
    (re.compile(r"(?:/(?:etc|run|lib|usr/lib)/systemd/system/\S+ ?)+"), "<unit files>"),
    (re.compile(r"(?:(/proc/<pid>/\w+) ?)(?: ?/proc/<pid>/\w+)*"), r"\1"),
    (re.compile(r"(?:/sys/fs/cgroup/\S+ ?)+"), "<control groups>"),
    (re.compile(r"/boot/initrd\.img-\S+"), "/boot/initrd.img-<kernel>"),
    (re.compile(r"env (?:\w+=\S* )+\S*/python3? (?:-c .*|-m (\S+) .*)", re.S), r"<the server's own Python> \1"),
)


# ------------------------------------------------------------------------------------------------ what is asked

#: The simulated machine runs its server in this container; a real one runs it by itself.
LLM_TWO = ContainerSpec(name="llm-two", kind="pct", id="102", devices=("/dev/nvidia0", "/dev/nvidiactl"))
SERVICE = "sglang-qwen.service"


@dataclass(frozen=True)
class AsItIs:
    """An edit of a unit that changes nothing."""

    also: tuple[str, ...] = ()

    def files(self, now: Any) -> Mapping[str, bytes]:
        return {}


#: What the probes' parameters are, by name. What is true of one subject only stands in SUBJECTS.
EVERYWHERE_SAME: Mapping[str, Any] = {
    "container": None,
    "boot": "0",
    "path": "/etc",
    "paths": ("/etc/hostname",),
    "port": 30000,
    "url": "http://127.0.0.1:1/health",
    "spec": LLM_TWO,
    "edit": AsItIs(),
    "also": (),
    "after": "",
    "run_id": "20260408T150412Z-3f2a",
    "step": "reload",
}


def subjects(*, simulated: bool, root: bool) -> dict[str, Mapping[str, Any]]:
    """What is asked about, by name: the same on both machines, though not in the same place. Only root enters a container."""
    here = LLM_TWO if simulated else None
    server = {"the server": {"unit": SERVICE, "container": here, "url": "http://127.0.0.1:30000"}} if root else {}
    return {**server, "sshd": {"unit": "ssh.service"}, "nothing": {"unit": "no-such.service", "path": "/no-such-folder"}}


@dataclass(frozen=True)
class Directly(Probe[None]):
    """What a connection asks about the machine itself, and what is asked of containers alone, asked of the machine."""

    container: ContainerSpec | None = None
    name: ClassVar[str] = "Directly"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], None]:
        yield [*IDENTIFY]
        yield [inside(self.container, remote.open_devices("/dev/null", "/dev/no-such")), inside(self.container, remote.cu_init())]


def every_probe() -> list[type[Probe[Any]]]:
    """Every class of probe that there is, and the questions that are asked without one."""
    for module in pkgutil.iter_modules(proofbook.probes.__path__):
        importlib.import_module(f"proofbook.probes.{module.name}")
    found = [c for c in _below(Probe) if c.__module__.startswith("proofbook.probes.")]
    return [*sorted(found, key=lambda c: c.name), Directly]


def _below(kind: type[Any]) -> list[type[Any]]:
    return [c for below in kind.__subclasses__() for c in (below, *_below(below))]


def made(kind: type[Probe[Any]], known: Mapping[str, Any]) -> Probe[Any]:
    """A probe of a kind. Raises LookupError for a parameter that nobody here knows a value of."""
    wanted = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if missing := [name for name in wanted if name not in known]:
        raise LookupError(f"{kind.__name__} wants {', '.join(missing)}: say in EVERYWHERE_SAME or subjects() what that is")
    return kind(**{name: known[name] for name in wanted})


# ------------------------------------------------------------------------------------------------ asking


@dataclass(frozen=True)
class Said:
    """What one machine said, by what was asked of it ("UnitState of sshd"): question and answer, one after the other; and why
    the value is unknown ("" when it is known).
    """

    results: dict[str, list[tuple[str, Result]]]
    unknown: dict[str, str]

    @property
    def questions(self) -> set[str]:
        return {asked for results in self.results.values() for asked, _ in results}


Simulated = dict[str, Said]


def question(command: Command, *, root: bool) -> str:
    """A command without what differs from machine to machine; a program of ours by its name; the same in a container.

    To a login that is not root, a command that wants to be is another question than the same one that does not.
    """
    argv = command.argv
    if argv[:2] == ("pct", "exec"):
        argv = argv[4:]
    if argv[:2] == ("sh", "-c"):
        argv = argv[3:]
    if argv[0].endswith("python3") and argv[1:2] == ("-c",):
        argv = ("python3", "<program>", *argv[3:])
    text = " ".join(argv if root or not command.root else ("sudo", *argv))
    for pattern, name in _NUMBERED:
        text = pattern.sub(name, text)
    return text.strip()


def ask(gather: Gather, *, simulated: bool, root: bool = True) -> Said:
    """Every probe about every subject; one that hands out a place to go on from is asked from there too."""
    about = subjects(simulated=simulated, root=root)
    machine = Machine()
    states = {subject: made(UnitState, {**EVERYWHERE_SAME, **values}) for subject, values in about.items()}
    first = drive([machine, *states.values()], gather)
    boot = {"boot_id": getattr(first[machine].value, "boot_id", "0" * 32)}
    asked: dict[str, Probe[Any]] = {}
    for subject, values in about.items():
        invocation = {"invocation": getattr(first[states[subject]].value, "invocation_id", "") or "0" * 32}
        for kind in every_probe():
            asked[f"{kind.__name__} of {subject}"] = made(kind, {**EVERYWHERE_SAME, **boot, **invocation, **values})
    answers = dict(drive(asked.values(), gather))
    further = {
        f"{name}, from there on": dataclasses.replace(probe, after=cursor)  # type: ignore[type-var]
        for name, probe in asked.items()
        if (cursor := getattr(answers[probe].value, "cursor", ""))
    }
    answers |= drive(further.values(), gather)
    said = {name: answers[probe] for name, probe in (asked | further).items()}
    results = {name: [(question(r.command, root=root), r) for r in answer.results] for name, answer in said.items()}
    return Said(results, {name: answer.unknown for name, answer in said.items()})


# ------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Row:
    """A question, as both machines were asked it, and their answers; None where a machine was not asked."""

    question: str
    simulated: Result | None
    real: Result | None


def rows(simulated: Said, real: Said) -> list[Row]:
    """Every answer of one beside that of the other to the same question about the same subject; equal pairs once."""
    found: dict[tuple[int, int], Row] = {}
    for name in sorted({*simulated.results, *real.results}):
        here, there = (_by_question(said.results.get(name, [])) for said in (simulated, real))
        for asked in sorted({*here, *there}):
            ours, theirs = here.get(asked, [None]), there.get(asked, [None])
            # One may have more processes than the other: each is compared with one of the other's all the same.
            for n in range(max(len(ours), len(theirs))):
                a, b = ours[n % len(ours)], theirs[n % len(theirs)]
                found.setdefault((id(a), id(b)), Row(asked, a, b))
    return list(found.values())


def _by_question(results: Sequence[tuple[str, Result]]) -> dict[str, list[Result | None]]:
    found: dict[str, list[Result | None]] = {}
    for asked, result in results:
        found.setdefault(asked, []).append(result)
    return found


def differences(row: Row) -> list[str]:
    """How the shapes of the two answers differ; empty when they agree."""
    a, b = row.simulated, row.real
    if a is None or b is None:
        return ["only real" if a is None else "only simulated"]
    if a.exit_status != b.exit_status:
        return [f"exit status {a.exit_status} simulated, {b.exit_status} real"]
    if bool(a.trouble) != bool(b.trouble):
        return [f"trouble {a.trouble!r} simulated, {b.trouble!r} real"]
    return [*_complaints(a.error_text, b.error_text), *_answers(row.question, a.text, b.text)]


def _complaints(simulated: str, real: str) -> Iterator[str]:
    if bool(simulated.strip()) != bool(real.strip()):
        yield f"stderr {simulated[:100]!r} simulated, {real[:100]!r} real"


def _answers(asked: str, simulated: str, real: str) -> list[str]:
    words = asked.removeprefix("sudo ").split()
    if words[:2] == ["systemctl", "show"] and any("*" in word for word in words):
        return list(_many_units(simulated, real))
    if words[:2] == ["systemctl", "show"]:
        return list(_properties(_pairs(simulated), _pairs(real)))
    if words[0] == "journalctl" and not (simulated.strip() and real.strip()):
        return [] if simulated.strip() == real.strip() else [f"{simulated[:60]!r} simulated, {real[:60]!r} real"]
    if "-o json" in asked:
        return list(_entries(simulated, real))
    if words[:2] == ["systemctl", "list-units"]:
        return [*_table(simulated, "simulated"), *_table(real, "real")]
    if "--list-boots" in words:
        return [*_boots(simulated, "simulated"), *_boots(real, "real")]
    if words[0] == "proofbook-read-files":
        return list(_files(simulated, real))
    if words[0] == "dmesg":
        both = (("simulated", simulated), ("real", real))
        return [f"{who}: {line!r}" for who, text in both for line in _strange_kernel_lines(text)]
    a, b = kind(simulated.strip()), kind(real.strip())
    return [f"{a} simulated, {b} real"] if a != b else []


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


def _many_units(simulated: str, real: str) -> Iterator[str]:
    """Of units by a pattern, which are others on each machine: the properties, and the kinds that a property has in any unit."""
    a, b = (_kinds_by_property(text) for text in (simulated, real))
    for name in sorted({*a, *b}):
        if strange := a.get(name, set()) - b.get(name, set()):
            yield f"{name}: {', '.join(sorted(strange))} simulated, never real (real: {', '.join(sorted(b.get(name, set())))})"
        elif name not in a:
            yield f"{name} is real, not simulated"


def _kinds_by_property(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for block in text.split("\n\n"):
        for name, value in _pairs(block).items():
            found.setdefault(name, set()).add(kind(value))
    return found


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
#: Fields that journald looks up in /proc: an entry whose process has ended by then is without them.
FLEETING = frozenset({"_CMDLINE", "_EXE", "_COMM", "_CAP_EFFECTIVE"})


def _fields(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """Transport → fields that some of its entries have, and fields that all have."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for line in text.splitlines():
        if line.startswith("-- cursor: "):
            continue
        entry = json.loads(line)
        some, every = found.setdefault(entry.get("_TRANSPORT", ""), (set(), set(entry)))
        some.update(entry)
        every.intersection_update(entry)
    return found


def _entries(simulated: str, real: str) -> Iterator[str]:
    a, b = _fields(simulated), _fields(real)
    for transport in sorted(a.keys() & b.keys()):
        invented = a[transport][0] - b[transport][0] - NEWER - FLEETING
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


#: What differs from machine to machine in a path.
_PLACES = (
    (r"/iommu_groups/\d+", "/iommu_groups/<n>"),
    (r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", "<pci>"),
    (r"^/proc/\d+", "/proc/<pid>"),
)


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
        place = path
        for pattern, name in _PLACES:
            place = re.sub(pattern, name, place)
        found.setdefault(place, set()).add(letter)
    return found


def _files(simulated: str, real: str) -> Iterator[str]:
    a, b = _kinds_of_files(simulated), _kinds_of_files(real)
    for place in sorted(a.keys() & b.keys()):
        if place.startswith("/proc/<pid>") and b[place] == {"N"}:
            continue  # it has ended meanwhile
        if strange := a[place] - b[place]:
            yield f"{place}: {', '.join(sorted(strange))} simulated, never real (real: {', '.join(sorted(b[place]))})"


# ------------------------------------------------------------------------------------------------ what is not compared

#: Where a machine cannot be compared, and why: (question, what differs, reason).
Reasons = tuple[tuple[str, str, str], ...]

EVERYWHERE: Reasons = (
    (r"cat /proc/<pid>/(cmdline|environ)", r"path simulated, text real", "OpenSSH writes its state over its arguments"),
    (r"cat /proc/<pid>/cmdline", r"exit status 0 simulated, 1 real", "a process of a login may be gone when it is asked about"),
    (
        r"(cat|find|fincore) .*/models/.*",
        r"exit status 0 simulated, 1 real|only simulated",
        "no real machine here has a model",
    ),
    (r"lsinitramfs .*", r"exit status 0 simulated, 127 real", "no real machine here makes its own initramfs"),
    (r"which .*", r"exit status 0 simulated, 1 real", "the simulated machine is a Proxmox host, with pct"),
    (r"pct .*", r".*", "no real machine here is a Proxmox host"),
    (r"proofbook-open-devices /dev/nvidia.*", r"only simulated", "no container to ask; other nodes are compared"),
    (r"python3 <program>", r"only simulated", "no container to ask; it is compared outside of one"),
    (r"(sudo )?proofbook-read-files /proc/<pid>/cgroup", r"only simulated", "nothing computes on a GPU of a real machine here"),
    (r"proofbook-read-files .*", r"/sys/class/dmi/id/.*", "no real machine has the simulated one's board"),
    (r"proofbook-read-files .*", r"/run/systemd/container: .*", "a container says that it is one"),
    (r"journalctl .*", r"driver: .*_SYSTEMD_INVOCATION_ID", "journald's own lines are read for their message alone"),
)
#: What the simulated lab does not do as a real machine does. A reason goes when the lab has learnt it.
LESS: Reasons = (
    (r"(sudo )?(cat|stat) .*/etc/default/ssh", r"only real", "Debian's own unit of sshd reads a file of settings"),
    (r"(sudo )?stat .*<unit files>", r"only simulated", "the same, asked together with that file"),
    (r"systemctl show ssh\.service .*", r"(EnvironmentFiles|Restart|KillMode)\b.*", "Debian's own unit of sshd says more"),
    (r"systemctl show no-such\.service .*", r"OOMPolicy: .*", "a unit that is not there has no policy"),
    (
        r"proofbook-read-files /sys/bus/pci/devices/\*.*",
        r"/sys/bus/pci/devices/<pci>: D simulated, never real \(real: L\)",
        "the simulated machine has the devices themselves where a real one has links to them",
    ),
)
A_BOX: Reasons = (
    (r"dmesg|journalctl -k .*", r".*", "a container reads no kernel log"),
    (r"modinfo .*|nvidia-smi .*", r".*", "a container has no GPU"),
    (r"proofbook-read-files /proc/driver/nvidia.*", r".*", "a container has no GPU"),
    (r"proofbook-read-files .*", r"/proc/driver/nvidia/.*", "a container has no GPU"),
    (r"lspci .*", r"stderr '' simulated, '.*libkmod.*", "a container has no modules"),
)
#: Probes whose value no real machine here can tell, and those that a container cannot tell beside them.
NOT_REAL = ("ContainerState", "ServedCache", "ServedCheckpoint")
NOT_IN_A_BOX = (*NOT_REAL, "KernelLog", "Gpus", "GpuMemory", "GpuProcesses", "ComputeApps", "Topology")
A_VM: Reasons = ((r"nvidia-smi --query-compute-apps.*", r"text simulated, nothing real", "nothing computes on a stand-in"),)


def unexplained(compared: list[Row], reasons: Reasons) -> list[str]:
    """Every difference, and every question that only one was asked, without a reason."""
    return sorted(
        {
            f"{row.question[:120]}: {text}"
            for row in compared
            for text in differences(row)
            if not any(_excuses(reason, row.question, text) for reason in reasons)
        }
    )


def stale(compared: list[Row], reasons: Reasons) -> list[str]:
    """Reasons for differences that there are not."""
    found = [(row.question, text) for row in compared for text in differences(row)]
    return [why for q, d, why in reasons if not any(_excuses((q, d, why), *one) for one in found)]


def known_by_one(simulated: Said, real: Said, not_here: tuple[str, ...]) -> list[str]:
    """Every value that one machine told and the other did not, but for those of the probes ``not_here``."""
    return sorted(
        f"{probe}: {why or 'known'} simulated, {real.unknown[probe] or 'known'} real"
        for probe, why in simulated.unknown.items()
        if bool(why) != bool(real.unknown[probe]) and not probe.startswith(not_here)
    )


def _excuses(reason: tuple[str, str, str], asked: str, difference: str) -> bool:
    return bool(re.fullmatch(reason[0], asked, re.S) and re.fullmatch(reason[1], difference, re.S))

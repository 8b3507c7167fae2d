"""The NVIDIA driver and what it says of its GPUs."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Probe, Result, command, pci_address
from proofbook.probes.base import said, text_of

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

__all__ = ["ComputeApp", "ComputeApps", "Driver", "DriverFacts", "GpuRow", "GpuTable", "Gpus"]

_FIELDS = (
    "index,pci.bus_id,uuid,name,driver_version,vbios_version,pstate,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
)
# WHY 60 s: without the persistence daemon every call first wakes all GPUs, seconds each.
_QUERY = command("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader", timeout_s=60)
_DETAILS = command("nvidia-smi", "-q", "-x", timeout_s=60)
_APPS = command(
    "nvidia-smi", "--query-compute-apps=pid,gpu_bus_id,process_name,used_memory", "--format=csv,noheader", timeout_s=60
)
_VERSION, _PARAMS = "/proc/driver/nvidia/version", "/proc/driver/nvidia/params"
_MODULE = "/sys/module/nvidia"
_INFORMATION = "/proc/driver/nvidia/gpus/*/information"


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The kernel module as it is loaded, as it lies on disk, and the user-space library.

    ``module_version`` is "" when no module is loaded. A value that could not be had is None, and ``problems`` says why
    under the name of its field.
    """

    module_version: str  # "595.58.03"
    open_module: bool | None  # from the version file's first line; None when not loaded
    flavour_line: str  # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  …"
    params: dict[str, str]  # /proc/driver/nvidia/params, e.g. {"DmaRemapPeerMmio": "1"}
    loaded_srcversion: str | None
    disk_srcversion: str | None
    disk_version: str | None
    library_version: str | None  # of NVML
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def loaded(self) -> bool:
        return bool(self.module_version)


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU that nvidia-smi has a row for. None (or "") is a value that it does not report.

    ``broken`` holds the fields where an error stands instead of a value, e.g. {"pstate": "[GPU requires reset]"}.
    """

    pci: str
    index: int | None
    uuid: str
    name: str
    vbios: str
    pstate: str  # "P8"
    gen_current: int | None  # PCIe generation now (1 when idle) and at most
    gen_max: int | None
    width_current: int | None  # lanes
    width_max: int | None
    recovery_action: str = ""  # None, Reset, Reboot, Drain P2P, Drain and Reset; "" when not reported
    minor: int | None = None  # N of /dev/nvidiaN
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    persistence: bool | None = None
    detailed: bool | None = None  # whether nvidia-smi -q -x has an entry of it; None when it gave no whole document
    broken: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuTable:
    """Every GPU by PCI address. ``problems``: what nvidia-smi said instead of a row, by PCI address, "" for the whole.

    ``proc`` is /proc/driver/nvidia/gpus/<pci>/information of the GPUs that the module has probed (a directory there does
    not mean initialised).
    """

    rows: dict[str, GpuRow]
    problems: dict[str, str]
    driver_version: str  # "" when nvidia-smi did not get that far
    exit_status: int
    proc: dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class ComputeApp:
    """A process that computes on a GPU. ``used_mib`` is None where the driver does not say (in containers)."""

    pid: int
    pci: str
    process: str
    used_mib: int | None


@dataclass(frozen=True)
class Driver(Probe[DriverFacts]):
    """The NVIDIA driver's versions, flavour and parameters.

    ``NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build …`` is the open flavour (the only
    one that knows Blackwell) at 595.58.03. ``srcversion`` tells two builds of one version apart: loaded against on disk.
    """

    name: ClassVar[str] = "nvidia.Driver"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], DriverFacts]:
        files, version, srcversion, query = yield [
            remote.read_files(_VERSION, _PARAMS, f"{_MODULE}/version", f"{_MODULE}/srcversion"),
            command("modinfo", "-F", "version", "nvidia"),
            command("modinfo", "-F", "srcversion", "nvidia"),
            _QUERY,
        ]
        return _driver_facts(remote.parse_files(files), version, srcversion, query)


@dataclass(frozen=True)
class Gpus(Probe[GpuTable]):
    """What nvidia-smi and the driver say of every GPU.

    ``0, 00000000:41:00.0, GPU-…, NVIDIA RTX PRO 6000 …, 595.58.03, 98.02.67.00.0A, P8, 1, 5, 16, 16`` is a row;
    ``Unable to determine the device handle for GPU3: 0000:04:00.0: Unknown Error`` between rows is a problem of that GPU.
    WHY two queries: the table still prints the other rows when one GPU is lost, where the XML often stops; only the XML
    tells the recovery action.
    """

    name: ClassVar[str] = "nvidia.Gpus"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], GpuTable]:
        query, details, files = yield [_QUERY, _DETAILS, remote.read_files(_INFORMATION)]
        return _gpu_table(query, details, remote.parse_files(files))


@dataclass(frozen=True)
class ComputeApps(Probe[tuple[ComputeApp, ...]]):
    """The processes that compute on the GPUs now: ``4711, 00000000:41:00.0, sglang::scheduler_TP0, 91234 MiB``."""

    name: ClassVar[str] = "nvidia.ComputeApps"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[ComputeApp, ...]]:
        (answer,) = yield [_APPS]
        return _compute_apps(text_of(answer))


# ------------------------------------------------------------------------------------------------------- driver


def _driver_facts(files: remote.Files, version: Result, srcversion: Result, query: Result) -> DriverFacts:
    problems: dict[str, str] = {}

    def had(name: str, answer: str | CannotTell) -> str | None:
        if isinstance(answer, CannotTell):
            problems[name] = str(answer)
            return None
        return answer

    for path, why in files.unreadable.items():
        if path == _VERSION:
            raise CannotTell(f"{path} cannot be read: {why}")
        problems[path.rpartition("/")[2]] = f"{path} cannot be read: {why}"
    line = next(iter(files.files.get(_VERSION, "").splitlines()), "")
    module = _module_version(line) or files.files.get(f"{_MODULE}/version", "").strip()
    return DriverFacts(
        module_version=module,
        open_module="Open Kernel Module" in line if line else None,
        flavour_line=line,
        params=_pairs(files.files.get(_PARAMS, "")),
        loaded_srcversion=files.files.get(f"{_MODULE}/srcversion", "").strip() or None,
        disk_srcversion=had("disk_srcversion", _modinfo(srcversion)),
        disk_version=had("disk_version", _modinfo(version)),
        library_version=had("library_version", _library_version(query)),
        problems=problems,
    )


def _module_version(line: str) -> str:
    """The version in ``NVRM version: NVIDIA UNIX … Kernel Module [for x86_64]  595.58.03  …``, "" when there is none."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)\b", line)
    return found[1] if found else ""


def _modinfo(result: Result) -> str | CannotTell:
    """A field of the module on disk; the reason when there is none (also where modinfo ends well and says nothing)."""
    try:
        text = text_of(result).strip()
    except CannotTell as why:
        return why
    return text or CannotTell("the nvidia module on disk does not say it")


def _library_version(query: Result) -> str | CannotTell:
    """The version of NVML: its own word on a mismatch, else the driver's, which NVML only talks to when they are equal."""
    whole = f"{query.text}\n{query.error_text}"
    if found := re.search(r"NVML library version:\s*(\d+\.\d+(?:\.\d+)?)", whole):
        return found[1]
    rows, _ = _table(query.text)
    if versions := {row[4] for row in rows if re.fullmatch(r"[\d.]+", row[4])}:
        return ", ".join(sorted(versions))
    return CannotTell(f"nvidia-smi did not get far enough to tell: {said(query) or query.trouble or 'it said nothing'}")


def _pairs(text: str) -> dict[str, str]:
    """``Key: value`` lines, e.g. ``RegistryDwords: "a=1"`` (quotes taken off) or ``GPU UUID: \\t GPU-…``."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip().removeprefix('"').removesuffix('"') for key, _, value in pairs}


# --------------------------------------------------------------------------------------------------------- GPUs

_ABSENT = {"", "N/A", "[N/A]", "[Not Supported]", "[Not Found]", "Not Supported", "Requested functionality has been deprecated"}
_ANY_PCI = re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{4,8}:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?(?![0-9a-fA-F])")


def _gpu_table(query: Result, details: Result, files: remote.Files) -> GpuTable:
    status = _ended(query)
    rows, others = _table(query.text)
    problems: dict[str, str] = {}
    for line in (*others, *(query.error_text.splitlines() if status else ()), *_text_beside_xml(details)):
        _add_problem(problems, line)
    more = _xml_gpus(details, problems)
    table = {row.pci: row for row in (_gpu_row(cells, more) for cells in rows)}
    if not table and not problems:
        problems[""] = f"nvidia-smi printed no GPU (exit status {status})"
    versions = [cells[4] for cells in rows if re.fullmatch(r"[\d.]+", cells[4])]
    return GpuTable(table, problems, versions[0] if versions else "", status, _information(files))


def _ended(query: Result) -> int:
    """nvidia-smi's own exit status. Raises CannotTell where it is not there, or never ended (a wedged GPU can do that)."""
    if query.exit_status in (None, 126, 127) or query.timed_out or query.lost_stdout:
        text_of(query)
    if query.exit_status is None:
        raise CannotTell("nvidia-smi did not end")
    return query.exit_status


def _table(text: str) -> tuple[list[list[str]], list[str]]:
    """The rows (one cell for each of the fields asked) and the lines that are none."""
    rows, others = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]  # nvidia-smi quotes nothing
        if len(cells) == len(_FIELDS.split(",")) and _ANY_PCI.fullmatch(cells[1]):
            rows.append(cells)
        elif line.strip():
            others.append(line.strip())
    return rows, others


def _add_problem(problems: dict[str, str], line: str) -> None:
    """Keep ``line`` under the GPU that it names, "" when it names none; the same line once."""
    if not (line := line.strip()):
        return
    found = _ANY_PCI.search(line)
    key = pci_address(found[0]) if found else ""
    if line not in problems.get(key, "").splitlines():
        problems[key] = f"{problems[key]}\n{line}" if key in problems else line


def _gpu_row(cells: Sequence[str], details: Mapping[str, Element] | None) -> GpuRow:
    index, bus_id, uuid, name, _, vbios, pstate, gen, gen_max, width, width_max = cells
    pci = pci_address(bus_id)
    names = ("index", "uuid", "name", "vbios", "pstate", "gen_current", "gen_max", "width_current", "width_max")
    values = (index, uuid, name, vbios, pstate, gen, gen_max, width, width_max)
    broken = {n: v for n, v in zip(names, values, strict=True) if _is_broken(v)}
    gpu = None if details is None else details.get(pci)

    def detail(path: str) -> str:
        text = (gpu.findtext(path) or "").strip() if gpu is not None else ""
        if _is_broken(text):
            broken[path] = text
            return ""
        return "" if text in _ABSENT else text

    persistence = detail("persistence_mode")
    # "None" is the healthy action and must stay a word: "" means that this driver does not report one.
    return GpuRow(
        pci=pci,
        index=_number(index),
        uuid=_value(uuid),
        name=_value(name),
        vbios=_value(vbios),
        pstate=_value(pstate),
        gen_current=_number(gen),
        gen_max=_number(gen_max),
        width_current=_number(width),
        width_max=_number(width_max),
        recovery_action=detail("gpu_recovery_action"),
        minor=_number(detail("minor_number")),
        memory_mib=_number(detail("fb_memory_usage/total")),
        memory_used_mib=_number(detail("fb_memory_usage/used")),
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
        detailed=None if details is None else gpu is not None,
        broken=broken,
    )


def _is_broken(text: str) -> bool:
    """``ERR!``, ``[GPU requires reset]``, ``[Unknown Error]``, ``[GPU is lost]``: an error in the place of a value."""
    if text in _ABSENT:
        return False
    return text.startswith("[") or "ERR!" in text or text in ("Unknown Error", "GPU requires reset", "GPU is lost")


def _value(text: str) -> str:
    return "" if text in _ABSENT or _is_broken(text) else text


def _number(text: str) -> int | None:
    """``16``, ``16x``, ``97887 MiB`` -> the number; anything else -> None."""
    found = re.fullmatch(r"(\d+)(?:x| MiB)?", text.strip())
    return int(found[1]) if found else None


def _text_beside_xml(details: Result) -> list[str]:
    """Lines of ``nvidia-smi -q -x`` before and after the document: that is where it complains of a lost GPU."""
    if details.timed_out or details.exit_status in (None, 126, 127):
        return []
    before, begins, rest = details.text.partition("<?xml")
    after = rest.partition("</nvidia_smi_log>")[2] if begins else ""
    return [*before.splitlines(), *after.splitlines()]


def _xml_gpus(details: Result, problems: dict[str, str]) -> dict[str, Element] | None:
    """The ``<gpu>`` elements by PCI address; None when the document is not whole, which is then a problem."""
    from xml.etree import ElementTree  # costs 10 ms at import; only this probe needs it

    _, begins, rest = details.text.partition("<?xml")
    if not begins:
        if not problems:
            _add_problem(problems, f"nvidia-smi -q -x gave no document: {said(details) or details.trouble or 'it said nothing'}")
        return None
    content, end, _ = rest.partition("?>")[2].partition("</nvidia_smi_log>")
    # WHY: an entity can be defined to blow up when it is read; nvidia-smi defines none.
    if "<!ENTITY" in content:
        raise CannotTell("the answer of nvidia-smi -q -x defines entities: this is not nvidia-smi")
    try:
        root = ElementTree.fromstring(content + end)
    except ElementTree.ParseError as error:
        _add_problem(problems, f"nvidia-smi -q -x gave a broken document ({error})")
        return None
    found = {}
    for gpu in root.iterfind("gpu"):
        try:
            found[pci_address(gpu.get("id", ""))] = gpu
        except ValueError:
            _add_problem(problems, f"nvidia-smi -q -x names a GPU without an address: {gpu.get('id')!r}")
    return found


def _information(files: remote.Files) -> dict[str, dict[str, str]]:
    """/proc/driver/nvidia/gpus/<pci>/information by address; a GPU whose file cannot be read has {"unreadable": why}."""
    proc: dict[str, dict[str, str]] = {}
    for path, text in files.files.items():
        proc[pci_address(path.split("/")[-2])] = _pairs(text)
    for path, why in files.unreadable.items():
        proc[pci_address(path.split("/")[-2])] = {"unreadable": why}
    return dict(sorted(proc.items()))


def _compute_apps(text: str) -> tuple[ComputeApp, ...]:
    apps = []
    for line in text.splitlines():
        if not line.strip() or line.strip() == "No running processes found":
            continue
        # WHY not a CSV reader: a process's name is its command line and may hold commas; nothing is quoted.
        found = re.fullmatch(r"\s*(\d+), (\S+), (.*), (\S+(?: MiB)?|\[.*\])\s*", line)
        if not found or not _ANY_PCI.fullmatch(found[2]):
            raise CannotTell(f"nvidia-smi said a line that is no process, so its list may not be whole: {line[:200]!r}")
        apps.append(ComputeApp(int(found[1]), pci_address(found[2]), found[3].strip(), _number(found[4])))
    return tuple(apps)

"""An SGLang server: its version and own parser, its checkpoint, what it says of itself, its processes, and who owns its port."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, prefer_root, said, text_of
from proofbook.probes.memory import CacheFacts, PageCache, list_shards, read_shards, start_time
from proofbook.probes.sglang_flags import server_words
from proofbook.probes.systemd import ProcessFacts, UnitProcess, UnitState, _argv
from proofbook.probes.unit_files import UnitFiles, UnitSettings
from proofbook.remote.looking import SGLANG_VERSION, Packages, parse_packages

__all__ = [
    "Checkpoint",
    "CheckpointFacts",
    "LauncherHelp",
    "Listener",
    "ModelInfo",
    "PortOwner",
    "ProcessTable",
    "Processes",
    "ServedCache",
    "ServedCheckpoint",
    "ServerFacts",
    "ServerInfo",
    "ServerProcess",
    "Version",
    "VersionFacts",
    "base_of",
    "launch_of",
    "port_of",
]

#: Variables of a service that decide which packages its Python finds.
_IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PATH", "CUDA_HOME", "PYTHONNOUSERSITE")


# --------------------------------------------------------------------------------------------------- the version


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is launched: its Python, and the words that make it print its help."""

    python: str
    help: tuple[str, ...]


def launch_of(argv: Sequence[str]) -> Launch:
    """From the argv of a server (of its process, or of its unit). Raises CannotTell when it is not a plain SGLang launch."""
    words = list(argv)
    if not words:
        raise CannotTell("there is no command line")
    program = words[0].rpartition("/")[2]
    if program == "sglang" and words[1:2] == ["serve"]:
        folder = words[0].rpartition("/")[0]
        return Launch(f"{folder}/python" if folder else "python3", (words[0], "serve", "--help"))
    if not re.fullmatch(r"python[\d.]*", program):
        raise CannotTell(f"it is launched by {program!r}, not by a Python or by `sglang serve`: its packages cannot be told")
    rest = words[1:]
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        options.append(rest.pop(0))
        if options[-1] in ("-X", "-W") and rest:
            options.append(rest.pop(0))
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Launch(words[0], (words[0], *options, "-m", rest[1], "--help"))
    if rest:  # a script: `python /opt/venv/bin/sglang serve`, or `python launch_server.py`
        verb = ("serve",) if rest[0].rpartition("/")[2] == "sglang" and rest[1:2] == ["serve"] else ()
        return Launch(words[0], (words[0], *options, rest[0], *verb, "--help"))
    raise CannotTell("its Python is given nothing to run")


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Which SGLang a unit's Python has. ``version`` is "" where the package says none; ``running``: told by its process."""

    version: str  # "0.5.9", "0.5.10.post1", "0.5.11.dev12+g1a2b3c"
    python: str  # path
    packages: Packages
    running: bool

    @property
    def release(self) -> tuple[int, ...]:
        """``(0, 5, 10)`` of "0.5.10.post1". Raises CannotTell when there is no number."""
        return release(self.version)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version up to the first part that is none."""
    found = re.match(r"(\d+(?:\.\d+)*)", version)
    if not found:
        raise CannotTell(f"the version of SGLang is {version or 'not told'!s}, so what it can do is not known")
    return tuple(int(part) for part in found[1].split("."))


@dataclass(frozen=True)
class Version(Probe[VersionFacts]):
    """The installed SGLang, as the Python of the RUNNING process finds it (of the unit's file when it does not run).

    WHY not ``pip list``: a machine has several environments; only the one that the process came from counts. What is
    installed now may be newer than what runs, when somebody upgraded it under a running server.
    """

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.Version"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], VersionFacts]:
        launch, prefix, running = yield from _launch(self.unit, self.container)
        asked = command(*prefix, launch.python, "-c", SGLANG_VERSION, timeout_s=30, root=True)
        (answer,) = yield from prefer_root(inside(self.container, asked))
        text_of(answer)
        packages = parse_packages(answer)
        version = packages.versions.get("sglang")
        if not version:
            raise CannotTell(f"{launch.python} has no package sglang: is it launched from a source tree?")
        return VersionFacts(version, launch.python, packages, running)


@dataclass(frozen=True)
class LauncherHelp(Probe[str]):
    """What the installed launcher says to ``--help``: its own parser's word on its flags. Takes up to 120 s (it imports all)."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.LauncherHelp"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], str]:
        launch, prefix, _ = yield from _launch(self.unit, self.container)
        (answer,) = yield from prefer_root(
            inside(self.container, command(*(prefix or ("env",)), "COLUMNS=200", *launch.help, timeout_s=120, root=True))
        )
        text = text_of(answer)
        if "--model-path" not in text:
            raise CannotTell("what the launcher printed is not the help of an SGLang server")
        return text


def _launch(
    unit: str, container: ContainerSpec | None
) -> Generator[Sequence[Command], Sequence[Result], tuple[Launch, tuple[str, ...], bool]]:
    """How the unit's server is launched, the words before a command that finds the same packages, and whether it runs."""
    state = yield from UnitState(unit, container).ask()
    settings = yield from UnitSettings(unit, container).ask()
    if state.main_pid:
        process: ProcessFacts = yield from UnitProcess(unit, container).ask()
        argv, environment = process.argv, process.environ or {}
    else:
        files = yield from UnitFiles(unit, container).ask()
        effective = files.effective
        environment = effective.environment_with(files.environment)
        argv = effective.command.words_with(environment)
    launch = launch_of(argv)
    variables = tuple(f"{name}={environment[name]}" for name in _IMPORT_VARIABLES if name in environment)
    # WHY not root: code of the service's environment runs as whom the service runs as, never as more.
    user = ("runuser", "-u", settings.user, "--") if settings.user not in ("", "root", "0") else ()
    return launch, (*user, *(("env", *variables) if variables else ())), bool(state.main_pid)


# ------------------------------------------------------------------------------------------------ the checkpoint


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint on disk. ``config`` is config.json; ``mtp`` are the names of its tensors of the MTP layers.

    ``shards`` is name to size in bytes of the weight files that are there, ``missing`` those that the index names and that
    are not. ``index`` is False where the checkpoint has no index (a single file): then its tensors are not known.
    """

    path: str
    config: Mapping[str, Any] = field(repr=False, hash=False)
    index: bool
    tensors: int
    mtp: tuple[str, ...] = field(repr=False)
    shards: Mapping[str, int] = field(repr=False, hash=False)
    missing: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all weight files that are there."""
        return sum(self.shards.values())

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The configuration of the language model: a multimodal checkpoint nests it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def mtp_layers(self) -> int:
        """How many MTP layers its configuration promises; 0 when it promises none."""
        for config in (self.text_config, self.config):
            for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
                if isinstance(config.get(key), int):
                    return int(config[key])
        return 0


#: Tensors of multi-token prediction: Qwen3-Next and Qwen3.5 name them ``mtp.…``; others nest them or say nextn.
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_layers|nextn_predict_layers)\.")


@dataclass(frozen=True)
class Checkpoint(Probe[CheckpointFacts]):
    """Whether a checkpoint brings the weights that drafts are made with: ``mtp.layers.0.mlp.experts.0.gate_proj.weight``.

    WHY the index: a converted or quantised checkpoint may have lost them, and the server starts all the same and accepts
    nothing.
    """

    path: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.Checkpoint"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], CheckpointFacts]:
        if not self.path.startswith("/"):
            raise CannotTell(f"{self.path!r} is the name of a repository, not a folder: which files it loads is not known")
        folder = self.path.rstrip("/")
        asked = [
            command("cat", f"{folder}/config.json", root=True),
            command("cat", f"{folder}/model.safetensors.index.json", root=True, timeout_s=60),
            list_shards(folder),
        ]
        config, index, listed = yield from prefer_root(*(inside(self.container, c) for c in asked))
        settings = _object(text_of(config), f"{folder}/config.json")
        shards = read_shards(listed)
        if "No such file" in index.error_text and index.exit_status:
            return CheckpointFacts(self.path, settings, False, 0, (), shards, ())
        weights = _object(text_of(index), f"{folder}/model.safetensors.index.json").get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise CannotTell(f"{folder}/model.safetensors.index.json names no tensors")
        wanted = sorted({str(name) for name in weights.values()})
        return CheckpointFacts(
            path=self.path,
            config=settings,
            index=True,
            tensors=len(weights),
            mtp=tuple(sorted(name for name in weights if _MTP.search(name))),
            shards=shards,
            missing=tuple(name for name in wanted if name not in shards),
        )


@dataclass(frozen=True)
class ServedCheckpoint(Probe[CheckpointFacts]):
    """The checkpoint that a unit's main process was told to load (``--model-path``)."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.ServedCheckpoint"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], CheckpointFacts]:
        path = yield from _model_path(self.unit, self.container)
        return (yield from Checkpoint(path, self.container).ask())


@dataclass(frozen=True)
class ServedCache(Probe[CacheFacts]):
    """How much of that checkpoint lies in the page cache."""

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.ServedCache"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], CacheFacts]:
        path = yield from _model_path(self.unit, self.container)
        return (yield from PageCache(path, self.container).ask())


def _model_path(unit: str, container: ContainerSpec | None) -> Generator[Sequence[Command], Sequence[Result], str]:
    process: ProcessFacts = yield from UnitProcess(unit, container).ask()
    _, words = server_words(process.argv)
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--model-path", "--model") and (equals or n + 1 < len(words)):
            return value if equals else words[n + 1]
    raise CannotTell(f"the command line of {unit} names no --model-path")


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CannotTell(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CannotTell(f"{what} is no JSON object")
    return value


# ---------------------------------------------------------------------------------------- what it says of itself


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself: its resolved arguments and its scheduler's state.

    ``NEXTN`` is stored as ``EAGLE``. ``accept_length`` is a lifetime average since the start or the last flush, None until
    forty decode steps were counted.
    """

    path: str  # the endpoint that answered
    said: Mapping[str, Any] = field(repr=False, hash=False)

    @property
    def version(self) -> str:
        return str(self.said.get("version") or "")

    @property
    def algorithm(self) -> str:
        """ "" when speculation is off."""
        return str(self.said.get("speculative_algorithm") or "")

    def number(self, name: str) -> int | float | None:
        value = self.said.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def state(self) -> Mapping[str, Any]:
        states = self.said.get("internal_states")
        return states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}

    @property
    def effective_running(self) -> int | None:
        """How many requests really run at once, after the memory was shared out."""
        value = self.state.get("effective_max_running_requests_per_dp")
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def accept_length(self) -> float | None:
        value = self.state.get("avg_spec_accept_length")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


#: SGLang's own port, where an address names none.
_PORT = 30000


def port_of(url: str) -> int:
    """The port of a service's address; SGLang's own where it has none."""
    return urlsplit(url).port or _PORT


def base_of(url: str) -> str:
    """``http://127.0.0.1:30000`` of any address below it; of the loopback where there is no address."""
    parts = urlsplit(url or f"http://127.0.0.1:{_PORT}")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or _PORT}"


_DEADLINE_S = 10
_CURL = {7: "connection refused", 28: "no answer within 10 s", 52: "the connection was closed without an answer"}


@dataclass(frozen=True)
class ServerInfo(Probe[ServerFacts]):
    """``/server_info`` (up to 0.5.5 ``/get_server_info``) of the server at ``url``, asked from where the service runs.

    It asks the scheduler, so it hangs when the scheduler is stuck: no answer is an answer, and says so.
    """

    url: str  # "http://127.0.0.1:30000"
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.ServerInfo"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ServerFacts]:
        path, body = yield from _get(self.url, ("/server_info", "/get_server_info"), self.container)
        return ServerFacts(path, _object(body, path))


@dataclass(frozen=True)
class ModelInfo(Probe[Mapping[str, Any]]):
    """``/model_info`` (up to 0.5.5 ``/get_model_info``): which model the server at ``url`` serves."""

    url: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.ModelInfo"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], Mapping[str, Any]]:
        path, body = yield from _get(self.url, ("/model_info", "/get_model_info"), self.container)
        return _object(body, path)


def _get(
    url: str, paths: tuple[str, ...], container: ContainerSpec | None
) -> Generator[Sequence[Command], Sequence[Result], tuple[str, str]]:
    """The body of the first of ``paths`` that answers 200. Raises CannotTell that says how they failed."""
    base = url.rstrip("/")
    asked = [
        command("curl", "-sS", "-m", str(_DEADLINE_S), "-w", "\\n%{http_code}", base + path, timeout_s=_DEADLINE_S + 10)
        for path in paths
    ]
    answers = yield [inside(container, c) for c in asked]
    troubles = []
    for path, answer in zip(paths, answers, strict=True):
        body, _, code = answer.text.rpartition("\n")
        if answer.exit_status == 0 and code.strip() == "200":
            return path, body
        if answer.exit_status in _CURL:
            troubles.append(f"{base}{path}: {_CURL[answer.exit_status]}")
        elif answer.exit_status == 0:
            why = " (it wants an API key)" if code.strip() in ("401", "403") else ""
            troubles.append(f"{base}{path}: HTTP {code.strip()[:12]}{why}")
        else:
            text_of(answer)
    raise CannotTell("; ".join(troubles))


# -------------------------------------------------------------------------------------------------- its processes


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One process in the unit's control group. ``title`` is its command line, or the title that it gave itself."""

    pid: int
    parent: int
    state: str  # R, S, D, Z, …
    title: str
    started_s: float | None  # seconds since boot

    @property
    def rank(self) -> str:
        """``TP0`` of ``sglang::scheduler_TP0`` (and ``DP0_TP1``-like names), "" for other processes."""
        found = re.match(r"sglang::scheduler(?:_(\w+))?", self.title)
        return (found[1] or "TP0") if found else ""


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """The processes of a unit's control group, the main one included; empty when it does not run."""

    unit: str
    control_group: str
    processes: tuple[ServerProcess, ...]

    @property
    def schedulers(self) -> tuple[ServerProcess, ...]:
        return tuple(p for p in self.processes if p.rank and p.state != "Z")

    @property
    def detokenizer(self) -> ServerProcess | None:
        return next((p for p in self.processes if p.title.startswith("sglang::detokenizer") and p.state != "Z"), None)


@dataclass(frozen=True)
class Processes(Probe[ProcessTable]):
    """Every process in the control group of ``unit``, with the titles that SGLang gives its ranks.

    WHY the control group: up to 0.5.9 a rank may die and the main process lives on, with the unit "active".
    """

    unit: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.Processes"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], ProcessTable]:
        settings = yield from UnitSettings(self.unit, self.container).ask()
        group = settings.control_group
        if not group:
            return ProcessTable(self.unit, "", ())
        # the unified hierarchy, processes in groups below (Delegate=), and systemd's own hierarchy of old machines
        paths = (
            f"/sys/fs/cgroup{group}/cgroup.procs",
            f"/sys/fs/cgroup{group}/*/cgroup.procs",
            f"/sys/fs/cgroup/systemd{group}/cgroup.procs",
        )
        (listed,) = yield [inside(self.container, remote.read_files(*paths))]
        text_of(listed)
        files = remote.parse_files(listed)
        if not files.files:
            raise CannotTell(f"the control group {group} of {self.unit} cannot be read")
        pids = sorted({int(line) for text in files.files.values() for line in text.split() if line.isdecimal() and line != "0"})
        if not pids:
            return ProcessTable(self.unit, group, ())
        asked = [remote.read_files(*(f"/proc/{pid}/stat" for pid in pids))]
        asked += [command("cat", f"/proc/{pid}/cmdline") for pid in pids]
        stats, *lines = yield [inside(self.container, c) for c in asked]
        text_of(stats)
        by_path = remote.parse_files(stats).files
        found = []
        for pid, line in zip(pids, lines, strict=True):
            stat = by_path.get(f"/proc/{pid}/stat", "")
            if stat:  # else it ended between the two questions
                found.append(_process(pid, stat, line))
        return ProcessTable(self.unit, group, tuple(found))


def _process(pid: int, stat: str, line: Result) -> ServerProcess:
    name, _, rest = stat.rpartition(")")
    fields = rest.split()
    try:
        title = " ".join(_argv(text_of(line), pid)).strip()
    except CannotTell:
        title = ""  # a zombie has no command line
    return ServerProcess(
        pid=pid,
        parent=int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else 0,
        state=fields[0] if fields else "",
        title=title or name.partition("(")[2],
        started_s=start_time(stat),
    )


# ------------------------------------------------------------------------------------------------------ its port


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket and the processes that hold it (number in the PID namespace that was asked, name)."""

    address: str
    port: int
    owners: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class PortOwner(Probe[tuple[Listener, ...]]):
    """Who listens on ``port``: ``LISTEN 0 2048 0.0.0.0:30000 0.0.0.0:* users:(("python",pid=812,fd=73))``.

    WHY: an old instance that kept the port answers 200 on /health while the new one dies with "address already in use".
    """

    port: int
    container: ContainerSpec | None = None
    name: ClassVar[str] = "sglang.PortOwner"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[Listener, ...]]:
        (answer,) = yield from prefer_root(inside(self.container, command("ss", "-ltnpH", root=True)))
        found = []
        for line in text_of(answer).splitlines():
            words = line.split(maxsplit=5)
            if len(words) < 5 or words[0] != "LISTEN":
                raise CannotTell(
                    f"ss said a line that is no listening socket: {line[:160]!r} {said(answer) if answer.stderr else ''}"
                )
            address, _, port = words[3].rpartition(":")
            if port == str(self.port):
                owners = re.findall(r'\("((?:[^"\\]|\\.)*)",pid=(\d+),fd=\d+\)', words[5] if len(words) > 5 else "")
                found.append(Listener(address, self.port, tuple((int(pid), name) for name, pid in owners)))
        return tuple(found)

"""The lab from the outside: start a simulated machine when it is first needed, share it, wait on its clock, put it away.

A machine is a process of its own with a folder, ``$PROOFBOOK_LAB_DIR/<scenario>`` (default ``~/.local/state/proofbook/lab``)::

    identity.json  host_key_first  host_key_second  client_key      made once; kept over resets
    machine.json                                                    what the process may know: machine, faults, clock
    clock  control.sock  daemon.json  known_hosts                   while it runs
    state.pickle                                                    the machine, for a process that was killed
    log  unknown_commands.log

After ``kill -9`` the next :func:`ensure` starts a process that goes on with the saved machine: its boots, its files and its
time. After :func:`stop`, :func:`reset` or half an hour without use the next one is new, so that a scenario can be played again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from proofbook.errors import LabError
from proofbook.lab.sim import scenario as scenario_files
from proofbook.lab.sim.clock import SharedClock
from proofbook.lab.sim.scenario import Expectation

__all__ = [
    "Endpoint",
    "Expectation",
    "LabClock",
    "ScenarioInfo",
    "ensure",
    "expectations",
    "folder",
    "host_table",
    "reset",
    "scenarios",
    "status",
    "stop",
    "unknown_commands",
]

#: How long a process may take to serve (real seconds); it takes well under one.
_START_S = 30.0
_IDLE_S = 1800.0

#: The processes that this one started: kept, so that one that ended is reaped.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a lab machine over SSH. ``reused``: it ran already, and may have been rebooted or changed since."""

    scenario: str
    address: str
    port: int
    user: str
    identity_file: str
    known_hosts: str
    state_dir: Path
    reused: bool
    started_at: datetime  # real time
    resumed: bool = False  # its process was killed, and this one went on with its state
    reachable: bool = True  # False while it is down: nothing listens at its port
    answers_in_s: float | None = None  # seconds of its clock until it answers again; None when it does not by itself


@dataclass(frozen=True, slots=True)
class ScenarioInfo:
    """One scenario as a list shows it."""

    scenario: str
    title: str
    wrong: str  # one sentence
    runbooks: Mapping[str, Expectation]

    def as_json(self) -> dict[str, Any]:
        """{"scenario", "title", "wrong", "runbooks": {name: {"parameters", "verdict", "status", "exit_code"}}}"""
        return asdict(self)


class LabClock:
    """The clock of a lab machine: real time passes 1:1, and a wait on purpose runs fast. Raises LabError when it is gone."""

    def __init__(self, state_dir: Path | str) -> None:
        self._folder = Path(state_dir)
        try:
            self._clock = SharedClock(self._folder / "clock")
        except (OSError, ValueError) as error:
            raise LabError(f"the lab machine in {self._folder} has no clock: {error}", hint="start it first") from error

    def now(self) -> datetime:
        """UTC."""
        return datetime.fromtimestamp(self._clock.now(), UTC)

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` of the machine's time pass; it takes a small part of that, and what is due then happens on the way."""
        if seconds <= 0:
            return
        answer = _ask(self._folder, {"op": "sleep", "seconds": seconds}, timeout_s=seconds + 60.0)
        if "now" not in answer:
            raise LabError(f"the lab machine in {self._folder} did not wait: {answer.get('error', answer)}")

    @property
    def rate(self) -> float:
        """How many lab seconds pass in a real one during a wait."""
        return float(_read_json(self._folder / "machine.json").get("clock", {}).get("rate", 1.0))


def scenarios() -> list[ScenarioInfo]:
    """What there is to play, by name."""
    found = (scenario_files.load(name) for name in scenario_files.names())
    return [ScenarioInfo(s.name, s.title, s.wrong, s.expect) for s in found]


def host_table(scenario: str) -> dict[str, Any]:
    """What the owner of the machine means it to be: the inventory's table of the host."""
    return scenario_files.load(scenario).intent


def expectations(scenario: str) -> dict[str, Expectation]:
    """What a run of each runbook against the scenario comes to. The machine itself does not know it."""
    return scenario_files.load(scenario).expect


def folder(scenario: str | None = None) -> Path:
    """The folder of a lab machine, or of the whole lab."""
    named = os.environ.get("PROOFBOOK_LAB_DIR")
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    root = Path(named) if named else Path(state) / "proofbook" / "lab"
    if scenario and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", scenario):
        raise LabError(f"not the name of a lab machine: {scenario!r}", hint="`proofbook lab list` says which there are")
    return root / scenario if scenario else root


def unknown_commands(scenario: str) -> list[str]:
    """What the machine was asked and did not know, since it was last reset."""
    try:
        return (folder(scenario) / "unknown_commands.log").read_text().splitlines()
    except FileNotFoundError:
        return []


def ensure(scenario: str) -> Endpoint:
    """The machine of a scenario, started if it does not run. Two at once get the same one. Raises LabError."""
    loaded = scenario_files.load(scenario)
    home = folder(scenario)
    with _locked(home):
        identity = _identity(home)
        data = {**loaded.served(), "seed": identity["seed"], "idle_s": float(os.environ.get("PROOFBOOK_LAB_IDLE_S", _IDLE_S))}
        data["fingerprint"] = _fingerprint(data)
        about = _alive(home)
        if about and about["fingerprint"] != data["fingerprint"]:
            _end(home, about)  # the scenario or the lab itself was changed: what runs is not what was asked for
            about = None
        reused = about is not None
        if about is None:
            data["port"] = _port_of_last_time(home)
            _start(home, data)
            about = _read_json(home / "daemon.json")
            about = (_alive(home) if about["resumed"] else None) or about  # a new one answers
        return Endpoint(
            scenario=scenario,
            address="127.0.0.1",
            port=about["port"],
            user=about["user"],
            identity_file=str(home / "client_key"),
            known_hosts=str(home / "known_hosts"),
            state_dir=home,
            reused=reused,
            started_at=datetime.fromisoformat(about["started_at"]),
            resumed=about["resumed"],
            reachable=about.get("answer", {}).get("reachable", True),
            answers_in_s=about.get("answer", {}).get("answers_in_s"),
        )


def stop(scenario: str | None = None) -> list[str]:
    """Put away a machine, or all; the names of those that ran."""
    stopped = []
    for name in [scenario] if scenario else _present():
        home = folder(name)
        if not home.exists():
            continue
        with _locked(home):
            about = _alive(home)
            if about:
                _end(home, about)
                stopped.append(name)
    return stopped


def reset(scenario: str | None = None) -> list[str]:
    """Forget a machine's state, or all machines'; its keys and its machine-id stay. The names of those that there were."""
    names = [scenario] if scenario else _present()
    stop(scenario)
    for name in names:
        home = folder(name)
        if home.exists():
            with _locked(home):
                for stale in ("state.pickle", "clock", "control.sock", "daemon.json", "unknown_commands.log"):
                    (home / stale).unlink(missing_ok=True)
    return names


def status() -> list[dict[str, Any]]:
    """The machines that run now, by name: port, pid, started_at (real time), now (the lab's clock), reachable, boot_id, …"""
    running = []
    for name in _present():
        home = folder(name)
        about = _alive(home)
        if about:
            answer = about["answer"]
            now = datetime.fromtimestamp(answer["now"], UTC).isoformat(timespec="seconds")
            running.append(
                {
                    "scenario": name,
                    "address": "127.0.0.1",
                    "port": about["port"],
                    "pid": about["pid"],
                    "started_at": about["started_at"],
                    "now": now,
                    "reachable": answer["reachable"],
                    "answers_in_s": answer["answers_in_s"],
                    "boot_id": answer["boot_id"],
                    "requested_boots": answer["requested_boots"],
                    "connections": answer["connections"],
                    "state_dir": str(home),
                }
            )
    return running


# ------------------------------------------------------------------------------------------- inside


def _present() -> list[str]:
    root = folder()
    return sorted(p.parent.name for p in root.glob("*/identity.json")) if root.exists() else []


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the machine's lock: starting and ending happen one at a time."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LabError(
            f"the lab's folder {home} cannot be used: {error}", hint="set PROOFBOOK_LAB_DIR to a folder that can be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _identity(home: Path) -> dict[str, Any]:
    """The machine's seed, of which its machine-id is made, and its keys; made once."""
    known = _read_json(home / "identity.json")
    if known and all((home / k).exists() for k in ("host_key_first", "host_key_second", "client_key")):
        return known
    for name in ("host_key_first", "host_key_second", "client_key"):
        _make_key(home / name)
    known = {"seed": str(uuid.uuid4())}
    (home / "identity.json").write_text(json.dumps(known))
    return known


def _make_key(path: Path) -> None:
    """An Ed25519 key pair in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private)
    path.with_name(path.name + ".pub").write_bytes(public + b" lab\n")


def _fingerprint(data: dict[str, Any]) -> str:
    """What a machine is made of: its data and the lab's code."""
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode())
    for package in ("proofbook.lab.sim", "proofbook.lab.standin", "proofbook.remote"):
        for source in sorted(resources.files(package).iterdir(), key=lambda f: f.name):
            if source.name.endswith((".py", ".sh")) and source.name not in ("client.py", "scenario.py"):
                digest.update(source.read_bytes())
    return digest.hexdigest()


def _port_of_last_time(home: Path) -> int:
    """The port in known_hosts, so that a person's open window still fits."""
    try:
        return int((home / "known_hosts").read_text().split("]:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _alive(home: Path) -> dict[str, Any] | None:
    """What daemon.json says, if that very process still answers; None when it is gone (its files are then stale)."""
    about = _read_json(home / "daemon.json")
    if not about:
        return None
    try:
        started = Path(f"/proc/{about['pid']}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    if started != about["pid_started"]:
        return None
    try:
        answer = _ask(home, {"op": "status"}, timeout_s=10.0)
    except LabError:
        return None
    return {**about, "answer": answer} if answer.get("pid") == about["pid"] else None


def _ask(home: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """One request to the control socket. Raises LabError when nobody answers."""
    # WHY: a socket's path holds 107 bytes and a folder may be deeper; the way over an open descriptor is always short.
    try:
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LabError(f"the lab machine in {home} is not there: {error}") from error
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(timeout_s)
            channel.connect(f"/proc/self/fd/{descriptor}/control.sock")
            channel.sendall(json.dumps(request).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                chunk = channel.recv(65536)
                if not chunk:
                    raise LabError(f"the lab machine in {home} went away while it was asked")
                data += chunk
            answer = json.loads(data)
    except (OSError, ValueError) as error:
        raise LabError(
            f"the lab machine in {home} does not answer: {error}", hint="`proofbook lab status` says what runs"
        ) from error
    finally:
        os.close(descriptor)
    return answer if isinstance(answer, dict) else {}


def _start(home: Path, data: dict[str, Any]) -> None:
    """Start the process and wait until it serves. Raises LabError with the end of its log."""
    for stale in ("daemon.json", "control.sock"):
        (home / stale).unlink(missing_ok=True)
    (home / "machine.json").write_text(json.dumps(data))
    readable, writable = os.pipe()
    with (home / "log").open("ab") as log:
        process = _spawn(home, writable, log.fileno())
    os.close(writable)
    _started[:] = [*(p for p in _started if p.poll() is None), process]
    try:
        said = _read_line(readable, _START_S)
    finally:
        os.close(readable)
    if said != "ready":
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        tail = (home / "log").read_text(errors="replace").strip().splitlines()[-3:]
        raise LabError(
            f"the lab machine did not start: {said.removeprefix('failed ') or ' / '.join(tail)}", hint=f"see {home / 'log'}"
        )


def _spawn(home: Path, ready: int, log: int) -> subprocess.Popen[bytes]:
    """The process of a machine; it tells ``ready`` when it serves, and writes to ``log`` (descriptors)."""
    library = str(Path(str(resources.files("proofbook"))).parent)
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    environment["PYTHONPATH"] = library
    return subprocess.Popen(
        [sys.executable, "-m", "proofbook.lab.sim.server", str(home), str(ready)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=(ready,),
        env=environment,
        cwd=home,
    )


def _read_line(descriptor: int, timeout_s: float) -> str:
    import select

    data, deadline = b"", time.monotonic() + timeout_s
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(descriptor, 65536) if ready else b""
        if not chunk:
            break
        data += chunk
    return data.decode("utf-8", "replace").strip()


def _end(home: Path, about: dict[str, Any]) -> None:
    """Ask the process to end; make it, if it does not."""
    pid = about["pid"]
    with contextlib.suppress(LabError):
        _ask(home, {"op": "stop"}, timeout_s=5.0)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if not _runs(pid, about["pid_started"]):
            break
        time.sleep(0.01)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for stale in ("daemon.json", "control.sock", "state.pickle"):
        (home / stale).unlink(missing_ok=True)


def _runs(pid: int, started: str) -> bool:
    for process in _started:
        process.poll()  # it may be a child of this very process, and would stay a zombie
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"

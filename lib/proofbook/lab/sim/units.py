"""Unit files: what systemd reads from them when it loads a unit, and whether a unit is enabled.

A unit's file and drop-ins live in its system's files, so that what a person edits there takes effect exactly when the
real systemd would let it: after ``daemon-reload``, and for a running process after its next start.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proofbook.lab.sim.os_state import System, Unit
from proofbook.lab.sim.vfs import FileNode, link

SEARCH = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
_WANTS = "/etc/systemd/system/multi-user.target.wants"

Sections = dict[str, list[tuple[str, str]]]


def text_of(system: System, path: str) -> str | None:
    """The text of a file that was written there, or None."""
    node = system.files.get(path)
    if node is None or node.kind != "file":
        return None
    return node.read().decode("utf-8", "replace")


def fragment_path(system: System, name: str) -> str:
    """Where the unit's file is; "" when there is none."""
    return next((p for d in SEARCH if system.files.get(p := f"{d}/{name}") is not None), "")


def drop_in_paths(system: System, name: str) -> list[str]:
    """The unit's drop-ins in the order in which systemd reads them: by file name, ``/etc`` hiding ``/usr/lib``."""
    by_name: dict[str, str] = {}
    for folder in reversed(SEARCH):
        prefix = f"{folder}/{name}.d/"
        for path, node in system.files.items():
            if node is not None and path.startswith(prefix) and path.endswith(".conf"):
                by_name[posixpath.basename(path)] = path
    return [by_name[n] for n in sorted(by_name)]


@dataclass(frozen=True, slots=True)
class Line:
    """One setting of a unit file, continuations joined; ``number`` is that of its last line, as systemd counts it."""

    number: int
    text: str


def logical_lines(text: str) -> Iterator[Line]:
    """The settings and section heads of a unit file.

    WHY so: a backslash continues a line only as its very last character; a comment inside a continuation is left out, and the
    continuation goes on.
    """
    joined = ""
    number = 0
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip()[:1] in ("#", ";"):
            continue
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        whole, joined = (joined + line).strip(), ""
        if whole:
            yield Line(number, whole)
    if joined.strip():
        yield Line(number, joined.strip())


def parse(text: str) -> Sections:
    """Sections of (key, value) in order; what is no setting is left out."""
    sections: Sections = {}
    current: list[tuple[str, str]] = []
    for line in logical_lines(text):
        if line.text.startswith("[") and line.text.endswith("]"):
            current = sections.setdefault(line.text[1:-1], [])
        elif "=" in line.text:
            key, _, value = line.text.partition("=")
            current.append((key.strip(), value.strip()))
    return sections


def dangling_escape(text: str) -> bool:
    """Whether a value ends in a lone backslash: meant as a continuation, and followed by a blank."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def split(value: str) -> list[str]:
    """The words of a command line as systemd takes them apart; a lone backslash at the end stays as a word."""
    if dangling_escape(value):
        return [*split(value[:-1]), "\\"]
    try:
        return shlex.split(value)
    except ValueError:  # quotes that do not end: systemd ignores the line
        return []


def exec_starts(texts: Iterable[str]) -> tuple[list[list[str]], str]:
    """(the commands that ``ExecStart=`` names in all files of a unit, the unit's type)."""
    starts: list[list[str]] = []
    kind = "simple"
    for text in texts:
        for key, value in parse(text).get("Service", []):
            if key == "Type":
                kind = value
            elif key == "ExecStart":
                starts = [*starts, split(value.lstrip("-@:+!"))] if value else []  # an empty value takes back the ones before
    return [s for s in starts if s], kind


def load(system: System, name: str, known: Unit | None = None) -> Unit | None:
    """The unit as its files define it now, keeping the run-time state of ``known``; None when there is no such file."""
    path = fragment_path(system, name)
    if not path:
        return None
    unit = known or Unit(name=name, description=name)
    unit.fragment, unit.drop_ins = path, drop_in_paths(system, name)
    unit.description, unit.type, unit.restart, unit.restart_s, unit.identifier = name, "simple", "no", 0.1, ""
    unit.environment, unit.environment_files = {}, []
    unit.kill_mode, unit.timeout_stop_s = "control-group", 90.0
    texts = [t for t in (text_of(system, p) for p in [path, *unit.drop_ins]) if t]
    starts, kind = exec_starts(texts)
    unit.exec_start = starts[0] if starts else []
    unit.load = "bad-setting" if len(starts) > 1 and kind != "oneshot" else "loaded"
    for text in texts:
        sections = parse(text)
        for key, value in [*sections.get("Unit", []), *sections.get("Service", [])]:
            _apply(system, unit, key, value)
    unit.enabled = enabled_state(system, name)
    unit.need_reload = False
    return unit


def _apply(system: System, unit: Unit, key: str, value: str) -> None:
    if key == "Description":
        unit.description = value
    elif key == "Type":
        unit.type = value
    elif key == "Restart":
        unit.restart = value
    elif key == "RestartSec":
        unit.restart_s = seconds(value)
    elif key == "TimeoutStopSec":
        unit.timeout_stop_s = seconds(value)
    elif key == "KillMode":
        unit.kill_mode = value
    elif key == "SyslogIdentifier":
        unit.identifier = value
    elif key == "Environment":
        if not value:
            unit.environment = {}
        unit.environment.update((k, v) for k, e, v in (w.partition("=") for w in split(value)) if e)
    elif key == "EnvironmentFile":
        unit.environment_files = [*unit.environment_files, value] if value else []
        text = text_of(system, value.lstrip("-")) or ""
        lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
        unit.environment.update((k.strip(), v.strip().strip("\"'")) for k, e, v in lines if e)


def seconds(text: str) -> float:
    """A span as unit files write it: ``10``, ``10s``, ``2min``, ``1min 30s``, ``infinity``."""
    if text == "infinity":
        return float("inf")
    scale = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}
    return sum(float(n) * scale.get(u, 1.0) for n, u in re.findall(r"([\d.]+)\s*([a-z]*)", text))


def enabled_state(system: System, name: str) -> str:
    """``enabled``, ``disabled`` or ``static``; "" when there is no unit file."""
    path = fragment_path(system, name)
    if not path:
        return ""
    if "Install" not in parse(text_of(system, path) or ""):
        return "static"
    return "enabled" if system.files.get(f"{_WANTS}/{name}") is not None else "disabled"


def enable(system: System, name: str) -> str:
    """Link the unit into multi-user.target; what systemctl says about it on stderr, "" if it was enabled."""
    if enabled_state(system, name) != "disabled":
        return ""
    system.files[f"{_WANTS}/{name}"] = link(fragment_path(system, name))
    return f"Created symlink '{_WANTS}/{name}' → '{fragment_path(system, name)}'.\n"


def disable(system: System, name: str) -> str:
    """Take the link away; what systemctl says about it on stderr, "" if it was not enabled."""
    if enabled_state(system, name) != "enabled":
        return ""
    system.files[f"{_WANTS}/{name}"] = None
    return f"Removed '{_WANTS}/{name}'.\n"


def write(system: System, path: str, text: str, *, mode: int = 0o644, mtime: float = 0.0) -> None:
    """Put a text file there, as a person or a package would."""
    system.files[path] = FileNode("file", text.encode(), mode=mode, mtime=mtime)

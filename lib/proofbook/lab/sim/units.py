"""Unit files: what systemd reads from them when it loads a unit, and whether a unit is enabled.

A unit's file and drop-ins live in its system's files, so that what a person edits there takes effect exactly when the
real systemd would let it: after ``daemon-reload``, and for a running process after its next start.
"""

from __future__ import annotations

import posixpath
import re
import shlex

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


def parse(text: str) -> Sections:
    """Sections of (key, value) in order; continuation lines joined, comments left out."""
    sections: Sections = {}
    current: list[tuple[str, str]] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and line.endswith("]"):
            current = sections.setdefault(line[1:-1], [])
        elif "=" in line:
            key, _, value = line.partition("=")
            current.append((key.strip(), value.strip()))
    return sections


def load(system: System, name: str, known: Unit | None = None) -> Unit | None:
    """The unit as its files define it now, keeping the run-time state of ``known``; None when there is no such file."""
    path = fragment_path(system, name)
    if not path:
        return None
    unit = known or Unit(name=name, description=name)
    unit.fragment, unit.drop_ins = path, drop_in_paths(system, name)
    unit.description, unit.type, unit.restart, unit.restart_s, unit.identifier = name, "simple", "no", 0.1, ""
    unit.exec_start, unit.environment, unit.environment_files = [], {}, []
    unit.kill_mode, unit.timeout_stop_s = "control-group", 90.0
    for text in filter(None, (text_of(system, p) for p in [path, *unit.drop_ins])):
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
    elif key == "ExecStart":
        unit.exec_start = shlex.split(value.lstrip("-@:+!")) if value else []  # an empty value takes back the ones before
    elif key == "Environment":
        if not value:
            unit.environment = {}
        unit.environment.update((k, v) for k, e, v in (w.partition("=") for w in shlex.split(value)) if e)
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

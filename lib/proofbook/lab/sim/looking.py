"""Programs that look deeper, answered from a simulated machine's state: a unit that is not installed, a Python's packages."""

from __future__ import annotations

import json
import posixpath
import re

from proofbook.lab.sim import units
from proofbook.lab.sim.shell import Answer, Context, said

_KNOWN_SECTIONS = ("Unit", "Service", "Install")


def sglang_version(ctx: Context, arguments: list[str]) -> Answer:
    """The packages that the Python of this userland's services has."""
    names = ("sglang", "torch", "transformers", "flashinfer-python", "sgl-kernel", "sglang-kernel", "xgrammar")
    if not ctx.system.packages:
        return said(json.dumps({"python": "3.13.5", "packages": dict.fromkeys(names)}) + "\n")
    packages = {name: ctx.system.packages.get(name) for name in names}
    return said(json.dumps({"python": "3.12.3", "packages": packages}) + "\n")


def verify_unit(ctx: Context, arguments: list[str]) -> Answer:
    """What ``systemd-analyze verify`` says of a unit whose files come on standard input."""
    unit = arguments[0]
    given: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in ctx.stdin.decode("utf-8", "surrogateescape").split("\n"):
        if line.startswith("F "):
            current = given.setdefault(line[2:], [])
        elif line.startswith("|") and current is not None:
            current.append(line[1:])
        elif line:
            return said(status=65)
    files = {name: "\n".join(lines) + "\n" for name, lines in given.items()}
    ordered = [unit, *sorted(name for name in files if name != unit)]
    complaints = [c for name in ordered if name in files for c in _of_file(name, files[name])]
    status, last = _of_service(ctx, unit, [files[name] for name in ordered if name in files])
    return said("".join(f"{c}\n" for c in [*complaints, *last]) + f"exit {status}\n")


def _of_file(name: str, text: str) -> list[str]:
    """Lines of one file that systemd ignores, and says so."""
    found, section = [], ""
    for line in units.logical_lines(text):
        if line.text.startswith("[") and line.text.endswith("]"):
            section = line.text[1:-1]
            if section not in _KNOWN_SECTIONS and not section.startswith("X-"):
                found.append(f"{name}:{line.number}: Unknown section '{section}'. Ignoring.")
        elif "=" not in line.text:
            found.append(f"{name}:{line.number}: Missing '=', ignoring line.")
        elif section == "Service" and line.text.startswith("ExecStart=") and units.dangling_escape(line.text):
            found.append(f'{name}:{line.number}: Ignoring unknown escape sequences: "\\"')
    return found


def _of_service(ctx: Context, unit: str, texts: list[str]) -> tuple[int, list[str]]:
    """(exit status, what is wrong with the whole)."""
    starts, kind = units.exec_starts(texts)
    if len(starts) > 1 and kind != "oneshot":
        return 1, [
            f"{unit}: Service has more than one ExecStart= setting, which is only allowed for Type=oneshot services. Refusing.",
            f"Unit {unit} has a bad unit file setting.",
        ]
    if not starts:
        return 1, [f"{unit}: Service has no ExecStart=, ExecStop=, or SuccessAction=. Refusing."]
    program = starts[0][0]
    if not re.match(r"/", program):
        found = any(ctx.tree.exists(posixpath.join(d, program)) for d in ("/usr/local/bin", "/usr/bin"))
        return (0, []) if found else (1, [f"{unit}: Command {program} is not executable: No such file or directory"])
    if not ctx.tree.exists(program):
        return 1, [f"{unit}: Command {program} is not executable: No such file or directory"]
    return 0, []

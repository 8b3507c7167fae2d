"""The tour: reboot verification on simulated GPU servers, healthy and broken, as a newcomer sees it first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from proofbook.errors import BadParameter
from proofbook.lab.sim import client
from proofbook.notebook import outputs_folder

RUNBOOK = "reboot-verification"

#: What a newcomer sees: one machine that is right, and the ways in which "it is up again" is not the truth.
TOUR = (
    "healthy",
    "gpu-missing",
    "late-xid79",
    "page-fault-storm",
    "mtp-silently-off",
    "journal-rotated",
    "never-comes-back",
    "other-machine",
)

STYLE = {"PASS": "bold green", "WARN": "bold yellow", "UNKNOWN": "bold magenta", "FAIL": "bold red"}


@dataclass(frozen=True)
class Leg:
    """One scenario of the tour, and how it came out beside how it should."""

    scenario: str
    wrong: str
    right: dict[str, Any]
    came: dict[str, Any]

    @property
    def as_it_should(self) -> bool:
        return all(self.came.get(k) == self.right[k] for k in ("verdict", "status", "exit_code"))


def tour(out: Console, err: Console, *, outputs: Path | None = None, scenarios: Sequence[str] | None = None) -> int:
    """Run the scenarios headless, two at a time, and print what came out. Returns 0 when each came out as it should."""
    known = {info.scenario: info.as_json() for info in client.scenarios()}
    names = [n.removeprefix("lab:") for n in scenarios or TOUR]
    for name in names:
        if RUNBOOK not in known.get(name, {}).get("runbooks", {}):
            raise BadParameter(f"the lab has no scenario {name!r} for {RUNBOOK}", hint=f"the scenarios are: {', '.join(known)}")
    folder = (outputs or outputs_folder()).resolve()
    out.print(
        f"[bold]proofbook demo[/] · {RUNBOOK} on {len(names)} simulated GPU servers, each behind a real SSH server here.\n"
        "Their clock runs fast while we wait, so that a settling time of minutes costs seconds.\n"
    )
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=err,
    )
    legs: dict[str, Leg] = {}
    with bar, ThreadPoolExecutor(max_workers=2) as pool:
        task = bar.add_task("running", total=len(names))
        waiting = {pool.submit(_leg, name, known[name], folder): name for name in names}
        for done in as_completed(waiting):
            leg = done.result()
            legs[leg.scenario] = leg
            bar.update(task, advance=1, description=f"lab:{leg.scenario} {leg.came.get('verdict', '?')}")
    out.print(_table([legs[n] for n in names]))
    _farewell(out, folder, [legs[n] for n in names])
    return 0 if all(leg.as_it_should for leg in legs.values()) else 1


def _leg(name: str, about: dict[str, Any], outputs: Path) -> Leg:
    """One scenario in a process of its own, approved at its gate as the printed plan would be."""
    right = about["runbooks"][RUNBOOK]
    client.reset(name)
    came = _run(name, right["parameters"], outputs, ())
    if came.get("waiting_for"):
        came = _run(name, right["parameters"], outputs, ("--approve", came["waiting_for"]["digest"], "--approver", "demo"))
    return Leg(name, about["wrong"], right, came)


def _run(name: str, parameters: dict[str, Any], outputs: Path, approval: tuple[str, ...]) -> dict[str, Any]:
    words = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in parameters.items() if k != "host"]
    command = [
        sys.executable,
        "-m",
        "proofbook.cli",
        "run",
        RUNBOOK,
        "--host",
        f"lab:{name}",
        "--json",
        "--outputs",
        str(outputs),
        *approval,
    ]
    for word in words:
        command += ["-p", word]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        return {"status": "?", "verdict": "?", "exit_code": done.returncode, "message": done.stderr[-2000:]}
    answer: dict[str, Any] = msgspec.json.decode(lines[-1])
    return answer


def _table(legs: Sequence[Leg]) -> Table:
    table = Table(title="How each came out", title_justify="left", box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    for column in ("simulated server", "what is wrong with it", "verdict", "as it should?"):
        wide = column.startswith("what")
        table.add_column(column, no_wrap=column in ("simulated server", "verdict"), min_width=24 if wide else None)
    for leg in legs:
        came = leg.came
        verdict = str(came.get("verdict", "?"))
        table.add_row(
            f"lab:{leg.scenario}",
            escape(leg.wrong),
            f"[{STYLE.get(verdict, '')}]{verdict}[/]" if verdict in STYLE else verdict,
            "yes" if leg.as_it_should else f"NO: {came.get('status')}, {came.get('exit_code')}; right is {_words(leg.right)}",
        )
    return table


def _words(right: dict[str, Any]) -> str:
    return f"{right['verdict']}, {right['status']}, {right['exit_code']}"


def this_command() -> str:
    """How to say ``proofbook`` here: by its name if the shell finds it, else by its path."""
    if shutil.which("proofbook"):
        return "proofbook"
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "proofbook" else f"{os.path.relpath(sys.executable)} -m proofbook.cli"


def _farewell(out: Console, folder: Path, legs: Sequence[Leg]) -> None:
    out.print(f"\nThe records are under {folder}", markup=False)
    first_fail = next((leg for leg in legs if leg.came.get("verdict") == "FAIL" and leg.came.get("record")), None)
    if first_fail:
        out.print(f"  open this one in a browser:  {first_fail.came['record']}/record.html", markup=False)
        out.print(
            f"  or read it here:             {this_command()} show {first_fail.came['run_id']} --outputs {folder}", markup=False
        )
    for leg in legs:
        if not leg.as_it_should and leg.came.get("message"):
            out.print(f"\nlab:{leg.scenario}: {leg.came['message']}", markup=False)
    out.print(
        f"\nNext: log in to a simulated server with `{this_command()} lab ssh healthy`, or point it at a real one (see README)."
    )

"""Scenario files: what a simulated machine is, what is wrong with it, what its owner means it to be, what a run should say.

::

    title = "A GPU is gone after the reboot"
    wrong = "One sentence for people."
    base = "four-gpu-hypervisor"            # scenarios/bases/<base>.toml: [machine], [clock], [intent], perhaps a base of its own
    [[faults]]                              # kind, when = "always" | "after-reboot", and the kind's own parameters
    [machine]  [clock]  [intent]            # laid over the base: tables are merged, lists replaced
    [expect.reboot-verification]            # parameters, verdict, status, exit_code, perhaps rung, conclusion

Only ``machine``, ``faults`` and ``clock`` ever reach the process that plays the machine (:meth:`Scenario.served`).
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from proofbook.errors import LabError

Table = dict[str, Any]

#: How many lab seconds pass in one real second while somebody waits on purpose.
DEFAULT_RATE = 300.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a run of a runbook against the scenario comes to."""

    parameters: Table
    verdict: str
    status: str
    exit_code: int
    rung: str = ""  # of the procedure's ladder, where it decides whether to keep a change
    conclusion: str = ""  # of an experiment


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    wrong: str  # one sentence
    machine: Table
    faults: tuple[Table, ...]
    clock: Table
    intent: Table  # the inventory's table of this host
    expect: dict[str, Expectation]

    def served(self) -> Table:
        """What the process that plays the machine gets to know."""
        return {"machine": self.machine, "faults": list(self.faults), "clock": {"rate": DEFAULT_RATE, **self.clock}}


def names() -> list[str]:
    """All scenarios, sorted."""
    return sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml"))


def load(name: str) -> Scenario:
    """Read a scenario. Raises LabError for an unknown name (with the nearest ones), or a file that cannot be used."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise LabError(
            f"the lab has no scenario {name!r}", hint=f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known)}"
        )
    table = _read(_folder() / f"{name}.toml")
    base = copy.deepcopy(_base(table["base"]))
    try:
        return Scenario(
            name=name,
            title=table["title"],
            wrong=table["wrong"],
            machine=merged(base["machine"], table.get("machine", {})),
            faults=tuple(table.get("faults", [])),
            clock=merged(base.get("clock", {}), table.get("clock", {})),
            intent=merged(base["intent"], table.get("intent", {})),
            expect={runbook: Expectation(**e) for runbook, e in table["expect"].items()},
        )
    except (KeyError, TypeError) as error:
        raise LabError(f"scenario {name} cannot be used: {error}") from error


def merged(below: Table, above: Table) -> Table:
    """``above`` laid over ``below``: tables key by key, everything else replaced."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _folder() -> Traversable:
    return resources.files("proofbook.lab") / "scenarios"


@lru_cache
def _base(name: str) -> Table:
    """A base; it may stand on another one."""
    table = _read(_folder() / "bases" / f"{name}.toml")
    below = table.pop("base", "")
    return merged(_base(below), table) if below else table


def _read(path: Traversable) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LabError(f"{path.name} cannot be read: {error}") from error

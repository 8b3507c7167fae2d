"""P2P pair matrix: which GPUs really reach each other's memory, whose faults are whose, and what to serve with.

The cells of ``runbooks/p2p-pair-matrix.ipynb`` say these compositions in one line each. The verdict of such a run says whether
it was validly run and the machine is as it was; what it found is its conclusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from proofbook.changes.nothing import NotToBeMade
from proofbook.changes.service import StandStill
from proofbook.checks.held import HeldByNobody
from proofbook.checks.looking import join
from proofbook.checks.p2p import (
    FALLBACK,
    FallbackInEffect,
    Figure,
    GpusAreFree,
    GpusAreKnown,
    LeftAsItWas,
    PairsUsable,
    PeerClaims,
    ValidlyRun,
    bad_pairs,
    concluded,
    failed_in_short,
    fallback_rows,
    serve_without,
    state_changes,
    usable,
    users_of,
    weighed,
)
from proofbook.errors import BadParameter, CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import HostSpec
from proofbook.measures.p2p import Matrix, figures_from, window_at_worst_s
from proofbook.model import Applied, Change, Check, Decision, Measure, Measurement, Verdict, hypothesis_word, pci_address
from proofbook.probes.change_state import GuardState
from proofbook.probes.p2p import PeerConfig
from proofbook.procedures.base import PlanDigest, Procedure, ProcedureParameters, refuse_nameless
from proofbook.run import Findings, Run
from proofbook.view import Picture, Shown, p2p_pairs_chart, p2p_speed_chart, table

__all__ = [
    "PROCEDURE",
    "Parameters",
    "claims",
    "conclude",
    "fallback",
    "free",
    "matrix",
    "over",
    "pairs",
    "room",
    "speeds",
    "summary",
    "valid",
]

_STORED, _SCHEMA = "p2p.matrix", 1
#: How a plan without actions says why it must not be made.
_NOT_POSSIBLE = "not possible: "
_PAIR_COLUMNS = ("from", "to", "where", "claimed", "came out", "why", "GB/s", "us")
#: Seconds of a window beside its grace: processes, copies, and the look whether the GPUs came to rest.
_WINDOW_S = 15.0


class Parameters(ProcedureParameters):
    host: str = Field(description="a name from proofbook.toml or ~/.ssh/config, or lab:<scenario>; no default on purpose")
    gpus: str = Field("", description="only pairs of these GPUs, PCI addresses separated by commas; empty: all")
    sizes: str = Field("4,4096,4099,524288,1048576,268435456", description="the ladder of sizes in bytes, separated by commas")
    repeats: int = Field(2, ge=1, le=10, description="processes that each pair is tested in, 1-10")
    grace_s: float = Field(5.0, ge=0, le=120, description="seconds after each window for the kernel's late lines, 0-120")
    pair_deadline_s: float = Field(120.0, gt=0, le=3600, description="seconds until a process that does not end is killed")
    compare_with: str = Field("last", description="last, none, or the id of an earlier run of this host")
    guard_minutes: float = Field(
        120.0, gt=0, le=1440, description="the machine starts a stopped service by itself after so many minutes"
    )
    approver: str = Field("", max_length=200, description="who approves that a service is stopped (headless)")
    approved: PlanDigest = Field("", description="the digest of the plan that was read; empty stops at the gate")

    @field_validator("gpus")
    @classmethod
    def _addresses(cls, value: str) -> str:
        return ",".join(pci_address(text) for text in value.split(",") if text.strip())

    @field_validator("sizes")
    @classmethod
    def _bytes(cls, value: str) -> str:
        for text in (t.strip() for t in value.split(",")):
            if not text.isdigit() or not 1 <= int(text) <= 2**34 or (int(text) % 4 and int(text) > 131072):
                raise ValueError(f"{text!r} is no size in bytes (1 to 16 GiB; above 128 KiB a multiple of 4)")
        return value

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t for t in self.gpus.split(",") if t))

    @property
    def ladder(self) -> tuple[int, ...]:
        return tuple(sorted({int(t) for t in self.sizes.split(",")}))


def accepts(parameters: Parameters, spec: HostSpec) -> None:
    """Refuse, before any contact, what cannot come out well on this host."""
    if spec.runs_on:
        raise BadParameter(
            f"{spec.name} has no kernel of its own: it runs on {spec.runs_on}, whose log says who faulted",
            hint=f"use host={spec.runs_on}",
        )
    if len(parameters.chosen) == 1:
        raise BadParameter("gpus names one GPU: a pair has two", hint="name at least two, or none for all")
    many = len(parameters.chosen or spec.gpus)
    windows = many + many * (many - 1) * 3 / 2 + 1
    at_worst = window_at_worst_s(parameters.repeats, parameters.pair_deadline_s, parameters.grace_s)
    needed = (windows * (parameters.grace_s + parameters.repeats * _WINDOW_S / 2) + at_worst) / 60
    if parameters.guard_minutes < needed:
        raise BadParameter(
            f"guard_minutes={parameters.guard_minutes:g} is too short: a service would start in the middle of the test",
            hint=f"{many} GPUs are {windows:.0f} windows, about {needed:.0f} minutes with one that runs into its deadlines",
        )
    refuse_nameless(parameters)


PROCEDURE = Procedure(
    name="p2p-pair-matrix",
    title="P2P pair matrix",
    purpose="Copy between every pair of GPUs by every path, compare what arrived, and say whether peer-to-peer may be used.",
    changes_host=True,
    undo="a stopped service is started again at the end, by the machine itself when nobody does",
    takes="2 to 30 minutes; a service on the GPUs is down for that long",
    parameters=Parameters,
    accepts=accepts,
    lease_s=lambda parameters: float(parameters.guard_minutes) * 60,
)

# ----------------------------------------------------------------------------------------- compositions


def _services(run: Run) -> tuple[tuple[ServiceSpec, ContainerSpec | None], ...]:
    by_name = {c.name: c for c in run.intent.containers}
    return tuple((s, by_name.get(s.container)) for s in run.intent.services)


def claims(run: Run) -> tuple[Check, ...]:
    """What the machine says, and who is in the way. Raises NoSuchRun when there is nothing to compare with."""
    _earlier(run)  # WHY now: later a service stands still already
    first = next((inside for _, inside in _services(run)), None)
    alone = () if run.resuming else (HeldByNobody(first),)
    return *alone, PeerClaims(), GpusAreKnown(_services(run))


def room(run: Run, claims: Findings) -> Change:
    """Make room for the test: the one service on the GPUs stands still for a while; or nothing has to be stopped."""
    asked = (HeldByNobody.name, GpusAreKnown.name)
    reasons = tuple(f.reason for f in claims if f.check in asked and f.verdict is not Verdict.PASS)
    if reasons and not run.resuming:
        return NotToBeMade("The pair matrix", reasons)
    try:
        ours, _ = users_of(run.seen, _services(run))
    except CannotTell as why:
        return NotToBeMade("The pair matrix", (str(why),))
    service, container = ours[0] if ours else (None, None)
    return StandStill(service, container, run.parameters.guard_minutes, (_danger(run),))


def _danger(run: Run) -> str:
    """What the copies themselves may do to the machine, and from where it is then brought back."""
    console = run.intent.console
    from_where = f"the console is {console}" if console else "the inventory names no console: know first how to reach one"
    return f"a copy may reset the host, or leave a GPU wedged until the power is cut; {from_where}"


def free(run: Run) -> tuple[Check, ...]:
    return (GpusAreFree(),)


def matrix(run: Run, applied: Applied, free: Findings) -> Measure | None:
    """The test itself. Not done beside other work."""
    why = _why_not(applied, free)
    if why:
        run.note(f"no pair was tested: {why}.", kind="not-verified", title="the pair matrix")
        return None
    if applied.outcome == "nothing-to-do":  # there was no gate that would have said it
        run.note(f"Before the test: {_danger(run)}.", kind="warning", title="what the test itself may do")
    parameters = run.parameters
    _, before = _earlier(run)
    return Matrix(
        run_id=run.about.run_id,
        gpus=parameters.chosen,
        sizes=parameters.ladder,
        repeats=parameters.repeats,
        grace_s=parameters.grace_s,
        pair_deadline_s=parameters.pair_deadline_s,
        baseline=_figures(before),
        guard=_guard(run, applied),
    )


def _guard(run: Run, applied: Applied) -> GuardState | None:
    """That of the service which stands still, None when none does."""
    if applied.outcome != "done":
        return None
    inside = applied.plan.settings["container"]
    return GuardState(run.origin, ContainerSpec(**inside) if inside else None)


def _why_not(applied: Applied, free: Findings) -> str:
    if applied.outcome not in ("done", "nothing-to-do"):
        return applied.summary
    if applied.plan.empty and (impossible := [f for f in applied.plan.facts if f.startswith(_NOT_POSSIBLE)]):
        return "; ".join(fact.removeprefix(_NOT_POSSIBLE) for fact in impossible)
    return "; ".join(f.reason for f in free if f.verdict is not Verdict.PASS)


def _earlier(run: Run) -> tuple[str, Mapping[str, Any] | None]:
    """The run to compare with, and what it stored; ("", None) when there is none."""
    wanted = run.parameters.compare_with
    if wanted in ("", "none"):
        return "", None
    if wanted == "last":
        found = run.memory.last_stored(run.host.identity.machine_id, run.about.runbook, _STORED)
        return (found[0], found[1]["value"]) if found else ("", None)
    return wanted, run.memory.stored_value(wanted, _STORED, machine_id=run.host.identity.machine_id)["value"]


def _figures(before: Mapping[str, Any] | None) -> dict[tuple[tuple[str, str], str], Figure] | None:
    return figures_from(before) if before is not None else None


def valid(run: Run, measured: Measurement | None) -> tuple[Check, ...]:
    """Whether the matrix counts, whether the machine is as it was, and which pairs are shown to be bad."""
    if measured is None:
        return ()
    found = (PairsUsable(measured),) if measured.value["cells"] else ()
    return (ValidlyRun(measured), LeftAsItWas(measured), *found)


def pairs(run: Run, measured: Measurement | None) -> Picture | None:
    """The matrix as a picture and as tables, kept for later runs, and what differs from the earlier one."""
    if measured is None or not measured.value["cells"]:
        return None
    earlier, before = _earlier(run)
    rows = _rows(measured.value)
    run.table("pairs", "Every ordered pair", _PAIR_COLUMNS, rows, "GB/s: median of the copy engine's push at the largest size")
    if together := _together(measured.value):
        run.table("together", "Several pairs at once: what did not come out right", ("when", "from", "to", "path", "how", "why"),
                  together)  # fmt: skip
    if before is not None:
        then = {(c["src"], c["dst"]): str(c["state"]) for c in before["cells"]}
        now = {(c["src"], c["dst"]): str(c["state"]) for c in measured.value["cells"]}
        lines = state_changes(then, now)
        run.table("since", f"Against run {earlier}", ("what differs",), [[line] for line in lines], _conditions(before))
    run.value(_STORED, _SCHEMA, _kept(run, measured))
    drawn = p2p_pairs_chart(measured.value)
    run.picture("p2p-pairs", "Claimed, and shown", drawn.png, drawn.alt)
    return drawn


def speeds(run: Run, measured: Measurement | None) -> Picture | None:
    """Bandwidth and latency as a picture; None where nothing was timed."""
    if measured is None or not any("ce-push" in c["gbps"] for c in measured.value["cells"]):
        return None
    drawn = p2p_speed_chart(measured.value)
    run.picture("p2p-speed", "Bandwidth and latency", drawn.png, drawn.alt)
    return drawn


def _rows(value: Mapping[str, Any]) -> list[list[Any]]:
    rows = []
    for c in value["cells"]:
        why = "; ".join(filter(None, [failed_in_short(c), c["reason"], *c["slow"][:1]]))
        gbps, us = c["gbps"].get("ce-push", [None])[0], c["us"].get("ce-push")
        rows.append([c["src"], c["dst"], c["class"], c["advertised"], c["state"], why, gbps, us])
    return rows


def _together(value: Mapping[str, Any]) -> list[list[Any]]:
    wrong = [t for t in value["together"] if t["state"] != "verified"]
    return [[t["phase"], t["src"], t["dst"], t["path"], t["state"], t["reason"]] for t in wrong][:60]


def _kept(run: Run, measured: Measurement) -> dict[str, Any]:
    """What a later run is held against: the states, the figures, and what they were taken under."""
    names = ("src", "dst", "state", "class", "gbps", "us")
    return {
        "sizes": measured.conditions["sizes"],
        "cells": [{name: cell[name] for name in names} for cell in measured.value["cells"]],
        "driver": measured.value["run"]["library"],
        "iommu": measured.value["iommu"],
        "remap": _remap(run),
        "kernel": run.host.identity.kernel,
    }


def _conditions(before: Mapping[str, Any]) -> str:
    types = ", ".join(sorted(set(before["iommu"].values()))) or "off"
    return f"then: {before['driver']}, kernel {before['kernel']}, IOMMU {types}, DmaRemapPeerMmio {before['remap']}"


def _remap(run: Run) -> str:
    try:
        return str(run.seen.value(PeerConfig()).running.get("DmaRemapPeerMmio", "not said"))
    except CannotTell:
        return "not known"


def conclude(run: Run, measured: Measurement | None, applied: Applied, free: Findings) -> Shown:
    """The conclusion, and what to serve with where peer-to-peer stays off."""
    said = concluded(measured, why_not=_why_not(applied, free) or "there was no room for the test", scope=_scope(run, measured))
    against = weighed(measured.value) if measured is not None else ""
    run.conclude({**said, "limits": [against] if against else []})
    rows = [("which pairs", usable(measured.value))] if measured is not None and measured.value["cells"] else []
    title = "Which pairs may be used"
    if said["peer_to_peer"] == "off":
        rows += fallback_rows()
        title = "How to serve without peer-to-peer, and how to prove it"
    if rows:
        run.table("fallback" if said["peer_to_peer"] == "off" else "usable", title, ("where", "what"), [list(r) for r in rows])
    note = f"Holds for: {said['scope']}" + (f". Limit: {against}" if against else "")
    return table(("where", "what"), rows, title=_told(said), note=note)


def _scope(run: Run, measured: Measurement | None) -> str:
    """What the conclusion holds for, and nothing else."""
    identity = run.host.identity
    parts = [f"{identity.hostname}, boot {identity.boot_id[:8]}", f"kernel {identity.kernel}"]
    if measured is not None:
        value = measured.value
        names = ", ".join(sorted({d["name"] for d in value["fleet"]})) or "GPU of a name that was not told"
        types = ", ".join(sorted(set(value["iommu"].values()))) or "off"
        library = str(value["run"]["library"]).rpartition("/")[2] or "a driver that was not told"
        parts.append(f"{len(value['gpus'])} x {names} with {library}")
        parts.append(f"IOMMU {types}, DmaRemapPeerMmio {_remap(run)}, sizes {run.parameters.sizes}")
        parts += value["judged"]["limits"][:1]
    return "; ".join(parts)


def over(measured: Measurement | None) -> Decision:
    """The test is over: whatever it found, the service is started again."""
    what = "the pair matrix is done" if measured is not None else "there was no test"
    return Decision(False, "TEST_OVER", f"{what}, so the service is started again")


def fallback(run: Run, measured: Measurement | None, applied: Applied) -> tuple[Check, ...]:
    """Whether the servers of this host run without peer-to-peer. Not asked where it is allowed."""
    if measured is None or measured.value["judged"]["allowed"] or len(measured.value["gpus"]) < 2:
        return ()
    return tuple(FallbackInEffect(service, container) for service, container in _services(run))


def summary(run: Run, measured: Measurement | None, applied: Applied, free: Findings) -> str:
    """What a reader sees first."""
    said = concluded(measured, why_not=_why_not(applied, free) or "there was no room for the test", scope="")
    return " ".join(filter(None, [_told(said), _bad_in_short(measured), f"The run itself: {run.verdict}."]))


def _told(said: Mapping[str, Any]) -> str:
    return f"{hypothesis_word(said['outcome'])}: {said['because']}"


def _bad_in_short(measured: Measurement | None) -> str:
    """The bad pairs by name, and what to serve with; "" where none is shown to be bad."""
    pairs = [pair for of in bad_pairs(measured.value).values() for pair in of] if measured is not None else []
    if not pairs:
        return ""
    which = usable(measured.value) if measured is not None else ""
    bad = join((f"{src} to {dst}" for src, dst in pairs), 6)
    return f"Bad: {bad}. {which[:1].upper()}{which[1:]}. {serve_without(FALLBACK)}"

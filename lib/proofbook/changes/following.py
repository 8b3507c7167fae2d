"""Stopping a unit until nothing of it is left, and following a start until the server is ready or will not become it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from proofbook.checks.mtp.start import StartReader, StartStory
from proofbook.errors import CannotTell, ConnectionLost
from proofbook.host import Hands
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Command, Probe, Seen, command
from proofbook.probes.base import inside
from proofbook.probes.memory import GpuProcess, GpuProcesses
from proofbook.probes.service import Endpoint
from proofbook.probes.sglang import PortOwner, Processes, ServerProcess, port_of
from proofbook.probes.start_log import StartLines
from proofbook.probes.systemd import UnitFacts, UnitState

__all__ = ["Followed", "Stopped", "follow_start", "start_unit", "stop_unit", "systemctl", "wait_stopped"]

Tell = Callable[[str], None]

#: How long to wait between two looks: a short while at first, then longer, up to this.
POLL_S = 5.0
#: A process that was killed leaves a GPU only when the driver has taken its memory back.
_AFTER_KILL_S = 60.0
#: After the unit is down, what is left of it gets this long to go by itself.
_GRACE_S = 20.0
_TOLD_EVERY_S = 60.0
#: How long the way to the machine may be broken while a start is followed.
_RECONNECT_S = 300.0


def systemctl(container: ContainerSpec | None, *words: str, timeout_s: float = 60.0) -> Command:
    """``systemctl …`` where the unit lives, as root."""
    return inside(container, command("systemctl", *words, root=True, timeout_s=timeout_s))


def _pause(passed: float) -> float:
    return min(POLL_S, 0.5 + passed / 10)


# -------------------------------------------------------------------------------------------------------- stopping


@dataclass(frozen=True)
class Stopped:
    """How a stop went. ``left``: what is still there and belongs to the unit; ``others``: who else holds a GPU now.

    ``unverified`` says what could not be looked at, so that nobody takes silence for an empty GPU.
    """

    done: bool
    seconds: float
    left: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    killed: bool = False
    unverified: tuple[str, ...] = ()


@dataclass
class _Left:
    """One look at what a unit has still running."""

    unit: UnitFacts | None = None
    processes: tuple[ServerProcess, ...] = ()
    on_gpus: tuple[GpuProcess, ...] = ()
    others: tuple[GpuProcess, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def down(self) -> bool:
        return self.unit is not None and self.unit.active in ("inactive", "failed") and not self.unit.main_pid

    @property
    def gone(self) -> bool:
        return self.down and not self.processes and not self.on_gpus

    def words(self) -> tuple[str, ...]:
        """Each leftover once, with its number and where it is."""
        inner = [f"{p.title or '?'} (pid {p.pid} in the unit's control group)" for p in self.processes]
        seen = {p.pid for p in self.processes}
        gpu = [_on_gpu(p) for p in self.on_gpus if p.inner_pid not in seen and p.pid not in seen]
        return (*inner, *dict.fromkeys(gpu))


def _on_gpu(process: GpuProcess) -> str:
    memory = f", {process.used_mib} MiB" if process.used_mib is not None else ""
    return f"{process.process} (pid {process.pid} on the host, GPU {process.pci}{memory}, group {process.cgroup or '?'})"


def _left(seen: Seen, unit: str, container: ContainerSpec | None, known: frozenset[int]) -> _Left:
    left = _Left()
    unknown = []
    try:
        left.unit = seen.value(UnitState(unit, container))
    except CannotTell as why:
        unknown.append(f"the unit's state: {why}")
    try:
        left.processes = seen.value(Processes(unit, container)).processes
    except CannotTell as why:
        unknown.append(f"the processes of its control group: {why}")
    try:
        gpu = seen.value(GpuProcesses())
        # WHY the numbers too: a process that was moved out of the control group, or reparented, is still the unit's.
        ours = [p for p in gpu if p.of_unit(unit, container) or p.pid in known]
        left.on_gpus, left.others = tuple(ours), tuple(p for p in gpu if p not in ours)
    except CannotTell as why:
        unknown.append(f"the processes on the GPUs: {why}")
    left.unknown = tuple(unknown)
    return left


def stop_unit(hands: Hands, unit: str, container: ContainerSpec | None) -> None:
    """Ask systemd to stop it, without waiting: a server drains its requests first."""
    result = hands.act(f"stop {unit}", systemctl(container, "stop", "--no-block", unit))
    if result is not None:
        result.expect()


def wait_stopped(
    hands: Hands,
    unit: str,
    container: ContainerSpec | None,
    *,
    patience_s: float,
    known_gpu_pids: frozenset[int],
    may_kill: bool,
    tell: Tell,
) -> Stopped:
    """Wait until the unit is down and every process of it is gone from its control group and from the GPUs.

    ``known_gpu_pids``: numbers on the host of its GPU processes before the stop. ``may_kill``: SIGKILL what is left inside
    its control group, and nothing else.
    """
    began = told = hands.host.clock.now().timestamp()
    down_since: float | None = None
    killed = False
    while True:
        left = _left(
            _peek(hands, tell, UnitState(unit, container), Processes(unit, container), GpuProcesses()),
            unit,
            container,
            known_gpu_pids,
        )
        now = hands.host.clock.now().timestamp()
        passed = now - began
        down_since = (down_since or now) if left.down else None
        if left.gone:
            return Stopped(True, round(passed, 1), (), tuple(map(_on_gpu, left.others)), killed, left.unknown)
        lingers = down_since is not None and now - down_since >= _GRACE_S
        if lingers and not killed and may_kill and left.processes:
            tell(f"{unit} is down and {len(left.processes)} of its processes live on: they are killed inside its control group")
            hands.act(f"kill what is left in the control group of {unit}", systemctl(container, "kill", "--signal=SIGKILL", unit))
            killed, began = True, now - patience_s + _AFTER_KILL_S
            continue
        if passed >= patience_s or (lingers and not may_kill and now - (down_since or now) >= _AFTER_KILL_S):
            state = f"{unit} is {left.unit.active} ({left.unit.sub})" if left.unit and not left.down else ""
            words = left.words() or ((state,) if state else ("what is left could not be seen",))
            return Stopped(False, round(passed, 1), words, tuple(map(_on_gpu, left.others)), killed, left.unknown)
        if now - told >= _TOLD_EVERY_S:
            told = now
            tell(f"{passed:.0f} s after the stop: {'; '.join(left.words()[:3]) or 'still stopping'}")
        hands.host.clock.sleep(_pause(passed))


# -------------------------------------------------------------------------------------------------------- starting


@dataclass(frozen=True)
class Followed:
    """How a start went.

    ``outcome``: ready · died · restarting (systemd tries again) · late (patience used up) · replaced (started anew by
    somebody else). ``by``: what said that it is ready ("its log", "its port").
    """

    outcome: Literal["ready", "died", "restarting", "late", "replaced"]
    seconds: float
    why: str
    invocation: str
    main_pid: int
    story: StartStory
    by: str = ""
    gaps: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        return self.outcome == "ready"

    def facts(self) -> dict[str, Any]:
        """For the record: JSON values only."""
        start = self.story.start
        return {
            "start": self.outcome,
            "start_s": self.seconds,
            "why": self.why,
            "ready_by": self.by,
            "invocation": self.invocation,
            "main_pid": self.main_pid,
            "timeline": list(self.story.timeline),
            "said": [{"signature": f.signature, "verdict": str(f.verdict), "reason": f.reason} for f in _worth(self.story)],
            "cause_do": self.story.cause.what_to_do if self.story.cause is not None and not self.ready else "",
            "effective_running": start.capacity if start else None,
            "journal_gaps": list(self.gaps),
        }


def _worth(story: StartStory) -> list[Any]:
    return [f for f in story.findings if f.verdict in ("FAIL", "WARN", "UNKNOWN")][:20]


def start_unit(hands: Hands, unit: str, container: ContainerSpec | None) -> None:
    """Ask systemd to start it, with a clean count of starts: the limit must not refuse what somebody asked for on purpose."""
    hands.act(f"forget earlier failures of {unit}", systemctl(container, "reset-failed", unit))
    result = hands.act(f"start {unit}", systemctl(container, "start", "--no-block", unit))
    if result is not None:
        result.expect()


@dataclass
class _Watch:
    """What a start looks like so far."""

    unit: UnitFacts | None = None
    invocation: str = ""
    main_pid: int = 0
    cursor: str = ""
    port_ok: int = 0  # looks in a row in which its port answered and was its own
    gaps: dict[str, None] = field(default_factory=dict)
    story: StartStory = field(default_factory=lambda: StartStory(None, (), (), 0))


def follow_start(
    hands: Hands,
    service: ServiceSpec,
    container: ContainerSpec | None,
    *,
    before: str,
    patience_s: float,
    tell: Tell,
    restarts: int = 0,
) -> Followed:
    """Follow the start of a unit by the journal of its own invocation. ``before``: the invocation that was there earlier.

    ``restarts``: how many automatic restarts there were before it, which do not count against it.

    Ready is when its log says so, or where the log cannot (it goes elsewhere, lines were suppressed), when its address
    answers 200 from the main process itself, twice in a row. An automatic restart ends it: what died once dies again.
    """
    began = told = hands.host.clock.now().timestamp()
    reader, watch = StartReader(service.name), _Watch()
    while True:
        seen = _peek(hands, tell, *_questions(service, container, watch))
        passed = hands.host.clock.now().timestamp() - began
        _take_in(seen, service, container, watch, reader, before)
        for sentence in reader.news(watch.story):
            tell(sentence)
        ended = _ended(watch, restarts, passed, patience_s)
        if ended is not None:
            outcome, why, by = ended
            if outcome != "ready":
                _last_words(hands, service, container, watch, reader, tell)
                why = _because(watch.story, why, service.name)
            return Followed(outcome, round(passed, 1), why, watch.invocation, watch.main_pid, watch.story, by, tuple(watch.gaps))
        now = hands.host.clock.now().timestamp()
        if now - told >= _TOLD_EVERY_S:
            told = now
            last = watch.story.timeline[-1]["title"] if watch.story.timeline else "nothing known was said yet"
            tell(f"{passed:.0f} s after the start; last step: {last}")
        hands.host.clock.sleep(_pause(passed))


def _questions(service: ServiceSpec, container: ContainerSpec | None, watch: _Watch) -> list[Probe[Any]]:
    probes: list[Probe[Any]] = [UnitState(service.name, container)]
    if watch.invocation:
        probes.append(StartLines(service.name, container, watch.invocation, watch.cursor))
        if service.url:
            probes += [Endpoint(service.url, container), PortOwner(port_of(service.url), container)]
    return probes


def _take_in(
    seen: Seen, service: ServiceSpec, container: ContainerSpec | None, watch: _Watch, reader: StartReader, before: str
) -> None:
    try:
        unit = seen.value(UnitState(service.name, container))
    except CannotTell as why:
        watch.gaps[f"the unit's state: {why}"] = None
        return
    watch.unit = unit
    if not watch.invocation and unit.invocation_id not in ("", before):
        watch.invocation = unit.invocation_id
    if unit.invocation_id == watch.invocation and unit.main_pid:
        watch.main_pid = unit.main_pid
    lines = StartLines(service.name, container, watch.invocation, watch.cursor)
    if lines in seen:
        try:
            more = seen.value(lines)
        except CannotTell as why:
            watch.gaps[f"its journal: {why}"] = None
        else:
            watch.cursor = more.cursor
            watch.gaps |= dict.fromkeys(more.gaps)
            if more.entries:
                reader.add(more.entries)
                watch.story = reader.read()
    watch.port_ok = watch.port_ok + 1 if _port_answers(seen, service, container, watch) else 0


def _port_answers(seen: Seen, service: ServiceSpec, container: ContainerSpec | None, watch: _Watch) -> bool:
    endpoint, owner = Endpoint(service.url, container), PortOwner(port_of(service.url), container)
    if not service.url or endpoint not in seen or owner not in seen:
        return False
    try:
        if seen.value(endpoint).http_status != 200:
            return False
        owners = {pid for listener in seen.value(owner) for pid, _ in listener.owners}
    except CannotTell:
        return False
    return bool(watch.main_pid) and watch.main_pid in owners


def _ended(
    watch: _Watch, restarts: int, passed: float, patience_s: float
) -> tuple[Literal["ready", "died", "restarting", "late", "replaced"], str, str] | None:
    unit = watch.unit
    if watch.story.start is not None and watch.story.start.ready and unit is not None and unit.active == "active":
        return "ready", "", "its log"
    # WHY three: its log comes a little later than its port; a server whose log is whole is judged by it.
    if watch.port_ok >= 3:
        return "ready", "", "its port"
    if unit is not None and watch.invocation:
        ended = f"; its process {unit.exit_code} with {unit.exit_status}" if unit.exit_code else ""
        if unit.sub.startswith("auto-restart") or (unit.n_restarts or 0) > restarts:
            return (
                "restarting",
                f"it ended {passed:.0f} s after the start and systemd starts it again (result {unit.result}{ended})",
                "",
            )
        if unit.active in ("failed", "inactive"):
            return "died", f"it ended {passed:.0f} s after the start: {unit.active}, result {unit.result}{ended}", ""
        if unit.invocation_id != watch.invocation:
            return "replaced", "somebody started it anew meanwhile", ""
    elif unit is not None and unit.active == "failed" and passed >= 2 * POLL_S:
        return "died", f"systemd could not start it: {unit.load}, result {unit.result}", ""
    if passed >= patience_s:
        state = f"it is {unit.active} ({unit.sub})" if unit is not None else "its state is not known"
        return "late", f"it is not ready {passed:.0f} s after the start, all that it may take; {state}", ""
    return None


def _last_words(
    hands: Hands, service: ServiceSpec, container: ContainerSpec | None, watch: _Watch, reader: StartReader, tell: Tell
) -> None:
    """What it said between the last look and its end: that is where the reason stands."""
    if not watch.invocation:
        return
    lines = StartLines(service.name, container, watch.invocation, watch.cursor)
    try:
        more = _peek(hands, tell, lines).value(lines)
    except CannotTell as why:
        watch.gaps[f"its journal: {why}"] = None
        return
    if more.entries:
        reader.add(more.entries)
        watch.story = reader.read()


def _because(story: StartStory, why: str, unit: str) -> str:
    cause = story.cause
    if cause is None:
        return why
    line = f" ({cause.lines[0].strip()[:240]})" if cause.lines else ""
    # what it followed from stands in the log as a signature's id; the line beside it says more to a person
    reason = re.sub(r" Caused by [a-z0-9-]+\.$", "", cause.reason.removeprefix(f"{unit}: "))
    return f"{why}. {reason}{line}"


def _peek(hands: Hands, tell: Tell, *probes: Probe[Any]) -> Seen:
    """Ask, over a lost connection too: a change must not be left alone because a line broke for a minute."""
    try:
        return hands.peek(*dict.fromkeys(probes))
    except ConnectionLost as error:
        tell(f"the connection was lost: {str(error).splitlines()[0]}")
        before = hands.host.identity.boot_id
        if hands.host.await_up(patience_s=_RECONNECT_S, tell=tell) is None:
            raise
        hands.proven("after a lost connection")
        if hands.host.identity.boot_id != before:
            tell("the machine has rebooted meanwhile")
        return hands.peek(*dict.fromkeys(probes))

"""Did a change of a server take effect? Held against what runs, never against a description or a health address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.arguments import changes, is_title
from proofbook.checks.looking import counted, join, short_id, tell, there, unseen
from proofbook.checks.mtp.fit import SIMULATE
from proofbook.checks.mtp.speculation import Speculation
from proofbook.checks.mtp.start import StartStory, read_start
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Applied, Check, Finding, Measurement, Probe, Seen, Suggested, Verdict
from proofbook.probes.journal import UnitJournal, UnitLog
from proofbook.probes.sglang import PortOwner, Processes, ServedCache, ServerFacts, ServerInfo, base_of, port_of
from proofbook.probes.start_log import StartLines
from proofbook.probes.systemd import UnitFacts, UnitProcess, UnitState
from proofbook.redact import Redactor

__all__ = ["IsWhole", "RunsAsPlanned", "SpeculationIsOn", "Started", "WhyThatFast", "took_effect"]


def took_effect(
    service: ServiceSpec,
    container: ContainerSpec | None,
    speculation: Speculation,
    applied: Applied,
    said: Measurement | None = None,
) -> tuple[Check, ...]:
    """All checks of this question, in the order in which they are read.

    ``said``: what the server says of itself, where it was asked as its client; without it a command on the machine asks.

    Of a server that ended again, or was not even started, nothing further is asked: each answer would only say so once more.
    """
    started = Started(service, applied, container)
    if applied.outcome == "failed" and applied.facts.get("start") in (None, "died", "restarting"):
        return (started,)
    return (
        started,
        RunsAsPlanned(service, container, applied),
        IsWhole(service, container, said),
        SpeculationIsOn(service, container, speculation, applied, said),
        WhyThatFast(service, container, applied),
    )


def _digest(argv: Sequence[str]) -> str:
    import hashlib

    return hashlib.sha256("\0".join(argv).encode("utf-8", "surrogateescape")).hexdigest()


def _asks(service: ServiceSpec, container: ContainerSpec | None, said: Measurement | None) -> tuple[Probe[Any], ...]:
    return () if said is not None else (ServerInfo(base_of(service.url), container),)


def _info(
    seen: Seen, service: ServiceSpec, container: ContainerSpec | None, said: Measurement | None
) -> tuple[ServerFacts | None, str]:
    """What the server says of itself, or why that is not known."""
    if said is None:
        return tell(seen, ServerInfo(base_of(service.url), container)).pair
    told = said.value.get("said")
    return (
        (ServerFacts(str(said.value.get("path")), told), "")
        if told
        else (None, f"{said.value.get('path')}: {said.value.get('why')}")
    )


# ------------------------------------------------------------------------------------------------------- started


@dataclass(frozen=True)
class Started(Check):
    """The change went through: the old process was gone, the new one became ready within its time.

    Where it did not, the whole journal of the invocation that failed is kept, before the next start buries it.
    """

    service: ServiceSpec
    applied: Applied = field(repr=False)
    container: ContainerSpec | None = field(default=None, repr=False)
    name: ClassVar[str] = "mtp.Started"
    title: ClassVar[str] = "Did the server come up with the change?"

    @property
    def _failed(self) -> StartLines | None:
        """What the invocation said that did not become ready; None where none was begun, or all is well."""
        invocation = str(self.applied.facts.get("invocation") or "")
        well = self.applied.outcome in ("done", "nothing-to-do") or not invocation
        return None if well else StartLines(self.service.name, self.container, invocation)

    def needs(self) -> tuple[Probe[Any], ...]:
        return () if self._failed is None else (self._failed,)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        applied, facts = self.applied, self.applied.facts
        about: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": "ready",
            "observed": facts.get("start", applied.outcome),
        }
        if applied.outcome == "nothing-to-do":
            return [self.not_checked(applied.summary, **about)]
        if applied.outcome != "done":
            lines = tuple(said["reason"] for said in facts.get("said", ())[:4])
            follows = "Take it back; the first error of the first attempt is the cause, later ones follow from it."
            what = f"Take it back. {facts['cause_do']}" if facts.get("cause_do") else follows
            if self._failed is not None:
                log, why = tell(seen, self._failed).pair
                kept = f"{counted(len(log.entries), 'journal line')} of it kept" if log is not None else f"its journal: {why}"
                lines = (*lines, f"invocation {short_id(self._failed.invocation)}: {kept}")
            reason = applied.summary.removeprefix(f"{self.service.spec} ")  # the finding names it
            return [self.failed(reason, action=Suggested.ROLL_BACK, what_to_do=what, lines=lines, **about)]
        found = [
            self.passed(
                f"ready {facts.get('start_s', 0):.0f} s after its start, said by {facts.get('ready_by') or 'its log'}; "
                f"invocation {short_id(str(facts.get('invocation', '')))}, process {facts.get('main_pid')}",
                **about,
            )
        ]
        if facts.get("stop_not_verified"):
            found.append(
                self.warned(
                    f"that nothing of the old process was left could be seen in part only: {join(facts['stop_not_verified'], 2)}",
                    subject=self.service.spec,
                )
            )
        return found


# -------------------------------------------------------------------------------------------------- runs as planned


@dataclass(frozen=True)
class RunsAsPlanned(Check):
    """The command and the environment of the main process are those of the plan, word by word; systemd has loaded the files; it
    is the invocation that was followed; and the port belongs to it.
    """

    service: ServiceSpec
    container: ContainerSpec | None
    applied: Applied = field(repr=False)
    name: ClassVar[str] = "mtp.RunsAsPlanned"
    title: ClassVar[str] = "Is what runs exactly what was planned?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (UnitState(unit, container), UnitProcess(unit, container), PortOwner(port_of(self.service.url), container))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        return [*self._argv(seen), *self._environment(seen), self._loaded(unit), self._same(unit), self._port_owner(seen, unit)]

    @property
    def _settings(self) -> Mapping[str, Any]:
        return self.applied.plan.settings

    def _bad(self, reason: str, what: str = "Take it back: what runs is not what was approved.", **more: Any) -> Finding:
        return self.failed(reason, action=Suggested.ROLL_BACK, what_to_do=what, **{"subject": self.service.spec, **more})

    def _argv(self, seen: Seen) -> list[Finding]:
        process, why = tell(seen, UnitProcess(self.service.name, self.container)).pair
        if process is None:
            return [self._bad(f"it has no main process: {why}")]
        if is_title(process.argv):
            return [self.unknown("the process has overwritten its command line with a title", subject=self.service.spec)]
        if _digest(process.argv) == self._settings.get("argv_sha256"):
            sentence = f"process {process.pid} runs the planned command, all {counted(len(process.argv), 'word')} of it"
            return [self.passed(sentence, subject=self.service.spec)]
        shown = Redactor().value(list(process.argv), "check")
        different = changes(list(self._settings.get("argv", ())), shown)
        words = join(map(str, different), 4) or "a word that is not shown, for it may be a secret"
        what = "Take it back, and see how the unit is written (a blank behind a backslash, another drop-in)."
        return [self._bad(f"the command of process {process.pid} is not the planned one: {words}", what)]

    def _environment(self, seen: Seen) -> list[Finding]:
        process, _ = tell(seen, UnitProcess(self.service.name, self.container)).pair
        wanted: Mapping[str, str] = self._settings.get("environment", {})
        if process is None:
            return []
        if process.environ is None:
            return [self.unknown(f"its environment is not known: {process.environ_unknown}", subject=self.service.spec)]
        found = []
        lost = [f"{k} is {process.environ.get(k, 'not set')}, not {v}" for k, v in wanted.items() if process.environ.get(k) != v]
        if lost:
            found.append(self._bad(f"its environment is not the planned one: {join(lost, 3)}"))
        if SIMULATE in process.environ:
            what = "Take the variable out and restart; no number about drafts is true until then."
            found.append(self._bad(f"{SIMULATE}={process.environ[SIMULATE]}: acceptance is made up", what))
        if not found:
            names = ", ".join(wanted) or "no variable was wanted"
            found.append(
                self.passed(f"its environment is as planned ({names}; {SIMULATE} is not set)", subject=self.service.spec)
            )
        return found

    def _loaded(self, unit: UnitFacts) -> Finding:
        if unit.need_daemon_reload:
            return self._bad("its files are not those that systemd has loaded (NeedDaemonReload=yes)")
        return self.passed("systemd has loaded the files as they are (NeedDaemonReload=no)", subject=self.service.spec)

    def _same(self, unit: UnitFacts) -> Finding:
        followed = str(self.applied.facts.get("invocation", ""))
        about: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": short_id(followed),
            "observed": short_id(unit.invocation_id),
        }
        if unit.active != "active" or not unit.main_pid:
            return self._bad(f"it does not run any more: {unit.active} ({unit.sub}), result {unit.result}")
        if unit.n_restarts:
            return self._bad(f"systemd has restarted it {counted(unit.n_restarts, 'time')} since it was started", **about)
        if followed and unit.invocation_id != followed:
            return self._bad("it is another invocation than the one that was followed: somebody started it anew", **about)
        return self.passed(f"it is the invocation that was followed, 0 restarts, process {unit.main_pid}", **about)

    def _port_owner(self, seen: Seen, unit: UnitFacts) -> Finding:
        port = port_of(self.service.url)
        listeners, why = tell(seen, PortOwner(port, self.container)).pair
        if listeners is None:
            return unseen(self, f"who owns port {port}: {why}", self.service.spec)
        owners = sorted({owner for one in listeners for owner in one.owners})
        if not listeners:
            return self._bad(f"nobody listens on port {port}")
        if not owners:
            return self.unknown(f"port {port} is open, and whose it is could not be seen", subject=self.service.spec)
        if all(pid == unit.main_pid for pid, _ in owners):
            return self.passed(f"port {port} belongs to its main process {unit.main_pid}", subject=self.service.spec)
        names = [f"{name} (pid {pid})" for pid, name in owners if pid != unit.main_pid]
        what = (
            f"An old instance answers there. End it by hand ({there(self.container, f'ss -ltnp sport = :{port}')}), then restart."
        )
        return self._bad(f"port {port} belongs to {join(names, 3)}, not to its main process {unit.main_pid}", what)


# ------------------------------------------------------------------------------------------------------- whole


@dataclass(frozen=True)
class IsWhole(Check):
    """Every rank has its scheduler, the detokenizer lives, and the scheduler answers.

    WHY: up to 0.5.9 a rank may die and leave the main process "active", its port open and its health address well.
    """

    service: ServiceSpec
    container: ContainerSpec | None
    said: Measurement | None = field(default=None, repr=False)
    name: ClassVar[str] = "mtp.IsWhole"
    title: ClassVar[str] = "Are all its ranks alive, and do they answer?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (Processes(unit, container), *_asks(self.service, container, self.said))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        return [self._processes(seen), self._answers(seen)]

    def _processes(self, seen: Seen) -> Finding:
        table, why = tell(seen, Processes(self.service.name, self.container)).pair
        if table is None:
            return unseen(self, why, self.service.spec)
        info, _ = _info(seen, self.service, self.container, self.said)
        ranks = sorted({p.rank for p in table.schedulers})
        wanted = int((info.number("tp_size") if info else None) or 0)
        dead = [p.title for p in table.processes if p.state == "Z"]
        about: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": wanted or None,
            "observed": len(ranks),
            "count": len(ranks),
        }
        what = "Take it back: a server that lacks a rank hangs with the first request, and its health address may stay well."
        if not table.processes:
            return self.failed("it has no process at all", action=Suggested.ROLL_BACK, what_to_do=what, **about)
        if dead or (wanted and len(ranks) < wanted) or not ranks:
            missing = f"{len(ranks)} of {wanted} schedulers" if wanted else f"{counted(len(ranks), 'scheduler')}"
            ended = f"; ended and not collected: {join(dead, 3)}" if dead else ""
            return self.failed(
                f"{missing} live ({join(ranks) or 'none'}){ended}", action=Suggested.ROLL_BACK, what_to_do=what, **about
            )
        if table.detokenizer is None:
            return self.failed("its detokenizer is gone", action=Suggested.ROLL_BACK, what_to_do=what, **about)
        if not wanted:
            return self.warned(
                f"{counted(len(ranks), 'scheduler')} live ({join(ranks)}); how many there should be is not known", **about
            )
        return self.passed(f"all {wanted} schedulers and the detokenizer live ({join(ranks)})", **about)

    def _answers(self, seen: Seen) -> Finding:
        info, why = _info(seen, self.service, self.container, self.said)
        about: dict[str, Any] = {"subject": self.service.spec}
        if info is not None:
            return self.passed(f"its scheduler answers ({info.path}, SGLang {info.version or 'of unknown version'})", **about)
        if any(words in why for words in ("no answer within", "connection refused", "no connection", "without a")):
            return self.failed(
                f"its scheduler does not answer: {why}",
                action=Suggested.ROLL_BACK,
                what_to_do="It hangs or died behind a living main process; take it back.",
                **about,
            )
        return unseen(self, f"whether its scheduler answers: {why}", self.service.spec)


# --------------------------------------------------------------------------------------------------- speculation


@dataclass(frozen=True)
class SpeculationIsOn(Check):
    """The server itself says that speculation is on, with the wanted numbers, and every rank has loaded the draft.

    Not yet a proof: only accepted drafts are. The line about 48 running requests alone, and a unit's description, prove nothing.
    """

    service: ServiceSpec
    container: ContainerSpec | None
    speculation: Speculation
    applied: Applied = field(repr=False)
    said: Measurement | None = field(default=None, repr=False)
    name: ClassVar[str] = "mtp.SpeculationIsOn"
    title: ClassVar[str] = "Does the server say that speculation is on?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (UnitJournal(self.service.name, self.container), *_asks(self.service, self.container, self.said))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        log, no_log = tell(seen, UnitJournal(self.service.name, self.container)).pair
        found = [self._says(seen)]
        if log is None:
            return [*found, unseen(self, f"its journal: {no_log}", self.service.spec)]
        story = read_start(log.entries, self.service.name)
        return [*found, *self._journal(log, story), self._drafts(log, story), self._running(seen, story)]

    def _off(self, reason: str, **more: Any) -> Finding:
        what = "Take it back: the flags are there, and the server does not use them."
        return self.failed(reason, subject=self.service.spec, action=Suggested.ROLL_BACK, what_to_do=what, **more)

    def _says(self, seen: Seen) -> Finding:
        info, why = _info(seen, self.service, self.container, self.said)
        if info is None:
            return unseen(self, f"what the server says of itself: {why}", self.service.spec)
        wanted = {
            "speculative_algorithm": self.speculation.stored_algorithm,
            "speculative_num_steps": self.speculation.num_steps,
            "speculative_eagle_topk": self.speculation.eagle_topk,
            "speculative_num_draft_tokens": self.speculation.effective_draft_tokens,
        }
        said = {name: info.said.get(name) for name in wanted}
        about: dict[str, Any] = {"expected": wanted, "observed": said}
        if not info.algorithm:
            return self._off(
                f"{info.path} says speculative_algorithm={said['speculative_algorithm']}: speculation is off", **about
            )
        wrong = [f"{name} is {said[name]}, not {value}" for name, value in wanted.items() if str(said[name]) != str(value)]
        if wrong:
            return self._off(f"{info.path} says other numbers than wanted: {join(wrong)}", **about)
        stored = " (NEXTN is stored as EAGLE)" if self.speculation.algorithm.upper() == "NEXTN" else ""
        sentence = (
            f"{info.path} says {info.algorithm}{stored}, {self.speculation.num_steps} steps, "
            f"{self.speculation.effective_draft_tokens} draft tokens"
        )
        return self.passed(sentence, subject=self.service.spec, **about)

    def _journal(self, log: UnitLog, story: StartStory) -> list[Finding]:
        found = []
        if not log.complete:
            found.append(
                self.unknown(
                    "the journal of this invocation is not whole, so what is not in it may "
                    f"still have been said: {join(log.gaps, 3)}",
                    subject=self.service.spec,
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Raise the unit's log rate limit, and start it once more under guard.",
                )
            )
        # how many requests really run at once is told below, whether the log warns of it (from 0.5.17 on) or not
        bad = [f for f in story.findings if f.verdict is Verdict.FAIL]
        found += [
            self.failed(f.reason, subject=self.service.spec, signature=f.signature, lines=f.lines[:4], action=f.action,
                        what_to_do=f.what_to_do)
            for f in bad
        ]  # fmt: skip
        found += [
            self.warned(f.reason, subject=self.service.spec, signature=f.signature, lines=f.lines[:2], action=f.action,
                        what_to_do=f.what_to_do)
            for f in story.findings if f.verdict is Verdict.WARN and f.signature != "sglang-mamba-capped"
        ]  # fmt: skip
        return found

    def _drafts(self, log: UnitLog, story: StartStory) -> Finding:
        start = story.start
        about: dict[str, Any] = {"subject": self.service.spec}
        if start is None or not start.weights:
            return self.unknown("its journal has no line about loaded weights", **about)
        tp = start.arguments.get("tp_size")
        ranks = start.weights.get(start.draft, {}) if start.draft else {}
        target = max((len(r) for name, r in start.weights.items() if name != start.draft), default=0)
        wanted = tp if isinstance(tp, int) else target
        about |= {"expected": wanted, "observed": len(ranks), "count": len(ranks)}
        if len(ranks) >= wanted > 0:
            size = max(ranks.values())
            return self.passed(
                f"draft weights ({start.draft}, {size:g} GiB) on all {wanted} ranks: {join(sorted(ranks))}", **about
            )
        reason = (
            f"draft weights were loaded on {len(ranks)} of {wanted} ranks"
            if ranks
            else "no rank says that it loaded draft weights"
        )
        return (
            self._off(reason, **{k: v for k, v in about.items() if k != "subject"})
            if log.complete
            else self.unknown(reason, **about)
        )

    def _running(self, seen: Seen, story: StartStory) -> Finding:
        info, _ = _info(seen, self.service, self.container, self.said)
        effective = (info.effective_running if info else None) or (story.start.capacity if story.start else None)
        asked = info.number("max_running_requests") if info else None
        about: dict[str, Any] = {"subject": self.service.spec, "observed": effective, "expected": asked}
        if effective is None:
            return self.warned("how many requests really run at once, the server did not say", **about)
        if asked is not None and effective < asked:
            return self.passed(f"{effective} requests really run at once, of {asked:g} in its arguments: memory decides", **about)
        return self.passed(f"{effective} requests run at once", **about)


# ---------------------------------------------------------------------------------------------------- that fast


@dataclass(frozen=True)
class WhyThatFast(Check):
    """A start of 50 seconds for 227 GiB of weights wants an explanation, or the old process still serves.

    What explains it: a new process and invocation, GPU memory that was free before, and a checkpoint in the page cache.
    """

    service: ServiceSpec
    container: ContainerSpec | None
    applied: Applied = field(repr=False)
    gib_per_s: float = 3.0  # what a disk gives; a start that reads faster was served from memory
    name: ClassVar[str] = "mtp.WhyThatFast"
    title: ClassVar[str] = "Is it a new process, and why did it start as fast as it did?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (UnitState(unit, container), ServedCache(unit, container))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        facts = self.applied.facts
        about: dict[str, Any] = {"subject": self.service.spec}
        if self.applied.outcome != "done":
            return [self.not_checked("it did not come up, so there is no start to explain", **about)]
        if not facts.get("restarted", True):
            return [self.not_checked("it ran with the planned command already, and was not restarted in this step", **about)]
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        old_pid, old_run = facts.get("main_pid_before"), str(facts.get("invocation_before", ""))
        if old_run and unit.invocation_id == old_run:
            return [
                self.failed(
                    f"it is still the old invocation {short_id(old_run)}, process {unit.main_pid}: nothing was restarted",
                    action=Suggested.ROLL_BACK,
                    **about,
                )
            ]
        new = f"a new process ({old_pid} → {unit.main_pid}) of a new invocation"
        return [self._freed(facts, new), self._speed(seen, facts)]

    def _freed(self, facts: Mapping[str, Any], new: str) -> Finding:
        about: dict[str, Any] = {"subject": self.service.spec}
        used = facts.get("gpu_used_mib_before_start")
        if not used:
            why = facts.get("gpu_memory_not_known", "nobody looked")
            return self.warned(f"{new}; whether the GPUs were empty before it is not known: {why}", **about)
        most = max(used.values())
        others = facts.get("others_on_gpus") or []
        if most > 4096 and not others:
            return self.warned(
                f"{new}; {most} MiB were in use on a GPU just before it started, and no process says whose they were",
                action=Suggested.LOOK,
                **about,
            )
        return self.passed(
            f"{new}; its GPUs were empty before it (at most {most} MiB in use), so no weights were left to reuse", **about
        )

    def _speed(self, seen: Seen, facts: Mapping[str, Any]) -> Finding:
        about: dict[str, Any] = {"subject": self.service.spec}
        took = facts.get("start_s")
        cache, why = tell(seen, ServedCache(self.service.name, self.container)).pair
        loading = _loading(facts)
        if took is None:
            return self.warned("how long it took to start is not known", **about)
        if cache is None:
            return self.not_checked(f"ready after {took:.0f} s; why so fast or so slow was not explained: {why}", **about)
        size = cache.size / (1 << 30)
        rate = size / loading if loading else None
        seconds = f", weights in {loading:.0f} s ({rate:.1f} GiB a second)" if loading and rate else ""
        sentence = f"ready after {took:.0f} s{seconds}; {size:.0f} GiB of weights"
        if cache.share is not None and cache.share >= 0.9:
            return self.passed(
                f"{sentence}, {cache.share:.0%} of them in the page cache: read from memory, not from disk", **about
            )
        if rate is None or rate <= self.gib_per_s:
            share = f", {cache.share:.0%} of them in the page cache" if cache.share is not None else ""
            return self.passed(f"{sentence}{share}: no faster than a disk reads", **about)
        if cache.share is None:
            bound = f"the whole page cache is {cache.at_most / (1 << 30):.0f} GiB" if cache.at_most is not None else cache.why_not
            enough = cache.at_most is not None and cache.at_most >= cache.size
            return (self.passed if enough else self.warned)(f"{sentence}; faster than a disk, and {bound}", **about)
        return self.warned(
            f"{sentence}; faster than {self.gib_per_s:g} GiB a second, with only {cache.share:.0%} of them in the page cache",
            action=Suggested.LOOK,
            what_to_do="A fast array may explain it. If not: what was loaded? Compare the log's sizes with the checkpoint's.",
            **about,
        )


def _loading(facts: Mapping[str, Any]) -> float | None:
    """Seconds that the target's weights took, from the start's timeline."""
    for step in facts.get("timeline", ()):
        if step.get("key") == "weights" and step.get("from_s") is not None and step.get("to_s") is not None:
            return float(step["to_s"] - step["from_s"]) or None
    return None

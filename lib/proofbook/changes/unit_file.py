"""Speculation for a server by its unit file: what would be written, guarded; how it is put in effect; how it is taken back."""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from proofbook.changes.following import Followed, follow_start, start_unit, stop_unit, systemctl, wait_stopped
from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.changes.unit_edit import Style, UnitEdit, drop_in_paths, effective_of
from proofbook.checks.arguments import changes as argument_changes
from proofbook.checks.looking import tell
from proofbook.checks.mtp.speculation import Speculation
from proofbook.errors import CannotTell, GuardRefused, PlanDrifted
from proofbook.host import Hands
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Action, Applied, Change, Command, Identity, Plan, Probe, Seen
from proofbook.probes.change_state import GuardState, LeaseHeld
from proofbook.probes.memory import GpuMemory, GpuProcesses
from proofbook.probes.obstacles import Obstacle, Obstacles, typed
from proofbook.probes.sglang import PortOwner, Processes, Version, VersionFacts, port_of
from proofbook.probes.sglang_flags import check_argv
from proofbook.probes.systemd import UnitFacts, UnitProcess, UnitState
from proofbook.probes.unit_files import CandidateVerified, UnitFiles, UnitFileSet, UnitSettings, UnitSettingsFacts
from proofbook.redact import Redactor
from proofbook.remote.guard import GuardedFile
from proofbook.remote.looking import Verified

__all__ = ["EnableMTP", "argv_digest"]

Tell = Callable[[str], None]

#: What systemd does where the unit says nothing (DefaultTimeoutStopSec).
_STOP_S = 90.0
#: Beyond TimeoutStopSec: the kill, and the driver's taking back of the memory.
_STOP_MARGIN_S = 60.0
#: A unit without a limit to its stop drains for as long as the longest request; somebody must end the waiting.
_STOP_AT_MOST_S = 1800.0
#: Automatic restarts of the old server that are waited for when a change is taken back.
_TRIES_BACK = 4
#: What a plan says of the third arm (A-B-A), and so lets happen.
_AGAIN = (
    Action("if it is to be kept: put the old files back for a while, restart, and measure the old configuration a second time"),
    Action("if the gain holds against that too: put the new files in place again, restart, and look whether it took effect"),
)


def argv_digest(argv: Sequence[str]) -> str:
    """The sha256 of a command line: equal without being shown."""
    return hashlib.sha256("\0".join(argv).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class EnableMTP(Change):
    """Turn on multi-token prediction for ``service``, or change how it is done, under a guard.

    ``style``: a drop-in, or an edit of the file that holds the command now. ``guard_minutes``: how long the machine waits for
    the word that the change stays. ``kill_leftovers``: SIGKILL what outlives the stop, inside the unit's control group only.
    ``measure_again``: the old configuration may be brought back for a while, to be measured a second time, which takes about
    ``again_s`` seconds.

    ``kept_only_if``: by what it will be decided whether the change stays; who approves the plan approves that too.
    ``notes``: further facts for whoever reads the plan.

    A plan that must not be carried out has no actions; its facts say why. Where the wanted speculation is there already,
    its settings hold ``there``.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    speculation: Speculation = field(default_factory=Speculation)
    style: Style = "drop-in"
    guard_minutes: float = 60.0
    kill_leftovers: bool = False
    measure_again: bool = False
    again_s: float = field(default=0.0, repr=False)
    kept_only_if: str = ""
    notes: tuple[str, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "enable-mtp"

    # ---------------------------------------------------------------------------------------------- planning

    @property
    def edit(self) -> UnitEdit:
        return UnitEdit(self.service.name, self.container, self.speculation, self.style)

    @property
    def _files(self) -> UnitFiles:
        return UnitFiles(self.service.name, self.container, drop_in_paths(self.service.name))

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (
            UnitState(unit, container),
            UnitSettings(unit, container),
            UnitProcess(unit, container),
            self._files,
            Version(unit, container),
            CandidateVerified(unit, container, self.edit),
            GpuProcesses(),
        )

    def plan(self, seen: Seen, host: Identity) -> Plan:
        try:
            draft = self._draft(seen)
        except CannotTell as why:
            return self._nothing(host, f"{self.service.spec} cannot be changed: {why}", (f"not possible: {why}",))
        if draft.reasons:
            title = f"{self.service.spec} is not changed: {draft.reasons[0]}"
            return self._nothing(host, title, tuple(f"not possible: {reason}" for reason in draft.reasons))
        if not draft.files:
            title = f"{self.service.spec} has this speculation already: nothing to do"
            return self._nothing(host, title, tuple(draft.facts), there=True)
        return draft.plan(self, host)

    def _nothing(self, host: Identity, title: str, facts: tuple[str, ...], *, there: bool = False) -> Plan:
        return Plan(self.name, title, host, {}, (), (), "", (), 0.0, facts, {"there": True} if there else {})

    def _draft(self, seen: Seen) -> _Draft:
        """Everything that a plan is made of. Raises CannotTell when the machine did not tell what must be known."""
        unit, container = self.service.name, self.container
        state, settings = seen.value(UnitState(unit, container)), seen.value(UnitSettings(unit, container))
        now, version = seen.value(self._files), seen.value(Version(unit, container))
        draft = _Draft(state, settings, now, version, self.edit.files(now, version.version))
        draft.reasons += _may_not(state, now)
        before, after = now.effective, effective_of(now, draft.files)
        draft.argv_before = before.command.words_with(before.environment_with(now.environment))
        draft.argv = after.command.words_with(after.environment_with(now.environment))
        self._hold_running(seen, draft)
        self._hold_flags(draft)
        self._hold_verified(seen, draft)
        draft.others = self._others(seen, draft)
        return draft

    def _hold_running(self, seen: Seen, draft: _Draft) -> None:
        if draft.state.active != "active" or not draft.state.main_pid:
            draft.reasons.append(
                f"it does not run ({draft.state.active}, {draft.state.sub}): without a baseline nothing can be judged"
            )
            return
        running = seen.value(UnitProcess(self.service.name, self.container)).argv
        different = argument_changes(draft.argv_before, running)
        if different:
            draft.reasons.append(
                "what runs is not what the unit says, so a restart alone would change more than this: "
                + "; ".join(map(str, different[:4]))
            )

    def _hold_flags(self, draft: _Draft) -> None:
        problems = check_argv(draft.argv, draft.version.version)
        draft.reasons += [f"{problem}" for problem in problems if problem.fatal]
        draft.facts += [f"flag {problem}" if problem.flag else str(problem.text) for problem in problems if not problem.fatal]

    def _hold_verified(self, seen: Seen, draft: _Draft) -> None:
        try:
            verified = seen.value(CandidateVerified(self.service.name, self.container, self.edit))
        except CannotTell as why:
            draft.facts.append(f"NOT VERIFIED by systemd-analyze: {why}; the text was read again by our own rules")
            return
        ours = _lines_of(verified, self.service.name, draft)
        if verified.exit_status:
            draft.reasons.append(f"systemd-analyze verify refuses the unit (exit {verified.exit_status}): {'; '.join(ours[:3])}")
        draft.facts.append(
            f"systemd-analyze verify: exit {verified.exit_status}"
            + (f", it says: {'; '.join(ours[:4])}" if ours else ", nothing to say")
        )

    def _others(self, seen: Seen, draft: _Draft) -> tuple[str, ...] | None:
        """Who else computes on the GPUs, by name; None when nobody could say."""
        try:
            processes = seen.value(GpuProcesses())
        except CannotTell as why:
            draft.facts.append(f"NOT KNOWN who else uses the GPUs: {why}")
            return None
        others = [p for p in processes if not p.of_unit(self.service.name, self.container)]
        return tuple(sorted({f"{p.process} on {p.pci}" for p in others}))

    # ------------------------------------------------------------------------------------------------ acting

    def apply(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """Put the plan in effect. Every step first looks whether it is done already: the same call goes on after a crash."""
        return _Acting(plan, hands, tell, self).apply()

    def suspend(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """The old files and the old server for a while; the guard goes on waiting. :meth:`apply` goes back to the new ones."""
        return _Acting(plan, hands, tell, self).suspend()

    def confirm(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """The change stays: the guard goes, and the old files with it."""
        return _Acting(plan, hands, tell, self).confirm()

    def rollback(self, plan: Plan, hands: Hands, tell: Tell) -> Applied:
        """Bring back the old files, byte for byte, and show that the old configuration serves."""
        return _Acting(plan, hands, tell, self).rollback()

    def more_time(self, plan: Plan, hands: Hands, minutes: float) -> None:
        """The guard's time runs anew, for ``minutes`` from now. Raises GuardRefused when it is up already."""
        acting = _Acting(plan, hands, lambda _text: None, self)
        acting.guarded(f"give the guard {minutes:g} min more", acting.guard.extend(round(minutes * 60)))


def _may_not(state: UnitFacts, now: UnitFileSet) -> list[str]:
    """Why the unit's files must not be touched as they are."""
    reasons = []
    if state.load != "loaded":
        reasons.append(f"the unit is {state.load}")
    if state.need_daemon_reload:
        reasons.append("its files were changed and not loaded (NeedDaemonReload=yes): loading them would change more than this")
    return reasons


def _lines_of(verified: Verified, unit: str, draft: _Draft) -> list[str]:
    """What systemd-analyze says of this unit's own files; it also speaks of others that are loaded beside it."""
    names = {unit, *(path.rpartition("/")[2] for path in draft.files), *(f.path.rpartition("/")[2] for f in draft.now.files)}
    redactor = Redactor()
    return [redactor.text(line, "systemd-analyze") for line in verified.lines if any(name in line for name in names)]


@dataclass
class _Draft:
    """A plan in the making."""

    state: UnitFacts
    settings: UnitSettingsFacts
    now: UnitFileSet
    version: VersionFacts
    files: Mapping[str, bytes]
    argv_before: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    others: tuple[str, ...] | None = ()
    reasons: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    @property
    def stop_s(self) -> float:
        return min((self.settings.timeout_stop_s or _STOP_AT_MOST_S) + _STOP_MARGIN_S, _STOP_AT_MOST_S)

    def plan(self, change: EnableMTP, host: Identity) -> Plan:
        service, unit = change.service, change.service.name
        minutes = change.guard_minutes
        files = [self._file(path, data) for path, data in self.files.items()]
        write = [Action(f"write {f['path']} ({f['old_sha256'] or 'new'} → {f['new_sha256']})") for f in files]
        put_back = [
            Action(f"put back {f['path']} (sha256 {f['old_sha256']})" if f["old_sha256"] else f"remove {f['path']}")
            for f in files
        ]
        reload = Action("have systemd read its units", ("systemctl", "daemon-reload"))
        again, restart_s = change.measure_again, min(self.stop_s, _STOP_S) + service.ready_s
        down_again = f"{service.spec} is down twice more: for the second measurement of the old configuration, and after it"
        return Plan(
            change=change.name,
            title=f"Speculation of {service.spec} ({change.speculation.algorithm}, {change.speculation.num_steps} steps)",
            host=host,
            pre_state=self._pre_state(),
            actions=(
                Action("keep the old files on the machine, and bring the new ones"),
                Action(f"arm the guard: the machine takes this back by itself after {minutes:g} min unless it is confirmed"),
                *write,
                reload,
                Action(f"stop {unit} and wait until nothing of it is left on the GPUs", ("systemctl", "stop", unit)),
                *((Action("kill what is left of it, inside its control group only"),) if change.kill_leftovers else ()),
                Action(f"start {unit} and follow it until it is ready", ("systemctl", "start", unit)),
                *(_AGAIN if again else ()),
                *((Action(f"kept only if: {change.kept_only_if}; otherwise it is taken back"),) if change.kept_only_if else ()),
            ),
            undo=(*put_back, reload, Action(f"restart {unit} and see that it serves", ("systemctl", "restart", unit))),
            diff=self._diff(),
            cannot_undo=(
                f"{service.spec} is down from its stop until it is ready again, and once more when this is taken back",
                *((down_again,) if again else ()),
                "requests that run are drained until the stop's time is up, then cut; what the caches hold is lost",
            ),
            expected_s=round(restart_s + (2 * restart_s + change.again_s if again else 0)),
            facts=tuple(self._shown(change)),
            settings={
                "unit": unit,
                "container": change.container.model_dump() if change.container else None,
                "files": files,
                "guard_s": round(minutes * 60),
                "stop_s": self.stop_s,
                "ready_s": service.ready_s,
                "url": service.url,
                "kill_leftovers": change.kill_leftovers,
                "measure_again": again,
                "version": self.version.version,
                "argv": list(Redactor().value(list(self.argv), "plan")),
                "argv_sha256": argv_digest(self.argv),
                "argv_before_sha256": argv_digest(self.argv_before),
                "environment": dict(change.speculation.variables(self.version.version)),
                "others_on_gpus": None if self.others is None else list(self.others),
            },
        )

    def _file(self, path: str, data: bytes) -> dict[str, Any]:
        old = self.now.get(path)
        return {
            "path": path,
            "old_sha256": old.sha256 if old is not None else None,
            "new_sha256": hashlib.sha256(data).hexdigest(),
            "mode": old.mode if old is not None else 0o644,
            # WHY: once a change is confirmed the machine keeps no old bytes; this brings them back, and the digest proves it
            "undo": undo_splices(old.text, data.decode("utf-8", "surrogateescape")) if old is not None else [],
        }

    def _pre_state(self) -> dict[str, Any]:
        """What the approval is bound to: no times, no process numbers, no measurements."""
        return {
            # WHY pairs: as a name, a path with the word "token" in it would have its digest taken for a secret
            "files": [[f.path, f.sha256] for f in self.now.files],
            "environment files": [
                [path, "absent" if text is None else hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()]
                for path, text in sorted(self.now.environment.items())
            ],
            "state": f"{self.state.active}/{self.state.sub}, {self.state.enabled}",
            "sglang": self.version.version,
            "command": argv_digest(self.argv_before),
            "on the GPUs besides it": "not known" if self.others is None else list(self.others),
        }

    def _diff(self) -> str:
        lines: list[str] = []
        for path, data in self.files.items():
            old = self.now.get(path)
            before = old.text.splitlines() if old is not None else []
            after = data.decode("utf-8", "surrogateescape").splitlines()
            names = (f"a{path}" if old is not None else "/dev/null", f"b{path}")
            lines += difflib.unified_diff(before, after, *names, lineterm="")
        return Redactor().text("\n".join(lines), "plan").encode("utf-8", "backslashreplace").decode()

    def _shown(self, change: EnableMTP) -> list[str]:
        settings, facts = self.settings, list(self.facts)
        flags = [str(changed) for changed in argument_changes(self.argv_before, self.argv)]
        head = [
            f"SGLang {self.version.version} ({self.version.python})",
            "the command changes in " + "; ".join(flags) if flags else "the command does not change",
        ]
        variables = change.speculation.variables(self.version.version)
        if variables:
            head.append("the environment gets " + ", ".join(f"{k}={v}" for k, v in variables.items()))
        head += [f"{f.path} is written by a tool ({f.managed_by}): it may be overwritten" for f in self.now.files if f.managed_by]
        stop = "no limit" if settings.timeout_stop_s is None else f"{settings.timeout_stop_s:g} s"
        head.append(f"its stop may take {stop} (TimeoutStopSec), Restart={settings.restart}, KillMode={settings.kill_mode}")
        if settings.keeps_children:
            head.append("its stop leaves processes behind on purpose (KillMode, SendSIGKILL): they would keep the GPUs' memory")
        if self.others:
            head.append(f"others compute on these GPUs: {', '.join(self.others[:6])}")
        head.append("not checked: who sends requests, and whether a load balancer takes this server out while it is down")
        return [*change.notes, *head, *facts]


# ---------------------------------------------------------------------------------------------------- the old bytes


def undo_splices(old: str, new: str) -> list[list[Any]]:
    """How ``old`` comes back from ``new``: [start, end, text] in characters of ``new``, only where the two differ.

    WHY by words: an undo travels in the plan, and what stays the same on a changed line may be a secret.
    """
    after, before = (re.findall(r"\s+|\S+", text) for text in (new, old))
    places = [0]
    for token in after:
        places.append(places[-1] + len(token))
    matcher = difflib.SequenceMatcher(None, after, before, autojunk=False)
    return [[places[i], places[j], "".join(before[k:m])] for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def undone(new: str, splices: Sequence[Sequence[Any]]) -> str:
    """``new`` with its splices taken back."""
    for start, end, text in sorted(splices, key=lambda s: int(s[0]), reverse=True):
        new = new[: int(start)] + str(text) + new[int(end) :]
    return new


# --------------------------------------------------------------------------------------------------------- acting


def _at(status: GuardStatus) -> str:
    """When a change ended, as the machine wrote it down."""
    return f" at {status.outcome_at:%Y-%m-%d %H:%M} UTC" if status.outcome_at is not None else ""


def _others(status: GuardStatus) -> list[str]:
    """Files that are neither as they were nor as the change has them."""
    return [f.path for f in status.files if f.content == "other"]


class _Acting:
    """One pass over a plan's steps, forwards or backwards. It knows the plan alone; what the machine is like it looks up."""

    def __init__(self, plan: Plan, hands: Hands, tell: Tell, change: EnableMTP) -> None:
        self.plan, self.hands, self.tell, self.change = plan, hands, tell, change
        self.settings = plan.settings
        self.unit = str(self.settings["unit"])
        inside = self.settings["container"]
        self.container = ContainerSpec(**inside) if inside else None
        self.guard = Guard(hands.run_id, self.unit, self.container)
        self.service = ServiceSpec(
            name=self.unit,
            container=self.container.name if self.container else "",
            url=self.settings["url"],
            ready_s=self.settings["ready_s"],
        )
        self.facts: dict[str, Any] = {}
        self.last: GuardStatus | None = None  # how the machine last said that the change stands

    # ------------------------------------------------------------------------------------------------- steps

    def guarded(self, what: str, do: Command) -> GuardStatus:
        """One verb of the guard. Raises PlanDrifted, GuardRefused, CannotTell."""
        result = self.hands.act(what, do)
        if result is None:
            raise CannotTell(f"{what}: the connection was lost")
        return self.guard.done(result)

    def status(self) -> GuardStatus:
        probe = GuardState(self.hands.run_id, self.container)
        self.last = self.hands.look(probe).value(probe)
        return self.last

    def look_files(self) -> UnitFileSet:
        probe = UnitFiles(self.unit, self.container, tuple(f["path"] for f in self.settings["files"]))
        return self.hands.look(probe).value(probe)

    def look_unit(self) -> UnitFacts:
        probe = UnitState(self.unit, self.container)
        return self.hands.look(probe).value(probe)

    def _applied(self, came_to: str, summary: str, **facts: Any) -> Applied:
        self.facts |= facts
        return Applied(self.plan, came_to, summary, dict(self.facts))

    # --------------------------------------------------------------------------------------------- forwards

    def apply(self) -> Applied:
        if self.plan.empty:
            return self._applied("nothing-to-do", self.plan.title)
        status = self.status()
        if self._undoes(status):
            return self.rollback()
        if status.state in ("firing", "fired", "failed") or status.outcome == "fired":
            return self._fired_before(status)
        if status.state == "confirmed":
            status = self.guarded("finish keeping the change", self.guard.confirm())
        if status.state == "none" and status.outcome == "confirmed":
            if self._all_old(self.look_files()):
                return replace(self.rollback(), summary="this change was kept, and taken back since; nothing was applied again")
            return self._applied("nothing-to-do", f"this change was kept already{_at(status)}; nothing was applied again")
        if status.state == "none":
            self._stage()
            status = self.status()
        status = self._armed(status)
        try:
            if not status.all_new:
                self.guarded("put the new files in place", self.guard.install())
            wrong = self._not_as_planned()
            if wrong:
                return self._applied("failed", f"the files are in place, but {wrong}; nothing was restarted", why=wrong)
            return self._in_effect()
        except (CannotTell, GuardRefused) as why:
            return self._applied("failed", f"{self.plan.title}: {why}", why=str(why))

    def _fired_before(self, status: GuardStatus) -> Applied:
        """The machine has taken it back by itself, or tries to: that is seen through to its end, and nothing is applied again."""
        if status.state == "none" and not self._all_old(self.look_files()):
            return self.rollback()  # it was kept since, and its undoing begun
        match status.fired_by:
            case "its time":
                before = (
                    f"the guard on the machine took this change back by itself{_at(status)}, since nobody had kept it in time"
                )
            case "a run":
                before = f"a run had this change taken back before it ended{_at(status)}"
            case _:
                before = f"this change was taken back on the machine before{_at(status)}"
        self.tell(f"{before}; it is not applied again")
        seen = self.rollback()
        return replace(seen, summary=f"{before}; {seen.summary}")

    def _stage(self) -> None:
        files = self._bytes()
        self.guarded("keep the old files and bring the new ones", self.guard.stage(files))

    def _bytes(self) -> tuple[FileChange, ...]:
        """The new files, made anew from what is there. Raises PlanDrifted when they are not those of the plan."""
        now = self.look_files()
        made = self.change.edit.files(now, str(self.settings["version"]))
        out = []
        for one in self.settings["files"]:
            data = made.get(one["path"])
            if data is None or hashlib.sha256(data).hexdigest() != one["new_sha256"]:
                raise PlanDrifted(
                    f"{one['path']} would not become what the plan says", hint="the unit has changed since: make a new plan"
                )
            out.append(FileChange(one["path"], one["old_sha256"], data, int(one["mode"])))
        return tuple(out)

    def _armed(self, status: GuardStatus) -> GuardStatus:
        planned = [(f["path"], f["old_sha256"], f["new_sha256"]) for f in self.settings["files"]]
        if [(f.path, f.old_sha256, f.new_sha256) for f in status.files] != planned:
            raise PlanDrifted("the machine holds other files of this change than the plan has", hint="make a new plan")
        seconds = int(self.settings["guard_s"])
        if status.state == "armed":
            # gone on with after a crash: the time that is left was meant for one pass
            return self.guarded("give the guard its whole time again", self.guard.extend(seconds))
        armed = self.guarded(f"arm the guard for {seconds / 60:g} min", self.guard.arm(seconds))
        if not armed.guarded:
            raise GuardRefused("the guard does not wait although it was armed", hint=f"systemctl status {self.guard.timer}")
        if armed.storage.startswith("volatile"):
            self.facts["guard_storage"] = armed.storage
            self.tell(f"the guard does not survive a reboot here: its files are on {armed.storage}")
        return armed

    def _not_as_planned(self) -> str:
        """Why what systemd has loaded is not the plan, "" when it is. Asked before anything is stopped."""
        now, unit = self.look_files(), self.look_unit()
        if unit.load != "loaded":
            return f"systemd does not take the unit: {unit.load}"
        if unit.need_daemon_reload:
            return "systemd has not read the new files (NeedDaemonReload=yes)"
        effective = now.effective
        argv = effective.command.words_with(effective.environment_with(now.environment))
        if argv_digest(argv) != self.settings["argv_sha256"]:
            return "read back, the command is not that of the plan"
        loaded = [" ".join(command.tokens) for command in unit.exec_start]
        written = " ".join(effective.command.words).split()
        if loaded != [" ".join(written)]:
            return "systemd's own reading of the command is not that of the plan"
        return ""

    def _in_effect(self) -> Applied:
        if self._runs_as_planned():
            self.tell("the service runs with the new command already")
            self.facts["restarted"] = False
        else:
            stopped = self._stop()
            if stopped is not None:
                return stopped
            self.facts["restarted"] = True
            start_unit(self.hands, self.unit, self.container)
        followed = self._follow(self.facts.get("invocation_before", ""))
        if not followed.ready:
            return self._applied("failed", f"{self.service.spec} did not become ready: {followed.why}")
        return self._applied("done", f"{self.service.spec} is ready with the new command after {followed.seconds:.0f} s")

    def _runs_as_planned(self) -> bool:
        process, state = UnitProcess(self.unit, self.container), UnitState(self.unit, self.container)
        seen = self.hands.look(process, state)
        try:
            facts, unit = seen.value(process), seen.value(state)
        except CannotTell:
            return False
        self.facts |= {
            "main_pid_before": unit.main_pid,
            "invocation_before": unit.invocation_id,
            "n_restarts_before": unit.n_restarts,
        }
        same = bool(argv_digest(facts.argv) == self.settings["argv_sha256"])
        try:
            same = same and all(facts.variable(name) == value for name, value in self.settings["environment"].items())
        except CannotTell:
            same = False
        if same:
            self.facts["invocation_before"] = ""  # its start is the one to follow
        return same

    def _stop(self) -> Applied | None:
        """Stop it. Something when it must not be started now."""
        seen = self.hands.look(GpuProcesses(), GpuMemory())
        known: frozenset[int] = frozenset()
        try:
            known = frozenset(p.pid for p in seen.value(GpuProcesses()) if p.of_unit(self.unit, self.container))
        except CannotTell as why:
            self.tell(f"not known which processes it has on the GPUs: {why}")
        stop_unit(self.hands, self.unit, self.container)
        stopped = wait_stopped(
            self.hands,
            self.unit,
            self.container,
            patience_s=float(self.settings["stop_s"]),
            known_gpu_pids=known,
            may_kill=bool(self.settings["kill_leftovers"]),
            tell=self.tell,
        )
        self.facts |= {
            "stop_s": stopped.seconds,
            "leftovers": list(stopped.left),
            "killed_leftovers": stopped.killed,
            "others_on_gpus": list(stopped.others),
            "stop_not_verified": list(stopped.unverified),
        }
        if not stopped.done:
            reason = f"{stopped.seconds:.0f} s after the stop this is left: {'; '.join(stopped.left[:4])}"
            return self._applied("failed", f"{self.service.spec} was not started: {reason}", why=reason)
        self.tell(f"{self.service.spec} is stopped and nothing of it is left, after {stopped.seconds:.0f} s")
        return self._strangers(stopped.others)

    def _strangers(self, others: Sequence[str]) -> Applied | None:
        """Something when somebody holds a GPU who was not there when the plan was made."""
        memory = GpuMemory()
        try:
            rows = self.hands.look(memory).value(memory)
            self.facts["gpu_free_mib_before_start"] = {row.pci: row.free_mib for row in rows}
            self.facts["gpu_used_mib_before_start"] = {row.pci: row.used_mib for row in rows}
        except CannotTell as why:
            self.facts["gpu_memory_not_known"] = str(why)
        planned = self.settings["others_on_gpus"]
        if planned is None:
            return None
        new = [other for other in others if not any(other.startswith(p.partition(" on ")[0]) for p in planned)]
        if not new:
            return None
        reason = f"a process that was not there before holds a GPU: {'; '.join(new[:4])}"
        return self._applied("failed", f"{self.service.spec} was not started: {reason}", why=reason, leftovers=new)

    def _follow(self, before: str, restarts: int = 0) -> Followed:
        followed = follow_start(
            self.hands,
            self.service,
            self.container,
            before=before,
            patience_s=float(self.settings["ready_s"]),
            tell=self.tell,
            restarts=restarts,
        )
        self.facts |= followed.facts()
        return followed

    def _follow_back(self) -> Followed:
        """Follow the old server's start, and the automatic restarts behind it.

        WHY here and not forwards: the old configuration served before. What was in the way of the new one (a process that
        still held a GPU, or the port) may be in its way too, and gone at the next try.
        """
        followed, tries = self._follow(""), 0
        while followed.outcome == "restarting" and tries < _TRIES_BACK:
            tries += 1
            self.tell(f"the old server did not come up ({followed.why[:200]}); following the restart that systemd makes")
            followed = self._follow(followed.invocation, tries)
        return followed

    # ------------------------------------------------------------------------------------- back for a while

    def suspend(self) -> Applied:
        """Old files, old server, and the guard waits on: whoever dies here leaves a machine that ends with the old state."""
        if not self.settings.get("measure_again"):
            return self._applied("failed", f"{self.plan.title} stays in effect: its plan does not say that it may be suspended")
        try:
            status = self.status()
            if status.state in ("firing", "fired", "failed") or status.outcome == "fired":
                return self._fired_before(status)
            self.guarded("give the guard its whole time again", self.guard.extend(int(self.settings["guard_s"])))
            self.guarded("put the old files back for a while", self.guard.suspend())
            return self._old_for_a_while()
        except (CannotTell, GuardRefused, PlanDrifted) as why:
            return self._applied("failed", f"{self.plan.title} could not be suspended: {why}", why=str(why))

    def _old_for_a_while(self) -> Applied:
        now, unit = self.look_files(), self.look_unit()
        if not self._all_old(now) or unit.need_daemon_reload:
            raise CannotTell("the old files are not in effect, although they were put back")
        stopped = self._stop()
        if stopped is not None:
            return stopped
        start_unit(self.hands, self.unit, self.container)
        followed = self._follow(unit.invocation_id)
        if not followed.ready:
            return self._applied("failed", f"the old {self.service.spec} did not become ready again: {followed.why}")
        process = UnitProcess(self.unit, self.container)
        if argv_digest(self.hands.look(process).value(process).argv) != self.settings["argv_before_sha256"]:
            return self._applied("failed", "the old files are back, and what runs is not the old command")
        return self._applied(
            "suspended", f"{self.service.spec} serves with the old command again, {followed.seconds:.0f} s after its start"
        )

    # -------------------------------------------------------------------------------------------------- keeping

    def confirm(self) -> Applied:
        result = self.hands.act("keep the change: take the guard away", self.guard.confirm(), loss_expected=True)
        status = self.guard.done(result) if result is not None else self._kept_after_all()
        return self._applied(
            "confirmed", f"{self.plan.title}: kept; its guard is gone", guard=status.state, outcome=status.outcome
        )

    def _kept_after_all(self) -> GuardStatus:
        """How the keeping ended when its answer was lost. Raises GuardRefused, CannotTell."""
        self._back_again("it is kept")
        status = self.status()
        if status.state == "none" and status.outcome == "confirmed":
            return status
        return self.guarded("keep the change, again", self.guard.confirm())

    def _back_again(self, meanwhile: str) -> None:
        """Wait for the machine after a connection that broke ``meanwhile``. Raises CannotTell when it does not come back."""
        self.tell(f"the connection was lost while {meanwhile}; the machine goes on by itself")
        if self.hands.host.await_up(patience_s=600, tell=self.tell) is None:
            raise CannotTell(f"the machine does not answer any more since the connection was lost while {meanwhile}")
        self.hands.proven("after a lost connection")

    # -------------------------------------------------------------------------------------------- backwards

    def rollback(self) -> Applied:
        try:
            return self._rollback()
        except (CannotTell, GuardRefused, PlanDrifted) as why:
            return self._by_hand(str(why))

    def _rollback(self) -> Applied:
        status = self.status()
        if self._undoes(status):
            return self._take_back_kept_on(status)
        if status.state == "confirmed":  # the keeping was cut off: it is brought to its end first
            status = self.guarded("finish keeping the change", self.guard.confirm())
        if status.state == "none":
            now = self.look_files()
            if not self._all_old(now):
                return self._take_back_kept(now)
            self.tell("its files are as they were before")
        elif status.state in ("staged", "armed", "failed") and _others(status):
            still = " (the guard still does it when its time is over, and keeps a copy)" if status.guarded else ""
            return self._by_hand(f"somebody else has changed {', '.join(_others(status))} meanwhile{still}")
        elif status.state in ("staged", "armed", "firing", "failed"):
            self._fire()
        return self._proven_old()

    def _fire(self) -> None:
        """Have the machine take it back; a connection that breaks meanwhile changes nothing of that."""
        result = self.hands.act("take the change back", self.guard.fire(), loss_expected=True)
        if result is not None:
            self.guard.done(result)
            return
        self._back_again("the change is taken back")
        status = self.status()
        if status.state not in ("fired",) and status.outcome != "fired":
            self.guarded("take the change back, again", self.guard.fire())

    def _proven_old(self) -> Applied:
        now, unit = self.look_files(), self.look_unit()
        if not self._all_old(now):
            return self._by_hand("not every file is as it was before")
        if unit.need_daemon_reload:
            return self._by_hand(f"systemd has not read the old files of {self.unit} again (NeedDaemonReload=yes)")
        self.facts["files"] = {f["path"]: f["old_sha256"] or "absent" for f in self.settings["files"]}
        strange = self._by_others(now)
        followed = self._follow_back()
        if not followed.ready:
            also = f"; others changed its files meanwhile: {', '.join(strange)}" if strange else ""
            return self._by_hand(f"the old files are back, but {self.service.spec} does not serve{also}: {followed.why}")
        process = UnitProcess(self.unit, self.container)
        running = self.hands.look(process).value(process)
        if argv_digest(running.argv) != self.settings["argv_before_sha256"]:
            return self._by_hand(f"the old files are back, and process {running.pid} does not run the old command")
        status = self.status()
        if self._undoes(status) and status.state != "armed":
            return self._by_hand(f"its own guard brought the change back in the middle ({status.state}): say it again")
        summary = f"the old files are back byte for byte, and {self.service.spec} serves with the old command again"
        if status.state in ("fired", "staged"):
            status = self.guarded("remove what was kept for taking it back", self.guard.clean())
        if status.kept:
            self.facts["written_by_others"] = list(status.kept)
            summary += f"; what somebody else had written there is kept: {', '.join(status.kept)}"
        return self._applied("rolled-back", summary)

    def _all_old(self, now: UnitFileSet) -> bool:
        for one in self.settings["files"]:
            file = now.get(one["path"])
            if (file.sha256 if file is not None else None) != one["old_sha256"]:
                return False
        return True

    def _by_others(self, now: UnitFileSet) -> list[str]:
        """Files of the unit, not of this change, that are not as the plan saw them."""
        ours = {f["path"] for f in self.settings["files"]}
        before = {path: digest for path, digest in dict(self.plan.pre_state["files"]).items() if path not in ours}
        present = {f.path: f.sha256 for f in now.files if f.path not in ours}
        return sorted(path for path in {*before, *present} if before.get(path) != present.get(path))

    def _take_back_kept(self, now: UnitFileSet) -> Applied:
        """Undo a change that was confirmed: the old bytes are made from the new ones, and their digest must be the old one."""
        files = []
        for one in self.settings["files"]:
            file = now.get(one["path"])
            if file is None or file.sha256 != one["new_sha256"]:
                return self._by_hand(f"{one['path']} is neither as it was before nor as this change made it")
            old: bytes | None = None
            if one["old_sha256"] is not None:
                old = undone(file.text, one["undo"]).encode("utf-8", "surrogateescape")
                if hashlib.sha256(old).hexdigest() != one["old_sha256"]:
                    return self._by_hand(f"the old bytes of {one['path']} cannot be made from the new ones")
            files.append(FileChange(one["path"], one["new_sha256"], old, int(one["mode"])))
        seconds = int(self.settings["guard_s"])
        self.guarded("keep the present files and bring the old ones", self.guard.stage(files))
        self.guarded(f"arm the guard for {seconds / 60:g} min", self.guard.arm(seconds))
        return self._old_in_effect()

    def _undoes(self, status: GuardStatus) -> bool:
        """Whether the guard is that of a kept change's undoing: its "new" files are the old ones of the plan."""
        undoing = [(f["path"], f["new_sha256"], f["old_sha256"]) for f in self.settings["files"]]
        return [(f.path, f.old_sha256, f.new_sha256) for f in status.files] == undoing

    def _take_back_kept_on(self, status: GuardStatus) -> Applied:
        """Go on with the undoing of a kept change that another run had begun: forwards, for its guard brings the change back."""
        self.tell(f"another run had begun to undo this kept change ({status.state}); it is gone on with")
        if status.state in ("staged", "armed") and _others(status):
            return self._by_hand(f"somebody else has changed {', '.join(_others(status))} meanwhile")
        if status.state == "confirmed":
            self.guarded("finish taking the guard away", self.guard.confirm())
            return self._proven_old()
        if status.state == "armed":
            self.guarded("give the guard its whole time again", self.guard.extend(int(self.settings["guard_s"])))
            return self._old_in_effect()
        if status.state in ("firing", "failed"):
            self._fire()  # it must come to an end before anything else is put in place
        if status.state != "staged":
            self.guarded("remove what was kept for bringing the change back", self.guard.clean())
        return self._take_back_kept(self.look_files())

    def _old_in_effect(self) -> Applied:
        """Put the old files of a kept change in place, under a guard that would bring the change back, and prove them."""
        self.guarded("put the old files in place", self.guard.install())
        stop_unit(self.hands, self.unit, self.container)
        wait_stopped(
            self.hands,
            self.unit,
            self.container,
            patience_s=float(self.settings["stop_s"]),
            known_gpu_pids=frozenset(),
            may_kill=bool(self.settings["kill_leftovers"]),
            tell=self.tell,
        )
        start_unit(self.hands, self.unit, self.container)
        proven = self._proven_old()
        if proven.outcome == "rolled-back":
            self.guarded("the old files stay: take the guard away", self.guard.confirm())
        return proven

    # ------------------------------------------------------------------------------------------- not taken back

    def _by_hand(self, why: str) -> Applied:
        """Who or what is in the way, by name, and what a person has to type on the host, when the machine does not do it."""
        with suppress(CannotTell):  # as it was seen last, then
            self.status()
        now, obstacles = self._files_now(), self._obstacles()
        way = [*self._lease_of_another(), *self._strange_files(now), *(o.what for o in obstacles), *self._in_the_way()]
        way = way or self._last_words() or [why]
        lines = [*(typed(o, self.container) for o in obstacles), *self._saving(now), *self._restoring(now)]
        look = " ".join(systemctl(self.container, "status", self.unit).argv)
        also = f"; in its way: {'; '.join(way[:3])}" if way != [why] else ""
        return self._applied("rollback-failed", f"not taken back: {why}{also}", why=why, in_the_way=way, by_hand=[*lines, look])

    def _files_now(self) -> UnitFileSet | None:
        try:
            return self.look_files()
        except CannotTell:
            return None

    def _obstacles(self) -> tuple[Obstacle, ...]:
        probe = Obstacles((*(f["path"] for f in self.settings["files"]), f"{self.guard.folder}/state"), self.container)
        return tell(self.hands.look(probe), probe).value or ()

    def _lease_of_another(self) -> list[str]:
        held = tell(self.hands.look(LeaseHeld()), LeaseHeld()).value
        if held is None or held.run == self.hands.run_id:
            return []
        return [f"run {held.run} of {held.holder} has the machine's lease, so it may be at work on this too"]

    def _strange_files(self, now: UnitFileSet | None) -> list[str]:
        """Each file that is not as it was before: what is there instead."""
        if now is None:
            return ["the unit's files cannot be seen"]
        found = []
        for one in self.settings["files"]:
            file, old, new = now.get(one["path"]), one["old_sha256"], one["new_sha256"]
            is_now = file.sha256 if file is not None else None
            if is_now == old:
                continue
            if is_now is None:
                found.append(f"{one['path']} is gone")
            elif is_now == new:
                found.append(f"{one['path']} is as this change made it")
            else:
                found.append(f"{one['path']} was written by somebody else (sha256 {is_now[:12]}…)")
        return [*found, *(f"{path} was changed by somebody else meanwhile" for path in self._by_others(now))]

    def _last_words(self) -> list[str]:
        """What the guard on the machine wrote down of its own failing."""
        if self.last is None or self.last.state not in ("firing", "failed"):
            return []
        return [f"the guard {self.guard.timer} says: {line.partition(' ')[2]}" for line in self.last.log[-2:]]

    def _saving(self, now: UnitFileSet | None) -> list[str]:
        """Keep what somebody else wrote. systemd reads no file of that name."""
        if now is None:
            theirs = _others(self.last) if self.last is not None else []
        else:
            ours = {f["path"]: (f["old_sha256"], f["new_sha256"]) for f in self.settings["files"]}
            theirs = [path for path, known in ours.items() if (file := now.get(path)) is not None and file.sha256 not in known]
        return [shlex.join(self._inside("cp", "-p", "--", path, f"{path}.theirs")) for path in theirs]

    def _restoring(self, now: UnitFileSet | None) -> list[str]:
        files = [GuardedFile(f["path"], "other", f["old_sha256"], f["new_sha256"]) for f in self.settings["files"]]
        done = {
            f.path for f in files if now is not None and (there.sha256 if (there := now.get(f.path)) else None) == f.old_sha256
        }
        if self.last is not None and self._undoes(self.last):
            turned = [GuardedFile(f.path, f.content, f.new_sha256, f.old_sha256) for f in files]
            return list(self.guard.by_hand(turned, done=done, forwards=True))
        if self.last is None or self.last.state != "none":
            return list(self.guard.by_hand(files, done=done))
        # A change that was kept, or taken back and cleared away, has left no old bytes on the machine, and no guard.
        lines = []
        for one in files:
            if one.path in done:
                continue
            if one.old_sha256 is None:
                lines.append(shlex.join(self._inside("rm", "-f", "--", one.path)))
            else:
                lines.append(f"# {one.path}: put back the lines that the plan's diff took out (its sha256 was {one.old_sha256})")
        more = [("daemon-reload",), ("reset-failed", self.unit), ("restart", self.unit)]
        return [*lines, *(shlex.join(systemctl(self.container, *words).argv) for words in more)]

    def _inside(self, *words: str) -> tuple[str, ...]:
        return (*(self.container.enter() if self.container else ()), *words)

    def _in_the_way(self) -> list[str]:
        """Who holds the GPUs or the port and is not the unit's main process: a start fails for them whatever the files say.

        They are named, never ended: whether that may be done only a person knows.
        """
        port, unit = PortOwner(port_of(self.service.url), self.container), UnitState(self.unit, self.container)
        table = Processes(self.unit, self.container)
        seen = self.hands.look(port, unit, table, GpuProcesses())
        found: list[str] = []
        main = tell(seen, unit).value
        pid = main.main_pid if main is not None else 0
        for listener in tell(seen, port).value or ():
            found += [f"port {listener.port} belongs to {name} (pid {n})" for n, name in listener.owners if n != pid]
        processes = tell(seen, table).value
        own = [p for p in processes.processes if p.pid != pid and not (pid and p.parent == pid)] if processes is not None else []
        found += [f"{p.title} (pid {p.pid}) is left in the unit's control group" for p in own]
        for process in tell(seen, GpuProcesses()).value or ():
            # while the unit waits to be started again, its own old processes are as much in the way as anybody's
            if not process.of_unit(self.unit, self.container) or not pid:
                found.append(f"{process.process} (pid {process.pid} on the host) holds GPU {process.pci}")
        return found

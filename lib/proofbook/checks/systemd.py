"""Services: enabled, started by the boot and not by a hand, stable, and running what was configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.arguments import Changed, Held, changes, environment_changes, hold_arguments, hold_environment, is_title
from proofbook.checks.looking import counted, join, short_id, tell, there, unseen
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.systemd import FailedUnits, ProcessFacts, Services, UnitFacts, UnitProcess, UnitState

__all__ = [
    "Configuration",
    "NoFailedUnits",
    "ServiceEnabled",
    "ServiceRunsAsConfigured",
    "ServiceStable",
    "ServiceStartedByBoot",
    "ServicesAsBefore",
]

#: From this many automatic restarts on it is a loop, whatever state a single look happens to meet.
CRASH_LOOP = 3
#: What the boot starts is under way when the last target of the boot is reached; a little later is still the same moment.
_BOOT_SLACK_S = 2.0
_BOOT_TARGET = "multi-user.target"


def _exists(check: Check, unit: UnitFacts, subject: str) -> Finding | None:
    """The finding for a unit that is not there, is masked, or cannot be loaded; None when it can be judged."""
    if unit.load == "loaded":
        return None
    what = {
        "not-found": "There is no such unit: is the name right, and the package or file installed?",
        "masked": "It is masked, so nothing can start it: `systemctl unmask`.",
    }
    return check.failed(
        f"the unit is {unit.load}",
        subject=subject,
        expected="loaded",
        observed=unit.load,
        action=Suggested.FIX_CONFIG,
        what_to_do=what.get(unit.load, "systemd cannot read its file: `systemctl status` and `systemd-analyze verify` say why."),
    )


@dataclass(frozen=True)
class ServiceEnabled(Check):
    """The unit is set to start at boot (or not, where the inventory says so)."""

    service: ServiceSpec
    container: ContainerSpec | None = None
    name: ClassVar[str] = "systemd.ServiceEnabled"
    title: ClassVar[str] = "Would the next boot start this service?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (UnitState(self.service.name, self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        missing = _exists(self, unit, self.service.spec)
        if missing:
            return [missing]
        state = unit.enabled
        compared: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": "enabled" if self.service.enabled else "not enabled",
            "observed": state or "no unit file",
        }
        if not self.service.enabled:
            if state in ("enabled", "enabled-runtime"):
                what = "Disable it, or say enabled = true in the inventory."
                reason = "it is enabled, and is not meant to start at boot"
                return [self.warned(reason, action=Suggested.FIX_CONFIG, what_to_do=what, **compared)]
            return [self.passed(f"{compared['observed']}, as meant", **compared)]
        if state == "enabled":
            return [self.passed("enabled", **compared)]
        if state in ("static", "indirect", "generated", "alias"):
            return [
                self.warned(
                    f"{state}: it cannot be enabled by itself, so something else must start it at boot",
                    action=Suggested.LOOK,
                    what_to_do="See who wants it (`systemctl list-dependencies --reverse`); an [Install] section "
                    "would make it plain.",
                    **compared,
                )
            ]
        reasons = {
            "enabled-runtime": "enabled in /run only: the next boot forgets it",
            "": "it has no unit file (transient): the next boot does not know it",
        }
        return [
            self.failed(
                reasons.get(state, f"{state}: the next boot will not start it"),
                action=Suggested.FIX_CONFIG,
                what_to_do=f"`systemctl enable {self.service.name}`"
                + (f" in {self.service.container}." if self.service.container else "."),
                **compared,
            )
        ]


@dataclass(frozen=True)
class ServiceStartedByBoot(Check):
    """The running instance was started by the boot of its machine or container, not by somebody afterwards.

    WHY: after a reboot somebody helpful starts the service, and every other check passes; the next night's reboot has no
    helper. What the boot starts began before the boot's last target was reached; all times are systemd's own, of one clock.

    ``after_reboot``: this look is about a reboot. Without one, a later start is what any restart leaves: a warning only.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    after_reboot: bool = True
    name: ClassVar[str] = "systemd.ServiceStartedByBoot"
    title: ClassVar[str] = "Did the boot start this service, and not a hand?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (UnitState(self.service.name, self.container), UnitState(_BOOT_TARGET, self.container))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        subject = self.service.spec
        missing = _exists(self, unit, subject)
        if missing:
            return [missing]
        if not self.service.enabled:
            return [self.not_checked("it is not meant to start at boot", subject=subject)]
        began = _earliest(unit.inactive_exit_s, unit.main_started_s, unit.active_enter_s)
        if began is None or unit.active in ("inactive", "failed"):
            return [self._not_running(unit, began)]
        target, why = tell(seen, UnitState(_BOOT_TARGET, self.container)).pair
        if target is None or target.load != "loaded":
            reason = why if target is None else f"{_BOOT_TARGET} is {target.load}"
            return [
                self.unknown(
                    f"it began to start {began:.1f} s after the boot; when the boot was done is not known: {reason}",
                    subject=subject,
                )
            ]
        done = target.active_enter_s
        if done is None:
            return [
                self.unknown(
                    f"the boot is not done yet ({_BOOT_TARGET} is {target.active}), so nothing was started after it",
                    subject=subject,
                    action=Suggested.WAIT,
                    what_to_do="See what it waits for: `systemctl list-jobs`.",
                )
            ]
        return [self._compared(unit, began, done)]

    def _compared(self, unit: UnitFacts, began: float, done: float) -> Finding:
        about: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": f"before {done:.1f} s",
            "observed": f"{began:.1f} s",
        }
        times = f"{began:.1f} s after the boot, {_BOOT_TARGET} was reached after {done:.1f} s"
        if began <= done + _BOOT_SLACK_S:
            return self.passed(f"it began to start {times}", **about)
        if unit.n_restarts:
            return self.warned(
                f"it began to start {times}; systemd has restarted it {counted(unit.n_restarts, 'time')}, so who "
                "started it first "
                "can no longer be seen",
                action=Suggested.LOOK,
                what_to_do=f"{_journal(self)} shows its first start in this boot, and why it ended.",
                **about,
            )
        if not self.after_reboot:
            return self.warned(
                f"it began to start {times}: it was started again since; that the boot starts it was not shown",
                action=Suggested.LOOK,
                what_to_do="A restart in between is no fault; the next verified reboot will show whether the boot starts it.",
                **about,
            )
        return self.failed(
            f"it began to start {times}: not the boot started it, but somebody or something {began - done:.0f} s later",
            action=Suggested.FIX_CONFIG,
            what_to_do=f"Why did the boot not start it ({_journal(self)}; enabled, conditions, mounts)? "
            "Mend that, and reboot once more.",
            **about,
        )

    def _not_running(self, unit: UnitFacts, began: float | None) -> Finding:
        state = f"{unit.active} ({unit.sub})"
        if began is None:
            return self.failed(
                f"this boot has not started it: it is {state} and never began to start",
                subject=self.service.spec,
                action=Suggested.FIX_CONFIG,
                what_to_do="Is it enabled, do its conditions hold, does it wait for something (`systemctl list-jobs`)?",
            )
        return self.not_checked(f"it does not run now: it is {state}", subject=self.service.spec)


def _journal(check: ServiceStartedByBoot | ServiceStable) -> str:
    """How to read the journal of a check's service, as a command to copy."""
    return there(check.container, f"journalctl -b -u {check.service.name}")


def _earliest(*times: float | None) -> float | None:
    return min((t for t in times if t is not None), default=None)


@dataclass(frozen=True)
class ServiceStable(Check):
    """It runs, has not been restarted, and is the very same invocation as at the first look.

    WHY: with minutes of loading and Restart=always, every single look at a crash loop says "active"; only the counter and
    the invocation give it away.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    earlier: UnitFacts | None = field(default=None, repr=False)
    name: ClassVar[str] = "systemd.ServiceStable"
    title: ClassVar[str] = "Does this service run, and keep running?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (UnitState(self.service.name, self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        missing = _exists(self, unit, self.service.spec)
        if missing:
            return [missing]
        about: dict[str, Any] = {
            "subject": self.service.spec,
            "expected": "active, 0 restarts",
            "observed": f"{unit.active} ({unit.sub}), {'?' if unit.n_restarts is None else unit.n_restarts} restarts",
        }
        return [self._not_active(unit, about) or self._restarted(unit, about) or self._steady(unit, about)]

    def _not_active(self, unit: UnitFacts, about: dict[str, Any]) -> Finding | None:
        ended = f"; its last process {unit.exit_code} with {unit.exit_status}" if unit.exit_code else ""
        if unit.active == "activating" and unit.sub.startswith("auto-restart"):
            return self._failed(
                f"it is in a crash loop: {unit.n_restarts} restarts, waiting for the next one ({unit.result}{ended})", about
            )
        if unit.active == "activating" and (unit.n_restarts or 0) >= CRASH_LOOP:
            return self._failed(f"it is in a crash loop: {unit.n_restarts} restarts, and it starts again ({unit.sub})", about)
        if unit.active in ("activating", "reloading"):
            return self.failed(
                f"it is still {unit.active} ({unit.sub})",
                action=Suggested.WAIT,
                what_to_do="Its journal says how far it is; if it stays so, it waits for something that does not come.",
                **about,
            )
        if unit.active != "active":
            return self._failed(f"it does not run: {unit.active} ({unit.sub}), result {unit.result}{ended}", about)
        if unit.sub != "running" and not (unit.type == "oneshot" and unit.sub == "exited"):
            return self._failed(f"it is active, but {unit.sub}: no process serves{ended}", about)
        if unit.result not in ("success", ""):
            return self._failed(f"it is active, but its result is {unit.result}{ended}", about)
        return None

    def _failed(self, reason: str, about: dict[str, Any]) -> Finding:
        what = f"Read {_journal(self)}: the first error of the first attempt is the cause, later ones follow from it."
        return self.failed(reason, action=Suggested.LOOK, what_to_do=what, **about)

    def _restarted(self, unit: UnitFacts, about: dict[str, Any]) -> Finding | None:
        before = self.earlier
        if (
            before is not None
            and before.n_restarts is not None
            and unit.n_restarts is not None
            and unit.n_restarts > before.n_restarts
        ):
            reason = f"it restarted between the looks: {before.n_restarts} restarts then, {unit.n_restarts} now"
            return self._failed(reason, about)
        if before is not None and before.invocation_id and unit.invocation_id and before.invocation_id != unit.invocation_id:
            return self._failed(
                f"it is not the same run as at the first look (invocation {short_id(before.invocation_id)}… then, "
                f"{short_id(unit.invocation_id)}… now): it was started anew",
                about,
            )
        if unit.n_restarts is not None and unit.n_restarts >= CRASH_LOOP:
            return self._failed(
                f"systemd has restarted it {unit.n_restarts} times: a crash loop that happens to be up now", about
            )
        return None

    def _steady(self, unit: UnitFacts, about: dict[str, Any]) -> Finding:
        if unit.n_restarts is None:
            return self.unknown("it is active, but how often it was restarted is not known", **about)
        before = self.earlier
        if before is not None and (not before.invocation_id or not unit.invocation_id):
            return self.unknown(
                "it is active, but whether it is the run of the first look is not known (no invocation id)", **about
            )
        if unit.n_restarts:
            return self.warned(
                f"it runs, after {counted(unit.n_restarts, 'automatic restart')}"
                + (", none since the first look" if before else ""),
                action=Suggested.LOOK,
                what_to_do=f"{_journal(self)} says why the first attempt ended; it may do so again.",
                **about,
            )
        since = f", and the same run as at the first look ({short_id(unit.invocation_id)}…)" if before else ""
        return self.passed(f"active ({unit.sub}), never restarted{since}", **about)


@dataclass(frozen=True)
class Configuration:
    """What a service was kept running with, and which run kept it. Values may be ``[redacted:…]``."""

    run_id: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] | None = None


#: Programs that start another one and then are gone, or stay around it: their command line is not the service's.
_WRAPPERS = {
    "sh", "bash", "dash", "zsh", "env", "numactl", "taskset", "nice", "ionice", "chrt", "setpriv", "sudo", "runuser", "su",
    "timeout", "stdbuf", "flock", "unshare", "nsenter", "conda", "micromamba", "uv", "poetry", "pixi", "torchrun",
}  # fmt: skip


@dataclass(frozen=True)
class ServiceRunsAsConfigured(Check):
    """The running process has the arguments and the environment that were meant.

    It is held against the inventory, the unit as systemd has it now, the configuration that was last kept, and the process
    of before; each by itself. WHY the process: a unit's description and file prove nothing of what runs, a blank after a
    continuation backslash drops the flags that follow, and an edit does not reach a process that was not restarted.

    ``known_flags``: all long options of the program, if known; abbreviations can then be resolved.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    kept: Configuration | None = None
    before: ProcessFacts | None = field(default=None, repr=False)
    known_flags: tuple[str, ...] = ()
    name: ClassVar[str] = "systemd.ServiceRunsAsConfigured"
    title: ClassVar[str] = "Does the running process have the configuration that was meant?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (UnitProcess(self.service.name, self.container), UnitState(self.service.name, self.container))

    def judge(self, seen: Seen) -> Sequence[Finding]:
        process, why = tell(seen, UnitProcess(self.service.name, self.container)).pair
        if process is None:
            return [unseen(self, why, self.service.spec)]
        if is_title(process.argv):
            return [
                self.unknown(
                    f"the process shows a title instead of its command line ({process.argv[0]!r}), so its arguments "
                    "are not known",
                    subject=self.service.spec,
                )
            ]
        unit, no_unit = tell(seen, UnitState(self.service.name, self.container)).pair
        findings = [self._as_meant(process)]
        met = findings[0].verdict.value in ("PASS", "WARN")
        findings.append(self._as_its_unit_says(process, unit, no_unit))
        if self.kept is not None:
            findings.append(self._as_kept(process, self.kept))
        if self.before is not None:
            findings.append(self._as_before(process, self.before, met))
        if all(f.verdict.value == "NOT_CHECKED" for f in findings):
            findings.append(
                self.unknown(
                    "it runs, but there is nothing to hold its configuration against",
                    subject=self.service.spec,
                    observed={"arguments": len(process.argv)},
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Say in the inventory what must be in effect: args and environment of this service.",
                )
            )
        return findings

    def _finding_about(self, against: str, differing: Sequence[Changed], because: str) -> dict[str, Any]:
        return {
            "subject": f"{self.service.spec} against {against}",
            "expected": {c.what: c.before for c in differing},
            "observed": {c.what: c.after for c in differing},
            "action": Suggested.RESTART_SERVICE if against == "its unit" else Suggested.FIX_CONFIG,
            "what_to_do": because,
        }

    def _as_meant(self, process: ProcessFacts) -> Finding:
        against = "the inventory"
        subject = f"{self.service.spec} against {against}"
        wanted_args, wanted_env = self.service.args, self.service.environment
        if not wanted_args and not wanted_env:
            return self.not_checked("the inventory says nothing of its arguments and environment", subject=subject)
        args = hold_arguments(wanted_args, process.argv, self.known_flags)
        env = hold_environment(wanted_env, process.environ) if process.environ is not None else Held(())
        unmet = [*args.unmet, *env.unmet]
        if unmet:
            because = (
                "Look at the unit as systemd has it (`systemctl cat`, drop-ins, continuation lines), mend it, "
                "restart the service."
            )
            return self.failed(f"not as the inventory wants it: {_list(unmet)}", **self._finding_about(against, unmet, because))
        if wanted_env and process.environ is None:
            why = process.environ_unknown or "it may not be read"
            return self.unknown(
                f"the arguments are as meant, the environment is not known: {why}", subject=subject, action=Suggested.GRANT
            )
        if args.assumed:
            return self.warned(
                f"as meant, if {join(args.assumed)}: an abbreviation holds only while no other option begins like it",
                subject=subject,
                action=Suggested.FIX_CONFIG,
                what_to_do="Write the option in full, in the unit and in the inventory.",
            )
        hidden = [*args.hidden, *env.hidden]
        secret = f" ({join(hidden)} by name only: the value was redacted)" if hidden else ""
        count = counted(len([a for a in wanted_args if a.startswith("-")]) or len(wanted_args), "argument")
        return self.passed(f"{count} and {counted(len(wanted_env), 'variable')} are in effect{secret}", subject=subject)

    def _as_its_unit_says(self, process: ProcessFacts, unit: UnitFacts | None, why: str) -> Finding:
        against = "its unit"
        subject = f"{self.service.spec} against {against}"
        if unit is None:
            return self.unknown(f"what its unit says is not known: {why}", subject=subject)
        if unit.need_daemon_reload:
            return self.warned(
                "its file was changed and systemd has not read it yet: the next start will be with the old text, the "
                "next boot with the new",
                subject=subject,
                action=Suggested.FIX_CONFIG,
                what_to_do="`systemctl daemon-reload`, then look at `systemctl cat` before the service is restarted.",
            )
        if len(unit.exec_start) != 1:
            return self.not_checked(f"its unit has {len(unit.exec_start)} ExecStart lines", subject=subject)
        said, runs = unit.exec_start[0].tokens, tuple(" ".join(process.argv).split())
        odd = hold_environment(unit.environment, process.environ).unmet if process.environ is not None else ()
        if not _consistent(said, runs):
            if any("$" in word for word in said):
                return self.not_checked("its ExecStart has variables that systemd fills in at the start", subject=subject)
            program = said[0].rpartition("/")[2] if said else ""
            if program in _WRAPPERS:
                return self.not_checked(
                    f"its ExecStart is a wrapper ({program}), so the process has another command line", subject=subject
                )
            differing = changes(said, process.argv) or [Changed("command line", "in another order", "as it runs")]
            because = "The unit was edited after this process had started: restart the service, or put the unit back."
            return self.failed(
                f"it runs otherwise than its unit says: {_list(differing)}", **self._finding_about(against, differing, because)
            )
        if odd:
            because = "An EnvironmentFile= may set them anew, on purpose; else the unit was edited after the start."
            about = {**self._finding_about(against, odd, because), "action": Suggested.LOOK}
            return self.warned(f"the arguments are the unit's, the environment is not: {_list(odd)}", **about)
        return self.passed(f"the command line of its unit, {counted(len(process.argv), 'word')}", subject=subject)

    def _as_kept(self, process: ProcessFacts, kept: Configuration) -> Finding:
        against = f"what run {kept.run_id} kept"
        differing = changes(kept.argv, process.argv)
        if kept.environment is not None and process.environ is not None:
            differing += environment_changes(kept.environment, process.environ)
        if differing:
            because = "Was it changed on purpose since? Then keep it by a run of its own; else put the kept configuration back."
            return self.failed(
                f"it runs otherwise than {against}: {_list(differing)}", **self._finding_about(against, differing, because)
            )
        subject = f"{self.service.spec} against {against}"
        if process.environ is None:
            return self.unknown(
                f"the arguments are the kept ones, the environment is not known: {process.environ_unknown}", subject=subject
            )
        return self.passed(
            f"the arguments {'and the environment ' if kept.environment is not None else ''}are those that were kept",
            subject=subject,
        )

    def _as_before(self, process: ProcessFacts, before: ProcessFacts, met: bool) -> Finding:
        against = "the look before"
        subject = f"{self.service.spec} against {against}"
        if is_title(before.argv):
            return self.not_checked("the process of before showed a title instead of its command line", subject=subject)
        differing = changes(before.argv, process.argv)
        if before.environ is not None and process.environ is not None:
            differing += environment_changes(before.environ, process.environ)
        if not differing:
            if before.environ is None or process.environ is None:
                why = process.environ_unknown or before.environ_unknown
                return self.unknown(f"the arguments are those of before, the environment is not known: {why}", subject=subject)
            return self.passed("the arguments and the environment of before", subject=subject)
        because = (
            "An edit of the unit has waited for this start, or something set at run time was lost: decide which "
            "of the two is meant."
        )
        about = self._finding_about(against, differing, because)
        if met:
            return self.warned(
                f"changed since before, within what the inventory wants: {_list(differing)}",
                **{**about, "action": Suggested.LOOK},
            )
        return self.failed(f"it runs otherwise than before: {_list(differing)}", **about)


def _list(differing: Sequence[Changed]) -> str:
    return "; ".join(map(str, differing[:5])) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")


def _consistent(said: Sequence[str], runs: Sequence[str]) -> bool:
    """Whether a process may well be what ExecStart= started: the same words, behind an interpreter, or without the wrapper.

    WHY: a script's ``#!`` line puts its interpreter in front; ``env``, ``numactl`` and their like exec what follows them.
    """
    if not said or not runs:
        return False
    if tuple(runs[-len(said) :]) == tuple(said):
        return True
    wrapped = said[0].rpartition("/")[2] in _WRAPPERS and len(runs) < len(said)
    return wrapped and tuple(said[-len(runs) :]) == tuple(runs)


#: Units that somebody's session or `systemd-run` makes and that no boot brings back.
_PASSING = ("run-", "session-")


@dataclass(frozen=True)
class NoFailedUnits(Check):
    """No unit failed that had not failed before. ``before`` are the failed units of then; None when nobody looked."""

    container: ContainerSpec | None = None
    before: tuple[str, ...] | None = None
    name: ClassVar[str] = "systemd.NoFailedUnits"
    title: ClassVar[str] = "Did any unit fail?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (FailedUnits(self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        where = self.container.name if self.container else "the host"
        rows, why = tell(seen, FailedUnits(self.container)).pair
        if rows is None:
            return [unseen(self, why, where)]
        failed = {row.unit: row for row in rows}
        known = set(self.before or ())
        findings = []
        for unit in sorted(failed):
            about: dict[str, Any] = {
                "subject": unit if self.container is None else f"{where}/{unit}",
                "observed": failed[unit].sub,
                "action": Suggested.LOOK,
                "what_to_do": f"{there(self.container, 'systemctl status ' + unit)} and its journal say why.",
            }
            if self.before is None:
                findings.append(self.warned("failed; whether it had failed before is not known", **about))
            elif unit in known:
                findings.append(self.warned("failed, as it had before", **about))
            elif unit.startswith(_PASSING):
                findings.append(self.warned("failed; it is of a session or a single command, and passes with it", **about))
            else:
                findings.append(self.failed("failed, and had not before", **about))
        if not findings:
            healed = sorted(known)
            since = f"; {join(healed)} had failed before" if healed else ""
            findings.append(self.passed(f"no failed unit{since}", subject=where))
        return findings


@dataclass(frozen=True)
class ServicesAsBefore(Check):
    """Every service runs that was meant to go on running and did so before. WHY: what nobody declared is missed by nobody.

    ``before``: their names; None when nobody looked. ``declared``: those that checks of their own judge. A failed one is
    told by :class:`NoFailedUnits`.
    """

    container: ContainerSpec | None = None
    before: tuple[str, ...] | None = None
    declared: tuple[str, ...] = ()
    name: ClassVar[str] = "systemd.ServicesAsBefore"
    title: ClassVar[str] = "Does every service run that ran before?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Services(self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        where = self.container.name if self.container else "the host"
        services, why = tell(seen, Services(self.container)).pair
        if services is None:
            return [unseen(self, why, where)]
        if self.before is None:
            return [self.not_checked("which services ran before is not known", subject=where)]
        gone = []
        for unit in self.before:
            now = services.get(unit)
            if unit in self.declared or (now is not None and now.active in ("active", "failed")):
                continue
            gone.append(
                self.warned(
                    f"it ran before, and is {f'{now.active} ({now.sub})' if now else 'inactive'} now",
                    subject=unit if self.container is None else f"{where}/{unit}",
                    expected="active",
                    observed=now.active if now else "inactive",
                    action=Suggested.LOOK,
                    what_to_do=f"{there(self.container, 'systemctl status ' + unit)}: is it enabled, or had a hand started it? "
                    "Declare it in the inventory if it must run.",
                )
            )
        if gone:
            return gone
        if not self.before:
            return [self.not_checked("no service ran before that was meant to go on", subject=where)]
        return [self.passed(f"all {counted(len(self.before), 'service')} that ran before", subject=where)]

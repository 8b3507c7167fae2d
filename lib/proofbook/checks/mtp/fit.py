"""Is a server fit to be given speculation? Everything that can be known before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.arguments import changes, is_title
from proofbook.checks.looking import counted, join, tell, there, unseen
from proofbook.checks.mtp.budget import GIB, OVERHEAD_GIB, Budget, Wish, budget, shape_of
from proofbook.checks.mtp.speculation import Speculation
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.journal import JournalEntry, UnitJournal
from proofbook.probes.memory import GpuMemory, GpuProcesses
from proofbook.probes.sglang import CheckpointFacts, LauncherHelp, ServedCheckpoint, Version, VersionFacts, release
from proofbook.probes.sglang_flags import FlagSet, check_argv, flags_of, resolve_argv, server_words, with_flags
from proofbook.probes.systemd import ProcessFacts, UnitProcess, UnitState
from proofbook.probes.unit_files import UnitFiles, UnitFileSet, UnitSettings

__all__ = ["KEY", "FitToChange"]

#: Fakes acceptance: with it set, no number about drafts is true.
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
#: How somebody gives a server's key.
KEY = (
    "Put the key into a variable of the program that runs proofbook, or into a file there with mode 600, and name that, never "
    "the key: api_key_env=NAME or api_key_file=PATH, as a parameter or beside the service in proofbook.toml."
)


@dataclass(frozen=True)
class FitToChange(Check):
    """The unit is what runs, the release knows every flag, the checkpoint brings the weights, the memory suffices.

    ``need_running``: how many requests must run at once with speculation (0: no opinion). What only an estimate says warns
    and does not refuse, unless the estimate itself ends in an error.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    speculation: Speculation = field(default_factory=Speculation)
    need_running: int = 0
    name: ClassVar[str] = "mtp.FitToChange"
    title: ClassVar[str] = "Is this server fit to be given speculation?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (
            UnitState(unit, container),
            UnitSettings(unit, container),
            UnitProcess(unit, container),
            UnitFiles(unit, container),
            Version(unit, container),
            LauncherHelp(unit, container),
            ServedCheckpoint(unit, container),
            UnitJournal(unit, container),
            GpuMemory(),
            GpuProcesses(),
        )

    def judge(self, seen: Seen) -> Sequence[Finding]:
        unit, _ = tell(seen, UnitState(self.service.name, self.container)).pair
        if unit is not None and unit.load == "not-found":
            return [self._no_such_unit()]
        findings = [*self._unit(seen), *self._process(seen), *self._key(seen)]
        findings += [*self._flags(seen), *self._weights(seen), *self._memory(seen)]
        return [*findings, *self._others(seen), *self._policy(seen), *self._journal(seen), self._where()]

    @property
    def _about(self) -> dict[str, Any]:
        return {"subject": self.service.spec}

    def _no_such_unit(self) -> Finding:
        where = f"in the container {self.container.name}" if self.container is not None else "on the host itself"
        look = there(self.container, "systemctl list-units --type=service")
        return self.failed(
            f"there is no such unit {where}",
            action=Suggested.FIX_CONFIG,
            what_to_do=f"Name the server's unit, [container/]unit; `{look}` lists those that there are.",
            observed="not-found",
            **self._about,
        )

    # -------------------------------------------------------------------------------------------- its files

    def _unit(self, seen: Seen) -> list[Finding]:
        files, why = tell(seen, UnitFiles(self.service.name, self.container)).pair
        if files is None:
            return [unseen(self, f"the unit's files: {why}", self.service.spec)]
        harm = files.effective.harm
        if harm:
            return [
                self.failed(
                    f"part of the unit's text is not in effect: {join(map(str, harm), 3)}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Mend these lines, reload systemd and restart, before anything else is changed.",
                    **self._about,
                )
            ]
        if files.need_daemon_reload:
            return [
                self.failed(
                    "its files were changed and systemd has not read them (NeedDaemonReload=yes)",
                    action=Suggested.FIX_CONFIG,
                    what_to_do=f"Look at what was changed ({there(self.container, f'systemctl cat {self.service.name}')}); "
                    "reload and restart, or take it back.",
                    **self._about,
                )
            ]
        owners = [f"{f.path} ({f.owner}, {f.mode:o}{f', a link to {f.target}' if f.target else ''})" for f in files.files]
        found = [self.passed(f"it is made of {counted(len(owners), 'file')}: {join(owners)}", **self._about)]
        managed = [f"{f.path}: {f.managed_by}" for f in files.files if f.managed_by]
        if managed:
            found.append(
                self.warned(
                    f"a tool writes its files and may overwrite what is changed by hand: {join(managed, 3)}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Make the change in that tool too, once it is shown to be worth it.",
                    **self._about,
                )
            )
        return found

    # ------------------------------------------------------------------------------------------- what runs

    def _process(self, seen: Seen) -> list[Finding]:
        process, why = tell(seen, UnitProcess(self.service.name, self.container)).pair
        unit, _ = tell(seen, UnitState(self.service.name, self.container)).pair
        if process is None:
            return [
                self.failed(
                    f"it does not run, so there is nothing to compare with: {why}",
                    action=Suggested.RESTART_SERVICE,
                    what_to_do="Bring it up as it is, and see that it serves, before anything is changed.",
                    **self._about,
                )
            ]
        found = [self._argv(seen, process)]
        algorithm = _value(process.argv, "--speculative-algorithm")
        if (
            unit is not None
            and not algorithm
            and re.search(r"\b(mtp|nextn|speculative|eagle)\b", unit.description, re.IGNORECASE)
        ):
            found.append(
                self.warned(
                    f'its description says "{unit.description}", and its process has no --speculative-algorithm: a description '
                    "is no evidence",
                    **self._about,
                )
            )
        return [*found, *self._simulated(seen, process)]

    def _argv(self, seen: Seen, process: ProcessFacts) -> Finding:
        if is_title(process.argv):
            return self.unknown("the process has overwritten its command line with a title", **self._about)
        try:
            said = _unit_argv(seen.value(UnitFiles(self.service.name, self.container)))
        except CannotTell as why:
            return self.unknown(f"whether what runs is what the unit says is not known: {why}", **self._about)
        different = changes(said, process.argv)
        if different:
            return self.failed(
                f"what runs is not what the unit says: {join(map(str, different), 4)}",
                action=Suggested.RESTART_SERVICE,
                what_to_do="Restart it as it is and see that it serves: else a restart changes more than the plan says.",
                **self._about,
            )
        return self.passed(
            f"its process {process.pid} runs the unit's command, word by word ({counted(len(process.argv), 'word')})",
            **self._about,
        )

    def _simulated(self, seen: Seen, process: ProcessFacts) -> list[Finding]:
        set_in = []
        if process.environ is not None and SIMULATE in process.environ:
            set_in.append("its process")
        files, _ = tell(seen, UnitFiles(self.service.name, self.container)).pair
        if files is not None and (
            SIMULATE in files.effective.environment or any(SIMULATE in (t or "") for t in files.environment.values())
        ):
            set_in.append("its unit")
        if set_in:
            return [
                self.failed(
                    f"{SIMULATE} is set in {' and '.join(set_in)}: acceptance is made up, nothing about drafts can be measured",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Take the variable out of the unit and its environment files, and restart.",
                    **self._about,
                )
            ]
        if process.environ is None:
            return [self.unknown(f"whether {SIMULATE} is set is not known: {process.environ_unknown}", **self._about)]
        return [self.passed(f"{SIMULATE} is not set", **self._about)]

    # ---------------------------------------------------------------------------------------------- its key

    def _key(self, seen: Seen) -> list[Finding]:
        process, _ = tell(seen, UnitProcess(self.service.name, self.container)).pair
        version, _ = tell(seen, Version(self.service.name, self.container)).pair
        if process is None or is_title(process.argv):
            return []
        known = flags_of(version.version) if version is not None else None
        found = []
        if _value(process.argv, "--api-key", known):
            found.append(
                self.passed("its command demands an API key (--api-key), and one is named here", **self._about)
                if self.service.has_key
                else self.failed(
                    "its command demands an API key (--api-key) and none is given, so no request of ours would be answered",
                    action=Suggested.FIX_CONFIG,
                    what_to_do=KEY,
                    **self._about,
                )
            )
        if _value(process.argv, "--admin-api-key", known):
            found.append(
                self.warned(
                    "it has an admin key (--admin-api-key), without which it lets nobody empty its prefix cache: prompts that "
                    "were asked before may be answered from it",
                    action=Suggested.LOOK,
                    what_to_do="Times of both arms are taken alike; take them with care.",
                    **self._about,
                )
            )
        return found

    # -------------------------------------------------------------------------------------------- its flags

    def _flags(self, seen: Seen) -> list[Finding]:
        version, why = tell(seen, Version(self.service.name, self.container)).pair
        process, no_process = tell(seen, UnitProcess(self.service.name, self.container)).pair
        if version is None or process is None:
            return [unseen(self, f"which flags the installed SGLang knows: {why or no_process}", self.service.spec)]
        text, no_help = tell(seen, LauncherHelp(self.service.name, self.container)).pair
        try:
            known = flags_of(version.version, text)
            wanted = with_flags(process.argv, self.speculation.flags(known), known)
            problems = check_argv(wanted, version.version, text)
        except CannotTell as error:
            return [unseen(self, str(error), self.service.spec)]
        fatal = [p for p in problems if p.fatal]
        found = [
            self.failed(
                f"SGLang {version.version} would refuse to start: {problem}",
                subject=f"{self.service.spec} {problem.flag}",
                expected=list(problem.nearest) or None,
                observed=problem.flag,
                action=Suggested.FIX_CONFIG,
                what_to_do=f"Use {' or '.join(problem.nearest[:3])}." if problem.nearest else "Leave it out.",
            )
            for problem in fatal
        ]
        notes = [str(p) for p in problems if not p.fatal and p.kind in ("deprecated", "repeated")]
        if notes:
            found.append(self.warned(f"flags to look at: {join(notes, 4)}", action=Suggested.FIX_CONFIG, **self._about))
        if not fatal:
            sure = "" if text else f" (its own --help could not be had: {no_help})"
            sentence = f"SGLang {version.version} knows every flag of the wanted command, by {known.by}{sure}"
            found.append(self.passed(sentence, **self._about) if known.exact else self.warned(sentence, **self._about))
        return [*found, *self._rules(version, wanted, known)]

    def _rules(self, version: VersionFacts, argv: Sequence[str], known: FlagSet) -> list[Finding]:
        """What a release refuses, or gives up in silence, although its parser takes every flag."""
        now = version.release[:3]
        strategy = _value(argv, "--mamba-radix-cache-strategy") or _value(argv, "--mamba-scheduler-strategy") or "auto"
        radix = "--disable-radix-cache" not in argv
        buffered = strategy.startswith("extra_buffer") or (strategy == "auto" and now >= (0, 5, 14))
        fatal, soft = [], []
        if radix and not buffered and (0, 5, 10) <= now < (0, 5, 14):
            fatal.append(
                f"{version.version} refuses speculation with the radix cache and the strategy {strategy} on hybrid models"
            )
        if radix and not buffered and now == (0, 5, 9):
            soft.append("0.5.9 disables the radix cache in silence with speculation and the strategy no_buffer on hybrid models")
        if not radix and strategy.startswith("extra_buffer") and now >= (0, 5, 10):
            fatal.append(f"{version.version} refuses extra_buffer together with --disable-radix-cache")
        if strategy == "extra_buffer_lazy" and (0, 5, 13) <= now < (0, 5, 18):
            fatal.append(f"{version.version} refuses extra_buffer_lazy with speculation")
        if self.speculation.eagle_topk > 1 and (0, 5, 7) <= now <= (0, 5, 10):
            fatal.append(f"{version.version} takes only topk 1 with SGLANG_ENABLE_SPEC_V2")
        if self.speculation.eagle_topk == 1 and self.speculation.draft_tokens != self.speculation.num_steps + 1:
            soft.append(
                f"with topk 1 the server makes {self.speculation.num_steps + 1} of the "
                f"{self.speculation.draft_tokens} draft tokens"
            )
        if (0, 5, 12) <= now <= (0, 5, 14) and strategy.startswith("extra_buffer"):
            soft.append("0.5.12 to 0.5.14 have known crashes of Qwen3.5 with NEXTN and extra_buffer (mamba track indices)")
        what = "Choose the strategy and the release so that they go together; see the runbook's notes."
        return [
            *(self.failed(f"{text}", action=Suggested.FIX_CONFIG, what_to_do=what, **self._about) for text in fatal),
            *(self.warned(f"{text}", action=Suggested.LOOK, what_to_do=what, **self._about) for text in soft),
        ]

    # ------------------------------------------------------------------------------------------- its weights

    def _weights(self, seen: Seen) -> list[Finding]:
        checkpoint, why = tell(seen, ServedCheckpoint(self.service.name, self.container)).pair
        if checkpoint is None:
            return [unseen(self, f"whether the checkpoint has weights for drafts: {why}", self.service.spec)]
        about: dict[str, Any] = {"subject": checkpoint.path}
        found = []
        if checkpoint.missing:
            found.append(
                self.failed(
                    f"{counted(len(checkpoint.missing), 'weight file')} of its index are not "
                    f"there: {join(checkpoint.missing, 3)}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Copy the checkpoint anew and hold its sizes against the source.",
                    **about,
                )
            )
        if self.speculation.draft_model_path not in ("", checkpoint.path):
            found.append(
                self.not_checked(f"the drafts come from {self.speculation.draft_model_path}, which was not looked into", **about)
            )
        elif not checkpoint.index:
            found.append(self.unknown("it has no index, so whether it holds mtp.* tensors is not known", **about))
        elif checkpoint.mtp:
            found.append(
                self.passed(
                    f"it has {counted(len(checkpoint.mtp), 'tensor')} for drafts among {checkpoint.tensors} "
                    f"(the first is {checkpoint.mtp[0]}), {checkpoint.size / GIB:.1f} GiB in "
                    f"{counted(len(checkpoint.shards), 'file')}",
                    **about,
                )
            )
        else:
            promise = f" although its config promises {counted(checkpoint.mtp_layers, 'layer')}" if checkpoint.mtp_layers else ""
            found.append(
                self.failed(
                    f"none of its {checkpoint.tensors} tensors is for drafts (mtp.*){promise}: the "
                    "server would start, and accept nothing",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Use a checkpoint that keeps the MTP layers (a conversion or quantisation has dropped them).",
                    **about,
                )
            )
        return found

    # ------------------------------------------------------------------------------------------- its memory

    def _memory(self, seen: Seen) -> list[Finding]:
        try:
            wanted, now, source = self._budgets(seen)
        except CannotTell as why:
            return [
                self.warned(
                    f"what fits in memory could not be estimated: {why}",
                    action=Suggested.LOOK,
                    what_to_do="Read the sizes of the last start from its log; the start itself will show whether it fits.",
                    **self._about,
                )
            ]
        about: dict[str, Any] = {
            **self._about,
            "expected": {"running": self.need_running or None},
            "observed": {
                "running": wanted.running,
                "tokens": wanted.tokens,
                "left_gib": round(wanted.left, 1),
                "now": {"running": now.running, "tokens": now.tokens} if now and now.fits else None,
            },
        }
        numbers = (
            f"{wanted.free:.1f} GiB free, weights {wanted.weights:.1f}, draft "
            f"{wanted.draft:.2f}, pools {wanted.rest:.1f} of which "
            f"{wanted.intermediate:.1f} are reserved for states of drafts (GiB a rank, {source})"
        )
        if not wanted.fits:
            return [
                self.failed(
                    f"it cannot fit: {wanted.why} ({numbers})",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Change --mem-fraction-static, or set --max-running-requests to what is needed.",
                    **about,
                )
            ]
        sentence = (
            f"about {wanted.running} requests would run at once and {wanted.tokens // 1000} k tokens fit"
            + (f" (as it is now {now.running} and {now.tokens // 1000} k)" if now and now.fits else "")
            + f"; {numbers}; an estimate, a GiB either way is possible"
        )
        if self.need_running and wanted.running < self.need_running:
            return [
                self.warned(
                    f"fewer requests at once than the {self.need_running} that are needed: {sentence}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do=f"Set --max-running-requests {self.need_running} (without it, states for 48 are reserved first), "
                    "or raise the fraction.",
                    **about,
                )
            ]
        if wanted.tight:
            return [
                self.warned(
                    f"only {wanted.left:.1f} GiB would be left after the start: {sentence}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Lower --mem-fraction-static: the draft, its cache and the graphs live outside of it.",
                    **about,
                )
            ]
        return [self.passed(sentence, **about)]

    def _budgets(self, seen: Seen) -> tuple[Budget, Budget | None, str]:
        """With the wanted speculation, and as it is now; and what the sizes come from. Raises CannotTell."""
        version = seen.value(Version(self.service.name, self.container))
        checkpoint = seen.value(ServedCheckpoint(self.service.name, self.container))
        process = seen.value(UnitProcess(self.service.name, self.container))
        known = flags_of(version.version)
        argv = with_flags(process.argv, self.speculation.flags(known), known)
        tp = int(_value(argv, "--tp-size", known) or "1")
        state_bytes = 2 if _value(argv, "--mamba-ssm-dtype") == "bfloat16" else 4
        shape = shape_of(checkpoint.text_config, tp, state_bytes=state_bytes)
        free, weights, source = self._sizes(seen, checkpoint, tp)
        context = int(_value(argv, "--context-length", known) or checkpoint.text_config.get("max_position_embeddings") or 0)
        speculative = _wish(argv, version.version, self.speculation.effective_draft_tokens, known, context)
        wanted = budget(shape, speculative, free=free, weights=weights)
        try:
            drafts = int(_value(process.argv, "--speculative-num-draft-tokens", known) or 0)
            now = budget(shape, _wish(process.argv, version.version, drafts, known, context), free=free, weights=weights)
        except CannotTell:
            now = None
        return wanted, now, source

    def _sizes(self, seen: Seen, checkpoint: CheckpointFacts, tp: int) -> tuple[float, float, str]:
        """Free GiB before loading and GiB of weights a rank: from the log of this start, else computed."""
        log = tell(seen, UnitJournal(self.service.name, self.container)).value
        measured = _measured(log.entries) if log is not None else None
        if measured is not None:
            return (*measured, "from the log of the present start")
        rows = seen.value(GpuMemory())
        free = min(row.total_gib for row in rows) - 1.0
        return free, checkpoint.size / GIB / tp + OVERHEAD_GIB, "computed from the checkpoint's size"

    # --------------------------------------------------------------------------------------------- the rest

    def _others(self, seen: Seen) -> list[Finding]:
        processes, why = tell(seen, GpuProcesses()).pair
        if processes is None:
            return [self.not_checked(f"who else uses the GPUs could not be seen: {why}", **self._about)]
        others = [p for p in processes if not p.of_unit(self.service.name, self.container)]
        if not others:
            return [
                self.passed(
                    f"nobody else computes on its GPUs ({counted(len(processes), 'process', 'processes')}, all its own)",
                    **self._about,
                )
            ]
        names = [f"{p.process} (pid {p.pid} on {p.pci}, {p.used_mib or '?'} MiB)" for p in others]
        return [
            self.warned(
                f"others compute on the GPUs: {join(names, 4)}",
                action=Suggested.LOOK,
                what_to_do=(
                    'Unequal memory ends a start ("memory capacity is unbalanced"), and their load disturbs every measurement.'
                ),
                **self._about,
            )
        ]

    def _policy(self, seen: Seen) -> list[Finding]:
        settings, why = tell(seen, UnitSettings(self.service.name, self.container)).pair
        if settings is None:
            return [unseen(self, f"how it is restarted: {why}", self.service.spec)]
        odd = []
        if settings.restart == "no":
            odd.append("Restart=no: after a crash it stays down")
        if settings.keeps_children:
            odd.append(
                f"KillMode={settings.kill_mode}, "
                f"SendSIGKILL={'yes' if settings.send_sigkill else 'no'}: a stop may leave processes on the GPUs"
            )
        if settings.timeout_stop_s is None:
            odd.append("TimeoutStopSec=infinity: a stop waits for its longest request")
        sentence = f"Restart={settings.restart}, KillMode={settings.kill_mode}"
        if odd:
            return [self.warned(join(odd, 3), action=Suggested.LOOK, what_to_do="Know it before the restart.", **self._about)]
        return [self.passed(f"{sentence}: systemd starts it again after a crash, and its stop ends all of it", **self._about)]

    def _journal(self, seen: Seen) -> list[Finding]:
        log, why = tell(seen, UnitJournal(self.service.name, self.container)).pair
        if log is None:
            return [unseen(self, f"its journal: {why}", self.service.spec)]
        if log.complete:
            return [self.passed(f"its journal holds this invocation whole ({counted(len(log.entries), 'line')})", **self._about)]
        return [
            self.warned(
                f"its journal is not whole, so a start may not be provable by it: {join(log.gaps, 3)}",
                action=Suggested.FIX_CONFIG,
                what_to_do="Let the unit log to the journal, and raise its rate limit (LogRateLimitBurst=0 in the unit).",
                **self._about,
            )
        ]

    def _where(self) -> Finding:
        if self.container is None:
            return self.passed("it runs on the host itself", **self._about)
        return self.passed(
            f"it runs in the {self.container.kind} container {self.container.name}: its unit is changed there, its GPU processes "
            "are looked for on the host",
            **self._about,
        )


def _unit_argv(files: UnitFileSet) -> tuple[str, ...]:
    unit = files.effective
    return unit.command.words_with(unit.environment_with(files.environment))


def _value(argv: Sequence[str], name: str, known: FlagSet | None = None) -> str:
    """The last value of a flag in a command line, "" when it is not there."""
    _, words = server_words(argv)
    if known is not None:
        resolved, _ = resolve_argv(words, known)
        names = {name, "--tensor-parallel-size"} if name == "--tp-size" else {name}
        return next((one.values[-1] for one in reversed(resolved) if one.name in names and one.values), "")
    for n in range(len(words) - 1, -1, -1):
        flag, equals, value = words[n].partition("=")
        if flag == name:
            return value if equals else words[n + 1] if n + 1 < len(words) else ""
    return ""


def _wish(argv: Sequence[str], version: str, draft_tokens: int, known: FlagSet, context: int) -> Wish:
    fraction = _value(argv, "--mem-fraction-static", known)
    if not fraction:
        raise CannotTell("no --mem-fraction-static is given, and what the server chooses by itself depends on the card")
    running = _value(argv, "--max-running-requests", known)
    strategy = _value(argv, "--mamba-radix-cache-strategy", known) or _value(argv, "--mamba-scheduler-strategy", known)
    now = release(version)
    return Wish(
        version=now,
        fraction=float(fraction),
        draft_tokens=draft_tokens,
        running=int(running) if running else None,
        strategy=strategy or ("extra_buffer" if now >= (0, 5, 14) else "no_buffer"),
        radix="--disable-radix-cache" not in argv,
        context=context,
    )


_BEGIN = re.compile(r"Load weight begin\. avail mem=([\d.]+) GB")
_END = re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB")


def _measured(entries: Sequence[JournalEntry]) -> tuple[float, float] | None:
    """GiB free before the first load and GiB of the target's weights, the worst rank of each; None when the log does not say.

    The log says "GB" and means GiB.
    """
    begins = [float(m[1]) for e in entries if (m := _BEGIN.search(e.text))]
    ends = [float(m[1]) for e in entries if (m := _END.search(e.text))]
    if not begins or not ends:
        return None
    # the draft's pair comes later, with less free and a smaller size
    return max(begins), max(ends)

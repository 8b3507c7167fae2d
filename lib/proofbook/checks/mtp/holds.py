"""Does it hold? A window under load: the same process all the time, no new error anywhere, memory to spare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.checks.mtp.accepted import BROKEN, judge_answered, judge_steady
from proofbook.checks.mtp.budget import HEADROOM_GIB
from proofbook.checks.mtp.start import line_of
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested, Verdict
from proofbook.probes.journal import UnitJournal
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.memory import GpuMemory
from proofbook.probes.sglang import Processes
from proofbook.probes.systemd import UnitState
from proofbook.signatures import Judgement, LogContext, LogLine, SignatureFinding, judge

__all__ = ["Holds"]

#: A window that was cut to less than this share of what was asked proves nothing about the rest.
ENOUGH = 0.9
#: Tokens a second at the end, compared with the beginning, below which something wears out.
SLOWER = 1.25


@dataclass(frozen=True)
class Holds(Check):
    """The stability window, and what service and kernel said in it.

    ``measurement`` is of :class:`proofbook.measures.stability.Stability`; errors count from its beginning on.
    """

    service: ServiceSpec
    container: ContainerSpec | None
    measurement: Measurement = field(repr=False)
    headroom_gib: float = HEADROOM_GIB
    name: ClassVar[str] = "mtp.Holds"
    title: ClassVar[str] = "Does it hold under load?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit, container = self.service.name, self.container
        return (UnitState(unit, container), UnitJournal(unit, container), KernelLog(), Processes(unit, container), GpuMemory())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        about = {"subject": self.service.spec, "evidence": self.measurement.evidence}
        value = self.measurement.value
        return [
            *judge_steady(self, value.get("steady", {}), about),
            *self._window(value, about),
            *self._now(seen),
            *self._service_log(seen),
            *self._kernel_log(seen),
            *self._ranks(seen),
            *self._memory(seen),
        ]

    def _window(self, value: Mapping[str, Any], about: Mapping[str, Any]) -> list[Finding]:
        load, asked_s, lasted = value.get("load", {}), float(value.get("minutes", 0)) * 60, float(value.get("lasted_s", 0))
        found = []
        if value.get("ended_early") or lasted < ENOUGH * asked_s:
            why = value.get("ended_early") or "nobody said why"
            found.append(self.unknown(f"the window was cut after {lasted:.0f} s of {asked_s:.0f} s: {why}", **about))
        if not load.get("asked"):
            return [*found, self.unknown("there was no load in the window, so it proves nothing", **about)]
        failed = load.get("requests_failed", ())
        if load.get("completed") != load.get("asked"):
            found += judge_answered(self, list(failed) or [{"ok": False, "prompt": "?", "problem": "not answered"}], about)
        first, last = load.get("s_per_token_first"), load.get("s_per_token_last")
        if first and last and last > SLOWER * first:
            found.append(
                self.warned(
                    f"a token took {last * 1000:.1f} ms at the end and {first * 1000:.1f} ms at the beginning: it wears out",
                    action=Suggested.LOOK,
                    what_to_do="Watch memory, queue and clocks over a longer window.",
                    **about,
                )
            )
        lowest = load.get("accept_length")
        if lowest is not None and lowest < BROKEN:
            found.append(self.warned(f"under load only {lowest:.2f} tokens a step: drafts hardly help there", **about))
        if not found:
            busy = load.get("busy_share")
            found.append(
                self.passed(
                    f"{lasted / 60:.0f} min under load: {load.get('completed')} requests, {load.get('tokens')} tokens"
                    + (f", busy {busy:.0%} of the time" if busy is not None else ""),
                    **about,
                )
            )
        return found

    def _now(self, seen: Seen) -> list[Finding]:
        """After the window it must still be the process of the window."""
        unit, why = tell(seen, UnitState(self.service.name, self.container)).pair
        lives = self.measurement.value.get("steady", {}).get("lives", ())
        if unit is None:
            return [unseen(self, why, self.service.spec)]
        known = [life for life in lives if life.get("known")]
        if not known:
            return []
        last = known[-1]
        if unit.active != "active" or unit.invocation_id != last.get("invocation") or unit.main_pid != last.get("main_pid"):
            return [
                self.failed(
                    f"after the window it is {unit.active} with process {unit.main_pid}; in it, it was {last.get('main_pid')}",
                    subject=self.service.spec,
                    action=Suggested.ROLL_BACK,
                )
            ]
        return []

    def _service_log(self, seen: Seen) -> list[Finding]:
        log, why = tell(seen, UnitJournal(self.service.name, self.container)).pair
        if log is None:
            return [unseen(self, f"its journal: {why}", self.service.spec)]
        lines = [line_of(entry, self.service.name, n) for n, entry in enumerate(log.entries, 1)]
        judgement = judge(lines, context=LogContext(snippet=True))
        found = self._said(judgement, self.service.spec, "its log", since=None)
        if not log.complete:
            found.append(
                self.unknown(
                    f"its journal is not whole, so silence in it proves nothing: {join(log.gaps, 3)}", subject=self.service.spec
                )
            )
        if not found:
            found.append(self.passed(f"no error in the {counted(len(lines), 'line')} of its log", subject=self.service.spec))
        return found

    def _kernel_log(self, seen: Seen) -> list[Finding]:
        log, why = tell(seen, KernelLog()).pair
        if log is None:
            return [unseen(self, f"the kernel log: {why}", "kernel")]
        since = self.measurement.taken_at
        lines = [
            LogLine(line.text, line.monotonic_s, line.time, source="kernel")
            for line in log.lines
            if line.time and line.time >= since
        ]
        undated = sum(line.time is None for line in log.lines)
        found = self._said(judge(lines, context=LogContext(snippet=True)), "kernel", "the kernel log", since=since)
        if undated == len(log.lines) and log.lines:
            found.append(self.unknown("the kernel log has no times, so what is new in it cannot be told", subject="kernel"))
        elif not log.complete:
            found.append(self.unknown(f"the kernel log is not whole: {join(log.gaps, 3)}", subject="kernel"))
        if not found:
            found.append(self.passed(f"no fault in {counted(len(lines), 'new kernel line')}", subject="kernel"))
        return found

    def _said(self, judgement: Judgement, subject: str, where: str, *, since: Any) -> list[Finding]:
        """What a log says that is bad. Gaps are told by the log's own reader."""
        bad: list[SignatureFinding] = [
            f for f in judgement.findings if f.kind != "gap" and f.verdict in (Verdict.FAIL, Verdict.WARN)
        ]
        return [
            Finding(
                self.name,
                f.verdict,
                f"in {where}: {f.reason}",
                subject=f.device or subject,
                action=f.action if f.verdict is Verdict.WARN else Suggested.ROLL_BACK,
                what_to_do=f.what_to_do,
                signature=f.signature,
                count=f.count,
                lines=f.lines[:4],
            )
            for f in bad
        ]

    def _ranks(self, seen: Seen) -> list[Finding]:
        table, why = tell(seen, Processes(self.service.name, self.container)).pair
        if table is None:
            return [unseen(self, why, self.service.spec)]
        dead = [p.title for p in table.processes if p.state == "Z"]
        ranks = sorted({p.rank for p in table.schedulers})
        if dead or not ranks or table.detokenizer is None:
            lost = join(dead) or ("no scheduler lives" if not ranks else "its detokenizer is gone")
            return [
                self.failed(f"after the load a process is lost: {lost}", subject=self.service.spec, action=Suggested.ROLL_BACK)
            ]
        return [self.passed(f"{join(ranks)} and the detokenizer live after the load", subject=self.service.spec)]

    def _memory(self, seen: Seen) -> list[Finding]:
        rows, why = tell(seen, GpuMemory()).pair
        if rows is None:
            return [self.not_checked(f"memory of the GPUs after the load could not be seen: {why}")]
        least = min(rows, key=lambda row: row.free_mib)
        about: dict[str, Any] = {"subject": least.pci, "expected": self.headroom_gib, "observed": round(least.free_gib, 1)}
        if least.free_gib < self.headroom_gib:
            return [
                self.warned(
                    f"only {least.free_gib:.1f} GiB are free on GPU {least.index} after the "
                    f"load, less than {self.headroom_gib:g}",
                    action=Suggested.FIX_CONFIG,
                    what_to_do="Lower --mem-fraction-static a little: a long prompt may need it.",
                    **about,
                )
            ]
        return [self.passed(f"at least {least.free_gib:.1f} GiB are free on every GPU after the load", **about)]

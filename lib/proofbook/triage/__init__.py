"""Judge a log that somebody pasted: what it says, what of that is the cause, and what it cannot show.

>>> said = judge_paste("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")
>>> said.verdict, said.findings[0].signature, said.findings[0].device
(<Verdict.FAIL: 'FAIL'>, 'xid-79', '0000:41:00.0')

The verdict is about what the log holds. What it cannot show (``not_observable``) neither raises nor lowers it; a log that is
visibly damaged, or of a kind that nobody knows, is UNKNOWN.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proofbook.model import RunStatus, Suggested, Verdict, exit_code, worst
from proofbook.signatures import LogContext, Moment, SignatureFinding, load
from proofbook.signatures.sglang import Start, findings_of
from proofbook.signatures.streams import read_stretches
from proofbook.triage.reading import Reading
from proofbook.triage.sources import Source, open_source

__all__ = ["Triage", "judge_paste", "triage"]

#: The opposite cures of the two families of memory errors; both in one log leave no value of the fraction.
_RAISE, _LOWER = {"sglang-raise-mem-fraction", "sglang-mamba-slots"}, {"cuda-out-of-memory", "sglang-graph-capture-failed"}
_BADNESS = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN, Verdict.PASS)


@dataclass(frozen=True)
class Triage:
    """What a paste came to. ``findings`` stand as a reader wants them: causes before consequences, worst first."""

    verdict: Verdict
    findings: tuple[SignatureFinding, ...]
    not_observable: tuple[str, ...]
    unknown_lines: int
    unknown_samples: tuple[str, ...]
    sentence: str  # the verdict in one sentence
    kinds: tuple[str, ...]  # what was recognised, most lines first
    lines: int
    starts: tuple[Start, ...]  # of an inference server
    sources: tuple[tuple[str, int], ...]  # name, its first line
    boots: tuple[str, ...]
    scary: int  # lines that look bad and are known to be harmless

    @property
    def exit_code(self) -> int:
        return exit_code(RunStatus.COMPLETED, self.verdict)

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "verdict": self.verdict.value,
            "findings": [_finding_json(f) for f in self.findings],
            "not_observable": list(self.not_observable),
            "unknown_lines": self.unknown_lines,
        }


def triage(names: Sequence[str | Path], *, context: LogContext | None = None, year: int | None = None) -> Triage:
    """Judge files (``-`` is stdin) as one incident. Raises BadParameter when one of them cannot be read."""
    return _judge([open_source(name) for name in names], context, year)


def judge_paste(text: str | bytes, *, context: LogContext | None = None, year: int | None = None) -> Triage:
    """Judge a text as it was pasted."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return _judge([Source("the paste", read_stretches(io.BytesIO(data)))], context, year)


def _judge(sources: Iterable[Source], context: LogContext | None, year: int | None) -> Triage:
    reading = Reading(load(), context or LogContext(), year=year)
    for source in sources:
        reading.add(source)
    reading.finish_ends()
    said = reading.judging.finish(lines=reading.ends.lines, gaps=[*reading.damage, *reading.ends.gaps])
    findings = [*said.findings, *findings_of(reading.server.starts, said.findings)]
    findings += reading.judging.unclean_boots()
    findings += [_damaged(reason, reading.ends.lines) for reason in reading.damage]
    told = {f.device for f in findings}
    findings += [_unlisted(gpu, reading.ends.lines) for gpu in reading.judging.unlisted_gpus() if gpu not in told]
    findings = _both_memory_errors(findings)
    recognised = bool(findings or said.facts or said.benign or said.unknown_lines or reading.answers or reading.kinds.names())
    verdict = worst([Verdict.PASS, *(f.verdict for f in findings), *([said.unknown_verdict] if said.unknown_lines else [])])
    not_observable = list(said.not_observable)
    starts = reading.server.starts
    if starts and not any(s.complete for s in starts):
        not_observable.append(
            "with what the inference server was started: its arguments are not in the log, so whether speculation is meant to be "
            "on cannot be seen"
        )
    sentence = ""
    if not recognised:
        verdict, sentence = Verdict.UNKNOWN, _unrecognised(reading)
        not_observable.insert(0, sentence)
    ordered = tuple(sorted(findings, key=_order(findings)))
    return Triage(
        verdict=verdict,
        findings=ordered,
        not_observable=tuple(not_observable),
        unknown_lines=said.unknown_lines,
        unknown_samples=said.unknown_samples,
        sentence=sentence or _sentence(verdict, ordered, said.unknown_lines, reading.ends.lines),
        kinds=tuple(reading.kinds.names()),
        lines=reading.ends.lines,
        starts=tuple(reading.server.starts),
        sources=tuple(reading.sources),
        boots=said.boots,
        scary=sum(said.benign.values()),
    )


def _unrecognised(reading: Reading) -> str:
    if not reading.kinds.looked_at:
        return "Nothing can be told: there is no text in it."
    lines = reading.ends.lines
    return (
        f"Nothing can be told: in {lines} line{'s' if lines != 1 else ''} there is nothing that is known as a kernel log, "
        "a journal, a service's log or a tool's answer."
    )


def _damaged(reason: str, line: int) -> SignatureFinding:
    return SignatureFinding(
        signature="log-damaged",
        verdict=Verdict.UNKNOWN,
        device="",
        count=1,
        at_least=False,
        first=Moment(line),
        last=Moment(line),
        root=False,
        caused_by=None,
        reason=f"Something is missing: {reason}.",
        action=Suggested.LOOK,
        code="",
        lines=(),
        what_to_do="Get the rest: the journal of that boot, the console's or the BMC's log.",
        kind="gap",
    )


def _unlisted(gpu: str, line: int) -> SignatureFinding:
    return SignatureFinding(
        signature="gpu-not-in-nvidia-smi",
        verdict=Verdict.UNKNOWN,
        device=gpu,
        count=1,
        at_least=False,
        first=Moment(line),
        last=Moment(line),
        root=True,
        caused_by=None,
        reason="the nvidia driver holds this GPU (lspci), and no answer of nvidia-smi in this log lists it.",
        action=Suggested.LOOK,
        code="",
        lines=(),
        what_to_do="Ask nvidia-smi for it by its address (`nvidia-smi -q -i <address>`), and the kernel log for NVRM and Xid.",
        kind="gap",
    )


def _both_memory_errors(findings: list[SignatureFinding]) -> list[SignatureFinding]:
    ids = {f.signature for f in findings}
    if not (ids & _RAISE and ids & _LOWER):
        return findings
    words = "Both memory errors are in this log: no value of --mem-fraction-static fits; ask for less instead (draft tokens, "
    words += "--max-running-requests, context length)."
    return [replace(f, what_to_do=words) if f.signature in _RAISE | _LOWER else f for f in findings]


def _order(findings: Sequence[SignatureFinding]) -> Callable[[SignatureFinding], tuple[int, int, int, int]]:
    """Worst chain first, inside a chain in the order of the log, its cause first."""
    roots = {id(f): _root(f, findings) for f in findings}
    worst_of: dict[int, int] = {}
    for f in findings:
        chain = id(roots[id(f)])
        worst_of[chain] = min(worst_of.get(chain, len(_BADNESS)), _BADNESS.index(f.verdict))

    def key(f: SignatureFinding) -> tuple[int, int, int, int]:
        root = roots[id(f)]
        return worst_of[id(root)], root.first.n, int(f is not root), f.first.n

    return key


def _root(finding: SignatureFinding, findings: Sequence[SignatureFinding]) -> SignatureFinding:
    for _ in range(len(findings)):
        causes = [f for f in findings if f.signature == finding.caused_by and f is not finding]
        if not causes:
            break
        finding = next((f for f in causes if f.device == finding.device), causes[0])
    return finding


def _sentence(verdict: Verdict, findings: Sequence[SignatureFinding], unknown: int, lines: int) -> str:
    many = f"{lines} line{'s' if lines != 1 else ''}"
    roots = [f for f in findings if f.root and f.verdict is verdict]
    match verdict:
        case Verdict.FAIL:
            where = ", ".join(dict.fromkeys(f"{f.signature}{f' on {f.device}' if f.device else ''}" for f in roots[:3]))
            more = f" and {len(roots) - 3} more" if len(roots) > 3 else ""
            return f"At the root: {where}{more}." if roots else "A fault, whose cause is not in this log."
        case Verdict.UNKNOWN:
            if any(f.verdict is Verdict.UNKNOWN for f in findings):
                return "It cannot be told: see what is missing or not understood."
            read = "lines read" if unknown != 1 else "line reads"
            return f"It cannot be told: {unknown} {read} like an error that no signature knows."
        case Verdict.WARN:
            return f"No fault in {many}; something to look at."
        case _:
            return f"No known fault in {many}."


def _finding_json(f: SignatureFinding) -> dict[str, Any]:
    return {
        "signature": f.signature,
        "verdict": f.verdict.value,
        "device": f.device or None,
        "count": f.count,
        "at_least": f.at_least,
        "first": moment_text(f.first),
        "last": moment_text(f.last),
        "root": f.root,
        "caused_by": f.caused_by,
        "reason": f.reason,
        "action": f.action.value,
        "code": f.code or None,
        "lines": list(f.lines),
    }


def moment_text(moment: Moment) -> str:
    """UTC where it is known, else seconds since the boot, else the line."""
    if moment.time is not None:
        return moment.time.isoformat().replace("+00:00", "Z")
    return f"+{moment.monotonic_s:.6f} s" if moment.monotonic_s is not None else f"line {moment.n}"

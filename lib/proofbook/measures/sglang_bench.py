"""What SGLang's own benchmark wrote, read as second evidence.

``python -m sglang.bench_serving --output-file x.jsonl`` appends one JSON line for each run::

    {"tag": null, "backend": "sglang", "dataset_name": "custom", "max_concurrency": 4, "completed": 48, "duration": 61.2,
     "total_input_tokens": 9120, "total_output_tokens": 11840, "output_throughput": 193.4, "median_tpot_ms": 18.9, …}

It is independent of the measures here, and weaker: its spread is over requests, not over repeats, so that no interval can be had
from it; its ``accept_length`` is the server's lifetime average, with warm-up and all earlier traffic in it; and by default it
goes on past the end of an answer (``ignore_eos``), where text is degenerate and drafts are accepted like in no real answer. The
file does not tell whether that was so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proofbook.measures.from_json import from_json

__all__ = ["BenchFile", "BenchRun", "parse_bench", "second_evidence"]

#: Two runs are of the same work when these are equal; other work is another experiment.
_SAME_WORK = (
    "backend", "dataset_name", "request_rate", "random_input_len", "random_output_len", "random_range_ratio",
    "total_input_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One line. Milliseconds as it has them; None where it does not say. ``work`` is what was asked."""

    line: int
    tag: str
    concurrency: int | None
    completed: int
    asked: int | None  # only with --output-details
    duration_s: float | None
    output_tokens: int | None
    output_throughput: float | None  # tokens a second over all requests
    median_tpot_ms: float | None
    median_e2e_ms: float | None
    accept_length: float | None
    errors: tuple[str, ...]
    work: Mapping[str, Any]

    @property
    def complete(self) -> bool | None:
        """Whether every request was answered; None when the line does not tell how many were asked."""
        if self.errors or (self.asked is not None and self.completed < self.asked):
            return False
        return True if self.asked is not None else None


@dataclass(frozen=True, slots=True)
class BenchFile:
    """All runs of a file in its order, and what could not be read."""

    runs: tuple[BenchRun, ...]
    problems: tuple[str, ...]


def parse_bench(text: str) -> BenchFile:
    """The runs in a JSONL file. A line that is none is a problem, and the others are read all the same."""
    runs, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = from_json(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or _whole(said.get("completed")) is None:
            problems.append(f"line {number} is no result of bench_serving" + (" (cut off?)" if said is None else ""))
            continue
        runs.append(_run(number, said))
    return BenchFile(tuple(runs), tuple(problems))


def _run(number: int, said: Mapping[str, Any]) -> BenchRun:
    errors = said.get("errors")
    listed = errors if isinstance(errors, list) else None
    return BenchRun(
        line=number,
        tag=str(said.get("tag") or ""),
        concurrency=_whole(said.get("max_concurrency")),
        completed=_whole(said["completed"]) or 0,
        asked=None if listed is None else len(listed),
        duration_s=_real(said.get("duration")),
        output_tokens=_whole(said.get("total_output_tokens")),
        output_throughput=_real(said.get("output_throughput")),
        median_tpot_ms=_real(said.get("median_tpot_ms")),
        median_e2e_ms=_real(said.get("median_e2e_latency_ms")),
        accept_length=_real(said.get("accept_length")),
        errors=tuple(str(e)[:300] for e in listed or () if e),
        work={name: said.get(name) for name in _SAME_WORK},
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _real(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if good else None


def second_evidence(before: Sequence[BenchRun], after: Sequence[BenchRun]) -> list[dict[str, Any]]:
    """For each concurrency that both have, how many times shorter the median time per output token became.

    ``{"level", "speedup" (None = not comparable), "before_ms", "after_ms", "problems"}``. Of several runs of one concurrency the
    last one counts: the file is appended to, and the earlier ones may be of another configuration.
    """
    one, other = _by_level(before), _by_level(after)
    return [_held(level, one[level], other[level]) for level in sorted(one.keys() & other.keys())]


def _by_level(runs: Sequence[BenchRun]) -> dict[int, BenchRun]:
    return {run.concurrency: run for run in runs if run.concurrency is not None}


def _held(level: int, before: BenchRun, after: BenchRun) -> dict[str, Any]:
    differing = [name for name in _SAME_WORK if before.work[name] != after.work[name]]
    problems = [f"not the same work: {name} {before.work[name]} -> {after.work[name]}" for name in differing]
    for when, run in (("before", before), ("after", after)):
        if run.complete is False:
            asked = f" of {run.asked}" if run.asked is not None else ""
            first = f"; first error: {run.errors[0]}" if run.errors else ""
            problems.append(f"{when}: {run.completed}{asked} requests were answered{first}")
        elif run.complete is None:
            problems.append(f"{when}: how many were asked is not in the file (--output-details says it)")
        if not run.median_tpot_ms:
            problems.append(f"{when}: no time per output token")
    usable = not differing and before.complete is not False and after.complete is not False
    a, b = before.median_tpot_ms, after.median_tpot_ms
    return {
        "level": level,
        "speedup": a / b if usable and a and b else None,
        "before_ms": a,
        "after_ms": b,
        "problems": problems,
    }

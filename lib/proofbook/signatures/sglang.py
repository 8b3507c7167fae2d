"""How an SGLang server started, and with what it really runs, read from its own log lines of any version.

The reader listens to a judgement under way: every known fact comes by once, in the order of the log. What it makes of them
is a :class:`Start` for each time the server was started: milestones with their times and ranks, the resolved arguments, what
became of them, and which versions print such lines.

>>> from proofbook.signatures import LogLine, load
>>> from proofbook.signatures.judge import Judging, LogContext
>>> reader = ServerLog()
>>> judging = Judging(load(), LogContext(), reader)
>>> echo = "[2026-03-09 16:00:00] server_args=ServerArgs(model_path='/m', speculative_algorithm='EAGLE')"
>>> judging.feed(LogLine(echo, source="service"))
>>> [(s.arguments["speculative_algorithm"], s.ready) for s in reader.starts]
[('EAGLE', False)]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from proofbook.model import Suggested, Verdict
from proofbook.signatures.judge import LogLine, Moment, SignatureFinding

__all__ = ["Acceptance", "Milestone", "ServerLog", "Start", "findings_of"]

_PREFIX = re.compile(r"^\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?(?P<ranks>(?: [A-Z]{2}\d+)*)\] ?")
_MEMORY = re.compile(r"mem usage=(?P<usage>[\d.]+) GB")
_AVAILABLE = re.compile(r"avail mem=(?P<available>[\d.]+) GB")
_POOLS = re.compile(r"(?P<name>max_total_num_tokens|max_running_requests|context_len|available_gpu_mem)=(?P<value>[\d.]+)")
_DECODE = re.compile(r"#running-req: (?P<running>\d+).*?#queue-req: (?P<queued>\d+)")
_LENGTH = re.compile(r"accept len: (?P<length>[\d.]+)")
_RATE = re.compile(r"gen throughput \(token/s\): (?P<rate>[\d.]+)")
_ARGUMENT = re.compile(
    r"['\"]?(?P<name>\w+)['\"]?\s*[=:]\s*(?P<value>'[^']*'|\"[^\"]*\"|None|True|False|null|-?\d+(?:\.\d+)?)(?=[,)}\s])"
)

#: The arguments that decide what speculation costs and gives, in the order in which a reader wants them.
SHOWN = (
    "model_path", "tp_size", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "mem_fraction_static", "max_running_requests",
    "mamba_scheduler_strategy", "mamba_radix_cache_strategy", "disable_radix_cache", "disable_overlap_schedule",
    "attention_backend", "context_length", "kv_cache_dtype", "skip_server_warmup", "disable_custom_all_reduce",
)  # fmt: skip

#: Wordings that only some releases print: (what is in the line, oldest, newest).
_SAID_BY = (
    ("Beta spec is enabled for eagle", "0.5.4", "0.5.6"),
    ("Spec v2 is enabled for eagle/eagle3", "0.5.7", "0.5.10"),
    ("Overlap spec v2 is enabled by default", "0.5.13", "0.5.13"),
    ("Spec v2 is enabled by default", "0.5.11", "0.5.12"),
    ("Non-overlap (synchronous) spec v2 is used", "0.5.13", ""),
    ("server_args={", "0.5.22", ""),
    ("server_args=ServerArgs(", "", "0.5.21"),
    ("Capture cuda graph begin", "", "0.5.13"),
    ("CUDA graph begin. backend=", "0.5.14", ""),
)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split("."))


@dataclass(slots=True)
class Milestone:
    """One step of a start. Times are the server's own clock, of no zone; None where its lines carry none."""

    key: str
    title: str
    line: int
    begun: datetime | None = None
    ended: datetime | None = None
    ranks: set[str] = field(default_factory=set)
    detail: str = ""

    def seconds(self) -> float | None:
        return (self.ended - self.begun).total_seconds() if self.begun and self.ended else None


@dataclass(slots=True)
class Acceptance:
    """What the Decode lines say: one every 40 decode steps of the rank that logs."""

    lines: int = 0
    lengths: int = 0
    total: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    last: float = 0.0
    most_running: int = 0
    queued_lines: int = 0  # lines with requests waiting while as many run as can
    best_rate: float = 0.0  # tokens a second over all requests

    @property
    def mean(self) -> float | None:
        return self.total / self.lengths if self.lengths else None

    def add(self, text: str, capacity: int | None) -> None:
        self.lines += 1
        rate = _RATE.search(text)
        if rate:
            self.best_rate = max(self.best_rate, float(rate["rate"]))
        load = _DECODE.search(text)
        if load:
            running, queued = int(load["running"]), int(load["queued"])
            self.most_running = max(self.most_running, running)
            self.queued_lines += bool(queued and capacity and running >= capacity)
        found = _LENGTH.search(text)
        if found:
            length = float(found["length"])
            self.lowest = min(self.lowest, length) if self.lengths else length
            self.highest = max(self.highest, length)
            self.lengths += 1
            self.total += length
            self.last = length


@dataclass(slots=True)
class Start:
    """One start of the server. ``line`` is where it begins in the log; ``complete``: its arguments are in the log."""

    line: int
    complete: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    milestones: dict[str, Milestone] = field(default_factory=dict)
    pools: dict[str, float] = field(default_factory=dict)
    weights: dict[str, dict[str, float]] = field(default_factory=dict)  # class of the model: GB by rank
    oldest: str = ""
    newest: str = ""
    graph_tokens: int | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    prefills: int = 0
    last_line: int = 0
    unit: str = ""

    @property
    def ready(self) -> bool:
        return "ready" in self.milestones

    @property
    def algorithm(self) -> str:
        """The speculative algorithm that was resolved; "" when there is none, or nobody knows."""
        value = self.arguments.get("speculative_algorithm")
        return str(value) if value else ""

    @property
    def draft(self) -> str:
        """The class of the draft model, when one was loaded."""
        return next((name for name in self.weights if name.endswith(("MTP", "NextN", "Eagle", "Eagle3", "EagleModel"))), "")

    @property
    def capacity(self) -> int | None:
        """How many requests really run at once."""
        value = self.pools.get("max_running_requests")
        return None if value is None else int(value)

    @property
    def versions(self) -> str:
        """Which releases print such lines."""
        if self.oldest and self.oldest == self.newest:
            return self.oldest
        if self.oldest and self.newest:
            return f"{self.oldest} to {self.newest}"
        return f"{self.oldest} or later" if self.oldest else f"{self.newest} or earlier" if self.newest else ""

    def missing_ranks(self) -> tuple[str, ...]:
        """Ranks that were seen, and had not finished the last step that others of them had."""
        seen = {rank for m in self.milestones.values() for rank in m.ranks}
        size = self.arguments.get("tp_size")
        if isinstance(size, int) and 1 < size <= 64:
            seen |= {f"TP{i}" for i in range(size)}
        weights = self.milestones.get("weights")
        done = weights.ranks if weights else set()
        return tuple(sorted(seen - done)) if weights and done else ()

    def effective(self) -> list[tuple[str, str]]:
        """The configuration as it took effect: name and value in words."""
        rows = []
        for name in SHOWN:
            value = self.arguments.get(name)
            if value is None or value is False or value == "":
                continue
            note = ""
            if name == "speculative_algorithm" and value == "EAGLE":
                note = " (NEXTN is stored under this name)"
            if name == "max_running_requests" and self.capacity is not None and self.capacity != value:
                note = f" asked, {self.capacity} effective"
            rows.append((name, f"{value}{note}"))
        if self.arguments and not self.algorithm:
            rows.append(("speculative_algorithm", "none: speculation is off"))
        for name, ranks in self.weights.items():
            sizes = sorted(set(ranks.values()))
            each = f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}" if sizes else "?"
            what = "draft" if name == self.draft else "model"
            rows.append((f"{what} weights", f"{name}, {each} GiB on each of {len(ranks)} ranks (the log writes GB)"))
        if self.capacity is not None:
            rows.append(("requests at once", str(self.capacity)))
        for key, words in (("max_total_num_tokens", "tokens in the cache"), ("available_gpu_mem", "GPU memory left (GiB)")):
            if key in self.pools:
                rows.append((words, f"{self.pools[key]:g}"))
        if self.graph_tokens:
            rows.append(("tokens a request in the verify graph", str(self.graph_tokens)))
        rows += self._acceptance_rows()
        if self.versions:
            rows.append(("sglang", f"{self.versions}, by its wording"))
        return rows

    def _acceptance_rows(self) -> list[tuple[str, str]]:
        a = self.acceptance
        if a.mean is None:
            return [("decode lines", f"{a.lines}, none with an accept length")] if a.lines else []
        return [
            (
                "accept length",
                f"{a.mean:.2f} on average, {a.lowest:g} to {a.highest:g}, last {a.last:g} ({a.lengths} decode lines)",
            ),
            ("accept rate", "not shown: its meaning changed with 0.5.11, compare lengths"),
        ]


#: Facts that are milestones: id of the signature, title.
_STEPS = {
    "sglang-mamba-cache": ("mamba", "State cache"),
    "sglang-kv-cache": ("kv", "KV cache"),
    "sglang-pool-end": ("pools", "Memory pools"),
    "sglang-pools": ("sized", "Scheduler sized"),
    "sglang-http-up": ("http", "Web server up"),
    "sglang-ready": ("ready", "Ready"),
    "sglang-prefill": ("prefill", "First prefill"),
    "sglang-decode": ("decode", "First decode line"),
}


class ServerLog:
    """Listens to a judgement, and keeps one :class:`Start` for each start of a server."""

    def __init__(self) -> None:
        self.starts: list[Start] = []

    def __call__(self, signature_id: str, match: re.Match[str], line: LogLine) -> None:
        if signature_id == "sglang-args":
            self._begin(line)
        elif signature_id in _STEPS or signature_id in (
            "sglang-weights-begin",
            "sglang-weights-loaded",
            "sglang-graphs",
            "sglang-spec-on",
        ):
            self._step(signature_id, match, line)

    def _current(self, line: LogLine) -> Start:
        if not self.starts:
            self.starts.append(Start(line.n))
        return self.starts[-1]

    def _begin(self, line: LogLine) -> None:
        arguments = read_arguments(line.text)
        before = self.starts[-1] if self.starts else None
        if before is None or before.complete or before.milestones:
            self.starts.append(Start(line.n))
        start = self.starts[-1]
        start.complete, start.arguments, start.unit = True, arguments, line.unit or ""
        self._narrow(start, line.text)
        self._reach(start, "arguments", "Arguments resolved", line)

    def _step(self, signature_id: str, match: re.Match[str], line: LogLine) -> None:
        start = self._current(line)
        start.last_line = line.n
        self._narrow(start, line.text)
        if signature_id == "sglang-spec-on":
            return
        if signature_id == "sglang-decode":
            start.acceptance.add(line.text, start.capacity)
        if signature_id == "sglang-prefill":
            start.prefills += 1
        if signature_id == "sglang-weights-begin":
            self._weights_begin(start, line)
        elif signature_id == "sglang-weights-loaded":
            self._weights_end(start, match, line)
        elif signature_id == "sglang-graphs":
            what = " ".join(match["what"].lower().split())
            key, title = f"graphs {what}".strip(), f"CUDA graphs{f' ({what})' if what else ''}"
            step = self._reach(start, key, title, line, ends=match["phase"] == "end")
            if match["tokens"]:
                start.graph_tokens = int(match["tokens"])
            if match["phase"] == "end":
                step.detail = _said(_AVAILABLE, line.text, "available", "{} GiB left")
        else:
            self._plain_step(start, signature_id, line)

    def _plain_step(self, start: Start, signature_id: str, line: LogLine) -> None:
        key, title = _STEPS[signature_id]
        if key in ("prefill", "decode") and key in start.milestones:
            return
        step = self._reach(start, key, title, line, ends=True)
        if key == "sized":
            start.pools.update({m["name"]: float(m["value"]) for m in _POOLS.finditer(line.text)})
            step.detail = f"{start.capacity} requests at once, {start.pools.get('max_total_num_tokens', 0):g} tokens"
        elif key == "pools":
            step.detail = _said(_AVAILABLE, line.text, "available", "{} GiB left")

    def _weights_begin(self, start: Start, line: LogLine) -> None:
        ranks = _ranks(line.text)
        loaded = start.milestones.get("weights")
        # WHY: the draft's pair of lines has the same words; it begins once the rank's first pair has ended.
        second = loaded is not None and loaded.ended is not None and (not ranks or ranks <= loaded.ranks)
        key, title = ("draft", "Draft weights") if second else ("weights", "Weights")
        step = self._reach(start, key, title, line, counts=False)
        step.begun = step.begun or _time(line)

    def _weights_end(self, start: Start, match: re.Match[str], line: LogLine) -> None:
        name = match["type"]
        rank = " ".join(sorted(_ranks(line.text))) or "one rank"
        usage = _MEMORY.search(line.text)
        start.weights.setdefault(name, {})[rank] = float(usage["usage"]) if usage else 0.0
        first = next(iter(start.weights))
        key, title = ("weights", "Weights") if name == first and name != start.draft else ("draft", "Draft weights")
        if key == "draft" and "sized" not in start.milestones:
            # WHY: sizing the pools after the draft is loaded came with 0.5.14.
            self._at_least(start, "" if "pools" in start.milestones else "0.5.14")
            if "pools" in start.milestones:
                self._at_most(start, "0.5.13")
        step = self._reach(start, key, title, line, ends=True)
        step.detail = f"{name}{_said(_MEMORY, line.text, 'usage', ', {} GiB a rank')}"

    @staticmethod
    def _reach(start: Start, key: str, title: str, line: LogLine, *, ends: bool = False, counts: bool = True) -> Milestone:
        step = start.milestones.get(key)
        when = _time(line)
        if step is None:
            step = start.milestones[key] = Milestone(key, title, line.n, when)
        if ends:
            step.ended = when or step.ended
        if counts:
            step.ranks |= _ranks(line.text)
        start.last_line = line.n
        return step

    def _narrow(self, start: Start, text: str) -> None:
        for words, oldest, newest in _SAID_BY:
            if words in text:
                self._at_least(start, oldest)
                self._at_most(start, newest)
                return

    @staticmethod
    def _at_least(start: Start, version: str) -> None:
        if version and (not start.oldest or _version(version) > _version(start.oldest)):
            start.oldest = version

    @staticmethod
    def _at_most(start: Start, version: str) -> None:
        if version and (not start.newest or _version(version) < _version(start.newest)):
            start.newest = version


def _said(pattern: re.Pattern[str], text: str, group: str, words: str) -> str:
    found = pattern.search(text)
    return words.format(found[group]) if found else ""


def _ranks(text: str) -> set[str]:
    found = _PREFIX.match(text)
    return {r for r in found["ranks"].split() if r.startswith("TP")} if found else set()


def _time(line: LogLine) -> datetime | None:
    found = _PREFIX.match(line.text)
    if found:
        try:
            return datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S")
        except ValueError:
            return None
    return line.time.replace(tzinfo=None) if line.time else None


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of an echo, either ``server_args=ServerArgs(a=1, …)`` or ``server_args={'a': 1, …}``; what is plain of it."""
    _, _, echo = text.partition("server_args=")
    try:
        tree = ast.parse(echo.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {m["name"]: _plain(m["value"]) for m in _ARGUMENT.finditer(echo)}  # cut, or with parts that are no literals
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(tree, ast.Call):
        pairs = [(k.arg, k.value) for k in tree.keywords if k.arg]
    elif isinstance(tree, ast.Dict):
        pairs = [
            (k.value, v)
            for k, v in zip(tree.keys, tree.values, strict=True)
            if isinstance(k, ast.Constant) and isinstance(k.value, str)
        ]
    out: dict[str, Any] = {}
    for name, node in pairs:
        try:
            out[name] = ast.literal_eval(node)
        except (ValueError, TypeError):
            continue
    return out


def _plain(value: str) -> Any:
    try:
        return ast.literal_eval("None" if value == "null" else value)
    except (ValueError, SyntaxError):
        return value


# ------------------------------------------------------------------------------------------------ what it means


def findings_of(starts: list[Start], said: tuple[SignatureFinding, ...]) -> list[SignatureFinding]:
    """What no single line says: a start that never became ready, speculation that is off, a queue at the true capacity."""
    if not starts:
        return []
    out = []
    start = starts[-1]
    died = {f.signature for f in said if f.verdict is Verdict.FAIL}
    if start.complete and not start.ready and start.acceptance.lines == 0 and not died:
        out.append(_not_ready(start))
    a = start.acceptance
    if start.algorithm and a.lines and not a.lengths:
        out.append(
            _finding(
                "sglang-spec-off", Verdict.FAIL, start, a.lines,
                f"Speculation ({start.algorithm}) is asked for, and none of {a.lines} decode lines has an accept length: "
                "it is off.",
                Suggested.ROLL_BACK, "Look for the reason at the start of the log; take the flags back if it cannot be mended.",
            )
        )  # fmt: skip
    if a.queued_lines * 10 >= a.lines > 0 and a.queued_lines:
        out.append(
            _finding(
                "sglang-queue-at-capacity", Verdict.WARN, start, a.queued_lines,
                f"Requests wait in {a.queued_lines} of {a.lines} decode lines while {start.capacity} run, which is all that can: "
                "a measurement above this concurrency measures the queue.",
                Suggested.FIX_CONFIG,
                "Give the state cache more slots (--max-running-requests, --max-mamba-cache-size), or load it less.",
            )
        )  # fmt: skip
    return out


def _not_ready(start: Start) -> SignatureFinding:
    last = max(start.milestones.values(), key=lambda m: m.line)
    missing = start.missing_ranks()
    ranks = f" {', '.join(missing)} had not loaded the weights when others had." if missing else ""
    return _finding(
        "sglang-not-ready", Verdict.UNKNOWN, start, 1,
        f"The server's start is in the log, and its end is not: the last step seen is \"{last.title}\".{ranks} "
        "Up to 0.5.9 a dead rank leaves a start hanging without any line.",
        Suggested.WAIT, "Look again later; if nothing comes, look at the kernel log for a killed process and count the ranks.",
        kind="gap",
    )  # fmt: skip


def _finding(
    signature: str, verdict: Verdict, start: Start, count: int, reason: str, action: Suggested, what: str, *, kind: str = "fault"
) -> SignatureFinding:
    return SignatureFinding(
        signature=signature,
        verdict=verdict,
        device="",
        count=count,
        at_least=False,
        first=Moment(start.line),
        last=Moment(start.last_line or start.line),
        root=kind == "fault",
        caused_by=None,
        reason=reason,
        action=action,
        code="",
        lines=(),
        what_to_do=what,
        kind=kind,
        unit=start.unit,
    )

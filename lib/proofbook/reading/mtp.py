"""What records of MTP changes say together: what was decided, the gain, the starts, the drafts, and the memory.

Nothing is measured or judged anew. A gain is the one that its run measured, with its own intervals; logs are read from the
bytes that are in the record. What a record does not hold is said, never filled in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from proofbook.checks.mtp.budget import GIB, Budget, Shape, Wish, budget, shape_of
from proofbook.checks.mtp.start import StartStory, read_start
from proofbook.errors import CannotTell, NoSuchRun
from proofbook.probes.journal import JournalEntry, read_entries
from proofbook.probes.sglang import release
from proofbook.reading import Nothing, Reading, Shelf, pick
from proofbook.view import Picture, Shown, capacity_chart, compared_accepts, compared_gains, compared_starts, table

__all__ = ["LogSizes", "Memory", "ServerStart", "Trial", "Trials", "sizes_of", "trials"]

_RUNBOOK = "mtp-enablement"
_INVOCATION = "_SYSTEMD_INVOCATION_ID="
#: The outcome of a plan that had nothing to do.
_NOTHING = "nothing-to-do"


# --------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class ServerStart:
    """One start of the server, as the journal of its invocation tells it."""

    invocation: str
    story: StartStory
    entries: tuple[JournalEntry, ...]

    @property
    def speculative(self) -> bool:
        """Whether it says itself that it runs with speculation."""
        return self.story.start is not None and bool(self.story.start.algorithm)

    @property
    def came_up(self) -> bool:
        return self.story.start is not None and self.story.start.ready


class Trial:
    """One run that changed a server's speculation: what it measured and what became of it."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.record = reading.record

    @property
    def name(self) -> str:
        """The release, what became of the change, and the end of the run's id, which finds it in the archive."""
        lead = f"SGLang {self.release}" if self.release else "a release that was not told"
        return f"{lead}, {self.outcome} ({self.record.run_id[-6:]})"

    @property
    def release(self) -> str:
        """The installed release as the plan had it; "" when there was none."""
        return next((str(p["settings"]["version"]) for p in self.record.plans if p["settings"].get("version")), "")

    @property
    def outcome(self) -> str:
        """``kept``, ``taken back``, ``nothing changed``, or the run's status where nothing was decided."""
        if not self.acted:
            return "nothing changed"
        return ("kept" if self.decision["keep"] else "taken back") if self.decision else self.record.status

    @property
    def acted(self) -> bool:
        """Whether it did anything to the machine; a plan that was empty, or not to be made, has nothing to be taken back."""
        return any(p["acts"] or (p["applied"] or {}).get("outcome", _NOTHING) != _NOTHING for p in self.record.plans)

    @property
    def decision(self) -> Mapping[str, Any] | None:
        return self.record.decisions[-1] if self.record.decisions else None

    def value(self, name: str) -> Mapping[str, Any] | None:
        """The value of its last measurement of this name; None when it was not taken."""
        found = self.reading.measurement(name)
        return found["value"] if found else None

    def left_out(self, what: str) -> str:
        """Why ``what`` was not measured, in the run's own words."""
        said = (n["text"] for n in self.record.notes if n.get("kind") == "not-verified" and what in n.get("title", ""))
        return next(said, "the record does not say why").removeprefix(f"the {what} was not measured: ").rstrip(".")

    @cached_property
    def starts(self) -> tuple[ServerStart, ...]:
        """Every invocation whose journal was kept, in order; of several looks at one, the last, which is the longest."""
        found: dict[str, ServerStart] = {}
        for evidence in self.reading.asked_by("journal.UnitJournal"):
            match = next((a for a in evidence["argv"] if a.startswith(_INVOCATION)), "")
            if match:
                entries = read_entries(self.reading.result(evidence)).entries
                invocation = match.removeprefix(_INVOCATION)
                found[invocation] = ServerStart(invocation, read_start(entries, self._unit), entries)
        return tuple(found.values())

    @property
    def before(self) -> ServerStart | None:
        """The start of the server as it was before the change."""
        return self.starts[0] if self.starts and not self.starts[0].speculative else None

    @property
    def after(self) -> ServerStart | None:
        """The start with speculation; None when the log of none says so."""
        return next((s for s in reversed(self.starts) if s.speculative), None)

    @property
    def _unit(self) -> str:
        return next((str(p["settings"]["unit"]) for p in self.record.plans if p["settings"].get("unit")), "")

    @property
    def why_not_up(self) -> Shown | Nothing:
        """What the findings and the log say of a start that never became ready."""
        cause = self.after.story.cause if self.after is not None and not self.after.came_up else None
        if cause is None:
            return Nothing("no line that says why the server did not start")
        try:
            return self.reading.evidence(cause.signature)
        except NoSuchRun:
            return Nothing(f"no finding about {cause.signature}")

    @cached_property
    def memory(self) -> Memory:
        """The arithmetic of its server's memory. Raises CannotTell when the record does not hold what it needs."""
        return Memory(self)


# -------------------------------------------------------------------------------------------------- many runs


def trials(shelf: Shelf) -> Trials:
    """The runs of an archive that changed a server's speculation, oldest first. Raises NoSuchRun when there is none."""
    readings = [shelf.read(brief.run_id) for brief in reversed(shelf.archive.runs()) if brief.runbook == _RUNBOOK]
    changed = [Trial(r) for r in readings if any(p["applied"] for p in r.record.plans)]
    if not changed:
        raise NoSuchRun(
            "no run in this archive changed a server's speculation",
            hint="a run that stopped at its gate has measured a baseline, and nothing to compare it with",
        )
    return Trials(changed)


class Trials:
    """Several changes beside one another. Each attribute answers one question."""

    def __init__(self, runs: Sequence[Trial]) -> None:
        self.runs = tuple(runs)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.runs)

    def read(self, run: str) -> Trial:
        """One of them, by an end of its id. Raises NoSuchRun."""
        found = next((t for t in self.runs if run and t.record.run_id.endswith(run)), None)
        if found is None:
            raise NoSuchRun(f"no change here is {run!r}", hint="there are " + ", ".join(t.name for t in self.runs))
        return found

    @property
    def kept(self) -> Trial | Nothing:
        """The first that was kept, and whose record holds what the arithmetic of its memory needs."""
        return pick(
            self.runs, lambda t: t.outcome == "kept" and t.memory, "no change that was kept, with the sizes of its memory,"
        )

    @property
    def not_up(self) -> Trial | Nothing:
        """The latest whose server never became ready."""
        never = "no change whose server never became ready"
        return pick(reversed(self.runs), lambda t: t.after is not None and not t.after.came_up, never)

    @property
    def seals(self) -> Shown:
        """Whether each record is as it was sealed."""
        return table(("change", "on", "seal"), [(t.name, t.record.host, str(t.reading.seal)) for t in self.runs])

    @property
    def decided(self) -> Shown:
        """What was decided of each, and why."""
        rows = [
            (t.name, t.decision["rung"] if t.acted else "nothing changed", t.decision["because"]) for t in self.runs if t.decision
        ]
        undecided = [t.name for t in self.runs if not t.decision]
        note = f"Nothing was decided by: {'; '.join(undecided)}" if undecided else ""
        return table(("change", "rung", "because"), rows, note=note)

    @property
    def gains(self) -> Picture:
        """The gain at each concurrency with its interval, run by run on one scale."""
        return compared_gains([(t.name, t.value("serving.Gain"), t.left_out("gain")) for t in self.runs])

    @property
    def levels(self) -> Shown:
        """The same in numbers: time a token before and after, and the speedup with its 95 % interval."""
        rows = [(t.name, *_level_row(level)) for t, gain in self._gained() for level in gain["levels"]]
        columns = ("change", "at once", "before, ms a token", "after, ms a token", "speedup", "95 % interval", "pairs", "verdict")
        return table(columns, rows, note=self._without_gain)

    @property
    def kinds(self) -> Shown:
        """The speedup by kind of prompt: a column each kind, the most gained first."""
        gained = [(t.name, level) for t, gain in self._gained() for level in gain["levels"] if level["by_kind"]]
        kinds = list(dict.fromkeys(kind for _, level in gained for kind in level["by_kind"]))
        if gained:
            kinds.sort(key=lambda kind: -gained[0][1]["by_kind"].get(kind, 0))
        rows = [(name, level["level"], *(_times(level["by_kind"].get(kind)) for kind in kinds)) for name, level in gained]
        return table(("change", "at once", *kinds), rows, note=self._without_gain)

    @property
    def fairness(self) -> Shown:
        """Whether the two arms of each differ in anything but speculation."""
        rows = [(t.name, gain["fair"], ", ".join(gain["confounders"]), gain["fairness"]) for t, gain in self._gained()]
        return table(("change", "fair", "also differs", "in words"), rows, note=self._without_gain)

    @property
    def starts(self) -> Picture:
        """The start before the change (of the first run whose log has it), and each start with speculation."""
        panels = [(f"before: SGLang {t.release}", t.before.story.timeline) for t in self.runs if t.before is not None][:1]
        for trial in self.runs:
            if trial.after is not None:
                ended = "" if trial.after.came_up else ": never became ready"
                panels.append((trial.name + ended, trial.after.story.timeline))
        return compared_starts(panels)

    @property
    def accepts(self) -> Picture:
        """Accept length by case of the control prompts."""
        return compared_accepts([(t.name, value) for t in self.runs if (value := t.value("serving.ControlPrompts"))])

    @property
    def limits(self) -> Shown:
        """What was not verified, by the records and by their decisions; and what each decision holds for."""
        told: dict[tuple[str, str], list[str]] = {}
        for trial in self.runs:
            for row in dict.fromkeys(_limits(trial)):
                told.setdefault(row, []).append(trial.record.run_id[-6:])
        rows = sorted(told.items(), key=lambda item: _LIMITS.index(item[0][0]))
        return table(("kind", "what", "of"), [(*row, "all" if len(of) == len(self.runs) else of) for row, of in rows])

    def _gained(self) -> Iterator[tuple[Trial, Mapping[str, Any]]]:
        yield from ((t, value) for t in self.runs if (value := t.value("serving.Gain")))

    @property
    def _without_gain(self) -> str:
        lost = [f"{t.name}: {t.left_out('gain')}" for t in self.runs if not t.value("serving.Gain")]
        return "Without a gain: " + "; ".join(lost) if lost else ""

    @property
    def against_log(self) -> Shown:
        """For each: what the arithmetic said from the sizes of the start before, and what the new start's log then said."""
        rows, unknown = [], []
        for trial in self.runs:
            try:
                rows += [(trial.name, *row) for row in trial.memory.against_log()]
            except CannotTell as why:
                unknown.append(f"{trial.name}: {why}")
        return table(("change", "what", "predicted", "its log said", "difference"), rows, note="; ".join(unknown))


def _level_row(level: Mapping[str, Any]) -> tuple[Any, ...]:
    speedup = level["speedup"]
    interval = f"{_times(speedup['low'])} to {_times(speedup['high'])}" if speedup else level["skipped"] or "too few pairs"
    before, after = (level[name] * 1000 if level[name] else None for name in ("before_s_per_token", "after_s_per_token"))
    estimate = _times(speedup["estimate"]) if speedup else None
    return level["level"], _rounded(before), _rounded(after), estimate, interval, level["pairs"], level["verdict"]


#: What a reader must know first, comes first.
_LIMITS = ("could not tell", "not checked", "not verified", "remark", "run ended early", "limit", "holds for")


def _limits(trial: Trial) -> Iterator[tuple[str, str]]:
    """Rows (kind, what) of one record, and of its decision where the record did not say the same."""
    said = ""
    for gap in trial.record.not_verified:
        what, why = gap["what"], gap["why"]
        said += why
        yield (gap["kind"] if gap["kind"] in _LIMITS else "remark"), why if what.lower() in why.lower() else f"{what}: {why}"
    for text in trial.decision["limits"] if trial.decision else ():
        kind, _, rest = text.partition(": ")
        if kind not in ("holds for", "not verified"):
            yield "limit", text
        elif rest not in said:
            yield kind, rest


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _rounded(number: float | None, digits: int = 2) -> str:
    return "" if number is None else f"{number:.{digits}f}"


# ------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True, slots=True)
class LogSizes:
    """What a server's log says of its memory. GiB a rank (the log writes GB, and means GiB); None: it does not say.

    Of several ranks the one with least room counts: the smallest cache, the largest weights.
    """

    free: float | None = None  # before the first load
    weights: float | None = None  # of the model
    draft: float | None = None  # weights of the draft
    slots: int | None = None  # of the state cache
    reserved: float | None = None  # for the states of drafts
    tokens: int | None = None
    kv: float | None = None  # keys and values of the model
    running: int | None = None  # requests at once, as it took effect
    left: float | None = None  # when it serves


_FREE = re.compile(r"Load weight begin\. avail mem=([\d.]+) GB")
_LOADED = re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB")
_SLOTS = re.compile(r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+)")
_RESERVED = re.compile(r"intermediate_ssm_state_cache size: ([\d.]+) ?GB.*?intermediate_conv_window_cache size: ([\d.]+) ?GB")
_KV = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+), K size: ([\d.]+) ?GB, V size: ([\d.]+) ?GB")
_RUNNING = re.compile(r"\bmax_total_num_tokens=(\d+),.*?\bmax_running_requests=(\d+)")
_LEFT = re.compile(r"\bmax_total_num_tokens=.*?\bavailable_gpu_mem=([\d.]+) GB")


def sizes_of(entries: Sequence[JournalEntry]) -> LogSizes:
    """Read one start's lines.

    >>> from datetime import UTC, datetime
    >>> line = "[TP0] KV Cache is allocated. #tokens: 116224, K size: 0.66 GB, V size: 0.66 GB"
    >>> sizes_of([JournalEntry(datetime(2026, 1, 1, tzinfo=UTC), None, 6, line)]).tokens
    116224
    """

    def all_of(pattern: re.Pattern[str]) -> list[tuple[float, ...]]:
        return [tuple(float(g) for g in m.groups()) for e in entries if (m := pattern.search(e.text))]

    def one(found: Sequence[tuple[float, ...]], pick: Any = min, place: int = 0) -> Any:
        return pick((row[place] for row in found), default=None)

    # WHY: the draft's lines have the same words. It comes later, with less free, and is the smaller of the two.
    loaded, frees = sorted(all_of(_LOADED)), all_of(_FREE)
    largest = one(loaded, max)
    drafts = [row for row in loaded if largest and row[0] < largest / 2]
    caches = [(tokens, k + v) for tokens, k, v in all_of(_KV)]
    own = max((size for _, size in caches), default=None)
    running = all_of(_RUNNING)
    return LogSizes(
        free=one(frees, max),
        weights=largest,
        draft=one(drafts, max),
        slots=_whole(one(all_of(_SLOTS))),
        reserved=max((a + b for a, b in all_of(_RESERVED)), default=None),
        tokens=_whole(one(running) if running else one(caches)),
        kv=own,
        running=_whole(one(running, place=1)),
        left=one(all_of(_LEFT)),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


class Memory:
    """How one server's GPUs are divided: by the arithmetic of its release, and by its log.

    The sizes (free before loading, weights) come from the log of the start before the change, as they did when the change was
    judged; so what is compared with the new start's log is a prediction. Raises CannotTell where the record does not hold them.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        if trial.before is None:
            raise CannotTell("its record has no log of the start before the change")
        sizes = sizes_of(trial.before.entries)
        if sizes.free is None or sizes.weights is None:
            raise CannotTell("the log of the start before does not say how much was free and what the weights took")
        self.free, self.weights = sizes.free, sizes.weights
        self.config, self.checkpoint_bytes = _checkpoint(trial.reading)
        self._arguments = _arguments(trial)
        self.tp = int(self._arguments.get("tp_size") or 1)
        half = self._arguments.get("mamba_ssm_dtype") == "bfloat16"
        self.shape: Shape = shape_of(self.config, self.tp, state_bytes=2 if half else 4)

    def wish(self, **other: Any) -> Wish:
        """What the new start was given, with something else in the place of some of it (fields of Wish)."""
        given = self._arguments
        strategy = given.get("mamba_scheduler_strategy") or given.get("mamba_radix_cache_strategy") or "no_buffer"
        own = {
            "version": release(self.trial.release),
            "fraction": float(given["mem_fraction_static"]),
            "draft_tokens": int(given.get("speculative_num_draft_tokens") or 0),
            "running": given.get("max_running_requests"),
            "strategy": strategy,
            "overlap": not given.get("disable_overlap_schedule"),
            "radix": not given.get("disable_radix_cache"),
            "context": int(given.get("context_length") or self.config.get("max_position_embeddings") or 0),
            "state_ratio": float(given.get("mamba_full_memory_ratio") or 0.9),
        }
        unknown = set(other) - {f.name for f in fields(Wish)}
        if unknown:
            raise TypeError(f"no such part of a wish: {', '.join(sorted(unknown))}")
        return Wish(**{**own, **other})

    def budget(self, **other: Any) -> Budget:
        """The arithmetic for :meth:`wish`."""
        return budget(self.shape, self.wish(**other), free=self.free, weights=self.weights)

    @property
    def asked(self) -> Shown:
        """What decides the memory, as the arguments of the start with speculation say it."""
        wish = self.wish()
        rows = [
            ("release", ".".join(str(part) for part in wish.version)),
            ("--mem-fraction-static", wish.fraction),
            ("draft tokens of a verify step", wish.draft_tokens or "no speculation"),
            ("requests at once, as resolved", wish.running),
            ("strategy of the state cache", wish.strategy),
            ("GPUs that share the model", self.tp),
            ("free before loading, GiB a rank", self.free),
            ("weights of the model, GiB a rank", self.weights),
        ]
        return table(("what", "value"), rows, note="The last two are from the log of the start before the change.")

    @property
    def units(self) -> Shown:
        """The same sizes as bytes, GB and GiB, and what the log says of them."""
        whole, each = self.checkpoint_bytes, self.checkpoint_bytes / self.tp
        said = f"{self.weights:g} GB, with what the runtime itself takes"
        rows = [
            ("the checkpoint", *_units(whole), ""),
            (f"the checkpoint a rank, of {self.tp}", *_units(each), said),
            ("free on a GPU before the load", *_units(self.free * GIB), f"{self.free:g} GB"),
            ("the draft's weights a rank, as computed", *_units(self.shape.draft_weights), self._draft_said),
            ("states of one slot, a rank", *_units(self.shape.state_slot), ""),
            ("keys and values of 1000 tokens, a rank", *_units(1000 * self.shape.kv_token), ""),
        ]
        note = "GB is 10^9 bytes, GiB is 2^30. SGLang's log writes GB and means GiB: it divides by 2^30."
        return table(("what", "bytes", "GB", "GiB", "the log says"), rows, note=note)

    @property
    def _draft_said(self) -> str:
        after = self.trial.after
        size = sizes_of(after.entries).draft if after else None
        return f"{size:g} GB" if size is not None else ""

    def against_log(self) -> list[tuple[str, str, str, str]]:
        """Rows (what, predicted, what the log of the start with speculation said, difference). Raises CannotTell."""
        after = self.trial.after
        if after is None:
            raise CannotTell("its record has no log of a start with speculation")
        said, found = sizes_of(after.entries), self.budget()
        if not found.fits:
            return [("does it come up?", f"no: {found.why}", "yes" if after.came_up else "no", "")]
        pairs: list[tuple[str, float, float | None, int]] = [
            ("requests at once", found.running, said.running, 0),
            ("tokens in the KV cache", found.tokens, said.tokens, 0),
            ("slots of the state cache", found.slots, said.slots, 0),
            ("reserved for states of drafts, GiB", found.intermediate, said.reserved, 2),
            ("KV cache of the model, GiB", found.tokens * self.shape.kv_token / GIB, said.kv, 2),
            ("weights of the model, GiB", self.weights, said.weights, 2),
            ("weights of the draft, GiB", found.draft, said.draft, 2),
            ("left when it serves, GiB", found.left, said.left, 2),
        ]
        came_up = ("does it come up?", "yes", "yes" if after.came_up else "no", "")
        return [came_up, *((what, f"{a:.{n}f}", *_beside(a, b, n)) for what, a, b, n in pairs)]

    def fits(self, fractions: Sequence[float], releases: Sequence[str], running: Sequence[int | None] = (None,)) -> Shown:
        """What fits with this model and these GPUs: a row for each release and asked requests, a column each fraction."""
        rows = [
            (version, asked or "not given", *(_fit_words(self._other(version, f, asked)) for f in fractions))
            for version in releases
            for asked in running
        ]
        note = (
            f"{self.wish().draft_tokens} draft tokens; {self.free:g} GiB free and {self.weights:g} GiB of weights on each of "
            f"{self.tp} GPUs. In a cell: requests that really run at once, thousands of tokens in the KV cache, GiB left when it "
            "serves."
        )
        return table(("release", "--max-running-requests", *(f"fraction {f:.2f}" for f in fractions)), rows, note=note)

    def chart(self, fractions: Sequence[float], releases: Sequence[str], running: int | None = None) -> Picture:
        """The same as a picture, for one wish of requests at once."""
        series = []
        for version in releases:
            found = [(f, self._other(version, f, running)) for f in fractions]
            series.append((f"SGLang {version}", [(f, b.running, b.tokens) if b.fits else (f, 0, 0) for f, b in found]))
        asked = f"--max-running-requests {running}" if running else "--max-running-requests not given"
        return capacity_chart(series, title=f"What fits, by the fraction of GPU memory, with {asked}")

    def _other(self, version: str, fraction: float, running: int | None) -> Budget:
        return self.budget(version=release(version), fraction=fraction, running=running)


def _units(size: float) -> tuple[str, str, str]:
    return f"{size:.0f}", _rounded(size / 1e9, 3 if size < 1e9 else 1), _rounded(size / GIB, 3 if size < 1e9 else 1)


def _beside(predicted: float, said: float | None, digits: int) -> tuple[str, str]:
    if said is None:
        return "not said", ""
    # + 0.0 takes the sign from a rounded zero: "-0.00" would read as a finding.
    return f"{said:.{digits}f}", f"{round(said - predicted, digits) + 0.0:+.{digits}f}"


def _fit_words(found: Budget) -> str:
    if not found.fits:
        return "does not fit"
    return f"{found.running} · {found.tokens // 1000} k · {found.left:.1f} left"


def _arguments(trial: Trial) -> Mapping[str, Any]:
    """The resolved arguments of the start with speculation, as its log echoes them."""
    start = trial.after.story.start if trial.after else None
    if start is None or not start.complete:
        raise CannotTell("no log in its record echoes the arguments of a start with speculation")
    if not isinstance(start.arguments.get("mem_fraction_static"), float):
        raise CannotTell("the start with speculation does not say its memory fraction")
    return start.arguments


def _checkpoint(reading: Reading) -> tuple[Mapping[str, Any], int]:
    """The language model's part of config.json, and the bytes of all tensors by the checkpoint's index."""
    config: Mapping[str, Any] = {}
    size = 0
    for evidence in reading.asked_by("sglang.ServedCheckpoint"):
        name = evidence["argv"][-1].rsplit("/", 1)[-1]
        if name == "config.json":
            whole = json.loads(reading.printed(evidence))
            config = whole.get("text_config") or whole
        elif name == "model.safetensors.index.json":
            size = int(json.loads(reading.printed(evidence)).get("metadata", {}).get("total_size") or 0)
    if not config or not size:
        raise CannotTell("its record does not hold the checkpoint's config.json and index")
    return config, size

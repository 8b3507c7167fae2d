"""How fast a server answers, today and after a change: Baseline, Gain, and a second baseline to see what drifted meanwhile.

An *arm* is one configuration under the same questions: at each concurrency level every timing prompt in each round, after a
warm-up and with an empty prefix cache. Its shape in ``Measurement.value``:

``config`` ``steady`` (see :mod:`proofbook.measures.live`) · ``template`` ``prompt_set`` ``temperature`` ``rounds``
``concurrency`` · ``speculation`` (on, off, unknown) · ``answers`` (greedy, alone in the batch): {prompt: {text, ids}} ·
``refused`` (the server's words when it wants an API key, or another one) · ``levels``:
``level`` ``skipped`` ``asked`` ``completed`` ``complete`` ``flushed`` · medians ``s_per_token`` ``tokens_per_s``
``accept_length`` · ``tokens`` ``requests``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from proofbook.host import Bench
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.measures.answers import agreement, answer_of
from proofbook.measures.client import Ask
from proofbook.measures.live import (
    CONFIG,
    Live,
    completed,
    measured,
    middle,
    on_the_bench,
    speculation_of,
)
from proofbook.measures.paired import CONFIDENCE, DRAWS, MIN_PAIRS, MIN_ROUNDS, SEED, by_prompt, interval, ratios
from proofbook.measures.prompts import PromptSet, load
from proofbook.model import Measure, Measurement

__all__ = ["Baseline", "Gain", "GainAgain", "compare", "take_arm"]

#: The control prompts whose greedy answers are kept beside those of the timing prompts.
_COMPARED = ("greedy", "structured", "repeated", "long")

#: What differs between a server with and without speculation by the intent itself. The limit of running requests is among
#: it: speculation lowers it, and levels above what it leaves are not measured.
_INTENDED = ("speculative_", "max_running_requests")

#: Says what an argument does to the comparison, for those that are often changed together with speculation.
_CONFOUNDS = {
    "disable_overlap_schedule": "overlap scheduling alone makes decoding faster",
    "mamba_strategy": "another state strategy changes scheduling and what fits",
    "disable_radix_cache": "without the prefix cache every prompt is computed anew",
    "mem_fraction_static": "more memory for caches lets more requests run at once",
    "version": "another release is another program",
}


# --------------------------------------------------------------------------------------------------------------- arms


def take_arm(live: Live, *, concurrency: Sequence[int], rounds: int, template: str) -> dict[str, Any]:
    """One arm, taken now. A server that stops answering ends it; what was not asked says so."""
    prompts = load(template)
    live.look("before the first request")
    config = live.config()
    answers: dict[str, Any] = {}
    levels = [_level(live, prompts, level, rounds, config["effective_max_running"], answers) for level in sorted(concurrency)]
    answers |= _control_answers(live, prompts)
    requests = [r for level in levels for r in level["requests"]]
    return {
        "config": config,
        "steady": live.steady(),
        "template": template,
        "prompt_set": prompts.digest,
        "temperature": 0.0,
        "rounds": rounds,
        "concurrency": sorted(concurrency),
        "levels": levels,
        "refused": live.refused,
        "answers": answers,
        "speculation": speculation_of(requests),
    }


def _level(live: Live, prompts: PromptSet, level: int, rounds: int, cap: int | None, answers: dict[str, Any]) -> dict[str, Any]:
    asks = [Ask.generate(prompt, round=number, level=level) for number, prompt in prompts.rounds(rounds)]
    if cap is not None and level > cap:
        # WHY: what waits in the queue measures the queue; both arms would wait, by other rules.
        return _summary(level, len(asks), [], flushed=False, skipped=f"above the effective cap of {cap}")
    if live.gone:
        return _summary(level, len(asks), [], flushed=False, skipped=f"the server did not answer any more: {live.gone}")
    what = f"level {level}"
    live.ask(f"{what} warm-up", [Ask.generate(prompts.warm_up, level=level)] * level, at_once=level, quiet=True)
    flushed = live.flush()
    if not flushed and not live.gone:
        live.problems.append(f"{what}: the prefix cache could not be emptied; prompts may have been answered from it")
    requests, replies = live.ask(what, asks, at_once=level)
    if level == 1:
        answers |= {a.prompt.id: said for r in replies if (a := r.ask).prompt and a.round == 0 and (said := answer_of(r))}
    live.look(f"after {what}")
    summary = _summary(level, len(asks), requests, flushed=flushed)
    if summary["s_per_token"]:
        live.bench.tell(f"{what}: {summary['completed']} of {len(asks)} answered, {summary['s_per_token'] * 1000:.2f} ms a token")
    return summary


def _summary(level: int, asked: int, requests: list[dict[str, Any]], *, flushed: bool, skipped: str = "") -> dict[str, Any]:
    good, pace = completed(requests), middle(requests, "s_per_token")
    return {
        "level": level,
        "skipped": skipped,
        "asked": asked,
        "completed": len(good),
        "complete": bool(asked) and len(good) == asked,
        "flushed": flushed,
        "s_per_token": pace,
        "tokens_per_s": 1 / pace if pace else None,
        "accept_length": middle(requests, "accept_length"),
        "tokens": sum(r["tokens"] for r in good),
        "requests": requests,
    }


def _control_answers(live: Live, prompts: PromptSet) -> dict[str, Any]:
    """The greedy answers to the control prompts, each alone, from an empty cache."""
    live.flush()
    asks = [Ask.generate(prompts.control[name]) for name in _COMPARED]
    _, replies = live.ask("control answers", asks, at_once=1)
    live.look("after the control answers")
    return {p.id: said for r in replies if (p := r.ask.prompt) and (said := answer_of(r))}


# ---------------------------------------------------------------------------------------------------------- comparing


def compare(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The levels of two sides held against each other; each side is one arm or several of one configuration (A-B-A).

    A level is ``gain`` only where the interval's lower bound is above 1, ``loss`` where its upper bound is below 1,
    ``none-shown`` in between, and ``not-measured`` where an arm is not complete or the pairs are too few.
    """
    levels = sorted({level["level"] for arm in (*before, *after) for level in arm["levels"]})
    return [_compared(number, _at(before, number), _at(after, number)) for number in levels]


def _at(arms: Sequence[Mapping[str, Any]], number: int) -> list[Mapping[str, Any] | None]:
    return [next((level for level in arm["levels"] if level["level"] == number), None) for arm in arms]


def _compared(
    number: int, before: Sequence[Mapping[str, Any] | None], after: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    sides = [[level for level in side if level is not None] for side in (before, after)]
    one, other = ([r for level in side for r in level["requests"]] for side in sides)
    a, b = by_prompt(one), by_prompt(other)
    pairs = ratios(a, b)
    complete = all(level is not None and level["complete"] for level in (*before, *after))
    # WHY not from what there is: the requests that failed are not a random choice of all.
    speedup = interval(a, b) if complete else None
    kinds = {r["prompt"]: r["kind"] for r in one}
    return {
        "level": number,
        "skipped": next((level["skipped"] for side in sides for level in side if level["skipped"]), ""),
        "pairs": len(pairs),
        "prompts": len({r["prompt"] for r in (*one, *other)}),
        "rounds": min((len(v) for side in (a, b) for v in side.values()), default=0),
        "enough": len(pairs) >= MIN_PAIRS and all(len(v) >= MIN_ROUNDS for side in (a, b) for v in side.values()),
        "complete": complete,
        "speedup": speedup.as_json() if speedup else None,
        "verdict": _verdict(speedup.low, speedup.high) if speedup else "not-measured",
        "before_s_per_token": middle(one, "s_per_token"),
        "after_s_per_token": middle(other, "s_per_token"),
        "by_kind": {k: median(r for p, r in pairs.items() if kinds[p] == k) for k in sorted({kinds[p] for p in pairs})},
        "ratios": pairs,
    }


def _verdict(low: float, high: float) -> str:
    return "gain" if low > 1 else "loss" if high < 1 else "none-shown"


def _sorted_out(levels: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    names = {"gains_at": "gain", "losses_at": "loss", "no_gain_shown_at": "none-shown", "not_measured_at": "not-measured"}
    return {name: [level["level"] for level in levels if level["verdict"] == verdict] for name, verdict in names.items()}


def _fairness(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What else changed between two arms than speculation."""
    if not (before["known"] and after["known"]):
        return {
            "changed": {}, "confounders": [], "fair": None,
            "fairness": "one of the servers did not tell its arguments, so what else changed is not known",
        }  # fmt: skip
    changed = {name: [before[name], after[name]] for name in CONFIG if before[name] != after[name]}
    others = [name for name in changed if not name.startswith(_INTENDED)]
    if not others:
        words = "nothing but speculation changed between the two arms"
    else:
        why = "; ".join(
            f"{name} {changed[name][0]} -> {changed[name][1]} ({_CONFOUNDS.get(name, 'changed too')})" for name in others
        )
        words = f"the arms differ in more than speculation, so not all of a difference is its doing: {why}"
    return {"changed": changed, "confounders": others, "fair": not others, "fairness": words}


_METHOD = (
    "paired per prompt: median over its rounds before, over that after; median of the ratios; interval: bootstrap over prompts "
    f"and rounds, {DRAWS} draws, seed {SEED}, {CONFIDENCE:.0%}; at least {MIN_PAIRS} pairs of {MIN_ROUNDS} rounds; "
    "nothing dropped"
)


# ------------------------------------------------------------------------------------------------------------ measures


@dataclass(frozen=True)
class Baseline(Measure):
    """How fast the server answers now, and what it answers; before anything is changed."""

    service: ServiceSpec
    container: ContainerSpec | None = None
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    rounds: int = MIN_ROUNDS
    template: str = "chatml"
    answer_s: float = 120.0
    name: ClassVar[str] = "serving.Baseline"
    title: ClassVar[str] = "How fast does it answer today, and what?"

    def take(self, bench: Bench) -> Measurement:
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            arm = take_arm(live, concurrency=self.concurrency, rounds=self.rounds, template=self.template)
            return measured(self, live, unit="s/token", conditions=_conditions(arm, self.answer_s), value=arm)


@dataclass(frozen=True)
class Gain(Measure):
    """How much faster the server answers than ``before`` (a :class:`Baseline`), under the same questions."""

    service: ServiceSpec
    container: ContainerSpec | None = None
    before: Measurement = field(kw_only=True, repr=False)
    answer_s: float = 120.0
    name: ClassVar[str] = "serving.Gain"
    title: ClassVar[str] = "Is it faster than before?"

    def take(self, bench: Bench) -> Measurement:
        first = self.before.value
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            arm = _same_again(live, first)
            levels = compare([first], [arm])
            value = {
                "arm": arm,
                "before_config": first["config"],
                **_fairness(first["config"], arm["config"]),
                "levels": levels,
                **_sorted_out(levels),
                "agreement": agreement(first["answers"], arm["answers"], load(arm["template"])),
                "method": _METHOD,
            }
            return measured(self, live, unit="x", conditions=_conditions(arm, self.answer_s), value=value)


@dataclass(frozen=True)
class GainAgain(Measure):
    """The second A of A-B-A: the old configuration once more, so that a drift meanwhile is not taken for a gain.

    ``value``: ``arm`` · ``drift`` {level: how much faster the second A is than the first, {estimate, low, high} or None} ·
    ``drifted_at`` · ``levels``, the change against both A together · ``against_second``, the same against the second A alone, and
    ``gains_against_second_at`` · what else differs between the two A, as in :class:`Gain`.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    before: Measurement = field(kw_only=True, repr=False)
    gain: Measurement = field(kw_only=True, repr=False)
    answer_s: float = 120.0
    name: ClassVar[str] = "serving.GainAgain"
    title: ClassVar[str] = "Is the old configuration still as fast as it was?"

    def take(self, bench: Bench) -> Measurement:
        first, changed = self.before.value, self.gain.value["arm"]
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            arm = _same_again(live, first)
            drift = compare([first], [arm])
            levels = compare([first, arm], [changed])
            # WHY alone too: where the machine drifted, both together are a mixture of two machines, and their middle may gain.
            second = compare([arm], [changed])
            value = {
                "arm": arm,
                **_fairness(first["config"], arm["config"]),
                "drift": {str(level["level"]): level["speedup"] for level in drift},
                "drifted_at": [level["level"] for level in drift if level["verdict"] in ("gain", "loss")],
                "levels": levels,
                **_sorted_out(levels),
                "against_second": second,
                "gains_against_second_at": _sorted_out(second)["gains_at"],
                "method": _METHOD,
            }
            return measured(self, live, unit="x", conditions=_conditions(arm, self.answer_s), value=value)


def _same_again(live: Live, first: Mapping[str, Any]) -> dict[str, Any]:
    arm = take_arm(live, concurrency=first["concurrency"], rounds=first["rounds"], template=first["template"])
    if arm["prompt_set"] != first["prompt_set"]:
        live.problems.append("the first arm was asked other prompts than this one (another release of the set): no fair pair")
        for level in arm["levels"]:
            level["complete"] = False
    return arm


def _conditions(arm: Mapping[str, Any], answer_s: float) -> dict[str, Any]:
    config = arm["config"]
    return {
        "version": config["version"],
        "model": config["model_path"],
        "tp_size": config["tp_size"],
        "speculation": arm["speculation"],
        "concurrency": arm["concurrency"],
        "rounds": arm["rounds"],
        "prompts": len({r["prompt"] for level in arm["levels"] for r in level["requests"]}),
        "temperature": arm["temperature"],
        "template": arm["template"],
        "prompt_set": arm["prompt_set"][:12],
        "deadline_s": answer_s,
        "seconds_per_token": "the server's own time of a request over its tokens: queue, prefill and decode",
    }

"""Two arms of an experiment held against each other, prompt by prompt.

For each prompt the two medians over its rounds make a ratio; the estimate is the median of the ratios. Its interval is a
bootstrap of two levels: prompts are drawn with replacement, and for each drawn prompt the rounds of either arm. WHY two:
rounds of one prompt are alike, so that drawing from all requests as if they were independent would claim more than was seen.

Nothing is dropped: an outlier moves a median little and an interval honestly. The seed is fixed, so that the same numbers give
the same interval on every machine.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["CONFIDENCE", "DRAWS", "MIN_PAIRS", "MIN_ROUNDS", "SEED", "Interval", "by_prompt", "interval", "ratios"]

#: Below these no interval is claimed. Between the extremes of n pairs lies the median with 1 - 2 * 0.5^n: of five pairs not even
#: that is 95 %, of six it is 97 %.
MIN_PAIRS = 6
MIN_ROUNDS = 3

CONFIDENCE = 0.95
DRAWS = 4000
SEED = 20260309

Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its 95 % bootstrap interval."""

    estimate: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return {"estimate": self.estimate, "low": self.low, "high": self.high}


def by_prompt(requests: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds per token of the completed requests, by prompt."""
    found: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        if request["ok"] and request["s_per_token"]:
            found[request["prompt"]].append(float(request["s_per_token"]))
    return dict(found)


def ratios(before: Values, after: Values) -> dict[str, float]:
    """How many times faster ``after`` is, for each prompt that both have: median of before over median of after."""
    return {prompt: median(before[prompt]) / median(after[prompt]) for prompt in sorted(before.keys() & after.keys())}


def interval(before: Values, after: Values) -> Interval | None:
    """The median ratio over all prompts with its interval. None with fewer than ``MIN_PAIRS`` pairs, or with a prompt that has
    fewer than ``MIN_ROUNDS`` rounds in either arm."""
    estimates = ratios(before, after)
    prompts = list(estimates)
    if len(prompts) < MIN_PAIRS or any(len(arm[p]) < MIN_ROUNDS for arm in (before, after) for p in prompts):
        return None
    chance = random.Random(SEED)
    drawn = sorted(
        median(
            median(chance.choices(before[p], k=len(before[p]))) / median(chance.choices(after[p], k=len(after[p])))
            for p in chance.choices(prompts, k=len(prompts))
        )
        for _ in range(DRAWS)
    )
    tail = (1 - CONFIDENCE) / 2
    return Interval(median(estimates.values()), drawn[int(tail * DRAWS)], drawn[int((1 - tail) * DRAWS) - 1])

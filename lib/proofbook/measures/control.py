"""Control prompts: are drafts accepted, and is what comes out still right?

Health endpoints are no evidence: they ask for one token, which ends in the prefill and never reaches a verify step. What is
evidence is a predictable greedy answer, the count of verify steps it took, and that the same process is there after it.

``ControlPrompts.value``: ``config`` ``steady`` (see :mod:`proofbook.measures.live`) · ``speculation`` (on, off, unknown) ·
``accept_length`` (of the greedy case: the one to judge by) · ``steps_plus_one`` (what it can be at most) · ``agreement`` with the
baseline's answers and ``disagreeing`` (prompts that had to agree and do not) · ``cases``:
``case`` ``title`` ``skipped`` ``asked`` ``completed`` ``temperature`` · ``accept_length`` (median) ``lowest_accept_length``
``verify_ct`` ``tokens`` · ``expect``: [{``what``, ``held`` (None = could not be told), ``reason``}] · ``problem`` ``requests``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proofbook.host import Bench
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.measures.answers import agreement, all_same, answer_of, counts_on, is_of_form
from proofbook.measures.client import Ask, Reply
from proofbook.measures.live import Live, completed, measured, middle, on_the_bench, speculation_of, took_part
from proofbook.measures.prompts import Prompt, PromptSet, load
from proofbook.model import Measure, Measurement

__all__ = ["ControlPrompts"]

#: How many requests more than the server runs at once are sent together; and how many when nobody knows how many that is.
_ABOVE_THE_CAP = 4
_BURST_BLIND = 12
_BURST_MOST = 64

#: What the long prompt hides, and its answer must hold.
_HIDDEN = "7-4-1-9"

Texts = Sequence[str | None]
Expectation = tuple[str, bool | None, str]


@dataclass(frozen=True)
class _Case:
    """What is asked together, and how its answers are read."""

    name: str
    title: str
    prompts: Sequence[Prompt]
    expects: Callable[[Sequence[Reply], Sequence[dict[str, Any]]], list[Expectation]] = lambda _replies, _requests: []
    at_once: int = 1
    flush: str = "first"  # "each": before each request; "first": before the first


@dataclass(frozen=True)
class ControlPrompts(Measure):
    """Are drafts accepted, and are the answers right: predictable, sampled, structured, repeated, long, and too many at once?"""

    service: ServiceSpec
    container: ContainerSpec | None = None
    before: Measurement | None = field(default=None, kw_only=True, repr=False)
    template: str = "chatml"
    answer_s: float = 120.0
    name: ClassVar[str] = "serving.ControlPrompts"
    title: ClassVar[str] = "Are drafts accepted, and are the answers right?"

    def take(self, bench: Bench) -> Measurement:
        prompts = load(self.template)
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            live.look("before the first request")
            cap = live.config()["effective_max_running"]
            answers: dict[str, Any] = {}
            cases = [_taken(live, case, answers) for case in _cases(prompts, cap)]
            config = live.config()
            value = {
                "config": config,
                "steady": live.steady(),
                "speculation": speculation_of([r for case in cases for r in case["requests"]]),
                "cases": cases,
                "accept_length": cases[0]["accept_length"],
                "steps_plus_one": _steps_plus_one(config["speculative_num_steps"]),
                **self._agreement(answers, prompts),
            }
            return measured(self, live, unit="tokens/step", conditions=self._conditions(config, prompts), value=value)

    def _agreement(self, answers: dict[str, Any], prompts: PromptSet) -> dict[str, Any]:
        if self.before is None or self.before.value["prompt_set"] != prompts.digest:
            return {"agreement": [], "disagreeing": []}
        found = agreement(self.before.value["answers"], answers, prompts)
        return {"agreement": found, "disagreeing": [a["prompt"] for a in found if a["must_agree"] and not a["same"]]}

    def _conditions(self, config: dict[str, Any], prompts: PromptSet) -> dict[str, Any]:
        return {
            "version": config["version"],
            "model": config["model_path"],
            "template": prompts.template,
            "prompt_set": prompts.digest[:12],
            "deadline_s": self.answer_s,
            "compared_with": self.before.taken_at.isoformat() if self.before else "nothing",
        }


def _steps_plus_one(steps: Any) -> int | None:
    """What a verify step can give at most, None where the server does not say it in a way that can be believed."""
    return steps + 1 if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < 1000 else None


def _cases(prompts: PromptSet, cap: int | None) -> list[_Case]:
    ask = prompts.control
    burst = min(cap + _ABOVE_THE_CAP, _BURST_MOST) if cap else _BURST_BLIND
    return [
        _Case("greedy", "Greedy and predictable, 256 tokens", [ask["greedy"]] * 3, _counting, flush="each"),
        _Case("sampled", "Sampled, temperature above zero", [ask["sampled"]] * 2),
        _Case("structured", "Structured output by a JSON schema", [ask["structured"]] * 3, _structured),
        _Case("repeated", "The same prompt again, answered from the prefix cache", [ask["repeated"]] * 2, _repeated),
        _Case("long", "A long context", [ask["long"]], _long),
        _Case(
            "burst",
            f"{burst} requests at once",
            prompts.burst(burst),
            lambda replies, requests: _burst(requests, burst, cap),
            at_once=burst,
        ),
        _Case("last", "Greedy and predictable once more, after all of that", [ask["greedy"]], _counting),
    ]


def _taken(live: Live, case: _Case, answers: dict[str, Any]) -> dict[str, Any]:
    skipped = f"the server did not answer any more: {live.gone}" if live.gone else ""
    requests, replies = ([], []) if skipped else _asked(live, case)
    if not skipped:
        live.look(f"after '{case.name}'")
    # WHY the last one wins: of a repeated prompt it is the answer from the cache that has to agree.
    answers |= {p.id: said for r in replies if (p := r.ask.prompt) and not p.temperature and (said := answer_of(r))}
    lengths = [r["accept_length"] for r in completed(requests) if r["accept_length"] is not None]
    expectations = case.expects(replies, requests) if requests else []
    for what, held, reason in expectations:
        if held is False:
            live.problems.append(f"{case.name}: not so: {what}: {reason}")
    return {
        "case": case.name,
        "title": case.title,
        "skipped": skipped,
        "asked": len(case.prompts),
        "completed": len(completed(requests)),
        "temperature": case.prompts[0].temperature,
        "accept_length": middle(requests, "accept_length"),
        "lowest_accept_length": min(lengths, default=None),
        "verify_ct": took_part(requests),
        "tokens": sum(r["tokens"] for r in completed(requests)),
        "expect": [{"what": what, "held": held, "reason": reason} for what, held, reason in expectations],
        "problem": next((r["problem"] for r in requests if not r["ok"]), ""),
        "requests": requests,
    }


def _asked(live: Live, case: _Case) -> tuple[list[dict[str, Any]], list[Reply]]:
    asks = [Ask.generate(prompt, round=n, level=case.at_once) for n, prompt in enumerate(case.prompts)]
    live.flush()
    if case.flush != "each":
        return live.ask(case.name, asks, at_once=case.at_once)
    requests: list[dict[str, Any]] = []
    replies: list[Reply] = []
    for ask in asks:
        if requests:
            live.flush()
        more = live.ask(case.name, [ask], at_once=1)
        requests += more[0]
        replies += more[1]
    return requests, replies


# ------------------------------------------------------------------------------------------------------- expectations


def _texts(replies: Sequence[Reply]) -> list[str | None]:
    return [said["text"] if (said := answer_of(reply)) else None for reply in replies]


def _all_hold(what: str, texts: Texts, test: Callable[[str], tuple[bool, str]]) -> Expectation:
    """Every answer passes ``test``; an answer that did not come leaves it untold, unless another one fails."""
    told = [test(text) for text in texts if text is not None]
    wrong = next((reason for held, reason in told if not held), "")
    if wrong:
        return what, False, wrong
    if len(told) < len(texts):
        return what, None, f"{len(told)} of {len(texts)} answers came"
    return what, True, told[0][1]


def _counting(replies: Sequence[Reply], _requests: Sequence[dict[str, Any]]) -> list[Expectation]:
    return [_all_hold("counts on without a mistake", _texts(replies), counts_on)]


def _structured(replies: Sequence[Reply], _requests: Sequence[dict[str, Any]]) -> list[Expectation]:
    schema = next(r.ask.prompt.json_schema for r in replies if r.ask.prompt)
    return [_all_hold("is JSON of the wanted form", _texts(replies), lambda text: is_of_form(text, schema))]


def _repeated(replies: Sequence[Reply], requests: Sequence[dict[str, Any]]) -> list[Expectation]:
    what = "says the same as before the cache held it"
    held, reason = all_same([answer_of(reply) for reply in replies])
    cached = requests[-1]["cached_tokens"]
    if held and not cached:
        # WHY not held: without a hit nothing was shown of answers after a hit.
        return [(what, None, f"{reason}, but the second was not answered from the cache (cached tokens: {cached})")]
    return [(what, held, f"{reason}; {cached} prompt tokens of the second came from the cache" if held else reason)]


def _long(replies: Sequence[Reply], _requests: Sequence[dict[str, Any]]) -> list[Expectation]:
    def found(text: str) -> tuple[bool, str]:
        return (True, f"it says {_HIDDEN}") if _HIDDEN in text else (False, f"it says {text.strip()[:80]!r}, not {_HIDDEN}")

    return [_all_hold("finds what stands far up in the prompt", _texts(replies), found)]


def _burst(requests: Sequence[dict[str, Any]], asked: int, cap: int | None) -> list[Expectation]:
    good = len(completed(requests))
    more = None if cap is None else asked > cap
    return [
        ("all were answered", good == asked, f"{good} of {asked} answered"),
        (
            "more than the server runs at once",
            more,
            f"{asked} sent together; it runs {'nobody knows how many' if cap is None else cap} at once",
        ),
    ]

"""Stability: does it hold under load for a while, with the same process all the time?

``Stability.value``: ``minutes`` (asked for) ``lasted_s`` ``concurrency`` ``every_s`` ``looks`` ``ended_early`` · ``steady`` (see
:mod:`proofbook.measures.live`) · ``load``: ``waves`` ``asked`` ``completed`` ``tokens`` ``busy_share`` (of the window, 0-1)
``s_per_token_first`` ``s_per_token_last`` (medians of the first and last third) ``accept_length`` ``lowest_accept_length``
``requests_failed`` (at most 50) · ``watched``: {probe: [{``at``, ``value``, ``unknown``}]}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, ClassVar

from proofbook.host import Bench
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.journal import plain
from proofbook.measures.client import Ask
from proofbook.measures.live import Live, completed, measured, middle, on_the_bench
from proofbook.measures.prompts import Prompt, load
from proofbook.model import Measure, Measurement, Probe

__all__ = ["Stability"]

#: Requests of a wave for each that is in flight: long enough that the load is even for most of the wave.
_WAVE = 3

#: At most so many waves between two looks, then it rests. WHY: on a simulated host answers take no time, and a window of
#: minutes would become ten thousands of requests. How much of the window was under load is told as ``busy_share``.
_WAVES_PER_LOOK = 8

_MOST_FAILED = 50


@dataclass
class _Window:
    """What has been seen so far."""

    until: datetime
    waves: int = 0
    asked: int = 0
    busy_s: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    watched: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ended_early: str = ""


@dataclass(frozen=True)
class Stability(Measure):
    """Load for ``minutes`` of the host's time; every ``every_s`` seconds a look at the unit and at ``watch``.

    It ends early when the server stops answering or its process is another one: then it did not hold.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    minutes: float = 10.0
    concurrency: int = 4
    every_s: float = 30.0
    watch: tuple[Probe[Any], ...] = ()
    template: str = "chatml"
    answer_s: float = 120.0
    name: ClassVar[str] = "serving.Stability"
    title: ClassVar[str] = "Does it hold under load?"

    def take(self, bench: Bench) -> Measurement:
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            window = _Window(live.started + timedelta(minutes=self.minutes))
            self._look(live, window, "before the load")
            prompts = load(self.template).endless()
            while not window.ended_early and bench.host.clock.now() < window.until:
                self._interval(live, window, prompts)
            lasted = (bench.host.clock.now() - live.started).total_seconds()
            return measured(
                self,
                live,
                unit="restarts",
                conditions={"minutes": self.minutes, "concurrency": self.concurrency, "deadline_s": self.answer_s},
                value=self._value(live, window, lasted),
            )

    def _interval(self, live: Live, window: _Window, prompts: Iterator[tuple[int, Prompt]]) -> None:
        """Waves of load, then a rest if there is time left, then a look."""
        clock = live.bench.host.clock
        due = min(clock.now() + timedelta(seconds=self.every_s), window.until)
        for _ in range(_WAVES_PER_LOOK):
            self._wave(live, window, prompts)
            if live.gone or clock.now() >= due:
                break
        rest = (due - clock.now()).total_seconds()
        if rest > 0 and not live.gone:
            clock.sleep(rest)
        minute = (clock.now() - live.started).total_seconds() / 60
        when = f"minute {minute:.1f}"
        self._look(live, window, when)
        if live.gone:
            window.ended_early = f"{when}: the server did not answer any more: {live.gone}"
        elif live.changes:
            window.ended_early = live.changes[0]
        done = len(completed(window.requests))
        live.bench.tell(f"{when} of {self.minutes:g}: {done} of {window.asked} requests answered")

    def _wave(self, live: Live, window: _Window, prompts: Iterator[tuple[int, Prompt]]) -> None:
        clock = live.bench.host.clock
        chosen = islice(prompts, self.concurrency * _WAVE)
        asks = [Ask.generate(prompt, round=number, level=self.concurrency) for number, prompt in chosen]
        began = clock.now()
        window.waves += 1
        window.asked += len(asks)
        window.requests += live.ask(f"wave {window.waves}", asks, at_once=self.concurrency, quiet=True)[0]
        window.busy_s += (clock.now() - began).total_seconds()

    def _look(self, live: Live, window: _Window, when: str) -> None:
        live.look(when)
        if not self.watch:
            return
        for probe, observation in live.bench.look(*self.watch).items():
            seen = {"at": observation.taken_at.isoformat(), "value": plain(observation.value), "unknown": observation.unknown}
            window.watched.setdefault(probe.name, []).append(seen)

    def _value(self, live: Live, window: _Window, lasted: float) -> dict[str, Any]:
        requests = window.requests
        third = len(requests) // 3
        lengths = [r["accept_length"] for r in completed(requests) if r["accept_length"] is not None]
        return {
            "minutes": self.minutes,
            "lasted_s": round(lasted, 3),
            "concurrency": self.concurrency,
            "every_s": self.every_s,
            "looks": len(live.lives),
            "ended_early": window.ended_early,
            "steady": live.steady(),
            "load": {
                "waves": window.waves,
                "asked": window.asked,
                "completed": len(completed(requests)),
                "tokens": sum(r["tokens"] for r in completed(requests)),
                "busy_share": round(window.busy_s / lasted, 4) if lasted > 0 else None,
                "s_per_token_first": middle(requests[:third], "s_per_token"),
                "s_per_token_last": middle(requests[-third:], "s_per_token") if third else None,
                "accept_length": middle(requests, "accept_length"),
                "lowest_accept_length": min(lengths, default=None),
                "requests_failed": [r for r in requests if not r["ok"]][:_MOST_FAILED],
            },
            "watched": window.watched,
        }

"""A live server under measurement: reached through a tunnel, asked with deadlines, watched for restarts meanwhile.

Shapes that stand in ``Measurement.value`` (JSON; None = not known, never a 0 in its place):

Request
    ``prompt`` ``kind`` ``round`` ``level`` · ``ok`` ``trouble`` ``problem`` ``http`` · ``prompt_tokens`` ``cached_tokens``
    ``tokens`` (generated) ``finish`` · ``e2e_s`` (the server's own time from arrival to end) ``client_s`` (real seconds here)
    ``s_per_token`` (``e2e_s / tokens``: queue, prefill and decode) · ``verify_ct`` (verify steps; None = speculation is off or no
    verify ran) ``accept_length`` (``tokens / verify_ct``) ``said_accept_length``
Life
    ``at`` ``known`` ``unknown`` ``active`` ``sub`` ``result`` ``main_pid`` ``invocation`` ``n_restarts`` of the unit
Steady
    ``steady`` (True, False, or None when a look had no answer) ``changes`` (sentences) ``lives``
Config
    what the server says of itself, see :data:`CONFIG`
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from proofbook.errors import CannotTell
from proofbook.host import Bench, WallClock
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.measures.client import Ask, Client, Reply
from proofbook.model import Measure, Measurement
from proofbook.probes.systemd import UnitState
from proofbook.redact import secret_name

__all__ = ["CONFIG", "Live", "completed", "measured", "middle", "on_the_bench", "request_of", "speculation_of", "took_part"]

#: Where a server listens when its address does not say.
_PORT = 30000

#: What is taken from the server's own account of its arguments; None where its version does not say.
CONFIG = (
    "version", "model_path", "served_model_name", "tp_size", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_model_path",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "mem_fraction_static", "max_running_requests",
    "mamba_strategy", "disable_overlap_schedule", "disable_radix_cache", "context_length",
)  # fmt: skip

#: After one of these a server is not asked the rest: it is gone, or each further request would end just like it.
_GONE = {"refused", "closed", "deadline", "unreachable", "not-asked", "unauthorized"}
#: HTTP statuses of a server that knows us not, or may not let us in.
_UNAUTHORIZED = (401, 403)

#: How long a server that broke off gets to be seen as dead (seconds of the host).
_DYING_S = 5.0

#: The server's own time may exceed what was waited for here by this factor (its clock and ours tick apart a little).
_CLOCKS_AGREE = 1.05
#: Of what was waited for here, the server's own time must be this part, but for so many seconds on the way.
_LEAST_OF_WAIT, _ON_THE_WAY_S = 0.5, 2.0
#: Drafts that are accepted in the last step may take an answer beyond what was asked for by about as many tokens.
_OVERSHOOT = 32


# ------------------------------------------------------------------------------------------------- reading answers


def request_of(reply: Reply) -> dict[str, Any]:
    """A Request from a reply to ``POST /generate``; an answer that cannot be read is trouble, not a traceback."""
    prompt = reply.ask.prompt
    said: dict[str, Any] = {
        "prompt": prompt.id if prompt else "",
        "kind": prompt.kind if prompt else "",
        "round": reply.ask.round,
        "level": reply.ask.level,
        "ok": False,
        "trouble": reply.trouble,
        "problem": reply.problem,
        "http": reply.http,
        **dict.fromkeys(("prompt_tokens", "cached_tokens", "tokens", "e2e_s", "s_per_token")),
        **dict.fromkeys(("verify_ct", "accept_length", "said_accept_length")),
        "finish": "",
        "client_s": round(reply.client_s, 6),
    }
    if reply.trouble:
        return said
    try:
        answer = reply.json()
    except ValueError:
        answer = None
    if reply.http != 200:
        trouble = "unauthorized" if reply.http in _UNAUTHORIZED else "http"
        return said | {"trouble": trouble, "problem": f"HTTP {reply.http}: {_message(answer, reply.body)}"}
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not isinstance(answer.get("text"), str):
        return said | {"trouble": "answer", "problem": "the answer is not one of /generate (no text, or no meta_info)"}
    return said | _believed(_read(meta), prompt.max_tokens if prompt else None)


def _believed(read: dict[str, Any], asked_for: int | None) -> dict[str, Any]:
    """A Request whose counts can be true; one that claims more tokens than were asked for is no answer to count with."""
    tokens = read["tokens"]
    if not read["ok"] or asked_for is None or tokens <= asked_for + _OVERSHOOT:
        return read
    problem = f"the server says that it generated {tokens} tokens where {asked_for} were asked for; its counts cannot be believed"
    nothing = dict.fromkeys(("tokens", "s_per_token", "accept_length"))
    return read | nothing | {"ok": False, "trouble": "answer", "problem": problem}


def _read(meta: Mapping[str, Any]) -> dict[str, Any]:
    finish = meta.get("finish_reason")
    how = str(finish.get("type", "")) if isinstance(finish, dict) else str(finish or "")
    tokens, e2e_s, verify = _count(meta, "completion_tokens"), _number(meta, "e2e_latency"), _count(meta, "spec_verify_ct")
    read = {
        "ok": True,
        "prompt_tokens": _count(meta, "prompt_tokens"),
        "cached_tokens": _count(meta, "cached_tokens"),
        "tokens": tokens,
        "finish": how,
        "e2e_s": e2e_s,
        "s_per_token": e2e_s / tokens if tokens and e2e_s is not None else None,
        "verify_ct": verify,
        "accept_length": tokens / verify if tokens and verify else None,
        "said_accept_length": _number(meta, "spec_accept_length"),
    }
    if how == "abort":
        message = str(finish.get("message", "")) if isinstance(finish, dict) else ""
        return read | {
            "ok": False,
            "trouble": "aborted",
            "problem": f"the server aborted it: {message[:300] or 'no reason given'}",
        }
    if not tokens:
        return read | {"ok": False, "trouble": "answer", "problem": "the answer has no token"}
    return read


def _count(meta: Mapping[str, Any], name: str) -> int | None:
    value = meta.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(meta: Mapping[str, Any], name: str) -> float | None:
    value = meta.get(name)
    # WHY a string of digits is none: it would be a format that nobody has read the meaning of. NaN is not equal to itself.
    good = isinstance(value, int | float) and not isinstance(value, bool) and value == value and 0 <= value < float("inf")
    return float(value) if good else None  # type: ignore[arg-type]


def _message(answer: Any, body: bytes) -> str:
    """The server's own words for an error: FastAPI says ``detail``, SGLang ``error.message`` or ``message``."""
    if isinstance(answer, dict):
        error = answer.get("error")
        told = error if isinstance(error, str) else answer.get("message") or answer.get("detail")
        found = error.get("message") if isinstance(error, dict) else told
        if found:
            return str(found)[:300]
    return body[:300].decode("utf-8", "backslashreplace").strip() or "no text"


def completed(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [r for r in requests if r["ok"]]


def middle(requests: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median of what the completed requests have under ``name``; None when none of them has it."""
    values = [r[name] for r in completed(requests) if r[name] is not None]
    return median(values) if values else None


def took_part(requests: Sequence[Mapping[str, Any]]) -> int | None:
    """All verify steps together; None when no completed request tells of any."""
    counts = [r["verify_ct"] for r in completed(requests) if r["verify_ct"] is not None]
    return sum(counts) if counts else None


def speculation_of(requests: Sequence[Mapping[str, Any]]) -> str:
    """``on`` when verify steps were counted, ``off`` when long enough answers tell of none, else ``unknown``.

    WHY long enough: the first token comes from the prefill, and an answer of one token never reaches a verify step.
    """
    if took_part(requests):
        return "on"
    return "off" if any(r["tokens"] >= 8 for r in completed(requests)) else "unknown"


# ------------------------------------------------------------------------------------------------------ a live server


class _Unreachable:
    """In place of a client when there is no way to the server: every request comes back unasked, with the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def all(self, asks: Sequence[Ask], **_: Any) -> Iterator[Reply]:
        yield from (Reply(ask, trouble="not-asked", problem=self._why) for ask in asks[:1])

    def one(self, ask: Ask, **_: Any) -> Reply:
        return Reply(ask, trouble="not-asked", problem=self._why)


@dataclass
class Live:
    """What a measure works with. Everything that is asked is kept as evidence; trouble collects in ``problems``."""

    bench: Bench
    service: ServiceSpec
    container: ContainerSpec | None
    client: Client | _Unreachable
    name: str
    started: datetime
    problems: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    gone: str = ""  # why the server is not asked any more
    refused: str = ""  # its words, when it wants an API key, or another one
    waited: bool = False  # for what became of a server that is gone

    # -------------------------------------------------------------------------------------------- the machine's side

    def look(self, when: str) -> dict[str, Any]:
        """How the unit is now; a difference to the look before is a change. ``when`` says after what."""
        if self.gone and not self.waited:
            # WHY: a process that is about to die still counts as running for a moment
            self.bench.host.clock.sleep(_DYING_S)
            self.waited = True
        probe = UnitState(self.service.name, self.container)
        observation = self.bench.look(probe)[probe]
        life: dict[str, Any] = {
            "at": observation.taken_at.isoformat(),
            "known": observation.known,
            "unknown": observation.unknown,
        }
        life |= dict.fromkeys(("active", "sub", "result", "main_pid", "invocation", "n_restarts"))
        if observation.value is not None:
            facts = observation.value
            life |= {"active": facts.active, "sub": facts.sub, "result": facts.result, "main_pid": facts.main_pid}
            life |= {"invocation": facts.invocation_id, "n_restarts": facts.n_restarts}
        else:
            self.problems.append(f"{when}: it cannot be told how {self.service.spec} is: {observation.unknown}")
        before = next((old for old in reversed(self.lives) if old["known"]), None)
        self.lives.append(life)
        if life["known"]:
            news = _news(before, life)
            self.changes += [f"{when}: {change}" for change in news]
            self.problems += [f"{when}: {change}" for change in news]
        return life

    def steady(self) -> dict[str, Any]:
        known = len(self.lives) > 1 and all(life["known"] for life in self.lives)
        return {"steady": False if self.changes else True if known else None, "changes": self.changes, "lives": self.lives}

    # --------------------------------------------------------------------------------------------- the server's side

    def ask(
        self, what: str, asks: Sequence[Ask], *, at_once: int, quiet: bool = False
    ) -> tuple[list[dict[str, Any]], list[Reply]]:
        """Ask all of it, ``at_once`` at a time: the Requests, and the replies that they were read from, in the same order.

        A server that refuses, hangs or goes away is not asked the rest: what was not sent is missing from both. ``quiet`` tells
        of trouble only.
        """
        if self.gone:
            return [], []
        replies: list[Reply] = []
        requests: list[dict[str, Any]] = []
        every = max(1, len(asks) // 4)
        try:
            for reply in self.client.all(asks, at_once=at_once, stop=lambda r: r.trouble in _GONE):
                replies.append(reply)
                requests.append(request_of(reply))
                if not requests[-1]["ok"]:
                    self.bench.tell(f"{what}: {requests[-1]['problem']}")
                elif not quiet and len(replies) % every == 0 and len(replies) < len(asks):
                    self.bench.tell(f"{what}: {len(replies)} of {len(asks)} answered")
        finally:
            if replies:
                self._keep(what, replies)
        self._judge(what, requests, len(asks))
        return requests, replies

    def _keep(self, what: str, replies: Sequence[Reply]) -> None:
        lines = b"".join(json.dumps(_raw(reply)).encode() + b"\n" for reply in replies)
        name = f"{self.name}-{len(self.evidence) + 1:02d}-{what.replace(' ', '-')}.jsonl"
        self.evidence.append(self.bench.keep(name, lines, f"{what}: every request and its answer as it came"))

    def _judge(self, what: str, requests: Sequence[dict[str, Any]], asked: int) -> None:
        bad = [r for r in requests if not r["ok"]]
        if bad:
            good = len(requests) - len(bad)
            self.problems.append(f"{what}: {good} of {asked} requests were answered; {bad[0]['prompt']}: {bad[0]['problem']}")
        self.gone = next((r["problem"] for r in bad if r["trouble"] in _GONE), "")
        self.refused = self.refused or next((r["problem"] for r in bad if r["trouble"] == "unauthorized"), "")
        # WHY only there: a simulated host's clock is not ours, so its seconds and ours need not agree.
        if isinstance(self.bench.host.clock, WallClock):
            timed = [r for r in requests if r["e2e_s"] is not None]
            longer = [r for r in timed if r["e2e_s"] > r["client_s"] * _CLOCKS_AGREE + 0.05]
            shorter = [r for r in timed if r["e2e_s"] + _ON_THE_WAY_S < r["client_s"] * _LEAST_OF_WAIT]
            for odd, than in ((longer, "longer"), (shorter, "far shorter")):
                if odd:
                    self.problems.append(
                        f"{what}: for {len(odd)} request(s) the server says that it took {than} than was waited for here "
                        f"(first: {odd[0]['e2e_s']:.3f} s against {odd[0]['client_s']:.3f} s); its times cannot be believed"
                    )
                for request in odd:  # no figure is made of them
                    request |= dict.fromkeys(("e2e_s", "s_per_token"))

    def flush(self) -> bool:
        """Empty the prefix cache, so that no prompt is answered from an earlier asking. False: the server did not say yes."""
        if self.gone:
            return False
        for _ in range(5):
            reply = self.client.one(Ask("/flush_cache", "POST"), answer_s=30)
            # WHY again: it is refused while a request is still being cleared away, which an answer does not wait for.
            if reply.http != 400:
                break
            self.bench.host.clock.sleep(1.0)
        return reply.ok

    def server_info(self) -> tuple[str, dict[str, Any] | None, str]:
        """The address, what the server says of itself there (None: nothing), and why not.

        It asks its scheduler for that, so one that is stuck does not answer. WHY without what is secret by its name: a server
        shows its API key among its arguments, and of these a digest is told.
        """
        # WHY both: /get_server_info is the older name, deprecated since 0.5.6
        for path in ("/server_info", "/get_server_info"):
            reply = self.client.one(Ask(path), answer_s=30)
            if reply.http != 404:
                break
        said = _parsed(reply)
        if reply.ok and isinstance(said, dict):
            self._keep("server info", [reply])
            return path, {name: value for name, value in said.items() if not secret_name(name)}, ""
        why = reply.problem or f"HTTP {reply.http}: {_message(said, reply.body)}"
        self.problems.append(f"{path}: {why}")
        if reply.http in _UNAUTHORIZED:
            self.gone = self.refused = why
        return path, None, why

    def config(self) -> dict[str, Any]:
        """What the server says of its arguments."""
        empty = {"endpoint": "", **dict.fromkeys((*CONFIG, "effective_max_running", "avg_accept_length")), "sha256": ""}
        if self.gone:
            return {"known": False, "unknown": self.gone, **empty}
        path, said, why = self.server_info()
        if said is None:
            return {"known": False, "unknown": why, **empty}
        return {"known": True, "unknown": "", **empty, "endpoint": path, **_config(said)}


def _parsed(reply: Reply) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def _news(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    news = []
    if now["active"] != "active" or now["sub"] != "running":
        news.append(f"the unit is {now['active']} ({now['sub']}), result {now['result']}")
    if before is None:
        return news
    for name, words in (("main_pid", "main process"), ("n_restarts", "automatic restarts")):
        if before[name] != now[name]:
            news.append(f"{words} {before[name]} -> {now[name]}")
    if before["invocation"] != now["invocation"]:
        news.append(f"invocation {before['invocation'][:8]} -> {now['invocation'][:8]}")
    return news


def _raw(reply: Reply) -> dict[str, Any]:
    """A reply as a line of evidence. The answer stands as text when it is UTF-8, which leaves no byte out, else in base64."""
    said: dict[str, Any] = {
        "method": reply.ask.method, "path": reply.ask.path, "body": reply.ask.body,
        "round": reply.ask.round, "level": reply.ask.level,
        "began": reply.began.isoformat() if reply.began else None, "client_s": round(reply.client_s, 6),
        "http": reply.http, "trouble": reply.trouble, "problem": reply.problem,
    }  # fmt: skip
    try:
        return said | {"answer": reply.body.decode("utf-8")}
    except UnicodeDecodeError:
        return said | {"answer_base64": base64.b64encode(reply.body).decode()}


def _config(said: Mapping[str, Any]) -> dict[str, Any]:
    listed = said.get("internal_states")
    states = [s for s in listed if isinstance(s, dict)] if isinstance(listed, list) else []
    arguments = {k: v for k, v in said.items() if k not in ("internal_states", "launch_command", "scheduler_info")}
    found = {name: value if isinstance(value := said.get(name), str | int | float | bool) else None for name in CONFIG}
    # WHY two names: --mamba-scheduler-strategy became --mamba-radix-cache-strategy in 0.5.14
    found["mamba_strategy"] = said.get("mamba_radix_cache_strategy", said.get("mamba_scheduler_strategy"))
    caps = [c for s in states if (c := _count(s, "effective_max_running_requests_per_dp"))]
    averages = [a for s in states if (a := _number(s, "avg_spec_accept_length")) is not None]
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return found | {
        "effective_max_running": min(caps, default=None),
        "avg_accept_length": min(averages, default=None),
        "sha256": hashlib.sha256(canonical.encode()).hexdigest(),
    }


# --------------------------------------------------------------------------------------------------------- opening


@contextmanager
def on_the_bench(
    measure: Measure, bench: Bench, service: ServiceSpec, container: ContainerSpec | None, answer_s: float
) -> Iterator[Live]:
    """The way to the service, open while a measure takes its numbers. A service that cannot be reached is a problem told.

    Raises TransportError when the machine itself is lost.
    """
    with ExitStack() as stack:
        client: Client | _Unreachable
        why = ""
        try:
            address, port = stack.enter_context(bench.tunnel(_port(service), container))
            client = stack.enter_context(Client(address, port, bench.host.clock, answer_s, key=bench.key(service)))
        except CannotTell as error:
            why = f"there is no way to the service's port: {error}"
            client = _Unreachable(why)
        live = Live(bench, service, container, client, measure.name, bench.host.clock.now())
        if why:
            live.problems.append(why)
        yield live


def _port(service: ServiceSpec) -> int:
    return urlsplit(service.url).port or _PORT


def measured(measure: Measure, live: Live, *, unit: str, conditions: Mapping[str, Any], value: Mapping[str, Any]) -> Measurement:
    """The Measurement of what was done on the bench."""
    return Measurement(
        name=measure.name,
        title=measure.title,
        unit=unit,
        conditions={"service": live.service.spec, **conditions},
        value=value,
        taken_at=live.started,
        took_s=round((live.bench.host.clock.now() - live.started).total_seconds(), 3),
        problems=tuple(dict.fromkeys(live.problems)),
        evidence=tuple(live.evidence),
    )

"""One SGLang server without I/O: how it starts, what it answers and how long that takes, what it prints, and how it breaks.

Whoever runs it brings the clock, the port and the processes::

    server = Server(argv, environ, "0.5.9")
    for second, text in server.startup(): ...        # print it at that second after the start
    if server.ends: ...                              # the start fails: how, and when
    reply = server.answer("POST", "/generate", body, running=2, age_s=12.5)
    # let reply.seconds pass, print reply.log, carry out reply.effects, send the answer

A ``Server`` holds plain data, and can be pickled with the machine that runs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import arguments, faults, memory, startlog, words
from .arguments import BadArguments, Refused, Resolved
from .memory import Budget, NoMemory

__all__ = ["Effect", "End", "Reply", "Server"]

_SRT = "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt"

#: Seconds of one decode step of the target alone, of one request; what each further request adds to it (a share).
_STEP_S, _STEP_SLOPE = 0.0118, 0.055
#: What a speculative step takes, in steps of the target alone: one request, and each further one.
_OVERHEAD, _OVERHEAD_SLOPE = 2.15, 0.05
_PREFILL_S, _PREFILL_TOKENS_S = 0.06, 9000.0
#: How much less likely a draft is accepted when the answer is drawn, not greedy.
_DRAWN = 0.08

_HEALTH = ("/health", "/health_generate")


@dataclass(frozen=True, slots=True)
class End:
    """How the main process ends: ``after_s`` from the start, by itself with ``status``, or killed by the signal ``status``."""

    after_s: float
    killed: bool
    status: int


@dataclass(frozen=True, slots=True)
class Effect:
    """What befalls the processes. ``kind``: ``die`` (the main process is killed with SIGKILL, its children end with it) ·
    ``rank-dies`` (the scheduler ``rank`` is gone, the rest stays). ``lines``: what is printed then.
    """

    after_s: float
    kind: str
    rank: int = 0
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class Reply:
    """An answer. ``seconds`` until its last byte; ``hangs``: it never comes; ``chunks``: (second, bytes) of a stream."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    body: bytes = b""
    seconds: float = 0.002
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    hangs: bool = False


@dataclass(slots=True)
class _Generation:
    """One request for tokens, whatever address it came by."""

    prompt: str
    most: int
    temperature: float = 1.0
    ignore_eos: bool = False
    stream: bool = False
    schema: Mapping[str, Any] | None = None
    pattern: str = ""
    call: Mapping[str, Any] | None = None  # the tool that must be called

    @property
    def constrained(self) -> bool:
        return self.schema is not None or bool(self.pattern) or self.call is not None


@dataclass(slots=True)
class _Done:
    """What a generation came to."""

    tokens: list[str]
    text: str
    stopped: bool
    prompt_tokens: int
    cached: int
    steps: int
    prefill_s: float
    total_s: float


@dataclass(slots=True)
class Server:
    """One server process with its ranks.

    ``faults``: name → parameters, see :mod:`faults`. ``free_gib``: memory that is free on each GPU when it starts, () for idle
    cards. ``cuda_error``: the last line of the traceback with which any CUDA program ends there. ``ready_s``: how long a start
    takes in which nothing is wrong. ``seed`` colours the noise of its speed. ``age_s``: how long it has run, as last told.
    ``pace``: seconds of this model in one of the clock that its clients have; what it says of its own times is in theirs.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    version: str = "0.5.10"
    faults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    free_gib: tuple[float, ...] = ()
    ready_s: float = startlog.NOMINAL
    seed: str = ""
    cuda_error: str = ""
    pace: float = 1.0
    resolved: Resolved | None = None
    budget: Budget | None = None
    ends: End | None = None
    stuck: bool = False
    requests: int = 0
    age_s: float = 0.0
    _bad: str = ""
    _biting: dict[str, dict[str, Any]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _decode_steps: int = 0
    _accepted: float = 0.0
    _verified: int = 0
    _logged: tuple[float, int] = (0.0, 0)
    _rate: float = 0.0
    _generated: int = 0
    _failure: list[str] = field(default_factory=list)
    _stage: str = ""

    def __post_init__(self) -> None:
        try:
            given = arguments.parse(self.argv, self.version)
            self.resolved = arguments.resolve(given, self.environ, self.version)
        except BadArguments as error:
            self._bad, self.ends = str(error), End(6.2 * self._unit, False, 2)
            return
        except Refused as error:
            self._failure = arguments.traceback_of(str(error))
            self.ends = End(9.6 * self._unit, False, 1)
            return
        self._biting = faults.taken(self.faults, speculative=self.resolved.speculative)
        if self._has("slow-start"):
            self.ready_s *= float(self._biting["slow-start"]["factor"])
        self._divide_memory(self.resolved)

    # ------------------------------------------------------------------------------------------- start

    @property
    def _unit(self) -> float:
        return self.ready_s / startlog.NOMINAL

    def _has(self, fault: str) -> bool:
        return fault in self._biting

    def _divide_memory(self, resolved: Resolved) -> None:
        extra = float(self._biting.get("not-enough-memory", {}).get("extra_gib", 0.0))
        other = float(self._biting.get("draft-oom", {}).get("other_gib", 0.0))
        try:
            self.budget = memory.budget(resolved, self.free_gib, extra=extra, other_at_draft=other)
        except NoMemory as error:
            self.budget = error.budget
            self._fails(resolved, error.stage, str(error))
        if self.cuda_error:
            self._fails(resolved, "init", self.cuda_error)
        elif self._has("out-of-memory"):
            self._fails(resolved, "weights", _TOO_BIG)

    def _fails(self, resolved: Resolved, stage: str, reason: str) -> None:
        """The start ends in a stage: every rank says so, and the main process kills itself."""
        second = {"init": 16.0, "weights": 22.0, "pools": 30.0, "draft": 32.4}[stage]
        self._stage = stage
        self._failure = [*_exception(reason, resolved.tp_size), _CHILD_FAILED]
        self.ends = End((second + 0.6) * self._unit, True, 9)

    @property
    def speculative(self) -> bool:
        """Whether the arguments ask for speculation."""
        return self.resolved is not None and self.resolved.speculative

    @property
    def drafting(self) -> bool:
        """Whether drafts are really made."""
        return self.speculative and not self._has("silently-off")

    @property
    def port(self) -> int:
        return int(self.resolved.args["port"]) if self.resolved else 30000

    @property
    def listens_after_s(self) -> float | None:
        """When the port opens; None when it never does."""
        if self.ends or self.hangs_at_start:
            return None
        return startlog.LISTENS * self._unit

    @property
    def ready_after_s(self) -> float | None:
        """When it is ready; None when it never is."""
        return None if self.listens_after_s is None else startlog.READY * self._unit

    @property
    def hangs_at_start(self) -> bool:
        no_p2p = self.environ.get("NCCL_P2P_DISABLE") == "1"
        return self._has("hang-at-graphs") or (self._has("p2p-hang") and not no_p2p)

    @property
    def tp_size(self) -> int:
        return self.resolved.tp_size if self.resolved else 0

    @property
    def max_running(self) -> int:
        """How many requests really run at once."""
        return self.budget.max_running if self.budget else 0

    @property
    def used_mib(self) -> int:
        """What one scheduler takes of its GPU when the server is up."""
        return memory.used_mib(self.budget) if self.budget else 0

    @property
    def ranks_after_s(self) -> float | None:
        """When the schedulers and the detokenizer are there; None when the launcher ends before."""
        return None if self.resolved is None else 11.0 * self._unit

    @property
    def fills_after_s(self) -> float:
        """When the weights take their memory."""
        return 20.0 * self._unit

    def startup(self) -> Iterator[tuple[float, str]]:
        """(seconds after the start, text) of everything that is printed until it is ready, hangs, or ends.

        A text may have several lines. Where the arguments were refused (``resolved`` is None) the texts carry no date.
        """
        if self._bad:
            for line in self._bad.splitlines():
                yield 6.1 * self._unit, line
            return
        if self.resolved is None or self.budget is None:
            for line in self._failure:
                yield 9.5 * self._unit, line
            return
        ends = self.ends.after_s - 0.6 * self._unit if self.ends else math.inf
        for second, text in startlog.start(self.resolved, self.budget, drafts=self.drafting):
            if second * self._unit > ends or self._waits_before(text) or self._not_reached(text):
                break
            yield second * self._unit, text
        for line in self._failure if self.ends else ():
            yield ends, line

    def _waits_before(self, text: str) -> bool:
        """Whether a start that hangs never comes to this line."""
        if not self.hangs_at_start:
            return False
        return ("Init torch distributed ends" if self._has("p2p-hang") else "raph end.") in text

    def _not_reached(self, text: str) -> bool:
        """Whether a start that runs out of memory never comes to this line."""
        marks = {"init": "distributed ends", "weights": "Load weight end", "pools": "Mamba Cache", "draft": startlog.DRAFT_CLASS}
        return self._stage in marks and marks[self._stage] in text

    def stopping(self) -> list[tuple[float, str]]:
        """What it prints after SIGTERM; the last second is when its main process ends."""
        return [
            (0.0, "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."),
            (5.0, "Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[]."),
        ]

    def port_taken(self) -> tuple[list[str], End]:
        """What it prints when somebody else owns its port, and how it then ends."""
        where = (self.resolved.args["host"] if self.resolved else "0.0.0.0", self.port)
        lines = [
            f"ERROR:    [Errno 98] error while attempting to bind on address {where!r}: address already in use",
            "INFO:     Waiting for application shutdown.",
            "INFO:     Application shutdown complete.",
        ]
        return lines, End(startlog.LISTENS * self._unit, False, 1)

    def background(self) -> list[Effect]:
        """What befalls it by itself, ``after_s`` from the moment it is ready."""
        if not self._has("crash-after-minutes"):
            return []
        lines = (*_exception("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", self.tp_size), _QUIT)
        return [Effect(60.0 * float(self._biting["crash-after-minutes"]["minutes"]), "die", lines=lines)]

    def rank_lost(self, rank: int) -> list[Effect]:
        """What follows when a scheduler is gone: from 0.5.10 a watchdog ends the server, before nobody does."""
        self.stuck = True
        if arguments.version_of(self.version) < (0, 5, 10):
            return []
        line = f"Subprocess scheduler_{rank} crashed with exit code -9. Triggering SIGQUIT for cleanup..."
        return [Effect(1.0, "die", lines=(line, _QUIT))]

    # ------------------------------------------------------------------------------------------ answers

    def answer(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        running: int = 1,
        ready: bool = True,
        client: str = "127.0.0.1:40212",
        age_s: float = 0.0,
        authorization: str = "",
    ) -> Reply:
        """Answer one request. ``running``: how many requests for tokens are under way, this one included."""
        bare, self.age_s = path.partition("?")[0], age_s
        reply = self._refuse(method, bare, authorization) or self._route(method, bare, body, max(1, running), ready=ready)
        if not reply.hangs and not any(e.kind == "die" for e in reply.effects):
            known = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
            reason = known.get(reply.status, "")
            access = f'INFO:     {client} - "{method} {path} HTTP/1.1" {reply.status} {reason or "Service Unavailable"}'
            reply.log.append((reply.seconds, access))
        return reply

    def _refuse(self, method: str, path: str, authorization: str) -> Reply | None:
        """What one gets who does not bring the key. Health and metrics are open to everybody; emptying the cache is for an admin,
        where there is one."""
        if self.resolved is None or method == "OPTIONS" or path.startswith(("/health", "/metrics")):
            return None
        if path.startswith("/ready") and self.resolved.version >= (0, 5, 20):
            return None
        admin = self.resolved.args.get("admin_api_key") if path == "/flush_cache" else None
        key = admin or self.resolved.args["api_key"]
        kind, _, brought = authorization.partition(" ")
        # WHY: the check was a comparison of the whole header until 0.5.7
        named = kind == "Bearer" if self.resolved.version < (0, 5, 8) else kind.lower() == "bearer"
        if not key or (named and brought == key):
            return None
        return Reply(status=401, body=json.dumps({"error": "Unauthorized"}, separators=(",", ":")).encode())

    def _route(self, method: str, path: str, body: bytes, running: int, *, ready: bool) -> Reply:
        if self.resolved is None:
            return _problem(503, "not running")
        if path in _HEALTH or (path == "/ready" and self.resolved.version >= (0, 5, 20)):
            return self._health(ready=ready)
        if path in ("/get_model_info", "/model_info"):
            return _json(self._model_info())
        if path in ("/get_server_info", "/server_info"):
            return Reply(hangs=True) if self.stuck else _json(self.server_info(), 0.02)
        if path == "/v1/models":
            name = self.resolved.args["served_model_name"]
            entry = {"id": name, "object": "model", "owned_by": "sglang", "root": name, "max_model_len": self._context}
            return _json({"object": "list", "data": [entry]})
        if path == "/v1/loads" and self.resolved.version >= (0, 5, 8):
            return _json({"loads": [{"dp_rank": 0, "num_running_reqs": running - 1, "num_waiting_reqs": 0}]})
        if path == "/metrics" and self.resolved.args["enable_metrics"]:
            return Reply(headers={"content-type": "text/plain; version=0.0.4"}, body=self._metrics(running - 1).encode())
        if path == "/flush_cache":
            return self._flush()
        if path in ("/generate", "/v1/chat/completions", "/v1/completions"):
            return self._asked(method, path, body, running)
        return _problem(404, "Not Found")

    @property
    def _context(self) -> int:
        given = self.resolved.args["context_length"] if self.resolved else None
        return int(given or memory.CONTEXT)

    def _health(self, *, ready: bool) -> Reply:
        """One token that never comes to a verify step: it says nothing about speculation."""
        plain = Reply(headers={"content-type": "text/plain"}, seconds=1.0)
        constant = not arguments.truth(self.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"), True)
        if not ready:
            plain.status, plain.seconds = 503, 0.002
        elif self.stuck and not (constant or self._has("hang-health-200")):
            plain.status, plain.seconds = 503, 20.0
            text = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time:"
            plain.log.append((20.0, text))
        return plain

    def _model_info(self) -> dict[str, Any]:
        assert self.resolved is not None
        info: dict[str, Any] = {
            "model_path": self.resolved.args["model_path"],
            "tokenizer_path": self.resolved.args["tokenizer_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": True,
            "has_audio_understanding": False,
        }
        if self.resolved.version >= (0, 5, 20):
            info |= {"architectures": [startlog.TARGET], "served_model_name": self.resolved.args["served_model_name"]}
        return info

    def server_info(self) -> dict[str, Any]:
        """The resolved arguments and the state of the scheduler, as ``/server_info`` shows them."""
        assert self.resolved is not None and self.budget is not None
        state: dict[str, Any] = {
            "last_gen_throughput": round(self._rate, 2),
            "memory_usage": {
                "weight": round(self.budget.weights + self.budget.draft, 2),
                "kvcache": round(self.budget.kv, 2),
                "token_capacity": self.budget.tokens,
                "graph": memory.GRAPHS,
            },
            "effective_max_running_requests_per_dp": self.budget.max_running,
        }
        if self.drafting and self._logged[1]:
            state["avg_spec_accept_length"] = self._logged[0] / self._logged[1]
        info = {**self.resolved.args, "status": "ready", "max_total_num_tokens": self.budget.tokens, "internal_states": [state]}
        if self.resolved.version >= (0, 5, 20):
            info["launch_command"] = " ".join(self.argv)
        return {**info, "version": self.version}

    def _flush(self) -> Reply:
        self._seen.clear()
        self._logged, self._accepted, self._verified = (0.0, 0), 0.0, 0
        text = (
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )
        log = [(0.01, "TP0] Cache flushed successfully!")]
        return Reply(headers={"content-type": "text/plain"}, body=text.encode(), seconds=0.02, log=log)

    def _metrics(self, running: int) -> str:
        """The gauges of speculation exist with value 0 when it is off: their presence proves nothing."""
        assert self.resolved is not None
        version, length = self.resolved.version, self._logged[0] / self._logged[1] if self._logged[1] else 0.0
        gauges: dict[str, float] = {
            "num_running_reqs": running,
            "num_queue_reqs": max(0, running - self.max_running),
            "gen_throughput": round(self._rate, 2),
            "token_usage": 0.01 * running,
            "mamba_usage": 0.02 * running,
        }
        if version >= (0, 5, 4):
            gauges["spec_accept_rate"] = round(self._accept_rate(length), 3)
        else:
            gauges["spec_accept_length"] = round(length, 3)
        if version >= (0, 5, 13):
            gauges |= {"spec_num_steps": self.resolved.steps, "spec_num_draft_tokens": self.resolved.draft_tokens}
        name = self.resolved.args["served_model_name"]
        lines = [f'# TYPE sglang:{k} gauge\nsglang:{k}{{model_name="{name}"}} {v}' for k, v in gauges.items()]
        counters = {"generation_tokens_total": self._generated}
        if version >= (0, 5, 13):
            counters["spec_verify_calls_total"] = self._verified
        lines += [f'# TYPE sglang:{k} counter\nsglang:{k}{{model_name="{name}"}} {v}' for k, v in counters.items()]
        return "\n".join(lines) + "\n"

    def _accept_rate(self, length: float) -> float:
        """What releases call the rate: of all draft tokens with the bonus until 0.5.10, of the drafted ones alone since."""
        assert self.resolved is not None
        if not length or not self.resolved.draft_tokens:
            return 0.0
        if self.resolved.version < (0, 5, 11):
            return length / self.resolved.draft_tokens
        return (length - 1) / max(self.resolved.draft_tokens - 1, 1)

    # --------------------------------------------------------------------------------------- generation

    def _asked(self, method: str, path: str, body: bytes, running: int) -> Reply:
        if method != "POST":
            return _problem(405, "Method Not Allowed")
        try:
            asked = json.loads(body)
            made = _native(asked) if path == "/generate" else _openai(asked)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _problem(400, f"the request cannot be read: {error}")
        if self.stuck:
            return Reply(hangs=True)
        self.requests += 1
        broken = self._breaks(made)
        if broken is not None:
            return broken
        done, log = self._generate(made, running)
        reply = Reply(seconds=done.total_s, log=log)
        if path == "/generate":
            self._native_answer(reply, made, done)
        else:
            self._openai_answer(reply, made, done, asked, chat=path.endswith("chat/completions"))
        return reply

    def _breaks(self, made: _Generation) -> Reply | None:
        """Whether this request is the one that breaks the server."""
        n, speed = self.requests, 0.4
        crash = (
            (self._has("crash-on-first-request") and n >= 1)
            or (self._has("crash-on-structured") and made.constrained)
            or (self._has("crash-on-nth") and n >= int(self._biting["crash-on-nth"]["n"]))
        )
        if crash:
            why = "TypeError: 'NoneType' object cannot be interpreted as an integer"
            self.stuck = True
            effect = Effect(speed, "die", lines=(*_exception(why, self.tp_size, "set_mamba_track_indices_from_reqs"), _QUIT))
            return Reply(hangs=True, seconds=speed, effects=[effect])
        if self._has("zombie-scheduler") and n >= int(self._biting["zombie-scheduler"]["n"]):
            rank = int(self._biting["zombie-scheduler"]["rank"])
            self.stuck = True
            return Reply(hangs=True, seconds=speed, effects=[Effect(speed, "rank-dies", rank=rank), *self.rank_lost(rank)])
        if self._has("hang-health-200") and n >= int(self._biting["hang-health-200"]["n"]):
            self.stuck = True
            assert self.resolved is not None
            limit = float(self.resolved.args["watchdog_timeout"])
            line = f"TP0] Scheduler watchdog timeout (self.watchdog_timeout={limit:g}, self.soft=False)"
            return Reply(hangs=True, effects=[Effect(limit + 5.0, "die", lines=(line, _QUIT))])
        return None

    def _generate(self, made: _Generation, running: int) -> tuple[_Done, list[tuple[float, str]]]:
        assert self.resolved is not None
        prompt_tokens = max(1, len(words.tokens_of(made.prompt)))
        cached = prompt_tokens - 1 if made.prompt in self._seen and not self.resolved.args["disable_radix_cache"] else 0
        self._seen.add(made.prompt)
        tokens, stopped = self._tokens(made, cached)
        accept = self._accept_length(made)
        steps = max(1, round(len(tokens) / accept)) if self.drafting else len(tokens)
        at_once = min(running, max(1, self.max_running))
        prefill = _PREFILL_S + (prompt_tokens - cached) / _PREFILL_TOKENS_S
        decode = steps * self._step_seconds(at_once, made)
        queued = max(0, running - at_once) / at_once * (prefill + decode)
        done = _Done(tokens, "".join(tokens).strip(), stopped, prompt_tokens, cached, steps, prefill, prefill + decode + queued)
        return done, self._count(done, running, at_once)

    def _tokens(self, made: _Generation, cached: int) -> tuple[list[str], bool]:
        if made.call is not None:
            text = words.structured(made.call.get("parameters") or {"type": "object"}, made.prompt)
        elif made.schema is not None:
            text = words.structured(made.schema, made.prompt)
        elif made.pattern:
            text = words.matching(made.pattern, words.random_of("pattern", made.prompt))
        else:
            return words.answer_tokens(made.prompt, made.most, ignore_eos=made.ignore_eos, variant=self._variant(made, cached))
        tokens = words.tokens_of(text)
        return tokens[: made.most], len(tokens) <= made.most

    def _variant(self, made: _Generation, cached: int) -> str:
        """What makes this answer another than the greedy one; "" when nothing does."""
        if self.drafting and self.environ.get("SGLANG_SIMULATE_ACC_LEN"):
            return "accepted without being verified"
        if cached and self._has("wrong-after-cache-hit"):
            return "a state of another request"
        return f"drawn {self.requests}" if made.temperature > 0 else ""

    def _accept_length(self, made: _Generation) -> float:
        """Tokens a verify step: the bonus one, and as many drafts in a row as are right."""
        assert self.resolved is not None
        simulated = self.environ.get("SGLANG_SIMULATE_ACC_LEN", "")
        if simulated.replace(".", "", 1).isdigit() and float(simulated) > 0:
            return float(simulated)
        if self._has("draft-weights-missing"):
            return 1.0
        likely = words.ACCEPT["json" if made.constrained else words.kind_of(made.prompt)]
        likely -= _DRAWN if made.temperature > 0 else 0.0
        return sum(likely**i for i in range(self.resolved.steps + 1))

    def _step_seconds(self, at_once: int, made: _Generation) -> float:
        step = _STEP_S * (1 + _STEP_SLOPE * (at_once - 1))
        if self._has("grown-slow") and self.age_s >= 3600 * float(self._biting["grown-slow"]["after_hours"]):
            step *= float(self._biting["grown-slow"]["factor"])
        if self.drafting:
            overhead = float(self._biting.get("slower-than-before", {}).get("overhead", _OVERHEAD))
            slope = float(self._biting.get("gain-only-low-concurrency", {}).get("slope", _OVERHEAD_SLOPE))
            step *= overhead + slope * (at_once - 1)
        noise = words.random_of("noise", self.seed, made.prompt, at_once, self.requests).uniform(-0.012, 0.012)
        return step * (1 + noise)

    def _count(self, done: _Done, running: int, at_once: int) -> list[tuple[float, str]]:
        """Advance the scheduler's counters; the lines that it prints meanwhile."""
        assert self.resolved is not None
        count, usage = len(done.tokens), 0.01 * at_once
        self._generated += count
        decode_s = max(done.total_s - done.prefill_s, 1e-6)
        self._rate = count * at_once / decode_s
        log = [
            (
                done.prefill_s,
                f"TP0] Prefill batch, #new-seq: 1, #new-token: {done.prompt_tokens - done.cached}, #cached-token: {done.cached}, "
                f"full token usage: {usage:.2f}, mamba usage: {usage:.2f}, #running-req: {at_once - 1}, "
                f"#queue-req: {running - at_once}",
            )
        ]
        if self.drafting:
            self._accepted, self._verified = self._accepted + count, self._verified + done.steps
        before, interval = self._decode_steps, int(self.resolved.args["decode_log_interval"])
        self._decode_steps += max(1, round(done.steps / at_once))
        for crossing in range(before // interval + 1, self._decode_steps // interval + 1):
            share = (crossing * interval - before) / (self._decode_steps - before)
            log.append((done.prefill_s + share * decode_s, self._decode_line(done, running, at_once, usage)))
            self._logged = (self._accepted, self._verified)
        return log

    def _decode_line(self, done: _Done, running: int, at_once: int, usage: float) -> str:
        spec = ""
        if self.drafting:
            length = len(done.tokens) / done.steps
            spec = f"accept len: {length:.2f}, accept rate: {self._accept_rate(length):.2f}, "
        tokens = done.prompt_tokens + len(done.tokens)
        return (
            f"TP0] Decode batch, #running-req: {at_once}, #full token: {tokens * at_once}, full token usage: {usage:.2f}, "
            f"mamba num: {2 * at_once}, mamba usage: {usage:.2f}, {spec}cuda graph: True, "
            f"gen throughput (token/s): {self._rate:.2f}, #queue-req: {running - at_once}"
        )

    # ---------------------------------------------------------------------------------- shapes of answers

    def meta_info(self, done: _Done) -> dict[str, Any]:
        """What ``/generate`` says about one answer; the names of what was accepted differ by release."""
        assert self.resolved is not None
        version, count = self.resolved.version, len(done.tokens)
        reason = {"type": "stop", "matched": 248046} if done.stopped else {"type": "length", "length": count}
        info: dict[str, Any] = {
            "id": f"{words.random_of(self.seed, self.requests).getrandbits(128):032x}",
            "finish_reason": reason,
            "prompt_tokens": done.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": count,
            "cached_tokens": done.cached,
            "e2e_latency": done.total_s / self.pace,
        }
        if not self.drafting or count < 2:  # one token ends in the prefill: no verify step ran
            return info
        drafted, right = done.steps * (self.resolved.draft_tokens - 1), max(0, count - done.steps)
        length = count / done.steps
        info["spec_verify_ct"] = done.steps
        if version >= (0, 5, 5):
            info |= {"spec_accept_length": length, "spec_accept_rate": self._accept_rate(length)}
        if (0, 5, 6) <= version < (0, 5, 11):
            info |= {"spec_accept_token_num": right, "spec_draft_token_num": done.steps * self.resolved.draft_tokens}
        if (0, 5, 9) <= version < (0, 5, 11):
            info["spec_accept_histogram"] = _histogram(done.steps, right, self.resolved.steps)
        if (0, 5, 11) <= version <= (0, 5, 20, 9):
            info |= {"spec_accepted_drafts": right, "spec_proposed_drafts": drafted}
        if version >= (0, 5, 12):
            info |= {"spec_num_correct_drafts": right, "spec_num_proposed_drafts": drafted}
            info["spec_correct_drafts_histogram"] = _histogram(done.steps, right, self.resolved.steps)
        return info

    def _native_answer(self, reply: Reply, made: _Generation, done: _Done) -> None:
        meta = self.meta_info(done)
        if not made.stream:
            reply.body = json.dumps({"text": done.text, "output_ids": _ids(done.tokens), "meta_info": meta}).encode()
            return
        size = max(1, round(len(done.tokens) / done.steps))
        for end in range(size, len(done.tokens) + size, size):
            part = done.tokens[:end]
            partial = {**meta, "completion_tokens": len(part), "e2e_latency": self._second(done, len(part)) / self.pace}
            if len(part) < len(done.tokens):
                partial["finish_reason"] = None
            data = {"text": "".join(part).strip(), "output_ids": _ids(part), "meta_info": partial}
            reply.chunks.append((self._second(done, len(part)), b"data: " + json.dumps(data).encode() + b"\n\n"))
        self._end_stream(reply, done)

    @staticmethod
    def _second(done: _Done, tokens: int) -> float:
        return done.prefill_s + (done.total_s - done.prefill_s) * tokens / max(len(done.tokens), 1)

    @staticmethod
    def _end_stream(reply: Reply, done: _Done) -> None:
        reply.headers = {"content-type": "text/event-stream; charset=utf-8"}
        reply.chunks.append((done.total_s, b"data: [DONE]\n\n"))
        reply.body = b"".join(data for _, data in reply.chunks)

    def _openai_answer(self, reply: Reply, made: _Generation, done: _Done, asked: dict[str, Any], *, chat: bool) -> None:
        meta = self.meta_info(done)
        common = {"id": meta["id"], "created": 1767225600, "model": asked.get("model", "default")}
        finish = "tool_calls" if made.call else "stop" if done.stopped else "length"
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "total_tokens": done.prompt_tokens + len(done.tokens),
            "completion_tokens": len(done.tokens),
            "prompt_tokens_details": {"cached_tokens": done.cached},
        }
        if made.stream:
            self._openai_stream(reply, made, done, {**common, "usage": usage}, chat=chat)
            return
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": done.text, "reasoning_content": None, "tool_calls": None}
            if made.call:
                call = {"name": made.call["name"], "arguments": done.text}
                tool = {"id": f"call_{meta['id'][:24]}", "index": 0, "type": "function", "function": call}
                choice["message"] |= {"content": None, "tool_calls": [tool]}
        else:
            choice["text"] = done.text
        kind = "chat.completion" if chat else "text_completion"
        reply.body = json.dumps({**common, "object": kind, "choices": [choice], "usage": usage, "metadata": meta}).encode()

    def _openai_stream(self, reply: Reply, made: _Generation, done: _Done, common: dict[str, Any], *, chat: bool) -> None:
        size = max(1, round(len(done.tokens) / done.steps))
        kind = "chat.completion.chunk" if chat else "text_completion"
        usage = common.pop("usage")
        for start in range(0, len(done.tokens), size):
            part = done.tokens[start : start + size]
            last = start + size >= len(done.tokens)
            piece = {"delta": {"role": "assistant", "content": "".join(part)}} if chat else {"text": "".join(part)}
            choice = {"index": 0, **piece, "finish_reason": ("stop" if done.stopped else "length") if last else None}
            data = {**common, "object": kind, "choices": [choice], "usage": usage if last else None}
            reply.chunks.append((self._second(done, start + len(part)), b"data: " + json.dumps(data).encode() + b"\n\n"))
        self._end_stream(reply, done)


# ------------------------------------------------------------------------------------------------- helpers

_TOO_BIG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.87 GiB. "
    "GPU 0 has a total capacity of 94.97 GiB of which 7.41 GiB is free."
)
#: What the main process prints when a scheduler failed: while it starts, and when it runs.
_CHILD_FAILED = "Received sigquit from a child process. It usually means the child failed."
_QUIT = "SIGQUIT received. signum=None, frame=None. It usually means one child failed."


def _exception(reason: str, ranks: int, where: str = "__init__") -> list[str]:
    """What schedulers print that end with ``reason``: one text of several lines each, of which the first alone is dated."""
    return [
        f"TP{rank}] Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{_SRT}/managers/scheduler.py", line 2937, in run_scheduler_process\n'
        f'  File "{_SRT}/model_executor/model_runner.py", line 663, in {where}\n'
        f"{reason}\n"
        for rank in range(max(ranks, 1))
    ]


def _histogram(steps: int, right: int, most: int) -> list[int]:
    """How many verify steps accepted 0, 1, … drafts: all near the mean, and adding up."""
    counts = [0] * (most + 1)
    low = min(right // steps, most)
    high = right - low * steps if low < most else 0
    counts[low] += steps - high
    if high:
        counts[min(low + 1, most)] += high
    return counts


def _ids(tokens: Sequence[str]) -> list[int]:
    return [sum(t.encode()) % 248000 + 300 for t in tokens]


def _json(value: object, seconds: float = 0.002) -> Reply:
    return Reply(body=json.dumps(value).encode(), seconds=seconds)


def _problem(status: int, text: str) -> Reply:
    return Reply(status=status, body=json.dumps({"detail": text}).encode())


def _native(asked: Mapping[str, Any]) -> _Generation:
    """A request to ``/generate``; one prompt, as text or as ids."""
    params = asked.get("sampling_params") or {}
    prompt = asked["text"] if asked.get("text") is not None else json.dumps(asked["input_ids"])
    if not isinstance(prompt, str):
        raise TypeError("one prompt a request, please")
    schema = params.get("json_schema")
    return _Generation(
        prompt=prompt,
        most=int(params.get("max_new_tokens", 128)),
        temperature=float(params.get("temperature", 1.0)),
        ignore_eos=bool(params.get("ignore_eos")),
        stream=bool(asked.get("stream")),
        schema=json.loads(schema) if isinstance(schema, str) else schema,
        pattern=str(params.get("regex") or ""),
    )


def _openai(asked: Mapping[str, Any]) -> _Generation:
    """A request to one of the OpenAI addresses."""
    form = asked.get("response_format") or {}
    schema = (form.get("json_schema") or {}).get("schema") if form.get("type") == "json_schema" else None
    if form.get("type") == "json_object":
        schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    return _Generation(
        prompt=str(asked["prompt"]) if "prompt" in asked else _chat_text(asked["messages"]),
        most=int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 512),
        temperature=float(asked.get("temperature", 0.6)),
        ignore_eos=bool(asked.get("ignore_eos")),
        stream=bool(asked.get("stream")),
        schema=schema,
        pattern=str(asked.get("regex") or ""),
        call=_wanted_call(asked),
    )


def _chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = " ".join(str(piece.get("text", "")) for piece in content)
        parts.append(f"<|im_start|>{message.get('role', 'user')}\n{content}")
    return "\n".join(parts)


def _wanted_call(asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The tool that the request insists on."""
    tools = [t["function"] for t in asked.get("tools") or [] if t.get("type") == "function"]
    choice = asked.get("tool_choice", "auto")
    if not tools or choice in ("auto", "none"):
        return None
    wanted = choice["function"]["name"] if isinstance(choice, Mapping) else tools[0]["name"]
    found: Mapping[str, Any] = next(t for t in tools if t["name"] == wanted)
    return found

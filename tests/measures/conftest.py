"""A small real HTTP server that answers as SGLang does, and a bench that leads to it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Observation, Probe, Seen
from proofbook.probes.systemd import UnitFacts, UnitState


class HandClock:
    """A clock that moves when somebody sleeps on it or pushes it."""

    def __init__(self) -> None:
        self._now = datetime(2026, 3, 9, 16, 0, tzinfo=UTC)
        self.slept: list[float] = []

    def now(self) -> datetime:
        return self._now

    def push(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.push(seconds)


@dataclass
class FakeSglang:
    """How the server behaves. ``before_answer(n, body)`` may return "hang", "close" or an HTTP status for the n-th request
    (from 1) to /generate, or None for a good answer; ``text(prompt, n)`` and ``meta(meta, body)`` bend good answers."""

    pace_s: float = 0.010
    accept: float | None = None
    info: dict[str, Any] = field(default_factory=lambda: {"version": "0.5.10", "model_path": "/m", "tp_size": 4})
    info_path: str = "/server_info"
    headers: dict[str, str] = field(default_factory=dict)
    flush_status: int = 200
    key: str = ""
    brought: list[str] = field(default_factory=list)
    ids: bool = True
    before_answer: Callable[[int, dict[str, Any]], str | int | None] = lambda _n, _body: None
    text: Callable[[str, int], str | None] = lambda _prompt, _n: None
    meta: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda meta, _body: meta
    on_hang: Callable[[], None] = lambda: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    flushes: int = 0
    most_at_once: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: int = 0
    _held: set[str] = field(default_factory=set)

    def generate(self, body: dict[str, Any], n: int) -> dict[str, Any]:
        prompt = body["text"]
        text = self.text(prompt, n)
        text = _text_for(prompt, body["sampling_params"]) if text is None else text
        words = text.split()
        tokens = min(max(len(words), 1), body["sampling_params"]["max_new_tokens"])
        with self._lock:
            cached = len(prompt.split()) - 1 if prompt in self._held else 0
            self._held.add(prompt)
        # one prompt is always the same bit slower or faster than another
        wobble = 1 + int(hashlib.sha256(prompt.encode()).hexdigest()[:4], 16) / 65536 / 10
        meta: dict[str, Any] = {
            "id": f"r{n}",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(prompt.split()),
            "completion_tokens": tokens,
            "cached_tokens": cached,
            "e2e_latency": self.pace_s * tokens * wobble,
        }
        if self.accept:
            meta["spec_verify_ct"] = max(1, round(tokens / self.accept))
            meta["spec_accept_length"] = tokens / meta["spec_verify_ct"]
        answer: dict[str, Any] = {"text": " ".join(words[:tokens]), "meta_info": self.meta(meta, body)}
        if self.ids:
            answer["output_ids"] = [int(hashlib.sha256(w.encode()).hexdigest()[:4], 16) for w in words[:tokens]]
        return answer

    @contextmanager
    def request(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1


def _text_for(prompt: str, sampling: dict[str, Any]) -> str:
    if "Count from 1" in prompt:
        return ", ".join(str(n) for n in range(1, 258))
    if "json_schema" in sampling:
        return json.dumps({"host": "gpu07", "gpus": 4, "healthy": True})
    if "access code" in prompt:
        return "The code is 7-4-1-9"
    seed = hashlib.sha256(prompt.encode()).hexdigest()
    return " ".join(f"{seed[n % 60 : n % 60 + 4]}{n}" for n in range(60))


class _Handler(BaseHTTPRequestHandler):
    fake: FakeSglang

    def log_message(self, *_: Any) -> None:
        pass

    def _say(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        for name, value in self.fake.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _known(self) -> bool:
        """Whether the client brings the key; if not, it was told so."""
        self.fake.brought.append(self.headers.get("authorization") or "")
        if not self.fake.key or self.fake.brought[-1] == f"Bearer {self.fake.key}":
            return True
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._say(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if not self._known():
            return
        known = {self.fake.info_path: self.fake.info, "/v1/models": {"data": []}}
        self._say(200, known[self.path]) if self.path in known else self._say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.fake
        if not self._known():
            return
        length = int(self.headers.get("content-length") or 0)
        raw = self.rfile.read(length)
        if self.path == "/flush_cache":
            fake.flushes += 1
            fake._held.clear()
            self._say(fake.flush_status, b"flushed")
            return
        body = json.loads(raw)
        with fake._lock:
            fake.bodies.append(body)
            n = len(fake.bodies)
        answer: tuple[int, Any] | None = None
        with fake.request():
            match fake.before_answer(n, body):
                case "hang":
                    fake.on_hang()
                    fake.released.wait(30)
                    self.close_connection = True
                case "close":
                    self.close_connection = True
                case "nonsense":
                    answer = 200, b"<html>proxy</html>"
                case "drip":
                    self._drip()
                case int(status):
                    answer = status, {"error": {"message": "it broke"}}
                case _:
                    answer = 200, fake.generate(body, n)
        if answer:  # WHY only now: who has an answer may ask the next, and this one must not count as open then
            self._say(*answer)

    def _drip(self) -> None:
        """Bytes without an end: no pause between two of them is long."""
        self.send_response(200)
        self.end_headers()
        self.fake.on_hang()
        while not self.fake.released.wait(0.02):
            try:
                self.wfile.write(b" ")
            except OSError:
                return


def unit_facts(**more: Any) -> UnitFacts:
    facts: dict[str, Any] = {
        "unit": "sglang-qwen.service", "load": "loaded", "active": "active", "sub": "running", "result": "success",
        "type": "simple", "main_pid": 4711, "n_restarts": 0, "invocation_id": "a" * 32, "enabled": "enabled",
        "need_daemon_reload": False, "exec_start": (), "environment": {}, "fragment_path": "", "drop_ins": (),
        "description": "", "exit_code": "", "exit_status": None, "main_started_s": 10.0, "active_enter_s": 10.0,
        "inactive_exit_s": 10.0,
    }  # fmt: skip
    return UnitFacts(**{**facts, **more})


class FakeBench:
    """A bench whose tunnel leads straight to the fake server. ``unit`` is how the unit looks at the n-th look (from 1)."""

    def __init__(self, port: int, clock: Any) -> None:
        self.host = SimpleNamespace(clock=clock)
        self.port = port
        self.kept: dict[str, bytes] = {}
        self.told: list[str] = []
        self.looks = 0
        self.unit: Callable[[int], UnitFacts | str] = lambda _n: unit_facts()
        self.other: Callable[[Probe[Any]], Any] = lambda _probe: None
        self.no_way = ""
        self.given = ""
        self.tunnelled: list[tuple[int, ContainerSpec | None]] = []

    def look(self, *probes: Probe[Any]) -> Seen:
        return Seen(self._seen(probe) for probe in probes)

    def _seen(self, probe: Probe[Any]) -> Observation[Any]:
        if isinstance(probe, UnitState):
            self.looks += 1
            value: Any = self.unit(self.looks)
        else:
            value = self.other(probe)
        unknown = value if isinstance(value, str) else ""
        return Observation(probe, None if unknown else value, unknown, self.host.clock.now(), "b" * 32)

    @contextmanager
    def tunnel(self, port: int, container: ContainerSpec | None = None) -> Iterator[tuple[str, int]]:
        self.tunnelled.append((port, container))
        if self.no_way:
            raise CannotTell(self.no_way)
        yield "127.0.0.1", self.port

    def key(self, service: ServiceSpec) -> str:
        return self.given

    def keep(self, name: str, data: bytes, what: str) -> str:
        assert name
        assert what
        number = f"e{len(self.kept) + 1:04d}"
        self.kept[number] = data
        return number

    def tell(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def sglang() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
def bench(sglang: FakeSglang, clock: HandClock) -> Iterator[FakeBench]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": sglang}))
    server.daemon_threads = True
    server.request_queue_size = 128
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield FakeBench(server.server_port, clock)
    finally:
        sglang.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def service() -> ServiceSpec:
    return ServiceSpec(name="sglang-qwen.service", container="llm-two", url="http://127.0.0.1:31000/health")


@pytest.fixture
def facts() -> Callable[..., UnitFacts]:
    return unit_facts

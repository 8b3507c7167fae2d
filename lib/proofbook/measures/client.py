"""A small load client: many requests at once, each with a deadline, and no fault of the server ever a traceback.

The requests run in an event loop of their own thread, because a notebook's kernel has one that is running already. What they
come to is handed to the caller's thread one by one, which keeps it, tells progress, and may look at the machine meanwhile.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self

import httpx

from proofbook.measures.from_json import from_json
from proofbook.measures.prompts import Prompt
from proofbook.transports.base import Clock

__all__ = ["Ask", "Client", "Reply"]

#: How often an open request looks whether its deadline has passed (seconds).
_LOOK_EVERY_S = 0.1

#: Of an answer, at most this much is read; a server that streams without an end must not fill the runner's memory.
_MOST_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request. ``round`` and ``level`` (requests in flight) say where in an experiment it belongs."""

    path: str
    method: str = "GET"
    body: Any = None
    prompt: Prompt | None = None
    round: int = 0
    level: int = 1

    @classmethod
    def generate(cls, prompt: Prompt, *, round: int = 0, level: int = 1) -> Ask:
        return cls("/generate", "POST", prompt.body(), prompt, round, level)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request came to. ``trouble`` is "" when there is a whole HTTP answer, whatever its status.

    ``trouble``: refused (no connection) · closed (it broke) · deadline · too-big · unreadable (no answer of HTTP) · unreachable
    (anything else on the way).
    ``client_s`` are real seconds here; ``began`` is the host's clock.
    """

    ask: Ask
    http: int | None = None
    body: bytes = b""
    trouble: str = ""
    problem: str = ""
    client_s: float = 0.0
    began: datetime | None = None

    @property
    def ok(self) -> bool:
        return not self.trouble and self.http == 200

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return from_json(self.body)


@dataclass
class Client:
    """A client of one server behind a tunnel: ``with Client(address, port, clock, answer_s=120) as client``.

    ``answer_s`` is the deadline of each request. It counts on the host's clock and on the real one, whichever is first: a
    simulated host may let hours pass in a moment, and a real one that hangs does not get more than its time. ``key`` is the
    server's API key, "" for none.
    """

    address: str
    port: int
    clock: Clock
    answer_s: float = 120.0
    connect_s: float = 10.0
    key: str = field(default="", repr=False)
    _loop: asyncio.AbstractEventLoop = field(init=False, repr=False)
    _thread: threading.Thread = field(init=False, repr=False)
    _http: httpx.AsyncClient = field(init=False, repr=False)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proofbook-load", daemon=True)
        self._thread.start()
        self._http = httpx.AsyncClient(
            base_url=f"http://{self.address}:{self.port}",
            # WHY no read timeout: it would count between two pieces only; the deadline is over the whole answer.
            timeout=httpx.Timeout(None, connect=self.connect_s),
            # WHY no connection is used twice: servers close idle ones after seconds, and through a tunnel that is known too late;
            # a request that falls into that gap would look like a server that went away.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={
                "accept-encoding": "identity",  # what is kept as evidence is what came
                **({"authorization": f"Bearer {self.key}"} if self.key else {}),
            },
            # WHY: a proxy from the environment must not get what belongs on loopback.
            trust_env=False,
            verify=False,  # it is plain HTTP inside the tunnel: loading the authorities' certificates would be for nothing
            # Each request is the first that the server sees of us: what it sets comes back in none.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(timeout=10)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()

    # ---------------------------------------------------------------------------------------------- asking

    def one(self, ask: Ask, *, answer_s: float | None = None) -> Reply:
        """One request, waited for."""
        (reply,) = self.all([ask], at_once=1, answer_s=answer_s)
        return reply

    def get(self, path: str, *, answer_s: float | None = None) -> Reply:
        return self.one(Ask(path), answer_s=answer_s)

    def all(
        self, asks: Sequence[Ask], *, at_once: int, answer_s: float | None = None, stop: Callable[[Reply], bool] = lambda _: False
    ) -> Iterator[Reply]:
        """Replies as they come, ``at_once`` requests in flight as long as there are any to send.

        After a reply for which ``stop`` is true no further request is sent; those in flight are waited for. Closing the
        iterator (or Ctrl-C) takes back what is in flight.
        """
        replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(
            self._drain(iter(asks), at_once, answer_s or self.answer_s, stop, replies.put), self._loop
        )
        # WHY the callback: the end is told whatever ended it, an error of ours included; nobody waits for ever.
        work.add_done_callback(lambda _: replies.put(None))
        try:
            while (reply := replies.get()) is not None:
                yield reply
            work.result()
        finally:
            work.cancel()

    async def _drain(
        self, asks: Iterator[Ask], at_once: int, answer_s: float, stop: Callable[[Reply], bool], tell: Callable[[Reply], None]
    ) -> None:
        stopped = False

        async def worker() -> None:
            nonlocal stopped
            # WHY one iterator for all: each takes the next request when it has an answer, so the load never thins out.
            for ask in asks:
                reply = await self._asked(ask, answer_s)
                tell(reply)
                stopped = stopped or stop(reply)
                if stopped:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())

    async def _asked(self, ask: Ask, answer_s: float) -> Reply:
        began, started = self.clock.now(), time.monotonic()

        def reply(**more: Any) -> Reply:
            return Reply(ask, client_s=time.monotonic() - started, began=began, **more)

        sending = asyncio.ensure_future(self._send(ask))
        try:
            while not (await asyncio.wait({sending}, timeout=_LOOK_EVERY_S))[0]:
                passed = max((self.clock.now() - began).total_seconds(), time.monotonic() - started)
                if passed >= answer_s:
                    return reply(trouble="deadline", problem=f"no answer within {answer_s:g} s")
            status, body = sending.result()
            return reply(http=status, body=body)
        except httpx.HTTPError as error:
            trouble, problem = _translated(error)
            return reply(trouble=trouble, problem=problem)
        except _TooBig:
            return reply(trouble="too-big", problem=f"the answer is longer than {_MOST_BYTES} bytes")
        except Exception as error:  # whatever a server sends (a header of odd bytes is enough) costs this request, not the run
            return reply(trouble="unreadable", problem=f"its answer could not be read: {type(error).__name__}: {error}")
        finally:
            await _cancelled(sending)

    async def _send(self, ask: Ask) -> tuple[int, bytes]:
        async with self._http.stream(ask.method, ask.path, json=ask.body) as response:
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise _TooBig
            return response.status_code, bytes(body)


class _TooBig(Exception):
    """An answer went on for longer than anybody wants to keep."""


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """End a request that is still open, and wait until its connection is closed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _translated(error: httpx.HTTPError) -> tuple[str, str]:
    """The kind of trouble and one sentence. WHY by class: httpx's texts are often empty when the peer just goes away."""
    said = f": {error}" if str(error) else ""
    match error:
        case httpx.ConnectTimeout():
            return "refused", "no connection could be made in time"
        case httpx.ConnectError():
            return "refused", f"no connection{said}"
        case httpx.RemoteProtocolError() | httpx.ReadError() | httpx.WriteError() | httpx.CloseError():
            return "closed", "the connection was closed without a whole answer"
        case _:
            return "unreachable", f"{type(error).__name__}{said}"

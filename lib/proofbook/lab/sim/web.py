"""HTTP/1.1 to the servers of a simulated machine, as it comes through SSH tunnels: several connections at once, kept alive.

Answers take time on the machine's clock. While a request waits, that clock runs fast, so that a long answer comes at once; but
it never runs while requests are still coming in. WHY: those that a client sends together must be under way together, however
slow the computer is that plays the machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from proofbook.lab.sim import serving
from proofbook.lab.sim.os_state import Process, System
from proofbook.lab.sim.ssh_library import asyncssh
from proofbook.lab.standin.engine import Reply
from proofbook.lab.standin.engine import Server as Engine

if TYPE_CHECKING:
    from proofbook.lab.sim.server import Server

log = logging.getLogger("proofbook.lab")

#: For how long nothing must have come in or gone out before the clock runs on (real seconds).
SETTLE_S = 0.03
#: How long the clock runs fast for an answer that never comes (lab seconds): longer than any watchdog of the server.
_PATIENCE_S = 330.0
_MOST = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def last(self) -> bool:
        """Whether the client wants no further answer on this connection."""
        return self.headers.get("connection", "").lower() == "close"


class BadRequest(Exception):
    """What came is no request that can be answered."""


class Web:
    """The HTTP side of one machine."""

    def __init__(self, lab: Server) -> None:
        self._lab = lab
        self._last_traffic = 0.0

    def quiet_in(self) -> float:
        """Real seconds until the traffic counts as settled; 0.0 when it is."""
        return max(0.0, self._last_traffic + SETTLE_S - time.monotonic())

    def _traffic(self) -> None:
        self._last_traffic = time.monotonic()

    async def serve(
        self, system: System, port: int, reader: asyncssh.SSHReader[bytes], writer: asyncssh.SSHWriter[bytes], client: str
    ) -> None:
        """One connection, until its client or its server is gone."""
        try:
            while (request := await self._read(reader, writer)) is not None:
                self._lab.used()
                if not await self._exchange(system, port, request, reader, writer, client) or request.last:
                    break
        except BadRequest as error:
            writer.write(f"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\nx-why: {error}\r\n\r\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError, asyncssh.Error) as error:
            log.info("a connection to port %d ended early: %s", port, error)
        finally:
            writer.close()

    async def _read(self, reader: asyncssh.SSHReader[bytes], writer: asyncssh.SSHWriter[bytes]) -> Request | None:
        """The next request; None at the end of the connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial.strip():
                raise
            return None
        if not head:
            return None
        first, *lines = head.decode("latin-1").strip("\r\n").split("\r\n")
        words = first.split()
        if len(words) != 3:
            raise BadRequest("no request line")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length") or 0)
        if length > _MOST or "transfer-encoding" in headers:
            raise BadRequest("a body of known length, please")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length) if length else b""
        return Request(words[0], words[1], headers, body)

    async def _exchange(
        self,
        system: System,
        port: int,
        request: Request,
        reader: asyncssh.SSHReader[bytes],
        writer: asyncssh.SSHWriter[bytes],
        client: str,
    ) -> bool:
        """Answer one request; False when the server or the client went away, and the connection with it."""
        self._lab.catch_up()
        found = serving.server_at(system, port)
        if found is None:
            return False
        process, engine = found
        counts = serving.generates(request.method, request.path)
        if counts:
            system.running[process.pid] = system.running.get(process.pid, 0) + 1
            self._traffic()
        try:
            while counts and (wait := self.quiet_in()):
                await asyncio.sleep(wait)
            return await self._answer(system, process, engine, request, reader, writer, client)
        finally:
            if counts and process.pid in system.running:
                system.running[process.pid] -= 1
            self._traffic()

    async def _answer(
        self,
        system: System,
        process: Process,
        engine: Engine,
        request: Request,
        reader: asyncssh.SSHReader[bytes],
        writer: asyncssh.SSHWriter[bytes],
        client: str,
    ) -> bool:
        lab = self._lab
        lab.catch_up()

        def over() -> bool:
            return system.processes.get(process.pid) is not process or reader.at_eof()

        if over():
            return False
        began = lab.life.now
        authorization = request.headers.get("authorization", "")
        reply = serving.respond(
            lab.life, system, process, engine, request.method, request.path, request.body, client, authorization
        )
        if reply.hangs:
            await lab.until(over, _PATIENCE_S)
            while not over():
                await asyncio.sleep(SETTLE_S)
            return False
        for second, data in reply.chunks or [(reply.seconds, b"")]:
            await lab.until(over, began + second - lab.clock.now())
            if over():
                return False
            if reply.chunks:
                first = data is reply.chunks[0][1]
                writer.write((_head(reply, request, "transfer-encoding: chunked") if first else b"") + _chunk(data))
        if reply.chunks:
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(_head(reply, request, f"content-length: {len(reply.body)}") + reply.body)
        await writer.drain()
        return True


def _head(reply: Reply, request: Request, length: str) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", "server: uvicorn"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    return "\r\n".join([*lines, length, *(["connection: close"] if request.last else []), "", ""]).encode()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"

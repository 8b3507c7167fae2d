"""The process that plays one machine: an SSH server on loopback, and a control socket in the machine's folder.

It is started by :mod:`proofbook.lab.sim.client` as ``python -m proofbook.lab.sim.server FOLDER`` and knows nothing but the
machine and its faults. Nothing else than 127.0.0.1 is listened on. The machine's state is saved with every change that a
reader could notice, so that a killed process goes on where it was; an orderly end forgets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proofbook import remote
from proofbook.errors import LabError, TransportError
from proofbook.lab.sim import build
from proofbook.lab.sim.clock import SharedClock
from proofbook.lab.sim.commands import make_shell
from proofbook.lab.sim.files import Files
from proofbook.lab.sim.life import Life
from proofbook.lab.sim.os_state import Machine, System
from proofbook.lab.sim.shell import Answer, Context, said
from proofbook.lab.sim.ssh_library import asyncssh
from proofbook.lab.sim.web import Web
from proofbook.model import Command, Result

log = logging.getLogger("proofbook.lab")

#: How often the clock is moved while somebody waits (real seconds).
_TICK_S = 0.005
#: How long changes may wait before they are saved (real seconds); and what part of the time saving may take.
_SAVE_S = 0.25
_SAVING = 0.02
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: How far over max_output an answer may go before it is cut here; the reader counts what is beyond as lost.
_SLACK = 1024 * 1024
#: Shell text that wants its standard input; for other text nobody waits for the client's end of file.
_WANTS_INPUT = re.compile(r"^\s*(sudo\s+(-n\s+)?(--\s+)?)?(cat\s*(>|$)|tee\b|(ba|da)?sh\s+-s|dd\b)")


@dataclass
class _Sleeper:
    until: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    holds: Callable[[], bool] | None = None  # what else ends the wait


class Server:
    """One machine with its clock, its SSH port and its control socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data: dict[str, Any] = json.loads((folder / "machine.json").read_text())
        self.rate = float(self.data["clock"]["rate"])
        self.clock = SharedClock(folder / "clock", writable=True)
        self.life, self.resumed = self._life()
        self.files = Files(self.life)
        self.shell = make_shell()
        self.web = Web(self)
        self._sleepers: list[_Sleeper] = []
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._epoch = self.machine.connections_epoch
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._held: socket.socket | None = None
        self._shown_key = ""
        self._port = 0
        self._last_use = time.monotonic()
        self._saved_revision = -1
        self._save_at = 0.0
        self._saved_as: tuple[str, bool] | None = None

    @property
    def machine(self) -> Machine:
        return self.life.machine

    # ------------------------------------------------------------------------------------------ state

    def _life(self) -> tuple[Life, bool]:
        """The saved machine, if it was made of the same data by the same code; else a new one."""
        saved = self.folder / "state.pickle"
        if saved.exists():
            try:
                # The folder is the user's own (0700), and only this program writes it.
                meta = pickle.loads(saved.read_bytes())
            except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
                log.warning("the saved machine cannot be read (%s): a new one is made", error)
            else:
                if meta["fingerprint"] == self.data["fingerprint"]:
                    if meta["runner_boot"] != runner_boot_id() or self.clock.now() < meta["now"]:
                        self.clock.set(meta["now"])
                    return Life(meta["machine"], meta["now"]), True
        self.clock.set(time.time())
        return build.build(self.data, self.clock.now(), self.data["seed"]), False

    def save(self, *, now: bool = False) -> None:
        """Save the machine if it changed; at once when it went down or booted, other changes when their time has come."""
        if self.machine.revision == self._saved_revision:
            return
        began, where = time.monotonic(), (self.machine.boot.id, self.machine.reachable)
        if not now and where == self._saved_as and began < self._save_at:
            return
        meta = {
            "fingerprint": self.data["fingerprint"],
            "runner_boot": runner_boot_id(),
            "now": self.life.now,
            "machine": self.machine,
        }
        new = self.folder / "state.pickle.new"
        new.write_bytes(pickle.dumps(meta, protocol=5))
        new.replace(self.folder / "state.pickle")
        self._saved_revision, self._saved_as = self.machine.revision, where
        ended = time.monotonic()
        self._save_at = ended + max(_SAVE_S, (ended - began) / _SAVING)

    # ------------------------------------------------------------------------------------------- time

    def catch_up(self) -> None:
        """Let everything happen that is due by now."""
        self.life.advance(self.clock.now())

    async def pass_time(self) -> None:
        """Move the clock while somebody waits, let events happen, and open or close the SSH port as they say."""
        while not self._stop.is_set():
            self.catch_up()
            await self._follow_machine()
            self.save()
            for sleeper in [s for s in self._sleepers if self.clock.now() >= s.until or (s.holds and s.holds())]:
                self._sleepers.remove(sleeper)
                sleeper.done.set()
            if self._sleepers:
                await self._run_fast()
            else:
                await self._run_slowly()

    async def _run_fast(self) -> None:
        """One tick at the fast rate, never past the next event or the end of somebody's wait."""
        if wait := self.web.quiet_in():
            await asyncio.sleep(min(wait, _TICK_S))
            return
        began_real, began = time.monotonic(), self.clock.now()
        stops = [s.until for s in self._sleepers]
        event = self.life.next_event()
        stop = min([*stops, event] if event is not None else stops)
        await asyncio.sleep(min(max(stop - began, 0.0) / self.rate, _TICK_S))
        wanted = min(began + (time.monotonic() - began_real) * self.rate, stop)
        self.clock.skip(max(0.0, wanted - self.clock.now()))

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Let the machine's time run fast until ``holds()``, at most ``limit_s`` of its seconds; whether it held."""
        sleeper = _Sleeper(self.clock.now() + limit_s, holds=holds)
        self._sleepers.append(sleeper)
        self._wake.set()
        try:
            await sleeper.done.wait()
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)
        return holds()

    async def _run_slowly(self) -> None:
        event = self.life.next_event()
        unsaved = max(0.0, self._save_at - time.monotonic()) if self.machine.revision != self._saved_revision else 5.0
        left = float(self.data["idle_s"]) - (time.monotonic() - self._last_use)
        pause = min(unsaved, max(left, 0.05), max(0.0, event - self.clock.now()) if event is not None else 5.0)
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause)
        if not (self.folder / "daemon.json").exists():
            log.info("the machine's folder was cleared away: so is the machine")
            self._stop.set()
        idle = time.monotonic() - self._last_use
        if not self._connections and idle > float(self.data["idle_s"]):
            log.info("nobody asked for %.0f s: the machine is put away", idle)
            self._stop.set()

    # -------------------------------------------------------------------------------------------- SSH

    async def _follow_machine(self) -> None:
        """Make the SSH port what the machine's state says: open, refusing, all connections cut, another key."""
        m = self.machine
        if self._epoch != m.connections_epoch:
            self._epoch = m.connections_epoch
            for connection in list(self._connections):
                connection.abort()
        if self._acceptor and (not m.reachable or self._shown_key != m.host_key):
            self._acceptor.close()
            self._acceptor = None
            self._held = bound(self._port)
        if m.reachable and not self._acceptor:
            held = self._held or bound(self._port)
            self._held = None
            self._acceptor = await self._listen(held)
            self._shown_key = m.host_key

    async def _listen(self, held: socket.socket) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            sock=held,
            server_factory=lambda: _Door(self),
            server_host_keys=[str(self.folder / f"host_key_{self.machine.host_key}")],
            process_factory=self.serve,
            encoding="utf-8",
            errors="surrogateescape",  # bytes pass unharmed in both directions
            server_version="OpenSSH_10.0p2 Debian-7",
            login_timeout=30,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            compression_algs=None,
        )

    def open_port(self) -> int:
        """Take the port of last time if it is free, so that open windows and known_hosts stay true; else any."""
        wanted = int(self.data.get("port") or 0)
        try:
            self._held = bound(wanted)
        except OSError:
            self._held = bound(0)
        self._port = int(self._held.getsockname()[1])
        return self._port

    def used(self) -> None:
        self._last_use = time.monotonic()

    def context(self, system: System | None = None) -> Context:
        user = self.machine.user
        env = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": "/bin/bash", "PATH": _PATH, "LANG": "C.UTF-8"}
        where = system or self.machine.host
        return Context(self.life, self.files, where, user, self.note_unknown, cwd=user.home, env=env, pass_time=self.until)

    def note_unknown(self, line: str) -> None:
        """Keep what the lab did not know, for tests and for whoever teaches it more."""
        with (self.folder / "unknown_commands.log").open("a") as notes:
            notes.write(f"{datetime.fromtimestamp(self.life.now, UTC).isoformat()} {line!r}\n")

    async def serve(self, process: asyncssh.SSHServerProcess[str]) -> None:
        """One session: a program of ours, a command line, or a person."""
        self.used()
        self.catch_up()
        try:
            if process.command is None:
                await self._interactive(process)
            elif process.command == remote.GATHER_COMMAND:
                await self._gather(process)
            elif process.command == remote.RUN_COMMAND:
                await self._run(process)
            else:
                await self._line(process, process.command)
        except (BrokenPipeError, ConnectionError, asyncssh.Error):
            process.close()
        except TransportError as error:
            process.stdout.write(f"refused {error}\n")
            process.exit(65)
        finally:
            self._wake.set()

    async def _request(self, process: asyncssh.SSHServerProcess[str], read: Callable[[bytes], Any]) -> Any:
        """Collect standard input until ``read`` finds a whole request in it; None at its end."""
        data = b""
        while True:
            chunk = await process.stdin.read(65536)
            if not chunk:
                return None
            data += chunk.encode("utf-8", "surrogateescape")
            request = read(data)
            if request is not None:
                return request

    async def _gather(self, process: asyncssh.SSHServerProcess[str]) -> None:
        request = await self._request(process, remote.read_gather_request)
        if request is None:
            process.stdout.write("refused the request came incomplete\n")
            process.exit(65)
            return
        results = [await self.answer(c) for c in request.commands]
        answer = remote.write_gather_answer(request, results, uid=self.machine.user.uid)
        process.stdout.write(answer.decode("utf-8", "surrogateescape"))
        process.exit(0)

    async def _run(self, process: asyncssh.SSHServerProcess[str]) -> None:
        request = await self._request(process, remote.read_run_request)
        if request is None:
            process.stdout.write("refused the request came incomplete\n")
            process.exit(65)
            return

        for stream in (process.stdout, process.stderr):
            stream.write(remote.write_run_start(request).decode("ascii"))

        async def emit(data: bytes) -> None:
            process.stdout.write(data.decode("utf-8", "surrogateescape"))
            await process.stdout.drain()

        answering = asyncio.ensure_future(self.answer(request.command, emit))
        leaving = asyncio.ensure_future(process.stdin.read(1))  # its end: nobody waits any more
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            process.close()
            return
        leaving.cancel()
        stdout, stderr = remote.write_run_answer(request, answering.result(), uid=self.machine.user.uid)
        process.stdout.write(stdout.decode("utf-8", "surrogateescape"))
        process.stderr.write(stderr.decode("utf-8", "surrogateescape"))
        process.exit(0)

    async def answer(self, command: Command, emit: Callable[[bytes], Awaitable[None]] | None = None) -> Result:
        """Run one of proofbook's commands as its agents do: from ``/``, through sudo when it needs root, with its deadline."""
        ctx = self.context()
        ctx.cwd, ctx.stdin, ctx.emit = "/", command.stdin, emit
        argv = list(command.argv)
        if command.root and ctx.user.uid != 0:
            argv = ["sudo", "-n", "--", *argv]
        started = self.clock.now()
        try:
            result = await asyncio.wait_for(self.shell.run_argv(ctx, argv), command.timeout_s)
            timed_out = False
        except TimeoutError:
            result, timed_out = Answer(143), True
        except Exception:
            # WHY: a defect of the lab must look like one, not like a machine that went away.
            log.exception("the lab failed at %r", command.argv)
            self.note_unknown("(the lab failed) " + " ".join(command.argv)[:500])
            result, timed_out = said(error="lab: this simulated machine failed at the command; see its log\n", status=70), False
        most = command.max_output
        return Result(
            command,
            None if timed_out else result.status,
            result.stdout[: most + _SLACK],
            result.stderr[: most + _SLACK],
            datetime.fromtimestamp(started, UTC),
            max(0.0, self.clock.now() - started),
            timed_out=timed_out,
        )

    async def _line(self, process: asyncssh.SSHServerProcess[str], line: str) -> None:
        ctx = self.context()
        if _WANTS_INPUT.match(line):
            ctx.stdin = (await process.stdin.read()).encode("utf-8", "surrogateescape")

        async def emit(data: bytes) -> None:
            process.stdout.write(data.decode("utf-8", "surrogateescape"))
            await process.stdout.drain()

        ctx.emit = emit
        running = asyncio.ensure_future(self._safely(ctx, line))
        closed = asyncio.ensure_future(process.channel.wait_closed())
        await asyncio.wait({running, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if not running.done():
            running.cancel()
            return
        answer = running.result()
        process.stdout.write(answer.stdout.decode("utf-8", "surrogateescape"))
        process.stderr.write(answer.stderr.decode("utf-8", "surrogateescape"))
        process.exit(answer.status)

    async def _safely(self, ctx: Context, line: str) -> Answer:
        try:
            return await self.shell.run_text(ctx, line)
        except Exception:
            log.exception("the lab failed at %r", line)
            self.note_unknown(f"(the lab failed) {line[:500]}")
            return said(error="lab: this simulated machine failed at the command; see its log\n", status=70)

    async def _interactive(self, process: asyncssh.SSHServerProcess[str]) -> None:
        """A prompt for a person, with line editing from the SSH library."""
        ctx = self.context()
        m = self.machine
        process.stdout.write(
            f"This is {m.name}, a SIMULATED machine of proofbook's lab (Linux {m.kernel}). Nothing here is real; `exit` leaves.\n"
            "It knows the commands that runbooks use, and says so when it does not know one.\n\n"
        )
        sign = "#" if ctx.user.uid == 0 else "$"
        while not process.stdin.at_eof():
            where = "~" if ctx.cwd == ctx.user.home else ctx.cwd
            process.stdout.write(f"{ctx.user.name}@{ctx.system.hostname}:{where}{sign} ")
            try:
                line = await process.stdin.readline()
            except asyncssh.BreakReceived:
                process.stdout.write("^C\n")
                continue
            except asyncssh.TerminalSizeChanged:
                continue
            self.used()
            if not line:
                break
            words = line.split()
            if words[:1] in (["exit"], ["logout"]):
                break
            self.catch_up()
            answer = await self._safely(ctx, line)
            ctx.last = answer.status
            process.stdout.write((answer.stdout + answer.stderr).decode("utf-8", "surrogateescape"))
            self._wake.set()
        process.exit(ctx.last)

    # ---------------------------------------------------------------------------------------- control

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of the client: a line of JSON each way."""
        self.used()
        try:
            request = json.loads(await reader.readline() or b"{}")
            answer = await self._controlled(request, reader)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError) as error:
            log.info("a control request ended early: %s", error)
        finally:
            writer.close()
            self._wake.set()

    async def _controlled(self, request: dict[str, Any], reader: asyncio.StreamReader) -> dict[str, Any]:
        match request.get("op"):
            case "status":
                self.catch_up()
                return {
                    "pid": os.getpid(),
                    "now": self.clock.now(),
                    "reachable": self.machine.reachable,
                    "answers_in_s": self.life.answers_in_s(),
                    "boot_id": self.machine.boot.id,
                    "requested_boots": self.machine.requested_boots,
                    "connections": len(self._connections),
                    "port": self._port,
                }
            case "sleep":
                return await self._sleep(float(request["seconds"]), reader)
            case "stop":
                self._stop.set()
                return {"stopping": os.getpid()}
        return {"error": f"the lab does not know {request.get('op')!r}"}

    async def _sleep(self, seconds: float, reader: asyncio.StreamReader) -> dict[str, Any]:
        """Let lab time pass; whoever hangs up meanwhile no longer waits."""
        sleeper = _Sleeper(self.clock.now() + seconds)
        self._sleepers.append(sleeper)
        self._wake.set()
        waiting = asyncio.ensure_future(sleeper.done.wait())
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        leaving.cancel()
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)
        self.used()
        return {"now": self.clock.now()}

    # ------------------------------------------------------------------------------------------- main

    async def run(self, ready: int) -> None:
        """Serve until it is stopped or nobody asks any more; ``ready`` is a descriptor that is told when it serves."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        port = self.open_port()
        self.catch_up()
        await self._follow_machine()
        with contextlib.suppress(FileNotFoundError):
            os.unlink("control.sock")
        control = await asyncio.start_unix_server(self.control, "control.sock")
        os.chmod("control.sock", 0o600)
        about = {
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
            "port": port,
            "user": self.machine.user.name,
            "fingerprint": self.data["fingerprint"],
            "rate": self.rate,
            "resumed": self.resumed,
            "started_at": datetime.now(UTC).isoformat(),
        }
        self._write_known_hosts(port)
        self.save(now=True)
        write_json(self.folder / "daemon.json", about)
        os.write(ready, b"ready\n")
        os.close(ready)
        log.info("serving on 127.0.0.1:%d, %s", port, "resumed" if self.resumed else "fresh")
        passing = asyncio.ensure_future(self.pass_time())
        await asyncio.wait({passing, asyncio.ensure_future(self._stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if passing.done() and passing.exception():
            self.save(now=True)
            raise passing.exception() or AssertionError
        control.close()
        if self._acceptor:
            self._acceptor.close()
        for connection in list(self._connections):
            connection.abort()
        passing.cancel()
        # An orderly end forgets the machine: the next one is new, and the scenario can be played again.
        for name in ("daemon.json", "control.sock", "state.pickle"):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()
        log.info("ended")

    def _write_known_hosts(self, port: int) -> None:
        public = (self.folder / "host_key_first.pub").read_text().split()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")


class _Door(asyncssh.SSHServer):
    """Lets in whoever has the client key under the machine's user name; carries loopback tunnels."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None
        self._peer = ""

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        # WHY now: at the end of a connection nobody knows any more whom it was with.
        self._peer = "{} port {}".format(*conn.get_extra_info("peername"))
        self._server._connections.add(conn)
        self._server.used()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection:
            self._server._connections.discard(self._connection)
            self._tell_journal(self._connection)
        self._server.used()
        self._server._wake.set()

    def _tell_journal(self, connection: asyncssh.SSHServerConnection) -> None:
        """What sshd's child, which runs as the user, says at the end; an ordinary user's journal begins with it."""
        machine = self._server.machine
        unit = machine.host.units["ssh.service"]
        if unit.active != "active" or connection.get_extra_info("username") != machine.user.name:
            return
        for message in (
            f"Received disconnect from {self._peer}:11: disconnected by user",
            f"Disconnected from user {machine.user.name} {self._peer}",
        ):
            fields = {
                "_TRANSPORT": "syslog",
                "PRIORITY": "6",
                "SYSLOG_FACILITY": "4",
                "SYSLOG_IDENTIFIER": "sshd",
                "SYSLOG_PID": str(unit.main_pid),
                "_PID": str(unit.main_pid),
                "_UID": str(machine.user.uid),
                "_GID": str(machine.user.uid),
                "_COMM": "sshd",
                "_EXE": "/usr/sbin/sshd",
                "_CMDLINE": f'"sshd: {machine.user.name}@notty"',
                "_SYSTEMD_CGROUP": "/system.slice/ssh.service",
                "_SYSTEMD_UNIT": "ssh.service",
                "_SYSTEMD_SLICE": "system.slice",
                "_SYSTEMD_INVOCATION_ID": unit.invocation_id,
                "MESSAGE": message,
            }
            self._server.life.entry(machine.host, fields)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        known = (self._server.folder / "client_key.pub").read_text().split()[1]
        return username == self._server.machine.user.name and key.export_public_key().split()[1] == known.encode()

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        server = self._server
        machine = server.machine
        systems = {"127.0.0.1": machine.host, "localhost": machine.host, "::1": machine.host}
        systems |= {name: c for c in machine.containers.values() for name in (c.hostname, c.address)}
        system = systems.get(dest_host)
        server.catch_up()
        endpoint = system.endpoints.get(dest_port) if system else None
        inside = system is not machine.host and endpoint is not None and endpoint.address in ("127.0.0.1", "localhost")
        if system is None or endpoint is None or inside:  # a container's loopback is not reached from outside of it
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "Connection refused")

        async def http(reader: asyncssh.SSHReader[bytes], writer: asyncssh.SSHWriter[bytes]) -> None:
            await server.web.serve(system, dest_port, reader, writer, f"{orig_host}:{orig_port}")

        return http


def bound(port: int) -> socket.socket:
    """A loopback socket that holds a port without listening: connections are refused."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        raise
    return held


def runner_boot_id() -> str:
    """The boot of the computer that runs the lab: CLOCK_MONOTONIC means nothing in another one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """When a process of the runner started, in clock ticks: tells it from a later one with the same PID; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def write_json(path: Path, value: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1))
    new.replace(path)


def main(argv: list[str]) -> int:
    """``server FOLDER READY_FD``."""
    folder = Path(argv[1])
    os.chdir(folder)
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    try:
        asyncio.run(_main(folder, int(argv[2])))
    except LabError as error:
        os.write(int(argv[2]), f"failed {error}\n".encode())
        return 1
    return 0


async def _main(folder: Path, ready: int) -> None:
    await Server(folder).run(ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

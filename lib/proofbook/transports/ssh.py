"""SSH to a real OpenSSH server: the one place that knows fabric and paramiko, and closes their traps.

What fabric does by itself, and what happens here instead:

* accepts any host key → strict known_hosts, for gateways too (known_hosts.py);
* connects anew in silence when the connection broke → only :meth:`SshTransport.reopen` does, and only to the same key;
* has no deadline on name lookup, key exchange, channel opening and start → one deadline over all of them;
* does not notice a peer that stands still → every few seconds of silence it is asked for a sign of life;
* leaves the remote command running after a timeout, or when the client dies → the agents in remote/ end it;
* decodes output lossily and in quadratic time → bytes, in big pieces, up to a limit; what is over is counted;
* waits for Nagle's algorithm, 40 ms a command → TCP_NODELAY.

Import is lazy: fabric costs a fifth of a second, which only those pay who connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from proofbook import remote
from proofbook.errors import (
    CannotConnect,
    ConnectionLost,
    DeadlinePassed,
    LoginFailed,
    OtherMachine,
    ProofbookError,
    TransportError,
)
from proofbook.model import Command, Result
from proofbook.transports import known_hosts as trust
from proofbook.transports.base import Peer, Put
from proofbook.transports.ssh_config import Route, resolve

T = TypeVar("T")

#: Commands that gather runs at the same time on one machine.
LANES = 4
#: Sessions at once on one connection; OpenSSH's MaxSessions is 10.
_SESSIONS = 8
#: How long a refused session is asked for again.
_PATIENCE_S = 3.0
#: What an agent needs to end a command that ignores SIGTERM and SIGKILL, and what the way may add.
_GRACE_S = 4.5
_WAY_S = 15.0
_PIECE = 1024 * 1024
#: Above this an input is sent by a thread of its own, so that a command that talks meanwhile cannot block both sides.
_INLINE_INPUT = 256 * 1024
#: As much of what a login shell says before a command is kept, to tell why there is no answer (bytes).
_WORDS_OF_LOGIN = 64 * 1024


class SshTransport:
    """One machine over SSH. Safe to use from several threads; the first connection is made under a lock.

    ``host``: a name of ~/.ssh/config, a DNS name or an address. ``ssh_config``: True for OpenSSH's own files, a path
    for that file alone, False for none. ``known_hosts``: the only file to trust for this host.
    ``keepalive_s``: after so much silence the peer is asked for a sign of life; ``silence_s``: after so much silence
    the connection is given up, and every call on it raises ConnectionLost.
    """

    def __init__(
        self,
        host: str,
        *,
        port: int | None = None,
        user: str | None = None,
        identity_file: str | None = None,
        known_hosts: str | None = None,
        ssh_config: bool | str = True,
        connect_timeout_s: float | None = None,
        keepalive_s: float = 3.0,
        silence_s: float = 12.0,
    ) -> None:
        self.host = host
        self._resolve: Callable[[], Route] = partial(
            resolve, host, user=user, port=port, identity_file=identity_file, known_hosts=known_hosts, config=ssh_config
        )
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._silence_s = silence_s
        self._lock = threading.RLock()
        self._sessions = threading.BoundedSemaphore(_SESSIONS)
        self._link: _Link | None = None
        self._pinned: trust.HostKey | None = None

    def __enter__(self) -> SshTransport:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- connecting

    def open(self, *, timeout_s: float | None = None) -> Peer:
        """Connect and prove the host key; nothing happens when connected. Default timeout: ConnectTimeout, or 15 s.

        Raises CannotConnect and its kinds; ConnectionLost when an earlier connection broke (only reopen makes a new one).
        """
        with self._lock:
            if self._link is not None:
                self._link.check()
                return self._link.peer
            return self._connect(timeout_s)

    def reopen(self, *, timeout_s: float | None = None) -> Peer:
        """Connect anew, and only to the host key that answered first. Raises OtherMachine for another key."""
        with self._lock:
            self.close()
            return self._connect(timeout_s)

    def close(self) -> None:
        """Close the connection. What runs on it raises ConnectionLost, and its remote commands are ended."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connect(self, timeout_s: float | None) -> Peer:
        route = self._resolve()
        limit = timeout_s or self._connect_timeout_s or route.connect_timeout_s or 15.0
        link = _Link(route, self._pinned, self._keepalive_s, self._silence_s, time.monotonic() + limit)
        try:
            _within(limit, link.connect, f"connecting to {self.host}")
        except BaseException:
            link.close()
            raise
        self._link, self._pinned = link, link.host_key
        return link.peer

    @contextmanager
    def _call(self, line: str, request: bytes, deadline: float) -> Iterator[_Call]:
        """A session that runs one of the agents; it ends with the block, and the remote side with it."""
        self.open()
        link = self._link
        if link is None:
            raise ConnectionLost(f"the connection to {self.host} was closed")
        with self._sessions:
            call = _Call(link, deadline)
            try:
                call.start(line, request)
                yield call
            finally:
                call.close()

    # ---------------------------------------------------------------------------------------- running

    def run(self, command: Command) -> Result:
        """Run one command. Raises ConnectionLost when the way breaks; a timeout is in the result.

        Output over ``max_output`` is read and counted, not kept; the command is not disturbed by that.
        """
        nonce = os.urandom(16).hex()
        out, err = _Output(nonce, command.max_output), _Output(nonce, command.max_output)
        with self._call(remote.RUN_COMMAND, remote.run_request(command, nonce), _deadline(command.timeout_s)) as call:
            for stdout, stderr in call.pieces():
                out.feed(stdout)
                err.feed(stderr)
                if out.ended and err.line_complete:
                    return remote.run_result(command, out.kept, err.kept, err.line, (out.lost, err.lost))
            call.check_way()
        return _no_answer(command, _why_unanswered(out, err))

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        """Run many read-only commands in one round trip over one channel; results in the same order.

        Up to four run at a time. Each has its own deadline, and its own process group that is ended with it. A command
        that writes more than 1 MiB over ``max_output`` is ended: its output is kept in memory there until all are done.
        """
        if not commands:
            return []
        nonce = os.urandom(16).hex()
        spans = [c.timeout_s + _GRACE_S for c in commands]
        answer = bytearray()
        errors = bytearray()
        limit = _deadline(sum(spans) / LANES + max(spans))
        with self._call(remote.GATHER_COMMAND, remote.gather_request(commands, nonce, lanes=LANES), limit) as call:
            for stdout, stderr in call.pieces():
                answer += stdout
                errors += stderr[:65536]
                if answer.endswith(b"end\n"):
                    results = remote.parse_gather(bytes(answer), commands, nonce)
                    if results is not None:
                        return results
            call.check_way()
        why = remote.refusal(bytes(answer), bytes(errors))
        return [_no_answer(c, why) for c in commands]

    def stream(self, command: Command) -> Generator[bytes, None, Result]:
        """Lines of stdout as they come, each with its newline; ends with the command, or when the iterator is closed.

        The command's Result (without its stdout) is the generator's return value. At the command's ``timeout_s`` it is
        ended. Raises ConnectionLost when the way breaks.
        """
        nonce = os.urandom(16).hex()
        out, err = _Output(nonce, 0), _Output(nonce, command.max_output)
        text = b""
        with self._call(remote.RUN_COMMAND, remote.run_request(command, nonce), _deadline(command.timeout_s)) as call:
            for stdout, stderr in call.pieces():
                err.feed(stderr)
                *lines, text = (text + out.feed(stdout)).split(b"\n")
                for line in lines:
                    yield line + b"\n"
                if out.ended and text:
                    yield text
                    text = b""
                if out.ended and err.line_complete:
                    return remote.run_result(command, b"", err.kept, err.line, (0, err.lost))
            call.check_way()
        return _no_answer(command, _why_unanswered(out, err))

    def put(self, data: bytes, path: str, *, mode: int = 0o644, backup: bool = True, root: bool = True) -> Put:
        """Write a file there atomically (temporary file, fsync, rename), keeping the old content as a backup.

        The owner stays that of the old file. A symbolic link is refused. Raises TransportError when the file was not
        written, or does not read back as it was sent.
        """
        command = remote.put_command(data, path, mode=mode, backup=backup, root=root, timeout_s=60 + len(data) / 100_000)
        result = self.run(command)
        said = dict(line.split(" ", 1) for line in result.text.splitlines() if " " in line)
        if not result.ok:
            why = result.trouble or result.error_text.strip() or f"exit status {result.exit_status}"
            raise TransportError(f"{path} was not written on {self.host}: {why}")
        if said.get("sha256") != command.argv[-1]:
            raise TransportError(f"{path} on {self.host} reads back as sha256 {said.get('sha256')}, not as it was sent")
        return Put(path, command.argv[-1], said.get("backup", ""))

    @contextmanager
    def tunnel(self, port: int, host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
        """A local loopback port that leads to ``host:port`` as the machine sees it: ``with … as (address, port)``.

        Takes several connections at once. One that the far end refuses is closed at once.
        """
        self.open()
        link = self._link
        if link is None:
            raise ConnectionLost(f"the connection to {self.host} was closed")
        tunnel = _Tunnel(link, host, port)
        try:
            yield tunnel.address
        finally:
            tunnel.close()


def _deadline(command_s: float) -> float:
    return time.monotonic() + command_s + _GRACE_S + _WAY_S


def _no_answer(command: Command, why: str) -> Result:
    return Result(command, None, b"", b"", datetime.now(UTC), 0.0, trouble=why)


def _within(limit_s: float, work: Callable[[], None], what: str) -> None:
    """Do ``work`` in a thread and wait at most ``limit_s``: name lookup and key exchange have no deadline of their own."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name="proofbook-connect", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise CannotConnect(
            f"{what} took longer than {limit_s:g} s", hint="is the machine up, and does it answer on its console?"
        )
    if failed:
        raise failed[0]


# --------------------------------------------------------------------------------------------- the link


class _Line:
    """The socket under a connection; knows when bytes last came over it."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        if data:
            self.heard = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Link:
    """One connection, through its gateways: made once, never made anew, closed as a whole."""

    def __init__(self, route: Route, pinned: trust.HostKey | None, keepalive_s: float, silence_s: float, deadline: float) -> None:
        self.route = route
        self.pinned = pinned
        self.host_key: trust.HostKey | None = None
        self.peer = Peer("", "", "")
        self.transport: Any = None
        self._keepalive_s = keepalive_s
        self._silence_s = silence_s
        self._deadline = deadline
        self._connections: list[Any] = []
        self._sockets: list[Any] = []
        self._line: _Line | None = None
        self._closed = threading.Event()
        self._given_up = ""

    def _left(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def connect(self) -> None:
        """Connect hop by hop. Raises CannotConnect and its kinds, OtherMachine."""
        hops = (*self.route.jumps, self.route)
        sock = self._socket(hops[0])  # first, so that the far server gets ready during the import
        import fabric

        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks are not for a notebook
        for hop in hops:
            self._connect_hop(fabric, hop, sock if hop is hops[0] else self._socket(hop))
        self.transport = self._connections[-1].transport
        self._line = self._sockets[-1]
        software = self.transport.remote_version.split("-", 2)[-1]
        self.peer = Peer(f"{self.route.hostname}:{self.route.port}", str(self.host_key), software)
        threading.Thread(target=self._watch, name="proofbook-keepalive", daemon=True).start()
        if self._closed.is_set():
            self.close()

    def _socket(self, hop: Route) -> Any:
        if self._connections:
            try:
                return self._connections[-1].transport.open_channel(
                    "direct-tcpip", (hop.hostname, hop.port), ("", 0), timeout=self._left()
                )
            except Exception as error:
                via = self.route.jumps[len(self._connections) - 1].name
                raise _translated(error, hop, f"through {via}") from error
        if hop.proxy_command:
            import paramiko

            return paramiko.ProxyCommand(hop.proxy_command)
        try:
            sock = socket.create_connection((hop.hostname, hop.port), timeout=self._left())
        except OSError as error:
            raise _translated(error, hop) from error
        _tune(sock, self._silence_s)
        return sock

    def _connect_hop(self, fabric: Any, hop: Route, sock: Any) -> None:
        line = _Line(sock)
        self._sockets.append(line)
        keys = [os.path.expanduser(f) for f in hop.identity_files if os.path.isfile(os.path.expanduser(f))]
        connection = fabric.Connection(
            hop.hostname,
            user=hop.user,
            port=hop.port,
            gateway=False,
            config=_quiet_config(fabric),
            connect_kwargs={
                "sock": line,
                "key_filename": keys,
                "allow_agent": hop.use_agent,
                "look_for_keys": False,
                "banner_timeout": self._left(),
                "auth_timeout": self._left(),
                "channel_timeout": self._left(),
                "timeout": self._left(),
                "transport_factory": self._transport_factory(hop),
            },
        )
        connection.client.set_missing_host_key_policy(_Policy(self, hop))
        self._connections.append(connection)
        try:
            connection.open()
        except Exception as error:
            raise _translated(error, hop) from error

    def _transport_factory(self, hop: Route) -> Callable[..., Any]:
        kinds = [self.pinned.kind] if self.pinned and hop is self.route else trust.trusted_kinds(*hop.key_name, hop.known_hosts)

        def factory(sock: Any, **options: Any) -> Any:
            import paramiko

            transport = paramiko.Transport(sock, **options)
            transport.daemon = True
            security = transport.get_security_options()
            # The hybrid exchange with a lattice costs a tenth of a second of CPU on each side.
            security.kex = _first(security.kex, ["curve25519-sha256@libssh.org"])
            # With the others paramiko compares every packet's MAC in a loop of Python: a third of what reading costs.
            security.ciphers = _first(security.ciphers, ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com"])
            security.key_types = _first(security.key_types, [algorithm for kind in kinds for algorithm in _algorithms(kind)])
            return transport

        return factory

    def judge_key(self, hop: Route, key: trust.HostKey) -> None:
        """Accept the host key of a hop or raise. Called by paramiko before it authenticates."""
        shown = hop.name if hop.name == hop.hostname else f"{hop.name} ({hop.hostname})"
        if hop is self.route:
            if self.pinned is not None and key != self.pinned:
                raise OtherMachine(
                    f"another machine answers as {shown}: its host key is {key}, it was {self.pinned}",
                    hint="look at its console; nothing was done on it",
                )
            self.host_key = key
        trust.verify(*hop.key_name, key, hop.known_hosts, shown_as=f"{shown}, port {hop.port}" if hop.port != 22 else shown)

    # ------------------------------------------------------------------------------------- being alive

    @property
    def alive(self) -> bool:
        return self.transport is not None and bool(self.transport.is_active()) and not self._closed.is_set()

    def check(self) -> None:
        """Raises ConnectionLost when the connection is no longer there."""
        if not self.alive:
            raise self.lost()

    def lost(self) -> ConnectionLost:
        why = f": {self._given_up}" if self._given_up else ""
        return ConnectionLost(
            f"the connection to {self.route.name} is lost{why}",
            hint="it is made anew only when asked, and only to the same host key",
        )

    def _watch(self) -> None:
        """Ask for a sign of life after some silence; give the connection up after more.

        WHY: TCP answers for a process that stands still, and paramiko's own keepalive asks for no answer.
        """
        tick = self._keepalive_s / 3
        last = awake = time.monotonic()
        ping: threading.Thread | None = None
        while not self._closed.wait(tick) and self._line is not None and self.transport.is_active():
            now = time.monotonic()
            if now - last > 3 * tick + 1:
                awake = now  # this process itself stood still: the answers may be waiting
            last = now
            silent = now - max(self._line.heard, awake)
            if silent > self._silence_s:
                self._given_up = f"no sign of life for {silent:.0f} s"
                self.transport.close()
            elif silent > self._keepalive_s and (ping is None or not ping.is_alive()):
                ping = threading.Thread(target=self._ping, name="proofbook-ping", daemon=True)
                ping.start()

    def _ping(self) -> None:
        with contextlib.suppress(Exception):  # a broken connection is what the watch finds out
            self.transport.global_request("keepalive@openssh.com", wait=True)

    def close(self) -> None:
        self._closed.set()
        for connection in reversed(self._connections):
            connection.client.close()
        for sock in reversed(self._sockets):
            with contextlib.suppress(OSError):
                sock.close()


class _Policy:
    """What paramiko asks about a host key. It keeps no list of its own here, so it asks about every one."""

    def __init__(self, link: _Link, hop: Route) -> None:
        self._link = link
        self._hop = hop

    def missing_host_key(self, _client: Any, _name: str, key: Any) -> None:
        self._link.judge_key(self._hop, trust.HostKey(key.get_name(), key.asbytes()))


def _quiet_config(fabric: Any) -> Any:
    """A configuration of fabric that reads no file: ~/.fabric.yaml must not decide where a runbook goes."""
    import paramiko

    return fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())


def _tune(sock: socket.socket, silence_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(silence_s * 1000),
    }.items():
        if hasattr(socket, name):  # the runner may be a Mac
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _first(all_of_them: Sequence[str], preferred: Sequence[str]) -> list[str]:
    return [a for a in preferred if a in all_of_them] + [a for a in all_of_them if a not in preferred]


def _algorithms(kind: str) -> list[str]:
    """The signature algorithms of a key type: an RSA key signs with SHA-2."""
    return ["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind]


def _translated(error: BaseException, hop: Route, where: str = "") -> BaseException:
    """A foreign error as one of ours; anything that is no error of the way stays as it is."""
    import paramiko

    there = f"{hop.user}@{hop.hostname}:{hop.port}" + (f" {where}" if where else "")
    if isinstance(error, ProofbookError):
        return error
    if isinstance(error, socket.gaierror):
        return CannotConnect(
            f"the name {hop.hostname} does not resolve: {error.strerror}", hint="is it spelt as in ~/.ssh/config?"
        )
    if isinstance(error, TimeoutError):
        return CannotConnect(f"no answer from {there}", hint="is the machine up, and is there a way to it?")
    if isinstance(error, paramiko.PasswordRequiredException):
        return LoginFailed(f"the key for {there} is locked by a passphrase", hint="unlock it for the session with: ssh-add")
    no_method = isinstance(error, paramiko.SSHException) and "authentication methods" in str(error)
    if isinstance(error, paramiko.AuthenticationException) or no_method:
        tried = ", ".join(hop.identity_files) + (" and the agent's keys" if hop.use_agent else "")
        return LoginFailed(f"{there} does not let us in: {error}", hint=f"tried {tried}; compare with: ssh -v {hop.name}")
    if isinstance(error, OSError | EOFError | paramiko.SSHException):
        reason = getattr(error, "strerror", None) or getattr(error, "text", None) or str(error) or "the connection was closed"
        return CannotConnect(f"cannot connect to {there}: {reason}", hint="is the machine up, and does its SSH server run?")
    return error


# --------------------------------------------------------------------------------------------- one call


class _Call:
    """One session: an agent that was started, its input and its output."""

    def __init__(self, link: _Link, deadline: float) -> None:
        self._link = link
        self._deadline = deadline
        self._channel: Any = None

    def start(self, line: str, request: bytes) -> None:
        """Open the session, start the agent, send its request. Raises ConnectionLost, DeadlinePassed, TransportError."""
        import paramiko

        left = self._deadline - time.monotonic()
        try:
            self._channel = self._open_session()
            # paramiko waits for the start without a limit; closing the channel is what ends that wait.
            timer = threading.Timer(left, self._channel.close)
            timer.daemon = True
            timer.start()
            try:
                self._channel.exec_command(line)
                self._send(request)
            finally:
                timer.cancel()
        except paramiko.ChannelException as error:
            raise TransportError(
                f"{self._link.route.name} refuses another session: {error.text}",
                hint="its MaxSessions may be used up, or the account may run no commands",
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.check_way()
            if time.monotonic() >= self._deadline:
                raise self._late() from error
            raise TransportError(f"{self._link.route.name} starts no command: {error}") from error

    def _open_session(self) -> Any:
        """A session; when the server has too many, wait a little: those that have just ended still count there."""
        import paramiko

        patience = min(self._deadline, time.monotonic() + _PATIENCE_S)
        while True:
            try:
                return self._link.transport.open_session(timeout=max(0.1, self._deadline - time.monotonic()))
            except paramiko.SSHException:
                # WHY not ChannelException alone: paramiko has room for one refusal; of two at once, one says only that it failed.
                if time.monotonic() >= patience or not self._link.alive:
                    raise
            time.sleep(0.02)

    def _send(self, request: bytes) -> None:
        if len(request) <= _INLINE_INPUT:
            self._send_quietly(request)
        else:
            threading.Thread(target=self._send_quietly, args=(request,), name="proofbook-input", daemon=True).start()

    def _send_quietly(self, request: bytes) -> None:
        # The far end may be done without reading it all (a shell that only refuses, a command); its answer says how it went.
        with contextlib.suppress(OSError):
            self._channel.sendall(request)

    def pieces(self) -> Iterator[tuple[bytes, bytes]]:
        """Pieces of stdout and stderr as they come, until their end. Raises ConnectionLost, DeadlinePassed."""
        channel = self._channel
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            poll.poll(min(left, 1.0) * 1000)
            over = channel.eof_received or channel.closed
            out = channel.recv(_PIECE) if channel.recv_ready() else b""
            err = channel.recv_stderr(_PIECE) if channel.recv_stderr_ready() else b""
            if out or err:
                yield out, err
            elif over:
                return
            else:
                self._link.check()

    def check_way(self) -> None:
        """Raises ConnectionLost when it was the connection that ended, not only the session."""
        self._link.transport.join(1.0)
        self._link.check()

    def _late(self) -> DeadlinePassed:
        return DeadlinePassed(
            f"{self._link.route.name} is connected, but does not answer in time",
            hint="it may be overloaded or stuck; look at its console",
        )

    def close(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(Exception):  # on a broken connection there is nobody left to tell
                self._channel.close()


class _Output:
    """One output stream of a command, between the nonce that starts it and the nonce that ends it.

    Keeps its first ``room`` bytes and counts the rest. ``before``: the last that was said before it started.
    """

    def __init__(self, nonce: str, room: int) -> None:
        self._mark = nonce.encode()
        self._room = room
        self._kept = bytearray()
        self._tail = b""
        self._after = b""
        self.before = b""
        self.lost = 0
        self.started = False
        self.ended = False

    def feed(self, piece: bytes) -> bytes:
        """Take what came; the bytes of the command's own output that are certain by now and were not given before."""
        if not self.started:
            piece = self._await_start(piece)
        if self.ended:
            if not self.line_complete:
                self._after += piece
            return b""
        output, self.ended, rest = _cut(self._tail + piece, self._mark)
        self._tail, self._after = (b"", rest) if self.ended else (rest, b"")
        self._keep(output)
        return output

    def _await_start(self, piece: bytes) -> bytes:
        """What follows the starting nonce; what stands before it is the login shell's."""
        said, self.started, rest = _cut(self.before + piece, self._mark + b"\n")
        self.before = said if self.started else (said + rest)[-_WORDS_OF_LOGIN:]
        return rest if self.started else b""

    def _keep(self, data: bytes) -> None:
        fits = max(0, self._room - len(self._kept))
        self._kept += data[:fits]
        self.lost += max(0, len(data) - fits)

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    @property
    def line_complete(self) -> bool:
        return self.ended and b"\n" in self._after

    @property
    def line(self) -> str:
        """What follows the ending nonce on its line."""
        return self._after.partition(b"\n")[0].decode("ascii", "replace")


def _cut(data: bytes, mark: bytes) -> tuple[bytes, bool, bytes]:
    """What stands before a mark, whether it is there, and what follows; not there: an end that may be its beginning follows."""
    before, found, after = data.partition(mark)
    if found:
        return before, True, after
    begun = next((n for n in range(min(len(mark) - 1, len(data)), 0, -1) if data.endswith(mark[:n])), 0)
    return data[: len(data) - begun], False, data[len(data) - begun :]


def _why_unanswered(out: _Output, err: _Output) -> str:
    """Why the session ended without the command's end: it never started, or nobody was left to say how it ended."""
    if out.started or err.started:
        return "the session ended while it ran: whether it did its work there is unknown"
    return remote.refusal(out.before, err.before)


class _Tunnel:
    """A listener on loopback whose connections go through the link."""

    def __init__(self, link: _Link, host: str, port: int) -> None:
        self._link = link
        self._to = (host, port)
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="proofbook-tunnel", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock, peer), name="proofbook-tunnel", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        import paramiko

        try:
            channel = self._link.transport.open_channel("direct-tcpip", self._to, peer, timeout=_WAY_S)
        except (paramiko.SSHException, OSError, EOFError):
            sock.close()  # as a refused connection: this is what the far end said
            return
        with self._lock:
            self._open |= {sock, channel}
            closing = self._closing
        if not closing:
            back = threading.Thread(target=_pump, args=(channel, sock, lambda: sock.shutdown(socket.SHUT_WR)), daemon=True)
            back.start()
            _pump(sock, channel, channel.shutdown_write)
            back.join()
        self._drop(sock, channel)

    def _drop(self, *ends: Any) -> None:
        with self._lock:
            self._open -= set(ends)
        for end in ends:
            with contextlib.suppress(OSError, EOFError):
                end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept, which a close alone does not
        self._listener.close()
        with self._lock:
            self._closing = True
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError, EOFError):
                end.shutdown(socket.SHUT_RDWR)
        self._drop(*ends)


def _pump(source: Any, sink: Any, at_end: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        at_end()

"""The stand-in as a real process: it prints a start log, opens a real port, has real children, and ends like the real one.

It is run as ``python3 -m sglang.launch_server …`` from a folder in which this package lies as ``sglang/standin``. What it is
to do wrong stands in ``/etc/proofbook-standin.json``: ``{"version": "0.5.10", "faults": {"crash-on-nth": {"n": 17}}}``.

Environment: ``PROOFBOOK_STANDIN_RATE`` is how many of the server's seconds pass in a real one (default 50: a start takes one
second), ``PROOFBOOK_STANDIN_FAULTS`` names another file of faults, ``PROOFBOOK_STANDIN_RUN`` another folder for the locks that
stand in for GPU memory (``/run/proofbook-standin``): a scheduler holds its card's lock as long as it lives.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from . import arguments, memory
from .engine import Effect, Reply, Server
from .startlog import NOMINAL, dated

STAND_IN = "proofbook lab: this is a stand-in for SGLang, it has no GPU and no model"

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main() -> None:
    """Run until a signal or a fault ends it."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(arguments.help_text(_settings()["version"]), end="")
        return
    Process(_settings()).run()


def _settings() -> dict[str, Any]:
    path = Path(os.environ.get("PROOFBOOK_STANDIN_FAULTS", "/etc/proofbook-standin.json"))
    given: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"version": _installed(), "faults": {}, **given}


def _installed() -> str:
    """The version that the package says of itself, as a look from outside finds it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "0.5.10"


class Process:
    """The main process with its children. ``settings``: {"version", "faults"}."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.rate = float(os.environ.get("PROOFBOOK_STANDIN_RATE", NOMINAL))
        self.cards = Path(os.environ.get("PROOFBOOK_STANDIN_RUN", "/run/proofbook-standin"))
        argv = [sys.executable, "-m", "sglang.launch_server", *sys.argv[1:]]
        faults, version = settings["faults"], settings["version"]
        self.server = Server(argv, dict(os.environ), version, faults)
        if self.server.resolved is not None:
            free = self._free()
            if min(free) < memory.FREE:
                self.server = Server(argv, dict(os.environ), version, faults, free_gib=free)
        self.server.pace = self.rate
        self.began = time.monotonic()
        self.children: dict[int, str] = {}
        self.locks: dict[int, int] = {}
        self.running = 0
        self.leaving = False
        self.lock = threading.RLock()
        self.forever = threading.Event()

    # ------------------------------------------------------------------------------------------- time

    def now(self) -> float:
        """Seconds of the server's time since it began."""
        return (time.monotonic() - self.began) * self.rate

    def sleep_until(self, second: float) -> None:
        while (left := second - self.now()) > 0:
            time.sleep(left / self.rate)

    def say(self, text: str) -> None:
        print(dated(text, time.time(), os.getpid()), file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------------------- life

    def run(self) -> None:
        """The whole life: children, start log, port, requests."""
        print(STAND_IN, file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=self._drain, daemon=True).start())
        if self.server.resolved is not None:
            self._fork_children()
            threading.Thread(target=self._watch_children, daemon=True).start()
        opens = self.server.listens_after_s
        http: ThreadingHTTPServer | None = None
        for second, text in self.server.startup():
            if opens is not None and http is None and second >= opens:
                http = self._open_port(opens)
            self.sleep_until(second)
            # WHY: argparse prints before logging is configured, so its lines carry no date.
            print(text, file=sys.stderr, flush=True) if self.server.resolved is None else self.say(text)
        if self.server.ends is not None:
            self.sleep_until(self.server.ends.after_s)
            self._end(9 if self.server.ends.killed else 0, self.server.ends.status)
        for effect in self.server.background():
            threading.Thread(target=self._befall, args=(effect, self.now()), daemon=True).start()
        self.forever.wait()

    def _open_port(self, at: float) -> ThreadingHTTPServer:
        self.sleep_until(at)
        assert self.server.resolved is not None
        where = (self.server.resolved.args["host"], self.server.port)
        try:
            http = _Http(where, _handler(self))
        except OSError:
            lines, end = self.server.port_taken()
            for line in lines:
                self.say(line)
            self._end(0, end.status)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        return http

    def _drain(self) -> None:
        self.leaving = True
        began = self.now()
        for second, text in self.server.stopping():
            self.sleep_until(began + second)
            self.say(text)
        self._end(0, 0)

    def _end(self, by_signal: int, status: int) -> Any:
        """End with the children: by the signal, as SGLang ends itself when a child failed, or with a status."""
        self.leaving = True
        for pid in list(self.children):
            _kill(pid)
        sys.stderr.flush()
        if by_signal:
            os.kill(os.getpid(), by_signal)
        os._exit(status)

    def _befall(self, effect: Effect, began: float) -> None:
        self.sleep_until(began + effect.after_s)
        for line in effect.lines:
            self.say(line)
        if effect.kind == "die":
            self._end(signal.SIGKILL, 0)
        for pid, name in list(self.children.items()):
            if name == f"sglang::scheduler_TP{effect.rank}":
                _kill(pid)

    # --------------------------------------------------------------------------------------- children

    def _free(self) -> tuple[float, ...]:
        """GiB free on each card: a card whose lock somebody holds is taken."""
        self.cards.mkdir(parents=True, exist_ok=True)
        free = []
        for rank in range(self.server.tp_size):
            with (self.cards / f"gpu{rank}").open("a+") as card:
                try:
                    fcntl.flock(card, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free.append(memory.FREE)
                except OSError:
                    free.append(memory.FREE - 76.0)
        return tuple(free)

    def _fork_children(self) -> None:
        """Before any thread of ours: the schedulers and the detokenizer, under the names that the real ones give themselves."""
        names = [f"sglang::scheduler_TP{rank}" for rank in range(self.server.tp_size)]
        for rank, name in enumerate([*names, "sglang::detokenizer"]):
            pid = os.fork()
            if pid == 0:
                _child(name, self.cards / f"gpu{rank}" if rank < len(names) else None)
            self.children[pid] = name

    def _watch_children(self) -> None:
        """What happens when a scheduler is gone depends on the release: a watchdog ends the server, or nobody notices."""
        while self.children:
            try:
                pid, _ = os.wait()
            except ChildProcessError:
                return
            name = self.children.pop(pid, "")
            if self.leaving or not name.startswith("sglang::scheduler_TP"):
                continue
            for effect in self.server.rank_lost(int(name.removeprefix("sglang::scheduler_TP"))):
                self._befall(effect, self.now())

    # --------------------------------------------------------------------------------------- requests

    def answer(self, method: str, path: str, body: bytes, client: str, authorization: str = "") -> Reply:
        """Answer when its time has come; a reply that hangs never comes back from here."""
        counts = method == "POST" and path.partition("?")[0] in ("/generate", "/v1/chat/completions", "/v1/completions")
        began = self.now()
        with self.lock:
            self.running += counts
            ready = self.server.ready_after_s is not None and began >= self.server.ready_after_s
            reply = self.server.answer(
                method,
                path,
                body,
                running=self.running,
                ready=ready,
                client=client,
                age_s=began,
                authorization=authorization,
            )
        try:
            for effect in reply.effects:
                threading.Thread(target=self._befall, args=(effect, began), daemon=True).start()
            for second, text in sorted(reply.log):
                self.sleep_until(began + second)
                self.say(text)
            if reply.hangs:
                self.forever.wait()
            self.sleep_until(began + (reply.chunks[0][0] if reply.chunks else reply.seconds))
        finally:
            with self.lock:
                self.running -= counts
        return reply


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def _handler(process: Process) -> type[BaseHTTPRequestHandler]:
    """The handler of one server's port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "proofbook-lab-stand-in"

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            client = f"{self.client_address[0]}:{self.client_address[1]}"
            reply = process.answer(self.command, self.path, body, client, self.headers.get("authorization") or "")
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if not reply.chunks:
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
                return
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            began = process.now() - reply.chunks[0][0]
            for second, data in reply.chunks:
                process.sleep_until(began + second)
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            """SGLang's own way of writing is used instead."""

    return Handler


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _child(name: str, card: Path | None) -> None:
    """A child's whole life: it has its name, holds its card, and waits for its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, name.encode()[:15])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the real ones: the main process ends them when it has drained
    _rename(name)
    if card is not None:
        with card.open("a+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            held.truncate(0)
            held.write(f"{os.getpid()} {name} 76842\n")
            held.flush()
            signal.pause()
    signal.pause()
    os._exit(0)


def _rename(name: str) -> None:
    """Write over the arguments of this process, as setproctitle does, so that ``/proc/<pid>/cmdline`` shows the name alone."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, name.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()

"""A stand-in for SGLang's server inside the lab's machines: its start log and its health addresses, no GPU and no model.

It lies in the guest as ``sglang/launch_server.py`` beside ``sglang/behaviour.py``, so that the process has a real command line.
``PROOFBOOK_LAB_START_S`` is how long it takes until it is ready (seconds, default 1).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STAND_IN = "proofbook lab: this is a stand-in for SGLang, it has no GPU and no model"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    """Answers what the behaviour module says; ``behaviour`` and ``ready_at`` are set before it serves."""

    behaviour: Any = None
    ready_at = 0.0
    server_version = "proofbook-lab-stand-in"

    def do_GET(self) -> None:
        ready = time.monotonic() >= self.ready_at
        status, kind, body = self.behaviour.answer(self.path, sys.argv, os.environ, ready=ready)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        say(
            self.behaviour.dated(
                f'INFO:     {self.client_address[0]} - "GET {self.path} HTTP/1.1" {status}', time.time(), os.getpid()
            )
        )

    def log_message(self, format: str, *args: object) -> None:
        """SGLang's own way of writing is used instead."""


def main() -> None:
    behaviour = importlib.import_module("sglang.behaviour")
    took_s = float(os.environ.get("PROOFBOOK_LAB_START_S", "1"))
    began = time.monotonic()
    say(STAND_IN)
    Handler.behaviour, Handler.ready_at = behaviour, began + took_s
    server = ThreadingHTTPServer(("127.0.0.1", behaviour.port(sys.argv)), Handler)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    threading.Thread(target=_start_log, args=(behaviour, began, took_s), daemon=True).start()
    server.serve_forever()


def _start_log(behaviour: Any, began: float, took_s: float) -> None:
    lines = list(behaviour.startup(sys.argv, os.environ, took_s))
    last = max(at for at, _ in lines)
    for at, text in lines:
        time.sleep(max(0.0, began + at * took_s / last - time.monotonic()))
        say(behaviour.dated(text, time.time(), os.getpid()))


if __name__ == "__main__":
    main()

"""The stand-in as a real process: its port, its children, its end. Each test has a loopback address of its own."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, RemoteDisconnected
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

MTP = (
    "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "6", "--mamba-scheduler-strategy", "extra_buffer",
)  # fmt: skip
PORT = 30000


class Running:
    """One server process, and what it wrote."""

    def __init__(self, folder: Path, *options: str, version: str = "0.5.10", **faults: Any) -> None:
        self.folder, self.address = folder, f"127.{random.randint(2, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        (folder / "faults.json").write_text(
            json.dumps({"version": version, "faults": {k.replace("_", "-"): v for k, v in faults.items()}})
        )
        self.start(*options)

    def start(self, *options: str) -> None:
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.folder / "packages"),
            "PROOFBOOK_STANDIN_FAULTS": str(self.folder / "faults.json"),
            "PROOFBOOK_STANDIN_RUN": str(self.folder / "cards"),
            "PROOFBOOK_STANDIN_RATE": "400",
            "SGLANG_ENABLE_SPEC_V2": "1",
        }
        argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/Q", "--tp-size", "4"]
        argv += ["--host", self.address, "--port", str(PORT), "--mem-fraction-static", "0.75", *options]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 60
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not within a minute: {what}\n{self.log[-2000:]}"
            time.sleep(0.02)
        return found

    def ready(self) -> None:
        self.until(lambda: "fired up and ready to roll" in self.log, "it is ready")

    def ended(self) -> int:
        return self.process.wait(60)

    def children(self) -> dict[str, int]:
        """Names as ``/proc`` has them → PID."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                of_task = (task / "children").read_text().split()
            except FileNotFoundError:
                continue  # a thread that has ended meanwhile; its children are another's now
            for pid in of_task:
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    found[Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()] = int(pid)
        return found

    def generate(self, prompt: str, **params: Any) -> dict[str, Any]:
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64, **params}}
        connection = HTTPConnection(self.address, PORT, timeout=60)
        connection.request("POST", "/generate", json.dumps(body))
        value: dict[str, Any] = json.loads(connection.getresponse().read())
        return value


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    launcher = resources.files("proofbook.lab.real.guest") / "launch_server.py"
    (package / "launch_server.py").write_bytes(launcher.read_bytes())
    (package / "standin").symlink_to(str(resources.files("proofbook.lab.standin")))
    started: list[Running] = []

    def start(*options: str, **more: Any) -> Running:
        started.append(Running(tmp_path, *options, **more))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_it_says_what_it_is_serves_and_drains(run: Callable[..., Running]) -> None:
    one = run(*MTP)
    one.ready()
    assert one.log.splitlines()[0] == "proofbook lab: this is a stand-in for SGLang, it has no GPU and no model"
    assert set(one.children()) == {*(f"sglang::scheduler_TP{n}" for n in range(4)), "sglang::detokenizer"}
    assert urllib.request.urlopen(f"http://{one.address}:{PORT}/health", timeout=60).status == 200
    assert one.generate("Count from 1 to 300.")["meta_info"]["spec_accept_length"] > 4
    pids = one.children().values()
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 0
    assert "Gracefully exiting" in one.log
    one.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its children are gone")


def test_arguments_that_it_does_not_know(run: Callable[..., Running]) -> None:
    one = run("--speculative-draft-epsilon", "0.2")
    assert one.ended() == 2
    assert one.log.splitlines()[-1] == "sglang serve: error: unrecognized arguments: --speculative-draft-epsilon 0.2"


def test_a_crash_cuts_the_request_and_ends_everything(run: Callable[..., Running]) -> None:
    one = run(*MTP, crash_on_first_request={})
    one.ready()
    pids = one.children().values()
    with pytest.raises((ConnectionError, RemoteDisconnected)):
        one.generate("Tell me.")
    assert one.ended() == -signal.SIGKILL
    one.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its children are gone")


@pytest.mark.parametrize(("version", "notices"), [("0.5.9", False), ("0.5.10", True)])
def test_a_scheduler_that_is_killed(run: Callable[..., Running], version: str, notices: bool) -> None:
    one = run(*MTP, version=version)
    one.ready()
    os.kill(one.children()["sglang::scheduler_TP2"], signal.SIGKILL)
    if notices:
        assert one.ended() == -signal.SIGKILL
        assert "Subprocess scheduler_2 crashed with exit code -9" in one.log
        return
    one.until(lambda: "sglang::scheduler_TP2" not in one.children(), "it is gone")
    one.until(lambda: "503" in _status(one), "the health address notices")
    assert one.process.poll() is None


def _status(one: Running) -> str:
    connection = HTTPConnection(one.address, PORT, timeout=60)
    connection.request("GET", "/health")
    return str(connection.getresponse().status)


def test_a_real_process_refuses_who_brings_no_key(run: Callable[..., Running]) -> None:
    one = run("--api-key", "key-of-this-server")
    one.ready()

    def asked(path: str, **headers: str) -> tuple[int, bytes]:
        connection = HTTPConnection(one.address, PORT, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert asked("/server_info") == (401, b'{"error":"Unauthorized"}')
    assert asked("/server_info", Authorization="Bearer another")[0] == 401
    status, body = asked("/server_info", Authorization="Bearer key-of-this-server")
    assert (status, json.loads(body)["tp_size"]) == (200, 4)
    assert asked("/health")[0] == 200
    one.until(lambda: '"GET /server_info HTTP/1.1" 401 Unauthorized' in one.log, "the refusal is logged")


def test_a_port_that_somebody_else_owns(run: Callable[..., Running]) -> None:
    first = run(*MTP)
    first.ready()
    owner = first.process
    cards = first.folder / "cards"
    cards.rename(first.folder / "other-cards")  # the first one's memory is another machine's, so that only the port is short
    first.start(*MTP)
    assert first.ended() == 1
    assert "[Errno 98] error while attempting to bind on address" in first.log
    owner.kill()
    owner.wait()


def test_a_leftover_that_keeps_its_card(run: Callable[..., Running]) -> None:
    one = run(*MTP)
    one.ready()
    one.process.send_signal(signal.SIGTERM)
    one.ended()
    with (one.folder / "cards" / "gpu1").open() as card:
        fcntl.flock(card, fcntl.LOCK_EX)
        one.start(*MTP)
        assert one.ended() == -signal.SIGKILL
    assert "The memory capacity is unbalanced. Some GPUs may be occupied by other processes." in one.log


def test_help_is_that_of_the_release(run: Callable[..., Running]) -> None:
    one = run("--help", version="0.5.20")
    assert one.ended() == 0
    assert "--mamba-radix-cache-strategy" in one.log and "--mamba-scheduler-strategy" not in one.log

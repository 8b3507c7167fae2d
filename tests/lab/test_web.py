"""HTTP to a simulated machine's server through an SSH tunnel: concurrent, kept alive, in the machine's own time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from proofbook.lab.sim import client
from proofbook.lab.sim.client import LabClock
from proofbook.model import Command, command
from proofbook.transports.ssh import SshTransport

pytestmark = pytest.mark.lab

ADDRESS = "10.20.30.174"
IN = ("pct", "exec", "102", "--")
UNIT = "sglang-qwen.service"
MTP = (
    "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "6", "--mamba-scheduler-strategy", "extra_buffer",
)  # fmt: skip


@contextmanager
def reached(scenario: str) -> Iterator[tuple[SshTransport, LabClock]]:
    place = client.ensure(scenario)
    way = SshTransport(
        place.address,
        port=place.port,
        user=place.user,
        identity_file=place.identity_file,
        known_hosts=place.known_hosts,
        ssh_config=False,
    )
    try:
        way.open()
        yield way, LabClock(place.state_dir)
    finally:
        way.close()


def generate(connection: HTTPConnection, prompt: str, tokens: int = 256, **more: Any) -> dict[str, Any]:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}, **more}
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    value: dict[str, Any] = json.loads(answer.read())
    return value


def test_an_answer_takes_the_machines_time_on_a_connection_that_is_kept(lab: Path) -> None:
    with reached("healthy") as (way, clock), way.tunnel(30000, ADDRESS) as (address, port):
        connection = HTTPConnection(address, port, timeout=60)
        connection.request("GET", "/server_info")
        info = json.loads(connection.getresponse().read())
        assert info["version"] == "0.5.10" and info["speculative_algorithm"] is None
        socket = connection.sock
        before = clock.now()
        latency = generate(connection, "Count from 1 to 300.")["meta_info"]["e2e_latency"]
        assert (clock.now() - before).total_seconds() >= latency > 2.0
        assert generate(connection, "Count from 1 to 300.", 8)["meta_info"]["completion_tokens"] == 8
        assert connection.sock is socket


def test_those_that_are_sent_together_are_under_way_together(lab: Path) -> None:
    with reached("healthy") as (way, _), way.tunnel(30000, ADDRESS) as (address, port):

        def one(n: int) -> float:
            latency = generate(HTTPConnection(address, port, timeout=60), f"Tell me of the sea {n}.")["meta_info"]["e2e_latency"]
            return float(latency)

        alone = one(0)
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(one, range(4)))
        assert min(together) > 1.1 * alone
        lines = way.run(command(*IN, "journalctl", "-u", UNIT, "-o", "cat", "--no-pager")).text
        assert "Decode batch, #running-req: 4" in lines


def test_a_stream_comes_in_chunks(lab: Path) -> None:
    with reached("healthy") as (way, _), way.tunnel(30000, ADDRESS) as (address, port):
        connection = HTTPConnection(address, port, timeout=60)
        body = {"text": "Tell me.", "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
        connection.request("POST", "/generate", json.dumps(body))
        answer = connection.getresponse()
        assert answer.getheader("transfer-encoding") == "chunked"
        events = [line for line in answer.read().split(b"\n\n") if line]
        assert len(events) == 6 and events[-1] == b"data: [DONE]"


def test_who_is_not_there_refuses(lab: Path) -> None:
    with reached("healthy") as (way, _):
        for host, port in ((ADDRESS, 30001), ("127.0.0.1", 30000)):
            with way.tunnel(port, host) as (address, local), pytest.raises((ConnectionError, RemoteDisconnected)):
                generate(HTTPConnection(address, local, timeout=60), "Tell me.")


def test_a_request_is_cut_when_its_server_dies(lab: Path) -> None:
    with reached("mtp-crash-on-first-request") as (way, clock):
        way.run(command(*IN, "mkdir", "-p", f"/etc/systemd/system/{UNIT}.d"))
        text = way.run(command(*IN, "cat", f"/etc/systemd/system/{UNIT}")).text
        start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
        drop = f"[Service]\nEnvironment=SGLANG_ENABLE_SPEC_V2=1\nExecStart=\n{start} {' '.join(MTP)}\n"
        write = (*IN, "sh", "-c", f"cat > /etc/systemd/system/{UNIT}.d/50-mtp.conf")
        assert way.run(Command(write, stdin=drop.encode())).exit_status == 0
        assert way.run(command(*IN, "systemctl", "daemon-reload")).exit_status == 0
        assert way.run(command(*IN, "systemctl", "restart", UNIT)).exit_status == 0
        clock.sleep(60)
        with way.tunnel(30000, ADDRESS) as (address, port), pytest.raises((ConnectionError, RemoteDisconnected)):
            generate(HTTPConnection(address, port, timeout=60), "Tell me.")
        shown = way.run(command(*IN, "systemctl", "show", UNIT, "--property=ExecMainStatus,Result")).text
        assert "ExecMainStatus=9" in shown and "Result=signal" in shown

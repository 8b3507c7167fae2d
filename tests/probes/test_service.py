from __future__ import annotations

from typing import Any

import pytest

from proofbook.intent import ContainerSpec
from proofbook.probes.service import Endpoint

URL = "http://127.0.0.1:30000/health"


@pytest.mark.parametrize(("code", "ok"), [("200", True), ("204", True), ("503", False), ("404", False), ("302", False)])
def test_an_answer(machine: Any, code: str, ok: bool) -> None:
    facts = machine.on("curl", stdout=code).value(Endpoint(URL))
    assert (facts.http_status, facts.error, facts.ok) == (int(code), "", ok)


@pytest.mark.parametrize(
    ("status", "stderr", "reason"),
    [
        (
            7,
            "curl: (7) Failed to connect to 127.0.0.1 port 30000: Connection refused",
            "connection refused or unreachable (Failed to",
        ),
        (
            28,
            "curl: (28) Operation timed out after 10001 milliseconds with 0 bytes received",
            "no answer within the time allowed",
        ),
        (6, "curl: (6) Could not resolve host: gpu09", "the name cannot be resolved (Could not resolve host: gpu09)"),
        (52, "curl: (52) Empty reply from server", "closed the connection without an answer"),
        (56, "", "the connection broke while receiving (curl exit status 56)"),
    ],
)
def test_no_answer_is_known_and_in_words(machine: Any, status: int, stderr: str, reason: str) -> None:
    facts = machine.on("curl", stdout="000", stderr=stderr, status=status).value(Endpoint(URL))
    assert facts.http_status is None and not facts.ok
    assert reason in facts.error


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"status": 127, "stderr": "sh: 1: curl: not found\n"}, "`curl` is not there"),
        ({"status": 3, "stdout": "000", "stderr": "curl: (3) URL using bad/illegal format\n"}, "exit status 3"),
        ({"status": 6, "stdout": "", "stderr": "cannot enter the container\n"}, "exit status 6: cannot enter"),
        ({"status": 255, "stderr": "CT 102 not running\n"}, "CT 102 not running"),
        ({"status": 0, "stdout": "000"}, "no HTTP status: b'000'"),
        ({"status": 0, "stdout": "<html>"}, "no HTTP status"),
        ({"status": 0, "stdout": "²00"}, "no HTTP status"),
        ({"status": None, "trouble": "the connection was lost"}, "the connection was lost"),
    ],
)
def test_what_is_no_answer_of_curl_is_unknown(machine: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in machine.on("curl", **said).unknown(Endpoint(URL))


def test_what_is_asked(machine: Any) -> None:
    spec = ContainerSpec(name="web", kind="docker")
    machine.on("curl", stdout="200").value(Endpoint(URL, spec))
    (asked,) = machine.asked()
    assert asked.argv[:4] == ("docker", "exec", "-i", "web")
    assert asked.argv[4:] == ("curl", "-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", URL)
    assert asked.timeout_s > 10

"""HTTP endpoints of services, asked from where the service is."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.base import inside, said, text_of

__all__ = ["Endpoint", "EndpointFacts"]

#: curl's exit statuses that say how the *endpoint* failed; all others mean that curl itself could not ask.
_NO_ANSWER = {
    5: "the proxy's name cannot be resolved",
    6: "the name cannot be resolved",
    7: "connection refused or unreachable",
    18: "the answer broke off",
    28: "no answer within the time allowed",
    35: "the TLS handshake failed",
    52: "the server closed the connection without an answer",
    55: "the connection broke while sending",
    56: "the connection broke while receiving",
    60: "the server's certificate is not trusted",
}
_DEADLINE_S = 10


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """How an endpoint answered: an HTTP status, or None and ``error`` in words ("connection refused", …)."""

    url: str
    http_status: int | None
    error: str
    took_s: float

    @property
    def ok(self) -> bool:
        return self.http_status is not None and 200 <= self.http_status < 300


@dataclass(frozen=True)
class Endpoint(Probe[EndpointFacts]):
    """One GET of ``url`` by curl, on the host or in a container, 10 s at most."""

    url: str
    container: ContainerSpec | None = None
    name: ClassVar[str] = "service.Endpoint"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], EndpointFacts]:
        ask = ("curl", "-sS", "-m", str(_DEADLINE_S), "-o", "/dev/null", "-w", "%{http_code}", self.url)
        (answer,) = yield [inside(self.container, command(*ask, timeout_s=_DEADLINE_S + 10))]
        return _endpoint_facts(self.url, answer)


def _endpoint_facts(url: str, result: Result) -> EndpointFacts:
    # WHY not just "exit status is not 0": a container's manager also ends with small numbers when it cannot enter; only
    # together with the code that curl always prints (000 = no answer) is it curl that speaks.
    code = result.stdout.strip()
    if result.exit_status in _NO_ANSWER and code.isdigit():
        return EndpointFacts(url, None, f"{_NO_ANSWER[result.exit_status]} ({_curls_words(result)})", result.duration_s)
    text_of(result)
    if not (code.isdigit() and 100 <= int(code) <= 599):
        raise CannotTell(f"curl ended well, but gave no HTTP status: {code[:80]!r}")
    return EndpointFacts(url, int(code), "", result.duration_s)


def _curls_words(result: Result) -> str:
    """curl's own message without its name, e.g. "Failed to connect to 127.0.0.1 port 30000: Connection refused"."""
    return re.sub(r"^curl: \(\d+\) ", "", said(result)) if result.stderr else f"curl exit status {result.exit_status}"

"""HTTP endpoints of services, asked from where the service is."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result


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

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], EndpointFacts]: ...

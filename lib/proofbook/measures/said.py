"""What a server says of itself, asked as its client: where it demands an API key, a command on the machine gets no answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from proofbook.host import Bench
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.measures.live import measured, on_the_bench
from proofbook.model import Measure, Measurement

__all__ = ["ServerSays"]


@dataclass(frozen=True)
class ServerSays(Measure):
    """``/server_info`` (up to 0.5.5 ``/get_server_info``) through the tunnel, with the server's API key.

    ``value``: ``path`` · ``said`` (the answer without what is secret by its name; None when there was none) · ``why`` there was
    none. It asks the scheduler: no answer is an answer, and says so.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    answer_s: float = 30.0
    name: ClassVar[str] = "serving.ServerSays"
    title: ClassVar[str] = "What does the server say of itself?"

    def take(self, bench: Bench) -> Measurement:
        with on_the_bench(self, bench, self.service, self.container, self.answer_s) as live:
            path, said, why = live.server_info()
            value = {"path": path, "said": said, "why": why}
            return measured(self, live, unit="", conditions={"deadline_s": self.answer_s}, value=value)

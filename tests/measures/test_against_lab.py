"""The measures over SSH against a simulated machine whose server speaks HTTP through the tunnel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from proofbook.host import Host
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import HostSpec, Inventory, connect
from proofbook.lab.sim import client
from proofbook.measures.control import ControlPrompts
from proofbook.measures.serving import Baseline, Gain
from proofbook.measures.stability import Stability
from proofbook.model import Measurement, Observation, Probe, Seen, command
from proofbook.probes import drive

pytestmark = pytest.mark.lab


class LabBench:
    """A bench on a real connection; evidence is only counted."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.kept: list[bytes] = []

    def look(self, *probes: Probe[Any]) -> Seen:
        now, boot_id = self.host.clock.now(), self.host.identity.boot_id
        answers = drive(probes, self.host.gather)
        return Seen(Observation(p, a.value, a.unknown, now, boot_id) for p, a in answers.items())

    def tunnel(self, port: int, container: ContainerSpec | None = None) -> AbstractContextManager[tuple[str, int]]:
        assert container is not None
        (said,) = self.host.gather([command(*container.enter(), "hostname", "-I", root=True)])
        return self.host.transport.tunnel(port, said.expect().split()[0])

    def key(self, service: ServiceSpec) -> str:
        return ""

    def keep(self, _name: str, data: bytes, _what: str) -> str:
        self.kept.append(data)
        return f"e{len(self.kept):04d}"

    def tell(self, _text: str) -> None:
        pass


@pytest.fixture(scope="module")
def spec(nursery: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSpec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(tmp_path_factory.mktemp("lab")))
        try:
            yield Inventory().resolve("lab:mtp-enabled")
        finally:
            client.stop()


@pytest.fixture(scope="module")
def bench(spec: HostSpec) -> Iterator[LabBench]:
    host = Host("lab:mtp-enabled", *connect(spec))
    host.prove()
    try:
        yield LabBench(host)
    finally:
        host.close()


@pytest.fixture(scope="module")
def where(spec: HostSpec) -> dict[str, Any]:
    return {"service": spec.services[0], "container": spec.containers[0]}


@pytest.fixture(scope="module")
def baseline(bench: LabBench, where: dict[str, Any]) -> Measurement:
    return Baseline(**where, concurrency=(1, 4)).take(bench)


def test_a_baseline_of_the_lab(baseline: Measurement, bench: LabBench) -> None:
    assert baseline.problems == ()
    assert [level["complete"] for level in baseline.value["levels"]] == [True, True]
    assert baseline.value["steady"]["steady"] is True
    assert baseline.value["config"]["known"]
    assert baseline.took_s > 60, "answers take their time on the lab's clock"
    assert sum(data.count(b"\n") for data in bench.kept) > 70


def test_the_control_prompts_hold_there(baseline: Measurement, bench: LabBench, where: dict[str, Any]) -> None:
    found = ControlPrompts(**where, before=baseline).take(bench)
    assert found.problems == ()
    assert [(c["case"], e["what"], e["reason"]) for c in found.value["cases"] for e in c["expect"] if not e["held"]] == []
    assert found.value["speculation"] == "on"
    assert 4 < found.value["accept_length"] <= found.value["steps_plus_one"]
    assert found.value["disagreeing"] == []
    json.dumps(found.value, allow_nan=False)


def test_the_same_server_against_itself_gains_nothing(baseline: Measurement, bench: LabBench, where: dict[str, Any]) -> None:
    found = Gain(**where, before=baseline).take(bench)
    assert found.problems == ()
    assert found.value["changed"] == {}
    assert [level["pairs"] for level in found.value["levels"]] == [12, 12]
    for level in found.value["levels"]:
        assert level["speedup"]["estimate"] == pytest.approx(1, abs=0.05)


def test_a_window_of_lab_minutes(bench: LabBench, where: dict[str, Any]) -> None:
    found = Stability(**where, minutes=2).take(bench)
    assert found.problems == ()
    assert found.value["steady"]["steady"] is True
    assert found.value["lasted_s"] >= 120
    assert found.value["load"]["busy_share"] > 0.5

"""Baselines: taken from observations, carried through JSON, and laid side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proofbook.checks.baseline import Baseline, Scope, baseline_from, baseline_from_json, baseline_to_json, before_after
from proofbook.errors import CannotTell
from proofbook.intent import ServiceSpec
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.nvidia import Gpus
from proofbook.probes.systemd import Services
from proofbook.redact import Redactor


def scope(w: Any) -> Scope:
    return Scope(w.GPUS, (w.CONTAINER,), (w.SERVICE,))


def test_it_survives_json(world: Any) -> None:
    world.blind(IommuGroups()).no_row(world.B, "Unknown Error")
    taken = baseline_from(scope(world), world.seen())
    assert baseline_from_json(json.loads(json.dumps(baseline_to_json(taken)))) == taken


def test_it_survives_the_redactor(world: Any) -> None:
    """What comes back from a record has lost its secrets, and nothing else."""
    taken = baseline_from(scope(world), world.seen())
    back = baseline_from_json(json.loads(json.dumps(Redactor().value(baseline_to_json(taken), "journal.jsonl"))))
    environ = back.processes[world.SERVICE.spec].environ
    assert environ is not None
    assert environ["HF_TOKEN"].startswith("[redacted:")
    assert environ["NCCL_P2P_DISABLE"] == "1"
    rows = {r.what: r.same for r in before_after(back, taken)}
    assert rows["llm-two/sglang-qwen.service configuration"] == "same"
    assert (back.boot_id, back.machine_id, back.gpu_addresses) == (taken.boot_id, taken.machine_id, taken.gpu_addresses)


@pytest.mark.parametrize("data", [{}, {"taken_at": "yesterday"}, {"taken_at": None, "machine": {"hostname": 3}}])
def test_other_json_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(CannotTell, match="cannot be read"):
        baseline_from_json(data)


def test_what_is_unknown_stays_out_with_its_reason(world: Any) -> None:
    taken = baseline_from(scope(world), world.blind(Machine(), Gpus()).seen())
    assert (taken.machine, taken.gpus, taken.boot_id, taken.machine_id) == (None, None, "", "")
    assert taken.unknown == {"machine": "permission denied", "GPUs": "permission denied"}
    assert taken.gpu_addresses == (world.A, world.B)


def test_it_keeps_gpus_and_network_cards_and_what_is_declared_only(world: Any) -> None:
    taken = baseline_from(scope(world), world.seen())
    assert taken.pci is not None
    assert set(taken.pci) == {world.A, world.B, world.NIC}


def test_a_scope_asks_what_a_baseline_needs(world: Any) -> None:
    assert set(scope(world).probes()) <= set(world.values)
    assert not baseline_from(scope(world), world.seen()).unknown


def test_a_service_in_an_undeclared_container_cannot_be_looked_at(world: Any) -> None:
    lost = Scope(services=(ServiceSpec(name="a.service", container="nowhere"),))
    with pytest.raises(CannotTell, match="nowhere is not declared"):
        lost.probes()


def test_repr_is_short_and_holds_no_secret(world: Any) -> None:
    text = repr(baseline_from(scope(world), world.seen()))
    assert len(text) < 150
    assert "hf_" not in text


def test_side_by_side(world: Any) -> None:
    before = world.baseline()
    world.iommu(b="identity").device(world.B, driver="vfio-pci").no_row(world.B, "Unknown Error").fails("a.service")
    world.change(world.PROCESS, argv=(*world.SERVER.split(), "--api-key", "sk-secret"))
    world.change(world.UNIT, enabled="disabled").change(world.STATE, status="stopped")
    world.put(Services(), world.services("ssh.service", "cron.service", "new.service"))
    rows = {r.what: r[1:] for r in before_after(before, baseline_from(scope(world), world.seen()))}
    assert rows["machine-id"][2] == "same"
    assert rows["boot-id"] == (world.OLD, world.NEW, "new, as it must be")
    assert rows["0000:01:00.0 IOMMU type"] == ("DMA-FQ", "DMA-FQ", "same")
    assert rows["0000:41:00.0 IOMMU type"] == ("DMA-FQ", "identity", "changed")
    assert rows["0000:41:00.0 PCI"] == ("10de:2bb5, nvidia", "10de:2bb5, vfio-pci", "changed")
    assert rows["0000:41:00.0 UUID"] == (world.UUIDS[world.B], "Unknown Error", "changed")
    only = ("3, of which only then: docker.service", "3, of which only then: new.service", "changed")
    assert rows["running services"] == only
    assert rows["running services in llm-two"] == ("2", "2", "same")
    assert rows["failed units"] == ("none", "a.service", "changed")
    assert rows["llm-two/sglang-qwen.service at boot"] == ("enabled", "disabled", "changed")
    assert rows["container llm-two"] == ("running", "stopped", "changed")
    assert rows["llm-two/sglang-qwen.service configuration"] == ("--api-key: absent", "--api-key: (hidden)", "changed")


def test_an_unchanged_boot_id_and_missing_answers_are_said_as_such(world: Any) -> None:
    now = baseline_from(scope(world), world.seen())
    rows = {r.what: r.same for r in before_after(now, now)}
    assert rows["boot-id"] == "same"
    assert set(rows.values()) == {"same"}
    rows = {r.what: r.same for r in before_after(None, now)}
    assert set(rows.values()) == {"not known"}
    assert before_after(Baseline(None), now) == before_after(None, now)

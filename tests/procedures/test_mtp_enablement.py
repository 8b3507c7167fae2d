"""MTP enablement before any contact: what is refused, and by what rule a change would be kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from proofbook.errors import BadParameter
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import HostSpec
from proofbook.model import Decision
from proofbook.procedures.mtp_enablement import Parameters, accepts, decide, kept_only_if

LLM = ContainerSpec(name="llm-two", kind="pct", id="102")
QWEN = ServiceSpec(name="sglang-qwen.service", container="llm-two")
DECLARED = HostSpec(name="gpu01", containers=(LLM,), services=(QWEN,))
BARE = HostSpec(name="gpu02", containers=(LLM,))


def parameters(**given: Any) -> Parameters:
    return Parameters(host="gpu01", **given)


@pytest.mark.parametrize("unit", ["sglang-qwen.service", "llm-two/sglang-qven.service", "foo.service"])
def test_a_unit_that_the_inventory_does_not_declare_is_refused_with_the_nearest(unit: str) -> None:
    with pytest.raises(BadParameter, match="declares no such service") as refused:
        accepts(parameters(unit=unit), DECLARED)
    assert "unit=llm-two/sglang-qwen.service" in refused.value.hint


def test_a_declared_unit_and_any_unit_where_none_is_declared() -> None:
    accepts(parameters(unit="llm-two/sglang-qwen.service"), DECLARED)
    accepts(parameters(), DECLARED)
    accepts(parameters(unit="foo.service"), BARE)


@pytest.mark.parametrize(
    "other",
    [{"concurrency": "1"}, {"must_gain_at": "8"}, {"stability_minutes": 0.05}, {"measure_again": True}],
)
def test_every_part_of_the_rule_is_in_its_words(other: dict[str, Any]) -> None:
    given = {"concurrency": "1,8", "stability_minutes": 30.0}
    assert kept_only_if(parameters(**given)) != kept_only_if(parameters(**{**given, **other}))


def test_the_rule_as_it_is_read() -> None:
    rule = kept_only_if(parameters(concurrency="1,8", must_gain_at="8", stability_minutes=30.0))
    assert "holds for 30 min under load, 4 requests at once" in rule
    assert "measured at concurrency 1, 8 and gains at 8" in rule
    assert "control prompts (set " in rule


def test_a_secret_is_no_variable_of_a_plan() -> None:
    with pytest.raises(ValidationError, match="MYAPP_PASSWORD is the name of a secret"):
        parameters(environment="A=1,MYAPP_PASSWORD=hunter2")
    assert parameters(environment="A=1,NCCL_P2P_DISABLE=1").environment == "A=1,NCCL_P2P_DISABLE=1"


def test_the_first_no_decides_also_after_a_resume() -> None:
    refused = Decision(False, "FAIL_UNSTABLE", "it died under load")
    run: Any = SimpleNamespace(earlier_decision=refused)
    applied: Any = SimpleNamespace(outcome="done", facts={})
    assert decide(run, applied) is refused

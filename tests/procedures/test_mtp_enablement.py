"""MTP enablement before any contact: what is refused, and by what rule a change would be kept."""

from __future__ import annotations

from typing import Any

import pytest

from proofbook.errors import BadParameter
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import HostSpec
from proofbook.procedures.mtp_enablement import Parameters, accepts, kept_only_if

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

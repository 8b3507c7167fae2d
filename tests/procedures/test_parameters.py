"""Parameters are refused before any contact, whichever way they come, and the refusal says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from proofbook import procedures
from proofbook.errors import BadParameter
from proofbook.inventory import HostSpec
from proofbook.notebook import _given
from proofbook.procedures.base import Procedure


@pytest.fixture
def reboot() -> Procedure:
    return procedures.load("reboot-verification")


def test_every_runbook_of_the_table_loads_and_describes_itself() -> None:
    for name in procedures.names():
        described = procedures.load(name).describe()
        assert described["name"] == name
        assert all(p["help"] and p["type"] for p in described["parameters"])


def test_an_unknown_runbook_names_the_nearest() -> None:
    with pytest.raises(BadParameter, match="did you mean 'reboot-verification'"):
        procedures.load("reboot-verifcation")


@pytest.mark.parametrize("given", [{}, {"host": ""}, {"host": None}])
def test_a_forgotten_host_is_refused(reboot: Procedure, given: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match="needs host"):
        reboot.validate(given)


def test_a_misspelt_name_is_refused_with_the_nearest(reboot: Procedure) -> None:
    with pytest.raises(BadParameter, match="did you mean 'settle_minutes'"):
        reboot.validate({"host": "gpu01", "settle_minute": 5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", 12),
        ("reboot", "yes please"),
        ("reboot", 1),
        ("settle_minutes", "abc"),
        ("settle_minutes", float("nan")),
        ("settle_minutes", -1),
        ("settle_minutes", 100_000),
        ("services", ["a.service"]),
        ("approved", "yes"),
        ("approved", "sha256:12"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(reboot: Procedure, name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=f"{name}="):
        reboot.validate({"host": "gpu01", name: value})


def test_an_int_where_a_float_is_wanted_is_no_mistake(reboot: Procedure) -> None:
    assert reboot.validate({"host": "gpu01", "settle_minutes": 5}).settle_minutes == 5.0


def test_texts_are_typed_by_declaration_and_never_guessed(reboot: Procedure) -> None:
    typed = reboot.from_text({"host": "0012", "reboot": "true", "settle_minutes": "1.5", "services": "1e5"})
    assert typed == {"host": "0012", "reboot": True, "settle_minutes": 1.5, "services": "1e5"}


@pytest.mark.parametrize("text", ["maybe", "", "2", "on fire"])
def test_a_text_that_is_no_bool_is_refused(reboot: Procedure, text: str) -> None:
    with pytest.raises(BadParameter, match="true or false"):
        reboot.from_text({"reboot": text})


@pytest.mark.parametrize("text", ["soon", "nan", "inf", ""])
def test_a_text_that_is_no_number_is_refused(reboot: Procedure, text: str) -> None:
    with pytest.raises(BadParameter, match="number"):
        reboot.from_text({"settle_minutes": text})


def check(procedure: Procedure, spec: HostSpec, **given: Any) -> None:
    procedure.accepts(procedure.validate({"host": spec.name, **given}), spec)


def test_what_does_not_fit_the_host_is_refused(reboot: Procedure) -> None:
    with pytest.raises(BadParameter, match="runs on gpu01"):
        check(reboot, HostSpec(name="llm-two", runs_on="gpu01"))
    with pytest.raises(BadParameter, match="no container 'llm-too'"):
        check(reboot, HostSpec(name="gpu01"), services="llm-too/sglang.service")
    with pytest.raises(BadParameter, match="without approver"):
        check(reboot, HostSpec(name="gpu01"), approved="sha256:" + "0" * 64)
    with pytest.raises(BadParameter, match="its own baseline"):
        check(reboot, HostSpec(name="gpu01"), reboot=True, baseline="20261129T000000Z-x")


def injected(body: str, **more: Any) -> dict[str, Any]:
    """A notebook's names as they are when papermill has added its cell."""
    names: dict[str, Any] = {"In": ["", "# parameters\nhost: str = ''", f"# Parameters\n{body}\n"], "host": "gpu01", **more}
    return names


def test_plain_papermill_with_a_misspelt_name_is_refused(reboot: Procedure) -> None:
    with pytest.raises(BadParameter, match="no parameter 'hosst'"):
        _given(reboot, injected('hosst = "gpu02"', hosst="gpu02"), attended=False)
    with pytest.raises(BadParameter, match="no parameter 'hosst'"):
        _given(reboot, injected('hosst = "gpu02"', hosst="gpu02"), attended=True)


def test_a_scratch_variable_is_a_mistake_only_when_nobody_is_there_or_it_looks_like_one(reboot: Procedure) -> None:
    assert _given(reboot, {"host": "gpu01", "x": 5}, attended=True) == {"host": "gpu01"}
    with pytest.raises(BadParameter, match="no parameter 'x'"):
        _given(reboot, {"host": "gpu01", "x": 5}, attended=False)
    with pytest.raises(BadParameter, match="no parameter 'settle_minute'"):
        _given(reboot, {"host": "gpu01", "settle_minute": 5}, attended=True)


def test_a_secret_is_never_a_parameter(reboot: Procedure) -> None:
    with pytest.raises(BadParameter, match="looks like a secret"):
        _given(reboot, injected('hf_token = "x"', hf_token="x"), attended=False)

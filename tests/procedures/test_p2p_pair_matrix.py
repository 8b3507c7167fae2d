"""What the pair matrix takes, and what it refuses before any host is contacted."""

from __future__ import annotations

from typing import Any

import pytest

from proofbook.errors import BadParameter
from proofbook.intent import GpuSpec
from proofbook.inventory import HostSpec
from proofbook.procedures.p2p_pair_matrix import PROCEDURE, accepts, over

A, B = "0000:01:00.0", "0000:41:00.0"
EIGHT = HostSpec(name="box", gpus=tuple(GpuSpec(pci=f"0000:{n:02x}:00.0") for n in range(1, 9)))


def given(**more: Any) -> Any:
    return PROCEDURE.validate({"host": "box", **more})


def test_addresses_and_sizes_are_read() -> None:
    parameters = given(gpus="01:00.0, 00000000:41:00.0", sizes="1048576, 4,4")
    assert (parameters.chosen, parameters.ladder) == ((A, B), (4, 1048576))
    assert given().chosen == ()
    assert max(given().ladder) == 256 * 1024 * 1024
    accepts(parameters, EIGHT)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gpus": "nvidia0"}, "not a PCI address"),
        ({"sizes": "4,x"}, "'x' is no size"),
        ({"sizes": "1048577"}, "a multiple of 4"),
        ({"repeats": 0}, "greater than or equal to 1"),
        ({"grace_s": -1}, "greater than or equal to 0"),
        ({"approved": "sha256:12"}, "64 hex digits"),
        ({"size": "4"}, "no parameter 'size'"),
    ],
)
def test_values_that_make_no_sense_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        given(**more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gpus": A}, "a pair has two"),
        ({"guard_minutes": 10}, "too short"),
        ({"approved": "sha256:" + "0" * 64}, "without approver"),
    ],
)
def test_what_cannot_come_out_well_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        accepts(given(**more), EIGHT)
    accepts(given(guard_minutes=10, gpus=f"{A},{B}"), EIGHT)


def test_a_guest_is_not_asked_whose_kernel_is_elsewhere() -> None:
    with pytest.raises(BadParameter, match="runs on metal"):
        accepts(given(), HostSpec(name="box", runs_on="metal"))


def test_the_service_is_started_again_whatever_was_found() -> None:
    assert (over(None).keep, over(None).rung) == (False, "TEST_OVER")

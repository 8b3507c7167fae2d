"""Matrices of pairs as pictures, and the same in words."""

from __future__ import annotations

from typing import Any

from proofbook.view import p2p_pairs_chart, p2p_speed_chart

A, B = "0000:01:00.0", "0000:41:00.0"
PNG = b"\x89PNG"


def value(*cells: dict[str, Any], claims: dict[str, dict[str, str]] | None = None) -> dict[str, Any]:
    return {"gpus": [A, B], "cells": list(cells), "claims": claims or {}}


def cell(src: str, dst: str, state: str, gbps: float = 50.0, **more: Any) -> dict[str, Any]:
    figures = {"gbps": {"ce-push": [gbps, gbps, gbps]}, "us": {"ce-push": 0.4}}
    return {"src": src, "dst": dst, "state": state, "class": "same NUMA node", "faults": [], "slow": [], **figures, **more}


def test_pairs_are_told_in_words_too() -> None:
    claims = {f"{A} {B}": {"r": "OK", "w": "CNS"}, f"{B} {A}": {"r": "OK", "w": "OK"}}
    drawn = p2p_pairs_chart(value(cell(A, B, "wrong data", faults=["x"]), cell(B, A, "verified"), claims=claims))
    assert drawn.png.startswith(PNG)
    assert drawn.alt.splitlines()[1:] == [
        "claimed for all but 1 of 2 ordered pairs",
        "verified: 1 of 2 ordered pairs",
        "wrong data: 1 of 2 ordered pairs",
        "1 of them with a fault of the pair in the kernel's log",
        f"{A} to {B}: wrong data",
    ]
    bare = p2p_pairs_chart(value(cell(A, B, "hung"), cell(B, A, "not run")))
    assert "nothing is known of what is claimed" in bare.alt


def test_speeds_name_what_is_slow_and_what_cannot_be() -> None:
    slow = cell(A, B, "verified", 20.0, slow=["ce-push: 20 GB/s is 40%"])
    drawn = p2p_speed_chart(value(slow, cell(B, A, "verified", 50.0)))
    assert drawn.png.startswith(PNG)
    assert f"{A} to {B}: 20.0 GB/s (verified), ce-push: 20 GB/s is 40%" in drawn.alt
    impossible = p2p_speed_chart(value(cell(A, B, "invalid", 103.9), cell(B, A, "verified")))
    assert "class medians in GB/s: same NUMA node 50.0" in impossible.alt, "what cannot be true is in no median"
    assert f"{A} to {B}: 103.9 GB/s (invalid)" in impossible.alt
    assert "class medians in GB/s: none" in p2p_speed_chart(value(), path="sm-load").alt

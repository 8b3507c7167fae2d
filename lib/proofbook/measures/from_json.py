"""JSON that a server made, read so that nothing in it can harm whoever walks through it later."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["from_json"]

#: An integer of more digits counts nothing here; it stays text, since some readers of a record can hold no more than 64 bits.
_MOST_DIGITS = 18

#: What is nested deeper than this is no answer of a server; whoever walks through it later must not run out of stack.
_DEEPEST = 50


def from_json(data: bytes | str) -> Any:
    """JSON that a server made. Raises ValueError, also for what is nested so deep that the parser gives up."""
    try:
        said = json.loads(data, parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else digits)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level, depth = [said], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return said

"""Greedy answers held against each other: where they first part, not only whether.

WHY a difference need not be a fault: verifying several tokens in one pass, or other neighbours in a batch, is other floating
point arithmetic than computing one token. Where two tokens are nearly equally likely the answer may turn there, and goes on
differently. An answer that is determined strongly (``must_agree``) has no such places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from proofbook.measures.client import Reply
from proofbook.measures.from_json import from_json
from proofbook.measures.prompts import PromptSet

__all__ = ["agreement", "all_same", "answer_of", "counts_on", "is_of_form", "parting"]

_NUMBERS = re.compile(r"\d+")


def answer_of(reply: Reply) -> dict[str, Any] | None:
    """``{"text", "ids"}`` of a reply to /generate; ``ids`` (output tokens) is None where the version does not send them."""
    try:
        said = reply.json() if reply.ok else None
    except ValueError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("text"), str):
        return None
    ids = said.get("output_ids")
    whole = isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids)
    return {"text": said["text"], "ids": ids if whole else None}


def parting(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int | None, str, int]:
    """Where two answers first differ (index from 0, None = nowhere), in what unit, and how many units the shorter one has."""
    if before["ids"] and after["ids"]:
        one, other, unit = before["ids"], after["ids"], "tokens"
    else:
        one, other, unit = before["text"].split(), after["text"].split(), "words"
    shorter = min(len(one), len(other))
    differing = next((n for n in range(shorter) if one[n] != other[n]), None)
    if differing is None and len(one) != len(other):
        differing = shorter
    return differing, unit, shorter


def agreement(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], prompts: PromptSet
) -> list[dict[str, Any]]:
    """Every prompt that was answered in both, with where the answers part."""
    determined = {p.id for p in (*prompts.timing, *prompts.control.values()) if p.must_agree}
    found = []
    for prompt in sorted(before.keys() & after.keys()):
        place, unit, of = parting(before[prompt], after[prompt])
        must = prompt in determined
        found.append(
            {
                "prompt": prompt,
                "must_agree": must,
                "same": place is None,
                "first_difference": place,
                "unit": unit,
                "of": of,
                "reason": _words(place, unit, of, must),
            }
        )
    return found


def _words(place: int | None, unit: str, of: int, must: bool) -> str:
    if place is None:
        return f"the same {of} {unit} as before"
    where = f"as before for {place} of {of} {unit}, then different"
    if must:
        return f"{where}; this answer is determined, so that other arithmetic cannot turn it"
    return f"{where}; free text may part at a near tie, since verifying several tokens at once is other arithmetic"


# --------------------------------------------------------------------------------------------------- what was expected


def counts_on(text: str, first: int = 1, step: int = 1, at_least: int = 20) -> tuple[bool, str]:
    """Whether ``text`` counts from ``first`` without a mistake. The last number may be cut, since the tokens are limited."""
    numbers = [int(n) for n in _NUMBERS.findall(text)]
    for n, number in enumerate(numbers[:-1]):
        if number != first + n * step:
            return False, f"number {n + 1} is {number}, expected {first + n * step}"
    if len(numbers) < at_least:
        return False, f"it counts {len(numbers)} numbers only"
    return True, f"counts on to {numbers[-2]}"


def is_of_form(text: str, schema: str) -> tuple[bool, str]:
    """Whether ``text`` is a JSON object with the required keys and types of ``schema`` (flat, as the control prompt's)."""
    kinds: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}
    wanted = from_json(schema)
    try:
        said = from_json(text)
    except ValueError as error:
        return False, f"it is no JSON: {error}"
    if not isinstance(said, dict):
        return False, f"it is a JSON {type(said).__name__}, not an object"
    for key in wanted["required"]:
        kind = wanted["properties"][key]["type"]
        value = said.get(key)
        # WHY the second half: to Python True is an integer
        if not isinstance(value, kinds[kind]) or (kind != "boolean" and isinstance(value, bool)):
            return False, f"{key} is {value!r}, not {'an' if kind == 'integer' else 'a'} {kind}"
    extra = set(said) - set(wanted["properties"])
    return (
        (False, f"it has keys that the form has not: {', '.join(sorted(extra))}") if extra else (True, "JSON of the wanted form")
    )


def all_same(answers: Sequence[Mapping[str, Any] | None]) -> tuple[bool | None, str]:
    """Whether all answers are one answer; None when one of them is missing."""
    given = [a for a in answers if a is not None]
    if len(given) < len(answers) or len(given) < 2:
        return None, f"{len(given)} of {len(answers)} answers came"
    for n, other in enumerate(given[1:], 2):
        place, unit, of = parting(given[0], other)
        if place is not None:
            return False, f"answer {n} is as the first for {place} of {of} {unit}, then different"
    return True, f"{len(given)} times the same answer"

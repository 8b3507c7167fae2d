"""What the stand-in answers to a prompt: plain deterministic text. The same prompt has the same greedy answer, always.

A token is a word or a mark with the blank before it, so that counts are easy to follow.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])")

#: How likely the draft's next token is accepted, by the kind of the prompt: predictable text is drafted well.
ACCEPT = {"count": 0.985, "json": 0.83, "code": 0.80, "math": 0.74, "long": 0.72, "prose": 0.70}

_KINDS = (
    ("count", re.compile(r"\bcount\b.*\d|\bfrom 1 to \d|\bnumbers from \d", re.IGNORECASE | re.DOTALL)),
    ("json", re.compile(r"\bjson\b|\btool\b", re.IGNORECASE)),
    ("code", re.compile(r"\bdef \w|\bfunction\b|\bpython\b|\bcode\b|\bclass \w", re.IGNORECASE)),
    ("math", re.compile(r"\bcompute\b|\bsolve\b|\bprove\b|\bhow many\b|\bequation\b|\d\s*[-+*/^]\s*\d", re.IGNORECASE)),
)

#: What a long prompt may hide and ask for: a model that reads all of it finds it.
_HIDDEN = re.compile(r"\baccess code\b[^.\n]* is (\w+(?:-\w+)*)", re.IGNORECASE)

_PROSE = (
    "the service answers after its weights are read",
    "a draft is cheap when the next word is plain",
    "every rank waits for the slowest of them",
    "what was measured once is not yet known",
    "memory that is reserved cannot be used twice",
    "the night is quiet and the fans are not",
    "an operator reads the log from its first line",
    "water runs down the hill and finds the river",
    "two clocks that agree may both be wrong",
    "the old configuration stays until the new one is proven",
)
_CODE = (
    "for item in items :\n    total = total + item . size",
    "if value is None :\n    raise ValueError ( name )",
    "result = [ f ( x ) for x in values if x > 0 ]",
    "with open ( path ) as handle :\n    lines = handle . readlines ( )",
    "return sorted ( result , key = len )",
)
_MATH = (
    "first we add both sides and get {a} + {b} = {c}",
    "so the remainder is {b} and the quotient is {a}",
    "multiplying by {b} gives {a} * {b} = {d}",
    "therefore x = {c} which we check by inserting it",
)


def tokens_of(text: str) -> list[str]:
    """The text cut into tokens; joined they are the text again, but for blanks at its end."""
    return _TOKEN.findall(text)


def kind_of(prompt: str) -> str:
    if len(prompt) > 6000:
        return "long"
    return next((kind for kind, pattern in _KINDS if pattern.search(prompt)), "prose")


def random_of(*parts: object) -> random.Random:
    """A generator that depends on the parts alone, on every machine the same."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def answer_tokens(prompt: str, most: int, *, ignore_eos: bool, variant: str = "") -> tuple[list[str], bool]:
    """(tokens, whether the model came to its own end) of the answer. ``variant``: "" greedy; else whatever made it differ."""
    kind, rng = kind_of(prompt), random_of("answer", prompt, variant)
    if kind == "count" and not variant:
        last = max((int(n) for n in re.findall(r"\b\d{1,5}\b", prompt)), default=100)
        full = tokens_of(", ".join(str(n) for n in range(1, max(last, 2) + 1)))
    elif kind == "long" and not variant and (hidden := _HIDDEN.search(prompt)):
        full = tokens_of(f"The access code is {hidden[1]}.")
    else:
        full = _text(kind, rng, rng.randint(300, 520))
    if ignore_eos:
        while len(full) < most:
            full = full + full
    return full[:most], len(full) < most or (len(full) == most and not ignore_eos)


def _text(kind: str, rng: random.Random, length: int) -> list[str]:
    out: list[str] = []
    while len(out) < length:
        if kind == "code":
            piece = "\n" + rng.choice(_CODE)
        elif kind == "math":
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            piece = " " + rng.choice(_MATH).format(a=a, b=b, c=a + b, d=a * b) + "."
        else:
            piece = " " + rng.choice(_PROSE) + "."
        out += tokens_of(piece)
    return out


def structured(schema: Mapping[str, Any], prompt: str) -> str:
    """A JSON text that satisfies a schema, as constrained decoding gives it."""
    return json.dumps(_fill(schema, random_of("json", prompt)))


def _fill(schema: Mapping[str, Any], rng: random.Random) -> Any:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            return _fill(schema[word][0], rng)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _fill(inner, rng) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        count = max(int(schema.get("minItems", 1)), min(3, int(schema.get("maxItems", 3))))
        return [_fill(schema.get("items", {}), rng) for _ in range(count)]
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", 1))
        return rng.randint(low, int(schema.get("maximum", low + 99)))
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else _words(schema, rng)


def _words(schema: Mapping[str, Any], rng: random.Random) -> str:
    if schema.get("pattern"):
        return matching(str(schema["pattern"]), rng)
    text = " ".join(rng.sample(rng.choice(_PROSE).split(), 3))
    return text.ljust(int(schema.get("minLength", 0)), "x")[: int(schema.get("maxLength", 200))]


_CLASSES = {"d": "0123456789", "w": "abcdefghijklmnopqrstuvwxyz", "s": " "}
_PIECE = re.compile(r"\\[dws]|\\.|\[[^\]]*\]|\((?:\?:)?[^()]*\)|[^\\\[\]()*+?{}|^$]|[\^$]")
_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}|[*+?]")


def matching(pattern: str, rng: random.Random) -> str:
    """A text that a plain regular expression matches: literals, classes, groups of alternatives, and repeats."""
    out, i = "", 0
    while i < len(pattern):
        piece = _PIECE.match(pattern, i)
        if piece is None:
            break
        i = piece.end()
        repeat = _COUNT.match(pattern, i)
        times = int(repeat[1]) if repeat and repeat[1] else 1
        i = repeat.end() if repeat else i
        for _ in range(times):
            out += _one(piece.group(), rng)
    return out


def _one(piece: str, rng: random.Random) -> str:
    if piece in "^$":
        return ""
    if piece.startswith("("):
        return matching(rng.choice(piece.removeprefix("(").removeprefix("?:").removesuffix(")").split("|")), rng)
    if piece.startswith("["):
        return rng.choice(_members(piece[1:-1]))
    if piece.startswith("\\"):
        return rng.choice(_CLASSES.get(piece[1], piece[1]))
    return rng.choice(_CLASSES["w"]) if piece == "." else piece


def _members(text: str) -> str:
    """The characters of a class like ``a-z0-9_``."""
    out, i = "", 0
    while i < len(text):
        if text[i : i + 1] == "\\" and i + 1 < len(text):
            out, i = out + _CLASSES.get(text[i + 1], text[i + 1]), i + 2
        elif i + 2 < len(text) and text[i + 1] == "-":
            out, i = out + "".join(map(chr, range(ord(text[i]), ord(text[i + 2]) + 1))), i + 3
        else:
            out, i = out + text[i], i + 1
    return out or "x"

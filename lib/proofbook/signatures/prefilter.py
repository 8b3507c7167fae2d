"""Find the few lines of a large log that a signature could claim, without looking at the others one by one.

The filter looks for the signatures' anchors in the whole buffer at once. It may let a line through that nothing claims; it
never holds one back that something claims. Hyperscan does it fastest, google-re2 next; without either, one regular
expression of the standard library gives the same lines, only slower.
"""

from __future__ import annotations

import bisect
import importlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

#: One stretch of the buffer that is searched at a time (bytes); ends are moved to the end of a line.
CHUNK = 16 * 1024 * 1024
#: How many lines after "Traceback (most recent call last)" are let through, so that its last line is found.
TRACEBACK_LINES = 200
_TRACEBACK = b"Traceback (most recent call last)"


class Engine(Protocol):
    """Finds literals in bytes: ``(end of the match, number of the literal)``, in any order, at least one a matching line.

    The number means something only where the engine is ``exact``.
    """

    name: str
    exact: bool  # every literal of a line is reported, not just one

    def scan(self, data: bytes) -> Sequence[tuple[int, int]]: ...


class HyperscanEngine:
    """All literals in one pass."""

    name, exact = "hyperscan", True

    def __init__(self, literals: Sequence[bytes]) -> None:
        hyperscan: Any = importlib.import_module("hyperscan")
        self._database = hyperscan.Database()
        self._database.compile(
            expressions=[re.escape(x) for x in literals],
            ids=list(range(len(literals))),
            elements=len(literals),
            flags=[0] * len(literals),
        )

    def scan(self, data: bytes) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def on_match(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.append((end, number))

        self._database.scan(data, match_event_handler=on_match)
        return found


class RegexEngine:
    """One alternation of all literals, by any module with the interface of ``re``; it tells where a literal is, not which."""

    exact = False

    def __init__(self, literals: Sequence[bytes], module: Any, name: str) -> None:
        self.name = name
        # A line with a literal also holds every part of it: only those literals matter that hold no other one.
        shortest = [x for x in set(literals) if not any(y != x and y in x for y in literals)]
        # WHY a tree: re tries alternatives one by one at every place; shared beginnings are then tried once.
        self._pattern = module.compile(_tree(shortest))

    def scan(self, data: bytes) -> Sequence[tuple[int, int]]:
        return [(m.end(), 0) for m in self._pattern.finditer(data)]


def _tree(words: Sequence[bytes]) -> bytes:
    """A regular expression for these words with their common beginnings written once."""
    heads: dict[bytes, list[bytes]] = {}
    for word in words:
        heads.setdefault(word[:1], []).append(word[1:])
    parts = []
    for head, rest in sorted(heads.items()):
        if b"" in rest:
            parts.append(re.escape(head))
        elif len(rest) == 1:
            parts.append(re.escape(head + rest[0]))
        else:
            parts.append(re.escape(head) + b"(?:" + _tree(rest) + b")")
    return b"|".join(parts)


ENGINES = ("hyperscan", "re2", "re")


def engine(literals: Sequence[bytes], name: str = "") -> Engine:
    """The fastest engine that is installed, or the one called ``name``. Raises ImportError when that one is missing."""
    for one in (name,) if name else ENGINES:
        try:
            if one == "hyperscan":
                return HyperscanEngine(literals)
            return RegexEngine(literals, importlib.import_module(one), one)
        except ImportError:
            if name:
                raise
    raise AssertionError("re is always there")


@lru_cache(maxsize=8)
def prefilter(anchors: tuple[str, ...], name: str = "") -> Prefilter:
    """A filter for these anchors, compiled once."""
    return Prefilter(anchors, name)


class Prefilter:
    """Lines that hold at least one of ``anchors`` (and what follows a Python traceback's first line)."""

    def __init__(self, anchors: Sequence[str], name: str = "") -> None:
        self.anchors = tuple(anchors)
        self.engine = engine([a.encode("ascii") for a in anchors], name)
        self._trace = [i for i, a in enumerate(self.anchors) if a.encode() == _TRACEBACK]

    def lines(self, data: bytes) -> Iterator[tuple[int, int, int, tuple[str, ...] | None]]:
        """Candidates of a buffer of whole lines: ``(line number from 0, start, end without newline, anchors or None)``.

        The anchors are None where the engine does not tell all of them, or where the line only follows a traceback.
        """
        hits: dict[int, set[int]] = {}
        starts: list[int] = []
        spans: dict[int, int] = {}
        find, rfind = data.find, data.rfind
        last_start, last_end = -1, -1
        for end, number in sorted(self.engine.scan(data)):
            if not last_start <= end - 1 < last_end or last_start < 0:
                last_start = rfind(b"\n", 0, end) + 1
                last_end = find(b"\n", end)
                last_end = len(data) if last_end < 0 else last_end
                if last_start not in hits:
                    starts.append(last_start)
                    spans[last_start] = last_end
                    hits[last_start] = set()
            hits[last_start].add(number)
        follow = self._after_tracebacks(data, hits, spans)
        for start, end in follow.items():
            if start not in hits:
                bisect.insort(starts, start)
                spans[start] = end
        number, counted = 0, 0
        for start in starts:
            number += data.count(b"\n", counted, start)
            counted = start
            numbers = hits.get(start)
            known = tuple(self.anchors[i] for i in sorted(numbers)) if numbers and self.engine.exact else None
            yield number, start, spans[start], known

    def _after_tracebacks(self, data: bytes, hits: dict[int, set[int]], spans: dict[int, int]) -> dict[int, int]:
        """The lines after each traceback's first one: its frames, and the line that names the error."""
        out: dict[int, int] = {}
        trace = set(self._trace)
        if self.engine.exact:
            marked = [s for s, numbers in hits.items() if numbers & trace]
        else:
            marked = [s for s in hits if _TRACEBACK in data[s : spans[s]]]
        for start in marked:
            at = spans[start] + 1
            for _ in range(TRACEBACK_LINES):
                if at >= len(data):
                    break
                end = data.find(b"\n", at)
                end = len(data) if end < 0 else end
                out[at] = end
                at = end + 1
        return out


def chunks(data: bytes, size: int = CHUNK) -> Iterator[tuple[int, bytes]]:
    """A buffer in stretches of whole lines: ``(offset, stretch)``."""
    if len(data) <= size:
        if data:
            yield 0, data
        return
    at = 0
    while at < len(data):
        end = min(at + size, len(data))
        if end < len(data):
            newline = data.rfind(b"\n", at, end)
            if newline < 0:
                newline = data.find(b"\n", end)
            end = len(data) if newline < 0 else newline + 1
        yield at, data[at:end]
        at = end

"""Judge whole logs, filtered first: journal JSON and plain text, from a buffer or from a file of any size.

One line in some hundreds is worth a look; the pre-filter finds these in the buffer as a whole, and only they are decoded and
held against the exact patterns. The first and the last line are always read, for what they tell about the log's ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from proofbook.signatures.catalog import SignatureSet, load
from proofbook.signatures.formats import read_journal_line, read_line
from proofbook.signatures.judge import Judgement, Judging, Listener, LogContext
from proofbook.signatures.prefilter import CHUNK, Prefilter, chunks, prefilter

#: A buffer up to this size (bytes) is filtered in one piece, without copying it.
WHOLE = 256 * 1024 * 1024
#: Lines whose message is no plain string: always decoded, because no anchor can be found in an array of byte values.
JOURNAL_ALWAYS = ('"MESSAGE":[', '"MESSAGE" : [', '"MESSAGE": [', '"MESSAGE":null', '"MESSAGE" : null', '"MESSAGE": null')


#: A run of zero bytes is what a file system leaves of the last writes before a hard reset; it stands at the end, or where the
#: next boot's lines were appended.
_ZEROS, _TAIL = b"\x00\x00\x00\x00", 65536


@dataclass(slots=True)
class Ends:
    """How a log begins and ends, kept while it streams by."""

    lines: int = 0
    unterminated: bool = False
    zeros: bool = False
    null_messages: int = 0
    damaged: int = 0
    gaps: list[str] = field(default_factory=list)


def judge_text(
    data: bytes | Iterable[bytes],
    *,
    context: LogContext | None = None,
    signatures: SignatureSet | None = None,
    engine: str = "",
    year: int | None = None,
) -> Judgement:
    """Judge a text log: a buffer, or stretches of whole lines (see :func:`read_stretches`)."""
    return Stream(signatures or load(), context or LogContext(), engine, json=False, year=year).run(data)


def judge_journal_json(
    data: bytes | Iterable[bytes], *, context: LogContext | None = None, signatures: SignatureSet | None = None, engine: str = ""
) -> Judgement:
    """Judge the output of ``journalctl -o json``: a buffer, or stretches of whole lines."""
    return Stream(signatures or load(), context or LogContext(), engine, json=True, year=None).run(data)


def read_stretches(file: BinaryIO, size: int = CHUNK) -> Iterator[bytes]:
    """A file in stretches of whole lines; memory holds one stretch at a time. A longer line comes in one piece up to 64 MiB."""
    rest, block = b"", file.read(size)
    while block:
        following = file.read(size)
        if not following:
            yield rest + block  # the last line, with or without its newline, stays with those before it
            return
        newline = block.rfind(b"\n")
        if newline < 0 and len(rest) < 4 * size:
            rest += block
        else:
            yield rest + block[: newline + 1]
            rest = block[newline + 1 :]
        block = following


class Stream:
    """A judgement of one log's bytes. Subclasses read lines of other shapes by overriding :meth:`read`."""

    def __init__(
        self,
        signatures: SignatureSet,
        context: LogContext,
        engine: str,
        *,
        json: bool,
        year: int | None,
        anchors: tuple[str, ...] = (),
        listen: Listener | None = None,
    ) -> None:
        self.judging = Judging(signatures, context, listen)
        wanted = signatures.anchors + (JOURNAL_ALWAYS if json else ()) + anchors
        self.filter: Prefilter = prefilter(tuple(dict.fromkeys(wanted)), engine)
        self.json, self.year = json, year
        self.ends = Ends()

    def run(self, data: bytes | Iterable[bytes]) -> Judgement:
        for stretch in [data] if isinstance(data, bytes) else data:
            for _, piece in chunks(stretch, WHOLE):
                self.piece(piece)
        self.finish_ends()
        return self.judging.finish(lines=self.ends.lines, gaps=self.ends.gaps)

    def piece(self, data: bytes) -> None:
        """A stretch of whole lines."""
        ends = self.ends
        if not ends.lines:
            first = data[: data.find(b"\n") if b"\n" in data else len(data)]
            self._edge(first)
        number, start = 0, 0
        for number, start, end, anchors in self.filter.lines(data):
            raw = data[start:end]
            ends.zeros = ends.zeros or _ZEROS in raw
            self.read(data, start, end, ends.lines + number + 1, anchors)
        ends.unterminated = not data.endswith(b"\n")
        ends.lines += number + data.count(b"\n", start) + ends.unterminated
        ends.zeros = ends.zeros or _ZEROS in data[-_TAIL:]

    def read(self, data: bytes, start: int, end: int, n: int, anchors: tuple[str, ...] | None) -> None:
        """A line that the filter let through: ``data[start:end]``, the ``n``-th of the log."""
        if self.json:
            self.journal(data[start:end], n, anchors)
        else:
            self.text(data[start:end], n, anchors)

    def _edge(self, raw: bytes) -> None:
        """The log's first line, for when it begins; it is judged only if the filter lets it through as well."""
        try:
            line = read_journal_line(raw) if self.json else read_line(raw.decode("utf-8", "backslashreplace"), self.year)
        except ValueError:
            return
        if line is not None:
            self.judging.begins_with(line)

    def text(self, raw: bytes, n: int, anchors: tuple[str, ...] | None) -> None:
        line = read_line(raw.decode("utf-8", "backslashreplace"), self.year)
        self.judging.feed(line.at(n), anchors)

    def journal(self, raw: bytes, n: int, anchors: tuple[str, ...] | None) -> None:
        if not raw.strip():
            return
        try:
            line = read_journal_line(raw)
        except ValueError:
            self.ends.damaged += 1
            return
        if line is None:
            self.ends.null_messages += 1
            return
        # WHY: anchors hold nothing that JSON escapes, so a plain message shows all of its anchors in the raw line.
        plain = anchors is not None and not any(a in JOURNAL_ALWAYS for a in anchors)
        self.judging.feed(line.at(n), anchors if plain else None)

    def finish_ends(self) -> None:
        ends = self.ends
        if ends.null_messages:
            ends.gaps.append(
                f"{ends.null_messages} messages were too large for this output and are missing (journalctl --all shows them)"
            )
        if ends.damaged:
            ends.gaps.append(f"{ends.damaged} lines are no whole journal entries")
        if ends.zeros:
            ends.gaps.append("the log holds a run of zero bytes: it was being written when the machine went down hard")
        elif ends.unterminated and ends.lines > 20:
            ends.gaps.append("the log ends in the middle of a line")

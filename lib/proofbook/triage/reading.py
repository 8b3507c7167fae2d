"""Read a paste of any mixture of logs and answers into one judgement, a stretch at a time.

Most lines never become Python objects: the pre-filter finds those that matter in the stretch as a whole. What a line is, its
own beginning tells (JSON, export, text), so that a mixed paste needs no sorting.
"""

from __future__ import annotations

import json
import re

from proofbook.signatures import LogContext, LogLine, SignatureSet
from proofbook.signatures.formats import read_export_entry, read_line
from proofbook.signatures.sglang import ServerLog
from proofbook.signatures.streams import Stream
from proofbook.triage.recognise import Recogniser, kind_of
from proofbook.triage.regions import ANCHORS, Region, find_regions, lines_of
from proofbook.triage.sources import Source

__all__ = ["Reading"]

#: Where a new log begins inside a paste: nvidia-bug-report's rule between its parts, or a prompt with a command that shows a log.
_RULE = b"\n____________________________________________"
_PROMPT = re.compile(
    r"^(?:\[?[\w.-]+@[\w.-]+[^#$]{0,80}[#$]|[#$]) +(?:sudo +)?(?:-\w+ +)*"
    r"(?:dmesg|journalctl|cat|tail|grep|zgrep|less|nvidia-smi|lspci|systemctl|docker|kubectl|pct)\b"
)
_SECTIONS = ("____________________________________________", "dmesg", "journalctl")
#: Questions that the web server's own process answers, whatever became of the scheduler.
_HEALTH = (b"GET /health", b"GET /get_model_info", b"GET /model_info", b"GET /v1/models")
_ANSWERED = re.compile(rb"GET /(?:health|get_model_info|model_info|v1/models)[^\n]{0,80}?\\?\" 200")
#: Where programs and container engines that log JSON put the message.
_MESSAGES = ("log", "message", "msg")
_QUOTE = re.compile(r"^(?:> ?|`{1,3})+")


class Reading(Stream):
    """All sources of one triage, judged together."""

    def __init__(self, signatures: SignatureSet, context: LogContext, *, engine: str = "", year: int | None = None) -> None:
        self.server = ServerLog()
        self.kinds = Recogniser()
        self.damage: list[str] = []  # why what was read is not what was written
        self.sources: list[tuple[str, int]] = []  # name, its first line
        super().__init__(signatures, context, engine, json=True, year=year, anchors=(*ANCHORS, *_SECTIONS), listen=self.server)
        self.answers = 0  # of tools, that were found in it
        self._entry_end = -1
        self._sections = 0
        self._export_from = -1  # where journald's export format begins in this stretch
        self._base = 0  # lines before this stretch
        self._regions: list[tuple[Region, list[str]]] = []
        self._region_end = 0

    def add(self, source: Source) -> None:
        """Read one source to its end. Its lines are numbered on from the one before."""
        if self.sources:
            self.judging.begin_section()
        self.sources.append((source.name, self.ends.lines + 1))
        before, last = self.ends.lines, b""
        for stretch in source.stretches:
            self.kinds.look(stretch)
            self.piece(stretch)
            last = stretch[-4096:]
        self.damage += source.gaps
        if self.ends.lines > before:
            reason = cut_off(last)
            if reason:
                self.damage.append(reason)

    def piece(self, data: bytes) -> None:
        """A stretch: its regions first become statements, then the filter's lines are read in their order."""
        self._base = self.ends.lines
        self._export_from = data.find(b"__CURSOR=")
        self._regions = [(r, lines_of(data, r)) for r in find_regions(data)]
        self.answers += len(self._regions)
        self._entry_end = min(self._entry_end, 0)
        super().piece(data)
        self._tell_regions(data, len(data) + 1)
        self._last_answer(data)

    def read(self, data: bytes, start: int, end: int, n: int, anchors: tuple[str, ...] | None) -> None:
        self._tell_regions(data, start)
        if self._region_end > start:
            return
        raw = data[start:end]
        if raw.startswith(_RULE[1:]):
            self._section()
        elif raw.lstrip(b"\x1e ").startswith((b"{", b"data: {")):
            self._json_line(raw, n, anchors)
        elif 0 <= self._export_from < start:
            self._export(data, start, end, n, anchors)
        else:
            self._paste(raw, n, anchors)

    def _tell_regions(self, data: bytes, before: int) -> None:
        """Judge what the regions say that begin before this place."""
        while self._regions and self._regions[0][0].start <= before:
            region, lines = self._regions.pop(0)
            self._region_end = region.end
            first = self._base + data.count(b"\n", 0, region.start) + 1
            for said in region.read(lines, self.judging):
                line = LogLine(said.text, source="tool", device=said.device, unit=said.unit or None, n=first + said.line)
                self.judging.feed(line)
        if before > len(data):
            self._region_end = 0

    def _last_answer(self, data: bytes) -> None:
        """The last time in this stretch that a health endpoint said 200: a busy server prints thousands of such lines."""
        at = max(data.rfind(word) for word in _HEALTH)
        if at >= 0:
            start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            raw = data[start : end if end >= 0 else len(data)]
            if _ANSWERED.search(raw):
                line = read_line(raw.decode("utf-8", "backslashreplace"), self.year)
                self.judging.answered(line.at(self._base + data.count(b"\n", 0, start) + 1))

    def _section(self) -> None:
        self._sections += 1
        self.judging.begin_section()

    def _json_line(self, raw: bytes, n: int, anchors: tuple[str, ...] | None) -> None:
        raw = raw.lstrip(b"\x1e ").removeprefix(b"data: ").rstrip(b"\r")
        if b'"MESSAGE"' in raw or b'"__REALTIME_TIMESTAMP"' in raw:
            self.journal(raw, n, anchors)
            return
        try:
            fields = json.loads(raw)
        except ValueError:
            self._paste(raw, n, None)
            return
        texts = [fields[k] for k in _MESSAGES if isinstance(fields.get(k), str)] if isinstance(fields, dict) else []
        if texts:
            self.judging.feed(read_line(texts[0].rstrip("\n"), self.year).at(n), None)
        else:
            self._paste(raw, n, None)

    def _export(self, data: bytes, start: int, end: int, n: int, anchors: tuple[str, ...] | None) -> None:
        """A field of an entry in journald's export format; the whole entry is read at its first field that matters."""
        if start < self._entry_end:
            return
        begin = data.rfind(b"__CURSOR=", 0, end)
        finish = data.find(b"\n\n__CURSOR=", end)
        finish = len(data) if finish < 0 else finish
        self._entry_end = finish
        line = read_export_entry(data[begin:finish])
        if line is not None:
            self.judging.feed(line.at(n), None)

    def finish_ends(self) -> None:
        """Whether a source was cut is told by how its last line reads; a missing newline alone is a matter of the editor."""
        if self.ends.zeros and self._entry_end < 0:
            self.damage.append("the log holds a run of zero bytes: it was being written when the machine went down hard")
        self.ends.unterminated = self.ends.zeros = False
        super().finish_ends()

    def _paste(self, raw: bytes, n: int, anchors: tuple[str, ...] | None) -> None:
        text = raw.decode("utf-8", "backslashreplace")
        if text.startswith((">", "`")):
            text, anchors = _QUOTE.sub("", text), None
        if _PROMPT.match(text):
            self._section()
            return
        line = read_line(text, self.year)
        if not line.source and is_prose(text):
            return
        self.judging.feed(line.at(n), anchors)


def is_prose(text: str) -> bool:
    """Whether a line is a paragraph that somebody wrote about logs: words that it quotes were not said by a machine here.

    Messages without a time or a program before them are shorter, or begin in a way that is known.
    """
    return len(text) > 240 and not kind_of(text) and sum(word.isalpha() for word in text.split()) >= 30


_BEGUN = re.compile(r"\[[ \d.]*$|^\[\s*\d+\.\d+\] ?$|[,(\[{=:/-]$|\b0x$|\(PCI:[0-9a-fA-F:.]*$|^\w{3} +\d+ [\d:]*$")
_OPENING, _CLOSING = "([{", ")]}"


def cut_off(tail: bytes) -> str:
    """Why the last line of a log looks cut; ``""`` when it ends like any other. A missing newline alone proves nothing."""
    if tail.endswith(b"\n") or not tail.strip(b"\x00 \r"):
        return ""
    text = tail.rsplit(b"\n", 1)[-1].decode("utf-8", "replace").rstrip("\r\x00")
    if text.lstrip().startswith("{") and not text.rstrip().endswith("}"):
        return f"the log ends inside of a journal entry: {text[-80:]}"
    open_quote = text.count("'") % 2 == 1 and " '" in text and not re.search(r"\w'\w", text)
    unbalanced = any(text.count(a) > text.count(b) for a, b in zip(_OPENING, _CLOSING, strict=True))
    if _BEGUN.search(text) or unbalanced or open_quote:
        return f"the log ends in the middle of a line: {text[-80:]}"
    return ""

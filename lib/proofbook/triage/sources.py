"""From what somebody gave to stretches of whole lines: files, stdin, compressed or not, in the encodings that pastes come in."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from proofbook.errors import BadParameter
from proofbook.signatures.streams import read_stretches

__all__ = ["Source", "open_source"]

#: How much is held in memory at a time (bytes); a region such as one GPU's block of `nvidia-smi -q` is read in one piece.
STRETCH = 4 * 1024 * 1024
_GZIP, _BZIP2, _XZ, _ZSTD, _JOURNAL = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"LPKSHHRH"
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass
class Source:
    """One file or stdin, opened. ``gaps`` fills while it is read: why what was read is not all of it."""

    name: str
    stretches: Iterator[bytes]
    gaps: list[str] = field(default_factory=list)


def open_source(name: str | Path) -> Source:
    """Open a file, or stdin for ``-``. Raises BadParameter when it cannot be read, or is no text and cannot become any."""
    if str(name) == "-":
        return _source("stdin", sys.stdin.buffer)
    path = Path(name)
    try:
        if path.is_dir():
            raise BadParameter(f"{path} is a folder", hint="name the files in it")
        return _source(str(path), path.open("rb"))
    except OSError as error:
        raise BadParameter(f"{path} cannot be read: {error.strerror or error}", hint="name a file, or - for stdin") from None


def _source(name: str, raw: BinaryIO) -> Source:
    source = Source(name, iter(()))
    file = _Peekable(raw)
    head = file.peek(512)
    if head.startswith(_JOURNAL):
        raise BadParameter(f"{name} is a binary journal", hint="journalctl --file FILE -o export | proofbook triage -")
    if head.startswith(_ZSTD):
        raise BadParameter(f"{name} is compressed with zstd", hint="zstdcat FILE | proofbook triage -")
    opened: BinaryIO = cast(BinaryIO, file)
    if head.startswith(_GZIP):
        opened = cast(BinaryIO, gzip.GzipFile(fileobj=opened, mode="rb"))
    elif head.startswith(_BZIP2):
        opened = cast(BinaryIO, bz2.BZ2File(opened))
    elif head.startswith(_XZ):
        opened = cast(BinaryIO, lzma.LZMAFile(opened))  # noqa: SIM115  # read to its end by the caller
    tar = _Peekable(opened, source)
    head = tar.peek(512)
    if head[257:262] == b"ustar":
        raise BadParameter(f"{name} is a tar archive", hint="unpack it and name the logs in it")
    encoding = next((e for bom, e in _UTF16.items() if head.startswith(bom)), "")
    text: BinaryIO = cast(BinaryIO, _Utf16(tar, encoding) if encoding else tar)
    source.stretches = read_stretches(text, STRETCH)
    return source


class _Peekable:
    """A reader whose beginning can be looked at; a compressed file that breaks off ends there, and says so."""

    def __init__(self, file: BinaryIO, source: Source | None = None) -> None:
        self._file, self._head, self._source = file, b"", source

    def peek(self, size: int) -> bytes:
        while len(self._head) < size:
            more = self._read(size - len(self._head))
            if not more:
                break
            self._head += more
        return self._head

    def read(self, size: int = -1) -> bytes:
        head, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        return head if size >= 0 and len(head) == size else head + self._read(size - len(head) if size >= 0 else -1)

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            if self._source is None:
                raise
            self._source.gaps.append(f"the compressed file breaks off or is damaged ({error}): what stood after that is missing")
            return b""

    def seekable(self) -> bool:
        return False

    def readable(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return False


class _Utf16:
    """UTF-16, as some Windows tools save a paste, read as UTF-8."""

    def __init__(self, file: _Peekable, encoding: str) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder(encoding)("replace")
        self._first = True

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        text = self._decoder.decode(block, final=not block)
        if self._first:
            text, self._first = text.removeprefix("\ufeff"), False
        return text.encode("utf-8", "surrogatepass") or (self.read(size) if block else b"")

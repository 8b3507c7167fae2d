"""The run journal: append-only, hash-chained, readable after a crash; and the one way in which a run writes to disk.

Every line is ``{"v":1,"seq":n,"ts":"…Z","run":id,"event":…,"data":{…},"prev":"sha256:…"}``, where ``prev`` is the sha256 of the
whole line before (bytes without the newline). A line is written with one ``write``; what must survive a power cut (intent and
outcome of an act, the seal) is fsynced as well. The chain shows edits and cuts in the middle; the end is held by the ``seal``
line and the manifest.

A kill -9 or a full disk can leave a torn last line: the reader leaves it out and says so.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from proofbook.errors import DiskFull, RecordError, Sealed
from proofbook.redact import Redactor

__all__ = [
    "GENESIS",
    "JOURNAL",
    "MANIFEST",
    "Journal",
    "JournalReading",
    "Writer",
    "Written",
    "indented",
    "parse_journal",
    "plain",
    "read_journal",
    "read_output",
    "utc_text",
]

JOURNAL = "journal.jsonl"
MANIFEST = "manifest-sha256.txt"
GENESIS = "sha256:" + "0" * 64

#: From so many bytes on an output is kept compressed, and a value is not written beside the output that it was read from.
LONG = 32 * 1024
#: The most that one compressed output is read as (bytes): a record that comes from elsewhere must not fill the memory.
_MOST = 256 * 1024 * 1024

#: Freed when the disk runs full, so that the run can still say that it did.
_RESERVE = ".reserve"
_RESERVE_BYTES = 256 * 1024


def utc_text(when: datetime) -> str:
    """``2026-11-29T11:17:09.412Z``. Raises ValueError for a time without zone."""
    if when.tzinfo is None:
        raise ValueError("a time without zone cannot be put into a record")
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """A value as JSON types: dataclasses and mappings become objects, tuples lists, times ISO text, enums their values.

    A key that is a tuple (a pair of addresses) becomes its words with a blank between.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_hook)
    except TypeError:
        return msgspec.to_builtins(_with_words(value), str_keys=True, enc_hook=_plain_hook)


def _with_words(value: Any) -> Any:
    """The value with mappings and dataclasses as dicts whose tuple keys are words; msgspec knows no such keys."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _with_words(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {" ".join(map(str, k)) if isinstance(k, tuple) else k: _with_words(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_with_words(item) for item in value]
    return value


def _plain_hook(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be written into a journal")


def _sha256(line: bytes) -> str:
    return "sha256:" + hashlib.sha256(line).hexdigest()


# ------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class Written:
    """What went to disk, after redaction: path relative to the run's folder, sha256 (hex), size (bytes), secrets taken out.

    Of an output that is kept compressed, sha256 and size are those of the output.
    """

    path: str
    sha256: str
    size: int
    redactions: int


class Writer:
    """The one way to disk: all passes the redactor, stays inside the run's folder, and replaces a file whole or not at all."""

    def __init__(self, run_dir: Path, redactor: Redactor) -> None:
        self.run_dir = run_dir
        self.redactor = redactor
        self._lock = threading.Lock()
        with _translated(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)

    @property
    def sealed(self) -> bool:
        return (self.run_dir / MANIFEST).exists()

    def write_bytes(self, relpath: str, data: bytes, *, durable: bool = False, clean: bool = True) -> Written:
        """Write one file atomically (temporary file, rename); ``durable`` adds fsync of the file and its folder.

        ``clean=False`` is for renderings of values that were cleaned before: a second pass over their markup would only harm it.
        Raises Sealed, DiskFull, RecordError (outside the folder, no permission).
        """
        path = self._path(relpath)
        before = self.redactor.count(relpath)
        if clean:
            data = self.redactor.data(data, relpath)
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.flush()
                    if durable:
                        os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
                raise
            if durable:
                _fsync_folder(path.parent)
        return Written(relpath, hashlib.sha256(data).hexdigest(), len(data), self.redactor.count(relpath) - before)

    def write_output(self, relpath: str, data: bytes) -> Written:
        """Write what a machine said: as it is, or, where that is long, compressed as ``<relpath>.gz`` (gzip).

        WHY: most of a long output says the same in every line; a journal in JSON shrinks to a twentieth. Raises as
        :meth:`write_bytes`; :func:`read_output` reads either.
        """
        relpath = relpath + ".gz" if len(data) >= LONG else relpath
        before = self.redactor.count(relpath)
        data = self.redactor.data(data, relpath)
        kept = gzip.compress(data, mtime=0) if relpath.endswith(".gz") else data
        self.write_bytes(relpath, kept, clean=False)
        return Written(relpath, hashlib.sha256(data).hexdigest(), len(data), self.redactor.count(relpath) - before)

    def write_text(self, relpath: str, text: str, *, durable: bool = False, clean: bool = True) -> Written:
        """Write text as UTF-8; lone surrogates (undecodable bytes that were read as text) become ``\\udcNN``."""
        return self.write_bytes(relpath, text.encode("utf-8", "backslashreplace"), durable=durable, clean=clean)

    def write_json(self, relpath: str, value: Any, *, durable: bool = False) -> Written:
        """Write a JSON-like value, cleaned as a value (by its keys), indented for people."""
        before = self.redactor.count(relpath)
        cleaned = self.redactor.value(plain(value), relpath)
        written = self.write_text(relpath, indented(cleaned), durable=durable, clean=False)
        return Written(written.path, written.sha256, written.size, self.redactor.count(relpath) - before)

    def open_append(self, relpath: str) -> int:
        """A file descriptor for appending; the caller writes only what went through the redactor."""
        path = self._path(relpath)
        with _translated(path):
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _path(self, relpath: str) -> Path:
        pure = PurePosixPath(relpath)
        if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in relpath:
            raise RecordError(f"{relpath!r} is not a path inside the run's folder")
        path = self.run_dir.joinpath(*pure.parts)
        root = self.run_dir.resolve()
        if not path.parent.resolve().is_relative_to(root) or path.is_symlink():
            raise RecordError(f"{relpath!r} leads out of the run's folder through a link")
        if self.sealed:
            raise Sealed(f"{self.run_dir.name} is sealed; nothing can be added to it", hint="write an annotation instead")
        return path


def read_output(path: Path) -> bytes:
    """An output as the machine said it, kept compressed or not. Raises OSError, also for one that is damaged or too large."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        output = unpacking.decompress(data, _MOST)
    except zlib.error as error:
        raise OSError(errno.EIO, f"it is damaged ({error})", str(path)) from None
    if not unpacking.eof or unpacking.unused_data:
        raise OSError(errno.EIO, "it is cut, has something behind its end, or is too large", str(path))
    return output


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space in outputs/; what was written so far is kept and readable"
            raise DiskFull(f"no space left for the record: {path}", hint=hint) from error
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Journal:
    """Appends events to ``journal.jsonl``. Thread-safe; one process writes one journal."""

    def __init__(self, writer: Writer, run_id: str, clock_now: Callable[[], datetime]) -> None:
        """Start a journal, or go on with one whose writer died (a torn last line is cut off and noted)."""
        self.run_id = run_id
        self._writer = writer
        self._now = clock_now
        self._lock = threading.RLock()
        self._seq = 0
        self._prev = GENESIS
        self._sealed = False
        path = writer.run_dir / JOURNAL
        torn = 0
        if path.exists():
            reading = read_journal(path)
            if not reading.intact:
                raise RecordError(f"the journal is damaged and cannot be continued: {reading.trouble}")
            self._seq, self._prev, self._sealed, torn = len(reading.events), reading.last, reading.sealed, reading.torn
        self._fd = writer.open_append(JOURNAL)
        with _translated(path):
            self._size = os.fstat(self._fd).st_size - torn
            if torn:
                os.ftruncate(self._fd, self._size)
            _fsync_folder(path.parent)
        self._set_reserve_aside()
        if torn:
            text = f"{torn} bytes of an unfinished last line were cut off"
            self.append("note", {"kind": "warning", "title": "torn line", "text": text}, durable=True)

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return self._seq

    @property
    def last(self) -> str:
        """The sha256 of the last line."""
        return self._prev

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """``data`` as JSON values without secrets, as it will stand in the journal."""
        cleaned: dict[str, Any] = self._writer.redactor.value(plain(dict(data)), JOURNAL)
        return cleaned

    def append(self, event: str, data: Mapping[str, Any], durable: bool = False, *, cleaned: bool = False) -> int:
        """Write one event and return its number (from 0). ``cleaned``: ``data`` came from :meth:`clean`, untouched.

        Raises DiskFull (the journal stays readable), Sealed, RecordError.
        """
        with self._lock:
            if self._sealed:
                raise Sealed(f"the journal of {self.run_id} is sealed", hint="write an annotation instead")
            line = self._line(event, data if cleaned else self.clean(data))
            from_reserve = self._write(line + b"\n", durable)
            seq, self._seq, self._prev = self._seq, self._seq + 1, _sha256(line)
            if from_reserve:  # the line stands, and the next one continues it
                message = "no space left for the record; this event was written from the journal's reserve"
                raise DiskFull(message, hint="free some space in outputs/ and close the run")
            return seq

    def seal(self) -> None:
        """Write the ``seal`` line, which must be the last, and close the file."""
        with self._lock:
            self.append("seal", {"lines": self._seq, "last": self._prev}, durable=True)
            self._sealed = True
            self.close()

    def close(self) -> None:
        """Close the file; the journal stays unsealed. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self._free_reserve()

    def _line(self, event: str, cleaned: Mapping[str, Any]) -> bytes:
        ts = utc_text(self._now())
        line = {"v": 1, "seq": self._seq, "ts": ts, "run": self.run_id, "event": event, "data": cleaned, "prev": self._prev}
        # one NaN of a measurement must not cost the whole line, and JSON readers choke on it
        return json.dumps(_finite(line), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")

    def _write(self, line: bytes, durable: bool) -> bool:
        """Write a whole line or nothing. True: the disk is full, and the reserve was given up for it. Raises DiskFull."""
        if self._fd < 0:
            raise RecordError(f"the journal of {self.run_id} is closed")
        try:
            with _translated(self._writer.run_dir / JOURNAL):
                self._write_whole(line)
                if durable:
                    os.fsync(self._fd)
        except DiskFull:
            self._cut_back()
            if not self._free_reserve():
                raise
            with _translated(self._writer.run_dir / JOURNAL):
                try:
                    self._write_whole(line)
                    if durable:
                        os.fsync(self._fd)
                except OSError:
                    self._cut_back()
                    raise
            self._size += len(line)
            return True
        except RecordError:
            self._cut_back()
            raise
        self._size += len(line)
        return False

    def _write_whole(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]

    def _cut_back(self) -> None:
        """Take a half-written line back, so that the journal ends with a whole one."""
        with contextlib.suppress(OSError):  # the reader copes with a torn line; the first error is the one to tell
            os.ftruncate(self._fd, self._size)

    def _set_reserve_aside(self) -> None:
        with _translated(self._writer.run_dir / _RESERVE):
            fd = os.open(self._writer.run_dir / _RESERVE, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def _free_reserve(self) -> bool:
        try:
            (self._writer.run_dir / _RESERVE).unlink()
        except FileNotFoundError:
            return False
        return True


def indented(value: Any) -> str:
    """JSON for people, a level of indentation a space, with a line's end; what is no number (NaN) is null."""
    # WHY in two steps: json indents in Python, and takes twice the time of both of these.
    text = json.dumps(_finite(value), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return msgspec.json.format(text, indent=1).decode() + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class JournalReading:
    """What a journal says. ``intact``: every whole line is chained to the one before, and nothing follows the seal.

    ``trouble`` says what is wrong, "" if nothing; ``torn`` is the number of bytes of an unfinished last line (left out of
    ``events``; it does not make a journal that is not sealed untrue); ``last`` is the sha256 of the last whole line.
    """

    events: tuple[dict[str, Any], ...]
    intact: bool
    trouble: str = ""
    torn: int = 0
    sealed: bool = False
    last: str = GENESIS


def read_journal(path: Path) -> JournalReading:
    """Read and verify a journal. Raises RecordError when there is none or it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read the journal {path}: {error.strerror or error}") from error
    return parse_journal(data)


def parse_journal(data: bytes) -> JournalReading:
    """The events of a journal's bytes up to the first line that does not fit, and what is wrong with the rest."""
    *whole, tail = data.split(b"\n")
    events: list[dict[str, Any]] = []
    last = GENESIS
    for number, line in enumerate(whole):
        trouble = ""
        event = _decoded(line)
        if event is None:
            if number == len(whole) - 1 and not tail and not _sealed(events):
                # a crash of the machine can leave a last block of zeros or rubbish
                trouble = "the last line is unreadable and was left out"
                return JournalReading(tuple(events), True, trouble, torn=len(line) + 1, last=last)
            trouble = f"line {number + 1} is not a journal line"
        elif _sealed(events):
            trouble = f"line {number + 1} follows the seal"
        elif event["prev"] != last:
            trouble = f"line {number + 1} does not continue line {number}: something was changed or cut there"
        elif event["seq"] != number:
            trouble = f"line {number + 1} carries number {event['seq']}"
        elif event["event"] == "seal" and (event["data"].get("lines") != number or event["data"].get("last") != last):
            trouble = "the seal does not fit the lines before it"
        if trouble or event is None:
            return JournalReading(tuple(events), False, trouble, sealed=_sealed(events), last=last)
        events.append(event)
        last = _sha256(line)
    sealed = _sealed(events)
    if tail and sealed:
        return JournalReading(tuple(events), False, f"{len(tail)} bytes follow the seal", torn=len(tail), sealed=True, last=last)
    trouble = f"the last line is unfinished ({len(tail)} bytes) and was left out" if tail else ""
    return JournalReading(tuple(events), True, trouble, torn=len(tail), sealed=sealed, last=last)


def _sealed(events: list[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["event"] == "seal"


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not event.keys() >= {"seq", "ts", "event", "data", "prev"}:
        return None
    return event if isinstance(event["data"], dict) else None

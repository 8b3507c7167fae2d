"""How logs write a line: what is the message, and what is time, host and program around it.

Known: dmesg (with seconds, with ``-T`` times, with ISO times, with priorities), journalctl's short, short-iso,
short-precise, short-full, short-monotonic, with-unit and json, syslog files, and output as it comes (no prefix at all).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from proofbook.signatures.judge import LogLine

#: Terminal colours and the like, and the carriage return of a pasted line.
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\r\x00]+$")

_MONTHS = {m: i for i, m in enumerate(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1)}
_PRIORITY = r"(?:<\d{1,3}>)?"
_PROGRAM = r"(?P<program>[^\s\[\]:]+(?:\[[^\]]*\])?):\s?(?P<text>.*)"
_DMESG = re.compile(_PRIORITY + r"\[\s*(?P<seconds>\d+\.\d{3,9})\](?:\[\s*[TC]\d+\])? ?(?P<text>.*)")
_DMESG_T = re.compile(_PRIORITY + r"\[(?P<day>\w{3} \w{3}\s+\d+ \d\d:\d\d:\d\d \d{4})\] ?(?P<text>.*)")
_ISO = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)\s+(?:(?P<host>[^\s\[\]:]+) )?" + _PROGRAM
)
_ISO_ALONE = re.compile(r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]\d+[+-]\d\d:?\d\d)\s(?P<text>.*)")
_FULL = re.compile(
    r"\w{3} (?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?) (?P<zone>[A-Z]{2,5}|[+-]\d{2,4}) (?P<host>\S+) " + _PROGRAM
)
_SHORT = re.compile(r"(?P<month>[A-Z][a-z]{2})\s+(?P<dom>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?) (?P<host>\S+) " + _PROGRAM)
_MONOTONIC_SHORT = re.compile(
    r"\[\s*(?P<seconds>\d+\.\d{3,9})\] (?P<host>[\w.-]+) (?P<program>[^\s\[\]:]+(?:\[\d+\])?): (?P<text>.*)"
)
_KERNEL_TIME = re.compile(r"\[\s*(?P<seconds>\d+\.\d{3,9})\] ?(?P<text>.*)")
_PROGRAM_ONLY = re.compile(r"(?P<program>kernel|systemd\[\d+\]|systemd-journald\[\d+\]): (?P<text>.*)")


def clean(text: str) -> str:
    """Without terminal escapes and without a carriage return at the end."""
    if "\x1b" in text or text.endswith(("\r", "\x00")):
        return _ESCAPES.sub("", text)
    return text


def _source(program: str) -> tuple[str, str | None]:
    """``(source, unit)`` for a program name such as ``kernel``, ``systemd[1]`` or ``sglang-qwen[15462]``."""
    name = program.split("[")[0]
    if name == "kernel":
        return "kernel", None
    if name == "systemd":
        return "systemd", None
    if name == "systemd-journald":
        return "journald", None
    return "service", f"{name}.service" if not name.endswith(".service") else name


def _iso(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text.replace(",", ".").replace("Z", "+00:00"))
    except ValueError:
        return None
    return when.astimezone(UTC) if when.tzinfo else None  # WHY: a local time without zone orders nothing across machines


#: What container tools put before a line: Compose its service, Kubernetes the time.
_COMPOSE = re.compile(r"(?P<name>[\w.-]+-\d+|[\w.-]+ +) *\| (?P<text>.*)")
_TIME_FIRST = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) (?P<text>.*)")


def read_line(raw: str, year: int | None = None) -> LogLine:
    """One line of a text log. What no format explains is the message itself, of unknown source.

    ``year``: for formats that leave it out; without it their times are not known.
    """
    text = clean(raw)
    for pattern in (_MONOTONIC_SHORT, _DMESG):
        found = pattern.fullmatch(text)
        if found:
            if pattern is _MONOTONIC_SHORT and not _plausible_program(found["program"]):
                continue
            source, unit = _source(found["program"]) if pattern is _MONOTONIC_SHORT else ("kernel", None)
            return LogLine(found["text"], monotonic_s=float(found["seconds"]), source=source, unit=unit)
    found = _DMESG_T.fullmatch(text)
    if found:
        return LogLine(found["text"], source="kernel")  # dmesg -T: local time, of no zone
    found = _SHORT.fullmatch(text)
    if found and found["month"] in _MONTHS:
        return _with_program(found["program"], found["text"], _short_time(found, year))
    found = _FULL.fullmatch(text)
    if found:
        when = _iso(found["time"] + "+00:00") if found["zone"] == "UTC" else None
        return _with_program(found["program"], found["text"], when)
    found = _ISO.fullmatch(text)
    if found and (found["host"] or found["program"].split("[")[0] == "kernel"):
        return _with_program(found["program"], found["text"], _iso(found["time"]))
    found = _ISO_ALONE.fullmatch(text)
    if found:
        return LogLine(found["text"], time=_iso(found["time"]), source="kernel")  # dmesg --time-format=iso
    found = _PROGRAM_ONLY.fullmatch(text)
    if found:
        return _with_program(found["program"], found["text"], None)
    found = _TIME_FIRST.fullmatch(text)
    if found:
        return LogLine(found["text"], time=_iso(found["time"][:26].rstrip("Z") + "Z"), source="")
    found = _COMPOSE.fullmatch(text)
    if found:
        return LogLine(found["text"], source="")
    return LogLine(text, source="")


def _plausible_program(name: str) -> bool:
    return name.split("[")[0] == "kernel" or "[" in name


def _short_time(found: re.Match[str], year: int | None) -> datetime | None:
    if year is None:
        return None
    clock = found["clock"].split(".")
    hour, minute, second = (int(x) for x in clock[0].split(":"))
    try:
        when = datetime(year, _MONTHS[found["month"]], int(found["dom"]), hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return when + timedelta(seconds=float(f"0.{clock[1]}")) if len(clock) > 1 else when


def _with_program(program: str, text: str, when: datetime | None) -> LogLine:
    source, unit = _source(program)
    seconds = None
    if source == "kernel":
        inner = _KERNEL_TIME.fullmatch(text)
        if inner:
            seconds, text = float(inner["seconds"]), inner["text"]
    return LogLine(text, monotonic_s=seconds, time=when, unit=unit, source=source)


class JournalFields(msgspec.Struct):
    """The fields of a ``journalctl -o json`` line that matter here; the others are skipped unread.

    A message that is no UTF-8 comes as an array of byte values, one that was given several times as an array of those, and
    one that is too large as null.
    """

    MESSAGE: Any = ""
    realtime: Any = msgspec.field(name="__REALTIME_TIMESTAMP", default=None)
    monotonic: Any = msgspec.field(name="__MONOTONIC_TIMESTAMP", default=None)
    boot_id: Any = msgspec.field(name="_BOOT_ID", default=None)
    transport: Any = msgspec.field(name="_TRANSPORT", default=None)
    identifier: Any = msgspec.field(name="SYSLOG_IDENTIFIER", default=None)
    own_unit: Any = msgspec.field(name="_SYSTEMD_UNIT", default=None)
    about_unit: Any = msgspec.field(name="UNIT", default=None)
    own_invocation: Any = msgspec.field(name="_SYSTEMD_INVOCATION_ID", default=None)
    about_invocation: Any = msgspec.field(name="INVOCATION_ID", default=None)


_decode_journal = msgspec.json.Decoder(JournalFields).decode


def message_text(value: Any) -> str | None:
    """The text of a MESSAGE field; None when the journal left it out (too large)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if value and all(isinstance(x, int) and 0 <= x < 256 for x in value):
            return bytes(value).decode("utf-8", "backslashreplace")
        return "\n".join(filter(None, (message_text(x) for x in value)))
    return None if value is None else str(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def read_journal_line(raw: bytes) -> LogLine | None:
    """One line of ``journalctl -o json``; None when its message was left out. Raises ValueError when it is no JSON object."""
    try:
        entry = _decode_journal(raw)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return _journal_line(entry)


def _journal_line(entry: JournalFields) -> LogLine | None:
    text = message_text(entry.MESSAGE)
    if text is None:
        return None
    micro, boot_micro = _number(entry.realtime), _number(entry.monotonic)
    identifier, transport = _text(entry.identifier) or "", _text(entry.transport)
    if transport == "kernel":
        source = "kernel"
    elif identifier == "systemd" and entry.about_unit is not None:
        source = "systemd"
    else:
        source = {"systemd": "systemd", "systemd-journald": "journald", "kernel": "kernel"}.get(identifier, "service")
    return LogLine(
        clean(text),
        monotonic_s=None if boot_micro is None else boot_micro / 1e6,
        time=None if micro is None else datetime.fromtimestamp(micro / 1e6, UTC),
        unit=_text(entry.about_unit) or _text(entry.own_unit),
        boot_id=_text(entry.boot_id),
        invocation=_text(entry.about_invocation) or _text(entry.own_invocation),
        source=source,
    )


def read_export_entry(raw: bytes) -> LogLine | None:
    """One entry of ``journalctl -o export``: ``NAME=value`` lines, and fields of any bytes as name, length and data.

    None when it holds no message.
    """
    fields: dict[str, str] = {}
    at = 0
    while at < len(raw):
        end = raw.find(b"\n", at)
        end = len(raw) if end < 0 else end
        name, equals, value = raw[at:end].partition(b"=")
        at = end + 1
        if not equals and name and at + 8 <= len(raw):
            size = int.from_bytes(raw[at : at + 8], "little")
            value, at = raw[at + 8 : at + 8 + size], at + 8 + size + 1
        if name:
            fields[name.decode("ascii", "replace")] = value.decode("utf-8", "backslashreplace")
    if "MESSAGE" not in fields:
        return None
    return _journal_line(
        JournalFields(
            MESSAGE=fields["MESSAGE"],
            realtime=fields.get("__REALTIME_TIMESTAMP"),
            monotonic=fields.get("__MONOTONIC_TIMESTAMP"),
            boot_id=fields.get("_BOOT_ID"),
            transport=fields.get("_TRANSPORT"),
            identifier=fields.get("SYSLOG_IDENTIFIER"),
            own_unit=fields.get("_SYSTEMD_UNIT"),
            about_unit=fields.get("UNIT"),
            own_invocation=fields.get("_SYSTEMD_INVOCATION_ID"),
            about_invocation=fields.get("INVOCATION_ID"),
        )
    )

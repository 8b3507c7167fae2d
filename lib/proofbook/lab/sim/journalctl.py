"""``journalctl`` on a simulated machine: selects and prints entries as systemd 257 does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from proofbook.lab.sim.os_state import Entry, System
from proofbook.lab.sim.shell import Answer, Context, said

#: A field longer than this is printed as null in JSON unless --all is given (systemd's JSON_THRESHOLD).
JSON_THRESHOLD = 4096

_PRIORITIES = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")
_SHORT_OPTIONS_WITH_VALUE = "bnoutpgSUD"
_LONG = {
    "boot": "b",
    "lines": "n",
    "output": "o",
    "unit": "u",
    "identifier": "t",
    "priority": "p",
    "grep": "g",
    "since": "S",
    "until": "U",
    "dmesg": "k",
    "reverse": "r",
    "follow": "f",
    "all": "a",
    "quiet": "q",
    "directory": "D",
    "catalog": "x",
}

_HINT = (
    "Hint: You are currently not seeing messages from other users and the system.\n"
    "      Users in groups 'adm', 'systemd-journal' can see all messages.\n"
    "      Pass -q to turn off this notice.\n"
)


@dataclass
class Query:
    """What was asked for."""

    kernel: bool = False
    boot: str | None = None  # None: all boots
    lines: int | None = None
    output: str = "short"
    units: list[str] = field(default_factory=list)
    identifiers: list[str] = field(default_factory=list)
    priority: tuple[int, int] | None = None
    pattern: str = ""
    since: str = ""
    until: str = ""
    reverse: bool = False
    follow: bool = False
    everything: bool = False
    quiet: bool = False
    hostname: bool = True
    list_boots: bool = False
    header: bool = False
    after_cursor: str = ""
    show_cursor: bool = False
    matches: list[list[str]] = field(default_factory=lambda: [[]])


class _Usage(Exception):
    pass


def parse(argv: list[str]) -> Query:
    """Raises _Usage with the complaint."""
    query = Query()
    words = argv[1:]
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            _long(query, name, value if "=" in word else None, words)
        elif word.startswith("-") and len(word) > 1:
            _short(query, word[1:], words)
        elif word == "+":
            query.matches.append([])
        elif re.match(r"[A-Z_][A-Z0-9_]*=", word):
            query.matches[-1].append(word)
        else:
            raise _Usage(f"Failed to add match '{word}': Invalid argument\n")
    return query


def _long(query: Query, name: str, value: str | None, words: list[str]) -> None:
    flags = {"no-pager": None, "utc": None, "merge": None, "system": None, "no-full": None, "no-hostname": "hostname"}
    if name in flags:
        if flags[name]:
            query.hostname = False
    elif name == "list-boots":
        query.list_boots = True
    elif name in ("header", "disk-usage"):
        query.header = True
    elif name == "show-cursor":
        query.show_cursor = True
    elif name in ("after-cursor", "cursor"):
        query.after_cursor = value if value is not None else words.pop(0)
    elif name in _LONG:
        letter = _LONG[name]
        if letter == "b" and value is None:
            value = ""  # the boot is optional, and only with "="
        elif letter in _SHORT_OPTIONS_WITH_VALUE and value is None:
            value = words.pop(0) if words else ""
        _option(query, letter, value or "")
    else:
        raise _Usage(f"journalctl: unrecognized option '--{name}'\n")


def _short(query: Query, letters: str, words: list[str]) -> None:
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter == "m":
            continue
        if letter not in _SHORT_OPTIONS_WITH_VALUE:
            _option(query, letter, "")
            continue
        value, letters = letters, ""
        if not value and words and (letter != "b" or _is_boot(words[0])) and (letter != "n" or words[0].lstrip("+").isdigit()):
            value = words.pop(0)
        _option(query, letter, value)


def _is_boot(word: str) -> bool:
    return bool(re.fullmatch(r"[-+]?\d+|[0-9a-f]{32}([-+]\d+)?|[0-9a-f-]{36}|all", word))


def _option(query: Query, letter: str, value: str) -> None:
    if letter == "k":
        query.kernel, query.boot = True, query.boot if query.boot is not None else "0"
    elif letter == "b":
        query.boot = value or "0"
    elif letter == "n":
        query.lines = int(value.lstrip("+")) if value and value != "all" else (10 if not value else None)
    elif letter == "o":
        query.output = value
    elif letter == "u":
        query.units.append(value if "." in value.rpartition("/")[2] else value + ".service")
    elif letter == "t":
        query.identifiers.append(value)
    elif letter == "p":
        query.priority = _priority(value)
    elif letter == "g":
        query.pattern = value
    elif letter == "S":
        query.since = value
    elif letter == "U":
        query.until = value
    elif letter == "r":
        query.reverse = True
    elif letter == "f":
        query.follow = True
    elif letter == "a":
        query.everything = True
    elif letter == "q":
        query.quiet = True
    elif letter in "xeDl":
        pass
    else:
        raise _Usage(f"journalctl: invalid option -- '{letter}'\n")


def _priority(value: str) -> tuple[int, int]:
    low, dots, high = value.partition("..")
    number = _PRIORITIES.index if not low.isdigit() else int
    try:
        return (number(low), number(high)) if dots else (0, number(low))
    except ValueError:
        raise _Usage(f"Unknown log level {value}\n") from None


async def journalctl(ctx: Context, argv: list[str]) -> Answer:
    """Answer ``journalctl``; follows only where there is somebody to write to."""
    try:
        query = parse(argv)
    except _Usage as complaint:
        return said(error=str(complaint), status=1)
    except (IndexError, ValueError):
        return said(error="Failed to parse arguments.\n", status=1)
    # WHY the second: output that is for programs makes journalctl quiet, also about what it may not show.
    query.quiet = query.quiet or query.output.startswith(("json", "export", "cat"))
    hint = "" if query.quiet or ctx.user.uid == 0 else _HINT
    journal = _readable(ctx)
    if not journal and ctx.user.uid != 0:
        return said(error=hint + "No journal files were opened due to insufficient permissions.\n", status=1)
    if query.list_boots:
        return said(_boots(journal), error=hint)
    if query.header:
        return said("Archived and active journals take up 184M in the file system.\n")
    try:
        chosen = select(ctx, query)
    except _Usage as complaint:
        return said(error=hint + str(complaint), status=1)
    if query.follow:
        return await _follow(ctx, query, chosen)
    text = "".join(_printed(ctx, query, chosen))
    if not chosen and not query.quiet:
        text = "-- No entries --\n"
    if query.show_cursor:
        # WHY exit status 1 without a word: it is so where no entry was ever found whose place could be told.
        if not chosen and not query.after_cursor:
            return said(status=1)
        text += f"-- cursor: {_cursor(ctx.system, chosen[-1]) if chosen else query.after_cursor}\n"
    return Answer(0, text.encode("utf-8", "surrogateescape"), hint.encode())


def _readable(ctx: Context) -> list[Entry]:
    """What this login may see: root everything, others what their own processes said (none is in adm or systemd-journal)."""
    journal = ctx.system.journal
    return journal if ctx.user.uid == 0 else [e for e in journal if e.fields.get("_UID") == str(ctx.user.uid)]


def select(ctx: Context, query: Query) -> list[Entry]:
    """The entries that were asked for, in the order in which they are printed. Raises _Usage."""
    entries = _readable(ctx)
    if query.boot not in (None, "all"):
        wanted = _boot_id(entries, query.boot or "0")
        entries = [e for e in entries if e.boot_id == wanted]
    if query.after_cursor and (found := re.search(r"i=([0-9a-f]+)", query.after_cursor)):
        last = int(found[1], 16)
        entries = [e for e in entries if e.seqnum > last]  # first, since whoever follows a unit asks for little more at a time
    entries = [e for e in entries if _wanted(ctx, query, e)]
    if query.lines is not None:
        entries = entries[-query.lines :] if query.lines else []
    elif query.follow:
        entries = entries[-10:]
    return entries[::-1] if query.reverse else entries


def _boot_id(entries: list[Entry], wanted: str) -> str:
    known = list(dict.fromkeys(e.boot_id for e in entries))
    plain = wanted.replace("-", "") if len(wanted) == 36 else wanted
    if re.fullmatch(r"[0-9a-f]{32}", plain):
        if plain not in known:
            raise _Usage(f"Data from the specified boot ({plain}) is not available: No such boot ID in journal\n")
        return plain
    offset = int(wanted)
    position = offset - 1 if offset > 0 else len(known) - 1 + offset
    if not 0 <= position < len(known):
        raise _Usage(f"Data from the specified boot ({offset:+d}) is not available: No such boot ID in journal\n")
    return known[position]


def _wanted(ctx: Context, query: Query, entry: Entry) -> bool:
    f = entry.fields
    if query.kernel and f.get("_TRANSPORT") != "kernel":
        return False
    if query.units and not any(_of_unit(f, u) for u in query.units):
        return False
    if query.identifiers and f.get("SYSLOG_IDENTIFIER") not in query.identifiers:
        return False
    if query.priority and not query.priority[0] <= int(f.get("PRIORITY", "6")) <= query.priority[1]:
        return False
    if query.pattern:
        flags = 0 if any(c.isupper() for c in query.pattern) else re.IGNORECASE
        if not re.search(query.pattern, f.get("MESSAGE", ""), flags):
            return False
    if query.since and entry.realtime_us < _time(query.since, ctx.life.now) * 1e6:
        return False
    if query.until and entry.realtime_us > _time(query.until, ctx.life.now) * 1e6:
        return False
    groups = [g for g in query.matches if g]
    return not groups or any(_matches(ctx, entry, _by_field(tuple(group))) for group in groups)


@lru_cache(maxsize=64)
def _by_field(group: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Matches of one field are alternatives; different fields must all match."""
    names = dict.fromkeys(match.partition("=")[0] for match in group)
    return tuple((name, tuple(m.partition("=")[2] for m in group if m.partition("=")[0] == name)) for name in names)


def _matches(ctx: Context, entry: Entry, by_field: Iterable[tuple[str, tuple[str, ...]]]) -> bool:
    for name, values in by_field:
        value = entry.fields.get(name)
        if value is None and name in _SHARED:
            value = all_fields(ctx.system, entry).get(name)
        if value not in values:
            return False
    return True


def _of_unit(f: dict[str, str], unit: str) -> bool:
    return f.get("_SYSTEMD_UNIT") == unit or (f.get("_PID") == "1" and f.get("UNIT") == unit)


def _time(text: str, now: float) -> float:
    """``-5min``, ``5 minutes ago``, ``today``, ``2026-11-29 10:00:00``, ``@1764400000``. Raises _Usage."""
    units = {
        "s": 1,
        "sec": 1,
        "second": 1,
        "m": 60,
        "min": 60,
        "minute": 60,
        "h": 3600,
        "hr": 3600,
        "hour": 3600,
        "d": 86400,
        "day": 86400,
    }
    text = text.strip()
    if found := re.fullmatch(r"-?\s*(\d+)\s*([a-z]+?)s?(?:\s+ago)?", text):
        if found[2] in units:
            return now - int(found[1]) * units[found[2]]
    elif text.startswith("@"):
        return float(text[1:])
    elif text in ("now", "today", "yesterday"):
        midnight = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return {"now": now, "today": midnight.timestamp(), "yesterday": (midnight - timedelta(days=1)).timestamp()}[text]
    try:
        return datetime.fromisoformat(text.removesuffix(" UTC").replace("Z", "+00:00")).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise _Usage(f"Failed to parse timestamp: {text}\n") from None


async def _follow(ctx: Context, query: Query, chosen: list[Entry]) -> Answer:
    if ctx.emit is None:
        return said(error="lab: journalctl -f needs a connection that it can write to\n", status=1)
    last = ctx.system.seqnum
    await ctx.emit("".join(_printed(ctx, query, chosen)).encode())
    follow = Query(**{**vars(query), "lines": None, "follow": False, "boot": None})
    import asyncio

    while True:
        await asyncio.sleep(0.05)
        fresh = [e for e in _readable(ctx) if e.seqnum > last and _wanted(ctx, follow, e)]
        last = ctx.system.seqnum
        if fresh:
            await ctx.emit("".join(_printed(ctx, query, fresh)).encode())


# ------------------------------------------------------------------------------------------ printing


#: What :func:`all_fields` adds.
_SHARED = frozenset({"_BOOT_ID", "_MACHINE_ID", "_HOSTNAME", "_RUNTIME_SCOPE", "_SOURCE_MONOTONIC_TIMESTAMP"})


def all_fields(system: System, entry: Entry) -> dict[str, str]:
    """The entry's own fields and those that every entry of its boot has."""
    common = {
        "_BOOT_ID": entry.boot_id,
        "_MACHINE_ID": system.machine_id,
        "_HOSTNAME": system.hostname,
        "_RUNTIME_SCOPE": "system",
    }
    if entry.fields.get("_TRANSPORT") == "kernel":
        common["_SOURCE_MONOTONIC_TIMESTAMP"] = str(entry.monotonic_us)
    return {**common, **entry.fields}


def _cursor(system: System, entry: Entry) -> str:
    return (
        f"s={system.machine_id};i={entry.seqnum:x};b={entry.boot_id};m={entry.monotonic_us:x};t={entry.realtime_us:x};"
        f"x={hash_of(entry):x}"
    )


def hash_of(entry: Entry) -> int:
    """A stable number in the place of the journal's entry hash."""
    return (entry.realtime_us * 2654435761 ^ entry.seqnum * 40503) & 0xFFFFFFFFFFFFFFFF


def _printed(ctx: Context, query: Query, entries: list[Entry]) -> Iterator[str]:
    printers: dict[str, Callable[[Entry], str]] = {
        "json": lambda e: _json(ctx.system, e, everything=query.everything),
        "cat": lambda e: e.fields.get("MESSAGE", "") + "\n",
    }
    printer = printers.get(query.output)
    if printer:
        yield from map(printer, entries)
        return
    boot = ""
    for entry in entries:
        if boot and entry.boot_id != boot:
            yield f"-- Boot {entry.boot_id} --\n"
        boot = entry.boot_id
        yield _short_line(ctx.system, query, entry)


def _json(system: System, entry: Entry, *, everything: bool) -> str:
    value: dict[str, str | None] = {
        "__CURSOR": _cursor(system, entry),
        "__REALTIME_TIMESTAMP": str(entry.realtime_us),
        "__MONOTONIC_TIMESTAMP": str(entry.monotonic_us),
        "__SEQNUM": str(entry.seqnum),
        "__SEQNUM_ID": system.machine_id,
    }
    for name, text in all_fields(system, entry).items():
        value[name] = text if everything or len(name) + 1 + len(text) < JSON_THRESHOLD else None
    return json.dumps(value, ensure_ascii=False) + "\n"


def _short_line(system: System, query: Query, entry: Entry) -> str:
    f = entry.fields
    at = datetime.fromtimestamp(entry.realtime_us / 1e6, UTC)
    stamp = {
        "short-iso": at.strftime("%Y-%m-%dT%H:%M:%S+00:00"),
        "short-iso-precise": at.strftime("%Y-%m-%dT%H:%M:%S.%f+00:00"),
        "short-precise": at.strftime("%b %d %H:%M:%S.%f"),
        "short-full": at.strftime("%a %Y-%m-%d %H:%M:%S UTC"),
        "short-monotonic": f"[{entry.monotonic_us / 1e6:12.6f}]",
        "short-unix": f"{entry.realtime_us / 1e6:.6f}",
    }.get(query.output, at.strftime("%b %d %H:%M:%S"))
    pid = f.get("_PID") or f.get("SYSLOG_PID", "")
    who = f.get("SYSLOG_IDENTIFIER", "unknown") + (f"[{pid}]" if pid else "")
    host = f" {system.hostname}" if query.hostname else ""
    return f"{stamp}{host} {who}: {f.get('MESSAGE', '')}\n"


def _boots(journal: list[Entry]) -> str:
    spans: dict[str, tuple[int, int]] = {}
    for entry in journal:
        first, _ = spans.get(entry.boot_id, (entry.realtime_us, 0))
        spans[entry.boot_id] = (first, entry.realtime_us)
    text = "IDX BOOT ID                          FIRST ENTRY                 LAST ENTRY                 \n"
    for position, (boot_id, (first, last)) in enumerate(spans.items()):
        stamps = " ".join(datetime.fromtimestamp(t / 1e6, UTC).strftime("%a %Y-%m-%d %H:%M:%S UTC") for t in (first, last))
        text += f"{position - len(spans) + 1:3d} {boot_id} {stamps}\n"
    return text

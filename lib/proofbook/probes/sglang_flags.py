"""The flags of SGLang's server by release, and a command line held against them as argparse would hold it.

Where the installed launcher's own ``--help`` is at hand, it decides; the table of releases then only says what became of a
flag that is not there (renamed, removed, not yet). Without it the table decides, for the release that comes nearest.

>>> problem = check_argv(["--speculative-algo", "NEXTN", "--speculative-draft-epsilon", "0.2"], "0.5.9")[1]
>>> problem.kind, problem.flag, problem.nearest
('unknown', '--speculative-draft-epsilon', ('--speculative-accept-threshold-single', '--speculative-accept-threshold-acc'))
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from proofbook.errors import CannotTell

__all__ = [
    "Flag",
    "FlagProblem",
    "FlagSet",
    "Resolved",
    "Rewording",
    "check_argv",
    "flags_of",
    "parse_help",
    "resolve_argv",
    "reword",
    "server_words",
    "with_flags",
]

#: What a flag that is gone is called now. (old, first release without it under its own name, new)
_RENAMED = (
    ("--mamba-scheduler-strategy", "0.5.14", "--mamba-radix-cache-strategy"),
    ("--cuda-graph-max-bs", "0.5.14", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "0.5.14", "--cuda-graph-bs-decode"),
    ("--speculative-dflash-draft-window-size", "0.5.12", "--speculative-draft-window-size"),
    ("--enable-beta-spec", "0.5.5", "SGLANG_ENABLE_SPEC_V2=1 in the environment"),
)
#: What people look for under a name that no release has.
_MEANT = {
    "--speculative-draft-epsilon": ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
    "--speculative-epsilon": ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
    "--speculative-accept-threshold": ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
    "--enable-mtp": ("--speculative-algorithm",),
    "--num-speculative-tokens": ("--speculative-num-draft-tokens",),
    "--max-num-seqs": ("--max-running-requests",),
    "--gpu-memory-utilization": ("--mem-fraction-static",),
    "--tensor-parallel": ("--tp-size",),
}
#: Names that mean the same flag to the server, each set by its usual name.
_SAME = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
}
#: Values that a flag takes: (first release, last release, values). Later releases check --speculative-algorithm themselves.
_CHOICES = {
    "--speculative-algorithm": (
        ("0.5.3", "0.5.10.post1", ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")),
        ("0.5.11", "0.5.11", ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")),
    ),
    "--mamba-scheduler-strategy": (
        ("0.5.7", "0.5.12.post1", ("auto", "no_buffer", "extra_buffer")),
        ("0.5.13", "0.5.19", ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")),
    ),
    "--mamba-radix-cache-strategy": (("0.5.14", "", ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")),),
    "--speculative-attention-mode": (("0.5.3", "", ("prefill", "decode")),),
}  # fmt: skip
#: Algorithms that the releases from 0.5.12 on know themselves; a plugin may bring more.
_ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"}
_WHOLE = frozenset(
    {
        "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--max-running-requests",
        "--tp-size", "--tensor-parallel-size", "--dp-size", "--port", "--context-length", "--chunked-prefill-size",
        "--mamba-track-interval", "--max-mamba-cache-size", "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode",
        "--max-total-tokens",
    }
)  # fmt: skip
_FRACTION = frozenset(
    {
        "--mem-fraction-static", "--speculative-accept-threshold-single", "--speculative-accept-threshold-acc",
        "--mamba-full-memory-ratio", "--schedule-conservativeness",
    }
)  # fmt: skip
#: Other flags that are known to take one value.
_ONE = frozenset(
    {
        "--model-path", "--model", "--host", "--served-model-name", "--speculative-algorithm", "--speculative-draft-model-path",
        "--speculative-draft-model", "--dtype", "--quantization", "--kv-cache-dtype", "--attention-backend", "--api-key",
        "--tokenizer-path", "--reasoning-parser", "--tool-call-parser", "--chat-template",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a launcher. ``takes``: "" a switch, "one" value, "many"; None where nobody says. ``choices``: () = any."""

    name: str
    takes: str | None = None
    choices: tuple[str, ...] = ()
    deprecated: bool = False


@dataclass(frozen=True)
class FlagSet:
    """The flags that one installation takes. ``by``: who says so ("its own --help", "the table of 0.5.9")."""

    version: str
    flags: Mapping[str, Flag] = field(repr=False)
    by: str
    exact: bool  # False: the table has no such release, and the nearest one was taken

    def resolve(self, spelt: str) -> tuple[str, ...]:
        """The flags that argparse takes ``spelt`` for: itself, else every flag that it is the beginning of."""
        if spelt in self.flags:
            return (spelt,)
        return tuple(sorted(name for name in self.flags if name.startswith(spelt)))


@dataclass(frozen=True, slots=True)
class FlagProblem:
    """What argparse, or a later release, would make of a flag. ``fatal``: the server would end with exit status 2.

    ``kind``: unknown · renamed · removed · not-yet · ambiguous · value · missing-value (fatal); abbreviated · deprecated ·
    repeated · unsure (not fatal).
    """

    kind: str
    flag: str
    text: str
    fatal: bool
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.flag}: {self.text}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """One flag of a command line as the launcher reads it: its full name, how it stood there, and where its words stand."""

    name: str
    spelt: str
    values: tuple[str, ...]
    at: int  # index of its word; its values follow, but for the form --flag=value


# -------------------------------------------------------------------------------------------------- the table


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[str, ...], Mapping[str, tuple[tuple[int, int, bool], ...]]]:
    """The releases in order, and for each flag the spans (first, last, deprecated) of indexes in which it is there."""
    said = json.loads(Path(__file__).with_name("sglang_flags.json").read_text(encoding="utf-8"))
    versions = tuple(said["versions"])
    place = {version: n for n, version in enumerate(versions)}
    table = {}
    for name, spans in said["flags"].items():
        parsed = []
        for span in spans.split(", "):
            found = re.fullmatch(r"(\S+)\.\.(\S+?)( deprecated)?", span)
            if not found:
                raise ValueError(f"sglang_flags.json: {name}: {span!r}")
            parsed.append((place[found[1]], place[found[2]], bool(found[3])))
        table[name] = tuple(parsed)
    return versions, table


def _key(version: str) -> tuple[int, ...]:
    """For ordering: 0.5.9 < 0.5.10 < 0.5.10.post1. Raises CannotTell for something that is no version."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if not found:
        raise CannotTell(f"not a version of SGLang: {version!r}")
    return tuple(int(part or 0) for part in found.groups())


def flags_of(version: str, help_text: str | None = None) -> FlagSet:
    """The flags of an installation. Raises CannotTell when there is neither a help text nor a version."""
    if help_text:
        return FlagSet(version, parse_help(help_text), "the launcher's own --help", True)
    versions, table = _table()
    wanted = _key(version)
    at = max((n for n, v in enumerate(versions) if _key(v) <= wanted), default=0)
    exact = version == versions[at]
    flags = {}
    for name, spans in table.items():
        for first, last, deprecated in spans:
            if first <= at <= last:
                choices = _choices(name, versions[at])
                takes = "one" if choices or name in _WHOLE | _FRACTION | _ONE else None
                flags[name] = Flag(name, takes, choices, deprecated)
    return FlagSet(version, flags, f"the table of {versions[at]}", exact)


def _choices(name: str, version: str) -> tuple[str, ...]:
    for first, last, values in _CHOICES.get(name, ()):
        if _key(first) <= _key(version) and (not last or _key(version) <= _key(last)):
            return values
    return ()


# --------------------------------------------------------------------------------------------------- the help

_OPTION_LINE = re.compile(r"^ {2,4}(?P<options>-{1,2}[A-Za-z].*?)(?: {2,}\S.*)?$")
#: One name of an option with its metavar: ``--lora-paths [LORA_PATHS ...]``, ``--choice {a,b}``, ``--switch``.
_METAVAR = r"(?:\{[^}]*\}|\[[^\]]*\]|[^\s,\[{-][^\s,]*)"
_OPTION = re.compile(rf"(-{{1,2}}[A-Za-z][\w-]*)(?:[ =]({_METAVAR}(?: {_METAVAR})*))?(?=,|$)")


def parse_help(text: str) -> dict[str, Flag]:
    """The long flags of an argparse help text, aliases each on their own. Raises CannotTell when there are none.

    ::

          --tensor-parallel-size TENSOR_PARALLEL_SIZE, --tp-size TENSOR_PARALLEL_SIZE
                                The tensor parallelism size.
          --speculative-algorithm {EAGLE,EAGLE3,NEXTN}
          --trust-remote-code   Whether or not to allow for custom models.
          --lora-paths [LORA_PATHS ...]
    """
    _, _, body = text.partition("options:") if "options:" in text else text.partition("optional arguments:")
    flags: dict[str, Flag] = {}
    for line in body.splitlines():
        found = _OPTION_LINE.match(line)
        if not found:
            continue
        options = _OPTION.findall(found["options"])
        # newer Pythons print the metavar once, behind the last name
        metavar = next((value for _, value in reversed(options) if value), "")
        for name, _ in options:
            if name.startswith("--") and name != "--help":
                flags[name] = Flag(name, _takes(metavar), _braces(metavar))
    if not flags:
        raise CannotTell("the help text names no flag")
    return flags


def _takes(metavar: str) -> str:
    if not metavar:
        return ""
    return "many" if "..." in metavar or metavar.startswith("[") else "one"


def _braces(metavar: str) -> tuple[str, ...]:
    found = re.search(r"\{([^}]*)\}", metavar)
    return tuple(found[1].split(",")) if found else ()


# ----------------------------------------------------------------------------------------------- holding against it


def server_words(argv: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Where the server's own words begin in a whole command line, and those words: behind ``-m module``, or ``serve``.

    >>> server_words(["/v/bin/python", "-u", "-m", "sglang.launch_server", "--tp", "4"])
    (4, ['--tp', '4'])
    """
    for n, word in enumerate(argv):
        if word == "-m" and n + 1 < len(argv):
            return n + 2, list(argv[n + 2 :])
        if n and word == "serve" and argv[n - 1].rpartition("/")[2] == "sglang":
            return n + 1, list(argv[n + 1 :])
        if word.endswith("launch_server.py"):
            return n + 1, list(argv[n + 1 :])
    return 0, list(argv)


def resolve_argv(words: Sequence[str], flags: FlagSet) -> tuple[tuple[Resolved, ...], tuple[FlagProblem, ...]]:
    """The flags of a server's words with their full names, and what is wrong with them."""
    found: list[Resolved] = []
    problems: list[FlagProblem] = []
    at = 0
    while at < len(words):
        word = words[at]
        if not _is_flag(word):
            problems.append(FlagProblem("unknown", word[:40], "a word that belongs to no flag: the server refuses it", True))
            at += 1
            continue
        spelt, equals, value = word.partition("=")
        names = flags.resolve(spelt)
        name = names[0] if len(names) == 1 else spelt
        values = (value,) if equals else _values(words, at + 1, flags.flags.get(name))
        found.append(Resolved(name, spelt, values, at))
        problems += _judge(spelt, names, values, flags)
        at += 1 + (0 if equals else len(values))
    counts: dict[str, int] = {}
    for one in found:
        counts[one.name] = counts.get(one.name, 0) + 1
    problems += [
        FlagProblem("repeated", name, f"given {n} times; the last one counts", False) for name, n in counts.items() if n > 1
    ]
    return tuple(found), tuple(problems)


def check_argv(argv: Sequence[str], version: str, help_text: str | None = None) -> tuple[FlagProblem, ...]:
    """Hold a server's command line (whole, or its own words) against an installation. Raises CannotTell without any knowledge."""
    flags = flags_of(version, help_text)
    _, words = server_words(argv)
    _, problems = resolve_argv(words, flags)
    if not flags.exact:
        text = f"the release {version} is not in the table; {flags.by} was used, so what it says of flags is not sure"
        problems = (FlagProblem("unsure", "", text, False), *problems)
    return problems


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2 and " " not in word.split("=", 1)[0]


def _values(words: Sequence[str], start: int, flag: Flag | None) -> tuple[str, ...]:
    """The words after a flag that are its values, as far as its kind says; without one, all up to the next flag."""
    end = start
    limit = {"": 0, "one": 1}.get(flag.takes, len(words)) if flag is not None and flag.takes is not None else len(words)
    while end < len(words) and not _is_flag(words[end]) and end - start < limit:
        end += 1
    return tuple(words[start:end])


def _judge(spelt: str, names: Sequence[str], values: Sequence[str], flags: FlagSet) -> list[FlagProblem]:
    if not names:
        return [_unknown(spelt, flags)]
    if len(names) > 1:
        # WHY the rename first: a flag that became several longer ones is "ambiguous" to argparse, and renamed to a person.
        renamed = _renamed(spelt, flags)
        text = f"ambiguous in {flags.version}: it could match {', '.join(names[:6])}" + (f"; {renamed[0]}" if renamed else "")
        return [FlagProblem("ambiguous", spelt, text, True, renamed[1] if renamed else tuple(names))]
    name = names[0]
    out = []
    if name != spelt:
        out.append(FlagProblem("abbreviated", spelt, f"taken for {name}", False, (name,)))
    flag = flags.flags[name]
    if flag.deprecated:
        renamed = _renamed(name, flags)
        words = renamed[0] if renamed else "it will go"
        out.append(
            FlagProblem("deprecated", name, f"deprecated in {flags.version}: {words}", False, renamed[1] if renamed else ())
        )
    return out + _judge_values(name, flag, values, flags)


def _judge_values(name: str, flag: Flag, values: Sequence[str], flags: FlagSet) -> list[FlagProblem]:
    if flag.takes == "one" and not values:
        return [FlagProblem("missing-value", name, "it needs a value", True)]
    if not values:
        kind = "missing-value" if name in _WHOLE | _FRACTION or flag.choices else ""
        return [FlagProblem(kind, name, "it needs a value", True)] if kind else []
    value = values[-1]
    if flag.choices and value not in flag.choices:
        near = difflib.get_close_matches(value, flag.choices, 3, 0.3) or list(flag.choices)
        return [FlagProblem("value", name, f"{value!r} is none of {', '.join(flag.choices)}", True, tuple(near))]
    if name == "--speculative-algorithm" and not flag.choices and value.upper() not in _ALGORITHMS:
        text = f"{value!r} is no algorithm that {flags.version} brings ({', '.join(sorted(_ALGORITHMS))})"
        return [FlagProblem("value", name, text, True, ("NEXTN", "EAGLE"))]
    if name in _WHOLE and not re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", value):
        return [FlagProblem("value", name, f"{value!r} is no whole number", True)]
    if name in _FRACTION and not _is_number(value):
        return [FlagProblem("value", name, f"{value!r} is no number", True)]
    return []


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _unknown(spelt: str, flags: FlagSet) -> FlagProblem:
    renamed = _renamed(spelt, flags)
    if renamed:
        return FlagProblem("renamed", spelt, f"{flags.version} does not know it; {renamed[0]}", True, renamed[1])
    versions, table = _table()
    if spelt in table:
        first, last = versions[table[spelt][0][0]], versions[table[spelt][-1][1]]
        try:
            now = _key(flags.version)
        except CannotTell:
            now = _key(last)
        if now < _key(first):
            kind, when = "not-yet", f"it came with {first}"
        elif now > _key(last):
            kind, when = "removed", f"{last} was the last release to take it"
        else:
            kind, when = "unknown", f"{flags.by} does not name it, although releases {first} to {last} do"
        near = _nearest(spelt, flags)
        return FlagProblem(kind, spelt, f"{flags.version} does not know it: {when}", True, near)
    near = _nearest(spelt, flags)
    text = "no release of SGLang has it" + (f"; the nearest are {', '.join(near)}" if near else "")
    return FlagProblem("unknown", spelt, text, True, near)


def _renamed(spelt: str, flags: FlagSet) -> tuple[str, tuple[str, ...]] | None:
    for old, since, new in _RENAMED:
        if spelt == old and (new in flags.flags or not new.startswith("--")):
            return f"since {since} it is {new}", (new,)
        if spelt == new and old in flags.flags and new not in flags.flags:
            return f"before {since} it is {old}", (old,)
    return None


def _nearest(spelt: str, flags: FlagSet) -> tuple[str, ...]:
    """What may have been meant: where a mistake is known, what it stands for; else flags of similar letters."""
    meant = [name for name in _MEANT.get(spelt, ()) if name in flags.flags]
    close = difflib.get_close_matches(spelt, list(flags.flags), 3, 0.7)
    return tuple(meant or close)


# ------------------------------------------------------------------------------------------------- changing it


@dataclass(frozen=True)
class Rewording:
    """What becomes of the words of a command: index to its new words (none: it goes), and what is added at the end."""

    words: Mapping[int, tuple[str, ...]]
    added: tuple[tuple[str, ...], ...]


def _same(name: str) -> str:
    return _SAME.get(name, name)


def reword(words: Sequence[str], wanted: Mapping[str, str | None], known: FlagSet) -> Rewording:
    start, server = server_words(words)
    resolved, _ = resolve_argv(server, known)
    changed: dict[int, tuple[str, ...]] = {}
    added: list[tuple[str, ...]] = []
    for name, value in wanted.items():
        given = [one for one in resolved if _same(one.name) == _same(name)]
        if not given:
            added.append((name,) if value is None else (name, value))
            continue
        for repeated in given[:-1]:
            changed |= {start + repeated.at + n: () for n in range(_length(repeated.spelt, server, repeated.at, repeated.values))}
        changed |= _replaced(given[-1], start, server, name, value)
    return Rewording(changed, tuple(added))


def _replaced(given: Resolved, start: int, server: Sequence[str], name: str, value: str | None) -> dict[int, tuple[str, ...]]:
    """The words of a flag that is there, so that it is ``name`` with ``value``; none when it is that already."""
    values = () if value is None else (value,)
    if (given.name, given.values) == (name, values):
        return {}
    at = start + given.at
    if "=" in server[given.at] and value is not None:
        return {at: (f"{name}={value}",)}
    if len(given.values) == 1 and value is not None and "=" not in server[given.at]:
        renamed: dict[int, tuple[str, ...]] = {at: (name,)} if given.spelt != name else {}
        return renamed | ({at + 1: (value,)} if given.values != values else {})
    gone: dict[int, tuple[str, ...]] = {at + n: () for n in range(_length(given.spelt, server, given.at, given.values))}
    return gone | {at: (name, *values)}


def _length(spelt: str, words: Sequence[str], at: int, values: Sequence[str]) -> int:
    """How many words a flag with its values takes."""
    return 1 if words[at] != spelt else 1 + len(values)


def with_flags(argv: Sequence[str], wanted: Mapping[str, str | None], known: FlagSet) -> tuple[str, ...]:
    """A command line in which every wanted flag stands, once, with its value (None: a switch); everything else as it was.

    Where a flag changes, its abbreviation or older name gives way to its full name.
    """
    changes = reword(argv, wanted, known)
    kept = [word for n, old in enumerate(argv) for word in changes.words.get(n, (old,))]
    return (*kept, *(word for group in changes.added for word in group))

"""Command lines and environments, compared as the program that gets them would read them.

``--flag value`` and ``--flag=value`` say the same; of a flag that is given twice, the last one counts (argparse); numbers
and JSON compare by value. A value that the record shows as ``[redacted:…]`` is equal to any other of the same name.
Secrets are never worded: what :func:`proofbook.redact.secret_name` recognises is shown as "(hidden)".
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from proofbook.redact import secret_name

__all__ = ["Changed", "Flag", "changes", "environment_changes", "hold_arguments", "hold_environment", "is_title", "parse"]

ABSENT = "absent"
HIDDEN = "(hidden)"

_FLAG = re.compile(r"--[A-Za-z][^=\s]*|-[A-Za-z][A-Za-z0-9]*")

#: Spellings of one option, by its usual name: SGLang's server and Python's own `-m`.
_ALIASES = {
    "--model": "--model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--speculative-draft-model": "--speculative-draft-model-path",
}

#: What systemd sets anew at every start, and the shell counts: it says nothing about the configuration.
_PER_START = {
    "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "MAINPID",
    "WATCHDOG_PID", "LISTEN_PID", "LISTEN_PIDFDID", "MANAGERPID", "MANAGERPIDFDID", "SHLVL", "_", "PWD", "OLDPWD",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values: ``Flag("--tp-size", ("4",))``. ``spelt`` is how it stood there."""

    name: str
    values: tuple[str, ...]
    spelt: str


@dataclass(frozen=True, slots=True)
class Changed:
    """One difference. ``before`` and ``after`` are fit to be shown: secrets are hidden."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Held:
    """An intention held against what runs. ``assumed`` are things that hold only if an abbreviation means what it seems to."""

    unmet: tuple[Changed, ...]
    assumed: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()  # names whose value could not be compared, because a record had redacted it


def parse(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[Flag, ...]]:
    """A command line as its words (program, script, other positional ones) and its flags in order.

    Words after a flag are taken as its values: what is an option's value and what a positional word only the program
    knows, and for comparing two command lines of one program it makes no difference.
    """
    words: list[str] = []
    flags: list[Flag] = []
    taking = False
    for at, token in enumerate(argv):
        if token == "--":
            words += argv[at + 1 :]
            break
        if _FLAG.fullmatch(token.split("=", 1)[0]) and (token.startswith("--") or "=" not in token):
            spelt, equals, value = token.partition("=")
            flags.append(Flag(_ALIASES.get(spelt, spelt), (value,) if equals else (), spelt))
            taking = not equals
        elif taking:
            last = flags[-1]
            flags[-1] = Flag(last.name, (*last.values, token), last.spelt)
        else:
            words.append(token)
    return tuple(words), tuple(flags)


def is_title(argv: Sequence[str]) -> bool:
    """Whether the process has overwritten its command line with a title (``sglang::scheduler_TP0``): no evidence of its flags."""
    return len(argv) == 1 and ("::" in argv[0] or ": " in argv[0])


def redacted(value: str) -> bool:
    return "[redacted:" in value


def same_value(a: str, b: str) -> bool:
    """Equal as text, as a number, as JSON, or not comparable because it was redacted."""
    if a == b or redacted(a) or redacted(b):
        return True
    try:
        return bool(json.loads(a) == json.loads(b)) if a[:1] in "{[" and b[:1] in "{[" else float(a) == float(b)
    except ValueError:
        return False


def _same_values(a: Sequence[str], b: Sequence[str]) -> bool:
    return len(a) == len(b) and all(map(same_value, a, b))


def _shown(name: str, values: Sequence[str]) -> str:
    if values and secret_name(name):
        return HIDDEN
    return " ".join(v if len(v) <= 120 else v[:117] + "…" for v in values) if values else "given"


def hold_arguments(wanted: Sequence[str], running: Sequence[str], known_flags: Collection[str] = ()) -> Held:
    """Does the running command line carry every wanted flag, with these values, and every wanted word?

    ``known_flags``: every long option of the program, when it is known; only then can an abbreviation be resolved for sure.
    """
    wanted_words, wanted_flags = parse(wanted)
    words, flags = parse(running)
    unmet = [Changed(f"word {w!r}", w, ABSENT) for w in wanted_words if w not in running and w not in words]
    assumed: list[str] = []
    hidden: list[str] = []
    for want in wanted_flags:
        given = [f for f in flags if f.name == want.name]
        if not given:
            given, how_sure = _abbreviated(want, flags, known_flags)
            if given and how_sure and (not want.values or _same_values(want.values, given[-1].values)):
                assumed.append(how_sure)
        if not given:
            unmet.append(Changed(want.name, _shown(want.name, want.values), ABSENT))
        elif want.values and not _same_values(want.values, given[-1].values):
            unmet.append(
                Changed(want.name, _shown(want.name, want.values), _shown(want.name, given[-1].values) + _repeated(given))
            )
        elif want.values and any(map(redacted, [*want.values, *given[-1].values])):
            hidden.append(want.name)
    return Held(tuple(unmet), tuple(assumed), tuple(hidden))


def _repeated(given: Sequence[Flag]) -> str:
    return f" (given {len(given)} times; the last one counts)" if len(given) > 1 else ""


def _abbreviated(want: Flag, flags: Sequence[Flag], known_flags: Collection[str]) -> tuple[list[Flag], str]:
    """Flags that argparse may take for ``want`` (it accepts unambiguous prefixes), and what that rests on."""
    for flag in reversed(flags):
        short, long = sorted((flag.spelt, want.spelt), key=len)
        if not (short.startswith("--") and len(short) > 3 and long.startswith(short)):
            continue
        if known_flags:
            # WHY: argparse takes an exact name before a prefix, and refuses a prefix of several names.
            full = [k for k in known_flags if k.startswith(short)]
            if short not in known_flags and full == [long]:
                return [flag], ""
            continue
        return [flag], f"{short} is taken for {long}"
    return [], ""


def hold_environment(wanted: Mapping[str, str], running: Mapping[str, str]) -> Held:
    """Does the process have every wanted variable with this value?"""
    unmet = [
        Changed(name, _shown(name, [value]), _shown(name, [running[name]]) if name in running else ABSENT)
        for name, value in sorted(wanted.items())
        if name not in running or not (value == running[name] or redacted(value) or redacted(running[name]))
    ]
    hidden = [n for n, v in sorted(wanted.items()) if n in running and v != running[n] and (redacted(v) or redacted(running[n]))]
    return Held(tuple(unmet), (), tuple(hidden))


def changes(before: Sequence[str], after: Sequence[str]) -> list[Changed]:
    """Every flag and word in which two command lines of one program differ."""
    (words_b, flags_b), (words_a, flags_a) = parse(before), parse(after)
    out = []
    if not _same_values(words_b, words_a):
        out.append(Changed("program", " ".join(words_b) or ABSENT, " ".join(words_a) or ABSENT))
    for name in dict.fromkeys(f.name for f in (*flags_b, *flags_a)):
        b, a = ([f.values for f in flags if f.name == name] for flags in (flags_b, flags_a))
        if len(b) != len(a) or not all(map(_same_values, b, a)):
            out.append(Changed(name, _occurrences(name, b), _occurrences(name, a)))
    return out


def _occurrences(name: str, values: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(_shown(name, v) for v in values) if values else ABSENT


def environment_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Changed]:
    """Every variable in which two environments differ, but for those that are new at every start."""
    out = []
    for name in sorted({*before, *after} - _PER_START):
        b, a = before.get(name), after.get(name)
        if b is None or a is None or not (b == a or redacted(b) or redacted(a)):
            out.append(Changed(name, *(ABSENT if v is None else _shown(name, [v]) for v in (b, a))))
    return out

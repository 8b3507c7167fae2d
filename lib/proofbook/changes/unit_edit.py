"""Edits of a unit's text: flags of its command and variables of its environment, as a drop-in or in the file itself.

Both are made word by word on the text as it stands, so that quotes, specifiers and variables of other words stay as they
were written, and read again afterwards by the same rules by which systemd reads them.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proofbook.checks.mtp.speculation import Speculation
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Result
from proofbook.probes.sglang import Version
from proofbook.probes.sglang_flags import FlagSet, Rewording, flags_of, reword, with_flags
from proofbook.probes.unit_files import UnitFile, UnitFiles, UnitFileSet
from proofbook.probes.unit_text import Assignment, CommandLine, EffectiveUnit, effective_unit, quote

__all__ = ["DROP_IN", "Style", "UnitEdit", "drop_in_paths", "edited", "effective_of"]

Style = Literal["drop-in", "edit"]

#: The drop-in that is written; where a later one is there, it is named to come after that.
DROP_IN, LAST_DROP_IN = "90-proofbook-mtp.conf", "zz-proofbook-mtp.conf"
#: Where an administrator's units lie. Other folders belong to packages, or to the boot.
_OURS = "/etc/systemd/system"
_HEAD = (
    "# Speculative decoding, written by proofbook. To take it back: remove this file, run `systemctl daemon-reload`,\n"
    "# and restart the unit.\n"
)
# ------------------------------------------------------------------------------------------------------ the text


def _source(unit: EffectiveUnit, command: CommandLine) -> tuple[Assignment, str]:
    """The assignment that a command comes from, and the text of its file."""
    text = next(t for t in unit.texts if t.file == command.file)
    assignment = next(a for a in text.of("Service", "ExecStart") if a.line == command.line)
    return assignment, text.text


def _drop_in_text(unit: EffectiveUnit, changes: Rewording, variables: Mapping[str, str]) -> str:
    """A drop-in with the whole command anew: the words that stay as they are written now."""
    command = unit.command
    assignment, _ = _source(unit, command)
    written: list[str] = []
    for n, word in enumerate(command.raw):
        new = changes.words.get(n)
        written += [_plain(assignment.value[word.start : word.end])] if new is None else [quote(w) for w in new]
    written += [quote(word) for group in changes.added for word in group]
    lines = _lines(written)
    environment = "".join(f"Environment={_assignment(name, value)}\n" for name, value in variables.items())
    return f"{_HEAD}[Service]\n{environment}ExecStart=\nExecStart={lines}\n"


def _plain(source: str) -> str:
    """A word's source on one line: a continuation inside quotes has become blanks in the value already."""
    return source.strip()


def _lines(words: Sequence[str]) -> str:
    """The command over several lines, a flag with its values on each."""
    groups: list[list[str]] = [[]]
    for n, word in enumerate(words):
        if word.startswith("--") and n and groups[-1]:
            groups.append([])
        groups[-1].append(word)
    return " \\\n    ".join(" ".join(group) for group in groups)


def _assignment(name: str, value: str) -> str:
    """``NAME=value`` as a word of ``Environment=``: there ``%`` is special and ``$`` is not."""
    return quote(f"{name}={value}").replace("$$", "$")


def _edited_text(unit: EffectiveUnit, changes: Rewording, variables: Mapping[str, str]) -> str:
    """The file that holds the command, changed where it stands."""
    command = unit.command
    assignment, text = _source(unit, command)
    several = assignment.last_line > assignment.line
    splices: list[tuple[int, int, str]] = []
    for n, new in changes.words.items():
        word = command.raw[n]
        start, end = assignment.at[word.start], assignment.at[word.end - 1] + 1
        if new:
            splices.append((start, end, " ".join(quote(w) for w in new)))
        else:
            splices.append((*_with_blanks(text, start, end), ""))
    last = next(word for n, word in reversed(list(enumerate(command.raw))) if changes.words.get(n) != ())
    end = assignment.at[last.end - 1] + 1
    glue = " \\\n" + _indent(text, end) if several else " "
    more = "".join(glue + " ".join(quote(w) for w in group) for group in changes.added)
    if more:
        splices.append((end, end, more))
    if variables:
        place = _environment_place(unit, assignment)
        splices.append((place, place, "".join(f"Environment={_assignment(n, v)}\n" for n, v in variables.items())))
    for start, stop, new_text in sorted(splices, key=lambda s: (s[0], s[1]), reverse=True):
        text = text[:start] + new_text + text[stop:]
    return text


def _with_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    """A word and the blanks before it; the whole line where nothing else stands on it but the sign of its continuation."""
    line = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    if line_end >= 0 and not text[line:start].strip() and text[end:line_end].strip() == "\\":
        return line, line_end + 1
    while start > line and text[start - 1] in " \t":
        start -= 1
    return start, end


def _indent(text: str, place: int) -> str:
    """The indentation of the line at ``place``, of a continued line where this is the first one."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    found = re.match(r"[ \t]+", line)
    return found[0] if found else "    "


def _environment_place(unit: EffectiveUnit, command: Assignment) -> int:
    """Where a line of environment goes: behind the last one of the file that is before the command, else before the command."""
    file = next(t for t in unit.texts if any(a is command for a in t.assignments))
    others = [a for a in file.of("Service", "Environment") if a.last_line < command.line]
    line = others[-1].last_line + 1 if others else command.line
    return sum(len(part) + 1 for part in file.text.split("\n")[: line - 1])


# ------------------------------------------------------------------------------------------------------ the edit


@dataclass(frozen=True)
class UnitEdit:
    """The speculation that a unit should have, and how it gets there: a question to
    :class:`proofbook.probes.unit_files.CandidateVerified` and the heart of a plan alike.
    """

    unit: str
    container: ContainerSpec | None
    speculation: Speculation
    style: Style

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[UnitFileSet, Mapping[str, bytes]]]:
        now = yield from UnitFiles(self.unit, self.container, drop_in_paths(self.unit)).ask()
        version = yield from Version(self.unit, self.container).ask()
        return now, self.files(now, version.version)

    def files(self, now: UnitFileSet, version: str) -> dict[str, bytes]:
        """Path to its new bytes; empty when everything is as wanted. Raises CannotTell that says why it cannot be made."""
        known = flags_of(version)
        wanted = self.speculation.flags(known)
        return edited(now, wanted, self.speculation.variables(version), self.style, known)


def drop_in_paths(unit: str) -> tuple[str, ...]:
    """Where a drop-in of ours may lie."""
    return tuple(f"{_OURS}/{unit}.d/{name}" for name in (DROP_IN, LAST_DROP_IN))


def edited(
    now: UnitFileSet, flags: Mapping[str, str | None], variables: Mapping[str, str], style: Style, known: FlagSet
) -> dict[str, bytes]:
    """The files that change, with their new bytes; see :meth:`UnitEdit.files`. What comes out was read again and means what
    was wanted, word by word.
    """
    unit = now.effective
    if unit.harm:
        raise CannotTell(f"part of the unit's text is not in effect, mend that first: {'; '.join(map(str, unit.harm[:3]))}")
    command = unit.command
    if command.unresolved:
        raise CannotTell(
            f"its command uses {', '.join(command.unresolved)}, which only systemd can resolve: it cannot be compared"
        )
    environment = unit.environment_with(now.environment)
    lacking = {name: value for name, value in variables.items() if environment.get(name) != value}
    changes = reword(command.words, flags, known)
    if not (changes.words or changes.added or lacking):
        return {}
    target, text = _target(now, unit, changes, lacking, style)
    files = {target: text.encode("utf-8", "surrogateescape")}
    _read_again(now, files, command, flags, variables, known)
    return files


def _target(
    now: UnitFileSet, unit: EffectiveUnit, changes: Rewording, variables: Mapping[str, str], style: Style
) -> tuple[str, str]:
    """Which file is written, and its text."""
    holder = next(f for f in now.files if f.path == unit.command.file)
    own = holder.path in drop_in_paths(now.unit)
    if style == "edit" or own:
        _may_be_edited(holder)
        return holder.path, _edited_text(unit, changes, variables)
    names = [file.path.rpartition("/")[2] for file in now.drop_ins]
    name = DROP_IN if all(other < DROP_IN for other in names) else LAST_DROP_IN
    path = f"{_OURS}/{now.unit}.d/{name}"
    if now.also.get(path) is not None:
        raise CannotTell(f"{path} is there, and the command does not come from it: look what it is")
    if path in now.unreadable:
        raise CannotTell(f"{path} cannot be read: {now.unreadable[path]}")
    return path, _drop_in_text(unit, changes, variables)


def _may_be_edited(file: UnitFile) -> None:
    if file.target:
        raise CannotTell(f"{file.path} is a link to {file.target}: a drop-in leaves it alone, editing would not")
    if not file.path.startswith(f"{_OURS}/"):
        raise CannotTell(f"{file.path} belongs to a package or to the boot: it would be overwritten; use a drop-in")


def _read_again(
    now: UnitFileSet,
    files: Mapping[str, bytes],
    before: CommandLine,
    flags: Mapping[str, str | None],
    variables: Mapping[str, str],
    known: FlagSet,
) -> None:
    """Raise CannotTell unless the unit, with these files, starts exactly what is wanted and has every variable."""
    after = effective_of(now, files)
    if after.harm:
        raise CannotTell(f"what would be written is not all in effect: {'; '.join(map(str, after.harm[:3]))}")
    environment = after.environment_with(now.environment)
    got = after.command.words_with(environment)
    words = with_flags(before.words_with(environment), flags, known)
    if got != words:
        at = next((n for n, (a, b) in enumerate(zip(got, words, strict=False)) if a != b), min(len(got), len(words)))
        raise CannotTell(
            f"read again, the command is not what was wanted: word {at + 1} differs (does a later drop-in set it, or does a "
            f"variable hold flags?)"
        )
    for name, value in variables.items():
        if environment.get(name) != value:
            files_too = any(name in (parse or "") for parse in now.environment.values())
            where = "an environment file sets it, and wins over the unit" if files_too else "a later line unsets or overrides it"
            raise CannotTell(f"{name} would not be {value!r} for the process: {where}")


def effective_of(now: UnitFileSet, files: Mapping[str, bytes]) -> EffectiveUnit:
    """The unit as it would be with ``files`` (path to bytes; new drop-ins come in their place)."""
    drop_ins = {f.path: f.text for f in now.drop_ins}
    drop_ins |= {p: d.decode("utf-8", "surrogateescape") for p, d in files.items() if p != now.main.path}
    main = files[now.main.path].decode("utf-8", "surrogateescape") if now.main.path in files else now.main.text
    # WHY by name: systemd sorts the drop-ins of all folders by their file name alone.
    ordered = sorted(drop_ins.items(), key=lambda item: item[0].rpartition("/")[2])
    return effective_unit(now.unit, [(now.main.path, main), *ordered])

"""The text of systemd units, read as systemd itself reads it: sections, continuations, words, specifiers, variables.

WHY our own reader: what a unit *says* and what systemd *makes of it* differ in silence. A blank after the backslash of a
continuation ends the command there, and the flags below it are ignored with a warning that nobody sees; a comment line
inside a continuation takes out one flag without a word; a ``#`` behind a flag is no comment but an argument; a second
``ExecStart=`` makes the unit refuse to load. Only a word by word reading shows it before the service is stopped.

Rules: systemd.syntax(7), systemd.service(5) "Command lines", and what systemd 252 and 257 were seen to do.

>>> unit = effective_unit("s.service", [("/etc/s.service", "[Service]\\nExecStart=/bin/serve --port ${PORT} \\\\\\n  --tp 2\\n")])
>>> unit.command.words_with({"PORT": "30000"})
('/bin/serve', '--port', '30000', '--tp', '2')
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from proofbook.errors import CannotTell

__all__ = [
    "Assignment",
    "CommandLine",
    "EffectiveUnit",
    "Trouble",
    "UnitText",
    "Word",
    "effective_unit",
    "parse_environment_file",
    "parse_unit",
    "quote",
    "split_words",
]

_BLANK = " \t\n\r"
_SERVICE = "Service"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something in a unit's text that does not mean what it looks like. ``harm``: part of the text is not in effect."""

    file: str
    line: int
    text: str
    harm: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One ``Key=value``. ``value`` is joined over its continuation; ``at[i]`` is where its i-th character stands in the file.

    ``line`` and ``last_line`` count from 1; comment lines inside the continuation lie between them and are not in ``value``.
    """

    section: str
    key: str
    value: str
    line: int
    last_line: int
    at: tuple[int, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class UnitText:
    """A unit file as systemd reads it."""

    file: str
    text: str = field(repr=False)
    assignments: tuple[Assignment, ...]
    troubles: tuple[Trouble, ...] = ()

    def of(self, section: str, key: str) -> tuple[Assignment, ...]:
        return tuple(a for a in self.assignments if (a.section, a.key) == (section, key))


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command line. ``text`` is without its quotes and escapes, specifiers and variables still in it.

    ``start`` and ``end`` are where it stands in the value it was read from (``end`` is one past it).
    """

    text: str
    start: int
    end: int


# ------------------------------------------------------------------------------------------------- the file


def parse_unit(text: str, file: str = "") -> UnitText:
    """A unit file as its assignments in order, and what in it has no effect. Never raises: systemd does not either."""
    reader = _Reader(file)
    offset = 0
    for number, line in enumerate(text.split("\n"), start=1):
        reader.line(number, line, offset)
        offset += len(line) + 1
    reader.end()
    return UnitText(file, text, tuple(reader.assignments), tuple(reader.troubles))


class _Reader:
    """Lines in, assignments out."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.section = ""
        self.assignments: list[Assignment] = []
        self.troubles: list[Trouble] = []
        self._joined: list[tuple[str, int]] = []  # characters of the logical line, and where they stand
        self._first = self._last = 0

    def line(self, number: int, line: str, offset: int) -> None:
        bare = line.strip(_BLANK)
        if bare[:1] in ("#", ";"):
            if self._joined:
                self._trouble(number, f"a comment inside a continued line: {_short(bare)!r} is not in effect", harm=False)
            return
        if not self._joined:
            self._first = number
        elif not bare:
            self._trouble(number, "an empty line ends the continuation of the line before", harm=False)
        self._last = number
        self._joined += [(character, offset + n) for n, character in enumerate(line)]
        if _ends_escaped(line):
            self._joined[-1] = (" ", self._joined[-1][1])
            return
        if line != line.rstrip(_BLANK) and _ends_escaped(line.rstrip(_BLANK)):
            self._trouble(number, "a blank after the backslash: the line is not continued, and what follows is ignored")
        self._take()

    def end(self) -> None:
        if self._joined:
            self._take()

    def _take(self) -> None:
        joined, self._joined = _stripped(self._joined), []
        text = "".join(character for character, _ in joined)
        if not text:
            return
        if text.startswith("["):
            if not text.endswith("]"):
                self._trouble(self._first, f"not a section, so systemd refuses the file: {_short(text)!r}")
            else:
                self.section = text[1:-1]
            return
        key, equals, _ = text.partition("=")
        if not equals:
            self._trouble(self._first, f"ignored, it has no '=': {_short(text)!r}")
            return
        if not self.section:
            self._trouble(self._first, f"ignored, it stands before any section: {_short(text)!r}")
            return
        key = key.strip(_BLANK)
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key):
            self._trouble(self._first, f"ignored, {_short(key)!r} is no setting of systemd")
            return
        value = _stripped(joined[text.index("=") + 1 :])
        self.assignments.append(
            Assignment(
                self.section,
                key,
                "".join(character for character, _ in value),
                self._first,
                self._last,
                tuple(place for _, place in value),
            )
        )

    def _trouble(self, line: int, text: str, *, harm: bool = True) -> None:
        self.troubles.append(Trouble(self.file, line, text, harm))


def _ends_escaped(line: str) -> bool:
    """Whether the line ends in a backslash that is not itself escaped."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _stripped(joined: list[tuple[str, int]]) -> list[tuple[str, int]]:
    start, end = 0, len(joined)
    while start < end and joined[start][0] in _BLANK:
        start += 1
    while end > start and joined[end - 1][0] in _BLANK:
        end -= 1
    return joined[start:end]


def _short(text: str) -> str:
    # WHY no value: a line of a unit may hold a secret behind its '='; what is ignored is named, not quoted.
    name, equals, _ = text.partition("=")
    return (name[:60] + ("=…" if equals else "")).strip()


# ------------------------------------------------------------------------------------------------- the words

_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'", "s": " ",
}  # fmt: skip
_CODED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})")


def split_words(value: str) -> tuple[tuple[Word, ...], tuple[str, ...]]:
    """The words of a value, and what was odd about them. Quotes may begin and end anywhere; C escapes count in both kinds.

    An escape that systemd does not know is kept as it stands, as systemd does (with a warning). Raises CannotTell for
    quotes that are not closed: systemd refuses the whole assignment then.
    """
    words: list[Word] = []
    odd: list[str] = []
    place, length = 0, len(value)
    while True:
        while place < length and value[place] in _BLANK:
            place += 1
        if place >= length:
            return tuple(words), tuple(odd)
        start = place
        text, place = _word(value, place, odd)
        words.append(Word(text, start, place))


def _word(value: str, place: int, odd: list[str]) -> tuple[str, int]:
    out: list[str] = []
    quote = ""
    while place < len(value):
        character = value[place]
        if character == "\\":
            piece, place = _escape(value, place, odd)
            out.append(piece)
            continue
        if quote:
            if character == quote:
                quote = ""
            else:
                out.append(character)
        elif character in "\"'":
            quote = character
        elif character in _BLANK:
            break
        else:
            out.append(character)
        place += 1
    if quote:
        raise CannotTell("a quote is not closed, so systemd refuses the whole line")
    return "".join(out), place


def _escape(value: str, place: int, odd: list[str]) -> tuple[str, int]:
    """What the escape at ``place`` stands for, and where it ends."""
    rest = value[place + 1 : place + 10]
    if rest[:1] in _ESCAPES and rest:
        return _ESCAPES[rest[0]], place + 2
    coded = _CODED.match(rest)
    if coded:
        digits, base = next((d, b) for d, b in zip(coded.groups(), (16, 16, 16, 8), strict=True) if d is not None)
        code = int(digits, base)
        if 0 < code < 0x110000 and not (base == 8 and code > 0o377):
            return chr(code), place + 1 + coded.end()
    odd.append("a backslash at the end" if not rest else f"an escape that systemd does not know: '\\{rest[0]}'")
    # WHY the character after it is kept too: systemd copies both and goes on behind them, so a quote there opens nothing.
    return value[place : place + 2], place + 2 if rest else place + 1


def quote(word: str) -> str:
    """A word as it must be written into a command line so that the process gets exactly ``word``: no specifier, no variable.

    >>> print(quote("--tp"), quote('{"a": 1}'), quote("100%"), quote("$HOME"), quote(""))
    --tp "{\\"a\\": 1}" 100%% $$HOME ""
    """
    word = word.replace("%", "%%").replace("$", "$$")
    if word and not re.search(r"[\s\"'\\]|[\x00-\x1f]", word) and word != ";":
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    escaped = re.sub(r"[\x00-\x1f]", lambda m: f"\\x{ord(m[0]):02x}", escaped)
    return f'"{escaped}"'


# ------------------------------------------------------------------------------------------- commands, variables


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One command of ``ExecStart=``: its words as written (specifiers resolved where they can be, variables not yet).

    ``expands`` is False behind the prefix ``:``. ``unresolved``: specifiers that only the machine can resolve (``%H``).
    """

    file: str
    line: int
    prefixes: str
    words: tuple[str, ...]
    raw: tuple[Word, ...]
    unresolved: tuple[str, ...] = ()

    @property
    def expands(self) -> bool:
        return ":" not in self.prefixes

    def words_with(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """The argv of the process: variables replaced as systemd does it. The first word is never replaced."""
        if not self.expands or not self.words:
            return self.words
        out = [self.words[0]]
        for word in self.words[1:]:
            out += _expanded(word, environment)
        return tuple(out[1:]) if "@" in self.prefixes else tuple(out)

    def variables(self) -> frozenset[str]:
        """The names of the variables that it uses."""
        if not self.expands:
            return frozenset()
        whole = {w[1:] for w in self.words[1:] if re.fullmatch(r"\$[A-Za-z_]\w*", w)}
        return frozenset(whole | {m[1] for w in self.words[1:] for m in _BRACED.finditer(w)})


_BRACED = re.compile(r"\$\{([^}:]*)\}")


def _expanded(word: str, environment: Mapping[str, str]) -> list[str]:
    # WHY a word of its own: `$NAME` is split at its blanks into none, one or many arguments; `${NAME}` stays one argument.
    if word.startswith("$") and word[1:2] not in ("{", "$"):
        value = environment.get(word[1:], "")
        try:
            return [w.text for w in split_words(value)[0]]
        except CannotTell:
            return value.split()
    out, place = "", 0
    for found in re.finditer(r"\$\$|\$\{([^}:]*)\}", word):
        out += word[place : found.start()] + ("$" if found[0] == "$$" else environment.get(found[1], ""))
        place = found.end()
    return [out + word[place:]]


@dataclass(frozen=True)
class EffectiveUnit:
    """A unit with its drop-ins as one: what would be started, and with which environment.

    ``environment`` is of ``Environment=`` alone; :meth:`environment_with` adds the files, which win over it.
    """

    unit: str
    commands: tuple[CommandLine, ...]
    environment: Mapping[str, str]
    environment_files: tuple[tuple[str, bool], ...]  # path, may it be missing
    unset: tuple[str, ...]
    type: str
    texts: tuple[UnitText, ...]
    troubles: tuple[Trouble, ...]

    @property
    def harm(self) -> tuple[Trouble, ...]:
        """Troubles by which part of the text is not in effect, or the unit is refused."""
        return tuple(t for t in self.troubles if t.harm)

    @property
    def command(self) -> CommandLine:
        """The one command. Raises CannotTell when there is none, or more than one."""
        if len(self.commands) != 1:
            raise CannotTell(
                f"{self.unit} has {len(self.commands)} commands in ExecStart=, where exactly one can be judged"
                if self.commands
                else f"{self.unit} has no command in ExecStart="
            )
        return self.commands[0]

    def environment_with(self, files: Mapping[str, str | None]) -> dict[str, str]:
        """The variables that the unit sets, environment files included (path to content, None for "not there").

        Raises CannotTell when a file was not read, or is missing although it must be there.
        """
        result = dict(self.environment)
        for path, optional in self.environment_files:
            if path not in files:
                raise CannotTell(f"the environment file {path} was not read")
            text = files[path]
            if text is None and not optional:
                raise CannotTell(f"the environment file {path} does not exist, so the unit cannot start")
            result |= parse_environment_file(text or "")
        for name in self.unset:
            key, equals, value = name.partition("=")
            if not equals or result.get(key) == value:
                result.pop(key, None)
        return result


def effective_unit(unit: str, files: Sequence[tuple[str, str]]) -> EffectiveUnit:
    """The unit that these files (path, text) make together: the main file first, then the drop-ins in their order."""
    texts = tuple(parse_unit(text, path) for path, text in files)
    troubles = [t for text in texts for t in text.troubles]
    commands: list[CommandLine] = []
    environment: dict[str, str] = {}
    env_files: list[tuple[str, bool]] = []
    unset: list[str] = []
    kind = ""
    for text in texts:
        for a in text.assignments:
            if a.section != _SERVICE:
                continue
            if a.key == "ExecStart":
                commands = [*commands, *_commands(unit, text.file, a, troubles)] if a.value else []
            elif a.key == "Environment":
                environment = environment | _assignments(unit, text.file, a, troubles) if a.value else {}
            elif a.key == "EnvironmentFile":
                env_files = [*env_files, _environment_file(unit, a)] if a.value else []
            elif a.key == "UnsetEnvironment":
                unset = [*unset, *a.value.split()] if a.value else []
            elif a.key == "Type":
                kind = a.value
    kind = kind or "simple"
    if len(commands) > 1 and kind != "oneshot":
        last = commands[-1]
        troubles.append(
            Trouble(last.file, last.line, f"{len(commands)} commands in ExecStart=: systemd refuses a service of type {kind}")
        )
    return EffectiveUnit(unit, tuple(commands), environment, tuple(env_files), tuple(unset), kind, texts, tuple(troubles))


def _commands(unit: str, file: str, assignment: Assignment, troubles: list[Trouble]) -> list[CommandLine]:
    """The commands of one ``ExecStart=``: a word that is a bare ``;`` begins the next one."""
    try:
        words, odd = split_words(assignment.value)
    except CannotTell as why:
        troubles.append(Trouble(file, assignment.line, str(why)))
        return []
    troubles += [Trouble(file, assignment.line, f"{text} in ExecStart=") for text in odd]
    groups: list[list[Word]] = [[]]
    for word in words:
        source = assignment.value[word.start : word.end]
        if source == ";" and groups[-1]:
            groups.append([])
        else:
            groups[-1].append(replace(word, text=";") if source == "\\;" else word)
    found: list[CommandLine] = []
    for group in groups:
        if not group:
            continue
        prefixes = re.match(r"[@\-:+!|]*", group[0].text)
        first = group[0].text[prefixes.end() :] if prefixes else group[0].text
        try:
            resolved = [_specified(unit, text) for text in (first, *(w.text for w in group[1:]))]
        except CannotTell as why:
            troubles.append(Trouble(file, assignment.line, f"{why} (in ExecStart=)"))
            return found
        if any(w.text == "#" for w in group):
            troubles.append(
                Trouble(file, assignment.line, "'#' behind other words is no comment: the process gets it, and what follows")
            )
        found.append(
            CommandLine(
                file=file,
                line=assignment.line,
                prefixes=prefixes[0] if prefixes else "",
                words=tuple(text for text, _ in resolved),
                raw=tuple(group),
                unresolved=tuple(name for _, names in resolved for name in names),
            )
        )
    return found


def _assignments(unit: str, file: str, assignment: Assignment, troubles: list[Trouble]) -> dict[str, str]:
    try:
        words, odd = split_words(assignment.value)
    except CannotTell as why:
        troubles.append(Trouble(file, assignment.line, str(why)))
        return {}
    troubles += [Trouble(file, assignment.line, f"{text} in Environment=") for text in odd]
    out: dict[str, str] = {}
    for word in words:
        try:
            name, equals, value = _specified(unit, word.text)[0].partition("=")
        except CannotTell as why:
            troubles.append(Trouble(file, assignment.line, f"{why} (in Environment=)"))
            continue
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            out[name] = value
        else:
            troubles.append(
                Trouble(file, assignment.line, f"ignored in Environment=, it is no assignment: {_short(word.text)!r}")
            )
    return out


def _environment_file(unit: str, assignment: Assignment) -> tuple[str, bool]:
    path = assignment.value
    optional = path.startswith("-")
    try:
        return _specified(unit, path.removeprefix("-"))[0], optional
    except CannotTell:
        return path.removeprefix("-"), optional  # systemd ignores the line; nothing has this name either


# ---------------------------------------------------------------------------------------------- specifiers


#: Specifiers whose value only the machine knows (host name, machine-id, architecture, …).
_ON_THE_MACHINE = "aAbBcdDfHIjJlmMoPqrRvwWyY"


def _specified(unit: str, text: str) -> tuple[str, list[str]]:
    """``text`` with its specifiers resolved (for the system manager), and those that only the machine can resolve.

    Raises CannotTell for one that does not exist.
    """
    name, _, _ = unit.rpartition(".")
    prefix, at, instance = name.partition("@")
    known = {
        "%": "%", "n": unit, "N": name, "p": prefix, "i": instance if at else "", "t": "/run", "S": "/var/lib", "C": "/var/cache",
        "L": "/var/log", "E": "/etc", "T": "/tmp", "V": "/var/tmp", "h": "/root", "u": "root", "U": "0", "g": "root", "G": "0",
        "s": "/bin/sh",
    }  # fmt: skip
    left: list[str] = []

    def resolve(found: re.Match[str]) -> str:
        if found[1] in known:
            return known[found[1]]
        if found[1] not in _ON_THE_MACHINE:
            raise CannotTell(f"{found[0]!r} is no specifier, so systemd refuses it; a per cent sign is written %%")
        left.append(found[0])
        return found[0]

    return re.sub(r"%(.)", resolve, text, flags=re.DOTALL), left


# ------------------------------------------------------------------------------------------ environment files


def parse_environment_file(text: str) -> dict[str, str]:
    """The variables of an ``EnvironmentFile=``: shell-like quoting, nothing is expanded, the last one wins.

    >>> parse_environment_file("# c\\nA=1\\nB='two words' # not a comment\\n; c\\nexport C=3\\n")
    {'A': '1', 'B': 'two words# not a comment'}
    """
    out: dict[str, str] = {}
    place, length = 0, len(text)
    while place < length:
        while place < length and text[place] in _BLANK:
            place += 1
        if place < length and text[place] in "#;":
            place = _comment_end(text, place)
            continue
        end = place
        while end < length and text[end] not in "=\n\r":
            end += 1
        if end >= length or text[end] != "=":
            place = end + 1
            continue
        name = text[place:end].strip(_BLANK)
        value, place = _file_value(text, end + 1)
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            out[name] = value
    return out


def _comment_end(text: str, place: int) -> int:
    """Where a comment ends; a backslash before the line end continues it."""
    while place < len(text) and text[place] not in "\n\r":
        place += 2 if text[place] == "\\" else 1
    return place + 1


def _file_value(text: str, place: int) -> tuple[str, int]:
    """The value that begins at ``place``, and where the next line begins.

    WHY quotes are only looked for before the first plain character: ``a"b"`` is taken as it stands, ``"a"b`` is ``ab``.
    """
    out: list[str] = []
    kept = 0  # blanks at the end are dropped, but for quoted and escaped ones
    before = True
    while place < len(text) and text[place] not in "\n\r":
        character = text[place]
        if before and character in "\"'":
            piece, place = _file_quoted(text, place)
            out += piece
            kept = len(out)
            continue
        if character == "\\":
            if text[place + 1 : place + 2] not in ("\n", ""):
                out.append(text[place + 1])
                kept = len(out)
            before = False
            place += 2
            continue
        place += 1
        if character in " \t":
            if not before:
                out.append(character)
            continue
        before = False
        out.append(character)
        kept = len(out)
    return "".join(out[:kept]), place + 1


def _file_quoted(text: str, place: int) -> tuple[list[str], int]:
    mark, out = text[place], []
    place += 1
    while place < len(text) and text[place] != mark:
        if mark == '"' and text[place] == "\\" and place + 1 < len(text):
            following = text[place + 1]
            if following in '"\\`$':
                out.append(following)
            elif following != "\n":
                out += ["\\", following]
            place += 2
        else:
            out.append(text[place])
            place += 1
    return out, place + 1

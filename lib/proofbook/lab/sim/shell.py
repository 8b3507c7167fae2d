"""A small POSIX shell for simulated machines: enough for what people and tools type over SSH.

It knows lists, pipelines, redirections, quotes, variables, command substitution, globs, ``if``, ``for``, ``while`` and groups.
It says loudly what it does not know: a command that the lab does not have ends with 127 and is noted.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from proofbook.lab.sim.files import Files
from proofbook.lab.sim.life import Life
from proofbook.lab.sim.locks import why_not
from proofbook.lab.sim.os_state import System, User
from proofbook.lab.sim.vfs import FileNode, Tree


@dataclass
class Answer:
    """What a command came to: exit status (as a shell has it), stdout and stderr."""

    status: int = 0
    stdout: bytes = b""
    stderr: bytes = b""


def said(text: str = "", *, error: str = "", status: int = 0) -> Answer:
    """An answer of text."""
    return Answer(status, text.encode("utf-8", "surrogateescape"), error.encode("utf-8", "surrogateescape"))


class Leave(Exception):
    """``exit`` was said; carries the status and what was printed until then."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


Emit = Callable[[bytes], Awaitable[None]]
#: Let the machine's time pass until something is so, or so many of its seconds are over; whether it came to be so.
PassTime = Callable[[Callable[[], bool], float], Awaitable[bool]]
Note = Callable[[str], None]


@dataclass
class Context:
    """Where a command runs: on which userland, as whom, in which folder, with which variables and input."""

    life: Life
    files: Files
    system: System
    user: User
    note_unknown: Note
    cwd: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    positional: tuple[str, ...] = ("sh",)
    emit: Emit | None = None  # where a command that never ends writes to; None: it may not run
    pass_time: PassTime | None = None  # None: nobody else uses the machine meanwhile
    last: int = 0

    @property
    def tree(self) -> Tree:
        return self.files.tree(self.system, self.user.uid)

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait on the machine's clock until ``holds()``, at most ``limit_s``; whether it held."""
        if self.pass_time is not None:
            return await self.pass_time(holds, limit_s)
        end = self.life.now + limit_s
        while not holds() and self.life.now < end:
            event = self.life.next_event()
            self.life.advance(min(end, event) if event is not None else end)
        return holds()

    def may_not_write(self, path: str, *, grows: bool = True) -> OSError | None:
        """Why not even root can write, replace or remove a file now; None when root can."""
        return why_not(self.system, path, grows=grows)

    def change(self, path: str, node: FileNode | None) -> None:
        """Write or delete a file (absolute path); deleting a folder deletes what is in it."""
        files = self.system.files
        for below in [p for p in files if p == path or (node is None and p.startswith(path + "/"))]:
            del files[below]  # so that the change comes last: a layer is read in the order of its entries
        files[path] = node
        self.life.machine.revision += 1


Handler = Callable[[Context, list[str]], "Answer | Awaitable[Answer]"]


# ------------------------------------------------------------------------------------------- parsing


@dataclass
class Redirect:
    fd: int
    how: str  # > >> < >&
    target: str


@dataclass
class Simple:
    words: list[str] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Pipeline:
    commands: list[Node]
    negated: bool = False


@dataclass
class Sequence_:
    items: list[tuple[str, Node]]  # (how it is joined to the one before: ; && ||, node)


@dataclass
class If:
    branches: list[tuple[Node, Node]]
    otherwise: Node | None
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class For:
    name: str
    words: list[str] | None  # None: the positional parameters
    body: Node
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class While:
    condition: Node
    body: Node
    until: bool
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Group:
    body: Node
    subshell: bool
    redirects: list[Redirect] = field(default_factory=list)


Node = Simple | Pipeline | Sequence_ | If | For | While | Group

_OPERATOR = re.compile(r"&&|\|\||;;|\d?>&\d|&>|\d?>>|\d?>|<|\||;|&|\(|\)|\n")
_KEYWORDS = {"if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "{", "}", "!"}


class ShellSyntaxError(Exception):
    """The line is not one that this shell can read."""


def tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) with kind ``word`` (quotes kept) or ``op``."""
    found: list[tuple[str, str]] = []
    i, word, has_word = 0, "", False

    def flush() -> None:
        nonlocal word, has_word
        if has_word:
            found.append(("word", word))
        word, has_word = "", False

    while i < len(text):
        c = text[i]
        if c in " \t\r":
            flush()
            i += 1
        elif c == "#" and not has_word:
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
        elif c == "\\" and text[i + 1 : i + 2] == "\n":
            i += 2
        elif (operator := _OPERATOR.match(text, i)) and not (operator.group()[0].isdigit() and has_word):
            flush()
            found.append(("op", operator.group()))
            i = operator.end()
        else:
            end = _word_part(text, i)
            word, has_word, i = word + text[i:end], True, end
    flush()
    return found


def _word_part(text: str, i: int) -> int:
    """Where the part of a word that begins at ``i`` ends: a quoted string, a substitution, or one character."""
    c = text[i]
    if c == "\\":
        return i + 2
    if c == "'":
        end = text.find("'", i + 1)
        if end < 0:
            raise ShellSyntaxError("unterminated quoted string")
        return end + 1
    if c == '"':
        j = i + 1
        while j < len(text) and text[j] != '"':
            j = _word_part(text, j) if text[j] in "\\$" else j + 1
        if j >= len(text):
            raise ShellSyntaxError("unterminated quoted string")
        return j + 1
    if c == "$" and text[i + 1 : i + 2] == "(":
        return _closing(text, i + 1, "(", ")")
    if c == "$" and text[i + 1 : i + 2] == "{":
        return _closing(text, i + 1, "{", "}")
    return i + 1


def _closing(text: str, i: int, opening: str, closing: str) -> int:
    depth = 0
    while i < len(text):
        if text[i] in "'\"\\":
            i = _word_part(text, i)
            continue
        depth += (text[i] == opening) - (text[i] == closing)
        i += 1
        if depth == 0:
            return i
    raise ShellSyntaxError(f"missing {closing}")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._i = 0

    def parse(self) -> Node:
        node = self._sequence(())
        if self._i < len(self._tokens):
            raise ShellSyntaxError(f'"{self._tokens[self._i][1]}" unexpected')
        return node

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._i] if self._i < len(self._tokens) else ("end", "")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._i += 1
        return token

    def _expect(self, word: str) -> None:
        if self._take()[1] != word:
            raise ShellSyntaxError(f'expected "{word}"')

    def _skip_newlines(self) -> None:
        while self._peek() in (("op", "\n"), ("op", ";")):
            self._take()

    def _sequence(self, stops: Sequence[str]) -> Node:
        items: list[tuple[str, Node]] = []
        joined = ";"
        while True:
            self._skip_newlines()
            kind, text = self._peek()
            if kind == "end" or (kind == "word" and text in stops) or (kind == "op" and text == ")"):
                return Sequence_(items)
            items.append((joined, self._pipeline()))
            kind, text = self._peek()
            joined = ";"
            if kind == "op" and text in ("&&", "||"):
                self._take()
                joined = text
                while self._peek() == ("op", "\n"):
                    self._take()
            elif kind == "op" and text in (";", "\n", "&"):
                self._take()

    def _pipeline(self) -> Node:
        negated = False
        while self._peek() == ("word", "!"):
            self._take()
            negated = not negated
        commands = [self._command()]
        while self._peek() == ("op", "|"):
            self._take()
            while self._peek() == ("op", "\n"):
                self._take()
            commands.append(self._command())
        return Pipeline(commands, negated) if negated or len(commands) > 1 else commands[0]

    def _command(self) -> Node:
        kind, text = self._peek()
        node: Node
        if (kind, text) == ("word", "if"):
            node = self._if()
        elif (kind, text) == ("word", "for"):
            node = self._for()
        elif kind == "word" and text in ("while", "until"):
            node = self._while()
        elif (kind, text) == ("word", "{"):
            self._take()
            node = Group(self._sequence(("}",)), False)
            self._expect("}")
        elif (kind, text) == ("op", "("):
            self._take()
            node = Group(self._sequence(()), True)
            self._expect(")")
        else:
            return self._simple()
        node.redirects = self._redirects()
        return node

    def _if(self) -> If:
        branches: list[tuple[Node, Node]] = []
        otherwise: Node | None = None
        self._take()
        while True:
            condition = self._sequence(("then",))
            self._expect("then")
            branches.append((condition, self._sequence(("elif", "else", "fi"))))
            word = self._take()[1]
            if word == "elif":
                continue
            if word == "else":
                otherwise = self._sequence(("fi",))
                self._expect("fi")
            elif word != "fi":
                raise ShellSyntaxError('expected "fi"')
            return If(branches, otherwise)

    def _for(self) -> For:
        self._take()
        name = self._take()[1]
        words: list[str] | None = None
        if self._peek() == ("word", "in"):
            self._take()
            words = []
            while self._peek()[0] == "word":
                words.append(self._take()[1])
        self._skip_newlines()
        self._expect("do")
        body = self._sequence(("done",))
        self._expect("done")
        return For(name, words, body)

    def _while(self) -> While:
        until = self._take()[1] == "until"
        condition = self._sequence(("do",))
        self._expect("do")
        body = self._sequence(("done",))
        self._expect("done")
        return While(condition, body, until)

    def _redirects(self) -> list[Redirect]:
        found = []
        while self._peek()[0] == "op" and self._peek()[1][-1:] in "><&0123456789" and self._peek()[1] not in ("&", "&&"):
            found.append(self._redirect())
        return found

    def _redirect(self) -> Redirect:
        text = self._take()[1]
        if ">&" in text:
            number, _, source = text.partition(">&")
            return Redirect(int(number or 1), ">&", source)
        kind, target = self._take()
        if kind != "word":
            raise ShellSyntaxError("redirection without a file")
        if text == "&>":
            return Redirect(-1, ">", target)
        fd = int(text[0]) if text[0].isdigit() else (0 if text == "<" else 1)
        return Redirect(fd, text.lstrip("0123456789"), target)

    def _simple(self) -> Simple:
        command = Simple()
        while True:
            kind, text = self._peek()
            if kind == "word" and not (text in _KEYWORDS - {"!", "{", "}"} and not command.words):
                command.words.append(self._take()[1])
            elif kind == "op" and (">" in text or text == "<"):
                command.redirects.append(self._redirect())
            else:
                break
        if not command.words and not command.redirects:
            raise ShellSyntaxError(f'"{self._peek()[1]}" unexpected')
        return command


# ----------------------------------------------------------------------------------------- executing


class Shell:
    """Runs shell text and argv lists with a table of commands."""

    def __init__(self, commands: dict[str, Handler]) -> None:
        self.commands = commands

    async def run_text(self, ctx: Context, text: str) -> Answer:
        """Run shell text as ``sh -c`` does."""
        try:
            node = _Parser(text).parse()
        except ShellSyntaxError as error:
            return said(error=f"sh: 1: Syntax error: {error}\n", status=2)
        output = Answer()
        try:
            output.status = await self._run(ctx, node, output)
        except Leave as leave:
            output.status = leave.status
        return output

    async def run_argv(self, ctx: Context, argv: Sequence[str]) -> Answer:
        """Run one command by its argv, never through a shell."""
        name = argv[0]
        handler = self.commands.get(posixpath.basename(name) if name.startswith("/") else name)
        if handler is None:
            ctx.note_unknown(" ".join(argv))
            return said(error=f"lab: command not found in this simulated machine: {name}\n", status=127)
        result = handler(ctx, list(argv))
        return await result if inspect.isawaitable(result) else result

    async def _run(self, ctx: Context, node: Node, output: Answer) -> int:
        """Run a node, adding to ``output``; the exit status."""
        match node:
            case Sequence_(items):
                for joined, item in items:
                    if (joined == "&&" and ctx.last != 0) or (joined == "||" and ctx.last == 0):
                        continue
                    ctx.last = await self._run(ctx, item, output)
                return ctx.last if items else 0
            case Pipeline(commands, negated):
                status = await self._pipeline(ctx, commands, output)
                return int(status == 0) if negated else status
            case Simple():
                return await self._simple(ctx, node, output)
            case _:
                inner = Answer()
                try:
                    status = await self._compound(ctx, node, inner)
                finally:
                    await self._redirect(ctx, node.redirects, inner, output)
                return status

    async def _compound(self, ctx: Context, node: Node, output: Answer) -> int:
        match node:
            case If(branches, otherwise):
                for condition, body in branches:
                    if await self._run(ctx, condition, output) == 0:
                        return await self._run(ctx, body, output)
                return await self._run(ctx, otherwise, output) if otherwise else 0
            case For(name, words, body):
                values = [v for w in words for v in await self._expand(ctx, w)] if words is not None else list(ctx.positional[1:])
                status = 0
                for value in values:
                    ctx.env[name] = value
                    status = await self._run(ctx, body, output)
                return status
            case While(condition, body, until):
                status = 0
                for _ in range(10_000):  # a loop in a simulated machine never has more to do than that
                    if (await self._run(ctx, condition, output) == 0) is until:
                        break
                    status = await self._run(ctx, body, output)
                return status
            case Group(body, subshell):
                scope = replace(ctx, env=dict(ctx.env)) if subshell else ctx
                try:
                    return await self._run(scope, body, output)
                except Leave as leave:
                    if not subshell:
                        raise
                    return leave.status
        raise AssertionError(node)

    async def _pipeline(self, ctx: Context, commands: list[Node], output: Answer) -> int:
        data, status = ctx.stdin, 0
        for position, command in enumerate(commands):
            stage = Answer()
            scope = replace(ctx, stdin=data, env=dict(ctx.env), emit=None)
            try:
                status = await self._run(scope, command, stage)
            except Leave as leave:
                status = leave.status
            output.stderr += stage.stderr
            if position + 1 < len(commands):
                data = stage.stdout
            else:
                output.stdout += stage.stdout
        return status

    async def _simple(self, ctx: Context, command: Simple, output: Answer) -> int:
        words = list(command.words)
        assigned: dict[str, str] = {}
        while words and (found := re.match(r"([A-Za-z_]\w*)=", words[0])):
            assigned[found[1]] = "".join(await self._expand(ctx, words.pop(0)[found.end() :], split=False))
        argv = [v for w in words for v in await self._expand(ctx, w)]
        if not argv:
            ctx.env.update(assigned)
            await self._redirect(ctx, command.redirects, Answer(), output)
            return ctx.last if any("$(" in w for w in command.words) else 0
        stdin = await self._input(ctx, command.redirects, output)
        if stdin is None:
            return 1
        if argv[0] in ("cd", "export", "exit", "set", "shift", ":", "exec", "return", "umask", "unset", "read"):
            return await self._builtin(ctx, argv, command.redirects, output)
        scope = replace(ctx, stdin=stdin, env={**ctx.env, **assigned}, emit=ctx.emit if not command.redirects else None)
        answer = await self.run_argv(scope, argv)
        await self._redirect(ctx, command.redirects, answer, output)
        return answer.status

    async def _builtin(self, ctx: Context, argv: list[str], redirects: list[Redirect], output: Answer) -> int:
        name, arguments = argv[0], argv[1:]
        if name == "cd":
            target = arguments[0] if arguments else ctx.user.home
            try:
                path, node = ctx.tree.lookup(target, cwd=ctx.cwd)
            except OSError as error:
                output.stderr += f"sh: 1: cd: can't cd to {target}: {error.strerror}\n".encode()
                return 2
            if node.kind != "dir":
                output.stderr += f"sh: 1: cd: can't cd to {target}\n".encode()
                return 2
            ctx.cwd = path
        elif name in ("exit", "return"):
            raise Leave(int(arguments[0]) if arguments else ctx.last)
        elif name == "export":
            ctx.env.update((k, v) for k, e, v in (a.partition("=") for a in arguments) if e)
        elif name == "unset":
            for arg in arguments:
                ctx.env.pop(arg, None)
        elif name == "set" and "--" in arguments:
            ctx.positional = (ctx.positional[0], *arguments[arguments.index("--") + 1 :])
        elif name == "shift":
            ctx.positional = (ctx.positional[0], *ctx.positional[2:])
        elif name == "read":
            return self._read(ctx, arguments)
        elif name == "exec" and arguments:
            answer = await self.run_argv(ctx, arguments)
            await self._redirect(ctx, redirects, answer, output)
            raise Leave(answer.status)
        return 0

    @staticmethod
    def _read(ctx: Context, arguments: list[str]) -> int:
        line, newline, ctx.stdin = ctx.stdin.partition(b"\n")
        names = [a for a in arguments if not a.startswith("-")]
        values = line.decode("utf-8", "surrogateescape").split(None, len(names) - 1) if names else []
        ctx.env.update({n: (values[i] if i < len(values) else "") for i, n in enumerate(names)})
        return 0 if newline or line else 1

    async def _input(self, ctx: Context, redirects: list[Redirect], output: Answer) -> bytes | None:
        stdin = ctx.stdin
        for redirect in redirects:
            if redirect.how == "<":
                path = "".join(await self._expand(ctx, redirect.target, split=False))
                try:
                    stdin = ctx.tree.read(path, cwd=ctx.cwd)
                except OSError as error:
                    output.stderr += f"sh: 1: cannot open {path}: {error.strerror}\n".encode()
                    return None
        return stdin

    async def _redirect(self, ctx: Context, redirects: list[Redirect], answer: Answer, output: Answer) -> None:
        """Put an answer where the redirections say; what is not redirected goes to ``output``."""
        sinks: dict[int, str | tuple[str, bool]] = {1: "out", 2: "err"}
        for redirect in redirects:
            if redirect.how == ">&":
                sinks[redirect.fd] = sinks[int(redirect.target)]
            elif redirect.how in (">", ">>"):
                path = "".join(await self._expand(ctx, redirect.target, split=False))
                for fd in (1, 2) if redirect.fd == -1 else (redirect.fd,):
                    sinks[fd] = (posixpath.normpath(posixpath.join(ctx.cwd, path)), redirect.how == ">>")
                if redirect.how == ">" and path != "/dev/null":
                    write_file(ctx, path, b"")
        for fd, data in ((1, answer.stdout), (2, answer.stderr)):
            sink = sinks[fd]
            if sink == "out":
                output.stdout += data
            elif sink == "err":
                output.stderr += data
            elif isinstance(sink, tuple) and sink[0] != "/dev/null":
                problem = write_file(ctx, sink[0], data, append=True)
                output.stderr += problem.encode()

    async def _expand(self, ctx: Context, word: str, *, split: bool = True) -> list[str]:
        """A word's values: quotes taken away, variables and substitutions put in, globs matched."""
        parts: list[tuple[str, bool]] = []  # (text, quoted)
        i = 0
        if word == "~" or word.startswith("~/"):
            parts.append((ctx.user.home, True))
            i = 1
        fields: list[str] = []
        at_all = False
        while i < len(word):
            end = _word_part(word, i)
            piece = word[i:end]
            i = end
            if piece[0] == "'":
                parts.append((piece[1:-1], True))
            elif piece[0] == '"':
                if piece == '"$@"':
                    at_all = True
                    fields += ctx.positional[1:]
                else:
                    parts.append((await self._substitute(ctx, piece[1:-1], quoted=True), True))
            elif piece[0] == "\\":
                parts.append((piece[1:], True))
            elif piece[0] == "$":
                if len(piece) == 1 and (name := re.match(r"[A-Za-z_]\w*|[0-9?#@*$!]", word[i:])):
                    piece, i = "$" + name.group(), i + name.end()
                parts.append((await self._substitute(ctx, piece, quoted=False), not split))
            else:
                parts.append((piece, False) if piece in "*?[]" else (piece, True))
        if at_all and not parts:
            return fields
        text = "".join(p for p, _ in parts)
        if not split:
            return [text]
        if all(q for _, q in parts) or not parts:
            return [text] if parts or '""' in word or "''" in word else []
        if any(not q and any(c in p for c in "*?[") for p, q in parts) and (matches := ctx.tree.glob(text, cwd=ctx.cwd)):
            return matches
        return _split_fields(parts)

    async def _substitute(self, ctx: Context, text: str, *, quoted: bool) -> str:
        result, i = "", 0
        while i < len(text):
            if text[i] == "\\" and quoted:
                result += text[i + 1 : i + 2] if text[i + 1 : i + 2] in '$`"\\' else text[i : i + 2]
                i += 2
            elif text[i] == "$" and text[i + 1 : i + 2] == "(":
                end = _closing(text, i + 1, "(", ")")
                inner = await self.run_text(replace(ctx, env=dict(ctx.env), emit=None), text[i + 2 : end - 1])
                ctx.last = inner.status
                result += inner.stdout.decode("utf-8", "surrogateescape").rstrip("\n")
                i = end
            elif text[i] == "$" and text[i + 1 : i + 2] == "{":
                end = _closing(text, i + 1, "{", "}")
                result += await self._parameter(ctx, text[i + 2 : end - 1])
                i = end
            elif text[i] == "$" and (found := re.compile(r"[A-Za-z_]\w*|[0-9?#@*$!]").match(text, i + 1)):
                result += self._variable(ctx, found.group())
                i = found.end()
            else:
                result += text[i]
                i += 1
        return result

    async def _parameter(self, ctx: Context, text: str) -> str:
        found = re.match(r"([A-Za-z_]\w*|[0-9?#@*])(?:(:?[-+])(.*)|(%%|%|##|#)(.*))?$", text, re.S)
        if not found:
            raise ShellSyntaxError("Bad substitution")
        value = self._variable(ctx, found[1])
        if found[2]:
            default = await self._substitute(ctx, found[3], quoted=True)
            return default if bool(value) == found[2].endswith("+") else ("" if found[2].endswith("+") else value)
        if found[4]:
            suffix = await self._substitute(ctx, found[5], quoted=True)
            return value.removesuffix(suffix) if found[4].startswith("%") else value.removeprefix(suffix)
        return value

    @staticmethod
    def _variable(ctx: Context, name: str) -> str:
        if name == "?":
            return str(ctx.last)
        if name == "$":
            return "4242"
        if name == "#":
            return str(len(ctx.positional) - 1)
        if name in "@*":
            return " ".join(ctx.positional[1:])
        if name.isdigit():
            return ctx.positional[int(name)] if int(name) < len(ctx.positional) else ""
        return ctx.env.get(name, "")


def _split_fields(parts: list[tuple[str, bool]]) -> list[str]:
    """Split what was not quoted at blanks."""
    fields: list[str] = []
    current, started = "", False
    for text, quoted in parts:
        if quoted:
            current, started = current + text, True
            continue
        for j, chunk in enumerate(re.split(r"\s+", text)):
            if j and started:
                fields.append(current)
                current, started = "", False
            if chunk:
                current, started = current + chunk, True
    if started:
        fields.append(current)
    return fields


def write_file(ctx: Context, path: str, data: bytes, *, append: bool = False, mode: int = 0o644) -> str:
    """Write a file as the user of ``ctx``; the shell's complaint if that cannot be, else ""."""
    full = posixpath.normpath(posixpath.join(ctx.cwd, path))
    if full == "/dev/null":
        return ""
    tree = ctx.tree
    try:
        real, node = tree.lookup(full)
    except OSError:
        parent = posixpath.dirname(full)
        try:
            real_parent, folder = tree.lookup(parent)
        except OSError:
            return f"sh: 1: cannot create {path}: Directory nonexistent\n"
        if folder.kind != "dir" or not tree.may(folder, 2) or real_parent.startswith(("/proc", "/sys")):
            return f"sh: 1: cannot create {path}: Permission denied\n"
        real, node = posixpath.join(real_parent, posixpath.basename(full)), FileNode("file", mode=mode, uid=ctx.user.uid)
    else:
        if node.kind == "dir":
            return f"sh: 1: cannot create {path}: Is a directory\n"
        if not tree.may(node, 2) or real.startswith(("/proc", "/sys")):
            return f"sh: 1: cannot create {path}: Permission denied\n"
    if locked := ctx.may_not_write(real):
        return f"sh: 1: cannot create {path}: {locked.strerror}\n"
    old = node.read() if append and not callable(node.content) else b""
    ctx.change(real, FileNode("file", old + data, mode=node.mode, uid=node.uid, gid=node.gid, mtime=ctx.life.now))
    return ""

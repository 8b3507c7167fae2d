"""The ordinary commands of a simulated machine: files, text and who-am-I, on its virtual file system."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import posixpath
import re
from dataclasses import replace
from datetime import UTC, datetime

from proofbook.lab.sim.files import visible_processes
from proofbook.lab.sim.shell import Answer, Context, Handler, Leave, said, write_file
from proofbook.lab.sim.vfs import FileNode, directory, link

_TYPES = {"file": "-", "link": "l", "dir": "d", "device": "c"}


def _flags(argv: list[str], with_value: str = "") -> tuple[dict[str, str], list[str]]:
    """Short and long options, and the other words; ``--`` ends the options."""
    options: dict[str, str] = {}
    words: list[str] = []
    rest = argv[1:]
    while rest:
        word = rest.pop(0)
        if word == "--":
            words += rest
            break
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[name] = value
        elif word.startswith("-") and len(word) > 1:
            letters = word[1:]
            while letters:
                letter, letters = letters[0], letters[1:]
                if letter in with_value:
                    options[letter] = letters or (rest.pop(0) if rest else "")
                    break
                options[letter] = ""
        else:
            words.append(word)
    return options, words


def _inputs(ctx: Context, name: str, paths: list[str]) -> tuple[list[tuple[str, bytes]], str]:
    """(path, content) of files, or of stdin where there is none; and the complaints."""
    if not paths:
        return [("-", ctx.stdin)], ""
    found, errors = [], ""
    for path in paths:
        try:
            found.append((path, ctx.stdin if path == "-" else ctx.tree.read(path, cwd=ctx.cwd)))
        except OSError as error:
            errors += f"{name}: {path}: {error.strerror}\n"
    return found, errors


def _cat(ctx: Context, argv: list[str]) -> Answer:
    _, words = _flags(argv)
    found, errors = _inputs(ctx, "cat", words)
    return Answer(1 if errors else 0, b"".join(data for _, data in found), errors.encode())


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogateescape").splitlines(keepends=True)


def _head(ctx: Context, argv: list[str]) -> Answer:
    argv = [argv[0], *(f"-n{a[1:]}" if re.fullmatch(r"-\d+", a) else a for a in argv[1:])]
    options, words = _flags(argv, "nc")
    found, errors = _inputs(ctx, "head", words)
    out = b""
    for _, data in found:
        out += (
            data[: int(options["c"])]
            if "c" in options
            else "".join(_lines(data)[: int(options.get("n", "10"))]).encode("utf-8", "surrogateescape")
        )
    return Answer(1 if errors else 0, out, errors.encode())


def _tail(ctx: Context, argv: list[str]) -> Answer:
    argv = [argv[0], *(f"-n{a[1:]}" if re.fullmatch(r"-\d+", a) else a for a in argv[1:])]
    options, words = _flags(argv, "nc")
    found, errors = _inputs(ctx, "tail", words)
    count, out = options.get("n", "10"), b""
    for _, data in found:
        if (of_bytes := options.get("c", "")).startswith("+"):
            out += data[int(of_bytes) - 1 :]
            continue
        lines = _lines(data)
        kept = lines[int(count) - 1 :] if count.startswith("+") else lines[-int(count) :] if int(count) else []
        out += "".join(kept).encode("utf-8", "surrogateescape")
    return Answer(1 if errors else 0, out, errors.encode())


def _wc(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    found, errors = _inputs(ctx, "wc", words)
    out = ""
    for path, data in found:
        counts = {"l": data.count(b"\n"), "w": len(data.split()), "c": len(data)}
        chosen = [str(counts[k]) for k in "lwc" if k in options] or [str(v) for v in counts.values()]
        out += " ".join(chosen) + (f" {path}" if words else "") + "\n"
    return said(out, error=errors, status=1 if errors else 0)


def _sort(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "kt")
    found, errors = _inputs(ctx, "sort", words)
    lines = [line.rstrip("\n") for _, data in found for line in _lines(data)]

    def number(line: str) -> float:
        leading = re.match(r"\s*-?\d+(\.\d+)?", line)
        return float(leading.group()) if leading else 0.0

    lines.sort(key=number if "n" in options else None, reverse="r" in options)
    if "u" in options:
        lines = list(dict.fromkeys(lines))
    return said("".join(line + "\n" for line in lines), error=errors, status=1 if errors else 0)


def _uniq(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    found, errors = _inputs(ctx, "uniq", words)
    groups: list[tuple[str, int]] = []
    for line in (line.rstrip("\n") for _, data in found for line in _lines(data)):
        if groups and groups[-1][0] == line:
            groups[-1] = (line, groups[-1][1] + 1)
        else:
            groups.append((line, 1))
    return said("".join(f"{n:7d} {t}\n" if "c" in options else f"{t}\n" for t, n in groups), error=errors)


def _grep(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "emABC")
    pattern = options.get("e") or (words.pop(0) if words else "")
    if "F" in options:
        pattern = re.escape(pattern)
    elif "E" not in options and "P" not in options and argv[0] != "egrep":
        pattern = _basic_to_extended(pattern)
    if "w" in options:
        pattern = rf"\b(?:{pattern})\b"
    regex = re.compile(pattern, re.IGNORECASE if "i" in options else 0)
    if "r" in options or "R" in options:
        words = [
            p for w in words or ["."] for p in _below(ctx, w) if ctx.tree.lookup(p, follow=False, cwd=ctx.cwd)[1].kind == "file"
        ]
    found, errors = _inputs(ctx, "grep", words)
    named = ("H" in options or len(words) > 1 or "r" in options) and "h" not in options
    out, matched = "", False
    for path, data in found:
        hits = [
            (n, line.rstrip("\n"))
            for n, line in enumerate(_lines(data), 1)
            if bool(regex.search(line.rstrip("\n"))) is ("v" not in options)
        ]
        if "m" in options:
            hits = hits[: int(options["m"])]
        matched = matched or bool(hits)
        prefix = f"{path}:" if named else ""
        if "q" in options:
            continue
        if "c" in options:
            out += f"{prefix}{len(hits)}\n"
        elif "l" in options:
            out += f"{path}\n" if hits else ""
        elif "o" in options:
            out += "".join(f"{prefix}{m.group()}\n" for _, line in hits for m in regex.finditer(line))
        else:
            out += "".join(prefix + (f"{n}:" if "n" in options else "") + line + "\n" for n, line in hits)
    return said(out, error="" if "s" in options else errors, status=2 if errors and not matched else 0 if matched else 1)


def _basic_to_extended(pattern: str) -> str:
    r"""A basic regular expression as Python reads it: ``\|`` is an alternative, a bare ``|`` a character."""
    return re.sub(r"\\([|(){}+?])|([|(){}+?])", lambda m: m[1] if m[1] else "\\" + m[2], pattern)


def _tr(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    expand = [w.encode().decode("unicode_escape") for w in words]
    text = ctx.stdin.decode("utf-8", "surrogateescape")
    if "d" in options:
        return said("".join(c for c in text if c not in expand[0]))
    return said(text.translate({ord(a): expand[1][min(i, len(expand[1]) - 1)] for i, a in enumerate(expand[0])}))


def _cut(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "dfc")
    found, errors = _inputs(ctx, "cut", words)
    separator = options.get("d", "\t")
    chosen = [int(n) for n in options.get("f", "1").split(",")]
    out = ""
    for line in (line.rstrip("\n") for _, data in found for line in _lines(data)):
        parts = line.split(separator)
        out += (separator.join(parts[n - 1] for n in chosen if n <= len(parts)) if separator in line else line) + "\n"
    return said(out, error=errors)


def _sha256sum(ctx: Context, argv: list[str]) -> Answer:
    _, words = _flags(argv)
    found, errors = _inputs(ctx, "sha256sum", words)
    return said("".join(f"{hashlib.sha256(d).hexdigest()}  {p}\n" for p, d in found), error=errors, status=1 if errors else 0)


# ------------------------------------------------------------------------------------------- files


def _long_line(ctx: Context, name: str, node: FileNode) -> str:
    letters = "".join("rwx"[i % 3] if node.mode >> (8 - i) & 1 else "-" for i in range(9))
    if node.mode & 0o1000:
        letters = letters[:-1] + "t"
    size = (
        f"{node.major}, {node.minor:>3}"
        if node.kind == "device"
        else str(len(node.content) if isinstance(node.content, bytes) else 0)
    )
    owner = {0: "root", ctx.user.uid: ctx.user.name}.get(node.uid, str(node.uid))
    at = datetime.fromtimestamp(node.mtime or ctx.life.machine.boot.started_at, UTC)
    arrow = f" -> {node.target}" if node.kind == "link" else ""
    return f"{_TYPES[node.kind]}{letters} 1 {owner} {owner} {size:>8} {at:%b %e %H:%M} {name}{arrow}\n"


def _ls(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    long = "l" in options
    output, errors, many = "", "", len(words) > 1
    for path in words or ["."]:
        try:
            _, node = ctx.tree.lookup(path, follow=not long and "d" not in options, cwd=ctx.cwd)
            if node.kind == "dir" and "d" not in options:
                names = [n for n in ctx.tree.listdir(path, cwd=ctx.cwd) if "a" in options or not n.startswith(".")]
                entries = [(n, ctx.tree.lookup(posixpath.join(path, n), follow=False, cwd=ctx.cwd)[1]) for n in names]
                output += (f"{path}:\n" if many else "") + ("total 0\n" if long else "")
            else:
                entries = [(path, node)]
        except OSError as error:
            verb = "open directory" if isinstance(error, PermissionError) else "access"
            errors += f"ls: cannot {verb} '{path}': {error.strerror}\n"
            continue
        output += "".join(_long_line(ctx, n, e) if long else n + "\n" for n, e in entries)
    return said(output, error=errors, status=2 if errors else 0)


def _readlink(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    out, status = "", 0
    for path in words:
        try:
            if {"f", "e", "m"} & options.keys():
                out += ctx.tree.lookup(path, cwd=ctx.cwd)[0] + "\n"
                continue
            _, node = ctx.tree.lookup(path, follow=False, cwd=ctx.cwd)
            if node.kind != "link":
                status = 1
            else:
                out += node.target + "\n"
        except OSError:
            status = 1
    return said(out.rstrip("\n") if "n" in options else out, status=status)


def _realpath(ctx: Context, argv: list[str]) -> Answer:
    return _readlink(ctx, [argv[0], "-f", *argv[1:]])


def _stat(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "c")
    out, errors = "", ""
    form = options.get("c", options.get("format", "%n %s %a"))
    for path in words:
        try:
            _, node = ctx.tree.lookup(path, follow="L" in options, cwd=ctx.cwd)
        except OSError as error:
            errors += f"stat: cannot statx '{path}': {error.strerror}\n"
            continue
        kinds = {"file": "regular file", "link": "symbolic link", "dir": "directory", "device": "character special file"}
        values = {
            "n": path,
            "s": str(node.size),
            "a": f"{node.mode:o}",
            "u": str(node.uid),
            "g": str(node.gid),
            "F": kinds[node.kind],
            "Y": str(int(node.mtime or ctx.life.machine.boot.started_at)),
            "U": "root" if node.uid == 0 else ctx.user.name,
            "G": "root" if node.gid == 0 else ctx.user.name,
            "t": f"{node.major:x}",
            "T": f"{node.minor:x}",
            "A": _long_line(ctx, "", node).split()[0],
            "i": "1",
            "h": "1",
        }
        out += "".join(values.get(p[1:], p) for p in re.findall(r"%[a-zA-Z]|[^%]+|%", form)) + "\n"
    return said(out, error=errors, status=1 if errors else 0)


def _test(ctx: Context, argv: list[str]) -> Answer:
    words = argv[1:-1] if argv[0] == "[" else argv[1:]
    return said(status=0 if _holds(ctx, words) else 1)


def _holds(ctx: Context, words: list[str]) -> bool:
    if "-o" in words:
        at = words.index("-o")
        return _holds(ctx, words[:at]) or _holds(ctx, words[at + 1 :])
    if "-a" in words[1:]:
        at = words.index("-a", 1)
        return _holds(ctx, words[:at]) and _holds(ctx, words[at + 1 :])
    if words[:1] == ["!"]:
        return not _holds(ctx, words[1:])
    if len(words) == 3:
        left, operator, right = words
        if operator in ("=", "==", "!="):
            return (left == right) is (operator != "!=")
        numbers = {"-eq": 0, "-ne": 0, "-lt": 0, "-le": 0, "-gt": 0, "-ge": 0}
        if operator in numbers:
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[operator]
    if len(words) == 2:
        operator, value = words
        if operator in ("-n", "-z"):
            return bool(value) is (operator == "-n")
        try:
            _, node = ctx.tree.lookup(value, follow=operator not in ("-L", "-h"), cwd=ctx.cwd)
        except OSError:
            return False
        return {
            "-e": True,
            "-f": node.kind == "file",
            "-d": node.kind == "dir",
            "-L": node.kind == "link",
            "-h": node.kind == "link",
            "-c": node.kind == "device",
            "-r": ctx.tree.may(node, 4),
            "-w": ctx.tree.may(node, 2),
            "-x": ctx.tree.may(node, 1) or node.kind == "dir",
            "-s": node.kind != "file" or bool(node.read()),
        }.get(operator, False)
    return bool(words and words[0])


def _below(ctx: Context, path: str) -> list[str]:
    found, pending = [], [path]
    while pending:
        here = pending.pop()
        found.append(here)
        _, node = ctx.tree.lookup(here, follow=False, cwd=ctx.cwd)
        if node.kind == "dir":
            pending += [posixpath.join(here, n) for n in reversed(ctx.tree.listdir(here, cwd=ctx.cwd))]
    return found


def _find(ctx: Context, argv: list[str]) -> Answer:
    words = [w for w in argv[1:] if w != "-L"]
    starts = []
    while words and not words[0].startswith("-"):
        starts.append(words.pop(0))
    options = dict(zip(words[::2], words[1::2], strict=False)) if len(words) % 2 == 0 else dict.fromkeys(words, "")
    out, errors = "", ""
    for start in starts or ["."]:
        try:
            paths = _below(ctx, start)
        except OSError as error:
            errors += f"find: '{start}': {error.strerror}\n"
            continue
        for path in paths:
            depth = path.rstrip("/").count("/") - start.rstrip("/").count("/")
            node = ctx.tree.lookup(path, follow="-L" in argv, cwd=ctx.cwd)[1]
            if "-maxdepth" in options and depth > int(options["-maxdepth"]):
                continue
            if "-name" in options and not fnmatch.fnmatch(posixpath.basename(path), options["-name"]):
                continue
            if "-type" in options and {"f": "file", "l": "link", "d": "dir", "c": "device"}[options["-type"]] != node.kind:
                continue
            form = options.get("-printf", "%p\\n")
            values = {"%s": str(node.size), "%f": posixpath.basename(path), "%p": path, "\\n": "\n", "%%": "%"}
            out += "".join(values.get(piece, piece) for piece in re.findall(r"%[sfp%]|\\n|[^%\\]+|.", form))
    return said(out, error=errors, status=1 if errors else 0)


def _mktemp(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "p")
    template = words[0] if words else posixpath.join(options.get("p", "/tmp"), "tmp.XXXXXXXXXX")
    name = re.sub(r"X{3,}$", f"{ctx.life.machine.order:06d}", template)
    ctx.life.machine.order += 1
    if "d" in options:
        ctx.change(posixpath.join(ctx.cwd, name), directory(0o700))
        return said(name + "\n")
    problem = write_file(ctx, name, b"", mode=0o600)
    return said(name + "\n" if not problem else "", error=problem, status=1 if problem else 0)


def _tee(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    errors = "".join(write_file(ctx, w, ctx.stdin, append="a" in options) for w in words)
    return Answer(1 if errors else 0, ctx.stdin, errors.encode())


def _touch(ctx: Context, argv: list[str]) -> Answer:
    _, words = _flags(argv)
    errors = "".join(write_file(ctx, w, b"", append=True) for w in words)
    return said(error=errors, status=1 if errors else 0)


def _mkdir(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "m")
    errors = ""
    for word in words:
        path = posixpath.normpath(posixpath.join(ctx.cwd, word))
        if ctx.tree.exists(path):
            errors += "" if "p" in options else f"mkdir: cannot create directory '{word}': File exists\n"
            continue
        if "p" not in options and not ctx.tree.exists(posixpath.dirname(path)):
            errors += f"mkdir: cannot create directory '{word}': No such file or directory\n"
            continue
        ctx.change(path, directory())
    return said(error=errors, status=1 if errors else 0)


def _copy(ctx: Context, argv: list[str]) -> Answer:
    _, words = _flags(argv)
    if len(words) != 2:
        return said(error=f"{argv[0]}: missing file operand\n", status=1)
    source, target = words
    try:
        real, node = ctx.tree.lookup(source, cwd=ctx.cwd)
        data = ctx.tree.read(source, cwd=ctx.cwd)
    except OSError as error:
        return said(error=f"{argv[0]}: cannot stat '{source}': {error.strerror}\n", status=1)
    if ctx.tree.exists(target, cwd=ctx.cwd) and ctx.tree.lookup(target, cwd=ctx.cwd)[1].kind == "dir":
        target = posixpath.join(target, posixpath.basename(source))
    problem = write_file(ctx, target, data, mode=node.mode)
    if not problem and argv[0] == "mv":
        ctx.change(real, None)
    return said(error=problem, status=1 if problem else 0)


def _rm(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    errors = ""
    for word in words:
        try:
            real, node = ctx.tree.lookup(word, follow=False, cwd=ctx.cwd)
        except OSError as error:
            errors += "" if "f" in options else f"rm: cannot remove '{word}': {error.strerror}\n"
            continue
        if real.startswith(("/proc", "/sys")) or ctx.user.uid not in (0, node.uid):
            errors += f"rm: cannot remove '{word}': Operation not permitted\n"
        elif node.kind == "dir" and not {"r", "R"} & options.keys() and argv[0] != "rmdir":
            errors += f"rm: cannot remove '{word}': Is a directory\n"
        elif locked := ctx.may_not_write(real, grows=False):
            errors += f"rm: cannot remove '{word}': {locked.strerror}\n"
        else:
            ctx.change(real, None)
    return said(error=errors, status=1 if errors else 0)


def _chmod(ctx: Context, argv: list[str]) -> Answer:
    words = [w for w in argv[1:] if w not in ("--", "-R")]
    mode, errors = words[0], ""
    for word in words[1:]:
        try:
            real, node = ctx.tree.lookup(word, cwd=ctx.cwd)
        except OSError as error:
            errors += f"chmod: cannot access '{word}': {error.strerror}\n"
            continue
        number = int(mode, 8) if mode.isdigit() else node.mode | 0o111 if mode.endswith("+x") else node.mode
        ctx.change(real, replace(node, mode=number))
    return said(error=errors, status=1 if errors else 0)


def _ln(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    if "s" not in options or len(words) != 2:
        ctx.note_unknown(" ".join(argv))
        return said(error="lab: ln makes symbolic links only: ln -s TARGET NAME\n", status=1)
    ctx.change(posixpath.normpath(posixpath.join(ctx.cwd, words[1])), link(words[0]))
    return said()


# ------------------------------------------------------------------------------------- the machine


def _echo(ctx: Context, argv: list[str]) -> Answer:
    words = argv[1:]
    newline = "\n"
    if words[:1] == ["-n"]:
        words, newline = words[1:], ""
    elif words[:1] == ["-e"]:
        words = [w.encode().decode("unicode_escape") for w in words[1:]]
    return said(" ".join(words) + newline)


def _printf(ctx: Context, argv: list[str]) -> Answer:
    form = argv[1].replace("\\n", "\n").replace("\\t", "\t") if len(argv) > 1 else ""
    values = argv[2:]
    slots = len(re.findall(r"%[sd]", form))
    out = ""
    while True:
        used, values = values[:slots], values[slots:]
        fill = iter(used)
        for piece in re.findall(r"%[sd%]|[^%]+|%", form):
            out += next(fill, "") if piece in ("%s", "%d") else piece.replace("%%", "%")
        if not values or not slots:
            return said(out)


def _uname(ctx: Context, argv: list[str]) -> Answer:
    options, _ = _flags(argv)
    m = ctx.life.machine
    parts = {"s": "Linux", "n": ctx.system.hostname, "r": m.kernel, "v": m.kernel_version, "m": "x86_64", "o": "GNU/Linux"}
    chosen = parts if "a" in options else {k: v for k, v in parts.items() if k in options} or {"s": "Linux"}
    return said(" ".join(chosen.values()) + "\n")


def _id(ctx: Context, argv: list[str]) -> Answer:
    options, _ = _flags(argv)
    user = ctx.user
    if "u" in options:
        return said(f"{user.name if 'n' in options else user.uid}\n")
    return said(f"uid={user.uid}({user.name}) gid={user.uid}({user.name}) groups={user.uid}({user.name})\n")


def _date(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv, "d")
    form = next((w[1:] for w in words if w.startswith("+")), "%a %b %e %H:%M:%S UTC %Y")
    if "I" in options or "iso-8601" in options:
        form = "%Y-%m-%dT%H:%M:%S+00:00"
    now = ctx.life.now
    form = (
        form.replace("%s", str(int(now))).replace("%N", f"{int(now % 1 * 1e9):09d}").replace("%3N", f"{int(now % 1 * 1e3):03d}")
    )
    return said(datetime.fromtimestamp(now, UTC).strftime(form.replace("%F", "%Y-%m-%d").replace("%T", "%H:%M:%S")) + "\n")


def _uptime(ctx: Context, argv: list[str]) -> Answer:
    options, _ = _flags(argv)
    m, now = ctx.life.machine, ctx.life.now
    started = m.boot.started_at if ctx.system is m.host else ctx.system.started_at
    if "s" in options:
        return said(f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%S}\n")
    up = int(now - started)
    days = f"{up // 86400} day{'s' if up >= 172800 else ''}, " if up >= 86400 else ""
    span = f"{up % 86400 // 3600:2d}:{up % 3600 // 60:02d}" if up % 86400 >= 3600 else f"{up % 3600 // 60} min"
    if "p" in options:
        return said(f"up {days}{span}\n")
    return said(f" {datetime.fromtimestamp(now, UTC):%H:%M:%S} up {days}{span},  0 users,  load average: 1.12, 1.08, 1.02\n")


def _ps(ctx: Context, argv: list[str]) -> Answer:
    options = " ".join(argv[1:])
    rows = visible_processes(ctx.life, ctx.system)
    if found := re.search(r"-?-?p(?:id)?[ =]?(\d[\d,]*)", options):
        wanted = {int(p) for p in found[1].split(",")}
        rows = [r for r in rows if r[0] in wanted]
    custom = re.search(r"-o\s*(\S+)", options)
    out = ""
    names = [n.rstrip("=") for n in custom[1].split(",")] if custom else ["user", "pid", "ppid", "lstart", "args"]
    silent = custom is not None and custom[1].endswith("=")
    titles = {"args": "COMMAND", "cmd": "CMD", "comm": "COMMAND", "lstart": f"{'STARTED':>24}", "etimes": "ELAPSED"}
    if not silent:
        out += " ".join(titles.get(n, n.upper()) for n in names) + "\n"
    for pid, ppid, p, cgroup in rows:
        values = {
            "user": "root" if p.uid == 0 else str(p.uid),
            "pid": f"{pid:7d}",
            "ppid": f"{ppid:7d}",
            "comm": p.comm,
            "args": " ".join(p.argv),
            "cmd": " ".join(p.argv),
            "lstart": f"{datetime.fromtimestamp(p.started_at, UTC):%a %b %e %H:%M:%S %Y}",
            "etimes": f"{int(ctx.life.now - p.started_at):7d}",
            "cgroup": f"0::{cgroup}",
            "stat": "Ss",
            "rss": str(p.rss_kib),
        }
        out += " ".join(values.get(n, "-") for n in names) + "\n"
    return said(out, status=0 if rows else 1)


def _pgrep(ctx: Context, argv: list[str]) -> Answer:
    options, words = _flags(argv)
    pattern = re.compile(words[0] if words else "")
    rows = [
        r for r in visible_processes(ctx.life, ctx.system) if pattern.search(" ".join(r[2].argv) if "f" in options else r[2].comm)
    ]
    return said("".join(f"{r[0]}{' ' + ' '.join(r[2].argv) if 'a' in options else ''}\n" for r in rows), status=0 if rows else 1)


def _free(ctx: Context, argv: list[str]) -> Answer:
    gib = ctx.life.machine.hw.memory_gib
    unit = 1 if {"-g", "-h"} & set(argv) else 1024 if "-m" in argv else 1048576
    head = "               total        used        free      shared  buff/cache   available\n"
    row = [gib, gib // 10, gib * 6 // 10, 1, gib * 3 // 10, gib * 84 // 100]
    return said(
        head + "Mem:    " + "".join(f"{v * unit:12d}" for v in row) + "\nSwap:   " + "".join(f"{0:12d}" for _ in range(3)) + "\n"
    )


async def _sleep(ctx: Context, argv: list[str]) -> Answer:
    await asyncio.sleep(sum(float(a.rstrip("s")) for a in argv[1:]))
    return said()


def _which(ctx: Context, argv: list[str]) -> Answer:
    names = [w for w in argv[1:] if not w.startswith("-")]
    found = [n for n in names if n in ctx_commands(ctx)]
    return said("".join(f"/usr/bin/{n}\n" for n in found), status=0 if len(found) == len(names) else 1)


def ctx_commands(ctx: Context) -> frozenset[str]:
    """The names of the commands that this user's machine has; set when the table of commands is put together."""
    return _known


_known: frozenset[str] = frozenset()


def set_known(names: frozenset[str]) -> None:
    """Tell ``command -v`` and ``which`` what there is."""
    global _known
    _known = names


def _exit(ctx: Context, argv: list[str]) -> Answer:
    raise Leave(int(argv[1]) if len(argv) > 1 else 0)


COMMANDS: dict[str, Handler] = {
    "cat": _cat,
    "head": _head,
    "tail": _tail,
    "wc": _wc,
    "sort": _sort,
    "uniq": _uniq,
    "grep": _grep,
    "egrep": _grep,
    "tr": _tr,
    "cut": _cut,
    "sha256sum": _sha256sum,
    "ls": _ls,
    "readlink": _readlink,
    "realpath": _realpath,
    "stat": _stat,
    "test": _test,
    "[": _test,
    "find": _find,
    "mktemp": _mktemp,
    "tee": _tee,
    "touch": _touch,
    "mkdir": _mkdir,
    "cp": _copy,
    "mv": _copy,
    "rm": _rm,
    "rmdir": _rm,
    "chmod": _chmod,
    "ln": _ln,
    "echo": _echo,
    "printf": _printf,
    "uname": _uname,
    "id": _id,
    "date": _date,
    "uptime": _uptime,
    "ps": _ps,
    "pgrep": _pgrep,
    "free": _free,
    "sleep": _sleep,
    "which": _which,
    "exit": _exit,
    "logout": _exit,
    "true": lambda ctx, argv: said(),
    "false": lambda ctx, argv: said(status=1),
    "sync": lambda ctx, argv: said(),
    "hostname": lambda ctx, argv: said((ctx.system.address + " " if "-I" in argv else ctx.system.hostname) + "\n"),
    "whoami": lambda ctx, argv: said(ctx.user.name + "\n"),
    "pwd": lambda ctx, argv: said(ctx.cwd + "\n"),
    "who": lambda ctx, argv: said(),
    "w": _uptime,
    "nproc": lambda ctx, argv: said("256\n"),
    "env": lambda ctx, argv: said("".join(f"{k}={v}\n" for k, v in ctx.env.items())),
    "clear": lambda ctx, argv: said("\x1b[H\x1b[2J"),
}

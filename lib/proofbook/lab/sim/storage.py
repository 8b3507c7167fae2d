"""Commands about file systems and attributes of files on a simulated machine; see :mod:`proofbook.lab.sim.locks`."""

from __future__ import annotations

import posixpath

from proofbook.lab.sim.locks import SIZE_KIB, free_kib, why_not
from proofbook.lab.sim.shell import Answer, Context, Handler, said
from proofbook.lab.sim.vfs import FileNode


def _paths(ctx: Context, words: list[str]) -> list[str]:
    return [posixpath.normpath(posixpath.join(ctx.cwd, w)) for w in words if not w.startswith(("-", "+")) or w == "-"]


def _chattr(ctx: Context, argv: list[str]) -> Answer:
    words = [w for w in argv[1:] if w != "--"]
    mode, paths = words[0], _paths(ctx, words[1:])
    missing = [p for p in paths if not ctx.tree.exists(p)]
    if ctx.user.uid != 0 or missing:
        why = f"No such file or directory while trying to stat {missing[0]}" if missing else "Operation not permitted"
        return said(error=f"chattr: {why}\n", status=1)
    ctx.system.immutable = (ctx.system.immutable | set(paths)) if mode == "+i" else ctx.system.immutable - set(paths)
    ctx.life.machine.revision += 1
    return said()


def _lsattr(ctx: Context, argv: list[str]) -> Answer:
    out, errors = "", ""
    for path in _paths(ctx, argv[1:]):
        if ctx.tree.exists(path):
            out += f"{'----i---------e-------' if path in ctx.system.immutable else '--------------e-------'} {path}\n"
        else:
            errors += f"lsattr: No such file or directory while trying to stat {path}\n"
    return said(out, error=errors, status=1 if errors else 0)


def _mount(ctx: Context, argv: list[str]) -> Answer:
    """Only what remounts the root file system."""
    options = argv[argv.index("-o") + 1].split(",") if "-o" in argv else []
    if ctx.user.uid != 0 or "remount" not in options or argv[-1] != "/":
        return said(error="mount: only root can do that\n", status=32)
    ctx.system.read_only = "ro" in options
    ctx.life.machine.revision += 1
    return said()


def _findmnt(ctx: Context, argv: list[str]) -> Answer:
    if not ctx.tree.exists(argv[-1]):
        return said(status=1)
    return said(f"/ zfs {'ro' if ctx.system.read_only else 'rw'},relatime,xattr,posixacl\n")


def _fallocate(ctx: Context, argv: list[str]) -> Answer:
    """``fallocate -l BYTES FILE``: the file has the size, nobody needs its content."""
    size, path = int(argv[argv.index("-l") + 1]), _paths(ctx, argv[-1:])[0]
    error = why_not(ctx.system, path)
    if error is not None or size > free_kib(ctx.system) * 1024:
        return said(error="fallocate: fallocate failed: No space left on device\n", status=1)
    ctx.change(path, FileNode("file", mode=0o644, mtime=ctx.life.now, bytes_claimed=size))
    return said()


def _df(ctx: Context, argv: list[str]) -> Answer:
    free = max(0, free_kib(ctx.system))
    used = SIZE_KIB - free
    if "-i" in argv:
        return said(
            "Filesystem          Inodes IUsed     IFree IUse% Mounted on\nrpool/ROOT/pve-1 871135013 46885 871088128    1% /\n"
        )
    head = "Filesystem       1024-blocks     Used Available Capacity Mounted on"
    if "-P" not in argv:
        head = "Filesystem       1K-blocks     Used Available Use% Mounted on"
    root = f"rpool/ROOT/pve-1 {SIZE_KIB} {used} {free} {100 * used // SIZE_KIB:>3}% /\n"
    # WHY: a path that was named asks for its file system alone
    models = "" if argv[-1].startswith("/") else "tank/models     7516192768 1288490188 6227702580  18% /models\n"
    return said(f"{head}\n{root}{models}")


COMMANDS: dict[str, Handler] = {
    "chattr": _chattr,
    "lsattr": _lsattr,
    "mount": _mount,
    "findmnt": _findmnt,
    "fallocate": _fallocate,
    "df": _df,
}

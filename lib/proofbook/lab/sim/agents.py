"""The programs that proofbook sends to a machine, answered from the state instead of being run.

They are recognised by their text; what they print here is what they print on a real machine.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from proofbook import remote
from proofbook.lab.sim import change_agents, looking, p2p, resets
from proofbook.lab.sim.os_state import Container
from proofbook.lab.sim.shell import Answer, Context, said, write_file
from proofbook.lab.sim.vfs import FileNode
from proofbook.remote.gpu_reset import RESET_ATTEMPT
from proofbook.remote.looking import SGLANG_VERSION, VERIFY_UNIT
from proofbook.remote.p2p import P2P_PROBE

Program = Callable[[Context, list[str]], Answer | Awaitable[Answer]]


def recognise(text: str) -> Program | None:
    """The answer to one of the known programs; None for any other."""
    return _PROGRAMS.get(text) or change_agents.PROGRAMS.get(text)


def _read_files(ctx: Context, patterns: list[str]) -> Answer:
    out: list[str] = []
    for pattern in patterns:
        paths = ctx.tree.glob(pattern, cwd=ctx.cwd)
        if not paths:
            out += _nothing(ctx, pattern)
        links: list[str] = []
        for path in paths:
            _, node = ctx.tree.lookup(path, follow=False, cwd=ctx.cwd)
            if node.kind == "link":
                links += [f"L {path}", f"|{node.target}"]
            elif node.kind == "dir":
                out.append(f"D {path}")
            elif node.kind == "device":
                out += [f"E {path}", "|not a regular file"]
            else:
                out += _file(ctx, path)
        out += links
    return Answer(0, "".join(line + "\n" for line in out).encode("utf-8", "surrogateescape"))


def _file(ctx: Context, path: str) -> list[str]:
    try:
        data = ctx.tree.read(path, cwd=ctx.cwd)
    except OSError as error:
        return [f"E {path}", f"|{error.strerror}"]
    text = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    return [f"F {path}", *(f"|{line}" for line in text.removesuffix("\n").split("\n") if text)]


def _nothing(ctx: Context, pattern: str) -> list[str]:
    """Nothing there, or a folder on the way that this user may not read."""
    fixed = posixpath.dirname(pattern.split("*")[0].split("?")[0].split("[")[0]) or "/"
    try:
        ctx.tree.listdir(fixed, cwd=ctx.cwd)
    except PermissionError as error:
        return [f"E {pattern}", f"|{error.strerror}"]
    except OSError:
        return [f"N {pattern}"]
    return [f"N {pattern}"]


def _open_devices(ctx: Context, paths: list[str]) -> Answer:
    lines = []
    for path in paths:
        try:
            _, node = ctx.tree.lookup(path, cwd=ctx.cwd)
        except OSError:
            lines.append(f"absent {path}")
            continue
        reason = _why_not(ctx, node)
        lines.append(f"error {path} {reason}" if reason else f"ok {path}")
    return said("".join(line + "\n" for line in lines))


def _why_not(ctx: Context, node: FileNode) -> str:
    if node.error:
        return {"EPERM": "Operation not permitted", "EIO": "Input/output error", "ENXIO": "No such device or address"}.get(
            node.error, node.error
        )
    return "" if ctx.tree.may(node, 4) and ctx.tree.may(node, 2) else "Permission denied"


def cuda(ctx: Context) -> tuple[int, int, str]:
    """(result of cuInit, device count, its error text) for a CUDA program that starts here."""
    hw = ctx.life.machine.hw
    denied = ctx.system.devices if isinstance(ctx.system, Container) else {}
    needed = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    if not hw.nvidia.loaded or not hw.live_gpus():
        return 100, 0, "no CUDA-capable device is detected"
    if hw.nvidia.library_version != hw.nvidia.module_version:
        return 803, 0, "system has unsupported display driver / cuda driver combination"
    if any(denied.get(d, "ENOENT" if isinstance(ctx.system, Container) else "") for d in needed):
        return 999, 0, "unknown error"
    return 0, len([g for g in ctx.life.machine.gpus_of(ctx.system) if g.condition == "ok"]), ""


def _cu_init(ctx: Context, arguments: list[str]) -> Answer:
    code, devices, error = cuda(ctx)
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so." + ctx.life.machine.hw.nvidia.library_version
    value = {"library": library, "cuInit": code, "devices": devices if code == 0 else None, "error": error or None}
    return said(json.dumps(value) + "\n")


def _put(ctx: Context, arguments: list[str]) -> Answer:
    path, mode, keep, want = arguments
    tree, data, out = ctx.tree, ctx.stdin, ""
    try:
        _, old = tree.lookup(path, follow=False)
    except OSError:
        old = None
    if old is not None and old.kind == "link":
        return said(error=f"{path} is a symbolic link to {old.target}: name the file that it leads to\n", status=1)
    if old is not None and old.kind != "file":
        return said(error=f"{path} is not a regular file\n", status=1)
    folder = posixpath.dirname(path)
    if not tree.exists(folder):
        return said(error=f"{folder} is not a folder\n", status=1)
    got = hashlib.sha256(data).hexdigest()
    if got != want:
        return said(error=f"the content arrived damaged: sha256 {got} instead of {want}\n", status=1)
    if old is not None and keep == "1":
        backup = f"{path}.proofbook-{datetime.fromtimestamp(ctx.life.now, UTC):%Y%m%dT%H%M%SZ}"
        base, n = backup, 1
        while ctx.tree.exists(backup):
            n += 1
            backup = f"{base}-{n}"
        ctx.change(backup, old)
        out += f"backup {backup}\n"
    if write_file(ctx, path, data):
        return said(error=f"no file can be made in {folder}\n", status=1)
    node = ctx.system.files[path]
    if node is not None:
        node.mode = int(mode, 8)
    return said(out + f"sha256 {got}\n")


_PROGRAMS: dict[str, Program] = {
    remote.READ_FILES: _read_files,
    remote.OPEN_DEVICES: _open_devices,
    remote.CU_INIT: _cu_init,
    remote.PUT: _put,
    VERIFY_UNIT: looking.verify_unit,
    SGLANG_VERSION: looking.sglang_version,
    P2P_PROBE: p2p.play,
    RESET_ATTEMPT: resets.play,
}

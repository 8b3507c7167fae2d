"""The files of a simulated machine: a tree of nodes by absolute path, with symbolic links, modes and read errors.

A :class:`Tree` is a stack of layers: rendered ones (``/proc``, ``/sys``, ``/dev`` follow from the machine's state each
time) below one that is written (``/etc``, ``/root``, ``/tmp``). Parent directories need no node of their own. A tree does not
change once it is made.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["file", "link", "dir", "device"]

#: How many symbolic links are followed before ELOOP, as Linux has it.
_MAX_LINKS = 40


@dataclass
class FileNode:
    """One file. ``content`` may be a function, for files whose content is made when they are read (``/proc/uptime``).

    ``error`` is the errno name (``"EIO"``, ``"EPERM"``) that opening it gives; for a device too.
    """

    kind: Kind
    content: bytes | Callable[[], bytes] = b""
    target: str = ""
    mode: int = 0o644
    error: str = ""
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0  # seconds since the epoch; 0: the boot of the machine
    major: int = 0
    minor: int = 0
    bytes_claimed: int = 0  # the size of a file whose content nobody needs: weights

    @property
    def size(self) -> int:
        """In bytes; 0 for what has none."""
        return self.bytes_claimed or (len(self.read()) if self.kind == "file" and not self.error else 0)

    def read(self) -> bytes:
        """The content. Raises OSError when ``error`` says so."""
        if self.error:
            raise os_error(self.error, "")
        return self.content() if callable(self.content) else self.content


def file(content: bytes | str | Callable[[], bytes] = b"", mode: int = 0o444, error: str = "") -> FileNode:
    """A regular file; text is encoded as UTF-8 as it is, with no newline added."""
    data = content.encode() if isinstance(content, str) else content
    return FileNode("file", data, mode=mode, error=error)


def link(target: str) -> FileNode:
    """A symbolic link."""
    return FileNode("link", target=target, mode=0o777)


def directory(mode: int = 0o755) -> FileNode:
    """A directory that is there even when it is empty."""
    return FileNode("dir", mode=mode)


def device(major: int, minor: int, mode: int = 0o666, error: str = "") -> FileNode:
    """A character device; ``error`` is the errno name that opening it gives."""
    return FileNode("device", mode=mode, major=major, minor=minor, error=error)


#: A directory that is there because something is in it.
_UNNAMED = directory()


def os_error(name: str, path: str) -> OSError:
    """The OSError of an errno name: ``os_error("EPERM", "/dev/x")``."""
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), path)


class Tree:
    """Layers of nodes seen as one file system; later layers hide earlier ones. ``None`` in a layer is a deleted file.

    ``base`` is a tree below all of the layers, shared and not copied: most of the files of a machine are those of its PCI bus.
    """

    def __init__(self, layers: Iterable[Mapping[str, FileNode | None]], uid: int = 0, base: Tree | None = None) -> None:
        self.uid = uid
        self._nodes: dict[str, FileNode] = {}
        below = base._nodes if base is not None else {}
        names = base._names if base is not None else {}
        for layer in layers:
            for path, node in layer.items():
                if node is not None:
                    self._nodes[path] = node
                    continue
                if path in below or path in names:
                    self._nodes, below, names = below | self._nodes, {}, {}  # what is hidden cannot be shared
                inside = path + "/"
                for gone in [p for p in self._nodes if p == path or p.startswith(inside)]:
                    del self._nodes[gone]
        self._below = below
        # The names in each directory, those of the tree below apart.
        self._names: dict[str, set[str]] = {"/": set()}
        self._names_below = names
        self._directories: dict[str, str] = {}  # where directories really are, by absolute path
        for path in self._nodes:
            self._announce(path)

    def _announce(self, path: str) -> None:
        # Plain operations of strings, here and in lookup: both are what a simulated machine spends most of its time in.
        while path != "/":
            parent, _, name = path.rpartition("/")
            parent = parent or "/"
            known = self._names.get(parent)
            if known is None:
                known = self._names[parent] = set()
            elif name in known:
                return
            known.add(name)
            path = parent

    def _node(self, path: str) -> FileNode | None:
        """What there is at a real path; None when there is nothing."""
        node = self._nodes.get(path) or self._below.get(path)
        if node is None and (path in self._names or path in self._names_below):
            return _UNNAMED
        return node

    def lookup(self, path: str, *, follow: bool = True, cwd: str = "/") -> tuple[str, FileNode]:
        """The real path and the node of ``path``. Raises OSError (ENOENT, ENOTDIR, ELOOP) naming ``path`` as it was given."""
        folder, _, name = (path if path.startswith("/") else posixpath.join(cwd, path)).rpartition("/")
        if name not in ("", ".", "..") and (real := self._directories.get(folder) or self._directory(folder)):
            step = f"{real}/{name}" if real != "/" else f"/{name}"
            node = self._node(step)
            if node is None:
                raise os_error("ENOENT", path)
            if node.kind != "link" or not follow:
                return step, node
        return self._walk(path, follow=follow, cwd=cwd)

    def _directory(self, path: str) -> str:
        """Where a directory really is; "" when there is none. It is walked to once."""
        try:
            real, node = self._walk(path, follow=True, cwd="/")
        except OSError:
            return ""  # what is wrong on the way is said by whoever goes all of it
        if node.kind != "dir":
            return ""
        self._directories[path] = real
        return real

    def _walk(self, path: str, *, follow: bool, cwd: str) -> tuple[str, FileNode]:
        pending = [p for p in posixpath.join(cwd, path).split("/") if p and p != "."]
        trailing = path.endswith("/")
        here, hops = "/", 0
        while pending:
            part = pending.pop(0)
            if part == "..":
                here = here.rpartition("/")[0] or "/"
                continue
            step = f"{here}/{part}" if here != "/" else f"/{part}"
            node = self._node(step)
            if node is None:
                raise os_error("ENOENT", path)
            if node.kind == "link" and (pending or follow or trailing):
                hops += 1
                if hops > _MAX_LINKS:
                    raise os_error("ELOOP", path)
                here = "/" if node.target.startswith("/") else here
                pending = [p for p in node.target.split("/") if p and p != "."] + pending
                continue
            if pending and node.kind != "dir":
                raise os_error("ENOTDIR", path)
            here = step
        found = self._node(here) or _UNNAMED
        if trailing and found.kind != "dir":
            raise os_error("ENOTDIR", path)
        return here, found

    def exists(self, path: str, *, follow: bool = True, cwd: str = "/") -> bool:
        try:
            self.lookup(path, follow=follow, cwd=cwd)
        except OSError:
            return False
        return True

    def may(self, node: FileNode, bit: int) -> bool:
        """Whether this tree's user has permission ``bit`` (4 read, 2 write, 1 execute)."""
        if self.uid == 0:
            return True
        return bool((node.mode >> (6 if node.uid == self.uid else 0)) & bit)

    def read(self, path: str, *, cwd: str = "/") -> bytes:
        """The content of a file. Raises OSError with the path as it was given."""
        _, node = self.lookup(path, cwd=cwd)
        if node.kind == "dir":
            raise os_error("EISDIR", path)
        if not self.may(node, 4):
            raise os_error("EACCES", path)
        if node.error:
            raise os_error(node.error, path)
        if node.kind == "device":
            return b"" if path == "/dev/null" else self._endless(path)
        return node.read()

    @staticmethod
    def _endless(path: str) -> bytes:
        raise os_error("EINVAL", path)  # nothing that a runbook does reads from a GPU's device node

    def listdir(self, path: str, *, cwd: str = "/") -> list[str]:
        """The names in a directory, sorted. Raises OSError."""
        real, node = self.lookup(path, cwd=cwd)
        if node.kind != "dir":
            raise os_error("ENOTDIR", path)
        if not self.may(node, 4):
            raise os_error("EACCES", path)
        return sorted({*self._names.get(real, ()), *self._names_below.get(real, ())})

    def glob(self, pattern: str, *, cwd: str = "/") -> list[str]:
        """The paths that a shell's pattern matches, sorted, never entering names that begin with a dot unasked."""
        absolute = pattern.startswith("/")
        paths = ["/" if absolute else ""]
        for part in [p for p in pattern.split("/") if p]:
            magic = any(c in part for c in "*?[")
            found: list[str] = []
            for base in paths:
                if not magic:
                    candidate = posixpath.join(base, part)
                    if self.exists(candidate, follow=False, cwd=cwd):
                        found.append(candidate)
                    continue
                try:
                    names = self.listdir(base or ".", cwd=cwd)
                except OSError:
                    continue
                found += [
                    posixpath.join(base, n)
                    for n in names
                    if fnmatch.fnmatchcase(n, part) and (part.startswith(".") or not n.startswith("."))
                ]
            paths = found
        return paths

"""known_hosts files as OpenSSH reads them: hashed names, ports, patterns, negation, @revoked.

WHY not paramiko's reader: it knows no patterns and no markers, keeps one key type per host, and takes the first file
that has an entry as the whole truth.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from proofbook.errors import ChangedHostKey, UnknownHostKey


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public host key: its type ("ssh-ed25519") and its blob."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As ssh-keygen -l prints it: ``SHA256:…``."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a known_hosts file. ``marker``: "", "@revoked" or "@cert-authority"."""

    marker: str
    names: tuple[str, ...]
    key: HostKey
    file: str
    line: int


def lookup_name(host: str, port: int) -> str:
    """The name under which OpenSSH keeps a host: ``host``, or ``[host]:port`` for another port than 22."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def read(files: Iterable[str]) -> list[Entry]:
    """The entries of all files that exist; lines that are not understood are passed over, as OpenSSH does."""
    return [entry for file in files for entry in _read_file(os.path.expanduser(file))]


def _read_file(file: str) -> list[Entry]:
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as lines:
            found = [_entry(line, file, n) for n, line in enumerate(lines, 1)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnknownHostKey(
            f"{file} cannot be read: {error.strerror}", hint="make it readable, or name another known_hosts file"
        ) from error
    return [entry for entry in found if entry]


def _entry(line: str, file: str, number: int) -> Entry | None:
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3:
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return Entry(marker, tuple(words[0].split(",")), HostKey(words[1], blob), file, number)


def matching(entries: Iterable[Entry], name: str) -> list[Entry]:
    """The entries for ``name`` (see :func:`lookup_name`)."""
    return [e for e in entries if _matches(e.names, name)]


def _matches(patterns: Sequence[str], name: str) -> bool:
    hit = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            hit = hit or _hashed(pattern, name)
        elif pattern.startswith("!"):
            if _glob(pattern[1:].lower()).match(name):
                return False
        elif _glob(pattern.lower()).match(name):
            hit = True
    return hit


def _hashed(pattern: str, name: str) -> bool:
    _, _, salt, digest = (*pattern.split("|"), "", "")[:4]
    try:
        want = base64.b64decode(digest, validate=True)
        got = hmac.new(base64.b64decode(salt, validate=True), name.encode(), hashlib.sha1).digest()
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(want, got)


@lru_cache(maxsize=4096)
def _glob(pattern: str) -> re.Pattern[str]:
    """OpenSSH's patterns know ``*`` and ``?``; brackets are literal, since they belong to ``[host]:port``."""
    return re.compile("".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern) + r"\Z", re.DOTALL)


def trusted_kinds(host: str, port: int, files: Iterable[str]) -> list[str]:
    """The key types that are trusted for this host; the ones to ask the server for first."""
    name = lookup_name(host, port)
    return list(dict.fromkeys(e.key.kind for e in matching(read(files), name) if not e.marker))


def verify(host: str, port: int, key: HostKey, files: Sequence[str], *, shown_as: str = "") -> None:
    """Hold ``key`` against the known_hosts files. ``host`` is the name that they know it by (or HostKeyAlias).

    Raises UnknownHostKey or ChangedHostKey, with what to compare and what to type.
    """
    shown = shown_as or host
    name = lookup_name(host, port)
    entries = read(files)
    here = matching(entries, name)
    if any(e.marker == "@revoked" and e.key == key for e in here):
        raise ChangedHostKey(
            f"{shown} answers with a revoked host key: {key}",
            hint="do not connect; find out how the machine came to use a key that was withdrawn",
        )
    trusted = [e for e in here if not e.marker]
    if any(e.key == key for e in trusted):
        return
    if trusted:
        raise _changed(shown, name, key, trusted)
    # A key that is trusted for the host itself is the same machine on another port, as for OpenSSH.
    if port != 22 and any(e.key == key and not e.marker for e in matching(entries, host.lower())):
        return
    raise _unknown(shown, name, key, files, certificates=any(e.marker == "@cert-authority" for e in here))


def _key_file(kind: str) -> str:
    short = next((s for s in ("ed25519", "ecdsa", "rsa") if s in kind), "*")
    return f"/etc/ssh/ssh_host_{short}_key.pub"


def _unknown(shown: str, name: str, key: HostKey, files: Sequence[str], *, certificates: bool) -> UnknownHostKey:
    file = files[0] if files else "~/.ssh/known_hosts"
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}"
    also = "\n    (its host certificate is not looked at: only plain keys are)" if certificates else ""
    return UnknownHostKey(
        f"the host key of {shown} is not known: {key}",
        hint=(
            "compare it on the machine itself (console, BMC), then trust it:\n"
            f"    ssh-keygen -lf {_key_file(key.kind)}        # there: must print {key.fingerprint}\n"
            f"    echo {shlex.quote(line)} >> {_path(file)}        # here{also}"
        ),
    )


def _changed(shown: str, name: str, key: HostKey, trusted: Sequence[Entry]) -> ChangedHostKey:
    known = "\n".join(f"    trusted:  {e.key}   ({e.file}:{e.line})" for e in trusted)
    files = " ; ".join(f"ssh-keygen -R {shlex.quote(name)} -f {_path(f)}" for f in dict.fromkeys(e.file for e in trusted))
    return ChangedHostKey(
        f"the host key of {shown} is not the trusted one\n{known}\n    answered: {key}",
        hint=(
            "another machine may be answering. If the machine was reinstalled on purpose, compare on its console:\n"
            f"    ssh-keygen -lf {_key_file(key.kind)}        # there: must print {key.fingerprint}\n"
            f"    {files}        # here: forget the old key, then connect again to see how to trust the new one"
        ),
    )


def _path(file: str) -> str:
    return file if file.startswith("~/") else shlex.quote(file)

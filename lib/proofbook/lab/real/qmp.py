"""QEMU's machine protocol: one JSON object a line over a socket in the machine's folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from proofbook.errors import LabError

__all__ = ["Channel"]


class Channel:
    """An open channel, past its greeting. Raises LabError when nobody answers."""

    def __init__(
        self, folder: Path, name: str, *, patience_s: float = 10.0, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._buffer = b""
        self._seen: list[dict[str, Any]] = []
        self._socket = _connect(folder, name, patience_s, process)
        self._socket.settimeout(patience_s)
        try:
            self._receive()
            self.command("qmp_capabilities")
        except OSError as error:
            self._socket.close()
            raise LabError(f"QEMU does not answer in {folder}: {error}", hint=f"see {folder / 'qemu.log'}") from error

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def command(self, name: str, *, timeout_s: float = 120.0, **arguments: Any) -> Any:
        """Ask, and wait for the answer. Raises LabError for a refusal or no answer."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
            while True:
                answer = self._receive()
                if "return" in answer:
                    return answer["return"]
                if "error" in answer:
                    raise LabError(f"QEMU refuses {name}: {answer['error'].get('desc', answer['error'])}")
                self._seen.append(answer)
        except OSError as error:
            raise LabError(f"QEMU does not answer {name}: {error}") from error

    def monitor(self, line: str, *, timeout_s: float = 120.0) -> str:
        """A line of QEMU's human monitor. Raises LabError when it complains."""
        said = str(self.command("human-monitor-command", **{"command-line": line}, timeout_s=timeout_s)).strip()
        if said.startswith("Error"):
            raise LabError(f"QEMU's monitor refuses {line!r}: {said}")
        return said

    def events(self) -> list[dict[str, Any]]:
        """What came by itself since last asked; [] also when QEMU is gone."""
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                self._seen.append(self._receive())
        seen, self._seen = self._seen, []
        return seen

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionResetError("the channel was closed")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _connect(folder: Path, name: str, patience_s: float, process: subprocess.Popen[bytes] | None) -> socket.socket:
    # WHY over a descriptor: a socket's path holds 107 bytes, and a folder may lie deeper.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                channel.connect(f"/proc/self/fd/{descriptor}/{name}")
                return channel
            except OSError as error:
                channel.close()
                if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                    raise LabError(f"QEMU does not listen in {folder}: {error}", hint=f"see {folder / 'qemu.log'}") from error
                time.sleep(0.02)
    finally:
        os.close(descriptor)

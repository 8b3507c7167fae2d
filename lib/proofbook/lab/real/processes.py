"""Processes of this machine: run one to its end, know one again, end one for certain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from proofbook.errors import LabError
from proofbook.lab.real.packages import tool

__all__ = ["Process", "run", "started"]


def run(program: str, *arguments: str, stdin: bytes = b"", timeout_s: float = 600.0) -> bytes:
    """A program's stdout. Raises LabError with its stderr when it fails."""
    try:
        done = subprocess.run([tool(program), *arguments], input=stdin, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{program} did not finish within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise LabError(f"{program} {' '.join(arguments[:3])} failed with {done.returncode}: {said[-400:]}")
    return done.stdout


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks since boot; "" when there is no such process or it is a zombie.

    A number of a process is given again to another; number and start together are not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can be known again after this one ended."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, started(pid))

    def runs(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # it may be a child of this very process, and would stay a zombie
        return bool(self.started) and started(self.pid) == self.started

    def kill(self) -> None:
        """SIGKILL, at once and without waiting; nothing when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.runs():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def end(self, number: signal.Signals = signal.SIGTERM, *, patience_s: float = 10.0) -> None:
        """Send a signal and wait; SIGKILL when that does not help. Returns when the process is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.runs():
                return
            for send, wait_s in ((number, patience_s), (signal.SIGKILL, 10.0)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, send)
                if select.select([handle], [], [], wait_s)[0]:
                    self.runs()  # takes its exit status, if it was a child
                    return
            raise LabError(f"process {self.pid} does not end, not even by SIGKILL")
        finally:
            os.close(handle)

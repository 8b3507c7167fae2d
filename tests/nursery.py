"""A process that has loaded the lab's server once, and forks a machine from itself whenever a test needs one.

It is for tests only: half of what a simulated machine costs there is that Python loads it, and the tests need hundreds. What
a machine does afterwards is the same code in a process of its own. Tests of how machines are started do without it.

As a program it takes one datagram a machine from the socket whose descriptor is its argument: the machine's folder, with the
descriptors of its log and of the pipe that is told when it serves. It answers with the machine's PID, and ends with its socket.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path


class Born:
    """A machine's process, with what the lab's client asks of one that it started itself."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self) -> int:
        return 0  # nobody's child but the nursery's, which waits for none

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process, from outside."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    def spawn(self, home: Path, ready: int, log: int) -> Born:
        """In place of the client's own: a machine from the nursery."""
        socket.send_fds(self._socket, [os.fsencode(home)], [ready, log])
        return Born(int(self._socket.recv(64)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def main(socket_fd: int) -> None:
    from proofbook.lab.sim import server

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    asked = socket.socket(fileno=socket_fd)
    while True:
        fds = array.array("i")
        home, ancillary, _, _ = asked.recvmsg(4096, socket.CMSG_SPACE(2 * fds.itemsize))
        if not home:
            return
        for _, _, data in ancillary:
            fds.frombytes(data)
        ready, log = fds
        pid = os.fork()
        if pid == 0:
            asked.close()
            _be_a_machine(server, os.fsdecode(home), ready, log)
        asked.send(str(pid).encode())
        os.close(ready)
        os.close(log)


def _be_a_machine(server: object, home: str, ready: int, log: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        status = server.main(["server", home, str(ready)])  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))

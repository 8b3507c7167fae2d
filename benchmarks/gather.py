"""How fast forty reads of one host are, against the same reads by OpenSSH's client and by fabric.

    python benchmarks/gather.py [--repeats 5]

Starts its own OpenSSH server on loopback, and a relay in front of it that delays every byte by half a round-trip time.
Client, relay and server share the cores of one machine, so only the ratios mean something. All peers run in one pass,
interleaved; the numbers are medians of wall seconds.

whole     a process each: start, imports, connection, forty reads, end
warm      the connection is open and the imports are done
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "transports")]

from sshd import Sshd, make_key  # noqa: E402

from proofbook.model import Command, command  # noqa: E402
from proofbook.transports.ssh import SshTransport  # noqa: E402

FILES = """\
/proc/version /proc/cmdline /proc/uptime /proc/loadavg /proc/meminfo /proc/stat /proc/mounts /proc/locks /proc/cpuinfo
/proc/interrupts /proc/vmstat /proc/diskstats /proc/partitions /proc/swaps /proc/devices /proc/filesystems /proc/misc
/proc/iomem /proc/sys/kernel/osrelease /proc/sys/kernel/random/boot_id /sys/class/net/lo/mtu /etc/hostname
/etc/os-release /etc/passwd
"""
READS: list[Command] = [command("cat", path) for path in FILES.split()] + [
    command(*line.split())
    for line in """uname -r
uname -a
id -u
hostname
who
df -P /
ls -l /dev/null /dev/zero
ls /sys/class/net
ls /sys/bus/pci/devices
ps -e -o pid,comm
nproc
date -u
getconf PAGESIZE
stat -c %Y /etc/passwd
readlink /proc/self/exe
sh -c true""".splitlines()
]
assert len(READS) == 40

#: What an engineer would write by hand for one call of ssh: each read, framed with its exit status and its size.
FRAME = """out=$({line} 2>&1); printf '%s %s %s\\n' {n} $? ${{#out}}; printf '%s\\n' "$out"\n"""
BATCH = "".join(FRAME.format(line=shlex.join(c.argv), n=n) for n, c in enumerate(READS)) + "echo end\n"


# -------------------------------------------------------------------------------------------- the relay


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass bytes on, each ``delay_s`` after it came; many may be under way at once."""
    waiting: deque[tuple[float, bytes]] = deque()
    more = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not waiting:
                more.clear()
                await more.wait()
            due, data = waiting.popleft()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not data:
                writer.close()
                return
            writer.write(data)

    delivery = asyncio.create_task(deliver())
    while True:
        try:
            data = await reader.read(65536)
        except ConnectionError:  # a peer that ends without a goodbye: pass its end on
            data = b""
        waiting.append((time.monotonic() + delay_s, data))
        more.set()
        if not data:
            break
    await delivery


def relay(port: int, to: int, rtt_s: float) -> None:
    """A TCP relay from ``port`` to ``to`` on loopback with a round-trip time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(_carry(reader, far_writer, rtt_s / 2), _carry(far_reader, writer, rtt_s / 2), return_exceptions=True)

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


# -------------------------------------------------------------------------------------------- the peers


def transport(port: int, key: str, known_hosts: str) -> SshTransport:
    return SshTransport("127.0.0.1", port=port, identity_file=key, known_hosts=known_hosts, ssh_config=False)


def ours(ssh: SshTransport) -> None:
    results = ssh.gather(READS)
    assert all(r.exit_status == 0 for r in results), [r for r in results if r.exit_status != 0]


def fabric_connection(port: int, key: str) -> Any:
    import fabric

    settings = {"key_filename": key, "look_for_keys": False, "allow_agent": False}
    return fabric.Connection("127.0.0.1", user="root", port=port, connect_kwargs=settings)


def fabrics(connection: Any) -> None:
    for c in READS:
        connection.run(shlex.join(c.argv), hide=True, in_stream=False)


#: Whole programs that import only what their peer needs; the commands come on standard input.
ONCE = {
    "proofbook": """
import json, sys
from proofbook.model import command
from proofbook.transports.ssh import SshTransport
port, key, known_hosts = sys.argv[1:]
with SshTransport("127.0.0.1", port=int(port), identity_file=key, known_hosts=known_hosts, ssh_config=False) as ssh:
    assert all(r.exit_status == 0 for r in ssh.gather([command(*argv) for argv in json.load(sys.stdin)]))
""",
    "fabric": """
import json, shlex, sys
import fabric
port, key, _ = sys.argv[1:]
settings = {"key_filename": key, "look_for_keys": False, "allow_agent": False}
with fabric.Connection("127.0.0.1", user="root", port=int(port), connect_kwargs=settings) as connection:
    for argv in json.load(sys.stdin):
        connection.run(shlex.join(argv), hide=True, in_stream=False)
""",
}


def whole(peer: str, port: int, key: str, known_hosts: str) -> Callable[[], None]:
    if peer == "ssh batch":
        options = ["-F", "none", "-o", f"UserKnownHostsFile={known_hosts}", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        argv = ["ssh", *options, "-i", key, "-p", str(port), "root@127.0.0.1", "sh -s"]

        def run() -> None:
            done = subprocess.run(argv, input=BATCH.encode(), capture_output=True, check=True)
            assert done.stdout.endswith(b"end\n")

        return run
    argv = [sys.executable, "-c", ONCE[peer], str(port), key, known_hosts]
    commands = json.dumps([c.argv for c in READS]).encode()

    def run_python() -> None:
        subprocess.run(argv, input=commands, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "lib")})

    return run_python


# ------------------------------------------------------------------------------------------ the measure


def medians(peers: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(repeats):
        for name, run in peers.items():
            start = time.perf_counter()
            run()
            took[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in took.items()}


def table(title: str, took: dict[str, float], goals: dict[str, str]) -> None:
    print(f"\n{title}")
    for name, seconds in took.items():
        print(f"  {name:<14} {seconds:7.3f} s   {seconds / took['proofbook']:6.2f} x proofbook   {goals.get(name, '')}")


def measure(port: int, key: str, known_hosts: str, title: str, repeats: int) -> None:
    peers = {name: whole(name, port, key, known_hosts) for name in ("ssh batch", "proofbook", "fabric")}
    goals = {"ssh batch": "(goal: at least 0.5)", "fabric": "(goal at 20 ms: at least 5)"}
    table(f"{title}, whole process", medians(peers, repeats), goals)
    connection = fabric_connection(port, key)
    with transport(port, key, known_hosts) as ssh:
        warm: dict[str, Callable[[], None]] = {"proofbook": lambda: ours(ssh), "fabric": lambda: fabrics(connection)}
        for run in warm.values():
            run()
        table(f"{title}, warm", medians(warm, repeats), {"fabric": "(goal at 20 ms: at least 15)"})
    connection.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        key = make_key(Path(folder) / "id")
        (Path(folder) / "sshd").mkdir()
        server = Sshd(Path(folder) / "sshd", key)
        server.start("MaxStartups 100")
        far = Sshd.free_port()
        with server.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{far} {server.public_key}\n")
        between = multiprocessing.get_context("spawn").Process(target=relay, args=(far, server.port, 0.020), daemon=True)
        between.start()
        try:
            measure(server.port, str(key), str(server.known_hosts), "loopback", given.repeats)
            measure(far, str(key), str(server.known_hosts), "20 ms round trip", given.repeats)
        finally:
            between.terminate()
            between.join()
            server.stop()


if __name__ == "__main__":
    main()

"""How fast logs are judged, as ratios against the plain way: ``json.loads`` of every line and a loop of ``re.search``.

    python benchmarks/logs.py [LINES] [--engines hyperscan,re2,re]

The journal is made up: lines of about 880 bytes with the usual fields, 0.2 % of which hold something. All times are CPU
seconds of this process; the answer of every way is compared, so that a fast way that misses something is no way.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from proofbook.signatures import load
from proofbook.signatures.prefilter import chunks, prefilter
from proofbook.signatures.streams import judge_journal_json, judge_text
from proofbook.triage import judge_paste

SIGNATURES = load()
FIELDS = {
    "_CMDLINE": "python -m sglang.launch_server --model-path /models/qwen --speculative-algorithm EAGLE --tp-size 4 --port 30000",
    "_SYSTEMD_CGROUP": "/system.slice/sglang-qwen.service",
    "_SYSTEMD_UNIT": "sglang-qwen.service",
    "_SYSTEMD_INVOCATION_ID": "5f0d1c2b3a4958677685940312213344",
    "_BOOT_ID": "0123456789abcdef0123456789abcdef",
    "_MACHINE_ID": "fedcba9876543210fedcba9876543210",
    "_HOSTNAME": "gpu01",
    "_TRANSPORT": "stdout",
    "_EXE": "/opt/venv/bin/python3.11",
    "_SELINUX_CONTEXT": "unconfined",
    "_STREAM_ID": "9f8e7d6c5b4a39281706f5e4d3c2b1a0",
    "SYSLOG_IDENTIFIER": "sglang-qwen",
    "PRIORITY": "6",
    "_PID": "15462",
    "_UID": "0",
    "_GID": "0",
}


def journal(lines: int, share: float = 0.002) -> bytes:
    """A journal of so many lines; ``share`` of them hold an example of some fault."""
    pick = random.Random(1)
    faults = [
        (s, e)
        for s in SIGNATURES
        for e in s.examples
        if s.kind == "fault" and not e.startswith(("AMD-Vi: Event logged [D", "NVRM: The"))
    ]
    out = []
    for i in range(lines):
        own: dict[str, str] = {"__CURSOR": f"s=0a1b;i={i:x};b=0123;m={i:x};t={i:x};x=f00"}
        if pick.random() < share:
            signature, message = pick.choice(faults)
            kernel = "kernel" in signature.sources
            if kernel:
                own |= {"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel"}
        else:
            message = (
                f'[2026-03-09 16:02:28] INFO: 10.0.0.7:{i % 60000} - "POST /generate HTTP/1.1" 200 OK, {pick.random():.6f} s'
            )
        stamp = {"__REALTIME_TIMESTAMP": str(1773072147000000 + i), "__MONOTONIC_TIMESTAMP": str(123456789 + i)}
        out.append(json.dumps({**stamp, **FIELDS, **own, "MESSAGE": message}))
    return ("\n".join(out) + "\n").encode()


def kernel_log(lines: int, share: float = 0.002) -> bytes:
    """A kernel log of so many lines, as dmesg prints them; ``share`` of them hold an example of some fault."""
    pick = random.Random(2)
    faults = [e for s in SIGNATURES for e in s.examples if s.kind == "fault" and s.sources == {"kernel"} and "NVRM: The" not in e]
    out = []
    for i in range(lines):
        message = pick.choice(faults) if pick.random() < share else f"usb {i % 9}-{i % 7}: new high-speed USB device number {i}"
        out.append(f"[{i / 100:12.6f}] {message}")
    return ("\n".join(out) + "\n").encode()


def plain_text(data: bytes) -> int:
    """The plain way for text: try every pattern on every line."""
    patterns = [s.pattern for s in SIGNATURES if "kernel" in s.sources and not s.id.startswith("xid-")]
    patterns.append(SIGNATURES["xid-79"].pattern)
    return sum(1 for line in data.decode().splitlines() for pattern in patterns if pattern.search(line[15:]))


def filter_alone(data: bytes, engine: str) -> int:
    """The pre-filter over the same buffer: nothing can be found faster that way."""
    wanted = prefilter(SIGNATURES.anchors, engine)
    return sum(1 for _, piece in chunks(data) for _ in wanted.lines(piece))


def plain(data: bytes) -> Counter[str]:
    """The plain way: decode every line, try every pattern."""
    found: Counter[str] = Counter()
    patterns = [(s.id, s.sources, s.pattern) for s in SIGNATURES if not s.id.startswith("xid-")]
    xid = SIGNATURES["xid-79"].pattern
    for line in data.splitlines():
        entry = json.loads(line)
        text, source = entry["MESSAGE"], "kernel" if entry["_TRANSPORT"] == "kernel" else "service"
        for name, sources, pattern in patterns:
            if source in sources and pattern.search(text):
                found[name] += 1
        if source == "kernel":
            hit = xid.search(text)
            if hit:
                found[f"xid-{hit['code']}"] += 1
    return found


def decode_only(data: bytes) -> None:
    for line in data.splitlines():
        json.loads(line)


def one_alternation(data: bytes) -> int:
    """Decode every line, try one alternation of all anchors."""
    pattern = re.compile("|".join(map(re.escape, SIGNATURES.anchors)))
    return sum(1 for line in data.splitlines() if pattern.search(json.loads(line)["MESSAGE"]))


def timed(what: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    result = what()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--engines", default=",".join(e for e in ("hyperscan", "re2", "re") if e == "re" or find_spec(e)))
    parser.add_argument("--plain-lines", type=int, default=20_000, help="lines for the plain ways; their time is scaled up")
    options = parser.parse_args()
    data = journal(options.lines)
    part = journal(min(options.plain_lines, options.lines))
    scale = options.lines / min(options.plain_lines, options.lines)
    print(f"{options.lines} lines, {len(data) / options.lines:.0f} bytes a line, {len(SIGNATURES)} signatures")
    plain_s, expected = timed(lambda: plain(part))
    rows = [("json + re.search of every pattern", plain_s * scale)]
    rows.append(("json + one alternation (says only which lines)", timed(lambda: one_alternation(part))[0] * scale))
    rows.append(("json alone", timed(lambda: decode_only(part))[0] * scale))
    for engine in options.engines.split(","):
        judge_journal_json(data[:10_000], engine=engine)  # compiles the filter
        seconds, said = timed(lambda engine=engine: judge_journal_json(data, engine=engine))  # type: ignore[misc]
        rows.append((f"proofbook, {engine}", seconds))
        small = judge_journal_json(part, engine=engine)
        got = {f.signature for f in small.findings}
        missing = {n for n in expected if n not in got and SIGNATURES[n].kind == "fault"}  # type: ignore[attr-defined]
        if missing:
            raise SystemExit(f"{engine} missed {sorted(missing)}")
        del said
    show(rows, options.lines)
    text, some = kernel_log(options.lines), kernel_log(min(options.plain_lines, options.lines))
    print(f"\n{options.lines} plain kernel lines, {len(text) / options.lines:.0f} bytes a line")
    rows = [("re.search of every pattern", timed(lambda: plain_text(some))[0] * scale)]
    for engine in options.engines.split(","):
        judge_text(text[:10_000], engine=engine)
        rows.append((f"pre-filter alone, {engine}", timed(lambda engine=engine: filter_alone(text, engine))[0]))  # type: ignore[misc]
        rows.append((f"proofbook, {engine}", timed(lambda engine=engine: judge_text(text, engine=engine))[0]))  # type: ignore[misc]
    rows.append(("proofbook triage (any mixture)", timed(lambda: judge_paste(text))[0]))
    show(rows, options.lines)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"most memory: {most:.0f} MiB, of which the logs themselves {(len(data) + len(text)) / 2**20:.0f} MiB")


def show(rows: list[tuple[str, float]], lines: int) -> None:
    base = rows[0][1]
    for name, seconds in rows:
        print(f"{name:50} {seconds:8.2f} CPU s {lines / seconds:12,.0f} lines/s {base / seconds:7.1f} ×")


if __name__ == "__main__":
    main()

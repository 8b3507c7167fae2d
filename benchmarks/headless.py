"""A headless reboot verification on the lab, beside papermill on an empty notebook, in one run.

Both are whole processes. The verification reboots a simulated machine and waits for it, without a settling time; the lab's
own waits (the machine is down, services start) are real time that passes on its fast clock, and are measured apart.

    python benchmarks/headless.py [REPEATS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMPTY = {
    "cells": [],
    "metadata": {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    },
    "nbformat": 4,
    "nbformat_minor": 5,
}
RUN = [sys.executable, "-m", "proofbook.cli", "run", "reboot-verification", "--host", "lab:healthy", "--json"]
PARAMETERS = ["-p", "reboot=true", "-p", "settle_minutes=0"]


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return time.perf_counter() - start, done.stdout


def one(folder: Path, environment: dict[str, str]) -> tuple[float, float, float]:
    """Seconds of (papermill on an empty notebook, our approved run, the lab's waits within it)."""
    notebook = folder / "empty.ipynb"
    notebook.write_text(json.dumps(EMPTY))
    words = ["-m", "papermill", str(notebook), str(folder / "out.ipynb"), "--no-progress-bar"]
    empty, _ = timed([sys.executable, *words], environment)
    outputs = ["--outputs", str(folder / "outputs")]
    _, waiting = timed([*RUN, *PARAMETERS, *outputs], environment)
    digest = json.loads(waiting.splitlines()[-1])["waiting_for"]["digest"]
    ours, answer = timed([*RUN, *PARAMETERS, *outputs, "--approve", digest, "--approver", "benchmark"], environment)
    outcome = json.loads(answer.splitlines()[-1])
    if outcome["verdict"] != "PASS":
        raise SystemExit(f"the run came out as {outcome['verdict']}: {outcome['message']}")
    facts = json.loads((Path(outcome["record"]) / "record.json").read_text())["plans"][0]["applied"]["facts"]
    # the lab lets 300 of its seconds pass in a real one while somebody waits
    return empty, ours, facts["ready_after_s"] / 300


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory(prefix="proofbook-bench-") as name:
        folder = Path(name)
        environment = {**os.environ, "PROOFBOOK_LAB_DIR": str(folder / "lab")}
        try:
            rows = [one(folder, environment) for _ in range(repeats)]
        finally:
            subprocess.run([sys.executable, "-m", "proofbook.cli", "lab", "reset"], env=environment, check=False)
    empty, ours, waits = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"load {os.getloadavg()[0]:.1f}, medians of {repeats}:")
    print(f"papermill on an empty notebook {empty:.2f} s, ours {ours:.2f} s, the lab's waits {waits:.2f} s")
    print(f"ours / (papermill empty + waits) = {ours / (empty + waits):.2f}   (goal: at most 2)")


if __name__ == "__main__":
    main()

"""The whole runbook mtp-enablement on a real systemd: what does not work is seen, and taken back; so is what cannot be shown.

The server is the stand-in as a real process, the faults are real ones of a machine: somebody else's process on the port, a
process that outlives the stop, a package that is upgraded under a plan. What a box has not (GPUs) is not claimed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofbook import launch
from proofbook.lab.real.places import Places
from proofbook.lab.sim import checkpoint
from proofbook.probes.systemd import UnitProcess

from .conftest import Machine, machine_in, until
from .runs import Told
from .test_box_mtp import DROP_IN, MAIN, PLAIN, UNIT, _http, digest, faults

pytestmark = pytest.mark.box

MODEL = "/models/qwen"
QUICK = {"host": "lab:box", "concurrency": "1", "stability_minutes": 0.2, "guard_minutes": 50.0}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine that `lab:box` names in these tests, with a checkpoint (configuration and index; its shards are holes)."""
    cache = Places.default().cache
    lab = tmp_path_factory.mktemp("lab")
    (lab / "cache").symlink_to(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(lab))
        with machine_in(Places.default().state, "box") as machine:
            for path, node in checkpoint.files(MODEL).items():
                if node.bytes_claimed:
                    machine.sh(f"truncate -s {node.bytes_claimed} {path}")
                else:
                    assert isinstance(node.content, bytes)
                    machine.write(path, node.content.decode())
            yield machine


@pytest.fixture
def plain(box: Machine) -> Iterator[Machine]:
    """A server without speculation that serves."""
    box.sh(f"rm -rf {MAIN}.d /etc/proofbook-standin.json")
    box.write(MAIN, PLAIN)
    box.sh(f"systemctl daemon-reload; systemctl reset-failed {UNIT} || true; systemctl restart {UNIT}")
    until(lambda: _http(box) == "200", "it serves")
    yield box
    box.close()


def enable(folder: Path, **parameters: Any) -> Told:
    """The runbook, headless, approved as by a person who read the plan."""
    given = {**QUICK, **parameters}
    waiting = launch.launch("mtp-enablement", given, outputs=folder)
    assert waiting.waiting_for, waiting.message
    given |= {"approved": waiting.waiting_for["digest"], "approver": "tester"}
    return Told(launch.launch("mtp-enablement", given, outputs=folder), folder)


def rung(told: Told) -> str:
    decided: str = told.record["decisions"][-1]["rung"]
    return decided


def left_on(machine: Machine) -> str:
    """What a finished change must not leave behind."""
    files = "find /var/lib/proofbook/changes -mindepth 1; find /etc/systemd/system -name 'proofbook-guard-*'"
    return machine.sh(files, check=False)


def taken_back(told: Told, machine: Machine, before: str) -> None:
    """The old state, byte for byte, and serving."""
    assert (told.outcome.status, told.outcome.exit_code) == ("rolled-back", 5), told.outcome
    assert digest(machine) == before
    assert "--speculative-algorithm" not in machine.value(UnitProcess(UNIT)).argv
    until(lambda: _http(machine) == "200", "the old configuration serves")
    assert left_on(machine) == ""


def test_all_is_well_and_a_container_cannot_show_it(plain: Machine, tmp_path: Path) -> None:
    """It takes effect, drafts are accepted, it pays; and its kernel log is not to be seen, so it is taken back all the same."""
    before = digest(plain)
    told = enable(tmp_path / "out")
    assert told.worst_of("FAIL") == []
    assert [line for line in told.worst_of("UNKNOWN") if not line.startswith("mtp.Holds kernel")] == []
    assert set(told.verdicts("mtp.SpeculationIsOn", "after the start").values()) == {"PASS"}, told.record["findings"]
    assert rung(told) == "INCONCLUSIVE"
    taken_back(told, plain, before)


def test_silently_off(plain: Machine, tmp_path: Path) -> None:
    before = digest(plain)
    faults(plain, **{"silently-off": {}})
    told = enable(tmp_path / "out")
    assert rung(told) == "FAIL_SPEC_OFF"
    taken_back(told, plain, before)


def test_a_crash_loop_behind_an_automatic_restart(plain: Machine, tmp_path: Path) -> None:
    plain.write(f"{MAIN}.d/10-restart.conf", "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=always\nRestartSec=1\n")
    plain.sh("systemctl daemon-reload")
    before = digest(plain)
    faults(plain, **{"out-of-memory": {}})
    told = enable(tmp_path / "out")
    assert rung(told) == "FAIL_STARTUP"
    taken_back(told, plain, before)


def test_a_release_that_does_not_know_a_flag_any_more(plain: Machine, tmp_path: Path) -> None:
    """The package is upgraded while the plan waits: when systemd reads the new unit, another release lies there."""
    upgrade = json.dumps({"version": "0.5.20"})
    plain.write("/etc/systemd/system/upgrade.path", f"[Path]\nPathExists={DROP_IN}\n")
    plain.write("/root/upgrade.json", upgrade + "\n")
    copy = "/bin/cp /root/upgrade.json /etc/proofbook-standin.json"
    plain.write("/etc/systemd/system/upgrade.service", f"[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart={copy}\n")
    plain.sh("systemctl daemon-reload; systemctl start upgrade.path")
    before = digest(plain)
    told = enable(tmp_path / "out")
    plain.sh("systemctl stop upgrade.path upgrade.service; rm /etc/systemd/system/upgrade.*; systemctl daemon-reload")
    assert rung(told) == "FAIL_STARTUP"
    assert any("--mamba" in line or "unrecognized" in line for line in [told.record["summary"], *told.worst_of("FAIL")])
    taken_back(told, plain, before)


#: Waits until the port is free, takes it and answers every question after the server's health with 200; for so many seconds.
OLD_OWNER = """\
import http.server, socketserver, sys, threading, time
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *words): pass
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
while True:
    try:
        server = Server(("127.0.0.1", 30000), Healthy)
        break
    except OSError:
        time.sleep(0.005)
threading.Timer(float(sys.argv[1]), server.shutdown).start()
server.serve_forever()
"""


def test_somebody_elses_process_takes_the_port(plain: Machine, tmp_path: Path) -> None:
    before = digest(plain)
    plain.write("/root/old_owner.py", OLD_OWNER)
    plain.sh("systemd-run --quiet --unit=old-owner python3 /root/old_owner.py 10")
    told = enable(tmp_path / "out")
    assert rung(told) == "FAIL_STARTUP"
    assert any("old_owner.py" in line or "old-owner" in line or "30000" in line for line in told.worst_of("FAIL"))
    taken_back(told, plain, before)


def test_a_process_that_outlives_the_stop(plain: Machine, tmp_path: Path) -> None:
    leftover = "ExecStartPost=/bin/sh -c 'setsid sleep 4711 > /dev/null 2>&1 &'"
    plain.write(f"{MAIN}.d/10-kill-mode.conf", f"[Service]\nKillMode=process\nTimeoutStopSec=3\n{leftover}\n")
    plain.sh(f"systemctl daemon-reload; systemctl restart {UNIT}")
    until(lambda: _http(plain) == "200", "it serves")
    before = digest(plain)
    told = enable(tmp_path / "out")
    assert rung(told) == "FAIL_STARTUP"
    assert any("sleep" in line for line in [told.record["summary"], *told.worst_of("FAIL")]), told.worst_of("FAIL")
    plain.sh("pkill -f 'sleep 4711' || true")
    assert digest(plain) == before

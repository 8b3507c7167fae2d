"""Speculation turned on, kept and taken back on a real systemd, with the stand-in for a server as a real process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.changes.unit_file import EnableMTP
from proofbook.checks.mtp.speculation import Speculation
from proofbook.host import Host, WallClock
from proofbook.intent import ServiceSpec
from proofbook.model import Applied, Command, Observation, Plan, Probe, Result, Seen
from proofbook.probes import drive
from proofbook.probes.change_state import GuardState
from proofbook.probes.sglang import LauncherHelp, Listener, PortOwner, Processes, ServerInfo, Version
from proofbook.probes.sglang_flags import check_argv, flags_of
from proofbook.probes.systemd import UnitProcess, UnitState
from proofbook.probes.unit_files import UnitFiles, UnitSettings

from .conftest import Machine, until

pytestmark = pytest.mark.box

UNIT = "sglang-qwen.service"
URL = "http://127.0.0.1:30000/health"
MAIN = f"/etc/systemd/system/{UNIT}"
DROP_IN = f"{MAIN}.d/90-proofbook-mtp.conf"
PLAIN = """\
[Unit]
Description=Qwen (MTP enabled)

[Service]
Environment=PYTHONPATH=/opt/sglang-stand-in
ExecStart=/usr/bin/python3 -m sglang.launch_server --model-path /models/qwen --tp-size 4 --host 127.0.0.1 \\
  --port 30000 --mem-fraction-static 0.85
Restart=on-failure
RestartSec=1

[Install]
WantedBy=multi-user.target
"""
SERVICE = ServiceSpec(name=UNIT, url=URL, ready_s=120)
MTP = Speculation(mem_fraction_static=0.75)


@dataclass
class Hands:
    """What a run gives to a change, without its journal. ``acts``: what was done; ``dies_at``: the runner dies there."""

    host: Host
    run_id: str
    acts: list[str] = field(default_factory=list)
    dies_at: str = ""
    told: list[str] = field(default_factory=list)

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        if self.dies_at and self.dies_at in what:
            raise KeyboardInterrupt(what)
        self.acts.append(what)
        return self.host.transport.run(do)

    def look(self, *probes: Probe[Any]) -> Seen:
        answers = drive(probes, self.host.gather)
        return Seen(Observation(p, a.value, a.unknown, datetime.now(UTC), "") for p, a in answers.items())

    peek = look

    def proven(self, note: str) -> None:
        self.told.append(note)

    def plan(self, change: EnableMTP) -> Plan:
        return change.plan(self.look(*change.needs()), self.host.identity)

    def apply(self, change: EnableMTP, plan: Plan) -> Applied:
        return change.apply(plan, self, self.told.append)  # type: ignore[arg-type]

    def rollback(self, change: EnableMTP, plan: Plan) -> Applied:
        return change.rollback(plan, self, self.told.append)  # type: ignore[arg-type]

    def confirm(self, change: EnableMTP, plan: Plan) -> Applied:
        return change.confirm(plan, self, self.told.append)  # type: ignore[arg-type]


@pytest.fixture
def plain(shared: Machine) -> Iterator[Machine]:
    """A server without speculation that serves."""
    shared.sh(f"rm -rf {MAIN}.d /etc/proofbook-standin.json")
    shared.write(MAIN, PLAIN)
    shared.sh(f"systemctl daemon-reload; systemctl reset-failed {UNIT} || true; systemctl restart {UNIT}")
    until(lambda: _http(shared) == "200", "it serves")
    yield shared
    shared.sh("cd /etc/systemd/system; for t in proofbook-guard-*.timer; do systemctl disable --now $t 2>/dev/null || true; done")
    shared.sh("rm -rf /var/lib/proofbook /etc/systemd/system/proofbook-guard-*; systemctl daemon-reload")


def _http(machine: Machine) -> str:
    return machine.sh(f"curl -s -o /dev/null -w '%{{http_code}}' {URL} || true")


@contextlib.contextmanager
def hands_on(machine: Machine, run_id: str, dies_at: str = "") -> Iterator[Hands]:
    with machine.transport() as transport:
        host = Host("box", transport, WallClock())
        host.prove()
        yield Hands(host, run_id, dies_at=dies_at)


def digest(machine: Machine) -> str:
    """The unit's files, byte for byte."""
    return machine.sh(f"cd /etc/systemd/system; find {UNIT} {UNIT}.d -type f 2>/dev/null | sort | xargs sha256sum")


def faults(machine: Machine, **named: Any) -> None:
    machine.write("/etc/proofbook-standin.json", json.dumps({"faults": named}) + "\n")


@pytest.mark.parametrize("style", ["drop-in", "edit"])
def test_turned_on_kept_and_taken_back_later(plain: Machine, style: str) -> None:
    before = digest(plain)
    change = EnableMTP(SERVICE, None, MTP, style=style)  # type: ignore[arg-type]
    with hands_on(plain, f"kept-{style}") as hands:
        plan = hands.plan(change)
        assert plan.actions, plan.facts
        assert any("systemd-analyze verify: exit 0" in fact for fact in plan.facts), plan.facts
        assert digest(plain) == before, "a plan changes nothing"
        applied = hands.apply(change, plan)
        assert applied.outcome == "done", applied
        assert applied.facts["ready_by"] == "its log"
        assert applied.facts["invocation"] != applied.facts["invocation_before"]
        assert [step["key"] for step in applied.facts["timeline"]][-1] == "ready"
        assert "draft" in [step["key"] for step in applied.facts["timeline"]]
        info = plain.value(ServerInfo("http://127.0.0.1:30000"))
        assert (info.algorithm, info.number("speculative_num_draft_tokens")) == ("EAGLE", 6)
        assert hands.look(GuardState(f"kept-{style}")).value(GuardState(f"kept-{style}")).guarded
        again = hands.apply(change, plan)
        assert (again.outcome, again.facts["restarted"]) == ("done", False)
        assert again.facts["main_pid"] == applied.facts["main_pid"]
        assert hands.confirm(change, plan).outcome == "confirmed"
        assert plain.sh("ls /etc/systemd/system | grep -c proofbook-guard || true") == "0"
        assert hands.plan(change).empty
        undone = hands.rollback(change, plan)
        assert undone.outcome == "rolled-back", undone
    assert digest(plain) == before
    assert "--speculative-algorithm" not in plain.value(UnitProcess(UNIT)).argv


@pytest.mark.parametrize(
    "at",
    ["keep the old files", "arm the guard", "put the new files", "stop sglang", "forget earlier", "start sglang", ""],
)
def test_the_runner_dies_and_another_takes_it_back(plain: Machine, at: str) -> None:
    before = digest(plain)
    change = EnableMTP(SERVICE, None, MTP)
    with hands_on(plain, "dead", at) as hands:
        plan = hands.plan(change)
        if at:
            with pytest.raises(KeyboardInterrupt):
                hands.apply(change, plan)
        else:
            assert hands.apply(change, plan).outcome == "done"
    with hands_on(plain, "dead") as hands:
        undone = hands.rollback(change, plan)
    assert undone.outcome == "rolled-back", undone
    assert digest(plain) == before
    assert _http(plain) == "200"
    assert "--speculative-algorithm" not in plain.value(UnitProcess(UNIT)).argv
    assert plain.sh("ls /var/lib/proofbook/changes 2>/dev/null || true") == ""


@pytest.mark.parametrize("at", ["keep the old files", "arm the guard", "put the new files", "stop sglang", "start sglang"])
def test_the_runner_dies_and_another_goes_on(plain: Machine, at: str) -> None:
    change = EnableMTP(SERVICE, None, MTP)
    with hands_on(plain, "resumed", at) as hands:
        plan = hands.plan(change)
        with pytest.raises(KeyboardInterrupt):
            hands.apply(change, plan)
    with hands_on(plain, "resumed") as hands:
        applied = hands.apply(change, plan)
        assert applied.outcome == "done", applied
        assert hands.confirm(change, plan).outcome == "confirmed"
    assert plain.sh(f"sha256sum {DROP_IN}").split()[0] == plan.settings["files"][0]["new_sha256"]
    assert "NEXTN" in plain.value(UnitProcess(UNIT)).argv


def test_a_start_that_fails_says_why_and_goes_back(plain: Machine) -> None:
    before = digest(plain)
    faults(plain, **{"draft-oom": {}})
    change = EnableMTP(SERVICE, None, MTP)
    with hands_on(plain, "oom") as hands:
        plan = hands.plan(change)
        applied = hands.apply(change, plan)
        assert applied.outcome == "failed", applied
        assert "out of memory" in applied.summary.lower(), applied.summary
        plain.sh("rm /etc/proofbook-standin.json")
        assert hands.rollback(change, plan).outcome == "rolled-back"
    assert digest(plain) == before


def test_a_flag_that_the_release_does_not_know_is_no_plan(plain: Machine) -> None:
    change = EnableMTP(SERVICE, None, Speculation(more=(("--speculative-draft-epsilon", "0.2"),)))
    with hands_on(plain, "unknown") as hands:
        plan = hands.plan(change)
    assert plan.empty
    assert any("--speculative-accept-threshold-single" in fact for fact in plan.facts), plan.facts


def test_somebody_changed_the_unit_after_the_plan(plain: Machine) -> None:
    change = EnableMTP(SERVICE, None, MTP, style="edit")
    with hands_on(plain, "drift") as hands:
        plan = hands.plan(change)
        plain.sh(f"echo '# mine' >> {MAIN}")
        with pytest.raises(Exception, match="make a new plan"):
            hands.apply(change, plan)
        assert plain.sh(f"tail -n 1 {MAIN}") == "# mine"


def test_what_the_probes_see_of_it(plain: Machine) -> None:
    version = plain.value(Version(UNIT))
    assert version.version.startswith("0.5.")
    help_text = plain.value(LauncherHelp(UNIT))
    known = flags_of(version.version, help_text)
    assert known.by == "the launcher's own --help"
    assert "--speculative-algorithm" in known.flags
    assert [p for p in check_argv(plain.value(UnitProcess(UNIT)).argv, version.version, help_text) if p.fatal] == []
    state = plain.value(UnitState(UNIT))
    processes = plain.value(Processes(UNIT))
    assert [p.rank for p in processes.schedulers] == ["TP0", "TP1", "TP2", "TP3"]
    assert processes.detokenizer is not None
    assert state.main_pid in [p.pid for p in processes.processes]
    (listener,) = plain.value(PortOwner(30000))
    assert isinstance(listener, Listener)
    assert state.main_pid in [pid for pid, _ in listener.owners]
    settings = plain.value(UnitSettings(UNIT))
    assert (settings.restart, settings.restart_s, settings.timeout_stop_s) == ("on-failure", 1.0, 15.0)
    files = plain.value(UnitFiles(UNIT, also=(DROP_IN,)))
    assert files.main.text == PLAIN
    assert files.also == {DROP_IN: None}

"""What a machine shows when somebody turns MTP on by hand, in each scenario that is about that."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from proofbook.lab.sim import scenario

from .conftest import Bench

UNIT = "sglang-qwen.service"
IN = "pct exec 102 -- "
DROP_IN = f"/etc/systemd/system/{UNIT}.d/50-mtp.conf"
MTP = (
    "--speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
)  # fmt: skip

#: Scenario: (a line that is run when the server should be ready, what its answer must hold). {log}: this invocation's lines.
SHOW = IN + f"systemctl show {UNIT} --property="
LOG = IN + f"journalctl --all -o cat --no-pager -u {UNIT}"
HEALTH = IN + "curl -sS -m 10 -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/health"
MODELS = HEALTH.replace("/health", "/v1/models")
FAULTS: dict[str, tuple[str, str]] = {
    "mtp-engine-silently-off": (LOG, r"speculative_algorithm='EAGLE'(?s:(?!Qwen3_5ForCausalLMMTP).)*$"),
    "mtp-argv-lost": (SHOW + "ExecStart", r"^ExecStart=\{ (?!.*speculative)"),
    "mtp-description-lies": (SHOW + "Description", r"\(MTP enabled\)"),
    "mtp-simulated-acceptance": (SHOW + "Environment", r"SGLANG_SIMULATE_ACC_LEN=5\.5"),
    "mtp-draft-out-of-memory": (LOG, r"Memory pool end(?s:.)*CUDA out of memory(?s:.)*code=killed, status=9/KILL"),
    "mtp-not-enough-memory": (LOG, r"Not enough memory\. Please try to increase --mem-fraction-static"),
    "mtp-unknown-flag": (LOG, r"sglang serve: error: unrecognized arguments: --mamba-scheduler-strategy extra_buffer"),
    "mtp-no-tensors": (IN + "grep -c mtp /models/Qwen3.5-122B-A10B/model.safetensors.index.json; true", r"^0\n$"),
    "mtp-tail-looks-healthy": (SHOW + "NRestarts,Result", r"Result=signal"),
    "mtp-old-port-owner": (HEALTH + "; " + LOG, r"^200(?s:.)*\[Errno 98\] error while attempting to bind"),
    "mtp-leftover-process": (LOG, r"remains running after unit stopped(?s:.)*The memory capacity is unbalanced"),
    "mtp-slow-start": (HEALTH + "; true", r"^000"),
    "mtp-crash-loop": (SHOW + "NRestarts,ActiveState", r"NRestarts=[1-9]"),
    "mtp-env-line-lost": (SHOW + "Environment", r"^Environment=HF_HUB_OFFLINE=1\n$"),
    "mtp-continuation-blank": (IN + f"systemctl cat {UNIT}", r"--disable-custom-all-reduce \\ \n"),
    "mtp-p2p-hang": (SHOW + "ActiveState; " + HEALTH, r"ActiveState=active\n000"),
    "mtp-api-key": (MODELS + "; " + LOG, r"^401(?s:.)*api_key='lab-example-\w+'(?s:.)* 401 Unauthorized"),
    "mtp-api-key-not-given": (MODELS, r"^401$"),
    "mtp-journal-suppressed": (LOG.replace("-u " + UNIT, "-b 0"), rf"Suppressed \d+ messages from {UNIT}"),
}

#: Scenarios that show it when they are asked for tokens: (requests, what is so then).
ASKED = {
    "mtp-draft-weights-missing": "no draft is accepted",
    "mtp-crash-on-first-request": "dead",
    "mtp-crash-on-structured": "dead",
    "mtp-crash-on-17th": "dead",
    "mtp-crash-after-minutes": "dead later",
    "mtp-zombie-scheduler": "hangs",
    "mtp-hang-health-200": "hangs",
    "mtp-slower-than-before": "slower",
    "mtp-gain-only-low-concurrency": "drafts are accepted",
    "mtp-wrong-after-cache-hit": "another answer",
    "mtp-sglang-0-5-9": "drafts are accepted",
    "mtp-sglang-0-5-13": "drafts are accepted",
    "mtp-sglang-0-5-20": "drafts are accepted",
    "mtp-restart-explains-it": "a restart is as good",
}


def turn_on(machine: Bench) -> None:
    """As somebody does by hand: a drop-in, a reload, a restart; then a minute."""
    unit = machine.say(IN + f"cat /etc/systemd/system/{UNIT}")
    start = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    new = machine.life.machine.containers["102"].packages["sglang"] == "0.5.20"
    flag = "--mamba-radix-cache-strategy" if new else "--mamba-scheduler-strategy"
    text = f"[Service]\nEnvironment=SGLANG_ENABLE_SPEC_V2=1\nExecStart=\n{start} {MTP} {flag} extra_buffer\n"
    machine.say(IN + f"mkdir -p /etc/systemd/system/{UNIT}.d")
    assert machine.argv("pct", "exec", "102", "--", "tee", DROP_IN, stdin=text.encode()).status == 0
    machine.say(IN + "systemctl daemon-reload")
    machine.say(IN + f"systemctl restart {UNIT}")
    machine.wait(75)


def ask(machine: Bench, prompt: str = "Tell me of the sea.", **params: Any) -> dict[str, Any]:
    """One greedy request; {} when no answer comes."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 96, **params}}
    line = f"curl -sS -m 60 -d {shlex.quote(json.dumps(body))} http://127.0.0.1:30000/generate"
    answer = machine.run(IN + line)
    value: dict[str, Any] = json.loads(answer.stdout) if answer.status == 0 else {}
    return value


def main_pid(machine: Bench) -> str:
    text: str = machine.say(SHOW + "MainPID")
    return text


def test_each_scenario_about_mtp_has_a_look_at_its_fault() -> None:
    about = {name for name in scenario.names() if scenario.load(name).expect.keys() == {"mtp-enablement"}}
    assert about == FAULTS.keys() | ASKED.keys()
    assert all(scenario.load(name).expect["mtp-enablement"].rung for name in about)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_what_it_shows(name: str) -> None:
    machine = Bench(name)
    assert machine.run(HEALTH).stdout == b"200"
    turn_on(machine)
    line, pattern = FAULTS[name]
    answer = machine.run(line)
    assert re.search(pattern, (answer.stdout + answer.stderr).decode()), answer.stdout.decode()[-3000:]
    assert machine.unknown == []


@pytest.mark.parametrize("name", sorted(ASKED))
def test_what_it_shows_when_it_is_asked(name: str) -> None:
    machine = Bench(name)
    before = ask(machine)
    assert "spec_verify_ct" not in before["meta_info"]
    turn_on(machine)
    assert machine.run(HEALTH).stdout == b"200", machine.say(LOG)[-2000:]
    pid, what = main_pid(machine), ASKED[name]
    if what == "dead later":
        machine.wait(300)
        assert main_pid(machine) != pid
        return
    schema = {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'} if "structured" in name else {}
    answers = [ask(machine) for _ in range(2)] + [ask(machine, f"More {n}.", **schema) for n in range(16)]
    if what in ("dead", "hangs"):
        assert answers[-1] == {}
        assert (main_pid(machine) != pid) == (what == "dead" or name == "mtp-hang-health-200")
        return
    length = answers[0]["meta_info"]["spec_accept_length"]
    assert (length == 1.0) == (what == "no draft is accepted")
    faster = answers[0]["meta_info"]["e2e_latency"] < before["meta_info"]["e2e_latency"]
    assert faster == (what not in ("slower", "no draft is accepted"))
    assert answers[0]["text"] == before["text"]
    assert (answers[1]["text"] == before["text"]) == (what != "another answer")
    if what == "a restart is as good":
        machine.say(IN + f"rm {DROP_IN}")
        machine.say(IN + "systemctl daemon-reload")
        machine.say(IN + f"systemctl restart {UNIT}")
        machine.wait(75)
        fresh = ask(machine)["meta_info"]
        assert "spec_verify_ct" not in fresh
        assert fresh["e2e_latency"] < answers[0]["meta_info"]["e2e_latency"] < before["meta_info"]["e2e_latency"]


def test_what_is_taken_back_serves_again() -> None:
    """The old owner of the port and the leftover go away at last; the old unit, restarted by systemd meanwhile, comes back."""
    for name in ("mtp-old-port-owner", "mtp-leftover-process"):
        machine = Bench(name)
        turn_on(machine)
        machine.say(IN + f"rm {DROP_IN}")
        machine.say(IN + "systemctl daemon-reload")
        machine.say(IN + f"systemctl restart {UNIT}")
        machine.wait(600)
        assert machine.run(HEALTH).stdout == b"200"
        assert "spec_verify_ct" not in ask(machine)["meta_info"]

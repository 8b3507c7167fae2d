"""A realistic run, written the way a run writes it: reboot verification of a server that did not come back as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from proofbook import archive
from proofbook.journal import Journal, Writer, plain
from proofbook.model import Action, Evidence, Finding, Identity, Plan, Suggested, Verdict
from proofbook.record import Keeper
from proofbook.redact import Redactor

MACHINE = "3f1c9a52d0b84e6f9a1177c2e05d4b38"
BOOT_BEFORE = "a41e0c7755cf4d9b8a3f90d2c6b1e7f0"
BOOT_AFTER = "7be2951d0f3a4c68b5d1e2f3a4b5c6d7"
SECRET = "hf_QmFzZTY0VG9rZW5Gb3JUZXN0cw0123456"

NVIDIA_SMI = b"""index, pci.bus_id, uuid, name, driver_version
0, 00000000:01:00.0, GPU-5c2d1f3e-0b1a-4c55-9a6e-1f2e3d4c5b6a, NVIDIA GeForce RTX 5090, 580.65.06
1, 00000000:41:00.0, GPU-0f9e8d7c-6b5a-4988-8776-655443322110, NVIDIA GeForce RTX 5090, 580.65.06
2, 00000000:81:00.0, GPU-11223344-5566-4788-99aa-bbccddeeff00, NVIDIA GeForce RTX 5090, 580.65.06
"""
ENVIRON = b"PATH=/usr/bin\0HF_TOKEN=" + SECRET.encode() + b"\0HF_HUB_OFFLINE=1\0NCCL_P2P_DISABLE=1\0"
KERNEL = "".join(
    f"[{n:>5}.{n * 7919 % 1000000:06d}] pcieport 0000:00:01.{n % 8}: enabling device (0000 -> 0003)\n" for n in range(4000)
)
XID = "[ 1834.220117] NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
KERNEL_LOG = (KERNEL[:150000] + XID + "\n" + KERNEL[150000:]).encode()


@dataclass
class Clock:
    at: datetime = field(default_factory=lambda: datetime(2026, 11, 29, 11, 15, 44, 212000, tzinfo=UTC))

    def now(self) -> datetime:
        self.at += timedelta(milliseconds=137)
        return self.at

    def skip(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class Script:
    """Writes a run's events, evidence and record, as the verbs of a run do."""

    def __init__(
        self, outputs: Path, *, run_id: str, host: str = "gpu01", clock: Clock | None = None, runbook: str = "reboot-verification"
    ) -> None:
        self.clock = clock or Clock()
        self.host = host
        self.run_id = run_id
        self.runbook = runbook
        self.redactor = Redactor()
        self.folder = archive.new_run_dir(outputs, runbook, host, self.clock.at, run_id)
        self.writer = Writer(self.folder, self.redactor)
        self.journal = Journal(self.writer, run_id, self.clock.now)
        self.keeper = Keeper(self.folder, self.journal, self.writer)
        self.steps = 0
        self.evidence_count = 0
        self.boot = BOOT_BEFORE

    def say(self, event: str, data: dict[str, Any], durable: bool = False) -> None:
        clean = self.redactor.value(plain(data), "journal.jsonl")
        self.journal.append(event, clean, durable)
        self.keeper(event, clean)

    def open(self, **more: Any) -> None:
        self.say(
            "run.opened",
            {
                "run_id": self.run_id,
                "runbook": self.runbook,
                "title": "Reboot verification",
                "purpose": "Reboot a GPU server, and show by evidence that it came back as intended.",
                "host": self.host,
                "parameters": {"host": self.host, "reboot": True, "services": "", "settle_minutes": 10.0, "approver": "alice"},
                "mode": "headless",
                "runner": {
                    "host": "ops1",
                    "user": "alice",
                    "pid": 1,
                    "pid_started": "1",
                    "boot_id": "0",
                    "python": "3.11.9",
                    "proofbook": "0.1.0",
                },
                "clock": "wall",
                "changes_host": True,
                "parent": None,
                "continues": None,
                **more,
            },
        )

    def identity(self) -> Identity:
        return Identity(
            self.host,
            "gpu-hv1",
            MACHINE,
            self.boot,
            "ssh-ed25519 SHA256:VQpn1nVYk2yTw0b7mJr3y8pN0a5u6c9dE1fG2hI3jK4",
            "root",
            0,
            "6.8.12-4-pve",
        )

    def proven(self, note: str) -> None:
        peer = {"address": "192.0.2.7:22", "host_key": self.identity().host_key, "software": "OpenSSH_9.2p1 Debian-2+deb12u3"}
        self.say("host.proven", {"name": self.host, "identity": self.identity(), "peer": peer, "note": note})

    def step(self, verb: str, title: str) -> None:
        self.steps += 1
        self.say("step.started", {"step": self.steps, "key": f"{verb}:{self.steps}", "verb": verb, "title": title})

    def done(self, seconds: float = 1.2, outcome: str = "ok", error: str | None = None) -> None:
        self.clock.skip(seconds)
        ended = {
            "step": self.steps,
            "key": f"x:{self.steps}",
            "outcome": outcome,
            "error": error,
            "duration_s": seconds,
            "reused": False,
        }
        self.say("step.ended", ended)

    def evidence(self, argv: tuple[str, ...], stdout: bytes, *, exit_status: int | None = 0, stderr: bytes = b"") -> str:
        self.evidence_count += 1
        number = f"e{self.evidence_count:04d}"
        files: dict[str, Any] = {}
        redactions = 0
        for stream, data in (("stdout", stdout), ("stderr", stderr)):
            written = self.writer.write_output(f"evidence/{number}-{argv[0]}.{stream[3:]}", data) if data else None
            path, digest, size = "", hashlib.sha256(b"").hexdigest(), 0
            if written:
                path, digest, size = written.path, written.sha256, written.size
            files |= {f"{stream}_file": path, f"{stream}_sha256": digest, f"{stream}_bytes": size}
            redactions += written.redactions if written else 0
        at = self.clock.now()
        kept = Evidence(number, self.host, argv, exit_status, at, 0.021, self.boot, redactions=redactions, **files)
        self.say("evidence", {**plain(kept), "probe": argv[0]})
        return number

    def observed(self, probe: str, value: Any, evidence: str, unknown: str = "") -> None:
        data = {"probe": probe, "asked": probe, "known": not unknown, "unknown": unknown, "value": value, "evidence": [evidence]}
        self.say("observation", {**data, "boot_id": self.boot, "look": "now"})

    def finding(self, title: str, finding: Finding) -> None:
        self.say("finding", {**plain(finding), "title": title})

    def close(self, status: str, verdict: str, summary: str, exit_code: int) -> Path:
        self.say("run.closing", {"status": status, "verdict": verdict, "summary": summary, "exit_code": exit_code}, durable=True)
        return self.keeper.folder


def reboot_plan(identity: Identity) -> Plan:
    return Plan(
        change="reboot",
        title="Reboot gpu-hv1",
        host=identity,
        pre_state={"boot_id": identity.boot_id},
        actions=(Action("reboot the machine", ("systemctl", "reboot")),),
        undo=(),
        diff="",
        cannot_undo=("a reboot cannot be taken back; whatever runs in memory is lost",),
        expected_s=240.0,
        facts=("sglang-qwen.service in llm-two serves on port 30000", "uptime 41 days", "console: https://bmc-gpu01.example"),
    )


def write_reboot_run(outputs: Path, *, run_id: str = "20261129T111544Z-reboot-verification-gpu01-7f3a2c") -> Path:
    """A whole run with every kind of verdict, a plan, a gate and an act; returns its sealed folder."""
    s = Script(outputs, run_id=run_id)
    s.open(continues="20261129T105500Z-reboot-verification-gpu01-00c4de")
    s.step("reach", "Which machine answers?")
    s.proven("first contact")
    s.done(0.4)

    s.step("observe", "How is it before the reboot?")
    smi = s.evidence(("nvidia-smi", "--query-gpu=index,pci.bus_id,uuid,name,driver_version", "--format=csv,noheader"), NVIDIA_SMI)
    s.observed("nvidia.gpus", {"rows": 4}, smi)
    env = s.evidence(("pct", "exec", "102", "--", "cat", "/proc/4711/environ"), ENVIRON)
    s.observed("systemd.process", {"environ": {"HF_TOKEN": SECRET, "HF_HUB_OFFLINE": "1"}}, env)
    gpus = Finding(
        "gpus-present", Verdict.PASS, "4 of 4 expected GPUs answer", look="before", evidence=(smi,), probes=("nvidia.gpus",)
    )
    s.finding("Is every expected GPU there?", gpus)
    xid = Finding(
        "kernel-log", Verdict.PASS, "no known trouble in 4 012 kernel lines of this boot", look="before", evidence=(smi,)
    )
    s.finding("Is the kernel log free of known trouble?", xid)
    s.done(1.8)

    plan = reboot_plan(s.identity())
    s.step("plan", "What would the reboot stop?")
    s.say("plan", {**plain(plan), "digest": plan.digest, "issued_at": s.clock.now()}, durable=True)
    s.done(0.3)
    s.step("gate", "Gate: reboot gpu-hv1")
    s.say(
        "gate",
        {"digest": plan.digest, "decision": "approved", "approver": "alice", "how": "parameter", "text": plan.title},
        durable=True,
    )
    s.done(0.1)
    s.step("apply", "Reboot, and wait until it is back")
    s.say(
        "act.intent",
        {"act": 1, "what": "reboot the machine", "argv": ["systemctl", "reboot"], "host": s.host, "digest": plan.digest},
        durable=True,
    )
    s.clock.skip(2)
    lost = {"act": 1, "outcome": "unknown", "exit_status": None, "note": "the connection was lost, as expected", "evidence": []}
    s.say("act.outcome", lost, durable=True)
    s.say("progress", {"text": "waiting for the machine: port 22 closed for 12 s"})
    s.clock.skip(94)
    s.boot = BOOT_AFTER
    s.proven("after the reboot")
    facts = {"boot_id_before": BOOT_BEFORE, "boot_id_after": BOOT_AFTER, "came_back": True}
    applied = {
        "change": "reboot",
        "outcome": "done",
        "summary": "the machine came back after 1 min 48 s with a new boot-id",
        "facts": facts,
    }
    s.say("applied", {**applied, "digest": plan.digest}, durable=True)
    s.done(4.0)

    s.step("check", "Did it come back as it was?")
    smi2 = s.evidence(
        ("nvidia-smi", "--query-gpu=index,pci.bus_id,uuid,name,driver_version", "--format=csv,noheader"), NVIDIA_SMI
    )
    log = s.evidence(("journalctl", "-k", "-b", "0", "-o", "short-monotonic", "--no-pager"), KERNEL_LOG)
    state = s.evidence(
        ("systemctl", "show", "sglang-qwen.service"),
        b"ActiveState=active\nNRestarts=3\n",
        stderr=b"warning: unit changed on disk\n",
    )
    denied = s.evidence(("dmesg",), b"", exit_status=1, stderr=b"dmesg: read kernel buffer failed: Operation not permitted\n")
    for draft, title in (
        (
            Finding(
                "gpus-present",
                Verdict.FAIL,
                "3 of 4 expected GPUs answer; 0000:c1:00.0 is missing from nvidia-smi and present on the PCI bus",
                subject="0000:c1:00.0",
                action=Suggested.POWER_CYCLE,
                what_to_do="Power-cycle the machine (a warm reboot does not reset the slot); if it stays away, reseat the card.",
                expected=4,
                observed=3,
                caused_by="xid-79",
                look="after",
                evidence=(smi2, log),
                probes=("nvidia.gpus", "pci.devices"),
            ),
            "Is every expected GPU there?",
        ),
        (
            Finding(
                "kernel-log",
                Verdict.FAIL,
                "Xid 79: the GPU has fallen off the bus, once",
                subject="0000:c1:00.0",
                action=Suggested.CHECK_HARDWARE,
                what_to_do="Check the riser and the power cable of this slot.",
                count=1,
                at_least=True,
                signature="nvidia-xid-79",
                lines=(XID,),
                look="after",
                evidence=(log,),
                probes=("kernel_log",),
            ),
            "Is the kernel log free of known trouble?",
        ),
        (
            Finding(
                "service-restarts",
                Verdict.WARN,
                "active since 11:19:02, and restarted 3 times before it stayed up",
                subject="llm-two/sglang-qwen.service",
                action=Suggested.LOOK,
                what_to_do="Read the journal of the failed starts: `journalctl -u sglang-qwen.service -b`.",
                expected=0,
                observed=3,
                look="after",
                evidence=(state,),
            ),
            "Did the service come up by itself, and stay up?",
        ),
        (
            Finding(
                "pcie-link",
                Verdict.UNKNOWN,
                "the link state cannot be read: `dmesg` ended with exit status 1: Operation not permitted",
                subject="0000:81:00.0",
                action=Suggested.GRANT,
                what_to_do="Let the login read the kernel log (kernel.dmesg_restrict) or use root.",
                look="after",
                evidence=(denied,),
            ),
            "Does every PCIe link run at its full width and speed?",
        ),
        (
            Finding(
                "p2p",
                Verdict.NOT_CHECKED,
                "no second NVLink bridge is in this machine; peer access needs its own runbook",
                look="after",
            ),
            "Can the GPUs reach each other?",
        ),
        (
            Finding("boot-changed", Verdict.PASS, "boot-id a41e0c77… → 7be2951d…, same machine-id and host key", look="after"),
            "Was it really rebooted?",
        ),
        (Finding("units", Verdict.PASS, "no unit failed; 41 of 41 are active", look="after"), "Is any unit failed?"),
    ):
        s.finding(title, draft)
    s.done(3.1)

    s.step("table", "Before and after")
    rows = [
        ["boot-id", "a41e0c77…", "7be2951d…", "no"],
        ["kernel", "6.8.12-4-pve", "6.8.12-4-pve", "yes"],
        ["GPUs that answer", 4, 3, "no"],
        ["driver", "580.65.06", "580.65.06", "yes"],
        ["service restarts", 0, 3, "no"],
    ]
    columns = ["what", "before", "after", "same?"]
    s.say("table", {"name": "before-after", "title": "The machine, side by side", "columns": columns, "rows": rows, "note": ""})
    s.say(
        "configuration",
        {
            "llm-two/sglang-qwen.service": {
                "argv": ["python3", "-m", "sglang.launch_server", "--api-key", "k-991"],
                "environment": {},
            }
        },
    )
    s.say(
        "note",
        {
            "kind": "not-verified",
            "title": "no load",
            "text": "No inference load was put on the GPUs: errors under load would not have been seen.",
        },
    )
    s.say(
        "note",
        {
            "kind": "operator",
            "title": "",
            "text": "Slot 4 had been reseated last week.\nAsked the data centre to check the riser.",
        },
    )
    s.done(0.2)
    summary = (
        "3 of 4 GPUs came back: 0000:c1:00.0 fell off the bus (Xid 79) 12 minutes after the boot; "
        "the service runs on the other three."
    )
    return s.close("completed", "FAIL", summary, 1)


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def reboot_run(outputs: Path) -> Path:
    return write_reboot_run(outputs)


@pytest.fixture
def write_run(outputs: Path) -> Callable[..., Path]:
    """Write a whole reboot run; keyword ``run_id``."""
    return lambda **named: write_reboot_run(outputs, **named)


@pytest.fixture
def script(outputs: Path) -> Callable[..., Script]:
    """A run that a test writes event by event."""
    return lambda run_id="20261129T111544Z-reboot-verification-gpu01-aaaaaa", **named: Script(outputs, run_id=run_id, **named)

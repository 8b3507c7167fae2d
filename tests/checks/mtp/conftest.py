"""A server that was given speculation, healthy in every way, as observations; each test breaks one thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.checks.mtp.speculation import Speculation
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.lab.standin.engine import Server
from proofbook.lab.standin.startlog import dated
from proofbook.model import Applied, Check, Finding, Identity, Measurement, Observation, Plan, Probe, Seen
from proofbook.probes.journal import JournalEntry, UnitJournal, UnitLog
from proofbook.probes.kernel_log import KernelLine, KernelLog, KernelMessages
from proofbook.probes.memory import CacheFacts, GpuMemory, GpuProcess, GpuProcesses, MemoryRow
from proofbook.probes.sglang import (
    CheckpointFacts,
    LauncherHelp,
    Listener,
    PortOwner,
    Processes,
    ProcessTable,
    ServedCache,
    ServedCheckpoint,
    ServerFacts,
    ServerInfo,
    ServerProcess,
    Version,
    VersionFacts,
)
from proofbook.probes.systemd import ProcessFacts, UnitFacts, UnitProcess, UnitState
from proofbook.probes.unit_files import UnitFile, UnitFiles, UnitFileSet, UnitSettings, UnitSettingsFacts
from proofbook.remote.looking import Packages

T0 = datetime(2026, 3, 9, 16, 0, tzinfo=UTC)
UNIT, URL = "sglang-qwen.service", "http://127.0.0.1:30000"
CONTAINER = ContainerSpec(name="llm-two", kind="pct", id="102")
SERVICE = ServiceSpec(name=UNIT, container="llm-two", url=f"{URL}/health")
WANTED = Speculation(mem_fraction_static=0.75)
PLAIN = (
    "/v/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/qwen", "--tp-size", "4", "--port", "30000",
    "--mem-fraction-static", "0.85",
)  # fmt: skip
WITH = (
    *PLAIN[:-1], "0.75", "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "6", "--mamba-scheduler-strategy", "extra_buffer",
)  # fmt: skip
INVOCATION, OLD = "b2" * 16, "a1" * 16
CONFIG = {
    "num_hidden_layers": 48, "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024, "vocab_size": 248320, "mtp_num_hidden_layers": 1,
}  # fmt: skip
SIZE = int(227.4 * (1 << 30))


def entries(
    argv: Sequence[str] = WITH, version: str = "0.5.10", faults: Mapping[str, Any] | None = None
) -> tuple[JournalEntry, ...]:
    """The journal of one start, as the stand-in prints it."""
    environment = {"SGLANG_ENABLE_SPEC_V2": "1"} if version in ("0.5.9", "0.5.10") else {}
    server = Server(argv, environment, version, faults or {})
    out = []
    for second, text in server.startup():
        at = T0 + timedelta(seconds=second)
        for line in dated(text, at.timestamp(), 812).split("\n"):
            out.append(JournalEntry(at, 100 + second, 6, line, "python", 812, "stdout", invocation_id=INVOCATION))
    return tuple(out)


def digest(argv: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(argv).encode()).hexdigest()


def unit(**more: Any) -> UnitFacts:
    values: dict[str, Any] = {
        "unit": UNIT, "load": "loaded", "active": "active", "sub": "running", "result": "success", "type": "simple",
        "main_pid": 812, "n_restarts": 0, "invocation_id": INVOCATION, "enabled": "enabled", "need_daemon_reload": False,
        "exec_start": (), "environment": {},
        "fragment_path": f"/etc/systemd/system/{UNIT}", "drop_ins": (), "description": "Qwen",
        "exit_code": "", "exit_status": None, "main_started_s": 100.0, "active_enter_s": 100.0, "inactive_exit_s": 100.0,
    }  # fmt: skip
    return UnitFacts(**{**values, **more})


def files(text: str) -> UnitFileSet:
    data = text.encode()
    main = UnitFile(f"/etc/systemd/system/{UNIT}", data, hashlib.sha256(data).hexdigest(), "root", "root", 0o644)
    return UnitFileSet(UNIT, main, (), {})


def process(argv: Sequence[str] = WITH, **environment: str) -> ProcessFacts:
    return ProcessFacts(UNIT, 812, tuple(argv), {"SGLANG_ENABLE_SPEC_V2": "1", **environment}, "", 100.0)


RANKS = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::scheduler_TP2", "sglang::scheduler_TP3")
TABLE = ProcessTable(
    UNIT,
    f"/system.slice/{UNIT}",
    (
        ServerProcess(812, 1, "S", "/v/bin/python -m sglang.launch_server", 100.0),
        *(ServerProcess(813 + n, 812, "S", title, 101.0) for n, title in enumerate(RANKS)),
        ServerProcess(820, 812, "S", "sglang::detokenizer", 101.0),
    ),
)
INFO = {
    "version": "0.5.10", "speculative_algorithm": "EAGLE", "speculative_num_steps": 5, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6, "tp_size": 4, "max_running_requests": 48,
    "internal_states": [{"effective_max_running_requests_per_dp": 6}],
}  # fmt: skip
GPUS = tuple(MemoryRow(n, f"0000:{n + 1:02x}:00.0", f"GPU-{n}", "RTX PRO 6000", 97887, 90000, 7000) for n in range(4))
HOLDERS = tuple(
    GpuProcess(9000 + n, row.pci, RANKS[n], 89000, f"/lxc/102/ns/system.slice/{UNIT}", 813 + n, 101.0)
    for n, row in enumerate(GPUS)
)


def healthy(*, before: bool = False) -> dict[Probe[Any], Any]:
    """What every probe says; ``before``: of the server without speculation."""
    argv = PLAIN if before else WITH
    return {
        UnitState(UNIT, CONTAINER): unit(),
        UnitProcess(UNIT, CONTAINER): process(argv),
        UnitSettings(UNIT, CONTAINER): UnitSettingsFacts(
            UNIT, f"/system.slice/{UNIT}", (), "", "", "", "on-failure", 10.0, 10.0, 5, None, 90.0, "control-group", True
        ),
        UnitFiles(UNIT, CONTAINER): files(f"[Service]\nExecStart={' '.join(argv)}\n"),
        Version(UNIT, CONTAINER): VersionFacts("0.5.10", "/v/bin/python", Packages("3.12.3", {"sglang": "0.5.10"}), True),
        LauncherHelp(UNIT, CONTAINER): None,
        ServedCheckpoint(UNIT, CONTAINER): CheckpointFacts(
            "/models/qwen", CONFIG, True, 40000, ("mtp.fc.weight", "mtp.norm.weight"), {"a.safetensors": SIZE}, ()
        ),
        ServedCache(UNIT, CONTAINER): CacheFacts("/models/qwen", SIZE, 39, SIZE, "", SIZE, 2 * SIZE),
        UnitJournal(UNIT, CONTAINER): UnitLog(UNIT, INVOCATION, entries(argv), True),
        Processes(UNIT, CONTAINER): TABLE,
        PortOwner(30000, CONTAINER): (Listener("0.0.0.0", 30000, ((812, "python"),)),),
        ServerInfo(URL, CONTAINER): ServerFacts("/server_info", INFO),
        GpuMemory(): GPUS,
        GpuProcesses(): HOLDERS,
        KernelLog(): KernelMessages(
            lines=(KernelLine(1.0, T0 - timedelta(hours=1), 6, "old line"), KernelLine(4e3, T0 + timedelta(minutes=1), 6, "new")),
            gaps=(), source="journal", boot_id="c3" * 16, complete=True,
        ),
    }  # fmt: skip


def seen_of(values: Mapping[Probe[Any], Any]) -> Seen:
    """``None`` and strings beginning with "?" are unknown answers."""
    out = []
    for probe, value in values.items():
        unknown = "nobody could say" if value is None else value[1:] if isinstance(value, str) and value.startswith("?") else ""
        out.append(Observation(probe, None if unknown else value, unknown, T0, "c3" * 16))
    return Seen(out)


def judged(check: Check, values: Mapping[Probe[Any], Any] | None = None) -> list[Finding]:
    """The findings of a check on what probes say (the healthy server's answers by default)."""
    return list(check.judge(seen_of(healthy() if values is None else values)))


def worst_of(findings: Sequence[Finding]) -> str:
    order = ["NOT_CHECKED", "PASS", "WARN", "UNKNOWN", "FAIL"]
    return max((str(f.verdict) for f in findings), key=order.index)


def said(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{f.verdict} {f.reason}" for f in findings)


def applied(outcome: str = "done", summary: str = "ready", **facts: Any) -> Applied:
    host = Identity("h", "h", "4f" * 16, "c3" * 16, "ssh-ed25519 SHA256:x", "root", 0)
    settings = {"argv": list(WITH), "argv_sha256": digest(WITH), "environment": {"SGLANG_ENABLE_SPEC_V2": "1"}}
    plan = Plan("enable-mtp", "x", host, {}, (), (), "", (), 0.0, settings=settings)
    known = {
        "start": "ready", "start_s": 50.0, "ready_by": "its log", "invocation": INVOCATION, "main_pid": 812, "restarted": True,
        "main_pid_before": 700, "invocation_before": OLD, "gpu_used_mib_before_start": {row.pci: 3 for row in GPUS},
        "others_on_gpus": [], "timeline": [{"key": "weights", "title": "Weights", "from_s": 10.0, "to_s": 20.0, "detail": ""}],
    }  # fmt: skip
    return Applied(plan, outcome, summary, {**known, **facts})


def measurement(value: Mapping[str, Any], name: str = "serving.ControlPrompts") -> Measurement:
    return Measurement(name, name, "x", {}, value, T0, 60.0)


LIFE = {
    "at": T0.isoformat(),
    "known": True,
    "unknown": "",
    "active": "active",
    "main_pid": 812,
    "invocation": INVOCATION,
    "n_restarts": 0,
}
STEADY = {"steady": True, "changes": [], "lives": [LIFE, LIFE]}


def request(**more: Any) -> dict[str, Any]:
    return {"prompt": "count", "ok": True, "problem": "", "trouble": "", "tokens": 256, "verify_ct": 51, **more}


def control(**more: Any) -> dict[str, Any]:
    """ControlPrompts.value of a healthy server."""
    greedy = {
        "case": "greedy", "title": "Counting", "asked": 3, "completed": 3, "skipped": "", "accept_length": 5.0,
        "lowest_accept_length": 4.9, "verify_ct": 153, "tokens": 768, "requests": [request() for _ in range(3)],
        "expect": [{"what": "counts on without a mistake", "held": True, "reason": ""}], "problem": "",
    }  # fmt: skip
    structured = {**greedy, "case": "structured", "title": "JSON", "accept_length": 3.1}
    return {
        "config": {"num_steps": 5}, "steady": STEADY, "speculation": "on", "cases": [greedy, structured], "accept_length": 5.0,
        "steps_plus_one": 6, "disagreeing": [],
        "agreement": [
            {"prompt": "code-lru", "must_agree": True, "same": True, "first_difference": None, "of": 200, "reason": ""}
        ],
        **more,
    }  # fmt: skip


def with_case(name: str, **more: Any) -> dict[str, Any]:
    """The healthy value with one case changed."""
    value = control()
    return {**value, "cases": [{**c, **more} if c["case"] == name else c for c in value["cases"]]}


@pytest.fixture
def values() -> dict[Probe[Any], Any]:
    return healthy()


@pytest.fixture
def values_before() -> dict[Probe[Any], Any]:
    return healthy(before=True)


def changed(facts: Any, **more: Any) -> Any:
    return replace(facts, **more)

"""Is a server fit to be given speculation?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.mtp.fit import FitToChange
from proofbook.checks.mtp.speculation import Speculation
from proofbook.probes.journal import UnitJournal, UnitLog
from proofbook.probes.memory import GpuMemory, GpuProcess, GpuProcesses
from proofbook.probes.sglang import LauncherHelp, ServedCheckpoint, Version, VersionFacts
from proofbook.probes.sglang_flags import flags_of
from proofbook.probes.systemd import UnitProcess, UnitState
from proofbook.probes.unit_files import UnitFiles, UnitSettings
from proofbook.remote.looking import Packages

from .conftest import CONTAINER, HOLDERS, PLAIN, SERVICE, UNIT, WANTED, entries, files, judged, process, said, unit, worst_of

FIT = FitToChange(SERVICE, CONTAINER, WANTED)


def version(text: str) -> VersionFacts:
    return VersionFacts(text, "/v/bin/python", Packages("3.12", {"sglang": text}), True)


def test_a_healthy_server_is_fit(values_before: dict[Any, Any]) -> None:
    findings = judged(FIT, values_before)
    assert worst_of(findings) == "PASS", said(findings)
    text = said(findings)
    assert "runs the unit's command, word by word (11 words)" in text
    assert "about 6 requests would run at once" in text
    assert "from the log of the present start" in text
    assert "2 tensors for drafts" in text
    assert "SGLANG_SIMULATE_ACC_LEN is not set" in text


def test_the_runbooks_own_false_flag_is_refused_with_the_real_ones(values_before: dict[Any, Any]) -> None:
    wanted = replace(WANTED, more=(("--speculative-draft-epsilon", "0.2"),))
    findings = judged(FitToChange(SERVICE, CONTAINER, wanted), values_before)
    (bad,) = [f for f in findings if f.verdict == "FAIL"]
    assert bad.observed == "--speculative-draft-epsilon"
    assert "--speculative-accept-threshold-single" in bad.what_to_do


@pytest.mark.parametrize(
    ("release", "more", "verdict", "why"),
    [
        ("0.5.9", {"mamba_strategy": "no_buffer"}, "WARN", "disables the radix cache in silence"),
        ("0.5.10", {"mamba_strategy": "no_buffer"}, "FAIL", "refuses speculation with the radix cache"),
        ("0.5.13", {"mamba_strategy": ""}, "FAIL", "refuses speculation with the radix cache"),
        ("0.5.20", {"mamba_strategy": ""}, "PASS", ""),
        ("0.5.10", {"eagle_topk": 2}, "FAIL", "only topk 1"),
        ("0.5.10", {"num_draft_tokens": 8}, "WARN", "makes 6 of the 8"),
        ("0.5.13", {"mamba_strategy": "extra_buffer_lazy"}, "FAIL", "refuses extra_buffer_lazy"),
        ("0.5.13", {}, "WARN", "known crashes"),
        ("0.5.99", {}, "WARN", "knows every flag"),
    ],
)
def test_what_a_release_refuses_in_spite_of_its_parser(
    values_before: dict[Any, Any], release: str, more: dict[str, Any], verdict: str, why: str
) -> None:
    values_before[Version(UNIT, CONTAINER)] = version(release)
    findings = judged(FitToChange(SERVICE, CONTAINER, replace(WANTED, **more)), values_before)
    assert worst_of(findings) == verdict, said(findings)
    assert any(why in f.reason for f in findings if f.verdict == verdict)


def test_the_strategys_flag_has_the_name_of_the_release() -> None:
    assert "--mamba-scheduler-strategy" in WANTED.flags(flags_of("0.5.9"))
    assert "--mamba-radix-cache-strategy" in WANTED.flags(flags_of("0.5.20"))
    assert WANTED.variables("0.5.10.post1") == {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert Speculation().variables("0.5.14") == {}
    assert Speculation(num_steps=3).draft_tokens == 4


def test_its_own_help_decides(values_before: dict[Any, Any]) -> None:
    values_before[LauncherHelp(UNIT, CONTAINER)] = (
        "options:\n  --model-path P\n  --tp-size N\n  --port N\n  --mem-fraction-static F\n"
    )
    findings = judged(FIT, values_before)
    assert "0.5.10 would refuse to start: --speculative-algorithm" in said(findings)


def test_a_checkpoint_without_weights_for_drafts(values_before: dict[Any, Any]) -> None:
    probe = ServedCheckpoint(UNIT, CONTAINER)
    values_before[probe] = replace(values_before[probe], mtp=())
    findings = judged(FIT, values_before)
    (bad,) = [f for f in findings if f.verdict == "FAIL"]
    assert "none of its 40000 tensors is for drafts (mtp.*) although its config promises 1 layer" in bad.reason
    values_before[probe] = replace(values_before[probe], index=False)
    assert worst_of(judged(FIT, values_before)) == "UNKNOWN"
    values_before[probe] = "?permission denied"
    assert worst_of(judged(FIT, values_before)) == "UNKNOWN"


def test_what_runs_is_not_what_the_unit_says(values_before: dict[Any, Any]) -> None:
    values_before[UnitProcess(UNIT, CONTAINER)] = process((*PLAIN, "--trust-remote-code"))
    (bad,) = [f for f in judged(FIT, values_before) if f.verdict == "FAIL"]
    assert "--trust-remote-code: absent → given" in bad.reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"[Service]\nExecStart={' '.join(PLAIN)} \\ \n  --x 1\n", "a blank after the backslash"),
        (f"[Service]\nExecStart={' '.join(PLAIN)}\nExecStart=/bin/b\n", "systemd refuses"),
    ],
)
def test_a_unit_whose_text_is_not_in_effect(values_before: dict[Any, Any], text: str, why: str) -> None:
    values_before[UnitFiles(UNIT, CONTAINER)] = files(text)
    findings = judged(FIT, values_before)
    assert any(f.verdict == "FAIL" and why in f.reason for f in findings), said(findings)


def test_files_that_were_not_loaded(values_before: dict[Any, Any]) -> None:
    probe = UnitFiles(UNIT, CONTAINER)
    values_before[probe] = replace(values_before[probe], need_daemon_reload=True)
    assert "NeedDaemonReload=yes" in said(judged(FIT, values_before))


def test_simulated_acceptance(values_before: dict[Any, Any]) -> None:
    values_before[UnitProcess(UNIT, CONTAINER)] = process(PLAIN, SGLANG_SIMULATE_ACC_LEN="4")
    (bad,) = [f for f in judged(FIT, values_before) if f.verdict == "FAIL"]
    assert "acceptance is made up" in bad.reason


@pytest.mark.parametrize("words", (("--api-key", "sk-1234567890"), ("--api-key=sk-1234567890",), ("--api-k", "sk-1234567890")))
def test_a_server_that_demands_a_key(values_before: dict[Any, Any], words: tuple[str, ...]) -> None:
    values_before[UnitProcess(UNIT, CONTAINER)] = process((*PLAIN, *words))
    (bad,) = [
        f for f in judged(FIT, values_before) if f.verdict == "FAIL" and "--api-key" in f.reason and "none is given" in f.reason
    ]
    assert "api_key_env=NAME or api_key_file=PATH" in bad.what_to_do
    given = SERVICE.model_copy(update={"api_key_env": "SGLANG_KEY"})
    findings = judged(FitToChange(given, CONTAINER, WANTED), values_before)
    assert "demands an API key (--api-key), and one is named here" in said(findings)
    assert "sk-1234567890" not in said(judged(FIT, values_before)) + said(findings)


def test_a_key_for_the_admin_alone(values_before: dict[Any, Any]) -> None:
    values_before[UnitProcess(UNIT, CONTAINER)] = process((*PLAIN, "--admin-api-key", "sk-1234567890"))
    assert "it lets nobody empty its prefix cache" in said(judged(FIT, values_before))
    assert "none is given" not in said(judged(FIT, values_before))


def test_a_description_is_no_evidence(values_before: dict[Any, Any]) -> None:
    values_before[UnitState(UNIT, CONTAINER)] = unit(description="SGLang Qwen BF16 (MTP enabled)")
    findings = judged(FIT, values_before)
    assert any(f.verdict == "WARN" and "a description is no evidence" in f.reason for f in findings)


@pytest.mark.parametrize(
    ("release", "fraction", "running", "need", "verdict", "why"),
    [
        ("0.5.9", 0.70, None, 0, "FAIL", "10.3 GiB of"),
        ("0.5.9", 0.75, None, 0, "PASS", "about 8 requests"),
        ("0.5.9", 0.75, None, 16, "WARN", "fewer requests at once than the 16"),
        ("0.5.9", 0.75, 16, 16, "PASS", "about 16 requests"),
        ("0.5.9", 0.98, None, 0, "FAIL", "does not fit beside the fraction"),
        ("0.5.9", 0.5, None, 0, "FAIL", "weights alone exceed"),
    ],
)
def test_what_fits(
    values_before: dict[Any, Any], release: str, fraction: float, running: int | None, need: int, verdict: str, why: str
) -> None:
    values_before[Version(UNIT, CONTAINER)] = version(release)
    wanted = replace(WANTED, mem_fraction_static=fraction, max_running_requests=running)
    findings = judged(FitToChange(SERVICE, CONTAINER, wanted, need), values_before)
    (memory,) = [f for f in findings if "GiB a rank" in f.reason]
    assert (memory.verdict, why in memory.reason) == (verdict, True), memory.reason


def test_sizes_without_a_log_are_computed(values_before: dict[Any, Any]) -> None:
    values_before[UnitJournal(UNIT, CONTAINER)] = "?rotated"
    findings = judged(FIT, values_before)
    assert "computed from the checkpoint's size" in said(findings)
    values_before[GpuMemory()] = "?no nvidia-smi"
    assert "could not be estimated: no nvidia-smi" in said(judged(FIT, values_before))


def test_others_on_the_gpus_and_a_stop_that_leaves_processes(values_before: dict[Any, Any]) -> None:
    stranger = GpuProcess(77, "0000:01:00.0", "train.py", 4000, "/user.slice", None, None)
    values_before[GpuProcesses()] = (*HOLDERS, stranger)
    probe = UnitSettings(UNIT, CONTAINER)
    values_before[probe] = replace(values_before[probe], kill_mode="process")
    text = said(judged(FIT, values_before))
    assert "train.py (pid 77 on 0000:01:00.0, 4000 MiB)" in text
    assert "KillMode=process" in text


def test_a_journal_that_is_not_whole_warns(values_before: dict[Any, Any]) -> None:
    values_before[UnitJournal(UNIT, CONTAINER)] = UnitLog(UNIT, "b2" * 16, entries(PLAIN), False, ("Suppressed 40 messages",))
    assert "Suppressed 40 messages" in said(judged(FIT, values_before))


def test_there_is_no_such_unit(values_before: dict[Any, Any]) -> None:
    values_before[UnitState(UNIT, CONTAINER)] = unit(load="not-found", active="inactive", sub="dead", main_pid=0)
    values_before[UnitProcess(UNIT, CONTAINER)] = "?it has no main process"
    (only,) = judged(FIT, values_before)
    assert (only.verdict, only.reason) == ("FAIL", "there is no such unit in the container llm-two")


def test_what_fits_now_is_told_beside_what_would_fit(values_before: dict[Any, Any]) -> None:
    (room,) = [f for f in judged(FIT, values_before) if isinstance(f.observed, dict) and "now" in f.observed]
    assert room.observed["now"]["running"] > room.observed["running"] == 6
    assert room.observed["now"]["tokens"] > room.observed["tokens"] > 0


def test_it_does_not_run(values_before: dict[Any, Any]) -> None:
    values_before[UnitProcess(UNIT, CONTAINER)] = "?it has no main process"
    assert worst_of(judged(FIT, values_before)) == "FAIL"

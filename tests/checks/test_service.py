"""Endpoints and containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proofbook.checks.containers import ContainerUp
from proofbook.checks.service import ServiceAnswers
from proofbook.intent import ContainerSpec
from proofbook.model import Suggested, Verdict
from proofbook.probes.boot import Machine
from proofbook.probes.containers import ContainerState, CudaFacts

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
Break = Callable[[Any], Any]


def answer(**fields: Any) -> Break:
    return lambda w: w.change(w.ENDPOINT, **fields)


REFUSED = {"http_status": None, "error": "connection refused"}


@pytest.mark.parametrize(
    ("broken", "verdict", "says", "action"),
    [
        (lambda w: w, PASS, "answered 200", Suggested.NONE),
        (answer(http_status=503), FAIL, "HTTP 503", Suggested.WAIT),
        (answer(http_status=204), FAIL, "HTTP 204", Suggested.WAIT),
        (answer(**REFUSED), FAIL, "started 147 s ago, of the 600 s", Suggested.WAIT),
        (lambda w: answer(**REFUSED)(w).change(Machine(), uptime_s=4000.0), FAIL, "although it is active", Suggested.LOOK),
        (lambda w: answer(**REFUSED)(w).blind(Machine()), FAIL, "although it is active", Suggested.LOOK),
        (lambda w: answer(**REFUSED)(w).change(w.UNIT, active="failed", sub="failed"), FAIL, "it is failed", Suggested.LOOK),
        # In a crash loop every attempt is young; waiting does not help.
        (lambda w: answer(**REFUSED)(w).change(w.UNIT, n_restarts=9), FAIL, "although it is active", Suggested.LOOK),
        (
            lambda w: answer(**REFUSED)(w).change(w.UNIT, active="activating", sub="auto-restart"),
            FAIL,
            "it is activating (auto-restart)",
            Suggested.LOOK,
        ),
        (lambda w: w.change(w.UNIT, active="inactive", sub="dead"), FAIL, "something else answers there", Suggested.LOOK),
        (lambda w: w.blind(w.UNIT), UNKNOWN, "whether it is this unit that answers", Suggested.NONE),
        (lambda w: w.blind(w.ENDPOINT, why="curl is not there"), UNKNOWN, "curl is not there", Suggested.LOOK),
    ],
)
def test_answers(world: Any, broken: Break, verdict: Verdict, says: str, action: Suggested) -> None:
    (finding,) = broken(world).judge(ServiceAnswers(world.SERVICE, world.CONTAINER))
    assert (finding.verdict, finding.action) == (verdict, action)
    assert says in finding.reason


def test_a_refused_look_says_what_would_let_it_look(world: Any) -> None:
    world.blind(world.STATE, world.ENDPOINT, why="`pct` needs root, and sudo refused: sudo: a password is required")
    for check, subject in (
        (ContainerUp(world.CONTAINER), "llm-two"),
        (ServiceAnswers(world.SERVICE, world.CONTAINER), "llm-two/sglang-qwen.service"),
    ):
        (finding,) = world.judge(check)
        assert (finding.verdict, finding.action, finding.subject) == (UNKNOWN, Suggested.GRANT, subject)
        assert "sudo without a password" in finding.what_to_do


def test_a_service_without_an_address_is_not_asked(world: Any) -> None:
    check = ServiceAnswers(world.SERVICE.model_copy(update={"url": ""}), world.CONTAINER)
    assert check.needs() == ()
    assert world.judge(check)[0].verdict is NOT_CHECKED


def state(**fields: Any) -> Break:
    return lambda w: w.change(w.STATE, **fields)


def opened(path: str, how: str) -> Break:
    return lambda w: w.change(w.STATE, devices={**w.values[w.STATE].devices, path: how})


def cuda(code: int | None = 0, devices: int | None = 2, error: str = "", library: str = "/usr/lib/libcuda.so.1") -> Break:
    return state(cuda=CudaFacts(library, code, devices, error))


NO_PYTHON = 'cuInit could not be tried inside: `pct` is not there: lxc-attach: 102: Failed to exec "python3"'
TIMED_OUT = "cuInit could not be tried inside: `pct exec 102 -- python3 -c` did not finish within 20 s"
HUNG = "cuInit did not return within 15 s"
NO_LIBRARY = "libcuda.so.1: cannot open shared object file"


@pytest.mark.parametrize(
    ("broken", "subject", "verdict", "says"),
    [
        (lambda w: w, "llm-two", PASS, "running"),
        (state(running=False, status="stopped"), "llm-two", FAIL, "it is stopped"),
        (state(starts_at_boot=False), "llm-two at boot", WARN, "somebody started it"),
        (state(starts_at_boot=None), "llm-two", PASS, "running"),
        (state(starts_at_boot=None, kind="docker"), "llm-two at boot", NOT_CHECKED, "is not asked of docker"),
        (
            state(starts_at_boot=None, unknown={"config": "`pct` needs root, and sudo refused: sudo: a password is required"}),
            "llm-two at boot",
            UNKNOWN,
            "whether it is set to start at boot is not known: `pct` needs root",
        ),
        (lambda w: w, "llm-two:/dev/nvidia-uvm", PASS, "can be opened"),
        (opened("/dev/nvidia-uvm", "Operation not permitted"), "llm-two:/dev/nvidia-uvm", FAIL, "Operation not permitted"),
        (opened("/dev/nvidia1", "absent"), "llm-two:/dev/nvidia1", FAIL, "is not there inside"),
        (state(devices={}, unknown={"devices": "no sh inside"}), "llm-two:/dev/nvidia0", UNKNOWN, "no sh inside"),
        (state(devices={}), "llm-two:/dev/nvidia0", UNKNOWN, "no answer"),
        (lambda w: w, "llm-two: CUDA", PASS, "sees 2 GPUs"),
        (
            cuda(code=999, devices=None, error="unknown error"),
            "llm-two: CUDA",
            FAIL,
            "cuInit fails inside with 999 (unknown error)",
        ),
        (cuda(devices=1), "llm-two: CUDA", FAIL, "CUDA sees 1 of 2 GPUs"),
        (cuda(devices=3), "llm-two: CUDA", WARN, "CUDA sees 3 GPUs, 2 are declared"),
        (cuda(devices=None, error="cuDeviceGetCount returned 3"), "llm-two: CUDA", UNKNOWN, "returned 3"),
        (cuda(code=None, devices=None, error=HUNG, library=""), "llm-two: CUDA", FAIL, HUNG),
        (cuda(code=None, devices=None, error=NO_LIBRARY, library=""), "llm-two: CUDA", UNKNOWN, "was not found inside"),
        (state(cuda=None, unknown={"cuda": NO_PYTHON}), "llm-two: CUDA", NOT_CHECKED, "there is no python3 inside"),
        (state(cuda=None, unknown={"cuda": TIMED_OUT}), "llm-two: CUDA", UNKNOWN, "did not finish"),
        (state(cuda=None), "llm-two: CUDA", UNKNOWN, "not tried"),
    ],
)
def test_container(world: Any, broken: Break, subject: str, verdict: Verdict, says: str) -> None:
    findings = {f.subject: f for f in broken(world).judge(ContainerUp(world.CONTAINER))}
    assert findings[subject].verdict is verdict
    assert says in findings[subject].reason


def test_the_host_is_not_to_be_rebooted_for_a_stale_device_rule(world: Any) -> None:
    opened("/dev/nvidia-uvm", "Operation not permitted")(world)
    cuda(code=999, devices=None)(world)
    failed = [f for f in world.judge(ContainerUp(world.CONTAINER)) if f.verdict is FAIL]
    assert {f.action for f in failed} == {Suggested.FIX_CONFIG}
    assert "/proc/devices" in failed[0].what_to_do


def test_a_container_without_declared_devices_is_judged_by_its_state_alone(world: Any) -> None:
    bare = ContainerSpec(name="web", kind="docker")
    world.put(ContainerState(bare), world.values[world.STATE])
    assert [f.verdict for f in world.judge(ContainerUp(bare))] == [PASS, NOT_CHECKED]

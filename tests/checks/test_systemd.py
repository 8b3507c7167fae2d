"""Services: enabled, started by the boot, stable, and with the configuration that was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.systemd import (
    Configuration,
    NoFailedUnits,
    ServiceEnabled,
    ServiceRunsAsConfigured,
    ServicesAsBefore,
    ServiceStable,
    ServiceStartedByBoot,
)
from proofbook.model import Suggested, Verdict
from proofbook.probes.systemd import ExecCommand, FailedUnits, Services

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
Break = Callable[[Any], Any]


def unit(**fields: Any) -> Break:
    return lambda w: w.change(w.UNIT, **fields)


def same(w: Any) -> Any:
    return w


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (same, PASS, "enabled"),
        (unit(enabled="disabled"), FAIL, "the next boot will not start it"),
        (unit(enabled="linked"), FAIL, "will not start it"),
        (unit(enabled="enabled-runtime"), FAIL, "the next boot forgets it"),
        (unit(enabled=""), FAIL, "transient"),
        (unit(enabled="static"), WARN, "something else must start it"),
        (unit(load="not-found"), FAIL, "the unit is not-found"),
        (unit(load="masked", enabled="masked"), FAIL, "the unit is masked"),
        (unit(load="bad-setting"), FAIL, "the unit is bad-setting"),
    ],
)
def test_enabled(world: Any, broken: Break, verdict: Verdict, says: str) -> None:
    (finding,) = broken(world).judge(ServiceEnabled(world.SERVICE, world.CONTAINER))
    assert finding.verdict is verdict
    assert says in finding.reason
    assert finding.subject == "llm-two/sglang-qwen.service"


def test_a_service_that_is_not_meant_to_start_at_boot(world: Any) -> None:
    service = world.SERVICE.model_copy(update={"enabled": False})
    assert world.verdict(ServiceEnabled(service, world.CONTAINER)) is WARN
    assert world.judge(ServiceStartedByBoot(service, world.CONTAINER))[0].verdict is NOT_CHECKED
    assert unit(enabled="disabled")(world).verdict(ServiceEnabled(service, world.CONTAINER)) is PASS


LATE = {"inactive_exit_s": 353.0, "main_started_s": 353.2, "active_enter_s": 353.2}


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (same, PASS, "it began to start 32.5 s after the boot, multi-user.target was reached after 41.0 s"),
        (unit(**LATE), FAIL, "not the boot started it, but somebody or something 312 s later"),
        (unit(**LATE, n_restarts=2), WARN, "restarted it 2 times"),
        (
            unit(inactive_exit_s=None, main_started_s=None, active_enter_s=None, active="inactive"),
            FAIL,
            "this boot has not started it",
        ),
        (unit(active="failed", sub="failed"), NOT_CHECKED, "does not run now"),
        (unit(load="not-found"), FAIL, "not-found"),
        (lambda w: w.blind(w.TARGET), UNKNOWN, "permission denied"),
        (lambda w: w.change(w.TARGET, load="not-found", active_enter_s=None), UNKNOWN, "multi-user.target is not-found"),
        (lambda w: w.change(w.TARGET, active="inactive", active_enter_s=None), UNKNOWN, "the boot is not done yet"),
        # A oneshot or a slow ExecStartPre: it began in time, whenever it was done.
        (unit(inactive_exit_s=20.0, main_started_s=300.0, active_enter_s=300.0), PASS, "20.0 s after the boot"),
    ],
)
def test_started_by_the_boot(world: Any, broken: Break, verdict: Verdict, says: str) -> None:
    (finding,) = broken(world).judge(ServiceStartedByBoot(world.SERVICE, world.CONTAINER))
    assert finding.verdict is verdict
    assert says in finding.reason


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (same, PASS, "never restarted"),
        (unit(active="failed", sub="failed", result="exit-code", exit_code="exited", exit_status=2), FAIL, "exited with 2"),
        (unit(active="inactive", sub="dead"), FAIL, "it does not run"),
        (unit(active="activating", sub="auto-restart", n_restarts=9, result="signal"), FAIL, "crash loop: 9 restarts"),
        (unit(active="activating", sub="start"), FAIL, "still activating"),
        (unit(active="activating", sub="start-pre", n_restarts=10), FAIL, "crash loop: 10 restarts, and it starts again"),
        (unit(sub="exited"), FAIL, "no process serves"),
        (unit(sub="exited", type="oneshot"), PASS, "active (exited)"),
        (unit(result="timeout"), FAIL, "result is timeout"),
        (unit(n_restarts=1), WARN, "1 automatic restart"),
        (unit(n_restarts=3), FAIL, "a crash loop that happens to be up now"),
        (unit(n_restarts=None), UNKNOWN, "not known"),
        (unit(load="masked"), FAIL, "masked"),
    ],
)
def test_stable_at_one_look(world: Any, broken: Break, verdict: Verdict, says: str) -> None:
    (finding,) = broken(world).judge(ServiceStable(world.SERVICE, world.CONTAINER))
    assert finding.verdict is verdict
    assert says in finding.reason


@pytest.mark.parametrize(
    ("then", "now", "verdict", "says"),
    [
        ({}, {}, PASS, "the same run as at the first look"),
        ({}, {"n_restarts": 1, "invocation_id": "22" * 16}, FAIL, "0 restarts then, 1 now"),
        ({"n_restarts": 1}, {"n_restarts": 1}, WARN, "none since the first look"),
        ({}, {"invocation_id": "22" * 16}, FAIL, "not the same run"),
        # Started anew by hand: the counter begins at 0 again.
        ({"n_restarts": 2}, {"n_restarts": 0, "invocation_id": "22" * 16}, FAIL, "started anew"),
        ({"invocation_id": ""}, {}, UNKNOWN, "no invocation id"),
        ({}, {"invocation_id": ""}, UNKNOWN, "no invocation id"),
    ],
)
def test_stable_between_two_looks(world: Any, then: dict[str, Any], now: dict[str, Any], verdict: Verdict, says: str) -> None:
    earlier = replace(world.values[world.UNIT], **then)
    (finding,) = unit(**now)(world).judge(ServiceStable(world.SERVICE, world.CONTAINER, earlier))
    assert finding.verdict is verdict
    assert says in finding.reason


# ------------------------------------------------------------------------------------------------ configuration

WITHOUT = "/opt/sglang/venv/bin/python -m sglang.launch_server --model-path /models/qwen --tp-size 2"


def runs(argv: str) -> Break:
    return lambda w: w.change(w.PROCESS, argv=tuple(argv.split()))


def says_unit(text: str) -> Break:
    return lambda w: w.change(w.UNIT, exec_start=(ExecCommand(text.split()[0], text),))


def environment(**changed: str | None) -> Break:
    def change(w: Any) -> Any:
        values = {k: v for k, v in {**w.ENVIRONMENT, **changed}.items() if v is not None}
        return w.change(w.PROCESS, environ=values)

    return change


def both(*breaks: Break) -> Break:
    def change(w: Any) -> Any:
        for each in breaks:
            w = each(w)
        return w

    return change


@pytest.mark.parametrize(
    ("broken", "against", "verdict", "says"),
    [
        (same, "the inventory", PASS, "1 argument and 1 variable are in effect"),
        (runs(WITHOUT), "the inventory", FAIL, "--speculative-algorithm: NEXTN → absent"),
        (runs(WITHOUT + " --speculative-algorithm=NEXTN"), "the inventory", PASS, "in effect"),
        (runs(WITHOUT + " --speculative-algorithm EAGLE"), "the inventory", FAIL, "NEXTN → EAGLE"),
        (runs(WITHOUT + " --speculative-algo NEXTN"), "the inventory", WARN, "abbreviation"),
        (runs(WITHOUT + " --speculative-algo EAGLE"), "the inventory", FAIL, "NEXTN → EAGLE"),
        (environment(NCCL_P2P_DISABLE="0"), "the inventory", FAIL, "NCCL_P2P_DISABLE: 1 → 0"),
        (environment(NCCL_P2P_DISABLE=None), "the inventory", FAIL, "NCCL_P2P_DISABLE: 1 → absent"),
        (lambda w: w.change(w.PROCESS, environ=None, environ_unknown="not permitted"), "the inventory", UNKNOWN, "not permitted"),
        # A wrong argument is seen although the environment is not.
        (both(runs(WITHOUT), lambda w: w.change(w.PROCESS, environ=None)), "the inventory", FAIL, "absent"),
        (same, "its unit", PASS, "the command line of its unit"),
        (runs(WITHOUT), "its unit", FAIL, "it runs otherwise than its unit says"),
        (says_unit(WITHOUT), "its unit", FAIL, "--speculative-algorithm: absent → NEXTN"),
        (lambda w: w.change(w.UNIT, description="no MTP here"), "its unit", PASS, "command line"),
        (unit(need_daemon_reload=True), "its unit", WARN, "systemd has not read it yet"),
        (unit(exec_start=()), "its unit", NOT_CHECKED, "0 ExecStart lines"),
        (lambda w: w.blind(w.UNIT), "its unit", UNKNOWN, "permission denied"),
        (unit(environment={"NCCL_P2P_DISABLE": "0"}), "its unit", WARN, "the environment is not"),
        (says_unit("/opt/serve --port $PORT"), "its unit", NOT_CHECKED, "variables that systemd fills in"),
        (says_unit("/bin/bash -c /opt/serve.sh"), "its unit", NOT_CHECKED, "wrapper (bash)"),
    ],
)
def test_configuration(world: Any, broken: Break, against: str, verdict: Verdict, says: str) -> None:
    findings = broken(world).judge(ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER))
    finding = next(f for f in findings if f.subject.endswith(against))
    assert finding.verdict is verdict
    assert says in finding.reason


@pytest.mark.parametrize(
    ("said", "runs_as"),
    [
        ("/opt/venv/bin/sglang serve --port 1", "/opt/venv/bin/python3 /opt/venv/bin/sglang serve --port 1"),
        ("/usr/bin/env A=1 /opt/serve --port 1", "/opt/serve --port 1"),
        ("/usr/bin/numactl --cpunodebind=0 /opt/serve --port 1", "/opt/serve --port 1"),
    ],
)
def test_interpreters_and_wrappers_are_no_difference(world: Any, said: str, runs_as: str) -> None:
    both(says_unit(said), runs(runs_as))(world)
    service = world.SERVICE.model_copy(update={"args": (), "environment": {}})
    findings = world.judge(ServiceRunsAsConfigured(service, world.CONTAINER))
    assert [f.verdict for f in findings] == [NOT_CHECKED, PASS]


def test_a_process_that_runs_less_than_its_unit_says_is_no_wrapper(world: Any) -> None:
    """A unit with more words than the process: without a wrapper in front that is an edit, not an exec."""
    both(says_unit("/opt/serve --port 1"), runs("--port 1"))(world)
    findings = world.judge(ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER))
    assert findings[1].verdict is FAIL


def kept(w: Any, **environ: str) -> Configuration:
    return Configuration("20260308T120000Z-x", tuple(w.SERVER.split()), {**w.ENVIRONMENT, **environ})


def test_held_against_what_was_kept(world: Any) -> None:
    check = ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER, kept=kept(world))
    assert world.judge(check)[2].verdict is PASS
    runs(world.SERVER + " --mem-fraction-static 0.75")(world)
    finding = world.judge(check)[2]
    assert finding.verdict is FAIL
    assert "--mem-fraction-static: absent → 0.75" in finding.reason
    assert "20260308T120000Z-x" in finding.reason


def test_a_redacted_value_is_equal_by_its_name(world: Any) -> None:
    check = ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER, kept=kept(world, HF_TOKEN="[redacted:variable]"))
    assert world.judge(check)[2].verdict is PASS
    environment(HF_TOKEN=None)(world)
    assert world.judge(check)[2].verdict is FAIL


def test_what_is_new_at_every_start_is_no_change(world: Any) -> None:
    check = ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER, before=world.values[world.PROCESS])
    environment(INVOCATION_ID="99" * 16, JOURNAL_STREAM="9:1234")(world)
    assert world.judge(check)[2].verdict is PASS


@pytest.mark.parametrize(("declared", "verdict"), [(True, WARN), (False, FAIL)])
def test_a_change_since_before_weighs_less_within_what_the_inventory_wants(world: Any, declared: bool, verdict: Verdict) -> None:
    before = world.values[world.PROCESS]
    service = world.SERVICE if declared else world.SERVICE.model_copy(update={"args": (), "environment": {}})
    runs(world.SERVER + " --mem-fraction-static 0.75")(world)
    finding = world.judge(ServiceRunsAsConfigured(service, world.CONTAINER, before=before))[2]
    assert finding.verdict is verdict


def test_secrets_are_never_worded(world: Any) -> None:
    check = ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER, kept=kept(world), before=world.values[world.PROCESS])
    environment(HF_TOKEN="hf_zyxwvutsrqponmlk")(world)
    runs(world.SERVER + " --api-key sk-1234567890abcdef")(world)
    findings = world.judge(check)
    assert FAIL in {f.verdict for f in findings}
    assert "hf_" not in repr(findings)
    assert "sk-1234" not in repr(findings)
    assert "HF_TOKEN: (hidden) → (hidden)" in findings[2].reason


def test_nothing_to_hold_it_against_is_unknown(world: Any) -> None:
    service = world.SERVICE.model_copy(update={"args": (), "environment": {}})
    world.change(world.UNIT, exec_start=())
    assert world.verdict(ServiceRunsAsConfigured(service, world.CONTAINER)) is UNKNOWN


def test_a_process_title_is_no_command_line(world: Any) -> None:
    world.change(world.PROCESS, argv=("sglang::scheduler_TP0",))
    assert world.verdict(ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER)) is UNKNOWN


def test_a_configuration_fault_says_to_restart_or_to_mend(world: Any) -> None:
    says_unit(WITHOUT)(world)
    finding = world.judge(ServiceRunsAsConfigured(world.SERVICE, world.CONTAINER))[1]
    assert finding.action is Suggested.RESTART_SERVICE
    assert finding.expected == {"--speculative-algorithm": "absent"}
    assert finding.observed == {"--speculative-algorithm": "NEXTN"}


# ------------------------------------------------------------------------------------------------ failed units


@pytest.mark.parametrize(
    ("failed", "before", "expected"),
    [
        ((), (), [("the host", PASS)]),
        ((), None, [("the host", PASS)]),
        (("a.service",), (), [("a.service", FAIL)]),
        (("a.service",), ("a.service",), [("a.service", WARN)]),
        (("a.service",), None, [("a.service", WARN)]),
        (("a.service", "b.service"), ("b.service",), [("a.service", FAIL), ("b.service", WARN)]),
    ],
)
def test_failed_units(world: Any, failed: tuple[str, ...], before: Any, expected: list[tuple[str, Verdict]]) -> None:
    findings = world.fails(*failed).judge(NoFailedUnits(None, before))
    assert [(f.subject, f.verdict) for f in findings] == expected


def test_failed_units_of_a_container_are_named_by_it(world: Any) -> None:
    rows = world.fails("a.service").values[FailedUnits()]
    world.put(FailedUnits(world.CONTAINER), rows)
    assert world.judge(NoFailedUnits(world.CONTAINER, ()))[0].subject == "llm-two/a.service"


def test_a_failed_unit_of_a_session_is_no_fault_of_the_boot(world: Any) -> None:
    world.fails("run-r19c2a422.service", "session-3.scope")
    assert [f.verdict for f in world.judge(NoFailedUnits(None, ()))] == [WARN, WARN]


# ---------------------------------------------------------------------------------------- what nobody declared

BEFORE = ("cron.service", "docker.service", "ssh.service")


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (lambda w: w.services(*BEFORE, "new.service"), [(PASS, "the host", "all 3 services")]),
        (lambda w: w.services("ssh.service", "cron.service"), [(WARN, "docker.service", "is inactive now")]),
        (
            lambda w: {
                **w.services("ssh.service", "cron.service"),
                **w.services("docker.service", active="activating", sub="start"),
            },
            [(WARN, "docker.service", "is activating (start) now")],
        ),
        # Told by NoFailedUnits.
        (lambda w: {**w.services(*BEFORE), **w.services("docker.service", active="failed")}, [(PASS, "the host", "all")]),
    ],
)
def test_a_service_that_ran_before_is_missed(world: Any, now: Break, expected: list[tuple[Verdict, str, str]]) -> None:
    findings = world.put(Services(), now(world)).judge(ServicesAsBefore(None, BEFORE))
    assert [(f.verdict, f.subject) for f in findings] == [(v, s) for v, s, _ in expected]
    assert all(words in f.reason for f, (_, _, words) in zip(findings, expected, strict=True))


def test_a_declared_service_is_judged_by_its_own_checks(world: Any) -> None:
    world.put(Services(world.CONTAINER), world.services("ssh.service"))
    before = ("sglang-qwen.service", "ssh.service")
    (finding,) = world.judge(ServicesAsBefore(world.CONTAINER, before))
    assert (finding.verdict, finding.subject) == (WARN, "llm-two/sglang-qwen.service")
    assert "pct exec 102 -- systemctl status sglang-qwen.service" in finding.what_to_do
    assert world.verdict(ServicesAsBefore(world.CONTAINER, before, ("sglang-qwen.service",))) is PASS


@pytest.mark.parametrize(("before", "words"), [(None, "is not known"), ((), "no service ran before")])
def test_without_services_before_nothing_is_compared(world: Any, before: tuple[str, ...] | None, words: str) -> None:
    (finding,) = world.judge(ServicesAsBefore(None, before))
    assert finding.verdict is NOT_CHECKED and words in finding.reason

"""The stand-in speaks as the releases do, and breaks as it is told."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from proofbook.lab.standin.engine import Reply, Server
from proofbook.lab.standin.startlog import dated
from proofbook.signatures import LogLine, load
from proofbook.signatures.judge import Judging, LogContext
from proofbook.signatures.sglang import ServerLog, Start

BASE = (
    "/opt/sglang/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/Q", "--tp-size", "4",
    "--host", "0.0.0.0", "--port", "30000", "--mem-fraction-static", "0.75",
)  # fmt: skip
MTP = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1")
DRAFTS = ("--speculative-num-draft-tokens", "6")
V2 = {"SGLANG_ENABLE_SPEC_V2": "1", "NCCL_P2P_DISABLE": "1"}
EPSILON = ("--speculative-draft-epsilon", "0.2")
VERSIONS = ("0.5.9", "0.5.10", "0.5.13", "0.5.14", "0.5.20", "0.5.23")


def strategy(version: str) -> tuple[str, str]:
    old = version in ("0.5.9", "0.5.10", "0.5.13")
    return ("--mamba-scheduler-strategy" if old else "--mamba-radix-cache-strategy", "extra_buffer")


def server(version: str = "0.5.10", *, mtp: bool = True, environ: Mapping[str, str] = V2, **faults: Mapping[str, Any]) -> Server:
    argv = (*BASE, *(MTP + DRAFTS if mtp else ()), *strategy(version))
    return Server(argv, environ, version, {name.replace("_", "-"): given for name, given in faults.items()})


def ask(one: Server, prompt: str, *, running: int = 1, tokens: int = 256, temperature: float = 0.0, **params: Any) -> Reply:
    sampling = {"max_new_tokens": tokens, "temperature": temperature, **params}
    return one.answer("POST", "/generate", json.dumps({"text": prompt, "sampling_params": sampling}).encode(), running=running)


def meta(reply: Reply) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(reply.body)["meta_info"]
    return value


def started(one: Server) -> Start:
    reader = ServerLog()
    judging = Judging(load(), LogContext(), reader)
    for second, text in one.startup():
        for line in dated(text, 1_767_225_600 + second, 812).split("\n"):
            judging.feed(LogLine(line, source="service"))
    return reader.starts[-1]


KEY, ADMIN = "key-of-this-server", "key-of-its-admin"


@pytest.mark.parametrize("version", ("0.5.5", "0.5.9", "0.5.20", "0.5.23"))
def test_who_brings_no_key_is_refused(version: str) -> None:
    one = Server((*BASE, "--api-key", KEY), {}, version)
    asked = json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 4}}).encode()
    for path, method in (("/generate", "POST"), ("/v1/chat/completions", "POST"), ("/server_info", "GET"), ("/v1/models", "GET")):
        for brought in ("", "Bearer another", KEY, f"Basic {KEY}"):
            reply = one.answer(method, path, asked, authorization=brought)
            assert (reply.status, json.loads(reply.body)) == (401, {"error": "Unauthorized"})
    assert one.requests == 0, "nothing was generated"
    reply = one.answer("POST", "/generate", asked, authorization=f"Bearer {KEY}")
    assert (reply.status, one.requests) == (200, 1)
    assert one.answer("POST", "/generate", asked, authorization=f"bearer {KEY}").status == (401 if version == "0.5.5" else 200)
    for open_to_all in ("/health", "/health_generate", "/metrics"):
        assert one.answer("GET", open_to_all).status != 401
    assert (one.answer("GET", "/ready").status == 200) is (version in ("0.5.20", "0.5.23"))
    assert any(f"api_key='{KEY}'" in text or f"'api_key': '{KEY}'" in text for _, text in one.startup()), "as the real one does"


def test_emptying_the_cache_is_for_the_admin_where_there_is_one() -> None:
    one = Server((*BASE, "--api-key", KEY, "--admin-api-key", ADMIN), {}, "0.5.10")
    assert one.answer("POST", "/flush_cache", authorization=f"Bearer {KEY}").status == 401
    assert one.answer("POST", "/flush_cache", authorization=f"Bearer {ADMIN}").status == 200
    assert one.answer("GET", "/server_info", authorization=f"Bearer {KEY}").status == 200


@pytest.mark.parametrize("version", VERSIONS)
def test_the_log_reader_understands_the_start_of_every_release(version: str) -> None:
    one = server(version)
    start = started(one)
    assert start.ready
    assert start.algorithm == "EAGLE"
    assert start.draft == "Qwen3_5ForCausalLMMTP"
    assert start.missing_ranks() == ()
    assert start.weights["Qwen3_5ForCausalLMMTP"] == dict.fromkeys(("TP0", "TP1", "TP2", "TP3"), 1.91)
    assert start.capacity == one.max_running
    assert not started(server(version, mtp=False)).algorithm


@pytest.mark.parametrize(("version", "running"), [("0.5.9", 8), ("0.5.10", 6), ("0.5.13", 15), ("0.5.14", 13)])
def test_how_many_run_at_once_follows_the_formula_of_the_release(version: str, running: int) -> None:
    assert server(version).max_running == running


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("0.5.9", EPSILON, "launch_server.py: error: unrecognized arguments: --speculative-draft-epsilon 0.2"),
        ("0.5.20", EPSILON, "sglang serve: error: unrecognized arguments: --speculative-draft-epsilon 0.2"),
        ("0.5.20", ("--mamba-scheduler-strategy", "auto"), "unrecognized arguments: --mamba-scheduler-strategy auto"),
        ("0.5.9", ("--mamba-radix-cache-strategy", "auto"), "unrecognized arguments: --mamba-radix-cache-strategy auto"),
        ("0.5.20", ("--cuda-graph-max-bs", "4"), "ambiguous option: --cuda-graph-max-bs"),
        ("0.5.9", ("--speculative-num", "6"), "ambiguous option: --speculative-num"),
        ("0.5.9", ("--speculative-algorithm", "MTP"), "argument --speculative-algorithm: invalid choice: 'MTP'"),
        ("0.5.9", ("--speculative-num-steps", "5a"), "argument --speculative-num-steps: invalid int value: '5a'"),
    ],
)  # fmt: skip
def test_a_release_refuses_what_its_parser_does_not_know(version: str, options: tuple[str, ...], words: str) -> None:
    one = Server((*BASE, *options), {}, version)
    assert one.ends is not None
    assert (one.ends.killed, one.ends.status) == (False, 2)
    assert words in list(one.startup())[-1][1]


def test_an_abbreviation_is_taken_and_nextn_is_stored_as_eagle() -> None:
    one = Server((*BASE, "--speculative-algo=NEXTN", *strategy("0.5.10")), V2, "0.5.10")
    info = one.server_info()
    assert (info["speculative_algorithm"], info["speculative_num_steps"], info["speculative_num_draft_tokens"]) == ("EAGLE", 3, 4)


def test_a_state_strategy_that_speculation_cannot_use() -> None:
    argv = (*BASE, *MTP, *DRAFTS)
    silent = Server(argv, V2, "0.5.9")
    assert silent.resolved is not None and silent.resolved.args["disable_radix_cache"] is True
    refused = Server(argv, V2, "0.5.10")
    assert refused.ends is not None and refused.ends.status == 1
    assert "no_buffer.To use radix cache" in list(refused.startup())[-1][1]
    assert Server(argv, V2, "0.5.14").ends is None


@pytest.mark.parametrize("version", VERSIONS)
def test_drafts_are_accepted_and_the_counters_have_the_names_of_the_release(version: str) -> None:
    found = meta(ask(server(version), "Count from 1 to 300."))
    assert found["completion_tokens"] == 256
    assert found["completion_tokens"] / found["spec_verify_ct"] > 5
    assert found["spec_accept_length"] == found["completion_tokens"] / found["spec_verify_ct"]
    assert ("spec_accept_token_num" in found) == (version in ("0.5.9", "0.5.10"))
    assert ("spec_num_correct_drafts" in found) == (version not in ("0.5.9", "0.5.10"))
    assert "spec_verify_ct" not in meta(ask(server(version, mtp=False), "Count from 1 to 300."))


def test_greedy_answers_are_those_of_the_server_without_drafts_and_faster() -> None:
    for prompt in ("Count from 1 to 300.", "Write a Python function.", "Tell me of the sea."):
        for running in (1, 4):
            plain, drafted = ask(server(mtp=False), prompt, running=running), ask(server(), prompt, running=running)
            assert json.loads(plain.body)["text"] == json.loads(drafted.body)["text"]
            assert drafted.seconds < plain.seconds
            assert meta(drafted)["e2e_latency"] == drafted.seconds


def test_what_is_over_the_cap_waits_in_the_queue() -> None:
    one = server("0.5.10")
    within, above = ask(one, "Tell me.", running=6), ask(one, "Tell me.", running=12)
    assert above.seconds > 1.5 * within.seconds
    assert any("#queue-req: 6" in text for _, text in above.log)


def test_decode_lines_come_every_forty_steps_and_name_the_accept_length() -> None:
    one = server()
    assert not any("Decode batch" in text for _, text in ask(one, "Count from 1 to 300.", tokens=64).log)
    lines = [text for _, text in ask(one, "Tell me of the sea.").log if "Decode batch" in text]
    assert lines and all("accept len: " in line for line in lines)
    plain = [text for _, text in ask(server(mtp=False), "Tell me.").log if "Decode batch" in text]
    assert plain and not any("accept len" in line for line in plain)


def test_structured_answers_are_what_was_asked_for() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 3}}}
    value = json.loads(json.loads(ask(server(), "A person as JSON.", json_schema=json.dumps(schema)).body)["text"])
    assert isinstance(value["name"], str) and value["age"] >= 3
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
    reply = server().answer("POST", "/v1/chat/completions", json.dumps(asked).encode())
    call = json.loads(reply.body)["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather" and "age" in json.loads(call["arguments"])


def test_a_stream_ends_with_the_whole_answer() -> None:
    body = {"text": "Tell me.", "stream": True, "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    reply = server().answer("POST", "/generate", json.dumps(body).encode())
    parts = [data.removeprefix(b"data: ") for _, data in reply.chunks]
    assert parts[-1].strip() == b"[DONE]"
    assert json.loads(parts[-2])["text"] == json.loads(ask(server(), "Tell me.", tokens=40).body)["text"]
    assert [second for second, _ in reply.chunks] == sorted(second for second, _ in reply.chunks)


def test_health_says_nothing_of_speculation() -> None:
    one = server(draft_weights_missing={})
    assert one.answer("GET", "/health").status == 200
    assert one.answer("GET", "/health", ready=False).status == 503
    assert one.requests == 0


def test_flushing_forgets_the_cache_and_the_lifetime_average() -> None:
    one = server()
    ask(one, "Tell me of the sea.")
    assert meta(ask(one, "Tell me of the sea."))["cached_tokens"] > 0
    assert "avg_spec_accept_length" in one.server_info()["internal_states"][0]
    assert one.answer("POST", "/flush_cache").status == 200
    assert meta(ask(one, "Tell me of the sea.", tokens=8))["cached_tokens"] == 0
    assert "avg_spec_accept_length" not in one.server_info()["internal_states"][0]


# -------------------------------------------------------------------------------------------------- faults


def test_a_fault_bites_with_speculation_alone_unless_it_is_meant_to() -> None:
    assert meta(ask(server(mtp=False, crash_on_first_request={}), "Tell me."))["completion_tokens"] > 0
    assert ask(server(mtp=False, crash_on_first_request={"always": True}), "Tell me.").hangs
    with pytest.raises(ValueError, match="no such fault"):
        server(does_not_exist={})
    with pytest.raises(ValueError, match="has no m"):
        server(crash_on_nth={"m": 3})


def test_silently_off_echoes_its_arguments_and_drafts_nothing() -> None:
    one = server(silently_off={})
    start = started(one)
    assert start.ready and start.algorithm == "EAGLE" and start.draft == ""
    assert any("reset to 48" in text for _, text in one.startup())
    assert "spec_verify_ct" not in meta(ask(one, "Count from 1 to 300."))


def test_missing_draft_weights_load_without_a_word_and_nothing_is_accepted() -> None:
    one = server(draft_weights_missing={})
    assert started(one).draft == "Qwen3_5ForCausalLMMTP"
    assert meta(ask(one, "Count from 1 to 300."))["spec_accept_length"] == 1.0


def test_simulated_acceptance_is_fast_and_wrong() -> None:
    environ = {**V2, "SGLANG_SIMULATE_ACC_LEN": "5.5"}
    faked, true = ask(server(environ=environ), "Tell me of the sea."), ask(server(), "Tell me of the sea.")
    assert meta(faked)["spec_accept_length"] == pytest.approx(5.5, abs=0.1)
    assert json.loads(faked.body)["text"] != json.loads(true.body)["text"]


@pytest.mark.parametrize(
    ("fault", "words", "before"),
    [
        ("draft-oom", "CUDA out of memory", "Memory pool end"),
        ("not-enough-memory", "Not enough memory. Please try to increase --mem-fraction-static", "Load weight end"),
        ("out-of-memory", "CUDA out of memory", "Load weight begin"),
    ],
)
def test_a_start_without_memory_dies_with_sigkill(fault: str, words: str, before: str) -> None:
    one = Server((*BASE, *MTP, *DRAFTS, *strategy("0.5.10")), V2, "0.5.10", {fault: {}})
    lines = [text for _, text in one.startup()]
    assert one.ends is not None and (one.ends.killed, one.ends.status) == (True, 9)
    assert one.listens_after_s is None
    assert any(before in line for line in lines) and any(words in line for line in lines)
    assert "Received sigquit from a child process" in lines[-1]
    assert not any("Qwen3_5ForCausalLMMTP" in line or "fired up" in line for line in lines)


def test_a_leftover_on_one_card_makes_the_ranks_unequal() -> None:
    one = Server((*BASE, *MTP, *DRAFTS, *strategy("0.5.10")), V2, "0.5.10", free_gib=(94.5, 18.5, 94.5, 94.5))
    assert one.ends is not None
    assert any("The memory capacity is unbalanced" in text for _, text in one.startup())


def test_nccl_waits_for_ever_unless_p2p_is_off() -> None:
    assert server(p2p_hang={}).listens_after_s is not None
    hung = server(environ={"SGLANG_ENABLE_SPEC_V2": "1"}, p2p_hang={})
    assert hung.listens_after_s is None and hung.ends is None
    assert "Init torch distributed begin" in list(hung.startup())[-1][1]


@pytest.mark.parametrize(("fault", "well"), [("crash-on-first-request", 0), ("crash-on-nth", 16)])
def test_a_crash_cuts_the_request_and_kills_the_server(fault: str, well: int) -> None:
    one = Server((*BASE, *MTP, *DRAFTS, *strategy("0.5.10")), V2, "0.5.10", {fault: {}})
    for _ in range(well):
        assert not ask(one, "Tell me.", tokens=8).hangs
    last = ask(one, "Tell me.", tokens=8)
    assert last.hangs and [e.kind for e in last.effects] == ["die"]
    assert any("SIGQUIT received" in line for line in last.effects[0].lines)


def test_a_crash_on_structured_output_alone() -> None:
    one = server(crash_on_structured={})
    assert not ask(one, "Tell me.").hangs
    assert ask(one, "Tell me.", json_schema='{"type": "object"}').hangs


@pytest.mark.parametrize(("version", "kinds"), [("0.5.9", ["rank-dies"]), ("0.5.10", ["rank-dies", "die"])])
def test_only_since_0_5_10_somebody_notices_that_a_scheduler_is_gone(version: str, kinds: list[str]) -> None:
    one = server(version, zombie_scheduler={"n": 1})
    assert [e.kind for e in ask(one, "Tell me.").effects] == kinds
    assert one.answer("GET", "/health").status == 503


def test_a_hang_with_a_well_health_address() -> None:
    one = server(hang_health_200={"n": 1})
    hung = ask(one, "Tell me.")
    assert hung.hangs and hung.effects[0].after_s == 305.0
    assert one.answer("GET", "/health").status == 200
    assert one.answer("GET", "/server_info").hangs


@pytest.mark.parametrize(
    ("fault", "gains"), [("slower-than-before", (False, False)), ("gain-only-low-concurrency", (True, False))]
)
def test_faults_of_speed(fault: str, gains: tuple[bool, bool]) -> None:
    one = Server((*BASE, *MTP, *DRAFTS, *strategy("0.5.10")), V2, "0.5.10", {fault: {}})
    found = tuple(
        ask(one, "Tell me of the sea.", running=n).seconds < ask(server(mtp=False), "Tell me of the sea.", running=n).seconds
        for n in (1, 6)
    )
    assert found == gains


def test_wrong_after_a_cache_hit() -> None:
    one = server(wrong_after_cache_hit={})
    first, second = (json.loads(ask(one, "Tell me of the sea.").body)["text"] for _ in range(2))
    assert first != second
    assert first == json.loads(ask(server(mtp=False), "Tell me of the sea.").body)["text"]


def test_a_slow_start_is_the_same_start() -> None:
    slow, usual = server(slow_start={"factor": 8.0}), server()
    assert slow.ready_after_s == 400.0 and usual.ready_after_s == 50.0
    assert [text for _, text in slow.startup()] == [text for _, text in usual.startup()]


def test_a_server_can_be_saved_in_the_middle() -> None:
    one = server(crash_on_nth={"n": 3})
    ask(one, "Tell me.")
    again: Server = pickle.loads(pickle.dumps(one))
    assert json.loads(ask(again, "More.").body)["text"] == json.loads(ask(one, "More.").body)["text"]
    assert ask(again, "More.").hangs

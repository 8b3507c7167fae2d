"""How a server started, from its own lines, whichever version wrote them."""

from __future__ import annotations

import pytest

from proofbook.model import Verdict
from proofbook.signatures.sglang import Start, read_arguments
from proofbook.triage import Triage, judge_paste

ARGUMENTS = (
    "model_path='/models/qwen', tp_size=2, speculative_algorithm='EAGLE', speculative_num_steps=5, speculative_eagle_topk=1, "
    "speculative_num_draft_tokens=6, mem_fraction_static=0.75, max_running_requests=48, mamba_scheduler_strategy='extra_buffer', "
    "disable_radix_cache=False, preferred=<Enum.X: 1>, log_level='info'"
)


def at(second: int, text: str, rank: str = "") -> str:
    return f"[2026-03-09 16:{second // 60:02d}:{second % 60:02d}{f' {rank}' if rank else ''}] {text}\n"


def both(second: int, text: str) -> str:
    return at(second, text, "TP0") + at(second + 1, text, "TP1")


WEIGHTS = "Load weight end. {how}type={name}, {what}avail mem=36.30 GB, mem usage={size} GB."
DECODE = (
    "Decode batch, #running-req: {n}, #full token: 812, full token usage: 0.00, mamba num: 3, mamba usage: 0.06, "
    "accept len: {length}, accept rate: 0.52, cuda graph: True, gen throughput (token/s): 96.10, #queue-req: {queued}"
)
SIZED = (
    "max_total_num_tokens=116224, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=8, "
    "context_len=262144, available_gpu_mem=12.30 GB"
)


def start_059() -> str:
    """As 0.5.9 writes it: the draft comes after the pools."""
    return (
        at(0, f"server_args=ServerArgs({ARGUMENTS})")
        + "Spec v2 is enabled for eagle/eagle3 speculative decoding and overlap schedule is turned on.\n"
        + both(5, "Load weight begin. avail mem=94.12 GB")
        + both(65, WEIGHTS.format(how="", name="Qwen3_5MoeForConditionalGeneration", what="dtype=torch.bfloat16, ", size="57.40"))
        + both(66, "Mamba Cache is allocated. max_mamba_cache_size: 33, conv_state size: 0.01GB, ssm_state size: 1.18GB")
        + both(67, "KV Cache is allocated. #tokens: 116224, K size: 0.66 GB, V size: 0.66 GB")
        + both(68, "Memory pool end. avail mem=22.40 GB")
        + both(70, "Capture cuda graph begin. This can take up to several minutes. avail mem=22.30 GB")
        + both(90, "Capture cuda graph end. Time elapsed: 20.10 s. mem usage=1.30 GB. avail mem=21.00 GB.")
        + both(91, "Load weight begin. avail mem=21.00 GB")
        + both(93, WEIGHTS.format(how="", name="Qwen3_5ForCausalLMMTP", what="dtype=torch.bfloat16, ", size="1.91"))
        + at(100, SIZED, "TP0")
        + at(101, "INFO:     Application startup complete.")
        + at(110, "The server is fired up and ready to roll!")
    )


def start_0522() -> str:
    """As 0.5.22 writes it: a dictionary, the draft before the pools, other words for the graphs."""
    echo = (
        "{'model_path': '/models/qwen', 'tp_size': 2, 'speculative_algorithm': 'EAGLE', 'speculative_num_steps': 5, "
        "'mem_fraction_static': 0.75, 'max_running_requests': 48}"
    )
    return (
        at(0, f"server_args={echo}")
        + both(5, "Load weight begin. avail mem=94.12 GB")
        + both(65, WEIGHTS.format(how="elapsed=60.10 s, ", name="Qwen3_5MoeForConditionalGeneration", what="", size="57.40"))
        + both(67, "Load weight begin. avail mem=36.30 GB")
        + both(69, WEIGHTS.format(how="elapsed=2.00 s, ", name="Qwen3_5ForCausalLMMTP", what="", size="1.91"))
        + both(70, "KV Cache is allocated. #tokens: 467000, K size: 2.66 GB, V size: 2.66 GB")
        + both(71, "Memory pool end. avail mem=12.40 GB")
        + both(72, "Capture target verify CUDA graph begin. backend=flashinfer, num_tokens_per_req=6, avail mem=12.30 GB")
        + both(85, "Capture target verify CUDA graph end. elapsed=13.1 s, mem usage=0.90 GB, avail mem=11.40 GB")
        + at(100, SIZED.replace("=8,", "=13,"), "TP0")
        + at(110, "The server is fired up and ready to roll!")
    )


def only(said: Triage) -> Start:
    assert len(said.starts) == 1
    return said.starts[0]


@pytest.mark.parametrize(
    ("text", "versions", "capacity"),
    [(start_059(), "0.5.7 to 0.5.10", 8), (start_0522(), "0.5.22 or later", 13)],
    ids=["0.5.9", "0.5.22"],
)
def test_a_start_is_read_whichever_version_wrote_it(text: str, versions: str, capacity: int) -> None:
    said = judge_paste(text)
    start = only(said)
    assert (said.verdict, said.findings, said.unknown_lines) == (Verdict.PASS, (), 0)
    assert (start.ready, start.versions, start.capacity, start.draft) == (True, versions, capacity, "Qwen3_5ForCausalLMMTP")
    assert start.weights["Qwen3_5ForCausalLMMTP"] == {"TP0": 1.91, "TP1": 1.91}
    assert start.milestones["weights"].ranks == {"TP0", "TP1"}
    assert start.milestones["weights"].seconds() == 61
    assert start.milestones["draft"].seconds() == 3
    effective = dict(start.effective())
    assert effective["speculative_algorithm"].startswith("EAGLE (NEXTN")
    assert effective["max_running_requests"] == f"48 asked, {capacity} effective"
    assert effective["draft weights"].startswith("Qwen3_5ForCausalLMMTP, 1.91 GiB on each of 2 ranks")
    assert any("no Decode line" in x for x in said.not_observable)


def test_the_same_start_through_the_journal() -> None:
    text = "".join(f"Mar 09 16:02:27 llm-two sglang-qwen[15462]: {line}\n" for line in start_059().splitlines())
    assert only(judge_paste(text)).milestones.keys() == only(judge_paste(start_059())).milestones.keys()


def test_numbers_of_tokens_in_the_verify_graph_prove_the_draft_tokens() -> None:
    assert only(judge_paste(start_0522())).graph_tokens == 6


def decode(*lengths: str, n: int = 1, queued: int = 0) -> str:
    return "".join(at(200 + i, DECODE.format(n=n, length=x, queued=queued), "TP0") for i, x in enumerate(lengths))


@pytest.mark.parametrize(
    ("lengths", "verdict", "signature"),
    [
        (["3.10", "2.95", "3.40"], Verdict.PASS, ""),
        (["3.10", "1.05", "3.40", "3.20", "3.00"], Verdict.PASS, ""),
        (["1.00", "1.00", "1.00"], Verdict.FAIL, "sglang-accept-nothing"),
        (["3.10", "3.00", "2.90", "3.10", "3.00", "2.90", "1.02", "1.01", "1.00"], Verdict.FAIL, "sglang-accept-nothing"),
        (["1.57", "1.52", "1.50"], Verdict.WARN, "sglang-accept-low"),
    ],
)
def test_accept_lengths_are_weighed_over_the_log(lengths: list[str], verdict: Verdict, signature: str) -> None:
    said = judge_paste(start_059() + decode(*lengths))
    assert (said.verdict, [f.signature for f in said.findings]) == (verdict, [signature] if signature else [])
    assert not any("no Decode line" in x for x in said.not_observable)
    assert only(said).acceptance.lengths == len(lengths)


def test_a_collapse_says_from_where_to_where() -> None:
    said = judge_paste(start_059() + decode("3.10", "3.00", "1.02", "1.01", "1.00"))
    assert "fell from 3.1 to 1" in said.findings[0].reason


def test_speculation_that_is_asked_for_and_off_fails() -> None:
    off = at(
        200,
        "Decode batch, #running-req: 1, #token: 812, token usage: 0.00, gen throughput (token/s): 60.10, #queue-req: 0",
    )
    assert [f.signature for f in judge_paste(start_059() + off).findings] == ["sglang-spec-off"]


def test_a_queue_at_the_true_capacity_is_a_limit() -> None:
    said = judge_paste(start_059() + decode("3.10", "3.20", n=8, queued=4))
    assert (said.verdict, [f.signature for f in said.findings]) == (Verdict.WARN, ["sglang-queue-at-capacity"])


def test_a_start_that_never_became_ready_is_open_and_names_the_rank() -> None:
    text = start_059().split("Capture cuda graph begin")[0].rsplit("\n", 1)[0] + "\n"
    text = "".join(x + "\n" for x in text.splitlines() if not ("TP1" in x and "Load weight end" in x))
    said = judge_paste(text)
    assert (said.verdict, [f.signature for f in said.findings]) == (Verdict.UNKNOWN, ["sglang-not-ready"])
    assert "TP1 had not loaded the weights" in said.findings[0].reason


def test_a_restart_is_a_start_of_its_own() -> None:
    crash = (
        at(120, "Scheduler hit an exception: Traceback (most recent call last):", "TP0")
        + "TypeError: 'NoneType' object cannot be interpreted as an integer\n"
    )
    said = judge_paste(start_059() + crash + start_059())
    assert len(said.starts) == 2
    assert [f.signature for f in said.findings if f.root] == ["sglang-scheduler-exception"]


HEALTH = 'INFO:     127.0.0.1:51234 - "GET /health HTTP/1.1" 200 OK'


def test_a_dead_scheduler_behind_a_living_health_endpoint_is_a_zombie() -> None:
    died = "[rank1]:[E309 16:12:28.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: x\n"
    said = judge_paste(start_059() + died + at(900, HEALTH))
    zombie = next(f for f in said.findings if f.signature == "sglang-zombie")
    assert (zombie.verdict, zombie.root, zombie.caused_by) == (Verdict.FAIL, False, "nccl-watchdog-timeout")
    ended = at(600, "SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
    assert "sglang-zombie" not in {f.signature for f in judge_paste(start_059() + died + ended + at(900, HEALTH)).findings}


def test_both_memory_errors_leave_no_value_of_the_fraction() -> None:
    said = judge_paste(
        at(1, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
        + at(2, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.91 GiB.")
    )
    assert all("no value of --mem-fraction-static fits" in f.what_to_do for f in said.findings)


def test_arguments_are_read_as_far_as_they_go() -> None:
    assert read_arguments("server_args=ServerArgs(a='x', b=1, c=None, d=[1, 2])") == {"a": "x", "b": 1, "c": None, "d": [1, 2]}
    assert read_arguments("x server_args={'a': 'x', 'b': True}") == {"a": "x", "b": True}
    assert read_arguments("server_args=ServerArgs(a='x', b=1, e=<Enum.X: 1>, c=0.75, d='cut") == {"a": "x", "b": 1, "c": 0.75}

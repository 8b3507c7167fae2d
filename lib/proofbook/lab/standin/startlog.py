"""What a server prints while it starts, by release: (second, text) on a start of 50 seconds.

Texts are without their date; lines of one rank begin with ``TP<n>] ``, as :func:`dated` turns them into SGLang's own form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from .arguments import Resolved
from .memory import DRAFT_GRAPHS, GRAPHS, Budget

Lines = Iterator[tuple[float, str]]

#: When the port opens, and when the server is ready, on a start of 50 seconds.
LISTENS, READY = 47.5, 50.0
NOMINAL = 50.0

TARGET, DRAFT_CLASS = "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLMMTP"
_BS = "[1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 44, 48]"


def dated(text: str, at: float, pid: int) -> str:
    """A line as SGLang prints it, with its date (UTC) and the prefix of its rank. ``at``: seconds since the epoch."""
    text = text.replace("{pid}", str(pid))
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    rank = re.match(r"(TP\d+)\] ", text)
    return f"[{stamp} {rank[1]}] {text[rank.end() :]}" if rank else f"[{stamp}] {text}"


def echo(resolved: Resolved) -> str:
    """The resolved arguments, as the server prints them: a ServerArgs until 0.5.21, a dict from 0.5.22."""
    if resolved.version >= (0, 5, 22):
        return f"server_args={resolved.args!r}"
    return "server_args=ServerArgs(" + ", ".join(f"{k}={v!r}" for k, v in resolved.args.items()) + ")"


def each(second: float, ranks: range, text: str) -> Lines:
    for rank in ranks:
        yield second, f"TP{rank}] {text}"


def start(resolved: Resolved, budget: Budget, *, drafts: bool = True) -> Lines:
    """All lines of a start that comes up. ``drafts``: whether the draft model is really loaded and used."""
    ranks, early = range(resolved.tp_size), resolved.version >= (0, 5, 14)
    yield from arguments(resolved)
    yield from ranks_meet(resolved)
    yield from weights(resolved, budget)
    drafting = resolved.speculative and drafts
    if drafting and early:
        yield from draft_weights(resolved, budget, 28.0, budget.after_weights)
    yield from pools(resolved, budget, drafting=drafting)
    if drafting and not early:
        yield from draft_weights(resolved, budget, 31.0, budget.after_pools)
        yield from kv_cache(ranks, 33.5, budget.tokens, budget.tokens * 1024 / (1 << 31))
    yield from graphs(resolved, budget, drafting=drafting)
    yield (
        46.0,
        (
            f"TP0] max_total_num_tokens={budget.tokens}, chunked_prefill_size={resolved.args['chunked_prefill_size']}, "
            f"max_prefill_tokens={resolved.args['max_prefill_tokens']}, max_running_requests={budget.max_running}, "
            f"context_len={resolved.args['context_length'] or 262144}, available_gpu_mem={budget.left:.2f} GB"
        ),
    )
    yield from _fewer(resolved, budget)
    yield from http_up(resolved)


def _fewer(resolved: Resolved, budget: Budget) -> Lines:
    """What a release says of the number of requests that it lets in: nothing to 0.5.12, then ever more of why there are fewer."""
    version, running, asked = resolved.version, budget.max_running, budget.asked
    if version[:3] == (0, 5, 13):
        text = f"Max concurrent requests (per dp worker) from the finalized token capacity: max_num_reqs={running}."
        yield from each(45.0, range(resolved.tp_size), text)
    if budget.capped and version >= (0, 5, 17):
        text = (
            f"max_running_requests is capped to {running} by the mamba state cache "
            f"(max_mamba_cache_size={budget.slots}, {budget.slots // max(running, 1)} state slots per request). "
            "To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, "
            "or halve the state size with --mamba-ssm-dtype bfloat16."
        )
        yield from each(45.0, range(resolved.tp_size), text)
    elif asked is not None and running < asked and version >= (0, 5, 14):
        text = (
            f"max_running_requests was reduced from the requested {asked} to {running} (per dp worker) due to the available "
            "KV cache capacity."
        )
        yield from each(45.0, range(resolved.tp_size), text)


def arguments(resolved: Resolved) -> Lines:
    # WHY: until 0.5.10 these are said before logging is set up, so they carry the name of the logger instead of a level.
    for text in resolved.warnings:
        yield 9.5, f"WARNING server_args.py:2691: {text}" if resolved.version <= (0, 5, 10, 9) else text
    yield 10.0, echo(resolved)


def ranks_meet(resolved: Resolved) -> Lines:
    ranks = range(resolved.tp_size)
    yield from each(14.0, ranks, "Init torch distributed begin.")
    yield from each(16.0, ranks, "Init torch distributed ends. mem usage=0.91 GB")


def weights(resolved: Resolved, budget: Budget) -> Lines:
    ranks = range(resolved.tp_size)
    yield from each(17.0, ranks, f"Load weight begin. avail mem={budget.free:.2f} GB")
    for rank in ranks:
        yield 27.0, f"TP{rank}] {_loaded(resolved, TARGET, 9.7 + rank / 100, budget.after_weights, budget.weights)}"


def draft_weights(resolved: Resolved, budget: Budget, second: float, before: float) -> Lines:
    ranks = range(resolved.tp_size)
    yield from each(second, ranks, f"Load weight begin. avail mem={before:.2f} GB")
    for rank in ranks:
        done = _loaded(resolved, DRAFT_CLASS, 1.9 + rank / 100, before - budget.draft, budget.draft)
        yield second + 2.0, f"TP{rank}] {done}"


def _loaded(resolved: Resolved, name: str, took: float, left: float, used: float) -> str:
    dtype = "dtype=torch.bfloat16, " if resolved.version < (0, 5, 10) else ""
    return f"Load weight end. elapsed={took:.2f} s, type={name}, {dtype}avail mem={left:.2f} GB, mem usage={used:.2f} GB."


def pools(resolved: Resolved, budget: Budget, *, drafting: bool) -> Lines:
    second = 30.0 if resolved.version < (0, 5, 14) else 32.0
    more = (
        f"intermediate_ssm_state_cache size: {budget.intermediate_ssm:.2f}GB "
        f"intermediate_conv_window_cache size: {budget.intermediate_conv:.2f}GB "
        if drafting
        else ""
    )
    ranks = range(resolved.tp_size)
    yield from each(
        second,
        ranks,
        f"Mamba Cache is allocated. max_mamba_cache_size: {budget.slots}, conv_state size: {budget.conv:.2f}GB, "
        f"ssm_state size: {budget.ssm:.2f}GB {more}",
    )
    yield from kv_cache(ranks, second, budget.tokens, budget.kv / 2)
    yield from each(second, ranks, f"Memory pool end. avail mem={budget.after_pools:.2f} GB")
    if drafting and resolved.version >= (0, 5, 14):
        yield from kv_cache(ranks, second, budget.tokens, budget.tokens * 1024 / (1 << 31))


def kv_cache(ranks: range, second: float, tokens: int, half: float) -> Lines:
    yield from each(second, ranks, f"KV Cache is allocated. #tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB")


def graphs(resolved: Resolved, budget: Budget, *, drafting: bool) -> Lines:
    if resolved.args["disable_cuda_graph"]:
        return
    before = budget.after_draft
    if resolved.version >= (0, 5, 14):
        yield from _new_graphs(resolved, before, drafting=drafting)
        return
    ranks = range(resolved.tp_size)
    yield from each(34.0, ranks, f"Capture cuda graph begin. This can take up to several minutes. avail mem={before:.2f} GB")
    yield 34.0, f"TP0] Capture cuda graph bs {_BS}"
    yield from each(43.0, ranks, _captured("cuda graph", 8.9, GRAPHS, before - GRAPHS))
    if not drafting:
        return
    left = before - GRAPHS
    if resolved.steps > 1:
        begin = f"Capture draft cuda graph begin. This can take up to several minutes. avail mem={left:.2f} GB"
        yield from each(43.2, ranks, begin)
        yield from each(45.0, ranks, _captured("draft cuda graph", 1.8, DRAFT_GRAPHS, left - DRAFT_GRAPHS))
    if resolved.args["attention_backend"] == "triton":
        begin = f"Capture draft extend cuda graph begin. This can take up to several minutes. avail mem={left:.2f} GB"
        yield from each(45.1, ranks, begin)
        yield from each(45.6, ranks, _captured("draft extend cuda graph", 0.5, 0.0, left - DRAFT_GRAPHS))


def _captured(what: str, took: float, used: float, left: float) -> str:
    return f"Capture {what} end. Time elapsed: {took:.2f} s. mem usage={used:.2f} GB. avail mem={left:.2f} GB."


def _new_graphs(resolved: Resolved, before: float, *, drafting: bool) -> Lines:
    """The wording from 0.5.14 on; the tokens of a request in the verify graph are the draft tokens."""
    ranks, backend = range(resolved.tp_size), resolved.args["attention_backend"]
    what, each_request = ("target verify", resolved.draft_tokens) if drafting else ("target decode", 1)
    yield from each(
        34.0,
        ranks,
        f"Capture {what} CUDA graph begin. backend={backend}, num_tokens_per_req={each_request}, avail mem={before:.2f} GB",
    )
    yield from each(42.0, ranks, _captured(f"{what} CUDA graph", 7.9, GRAPHS, before - GRAPHS))
    if drafting:
        left = before - GRAPHS
        if resolved.steps > 1:
            begin = f"Capture draft decode CUDA graph begin. backend={backend}, num_tokens_per_req=1, avail mem={left:.2f} GB"
            yield from each(42.5, ranks, begin)
            end = _captured("draft decode CUDA graph", 1.6, DRAFT_GRAPHS, left - DRAFT_GRAPHS)
            yield from each(44.2, ranks, end)


def http_up(resolved: Resolved) -> Lines:
    where = (resolved.args["host"], resolved.args["port"])
    yield 46.5, "INFO:     Started server process [{pid}]"
    yield 46.5, "INFO:     Waiting for application startup."
    yield (
        46.8,
        (
            "Using default chat sampling params from model generation config: "
            "{'repetition_penalty': 1.0, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95}"
        ),
    )
    yield 47.0, "INFO:     Application startup complete."
    # WHY: 0.5.9 and 0.5.10 open the socket themselves and hand it to uvicorn, which then prints the socket's own address.
    place = f"socket {where!r}" if resolved.version[:3] in ((0, 5, 9), (0, 5, 10)) else f"http://{where[0]}:{where[1]}"
    yield LISTENS, f"INFO:     Uvicorn running on {place} (Press CTRL+C to quit)"
    if not resolved.args["skip_server_warmup"]:
        info = "GET /get_model_info" if resolved.version < (0, 5, 6) else "GET /model_info"
        yield 48.0, f'INFO:     127.0.0.1:38122 - "{info} HTTP/1.1" 200 OK'
        yield (
            48.2,
            (
                "TP0] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, "
                "#running-req: 0, #queue-req: 0"
            ),
        )
        yield 49.8, 'INFO:     127.0.0.1:38124 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    yield READY, "The server is fired up and ready to roll!"

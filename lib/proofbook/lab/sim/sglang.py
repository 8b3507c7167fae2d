"""What SGLang 0.5.9/0.5.10 does from the outside: its log while it starts, why it dies, and what its port answers.

The texts of the milestones are those of these two releases; the numbers are plausible for four GPUs of 96 GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

_SRT = "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt"
_DATE = "%Y-%m-%d %H:%M:%S"


def is_sglang(argv: Sequence[str]) -> bool:
    return "sglang.launch_server" in argv or ("sglang" in argv[0] and "serve" in argv[1:2]) if argv else False


def flag(argv: Sequence[str], name: str, default: str = "") -> str:
    """The value of ``--name value`` or ``--name=value``; the last one wins."""
    value = default
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
    return value


def tp_size(argv: Sequence[str]) -> int:
    return int(flag(argv, "--tp-size", flag(argv, "--tensor-parallel-size", flag(argv, "--tp", "1"))))


def port(argv: Sequence[str]) -> int:
    return int(flag(argv, "--port", "30000"))


def speculative(argv: Sequence[str]) -> str:
    """The algorithm as the server stores it: NEXTN becomes EAGLE; "" without speculation."""
    name = flag(argv, "--speculative-algorithm", flag(argv, "--speculative-algo")).upper()
    return "EAGLE" if name == "NEXTN" else name


def resolved(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, object]:
    """The server's arguments after its own conversions, as it echoes them and as ``/server_info`` shows them."""
    algorithm = speculative(argv)
    steps = int(flag(argv, "--speculative-num-steps", "3")) if algorithm else None
    return {
        "model_path": flag(argv, "--model-path", flag(argv, "--model")),
        "tokenizer_path": flag(argv, "--model-path", flag(argv, "--model")),
        "tokenizer_mode": "auto",
        "load_format": "auto",
        "trust_remote_code": "--trust-remote-code" in argv,
        "context_length": None,
        "host": flag(argv, "--host", "127.0.0.1"),
        "port": port(argv),
        "dtype": "auto",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "mem_fraction_static": float(flag(argv, "--mem-fraction-static", "0.83")),
        "max_running_requests": int(flag(argv, "--max-running-requests", "48")) if algorithm else None,
        "max_total_tokens": None,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "schedule_policy": "fcfs",
        "page_size": 1,
        "tp_size": tp_size(argv),
        "pp_size": 1,
        "stream_interval": 1,
        "random_seed": 271828182,
        "watchdog_timeout": 300,
        "log_level": "info",
        "enable_metrics": "--enable-metrics" in argv,
        "served_model_name": flag(argv, "--served-model-name", flag(argv, "--model-path")),
        "attention_backend": "flashinfer",
        "sampling_backend": "flashinfer",
        "speculative_algorithm": algorithm or None,
        "speculative_draft_model_path": None,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1 if algorithm else None,
        "speculative_num_draft_tokens": steps + 1 if steps else None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "mamba_scheduler_strategy": flag(argv, "--mamba-scheduler-strategy", "no_buffer"),
        "disable_radix_cache": False,
        "disable_cuda_graph": False,
        "disable_custom_all_reduce": "--disable-custom-all-reduce" in argv,
        "disable_overlap_schedule": bool(algorithm)
        and environ.get("SGLANG_ENABLE_SPEC_V2", "").lower() not in ("1", "true", "yes", "y"),
        "decode_log_interval": 40,
        "cuda_graph_max_bs": 48,
        "ep_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
    }


def startup(argv: Sequence[str], environ: Mapping[str, str], took_s: float) -> Iterator[tuple[float, str]]:
    """(seconds after the start, text without its date) of a start that takes ``took_s`` until it is ready."""
    unit = took_s / 50.0
    args = resolved(argv, environ)
    ranks = range(tp_size(argv))
    draft = speculative(argv)
    if draft:
        yield (
            9.5,
            (
                "WARNING server_args.py:2691: Max running requests is reset to 48 for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            ),
        )
        if not args["disable_overlap_schedule"]:
            yield (
                9.5,
                (
                    "WARNING server_args.py:2700: Spec v2 is enabled for eagle/eagle3 speculative decoding "
                    "and overlap schedule is turned on."
                ),
            )
        else:
            yield (
                9.5,
                (
                    "WARNING server_args.py:2712: Overlap scheduler is disabled when spec v2 is off or using unsupported "
                    "speculative "
                    "algorithm. You can set env SGLANG_ENABLE_SPEC_V2=True to enable the experimental overlap scheduler."
                ),
            )
    yield 10.0, "server_args=ServerArgs(" + ", ".join(f"{k}={v!r}" for k, v in args.items()) + ")"
    for rank in ranks:
        yield 14 * unit, f"TP{rank}] Init torch distributed begin."
    for rank in ranks:
        yield 16 * unit, f"TP{rank}] Init torch distributed ends. mem usage=0.91 GB"
    for rank in ranks:
        yield 17 * unit, f"TP{rank}] Load weight begin. avail mem=93.55 GB"
    for rank in ranks:
        yield (
            27 * unit,
            (
                f"TP{rank}] Load weight end. elapsed={9.7 * unit + rank / 100:.2f} s, type=Qwen3_5MoeForConditionalGeneration, "
                "dtype=torch.bfloat16, avail mem=35.27 GB, mem usage=58.28 GB."
            ),
        )
    buffers = " intermediate_ssm_state_cache size: 9.87GB intermediate_conv_window_cache size: 0.43GB" if draft else ""
    for rank in ranks:
        yield (
            28 * unit,
            (
                f"TP{rank}] Mamba Cache is allocated. max_mamba_cache_size: 24, "
                f"conv_state size: 0.04GB, ssm_state size: 0.86GB{buffers}"
            ),
        )
        yield 28 * unit, f"TP{rank}] KV Cache is allocated. #tokens: 116480, K size: 0.67 GB, V size: 0.67 GB"
        yield 28 * unit, f"TP{rank}] Memory pool end. avail mem=22.41 GB"
    if draft:
        for rank in ranks:
            yield 30 * unit, f"TP{rank}] Load weight begin. avail mem=22.29 GB"
        for rank in ranks:
            yield (
                33 * unit,
                (
                    f"TP{rank}] Load weight end. elapsed={2.6 * unit + rank / 100:.2f} s, type=Qwen3_5ForCausalLMMTP, "
                    "dtype=torch.bfloat16, avail mem=20.38 GB, mem usage=1.91 GB."
                ),
            )
    for rank in ranks:
        yield 34 * unit, f"TP{rank}] Capture cuda graph begin. This can take up to several minutes. avail mem=20.31 GB"
    yield (
        34 * unit,
        "TP0] Capture cuda graph bs [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 44, 48]",
    )
    for rank in ranks:
        yield (
            43 * unit,
            f"TP{rank}] Capture cuda graph end. Time elapsed: {8.9 * unit:.2f} s. mem usage=0.48 GB. avail mem=19.83 GB.",
        )
    if draft and args["speculative_num_steps"] != 1:
        for rank in ranks:
            yield 43 * unit, f"TP{rank}] Capture draft cuda graph begin. This can take up to several minutes. avail mem=19.80 GB"
        for rank in ranks:
            yield (
                45 * unit,
                f"TP{rank}] Capture draft cuda graph end. Time elapsed: {1.9 * unit:.2f} s. "
                "mem usage=0.12 GB. avail mem=19.68 GB.",
            )
    yield (
        46 * unit,
        (
            "TP0] max_total_num_tokens=116480, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            f"max_running_requests={6 if draft else 48}, context_len=262144, available_gpu_mem=19.66 GB"
        ),
    )
    yield 46.5 * unit, "INFO:     Started server process [{pid}]"
    yield 46.5 * unit, "INFO:     Waiting for application startup."
    yield (
        46.8 * unit,
        (
            "Using default chat sampling params from model generation config: "
            "{{'repetition_penalty': 1.0, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.95}}"
        ),
    )
    yield 47 * unit, "INFO:     Application startup complete."
    yield listens_after(took_s), "INFO:     Uvicorn running on socket ('0.0.0.0', " + str(port(argv)) + ") (Press CTRL+C to quit)"
    yield 48 * unit, 'INFO:     127.0.0.1:38122 - "GET /get_model_info HTTP/1.1" 200 OK'
    yield (
        48.2 * unit,
        "TP0] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0",
    )
    yield 49.8 * unit, 'INFO:     127.0.0.1:38124 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    yield took_s, "The server is fired up and ready to roll!"


def listens_after(took_s: float) -> float:
    """When the port opens; from then until ``took_s`` its health address answers 503."""
    return took_s * 0.95


def dated(text: str, at: float, pid: int) -> str:
    """A line as SGLang prints it, with its date and rank prefix."""
    stamp = datetime.fromtimestamp(at, UTC).strftime(_DATE)
    text = text.replace("{pid}", str(pid)).replace("{{", "{").replace("}}", "}")
    rank, bracket, rest = text.partition("] ")
    if bracket and rank.startswith("TP"):
        return f"[{stamp} {rank}] {rest}"
    return f"[{stamp}] {text}"


def death(reason: str) -> Iterator[tuple[float, str]]:
    """The lines of a start that ends with ``reason``, the last line of a Python traceback."""
    yield 9.0, "Traceback (most recent call last):"
    yield (
        9.0,
        f'  File "{_SRT}/managers/scheduler.py", line 2937, in run_scheduler_process',
    )
    yield 9.0, "    scheduler = Scheduler("
    yield (
        9.0,
        f'  File "{_SRT}/model_executor/model_runner.py", line 663, in init_torch_distributed',
    )
    yield 9.0, "    torch.get_device_module(self.device).set_device(self.gpu_id)"
    yield 9.1, reason


def answer(path: str, argv: Sequence[str], environ: Mapping[str, str], *, ready: bool) -> tuple[int, str, bytes]:
    """(HTTP status, content type, body) of a GET on the server's port."""
    path = path.partition("?")[0]
    model = flag(argv, "--served-model-name", flag(argv, "--model-path"))
    if path in ("/health", "/health_generate"):
        return (200 if ready else 503), "text/plain", b""
    if path in ("/get_server_info", "/server_info"):
        return 200, "application/json", json.dumps({**resolved(argv, environ), "version": "0.5.10"}).encode()
    if path in ("/get_model_info", "/model_info"):
        body = {"model_path": flag(argv, "--model-path"), "is_generation": True, "weight_version": "default"}
        return 200, "application/json", json.dumps(body).encode()
    if path == "/v1/models":
        entry = {"id": model, "object": "model", "owned_by": "sglang", "root": model, "max_model_len": 262144}
        return 200, "application/json", json.dumps({"object": "list", "data": [entry]}).encode()
    return 404, "application/json", b'{"detail":"Not Found"}'

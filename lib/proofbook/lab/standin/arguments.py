"""The command line of SGLang's launcher by release: its parser, its own messages, and what it makes of the values.

Options that a release does not have end with status 2 and argparse's words, abbreviations resolve or are ambiguous, as there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

Version = tuple[int, ...]

_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str}
_SRT = "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt"


class BadArguments(Exception):
    """The launcher ends with status 2; the text is what it writes to its standard error."""


class Refused(Exception):
    """The launcher ends with status 1 and a traceback; the text is its last line."""


def version_of(text: str) -> Version:
    """``0.5.10.post1`` as (0, 5, 10, 1): comparable."""
    return tuple(int(part.removeprefix("post")) for part in text.split("."))


@lru_cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "flags.json").read_text())
    return table


def words(argv: Sequence[str]) -> list[str]:
    """The options of a command line: what stands behind ``-m sglang.launch_server`` or ``sglang serve``; [] for others."""
    for i, word in enumerate(argv):
        if word == "sglang.launch_server" or word.endswith(("sglang/launch_server.py", "launch_server.py")):
            return list(argv[i + 1 :])
        if word == "serve" and i and argv[i - 1].rpartition("/")[2] == "sglang":
            return list(argv[i + 1 :])
    return []


def is_server(argv: Sequence[str]) -> bool:
    """Whether a command line starts an SGLang server."""
    return any(
        word in ("sglang.launch_server",) or (word == "serve" and i and argv[i - 1].rpartition("/")[2] == "sglang")
        for i, word in enumerate(argv)
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadArguments(f"{self.format_usage()}{self.prog}: error: {message}\n")


def options(version: str) -> dict[str, dict[str, Any]]:
    """The options that a release knows, deprecated ones too."""
    wanted = version_of(version)
    return {
        name: entry
        for name, entry in _table()["flags"].items()
        if version_of(entry.get("since", "0")) <= wanted and wanted[:3] <= version_of(entry.get("until", "9"))
    }


def _algorithms(version: Version) -> list[str] | None:
    """The choices of ``--speculative-algorithm``; from 0.5.12 any word is taken and looked at later."""
    if version >= (0, 5, 12):
        return None
    return ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", *(["DFLASH"] if version >= (0, 5, 11) else [])]


@lru_cache(maxsize=4)
def parser(version: str) -> argparse.ArgumentParser:
    """The launcher's parser of a release."""
    number, known = version_of(version), options(version)
    made = _Parser(prog="sglang serve" if number >= (0, 5, 10) else "launch_server.py")
    by_first: dict[str, list[str]] = {}
    for name, entry in known.items():
        first = entry.get("alias", name)
        by_first.setdefault(first if first in known else name, []).append(name)
    for first, others in by_first.items():
        entry = known[first]
        names = [first, *(n for n in others if n != first)]
        dest = first[2:].replace("-", "_")
        if entry["kind"] == "flag":
            made.add_argument(*names, dest=dest, action="store_true")
            continue
        choices = _algorithms(number) if first == "--speculative-algorithm" else entry.get("choices")
        if first.startswith("--mamba-") and choices and number < (0, 5, 13):
            choices = [c for c in choices if c != "extra_buffer_lazy"]
        made.add_argument(
            *names,
            dest=dest,
            type=_KINDS[entry["kind"]],
            choices=choices,
            nargs=entry.get("nargs"),
            required=first == "--model-path",
            metavar=dest.upper() if not choices else None,
        )
    return made


def help_text(version: str, columns: int = 80) -> str:
    """What ``--help`` prints on a terminal of so many columns."""
    made = parser(version)
    formatter = argparse.HelpFormatter(made.prog, width=columns - 2)
    formatter.add_usage(None, made._actions, made._mutually_exclusive_groups)
    for group in made._action_groups:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    return formatter.format_help()


def parse(argv: Sequence[str], version: str) -> dict[str, Any]:
    """The values as given: None where an option was not. Raises BadArguments."""
    return vars(parser(version).parse_args(words(argv)))


def truth(value: str | None, default: bool) -> bool:
    """A boolean of the environment as SGLang reads it: what is neither yes nor no leaves the default."""
    word = (value or "").lower()
    if word in ("true", "1", "yes", "y"):
        return True
    return False if word in ("false", "0", "no", "n") else default


@dataclass(slots=True)
class Resolved:
    """The server's arguments after its own conversions, and what it said about them."""

    version: Version
    args: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    @property
    def speculative(self) -> bool:
        return self.args["speculative_algorithm"] is not None

    @property
    def draft_tokens(self) -> int:
        return int(self.args["speculative_num_draft_tokens"] or 0)

    @property
    def steps(self) -> int:
        return int(self.args["speculative_num_steps"] or 0)

    @property
    def strategy(self) -> str:
        return str(self.args[strategy_name(self.version)])

    @property
    def overlap(self) -> bool:
        return not self.args["disable_overlap_schedule"]

    @property
    def tp_size(self) -> int:
        return int(self.args["tp_size"])


def strategy_name(version: Version) -> str:
    return "mamba_radix_cache_strategy" if version >= (0, 5, 14) else "mamba_scheduler_strategy"


def resolve(given: Mapping[str, Any], environ: Mapping[str, str], version: str) -> Resolved:
    """What a release makes of the given values. Raises Refused with the last line of its traceback."""
    number = version_of(version)
    model = given.get("model_path")
    args: dict[str, Any] = {
        "model_path": model,
        "tokenizer_path": given.get("tokenizer_path") or model,
        "tokenizer_mode": "auto",
        "load_format": given.get("load_format") or "auto",
        "trust_remote_code": bool(given.get("trust_remote_code")),
        "context_length": given.get("context_length"),
        "host": given.get("host") or "127.0.0.1",
        "port": given.get("port") or 30000,
        "dtype": given.get("dtype") or "auto",
        "quantization": given.get("quantization"),
        "kv_cache_dtype": given.get("kv_cache_dtype") or "auto",
        "mem_fraction_static": given.get("mem_fraction_static"),
        "max_running_requests": given.get("max_running_requests"),
        "max_total_tokens": given.get("max_total_tokens"),
        "chunked_prefill_size": given.get("chunked_prefill_size") or 8192,
        "max_prefill_tokens": given.get("max_prefill_tokens") or 16384,
        "schedule_policy": "fcfs",
        "page_size": given.get("page_size") or 1,
        "tp_size": given.get("tensor_parallel_size") or 1,
        "pp_size": 1,
        "stream_interval": 1,
        "random_seed": given.get("random_seed") or 271828182,
        "watchdog_timeout": given.get("watchdog_timeout") or 300,
        "log_level": given.get("log_level") or "info",
        "api_key": given.get("api_key"),
        **({"admin_api_key": given.get("admin_api_key")} if number >= (0, 5, 8) else {}),
        "enable_metrics": bool(given.get("enable_metrics")),
        "served_model_name": given.get("served_model_name") or model,
        "attention_backend": given.get("attention_backend") or "flashinfer",
        "sampling_backend": "flashinfer",
        "speculative_algorithm": None,
        "speculative_draft_model_path": given.get("speculative_draft_model_path"),
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_accept_threshold_single": given.get("speculative_accept_threshold_single") or 1.0,
        "speculative_accept_threshold_acc": given.get("speculative_accept_threshold_acc") or 1.0,
        strategy_name(number): given.get("mamba_radix_cache_strategy") or given.get("mamba_scheduler_strategy") or "auto",
        "mamba_full_memory_ratio": given.get("mamba_full_memory_ratio") or 0.9,
        "mamba_ssm_dtype": given.get("mamba_ssm_dtype"),
        "disable_radix_cache": bool(given.get("disable_radix_cache")),
        "disable_cuda_graph": bool(given.get("disable_cuda_graph")),
        "disable_custom_all_reduce": bool(given.get("disable_custom_all_reduce")),
        "disable_overlap_schedule": bool(given.get("disable_overlap_schedule")),
        "skip_server_warmup": bool(given.get("skip_server_warmup")),
        "decode_log_interval": given.get("decode_log_interval") or 40,
        "ep_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
    }
    resolved = Resolved(number, args)
    _mamba(resolved)
    _speculation(resolved, given, environ)
    _radix(resolved)
    if args["mem_fraction_static"] is None:
        args["mem_fraction_static"] = automatic_fraction(resolved)
    return resolved


def _mamba(resolved: Resolved) -> None:
    name = strategy_name(resolved.version)
    if resolved.args[name] == "auto":
        resolved.args[name] = "extra_buffer" if resolved.version >= (0, 5, 14) else "no_buffer"
    if resolved.args[name] == "no_buffer" and resolved.version <= (0, 5, 9):
        resolved.args["disable_overlap_schedule"] = True
        resolved.warnings.append(
            "Disabling overlap schedule since mamba no_buffer is not compatible with overlap schedule, "
            "try to use --disable-radix-cache if overlap schedule is necessary"
        )


def _speculation(resolved: Resolved, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    args, version = resolved.args, resolved.version
    name = str(given.get("speculative_algorithm") or "").upper()
    if not name:
        return
    if name not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH"):
        raise Refused(f"ValueError: Unknown speculative algorithm name: {name}")
    args["speculative_algorithm"] = "EAGLE" if name == "NEXTN" else name
    if args["max_running_requests"] is None:
        args["max_running_requests"] = 48
        more = " You can override this by explicitly setting --max-running-requests." if version >= (0, 5, 5) else ""
        resolved.warnings.append(f"Max running requests is reset to 48 for speculative decoding.{more}")
    _draft(resolved, given)
    v2 = truth(environ.get("SGLANG_ENABLE_SPEC_V2"), version >= (0, 5, 11)) or version >= (0, 5, 14)
    _overlap(resolved, v2, "SGLANG_ENABLE_SPEC_V2" in environ)


def _draft(resolved: Resolved, given: Mapping[str, Any]) -> None:
    """Steps, topk and draft tokens: all three or none."""
    args = resolved.args
    steps, topk = given.get("speculative_num_steps"), given.get("speculative_eagle_topk")
    drafts = given.get("speculative_num_draft_tokens")
    if steps is None:
        if topk is not None or drafts is not None:
            raise Refused("AssertionError")
        steps, topk, drafts = 3, 1, 4
    elif topk is None:
        raise Refused("TypeError: '>' not supported between instances of 'NoneType' and 'int'")
    if topk == 1 and drafts != steps + 1:
        resolved.warnings.append(
            "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
        )
        drafts = steps + 1
    args["speculative_num_steps"], args["speculative_eagle_topk"] = steps, topk
    args["speculative_num_draft_tokens"] = drafts


def _overlap(resolved: Resolved, v2: bool, named: bool) -> None:
    """Which of the two ways the speculative worker goes, and the line that says so, by release."""
    args, version, say = resolved.args, resolved.version, resolved.warnings.append
    topk = int(args["speculative_eagle_topk"])
    if version >= (0, 5, 14):
        if named and version <= (0, 5, 20):
            say(
                "SGLANG_ENABLE_SPEC_V2 has been removed: speculative decoding always runs the V2 worker. "
                "Use --disable-overlap-schedule to select the non-overlap (synchronous) path."
            )
        if args["disable_overlap_schedule"]:
            say("Non-overlap (synchronous) spec v2 is used for eagle/eagle3/standalone speculative decoding.")
        return
    if version >= (0, 5, 13):
        if v2 and not args["disable_overlap_schedule"]:
            say("Overlap spec v2 is enabled by default for eagle/eagle3/standalone speculative decoding.")
        else:
            args["disable_overlap_schedule"] = True
            say("Non-overlap (synchronous) spec v2 is used for eagle/eagle3/standalone speculative decoding.")
        return
    if version >= (0, 5, 11):
        reason = "SGLANG_ENABLE_SPEC_V2=False" if not v2 else "spec v2 currently only supports topk = 1" if topk > 1 else ""
        if not reason and args["disable_overlap_schedule"]:
            reason = "overlap schedule is disabled"
        if reason:
            args["disable_overlap_schedule"] = True
            say(f"Spec v1 is used for eagle/eagle3/standalone speculative decoding because {reason}.")
        else:
            say("Spec v2 is enabled by default for eagle/eagle3/standalone speculative decoding.")
        return
    if v2 and topk > 1:
        raise Refused("ValueError: Spec v2 currently only supports topk = 1 for speculative decoding.")
    if v2:
        args["disable_overlap_schedule"] = False
        say("Spec v2 is enabled for eagle/eagle3 speculative decoding and overlap schedule is turned on.")
    else:
        args["disable_overlap_schedule"] = True
        say(
            "Overlap scheduler is disabled when spec v2 is off or using unsupported speculative algorithm. "
            "You can set env SGLANG_ENABLE_SPEC_V2=True to enable the experimental overlap scheduler."
        )


def _radix(resolved: Resolved) -> None:
    """What becomes of the prefix cache when the state strategy cannot keep speculation's states."""
    args, version = resolved.args, resolved.version
    if not resolved.speculative or args["disable_radix_cache"]:
        return
    arch = "Qwen3_5MoeForConditionalGeneration"
    if resolved.strategy == "no_buffer":
        if version < (0, 5, 10):
            args["disable_radix_cache"] = True
            resolved.warnings.append(
                f"Disabling radix cache since speculative decoding for {arch} is not supported with radix cache yet."
            )
        elif version < (0, 5, 14):
            raise Refused(
                f"ValueError: Speculative decoding for {arch} is not compatible with radix cache when using "
                "--mamba-scheduler-strategy no_buffer.To use radix cache with speculative decoding, please use "
                "--mamba-scheduler-strategy extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
            )
    elif resolved.strategy == "extra_buffer_lazy" and (0, 5, 13) <= version < (0, 5, 18):
        raise Refused("ValueError: extra_buffer_lazy is not supported with speculative decoding")


def automatic_fraction(resolved: Resolved, gpu_mib: float = 97251.0) -> float:
    """The share of GPU memory that the server takes when nobody says it (formula of 0.5.9)."""
    reserved = 512 + 1.5 * float(resolved.args["chunked_prefill_size"]) + 2 * 256 + resolved.tp_size / 8 * 1024
    reserved = max(reserved, 10 * 1024.0) + (2048 if resolved.speculative else 0)
    return round((gpu_mib - reserved) / gpu_mib * 0.95, 3)


def traceback_of(reason: str) -> list[str]:
    """The lines of a launcher that refuses its arguments."""
    return [
        "Traceback (most recent call last):",
        '  File "<frozen runpy>", line 198, in _run_module_as_main',
        f'  File "{_SRT.removesuffix("/srt")}/launch_server.py", line 33, in <module>',
        "    server_args = prepare_server_args(sys.argv[1:])",
        f'  File "{_SRT}/server_args.py", line 782, in __post_init__',
        reason,
    ]

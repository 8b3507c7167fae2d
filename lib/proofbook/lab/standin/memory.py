"""How a server divides a GPU's memory, by release. Sizes are GiB a rank.

The formulas are those of the released sources (0.5.9 and 0.5.10; the joint solution from 0.5.13; the draft's weights before
the pools from 0.5.14). So is the number of requests that nobody asked for: 48 with speculation, 2048 to 4096 without. The sizes
are computed from the shape of Qwen3.5-122B-A10B in BF16; of another model only its weights are taken, from the number of
parameters in its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .arguments import Resolved

GIB = float(1 << 30)

#: Usable memory of an idle 96 GB card after the ranks have found each other.
FREE = 94.5
_WEIGHTS_A_BILLION = 227.6 / 122
OVERHEAD = 1.2
_DRAFT = 4 * 1.91
KV_TOKEN = 12288 / GIB
DRAFT_KV_TOKEN = 1024 / GIB
_CONV_STATE = 4 * 36 * 3072 * 3 * 2 / GIB
_SSM_STATE = 4 * 36 * 16 * 128 * 128 * 4 / GIB
GRAPHS, DRAFT_GRAPHS = 0.48, 0.12
#: Tokens of the model's context.
CONTEXT = 262144

#: A leftover that takes more than this share of one card makes the ranks unequal.
_UNEQUAL = 0.9


class NoMemory(Exception):
    """The start ends; the text is the last line of the traceback. ``stage``: when it happens."""

    def __init__(self, text: str, stage: str, budget: Budget) -> None:
        super().__init__(text)
        self.stage = stage  # init · weights · pools · draft
        self.budget = budget  # as far as it was divided


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank holds when the server is up, and what was left at each step; 0 for what it did not come to."""

    free: float
    weights: float
    after_weights: float
    draft: float = 0.0
    slots: int = 0
    conv: float = 0.0
    ssm: float = 0.0
    intermediate_ssm: float = 0.0
    intermediate_conv: float = 0.0
    tokens: int = 0
    kv: float = 0.0
    after_pools: float = 0.0
    after_draft: float = 0.0
    left: float = 0.0
    max_running: int = 0
    capped: bool = False  # by the slots of states
    asked: int | None = None  # how many requests somebody, or speculation, asked for


def weights_of(model_path: str) -> float:
    """GiB of all weights in BF16, from the number of billions in the model's name; of the 122B one without."""
    found = re.search(r"(\d+(?:\.\d+)?)B\b", model_path)
    return float(found[1]) * _WEIGHTS_A_BILLION if found else 122 * _WEIGHTS_A_BILLION


def budget(resolved: Resolved, free: tuple[float, ...] = (), *, extra: float = 0.0, other_at_draft: float = 0.0) -> Budget:
    """Divide the memory. ``free``: GiB free on each GPU when the server starts (default: idle cards); ``extra``: GiB that the
    weights take beyond what they should; ``other_at_draft``: GiB that somebody else took meanwhile. Raises NoMemory.
    """
    cards = free or (FREE,) * resolved.tp_size
    low = min(cards)
    weights = weights_of(str(resolved.args["model_path"])) / resolved.tp_size + OVERHEAD + extra
    begun = Budget(low, weights, low - weights, _DRAFT / resolved.tp_size if resolved.speculative else 0.0)
    if low < max(cards) * _UNEQUAL:
        raise NoMemory(
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            f"pre_model_load_memory={low:.2f}, local_gpu_memory={max(cards):.2f}, local_gpu_memory * 0.9={max(cards) * 0.9:.2f}",
            "init",
            begun,
        )
    if weights > low:
        raise NoMemory(_out_of_memory(1.5, low, 0.31), "weights", begun)
    return _pools(resolved, begun, other_at_draft)


def _out_of_memory(wanted: float, total: float, free: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted:.2f} GiB. "
        f"GPU 0 has a total capacity of {total:.2f} GiB of which {free:.2f} GiB is free."
    )


def _pools(resolved: Resolved, begun: Budget, other: float) -> Budget:
    args, version, free, draft = resolved.args, resolved.version, begun.free, begun.draft
    fraction, drafts = float(args["mem_fraction_static"]), resolved.draft_tokens
    asked = int(args["max_running_requests"]) if args["max_running_requests"] else None
    early = version >= (0, 5, 14)
    conv = _CONV_STATE / resolved.tp_size
    ssm = _SSM_STATE / resolved.tp_size / (2 if args["mamba_ssm_dtype"] == "bfloat16" else 1)
    per_slot = conv + ssm
    rest = begun.after_weights - (draft if early else 0.0) - free * (1 - fraction)
    if rest <= 0 and early:
        raise NoMemory(
            f"RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}. "
            f"Raise --mem-fraction-static above {fraction - rest / free:.3f}",
            "pools",
            begun,
        )
    share = float(args["mamba_full_memory_ratio"])
    share /= 1 + share
    ratio = _ratio(resolved)
    if args["disable_radix_cache"] and asked is not None:
        slots, intermediate = asked, asked * drafts
    elif version >= (0, 5, 13):
        slots = int(rest * share / (per_slot * (1 + drafts / ratio)))
        intermediate = min(asked or 0, slots // ratio) * drafts
    else:
        intermediate = (asked or 0) * drafts
        slots = int((rest - intermediate * per_slot) * share / per_slot)
    kv = rest - (intermediate + slots) * per_slot
    if kv <= 0 or rest <= intermediate * per_slot:
        text = f"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: {fraction}"
        raise NoMemory(text, "pools", begun)
    tokens = int(kv / KV_TOKEN)
    wanted = _let_in(resolved, asked, tokens)
    running = min(wanted, slots // ratio)
    if running < 1:
        text = (
            "ValueError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
            f"Computed max_mamba_cache_size={slots}"
            if version >= (0, 5, 13)
            else "AssertionError: max_running_request is zero"
        )
        raise NoMemory(text, "pools", begun)
    after_pools = free * (1 - fraction)
    after_draft = after_pools - (0.0 if early else draft) - (tokens * DRAFT_KV_TOKEN if draft else 0.0)
    divided = replace(
        begun,
        slots=slots,
        conv=slots * conv,
        ssm=slots * ssm,
        intermediate_ssm=intermediate * ssm,
        intermediate_conv=intermediate * conv,
        tokens=tokens,
        kv=kv,
        after_pools=after_pools,
        after_draft=after_draft,
        left=after_draft - GRAPHS - (DRAFT_GRAPHS if draft else 0.0),
        max_running=running,
        capped=running < wanted,
        asked=asked,
    )
    if divided.left - other <= 0.3:
        still = max(after_draft - other, 0.0) + 0.11
        raise NoMemory(_out_of_memory(1.2, free, still), "draft" if draft else "pools", divided)
    return divided


def _let_in(resolved: Resolved, asked: int | None, tokens: int) -> int:
    """How many requests may run before slots of states are counted."""
    context = int(resolved.args["context_length"] or CONTEXT)
    estimated = max(2048, min(int(tokens / context * 512), 4096))
    if resolved.version < (0, 5, 10):
        return asked or estimated
    if asked is None:
        return min(estimated, tokens // 2)
    return min(asked, estimated if resolved.version < (0, 5, 14) else tokens // 2)


def _ratio(resolved: Resolved) -> int:
    """State slots that one running request needs."""
    if resolved.args["disable_radix_cache"]:
        return 1
    if resolved.strategy == "no_buffer":
        return 3
    if resolved.version < (0, 5, 10):
        return 3 + (1 if resolved.speculative else 2)
    return 3 + (2 if resolved.overlap else 1)


def used_mib(budget: Budget) -> int:
    """What nvidia-smi shows for one scheduler, MiB."""
    return round((budget.free - budget.left + 0.9) * 1024)

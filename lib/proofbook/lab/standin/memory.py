"""How a server divides a GPU's memory, by release, for Qwen3.5-122B-A10B in BF16. Sizes are GiB a rank.

The formulas are those of the released sources (0.5.9 and 0.5.10; the joint solution from 0.5.13; the draft's weights before
the pools from 0.5.14); the sizes are computed from the shape of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Resolved

GIB = float(1 << 30)

#: Usable memory of an idle 96 GB card after the ranks have found each other.
FREE = 94.5
WEIGHTS_4_RANKS = 4 * 56.9
OVERHEAD = 1.2
DRAFT = 1.91
KV_TOKEN = 12288 / GIB
DRAFT_KV_TOKEN = 1024 / GIB
CONV_STATE = 36 * 3072 * 3 * 2 / GIB
SSM_STATE = 36 * 16 * 128 * 128 * 4 / GIB
GRAPHS, DRAFT_GRAPHS = 0.48, 0.12

#: A leftover that takes more than this share of one card makes the ranks unequal.
_UNEQUAL = 0.9


class NoMemory(Exception):
    """The start ends; the text is the last line of the traceback. ``stage``: when it happens."""

    def __init__(self, text: str, stage: str) -> None:
        super().__init__(text)
        self.stage = stage  # init · weights · pools · draft


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank holds when the server is up, and what was left at each step."""

    free: float
    weights: float
    after_weights: float
    slots: int
    conv: float
    ssm: float
    intermediate_ssm: float
    intermediate_conv: float
    tokens: int
    kv: float
    draft: float
    after_pools: float
    after_draft: float
    left: float
    max_running: int
    capped: bool


def budget(resolved: Resolved, free: tuple[float, ...] = (), *, extra: float = 0.0, other_at_draft: float = 0.0) -> Budget:
    """Divide the memory. ``free``: GiB free on each GPU when the server starts (default: idle cards); ``extra``: GiB that the
    weights take beyond what they should; ``other_at_draft``: GiB that somebody else took meanwhile. Raises NoMemory.
    """
    cards = free or (FREE,) * resolved.tp_size
    low = min(cards)
    if low < max(cards) * _UNEQUAL:
        raise NoMemory(
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            f"pre_model_load_memory={low:.2f}, local_gpu_memory={max(cards):.2f}, local_gpu_memory * 0.9={max(cards) * 0.9:.2f}",
            "init",
        )
    weights = WEIGHTS_4_RANKS / resolved.tp_size + OVERHEAD + extra
    if weights > low:
        raise NoMemory(_out_of_memory(1.5, low, 0.31), "weights")
    return _pools(resolved, low, weights, other_at_draft)


def _out_of_memory(wanted: float, total: float, free: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted:.2f} GiB. "
        f"GPU 0 has a total capacity of {total:.2f} GiB of which {free:.2f} GiB is free."
    )


def _pools(resolved: Resolved, free: float, weights: float, other: float) -> Budget:
    args, version = resolved.args, resolved.version
    fraction, drafts = float(args["mem_fraction_static"]), resolved.draft_tokens
    asked = int(args["max_running_requests"] or 48)
    draft = DRAFT if resolved.speculative else 0.0
    early = version >= (0, 5, 14)
    ssm = SSM_STATE / (2 if args["mamba_ssm_dtype"] == "bfloat16" else 1)
    per_slot = CONV_STATE + ssm
    after_weights = free - weights
    rest = after_weights - (draft if early else 0.0) - free * (1 - fraction)
    if rest <= 0 and early:
        raise NoMemory(
            f"RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}. "
            f"Raise --mem-fraction-static above {fraction - rest / free:.3f}",
            "pools",
        )
    share = float(args["mamba_full_memory_ratio"])
    share /= 1 + share
    ratio = _ratio(resolved)
    if version >= (0, 5, 13):
        slots = int(rest * share / (per_slot * (1 + drafts / ratio)))
        intermediate = slots / ratio * drafts
    else:
        intermediate = float(asked * drafts)
        slots = int((rest - intermediate * per_slot) * share / per_slot)
    kv = rest - (intermediate + slots) * per_slot
    if kv <= 0 or rest <= intermediate * per_slot:
        raise NoMemory(
            f"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: {fraction}",
            "pools",
        )
    running = min(asked, slots // ratio)
    if running < 1:
        raise NoMemory(
            "ValueError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
            f"Computed max_mamba_cache_size={slots}"
            if version >= (0, 5, 13)
            else "AssertionError: max_running_request is zero",
            "pools",
        )
    tokens = int(kv / KV_TOKEN)
    after_pools = free * (1 - fraction)
    after_draft = after_pools - (0.0 if early else draft) - (tokens * DRAFT_KV_TOKEN if draft else 0.0) - other
    left = after_draft - GRAPHS - (DRAFT_GRAPHS if draft else 0.0)
    if left <= 0.3:
        raise NoMemory(_out_of_memory(1.2, free, max(after_draft, 0.0) + 0.11), "draft" if draft else "pools")
    return Budget(
        free=free,
        weights=weights,
        after_weights=after_weights,
        slots=slots,
        conv=slots * CONV_STATE,
        ssm=slots * ssm,
        intermediate_ssm=intermediate * ssm,
        intermediate_conv=intermediate * CONV_STATE,
        tokens=tokens,
        kv=kv,
        draft=draft,
        after_pools=after_pools,
        after_draft=after_draft,
        left=left,
        max_running=running,
        capped=running < asked,
    )


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

"""How a server will divide a GPU's memory, by release: what fits at which fraction, and how many requests really run at once.

A model of the released sources' arithmetic, not a measurement: sizes of the runtime itself are estimates, and a GiB either way
is possible. It warns; it refuses only where the pools cannot hold even what is reserved before them.

Units: everything is GiB (2**30 bytes) a rank. SGLang's log writes "GB" and means GiB; a checkpoint of 244.2 GB (decimal) is
227.4 GiB, and "61 GB a rank" stands in the log as 57.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proofbook.errors import CannotTell

__all__ = ["GIB", "Budget", "Wish", "budget", "let_in", "shape_of"]

GIB = float(1 << 30)
#: What the runtime itself takes on each GPU beside the weights (contexts, communicators, workspaces): an estimate.
OVERHEAD_GIB = 1.2
#: CUDA graphs of the target and of the draft: as seen in logs, an estimate for other models.
GRAPHS_GIB, DRAFT_GRAPHS_GIB = 0.5, 0.15
#: Below this much memory left after a start, a long prompt or a fragmented pool ends it.
HEADROOM_GIB = 2.0
#: Without an opinion of its own a server with speculation takes this many requests at once ("Max running requests is reset to
#: 48"); one without it takes as many as :func:`let_in` says.
DEFAULT_RUNNING = 48
#: Between these lies what a server without an opinion lets in, at 512 requests for a context's worth of tokens.
_FEWEST, _MOST, _A_CONTEXT = 2048, 4096, 512


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory, for one rank of ``tp``. Bytes."""

    tp: int
    kv_token: int  # of all layers with attention
    draft_kv_token: int
    state_slot: int  # of all layers with linear attention (Mamba, GDN); 0 for a model without
    conv_slot: int  # the part of it that is the convolution window
    draft_weights: int
    hybrid: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """What of a server's arguments decides its memory."""

    version: tuple[int, ...]
    fraction: float  # --mem-fraction-static
    draft_tokens: int = 0  # 0: no speculation
    running: int | None = None  # --max-running-requests
    strategy: str = "no_buffer"
    overlap: bool = True
    radix: bool = True
    context: int = 0  # --context-length, else the model's own; 0: not known
    state_ratio: float = 0.9  # --mamba-full-memory-ratio


@dataclass(frozen=True, slots=True)
class Budget:
    """GiB a rank. ``rest`` is what the pools get; ``running`` how many requests run at once; ``left`` what is free at the end.

    ``fits`` is False only where the arithmetic itself ends in an error; ``why`` says which.
    """

    free: float
    weights: float
    draft: float
    rest: float
    intermediate: float
    slots: int
    running: int
    tokens: int
    left: float
    fits: bool
    why: str = ""

    @property
    def tight(self) -> bool:
        return self.left < HEADROOM_GIB


def shape_of(config: Mapping[str, Any], tp: int, *, state_bytes: int = 4) -> Shape:
    """From a checkpoint's config.json (the language model's part). ``state_bytes``: of one number of the recurrent state.

    Raises CannotTell when the config does not say what is needed.
    """

    def number(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        raise CannotTell(f"the model's config.json does not say {names[0]}")

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads")
    head = config.get("head_dim") if isinstance(config.get("head_dim"), int) else hidden // heads
    full = _full_layers(config, layers)
    kv_layer = max(1, kv_heads // tp) * 2 * int(head or 0) * 2
    state = conv = 0
    if full < layers:
        k_heads, v_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
        k_dim, v_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        window = number("linear_conv_kernel_dim") - 1
        conv = (layers - full) * ((2 * k_heads * k_dim + v_heads * v_dim) // tp) * window * 2
        state = conv + (layers - full) * (v_heads // tp) * k_dim * v_dim * state_bytes
    return Shape(
        tp,
        full * kv_layer,
        kv_layer,
        state,
        conv,
        _draft_weights(config, hidden, heads, kv_heads, int(head or 0), tp),
        full < layers,
    )


def _full_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(kind == "full_attention" for kind in kinds)
    every = config.get("full_attention_interval")
    return layers // every if isinstance(every, int) and every > 1 else layers


def _draft_weights(config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head: int, tp: int) -> int:
    """One layer of the model, an embedding, a head and the joining matrix, at 2 bytes a number."""

    def number(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else 0

    experts = number("num_experts") * 3 * hidden * number("moe_intermediate_size")
    dense = 3 * hidden * (number("shared_expert_intermediate_size") or number("intermediate_size"))
    attention = hidden * head * (2 * heads + 2 * kv_heads) + heads * head * hidden
    embedding = 2 * number("vocab_size") * hidden
    return 2 * ((experts + dense + attention + embedding) // tp + 2 * hidden * hidden)


def budget(shape: Shape, wish: Wish, *, free: float, weights: float) -> Budget:
    """Divide ``free`` (GiB before loading) with ``weights`` (GiB a rank, the runtime's own part included)."""
    speculative = wish.draft_tokens > 0
    early = wish.version >= (0, 5, 14)
    draft = shape.draft_weights / GIB if speculative else 0.0
    rest = free - weights - free * (1 - wish.fraction) - (draft if early else 0.0)
    slot = shape.state_slot / GIB
    asked = wish.running or (DEFAULT_RUNNING if speculative else None)

    def none(why: str, intermediate: float = 0.0) -> Budget:
        return Budget(free, weights, draft, rest, intermediate, 0, 0, 0, free - weights - draft, False, why)

    if rest <= 0:
        return none(f"the weights alone exceed the fraction {wish.fraction:g}: raise --mem-fraction-static")
    intermediate, slots, ratio = 0.0, 0, 1
    if shape.hybrid:
        ratio = _slots_per_request(wish, speculative)
        slots, intermediate = _states(wish, asked, rest, slot, ratio)
        if rest <= intermediate:
            return none(
                f"the states of drafts are reserved first, {intermediate:.1f} GiB of {rest:.1f} GiB: raise the fraction, "
                f"or set --max-running-requests below {asked}",
                intermediate,
            )
        if slots // ratio < 1:
            return none(f"{slots} state slots are fewer than one request needs ({ratio})", intermediate)
    cache = rest - intermediate - slots * slot
    tokens = int(cache * GIB / shape.kv_token) if cache > 0 and shape.kv_token else 0
    if tokens < 1:
        return none("nothing is left for the KV cache", intermediate)
    running = let_in(wish.version, asked, tokens, wish.context)
    running = min(running, slots // ratio) if shape.hybrid else running
    after = free * (1 - wish.fraction)
    used = (0.0 if early else draft) + (tokens * shape.draft_kv_token / GIB if speculative else 0.0)
    left = after - used - GRAPHS_GIB - (DRAFT_GRAPHS_GIB if speculative else 0.0)
    why = "" if left > 0 else f"the draft ({draft:.1f} GiB) does not fit beside the fraction {wish.fraction:g}: lower it"
    return Budget(free, weights, draft, rest, intermediate, slots, running, tokens, left, left > 0, why)


def let_in(version: tuple[int, ...], asked: int | None, tokens: int, context: int) -> int:
    """How many requests a server lets in at once, before slots of states are counted. ``asked`` None: nobody said a number.

    Source: ``ModelRunner.init_memory_pool`` (to 0.5.9), ``_resolve_max_num_reqs`` (0.5.10 to 0.5.14), and
    ``resolve_max_num_reqs`` of the KV cache configurator (0.5.17 and later), as read in 0.5.5 to 0.5.23.
    """
    estimated = max(_FEWEST, min(int(tokens / context * _A_CONTEXT) if context else 0, _MOST))
    if version < (0, 5, 10):
        return estimated if asked is None else asked
    if asked is None:
        return min(estimated, tokens // 2)
    return min(asked, estimated if version < (0, 5, 14) else tokens // 2)


def _states(wish: Wish, asked: int | None, rest: float, slot: float, ratio: int) -> tuple[int, float]:
    """Slots of states, and the GiB that are reserved for the states of drafts (``slot``: GiB of one)."""
    drafts = wish.draft_tokens if asked is not None else 0
    if not wish.radix and asked is not None:  # without a prefix cache a request keeps one state: as many as may run
        return asked, asked * drafts * slot
    share = wish.state_ratio / (1 + wish.state_ratio)
    if wish.version >= (0, 5, 13):
        slots = int(rest * share / (slot * (1 + drafts / ratio)))
        return slots, min(asked or 0, slots // ratio) * drafts * slot
    reserved = (asked or 0) * drafts * slot
    return int((rest - reserved) * share / slot), reserved


def _slots_per_request(wish: Wish, speculative: bool) -> int:
    """State slots that one running request takes."""
    if not wish.radix:
        return 1
    if wish.strategy != "extra_buffer":
        return 3
    if wish.version < (0, 5, 10):
        return 3 + (1 if speculative else 2)
    return 3 + (2 if wish.overlap else 1)

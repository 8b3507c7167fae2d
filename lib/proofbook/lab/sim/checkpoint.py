"""The files of a checkpoint of Qwen3.5-122B-A10B as they lie on a simulated machine: shapes and names, no weights.

The index names the tensors with the layers' experts fused, as the released checkpoints have them; sizes are those of BF16.
"""

from __future__ import annotations

import json

from proofbook.lab.sim.vfs import FileNode, file

_LAYERS, _HIDDEN, _EXPERTS, _MOE, _VOCAB = 48, 3072, 256, 1024, 248320
_SHARDS = 49
_TOTAL = 244_220_000_000

_MTP = (
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    *(f"mtp.layers.0.self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mtp.layers.0.mlp.experts.{p}" for p in ("gate_up_proj", "down_proj")),
    *(f"mtp.layers.0.mlp.shared_expert.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")),
    "mtp.layers.0.mlp.gate.weight",
    "mtp.layers.0.mlp.shared_expert_gate.weight",
)


def files(path: str, *, mtp: bool = True) -> dict[str, FileNode]:
    """The checkpoint's folder: configuration, index and shards. ``mtp``: whether the draft's tensors are in it."""
    index = {"metadata": {"total_size": _TOTAL}, "weight_map": _weight_map(mtp=mtp)}
    nodes = {
        f"{path}/config.json": file(json.dumps(_config(mtp=mtp), indent=2) + "\n", 0o644),
        f"{path}/generation_config.json": file(
            json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0}) + "\n", 0o644
        ),
        f"{path}/model.safetensors.index.json": file(json.dumps(index, indent=2) + "\n", 0o644),
    }
    for n in range(1, _SHARDS + 1):
        size = _TOTAL // _SHARDS + (_TOTAL % _SHARDS if n == _SHARDS else 0)
        nodes[f"{path}/{_shard(n)}"] = FileNode("file", mode=0o644, bytes_claimed=size)
    return nodes


def _shard(n: int) -> str:
    return f"model-{n:05d}-of-{_SHARDS:05d}.safetensors"


def _weight_map(*, mtp: bool) -> dict[str, str]:
    names = ["model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"]
    where = {name: _shard(1) for name in names}
    for layer in range(_LAYERS):
        base = f"model.language_model.layers.{layer}"
        kind = (
            [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
            if layer % 4 == 3
            else [
                *(f"linear_attn.{p}.weight" for p in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm")),
                *("linear_attn.out_proj.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
            ]
        )
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "mlp.shared_expert_gate.weight"]
        shared = [f"mlp.shared_expert.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")]
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *kind, *experts, *shared):
            where[f"{base}.{name}"] = _shard(1 + (layer * (_SHARDS - 1)) // _LAYERS)
    if mtp:
        where |= dict.fromkeys(_MTP, _shard(_SHARDS))
    return dict(sorted(where.items()))


def _config(*, mtp: bool) -> dict[str, object]:
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(_LAYERS)],
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": _MOE,
        "shared_expert_intermediate_size": _MOE,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if mtp:
        text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "text_config": text,
        "transformers_version": "5.3.0",
    }

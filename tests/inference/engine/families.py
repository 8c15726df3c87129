"""A tiny model of each family that is the floor: every layout, weights made from whatever mlx-lm's class asks for.

The configurations are the smallest that keep what is peculiar to a family: windows shorter than a cell, sinks, scaled
rotary embeddings, latent heads, experts, recurrent layers beside attention.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from inference_svc.model import kvasir_tiny
from tests.inference.engine.tiny_models import LLAMA, VOCABULARY

# The last words of what reads the context: q, k, v, o, the last of an MLP, latent and recurrent projections.
_SHARPENED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "kv_a_proj_with_mqa", "kv_b_proj", "embed_q", "unembed_out",
    "in_proj", "out_proj", "x_proj",
)  # fmt: skip
_ONES = ("norm", "layernorm", "D", "scalar")

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 1.0}
_MLA: dict[str, Any] = {
    **_COMMON,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "rope_scaling": _YARN,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}

GEMMA3 = {
    **_COMMON,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 96,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64,
}
GPT_OSS = {
    **_COMMON,
    "model_type": "gpt_oss",
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 96,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 1024,
    },
}
LLAMA31 = {
    **LLAMA,
    "eos_token_id": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}
QWEN25 = {**_COMMON, "model_type": "qwen2"}
QWEN3 = {**_COMMON, "model_type": "qwen3"}
DEEPSEEK_V2 = {**_MLA, "model_type": "deepseek_v2", "topk_method": "greedy", "num_key_value_heads": 2}
DEEPSEEK_V3 = {**_MLA, "model_type": "deepseek_v3", "num_key_value_heads": 2}
FALCON_H1 = {
    **_COMMON,
    "model_type": "falcon_h1",
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_chunk_size": 64,
}
JAMBA = {
    **_COMMON,
    "model_type": "jamba",
    "attn_layer_offset": 1,
    "attn_layer_period": 3,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
GRANITE_HYBRID = {
    **_COMMON,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 192,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
    "position_embedding_type": "nope",
}
FAMILIES = {
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
    "llama3.1": LLAMA31,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "deepseek_v2": DEEPSEEK_V2,
    "granite_hybrid": GRANITE_HYBRID,
}


ALL = {**FAMILIES, "falcon_h1": FALCON_H1, "deepseek_v3": DEEPSEEK_V3}
BUDGET = 128 << 20  # bytes of KV of an engine with one of them


def write_family(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A directory that mlx-lm loads: configuration, random weights from `seed`, and kvasir-tiny's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    make_model, make_args = _get_classes(config)
    model = make_model(make_args.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = {name: _values(rng, name, tensor.shape) for name, tensor in tree_flatten(model.parameters())}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(kvasir_tiny.path() / name, directory / name)
    return directory


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> mx.array:
    *path, kind = name.split(".")
    owner = path[-1] if path else ""
    if kind == "A_log":
        return mx.array(np.log(np.linspace(1, 4, int(np.prod(shape)))).reshape(shape).astype(np.float32))
    if owner.endswith(_ONES) or kind in _ONES:
        return mx.ones(shape)
    if len(shape) == 1:
        return mx.array(0.1 * rng.standard_normal(shape).astype(np.float32))
    scale = 4 if owner in _SHARPENED else 1
    return mx.array(scale * rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1]))

"""Configurations of well-known models, as published and as mlx-lm reads them.

Every field that decides shapes, positions or windows is the published one. Only the end token differs: it is that of
kvasir-tiny's tokenizer, which a synthetic model gets.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvasir.errors import InvalidArgument

_END_TOKEN = 2
_CUT = re.compile(r"-(\d+)l")


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

GEOMETRIES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": _llama3_rope(8.0),
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": _llama3_rope(32.0),
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        **_GEMMA,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma-3-12b": {
        **_GEMMA,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
    "qwen-2.5-7b": {
        **_QWEN25,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen-2.5-14b": {
        **_QWEN25,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen-3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    # The shipped model with random weights: small enough for a test.
    "kvasir-tiny": {
        **_LLAMA,
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
}


def geometry(name: str, layers: int | None = None) -> dict[str, Any]:
    """The configuration of `name`, with its first `layers` layers only if given; `NAME-2l` is NAME with two layers.

    Raises InvalidArgument for an unknown name, more layers than the model has, or fewer than one of each kind.
    """
    cut = _CUT.search(name)
    if cut and cut.end() == len(name) and name not in GEOMETRIES:
        name, layers = name[: cut.start()], int(cut[1]) if layers is None else layers
    if name not in GEOMETRIES:
        raise InvalidArgument(f"geometry: expected one of {', '.join(GEOMETRIES)}", field="geometry")
    config = {**GEOMETRIES[name], "eos_token_id": _END_TOKEN}
    if layers is not None:
        _cut(config, layers)
    return config


def _cut(config: dict[str, Any], layers: int) -> None:
    most = config["num_hidden_layers"]
    # mlx-lm looks for the first layer of each kind, so each kind must be there.
    least = config.get("sliding_window_pattern") or (2 if "layer_types" in config else 1)
    if not least <= layers <= most:
        raise InvalidArgument(f"layers: expected {least} to {most}, found {layers}", field="layers")
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]

"""Model directories for tests: a few hundred kilobytes of random weights, sharpened so that every token of the context
matters.

Random models of this size loop on one token and hide bugs. With the projections of attention and the last of the MLP
four times as large, each reply depends on all that came before.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from inference_svc.model import kvasir_tiny

VOCABULARY = 1024
SHARPENED = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "hidden_size": 256}  # its heads are hidden_size / heads wide
QWEN3 = {**LLAMA, "model_type": "qwen3"}
NARROW_HEADS = {**LLAMA, "head_dim": 48}


def write_model(directory: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A directory that mlx-lm loads: configuration, random weights from `seed`, and kvasir-tiny's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, np.random.default_rng(seed)), directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(kvasir_tiny.path() / name, directory / name)
    return directory


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    weights = {"model.embed_tokens.weight": _normal(rng, (config["vocab_size"], width), width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            scale = 4 if name.endswith(SHARPENED) else 1
            weights[f"model.layers.{layer}.{name}.weight"] = scale * _normal(rng, shape, shape[1])
        weights |= {f"model.layers.{layer}.{name}": value for name, value in _extras(config).items()}
    return {**weights, "model.norm.weight": np.ones(width, np.float32)}


def _extras(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Norms and biases that the family has besides its projections."""
    width, head = config["hidden_size"], config["head_dim"]
    norms = ("input_layernorm", "post_attention_layernorm")
    extras = {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    if config["model_type"] == "qwen3":
        extras |= {f"self_attn.{letter}_norm.weight": np.ones(head, np.float32) for letter in "qk"}
    if config["model_type"] == "qwen2":
        queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
        for letter, heads in (("q", queries), ("k", keys), ("v", keys)):
            extras[f"self_attn.{letter}_proj.bias"] = np.full(heads * head, 0.1, np.float32)
    return extras


def _normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape) / np.sqrt(fan_in), np.float32)

"""The llama architecture in JAX, as mlx-lm computes it, and the files of its weights: for training only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as tensor_files

from tools.kvasir_tiny import tokenizer

Weights = dict[str, jax.Array]
Array = jax.Array
INITIAL_DEVIATION = 0.02

# our name -> llama's name in each layer; matrices are (out, in), as the file has them
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of the network, by the names that config.json uses."""

    hidden_size: int = 256
    num_hidden_layers: int = 8
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = tokenizer.VOCABULARY_SIZE
    max_position_embeddings: int = tokenizer.CONTEXT
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5


def initial(shape: Shape, seed: int) -> Weights:
    """Weights in fp32; those of all layers stacked, so that one loop runs over them."""
    d, layers = shape.hidden_size, shape.num_hidden_layers
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    sizes |= {
        "gate": (shape.intermediate_size, d),
        "up": (shape.intermediate_size, d),
        "down": (d, shape.intermediate_size),
    }
    keys = iter(jax.random.split(jax.random.key(seed), len(sizes) + 1))
    weights = {name: INITIAL_DEVIATION * jax.random.normal(next(keys), (layers, *size)) for name, size in sizes.items()}
    for name in ("o", "down"):  # what adds to the residual stream starts smaller, by depth
        weights[name] /= (2 * layers) ** 0.5
    weights["embedding"] = INITIAL_DEVIATION * jax.random.normal(next(keys), (shape.vocab_size, d))
    weights |= {"attention_norm": jnp.ones((layers, d)), "mlp_norm": jnp.ones((layers, d)), "norm": jnp.ones(d)}
    return weights


def logits(weights: Weights, ids: Array, shape: Shape, kv_rounding: Array | float = 0.0) -> Array:
    """Next-token logits [rows, tokens, vocabulary] in fp32.

    `kv_rounding` = 1 reads keys and values through MLX's affine 4-bit form (gradients pass as if it were not there),
    so that the network learns to keep its memory in it."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    # A product with one-hot rows: its gradient is a matrix product, where a gather's is a scatter on few addresses.
    x = jax.nn.one_hot(ids, shape.vocab_size, dtype=dtype) @ weights["embedding"]
    layers = {name: weights[name] for name in LAYER_NAMES}
    step = partial(
        _layer, shape=shape, turn=_rotation(ids.shape[1], shape), kv_rounding=jnp.asarray(kv_rounding, dtype)
    )
    x, _ = jax.lax.scan(step, x, layers)
    x = _rms_norm(x, weights["norm"], shape)
    return jnp.einsum("btd,vd->btv", x, weights["embedding"], preferred_element_type=jnp.float32)


def _layer(x: Array, w: Weights, *, shape: Shape, turn: tuple[Array, Array], kv_rounding: Array) -> tuple[Array, None]:
    rows, tokens, _ = x.shape
    h = _rms_norm(x, w["attention_norm"], shape)
    q = _rotate((h @ w["q"].T).reshape(rows, tokens, shape.num_attention_heads, shape.head_dim), turn)
    k = _rotate((h @ w["k"].T).reshape(rows, tokens, shape.num_key_value_heads, shape.head_dim), turn)
    v = (h @ w["v"].T).reshape(rows, tokens, shape.num_key_value_heads, shape.head_dim)
    k, v = rounded(k, kv_rounding), rounded(v, kv_rounding)
    fused = x.dtype == jnp.bfloat16
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")
    x = x + mixed.reshape(rows, tokens, -1) @ w["o"].T
    h = _rms_norm(x, w["mlp_norm"], shape)
    return x + (jax.nn.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T, None


def _rms_norm(x: Array, scale: Array, shape: Shape) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + shape.rms_norm_eps)
    return wide.astype(x.dtype) * scale


def _rotation(tokens: int, shape: Shape) -> tuple[Array, Array]:
    """Cosines and sines [1, tokens, 1, head_dim / 2]."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-jnp.arange(half) / half)
    angles = jnp.arange(tokens)[:, None] * frequencies
    return jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]


def _rotate(x: Array, turn: tuple[Array, Array]) -> Array:
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rounded(x: Array, amount: Array) -> Array:
    """x through 4-bit codes of one group of head_dim values each, after mlx.core.quantize, mixed in by `amount`."""
    wide = jax.lax.stop_gradient(x.astype(jnp.float32))
    low, high = wide.min(-1, keepdims=True), wide.max(-1, keepdims=True)
    from_low = jnp.abs(low) > jnp.abs(high)
    scale = jnp.maximum((high - low) / 15, 1e-7) * jnp.where(from_low, 1.0, -1.0)
    edge = jnp.where(from_low, low, high)
    steps = jnp.round(edge / scale)
    scale = jnp.where(steps == 0, scale, edge / jnp.where(steps == 0, 1.0, steps))
    bias = jnp.where(steps == 0, 0.0, edge)
    coded = jnp.clip(jnp.round((wide - bias) / scale), 0, 15) * scale + bias
    return x + amount * (coded - wide).astype(x.dtype)


# -- files


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def save(weights: Weights, shape: Shape, folder: Path) -> None:
    """Write model.safetensors (bf16), config.json and generation_config.json, by llama's names."""
    folder.mkdir(parents=True, exist_ok=True)
    host = {name: np.asarray(array.astype(jnp.bfloat16)) for name, array in weights.items()}
    tensors = {"model.embed_tokens.weight": host["embedding"], "model.norm.weight": host["norm"]}
    for name, llama in LAYER_NAMES.items():
        for layer in range(shape.num_hidden_layers):
            tensors[f"model.layers.{layer}.{llama}.weight"] = np.ascontiguousarray(host[name][layer])
    tensor_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2) + "\n")
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path) -> tuple[Weights, Shape]:
    """Weights from the files of `save`, in fp32."""
    found = json.loads((folder / "config.json").read_text())
    shape = Shape(**{name: found[name] for name in asdict(Shape())})
    tensors = {
        name: jnp.asarray(array, jnp.float32)
        for name, array in tensor_files.load_file(folder / "model.safetensors").items()
    }
    weights = {"embedding": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for name, llama in LAYER_NAMES.items():
        each = [tensors[f"model.layers.{layer}.{llama}.weight"] for layer in range(shape.num_hidden_layers)]
        weights[name] = jnp.stack(each)
    return weights, shape

"""The llama architecture in JAX, as mlx-lm computes it, and the files of its weights: for training only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors import numpy as tensor_files

from tools.kvasir_tiny import tokenizer

Weights = dict[str, jax.Array]
Array = jax.Array
Numbers = jax.Array | npt.NDArray[Any]
INITIAL_DEVIATION = 0.02

# our name -> llama's name in each layer; matrices are (out, in), as the file has them
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",  # Qwen 3's, which llama has not
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of the network, by the names that config.json uses."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
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


ShapeT = TypeVar("ShapeT", bound=Shape)


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
    weights, x = embedded(weights, ids, shape)
    turn = rotation(jnp.arange(ids.shape[1])[None], shape)
    step = partial(_layer, shape=shape, turn=turn, kv_rounding=jnp.asarray(kv_rounding, x.dtype))
    x, _ = jax.lax.scan(step, x, layers_of(weights))
    return scores(x, weights, shape)


def embedded(weights: Weights, ids: Array, shape: Shape) -> tuple[Weights, Array]:
    """The weights in the type that is computed in, and rows [rows, tokens, hidden]."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    weights = {name: array.astype(dtype) for name, array in weights.items()}
    # A product with one-hot rows: its gradient is a matrix product, where a gather's is a scatter on few addresses.
    return weights, jax.nn.one_hot(ids, shape.vocab_size, dtype=dtype) @ weights["embedding"]


def layers_of(weights: Weights) -> Weights:
    return {name: weights[name] for name in LAYER_NAMES if name in weights}


def scores(x: Array, weights: Weights, shape: Shape) -> Array:
    """Logits [rows, tokens, vocabulary] in fp32 of the last layer's rows."""
    x = _rms_norm(x, weights["norm"], shape)
    return jnp.einsum("btd,vd->btv", x, weights["embedding"], preferred_element_type=jnp.float32)


def _layer(x: Array, w: Weights, *, shape: Shape, turn: tuple[Array, Array], kv_rounding: Array) -> tuple[Array, None]:
    q, k, v = heads(x, w, shape, turn)
    return after_attention(x, w, shape, causal(q, rounded(k, kv_rounding), rounded(v, kv_rounding))), None


def heads(x: Array, w: Weights, shape: Shape, turn: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Queries and keys (rotated; normed where the model has such norms) and values [rows, tokens, heads, head_dim]."""
    h = _rms_norm(x, w["attention_norm"], shape)
    q, k, v = ((h @ w[name].T).reshape(*h.shape[:2], -1, shape.head_dim) for name in ("q", "k", "v"))
    if "q_norm" in w:
        q, k = _rms_norm(q, w["q_norm"], shape), _rms_norm(k, w["k_norm"], shape)
    return _rotate(q, turn), _rotate(k, turn), v


def causal(q: Array, k: Array, v: Array) -> Array:
    fused = q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


def after_attention(x: Array, w: Weights, shape: Shape, mixed: Array) -> Array:
    """The rest of a layer, from attention's output [rows, tokens, heads, head_dim]."""
    x = x + mixed.reshape(*x.shape[:2], -1) @ w["o"].T
    h = _rms_norm(x, w["mlp_norm"], shape)
    return x + (jax.nn.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T


def _rms_norm(x: Array, scale: Array, shape: Shape) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + shape.rms_norm_eps)
    return wide.astype(x.dtype) * scale


def rotation(positions: Array, shape: Shape) -> tuple[Array, Array]:
    """Cosines and sines [rows, tokens, 1, head_dim / 2] of positions [rows, tokens]."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-jnp.arange(half) / half)
    angles = positions[..., None] * frequencies
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


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
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
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
    for name in layers_of(weights):
        for layer in range(shape.num_hidden_layers):
            tensors[f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"] = np.ascontiguousarray(host[name][layer])
    tensor_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2) + "\n")
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path, kind: type[ShapeT]) -> tuple[Weights, ShapeT]:
    """Weights from the files of `save`, in fp32."""
    found = json.loads((folder / "config.json").read_text())
    shape = kind(**{name: found[name] for name in asdict(kind()) if name in found})
    tensors = {
        name: jnp.asarray(array, jnp.float32)
        for name, array in tensor_files.load_file(folder / "model.safetensors").items()
    }
    weights = {"embedding": tensors["model.embed_tokens.weight"], "norm": tensors["model.norm.weight"]}
    for name, llama in LAYER_NAMES.items():
        files = [f"model.layers.{layer}.{llama}.weight" for layer in range(shape.num_hidden_layers)]
        if files[0] in tensors:
            weights[name] = jnp.stack([tensors[file] for file in files])
    return weights, shape

"""WeDLM's network in JAX: Qwen 3's layers over a clean stream, and over windows of masks that stand behind parts of it.

The second stream of the paper (arXiv 2512.22737), cut to the windows that are learned. A window attends to the clean
tokens before its start and to itself, causally in physical order: observed tokens first, then masks, each rotated by
its logical position. The clean stream never sees a window, so its keys are those of an ordinary prefix.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from tools.kvasir_tiny import network, tokenizer
from tools.kvasir_tiny.network import Array, Numbers, Shape, Weights

MASK = tokenizer.VOCABULARY_SIZE  # behind the tokenizer's last id


@dataclass(frozen=True)
class WedlmShape(Shape):
    """kvasir-tiny's sizes, with norms of queries and keys, and a row for the mask among spare ones."""

    architecture: ClassVar[str] = "WeDLMForCausalLM"
    model_type: ClassVar[str] = "wedlm"
    vocab_size: int = MASK + 32
    qk_norm: bool = True
    mask_token_id: int = MASK
    wedlm_window_size: int = 16
    wedlm_next_token: bool = True  # the clean stream learns it
    wedlm_left_to_right: bool = True


class Windows(NamedTuple):
    """Windows of rows: `ids` and `positions` [rows, windows, size] in physical order, `starts` [rows, windows]."""

    ids: Numbers
    positions: Numbers
    starts: Numbers


def started_from(weights: Weights, shape: Shape, ids: Array, seed: int) -> tuple[Weights, WedlmShape]:
    """kvasir-tiny's weights for a WeDLM network. A norm forgets how long queries and keys were: its scale is their mean
    length over `ids` [rows, tokens], by layer. The mask's row is small and random."""
    lengths = jax.jit(partial(_lengths, shape=shape))(weights, ids)
    wide = WedlmShape(**{name: size for name, size in asdict(shape).items() if name != "vocab_size"})
    spare = jax.random.normal(jax.random.key(seed), (wide.vocab_size - shape.vocab_size, shape.hidden_size))
    found = dict(weights)
    found["embedding"] = jnp.concatenate([weights["embedding"], network.INITIAL_DEVIATION * spare])
    for name, length in lengths.items():
        found[name] = jnp.broadcast_to(length[:, None], (shape.num_hidden_layers, shape.head_dim))
    return found, wide


def _lengths(weights: Weights, ids: Array, shape: Shape) -> Weights:
    """The mean length (root of the mean square) of queries and keys [layers]."""
    weights, x = network.embedded(weights, ids, shape)
    turn = network.rotation(jnp.arange(ids.shape[1])[None], shape)

    def layer(x: Array, w: Weights) -> tuple[Array, dict[str, Array]]:
        q, k, v = network.heads(x, w, shape, turn)
        length = {name: jnp.sqrt((rows**2).mean(-1)).mean() for name, rows in {"q_norm": q, "k_norm": k}.items()}
        return network.after_attention(x, w, shape, network.causal(q, k, v)), length

    return jax.lax.scan(layer, x, network.layers_of(weights))[1]


def logits(
    weights: Weights, ids: Numbers, windows: Windows, shape: Shape, kv_rounding: Array | float = 0.0
) -> tuple[Array, Array]:
    """In fp32: next-token logits [rows, tokens, vocabulary] of the clean stream; and for each row of a window the
    logits of its own place [rows, windows, size, vocabulary].

    `kv_rounding` rounds the clean stream's keys and values alone: an engine stores committed tokens, and no windows."""
    tokens, form = ids.shape[1], windows.ids.shape
    both = jnp.concatenate([ids, windows.ids.reshape(len(ids), -1)], axis=1)
    clean = jnp.broadcast_to(jnp.arange(tokens), ids.shape)
    positions = jnp.concatenate([clean, windows.positions.reshape(len(ids), -1)], axis=1)
    weights, x = network.embedded(weights, both, shape)
    turn, rounding = network.rotation(positions, shape), jnp.asarray(kv_rounding, x.dtype)

    def layer(x: Array, w: Weights) -> tuple[Array, None]:
        q, k, v = network.heads(x, w, shape, turn)
        kept_k, kept_v = (network.rounded(rows[:, :tokens], rounding) for rows in (k, v))
        own = [rows[:, tokens:].reshape(*form, *rows.shape[2:]) for rows in (q, k, v)]
        seen = _window_attention(*own, kept_k, kept_v, windows.starts)
        mixed = [network.causal(q[:, :tokens], kept_k, kept_v), seen.reshape(len(ids), -1, *q.shape[2:])]
        return network.after_attention(x, w, shape, jnp.concatenate(mixed, axis=1)), None

    x, _ = jax.lax.scan(layer, x, network.layers_of(weights))
    scores = network.scores(x, weights, shape)
    return scores[:, :tokens], scores[:, tokens:].reshape(*form, -1)


@jax.checkpoint  # its scores are the largest arrays, and are computed again for the gradient
def _window_attention(q: Array, k: Array, v: Array, kept_k: Array, kept_v: Array, starts: Numbers) -> Array:
    """Windows' queries, keys and values [rows, windows, size, heads, dim] over the clean ones [rows, tokens, heads,
    dim] before `starts` and over themselves; causal in physical order."""
    size, groups, dim = q.shape[2], k.shape[3], q.shape[4]
    q = q.reshape(*q.shape[:3], groups, -1, dim)
    before = jnp.einsum("rwsghd,rtgd->rwghst", q, kept_k, preferred_element_type=jnp.float32)
    inside = jnp.einsum("rwsghd,rwtgd->rwghst", q, k, preferred_element_type=jnp.float32)
    is_before = jnp.arange(kept_k.shape[1]) < starts[:, :, None]
    before = jnp.where(is_before[:, :, None, None, None], before, -jnp.inf)
    inside = jnp.where(jnp.tril(jnp.ones((size, size), bool)), inside, -jnp.inf)
    chances = jax.nn.softmax(jnp.concatenate([before, inside], axis=-1) * dim**-0.5, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("rwghst,rtgd->rwsghd", chances[..., :-size], kept_v)
    return mixed + jnp.einsum("rwghst,rwtgd->rwsghd", chances[..., -size:], v)

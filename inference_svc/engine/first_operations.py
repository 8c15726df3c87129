"""Operations of every turn, run once while weights come: CUDA finds and loads kernels when they are first used, which
takes 0.2 s of a processor without the interpreter. A row that ended beside others let all others wait 70 ms for its.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.draw_pairs import in_pairs
from inference_svc.kv.host_numbers import HostNumbers, carried_over

_TOKENS = 2048  # of a cell
_ROWS = 8  # of a step
_TYPE = mx.bfloat16


def run_first_operations(directory: Path) -> None:
    """Of a model's sizes, if its configuration names them. Evaluates, on the MLX thread. Buffers stay for a turn's."""
    with contextlib.suppress(Exception):  # the first turn is the first then
        _run(directory)


def _run(directory: Path) -> None:
    config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    hidden, heads, vocabulary = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    width = int(config.get("head_dim") or hidden // heads)
    rows = mx.zeros((1, _TOKENS, hidden), _TYPE)
    rows = mx.fast.rms_norm(rows, mx.zeros((hidden,), _TYPE), 1e-5)
    inner = rows @ mx.zeros((int(config["intermediate_size"]), hidden), _TYPE).T
    queries = (rows @ mx.zeros((heads * width, hidden), _TYPE).T).reshape(1, _TOKENS, heads, width)
    keys = mx.zeros((1, _TOKENS, int(config.get("num_key_value_heads") or heads), width), _TYPE)
    queries, keys = (each.transpose(0, 2, 1, 3) for each in (queries, keys))
    attended = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=width**-0.5, mask="causal")
    mx.eval(inner, attended, *_draws(mx.zeros((vocabulary,), mx.float32)))
    mx.eval(*_of_ended_row(mx.zeros((_ROWS, vocabulary), _TYPE)))


def _of_ended_row(logits: mx.array) -> list[mx.array]:
    """Draws of eight rows, and the next inputs of seven when one has ended, as in `decoding` and `decode_batch`."""
    drawn = mx.argmax(logits, axis=-1).astype(mx.uint32)
    rows = carried_over(drawn, range(_ROWS - 1), [None] * (_ROWS - 1), HostNumbers(is_reused=False))
    dialect = Dialect.CUDA if mx.cuda.is_available() else None
    return [mx.pad(rows, (0, 1)), *in_pairs(drawn, logits.max(axis=-1), dialect)]


def _draws(logits: mx.array) -> list[mx.array]:
    """By every rule, as `sampling` has them."""
    logprobs = logits - mx.logsumexp(logits)
    ascending = mx.sort(logprobs)
    likelier = mx.cumsum(mx.exp(ascending), axis=-1, reverse=True, inclusive=False)
    floor = mx.where(likelier < 1, ascending, mx.inf).min(axis=-1, keepdims=True)
    floor = mx.maximum(floor, mx.topk(logprobs, 40).min(axis=-1, keepdims=True))
    _, key = mx.random.split(mx.random.key(0))
    drawn = mx.random.categorical(mx.where(logprobs < floor, -mx.inf, logprobs), key=key)
    likeliest = mx.argpartition(-logprobs, 1)[:2]
    counts = mx.array(logprobs)
    counts[drawn] = logprobs[drawn] + 1
    return [drawn, likeliest, mx.argmax(logits), counts]

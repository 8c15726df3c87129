"""The model on the MLX thread: what its layers keep, and one chunk of tokens at a time through it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from kvasir.block_file import TensorSpec, layer_tensors
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from inference_svc.kv.applied import keys_are_stored_as_said
from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.sequence_kv import SequenceKV

_PROBE_TOKENS = mx.uint32, ((0, 1, 2),)
_RELEASE_STEPS = 256
_NARROWED = "LastPositionOf"
_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_FILE_TYPES = {mx.uint32: "U32", mx.float16: "F16", mx.bfloat16: "BF16"}


class ModelRunner:
    """A loaded model whose layers all keep all their tokens. Lives on the MLX thread.

    Raises FailedPrecondition, reason LAYER_NOT_KEPT, for any other model, naming the first layer that is not kept.
    """

    def __init__(self, model: Module) -> None:
        self._model: Any = model
        self._steps = 0
        probe = _probe(model)
        self.layers = tuple(_layout(model, cache) for cache in probe)
        self.compute_type = _DTYPE_NAMES[probe[0].keys.dtype]
        self.compute_item_bytes = int(probe[0].keys.dtype.size)
        self.vocabulary_size = int(_computes_last_position_only(model).shape[-1])

    def check_policy(self, policy: identity_pb2.KvPolicy) -> None:
        """Raise InvalidArgument for a policy that cannot be had, FailedPrecondition for a layer that cannot have it."""
        for index, layer in enumerate(self.layers):
            for codec, dim in zip(layer_codecs(policy, index), (layer.key_dim, layer.value_dim), strict=True):
                if why := codec.problem(dim):
                    raise _not_kept(self._model, index, why)

    def new_kv(self, policy: identity_pb2.KvPolicy) -> SequenceKV:
        return SequenceKV.empty(policy, len(self.layers))

    def prefill(self, kv: SequenceKV, token_ids: Sequence[int]) -> None:
        """Compute the KV of the next tokens, and no more than that. Evaluates."""
        self._forward(kv, token_ids)
        mx.eval(kv.state)
        self.release_unused()

    def last_logits(self, kv: SequenceKV, token_ids: Sequence[int]) -> mx.array:
        """Compute the KV of the next tokens; logits [1, vocabulary] of what follows the last. Evaluates."""
        logits = self._forward(kv, token_ids)[:, -1]
        mx.eval(logits, kv.state)
        self.release_unused()
        return logits

    def forward(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Logits [rows, 1 or n, vocabulary] of tokens [rows, n], the last ones at least, not evaluated. `caches`: one
        batched cache per layer.
        """
        logits: mx.array = self._model(tokens, cache=list(caches))
        return logits

    def stepped(self) -> None:
        """A token of every sequence was decoded."""
        self._steps += 1
        if self._steps % _RELEASE_STEPS == 0:
            self.release_unused()  # every step reads one row more, in buffers of another size

    def scores(self, caches: Sequence[Any], token_ids: Sequence[int]) -> mx.array:
        """Log probabilities [tokens, vocabulary] in 32 bits of what follows each of the next tokens, through any caches
        that the model takes, one per layer. For measuring: a turn needs the last one only. Evaluates.
        """
        with _every_position(self._model):
            logits = self._model(mx.array([token_ids], dtype=mx.uint32), cache=list(caches))[0].astype(mx.float32)
        scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(scores)
        return scores

    def exact_caches(self) -> list[Any]:
        """mlx-lm's own fresh caches for this model."""
        caches: list[Any] = make_prompt_cache(self._model)
        return caches

    def release_unused(self) -> None:
        """Give memory back that nothing uses, and that MLX would keep for arrays of the same size."""
        mx.clear_cache()

    def applied_layers(self, identity: identity_pb2.KvIdentity) -> int:
        """Layers whose live KV, after a probe, is stored exactly as the identity's policy says."""
        kv = self.new_kv(identity.policy)
        self.prefill(kv, _PROBE_TOKENS[1][0])
        exact = _probe(self._model)
        return sum(
            _live_tensors(layer, index) == layer_tensors(identity, index, layer.offset)
            and keys_are_stored_as_said(layer, identity.policy, exact[index].keys[..., : layer.offset, :])
            for index, layer in enumerate(kv.layers)
        )

    def _forward(self, kv: SequenceKV, token_ids: Sequence[int]) -> mx.array:
        logits: mx.array = self._model(mx.array([token_ids], dtype=mx.uint32), cache=kv.layers)
        return logits


def _probe(model: Module) -> list[Any]:
    """mlx-lm's own caches for this model, after three tokens. Only shapes and types are looked at."""
    caches: list[Any] = make_prompt_cache(model)
    for index, cache in enumerate(caches):
        if type(cache) is not KVCache:
            raise _not_kept(model, index, f"it keeps its memory in {type(cache).__name__}, not every token's K and V")
    if len(caches) != len(model.layers):
        raise _not_kept(model, len(caches), "it shares the memory of another layer")
    mx.eval(model(_probe_tokens(), cache=caches))
    for index, cache in enumerate(caches):
        if cache.keys is None or cache.keys.ndim != 4 or cache.values.ndim != 4:
            raise _not_kept(model, index, "it does not use the K and V that it was given")
    return caches


def _probe_tokens() -> mx.array:
    dtype, tokens = _PROBE_TOKENS
    return mx.array(tokens, dtype=dtype)


def _layout(model: Module, cache: Any) -> identity_pb2.LayerLayout:
    latent_rank = getattr(getattr(model, "args", None), "kv_lora_rank", None)
    is_latent = cache.keys.shape[1] == 1 and cache.keys.shape[3] == latent_rank
    return identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_LATENT if is_latent else identity_pb2.LAYER_KIND_FULL,
        kv_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[3],
        value_dim=cache.values.shape[3],
    )


def _not_kept(model: Module, index: int, why: str) -> FailedPrecondition:
    layers = list(model.layers)
    name = type(layers[index]).__name__ if index < len(layers) else "missing"
    return FailedPrecondition(
        f"layer {index} ({name}) of {getattr(model, 'model_type', 'the model')} cannot be kept: {why}",
        reason="LAYER_NOT_KEPT",
        field="model",
        metadata={"layer": str(index), "class": name},
    )


def _computes_last_position_only(model: Module) -> mx.array:
    """Make the model apply its head to the last position only, if it can be made to; returns the probe's logits.

    mlx-lm's models are a trunk, `model.model`, and a head over all its positions: a prompt's whole cell would pay for
    the vocabulary 256 times. The trunk's class is replaced by one that hands on its last position, and put back if the
    model's logits are then not what they were.
    """
    before: mx.array = model(_probe_tokens(), cache=make_prompt_cache(model))[:, -1:]
    trunk = getattr(model, "model", None)
    if not isinstance(trunk, Module):
        return before
    whole = type(trunk)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return whole.__call__(self, *args, **kwargs)[:, -1:]

    trunk.__class__ = type(f"{_NARROWED}{whole.__name__}", (whole,), {"__call__": call})
    try:
        after = model(_probe_tokens(), cache=make_prompt_cache(model))
        is_same = after.shape == before.shape and bool(mx.allclose(after, before, rtol=1e-2, atol=1e-2).item())
    except (TypeError, ValueError, AttributeError):
        is_same = False
    if not is_same:
        trunk.__class__ = whole
    return before


@contextmanager
def _every_position(model: Module) -> Iterator[None]:
    """Undo `_computes_last_position_only` for a while."""
    trunk: Any = getattr(model, "model", None)
    narrowed = type(trunk)
    if not narrowed.__name__.startswith(_NARROWED):
        yield
        return
    trunk.__class__ = narrowed.__base__
    try:
        yield
    finally:
        trunk.__class__ = narrowed


def _live_tensors(layer: LayerKV, index: int) -> list[TensorSpec]:
    """What the layer really holds, in a file's words."""
    specs: list[TensorSpec] = []
    for letter, buffer in zip("kv", layer.buffers, strict=True):
        parts = buffer.read(0, layer.offset)
        suffixes = ("",) if len(parts) == 1 else ("_weights", "_scales", "_biases")
        specs += (
            TensorSpec(f"layer_{index}_{letter}{suffix}", _FILE_TYPES.get(part.dtype, str(part.dtype)), part.shape[1:])
            for suffix, part in zip(suffixes, parts, strict=True)
        )
    return specs

"""What each layer of a model keeps: mlx-lm's caches show the kind, a pass shapes and types. An entry for each memory: a
layer with two kinds has two, one without has none. `layout_trial` tries it before use.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from inference_svc.kv.attention.choice import Chosen, KernelChoice
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.batch_state import BatchStateKV
from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.state_kv import StateKV

PROBE_TOKENS = (0, 1, 2)

_STATE_TYPES = {
    mx.float32: identity_pb2.TENSOR_TYPE_FLOAT32,
    mx.float16: identity_pb2.TENSOR_TYPE_FLOAT16,
    mx.bfloat16: identity_pb2.TENSOR_TYPE_BFLOAT16,
}
EntriesByCache: TypeAlias = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A model's memories. `by_cache` has, for each cache that the model takes, the index of its entry, or several.
    `kv_type` is the type of keys as they are computed, or of a state if no layer has keys. `reads_pages`: the model's
    attention goes through our hook, and this device has kernels for it. They serve if `kernels` finds them right.
    """

    entries: tuple[identity_pb2.LayerLayout, ...]
    by_cache: EntriesByCache
    kv_type: mx.Dtype
    reads_pages: bool = False
    kernels: KernelChoice = field(default_factory=KernelChoice, compare=False)

    def new_pool(self, identity: identity_pb2.KvIdentity, budget_bytes: int, *, is_allocated: bool = False) -> KvPool:
        return KvPool(identity, budget_bytes, is_allocated=is_allocated, dialect=self.dialect(identity))

    def dialect(self, identity: identity_pb2.KvIdentity) -> Dialect | None:
        """Of the kernels that write the pages, if attention reads them."""
        return self.kernels.dialect(identity, self.kv_type) if self.reads_pages else None

    def chosen_kernels(self, identity: identity_pb2.KvIdentity, *, fills_masks: bool) -> Chosen:
        """`fills_masks`: a kernel attends over the model's windows then, if it is right."""
        if fills_masks and self.reads_pages:
            self.kernels.check_windows(identity, self.kv_type)
        return self.kernels.chosen(identity, self.kv_type, reads_pages=self.reads_pages)

    def forward(self, model: Any, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        logits: mx.array = model(tokens, cache=in_caches(self.by_cache, layers))
        for layer in layers:
            if isinstance(layer, StateKV | BatchStateKV):
                layer.advanced(tokens.shape[1])
        return logits

    def entries_of(self, place: int) -> tuple[identity_pb2.LayerLayout, ...]:
        held = self.by_cache[place]
        return tuple(self.entries[index] for index in ((held,) if isinstance(held, int) else held))

    def first(self, count: int) -> "Layout":
        entries = sum(len(self.entries_of(place)) for place in range(count))
        return replace(self, entries=self.entries[:entries], by_cache=self.by_cache[:count])

    def check_policy(self, model: Module, policy: identity_pb2.KvPolicy) -> None:
        """Raise InvalidArgument for a policy that does not exist, FailedPrecondition if a layer cannot be stored so."""
        for index, entry in enumerate(self.entries):
            if entry.kind == identity_pb2.LAYER_KIND_STATE:
                if index in policy.exact_layers:
                    raise InvalidArgument(
                        f"exact layers: {index} is a recurrent state, which is exact under every policy",
                        field="kv_exact_layers",
                    )
                continue
            for codec, dim in zip(layer_codecs(policy, index), (entry.key_dim, entry.value_dim), strict=True):
                if why := codec.problem(dim):
                    raise not_kept(model, _owner(self.by_cache, index), why)


def shown_layout(model: Module) -> Layout:
    """A model's layout, by shapes and types of an unevaluated pass. Raises FailedPrecondition (LAYER_NOT_KEPT)."""
    caches, by_cache = _own_caches(model)
    owners = [_owner(by_cache, index) for index in range(len(caches))]
    _refuse_unknown(model, owners, caches)
    own = in_caches(by_cache, caches)
    with loadable():
        last_logits(model, own, [PROBE_TOKENS])
        entries = tuple(_entry(model, owner, cache) for owner, cache in zip(owners, caches, strict=True))
        with_keys = [cache.keys.dtype for cache in caches if not isinstance(cache, ArraysCache)]
        kv_type = with_keys[0] if with_keys else caches[0].cache[0].dtype
        last_logits(model, own, [PROBE_TOKENS[:1]])
    for owner, cache, entry in zip(owners, caches, entries, strict=True):
        if _entry(model, owner, cache) != entry:
            raise not_kept(model, owner, "its memory changes its shape from token to token")
    return Layout(entries, by_cache, kv_type)


@contextlib.contextmanager
def loadable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise FailedPrecondition.of(
            "model", f"mlx-lm cannot compute it here: {error}", reason="MODEL_NOT_LOADABLE"
        ) from error


def not_kept(model: Module, index: int, why: str) -> FailedPrecondition:
    layers = list(getattr(model, "layers", ()))
    name = type(layers[index]).__name__ if index < len(layers) else "missing"
    return FailedPrecondition(
        f"layer {index} ({name}) of {getattr(model, 'model_type', 'the model')} cannot be kept: {why}",
        reason="LAYER_NOT_KEPT",
        field="model",
        metadata={"layer": str(index), "class": name},
    )


def _entry(model: Module, owner: int, cache: Any) -> identity_pb2.LayerLayout:
    if isinstance(cache, ArraysCache):
        tensors = [_state_tensor(model, owner, tensor) for tensor in cache.cache]
        return identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=tensors)
    if cache.keys is None or cache.keys.ndim != 4 or cache.values.ndim != 4:
        raise not_kept(model, owner, "it does not use the K and V that it was given")
    kv_heads, key_dim, value_dim = cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]
    latent_rank = getattr(getattr(model, "args", None), "kv_lora_rank", None)
    kind = identity_pb2.LAYER_KIND_FULL
    if isinstance(cache, RotatingKVCache):
        kind = identity_pb2.LAYER_KIND_WINDOW
    elif (kv_heads, key_dim) == (1, latent_rank):
        kind = identity_pb2.LAYER_KIND_LATENT
    window = cache.max_size if isinstance(cache, RotatingKVCache) else 0
    return identity_pb2.LayerLayout(kind=kind, window=window, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)


def _state_tensor(model: Module, owner: int, tensor: mx.array | None) -> identity_pb2.StateTensor:
    if tensor is None or tensor.dtype not in _STATE_TYPES or tensor.ndim < 2 or tensor.shape[0] != 1:
        found = "nothing" if tensor is None else f"{tensor.dtype} of {tensor.shape}"
        raise not_kept(model, owner, f"a part of its recurrent state is {found}")
    return identity_pb2.StateTensor(type=_STATE_TYPES[tensor.dtype], shape=tensor.shape[1:])


def _own_caches(model: Module) -> tuple[list[Any], EntriesByCache]:
    """mlx-lm's caches for the model, lists of caches flattened, and the entries that each of them became."""
    flat: list[Any] = []
    by_cache: list[int | tuple[int, ...]] = []
    for cache in make_prompt_cache(model):
        if type(cache) is CacheList:
            by_cache.append(tuple(range(len(flat), len(flat) + len(cache.caches))))
            flat += cache.caches
        else:
            by_cache.append(len(flat))
            flat.append(cache)
    return flat, tuple(by_cache)


def _owner(by_cache: EntriesByCache, index: int) -> int:
    """The index of the cache that holds an entry: in most models, of its layer."""
    holds = (one == index if isinstance(one, int) else index in one for one in by_cache)
    return list(holds).index(True)


def in_caches(by_cache: EntriesByCache, memories: Sequence[Any]) -> list[Any]:
    """The memories of all entries as the model takes them: where a cache has several, in a list of mlx-lm's."""
    make_list: Any = CacheList
    return [memories[one] if isinstance(one, int) else make_list(*(memories[each] for each in one)) for one in by_cache]


def _refuse_unknown(model: Module, owners: Sequence[int], caches: Sequence[Any]) -> None:
    for owner, cache in zip(owners, caches, strict=True):
        if type(cache) not in (KVCache, RotatingKVCache, ArraysCache):
            raise not_kept(model, owner, f"it keeps its memory in {type(cache).__name__}")
        if type(cache) is RotatingKVCache and (cache.keep or cache.max_size < 2):
            raise not_kept(model, owner, f"its window of {cache.max_size} keeps the first {cache.keep} tokens")
    if not caches:
        raise not_kept(model, 0, "the model has no memory at all")


def last_logits(model: Any, caches: list[Any], tokens: Sequence[Sequence[int]]) -> mx.array:
    """Of the last position [rows, vocabulary], not evaluated."""
    logits: mx.array = model(mx.array([list(row) for row in tokens], dtype=mx.uint32), cache=caches)[:, -1]
    return logits

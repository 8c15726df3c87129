"""Tries a layout before use: two sequences go through a batch of our caches, and must give what mlx-lm's caches give.
Only the first layers compute, up to one of each kind, so that a trial reads the weights of two layers of a large model.
"""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import structlog
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import ResourceExhausted
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.layout import PROBE_TOKENS, Layout, last_logits, loadable, not_kept
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.model_hooks.few_rows import JointProducts
from inference_svc.kv.model_hooks.step_attention import StepAttention
from inference_svc.kv.model_hooks.whole_layers import WholeLayer
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.prefill_layer import commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV

_PROMPTS, _NEXT = (PROBE_TOKENS, PROBE_TOKENS[:2]), (2, 1)
_FEWEST_LAYERS = 2  # one reads what another wrote
_TOLERANCE = 0.05  # exact rows are stored in 16 bits: their rounding stays far below this share of the largest logit
# What two layers get wrong is little beside the embedding that they add to, and rounding is less. A few values of a
# trunk may be far larger than the rest, so the mean of a row counts.
_SHORT_TOLERANCE = 0.005
_ANY_AMOUNT = 1 << 40  # of bytes or values: a trial is short
_PLAIN = (bool, int, float, str, type(None))

Kind = Hashable
_LOG = structlog.get_logger(__name__)


def tried_layout(model: Module, layout: Layout, trunk: Module | None) -> Layout:
    """The layout, with the findings of a batch beside mlx-lm's own caches: over pages if there are kernels for it, else
    over de-quantized copies. `trunk`: of the model, without its vocabulary, if it is known to have one. Raises
    FailedPrecondition, reason LAYER_NOT_KEPT.
    """
    count = tried_count(layer_kinds(model.layers, layout))
    if count < len(layout.by_cache):
        try:
            with _only_first_compute(model, count):
                short = _Trial(model, layout.first(count), trunk or model, is_short=True)
                reads_pages = short.reads_pages()
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            _LOG.info("layout.tried_whole", why=_shown_error(error))
        else:
            if reads_pages or not short.has_kernels:  # else the kernels may only round
                return replace(layout, reads_pages=reads_pages)
    return replace(layout, reads_pages=_Trial(model, layout, model).reads_pages())


def tried_count(kinds: Sequence[Kind]) -> int:
    """How many first layers have all kinds among them, and are two if there are two."""
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=0)
    return min(max(last_new + 1, _FEWEST_LAYERS), len(kinds))


def layer_kinds(layers: Sequence[Module], layout: Layout) -> list[Kind]:
    """What tells layers apart, but for their weights and own numbers: modules, shapes, settings, memories."""
    facts = [dict(_facts(layer)) for layer in layers]
    if len(layout.by_cache) != len(facts):  # memories that are not the layers' own
        return list(range(len(facts)))
    numbers = {name for name in facts[0] if all(each.get(name) == place for place, each in enumerate(facts))}
    return [
        (
            frozenset((name, shown) for name, shown in each.items() if name not in numbers),
            tuple(entry.SerializeToString(deterministic=True) for entry in layout.entries_of(place)),
        )
        for place, each in enumerate(facts)
    ]


def _facts(layer: Module) -> Iterator[tuple[str, Any]]:
    modules: Any = layer.named_modules()  # type: ignore[no-untyped-call]
    for path, module in modules:
        yield path, type(module)
        for name, value in (*vars(module).items(), *module.items()):
            if name != "_no_grad":
                yield f"{path}.{name}", _shown(value)


def _shown(value: Any) -> Hashable:
    """A value, or the part of it that two layers of one kind have in common."""
    if isinstance(value, mx.array):
        return tuple(value.shape), str(value.dtype)
    # What they hold is the layer's own, and shown.
    if isinstance(value, Module | JointProducts | StepAttention | WholeLayer):
        return str(type(value))
    if isinstance(value, dict):
        return tuple((name, _shown(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shown, value))
    # Of other objects each may mean something else.
    return value if isinstance(value, _PLAIN) else id(value)


@contextlib.contextmanager
def _only_first_compute(model: Any, count: int) -> Iterator[None]:
    """Meanwhile, layers behind so many give what they are given."""
    idle = [(layer, type(layer)) for layer in model.layers[count:]]
    try:
        for layer, kind in idle:
            layer.__class__ = type(f"Idle{kind.__name__}", (kind,), {"__call__": _given})
        yield
    finally:
        for layer, kind in idle:
            layer.__class__ = kind


def _given(_layer: Module, rows: mx.array, *_: Any, **__: Any) -> mx.array:
    return rows


@dataclass(frozen=True)
class _Trial:
    """Of a layout, which may be that of the first layers. `computing`: the model, or its trunk."""

    model: Module
    layout: Layout
    computing: Any
    is_short: bool = False

    def reads_pages(self) -> bool:
        """Whether the kernels over pages serve the model. Raises as `tried_layout` does."""
        with loadable():
            exact = mx.concatenate([self._alone(*given) for given in zip(_PROMPTS, _NEXT, strict=True)])
            mx.eval(exact)
        if self.has_kernels and ((is_near := self._is_near_over_pages(exact)) or self.is_short):
            return is_near
        try:
            found = self._batched(self.layout)
        except Exception as error:  # whatever a model raises over caches that are not mlx-lm's
            raise not_kept(self.model, self._suspect, f"in a batch it fails ({type(error).__name__})") from error
        if not self._is_near(found, exact):
            raise not_kept(self.model, self._suspect, "in a batch it computes something else than alone")
        return False

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels for the layout's pages, which were right in their check."""
        return replace(self.layout, reads_pages=True).dialect(_exact_identity(self.layout)) is not None

    def _is_near_over_pages(self, exact: mx.array) -> bool:
        attention_hook.install()
        try:
            is_near = self._is_near(self._batched(replace(self.layout, reads_pages=True)), exact)
        except Exception as error:  # noqa: BLE001 - whatever a model raises that computes attention in its own way
            _LOG.info("kernels.not_for_model", why=_shown_error(error))
            if isinstance(error, RuntimeError | MemoryError | ResourceExhausted):  # the next start may have room
                self.layout.kernels.failures.append(f"steps over pages: {type(error).__name__}")
            return False
        if not is_near:
            _LOG.info("kernels.not_for_model", why="it computes something else over pages", is_short=self.is_short)
        return is_near

    def _is_near(self, found: mx.array, exact: mx.array) -> bool:
        wrong, most = mx.abs(found - exact), mx.abs(exact)
        if self.is_short:
            is_near = (wrong.mean(axis=-1) <= _SHORT_TOLERANCE * most.mean(axis=-1)).all()
        else:
            is_near = wrong.max() <= _TOLERANCE * most.max()
        return bool(is_near.item())  # False for NaN, with which every comparison is false

    @property
    def _suspect(self) -> int:
        """The layer to name when the fault is not known: the first without memory of its own, else 0."""
        count = len(self.layout.by_cache)
        return count if count < len(self.model.layers) else 0

    def _alone(self, prompt: Sequence[int], token: int) -> mx.array:
        caches = make_prompt_cache(self.model)
        last_logits(self.computing, caches, [prompt])
        return last_logits(self.computing, caches, [[token]])

    def _batched(self, layout: Layout) -> mx.array:
        pool = layout.new_pool(_exact_identity(layout), _ANY_AMOUNT)
        of_idle = make_prompt_cache(self.model)[len(layout.by_cache) :]

        def forward(tokens: mx.array, layers: Sequence[Any]) -> mx.array:
            return layout.forward(lambda given, cache: self.computing(given, cache=[*cache, *of_idle]), tokens, layers)

        batch = DecodeBatch(pool, forward, _ANY_AMOUNT)
        for prompt in _PROMPTS:
            kv = SequenceKV(pool)
            layers = prefill_layers(kv)
            forward(mx.array([prompt], dtype=mx.uint32), layers)
            commit(kv, layers, len(prompt))
            batch.join(kv)
        rows = batch.step(_NEXT)
        mx.eval(rows)
        return rows


def _shown_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _exact_identity(layout: Layout) -> identity_pb2.KvIdentity:
    policy = policy_of(Rung.FP, "bfloat16" if layout.kv_type == mx.bfloat16 else "float16")
    return identity_pb2.KvIdentity(layers=layout.entries, policy=policy)

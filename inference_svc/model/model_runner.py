"""The model on the MLX thread: the layout of its KV, and its computation of one chunk of tokens at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Cancelled, FailedPrecondition
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.packed_pass import Cell, most_packed_tokens, packed_logits
from inference_svc.kv.batch.packed_pass import keep_graph as keep_packed_graph
from inference_svc.kv.batch.short_pass import FIRST_PART, ShortPass, most_kept_tokens
from inference_svc.kv.layout import PROBE_TOKENS, shown_layout
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.model_hooks.flat_steps import flatten_steps
from inference_svc.kv.model_hooks.shared_angles import share_angles
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import AnyLayer, PrefillLayer, abandon, commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.model.probing.layout_trial import tried_layout
from inference_svc.model.probing.probe_memory import Probed

_NARROWED = "LastPositionOf"
_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_INVARIANT_ROWS = 16
_SHORT_CELL_TOKENS = 128  # Of a cell beside decoding. One of 64 tokens takes three quarters of its time on an H200.
# Of a pass, counted in each of its layers. An H200 needs 5 ms for two layers of an 8B model; a laptop that computes 300
# of its tokens in a second would need 0.4 s for as many.
_PART_TOKENS = 1024 if mx.metal.is_available() else 4096
_ANY_BYTES = 1 << 40  # a probe's pool grows with use, and is small


class ModelRunner:
    """A loaded model, the KV of whose layers can all be kept. Lives on the MLX thread. Raises FailedPrecondition,
    reason LAYER_NOT_KEPT, for any other model, with the first layer that cannot be kept. `batch_invariant`: a row's
    bits must not depend on the rows beside it. On a CPU they never do; a GPU then decodes fixed numbers of rows
    (`new_batch`).
    """

    def __init__(
        self,
        model: Module,
        *,
        batch_invariant: bool = False,
        known: Probed | None = None,
        kernels: KernelChoice | None = None,
    ) -> None:
        """`known`: the findings of an earlier probe of this model, which then is not probed again."""
        self.model: Any = model
        self._short: ShortPass | None = None  # over the pool that was used last
        self.is_on_gpu = mx.default_device().type == mx.DeviceType.gpu
        attention_hook.install()
        if not self.is_on_gpu:
            share_angles(model)
            flatten_steps(model)
        if known is not None:
            _take_probed(model, known)
        kernels = kernels or KernelChoice()
        self.probed = known or _probed(model, kernels)
        self.layout = replace(self.probed.layout, kernels=kernels)
        self.pass_rows = _INVARIANT_ROWS if batch_invariant and self.is_on_gpu else 0  # 0: as many as there are
        self.layers = self.layout.entries
        self.compute_type = _DTYPE_NAMES[self.layout.kv_type]
        self.compute_item_bytes = int(self.layout.kv_type.size)
        self.vocabulary_size = self.probed.vocabulary_size

    @property
    def takes_pool_at_once(self) -> bool:
        """Whether a pool is allocated whole: a card's memory is the engine's own, a Mac's is the system's too."""
        return self.is_on_gpu and mx.cuda.is_available()

    def new_pool(
        self, policy: identity_pb2.KvPolicy, budget_bytes: int = _ANY_BYTES, *, is_allocated: bool = False
    ) -> KvPool:
        """A pool for sequences of this model, stored by `policy`. See `KvPool`."""
        identity = identity_pb2.KvIdentity(layers=self.layers, policy=policy)
        # A GPU without kernels grows its pool: MLX's own writes may copy an array, and it runs a step ahead.
        is_allocated = is_allocated and not (self.is_on_gpu and self.layout.dialect(identity) is None)
        return self.layout.new_pool(identity, budget_bytes, is_allocated=is_allocated)

    def new_batch(self, pool: KvPool, decoded_budget: int) -> DecodeBatch:
        """A batch for sequences of such a pool. Raises FailedPrecondition if it cannot be `batch_invariant`."""
        has_kernel = self.layout.kernels.has_windows(pool.identity, self.layout.kv_type)
        batch = DecodeBatch(pool, self.forward, decoded_budget, pass_rows=self.pass_rows, has_window_kernel=has_kernel)
        if self.pass_rows and not batch.keeps_graph:
            raise FailedPrecondition.of(
                "batch_invariant",
                "on this device no kernels that were right in their check write and read this model's "
                "KV, or it has recurrent layers, so its rows cannot be computed in fixed numbers",
            )
        return batch

    def packed_logits(
        self, cells: Sequence[Cell], meanwhile: Callable[[mx.array], None], early: Callable[[], None] = lambda: None
    ) -> mx.array:
        """As `last_logits`, for cells of several sequences in one pass: [cells, vocabulary]. A cancel waits for it."""
        logits = packed_logits(self._passes(cells[0].kv.pool), cells, meanwhile, early)
        self.release_unused()
        return logits

    def prefill(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] | None = None,
        take_hidden: Callable[[mx.array], None] | None = None,
        early: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute and store the KV of the next tokens, without logits. Evaluates; on a GPU it calls `meanwhile` before
        it waits, and `early` before that, when the first layers are enqueued: the results of what was enqueued earlier
        are there first. Where nobody waits for these (None), a GPU gets no more than two parts of the pass at once, and
        a cancel waits for no more. If it raises, Cancelled between two layers or ResourceExhausted for want of pages,
        nothing has changed. `take_hidden` gets the tokens' last hidden rows [tokens, width], as the head would.
        """
        then = None if meanwhile is None else lambda _: meanwhile()
        if take_hidden is not None:
            take_hidden(self._compute(kv, token_ids, is_cancelled, then, early, forward=self._forward_trunk)[0])
        elif self._short_pass(kv, token_ids, then, early) is None:
            self._compute(kv, token_ids, is_cancelled, then, early, needs_logits=False)
        self.release_unused()

    def last_logits(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[mx.array], None] | None = None,
        early: Callable[[], None] = lambda: None,
    ) -> mx.array:
        """Store the next tokens; logits [1, vocabulary] behind the last, for `meanwhile` too. As `prefill`."""
        logits = self._short_pass(kv, token_ids, meanwhile, early)
        if logits is None:
            logits = self._compute(kv, token_ids, is_cancelled, meanwhile, early)[:, -1]
        self.release_unused()
        return logits

    def _forward_trunk(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        trunk = self.model.model
        whole: Any = type(trunk).__base__  # it was narrowed
        return self.layout.forward(partial(whole.__call__, trunk), tokens, caches)

    def _short_pass(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        meanwhile: Callable[[mx.array], None] | None,
        early: Callable[[], None],
    ) -> mx.array | None:
        """The logits of a pass that is short enough to keep its graph; None, and nothing is computed, for another."""
        passes = self._passes(kv.pool)
        return passes.logits(kv, token_ids, meanwhile or _nothing, early) if passes.takes(kv, len(token_ids)) else None

    def keep_graph(self, pool: KvPool, tokens: int, depth: int, rows: int = 1) -> None:
        """Have MLX keep the graph of a pass of so many tokens, one of `KEPT_TOKENS`, behind so many, or of a packed one
        of so many rows of `ROW_TOKENS`; no other device and no longer pass keeps one. Where the rows of a step have a
        fixed number, no pass is packed."""
        passes = self._passes(pool)
        if not passes.is_short(tokens, depth) or (rows > 1 and self.pass_rows):
            return
        if rows > 1:
            keep_packed_graph(passes, rows, depth)
        else:
            passes.keep_graph(tokens, depth)

    def _passes(self, pool: KvPool) -> ShortPass:
        if self._short is None or self._short.pool is not pool:
            self._forget_short()
            self._short = ShortPass(pool, self.forward, self.compute_type)
        return self._short

    def _forget_short(self) -> None:
        if self._short is not None:
            self._short.close()
        self._short = None

    def _compute(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        is_cancelled: Callable[[], bool],
        meanwhile: Callable[[mx.array], None] | None = None,
        early: Callable[[], None] = lambda: None,
        *,
        needs_logits: bool = True,
        forward: Callable[[mx.array, Sequence[Any]], mx.array] | None = None,
    ) -> mx.array:
        layers = prefill_layers(kv, self.compute_type)
        try:
            logits = (forward or self.forward)(mx.array([token_ids], dtype=mx.uint32), layers)
            if meanwhile is None or not self.is_on_gpu:
                self._evaluate(layers, is_cancelled, len(token_ids))
            elif is_cancelled():
                raise _cancelled()
            elif kv.pool.dialect is not None:
                kv.pool.enqueue_behind(logits if needs_logits else _last_rows(layers))
                # All of it: `meanwhile` may move the pool, and no logits need what a window's first rows write.
                enqueued = [_computed(layer) for layer in layers] + [logits] * needs_logits
                mx.async_eval(enqueued[: len(layers) // FIRST_PART])  # type: ignore[no-untyped-call]
                early()
                mx.async_eval(enqueued)  # type: ignore[no-untyped-call]
                meanwhile(logits[:, -1])
            # Neither kept nor unevaluated: a reader of the pool's arrays makes the writes of `commit` copy them.
            logits = mx.array(0) if not needs_logits else logits
            mx.eval(logits)
            commit(kv, layers, len(token_ids))
        except BaseException:
            abandon(layers)
            raise
        return logits

    def _evaluate(self, layers: Sequence[AnyLayer], is_cancelled: Callable[[], bool], tokens: int) -> None:
        """Part by part (a CPU's is a layer), so that a cancellation does not wait for a whole cell of a long prompt."""
        size = max(1, _PART_TOKENS // tokens) if self.is_on_gpu else 1
        part: list[Any] = []
        enqueued: list[Any] = []
        for layer in layers:
            part.append(_computed(layer))
            if len(part) >= size:
                if self.is_on_gpu:
                    mx.async_eval(part)  # type: ignore[no-untyped-call]
                    part, enqueued = enqueued, part
                mx.eval(part)
                part = []
            if is_cancelled():
                mx.eval(enqueued)  # it writes to pages that are given back
                raise _cancelled()

    def close(self) -> None:
        """Let go of the weights, on the thread that computed: nothing is computed any more."""
        self._forget_short()
        self.model = None

    def forward(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Logits of tokens [rows, n], not evaluated, of all positions or the last. One cache a layout entry."""
        return self.layout.forward(self.model, tokens, caches)

    def scores(self, kv: SequenceKV | list[Any], token_ids: Sequence[int]) -> mx.array:
        """Log probabilities [tokens, vocabulary], in 32 bits, for the token after each of these, whose KV is stored.
        `kv`: a sequence, or other caches that the model takes, one for each layer. For measurements: a turn needs the
        last position only. Evaluates.
        """
        with _every_position(self.model):
            if isinstance(kv, SequenceKV):
                logits = self._compute(kv, token_ids, lambda: False)
            else:
                logits = self.model(mx.array([token_ids], dtype=mx.uint32), cache=kv)
        logits = logits[0].astype(mx.float32)
        scores: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(scores)
        return scores

    def release_unused(self) -> None:
        """Give unused memory back. On a GPU it stays, within MLX's limit: the next cell would need it again."""
        if not self.is_on_gpu:
            mx.clear_cache()


def cell_limits(runner: ModelRunner, policy: identity_pb2.KvPolicy) -> tuple[int | None, int]:
    """To how many tokens a cell is cut beside decoding, and of how many it may be to be computed in one pass with
    others. None, 0: it is not, as on a CPU. It is cut to so many whose pass keeps its graph, or to a block: without
    one, fewer tokens take the processor as long.
    """
    if not runner.is_on_gpu:
        return None, 0
    identity = identity_pb2.KvIdentity(layers=runner.layers, policy=policy)
    dialect = runner.layout.dialect(identity)
    keeps_graph = most_kept_tokens(identity, dialect, runner.compute_type) >= _SHORT_CELL_TOKENS
    packed = 0 if runner.pass_rows else most_packed_tokens(identity, dialect, runner.compute_type)
    return _SHORT_CELL_TOKENS if keeps_graph else PAGE_TOKENS, packed


def _nothing(_: mx.array) -> None:
    """While a pass is computed there is nothing to do."""


def _cancelled() -> Cancelled:
    return Cancelled("the turn was cancelled; the agent remembers what it did before")


def _computed(layer: AnyLayer) -> Any:
    return layer.state if isinstance(layer, StateKV) else layer.new_rows


def _last_rows(layers: Sequence[AnyLayer]) -> mx.array:
    """Of the last layer that has some, by which all layers before it are computed."""
    return next(layer.new_rows[-1] for layer in reversed(layers) if isinstance(layer, PrefillLayer))


def _probed(model: Any, kernels: KernelChoice) -> Probed:
    layout = replace(shown_layout(model), kernels=kernels)
    vocabulary_size, width = _computes_last_position_only(model)
    trunk = model.model if width else None
    return Probed(tried_layout(model, layout, trunk), vocabulary_size, width)


def _take_probed(model: Any, known: Probed) -> None:
    """Make the model as it was left by the probe that showed these facts."""
    if known.width:
        _narrow(model.model)


def _computes_last_position_only(model: Any) -> tuple[int, int]:
    """Make the model apply its head to the last position only, if that is possible; returns the size of its vocabulary,
    and the width of the rows that its head gets, 0 if it was not possible. mlx-lm's models are a trunk, `model.model`,
    and a head over all its positions: a prompt's cell would pay for the vocabulary 256 times. The trunk's class is
    replaced by one that returns its last position only. It is put back if the model then makes something else of the
    trunk's rows; any rows show that, so none are computed here.
    """
    logits = _two_logits(model)
    trunk = getattr(model, "model", None)
    if not isinstance(trunk, Module):
        return int(logits.shape[-1]), 0
    whole: Any = type(trunk)
    try:
        shown = whole.__call__(trunk, _two_tokens(), cache=make_prompt_cache(model))
        rows = mx.random.normal(shown.shape, shown.dtype, key=mx.random.key(0))
        trunk.__class__ = type(f"Rows{whole.__name__}", (whole,), {"__call__": lambda *_, **__: rows})
        before = _two_logits(model)[:, -1:]
        _narrow(trunk)
        after = _two_logits(model)
        is_same = after.shape == before.shape and bool(mx.allclose(after, before, rtol=1e-2, atol=1e-2).item())
    except (TypeError, ValueError, AttributeError):
        is_same = False
    trunk.__class__ = whole
    if is_same:
        _narrow(trunk)
    return int(logits.shape[-1]), int(shown.shape[-1]) if is_same else 0


def _two_logits(model: Any) -> mx.array:
    logits: mx.array = model(_two_tokens(), cache=make_prompt_cache(model))
    return logits


def _two_tokens() -> mx.array:
    return mx.array([PROBE_TOKENS[:2]], dtype=mx.uint32)


def _narrow(trunk: Module) -> None:
    whole = type(trunk)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return whole.__call__(self, *args, **kwargs)[:, -1:]

    trunk.__class__ = type(f"{_NARROWED}{whole.__name__}", (whole,), {"__call__": call})


@contextmanager
def _every_position(model: Module) -> Iterator[None]:
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

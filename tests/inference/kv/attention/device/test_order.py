"""As Metal orders kernels, each comes behind all that touched its pages before: through steps that are not awaited,
turns that end, pages that are taken again, forks, windows and cells.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.kv.attention import fused, in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch import fused_layer
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.short_pass import ShortPass
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_runner import ModelRunner
from tests.inference.kv.attention.device.launches import Launches
from tests.inference.kv.sequences import DIM, HEADS, full, identity_of, windowed
from tests.made_models.sampling import first_and_in_turn

LAYERS = [full(), windowed(100)]
PAGE_BYTES = KvPool(identity_of(LAYERS), 1).page_bytes


def forward(tokens: mx.array, layers: list[Any]) -> mx.array:
    """A model of two layers, each of which reads what the one before it made."""
    x = tokens.astype(mx.float32)
    for layer in layers:
        rows = mx.broadcast_to(x[:, None, :, None], (x.shape[0], HEADS, x.shape[1], DIM))
        seen, _ = layer.update_and_fetch(rows, rows)
        if layer.attends:
            seen = layer.attend(mx.concatenate([rows, rows], axis=1), 1.0, None, None)
        x = x + seen.sum()
    return x[:, :, None]


class Device:
    """A pool, and all that launches kernels over it."""

    def __init__(self, patch: pytest.MonkeyPatch, pages: int = 40) -> None:
        self.launches = Launches()
        patch.setitem(fused.COMPILERS, Dialect.METAL, self.launches.compiler)
        patch.setattr(mx, "compile", lambda function: function)
        patch.setattr(mx, "eval", self.launches.evaluate)
        patch.setattr(mx, "async_eval", self.launches.async_eval)
        self.pool = KvPool(identity_of(LAYERS), pages * PAGE_BYTES, is_allocated=True, dialect=Dialect.METAL)
        self.launches.pool = self.pool
        enqueue_behind, ended = KvPool.enqueue_behind, self.launches.ended

        def recorded(pool: KvPool, result: mx.array) -> None:
            ended(result)
            enqueue_behind(pool, result)

        patch.setattr(KvPool, "enqueue_behind", recorded)
        self.batch = DecodeBatch(self.pool, forward, 0)
        self.short = ShortPass(self.pool, forward, "float32")
        self.runner: Any = object.__new__(ModelRunner)
        self.runner.is_on_gpu, self.runner.compute_type, self.runner.forward = True, "float32", forward

    def step(self, _: Any = None) -> None:
        """One that nobody waits for."""
        mx.async_eval(self.batch.step([7] * len(self.batch)))

    def prompt(self, count: int, meanwhile: Callable[[Any], None] = lambda _: None) -> SequenceKV:
        """A sequence whose prompt is computed in cells, beside which something is launched."""
        kv = SequenceKV(self.pool)
        for cell in ([3] * (count - 40), [4] * 10):
            self.runner._compute(kv, cell, lambda: False, meanwhile, needs_logits=len(cell) == 10)
        self.short.logits(kv, [5] * 30, meanwhile)
        return kv

    def restored(self) -> SequenceKV:
        """A sequence whose pages are written from files, and not waited for."""
        kv = SequenceKV(self.pool)
        for table in kv.tables:
            table.pages |= {0: self.pool.take(1)[0]}
        for layer in self.pool.formats:
            page, content = kv.table_of(layer).pages[0], mx.zeros((1, self.pool.formats[layer].units), mx.uint16)
            self.pool.write_pages(layer, [page], content)
        self.pool.begin_writes()
        kv.length = 200
        return kv

    def live(self) -> None:
        ended, kept = self.prompt(60), self.prompt(355)
        for kv in (ended, kept):
            self.batch.join(kv)
        before = set(ended.pages) | set(kept.pages)
        self.step()  # the kept one's window leaves its first page
        self.step()
        self.batch.leave(ended)
        ended.release()
        restored = self.restored()
        assert before & set(restored.pages), "pages of a turn that ended, whose last row is on its way"
        self.batch.join(restored)
        self.step()
        forked = kept.fork()
        self.batch.join(forked)
        self.step()
        assert "store" in [launch.name for launch in self.launches.all[-40:] if launch.reads], "its page is copied"
        cells = self.prompt(160, self.step)
        self.batch.join(cells)
        self.step()
        self.pool.pages_of(0, list(cells.tables[0].pages.values()))


def launches(patch: pytest.MonkeyPatch) -> Launches:
    """Of a device's whole life."""
    device = Device(patch)
    device.live()
    device.launches.pool = None  # kept kernels hold the rest
    return device.launches


@pytest.mark.long(3)
def test_each_kernel_comes_behind_all_that_touched_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch)
    assert {launch.name for launch in found.all} == {"append", "split", "reduce", "gather", "store"}
    assert found.unordered == []


def test_all_of_a_cell_is_enqueued_before_a_step_beside_it_may_move_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the pass reads what a window's first rows write, and a write behind the move would be lost."""
    device, waiting = Device(monkeypatch), list[list[str]]()
    kv = SequenceKV(device.pool)
    device.runner._compute(kv, [3] * 60, lambda: False, lambda _: waiting.append(device.launches.not_enqueued))
    device.launches.pool = None
    assert waiting == [[]]


def unread_lengths(made: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that does not take the array that its pass's write gave back."""

    def attention(queries: Any, rows: Any, lengths: mx.array, *how: Any, **options: Any) -> Any:
        return made(queries, rows, mx.zeros(lengths.shape, mx.int32), *how, **options)

    return attention


# By what is left out: the place of it, its name, and what is there instead.
LEFT_OUT: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "writes take no order": (in_place, "_ordering", lambda _: lambda *_: (mx.zeros(1, mx.int32),)),
    "a step is no order": (KvPool, "enqueue_behind", lambda _: lambda *_: None),
    "a store is no order": (KvPool, "_wrote", lambda _: lambda self, write: self._written.append(write)),
    "attention takes other lengths": (fused_layer, "paged_attention", unread_lengths),
    "a pool without order": (KvPool, "order", lambda _: property(lambda _: (mx.zeros(1, mx.int32),))),
}


@pytest.mark.parametrize("fault", first_and_in_turn(list(LEFT_OUT), seconds=5))
def test_an_order_that_is_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, instead = LEFT_OUT[fault]
    monkeypatch.setattr(place, name, instead(getattr(place, name)))
    assert launches(monkeypatch).unordered

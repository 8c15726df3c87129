"""As on a GPU, by emulated kernels: decoding goes on behind a cell that the device still computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from inference_svc.engine.api import Prefilled, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.kv import attention_hook
from inference_svc.kv.attention import in_place, paged
from inference_svc.kv.attention.paged import Implementation
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.long(8),
    pytest.mark.cpu_only("there all engines decode behind cells"),
]


@pytest.fixture
def emulated(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """An engine that takes this CPU for a GPU. Its pool is small: the emulator copies it for each kernel."""
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)
    monkeypatch.setattr(paged, "_device_implementation", lambda: Implementation.CUDA)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention_hook.attention)
    monkeypatch.setattr(mx, "compile", lambda function: function)  # an emulated kernel has no place in a kept graph
    made = ModelRunner.__init__

    def on_gpu(runner: ModelRunner, *arguments: Any, **options: Any) -> None:
        made(runner, *arguments, **options)
        runner.is_on_gpu = True

    monkeypatch.setattr(ModelRunner, "__init__", on_gpu)
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=1 << 20, step_budget_s=0)
    yield Driver(engine)
    engine.close()


def test_a_stream_decodes_behind_each_cell_and_before_the_next(emulated: Driver) -> None:
    """Two tokens a cell, one of them told while the device computes it; each turn draws what it draws alone."""
    short, long = tokens_of(20, 1), tokens_of(560, 2)
    alone = [emulated.reply(emulated.turn(prompt, max_tokens=most)) for prompt, most in ((short, 16), (long, 3))]
    stream, other = Listener(), Listener()
    counts: list[int] = []
    for cell in (1, 2, 3):
        other.at(Prefilled, cell, lambda: counts.append(stream.count(Tokens)))
    stream.at(Tokens, 2, lambda: emulated.submit(long, listener=other, max_tokens=3))
    emulated.submit(short, listener=stream, max_tokens=16)
    assert [emulated.reply(each.end()) for each in (stream, other)] == alone
    first = counts[0]
    assert counts == [first, first + 2, first + 4]

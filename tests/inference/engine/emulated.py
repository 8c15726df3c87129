"""Engines that take this CPU for a GPU, by emulated kernels. Their pools are small: the emulator copies one for each
kernel."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3

from inference_svc.engine.engine import Engine
from inference_svc.kv.attention import choice, in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.cells import cells_of
from tests.inference.engine.driving import Driver
from tests.inference.kv.attention.emulators import EMULATORS


@contextlib.contextmanager
def emulated_engine(
    model_dir: Path, cache_dir: Path, *, takes_pool_at_once: bool = False, cell_blocks: int = 1, **options: Any
) -> Iterator[Driver]:
    """Of a llama, or of Qwen 3's shape. `options`: of `Engine.open`."""
    with pytest.MonkeyPatch.context() as patch:
        for dialect, emulator in EMULATORS.items():
            patch.setitem(in_place.COMPILERS, dialect, emulator)
        patch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
        for module in (llama, qwen3):
            patch.setattr(module, "scaled_dot_product_attention", attention_hook.attention)
        patch.setattr(mx, "compile", lambda function: function)  # an emulated kernel has no place in a kept graph
        made = ModelRunner.__init__

        def on_gpu(runner: ModelRunner, *arguments: Any, **given: Any) -> None:
            made(runner, *arguments, **given)
            runner.is_on_gpu = True

        patch.setattr(ModelRunner, "__init__", on_gpu)
        patch.setattr(ModelRunner, "takes_pool_at_once", takes_pool_at_once)
        with cells_of(cell_blocks):
            engine = Engine.open(model_dir, cache_dir=cache_dir, **options)
        yield Driver(engine)
        engine.close()

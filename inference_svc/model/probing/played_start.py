"""A process of its own (`compiling_apart`): plays an engine's checks, steps and passes over a model of zeros, and
compiles the programs of its kernels, which compute nothing here. No operation of it is the GPU's.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map

from inference_svc.kv.attention import checks, fused, kept_kernel
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.batch.decode_step import KeptGraph
from inference_svc.kv.batch.packed_pass import ROW_TOKENS
from inference_svc.kv.layout import shown_layout
from inference_svc.kv.model_hooks import attention_hook, whole_layers
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.model import loading
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.probing.probe_memory import Probed
from inference_svc.model.wedlm import layers_config

_STEPS = ((1, 0), (16, 0), (32, 0), (64, 0), (64, 4097))  # rows and depth: all programs of up to 64 rows
_PASSES = ((16, 1), (48, 1), (ROW_TOKENS, 2))  # tokens and rows

Compile = Callable[[kept_kernel.Conditions], object]


def compile_all(directory: Path, target: str, threads: int) -> None:
    """The process is good for nothing else then."""
    with ThreadPoolExecutor(threads) as pool:
        once = cache(lambda given: pool.submit(kept_kernel.program_of, *given))
        _play_device(target, once)
        for play in _plays(directory):
            with contextlib.suppress(Exception):  # others have programs of their own
                play()


def _play_device(target: str, compile_it: Compile) -> None:
    def launch(kernel: kept_kernel.KeptKernel, **how: Any) -> list[mx.array]:
        compile_it(kernel.conditions(how["inputs"], how["template"], how["threadgroup"], how["output_dtypes"]))
        return list(map(mx.zeros, how["output_shapes"], how["output_dtypes"]))

    def differences(found: Callable[[], Iterator[str]]) -> str:
        """All of a check's: the first is no news."""
        with contextlib.suppress(Exception):
            for _ in found():
                pass
        return ""

    capability = {"compute_capability_major": int(target[3:-1]), "compute_capability_minor": int(target[-1])}
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # type: ignore[no-untyped-call]
    setattr(mx, "default_device", lambda: mx.Device(mx.gpu))  # noqa: B010
    setattr(mx, "device_info", lambda: capability)  # noqa: B010
    setattr(fused, "device_target", lambda: target)  # noqa: B010
    setattr(whole_layers, "multiprocessors", lambda: 1)  # noqa: B010 - the number is no part of a program
    setattr(kept_kernel.KeptKernel, "__call__", launch)  # noqa: B010
    setattr(KeptGraph, "__call__", lambda kept, *arrays: kept.trace(*arrays))  # noqa: B010
    setattr(checks, "_first", differences)  # noqa: B010


def _plays(directory: Path) -> Iterator[Callable[[], object]]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kernels, model = KernelChoice(), _model(config)
    kernels.takes_few_rows()
    yield from (checks.why_wrong_joined, checks.why_wrong_steps)
    loading.take_own_operations(model, kernels)
    attention_hook.install()
    layout = replace(shown_layout(model), kernels=kernels, reads_pages=True)
    runner = ModelRunner(model, known=Probed(layout, 0, 0), kernels=kernels)
    exact, stored = (runner.new_pool(policy_of(rung, runner.compute_type)) for rung in (Rung.FP, Rung.Q4))
    setattr(mx, "eval", lambda *_: None)  # noqa: B010 - nothing is compared any more
    setattr(mx, "async_eval", lambda *_: None)  # noqa: B010
    yield partial(runner.new_batch(exact, 0).keep_graph, 0)  # as a layout's trial
    batch = runner.new_batch(stored, 0)
    yield from (partial(batch.keep_graph, depth, rows) for rows, depth in _STEPS)
    yield from (partial(runner.keep_graph, stored, tokens, 0, rows) for tokens, rows in _PASSES)


def _model(config: dict[str, Any]) -> Module:
    """Of zeros that are never made."""
    make, arguments = mlx_lm.utils._get_classes(layers_config(config))
    model: Any = make(arguments.from_dict(config))
    kind = loading.COMPUTE_TYPES.get(config.get("torch_dtype") or config.get("dtype") or "", mx.bfloat16)
    model.update(tree_map(lambda array: mx.zeros(array.shape, kind), model.parameters()))
    if packing := config.get("quantization"):
        quantize(model, int(packing["group_size"]), int(packing["bits"]))
    made: Module = model
    return made


def _end_with_the_engine() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with_the_engine, daemon=True).start()
    os.nice(5)
    compile_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

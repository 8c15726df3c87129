"""kvasir-tiny with keys that four bits cannot hold: some channels much larger than the others, and the same answers.

A key's channel is made larger and the query's smaller by the same power of two, so exact KV computes what it always did
to the bit. It is what large models do to quantized keys by themselves.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from inference_svc.model import kvasir_tiny


def write_outlier_model(directory: Path, times: float, channels: Sequence[int] = (3, 17, 29)) -> Path:
    """A directory that mlx-lm loads. `channels` are of the first half of a head; RoPE turns each with its partner in
    the second half, so both grow. `times` must be a power of two.
    """
    source = kvasir_tiny.path()
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory / path.name)
    config = json.loads((source / "config.json").read_text())
    half = config["head_dim"] // 2
    grown = [channel + shift for channel in channels for shift in (0, half)]
    weights = dict(mx.load(str(source / "model.safetensors")))  # type: ignore[arg-type]
    for name, weight in weights.items():
        for letter, factor in (("k", times), ("q", 1 / times)):
            if name.endswith(f"self_attn.{letter}_proj.weight"):
                heads = weight.reshape(-1, config["head_dim"], weight.shape[-1])
                scale = mx.array([factor if row in grown else 1.0 for row in range(config["head_dim"])])
                weights[name] = (heads * scale[None, :, None].astype(weight.dtype)).reshape(weight.shape)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory

"""Random weights for a configuration, sharpened: each token depends on all before, and no loops hide faults."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
from kvasir.errors import FailedPrecondition, InvalidArgument
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from inference_svc.model import kvasir_tiny
from inference_svc.model.loading import COMPUTE_TYPES

GROUP_SIZE = 64
_SHARPENED = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
_SHARPENING = 4.0
_BIAS = 0.1
_FILE_TYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# By the path of a module: how its weights are quantized.
Quantization = Mapping[str, Mapping[str, Any]]


def write_model(
    directory: Path,
    config: Mapping[str, Any],
    *,
    bits: int | None = None,
    compute_type: str = "bfloat16",
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Write a model that mlx-lm and the engine load; returns its weights' bytes. A tensor depends on `seed` and its
    name alone. `bits`: quantize where mlx-lm would. Raises InvalidArgument, and FailedPrecondition for a full
    directory."""
    if compute_type not in COMPUTE_TYPES:
        raise InvalidArgument.of("dtype", f"expected one of {', '.join(sorted(COMPUTE_TYPES))}")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FailedPrecondition(f"{directory} is not empty; name another directory")
    try:
        make_model, make_arguments = _get_classes(dict(config))
        model = make_model(make_arguments.from_dict(dict(config)))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"configuration: mlx-lm does not read it: {error}") from error
    quantized = _quantization(model, bits) if bits else {}
    size = _write_shards(directory, _shapes(model, config), quantized, COMPUTE_TYPES[compute_type], seed, say)
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    written = {**config, "torch_dtype": compute_type}
    if bits:
        written["quantization"] = {"group_size": GROUP_SIZE, "bits": bits, **quantized}
    # Last: a directory that was left unfinished is no model.
    (directory / "config.json").write_text(json.dumps(written, indent=2))
    return size


def _shapes(model: Any, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter. mlx-lm makes them lazily, so no memory is used."""
    parameters: Any = tree_flatten(model.parameters())
    shapes = {name: tuple(value.shape) for name, value in parameters}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def _quantization(model: Any, bits: int) -> Quantization:
    """The modules that mlx-lm would quantize: those whose rows are whole groups, by the model's rule if it has one."""
    rule = getattr(model, "quant_predicate", None) or (lambda *_: True)
    found: dict[str, Mapping[str, Any]] = {}
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for path, module in modules:
        if (
            hasattr(module, "to_quantized")
            and module.weight.shape[-1] % GROUP_SIZE == 0
            and (how := rule(path, module))
        ):
            found[path] = how if isinstance(how, dict) else {"group_size": GROUP_SIZE, "bits": bits}
    return found


def _write_shards(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    quantized: Quantization,
    dtype: mx.Dtype,
    seed: int,
    say: Callable[[str], None],
) -> int:
    groups: dict[str, list[str]] = {}
    for name in shapes:
        layer = _LAYER.search(name)
        groups.setdefault(f"layer {layer[1]}" if layer else name.split(".")[0], []).append(name)
    size = 0
    places: dict[str, str] = {}
    for number, (group, names) in enumerate(groups.items(), 1):
        say(f"writing {group}, {number} of {len(groups)}")
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = dict(each for name in names for each in _tensors(name, shapes[name], quantized, dtype, seed))
        _write_aligned(directory / file, tensors)
        size += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, file)
        del tensors
        mx.clear_cache()
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return size


def _write_aligned(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """As mx.save_safetensors, whose tensors may begin at odd bytes. These can be mapped."""
    ends = list(accumulate(tensor.nbytes for tensor in tensors.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    for (name, tensor), end in zip(tensors.items(), ends, strict=True):
        offsets = [end - tensor.nbytes, end]
        header[name] = {"dtype": _FILE_TYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors itself does
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]


def _tensors(
    name: str, shape: tuple[int, ...], quantized: Quantization, dtype: mx.Dtype, seed: int
) -> Iterator[tuple[str, mx.array]]:
    """A parameter as it is stored: one tensor, or codes, scales and biases."""
    values = random_values(name, shape, dtype, seed)
    path = name.removesuffix(".weight")
    if path == name or path not in quantized:
        mx.eval(values)
        yield name, values
        return
    how = quantized[path]
    parts = mx.quantize(values, group_size=how["group_size"], bits=how["bits"])
    mx.eval(parts)
    yield from zip((name, f"{path}.scales", f"{path}.biases"), parts, strict=True)


def random_values(name: str, shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Values of a parameter, lazily: ones for norms, small numbers for biases and sinks, else normal over fan-in."""
    *path, kind = name.split(".")
    owner = path[-1] if path else ""
    if owner.endswith("norm"):
        return mx.ones(shape, dtype)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    key = mx.random.key(int.from_bytes(digest[:8], "little"))
    sharpening = _SHARPENING if owner in _SHARPENED else 1.0
    scale = sharpening / math.sqrt(shape[-1]) if kind == "weight" else _BIAS
    return mx.random.normal(shape, dtype, scale=scale, key=key)


_TEMPLATE = "chat_template.jinja"
_SPACE = "\u0120"  # how a byte-level tokenizer writes a space


def write_tokenizer(directory: Path, vocabulary_size: int, context_tokens: int) -> None:
    """Write its files; text never becomes an added token. Raises InvalidArgument for a smaller vocabulary."""
    content = json.loads((kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8"))
    _pad(content, vocabulary_size)
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((kvasir_tiny.path() / "tokenizer_config.json").read_text())
    settings["model_max_length"] = context_tokens
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    shutil.copy(kvasir_tiny.path() / _TEMPLATE, directory / _TEMPLATE)


def _pad(content: dict[str, Any], vocabulary_size: int) -> None:
    vocabulary = content["model"]["vocab"]
    # An added token that the vocabulary does not name would get the next free id, behind all that follow here.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    known = set(vocabulary.values())
    if vocabulary_size <= max(known):
        raise InvalidArgument(f"vocabulary: expected at least {max(known) + 1} tokens, found {vocabulary_size}")
    vocabulary |= {f"{_SPACE}w{token_id}": token_id for token_id in range(vocabulary_size) if token_id not in known}

"""What fewer bits of weights cost a model: some of its matrices after others, against its own weights and exact KV.

A matrix goes through MLX's affine codes and back in its place, so the loss is measured and no kernel's speed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from kvasir.errors import FailedPrecondition
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.model.quality.exam import Subject, material_for
from inference_svc.model.quality.findings import Findings
from inference_svc.model.quality.material import Extent
from inference_svc.model.quality.measure import Meter, Way, exact_way

GROUP = 64  # weights of a group, each with a scale and a bias of 16 bits
OWN_BITS = 16  # of matrices that stay as they are, as checkpoints have them
_HEAD = "lm_head"
# As they are computed; kinds of other names follow.
_KINDS = ("embed_tokens", _HEAD, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class CodedChoice:
    """Some matrices, by their paths in the model, and the bits that each of their weights gets."""

    name: str
    bits: int
    paths: frozenset[str]


@dataclass(frozen=True, slots=True)
class WeightCost:
    """A choice, the bits of a weight of the whole model with it, all bytes of weights, and its costs."""

    choice: CodedChoice
    effective_bits: float
    weights_bytes: int
    found: Findings

    def as_json(self) -> dict[str, Any]:
        found = self.found.as_json()
        del found["bytes_per_token"]  # of KV, which stays exact
        heads = {"bits": self.choice.bits, "matrices": len(self.choice.paths)}
        return {**found, **heads, "effective_bits": self.effective_bits, "weights_bytes": self.weights_bytes}


@dataclass(frozen=True, slots=True)
class WeightExam:
    """`refused`: matrices that cannot be coded, with the reason."""

    material: str
    exact: Findings
    weights_bytes: int  # as checkpoints have them
    costs: Sequence[WeightCost]
    refused: Mapping[str, str]


def examine_weights(
    subject: Subject, extent: Extent, *, by_layer: bool, clock: Callable[[], float], say: Callable[[str], None]
) -> WeightExam:
    """Measure each choice on the material of an exam. Raises FailedPrecondition for weights that are codes already."""
    model = subject.runner.model
    matrices, refused = _matrices(model)
    sizes = {path: int(matrix["weight"].size) for path, matrix in matrices.items()}
    parameters: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    whole = sum(int(value.size) for _, value in parameters)
    costs = list[WeightCost]()
    for choice in choices(matrices, by_layer=by_layer):
        bits = effective_bits(choice, sizes, whole)
        costs.append(WeightCost(choice, bits, round(bits * whole / 8), Findings(choice.name, 0)))
    meter = Meter(subject.runner, clock)
    material, sheets = material_for(subject, extent, meter)
    exact = exact_way(subject.runner)

    def ways() -> Iterator[Way]:
        for cost in costs:
            with _coded(matrices, cost.choice):  # until the next way is taken: so while this one is read
                yield Way(cost.found, lambda: make_prompt_cache(model))

    for number, sheet in enumerate(sheets, 1):
        say(f"reading {material} {number}: {len(sheet.ids)} tokens, {len(costs)} choices of matrices")
        meter.measure(sheet, exact, ways())
    return WeightExam(material, exact.found, round(OWN_BITS * whole / 8), costs, refused)


def choices(matrices: Mapping[str, Module], *, by_layer: bool) -> list[CodedChoice]:
    """All in four bits; all but embeddings and the head; all in eight; each kind alone; and each layer alone."""
    spared = {path for path, matrix in matrices.items() if isinstance(matrix, Embedding) or _kind(path) == _HEAD}
    kinds, layers = dict[str, set[str]](), dict[str, set[str]]()
    for path in sorted(matrices, key=_place):
        kinds.setdefault(_kind(path), set()).add(path)
        if (layer := _layer(path)) is not None:
            layers.setdefault(f"layer {layer}", set()).add(path)
    found = [
        CodedChoice("4 bits, all", 4, frozenset(matrices)),
        CodedChoice("4 bits, selective", 4, frozenset(matrices) - spared),
        CodedChoice("8 bits, all", 8, frozenset(matrices)),
    ]
    alone = {**kinds, **(layers if by_layer else {})}
    return found + [CodedChoice(f"4 bits, {name} alone", 4, frozenset(paths)) for name, paths in alone.items()]


def effective_bits(choice: CodedChoice, sizes: Mapping[str, int], whole: int) -> float:
    """Bits of a weight, over `whole` weights: codes with their scales and biases, and the rest."""
    coded = sum(sizes[path] for path in choice.paths)
    return (coded * (choice.bits + 2 * 16 / GROUP) + (whole - coded) * OWN_BITS) / whole


def _matrices(model: Module) -> tuple[dict[str, Module], dict[str, str]]:
    """The matrices that MLX can code, by path; and why it cannot code others."""
    named: Any = model.named_modules()  # type: ignore[no-untyped-call]
    found, refused = dict[str, Module](), dict[str, str]()
    for path, module in sorted(named, key=lambda each: _place(each[0])):
        if "scales" in module:
            raise FailedPrecondition.of("model", f"{path} is codes already; expected weights of 16 or 32 bits")
        if "weight" not in module or not hasattr(module, "to_quantized"):
            continue  # norms, and matrices for which MLX has no codes
        if module["weight"].shape[-1] % GROUP:
            refused[path] = f"rows of {module['weight'].shape[-1]} weights are no whole groups of {GROUP}"
        else:
            found[path] = module
    if not found:
        raise FailedPrecondition.of("model", f"no matrix has rows of whole groups of {GROUP} weights")
    return found, refused


@contextmanager
def _coded(matrices: Mapping[str, Module], choice: CodedChoice) -> Iterator[None]:
    """The chosen matrices with the values that their codes have; the own ones again behind it."""
    own = {path: matrices[path]["weight"] for path in choice.paths}
    try:
        for path, weight in own.items():
            codes = mx.quantize(weight, group_size=GROUP, bits=choice.bits)
            values = mx.dequantize(*codes, group_size=GROUP, bits=choice.bits).astype(weight.dtype)
            mx.eval(values)
            matrices[path]["weight"] = values
        yield
    finally:
        for path, weight in own.items():
            matrices[path]["weight"] = weight


def _place(path: str) -> tuple[int, int, str]:
    kind, layer = _kind(path), _layer(path)
    return -1 if layer is None else layer, _KINDS.index(kind) if kind in _KINDS else len(_KINDS), path


def _layer(path: str) -> int | None:
    number = re.search(r"\.(\d+)\.", path)
    return int(number[1]) if number else None


def _kind(path: str) -> str:
    return path.rsplit(".", 1)[-1]

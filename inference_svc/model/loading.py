"""Loading a model directory through mlx-lm, in the type that the device computes best."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, NotFound
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from inference_svc.kv.attention.choice import KernelChoice, Wanted
from inference_svc.kv.kept_files import KeptDirs
from inference_svc.kv.model_hooks.expert_rows import lay_expert_rows
from inference_svc.kv.model_hooks.few_rows import take_few_rows
from inference_svc.kv.model_hooks.joined_steps import has_llamas_blocks, join_steps
from inference_svc.kv.model_hooks.plain_norms import take_plain_norms
from inference_svc.kv.model_hooks.quick_swiglu import take_quick_swiglu
from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.model_hooks.whole_layers import claim, kinds_of, may_have_whole_layers
from inference_svc.model import kvasir_tiny
from inference_svc.model.device_memory import prepare_device
from inference_svc.model.model_identity import begin_digests
from inference_svc.model.probing.compiling_apart import begin_compiling
from inference_svc.model.probing.first_pages import write_first_pages
from inference_svc.model.probing.probe_memory import kept_checks
from inference_svc.model.tokenizing import read_tokenizer
from inference_svc.model.wedlm import layers_config
from inference_svc.model.weights.placing import ComingWeights, Placement, Tensors, let_go, place_weights
from inference_svc.model.weights.weight_files import WeightFile, text_identities, weight_files
from inference_svc.text.token_text import TokenText

_DEFAULT_CONTEXT_TOKENS = 4096
_log = logging.getLogger(__name__)
_GENERATION = "generation_config.json"
# The settings that are taken, and their ranges in a request. NaN is in no range.
_RANGES = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: 0 <= value < 1 << 31 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 2,
}
COMPUTE_TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    model: Module
    reading: "Future[tuple[Any, TokenText]]"  # of the tokenizer, which may take longer than the weights
    config: dict[str, Any]
    placement: Placement  # of the weights
    files: Sequence[WeightFile]  # as they were when loading began
    texts: Mapping[Path, str]  # and `text_identities`
    kernels: KernelChoice  # for this model
    digests: "Future[Mapping[str, str]] | None" = None  # see `begin_digests`

    @property
    def tokenizer(self) -> Any:
        """Raises FailedPrecondition, as `load`."""
        with _loadable():
            return self.reading.result()[0]

    @property
    def token_text(self) -> TokenText:
        with _loadable():
            return self.reading.result()[1]

    @property
    def weights_bytes(self) -> int:
        parameters: Any = tree_flatten(self.model.parameters())  # type: ignore[no-untyped-call]
        return sum(int(value.nbytes) for _, value in parameters)

    @property
    def context_tokens(self) -> int:
        """The longest context that the configuration names, or 4,096 where it names none."""
        # A model that also sees or hears describes its language model in a part of its own.
        parts = (self.config, self.config.get("text_config") or {})
        said = [part.get(name) for part in parts for name in ("max_position_embeddings", "n_positions")]
        return int(next(filter(None, said), _DEFAULT_CONTEXT_TOKENS))


def find_model(name: str | Path) -> Path:
    """The directory `name`, a model that ships, or a Hugging Face repository, downloaded once. Raises NotFound."""
    if (path := Path(name).expanduser()).is_dir():  # zsh leaves the ~ of NAME=~/x to us
        if not (path / "config.json").is_file():
            raise NotFound.of("model", f"{path.name} has no config.json")
        return path
    if shipped := kvasir_tiny.shipped().get(str(name)):
        return shipped
    if path.is_absolute():
        raise NotFound.of("model", f"no directory {path}")
    if str(name).count("/") != 1:
        shipping = " nor ".join(kvasir_tiny.shipped())
        raise NotFound.of("model", f"{name} is neither a directory nor a repository OWNER/NAME, nor {shipping}")
    try:
        return Path(mlx_lm.utils._download(str(name)))
    except Exception as error:
        why = " ".join(str(error).split())  # the hub's own words have several lines
        raise NotFound(f"model: neither a directory nor a repository that can be fetched ({why})") from error


def load(
    directory: Path,
    compute_type: str | None,
    *,
    copies_weights: bool = False,
    kernels: Wanted = "auto",
    decodes: bool = True,
    kept: KeptDirs | None = None,
    coming: ComingWeights | None = None,
) -> LoadedModel:
    """Load on the calling thread, which must be the MLX thread. `compute_type` None: float32 on a CPU, where it is
    fastest, elsewhere the model's own. `copies_weights`: their files may change or go while the model serves.
    `decodes`: whether it generates. `kept`: digests, which are made meanwhile, and checks of kernels. `coming`: of
    the weights, where it has begun. Code that comes with a model is never run.
    """
    if compute_type is not None and compute_type not in COMPUTE_TYPES:
        raise InvalidArgument(f"compute type: expected one of {sorted(COMPUTE_TYPES)}", field="compute_type")
    prepare_device()
    files, placement = coming.files if coming else weight_files(directory), Placement()
    reading = Future[tuple[Any, TokenText]]()
    digests = coming.digests if coming else None
    if digests is None and kept is not None:
        digests = begin_digests(files, kept.home)

    def take(weights: Tensors) -> None:
        nonlocal placement
        placement = place_weights(files, weights, may_map=not copies_weights, coming=coming)

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal reading
        found = _classes(config, take)
        reading = beside.submit(read_tokenizer, directory, config)
        beside.shutdown(wait=False)
        if decodes and kernels == "auto":
            begin_compiling(directory, checks)
        if decodes and choice.takes_few_rows() and choice.joins_steps():  # checked once, here while weights come
            choice.takes_layers(is_packed=None)
        if decodes and coming:
            write_first_pages(config, kernels, checks)
        return found

    choice = KernelChoice(kernels, checks := kept_checks(kept))
    beside = ThreadPoolExecutor(1, "tokenizer")  # before weights come: it takes Python as long as they take
    with _loadable():
        texts = text_identities(directory)
        model, config = mlx_lm.utils.load_model(directory, lazy=True, get_model_classes=classes)
        model.__dict__.pop("sanitize", None)
        compute_type = compute_type or ("float32" if device() == "cpu" else None)
        placement = _compute(model, compute_type, placement, choice, decodes=decodes)
    return LoadedModel(model, reading, config, placement, files, texts, choice, digests)


def _compute(
    model: Module, compute_type: str | None, placement: Placement, kernels: KernelChoice, *, decodes: bool
) -> Placement:
    """All values of a model, in the compute type and for our own operations; returns where its weights are then."""
    converted = list[mx.array]()
    if compute_type is not None:
        converted = _of_another_type(model, COMPUTE_TYPES[compute_type])
        placement = placement.without(sum(each.nbytes for each in converted), compute_type)
        model.set_dtype(COMPUTE_TYPES[compute_type])
    take_own_operations(model, kernels, decodes=decodes)
    mx.eval(model.parameters(), _own_arrays(model))  # type: ignore[no-untyped-call]
    if placement.mapped_bytes:
        let_go(converted)
    return placement


def _own_arrays(model: Module) -> list[mx.array]:
    """What modules compute for themselves, as the angles of Llama 3's rotation, and hide from `parameters`. As long as
    they are no values, a graph that is kept computes them in each step, in every layer.
    """
    modules: Any = model
    return [value for module in modules.modules() for value in module.values() if isinstance(value, mx.array)]


def take_own_operations(model: Module, kernels: KernelChoice, *, decodes: bool = True) -> None:
    take_plain_norms(model)
    lay_expert_rows(model)
    if device() == "cpu":
        make_row_exact(model)
        take_quick_swiglu(model)
    elif kernels.takes_few_rows():
        take_few_rows(model, has_wide=kernels.has_wide_rows)
        if kernels.joins_steps():
            # Claimed first: the check's launches, too, must have no other model's beside them.
            may_have = decodes and has_llamas_blocks(model) and may_have_whole_layers(model)
            whole = may_have and claim(model) and all(kernels.takes_layers(is_packed=kind) for kind in kinds_of(model))
            join_steps(model, whole=whole, attends=decodes and kernels.takes_layers(is_packed=None))


@contextmanager
def _loadable() -> Iterator[None]:
    """Raises FailedPrecondition for any error: a configuration can provoke every one in mlx-lm or transformers."""
    try:
        yield
    except KvasirError:
        raise
    except Exception as error:
        raise FailedPrecondition(f"model: mlx-lm cannot load it: {error}", reason="MODEL_NOT_LOADABLE") from error


def _classes(config: dict[str, Any], take: Callable[[Tensors], None]) -> tuple[Any, Any]:
    """mlx-lm's classes for a configuration. The model gives its weights to `take` before it renames or changes any."""
    make_model, arguments = mlx_lm.utils._get_classes(layers_config(config))

    def make(given: Any) -> Any:
        model: Any = make_model(given)
        sanitize = getattr(model, "sanitize", lambda weights: weights)

        def taken(weights: Tensors) -> Any:
            take(weights)
            return sanitize(weights)

        model.sanitize = taken
        return model

    return make, arguments


def _of_another_type(model: Module, compute_type: mx.Dtype) -> list[mx.array]:
    """The parameters that ones of the compute type take the place of."""
    parameters: Any = tree_flatten(model.parameters())  # type: ignore[no-untyped-call]
    kinds = (value for _, value in parameters if mx.issubdtype(value.dtype, mx.floating))
    return [value for value in kinds if value.dtype != compute_type]


def device() -> str:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def sampling_defaults(directory: Path) -> Mapping[str, float]:
    """By the names of Sampling; empty where the model is not to be sampled. Other values are logged."""
    try:
        given = json.loads((directory / _GENERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(given, dict) or given.get("do_sample") is False:
        return {}
    found = {name: given[name] for name in _RANGES if given.get(name) is not None}
    if given.get("do_sample"):
        found.setdefault("temperature", 1.0)
    for name in [name for name, value in found.items() if not _is_right(name, value)]:
        _log.warning("sampling_default.ignored file=%s setting=%s", _GENERATION, name)
        del found[name]
    return found


def _is_right(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _RANGES[name](value)

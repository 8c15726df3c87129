"""Opens a model by name: loads, probes and identifies it. Runs once, on the MLX thread."""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Required, TypedDict

from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.formats.grammars import Grammars
from inference_svc.kv.applied import applied_layers
from inference_svc.kv.attention.choice import Chosen, Wanted
from inference_svc.kv.kept_files import KeptDirs
from inference_svc.kv.policy import PolicyRequest, name_of
from inference_svc.model import kvasir_tiny
from inference_svc.model.auto_policy import ChosenPolicy, chosen_policy
from inference_svc.model.device_memory import keep_for_computing
from inference_svc.model.loading import LoadedModel, device, find_model, load, sampling_defaults
from inference_svc.model.model_identity import template_digest, tokenizer_digest, weights_digest
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.probing.probe_memory import ProbeMemory
from inference_svc.model.quality import exam
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.wedlm import MaskWindow
from inference_svc.model.weights.weight_files import check_unchanged
from inference_svc.text.token_text import TokenText

logger = logging.getLogger(__name__)  # whose words a program without a service does not print
# Smaller cells than a device fills cost speed; larger ones cost the running streams a longer gap. 8B geometry, H200, a
# prompt of 8,192 tokens: 492 ms in cells of 256, 279 of 1,024, 244 of 2,048, 227 of 4,096; mlx-lm 264.
# On a CPU a cell is never cut, and streams and other namespaces' turns wait for it: at 6,000 tokens 0.2 s on two cores.
_CELL_TOKENS = {"cpu": BLOCK_TOKENS // 4, "metal": 4 * BLOCK_TOKENS, "cuda": 8 * BLOCK_TOKENS}
_SPARE_BYTES = 8 << 30  # of buffers that a cell and a step use again


@dataclass(frozen=True)
class OpenedModel:
    info: ModelInfo
    tokenizer: Any
    token_text: TokenText
    grammars: Grammars
    vocabulary_size: int
    device: str
    directory: Path  # of the model's files
    kernels: Chosen = field(default_factory=Chosen)


class ModelArguments(TypedDict, total=False):
    """Which model it becomes: `Engine.open` passes this on to `open_model`."""

    name: str  # for callers; empty: the name in the model's path
    cache_dir: Required[Path]  # keeps digests of weights by file identity, and the choices of `auto` by that digest
    kept_dir: (
        Path | None
    )  # keeps the findings of probes and checks on a GPU, for all of a user's homes; None: `cache_dir`
    policy: identity_pb2.KvPolicy | PolicyRequest | None  # None: 4 bits, groups of 64
    context_tokens: int | None
    compute_type: str | None  # None: float32 on a CPU, else the model's own
    conversations_file: Path | None  # from it `auto` questions the model, if it is written for its tokenizer
    batch_invariant: bool  # see `ModelRunner`
    copies_weights: bool
    kernels: Wanted  # "reference": none


def open_model(
    model: str | Path,
    which: ModelArguments,
    begin_phase: Callable[[str], None] = lambda _: None,
    *,
    load: Callable[..., LoadedModel] = load,
) -> tuple[OpenedModel, ModelRunner]:
    begin_phase("weights")
    directory, cache_dir, compute_type = find_model(model), which["cache_dir"], which.get("compute_type")
    copies, kernels = which.get("copies_weights", False), which.get("kernels", "auto")
    kept_dir = which.get("kept_dir") if device() != "cpu" else None
    kept = KeptDirs(cache_dir, kept_dir)
    loaded = load(directory, compute_type, copies_weights=copies, kernels=kernels, kept=kept)
    logger.info("weights.loaded how=%s", loaded.placement.in_words)
    begin_phase("identity")
    digest = weights_digest(directory, cache_dir, loaded.digests.result() if loaded.digests else None)
    check_unchanged(directory, loaded.files, loaded.texts)
    begin_phase("probing")
    keep_for_computing(_SPARE_BYTES)
    probes = ProbeMemory(kept_dir or cache_dir, digest, compute_type, loaded.kernels.conditions)
    known, batch_invariant = probes.read(), which.get("batch_invariant", False)
    runner = ModelRunner(loaded.model, batch_invariant=batch_invariant, known=known, kernels=loaded.kernels)
    if batch_invariant and runner.is_on_gpu and MaskWindow.of_config(loaded.config) is not None:
        raise FailedPrecondition.of(
            "batch_invariant", "on a GPU a pass over windows of masks (WeDLM) has as many rows as its turns need"
        )
    if known is None and not loaded.kernels.has_failed:
        probes.write(runner.probed)
    chosen = _policy(which, directory, loaded, runner, digest)
    name = which.get("name") or (kvasir_tiny.name_of(directory) if Path(model).is_dir() else str(model))
    context_tokens = which.get("context_tokens")
    info = _info(name, directory, loaded, runner, chosen, digest, context_tokens)
    if context_tokens is not None and context_tokens > info.context_tokens:
        logger.warning("context.shorter context_tokens=%d model=%d", context_tokens, info.context_tokens)
    serving = runner.layout.chosen_kernels(info.kv_identity, fills_masks=info.mask_window is not None)
    logger.info("kernels.chosen attention=%r encoding=%r products=%r", *astuple(serving)[:3])
    opened = OpenedModel(
        info=info,
        tokenizer=loaded.tokenizer,
        token_text=loaded.token_text,
        grammars=Grammars.of_tokenizer(loaded.tokenizer, runner.vocabulary_size, info.stop_token_ids),
        vocabulary_size=runner.vocabulary_size,
        device=device(),
        kernels=serving,
        directory=directory,
    )
    check_unchanged(directory, loaded.files, loaded.texts)  # by now the tokenizer has been read
    return opened, runner


def _policy(
    which: ModelArguments, directory: Path, loaded: LoadedModel, runner: ModelRunner, digest: str
) -> ChosenPolicy:
    policy = which.get("policy")
    if isinstance(policy, identity_pb2.KvPolicy):
        return ChosenPolicy(policy, "asked for")
    request = policy or PolicyRequest()
    file = which.get("conversations_file") if request.rung is None else None
    read_conversations = functools.partial(Conversations.read_for, file, tokenizer_digest(directory))
    subject = exam.Subject(runner, loaded.tokenizer, read_conversations, loaded.context_tokens)
    return chosen_policy(request, subject, digest, which["cache_dir"], time.monotonic)


def _info(
    name: str,
    directory: Path,
    loaded: LoadedModel,
    runner: ModelRunner,
    chosen: ChosenPolicy,
    digest: str,
    context_tokens: int | None,
) -> ModelInfo:
    runner.layout.check_policy(runner.model, chosen.policy)
    identity = identity_pb2.KvIdentity(weights_digest=digest, layers=runner.layers, policy=chosen.policy)
    applied = applied_layers(runner.layout, identity, runner.new_pool(identity.policy), runner.compute_type)
    return ModelInfo(
        name=name,
        kv_identity=identity,
        tokenizer_digest=tokenizer_digest(directory),
        template_digest=template_digest(loaded.tokenizer.chat_template),
        context_tokens=min(loaded.context_tokens, context_tokens or loaded.context_tokens),
        policy_applied_layers=applied,
        embedding_width=runner.probed.width,
        policy_name=name_of(chosen.policy),
        policy_why=chosen.why,
        weights_bytes=loaded.weights_bytes,
        weights_placement=loaded.placement.in_words,
        cell_tokens=_CELL_TOKENS[device()],
        compute_type=runner.compute_type,
        stop_token_ids=tuple(sorted(loaded.tokenizer.eos_token_ids)),
        mask_window=MaskWindow.of_config(loaded.config),
        sampling_defaults=sampling_defaults(directory),
    )

"""A played model, opened by a geometry's name: its layout, page sizes and context, without weights."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from blake3 import blake3
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Cancelled, InvalidArgument
from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.formats.grammars import Grammars
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import DecodeStep
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import GROUP_SIZE, PolicyRequest, Rung, name_of
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV
from inference_svc.model import kvasir_tiny
from inference_svc.model.model_identity import template_digest, tokenizer_digest
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.open_model import ModelArguments, OpenedModel
from inference_svc.text.token_text import TokenText
from kvasir_bench.played.played_pages import PlayedPages
from kvasir_bench.synthetic.geometries import geometry

NAME_PREFIX = "played-"
_COMPUTE_TYPE = "bfloat16"
_LIKELY = 20.0  # a logit beside which all others, of 0, have no chance


class PlayedRunner(ModelRunner):
    """What the engine uses of a runner, without a model. MLX's own operations write the pages, on every device."""

    takes_pool_at_once = True  # a pool that grows copies gigabytes, which is not to be measured

    def __init__(
        self,
        layers: Sequence[identity_pb2.LayerLayout],
        vocabulary_size: int,
        words: Sequence[int],
        tokens_per_s: float,
        sleep: Callable[[float], None],
    ) -> None:
        """`words`: the tokens that a reply consists of. `tokens_per_s`: how long prompts are to take; 0: not longer."""
        self._tokens_per_s = tokens_per_s
        self._sleep = sleep
        self.is_on_gpu = False
        self.layers = tuple(layers)
        self.compute_type = _COMPUTE_TYPE
        self.compute_item_bytes = 2
        self.vocabulary_size = vocabulary_size
        self._words = words
        self._pages: PlayedPages | None = None

    def new_pool(
        self,
        policy: identity_pb2.KvPolicy,
        budget_bytes: int = 1 << 30,
        *,
        is_allocated: bool = True,  # noqa: ARG002 - a pool that grows copies gigabytes, which is not to be measured
    ) -> KvPool:
        identity = identity_pb2.KvIdentity(layers=self.layers, policy=policy)
        pool = KvPool(identity, budget_bytes, is_allocated=True)
        self._pages = PlayedPages(pool)
        return pool

    def new_batch(self, pool: KvPool, decoded_budget: int) -> DecodeBatch:
        return PlayedBatch(pool, self.pages, self._logits, decoded_budget)

    def close(self) -> None:
        """There are no weights, and no graphs."""
        self._pages = None

    @property
    def pages(self) -> PlayedPages:
        assert self._pages is not None, "the pool comes first"
        return self._pages

    def prefill(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] | None = None,  # noqa: ARG002 - nothing is enqueued behind it
        take_hidden: Callable[[mx.array], None] | None = None,  # noqa: ARG002 - it has no rows
        early: Callable[[], None] = lambda: None,  # noqa: ARG002 - as `meanwhile`
    ) -> None:
        if is_cancelled():
            raise Cancelled("the turn was cancelled; the agent remembers what it did before")
        room = PassRoom(kv)
        room.take(len(token_ids))
        try:
            self.pages.append(kv, room.pages[0], token_ids)
        except BaseException:
            room.release()
            raise
        room.move_in()
        kv.advanced(len(token_ids))
        if self._tokens_per_s:
            self._sleep(len(token_ids) / self._tokens_per_s)

    def last_logits(
        self,
        kv: SequenceKV,
        token_ids: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[mx.array], None] | None = None,  # noqa: ARG002 - as above
        early: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> mx.array:
        self.prefill(kv, token_ids, is_cancelled)
        return self._logits([self.pages.reply(kv)])

    def _logits(self, replies: Sequence[int]) -> mx.array:
        """One token of a reply has all the chance, [rows, vocabulary]."""
        logits = np.zeros((len(replies), self.vocabulary_size), dtype=np.float32)
        logits[range(len(replies)), [self._words[reply % len(self._words)] for reply in replies]] = _LIKELY
        return mx.array(logits)


class PlayedBatch(DecodeBatch):
    """A batch whose step writes rows and reads replies; it joins, leaves and fails as every batch."""

    def __init__(
        self, pool: KvPool, pages: PlayedPages, logits: Callable[[Sequence[int]], mx.array], decoded_budget: int
    ) -> None:
        super().__init__(pool, _no_forward, decoded_budget)
        self._played = pages
        self._logits_of = logits

    def most_drafted_rows(self, longest: int) -> int:  # noqa: ARG002
        """None: a row that was tried would be written as the reply's own."""
        return 0

    def step(self, token_ids: Sequence[int] | mx.array, counts: Sequence[int] | None = None) -> mx.array:
        """As `DecodeBatch.step`; evaluated."""
        assert counts is None
        tokens: Any = token_ids.tolist() if isinstance(token_ids, mx.array) else token_ids
        sequences = self.sequences
        DecodeStep.of(self._pool, sequences)
        pages = [kv.tables[0].pages[kv.length // PAGE_TOKENS] for kv in sequences]
        self._played.append_row(pages, sequences, tokens)
        for kv in sequences:
            kv.advanced(1)
        return self._logits_of([self._played.reply(kv) for kv in sequences])


def _no_forward(_tokens: mx.array, _caches: Sequence[Any]) -> mx.array:
    raise NotImplementedError("a played model computes nothing")


def played_layers(shape: str) -> tuple[list[identity_pb2.LayerLayout], int]:
    """A geometry's layout and context. Raises InvalidArgument: unknown, with windows, or rows of half words."""
    config = geometry(shape)
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "sliding_window" in config or dim % (2 * GROUP_SIZE):
        raise InvalidArgument.of("shape", f"{shape} is not played; llama-3.1-8b is")
    kind = identity_pb2.LAYER_KIND_FULL
    layer = identity_pb2.LayerLayout(kind=kind, kv_heads=heads, key_dim=dim, value_dim=dim)
    return [layer] * config["num_hidden_layers"], config["max_position_embeddings"]


def open_played(
    model: str | Path,
    which: ModelArguments,
    _begin_phase: Callable[[str], None] = lambda _: None,
    *,
    tokens_per_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[OpenedModel, PlayedRunner]:
    """As `open_model`, for a geometry's name. Raises InvalidArgument for a shape or a policy that is not played."""
    shape, policy = str(model), which.get("policy")
    layers, most_tokens = played_layers(shape)
    request = policy if isinstance(policy, PolicyRequest) else PolicyRequest(Rung.Q4)
    if request != PolicyRequest(Rung.Q4):
        raise InvalidArgument("KV policy: only q4 is played", field="kv_policy")
    directory = kvasir_tiny.path()
    load_tokenizer: Any = mlx_lm.utils.load_tokenizer
    tokenizer = load_tokenizer(directory)
    stops = tuple(sorted(tokenizer.eos_token_ids))
    text = TokenText.of_tokenizer(
        (directory / "tokenizer.json").read_text(encoding="utf-8"), lambda ids: str(tokenizer.decode(list(ids)))
    )
    vocabulary_size = len(tokenizer)
    runner = PlayedRunner(layers, vocabulary_size, _plain_words(tokenizer, vocabulary_size), tokens_per_s, sleep)
    chosen = request.policy(Rung.Q4, _COMPUTE_TYPE, len(layers))
    digest = blake3(f"kvasir.played.v1 {shape}".encode()).hexdigest()
    identity = identity_pb2.KvIdentity(weights_digest=digest, layers=layers, policy=chosen)
    info = ModelInfo(
        name=which.get("name") or NAME_PREFIX + shape,
        kv_identity=identity,
        tokenizer_digest=tokenizer_digest(directory),
        template_digest=template_digest(tokenizer.chat_template),
        context_tokens=min(most_tokens, which.get("context_tokens") or most_tokens),
        policy_applied_layers=len(layers),
        policy_name=name_of(chosen),
        policy_why="played, not computed",
        cell_tokens=BLOCK_TOKENS,
        compute_type=_COMPUTE_TYPE,
        stop_token_ids=stops,
    )
    grammars = Grammars.of_tokenizer(tokenizer, vocabulary_size, stops)
    return OpenedModel(info, tokenizer, text, grammars, vocabulary_size, "cpu", directory), runner


def _plain_words(tokenizer: Any, vocabulary_size: int) -> list[int]:
    """Tokens that spell a word in small letters: a reply of them is text that nothing else is part of."""
    spelled = ((token, tokenizer.decode([token])) for token in range(vocabulary_size))
    return [token for token, text in spelled if text[:1] == " " and text[1:].isalpha() and text.isascii()]

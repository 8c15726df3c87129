"""Runs the material through exact KV and through each other way to keep KV, and counts the differences.

Exact KV is mlx-lm's own KVCache in the type that the model computes in. Runs on the MLX thread. Everything is teacher
forced: a text is read in cells as the engine reads it, and a reply is right if every token of it is the likeliest.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, cast

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.tensor_layouts import expected_tensors
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.findings import REPEAT, Findings, Share
from inference_svc.model.quality.material import Question, Sheet

Caches: TypeAlias = SequenceKV | list[Any]  # ours, or mlx-lm's by layer

EXACT = "mlx-lm fp"
_PEER_GROUP = 64
CELL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Way:
    """One way to keep KV: the sums of its findings, and a maker of new caches for a text."""

    found: Findings
    new_caches: Callable[[], Caches]


@dataclass(slots=True)
class Reading:
    """The results of a sheet: log probabilities [positions, vocabulary] of each scored next token; right answers."""

    scores: mx.array
    right: list[bool]


class Meter:
    """A model that reads sheets with one kind of cache after another."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        # The last sheet's, with its seconds: a model is tried on the first sheet, and then examined on it.
        self._exact: tuple[Sheet, Reading, float] | None = None

    def can_ask(self) -> bool:
        """Whether a question can be undone: windows and recurrent states cannot be cut back to the text."""
        return all(type(cache) is KVCache for cache in make_prompt_cache(self._runner.model))

    def measure(self, sheet: Sheet, exact: Way, others: Iterable[Way]) -> None:
        """Add the results of this sheet to the findings of each way."""
        expected = self._expected(sheet, exact)
        _count(sheet, expected, expected, exact.found)
        for way in others:
            _count(sheet, expected, self._timed(sheet, way), way.found)
            self._runner.release_unused()

    def go_on(self, way: Way, beginning: tuple[int, ...], tokens: int, seed: int) -> tuple[int, ...]:
        """Continue a text by `tokens` tokens, each sampled with the model's own probabilities."""
        ids, caches = list(beginning), way.new_caches()
        scores = self._runner.scores(caches, ids)
        for step in range(tokens):
            token = int(_number(mx.random.categorical(scores[-1], key=mx.random.key(1000 * seed + step))))
            ids.append(token)
            scores = self._runner.scores(caches, [token])
        return tuple(ids)

    def _expected(self, sheet: Sheet, exact: Way) -> Reading:
        if self._exact is not None and self._exact[0] is sheet:
            _, reading, seconds = self._exact
            exact.found.seconds += seconds
            return reading
        self._exact = None  # large: gone before the next is made
        before = exact.found.seconds
        reading = self._timed(sheet, exact)
        self._exact = sheet, reading, exact.found.seconds - before
        return reading

    def _timed(self, sheet: Sheet, way: Way) -> Reading:
        began = self._clock()
        reading = self._read(sheet, way.new_caches())
        way.found.seconds += self._clock() - began
        return reading

    def _read(self, sheet: Sheet, caches: Caches) -> Reading:
        scored: list[mx.array] = []
        cuts = {*range(0, len(sheet.ids), CELL_TOKENS), len(sheet.ids)}
        if sheet.task:
            cuts.add(sheet.scored_from)  # an answer is generated over the prompt's KV as it is stored
        for start, end in pairwise(sorted(cuts)):
            cell = sheet.ids[start:end]
            scores = self._runner.scores(caches, cell)
            # The row of position p scores token p + 1; the row of the last token has none to score.
            first, last = max(sheet.scored_from - 1 - start, 0), min(len(cell), len(sheet.ids) - 1 - start)
            if first < last:
                scored.append(scores[first:last])
                mx.eval(scored[-1])
        return Reading(mx.concatenate(scored), [self._is_right(question, caches) for question in sheet.questions])

    def _is_right(self, question: Question, caches: Caches) -> bool:
        """Put the question behind the text, and cut the caches back to it afterwards."""
        ids = (*question.ids, *question.answer[:-1])
        scores = self._runner.scores(caches, ids)
        guesses = scores[len(question.ids) - 1 :].argmax(-1).tolist()
        if isinstance(caches, SequenceKV):
            caches.trim_to(caches.length - len(ids))
        else:
            for cache in caches:
                cache.trim(len(ids))
        return bool(guesses == list(question.answer))


def exact_way(runner: ModelRunner) -> Way:
    return _peer(runner, EXACT, lambda: make_prompt_cache(runner.model))


def policy_way(runner: ModelRunner, name: str, policy: identity_pb2.KvPolicy) -> Way:
    """This engine's own KV under a policy."""
    identity = identity_pb2.KvIdentity(layers=runner.layers, policy=policy)
    bytes_per_token = sum(tensor.size_bytes for tensor in expected_tensors(identity, 1))
    return Way(Findings(name, bytes_per_token), lambda: SequenceKV(runner.new_pool(policy)))


def peer_ways(runner: ModelRunner) -> tuple[list[Way], dict[str, str]]:
    """mlx-lm's own quantized caches in every layer; and by name the reason for each that the model cannot have."""
    ways: list[Way] = []
    refused: dict[str, str] = {}
    keeps_all = all(type(cache) is KVCache for cache in make_prompt_cache(runner.model))
    for bits in (4, 8):

        def new_caches(bits: int = bits) -> list[Any]:
            return [QuantizedKVCache(_PEER_GROUP, bits) for _ in make_prompt_cache(runner.model)]  # type: ignore[no-untyped-call]

        name = f"mlx-lm q{bits}"
        if not keeps_all:
            refused[name] = "mlx-lm has quantized caches for layers that keep every token only"
            continue
        try:
            ways.append(_peer(runner, name, new_caches))
        # mlx-lm has no type of its own for its refusals (another attention, a head that the groups do not divide), and
        # MLX none for a product that a device cannot compute. None is passed over: each is reported with its reason.
        except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
            refused[name] = f"mlx-lm raises {type(error).__name__}: {error}"
    return ways, refused


def _peer(runner: ModelRunner, name: str, new_caches: Callable[[], list[Any]]) -> Way:
    """Bytes per token are those of the arrays after a probe, without their spare rows."""
    probed = new_caches()
    runner.scores(probed, (0, 1, 2))
    kept = [[cache.keys, cache.values] for cache in probed if getattr(cache, "keys", None) is not None]
    arrays: list[mx.array] = [array for _, array in cast("Any", tree_flatten(kept))]
    return Way(Findings(name, sum(array.nbytes // array.shape[2] for array in arrays)), new_caches)


def _count(sheet: Sheet, expected: Reading, reading: Reading, found: Findings) -> None:
    tokens = mx.array(sheet.ids[sheet.scored_from :])
    divergence = (mx.exp(expected.scores) * (expected.scores - reading.scores)).sum(-1)
    guesses = reading.scores.argmax(-1)
    chosen = mx.take_along_axis(reading.scores, tokens[:, None], axis=-1)
    if sheet.scores_text:
        found.add_text(
            positions=tokens.size,
            # Rounding can make a divergence of next to nothing negative.
            kl_sum=max(0.0, _number(divergence.sum())),
            kl_worst=_number(divergence.max()),
            agreed=int(_number((guesses == expected.scores.argmax(-1)).sum())),
            surprise_sum=-_number(chosen.sum()),
        )
    right = int(_number((guesses == tokens).sum()))
    if sheet.is_repetition:
        found.share(REPEAT).add(right, tokens.size)
    if sheet.task:
        found.tasks.setdefault(sheet.task, Share()).add(right == tokens.size)
    for question, is_right in zip(sheet.questions, reading.right, strict=True):
        found.share(question.task).add(is_right)


def _number(array: mx.array) -> float:
    value: Any = array.item()
    return float(value)

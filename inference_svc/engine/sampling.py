"""From logits to next tokens of a batch: each row's depends on its own logits, settings and seed alone."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from kvasir.errors import Internal, KvasirError
from numpy.typing import NDArray

from inference_svc.engine.api import SamplingParams, TokenLogprobs
from inference_svc.formats.grammars import GrammarMatcher
from inference_svc.kv.batch.draw_pairs import NOT_SOUND
from inference_svc.text.replies.reasoning_limit import ReasoningWatch
from inference_svc.text.replies.replayed_reply import ReplayedReply

# Below it the second likeliest token has no chance, and a division by it may leave float32's range.
_LEAST_TEMPERATURE = 1e-4
_FEW = 2  # rows whose tokens are eight bytes
_WORD_BITS = 32


class Drawn(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws the tokens of one request: its settings, its key, the tokens that it may not repeat, its constraint. The
    order is that of mlx-lm: bias, then repetition penalty (CTRL, arXiv 1909.05858: positive logits are divided,
    negative ones multiplied, once per token however often it came), then OpenAI's two penalties, which count the reply
    alone, then the constraint. From the remaining tokens a greedy sampler takes the likeliest. Others apply top-p,
    min-p and top-k to the untempered distribution, and draw at the temperature. A temperature below 1e-4 is greedy, as
    0 is. Log probabilities are the model's own, before all of these steps.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        constraint: GrammarMatcher | None = None,
        key: Sequence[int] | None = None,
        reply_ids: Sequence[int] = (),
        watch: ReasoningWatch | ReplayedReply | None = None,
    ) -> None:
        """`prompt_ids`: the tokens before the next one, which the repetition penalty counts too. `key`: of the next
        draw, where tokens were drawn before (`key_words`); these are `reply_ids`. `watch`: of the reply's reasoning, or
        of a reply that is computed again.
        """
        self._watch = watch
        self._params = params
        self.constraint = constraint
        self._keys = mx.random.key(params.seed) if key is None else mx.array(list(key), dtype=mx.uint32)
        self._place: int | None = None  # of its key, where these are those of several samplers
        if params.logit_bias:
            biased, biases = zip(*params.logit_bias, strict=True)
            self._biased, self._biases = mx.array(biased, dtype=mx.uint32), mx.array(biases, dtype=mx.float32)
        self._recent: deque[int] | None = None
        if params.repetition_penalty != 1 and params.repetition_tokens:
            self._recent = deque(prompt_ids[-params.repetition_tokens :], maxlen=params.repetition_tokens)
        self._counts_reply = bool(params.frequency_penalty or params.presence_penalty)
        self._drawn_before = reply_ids if self._counts_reply else ()
        self._counts: mx.array | None = None  # of each token in the reply, once the vocabulary's size is known
        self.may_wait = constraint is not None or self._recent is not None or watch is not None  # for the last token
        self._is_shaped = constraint is not None or self._recent is not None or self._counts_reply
        self._is_shaped |= bool(params.logit_bias)
        needs_more = self._is_shaped or params.logprobs is not None
        self._takes_likeliest = self._is_greedy and not needs_more
        draws_freely = not (self._is_greedy or needs_more or watch is not None)
        # Samplers with the same settings draw together: from logits and a key alone. None: it draws by itself.
        self.shared_settings = (params.temperature, params.top_p, params.min_p, params.top_k) if draws_freely else None

    @property
    def seed(self) -> int:
        return self._params.seed

    @property
    def _key(self) -> mx.array:
        return self._keys if self._place is None else self._keys[self._place]

    @_key.setter
    def _key(self, key: mx.array) -> None:
        self._keys, self._place = key, None

    @property
    def key_words(self) -> tuple[int, ...]:
        """The key of the next draw: 32-bit words. Waits for it."""
        words: Any = self._key.tolist()
        return tuple(words)

    @property
    def is_plain(self) -> bool:
        """Whether it takes the likeliest token and needs no other value."""
        is_free = self._watch is None or (self._watch.forced is None and self._watch.banned is None)
        return self._takes_likeliest and is_free

    @property
    def takes_drafts(self) -> bool:
        """Whether it can draw behind tokens that may be taken back. A budget of reasoning cannot."""
        return self._watch is None

    def forced(self, most: int) -> tuple[int, ...]:
        """The next tokens as far as the constraint allows one alone, at most so many."""
        return () if self.constraint is None else self.constraint.forced(most)

    @property
    def draws_in_order(self) -> bool:
        """Whether a draw depends on the tokens drawn before it, and not on their number alone."""
        is_free = self.constraint is None and self._recent is None and self._watch is None
        return not is_free or self._counts_reply

    @property
    def waits_for_last_token(self) -> bool:
        """Whether the last token must be known before the next can be drawn."""
        waits = self._watch is not None and self._watch.waits
        return self.constraint is not None or self._recent is not None or waits

    @property
    def _is_greedy(self) -> bool:
        return self._params.temperature < _LEAST_TEMPERATURE

    def plan(self, rows: mx.array, drafts: Sequence[int] = ()) -> "list[_PlannedDraw | KvasirError]":
        """The draws from logits [drafts + 1, vocabulary], not evaluated: the first behind what was accepted, each other
        one as if the drafts before it had been drawn. Fewer, if the constraint cannot follow a draft, or what is before
        it: whether it can follow what is drawn shows in a step without drafts.
        """
        recent, followed = None if self._recent is None else self._recent.copy(), 0
        planned = [self._plan(rows[0])]
        for place, token in enumerate(() if isinstance(planned[0], KvasirError) else drafts):
            if self.constraint is not None:
                if not self.constraint.follow(token):
                    break
                followed += 1
            if self._recent is not None:
                self._recent.append(token)
            if isinstance(row := self._plan(rows[place + 1]), KvasirError):
                break
            planned.append(row)
        self._recent = recent
        if drafts and self.constraint is not None:
            self.constraint.go_back(followed)
        return planned

    def _go_back(self, to: "_PlannedDraw") -> None:
        """Draws that were planned behind this one were for drafts that were wrong."""
        self._key, self._counts = to.key_after, to.counts_after

    def _plan(self, row: mx.array) -> "_PlannedDraw | KvasirError":
        """The draw from logits [vocabulary], not evaluated, or the constraint's error."""
        row = row.astype(mx.float32)
        try:
            shaped = self._shaped(row)
        except KvasirError as error:
            return error
        if self._watch is not None and (forced := self._watch.forced) is not None:
            token = mx.array(forced, dtype=mx.uint32)
        elif self._is_greedy:
            token = mx.argmax(shaped)
        else:
            logprobs = _filtered(shaped - mx.logsumexp(shaped), self._params)
            self._key, key = mx.random.split(self._key)
            token = mx.random.categorical(logprobs / self._params.temperature, key=key)
        if self._counts is not None:  # on the device: nobody waits for the token
            self._counts = _with_one_more(self._counts, token)
        return _PlannedDraw(token.astype(mx.uint32), self._logprobs_of(row, token), self._key, self._counts)

    def biased(self, logits: mx.array) -> mx.array:
        """Logits [..., vocabulary] with the request's bias."""
        return logits.at[..., self._biased].add(self._biases) if self._params.logit_bias else logits

    def _shaped(self, row: mx.array) -> mx.array:
        row = self.biased(row)
        if self._recent:
            ids = mx.array(sorted(set(self._recent)), dtype=mx.uint32)
            penalty, chosen, row = self._params.repetition_penalty, row[ids], mx.array(row)
            row[ids] = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
        if self._counts_reply:
            row = row - self._penalties(row.size)
        if self.constraint is not None:
            row = mx.where(_unpacked(self.constraint.allowed(), row.size), row, -mx.inf)
        if self._watch is not None and (banned := self._watch.banned) is not None:
            row = mx.where(mx.arange(row.size) == banned, -mx.inf, row)
        return row

    def _penalties(self, vocabulary_size: int) -> mx.array:
        """What the logits lose for what the reply has: from whole counts, as a sampler that goes on elsewhere needs."""
        if self._counts is None:
            counts = np.bincount(np.array(self._drawn_before, dtype=np.int64), minlength=vocabulary_size)
            self._counts = mx.array(counts.astype(np.float32))
        is_there = (self._counts > 0).astype(mx.float32)
        return self._params.frequency_penalty * self._counts + self._params.presence_penalty * is_there

    def _logprobs_of(self, row: mx.array, token: mx.array) -> tuple[mx.array, ...]:
        """Log probability of the token, the likeliest tokens and their log probabilities; empty unless requested."""
        if self._params.logprobs is None:
            return ()
        logprobs = row - mx.logsumexp(row)
        if not self._params.logprobs:
            return (logprobs[token],)
        count = min(self._params.logprobs, row.size)
        top = mx.argpartition(-logprobs, count - 1)[:count]
        return logprobs[token], top.astype(mx.uint32), logprobs[top]

    def _accept(self, token: int, row: "_PlannedDraw | None") -> Drawn:
        """The token was drawn; a row without a planned draw took the likeliest."""
        if self._watch is not None:
            self._watch.accept(token)
        if row is None:
            return Drawn(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        if self._recent is not None:
            self._recent.append(token)
        return Drawn(token, row.read_logprobs())


@dataclass(frozen=True, slots=True)
class _PlannedDraw:
    """One row's draw, as arrays. `logprobs`: what `Sampler._logprobs_of` gives. The rest: the sampler's, behind it."""

    token: mx.array
    logprobs: tuple[mx.array, ...]
    key_after: mx.array
    counts_after: mx.array | None

    def read_logprobs(self) -> TokenLogprobs | None:
        if not self.logprobs:
            return None
        value: Any
        value, *likeliest = (array.tolist() for array in self.logprobs)  # `likeliest` is empty unless requested
        pairs = sorted(zip(*likeliest, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(value, tuple(pairs))


class Draws:
    """The draws of one step: arrays that the device computes, until `read` waits for them."""

    def __init__(
        self,
        samplers: Sequence[Sampler],
        logits: mx.array,
        drafts: Sequence[Sequence[int]] = (),
        *,
        in_pairs: Callable[[mx.array, mx.array], list[mx.array]] | None = None,
    ) -> None:
        """One sampler for each of the first rows of logits [rows, vocabulary]. `drafts`: by sampler, tokens that were
        computed behind its row, each in a row of its own there. Begins to compute and does not wait. `in_pairs`: see
        `draw_pairs`; for draws that are read while the device computes something else.
        """
        self._drafts: list[Sequence[int]] = [*drafts] or [()] * len(samplers)
        self._first_rows = list(accumulate((1 + len(each) for each in self._drafts), initial=0))
        logits = logits[: self._first_rows.pop()]
        if any(sampler.constraint is not None for sampler in samplers):
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the model computes while constraints say what may come
        self._samplers = samplers
        likeliest = mx.argmax(logits, axis=-1).astype(mx.uint32)
        # If the maximum is NaN or infinite, the row's arg max and draws mean nothing, now and in later steps. This is
        # two kernels; `isfinite` is six, of which CUDA's wait for the host's memory.
        greatest = logits.max(axis=-1)
        self._is_sound = mx.abs(greatest) < mx.inf
        self._planned: list[_PlannedDraw | KvasirError | None] = [None] * logits.shape[0]
        groups = self._groups()
        together = {sampler for group in groups for sampler in group}
        for place, (sampler, first) in enumerate(zip(samplers, self._first_rows, strict=True)):
            if not sampler.is_plain and sampler not in together:
                tried = self._drafts[place]
                draws = sampler.plan(logits[first : first + 1 + len(tried)], tried)
                self._planned[first : first + len(draws)] = draws
                self._drafts[place] = tried[: len(draws) - 1]  # no draft has a row without a draw behind it
        planned = [row for row in self._planned if isinstance(row, _PlannedDraw)]
        # Uint32 [rows]; of a row without a draw any token.
        self.tokens = self._chosen(likeliest) if planned else likeliest
        for group in groups:
            rows = [*group.values()]
            is_all = rows == [*range(logits.shape[0])]
            tokens = _drawn_together([*group], logits if is_all else logits[mx.array(rows)])
            self.tokens = tokens if is_all else _with(self.tokens, rows, tokens)
        arrays = [array for row in planned for array in (row.token, *row.logprobs)]
        self._read_apart = in_pairs(self.tokens, greatest) if in_pairs and logits.shape[0] > _FEW else []
        mx.async_eval(self.tokens, *(self._read_apart or [self._is_sound]), *arrays)  # type: ignore[no-untyped-call]

    def read(self) -> list[Drawn | KvasirError]:
        """The next token of each row, or the row's own error, without drafts. Waits."""
        return [drawn for [drawn] in self.read_drafted()]

    def read_drafted(self) -> list[list[Drawn | KvasirError]]:
        """By sampler, the next tokens: one, and one more behind each draft that was drawn. Waits."""
        tokens, sound = self._numbers()
        if len(self._planned) == len(self._samplers):  # no drafts; one that is not tried has a row, too
            rows = zip(self._samplers, tokens, sound, self._planned, strict=True)
            return [
                [
                    Drawn(token)
                    if is_sound and not (planned or sampler.may_wait)
                    else _drawn(sampler, token, is_sound, planned)
                ]
                for sampler, token, is_sound, planned in rows
            ]
        return [
            self._read_one(sampler, first, tried, tokens, sound)
            for sampler, first, tried in zip(self._samplers, self._first_rows, self._drafts, strict=True)
        ]

    def _numbers(self) -> tuple[list[int], list[bool]]:
        """By row, the token and whether its logits are numbers. Waits."""
        if not self._read_apart:
            tokens: Any = self.tokens.tolist()
            sound: Any = self._is_sound.tolist()
            return tokens, sound
        words = [number for pair in self._read_apart for number in cast("list[int]", pair.tolist())]
        marked = words[: len(self._planned)]  # without the last one's spare word
        return marked, [number < NOT_SOUND for number in marked]  # the token of a row that is not sound means nothing

    def _read_one(
        self, sampler: Sampler, first: int, drafts: Sequence[int], tokens: list[int], sound: list[bool]
    ) -> list[Drawn | KvasirError]:
        drawn: list[Drawn | KvasirError] = []
        for row in range(first, first + len(drafts) + 1):
            planned = self._planned[row]
            drawn.append(last := _drawn(sampler, tokens[row], sound[row], planned))
            is_behind = row - first < len(drafts)
            if not is_behind or isinstance(last, KvasirError) or last.token_id != drafts[row - first]:
                if is_behind and isinstance(planned, _PlannedDraw):
                    sampler._go_back(planned)
                break
        return drawn

    def _groups(self) -> list[dict[Sampler, int]]:
        """Samplers that draw together, with their rows; none that draws several times, each time with another key."""
        if all(sampler.shared_settings is None for sampler in self._samplers):
            return []
        groups, times = defaultdict[object, dict[Sampler, int]](dict), Counter(self._samplers)
        for sampler, first, tried in zip(self._samplers, self._first_rows, self._drafts, strict=True):
            if sampler.shared_settings is not None and not tried and times[sampler] == 1:
                groups[sampler.shared_settings][sampler] = first
        return [group for group in groups.values() if len(group) > 1]

    def _chosen(self, likeliest: mx.array) -> mx.array:
        rows = enumerate(self._planned)
        return mx.stack([row.token if isinstance(row, _PlannedDraw) else likeliest[place] for place, row in rows])


def _drawn(sampler: Sampler, token: int, is_sound: bool, row: _PlannedDraw | KvasirError | None) -> Drawn | KvasirError:
    if not is_sound:
        return Internal("the model computed what is no number; the turn cannot go on", reason="LOGITS_NOT_FINITE")
    if isinstance(row, KvasirError):
        return row
    try:
        return sampler._accept(token, row)
    except KvasirError as error:
        return error


def _unpacked(words: NDArray[np.uint32], size: int) -> mx.array:
    """Bits to booleans [size]; tokens beyond the words are false."""
    bits = mx.array(words)[:, None] >> mx.arange(_WORD_BITS, dtype=mx.uint32)
    flat = (bits & 1).astype(mx.bool_).reshape(-1)[:size]
    return flat if flat.size == size else mx.pad(flat, (0, size - flat.size))


def _drawn_together(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """The tokens that these samplers, which have the same settings, would draw one by one, each from its row of
    [n, vocabulary]: the same bits, in a few operations for all rows instead of dozens for each.
    """
    params, logits = samplers[0]._params, logits.astype(mx.float32)
    logprobs = _filtered(logits - mx.logsumexp(logits, axis=-1, keepdims=True), params)
    keys, tokens = mx.vmap(_draw)(_keys_of(samplers), logprobs / params.temperature)
    for place, sampler in enumerate(samplers):
        sampler._keys, sampler._place = keys, place
    drawn: mx.array = tokens.astype(mx.uint32)
    return drawn


def _draw(key: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
    """The key of the next draw, and the token."""
    following, key = mx.random.split(key)
    return following, mx.random.categorical(logprobs, key=key)


def _keys_of(samplers: Sequence[Sampler]) -> mx.array:
    """[n, 2]: those of the draw before, if the same samplers drew together then."""
    keys = samplers[0]._keys
    places = [sampler._place if sampler._keys is keys else None for sampler in samplers]
    return keys if places == [*range(keys.shape[0])] else mx.stack([sampler._key for sampler in samplers])


def _with(tokens: mx.array, rows: Sequence[int], drawn: mx.array) -> mx.array:
    changed = mx.array(tokens)
    changed[mx.array([*rows])] = drawn
    return changed


def _with_one_more(counts: mx.array, token: mx.array) -> mx.array:
    """As a repetition penalty reads and writes: CUDA compiles 22 kernels for each other way."""
    changed = mx.array(counts)
    changed[token] = counts[token] + 1
    return changed


def _filtered(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """Log probabilities [..., vocabulary], those of tokens that have no chance -inf."""
    if params.top_p < 1:
        logprobs = _top_p(logprobs, params.top_p)
    if params.min_p > 0:
        floor = logprobs.max(axis=-1, keepdims=True) + mx.log(mx.array(params.min_p))
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    if 0 < params.top_k < logprobs.shape[-1]:
        floor = mx.topk(logprobs, params.top_k).min(axis=-1, keepdims=True)
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    return logprobs


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens until their probabilities reach `top_p`; the one that crosses it stays."""
    ascending = mx.sort(logprobs)
    likelier = mx.cumsum(mx.exp(ascending), axis=-1, reverse=True, inclusive=False)
    # CUDA's `take_along_axis`, as `put_along_axis`, is 88 kernels, which a machine compiles for seconds.
    floor = mx.where(likelier < top_p, ascending, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(logprobs < floor, -mx.inf, logprobs)

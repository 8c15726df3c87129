"""Reply formats of one model: compiled once for equal requests. From any thread; a matcher belongs to one turn."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.server.fair_shares import Shares
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from inference_svc.formats.call_grammars import HARMONY
from inference_svc.formats.call_writing import Spelling
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammar_trial import check, refused, too_complex
from inference_svc.formats.grammar_trial_process import begin_replies, grammar_of, limits
from inference_svc.formats.reply_grammars import NO_CALLS, ModelCalls

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class FormatCache(Generic[KeyT, ValueT]):
    """At most `most` formats. A namespace with its share drops its own oldest, else the largest holder's goes."""

    def __init__(self, most: int) -> None:
        self._shares = Shares(most)
        self._kept: dict[str, OrderedDict[KeyT, ValueT]] = {}

    def __len__(self) -> int:
        return self._shares.held_by_all

    def has(self, namespace: str, key: KeyT) -> bool:
        return key in self._kept.get(namespace, ())

    def get(self, namespace: str, key: KeyT) -> ValueT | None:
        """The value, which becomes the namespace's newest."""
        if not self.has(namespace, key):
            return None
        self._kept[namespace].move_to_end(key)
        return self._kept[namespace][key]

    def put(self, namespace: str, key: KeyT, value: ValueT) -> None:
        if not self.has(namespace, key):
            while not self._shares.has_room(namespace, 1):
                has_some = self._shares.held(namespace) > 0
                self._drop_oldest(namespace if has_some else max(self._kept, key=self._shares.held))
            self._shares.hold(namespace, 1)
        self._kept.setdefault(namespace, OrderedDict())[key] = value
        self._kept[namespace].move_to_end(key)

    def _drop_oldest(self, namespace: str) -> None:
        self._kept[namespace].popitem(last=False)
        self._shares.give_back(namespace, 1)
        if not self._kept[namespace]:
            del self._kept[namespace]


_MAX_KEPT = 32
_WORD_BITS = 32


class Grammars:
    def __init__(
        self,
        build_tokenizer: Callable[[], LLTokenizer],
        vocabulary_size: int,
        stop_token_ids: Collection[int],
        clock: Callable[[], float] = time.thread_time,
        calls: ModelCalls = NO_CALLS,
    ) -> None:
        """`build_tokenizer` is called once, at the first need. `stop_token_ids`: the model's own. `clock` gives the
        working seconds of the calling thread: the cost of a mask, however busy the machine is. `calls`: how the model
        writes calls of tools.
        """
        self._calls = calls
        self._build_tokenizer = build_tokenizer
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._clock = clock
        self._kept: FormatCache[Constraint, LLMatcher] = FormatCache(_MAX_KEPT)
        self._keeping = threading.Lock()

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, vocabulary_size: int, stop_token_ids: Collection[int]) -> "Grammars":
        def build() -> LLTokenizer:
            try:
                size = max(vocabulary_size, len(tokenizer))
                return from_tokenizer(tokenizer._tokenizer, n_vocab=size, eos_token=sorted(stop_token_ids))
            except Exception as error:
                raise FailedPrecondition.of(
                    "response_format",
                    f"not with this model's tokenizer ({type(error).__name__})",
                    reason="NO_RESPONSE_FORMATS",
                ) from error

        return cls(build, vocabulary_size, stop_token_ids, calls=_model_calls(tokenizer, frozenset(stop_token_ids)))

    def knows(self, namespace: str, constraint: Constraint) -> bool:
        with self._keeping:
            return self._kept.has(namespace, constraint)

    def compile(self, namespace: str, constraint: Constraint) -> Constraint:
        """The compiled format, which is kept. Raises InvalidArgument, FailedPrecondition (tokenizer)."""
        return replace(constraint, compiled=self._compiled(namespace, constraint))

    def in_letters(self, constraint: Constraint) -> Constraint:
        """The format as a tokenizer of letters alone can try it. Raises as `compile`."""
        if not constraint.has_calls:
            return constraint
        grammar = self._calls.grammar(constraint.kind, constraint.text, Spelling({}))
        if constraint.kind is ConstraintKind.CALLS_IN_TEXT:  # in free text a trial would come to no call
            grammar = self._calls.grammar(ConstraintKind.TOOL_CHOICE, constraint.text, Spelling({}))
        return Constraint(constraint.kind, grammar)

    def matcher(self, namespace: str, constraint: Constraint, stop_token_ids: Collection[int] = ()) -> "GrammarMatcher":
        """A matcher for a new reply; `stop_token_ids` are added to the model's own. Raises as `compile`."""
        compiled: Any = constraint.compiled or self._compiled(namespace, constraint)
        stops = self._stop_token_ids | set(stop_token_ids)
        ends = self._calls.end_ids(constraint.kind) or stops
        return GrammarMatcher(constraint, compiled, self._vocabulary_size, stops, self._clock, ends)

    def _compiled(self, namespace: str, constraint: Constraint) -> LLMatcher:
        with self._keeping:
            kept = self._kept.get(namespace, constraint)
        if kept is not None:
            return kept
        matcher = self._compile(constraint)
        with self._keeping:
            self._kept.put(namespace, constraint, matcher)
        return matcher

    def _spelling(self) -> Spelling:
        """Of the added tokens those that no text spells, as llguidance sees them."""
        assert self._tokenizer is not None
        ids = self._calls.spelling.special_ids
        return Spelling({each: place for each, place in ids.items() if self._tokenizer.is_special_token(place)})

    def _compile(self, constraint: Constraint) -> LLMatcher:
        with self._building:
            self._tokenizer = self._tokenizer or self._build_tokenizer()
        try:
            text = constraint.text
            if constraint.has_calls:
                text = self._calls.grammar(constraint.kind, text, self._spelling())
            grammar = grammar_of(constraint.kind.value, text)
        except ValueError as error:
            raise refused(constraint, str(error)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        # A second trial, with this model's own tokens: a mask of a large vocabulary may take longer.
        check(constraint, begin_replies(matcher, self._clock))
        return matcher


def _model_calls(tokenizer: Any, stop_ids: frozenset[int]) -> ModelCalls:
    """How a model writes calls. Replies of one that mlx-lm knows no parser for are read as `json_tools`."""
    added = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    added_ids = {str(token): int(token_id) for token_id, token in added.items()}
    if tokenizer.response_transitions or (tokenizer.tool_parser is None and "<|channel|>" in added_ids):
        return ModelCalls(HARMONY, Spelling(added_ids), stop_ids)
    parser = tokenizer.tool_parser
    name = parser.__module__.rpartition(".")[2] if parser is not None else "json_tools"
    return ModelCalls(name, Spelling(added_ids), stop_ids)


class GrammarMatcher:
    """The allowed next tokens of one reply: an end token once it matches, nothing else once it cannot go on."""

    def __init__(
        self,
        constraint: Constraint,
        matcher: LLMatcher,
        vocabulary_size: int,
        stop_token_ids: Collection[int],
        clock: Callable[[], float],
        end_token_ids: Collection[int],
    ) -> None:
        """`matcher`: at its beginning, where it stays. `end_token_ids`: stop tokens that may end this reply."""
        self.worked_s = 0.0  # the working time spent on this reply so far
        self._clock = clock
        self._accepted: list[int] = []
        self._forced: deque[int] = deque()  # behind these: tokens of which each is the only one allowed
        self._follows = True  # until what was tried became too complex: each time would cost the whole reply again
        self._constraint = constraint
        self._at_beginning = matcher
        self._matcher = matcher.deep_copy()
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = sorted(token for token in stop_token_ids if token < vocabulary_size)
        self._end_token_ids = frozenset(end_token_ids)

    def allowed(self) -> NDArray[np.uint32]:
        """Bit b of word w stands for token 32 w + b. Raises InvalidArgument for a format that became too complex."""
        began_s = self._clock()
        try:
            return self._allowed()
        finally:
            self.worked_s += self._clock() - began_s

    def accept(self, token_id: int) -> None:
        """Follow the reply by an allowed token; an end token is no part of it. Raises as `allowed`."""
        began_s = self._clock()
        if token_id not in self._stop_token_ids:
            if not self._matcher.consume_token(token_id):
                raise self._gave_up()
            self._accepted.append(token_id)
            if self._forced and self._forced.popleft() != token_id:
                self._forced.clear()
        self.worked_s += self._clock() - began_s

    def forced(self, most: int) -> tuple[int, ...]:
        """The next tokens as far as each is the only one allowed, at most so many; an end token is none of them."""
        began_s = self._clock()
        if not self._forced and self._follows:  # a long run is computed once, not behind each of its tokens
            self._forced.extend(self._matcher.compute_ff_tokens())
            self._recover()
        self.worked_s += self._clock() - began_s
        return tuple(islice(self._forced, most))

    def follow(self, token_id: int) -> bool:
        """Follow the reply by a token that `go_back` takes back; False if it is not allowed, or too complex."""
        began_s = self._clock()
        may_follow = self._follows and token_id not in self._stop_token_ids
        is_allowed = may_follow and self._matcher.validate_tokens([token_id]) == 1
        has_followed = is_allowed and self._matcher.consume_token(token_id)
        self.worked_s += self._clock() - began_s
        return has_followed

    def go_back(self, tokens: int) -> None:
        """Take back so many tokens that were followed last, also if the format became too complex behind them."""
        began_s = self._clock()
        if not self._recover():
            self._matcher.rollback(tokens)
        self.worked_s += self._clock() - began_s

    def _recover(self) -> bool:
        """Whether the format became too complex behind what was tried, and now stands behind what was accepted."""
        if not self._matcher.is_error():  # which a matcher never leaves
            return False
        self._follows = False
        self._forced.clear()
        self._matcher = self._at_beginning.deep_copy()
        self._matcher.consume_tokens(self._accepted)
        return True

    def _allowed(self) -> NDArray[np.uint32]:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4").copy()
        if self._matcher.is_error():
            raise self._gave_up()
        is_complete = self._matcher.is_accepting()
        for token in self._stop_token_ids:
            bit = np.uint32(1 << token % _WORD_BITS)
            words[token // _WORD_BITS] = (
                words[token // _WORD_BITS] | bit
                if is_complete and token in self._end_token_ids
                else words[token // _WORD_BITS] & ~bit
            )
        if not words.any():
            raise self._gave_up()
        return words

    def _gave_up(self) -> InvalidArgument:
        return too_complex(self._constraint, "it became too complex to follow, or no token of this model can go on")

"""Reply formats of one model: compiled once for all requests that ask for the same, advanced a token at a time.

The tokenizer's form for llguidance is built once per model, with the first format (a second for large vocabularies).
Methods may be called from any thread; a matcher belongs to one turn.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from kvasir.errors import FailedPrecondition, Internal, InvalidArgument, KvasirError
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from inference_svc.grammar_trial import refused
from inference_svc.grammar_trial_process import grammar_of, limits
from inference_svc.plan import Constraint

_MAX_KEPT = 32
_WORD_BITS = 32


class Grammars:
    """Compiles and keeps the formats that were asked for last."""

    def __init__(
        self, build_tokenizer: Callable[[], LLTokenizer], vocabulary_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """`build_tokenizer` is called once, by the first that needs it. `stop_token_ids`: the model's own."""
        self._build_tokenizer = build_tokenizer
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, vocabulary_size: int, stop_token_ids: Collection[int]) -> "Grammars":
        """`tokenizer`: mlx-lm's TokenizerWrapper."""

        def build() -> LLTokenizer:
            try:
                size = max(vocabulary_size, len(tokenizer))
                return from_tokenizer(tokenizer._tokenizer, n_vocab=size, eos_token=sorted(stop_token_ids))
            except Exception as error:
                raise FailedPrecondition(
                    f"response_format: not with this model's tokenizer ({type(error).__name__})",
                    reason="NO_RESPONSE_FORMATS",
                    field="response_format",
                ) from error

        return cls(build, vocabulary_size, stop_token_ids)

    def knows(self, constraint: Constraint) -> bool:
        """Whether it is compiled already."""
        with self._keeping:
            return constraint in self._kept

    def compile(self, constraint: Constraint) -> None:
        """Compile a format and keep it. Takes a millisecond, or (large schemas) hundreds. Raises InvalidArgument, the
        field named, for one that cannot be used; FailedPrecondition for a tokenizer that allows none.
        """
        self._compiled(constraint)

    def matcher(self, constraint: Constraint, stop_token_ids: Collection[int] = ()) -> "GrammarMatcher":
        """A reply's matcher, at its beginning: a copy of the one that is kept. `stop_token_ids`: besides the model's
        own. Raises as `compile`, unless it was compiled just before.
        """
        matcher = self._compiled(constraint).deep_copy()
        return GrammarMatcher(constraint, matcher, self._vocabulary_size, self._stop_token_ids | set(stop_token_ids))

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        with self._keeping:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint]
        matcher = self._compile(constraint)
        with self._keeping:
            self._kept[constraint] = matcher
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        with self._building:
            self._tokenizer = self._tokenizer or self._build_tokenizer()
        try:
            grammar = grammar_of(constraint.kind.value, constraint.text)
        except ValueError as error:
            raise refused(constraint, str(error)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()
        if first.is_error():
            raise refused(constraint, first.get_error())
        return matcher


class GrammarMatcher:
    """What may come next in one reply. An end token may once the reply matches, and nothing else may once it cannot
    go on.
    """

    def __init__(
        self, constraint: Constraint, matcher: LLMatcher, vocabulary_size: int, stop_token_ids: Collection[int]
    ) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._stop_token_ids = sorted(token for token in stop_token_ids if token < vocabulary_size)

    def allowed(self) -> NDArray[np.uint32]:
        """Bit b of word w tells of token 32 w + b. Raises InvalidArgument for a format that became too complex."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4").copy()
        if self._matcher.is_error():
            raise self._gave_up()
        is_complete = self._matcher.is_accepting()
        for token in self._stop_token_ids:
            bit = np.uint32(1 << token % _WORD_BITS)
            words[token // _WORD_BITS] = (
                words[token // _WORD_BITS] | bit if is_complete else words[token // _WORD_BITS] & ~bit
            )
        if not words.any():
            raise self._gave_up()
        return words

    def accept(self, token_id: int) -> None:
        """The token was drawn. An end token ends the turn and is no part of the reply."""
        if token_id not in self._stop_token_ids and not self._matcher.consume_token(token_id):
            raise Internal("a token was drawn that the reply's format does not allow")

    def _gave_up(self) -> KvasirError:
        field = self._constraint.kind.value
        return InvalidArgument(
            f"{field}: it became too complex to follow, or no token of this model can go on",
            reason="FORMAT_TOO_COMPLEX",
            field=field,
        )

"""Turns that a new engine runs before anybody's, so that the first real turn finds kernels compiled and memory touched.

They take the way of every turn: prompt, decoding alone, decoding beside others. They leave no memory.
"""

from collections.abc import Iterator
from concurrent.futures import Future, wait

from kvasir.errors import KvasirError

from inference_svc.engine.api import Ended, Event, Failed, SamplingParams, TurnPlan
from inference_svc.engine.engine import Engine
from inference_svc.text.token_ids import TokenIds

_TIME_LIMIT_S = 120.0
_DECODED_TOKENS = 3  # the first looks ahead at nothing, the others do
_SHORT_TOKENS = 16
_FEWEST = (4, 2)  # tokens of a prompt, and of a reply: each pass reads all weights, which a CPU takes long for


def warm_up(engine: Engine) -> None:
    """Blocks until it is done. A turn that fails is no reason not to serve: the same one of a caller says why."""
    for group in _groups(engine):
        wait([_run(engine, *tokens) for tokens in group], _TIME_LIMIT_S)
    engine.restart_counts()


def _groups(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Lengths of prompts and replies of turns that run at once. A CPU compiles nothing: one short turn is enough."""
    if engine.device == "cpu":
        yield [_FEWEST]
        return
    longest = engine.model.context_tokens - _DECODED_TOKENS
    cell = engine.model.cell_tokens
    yield [(min(cell + _SHORT_TOKENS, longest), _DECODED_TOKENS)]  # a whole cell, and a short one behind it
    yield [(min(_SHORT_TOKENS, longest), _DECODED_TOKENS)] * 4


def _run(engine: Engine, prompt_tokens: int, reply_tokens: int) -> "Future[None]":
    over: Future[None] = Future()

    def on_events(events: list[Event]) -> None:
        if any(isinstance(event, (Ended, Failed)) for event in events) and not over.done():
            over.set_result(None)

    plan = TurnPlan(
        token_ids=TokenIds([index % engine.vocabulary_size for index in range(1, prompt_tokens + 1)]),
        token_chars=(0,) * prompt_tokens,
        sampling=SamplingParams(max_tokens=reply_tokens),
    )
    try:
        engine.submit(plan, on_events)
    except KvasirError:  # a context or a memory that is too small for it
        over.set_result(None)
    return over

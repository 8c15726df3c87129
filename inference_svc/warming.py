"""Turns of a new engine before any caller's, so that the first one finds kernels compiled and memory touched.

They take the way of every turn: prompt, decoding alone and beside others, sampling, a memory that is copied for the
store and comes back. They leave no memory, and change no seed, count or agent.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import KvasirError
from kvasir.waits import WORK_S

from inference_svc.engine.api import (
    AgentKey,
    Cold,
    Ended,
    Event,
    Failed,
    Hot,
    Restored,
    Reuse,
    SamplingParams,
    Snapshot,
    TurnPlan,
)
from inference_svc.engine.engine import Engine
from inference_svc.kv.batch.short_pass import KEPT_TOKENS
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import GivenJson
from inference_svc.text.token_ids import TokenIds

_DECODED_TOKENS = 3  # the first looks ahead at nothing, the others do
_SHORT_TOKENS = 16
_MIDDLING_TOKENS = 300  # more than a block, less than a cell
_CROWD, _CROWD_S = 8, 1.0  # turns whose prompts are more than a cell: as many as are computed within a second
_CROWD_REPLY = 24  # tokens: the first still decodes when the last one begins to
_FEWEST = (4, 2)  # tokens of a prompt, and of a reply: each pass reads all weights, which a CPU takes long for
_QUICK_BYTES = 512 << 20  # of weights, with which a CPU's pass is quick; with 4.5 GB three take it half a minute
_KEY = AgentKey("", "")  # no caller's: namespaces and agents have names
_ANY_WAY = SamplingParams(  # draws by every rule
    max_tokens=_DECODED_TOKENS,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logprobs=2,
)


def warm_up(engine: Engine) -> None:
    """Blocks until it is done. A turn that fails is no reason not to serve: the same one of a caller says why."""
    for group in _groups(engine):
        _wait(*(_run(engine, prompt, SamplingParams(max_tokens=reply)) for prompt, reply in group))
    if engine.device != "cpu":
        longest = engine.model.context_tokens - _DECODED_TOKENS
        _wait(_run(engine, min(_SHORT_TOKENS, longest), _ANY_WAY))
        with contextlib.suppress(KvasirError, TimeoutError):
            _remember(engine, min(_MIDDLING_TOKENS, longest - _DECODED_TOKENS))
    engine.restart_counts()


async def warm_up_text(prompting: Prompting) -> None:
    """A conversation through template and tokenizer, on their thread: the template is compiled at its first use. A
    template that refuses it tells its callers so.
    """
    message = manifest_pb2.Message(role="user", content="Hello!")

    def tokenize() -> None:
        with contextlib.suppress(KvasirError):
            text = render(prompting.template, dialogue([message], (), GivenJson(), prompting.specials))
            prompting.tokenize(text)

    await prompting.run(_KEY.namespace, tokenize)


def _groups(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Lengths of prompts and replies of turns that run at once, one group after the other. A CPU compiles little: one
    short turn is enough, and of a large model it would cost seconds to save milliseconds. The last two groups find no
    new kernel but for a device's own products, so they also show what cells really cost.
    """
    if engine.device == "cpu":
        if engine.model.weights_bytes <= _QUICK_BYTES:
            yield [_FEWEST]
        return
    longest = engine.model.context_tokens - _DECODED_TOKENS
    cell = min(engine.model.cell_tokens + _SHORT_TOKENS, longest)
    yield [(cell, _DECODED_TOKENS)]  # a whole cell, and a short one behind it
    yield [(min(_SHORT_TOKENS, longest), _DECODED_TOKENS)] * 4
    for tokens in KEPT_TOKENS:
        yield [(min(tokens, longest), 1)]
    began_s = time.monotonic()
    yield [(cell, 1)]
    count = min(_CROWD, int(_CROWD_S / (time.monotonic() - began_s)))
    # Cells that are cut beside streams, batches of one to so many rows, and streams that end before others.
    yield [(cell, min(_CROWD_REPLY + 2 * place, engine.model.context_tokens - cell)) for place in range(count)]


def _remember(engine: Engine, tokens: int) -> None:
    """A memory is left, copied as for the store, extended, dropped, and comes back as from the store."""
    sampling = SamplingParams(max_tokens=1)
    try:
        _wait(_run(engine, tokens, sampling, key=_KEY))
        copied = engine.snapshot(_KEY, 0).result(WORK_S)
        if copied is None:
            return
        known = copied.state.token_ids
        _wait(_run(engine, len(known) + 1, sampling, Hot(len(known)), _KEY, known))
        engine.drop_hot(_KEY).result(WORK_S)
        if not copied.windows and not copied.states:
            _wait(_run(engine, len(known) + 1, sampling, _restored(copied), _KEY, known))
    finally:
        engine.drop_hot(_KEY).result(WORK_S)


def _restored(copied: Snapshot) -> Restored:
    files = (*copied.blocks, *([copied.tail] if copied.tail else []))
    tokens = copied.state.token_ids
    return Restored(tuple(data for _, data in files), tokens, len(tokens))


def _run(
    engine: Engine,
    prompt_tokens: int,
    sampling: SamplingParams,
    reuse: Reuse | None = None,
    key: AgentKey | None = None,
    known: TokenIds | None = None,
) -> "Future[None]":
    """`known`: the tokens that the prompt begins with."""
    over: Future[None] = Future()

    def on_events(events: list[Event]) -> None:
        if any(isinstance(event, (Ended, Failed)) for event in events) and not over.done():
            over.set_result(None)

    begins = tuple(known or ())
    new = (index % engine.vocabulary_size for index in range(len(begins) + 1, prompt_tokens + 1))
    plan = TurnPlan(TokenIds((*begins, *new)), (0,) * prompt_tokens, sampling, reuse or Cold(), key)
    try:
        engine.submit(plan, on_events)
    except KvasirError:  # a context or a memory that is too small for it
        over.set_result(None)
    return over


def _wait(*turns: "Future[None]") -> None:
    wait(turns, WORK_S)

"""Turns of a new engine before any caller's, so that the first one finds kernels compiled. They leave nothing."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import product

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import KvasirError
from kvasir.waits import LOOK_S, RETRY_S, SOON_S, WORK_S

from inference_svc.engine import api
from inference_svc.engine.engine import Engine
from inference_svc.kv.batch.decode_step import table_width
from inference_svc.kv.batch.packed_pass import ROW_TOKENS, rows_of_graph
from inference_svc.kv.batch.short_pass import KEPT_TOKENS
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import GivenJson
from inference_svc.text.token_ids import TokenChars, TokenIds

_DECODED_TOKENS = 3  # the first looks ahead at nothing, the others do
_SHORT_TOKENS = 16
_MIDDLING_TOKENS = 300  # more than a block, less than a cell
_OWN_KERNELS = (8, 32, 64)  # tokens of short passes for which kernels are compiled that no other turn here needs
_QUESTION_TOKENS = 48  # of a pass that a restored agent's turn begins with, most likely
_LONG_PROMPT = 32_768
_DEEP_TOKENS = 16_384  # to restore more takes 0.1 s and longer, beside which a graph's 15 ms are little
_CROWDS_ROWS = (2, 4, 8, 16, 32, 64)  # of steps that decode a crowd
_FIRST_PACKED = (20, 16, 8, 12, 4, 24, 6)  # of most passes over its prompts, beside streams
_PACKED_ROWS = tuple(dict.fromkeys(map(rows_of_graph, range(1, 33))))  # all: up to a whole cell
_CROWD = 8
_PACE_STEPS = 8  # behind a whole cell, whose times and theirs pace a first crowd
_CROWD_REPLY = 24  # tokens: the first still decodes when the last one begins to
_TRIES = 5  # callers who come so often compile their own shapes
_FEWEST = (4, 2)  # tokens of a prompt, and of a reply: each pass reads all weights, which a CPU takes long for
_QUICK_BYTES = 512 << 20  # of weights, with which a CPU's pass is quick; with 4.5 GB three take it half a minute
_KEY = api.AgentKey("", "")  # no caller's: namespaces and agents have names
_ANY_WAY = api.SamplingParams(  # draws by every rule
    max_tokens=_DECODED_TOKENS,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logprobs=2,
)


@dataclass
class _OwnTurn:
    over: "Future[None]" = field(default_factory=Future)
    cancel: Callable[[], None] = lambda: None


def warm_up(engine: Engine, clock: Callable[[], float]) -> None:
    """Blocks until it is done. A turn that fails is no reason not to serve: the same one of a caller reports why. A CPU
    has little to do: it compiles little, and one pass of a large model would cost seconds to save milliseconds.

    Kept kernels take 0.5 to 1.6 s. Where a machine compiles any, a first crowd would wait for its own: they come, too.
    """
    if engine.device != "cpu":
        began_s = clock()
        _run_each_kernel(engine)
        if _rounds_rows(engine):  # on a slow device these costs cut a first cell of a caller
            wait([engine.costs.forget()], WORK_S)
        if clock() - began_s > SOON_S and _rounds_rows(engine):
            wait([engine.keep_graph(*graph) for graph in _crowds_graphs(engine)], WORK_S)
            _wait(*_run_all(engine, _streams(engine)))
            _wait(*_run_all(engine, _crowd(engine)))
    elif engine.model.weights_bytes <= _QUICK_BYTES:
        _wait(*_run_all(engine, [_FEWEST]))


async def warm_up_while_idle(engine: Engine, is_idle: Callable[[], bool], clock: Callable[[], float]) -> None:
    """The shapes of a first crowd, on a GPU, while no caller has a turn: graphs for numbers of rows and each length of
    a short pass, a device's own products, and what cells really cost. Gives way at once, and begins again when it is
    idle. As many prompts as are computed within a second; and a long one, where its cells' depths cost something once.
    """
    if engine.device == "cpu":
        return
    cell, soon = _cell(engine), _soon_graphs(engine)
    await _keep_while_idle(engine, soon, is_idle)
    if _rounds_rows(engine):
        await _run_while_idle(engine, [(cell, _PACE_STEPS)], is_idle, clock)
    await _run_while_idle(engine, _streams(engine), is_idle, clock)
    for tokens in KEPT_TOKENS:
        await _run_while_idle(engine, [(min(tokens, cell), 1)], is_idle, clock)
    short = product(KEPT_TOKENS, _depths(engine), [1])
    await _keep_while_idle(engine, [each for each in (*_crowds_graphs(engine), *short) if each not in soon], is_idle)
    took_s = await _run_while_idle(engine, [(cell, 1)], is_idle, clock)
    count = int(1 / max(took_s, LOOK_S))
    await _run_while_idle(engine, _crowd(engine)[:count], is_idle, clock)
    if engine.device == "cuda":  # its attention plans each depth of a whole cell: 40 to 80 ms once in a process
        longest = engine.model.context_tokens - 1
        await _run_while_idle(engine, [(min(_LONG_PROMPT, longest), 1)], is_idle, clock)


async def _keep_while_idle(engine: Engine, graphs: Iterable[tuple[int, int, int]], is_idle: Callable[[], bool]) -> None:
    for tokens, depth, rows in graphs:
        while not is_idle():
            await _until_quiet(is_idle)
        # It fails where memories have every page, or as the engine ends.
        await asyncio.gather(asyncio.wrap_future(engine.keep_graph(tokens, depth, rows)), return_exceptions=True)


async def _run_while_idle(
    engine: Engine, group: Sequence[tuple[int, int]], is_idle: Callable[[], bool], clock: Callable[[], float]
) -> float:
    """Run such turns at once until no caller's came meanwhile. Seconds that they took; infinite if that never was."""
    tries = 0
    while tries < _TRIES:
        began_s, is_over = clock(), False
        if is_idle():
            tries += 1
            if not _has_room(engine, group):
                break
            turns = _run_all(engine, group)
            try:
                while is_idle() and not is_over:
                    await asyncio.sleep(LOOK_S)
                    is_over = all(turn.over.done() for turn in turns)
            finally:
                for turn in turns:
                    turn.cancel()
        if is_over:
            return clock() - began_s
        await _until_quiet(is_idle)
    return math.inf


async def _until_quiet(is_idle: Callable[[], bool]) -> None:
    """Wait until no caller has had a turn for a while. Between two turns of one caller there are milliseconds, too."""
    looks = 0
    while looks < RETRY_S / LOOK_S:
        looks = looks + 1 if is_idle() else 0
        await asyncio.sleep(LOOK_S if looks else RETRY_S)


def _has_room(engine: Engine, group: Sequence[tuple[int, int]]) -> bool:
    """Whether such turns fit beside the memories that callers have left."""
    needed_bytes = sum(engine.needed_bytes(prompt + reply) for prompt, reply in group)
    return not engine.memories.sizes() or needed_bytes <= engine.memory_budget_bytes - engine.memory_used_bytes


async def warm_up_text(prompting: Prompting) -> None:
    """A conversation through template and tokenizer: the template is compiled at its first use."""
    message = manifest_pb2.Message(role="user", content="Hello!")

    def tokenize() -> None:
        with contextlib.suppress(KvasirError):
            text = render(prompting.template, dialogue([message], (), GivenJson(), prompting.specials))
            prompting.tokenize(text)

    await prompting.run(_KEY.namespace, tokenize)


def _run_each_kernel(engine: Engine) -> None:
    longest = engine.model.context_tokens - _DECODED_TOKENS
    short = min(_SHORT_TOKENS, longest)
    _wait(*_run_all(engine, [(_cell(engine), _DECODED_TOKENS)]))  # a whole cell, and a short one behind it
    for tokens in _OWN_KERNELS:
        _wait(*_run_all(engine, [(min(tokens, longest), 1)]))
    _wait(_run(engine, short, _ANY_WAY))
    # A graph is another one for each width of block tables: a restored turn is the first to need most of them.
    shallow = [depth for depth in _depths(engine) if depth < _DEEP_TOKENS]
    wait([engine.keep_graph(*graph) for graph in product((_QUESTION_TOKENS, 0), shallow)], WORK_S)
    with contextlib.suppress(KvasirError, TimeoutError):
        _remember(engine, min(_MIDDLING_TOKENS, longest - _DECODED_TOKENS))


def _soon_graphs(engine: Engine) -> Collection[tuple[int, int, int]]:
    """Those that are needed first: of a crowd whose turns begin one after the other, which makes a dozen of them if it
    comes at once; and of deep restored turns. A pass's takes 40 to 60 ms, also that of the last prompt's last block; a
    step's 9, so theirs come first: a lone turn that comes at once waits for one of them at most.
    """
    depths = _depths(engine)
    shallow, deep = (list(product([0], [depth], _CROWDS_ROWS[:3])) for depth in (0, depths[:2][-1]))
    passes = list(product([ROW_TOKENS], depths[:1], _FIRST_PACKED))
    passes.insert(2, (KEPT_TOKENS[-1], 0, 1))
    crowd = dict.fromkeys((*deep, *shallow, *passes)) if _rounds_rows(engine) else ()
    return (*crowd, *product((_QUESTION_TOKENS, 0), [depth for depth in depths if depth >= _DEEP_TOKENS], [1]))


def _crowds_graphs(engine: Engine) -> Iterable[tuple[int, int, int]]:
    """Tokens, depth and rows. A pass of the most rows takes a Mac seconds, which a caller would wait for."""
    if not _rounds_rows(engine):
        return ()
    packed = product([ROW_TOKENS], _depths(engine)[:2], _PACKED_ROWS)
    return (*packed, *product([0], _depths(engine), _CROWDS_ROWS))


def _streams(engine: Engine) -> list[tuple[int, int]]:
    """As `_crowd`, of short prompts."""
    longest = engine.model.context_tokens - _DECODED_TOKENS
    return [(min(_SHORT_TOKENS, longest), _DECODED_TOKENS + place) for place in range(4)]


def _crowd(engine: Engine) -> list[tuple[int, int]]:
    """Tokens of prompts, and of their replies, which end one after the other."""
    cell = _cell(engine)
    longest = engine.model.context_tokens - cell
    return [(cell, min(_CROWD_REPLY + 2 * place, longest)) for place in range(_CROWD)]


def _rounds_rows(engine: Engine) -> bool:
    """Whether a crowd's steps have few numbers of rows (`DecodeBatch`)."""
    return engine.device == "cuda"


def _depths(engine: Engine) -> list[int]:
    """How deep a turn stands whose block tables have each of the widths that the context has, ascending."""
    widest = table_width(engine.model.context_tokens)
    widths = [width for power in range(widest.bit_length()) if (width := 1 << power) >= table_width(1)]
    return [width * PAGE_TOKENS // 2 + 1 if width > table_width(1) else 0 for width in widths]


def _cell(engine: Engine) -> int:
    return min(engine.model.cell_tokens + _SHORT_TOKENS, engine.model.context_tokens - _DECODED_TOKENS)


def _remember(engine: Engine, tokens: int) -> None:
    """A memory is left, copied as for the store, extended, dropped, and comes back as from the store."""
    sampling = api.SamplingParams(max_tokens=1)
    try:
        _wait(_run(engine, tokens, sampling, key=_KEY))
        copied = engine.memories.snapshot(_KEY, 0).result(WORK_S)
        if copied is None:
            return
        known = copied.state.token_ids
        _wait(_run(engine, len(known) + 1, sampling, api.Hot(len(known)), _KEY, known))
        engine.memories.drop(_KEY).result(WORK_S)
        if not copied.windows and not copied.states:
            _wait(_run(engine, len(known) + 1, sampling, _restored(copied), _KEY, known))
    finally:
        engine.memories.drop(_KEY).result(WORK_S)


def _restored(copied: api.Snapshot) -> api.Restored:
    files = (*copied.blocks, *([copied.tail] if copied.tail else []))
    tokens = copied.state.token_ids
    return api.Restored(tuple(data for _, data in files), tokens, len(tokens))


def _run(
    engine: Engine,
    prompt_tokens: int,
    sampling: api.SamplingParams,
    reuse: api.Reuse | None = None,
    key: api.AgentKey | None = None,
    known: TokenIds | None = None,
) -> "_OwnTurn":
    turn = _OwnTurn()

    def on_events(events: list[api.Event]) -> None:
        if any(isinstance(event, (api.Ended, api.Failed)) for event in events) and not turn.over.done():
            turn.over.set_result(None)

    begins = tuple(known or ())
    new = (index % engine.vocabulary_size for index in range(len(begins) + 1, prompt_tokens + 1))
    plan = api.TurnPlan(
        TokenIds((*begins, *new)), TokenChars((0,) * prompt_tokens), sampling, reuse or api.Cold(), key, is_own=True
    )
    try:
        turn.cancel = engine.submit(plan, on_events).cancel
    except KvasirError:  # a context or a memory that is too small for it
        turn.over.set_result(None)
    return turn


def _run_all(engine: Engine, group: Sequence[tuple[int, int]]) -> "list[_OwnTurn]":
    return [_run(engine, prompt, api.SamplingParams(max_tokens=reply)) for prompt, reply in group]


def _wait(*turns: "_OwnTurn") -> None:
    wait([turn.over for turn in turns], WORK_S)

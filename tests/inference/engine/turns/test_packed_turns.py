"""As on a GPU, by emulated kernels: prompts whose cells share a pass go on as each does alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import Cancelled, ResourceExhausted

from inference_svc.engine import engine
from inference_svc.engine.api import BlocksFull, Ended, Hot, Prefilled, Priority, Resumed, Started, Tokens
from inference_svc.engine.device import device_watch
from inference_svc.engine.scheduling.schedulable import Rules
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.kv.batch.packed_pass import Cell
from inference_svc.kv.pages.pool import KvPool
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.conftest import leaked_pages
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.emulated import emulated_engine
from tests.inference.engine.turns.test_preempted_turns import Keeper
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.service.failing_device import NO_MEMORY

pytestmark = [needs_compiler, pytest.mark.cpu_only("there all engines share passes")]

SHORT, MIDDLING, LONG = tokens_of(20, 1), tokens_of(130, 2), tokens_of(290, 3)
FORMAT: dict[str, Any] = {"constraint": Constraint(ConstraintKind.REGEX, "([a-z][0-9]){30}"), "temperature": 0.8}


@pytest.fixture(scope="module")
def emulated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Its passes have 512 tokens, and may take any time."""
    rules = engine._rules

    def patient(*given: Any) -> Rules:
        made = rules(*given)
        assert made.shared_pass is not None
        return replace(made, longest_cell_s=1e6, shared_pass=replace(made.shared_pass, longest_s=1e6))

    options: dict[str, Any] = {"memory_budget_bytes": 1 << 20, "longest_gap_s": 1e6, "cell_blocks": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_rules", patient)
        with emulated_engine(model_dir, tmp_path_factory.mktemp("digests"), **options) as driver:
            driver.turn(LONG, max_tokens=3)  # what a cell costs is known
            yield driver
            assert driver.engine._thread.post(leaked_pages).result(60) == 0


class Passes:
    """Sees the passes that cells share, and may do something while one is computed."""

    def __init__(self, runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[list[int]] = []
        self.at_pass: Callable[[], object] = lambda: None
        self.uses: list[int] = []  # of the host's numbers, to draw from each
        self._computed = runner.packed_logits
        patch.setattr(runner, "packed_logits", self.compute)

    def compute(
        self, cells: Sequence[Cell], meanwhile: Callable[[mx.array], None], early: Callable[[], None]
    ) -> mx.array:
        self.sizes.append([len(cell.token_ids) for cell in cells])

        def then(logits: mx.array) -> None:
            self.at_pass()
            numbers = cells[0].kv.pool.numbers
            before = numbers.uses
            meanwhile(logits)
            self.uses.append(numbers.uses - before)

        return self._computed(cells, then, early)


@pytest.fixture
def passes(emulated: Driver, monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(emulated.engine._worker._runner, monkeypatch)


def at_once(driver: Driver, *turns: Callable[[], Listener]) -> list[Listener]:
    """Submit turns within one step: when another one ends."""
    other, found = Listener(), list[Listener]()
    other.at(Tokens, 1, lambda: found.extend(turn() for turn in turns))
    driver.submit(SHORT, listener=other, max_tokens=1).end()
    for each in found:
        each.wait_for(Ended)
    return found


@pytest.mark.long(6)
def test_packed_turns_draw_what_each_draws_alone(emulated: Driver, passes: Passes) -> None:
    """Greedy, at random, and within a format; one goes on from its memory. Their log probabilities are near."""
    key, state = emulated.remember(100, seed=6)
    again, twin = (*state.token_ids, *tokens_of(40, 8)), emulated.fork(key)
    turns: list[tuple[Any, ...]] = [
        (SHORT, None, None, {"logprobs": 2, "temperature": 0.7, "seed": 3}),
        (MIDDLING, None, None, FORMAT),
        (again, Hot(len(state.token_ids)), key, {"logprobs": 2}),
    ]
    alone = []
    for tokens, reuse, of, each in turns:
        alone.append(emulated.submit(tokens, reuse, twin if of else None, **each))
        alone[-1].end()
    assert not passes.sizes
    found = at_once(
        emulated,
        *(
            lambda turn=turn: emulated.submit(turn[0], turn[1], turn[2], namespace=str(len(turn[0])), **turn[3])
            for turn in turns
        ),
    )
    assert [sorted(sizes) for sizes in passes.sizes] == [[20, 41, 130]]  # also the memory's last token
    for one, other in zip(found, alone, strict=True):
        assert one.end().state.token_ids == other.end().state.token_ids
        assert one.end().text == other.end().text
        for mine, own in zip(logprobs(one), logprobs(other), strict=True):
            assert mine == pytest.approx(own, abs=1e-3)


def logprobs(listener: Listener) -> list[float]:
    return [each.logprob for event in listener.events if isinstance(event, Tokens) for each in event.logprobs]


@pytest.mark.parametrize("is_whole", [True, False], ids=["a pool that stays", "a pool that grows"])
def test_a_stream_hears_the_last_step_before_all_of_the_next_pass_is_enqueued(
    is_whole: bool, emulated: Driver, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To enqueue it takes a processor as long as a third of the pass. A turn that ends then may compute its last token,
    for which a pool may grow: the rest of the pass would write where it was.
    """
    monkeypatch.setattr(KvPool, "keeps_memory", is_whole)
    stream, other = Listener(), Listener()
    enqueued, told = list[int](), list[int]()
    passes.at_pass = lambda: enqueued.append(stream.count(Tokens))
    for cell in (1, 2):
        other.at(Prefilled, cell, lambda: told.append(stream.count(Tokens)))
    stream.at(Tokens, 2, lambda: emulated.submit(tokens_of(1_100, 4), listener=other, max_tokens=1))
    emulated.submit(SHORT, listener=stream, max_tokens=9).end()
    other.end()
    assert told == [told[0], told[0] + 1]
    assert enqueued[:2] == (told if is_whole else [count - 1 for count in told])


def test_to_draw_first_tokens_no_number_of_the_hosts_goes_to_the_device(emulated: Driver, passes: Passes) -> None:
    """For a new array it may have to end the pass first. One of four prompts goes on."""
    assert emulated.engine._worker._pool.numbers.is_reused
    texts = [tokens_of(20, seed) for seed in range(3)] + [tokens_of(700, 4)]
    at_once(emulated, *(lambda text=text: emulated.submit(text, max_tokens=1) for text in texts))
    assert len(passes.sizes[0]) == 4
    assert passes.uses[0] == 0


@pytest.mark.long(8)
def test_a_memory_of_a_shared_pass_is_restored_as_one_that_never_left(emulated: Driver, passes: Passes) -> None:
    """Its block is reported as it comes, and serves its own namespace alone."""
    key, other = emulated.key(), emulated.key()
    listeners = at_once(
        emulated,
        lambda: emulated.submit(LONG, key=key, namespace="tests", max_tokens=5),
        lambda: emulated.submit(MIDDLING, key=other, namespace="theirs", max_tokens=5),
    )
    assert [sorted(sizes) for sizes in passes.sizes] == [[130, 290]]
    assert [each.count(BlocksFull) for each in listeners] == [1, 0]
    state = listeners[0].end().state
    assert state.shareable_tokens == 256
    again, hot = (*state.token_ids, *SHORT), Hot(len(state.token_ids))
    restored = emulated.turn(again, emulated.restored(key), max_tokens=9)
    assert emulated.turn(again, hot, emulated.fork(key), max_tokens=9).state.token_ids == restored.state.token_ids
    cached = []
    for namespace in ("tests", "theirs"):
        turn = emulated.submit((*LONG[:280], 7, 8), namespace=namespace, max_tokens=1)
        turn.end()
        cached += [event.cached_tokens for event in turn.events if isinstance(event, Started)]
    assert cached == [256, 0]


@pytest.mark.long(3)
def test_a_turn_that_is_cancelled_while_its_pass_is_computed_ends_alone(emulated: Driver, passes: Passes) -> None:
    """Beside a stream, which goes on behind the pass."""
    texts = (SHORT, MIDDLING)
    alone = [emulated.reply(emulated.turn(text, max_tokens=6)) for text in (LONG, *texts)]
    stream, leaving = Listener(), Listener()
    found: list[Listener] = []
    passes.at_pass = lambda: leaving.handle.result(60).cancel()

    def begin() -> None:
        found.extend(emulated.submit(text, max_tokens=6) for text in texts)
        emulated.submit(tokens_of(60, 9), listener=leaving, max_tokens=6)

    stream.at(Tokens, 2, begin)
    emulated.submit(LONG, listener=stream, max_tokens=6)
    said = emulated.reply(stream.end())
    assert [said, *(emulated.reply(each.end()) for each in found)] == alone
    with pytest.raises(Cancelled):
        leaving.end()
    assert [sorted(sizes) for sizes in passes.sizes] == [[20, 60, 130]]


@pytest.mark.long(2)
def test_without_room_for_all_of_a_pass_each_is_computed_alone(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (SHORT, MIDDLING)
    alone = [emulated.reply(emulated.turn(text, max_tokens=3)) for text in texts]
    asked: list[int] = []

    def refuse(cells: Sequence[Cell], *_: object) -> mx.array:
        asked.append(len(cells))
        raise ResourceExhausted("no pages")

    monkeypatch.setattr(emulated.engine._worker._runner, "packed_logits", refuse)
    found = at_once(emulated, *(lambda text=text: emulated.submit(text, max_tokens=3) for text in texts))
    assert [emulated.reply(each.end()) for each in found] == alone
    assert asked == [2]


@pytest.mark.parametrize("after", ["nothing", "the first layers", "the draws"])
def test_a_pass_without_memory_is_computed_once_more_by_each_alone_unless_it_has_drawn(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Beside a stream, which goes on as without it."""
    texts, settings = (SHORT, MIDDLING), {"temperature": 0.9, "seed": 5, "max_tokens": 3}
    alone = [emulated.reply(emulated.turn(text, **settings)) for text in texts]
    stream, found = Listener(), list[Listener]()
    expected = emulated.reply(emulated.turn(LONG, max_tokens=6))
    runner, given_back = emulated.engine._worker._runner, list[int]()
    computed = runner.packed_logits

    def fail(*_: object) -> None:
        raise RuntimeError(NO_MEMORY)

    def short(cells: Sequence[Cell], meanwhile: Callable[[mx.array], None], early: Callable[[], None]) -> mx.array:
        monkeypatch.undo()
        monkeypatch.setattr(device_watch, "bound_to_free", lambda: given_back.append(len(cells)))
        if after == "nothing":
            fail()
        if after == "the first layers":
            return computed(cells, meanwhile, lambda: (early(), fail())[0])
        return computed(cells, lambda logits: (meanwhile(logits), fail())[0], early)

    def begin() -> None:
        monkeypatch.setattr(runner, "packed_logits", short)
        found.extend(emulated.submit(text, **settings) for text in texts)

    stream.at(Tokens, 2, begin)
    assert emulated.reply(emulated.submit(LONG, listener=stream, max_tokens=6).end()) == expected
    if after == "the draws":
        for each in found:
            with pytest.raises(ResourceExhausted, match="out of memory"):
                each.end()
    else:
        assert [emulated.reply(each.end()) for each in found] == alone
    assert given_back[0] == 2, "all of the prompts"


@pytest.mark.long(7)
def test_a_turn_that_is_preempted_behind_a_shared_pass_goes_on_where_it_was(emulated: Driver, passes: Passes) -> None:
    """A person takes the room of the younger one, behind others' memories that of both, and gives it back."""
    alone = [emulated.reply(emulated.turn(text, max_tokens=6)) for text in (LONG, MIDDLING)]
    room = emulated.engine.memory_budget_bytes // emulated.engine.model.kv_bytes_per_token // 256 * 256
    older, younger, person = Keeper(), Keeper(), Listener()
    settings: dict[str, Any] = {"priority": Priority.BACKGROUND, "can_be_preempted": True}

    def begin(text: tuple[int, ...], listener: Listener) -> Listener:
        return emulated.submit(text, listener=listener.cancel_at(Tokens, 6), max_tokens=60, **settings)

    person.cancel_at(Tokens, 2)
    younger.at(Tokens, 2, lambda: emulated.submit(SHORT, listener=person, max_tokens=room - 600))
    other = Listener().at(Tokens, 1, lambda: (begin(LONG, older), begin(MIDDLING, younger)))
    emulated.submit(SHORT, listener=other, max_tokens=1).end()
    for each in (older, younger, person):
        with pytest.raises(Cancelled):
            each.end()
    assert [sorted(sizes) for sizes in passes.sizes] == [[130, 290]]
    assert younger.count(Resumed) == 1
    for turn, reply in zip((older, younger), alone, strict=True):
        drawn = [token for each in turn.events if isinstance(each, Tokens) for token in each.ids]
        assert tuple(drawn[: len(reply)]) == reply


@pytest.mark.long(6)
def test_a_long_cell_beside_a_stream_is_packed_alone_and_one_that_nobody_waits_for_is_not(
    emulated: Driver, passes: Passes
) -> None:
    alone = [emulated.reply(emulated.turn(text, max_tokens=6)) for text in (SHORT, LONG)]
    assert not passes.sizes, "its cancel waits for no whole pass"
    stream, found = Listener(), list[Listener]()
    stream.at(Tokens, 2, lambda: found.append(emulated.submit(LONG, max_tokens=6)))
    emulated.submit(SHORT, listener=stream, max_tokens=6)
    assert [emulated.reply(each) for each in (stream.end(), found[0].end())] == alone
    assert passes.sizes == [[len(LONG)]]

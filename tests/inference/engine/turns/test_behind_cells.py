"""As on a GPU, by emulated kernels: decoding goes on behind a cell that the device still computes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import Cancelled

from inference_svc.engine import mlx_thread
from inference_svc.engine.api import Ended, Event, Hot, Prefilled, Started, Tokens
from inference_svc.engine.sequence import Sequence
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.kv.host_copies import landings
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.emulated import emulated_engine
from tests.inference.kv.attention.device.coming_files import PlayedDriver, play
from tests.inference.kv.attention.emulators import needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.long(11),
    pytest.mark.cpu_only("there all engines decode behind cells"),
]

SHORT, LONG = tokens_of(20, 1), tokens_of(560, 2)
FORMAT: dict[str, Any] = {"constraint": Constraint(ConstraintKind.REGEX, "([a-z][0-9]){30}"), "temperature": 0.8}


@pytest.fixture(scope="module")
def emulated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    cache_dir = tmp_path_factory.mktemp("digests")
    with emulated_engine(model_dir, cache_dir, memory_budget_bytes=1 << 20, longest_gap_s=0) as driver:
        yield driver


class Timed(Listener):
    """Knows when its turn began."""

    began_s = 0.0

    def __call__(self, events: list[Event]) -> None:
        self.began_s = self.began_s or time.monotonic()
        super().__call__(events)


def at_cells(other: Listener, streams: list[Listener]) -> list[list[int]]:
    """How many tokens each stream has told when each of the other's cells is told."""
    counts: list[list[int]] = []
    for cell in (1, 2, 3):
        other.at(Prefilled, cell, lambda: counts.append([stream.count(Tokens) for stream in streams]))
    return counts


@pytest.mark.parametrize("beside", [{}, FORMAT], ids=["plain", "formatted"])
def test_streams_decode_behind_each_cell(emulated: Driver, beside: dict[str, Any]) -> None:
    """A token a cell, reported while the device computes the next one; each turn draws what it draws alone. Beside a
    stream whose next draw needs its last token it is two, because that token is waited for."""
    settings: list[dict[str, Any]] = [{}, beside]
    turns = [(SHORT, {"max_tokens": 16} | each) for each in settings] + [(LONG, {"max_tokens": 3})]
    alone = [emulated.reply(emulated.turn(prompt, **each)) for prompt, each in turns]
    stream, mate, other = Listener(), Listener(), Listener()
    counts = at_cells(other, [stream, mate])
    mate.at(Tokens, 2, lambda: emulated.submit(LONG, listener=other, max_tokens=3))
    for listener, (prompt, each) in zip((stream, mate), turns, strict=False):
        emulated.submit(prompt, listener=listener, **each)
    assert [emulated.reply(each.end()) for each in (stream, mate, other)] == alone
    first = counts[0]
    assert counts == [[count + (1 + bool(beside)) * cell for count in first] for cell in range(3)]


def test_streams_hear_a_step_when_the_first_layers_of_the_next_cell_are_enqueued(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To enqueue all of it takes a processor longer than a device a step. Of three cells the last is a short pass."""
    monkeypatch.setattr(KvPool, "keeps_memory", True)
    stream, other, worker = Listener(), Listener(), emulated.engine._worker
    counts, enqueued, behind = at_cells(other, [stream]), list[list[int]](), worker._decode_behind_cell
    monkeypatch.setattr(worker, "_decode_behind_cell", lambda: enqueued.append([stream.count(Tokens)]) or behind())
    stream.at(Tokens, 2, lambda: emulated.submit(LONG, listener=other, max_tokens=1))
    emulated.submit(SHORT, listener=stream, max_tokens=9).end()
    other.end()
    assert enqueued[:3] == counts


def test_all_that_a_step_does_before_its_cells_is_time_of_its_streams_gaps(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where other threads hold the interpreter."""
    stream, other, worker, late = Listener(), Listener(), emulated.engine._worker, [0.0]
    clock, begin, grant, spent = worker._clock, worker._masks.begin_step, worker._scheduler.grant, list[float]()

    def slow(*given: Any) -> Any:
        late[0] += 1
        return begin(*given)

    monkeypatch.setattr(worker, "_clock", lambda: clock() + late[0])
    monkeypatch.setattr(worker._masks, "begin_step", slow)
    monkeypatch.setattr(worker._scheduler, "grant", lambda now, **how: spent.append(now) or grant(now, **how))
    stream.at(Tokens, 2, lambda: emulated.submit(LONG, listener=other, max_tokens=1))
    emulated.submit(SHORT, listener=stream, max_tokens=9).end()
    other.end()
    assert max(spent) >= 1


def test_a_turn_that_a_cell_began_keeps_the_next_prompt_waiting_for_no_step_of_its_own(emulated: Driver) -> None:
    """A crowd's every first token would cost its other prompts a step. Its second one comes behind the next cell."""
    prompts = LONG, tokens_of(600, 3)
    alone = [emulated.reply(emulated.turn(each, max_tokens=12)) for each in (SHORT, *prompts)]
    stream, first, second = Listener(), Listener(), Listener()
    counts: list[list[int]] = []

    def begin() -> None:
        for listener, prompt in zip((first, second), prompts, strict=True):
            emulated.submit(prompt, listener=listener, max_tokens=12)

    for listener in (first, second):
        for cell in (1, 2, 3):
            listener.at(Prefilled, cell, lambda: counts.append([each.count(Tokens) for each in (stream, first)]))
    stream.at(Tokens, 2, begin)
    emulated.submit(SHORT, listener=stream, max_tokens=12)
    assert [emulated.reply(each.end()) for each in (stream, first, second)] == alone
    told = [told for told, _ in counts]
    assert told == [*range(told[0], told[0] + 6)]
    assert [began for _, began in counts[3:]] == [1, 2, 3]


@pytest.mark.parametrize("has_stream", [False, True])
def test_a_cell_ends_between_two_layers_at_a_cancel_unless_a_stream_waits_for_it(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch, *, has_stream: bool
) -> None:
    """Whose steps are enqueued behind the whole cell."""
    runner, stream, other, looks = emulated.engine._worker._runner, Listener(), Listener(), list[int]()
    compute = runner._compute

    def cancelling(kv: SequenceKV, tokens: list[int], is_cancelled: Callable[[], bool], *rest: Any, **how: Any) -> Any:
        def look() -> bool:
            looks.append(len(tokens))
            if len(looks) == 2:
                other.handle.result(60).cancel()
            return is_cancelled()

        return compute(kv, tokens, look, *rest, **how)

    monkeypatch.setattr(runner, "_compute", cancelling)
    if has_stream:
        stream.at(Tokens, 2, lambda: emulated.submit(LONG, listener=other, max_tokens=3))
        emulated.submit(SHORT, listener=stream, max_tokens=16)
        stream.end()
    else:
        emulated.submit(LONG, listener=other, max_tokens=3)
    with pytest.raises(Cancelled):
        other.end()
    assert (looks, other.count(Prefilled)) == (([256, 256], 1) if has_stream else ([256, 256], 0))


def test_a_snapshot_that_waits_for_a_turn_is_read_after_the_next_step_is_enqueued(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two turns, of which one speaks a token more, one ends behind a cell, as where windows need its last KV."""
    monkeypatch.setattr(Sequence, "computes_last", True)

    def computed_meanwhile(max_tokens: int) -> int:
        """Rows that are enqueued between such a turn's end and the reading of its memory."""
        key, ending, stream, other = emulated.key(), Listener(), Listener(), Listener()
        counts: list[int] = []

        def note(_: object = None) -> None:
            counts.append(emulated.engine.computed_tokens)

        def begin() -> None:
            emulated.submit(LONG, listener=other, max_tokens=3)
            emulated.engine.memories.snapshot(key, 0).add_done_callback(note)

        ending.at(Tokens, 2, begin).at(Ended, 1, note)
        emulated.submit(SHORT, listener=stream, max_tokens=16)
        emulated.submit(SHORT, key=key, listener=ending, max_tokens=max_tokens)
        for each in (ending, stream, other):
            each.end()
        ended, read = counts
        return read - ended

    assert sorted(map(computed_meanwhile, (5, 6))) == [0, 1]


def test_who_waits_for_a_turn_that_ends_at_a_steps_beginning_begins_at_once(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last token was drawn behind the only cell of another turn, and nothing else is to be done."""
    one_cell = tokens_of(50, 3)
    for prompt, settings in ((SHORT, FORMAT), (one_cell, {"max_tokens": 0})):
        emulated.turn(prompt, **{"max_tokens": 3} | settings)  # kernels are compiled
    monkeypatch.setattr(mlx_thread, "_IDLE_POLL_S", 60.0)
    for token in (3, 4):
        key, ending, next_turn, other = emulated.key(), Listener(), Timed(), Listener()
        ending.at(Tokens, token, lambda other=other: emulated.submit(one_cell, listener=other, max_tokens=0))
        emulated.submit(SHORT, listener=ending, key=key, max_tokens=5, **FORMAT)
        emulated.submit(SHORT, listener=next_turn, key=key, max_tokens=2)
        ending.end()
        ended_s = time.monotonic()
        next_turn.end()
        assert next_turn.began_s - ended_s < 30, "the engine looks for work by itself once a minute"


def test_files_that_come_by_themselves_are_written_between_steps_and_change_nobody(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, state = emulated.remember(600, seed=6)
    files, alone = emulated.restored(key), emulated.reply(emulated.turn(SHORT, max_tokens=16))
    expected = emulated.turn((*state.token_ids, *SHORT), Hot(len(state.token_ids)), key, max_tokens=3)
    played, stream, returning, seen = play(monkeypatch), Listener(), Listener(), list[int]()

    def begin() -> None:
        played.gate.clear()
        emulated.submit((*state.token_ids, *SHORT), files, listener=returning, max_tokens=3)

    stream.at(Tokens, 2, begin).at(Tokens, 7, played.gate.set)
    returning.at(Started, 1, lambda: seen.append(stream.count(Tokens)))
    emulated.submit(SHORT, listener=stream, max_tokens=16)
    assert emulated.reply(stream.end()) == alone
    assert returning.end().state == expected.state
    assert seen[0] >= 7


def test_streams_decode_beside_files_that_come_by_themselves_behind_a_cell(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token for each piece that is sent or written, also if the pieces are there so soon that no step is without."""
    key, state = emulated.remember(600, seed=9)
    files, one_cell, counts = emulated.restored(key), tokens_of(50, 3), list[int]()
    stream, other, returning = Listener(), Listener(), Listener()
    play(monkeypatch)
    monkeypatch.setattr(landings._Coming, "is_there", True)

    def note() -> None:
        counts.append(stream.count(Tokens))

    def begin() -> None:
        note()
        emulated.submit((*state.token_ids, *SHORT), files, listener=returning, max_tokens=0)

    stream.at(Tokens, 2, lambda: emulated.submit(one_cell, listener=other, max_tokens=0))
    other.at(Prefilled, 1, begin)
    returning.at(Started, 1, note)
    emulated.submit(SHORT, listener=stream, max_tokens=16)
    for each in (stream, other, returning):
        each.end()
    assert counts[1] - counts[0] >= 4


def copied_by_threads(emulated: Driver, monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    monkeypatch.setattr(emulated.engine._worker._pool, "_is_copied_by_threads", True)
    return play(monkeypatch)


def test_blocks_leave_by_threads_while_their_turn_and_the_next_go_on(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent's next turn writes where the tail lies that leaves."""
    key, state = emulated.remember(600, seed=7)
    files, twin, again = emulated.files(key), emulated.fork(key), (*state.token_ids, *SHORT)
    expected = emulated.turn(again, Hot(len(state.token_ids)), twin, max_tokens=9)
    played, turn, copies = copied_by_threads(emulated, monkeypatch), Listener(), list[Any]()

    def begin() -> None:
        played.gate.clear()
        copies.append(emulated.engine.memories.snapshot(key, 0, blocks_only=True))

    asked = emulated.engine.memories.pin(key, 0, 9)
    pinned = asked.result(60)
    assert pinned is not None
    copies.append(pinned.piece(0, 9, {}))
    played.gate.clear()
    turn.at(Tokens, 2, begin).at(Tokens, 7, lambda: copies.append(copies[-1].done())).at(Tokens, 7, played.gate.set)
    emulated.submit(again, Hot(len(state.token_ids)), key, turn, max_tokens=9)
    assert turn.end().state == expected.state
    piece, blocks, was_done = copies
    assert not was_done
    assert [bytes(data) for _, data in (*piece.result(60).blocks, piece.result(60).tail)] == list(files)
    assert [bytes(data) for _, data in blocks.result(60).blocks] == list(files[:2])
    assert emulated.files(key) == emulated.files(twin)
    assert pinned.take_first() == piece.result(60)
    pinned.release()


def test_a_copy_that_cuda_refuses_is_made_by_the_thread_that_computes(
    emulated: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = emulated.remember(600, seed=8)
    files = emulated.files(key)
    played = copied_by_threads(emulated, monkeypatch)
    assert emulated.engine.memories.is_copied_by_threads
    played.error = 700
    assert emulated.files(key) == files
    assert not emulated.engine.memories.is_copied_by_threads
    pinned = emulated.engine.memories.pin(key, 0, 9).result(60)
    assert pinned is not None
    assert pinned.take_first() == emulated.engine.memories.snapshot(key, 0).result(60)

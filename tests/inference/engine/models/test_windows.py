"""Models with windows: their memories go out as block files, come back, go back in time, and are shared."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from kvasir.errors import DataLoss, FailedPrecondition
from kvasir.formats.block_file import check_schema, parse_header
from kvasir.formats.layer_groups import first_touched_block, windows_of

from inference_svc.engine.api import AgentKey, Ended, Hot, Restored, RestoredWindow, Snapshot, Started
from inference_svc.engine.beginning import Reuse, forked_for, mark
from inference_svc.engine.engine import Engine
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.text.token_ids import TokenIds
from tests.inference.engine.cells import cells_of
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.families import ALL, BUDGET, write_family
from tests.inference.kv.sequences import fed, four_bits, full, pool_of, windowed
from tests.made_models.sampling import first_and_in_turn, one_of, pairs, sampled

if TYPE_CHECKING:
    from inference_svc.engine.sequence import Sequence

NAMES = ["gemma3", "gpt_oss"]


def snapshot(driver: Driver, key: AgentKey, stored: dict[int, set[int]] | None = None) -> Snapshot:
    taken = driver.engine.memories.snapshot(key, 0, stored_windows=stored or {}).result(60)
    assert taken is not None
    return taken


def restored(taken: Snapshot, keep: int, wrong: tuple[int, int, bytes] | None = None) -> Restored:
    """What a store gives back for the first `keep` tokens. `wrong`: window, index of its file, and other bytes."""
    stop, tokens = -(-keep // 256), taken.state.token_ids
    blobs = [data for _, data in (*taken.blocks, *([taken.tail] if taken.tail else []))][:stop]
    windows = []
    for each in taken.windows:
        first = first_touched_block(each.window, keep)
        files = [each.by_block[block] for block in range(first, stop)]
        if wrong is not None and wrong[0] == each.window:
            files[wrong[1]] = wrong[2]
        windows.append(RestoredWindow(each.window, first, tuple(files)))
    shareable = taken.state.shareable_tokens
    return Restored(tuple(blobs), tokens[: 256 * stop], keep, shareable, windows=tuple(windows))


def remembered(driver: Driver, length: int, reply: int = 5, seed: int = 0) -> tuple[AgentKey, Ended]:
    """An agent that remembers a prompt of `length` tokens and all of a reply."""
    for attempt in range(20):
        key = driver.key()
        ended = driver.turn(tokens_of(length, seed + 100 * attempt), key=key, max_tokens=reply)
        if len(ended.state.token_ids) == length + reply:  # random models often end inside a character
            return key, ended
    raise AssertionError("no memory of that length in 20 attempts")


@pytest.mark.long(2)
@pytest.mark.parametrize("name", NAMES)
def test_each_window_has_block_files_of_its_own(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    model = driver.engine.model
    key, ended = remembered(driver, 700, 30)
    taken, tokens = snapshot(driver, key), len(ended.state.token_ids)
    assert (
        [each.window for each in taken.windows]
        == list(windows_of(model.kv_identity))
        == list(model.window_bytes_per_token)
    )
    assert not taken.states
    assert ended.state.rewind_points == ()
    for each in taken.windows:
        assert each.held == (1,), "the first block has left the window"
        assert each.held[0] <= first_touched_block(each.window, tokens)
        assert each.tail is not None
        for identity, data in (*each.blocks, each.tail):
            header = parse_header(data, len(data))
            check_schema(header, model.kv_identity)
            assert header.identity == identity
            assert identity.window == each.window
    again = snapshot(driver, key, {each.window: {1} for each in taken.windows})
    for one, other in zip(taken.windows, again.windows, strict=True):
        assert (other.held, other.blocks, other.tail) == (one.held, (), one.tail)


@pytest.mark.long(4)
@pytest.mark.parametrize("name", one_of(NAMES, 1))
def test_what_a_window_saw_at_the_prompts_edge_is_stored_behind_a_long_reply(
    name: str, family: Callable[[str], Driver]
) -> None:
    """With a gap before the last blocks. So the memory can go back to before the reply, and others share its prompt."""
    driver = family(name)
    key, ended = remembered(driver, 760, 140)
    taken, kept = snapshot(driver, key), 512  # the last border of a block in the prompt
    edge = range(first_touched_block(taken.windows[0].window, kept), kept // 256)
    end = range(first_touched_block(taken.windows[0].window, 900), 3)
    assert [each.held for each in taken.windows] == [(*edge, *end)]
    assert edge.stop < end.start
    prompt = (*ended.state.token_ids[:kept], *tokens_of(20))
    cold, back = driver.turn(prompt, max_tokens=12), restored(taken, kept)
    found = driver.turn(prompt, back, driver.key(), max_tokens=12)
    assert (found.cached_tokens, found.state.token_ids) == (kept, cold.state.token_ids)


@pytest.mark.long(3)
@pytest.mark.parametrize("name", one_of(NAMES, 0))
def test_a_retry_with_a_long_reply_can_be_retried_from_where_it_began(
    name: str, family: Callable[[str], Driver]
) -> None:
    """It began behind the last edge of its prompt, and where no turn had ended before."""
    driver = family(name)
    key, ended = remembered(driver, 300, 20)
    start = ended.state.token_ids[:310]
    told = (*start, *tokens_of(20, seed=3))
    stayed = driver.turn(told, Hot(310), driver.fork(key), max_tokens=12)
    for seed, reply in ((4, 290), (3, 12)):
        last = driver.turn((*start, *tokens_of(20, seed=seed)), Hot(310), key, max_tokens=reply)
        assert last.cached_tokens == 310
    assert last.state.token_ids == stayed.state.token_ids


@pytest.mark.long(4)
@pytest.mark.parametrize(("name", "length"), pairs(NAMES, [60, 251, 600]))
def test_a_memory_goes_back_to_wherever_its_windows_still_are(
    name: str, length: int, family: Callable[[str], Driver]
) -> None:
    """Into the reply, to its beginning, and to the border before it: hot or from files, as if it had never left."""
    driver = family(name)
    key, ended = remembered(driver, length, 20)
    taken, end = snapshot(driver, key), length + 20
    assert len(ended.state.token_ids) == end
    border = length // 256 * 256
    for keep in (end, end - 7, length, *([border] if border else [])):
        prompt = (*ended.state.token_ids[:keep], *tokens_of(20, seed=keep))
        stayed = driver.turn(prompt, Hot(keep), driver.fork(key), max_tokens=12)
        came_back = driver.turn(prompt, restored(taken, keep), driver.key(), max_tokens=12)
        assert (stayed.cached_tokens, came_back.cached_tokens) == (keep, keep)
        assert came_back.state.token_ids == stayed.state.token_ids
        assert came_back.state == stayed.state


@pytest.mark.parametrize("name", first_and_in_turn(list(NAMES), seconds=1))
def test_a_memory_that_came_back_is_stored_again_to_the_bit(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    key, ended = remembered(driver, 600, 20)
    taken, other = snapshot(driver, key), driver.key()
    warmed = driver.turn(ended.state.token_ids, restored(taken, 620), other, max_tokens=0)
    assert (warmed.cached_tokens, warmed.state.token_ids) == (620, ended.state.token_ids)
    back = snapshot(driver, other)
    assert (back.blocks, back.tail) == (taken.blocks, taken.tail)
    for one, two in zip(taken.windows, back.windows, strict=True):
        assert two.held == tuple(range(first_touched_block(one.window, 620), 2))
        assert two.blocks == tuple(each for each in one.blocks if each[0].start // 256 in two.held)
        assert two.tail == one.tail


@pytest.mark.long(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_shared_prefix_gives_what_a_cold_run_gives(name: str, family: Callable[[str], Driver]) -> None:
    """In the engine, from another agent's pages; and from files, as FindPrefix finds them."""
    driver = family(name)
    common = tokens_of(600, seed=41)
    prompts = [(*common, *tokens_of(30 + n, seed=50 + n)) for n in range(3)]
    cold = [driver.turn(prompt, max_tokens=16) for prompt in prompts]
    first = driver.key()
    alone = driver.turn(prompts[0], key=first, namespace="tests", max_tokens=16)
    assert alone.state.token_ids == cold[0].state.token_ids
    taken = snapshot(driver, first)
    assert taken.state.shareable_tokens == 512
    second = driver.turn(prompts[1], key=driver.key(), namespace="tests", max_tokens=16)
    assert second.cached_tokens == 512
    assert second.state.token_ids == cold[1].state.token_ids
    found = restored(taken, 512)
    blobs = found.blobs[:2]
    windows = tuple(
        RestoredWindow(each.window, each.first_block, each.blobs[: 2 - each.first_block]) for each in found.windows
    )
    third = driver.turn(
        prompts[2], Restored(blobs, TokenIds(common[:512]), 512, 512, windows=windows), driver.key(), max_tokens=16
    )
    assert third.cached_tokens == 512
    assert third.state.token_ids == cold[2].state.token_ids


@pytest.mark.long(5)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_prompt_shorter_than_a_cell_is_shared_up_to_its_last_border(name: str, tmp_path: Path) -> None:
    """As on a GPU, where a cell is many blocks: a pass over all of the prompt would keep only what its end touches."""
    with cells_of(8):
        engine = Engine.open(write_family(tmp_path, ALL[name], seed=1), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    driver = Driver(engine)
    try:
        common = tokens_of(1030, seed=43)
        prompts = [(*common, *tokens_of(n, seed=50 + n)) for n in (100, 130)]
        cold = driver.turn(prompts[1], max_tokens=16)
        driver.turn(prompts[0], key=driver.key(), namespace="tests", max_tokens=16)
        second = driver.turn(prompts[1], key=driver.key(), namespace="tests", max_tokens=16)
        assert second.cached_tokens == 1024
        assert second.state.token_ids == cold.state.token_ids
    finally:
        engine.close()


@pytest.mark.long(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_file_of_a_window_is_data_loss_that_names_it(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    key, ended = remembered(driver, 600, 20)
    taken, other = snapshot(driver, key), snapshot(driver, remembered(driver, 600, 20, seed=50)[0])
    prompt = (*ended.state.token_ids, *tokens_of(9))
    [each] = taken.windows
    files = [bytes(data) for _, data in (*each.blocks, each.tail)]  # type: ignore[misc]
    [theirs] = other.windows
    assert theirs.tail is not None
    assert taken.tail is not None
    wrong = {
        "of other tokens": theirs.tail[1],
        "of the layers that keep all": taken.tail[1],
        "cut short": files[-1][:-8],
        "nothing": b"",
        "of other weights": files[-1].replace(driver.engine.model.kv_identity_hash.encode(), b"0" * 64),
        "no numbers": files[-1][:-2] + b"\x00\x7e" if name == "gemma3" else files[-1][:-2] + b"\xc0\x7f",
    }
    last = 620 // 256 - first_touched_block(each.window, 620)
    for what, data in wrong.items():
        with pytest.raises(DataLoss) as refused:
            driver.turn(prompt, restored(taken, 620, (each.window, last, data)), driver.key())
        assert refused.value.metadata == {"blob": str(last), "window": str(each.window)}, what
    good = restored(taken, 620)
    late = tuple(RestoredWindow(w.window, w.first_block + 1, w.blobs[1:]) for w in good.windows)
    for windows in ((), late):
        with pytest.raises(FailedPrecondition) as refused_plan:
            driver.turn(prompt, Restored(good.blobs, good.token_ids, 620, 0, windows=windows), driver.key())
        assert refused_plan.value.reason == "STATE_MISSING"
    assert driver.turn(prompt, good, driver.key(), max_tokens=2).cached_tokens == 620


@pytest.mark.parametrize("name", NAMES)
def test_files_that_were_restored_are_not_held_for_the_whole_turn(name: str, family: Callable[[str], Driver]) -> None:
    driver = family(name)
    key, ended = remembered(driver, 600, 20)
    plan = restored(snapshot(driver, key), 620)
    held: list[object] = []

    def look() -> None:
        [sequence] = driver.engine._worker._scheduler.turns
        held.append(sequence.plan.reuse)

    listener = Listener().at(Started, 1, look)
    prompt = (*ended.state.token_ids, *tokens_of(9))
    driver.submit(prompt, plan, driver.key(), listener=listener, max_tokens=2).end()
    assert plan.blobs
    assert plan.windows
    assert [(reuse.blobs, reuse.windows) for reuse in held if isinstance(reuse, Restored)] == [((), ())]


@pytest.mark.long(2)
@pytest.mark.parametrize("name", one_of(NAMES, 0))
def test_many_agents_with_one_system_prompt_hold_it_once(name: str, family: Callable[[str], Driver]) -> None:
    """Each of them has pages of its own for what it adds, and no more: the common blocks are counted once."""
    driver = family(name)
    worker = driver.engine._worker
    common, agents = tokens_of(sampled(1024, of=3840), seed=7), sampled(40, of=200)

    def used_pages() -> int:
        return driver.engine._thread.post(lambda worker: worker.memories.ledger.used_pages).result(60)

    before, shared = used_pages(), 0
    for number in range(agents):
        key = AgentKey("many", f"{name} {number}")
        ended = driver.turn((*common, *tokens_of(30, seed=100 + number)), key=key, namespace="many", max_tokens=2)
        shared += ended.cached_tokens == len(common)
    per_sequence = worker._pool.pages_for(len(common) + 32)
    # Of its own an agent has the block that it writes, in each group, and where a window's first blocks differ theirs.
    own = 2 * len(worker._pool.groups)
    assert shared == agents - 1
    assert used_pages() - before <= per_sequence + agents * own
    assert used_pages() - before < agents * per_sequence / 2


@pytest.mark.long(2)
@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("window", [512, 1024])
def test_a_turns_pages_stay_within_its_reservation_when_its_source_is_gone(window: int, *, generates: bool) -> None:
    """It inherits no rewind point that its memory will not keep: those pages would be its own then. Wherever it ends:
    what is promised to a long turn would hide them.
    """
    pool = pool_of([full(), windowed(window)], four_bits())
    source = SequenceKV(pool)
    for _ in range(3):
        fed(source, [256] * 8 + [100])  # a window that ends within a block touches one more
        source.mark()
    sequence = cast("Sequence", SimpleNamespace(plan=SimpleNamespace(generates=generates)))
    forked = forked_for(sequence, Reuse(source, source.length, (), 0))
    source.release()
    assert forked.kept_pages <= pool.pages_for(forked.length)
    for step, count in enumerate([256] * 16 + [1] * 200):
        fed(forked, [count])
        if step == 8:
            mark(forked)
        assert forked.kept_pages <= pool.pages_for(forked.length)


@pytest.mark.parametrize("window", [512, 1024])
def test_no_more_is_taken_than_was_promised_when_turns_that_share_a_window_go_on(window: int) -> None:
    """Each leaves the pages that it shares behind, and takes others: both were promised theirs."""
    pool = pool_of([full(), windowed(window)], four_bits())
    one = fed(SequenceKV(pool), [256] * 6 + [30])
    turns = [one, one.fork(1536), one.fork()]
    most = pool.pages_for(6 * 256 + 30 + 8 * 256)

    def claimed() -> int:
        return pool.allocator.used + sum(most - turn.kept_pages for turn in turns)

    bound = claimed()
    for step in range(24):
        fed(turns[step % 3], [200])
        assert claimed() <= bound
        assert all(turn.kept_pages <= most for turn in turns)

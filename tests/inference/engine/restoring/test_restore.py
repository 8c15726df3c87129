"""A restored sequence goes on as if it had never left: same greedy tokens, whatever its length and wherever it is cut.

Computed in float32, where it must hold to the token.
"""

import random
import threading
from dataclasses import replace

import pytest
from kvasir.errors import DataLoss

from inference_svc.engine.api import AgentKey, Hot, Restored, Tokens
from inference_svc.engine.files.incoming import Incoming
from inference_svc.text.token_ids import TokenIds
from tests.inference.engine.driving import GENERATED, Driver, Listener, tokens_of
from tests.made_models.sampling import first_and_in_turn

AROUND_EDGES = [*range(250, 263), *range(506, 519), *range(1018, 1031)]
SAMPLE = [255, 256, 257, 512, 700, 253, 254, 258, 259, 511, 513, 1023, 1024, 1025]
RANDOM_LENGTHS = [random.Random(7).randrange(5, 2000) for _ in range(40)]


def goes_on_equally(
    driver: Driver, key: AgentKey, keep: int, suffix: tuple[int, ...], generated: int = GENERATED
) -> None:
    """Continue the memory cut to `keep`, then with `suffix`: once from hot memory, once from tensor files."""
    hot = driver.engine.memories.get(key)
    assert hot is not None
    prompt, computed = (*hot.state.token_ids[:keep], *suffix), len(hot.state.computed.token_ids)
    restored = driver.turn(prompt, driver.restored(key, keep), driver.key(), max_tokens=generated)
    stayed = driver.turn(prompt, Hot(keep), key, max_tokens=generated)
    assert restored.cached_tokens == stayed.cached_tokens == min(keep, computed, len(prompt) - 1)
    assert restored.state.token_ids == stayed.state.token_ids
    assert restored.state.shareable_tokens == stayed.state.shareable_tokens


@pytest.mark.long(5)
def test_a_reply_depends_on_its_whole_context(driver: Driver) -> None:
    """Or else the tests below prove nothing: one changed token, wherever it is, nearly always changes the reply."""
    prompt = tokens_of(600)
    reply = driver.reply(driver.turn(prompt))
    places = random.Random(1).sample(range(600), 20)
    changed = [(*prompt[:place], (prompt[place] + 1) % 1000 + 3, *prompt[place + 1 :]) for place in places]
    assert sum(driver.reply(driver.turn(other)) != reply for other in changed) >= 18
    assert len(set(reply)) > GENERATED / 2


@pytest.mark.parametrize("length", first_and_in_turn(SAMPLE, seconds=5, first=5))
def test_a_restored_sequence_goes_on_as_if_it_had_never_left(driver: Driver, length: int) -> None:
    key, state = driver.remember(length, seed=length)
    goes_on_equally(driver, key, len(state.token_ids), tokens_of(17, seed=1))


@pytest.mark.campaign
@pytest.mark.parametrize("length", [*AROUND_EDGES, *RANDOM_LENGTHS])
@pytest.mark.parametrize("suffix", [1, 40, 300])
def test_every_length_goes_on_as_if_it_had_never_left(driver: Driver, length: int, suffix: int) -> None:
    key, state = driver.remember(length, seed=length)
    goes_on_equally(driver, key, len(state.token_ids), tokens_of(suffix, seed=1), generated=64)


@pytest.mark.long(4)
@pytest.mark.parametrize(
    ("place", "keep"),
    [
        ("inside a block", 300),
        ("at a block's edge", 512),
        ("just before an edge", 511),
        ("just behind an edge", 513),
        ("in the tail", 530),
        ("among the generated tokens", 599),
        ("at the very beginning", 1),
    ],
)
def test_a_diverging_turn_goes_on_as_if_the_sequence_had_never_left(driver: Driver, place: str, keep: int) -> None:
    key, _ = driver.remember(602, seed=keep, generated=6)
    goes_on_equally(driver, key, keep, tokens_of(30, seed=2))


def test_an_exact_repetition_computes_the_last_token_only(driver: Driver) -> None:
    key, state = driver.remember(520)
    again = driver.turn(state.token_ids, driver.restored(key), driver.key())
    stayed = driver.turn(state.token_ids, Hot(520), key)
    assert again.cached_tokens == stayed.cached_tokens == 519
    assert again.state.token_ids == stayed.state.token_ids


def test_a_prompt_of_one_token_reuses_nothing(driver: Driver) -> None:
    key, state = driver.remember(20)
    prompt = state.token_ids[:1]
    restored = driver.turn(prompt, driver.restored(key, 1), driver.key())
    stayed = driver.turn(prompt, Hot(1), key)
    assert restored.cached_tokens == stayed.cached_tokens == 0
    assert restored.state == stayed.state == driver.turn(prompt, key=driver.key()).state


@pytest.mark.long(3)
def test_a_life_of_many_turns_is_the_same_with_a_restart_between_any_two(driver: Driver) -> None:
    """Extend, diverge, repeat, extend: one agent stays hot, the other is restored before every turn."""
    stays, returns = driver.key(), driver.key()
    prompt = tokens_of(280, seed=3)
    first = driver.turn(prompt, key=stays, max_tokens=20), driver.turn(prompt, key=returns, max_tokens=20)
    assert first[0].state == first[1].state
    for keep, suffix in ((300, 200), (256, 10), (250, 30), (299, 500), (800, 1), (512, 90)):
        memory = driver.engine.memories.get(stays)
        assert memory is not None
        keep = min(keep, len(memory.state.token_ids))
        prompt = (*memory.state.token_ids[:keep], *tokens_of(suffix, seed=suffix))
        stayed = driver.turn(prompt, Hot(keep), stays, max_tokens=20)
        returned = driver.turn(prompt, driver.restored(returns, keep), returns, max_tokens=20)
        assert returned.state == stayed.state
        assert driver.files(returns) == driver.files(stays)


def test_files_of_a_restored_memory_are_the_files_it_came_from(driver: Driver) -> None:
    key, state = driver.remember(700)
    restored = driver.restored(key)
    other = driver.key()
    after = driver.turn((*state.token_ids, *tokens_of(5)), restored, other, max_tokens=1)
    files = driver.files(other)
    assert len(after.state.token_ids) == 706
    assert files[:2] == restored.blobs[:2]


def test_a_fork_goes_its_own_way_and_leaves_its_source_alone(driver: Driver) -> None:
    key, state = driver.remember(400)
    files = driver.files(key)
    fork = driver.fork(key)
    forked = driver.turn((*state.token_ids, *tokens_of(50, seed=8)), Hot(400), fork)
    assert driver.files(key) == files, "the fork wrote through to its source"
    goes_on_equally(driver, key, 400, tokens_of(50, seed=9))
    fork_files = driver.files(fork)
    driver.turn((*state.token_ids[:100], *tokens_of(20, seed=10)), Hot(100), key)
    assert driver.files(fork) == fork_files, "the source wrote through to its fork"
    alone = driver.turn((*state.token_ids, *tokens_of(50, seed=8)), driver.restored(fork, 400), driver.key())
    assert driver.reply(alone) == driver.reply(forked)


def test_a_fork_takes_no_tag_along(driver: Driver) -> None:
    key, _ = driver.remember(20)
    driver.engine.memories.tag(key, ["one agent's, and it changes"])
    hot = driver.engine.memories.get(driver.fork(key))
    assert hot is not None
    assert hot.tag is None


@pytest.mark.cells_of_a_block
@pytest.mark.parametrize("length", [600, 512])
def test_blocks_prefilled_on_the_grid_are_what_a_longer_prompt_computes(driver: Driver, length: int) -> None:
    """What makes a block shareable: another agent with the same beginning would have computed these very bytes."""
    short, long = driver.key(), driver.key()
    prompt = tokens_of(1100, seed=4)
    one = driver.turn(prompt[:length], key=short, max_tokens=1)
    two = driver.turn(prompt, key=long, max_tokens=1)
    assert (one.state.shareable_tokens, two.state.shareable_tokens) == (512, 1024)
    assert driver.files(short)[:2] == driver.files(long)[:2]


@pytest.mark.long(2)
@pytest.mark.cells_of_a_block
@pytest.mark.parametrize(
    ("keep", "suffix", "shareable"),
    [(603, 500, 512), (512, 300, 768), (300, 700, 256), (256, 256, 512), (100, 200, 0)],
)
def test_shareable_tokens_stop_at_the_first_that_was_not_prefilled_on_the_grid(
    driver: Driver, keep: int, suffix: int, shareable: int
) -> None:
    key, state = driver.remember(603, generated=3)
    after = driver.turn((*state.token_ids[:keep], *tokens_of(suffix)), Hot(keep), key, max_tokens=1)
    assert after.state.shareable_tokens == shareable


@pytest.mark.cells_of_a_block
def test_blocks_shared_by_another_agent_give_the_reply_of_a_cold_run(driver: Driver) -> None:
    prompt = tokens_of(900, seed=6)
    giver = driver.key()
    driver.turn(prompt[:800], key=giver, max_tokens=1)
    shared = driver.restored(giver)
    blocks = Restored(shared.blobs[:3], TokenIds(prompt[:768]), 768, 768)
    taken = driver.turn(prompt, blocks, driver.key())
    cold = driver.turn(prompt, key=driver.key())
    assert taken.cached_tokens == 768
    assert taken.state == cold.state


@pytest.mark.long(1)
def test_a_plan_that_restores_less_than_anothers_memory_has_begins_with_that_memory(driver: Driver) -> None:
    prompt = tokens_of(900, seed=6)
    giver = driver.key()
    driver.turn(prompt[:800], key=giver, namespace="tests", max_tokens=1)
    block = Restored(driver.restored(giver).blobs[:1], TokenIds(prompt[:256]), 256, 256)
    taken = driver.turn(prompt, block, driver.key(), namespace="tests")
    cold = driver.turn(prompt, key=driver.key())
    assert taken.cached_tokens == 768
    assert taken.state == cold.state


@pytest.mark.long(2)
@pytest.mark.cells_of_a_block
@pytest.mark.parametrize("beside", [768, 1_024])
def test_a_restored_memory_shares_the_pages_that_another_memory_has_of_it(driver: Driver, beside: int) -> None:
    """Its other pages come from its files, those of generated tokens too; together they are what its files are."""
    prompt, giver, other = tokens_of(1_060, seed=beside), driver.key(), driver.key()
    remembered = driver.turn(prompt, key=giver, max_tokens=40).state.token_ids
    plan = driver.restored(giver)
    assert plan.shareable_tokens == 1_024
    driver.engine.memories.drop(giver).result(60)
    driver.turn((*prompt[:beside], *tokens_of(60, seed=9)), key=other, namespace="tests", max_tokens=2)
    own: list[int] = []
    sharer, loner = driver.key(), driver.key()
    following = (*remembered, *tokens_of(30, seed=8))
    decoding = Listener().at(Tokens, 1, lambda: own.append(pages_of_its_own(driver, sharer)))
    shared = driver.turn(following, plan, sharer, namespace="tests", listener=decoding)
    alone = driver.turn(following, plan, loner)
    assert shared.cached_tokens == alone.cached_tokens == plan.keep_tokens
    assert shared.state == alone.state
    assert driver.files(sharer) == driver.files(loner)
    assert own == [len(plan.blobs) - beside // 256]


@pytest.mark.long(2)
@pytest.mark.cells_of_a_block
def test_a_restored_memory_shares_no_page_in_which_it_has_generated_rows(driver: Driver) -> None:
    """What it generated may differ in bits from what another computed of the same tokens as a prompt."""
    key, state = driver.remember(600, generated=150)
    plan, sharer, own = driver.restored(key), driver.key(), list[int]()
    driver.engine.memories.drop(key).result(60)
    driver.turn((*state.token_ids, *tokens_of(60, seed=9)), key=driver.key(), namespace="tests", max_tokens=2)
    decoding = Listener().at(Tokens, 1, lambda: own.append(pages_of_its_own(driver, sharer)))
    driver.turn((*state.token_ids, *tokens_of(30, seed=8)), plan, sharer, namespace="tests", listener=decoding)
    assert own == [len(plan.blobs) - 1]


@pytest.mark.cells_of_a_block
def test_a_damaged_file_behind_a_shared_prefix_is_named_and_leaves_no_page(driver: Driver) -> None:
    prompt, giver = tokens_of(1_060, seed=61), driver.key()
    following = (*driver.turn(prompt, key=giver, max_tokens=2).state.token_ids, 9)
    plan = driver.restored(giver)
    infinite = plan.blobs[3][:-2] + b"\x00\x7c"  # the last bias of the last layer
    damaged = replace(plan, blobs=(*plan.blobs[:3], infinite, *plan.blobs[4:]))
    driver.engine.memories.drop(giver).result(60)
    driver.turn((*prompt[:512], 7), key=driver.key(), namespace="tests", max_tokens=1)
    used = driver.engine._thread.post(lambda worker: worker.memories.ledger.used_pages).result(60)
    with pytest.raises(DataLoss) as caught:
        driver.turn(following, damaged, driver.key(), namespace="tests")
    assert caught.value.metadata["blob"] == "3"
    assert driver.engine._thread.post(lambda worker: worker.memories.ledger.used_pages).result(60) == used


@pytest.mark.long(4)
@pytest.mark.cells_of_a_block
@pytest.mark.parametrize(("came", "cached"), [(1, 768), (4, 1_024)])
def test_where_files_stop_coming_a_shared_prefix_stays(driver: Driver, came: int, cached: int) -> None:
    prompt, giver = tokens_of(1_300, seed=62 + came), driver.key()
    driver.turn(prompt, key=giver, max_tokens=1)
    plan = driver.restored(giver, len(prompt))
    driver.engine.memories.drop(giver).result(60)
    driver.turn((*prompt[:768], 7), key=driver.key(), namespace="tests", max_tokens=1)
    files = Incoming(len(plan.blobs))
    for data in plan.blobs[:came]:
        files.add(data)
    files.end()
    following = (*prompt, *tokens_of(30, seed=8))
    shared = driver.turn(following, replace(plan, blobs=(), incoming=files), driver.key(), namespace="tests")
    cold = driver.turn(following, key=driver.key())
    assert shared.cached_tokens == cached
    assert shared.state == cold.state


@pytest.mark.long(1)
@pytest.mark.cells_of_a_block
def test_a_reader_does_not_wait_for_files_that_a_shared_prefix_replaces(driver: Driver) -> None:
    """Those that came and those that come: else a long common prefix would end the reading before the rest."""
    prompt, giver = tokens_of(1_300, seed=71), driver.key()
    driver.turn(prompt, key=giver, max_tokens=1)
    plan = driver.restored(giver, len(prompt))
    driver.engine.memories.drop(giver).result(60)
    driver.turn((*prompt[:768], 7), key=driver.key(), namespace="tests", max_tokens=1)
    files, taken = Incoming(len(plan.blobs)), threading.Event()
    files.watch_taking(taken.set)
    files.add(plan.blobs[0])
    assert files.waiting_bytes == len(plan.blobs[0])
    following = (*prompt, *tokens_of(30, seed=8))
    listener = driver.submit(following, replace(plan, blobs=(), incoming=files), driver.key(), namespace="tests")
    assert taken.wait(20)
    for data in plan.blobs[1:3]:
        files.add(data)
    assert files.waiting_bytes == 0
    for data in plan.blobs[3:]:
        files.add(data)
    files.end()
    assert listener.end().cached_tokens == len(prompt)


def pages_of_its_own(driver: Driver, key: AgentKey) -> int:
    """Pages of the key's running turn that nobody else holds."""
    worker = driver.engine._worker
    [kv] = [turn.kv for turn in worker._turns if turn.plan.key == key and turn.kv is not None]
    return sum(worker._pool.allocator.holders(page) == 1 for page in kv.pages)

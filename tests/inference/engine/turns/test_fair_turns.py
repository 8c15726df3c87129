"""Two namespaces on one engine: neither's room nor rows keep the other waiting, and who sits out loses no bit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference_svc.engine.api import AgentKey, Ended, Prefilled, Priority, Started, Tokens
from tests.inference.engine.driving import Driver, Listener, driver_with_room_for, tokens_of

BUDGET_TOKENS = 2_304


@pytest.fixture
def small(model_dir: Path, tmp_path: Path) -> Iterator[Driver]:
    with driver_with_room_for(BUDGET_TOKENS, model_dir, tmp_path) as driver:
        yield driver


@pytest.mark.long(9)
@pytest.mark.batch_as_alone
def test_rows_that_sit_out_say_and_remember_to_the_bit_what_they_do_alone(driver: Driver) -> None:
    prompts = [tokens_of(length, 100 + length) for length in (3, 40, 120, 255, 256, 257, 300, 511, 513)]
    alone_keys, keys = [driver.key() for _ in prompts], [driver.key() for _ in prompts]
    alone = [driver.turn(prompt, key=key, max_tokens=70) for prompt, key in zip(prompts, alone_keys, strict=True)]
    batch, rows = driver.engine._worker._decoder.batch, list[int]()
    step = batch.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "step", lambda ids, counts: (rows.append(len(ids)), step(ids, counts))[1])
        person = Listener()
        others: list[Listener] = []

        def crowd() -> None:
            others.extend(
                driver.submit(prompt, key=key, namespace="a", max_tokens=70)
                for prompt, key in zip(prompts, keys, strict=True)
            )

        driver.submit(tokens_of(30, 7), namespace="b", listener=person.at(Tokens, 2, crowd), max_tokens=400)
        person.end()
        together = [listener.end() for listener in others]
    assert max(rows) <= driver.engine._worker._scheduler.rules.beside_others.rows + 1, "all of them decoded in one step"
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.state) == (other.text, other.state)
    assert [driver.files(key) for key in keys] == [driver.files(key) for key in alone_keys]


@pytest.mark.long(6)
def test_a_large_background_turn_that_waits_for_room_holds_up_no_other_namespace(small: Driver) -> None:
    """(FINDINGS M3) It had waited long enough to count as interactive, and all that came after it waited behind it."""
    scheduler = small.engine._worker._scheduler
    scheduler.rules = replace(scheduler.rules, ageing_s=0.01)
    large, person, order = Listener(), Listener(), list[str]()

    def ask_for_most() -> None:
        small.submit(tokens_of(1_800, 2), namespace="a", priority=Priority.BACKGROUND, listener=large, max_tokens=4)

    def ask_for_little() -> None:
        small.submit(tokens_of(8, 3), namespace="b", listener=person, max_tokens=4)

    running = Listener().at(Tokens, 5, ask_for_most).at(Tokens, 100, ask_for_little)
    running.at(Ended, 1, lambda: order.append("running"))
    person.at(Started, 1, lambda: order.append("person"))
    large.at(Started, 1, lambda: order.append("large"))
    small.submit(tokens_of(300, 1), namespace="a", listener=running, max_tokens=300)
    for listener in (running, person, large):
        listener.end()
    assert order == ["person", "running", "large"]


@pytest.mark.long(5)
def test_a_namespace_that_holds_nothing_finds_room_beside_a_crowd_that_cannot_be_preempted(small: Driver) -> None:
    small.turn(tokens_of(8, 1), namespace="b", max_tokens=2)
    person, begun = Listener(), list[int]()
    crowd = [Listener() for _ in range(12)]
    crowd[0].at(Tokens, 20, lambda: small.submit(tokens_of(8, 3), namespace="b", listener=person, max_tokens=4))
    person.at(Started, 1, lambda: begun.append(sum(listener.count(Ended) for listener in crowd)))
    for seed, listener in enumerate(crowd):
        small.submit(tokens_of(200, seed), namespace="a", listener=listener, max_tokens=56)
    for listener in (*crowd, person):
        listener.end()
    assert begun == [0]


@pytest.mark.long(2)
@pytest.mark.cpu_only("a GPU's cells take as long as a few steps")
@pytest.mark.batch_as_alone
def test_the_end_of_a_turn_and_the_copy_of_its_memory_wait_for_no_cell_of_another(driver: Driver) -> None:
    """Nor does it matter to a bit of either that the last step was taken before the cell."""
    short, long = tokens_of(20, 1), tokens_of(560, 2)
    for count in (1, 2, 5):
        keys = [driver.key() for _ in range(4)]
        alone = [driver.turn(short, key=keys[0], max_tokens=count), driver.turn(long, key=keys[1], max_tokens=1)]
        ending, other, computed, unread = Listener(), Listener(), list[int](), list[bool]()

        def note(_: object = None, computed: list[int] = computed) -> None:
            computed.append(driver.engine.computed_tokens)

        def ask(key: AgentKey = keys[2], note: Callable[[object], None] = note) -> None:
            driver.engine.memories.snapshot(key, 0).add_done_callback(note)

        def begin(key: AgentKey = keys[2], listener: Listener = ending, most: int = count) -> None:
            driver.submit(short, key=key, listener=listener, namespace="b", max_tokens=most)

        def look(_: object = None, unread: list[bool] = unread) -> None:
            unread.append(driver.engine._worker._decoder.is_ahead)

        for cell in range(3, 8):
            other.at(Prefilled, cell, look)
        ending.at(Tokens, count, note).at(Ended, 1, ask)
        driver.submit(long, key=keys[3], listener=other.at(Prefilled, 2, begin), namespace="a", max_tokens=1)
        together = [ending.end(), other.end()]
        last_token, copied = computed
        assert copied - last_token <= 1, "its last token's KV, and no cell"
        assert unread, "cells were computed beside it"
        assert not any(unread), "a token waited for a cell to be read"
        assert [each.state for each in together] == [each.state for each in alone]
        assert [driver.files(key) for key in keys[2:]] == [driver.files(key) for key in keys[:2]]

"""Two namespaces on one engine: neither's room nor rows keep the other waiting, and who sits out loses no bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference_svc.engine.api import Ended, Priority, Started, Tokens
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

"""The prefix that a cancelled turn had prefilled serves any turn that begins alike. It goes before any memory."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.errors import Cancelled

from inference_svc.engine import api
from inference_svc.engine.api import (
    AgentKey,
    Event,
    Hot,
    Preempted,
    Prefilled,
    Priority,
    Started,
    Tokens,
    TurnPlan,
)
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.agent_memory import AgentMemory, StoredFiles
from inference_svc.memory.replaying import runs_of_turn
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.turns.asleep.sleeping import Sleeper
from inference_svc.turns.progress import Progress, TurnTiming
from tests.inference.engine.driving import Driver, Listener, driver_with_room_for, tokens_of
from tests.inference.turns.test_turn_parts import memory, request

pytestmark = pytest.mark.cells_of_a_block


def cancelled(driver: Driver, prompt: tuple[int, ...], listener: Listener, **settings: object) -> None:
    with contextlib.suppress(Cancelled):
        driver.turn(prompt, listener=listener, namespace="tests", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Prefilled, Tokens])
@pytest.mark.parametrize("is_an_agents", [True, False])
def test_a_retry_goes_on_from_the_whole_blocks_that_a_cancelled_turn_had(
    driver: Driver, kind: type[Prefilled | Tokens], is_an_agents: bool
) -> None:
    prompt, key = tokens_of(600, 60 + is_an_agents), driver.key() if is_an_agents else None
    alone = driver.reply(driver.turn(prompt))
    cancelled(driver, prompt, Listener().cancel_at(kind, 1), key=key)
    assert key is None or driver.engine.memories.get(key) is None
    other = driver.turn(prompt, namespace="others")
    assert (other.cached_tokens, driver.reply(other)) == (0, alone)
    again = driver.turn(prompt, key=key, namespace="tests")
    assert again.cached_tokens in ((256, 512) if kind is Prefilled else (512,))  # a cell more may run meanwhile
    assert driver.reply(again) == alone


def test_each_retry_comes_further_until_the_prompt_is_whole(driver: Driver) -> None:
    prompt, key = tokens_of(900, 62), driver.key()
    begun = []
    for _ in range(3):
        listener = Listener().cancel_at(Prefilled, 1)
        cancelled(driver, prompt, listener, key=key)
        begun += [event.cached_tokens for event in listener.events if isinstance(event, Started)]
    assert begun[0] == 0 < begun[1] <= begun[2]
    assert driver.turn(prompt, key=key, namespace="tests", max_tokens=1).cached_tokens == 768
    assert driver.engine.memories.drop(key).result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0, (
        "it went with the agent's next memory"
    )


def test_a_cancelled_prefix_makes_room_before_any_memory(model_dir: Path, tmp_path: Path) -> None:
    with driver_with_room_for(1_280, model_dir, tmp_path) as small:
        key, _ = small.remember(300, 65)
        prompt = tokens_of(600, 66)
        cancelled(small, prompt, Listener().cancel_at(Prefilled, 2))
        used = small.engine.memory_used_bytes
        assert small.turn(tokens_of(600, 67), namespace="others", max_tokens=1).completion_tokens == 1
        assert small.engine.memories.get(key) is not None
        assert small.engine.memory_used_bytes < used
        assert small.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0


def test_an_idle_engine_gives_back_cancelled_prefixes(driver: Driver) -> None:
    prompt = tokens_of(300, 68)
    cancelled(driver, prompt, Listener().cancel_at(Prefilled, 1))
    driver.engine.give_back(0).result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0


def test_prompts_without_an_agent_take_no_place_from_each_other(driver: Driver) -> None:
    prompts = [tokens_of(300, seed) for seed in (69, 70)]
    for prompt in prompts:
        cancelled(driver, prompt, Listener().cancel_at(Prefilled, 1))
    ends = [driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens for prompt in prompts]
    assert ends == [256, 256]


def test_a_cancelled_prefix_goes_with_its_agent_and_leaves_a_memory(driver: Driver) -> None:
    (key, _), other, prompt = driver.remember(300, 71), driver.key(), tokens_of(300, 72)
    for each in (key, other):
        cancelled(driver, prompt, Listener().cancel_at(Prefilled, 1), key=each)
    driver.engine.memories.drop_begun(key).result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 256, "it is the last agent's"
    driver.engine.memories.drop_begun(other).result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0
    assert driver.engine.memories.get(key) is not None


@pytest.mark.parametrize("has_agent", [False, True])
def test_a_namespace_gives_up_all_that_its_cancelled_turns_prefilled(driver: Driver, has_agent: bool) -> None:
    prompt, key = tokens_of(300, 82 + has_agent), driver.key() if has_agent else None
    cancelled(driver, prompt, Listener().cancel_at(Prefilled, 1), key=key)
    driver.engine.memories.drop_begun("others").result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 256
    driver.engine.memories.drop_begun("tests").result(60)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("is_of_agent", [False, True])
def test_nor_does_a_turn_leave_it_that_is_cancelled_afterwards(
    driver: Driver, is_of_agent: bool, is_remembered: bool
) -> None:
    prompt, key = tokens_of(600, 84 + 2 * is_of_agent + is_remembered), driver.key()
    listener = Listener().at(Prefilled, 1, lambda: driver.engine.memories.drop_begun(key if is_of_agent else "tests"))
    cancelled(driver, prompt, listener.cancel_at(Prefilled, 2), key=key, is_remembered=is_remembered)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 0


@pytest.mark.parametrize("is_retry", [False, True])
def test_a_retry_in_the_background_gives_its_room_to_a_person(model_dir: Path, tmp_path: Path, is_retry: bool) -> None:
    """The prefix that it began with goes too."""
    with driver_with_room_for(1_700, model_dir, tmp_path) as small:
        prompt, given_up = tokens_of(700, 73), list[Listener]()
        if is_retry:
            cancelled(small, prompt, Listener().cancel_at(Prefilled, 2))
        listener = Listener().cancel_at(Preempted, 1)
        listener.at(
            Tokens, 2, lambda: given_up.append(small.submit(tokens_of(1_300, 74), namespace="tests", max_tokens=1))
        )
        how = {"priority": Priority.BACKGROUND, "can_be_preempted": True, "max_tokens": 60}
        cancelled(small, prompt, listener, **how)
        assert given_up[0].end().completion_tokens == 1
        assert listener.count(Preempted) == 1


async def woken(driver: Driver, key: AgentKey, asleep: AgentMemory, cancelled_step: int = 0) -> list[int]:
    """How many tokens each step of a wake began with. One may be cancelled behind its first cell."""
    begun, steps = list[int](), 0

    def submit(plan: TurnPlan, listener: api.Listener) -> TurnHandle:
        nonlocal steps
        steps += 1
        ends_it = steps == cancelled_step

        def heard(events: list[Event]) -> None:
            begun.extend(event.cached_tokens for event in events if isinstance(event, Started))
            if ends_it and any(isinstance(event, Prefilled) for event in events):
                waking.get_loop().call_soon_threadsafe(waking.cancel)
                handle.cancel()
            listener(events)

        handle = driver.engine.submit(plan, heard)
        return handle

    nothing: Any = None
    parts: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit, memories=driver.engine.memories))
    turn = Progress(request(namespace=key.namespace), nothing, TurnTiming(0.0), NamespaceCounters())
    waking = asyncio.create_task(Sleeper(parts)._computed(turn, key, asleep, borrows=True))
    with contextlib.suppress(asyncio.CancelledError, Cancelled):
        await waking
    return begun


@pytest.mark.parametrize("cancelled_step", [1, 2])
def test_a_wake_that_a_caller_ended_goes_on_from_its_first_prompt(driver: Driver, cancelled_step: int) -> None:
    key, prompt = driver.key(), tokens_of(520, 76 + cancelled_step)
    first = driver.turn(prompt, key=key, max_tokens=3)
    known = first.state.token_ids
    second = driver.turn((*known, *tokens_of(260, 76)), Hot(len(known)), key, max_tokens=3)
    runs = runs_of_turn((), 0, len(prompt), first.state.decoded_to)
    runs = runs_of_turn(runs, second.cached_tokens, second.prompt_tokens, second.state.decoded_to)
    text = "." * sum(second.state.token_chars)
    transcript = RememberedText(text, second.state.token_ids, second.state.token_chars)
    asleep = replace(memory(), transcript=transcript, files=StoredFiles(runs=runs, pending=second.state.pending))
    files = driver.files(key)
    driver.engine.memories.drop(key).result(60)
    assert asyncio.run(woken(driver, key, asleep, cancelled_step))[0] == 0
    assert not driver.engine.memories.drop(key).result(60), "half of a memory is none"
    assert asyncio.run(woken(driver, key, asleep))[0] >= (256 if cancelled_step == 1 else 512)
    assert driver.files(key) == files
    driver.engine.memories.drop(key).result(60)
    assert asyncio.run(woken(driver, key, asleep))[0] == 0, "the prefix went with the memory that followed"


@pytest.fixture
def talked(driver: Driver) -> tuple[AgentKey, AgentKey, tuple[int, ...]]:
    """An agent, its twin, and what both remember."""
    key, state = driver.remember(400, 90)
    return key, driver.fork(key), tuple(state.token_ids)


@pytest.mark.parametrize("kind", [Prefilled, Tokens])
@pytest.mark.parametrize("same_tokens", [600, 300])
def test_a_retry_behind_a_memory_goes_on_where_the_cancelled_turn_was(
    driver: Driver, talked: tuple[AgentKey, AgentKey, tuple[int, ...]], kind: type[Prefilled | Tokens], same_tokens: int
) -> None:
    """As far as its prompt is the same, with the bytes of a turn that was never cancelled. Without drafts: the second
    turn would try the first one's reply, and a GPU's sums depend on how many rows a step has.
    """
    key, twin, known = talked
    said, otherwise = tokens_of(600, 91), tokens_of(300, 92)
    cancelled(driver, (*known, *said), Listener().cancel_at(kind, 1), reuse=Hot(400), key=key)
    prompt = (*known, *said[:same_tokens], *otherwise[: 600 - same_tokens])
    again, straight = (driver.turn(prompt, Hot(400), each, namespace="tests", most_drafts=0) for each in (key, twin))
    most = 512 if same_tokens == 300 else 768
    assert again.cached_tokens in ((512, most) if kind is Prefilled else (most,))  # a cell more may run meanwhile
    assert straight.cached_tokens == 399
    assert driver.reply(again) == driver.reply(straight)
    assert again.state == straight.state
    assert driver.files(key) == driver.files(twin)


def test_each_retry_behind_a_memory_comes_further(
    driver: Driver, talked: tuple[AgentKey, AgentKey, tuple[int, ...]]
) -> None:
    key, twin, known = talked
    prompt, begun = (*known, *tokens_of(900, 93)), []
    for _ in range(3):
        listener = Listener().cancel_at(Prefilled, 1)
        cancelled(driver, prompt, listener, reuse=Hot(400), key=key)
        begun += [event.cached_tokens for event in listener.events if isinstance(event, Started)]
    assert begun[0] == 399 < begun[1] < begun[2]
    other = driver.turn(prompt, Hot(400), twin, namespace="tests", most_drafts=0)
    assert other.cached_tokens == 399, "its memory is another, though equal"
    again = driver.turn(prompt, Hot(400), key, namespace="tests", most_drafts=0)
    assert (again.state, driver.files(key)) == (other.state, driver.files(twin))


def test_nothing_is_kept_behind_a_part_of_a_memory_or_behind_one_that_went(
    driver: Driver, talked: tuple[AgentKey, AgentKey, tuple[int, ...]]
) -> None:
    key, twin, known = talked
    prompt = (*known[:390], *tokens_of(600, 94))
    cancelled(driver, prompt, Listener().cancel_at(Prefilled, 3), reuse=Hot(390), key=key)
    assert driver.turn(prompt, Hot(390), key, namespace="tests", is_remembered=False, max_tokens=1).cached_tokens == 390
    used = driver.engine.memory_used_bytes
    prompt = (*known, *tokens_of(600, 95))
    cancelled(driver, prompt, Listener().cancel_at(Prefilled, 2), reuse=Hot(400), key=key)
    assert driver.engine.memory_used_bytes > used
    driver.engine.memories.drop(key).result(60)
    driver.turn(prompt, Hot(400), twin, namespace="tests", is_remembered=False, max_tokens=1)
    assert driver.engine.memory_used_bytes == used, "the twin has the memory's pages"


def test_rows_of_one_agent_take_no_place_from_shared_ones(
    driver: Driver, talked: tuple[AgentKey, AgentKey, tuple[int, ...]]
) -> None:
    key, _, known = talked
    prompt = (*known, *tokens_of(600, 96))
    cancelled(driver, prompt[:600], Listener().cancel_at(Tokens, 1))
    cancelled(driver, prompt, Listener().cancel_at(Tokens, 1), reuse=Hot(400), key=key)
    assert driver.turn(prompt, namespace="tests", max_tokens=1).cached_tokens == 512
    assert driver.turn(prompt, Hot(400), key, namespace="tests", max_tokens=1).cached_tokens == 768


def test_a_memory_with_windows_can_still_go_back_to_where_the_one_before_it_ended(
    family: Callable[[str], Driver],
) -> None:
    """A retry that began behind that would leave none of the window's rows there."""
    driver = family("gemma3")
    key, state = driver.remember(400, 97)
    twin, prompt = driver.fork(key), (*state.token_ids, *tokens_of(600, 98))
    cancelled(driver, prompt, Listener().cancel_at(Tokens, 1), reuse=Hot(400), key=key)
    for each in (key, twin):
        driver.turn(prompt, Hot(400), each, namespace="tests", max_tokens=3)
    edited = (*state.token_ids, *tokens_of(300, 99))
    again, straight = (driver.turn(edited, Hot(400), each, max_tokens=3) for each in (key, twin))
    assert again.cached_tokens == straight.cached_tokens == 400
    assert driver.files(key) == driver.files(twin)

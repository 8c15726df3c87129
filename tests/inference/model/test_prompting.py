"""The tokenizer's thread: one thing at a time, and namespaces in turn."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import Unavailable
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.engine.api import SamplingParams
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import Recollection
from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import GivenJson
from inference_svc.text.token_text import TokenText
from inference_svc.turns.prompts.texts import prompted, recalled_by
from inference_svc.turns.turn_data import MessagesInput, RequestOrigin, TurnRequest


@pytest.fixture
def prompting() -> Iterator[Prompting]:
    tokenizer = load_tokenizer(kvasir_tiny.path())
    tokenizer_json = (kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8")
    prompting = Prompting(tokenizer, TokenText.of_tokenizer(tokenizer_json, tokenizer.decode))
    yield prompting
    prompting.close()


async def test_a_text_waits_for_one_text_of_another_namespace_not_for_all(prompting: Prompting) -> None:
    """Thirty-two prompts of 8 MiB were tokenized before another namespace's word was."""
    done: list[str] = []
    first_is_under_way, first_may_end = threading.Event(), threading.Event()

    def first() -> None:
        first_is_under_way.set()
        first_may_end.wait(60)

    running = [asyncio.create_task(prompting.run("a", first))]
    running += [asyncio.create_task(prompting.run("a", lambda: done.append("a"))) for _ in range(32)]
    await asyncio.to_thread(first_is_under_way.wait, 10)
    running += [asyncio.create_task(prompting.run("b", lambda: done.append("b"))) for _ in range(2)]
    await asyncio.sleep(0)
    first_may_end.set()
    await asyncio.gather(*running)
    assert sorted(done) == ["a"] * 32 + ["b"] * 2
    assert [place for place, name in enumerate(done) if name == "b"][-1] <= 3


async def test_who_goes_away_leaves_its_place_and_who_waits_when_the_model_goes_hears_of_it(
    prompting: Prompting,
) -> None:
    may_end = threading.Event()
    under_way, gone, waiting = (asyncio.create_task(prompting.run(name, may_end.wait)) for name in "aab")
    await asyncio.sleep(0.01)
    gone.cancel()
    prompting.close()
    may_end.set()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await under_way


def test_json_that_comes_when_the_model_is_gone_is_told_so_too(prompting: Prompting) -> None:
    given = GivenJson([("tools", '{"type": "object"}')])
    prompting.close()
    with pytest.raises(Unavailable) as gone:
        asyncio.run(prompting.read("a", given))
    assert gone.value.reason == "MODEL_CHANGING"


@pytest.mark.parametrize(("size_bytes", "turns_wait"), [(2 << 20, False), (2 << 10, True)])
async def test_a_large_conversation_is_rendered_where_no_other_turn_waits_and_no_count(
    prompting: Prompting, size_bytes: int, turns_wait: bool
) -> None:
    given = MessagesInput((manifest_pb2.Message(role="user", content="a" * size_bytes),), False)
    asked = TurnRequest("r", "a", "", given, "", SamplingParams(4), False, origin=RequestOrigin("a", size_bytes))
    may_end = threading.Event()
    busy = asyncio.create_task(prompting.run("b", may_end.wait))
    recalled = recalled_by(asked, Recollection(None, Source.COLD, None), None)
    counted = asyncio.create_task(prompting._copied().run("c", may_end.wait))  # nor does it wait for a long count
    making = asyncio.create_task(prompted(prompting, recalled))
    await asyncio.wait({making}, timeout=0.3 if turns_wait else 10)
    assert making.done() != turns_wait
    may_end.set()
    await asyncio.gather(busy, counted)
    text = (await making).text
    clock = prompting.clock()
    conversation = dialogue(given.messages, (), GivenJson(), prompting.specials)
    assert text == render(prompting.template_at(clock), conversation)


async def test_first_counts_at_once_share_one_copy(prompting: Prompting) -> None:
    """The copy of one of them was never closed: its thread stayed for as long as the process."""
    one, other = await asyncio.gather(prompting.twin("a"), prompting.twin("b"))
    assert one is other


async def test_what_is_counted_holds_up_no_text_of_a_turn(prompting: Prompting) -> None:
    may_end = threading.Event()
    counter = await prompting.twin("a")
    assert await prompting.twin("b") is counter
    counting = asyncio.create_task(counter.run("a", may_end.wait))
    text = "We met at the market this morning."
    ids = (await asyncio.wait_for(prompting.run("a", lambda: prompting.tokenize(text)), 10)).ids
    may_end.set()
    assert await counting
    assert (await counter.run("a", lambda: counter.tokenize(text))).ids == ids
    prompting.close()
    with pytest.raises(Unavailable):
        await counter.run("a", may_end.wait)

"""An engine that is told to stop gives its speaking turns to a peer, and ends."""

import asyncio
from pathlib import Path

import pytest

from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.two_engines import hear, two_engines


@pytest.mark.long(14)
def test_readers_hear_the_rest_from_the_peer_and_the_engine_is_gone(tmp_path: Path) -> None:
    with two_engines(tmp_path) as two:
        two.a.stop()
        two.a.options += ["--drain-to", "b", "--stop-grace-s", "20"]
        two.a.start()

        async def work() -> None:
            async with two.clients() as (a, b):
                turns = [
                    {"prompt": STORY, "agent_id": "one", "sampling": {**ON, "max_tokens": 200}},
                    {"prompt": STORY, "sampling": {**ON, "temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 150}},
                ]
                stayed = [await hear(b, **{**turn, "agent_id": ""}) for turn in turns]
                hearing = [asyncio.create_task(hear(a, **turn)) for turn in turns]
                while len([turn for turn in await a.list_turns() if turn.completion_tokens > 3]) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                stopping = asyncio.create_task(asyncio.to_thread(two.a.stop))
                heard = [await each for each in hearing]
                assert [[move.peer for move in each.moves] for each in heard] == [["b"], ["b"]]
                assert [each.reply.text for each in heard] == [each.reply.text for each in stayed]
                assert [each.reply.choices[-1].text for each in heard] == [
                    each.reply.choices[-1].text for each in stayed
                ]
                assert heard[0].reply.finished.snapshot.version == 1
                assert await stopping == 0

        asyncio.run(asyncio.wait_for(work(), 120))

"""An agent that speaks moves to another Mac: its turn to the engine there, its memory to the store, both at once."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient, InferenceClient
from kvasir.errors import KvasirError, NotFound

from inference_svc.model import kvasir_tiny
from tests.cachestore.moving.two_stores import Mac, macs
from tests.cli.running import Cli, Ended
from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.two_engines import hear
from tests.system_fixtures import ENGINE_SERVICE, Service

Macs = tuple[tuple[Mac, Service], tuple[Mac, Service]]


@contextmanager
def two_macs(root: Path) -> Iterator[Macs]:
    """A store and an engine each; the engine of the first may give turns to that of the second."""
    with ExitStack() as exits:
        stores = exits.enter_context(macs(root))
        sockets = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        engines = []
        for mac in stores:
            engine = Service(mac.name, "inference_svc", ENGINE_SERVICE, sockets / mac.name, root / f"{mac.name}.log")
            engine.options = [
                *("--store", mac.start().address, "--model", str(kvasir_tiny.path())),
                *("--state-dir", str(root / f"state-{mac.name}"), "--store-budget-ms", "5000", "--commit-wait-s", "10"),
            ]
            engines.append(engine)
            exits.callback(engine.kill)
        for peer in ("b", stores[1].name):
            engines[0].options += ["--peer", f"{peer}={engines[1].address}", "--peer-store", f"{peer}={stores[1].name}"]
        for engine in engines:
            engine.start()
        yield (stores[0], engines[0]), (stores[1], engines[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Macs]:
    with two_macs(tmp_path_factory.mktemp("macs")) as pair:
        yield pair


@pytest.mark.long(15)
def test_the_agent_has_one_owner_and_its_reader_heard_nothing_of_it(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair

    async def work() -> None:
        async with AioInferenceClient.connect(engine.address) as a, AioInferenceClient.connect(other.address) as b:
            a.peers["b"] = b
            first = {"messages": [{"role": "user", "content": STORY}], "sampling": ON}
            more = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": ON}
            stays = [await hear(a, agent_id="stays", **turn) for turn in (first, more, more)]
            await hear(a, agent_id="goes", **first)
            moved = await hear(a, {3: (a, "b")}, agent_id="goes", **more)
            assert [move.peer for move in moved.moves] == ["b"], moved.not_moved
            assert moved.told == stays[1].told
            with pytest.raises(KvasirError) as refused:
                await hear(a, agent_id="goes", **more)
            assert refused.value.reason == "AGENT_MOVED"
            after = await hear(b, agent_id="goes", **more)
            assert after.told == stays[2].told

    asyncio.run(asyncio.wait_for(work(), 120))
    with laptop.client() as here, studio.client() as there:
        assert here.get_agent("goes").ownership.state == cachestore_pb2.OWNER_STATE_MOVED
        [line] = there.get_agent("goes").lines
        assert line.version == 3


def test_a_moved_agent_goes_on_token_for_token_where_its_reply_holds_special_tokens(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair
    says = {"max_tokens": 6, "temperature": 0.0, "logit_bias": {0: 100.0}}  # <|endoftext|>, six times

    def go_on(client: InferenceClient, agent: str) -> tuple[int, list[int]]:
        reply = client.reply(agent_id=agent, append_messages=[{"role": "user", "content": "go on"}], sampling=ON)
        return reply.started.prompt_tokens, list(reply.token_ids)

    with InferenceClient.connect(engine.address) as a, InferenceClient.connect(other.address) as b:
        for agent in ("special stays", "special moves", "special copy"):
            told = a.reply(agent_id=agent, messages=[{"role": "user", "content": "hi"}], sampling=says)
            assert told.token_ids == [0] * 6
        with laptop.client() as here:
            here.import_agent("special import", here.export_agent("special stays"))
        with studio.client() as there:
            there.move_agent("special moves", from_peer=laptop.name)
            there.move_agent("special import", from_peer=laptop.name)
            there.fork_agent("special moves", "special fork")
            there.pull_agent(laptop.name, "special copy")
        expected = [go_on(a, "special stays") for _ in range(2)]
        assert [go_on(b, "special moves") for _ in range(2)] == expected
        assert go_on(b, "special fork") == expected[0]
        # Anybody may have written what comes as a copy, or as an archive before it moves: its words are no tokens.
        assert go_on(b, "special copy")[0] > expected[0][0]
        assert go_on(b, "special import")[0] > expected[0][0]


def test_a_hand_over_that_is_refused_leaves_nothing_at_the_peer(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair

    async def work() -> None:
        async with AioInferenceClient.connect(engine.address) as a:
            first = {"messages": [{"role": "user", "content": STORY}], "sampling": ON}
            more = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": ON}
            await hear(a, agent_id="stayed", **first)
            stayed = await hear(a, {3: (a, "b")}, agent_id="stayed", **more)
            assert (stayed.moves, len(stayed.not_moved)) == ([], 1)

    other.kill()
    try:
        asyncio.run(asyncio.wait_for(work(), 120))
    finally:
        other.start()
    with laptop.client() as here, studio.client() as there:
        assert here.get_agent("stayed").lines[0].version == 2
        with pytest.raises(NotFound):
            there.get_agent("stayed")


@pytest.mark.long(17)
def test_the_command_takes_the_turn_along(pair: Macs, tmp_path: Path) -> None:
    """Agents that speak their first turn and their second, one that is silent, and one whose engine is not asked. They
    speak for longer than a command takes to begin.
    """
    (laptop, engine), (studio, other) = pair

    def move(agent: str, *asked: str) -> Ended:
        return Cli(tmp_path)(
            "--address", laptop.home.socket, *asked, "agents", "move", agent, "--to", studio.name, "--json"
        )

    async def moved(a: AioInferenceClient, agent: str, *asked: str, **turn: Any) -> tuple[bool, Ended]:
        """Move an agent once its turn speaks, and read until the command ends: whether the turn moved, and its end."""
        command, kinds = None, set[str]()
        async with aclosing(a.generate(agent_id=agent, **turn)) as events:
            async for event in events:
                kinds.add(event.WhichOneof("event"))
                if "delta" in kinds and command is None:
                    command = asyncio.create_task(asyncio.to_thread(move, agent, *asked))
                if command is not None and command.done():
                    break
        assert command is not None
        return "moved" in kinds, await command

    async def work() -> None:
        async with AioInferenceClient.connect(engine.address) as a, AioInferenceClient.connect(other.address) as b:
            a.peers[studio.name] = b
            first = {"messages": [{"role": "user", "content": STORY}], "sampling": {**ON, "max_tokens": 1_500}}
            more = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": first["sampling"]}
            for agent in ("second", "waits", "silent"):
                await hear(a, agent_id=agent, **{**first, "sampling": {"max_tokens": 4}})
            for agent, turn in (("first", first), ("second", more)):
                has_moved, ended = await moved(a, agent, "--engine", engine.address, **turn)
                assert (ended.code, has_moved, ended.value.get("turn")) == (0, True, "handed_over"), ended
            has_moved, ended = await moved(a, "waits", **more)
            assert (ended.code, has_moved, ended.value.get("turn")) == (0, False, "waited_for"), ended
            ended = await asyncio.to_thread(move, "silent", "--engine", engine.address)
            assert (ended.code, ended.value.get("turn", "")) == (0, None), ended

    asyncio.run(asyncio.wait_for(work(), 120))
    with laptop.client() as here:
        for agent in ("second", "waits", "silent"):
            assert here.get_agent(agent).ownership.state == cachestore_pb2.OWNER_STATE_MOVED

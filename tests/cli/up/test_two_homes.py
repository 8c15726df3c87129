"""Two homes that know each other by `kvasir pair` alone: turns move between their engines, and readers read on."""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.cli.running.checks import is_free
from kvasir.cli.running.health import ENGINE_SERVICE
from kvasir.cli.running.home import Home
from kvasir.clients import AioInferenceClient, PinnedTls, StoreClient
from kvasir.clients.aio.turn_peer import AioTurnPeer
from kvasir.clients.channel import aio_channel
from kvasir.errors import KvasirError, NotFound, PermissionDenied, Unauthenticated, Unavailable

from cachestore_svc.pairing.identity import SERVER_NAME, Identity, identity_file, new_identity, read_identity
from cachestore_svc.pairing.peers_file import read_peers
from tests.cli.running import Begun, Cli, Ended, answers, in_process, wait_until_ready
from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.two_engines import Heard, hear
from tests.running import in_memory
from tests.running.waiting import eventually

FIRST: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}], "sampling": {**ON, "max_tokens": 4}}
MORE: dict[str, Any] = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": ON}
LONG: dict[str, Any] = {**MORE, "sampling": {**ON, "max_tokens": 700}}


@dataclass
class Mac:
    """A home that runs."""

    cli: Cli
    up: Begun

    @property
    def engine(self) -> str:
        return Home(self.cli.home).endpoint("engine").address

    @property
    def identity(self) -> Identity:
        return read_identity(identity_file(Home(self.cli.home).peers_file))

    def store(self) -> StoreClient:
        return StoreClient.connect(Home(self.cli.home).endpoint("store").address)

    def versions(self, agent: str) -> list[int]:
        with self.store() as store:
            return [each.version for each in store.list_snapshots(agent).snapshots]

    def as_peer(self, identity: Identity, namespace: str = "default") -> AioTurnPeer:
        """A program that shows this certificate to the engine's door."""
        address, tls = self._door(identity)
        return AioTurnPeer.connect(address, tls=tls).in_namespace(namespace)

    def as_caller(self, identity: Identity) -> AioInferenceClient:
        address, tls = self._door(identity)
        return AioInferenceClient(aio_channel(address, tls, ()))

    @property
    def engine_listen(self) -> str:
        return read_peers(Home(self.cli.home).peers_file).engine_listen

    def _door(self, identity: Identity) -> tuple[str, PinnedTls]:
        return self.engine_listen, PinnedTls(
            self.identity.certificate.pem, SERVER_NAME, identity.certificate.pem, identity.key_pem
        )


Macs = tuple[Mac, Mac]


@pytest.fixture(scope="module")
def macs() -> Iterator[Macs]:
    """Laptop and studio, paired as people do it: studio takes what moves there."""
    with ExitStack() as exits:
        made = []
        for _ in ("laptop", "studio"):
            cli = Cli(in_memory.home())
            exits.callback(shutil.rmtree, cli.home)
            made.append(Mac(cli, exits.enter_context(cli.running("up", "--no-http"))))
        for mac in made:
            wait_until_ready(mac.cli.home, mac.up)
        laptop, studio = made
        paired(laptop, studio)
        yield laptop, studio


def paired(laptop: Mac, studio: Mac) -> None:
    with studio.cli.running("pair", "--name", "studio", "--takes", "move", "--json") as waiting:
        shown = json.loads(eventually(lambda: waiting.out))
        laptop.cli.done("pair", shown["line"], "--name", "laptop")
        assert waiting.process.wait(60) == 0
    for mac in (laptop, studio):
        eventually(lambda mac=mac: not is_free(mac.engine_listen, "engine_listen"))  # type: ignore[misc]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def move(mac: Mac, agent: str, *words: str) -> Ended:
    return in_process("--home", mac.cli.home, "agents", "move", agent, "--to", "studio", *words)


async def moved(mac: Mac, agent: str, *words: str, **turn: Any) -> tuple[Heard, Ended]:
    """A turn that moves while its reader, who knows no peers, hears it; and how the command ended."""
    heard, command = Heard(), None
    async with AioInferenceClient.connect(mac.engine) as client:
        async for event in client.generate(agent_id=agent, **turn):
            heard.kinds.append(event.WhichOneof("event"))
            heard.reply.add(event)
            if event.HasField("delta") and command is None:
                command = asyncio.create_task(asyncio.to_thread(move, mac, agent, *words))
    assert command is not None
    return heard, await command


@pytest.mark.long(18)
def test_a_live_move_needs_nothing_but_the_pairing(macs: Macs) -> None:
    """Token for token the turn, and the next one, of an agent that never left."""
    laptop, studio = macs
    for mac, other in ((laptop, "studio"), (studio, "laptop")):
        [peer] = mac.cli.done("peers", "ls", "--try", "--json").value["peers"]
        assert (peer["name"], peer["engine_address"].partition(":")[0]) == (other, "127.0.0.1")
        assert peer["is_reached"]
        assert f" {peer['engine_address'].removeprefix('127.0.0.1')} " in mac.cli.done("peers", "ls").out

    async def work() -> None:
        turn = {**MORE, "sampling": {**ON, "max_tokens": 300}}  # longer than a command takes to begin
        async with AioInferenceClient.connect(laptop.engine) as a, AioInferenceClient.connect(studio.engine) as b:
            for agent in ("stays", "goes"):
                await hear(a, agent_id=agent, **FIRST)
            stayed = [await hear(a, agent_id="stays", **each) for each in (turn, MORE)]
            heard, ended = await moved(laptop, "goes", "--json", **turn)
            assert (ended.code, ended.value["turn"]) == (0, "handed_over"), ended
            assert (heard.told, "moved" in heard.kinds) == (stayed[0].told, False)
            assert (await hear(b, agent_id="goes", **MORE)).told == stayed[1].told

    run(work())
    with laptop.store() as here:
        assert here.get_agent("goes").ownership.state == cachestore_pb2.OWNER_STATE_MOVED
    assert studio.versions("goes")[:2] == [3, 2]


@pytest.mark.long(4)
def test_a_first_turn_is_waited_for_and_the_command_reports_it(macs: Macs) -> None:
    laptop, studio = macs
    heard, ended = run(moved(laptop, "first", **{**FIRST, "sampling": {**ON, "max_tokens": 300}}))
    assert ended.code == 0, ended
    assert re.search(r"first has moved to studio after the end of its turn: [\d.]+ [KM]iB sent in [\d.]+ s", ended.out)
    assert "first's turn is not handed over: the turn stays here: it is its agent's first" in ended.err
    assert "its end is waited for" in ended.err
    assert (len(heard.reply.token_ids), studio.versions("first")) == (300, [1])


@pytest.mark.long(3)
def test_an_engine_that_cannot_be_reached_is_named_and_the_turn_is_waited_for(macs: Macs) -> None:
    laptop, studio = macs

    async def work() -> tuple[Heard, Ended]:
        async with AioInferenceClient.connect(laptop.engine) as client:
            await hear(client, agent_id="alone", **FIRST)
        running = Home(studio.cli.home).running()
        assert running is not None
        os.kill(running.engine_pid, signal.SIGKILL)  # its `kvasir up` starts another, which takes seconds
        return await moved(laptop, "alone", **{**MORE, "sampling": {**ON, "max_tokens": 300}})

    heard, ended = run(work())
    eventually(lambda: answers(studio.engine, ENGINE_SERVICE))
    eventually(lambda: not is_free(studio.engine_listen, "engine_listen"))
    assert ended.code == 0, ended
    assert "alone's turn is not handed over: the engine of peer studio" in ended.err
    assert "alone has moved to studio after the end of its turn" in ended.out
    with studio.store() as there:
        assert there.get_snapshot("alone")[0].token_count == heard.reply.finished.memory_tokens


async def until_moved(mac: Mac, name: str, leave: Callable[[AioInferenceClient], Any]) -> str:
    """A long turn that moves; once the rest comes from the peer, its reader does that. Returns its agent: a peer whose
    store is late on a busy machine refuses a hand-over, and then another agent's turn is moved.
    """
    async with AioInferenceClient.connect(mac.engine) as client:
        for agent in (name, f"{name}-again", f"{name}-at-last"):
            await hear(client, agent_id=agent, **FIRST)
            command = None
            async with aclosing(client.generate(agent_id=agent, **LONG)) as events:
                async for event in events:
                    if event.HasField("delta") and command is None:
                        command = asyncio.create_task(asyncio.to_thread(move, mac, agent, "--json"))
                    if command is not None and command.done():
                        break
                assert command is not None
                if (ended := await command).value.get("turn") == "handed_over":
                    await leave(client)
                    return agent
    raise AssertionError(ended)


def test_a_reader_that_leaves_ends_its_turn_at_the_peer(macs: Macs) -> None:
    laptop, studio = macs

    async def work() -> None:
        async def leave(_: AioInferenceClient) -> None:
            return

        agent = await until_moved(laptop, "left", leave)
        async with AioInferenceClient.connect(studio.engine) as b:
            give_up = time.monotonic() + 30
            while await b.list_turns():
                assert time.monotonic() < give_up
                await asyncio.sleep(0.05)
        assert studio.versions(agent) == [1]

    run(work())


@pytest.mark.long(11)
def test_a_turn_that_moved_is_remembered_though_the_engine_that_passed_it_on_is_killed(macs: Macs) -> None:
    laptop, studio = macs

    async def kill(_: AioInferenceClient) -> None:
        running = Home(laptop.cli.home).running()
        assert running is not None
        os.kill(running.engine_pid, signal.SIGKILL)

    agent = run(until_moved(laptop, "outlived", kill))
    eventually(lambda: studio.versions(agent) == [2, 1], within_s=120)  # a busy machine decodes it for a minute
    eventually(lambda: answers(laptop.engine, ENGINE_SERVICE))  # its `kvasir up` starts another


@pytest.mark.long(3)
def test_a_peer_gets_no_more_at_the_engines_door_than_its_pairing_gives(macs: Macs) -> None:
    laptop, studio = macs

    async def refused(peer: AioTurnPeer, error: type[KvasirError]) -> None:
        async with peer:
            with pytest.raises(error):
                await anext(peer.read_turn("x" * 43, "owner"))

    async def work() -> None:
        await refused(studio.as_peer(new_identity()), Unavailable)
        await refused(studio.as_peer(laptop.identity, "work"), Unauthenticated)
        await refused(laptop.as_peer(studio.identity), PermissionDenied)  # laptop takes nothing
        await refused(studio.as_peer(laptop.identity), NotFound)
        async with studio.as_caller(laptop.identity) as caller:
            for rpc in (
                caller.list_turns(),
                caller.reply(prompt="Hello."),
                caller.hand_over("laptop", agent_id="goes"),
            ):
                with pytest.raises(PermissionDenied):
                    await rpc

    run(work())
    allowed = studio.cli.done("peers", "allow", "laptop", "--takes", "nothing")
    try:
        assert "it may bring: default=nothing" in allowed.out

        async def without_the_right() -> None:
            async with AioInferenceClient.connect(laptop.engine) as a:
                await hear(a, agent_id="kept", **FIRST)
                heard = await hear(a, {3: (a, "studio")}, agent_id="kept", **MORE)
                assert [error.reason for error in heard.not_moved] == ["PEER_MAY_NOT"]
                assert len(heard.reply.token_ids) == ON["max_tokens"]

        run(without_the_right())
    finally:
        studio.cli.done("peers", "allow", "laptop", "--takes", "move")
    assert laptop.versions("kept")[:2] == [2, 1]
    with studio.store() as there, pytest.raises(NotFound):
        there.get_agent("kept")

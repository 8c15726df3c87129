"""An agent that speaks moves to another Mac: its turn to the engine there, its memory to the store, both at once."""

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2, manifest_pb2
from kvasir.clients import AioInferenceClient, InferenceClient, StoreClient
from kvasir.clients.aio.turn_peer import AioTurnPeer, TurnCall
from kvasir.credentials import HANDOVER, PEER, Principal, write_private_text
from kvasir.errors import KvasirError, NotFound
from kvasir.formats import manifest
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import inference_pb2

from inference_svc.model import kvasir_tiny
from tests.cachestore.moving.two_stores import Mac, macs
from tests.cachestore.service.running import make_credentials
from tests.cli.running import Cli, Ended, in_process
from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.test_taking import PROMPT, opened, opening_for, refusal, stand
from tests.inference.handover.two_engines import hear
from tests.made_models.sampling import first_and_in_turn
from tests.running.system_fixtures import ENGINE_SERVICE, Service
from tests.running.waiting import eventually

Macs = tuple[tuple[Mac, Service], tuple[Mac, Service]]
# By the name that a peer has in the first engine's configuration: why it gives no turn.
REFUSED = {"thief": "HANDOVER_NOT_MOVED", "reader": "ROLE_REQUIRED"}


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
        engines[1].options += ["--audit-file", str(root / "audit"), "--credentials-file", str(root / "credentials")]
        roles = {"laptop": HANDOVER, "attic": HANDOVER, "reader": PEER}
        callers = [Principal(name, "default", frozenset({role})) for name, role in roles.items()]
        tokens = make_credentials(root / "credentials", callers)
        for name, token in tokens.items():
            write_private_text(root / f"{name}.token", token)
        # "thief" and "reader" lie about the agent's store: they keep silent that it is another one.
        for peer, token in (("b", "laptop"), (stores[1].name, "laptop"), ("thief", "laptop"), ("reader", "reader")):
            engines[0].options += ["--peer", f"{peer}={engines[1].address}"]
            engines[0].options += ["--peer-token-file", f"{peer}={root / token}.token"]
            if peer in ("b", stores[1].name):
                engines[0].options += ["--peer-store", f"{peer}={stores[1].name}"]
        for engine in engines:
            engine.start()
        yield (stores[0], engines[0]), (stores[1], engines[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Macs]:
    with two_macs(tmp_path_factory.mktemp("macs")) as pair:
        yield pair


@pytest.mark.long(9)
async def test_the_agent_has_one_owner_and_its_reader_heard_nothing_of_it(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair
    async with asyncio.timeout(120):
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
    with laptop.client() as here, studio.client() as there:
        assert here.get_agent("goes").ownership.state == cachestore_pb2.OWNER_STATE_MOVED
        [line] = there.get_agent("goes").lines
        assert line.version == 3


@pytest.mark.long(2)
def test_a_moved_agent_goes_on_token_for_token_where_its_reply_holds_special_tokens(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair
    says = {"max_tokens": 6, "temperature": 0.0, "logit_bias": {0: 100.0}}  # <|endoftext|>, six times
    few = {**ON, "max_tokens": 12}

    def go_on(client: InferenceClient, agent: str) -> tuple[int, list[int]]:
        reply = client.reply(agent_id=agent, append_messages=[{"role": "user", "content": "go on"}], sampling=few)
        return reply.started.prompt_tokens, list(reply.token_ids)

    with InferenceClient.connect(engine.address) as a, InferenceClient.connect(other.address) as b:
        for agent in ("special stays", "special moves", "special copy"):
            told = a.reply(agent_id=agent, messages=[{"role": "user", "content": "hi"}], sampling=says)
            assert told.token_ids == [0] * 6
        b.reply(agent_id="special import", messages=[{"role": "user", "content": "hi"}], sampling=says)
        with laptop.client() as here, studio.client() as there:
            here.import_agent("special import", list(there.export_agent("special import")))
            there.delete_agent("special import")  # else its bytes are that store's own
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


def stored_tokens(store: StoreClient, agent: str) -> int:
    return store.get_agent(agent).lines[0].token_count


@pytest.mark.long(8)
def test_an_agent_moves_in_its_sleep_and_wakes_at_the_other_store(pair: Macs) -> None:
    (laptop, engine), (studio, other) = pair
    more = {"append_messages": [{"role": "user", "content": "And then?"}], "sampling": ON}
    with InferenceClient.connect(engine.address) as a, InferenceClient.connect(other.address) as b:
        for agent in ("awake", "asleep"):
            a.reply(agent_id=agent, messages=[{"role": "user", "content": STORY}], sampling=ON)
        kept_bytes = a.sleep("asleep").kept_bytes
        with laptop.client() as here, studio.client() as there:
            there.move_agent("asleep", from_peer=laptop.name)
            assert there.get_agent("asleep").lines[0].total_bytes == kept_bytes
            with pytest.raises(KvasirError) as refused:
                a.sleep("asleep")
            assert refused.value.reason == "AGENT_MOVED"
            assert b.reply(agent_id="asleep", **more).token_ids == a.reply(agent_id="awake", **more).token_ids
            # Behind a store that is slow a reply ends before its memory is there.
            eventually(lambda: stored_tokens(here, "awake") == stored_tokens(there, "asleep"))
            tails = [
                manifest.parse(store.get_snapshot(agent)[1]).tail
                for store, agent in ((here, "awake"), (there, "asleep"))
            ]
            assert tails[0] == tails[1]


@pytest.mark.long(3)
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


TELL: dict[str, Any] = {"messages": [{"role": "user", "content": STORY}]}
AND_THEN: dict[str, Any] = {"append_messages": [{"role": "user", "content": "And then?"}]}


def move_command(pair: Macs, agent: str) -> list[str]:
    (laptop, _), (studio, _) = pair
    return ["--address", laptop.home.socket, "agents", "move", agent, "--to", studio.name]


def state_of(mac: Mac, agent: str) -> int:
    with mac.client() as store:
        return store.get_agent(agent).ownership.state


@pytest.mark.long(6)
def test_the_command_takes_the_turn_along(pair: Macs) -> None:
    """Agents that decode their first turn and their second, and one without a turn."""
    (laptop, engine), (studio, other) = pair

    def move(agent: str) -> Ended:
        return in_process("--engine", engine.address, *move_command(pair, agent), "--json")

    async def moved(a: AioInferenceClient, agent: str, **turn: Any) -> tuple[bool, Ended]:
        """Move an agent once its turn decodes, and read until the command ends: whether the turn moved, and its end."""
        command, kinds = None, set[str]()
        async with aclosing(a.generate(agent_id=agent, **turn)) as events:
            async for event in events:
                kinds.add(event.WhichOneof("event"))
                if "delta" in kinds and command is None:
                    command = asyncio.create_task(asyncio.to_thread(move, agent))
                if command is not None and command.done():
                    break
        assert command is not None
        return "moved" in kinds, await command

    async def work() -> None:
        async with AioInferenceClient.connect(engine.address) as a, AioInferenceClient.connect(other.address) as b:
            a.peers[studio.name] = b
            sampling = {**ON, "max_tokens": 150}  # longer than a command takes to begin
            for agent in ("second", "silent"):
                await hear(a, agent_id=agent, **TELL, sampling={"max_tokens": 4})
            has_moved, ended = await moved(a, "second", **AND_THEN, sampling=sampling)
            assert (ended.code, has_moved, ended.value.get("turn")) == (0, True, "handed_over"), ended
            has_moved, ended = await moved(a, "first", **TELL, sampling=sampling)
            assert (ended.code, has_moved, ended.value.get("turn")) == (0, False, "waited_for"), ended
            ended = await asyncio.to_thread(move, "silent")
            assert (ended.code, ended.value.get("turn", "")) == (0, None), ended

    asyncio.run(asyncio.wait_for(work(), 120))
    for agent in ("first", "second", "silent"):
        assert state_of(laptop, agent) == cachestore_pb2.OWNER_STATE_MOVED


@pytest.mark.long(4)
def test_the_command_waits_for_the_turn_of_an_engine_that_it_does_not_call(pair: Macs, tmp_path: Path) -> None:
    """The turn is left once the command reports that it waits, and would go on for much longer."""
    (laptop, engine), _ = pair

    async def work() -> Ended:
        async with AioInferenceClient.connect(engine.address) as a:
            await hear(a, agent_id="waits", **TELL, sampling={"max_tokens": 4})
            with Cli(tmp_path).running(*move_command(pair, "waits")) as command:
                turn = {**AND_THEN, "sampling": {**ON, "max_tokens": 1_500}}
                async with aclosing(a.generate(agent_id="waits", **turn)) as events:
                    async for _ in events:
                        if "waiting until the engine" in command.err:
                            break
                return Ended(await asyncio.to_thread(command.process.wait, 60), command.out, command.err)

    ended = asyncio.run(asyncio.wait_for(work(), 120))
    assert "waits has moved to studio after the end of its turn" in ended.out, ended
    assert state_of(laptop, "waits") == cachestore_pb2.OWNER_STATE_MOVED


@pytest.mark.long(4)
@pytest.mark.parametrize("peer", ["thief", "reader"])
async def test_a_peer_writes_into_no_agent_that_it_did_not_move_here(pair: Macs, peer: str) -> None:
    """It has a copy, goes on with it, and gives that turn away as if both engines had one store."""
    (laptop, engine), (studio, other) = pair
    agent, told = f"victim of the {peer}", "My name is Mallory now."
    async with asyncio.timeout(120):
        async with AioInferenceClient.connect(engine.address) as a, AioInferenceClient.connect(other.address) as b:
            await hear(b, agent_id=agent, messages=[{"role": "user", "content": "My name is Ada."}], sampling=ON)
            with laptop.client() as here:
                here.pull_agent(studio.name, agent)
            turn = {"append_messages": [{"role": "user", "content": told}], "sampling": ON}
            stayed = await hear(a, {3: (a, peer)}, agent_id=agent, **turn)
            assert (stayed.moves, len(stayed.not_moved)) == ([], 1)
    with studio.client() as there:
        assert [version.version for version in there.list_snapshots(agent).snapshots] == [1]
    assert _refused(other, agent if peer == "thief" else "") == REFUSED[peer]


@pytest.mark.long(12)
@pytest.mark.parametrize(
    ("caller", "moves", "is_taken"),
    [
        ("laptop", "meanwhile", True),
        ("laptop", "never", False),
        ("laptop", "before", False),
        ("laptop", "by another move", False),
        ("attic", "meanwhile", False),
        ("laptop", "onto another agent", False),
    ],
)
def test_a_turn_comes_with_an_open_move_of_its_caller_alone(
    pair: Macs, new_agent: Callable[[], str], caller: str, moves: str, is_taken: bool
) -> None:
    (laptop, engine), (studio, other) = pair
    agent, move_id = new_agent(), secrets.token_hex(16)

    def move(move_id: str) -> None:
        with laptop.client() as here:
            here.move_agent(agent, to_peer=studio.name, move_id=move_id)

    async def give(b: AioInferenceClient, call: TurnCall, parent: manifest_pb2.Digest) -> None:
        opening = opening_for(await b.get_model(), (await b.get_capabilities()).device)
        request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent, sampling=inference_pb2.Sampling(**ON))
        if moves == "before":
            await asyncio.to_thread(move, move_id)
        await opened(call, opening, request=request, parent_manifest=parent, move_id=move_id)
        await call.send([pb.TakeTurnRequest(stand=stand())])
        token = (await call.receive()).prepared.resume_token
        if moves not in ("never", "before"):
            await asyncio.to_thread(move, move_id if moves == "meanwhile" else secrets.token_hex(16))
        await call.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
        assert (await call.receive()).HasField("taken")  # its reader may come now
        try:
            async for _ in b.resume(token):
                pass
        except KvasirError:
            with contextlib.suppress(KvasirError, TimeoutError):  # who left before would be audited as cancelled
                await asyncio.wait_for(call.receive(), 20)
            raise

    async def work() -> None:
        token = (other.log_file.parent / f"{caller}.token").read_text()
        async with (
            AioInferenceClient.connect(engine.address) as a,
            AioInferenceClient.connect(other.address) as b,
            AioTurnPeer.connect(other.address, token=token) as peer,
        ):
            for each in (a, b) if moves == "onto another agent" else (a,):
                await hear(each, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
            with laptop.client() as here:
                parent = here.get_agent(agent).lines[0].manifest
            with contextlib.nullcontext() if is_taken else pytest.raises(KvasirError):
                await give(b, peer.take_turn(), parent)

    asyncio.run(asyncio.wait_for(work(), 120))
    expected = ["handed over by laptop"] if is_taken else [""] if moves == "onto another agent" else []
    give_up = time.monotonic() + (20 if is_taken else 0)  # a busy machine may store it after its reader has its end
    while (turns := turns_of(studio, agent) if moves != "never" else []) != expected and time.monotonic() < give_up:
        time.sleep(0.05)
    assert turns == expected
    if not is_taken:
        assert _refused(other, agent) == "HANDOVER_NOT_MOVED"


@pytest.mark.long(5)
async def test_a_turn_whose_agent_another_move_took_first_speaks_to_its_end(pair: Macs) -> None:
    """That move waits for the turn, and wins when the engine lets the agent go."""
    (laptop, engine), (studio, other) = pair
    agent, more = "overtaken", [{"role": "user", "content": "And then?"}]

    def move() -> None:
        with laptop.client() as here:
            here.move_agent(agent, to_peer=studio.name)

    async with asyncio.timeout(60):
        async with AioInferenceClient.connect(engine.address) as a, AioInferenceClient.connect(other.address) as b:
            a.peers["b"] = b
            await hear(a, agent_id=agent, messages=[{"role": "user", "content": STORY}], sampling={"max_tokens": 4})
            kinds, tasks = list[str](), list[asyncio.Future[Any]]()
            sampling = {**ON, "max_tokens": 300}
            async with aclosing(a.generate(agent_id=agent, append_messages=more, sampling=sampling)) as events:
                async for event in events:
                    kinds.append(event.WhichOneof("event") or "")
                    if kinds.count("delta") == 5 and not tasks:
                        tasks.append(asyncio.ensure_future(asyncio.to_thread(move)))
                        await asyncio.sleep(0.05)
                        tasks.append(asyncio.ensure_future(a.hand_over("b", agent_id=agent)))
            assert kinds[-1] == "finished"
            moved, handed = await asyncio.gather(*tasks, return_exceptions=True)
            assert moved is None
            if "moved" not in kinds:  # else the engine's own move came first after all
                assert isinstance(handed, KvasirError)
    with laptop.client() as here:
        assert here.get_agent(agent).ownership.state == cachestore_pb2.OWNER_STATE_MOVED


@pytest.mark.parametrize("how", first_and_in_turn(["read_only", "branched"], seconds=2))
async def test_a_peers_turn_that_is_not_kept_lets_the_agent_speak(pair: Macs, how: str) -> None:
    """It is ready, and its giver keeps silent."""
    _, (_, other) = pair
    agent, mode = f"not kept waiting, {how}", inference_pb2.MEMORY_MODE_READ_ONLY if how == "read_only" else None
    branched = {"continuation": inference_pb2.CONTINUATION_BRANCHED} if how == "branched" else {}
    async with asyncio.timeout(60):
        token = (other.log_file.parent / "attic.token").read_text()
        async with (
            AioInferenceClient.connect(other.address) as b,
            AioTurnPeer.connect(other.address, token=token) as peer,
        ):
            await hear(b, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
            call = peer.take_turn()
            opening = opening_for(await b.get_model(), (await b.get_capabilities()).device)
            sampling = inference_pb2.Sampling(**ON)
            request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent, sampling=sampling, memory_mode=mode)
            await opened(call, opening, request=request, **branched)
            await call.send([pb.TakeTurnRequest(stand=stand())])
            taken = (await call.receive()).prepared.resume_token
            async with asyncio.timeout(30):
                await hear(b, agent_id=agent, prompt=PROMPT + " more", sampling={"max_tokens": 2})
            await call.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
            assert (await call.receive()).HasField("taken")
            assert [event async for event in b.resume(taken)][-1].HasField("finished")


@pytest.mark.parametrize("how", ["pulled", "moved"])
async def test_the_agents_own_turns_wait_for_no_turn_with_a_made_up_move(
    pair: Macs, new_agent: Callable[[], str], how: str
) -> None:
    """The agent came from that peer before, and its store owns it. The giver keeps silent."""
    (laptop, engine), (studio, other) = pair
    agent = new_agent()
    async with asyncio.timeout(60):
        token = (other.log_file.parent / "laptop.token").read_text()
        async with (
            AioInferenceClient.connect(engine.address) as a,
            AioInferenceClient.connect(other.address) as b,
            AioTurnPeer.connect(other.address, token=token) as peer,
        ):
            await hear(a, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
            with studio.client() as there:
                if how == "pulled":
                    there.pull_agent(laptop.name, agent)
                else:
                    there.move_agent(agent, from_peer=laptop.name)
                parent = there.get_agent(agent).lines[0].manifest
            opening = opening_for(await b.get_model(), (await b.get_capabilities()).device)
            sampling = inference_pb2.Sampling(**ON)
            request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent, sampling=sampling)
            calls = [peer.take_turn() for _ in range(3)]
            for call in calls:
                await opened(call, opening, request=request, parent_manifest=parent, move_id=secrets.token_hex(16))
                await call.send([pb.TakeTurnRequest(stand=stand())])
            await calls[0].receive()
            async with asyncio.timeout(30):
                await hear(b, agent_id=agent, prompt=PROMPT + " more", sampling={"max_tokens": 2})
    assert turns_of(studio, agent) == [""]


@pytest.mark.long(3)
async def test_a_peers_turn_waits_for_no_other_peers_word_and_is_ended_by_none(
    pair: Macs, new_agent: Callable[[], str]
) -> None:
    """Of three turns of one agent the one whose move brings it goes on. The first and the last are a third peer's."""
    (laptop, engine), (studio, other) = pair
    agent, move_id = new_agent(), secrets.token_hex(16)
    async with asyncio.timeout(60):
        tokens = [(other.log_file.parent / f"{name}.token").read_text() for name in ("attic", "laptop", "attic")]
        async with AsyncExitStack() as exits:
            connecting = [AioInferenceClient.connect(each.address) for each in (engine, other)]
            a, b = [await exits.enter_async_context(each) for each in connecting]
            linking = [AioTurnPeer.connect(other.address, token=token) for token in tokens]
            calls = [(await exits.enter_async_context(each)).take_turn() for each in linking]
            await hear(a, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
            with laptop.client() as here:
                parent = here.get_agent(agent).lines[0].manifest
            opening = opening_for(await b.get_model(), (await b.get_capabilities()).device)
            sampling = inference_pb2.Sampling(**ON)
            request = inference_pb2.GenerateRequest(prompt=PROMPT, agent_id=agent, sampling=sampling)
            resume_tokens = []
            for call, named in zip(calls, (secrets.token_hex(16), move_id, secrets.token_hex(16)), strict=True):
                await opened(call, opening, request=request, parent_manifest=parent, move_id=named)
                await call.send([pb.TakeTurnRequest(stand=stand())])
                resume_tokens.append((await call.receive()).prepared.resume_token)
            assert len(await b.list_turns()) == len(calls), "none has ended another"
            with laptop.client() as here:
                here.move_agent(agent, to_peer=studio.name, move_id=move_id)
            refused = await refusal(calls[0], [pb.TakeTurnRequest(commit=pb.TurnCommit())])
            assert refused.reason == "HANDOVER_NOT_MOVED"
            own = asyncio.create_task(hear(b, agent_id=agent, prompt=PROMPT + " more", sampling={"max_tokens": 2}))
            await calls[1].send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
            assert (await calls[1].receive()).HasField("taken")
            assert [event async for event in b.resume(resume_tokens[1])][-1].HasField("finished")
            assert (await own).reply.finished.snapshot.version == 3, "it follows the turn whose agent had come"
    assert turns_of(studio, agent) == ["", "handed over by laptop"]


@pytest.mark.parametrize("away_s", [0.0, pytest.param(7.0, marks=pytest.mark.long(9))])
def test_a_turn_waits_for_its_store_that_is_away_when_it_is_given(
    pair: Macs, new_agent: Callable[[], str], away_s: float
) -> None:
    """The agent has come, and the store is killed before the last word. Nobody else can go on with the turn."""
    (laptop, engine), (studio, other) = pair
    agent, move_id = new_agent(), secrets.token_hex(16)

    async def work() -> None:
        token = (other.log_file.parent / "laptop.token").read_text()
        async with (
            AioInferenceClient.connect(engine.address) as a,
            AioInferenceClient.connect(other.address) as b,
            AioTurnPeer.connect(other.address, token=token) as peer,
        ):
            await hear(a, agent_id=agent, prompt=PROMPT, sampling={"max_tokens": 2})
            with laptop.client() as here:
                parent = here.get_agent(agent).lines[0].manifest
            call, opening = peer.take_turn(), opening_for(await b.get_model(), (await b.get_capabilities()).device)
            request = inference_pb2.GenerateRequest(
                prompt=PROMPT, agent_id=agent, sampling=inference_pb2.Sampling(**ON)
            )
            await opened(call, opening, request=request, parent_manifest=parent, move_id=move_id)
            await call.send([pb.TakeTurnRequest(stand=stand())])
            resume_token = (await call.receive()).prepared.resume_token
            with laptop.client() as here:
                here.move_agent(agent, to_peer=studio.name, move_id=move_id)
            studio.kill()
            try:
                await call.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
                assert (await call.receive()).HasField("taken")
                await asyncio.sleep(away_s)
            finally:
                await asyncio.to_thread(studio.start)
            assert [event async for event in b.resume(resume_token)][-1].HasField("finished")

    asyncio.run(asyncio.wait_for(work(), 60))
    eventually(lambda: turns_of(studio, agent) == ["handed over by laptop"], 60)


def turns_of(mac: Mac, agent: str) -> list[str]:
    """Who handed over the versions that turns made."""
    with mac.client() as store:
        made = store.list_snapshots(agent).snapshots
    return [each.origin_detail for each in made if each.origin == cachestore_pb2.ORIGIN_TURN]


def _refused(engine: Service, agent: str) -> str:
    """Why the audit says that a turn of the agent was refused: a stream that is cut may not say so itself."""
    file = engine.log_file.with_name("audit")
    give_up = time.monotonic() + 60
    while True:
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        turns = [line for line in lines if line["what"].endswith("TakeTurn") and line.get("agent", "") == agent]
        for line in turns:
            if line["outcome"] == "refused":
                return str(line["reason"])
        assert time.monotonic() < give_up, turns
        time.sleep(0.05)

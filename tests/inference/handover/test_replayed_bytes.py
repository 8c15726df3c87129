"""The bytes of a hand-over, replayed, cut, doubled, reordered and changed: refused by name, or the very same turn."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.status import from_rpc_error

from tests.inference.handover.cases import ON
from tests.inference.handover.two_engines import TwoEngines, hear
from tests.made_models.sampling import sampled

REPLAYS = sampled(12, of=400)
SEED = int(os.environ.get("KVASIR_SEED", "1"))
TAKE_TURN = "/kvasir.inference.v1.HandOverService/TakeTurn"
PROMPT = "We met at the market this morning, and somebody gave the rest away. " * 20
_BUG, _BUGS = "a bug", (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands every call on, and keeps what was sent to TakeTurn."""

    def __init__(self, behind: grpc.aio.Channel) -> None:
        self._behind = behind
        self.sent: list[bytes] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._relay, details.method))

    async def _relay(self, method: str, given: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async def kept() -> AsyncIterator[bytes]:
            async for message in given:
                if method == TAKE_TURN:
                    self.sent.append(message)
                yield message

        async for answer in self._behind.stream_stream(method)(kept()):
            yield answer


async def recorded(two: TwoEngines, agent: str) -> tuple[list[bytes], str]:
    """What engine a sends when a turn moves to b in its middle, and what the turn said. `agent`: whose it is, or ""."""
    gone = two.b.address.rpartition("/")[0] + "/gone"
    async with grpc.aio.insecure_channel(two.b.address) as behind, two.clients() as (a, b):
        server, recorder = grpc.aio.server(), Recorder(behind)
        server.add_generic_rpc_handlers((recorder,))
        server.add_insecure_port(gone)
        await server.start()
        try:
            a.peers["gone"] = b
            heard = await hear(a, {3: (a, "gone")}, agent_id=agent, prompt=PROMPT, sampling=ON)
        finally:
            await server.stop(None)
        assert [len(heard.moves), heard.not_moved] == [1, []]
        return recorder.sent, heard.reply.text


def changed(sent: list[bytes], others: list[bytes], chance: random.Random) -> tuple[str, list[bytes]]:
    """The messages, in one way not as they were."""
    how = chance.choice(("replayed", "cut", "doubled", "swapped", "mixed", "flipped", "shortened"))
    place, other = chance.randrange(len(sent)), chance.randrange(len(sent))
    made = list(sent)
    if how == "cut":
        del made[place:]
    elif how == "doubled":
        made.insert(place, sent[place])
    elif how == "swapped":
        made[place], made[other] = made[other], made[place]
    elif how == "mixed":
        made[place] = chance.choice(others)
    elif how == "flipped" and made[place]:
        data, at = bytearray(made[place]), chance.randrange(len(made[place]))
        data[at] ^= 1 << chance.randrange(8)
        made[place] = bytes(data)
    elif how == "shortened":
        made[place] = made[place][: chance.randrange(len(made[place]) + 1)]
    return how, made


def sent_again(two: TwoEngines, messages: list[bytes]) -> tuple[str, str]:
    """How the engine answers them: its refusal, or "taken"; and the token for the rest."""
    token = ""
    with grpc.insecure_channel(two.b.address) as channel:  # an aio call whose write fails hides the answer
        take = channel.stream_stream(TAKE_TURN, response_deserializer=pb.TakeTurnResponse.FromString)
        try:
            for answer in take(iter(messages), timeout=60):
                token = answer.prepared.resume_token or token
                if answer.HasField("taken"):
                    return "taken", token
        except grpc.RpcError as error:
            return _BUG if error.code() in _BUGS else from_rpc_error(error).reason, token
    return "ended", token


async def until_idle(b: AioInferenceClient) -> None:
    for _ in range(3000):
        if not await b.list_turns():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a replayed turn does not end")


@pytest.mark.long(12)
@pytest.mark.timeout(3600)
async def test_replayed_bytes_of_a_hand_over_are_refused_by_name_or_are_the_same_turn(
    two: TwoEngines, new_agent: Callable[[], str]
) -> None:
    chance, counts = random.Random(SEED), Counter[str]()
    agent = new_agent()
    told = [await recorded(two, agent), await recorded(two, "")]
    others, _ = await recorded(two, new_agent())
    async with AioInferenceClient.connect(two.b.address) as b:
        calm = await hear(b, prompt=PROMPT[:60], sampling=ON)
        versions = await b.list_snapshots(agent)
        for number in range(REPLAYS):
            sent, said = chance.choice(told)
            how, messages = changed(sent, others, chance)
            answer, token = await asyncio.to_thread(sent_again, two, messages)
            counts[f"{how} {answer}"] += 1
            assert answer != _BUG, f"seed {SEED}, {number}: {how}\n{two.b.log[-4000:]}"
            if answer == "taken":
                rest = "".join([event.delta.text async for event in b.resume(token)])
                assert how == "flipped" or said.endswith(rest), f"seed {SEED}, {number}: {how}"
            await until_idle(b)
        assert await b.list_snapshots(agent) == versions, "no replay made a version of the agent"
        again = await hear(b, prompt=PROMPT[:60], sampling=ON)
        assert again.told == calm.told
    print(f"{REPLAYS} replays, seed {SEED}: {dict(sorted(counts.items()))}")

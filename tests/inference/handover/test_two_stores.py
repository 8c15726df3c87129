"""An agent that speaks moves to another Mac: its turn to the engine there, its memory to the store, both at once."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.errors import KvasirError

from inference_svc.model import kvasir_tiny
from tests.cachestore.moving.two_stores import Mac, macs
from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.two_engines import hear
from tests.system_fixtures import ENGINE_SERVICE, Service


@contextmanager
def two_macs(root: Path) -> Iterator[tuple[tuple[Mac, Service], tuple[Mac, Service]]]:
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
        engines[0].options += ["--peer", f"b={engines[1].address}", "--peer-store", f"b={stores[1].name}"]
        for engine in engines:
            engine.start()
        yield (stores[0], engines[0]), (stores[1], engines[1])


def test_the_agent_has_one_owner_and_its_reader_heard_nothing_of_it(tmp_path: Path) -> None:
    with two_macs(tmp_path) as ((laptop, engine), (studio, other)):

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

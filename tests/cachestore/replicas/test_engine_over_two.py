"""An engine before two stores of one memory: when the one that it uses is killed in the middle of a turn, it goes on by
the other, and so does an engine that begins there.
"""

from pathlib import Path

import pytest
from kvasir.clients import InferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.model import kvasir_tiny
from tests.cachestore.bucket.test_over_s3 import pytestmark  # noqa: F401
from tests.cachestore.replicas.processes import replicas_in
from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import RunningStore
from tests.running import in_memory
from tests.running.postgres import PostgresServer
from tests.running.system_fixtures import ENGINE_SERVICE, Service, running_house
from tests.running.waiting import eventually

WORDS = ("My name is Anna.", "My dog is called Rex.", "What is my dog called?", "What is my name?")
SAMPLING = {"temperature": 0.0, "max_tokens": 24}


def _tokens_of(client: InferenceClient, words: str) -> list[int]:
    reply = client.reply(agent_id="ada", append_messages=[{"role": "user", "content": words}], sampling=SAMPLING)
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    return list(reply.token_ids)


def _head_at(store: RunningStore) -> int:
    with store.client() as client:
        return client.get_snapshot("ada")[0].version


@pytest.mark.long(9)
def test_an_engine_whose_store_is_killed_amid_a_turn_stores_it_by_the_other(
    tmp_path: Path,
    postgres: PostgresServer,
    credentials: Path,
) -> None:
    with running_house(tmp_path / "stayed") as house, house.client() as client:
        stayed = [_tokens_of(client, words) for words in WORDS]
    sockets = in_memory.home()
    with replicas_in(tmp_path, postgres, credentials) as replicas:
        a, b = replicas.start("a"), replicas.start("b")
        with proxy_to(a.address, sockets / "s") as door:
            engine = Service("engine", "inference_svc", ENGINE_SERVICE, sockets / "e", tmp_path / "engine.log")
            engine.options = ["--store", door.address, "--model", str(kvasir_tiny.path())]
            engine.options += ["--state-dir", str(tmp_path / "state"), "--store-budget-ms", "5000"]
            engine.options += ["--commit-wait-s", "20"]
            engine.start()
            try:
                with InferenceClient.connect(engine.address) as client:
                    assert _tokens_of(client, WORDS[0]) == stayed[0]
                    turn = client.generate(
                        agent_id="ada",
                        append_messages=[{"role": "user", "content": WORDS[1]}],
                        sampling=SAMPLING,
                    )
                    while not next(turn).HasField("delta"):
                        pass
                    a.kill()
                    door.target = b.address  # as a balancer does
                    *_, last = turn
                    assert last.HasField("finished")
                    eventually(lambda: _head_at(b) == 2, within_s=60)  # at once, or in the background
                    assert _tokens_of(client, WORDS[2]) == stayed[2]
                engine.kill()
                engine.start()
                with InferenceClient.connect(engine.address) as client:
                    assert _tokens_of(client, WORDS[3]) == stayed[3]
            finally:
                engine.kill()
        assert _head_at(b) == 4

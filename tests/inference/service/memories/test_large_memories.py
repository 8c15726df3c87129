"""A memory is stored whatever its size: slowly if the store is slow, again if it failed, and as each turn left it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.clients import Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.service.stores.slow_link import SlowLink
from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

# With 16 bits a value a block has 8.4 MB, a piece two of them, and a memory of LONG 25 MB.
WIDE = {
    **LLAMA,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
GREEDY = {"max_tokens": 6, "stop_token_ids": []}
LONG = "The archive lists every door by its key; the seventh key is missing since the flood of spring. " * 20
MORE = "Who keeps the key? Answer with a name, and say where it is kept. "
TRICKLE = 2e6  # bytes a second: most of a memory is left when its turn ends
LARGE_BYTES = 26_000_000  # of a memory of LONG, about
# There is room for one copy at a time, a reader waits a moment only, and a store that takes nothing is given up soon.
SIXTEEN_BITS = ("--kv-policy", "fp")
STRICT = ("--max-publishing-bytes", "1000", "--commit-wait-s", "0.2", "--publish-timeout-s", "4", "--stop-grace-s", "1")


class Slow(House):
    """A house whose engine reaches its store by a link."""

    def __init__(self, root: Path, model: Path, *more: str) -> None:
        super().__init__(root, model, engine_options=(*SIXTEEN_BITS, *STRICT, *more))
        store_socket = Path(self.store.address.removeprefix("unix:"))
        self.link = SlowLink(store_socket.with_name("slow"), store_socket)
        self.engine.options += ["--store", self.link.address]

    def close(self) -> None:
        self.link.close()
        super().close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "wide", WIDE)


@pytest.fixture
def house(wide: Path, tmp_path: Path) -> Iterator[Slow]:
    house = Slow(tmp_path, wide)
    try:
        house.start()
        yield house
    finally:
        house.close()


@pytest.fixture(scope="module")
def plain(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Nothing disturbs it: what it stores and says is what is expected."""
    with running_house(tmp_path_factory.mktemp("plain"), wide, engine_options=SIXTEEN_BITS) as house:
        yield house


def turn(house: House, agent: str, text: str) -> Reply:
    with house.client() as client:
        return client.reply(agent_id=agent, append_messages=[{"role": "user", "content": text}], sampling=GREEDY)


def version(house: House, agent: str) -> int:
    with house.store_client() as store:
        lines = [line for each in store.list_agents(name_prefix=agent).agents for line in each.lines]
    return max((int(line.version) for line in lines), default=0)


def stored(house: House, agent: str, number: int) -> list[str]:
    """Digests of all files of a version."""
    with house.store_client() as store:
        identity = store.get_agent(agent).lines[0].kv_identity_hash
        _, data = store.get_snapshot(agent, identity, number)
    parsed = manifest.parse(data)
    return [*(block.hash for block in parsed.blocks), parsed.tail.hash]


def counted(house: House) -> pb.NamespaceStats:
    with house.client() as client:
        return client.get_stats().namespaces[0]


def check_restored(house: House, plain: House, agent: str, twin: str) -> None:
    """After both were killed the agent goes on as the one that nothing disturbed."""
    house.link.bulk_bytes_per_s = None  # type: ignore[attr-defined]
    house.restart()
    reply, expected = turn(house, agent, MORE), turn(plain, twin, MORE)
    assert reply.started.source == pb.CACHE_SOURCE_WARM
    assert reply.token_ids == expected.token_ids


@pytest.mark.long(14)
def test_a_memory_far_larger_than_what_may_wait_is_stored_by_a_slow_store(house: Slow, plain: House) -> None:
    """It takes longer than the reader waits, and longer than a store may take nothing at all."""
    expected = turn(plain, "large", LONG)
    house.link.bulk_bytes_per_s = TRICKLE
    reply = turn(house, "large", LONG)
    assert reply.token_ids == expected.token_ids
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    began = counted(house)
    assert began.owed_memories == 1
    assert began.owed_bytes > 5e6
    house.link.bulk_bytes_per_s = 20e6
    eventually(lambda: version(house, "large") == 1)
    eventually(lambda: not counted(house).owed_memories)
    assert counted(house).made_good == {"pending": 1}
    assert counted(house).publications == {"pending": 1, "committed": 1}
    assert stored(house, "large", 1) == stored(plain, "large", 1)
    check_restored(house, plain, "large", "large")


@pytest.mark.long(17)
def test_a_turn_that_begins_while_its_memory_is_still_copied_leaves_both_as_they_were(
    house: Slow, plain: House
) -> None:
    for text in (LONG, MORE):
        turn(plain, "both", text)
    house.link.bulk_bytes_per_s = TRICKLE
    turn(house, "both", LONG)
    second = turn(house, "both", MORE)
    assert second.started.source == pb.CACHE_SOURCE_HOT
    assert second.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    assert version(house, "both") == 0
    house.link.bulk_bytes_per_s = 20e6
    eventually(lambda: version(house, "both") == 2)
    for number in (1, 2):
        assert stored(house, "both", number) == stored(plain, "both", number)
    # What the first one had sent was not sent again.
    assert counted(house).published_bytes < 1.3 * LARGE_BYTES
    check_restored(house, plain, "both", "both")


@pytest.mark.long(20)
@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_store_that_goes_in_the_middle_of_a_large_memory_gets_all_of_it(how: str, house: Slow, plain: House) -> None:
    agent = f"store {how}"
    turn(plain, agent, LONG)
    house.link.bulk_bytes_per_s = TRICKLE
    turn(house, agent, LONG)
    if how == "killed":
        house.store.kill()
        house.store.start()
    else:
        house.store.freeze()
        time.sleep(5)  # longer than a store may take nothing: the publication fails
        house.store.thaw()
    house.link.bulk_bytes_per_s = None
    eventually(lambda: version(house, agent) == 1)
    assert stored(house, agent, 1) == stored(plain, agent, 1)
    assert sum(counted(house).made_good.values()) == 1
    check_restored(house, plain, agent, agent)


@pytest.mark.long(2)
def test_a_memory_that_failed_is_stored_once_the_store_has_room(model: Path, tmp_path: Path) -> None:
    house = House(tmp_path, model)
    house.store.options += ["--quota-bytes", "20000"]
    try:
        house.start()
        reply = turn(house, "quota", LONG)
        assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_FAILED
        assert "ResourceExhausted" in reply.finished.snapshot.reason
        assert counted(house).owed_memories == 1
        house.store.kill()
        house.store.options = house.store.options[:-2]
        house.store.start()
        eventually(lambda: version(house, "quota") == 1)
        eventually(lambda: not counted(house).owed_memories)
        assert counted(house).publications == {"failed": 1, "committed": 1}
        assert counted(house).made_good == {"failed": 1}
        assert "snapshot.made_good" in house.engine.log
    finally:
        house.close()


@pytest.mark.long(16)
def test_a_memory_is_stored_before_another_takes_its_room(wide: Path, tmp_path: Path, plain: House) -> None:
    for agent in ("first", "second"):
        turn(plain, agent, agent + LONG)
    house = Slow(tmp_path, wide, "--memory-gib", str(1.5 * LARGE_BYTES / 2**30))
    try:
        house.start()
        house.link.bulk_bytes_per_s = TRICKLE
        turn(house, "first", "first" + LONG)
        house.link.bulk_bytes_per_s = 12e6
        turn(house, "second", "second" + LONG)  # waits for the room of the first one
        eventually(lambda: version(house, "second") == 1)
        for agent in ("first", "second"):
            assert stored(house, agent, 1) == stored(plain, agent, 1)
        check_restored(house, plain, "first", "first")
    finally:
        house.close()


@pytest.mark.long(6)
def test_an_engine_that_is_stopped_stores_what_it_owes(house: Slow, plain: House) -> None:
    """For as long as something moves: its grace alone would be too short."""
    turn(plain, "stopped", LONG)
    house.link.bulk_bytes_per_s = TRICKLE
    turn(house, "stopped", LONG)
    assert version(house, "stopped") == 0
    house.link.bulk_bytes_per_s = 12e6
    assert house.engine.stop(60) == 0
    assert version(house, "stopped") == 1
    assert stored(house, "stopped", 1) == stored(plain, "stopped", 1)

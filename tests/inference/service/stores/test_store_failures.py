"""A store that is dead, hung, slow, full or wrong is a miss: the tokens are the same."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir.clients import InferenceClient, Reply
from kvasir.errors import Unavailable
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.cli.running import in_process
from tests.inference.service.stores.slow_link import SlowLink
from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

AS_SHIPPED = ("--store-budget-ms", "250", "--commit-wait-s", "2")
GREEDY = {"max_tokens": 8}
PASSAGE = "The archive lists every door by its key; the seventh key is missing since the flood of spring. " * 24
BLOCK_TOKENS = 256


def conversation(house: House, agent: str, turns: int = 2) -> list[Reply]:
    """The same words for every agent, so that its replies can be compared."""
    with house.client() as client:
        first = client.reply(agent_id=agent, messages=[{"role": "user", "content": PASSAGE}], sampling=GREEDY)
        return [first, *(ask(house, agent) for _ in range(turns - 1))]


def ask(house: House, agent: str) -> Reply:
    question = [{"role": "user", "content": "Which key is missing, and since when?"}]
    with house.client() as client:
        return client.reply(agent_id=agent, append_messages=question, sampling=GREEDY)


def cold_turn(house: House, agent: str, text: str) -> Reply:
    """A new agent's first turn."""
    with house.client() as client:
        return client.reply(agent_id=agent, prompt=text, sampling=GREEDY)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("failures"), model) as house:
        yield house


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    """A house in order, before and after."""
    yield shared
    shared.repair()


@pytest.fixture(scope="module")
def strict(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("strict"), model, engine_options=AS_SHIPPED) as house:
        yield house


def test_a_turn_without_a_store_has_the_tokens_of_one_with_it(house: House) -> None:
    house.store.kill()
    lost = cold_turn(house, "alone", f"alone: {PASSAGE}")
    assert lost.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    house.repair()
    found = cold_turn(house, "not alone", f"alone: {PASSAGE}")
    assert found.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    assert found.token_ids == lost.token_ids


@pytest.mark.long(4)
@pytest.mark.parametrize("failure", ["dead", "hung"])
def test_one_turn_finds_that_a_store_is_dead_or_hung_and_no_turn_loses_a_token(failure: str, strict: House) -> None:
    # Each text begins with words of its own, so that no block of another agent serves it.
    texts = {name: f"{failure} {name}: {PASSAGE}" for name in ("a", "b", "c")}
    strict.store.kill() if failure == "dead" else strict.store.freeze()
    lost = {name: cold_turn(strict, f"{failure} lost {name}", f"!{text}") for name, text in texts.items()}
    if failure == "hung":
        strict.store.thaw()
    strict.repair()
    first, *later = [reply.started.miss for reply in lost.values()]
    assert first in (pb.MISS_REASON_STORE_UNREACHABLE, pb.MISS_REASON_STORE_TIMEOUT)
    assert set(later) == {pb.MISS_REASON_STORE_UNREACHABLE}, "known to be away, it is not asked"
    for name, reply in lost.items():
        assert reply.started.source == pb.CACHE_SOURCE_COLD
        assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
        assert "cannot be reached" in reply.finished.snapshot.reason
        with_store = cold_turn(strict, f"{failure} again {name}", f"!{texts[name]}")
        assert with_store.token_ids == reply.token_ids


@pytest.mark.long(4)
def test_a_store_that_hangs_while_a_turn_runs_delays_its_last_message_by_the_commit_wait_and_no_token(
    strict: House,
) -> None:
    with strict.client() as client:
        reply = Reply()
        events = client.generate(agent_id="hangs", prompt=f"hangs: {PASSAGE}", sampling={"max_tokens": 200})
        while not reply.token_ids:
            reply.add(next(events))
        strict.store.freeze()
        for event in events:
            reply.add(event)
        strict.store.thaw()
    assert len(reply.token_ids) == reply.finished.usage.completion_tokens
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    with strict.store_client() as store:
        eventually(lambda: [agent.agent_id for agent in store.list_agents(name_prefix="hangs").agents] == ["hangs"], 20)
    strict.repair()


@pytest.mark.long(5)
def test_an_agent_goes_on_from_hot_memory_without_its_store_and_is_stored_when_it_is_back(house: House) -> None:
    expected = conversation(house, "reference", 3)
    replies = conversation(house, "left alone")
    house.store.kill()
    replies.append(ask(house, "left alone"))
    assert replies[-1].started.source == pb.CACHE_SOURCE_HOT
    assert replies[-1].finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]
    house.store.start()
    with house.store_client() as store:
        eventually(lambda: store.get_agent("left alone").lines[0].version >= 3, 60)


def test_a_turn_that_appends_waits_longer_than_others_for_a_store_that_is_late(strict: House) -> None:
    """As when many turns begin at once on a busy machine."""
    strict.store.freeze()
    thaw = threading.Timer(0.6, strict.store.thaw)
    thaw.start()
    try:
        reply = ask(strict, "late")
    finally:
        thaw.join()
    assert reply.started.miss == pb.MISS_REASON_NEW_AGENT
    assert reply.finished.timings.restore.ToMilliseconds() > 250, "the wait is counted"


@pytest.mark.long(5)
def test_a_copy_has_the_newest_turn_or_is_refused_while_that_is_not_stored(house: House) -> None:
    conversation(house, "copied")
    house.store.kill()
    pending = ask(house, "copied")
    assert pending.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    with InferenceClient.connect(house.engine.address, timeout_s=2.0) as hasty:
        for copy in (
            lambda: hasty.fork_agent("copied", "no fork"),
            lambda: list(hasty.export_agent("copied", timeout_s=2.0)),
        ):
            with pytest.raises(Unavailable) as refused:
                copy()
            assert refused.value.reason == "MEMORY_NOT_STORED"
    with house.client() as client, ThreadPoolExecutor(1) as waiting:
        fork = waiting.submit(client.fork_agent, "copied", "fork")
        house.store.start()
        assert fork.result().lines[0].token_count == pending.finished.memory_tokens


@pytest.mark.long(3)
def test_appending_to_a_memory_that_cannot_be_read_is_refused_and_not_another_conversation(house: House) -> None:
    conversation(house, "far away")
    house.kill()
    house.engine.start()
    with pytest.raises(Unavailable) as refused:
        ask(house, "far away")
    assert refused.value.reason == "MEMORY_UNREADABLE"
    assert refused.value.retry_after_s


def damage(house: House, how: str, blob: str) -> None:
    (path,) = house.data_dir.rglob(blob)
    if how == "missing":
        path.unlink()
        return
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data[: len(data) // 2] if how == "truncated" else data))


def newest_blocks(house: House, agent: str) -> list[str]:
    with house.store_client() as store:
        _, data = store.get_snapshot(agent)
    parsed = manifest.parse(data)
    return [*(block.hash for block in parsed.blocks), parsed.tail.hash]


@pytest.mark.long(8)
def test_a_damaged_block_costs_a_prefill_from_the_stored_tokens_and_nothing_else(house: House) -> None:
    damages = (("flipped", 0), ("flipped", -1), ("truncated", 1), ("missing", 0), ("missing", -1))
    cases = {f"{how} {which}": (how, which) for how, which in damages}
    expected, blocks = {}, {}
    with house.client() as client:
        for agent in cases:
            # Words of its own, so that its blocks are nobody else's.
            first = [{"role": "user", "content": f"{agent}: {PASSAGE}"}]
            for name in (agent, f"{agent} twin"):
                client.reply(agent_id=name, messages=first, sampling=GREEDY)
            expected[agent] = [ask(house, f"{agent} twin").token_ids for _ in range(2)]
            blocks[agent] = newest_blocks(house, agent)
            assert len(blocks[agent]) > 2
    house.engine.kill()
    for agent, (how, which) in cases.items():
        damage(house, how, blocks[agent][which])
    house.engine.start()
    for agent, (_, which) in cases.items():
        reply = ask(house, agent)
        assert reply.token_ids == expected[agent][0], agent
        assert reply.started.miss in (pb.MISS_REASON_BLOB_DAMAGED, pb.MISS_REASON_BLOB_MISSING), agent
        assert reply.started.cached_tokens == (which % len(blocks[agent])) * BLOCK_TOKENS, agent
        assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED, agent
    with house.client() as client:
        assert sum(client.get_stats().namespaces[0].misses.values()) == len(cases)
    # What was stored after the damage is whole: the next engine finds all of it.
    house.engine.kill()
    house.engine.start()
    for agent in cases:
        reply = ask(house, agent)
        assert reply.token_ids == expected[agent][1], agent
        assert not reply.started.reason, agent
        assert reply.started.source == pb.CACHE_SOURCE_WARM, agent


@pytest.mark.long(3)
def test_a_hot_agent_whose_stored_block_was_lost_stores_it_again(house: House) -> None:
    agent = "hot and damaged"
    first = [{"role": "user", "content": f"{agent}: {PASSAGE}"}]
    with house.client() as client:
        client.reply(agent_id=agent, messages=first, sampling=GREEDY)
    damage(house, "flipped", newest_blocks(house, agent)[0])
    with house.store_client() as store:
        assert [digest for report in store.verify_blobs(agent) for digest in report.damaged]
    hot = ask(house, agent)
    assert (hot.started.source, hot.started.reason) == (pb.CACHE_SOURCE_HOT, "")
    assert hot.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    house.engine.kill()
    house.engine.start()
    warm = ask(house, agent)
    assert (warm.started.source, warm.started.reason) == (pb.CACHE_SOURCE_WARM, "")


@pytest.mark.long(5)
def test_a_full_store_fails_the_snapshot_with_the_reason_and_not_the_turn(model: Path, tmp_path: Path) -> None:
    house = House(tmp_path, model)
    house.store.options += ["--quota-bytes", "20000"]
    try:
        house.start()
        replies = conversation(house, "too large", 2)
        for reply in replies:
            assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_FAILED
            assert "ResourceExhausted" in reply.finished.snapshot.reason
        assert replies[1].started.source == pb.CACHE_SOURCE_HOT
        with house.client() as client, pytest.raises(Unavailable) as refused:
            client.fork_agent("too large", "no fork")
        assert refused.value.reason == "MEMORY_NOT_STORED"
    finally:
        house.close()


@pytest.mark.long(3)
@pytest.mark.parametrize("form", ["archive", "seed"])
def test_a_file_has_the_newest_turn_or_is_refused_while_that_is_not_stored(
    form: str, model: Path, tmp_path: Path
) -> None:
    house, file = House(tmp_path, model), tmp_path / "ada"
    at = ("--home", tmp_path / "home", "--engine", house.engine.address, "--address", house.store.address)
    try:
        house.start()
        conversation(house, "ada")
        with house.store_client() as store:
            stored_bytes = store.get_usage().blob_bytes
        house.store.kill()
        house.store.options += ["--quota-bytes", str(stored_bytes + 1)]
        house.repair()
        assert in_process(*at, "agents", "export", "ada", file, "--format", form).code == 0
        assert ask(house, "ada").finished.snapshot.state == pb.SNAPSHOT_STATE_FAILED
        refused = in_process(*at, "--json", "agents", "export", "ada", file, "--force", "--format", form)
        assert "MEMORY_NOT_STORED" in refused.out
    finally:
        house.close()


@pytest.mark.long(4)
def test_a_slow_store_is_a_miss_and_what_came_in_time_is_used(model: Path, tmp_path: Path) -> None:
    house = House(tmp_path, model, engine_options=AS_SHIPPED)
    store_socket = Path(house.store.address.removeprefix("unix:"))
    link = SlowLink(store_socket.with_name("slow"), store_socket)
    house.engine.options += ["--store", link.address]
    try:
        house.start()
        expected = conversation(house, "twin", 2)[1]
        conversation(house, "slow", 1)
        house.engine.kill()
        house.engine.start()
        with house.client() as client:
            client.reply(prompt="warm up", sampling=GREEDY)
            link.bytes_per_s = 600_000  # a few blocks, and not all of them, within 250 ms
            reply = ask(house, "slow")
        assert reply.started.miss == pb.MISS_REASON_STORE_TIMEOUT
        assert reply.token_ids == expected.token_ids
    finally:
        link.close()
        house.close()


@pytest.mark.long(2)
def test_an_engine_that_starts_beside_its_store_is_ready_when_it_has_found_it(house: House) -> None:
    house.kill()
    house.engine.options += ["--store-wait-s", "60"]
    try:
        engine = threading.Thread(target=house.engine.start)
        engine.start()
        engine.join(1.5)  # it would be ready by then: the model is small
        assert engine.is_alive()
        house.store.start()
        engine.join()
        assert conversation(house, "beside", turns=1)[0].finished.snapshot.version == 1
    finally:
        house.engine.options = house.engine.options[:-2]

"""Blocks of another engine's KV in a store: found by their tokens, read to the byte, shared, and forgotten in order."""

import os
import random
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import StoreClient
from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable
from kvasir.formats.block_hash import chain_hashes
from kvasir.formats.digest import Digest
from kvasir.store_for_vllm import stored_kv
from kvasir.store_for_vllm.reading import Load, Read, Reading
from kvasir.store_for_vllm.stored_kv import StoredKv

from tests.cachestore.service.running import RunningStore, store_home

_LAYERS = (64, 32)  # bytes of a token


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with store_home(tmp_path_factory.mktemp("h")) as home:
        yield home.start()


@pytest.fixture
def client(store: RunningStore) -> Iterator[StoreClient]:
    with StoreClient.connect(store.address) as made:
        for agent in made.list_agents().agents:
            made.delete_agent(agent.agent_id)
        yield made


def _kv(client: StoreClient, model: str, keep: int = 64) -> StoredKv:
    return StoredKv(client, model, _LAYERS, keep)


def _tokens(seed: int, blocks: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(256 * blocks)]


def _blocks(seed: int, *numbers: int) -> dict[int, list[bytes]]:
    return {
        each: [random.Random(f"{seed} {each} {size}").randbytes(size * 256) for size in _LAYERS] for each in numbers
    }


def _read(kv: StoredKv, tokens: list[int]) -> dict[int, list[bytes]]:
    found = dict(enumerate(kv.find(tokens)))
    return {number: [bytes(layer) for layer in layers] for number, layers in kv.read(tokens, found)}


def test_a_prompt_is_found_by_its_tokens_in_another_process_and_has_the_same_bytes(client: StoreClient) -> None:
    tokens, blocks = _tokens(1, 3), _blocks(1, 0, 1, 2)
    _kv(client, "a").save(tokens, blocks)
    again = _kv(client, "a")
    assert _read(again, [*tokens, 5]) == blocks
    assert _read(again, [*tokens[:700], 0]) == {0: blocks[0], 1: blocks[1]}
    assert [number for number, _ in again.read(tokens, {2: again.find(tokens)[2]})] == [2]


@pytest.mark.parametrize("other", ["another model", "another layout"])
def test_no_other_model_finds_it(client: StoreClient, other: str) -> None:
    tokens = _tokens(2, 1)
    _kv(client, "b").save(tokens, _blocks(2, 0))
    stranger = _kv(client, "c") if other == "another model" else StoredKv(client, "b", _LAYERS[::-1], 9)
    assert _read(_kv(client, "b"), tokens)
    assert stranger.find(tokens) == []


def test_a_longer_prompt_takes_the_place_of_its_beginning_and_shares_its_blocks(client: StoreClient) -> None:
    kv, tokens, blocks = _kv(client, "d"), _tokens(3, 3), _blocks(3, 0, 1, 2)
    kv.save(tokens[:512], {0: blocks[0], 1: blocks[1]})
    kv.save(tokens, {2: blocks[2]})
    assert [len(agent.lines) for agent in client.list_agents().agents] == [1]
    branch = [*tokens[:512], *_tokens(4, 1)]
    kv.save(branch, _blocks(4, 2))
    assert len(client.list_agents().agents) == 2
    assert _read(kv, branch) == {0: blocks[0], 1: blocks[1], **_blocks(4, 2)}


def test_the_oldest_of_too_many_go_those_of_earlier_processes_first(client: StoreClient) -> None:
    before = _kv(client, "e", keep=2)
    for seed in (5, 6):
        before.save(_tokens(seed, 1), _blocks(seed, 0))
    after = _kv(client, "e", keep=2)
    after.save(_tokens(7, 1), _blocks(7, 0))
    assert len(client.list_agents().agents) == 2
    assert _read(after, _tokens(7, 1)) == _blocks(7, 0)


def test_a_clock_that_was_set_back_drops_no_new_prompt(client: StoreClient) -> None:
    seconds = iter(range(2_000_000_000, 0, -86_400))
    kv = StoredKv(client, "back", _LAYERS, keep=2, clock=lambda: next(seconds))
    for seed in (31, 32, 33):
        kv.save(_tokens(seed, 1), _blocks(seed, 0))
    newest = [kv._prefix + chain_hashes(kv._hash, _tokens(seed, 1))[-1][:32] for seed in (32, 33)]
    assert {agent.agent_id for agent in client.list_agents().agents} == {*newest}


def test_of_many_prompts_of_earlier_processes_few_go_at_once_and_few_are_known(client: StoreClient) -> None:
    before = _kv(client, "m")
    for seed in range(40):
        before.save(_tokens(100 + seed, 1), _blocks(100 + seed, 0))
    after = _kv(client, "m", keep=2)
    left = []
    for seed in range(4):
        after.save(_tokens(200 + seed, 1), _blocks(200 + seed, 0))
        left.append(len(client.list_agents().agents))
        assert len(after._kept or ()) <= 2
    assert left == [25, 9, 2, 2]
    assert _read(after, _tokens(203, 1)) == _blocks(203, 0)


def test_a_prompt_that_cannot_go_yet_holds_up_no_other_and_goes_later(client: StoreClient) -> None:
    kv = _kv(client, "p", keep=1)
    kv.save(_tokens(20, 1), _blocks(20, 0))
    [pinned] = client.list_agents().agents
    client.update_agent(pinned.agent_id, is_pinned=True)
    for seed in (21, 22):
        kv.save(_tokens(seed, 1), _blocks(seed, 0))
    assert len(client.list_agents().agents) == 2
    client.update_agent(pinned.agent_id, is_pinned=False)
    kv.save(_tokens(23, 1), _blocks(23, 0))
    assert len(client.list_agents().agents) == 1
    assert _read(kv, _tokens(23, 1)) == _blocks(23, 0)


def test_a_prompt_whose_delete_did_not_reach_the_store_goes_with_the_next(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = _kv(client, "q", keep=1)
    kv.save(_tokens(24, 1), _blocks(24, 0))
    with monkeypatch.context() as patch:
        patch.setattr(client, "delete_agent", lambda _: (_ for _ in ()).throw(Unavailable("a link that was cut")))
        with pytest.raises(Unavailable):
            kv.save(_tokens(25, 1), _blocks(25, 0))
    kv.save(_tokens(26, 1), _blocks(26, 0))
    assert len(client.list_agents().agents) == 1


def test_a_prompt_that_another_process_stored_is_no_failure_and_its_beginning_need_not_be_sent(
    client: StoreClient,
) -> None:
    tokens, blocks = _tokens(8, 2), _blocks(8, 0, 1)
    _kv(client, "f").save(tokens[:256], {0: blocks[0]})
    _kv(client, "f").save(tokens[:256], {0: blocks[0]})
    other = _kv(client, "f")
    other.save(tokens, {1: blocks[1]})
    assert _read(other, tokens) == blocks


def test_a_prompt_whose_beginning_is_not_stored_is_left_out(client: StoreClient) -> None:
    kv, tokens = _kv(client, "g"), _tokens(9, 2)
    kv.save(tokens, _blocks(9, 1))
    assert kv.find(tokens) == []
    assert not client.list_agents().agents


def test_it_remembers_as_many_blocks_as_it_may_and_finds_the_others(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_kv, "_MOST_DIGESTS", 3)
    kv, prompts = _kv(client, "j"), {seed: _tokens(seed, 3) for seed in (12, 13, 14)}
    for seed, tokens in prompts.items():
        kv.save(tokens[:512], _blocks(seed, 0, 1))
    for seed, tokens in prompts.items():
        kv.save(tokens, _blocks(seed, 2))
        assert _read(kv, tokens) == _blocks(seed, 0, 1, 2)
        assert len(kv._digests) == 3


def test_a_block_that_the_store_let_go_is_not_relied_on_twice(client: StoreClient) -> None:
    kv, tokens = _kv(client, "k"), _tokens(15, 2)
    kv.save(tokens[:256], _blocks(15, 0))
    kv._digests = OrderedDict.fromkeys(kv._digests, Digest.of(b"it went since"))
    with pytest.raises(FailedPrecondition):
        kv.save(tokens, _blocks(15, 1))
    kv.save(tokens, _blocks(15, 1))
    assert _read(kv, tokens) == _blocks(15, 0, 1)


def test_bytes_of_other_tokens_are_refused(client: StoreClient) -> None:
    kv, tokens, others = _kv(client, "h"), _tokens(10, 1), _tokens(11, 1)
    kv.save(tokens, _blocks(10, 0))
    with pytest.raises(DataLoss, match="not block 0 of these tokens"):
        list(kv.read(others, {0: kv.find(tokens)[0]}))


@pytest.mark.parametrize("sizes", [(), (0,), (3,), (4, -2)])
def test_layers_that_no_block_can_hold_are_refused_by_name(client: StoreClient, sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        StoredKv(client, "i", sizes, 1)
    assert refused.value.field == "token_bytes"


class _Lying(cachestore_pb2_grpc.CacheStoreServiceServicer):
    """A store that has more blocks than tokens, or one of a terabyte."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def GetCapabilities(self, _request: Any, _context: Any) -> pb.GetCapabilitiesResponse:  # noqa: N802
        return pb.GetCapabilitiesResponse(namespace="default")

    def FindPrefix(self, _request: Any, _context: Any) -> pb.FindPrefixResponse:  # noqa: N802
        return pb.FindPrefixResponse(blocks=[Digest("0" * 64, size).to_proto() for size in self._sizes])


@pytest.mark.parametrize(("sizes", "taken"), [([9, 9, 9, 9, 9], 2), ([9, 1 << 40], 1), ([1 << 40, 9], 0)])
def test_a_store_that_lies_has_no_more_blocks_than_tokens_and_none_of_a_terabyte(sizes: list[int], taken: int) -> None:
    """vLLM ends where more tokens are said to be computed than there are."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(_Lying(sizes), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with StoreClient.connect(f"127.0.0.1:{port}") as client:
            assert len(_kv(client, "l").find(_tokens(9, 2))) == taken
    finally:
        server.stop(0)


def test_a_store_that_stalls_is_waited_for_once_and_not_once_a_request(
    store: RunningStore, client: StoreClient
) -> None:
    tokens, blocks = _tokens(10, 1), _blocks(10, 0)
    kv = _kv(client, "s")
    kv.save(tokens, blocks)
    [digest] = kv.find(tokens)
    load = Load(tokens, {0: (digest.hash, digest.size_bytes)}, {0: [3]})
    now, reading = [0.0], Reading(kv, 1.0, lambda: now[0])
    os.kill(store.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for name in "abcdefgh":
            reading.ask(name, load)
        assert [reading.blocks.get(timeout=20) for _ in range(8)] == [Read(name) for name in "abcdefgh"]
        assert time.monotonic() - began < 6
    finally:
        os.kill(store.process.pid, signal.SIGCONT)
    now[0] += 100
    reading.ask("later", load)
    came = reading.blocks.get(timeout=20)
    assert (came.name, came.places, [bytes(layer) for layer in came.layers]) == ("later", [3], blocks[0])
    assert reading.blocks.get(timeout=20) == Read("later")

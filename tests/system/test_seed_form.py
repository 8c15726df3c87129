"""A memory that went through the seed's single file goes on token for token as one that never left."""

import json
import shutil
import struct
from collections.abc import Iterator

import pytest
from kvasir.cli.demo.mac import Mac, macs
from kvasir.cli.demo.script import Story, told_story
from kvasir.clients import InferenceClient
from kvasir.formats import manifest as manifests
from kvasir.formats.archive import pack
from kvasir.formats.seed_file import SeedFile, from_seed_file, to_seed_file
from kvasir.inference.v1 import inference_pb2
from safetensors.numpy import load, save

from tests.running import in_memory

_TOKENS = 64
_SAMPLING = inference_pb2.Sampling(max_tokens=_TOKENS)


@pytest.fixture(scope="module")
def story() -> Story:
    return told_story(15, 1100, 1)


@pytest.fixture(scope="module")
def mac(story: Story) -> Iterator[Mac]:
    """One Mac on which an agent has lived through its story."""
    root = in_memory.home()
    with macs(root) as make:
        mac = make("a")
        mac.start()
        mac.say("ada", story.turns[0].messages, is_new=True)
        yield mac
    shutil.rmtree(root)


def seed_file_of(mac: Mac, agent: str) -> bytes:
    with mac.store_client() as store:
        manifest = manifests.parse(store.get_snapshot(agent)[1])
        blobs = {digest: bytes(data) for digest, data in store.get_blobs(manifests.digests(manifest))}
        return b"".join(to_seed_file(manifest, blobs.__getitem__, agent_id=agent, model_id="kvasir-tiny"))


def bring_back(mac: Mac, agent: str, memory: SeedFile) -> None:
    with mac.store_client() as store:
        store.import_agent(agent, pack(memory.manifest, memory.blobs, agent_id=agent))


def replies(mac: Mac, agent: str, story: Story) -> list[tuple[str, tuple[int, ...]]]:
    """Two turns: where each came from, and its tokens."""
    heard = [mac.say(agent, story.ask(number).messages, max_tokens=_TOKENS) for number in (0, 1)]
    return [(each.source, each.token_ids) for each in heard]


@pytest.mark.long(4)
def test_there_and_back_goes_on_token_for_token(mac: Mac, story: Story) -> None:
    file = seed_file_of(mac, "ada")
    memory = from_seed_file(file)
    bring_back(mac, "back", memory)
    with mac.store_client() as store:
        store.fork_agent("ada", "stayed")
    back, stayed = replies(mac, "back", story), replies(mac, "stayed", story)
    assert [source for source, _ in back] == ["warm", "hot"]
    assert [tokens for _, tokens in back] == [tokens for _, tokens in stayed]


@pytest.mark.long(8)
def test_a_file_that_only_the_seed_knows_goes_on_token_for_token(mac: Mac, story: Story) -> None:
    file = seed_file_of(mac, "ada")
    with mac.store_client() as store:
        store.fork_agent("ada", "stayed here")
        text = manifests.parse(store.get_snapshot("ada")[1]).text
    metadata = {key: value for key, value in _metadata(file).items() if key != "kvasir"}
    memory = from_seed_file(save(load(file), metadata=metadata), identity=mac.engine_facts()[1].kv_identity)
    bring_back(mac, "from the seed", memory)
    # It has no messages, so it is asked as the seed asks: with the whole text.
    asked = f"{text}\n{story.ask(0).question.text}"
    with InferenceClient.connect(mac.engine.address) as engine:
        back = engine.reply(prompt=asked, agent_id="from the seed", sampling=_SAMPLING)
        stayed = engine.reply(prompt=asked, agent_id="stayed here", sampling=_SAMPLING)
    assert back.started.source == inference_pb2.CACHE_SOURCE_WARM
    assert back.started.match == inference_pb2.PREFIX_MATCH_EXTEND
    assert back.started.cached_tokens == stayed.started.cached_tokens
    assert back.token_ids == stayed.token_ids


def _metadata(file: bytes) -> dict[str, str]:
    (length,) = struct.unpack_from("<Q", file)
    metadata: dict[str, str] = json.loads(file[8 : 8 + length])["__metadata__"]
    return metadata

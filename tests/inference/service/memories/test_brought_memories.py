"""A memory that came by an archive serves its own line, with whatever numbers it holds, and no other agent's."""

import io
import tarfile
from collections.abc import Callable

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import Reply
from kvasir.formats import archive, manifest
from kvasir.formats.block_file import encode, parse_header
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.tensor_layouts import TensorSpec
from kvasir.formats.token_files import file_identities
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House

PROMPT = " ".join(f"word{number % 97}" for number in range(700))


def ask(house: House, agent: str, prompt: str) -> Reply:
    with house.client() as client:
        reply = client.reply(agent_id=agent, prompt=prompt, sampling={"max_tokens": 8})
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    return reply


def tensors_of(data: bytes) -> list[tuple[TensorSpec, bytes]]:
    """What a tensor file holds."""
    header = parse_header(data, len(data))
    start = len(data) - sum(spec.size_bytes for spec in header.tensors)
    tensors: list[tuple[TensorSpec, bytes]] = []
    for spec in header.tensors:
        tensors.append((spec, data[start : start + spec.size_bytes]))
        start += spec.size_bytes
    return tensors


def other_numbers(data: bytes) -> bytes:
    """The same block by its name, tokens and shapes, with every code turned over."""
    turned = [
        (spec, bytes(255 - byte for byte in body) if spec.dtype == "U32" else body) for spec, body in tensors_of(data)
    ]
    return encode(parse_header(data, len(data)).identity, turned)


def exported(house: House, agent: str) -> tuple[manifest_pb2.Manifest, dict[str, bytes]]:
    """The agent's manifest, and the blobs of its archive by their hash."""
    with house.store_client() as store, tarfile.open(fileobj=io.BytesIO(b"".join(store.export_agent(agent)))) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        content = {name: file.read() for name, file in files.items() if file is not None}
    return manifest.parse(content["manifest.pb"]), {
        name.removeprefix("blobs/"): data for name, data in content.items() if name.startswith("blobs/")
    }


def forged(house: House, agent: str) -> bytes:
    """The agent's archive with other numbers in every block, all of them said to be shareable."""
    message, content = exported(house, agent)
    blobs: dict[Digest, bytes] = {}
    for named in (*message.blocks, *([message.tail] if message.HasField("tail") else [])):
        data = other_numbers(content[named.hash])
        blobs[Digest.of(data)] = data
        named.CopyFrom(Digest.of(data).to_proto())
    message.shareable_tokens = len(message.token_ids)
    return b"".join(archive.pack(message, blobs, agent_id=agent))


@pytest.mark.long(13)
@pytest.mark.parametrize("way", ["forked", "rolled back"])
def test_nobody_is_served_rows_that_a_stranger_brought(
    own_house: House, new_agent: Callable[[], str], way: str
) -> None:
    honest, mallory, bob, carol = (new_agent() for _ in range(4))
    own_house.store.stop()
    own_house.store.options += ["--grace-period-s", "0"]
    own_house.repair()
    alone = ask(own_house, honest, PROMPT)
    with own_house.store_client() as store:
        bytes_ = forged(own_house, honest)
        store.delete_agent(honest)
        for _ in range(2):
            store.collect_garbage()  # nobody finds the honest rows instead
        store.import_agent(mallory, [bytes_])
        if way == "forked":
            store.fork_agent(mallory, mallory := new_agent())
        else:
            store.rollback_agent(mallory, 1)
    own_house.engine.kill()
    own_house.engine.start()
    poisoned = ask(own_house, mallory, PROMPT + " and now")
    assert poisoned.started.source == pb.CACHE_SOURCE_WARM
    # While it is hot here, and from the store once the engine is another one and the stranger's agents are gone.
    served = ask(own_house, bob, PROMPT)
    assert (served.started.source, served.token_ids) == (pb.CACHE_SOURCE_COLD, alone.token_ids)
    with own_house.store_client() as store:
        assert store.get_agent(mallory).lines[0].is_brought
        store.delete_agent(mallory)
    own_house.engine.kill()
    own_house.engine.start()
    served = ask(own_house, carol, PROMPT)
    assert served.token_ids == alone.token_ids


@pytest.mark.long(3)
def test_a_brought_memory_of_tokens_that_the_model_lacks_is_a_miss(house: House, new_agent: Callable[[], str]) -> None:
    """Every prompt that extended it was refused, as if the caller had named those tokens."""
    agent, copy = new_agent(), new_agent()
    told = ask(house, agent, PROMPT)
    with house.store_client() as store:
        known, content = exported(house, agent)
        known.token_ids[3] = 1 << 30
        identity_hash, blobs = kv_identity_hash(known.kv_identity), dict[Digest, bytes]()
        chain = chain_hashes(identity_hash, known.token_ids)
        identities = file_identities(identity_hash, known.token_ids, chain, 0)
        for named, identity in zip((*known.blocks, known.tail), identities, strict=True):
            data = encode(identity, tensors_of(content[named.hash]))
            blobs[Digest.of(data)] = data
            named.CopyFrom(Digest.of(data).to_proto())
        store.import_agent(copy, archive.pack(known, blobs, agent_id=copy))
    extended = ask(house, copy, PROMPT)
    assert (extended.started.source, extended.started.miss) == (
        pb.CACHE_SOURCE_SHARED,
        pb.MISS_REASON_MANIFEST_INVALID,
    )
    assert extended.token_ids == told.token_ids
    assert ask(house, copy, PROMPT + " and now").started.miss == pb.MISS_REASON_TEXT_DIFFERS  # from its own reply on

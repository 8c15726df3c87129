"""What a tenant can do to a store with the role client: for each shared resource, the most that it takes."""

import contextlib
from collections.abc import Iterator

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import AlreadyExists
from kvasir.formats import archive
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES

from tests.campaigns.fairness.attacker import Attacker, consume
from tests.made_models.synthetic import SMALL, SyntheticAgent, kv_identity, state_file

_RPC = "/kvasir.cachestore.v1.CacheStoreService/"
_HEALTH = "/grpc.health.v1.Health/Check"
_MANY_DIGESTS = 10_000


async def silent_strangers(me: Attacker) -> None:
    """1,024 calls of Health/Check without a credential that never send their message."""
    me.hold(me.store_address, _HEALTH, 1024, is_known=False)


async def silent_calls(me: Attacker) -> None:
    """As many calls as four credentials may have, that never send their message."""
    me.hold(me.store_address, _RPC + "GetCapabilities", 1024, is_known=True)


async def half_messages(me: Attacker) -> None:
    """400 messages of 4 MiB of which the last byte does not come."""
    me.withhold(me.store_address, _RPC + "GetAgent", 4 << 20, calls=400)


async def find_missing(me: Attacker) -> None:
    """250 callers that ask for 10,000 digests each."""
    digests = [Digest.of(str(number).encode()) for number in range(_MANY_DIGESTS)]
    stores = [me.store() for _ in range(16)]
    me.flood(250, lambda index: stores[index % 16].find_missing(digests))


async def stats(me: Attacker) -> None:
    """GetStats of a namespace of many agents, whose versions all must be looked at."""
    await many_agents(me)
    stores = [me.store() for _ in range(8)]
    me.flood(64, lambda index: stores[index % 8].get_stats())


async def list_agents(me: Attacker) -> None:
    """Listings in pages of a thousand."""
    await many_agents(me)
    stores = [me.store() for _ in range(8)]
    me.flood(64, lambda index: stores[index % 8].list_agents(page_size=1000))


async def fat_labels(me: Attacker) -> None:
    """Listings of agents with as many and as long labels as there may be."""
    await many_agents(me, 100)
    labels = {f"{number:02d}" + "💥" * 254: "💥" * 256 for number in range(2)}
    stores = [me.store() for _ in range(8)]
    for number in range(100):
        await stores[0].update_agent(f"many {number}", labels=labels)
    me.flood(16, lambda index: stores[index % 8].list_agents(page_size=1000))


async def updates(me: Attacker) -> None:
    """Small writes of the index, as many as go."""
    await many_agents(me, 64)
    stores = [me.store() for _ in range(8)]
    me.flood(250, lambda index: stores[index % 8].update_agent(f"many {index % 64}", labels={"a": "b" * 60}))


async def state_points(me: Attacker) -> None:
    """Imports of 300 state points of 1,024 tensors each: all of them are looked at in the commit."""
    layer = identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_STATE,
        state_tensors=[identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT32, shape=[1])],
    )
    identity, tokens = kv_identity("many states", [layer] * 1024), list(range(300))
    files = [state_file(identity, tokens[: count + 1]) for count in range(len(tokens))]
    blobs = {Digest.of(data): data for data in files}
    points = [manifest_pb2.StatePoint(tokens=n, digest=each.to_proto()) for n, each in enumerate(blobs, start=1)]
    manifest = _manifest(identity, tokens)
    manifest.states.extend(points)
    packed = b"".join(archive.pack(manifest, blobs, agent_id="states"))
    store = me.store()
    me.flood(2, lambda index: store.import_agent(f"states {index}", _pieces(packed), replace=True))


async def reading(me: Attacker) -> None:
    """Everything that it has, read and verified over and over: threads, and bytes that wait."""
    stores = [me.store() for _ in range(8)]
    digests = await _blobs_of_mine(me)
    me.flood(64, lambda index: consume(stores[index % 8].get_blobs(digests)))
    me.flood(16, lambda index: consume(stores[index % 8].verify_blobs()))


async def slow_readers(me: Attacker) -> None:
    """Reads that nobody takes: what was read for them waits."""
    request = pb.ReadBlobsRequest(digests=[digest.to_proto() for digest in await _blobs_of_mine(me)])
    me.hold(me.store_address, _RPC + "ReadBlobs", 250, is_known=True, messages=[request.SerializeToString()])


async def bogus_sizes(me: Attacker) -> None:
    """Reads of digests that say they have 2^62 bytes, and are nowhere."""
    stores = [me.store() for _ in range(16)]
    digest = Digest("ab" * 32, 1 << 62)
    me.flood(250, lambda index: consume(stores[index % 16].read_frames([digest])), "BLOB_NOT_FOUND")


async def exports(me: Attacker) -> None:
    """60 exports at once, which nobody reads, of a memory whose manifest has 15 MiB."""
    await me.store().import_agent("fat", _pieces(_fat_archive()), replace=True, timeout_s=120.0)
    message = pb.ExportAgentRequest(agent_id="fat").SerializeToString()
    me.hold(me.store_address, _RPC + "ExportAgent", 60, is_known=True, messages=[message])


async def imports(me: Attacker) -> None:
    """60 imports at once of such a manifest."""
    packed, stores = _fat_archive(), [me.store() for _ in range(8)]
    me.flood(60, lambda i: stores[i % 8].import_agent(f"fat {i}", _pieces(packed), replace=True))


async def reservations(me: Attacker) -> None:
    """Writes of the largest blobs that are allowed, whose first frame is all that ever comes."""
    for number in range(200):
        digest = Digest(Digest.of(str(number).encode()).hash, 256 << 20)
        frame = pb.BlobFrame(digest=digest.to_proto(), kind=pb.BLOB_KIND_MANIFEST, data=b"x")
        message = pb.WriteBlobsRequest(frame=frame).SerializeToString()
        me.hold(me.store_address, _RPC + "WriteBlobs", 1, is_known=True, messages=[message])


async def many_agents(me: Attacker, count: int = 1500) -> None:
    """Forks of one small memory, made once."""
    store = me.store()
    turn = SyntheticAgent(SMALL, 1).turn(20)
    packed = b"".join(archive.pack(turn.manifest, turn.new_blobs, agent_id="one"))
    await store.import_agent("one", _pieces(packed), replace=True)
    known = (await store.list_agents(name_prefix=f"many {count - 1}")).agents
    for number in range(0 if known else count):
        with contextlib.suppress(AlreadyExists):  # an earlier row made fewer
            await store.fork_agent("one", f"many {number}")


async def _blobs_of_mine(me: Attacker) -> list[Digest]:
    """A memory of some 2 MiB in the store; its blobs."""
    turn = SyntheticAgent(SMALL, 2).turn(256 * 100)
    packed = b"".join(archive.pack(turn.manifest, turn.new_blobs, agent_id="large"))
    await me.store().import_agent("large", _pieces(packed), replace=True)
    return turn.digests


def _fat_archive() -> bytes:
    turn = SyntheticAgent(SMALL, 3).turn(20)
    turn.manifest.messages.add(role="user", content="x" * (15 << 20))
    return b"".join(archive.pack(turn.manifest, turn.new_blobs, agent_id="fat"))


def _manifest(identity: identity_pb2.KvIdentity, tokens: list[int]) -> manifest_pb2.Manifest:
    return manifest_pb2.Manifest(
        format=1, kv_identity=identity, token_ids=tokens, text="x" * len(tokens), token_chars=[1] * len(tokens)
    )


def _pieces(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed), FRAME_BYTES):
        yield packed[start : start + FRAME_BYTES]

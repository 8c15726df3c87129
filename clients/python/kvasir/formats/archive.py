"""Archives of agents: a tar of `kvasir-archive.json`, the manifest and its blobs, the same for the same memory."""

import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest

FORMAT = 1
INDEX_NAME = "kvasir-archive.json"
MANIFEST_NAME = "manifest.pb"
BLOB_PREFIX = "blobs/"
END = bytes(2 * tarfile.BLOCKSIZE)


def pack(manifest: manifest_pb2.Manifest, blobs: Mapping[Digest, bytes], *, agent_id: str) -> Iterator[bytes]:
    """Yield the archive of a memory, file by file. Raises KeyError when a blob that the manifest names is not given."""
    yield preamble(manifest.SerializeToString(deterministic=True), manifest, agent_id)
    for digest in manifests.digests(manifest):
        yield blob_header(digest)
        yield blobs[digest]
        yield padding(digest.size_bytes)
    yield END


def preamble(manifest_bytes: bytes, manifest: manifest_pb2.Manifest, agent_id: str) -> bytes:
    """Everything before the first blob."""
    digest = Digest.of(manifest_bytes)
    start = head(digest, kv_identity_hash(manifest.kv_identity), agent_id)
    return b"".join((start, manifest_bytes, padding(digest.size_bytes)))


def head(manifest: Digest, kv_hash: str, agent_id: str) -> bytes:
    """Everything before the manifest's bytes. Their padding follows them."""
    index = {"format": FORMAT, "agent_id": agent_id, "kv_identity_hash": kv_hash, "manifest": manifest.hash}
    index_bytes = json.dumps(index, ensure_ascii=False, sort_keys=True).encode()
    return _member(INDEX_NAME, index_bytes) + _header(MANIFEST_NAME, manifest.size_bytes)


def blob_header(digest: Digest) -> bytes:
    return _header(BLOB_PREFIX + digest.hash, digest.size_bytes)


def padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


def size_bytes(preamble_bytes: int, digests: Iterable[Digest]) -> int:
    """Size of a whole archive: `preamble_bytes`, these blobs, and the end."""
    blobs = sum(tarfile.BLOCKSIZE + digest.size_bytes + -digest.size_bytes % tarfile.BLOCKSIZE for digest in digests)
    return preamble_bytes + blobs + len(END)


def _member(name: str, data: bytes) -> bytes:
    return b"".join((_header(name, len(data)), data, padding(len(data))))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o600
    return info.tobuf(tarfile.USTAR_FORMAT)

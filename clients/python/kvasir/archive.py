"""Archives of agents, as `ImportAgent` reads them: a tar of manifest and blobs, equal bytes for equal memories.

First `kvasir-archive.json`, then `manifest.pb`, then `blobs/<64 hex>` in the manifest's order. The archive is a
stream: it is never extracted, and no name in it becomes a path.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping

from kvasir import manifest as manifests
from kvasir.block_hash import kv_identity_hash
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.digest import Digest

FORMAT = 1


def pack(manifest: manifest_pb2.Manifest, blobs: Mapping[Digest, bytes], *, agent_id: str) -> Iterator[bytes]:
    """Yield the archive of a memory, file by file. Raises KeyError when a blob that the manifest names is not given."""
    manifest_bytes = manifest.SerializeToString(deterministic=True)
    index = {
        "format": FORMAT,
        "agent_id": agent_id,
        "kv_identity_hash": kv_identity_hash(manifest.kv_identity),
        "manifest": Digest.of(manifest_bytes).hash,
    }
    yield _member("kvasir-archive.json", json.dumps(index, ensure_ascii=False, sort_keys=True).encode())
    yield _member("manifest.pb", manifest_bytes)
    for digest in manifests.digests(manifest):
        yield _member(f"blobs/{digest.hash}", blobs[digest])
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o600
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return b"".join((header, data, bytes(-len(data) % tarfile.BLOCKSIZE)))

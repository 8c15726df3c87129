"""Memories as files: their two forms, and the seed's form to and from the store."""

import enum
from pathlib import Path

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import identity_pb2
from kvasir.clients import StoreClient
from kvasir.clients.archive_file import new_file, pieces_of
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.formats.archive import pack
from kvasir.formats.archive_reader import ArchiveReader, Described
from kvasir.formats.seed_file import from_seed_file, to_seed_file


class Form(enum.StrEnum):
    """The form of a memory in a file."""

    ARCHIVE = "archive"
    SEED = "seed"


def export_seed_file(client: StoreClient, agent: str, file: Path, line: str, version: int, model_name: str) -> int:
    """Save one version in the seed's form; returns its size in bytes."""
    snapshot, manifest_bytes = client.get_snapshot(agent, line, version)
    manifest = manifests.parse(manifest_bytes)
    blobs = {digest: bytes(data) for digest, data in client.get_blobs(manifests.digests(manifest))}
    model_id = model_name or manifest.kv_identity.weights_digest
    with new_file(file) as out:
        for piece in to_seed_file(manifest, blobs.__getitem__, agent_id=snapshot.agent_id, model_id=model_id):
            out.write(piece)
        return out.tell()


def import_seed_file(
    client: StoreClient, file: Path, agent: str, *, replace: bool, of_agent: str
) -> pb.SnapshotVersion:
    """Read a file of the seed's form into a new version of `agent`, or of the agent that the file names."""
    identity = _identity_of(client, of_agent) if of_agent else None
    memory = from_seed_file(file.read_bytes(), identity=identity)
    name = agent or memory.agent_id
    return client.import_agent(name, pack(memory.manifest, memory.blobs, agent_id=name), replace=replace)


def _identity_of(client: StoreClient, agent: str) -> identity_pb2.KvIdentity:
    _, manifest_bytes = client.get_snapshot(agent)
    return manifests.parse(manifest_bytes).kv_identity


def agent_of_archive(file: Path) -> str:
    """The agent that an archive names. Raises InvalidArgument for other files."""
    reader = ArchiveReader()
    for piece in pieces_of(file):
        for part in reader.feed(piece):
            if isinstance(part, Described):
                return part.agent_id
    raise InvalidArgument(f"{file}: not an archive of `kvasir agents export`", field="file")

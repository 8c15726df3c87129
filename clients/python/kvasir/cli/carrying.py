"""Memories as files: their two forms, and the seed's form to and from the store."""

import enum
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import identity_pb2
from kvasir.cli.failures import WrongUsage
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


@contextmanager
def target(file: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """Where an export is written: standard output for `-`, else a file that appears whole or not at all."""
    if str(file) != "-":
        with new_file(file, replace=replace) as out:
            yield out
        return
    if sys.stdout.isatty():
        raise WrongUsage("-: an archive is not for a terminal; send it to a file or a pipe", field="FILE")
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def seed_pieces(client: StoreClient, agent: str, line: str, version: int | None, model_name: str) -> Iterator[bytes]:
    """One version in the seed's form."""
    snapshot, manifest_bytes = client.get_snapshot(agent, line, version)
    manifest = manifests.parse(manifest_bytes)
    blobs = {digest: bytes(data) for digest, data in client.get_blobs(manifests.digests(manifest))}
    model_id = model_name or manifest.kv_identity.weights_digest
    yield from to_seed_file(manifest, blobs.__getitem__, agent_id=snapshot.agent_id, model_id=model_id)


@contextmanager
def source(file: Path) -> Iterator[Path]:
    """The file to read. Standard input, for `-`, is kept in a file of its own until it is read."""
    if str(file) != "-":
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="kvasir-", suffix=".part") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield Path(kept.name)


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
    reader, why = ArchiveReader(), "it ends early"
    try:
        for piece in pieces_of(file):
            for part in reader.feed(piece):
                if isinstance(part, Described):
                    return part.agent_id
    except InvalidArgument as error:
        why = error.message
    raise InvalidArgument(f"{file}: not an archive of `kvasir agents export` ({why})", field="file")

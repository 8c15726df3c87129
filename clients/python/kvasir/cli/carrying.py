"""Memories as files: their forms, what opens a sealed one, and the seed's form to and from the store."""

import enum
import importlib.util
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import typer

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import identity_pb2
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.home import Home
from kvasir.clients import StoreClient
from kvasir.clients.archive_file import new_file
from kvasir.credentials import read_private_text
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.formats import sealed_archive
from kvasir.formats.archive import ArchiveReader, Described, pack
from kvasir.formats.digest import Digest
from kvasir.formats.seed_file import from_seed_file, to_seed_file

_MASTER_KEY = re.compile(r"[0-9a-f]{64}")


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


def seed_pieces(archive: Iterable[bytes], model_name: str) -> Iterator[bytes]:
    """An archive in the seed's form."""
    reader, blobs, described = ArchiveReader(), dict[Digest, bytearray](), list[Described]()
    for part in (part for piece in archive for part in reader.feed(piece)):
        if isinstance(part, Described):
            described.append(part)
        else:
            blobs.setdefault(part.digest, bytearray()).extend(part.data)
    reader.finish()
    [memory] = described
    names = {"agent_id": memory.agent_id, "model_id": model_name or memory.manifest.kv_identity.weights_digest}
    yield from to_seed_file(memory.manifest, lambda digest: bytes(blobs.pop(digest)), **names)


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


def lock_of(key_file: Path | None, passphrase_file: Path | None) -> sealed_archive.Lock:
    """What is to open an archive that is sealed: a master key, or a passphrase, which a person may type."""
    if key_file is not None and passphrase_file is not None:
        raise WrongUsage("--key-file, --passphrase-file: one of them seals the file", field="--key-file")
    if key_file is not None:
        return _master_key(key_file)
    text = "" if passphrase_file is None else read_private_text(passphrase_file).rstrip("\n")
    if passphrase_file is None:
        if not sys.stdin.isatty():
            raise WrongUsage.of("--sealed", "give --passphrase-file or --key-file")
        text = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    if not text:
        raise WrongUsage.of("--passphrase-file", f"{passphrase_file} has no passphrase")
    return sealed_archive.Lock(sealed_archive.PASSPHRASE, text.encode())


def check_opens(
    header: sealed_archive.SealedHeader | None, file: Path, key_file: Path | None, passphrase_file: Path | None
) -> None:
    """Raises WrongUsage for an option that does not open this file: whoever gives it wants a file that needs it."""
    sealed_with = "" if header is None else header.locked_by
    given = {
        "--key-file": (key_file, sealed_archive.MASTER_KEY),
        "--passphrase-file": (passphrase_file, sealed_archive.PASSPHRASE),
    }
    for option, (path, kind) in given.items():
        if path is not None and kind != sealed_with:
            state = f"sealed with a {sealed_with}" if sealed_with else "not sealed"
            raise WrongUsage.of(option, f"{file} is {state}")


def lock_for(
    header: sealed_archive.SealedHeader, file: Path, home: Home, key_file: Path | None, passphrase_file: Path | None
) -> sealed_archive.Lock:
    """What opens this archive. Raises FailedPrecondition (ARCHIVE_SEALED), which names what is needed."""
    if header.locked_by == sealed_archive.PASSPHRASE:
        if passphrase_file is not None:
            return lock_of(None, passphrase_file)
        if not sys.stdin.isatty():
            raise _sealed(f"{file} is sealed with a passphrase: name the file that has it with --passphrase-file")
        return sealed_archive.Lock(
            sealed_archive.PASSPHRASE, typer.prompt("Passphrase", hide_input=True, err=True).encode()
        )
    path = key_file or home.seal_key_file
    needs = f"{file} is sealed with the master key {header.key_id}: name its file with --key-file"
    if not path.exists():
        raise _sealed(needs)
    lock = _master_key(path)
    if lock.key_id != header.key_id:
        raise _sealed(f"{needs}; {path} is another ({lock.key_id})")
    return lock


def _master_key(path: Path) -> sealed_archive.Lock:
    text = read_private_text(path).strip()
    if _MASTER_KEY.fullmatch(text) is None:
        raise WrongUsage.of("--key-file", f"{path}: expected 64 hex digits")
    return sealed_archive.Lock(sealed_archive.MASTER_KEY, bytes.fromhex(text))


def _sealed(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="ARCHIVE_SEALED")


def sealed_pieces(pieces: Iterable[bytes], lock: sealed_archive.Lock) -> Iterator[bytes]:
    _check_can_seal()
    return sealed_archive.seal(pieces, lock, secrets.token_bytes)


def header_of(file: Path) -> sealed_archive.SealedHeader | None:
    """The header of a sealed archive; None for any other file. Raises InvalidArgument."""
    with file.open("rb") as opened:
        return sealed_archive.read_header(opened.read(sealed_archive.MAX_HEADER_BYTES))


class SealedFile:
    """A sealed archive that is open, and whole. Raises FailedPrecondition (ARCHIVE_SEALED), InvalidArgument."""

    def __init__(self, file: Path, header: sealed_archive.SealedHeader, lock: sealed_archive.Lock) -> None:
        _check_can_seal()
        self._file, self._header = file, header
        try:
            self._key = sealed_archive.unlock(header, lock)
        except sealed_archive.DoesNotUnlock as error:
            raise _sealed(f"the archive is sealed, and {error}") from None
        for _ in self.pieces():  # before any of it is sent
            pass

    def pieces(self) -> Iterator[bytes]:
        with self._file.open("rb") as opened:
            opened.seek(len(self._header.line))
            yield from sealed_archive.open_(
                iter(lambda: opened.read(sealed_archive.SEGMENT_BYTES), b""), self._header, self._key
            )


def _check_can_seal() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise FailedPrecondition("a sealed archive needs the package cryptography; run: pip install 'kvasir[store]'")


def agent_of_archive(file: Path, pieces: Iterable[bytes]) -> str:
    """The agent that the archive in a file names. Raises InvalidArgument for other files."""
    reader, why = ArchiveReader(), "it ends early"
    try:
        for piece in pieces:
            for part in reader.feed(piece):
                if isinstance(part, Described):
                    return part.agent_id
    except InvalidArgument as error:
        why = error.message
    raise InvalidArgument(f"{file}: not an archive of `kvasir agents export` ({why})", field="file")

"""Looks for plain bytes of memories in the files of a store: every 16 of them, at every place."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvasir.formats.block_file import parse_header

from tests.synthetic import SyntheticSnapshot

WINDOW = 16
# Runs of few different bytes are in every database.
_LEAST_DIFFERENT = 6


def secrets_of(snapshot: SyntheticSnapshot) -> Iterator[bytes]:
    """What nobody may find: the prompt's text, its tokens, KV, and what would confirm a guess of them."""
    manifest = snapshot.manifest
    yield manifest.text.encode()
    yield struct.pack(f"<{len(manifest.token_ids)}I", *manifest.token_ids)
    yield snapshot.manifest_bytes[snapshot.manifest_bytes.index(manifest.text.encode()) :][: len(manifest.text)]
    yield manifest.turn.request_id.encode()
    for digest in (snapshot.manifest_digest, *snapshot.digests):
        yield digest.hash.encode()
        yield bytes.fromhex(digest.hash)
    for data in snapshot.new_blobs.values():
        header = parse_header(data, len(data))
        yield data[header.data_offset :]
        yield header.identity.chain.encode()


def found_in(directory: Path, secrets: Iterable[bytes]) -> list[str]:
    """Names of files that hold any 16 bytes of the secrets."""
    windows = {secret[at : at + WINDOW] for secret in secrets for at in range(max(1, len(secret) - WINDOW + 1))}
    wanted = {window for window in windows if len(set(window)) >= _LEAST_DIFFERENT}
    lengths = {len(window) for window in wanted}
    assert lengths
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if _holds(path, wanted, lengths))


def files_with(directory: Path, texts: Iterable[bytes]) -> list[str]:
    """Names of files that hold any of these."""
    wanted = list(texts)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if any(text in path.read_bytes() for text in wanted))


def _holds(path: Path, wanted: set[bytes], lengths: set[int]) -> bool:
    if not path.is_file():
        return False
    data = path.read_bytes()
    return any(data[at : at + length] in wanted for length in lengths for at in range(len(data) - length + 1))

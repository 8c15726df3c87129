"""Looks for plain bytes of memories in the files of a store: every 16 of them, at every place."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from kvasir.formats.block_file import parse_header
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tests.made_models.synthetic import SyntheticSnapshot

Bytes, Numbers = NDArray[np.uint8], NDArray[np.uint64]
WINDOW = 16
# Runs of few different bytes are in every database.
_LEAST_DIFFERENT = 6
_ALL_BUT_20 = np.uint64(44)


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
    """Names of files that hold any 16 bytes of the secrets, or all of a shorter one."""
    hidden = list(secrets)
    short = [secret for secret in hidden if len(set(secret)) >= _LEAST_DIFFERENT and len(secret) < WINDOW]
    runs = np.unique(np.concatenate([_runs(secret) for secret in hidden]))
    assert len(runs)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(directory)) for path in files if _holds(path.read_bytes(), runs, short))


def files_with(directory: Path, texts: Iterable[bytes]) -> list[str]:
    """Names of files that hold any of these."""
    wanted = list(texts)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if any(text in path.read_bytes() for text in wanted))


def _holds(data: bytes, runs: Numbers, short: Iterable[bytes]) -> bool:
    if any(secret in data for secret in short):
        return True
    numbers, might_be = _numbers(_windows(data)), np.zeros(1 << 20, bool)
    might_be[runs >> _ALL_BUT_20] = True
    return bool(np.isin(numbers[might_be[numbers >> _ALL_BUT_20]], runs).any())


def _runs(secret: bytes) -> Numbers:
    """The numbers of its 16 bytes in a row that are different enough."""
    windows = _windows(secret)
    kinds = 1 + np.count_nonzero(np.diff(np.sort(windows, axis=1), axis=1), axis=1)
    return _numbers(windows[kinds >= _LEAST_DIFFERENT])


def _windows(data: bytes) -> Bytes:
    if len(data) < WINDOW:
        return np.empty((0, WINDOW), np.uint8)
    return sliding_window_view(np.frombuffer(data, np.uint8), WINDOW)


def _numbers(windows: Bytes) -> Numbers:
    """One for each; two that differ have the same by no chance."""
    halves = np.ascontiguousarray(windows).view(np.uint64)
    return halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)

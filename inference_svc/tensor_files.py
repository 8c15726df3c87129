"""Tensor files as the engine reads them: what each must say of itself, and the checks before MLX sees a byte. No MLX
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvasir.block_file import FileIdentity, Header, HeaderError, check_schema, parse_header
from kvasir.block_hash import BLOCK_TOKENS, chain_hash
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import DataLoss

# bfloat16 is unknown to numpy: its 16 bits travel as they are.
HOST_TYPES = {"U32": np.uint32, "F16": np.float16, "BF16": np.uint16}
_BFLOAT16_EXPONENT = 0x7F80


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A tensor file whose header is the expected one and whose scales, biases and exact values are finite."""

    header: Header
    data: bytes


def chain_hashes(kv_identity_hash: str, token_ids: Sequence[int], known: Sequence[str] = ()) -> tuple[str, ...]:
    """Chain hashes of the full blocks of `token_ids`; `known` are those of its first blocks."""
    hashes = list(known)
    for start in range(len(hashes) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hashes[-1] if hashes else ""
        hashes.append(chain_hash(kv_identity_hash, parent, token_ids[start : start + BLOCK_TOKENS]))
    return tuple(hashes)


def file_identities(
    kv_identity_hash: str, token_ids: Sequence[int], chain: Sequence[str], first_block: int = 0
) -> list[FileIdentity]:
    """What the tensor files of `token_ids` say of themselves, from block `first_block` on: full blocks, then a tail if
    there is one. `chain` are the full blocks' chain hashes."""
    files = [
        FileIdentity("block", kv_identity_hash, index * BLOCK_TOKENS, BLOCK_TOKENS, chain[index])
        for index in range(first_block, len(chain))
    ]
    start = len(chain) * BLOCK_TOKENS
    if rest := token_ids[start:]:
        parent = chain[-1] if chain else ""
        tail_chain = chain_hash(kv_identity_hash, parent, rest)
        files.append(FileIdentity("tail", kv_identity_hash, start, len(rest), tail_chain))
    return files


def check_files(
    identity: identity_pb2.KvIdentity, kv_identity_hash: str, blobs: Sequence[bytes], token_ids: Sequence[int]
) -> list[CheckedFile]:
    """Check that `blobs` hold KV of exactly these tokens under this identity, and only finite numbers.

    Raises DataLoss that names the first blob which does not.
    """
    expected = file_identities(kv_identity_hash, token_ids, chain_hashes(kv_identity_hash, token_ids))
    if len(blobs) != len(expected):
        raise _damaged(min(len(blobs), len(expected)), f"expected {len(expected)} tensor files, got {len(blobs)}")
    return [
        _checked(index, identity, file_identity, data)
        for index, (file_identity, data) in enumerate(zip(expected, blobs, strict=True))
    ]


def host_views(file: CheckedFile) -> list[npt.NDArray[np.generic]]:
    """The tensors of a file, [kv_heads, rows, …] each, without copying. bfloat16 comes as its 16 bits."""
    views: list[npt.NDArray[np.generic]] = []
    offset = file.header.data_offset
    for spec in file.header.tensors:
        count = spec.size_bytes // np.dtype(HOST_TYPES[spec.dtype]).itemsize
        view = np.frombuffer(file.data, dtype=HOST_TYPES[spec.dtype], count=count, offset=offset)
        views.append(view.reshape(spec.shape))
        offset += spec.size_bytes
    return views


def _checked(index: int, identity: identity_pb2.KvIdentity, expected: FileIdentity, data: bytes) -> CheckedFile:
    try:
        header = parse_header(data, len(data))
        if header.identity != expected:
            raise HeaderError(_difference(expected, header.identity))
        check_schema(header, identity)
    except HeaderError as error:
        raise _damaged(index, str(error)) from None
    file = CheckedFile(header, data)
    for spec, view in zip(header.tensors, host_views(file), strict=True):
        if not _is_finite(view, spec.dtype):
            raise _damaged(index, f"{spec.name}: holds a value that is not finite")
    return file


def _is_finite(view: npt.NDArray[np.generic], dtype: str) -> bool:
    if dtype == "U32":
        return True  # codes: any bits are values
    exponent = _BFLOAT16_EXPONENT if dtype == "BF16" else 0x7C00
    # Comparing exponents is several times faster than isfinite, which would convert every half to a float.
    return not bool(((view.view(np.uint16) & exponent) == exponent).any())


def _difference(expected: FileIdentity, found: FileIdentity) -> str:
    for name in ("kind", "kv_identity_hash", "start", "tokens", "chain"):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            return f"{name}: expected {ours}, found {theirs}"
    raise AssertionError("the identities are equal")


def _damaged(index: int, what: str) -> DataLoss:
    return DataLoss(f"tensor file {index}: {what}", metadata={"blob": str(index)})

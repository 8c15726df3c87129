"""Checks tensor files before MLX sees a byte of them, and reads them as arrays. This module needs no MLX."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats import block_file, tensor_layouts
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import layers_of
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.kv.damage import DamagedFile
from inference_svc.kv.page import UNIT_BYTES

# bfloat16 is unknown to numpy: its 16 bits travel as they are.
_HOST_TYPES = {"U32": np.uint32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32}
# The bits of a number's exponent, all of them set in what is not finite.
_EXPONENTS: Mapping[str, np.uint16 | np.uint32] = {
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F800000),
}

Array: TypeAlias = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class CheckedFile:
    header: block_file.Header
    data: block_file.FileBytes


@dataclass(frozen=True, slots=True)
class Schema:
    """The tensors of a kind of file, and facts that follow from them: made once for all files of the kind."""

    layout: tensor_layouts.Layout
    entries: bytes

    @classmethod
    def of(cls, tensors: tuple[tensor_layouts.TensorSpec, ...]) -> "Schema":
        return cls(tensor_layouts.Layout(tensors), block_file.tensor_entries(tensors))


@lru_cache(maxsize=64)
def _schema(identity: bytes, rows: int, group: int) -> Schema:
    """Of files with so many rows. It takes as long as the checks of ten files; `identity` is serialized."""
    layouts = tensor_layouts.row_layouts(identity, group)
    return Schema(layouts.layout(rows), layouts.entries(rows))


def schema_of(identity: identity_pb2.KvIdentity, rows: int, group: int) -> Schema:
    return _schema(identity.SerializeToString(deterministic=True), rows, group)


class FileChecks:
    """What files of exactly these tokens must be: of one group (0: layers that keep all, else a window)."""

    def __init__(
        self,
        identity: identity_pb2.KvIdentity,
        kv_identity_hash: str,
        token_ids: Sequence[int],
        group: int = 0,
        first_block: int = 0,
    ) -> None:
        self.chain = chain_hashes(kv_identity_hash, token_ids)
        self._expected = file_identities(kv_identity_hash, token_ids, self.chain, first_block, group)
        if not layers_of(identity, group):
            self._expected = []  # nothing is in blocks
        self._identity = identity
        self._group = group
        self._schemas = {rows: schema_of(identity, rows, group) for rows in {file.tokens for file in self._expected}}

    def check_count(self, files: int) -> None:
        """Raises DataLoss unless there are as many files as there must be."""
        if files != (expected := len(self._expected)):
            what = f"expected {expected} tensor files, got {files}"
            raise DamagedFile(what, blob=min(files, expected), window=self._group)

    def checked(self, index: int, data: block_file.FileBytes) -> CheckedFile:
        """A file whose header and tensors fit the expected identity. Raises DataLoss that names the file."""
        expected = self._expected[index]
        try:
            return _checked(self._identity, self._schemas[expected.tokens], expected, data)
        except block_file.HeaderError as error:
            raise DamagedFile(str(error), blob=index, window=self._group) from None


def check_files(
    identity: identity_pb2.KvIdentity,
    kv_identity_hash: str,
    blobs: Sequence[block_file.FileBytes],
    token_ids: Sequence[int],
    group: int = 0,
    first_block: int = 0,
) -> list[CheckedFile]:
    """Check all files of a run, as `FileChecks` does. Raises DataLoss that names the first wrong one."""
    checks = FileChecks(identity, kv_identity_hash, token_ids, group, first_block)
    checks.check_count(len(blobs))
    return [checks.checked(index, data) for index, data in enumerate(blobs)]


def check_state(
    identity: identity_pb2.KvIdentity, kv_identity_hash: str, blob: block_file.FileBytes, token_ids: Sequence[int]
) -> CheckedFile:
    """Check that `blob` is the recurrent layers' state after exactly these tokens. Raises DataLoss that names them."""
    expected = state_identity(kv_identity_hash, token_ids, len(token_ids))
    try:
        return _checked(identity, Schema.of(tensor_layouts.expected_state_tensors(identity)), expected, blob)
    except block_file.HeaderError as error:
        raise DamagedFile(str(error), state=expected.tokens) from None


def state_arrays(file: CheckedFile) -> list[tuple[tensor_layouts.TensorSpec, Array]]:
    """The tensors of a state file, [1, …] each. Raises DataLoss for a value that is not finite."""
    specs, arrays = file.header.tensors, list(_views(file))
    for spec, array in zip(specs, arrays, strict=True):
        if not _is_finite(array, spec.dtype):
            raise DamagedFile(f"{spec.name}: holds a value that is not finite", state=file.header.identity.tokens)
    # Behind an odd number of halves a tensor of wider numbers is not aligned.
    return [(spec, np.require(array[None], requirements="A")) for spec, array in zip(specs, arrays, strict=True)]


def page_units(file: CheckedFile, units: int) -> Array:
    """The tensors of a block or tail file as a page, uint16 [units], with zeros behind a tail's rows."""
    if file.header.identity.tokens == BLOCK_TOKENS:
        return np.frombuffer(file.data, np.uint16, units, file.header.data_offset)
    page, offset = np.zeros(units, dtype=np.uint16), 0
    for view in _views(file):
        rows = view.view(np.uint16)
        heads, count, width = rows.shape
        size = heads * BLOCK_TOKENS * width
        page[offset : offset + size].reshape(heads, BLOCK_TOKENS, width)[:, :count] = rows
        offset += size
    return page


def exponents(identity: identity_pb2.KvIdentity, group: int) -> Array:
    """For each unit of such a page the bits of a number's exponent; 0 for codes, of which any bits are valid."""
    specs = tensor_layouts.expected_tensors(identity, BLOCK_TOKENS, group)
    return np.concatenate(
        [np.full(spec.size_bytes // UNIT_BYTES, _EXPONENTS.get(spec.dtype, 0), np.uint16) for spec in specs]
    )


def _views(file: CheckedFile) -> Iterator[Array]:
    """The tensors of a file, [kv_heads, rows, …] each, without copying. bfloat16 comes as its 16 bits."""
    offset = file.header.data_offset
    for spec in file.header.tensors:
        dtype = np.dtype(_HOST_TYPES[spec.dtype])
        yield np.ndarray(spec.shape, dtype, file.data, offset)
        offset += spec.size_bytes


def _checked(
    identity: identity_pb2.KvIdentity, schema: Schema, expected: block_file.FileIdentity, data: block_file.FileBytes
) -> CheckedFile:
    header = block_file.header_with(expected, schema.entries)
    if data[: len(header)] == header and len(header) + schema.layout.size_bytes == len(data):
        # Our own writer's header, byte for byte: nothing is left to parse, which saves half of a restore.
        return CheckedFile(block_file.Header(expected, schema.layout, len(header)), data)
    parsed = block_file.parse_header(data, len(data))
    if parsed.identity != expected:
        raise block_file.HeaderError(_difference(expected, parsed.identity))
    block_file.check_schema(parsed, identity)
    return CheckedFile(parsed, data)


def _is_finite(array: Array, dtype: str) -> bool:
    # Comparing exponents is several times faster than isfinite, which converts every half to a float.
    exponent = _EXPONENTS[dtype]
    bits: npt.NDArray[np.unsignedinteger[Any]] = array.view(exponent.dtype)
    return not bool(np.equal(bits & exponent, exponent).any())


def _difference(expected: block_file.FileIdentity, found: block_file.FileIdentity) -> str:
    names = ("kind", "kv_identity_hash", "window", "start", "tokens", "chain")
    wrong = next(name for name in names if getattr(expected, name) != getattr(found, name))
    return f"{wrong}: expected {getattr(expected, wrong)}, found {getattr(found, wrong)}"

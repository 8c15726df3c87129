"""The safetensors files of blocks, tails and states: how they are written, and how strangers' headers are checked.

One file holds K and V of every layer of a group (`layer_groups`) for a run of tokens. Its layout `[kv_heads, rows, …]`
is that of the engine's pages, so bytes move without transposing. Any safetensors library reads it.

The encoder is ours because equal tensors must give equal bytes: tensors in schema order, one metadata key, the header
padded to 64 bytes. The checker runs before other code reads bytes that came from outside. It is ours because it checks
a header before any tensor has arrived, and refuses headers that the library accepts: with a key twice, with fields of
other names, or above 1 MiB."""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.tensor_layouts import (
    ITEM_BYTES,
    LAYOUTS,
    Layout,
    RowLayouts,
    TensorSpec,
    expected_state_tensors,
    expected_tensors,
    rows_of,
)
from kvasir.formats.tensor_layouts import (
    HeaderError as HeaderError,
)

FileBytes: TypeAlias = bytes | memoryview
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 4096
MAX_DIMS = 8  # of a tensor
METADATA_KEY = "kvasir"
_ALIGNMENT = 64

_NAME = re.compile(r"layer_(0|[1-9][0-9]{0,3})_(?:[kv](?:_weights|_scales|_biases)?|state_(0|[1-9][0-9]?))")
_KINDS = ("block", "tail", "state")
# A file's metadata as `header_with` spells them, without a window: reading them so takes a fifth of JSON's time.
_SPELLED = re.compile(
    rb'\{"__metadata__":\{"kvasir":"\{\\"chain\\":\\"([0-9a-f]{64})\\",\\"format\\":1,\\"kind\\":\\"(block|tail|state)\\",'
    rb'\\"kv_identity\\":\\"([0-9a-f]{64})\\",\\"start\\":(0|[1-9][0-9]{,11}),\\"tokens\\":([1-9][0-9]{,11})\}"\}(?=,)'
)
_IDENTITY_FIELDS = {"chain", "format", "kind", "kv_identity", "start", "tokens"}
_MAX_WINDOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A tensor file's facts about its content."""

    kind: str  # "block", "tail" or "state"
    kv_identity_hash: str
    start: int  # first token's position; for a state, 0
    tokens: int  # rows of a block or tail; tokens seen by a state
    chain: str  # chain_hash of these tokens and all before them
    window: int = 0  # group of the block's or tail's layers: 0 for those that keep all tokens; of a state, 0

    def to_json(self) -> str:
        """The fields in alphabetical order. `window` is absent where it is 0: files without windows never changed."""
        fields: dict[str, str | int] = {
            "chain": self.chain,
            "format": 1,
            "kind": self.kind,
            "kv_identity": self.kv_identity_hash,
            "start": self.start,
            "tokens": self.tokens,
        }
        if self.window:
            fields["window"] = self.window
        return json.dumps(fields, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: identity, tensors in file order, and where their bytes begin."""

    identity: FileIdentity
    layout: Layout
    data_offset: int

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.layout.tensors

    @property
    def size_bytes(self) -> int:
        return self.data_offset + self.layout.size_bytes

    def parts(self, data: FileBytes) -> dict[str, memoryview]:
        """The tensors' bytes in the whole file, by name, in its order. Copies nothing."""
        view, offset, parts = memoryview(data), self.data_offset, dict[str, memoryview]()
        for spec in self.tensors:
            parts[spec.name] = view[offset : offset + spec.size_bytes]
            offset += spec.size_bytes
        return parts


def encode(identity: FileIdentity, tensors: Sequence[tuple[TensorSpec, bytes | bytearray | memoryview]]) -> bytes:
    """Bytes of a tensor file. Tensors keep the order given; each buffer must have its spec's size."""
    for spec, data in tensors:
        if memoryview(data).nbytes != spec.size_bytes:
            raise ValueError(f"{spec.name}: expected {spec.size_bytes} bytes, got {memoryview(data).nbytes}")
    header = encode_header(identity, [spec for spec, _ in tensors])
    return b"".join([header, *(data for _, data in tensors)])


def encode_header(identity: FileIdentity, specs: Iterable[TensorSpec]) -> bytes:
    """The first bytes of a tensor file, length prefix included, for a reader that expects exactly these."""
    return header_with(identity, tensor_entries(specs))


def header_with(identity: FileIdentity, entries: bytes) -> bytes:
    """As `encode_header`, of the `tensor_entries` of a file's tensors."""
    metadata = json.dumps({"__metadata__": {METADATA_KEY: identity.to_json()}}, separators=(",", ":")).encode()
    header = metadata[:-1] + entries
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def tensor_entries(specs: Iterable[TensorSpec]) -> bytes:
    """The tensors' part of a header: costly, and equal for all blocks of a layout, so it is made once for many."""
    entries: dict[str, object] = {}
    offset = 0
    for spec in specs:
        end = offset + spec.size_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return b"," + text[1:] if entries else b"}"


def header_size(first_bytes: bytes | bytearray | memoryview) -> int:
    """Bytes of the length prefix and header, from a file's first 8 bytes. Raises HeaderError if absurd."""
    if len(first_bytes) < 8:
        raise HeaderError(f"file is truncated: expected at least 8 bytes, got {len(first_bytes)}")
    (length,) = struct.unpack_from("<Q", first_bytes)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise HeaderError(f"header length: expected 2 to {MAX_HEADER_BYTES}, got {length}")
    return 8 + int(length)


def parse_header(data: FileBytes | bytearray, file_size_bytes: int) -> Header:
    """Check the header of a tensor file whose first bytes are `data`, and return it. Raises HeaderError for what is not
    exactly as the schema has it: names, offsets, sizes, metadata."""
    data_offset = header_size(data[:8])
    if len(data) < data_offset:
        raise HeaderError(f"header is truncated: expected {data_offset} bytes, got {len(data)}")
    identity, layout = _parts(bytes(data[8:data_offset]))
    header = Header(identity, layout, data_offset)
    if header.size_bytes != file_size_bytes:
        raise HeaderError(f"file size: expected {header.size_bytes} bytes by its header, got {file_size_bytes}")
    _check_rows(header)
    return header


def check_schema(header: Header, identity: identity_pb2.KvIdentity) -> None:
    """Raise HeaderError unless a file's tensors are exactly those of the KV identity."""
    file = header.identity
    expected = (
        expected_state_tensors(identity)
        if file.kind == "state"
        else expected_tensors(identity, file.tokens, file.window)
    )
    if header.tensors != expected:
        wrong = next((f for f, e in zip(header.tensors, expected, strict=False) if f != e), None)
        raise HeaderError(f"tensors: expected {len(expected)} of the layout, got {len(header.tensors)}; first: {wrong}")


def _parts(text: bytes) -> tuple[FileIdentity, Layout]:
    """A header's facts about its content and its tensors. The tensors' text, equal in all blocks of a model, takes
    ten times as long to check, so both are read one by one: `{A,B}` is an object if `{A}` and `{B}` are."""
    if text.startswith(b'{"__metadata__":'):
        try:
            identity, end = _leading_identity(text)
            of = identity.kv_identity_hash, identity.window, identity.tokens if identity.kind != "state" else 0
            return identity, _layout(text[end:].rstrip(b" "), *of)
        except ValueError:  # it is another writer's, or not right: the error then is that of the whole
            pass
    entries = _load_json(text)
    return _file_identity(entries.pop("__metadata__", None)), _checked_layout(entries)


def _leading_identity(text: bytes) -> tuple[FileIdentity, int]:
    """A header's facts about its content, and where they end. Raises ValueError where they are not its first entry."""
    if (spelled := _SPELLED.match(text)) is not None:
        chain, kind, kv_identity, start, tokens = map(bytes.decode, spelled.groups())
        return _of_whole_blocks(FileIdentity(kind, kv_identity, int(start), int(tokens), chain)), spelled.end()
    end = text.index(b'"},') + 2
    [metadata] = _load_json(text[:end] + b"}").values()
    return _file_identity(metadata), end


@lru_cache(LAYOUTS)
def _layout(entries: bytes, kv_identity_hash: str, window: int, rows: int) -> Layout:
    """The layout of these `tensor_entries`. `rows`: as many as the file claims; 0: it is a state. Where they
    are those of a checked file of the same group but for the rows, nothing else can be wrong.
    """
    known = _known_layouts(kv_identity_hash, window)
    if rows and known and known[0].entries(rows) == entries:
        return known[0].layout(rows)
    layout = _checked_layout(_load_json(b"{" + entries[1:]))
    if layout.rows == {rows}:
        known[:] = [RowLayouts(layout)]
    return layout


@lru_cache(LAYOUTS)
def _known_layouts(_kv_identity_hash: str, _window: int) -> list[RowLayouts]:
    """Of a group's last file that was checked, or none yet."""
    return []


def _checked_layout(entries: Mapping[str, object]) -> Layout:
    if not 1 <= len(entries) <= MAX_TENSORS:
        raise HeaderError(f"tensors: expected 1 to {MAX_TENSORS}, got {len(entries)}")
    return Layout(tuple(_contiguous_tensors(entries)))


def _load_json(data: bytes) -> dict[str, object]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise HeaderError(f"header is not the JSON expected: {error}") from None
    if not isinstance(value, dict):
        raise HeaderError(f"header: expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise HeaderError(f"header: key {key[:80]!r} appears twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> object:
    raise HeaderError(f"header: {text} is not a number")


def _file_identity(metadata: object) -> FileIdentity:
    if not isinstance(metadata, dict) or set(metadata) != {METADATA_KEY} or not isinstance(metadata[METADATA_KEY], str):
        raise HeaderError(f"__metadata__: expected the one key {METADATA_KEY!r} with a string")
    # JSON can spell a lone surrogate, which is no UTF-8: "surrogatepass" lets the JSON check refuse it.
    fields = _load_json(metadata[METADATA_KEY].encode("utf-8", "surrogatepass"))
    if set(fields) - {"window"} != _IDENTITY_FIELDS or not _are_exactly([fields["format"]], [1]):
        raise HeaderError("__metadata__.kvasir: expected format 1 with chain, kind, kv_identity, start, tokens, window")
    kind, start, tokens = fields["kind"], fields["start"], fields["tokens"]
    if kind not in _KINDS:
        raise HeaderError(f"kind: expected one of {_KINDS}, got {str(kind)[:80]!r}")
    for name in ("chain", "kv_identity"):
        if not isinstance(fields[name], str) or re.fullmatch(r"[0-9a-f]{64}", str(fields[name])) is None:
            raise HeaderError(f"{name}: expected 64 lower-case hex digits")
    if not _is_count(start) or not _is_count(tokens) or tokens == 0:
        raise HeaderError("start, tokens: expected whole numbers, tokens at least 1")
    window = _window(fields, str(kind))
    identity = FileIdentity(str(kind), str(fields["kv_identity"]), start, tokens, str(fields["chain"]), window)  # type: ignore[arg-type]
    return _of_whole_blocks(identity)


def _of_whole_blocks(file: FileIdentity) -> FileIdentity:
    """The same. Raises HeaderError for rows that are not those of a block, or of less than one where it is a tail."""
    kind, tokens = file.kind, file.tokens
    if (kind == "block" and tokens != BLOCK_TOKENS) or (kind == "tail" and tokens >= BLOCK_TOKENS):
        raise HeaderError(f"tokens: expected {BLOCK_TOKENS} for a block and fewer for a tail, got {tokens}")
    if file.start % BLOCK_TOKENS:
        raise HeaderError(f"start: expected a multiple of {BLOCK_TOKENS}, got {file.start}")
    return file


def _window(fields: Mapping[str, object], kind: str) -> int:
    """The group in a file's metadata. One spelling each: group 0 is an absent field."""
    if "window" not in fields:
        return 0
    window = fields["window"]
    if kind == "state" or not _is_count(window) or not 1 <= window <= _MAX_WINDOW:  # type: ignore[operator]
        raise HeaderError(f"window: expected 1 to {_MAX_WINDOW}, of a block or tail, or no such field")
    return window  # type: ignore[return-value]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _are_exactly(found: object, expected: Sequence[int]) -> bool:
    """Whether it is this list of whole numbers. `[False, 4096.0] == [0, 4096]` holds in Python and nowhere else."""
    return (
        isinstance(found, list)
        and len(found) == len(expected)
        and all(type(number) is int for number in found)
        and found == list(expected)
    )


def _contiguous_tensors(entries: Mapping[str, object]) -> Iterable[TensorSpec]:
    offset = 0
    for name, entry in entries.items():
        if _NAME.fullmatch(name) is None:
            raise HeaderError(f"tensor name: expected layer_N_k…, layer_N_v… or layer_N_state_M, got {name[:80]!r}")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise HeaderError(f"{name}: expected exactly dtype, shape and data_offsets")
        spec = tensor_spec(name, entry["dtype"], entry["shape"])
        if not _are_exactly(entry["data_offsets"], [offset, offset + spec.size_bytes]):
            raise HeaderError(f"{name}: data_offsets: expected [{offset}, {offset + spec.size_bytes}]")
        offset += spec.size_bytes
        yield spec


def tensor_spec(name: str, dtype: object, shape: object) -> TensorSpec:
    """A header entry's dtype and shape, checked. Raises HeaderError."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"{name}: dtype: expected one of {sorted(ITEM_BYTES)}, got {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_DIMS or not all(_is_count(n) and n > 0 for n in shape):
        raise HeaderError(f"{name}: shape: expected 1 to {MAX_DIMS} positive numbers")
    return TensorSpec(name, dtype, tuple(shape))


def _check_rows(header: Header) -> None:
    """K and V of blocks and tails are `[kv_heads, rows, …]` with the rows that the file names."""
    tokens = header.identity.tokens
    if header.identity.kind == "state" or header.layout.rows == {tokens}:
        return
    wrong = next(tensor for tensor in header.tensors if rows_of(tensor) != tokens)
    raise HeaderError(f"{wrong.name}: shape: expected [kv_heads, {tokens}, …]")

"""A prompt-cache file of mlx-lm, cut into blobs and joined again; all tensors keep their bytes. It needs no MLX.

Rows that each token adds (of `KVCache` and `QuantizedKVCache`) go into blocks of 256 tokens, so that caches with one
prefix share its blobs. Whatever their type is, they are kept as 16-bit words. All else goes into one state, whole."""

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import safetensors

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats import block_file, manifest
from kvasir.formats.block_file import FileBytes
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.tensor_layouts import expected_state_tensors, expected_tensors, plain_policy
from kvasir.formats.token_files import file_identities, state_identity

# Where the number of their tokens stands in the states of caches whose rows lie in the order of the tokens.
_OFFSETS = {"KVCache": "2", "QuantizedKVCache": "2"}
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
_ITEM_BYTES |= {"U64": 8, "I64": 8, "F64": 8}
_MOST_DEPTH = 16  # of lists in the state of a cache
_LINE = 512  # 16-bit words of a state's tensor in a line


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Pieces:
    """A cache as blobs: the manifest's bytes, the blobs that `known` did not have, and all blocks by chain hash."""

    identity_hash: str
    manifest: bytes
    blobs: Mapping[Digest, bytes]
    blocks: Mapping[str, Digest]


def is_trimmable(kept: manifest_pb2.Manifest) -> bool:
    """Whether the cache can be cut to any length: nothing in it is kept whole."""
    return len(kept.kv_identity.layers[-1].state_tensors) == 1


def split(
    data: bytes,
    tokens: Sequence[int],
    weights_digest: str,
    created_unix_ms: int,
    *,
    known: Sequence[Digest] = (),
    identity_hash: str = "",
) -> Pieces | None:
    """Cut a file. `known`: blocks of the first tokens, of the KV identity of that hash, whose rows the file lacks; None
    if its identity is another one. Raises InvalidArgument (file, tokens)."""
    tensors, metadata = _read(data)
    rows = _rows(tensors, metadata, len(tokens), len(known) * BLOCK_TOKENS)
    state = _state_tensors({name: tensor for name, tensor in tensors.items() if name not in rows}, metadata, rows)
    identity = _identity(list(rows.values()), state, weights_digest)
    name = kv_identity_hash(identity)
    if known and name != identity_hash:
        return None
    chain = chain_hashes(name, tokens)
    blocks, tail, blobs = list(known), None, {}
    for file in file_identities(name, tokens, chain, len(known)) if rows else ():
        start = file.start - len(known) * BLOCK_TOKENS
        parts = [_cut(tensor, start, file.tokens) for tensor in rows.values()]
        specs = expected_tensors(identity, file.tokens)
        blob = block_file.encode(file, list(zip(specs, parts, strict=True)))
        blobs[digest := Digest.of(blob)] = blob
        if file.kind == "block":
            blocks.append(digest)
        else:
            tail = digest
    specs = expected_state_tensors(identity)
    blob = block_file.encode(state_identity(name, tokens, len(tokens), chain), list(zip(specs, state, strict=True)))
    blobs[last := Digest.of(blob)] = blob
    made = manifest.build(
        blocks=blocks,
        tail=tail,
        states=[(len(tokens), last)],
        created_unix_ms=created_unix_ms,
        kv_identity=identity,
        token_ids=tokens,
        token_chars=[0] * len(tokens),
    )
    return Pieces(name, made, blobs, dict(zip(chain, blocks, strict=True)) if rows else {})


def join(kept: manifest_pb2.Manifest, read_blob: Callable[[Digest], FileBytes]) -> bytes:
    """The file again, of which mlx-lm loads what was saved. Raises InvalidArgument for a memory that is none."""
    if len(kept.states) != 1 or kept.states[0].tokens != len(kept.token_ids):
        raise _wrong("the memory is no prompt cache of mlx-lm")
    state = _tensors_of(read_blob(Digest.from_proto(kept.states[0].digest)), kept.kv_identity)
    skeleton, tensors = _open_state(list(state.values()))
    _check_places([*tensors, *(name for name, *_ in skeleton["rows"])])
    _check_places(skeleton["metadata"])
    listed = [*kept.blocks, *([kept.tail] if kept.HasField("tail") else [])]
    parts = [_tensors_of(read_blob(Digest.from_proto(each)), kept.kv_identity) for each in listed] if listed else []
    for index, (name, dtype, heads, width) in enumerate(skeleton["rows"]):
        if heads != kept.kv_identity.layers[index].kv_heads:  # these are bounded by the blobs' sizes
            raise _wrong("the rows' heads are not those of their layer")
        data = _joined([part[f"layer_{index}_k"] for part in parts], heads)
        tensors[name] = _Tensor(dtype, (1, heads, len(kept.token_ids), width), memoryview(data))
    return _written(tensors, skeleton["metadata"])


def _wrong(words: str) -> InvalidArgument:
    return InvalidArgument(f"mlx-lm cache file: {words}", field="file")


# --- the file ---


def _read(data: bytes) -> tuple[dict[str, _Tensor], dict[str, str]]:
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        (length,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError, struct.error) as error:
        raise _wrong(str(error)[:200]) from None
    tensors = {
        name: _Tensor(entry["dtype"], tuple(entry["shape"]), memoryview(entry["data"]))
        for name, entry in sorted(found, key=lambda each: _place(each[0]))
    }
    if strange := next((each.dtype for each in tensors.values() if each.dtype not in _ITEM_BYTES), ""):
        raise _wrong(f"expected tensors of {', '.join(_ITEM_BYTES)}, got {strange}")
    _check_places(tensors)
    _check_places(metadata)
    if "1.0" not in metadata:
        raise _wrong("expected the classes of its caches in the metadata; mlx_lm's save_prompt_cache writes them")
    return tensors, metadata


def _check_places(names: Collection[str]) -> None:
    """Raises InvalidArgument for names of lists with more gaps than entries: mlx-lm fills each gap."""
    last: dict[tuple[str, ...], int] = {}
    for name in names:
        parts = tuple(name.split(".", _MOST_DEPTH))
        for depth, part in enumerate(parts):
            with suppress(ValueError):
                last[parts[:depth]] = max(last.get(parts[:depth], 0), int(part))
        if len(parts) > _MOST_DEPTH:
            raise _wrong(f"expected at most {_MOST_DEPTH} lists in each other")
    if sum(last.values()) > _MOST_DEPTH * (len(names) + 1):
        raise _wrong("expected lists without gaps")


def _place(name: str) -> list[int]:
    return [int(part) if part.isdigit() else -1 for part in name.split(".")]


def _written(tensors: Mapping[str, _Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([struct.pack("<Q", len(header)), header, *(tensor.data for tensor in tensors.values())])


# --- rows ---


def _rows(tensors: Mapping[str, _Tensor], metadata: Mapping[str, str], tokens: int, first: int) -> dict[str, _Tensor]:
    """Tensors `[1, heads, rows, width]` of caches that can be cut, by name. Raises InvalidArgument (tokens)."""
    rows: dict[str, _Tensor] = {}
    for index in range(len(metadata)):
        offset = tensors.get(f"{index}.{_OFFSETS.get(metadata.get(f'1.{index}', ''), '')}")
        if offset is None:
            continue
        if (held := int.from_bytes(offset.data, "little")) != tokens:
            raise InvalidArgument(f"tokens: expected {held}, those of cache {index}, got {tokens}", field="tokens")
        own = {name: each for name, each in tensors.items() if name.startswith((f"{index}.0", f"{index}.1"))}
        if all(_has_rows(each, tokens - first) for each in own.values()):
            rows |= own
    return rows


def _has_rows(tensor: _Tensor, count: int) -> bool:
    shape, item_bytes = tensor.shape, _ITEM_BYTES[tensor.dtype]
    return len(shape) == 4 and shape[0] == 1 and shape[2] >= count and shape[3] * item_bytes % 2 == 0


def _cut(tensor: _Tensor, start: int, count: int) -> bytes:
    """Rows of all heads."""
    _, heads, held, width = tensor.shape
    row = width * _ITEM_BYTES[tensor.dtype]
    first = (head * held + start for head in range(heads))
    return b"".join(tensor.data[each * row : (each + count) * row] for each in first)


def _joined(parts: Sequence[memoryview], heads: int) -> bytes:
    """The rows of all parts, head by head."""
    sizes = [part.nbytes // heads for part in parts]
    return b"".join(
        part[head * size : (head + 1) * size] for head in range(heads) for part, size in zip(parts, sizes, strict=True)
    )


# --- the state ---


def _state_tensors(
    others: Mapping[str, _Tensor], metadata: Mapping[str, str], rows: Mapping[str, _Tensor]
) -> list[bytes]:
    """What is no row, in lines: the skeleton with all numbers, and then caches that are kept whole, if any."""
    cut = {name.partition(".")[0] for name in rows}
    parts: tuple[list[bytes | memoryview], list[bytes | memoryview]] = ([], [])
    listed = []
    for name, each in others.items():
        part = 0 if name.partition(".")[0] in cut or not each.data.nbytes else 1
        parts[part].append(each.data)
        listed.append([name, each.dtype, each.shape, part])
    described = [[name, each.dtype, each.shape[1], each.shape[3]] for name, each in rows.items()]
    skeleton = {"metadata": metadata, "rows": described, "others": listed}
    text = json.dumps(skeleton, separators=(",", ":")).encode()
    parts[0][:0] = [len(text).to_bytes(4, "little"), text]
    return [_in_lines(b"".join(part)) for part in parts if part]


def _in_lines(data: bytes) -> bytes:
    """The bytes, and zeros up to a power of two of lines: so the layout rarely changes while a cache grows."""
    lines = -(-len(data) // (2 * _LINE))
    return data.ljust((1 << (lines - 1).bit_length()) * 2 * _LINE, b"\0")


def _open_state(state: Sequence[memoryview]) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """The skeleton, and the tensors that are no rows."""
    length = int.from_bytes(state[0][:4], "little")
    skeleton = json.loads(bytes(state[0][4 : 4 + length]))
    ends, tensors = [4 + length, 0], {}
    for name, dtype, shape, part in skeleton["others"]:
        start = ends[part]
        ends[part] += math.prod(shape) * _ITEM_BYTES[dtype]
        data = state[part][start : ends[part]] if ends[part] > start else memoryview(b"")
        tensors[name] = _Tensor(dtype, tuple(shape), data)
    return skeleton, tensors


# --- what the store sees ---


def _identity(rows: Sequence[_Tensor], state: Sequence[bytes], weights_digest: str) -> identity_pb2.KvIdentity:
    """A layer for each tensor of rows, as so many 16-bit words, and one with the state."""
    layers = [
        identity_pb2.LayerLayout(
            kind=identity_pb2.LAYER_KIND_FULL,
            kv_heads=each.shape[1],
            key_dim=each.shape[3] * _ITEM_BYTES[each.dtype] // 2,
        )
        for each in rows
    ]
    half = identity_pb2.TENSOR_TYPE_FLOAT16
    lines = [identity_pb2.StateTensor(type=half, shape=[len(part) // (2 * _LINE), _LINE]) for part in state]
    layers.append(identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=lines))
    return identity_pb2.KvIdentity(weights_digest=weights_digest, layers=layers, policy=plain_policy(16))


def _tensors_of(blob: FileBytes, identity: identity_pb2.KvIdentity) -> dict[str, memoryview]:
    header = block_file.parse_header(blob, len(blob))
    block_file.check_schema(header, identity)
    return header.parts(blob)

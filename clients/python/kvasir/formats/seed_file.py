"""The seed's single-file form (its Appendix A): an agent's whole memory in one safetensors file, to and from blocks.

The seed's tensors are `[1, seq_len, kv_heads, …]`, ours `[kv_heads, rows, …]` per block. Only the order of rows
changes, so a memory that is exported and imported again is the same to the bit.

A window layer's tensors hold the last rows alone, those of the blocks that the memory still has: `window_starts` in the
metadata has of each window the token of the first row (`{"1024":3072}`). Without that key they hold all rows.

The seed's metadata (agent_id, model_id, total_tokens, prompt_text, token_sequence) shows neither which weights made the
KV nor where each token ends in the text. A `kvasir` key beside it has both. A file without that key is read only for a
KV identity that the caller names."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import safetensors
from google.protobuf import json_format

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats import block_file
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes, differing_field, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import first_touched_block, has_recurrent_layers, row_groups, windows_of
from kvasir.formats.manifest_checks import check, check_kv_identity
from kvasir.formats.tensor_layouts import TensorSpec, expected_tensors
from kvasir.formats.token_files import file_identities

# A long conversation's text and tokens stand in the header; the safetensors library stops at 100 MB.
MAX_HEADER_BYTES = 64 << 20
METADATA_KEY = "kvasir"
WINDOWS_KEY = "window_starts"
_SEED_KEYS = ("agent_id", "model_id", "total_tokens", "prompt_text", "token_sequence")
# Fields that the file has elsewhere, or that are computed again when it is read.
_REBUILT_FIELDS = ("token_ids", "text", "blocks", "tail", "states", "windows", "shareable_tokens", "parent_manifest")


@dataclass(frozen=True, slots=True)
class SeedFile:
    """The memory in a file of the seed's form, as Kvasir keeps it."""

    agent_id: str
    model_id: str
    manifest: manifest_pb2.Manifest
    blobs: Mapping[Digest, bytes]  # blocks and tail, of each window too, in the manifest's order


@dataclass(frozen=True, slots=True)
class _GroupRows:
    """The rows that a file has of one group of layers: those of the tokens `start` to `end`."""

    group: int
    start: int
    end: int

    def specs(self, identity: identity_pb2.KvIdentity) -> tuple[TensorSpec, ...]:
        """Our tensors of all these rows, `[kv_heads, rows, …]`."""
        rows = self.end - self.start
        return expected_tensors(identity, rows, self.group) if rows else ()

    def seed_specs(self, identity: identity_pb2.KvIdentity) -> Iterator[TensorSpec]:
        for spec in self.specs(identity):
            heads, rows, width = spec.shape
            yield TensorSpec(spec.name, spec.dtype, (1, rows, heads, width))


def to_seed_file(
    manifest: manifest_pb2.Manifest, read_blob: Callable[[Digest], bytes], *, agent_id: str, model_id: str
) -> Iterator[bytes]:
    """Yield the bytes of one safetensors file, tensor by tensor; a group's blobs are read once each, and held in
    memory. Raises FailedPrecondition for a memory with recurrent layers: the form has no place for their states; and
    for one that is asleep."""
    identity = manifest.kv_identity
    _check_has_form(identity)
    if manifest.HasField("asleep"):
        raise FailedPrecondition(
            "the seed's form holds rows of tokens, and this memory is asleep; use the archive form, or export it after "
            "the agent's next turn",
            reason="NO_SEED_FORM",
        )
    groups = _groups_of(manifest)
    specs = (spec for group in groups for spec in group.seed_specs(identity))
    yield _header(specs, _metadata(manifest, agent_id, model_id))
    for group in groups:
        parts = [_open_blob(read_blob(digest), identity) for digest in _blob_digests(manifest, group.group)]
        for ours in group.specs(identity):
            tensor = bytearray(ours.size_bytes)
            start = 0
            for rows, tensors in parts:
                _copy_rows(tensors[ours.name], rows, memoryview(tensor), start, heads=ours.shape[0], to_seed=True)
                start += rows
            yield bytes(tensor)


def from_seed_file(data: bytes, *, identity: identity_pb2.KvIdentity | None = None) -> SeedFile:
    """Read a file of the seed's form. Its bytes are freed on the way if the caller keeps no reference to them.

    `identity` is the KV identity that will use the memory. A file without Kvasir's metadata needs it. The ends of that
    file's tokens are unknown, so its memory can be continued whole but not cut. Raises InvalidArgument for a malformed
    file, and FailedPrecondition if the file's KV identity is another one, or unknown."""
    tensors, metadata = _read(data)
    del data  # the tensors are copies, and the blocks will be another copy: three are one too many
    manifest = _manifest(metadata, identity)
    _check_has_form(manifest.kv_identity)
    groups = _groups_in(metadata, manifest)
    wanted = [spec for group in groups for spec in group.seed_specs(manifest.kv_identity)]
    _check_tensors({name: spec for name, (spec, _) in tensors.items()}, {spec.name: spec for spec in wanted})
    rows = {name: data for name, (_, data) in tensors.items()}
    blobs: dict[Digest, bytes] = {}
    identity_hash = kv_identity_hash(manifest.kv_identity)
    chain = chain_hashes(identity_hash, manifest.token_ids)
    for group in groups:
        first = group.start // BLOCK_TOKENS
        listed = manifest.windows.add(window=group.group, first_block=first) if group.group else manifest
        for file_identity in file_identities(identity_hash, manifest.token_ids, chain, first, group.group):
            blob = _block(file_identity, manifest.kv_identity, rows, group.start)
            digest = Digest.of(blob)
            blobs[digest] = blob
            if file_identity.kind == "block":
                listed.blocks.append(digest.to_proto())
            else:
                listed.tail.CopyFrom(digest.to_proto())
    check(manifest)
    return SeedFile(metadata["agent_id"], metadata["model_id"], manifest, blobs)


# --- groups of layers ---


def _check_has_form(identity: identity_pb2.KvIdentity) -> None:
    if has_recurrent_layers(identity):
        raise FailedPrecondition(
            "the seed's form holds rows of tokens only, and this memory has states; use the archive form",
            reason="NO_SEED_FORM",
        )


def _groups_of(manifest: manifest_pb2.Manifest) -> list[_GroupRows]:
    first_blocks = {each.window: int(each.first_block) for each in manifest.windows}  # of the last runs
    tokens = len(manifest.token_ids)
    return [
        _GroupRows(group, first_blocks.get(group, 0) * BLOCK_TOKENS, tokens)
        for group in row_groups(manifest.kv_identity)
    ]


def _groups_in(metadata: Mapping[str, str], manifest: manifest_pb2.Manifest) -> list[_GroupRows]:
    """The rows that a stranger's file claims to have. Raises InvalidArgument."""
    starts, tokens = _window_starts(metadata, windows_of(manifest.kv_identity)), len(manifest.token_ids)
    for window, start in starts.items():
        most = first_touched_block(window, tokens) * BLOCK_TOKENS
        if type(start) is not int or not 0 <= start <= most or start % BLOCK_TOKENS:
            raise _malformed(f"{WINDOWS_KEY}: {window}: expected a multiple of {BLOCK_TOKENS} up to {most}")
    return [_GroupRows(group, starts.get(group, 0), tokens) for group in row_groups(manifest.kv_identity)]


def _window_starts(metadata: Mapping[str, str], windows: Iterable[int]) -> dict[int, int]:
    if WINDOWS_KEY not in metadata:
        return dict.fromkeys(windows, 0)
    found = _json_object(metadata[WINDOWS_KEY].encode("utf-8", "surrogatepass"), WINDOWS_KEY)
    if set(found) != {str(window) for window in windows}:
        raise _malformed(f"{WINDOWS_KEY}: expected one number for each of the windows {sorted(windows)}")
    return {window: found[str(window)] for window in windows}  # type: ignore[misc]


# --- rows ---


def _copy_rows(block: memoryview, rows: int, seed: memoryview, start: int, *, heads: int, to_seed: bool) -> None:
    """Copy one tensor's rows to or from `[1, seq_len, heads, …]`, with a strided copy per head and machine word."""
    row_bytes = len(block) // (heads * rows)
    ours, theirs, word_bytes = _as_words(block, seed, row_bytes)
    words = row_bytes // word_bytes
    for head in range(heads):
        for word in range(words):
            here = slice(head * rows * words + word, (head + 1) * rows * words, words)
            first = (start * heads + head) * words + word
            there = slice(first, first + (rows - 1) * heads * words + 1, heads * words)
            if to_seed:
                theirs[there] = ours[here]
            else:
                ours[here] = theirs[there]


def _as_words(block: memoryview, seed: memoryview, row_bytes: int) -> tuple[memoryview, memoryview, int]:
    """Both buffers as the widest words that divide a row, and those words' bytes."""
    if row_bytes % 8 == 0:
        return block.cast("Q"), seed.cast("Q"), 8
    if row_bytes % 4 == 0:
        return block.cast("I"), seed.cast("I"), 4
    return block.cast("H"), seed.cast("H"), 2


def _block(
    file_identity: FileIdentity, identity: identity_pb2.KvIdentity, rows: Mapping[str, memoryview], first_row: int
) -> bytes:
    """A block or tail, out of whole tensors that begin with the row of the token at `first_row`."""
    tokens, start = file_identity.tokens, file_identity.start - first_row
    tensors = []
    for spec in expected_tensors(identity, tokens, file_identity.window):
        buffer = bytearray(spec.size_bytes)
        _copy_rows(memoryview(buffer), tokens, rows[spec.name], start, heads=spec.shape[0], to_seed=False)
        tensors.append((spec, buffer))
    return block_file.encode(file_identity, tensors)


def _blob_digests(manifest: manifest_pb2.Manifest, group: int) -> Iterator[Digest]:
    """A group's blocks and tail, in order."""
    # Of a window the last run: the form has one array for all rows.
    listed = [each for each in manifest.windows if each.window == group][-1] if group else manifest
    yield from map(Digest.from_proto, listed.blocks)
    if listed.HasField("tail"):
        yield Digest.from_proto(listed.tail)


def _open_blob(blob: bytes, identity: identity_pb2.KvIdentity) -> tuple[int, dict[str, memoryview]]:
    """Rows of a block or tail, and its tensors' bytes by name."""
    header = block_file.parse_header(blob, len(blob))
    block_file.check_schema(header, identity)
    return header.identity.tokens, header.parts(blob)


# --- writing the header ---


# Ours, because the library takes all tensors at once, as raw pointers where there is no numpy; a memory has gigabytes.
def _header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _metadata(manifest: manifest_pb2.Manifest, agent_id: str, model_id: str) -> dict[str, str]:
    rest = manifest_pb2.Manifest()
    rest.CopyFrom(manifest)
    for field in _REBUILT_FIELDS:
        rest.ClearField(field)  # type: ignore[arg-type]
    starts = {str(group.group): group.start for group in _groups_of(manifest) if group.group}
    return {
        "agent_id": agent_id,
        "model_id": model_id,
        "total_tokens": str(len(manifest.token_ids)),
        "prompt_text": manifest.text,
        "token_sequence": json.dumps(list(manifest.token_ids)),
        **({WINDOWS_KEY: json.dumps(starts, separators=(",", ":"))} if starts else {}),
        METADATA_KEY: json_format.MessageToJson(rest, preserving_proto_field_name=True, indent=None),
    }


# --- reading the header ---


def _malformed(message: str) -> InvalidArgument:
    return InvalidArgument(f"seed file: {message}", reason="SEED_FILE_MALFORMED", field="file")


def _read(data: bytes) -> tuple[dict[str, tuple[TensorSpec, memoryview]], dict[str, str]]:
    """A stranger's file: its tensors by name, by the safetensors library, and its metadata, which that library does not
    give: we read the header's JSON, and refuse a key that occurs twice."""
    metadata = _checked_metadata(data)
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise _malformed(str(error)[:200]) from None
    for name, entry in found:
        if not 1 <= len(entry["shape"]) <= block_file.MAX_DIMS:
            raise _malformed(f"{name[:80]}: shape: expected 1 to {block_file.MAX_DIMS} numbers")
    tensors = {
        name: (TensorSpec(name, entry["dtype"], tuple(entry["shape"])), memoryview(entry["data"]))
        for name, entry in found
    }
    return tensors, metadata


def _checked_metadata(data: bytes) -> dict[str, str]:
    if len(data) < 8:
        raise _malformed(f"expected at least 8 bytes, got {len(data)}")
    (length,) = struct.unpack_from("<Q", data)
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise _malformed(f"header length: expected 2 to {min(MAX_HEADER_BYTES, len(data) - 8)}, got {length}")
    entries = _json_object(data[8 : 8 + length], "header")
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed("__metadata__: expected an object of strings")
    if missing := [key for key in _SEED_KEYS if key not in metadata]:
        raise _malformed(f"__metadata__ lacks {', '.join(missing)}")
    if len(entries) > block_file.MAX_TENSORS:
        raise _malformed(f"expected at most {block_file.MAX_TENSORS} tensors, got {len(entries)}")
    return metadata


def _check_tensors(found: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> None:
    for name, spec in wanted.items():
        if found.get(name) != spec:
            got = f"{found[name].dtype} {list(found[name].shape)}" if name in found else "none"
            raise FailedPrecondition(
                f"seed file: {name}: expected {spec.dtype} {list(spec.shape)} of this KV identity's layout, got {got}",
                reason="KV_IDENTITY_DIFFERS",
            )
    if extra := sorted(set(found) - set(wanted)):
        raise FailedPrecondition(
            f"seed file: {extra[0][:80]} and {len(extra) - 1} more tensors are not in this KV identity's layout",
            reason="KV_IDENTITY_DIFFERS",
        )


def _manifest(metadata: Mapping[str, str], identity: identity_pb2.KvIdentity | None) -> manifest_pb2.Manifest:
    """The manifest of a file's metadata, without blocks and tail."""
    token_ids = _token_ids(metadata)
    text = metadata["prompt_text"]
    if METADATA_KEY in metadata:
        manifest = _own_manifest(metadata[METADATA_KEY])
        if identity is not None and (difference := differing_field(identity, manifest.kv_identity)):
            raise FailedPrecondition(f"seed file: {difference}", reason="KV_IDENTITY_DIFFERS")
    elif identity is None:
        raise FailedPrecondition(
            "seed file: it does not name the weights, layout and KV policy that made it, and model_id "
            f"{metadata['model_id'][:80]!r} is only a name; name the model that it belongs to",
            reason="KV_IDENTITY_UNKNOWN",
        )
    else:
        # It is unknown where each token ends in the text: as if the last token completed all of it.
        ends = [0] * (len(token_ids) - 1) + [len(text)]
        manifest = manifest_pb2.Manifest(format=1, kv_identity=identity, token_chars=ends)
    if len(manifest.token_chars) != len(token_ids) or sum(manifest.token_chars) != len(text):
        raise _malformed(f"token_chars: expected {len(token_ids)} numbers that add up to {len(text)}")
    try:
        manifest.text = text
        manifest.token_ids.extend(token_ids)
    except (ValueError, UnicodeError) as error:
        raise _malformed(f"prompt_text or token_sequence: {type(error).__name__}") from None
    return manifest


def _own_manifest(text: str) -> manifest_pb2.Manifest:
    try:
        manifest = json_format.Parse(text, manifest_pb2.Manifest())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise _malformed(f"__metadata__.{METADATA_KEY}: {type(error).__name__}") from None
    check_kv_identity(manifest.kv_identity)
    if manifest.format != 1 or any(field.name in _REBUILT_FIELDS for field, _ in manifest.ListFields()):
        raise _malformed(f"__metadata__.{METADATA_KEY}: expected format 1 and none of {', '.join(_REBUILT_FIELDS)}")
    return manifest


def _token_ids(metadata: Mapping[str, str]) -> list[int]:
    tokens = _json(metadata["token_sequence"].encode("utf-8", "surrogatepass"), "token_sequence")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise _malformed("token_sequence: expected a JSON list of token ids")
    if not tokens or metadata["total_tokens"] != str(len(tokens)):
        raise _malformed(f"total_tokens: expected {len(tokens)} by token_sequence, at least 1")
    return tokens


def _json_object(data: bytes, what: str) -> dict[str, object]:
    value = _json(data, what)
    if not isinstance(value, dict):
        raise _malformed(f"{what}: expected a JSON object, got {type(value).__name__}")
    return value


def _json(data: bytes, what: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise _malformed(f"{what}: a key appears twice")
        return result

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _malformed(f"{what} is not JSON: {type(error).__name__}") from None

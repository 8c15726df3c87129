"""Manifests: how one is built, and how one of any origin is checked, field by field, as the bytes that came."""

import base64
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from blake3 import blake3
from google.protobuf.message import DecodeError

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.frame_messages import varint
from kvasir.formats.layer_groups import KEEPS_ALL, first_touched_block, has_recurrent_layers, windows_of
from kvasir.names import check_request_id

# Of the first release. It changes with the first change after it that a reader of that release would take for something
# else; windows and their runs were added before, and a reader without them refuses the layouts that have any.
FORMAT = 1
# Half a million tokens with their text and their messages are 7 MiB.
MAX_MANIFEST_BYTES = 16 << 20
# Fields of a manifest and of the messages inside it: parsed, each may take a hundred bytes.
MAX_RECORDS = 500_000
MAX_TOKENS = 4_000_000
MAX_LAYERS = 1024
MAX_STATES = 1024
MAX_MESSAGES = 100_000
MAX_DROPPED_MESSAGES = 1 << 31
MAX_DIMENSION = 1 << 20
MAX_TEMPLATE_TIME_MS = 253_402_300_799_999  # the last of the year 9999
MAX_TOOL_PLACES = 1 << 16
MAX_ASLEEP_BYTES = 1 << 53  # of all files that were let go
MAX_MILLISECONDS_TO_WAKE = 365 * 24 * 3600 * 1000
MAX_STATE_TENSORS = 16
MAX_STATE_AXES = 7
ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = frozenset({"", "stop", "length", "stop_sequence", "tool_calls", "cancelled"})
_BITS = (4, 8, 16)
# In a remembered text it stands inside letters that spell a special token (manifest.proto).
_GUARD = "\ufdd0"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # of the wire
_MAX_VARINT_BYTES = 10
_LEAST_RECORD_BYTES = 2  # a tag, and a number or a length
_FORMAT = manifest_pb2.Manifest(format=FORMAT).SerializeToString()  # every manifest of this format begins with it
_IDS, _CHARS = (manifest_pb2.Manifest.DESCRIPTOR.fields_by_name[name].number for name in ("token_ids", "token_chars"))

_KEEPS_STATE = (identity_pb2.LAYER_KIND_WINDOW, identity_pb2.LAYER_KIND_STATE)
_STATE_TYPES = (identity_pb2.TENSOR_TYPE_FLOAT32, identity_pb2.TENSOR_TYPE_FLOAT16, identity_pb2.TENSOR_TYPE_BFLOAT16)


# --- records are counted before they are parsed ---
# An empty submessage costs 2 bytes on the wire and a hundred times as much in memory: a size limit is not enough.


class _ScanError(ValueError):
    """The bytes are not the wire form of a message, or have too many records."""


def _count_records(data: bytes, descriptor: Any, most: int) -> int:
    """How often fields occur in a message and those inside it. Raises _ScanError when there are more than `most`."""
    return _count(data, 0, len(data), _table(descriptor), 0, most)


@cache
def _table(descriptor: Any) -> dict[int, Any]:
    """Field number → the table of the messages in that field. No message type contains itself."""
    return {field.number: _table(field.message_type) for field in descriptor.fields if field.message_type is not None}


def _count(data: bytes, position: int, end: int, table: dict[int, Any], count: int, most: int) -> int:
    while position < end:
        count += 1
        if count > most:
            raise _ScanError(f"expected at most {most} fields")
        tag, position = _varint(data, position, end)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, position = _varint(data, position, end)
            if size > end - position:
                raise _ScanError("a field is longer than what holds it")
            inner = table.get(tag >> 3)
            if inner is not None:
                count = _count(data, position, position + size, inner, count, most)
            position += size
        elif wire_type == _VARINT:
            _, position = _varint(data, position, end)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise _ScanError(f"wire type {wire_type}")
    if position != end:
        raise _ScanError("the last field is cut")
    return count


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """A number, and the position behind it."""
    value = shift = 0
    for place in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise _ScanError("a number is cut or too long")


# --- manifests ---


def without_guards(text: str) -> str:
    """A remembered text as its readers saw it. Of guards in a caller's messages the engine makes U+FFFD."""
    return text.replace(_GUARD, "")


def build(
    *,
    blocks: Iterable[Digest] = (),
    tail: Digest | None = None,
    states: Iterable[tuple[int, Digest]] = (),
    created_unix_ms: int,
    **fields: Any,
) -> bytes:
    """The bytes of a checked manifest with these `fields` of the message. Raises InvalidArgument. `states` are (tokens
    seen, digest), ascending; `windows` by window and first block, ascending."""
    manifest = manifest_pb2.Manifest(format=FORMAT, created_unix_ms=created_unix_ms, **fields)
    manifest.MergeFrom(_files(blocks, tail, states))
    check(manifest)
    return manifest.SerializeToString(deterministic=True)


class TokensApart:
    """A manifest whose numbers lie beside its message: protobuf takes milliseconds for a long conversation's."""

    __slots__ = ("_message", "token_chars", "token_ids")

    def __init__(self, message: manifest_pb2.Manifest, token_ids: Sequence[int], token_chars: Sequence[int]) -> None:
        self._message = message
        self.token_ids = token_ids
        self.token_chars = token_chars

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


@dataclass(frozen=True, slots=True)
class BegunManifest:
    """All of a manifest but its files, checked; `data` are its bytes."""

    message: Any  # TokensApart
    data: bytes


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as a manifest's bytes have them. Those of several runs may be joined. Raises ValueError as a message."""
    whole = manifest_pb2.Manifest(token_ids=numbers).SerializeToString()
    return whole[_varint(whole, 1, len(whole))[1] :] if whole else b""


def begun(
    *,
    token_ids: Sequence[int],
    token_chars: Sequence[int],
    packed_ids: bytes | None = None,
    created_unix_ms: int,
    **fields: Any,
) -> BegunManifest:
    """A manifest that names no file yet, with these `fields` of the message. `packed_ids`: of the token ids, where they
    are known. Raises InvalidArgument."""
    message = manifest_pb2.Manifest(format=FORMAT, created_unix_ms=created_unix_ms, **fields)
    whole = TokensApart(message, token_ids, token_chars)
    _check_content(whole)
    ids, chars = packed(token_ids) if packed_ids is None else packed_ids, _packed_small(token_chars)
    rest, begin = message.SerializeToString(deterministic=True), len(_FORMAT)
    # Behind the format: a reader that takes the numbers as bytes finds them first.
    return BegunManifest(whole, b"".join((rest[:begin], _field(_IDS, ids), _field(_CHARS, chars), rest[begin:])))


def _packed_small(numbers: Sequence[int]) -> bytes:
    """As `packed`, faster where all are below 128."""
    try:
        data = bytes(tuple(numbers))
    except ValueError:
        return packed(numbers)
    return data if data.isascii() else packed(numbers)


def _field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def completed(
    begun: BegunManifest,
    *,
    blocks: Iterable[Digest] = (),
    tail: Digest | None = None,
    states: Iterable[tuple[int, Digest]] = (),
    windows: Iterable[manifest_pb2.WindowBlocks] = (),
    parent_manifest: str = "",
    asleep: manifest_pb2.Asleep | None = None,
) -> bytes:
    """The bytes of the manifest that names these files, however long the rest is: they follow its bytes, and a reader
    joins them. Completed again, it names others. Raises InvalidArgument."""
    named = _files(blocks, tail, states)
    named.MergeFrom(manifest_pb2.Manifest(windows=windows, parent_manifest=parent_manifest, asleep=asleep))
    for name in ("blocks", "tail", "states", "windows", "parent_manifest", "asleep"):
        begun.message.ClearField(name)
    begun.message.MergeFrom(named)
    _check_files(begun.message)
    return begun.data + named.SerializeToString(deterministic=True)


def _files(
    blocks: Iterable[Digest], tail: Digest | None, states: Iterable[tuple[int, Digest]]
) -> manifest_pb2.Manifest:
    return manifest_pb2.Manifest(
        blocks=[digest.to_proto() for digest in blocks],
        tail=None if tail is None else tail.to_proto(),
        states=[manifest_pb2.StatePoint(tokens=tokens, digest=digest.to_proto()) for tokens, digest in states],
    )


def parse(data: bytes | bytearray | memoryview) -> manifest_pb2.Manifest:
    """Read and check a manifest's bytes. Raises InvalidArgument naming the first wrong field."""
    size_bytes = memoryview(data).nbytes
    if size_bytes > MAX_MANIFEST_BYTES:
        raise _wrong("", f"expected at most {MAX_MANIFEST_BYTES} bytes, got {size_bytes}")
    held = bytes(data)
    try:
        manifest = _message(held, MAX_RECORDS)
    except (DecodeError, _ScanError) as error:
        raise _wrong("", f"not a serialized kvasir.cachestore.v1.Manifest: {error}") from None
    check(manifest)
    return manifest


def parse_apart(
    data: bytes | bytearray | memoryview, ids_of: Callable[[manifest_pb2.Manifest, bytes], Sequence[int]]
) -> TokensApart | None:
    """As `parse`, in a fraction of the time; None for bytes that `parse` has to read, or refuses. `ids_of` gives the
    token ids of a message that lacks them and of their packed bytes."""
    held = bytes(data)
    try:
        if len(held) > MAX_MANIFEST_BYTES or (places := _numbers(held)) is None:
            return None
        (first, first_end, _), (second, second_end, _) = sorted(places.values())
        rest = b"".join((held[:first], held[first_end:second], held[second_end:]))
        message = _message(rest, MAX_RECORDS - len(places))
        ids, chars = (held[begin:end] for _, end, begin in (places[_IDS], places[_CHARS]))
        if message.token_ids or message.token_chars or not chars.isascii():
            return None
        manifest = TokensApart(message, ids_of(message, ids), chars)
    except (DecodeError, _ScanError):
        return None
    check(manifest)
    return manifest


def unpacked(ids: bytes) -> Sequence[int]:
    """Numbers that `packed` packed. Raises DecodeError."""
    return manifest_pb2.Manifest.FromString(_field(_IDS, ids)).token_ids


def _message(held: bytes, most_records: int) -> manifest_pb2.Manifest:
    if len(held) > most_records * _LEAST_RECORD_BYTES:
        _count_records(held, manifest_pb2.Manifest.DESCRIPTOR, most_records)
    return manifest_pb2.Manifest.FromString(held)


def _numbers(held: bytes) -> dict[int, tuple[int, int, int]] | None:
    """Where the packed lists of numbers begin and end among the leading fields, and where their bytes begin; None
    unless both are there, once. Raises _ScanError."""
    places: dict[int, tuple[int, int, int]] = {}
    position = 0
    for _ in range(_CHARS):
        if position >= len(held) or len(places) == len((_IDS, _CHARS)):
            break
        tag, begin = _varint(held, position, len(held))
        size, end = _varint(held, begin, len(held))
        number, wire_type = tag >> 3, tag & 7
        if number in (_IDS, _CHARS) and number not in places and wire_type == _BYTES:
            places[number] = position, end + size, end
        elif number >= _CHARS or number in places or wire_type not in (_VARINT, _BYTES):
            return None
        position = end + size if wire_type == _BYTES else end
    is_whole = len(places) == len((_IDS, _CHARS)) and position <= len(held)
    return places if is_whole else None


def reply_id(request_id: str, choice: int = 0) -> str:
    """Names a turn's reply, of which an agent remembers the first choice."""
    return f"{request_id}-{choice}"


def call_id(reply: str, number: int) -> str:
    """Of a call in a reply, by its name: nine letters and digits, as the templates of Mistral's models want."""
    return base64.b32encode(blake3(f"{reply}-{number}".encode()).digest())[:9].decode()


def check(manifest: manifest_pb2.Manifest | TokensApart) -> None:
    """Raise InvalidArgument, naming the field, unless the manifest agrees with itself and keeps the limits."""
    _check_content(manifest)
    _check_files(manifest)


def _check_files(manifest: Any) -> None:
    """Of what is known last: the files, and the version before."""
    if manifest.HasField("asleep"):
        _check_asleep(manifest)
    else:
        _check_blobs(manifest)
    _check_optional_hash("parent_manifest", manifest.parent_manifest)


def _check_content(manifest: Any) -> None:
    if manifest.format != FORMAT:
        raise _wrong("format", f"expected {FORMAT}, got {manifest.format}")
    check_kv_identity(manifest.kv_identity)
    _check_tokens(manifest)
    _check_computed(manifest)
    for name in ("tokenizer_digest", "template_digest"):
        _check_optional_hash(name, getattr(manifest, name))
    _check_messages(manifest)
    if manifest.HasField("turn"):
        _check_turn(manifest)
    if (dropped := manifest.shortened.dropped_messages) > MAX_DROPPED_MESSAGES:
        raise _wrong("shortened.dropped_messages", f"expected at most {MAX_DROPPED_MESSAGES}, got {dropped}")
    if (behind := manifest.shortened.dropped_behind_question) > dropped:
        raise _wrong(
            "shortened.dropped_behind_question", f"expected at most {dropped}, all that are left out, got {behind}"
        )
    if manifest.created_unix_ms < 0:
        raise _wrong("created_unix_ms", f"expected 0 or more, got {manifest.created_unix_ms}")
    if not 0 <= manifest.template_time_ms <= MAX_TEMPLATE_TIME_MS:
        raise _wrong("template_time_ms", f"expected 0 to {MAX_TEMPLATE_TIME_MS}, got {manifest.template_time_ms}")
    _check_optional_hash("tools_order.set_hash", manifest.tools_order.set_hash)
    if (places := len(manifest.tools_order.places)) > MAX_TOOL_PLACES:
        raise _wrong("tools_order.places", f"expected at most {MAX_TOOL_PLACES}, got {places}")


def check_kv_identity(identity: identity_pb2.KvIdentity) -> None:
    """Raise InvalidArgument unless the identity describes KV that could exist."""
    if not is_hash(identity.weights_digest):
        raise _wrong("kv_identity.weights_digest", "expected 64 lower-case hex digits")
    if not 1 <= len(identity.layers) <= MAX_LAYERS:
        raise _wrong("kv_identity.layers", f"expected 1 to {MAX_LAYERS}, got {len(identity.layers)}")
    policy = identity.policy
    for name in ("key_bits", "value_bits"):
        if getattr(policy, name) not in _BITS:
            raise _wrong(f"kv_identity.policy.{name}", f"expected one of {_BITS}, got {getattr(policy, name)}")
    is_quantized = min(policy.key_bits, policy.value_bits) < 16
    if is_quantized != (policy.group_size > 0):
        raise _wrong("kv_identity.policy.group_size", "expected above 0 when quantized, else 0")
    if policy.scale_type not in (identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16):
        raise _wrong("kv_identity.policy.scale_type", "expected FLOAT16 or BFLOAT16")
    if policy.key_rotation not in (identity_pb2.KEY_ROTATION_NONE, identity_pb2.KEY_ROTATION_HADAMARD):
        raise _wrong("kv_identity.policy.key_rotation", "expected NONE or HADAMARD")
    exact = list(policy.exact_layers)
    if exact != sorted(set(exact)) or (exact and exact[-1] >= len(identity.layers)):
        raise _wrong("kv_identity.policy.exact_layers", "expected ascending indexes of layers")
    for index, layer in enumerate(identity.layers):
        _check_layer(f"kv_identity.layers[{index}]", layer)


def keeps_all_tokens(identity: identity_pb2.KvIdentity) -> bool:
    """Whether any layer keeps every token, so that there are blocks and a tail."""
    return any(layer.kind in KEEPS_ALL for layer in identity.layers)


def digests(manifest: manifest_pb2.Manifest) -> list[Digest]:
    """The blobs that a manifest names, each once: blocks, tail, each window's blocks and tail, states."""
    return list(dict.fromkeys(map(Digest.from_proto, _named(manifest))))


def tokens_within_chars(token_chars: Sequence[int], chars: int) -> int:
    """How many leading tokens lie wholly inside `chars` code points; the cut is never inside a character."""
    tokens = bisect_right(list(accumulate(token_chars)), chars)
    while tokens and token_chars[tokens - 1] == 0:
        tokens -= 1
    return tokens


def _check_tokens(manifest: manifest_pb2.Manifest) -> None:
    count = len(manifest.token_ids)
    if not 1 <= count <= MAX_TOKENS:
        raise _wrong("token_ids", f"expected 1 to {MAX_TOKENS}, got {count}")
    if len(manifest.token_chars) != count:
        raise _wrong("token_chars", f"expected {count}, one per token, got {len(manifest.token_chars)}")
    if sum(manifest.token_chars) != len(manifest.text):
        raise _wrong(
            "token_chars", f"expected a sum of {len(manifest.text)}, the text's length, got {sum(manifest.token_chars)}"
        )
    if manifest.shareable_tokens > count:
        raise _wrong("shareable_tokens", f"expected at most {count}, got {manifest.shareable_tokens}")


def _check_blobs(manifest: manifest_pb2.Manifest) -> None:
    count = len(manifest.token_ids) if keeps_all_tokens(manifest.kv_identity) else 0
    _check_rows("", manifest, 0, count)
    _check_windows(manifest)
    _check_states(manifest)
    hashes = [digest.hash for digest in _named(manifest)]
    if len(set(hashes)) != len(hashes):
        raise _wrong("blobs", f"expected {len(hashes)} different ones, got {len(set(hashes))}")


def _check_asleep(manifest: manifest_pb2.Manifest) -> None:
    """A sleeping manifest names no blob, and knows how its rows were computed."""
    for name in ("blocks", "windows", "states"):
        if getattr(manifest, name):
            raise _wrong(name, "expected none: the snapshot is asleep")
    if manifest.HasField("tail"):
        raise _wrong("tail", "expected none: the snapshot is asleep")
    if not manifest.HasField("computed"):
        raise _wrong("computed", "expected it: the snapshot is asleep")
    if not manifest.asleep.files:
        raise _wrong("asleep.files", "expected one or more")
    for index, digest in enumerate(manifest.asleep.files):
        _check_digest(f"asleep.files[{index}]", digest)
    if (size_bytes := sum(digest.size_bytes for digest in manifest.asleep.files)) > MAX_ASLEEP_BYTES:
        raise _wrong("asleep.files", f"expected at most {MAX_ASLEEP_BYTES} bytes in all, got {size_bytes}")
    if (wake_ms := manifest.asleep.wake_ms) > MAX_MILLISECONDS_TO_WAKE:
        raise _wrong("asleep.wake_ms", f"expected at most {MAX_MILLISECONDS_TO_WAKE}, got {wake_ms}")


def _check_computed(manifest: manifest_pb2.Manifest) -> None:
    edges, tokens = manifest.computed.decoded, len(manifest.token_ids)
    if len(edges) % 2:
        raise _wrong("computed.decoded", f"expected pairs, got {len(edges)} numbers")
    before = 0
    for index, edge in enumerate(edges):
        least = before if index and index % 2 == 0 else before + 1  # a run may begin where the last one ended
        if not least <= edge <= tokens:
            raise _wrong(f"computed.decoded[{index}]", f"expected {least} to {tokens}, got {edge}")
        before = edge


def _check_rows(
    field: str, listed: manifest_pb2.Manifest | manifest_pb2.WindowBlocks, first_block: int, tokens: int
) -> None:
    """Blocks from `first_block` on and a tail hold the rows of `tokens` tokens. `field` ends with a dot or is empty."""
    expected = tokens // BLOCK_TOKENS - first_block
    if len(listed.blocks) != expected:
        raise _wrong(f"{field}blocks", f"expected {expected}, got {len(listed.blocks)}")
    rest = tokens % BLOCK_TOKENS
    if listed.HasField("tail") != bool(rest):
        raise _wrong(f"{field}tail", f"expected {f'one, for {rest} tokens' if rest else 'none'}")
    for index, block in enumerate(listed.blocks):
        _check_digest(f"{field}blocks[{index}]", block)
    if listed.HasField("tail"):
        _check_digest(f"{field}tail", listed.tail)


def _check_windows(manifest: manifest_pb2.Manifest) -> None:
    """The runs of each window of the layout; the last run has all the blocks that the next token sees."""
    found, expected = [each.window for each in manifest.windows], list(windows_of(manifest.kv_identity))
    if list(dict.fromkeys(found)) != expected or found != sorted(found):
        raise _wrong("windows", f"expected the layout's {expected}, ascending, got {found[:MAX_LAYERS]}")
    tokens, least = len(manifest.token_ids), 0
    for index, each in enumerate(manifest.windows):
        field, is_last = f"windows[{index}].", found[index + 1 : index + 2] != [each.window]
        touched = first_touched_block(each.window, tokens)
        if not least <= each.first_block <= touched:
            raise _wrong(f"{field}first_block", f"expected {least} to {touched}, got {each.first_block}")
        if not is_last and not each.blocks:
            raise _wrong(f"{field}blocks", "expected some: another run of the window follows")
        end = int(each.first_block) + len(each.blocks)
        _check_rows(field, each, each.first_block, tokens if is_last else end * BLOCK_TOKENS)
        least = 0 if is_last else end + 1


def _check_states(manifest: manifest_pb2.Manifest) -> None:
    if manifest.states and not has_recurrent_layers(manifest.kv_identity):
        raise _wrong("states", "expected none: no layer is recurrent")
    if len(manifest.states) > MAX_STATES:
        raise _wrong("states", f"expected at most {MAX_STATES}, got {len(manifest.states)}")
    seen = 0
    for index, point in enumerate(manifest.states):
        if not seen < point.tokens <= len(manifest.token_ids):
            raise _wrong(
                f"states[{index}].tokens", f"expected {seen + 1} to {len(manifest.token_ids)}, got {point.tokens}"
            )
        _check_digest(f"states[{index}].digest", point.digest)
        seen = point.tokens


def _named(manifest: manifest_pb2.Manifest) -> Iterator[manifest_pb2.Digest]:
    """Digests in the manifest's order."""
    groups: tuple[manifest_pb2.Manifest | manifest_pb2.WindowBlocks, ...] = (manifest, *manifest.windows)
    for listed in groups:
        yield from listed.blocks
        if listed.HasField("tail"):
            yield listed.tail
    yield from (point.digest for point in manifest.states)


def _check_layer(field: str, layer: identity_pb2.LayerLayout) -> None:
    if layer.kind not in (*KEEPS_ALL, *_KEEPS_STATE):
        raise _wrong(f"{field}.kind", f"expected FULL, WINDOW, LATENT or STATE, got {layer.kind}")
    if (layer.window > 0) != (layer.kind == identity_pb2.LAYER_KIND_WINDOW):
        raise _wrong(f"{field}.window", f"expected above 0 for a window layer and 0 for others, got {layer.window}")
    smallest = 0 if layer.kind == identity_pb2.LAYER_KIND_STATE else 1
    for name, least in (("kv_heads", smallest), ("key_dim", smallest), ("value_dim", 0)):
        if not least <= getattr(layer, name) <= MAX_DIMENSION:
            raise _wrong(f"{field}.{name}", f"expected {least} to {MAX_DIMENSION}, got {getattr(layer, name)}")
    _check_state_tensors(f"{field}.state_tensors", layer)


def _check_state_tensors(field: str, layer: identity_pb2.LayerLayout) -> None:
    if layer.state_tensors and layer.kind != identity_pb2.LAYER_KIND_STATE:
        raise _wrong(field, "expected none: the layer is not recurrent")
    if len(layer.state_tensors) > MAX_STATE_TENSORS:
        raise _wrong(field, f"expected at most {MAX_STATE_TENSORS}, got {len(layer.state_tensors)}")
    for index, tensor in enumerate(layer.state_tensors):
        if tensor.type not in _STATE_TYPES:
            raise _wrong(f"{field}[{index}].type", f"expected FLOAT32, FLOAT16 or BFLOAT16, got {tensor.type}")
        shape = list(tensor.shape)
        if not 1 <= len(shape) <= MAX_STATE_AXES or not all(1 <= size <= MAX_DIMENSION for size in shape):
            raise _wrong(f"{field}[{index}].shape", f"expected 1 to {MAX_STATE_AXES} sizes of 1 to {MAX_DIMENSION}")


def _check_messages(manifest: manifest_pb2.Manifest) -> None:
    if len(manifest.messages) > MAX_MESSAGES:
        raise _wrong("messages", f"expected at most {MAX_MESSAGES}, got {len(manifest.messages)}")
    for index, message in enumerate(manifest.messages):
        if message.role not in ROLES:
            raise _wrong(f"messages[{index}].role", f"expected one of {sorted(ROLES)}")
        if message.is_note and message.role != "system":
            raise _wrong(f"messages[{index}].is_note", "expected it of a system's message alone")


def _check_turn(manifest: manifest_pb2.Manifest) -> None:
    turn = manifest.turn
    if turn.request_id:
        check_request_id(turn.request_id, "manifest.turn.request_id")
    for name, most in (("prompt_tokens", len(manifest.token_ids)), ("prompt_chars", len(manifest.text))):
        if getattr(turn, name) > most:
            raise _wrong(f"turn.{name}", f"expected at most {most}, got {getattr(turn, name)}")
    if turn.finish_reason not in FINISH_REASONS:
        raise _wrong("turn.finish_reason", f"expected one of {sorted(FINISH_REASONS - {''})}")
    _check_optional_hash("turn.input_digest", turn.input_digest)


def _check_optional_hash(field: str, text: str) -> None:
    if text and not is_hash(text):
        raise _wrong(field, "expected 64 lower-case hex digits or nothing")


def _check_digest(field: str, message: manifest_pb2.Digest) -> None:
    try:
        Digest.from_proto(message)
    except ValueError as error:
        raise _wrong(field, str(error)) from None


def _wrong(field: str, problem: str) -> InvalidArgument:
    where = f"manifest.{field}" if field else "manifest"
    return InvalidArgument.of(where, problem, reason="MANIFEST_REFUSED")

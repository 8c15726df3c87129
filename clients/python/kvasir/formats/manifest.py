"""Manifests as bytes: how one is written, and how one of any origin is read."""

import base64
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from blake3 import blake3
from google.protobuf.message import DecodeError

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import varint
from kvasir.formats.manifest_checks import MANIFEST_FORMAT, check, check_content, check_files, named, wrong

# Half a million tokens with their text and their messages are 7 MiB.
MAX_MANIFEST_BYTES = 16 << 20
# Fields of a manifest and of the messages inside it: parsed, each may take a hundred bytes.
MAX_RECORDS = 500_000
# In a remembered text it stands inside letters that spell a special token (manifest.proto).
_GUARD = "\ufdd0"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # of the wire
_MAX_VARINT_BYTES, _TWO_BYTES = 10, 0x80
_LEAST_RECORD_BYTES = 2  # a tag, and a number or a length
_FORMAT = manifest_pb2.Manifest(
    format=MANIFEST_FORMAT
).SerializeToString()  # every manifest of this format begins with it
_IDS, _CHARS = (manifest_pb2.Manifest.DESCRIPTOR.fields_by_name[name].number for name in ("token_ids", "token_chars"))


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
        # Nearly all are of one byte: a call for each is most of the time.
        tag, position = (tag, position + 1) if (tag := data[position]) < _TWO_BYTES else _varint(data, position, end)
        wire_type = tag & 7
        if wire_type == _BYTES:
            if position < end and (size := data[position]) < _TWO_BYTES:
                position += 1
            else:
                size, position = _varint(data, position, end)
            if size > end - position:
                raise _ScanError("a field is longer than the message that holds it")
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
    manifest = manifest_pb2.Manifest(format=MANIFEST_FORMAT, created_unix_ms=created_unix_ms, **fields)
    manifest.MergeFrom(_files(blocks, tail, states))
    check(manifest)
    return manifest.SerializeToString(deterministic=True)


class TokensApart:
    """A manifest whose numbers lie beside its message: protobuf takes milliseconds for a long conversation's. `blocks`
    may lie there, too."""

    __slots__ = ("_message", "blocks", "token_chars", "token_ids")

    def __init__(self, message: manifest_pb2.Manifest, token_ids: Sequence[int], token_chars: Sequence[int]) -> None:
        self._message = message
        self.token_ids = token_ids
        self.token_chars = token_chars
        self.blocks: Sequence[Any] = message.blocks

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


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Blocks, and how a manifest's bytes have them."""

    blocks: Sequence[Digest] = ()
    data: bytes = b""

    @classmethod
    def of(cls, blocks: Sequence[Digest], begin: "PackedBlocks | None" = None) -> "PackedBlocks":
        """`begin`: some that these may begin with, which are not packed again."""
        known, data = (begin.blocks, begin.data) if begin is not None else ((), b"")
        if (*blocks[: len(known)],) != (*known,):
            known, data = (), b""
        rest = _files(blocks[len(known) :], None, ())
        return cls((*blocks,), data + rest.SerializeToString(deterministic=True))


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
    message = manifest_pb2.Manifest(format=MANIFEST_FORMAT, created_unix_ms=created_unix_ms, **fields)
    small = _small(token_chars)
    whole = TokensApart(message, token_ids, token_chars if small is None else small)
    check_content(whole)
    ids = packed(token_ids) if packed_ids is None else packed_ids
    chars = packed(token_chars) if small is None else small
    rest, begin = message.SerializeToString(deterministic=True), len(_FORMAT)
    # Behind the format: a reader that takes the numbers as bytes finds them first.
    return BegunManifest(whole, b"".join((rest[:begin], _field(_IDS, ids), _field(_CHARS, chars), rest[begin:])))


def _small(numbers: Sequence[int]) -> bytes | None:
    """The numbers, where all are below 128: then these are their packed bytes, too."""
    try:
        data = numbers if isinstance(numbers, bytes) else bytes(tuple(numbers))
    except ValueError:
        return None
    return data if data.isascii() else None


def _field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def completed(
    begun: BegunManifest,
    *,
    blocks: Sequence[Digest] | PackedBlocks = (),
    tail: Digest | None = None,
    states: Iterable[tuple[int, Digest]] = (),
    windows: Iterable[manifest_pb2.WindowBlocks] = (),
    parent_manifest: str = "",
    asleep: manifest_pb2.Asleep | None = None,
) -> bytes:
    """The bytes of the manifest that names these files, however long the rest is: they follow its bytes, and a reader
    joins them. Completed again, it names others. Raises InvalidArgument."""
    packed = blocks if isinstance(blocks, PackedBlocks) else PackedBlocks.of(blocks)
    named = _files((), tail, states)
    named.MergeFrom(manifest_pb2.Manifest(windows=windows, parent_manifest=parent_manifest, asleep=asleep))
    for name in ("tail", "states", "windows", "parent_manifest", "asleep"):
        begun.message.ClearField(name)
    begun.message.MergeFrom(named)
    begun.message.blocks = packed.blocks
    check_files(begun.message)
    # Blocks have the lowest number of these fields.
    return b"".join((begun.data, packed.data, named.SerializeToString(deterministic=True)))


def _files(
    blocks: Iterable[Digest], tail: Digest | None, states: Iterable[tuple[int, Digest]]
) -> manifest_pb2.Manifest:
    files = manifest_pb2.Manifest(
        tail=None if tail is None else tail.to_proto(),
        states=[manifest_pb2.StatePoint(tokens=tokens, digest=digest.to_proto()) for tokens, digest in states],
    )
    for digest in blocks:  # a third of the time of messages that are copied
        files.blocks.add(hash=digest.hash, size_bytes=digest.size_bytes)
    return files


def parse(data: bytes | bytearray | memoryview) -> manifest_pb2.Manifest:
    """Read and check a manifest's bytes. Raises InvalidArgument naming the first wrong field."""
    size_bytes = memoryview(data).nbytes
    if size_bytes > MAX_MANIFEST_BYTES:
        raise wrong("", f"expected at most {MAX_MANIFEST_BYTES} bytes, got {size_bytes}")
    held = bytes(data)
    try:
        manifest = _message(held, MAX_RECORDS)
    except (DecodeError, _ScanError) as error:
        raise wrong("", f"not a serialized kvasir.cachestore.v1.Manifest: {error}") from None
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


def digests(manifest: manifest_pb2.Manifest) -> list[Digest]:
    """The blobs that a manifest names, each once: blocks, tail, each window's blocks and tail, states."""
    return list(dict.fromkeys(map(Digest.from_proto, named(manifest))))


def tokens_within_chars(token_chars: Sequence[int], chars: int) -> int:
    """How many leading tokens lie wholly inside `chars` code points; the cut is never inside a character."""
    tokens = bisect_right(list(accumulate(token_chars)), chars)
    while tokens and token_chars[tokens - 1] == 0:
        tokens -= 1
    return tokens

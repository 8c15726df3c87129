"""What travels inside of requests: tensor files, manifests and archives, valid ones and mutated ones.

A mutated file is named by its own digest: it is the parsers that are to be met, not the check of the digest.
"""

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import archive
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest

from tests.campaigns.fuzz import hostile
from tests.campaigns.fuzz.mutations import Known, fill, mutate
from tests.campaigns.fuzz.wire import break_texts, damage
from tools.kvasir_tiny.words import Dice

_ODD_JSON: Sequence[Any] = (None, True, -1, 0, 2**70, 1.5, "", "\ud800", "a" * 3000, [], {}, [[]], [-1, 2], "kvasir")
_RAW_HEADERS = (
    *(b"", b"{", b"[]", b"null", b'{"__metadata__":{"kvasir":"\\ud800"}}', b'{"\\ud800":{}}', b"\xff\xfe", b"\0" * 64),
    *(b'{"a":' * 900, b"[" * 50_000, b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":1e999}', b'{"a":' + b"9" * 5000 + b"}"),
)


def tensor_file(data: bytes, dice: Dice) -> bytes:
    """A tensor file whose header, or length, or body is wrong."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    how = dice.below(6)
    if how == 0:
        return damage(data, dice)[: 2 * len(data)]
    if how == 1:
        length = dice.pick([0, 1, length - 1, length + 1, len(data), 1 << 20, (1 << 20) + 1, 1 << 40, 2**64 - 1])
        return struct.pack("<Q", length) + header + body
    if how == 2:
        header = dice.pick(_RAW_HEADERS)
    elif how == 3:
        header = json.dumps(_changed(json.loads(header), dice)).encode("utf-8", "surrogatepass")
    else:
        entries = json.loads(header)
        named = _changed(json.loads(entries["__metadata__"]["kvasir"]), dice)
        entries["__metadata__"]["kvasir"] = json.dumps(named, ensure_ascii=dice.chance(0.5))
        header = json.dumps(entries).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + body


def manifest(data: bytes, dice: Dice, known: Known) -> bytes:
    """A manifest with one to three wrong places, or wrong bytes."""
    message = manifest_pb2.Manifest.FromString(data)
    for _ in range(dice.between(1, 3)):
        mutate(message, dice, known)
    changed = break_texts(message.SerializeToString(deterministic=True), dice)
    return damage(changed, dice) if dice.chance(0.15) else changed


def unproven(data: bytes, dice: Dice, known: Known) -> bytes:
    """A manifest that is wrong only in what its blobs do not prove: what was said, by whom, in which turn."""
    message = manifest_pb2.Manifest.FromString(data)
    for _ in range(dice.between(1, 3)):
        how = dice.below(5)
        if how == 0:
            mutate(fill(message.turn, dice, known), dice, known)
        elif how == 1:
            mutate(fill(message.messages.add(), dice, known), dice, known)
        elif how == 2:
            changed = dice.pick(hostile.TEXTS)
            message.text = changed + message.text[len(changed) :]
        elif how == 3:
            place = dice.below(len(message.token_chars) - 1)
            message.token_chars[place], message.token_chars[place + 1] = 0, sum(message.token_chars[place : place + 2])
        else:
            name = dice.pick(["tokenizer_digest", "template_digest", "parent_manifest"])
            setattr(message, name, dice.pick(hostile.TEXTS))
    return break_texts(message.SerializeToString(deterministic=True), dice)


def archive_of(manifest_bytes: bytes, blobs: Mapping[Digest, bytes], dice: Dice, known: Known) -> bytes:
    """An archive: as it should be, of a mutated manifest, with mutated blobs, or with wrong bytes."""
    how = dice.below(5)
    told = manifest_pb2.Manifest.FromString(manifest_bytes)
    if how == 1:
        manifest_bytes = manifest(manifest_bytes, dice, known)
        # The index tells of the valid one where the changed one cannot be described.
        with contextlib.suppress(DecodeError, OverflowError, ValueError):
            changed = manifest_pb2.Manifest.FromString(manifest_bytes)
            kv_identity_hash(changed.kv_identity)
            told = changed
    agent = dice.pick(["ada", "a" * 256, "", "\0", "..", "<|im_end|>"]) if dice.chance(0.2) else "ada"
    packed = archive.preamble(manifest_bytes, told, agent)
    for digest, content in blobs.items():
        packed += archive.blob_header(digest) + content + archive.padding(digest.size_bytes)
    packed += archive.END
    if how == 2:
        return damage(packed, dice)
    if how == 3:  # somewhere in a member's header or the index
        place, changed_bytes = dice.below(min(2048, len(packed))), bytearray(packed)
        changed_bytes[place : place + 4] = dice.pick(
            [b"\0\0\0\0", b"\xff" * 4, b"7777", b"../.", b"-1 \0", b"\x80\0\0\1"]
        )
        return bytes(changed_bytes)
    return packed


def frames(digest: Digest, content: bytes, dice: Dice, kind: int = pb.BLOB_KIND_TENSORS) -> list[pb.WriteBlobsRequest]:
    """A blob as the frames of a stream, of a size that the dice choose."""
    size = dice.pick([1 << 20, 1 << 20, 4096, max(len(content) // 3, 1)])
    pieces = [content[start : start + size] for start in range(0, len(content), size)] or [b""]
    requests = [
        pb.WriteBlobsRequest(frame=pb.BlobFrame(offset=index * size, data=piece)) for index, piece in enumerate(pieces)
    ]
    requests[0].frame.digest.CopyFrom(digest.to_proto())
    requests[0].frame.kind = kind  # type: ignore[assignment]
    return requests


def _changed(value: dict[str, Any], dice: Dice) -> dict[str, Any]:
    """A JSON object with one key changed, lost or added, here or in an object inside."""
    changed = dict(value)
    key = dice.pick(sorted(changed))
    how = dice.below(5)
    if how == 0:
        del changed[key]
    elif how == 1:
        changed[dice.pick(["extra", "", "\ud800", "layer_9999_k", "layer_0_k_weights"])] = dice.pick(_ODD_JSON)
    elif isinstance(changed[key], dict) and changed[key] and how > 2:
        changed[key] = _changed(changed[key], dice)
    else:
        changed[key] = dice.pick([*_ODD_JSON, *(text for text in hostile.TEXTS if len(text) < 300)])
    return changed

"""Writes proto/vectors: golden cases that every language's client checks against its own code.

Run it when a format changes, and read the difference: each changed case is one on which other languages and older data
no longer agree. Inputs are spelled out in the files, bytes as base64."""

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.credentials import hash_token
from kvasir.formats import archive, manifest
from kvasir.formats.block_file import FileIdentity, encode, encode_header
from kvasir.formats.block_hash import (
    BLOCK_TOKENS,
    block_hash,
    block_hash_chain,
    chain_hash,
    kv_identity_hash,
    window_block_hash,
)
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES, frames_of
from kvasir.formats.layer_groups import first_touched_block, row_groups
from kvasir.formats.tensor_layouts import TensorSpec, expected_tensors, plain_policy
from kvasir.formats.token_files import file_identities

VECTORS = Path(__file__).parent.parent / "proto" / "vectors"

NAMESPACES = ["", "default", "Zoë", "日本語", "𝔨𝔳𝔞𝔰𝔦𝔯", "🐍👩‍👩‍👧", "עברית", "a/b\\c", "x" * 256]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pattern(count: int) -> bytes:
    """Byte i is i modulo 251: easy to make in any language, and no power of two."""
    return bytes(i % 251 for i in range(count))


def tokens(count: int, first: int = 1) -> list[int]:
    """Token i is (first + 7919 i) modulo 2^31: large ids, no repetition."""
    return [(first + 7919 * i) % (1 << 31) for i in range(count)]


def identity(name: str) -> identity_pb2.KvIdentity:
    """Four geometries: one small and plain, one with every kind of layer and an uneven policy, one whose recurrent
    layers describe their states, and one with a window."""
    layer, policy = identity_pb2.LayerLayout, plain_policy(4)
    full = layer(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=1, key_dim=64, value_dim=64)
    states = [
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_BFLOAT16, shape=[3, 96]),
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT32, shape=[2, 16, 8]),
    ]
    recurrent = layer(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=states)
    layers = {
        "small": [full],
        "mixed": [
            full,
            layer(kind=identity_pb2.LAYER_KIND_WINDOW, window=4096, kv_heads=8, key_dim=128, value_dim=128),
            layer(kind=identity_pb2.LAYER_KIND_LATENT, kv_heads=1, key_dim=576),
            layer(kind=identity_pb2.LAYER_KIND_STATE, kv_heads=24, key_dim=64, value_dim=128),
        ],
        "hybrid": [recurrent, full, recurrent],
        "window": [layer(kind=identity_pb2.LAYER_KIND_WINDOW, window=300, kv_heads=1, key_dim=64, value_dim=64), full],
    }
    if name == "mixed":
        policy.value_bits = 8
        policy.scale_type = identity_pb2.SCALE_TYPE_BFLOAT16
        policy.key_rotation = identity_pb2.KEY_ROTATION_HADAMARD
        policy.exact_layers.extend([0, 3])
    digest = Digest.of(name.encode()).hash
    return identity_pb2.KvIdentity(weights_digest=digest, layers=layers[name], policy=policy)


def digests() -> dict[str, Any]:
    sizes = [0, 1, 63, 64, 65, 1023, 1024, 1025, 102_400]
    return {
        "about": "BLAKE3-256 and size of the pattern: byte i is i modulo 251.",
        "cases": [{"pattern_bytes": n, "hash": Digest.of(pattern(n)).hash, "size_bytes": n} for n in sizes],
        "not_digests": ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 63 + "\n", "٠" * 64, "../" + "0" * 61],
        "token_hashes": [{"token": text, "blake3": hash_token(text)} for text in ("", "secret", "naïve-🔑")],
    }


def block_hashes() -> dict[str, Any]:
    kv_hash = kv_identity_hash(identity("small"))
    cases = [
        {
            "namespace": namespace,
            "namespace_utf8_base64": b64(namespace.encode()),
            "kv_identity_hash": kv_hash,
            "first_token": 1,
            "token_count": 700,
            "block_hashes": block_hash_chain(namespace, kv_hash, tokens(700)),
        }
        for namespace in NAMESPACES
    ]
    twins = [{"namespace": text, "hash": block_hash(text, kv_hash, "", [1])} for text in ("Zo\u00eb", "Zoe\u0308")]
    return {
        "about": "Token i is (first_token + 7919 i) modulo 2^31. Each full block's hash is the next one's parent.",
        "cases": cases,
        "twins": {
            "about": "Two spellings are two namespaces: nothing is normalised.",
            "token_ids": [1],
            "cases": twins,
        },
        "largest_token": {"token_ids": [0, (1 << 32) - 1], "hash": block_hash("", kv_hash, "", [0, (1 << 32) - 1])},
    }


def chain_hashes() -> dict[str, Any]:
    kv_hash = kv_identity_hash(identity("small"))
    blocks: list[str] = []
    for start in range(0, 512, BLOCK_TOKENS):
        blocks.append(chain_hash(kv_hash, blocks[-1] if blocks else "", tokens(512)[start : start + BLOCK_TOKENS]))
    return {
        "about": "A block hash in the empty namespace; a tail's is over the tokens after the last full block.",
        "kv_identity_hash": kv_hash,
        "first_token": 1,
        "block_chain": blocks,
        "tail_of_600_tokens": chain_hash(kv_hash, blocks[-1], tokens(600)[512:]),
        "tail_of_5_tokens": chain_hash(kv_hash, "", tokens(5)),
    }


def kv_identities() -> dict[str, Any]:
    cases = [
        {
            "name": name,
            "kv_identity": json_format.MessageToDict(identity(name), preserving_proto_field_name=True),
            "serialized_base64": b64(identity(name).SerializeToString(deterministic=True)),
            "kv_identity_hash": kv_identity_hash(identity(name)),
        }
        for name in ("small", "mixed", "hybrid")
    ]
    return {"about": "kv_identity is protobuf's JSON form.", "cases": cases}


def frames() -> dict[str, Any]:
    cases = []
    for size, first_offset in (
        (0, 0),
        (1, 0),
        (FRAME_BYTES, 0),
        (FRAME_BYTES + 1, 0),
        (5 * FRAME_BYTES // 2, 0),
        (3000, 1000),
    ):
        data = pattern(size)
        made = frames_of(Digest.of(data), data, pb.BLOB_KIND_TENSORS, first_offset)
        cases.append(
            {
                "pattern_bytes": size,
                "first_offset": first_offset,
                "frames": [
                    {
                        "offset": frame.offset,
                        "data_bytes": len(frame.data),
                        "data_blake3": Digest.of(frame.data).hash,
                        "has_digest": frame.HasField("digest"),
                    }
                    for frame in made
                ],
            }
        )
    small = next(frames_of(Digest.of(pattern(100)), pattern(100), pb.BLOB_KIND_MANIFEST))
    serialized = {"pattern_bytes": 100, "base64": b64(small.SerializeToString(deterministic=True))}
    return {"about": "Frames of at most 1 MiB; the first names the blob.", "cases": cases, "serialized": serialized}


def tensors(specs: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, bytes]]:
    """Pattern bytes, with the highest exponent bit of 16-bit numbers cleared so that they are finite."""
    filled = []
    for spec in specs:
        data = bytearray(pattern(spec.size_bytes))
        if spec.dtype != "U32":
            data[1::2] = bytes(byte & 0xBF for byte in data[1::2])
        filled.append((spec, bytes(data)))
    return filled


def memory() -> tuple[bytes, Mapping[Digest, bytes]]:
    """A manifest of 300 tokens and its two files."""
    kv = identity("small")
    kv_hash, ids = kv_identity_hash(kv), tokens(300)
    block_chain = chain_hash(kv_hash, "", ids[:BLOCK_TOKENS])
    block = encode(
        FileIdentity("block", kv_hash, 0, BLOCK_TOKENS, block_chain), tensors(expected_tensors(kv, BLOCK_TOKENS))
    )
    tail = encode(
        FileIdentity("tail", kv_hash, BLOCK_TOKENS, 44, chain_hash(kv_hash, block_chain, ids[BLOCK_TOKENS:])),
        tensors(expected_tensors(kv, 44)),
    )
    # The snake takes two tokens: the first completes nothing, the second completes it.
    text = "é🐍" + "x" * 298
    data = manifest.build(
        kv_identity=kv,
        token_ids=ids,
        text=text,
        token_chars=[1, 0, 1] + [1] * 296 + [2],
        blocks=[Digest.of(block)],
        tail=Digest.of(tail),
        shareable_tokens=290,
        messages=[manifest_pb2.Message(role="user", content="é🐍", name="Zoë")],
        turn=manifest_pb2.Turn(request_id="request-1", prompt_tokens=290, prompt_chars=290, finish_reason="stop"),
        created_unix_ms=1_700_000_000_000,
    )
    return data, {Digest.of(block): block, Digest.of(tail): tail}


def manifests() -> dict[str, Any]:
    data, blobs = memory()
    parsed = manifest.parse(data)
    return {
        "about": "A manifest's bytes are kept as they are. Characters are Unicode code points, not UTF-16 units.",
        "base64": b64(data),
        "digest": {"hash": Digest.of(data).hash, "size_bytes": len(data)},
        "token_count": len(parsed.token_ids),
        "text": parsed.text,
        "text_code_points": len(parsed.text),
        "token_chars_begin": list(parsed.token_chars[:4]),
        "tokens_within_chars": [
            {"chars": chars, "tokens": manifest.tokens_within_chars(parsed.token_chars, chars)}
            for chars in (0, 1, 2, 3, 299, 300, 1000)
        ],
        "digests": [{"hash": digest.hash, "size_bytes": digest.size_bytes} for digest in manifest.digests(parsed)],
        "blobs_base64": {digest.hash: b64(blob) for digest, blob in blobs.items()},
    }


def archives() -> dict[str, Any]:
    data, blobs = memory()
    packed = b"".join(archive.pack(manifest.parse(data), blobs, agent_id="Zoë 🐍"))
    return {
        "about": "What ExportAgent streams: a ustar archive, the same bytes for the same memory.",
        "agent_id": "Zoë 🐍",
        "members": ["kvasir-archive.json", "manifest.pb", *(f"blobs/{digest.hash}" for digest in blobs)],
        "digest": {"hash": Digest.of(packed).hash, "size_bytes": len(packed)},
        "base64": b64(packed),
    }


def window_blocks() -> dict[str, Any]:
    kv = identity("window")
    kv_hash, ids = kv_identity_hash(kv), tokens(600)
    chain = block_hash_chain("", kv_hash, ids)
    headers, named = [], {}
    for group in row_groups(kv):
        named[group] = []
        for file in file_identities(kv_hash, ids, chain, first_touched_block(group, len(ids)), group):
            specs = expected_tensors(kv, file.tokens, group)
            digest = Digest.of(encode(file, tensors(specs)))
            named[group].append(digest)
            headers.append(
                {
                    "group": group,
                    "metadata": file.to_json(),
                    "header_base64": b64(encode_header(file, specs)),
                    "digest": {"hash": digest.hash, "size_bytes": digest.size_bytes},
                }
            )
    return {
        "about": "Blocks of window layers. A window's block hash is H('kvasir.window_block.v1', block hash, window). "
        "Files hold the pattern, with the highest exponent bit of 16-bit numbers cleared.",
        "block_hashes": [
            {"block_hash": each, "window": window, "window_block_hash": window_block_hash(each, window)}
            for each in block_hash_chain("Zoë", kv_hash, ids)
            for window in (1, 300, (1 << 32) - 1)
        ],
        "first_blocks": [
            {"window": window, "tokens": count, "first_block": first_touched_block(window, count)}
            for window in (1, 128, 300, 1024)
            for count in (1, 256, 299, 300, 555, 556, 1279, 1280)
        ],
        "kv_identity_hash": kv_hash,
        "first_token": 1,
        "token_count": 600,
        "files": headers,
        "manifest_base64": b64(windowed_manifest(kv, ids, named)),
    }


def windowed_manifest(kv: Any, ids: list[int], named: dict[int, list[Digest]]) -> bytes:
    windowed = manifest_pb2.WindowBlocks(
        window=300, first_block=1, blocks=[named[300][0].to_proto()], tail=named[300][1].to_proto()
    )
    return manifest.build(
        kv_identity=kv,
        token_ids=ids,
        text="x" * 600,
        token_chars=[1] * 600,
        blocks=named[0][:2],
        tail=named[0][2],
        windows=[windowed],
        shareable_tokens=590,
        created_unix_ms=1_700_000_000_000,
    )


MAKERS = {
    "digests": digests,
    "block_hashes": block_hashes,
    "chain_hashes": chain_hashes,
    "kv_identities": kv_identities,
    "frames": frames,
    "manifest": manifests,
    "archive": archives,
    "window_blocks": window_blocks,
}


def text_of(name: str) -> str:
    """What a file of vectors must have."""
    return json.dumps(MAKERS[name](), ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    VECTORS.mkdir(exist_ok=True)
    for name in MAKERS:
        (VECTORS / f"{name}.json").write_text(text_of(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

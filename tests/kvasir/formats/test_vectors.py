"""The golden cases of proto/vectors: today's code gives them, and they are what the formats' definitions say."""

import base64
import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from google.protobuf import json_format
from kvasir.cachestore.v1 import cachestore_pb2, identity_pb2
from kvasir.formats import manifest
from kvasir.formats.archive import ArchiveReader, BlobPiece, Described, pack
from kvasir.formats.block_file import FileIdentity, check_schema, parse_header
from kvasir.formats.block_hash import (
    block_hash,
    block_hash_chain,
    chain_hash,
    chain_hashes,
    kv_identity_hash,
    window_block_hash,
)
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.frames import FrameAssembler, frames_of
from kvasir.formats.layer_groups import first_touched_block
from kvasir.formats.token_files import file_identities, state_identity

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "proto" / "vectors"
NAMES = sorted(path.stem for path in VECTORS.glob("*.json"))


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def pattern(count: int) -> bytes:
    return bytes(i % 251 for i in range(count))


def tokens(count: int, first: int) -> list[int]:
    return [(first + 7919 * i) % (1 << 31) for i in range(count)]


def by_hand(*fields: bytes) -> str:
    """H of the design page: every field after its length as 8 bytes little-endian."""
    return blake3(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).hexdigest()


def as_bytes(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def test_the_generator_writes_what_is_committed() -> None:
    spec = importlib.util.spec_from_file_location("make_vectors", ROOT / "tools" / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert sorted(tool.MAKERS) == NAMES
    for name in NAMES:
        assert tool.text_of(name) == (VECTORS / f"{name}.json").read_text(encoding="utf-8"), name


def test_digests() -> None:
    vectors = load("digests")
    for case in vectors["cases"]:
        digest = Digest.of(pattern(case["pattern_bytes"]))
        assert (digest.hash, digest.size_bytes) == (case["hash"], case["size_bytes"])
    assert not any(is_hash(text) for text in vectors["not_digests"])
    for case in vectors["token_hashes"]:
        assert blake3(case["token"].encode()).hexdigest() == case["blake3"]


def test_block_hashes_are_the_definition_for_exotic_namespaces_too() -> None:
    vectors = load("block_hashes")
    for case in vectors["cases"]:
        ids = tokens(case["token_count"], case["first_token"])
        namespace, kv_hash = case["namespace"], case["kv_identity_hash"]
        assert namespace.encode() == base64.b64decode(case["namespace_utf8_base64"])
        assert block_hash_chain(namespace, kv_hash, ids) == case["block_hashes"]
        parent = b""
        for index, expected in enumerate(case["block_hashes"]):
            block = as_bytes(ids[256 * index : 256 * (index + 1)])
            assert by_hand(b"kvasir.block.v1", namespace.encode(), bytes.fromhex(kv_hash), parent, block) == expected
            parent = bytes.fromhex(expected)
    hashes = [case["block_hashes"][0] for case in vectors["cases"]]
    assert len(set(hashes)) == len(hashes)
    kv_hash = vectors["cases"][0]["kv_identity_hash"]
    first, second = vectors["twins"]["cases"]
    assert first["hash"] != second["hash"]
    for case in (first, second):
        assert block_hash(case["namespace"], kv_hash, "", [1]) == case["hash"]
    largest = vectors["largest_token"]
    assert block_hash("", kv_hash, "", largest["token_ids"]) == largest["hash"]


def test_chain_hashes() -> None:
    vectors = load("chain_hashes")
    kv_hash, first = vectors["kv_identity_hash"], vectors["first_token"]
    assert block_hash_chain("", kv_hash, tokens(512, first)) == vectors["block_chain"]
    tail = tokens(600, first)[512:]
    assert chain_hash(kv_hash, vectors["block_chain"][-1], tail) == vectors["tail_of_600_tokens"]
    assert chain_hash(kv_hash, "", tokens(5, first)) == vectors["tail_of_5_tokens"]


def test_window_blocks() -> None:
    vectors = load("window_blocks")
    for case in vectors["block_hashes"]:
        block, window = case["block_hash"], case["window"]
        by_definition = by_hand(b"kvasir.window_block.v1", bytes.fromhex(block), as_bytes([window]))
        assert window_block_hash(block, window) == case["window_block_hash"] == by_definition
    assert len({case["window_block_hash"] for case in vectors["block_hashes"]}) == len(vectors["block_hashes"])
    for case in vectors["first_blocks"]:
        # The first row that the next token sees lies in it.
        first_row = max(0, case["tokens"] - (case["window"] - 1))
        assert first_touched_block(case["window"], case["tokens"]) == case["first_block"] == first_row // 256


def test_files_and_manifest_of_a_window() -> None:
    vectors = load("window_blocks")
    parsed = manifest.parse(base64.b64decode(vectors["manifest_base64"]))
    kv_hash, ids = vectors["kv_identity_hash"], tokens(vectors["token_count"], vectors["first_token"])
    assert (kv_identity_hash(parsed.kv_identity), list(parsed.token_ids)) == (kv_hash, ids)
    files = [*file_identities(kv_hash, ids, chain_hashes(kv_hash, ids))]
    files += file_identities(kv_hash, ids, chain_hashes(kv_hash, ids), 1, 300)
    assert [(case["group"], case["metadata"]) for case in vectors["files"]] == [
        (file.window, file.to_json()) for file in files
    ]
    named = [Digest(**case["digest"]) for case in vectors["files"]]
    assert manifest.digests(parsed) == named
    for case, file in zip(vectors["files"], files, strict=True):
        header = parse_header(base64.b64decode(case["header_base64"]), case["digest"]["size_bytes"])
        assert header.identity == file
        check_schema(header, parsed.kv_identity)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_files_report_whose_tokens_they_hold(known: int) -> None:
    vectors = load("chain_hashes")
    kv_hash, ids, blocks = vectors["kv_identity_hash"], tokens(600, vectors["first_token"]), vectors["block_chain"]
    chain = chain_hashes(kv_hash, ids, blocks[:known])
    assert list(chain) == blocks
    files = [
        FileIdentity("block", kv_hash, 0, 256, blocks[0]),
        FileIdentity("block", kv_hash, 256, 256, blocks[1]),
        FileIdentity("tail", kv_hash, 512, 88, vectors["tail_of_600_tokens"]),
    ]
    assert file_identities(kv_hash, ids, chain) == files
    assert file_identities(kv_hash, ids, chain, 1) == files[1:]
    assert file_identities(kv_hash, ids[:512], chain) == files[:2]
    for count, expected in ((5, vectors["tail_of_5_tokens"]), (512, blocks[1]), (600, vectors["tail_of_600_tokens"])):
        state = FileIdentity("state", kv_hash, 0, count, expected)
        assert state_identity(kv_hash, ids, count, blocks[:known]) == state
        assert state_identity(kv_hash, ids[:count], count, blocks[:known]) == state


def test_kv_identities() -> None:
    for case in load("kv_identities")["cases"]:
        identity = json_format.ParseDict(case["kv_identity"], identity_pb2.KvIdentity())
        serialized = base64.b64decode(case["serialized_base64"])
        assert identity == identity_pb2.KvIdentity.FromString(serialized)
        assert kv_identity_hash(identity) == case["kv_identity_hash"]
        policy = identity.policy
        layers = [
            number
            for layer in identity.layers
            for number in (layer.kind, layer.window, layer.kv_heads, layer.key_dim, layer.value_dim)
        ]
        numbers = [policy.key_bits, policy.value_bits, policy.group_size, policy.scale_type, policy.key_rotation]
        assert case["kv_identity_hash"] == by_hand(
            b"kvasir.kv_identity.v1",
            bytes.fromhex(identity.weights_digest),
            as_bytes(layers),
            as_bytes(numbers),
            as_bytes(list(policy.exact_layers)),
            *described_states(identity),
        )
    cases = {case["name"]: case["kv_identity_hash"] for case in load("kv_identities")["cases"]}
    assert cases["small"] == "5a0194376e47b3dfe19ce5346ada2623c3940c696e5942bb1f9c55a1a4d47912", (
        "a hash given before states were described"
    )
    assert cases["mixed"] == "2f492355a7ce15b1547d6658ad6603207c45c2d570336c6f06106927375e0fcc", (
        "a hash given before states were described"
    )


def described_states(identity: identity_pb2.KvIdentity) -> list[bytes]:
    numbers: list[int] = []
    for index, layer in enumerate(identity.layers):
        if layer.state_tensors:
            numbers += [index, len(layer.state_tensors)]
        for tensor in layer.state_tensors:
            numbers += [tensor.type, len(tensor.shape), *tensor.shape]
    return [b"states" + as_bytes(numbers)] if numbers else []


def test_frames() -> None:
    vectors = load("frames")
    for case in vectors["cases"]:
        data = pattern(case["pattern_bytes"])
        made = list(frames_of(Digest.of(data), data, first_offset=case["first_offset"]))
        assert [
            (frame.offset, len(frame.data), Digest.of(frame.data).hash, frame.HasField("digest")) for frame in made
        ] == [(f["offset"], f["data_bytes"], f["data_blake3"], f["has_digest"]) for f in case["frames"]]
    frame = cachestore_pb2.BlobFrame.FromString(base64.b64decode(vectors["serialized"]["base64"]))
    data = pattern(vectors["serialized"]["pattern_bytes"])
    assembled = FrameAssembler([Digest.of(data)]).add(frame)
    assert assembled is not None
    assert bytes(assembled[1]) == data


def test_the_manifest_and_its_files() -> None:
    vectors = load("manifest")
    data = base64.b64decode(vectors["base64"])
    parsed = manifest.parse(data)
    assert Digest.of(data).hash == vectors["digest"]["hash"]
    assert len(parsed.text) == vectors["text_code_points"] == sum(parsed.token_chars)
    assert list(parsed.token_chars[:4]) == vectors["token_chars_begin"]
    for case in vectors["tokens_within_chars"]:
        assert manifest.tokens_within_chars(parsed.token_chars, case["chars"]) == case["tokens"]
    assert [(d.hash, d.size_bytes) for d in manifest.digests(parsed)] == [
        (each["hash"], each["size_bytes"]) for each in vectors["digests"]
    ]
    for hash_, encoded in vectors["blobs_base64"].items():
        blob = base64.b64decode(encoded)
        assert Digest.of(blob).hash == hash_
        check_schema(parse_header(blob, len(blob)), parsed.kv_identity)


@pytest.mark.parametrize("piece_bytes", [100, 512, 1 << 20])
def test_the_archive(piece_bytes: int) -> None:
    vectors = load("archive")
    data = base64.b64decode(vectors["base64"])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == vectors["members"]
    reader = ArchiveReader()
    blobs: dict[Digest, bytes] = {}
    for start in range(0, len(data), piece_bytes):
        for part in reader.feed(data[start : start + piece_bytes]):
            if isinstance(part, BlobPiece):
                blobs[part.digest] = blobs.get(part.digest, b"") + part.data
            else:
                described = part
    reader.finish()
    assert isinstance(described, Described)
    assert described.agent_id == vectors["agent_id"]
    assert all(Digest.of(blob) == digest for digest, blob in blobs.items())
    assert b"".join(pack(described.manifest, blobs, agent_id=described.agent_id)) == data

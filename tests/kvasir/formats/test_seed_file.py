"""The seed's single-file form: exact to the bit there and back, read by safetensors, closed to the hostile."""

import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError
from kvasir.formats import block_file, tensor_layouts
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hash, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.seed_file import from_seed_file, to_seed_file
from safetensors.numpy import load, save

from tests.made_models.sampling import sampled
from tests.made_models.synthetic import MIXED, WINDOWED, SyntheticAgent


def identity(
    heads: int = 2, key_dim: int = 64, value_dim: int = 64, layers: int = 2, **policy: object
) -> identity_pb2.KvIdentity:
    layout = identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_FULL, kv_heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    defaults = {
        "key_bits": 4,
        "value_bits": 4,
        "group_size": 64,
        "scale_type": identity_pb2.SCALE_TYPE_FLOAT16,
        "key_rotation": identity_pb2.KEY_ROTATION_NONE,
    }
    return identity_pb2.KvIdentity(
        weights_digest="ab" * 32, layers=[layout] * layers, policy=identity_pb2.KvPolicy(**{**defaults, **policy})
    )


def a_memory(
    kv: identity_pb2.KvIdentity, tokens: int, seed: int = 0
) -> tuple[manifest_pb2.Manifest, dict[Digest, bytes]]:
    """A manifest of `tokens` tokens with random KV, one character each, and its blobs."""
    dice = random.Random(seed)
    token_ids = [dice.randrange(1024) for _ in range(tokens)]
    manifest = manifest_pb2.Manifest(
        format=1,
        kv_identity=kv,
        token_ids=token_ids,
        text="é" * tokens,
        token_chars=[1] * tokens,
        messages=[manifest_pb2.Message(role="user", content="Schön, daß es geht.")],
        tokenizer_digest="cd" * 32,
        created_unix_ms=1_763_600_000_000,
        turn=manifest_pb2.Turn(request_id="r-1", prompt_tokens=1),
        pending=manifest_pb2.PendingToken(id=7, text="ü"),
    )
    blobs, chain, name = {}, "", kv_identity_hash(kv)
    for start in range(0, tokens, BLOCK_TOKENS):
        part = token_ids[start : start + BLOCK_TOKENS]
        chain = chain_hash(name, chain, part)
        kind = "block" if len(part) == BLOCK_TOKENS else "tail"
        specs = tensor_layouts.expected_tensors(kv, len(part))
        blob = block_file.encode(
            block_file.FileIdentity(kind, name, start, len(part), chain),
            [(spec, dice.randbytes(spec.size_bytes)) for spec in specs],
        )
        blobs[Digest.of(blob)] = blob
        (manifest.blocks.append if kind == "block" else manifest.tail.CopyFrom)(Digest.of(blob).to_proto())
    return manifest, blobs


def exported(manifest: manifest_pb2.Manifest, blobs: dict[Digest, bytes]) -> bytes:
    return b"".join(to_seed_file(manifest, blobs.__getitem__, agent_id="ada", model_id="kvasir-tiny"))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 255, 256, 257, 512, 700]),
    heads=st.sampled_from([1, 2, 3]),
    dims=st.sampled_from([(64, 64), (128, 64), (192, 128)]),
    bits=st.sampled_from([(4, 4), (8, 4), (16, 16), (4, 8)]),
)
def test_there_and_back_is_the_same_memory_to_the_bit(
    tokens: int, heads: int, dims: tuple[int, int], bits: tuple[int, int]
) -> None:
    group_size = 0 if bits == (16, 16) else 64
    kv = identity(heads, *dims, key_bits=bits[0], value_bits=bits[1], group_size=group_size)
    manifest, blobs = a_memory(kv, tokens)
    back = from_seed_file(exported(manifest, blobs))
    assert back.blobs == blobs
    assert back.manifest == manifest
    assert (back.agent_id, back.model_id) == ("ada", "kvasir-tiny")


def test_the_safetensors_library_reads_the_seeds_names_and_shapes() -> None:
    manifest, blobs = a_memory(identity(heads=3), 300)
    tensors = load(exported(manifest, blobs))
    assert tensors["layer_1_k_weights"].shape == (1, 300, 3, 8)
    assert tensors["layer_1_k_weights"].dtype == np.uint32
    assert tensors["layer_0_v_scales"].shape == (1, 300, 3, 1)
    assert tensors["layer_0_v_scales"].dtype == np.float16
    assert len(tensors) == 12


def test_every_row_stands_where_the_seed_expects_it() -> None:
    manifest, blobs = a_memory(identity(heads=3), 300)
    seed = load(exported(manifest, blobs))
    block, tail = (_tensors_of(blob) for blob in blobs.values())
    for name in ("layer_0_k_weights", "layer_1_v_biases"):
        ours = np.concatenate([block[name], tail[name]], axis=1)
        assert np.array_equal(seed[name][0].transpose(1, 0, 2).view(np.uint8), ours.view(np.uint8))


def _tensors_of(blob: bytes) -> dict[str, np.ndarray]:
    return load(blob)


def test_the_metadata_is_the_seeds() -> None:
    manifest, blobs = a_memory(identity(), 5)
    metadata = _header_of(exported(manifest, blobs))["__metadata__"]
    assert metadata["agent_id"] == "ada"
    assert metadata["model_id"] == "kvasir-tiny"
    assert metadata["total_tokens"] == "5"
    assert metadata["prompt_text"] == "ééééé"
    assert json.loads(metadata["token_sequence"]) == list(manifest.token_ids)


def foreign(manifest: manifest_pb2.Manifest, blobs: dict[Digest, bytes], **changes: str) -> bytes:
    """The same memory as the seed would have written it: by the safetensors library, with the seed's metadata only."""
    file = exported(manifest, blobs)
    metadata = {key: value for key, value in _header_of(file)["__metadata__"].items() if key != "kvasir"}
    return save(load(file), metadata={**metadata, **changes})


def test_a_file_of_foreign_origin_needs_a_named_kv_identity() -> None:
    manifest, blobs = a_memory(identity(), 300)
    with pytest.raises(FailedPrecondition, match="name the model") as refused:
        from_seed_file(foreign(manifest, blobs))
    assert refused.value.reason == "KV_IDENTITY_UNKNOWN"


def test_a_file_of_foreign_origin_gives_the_same_blobs() -> None:
    manifest, blobs = a_memory(identity(), 300)
    back = from_seed_file(foreign(manifest, blobs), identity=identity())
    assert back.blobs == blobs
    assert list(back.manifest.token_ids) == list(manifest.token_ids)
    assert sum(back.manifest.token_chars) == len(back.manifest.text) == 300


@pytest.mark.parametrize(
    "other", [identity(heads=3), identity(layers=3), identity(layers=1), identity(key_bits=8), identity(key_dim=128)]
)
def test_a_file_that_does_not_fit_the_layout_is_refused(other: identity_pb2.KvIdentity) -> None:
    manifest, blobs = a_memory(identity(), 300)
    with pytest.raises(FailedPrecondition) as refused:
        from_seed_file(foreign(manifest, blobs), identity=other)
    assert refused.value.reason == "KV_IDENTITY_DIFFERS"


def test_a_file_of_other_weights_with_the_same_shapes_is_refused() -> None:
    manifest, blobs = a_memory(identity(), 10)
    other = identity()
    other.weights_digest = "00" * 32
    with pytest.raises(FailedPrecondition, match="weights_digest"):
        from_seed_file(exported(manifest, blobs), identity=other)


@pytest.mark.parametrize("tokens", [1, 255, 256, 511, 512, 1100, 1280])
@pytest.mark.parametrize("more", [0, 1, 10])
def test_windows_go_there_and_back_with_the_rows_that_they_have(tokens: int, more: int) -> None:
    turn = SyntheticAgent(WINDOWED, 1, more_window_blocks=more).turn(tokens)
    file = exported(turn.manifest, dict(turn.new_blobs))
    back = from_seed_file(file)
    expected = manifest_pb2.Manifest()
    expected.CopyFrom(turn.manifest)
    assert back.manifest == expected
    assert back.blobs == {digest: turn.new_blobs[digest] for digest in turn.digests}
    starts = {each.window: each.first_block * 256 for each in turn.manifest.windows}
    header = _header_of(file)
    assert json.loads(header["__metadata__"]["window_starts"]) == {str(window): n for window, n in starts.items()}
    windows = {0: 512, 2: 300, 3: 512}
    for layer in range(4):
        rows = tokens - starts.get(windows.get(layer, 0), 0)
        assert header[f"layer_{layer}_k_weights"]["shape"] == [1, rows, 1, 8]


def test_the_rows_of_a_window_stand_where_its_start_says() -> None:
    turn = SyntheticAgent(WINDOWED, 1).turn(1100)
    seed = load(exported(turn.manifest, dict(turn.new_blobs)))
    for each, layer in zip(turn.manifest.windows, (2, 0), strict=True):
        files = [_tensors_of(turn.new_blobs[Digest.from_proto(digest)]) for digest in (*each.blocks, each.tail)]
        name = f"layer_{layer}_v_weights"
        assert np.array_equal(seed[name][0].transpose(1, 0, 2), np.concatenate([file[name] for file in files], axis=1))


def test_a_file_of_foreign_origin_has_all_rows_of_a_window() -> None:
    turn = SyntheticAgent(WINDOWED, 1, more_window_blocks=10).turn(600)
    file = exported(turn.manifest, dict(turn.new_blobs))
    kept = {key: value for key, value in _header_of(file)["__metadata__"].items() if key in _SEED}
    back = from_seed_file(save(load(file), metadata=kept), identity=WINDOWED)
    assert back.blobs == turn.new_blobs
    fewer = SyntheticAgent(WINDOWED, 1).turn(600)
    part = load(exported(fewer.manifest, dict(fewer.new_blobs)))
    with pytest.raises(FailedPrecondition, match="layer_2"):
        from_seed_file(save(part, metadata=kept), identity=WINDOWED)


@pytest.mark.parametrize(
    "starts",
    [
        "",
        "[]",
        "{}",
        '{"300":0}',
        '{"300":0,"512":0,"513":0}',
        '{"300":1024,"512":512}',  # later than what the next token sees
        '{"300":768,"512":511}',
        '{"300":-256,"512":0}',
        '{"300":true,"512":0}',
        '{"300":"0","512":0}',
        '{"300":0.0,"512":0}',
        '{"300":0,"300":0,"512":0}',
    ],
)
def test_window_starts_that_cannot_be_are_refused(starts: str) -> None:
    turn = SyntheticAgent(WINDOWED, 1).turn(1100)
    file = exported(turn.manifest, dict(turn.new_blobs))
    header = _header_of(file)
    assert header["__metadata__"]["window_starts"] == '{"300":768,"512":512}'
    header["__metadata__"]["window_starts"] = starts
    with pytest.raises(InvalidArgument, match="window_starts"):
        from_seed_file(_with_header(file, header))


def test_rows_of_other_tokens_than_the_file_says_are_refused() -> None:
    turn = SyntheticAgent(WINDOWED, 1, more_window_blocks=1).turn(1100)
    file = exported(turn.manifest, dict(turn.new_blobs))
    header = _header_of(file)
    header["__metadata__"]["window_starts"] = '{"300":768,"512":512}'
    with pytest.raises(FailedPrecondition, match="layer_2"):
        from_seed_file(_with_header(file, header))


def test_a_memory_with_states_has_no_seed_form() -> None:
    turn = SyntheticAgent(MIXED, 1).turn(300)
    with pytest.raises(FailedPrecondition, match="archive") as refused:
        exported(turn.manifest, dict(turn.new_blobs))
    assert refused.value.reason == "NO_SEED_FORM"


def test_a_memory_that_is_asleep_has_no_seed_form() -> None:
    """Its rows are nowhere: they would be zeros."""
    manifest, _ = a_memory(identity(), 300)
    for field in ("blocks", "tail"):
        manifest.ClearField(field)
    manifest.asleep.SetInParent()
    with pytest.raises(FailedPrecondition, match="asleep") as refused:
        exported(manifest, {})
    assert refused.value.reason == "NO_SEED_FORM"


def _header_of(file: bytes) -> dict:
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length])


def _with_header(file: bytes, header: object) -> bytes:
    (length,) = struct.unpack_from("<Q", file)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + file[8 + length :]


def _with_raw(old: bytes, new: bytes) -> bytes:
    file = exported(*a_memory(identity(), 10))
    (length,) = struct.unpack_from("<Q", file)
    assert old in file[8 : 8 + length]
    return _with_header(file, file[8 : 8 + length].replace(old, new))


def _changed(path: str, value: object) -> bytes:
    file = exported(*a_memory(identity(), 10))
    header = _header_of(file)
    *parents, last = path.split(">")
    place = header
    for key in parents:
        place = place[key]
    place[last] = value
    return _with_header(file, header)


_SCALES_SHAPE = _header_of(exported(*a_memory(identity(), 10)))["layer_0_k_scales"]["shape"]
HOSTILE = {
    "empty": lambda: b"",
    "short": lambda: b"\x00" * 7,
    "a header longer than the file": lambda: struct.pack("<Q", 1 << 40) + b"{}",
    "not JSON": lambda: _with_header(exported(*a_memory(identity(), 10)), b"{nope"),
    "JSON of 100,000 brackets": lambda: _with_header(exported(*a_memory(identity(), 10)), b"[" * 100_000),
    "a list": lambda: _with_header(exported(*a_memory(identity(), 10)), b"[]"),
    "a key twice": lambda: _with_raw(b'{"agent_id":', b'{"agent_id":"eve","agent_id":'),
    "100,000 tensors": lambda: _with_header(
        b"\x02" + b"\x00" * 7 + b"{}",
        {"__metadata__": dict.fromkeys(_SEED, "")} | {f"t{i}": {} for i in range(100_000)},
    ),
    "truncated": lambda: exported(*a_memory(identity(), 10))[:-1],
    "over-long": lambda: exported(*a_memory(identity(), 10)) + b"\x00",
    "overlapping": lambda: _changed("layer_0_k_scales>data_offsets", [0, 40]),
    "negative offsets": lambda: _changed("layer_0_k_weights>data_offsets", [-640, 0]),
    "a foreign dtype": lambda: _changed("layer_0_k_weights>dtype", "F64"),
    "a boundless shape": lambda: _changed("layer_0_k_weights>shape", [1 << 62, 1 << 62]),
    "a shape of a million ones": lambda: _changed("layer_0_k_scales>shape", [*_SCALES_SHAPE, *[1] * 1_000_000]),
    "a name outside": lambda: _changed("../../etc/passwd", {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}),
    "metadata that is no string": lambda: _changed("__metadata__>agent_id", 3),
    "no metadata": lambda: _changed("__metadata__", None),
    "tokens that are no numbers": lambda: _changed("__metadata__>token_sequence", '["a"]'),
    "tokens that are negative": lambda: _changed("__metadata__>token_sequence", str([-1] * 10)),
    "fewer tokens than said": lambda: _changed("__metadata__>token_sequence", "[1, 2]"),
    "half a surrogate pair": lambda: _changed("__metadata__>prompt_text", "\ud800" * 10),
    "a text of another length": lambda: _changed("__metadata__>prompt_text", "short"),
    "our key with nonsense": lambda: _changed("__metadata__>kvasir", "{}"),
    "our key with blocks of its own": lambda: _changed(
        "__metadata__>kvasir", '{"format": 1, "kv_identity": {"weights_digest": "%s"}, "token_ids": [1]}' % ("ab" * 32)
    ),
}
_SEED = ("agent_id", "model_id", "total_tokens", "prompt_text", "token_sequence")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"seed file|manifest\."):
        from_seed_file(HOSTILE[name](), identity=identity())


@settings(max_examples=sampled(50, of=150), deadline=None)
@given(data=st.data())
def test_a_flipped_byte_is_refused_or_is_other_memory_but_never_a_crash(data: st.DataObject) -> None:
    file = bytearray(exported(*a_memory(identity(layers=1), 3)))
    position = data.draw(st.integers(0, len(file) - 1))
    file[position] ^= data.draw(st.integers(1, 255))
    try:
        back = from_seed_file(bytes(file))
    except KvasirError:
        return
    assert all(digest == Digest.of(blob) for digest, blob in back.blobs.items())

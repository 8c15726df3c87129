"""proto/README.md: its examples hash to what they say, byte by byte, and are what the SDK computes."""

import re
from pathlib import Path

from blake3 import blake3
from kvasir.cachestore.v1 import identity_pb2 as pb
from kvasir.formats.block_hash import block_hash, kv_identity_hash, window_block_hash

PAGE = (Path(__file__).parents[2] / "proto/README.md").read_text()
EXAMPLES = re.findall(r"```hash\n(.*?)\n= ([0-9a-f]{64})\n```", PAGE, re.DOTALL)


def bytes_of(line: str) -> bytes:
    """The runs of a line before its words, which two blanks part from them."""
    runs = line.split("  ")[0].split()
    if "*" in runs:
        return bytes.fromhex("".join(runs[:-3])) + bytes.fromhex(runs[-3]) * int(runs[-1])
    return bytes.fromhex("".join(runs))


def test_every_example_is_the_hash_of_its_bytes() -> None:
    assert len(EXAMPLES) == PAGE.count("```hash") == 4
    for text, expected in EXAMPLES:
        assert blake3(b"".join(map(bytes_of, text.splitlines()))).hexdigest() == expected


def test_the_examples_are_what_their_words_say() -> None:
    full = pb.LayerLayout(kind=pb.LAYER_KIND_FULL, kv_heads=2, key_dim=8, value_dim=8)
    state = pb.StateTensor(type=pb.TENSOR_TYPE_FLOAT32, shape=[2, 4])
    policy = pb.KvPolicy(key_bits=4, value_bits=4, group_size=64, scale_type=1, key_rotation=1)
    layers = [full, pb.LayerLayout(kind=pb.LAYER_KIND_STATE, state_tensors=[state])]
    plain = kv_identity_hash(pb.KvIdentity(weights_digest="11" * 32, layers=layers[:1], policy=policy))
    first = block_hash("default", plain, "", [7] * 256)
    computed = [
        plain,
        kv_identity_hash(pb.KvIdentity(weights_digest="11" * 32, layers=layers, policy=policy)),
        first,
        window_block_hash(first, 512),
    ]
    assert [expected for _, expected in EXAMPLES] == computed

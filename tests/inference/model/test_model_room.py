"""How many agents fit a machine: arithmetic of blocks, windows and states, by the layouts of real models."""

import pytest
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.model.probing.real_layouts import REAL_LAYOUTS, agent_bytes

POLICY = identity_pb2.KvPolicy(
    key_bits=4,
    value_bits=4,
    group_size=64,
    scale_type=identity_pb2.SCALE_TYPE_BFLOAT16,
    key_rotation=identity_pb2.KEY_ROTATION_NONE,
)
# Bytes of a block of one layer: 256 tokens, heads, keys and values of so many dimensions, 4.5 bits each.
LLAMA_BLOCK = 256 * 8 * 2 * 128 * 9 // 16
GEMMA_BLOCK = 256 * 8 * 2 * 256 * 9 // 16


@pytest.mark.parametrize(
    ("name", "tokens", "size_bytes"),
    [
        ("Llama 3.1 8B", 1, 32 * LLAMA_BLOCK),
        ("Llama 3.1 8B", 256, 32 * LLAMA_BLOCK),
        ("Llama 3.1 8B", 257, 32 * 2 * LLAMA_BLOCK),
        ("Llama 3.1 8B", 32768, 32 * 128 * LLAMA_BLOCK),
        # A window of 1,024 touches four blocks, or five when it begins inside one.
        ("Gemma 3 12B", 512, 48 * 2 * GEMMA_BLOCK),
        ("Gemma 3 12B", 32768, (8 * 128 + 40 * 5) * GEMMA_BLOCK),
    ],
)
def test_an_agent_takes_whole_blocks_and_of_a_window_those_that_it_touches(
    name: str, tokens: int, size_bytes: int
) -> None:
    identity = identity_pb2.KvIdentity(layers=REAL_LAYOUTS[name], policy=POLICY)
    assert agent_bytes(identity, tokens) == size_bytes


def test_a_recurrent_state_takes_the_same_at_any_length() -> None:
    identity = identity_pb2.KvIdentity(layers=REAL_LAYOUTS["Granite 4.0 H Tiny"], policy=POLICY)
    states = 36 * (2 * 3 * (48 * 64 + 2 * 128) + 4 * 48 * 64 * 128)
    full = 4 * 256 * 4 * 2 * 128 * 9 // 16
    assert [agent_bytes(identity, tokens) for tokens in (256, 512)] == [states + full, states + 2 * full]

"""Real models' layer patterns with small heads: what agents share in the pool, and what a short turn stores."""

from collections.abc import Sequence

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.layer_groups import row_groups

from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_files import whole_blocks
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS

MODELS = ("Gemma 3 12B", "GPT-OSS 20B", "Llama 3.1 8B")
PROMPT, TURN, AGENTS = 4096, 50, 200


def pool_of_pattern(name: str) -> KvPool:
    """Two values a head, so that hundreds of agents are a few megabytes."""
    layers = [
        identity_pb2.LayerLayout(kind=each.kind, window=each.window, kv_heads=1, key_dim=2, value_dim=2)
        for each in REAL_LAYOUTS[name]
    ]
    identity = identity_pb2.KvIdentity(weights_digest="0" * 64, layers=layers, policy=policy_of(Rung.FP, "float32"))
    return KvPool(identity, 1 << 40)


def grown(kv: SequenceKV, counts: Sequence[int]) -> SequenceKV:
    """The sequence after cells of so many rows, whose pages it takes and nobody writes."""
    for count in counts:
        room = PassRoom(kv)
        room.take(count)
        room.move_in()
        kv.advanced(count)
    return kv


@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_agents_with_one_system_prompt_hold_it_once(name: str) -> None:
    pool = pool_of_pattern(name)
    common = grown(SequenceKV(pool), [256] * (PROMPT // 256))
    common.mark()
    held = pool.allocator.used
    agents = [grown(common.fork(), [TURN]) for _ in range(AGENTS)]
    assert pool.allocator.used == held + AGENTS * len(pool.groups), "one page of each group is an agent's own"
    assert pool.allocator.shared == held
    # A window keeps what it sees, not the prompt.
    assert held < PROMPT // 256 * len(pool.groups) or not common.has_rewind_points
    del agents
    assert pool.allocator.used == held


@pytest.mark.parametrize("name", MODELS)
def test_a_short_turn_stores_at_most_a_block_and_a_tail_of_each_group(name: str) -> None:
    """Over a hundred turns with prompts of 20 tokens, each of which keeps the engine's rewind points."""
    pool = pool_of_pattern(name)
    kv = grown(SequenceKV(pool), [256] * (PROMPT // 256))
    listed = {group: set(whole_blocks(kv, group)) for group in row_groups(pool.identity)}
    for _ in range(100):
        began, prompt = kv.length, kv.length + 20
        edge = max(prompt // 256 * 256, began)
        kv = kv.fork(began)
        kv.keep_rewind_points({began})
        for stop in (edge, prompt, began + TURN):
            kv.mark()
            grown(kv, [stop - kv.length])
        kv.mark()
        kv.keep_rewind_points({began, edge, kv.length})
        whole = {group: set(whole_blocks(kv, group)) for group in listed}
        assert max(len(whole[group] - listed[group]) for group in listed) <= 1
        listed = whole
    assert kv.length == PROMPT + 100 * TURN

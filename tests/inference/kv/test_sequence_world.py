"""Thousands of random forks, cuts, chunks, steps, joins, leaves and releases: everybody holds its own rows alone."""

import os
from collections.abc import Sequence

import pytest
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.model_hooks import row_exact
from inference_svc.kv.policy import Rung, policy_of
from tests.inference.kv.sequence_world import STATE_WIDTH, SequenceWorld
from tests.inference.kv.sequences import four_bits, full, recurrent, windowed

ACTS = int(os.environ.get("KVASIR_KV_ACTS", "50"))
FEW, MANY = 22, 60  # pages: with few there is often no room
ROOMY, NONE = 1 << 40, 0  # budgets of decoded values


def mixed_policy() -> identity_pb2.KvPolicy:
    """Layers of one group with pages of different sizes."""
    policy = policy_of(Rung.K8V4, "bfloat16")
    policy.exact_layers.append(3)
    return policy


LAYOUTS: dict[str, tuple[Sequence[identity_pb2.LayerLayout], identity_pb2.KvPolicy]] = {
    "full": ([full(), full(heads=1)], policy_of(Rung.Q4_ROTATED, "float32")),
    "window of 8": ([windowed(8)], four_bits()),
    "window of 100": ([windowed(100), full()], four_bits()),
    "window of 300": ([windowed(300, heads=1), windowed(300, heads=1)], policy_of(Rung.FP, "bfloat16")),
    "mixed": (
        [full(heads=1), windowed(100, heads=1), recurrent(STATE_WIDTH), full(), windowed(300), windowed(100, heads=1)],
        mixed_policy(),
    ),
}


@pytest.mark.long(8)
@pytest.mark.parametrize("pages", [FEW, MANY], ids=["little room", "much room"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_sequences_do_each_holds_and_sees_its_own_rows_alone(
    name: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pages == FEW:  # and sums in blocks, with rows that are decoded on read
        monkeypatch.setattr(row_exact, "_attention_step", lambda: 384)
    layers, policy = LAYOUTS[name]
    done = set[str]()
    for seed in range(2):
        budget = NONE if pages == FEW and seed else ROOMY
        world = SequenceWorld(layers, policy, seed=seed, pages=pages, decoded_budget=budget)
        for _ in range(ACTS):
            world.act()
        world.end()
        done |= world.acts.keys()
    assert done >= {"prefill", "step", "fork", "trim", "go_through_files"}

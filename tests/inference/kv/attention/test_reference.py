"""The reference of paged attention is attention: over any pages, whatever lies where nobody wrote."""

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.attention.reference import reference_attention
from tests.inference.kv.attention.scenes import FP16, Scene, page_format

LENGTHS = (0, 1, 5, 255, 256, 257, 700)

SCENES = {
    "q4": Scene(page_format("q4", 2, 128), LENGTHS, 8),
    "q4 of groups of 32, float16": Scene(page_format("q4", 2, 96, 32, FP16), LENGTHS, 2),
    "rotated, few queries": Scene(page_format("q4-rotated", 2, 64), LENGTHS, 8, query_count=5),
    "k8v4, window, sinks": Scene(page_format("k8v4", 1, 64, 32), LENGTHS, 8, window=128, has_sinks=True),
    "q8, many queries": Scene(page_format("q8", 1, 256), LENGTHS, 4, query_count=16),
    "exact": Scene(page_format("exact", 2, 80), LENGTHS, 4),
    "exact, sinks, window": Scene(
        page_format("exact", 2, 64, scale_type=FP16), LENGTHS, 4, query_count=2, has_sinks=True, window=60
    ),
    "values of another width": Scene(page_format("q4", 2, 128, value_dim=64), LENGTHS, 4),
}


@pytest.mark.parametrize("name", SCENES)
def test_it_is_attention_and_unwritten_pages_do_not_matter(name: str) -> None:
    scene = SCENES[name]
    assert scene.error(reference_attention(*scene.arguments())) < 1e-5


@pytest.mark.parametrize("missing", [0, 0xFFFF])
@pytest.mark.parametrize("policy", ["q4", "exact"])
def test_what_a_window_has_left_does_not_matter(policy: str, missing: int) -> None:
    """Its entries say page 0, which may hold anything, or no page at all."""
    scene = Scene(page_format(policy, 2, 64), (5, 700, 1100), 4, query_count=3, window=60)
    table = np.array(scene.block_table)
    spare = next(page for page in range(len(scene.pages)) if page not in table)
    table = np.where(table == 0, spare, table)
    scene.pages[spare] = scene.pages[0]
    scene.pages[0] = mx.full(scene.pages.shape[1:], 0x7FC0, dtype=mx.uint16)
    table[1, : (700 - 62) // 256], table[2, : (1100 - 62) // 256] = missing, missing
    scene.block_table = mx.array(table)
    assert scene.error(reference_attention(*scene.arguments())) < 1e-5


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    scene = Scene(page_format("q4", 2, 64), (0, 2), 4, query_count=4, has_sinks=True)
    got = np.array(reference_attention(*scene.arguments()))
    assert not got[0].any()
    assert not got[1, :, :2].any()
    assert got[1, :, 2:].all()

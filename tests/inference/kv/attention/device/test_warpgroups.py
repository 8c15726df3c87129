"""Many queries by Hopper's own products: emulated, they are attention over pages; and which launches use them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.kv.attention import fused, geometry, kernels
from inference_svc.kv.attention.choice import device_dialect
from inference_svc.kv.attention.geometry import Queries, SplitGeometry, split_geometry
from inference_svc.kv.attention.kept_kernel import program_text
from inference_svc.kv.attention.kernels import Dialect, warpgroups_source
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.page import PageFormat
from tests.emulation.emulator import early_cuda_emulator
from tests.inference.kv.attention.emulators import attention, needs_compiler
from tests.inference.kv.attention.scenes import FP16, Scene, page_format

BFLOATS, HALVES = mx.bfloat16, mx.float16
BOUNDS = {HALVES: 1e-3, BFLOATS: 4e-3}
LENGTHS = (0, 1, 255, 257, 600)

SCENES = {
    "q4, three warpgroups of queries": (page_format("q4", 1, 128), BFLOATS, {"query_heads": 4, "query_count": 45}),
    "q4, two blocks, a window and sinks": (
        page_format("q4", 1, 64),
        BFLOATS,
        {"query_heads": 4, "query_count": 60, "window": 70, "has_sinks": True},
    ),
    "k8v4, head dimension 96, a warpgroup without queries": (
        page_format("k8v4", 1, 96, 32),
        BFLOATS,
        {"query_heads": 2, "query_count": 30, "window": 70},
    ),
    "q4-rotated, halves": (page_format("q4-rotated", 2, 128, 64, FP16), HALVES, {"query_heads": 8, "query_count": 20}),
    "q4, hundreds of queries": (page_format("q4", 1, 128), BFLOATS, {"query_heads": 4, "query_count": 300}),
    "q8 in groups of 128": (page_format("q8", 1, 128, 128), BFLOATS, {"query_heads": 2, "query_count": 70}),
    "16 bits, head dimension 80": (
        page_format("exact", 1, 80),
        BFLOATS,
        {"query_heads": 2, "query_count": 40},
    ),
    "values wider than keys": (
        page_format("q4", 1, 64, value_dim=128),
        BFLOATS,
        {"query_heads": 4, "query_count": 40},
    ),
}
# As in test_fused.py: each program takes a compiler a while.
ALWAYS, IN_TURN = (
    ("k8v4, head dimension 96, a warpgroup without queries",),
    ("q4, three warpgroups of queries", "q4, hundreds of queries"),
)
MARKS = dict.fromkeys(ALWAYS, ()) | dict.fromkeys(IN_TURN, pytest.mark.long(4))
MATRIX = [pytest.param(name, marks=MARKS.get(name, pytest.mark.campaign)) for name in SCENES]


@needs_compiler
@pytest.mark.parametrize("name", MATRIX)
def test_products_of_warpgroups_are_attention_whatever_lies_elsewhere(name: str) -> None:
    """Unwritten rows hold NaN and Inf, unused table entries no page, outputs and shared memory noise."""
    form, dtype, options = SCENES[name]
    scene = Scene(form, LENGTHS, dtype=dtype, blocks=4, **options)
    assert scene.error(attention(scene, Dialect.CUDA, has_warpgroups=True)) < BOUNDS[dtype]


@needs_compiler
@pytest.mark.long(5)
@pytest.mark.parametrize(("length", "window"), [(45 + 190, None), (343, 150)])
def test_at_a_tiles_border_a_query_sees_all_its_tokens_and_no_other(length: int, window: int | None) -> None:
    """The first query sees all of a tile but its last token, or the last query all but the first; all weigh alike."""
    scene = Scene(page_format("q4", 1, 128), (length,), 4, 45, dtype=BFLOATS, window=window)
    scene.queries = scene.queries * 1e-3
    assert scene.error(attention(scene, Dialect.CUDA, has_warpgroups=True)) < BOUNDS[BFLOATS]


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits of many tiles, as of long sequences."""
    monkeypatch.setattr(geometry, "_WARPGROUP_BLOCKS", 1)
    fused._geometry.cache_clear()
    yield
    fused._geometry.cache_clear()


@pytest.mark.long(2)
@needs_compiler
@pytest.mark.usefixtures("one_block")
def test_more_tiles_than_places_for_values_have_the_same_bits_beside_others() -> None:
    """Seven tiles go through three places; a sequence alone in a table of the same width has the same bits. Copies of
    tiles may come as they are begun, or when they are waited for.
    """
    many = Scene(page_format("q4", 1, 128), (450, 40), 4, 45, dtype=BFLOATS, blocks=2)
    together = attention(many, Dialect.CUDA, has_warpgroups=True)
    assert many.error(together) < BOUNDS[BFLOATS]
    target = fused.KernelTarget(Dialect.CUDA, early_cuda_emulator, has_warpgroups=True)
    early = fused.fused_attention(*many.arguments(), target)
    assert mx.array_equal(early, together)
    alone = replace(many, lengths=(450,))
    alone.queries, alone.pages, alone.block_table = many.queries[:1], many.pages, many.block_table[:1]
    assert mx.array_equal(attention(alone, Dialect.CUDA, has_warpgroups=True)[0], together[0])


def test_what_products_read_is_fenced_before_it_is_handed_over() -> None:
    """The emulation has no proxy whose writes need a fence, so this reads the text."""
    fence, source = "kv_written_for_products();", kernels.text("warpgroups.h")
    followers = [after.split(";")[0].strip() for after in source.split(fence)[1:]]
    assert followers == [
        "kv_barrier_arrive(work.full + stage)",
        "kv_threads_barrier(2 + group_row / 64, 128)",
        "kv_group_barrier()",
    ]
    assert source.count("kv_barrier_arrive(work.full") == 1, "no other way to hand a tile over"


def test_this_devices_own_attention_of_many_queries() -> None:
    """On a GPU of Hopper's kind these are the products of warpgroups. A CPU rounds de-quantized rows to bfloats."""
    scene = Scene(page_format("q4", 2, 128), (600, 1500), 8, 48, dtype=BFLOATS, blocks=8)
    found = paged_attention(*scene.arguments(), device_dialect())
    assert scene.error(found) < (2e-2 if mx.default_device().type == mx.DeviceType.cpu else BOUNDS[BFLOATS])


def made(form: PageFormat, rows: int, tokens: int = 4096, query_type: str = "bfloat16", **how: Any) -> SplitGeometry:
    options = {"dialect": Dialect.CUDA, "has_warpgroups": True} | how
    return split_geometry(form, Queries(query_type, rows, tokens), **options)


def test_warpgroups_serve_what_tiles_would_where_the_device_has_them() -> None:
    form = page_format("q4", 8, 128)
    assert made(form, 33).by_warpgroups
    assert not made(form, 32).by_warpgroups
    assert made(form, 192, has_warpgroups=False).by_tiles
    assert made(form, 192, tokens=0).by_tiles, "splits that must be the same beside other sequences"
    assert made(page_format("q4", 8, 256), 192).by_tiles, "a thread has no registers for such a row"
    assert made(page_format("q4", 8, 32, 32), 192).by_tiles
    assert not made(form, 192, query_type="float16").by_warpgroups, "its values are bfloats"
    assert [made(form, rows).queries for rows in (33, 128, 129, 192, 256, 257, 512)] == [
        128,
        128,
        192,
        192,
        128,
        192,
        192,
    ]


@given(tokens=st.integers(1, 1 << 18), rows=st.integers(33, 1024), kv_heads=st.sampled_from([1, 2, 8, 32]))
def test_a_launch_of_warpgroups_fills_the_device_and_hardly_more_than_twice(
    tokens: int, rows: int, kv_heads: int
) -> None:
    shape = made(page_format("q4", kv_heads, 128), rows, tokens)
    blocks = -(-tokens // 256)
    parts = kv_heads * -(-rows // shape.queries)
    launched = shape.splits(blocks, 0) * parts
    assert shape.split % shape.tile == 0
    assert launched <= max(264 + parts, parts * 2)
    assert launched >= 132 or shape.split == (256 if tokens < 4096 else 512) or parts > 132
    # Blocks begin in the order of x: those without tokens, where a sequence's table is half empty, come last.
    assert shape.grid(1, shape.splits(blocks, 0), rows) == (parts * shape.warps * 32, shape.splits(blocks, 0), 1)


@pytest.mark.parametrize("policy", ["q4", "k8v4", "q8", "exact"])
@pytest.mark.parametrize("rows", [128, 192])
def test_a_block_fits_a_multiprocessor_of_hopper(policy: str, rows: int) -> None:
    assert made(page_format(policy, 8, 128, 32), rows).shared_bytes <= 227 << 10


def test_a_program_says_its_sizes_as_arguments_and_has_a_name_of_its_own() -> None:
    types = BFLOATS, mx.uint16, mx.int32, mx.int32, mx.float32
    named = {}
    for rows in (128, 192):
        shape = made(page_format("q4", 8, 128), rows)
        template = [("Query", BFLOATS), *shape.template.items()]
        name, text = program_text(
            replace(warpgroups_source(), blocks=1), template, types, (mx.float32,), shape.warps * 32
        )
        assert "#include" not in text, "NVRTC is given no folder to look in"
        assert "const int block_table_shape_1, const int pages_shape_1, const int queries_shape_1" in text
        assert "_shape[" not in text
        assert f'extern "C" __global__ void __launch_bounds__({shape.warps * 32}, 1) {name}(' in text
        named[name] = text
    assert len(named) == 2

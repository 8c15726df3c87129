"""The kernels, emulated in both dialects, are attention over pages: every format, shape and border."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kv.attention import checks, fused, geometry
from inference_svc.kv.attention.geometry import Queries, SplitGeometry, split_geometry, why_not
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.tiles import most_queries
from inference_svc.kv.batch.decode_step import PassArrays
from inference_svc.kv.batch.window_layer import WindowLayer
from inference_svc.kv.page import PageFormat, RowFormat
from tests.inference.kv.attention.emulators import EMULATORS, attention, both_dialects, needs_compiler
from tests.inference.kv.attention.scenes import BF16, FP16, Scene, page_format
from tests.made_models.sampling import first_and_in_turn

pytestmark = needs_compiler

# Empty, one token, a page and its neighbours, and more pages than one.
LENGTHS = (0, 1, 255, 256, 257, 600)
FLOATS, HALVES, BFLOATS = mx.float32, mx.float16, mx.bfloat16
BOUNDS = {FLOATS: 1e-5, HALVES: 1e-3, BFLOATS: 4e-3}

SCENES = {
    "q4, grouped heads": (page_format("q4", 2, 128), {"query_heads": 8}),
    "q4, a window and sinks": (page_format("q4", 1, 64), {"query_heads": 8, "window": 100, "has_sinks": True}),
    "q4-rotated in groups of 32, five queries": (
        page_format("q4-rotated", 2, 64, 32, FP16),
        {"query_heads": 2, "query_count": 5},
    ),
    "k8v4, head dimension 96, sixteen queries": (
        page_format("k8v4", 1, 96, 32),
        {"query_heads": 2, "query_count": 16, "window": 70},
    ),
    "q4, many queries": (page_format("q4", 1, 64), {"query_heads": 4, "query_count": 17}),
    "q4, some dozens of queries": (page_format("q4", 1, 128), {"query_heads": 2, "query_count": 20}),
    "q4, hundreds of queries": (page_format("q4", 1, 64), {"query_heads": 2, "query_count": 300}),
    "k8v4, many queries and a window": (
        page_format("k8v4", 1, 96, 32),
        {"query_heads": 2, "query_count": 33, "window": 70},
    ),
    "q4-rotated, many queries of halves": (
        page_format("q4-rotated", 1, 128, 64, FP16),
        {"query_heads": 4, "query_count": 20},
    ),
    "q4, head dimension 256, many queries and a window": (
        page_format("q4", 1, 256),
        {"query_heads": 2, "query_count": 35, "window": 300},
    ),
    "16 bits, many queries": (
        page_format("exact", 1, 80),
        {"query_heads": 2, "query_count": 20},
    ),
    "q8, head dimension 192, many queries, a window and sinks": (
        page_format("q8", 1, 192),
        {"query_heads": 2, "query_count": 24, "window": 130, "has_sinks": True},
    ),
    "16 bits, head dimension 256, many queries": (page_format("exact", 1, 256), {"query_heads": 2, "query_count": 33}),
    "q4-rotated, head dimension 256, many queries": (
        page_format("q4-rotated", 1, 256, 32),
        {"query_heads": 2, "query_count": 17},
    ),
    "q8, head dimension 256": (page_format("q8", 1, 256, scale_type=FP16), {"query_heads": 1}),
    "q4 in groups of 128": (page_format("q4", 1, 128, 128), {"query_heads": 2}),
    "16 bits, head dimension 80": (page_format("exact", 2, 80), {"query_heads": 2}),
}
TYPES = {
    "q4, grouped heads": (FLOATS, BFLOATS, HALVES),
    "16 bits, head dimension 80": (FLOATS, BFLOATS),
    "q4-rotated, many queries of halves": (HALVES,),
}
# Each program takes a compiler 2 to 10 s: some of the matrix are in every run, some take turns, the others are in
# `make campaigns`.
ALWAYS = (
    ("q4, grouped heads", BFLOATS, Dialect.CUDA),
    ("q4-rotated in groups of 32, five queries", BFLOATS, Dialect.METAL),
    ("q4, some dozens of queries", BFLOATS, Dialect.CUDA),
    ("k8v4, many queries and a window", BFLOATS, Dialect.CUDA),
)
IN_TURN = (
    ("q4, grouped heads", FLOATS, Dialect.METAL),
    ("q4, a window and sinks", BFLOATS, Dialect.CUDA),
    ("k8v4, head dimension 96, sixteen queries", BFLOATS, Dialect.METAL),
    ("q8, head dimension 256", BFLOATS, Dialect.METAL),
    ("q4, some dozens of queries", BFLOATS, Dialect.METAL),
    ("q4-rotated, many queries of halves", HALVES, Dialect.METAL),
    ("16 bits, many queries", BFLOATS, Dialect.METAL),
    ("16 bits, head dimension 256, many queries", BFLOATS, Dialect.METAL),
    ("q4, many queries", BFLOATS, Dialect.CUDA),
    ("q4, hundreds of queries", BFLOATS, Dialect.CUDA),
    ("q4-rotated, many queries of halves", HALVES, Dialect.CUDA),
    ("q4, head dimension 256, many queries and a window", BFLOATS, Dialect.CUDA),
)
MARKS = dict.fromkeys(ALWAYS, ()) | dict.fromkeys(IN_TURN, pytest.mark.long(10))
MATRIX = [
    pytest.param(
        name,
        dtype,
        dialect,
        marks=MARKS.get((name, dtype, dialect), pytest.mark.campaign),
        id=f"{name}-{str(dtype).removeprefix('mlx.core.')}-{dialect.value}",
    )
    for name in SCENES
    for dtype in TYPES.get(name, (BFLOATS,))
    for dialect in Dialect
]


@pytest.mark.parametrize(("name", "dtype", "dialect"), MATRIX)
def test_a_kernel_is_attention_whatever_lies_elsewhere(name: str, dtype: mx.Dtype, dialect: Dialect) -> None:
    """Unwritten rows hold NaN and Inf, unused table entries no page, outputs and shared memory noise."""
    form, options = SCENES[name]
    scene = Scene(form, LENGTHS, dtype=dtype, blocks=4, **options)
    assert scene.error(attention(scene, dialect)) < BOUNDS[dtype]


@pytest.mark.long(2)
@both_dialects
def test_thousands_of_tokens_in_pages_of_any_order(dialect: Dialect) -> None:
    scene = Scene(page_format("q4", 1, 64), (5000, 4095), 8, dtype=BFLOATS, seed=5)
    assert scene.error(attention(scene, dialect)) < BOUNDS[BFLOATS]


@both_dialects
def test_neighbours_and_the_width_of_the_table_change_no_bit(dialect: Dialect) -> None:
    many = Scene(page_format("q4", 1, 64), (600, 0, 1, 300), 8, dtype=BFLOATS, blocks=7)
    together = np.array(attention(many, dialect).astype(mx.float32))
    for row, length in enumerate(many.lengths):
        alone = replace(many, lengths=(length,))
        alone.queries, alone.pages = many.queries[row : row + 1], many.pages
        alone.block_table = many.block_table[row : row + 1, : max(1, -(-length // 256))]
        assert (np.array(attention(alone, dialect).astype(mx.float32))[0] == together[row]).all()


@pytest.mark.parametrize("window", [None, 300])
def test_longer_splits_are_the_same_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a long sequence, whose launch needs no more blocks."""
    monkeypatch.setattr(geometry, "_MANY_BLOCKS", 1)
    made = split_geometry(page_format("q4", 1, 64), Queries("bfloat16", 68, 1792), Dialect.CUDA)
    assert made.split > 512
    scene = Scene(page_format("q4", 1, 64), (1300, 40, 600), 4, 17, dtype=BFLOATS, blocks=7, window=window)
    fused._geometry.cache_clear()
    try:
        assert scene.error(attention(scene, Dialect.CUDA)) < BOUNDS[BFLOATS]
    finally:
        fused._geometry.cache_clear()


@both_dialects
def test_many_queries_are_attended_to_together_with_the_same_bits_beside_others(dialect: Dialect) -> None:
    """Where the table is so narrow that splits are as short as they get: in a wide one they are longer."""
    many = Scene(page_format("q4", 1, 64), (1300, 40, 600), 4, 17, dtype=BFLOATS, blocks=7)
    together = attention(many, dialect)
    assert many.error(together) < BOUNDS[BFLOATS]
    alone = replace(many, lengths=(1300,))
    alone.queries, alone.pages, alone.block_table = many.queries[:1], many.pages, many.block_table[:1, :6]
    assert mx.array_equal(attention(alone, dialect)[0], together[0])


def test_a_decoding_row_of_many_heads_has_the_same_bits_beside_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries share tiles, too, but its splits are fixed."""
    monkeypatch.setattr(geometry, "_MANY_BLOCKS", 1)
    fused._geometry.cache_clear()
    many = Scene(page_format("q4", 1, 64), (600, 1300), 64, dtype=BFLOATS)
    together = attention(many, Dialect.CUDA)
    alone = replace(many, lengths=(600,))
    alone.queries, alone.pages, alone.block_table = many.queries[:1], many.pages, many.block_table[:1, :3]
    assert mx.array_equal(attention(alone, Dialect.CUDA)[0], together[0])
    fused._geometry.cache_clear()


@both_dialects
def test_what_was_mixed_before_greater_scores_shrinks_with_them(dialect: Dialect) -> None:
    """The first 64 keys are near zero, so that a query's greatest score rises far behind them."""
    scene = Scene(page_format("q4", 1, 64), (600, 300), 4, 17, dtype=BFLOATS)
    units = np.array(scene.pages)
    for part in scene.format.parts[1:3]:  # scales and biases of keys
        for row, length in enumerate(scene.lengths):
            place = units[int(scene.block_table[row, 0].item()), part.offset : part.offset + part.size]
            few = place.reshape(part.kv_heads, 256, -1)[:, : min(64, length)]
            few[:] = np.array((mx.array(few).view(BFLOATS) / 128).view(mx.uint16))
    scene.pages = mx.array(units)
    scene.keys = [np.concatenate([rows[:, :64] / 128, rows[:, 64:]], axis=1) for rows in scene.keys]
    scene.queries = scene.queries * 4
    assert scene.error(attention(scene, dialect)) < 2 * BOUNDS[BFLOATS]


@both_dialects
def test_queries_next_to_nothing_see_no_more_than_others(dialect: Dialect) -> None:
    """Their scores are all near zero, and so must not be the score of what they do not see."""
    scene = Scene(page_format("q4", 1, 64), (600, 40), 4, 17, dtype=BFLOATS, window=100)
    scene.queries = scene.queries * 1e-33
    assert scene.error(attention(scene, dialect)) < BOUNDS[BFLOATS]


@both_dialects
def test_a_large_scale_overflows_no_half_and_a_tiny_weight_counts(dialect: Dialect) -> None:
    """Scales of 1000 and queries of 1e4 are far outside what halves hold when multiplied."""
    scene = Scene(page_format("q4", 1, 64), (300,), 8, dtype=BFLOATS)
    value = scene.format.parts[4]
    for part in (value, scene.format.parts[5]):
        units = np.array(scene.pages)
        place = units[:, part.offset : part.offset + part.size]
        grown = mx.array(place).view(BFLOATS) * 4096
        units[:, part.offset : part.offset + part.size] = np.array(grown.view(mx.uint16))
        scene.pages = mx.array(units)
    scene.values = [rows * 4096 for rows in scene.values]
    scene.queries, scene.scale = scene.queries * 4096, scene.scale / 4096
    assert scene.error(attention(scene, dialect)) < BOUNDS[BFLOATS]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 520), min_size=1, max_size=3),
    query_count=st.integers(1, 4),
    window=st.none() | st.integers(1, 300),
    spare_blocks=st.integers(0, 2),
    seed=st.integers(0, 99),
    dialect=st.sampled_from(Dialect),
)
def test_any_lengths_queries_and_windows(
    lengths: list[int], query_count: int, window: int | None, spare_blocks: int, seed: int, dialect: Dialect
) -> None:
    blocks = max(1, -(-max(lengths) // 256)) + spare_blocks
    # Two heads for one: the compiled kernel is one for up to four queries.
    form = page_format("q4", 1, 64)
    scene = Scene(form, lengths, 2, query_count, BFLOATS, blocks, window, seed=seed)
    assert scene.error(attention(scene, dialect)) < 2 * BOUNDS[BFLOATS]


def test_halves_are_multiplied_where_they_lose_nothing() -> None:
    quantized, exact = page_format("q4", 1, 64), page_format("exact", 1, 64, scale_type=BF16)

    def made(form: PageFormat, query_type: str, *, dialect: Dialect = Dialect.CUDA, rows: int = 4) -> SplitGeometry:
        return split_geometry(form, Queries(query_type, rows, 600), dialect)

    def by_matrices(form: PageFormat, query_type: str) -> bool:
        assert not made(form, query_type, rows=32).by_tiles
        assert not made(form, "float32", rows=64).by_tiles
        return made(form, query_type).by_matrices

    assert by_matrices(quantized, "bfloat16")
    assert by_matrices(quantized, "float16")
    assert by_matrices(exact, "bfloat16")
    assert not by_matrices(quantized, "float32")
    assert not by_matrices(exact, "float16"), "a bfloat has fewer bits than the query"
    assert not made(quantized, "bfloat16", dialect=Dialect.METAL).by_matrices
    assert not made(quantized, "bfloat16", dialect=Dialect.METAL, rows=16).by_tiles, "two blocks of lanes have as many"
    assert made(quantized, "bfloat16", dialect=Dialect.METAL, rows=17).by_tiles
    assert made(quantized, "bfloat16", rows=33).by_tiles
    assert not made(quantized, "float16", rows=33).by_tiles, "its values are bfloats"
    wide = made(page_format("q4", 1, 256), "bfloat16", rows=256)
    assert wide.queries == 64, "registers for more would be too many"
    assert [most_queries(quantized, kind) for kind in ("bfloat16", "float16", "float32")] == [2048, 64, 64]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [17, 33, 4096])
def test_a_block_of_tiles_has_at_most_the_threadgroup_memory_of_metal(dim: int, rows: int) -> None:
    made = split_geometry(page_format("exact", 8, dim), Queries("bfloat16", rows, 4096), Dialect.METAL)
    assert made.by_tiles
    assert made.shared_bytes <= (24 << 10 if dim < 256 else 32 << 10)
    assert (made.tile % 16, made.split % made.tile, made.queries % (8 * made.warps)) == (0, 0, 0)


@given(tokens=st.integers(1, 1 << 17), parts=st.sampled_from([1, 8, 16, 32, 64]))
def test_a_launch_for_many_queries_has_enough_blocks_and_few_more(tokens: int, parts: int) -> None:
    form = page_format("q4", 8, 128)
    rows = 128 * max(1, parts // 8)
    made = split_geometry(form, Queries("bfloat16", rows, tokens), Dialect.CUDA)
    blocks = -(-tokens // 256)
    launched = made.splits(blocks, 0) * form.key.kv_heads * -(-rows // made.queries)
    assert made.split in (256, 512, 1024, 2048, 4096)
    assert launched >= 256 or made.split == 256
    assert launched <= 2 * 512 or made.split == 4096


@given(length=st.integers(1, 5000), window=st.integers(1, 1100), count=st.integers(1, 256))
def test_a_window_has_as_many_splits_as_it_can_touch(length: int, window: int, count: int) -> None:
    count = min(count, length)
    made = split_geometry(page_format("q4", 1, 64), Queries("bfloat16", 4, 600), Dialect.CUDA)
    low = max(0, length - count - window + 1)
    touched = (length - 1) // made.split - low // made.split + 1
    blocks = -(-length // 256)
    assert touched <= made.splits(blocks, window + count - 1) <= made.splits(blocks, 0)


def test_what_the_kernels_cannot_read_has_a_reason() -> None:
    assert not why_not(page_format("q4", 8, 128))
    assert "512" in why_not(page_format("exact", 1, 512, value_dim=64)), "a latent layer: the reference serves it"
    assert "without values" in why_not(replace(page_format("q4", 8, 128), value=RowFormat(8, 0, 4, 64)))


@both_dialects
@pytest.mark.parametrize("dtype", [FLOATS, BFLOATS], ids=["lanes", "tiles"])
def test_the_weight_of_all_rows_is_that_of_their_scores(dialect: Dialect, dtype: mx.Dtype) -> None:
    """Of as many heads as a window of 24 rows makes of a query, also where splits of the table have no rows."""
    scene = Scene(page_format("q4", 2, 64), (0, 1, 256, 300), query_heads=2 * 48, dtype=dtype, blocks=4)
    target = fused.KernelTarget(dialect, EMULATORS[dialect])
    attended, weight = fused.attention_and_weight(*scene.arguments()[:3], scene.scale, target)
    assert scene.error(attended) < BOUNDS[dtype]
    queries, found = np.array(scene.queries.astype(mx.float32)), np.array(weight)
    assert (found[0] == -np.inf).all()
    for row in range(1, len(scene.lengths)):
        scores = np.einsum("khd,ktd->kht", queries[row, :, 0].reshape(2, 48, 64), scene.keys[row]) * scene.scale
        expected = np.log(np.exp(scores).sum(axis=-1)).reshape(-1)
        assert np.abs(found[row] - expected).max() < (1e-4 if dtype == FLOATS else 0.05)


@both_dialects
@pytest.mark.parametrize("policy", first_and_in_turn(["q4", "exact", "k8v4", "q4-rotated"], seconds=4, first=1))
def test_a_window_by_its_kernel_is_that_by_operations(
    dialect: Dialect, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind 2,060 tokens, which have more splits than a block has warps, and behind none. Of eight rows three are
    stored there, and all here.
    """
    monkeypatch.setitem(fused.COMPILERS, dialect, EMULATORS[dialect])
    form, count, heads = page_format(policy, 2, 64, scale_type=FP16), 8, 6
    pages = mx.concatenate([checks._pool(form, checks._rows(form, 512, each)) for each in range(5)])
    codecs = [checks._codec(each, form) for each in (form.key, form.value)]
    pool: Any = SimpleNamespace(
        formats=[form],
        groups=[SimpleNamespace(window=0)],
        group_number=lambda _layer: 0,
        codecs=[codecs],
        slot_of=lambda _layer: 0,
        dialect=dialect,
    )
    places = mx.array([[2060, 2061, 2062, *[-1] * 5], [*range(count)]], mx.int32)
    tables = mx.array([[3, 1, 8, 6, 13, 11, 18, 16, 23], [4, 2, *[0] * 7]], mx.int32)
    arrays = PassArrays(mx.zeros(2 * count), places, [tables], [pages])
    rows = [mx.random.normal((2 * count, 2, 1, 64), key=mx.random.key(each)) for each in range(2)]
    queries = mx.random.normal((2 * count, heads, 1, 64), key=mx.random.key(3))
    found = []
    for by_kernel in (False, True):
        layer = WindowLayer(pool, 0, by_kernel=by_kernel)
        layer.begin_window(arrays, mx.array([2060, 0], mx.int32))
        layer.update_and_fetch(*rows)
        found.append(layer.attend(queries, 0.125, None, None))
        flat = layer.attend(queries, 0.125, None, None, is_flat=True)
        assert mx.array_equal(flat, found[-1].reshape(2 * count, 1, -1))
    assert found[0].shape == found[1].shape == (2 * count, heads, 1, 64)
    assert mx.abs(found[0] - found[1]).max().item() < BOUNDS[FLOATS]

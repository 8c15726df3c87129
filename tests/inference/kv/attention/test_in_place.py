"""Kernels that write pages where they lie, emulated: they write rows, read rows as values, and touch no others."""

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.attention import in_place
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages
from inference_svc.kv.codec import Codec, ExactCodec, QuantizedCodec, RotatedCodec
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat
from inference_svc.kv.pages.page_rows import row_columns, rows_of_pages
from tests.inference.kv.attention.emulators import EMULATORS, both_dialects, needs_compiler
from tests.inference.kv.attention.scenes import FP16, MLX_TYPES, page_format
from tests.made_models.sampling import first_and_in_turn

pytestmark = needs_compiler

FORMATS = {
    "q4": page_format("q4", 2, 128),
    "q4-rotated in groups of 32": page_format("q4-rotated", 2, 64, 32, FP16),
    "k8v4": page_format("k8v4", 1, 96, 32),
    "q8": page_format("q8", 1, 64, scale_type=FP16),
    "exact": page_format("exact", 2, 80),
}
CASES = [(name, Dialect.CUDA) for name in FORMATS] + [
    (name, Dialect.METAL) for name in ("q4-rotated in groups of 32", "exact")
]
# Each takes a compiler a while: one of Metal and two of CUDA are in every run.
each_format = pytest.mark.parametrize(
    ("name", "dialect"),
    first_and_in_turn([*CASES[-1:], *CASES[:-1]], seconds=2, first=3),
    ids=lambda value: getattr(value, "value", value),
)

SPARE = 24  # units behind each page: an array of the pool is as wide as its widest layer
# Behind each other over a block's border, in any order, and nowhere.
PLACES = ((254, 255, 256, 257, 258), (7, -1, 0, 511, -1), (-1, -1, -1, -1, -1))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)


def pool(form: PageFormat, pages: int = 8, seed: int = 1) -> mx.array:
    """Pages of any bits, whose scales and values are small numbers."""
    random = np.random.default_rng(seed)
    units = random.integers(0, 1 << 16, (pages, form.units + SPARE), np.uint16)
    for part in form.parts:
        if not part.is_codes:
            numbers = mx.array(random.standard_normal((pages, part.size)).astype(np.float32))
            units[:, part.offset : part.offset + part.size] = np.array(
                numbers.astype(MLX_TYPES[form.scale_type]).view(mx.uint16)
            )
    made = mx.array(units)
    mx.eval(made)
    return made


def new_rows(form: PageFormat, batch: int, count: int) -> tuple[mx.array, mx.array]:
    """As a model makes them: [B, H, n, D] that lies in memory as [B, n, H, D]."""
    random = np.random.default_rng(3)
    made = [
        mx.array(random.standard_normal((batch, count, rows.kv_heads, rows.dim)).astype(np.float32))
        for rows in (form.key, form.value)
    ]
    return made[0].transpose(0, 2, 1, 3), made[1].transpose(0, 2, 1, 3)


def quantized_units(keys: mx.array, values: mx.array, form: PageFormat) -> mx.array:
    """A token's units in the page's order, uint16 [B, n, units], by MLX's own operations."""
    parts = (*codec(form.key, form).encode(keys), *codec(form.value, form).encode(values))
    batch, _, count, _ = keys.shape
    units = [mx.contiguous(part).view(mx.uint16).transpose(0, 2, 1, 3).reshape(batch, count, -1) for part in parts]
    return mx.concatenate(units, axis=-1)


def codec(rows: RowFormat, form: PageFormat) -> Codec:
    scale_type = MLX_TYPES[form.scale_type]
    if not rows.is_quantized:
        return ExactCodec(scale_type)
    plain = QuantizedCodec(rows.bits, rows.group_size, scale_type)
    return RotatedCodec(plain) if rows.is_rotated else plain


@each_format
def test_rows_are_written_to_their_places_and_nowhere_else(name: str, dialect: Dialect) -> None:
    """To the unit what MLX's own quantization and a scatter write."""
    form = FORMATS[name]
    pages, table = pool(form), np.array([[6, 2], [1, 7], [3, 4]], np.int32)
    keys, values = new_rows(form, 3, 5)
    rows, expected = np.array(quantized_units(keys, values, form)), np.array(pages)
    first, step = (np.array(part) for part in row_columns(form, range(len(form.parts))))
    for sequence, places in enumerate(PLACES):
        for number, place in enumerate(places):
            if place >= 0:
                page = table[sequence, place // PAGE_TOKENS]
                expected[page, first + step * (place % PAGE_TOKENS)] = rows[sequence, number]
    stored = append_rows(keys, values, LayerPages(pages, form, mx.array(table)), mx.array(PLACES, mx.int32), dialect)
    assert stored.tolist() == [[place + 1 for place in places] for places in PLACES]
    assert not np.array_equal(expected, np.array(pool(form)))
    assert np.array_equal(np.array(pages), expected)


@each_format
def test_rows_of_scattered_pages_are_read_as_the_codec_reads_them(name: str, dialect: Dialect) -> None:
    form = FORMATS[name]
    pages, table = pool(form), [5, 0, 3]
    before, of_layer = np.array(pages), LayerPages(pages, form, mx.array([table], mx.int32))
    followed = pages[mx.array(table)][:, : form.units]
    split = len(form.key.part_units)
    for start, stop in ((0, 1), (0, 768), (255, 257), (300, 512), (511, 700)):
        parts = rows_of_pages(form, followed, start, stop)
        stored = mx.array([stop], mx.int32)
        found = gathered_values(of_layer, start, stop, stored, mx.float32, dialect)
        for values, rows, own in zip(found, (form.key, form.value), (parts[:split], parts[split:]), strict=True):
            assert values.dtype == mx.float32
            assert mx.array_equal(values, codec(rows, form).decode(own, mx.float32)).item(), (start, stop)
    assert np.array_equal(np.array(pages), before)


@both_dialects
def test_whole_pages_are_written_and_no_others(dialect: Dialect) -> None:
    """From any column of other bytes, and from the pool's own pages."""
    form = FORMATS["q4"]
    pages, content = pool(form), pool(form, pages=3, seed=2)
    expected, given = np.array(pages), np.array(content)
    targets, sources = mx.array([6, 1], mx.int32), mx.array([2, 0], mx.int32)
    stored = store_pages(pages, targets, content, sources, range(16, 16 + form.units), dialect)
    expected[[6, 1], : form.units] = given[[2, 0], 16 : 16 + form.units]
    assert stored.tolist() == [2]
    assert np.array_equal(np.array(pages), expected)
    store_pages(pages, mx.array([0], mx.int32), pages, mx.array([6], mx.int32), range(pages.shape[1]), dialect)
    expected[0] = expected[6]
    assert np.array_equal(np.array(pages), expected)

"""Checks kernels by their results: they write, read, copy and attend to a few rows beside the reference.

Rows are numbers that a policy stores without rounding. So each unit of a page must be the reference's to the bit.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import mlx.core as mx
import structlog

from inference_svc.kv.attention.fused import TARGETS, fused_attention, window_attention
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages, Scoring, reference_attention
from inference_svc.kv.codec import SCALE_TYPES, Codec, EncodedRows, ExactCodec, QuantizedCodec, RotatedCodec
from inference_svc.kv.model_hooks import step_attention_check, whole_layer_check
from inference_svc.kv.model_hooks.few_rows import Matrix, few_rows
from inference_svc.kv.model_hooks.wide_rows import wide_rows
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat
from inference_svc.kv.pages.page_rows import UNIT, pages_of_rows

_BLOCKS = (3, 1)  # the pages of a sequence of two blocks, in a pool of five
_POOL_PAGES, _SPARE_PAGE = 5, 2
_TOKENS = 2 * PAGE_TOKENS
_NEW = range(PAGE_TOKENS - 3, PAGE_TOKENS + 3)  # new rows, on both sides of a block's border
_WINDOW = 100
_SHARE = 2  # query heads of each kv head
# Outputs, inputs, and whether they are gates: blocks of fourteen times 16 of them, and of two.
_WIDE_CASES = (14_000, 512, True), (4100, 1024, False)
_WIDE_ROWS = 40
_TILED = (12, 40)  # queries of a head whose rows tiles serve
# Sums are rounded in another order than the reference's, and in 16 bits.
_TOLERANCE = 0.03
_LOG = structlog.get_logger(__name__)


def why_wrong(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> str:
    """Why a dialect's kernels must not serve pages of a format to a model that computes in a type; empty: they may."""
    return _first(lambda: _differences(page_format, dtype, dialect))


def why_wrong_tiles(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> str:
    """As `why_wrong`, of the kernels of tiles alone."""
    return _first(lambda: _tile_differences(page_format, dtype, dialect))


def why_wrong_windows(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> str:
    """As `why_wrong`, of the kernel of windows alone."""
    return _first(lambda: _window_differences(page_format, dtype, dialect))


def _first(differences: Callable[[], Iterator[str]]) -> str:
    try:
        return next(differences(), "")
    except Exception as error:  # noqa: BLE001 - whatever a compiler, a driver or a launch raises
        return _raised(error)


def why_wrong_products() -> str:
    """Why the kernel of few rows must not serve; empty: it may. Its sums of small integers are exact."""

    def differences() -> Iterator[str]:
        x, matrices, right = _few_integers()
        if not all(mx.array_equal(few_rows(x, [each])[0], right).item() for each in matrices):
            yield "products differ from the reference"

    return _first(differences)


def why_wrong_joined() -> str:
    """As `why_wrong_products`, of sums with other rows, and of gated products."""

    def differences() -> Iterator[str]:
        x, matrices, right = _few_integers()
        added = right[:, ::-1] / 8
        if not all(mx.array_equal(few_rows(x, [each], added=added)[0], right + added).item() for each in matrices):
            yield "sums of products and rows differ from the reference"
        opened, x = right / 64, x / 64
        swapped = [tuple(part[::-1] for part in each) for each in matrices]
        gated = opened * mx.sigmoid(opened.astype(mx.float32)) * opened[..., ::-1]
        for pair in zip(matrices, swapped, strict=True):
            if not mx.allclose(
                few_rows(x, pair, is_gated=True)[0].astype(mx.float32), gated, rtol=0.01, atol=1e-3
            ).item():
                yield "gated products differ from the reference"

    return _first(differences)


def why_wrong_wide() -> str:
    """Why Hopper's own products must not serve more rows in few_rows' place: called where that is right. Rows have the
    same bits beside fewer others.
    """

    def differences() -> Iterator[str]:
        for (width, depth, is_gated), is_packed in product(_WIDE_CASES, (False, True)):
            x, w = (
                mx.random.normal((rows, depth), mx.bfloat16, scale=depth**-0.25, key=mx.random.key(rows))
                for rows in (_WIDE_ROWS, 2 * width if is_gated else width)
            )
            values = w.reshape(-1, width, depth)
            matrices: list[Matrix] = [tuple(mx.quantize(each, 64, 4)) if is_packed else (each,) for each in values]
            x, added = x[None], None if is_gated else mx.broadcast_to(x[None, :, :1], (1, _WIDE_ROWS, width))
            (right,) = few_rows(x[:, :32], matrices, is_gated=is_gated, added=_first_rows(added, 32))
            made, fewer = (
                wide_rows(x[:, :rows], matrices, [(1, rows, width)], is_gated=is_gated, added=_first_rows(added, rows))[
                    0
                ]
                for rows in (_WIDE_ROWS, _WIDE_ROWS - 1)
            )
            kind = "packed" if is_packed else "16 bits"
            if not mx.allclose(made[:, :32].astype(mx.float32), right.astype(mx.float32), rtol=0.02, atol=2e-3).item():
                yield f"wide products of {kind} differ from the others"
            if not mx.array_equal(made[:, :-1], fewer).item():
                yield f"a row's wide products of {kind} depend on the rows beside it"

    return _first(differences)


def _first_rows(added: mx.array | None, rows: int) -> mx.array | None:
    return None if added is None else added[:, :rows]


def why_wrong_layers(*, is_packed: bool) -> str:
    """As `why_wrong_products`, of whole layers with weights of 4 or of 16 bits."""
    return _first(partial(whole_layer_check.differences, is_packed=is_packed))


def why_wrong_steps() -> str:
    """As `why_wrong_products`, of a step's attention."""
    return _first(step_attention_check.differences)


def _few_integers() -> tuple[mx.array, list[tuple[mx.array, ...]], mx.array]:
    """x [1, 3, 64]; w [32, 64] as it is and packed; and their product, rounded once."""
    x, w = (
        mx.random.randint(-8, 8, shape, key=mx.random.key(5)).astype(mx.bfloat16) for shape in ((1, 3, 64), (32, 64))
    )
    codes = ((w + 8).astype(mx.uint32).reshape(32, 8, 8) << (4 * mx.arange(8, dtype=mx.uint32))).sum(-1)
    packed = codes, mx.ones((32, 1), mx.bfloat16), mx.full((32, 1), -8, mx.bfloat16)
    right = (x.astype(mx.float32) @ w.astype(mx.float32).T).astype(mx.bfloat16)
    return x, [(w,), packed], right


def _raised(error: Exception) -> str:
    """Its kind alone: the text of a compiler names files of this machine, and every caller may ask for a failure."""
    _LOG.error("kernels.check_raised", error=" ".join(str(error).split())[:400])
    return f"{type(error).__name__}, of which the log has the text"


def _differences(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> Iterator[str]:
    """The faults of each kernel, from the first on: later kernels read results of earlier ones."""
    stored, new = _rows(page_format, _TOKENS, 1), _rows(page_format, len(_NEW), 2)
    pages, table = _pool(page_format, stored), mx.array([_BLOCKS], mx.int32)
    rows = LayerPages(pages, page_format, table)
    with_new = [
        mx.concatenate([old[:, :, : _NEW.start], add, old[:, :, _NEW.stop :]], axis=2)
        for old, add in zip(stored, new, strict=True)
    ]
    expected = _pool(page_format, with_new)
    keys, values = new[0] if page_format.key.is_rotated else new[0].astype(dtype), new[1].astype(dtype)
    places = mx.array([list(_NEW)], mx.int32)
    written = append_rows(keys, values, rows, places, dialect)
    mx.eval(written)
    if not (mx.array_equal(pages, expected).item() and mx.array_equal(written, places + 1).item()):
        yield "rows are written differently from the reference"
    found = gathered_values(rows, 0, _TOKENS, written, dtype, dialect)
    is_right = _is_near if page_format.key.is_rotated else mx.array_equal
    if not all(is_right(one.astype(mx.float32), other) for one, other in zip(found, with_new, strict=True)):
        yield "rows are read differently from the reference"
    source, target = (mx.array([page], mx.int32) for page in (_BLOCKS[0], _SPARE_PAGE))
    mx.eval(store_pages(pages, target, pages, source, range(pages.shape[1]), dialect))
    expected[_SPARE_PAGE : _SPARE_PAGE + 1] = expected[_BLOCKS[0] : _BLOCKS[0] + 1]
    if not mx.array_equal(pages, expected).item():
        yield "pages are copied differently from the reference"
    # Of a decoding step of two sequences, in all tokens and in a window, and of a suffix.
    shapes = (2, 1, None), (2, 1, _WINDOW), (1, len(_NEW), None)
    yield from _attention_differences(pages, page_format, dtype, dialect, shapes)


def _tile_differences(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> Iterator[str]:
    """Of suffixes and cells: of each size of a block, of which the last is not full."""
    pages = _pool(page_format, _rows(page_format, _TOKENS, 1))
    shapes = tuple((1, count, window) for count in _TILED for window in (None, _WINDOW))
    yield from _attention_differences(pages, page_format, dtype, dialect, shapes)


def _window_differences(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> Iterator[str]:
    """Of two windows: three rows on both sides of a block's border are stored, and three are not; one of a sequence
    without tokens stores none. The reference's pages hold all rows of a window.
    """
    key, count = page_format.key, len(_NEW)
    stored, new = _rows(page_format, _TOKENS, 1), _rows(page_format, 2 * count, 2)
    pages, tables = _pool(page_format, stored), mx.array([_BLOCKS, _BLOCKS[::-1]], mx.int32)
    both = [rows.reshape(-1, 2, count, rows.shape[-1]).swapaxes(0, 1) for rows in new]  # by slot, as they are computed
    kept = len(_NEW) // 2
    places = mx.array([[*_NEW[:kept], *[-1] * kept], [-1] * count], mx.int32)
    keys, values = (each.astype(dtype) for each in both)
    rows, scoring = LayerPages(pages, page_format, tables), Scoring(key.dim**-0.5)
    written = append_rows(keys, values, rows, places, dialect)
    shape = 2 * count, _SHARE * key.kv_heads, 1, key.dim
    queries = mx.random.normal(shape, mx.float32, key=mx.random.key(6)).astype(dtype)
    by_row = [each.swapaxes(1, 2).reshape(2 * count, -1, 1, each.shape[-1]).astype(dtype) for each in both]
    before, target = mx.array([_NEW.start, 0], mx.int32), TARGETS[dialect]
    mixed = window_attention(queries, (by_row[0], by_row[1]), written, rows, before, scoring.scale, target)
    mixed = mixed.reshape(*shape[:3], -1)
    for slot, start in enumerate((_NEW.start, 0)):
        seen = [
            mx.concatenate([old[:, :, :start], add[slot : slot + 1], old[:, :, start + count :]], axis=2)
            for old, add in zip(stored, both, strict=True)
        ]
        asked = queries[slot * count : (slot + 1) * count].astype(mx.float32).swapaxes(0, 2)
        pages_seen = LayerPages(_pool(page_format, seen), page_format, tables[:1])
        right = reference_attention(asked, pages_seen, mx.array([start + count], mx.int32), scoring)
        if not _is_near(mixed[slot * count : (slot + 1) * count].swapaxes(0, 2), right):
            yield "attention over a window differs from the reference"


def _attention_differences(
    pages: mx.array,
    page_format: PageFormat,
    dtype: mx.Dtype,
    dialect: Dialect,
    shapes: Iterable[tuple[int, int, int | None]],
) -> Iterator[str]:
    """The faults of attention of so many sequences, each with so many queries, in a window."""
    key = page_format.key
    both, lengths = mx.array([_BLOCKS, _BLOCKS[::-1]], mx.int32), mx.array([_NEW.stop, PAGE_TOKENS - 50], mx.int32)
    for sequences, count, window in shapes:
        shape = (sequences, _SHARE * key.kv_heads, count, key.dim)
        queries = mx.random.normal(shape, mx.float32, key=mx.random.key(4)).astype(dtype)
        given = LayerPages(pages, page_format, both[:sequences]), lengths[:sequences], Scoring(key.dim**-0.5, window)
        mixed = fused_attention(queries, *given, TARGETS[dialect])
        right = reference_attention(queries.astype(mx.float32), *given)
        if not all(_is_near(*each) for each in zip(mixed, right, strict=True)):
            yield f"attention of {count} queries differs from the reference"


def _rows(page_format: PageFormat, count: int, seed: int) -> list[mx.array]:
    """K and V [1, kv_heads, count, dim], fp32, of numbers that the format stores as they are."""
    return [
        _exact_numbers(rows, count, mx.random.key(10 * seed + number))
        for number, rows in enumerate((page_format.key, page_format.value))
    ]


def _exact_numbers(rows: RowFormat, count: int, key: mx.array) -> mx.array:
    """Multiples of a power of two between the ends of each group's range, both of which it has."""
    bits = min(rows.bits, 8)
    width = rows.group_size or rows.dim
    shape = (1, rows.kv_heads, count, rows.dim // width, width)
    codes = mx.random.randint(0, 1 << bits, shape, key=key)
    codes[..., 0], codes[..., width // 2] = 0, (1 << bits) - 1
    values = (codes - (1 << (bits - 1))).astype(mx.float32) * 2.0 ** (3 - bits)
    values = values.reshape(1, rows.kv_heads, count, rows.dim)
    return mx.hadamard_transform(values) if rows.is_rotated else values


def _pool(page_format: PageFormat, rows: list[mx.array]) -> mx.array:
    """Pages that hold the rows, and others that hold noise."""
    pages = mx.random.randint(0, 1 << 16, (_POOL_PAGES, page_format.units), key=mx.random.key(3)).astype(UNIT)
    key, value = (_codec(each, page_format) for each in (page_format.key, page_format.value))
    encoded: EncodedRows = (*key.encode(rows[0]), *value.encode(rows[1]))
    made = pages_of_rows(page_format, tuple(mx.contiguous(part) for part in encoded))
    for number, page in enumerate(_BLOCKS):  # by slices, for which CUDA compiles nothing
        pages[page : page + 1] = made[number : number + 1]
    mx.eval(pages)
    return pages


def _codec(rows: RowFormat, page_format: PageFormat) -> Codec:
    scale_type = SCALE_TYPES[page_format.scale_type]
    if not rows.is_quantized:
        return ExactCodec(scale_type)
    plain = QuantizedCodec(rows.bits, rows.group_size, scale_type)
    return RotatedCodec(plain) if rows.is_rotated else plain


def _is_near(found: mx.array, right: mx.array) -> bool:
    """Whether no number is far off, and none is no number."""
    wrong = mx.abs(found.astype(mx.float32) - right.astype(mx.float32)).max()
    return bool((wrong <= _TOLERANCE * mx.abs(right).max()).item())

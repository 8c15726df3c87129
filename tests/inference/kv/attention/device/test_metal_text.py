"""Every kernel's text for Metal, as MLX writes it, is free of errors of names, types and address spaces. No Mac has run
these kernels: this, and the emulation of the same text, is how far a machine without Metal can see.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import pytest

from inference_svc.kv.attention import fused
from inference_svc.kv.attention.geometry import why_not
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages, Scoring
from inference_svc.kv.page import PAGE_TOKENS, PageFormat
from tests.emulation.metal_text import by_kernel, faults, printing_compiler, texts
from tests.inference.kv.attention.scenes import BF16, FP16, page_format

METAL = Dialect.METAL
TYPES = (mx.float32, mx.float16, mx.bfloat16)
POLICIES = ("q4", "q4-rotated", "q8", "k8v4", "exact")
DIMENSIONS = (64, 80, 96, 128, 192, 256)
# MLX hands arrays of less than eight elements over in another address space: tables and lengths of both kinds.
BATCHES = ((1, 1), (2, 5), (9, 1))


@dataclass(frozen=True)
class Case:
    """One shape of pages, and what is asked of it."""

    format: PageFormat
    dtype: mx.Dtype
    batch: int
    blocks: int
    queries: int
    has_sinks: bool

    def pages(self) -> mx.array:
        return mx.zeros((self.batch * self.blocks + 1, self.format.units), mx.uint16)

    def table(self) -> mx.array:
        return mx.zeros((self.batch, self.blocks), mx.int32)


def cases() -> Iterator[Case]:
    """Policies, dimensions, groups, types, sizes of tables, and numbers of queries; of options each with some."""
    shapes = product(POLICIES, DIMENSIONS, (32, 64, 128), (BF16, FP16), TYPES, BATCHES)
    for number, (policy, dim, group, scale_type, dtype, (batch, blocks)) in enumerate(shapes):
        if (policy == "exact" and group != 64) or (policy != "exact" and dim % group):
            continue
        if policy == "q4-rotated" and dim & (dim - 1):
            continue
        made = page_format(policy, 1 + number % 2, dim, group, scale_type)
        if not why_not(made):
            yield Case(made, dtype, batch, blocks, (1, 4, 24, 40)[number % 4], number % 7 < 2)


CASES = list(cases())


@pytest.fixture(autouse=True)
def _printing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.COMPILERS, METAL, printing_compiler)


def texts_of(case: Case) -> dict[str, str]:
    """Of a step and of a cell: rows are written, attended to, read back as values, and pages are filled from a file."""
    key, value = case.format.key, case.format.value
    rows = [mx.zeros((case.batch, key.kv_heads, case.queries, width), case.dtype) for width in (key.dim, value.dim)]
    queries = mx.zeros((case.batch, 2 * key.kv_heads, case.queries, key.dim), case.dtype)
    sinks = mx.zeros(2 * key.kv_heads, case.dtype) if case.has_sinks else None
    scoring = Scoring(0.1, 300 if case.batch == 2 else None, sinks)
    window, in_window = case.batch * 8, mx.zeros((case.batch, 8), mx.int32)
    window_rows = [mx.zeros((window, key.kv_heads, 1, width), case.dtype) for width in (key.dim, value.dim)]
    window_queries = mx.zeros((window, 2 * key.kv_heads, 1, key.dim), case.dtype)

    def recorded(pages: mx.array, table: mx.array, places: mx.array, lengths: mx.array) -> list[mx.array]:
        of_layer, target = LayerPages(pages, case.format, table), fused.TARGETS[METAL]
        stored = append_rows(*rows, of_layer, places, METAL)
        mixed = fused.fused_attention(queries, of_layer, lengths, scoring, target)
        given = window_queries, (window_rows[0], window_rows[1]), in_window, of_layer, lengths
        masked = fused.window_attention(*given, 0.1, target)
        first = LayerPages(pages, case.format, table[:1])
        read = gathered_values(first, 0, PAGE_TOKENS, stored, case.dtype, METAL)
        content, zero = mx.zeros((1, case.format.units), mx.uint16), mx.zeros(1, mx.int32)
        filled = store_pages(pages, zero, content, zero, range(case.format.units), METAL)
        return [stored, mixed, masked, *read, filled]

    places, lengths = mx.zeros((case.batch, case.queries), mx.int32), mx.zeros(case.batch, mx.int32)
    return texts(recorded, case.pages(), case.table(), places, lengths)


def names(found: dict[str, str]) -> set[str]:
    return {name.split("_")[1] for name in found}


@pytest.mark.long(3)
def test_a_sample_of_all_texts_has_no_fault() -> None:
    found = [texts_of(case) for case in CASES[::29]]
    kernels = [names(each) for each in found]
    assert {"split", "tiles"} <= set().union(*kernels)
    assert all(each - {"split", "tiles"} == {"append", "reduce", "window", "gather", "store"} for each in kernels)
    assert not faults_of(text for each in found for text in each.values())


def test_beside_a_hopper_the_text_is_metals_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_hopper", lambda: True)
    monkeypatch.setattr(fused, "_is_launched", lambda *_: True)
    assert not [text for case in CASES[::29] for text in texts_of(case).values() if "__device__" in text]


@pytest.mark.long(7)
def test_all_texts_have_no_fault() -> None:
    found = {text for case in CASES for text in texts_of(case).values()}
    assert len(found) > 900
    assert not faults_of(found)


def faults_of(found: Iterable[str]) -> list[tuple[str, ...]]:
    return [wrong for text in by_kernel(found) if (wrong := faults(text))]


# Each is one slip of the pen, by what it replaces; in the kernel itself or in the functions that it calls.
PLANTED = {
    "a pointer of a block into the device's memory": (r"KV_GLOBAL (?=[\w ]+\*)", "KV_SHARED "),
    "a pointer of the device into a block": (r"KV_SHARED (?=float\*)", "KV_GLOBAL "),
    "a pointer without its space": (r"(?<=[(,] )?KV_GLOBAL const (?=\w+\*)", "const "),
    "an input in a thread's memory": (r"const device (?=uint16_t\* pages)", "const thread "),
    "an output that is read only": (r"\n  device (?=\w+\* )", "\n  const device "),
    "a shared array elsewhere": (r"threadgroup float4 kv_shared_bytes", "device float4 kv_shared_bytes"),
    "a name of CUDA": (r"threadgroup_position_in_grid\.x", "blockIdx.x"),
    "a built-in that Metal lacks": (r"simd_shuffle_xor\(value", "__shfl_xor_sync(~0u, value"),
    "a function of C": (r"metal::exp2\(x\)", "exp2f(x)"),
    "a size that differs": (r"as_type<uint>\(x\)", "as_type<ushort>(x)"),
    "a name that is not there": (r"kv_lane(?=[ ,;)])", "kv_lanes"),
    "a forgotten argument": (r"kv_warp, kv_lane", "kv_warp"),
    "a forgotten semicolon": (r";\n\n}\n\ntemplate", "\n\n}\n\ntemplate"),
    "a parameter of another type": (r"const constant int\* (?=\w+_shape)", "const constant float4* "),
    "a template's value that is none": (r"(?<=\d), (\d+)>;", r", kv_none>;"),
}


@pytest.fixture(scope="module")
def one_of_each() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.COMPILERS, METAL, printing_compiler)
        cases = [
            each for each in CASES if each.dtype == mx.bfloat16 and each.has_sinks and each.format.scale_type == BF16
        ]
        few, many = (next(each for each in cases if each.queries == count) for count in (4, 24))
        tiles = {name: text for name, text in texts_of(many).items() if "tiles" in name}
        assert len(tiles) == 1
        return texts_of(few) | tiles


@pytest.mark.long(5)
@pytest.mark.parametrize("slip", PLANTED)
def test_a_slip_of_the_pen_is_found(one_of_each: dict[str, str], slip: str) -> None:
    old, new = PLANTED[slip]
    wrong = {name: made for name, text in one_of_each.items() if (made := last_replaced(old, new, text)) != text}
    assert wrong
    assert not [name for name, text in wrong.items() if not faults(text)]


def test_a_wrong_value_is_found_beside_right_ones(one_of_each: dict[str, str]) -> None:
    slip = PLANTED["a template's value that is none"]
    for text in one_of_each.values():
        [both] = by_kernel([text, last_replaced(*slip, text)])
        assert faults(both)


def last_replaced(old: str, new: str, text: str) -> str:
    found = list(re.finditer(old, text))
    return text[: found[-1].start()] + found[-1].expand(new) + text[found[-1].end() :] if found else text

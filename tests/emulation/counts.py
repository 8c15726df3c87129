"""Counts what Metal's kernels do, by their emulation: `python -m tests.emulation.counts`. No Mac has measured them."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.kv.attention import fused
from inference_svc.kv.attention.fused import TARGETS, fused_attention
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages
from inference_svc.kv.page import PAGE_TOKENS
from tests.emulation.races import Counts, watching_compiler
from tests.inference.kv.attention.scenes import Scene, page_format

_DIM, _HEADS, _QUERIES = 128, 4, 16


def counted(policy: str) -> Counts:
    """Of one page of a policy and one kv head: 64 queries, by tiles and by lanes; 16 rows written, all read, a copy."""
    counts, faults, target = Counts(), list[str](), TARGETS[Dialect.METAL]
    form = page_format(policy, 1, _DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.COMPILERS, Dialect.METAL, watching_compiler(faults, counts=counts))
        for dtype in (mx.float32, mx.bfloat16):
            scene: Any = Scene(form, (PAGE_TOKENS,), _HEADS, _QUERIES, dtype)
            mx.eval(fused_attention(*scene.arguments(), target))
        pages, zero = mx.zeros((2, form.units), mx.uint16), mx.array([0], mx.int32)
        rows, one = mx.zeros((1, 1, _QUERIES, _DIM), mx.bfloat16), mx.array([1], mx.int32)
        of_layer = LayerPages(pages, form, zero[None])
        stored = append_rows(rows, rows, of_layer, mx.arange(_QUERIES)[None], Dialect.METAL)
        mx.eval(*gathered_values(of_layer, 0, PAGE_TOKENS, stored, mx.bfloat16, Dialect.METAL))
        mx.eval(store_pages(pages, one, pages, zero, range(form.units), Dialect.METAL))
    assert not faults
    return counts


def rows(policies: Sequence[str]) -> Iterator[str]:
    """A table."""
    moved = "bytes read, written | in threadgroup memory"
    yield f"| pages | kernel | threadgroup bytes | products of 8 x 8 | {moved} | barriers | shuffles |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for policy in policies:
        for kernel, of in counted(policy).items():
            moved = f"{of['read']:,}, {of['written']:,} | {of['shared_read']:,}, {of['shared_written']:,}"
            sizes = f"{of['shared_bytes']:,} | {of['products']:,}"
            yield f"| {policy} | {kernel} | {sizes} | {moved} | {of['barriers']:,} | {of['shuffles']:,} |"


if __name__ == "__main__":
    print("\n".join(rows(("q4", "q8", "k8v4", "exact"))))

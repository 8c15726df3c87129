"""How long attention over pages takes on this device, beside MLX's own over contiguous rows and a plain copy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.attention.reference import LayerPages, Scoring, gathered, reference_attention
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat
from kvasir_bench.arithmetic import median_time

_SPREAD_BYTES = 400 << 20  # calls go over so many bytes in turn, that a cache holds none of them
_CALLS = 32  # in one evaluation, as a step has layers


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows of one length, each of which needs its newest token."""

    batch: int
    tokens: int
    bits: int
    kv_heads: int = 8
    query_heads: int = 32
    dim: int = 128
    group_size: int = 64

    @property
    def format(self) -> PageFormat:
        rows = RowFormat(self.kv_heads, self.dim, self.bits, 0 if self.bits == 16 else self.group_size)
        return PageFormat(rows, rows, identity_pb2.SCALE_TYPE_BFLOAT16)

    @property
    def read_bytes(self) -> int:
        """Bytes of the rows that one call must read."""
        return self.batch * self.tokens * self.format.bytes // PAGE_TOKENS


class Stopwatch:
    """Times evaluations: medians of `repeats`, after two that warm up."""

    def __init__(self, clock: Callable[[], float], repeats: int) -> None:
        self._clock, self._repeats = clock, repeats

    def seconds(self, call: Callable[[int], mx.array], calls: int = _CALLS) -> float:
        """Of one of `calls` calls that are evaluated together, each given its number."""
        together = median_time(
            lambda: mx.eval([call(number) for number in range(calls)]), self._repeats, self._clock, warm_ups=2
        )
        return together / calls


def copied_bytes_per_s(stopwatch: Stopwatch, size: int) -> float:
    """Bytes read and written per second by the fastest copy of `size` bytes that MLX makes."""
    fastest = 0.0
    for dtype in (mx.uint16, mx.float32):
        source = mx.zeros((size // dtype.size,), dtype)
        one = mx.array(1, dtype)
        mx.eval(source, one)
        fastest = max(fastest, 2 * size / stopwatch.seconds(lambda _, s=source, o=one: s + o, 4))  # type: ignore[misc]
    return fastest


def measured_case(case: AttentionCase, stopwatch: Stopwatch, dialect: Dialect | None) -> Iterator[dict[str, Any]]:
    """Rows of results: who computed, seconds a call, bytes of its rows per second, error against the reference."""
    arrays = [_random_pages(case, seed) for seed in range(max(2, min(8, _SPREAD_BYTES // case.read_bytes + 1)))]
    queries = mx.random.normal((case.batch, case.query_heads, 1, case.dim)).astype(mx.bfloat16)
    blocks = case.tokens // PAGE_TOKENS
    table = mx.random.permutation(case.batch * blocks).reshape(case.batch, blocks).astype(mx.int32)
    lengths = mx.full((case.batch,), case.tokens, dtype=mx.int32)
    scale = case.dim**-0.5
    mx.eval(arrays, queries, table, lengths)
    rows, scoring = [LayerPages(pages, case.format, table) for pages in arrays], Scoring(scale)

    def served(number: int) -> mx.array:
        return paged_attention(queries, rows[number % len(rows)], lengths, scoring, dialect)

    def by_reference(number: int) -> mx.array:
        return reference_attention(queries, rows[number % len(rows)], lengths, scoring)

    facts = {"batch": case.batch, "tokens": case.tokens, "bits": case.bits}

    def error(got: mx.array) -> float:
        right = reference_attention(queries.astype(mx.float32), rows[0], lengths, scoring)
        found: Any = (mx.linalg.norm(got.astype(mx.float32) - right) / mx.linalg.norm(right)).item()
        return float(found)

    if dialect is not None:
        yield _row(facts, "fused", case.read_bytes, stopwatch.seconds(served)) | {"error": error(served(0))}
    yield _row(facts, "reference", case.read_bytes, stopwatch.seconds(by_reference, 2))
    keys, values = gathered(rows[0], mx.zeros_like(lengths), lengths, mx.bfloat16)
    mask = mx.arange(case.tokens)[None, None, None] < lengths[:, None, None, None]
    spread = [(keys + 0, values + 0) for _ in range(min(4, len(rows)))]
    mx.eval(spread, mask)
    for who, given in (("bf16 SDPA", None), ("bf16 SDPA, masked", mask)):

        def plain(number: int, given: mx.array | None = given) -> mx.array:
            mine = spread[number % len(spread)]
            return mx.fast.scaled_dot_product_attention(queries, *mine, scale=scale, mask=given)

        yield _row(facts, who, keys.nbytes + values.nbytes, stopwatch.seconds(plain, 8))


def _row(facts: dict[str, Any], who: str, read_bytes: int, seconds: float) -> dict[str, Any]:
    return {"who": who, **facts, "call_s": seconds, "read_bytes_per_s": read_bytes / seconds}


def _random_pages(case: AttentionCase, seed: int) -> mx.array:
    """Pages of random codes, and of scales and values that are numbers."""
    key = mx.random.key(seed)
    count = case.batch * (case.tokens // PAGE_TOKENS)
    parts = []
    for part in case.format.parts:
        if part.is_codes:
            parts.append(mx.random.randint(0, 1 << 16, (count, part.size), mx.uint32, key).astype(mx.uint16))
        else:
            parts.append((mx.random.normal((count, part.size), key=key) * 0.1).astype(mx.bfloat16).view(mx.uint16))
    return mx.concatenate(parts, axis=1)

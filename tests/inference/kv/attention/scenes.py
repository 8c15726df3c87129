"""Scenes of paged attention: pools with rows in random pages and poison elsewhere, and the plain float64 answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.reference import LayerPages, Scoring
from inference_svc.kv.codec import ExactCodec, QuantizedCodec
from inference_svc.kv.page import PAGE_TOKENS, PageFormat, RowFormat

FP16, BF16 = identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16
NAN_UNITS = {FP16: 0x7E00, BF16: 0x7FC0}
INF_UNITS = {FP16: 0x7C00, BF16: 0x7F80}
MLX_TYPES = {FP16: mx.float16, BF16: mx.bfloat16}


def page_format(
    policy: str, kv_heads: int, dim: int, group_size: int = 64, scale_type: int = BF16, value_dim: int = 0
) -> PageFormat:
    """The page of a policy by name: q4, q4-rotated, k8v4, q8 or exact."""
    key_bits, value_bits = {"q4": (4, 4), "q4-rotated": (4, 4), "k8v4": (8, 4), "q8": (8, 8), "exact": (16, 16)}[policy]

    def rows(width: int, bits: int, is_rotated: bool = False) -> RowFormat:
        return RowFormat(kv_heads, width, bits, 0 if bits == 16 else group_size, is_rotated)

    return PageFormat(rows(dim, key_bits, policy == "q4-rotated"), rows(value_dim or dim, value_bits), scale_type)


@dataclass
class Scene:
    """Sequences of some lengths in a poisoned pool, and queries. All values are from one seed."""

    format: PageFormat
    lengths: Sequence[int]
    query_heads: int
    query_count: int = 1
    dtype: mx.Dtype = mx.float32
    blocks: int = 0  # of the table; 0: as many as the longest needs
    window: int | None = None
    has_sinks: bool = False
    seed: int = 0
    poison: int = 0xFFFF  # what unwritten table entries say; as int32 it is no page
    pages: mx.array = field(init=False)
    block_table: mx.array = field(init=False)
    queries: mx.array = field(init=False)
    keys: list[np.ndarray] = field(init=False)  # as decoded and turned back, [kv_heads, length, dim] each
    values: list[np.ndarray] = field(init=False)
    sinks: mx.array | None = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        needed = [-(-length // PAGE_TOKENS) for length in self.lengths]
        self.blocks = self.blocks or max(1, *needed)
        order = self.random.permutation(sum(needed) + 3)
        pool = self._poisoned(len(order))
        table = np.full((len(self.lengths), self.blocks), self.poison, np.int32)
        self.keys, self.values = [], []
        for row, length in enumerate(self.lengths):
            mine, order = order[: needed[row]], order[needed[row] :]
            table[row, : needed[row]] = mine
            self._store(pool, mine, length)
        self.pages, self.block_table = mx.array(pool), mx.array(table)
        shape = (len(self.lengths), self.query_heads, self.query_count, self.format.key.dim)
        self.queries = mx.array(self.random.standard_normal(shape).astype(np.float32) * 2).astype(self.dtype)
        self.sinks = (
            mx.array(self.random.standard_normal(self.query_heads).astype(np.float32)) if self.has_sinks else None
        )
        self.scale = self.format.key.dim**-0.5

    def _poisoned(self, pages: int) -> np.ndarray:
        """Every unit a NaN or an Inf of the scale type."""
        kinds = np.array([NAN_UNITS[self.format.scale_type], INF_UNITS[self.format.scale_type]], np.uint16)
        return kinds[self.random.integers(0, 2, (pages, self.format.units))]

    def _store(self, pool: np.ndarray, mine: np.ndarray, length: int) -> None:
        parts: list[mx.array] = []
        for rows, decoded in ((self.format.key, self.keys), (self.format.value, self.values)):
            values = mx.array(self.random.standard_normal((1, rows.kv_heads, length, rows.dim)).astype(np.float32))
            if not length:
                parts += [mx.zeros((1, rows.kv_heads, 0, 1))] * len(rows.part_units)
                decoded.append(np.zeros((rows.kv_heads, 0, rows.dim)))
                continue
            scale_type = MLX_TYPES[self.format.scale_type]
            codec = (
                QuantizedCodec(rows.bits, rows.group_size, scale_type) if rows.is_quantized else ExactCodec(scale_type)
            )
            encoded = codec.encode(mx.hadamard_transform(values) if rows.is_rotated else values)
            parts += encoded
            back = (
                mx.hadamard_transform(codec.decode(encoded, mx.float32))
                if rows.is_rotated
                else codec.decode(encoded, mx.float32)
            )
            decoded.append(np.array(back[0]).astype(np.float64))
        for part, encoded in zip(self.format.parts, parts, strict=True):
            if length:
                units = np.array(mx.contiguous(encoded).view(mx.uint16))[0]
                for number, page in enumerate(mine):
                    rows_here = units[:, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
                    place = pool[page, part.offset : part.offset + part.size].reshape(part.kv_heads, PAGE_TOKENS, -1)
                    place[:, : rows_here.shape[1]] = rows_here

    def arguments(self) -> tuple[mx.array, LayerPages, mx.array, Scoring]:
        rows, lengths = LayerPages(self.pages, self.format, self.block_table), mx.array(list(self.lengths), mx.int32)
        return self.queries, rows, lengths, Scoring(self.scale, self.window, self.sinks)

    def answer(self) -> np.ndarray:
        """[B, Hq, L, Dv] in float64, position by position."""
        queries = np.array(self.queries.astype(mx.float32)).astype(np.float64)
        batch, heads, count, _ = queries.shape
        share = heads // self.format.key.kv_heads
        found = np.zeros((batch, heads, count, self.format.value.dim))
        for row in range(batch):
            for head in range(heads):
                for number in range(count):
                    last = self.lengths[row] - count + number
                    first = 0 if self.window is None else max(0, last - self.window + 1)
                    if last < first:
                        continue
                    seen = slice(first, last + 1)
                    scores = self.keys[row][head // share, seen] @ queries[row, head, number] * self.scale
                    sink = np.array([]) if self.sinks is None else np.array([np.array(self.sinks)[head]])
                    top = max(scores.max(), *sink) if sink.size else scores.max()
                    weights = np.exp(scores - top)
                    total = weights.sum() + np.exp(sink - top).sum()
                    found[row, head, number] = weights @ self.values[row][head // share, seen] / total
        return found

    def error(self, got: mx.array) -> float:
        """Relative error of a result: the largest, over sequences, of ‖got - answer‖ / ‖answer‖."""
        found, answer = np.array(got.astype(mx.float32)).astype(np.float64), self.answer()
        assert found.shape == answer.shape
        errors = [0.0]
        for mine, right in zip(found, answer, strict=True):
            assert np.isfinite(mine).all()
            norm = np.linalg.norm(right)
            errors.append(np.linalg.norm(mine - right) / norm if norm else float(np.abs(mine).max()))
        return max(errors)

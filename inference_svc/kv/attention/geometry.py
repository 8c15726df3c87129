"""How a page format and a few queries are cut into blocks, warps and tiles of a kernel: numbers alone, no MLX."""

from dataclasses import dataclass
from typing import NamedTuple

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.page import EXACT_BITS, PAGE_TOKENS, PageFormat, RowFormat

# Tokens that a block mixes, whatever is in the batch: a row's sum must not depend on its neighbours.
SPLIT_TOKENS = 256
# Where a block has many queries, which go over each tile together, sixteen or twice that for each warp, a split is as
# long as a launch of so many blocks needs: a GPU of Hopper's size has all of them at once.
MANY_QUERIES = (64, 128)
_MANY_BLOCKS = 256
_MOST_SPLIT_TOKENS = 4096
_LEAST_OF_MANY = 33
# On Metal eight or sixteen for each warp. Up to sixteen queries two blocks of lanes serve. With more threadgroup memory
# than this a core would have room for one block.
_METAL_QUERIES = (32, 64)
_METAL_LEAST_OF_MANY = 17
_METAL_TILE_BYTES = 24 << 10
# By Hopper's own products: 64 queries for each group of four warps that multiplies, and one such group beside them. A
# block takes a whole multiprocessor, so a launch has about twice as many blocks as there are multiprocessors: tables of
# sequences may be half empty. A block's beginning and end take as long as some hundred tokens.
_WARPGROUP_QUERIES = (128, 192)
_WARPGROUP_BLOCKS = 264
_WARPGROUP_SPLIT_TOKENS = 512
_LONG_TOKENS = 4096
_STAGES = 3
WARPS = 4
REDUCE_WARPS = 8
LANES = 32
PARTIAL_EXTRA = 4  # floats beside a mix: its greatest score, the sum of its weights, and two that keep it aligned
MAX_QUERIES = 64  # per sequence and head of the kernels; with tiles more
MAX_TILED_QUERIES = 2048  # a cell's
_MAX_TILE_BYTES = 20 << 10  # of a warp


@dataclass(frozen=True, slots=True)
class SplitGeometry:
    """The compile-time numbers of the split kernel, and those that a launch needs."""

    format: PageFormat
    queries: int  # that a block serves
    by_matrices: bool
    split: int = SPLIT_TOKENS
    warps: int = WARPS
    by_tiles: bool = False
    by_warpgroups: bool = False
    dialect: Dialect = Dialect.CUDA
    most_tile: int = 64

    @property
    def tile(self) -> int:
        """Tokens that a warp brings into shared memory at once."""
        if self.by_warpgroups:
            return 64
        if self.by_tiles and self.dialect is Dialect.METAL:
            return 32 if self._tiles_bytes(32) <= _METAL_TILE_BYTES else 16
        if self.by_tiles:
            return 64 if _is_narrow(self.format) else 32
        is_long = self.most_tile == 64 and self.split // self.warps >= 64
        return 64 if is_long and 64 * self._token_bytes <= _MAX_TILE_BYTES else 32

    @property
    def _token_bytes(self) -> int:
        return 2 * (sum(self.format.key.part_units) + sum(self.format.value.part_units))

    @property
    def _stores(self) -> int:
        """Stored tiles in shared memory at once, of warpgroups: three where there is room."""
        return 3 if max(self.format.key.bits, self.format.value.bits) < EXACT_BITS else 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        value_dim, key = self.format.value.dim, self.format.key
        if self.by_warpgroups:
            panels = -(-key.dim // 64), -(-value_dim // 64)
            values = _STAGES * self.tile * sum(panels) * 128 + self.queries * panels[0] * 128
            return 1024 + values + self._stores * self.tile * self._token_bytes + 256 + _STAGES * 16
        if self.by_tiles:
            return self._tiles_bytes(self.tile)
        if self.by_matrices:
            columns = -(-self.queries // 8)
            words = columns * LANES * (-(-key.dim // 32) * 4 + 4) + 8 * columns * (1 + groups(key))
            tiles = _aligned(words * 4) + self.warps * self.tile * self._token_bytes
            mixes = self.warps * 8 * columns * (2 + value_dim + 4) * 4
            return _aligned(max(tiles, mixes))
        per_query = max(key.dim + groups(key) + self.warps * LANES, value_dim) + self.warps * 2
        return _aligned(per_query * self.queries * 4)

    def _tiles_bytes(self, tile: int) -> int:
        """For values of a tile and of queries, and on CUDA for the tile as it is stored."""
        key = self.format.key
        stored = self._token_bytes if self.dialect is Dialect.CUDA else 0
        return tile * (stored + 2 * (key.dim + self.format.value.dim)) + self.queries * 2 * key.dim

    @property
    def template(self) -> dict[str, int | bool]:
        return format_template(self.format) | {
            "QUERIES": self.queries,
            "WARPS": self.warps,
            "TILE": self.tile,
            "SHARED_BYTES": self.shared_bytes,
            # Tiles and warpgroups get the split as an argument: one kernel for all lengths.
            **({} if self.by_tiles or self.by_warpgroups else {"SPLIT": self.split}),
            **({"STORES": self._stores, "STAGES": _STAGES} if self.by_warpgroups else {}),
        }

    def grid(self, batch: int, splits: int, rows: int) -> tuple[int, int, int]:
        """Threads of a launch for `rows` queries of each kv head. Blocks begin in the order of x, then y: those of
        warpgroups that have no tokens come last.
        """
        parts = self.format.key.kv_heads * -(-rows // self.queries)
        if self.by_warpgroups:
            return parts * self.warps * LANES, splits, batch
        return splits * self.warps * LANES, parts, batch

    def splits(self, blocks: int, seen_tokens: int) -> int:
        """Of each sequence with so many blocks, from the first token that its queries see on: with a window at most
        `seen_tokens`, 0 without.
        """
        splits = -(-blocks * PAGE_TOKENS // self.split)
        return min(splits, (seen_tokens - 2) // self.split + 2) if seen_tokens else splits


def format_template(page_format: PageFormat) -> dict[str, int | bool]:
    """The compile-time numbers of a page format."""
    key, value = page_format.key, page_format.value
    return {
        "KV_HEADS": key.kv_heads,
        "KEY_DIM": key.dim,
        "VALUE_DIM": value.dim,
        "KEY_BITS": key.bits,
        "VALUE_BITS": value.bits,
        "GROUP": key.group_size or value.group_size,
        "IS_BFLOAT": page_format.scale_type == identity_pb2.SCALE_TYPE_BFLOAT16,
    }


class Queries(NamedTuple):
    """The queries of a launch."""

    type: str  # float32, float16 or bfloat16
    rows: int  # of each kv head: its heads times tokens
    seen_tokens: int  # of the widest sequence, or its window; 0 where the splits must be the same beside others
    batch: int = 1  # so many sequences, where splits depend on others


def split_geometry(
    page_format: PageFormat,
    queries: Queries,
    dialect: Dialect,
    *,
    takes_tiles: bool = True,
    has_warpgroups: bool = False,
) -> SplitGeometry:
    """`takes_tiles`: unless they failed their check (`tiles`). `has_warpgroups`: the device has Hopper's own
    instructions.
    """
    query_type, rows, seen_tokens, batch = queries
    key, is_metal = page_format.key, dialect is Dialect.METAL
    least = _METAL_LEAST_OF_MANY if is_metal and seen_tokens else _LEAST_OF_MANY
    if takes_tiles and rows >= least and has_tiles(page_format, query_type):
        if has_warpgroups and seen_tokens and _suits_warpgroups(page_format):
            return _by_warpgroups(page_format, queries)
        few, many = _METAL_QUERIES if is_metal else MANY_QUERIES
        served = many if rows > few and _is_narrow(page_format) else few
        split = _many_split(seen_tokens, batch * key.kv_heads * -(-rows // served))
        return SplitGeometry(page_format, served, False, split, by_tiles=True, dialect=dialect)
    # Fragments of halves are too coarse for queries of fp32.
    if not is_metal and (query_type == "bfloat16" or (query_type == "float16" and not _holds_bfloats(page_format))):
        return SplitGeometry(page_format, 16 if rows > 8 and _is_narrow(page_format) else 8, True)
    most = 8 if _is_narrow(page_format) else 4
    return SplitGeometry(page_format, min(most, 1 << (rows - 1).bit_length()), False)


def _suits_warpgroups(page_format: PageFormat) -> bool:
    return _is_narrow(page_format) and min(page_format.key.dim, page_format.value.dim) >= 64


def _by_warpgroups(page_format: PageFormat, queries: Queries) -> SplitGeometry:
    """Blocks of as many queries as fill them best. Of a batch they end at different lengths, so none is very long."""
    _, rows, seen_tokens, batch = queries
    least, most = _WARPGROUP_QUERIES
    blocks = -(-rows // most)
    served = least if rows <= blocks * least else most
    wanted = max(1, _WARPGROUP_BLOCKS // (page_format.key.kv_heads * blocks * batch))
    least_tokens = SPLIT_TOKENS if seen_tokens < _LONG_TOKENS else _WARPGROUP_SPLIT_TOKENS
    split = max(least_tokens, -(-seen_tokens // (64 * wanted)) * 64)
    split = min(split, _MOST_SPLIT_TOKENS) if batch > 1 else split
    warps = served // 16 + WARPS
    return SplitGeometry(page_format, served, False, split, warps, by_warpgroups=True)


def _many_split(seen_tokens: int, parts: int) -> int:
    """Tokens of a split where each has so many blocks: a power of two. The tables of sequences double in width, so they
    may be half empty.
    """
    wanted = seen_tokens * parts // (2 * _MANY_BLOCKS)
    return min(max(SPLIT_TOKENS, 1 << max(0, wanted - 1).bit_length()), _MOST_SPLIT_TOKENS)


def has_tiles(page_format: PageFormat, query_type: str) -> bool:
    """Whether stored rows become values of the queries' type."""
    scale_type = "bfloat16" if page_format.scale_type == identity_pb2.SCALE_TYPE_BFLOAT16 else "float16"
    return scale_type == query_type


def _is_narrow(page_format: PageFormat) -> bool:
    """Whether a warp has registers for twice as many queries as with the widest heads."""
    return max(page_format.key.dim, page_format.value.dim) <= 128


def groups(rows: RowFormat) -> int:
    return rows.dim // rows.group_size if rows.is_quantized else 1


def why_not(page_format: PageFormat) -> str:
    """Why the kernels cannot read pages of a format; empty if they can."""
    key, value = page_format.key, page_format.value
    if not value.dim:
        return "layers without values"
    if key.kv_heads != value.kv_heads:
        return "other heads for values than for keys"
    if max(key.dim, value.dim) > 256 or key.dim % 16 or value.dim % 16:
        return f"head dimensions {key.dim} and {value.dim}: the kernels take multiples of 16 up to 256"
    if key.is_quantized and value.is_quantized and key.group_size != value.group_size:
        return "groups of two sizes"
    return ""


def _holds_bfloats(page_format: PageFormat) -> bool:
    """Whether 16-bit values would meet queries as bfloats, which have fewer bits than halves."""
    is_exact = EXACT_BITS in (page_format.key.bits, page_format.value.bits)
    return is_exact and page_format.scale_type == identity_pb2.SCALE_TYPE_BFLOAT16


def _aligned(count: int) -> int:
    return -(-count // 16) * 16

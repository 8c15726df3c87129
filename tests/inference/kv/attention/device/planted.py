"""Faults to be planted in Metal's text, each with the check that must find it; and a small run of each kernel."""

import re
from dataclasses import dataclass

import mlx.core as mx

from inference_svc.kv.attention.fused import TARGETS, fused_attention, window_attention
from inference_svc.kv.attention.in_place import append_rows, gathered_values, store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.reference import LayerPages
from inference_svc.kv.page import PageFormat
from tests.inference.kv.attention.scenes import FP16, Scene, page_format

BOUNDS, UNWRITTEN = "out of bounds", "a read before any write"
RACE = f"a race|{UNWRITTEN}"  # whichever comes first
BARRIER = f"a barrier that not all lanes reach|{RACE}"
READ_ONLY = "a write to what is read only"
_BLOCK, _WARP = r"\n *kv_group_barrier\(\);", r"\n *kv_warp_barrier\(\);"


def _format(policy: str = "q4") -> PageFormat:
    return page_format(policy, 2, 64, scale_type=FP16)


_FORMAT = _format()


@dataclass(frozen=True)
class Fault:
    """In one kernel: the `number`-th match of `old` is replaced. `found`: a pattern of the check's words for it, in a
    launch over pages of the policy.
    """

    kernel: str
    old: str
    new: str
    found: str
    number: int = 0
    policy: str = "q4"

    def planted(self, text: str) -> str:
        """The text with the fault. The emulation's own words before the kernel's stay as they are."""
        start = text.index("KV_FN inline")
        match = list(re.finditer(self.old, text[start:]))[self.number]
        return text[: start + match.start()] + match.expand(self.new) + text[start + match.end() :]


def _dropped(kernel: str, barrier: str, number: int = 0) -> Fault:
    return Fault(kernel, barrier, "", RACE, number)


# By the place in `lanes.h`: queries are there, their sums are there, the warps' tops are there, a warp has added.
PLANTED = {
    "no barrier behind the queries": _dropped("split", _BLOCK),
    "no barrier behind the queries' sums": _dropped("split", _BLOCK, 1),
    "no barrier behind the tops": _dropped("split", _BLOCK, 2),
    "no barrier behind a warp's turn": _dropped("split", _BLOCK, 3),
    "no barrier behind the weights": _dropped("split", _WARP),
    "no barrier before the next weights": _dropped("split", _WARP, 1),
    "no barrier behind the warps' mixes": _dropped("reduce", _BLOCK),
    "a warp's barrier for a block's": Fault("split", r"threadgroup_barrier\(mem", "simdgroup_barrier(mem", RACE),
    "a warp's barrier for the reduction": Fault("reduce", r"threadgroup_barrier\(mem", "simdgroup_barrier(mem", RACE),
    "weights that all warps share": Fault("split", r" \+ warp \* QUERIES \* 32;", ";", RACE),
    "tops that all warps share": Fault("split", r"\(warp \* QUERIES \+ q\) \* 2", "q * 2", RACE),
    "all warps add at once": Fault("split", r"if \(turn == warp\)", "if (true)", RACE),
    "all lanes write a warp's top": Fault("split", r"if \(lane == 0\)", "if (true)", RACE),
    "mixes that all warps share": Fault("reduce", r"shared\[warp \* STRIDE \+ i", "shared[i", RACE),
    "all lanes write a warp's total": Fault("reduce", r"if \(lane == 0\)", "if (true)", RACE),
    "rows behind the last": Fault("split", r"i < row_count \* V::DIM && i < MIXES", "i < MIXES", BOUNDS),
    "shared memory that begins late": Fault("split", r"- WARPS \* QUERIES \* 2;", "- WARPS * QUERIES * 2 + 4;", BOUNDS),
    "the next block's page": Fault(
        "split", r"first_token / KV_PAGE_TOKENS\]", "first_token / KV_PAGE_TOKENS + 1]", BOUNDS
    ),
    "the next query": Fault("split", r"queries \+ first_query \*", "queries + (first_query + 1) *", BOUNDS),
    "scores of the next row": Fault("split", r"V::DIM \+ 1\] = sum", "V::DIM + 5000] = sum", BOUNDS),
    "the next sequence's length": Fault("split", r"lengths\[sequence\]", "lengths[sequence + 1]", BOUNDS),
    "a dimension too many": Fault("reduce", r"dim < DIM; dim \+=", "dim <= DIM; dim +=", BOUNDS),
    "a split too many": Fault("reduce", r"split <= to; split \+= 32", "split <= to + 1; split += 32", BOUNDS),
    "the next query's splits": Fault(
        "reduce", r"long\(kv_block_x\) \* partial_shape", "long(kv_block_x + 1) * partial_shape", BOUNDS
    ),
    "a table's next entry": Fault("append", r"place / KV_PAGE_TOKENS\]", "place / KV_PAGE_TOKENS + 1]", BOUNDS),
    "the next head's row": Fault(
        "append", r"KV_HEADS \+ head;\nconst int line", "KV_HEADS + head + 1;\nconst int line", BOUNDS
    ),
    "the next token's place": Fault("append", r"places\[token\]", "places[token + 1]", BOUNDS),
    "a row too many": Fault("gather", r"row >= count", "row > count", BOUNDS),
    "tokens of all rows": Fault("gather", r"stored\[0\]", "stored[count]", BOUNDS),
    "a span's third number": Fault("gather", r"span\[1\]", "span[2]", BOUNDS),
    "no barrier behind the warps' rows": _dropped("window", _BLOCK),
    "a warp's top that nobody writes": Fault(
        "window", r"shared\[warp \* STRIDE \+ V::DIM\] = mixed.top;", ";", UNWRITTEN
    ),
    "a row behind a window's last": Fault("window", r"other <= row;", "other <= row + 1;", BOUNDS),
    "the place of another slot's row": Fault("window", r"stored\[other\]", "stored[other + 3]", BOUNDS),
    "a split behind the last": Fault("window", r"split < splits;", "split <= splits;", f"{BOUNDS}|{UNWRITTEN}"),
    "the next target": Fault("store", r"targets\[page\]", "targets[page + 1]", BOUNDS),
    "a chunk too far": Fault("store", r"first_chunk \+ chunk\]", "first_chunk + chunk + content_chunks]", BOUNDS),
    "a query that is changed": Fault(
        "split", r"int worker = ", "((KV_GLOBAL Query*)queries)[0] = Query(0); int worker = ", READ_ONLY
    ),
    "a page that a reader writes": Fault(
        "gather", r"const long made = ", "((KV_GLOBAL kv_u16*)page)[0] = 0; const long made = ", READ_ONLY
    ),
    "a table that is changed": Fault(
        "append", r"const long source", "((KV_GLOBAL int*)block_table)[0] = 0; const long source", READ_ONLY
    ),
    "sums that nobody writes": Fault("split", r"query_sums\[i\] = sum;", ";", UNWRITTEN),
    "totals that nobody writes": Fault(
        "split", r"tops\[\(warp \* QUERIES \+ q\) \* 2 \+ 1\] = total\[q\];", ";", UNWRITTEN
    ),
    "weights that nobody writes": Fault("split", r"weights\[q \* 32 \+ lane\] = weight;", ";", UNWRITTEN),
    "a warp's total that nobody writes": Fault("reduce", r"shared\[warp \* STRIDE \+ DIM\] = total;", ";", UNWRITTEN),
    "no barrier before a tile's values": _dropped("tiles", _BLOCK),
    "no barrier behind a tile's values": _dropped("tiles", _BLOCK, 1),
    "a warp's barrier for a tile": Fault("tiles", r"threadgroup_barrier\(mem", "simdgroup_barrier(mem", RACE),
    "queries that all warps share": Fault("tiles", r"row = warp_row \+ \(m", "row = (m", RACE),
    "queries that begin late": Fault("tiles", r"v_values \+ TILE \* V::DIM;", "v_values + TILE * V::DIM + 16;", BOUNDS),
    "a row of tiles behind the last": Fault("tiles", r"if \(row >= row_count\) continue;", ";", BOUNDS),
    "a query that is not there": Fault("tiles", r"is_there && chunk", "chunk", BOUNDS),
    "a page behind the last tile": Fault("tiles", r"next < stop \? pages", "true ? pages", BOUNDS),
    # Only a page behind the pool's last lies out of bounds: `suffix` has the last.
    "biases of the next page": Fault("tiles", r"Rows::BIASES \+ group", "Rows::END + Rows::BIASES + group", BOUNDS),
    # With as many bits of both, a lane writes its own places twice, which is no race: results tell that one below.
    "keys and values of other widths in one place": Fault(
        "tiles", r"v_values = k_values \+ TILE \* K::DIM", "v_values = k_values", RACE, policy="k8v4"
    ),
    "keys that nobody writes": Fault("tiles", r"kv_decode_tile<K, TILE[^;]*;", ";", UNWRITTEN),
    "a barrier of the warps with queries": Fault(
        "tiles", r"kv_group_barrier\(\);", "if (warp_row < row_count) kv_group_barrier();", BARRIER, 1
    ),
    "a barrier of half a warp": Fault(
        "split", r"kv_group_barrier\(\);", "if (lane < 16) kv_group_barrier();", BARRIER, 1
    ),
    "a barrier of one warp": Fault("split", r"kv_group_barrier\(\);", "if (warp == 0) kv_group_barrier();", BARRIER, 2),
    "a warp that has left": Fault("split", r"int worker = ", "if (warp == 3) return; int worker = ", BARRIER),
    "a warp's barrier of its odd lanes": Fault(
        "split", r"kv_warp_barrier\(\);", "if (lane % 2) kv_warp_barrier();", BARRIER
    ),
    "a barrier in a warp's turn": Fault(
        "split", r"kv_group_barrier\(\);", "if (turn == warp) kv_group_barrier();", BARRIER, 3
    ),
    "a barrier of the lanes with a dimension": Fault(
        "reduce", r"kv_group_barrier\(\);", "if (warp * 32 + lane < DIM) kv_group_barrier();", BARRIER
    ),
}
# No access is wrong, but results are: most let a lane have other elements of a matrix than the kernel believes.
MISPLACED = {
    "rows of CUDA's lanes": Fault("tiles", r"return \(lane >> 2 & 4\) \| \(lane >> 1 & 3\);", "return lane / 4;", ""),
    "columns of CUDA's lanes": Fault("tiles", r"return \(lane >> 2 & 2\) \| \(lane & 1\);", "return lane % 4;", ""),
    "a row's lanes of CUDA": Fault("tiles", r"kv_shuffle_xor\(x, 8\)", "kv_shuffle_xor(x, 2)", ""),
    "keys that are not turned": Fault("tiles", r"kv_load_keys<K_ROW>", "kv_load_values<K_ROW>", ""),
    "halves of a step in the other order": Fault("tiles", r"i / 2 \* 8 \+ 2", "i % 2 * 8 + 2", ""),
    "keys and values in one place": Fault("tiles", r"v_values = k_values \+ TILE \* K::DIM", "v_values = k_values", ""),
    "scales in place of biases": Fault("tiles", r"Rows::BIASES \+ group", "Rows::SCALES + group", ""),
    "a product that forgets": Fault("tiles", r"left, right, sum\);", "left, right, left);", ""),
}


def suffix(policy: str = "q4") -> Scene:
    """Queries that fill a block of tiles in part, over three tiles, of which the last ends the pool's last page."""
    scene = Scene(_format(policy), (256,), 4, 12, mx.float16, window=70, seed=4)
    assert scene.block_table.item() == len(scene.pages) - 1
    return scene


def run(kernel: str, policy: str = "q4") -> None:
    """A small launch of a kernel by the compiler of Metal's dialect, whatever that is; a reduction is behind splits."""
    if kernel in ("split", "tiles", "reduce"):
        scene = suffix(policy) if kernel == "tiles" else Scene(_FORMAT, (300,), 4, 6)
        mx.eval(fused_attention(*scene.arguments(), TARGETS[Dialect.METAL]))
        return
    pages = mx.zeros((3, _FORMAT.units), mx.uint16)
    of_layer = LayerPages(pages, _FORMAT, mx.array([[2, 0]], mx.int32))
    rows, places = mx.random.normal((1, 2, 6, 64)), mx.array([[253, 254, 255, 256, 257, -1]], mx.int32)
    if kernel == "window":
        stored = mx.array([[258, 259, 0]], mx.int32)
        new, asked = mx.random.normal((3, 2, 1, 64)), mx.random.normal((3, 4, 1, 64))
        given = (new, new), stored, of_layer, mx.array([257], mx.int32)
        mx.eval(window_attention(asked, *given, 0.125, TARGETS[Dialect.METAL]))
    elif kernel == "append":
        mx.eval(append_rows(rows, rows, of_layer, mx.maximum(places, 256), Dialect.METAL))
    elif kernel == "gather":
        mx.eval(*gathered_values(of_layer, 250, 275, mx.array([258]), mx.float32, Dialect.METAL))
    else:
        targets, sources = mx.array([2], mx.int32), mx.array([0], mx.int32)
        mx.eval(store_pages(pages, targets, pages[:1], sources, range(1024), Dialect.METAL))

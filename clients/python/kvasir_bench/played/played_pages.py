"""What a played model writes into pages, and the reply that it reads out of them.

A token's rows hold a 32-bit *link*: a function of its own token and of the link before it, so of all tokens up to it.
Each layer and each place in a page hides it behind other bits, so that no two pages are alike and nothing compresses.
The link before is read from the page where it lies, and a reply's token is a function of one word of each block. So
a page that is missing, stale, another's or at another place changes the reply."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_svc.kv.page import PAGE_TOKENS, PageFormat
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV

Words = NDArray[np.uint32]
_ODD = 2654435761  # 2^32 divided by the golden ratio
_MASK = 0xFFFFFFFF
_SALT = 24
# Without the highest bits of two 16-bit exponents: a scale or bias that is not finite would be refused as damaged.
_FINITE = 0xBFFFBFFF
# Layers that a reply's token reads; from token to token others.
_LAYERS_READ = 4


def mixed(*values: int) -> int:
    """32 bits that depend on each bit of these numbers and on their order."""
    state = _SALT
    for value in values:
        state = ((state ^ value) * _ODD + 1) & _MASK
        state ^= state >> 15
    return state


class PlayedPages:
    """Rows of a played model in the pages of a pool, all of whose layers are alike. On the MLX thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        page_format = pool.formats[0]
        rows = _row_of_word(page_format)
        self._row_of_word = rows
        self._words_of_row = np.argsort(rows, kind="stable").reshape(PAGE_TOKENS, -1).astype(np.int64)
        self._kept = _kept_bits(page_format)
        self._salt: Words = np.random.default_rng(_SALT).integers(0, 1 << 32, rows.size, dtype=np.uint32)
        self._layer_salts = [np.uint32(mixed(layer)) for layer in range(len(pool.arrays))]

    def append(self, kv: SequenceKV, page_of: dict[int, int], token_ids: Sequence[int]) -> None:
        """Write the rows of the next tokens into private pages, by block. The sequence stays as it is. Evaluates."""
        links = self._links(self.link_before(kv), token_ids)
        start = kv.length
        for block, page in sorted(page_of.items()):
            first, stop = max(start, block * PAGE_TOKENS), min(start + len(token_ids), (block + 1) * PAGE_TOKENS)
            rows = np.zeros(PAGE_TOKENS, dtype=np.uint32)
            span = slice(first - block * PAGE_TOKENS, stop - block * PAGE_TOKENS)
            rows[span] = links[first - start : stop - start]
            self._write(page, rows, span)

    def append_row(self, pages: Sequence[int], sequences: Sequence[SequenceKV], token_ids: Sequence[int]) -> None:
        """Write one row for each sequence, behind its length, into its private page. Evaluates."""
        links = [self._links(self.link_before(kv), [token])[0] for kv, token in zip(sequences, token_ids, strict=True)]
        words = np.stack([self._words_of_row[kv.length % PAGE_TOKENS] for kv in sequences])
        content = self._salt[words] ^ np.array(links, dtype=np.uint32)[:, None]
        kept = self._kept[words]
        columns = mx.array(np.stack([2 * words, 2 * words + 1], axis=2).reshape(len(words), -1).astype(np.int32))
        targets = mx.array(list(pages), dtype=mx.int32)[:, None]
        for layer, salt in enumerate(self._layer_salts):
            self._pool.write_rows(layer, targets, columns, mx.array(((content ^ salt) & kept).view(np.uint16)))
        mx.eval(self._pool.arrays)

    def link_before(self, kv: SequenceKV) -> int:
        """The link of the sequence's last row, as a layer that the length chooses holds it; 0 if it has none."""
        if not kv.length:
            return 0
        block, row = divmod(kv.length - 1, PAGE_TOKENS)
        layer, word = kv.length % len(self._layer_salts), int(self._words_of_row[row][0])  # of codes
        [stored] = self._read(layer, [kv.tables[0].pages[block]], [word])
        return int(stored ^ self._salt[word] ^ self._layer_salts[layer])

    def reply(self, kv: SequenceKV) -> int:
        """32 bits that depend on the last row and on a word of each block, in layers that the length chooses."""
        table, length, blocks = kv.tables[0].pages, kv.length, blocks_of(kv.length)
        pages = [table[block] for block in range(blocks)]
        places, state = np.arange(1, blocks + 1, dtype=np.uint64), self.link_before(kv)
        for turn in range(_LAYERS_READ):
            layer = (length * _LAYERS_READ + turn) % len(self._layer_salts)
            found = self._read(layer, pages, list(self._sampled(length, blocks, layer)))
            # An odd factor for each place: blocks that changed places give another sum.
            state = mixed(state, int((found.astype(np.uint64) * (2 * places + 1)).sum()) & _MASK)
        return state

    def _sampled(self, length: int, blocks: int, layer: int) -> Iterator[int]:
        """A word of each block, in a row that the sequence has."""
        for block in range(blocks):
            rows = min(PAGE_TOKENS, length - block * PAGE_TOKENS)
            chance = mixed(length, block, layer)
            yield int(self._words_of_row[chance % rows][(chance >> 8) % self._words_of_row.shape[1]])

    def _read(self, layer: int, pages: Sequence[int], words: Sequence[int]) -> Words:
        """A word of each page. Evaluates."""
        at, low = mx.array(list(pages), dtype=mx.int32), mx.array(list(words), dtype=mx.int32) * 2
        units = mx.stack([self._pool.arrays[layer][at, low], self._pool.arrays[layer][at, low + 1]], axis=1)
        return np.array(units).view(np.uint32)[:, 0]

    def _write(self, page: int, links: Words, span: slice) -> None:
        """Rows `span` of a page in all layers; the others stay."""
        content = links[self._row_of_word] ^ self._salt
        is_whole = span == slice(0, PAGE_TOKENS)
        is_new = (self._row_of_word >= span.start) & (self._row_of_word < span.stop)
        for layer, salt in enumerate(self._layer_salts):
            words = (content ^ salt) & self._kept
            if not is_whole:
                before = np.array(self._pool.arrays[layer][page]).view(np.uint32)
                words = np.where(is_new, words, before)
            # A slice, not `write_pages`: indexes cost five times as much on a CPU.
            self._pool.arrays[layer][page : page + 1] = mx.array(words.view(np.uint16)[None])
        mx.eval(self._pool.arrays)

    @staticmethod
    def _links(link: int, token_ids: Sequence[int]) -> Words:
        links = []
        for token in token_ids:
            link = mixed(link, token)
            links.append(link)
        return np.array(links, dtype=np.uint32)


def _row_of_word(page_format: PageFormat) -> NDArray[np.int64]:
    """Of each 32-bit word of a page the row that it belongs to."""
    rows = np.arange(PAGE_TOKENS)
    return np.concatenate([np.tile(np.repeat(rows, part.units // 2), part.kv_heads) for part in page_format.parts])


def _kept_bits(page_format: PageFormat) -> Words:
    """Of each 32-bit word of a page the bits that may be set: all of codes, finite numbers elsewhere."""
    sizes = [(part.size // 2, _MASK if part.is_codes else _FINITE) for part in page_format.parts]
    return np.concatenate([np.full(size, bits, dtype=np.uint32) for size, bits in sizes])

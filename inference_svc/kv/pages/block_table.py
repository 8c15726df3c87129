"""One sequence's pages in one group of layers, by block index; of a window those that it touches, at the sequence's
length and at each length that it may go back to. Pure: pages are numbers here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from inference_svc.kv.page import PAGE_TOKENS


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens, the last one perhaps in part."""
    return -(-tokens // PAGE_TOKENS)


def window_start(window: int, length: int) -> int:
    """The first position that the token at position `length` sees; `window` 0: it sees all."""
    return max(0, length - window + 1) if window else 0


def needed_blocks(window: int, length: int) -> range:
    return range(window_start(window, length) // PAGE_TOKENS, blocks_of(length))


def most_window_blocks(window: int) -> int:
    return blocks_of(max(0, window - 2)) + 1


@dataclass
class BlockTable:
    """`pages` by block. Before `valid_from` they have what rewind points need. `window` 0: all tokens are kept."""

    window: int
    pages: dict[int, int] = field(default_factory=dict)
    valid_from: int = 0

    def can_go_on_from(self, length: int) -> bool:
        """Whether every row that the token at position `length` sees is here, be it a rewind point or not."""
        is_valid = window_start(self.window, length) >= self.valid_from
        return is_valid and all(block in self.pages for block in needed_blocks(self.window, length))

    def has_whole(self, block: int, points: Collection[int]) -> bool:
        """Whether every row of a block before the last one is here. `points`: the sequence's rewind points."""
        start, stop = block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS
        is_written = start >= self.valid_from or any(
            stop <= point and block in needed_blocks(self.window, point) for point in points
        )
        return is_written and block in self.pages

    def padded(self, width: int) -> list[int]:
        """The pages of blocks 0 to `width` - 1, as a kernel takes them; 0 for those that are missing."""
        return [self.pages.get(block, 0) for block in range(width)]

    def unneeded(self, lengths: Collection[int]) -> Iterator[int]:
        """Blocks that none of these lengths needs. Without a window: those behind the last length."""
        needed = {block for length in lengths for block in needed_blocks(self.window, length)}
        return (block for block in list(self.pages) if block not in needed)

    def copy(self) -> "BlockTable":
        return BlockTable(self.window, dict(self.pages), self.valid_from)

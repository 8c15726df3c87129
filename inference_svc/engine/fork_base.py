"""Which of a running turn's pages it took itself, and which it only shares with what it began from. Pure arithmetic."""

from dataclasses import dataclass

from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.sequence_kv import SequenceKV


@dataclass(frozen=True)
class ForkBase:
    """What a fork had when it was made.

    Full blocks of layers that keep all tokens are never written again: no page is ever taken for them. The other pages,
    tails and windows, become the turn's own once it has replaced them, or once nobody else holds them.
    """

    full_pages: int = 0
    others: tuple[tuple[int, int, int], ...] = ()  # (number of the table, block, page)

    @classmethod
    def of(cls, forked: SequenceKV) -> "ForkBase":
        full = forked.length // PAGE_TOKENS
        return cls(
            sum(min(full, len(table.pages)) for table in forked.tables if not table.window),
            tuple(
                (number, block, page)
                for number, table in enumerate(forked.tables)
                for block, page in table.pages.items()
                if table.window or block >= full
            ),
        )

    def taken_by(self, kv: SequenceKV) -> int:
        """Pages that a sequence with this base took, or inherited alone."""
        held = sum(len(table.pages) for table in kv.tables)
        shared = sum(
            kv.tables[number].pages.get(block) == page and kv.pool.allocator.holders(page) > 1
            for number, block, page in self.others
        )
        return held - self.full_pages - shared

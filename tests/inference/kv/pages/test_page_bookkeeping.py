"""Which pages are free and who holds the others: bookkeeping alone, without a tensor."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kvasir.errors import ResourceExhausted

from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import (
    BlockTable,
    blocks_of,
    most_window_blocks,
    needed_blocks,
    window_start,
)
from inference_svc.kv.pages.page_allocator import PageAllocator

TOTAL = 12
WINDOWS = st.sampled_from([0, 2, 8, 100, 256, 257, 258, 300, 1000])
LENGTHS = st.integers(0, 3000)


class Holders(RuleBasedStateMachine):
    """Tables that take, share and release pages, against a count of every page that every table holds."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(TOTAL)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, TOTAL + 2))
    def take(self, count: int) -> None:
        held = Counter(page for table in self.tables for page in table)
        if count > TOTAL - len(held):
            with pytest.raises(ResourceExhausted) as error:
                self.allocator.take(count)
            assert error.value.metadata == {"needed_pages": str(count), "free_pages": str(TOTAL - len(held))}
            return
        taken = self.allocator.take(count)
        assert len(set(taken)) == count
        assert not held.keys() & set(taken), "a page was given out twice"
        assert all(0 <= page < self.allocator.touched for page in taken)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.tables))
        shared = data.draw(st.lists(st.sampled_from(source), unique=True)) if source else []
        self.allocator.share(shared)
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Several at once free as many pages as was foretold."""
        numbers = data.draw(st.sets(st.sampled_from(range(len(self.tables))), min_size=1))
        leaving = [self.tables[number] for number in numbers]
        self.tables = [table for number, table in enumerate(self.tables) if number not in numbers]
        free, foretold = self.allocator.free, self.allocator.freed_by(leaving)
        assert self.allocator.free == free, "asking changes nothing"
        for table in leaving:
            self.allocator.release(table)
        assert self.allocator.free == free + foretold

    @invariant()
    def free_and_private_and_shared_pages_are_all_pages(self) -> None:
        held = Counter(page for table in self.tables for page in table)
        private = sum(count == 1 for count in held.values())
        assert {page: self.allocator.holders(page) for page in range(TOTAL)} == {p: held[p] for p in range(TOTAL)}
        assert self.allocator.shared == len(held) - private
        assert self.allocator.free + private + self.allocator.shared == self.allocator.total == TOTAL
        assert self.allocator.used == len(held) <= self.allocator.touched <= TOTAL

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.release(table)
        assert self.allocator.free == TOTAL


@pytest.mark.long(3)
def test_free_and_private_and_shared_pages_are_all_pages_whatever_tables_do() -> None:
    run_state_machine_as_test(Holders, settings=settings(max_examples=40, stateful_step_count=25))  # type: ignore[no-untyped-call]


def test_pages_that_were_used_before_are_given_out_first() -> None:
    allocator = PageAllocator(100)
    for count in (3, 5, 1, 5):
        allocator.release(allocator.take(count))
    assert allocator.touched == 5


def test_a_page_that_nobody_holds_can_neither_be_shared_nor_released() -> None:
    allocator = PageAllocator(3)
    [page] = allocator.take(1)
    allocator.release([page])
    for act in (allocator.share, allocator.release):
        with pytest.raises(KeyError):
            act([page])
    assert allocator.free == 3


@given(window=WINDOWS, length=LENGTHS)
def test_the_blocks_that_are_needed_hold_what_the_next_token_sees(window: int, length: int) -> None:
    seen = range(max(0, length + 1 - window) if window else 0, length)
    assert window_start(window, length) == seen.start
    assert set(needed_blocks(window, length)) >= {position // PAGE_TOKENS for position in seen}
    if seen:
        assert set(needed_blocks(window, length)) == {position // PAGE_TOKENS for position in seen}
    if window:
        assert len(needed_blocks(window, length)) <= most_window_blocks(window)


@given(window=WINDOWS.filter(bool))
def test_a_window_touches_no_fewer_blocks_than_is_reported(window: int) -> None:
    most = max(len(needed_blocks(window, length)) for length in range(window, window + 2 * PAGE_TOKENS))
    assert most == most_window_blocks(window)


@given(window=WINDOWS, lengths=st.lists(LENGTHS, min_size=1, max_size=4), blocks=st.sets(st.integers(0, 13)))
def test_what_a_table_does_not_need_no_length_touches(window: int, lengths: list[int], blocks: set[int]) -> None:
    table = BlockTable(window, {block: 100 + block for block in blocks})
    could = [length for length in lengths if table.can_go_on_from(length)]
    for block in list(table.unneeded(lengths)):
        del table.pages[block]
    needed = {block for length in lengths for block in needed_blocks(window, length)}
    assert table.pages == {block: 100 + block for block in blocks & needed}
    assert [length for length in lengths if table.can_go_on_from(length)] == could
    assert could == [length for length in lengths if set(needed_blocks(window, length)) <= blocks]


@given(blocks=st.sets(st.integers(0, 20)), width=st.integers(0, 25))
def test_a_padded_table_has_a_page_for_each_block_and_0_where_there_is_none(blocks: set[int], width: int) -> None:
    table = BlockTable(100, {block: 50 + block for block in blocks})
    assert table.padded(width) == [50 + block if block in blocks else 0 for block in range(width)]


@given(tokens=LENGTHS)
def test_blocks_hold_all_tokens_and_none_is_empty(tokens: int) -> None:
    assert (blocks_of(tokens) - 1) * PAGE_TOKENS < tokens <= blocks_of(tokens) * PAGE_TOKENS or tokens == 0
    assert blocks_of(0) == 0


def test_a_copy_of_a_table_goes_its_own_way() -> None:
    table = BlockTable(100, {1: 5}, valid_from=300)
    copied = table.copy()
    assert copied == table
    copied.pages[2] = 6
    copied.valid_from = 0
    assert table == BlockTable(100, {1: 5}, valid_from=300)

"""The pool: all KV of one model, in pages that sequences share by number. For each layer of a group there is one array
of pages, and a page number means the same block in all of them. On a CPU a write makes a new array, as Python sees it.
MLX reuses the old array's memory if nothing else refers to it; otherwise it copies the whole array. So nobody may keep
a reference to `arrays` during a write: arrays computed from them are evaluated or dropped before. On a GPU kernels
write where the pages lie (`attention/in_place`). The arrays grow with use and are given back: both copy the pages in
use, between two passes. Lives on the MLX thread.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import zip_longest

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import ResourceExhausted
from kvasir.waits import RETRY_S

from inference_svc.kv.attention.in_place import store_pages
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.host_copies import failed_copies
from inference_svc.kv.host_copies.host_copy import Run, device_addresses, takes_out
from inference_svc.kv.host_numbers import HostNumbers
from inference_svc.kv.page import UNIT_BYTES, PageFormat
from inference_svc.kv.pages.block_table import blocks_of, most_window_blocks
from inference_svc.kv.pages.groups import groups_of
from inference_svc.kv.pages.page_allocator import PageAllocator
from inference_svc.kv.pages.page_rows import UNIT
from inference_svc.kv.tensor_files import exponents

_FIRST_PAGES, IDLE_BYTES = 8, 64 << 20  # of a pool that grows, the smaller of both
_DOUBLES_BELOW = 1 << 30  # a larger pool grows by a quarter: on a Mac its memory is wired
_WINDOW_PLACES = 3  # A window's pages are kept at the sequence's end and at two lengths that it may go back to


class KvPool:
    """Pages of `identity`'s layout and policy, at most `budget_bytes` of them, and not less than one. `is_allocated`:
    take the memory now, and keep it; else it grows with use. `dialect`: of the kernels that write pages where they lie;
    None: MLX's own operations write them. Raises InvalidArgument for a policy that this engine cannot do.
    """

    def __init__(
        self,
        identity: identity_pb2.KvIdentity,
        budget_bytes: int,
        *,
        is_allocated: bool = False,
        dialect: Dialect | None = None,
    ) -> None:
        self.identity = identity
        self.dialect = dialect
        self.numbers = HostNumbers(is_reused=dialect is Dialect.CUDA)
        self._written: list[mx.array] = []  # by kernels, and not evaluated yet
        self._order = self._enqueued_order = _nothing() if dialect is Dialect.METAL else ()
        self._readers: list[tuple[frozenset[int], Future[None]]] = []  # copies under way, of these pages
        self.groups = groups_of(identity.layers)
        self.formats = {index: PageFormat.of(identity, index) for group in self.groups for index in group.layers}
        self.codecs = {index: layer_codecs(identity.policy, index) for index in self.formats}
        columns = zip_longest(*(group.layers for group in self.groups))
        self._units = [max(self.formats[layer].units for layer in slot if layer is not None) for slot in columns]
        self.page_bytes = sum(self._units) * UNIT_BYTES
        self.allocator = PageAllocator(max(1, budget_bytes // self.page_bytes) if self._units else 0)
        first_pages = max(1, min(_FIRST_PAGES, IDLE_BYTES // self.page_bytes)) if self._units else 0
        self._first_pages = self.allocator.total if is_allocated else min(first_pages, self.allocator.total)
        self.arrays = [mx.zeros((self._first_pages, units), dtype=UNIT) for units in self._units]
        mx.eval(self.arrays)
        self._is_copied_by_threads = dialect is not None and takes_out()
        self._addresses: list[int] = []
        self._exponents: dict[int, mx.array] = {}
        self._written_pages: list[int] = []
        self._places = mx.array([], dtype=mx.int32), mx.array([], dtype=mx.int32)
        self._place = {
            layer: (number, slot) for number, group in enumerate(self.groups) for slot, layer in enumerate(group.layers)
        }

    def __del__(self) -> None:
        wait([reader for _, reader in getattr(self, "_readers", ())])

    def close(self) -> None:
        """Free the memory of all pages: nobody reads or writes one any more."""
        wait([reader for _, reader in self._readers])
        self._written.clear()
        self._exponents.clear()
        self.numbers.forget()
        self.arrays.clear()

    def pages_for(self, tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds, with the window pages of its rewind points."""
        blocks = blocks_of(tokens)
        return sum(
            min(blocks, _WINDOW_PLACES * most_window_blocks(group.window)) if group.window else blocks
            for group in self.groups
        )

    @property
    def pages_in_memory(self) -> int:
        """Pages that the arrays have room for: of the least, should the device have refused the rest."""
        return min((array.shape[0] for array in self.arrays), default=0)

    def exponents(self, group: int) -> mx.array:
        """`tensor_files.exponents` of a group of layers, on the device: as large as a page, so brought there once."""
        if group not in self._exponents:
            self._exponents[group] = mx.array(exponents(self.identity, group))
            mx.eval(self._exponents[group])
        return self._exponents[group]

    def group_number(self, layer: int) -> int:
        return self._place[layer][0]

    def slot_of(self, layer: int) -> int:
        return self._place[layer][1]

    def take(self, count: int) -> list[int]:
        """Free pages, of undefined content. Raises ResourceExhausted, and takes none, if pool or device has no room."""
        taken = self.allocator.take(count)
        self._await_readers(taken)
        if self.arrays and self.allocator.touched > self.pages_in_memory:
            try:
                self._resize(self._next_size(self.allocator.touched))
            except RuntimeError as error:
                self.allocator.release(taken)
                self.allocator.forget_free_end()  # it has no memory, so pages in front of it are given out first
                raise ResourceExhausted(
                    f"KV memory: the device has no room for {count} more pages: {error}",
                    reason="MEMORY_BUSY",
                    retry_after_s=RETRY_S,
                ) from error
        return taken

    def private_pages(self, held: Sequence[int | None]) -> list[int]:
        """Pages that may be written in place of `held`, the pages of some tables (None: the table has none): those that
        nobody else holds, and new ones, with the content of a shared one. Of two tables that share a page, the second
        keeps it. Raises ResourceExhausted, and has changed nothing, if the pool has no room.
        """
        pages, new = [page for page in held if page is not None and self.allocator.holders(page) == 1], list[int]()
        if len(pages) < len(held):  # in few steps
            holders = {page: self.allocator.holders(page) for page in held if page is not None}
            is_own = []
            for page in held:
                is_own.append(page is not None and holders[page] == 1)
                if page is not None:
                    holders[page] -= 1
            new = [] if all(is_own) else self.take(is_own.count(False))
            rest = iter(new)
            pages = [page if page is not None and own else next(rest) for page, own in zip(held, is_own, strict=True)]
        self._await_readers(pages)
        if not new and pages == held:
            return pages
        copied = [(old, page) for old, page in zip(held, pages, strict=True) if old is not None and old != page]
        try:
            self.copy_pages([old for old, _ in copied], [page for _, page in copied])
        except BaseException:
            self.forget_writes()  # pages that are free again may be another's when they would be written
            self.release(new)
            raise
        return pages

    def pages_of(self, layer: int, pages: Sequence[int]) -> mx.array:
        """One layer's pages [n, units], a copy."""
        if self._order:
            mx.eval(self._order)  # MLX's own read would not wait for the kernels' writes
        array = self.arrays[self.slot_of(layer)][mx.array(list(pages), dtype=mx.int32)]
        units = self.formats[layer].units
        return array if array.shape[1] == units else array[:, :units]

    @property
    def is_copied_by_threads(self) -> bool:
        """Whether threads copy pages to the host. From any thread."""
        return self._is_copied_by_threads and not failed_copies.out.is_refused

    def run_of(self, layer: int, page: int) -> Run:
        self._addresses = self._addresses or device_addresses(self.arrays)
        slot = self.slot_of(layer)
        return self._addresses[slot] + page * self._units[slot] * UNIT_BYTES, self.formats[layer].bytes

    def read_by(self, reader: "Future[None]", pages: Collection[int]) -> None:
        """Let nobody write these pages before a reader on another thread is done."""
        self._readers.append((frozenset(pages), reader))

    def _await_readers(self, pages: Collection[int]) -> None:
        """Wait until these pages may be written: milliseconds, and rarely, as who copies a memory keeps its pages."""
        if self._readers:
            self._readers = [(read, reader) for read, reader in self._readers if not reader.done()]
            wait([reader for read, reader in self._readers if not read.isdisjoint(pages)])

    def write_pages(self, layer: int, pages: Sequence[int], content: mx.array, first_unit: int = 0) -> None:
        """Write one layer's pages, which must be private: units [n, any] of `content` from column `first_unit` on."""
        slot, units, (targets, rows) = self.slot_of(layer), self.formats[layer].units, self._places_of(pages)
        if self.dialect is not None:
            array, columns = self.arrays[slot], range(first_unit, first_unit + units)
            self._wrote(store_pages(array, targets, content, rows, columns, self.dialect, self._order))
            return
        if content.shape[1] != units:
            content = content[:, first_unit : first_unit + units]
        if units == self._units[slot]:
            self.arrays[slot][targets] = content
        else:
            self.arrays[slot][targets, :units] = content

    def _places_of(self, pages: Sequence[int]) -> tuple[mx.array, mx.array]:
        """These pages, and their places in the list, on the device. All layers of a piece have the same ones, and each
        array that MLX makes of numbers costs a GPU a fault of a page.
        """
        if self._written_pages != [*pages]:
            self._written_pages = [*pages]
            self._places = mx.array(self._written_pages, dtype=mx.int32), mx.arange(len(pages), dtype=mx.int32)
        return self._places

    def write_rows(self, layer: int, pages: mx.array, columns: mx.array, rows: mx.array) -> None:
        """Write units [n, m] of one layer's rows at columns [n, m] of pages [n, m] or [n, 1], which must be private."""
        self.arrays[self.slot_of(layer)][pages, columns] = rows

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages in all arrays; the targets must be private."""
        if sources:
            source, target = (mx.array(list(pages), dtype=mx.int32) for pages in (sources, targets))
            if self.dialect is None:
                copies = [array[source] for array in self.arrays]
                mx.eval(copies)  # a read that is not over would hold the array
                for array, pages in zip(self.arrays, copies, strict=True):
                    array[target] = pages
                return
            for array in self.arrays:
                units, order = range(array.shape[1]), self._order
                self._wrote(store_pages(array, target, array, source, units, self.dialect, order))
            self.evaluate()  # rows that follow in these pages do not wait for the copy by themselves

    @property
    def order(self) -> tuple[mx.array, ...]:
        """On Metal, the array that each write must take, and so each pass: it is there once no kernel that was enqueued
        before uses a page. Elsewhere a device's stream keeps that order, and this is empty.
        """
        return self._order

    def enqueue_behind(self, result: mx.array) -> None:
        """Writes that follow wait for a pass, of which this is a result that all its kernels lead to."""
        if self._order:
            self._order = self._enqueued_order = (result.reshape(-1)[:1].astype(mx.int32),)

    def forget_failed_pass(self) -> None:
        """Nothing waits for a pass that failed, but for all that was enqueued."""
        if self._order:
            mx.synchronize()
            self._order = self._enqueued_order = _nothing()

    def _wrote(self, write: mx.array) -> None:
        self._written.append(write)
        self._order = (write,) if self._order else ()

    def evaluate(self) -> None:
        mx.eval(self.arrays, self._written)
        self._written.clear()
        self._enqueued_order = self._order

    def begin_writes(self) -> list[mx.array]:
        """Enqueue all writes of kernels; returns arrays that are there after them. Waits where no kernels write."""
        if self.dialect is None:
            self.evaluate()
        begun, self._written = self._written, []
        mx.async_eval(begun)  # type: ignore[no-untyped-call]
        self._enqueued_order = self._order
        return begun

    def forget_writes(self) -> None:
        """Writes of kernels that were not evaluated will not happen."""
        self._written.clear()
        self._order = self._enqueued_order

    def release(self, pages: Iterable[int]) -> None:
        self.allocator.release(pages)

    @property
    def keeps_memory(self) -> bool:
        """Whether it has all of its memory from the start, and gives none back."""
        return self._first_pages == self.allocator.total

    @property
    def needed_bytes(self) -> int:
        """Of the pages up to the last one in use, which `give_back` leaves."""
        return self.allocator.end_without(()) * self.page_bytes

    def give_back(self) -> int:
        """Free the memory behind the last page in use, if that is a quarter of all; returns its bytes."""
        _clear_cache()
        before = self.pages_in_memory
        pages = max(self._first_pages, self.allocator.end_without(()))
        if before - pages < max(1, before // 4):
            return 0
        self.allocator.forget_free_end()
        self._resize(pages)
        return (before - pages) * self.page_bytes

    def _next_size(self, needed: int) -> int:
        have = self.pages_in_memory
        more = have if have * self.page_bytes < _DOUBLES_BELOW else have // 4
        return min(self.allocator.total, max(needed, have + more))

    def _resize(self, pages: int) -> None:
        """Have so many pages in each array, with their content. Array by array, so that only one is there twice."""
        self.evaluate()
        mx.synchronize()  # kernels that are under way write to the old arrays, and MLX does not know it
        wait([reader for _, reader in self._readers])
        self._addresses = []
        for slot, units in enumerate(self._units):
            made, kept = mx.zeros((pages, units), dtype=UNIT), min(pages, self.arrays[slot].shape[0])
            made[:kept] = self.arrays[slot][:kept]
            mx.eval(made)
            self.arrays[slot] = made
            _clear_cache()  # MLX would keep the old array for another of its size


def _clear_cache() -> None:
    """A pass holds what it read until a thread of MLX has heard of its end: a moment after `eval`, on a GPU."""
    mx.synchronize()
    mx.clear_cache()


def _nothing() -> tuple[mx.array, ...]:
    made = mx.zeros(1, dtype=mx.int32)
    mx.eval(made)
    return (made,)

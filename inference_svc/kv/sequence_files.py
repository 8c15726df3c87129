"""Makes tensor files from a sequence's KV: pages become blocks byte for byte, tails are cut. `KvLoad` reverses it."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, groupby, pairwise
from threading import Lock

import mlx.core as mx
import numpy as np
from kvasir.cachestore.v1 import identity_pb2
from kvasir.clients.blob_memory import BlobMemory
from kvasir.formats.block_file import FileBytes, FileIdentity, encode, header_with
from kvasir.formats.layer_groups import layers_of
from kvasir.formats.tensor_layouts import expected_state_tensors

from inference_svc.kv.host_copies import failed_copies
from inference_svc.kv.host_copies.host_copy import Run, begin_out, copy_out, to_host
from inference_svc.kv.page import PAGE_TOKENS, UNIT_BYTES, PageFormat
from inference_svc.kv.pages.block_table import blocks_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import Array, schema_of

_MOST_PAGES = 32  # that leave the device at once, where no threads copy them
# Tails, and pages out of which they are cut: into new memory 3.4 MB of rows are cut in 3 to 4 ms, into kept in 1.2.
_KEPT_BYTES, _ROUND_BYTES = 64 << 20, 64 << 10
_MOST_TAIL_PARTS, _TAIL_PART_BYTES = 4, 2 << 20
_memory = BlobMemory(_KEPT_BYTES, lambda size_bytes: np.empty(size_bytes, np.uint8).data)


def files_of(kv: SequenceKV, identities: Sequence[FileIdentity]) -> list[FileBytes]:
    """The tensor files of blocks, tails or states that the identities name. Raises ValueError for a missing one."""
    for _ in range(failed_copies.MOST_FAILURES):
        before = failed_copies.out.in_a_row
        files = begin_files(kv, identities)
        failed = [error for file in files if (error := file.exception()) is not None]  # waits for all of them
        if not failed:
            break
        failed_copies.out.failed(failed[0], before)
    else:
        files = begin_files(kv, identities)
    return [file.result() for file in files]


def begin_files(kv: SequenceKV, identities: Sequence[FileIdentity]) -> "list[Future[FileBytes]]":
    """As `files_of`; where threads copy pages, rows are on their way, whatever becomes of the sequence."""
    files: list[Future[FileBytes]] = []
    for (is_state, group), found in groupby(identities, lambda each: (each.kind == "state", each.window)):
        some = list(found)
        if is_state:
            files += _there(_state_file(kv, each) for each in some)
        else:
            _check_rows(kv, group, some)
            begun = kv.pool.is_copied_by_threads
            files += _begun_rows(kv, group, some) if begun else _there(_row_files(kv, group, some))
    return files


def _there(files: Iterable[FileBytes]) -> "Iterator[Future[FileBytes]]":
    for data in files:
        there: Future[FileBytes] = Future()
        there.set_result(data)
        yield there


def first_whole_block(kv: SequenceKV, window: int) -> int:
    """The first of the blocks that the layers of a window still hold whole, without a gap up to the sequence's end."""
    first = 0
    for table in kv.tables:
        if table.window == window:
            block = blocks_of(kv.length)
            while block and block - 1 in table.pages and (block - 1) * PAGE_TOKENS >= table.valid_from:
                block -= 1
            first = max(first, block)
    return first


def whole_blocks(kv: SequenceKV, window: int) -> list[int]:
    """The full blocks of which a window's layers hold all rows, ascending: the last, and those of rewind points."""
    tables = [table for table in kv.tables if table.window == window]
    full = range(kv.length // PAGE_TOKENS)
    return [block for block in full if all(table.has_whole(block, kv.rewind_points) for table in tables)]


def _check_rows(kv: SequenceKV, group: int, identities: Sequence[FileIdentity]) -> None:
    layers = layers_of(kv.pool.identity, group)
    for identity in identities:
        block = identity.start // PAGE_TOKENS
        is_here = all(block in kv.table_of(layer).pages for layer in layers)
        if identity.start + identity.tokens > kv.length or not is_here:
            raise ValueError(f"rows: expected at most {kv.length}, of a window the last, asked for {identity}")


def _row_files(kv: SequenceKV, group: int, identities: Sequence[FileIdentity]) -> Iterator[FileBytes]:
    pool, layers = kv.pool, layers_of(kv.pool.identity, group)
    formats = [pool.formats[layer] for layer in layers]
    entries = schema_of(pool.identity, PAGE_TOKENS, group).entries
    for first in range(0, len(identities), _MOST_PAGES):
        some = identities[first : first + _MOST_PAGES]
        blocks = [identity.start // PAGE_TOKENS for identity in some]
        pages = [pool.pages_of(layer, [kv.table_of(layer).pages[block] for block in blocks]) for layer in layers]
        for identity, page in zip(some, to_host(mx.concatenate(pages, axis=1)), strict=True):
            if identity.tokens == PAGE_TOKENS:
                yield b"".join((header_with(identity, entries), memoryview(page)))  # copied once
            else:
                yield _tail_file(pool.identity, identity, formats, page)


def _begun_rows(kv: SequenceKV, group: int, identities: Sequence[FileIdentity]) -> "Iterator[Future[FileBytes]]":
    pool, layers = kv.pool, layers_of(kv.pool.identity, group)
    formats = [pool.formats[layer] for layer in layers]
    mx.synchronize()  # no page is written by work that was enqueued before
    for identity in identities:
        block = identity.start // PAGE_TOKENS
        pages = [kv.table_of(layer).pages[block] for layer in layers]
        runs = [pool.run_of(layer, page) for layer, page in zip(layers, pages, strict=True)]
        if identity.tokens < PAGE_TOKENS:
            file = _TailCopy(pool.identity, identity, formats, runs).begun()
        else:
            file = begin_out(partial(_copied_block, pool.identity, identity, runs))
        copied: Future[None] = Future()  # which does not hold the file
        file.add_done_callback(partial(_note, copied))
        pool.read_by(copied, set(pages))
        yield file


def _note(copied: "Future[None]", _file: object) -> None:
    copied.set_result(None)


def _copied_block(layout: identity_pb2.KvIdentity, identity: FileIdentity, runs: Sequence[Run]) -> FileBytes:
    header = header_with(identity, schema_of(layout, PAGE_TOKENS, identity.window).entries)
    data = np.empty(len(header) + sum(size for _, size in runs), np.uint8).data
    data[: len(header)] = header
    copy_out(runs, data[len(header) :])
    failed_copies.out.arrived()
    return data.toreadonly()


class _TailCopy:
    """A tail, which its turn's end waits for: several threads copy and cut some layers' pages each."""

    def __init__(
        self,
        layout: identity_pb2.KvIdentity,
        identity: FileIdentity,
        formats: Sequence[PageFormat],
        runs: Sequence[Run],
    ) -> None:
        self._layout, self._identity = layout, identity
        parts = max(1, min(_MOST_TAIL_PARTS, sum(size for _, size in runs) // _TAIL_PART_BYTES, len(runs)))
        edges = [len(runs) * part // parts for part in range(parts + 1)]
        self._parts = [(formats[first:end], runs[first:end]) for first, end in pairwise(edges)]
        self._units = [0, *accumulate(sum(each.units for each in some) for some, _ in self._parts)]
        self._lock = Lock()
        self._left = parts
        self._failure: BaseException | None = None

    def begun(self) -> "Future[FileBytes]":
        file: Future[FileBytes] = Future()
        # Its header takes a thread as long as a part does, and the parts are copied meanwhile.
        self._made = begin_out(partial(_new_tail, self._layout, self._identity, self._units[-1]))
        for part in range(len(self._parts)):
            begin_out(partial(self._copy, part)).add_done_callback(partial(self._ended, file))
        return file

    def _copy(self, part: int) -> None:
        formats, runs = self._parts[part]
        page = _memory.take(sum(size for _, size in runs))
        copy_out(runs, page)
        rows = self._made.result()[1][self._units[part] * self._identity.tokens // PAGE_TOKENS :]
        _cut_layers(formats, self._identity.tokens, np.frombuffer(page, np.uint16), rows)

    def _ended(self, file: "Future[FileBytes]", copied: "Future[None]") -> None:
        """The file is there, or has failed, once no thread reads its pages."""
        with self._lock:
            self._left -= 1
            self._failure = self._failure or copied.exception()
            if self._left:
                return
        if self._failure is not None:
            file.set_exception(self._failure)
        else:
            failed_copies.out.arrived()
            file.set_result(self._made.result()[0].data.toreadonly())


def _tail_file(
    layout: identity_pb2.KvIdentity, identity: FileIdentity, formats: Sequence[PageFormat], page: Array
) -> FileBytes:
    data, rows = _new_tail(layout, identity, page.size)
    _cut_layers(formats, identity.tokens, page, rows)
    return data.data.toreadonly()


def _new_tail(layout: identity_pb2.KvIdentity, identity: FileIdentity, page_units: int) -> tuple[Array, Array]:
    """Memory for a tail, with its header, and the part of it where rows go."""
    schema = schema_of(layout, identity.tokens, identity.window)
    header = header_with(identity, schema.entries)
    # As much as for a whole page: so the memory of each tail fits the next one, of any length.
    room_bytes = -(-(len(header) + page_units * UNIT_BYTES) // _ROUND_BYTES) * _ROUND_BYTES
    data = np.frombuffer(_memory.take(room_bytes), np.uint8)[: len(header) + schema.layout.size_bytes]
    data[: len(header)] = np.frombuffer(header, np.uint8)
    return data, data[len(header) :].view(np.uint16)


def _cut_layers(formats: Sequence[PageFormat], rows: int, page: Array, left: Array) -> None:
    for page_format, same in groupby(formats):
        # Layers of one format at once: to begin a copy for each takes longer than the copies.
        layers = len(list(same))
        tensors, page = np.split(page, [layers * page_format.units])
        file, left = np.split(left, [layers * page_format.units * rows // PAGE_TOKENS])
        _cut_rows(page_format, rows, tensors.reshape(layers, -1), file.reshape(layers, -1))


def _cut_rows(page_format: PageFormat, rows: int, pages: Array, files: Array) -> None:
    """Copy the first rows of each layer's page, [layers, units], to where a tail has them."""
    layers, offset = len(pages), 0
    for part in page_format.parts:
        page = pages[:, part.offset : part.offset + part.size]
        file = files[:, offset : offset + part.kv_heads * rows * part.units]
        of_page = page.reshape(layers, part.kv_heads, PAGE_TOKENS, part.units)
        file.reshape(layers, part.kv_heads, rows, part.units)[:] = of_page[:, :, :rows]
        offset += part.kv_heads * rows * part.units


def _state_file(kv: SequenceKV, identity: FileIdentity) -> bytes:
    tensors = [data for state in kv.point_at(identity.tokens).states for data in state.to_bytes()]
    return encode(identity, list(zip(expected_state_tensors(kv.pool.identity), tensors, strict=True)))

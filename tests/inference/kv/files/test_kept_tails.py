"""The memory of a tail's file is used again once nobody has the file, and not before."""

import gc

import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.clients.blob_memory import BlobMemory
from kvasir.formats.block_file import FileIdentity, parse_header

from inference_svc.kv import sequence_files
from inference_svc.kv.pages.pool import KvPool

LAYER = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=8, key_dim=128, value_dim=128)
POLICY = identity_pb2.KvPolicy(
    key_bits=4,
    value_bits=4,
    group_size=64,
    scale_type=identity_pb2.SCALE_TYPE_BFLOAT16,
    key_rotation=identity_pb2.KEY_ROTATION_NONE,
)
LAYOUT = identity_pb2.KvIdentity(weights_digest="ab" * 32, layers=[LAYER] * 4, policy=POLICY)
POOL = KvPool(LAYOUT, 1 << 20, is_allocated=False)
FORMATS = [POOL.formats[layer] for layer in range(4)]
UNITS = sum(each.units for each in FORMATS)


def tail(rows: int, value: int) -> memoryview:
    identity = FileIdentity("tail", "cd" * 32, 0, rows, "ef" * 32)
    page = np.full(UNITS, value, np.uint16)
    return sequence_files._tail_file(LAYOUT, identity, FORMATS, page)  # type: ignore[return-value]


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def rows_of(data: memoryview) -> set[int]:
    return set(np.frombuffer(data, np.uint16, offset=parse_header(data, len(data)).data_offset).tolist())


@pytest.mark.parametrize("kept_pages", [4, 0])
def test_tails_of_any_length_have_the_memory_of_those_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, kept_pages: int
) -> None:
    page_bytes = 2 * UNITS
    assert page_bytes >= 1 << 20, "smaller memory is new each time"
    kept_bytes = kept_pages * 2 * page_bytes
    memory = BlobMemory(kept_bytes, lambda size_bytes: np.empty(size_bytes, np.uint8).data)
    monkeypatch.setattr(sequence_files, "_memory", memory)
    held = {value: tail(rows, value) for value, rows in enumerate((1, 200, 93), 1)}
    assert {value: rows_of(data) for value, data in held.items()} == {1: {1}, 2: {2}, 3: {3}}
    places = {address(data) for data in held.values()}
    part = held[2][:100]
    bytes_of_part = bytes(part)
    held.clear()
    gc.collect()
    again = [tail(rows, 9) for rows in (255, 7)]
    assert [rows_of(data) for data in again] == [{9}, {9}]
    assert bytes(part) == bytes_of_part, "a part of it is still read"
    assert not kept_pages or {address(data) for data in again} < places

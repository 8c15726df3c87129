"""How many rows a sequence's buffers have: arithmetic that admission needs before anything is allocated."""

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import layer_tensors, recurrent_tensors

STEP_ROWS = 256
WINDOW_SPARE_ROWS = 128


def capacity_rows(rows: int) -> int:
    """Rows of a buffer that must hold `rows`: whole steps, and from 8,192 rows on a 32nd in reserve.

    Growing copies the buffer, so long buffers grow in longer steps. The reserve costs less than 16-bit scales save.
    """
    return _whole_steps(rows) + (rows // 32) // STEP_ROWS * STEP_ROWS


def window_capacity_rows(kept: int, coming: int) -> int:
    """Rows of a window's buffer that keeps `kept` rows and takes `coming` more, with a reserve before the next move."""
    return capacity_rows(kept + coming + WINDOW_SPARE_ROWS)


def live_state_bytes(identity: identity_pb2.KvIdentity, cell_tokens: int) -> int:
    """The most bytes that the layers which do not keep all tokens hold while one sequence runs."""
    size_bytes = 0
    for index, layer in enumerate(identity.layers):
        if layer.kind == identity_pb2.LAYER_KIND_WINDOW:
            rows = window_capacity_rows(layer.window - 1, cell_tokens)
            size_bytes += sum(tensor.size_bytes for tensor in layer_tensors(identity, index, rows))
        elif layer.kind == identity_pb2.LAYER_KIND_STATE:
            size_bytes += sum(tensor.size_bytes for tensor in recurrent_tensors(layer, index))
    return size_bytes


def _whole_steps(rows: int) -> int:
    return -(-rows // STEP_ROWS) * STEP_ROWS

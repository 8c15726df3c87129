"""Cells of a length on any device, for tests whose lengths are chosen for them.

A device has cells of its own size (`model.cell_tokens`): a quarter of a block on a CPU, more than a block on a GPU.
Tests that count cells are marked `cells_of_a_block`, and their engines are opened here. All other tests run with the
device's own cells.
"""

import contextlib
from collections.abc import Iterator

from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.model import open_model
from inference_svc.model.loading import device


@contextlib.contextmanager
def cells_of(blocks: int) -> Iterator[None]:
    """Engines that are opened within have cells of so many blocks."""
    own = dict(open_model._CELL_TOKENS)
    open_model._CELL_TOKENS.update(dict.fromkeys(own, blocks * BLOCK_TOKENS))
    try:
        yield
    finally:
        open_model._CELL_TOKENS.update(own)


def cells_of_new_engines() -> int:
    """Tokens of a cell of an engine that is opened now."""
    return open_model._CELL_TOKENS[device()]

"""Takes copies of a memory's KV for the store in small pieces, within one limit that namespaces share."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TypeAlias, TypeVar

from kvasir import errors
from kvasir.formats.block_file import FileBytes
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import keeps_all_tokens
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot, WindowFiles
from inference_svc.engine.engine import Engine
from inference_svc.engine.pinned_memory import PinnedMemory
from inference_svc.memory.agent_memory import StoredFiles
from inference_svc.memory.stored_windows import StoredWindow

_PIECE_BYTES = 16 << 20
# Where threads copy. A cell of 2,048 tokens of Llama 3.1 8B has as many, and a copy is requested between two cells.
_PIECE_BYTES_OF_THREADS = 72 << 20

# The more of them hammer at a store that is late, the later it is, for new turns too.
_AGAIN = 8

T = TypeVar("T")
Pinning: TypeAlias = Future[PinnedMemory | None]


def piece_blocks(engine: Engine) -> int:
    """Blocks in one copy, so that making it takes the MLX thread milliseconds."""
    most_bytes = _PIECE_BYTES_OF_THREADS if engine.memories.is_copied_by_threads else _PIECE_BYTES
    return max(1, most_bytes // (max(1, engine.model.kv_bytes_per_token) * BLOCK_TOKENS))


def files_of(snapshot: Snapshot) -> list[FileBytes]:
    """Tensor files in the order of a manifest: blocks, the tail, each window's blocks and tail, states."""
    parts: tuple[Snapshot | WindowFiles, ...] = (snapshot, *snapshot.windows)
    rows = [each for part in parts for each in (*part.blocks, part.tail) if each is not None]
    return [data for _, data in (*rows, *snapshot.states)]


def stored_files(
    snapshot: Snapshot, digests: Sequence[Digest], before: Sequence[Digest], known: StoredFiles
) -> StoredFiles:
    """All files of a memory: the snapshot's have `digests`, in the order of `files_of`, blocks `before` it theirs."""
    rest = iter(digests)
    blocks = [*before[: snapshot.first_block], *islice(rest, len(snapshot.blocks))]
    tail = next(rest) if snapshot.tail is not None else None
    windows = {}
    for part in snapshot.windows:
        files = known.windows.get(part.window, StoredWindow()).files
        sent = {block: next(rest) for block in part.by_block}
        held = {block: files[block] for block in part.held if block not in sent}
        windows[part.window] = StoredWindow(held | sent, max(sent) if part.tail is not None else None)
    states = dict(zip((identity.tokens for identity, _ in snapshot.states), rest, strict=True))
    return StoredFiles(blocks, tail, windows, states)


async def await_copy(asked: "Future[T]") -> T:
    """The engine's copy. Raises KvasirError, also when the engine ends before it was made."""
    copying = asyncio.wrap_future(asked)
    await asyncio.wait({copying})
    if copying.cancelled():
        raise errors.Unavailable("the memory could not be copied: the engine is shutting down")
    if (error := copying.exception()) is not None:
        raise errors.Internal(f"the memory could not be copied ({type(error).__name__})") from error
    return copying.result()


class Copies:
    def __init__(self, engine: Engine, held: SharedRoom) -> None:
        self.held = held
        self.again = SharedRoom(_AGAIN)  # for memories that are tried again
        self._engine = engine

    @property
    def piece_blocks(self) -> int:
        return piece_blocks(self._engine)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self._engine.model.kv_bytes_per_token

    @property
    def piece_bytes(self) -> int:
        return self.piece_blocks * self.block_bytes

    def pin(self, key: AgentKey, first_block: int, stored: Mapping[int, StoredWindow]) -> "Pinning":
        """Request the key's memory as it is now, and its piece from a block on. `stored` files need no copy."""
        return self._engine.memories.pin(key, first_block, self.piece_blocks, _places(stored))

    async def piece(self, pinned: PinnedMemory, first_block: int, stored: Mapping[int, StoredWindow]) -> Snapshot:
        """A piece of a pinned memory. Raises ResourceExhausted if its room was wanted."""
        piece = await await_copy(pinned.piece(first_block, self.piece_blocks, _places(stored)))
        if piece is None:
            raise errors.ResourceExhausted("the memory was dropped before it could be stored")
        return piece

    async def blocks(self, key: AgentKey, first_block: int, most: int) -> Snapshot | None:
        return await await_copy(self._engine.memories.snapshot(key, first_block, blocks_only=True, max_blocks=most))

    def is_whole(self, snapshot: Snapshot) -> bool:
        """Whether it has the memory's end: of layers that keep all tokens, the last block."""
        end = snapshot.first_block + len(snapshot.blocks)
        return end >= len(snapshot.state.token_ids) // BLOCK_TOKENS or not keeps_all_tokens(
            self._engine.model.kv_identity
        )

    def may_wait(self, snapshot: Snapshot) -> bool:
        """Whether copies that are not sent yet may be kept: all of a memory, if much room is left for those that go."""
        some = self.held.max_units // 4
        size_bytes = sum(map(len, files_of(snapshot)))
        return self.is_whole(snapshot) and max(self.held.held_units + size_bytes, self.piece_bytes) <= some


def _places(stored: Mapping[int, StoredWindow]) -> dict[int, Collection[int]]:
    return {window: each.full for window, each in stored.items()}

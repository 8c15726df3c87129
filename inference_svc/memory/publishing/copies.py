"""Takes copies of a memory's KV for the store, in pieces, within one limit of which each namespace has a share.

The MLX thread makes copies between two steps, or between two cells of a step, so a piece is small. Usually one piece is
enough, because full blocks left while the turn ran. After an outage the whole memory may be unstored. Then pieces that
do not fit into the limit go to the store before the rest is copied. If the store does not take them, the memory stays
hot and unstored, and the error has the numbers.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice

from kvasir import errors
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.formats.manifest import keeps_all_tokens
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Snapshot, WindowFiles
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, PublicationState
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.stored_windows import StoredWindow

_PIECE_BYTES = 16 << 20


def piece_blocks(kv_bytes_per_token: int) -> int:
    """Blocks in one copy, so that making it takes milliseconds."""
    return max(1, _PIECE_BYTES // (max(1, kv_bytes_per_token) * BLOCK_TOKENS))


def files_of(snapshot: Snapshot) -> list[bytes]:
    """Tensor files in the order of a manifest: blocks, the tail, each window's blocks and tail, states."""
    parts: tuple[Snapshot | WindowFiles, ...] = (snapshot, *snapshot.windows)
    rows = [each for part in parts for each in (*part.blocks, *_tail_of(part))]
    return [data for _, data in (*rows, *snapshot.states)]


def _tail_of(part: Snapshot | WindowFiles) -> tuple[tuple[FileIdentity, bytes], ...]:
    return (part.tail,) if part.tail is not None else ()


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Digests of a whole memory's files."""

    blocks: list[Digest]
    tail: Digest | None
    windows: dict[int, StoredWindow]
    states: dict[int, Digest]


def stored_files(snapshot: Snapshot, digests: Sequence[Digest], publication: PublicationState) -> StoredFiles:
    """All files of a memory: those of the snapshot have `digests`, in the order of `files_of`; the store had the others
    before."""
    rest = iter(digests)
    blocks = [*publication.blocks[: snapshot.first_block], *islice(rest, len(snapshot.blocks))]
    tail = next(rest) if snapshot.tail is not None else None
    windows = {}
    for part in snapshot.windows:
        known = publication.windows.get(part.window, StoredWindow()).files
        sent = {block: next(rest) for block in part.by_block}
        held = {block: known[block] for block in part.held if block not in sent}
        windows[part.window] = StoredWindow(held | sent, max(sent) if part.tail is not None else None)
    states = dict(zip((identity.tokens for identity, _ in snapshot.states), rest, strict=True))
    return StoredFiles(blocks, tail, windows, states)


async def await_copy(asked: "Future[Snapshot | None]") -> Snapshot | None:
    """The engine's copy. Raises KvasirError, also when the engine ends before it was made."""
    copying = asyncio.wrap_future(asked)
    await asyncio.wait({copying})
    if copying.cancelled():
        raise errors.Unavailable("the memory could not be copied: the engine is shutting down")
    if (error := copying.exception()) is not None:
        raise errors.Internal(f"the memory could not be copied ({type(error).__name__})") from error
    return copying.result()


class Copies:
    """Takes copies for one engine."""

    def __init__(self, engine: Engine, held: SharedRoom, clock: Callable[[], float]) -> None:
        """`held` bounds the bytes of all copies. `clock` gives seconds, monotonic."""
        self.held = held
        self._engine = engine
        self._clock = clock

    @property
    def piece_blocks(self) -> int:
        return piece_blocks(self._engine.model.kv_bytes_per_token)

    @property
    def piece_bytes(self) -> int:
        return self.piece_blocks * BLOCK_TOKENS * self._engine.model.kv_bytes_per_token

    def ask(self, key: AgentKey, first_block: int, stored: Mapping[int, StoredWindow]) -> "Future[Snapshot | None]":
        """Ask for a piece of the key's memory from a block on. `stored`: files of windows that need no copy."""
        places = {window: each.full for window, each in stored.items()}
        return self._engine.snapshot(key, first_block, max_blocks=self.piece_blocks, stored_windows=places)

    async def rest(
        self, key: AgentKey, memory: AgentMemory, first: Snapshot, store: RemoteCache, patience_s: float
    ) -> tuple[Snapshot, int]:
        """The memory's snapshot from its `first` piece on, and the bytes that went to the store meanwhile.

        `memory.publication.blocks` notes the blocks that the store took. The store has `patience_s` to take what does
        not fit. Raises ResourceExhausted (with numbers) when it does not, or when the memory was dropped or went on.
        """
        has_blocks = keeps_all_tokens(self._engine.model.kv_identity)
        give_up, sent_bytes, held_bytes, snapshot = self._clock() + patience_s, 0, 0, first
        try:
            while has_blocks and not _is_whole(snapshot, memory):
                held_bytes = self._hold(key.namespace, snapshot, held_bytes)
                if not self.held.fits(key.namespace, self.piece_bytes):
                    if not store.is_reachable:
                        raise self._too_much(key.namespace, snapshot, memory)
                    sent_bytes += await _send(snapshot, memory, store, give_up - self._clock())
                    snapshot = replace(snapshot, first_block=_end(snapshot), blocks=())
                    held_bytes = self._hold(key.namespace, snapshot, held_bytes)
                    if not await self._has_room(key.namespace, give_up - self._clock()):
                        raise self._too_much(key.namespace, snapshot, memory)
                piece = await await_copy(self.ask(key, _end(snapshot), memory.publication.windows))
                if piece is None or piece.state.token_ids != memory.transcript.token_ids:
                    raise errors.ResourceExhausted("the memory was dropped or went on before all of it was copied")
                snapshot = replace(piece, first_block=snapshot.first_block, blocks=(*snapshot.blocks, *piece.blocks))
        finally:
            self.held.give_back(key.namespace, held_bytes)
        return snapshot, sent_bytes

    async def _has_room(self, namespace: str, patience_s: float) -> bool:
        """Whether a piece fits, now or once other copies have gone, within `patience_s`."""
        try:
            async with asyncio.timeout(max(patience_s, 0)):
                await self.held.wait_for(namespace, self.piece_bytes)
        except TimeoutError:
            return False
        self.held.give_back(namespace, self.piece_bytes)
        return True

    def _hold(self, namespace: str, snapshot: Snapshot, held_bytes: int) -> int:
        """Hold the snapshot's bytes instead of `held_bytes`; returns them."""
        size_bytes = sum(map(len, files_of(snapshot)))
        self.held.take(namespace, size_bytes - held_bytes)
        return size_bytes

    def _too_much(self, namespace: str, snapshot: Snapshot, memory: AgentMemory) -> errors.ResourceExhausted:
        left = len(memory.transcript.token_ids) - _end(snapshot) * BLOCK_TOKENS
        left_bytes = left * self._engine.model.kv_bytes_per_token
        return errors.ResourceExhausted(
            f"the namespace's copies of {self.held.held(namespace)} bytes wait for the store, this memory has "
            f"{left_bytes} more; of the {self.held.max_units} that may wait, no more are this namespace's now; the "
            "memory stays hot, and goes with the agent's next turn"
        )


async def _send(snapshot: Snapshot, memory: AgentMemory, store: RemoteCache, timeout_s: float) -> int:
    if not snapshot.blocks:
        return 0
    digests, sent_bytes = await store.write_tensors([data for _, data in snapshot.blocks], max(timeout_s, 0.001))
    memory.publication.blocks[snapshot.first_block :] = digests
    return sent_bytes


def _end(snapshot: Snapshot) -> int:
    return snapshot.first_block + len(snapshot.blocks)


def _is_whole(snapshot: Snapshot, memory: AgentMemory) -> bool:
    return _end(snapshot) >= len(memory.transcript.token_ids) // BLOCK_TOKENS

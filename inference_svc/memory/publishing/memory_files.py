"""The files of one memory on their way to the store: piece by piece from where the engine keeps it, however large."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.pinned_memory import PinnedMemory
from inference_svc.memory.agent_memory import AgentMemory, StoredFiles
from inference_svc.memory.publishing.copies import Copies, Pinning, await_copy, files_of, stored_files
from inference_svc.memory.publishing.sending import Sending
from inference_svc.memory.store.remote_cache import RemoteCache

_LEFT = set[asyncio.Task[None]]()  # the event loop alone does not keep them


class MemoryFiles:
    """One memory's files, of which its publication knows those that the store has. Enter it, or close it at the end."""

    def __init__(
        self, key: AgentKey, memory: AgentMemory, copies: Copies, store: RemoteCache, stall_timeout_s: float
    ) -> None:
        self.sent_bytes = 0
        self.coming: Sequence[Digest] = ()  # named, and on their way
        self._came_bytes = 0  # sent before those
        self._key = key
        self._memory = memory
        self._copies = copies
        self._store = store
        self._stall_timeout_s = stall_timeout_s
        self._pinned: PinnedMemory | None = None
        self._piece: Snapshot | None = None  # copied and not stored: the next one, or the last
        self._held_bytes = 0
        self._named: StoredFiles | None = None  # stored, too, once nothing is sent
        self._sending: Sending | None = None

    @property
    def _stored(self) -> StoredFiles:
        return self._memory.files

    async def pinned(self, asked: Pinning, *, waits: bool = False) -> None:
        """Take what was requested; `waits`: not to be sent at once. Raises ResourceExhausted if the memory is gone."""
        pinned = await await_copy(asked)
        if pinned is None or pinned.state.computed.token_ids != self._memory.computed_ids:
            raise errors.ResourceExhausted("the memory was dropped or went on before it could be stored")
        self._pinned = pinned
        pinned.goes_as(self._memory.publication)
        first = pinned.take_first()
        is_kept = first is not None and (not waits or self._copies.may_wait(first))
        self._hold(first if is_kept else None)

    async def named(self) -> StoredFiles:
        """Send what the store lacks, and name all files while they are on their way, until `all_stored`."""
        if self._named is None:
            self._sending = sending = Sending(
                self._copies,
                self._key.namespace,
                self._store,
                self._stored.blocks,
                self._stall_timeout_s,
                self._memory.publication.progressed,
            )
            sending.ends_with_manifest = True
            try:
                last = await self._send_all(sending)
                blocks, rest = await sending.named()
                self.coming = [*blocks[len(sending.stored) :], *rest]
                self._came_bytes = sending.sent_bytes
            except BaseException:
                await self._settle(sending)
                raise
            self._named = stored_files(replace(last, first_block=len(blocks), blocks=()), rest, blocks, self._stored)
        return self._named

    def take_along(self, manifest: bytes) -> bool:
        """Send the manifest that names them with the last of the files, if some wait for it."""
        return self._sending is not None and self._sending.take_along(manifest)

    async def all_stored(self) -> None:
        """Wait until the store has what `named` named. Raises why it does not get there."""
        if (sending := self._sending) is None:
            return
        try:
            await sending.ended()
        except BaseException:
            self._named = None
            raise
        finally:
            await self._settle(sending)
        self.coming = ()
        self._hold(None)

    async def _settle(self, sending: Sending) -> None:
        await sending.drain()
        if self._sending is sending:
            self._stored.blocks[:] = sending.stored
            self.sent_bytes += sending.sent_bytes
            self._sending = None

    def leave(self, writing: "asyncio.Task[None]") -> None:
        """The store has all that `named` named; its answers about these, for which that task waits, have no reader."""
        self._sending = None
        self.sent_bytes += self._came_bytes + sum(digest.size_bytes for digest in self.coming)
        _LEFT.add(writing)
        writing.add_done_callback(_LEFT.discard)
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def note(self, stored: StoredFiles) -> None:
        files = self._stored
        files.blocks[:], files.tail = stored.blocks, stored.tail
        files.windows, files.states = stored.windows, stored.states

    async def restart(self, asked: Pinning) -> None:
        """The store has lost files: send all of them. Raises as `pinned`."""
        self.close()
        self._named = None
        self._stored.blocks.clear()
        self._stored.windows.clear()
        await self.pinned(asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self._hold(None)
        self.take_along(b"")
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    async def _send_all(self, sending: Sending) -> Snapshot:
        piece = self._piece_from(sending.next_block)
        if piece is not None and self._copies.is_whole(piece):
            self._release()  # nothing is left to copy: the engine may give the room to others
            sending.begin(piece, 0)
        elif piece is not None:
            held_bytes, self._piece, self._held_bytes = self._held_bytes, None, 0
            sending.begin(piece, held_bytes)
        else:
            self._hold(None)  # of other blocks
        while piece is None or not self._copies.is_whole(piece):
            piece = await self._put_next(sending)
        return piece

    def _release(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self._memory.publication.is_copied = True

    async def _put_next(self, sending: Sending) -> Snapshot:
        copied: list[Snapshot] = []

        async def copy(first_block: int) -> Snapshot:
            if self._pinned is None:
                raise errors.ResourceExhausted("the memory was dropped before it could be stored")
            copied.append(await self._copies.piece(self._pinned, first_block, self._stored.windows))
            return copied[0]

        await sending.put(copy)
        return copied[0]

    def _piece_from(self, block: int) -> Snapshot | None:
        """What was copied, from a block on; None if that is something else."""
        piece = self._piece
        if piece is None or not piece.first_block <= block <= piece.first_block + len(piece.blocks):
            return None
        piece = replace(piece, first_block=block, blocks=piece.blocks[block - piece.first_block :])
        self._hold(piece)
        return piece

    def _hold(self, piece: Snapshot | None) -> None:
        """Keep a piece instead of the one before, within the room for copies."""
        size_bytes = sum(map(len, files_of(piece))) if piece is not None else 0
        held, namespace = self._copies.held, self._key.namespace
        held.take(namespace, size_bytes)
        held.give_back(namespace, self._held_bytes)
        self._piece, self._held_bytes = piece, size_bytes

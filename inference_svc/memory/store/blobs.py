"""The engine's calls about blobs: written, and read, when bytes are checked against their digest before use."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients.aio.handed_upload import FEATURE, HandedFile, begun_ahead, send_by_files, upload_of
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom

from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.store.answers import Head, StoreMiss, found_prefix, miss_of
from inference_svc.memory.store.connection import StoreConnection
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.stored_windows import FoundPrefix

_MAX_BLOCK_HASHES = 10_000
_HASHED_AT_ONCE_BYTES = 128 << 10


class StoredBlobs:
    def __init__(self, connection: StoreConnection, files: StoreFiles | None) -> None:
        self._connection = connection
        self._files = files

    # --- reading: a failure is a StoreMiss ---

    async def manifest(self, agent_id: str, head: Head, budget: Budget) -> bytes:
        try:
            _, data = await self._connection.read(
                lambda: self._connection.client.get_snapshot(
                    agent_id, head.kv_identity_hash, head.version, timeout_s=budget.remaining_s
                ),
                budget,
            )
        except errors.NotFound as error:
            raise StoreMiss(Miss(MissReason.BLOB_MISSING, f"version {head.version} is gone")) from error
        if head.manifest is not None and Digest.of(data) != head.manifest:
            raise StoreMiss(Miss(MissReason.BLOB_DAMAGED, f"manifest {head.manifest}: other bytes were received"))
        return data

    def make_ready(self, file_bytes: int) -> None:
        """As `StoreFiles.make_ready`, where blobs are this machine's files."""
        if self._files is not None:
            self._files.make_ready(file_bytes)

    def expect(self, digests: Sequence[Digest], room: SharedRoom) -> None:
        """A turn will probably want these blobs: as `StoreFiles.expect`, where they are this machine's files."""
        if self._files is not None:
            self._files.expect(digests, room)

    async def are_cached(self, digests: Sequence[Digest]) -> bool:
        """As `StoreFiles.are_cached`; True where they are no files of this machine."""
        return self._files is None or await asyncio.to_thread(self._files.are_cached, digests)

    async def read_blobs(self, digests: Sequence[Digest], budget: Budget) -> tuple[list[FileBytes], Miss | None]:
        """The longest prefix of the blobs that arrived whole and correct within the budget, and why it is not all."""
        blobs: list[FileBytes] = []

        async def take(data: FileBytes) -> None:
            blobs.append(data)

        return blobs, await self.give_blobs(digests, budget, take)

    async def give_blobs(
        self, digests: Sequence[Digest], budget: Budget, take: Callable[[FileBytes], Awaitable[None]]
    ) -> Miss | None:
        """Give `take` the blobs in order within the budget, without `take`'s own time. Returns why not all came."""
        try:
            taken = await self._read_files(digests, budget, take)
            if taken == len(digests):
                return None
            async with contextlib.aclosing(self._connection.clients.reading.get_blobs(digests[taken:])) as arriving:
                for _ in digests[taken:]:
                    _, data = await self._connection.read(lambda: anext(arriving), budget)
                    budget.earn(len(data))
                    self._connection.moved()
                    await take(data)
        except StoreMiss as error:
            return error.miss
        except errors.KvasirError as error:
            return miss_of(error)
        return None

    async def _read_files(
        self, digests: Sequence[Digest], budget: Budget, take: Callable[[FileBytes], Awaitable[None]]
    ) -> int:
        """Read the store's files up to one that only the store can read. Returns how many were read."""
        if self._files is None:
            return 0
        taken = 0
        async with contextlib.aclosing(self._files.read_in_order(digests)) as arriving:
            while taken < len(digests):
                found = await self._connection.read(lambda: anext(arriving), budget)
                while found:
                    if (data := found.popleft()) is None:
                        return taken
                    budget.earn(len(data))
                    await take(data)
                    taken += 1
        return taken

    async def find_prefix(
        self, kv_identity_hash: str, block_hashes: Sequence[str], groups: Sequence[int], budget: Budget
    ) -> FoundPrefix:
        """The longest stored prefix of a chain that may be shared, in these groups of layers."""
        asked = block_hashes[:_MAX_BLOCK_HASHES]

        async def find() -> FoundPrefix:
            answer = await self._connection.client.find_prefix(
                kv_identity_hash, asked, groups, timeout_s=budget.remaining_s
            )
            return found_prefix(answer, groups, len(asked))

        try:
            return await self._connection.read(find, budget)
        except errors.NotFound as error:
            raise StoreMiss(miss_of(error)) from error

    # --- writing: a failure is a KvasirError, and each call has a timeout; of bulk data, one without progress ---

    async def write_tensors(
        self,
        files: Sequence[FileBytes],
        stall_timeout_s: float,
        hashing: Awaitable[list[Digest]] | None = None,
        naming: Awaitable[bytes] | None = None,
    ) -> tuple[list[Digest], int]:
        """Make tensor files durable, however long that takes while bytes move. Returns their digests in order, and the
        number of their bytes that had to be sent. Raises DeadlineExceeded after so long without progress. `hashing`:
        gives the files' digests, where somebody computes them. `naming`: gives a manifest that names them, which goes
        with them: one call, and one write of the store, for both; empty if it goes another way.
        """
        client = self._connection.clients.writing  # before work is done in vain
        handed = self._files.handed if self._files is not None and FEATURE in self._connection.features else None
        there: list[int] = []
        bulk = self._connection.bulk

        def note(now: cachestore_pb2.TransferProgress) -> None:
            if there and now.bytes_done > there[-1]:
                bulk.is_lost = False
            if not bulk.is_lost:
                self._connection.moved()
            there.append(now.bytes_done)

        async def put(digests: list[Digest], ahead: HandedFile | None) -> int:
            blobs = dict(zip(digests, files, strict=True))
            missing = digests  # one file is a turn's tail, which the store nearly always lacks
            if len(digests) > 1 or handed is None:
                missing = await client.find_missing(list(blobs), timeout_s=stall_timeout_s)
            upload = upload_of(blobs, missing, handed, note, ahead)
            if manifest := await naming if naming is not None else b"":
                upload.add_manifest(manifest)
            progress = await send_by_files(client, upload, stall_timeout_s=stall_timeout_s)
            return progress.bytes_total - there[0] - len(manifest)

        with begun_ahead(handed, files) as ahead:
            digests = await (hashing or digests_of(files))
            try:
                with bulk.under_way():
                    return digests, await self._connection.noting(put(digests, ahead))
            except errors.Unavailable as error:
                bulk.is_lost = error.reason == "DISK_FAILED"
                raise

    async def renew(self, digests: Sequence[Digest], timeout_s: float) -> None:
        """Keep blobs that no manifest names for another grace period. Blobs that are gone do not come back."""
        await self._connection.noting(self._connection.client.find_missing(digests, timeout_s=timeout_s))

    async def write_manifest(self, manifest: bytes, stall_timeout_s: float) -> None:
        """Make a manifest durable. The blobs that it names are needed by its commit only."""
        await self._connection.noting(self._connection.client.put_manifest(manifest, stall_timeout_s=stall_timeout_s))


async def digests_of(files: Sequence[FileBytes]) -> list[Digest]:
    """Computed on another thread, where that takes longer than to go there."""
    if sum(map(len, files)) < _HASHED_AT_ONCE_BYTES:
        return [Digest.of(data) for data in files]
    return await asyncio.to_thread(lambda: [Digest.of(data) for data in files])

"""Fetches damaged blobs again from a peer that has them, verified like any write: a dishonest peer changes nothing."""

import asyncio
import contextlib

import structlog
from kvasir.clients import AioStoreClient
from kvasir.errors import InvalidArgument, KvasirError, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import BlobKind
from cachestore_svc.moving.peering.peers import Peers, errors_of_peer
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.blobs import BlobWriter


class Repairs:
    """Tries the peers of a namespace, in the order of their names."""

    def __init__(self, store: AioStore, peers: Peers, stall_timeout_s: float) -> None:
        self._store = store
        self._peers = peers
        self._stall_timeout_s = stall_timeout_s

    async def repair(self, namespace: str, digest: Digest) -> bool:
        kind = await self._store.run(namespace, self._store.blobs.kind_of, digest)
        if kind is None:
            return False
        for name in self._peers.names(namespace):
            try:
                async with self._peers.connect(name, namespace) as remote:
                    with errors_of_peer(name):
                        await self._fetch(remote, namespace, digest, kind)
            except KvasirError as error:
                structlog.get_logger("cachestore").info("repair.failed", peer=name, reason=error.reason)
            else:
                self._store.statistics.count_repair(namespace)
                structlog.get_logger("cachestore").info("repair.done", peer=name, namespace=namespace)
                return True
        return False

    async def _fetch(self, remote: AioStoreClient, namespace: str, digest: Digest, kind: BlobKind) -> None:
        """Raises what the peer answers, and InvalidArgument for bytes that are not the digest's."""
        try:
            await self._fetch_rest(remote, namespace, digest, kind)
        except InvalidArgument:
            # The part that was here may have been the wrong one. It is gone now.
            await self._fetch_rest(remote, namespace, digest, kind)

    async def _fetch_rest(self, remote: AioStoreClient, namespace: str, digest: Digest, kind: BlobKind) -> None:
        with contextlib.ExitStack() as exits:
            writer = await self._store.threads.run(
                namespace, lambda: exits.enter_context(self._store.blobs.open_writer(namespace, digest, kind))
            )
            # What a peer sends in vain must not be what an honest writer goes on with.
            exits.callback(writer.abandon)
            try:
                if writer.received_bytes < digest.size_bytes:
                    await self._write_frames(remote, namespace, digest, writer)
                await self._store.threads.run(namespace, writer.finish)
            except TimeoutError:
                raise Unavailable("it was silent for too long") from None

    async def _write_frames(self, remote: AioStoreClient, namespace: str, digest: Digest, writer: BlobWriter) -> None:
        async with contextlib.aclosing(remote.read_frames([digest], writer.received_bytes)) as messages:
            while True:
                async with asyncio.timeout(self._stall_timeout_s):
                    frames = await anext(messages, None)
                if frames is None:
                    return
                for frame in frames:
                    await self._store.threads.run(namespace, writer.write, frame.offset, frame.data)

"""Peers over gRPC: the door for paired stores, and the RPC that lets a running store read its file of peers again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from kvasir.cachestore.v1 import pairing_pb2 as pb
from kvasir.cachestore.v1 import pairing_pb2_grpc
from kvasir.errors import FailedPrecondition
from kvasir.server.serving import EdgeServer, MutualTls, RefusedToStart

from cachestore_svc.config import ConfigError
from cachestore_svc.edge.store_calls import caller_namespace
from cachestore_svc.moving.peering.peers import Peers, name_of

_LOG = structlog.get_logger("cachestore")


class PeerService(pairing_pb2_grpc.PeerServiceServicer):
    """The peers of one store while it runs. Add it to the edge, then settle() once that has started."""

    def __init__(self, peers: Peers, edge: EdgeServer) -> None:
        self._peers = peers
        self._edge = edge
        self._settling = asyncio.Lock()
        self._opened = ""  # the wanted address
        self.address = ""  # where paired peers are listened to
        # Called after each reload. None: the store still starts.
        self.reloaded: Callable[[], Awaitable[None]] | None = None

    async def ReloadPeers(self, request: pb.ReloadPeersRequest, context: Any) -> pb.ReloadPeersResponse:
        try:
            ended = await self.reload()
        except ConfigError as error:
            raise FailedPrecondition(str(error), reason="PEER_CONFIGURATION") from None
        names = self._peers.names(caller_namespace())
        return pb.ReloadPeersResponse(peers=names, ended_calls=ended, address=self.address)

    async def reload(self) -> int:
        """Read the file of peers again, end calls of peers that lost rights; how many ended. Raises ConfigError."""
        lost = self._peers.reload()
        end_calls = self._edge.authentication.end_calls
        ended = end_calls(lambda caller: caller.is_peer and name_of(caller) in lost)
        ended += await self._peers.hang_up()
        if self.reloaded is not None:  # a store that still starts settles when the door has all its services
            await self.settle()
            await self.reloaded()
        _LOG.info("peers.reloaded", peers=len(self._peers.book.peers), ended_calls=ended, address=self.address)
        return ended

    async def settle(self) -> None:
        """Open the door where the book has it, if there are paired peers. A taken address is logged, not raised."""
        async with self._settling:  # of two at once, the one that read an older book may end last
            await self._settle()

    async def _settle(self) -> None:
        book = self._peers.book
        wanted = book.listen if book.paired else ""
        if wanted == self._opened:
            return
        await self._edge.close_door()
        self._opened = self.address = ""
        if not wanted or book.identity is None:
            return
        peers = self._peers  # whose book may change while TLS uses it
        tls = MutualTls(wanted, lambda: peers.paired.identity_pem(), lambda: peers.paired.certificates_pem())
        try:
            self.address = await self._edge.open_door(tls)
        except RefusedToStart as error:
            _LOG.error("peers.cannot_listen", address=wanted, problem=str(error))
        else:
            self._opened = wanted
            _LOG.info("peers.listening", address=self.address)

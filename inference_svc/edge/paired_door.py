"""The door at which engines of paired peers give turns: mutual TLS with the certificates of the pairing."""

import asyncio

import structlog
from kvasir.server.serving import EdgeServer, MutualTls, RefusedToStart
from kvasir.waits import RETRY_S

from inference_svc.edge.peer_links import Peers
from inference_svc.handover.pairings import PairingsFile, is_paired

_LOG = structlog.get_logger(__name__)


class PairedDoor:
    """Open while there are paired peers, where the file of peers has it."""

    def __init__(self, pairings: PairingsFile, peers: Peers, server: EdgeServer) -> None:
        self._pairings = pairings
        self._peers = peers
        self._server = server
        self._tried = ""  # the address of the last request
        self._is_open = False

    async def keep(self) -> None:
        """Follow the file until cancelled. Calls of peers that lost a right end."""
        known = self._pairings.book
        while True:
            await asyncio.to_thread(self._pairings.refresh)
            if self._pairings.book is not known:
                known = self._pairings.book
                self._server.authentication.end_calls(
                    lambda caller: is_paired(caller) and not self._pairings.book.keeps(caller)
                )
                await self._peers.hang_up()
            await self._settle()
            await asyncio.sleep(RETRY_S)

    async def _settle(self) -> None:
        book = self._pairings.book
        wanted = book.listen if book.peers else ""
        if wanted == self._tried and (self._is_open or not wanted):
            return
        await self._server.close_door()
        is_new, self._tried, self._is_open = wanted != self._tried, wanted, False
        if not wanted:
            return
        pairings = self._pairings  # whose book may change while TLS uses it
        identity = (lambda: (pairings.book.key, pairings.book.certificate), lambda: pairings.book.callers_pem())
        try:
            address = await self._server.open_door(MutualTls(wanted, *identity))
        except RefusedToStart as error:
            if is_new:
                _LOG.error("peers.cannot_listen", address=wanted, problem=str(error))
        else:
            self._is_open = True
            _LOG.info("peers.listening", address=address)

"""The engines that are this one's peers, by its configuration or by pairing, and the link over which one takes turns
from this engine. No address ever comes from a running call.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

from kvasir.clients import PinnedTls
from kvasir.clients.aio.turn_peer import AioTurnPeer, TurnCall
from kvasir.errors import NotFound, Unavailable
from kvasir.formats.block_file import FileBytes
from kvasir.inference.v1 import handover_pb2 as pb

from inference_svc.edge import handover_messages as wire
from inference_svc.handover.pairings import Pairings, PairingsFile
from inference_svc.handover.passing import Opening, Promise, Stand

_SERVER_NAME = "kvasir-store"  # in every paired certificate: a client of gRPC wants a name, and the pin proves all


class Peers:
    """Clients of other engines by name: those of the configuration go before paired ones."""

    def __init__(
        self,
        clients: Mapping[str, Mapping[str, AioTurnPeer]],
        stores: Mapping[str, str] | None = None,
        paired: PairingsFile | None = None,
    ) -> None:
        """`clients`: by name and namespace, as each token of an engine is bound to one. `stores`: by name, what this
        engine's store calls theirs; without one, both engines have one store.
        """
        self._clients = clients
        self._stores = stores or {}
        self._paired = paired or PairingsFile(None)
        self._paired_clients: dict[tuple[str, bytes, str], AioTurnPeer] = {}

    def store_of(self, peer: str) -> str | None:
        """What this engine's store calls the peer's store; None if both engines have one."""
        return self._stores.get(peer) if peer in self._clients else peer

    async def client(self, peer: str, namespace: str) -> AioTurnPeer:
        """Raises NotFound (PEER_UNKNOWN), also for a peer that was paired for other namespaces."""
        client = self._clients.get(peer, {}).get(namespace)
        if client is None and peer not in self._clients:
            await asyncio.to_thread(self._paired.refresh)
            client = self._paired_client(self._paired.book, peer, namespace)
        if client is not None:
            return client
        book = self._paired.book.peers
        known = [*self._clients, *(name for name, each in book.items() if namespace in each.namespaces)]
        names = ", ".join(map(repr, known)) or "none"
        raise NotFound.of(
            "peer",
            f"{peer!r} is no engine that takes turns of this namespace; known are {names} (`kvasir pair` makes "
            "one, again where it was paired before engines were; or --peer)",
            reason="PEER_UNKNOWN",
        )

    def _paired_client(self, book: Pairings, name: str, namespace: str) -> AioTurnPeer | None:
        peer = book.peers.get(name)
        if peer is None or not peer.engine_address or namespace not in peer.namespaces:
            return None
        key = (peer.engine_address, peer.certificate, namespace)
        if key not in self._paired_clients:
            tls = PinnedTls(peer.pem, _SERVER_NAME, book.certificate, book.key)
            client = AioTurnPeer.connect(peer.engine_address, tls=tls).in_namespace(namespace)
            self._paired_clients[key] = client
        return self._paired_clients[key]

    async def hang_up(self) -> None:
        """End what runs with peers that are paired no more, or otherwise."""
        peers = self._paired.book.peers.values()
        now = {(peer.engine_address, peer.certificate, each) for peer in peers for each in peer.namespaces}
        for over in [key for key in self._paired_clients if key not in now]:
            await self._paired_clients.pop(over).close()

    @contextlib.asynccontextmanager
    async def link(self, peer: str, namespace: str) -> AsyncIterator["EngineLink"]:
        """A link for one request's turns. Raises NotFound (PEER_UNKNOWN)."""
        call = (await self.client(peer, namespace)).take_turn()
        try:
            yield EngineLink(peer, call)
        finally:
            call.close()

    def renew_token(self, peer: str, namespace: str, token: str) -> None:
        self._clients[peer][namespace].renew_token(token)

    async def close(self) -> None:
        configured = (client for clients in self._clients.values() for client in clients.values())
        for client in (*configured, *self._paired_clients.values()):
            await client.close()


class EngineLink:
    def __init__(self, peer: str, call: TurnCall) -> None:
        self._peer = peer
        self._call = call
        self._prompt_tokens = 0

    async def open(self, opening: Opening) -> None:
        self._prompt_tokens = len(opening.begun.prompt.tokens.ids)
        await self._send([wire.write_opening(opening)])
        await self._expect("opened")

    async def send_file(self, choice: int, data: FileBytes) -> None:
        await self._send(wire.write_file(choice, data))

    async def send_stand(self, stand: Stand) -> None:
        await self._send([wire.write_stand(stand, self._prompt_tokens)])

    async def prepared(self) -> Promise:
        answer = await self._expect("prepared")
        return wire.read_promise(answer.prepared)

    async def commit(self) -> None:
        await self._send([wire.commit()])
        await self._expect("taken")

    async def _send(self, parts: Iterable[pb.TakeTurnRequest]) -> None:
        with self._named():
            await self._call.send(parts)

    async def _expect(self, part: str) -> pb.TakeTurnResponse:
        with self._named():
            answer = await self._call.receive()
        if answer.WhichOneof("part") != part:
            raise Unavailable(f"the other engine's answer is not understood: expected {part!r}")
        return answer

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Report a link that does not come about, or breaks, as the peer's: the caller reaches this engine."""
        try:
            yield
        except Unavailable as error:
            if error.reason != Unavailable.reason:
                raise
            text = f"the engine of peer {self._peer}: {error.message}"
            raise Unavailable(text, reason="PEER_UNAVAILABLE", retry_after_s=5.0) from None

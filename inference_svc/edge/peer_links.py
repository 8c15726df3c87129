"""The engines that the configuration names as peers, and the link over which one takes turns from this engine."""

import contextlib
from collections.abc import AsyncIterator, Mapping

from kvasir.clients.aio.turn_peer import AioTurnPeer, TurnCall
from kvasir.errors import NotFound, Unavailable
from kvasir.formats.block_file import FileBytes
from kvasir.inference.v1 import handover_pb2 as pb

from inference_svc.edge import handover_messages as wire
from inference_svc.handover.passing import Opening, Promise, Stand


class Peers:
    """Clients of other engines, by the names of the configuration. No address ever comes from the wire."""

    def __init__(self, clients: Mapping[str, Mapping[str, AioTurnPeer]]) -> None:
        """By name and namespace: each token of an engine is bound to one namespace."""
        self._clients = clients

    @contextlib.asynccontextmanager
    async def link(self, peer: str, namespace: str) -> AsyncIterator["EngineLink"]:
        """A link for one request's turns. Raises NotFound (PEER_UNKNOWN)."""
        client = self._clients.get(peer, {}).get(namespace)
        if client is None:
            known = ", ".join(map(repr, self._clients)) or "none"
            raise NotFound(
                f"peer: {peer!r} is not configured for this namespace; configured are {known} (--peer)",
                reason="PEER_UNKNOWN",
                field="peer",
            )
        call = client.take_turn()
        try:
            yield EngineLink(call)
        finally:
            call.close()

    def renew_token(self, peer: str, namespace: str, token: str) -> None:
        self._clients[peer][namespace].renew_token(token)

    async def close(self) -> None:
        for clients in self._clients.values():
            for client in clients.values():
                await client.close()


class EngineLink:
    def __init__(self, call: TurnCall) -> None:
        self._call = call
        self._prompt_tokens = 0

    async def open(self, opening: Opening) -> None:
        self._prompt_tokens = len(opening.begun.prompt.tokens.ids)
        await self._call.send([wire.write_opening(opening)])
        await self._expect("opened")

    async def send_file(self, choice: int, data: FileBytes) -> None:
        await self._call.send(wire.write_file(choice, data))

    async def send_stand(self, stand: Stand) -> None:
        await self._call.send([wire.write_stand(stand, self._prompt_tokens)])

    async def prepared(self) -> Promise:
        answer = await self._expect("prepared")
        return wire.read_promise(answer.prepared)

    async def commit(self) -> None:
        await self._call.send([wire.commit()])
        await self._expect("taken")

    async def _expect(self, part: str) -> pb.TakeTurnResponse:
        answer = await self._call.receive()
        if answer.WhichOneof("part") != part:
            raise Unavailable(f"the other engine's answer is not understood: expected {part!r}")
        return answer

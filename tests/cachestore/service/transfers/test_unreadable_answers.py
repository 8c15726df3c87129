"""An answer that is no message is a store that is away, not a fault of ours: the engine makes it a miss."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvasir.clients import AioStoreClient
from kvasir.errors import Unavailable
from kvasir.formats.digest import Digest

NO_MESSAGE = b"\x0a\xff"  # a field longer than what follows


class Garbler(grpc.GenericRpcHandler):
    """Answers every RPC with bytes that cannot be parsed."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def one(_request: bytes, _context: object) -> bytes:
            return NO_MESSAGE

        async def many(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            await context.write(NO_MESSAGE)

        if details.method.endswith("ReadBlobs"):
            return grpc.unary_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)


@pytest.mark.long(3)
async def test_an_answer_that_cannot_be_parsed_is_a_store_that_is_away(tmp_path: Path) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbler(),))
    address = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(address)
    await server.start()
    async with AioStoreClient.connect(address, retry_reads=False) as client:
        with pytest.raises(Unavailable):
            await client.get_agent("ada")
        with pytest.raises(Unavailable):
            await client.get_blob(Digest.of(b"anything"))
    await server.stop(None)

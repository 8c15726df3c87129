"""Stores that serve each other as peers in this process, over Unix sockets, with all their real parts."""

import asyncio
import inspect
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import AioStoreClient
from kvasir.credentials import PEER, Principal, write_private_text
from kvasir.server.operating.audit import Audit
from kvasir.server.serving import EdgeServer, Listening, Reports

from cachestore_svc.__main__ import Services, make_services
from cachestore_svc.config import read_settings
from cachestore_svc.edge.roles import (
    AGENT_SERVICE_NAME,
    ALLOWED_ROLES,
    MOVING_SERVICE_NAME,
    PRIVILEGED,
    SERVICE_NAME,
)
from cachestore_svc.edge.service import add_to_server
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.repairing import Repairs
from cachestore_svc.pairing.peers_file import PeerBook
from cachestore_svc.pairing.peers_file import PeerSettings as Peer
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Clock, Lab
from tests.cachestore.core.lab import publish as publish_in
from tests.cachestore.service.running import make_credentials
from tests.made_models.synthetic import SyntheticSnapshot


@dataclass
class Lines:
    """An audit's file, in RAM."""

    by_caller: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    written = lost = 0

    def put(self, line: Mapping[str, Any]) -> None:
        self.by_caller[str(line["who"])].append(line)

    def close(self) -> None:
        """Nothing waits."""

    def of(self, who: str) -> list[Mapping[str, Any]]:
        return self.by_caller[who]


@dataclass
class Mac:
    """One store that serves."""

    name: str
    address: str
    store: Store
    services: Services
    peers: Peers
    books: list[PeerBook]  # the last one holds
    audit: Lines
    tokens: Mapping[str, Path]  # of its peers here
    owner: AioStoreClient
    clock: Clock  # of what the store keeps

    def allow(self, peer: str, gives: str = "read", takes: str = "nothing", **more: Any) -> None:
        """What `kvasir peers allow` does."""
        book = next(each for each in reversed(self.books) if peer in each.peers)
        rights = {"gives": (f"{NS}={gives}",), "takes": (f"{NS}={takes}",), **more}
        changed = book.peers[peer].model_copy(update=rights)
        self.books.append(replace(book, peers={**book.peers, peer: changed}))
        self.peers.reload()

    def remove(self, peer: str) -> None:
        """What `kvasir peers rm` does; `allow` is another pairing of the same peer."""
        self.books.append(self.books[-1].without(peer))
        self.peers.reload()

    @asynccontextmanager
    async def as_peer(self, name: str) -> AsyncIterator[AioStoreClient]:
        """A program that has this peer's token here, and says what it likes."""
        token = self.tokens[name].read_text().strip()
        async with AioStoreClient.connect(self.address, token=token, retry_reads=False, timeout_s=10) as client:
            yield client

    async def publish(self, agent: str, turn: SyntheticSnapshot, parent: int) -> None:
        await asyncio.to_thread(publish_in, self.store, agent, turn, parent)


@dataclass(frozen=True)
class _Late:
    """A service whose methods a test may still replace: gRPC keeps those that it gets when it is added."""

    service: Any

    def __getattr__(self, name: str) -> Any:
        if inspect.isasyncgenfunction(method := getattr(self.service, name)):
            return method

        async def call(request: Any, context: Any) -> Any:
            return await getattr(self.service, name)(request, context)

        return call


@asynccontextmanager
async def macs(
    *names: str, root: Path, opened: Mapping[str, Store] | None = None, **settings: Any
) -> AsyncIterator[Sequence[Mac]]:
    """So many stores; each knows the others by name, and gives them `read`. `opened`: those that are open already."""
    async with AsyncExitStack() as exits:
        sockets = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        made = []
        for name in names:
            store = opened.get(name) if opened else None
            made.append(await exits.enter_async_context(_mac(name, names, root / name, sockets, settings, store)))
        tokens = {(mac.name, other): mac.tokens[other] for mac in made for other in mac.tokens}
        for mac in made:
            peers = {
                other: Peer(name=other, address=f"unix:{sockets / other}", token_file=tokens[other, mac.name])
                for other in names
                if other != mac.name
            }
            mac.books.append(PeerBook(peers))
            mac.peers.reload()
        yield made


@asynccontextmanager
async def _mac(
    name: str, names: Sequence[str], root: Path, sockets: Path, settings: Mapping[str, Any], opened: Store | None
) -> AsyncIterator[Mac]:
    await asyncio.to_thread(root.mkdir, parents=True)
    peers = [Principal(other, NS, frozenset({PEER})) for other in names if other != name]
    tokens = {other: root / f"{other}.token" for other in names if other != name}
    for other, token in make_credentials(root / "credentials.toml", peers).items():
        write_private_text(tokens[other], token)
    books, audit, threads = [PeerBook()], Lines(), StoreThreads()
    known = Peers(lambda: books[-1])
    edge = EdgeServer(
        Listening(f"unix:{sockets / name}", root / "credentials.toml"),
        [SERVICE_NAME, AGENT_SERVICE_NAME, MOVING_SERVICE_NAME],
        ALLOWED_ROLES,
        Reports(lambda: secrets.token_hex(8), audit=Audit("store", audit, PRIVILEGED)),  # type: ignore[arg-type]
    )
    lab = Lab(root / "data")
    store = opened or lab.open()
    aio = AioStore(store, threads)
    config = read_settings({"data_dir": root / "data", **settings})
    services = make_services(config, aio, known, Repairs(aio, known, 5.0), edge.stopping)
    edge.add(add_to_server, _Late(services.store))
    edge.add(cachestore_pb2_grpc.add_AgentServiceServicer_to_server, _Late(services.agents))
    edge.add(cachestore_pb2_grpc.add_MovingServiceServicer_to_server, _Late(services.moving))
    await edge.start()
    edge.set_ready(True)
    try:
        async with AioStoreClient.connect(edge.address, retry_reads=False, timeout_s=30) as owner:
            yield Mac(name, edge.address, store, services, known, books, audit, tokens, owner, lab.clock)
    finally:
        await edge.grpc.stop(0)
        threads.close()
        if opened is None:
            store.close()


async def drained(steps: Any) -> None:
    async for _ in steps:
        pass

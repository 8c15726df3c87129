"""The cache store as the engine sees it: reads share a turn's budget, and a failed one is a miss with its reason."""

import time
from collections.abc import Callable
from pathlib import Path

from inference_svc.memory.store.agents import StoredAgents
from inference_svc.memory.store.blobs import StoredBlobs
from inference_svc.memory.store.connection import StoreClients, StoreConnection
from inference_svc.memory.store.events import StoreEvents
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.leases import StoredLeases


class RemoteCache:
    def __init__(
        self,
        clients: StoreClients,
        namespace: str,
        files: StoreFiles | None = None,
        token_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection = StoreConnection(clients, namespace, token_file, clock)
        self.agents = StoredAgents(connection)
        self.leases = StoredLeases(connection)
        self.blobs = StoredBlobs(connection, files)
        self.events = StoreEvents(connection)

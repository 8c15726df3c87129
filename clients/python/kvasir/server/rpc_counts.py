"""Calls of a gRPC service, counted: by RPC and status, their seconds, and credentials that were refused."""

from collections import Counter

from kvasir.server.durations import Durations


class RpcCounts:
    """Counts since the start. Only the event loop adds; what is not an RPC of the service is not counted."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by RPC and status
        self.seconds: dict[str, Durations] = {}  # by RPC
        self.refused_credentials: Counter[str] = Counter()  # by reason

    def ended(self, rpc: str, status: str, seconds: float) -> None:
        """`rpc`: without its package, as CacheStoreService/GetStats."""
        self.calls[rpc, status] += 1
        if rpc not in self.seconds:
            self.seconds[rpc] = Durations()
        self.seconds[rpc].add(seconds)

"""The clients whose calls block: each method is one of the asynchronous client's. Many threads may use one client."""

import time
from collections.abc import Sequence
from copy import copy
from typing import Any, Self, cast

import grpc

from kvasir.clients.aio.agent_client import AioAgentClient
from kvasir.clients.aio.inference_client import AioInferenceClient
from kvasir.clients.aio.stall_limit import AioStallLimit
from kvasir.clients.aio.store_client import AioStoreClient
from kvasir.clients.blocking import BlockingChannel, BlockingStallLimit, blocking
from kvasir.clients.channel import AnyTls, Tls, sync_channel
from kvasir.clients.inference_client_turns import READS as ENGINE_READS
from kvasir.clients.store_client_transfers import READS as STORE_READS


class _AioStore(AioStoreClient):
    """The asynchronous client of a store whose channel blocks."""

    _streams = 1

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    def _stall_limit(self, seconds: float | None) -> AioStallLimit:
        return BlockingStallLimit(seconds)


class _AioEngine(AioInferenceClient):
    """The asynchronous client of an engine whose channel blocks, and whose peers are blocking clients."""

    peers: dict[str, "InferenceClient"]  # type: ignore[assignment]

    def _peer(self, name: str) -> AioInferenceClient | None:
        found = self.peers.get(name)
        return None if found is None else cast("AioInferenceClient", found._aio)


class _ServiceClient:
    """What the blocking clients have in common. Close it with `with` or close()."""

    def __init__(self, channel: grpc.Channel, aio: Any) -> None:
        self._channel = channel
        self._aio = aio

    def with_token(self, token: str) -> Self:
        """The same service for another caller, over the same channel, which stays this client's to close. Raises
        Unauthenticated without a token: on a Unix socket such a call is the owner's."""
        other = copy(self)
        other._aio = self._aio.with_token(token)
        return other

    def renew_token(self, token: str) -> None:
        """The calls from now on show this token. Raises Unauthenticated for text that is none."""
        self._aio.renew_token(token)

    def in_namespace(self, namespace: str) -> Self:
        """This client, whose calls name a namespace: to a store that knows the caller by a pinned certificate."""
        self._aio.in_namespace(namespace)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    close = blocking(AioAgentClient.close)
    call_rpc = blocking(AioAgentClient.call_rpc)
    stream_rpc = blocking(AioAgentClient.stream_rpc)

    list_agents = blocking(AioAgentClient.list_agents)
    every_agent = blocking(AioAgentClient.every_agent)
    get_agent = blocking(AioAgentClient.get_agent)
    update_agent = blocking(AioAgentClient.update_agent)
    fork_agent = blocking(AioAgentClient.fork_agent)
    rollback_agent = blocking(AioAgentClient.rollback_agent)
    delete_agent = blocking(AioAgentClient.delete_agent)
    list_snapshots = blocking(AioAgentClient.list_snapshots)
    every_snapshot = blocking(AioAgentClient.every_snapshot)
    get_snapshot = blocking(AioAgentClient.get_snapshot)
    get_usage = blocking(AioAgentClient.get_usage)
    pull_agent = blocking(AioAgentClient.pull_agent)
    pulling_agent = blocking(AioAgentClient.pulling_agent)
    copying_agent = blocking(AioAgentClient.copying_agent)
    move_agent = blocking(AioAgentClient.move_agent)
    moving_agent = blocking(AioAgentClient.moving_agent)
    claim_agent = blocking(AioAgentClient.claim_agent)
    export_agent = blocking(AioAgentClient.export_agent)
    export_to_file = blocking(AioAgentClient.export_to_file)
    import_agent = blocking(AioAgentClient.import_agent)
    import_from_file = blocking(AioAgentClient.import_from_file)


class StoreClient(_ServiceClient):
    """A cache store. A transfer fails when it was cut `max_cuts` times and no blob was finished in between."""

    def __init__(
        self, channel: grpc.Channel, *, token: str | None = None, timeout_s: float = 10.0, max_cuts: int = 5
    ) -> None:
        calls: Any = BlockingChannel(channel)
        super().__init__(channel, _AioStore(calls, token=token, timeout_s=timeout_s, max_cuts=max_cuts))

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: AnyTls | None = None,
        timeout_s: float = 10.0,
        retry_reads: bool = True,
        max_cuts: int = 5,
    ) -> Self:
        """A client of the store at unix:/path or host:port. Connects with the first call. Raises InvalidArgument,
        and Unauthenticated for a token that no header can hold."""
        channel = sync_channel(address, tls, STORE_READS if retry_reads else ())
        return cls(channel, token=token, timeout_s=timeout_s, max_cuts=max_cuts)

    find_missing = blocking(AioStoreClient.find_missing)
    put_blobs = blocking(AioStoreClient.put_blobs)
    send_all = blocking(AioStoreClient.send_all)
    put_manifest = blocking(AioStoreClient.put_manifest)
    write_status = blocking(AioStoreClient.write_status)
    get_blobs = blocking(AioStoreClient.get_blobs)
    get_blob = blocking(AioStoreClient.get_blob)
    read_frames = blocking(AioStoreClient.read_frames)
    commit = blocking(AioStoreClient.commit)
    get_snapshot = blocking(AioStoreClient.get_snapshot)
    find_prefix = blocking(AioStoreClient.find_prefix)
    acquire_lease = blocking(AioStoreClient.acquire_lease)
    renew_lease = blocking(AioStoreClient.renew_lease)
    renew_leases = blocking(AioStoreClient.renew_leases)
    release_lease = blocking(AioStoreClient.release_lease)
    offer_agent = blocking(AioStoreClient.offer_agent)
    hand_over_agent = blocking(AioStoreClient.hand_over_agent)
    undo_move = blocking(AioStoreClient.undo_move)
    fence_agent = blocking(AioStoreClient.fence_agent)
    watch = blocking(AioStoreClient.watch)
    verify_blobs = blocking(AioStoreClient.verify_blobs)
    collect_garbage = blocking(AioStoreClient.collect_garbage)
    get_capabilities = blocking(AioStoreClient.get_capabilities)
    get_stats = blocking(AioStoreClient.get_stats)
    reload_peers = blocking(AioStoreClient.reload_peers)


class InferenceClient(_ServiceClient):
    """An inference service and the agents of its store, over one channel. Close it with `with` or close()."""

    def __init__(self, channel: grpc.Channel, *, token: str | None = None, timeout_s: float = 10.0) -> None:
        calls: Any = BlockingChannel(channel)
        super().__init__(channel, _AioEngine(calls, token=token, timeout_s=timeout_s))
        self._engines: tuple[InferenceClient, ...] = ()

    @classmethod
    def connect(
        cls, address: str, *, token: str | None = None, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Self:
        """A client of the engine at unix:/path or host:port. Connects with the first call. Raises InvalidArgument,
        and Unauthenticated for a token that no header can hold."""
        return cls(sync_channel(address, tls, ENGINE_READS), token=token, timeout_s=timeout_s)

    @property
    def peers(self) -> "dict[str, InferenceClient]":
        """Clients of other engines by their names here, to which a turn that moves is followed."""
        return cast("dict[str, InferenceClient]", self._aio.peers)

    @peers.setter
    def peers(self, peers: "dict[str, InferenceClient]") -> None:
        self._aio.peers = peers

    @property
    def engines(self) -> "Sequence[InferenceClient]":
        """Clients of the other engines of this engine's store. A turn whose agent one of them holds is made there."""
        return self._engines if self._aio.engines else ()  # none of another caller's

    @engines.setter
    def engines(self, engines: "Sequence[InferenceClient]") -> None:
        self._engines = tuple(engines)
        self._aio.engines = [each._aio for each in engines]

    generate = blocking(AioInferenceClient.generate)
    resume = blocking(AioInferenceClient.resume)
    reply = blocking(AioInferenceClient.reply)
    list_turns = blocking(AioInferenceClient.list_turns)
    cancel_turn = blocking(AioInferenceClient.cancel_turn)
    hand_over = blocking(AioInferenceClient.hand_over)
    list_hot_memories = blocking(AioInferenceClient.list_hot_memories)
    warm = blocking(AioInferenceClient.warm)
    sleep = blocking(AioInferenceClient.sleep)
    count_tokens = blocking(AioInferenceClient.count_tokens)
    embed = blocking(AioInferenceClient.embed)
    list_models = blocking(AioInferenceClient.list_models)
    get_model = blocking(AioInferenceClient.get_model)
    load_model = blocking(AioInferenceClient.load_model)
    unload_model = blocking(AioInferenceClient.unload_model)
    get_capabilities = blocking(AioInferenceClient.get_capabilities)
    get_stats = blocking(AioInferenceClient.get_stats)

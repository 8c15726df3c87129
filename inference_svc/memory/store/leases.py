"""The engine's calls about leases of its agents' lines."""

from collections.abc import Mapping

from kvasir.cachestore.v1 import cachestore_pb2

from inference_svc.memory.store import answers
from inference_svc.memory.store.connection import StoreConnection


class StoredLeases:
    """The leases of one namespace's lines. All calls raise KvasirError, and ValueError for an answer that is none."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    async def acquire(
        self, agent_id: str, kv_identity_hash: str, owner: str, *, begins_anew: bool, asks: bool, timeout_s: float
    ) -> answers.LeaseGrant:
        got = await self._connection.client.acquire_lease(
            agent_id,
            kv_identity_hash,
            owner,
            ttl_s=answers.LEASE_TTL_S,
            begins_anew=begins_anew,
            asks=asks,
            timeout_s=timeout_s,
        )
        if got.lease.owner != owner or got.lease.generation < 1:
            raise ValueError("AcquireLease: the answer has no lease of this owner")
        return answers.LeaseGrant(
            got.lease.generation, answers.head_of(got.head) if got.HasField("head") else answers.NO_HEAD
        )

    async def renew(
        self, owner: str, kv_identity_hash: str, generations: Mapping[str, int], timeout_s: float
    ) -> answers.LeaseRenewal:
        got = await self._connection.client.renew_leases(
            owner, kv_identity_hash, generations, ttl_s=answers.LEASE_TTL_S, timeout_s=timeout_s
        )
        return answers.LeaseRenewal(*(frozenset(each.agent_id for each in named) for named in (got.lost, got.wanted)))

    async def release(
        self, agent_id: str, kv_identity_hash: str, owner: str, generation: int, timeout_s: float
    ) -> None:
        token = cachestore_pb2.LeaseToken(owner=owner, generation=generation)
        await self._connection.client.release_lease(agent_id, kv_identity_hash, token, timeout_s=timeout_s)

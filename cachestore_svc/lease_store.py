"""The part of the store that gives leases, and that makes whoever would take a memory back wait for its holder.

A rollback, a deletion, an import, a pull or a fork over a name takes back what an engine may answer from. It goes on
once the holder of the lease has let go, or the lease has ended; the holder's late commits are fenced either way.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvasir.errors import FailedPrecondition
from kvasir.names import check_agent_id, check_namespace, check_owner

from cachestore_svc.blob_store import BlobStore
from cachestore_svc.index.live_leases import LineName
from cachestore_svc.index.sqlite import leases, versions
from cachestore_svc.index.sqlite.blob_rows import find_namespace
from cachestore_svc.index.sqlite.index import Rows
from cachestore_svc.limits import check_hash, check_range
from cachestore_svc.records import (
    DEFAULT_LEASE_TTL_S,
    MAX_LEASE_TTL_S,
    MAX_LEASES_PER_REQUEST,
    MIN_LEASE_TTL_S,
    HeldLease,
    Lease,
    LeaseToken,
    LeaseWanted,
    RenewedLeases,
    SnapshotVersion,
)

_Answer = TypeVar("_Answer")


class LeaseStore(BlobStore):
    """Leases of all namespaces."""

    def acquire_lease(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str,
        owner: str,
        ttl_s: float = DEFAULT_LEASE_TTL_S,
        *,
        begins_anew: bool = False,
        asks: bool = False,
    ) -> Lease:
        """Take the right to extend a line; it need not exist yet. The owner of a live lease gets it prolonged.

        `begins_anew`: the owner's earlier lease is of a process that ended, and is fenced. `asks`: if another owner has
        it, that one is asked to let go. Raises FailedPrecondition (LEASE_HELD with "owner" and "left_ms").
        """
        line, ttl_ms = self._line(namespace, agent_id, kv_identity_hash), _ttl_ms(ttl_s)
        check_owner(owner)

        def work(rows: Rows) -> Lease:
            token = leases.acquire(rows, self._core.leases, line, owner, ttl_ms, begins_anew=begins_anew)
            return self._lease(rows, line, token, ttl_ms)

        try:
            return self._core.index.write(namespace, work)
        except FailedPrecondition:
            if asks:
                self._ask(namespace, [line], takes_back=False)
            raise

    def renew_lease(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str,
        token: LeaseToken,
        ttl_s: float = DEFAULT_LEASE_TTL_S,
    ) -> Lease:
        """Prolong a lease, also one that ended and that nobody else took. Raises Conflict (LEASE_FENCED), NotFound,
        FailedPrecondition (LEASE_HELD: a change of the agent waits for it)."""
        line, ttl_ms = self._line(namespace, agent_id, kv_identity_hash), _ttl_ms(ttl_s)

        def work(rows: Rows) -> Lease:
            leases.renew(rows, self._core.leases, line, token, ttl_ms)
            return self._lease(rows, line, token, ttl_ms)

        return self._core.index.write(namespace, work)

    def renew_leases(
        self, namespace: str, owner: str, kv_identity_hash: str, held: Sequence[HeldLease], ttl_s: float
    ) -> RenewedLeases:
        """Prolong many live leases at once; writes nothing. Those that ended, were fenced, are taken back, or were
        acquired for less than `ttl_s`, are not prolonged, and are lost. Raises InvalidArgument."""
        check_owner(owner)
        check_range("leases", len(held), 0, MAX_LEASES_PER_REQUEST)
        seconds = _ttl_ms(ttl_s) / 1000
        lost, wanted = list[HeldLease](), list[HeldLease]()
        for each in held:
            line = self._line(namespace, each.agent_id, kv_identity_hash)
            if not self._core.leases.prolong(line, LeaseToken(owner, each.generation), seconds):
                lost.append(each)
            elif self._core.leases.is_wanted(line):
                wanted.append(each)
        return RenewedLeases(tuple(lost), tuple(wanted))

    def release_lease(self, namespace: str, agent_id: str, kv_identity_hash: str, token: LeaseToken) -> None:
        """Give a lease back; its generation stays remembered. Raises Conflict (LEASE_FENCED), NotFound."""
        line = self._line(namespace, agent_id, kv_identity_hash)
        self._core.index.write(
            namespace, lambda rows: leases.release(rows, self._core.leases, line, token), frees_space=True
        )

    def _taking_back(
        self,
        namespace: str,
        agent_id: str,
        kv_hash: str | None,
        work: Callable[[Rows], _Answer],
        *,
        frees_space: bool = False,
    ) -> _Answer:
        """Do what takes back an agent's memory, once nobody may answer from it. Raises FailedPrecondition (LEASE_HELD)
        while somebody may, who is asked to let go: the caller tries again."""
        waited_for = list[LineName]()

        def fenced(rows: Rows) -> _Answer:
            # What is refused for another reason waits for nobody.
            answer = work(rows)
            waited_for[:] = leases.held(rows, self._core.leases, namespace, agent_id, kv_hash)
            leases.fence(rows, self._core.leases, namespace, agent_id, kv_hash)
            return answer

        try:
            return self._core.index.write(namespace, fenced, frees_space=frees_space)
        except FailedPrecondition as error:
            if error.reason == "LEASE_HELD":
                self._ask(namespace, waited_for, takes_back=True)
            raise

    def _ask(self, namespace: str, lines: Sequence[LineName], *, takes_back: bool) -> None:
        """Tell holders, once each, that their leases are wanted."""
        new = [line for line in lines if self._core.leases.want(line, takes_back=takes_back)]
        events = [LeaseWanted(line.agent_id, line.kv_identity_hash, takes_back) for line in new]
        if events:
            self._core.index.write(namespace, lambda rows: self._core.tell(rows, namespace, events), frees_space=True)

    def _lease(self, rows: Rows, line: LineName, token: LeaseToken, ttl_ms: int) -> Lease:
        return Lease(token, self._core.now_unix_ms() + ttl_ms, self._newest(rows, line))

    def _newest(self, rows: Rows, line: LineName) -> SnapshotVersion | None:
        found = versions.find_line(rows, find_namespace(rows, line.namespace), line.agent_id, line.kv_identity_hash)
        return versions.get_version(rows, found, None) if found else None

    def _line(self, namespace: str, agent_id: str, kv_identity_hash: str) -> LineName:
        check_namespace(namespace)
        check_agent_id(agent_id)
        check_hash(kv_identity_hash, "kv_identity_hash")
        return LineName(namespace, agent_id, kv_identity_hash)


def _ttl_ms(ttl_s: float) -> int:
    check_range("ttl", ttl_s, MIN_LEASE_TTL_S, MAX_LEASE_TTL_S)
    return int(ttl_s * 1000)

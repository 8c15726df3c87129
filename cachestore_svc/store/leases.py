"""Grants leases, and makes a caller who takes a memory back (a rollback, deletion, import, pull, fork over a name) wait
until the holder has let go or its lease has ended. Late commits are fenced either way.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from kvasir.errors import FailedPrecondition
from kvasir.names import check_agent_id, check_owner

from cachestore_svc.core.core import Core
from cachestore_svc.facts import records
from cachestore_svc.facts.limits import check_hash, check_range
from cachestore_svc.facts.ownership import check_writable
from cachestore_svc.index.catalog import CatalogChange, Ends

_Answer = TypeVar("_Answer")


class Leases:
    def __init__(self, core: Core) -> None:
        self._core = core

    def acquire(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str,
        owner: str,
        ttl_s: float = records.DEFAULT_LEASE_TTL_S,
        *,
        begins_anew: bool = False,
        asks: bool = False,
    ) -> records.Lease:
        """Take the right to extend a line; it need not exist yet. The owner of a live lease gets it prolonged. While
        another owner has a live lease of the agent, of this line or another, it is refused. `begins_anew`: the owner's
        earlier lease belongs to a process that has ended, and is fenced. `asks`: if another owner has it, that one is
        asked to let go. Raises FailedPrecondition (LEASE_HELD with "owner" and "left_ms"; AGENT_MOVED or AGENT_MOVING
        when the agent is not this store's).
        """
        line, ttl_ms = self._line(namespace, agent_id, kv_identity_hash), _ttl_ms(ttl_s)
        check_owner(owner)
        held = list[records.LineKey]()

        def work(change: CatalogChange) -> records.Lease:
            check_writable(agent_id, change.ownership_of(agent_id))
            newest = change.newest_of(records.LineQuery(agent_id))  # before something is written
            try:
                token = change.acquire_lease(line, self._core.leases, owner, ttl_ms, begins_anew=begins_anew)
            except FailedPrecondition:
                held[:] = change.held_leases(records.LineQuery(agent_id), self._core.leases)
                raise
            return records.Lease(token, self._core.now_unix_ms() + ttl_ms, newest)

        try:
            return self._core.write(namespace, work)
        except FailedPrecondition as error:
            if asks and error.reason == "LEASE_HELD":
                self._ask(namespace, held, takes_back=False)
            raise

    def renew(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str,
        token: records.LeaseToken,
        ttl_s: float = records.DEFAULT_LEASE_TTL_S,
    ) -> records.Lease:
        """Prolong a lease, also one that ended and was not taken. Raises Conflict, NotFound, FailedPrecondition."""
        line, ttl_ms = self._line(namespace, agent_id, kv_identity_hash), _ttl_ms(ttl_s)

        def work(change: CatalogChange) -> records.Lease:
            check_writable(agent_id, change.ownership_of(agent_id))
            change.renew_lease(line, self._core.leases, token, ttl_ms)
            newest = change.newest_of(records.LineQuery(agent_id))
            return records.Lease(token, self._core.now_unix_ms() + ttl_ms, newest)

        return self._core.write(namespace, work)

    def renew_all(
        self, namespace: str, owner: str, kv_identity_hash: str, held: Sequence[records.HeldLease], ttl_s: float
    ) -> records.RenewedLeases:
        """Prolong many live leases; those that cannot be are lost. Raises InvalidArgument, Unavailable (LOCKED: another
        store took the index, and may have given them out).
        """
        check_owner(owner)
        check_range("leases", len(held), 0, records.MAX_LEASES_PER_REQUEST)
        seconds = _ttl_ms(ttl_s) / 1000
        for each in held:
            self._line(namespace, each.agent_id, kv_identity_hash)
        asked = namespace, owner, check_hash(kv_identity_hash), held, seconds
        ends = self._core.leases
        if ends.in_ram:  # and so nothing is written
            self._core.catalog.check_ours()
            return ends.in_ram.prolong_all(*asked)
        return self._core.write(namespace, lambda change: ends.within(change).prolong_all(*asked), frees_space=True)

    def release(self, namespace: str, agent_id: str, kv_identity_hash: str, token: records.LeaseToken) -> None:
        """Give a lease back; its generation stays remembered. Raises Conflict (LEASE_FENCED), NotFound."""
        line = self._line(namespace, agent_id, kv_identity_hash)

        def work(change: CatalogChange) -> None:
            change.release_lease(line, self._core.leases, token)
            change.after_commit(lambda: self._core.released.wake(namespace, agent_id))

        self._core.write(namespace, work, frees_space=True)

    def watching_releases(
        self, namespace: str, agent_id: str, callback: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """For this time `callback` is called, on a store's thread, after leases of the agent were given back by way of
        this store. Nobody reports those that end, or that another store over the same catalog took back.
        """
        return self._core.released.watching((namespace, agent_id), callback)

    def taking_back(
        self,
        namespace: str,
        agent_id: str,
        work: Callable[[CatalogChange], _Answer],
        *,
        frees_space: bool = False,
        at_once: bool = True,
    ) -> _Answer:
        """Do what takes a memory back, once no engine may answer from it. Raises FailedPrecondition (LEASE_HELD)."""
        check_agent_id(agent_id)
        waited_for, query = list[records.LineKey](), records.LineQuery(agent_id)

        def fenced(change: CatalogChange) -> _Answer:
            answer = work(change)  # A change that is refused for another reason waits for nobody
            waited_for[:] = change.held_leases(query, self._core.leases)
            change.fence_leases(query, self._core.leases)
            return answer

        try:
            return self._core.write(namespace, fenced, frees_space=frees_space)
        except FailedPrecondition as error:
            if error.reason == "LEASE_HELD":
                self._ask(namespace, waited_for, takes_back=at_once)
            raise

    def _ask(self, namespace: str, lines: Sequence[records.LineKey], *, takes_back: bool) -> None:
        leases = self._core.leases

        def new(ends: Ends) -> list[records.EventBody]:
            wanted = [line for line in lines if ends.want(line, takes_back=takes_back)]
            return [records.LeaseWanted(line.agent_id, line.kv_identity_hash, takes_back) for line in wanted]

        # In RAM it is noted once: an operation may run twice.
        noted = new(leases.in_ram) if leases.in_ram else None

        def report(change: CatalogChange) -> None:
            if events := new(leases.within(change)) if noted is None else noted:
                self._core.report(change, namespace, events)

        if noted != []:
            self._core.write(namespace, report, frees_space=True)

    def _line(self, namespace: str, agent_id: str, kv_identity_hash: str) -> records.LineKey:
        self._core.check_open(namespace)
        return records.LineKey(namespace, check_agent_id(agent_id), check_hash(kv_identity_hash))


def _ttl_ms(ttl_s: float) -> int:
    check_range("ttl", ttl_s, records.MIN_LEASE_TTL_S, records.MAX_LEASE_TTL_S)
    return int(ttl_s * 1000)

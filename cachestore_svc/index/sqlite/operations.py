"""The operations that wait for a catalog: namespaces take turns, each one's operations keep their order, and those that
write are committed in groups. Where they run is a subclass's.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvasir.errors import Unavailable
from kvasir.server.fair_shares import RoundRobin

from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.rights.lease_ends import LeaseEnds
from cachestore_svc.index.sqlite.rows import Connection, run_later
from cachestore_svc.index.sqlite.transaction import CatalogChange, CatalogView
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES, PlainNames

_Answer = TypeVar("_Answer")
# One commit holds as many writes as this, or as many as begin within this time. Reads have a turn of the same length
# before it: a newcomer waits for one turn of each kind, not for all that waits.
MAX_WRITES_PER_COMMIT = 256
MAX_TURN_MS = 10


@dataclass
class Operation:
    namespace: str
    work: Callable[[CatalogChange], Any]
    is_write: bool
    frees_space: bool = False
    answer: Future[Any] = field(default_factory=Future)


class Catalog:
    """Runs operations. Its methods from any thread."""

    place: str  # of the event history: in another place it has another name
    home = ("", "")  # of a server's database: its numbers, and the timeline
    is_shared = False  # whether other stores may read and write it at the same time
    max_turn_ms = MAX_TURN_MS
    waits_for_other_stores = False  # in a turn's first write, which is no part of the turn then

    def __init__(self, now_unix_ms: Callable[[], int], translated: Callable[[BaseException], BaseException]) -> None:
        """`translated`: errors of the database in words that a caller can act on."""
        self._now_unix_ms = now_unix_ms
        self._translated = translated
        self._guard = threading.RLock()  # guards the next three
        # Notified of new operations; a catalog whose readers are other threads has one of its own for these.
        self._writes_came = self._reads_came = threading.Condition(self._guard)
        self._reads: RoundRobin[Operation] = RoundRobin()
        self._writes: RoundRobin[Operation] = RoundRobin()
        self._is_closed = False
        self.damage: Mapping[str, str] = {}  # namespaces whose entries are damaged, and how
        self._names_of: Callable[[str], PlainNames] = lambda _: PLAIN_NAMES
        self._threads: list[threading.Thread] = []

    def read(self, namespace: str, work: Callable[[CatalogView], _Answer]) -> _Answer:
        """The answer of `work` about the namespace (HOUSE: the store itself). It sees every acknowledged write."""
        answer: _Answer = self._submit(Operation(namespace, work, is_write=False)).result()
        return answer

    def write(self, namespace: str, work: Callable[[CatalogChange], _Answer], *, frees_space: bool = False) -> _Answer:
        """The answer of `work`, once it is durable. All of it took effect, or, when this raises, nothing; either one
        where a server or bucket did not answer at the commit (INDEX_FAILED, CLOSED). `work` may run twice, so it
        touches nothing else. `frees_space` lets it use the ballast of a full disk.
        """
        operation = Operation(namespace, work, is_write=True, frees_space=frees_space)
        answer: _Answer = self._submit(operation).result()
        return answer

    def write_later(
        self, namespace: str, work: Callable[[CatalogChange], Any], then: Callable[[], None] | None = None
    ) -> "Future[Any]":
        """As `write`, without waiting. Nobody has to read the answer: facts may be lost, such as times of last use.
        What `then` submits begins to wait at the same moment: one commit has all of it, unless that is full before.
        """
        with self._guard:
            answer = self._submit(Operation(namespace, work, is_write=True))
            if then is not None:
                then()
        return answer

    def attend(self, begin: Callable[[CatalogChange], None], wake: Callable[[str], None]) -> None:
        """For a database of a server: `begin` is done first whenever it may be another server's than before. `wake` is
        called, on any thread, with a namespace in which another store may have reported events, or "" for any.
        """

    def has_job(self, name: str) -> bool:  # noqa: ARG002  nobody else is there
        """Whether this store does a work of the background, for now: of the stores of a database one does it."""
        return True

    def lease_ends(self, steady: Callable[[], float]) -> LeaseEnds:
        """The ends of its leases. `steady`: seconds that nobody sets, for a catalog that only this process has."""
        return LiveLeases(steady)

    def check_ours(self) -> None:
        """Raises Unavailable (LOCKED) where another store has the database. A file is locked as long as it is open."""

    def keep_out(self, damage: Mapping[str, str]) -> None:
        """From now on refuse all operations of these namespaces: their entries are damaged, in these words."""
        self.damage = damage

    def seal(self, names_of: Callable[[str], PlainNames]) -> None:
        """From now on operations of a sealed namespace have plain names, and its entries have sealed ones."""
        self._names_of = names_of

    def close(self) -> bool:
        """Finish the operations that wait. False when it was closed before."""
        with self._guard:
            is_first = not self._is_closed
            self._is_closed = True
            for came in (self._writes_came, self._reads_came):
                came.notify_all()
        for thread in self._threads:
            thread.join()
        return is_first

    def _submit(self, operation: Operation) -> "Future[Any]":
        if words := self.damage.get(operation.namespace):
            raise index_damaged(words)
        with self._guard:
            if self._is_closed:
                raise Unavailable("the store is closed", reason="CLOSED")
            (self._writes if operation.is_write else self._reads).put(operation.namespace, operation)
            (self._writes_came if operation.is_write else self._reads_came).notify()
        return operation.answer

    # --- on the threads that run operations ---

    def _is_wanted(self, came: threading.Condition, *waiting: RoundRobin[Operation]) -> bool:
        """Wait until something waits; False when nothing does and the catalog closes."""
        with came:
            came.wait_for(lambda: self._is_closed or any(map(len, waiting)))
            return any(map(len, waiting))

    def _next(self, waiting: RoundRobin[Operation]) -> Operation | None:
        with self._guard:
            taken = waiting.take()
        return taken[1] if taken else None

    def _is_over(self, began_ms: int) -> bool:
        """Whether a turn that began then has had its time. A clock that steps ends it early, never late."""
        return not 0 <= self._now_unix_ms() - began_ms < self.max_turn_ms

    def _take_reads(self, connection: Connection) -> None:
        began_ms = self._now_unix_ms()
        while operation := self._next(self._reads):
            self._read(connection, operation)
            if self._is_over(began_ms):
                return

    def _take_writes(self, connection: Connection) -> None:
        first = self._next(self._writes)
        if first is None:
            return
        taken = [first]
        try:
            self._write(connection, taken, self._more_writes(taken, self._now_unix_ms()))
        except BaseException as error:  # noqa: BLE001  a caller that waits for ever would be worse
            for operation in taken:
                if not operation.answer.done():
                    operation.answer.set_exception(error)

    def _more_writes(self, taken: list[Operation], began_ms: int) -> Iterator[Operation]:
        """Further writes for the commit of those `taken`, each taken when the one before it has run."""
        if self.waits_for_other_stores:
            began_ms = self._now_unix_ms()
        while len(taken) < MAX_WRITES_PER_COMMIT and not self._is_over(began_ms):
            operation = self._next(self._writes)
            if operation is None:
                return
            taken.append(operation)
            yield operation

    def _read(self, connection: Connection, operation: Operation) -> None:
        rows = self._rows_of(connection, operation)
        try:
            operation.answer.set_result(operation.work(rows))
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            operation.answer.set_exception(self._translated(error))

    def _rows_of(self, connection: Connection, operation: Operation) -> CatalogChange:
        return CatalogChange(connection, operation.namespace, self._names_of(operation.namespace))

    def _write(self, connection: Any, operations: list[Operation], more: Iterable[Operation] = ()) -> None:
        """Commit operations, and as many more as come, together; answer all of them. By each kind of catalog."""
        raise NotImplementedError  # no ABC: of the others a kind overrides what its database needs, and most do nothing

    def _in_savepoint(
        self, connection: Connection, operation: Operation, *ends_all: type[Exception]
    ) -> list[Callable[[], None]]:
        """Run one operation so that its failure undoes only itself. What to do after the commit. `ends_all`: errors
        that ended the transaction, and leave no savepoint to go back to.
        """
        rows = self._rows_of(connection, operation)
        run_later(connection, "SAVEPOINT operation")
        try:
            result = operation.work(rows)
            run_later(connection, "RELEASE operation")
        except ends_all:
            raise
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            connection.execute("ROLLBACK TO operation")
            connection.execute("RELEASE operation")
            failure = self._translated(error)
            return [lambda: operation.answer.set_exception(failure)]
        return [*rows.after_commit_actions, lambda: operation.answer.set_result(result)]

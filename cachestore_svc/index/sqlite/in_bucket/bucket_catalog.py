"""The catalog in a bucket, for a store without a database and without a disk that lasts. It is in memory; each group of
writes is an object with the pages that it changed, created under the next number before anybody is answered.

Only one writer creates a number. So a store that another one followed cannot commit: it answers nothing more (LOCKED).
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count

from kvasir.errors import FailedPrecondition, KvasirError, Unavailable
from kvasir.waits import PATIENCE_S, PAUSE_S, RETRY_S

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.owning import BucketOwner
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.sqlite.database.failures import translated
from cachestore_svc.index.sqlite.database.migrations import migrate
from cachestore_svc.index.sqlite.in_bucket.objects import (
    DELTA,
    FOLDER,
    MOST_BYTES,
    START_BYTES,
    WHOLE,
    NewestNote,
    check_listed,
    name_of,
    newest,
    parsed,
)
from cachestore_svc.index.sqlite.in_bucket.pages import DIGEST_BYTES, delta, signed
from cachestore_svc.index.sqlite.operations import MAX_WRITES_PER_COMMIT, Catalog, Operation
from cachestore_svc.index.sqlite.transaction import CatalogChange
from cachestore_svc.index.values import HOUSE

_MOST_DELTAS = 100  # behind a whole image, which a start reads one by one
_STARTS, _MOST_STARTS = "starts", 100  # a fact: the last starts, START:NUMBER of its first object
_TRIES = 20  # to follow, while another store still writes and removes objects
_PLACE = "inode"  # a fact: where the history of events goes on; see recovery/opening.py
_WAITS = round(PATIENCE_S / PAUSE_S)  # of a commit for a bucket that is away


class _Away(Unavailable):
    """Whether the bucket has the commit is not known: it did not answer, or no memory was left to write it."""


class BucketCatalog(Catalog):
    """`only_looks`: nothing is written, and the store that runs is not disturbed. `accepts_older`: goes on where the
    newest objects are lost."""

    def __init__(
        self,
        bucket: Bucket,
        owner: BucketOwner,
        disk: Disk,
        now_unix_ms: Callable[[], int],
        *,
        only_looks: bool,
        accepts_older: bool = False,
    ) -> None:
        """Read the newest state, follow it, and start the thread. Raises DataLoss, Unavailable, FailedPrecondition."""
        super().__init__(now_unix_ms, partial(translated, catalog=bucket.where))
        self._bucket = bucket
        self._owner = owner
        self._disk = disk
        self._only_looks = only_looks
        self._accepts_older = accepts_older
        self._is_ahead = False  # the memory has a commit of which it is not known whether the bucket has it
        self._pending = b""  # that commit's image, if there was memory for it
        self._late: list[Callable[[], None]] = []  # done once it is known that the bucket has that commit
        self._is_away = False  # the bucket: the last commit waited for it in vain
        self._ending = threading.Event()
        self._is_followed = False  # by another store
        self.place = f"bucket {owner.store}"
        self._connection = self._opened()
        self._note = NewestNote(bucket)
        if not only_looks:
            self._note.set(self._state.number)
        self._threads = [threading.Thread(target=self._live, name="kvasir-index", daemon=True)]
        self._threads[0].start()

    check_listed = staticmethod(check_listed)

    def close(self) -> bool:
        self._ending.set()
        is_first = super().close()
        if is_first:
            self._note.close()
        return is_first

    def check_ours(self) -> None:
        self.read(HOUSE, lambda _: None)

    # --- the start ---

    def _opened(self) -> sqlite3.Connection:
        for _ in range(_TRIES):
            try:
                if not self._only_looks:
                    self._owner.check()  # another start may have made the last try fail
                self._state, is_older = newest(self._bucket, accepts_older=self._accepts_older)
                connection = _database(self._state.image)
                migrate(connection, self._now_unix_ms())
                if is_older:  # its events and leases went on without it
                    CatalogChange(connection).set_fact(_PLACE, "lost")
                if self._only_looks or self._follow(connection):
                    return connection
            except MemoryError:
                words = "there is no memory for the index, which a store in a bucket has in memory as a whole"
                raise Unavailable(words, reason="INDEX_FAILED", retry_after_s=RETRY_S) from None
            except BaseException as error:  # noqa: BLE001  it belongs to the opener of the store
                raise self._translated(error) from None
            connection.close()
        raise Unavailable("the index in the bucket changes all the time; stop the other store", reason="LOCKED")

    def _follow(self, connection: sqlite3.Connection) -> bool:
        """Write the mark of this start, behind which the store before can write nothing. False: it was quicker."""
        change = CatalogChange(connection)
        starts = [*(change.fact(_STARTS) or "").split(), f"{self._owner.start}:{self._state.number + 1}"]
        change.set_fact(_STARTS, " ".join(starts[-_MOST_STARTS:]))
        return self._ship(_image(connection)) and not self._is_given_up()

    def _is_given_up(self) -> bool:
        """Whether the last object's number was free because the store before gave up its own one for a newer image."""
        numbers = (number for number, kind in map(parsed, self._bucket.names(FOLDER)) if kind == WHOLE)
        return max(numbers, default=0) >= self._state.number

    # --- on the index thread ---

    def _live(self) -> None:
        while self._is_wanted(self._writes_came, self._reads, self._writes):
            self._take_reads(self._connection)
            self._take_writes(self._connection)
        self._connection.close()

    def _take_reads(self, connection: sqlite3.Connection) -> None:  # type: ignore[override]
        """Those that wait now, by one look at the owner of the bucket: so each sees every acknowledged write."""
        taken: list[Operation] = []
        while len(taken) < MAX_WRITES_PER_COMMIT and (operation := self._next(self._reads)):
            taken.append(operation)
        try:
            if taken:
                self._check_not_followed()
        except (KvasirError, OSError) as error:
            for operation in taken:
                operation.answer.set_exception(self._translated(error))
            return
        for operation in taken:
            self._read(connection, operation)

    def _check_not_followed(self) -> None:
        self._settle()
        if not self._only_looks:
            try:
                self._owner.check()
            except FailedPrecondition:
                self._is_followed = True
        self._check_open()

    def _write(  # type: ignore[override]
        self, connection: sqlite3.Connection, operations: list[Operation], more: Iterable[Operation] = ()
    ) -> None:
        try:
            answers = self._commit(connection, chain(tuple(operations), more))
        except KvasirError as error:
            for operation in operations:
                operation.answer.set_exception(error)
        except (sqlite3.Error, OSError) as error:
            # The transaction sank as a whole. Alone, each gets its own verdict.
            for operation in operations if len(operations) > 1 else ():
                self._write(connection, [operation])
            if len(operations) == 1:
                operations[0].answer.set_exception(self._translated(error))
        else:
            for answer in answers:
                answer()
            self._shorten()

    def _commit(self, connection: sqlite3.Connection, operations: Iterable[Operation]) -> list[Callable[[], None]]:
        """One transaction; the calls that answer the callers. When it raises, the bucket has nothing of it."""
        answers: list[Callable[[], None]] = []
        self._settle()
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation in operations:
                answers += self._in_savepoint(connection, operation, sqlite3.OperationalError)
            self._disk.reached("index: before commit")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._is_ahead = not self._only_looks
        try:
            self._settle()
        except _Away:
            self._late = answers
            raise
        self._disk.reached("index: after commit")
        return answers

    def _settle(self) -> None:
        """Write the commit that the bucket may lack. Raises Unavailable: another store followed (LOCKED), or the bucket
        is away (INDEX_FAILED, CLOSED), and until it is back, nothing is read or written."""
        if self._is_ahead and not self._is_followed:
            self._is_followed = True  # if anything else fails from here on, the memory has more than the bucket
            try:
                image = self._pending = self._pending or _image(self._connection)
                self._is_followed = image != self._state.image and not self._ship(image)
            except (_Away, MemoryError) as error:
                self._is_followed = False
                words = "there is no memory for the index's image: the last commit may take effect"
                no_room = _Away(words, reason="INDEX_FAILED", retry_after_s=RETRY_S)
                raise error if isinstance(error, _Away) else no_room from None
            self._is_ahead, self._pending = False, b""
            late, self._late = self._late, []
            for answer in () if self._is_followed else late:
                with suppress(InvalidStateError):  # its caller got the refusal
                    answer()
        self._check_open()

    def _check_open(self) -> None:
        if self._is_followed:
            raise Unavailable("another store has opened this bucket since; stop one of the two", reason="LOCKED")

    def _ship(self, image: bytes) -> bool:
        """Create the next object; whether it is ours, and counts. Waits a while for the bucket: nobody learns that it
        took effect before that is known. Raises _Away."""
        start = self._owner.start.encode().ljust(START_BYTES)  # no other store writes the same bytes
        data = signed(self._state.chain, start + delta(self._state.image, image))
        waits = count()
        while True:
            try:
                if not self._create(name_of(self._state.number + 1, DELTA), data):
                    return False
            except OSError:
                if not self._threads:  # at the start nobody waits for an answer
                    raise
                if self._ending.wait(PAUSE_S):
                    words = "the store closed before the bucket answered: a commit may have taken effect"
                    raise _Away(words, reason="CLOSED") from None
                if self._is_away or next(waits) == _WAITS:
                    self._is_away = True
                    words = "the bucket of the index does not answer: the last commit may have taken effect"
                    raise _Away(words, reason="INDEX_FAILED", retry_after_s=RETRY_S) from None
                continue
            self._is_away = False
            self._state = replace(self._state, number=self._state.number + 1, chain=data[:DIGEST_BYTES], image=image)
            if self._threads:
                self._note.set(self._state.number)
            return True

    def _create(self, name: str, data: bytes) -> bool:
        """Whether the object is ours, and read by the store that starts next. Raises OSError: it is not known."""
        try:
            # Of a write that was sent twice, the second one finds the first one's bytes.
            if not self._bucket.put_new(name, data) and bytes(self._bucket.get(name, MOST_BYTES)) != data:
                return False
            self._owner.check()
        except (FileNotFoundError, FailedPrecondition) as error:
            # Another store followed, and may have given up the object.
            own, followers = self._starts()
            if own and not followers and isinstance(error, FileNotFoundError):
                raise  # nobody gave it up: the server called a name taken that it does not have
            return own > 0 and all(number > self._state.number + 1 for number in followers)
        return True

    def _starts(self) -> tuple[int, list[int]]:
        """The number of the first object of this start (0: it is not there), and of those behind it. A store that
        followed has read our next object if its own is behind that. Else the name was free again, because that store
        gave up its own object of the name for a newer image."""
        connection = _database(newest(self._bucket, accepts_older=True)[0].image)
        try:
            starts = [each.split(":") for each in (CatalogChange(connection).fact(_STARTS) or "").split()]
        finally:
            connection.close()
        numbers = {start: int(number) for start, number in starts}
        own = numbers.get(self._owner.start, 0)
        return own, [number for number in numbers.values() if number > own]

    def _shorten(self) -> None:
        """Write a whole image when many deltas lie behind the last one, and then remove these. After a failure the next
        commit tries it."""
        if self._only_looks or self._state.number - self._state.whole < _MOST_DELTAS:
            return
        try:
            state = self._state
            name, data = name_of(state.number, WHOLE), signed(b"", state.chain + delta(b"", state.image))
            self._bucket.put(name, data)
            if self._bucket.get(name, MOST_BYTES) != data:  # a gateway may answer, and forget
                return
            self._state = replace(state, whole=state.number)
            for number, kind in list(map(parsed, self._bucket.names(FOLDER))):
                if kind and (number, kind) < (self._state.whole, WHOLE):
                    self._bucket.remove(name_of(number, kind))
        except OSError:
            return


def _image(connection: sqlite3.Connection) -> bytes:
    try:
        return connection.serialize()
    except sqlite3.Error as error:  # SQLite has no error of its own for this
        raise MemoryError(str(error)) from None


def _database(image: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=256)
    if image:
        connection.deserialize(image)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA temp_store=MEMORY")
    return connection

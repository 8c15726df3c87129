"""The catalog in a bucket, for a store without a database and without a disk that lasts. It is in memory; each group of
writes is an object with the pages that it changed, created under the next number before anybody is answered.

Only one writer creates a number. So a store that another one followed cannot commit: it answers nothing more (LOCKED).
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from kvasir.errors import FailedPrecondition, KvasirError, Unavailable
from kvasir.waits import PAUSE_S

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.bucket_blobs import places_of
from cachestore_svc.blobs.bucket.owning import BucketOwner
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.database.failures import translated
from cachestore_svc.index.sqlite.database.migrations import migrate
from cachestore_svc.index.sqlite.in_bucket.pages import DIGEST_BYTES, WrongPages, delta, followed, opened, signed
from cachestore_svc.index.sqlite.operations import MAX_WRITES_PER_COMMIT, Catalog, Operation
from cachestore_svc.index.sqlite.transaction import CatalogChange
from cachestore_svc.index.values import HOUSE

FOLDER = "index"
_DELTA, _WHOLE = "pages", "whole"
_MOST_BYTES = 1 << 40  # of an object: all of it
_START_BYTES = 32  # a start's name, in each of its deltas
_MOST_DELTAS = 100  # behind a whole image, which a start reads one by one
_STARTS, _MOST_STARTS = "starts", 100  # a fact: the last starts, START:NUMBER of its first object
_TRIES = 20  # to read, while another store still writes and removes objects


class BucketCatalog(Catalog):
    """`only_looks`: nothing is written, and the store that runs is not disturbed."""

    def __init__(
        self, bucket: Bucket, owner: BucketOwner, disk: Disk, now_unix_ms: Callable[[], int], *, only_looks: bool
    ) -> None:
        """Read the newest state, follow it, and start the thread. Raises DataLoss, Unavailable, FailedPrecondition."""
        super().__init__(now_unix_ms, partial(translated, catalog=bucket.where))
        self._bucket = bucket
        self._owner = owner
        self._disk = disk
        self._only_looks = only_looks
        self._ending = threading.Event()
        self._is_followed = False  # by another store
        self.place = f"bucket {owner.store}"
        self._connection = self._opened()
        self._threads = [threading.Thread(target=self._live, name="kvasir-index", daemon=True)]
        self._threads[0].start()

    def close(self) -> bool:
        self._ending.set()
        return super().close()

    def check_ours(self) -> None:
        self.read(HOUSE, lambda _: None)

    # --- the start ---

    def _opened(self) -> sqlite3.Connection:
        for _ in range(_TRIES):
            try:
                if not self._only_looks:
                    self._owner.check()  # another start may have made the last try fail
                has_blobs = bool(places_of(self._bucket))  # before the index: each is written after its first object
                self._state = _newest(self._bucket)
                if has_blobs and not self._state.number:
                    raise index_damaged("the bucket has blobs, and no object of their index", self._bucket.where)
                connection = _database(self._state.image)
                migrate(connection, self._now_unix_ms())
                if self._only_looks or self._follow(connection):
                    return connection
            except BaseException as error:  # noqa: BLE001  it belongs to the opener of the store
                raise self._translated(error) from None
            connection.close()
        raise Unavailable("the index in the bucket changes all the time; stop the other store", reason="LOCKED")

    def _follow(self, connection: sqlite3.Connection) -> bool:
        """Write the mark of this start, behind which the store before can write nothing. False: it was quicker."""
        change = CatalogChange(connection)
        starts = [*(change.fact(_STARTS) or "").split(), f"{self._owner.start}:{self._state.number + 1}"]
        change.set_fact(_STARTS, " ".join(starts[-_MOST_STARTS:]))
        return self._ship(connection.serialize()) and not self._is_given_up()

    def _is_given_up(self) -> bool:
        """Whether the last object's number was free because the store before gave up its own one for a newer image."""
        numbers = (number for number, kind in map(_parsed, self._bucket.names(FOLDER)) if kind == _WHOLE)
        return max(numbers, default=0) >= self._state.number

    # --- on the index thread ---

    def _live(self) -> None:
        while self._is_wanted(self._reads, self._writes):
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
        self._check_open()
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
        image = connection.serialize()
        if image != self._state.image and not self._only_looks:
            self._is_followed = True  # if anything fails from here on, the memory has more than the bucket
            self._is_followed = not self._ship(image)
            self._check_open()
        self._disk.reached("index: after commit")
        return answers

    def _check_open(self) -> None:
        if self._is_followed:
            raise Unavailable("another store has opened this bucket since; stop one of the two", reason="LOCKED")

    def _ship(self, image: bytes) -> bool:
        """Create the next object; whether it is ours, and counts. Waits for the bucket while the store is open:
        nobody is answered before that is known. Raises Unavailable (CLOSED)."""
        start = self._owner.start.encode().ljust(_START_BYTES)  # no other store writes the same bytes
        data = signed(self._state.chain, start + delta(self._state.image, image))
        while True:
            try:
                if not self._create(_name(self._state.number + 1, _DELTA), data):
                    return False
            except OSError:
                if not self._threads:  # at the start nobody waits for an answer
                    raise
                if self._ending.wait(PAUSE_S):
                    words = "the store closed before the bucket answered: a commit may have taken effect"
                    raise Unavailable(words, reason="CLOSED") from None
                continue
            self._state = replace(self._state, number=self._state.number + 1, chain=data[:DIGEST_BYTES], image=image)
            return True

    def _create(self, name: str, data: bytes) -> bool:
        """Whether the object is ours, and read by the store that starts next. Raises OSError: it is not known."""
        try:
            # Of a write that was sent twice, the second one finds the first one's bytes.
            if not self._bucket.put_new(name, data) and bytes(self._bucket.get(name, _MOST_BYTES)) != data:
                return False
            self._owner.check()
        except (FileNotFoundError, FailedPrecondition):  # another store followed; it may have given up the object
            return self._is_before_follower()
        return True

    def _is_before_follower(self) -> bool:
        """Whether the store that followed has read our next object. Else the name was free again, because that store
        gave up its own object of the name for a newer image."""
        connection = _database(_newest(self._bucket).image)
        try:
            starts = [each.split(":") for each in (CatalogChange(connection).fact(_STARTS) or "").split()]
        finally:
            connection.close()
        numbers = {start: int(number) for start, number in starts}
        own = numbers.get(self._owner.start, 0)
        return own > 0 and all(number <= own or number > self._state.number + 1 for number in numbers.values())

    def _shorten(self) -> None:
        """Write a whole image when many deltas lie behind the last one, and then remove these. After a failure the next
        commit tries it."""
        if self._only_looks or self._state.number - self._state.whole < _MOST_DELTAS:
            return
        try:
            state = self._state
            self._bucket.put(_name(state.number, _WHOLE), signed(b"", state.chain + delta(b"", state.image)))
            self._state = replace(state, whole=state.number)
            for number, kind in list(map(_parsed, self._bucket.names(FOLDER))):
                if kind and (number, kind) < (self._state.whole, _WHOLE):
                    self._bucket.remove(_name(number, kind))
        except OSError:
            return


@dataclass(frozen=True)
class _State:
    """The content of the bucket: number and digest of the last object, the image behind it, and the last whole one."""

    number: int = 0
    chain: bytes = b""
    image: bytes = b""
    whole: int = 0


def _newest(bucket: Bucket) -> _State:
    """The newest whole image, and the deltas behind it. Raises DataLoss, and OSError: the bucket does not answer."""
    lacks = ""
    for _ in range(_TRIES):
        try:
            return _read(bucket)
        except FileNotFoundError as error:  # a newer image took its place after the listing
            lacks = str(error)
    raise index_damaged(f"the bucket lacks {lacks}", bucket.where)


def _read(bucket: Bucket) -> _State:
    found = [_parsed(name) for name in bucket.names(FOLDER)]
    last, _ = max(found, default=(0, ""))
    number = whole = max((number for number, kind in found if kind == _WHOLE), default=0)
    chain, image = b"", b""
    try:
        if whole:
            data, _ = opened(b"", _object(bucket, whole, _WHOLE))
            chain, image = data[:DIGEST_BYTES], followed(b"", data[DIGEST_BYTES:])
        while number < last:
            data, chain = opened(chain, _object(bucket, number + 1, _DELTA))
            number, image = number + 1, followed(image, data[_START_BYTES:])
    except WrongPages as error:
        raise index_damaged(f"object {number + 1}: {error}", bucket.where) from None
    return _State(number, chain, image, whole)


def _object(bucket: Bucket, number: int, kind: str) -> bytes:
    return bytes(bucket.get(_name(number, kind), _MOST_BYTES))


def _database(image: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=256)
    if image:
        connection.deserialize(image)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA temp_store=MEMORY")
    return connection


def _name(number: int, kind: str) -> str:
    return f"{FOLDER}/{number:012d}.{kind}"


def _parsed(name: str) -> tuple[int, str]:
    """Number and kind of an object; 0 and none for a foreign one."""
    number, _, kind = name.partition(".")
    return (int(number), kind) if number.isdigit() and kind in (_DELTA, _WHOLE) else (0, "")

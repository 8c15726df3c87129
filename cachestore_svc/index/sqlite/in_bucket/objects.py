"""The objects of an index in a bucket: whole images, the deltas behind them, and a note of the newest number.

A lost object in the middle breaks the chain of digests. The note tells when the newest one is lost."""

import re
import threading
from dataclasses import dataclass

from kvasir.waits import RETRY_S

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.bucket_blobs import places_of
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.in_bucket.pages import DIGEST_BYTES, WrongPages, followed, opened

FOLDER = "index"
DELTA, WHOLE = "pages", "whole"
MOST_BYTES = 1 << 40  # of an object: all of it
START_BYTES = 32  # a start's name, in each of its deltas
NEWEST = "kvasir-index"  # the note
_NAME = re.compile(rf"([0-9]{{12,18}})\.({DELTA}|{WHOLE})")
_TRIES = 20  # to read, while another store still writes and removes objects


@dataclass(frozen=True)
class State:
    """The content of the bucket: number and digest of the last object, the image behind it, and the last whole one."""

    number: int = 0
    chain: bytes = b""
    image: bytes = b""
    whole: int = 0


class NewestNote:
    """Notes the newest number in the bucket, on a thread of its own: no commit waits for it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._gate = threading.Condition()
        self._number = self._noted = 0
        self._is_ended = False
        self._thread: threading.Thread | None = None

    def set(self, number: int) -> None:
        """Note this number, or a newer one that comes meanwhile."""
        with self._gate:
            self._number = number
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name="kvasir-index-note", daemon=True)
                self._thread.start()
            self._gate.notify_all()

    def close(self) -> None:
        """Returns once the last number is noted, or the bucket did not answer."""
        with self._gate:
            self._is_ended = True
            self._gate.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        while True:
            with self._gate:
                self._gate.wait_for(lambda: self._is_ended or self._number != self._noted)
                number, is_ended = self._number, self._is_ended
            try:
                if number != self._noted:
                    self._bucket.put(NEWEST, str(number).encode())
                    self._noted = number
            except OSError:  # the next commit, or the next start, notes a newer one
                with self._gate:
                    self._gate.wait_for(lambda: self._is_ended, RETRY_S)
            if is_ended:
                return


def noted_newest(bucket: Bucket) -> int:
    try:
        text, _ = bucket.get_tagged(NEWEST, 20)
    except FileNotFoundError:  # of a version that wrote none
        return 0
    return int(text) if text.isdigit() else 0


def check_listed(bucket: Bucket, *, accepts_older: bool) -> None:
    """For a start, before it takes the bucket from a store that may run. Raises DataLoss: the index is lost, or, unless
    the start `accepts_older`, its newest objects are; and OSError."""
    has_blobs = bool(places_of(bucket))  # before the index: each is written after its first object
    noted = noted_newest(bucket)
    newest_number = max((number for number, _ in map(parsed, bucket.names(FOLDER))), default=0)
    _check_newest(bucket, newest_number, noted, has_blobs=has_blobs, accepts_older=accepts_older)


def newest(bucket: Bucket, *, accepts_older: bool = False) -> tuple[State, bool]:
    """The newest whole image, and the deltas behind it; and whether newer ones are lost. Raises as `check_listed`."""
    has_blobs, noted = bool(places_of(bucket)), noted_newest(bucket)
    state = _read_newest(bucket)
    _check_newest(bucket, state.number, noted, has_blobs=has_blobs, accepts_older=accepts_older)
    return state, state.number < noted


def name_of(number: int, kind: str) -> str:
    return f"{FOLDER}/{number:012d}.{kind}"


def parsed(name: str) -> tuple[int, str]:
    """Number and kind of an object; 0 and none for a foreign one."""
    known = _NAME.fullmatch(name)
    return (int(known[1]), known[2]) if known else (0, "")


def _check_newest(bucket: Bucket, number: int, noted: int, *, has_blobs: bool, accepts_older: bool) -> None:
    if has_blobs and not number:
        raise index_damaged("the bucket has blobs, and no object of their index", bucket.where)
    if number < noted and not (accepts_older and number):
        words = f"object {noted} was written, and {number} is the newest there (--accept-older goes on there)"
        raise index_damaged(words, bucket.where)


def _read_newest(bucket: Bucket) -> State:
    lacks = ""
    for _ in range(_TRIES):
        try:
            return _read(bucket)
        except FileNotFoundError as error:  # a newer image took its place after the listing
            lacks = str(error)
    raise index_damaged(f"the bucket lacks {lacks}", bucket.where)


def _read(bucket: Bucket) -> State:
    found = [parsed(name) for name in bucket.names(FOLDER)]
    last, _ = max(found, default=(0, ""))
    number = whole = max((number for number, kind in found if kind == WHOLE), default=0)
    chain, image = b"", b""
    try:
        if whole:
            data, _ = opened(b"", _object(bucket, whole, WHOLE))
            chain, image = data[:DIGEST_BYTES], followed(b"", data[DIGEST_BYTES:])
        while number < last:
            data, chain = opened(chain, _object(bucket, number + 1, DELTA))
            number, image = number + 1, followed(image, data[START_BYTES:])
    except WrongPages as error:
        raise index_damaged(f"object {number + 1}: {error}", bucket.where) from None
    return State(number, chain, image, whole)


def _object(bucket: Bucket, number: int, kind: str) -> bytes:
    return bytes(bucket.get(name_of(number, kind), MOST_BYTES))

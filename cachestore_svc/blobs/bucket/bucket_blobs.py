"""Blobs as objects of a bucket, PLACE/HASH, or PLACE/again/HASH/EDITION where the name before is still being removed.
All editions have the same bytes: a reader takes any. Parts arrive on the local disk; a blob is published once the
bucket has it.

Nothing is removed, and nothing that was written is acknowledged, but by the store that has the bucket: see `owning` and
`catalogs_bucket`."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from itertools import chain

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Aside, Damaged, Listing, Part
from cachestore_svc.blobs.bucket.bucket import Bucket, put_blob
from cachestore_svc.blobs.bucket.catalogs_bucket import CatalogOwner
from cachestore_svc.blobs.bucket.disk_tier import DiskTier
from cachestore_svc.blobs.bucket.owning import BucketOwner
from cachestore_svc.blobs.disk import refusal
from cachestore_svc.blobs.local_directory import LocalBlobs, LocalDirectory

_PLACE = re.compile(r"[0-9a-f]{32}")
_AGAIN = "again"  # the folder of later editions, HASH/EDITION
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_EDITION = re.compile(r"[1-9][0-9]{0,8}")
_LATER_NAME = re.compile(rf"{_AGAIN}/([0-9a-f]{{64}})/({_EDITION.pattern})")
_ASIDE_NAME = re.compile(r"([0-9a-f]{64})\.aside-([0-9]{1,15})")
_WRITES = 8  # objects of a group that are written at the same time
_NAMES_AT_ONCE = 500  # of copies that are looked up


def places_of(bucket: Bucket) -> set[str]:
    """Of the namespaces that have objects."""
    return {name for name in bucket.folders() if _PLACE.fullmatch(name)}


class BucketBlobs:
    """Implements `BlobBackend`. `arriving`: where parts lie until their bytes are in the bucket."""

    is_shared = True

    def __init__(
        self, bucket: Bucket, owner: BucketOwner | CatalogOwner, arriving: LocalDirectory, tier: DiskTier
    ) -> None:
        self.bucket = bucket
        self.owner = owner
        self._arriving = arriving
        self._tier = tier

    @property
    def where(self) -> str:
        return self.bucket.where

    def of(self, namespace: str) -> "BlobsOfNamespace":
        return self._at(self._arriving.of(namespace))

    def all(self) -> list["BlobsOfNamespace"]:
        """Namespaces that have objects, or parts that arrive."""
        places = {each.place for each in self._arriving.all()}
        places |= places_of(self.bucket)
        return [self._at(self._arriving.at(place)) for place in sorted(places)]

    def remove_aside(self, aside: Aside) -> int:
        self.owner.check()
        name = f"{aside.place}/{_aside_name(aside)}"
        size_bytes = self.bucket.size_bytes(name) or 0
        self.bucket.remove(name)
        return size_bytes

    def drop_copies(self, listed: Callable[[str, Sequence[str]], Collection[str]]) -> None:
        for place, names in self._tier.names().items():
            for start in range(0, len(names), _NAMES_AT_ONCE):
                some = names[start : start + _NAMES_AT_ONCE]
                for name in {*some}.difference(listed(place, some)):
                    self._tier.remove(place, name)

    def _at(self, arriving: LocalBlobs) -> "BlobsOfNamespace":
        return BlobsOfNamespace(self.bucket, self.owner, arriving, self._tier)


class BlobsOfNamespace:
    """Implements `NamespaceBlobs`."""

    def __init__(self, bucket: Bucket, owner: BucketOwner | CatalogOwner, arriving: LocalBlobs, tier: DiskTier) -> None:
        self._bucket = bucket
        self._owner = owner
        self._arriving = arriving
        self._tier = tier
        self.place = arriving.place

    def exists(self) -> bool:
        return self._arriving.exists() or bool(self._bucket.names(self.place, only_some=True))

    def expect(self) -> bool:
        return True

    def prepare(self, hashes: Sequence[str]) -> None:
        self._arriving.prepare(hashes)

    def begin(self, hash_: str) -> Part:
        return self._arriving.begin(hash_)

    def receive_files(self) -> None:
        self._arriving.receive_files()

    def take(self, digest: Digest, token: str) -> Part:
        return self._arriving.take(digest, token)

    def handed(self) -> set[str]:
        return self._arriving.handed()

    def remove_handed(self, token: str) -> None:
        self._arriving.remove_handed(token)

    def publish(self, editions: Mapping[str, int]) -> None:
        """All are in the bucket on return. Objects of a group that failed stay without a row, as after a crash."""
        with ThreadPoolExecutor(min(_WRITES, len(editions))) as pool:
            list(pool.map(self._publish, editions, editions.values()))
        self._owner.check()

    def read(self, digest: Digest, *, past_copies: bool = False) -> memoryview:
        copy = None if past_copies else self._tier.get(self.place, digest.hash, digest)
        if copy is not None:
            return copy
        problem = ""
        for data in self._editions(digest.hash, digest.size_bytes + 1):
            if not (problem := _problem(data, digest)):
                break
        if problem:
            raise Damaged(problem)
        if not past_copies:  # a scrub would give up those that were used last
            self._tier.put(self.place, digest.hash, data, digest)
        return data

    def bytes_of(self, hash_: str, most_bytes: int, *, past_copies: bool = False) -> memoryview:
        copy = self._tier.get(self.place, hash_)
        if copy is not None and not past_copies:
            return copy[:most_bytes]
        data = next(self._editions(hash_, most_bytes))
        if copy is not None and copy != data:  # only the caller's key tells which is damaged
            self._tier.remove(self.place, hash_)
        elif len(data) < most_bytes and not past_copies:  # all of it
            self._tier.put(self.place, hash_, data)
        return data[:most_bytes]

    def unverified(self, hash_: str, most_bytes: int) -> Iterator[tuple[memoryview, Aside | None]]:
        for name, aside in self._copies(hash_):
            try:
                data = self._bucket.get(self._object(name), most_bytes + 1)
            except FileNotFoundError:  # a bucket that does not answer has lost nothing: that is raised
                continue
            if len(data) <= most_bytes:
                yield data, aside

    def _copies(self, hash_: str) -> Iterator[tuple[str, Aside | None]]:
        """Names of a blob's objects. The bucket is listed only where those before are not enough: for each blob of a
        recovery that would be most of its time."""
        yield hash_, None
        yield from ((_name(hash_, edition), None) for edition in self._later(hash_))
        yield from ((_aside_name(each), each) for each in self.list().asides if each.hash == hash_)

    def size_bytes(self, hash_: str) -> int | None:
        size = self._bucket.size_bytes(self._object(hash_))
        for edition in self._later(hash_) if size is None else ():
            if (size := self._bucket.size_bytes(self._object(hash_, edition))) is not None:
                break
        return size

    def remove(self, hash_: str, edition: int = 0) -> None:
        self._owner.check()
        self._tier.remove(self.place, hash_)
        self._bucket.remove(self._object(hash_, edition))

    def remove_part(self, hash_: str) -> None:
        self._arriving.remove_part(hash_)

    def set_aside(self, hash_: str, now_unix_ms: int, edition: int = 0) -> Aside:
        self._owner.check()
        aside = Aside(self.place, hash_, now_unix_ms)
        while self._bucket.size_bytes(self._object(_aside_name(aside))) is not None:  # another edition's, of which one
            aside = Aside(self.place, hash_, aside.since_unix_ms + 1)  # may be damaged: both stay
        self._tier.remove(self.place, hash_)
        self._bucket.rename(self._object(hash_, edition), self._object(_aside_name(aside)))
        return aside

    def restore(self, aside: Aside) -> None:
        self._owner.check()
        with suppress(FileNotFoundError):  # another process was first
            self._bucket.rename(self._object(_aside_name(aside)), self._object(aside.hash))

    def list(self) -> Listing:
        """Raises OSError where the bucket does not answer: a part of a list would look like a loss."""
        listing = Listing(parts=self._arriving.list().parts)
        for name in self._bucket.names(self.place):
            if _BLOB_NAME.fullmatch(name):
                listing.blobs.add(name)
                listing.editions.setdefault(name, set()).add(0)
            elif later := _LATER_NAME.fullmatch(name):
                listing.blobs.add(later[1])
                listing.editions.setdefault(later[1], set()).add(int(later[2]))
            elif aside := _ASIDE_NAME.fullmatch(name):
                listing.asides.add(Aside(self.place, aside[1], int(aside[2])))
            else:
                listing.strange.append(name)
        return listing

    def naming(self, *hashes: str) -> AbstractContextManager[object]:
        return self._arriving.naming(*hashes)

    def _publish(self, hash_: str, edition: int) -> None:
        part = self._arriving.begin(hash_)
        try:
            data = b"".join(map(bytes, part.pieces()))  # each piece lasts until the next
        finally:
            part.close()
        name = self._object(hash_, edition)
        # What lies there may be damaged: then the new bytes take its place.
        if not put_blob(self._bucket, name, data) and not self._has(name, data):
            self._bucket.put(name, data)
        self._tier.put(self.place, hash_, data)

    def _has(self, name: str, data: bytes) -> bool:
        """Another process may have removed the object meanwhile."""
        with suppress(FileNotFoundError):
            return self._bucket.get(name, len(data) + 1) == data
        return False

    def _editions(self, hash_: str, most_bytes: int) -> Iterator[memoryview]:
        """The bytes of a blob's objects: of its first edition, then of the others, the newest one first. Raises
        FileNotFoundError where there is none, Unavailable where the bucket does not answer."""
        is_found = False
        try:
            for edition in chain((0,), self._later(hash_)):
                with suppress(FileNotFoundError):  # it may have been removed since
                    data = self._bucket.get(self._object(hash_, edition), most_bytes)
                    is_found = True
                    yield data
        except OSError as error:
            raise refusal(error, f"blob {hash_}") from error
        if not is_found:
            raise FileNotFoundError(hash_)

    def _later(self, hash_: str) -> Iterator[int]:
        """Editions of a blob behind its first, the newest one first. Lists the bucket where the first is wanted."""
        names = self._bucket.names(f"{self.place}/{_AGAIN}/{hash_}")
        yield from sorted((int(name) for name in names if _EDITION.fullmatch(name)), reverse=True)

    def _object(self, name: str, edition: int = 0) -> str:
        return f"{self.place}/{_name(name, edition)}"


def _name(hash_: str, edition: int) -> str:
    return f"{_AGAIN}/{hash_}/{edition}" if edition else hash_


def _problem(data: memoryview, digest: Digest) -> str:
    if len(data) != digest.size_bytes:
        return f"expected {digest.size_bytes} bytes, found {len(data)} or more"
    return "" if Digest.of(data) == digest else "its bytes have another digest"


def _aside_name(aside: Aside) -> str:
    return f"{aside.hash}.aside-{aside.since_unix_ms}"

"""The port to blobs' bytes. A backend knows namespaces and hashes; its caller verifies what it writes, and publishes,
removes and renames only under `naming`. Each method raises OSError where the medium fails. tests/cachestore/any_backend
has every implementation.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvasir.errors import InvalidArgument
from kvasir.formats.digest import Digest


class Damaged(Exception):
    """The bytes are not those of the digest, or the medium lost them."""


class NotHanded(InvalidArgument):
    """There is no file of this token. Nothing was touched."""

    def __init__(self, why: str = "there is no such file") -> None:
        super().__init__(f"handed: {why}", field="handed")


class Aside(NamedTuple):
    """Bytes that the catalog did not list: they rest under a name of their own, and then go."""

    place: str  # of which namespace; see NamespaceBlobs.place
    hash: str
    since_unix_ms: int


@dataclass
class Listing:
    blobs: set[str] = field(default_factory=set)  # hashes
    parts: set[str] = field(default_factory=set)  # hashes of blobs that are not whole yet
    asides: set[Aside] = field(default_factory=set)
    strange: list[str] = field(default_factory=list)  # names that the store never gives
    editions: dict[str, set[int]] = field(default_factory=dict)  # of blobs, where the backend has several


class Part(Protocol):
    """A blob's bytes on their way in. They stay when the process ends, whole or not."""

    def pieces(self) -> Iterator[memoryview]:
        """Bytes that an interrupted write left, from the start. Each piece lasts until the next."""

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes. When this raises, some of them may have been added: then cut."""

    def cut(self, size_bytes: int) -> None:
        """Take back what an `append` that raised added beyond this size, which the part had before."""

    def begin_sync(self) -> None:
        """No more bytes come: begin `sync`, which then waits for it, where it goes on beside other work."""

    def sync(self) -> None:
        """All bytes survive a loss of power on return."""

    def close(self) -> int:
        """Let go of the part. It stays, to be gone on with or published; how many of its bytes do."""


class NamespaceBlobs(Protocol):
    """The blobs of one namespace. From any thread."""

    @property
    def place(self) -> str:
        """Names the namespace in the backend. The namespace's own name cannot be derived from it."""

    def exists(self) -> bool:
        """Whether anything was ever kept here."""

    def expect(self) -> bool:
        """There are blobs here by the index: whether they can be. An empty directory is taken for the place of a disk
        that is away, as a link that leads nowhere: until one is mounted there, nothing is written to it."""

    def prepare(self, hashes: Sequence[str]) -> None:
        """Make the directories of all these blobs at once, as `begin` would for each."""

    def begin(self, hash_: str) -> Part:
        """Begin the blob's part, or go on with it."""

    def receive_files(self) -> None:
        """Make the directory into which a caller on this host, of this user, may write whole blobs for `take`."""

    def take(self, digest: Digest, token: str) -> Part:
        """Make a file that a caller wrote the blob's part. Raises NotHanded, and InvalidArgument (handed)."""

    def handed(self) -> set[str]:
        """Tokens of files that wait to be taken."""

    def remove_handed(self, token: str) -> None:
        """Remove a file that nobody takes, if it is still there."""

    def publish(self, editions: Mapping[str, int]) -> None:
        """Make parts the blobs of these hashes, durably but for bytes whose sync has only begun. Replaces a blob that
        has hash and edition, which is 0 where the backend is not shared. Where it is, the part stays."""

    def read(self, digest: Digest, *, past_copies: bool = False) -> memoryview:
        """The blob's bytes, verified. Raises Damaged, FileNotFoundError (see `naming`), and Unavailable. `past_copies`:
        those of the medium, though a copy lies before it."""

    def bytes_of(self, hash_: str, most_bytes: int, *, past_copies: bool = False) -> memoryview:
        """The first bytes that lie here as the blob, at most so many. Raises as `read`."""

    def unverified(self, hash_: str, most_bytes: int) -> Iterator[tuple[memoryview, Aside | None]]:
        """Bytes that lie here as the blob, and as an aside of it. Longer bytes are left out, and those that the medium
        lost."""

    def size_bytes(self, hash_: str) -> int | None:
        """Size of the blob; None when there is none."""

    def remove(self, hash_: str, edition: int = 0) -> None:
        """Remove the blob, if it is here."""

    def remove_part(self, hash_: str) -> None:
        """Remove the blob's part, if there is one."""

    def set_aside(self, hash_: str, now_unix_ms: int, edition: int = 0) -> Aside:
        """Give a blob a name that no reader knows."""

    def restore(self, aside: Aside) -> None:
        """Give the blob its name back."""

    def list(self) -> Listing:
        """Everything that lies here."""

    def naming(self, *hashes: str) -> AbstractContextManager[object]:
        """A lock on blobs' names, held from publishing the blobs until the catalog lists them, and from looking one up
        there until it is removed: otherwise a sweep could remove a blob that was just written again. Only the catalog
        is locked inside it. No namespace waits for another. A backend that is shared has other writers, too: see
        `BlobBackend.is_shared`."""


class BlobBackend(Protocol):
    """The blobs of all namespaces. From any thread."""

    @property
    def is_shared(self) -> bool:
        """Whether another process may write and remove here. Then a removal is noted in the catalog first, and a name
        that is being removed is not used: a blob has editions, each with a name of its own."""

    @property
    def where(self) -> str:
        """Where the blobs lie, in words for people."""

    def of(self, namespace: str) -> NamespaceBlobs:
        """The blobs of a namespace, which may have none."""

    def all(self) -> Sequence[NamespaceBlobs]:
        """The places of all namespaces, of any name."""

    def remove_aside(self, aside: Aside) -> int:
        """Remove bytes that were set aside; how many."""

    def drop_copies(self, listed: Callable[[str, Sequence[str]], Collection[str]]) -> None:
        """Remove copies on the disk of objects that another process removed. `listed`: those of the names at a place
        that the catalog has."""


def unknown_places(backend: BlobBackend, namespaces: Callable[[], set[str]]) -> list[NamespaceBlobs]:
    places = backend.all()  # first: a namespace is known before anything of it is written
    known = {backend.of(namespace).place for namespace in namespaces()}
    return [blobs for blobs in places if blobs.place not in known]


def has_any(backend: BlobBackend) -> bool:
    return any(blobs.list().blobs for blobs in backend.all())

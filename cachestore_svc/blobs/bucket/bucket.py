"""A bucket of S3, one method per effect. It must refuse a second writer of a name: `probe` finds out at start.

Every failure but an absent object is an OSError. Texts name the kind of failure, and never a request: those are signed.
"""

import errno
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvasir.credentials import CredentialFileError, read_private_text
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.options.store import check_bucket
from kvasir.waits import ANSWER_S, HANGS_S, PATIENCE_S

from cachestore_svc.blobs.bucket.downlink import LEAST_BYTES, LOOPBACK, Downlink, NotPlain
from cachestore_svc.blobs.bucket.patience import Patience, Pieces, answer, lying, names_of
from cachestore_svc.blobs.bucket.uplink import Uplink

WRITERS = 16  # of a probe
_RACES = 3
_MULTIPART_BYTES = 16 << 20  # larger objects are written in parts, which become visible together
_PART_BYTES = 16 << 20
# Of a larger object that is there already, the refusal may be lost: the server closes before it has read all of it.
_READ_AT_ONCE_BYTES = 64 << 10
_PARTS_AT_ONCE = 3  # of an object: on a link of 1 MB/s each of them comes within HANGS_S
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_BUCKET = "NoSuchBucket"
# Where no answer came: what obstore's error names, whose other words have the signed request.
_KIND = re.compile(r"(?:kind|inner): (Connect|Timeout|BareRedirect)\b")
_KINDS = {
    "Connect": "nothing: there is no connection to its server",
    "Timeout": "nothing in time",
    "BareRedirect": "that it is in another region than the one given",
}
_FILE_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region", "endpoint_url")
_REQUEST_S, _CONNECT_S, _RETRIES = timedelta(seconds=HANGS_S), timedelta(seconds=ANSWER_S), 4
_LARGE_REQUEST_S = timedelta(minutes=15)  # an object of many parts that is created, or read, in one request
_SILENCE_S = timedelta(seconds=PATIENCE_S)


class Bucket:
    """Objects by name. `store`: of obstore; `patient`: the same, for requests that take longer; `reads`: for those that
    answer soon, or piece by piece; `downlink`: for large objects. From any thread."""

    def __init__(
        self, store: Any, where: str, patient: Any = None, reads: Any = None, downlink: Downlink | None = None
    ) -> None:
        import obstore

        self.where = where
        self._store = store
        self._patient = patient or store
        self._reads = reads or store
        self._downlink = downlink
        self._obstore = obstore
        self._errors = obstore.exceptions
        self._patience = Patience()
        self._uplink = Uplink()

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object that is not there, in one request; False where there is one already, perhaps by this write,
        if its answer was lost."""
        store = self._patient if len(data) > _MULTIPART_BYTES else self._store  # parts know no If-None-Match
        try:
            with self._writing(name, len(data)):
                self._obstore.put(store, name, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        except OSError:
            if len(data) <= _READ_AT_ONCE_BYTES or self.size_bytes(name) is None:
                raise
            return False
        return True

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object over what is there. A reader sees the one or the other."""
        if len(data) <= _MULTIPART_BYTES:
            with self._writing(name, len(data)):
                self._obstore.put(self._store, name, data, use_multipart=False)
            return
        parts = min(max(self._uplink.at_once_bytes // _PART_BYTES, 1), _PARTS_AT_ONCE)
        with self._writing(name, len(data), parts * _PART_BYTES) as moved:
            pieces = _pieces(memoryview(data), parts, moved)
            self._obstore.put(self._store, name, pieces, chunk_size=_PART_BYTES, max_concurrency=parts)

    def swap(self, name: str, data: bytes, tag: str) -> bool:
        """Replace the object that has this tag; False where it has another one by now, perhaps by this write, if its
        answer was lost. `data`: bytes that it never had, as many servers make a tag of them."""
        try:
            with self._writing(name, len(data)):
                self._obstore.put(self._store, name, data, mode={"e_tag": tag})
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def get_tagged(self, name: str, most_bytes: int) -> tuple[bytes, str]:
        """The first bytes of a small object, and the tag by which `swap` knows it. Raises FileNotFoundError."""
        with self._asking(name):
            found = self._obstore.get(self._reads, name)
            return bytes(self._patience.first_bytes(Pieces(found), name, most_bytes)), str(found.meta["e_tag"])

    def get(self, name: str, most_bytes: int) -> memoryview:
        """The first bytes of an object, at most so many. Raises FileNotFoundError."""
        with self._asking(name):
            if self._downlink is not None and most_bytes >= LEAST_BYTES:
                with suppress(NotPlain), self._downlink.coming(name) as coming:
                    return self._patience.first_bytes(coming, name, most_bytes)
            return self._patience.first_bytes(Pieces(self._obstore.get(self._reads, name)), name, most_bytes)

    def size_bytes(self, name: str) -> int | None:
        try:
            with self._asking(name):
                return int(self._obstore.head(self._reads, name)["size"])
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        try:
            with self._asking(name):
                self._obstore.delete(self._reads, name)
        except FileNotFoundError:
            return

    def rename(self, name: str, new: str) -> None:
        """A copy, and then, once that is seen, a removal: a crash between them leaves both."""
        with self._asking(name):
            self._obstore.copy(self._store, name, new)
        size_bytes = self.size_bytes(name)  # None: another process was first
        if size_bytes is not None and self.size_bytes(new) != size_bytes:
            raise lying("that it copied an object, which is not there", new)
        self.remove(name)

    def names(self, folder: str, *, only_some: bool = False) -> list[str]:
        """Names of the objects of a folder, without it, each once; `only_some`: its first ones are enough. The server
        may look at each object before it answers: it has as long as for a write."""
        with self._in_words(folder):
            found = names_of(self._obstore.list(self._store, folder), folder, only_some=only_some)
        return [name.removeprefix(f"{folder}/") for name in found]

    def folders(self) -> list[str]:
        what = "the list of namespaces"
        with self._in_words(what):
            listed = answer(partial(self._obstore.list_with_delimiter_async, self._store), what)
            return [str(each) for each in listed["common_prefixes"]]

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        with self._patience.asking(name), self._in_words(name):
            yield

    @contextmanager
    def _writing(self, name: str, size_bytes: int, at_once_bytes: int | None = None) -> Iterator[Callable[[], None]]:
        """For a block that sends an object, so many bytes of it at once, and reports each part that was taken."""
        folder = name.partition("/")[0]
        with (
            self._uplink.sending(folder, size_bytes, at_once_bytes or size_bytes) as moved,
            self._patience.asking(name, writes=True) as answered,
            self._in_words(name),
        ):

            def taken() -> None:
                moved()
                answered()

            yield taken

    @contextmanager
    def _in_words(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, self._errors.NotFoundError) as error:
            if f"<Code>{_NO_BUCKET}<" in str(error):  # as where a server's disk is not mounted: no object is lost
                raise lying(_NO_BUCKET, name) from None
            raise FileNotFoundError(name) from error
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError) as error:
            raise FileExistsError(name) from error
        except self._errors.BaseError as error:
            known = _CODE.search(text := str(error)) or _KIND.search(text)
            raise lying(_KINDS.get(known[1], known[1]) if known else type(error).__name__, name) from None


def _pieces(data: memoryview, at_once: int, taken: Callable[[], None]) -> Iterator[memoryview]:
    """The parts of an object, of which so many go at once: of more, one was taken before the next is requested."""
    for number, start in enumerate(range(0, len(data), _PART_BYTES)):
        if number > at_once:
            taken()
        yield data[start : start + _PART_BYTES]


def put_blob(bucket: Bucket, name: str, data: bytes | memoryview) -> bool:
    """As `put_new`, but a large one after a look and in parts: nobody writes other bytes under a blob's name."""
    if len(data) <= _MULTIPART_BYTES:
        return bucket.put_new(name, data)
    if bucket.size_bytes(name) is not None:
        return False
    bucket.put(name, data)
    return True


def probe(bucket: Bucket, token_hex: Callable[[int], str]) -> None:
    """Let several writers race for one name, and for its replacement. Raises FailedPrecondition where other than one
    wins, OSError where that is not known."""

    def race(name: str, rule: str, write: Callable[[bytes], bool]) -> None:
        # Different bytes in each race: a tag may be a digest of the bytes, and would come back with them.
        sent = [f"{rule} {writer}".encode() for writer in range(WRITERS)]
        with ThreadPoolExecutor(WRITERS) as pool:
            won = list(pool.map(write, sent))
        if not any(won) and bytes(bucket.get(name, 64)) in sent:
            raise OSError(errno.EHOSTUNREACH, "the bucket's answer to a writer was lost", name)
        if sum(won) != 1 or bytes(bucket.get(name, 64)) != sent[won.index(True)]:
            raise FailedPrecondition(
                f"{bucket.where}: {sum(won)} of {WRITERS} writers of one object got it; expected 1. This server does "
                f"not hold {rule}, without which two stores could take one name: use one that does"
            )

    for _ in range(_RACES):
        name = f"probe/{token_hex(16)}"
        try:
            race(name, "If-None-Match", partial(bucket.put_new, name))
            tag = bucket.get_tagged(name, 0)[1]
            race(name, "If-Match", lambda data, name=name, tag=tag: bucket.swap(name, data, tag))  # type: ignore[misc]
        finally:
            bucket.remove(name)


def open_bucket(url: str, credentials_file: Path | None) -> Bucket:
    """The bucket at s3://BUCKET/PREFIX. Credentials, region and endpoint are the environment's (AWS_…), or of a file
    with lines `name = value`. Raises InvalidArgument (blobs, blob_credentials_file)."""
    try:
        check_bucket(url)
    except ValueError as error:
        raise InvalidArgument.of("blobs", error) from None
    parts = urlsplit(url)
    try:
        from obstore import sign
        from obstore.store import S3Store
    except ImportError:
        raise InvalidArgument.of("blobs", "a bucket needs the extra: pip install 'kvasir[fleet]'") from None
    config = _of_file(credentials_file) if credentials_file else {}
    host = urlsplit(config.get("endpoint_url", "")).hostname
    client: Any = {"connect_timeout": _CONNECT_S}
    if host in LOOPBACK:
        client["allow_http"] = True
    prefix = parts.path.strip("/") or None
    known: Any = {"endpoint" if name == "endpoint_url" else name: value for name, value in config.items()}

    def connected(longest: timedelta, silence: timedelta | None = None) -> Any:
        retries: Any = {"max_retries": _RETRIES, "retry_timeout": silence or longest}
        options: Any = {**client, "timeout": longest, **({"read_timeout": silence} if silence else {})}
        return S3Store(parts.netloc, prefix=prefix, client_options=options, retry_config=retries, **known)

    try:
        reads = connected(_LARGE_REQUEST_S, _SILENCE_S)
        downlink = Downlink(lambda name: str(sign(reads, "GET", name, _REQUEST_S)), _SILENCE_S.total_seconds())
        return Bucket(connected(_REQUEST_S), url, connected(_LARGE_REQUEST_S), reads, downlink)
    except Exception as error:  # noqa: BLE001  of obstore: a setting of the environment
        why = str(error).partition("\n")[0]
        raise InvalidArgument.of("blobs", f"{url} cannot be opened: {why}") from None


def _of_file(path: Path) -> dict[str, str]:
    try:
        lines = [line.strip() for line in read_private_text(path).splitlines()]
    except CredentialFileError as error:
        raise InvalidArgument.of("blob_credentials_file", error) from None
    found: dict[str, str] = {}
    for line in lines:
        if not line or line.startswith(("#", "[")):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or name not in _FILE_KEYS:  # the line may be a secret: it is not shown
            raise InvalidArgument.of(
                "blob_credentials_file", f"{path}: expected lines `name = value` with names of {', '.join(_FILE_KEYS)}"
            )
        found[name] = value
    return found

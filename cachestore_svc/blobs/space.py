"""How many bytes each namespace may still write: quotas and the reserve of the disk. Stored bytes are counted once at
start, by rows, and before each upload where other stores have the catalog, too; reserved bytes and parts only here, as
a restart removes parts. So stores that share a catalog exceed a quota together by no more than their open uploads.
"""

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from kvasir.errors import ResourceExhausted

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk, is_no_room, refusal
from cachestore_svc.facts.records import StoreConfig

# One namespace may have this part of the free disk reserved for blobs that are not whole yet, so that promises without
# bytes never take it from all others.
_SHARE = 4


class Space:
    def __init__(
        self,
        config: StoreConfig,
        disk: Disk,
        ballast: Ballast,
        stored_bytes: Mapping[str, int],
        stored_of: Callable[[str], int] | None = None,
    ) -> None:
        """`stored_of`: bytes of a namespace's blobs in a catalog that other stores change, too; None: no other does."""
        self._config = config
        self._disk = disk
        self._ballast = ballast
        self._lock = threading.Lock()
        self._stored: Counter[str] = Counter(stored_bytes)
        self._reserved: Counter[str] = Counter()
        self._stored_of = stored_of
        self._settled: Counter[str] = Counter()  # bytes that this store listed since its start

    def look(self, namespace: str) -> None:
        """Count the blobs of a namespace again, where other stores may have listed or unlisted some."""
        if self._stored_of is None:
            return
        with self._lock:
            before = self._settled[namespace]
        stored = self._stored_of(namespace)
        with self._lock:  # a blob that was listed meanwhile: better twice than never
            self._stored[namespace] = stored + self._settled[namespace] - before

    @contextlib.contextmanager
    def reserving(self, namespace: str) -> Iterator[Callable[[int], None]]:
        """Sets bytes aside for one write after the other, by one look at the disk. Raises ResourceExhausted, and
        Unavailable where the disk is gone."""
        with self._lock:
            free, kept = self.free_disk_bytes, self._kept_bytes()
            yield lambda size_bytes: self._reserve(namespace, size_bytes, free, kept)

    def shortage(self, namespace: str, size_bytes: int) -> int:
        """Bytes by which a write of this size would exceed the quota; 0 when it fits."""
        with self._lock:
            return self._quota_shortage(namespace, size_bytes)

    def release(self, namespace: str, size_bytes: int) -> None:
        with self._lock:
            self._reserved[namespace] -= size_bytes

    def settle(self, namespace: str, size_bytes: int) -> None:
        with self._lock:
            self._reserved[namespace] -= size_bytes
            self._stored[namespace] += size_bytes
            self._settled[namespace] += size_bytes

    def freed(self, namespace: str, size_bytes: int) -> None:
        with self._lock:
            self._stored[namespace] -= size_bytes

    @property
    def free_disk_bytes(self) -> int:
        """Raises Unavailable (DISK_FAILED): the data directory was on a disk that is gone."""
        try:
            return self._disk.free_bytes(self._config.data_dir)
        except OSError as error:
            raise refusal(error, "the data directory") from error

    @property
    def is_disk_full(self) -> bool:
        """Whether no byte may be written, beside the reserve and the promised bytes."""
        with self._lock:
            return self.free_disk_bytes <= self._reserved.total() + self._kept_bytes()

    @property
    def disk_failure(self) -> str:
        """Why no file can begin, as on a disk that the system made read-only after an error; empty if one can."""
        try:
            self._disk.try_file(self._config.data_dir)
        except OSError as error:
            is_of_disk = not is_no_room(error) and error.errno not in (errno.EMFILE, errno.ENFILE)
            return (error.strerror or str(error)) if is_of_disk else ""
        return ""

    def _kept_bytes(self) -> int:
        return self._config.free_disk_reserve_bytes + self._ballast.missing_bytes()

    def _reserve(self, namespace: str, size_bytes: int, free: int, kept: int) -> None:
        if shortage := self._quota_shortage(namespace, size_bytes):
            raise self._quota_full(namespace, size_bytes, shortage)
        most = max(self._config.max_blob_bytes, free // _SHARE)
        if self._reserved[namespace] + size_bytes > most:
            reserved = self._reserved[namespace]
            words = "are more than one namespace may have unfinished: let some writes end"
            text = f"disk: {reserved} bytes reserved and {size_bytes} requested {words}"
            raise _full("RESERVATIONS_FULL", text, 5, reserved=reserved, asked=size_bytes)
        # Reserved bytes may be on the disk already: counting them twice is on the safe side.
        left_bytes = free - self._reserved.total() - size_bytes - kept
        if left_bytes < 0:
            # Neither paths nor what others have: both may be unknown to the caller.
            text = f"disk: no room for {size_bytes} bytes more beside what must stay free (--free-disk-reserve-bytes)"
            raise _full("DISK_FULL", text, asked=size_bytes)
        self._check_share(namespace, size_bytes, left_bytes)
        self._reserved[namespace] += size_bytes

    def reserved_bytes(self, namespace: str) -> int:
        with self._lock:
            return self._reserved[namespace]

    def _check_share(self, namespace: str, size_bytes: int, left_bytes: int) -> None:
        """Without a quota, a namespace leaves to others as much as must stay free, whether there are any or not."""
        held = self._stored[namespace] + self._reserved[namespace]
        has_quota = self._config.quota_of(namespace) is not None
        kept = self._config.free_disk_reserve_bytes
        if not has_quota and held > kept and left_bytes < kept:
            words = "would leave nothing to namespaces that hold little: delete some, or give it a quota"
            text = f"disk: {held} bytes held and {size_bytes} requested {words}"
            raise _full("DISK_SHARE_FULL", text, held=held, asked=size_bytes)

    def _quota_shortage(self, namespace: str, size_bytes: int) -> int:
        quota = self._config.quota_of(namespace)
        if quota is None:
            return 0
        return max(0, self._stored[namespace] + self._reserved[namespace] + size_bytes - quota)

    def _quota_full(self, namespace: str, size_bytes: int, shortage: int) -> ResourceExhausted:
        quota = self._config.quota_of(namespace)
        stored, reserved = self._stored[namespace], self._reserved[namespace]
        text = f"{stored} bytes stored, {reserved} reserved, {size_bytes} requested are {shortage} more than {quota}"
        return _full("QUOTA_FULL", f"quota: {text}", quota=quota, stored=stored, reserved=reserved, asked=size_bytes)


def _full(reason: str, text: str, retry_after_s: int = 60, **sizes: int | None) -> ResourceExhausted:
    numbers = {f"{name}_bytes": str(size) for name, size in sizes.items()}
    return ResourceExhausted(text, reason=reason, retry_after_s=retry_after_s, metadata=numbers)

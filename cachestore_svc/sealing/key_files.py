"""The records of namespaces' keys in the data directory: two copies of each, replaced one after the other. A mark
beside the blobs, and sealed files, show that there must be a record: else a namespace that lost it would take plain
bytes.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from kvasir.formats.blob_place import namespace_place

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.sealing import keys
from cachestore_svc.sealing.keys import KeyRecord
from cachestore_svc.sealing.sealed_form import MAGIC

_COPIES = ("", ".copy")
_NEW_SUFFIX = ".new"
_MARK = "sealed"
_PLACE = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 16

Records = Mapping[str, KeyRecord | None]  # by place; None where a record must be, and none is whole


class KeyFiles:
    def __init__(self, data_dir: Path, disk: Disk) -> None:
        self._directory = data_dir / "keys"
        self._namespaces = data_dir / "namespaces"
        self._disk = disk

    def read(self) -> Records:
        """All records. Raises FailedPrecondition (DATA_TOO_NEW)."""
        kept = {name.split(".")[0] for name in self._disk.names(self._directory)}
        marked = {name for name in self._disk.names(self._namespaces) if self._is_marked(name)}
        return {place: self._read(place) for place in sorted(kept | marked) if _PLACE.fullmatch(place)}

    def begin(self, record: KeyRecord) -> None:
        """Keep the record of a namespace that has been nothing yet. Raises OSError."""
        self._make_mark(namespace_place(record.namespace))
        self.write(record)

    def write(self, record: KeyRecord) -> None:
        """Keep a record, durably, in each copy, over the old one's bytes. Raises OSError; then either may be kept."""
        self._disk.make_directory(self._directory)
        data = keys.to_bytes(record)
        for path in self._paths(namespace_place(record.namespace)):
            new = path.with_name(path.name + _NEW_SUFFIX)
            self._wipe(new)
            self._disk.remove(new)
            if self._bytes(path) == data:
                continue
            self._fill(new, data)
            self._wipe(path)
            self._disk.rename(new, path)
            self._disk.fsync_directory(self._directory)

    def repair(self, records: Records) -> list[str]:
        """Rewrite the records of which a copy or the mark is missing, damaged or older; returns their namespaces."""
        repaired = []
        for place, record in records.items():
            is_marked = self._disk.has(self._mark(place))
            data = keys.to_bytes(record) if record else b""
            if record and not (is_marked and all(self._bytes(path) == data for path in self._paths(place))):
                # Where even this cannot be written, the copy that is whole still opens the namespace.
                with contextlib.suppress(OSError):
                    self._make_mark(place)
                    self.write(record)
                    repaired.append(record.namespace)
        return repaired

    def _read(self, place: str) -> KeyRecord | None:
        found = [keys.from_bytes(self._bytes(path)) for path in self._paths(place)]
        whole = [record for record in found if record is not None and namespace_place(record.namespace) == place]
        return max(whole, key=lambda record: record.sequence, default=None)

    def _bytes(self, path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
        try:
            return bytes(self._disk.read(path, most_bytes))
        except OSError:
            return b""

    def _paths(self, place: str) -> list[Path]:
        return [self._directory / (place + copy) for copy in _COPIES]

    def _mark(self, place: str) -> Path:
        return self._namespaces / place / _MARK

    def _make_mark(self, place: str) -> None:
        mark = self._mark(place)
        self._disk.make_directory(mark.parent)
        self._fill(mark, b"")
        self._disk.fsync_directory(mark.parent)

    def _is_marked(self, place: str) -> bool:
        """Whether the namespace must be sealed: it has the mark, or the first of its files is sealed."""
        if self._disk.has(self._mark(place)):
            return True
        blobs = self._namespaces / place / "blobs"
        files = (blobs / part / name for part in self._disk.names(blobs) for name in self._disk.names(blobs / part))
        first = next((path for path in files if _FILE.fullmatch(path.name)), None)
        return first is not None and self._bytes(first, len(MAGIC)) == MAGIC

    def _wipe(self, path: Path) -> None:
        if size_bytes := self._disk.size_bytes(path):
            self._disk.overwrite(path, bytes(size_bytes))

    def _fill(self, path: Path, data: bytes) -> None:
        descriptor = self._disk.open_append(path)
        try:
            self._disk.write(descriptor, data)
            self._disk.fsync(descriptor)
        finally:
            self._disk.close(descriptor)

"""A namespace's key, as master keys wrap it: its record, and how it is opened, rotated and destroyed. Pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kvasir.errors import FailedPrecondition

from cachestore_svc.sealing.sealed_form import RandomBytes
from cachestore_svc.sealing.sealed_names import SealedNames

FORMAT = 1
KEY_BYTES = 32
_NONCE_BYTES = 12
_CHECKSUM_HEX = 32


class MasterKey:
    """The key that opens the keys of namespaces. It is in none of the store's files."""

    def __init__(self, secret: bytes, where: str) -> None:
        """`secret`: 32 bytes; `where` it is kept, in words for people."""
        self.where = where
        self.id = blake3(b"kvasir.master_key.v1", key=secret).hexdigest()[:16]  # identifies it, and shows nothing else
        self._aead = AESGCM(secret)

    def wrap(self, namespace: str, key: bytes, random_bytes: RandomBytes) -> "Wrapped":
        nonce = random_bytes(_NONCE_BYTES)
        return Wrapped(self.id, nonce, self._aead.encrypt(nonce, key, _bound_to(namespace)))

    def unwrap(self, namespace: str, wrapped: "Wrapped") -> bytes:
        """Raises InvalidTag."""
        return self._aead.decrypt(wrapped.nonce, wrapped.key, _bound_to(namespace))


@dataclass(frozen=True, slots=True)
class Wrapped:
    master_id: str
    nonce: bytes
    key: bytes


class NamespaceKey:
    def __init__(self, key: bytes) -> None:
        self.files = blake3(b"files", key=key).digest()
        self.names = SealedNames(blake3(b"names", key=key).digest())


@dataclass(frozen=True, slots=True)
class KeyRecord:
    namespace: str
    sequence: int  # grows with each change: of two copies the later one counts
    created_unix_ms: int
    wrapped: tuple[Wrapped, ...]
    erased_unix_ms: int = 0  # when the key was destroyed; 0: it was not

    def open(self, masters: Iterable[MasterKey]) -> bytes:
        """The namespace's key. Raises FailedPrecondition (NAMESPACE_SEALED), which names the remedy."""
        if self.erased_unix_ms:
            words = "its key was destroyed: its content cannot be read any more"
            raise sealed_error(self.namespace, words, self.erased_unix_ms)
        masters = list(masters)
        for master in masters:
            for wrapped in self.wrapped:
                if wrapped.master_id == master.id:
                    try:
                        return master.unwrap(self.namespace, wrapped)
                    except InvalidTag:
                        raise sealed_error(self.namespace, "its key record was changed: put a copy back") from None
        wanted = " or ".join(wrapped.master_id for wrapped in self.wrapped)
        if not masters:
            what = (
                "no master key was given: name it in --seal-key-file or --seal-keychain (KVASIR_STORE_SEAL_KEY_FILE, …)"
            )
        else:
            what = f"the master key in {masters[0].where} is another ({masters[0].id}): give the right one"
        raise sealed_error(self.namespace, f"it needs the master key {wanted}, and {what}")

    def wrapped_by(self, master: MasterKey, key: bytes, random_bytes: RandomBytes) -> "KeyRecord":
        others = tuple(wrapped for wrapped in self.wrapped if wrapped.master_id != master.id)
        return replace(
            self, sequence=self.sequence + 1, wrapped=(*others, master.wrap(self.namespace, key, random_bytes))
        )

    def only_by(self, master: MasterKey) -> "KeyRecord":
        kept = tuple(wrapped for wrapped in self.wrapped if wrapped.master_id == master.id)
        return replace(self, sequence=self.sequence + 1, wrapped=kept)

    def erased(self, now_unix_ms: int) -> "KeyRecord":
        return replace(self, sequence=self.sequence + 1, wrapped=(), erased_unix_ms=now_unix_ms)


def new_record(namespace: str, master: MasterKey, random_bytes: RandomBytes, now_unix_ms: int) -> KeyRecord:
    return KeyRecord(namespace, 1, now_unix_ms, (master.wrap(namespace, random_bytes(KEY_BYTES), random_bytes),))


def to_bytes(record: KeyRecord) -> bytes:
    data = json.dumps(
        {
            "format": FORMAT,
            "namespace": record.namespace,
            "sequence": record.sequence,
            "created_unix_ms": record.created_unix_ms,
            "erased_unix_ms": record.erased_unix_ms,
            "wrapped": [
                {"master": each.master_id, "nonce": each.nonce.hex(), "key": each.key.hex()} for each in record.wrapped
            ],
        }
    ).encode()
    return _checksum(data) + b" " + data + b"\n"


def from_bytes(data: bytes) -> KeyRecord | None:
    """The record; None when the bytes are not those of one. Raises FailedPrecondition (DATA_TOO_NEW)."""
    checksum, _, line = data.rstrip(b"\n").partition(b" ")
    if checksum != _checksum(line):
        return None
    found: dict[str, Any] = json.loads(line)
    if found["format"] != FORMAT:
        raise FailedPrecondition(
            f"the key of namespace {found['namespace']!r} is of a newer Kvasir", reason="DATA_TOO_NEW"
        )
    wrapped = tuple(
        Wrapped(each["master"], bytes.fromhex(each["nonce"]), bytes.fromhex(each["key"])) for each in found["wrapped"]
    )
    return KeyRecord(found["namespace"], found["sequence"], found["created_unix_ms"], wrapped, found["erased_unix_ms"])


def sealed_error(namespace: str, words: str, erased_unix_ms: int = 0) -> FailedPrecondition:
    """`erased_unix_ms`: when its key was destroyed; programs see by it that they may keep nothing of it."""
    metadata = {"erased_unix_ms": str(erased_unix_ms)} if erased_unix_ms else {}
    return FailedPrecondition(
        f"namespace {namespace!r} is sealed: {words}", reason="NAMESPACE_SEALED", metadata=metadata
    )


def _bound_to(namespace: str) -> bytes:
    return b"kvasir.namespace_key.v1\0" + namespace.encode()


def _checksum(data: bytes) -> bytes:
    return blake3(data).hexdigest()[:_CHECKSUM_HEX].encode()

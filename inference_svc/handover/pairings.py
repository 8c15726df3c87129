"""The paired peers of this engine's home, as `kvasir pair` keeps them: where their engines take turns, and who may give
turns here. The file is read again when it has changed, so that pairing needs no restart. Knows no network.
"""

import base64
import ssl
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
from kvasir.address import parse_address
from kvasir.credentials import HANDOVER, PEER, CredentialFileError, Principal, read_private_text

_LOG = structlog.get_logger(__name__)
# What a paired peer's calls are counted and logged under. No credential of the credential file has such a name.
_PRINCIPAL_PREFIX = "peer:"
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class PairedPeer:
    """One paired Mac. `certificate` is DER: who shows its key is this peer, and nothing else is."""

    name: str
    certificate: bytes
    engine_address: str  # "": it takes no turns
    namespaces: frozenset[str]  # whose callers may name it, and in which it may call here
    takes_moves: frozenset[str]  # namespaces in which it may bring agents and turns

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "PairedPeer":
        """An entry with a certificate. Raises KeyError, ValueError, TypeError."""
        address = str(entry.get("engine_address", ""))
        takes = [text.rpartition("=") for text in entry.get("takes", ())]
        return cls(
            entry["name"],
            base64.b64decode(entry["certificate"], validate=True),
            str(parse_address(address)) if address else "",
            frozenset(entry.get("namespaces", ())),
            frozenset(namespace for namespace, _, right in takes if right == "move"),
        )

    @property
    def pem(self) -> bytes:
        return ssl.DER_cert_to_PEM_cert(self.certificate).encode()


@dataclass(frozen=True, slots=True)
class Pairings:
    """The file's content: peers by name, where this engine listens to theirs ("": nowhere), and its key and certificate
    (PEM), which are the store's."""

    peers: Mapping[str, PairedPeer] = field(default_factory=lambda: MappingProxyType({}))
    listen: str = ""
    key: bytes = field(default=b"", repr=False)
    certificate: bytes = b""

    def caller(self, certificate_pem: bytes, namespace: str) -> Principal | None:
        """The paired peer that shows this certificate, in a namespace that it was paired for; else None. It has the
        role `handover` where it may bring agents."""
        try:
            shown = ssl.PEM_cert_to_DER_cert(certificate_pem.decode("ascii"))
        except ValueError:
            return None
        peer = next((each for each in self.peers.values() if each.certificate == shown), None)
        if peer is None or namespace not in peer.namespaces:
            return None
        role = HANDOVER if namespace in peer.takes_moves else PEER
        return Principal(_PRINCIPAL_PREFIX + peer.name, namespace, frozenset({role}))

    def callers_pem(self) -> bytes:
        """The certificates of those who may come in, and this engine's own: TLS wants one, and no other has its key."""
        return self.certificate + b"".join(peer.pem for peer in self.peers.values())

    def keeps(self, caller: Principal) -> bool:
        """Whether a paired peer may still do what it may when it called."""
        peer = self.peers.get(peer_name(caller))
        if peer is None or caller.namespace not in peer.namespaces:
            return False
        return HANDOVER not in caller.roles or caller.namespace in peer.takes_moves


class PairingsFile:
    """The pairings as they are today. A file that is wrong changes nothing, and is logged once."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file of peers, which need not be there yet; the identity is beside it."""
        self._path = path
        self._seen: object = None
        self.book = Pairings()

    def refresh(self) -> None:
        """Read the file again if it has changed. Blocks on the disk."""
        seen = _seen(self._path)
        if self._path is None or seen == self._seen:
            return
        self._seen = seen
        try:
            self.book = read_pairings(self._path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.error("peers.unreadable", path=str(self._path), problem=str(error))


def read_pairings(path: Path) -> Pairings:
    """The paired peers of a file of peers; none without a file. Raises OSError, ValueError, KeyError, TypeError."""
    if not path.exists():
        return Pairings()
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("others can write it and so choose peers")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    read = [PairedPeer.read(entry) for entry in document.get("peer", ()) if entry.get("certificate")]
    if not read:
        return Pairings()
    listen = str(document.get("engine_listen", ""))
    return Pairings({peer.name: peer for peer in read}, listen, *_identity(path.with_name("identity.pem")))


def _identity(path: Path) -> tuple[bytes, bytes]:
    try:
        key, found, certificate = read_private_text(path).partition(_CERTIFICATE)
    except CredentialFileError as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"{path}: expected a key and its certificate in PEM")
    return key.encode(), (found + certificate).encode()


def _seen(path: Path | None) -> object:
    """What changes with the file: it is replaced as a whole, and so its number changes, too."""
    try:
        known = path.stat() if path is not None else None
    except OSError:
        return None
    return known and (known.st_ino, known.st_mtime_ns, known.st_size, known.st_mode)


def peer_name(caller: Principal) -> str:
    """The name by which this engine's store knows the store of a caller that gives turns: paired, or with a token."""
    return caller.name.removeprefix(_PRINCIPAL_PREFIX)


def is_paired(caller: Principal) -> bool:
    return caller.name.startswith(_PRINCIPAL_PREFIX)

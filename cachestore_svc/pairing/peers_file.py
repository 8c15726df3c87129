"""The file of peers (TOML): written by hand (addresses, tokens, certificates) or by pairing (pinned certificates). A
change is made under a lock, and the new file (0600) replaces the old one in one step; comments are not kept.
"""

import contextlib
import fcntl
import json
import os
import shlex
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from kvasir.address import Address, parse_address
from kvasir.clients import PinnedTls, Tls
from kvasir.credentials import CredentialFileError, read_token, replace_private_text
from kvasir.errors import InvalidArgument
from kvasir.names import check_namespace
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from cachestore_svc.config import ConfigError
from cachestore_svc.pairing.identity import SERVER_NAME, Certificate, Identity, identity_file, read_identity
from cachestore_svc.pairing.rights import Given, Gives, Takes, read_rights, write_rights

_HEAD = "# Written by `kvasir pair` and `kvasir peers`, which keep no comments. Only its owner may write it.\n"
MAX_PEERS = 64


class PeerSettings(BaseModel):
    """One [[peer]]: paired if it has a certificate, else written by hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # how PullAgent names it
    address: str = ""
    """host:port or unix:/path. Empty, of a paired one: it may pull from here, and nobody pulls from it."""
    engine_address: str = ""
    """host:port where a paired peer's engine takes turns. Empty: turns end where they are."""
    token_file: Path | None = None
    """This store's token there (role peer); its credential there also decides which namespace is read."""
    ca_file: Path | None = None
    """PEM: the peer's own certificate, which pins it, or the authority that signed it. Needed beyond this machine."""
    server_name: str = ""  # the name in its certificate, when that is not the host of the address
    cert_file: Path | None = None  # this store's certificate and key, for a peer that wants it (mutual TLS)
    key_file: Path | None = None
    certificate: str = ""
    """A paired peer's certificate (base64 of DER): who shows its key is this peer, and nothing else is."""
    namespaces: tuple[str, ...] = ()  # of a paired peer: those that it reads, and whose callers may name it
    gives: tuple[str, ...] = ()
    """NAMESPACE=RIGHT of `rights.Gives`: its right to the agents of a namespace. Left out: read."""
    takes: tuple[str, ...] = ()
    """NAMESPACE=RIGHT of `rights.Takes`: agents that it may bring of its own accord. Left out: none."""
    max_agents: Annotated[int, Field(ge=0)] = 1000
    """Agents of a namespace that it brought and nobody here has extended; more are refused."""
    max_bytes: Annotated[int, Field(ge=0)] = 64 << 30  # their bytes, and the most that it sends in an hour
    paired_at: str = ""  # when, in UTC
    formerly: tuple[str, ...] = ()
    """Names that it had before: agents that moved to it, or came from it, may still be noted under these."""

    @field_validator("namespaces")
    @classmethod
    def _are_namespaces(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(check_namespace(namespace) for namespace in given)
        except InvalidArgument as error:
            raise ValueError(error.message) from None

    @field_validator("gives", "takes")
    @classmethod
    def _are_rights(cls, given: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        try:
            return write_rights(read_rights(given, Gives if info.field_name == "gives" else Takes))
        except InvalidArgument as error:
            raise ValueError(error.message) from None

    @property
    def is_paired(self) -> bool:
        return bool(self.certificate)

    @property
    def pinned(self) -> Certificate:
        """Of a paired peer. Raises InvalidArgument."""
        return Certificate.of_text(self.certificate, "certificate")

    def tls(self, identity: Identity | None) -> Tls | PinnedTls | None:
        """How it is reached: over which TLS. A paired peer needs `identity`."""
        if self.is_paired and identity is not None:
            return PinnedTls(self.pinned.pem, SERVER_NAME, identity.certificate.pem, identity.key_pem)
        if self.ca_file is None:
            return None
        return Tls(self.ca_file, self.server_name, self.cert_file, self.key_file)

    def token(self) -> str | None:
        """Read when needed, so that a renewed token needs no restart. Raises CredentialFileError."""
        return None if self.token_file is None else read_token(self.token_file)

    def serves(self, namespace: str) -> bool:
        """Whether callers of this namespace may name it. One that was written by hand serves all."""
        return not self.is_paired or namespace in self.namespaces

    @property
    def named(self) -> set[str]:
        return {*self.namespaces, *read_rights(self.gives, Gives), *read_rights(self.takes, Takes)}

    def is_same(self, other: "PeerSettings") -> bool:
        """Whether both are one store: by its key, or, if written by hand, by address and certificate."""
        by_hand = [(each.address, each.ca_file, each.server_name) for each in (self, other) if not each.is_paired]
        return self.certificate == other.certificate and len(set(by_hand)) < 2

    def keeps_all(self, now: "PeerSettings") -> bool:
        given = [(self.given(each), now.given(each)) for each in self.named]
        is_less = any(old.gives > new.gives or old.takes > new.takes for old, new in given)
        return self.is_same(now) and set(self.namespaces) <= set(now.namespaces) and not is_less

    def given(self, namespace: str) -> Given:
        gives, takes = read_rights(self.gives, Gives), read_rights(self.takes, Takes)
        return Given(Gives[gives.get(namespace, "read").upper()], Takes[takes.get(namespace, "nothing").upper()])


@dataclass(frozen=True, slots=True)
class PeerBook:
    """The file's content: peers by name, where this store and its engine listen to paired ones ("": to none), the
    identity of both."""

    peers: Mapping[str, PeerSettings] = field(default_factory=lambda: MappingProxyType({}))
    listen: str = ""
    identity: Identity | None = None
    removed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """By names of peers that were removed, which agents may be noted under still: their certificates ("": had none). No
    other key gets these names."""
    engine_listen: str = ""

    @property
    def paired(self) -> list[PeerSettings]:
        return [peer for peer in self.peers.values() if peer.is_paired]

    def with_peer(self, peer: PeerSettings) -> "PeerBook":
        """With it added, in the place of one that has the same key. Raises InvalidArgument: too many."""
        is_same = [name for name, each in self.peers.items() if each.is_paired and each.certificate == peer.certificate]
        kept = {name: _not_formerly(each, peer.name) for name, each in self.peers.items()}
        before = {old for name in is_same for old in (name, *kept[name].formerly)}
        before |= {old for old, key in self.removed.items() if peer.is_paired and key == peer.certificate}
        removed = {old: key for old, key in self.removed.items() if old not in (*before, peer.name)}
        kept = {name: each for name, each in kept.items() if name not in (*is_same, peer.name)}
        peer = peer.model_copy(update={"formerly": tuple(sorted({*peer.formerly, *before} - {peer.name}))})
        if len(kept) >= MAX_PEERS:
            raise InvalidArgument.of("peers", f"this store has {len(kept)} of at most {MAX_PEERS}")
        return replace(self, peers={**kept, peer.name: peer}, removed=removed)

    def with_name(self, name: str, new_name: str) -> "PeerBook":
        """With one called otherwise; the name that it had is remembered. Raises InvalidArgument."""
        peer = self.peers[name]
        if not self._may_have(new_name, peer.certificate):
            text = f"a peer that was removed was called {new_name!r}, and agents may be noted under it: take another"
            raise InvalidArgument.of("name", text)
        formerly = tuple(sorted({*peer.formerly, name} - {new_name}))
        renamed = peer.model_copy(update={"name": new_name, "formerly": formerly})
        others = {each: _not_formerly(other, new_name) for each, other in self.peers.items() if each != name}
        return replace(self, peers={**others, new_name: renamed})

    def without(self, name: str) -> "PeerBook":
        gone, kept = self.peers[name], {each: peer for each, peer in self.peers.items() if each != name}
        removed = {**self.removed, **dict.fromkeys((name, *gone.formerly), gone.certificate)}
        return replace(self, peers=kept, removed=removed)

    def free_name(self, wanted: str, certificate: Certificate) -> str:
        """The name that a peer with this certificate has here, or one like the wanted that nobody else has or had."""
        for name, peer in self.peers.items():
            if peer.is_paired and peer.pinned.pin == certificate.pin:
                return name
        numbered = (wanted[: 64 - len(end)] + end for end in chain(("",), (f"-{n}" for n in count(2))))
        return next(name for name in numbered if name not in self.peers and self._may_have(name, certificate.text))

    def _may_have(self, name: str, certificate: str) -> bool:
        return name not in self.removed or bool(certificate and self.removed[name] == certificate)


def _not_formerly(peer: PeerSettings, name: str) -> PeerSettings:
    """The peer without an earlier name that another takes now."""
    return peer.model_copy(update={"formerly": tuple(old for old in peer.formerly if old != name)})


def read_peers(path: Path | None) -> PeerBook:
    """The book of peers; empty without a file. Raises ConfigError, also for an address without protection."""
    if path is None or not path.exists():
        return PeerBook()
    try:
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = f"run: chmod 600 {shlex.quote(str(path))}"
            raise ConfigError(f"{path}: others can write it and so choose peers; {remedy}")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        if set(document) - {"peer", "listen", "engine_listen", "removed"}:
            raise ConfigError(
                f"{path}: expected [[peer]] tables, `listen`, `engine_listen`, `removed` and nothing else"
            )
        removed = {str(name): str(key) for name, key in document.get("removed", {}).items()}
        peers = [PeerSettings.model_validate(entry) for entry in document.get("peer", [])]
        listen, engine_listen = (
            str(parse_address(document[name])) if name in document else "" for name in ("listen", "engine_listen")
        )
    except ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(error)}") from None
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for peer in peers:
        _check_peer(path, peer)
    _check_alone(path, peers)
    return PeerBook({peer.name: peer for peer in peers}, listen, _identity(path, peers), removed, engine_listen)


def _check_alone(path: Path, peers: list[PeerSettings]) -> None:
    if len({peer.name for peer in peers}) != len(peers):
        raise ConfigError(f"{path}: two peers have the same name")
    pins = [peer.pinned.pin for peer in peers if peer.is_paired]
    if len(set(pins)) != len(pins):
        raise ConfigError(f"{path}: two peers have the same certificate")


def _identity(path: Path, peers: list[PeerSettings]) -> Identity | None:
    if not any(peer.is_paired for peer in peers):
        return None
    try:
        return read_identity(identity_file(path))
    except (CredentialFileError, InvalidArgument) as error:
        raise ConfigError(f"paired peers know this store by its key: {error}") from None


def _check_peer(path: Path, peer: PeerSettings) -> None:
    try:
        if peer.is_paired:
            _ = peer.pinned
        if peer.engine_address:
            parse_address(peer.engine_address)
        if peer.is_paired and not peer.address:
            return
        address: Address = parse_address(peer.address)
        peer.token()
    except (ValueError, CredentialFileError, InvalidArgument) as error:
        raise ConfigError(f"{path}: peer {peer.name}: {error}") from None
    if peer.ca_file is None and not peer.is_paired and not address.is_loopback:
        raise ConfigError(f"{path}: peer {peer.name}: {address} is another machine: give ca_file, which pins it")


def change_peers(path: Path, change: Callable[[PeerBook], PeerBook]) -> PeerBook:
    """Write what `change` makes of the book that is there. Raises ConfigError, and what `change` raises."""
    with _locked(path):
        book = change(read_peers(path))
        replace_private_text(path, _text(book))
    return book


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process changes the file at a time. The lock is beside it, because the file itself is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _text(book: PeerBook) -> str:
    lines = [_HEAD]
    listening = (("listen", book.listen), ("engine_listen", book.engine_listen))
    lines += [f"{name} = {_toml(address)}\n" for name, address in listening if address]
    for name in sorted(book.peers):
        lines.append("[[peer]]")
        given = book.peers[name].model_dump(mode="json", exclude_defaults=True)
        lines += [f"{key} = {_toml(value)}" for key, value in given.items()]
        lines.append("")
    if book.removed:
        lines += ["[removed]", *(f"{_toml(name)} = {_toml(key)}" for name, key in sorted(book.removed.items())), ""]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """A string, a number or a list of strings: JSON's are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _in_words(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    )

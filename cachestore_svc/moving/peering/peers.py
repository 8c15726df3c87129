"""Other stores by their local names; errors are rewritten, as a peer's refusal of us is none of our caller."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from kvasir import errors
from kvasir.clients import AioStoreClient
from kvasir.credentials import PEER, CredentialFileError, Principal
from kvasir.waits import PATIENCE_S

from cachestore_svc.pairing.identity import pin_of_pem
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.pairing.rights import May, Said, Verb, check

# A peer's words about an agent's owner.
_UNDERSTOOD = {
    *("AGENT_MOVED", "AGENT_MOVING", "MOVE_UNKNOWN", "OWNER_NEWER", "NOT_AN_ANCESTOR", "LEASE_HELD"),
    *("PEER_CONFIGURATION", "PEER_LIMIT", "PEER_MAY_NOT"),
}
# What a paired peer's calls are counted and logged under. No credential of the credential file has such a name.
_PRINCIPAL_PREFIX = "peer:"


class Peers:
    """The book of peers as it was last read: a store's address book, and its list of who may come in."""

    def __init__(self, read: Callable[[], PeerBook]) -> None:
        self._read = read
        self._links: set[_Link] = set()
        self.book = read()
        self.paired = PairedCallers(self.book)

    def reload(self) -> set[str]:
        """Read the book again; the peers that lost a right by it. After an error the old book stays."""
        before = self.book.peers
        book = self._read()
        self.book, self.paired = book, PairedCallers(book)
        after = book.peers
        return {name for name, peer in before.items() if name not in after or not peer.keeps_all(after[name])}

    def names(self, namespace: str) -> list[str]:
        """The peers that callers of this namespace may name, in order."""
        return sorted(name for name, peer in self.book.peers.items() if peer.serves(namespace))

    def with_address(self, namespace: str) -> list[str]:
        return [name for name in self.names(namespace) if self.book.peers[name].address]

    def renamed(self) -> dict[str, str]:
        """Today's name for every earlier name of a peer that no other peer has now."""
        peers = self.book.peers
        return {old: name for name, peer in peers.items() for old in peer.formerly if old not in peers}

    def all_names(self, name: str) -> Sequence[str]:
        """A peer's name and its earlier ones, which stand in what was written while it had them."""
        return [name, *(old for old, today in self.renamed().items() if today == name)]

    def may(self, verb: Verb, namespace: str, name: str, agent_id: str, *, is_ordered: bool = False) -> May:
        """The check of a peer's word about an agent. `is_ordered`: by this store's owner. Raises NotFound."""
        names = self.all_names(self.renamed().get(name, name))
        given = self.settings(name, namespace).given(namespace)
        return partial(check, Said(verb, agent_id, names, given, is_ordered))

    def calling(self, caller: Principal) -> str:
        """The name of a caller with the peer role. Raises NotFound (PEER_UNKNOWN) of a token under the name of a paired
        peer: that one shows its certificate, and a token outlives the peer that was written by hand."""
        name = name_of(caller)
        peer = self.book.peers.get(self.renamed().get(name, name))
        if peer is not None and peer.is_paired and peer_name(caller) is None:
            raise _unknown(name, f"peer {name!r} is paired and shows its certificate: this token is none of its own")
        return name

    def settings(self, name: str, namespace: str) -> PeerSettings:
        """The peer's entry. Raises NotFound (PEER_UNKNOWN), also where it is none of this namespace."""
        peer = self.book.peers.get(self.renamed().get(name, name))
        if peer is None or not peer.serves(namespace):
            raise _unknown(name, f"no peer {name!r} in this store's configuration")
        return peer

    async def hang_up(self) -> int:
        """End what runs with peers that the book has no more, or no more for its namespace; returns how much."""
        over = [link for link in self._links if not link.is_over and not self._has(link)]
        for link in over:
            link.is_over = True
            await link.client.close()
        return len(over)

    @asynccontextmanager
    async def connect(self, name: str, namespace: str) -> AsyncIterator[AioStoreClient]:
        """A client of the peer, for a caller of this namespace. Raises NotFound, also later, FailedPrecondition."""
        peer = self.settings(name, namespace)
        link = _Link(peer, namespace, self._client(peer, namespace))
        self._links.add(link)
        task = asyncio.current_task()
        try:
            async with link.client:
                yield link.client
        except (asyncio.CancelledError, Exception):
            # A call on a channel that was closed fails or ends as cancelled; its task was not.
            if not link.is_over or (task is not None and task.cancelling()):
                raise
            raise _unknown(name, f"peer {name!r} was removed") from None
        finally:
            self._links.discard(link)

    def _has(self, link: "_Link") -> bool:
        now = self.book.peers.get(link.peer.name)
        return now is not None and now.is_same(link.peer) and now.serves(link.namespace)

    def _client(self, peer: PeerSettings, namespace: str) -> AioStoreClient:
        name = peer.name
        if not peer.address:
            raise errors.FailedPrecondition(
                f"peer {name}: it listens to no other machine: pair again, with --listen there",
                reason="PEER_CONFIGURATION",
            )
        try:
            tls, token = peer.tls(self.book.identity), peer.token()
            client = AioStoreClient.connect(peer.address, token=token, tls=tls, timeout_s=PATIENCE_S)
        except (CredentialFileError, errors.InvalidArgument) as error:
            raise errors.FailedPrecondition(f"peer {name}: {error}", reason="PEER_CONFIGURATION") from None
        return client.in_namespace(namespace) if peer.is_paired else client


class PairedCallers:
    """The paired peers of a book as callers: by the certificates that they show."""

    def __init__(self, book: PeerBook) -> None:
        paired = [(peer, peer.pinned) for peer in book.paired]
        self._by_pin: dict[str, PeerSettings] = {certificate.pin: peer for peer, certificate in paired}
        self._pems = [certificate.pem for _, certificate in paired]
        self._own = book.identity

    def principal_of(self, certificate_pem: bytes, namespace: str) -> Principal | None:
        """The paired peer that shows this certificate, in a namespace that it was paired for; else None."""
        try:
            peer = self._by_pin.get(pin_of_pem(certificate_pem))
        except ValueError:
            return None
        if peer is None or namespace not in peer.namespaces:
            return None
        return Principal(_PRINCIPAL_PREFIX + peer.name, namespace, frozenset({PEER}))

    def identity_pem(self) -> tuple[bytes, bytes]:
        return (b"", b"") if self._own is None else (self._own.key_pem, self._own.certificate.pem)

    def certificates_pem(self) -> bytes:
        """The certificates of those who may come in, and this store's own: TLS wants one, and its key is here alone."""
        own = b"" if self._own is None else self._own.certificate.pem
        return own + b"".join(self._pems)


@dataclass(eq=False)
class _Link:
    peer: PeerSettings
    namespace: str
    client: AioStoreClient
    is_over: bool = False  # the peer was removed


def _unknown(name: str, words: str) -> errors.NotFound:
    return errors.NotFound(words, reason="PEER_UNKNOWN", field="peer", metadata={"peer": name})


def peer_name(caller: Principal) -> str | None:
    """The paired peer that this caller is, by the name in this store's book; None for callers with a token."""
    is_peer = caller.roles == {PEER} and caller.name.startswith(_PRINCIPAL_PREFIX)
    return caller.name.removeprefix(_PRINCIPAL_PREFIX) if is_peer else None


def name_of(caller: Principal) -> str:
    """The name by which this store knows a caller with the peer role: paired, or with a token."""
    return peer_name(caller) or caller.name


@contextmanager
def errors_of_peer(name: str) -> Iterator[None]:
    """Name whose error it is; what is the peer's affair becomes UNAVAILABLE or a failed precondition here."""
    try:
        yield
    except errors.KvasirError as error:
        raise _of_peer(name, error) from None


@contextmanager
def answers_of_peer(name: str) -> Iterator[None]:
    """As errors_of_peer; but a peer's word about an agent's owner is handed on as it is."""
    try:
        yield
    except errors.KvasirError as error:
        kinds = errors.FailedPrecondition | errors.AlreadyExists | errors.ResourceExhausted | errors.Unavailable
        raise error if error.reason in _UNDERSTOOD and isinstance(error, kinds) else _of_peer(name, error) from None


def _of_peer(name: str, error: errors.KvasirError) -> errors.KvasirError:
    match error:
        case errors.NotFound() | errors.DataLoss():
            return type(error)(f"peer {name}: {error.message}", reason=error.reason, metadata=error.metadata)
        case errors.Unauthenticated() | errors.PermissionDenied():
            reason = "PEER_MAY_NOT" if error.reason == "PEER_MAY_NOT" else "PEER_REFUSED"
            return errors.FailedPrecondition(f"peer {name} refused us: {error.message}", reason=reason)
        case errors.Unavailable() | errors.DeadlineExceeded():
            return errors.Unavailable(f"peer {name}: {error.message}", reason="PEER_UNAVAILABLE", retry_after_s=5)
        case errors.InvalidArgument():  # this store has checked what it sends
            text = f"peer {name} does not take it: {error.message}; its Kvasir is of another version"
            return errors.FailedPrecondition(text, reason="PEER_VERSION_DIFFERS")
    return errors.Unavailable(f"peer {name} failed: {error.message}", reason="PEER_FAILED", retry_after_s=60)

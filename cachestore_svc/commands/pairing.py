"""The program behind `kvasir pair` and `kvasir peers`: it pairs, and changes the file of peers; JSON lines on stdout. A
running store reads the file again before the other side hears that the pairing is done.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvasir import errors
from kvasir.address import PAIRING_PORT, parse_address
from kvasir.clients import AioStoreClient, Tls
from kvasir.credentials import DEFAULT_NAMESPACE, CredentialFileError, read_token
from kvasir.options.texts import path_of
from kvasir.server.operating.audit import REFUSED, Audit, owners_deed
from kvasir.server.serving import RefusedToStart
from kvasir.waits import ANSWER_S, SILENCE_S, uptime_s

from cachestore_svc.config import ConfigError
from cachestore_svc.edge.pairing_service import HostSide, join, listening
from cachestore_svc.pairing.codes import check_peer_address, line_of, new_code, read_code_or_line
from cachestore_svc.pairing.exchange import LIFETIME_S, PEER_NAME, Card, Hosting, Invitation, Joining
from cachestore_svc.pairing.finding import announced, check_zeroconf, find
from cachestore_svc.pairing.identity import Identity, identity_file, read_or_make_identity
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings, change_peers, read_peers
from cachestore_svc.pairing.rights import Gives, Takes, read_rights, write_rights

COMMANDS = ("pair", "peers")
_LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "pair":
            asyncio.run(_pair(options))
        else:
            with _told(options):
                answer = asyncio.run(_peers(options))
            _say(answer)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except errors.KvasirError as error:
        return _print_error(error)
    except (ConfigError, RefusedToStart, CredentialFileError) as error:
        return _print_error(errors.FailedPrecondition(str(error), reason="PEER_CONFIGURATION"))
    except OSError as error:  # of a home's disk that is full, or takes no writes
        words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _print_error(errors.FailedPrecondition(words, reason="PEER_CONFIGURATION"))
    return 0


@dataclass(frozen=True, slots=True)
class Own:
    """This store's side of a pairing: its facts, the rights that it gives and takes, and the way to a running one."""

    peers_file: Path
    identity: Identity
    name: str
    gives: dict[str, str]  # by namespace, as `rights` reads them
    takes: dict[str, str]
    known_as: str  # the other's name here; "": its own
    listen: "Doors"
    store: "RunningStore"
    about: dict[str, str] = field(default_factory=dict)  # for the audit: who was paired

    def card(self, is_same_machine: bool) -> Card:
        """The addresses for the other side. An address of loopback is given on this machine only."""
        is_reached = is_same_machine or not parse_address(self.listen.store).is_loopback
        addresses = (self.listen.store, self.listen.engine) if is_reached else ("", "")
        return Card(self.name, self.identity.certificate, *addresses)

    async def pin(self, other: Card) -> dict[str, Any]:
        """Make the other side a peer, and let a running store know; returns the text for people."""
        if other.certificate.pin == self.identity.certificate.pin:
            raise errors.InvalidArgument("this is this store itself: pair it with another", field="card.certificate")
        made: list[PeerSettings] = []

        def add(book: PeerBook) -> PeerBook:
            name, key = book.free_name(self.known_as or other.name, other.certificate), other.certificate.text
            known = book.peers.get(name)
            if known is None:
                named = {*self.gives, *self.takes} or {DEFAULT_NAMESPACE}
                known = PeerSettings(name=name, certificate=key, gives=write_rights(dict.fromkeys(named, "read")))
            peer = _with_rights(known, self.gives, self.takes)
            now = {"address": other.address, "engine_address": other.engine_address, "paired_at": _utc(time.time)}
            made[:] = [peer.model_copy(update={**now, "namespaces": tuple(sorted(peer.named))})]
            return replace(book.with_peer(made[0]), listen=self.listen.store, engine_listen=self.listen.engine)

        await asyncio.to_thread(change_peers, self.peers_file, add)
        self.about.update(peer=made[0].name, **_rights(made[0]))
        return {**_row(made[0]), "our_address": self.listen.store, "store": await self.store.told()}


@dataclass(frozen=True, slots=True)
class Doors:
    """Where paired peers are listened to: the store to stores, its engine to engines."""

    store: str
    engine: str

    @classmethod
    def chosen(cls, asked: str, book: PeerBook) -> "Doors":
        """The given address, else the known one; the engine's is at a port of its own beside the store's."""
        store = _listen(asked, book.listen)
        return cls(store, _listen(_bracketed(parse_address(store).host), book.engine_listen))


@dataclass(frozen=True, slots=True)
class RunningStore:
    address: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None

    async def told(self) -> dict[str, Any]:
        """Let it read the file of peers; whether it runs, where it listens to peers, how many calls it ended."""
        if not self.address:
            return {"is_running": False}
        token = None if self.token_file is None else read_token(self.token_file)
        tls = None if self.ca_file is None else Tls(self.ca_file)
        try:
            async with AioStoreClient.connect(self.address, token=token, tls=tls, retry_reads=False) as client:
                answer = await client.reload_peers(timeout_s=ANSWER_S)
        except (errors.Unavailable, errors.DeadlineExceeded):
            return {"is_running": False}
        return {"is_running": True, "address": answer.address, "ended_calls": answer.ended_calls}


async def _pair(options: argparse.Namespace) -> None:
    if options.until_eof:
        _end_with(sys.stdin.fileno())
    if options.announce:
        check_zeroconf()
    own = await asyncio.to_thread(_own, options)
    with owners_deed("store", options.audit_file, "pair", own.about) as audit:
        if options.code:
            await _join(own, *read_code_or_line(options.code), options.at)
        else:
            await _wait(own, options.lifetime_s, options.announce, audit)


def _end_with(descriptor: int) -> None:
    """End this program when nobody holds the other end of a pipe any more: no listener outlives who waits for it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def readable() -> None:
        if not os.read(descriptor, 1024):
            loop.remove_reader(descriptor)
            task.cancel()

    loop.add_reader(descriptor, readable)


def _own(options: argparse.Namespace) -> Own:
    name, known_as = _check_name(options.name, "name", "name"), options.known_as
    known_as = known_as and _check_name(known_as, "as", "as")
    rights = _named(options.gives, Gives), _named(options.takes, Takes)
    listen = Doors.chosen(options.listen, read_peers(options.peers_file))
    identity = read_or_make_identity(identity_file(options.peers_file))
    return Own(options.peers_file, identity, name, *rights, known_as, listen, _store(options))


def _store(options: argparse.Namespace) -> RunningStore:
    return RunningStore(options.store, options.store_token_file, options.store_ca_file)


def _listen(asked: str, known: str) -> str:
    """Where peers will be listened to: the given address, else the known one, else loopback; a port is chosen once."""
    if not asked:
        return known or f"{_LOOPBACK}:{_free_port(_LOOPBACK)}"
    try:
        return check_peer_address(asked, "listen")
    except errors.InvalidArgument:
        host = parse_address(check_peer_address(f"{asked}:1", "listen")).host
    known_address = parse_address(known) if known else None
    if known_address is not None and known_address.host == host:
        return known
    return str(parse_address(f"{_bracketed(host)}:{_free_port(host)}"))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port(host: str) -> int:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.bind(address)
            port: int = probe.getsockname()[1]
    except OSError as error:
        text = f"{host} is no address of this machine: {error.strerror or error}"
        raise errors.InvalidArgument.of("listen", text) from None
    return port


# --- the side that shows the code ---


async def _wait(own: Own, lifetime_s: float, announces: bool, audit: Audit) -> None:
    """Show a code and wait. Raises DeadlineExceeded (too late), PermissionDenied (guessed too often)."""
    invitation = Invitation(new_code(secrets.token_bytes), uptime_s, lifetime_s)
    changed, paired = asyncio.Event(), list[dict[str, Any]]()

    async def pin(joiner: Card) -> None:
        paired.append(await own.pin(joiner))
        changed.set()

    def refused(peer: str, error: errors.KvasirError) -> None:
        _say({"event": "refused", "from": peer, "reason": error.reason, "message": error.message})
        if error.reason == "PAIRING_REFUSED":  # a guess, of which there are five; others could fill the disk
            audit.tell(None, "pair", REFUSED, error.reason)
        changed.set()

    host = parse_address(own.listen.store)
    side = HostSide(
        lambda: Hosting(invitation, own.identity, secrets.token_bytes),
        own.card(is_same_machine=host.is_loopback),
        pin,
        refused,
    )
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(_door(host.host, side))
        if announces:
            await stack.enter_async_context(announced(own.name, address))
        line = line_of(invitation.code, address)
        _say({"event": "waiting", "code": invitation.code, "line": line, "address": address, "seconds": lifetime_s})
        while not paired and not invitation.is_over:
            await _next(changed, invitation.seconds_left)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                while invitation.is_used and not paired:  # its exchange is under way; others may call meanwhile
                    await _next(changed, SILENCE_S)
    # The listener is closed, and has answered the joiner.
    if paired:
        _say({"event": "paired", **paired[0]})
        return
    if invitation.guesses_left <= 0:
        raise errors.PermissionDenied(
            "the code was guessed too often: somebody may be trying", reason="PAIRING_REFUSED"
        )
    if invitation.is_used:
        raise errors.Unavailable("the other side left in the middle: begin again", reason="STREAM_CUT")
    raise errors.DeadlineExceeded(f"nobody took the code within {lifetime_s:g} s")


async def _next(changed: asyncio.Event, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(changed.wait(), within_s)
    changed.clear()


@asynccontextmanager
async def _door(host: str, side: HostSide) -> AsyncIterator[str]:
    """The listener at the usual port, or at any other where that is taken."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(listening(f"{_bracketed(host)}:{PAIRING_PORT}", side))
        except RefusedToStart:
            address = await stack.enter_async_context(listening(f"{_bracketed(host)}:0", side))
        yield address


# --- the side that takes the code ---


async def _join(own: Own, code: str, address: str, at: str) -> None:
    address = at or address or f"{_LOOPBACK}:{PAIRING_PORT}"
    parsed = parse_address(check_peer_address(address, "at"))
    run = Joining(code, own.identity, secrets.token_bytes)
    host = await join(str(parsed), run, own.card(is_same_machine=parsed.is_loopback))
    _say({"event": "paired", **await own.pin(host)})


# --- peers ---


def _told(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    if options.action not in ("rm", "rename", "allow"):
        return contextlib.nullcontext()
    asked = {way: ", ".join(getattr(options, way, None) or ()) for way in ("gives", "takes")}
    subjects = {"peer": options.name, **{way: text for way, text in asked.items() if text}}
    return owners_deed("store", options.audit_file, f"peers/{options.action}", subjects)


async def _peers(options: argparse.Namespace) -> dict[str, Any]:
    if options.action == "find":
        check_zeroconf()
        return {"found": [asdict(each) for each in await find(options.seconds)]}
    if options.action == "ls":
        book = await asyncio.to_thread(read_peers, options.peers_file)
        return {"peers": [_row(book.peers[name]) for name in sorted(book.peers)], "listen": book.listen}
    book = await asyncio.to_thread(change_peers, options.peers_file, partial(_changed, options))
    answer = _row(book.peers[options.name]) if options.action == "allow" else {"name": options.name}
    return {**answer, "store": await _store(options).told()}


def _changed(options: argparse.Namespace, book: PeerBook) -> PeerBook:
    name = options.name
    if name not in book.peers:
        there = ", ".join(sorted(book.peers)) or "none"
        raise errors.NotFound(f"no peer {name!r}; there are: {there}", reason="PEER_UNKNOWN", metadata={"peer": name})
    if options.action == "rm":
        return book.without(name)
    if options.action == "rename":
        return book.with_name(name, _check_name(options.new_name, "new name", "name", book))
    peer, gives, takes = book.peers[name], _named(options.gives, Gives), _named(options.takes, Takes)
    if peer.is_paired and (new := {*gives, *takes} - {*peer.namespaces}):
        text = f"{name} was given none of {sorted(new)}: pair again, with --gives for each"
        raise errors.InvalidArgument.of("namespace", text)
    return replace(book, peers={**book.peers, name: _with_rights(peer, gives, takes)})


def _named(given: Sequence[str] | None, words: type[Gives | Takes]) -> dict[str, str]:
    return read_rights(given or (), words, DEFAULT_NAMESPACE)


def _check_name(name: str, what: str, field_: str, book: PeerBook | None = None) -> str:
    if PEER_NAME.fullmatch(name) is None:
        raise errors.InvalidArgument(f"{what}: expected 1 to 64 of A-Z a-z 0-9 . _ -", field=field_)
    if book is not None and name in book.peers:
        raise errors.InvalidArgument(f"{what}: there is a peer {name!r} already", field=field_)
    return name


def _with_rights(peer: PeerSettings, gives: dict[str, str], takes: dict[str, str]) -> PeerSettings:
    rights = {
        "gives": write_rights(read_rights(peer.gives, Gives) | gives),
        "takes": write_rights(read_rights(peer.takes, Takes) | takes),
    }
    return peer.model_copy(update=rights)


def _row(peer: PeerSettings) -> dict[str, Any]:
    return {
        "name": peer.name,
        "role": "peer",
        "address": peer.address,
        "engine_address": peer.engine_address,
        "namespaces": list(peer.namespaces),
        **_rights(peer),
        "is_paired": peer.is_paired,
        "paired_at": peer.paired_at,
        "pin": peer.pinned.pin if peer.is_paired else "",
    }


def _rights(peer: PeerSettings) -> dict[str, str]:
    """In words, as `--gives` and `--takes` take them; of all namespaces that it was given, or that they name."""
    given = {namespace: peer.given(namespace) for namespace in sorted(peer.named)}
    return {
        "gives": ", ".join(f"{namespace}={each.gives.name.lower()}" for namespace, each in given.items()),
        "takes": ", ".join(f"{namespace}={each.takes.name.lower()}" for namespace, each in given.items()),
    }


def _utc(clock: Callable[[], float]) -> str:
    return datetime.datetime.fromtimestamp(clock(), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _print_error(error: errors.KvasirError) -> int:
    told = {"kind": type(error).__name__, "message": error.message, "reason": error.reason, "field": error.field}
    _say({"error": {**told, "metadata": error.metadata}})
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cachestore_svc")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--peers-file", type=path_of, required=True, help="the file of peers; the identity is beside it"
    )
    shared.add_argument("--store", default="", help="the address of the store that uses the file, if it may run")
    shared.add_argument("--store-token-file", type=path_of, help="an admin's token there")
    shared.add_argument("--audit-file", type=path_of, help="the store's audit, which gets a line for each change")
    shared.add_argument("--store-ca-file", type=path_of, help="its certificate")
    rights = argparse.ArgumentParser(add_help=False)
    rights.add_argument("--gives", action="append", help="[NAMESPACE=]read, move or claim: its rights over agents here")
    rights.add_argument("--takes", action="append", help="[NAMESPACE=]nothing, copy or move: what it may send here")
    pair = commands.add_parser("pair", parents=[shared, rights], help="make two stores know each other")
    pair.add_argument("code", nargs="?", default="", help="a code or line; left out: show one and wait")
    pair.add_argument("--at", default="", help="HOST:PORT where the code was shown")
    pair.add_argument("--name", required=True, help="this store's name for itself")
    pair.add_argument("--as", dest="known_as", default="", help="the other store's name here")
    pair.add_argument("--listen", default="", help="HOST or HOST:PORT where paired stores are listened to")
    pair.add_argument("--until-eof", action="store_true", help="end when standard input does")
    pair.add_argument("--announce", action="store_true", help="announce in the network that this store waits (mDNS)")
    pair.add_argument("--lifetime-s", type=float, default=LIFETIME_S, help="how long the code is valid")
    peers = commands.add_parser("peers", help="the peers of a store").add_subparsers(dest="action", required=True)
    find_ = peers.add_parser(
        "find", parents=[shared], help="list the stores that announce in the network that they wait (mDNS)"
    )
    find_.add_argument("--seconds", type=float, default=3.0)
    peers.add_parser("ls", parents=[shared], help="list them")
    peers.add_parser("rm", parents=[shared], help="remove one").add_argument("name")
    allow = peers.add_parser("allow", parents=[shared, rights], help="change what one may")
    allow.add_argument("name")
    rename = peers.add_parser("rename", parents=[shared], help="call one otherwise")
    rename.add_argument("name")
    rename.add_argument("new_name")
    return parser

"""Two real stores that `pair` made known to each other: they speak over pinned TLS, until one removes the other."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvasir.clients import PinnedTls, StoreClient
from kvasir.errors import (
    FailedPrecondition,
    KvasirError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvasir.server.serving import EdgeServer, Listening, Reports

from cachestore_svc.edge.peer_service import PeerService
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.pairing import finding
from cachestore_svc.pairing.finding import WaitingMac, announced, find
from cachestore_svc.pairing.identity import (
    SERVER_NAME,
    Identity,
    identity_file,
    new_identity,
    read_identity,
    read_or_make_identity,
)
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings, change_peers, read_peers
from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent, full_layers, kv_identity
from tests.running.ports import free_port
from tests.running.programs import Program, run

LARGE = kv_identity("large", full_layers(24, 8, 128))
WITHIN_S = 30.0


@dataclass
class Mac:
    """A store with its file of peers, and the program that changes it."""

    home: StoreHome
    store: RunningStore
    peers_file: Path

    def words(self, *words: str) -> list[str]:
        audit = ("--audit-file", str(self.audit_file))
        return [*words, "--peers-file", str(self.peers_file), "--store", self.store.address, *audit]

    def program(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return run("cachestore_svc", *self.words(*words), timeout_s=WITHIN_S)

    def said(self, *words: str) -> dict[str, Any]:
        done = self.program(*words)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return last(done.stdout)

    def refused(self, *words: str) -> dict[str, Any]:
        done = self.program(*words)
        assert done.returncode == 1, (done.stdout, done.stderr)
        return last(done.stdout)["error"]  # type: ignore[no-any-return]

    @contextmanager
    def waiting(self, *words: str) -> Iterator["Waiting"]:
        out, err = self.home.root / "pair.out", self.home.root / "pair.err"
        out.unlink(missing_ok=True)
        program = Program("cachestore_svc", self.words("pair", "--name", self.home.root.name, *words), out=out, err=err)
        try:
            yield Waiting(program, out)
        finally:
            if program.poll() is None:
                program.kill()
                program.wait(WITHIN_S)

    @property
    def audit_file(self) -> Path:
        return self.home.root / "audit.jsonl"

    @property
    def door(self) -> str:
        return read_peers(self.peers_file).listen

    @property
    def identity(self) -> Identity:
        return read_identity(identity_file(self.peers_file))

    def caller_at_door(self, identity: Identity) -> StoreClient:
        """A program that speaks to this Mac's door, and shows this certificate."""
        tls = PinnedTls(self.identity.certificate.pem, SERVER_NAME, identity.certificate.pem, identity.key_pem)
        return StoreClient.connect(self.door, tls=tls, timeout_s=5, max_cuts=1)


@dataclass
class Waiting:
    """A `pair` that waits for the other side."""

    program: Program
    out: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    @property
    def first(self) -> dict[str, Any]:
        give_up = time.monotonic() + WITHIN_S
        while not self.lines:
            assert time.monotonic() < give_up, "it shows no code"
            time.sleep(0.02)
        return self.lines[0]

    def ended(self) -> tuple[int, list[dict[str, Any]]]:
        return self.program.wait(WITHIN_S), self.lines


def last(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])  # type: ignore[no-any-return]


@contextmanager
def mac(root: Path) -> Iterator[Mac]:
    with store_home(root) as home:
        peers_file = root / "peers.toml"
        yield Mac(home, home.start("--peers-file", str(peers_file)), peers_file)


def pair(host: Mac, joiner: Mac, host_words: Sequence[str] = (), joiner_words: Sequence[str] = ()) -> tuple[Any, Any]:
    """Pair the two; returns what each was told."""
    with host.waiting(*host_words) as waiting:
        line = waiting.first["line"]
        told = joiner.said("pair", line, "--name", joiner.home.root.name, *joiner_words)
        code, lines = waiting.ended()
    assert code == 0, lines
    return lines[-1], told


@pytest.fixture(scope="module")
def macs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mac, Mac]]:
    root = tmp_path_factory.mktemp("m")
    with ExitStack() as stack:
        studio, laptop = (stack.enter_context(mac(root / name)) for name in ("studio", "laptop"))
        told = pair(studio, laptop)
        assert [(each["event"], each["name"]) for each in told] == [("paired", "laptop"), ("paired", "studio")]
        assert all(each["store"]["is_running"] for each in told)
        assert told[0]["pin"] == laptop.identity.certificate.pin
        assert told[1]["pin"] == studio.identity.certificate.pin
        for each, other in ((studio, "laptop"), (laptop, "studio")):
            [line] = map(json.loads, each.audit_file.read_text().splitlines())
            assert (line["what"], line["peer"], line["outcome"]) == ("pair", other, "allowed")
            assert (line["gives"], line["takes"]) == ("default=read", "default=nothing")
        yield studio, laptop


def test_paired_stores_pull_by_name_in_both_directions(macs: tuple[Mac, Mac]) -> None:
    ada = SyntheticAgent(SMALL, 1).turn(600)
    for source, target in (macs, macs[::-1]):
        name, agent = source.home.root.name, f"from-{source.home.root.name}"
        with source.store.client() as theirs, target.store.client() as ours:
            publish(theirs, agent, ada, 0)
            assert ours.pull_agent(name, agent).origin_detail == f"{name}/{agent}@1"
            assert_whole(ours, agent, ada)
            assert name in ours.get_capabilities().peers


def test_a_paired_peer_may_what_its_role_may_and_in_its_namespace_alone(macs: tuple[Mac, Mac]) -> None:
    studio, laptop = macs
    with studio.caller_at_door(laptop.identity) as peer:
        assert set(peer.get_capabilities().roles) == {"peer"}
        for call in (
            lambda: peer.delete_agent("x"),
            lambda: peer.fork_agent("x", "y"),
            lambda: peer.reload_peers(),
            lambda: peer.find_missing(SyntheticAgent(SMALL, 1).turn(600).digests),
        ):
            with pytest.raises(PermissionDenied):
                call()
        with pytest.raises(Unauthenticated):
            peer.in_namespace("elsewhere").get_capabilities()


def test_pairing_gives_read_and_its_owner_may_give_more(macs: tuple[Mac, Mac]) -> None:
    studio, laptop = macs
    [shown] = studio.said("peers", "ls")["peers"]
    assert (shown["name"], shown["gives"], shown["takes"]) == ("laptop", "default=read", "default=nothing")
    with studio.store.client() as theirs, laptop.store.client() as ours:
        publish(theirs, "mover", SyntheticAgent(SMALL, 7).turn(300), 0)
        with pytest.raises(FailedPrecondition, match="`kvasir peers allow laptop --gives move` there") as told:
            ours.move_agent("mover", from_peer="studio")
        assert told.value.reason == "PEER_MAY_NOT"
        allowed = studio.said("peers", "allow", "laptop", "--gives", "move", "--takes", "default=copy")
        assert (allowed["gives"], allowed["takes"]) == ("default=move", "default=copy")
        ours.move_agent("mover", from_peer="studio")
        with pytest.raises(FailedPrecondition):
            ours.move_agent("mover", to_peer="studio")  # its owner may take it back, and nobody may bring it
        laptop.said("peers", "allow", "studio", "--gives", "move")
        theirs.move_agent("mover", from_peer="laptop")
    line = [json.loads(each) for each in studio.audit_file.read_text().splitlines()][-1]
    told = ["peers/allow", "laptop", "move", "default=copy"]
    assert [line[name] for name in ("what", "peer", "gives", "takes")] == told
    for words in (("--gives", "work=move"), ("--gives", "all"), ("--takes", "read")):
        assert studio.refused("peers", "allow", "laptop", *words)["kind"] == "InvalidArgument"
    assert studio.said("peers", "allow", "laptop", "--gives", "read", "--takes", "nothing")["gives"] == "default=read"


def test_the_door_opens_for_pinned_certificates_alone(macs: tuple[Mac, Mac]) -> None:
    studio, _ = macs
    with studio.caller_at_door(new_identity()) as stranger, pytest.raises(Unavailable):
        stranger.get_capabilities()
    # This store's own key gets through TLS, and is nobody's.
    with studio.caller_at_door(studio.identity) as itself, pytest.raises(Unauthenticated):
        itself.get_capabilities()
    with StoreClient.connect(studio.door, timeout_s=5) as plain, pytest.raises(Unavailable):
        plain.get_capabilities()


def test_a_machine_in_the_middle_of_paired_stores_is_not_spoken_to(macs: tuple[Mac, Mac], tmp_path: Path) -> None:
    _, laptop = macs
    with mac(tmp_path / "middle") as middle:
        pair(middle, laptop)
        # Who answers at studio's address has another key now.
        before = read_peers(laptop.peers_file).peers["studio"]
        moved = before.model_copy(update={"address": middle.door})
        change_peers(laptop.peers_file, lambda book: book.with_peer(moved))
        try:
            with laptop.store.client(timeout_s=60) as ours:
                ours.reload_peers()
                with pytest.raises(Unavailable) as told:
                    ours.pull_agent("studio", "ada", timeout_s=60)
            assert told.value.reason == "PEER_UNAVAILABLE"
        finally:
            change_peers(laptop.peers_file, lambda book: book.with_peer(before).without("middle"))
            laptop.said("peers", "rename", "studio", "studio-2")
            laptop.said("peers", "rename", "studio-2", "studio")


def test_a_namespace_that_was_not_given_is_not_read(tmp_path: Path) -> None:
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        pair(one, other, host_words=("--gives", "work=read"), joiner_words=("--gives", "read"))
        with other.store.client() as ours, pytest.raises(FailedPrecondition) as told:
            ours.pull_agent("a", "ada")
        assert told.value.reason == "PEER_REFUSED"
        with one.store.client() as theirs, pytest.raises(NotFound) as unknown:
            theirs.pull_agent("b", "ada")  # its own peer is for "work"
        assert unknown.value.reason == "PEER_UNKNOWN"


def test_a_removed_peers_running_stream_ends_and_its_calls_too(tmp_path: Path) -> None:
    big = SyntheticAgent(LARGE, 3).turn(256 * 12)
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        pair(one, other)
        third = PeerSettings(name="third", certificate=new_identity().certificate.text, namespaces=("default",))
        change_peers(one.peers_file, lambda book: book.with_peer(third))  # so that the door stays open
        with one.store.client() as theirs, one.caller_at_door(other.identity) as peer:
            publish(theirs, "ada", big, 0)
            frames = peer.get_blobs(big.digests)
            next(frames)
            answer = one.said("peers", "rm", "b")
            assert answer["store"]["ended_calls"] == 1
            assert answer["store"]["address"] == one.door
            with pytest.raises(KvasirError) as told:
                list(frames)
            assert (type(told.value), told.value.reason) == (Unauthenticated, "CREDENTIAL_REVOKED")
            with pytest.raises((Unauthenticated, Unavailable)):
                peer.get_capabilities()
        assert one.said("peers", "rm", "third")["store"]["address"] == ""
        with other.store.client(timeout_s=60) as ours, pytest.raises((Unavailable, FailedPrecondition)):
            ours.pull_agent("a", "ada", timeout_s=60)


@pytest.mark.long(2)
def test_our_own_pull_from_a_peer_ends_when_it_is_removed(tmp_path: Path) -> None:
    big = SyntheticAgent(LARGE, 3).turn(256 * 12)
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        pair(one, other)
        with one.store.client() as theirs, other.store.client(timeout_s=60) as ours:
            publish(theirs, "ada", big, 0)
            pulling = ours.pulling_agent("a", "ada", timeout_s=60)
            next(pulling)
            one.store.process.send_signal(signal.SIGSTOP)
            try:
                assert other.said("peers", "rm", "a")["store"]["ended_calls"] == 1
                with pytest.raises(NotFound, match="'a' was removed") as told:
                    list(pulling)
                assert told.value.reason == "PEER_UNKNOWN"
                with pytest.raises(NotFound):
                    ours.get_agent("ada")
            finally:
                one.store.process.send_signal(signal.SIGCONT)


def test_a_key_that_was_replaced_is_shown_from_the_reload_on(tmp_path: Path) -> None:
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        pair(one, other)
        door = one.door
        identity_file(one.peers_file).unlink()
        read_or_make_identity(identity_file(one.peers_file))
        with one.store.client() as owner:
            for is_known in (False, True):
                with one.caller_at_door(other.identity) as peer:
                    if is_known:
                        assert set(peer.get_capabilities().roles) == {"peer"}
                    else:
                        with pytest.raises(Unavailable):
                            peer.get_capabilities()
                owner.reload_peers()
        assert one.door == door


def test_five_wrong_guesses_end_the_code_and_both_sides_know(macs: tuple[Mac, Mac]) -> None:
    studio, laptop = macs
    before = read_peers(studio.peers_file).peers
    with studio.waiting() as waiting:
        address, code = waiting.first["address"], waiting.first["code"]
        wrong = "ABCD-EFGH" if code != "ABCD-EFGH" else "ABCD-EFGJ"
        for left in reversed(range(5)):
            told = laptop.refused("pair", wrong, "--at", address, "--name", "laptop")
            assert (told["reason"], told["metadata"]) == ("PAIRING_REFUSED", {"guesses_left": str(left)})
        exit_code, lines = waiting.ended()
    assert exit_code == 1
    assert [line.get("reason") for line in lines[1:-1]] == ["PAIRING_REFUSED"] * 5
    assert lines[-1]["error"]["reason"] == "PAIRING_REFUSED"
    told_last = [json.loads(line) for line in studio.audit_file.read_text().splitlines()][-6:]
    assert {(line["what"], line["outcome"], line["reason"]) for line in told_last} == {
        ("pair", "refused", "PAIRING_REFUSED")
    }
    assert [line["who"] for line in told_last] == [""] * 5 + ["owner"]
    # Nobody listens any more, for the right code either.
    assert laptop.refused("pair", code, "--at", address, "--name", "laptop")["kind"] == "Unavailable"
    assert read_peers(studio.peers_file).peers == before


@pytest.mark.long(2)
async def test_a_waiting_mac_is_listed_in_the_network_only_while_it_waits_and_if_it_says_so() -> None:
    async with announced("studio", "127.0.0.1:8643"):
        during = await find(0.5, ["127.0.0.1"])
    assert (during, await find(0.2, ["127.0.0.1"])) == ([WaitingMac("studio", "127.0.0.1:8643")], [])


@pytest.mark.parametrize(
    ("addresses", "nameable"),
    [
        (
            {"fe80::14", "fe80::1%lo0", "127.0.0.1", "fd00::5", "192.168.1.9", "10.0.0.2", "169.254.7.7"},
            "10.0.0.2 192.168.1.9 fd00::5 169.254.7.7",
        ),
        ({"169.254.7.7", "::1"}, "169.254.7.7"),
        ({"::1", "127.0.0.1"}, "127.0.0.1 ::1"),
    ],
)
def test_a_mac_is_announced_by_addresses_that_others_can_dial(addresses: set[str], nameable: str) -> None:
    assert finding._nameable(addresses) == nameable.split()
    found = finding._candidate(f"studio.{finding._TYPE}", [*addresses], 8643)
    assert found is not None
    assert found.address == f"{nameable.split()[0]}:8643", "mDNS gives them in no order"


@pytest.mark.long(2)
def test_a_macs_own_name_is_announced_though_it_has_addresses_of_a_link() -> None:
    """getaddrinfo gives them with an interface of this machine, which mDNS cannot send."""

    async def run(*addresses: str) -> list[WaitingMac]:
        async def own(_host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            return [(0, 0, 0, "", (address, port)) for address in addresses]

        asyncio.get_running_loop().getaddrinfo = own  # type: ignore[assignment, method-assign]
        async with announced("studio", "studio.local:8643"):
            return await find(0.5, ["127.0.0.1"])

    assert asyncio.run(run("fe80::1%lo0", "127.0.0.1")) == [WaitingMac("studio", "127.0.0.1:8643")]
    with pytest.raises(FailedPrecondition, match="IPv4"):
        asyncio.run(run("fe80::14%en0"))


def test_a_code_that_nobody_takes_ends_by_itself(macs: tuple[Mac, Mac]) -> None:
    with macs[0].waiting("--lifetime-s", "0.3") as waiting:
        code, lines = waiting.ended()
    assert (code, lines[-1]["error"]["kind"]) == (1, "DeadlineExceeded")


@pytest.mark.long(2)
def test_a_listener_ends_with_the_command_that_waits_however_that_ends(macs: tuple[Mac, Mac]) -> None:
    words = macs[0].words("pair", "--name", "studio", "--until-eof")
    command = [sys.executable, "-m", "cachestore_svc", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert json.loads(program.stdout.readline())["event"] == "waiting"
        program.stdin.close()
        assert program.wait(WITHIN_S) == 130


def test_a_store_pairs_with_no_other_name_of_itself(macs: tuple[Mac, Mac]) -> None:
    studio, _ = macs
    with studio.waiting() as waiting:
        told = studio.refused("pair", waiting.first["line"], "--name", "studio")
    assert told["field"] == "card.certificate"
    assert set(read_peers(studio.peers_file).peers) == {"laptop"}


def test_pairing_works_beside_a_store_that_does_not_run_and_holds_after_its_start(tmp_path: Path) -> None:
    ada = SyntheticAgent(SMALL, 7).turn(300)
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        one.store.stop()
        told, _ = pair(one, other)
        assert told["store"] == {"is_running": False}
        started = one.home.start("--peers-file", str(one.peers_file))
        with started.client() as theirs, other.store.client() as ours:
            publish(theirs, "ada", ada, 0)
            ours.pull_agent("a", "ada")
            assert_whole(ours, "ada", ada)


@pytest.mark.long(3)
def test_a_door_that_a_hangup_opens_while_the_store_starts_has_its_services(tmp_path: Path) -> None:
    with mac(tmp_path / "a") as one, mac(tmp_path / "b") as other:
        pair(one, other)
        one.store.stop()
        # As `kvasir up` starts it: a SIGHUP is held back until the store can hear it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            starting = one.home.start("--peers-file", str(one.peers_file), is_fresh=True, hangs_up=True)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        assert starting.log.count("peers.reloaded") == 1
        with one.caller_at_door(other.identity) as peer:
            assert set(peer.get_capabilities().roles) == {"peer"}


def test_after_two_reloads_at_once_the_door_is_where_the_last_book_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    own, other = new_identity(), new_identity()
    peer = PeerSettings(name="b", certificate=other.certificate.text, namespaces=("default",))
    doors = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    books = iter([PeerBook({"b": peer}, door, own) for door in doors])

    async def opened() -> str:
        edge = EdgeServer(Listening(f"unix:{tmp_path}/s"), ["x"], {}, Reports(lambda: "x"))
        service = PeerService(Peers(lambda: next(books)), edge)
        service.reloaded = lambda: asyncio.sleep(0)
        await edge.start()
        try:
            await service.settle()
            await asyncio.gather(service.reload(), service.reload())
            return service.address
        finally:
            await edge.close_door(0)
            await edge.grpc.stop(0)

    assert asyncio.run(opened()) == doors[-1]

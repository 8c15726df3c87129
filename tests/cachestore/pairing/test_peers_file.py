"""The file of peers: what a change writes is read back, whole or not at all, and never by halves."""

import asyncio
import json
import stat
import threading
from pathlib import Path

import pytest
from kvasir.credentials import replace_private_text, write_private_text
from kvasir.errors import FailedPrecondition, InvalidArgument, NotFound

from cachestore_svc.commands import pairing
from cachestore_svc.config import ConfigError
from cachestore_svc.moving.peering.peers import Peers, peer_name
from cachestore_svc.pairing.exchange import Card
from cachestore_svc.pairing.identity import identity_file, new_identity, read_identity, read_or_make_identity
from cachestore_svc.pairing.peers_file import MAX_PEERS, PeerBook, PeerSettings, change_peers, read_peers
from cachestore_svc.pairing.rights import Given, Gives, Takes

ADA, BOB = new_identity(), new_identity()
PAIRED = f'[[peer]]\nname = "{{}}"\ncertificate = "{ADA.certificate.text}"\n'


def paired(name: str, identity: object = ADA, **others: object) -> PeerSettings:
    text = identity.certificate.text  # type: ignore[attr-defined]
    return PeerSettings(name=name, certificate=text, **{"address": "h:1", "namespaces": ("default",), **others})  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    read_or_make_identity(identity_file(tmp_path / "peers.toml"))
    return tmp_path / "peers.toml"


def add(file: Path, *peers: PeerSettings) -> PeerBook:
    for peer in peers:
        change_peers(file, lambda book, peer=peer: book.with_peer(peer))  # type: ignore[misc]
    return read_peers(file)


def test_a_change_is_read_back_beside_what_was_written_by_hand(file: Path) -> None:
    token = file.with_name("t")
    write_private_text(token, "x" * 32)
    write_private_text(file, f'# mine\n[[peer]]\nname = "old"\naddress = "127.0.0.1:1"\ntoken_file = "{token}"\n')
    peer = paired("studio", namespaces=('a "b" \\ ü 😀', "default"), paired_at="2026-01-01T00:00:00Z")
    book = add(file, peer)
    assert book.peers == {"old": PeerSettings(name="old", address="127.0.0.1:1", token_file=token), "studio": peer}
    assert book.identity == read_identity(identity_file(file))
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(identity_file(file).stat().st_mode) == 0o600


def test_one_key_is_one_peer_and_a_name_is_given_once(file: Path) -> None:
    book = add(file, paired("studio"), paired("moved", address="h:2"))
    assert [(peer.name, peer.address) for peer in book.peers.values()] == [("moved", "h:2")]
    assert book.free_name("other", ADA.certificate) == "moved"
    assert book.free_name("moved", BOB.certificate) == "moved-2"
    assert len(book.free_name("m" * 64, BOB.certificate)) == 64


def test_the_name_of_a_removed_peer_is_given_to_no_other_key(file: Path) -> None:
    """What is noted of agents says who had them by these names."""
    add(file, paired("first"))
    change_peers(file, lambda book: book.with_name("first", "laptop"))
    change_peers(file, lambda book: book.without("laptop"))
    book = read_peers(file)
    assert book.free_name("laptop", BOB.certificate) == "laptop-2"
    assert book.free_name("first", BOB.certificate) == "first-2"
    add(file, paired("laptop-2", BOB))
    with pytest.raises(InvalidArgument, match="was removed"):
        change_peers(file, lambda book: book.with_name("laptop-2", "laptop"))
    # Its own key gets it again, and what was noted under its names.
    assert read_peers(file).free_name("laptop", ADA.certificate) == "laptop"
    book = add(file, paired("studio"))
    assert (book.peers["studio"].formerly, dict(book.removed)) == (("first", "laptop"), {})
    assert read_peers(file) == book


def test_two_programs_that_change_it_at_once_both_do(file: Path) -> None:
    peers = [PeerSettings(name=f"p{n}", address="127.0.0.1:1") for n in range(MAX_PEERS)]
    threads = [threading.Thread(target=add, args=(file, *peers[n::4])) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_peers(file).peers) == {peer.name for peer in peers}
    with pytest.raises(InvalidArgument, match="at most"):
        add(file, paired("one-more"))


def test_the_example_of_a_file_by_hand_is_one(tmp_path: Path) -> None:
    example = (Path(__file__).parents[3] / "compose/two-macs/peers.toml").read_text()
    (tmp_path / "peers").mkdir()
    write_private_text(tmp_path / "peers" / "studio.token", "x" * 32)
    write_private_text(tmp_path / "peers.toml", example.replace("@HOME@/.kvasir", str(tmp_path)))
    assert read_peers(tmp_path / "peers.toml").peers["studio"].token() == "x" * 32


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[[peer]]\nname = "a"\ncertificate = "AAAA"\n', "certificate"),
        (PAIRED.format("a") + 'namespaces = ["a\\u0000"]\n', "namespace"),
        (PAIRED.format("a") + PAIRED.format("b"), "same certificate"),
        ('listen = "nowhere"\n', "nowhere"),
        ("listen = 3\n", "peers.toml"),
        ('[[peer]]\nname = "a"\n', "address"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_the_old_book_stays(file: Path, text: str, wanted: str) -> None:
    add(file, paired("studio"))
    peers = Peers(lambda: read_peers(file))
    file.unlink()
    write_private_text(file, text)
    with pytest.raises(ConfigError, match=wanted):
        peers.reload()
    assert peers.names("default") == ["studio"]


def test_paired_peers_without_this_stores_key_are_refused(file: Path) -> None:
    add(file, paired("studio"))
    for break_it in (lambda path: path.chmod(0o644), lambda path: path.unlink()):
        break_it(identity_file(file))
        with pytest.raises(ConfigError, match="by its key"):
            read_peers(file)


def test_a_certificate_is_a_peer_by_its_key_in_the_namespaces_that_it_was_given(file: Path) -> None:
    add(file, paired("studio", namespaces=("default", "work")))
    peers = Peers(lambda: read_peers(file))
    for namespace in ("default", "work"):
        caller = peers.paired.principal_of(ADA.certificate.pem, namespace)
        assert caller is not None
        assert (peer_name(caller), caller.namespace, caller.roles) == ("studio", namespace, {"peer"})
    assert peers.paired.principal_of(ADA.certificate.pem, "secret") is None
    assert peers.paired.principal_of(BOB.certificate.pem, "default") is None
    assert peers.paired.principal_of(b"-----BEGIN CERTIFICATE-----", "default") is None


def test_a_namespace_names_its_own_peers_only(file: Path) -> None:
    add(file, paired("studio"), paired("silent", BOB, address=""), PeerSettings(name="old", address="127.0.0.1:1"))
    peers = Peers(lambda: read_peers(file))
    assert peers.names("default") == ["old", "silent", "studio"]
    assert peers.names("work") == ["old"]

    async def connected(name: str, namespace: str) -> None:
        async with peers.connect(name, namespace):
            pass

    with pytest.raises(NotFound):
        asyncio.run(connected("studio", "work"))
    with pytest.raises(FailedPrecondition, match="listens to no other"):
        asyncio.run(connected("silent", "default"))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(file: Path, mode: int) -> None:
    add(file, paired("studio"))
    file.chmod(mode)
    with pytest.raises(ConfigError, match="others can write it"):
        read_peers(file)


def test_a_pairing_of_before_there_were_rights_gives_read_and_takes_nothing(file: Path) -> None:
    write_private_text(file, PAIRED.format("studio") + 'namespaces = ["default", "work"]\naddress = "127.0.0.1:1"\n')
    assert read_peers(file).peers["studio"].given("work") == Given(Gives.READ, Takes.NOTHING)
    more = read_peers(file).peers["studio"].model_copy(update={"gives": ("work=move",), "takes": ("work=copy",)})
    change_peers(file, lambda book: book.with_peer(more))
    given = [read_peers(file).peers["studio"].given(each) for each in ("work", "default")]
    assert given == [Given(Gives.MOVE, Takes.COPY), Given()]


def test_a_reload_tells_who_lost_a_right(file: Path) -> None:
    add(file, paired("less", gives=("default=move",), takes=("default=move",)))
    peers = Peers(lambda: read_peers(file))
    for gives, takes in (("default=claim", "default=move"), ("default=claim", "default=copy"), ("default=move", "")):
        add(file, paired("less", gives=(gives,), takes=(takes,) if takes else ()))
        assert peers.reload() == ({"less"} if takes != "default=move" else set())
    change_peers(file, lambda book: book.without("less"))
    add(file, paired("kept"), paired("other", BOB, namespaces=("a", "b")))
    peers = Peers(lambda: read_peers(file))
    assert peers.reload() == set()
    add(file, paired("other", BOB, namespaces=("a",)))
    assert peers.reload() == {"other"}
    change_peers(file, lambda book: book.without("kept"))
    assert peers.reload() == {"kept"}
    # Another key under an old name is another peer.
    change_peers(file, lambda book: book.without("other").with_peer(paired("other", namespaces=("a",))))
    assert peers.reload() == {"other"}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "peers.toml"
    assert pairing.main(["peers", "rm", "bob", "--peers-file", str(file)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["reason"], str(tmp_path / "file") in error["message"]) == ("PEER_CONFIGURATION", True), error


def test_pairing_again_keeps_the_rights_that_no_option_names(file: Path) -> None:
    def pair(*words: str) -> tuple[str, str]:
        """Returns the rights that one side of a pairing prints."""
        options = pairing._parser().parse_args(["pair", "--name", "us", "--peers-file", str(file), *words])
        shown = asyncio.run(pairing._own(options).pin(Card("studio", BOB.certificate, "h:1")))
        given = [read_peers(file).peers["studio"].given(each) for each in shown["namespaces"]]
        assert shown["gives"].count("=") == len(given)
        return shown["gives"], shown["takes"]

    assert pair() == ("default=read", "default=nothing")
    words = ["--gives", "move", "--takes", "copy", "--peers-file", str(file)]
    allowed = pairing._parser().parse_args(["peers", "allow", "studio", *words])
    change_peers(file, lambda book: pairing._changed(allowed, book))
    kept = read_peers(file).peers["studio"].model_copy(update={"max_agents": 7, "max_bytes": 8})
    change_peers(file, lambda book: book.with_peer(kept))
    assert pair() == ("default=move", "default=copy")
    assert pair("--takes", "move") == ("default=move", "default=move")
    assert pair("--gives", "work=claim") == ("default=move, work=claim", "default=move, work=nothing")
    assert pair("--gives", "read", "--takes", "nothing") == (
        "default=read, work=claim",
        "default=nothing, work=nothing",
    )
    now = read_peers(file).peers["studio"]
    assert (now.max_agents, now.max_bytes) == (7, 8)
    change_peers(file, lambda book: book.without("studio"))
    assert pair("--takes", "copy") == ("default=read", "default=copy")


def test_a_reload_returns_the_peers_with_a_token_that_lost_a_right(file: Path) -> None:
    token = file.with_name("t")
    write_private_text(token, "x" * 32)

    def lost(gives: str = "default=move", address: str = "127.0.0.1:1", name: str = "old", more: str = "") -> set[str]:
        """Of a book with one peer that was written by hand."""
        entry = f'[[peer]]\nname = "{name}"\naddress = "{address}"\ntoken_file = "{token}"\ngives = ["{gives}"]\n'
        replace_private_text(file, entry + more)
        return peers.reload()

    write_private_text(file, "")
    peers = Peers(lambda: read_peers(file))
    assert lost() == set()
    assert lost(gives="default=claim") == set()
    assert lost(gives="work=claim") == {"old"}
    assert lost(gives="work=claim", more='takes = ["default=move"]\n') == set()
    assert lost(gives="work=claim", more='takes = ["default=copy"]\n') == {"old"}
    assert lost(gives="work=claim", more='max_agents = 2\ntakes = ["default=copy"]\n') == set()
    assert lost(address="127.0.0.1:2", gives="work=claim", more='takes = ["default=copy"]\n') == {"old"}
    assert lost(name="new") == {"old"}

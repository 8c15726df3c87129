"""What an engine reads of the file of peers, which the store's program writes; and what peers may do by it."""

from dataclasses import replace
from pathlib import Path

import pytest
from kvasir.credentials import HANDOVER, PEER

from cachestore_svc.pairing.identity import Identity, identity_file, new_identity, read_or_make_identity
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings, change_peers
from inference_svc.handover.pairings import PairingsFile, is_paired, peer_name

ADA, BEN = new_identity(), new_identity()


def paired(name: str, identity: Identity, *takes: str) -> PeerSettings:
    given = {"certificate": identity.certificate.text, "engine_address": "127.0.0.1:7"}
    return PeerSettings(name=name, namespaces=("default", "work"), takes=takes, **given)  # type: ignore[arg-type]


def written(file: Path, *peers: PeerSettings) -> None:
    book = PeerBook({peer.name: peer for peer in peers}, "127.0.0.1:5", None, {}, "127.0.0.1:6")
    change_peers(file, lambda old: replace(book, identity=old.identity))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    read_or_make_identity(identity_file(tmp_path / "peers.toml"))
    return tmp_path / "peers.toml"


def test_a_peer_is_known_by_its_certificate_and_gives_turns_where_it_may_bring_agents(file: Path) -> None:
    pairings = PairingsFile(file)
    pairings.refresh()
    assert (pairings.book.peers, pairings.book.listen) == ({}, "")
    written(file, paired("ada", ADA, "default=copy", "work=move"), PeerSettings(name="hand", address="unix:/x"))
    pairings.refresh()
    book = pairings.book
    assert (set(book.peers), book.listen, book.peers["ada"].engine_address) == ({"ada"}, "127.0.0.1:6", "127.0.0.1:7")
    identity = read_or_make_identity(identity_file(file))
    assert (book.key, book.certificate) == (identity.key_pem, identity.certificate.pem)
    callers = {name: book.caller(ADA.certificate.pem, name) for name in ("default", "work", "other")}
    assert {name: caller and caller.roles for name, caller in callers.items()} == {
        "default": {PEER},
        "work": {HANDOVER},
        "other": None,
    }
    caller = callers["work"]
    assert caller is not None
    assert (peer_name(caller), is_paired(caller), caller.namespace) == ("ada", True, "work")
    assert book.caller(BEN.certificate.pem, "work") is None
    assert book.caller(b"no certificate", "work") is None


def test_a_right_that_was_lost_and_a_peer_that_was_removed_end(file: Path) -> None:
    pairings = PairingsFile(file)
    written(file, paired("ada", ADA, "work=move"))
    pairings.refresh()
    before = pairings.book.caller(ADA.certificate.pem, "work")
    assert before is not None
    assert pairings.book.keeps(before)
    written(file, paired("ada", ADA, "work=copy"))
    pairings.refresh()
    assert not pairings.book.keeps(before)
    written(file, paired("ben", BEN, "work=move"))
    pairings.refresh()
    assert not pairings.book.keeps(before)
    assert pairings.book.caller(ADA.certificate.pem, "work") is None


@pytest.mark.parametrize("wrong", ["mode", "text", "key"])
def test_a_file_that_is_wrong_changes_nothing(file: Path, wrong: str) -> None:
    pairings = PairingsFile(file)
    written(file, paired("ada", ADA))
    pairings.refresh()
    before = pairings.book
    written(file, paired("ben", BEN))
    if wrong == "mode":
        file.chmod(0o666)
    elif wrong == "text":
        file.write_text("[[peer]]\ncertificate = 5\n")
    else:
        identity_file(file).chmod(0o644)
    pairings.refresh()
    assert pairings.book is before

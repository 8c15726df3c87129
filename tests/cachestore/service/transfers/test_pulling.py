"""Agents pulled from another store: whole, once, and of what is there already nothing again."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.credentials import write_private_text
from kvasir.errors import (
    AlreadyExists,
    FailedPrecondition,
    KvasirError,
    NotFound,
    Unavailable,
)
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest

from tests.cachestore.service.access.test_listening import certificate, tls_options
from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import (
    RunningStore,
    StoreHome,
    assert_whole,
    make_credentials,
    peers_file,
    publish,
    start_here,
    store_home,
)
from tests.made_models.synthetic import SMALL, TINY, WINDOWED, SyntheticAgent, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
MIB = 1 << 20


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningStore]:
    """Another Mac's store."""
    with store_home(tmp_path / "there") as home:
        yield home.start()


def test_an_agent_is_pulled_whole_with_provenance_and_again_only_what_is_new(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    ada = SyntheticAgent(TINY, 1)
    first, second = ada.turn(256 * 10), ada.turn(300)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        here = start_here(home, tmp_path, proxy.address)
        with here.client() as ours:
            publish(theirs, "ada", first, 0)
            seen: list[tuple[int, int, int]] = []
            made = ours.pull_agent(
                "mac", "ada", on_progress=lambda p: seen.append((p.blobs_done, p.blobs_total, p.bytes_done))
            )
            assert (made.version, made.origin, made.origin_detail) == (1, pb.ORIGIN_PULL, "mac/ada@1")
            assert seen[-1] == (10, 10, sum(digest.size_bytes for digest in first.digests))
            assert_whole(ours, "ada", first)
            before = proxy.received_bytes
            assert ours.pull_agent("mac", "ada").version == 1
            assert proxy.received_bytes - before < MIB
            publish(theirs, "ada", second, 1)
            before = proxy.received_bytes
            assert ours.pull_agent("mac", "ada").version == 2
            new_bytes = sum(digest.size_bytes for digest in second.new_blobs)
            assert proxy.received_bytes - before < new_bytes + MIB
            assert_whole(ours, "ada", second)
            assert list(ours.get_capabilities().peers) == ["mac"]


def test_a_pull_may_give_another_name_and_never_overwrites_another_memory(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    mine, theirs = SyntheticAgent(SMALL, 2).turn(300), SyntheticAgent(SMALL, 3).turn(400)
    with here.client() as ours, there.client() as other:
        publish(ours, "ada", mine, 0)
        publish(other, "ada", theirs, 0)
        with pytest.raises(AlreadyExists) as caught:
            ours.pull_agent("mac", "ada")
        assert caught.value.reason == "NOT_AN_ANCESTOR"
        assert_whole(ours, "ada", mine)
        ours.pull_agent("mac", "ada", local_agent_id="their ada")
        assert_whole(ours, "their ada", theirs)
        assert_whole(ours, "ada", mine)


def test_a_pull_is_an_update_when_the_line_here_is_one_of_their_versions(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    ada = SyntheticAgent(SMALL, 4)
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", ada.turn(300), 0)
        ours.pull_agent("mac", "ada")
        for parent in range(1, 5):
            last = ada.turn(300)
            publish(theirs, "ada", last, parent)
        assert ours.pull_agent("mac", "ada").version == 2
        assert_whole(ours, "ada", last)


def test_a_pull_brings_the_blocks_of_windows_and_next_time_only_new_ones(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    ada = SyntheticAgent(WINDOWED, 6)
    with here.client() as ours, there.client() as theirs:
        for parent, tokens in enumerate((1100, 50)):
            last = ada.turn(tokens)
            publish(theirs, "ada", last, parent)
            before = ours.get_stats().counters["blobs_written"]
            ours.pull_agent("mac", "ada")
            assert_whole(ours, "ada", last)
            # Of each group what is new: at first all blocks that are listed, then a tail alone; and the manifest.
            assert ours.get_stats().counters["blobs_written"] - before == len(last.new_blobs) + 1
        assert len(last.new_blobs) == 3


def test_what_is_pulled_binds_no_block_hash(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    turn = SyntheticAgent(SMALL, 5).turn(600, is_prompt=True)
    kv = kv_identity_hash(SMALL)
    chain = block_hash_chain("default", kv, list(turn.manifest.token_ids))
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        ours.pull_agent("mac", "ada")
        assert [*map(Digest.from_proto, theirs.find_prefix(kv, chain).blocks)] == turn.digests[:2]
        assert ours.find_prefix(kv, chain).tokens == 0


@pytest.mark.long(2)
def test_a_cut_pull_goes_on_without_getting_finished_blobs_again(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 6).turn(256 * 4)
    total = sum(digest.size_bytes for digest in turn.digests)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        here = start_here(home, tmp_path, proxy.address)
        with here.client() as ours:
            proxy.cut_after_received = total // 2
            ours.pull_agent("mac", "ada")
            assert proxy.cuts == 1
            assert proxy.received_bytes < total + 3 * MIB
            assert_whole(ours, "ada", turn)


@pytest.mark.long(5)
def test_a_peer_that_falls_silent_is_unavailable_and_the_next_pull_gets_the_rest(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 7).turn(256 * 4)
    total = sum(digest.size_bytes for digest in turn.digests)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        here = start_here(home, tmp_path, proxy.address, "--stall-timeout-s", "0.5")
        with here.client() as ours:
            proxy.silent_after_received = total // 2
            with pytest.raises(Unavailable) as caught:
                ours.pull_agent("mac", "ada", timeout_s=60)
            assert "mac" in caught.value.message
            with pytest.raises(NotFound):
                ours.get_agent("ada")
            missing = ours.find_missing(turn.digests)
            assert 0 < len(missing) < len(turn.digests)
            proxy.silent_after_received = None
            proxy.end_connections()
            before = proxy.received_bytes
            ours.pull_agent("mac", "ada")
            assert proxy.received_bytes - before < sum(digest.size_bytes for digest in missing) + MIB
            assert_whole(ours, "ada", turn)


@pytest.mark.long(3)
def test_a_peer_killed_in_the_middle_leaves_nothing_visible(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 8).turn(256 * 4)
    with there.client() as theirs:
        publish(theirs, "ada", turn, 0)

    def kill_at_one(progress: pb.TransferProgress) -> None:
        if progress.blobs_done == 1:
            there.kill()

    with proxy_to(there.address) as proxy, start_here(home, tmp_path, proxy.address).client() as ours:
        proxy.pause_s = 1.0 / (sum(digest.size_bytes for digest in turn.digests) >> 14)  # longer than a kill takes
        with pytest.raises(Unavailable):
            ours.pull_agent("mac", "ada", on_progress=kill_at_one, timeout_s=60)
        with pytest.raises(NotFound):
            ours.get_agent("ada")
        publish(ours, "ada", turn, 0)
        assert_whole(ours, "ada", turn)


@pytest.mark.long(2)
def test_two_pulls_at_once_end_in_one_line(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    turn = SyntheticAgent(LARGE, 9).turn(256 * 3)
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", turn, 0)

        with futures.ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda _: ours.pull_agent("mac", "ada"), range(3)))
        assert [version.version for version in made] == [1, 1, 1]
        assert_whole(ours, "ada", turn)


def test_an_absent_agent_or_peer_is_not_found(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    with here.client() as ours:
        for peer, agent in (("mac", "nobody"), ("elsewhere", "ada")):
            with pytest.raises(NotFound):
                ours.pull_agent(peer, agent)


def test_the_peers_credential_decides_which_namespace_is_read(home: StoreHome, tmp_path: Path) -> None:
    tokens = make_credentials(tmp_path / "c.toml")
    turn = SyntheticAgent(SMALL, 10).turn(300)
    cert, key = certificate(tmp_path, "mac")
    other, _ = certificate(tmp_path, "other")
    for name in ("peer", "foreign", "engine"):
        write_private_text(tmp_path / f"{name}.token", tokens[name] + "\n")
    write_private_text(tmp_path / "wrong.token", "x" * 40)
    with store_home(tmp_path / "there") as their_home:
        options = ["--credentials-file", str(tmp_path / "c.toml"), *tls_options(cert, key)]
        there = their_home.start(*options, listen="127.0.0.1:0")
        from kvasir.clients import Tls

        with there.client(tokens["all"], Tls(cert)) as theirs:
            publish(theirs, "ada", turn, 0)

        def peer(token: str, pin: Path) -> str:
            return f'"{there.address}"\ntoken_file = "{tmp_path}/{token}.token"\nca_file = "{pin}"'

        peers = {
            "good": peer("peer", cert),
            "foreign": peer("foreign", cert),
            "wrong": peer("wrong", cert),
            "unpinned": peer("peer", other),
            "tokenless": f'"{there.address}"\nca_file = "{cert}"',
        }
        here = home.start("--peers-file", str(peers_file(tmp_path / "peers.toml", **peers)))
        with here.client(timeout_s=60) as ours:
            refused: dict[str, tuple[type[KvasirError], str]] = {
                "foreign": (NotFound, "AGENT_NOT_FOUND"),
                "wrong": (FailedPrecondition, "PEER_REFUSED"),
                "tokenless": (FailedPrecondition, "PEER_REFUSED"),
                "unpinned": (Unavailable, "PEER_UNAVAILABLE"),
            }
            for name, (error_type, reason) in refused.items():
                with pytest.raises(error_type) as caught:
                    ours.pull_agent(name, "ada", timeout_s=60)
                assert caught.value.reason == reason, name
            assert ours.pull_agent("good", "ada").origin_detail == "good/ada@1"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[[peer]]\nname = "a"\naddress = "192.0.2.1:7000"\n', "ca_file"),
        ('[[peer]]\nname = "a/b"\naddress = "127.0.0.1:1"\n', "name"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\nhost = "x"\n', "host"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\n' * 2, "same name"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\ntoken_file = "/nowhere"\n', "/nowhere"),
        ("peer = 3", "peer"),
        ("[[", "peers.toml"),
    ],
)
def test_a_peers_file_that_is_wrong_keeps_the_store_from_starting(
    text: str, wanted: str, home: StoreHome, tmp_path: Path
) -> None:
    write_private_text(tmp_path / "peers.toml", text)
    assert wanted in home.refusal("--peers-file", str(tmp_path / "peers.toml"))


def test_a_peers_file_that_others_can_write_is_refused(home: StoreHome, tmp_path: Path) -> None:
    file = peers_file(tmp_path / "peers.toml", mac='"127.0.0.1:1"')
    file.chmod(0o622)
    assert "chmod 600" in home.refusal("--peers-file", str(file))

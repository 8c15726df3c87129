"""Archives of strangers: refused with nothing left visible, or imported with little memory."""

import io
import json
import tarfile
import threading
from pathlib import Path

import pytest
from kvasir.clients import StoreClient
from kvasir.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from kvasir.formats.archive import pack
from kvasir.formats.block_hash import kv_identity_hash

from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import StoreHome, assert_whole
from tests.made_models.synthetic import MIXED, SMALL, TINY, SyntheticAgent, SyntheticSnapshot, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
MIB = 1 << 20
OTHER = SyntheticAgent(SMALL, 12).turn(256)


def _tar(*members: tuple[str, bytes], **special: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in special.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _members(turn: SyntheticSnapshot) -> list[tuple[str, bytes]]:
    index = {
        "format": 1,
        "agent_id": "ada",
        "kv_identity_hash": kv_identity_hash(turn.manifest.kv_identity),
        "manifest": turn.manifest_digest.hash,
    }
    blobs = [(f"blobs/{digest.hash}", turn.new_blobs[digest]) for digest in turn.digests]
    return [("kvasir-archive.json", json.dumps(index).encode()), ("manifest.pb", turn.manifest_bytes), *blobs]


def test_hostile_archives_are_refused_and_leave_nothing_visible(home: StoreHome, tmp_path: Path) -> None:
    turn = SyntheticAgent(MIXED, 14).turn(600)
    members = _members(turn)
    good = _tar(*members)
    index, manifest, first, second = members[0], members[1], members[2], members[3]
    flipped = bytearray(good)
    flipped[good.index(turn.new_blobs[turn.digests[-1]]) + 5000] ^= 1
    bad_index = [(members[0][0], text) for text in (b"{}", b"\xff", b"[" * 60_000, b'{"format": 2}', b"{" * 70_000)]
    cases: dict[str, bytes] = {
        "nothing": b"",
        "no archive": b"x" * 5000,
        "zeros": bytes(10_240),
        "truncated in a header": good[:300],
        "truncated in a blob": good[: len(good) // 2],
        "no end": good[: good.rindex(b"ustar") - 257],
        "a bit flipped": bytes(flipped),
        "blobs swapped": _tar(index, manifest, second, first, *members[4:]),
        "a blob missing": _tar(*members[:-1]),
        "a blob more": _tar(*members, ("blobs/" + "0" * 64, b"x")),
        "a path": _tar(index, manifest, ("../../../tmp/x", first[1])),
        "an absolute path": _tar(index, manifest, ("/tmp/x", first[1])),
        "a link": _tar(index, manifest, first, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "a directory": _tar(("kvasir-archive.json", b""), type=tarfile.DIRTYPE),
        "a device": _tar(("kvasir-archive.json", b""), type=tarfile.CHRTYPE),
        "no manifest": _tar(index, *members[2:]),
        "manifest first": _tar(manifest, index, *members[2:]),
        "another manifest": _tar(index, ("manifest.pb", OTHER.manifest_bytes), *members[2:]),
        "a longer blob": _tar(index, manifest, (first[0], first[1] + b"x"), *members[3:]),
        "bytes after the end": good + b"x" * 512,
        "an index of a gigabyte": _huge_header("kvasir-archive.json", 1 << 30),
        "a manifest of a terabyte": good[:1024] + _huge_header("manifest.pb", 1 << 40),
        "a negative size": _huge_header("kvasir-archive.json", -5),
        **{f"bad index {n}": _tar(each, *members[1:]) for n, each in enumerate(bad_index)},
    }
    running = home.start()
    with running.client() as client:
        for name, data in cases.items():
            with pytest.raises(InvalidArgument):
                client.import_agent("ada", [data])
            with pytest.raises(NotFound):
                client.get_agent("ada")
            assert client.get_stats().agent_count == 0, name
        assert client.import_agent("ada", [good]).version == 1
        assert_whole(client, "ada", turn)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h"]


def test_a_damaged_archive_is_refused_by_a_store_that_has_its_blobs_sound(home: StoreHome) -> None:
    """A user would keep it for a copy of the agent."""
    turn = SyntheticAgent(MIXED, 14).turn(600)
    good = _tar(*_members(turn))
    with home.start().client() as client:
        client.import_agent("ada", [good])
        for digest in turn.digests:
            damaged = bytearray(good)
            damaged[good.index(turn.new_blobs[digest]) + digest.size_bytes - 1] ^= 1
            with pytest.raises(InvalidArgument, match=digest.hash):
                client.import_agent("eve", [bytes(damaged)])
        assert client.get_stats().agent_count == 1
        assert_whole(client, "ada", turn)
        assert client.import_agent("eve", [good]).version == 1
        assert_whole(client, "eve", turn)


def _huge_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + b"{}" * 10_000


@pytest.mark.long(3)
def test_a_large_import_needs_little_memory(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 15).turn(256 * 20)
    total = sum(digest.size_bytes for digest in turn.digests)
    before = running.memory_bytes()
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, running.memory_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    with running.client() as client:
        client.import_agent("ada", pack(turn.manifest, turn.new_blobs, agent_id="ada"))
        done.set()
        watching.join()
        assert_whole(client, "ada", turn)
    assert total > 130 * MIB
    assert peak - before < 70 * MIB, (peak - before) / MIB


def test_an_import_into_a_full_quota_is_refused_and_the_next_operation_works(home: StoreHome) -> None:
    running = home.start("--quota-bytes", str(2 * MIB))
    turn = SyntheticAgent(TINY, 16).turn(256 * 20)
    with running.client() as client:
        with pytest.raises(ResourceExhausted):
            client.import_agent("ada", pack(turn.manifest, turn.new_blobs, agent_id="ada"))
        with pytest.raises(NotFound):
            client.get_agent("ada")
        assert client.get_stats().agent_count == 0


@pytest.mark.long(2)
def test_an_import_that_is_cut_leaves_nothing_visible(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 17).turn(256 * 3)
    archive = b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))
    with proxy_to(running.address) as proxy, StoreClient.connect(proxy.address) as client:
        proxy.cut_after_sent = len(archive) // 2
        with pytest.raises(Unavailable):
            client.import_agent("ada", [archive])
    with running.client() as client:
        with pytest.raises(NotFound):
            client.get_agent("ada")
        client.import_agent("ada", [archive])
        assert_whole(client, "ada", turn)

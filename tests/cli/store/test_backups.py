"""`kvasir backup` beside a store that runs, and `kvasir restore`: a new home that equals the old one, or none."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from kvasir.cli.backups import commands
from kvasir.cli.backups import folder as folder_module
from kvasir.cli.backups.folder import BackupFolder
from kvasir.cli.backups.last import FILE
from kvasir.clients import StoreClient
from kvasir.credentials import write_private_text

from cachestore_svc.__main__ import open_store
from cachestore_svc.config import read_settings
from cachestore_svc.pairing.identity import new_identity
from cachestore_svc.pairing.peers_file import read_peers
from tests.cachestore.core.lab import Lab
from tests.cachestore.core.lab import publish as publish_at
from tests.cli.running import Cli, in_process
from tests.cli.store.conftest import publish
from tests.made_models.synthetic import SyntheticAgent
from tests.running import in_memory

_CUT = """
import time
from pathlib import Path
from kvasir.cli.backups import folder
def half(source, write):
    Path({ready!r}).touch()
    time.sleep(60)
folder._copied = half
from tests.cli.running import in_process
in_process("--home", {home!r}, "restore", {folder!r})
"""
_PAIRED = "identity.pem peers.toml"


@pytest.fixture(scope="module")
def made(cli: Cli) -> Iterator[Path]:
    """A backup of the home, made while its store runs."""
    folder = in_memory.home() / "backup"
    with StoreClient.connect(f"unix:{cli.home}/run/store.sock") as client:
        publish(client, "kept", SyntheticAgent(seed=4).turn(300), 0)
        assert cli.done("backup", folder, "--json").value["damaged"] == []
        client.delete_agent("kept")
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(made, tmp_path / "kept"))


def _killed_while_made(key: Path) -> Path:
    """What is left of a key file whose maker was killed before it gave it its name."""
    program = (
        "import os, signal, sys; from pathlib import Path; from kvasir.credentials import write_private_text; "
        "os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL); write_private_text(Path(sys.argv[1]), '6d' * 32)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(key)], check=False).returncode < 0
    [left] = key.parent.glob(f".{key.name}.*")
    assert left.read_text() == "6d" * 32
    return left


def contents(home: Path) -> dict[str, Any]:
    """Agents and versions of a home whose store does not run."""
    with open_store(read_settings({"data_dir": home / "store"})) as store:
        agents = store.agents.page("default").agents
        pages = [store.snapshots.page("default", agent.agent_id) for agent in agents]
    return {"agents": agents, "versions": [version for page in pages for version in page.snapshots]}


def test_a_restored_home_equals_the_old_one(cli: Cli, client: StoreClient, ada: SyntheticAgent, tmp_path: Path) -> None:
    cli.done("agents", "label", "ada", "team=red")
    cli.done("agents", "pin", "ada")
    (cli.home / "tokens").mkdir(exist_ok=True)
    (cli.home / "tokens" / "other.token").write_text("secret")
    left = _killed_while_made(cli.home / "seal.key")
    (cli.home / "seal.key").touch(mode=0o600)
    (cli.home / "seal.key").write_text("6d" * 32)
    (cli.home / "engine").mkdir(exist_ok=True)
    for name in ("lease-owner", "restore-costs.json", "returns.json"):
        (cli.home / "engine" / name).write_text("of this engine")
    folder, new = tmp_path / "backup", Cli(tmp_path / "new")
    first = cli.done("backup", folder, "--json").value
    listed = cli.done("agents", "ls", "--json").value, cli.done("agents", "history", "ada", "--json").value
    publish(client, "ada", ada.turn(60), 2)
    second = cli.done("backup", folder, "--json").value
    assert second["bytes"] > first["bytes"]
    assert second["copied_bytes"] < first["copied_bytes"], "blobs that it has are not copied again"
    (cli.home / "seal.key").unlink()
    left.unlink()
    client.rollback_agent("ada", 2)
    client.delete_agent("ada", force=True)
    restored = new.done("restore", folder, "--json").value
    assert restored["store"]["is_clean"]
    assert (new.home / "tokens" / "other.token").read_text() == "secret"
    assert not [*new.home.glob("*seal.key*")]
    of_engine = [path.name for path in (new.home / "engine").iterdir()]
    assert of_engine == ["returns.json"], "neither its name for leases, nor its machine's speed"
    for path in (folder, *folder.rglob("*"), new.home, *new.home.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    found = contents(new.home)
    assert [(each.agent_id, each.is_pinned, dict(each.labels)) for each in found["agents"]] == [
        ("ada", True, {"team": "red"})
    ]
    assert [each.version for each in found["versions"]] == [3, 2, 1]
    old = {row["version"]: row["manifest"]["hash"] for row in listed[1]}
    assert old == {each.version: each.manifest.hash for each in found["versions"] if each.version < 3}
    assert "is there already" in new("restore", folder).err


@pytest.mark.long(2)
def test_status_names_the_last_backup_and_the_next_one_needs_no_folder(cli: Cli, tmp_path: Path) -> None:
    (cli.home / FILE).unlink(missing_ok=True)
    assert cli("backup", "--json").value["error"]["reason"] == "NO_BACKUP"
    folder = tmp_path / "backup"
    first = cli.done("backup", folder, "--json", "--progress")
    told = [json.loads(line) for line in first.err.splitlines() if line.startswith("{")]
    assert told[0].keys() == {"done", "total"}
    assert all(each["done"] <= each["total"] for each in told)
    assert cli.done("backup", "--json").value["folder"] == str(folder)
    last = cli("status", "--json").value["backup"]
    assert (last["folder"], last["damaged"], last["files"]) == (str(folder), [], first.value["files"])
    assert f"(UTC) in {folder}" in cli("status").out
    assert FILE not in BackupFolder(folder, os.open(folder, os.O_RDONLY)).files()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("kvasir.sqlite3", "bucket"), "in a bucket"),
        (("bucket",), "in a bucket"),
        (("catalog",), "is in PostgreSQL: copy the database by pg_dump"),
    ],
)
def test_a_store_of_which_parts_lie_elsewhere_is_not_backed_up_without_them(
    tmp_path: Path, files: Sequence[str], why: str
) -> None:
    (tmp_path / "h" / "store").mkdir(parents=True)
    for name in files:
        (tmp_path / "h" / "store" / name).touch()
    refused = in_process("--home", tmp_path / "h", "--json", "backup", tmp_path / "backup")
    assert refused.code == 4
    assert "BACKUP_REFUSED" in refused.out
    assert why in refused.out
    assert not (tmp_path / "backup").exists()


@pytest.mark.long(2)
def test_a_backup_beside_a_store_that_writes_is_whole(cli: Cli, client: StoreClient, tmp_path: Path) -> None:
    is_over = threading.Event()

    def write() -> None:
        agent, version = SyntheticAgent(seed=5), 0
        while not is_over.is_set():
            publish(client, "busy", agent.turn(30), version)
            version += 1
            if version % 10 == 0:
                client.delete_agent("busy")
                agent, version = SyntheticAgent(seed=version), 0

    writing = threading.Thread(target=write)
    writing.start()
    try:
        copied = [cli.done("backup", tmp_path / "backup", "--json").value["copied_bytes"] for _ in range(2)]
        assert cli.done("store", "check", "--read-only", "--json").value["is_clean"]
    finally:
        is_over.set()
        writing.join()
    assert copied[1] > 0
    assert Cli(tmp_path / "new").done("restore", tmp_path / "backup", "--json").value["store"]["is_clean"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _nest(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [_flip, _grow, _nest, Path.unlink, _link])
@pytest.mark.parametrize("part", ["object", "list"])
def test_a_damaged_backup_is_refused_by_file_and_makes_no_home(
    kept: Path, tmp_path: Path, damage: Callable[[Path], None], part: str
) -> None:
    hurt = max(kept.glob("objects/*/*"), key=lambda path: path.stat().st_size)
    hurt = hurt if part == "object" else kept / "kvasir-backup.json"
    damage(hurt)
    refused = Cli(tmp_path / "new")("restore", kept)
    assert (refused.code in (4, 5, 6), str(hurt) in refused.err) == (True, True), refused.err
    assert list(tmp_path.iterdir()) == [kept], "no home, and no part of one"


@pytest.mark.parametrize("damage", [_flip, Path.unlink])
def test_a_part_is_restored_of_a_damaged_backup_and_missing_files_are_listed(
    kept: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    files = json.loads((kept / "kvasir-backup.json").read_text())["files"]
    hurt, (hash_, _) = max((item for item in files.items() if "/blobs/" in item[0]), key=lambda item: item[1][1])
    damage(kept / "objects" / hash_[:2] / hash_)
    new = Cli(tmp_path / "new")
    assert "kvasir restore --partial" in new("restore", kept).err
    ended = new("restore", kept, "--partial", "--json")
    assert (ended.code, ended.value["missing"], ended.value["files"]) == (1, [hurt], len(files) - 1), ended.err
    assert [each["problem"] for each in ended.value["store"]["findings"]] == ["DAMAGED_BLOB"]
    assert "kept" in {each.agent_id for each in contents(new.home)["agents"]}


def test_the_index_that_a_backup_lost_is_made_of_the_files(kept: Path, tmp_path: Path) -> None:
    files = json.loads((kept / "kvasir-backup.json").read_text())["files"]
    hash_, _ = files["store/kvasir.sqlite3"]
    _flip(kept / "objects" / hash_[:2] / hash_)
    new = Cli(tmp_path / "new")
    ended = new("restore", kept, "--partial")
    assert (ended.code, "missing, as it is damaged in the backup: store/kvasir.sqlite3" in ended.out) == (1, True)
    assert "store recover" in ended.err


def test_a_restored_home_reports_that_it_takes_the_old_ones_place_or_is_another(cli: Cli, tmp_path: Path) -> None:
    for name in ("identity.pem", "peers.toml"):
        (cli.home / name).write_text("")
        (cli.home / name).chmod(0o600)
    try:
        cli.done("backup", tmp_path / "backup")
    finally:
        (cli.home / "identity.pem").unlink()
        (cli.home / "peers.toml").unlink()
    place, another = Cli(tmp_path / "place"), Cli(tmp_path / "another")
    assert "--new-identity" in place.done("restore", tmp_path / "backup").err
    assert "identity" not in another.done("restore", tmp_path / "backup", "--new-identity").err
    for home, has in ((place.home, True), (another.home, False)):
        assert [(home / name).exists() for name in ("identity.pem", "peers.toml")] == [has, has]


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("has", "hurt"),
    [("identity.pem", "identity.pem"), (_PAIRED, "identity.pem"), (_PAIRED, _PAIRED)],
)
def test_a_home_whose_key_the_backup_lost_starts_and_is_paired_with_nobody(
    cli: Cli, tmp_path: Path, has: str, hurt: str
) -> None:
    peer = f'[[peer]]\nname = "b"\ncertificate = "{new_identity().certificate.text}"\n'
    texts = {"identity.pem": new_identity().certificate.pem.decode(), "peers.toml": peer}
    for name in has.split():
        write_private_text(cli.home / name, texts[name])
    try:
        cli.done("backup", tmp_path / "backup")
    finally:
        for name in has.split():
            (cli.home / name).unlink()
    files = json.loads((tmp_path / "backup" / "kvasir-backup.json").read_text())["files"]
    for name in hurt.split():
        _flip(tmp_path / "backup" / "objects" / files[name][0][:2] / files[name][0])
    new = Cli(tmp_path / "new")
    ended = new("restore", tmp_path / "backup", "--partial", "--json")
    assert (ended.code, ended.value["missing"], ended.value["files"]) == (
        1,
        hurt.split(),
        len(files) - len(has.split()),
    ), ended.err
    told = Cli(tmp_path / "told")("restore", tmp_path / "backup", "--partial").err
    assert ("pair it again" in told, "--new-identity" in told) == (True, False)
    assert read_peers(new.home / "peers.toml").peers == {}


def test_a_list_that_leads_out_of_the_home_is_refused(kept: Path, tmp_path: Path) -> None:
    listed = json.loads((kept / "kvasir-backup.json").read_text())
    name = max(listed["files"])
    for wrong in ("../x", "/tmp/x", "a/../../x", "."):
        files = dict(sorted({**listed["files"], wrong: listed["files"][name]}.items()))
        proof = blake3(json.dumps(files).encode()).hexdigest()
        (kept / "kvasir-backup.json").write_text(json.dumps({**listed, "files": files, "blake3": proof}))
        refused = Cli(tmp_path / "new")("restore", kept)
        assert (refused.code, "is no path in a home" in refused.err) == (6, True), refused.err
    assert list(tmp_path.iterdir()) == [kept], "no home, and no part of one"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("\ud800", "surrogates"), ("x" * 300, "too long"), ("store/kvasir.sqlite3/x", "which is a file")],
)
def test_a_list_of_names_that_no_home_has_is_refused(kept: Path, tmp_path: Path, wrong: str, why: str) -> None:
    listed = json.loads((kept / "kvasir-backup.json").read_text())
    files = {**listed["files"], wrong: listed["files"]["store/kvasir.sqlite3"]}
    proof = blake3(json.dumps(files).encode()).hexdigest()
    (kept / "kvasir-backup.json").write_text(json.dumps({**listed, "files": files, "blake3": proof}))
    refused = in_process("--home", tmp_path / "new", "restore", kept)
    assert (refused.code, why in refused.err) == (6, True), refused.err
    assert list(tmp_path.iterdir()) == [kept], "no home, and no part of one"


@pytest.mark.parametrize("part", ["object", "list"])
def test_a_file_that_claims_terabytes_fills_no_disk(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    object_ = next(kept.glob("objects/*/*"))
    os.truncate(object_ if part == "object" else kept / "kvasir-backup.json", 1 << 42)

    def copied(source: int, write: Callable[[bytes], object]) -> Any:
        assert os.fstat(source).st_size < 1 << 40, "it would be copied"
        return copy(source, write)

    copy = folder_module._copied
    monkeypatch.setattr(folder_module, "_copied", copied)
    refused = in_process("--home", tmp_path / "new", "restore", kept)
    assert (refused.code, "found 4398046511104" in refused.err) == (6, True), refused.err
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.long(3)
def test_a_restore_that_was_killed_leaves_nothing_to_the_next_one(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_adopted", lambda _: {"findings": [], "snapshots": 0, "blobs": 0})  # takes seconds
    ready = tmp_path / "ready"
    script = _CUT.format(home=str(tmp_path / "new"), folder=str(kept), ready=str(ready))
    with subprocess.Popen([sys.executable, "-c", script]) as cut:
        give_up = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < give_up
            assert cut.poll() is None
            time.sleep(0.01)
        [half] = tmp_path.glob(".new.restoring-*")
        other = tmp_path / ".new.restoring-mine"  # a file of this name is nobody's rest
        other.write_text("mine")
        assert in_process("--home", tmp_path / "new", "restore", kept).code == 4  # the backup is in use
        assert half.exists()
        cut.kill()
    ended = in_process("--home", tmp_path / "new", "restore", kept)
    words = " ".join(ended.err.split())
    assert (ended.code, f"`kvasir --home {tmp_path / 'new'} up -d` starts it." in words) == (0, True)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "new", "ready", ".new.restoring-mine"}


@pytest.mark.parametrize("name", ["", "objects", "objects/shelf", "kvasir-backup.json.new"])
def test_no_link_in_the_backups_folder_is_followed(cli: Cli, kept: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").write_text("theirs")
    shelf = next(kept.glob("objects/*")).name
    place = kept / name.replace("shelf", shelf)
    if place.is_dir():
        shutil.rmtree(place)
    place.symlink_to(tmp_path / ("file" if name.endswith("new") else "elsewhere"))
    refused = cli("backup", kept)
    assert refused.code == 4, refused.err
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_backup_removes_parts_of_one_that_was_killed_and_minds_no_files_of_others(cli: Cli, kept: Path) -> None:
    (kept / "objects" / ".new-1").write_text("cut")
    (kept / ".DS_Store").touch()
    cli.done("backup", kept)
    assert not (kept / "objects" / ".new-1").exists()
    assert (kept / ".DS_Store").exists()


def test_one_command_at_a_time_uses_a_backup(cli: Cli, kept: Path, tmp_path: Path) -> None:
    with BackupFolder.open(kept):
        refused = [in_process("--home", cli.home, "backup", kept)]
        refused.append(in_process("--home", tmp_path / "new", "restore", kept))
    assert [(each.code, "another command uses this backup" in each.err) for each in refused] == [(4, True)] * 2
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.long(8)
def test_a_share_that_locks_and_syncs_no_folder_takes_one_backup_at_a_time(
    cli: Cli, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, sync = fcntl.flock, os.fsync

    def macs_lock(file: int, how: int) -> None:
        if os.path.samestat(os.fstat(file), kept.stat()):
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        lock(file, how)

    def macs_sync(file: int) -> None:
        if os.path.samestat(os.fstat(file), kept.stat()):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        sync(file)

    monkeypatch.setattr(fcntl, "flock", macs_lock)
    monkeypatch.setattr(os, "fsync", macs_sync)
    (kept / "kvasir-backup.json").unlink()  # of a first backup that was killed
    for _ in range(2):
        assert (done := in_process("--home", cli.home, "backup", kept)).code == 0, done.err
    with BackupFolder.open(kept):
        refused = in_process("--home", cli.home, "backup", kept)
    assert (refused.code, "another command uses this backup" in refused.err) == (4, True), refused.err
    assert (done := in_process("--home", tmp_path / "new", "restore", kept)).code == 0, done.err


@pytest.mark.long(3)
def test_a_restored_homes_name_is_synced_once_it_is_there(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, synced = tmp_path / "new", list[tuple[Path, bool]]()
    monkeypatch.setattr(commands, "sync_directory", lambda path: synced.append((path, home.is_dir())))
    ended = in_process("--home", home, "restore", kept)
    assert ended.code == 0, ended.err
    assert synced == [(tmp_path, True)]


@pytest.mark.long(3)
def test_a_file_that_goes_while_a_home_is_backed_up_ends_no_backup(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = commands._names
    monkeypatch.setattr(commands, "_names", lambda *words: (*names(*words), "tokens/gone.token"))
    ended = in_process("--home", cli.home, "backup", kept)
    assert ended.code == 0, ended.err


def test_a_link_in_the_home_is_not_followed_and_a_damaged_blob_is_left_out(
    cli: Cli, ada: SyntheticAgent, tmp_path: Path
) -> None:
    folder = in_memory.home() / "backup"
    (cli.home / "tokens" / "link.token").parent.mkdir(exist_ok=True)
    (cli.home / "tokens" / "link.token").symlink_to("/etc/hostname")
    blob = max(cli.home.glob("store/namespaces/*/blobs/*/*"), key=lambda path: path.stat().st_size)
    whole = blob.read_bytes()
    _flip(blob)
    try:
        found = cli("backup", folder, "--json")
    finally:
        blob.write_bytes(whole)
        (cli.home / "tokens" / "link.token").unlink()
    assert (found.code, [Path(name).name for name in found.value["damaged"]]) == (1, [blob.name])
    assert found.value["links"] == ["tokens/link.token"]
    assert "link.token" not in (folder / "kvasir-backup.json").read_text()
    restored = Cli(tmp_path / "new")("restore", folder, "--json")
    assert (restored.code, [each["problem"] for each in restored.value["store"]["findings"]]) == (1, ["DAMAGED_BLOB"])
    shutil.rmtree(folder.parent)


def test_a_sealed_namespace_stays_sealed(tmp_path: Path) -> None:
    home, new = Cli(tmp_path / "home"), Cli(tmp_path / "new")
    lab = Lab(home.home / "store").seal("work")
    made = SyntheticAgent(seed=3).turn(300)
    with lab.open() as store:
        publish_at(store, "secret-agent", made, 0, "work")
    home.done("backup", tmp_path / "backup")
    digests = [digest.hash.encode() for digest in made.new_blobs]
    for path in filter(Path.is_file, (tmp_path / "backup").rglob("*")):
        data = path.read_bytes()
        assert not [plain for plain in (b"secret-agent", *digests, *made.new_blobs.values()) if plain in data]
    assert new.done("restore", tmp_path / "backup", "--json").value["store"]["findings"] == []
    with Lab(new.home / "store", masters=lab.masters, sealed=("work",)).open() as store:
        [agent] = store.agents.page("work").agents
        assert agent.agent_id == "secret-agent"
        [digest, *_] = made.new_blobs
        assert bytes(store.blobs.read("work", digest)) == made.new_blobs[digest]


def test_a_blob_of_a_sealed_namespace_that_was_damaged_is_copied_again_once_it_is_repaired(tmp_path: Path) -> None:
    home, new = Cli(tmp_path / "home"), Cli(tmp_path / "new")
    lab = Lab(home.home / "store").seal("work")
    made = SyntheticAgent(seed=3).turn(300)
    with lab.open() as store:
        publish_at(store, "ada", made, 0, "work")
    whole = {blob: blob.read_bytes() for blob in home.home.glob("store/namespaces/*/blobs/*/*")}
    for blob in whole:
        _flip(blob)
    namespaces = home.home / "store" / "namespaces"
    namespaces.rename(tmp_path / "other-disk")
    namespaces.symlink_to(tmp_path / "other-disk")
    home.done("backup", tmp_path / "backup")
    for blob, data in whole.items():
        blob.write_bytes(data)
    home.done("backup", tmp_path / "backup")
    new.done("restore", tmp_path / "backup")
    with Lab(new.home / "store", masters=lab.masters, sealed=("work",)).open() as store:
        assert {digest: bytes(store.blobs.read("work", digest)) for digest in made.new_blobs} == made.new_blobs


def test_a_backup_in_the_home_or_beside_other_files_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert "outside" in cli("backup", cli.home / "backup").err
    for name in (".DS_Store", "mine.txt"):
        (tmp_path / name).touch()
    assert "found mine.txt" in cli("backup", tmp_path).err
    (tmp_path / "mine.txt").unlink()
    cli.done("backup", tmp_path)
    assert Cli(tmp_path / "none")("backup", tmp_path / "b").code == 5
    assert Cli(tmp_path / "none")("restore", tmp_path / "b").code == 5

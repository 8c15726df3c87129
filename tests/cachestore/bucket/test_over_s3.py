"""A store on a real S3 server, versitygw: races, 503s, cut connections and kills lose nothing that was acknowledged.

`go install github.com/versity/versitygw/cmd/versitygw@v1.8.0` builds it once, into PATH or ~/.cache/kvasir-lab.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import certifi
import pytest
from kvasir.cli.running.home import Home
from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.bucket import bucket as bucket_module
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket, probe, put_blob
from tests.cachestore.service.running import RunningStore, store_home
from tests.cli.running import Cli
from tests.cli.store.conftest import publish
from tests.made_models.synthetic import SyntheticAgent, SyntheticSnapshot
from tests.running import in_memory

_PROGRAM = shutil.which("versitygw") or str(Path("~/.cache/kvasir-lab/versitygw").expanduser())
NEEDS_SERVER = pytest.mark.skipif(
    not Path(_PROGRAM).exists(), reason="no versitygw here: see the head of tests/cachestore/bucket/test_over_s3.py"
)
pytestmark = [NEEDS_SERVER, pytest.mark.long(20)]
_UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_UPLOADS = """
import sys
from pathlib import Path
from cachestore_svc.blobs.bucket.bucket import open_bucket, put_blob
put_blob(open_bucket(sys.argv[1], Path(sys.argv[2])), "large", bytes(96 << 20))
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Faults:
    """Passes connections on; of `every` so many one is refused by 503, and the next one is cut within its bytes."""

    def __init__(self, port: int) -> None:
        self.every = 0  # 0: none
        self.passed_bytes = 0
        self.faults = 0
        self.pause_s = 0.0  # for each piece
        self._port = port
        self._count = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._count += 1
                threading.Thread(target=self._serve, args=(client, self._count), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        fault = number % self.every if self.every else -1
        self.faults += fault in (0, 1)
        with client, suppress(OSError):
            if fault == 0:
                client.recv(1 << 16)
                client.sendall(_UNAVAILABLE)
                return
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
                back.start()
                self._copy(client, server, 1000 if fault == 1 else None)
                back.join()

    def _pass(self, data: bytes) -> None:
        """Before it goes on."""

    def _copy(self, source: socket.socket, target: socket.socket, most_bytes: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._pass(data)
                time.sleep(self.pause_s)
                target.sendall(data)
                passed += len(data)
                self.passed_bytes += len(data)
                if most_bytes is not None and passed > most_bytes:
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """versitygw with one bucket, and what stands before it."""
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    root, port = tmp_path / "s3", _free_port()
    (root / "data" / "bucket").mkdir(parents=True)
    keys = {"ROOT_ACCESS_KEY": "testkey", "ROOT_SECRET_KEY": "testsecret"}
    argv = [_PROGRAM, "--port", f"127.0.0.1:{port}", "posix", str(root / "data")]
    with (tmp_path / "s3.log").open("wb") as log, ExitStack() as ends:
        server = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **keys})
        ends.callback(server.wait)
        ends.callback(server.kill)
        give_up = time.monotonic() + 30
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < give_up, (tmp_path / "s3.log").read_text()
            time.sleep(0.05)
        made = Faults(port)
        ends.callback(made.close)
        yield made


@pytest.fixture
def credentials(tmp_path: Path, faults: Faults) -> Path:
    file = tmp_path / "credentials"
    file.touch(0o600)
    lines = "aws_access_key_id = testkey\naws_secret_access_key = testsecret\nregion = us-east-1\n"
    file.write_text(f"{lines}endpoint_url = http://127.0.0.1:{faults.port}\n")
    return file


@pytest.fixture
def bucket(credentials: Path) -> Bucket:
    return open_bucket("s3://bucket/agents", credentials)


def test_the_server_holds_every_race_and_objects_of_parts_come_whole(bucket: Bucket) -> None:
    probe(bucket, secrets.token_hex)
    large = secrets.token_bytes(65 << 20)
    assert put_blob(bucket, "large", large)
    assert not put_blob(bucket, "large", large)
    assert bucket.get("large", 1 << 30) == large
    assert bucket.get("large", 1000) == large[:1000]
    bucket.rename("large", "other")
    assert list(bucket.names("none")) == []
    assert bucket.size_bytes("large") is None
    bucket.remove("other")
    with pytest.raises(FileNotFoundError):
        bucket.get("other", 10)


def test_of_two_writers_of_a_large_object_one_wins(bucket: Bucket) -> None:
    sent = [bytes([writer]) * (65 << 20) for writer in range(2)]
    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(partial(bucket.put_new, "large"), sent))
    assert sorted(won) == [False, True]
    assert bucket.get("large", 1 << 30) == sent[won.index(True)]


def test_a_large_object_is_created_over_a_slow_line(
    faults: Faults, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of many pages to an index in the bucket is one request, which takes longer than others may."""
    monkeypatch.setattr(bucket_module, "_REQUEST_S", timedelta(seconds=1))
    monkeypatch.setattr(bucket_module, "_MULTIPART_BYTES", 1 << 20)
    bucket = open_bucket("s3://bucket/agents", credentials)
    faults.pause_s = 0.05
    data = secrets.token_bytes(2 << 20)
    assert bucket.put_new("index/1", data)
    faults.pause_s = 0.0
    assert bytes(bucket.get("index/1", 1 << 30)) == data


def test_a_kill_in_the_middle_of_an_object_of_parts_leaves_no_object(
    bucket: Bucket, faults: Faults, credentials: Path
) -> None:
    faults.pause_s = 0.02
    with subprocess.Popen([sys.executable, "-c", _UPLOADS, "s3://bucket/agents", str(credentials)]) as upload:
        give_up = time.monotonic() + 60
        while faults.passed_bytes < 24 << 20:
            assert upload.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.01)
        upload.kill()
    faults.pause_s = 0.0
    assert bucket.size_bytes("large") is None
    assert put_blob(bucket, "large", bytes(96 << 20))
    assert bucket.size_bytes("large") == 96 << 20


def test_a_store_among_faults_and_kills_loses_nothing_that_it_acknowledged(
    tmp_path: Path, faults: Faults, credentials: Path
) -> None:
    options = ["--blobs", "s3://bucket/agents", "--blob-credentials-file", str(credentials)]
    acknowledged: dict[Digest, bytes] = {}
    refused = 0
    with store_home(tmp_path / "h") as home:
        store = home.start(*options)
        for life in range(3):
            faults.every = 7
            with store.client() as client:
                killed_at = len(acknowledged) + 12
                while len(acknowledged) < killed_at:
                    turn = SyntheticAgent(seed=1000 * life + len(acknowledged) + refused).turn(300)
                    try:
                        client.put_blobs(turn.new_blobs)
                        acknowledged |= turn.new_blobs
                    except KvasirError:
                        refused += 1
                    assert refused < 100
            _kill_while_it_writes(store, life)
            faults.every = 0
            shutil.rmtree(home.data_dir / "tier")
            store = home.start(*options)
            with store.client() as client:
                assert client.find_missing(list(acknowledged)) == []
                read = dict(client.get_blobs(list(acknowledged)))
            assert read == acknowledged
        assert "testsecret" not in store.log
    assert faults.faults > 5


@pytest.mark.parametrize("option", ["--blobs", "--catalog"])
def test_check_looks_at_the_objects_of_the_bucket_that_the_data_note(
    faults: Faults, credentials: Path, option: str
) -> None:
    home = in_memory.home()
    cli, where = Cli(home), "s3://bucket/agents"
    try:
        cli.done("store", "serve", "-d", option, where, "--blob-credentials-file", str(credentials), "--json")
        with Home(home).endpoint("store").store_client() as client:
            turn = SyntheticAgent(seed=1).turn(300)
            client.put_blobs(turn.new_blobs)
        beside = cli("store", "check", "--read-only", "--json")
        if option == "--blobs":
            assert (beside.value["is_clean"], beside.value["blobs"]) == (True, len(turn.new_blobs))
        else:
            assert (beside.code, "lies in s3://bucket/agents" in beside.err + beside.out) == (4, True)
        with Home(home).endpoint("store").store_client() as client:  # the check took the bucket from no store
            publish(client, "ada", SyntheticAgent(seed=2).turn(300), 0)
        assert [row["temperature"] for row in cli.done("agents", "ls", "--json").value] == ["far"]
        cli.done("down", "--json")
        assert cli.done("store", "check", "--json").value["is_clean"]
        bucket = open_bucket(where, credentials)
        [place] = [name for name in bucket.folders() if len(name) == 32]
        digest = next(iter(turn.new_blobs))
        bucket.remove(f"{place}/{digest.hash}")
        found = cli("store", "check", "--json")
        assert found.code == 1, found.err
        assert [(each["problem"], digest.hash in each["detail"]) for each in found.value["findings"]] == [
            ("MISSING_FILE", True)
        ]
    finally:
        cli("down")
        shutil.rmtree(home)


def test_a_store_without_a_disk_that_lasts_loses_nothing_that_it_acknowledged(
    tmp_path: Path, faults: Faults, credentials: Path
) -> None:
    options = ["--catalog", "s3://bucket/agents", "--blob-credentials-file", str(credentials)]
    turns: dict[str, SyntheticSnapshot] = {}
    before: RunningStore | None = None
    for life in range(3):
        with store_home(tmp_path / f"h{life}") as home:  # an empty directory each time
            faults.every = 0
            store = home.start(*options)
            with store.client() as client:
                for agent, turn in turns.items():
                    assert client.get_snapshot(agent)[1] == turn.manifest_bytes
                    assert dict(client.get_blobs(list(turn.new_blobs))) == turn.new_blobs
                assert {each.agent_id for each in client.list_agents().agents} == set(turns)
                faults.every = 9
                for number in range(6):
                    turn = SyntheticAgent(seed=100 * life + number).turn(300)
                    with suppress(KvasirError):
                        client.put_blobs(turn.new_blobs)
                        client.commit(f"a{life}-{number}", client.put_manifest(turn.manifest_bytes), 0)
                        turns[f"a{life}-{number}"] = turn
            assert before is None or before.process.poll() is not None
            store.kill()
            before = store
    assert len(turns) > 6
    assert faults.faults > 5


def _kill_while_it_writes(store: RunningStore, life: int) -> None:
    """kill -9 while another thread sends blobs."""

    def send() -> None:
        with suppress(KvasirError), store.client() as client:
            for number in range(100):
                client.put_blobs(SyntheticAgent(seed=-1000 * life - number - 1).turn(600).new_blobs)

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.3)
    store.kill()
    sender.join()

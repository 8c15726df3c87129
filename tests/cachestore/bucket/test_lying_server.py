"""A bucket's server that lies, drips, repeats itself or forgets: a store neither dies nor hangs of it, and removes
nothing on its word."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import certifi
import pytest
from kvasir.credentials import CLIENT, ENGINE, Principal
from kvasir.errors import KvasirError
from obstore.store import S3Store

from cachestore_svc.blobs.bucket import bucket as bucket_module
from cachestore_svc.blobs.bucket import patience, uplink
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket, put_blob
from tests.cachestore.bucket.lying_server import Answer, LyingServer, Request, headers, whole
from tests.cachestore.service.running import assert_whole, make_credentials, publish, store_home
from tests.made_models.synthetic import SyntheticAgent

WHERE = "s3://bucket/agents"
_READS = """
import sys
from pathlib import Path
from cachestore_svc.blobs.bucket.bucket import open_bucket
bucket = open_bucket(sys.argv[1], Path(sys.argv[2]))
assert bytes(bucket.get("a/b", 10)) == bytes(10)
assert bucket.get_tagged("a/b", 10)[0] == bytes(10)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    made = LyingServer()
    yield made
    made.close()


@pytest.fixture
def credentials(tmp_path: Path, server: LyingServer) -> Path:
    file = tmp_path / "credentials"
    file.touch(0o600)
    lines = "aws_access_key_id = testkey\naws_secret_access_key = testsecret\nregion = us-east-1\n"
    file.write_text(f"{lines}endpoint_url = http://127.0.0.1:{server.port}\n")
    return file


@pytest.fixture
def patient(credentials: Path) -> Bucket:
    return open_bucket(WHERE, credentials)


@pytest.fixture
def bucket(credentials: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return _impatient(credentials, monkeypatch, 0.3)


def _impatient(credentials: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Bucket:
    monkeypatch.setattr(patience, "PATIENCE_S", patience_s)
    monkeypatch.setattr(patience, "_LIST_S", patience_s)
    monkeypatch.setattr(patience, "_NAME_S", 0.001)
    monkeypatch.setattr(bucket_module, "_SILENCE_S", timedelta(seconds=patience_s))
    return open_bucket(WHERE, credentials)


def _bytes(pieces: Iterator[bytes], size: int = 1 << 62) -> Callable[[Request], Answer | None]:
    """A lie about each object: of that size, and these bytes come."""
    return lambda request: Answer(200, headers(size), pieces) if request.method == "GET" and request.name else None


def _drops() -> Iterator[bytes]:
    while True:
        yield b"x"
        time.sleep(0.1)


def _silence() -> Iterator[bytes]:
    time.sleep(2)
    yield b"x"


def test_an_answer_that_claims_any_size_takes_no_memory(server: LyingServer, credentials: Path) -> None:
    """Asking for as much as it claims ended the process."""
    server.lie = lambda request: Answer(200, headers(1 << 62), iter([bytes(1 << 20)] * 2))
    subprocess.run([sys.executable, "-c", _READS, WHERE, str(credentials)], check=True, timeout=60)


@pytest.mark.long(2)
def test_a_server_that_closes_before_it_read_a_large_object_has_refused_it_if_one_is_there(
    server: LyingServer, patient: Bucket
) -> None:
    def cut(request: Request) -> None:
        if request.method == "PUT":
            raise ConnectionError

    patient.put("a/b", b"of another store")
    server.lie = cut
    large = bytes(1 << 20)
    assert not patient.put_new("a/b", large)
    for name, data in (("a/c", large), ("a/b", b"small")):
        with pytest.raises(OSError, match="the bucket answered"):
            patient.put_new(name, data)


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (404, "NoSuchBucket", "NoSuchBucket"),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId"),
        (301, "PermanentRedirect", "that it is in another region than the one given"),
    ],
)
def test_a_bucket_that_cannot_be_used_names_the_reason_and_is_none_that_lacks_an_object(
    server: LyingServer, patient: Bucket, status: int, code: str, why: str
) -> None:
    server.lie = lambda _: whole(status, f"<Error><Code>{code}</Code></Error>".encode())
    for ask in (lambda: patient.put_new("a/b", b"new"), lambda: patient.get("a/b", 10), lambda: patient.names("a")):
        with pytest.raises(OSError, match=f"the bucket answered {why}") as refused:
            ask()
        assert not isinstance(refused.value, FileNotFoundError)


@pytest.mark.usefixtures("server")
def test_a_server_that_is_not_there_is_named_as_such() -> None:
    known = {"access_key_id": "k", "secret_access_key": "s", "region": "r", "endpoint": "http://127.0.0.1:1"}
    store = S3Store("bucket", **known, client_options={"allow_http": True}, retry_config={"max_retries": 0})  # type: ignore[arg-type, call-overload]
    with pytest.raises(OSError, match="the bucket answered nothing: there is no connection to its server"):
        Bucket(store, WHERE).get("a/b", 10)


def test_a_size_that_only_the_look_claims_cuts_no_object(server: LyingServer, patient: Bucket) -> None:
    patient.put("a/b", bytes(100))
    server.lie = lambda request: Answer(200, headers(10)) if request.method == "HEAD" else None
    assert bytes(patient.get("a/b", 1 << 40)) == bytes(100)


@pytest.mark.long(3)
@pytest.mark.parametrize("pieces", [_drops, _silence])
def test_a_folder_that_does_not_answer_keeps_one_request_waiting(
    server: LyingServer, credentials: Path, monkeypatch: pytest.MonkeyPatch, pieces: Callable[[], Iterator[bytes]]
) -> None:
    bucket = _impatient(credentials, monkeypatch, 0.8)
    for folder in ("slow", "quick"):
        bucket.put(f"{folder}/b", bytes(100))
    server.lie = lambda request: _bytes(pieces(), 100)(request) if "slow" in request.name else None

    def reads(name: str) -> float:
        began = time.monotonic()
        with pytest.raises(OSError, match="the bucket answered"):
            bucket.get(name, 101)
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(reads, ["slow/b"] * 8))
        assert min(first) > 0.7
        before = server.requests
        one = pool.submit(reads, "slow/b")
        while server.requests == before:
            time.sleep(0.001)
        reads("slow/b")
        assert not one.done()  # the other was refused at once: this one finds out whether the folder still is slow
        assert bytes(bucket.get("quick/b", 101)) == bytes(100)
        assert one.result() > 0.7
    server.lie = lambda _: None
    assert bytes(bucket.get("slow/b", 101)) == bytes(100)
    with ThreadPoolExecutor(8) as pool:
        assert all(bytes(each) == bytes(100) for each in pool.map(lambda _: bucket.get("slow/b", 101), range(8)))


def test_a_long_write_that_found_its_object_there_shows_no_slow_folder() -> None:
    now = [0.0]
    asked = patience.Patience(lambda: now[0])
    with suppress(FileExistsError), asked.asking("a/b"):
        now[0] += 60
        raise FileExistsError
    with asked.asking("a/b"), asked.asking("a/c"):
        pass


@pytest.mark.parametrize("was_slow_to_write", [True, False])
def test_no_read_is_refused_beside_a_long_write(was_slow_to_write: bool) -> None:
    now = [0.0]
    asked = patience.Patience(lambda: now[0])
    with suppress(OSError), asked.asking("a/b", writes=was_slow_to_write):
        now[0] += 60
        raise OSError
    with asked.asking("a/b", writes=True), asked.asking("a/c"):
        pass


def test_a_part_that_was_taken_shows_that_the_folder_takes_writes_again() -> None:
    now = [0.0]
    asked = patience.Patience(lambda: now[0])
    with suppress(OSError), asked.asking("a/b", writes=True):
        now[0] += 60
        raise OSError
    with asked.asking("a/b", writes=True) as was_taken:
        with pytest.raises(OSError, match="too slowly"), asked.asking("a/c", writes=True):
            pass
        was_taken()
        with asked.asking("a/c", writes=True):
            pass


def test_an_object_that_comes_slowly_but_steadily_comes_whole() -> None:
    now = [0.0]

    def stream(_: int) -> Iterator[bytes]:
        for _ in range(12):
            now[0] += 9
            yield bytes(1 << 18)

    found = SimpleNamespace(meta={"size": 12 << 18}, stream=stream)
    assert patience.Patience(lambda: now[0]).first_bytes(patience.Pieces(found), "a/b", 1 << 40) == bytes(12 << 18)


def test_objects_that_share_a_slow_link_come_whole() -> None:
    now = [0.0]
    asked = patience.Patience(lambda: now[0])

    def read(bytes_a_second: int) -> int:
        def stream(_: int) -> Iterator[bytes]:
            for _ in range(30):
                now[0] += 1
                yield bytes(bytes_a_second)

        found = SimpleNamespace(meta={"size": 30 * bytes_a_second}, stream=stream)
        return len(asked.first_bytes(patience.Pieces(found), "a/b", 1 << 40))

    with ExitStack() as others, asked.asking("a/b"):
        with pytest.raises(OSError, match="too slowly"):
            read(20_000)
        for number in range(47):
            others.enter_context(asked.asking(f"a/{number}"))
        assert read(20_000) == 600_000
        with pytest.raises(OSError, match="too slowly"):
            read(1)


@pytest.mark.parametrize("names", [["agents/a/1", "agents/a/2"], []])
def test_a_list_that_never_ends_is_an_error(server: LyingServer, bucket: Bucket, names: list[str]) -> None:
    server.lie = lambda request: None if request.name else server.listing("", names, "another page")
    with pytest.raises(OSError, match="the bucket answered"):
        list(bucket.names("a"))
    if not names:
        with pytest.raises(OSError, match="the bucket answered"):
            bucket.folders()
        before = server.requests
        time.sleep(0.2)
        assert server.requests <= before + 1  # nobody goes on asking


def test_an_object_for_a_slow_uplink_goes_in_parts_few_at_once(
    server: LyingServer, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request, or with twelve parts beside each other, none would come in time."""
    monkeypatch.setattr(bucket_module, "_PART_BYTES", 1 << 20)
    gate, under_way, most, sizes = threading.Lock(), 0, 0, list[int]()

    def takes_parts(request: Request) -> Answer | None:
        nonlocal under_way, most
        if request.method == "POST":
            kind = "CompleteMultipartUpload" if request.body else "InitiateMultipartUpload"
            text = f"<{kind}Result><UploadId>1</UploadId><ETag>&quot;1&quot;</ETag></{kind}Result>"
            return whole(200, text.encode())
        if request.method != "PUT":
            return None
        with gate:
            under_way, sizes[:] = under_way + 1, [*sizes, len(request.body)]
            most = max(most, under_way)
        time.sleep(0.05)
        with gate:
            under_way -= 1
        return whole(200, ETag='"1"')

    server.lie = takes_parts
    assert put_blob(open_bucket(WHERE, credentials), "a/b", bytes(17 << 20))
    assert sizes == [1 << 20] * 17
    assert 1 < most <= 3


@pytest.mark.long(2)
def test_objects_that_share_a_slow_uplink_all_arrive(
    server: LyingServer, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at once, each in less than a request's time if it has the link, and none if all share it."""
    monkeypatch.setattr(bucket_module, "_REQUEST_S", timedelta(seconds=0.7))
    monkeypatch.setattr(uplink, "LEAST_AT_ONCE_BYTES", 1 << 20)
    server.uplink_bytes_a_second = 4 << 20
    bucket = open_bucket(WHERE, credentials)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: put_blob(bucket, f"{number % 2}/{number}", bytes(600_000)), range(8)))
    assert sorted(map(len, server.objects.values())) == [600_000] * 8


def test_a_list_may_begin_later_than_an_object(
    server: LyingServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server over a slow disk looks at each of a thousand objects before it answers."""
    monkeypatch.setattr(patience, "_LIST_S", 10)
    bucket.put("a/b", b"1")

    def late(request: Request) -> None:
        if not request.name:
            time.sleep(0.5)

    server.lie = late
    assert bucket.names("a") == ["b"]


async def test_lists_are_read_where_a_loop_runs(patient: Bucket) -> None:
    """As at a store's start. This server knows no folders."""
    patient.put("a/b", b"1")
    assert (list(patient.names("a")), patient.folders(), bool(patient.names("c", only_some=True))) == (["b"], [], False)


def test_an_object_that_was_not_copied_is_not_removed(server: LyingServer, patient: Bucket) -> None:
    patient.put("a/b", bytes(100))
    lie = whole(200, b'<CopyObjectResult><ETag>"1"</ETag></CopyObjectResult>')
    server.lie = lambda request: lie if "x-amz-copy-source" in request.headers else None
    with pytest.raises(OSError, match="copied"):
        patient.rename("a/b", "a/c")
    assert bytes(patient.get("a/b", 101)) == bytes(100)
    server.lie = lambda _: None
    patient.rename("a/b", "a/c")
    assert list(patient.names("a")) == ["c"]


@pytest.mark.long(13)
def test_calls_that_need_no_bucket_go_on_while_it_drips(tmp_path: Path, server: LyingServer, credentials: Path) -> None:
    """Also those of the namespace whose blobs it does not give, and those of copies on the disk."""
    principals = [Principal(name, name, frozenset({ENGINE, CLIENT})) for name in ("mine", "theirs")]
    tokens = make_credentials(tmp_path / "tokens", principals)
    options = ["--blobs", WHERE, "--blob-credentials-file", str(credentials)]
    turns = [SyntheticAgent(seed=seed).turn(300) for seed in range(24)]
    other = SyntheticAgent(seed=100).turn(300)
    with store_home(tmp_path / "h") as home:
        store = home.start(*options, "--credentials-file", str(tmp_path / "tokens"))
        with store.client(tokens["theirs"]) as client:
            publish(client, "eve", other, 0)
        kept = {path.name for path in (home.data_dir / "tier").glob("*/*")}
        with store.client(tokens["mine"]) as client:
            for number, turn in enumerate(turns):
                publish(client, f"a{number}", turn, 0)
        for path in (home.data_dir / "tier").glob("*/*"):
            if path.name not in kept:
                path.unlink()
        server.lie = lambda request: (
            _bytes(_drops(), 100_000)(request)
            if len(request.name) > 64 and request.name.split("/")[-1] not in kept
            else None
        )

        def read(number: int) -> None:
            with suppress(KvasirError), store.client(tokens["mine"], timeout_s=90) as client:
                dict(client.get_blobs(turns[number % len(turns)].digests))

        with ThreadPoolExecutor(48) as pool:
            readers = [pool.submit(read, number) for number in range(48)]
            time.sleep(1)
            with store.client(tokens["theirs"]) as client:
                began = time.monotonic()
                assert_whole(client, "eve", other)
                publish(client, "eve", SyntheticAgent(seed=101).turn(300), 1)
                assert time.monotonic() - began < 5
            with store.client(tokens["mine"], timeout_s=90) as client:
                client.list_agents()
                assert time.monotonic() - began < 25
            server.lie = lambda _: None
            for reader in readers:
                reader.result()
        with store.client(tokens["mine"]) as client:
            for number, turn in enumerate(turns):
                assert_whole(client, f"a{number}", turn)

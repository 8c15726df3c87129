"""Large objects received without obstore: answers that are not plain are left to obstore, and no
object that was cut is taken for a whole one."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import certifi
import pytest

from cachestore_svc.blobs.bucket import bucket as bucket_module
from cachestore_svc.blobs.bucket import downlink as downlink_module
from cachestore_svc.blobs.bucket import patience
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket
from cachestore_svc.blobs.bucket.downlink import Downlink, NotPlain
from tests.cachestore.bucket.lying_server import Answer, LyingServer, headers
from tests.cli.certificates import make_certificate

WHERE = "s3://bucket/agents"
DATA = bytes(range(256)) * 6000  # 1.5 MB


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downlink_module, "getproxies", dict)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    made = LyingServer()
    made.objects["agents/a/b"] = DATA
    yield made
    made.close()


def opened(tmp_path: Path, port: int) -> Bucket:
    file = tmp_path / "credentials"
    file.touch(0o600)
    lines = "aws_access_key_id = testkey\naws_secret_access_key = testsecret\nregion = us-east-1\n"
    file.write_text(f"{lines}endpoint_url = http://127.0.0.1:{port}\n")
    return open_bucket(WHERE, file)


@pytest.fixture
def bucket(tmp_path: Path, server: LyingServer) -> Bucket:
    return opened(tmp_path, server.port)


class NoObstore:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"obstore's {name} was called")


def alone(bucket: Bucket) -> Bucket:
    """This bucket, which has no obstore to fall back to."""
    bucket._obstore = NoObstore()
    return bucket


def resting(bucket: Bucket) -> int:
    assert bucket._downlink is not None
    return len(bucket._downlink._resting)


@pytest.mark.parametrize("most_bytes", [len(DATA) + 1, len(DATA), len(DATA) - 1, 1 << 40])
def test_an_object_comes_without_obstore(bucket: Bucket, most_bytes: int) -> None:
    for _ in range(3):
        assert bytes(alone(bucket).get("a/b", most_bytes)) == DATA[:most_bytes]
    # The rest of an object that is not wanted whole would be the next answer's beginning.
    assert resting(bucket) == (most_bytes >= len(DATA))


def test_readers_beside_each_other_get_their_own_objects(server: LyingServer, bucket: Bucket) -> None:
    server.objects |= {f"agents/a/{number}": bytes([number]) * (1 << 20 | number) for number in range(8)}

    def read(number: int) -> list[bool]:
        own = server.objects[f"agents/a/{number}"]
        return [alone(bucket).get(f"a/{number}", 1 << 21) == own for _ in range(6)]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, range(8))) == [[True] * 6] * 8
    assert 1 <= resting(bucket) <= 8


def test_a_small_object_is_left_to_obstore(bucket: Bucket) -> None:
    with pytest.raises(AssertionError, match="was called"):
        alone(bucket).get("a/b", downlink_module.LEAST_BYTES - 1)


def _cut() -> Iterator[bytes]:
    yield DATA[:-1]
    raise OSError


def _chunks() -> Iterator[bytes]:
    yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)


LIES: dict[str, Callable[[], Answer]] = {
    "unavailable": lambda: Answer(503, {"Content-Length": "0"}),
    "elsewhere": lambda: Answer(307, {"Content-Length": "0", "Location": "http://127.0.0.1:1/"}),
    "in part": lambda: Answer(206, headers(3), [b"abc"]),
    "chunked": lambda: Answer(200, {"Transfer-Encoding": "chunked"}, _chunks()),
    "chunked, with a length": lambda: Answer(200, headers(3) | {"Transfer-Encoding": "chunked"}, _chunks()),
    "packed": lambda: Answer(200, headers(3) | {"Content-Encoding": "gzip"}, [b"abc"]),
    "no length": lambda: Answer(200, {"Connection": "close"}, [DATA]),
    "two lengths": lambda: Answer(200, headers(3) | {"content-length": "4"}, [b"abcd"]),
    "no number": lambda: Answer(200, {"Content-Length": "-3"}, [b"abc"]),
    "a folded line": lambda: Answer(200, {"Content-Length": "3\r\n 4"}, [b"abc"]),
    "long": lambda: Answer(200, {"x": "y" * (1 << 17)} | headers(3), [b"abc"]),
    "cut": lambda: Answer(200, headers(len(DATA)), _cut()),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_not_plain_is_left_to_obstore(server: LyingServer, bucket: Bucket, lie: str) -> None:
    lies = [LIES[lie]()]
    server.lie = lambda _: lies.pop() if lies else None
    assert bytes(bucket.get("a/b", 1 << 40)) == DATA
    assert not lies
    assert not resting(bucket)
    assert bucket._downlink is not None
    if lie not in ("cut", "long"):  # others are likely to be this server's way
        with pytest.raises(AssertionError, match="was called"):
            alone(bucket).get("a/b", 1 << 40)
    bucket._downlink._not_before = 0.0  # later
    assert bytes(alone(bucket).get("a/b", 1 << 40)) == DATA


def test_an_object_that_is_always_cut_is_an_error_and_never_short(server: LyingServer, bucket: Bucket) -> None:
    server.lie = lambda request: LIES["cut"]() if request.method == "GET" else None
    with pytest.raises(OSError, match="the bucket answered"):
        bucket.get("a/b", len(DATA) + 1)


def test_an_absent_object_is_not_found_and_others_come_this_way_still(bucket: Bucket) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            alone(bucket).get("a/c", 1 << 40)
        assert bytes(alone(bucket).get("a/b", 1 << 40)) == DATA


def _then_ends() -> Iterator[bytes]:
    yield DATA
    raise OSError


def _and_more() -> Iterator[bytes]:
    yield DATA
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


@pytest.mark.parametrize("pieces", [_then_ends, _and_more])
def test_a_connection_that_was_closed_or_brought_more_meanwhile_is_not_used(
    server: LyingServer, bucket: Bucket, pieces: Callable[[], Iterator[bytes]]
) -> None:
    server.lie = lambda _: Answer(200, headers(len(DATA)), pieces())
    assert bytes(bucket.get("a/b", len(DATA))) == DATA
    assert bucket._downlink is not None
    if bucket._downlink._resting:  # what came with the object was seen already
        [(_, connection)] = bucket._downlink._resting
        assert select.select([connection], [], [], 10)[0]
    server.lie = lambda _: None
    assert bytes(alone(bucket).get("a/b", len(DATA))) == DATA


def _drip(client: socket.socket, first: bytes) -> None:
    with client, suppress(OSError):
        client.recv(1 << 16)
        client.sendall(first)
        while True:
            client.sendall(b"x")
            time.sleep(0.02)


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\na: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"])
def test_a_head_or_a_body_that_drips_is_an_error_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.3)
    monkeypatch.setattr(bucket_module, "_SILENCE_S", bucket_module._SILENCE_S * 0.03)
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=_drip, args=(listener.accept()[0], first), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        bucket = alone(opened(tmp_path, listener.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises(OSError, match="the bucket answered too slowly"):
            bucket.get("a/b", 1 << 40)
        assert time.monotonic() - began < 5
        assert not resting(bucket)


def _in_pieces(client: socket.socket, pieces: int) -> None:
    """Send the first so many of 16 pieces of an object, and then nothing."""
    with client, suppress(OSError):
        client.recv(1 << 16)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA))
        for number in range(pieces):
            client.sendall(DATA[number * len(DATA) // 16 : (number + 1) * len(DATA) // 16])
            time.sleep(0.01)
        client.recv(1)


def test_an_object_that_comes_in_pieces_is_received_at_once(server: LyingServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: _in_pieces(listener.accept()[0], 16), daemon=True).start()
        downlink = Downlink(lambda _: f"http://127.0.0.1:{listener.getsockname()[1]}/a?b", 5)
        with downlink.coming("a") as coming:
            room = memoryview(bytearray(len(DATA)))
            with_head = coming.read_into(room) if coming._came else 0  # bytes that came with the answer's head
            assert coming.read_into(room[with_head:]) == len(DATA) - with_head
        assert bytes(room) == DATA


def test_a_server_that_falls_silent_within_an_object_is_an_error(server: LyingServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: _in_pieces(listener.accept()[0], 8), daemon=True).start()
        downlink = Downlink(lambda _: f"http://127.0.0.1:{listener.getsockname()[1]}/a?b", 0.5)
        began = time.monotonic()
        with downlink.coming("a") as coming:
            while coming.left_bytes > len(DATA) // 2:
                coming.read_into(memoryview(bytearray(coming.left_bytes)))
            with pytest.raises(OSError, match="the bucket answered too slowly"):
                coming.read_into(memoryview(bytearray(coming.left_bytes)))
        assert time.monotonic() - began < 5


def test_a_connection_that_rested_for_long_is_not_used(server: LyingServer) -> None:
    now = [0.0]
    downlink = Downlink(lambda name: f"http://127.0.0.1:{server.port}/bucket/{name}?", 5, lambda: now[0])

    def read() -> socket.socket:
        with downlink.coming("agents/a/b") as coming:
            room = memoryview(bytearray(coming.size_bytes))
            while room:
                room = room[coming.read_into(room) :]
        [(_, connection)] = downlink._resting
        return connection

    first = read()
    now[0] += 10
    assert read() is first
    now[0] += 10.1
    assert read() is not first
    assert first.fileno() == -1


@pytest.mark.parametrize(
    ("address", "proxies", "connects"),
    [
        ("http://example.com/a?b", {}, False),
        ("http://127.0.0.1/a?b", {"http": "http://p:1"}, False),
        ("http://127.0.0.1/a?b", {"no": "localhost"}, True),
        ("https://example.com/a?b", {}, True),
    ],
)
def test_no_plain_signature_leaves_the_machine_and_no_proxy_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, address: str, proxies: dict[str, str], connects: bool
) -> None:
    connected = list[object]()

    def connect(to: object, _: float) -> None:
        connected.append(to)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(downlink_module, "getproxies", lambda: proxies)
    with pytest.raises(NotPlain), Downlink(lambda _: address, 5).coming("a"):
        pass
    assert bool(connected) == connects


@pytest.mark.parametrize("is_known", [True, False])
def test_only_a_server_whose_certificate_is_known_gets_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    make_certificate(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate) if is_known else certifi.where())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    now, tries = [0.0], 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            nonlocal tries
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    tries += 1
                    with suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
                        while secured.recv(1 << 16):
                            secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        downlink = Downlink(lambda _: f"https://localhost:{port}/a?b", 5, lambda: now[0])
        if is_known:
            for _ in range(3):  # session tickets of TLS are no news
                with downlink.coming("a") as coming:
                    room = memoryview(bytearray(3))
                    while coming.left_bytes:
                        coming.read_into(room[3 - coming.left_bytes :])
                assert bytes(room) == b"abc"
            assert tries == 1
            return
        for seconds, tried in ((0, 1), (29, 1), (31, 2)):
            now[0] = seconds
            with pytest.raises(NotPlain), downlink.coming("a"):
                pass
            assert tries == tried

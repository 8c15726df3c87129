"""Where a store may listen, what protects it there, and how it starts and stops."""

import os
import re
import socket
import stat
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kvasir.clients import StoreClient, Tls
from kvasir.errors import InvalidArgument, Unavailable

from tests.cachestore.service.running import StoreHome, make_credentials, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.waiting import eventually


def certificate(directory: Path, name: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate for a loopback host, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host)), x509.DNSName("kvasir")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    key_file.chmod(0o600)
    return cert_file, key_file


def tls_options(cert: Path, key: Path) -> list[str]:
    return ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]


def test_the_socket_and_its_directory_are_the_owners_alone(home: StoreHome) -> None:
    home.start()
    path = Path(home.socket.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.data_dir.stat().st_mode) == 0o700
    files = [each for each in home.data_dir.rglob("*") if each.is_file()]
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}


def test_a_directory_that_others_can_enter_is_refused(home: StoreHome, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    said = home.refusal(listen=f"unix:{tmp_path}/open/s.sock")
    assert "0700" in said


def test_a_socket_path_beyond_the_systems_limit_is_refused_in_words(home: StoreHome) -> None:
    said = home.refusal(listen=f"unix:/tmp/{'x' * 120}/s.sock")
    assert "choose a shorter path" in said


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [
        ("127.0.0.1:0", "credential file"),
        ("[::1]:0", "credential file"),
        ("0.0.0.0:0", "credential file"),
        ("localhost:0", "credential file"),
        ("unix:relative.sock", "absolute"),
        ("nonsense", "expected unix:/path"),
        ("", "expected unix:/path"),
        ("1.2.3.4:99999", "at most 65535"),
    ],
)
def test_tcp_without_credentials_and_nonsense_are_refused_with_what_to_do(
    listen: str, wanted: str, home: StoreHome
) -> None:
    done = home.refusal(f"--listen={listen}")
    assert wanted in done
    assert not home.data_dir.exists()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some-host:0"])
def test_beyond_loopback_a_certificate_is_needed_too(listen: str, home: StoreHome, tmp_path: Path) -> None:
    make_credentials(tmp_path / "c.toml")
    assert "TLS certificate" in home.refusal("--credentials-file", str(tmp_path / "c.toml"), listen=listen)


def test_credentials_that_others_can_read_are_refused(home: StoreHome, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    make_credentials(file)
    file.chmod(0o640)
    assert f"chmod 600 {file}" in home.refusal("--credentials-file", str(file), listen="127.0.0.1:0")
    file.chmod(0o600)
    file.write_text("[[credential]]\n")
    assert "expected exactly" in home.refusal("--credentials-file", str(file), listen="127.0.0.1:0")


def test_a_key_that_others_can_read_is_refused(home: StoreHome, tmp_path: Path) -> None:
    make_credentials(tmp_path / "c.toml")
    cert, key = certificate(tmp_path, "server")
    key.chmod(0o644)
    said = home.refusal("--credentials-file", str(tmp_path / "c.toml"), *tls_options(cert, key), listen="127.0.0.1:0")
    assert "chmod 600" in said


def test_over_tls_only_the_pinned_server_is_believed(home: StoreHome, tmp_path: Path) -> None:
    tokens = make_credentials(tmp_path / "c.toml")
    cert, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    running = home.start("--credentials-file", str(tmp_path / "c.toml"), *tls_options(cert, key), listen="127.0.0.1:0")
    with running.client(tokens["all"], Tls(cert)) as client:
        publish(client, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
    with running.client(tokens["all"], Tls(cert, server_name="kvasir")) as client:
        assert client.get_agent("ada").agent_id == "ada"
    for tls in (Tls(other), Tls(cert, server_name="elsewhere"), None):
        with running.client(tokens["all"], tls, timeout_s=3) as client, pytest.raises(Unavailable):
            client.get_capabilities()


def test_a_file_without_a_certificate_is_no_authority(home: StoreHome, tmp_path: Path) -> None:
    """gRPC would take an empty one as the authorities of the system."""
    make_credentials(tmp_path / "c.toml")
    cert, key = certificate(tmp_path, "server")
    file = tmp_path / "authority.pem"
    for text in ("", "no PEM", key.read_text()):
        file.write_text(text)
        for tls in (Tls(file), Tls(cert, cert_file=file, key_file=key)):
            with pytest.raises(InvalidArgument, match="expected PEM with a certificate") as refused:
                StoreClient.connect("localhost:1", tls=tls)
            assert refused.value.field == "tls"
    options = [*tls_options(cert, key), "--tls-client-ca-file", str(file)]
    said = home.refusal("--credentials-file", str(tmp_path / "c.toml"), *options, listen="127.0.0.1:0")
    assert f"{file}: expected PEM with a certificate" in said


def test_with_a_client_authority_strangers_cannot_even_connect(home: StoreHome, tmp_path: Path) -> None:
    tokens = make_credentials(tmp_path / "c.toml")
    cert, key = certificate(tmp_path, "server")
    known, known_key = certificate(tmp_path, "known")
    stranger, stranger_key = certificate(tmp_path, "stranger")
    options = [*tls_options(cert, key), "--tls-client-ca-file", str(known)]
    running = home.start("--credentials-file", str(tmp_path / "c.toml"), *options, listen="127.0.0.1:0")
    with running.client(tokens["all"], Tls(cert, cert_file=known, key_file=known_key)) as client:
        assert client.get_capabilities().namespace == "default"
    for tls in (Tls(cert), Tls(cert, cert_file=stranger, key_file=stranger_key)):
        with running.client(tokens["all"], tls, timeout_s=3) as client, pytest.raises(Unavailable):
            client.get_capabilities()


def test_a_client_sends_no_token_in_the_clear_to_another_machine() -> None:
    from kvasir.clients import StoreClient

    with pytest.raises(InvalidArgument, match="TLS"):
        StoreClient.connect("192.0.2.1:7000", token="secret")


def test_one_data_directory_has_one_store(home: StoreHome) -> None:
    running = home.start()
    said = home.refusal(listen=f"unix:{home.root}/run/other.sock")
    assert str(running.process.pid) in said


def test_a_living_stores_socket_is_not_taken_away(home: StoreHome, tmp_path: Path) -> None:
    home.start()
    other = StoreHome(tmp_path / "o")
    assert "another process is listening" in other.refusal(listen=home.socket)
    with home.started[0].client() as client:
        assert client.get_capabilities().namespace == "default"


def test_a_dead_stores_socket_is_replaced(home: StoreHome) -> None:
    home.start().kill()
    assert Path(home.socket.removeprefix("unix:")).is_socket()
    with home.start().client() as client:
        assert client.get_capabilities().namespace == "default"


def test_what_is_not_a_socket_is_left_alone(home: StoreHome) -> None:
    path = Path(home.socket.removeprefix("unix:"))
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("precious")
    assert "not a socket" in home.refusal()
    assert path.read_text() == "precious"


def test_a_taken_port_is_refused(home: StoreHome, tmp_path: Path) -> None:
    make_credentials(tmp_path / "c.toml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "is another process there?" in home.refusal(
            "--credentials-file", str(tmp_path / "c.toml"), listen=listen
        )


def test_two_stores_never_share_a_port(home: StoreHome, tmp_path: Path) -> None:
    make_credentials(tmp_path / "c.toml")
    options = ("--credentials-file", str(tmp_path / "c.toml"))
    running = home.start(*options, listen="127.0.0.1:0")
    other = StoreHome(tmp_path / "o")
    assert "is another process there?" in other.refusal(*options, listen=running.address)


def test_sigterm_ends_it_in_order_and_the_socket_goes(home: StoreHome) -> None:
    running = home.start("--stop-grace-s", "60")
    turn = SyntheticAgent(SMALL, 2).turn(300)
    with running.client() as client:
        publish(client, "ada", turn, 0)
        watching = client.watch(timeout_s=30)
        next(watching)
        began = time.monotonic()
        running.process.terminate()
        with pytest.raises(Unavailable):
            for _ in watching:
                pass
    assert running.stop() == 0
    assert time.monotonic() - began < 10
    assert not Path(home.socket.removeprefix("unix:")).exists()
    assert home.check()["is_clean"]


def test_settings_come_from_the_environment_too(home: StoreHome) -> None:
    running = home.start(env={"KVASIR_STORE_MAX_BLOB_BYTES": "123456"})
    with running.client() as client:
        assert client.get_capabilities().max_blob_bytes == 123456


def test_neither_text_nor_tokens_are_logged(home: StoreHome, tmp_path: Path) -> None:
    tokens = make_credentials(tmp_path / "c.toml")
    running = home.start("--credentials-file", str(tmp_path / "c.toml"))
    turn = SyntheticAgent(SMALL, 3).turn(300)
    with running.client(tokens["all"]) as client:
        publish(client, "ada", turn, 0)
        with pytest.raises(InvalidArgument):
            client.commit("ada", client.put_manifest(turn.manifest_bytes[:-5]), 1)
    eventually(lambda: "disk.synced_write" in running.log)
    running.stop()
    log = running.log
    assert "store.started" in log
    assert not re.search(r"w\d+ w\d+|token-\d", log)


def test_a_store_starts_on_yesterdays_data(home: StoreHome) -> None:
    turn = SyntheticAgent(SMALL, 4).turn(700)
    with home.start().client() as client:
        publish(client, "ada", turn, 0)
    home.started[0].stop()
    with home.start().client() as client:
        assert client.get_snapshot("ada")[1] == turn.manifest_bytes


def test_a_call_during_start_or_after_the_end_is_unavailable(home: StoreHome) -> None:
    running = home.start()
    os.kill(running.process.pid, 9)
    with running.client(timeout_s=5) as client, pytest.raises(Unavailable) as caught:
        client.get_capabilities()
    assert caught.value.reason == "UNAVAILABLE"


def test_a_plain_connection_that_speaks_no_http2_harms_nobody(home: StoreHome) -> None:
    running = home.start()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(home.socket.removeprefix("unix:"))
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0" * 10_000)
    with running.client() as client:
        assert client.get_capabilities().namespace == "default"


def test_a_megabyte_of_metadata_is_refused_and_the_next_call_works(home: StoreHome) -> None:
    from kvasir.cachestore.v1 import cachestore_pb2 as pb
    from kvasir.cachestore.v1 import cachestore_pb2_grpc

    running = home.start()
    with grpc.insecure_channel(running.address, [("grpc.max_metadata_size", 8 << 20)]) as channel:
        stub = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError):
            stub.GetStats(pb.GetStatsRequest(), metadata=(("x-large", "y" * (1 << 20)),), timeout=10)
    with running.client() as client:
        assert client.get_stats().agent_count == 0


def test_a_giant_message_is_refused_and_the_next_call_works(home: StoreHome) -> None:
    from kvasir.cachestore.v1 import cachestore_pb2 as pb
    from kvasir.cachestore.v1 import cachestore_pb2_grpc

    running = home.start()
    with grpc.insecure_channel(running.address, [("grpc.max_send_message_length", -1)]) as channel:
        stub = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.FindPrefix(pb.FindPrefixRequest(kv_identity_hash="x" * (100 << 20)), timeout=20)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert stub.GetStats(pb.GetStatsRequest(), timeout=60).agent_count == 0
    assert running.memory_bytes() < 400 << 20

"""nginx and Envoy accept what `kvasir fleet config` prints, also with certificates, where they are installed."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvasir.address import accepts
from kvasir.clients import InferenceClient
from kvasir.errors import Unavailable

from tests.cli.certificates import make_certificate
from tests.cli.running import free_port, in_process
from tests.running.waiting import eventually


def printed(kind: str, folder: Path, *, has_tls: bool = False, listen: str = "") -> Path:
    """The file of a balancer before two engines."""
    certificate, key = folder / "b.crt", folder / "b.key"
    make_certificate(certificate, key)
    before = ("--ca-file", certificate) if has_tls else ()
    behind = ("--tls-cert", certificate, "--tls-key", key) if has_tls else ()
    engines = ("localhost:7001", "10.0.0.2:7002") if has_tls else (f"127.0.0.1:{free_port()}", "127.0.0.1:9")
    given = [word for each in engines for word in ("--engine", each)]
    at = listen or f"{'0.0.0.0' if has_tls else '127.0.0.1'}:{free_port()}"
    ended = in_process(*before, "fleet", "config", kind, *given, "--listen", at, *behind)
    assert ended.code == 0, ended
    file = folder / f"{kind}.conf"
    file.write_text(ended.out)
    return file


@pytest.mark.parametrize("has_tls", [False, True], ids=["loopback", "TLS"])
@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_the_balancer_accepts_its_file(tmp_path: Path, kind: str, has_tls: bool) -> None:
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed here")
    file = printed(kind, tmp_path, has_tls=has_tls)
    how = (
        ["-t", "-p", tmp_path, "-g", "pid nginx.pid; error_log stderr;"] if kind == "nginx" else ["--mode", "validate"]
    )
    checked = subprocess.run([kind, *how, "-c", file], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_while_no_engine_answers_the_balancer_answers_unavailable(tmp_path: Path, kind: str) -> None:
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed here")
    address = f"127.0.0.1:{free_port()}"
    file = printed(kind, tmp_path, listen=address)
    with balancing(kind, file, address), InferenceClient.connect(address, timeout_s=20) as client:
        with pytest.raises(Unavailable):
            client.reply(agent_id="ada", messages=[{"role": "user", "content": "Hi."}])


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
def test_its_answer_is_one_of_grpc_which_every_client_reads(tmp_path: Path, kind: str) -> None:
    """Clients in Go and Java look at the status of HTTP and at the content's type before that of gRPC."""
    curl = ["curl", "-sS", "--http2-prior-knowledge", "-o", tmp_path / "body", "-w", "%{http_code} %{content_type}"]
    if shutil.which(kind) is None or shutil.which("curl") is None:
        pytest.skip(f"{kind} or curl is not installed here")
    address = f"127.0.0.1:{free_port()}"
    file = printed(kind, tmp_path, listen=address)
    with balancing(kind, file, address):
        asked = ["-H", "content-type: application/grpc", f"http://{address}/a.Service/Method"]
        answered = subprocess.run([*curl, *asked], capture_output=True, text=True, check=False, timeout=60)
    assert answered.stdout == "200 application/grpc", answered


@contextmanager
def balancing(kind: str, file: Path, address: str) -> Iterator[None]:
    """The balancer with its file, until the end."""
    own = ["-p", file.parent, "-g", "daemon off; pid nginx.pid; error_log stderr;"]
    with subprocess.Popen([kind, "-c", file, *(own if kind == "nginx" else ["--use-dynamic-base-id"])]) as balancer:
        try:
            eventually(lambda: accepts(address) or balancer.poll() is not None)
            yield
        finally:
            balancer.terminate()

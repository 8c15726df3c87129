"""nginx and Envoy accept what `kvasir fleet config` prints, also with certificates, where they are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from kvasir.address import accepts
from kvasir.clients import InferenceClient
from kvasir.errors import Unavailable

from tests.cli.certificates import make_certificate
from tests.cli.running import eventually, free_port, in_process


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
    own = ["-p", tmp_path, "-g", "daemon off; pid nginx.pid; error_log stderr;"]
    with subprocess.Popen([kind, "-c", file, *(own if kind == "nginx" else ["--use-dynamic-base-id"])]) as balancer:
        try:
            eventually(lambda: accepts(address) or balancer.poll() is not None)
            with InferenceClient.connect(address, timeout_s=20) as client, pytest.raises(Unavailable):
                client.reply(agent_id="ada", messages=[{"role": "user", "content": "Hi."}])
        finally:
            balancer.terminate()

"""nginx and Envoy accept what `kvasir fleet config` prints, also with certificates, where they are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.certificates import make_certificate
from tests.cli.running import free_port, in_process


def printed(kind: str, folder: Path, *, has_tls: bool) -> Path:
    """The file of a balancer before two engines."""
    certificate, key = folder / "b.crt", folder / "b.key"
    make_certificate(certificate, key)
    before = ("--ca-file", certificate) if has_tls else ()
    behind = ("--tls-cert", certificate, "--tls-key", key) if has_tls else ()
    engines = ("localhost:7001", "10.0.0.2:7002") if has_tls else ("127.0.0.1:7001", "127.0.0.1:7002")
    given = [word for each in engines for word in ("--engine", each)]
    listen = f"{'0.0.0.0' if has_tls else '127.0.0.1'}:{free_port()}"
    ended = in_process(*before, "fleet", "config", kind, *given, "--listen", listen, *behind)
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

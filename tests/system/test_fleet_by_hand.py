"""The page of a fleet, typed step by step: a database, a bucket, the store, three engines, and the doors."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path

import certifi
import httpx2 as httpx
import pytest
from kvasir.address import accepts
from kvasir.cli.running.home import Home

from tests.cli.certificates import make_certificate
from tests.cli.running import Cli, free_port
from tests.running import in_memory
from tests.running.system_fixtures import ROOT
from tests.running.waiting import eventually
from tools.fleet import servers
from tools.fleet.part import program

PAGE = (ROOT / "docs" / "pages" / "fleet.md").read_text()


class Typed:
    """The page's commands, with the addresses and files of this test in place of the page's."""

    def __init__(self, root: Path) -> None:
        self.root, self.postgres, self.s3 = root, servers.Postgres(root, root), servers.S3(root / "s3", root)
        self.certificate = root / "studio.crt"
        make_certificate(self.certificate, root / "studio.key")
        self.engines = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.http = f"127.0.0.1:{free_port()}"
        self.known = {
            "db.example": f"127.0.0.1 --port {self.postgres.port}",
            "kvasir@db.example": f"kvasir@127.0.0.1:{self.postgres.port}",
            "s3://bucket": f"s3://{servers.BUCKET}",
            "bucket.keys": str(root / "bucket.keys"),
            "studio.local:7443": f"localhost:{free_port()}",
            "studio.crt": str(self.certificate),
            "studio.key": str(root / "studio.key"),
            "127.0.0.1:8643": self.http,
            **dict(zip(("127.0.0.1:7444", "127.0.0.1:7445", "127.0.0.1:7446"), self.engines, strict=True)),
        }

    def words(self, begin: str, **others: str) -> list[str]:
        """Of the first line that begins so, without its program."""
        [line, *_] = [line for line in PAGE.splitlines() if line.startswith(begin)]
        known = {**self.known, **others}
        pattern = "|".join(re.escape(each) for each in sorted(known, key=len, reverse=True))
        return re.sub(pattern, lambda found: known[found[0]], line.partition(" > ")[0]).split()[1:]

    def write_bucket_file(self) -> None:
        """With the page's names, and this bucket's values."""
        [names] = re.findall(r"^```ini\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        values = dict(line.split(" = ") for line in self.s3.credentials.read_text().splitlines())
        file = self.root / "bucket.keys"
        file.touch(0o600)
        file.write_text("".join(f"{name} = {values[name]}\n" for name in re.findall(r"^(\w+) =", names, re.MULTILINE)))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typed]:
    root = in_memory.home()
    root.chmod(0o711)
    try:
        made = Typed(root)
        monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
        monkeypatch.setenv("PGPASSFILE", str(made.postgres.passfile))
        made.postgres.prepare(made.postgres.port)
        made.s3.prepare(made.s3.port)
        made.write_bucket_file()
        with ExitStack() as ends:
            for part in (made.postgres.part, made.s3.part):
                part.start()
                ends.callback(part.stop)
                part.wait_until_ready()
            yield made
    finally:
        shutil.rmtree(root)


@pytest.mark.long(12)
@pytest.mark.skipif(bool(servers.missing()), reason=servers.missing())
def test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine(typed: Typed) -> None:
    createdb = program("createdb", "/usr/lib/postgresql/*/bin", advice="")
    subprocess.run([createdb, *typed.words("createdb")], check=True, timeout=60)
    with ExitStack() as ends, futures.ThreadPoolExecutor(3) as pool:
        homes = [Cli(in_memory.home()) for _ in range(4)]
        for each in homes:
            ends.callback(shutil.rmtree, each.home)
            ends.callback(each, "down")
        store, *engines = homes
        store.done(*typed.words("kvasir store serve"), "--last-runs-dir", store.home / "last-runs")
        for each in engines:
            shutil.copytree(store.home / "tokens", each.home / "tokens")
            shutil.copy(store.home / "credentials.toml", each.home / "credentials.toml")
        lines = [typed.words("kvasir up -d", **{"127.0.0.1:7444": address}) for address in typed.engines]
        list(pool.map(lambda pair: pair[0].done(*pair[1]), zip(engines, lines, strict=True)))
        first = engines[0]
        with first.running(*typed.words("kvasir gateway")) as gateway:
            eventually(lambda: accepts(typed.http) or gateway.process.poll() is not None, within_s=60)
            key = (first.home / "tokens" / "client.token").read_text().strip()
            assert "Rex" in _text_of(typed.http, key, "My dog is called Rex. What is my dog called?")
            shown = first.done(*typed.words("kvasir fleet status"), "--json").value["engines"]
            [place] = [
                number for number, row in enumerate(shown) if any(each["agent_id"] == "ada" for each in row["hot"])
            ]
            _kill(engines[place])
            assert "Rex" in _text_of(typed.http, key, "What is my dog called?")
        printed = first.done(*typed.words("kvasir fleet config")).out
        assert all(address.rpartition(":")[2] in printed for address in typed.engines)


def _kill(engine: Cli) -> None:
    running = Home(engine.home).running()
    assert running is not None
    for pid in (running.pid, running.engine_pid):  # first its `kvasir up`, which would start it again
        os.kill(pid, signal.SIGKILL)


def _text_of(http: str, key: str, words: str) -> str:
    answer = httpx.post(
        f"http://{http}/v1/chat/completions",
        headers={"x-agent-id": "ada", "x-agent-memory": "append", "authorization": f"Bearer {key}"},
        json={"model": "kvasir-tiny", "messages": [{"role": "user", "content": words}], "temperature": 0},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])

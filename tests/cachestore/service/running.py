"""The cache store as a real process on a real socket, for tests: started, stopped, killed, and asked how it is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient, Tls
from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER, Principal, write_credentials, write_private_text

from tests.made_models.synthetic import SyntheticSnapshot
from tests.running.programs import Program, run

READY_WITHIN_S = 60.0
ROOT = Path(__file__).parents[3]


@dataclass
class RunningStore:
    """A process that serves, and where."""

    process: "Program | subprocess.Popen[bytes]"
    address: str
    data_dir: Path
    log_file: Path

    def client(
        self, token: str | None = None, tls: Tls | None = None, timeout_s: float = 30.0, max_cuts: int = 5
    ) -> StoreClient:
        return StoreClient.connect(self.address, token=token, tls=tls, timeout_s=timeout_s, max_cuts=max_cuts)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, within_s: float = 20.0) -> int:
        """SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def log(self) -> str:
        return self.log_file.read_text()


@dataclass
class StoreHome:
    """A directory for a store's data, socket and log; stores started in it end with it."""

    root: Path
    started: list[RunningStore] = field(default_factory=list)
    program: str = "cachestore_svc"

    @property
    def socket(self) -> str:
        return f"unix:{self.root / 'run' / 's.sock'}"

    @property
    def data_dir(self) -> Path:
        return self.root / "data"

    def start(
        self,
        *options: str,
        listen: str | None = None,
        env: Mapping[str, str] | None = None,
        is_fresh: bool = False,
        hangs_up: bool = False,
    ) -> RunningStore:
        """Start a store and wait until it listens; a fresh one has an interpreter begun in that environment.
        `hangs_up`: with a SIGHUP at once, which the caller holds back as `kvasir up` does.

        Fails with its log when it does not.
        """
        self.root.mkdir(exist_ok=True)
        out, log = self.root / f"out{len(self.started)}", self.root / f"log{len(self.started)}"
        arguments = self._arguments(options, listen)
        process: Program | subprocess.Popen[bytes]
        if is_fresh:
            process = _fresh(arguments, out, log, env or {})
        else:
            process = Program(self.program, arguments, out=out, err=log, env=env)
        if hangs_up:
            process.send_signal(signal.SIGHUP)
        running = RunningStore(process, _address(process, out, log), self.data_dir, log)
        self.started.append(running)
        return running

    def refusal(self, *options: str, listen: str | None = None) -> str:
        """What a store says that does not start."""
        done = run("cachestore_svc", *self._arguments(options, listen), timeout_s=READY_WITHIN_S)
        assert done.returncode == 2, (done.stdout, done.stderr)
        return done.stderr

    def check(self) -> Mapping[str, object]:
        """What `check` finds in the data directory, while nobody serves it."""
        done = run("cachestore_svc", "check", "--json", "--data-dir", str(self.data_dir), timeout_s=READY_WITHIN_S)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def _arguments(self, options: Sequence[str], listen: str | None) -> list[str]:
        serve = ["serve", "--data-dir", str(self.data_dir), "--listen", listen or self.socket]
        return [*serve, "--log-format", "json", *options]

    def end(self) -> None:
        for running in self.started:
            if running.process.poll() is None:
                running.kill()


def _fresh(arguments: Sequence[str], out: Path, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cachestore_svc", *arguments]
    with out.open("wb") as stdout, log.open("wb") as stderr:
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=ROOT, env={**os.environ, **env})


def _address(process: "Program | subprocess.Popen[bytes]", out: Path, log: Path) -> str:
    """Where it says that it listens."""
    give_up = time.monotonic() + READY_WITHIN_S
    while not (out.exists() and out.read_text().endswith("\n")):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            raise AssertionError(f"no store: {log.read_text() if log.exists() else 'not even a log'}")
        time.sleep(0.01)
    line = out.read_text().splitlines()[0]
    assert line.startswith("listening on "), f"{line!r}: {log.read_text()}"
    return line.removeprefix("listening on ").strip()


@contextmanager
def store_home(root: Path) -> Iterator[StoreHome]:
    home = StoreHome(root)
    try:
        yield home
    finally:
        home.end()


PRINCIPALS = (
    Principal("engine", "default", frozenset({ENGINE})),
    Principal("client", "default", frozenset({CLIENT})),
    Principal("peer", "default", frozenset({PEER})),
    Principal("admin", "default", frozenset({ADMIN})),
    Principal("all", "default", frozenset({ENGINE, CLIENT, PEER, ADMIN})),
    Principal("foreign", "elsewhere", frozenset({ENGINE, CLIENT, PEER, ADMIN})),
)


def make_credentials(path: Path, principals: Sequence[Principal] = PRINCIPALS) -> dict[str, str]:
    """A credential file; name → token."""
    tokens = iter(f"token-{index}-{'x' * 32}" for index in range(1000))
    return write_credentials(path, principals, lambda: next(tokens))


def publish(client: StoreClient, agent_id: str, snapshot: SyntheticSnapshot, parent_version: int) -> pb.SnapshotVersion:
    """What an engine does at the end of a turn."""
    client.put_blobs(snapshot.new_blobs)
    client.put_manifest(snapshot.manifest_bytes)
    return client.commit(agent_id, snapshot.manifest_digest, parent_version)


def assert_whole(client: StoreClient, agent_id: str, expected: SyntheticSnapshot, version: int | None = None) -> None:
    """The version's manifest has the bytes that were published, and every blob can be read."""
    _, manifest_bytes = client.get_snapshot(agent_id, version=version)
    assert manifest_bytes == expected.manifest_bytes
    assert [digest for digest, _ in client.get_blobs(expected.digests)] == expected.digests


def peers_file(path: Path, **peers: str) -> Path:
    """A peers file; each value is an address and further lines."""
    text = "".join(f'[[peer]]\nname = "{name}"\naddress = {rest}\n' for name, rest in peers.items())
    path.unlink(missing_ok=True)
    write_private_text(path, text)
    return path


def start_here(home: StoreHome, tmp_path: Path, address: str, *options: str) -> RunningStore:
    """A store whose only peer, "mac", is at an address."""
    return home.start("--peers-file", str(peers_file(tmp_path / "peers.toml", mac=f'"{address}"')), *options)

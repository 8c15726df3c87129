"""How fast an agent moves over a link of 1 Gbit/s and 2 ms each way, beside raw TCP over the same link.

Two paired stores, each in a network namespace of its own (Linux, root, `ip` and `tc`). A kernel without netem paces the
link without the delay, and that is said.

    python -m tests.moves.link --mb 100 --rounds 3
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from kvasir.clients import StoreClient

from cachestore_svc.pairing.identity import identity_file, read_or_make_identity
from cachestore_svc.pairing.peers_file import PeerSettings, change_peers
from tests.cachestore.service.running import ROOT, publish
from tests.synthetic import SyntheticAgent, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))  # 7 MB for 256 tokens
HOSTS = {"laptop": "10.213.7.1", "studio": "10.213.7.2"}
PORT, RAW_PORT = 7443, 7444
PACE = ("netem", "delay", "2ms", "rate", "1gbit", "limit", "20000")
PACE_ALONE = ("tbf", "rate", "1gbit", "burst", "128kb", "latency", "50ms")
_MB = 1_000_000
_RECEIVE = """
import socket
server = socket.create_server(("", {port}))
near, _ = server.accept()
while near.recv(1 << 20): pass
"""
_SEND = """
import socket, time
far = socket.create_connection(("{host}", {port}))
began = time.monotonic()
for _ in range({pieces}): far.sendall(bytes(1 << 20))
far.shutdown(socket.SHUT_WR)
far.recv(1)
print({pieces} * (1 << 20) / (time.monotonic() - began))
"""


@dataclass(frozen=True)
class Moved:
    """One move: payload bytes, how long it took, and what both stores computed meanwhile."""

    sent_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.sent_bytes / self.seconds


def why_no_link() -> str:
    """What keeps this machine from joining two network namespaces by a paced link, or empty."""
    try:
        with linked():
            return ""
    except OSError as error:  # no such program
        return str(error)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} ended with {error.returncode}"


@contextlib.contextmanager
def linked() -> Iterator[dict[str, str]]:
    """The names of two network namespaces that a paced link joins, by host."""
    spaces = {name: f"kv-{name}-{os.getpid()}" for name in HOSTS}
    with contextlib.ExitStack() as exits:
        for space in spaces.values():
            _do("ip", "netns", "add", space)
            exits.callback(_do, "ip", "netns", "del", space)
        one, other = spaces.values()
        _do("ip", "-n", one, "link", "add", "kv0", "type", "veth", "peer", "name", "kv0", "netns", other)
        for name, space in spaces.items():
            _do("ip", "-n", space, "address", "add", f"{HOSTS[name]}/24", "dev", "kv0")
            _do("ip", "-n", space, "link", "set", "kv0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _pace(space)
        yield spaces


def raw_bytes_per_s(spaces: dict[str, str], size_bytes: int) -> float:
    """What one TCP connection gets from studio to laptop, until its last byte is there."""
    with _python(spaces["laptop"], "-c", _RECEIVE.format(port=RAW_PORT)) as receiver:
        time.sleep(1)
        pieces = size_bytes >> 20
        words = [sys.executable, "-c", _SEND.format(host=HOSTS["laptop"], port=RAW_PORT, pieces=pieces)]
        sent = subprocess.run(["ip", "netns", "exec", spaces["studio"], *words], capture_output=True, check=True)
        receiver.wait(30)
    return float(sent.stdout)


@contextlib.contextmanager
def stores(root: Path, spaces: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A store on each side of the link, paired with the other; local callers come by a Unix socket."""
    identities = {name: read_or_make_identity(identity_file(root / name / "peers.toml")) for name in HOSTS}
    with contextlib.ExitStack() as exits:
        running = {}
        for name, space in spaces.items():
            [other] = set(HOSTS) - {name}
            door = f"{HOSTS[other]}:{PORT}"
            text = identities[other].certificate.text
            peer = PeerSettings(name=other, address=door, certificate=text, namespaces=("default",))
            change_peers(root / name / "peers.toml", lambda book, peer=peer: book.with_peer(peer))  # type: ignore[misc]
            book = root / name / "peers.toml"
            book.write_text(f'listen = "{HOSTS[name]}:{PORT}"\n{book.read_text()}')
            words = ("--data-dir", str(root / name / "data"), "--listen", f"unix:{root / name / 's.sock'}")
            serve = ("-m", "cachestore_svc", "serve", *words, "--peers-file", str(book))
            running[name] = exits.enter_context(_python(space, *serve))
        for name in HOSTS:
            _until_serving(root / name)
        yield running


def move(root: Path, running: dict[str, subprocess.Popen[bytes]], agent: str, size_bytes: int) -> Moved:
    """Publish so much at studio, and move it to laptop."""
    grown = SyntheticAgent(LARGE, hash(agent) & 0xFFFF)
    turn = grown.turn(256 * max(1, round(size_bytes / 7_090_688)))
    with client_of(root / "studio") as there, client_of(root / "laptop") as here:
        publish(there, agent, turn, 0)
        before, began = _cpu_seconds(running), time.monotonic()
        here.move_agent(agent, from_peer="studio", timeout_s=300)
        seconds = time.monotonic() - began
        return Moved(sum(digest.size_bytes for digest in turn.digests), seconds, _cpu_seconds(running) - before)


def client_of(root: Path) -> StoreClient:
    """A local caller of one of the stores."""
    return StoreClient.connect(f"unix:{root / 's.sock'}", timeout_s=60)


def _until_serving(root: Path) -> None:
    give_up = time.monotonic() + 60
    while True:
        try:
            with client_of(root) as client:
                client.get_stats()
        except Exception:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
        else:
            return


def _cpu_seconds(running: dict[str, subprocess.Popen[bytes]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in running.values()]
    return sum(each.user + each.system for each in times)


@contextlib.contextmanager
def _python(space: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ip netns exec` becomes the program, so its process id is the program's."""
    command = ["ip", "netns", "exec", space, sys.executable, *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _pace(space: str) -> None:
    add = ("tc", "-n", space, "qdisc", "add", "dev", "kv0", "root")
    try:
        _do(*add, *PACE)
    except subprocess.CalledProcessError:
        print("this kernel has no netem: 1 Gbit/s without the delay", file=sys.stderr)
        _do(*add, *PACE_ALONE)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvlink") as folder, linked() as spaces:
        root = Path(folder)
        for name in HOSTS:
            (root / name).mkdir(mode=0o700)
        with stores(root, spaces) as running:
            for number in range(given.rounds):
                raw = raw_bytes_per_s(spaces, given.mb * _MB)
                moved = move(root, running, f"ada{number}", given.mb * _MB)
                row = {"raw_mb_per_s": raw / _MB, "moved_mb_per_s": moved.bytes_per_s / _MB}
                rows.append(row | {"of_raw": moved.bytes_per_s / raw, "cpu_s": moved.cpu_seconds})
                print(json.dumps({key: round(value, 3) for key, value in rows[-1].items()}), flush=True)
    print(f"median of raw: {statistics.median(row['of_raw'] for row in rows):.2f}")


if __name__ == "__main__":
    main()

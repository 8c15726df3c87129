"""How fast an agent moves over a link of 1 Gbit/s and 2 ms each way, beside raw TCP over the same link.

And how little goes back after a turn of 50 tokens.

Two paired stores, each in a network namespace of its own (Linux, root, `ip`). Where the kernel has no netem, or
there is no `tc`, a relay delays and paces (`relay.py`, over /dev/net/tun), for raw TCP as for the stores; that is said.

    python -m tests.campaigns.moves.link --mb 100 --rounds 3
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
from kvasir.formats import manifest as manifests

from cachestore_svc.pairing.identity import identity_file, read_or_make_identity
from cachestore_svc.pairing.peers_file import PeerSettings, change_peers
from tests.cachestore.service.running import ROOT, publish
from tests.campaigns.moves import relay
from tests.made_models.synthetic import SyntheticAgent, SyntheticSnapshot, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
_BLOCK_BYTES = 7_090_688  # of 256 tokens
Stores = dict[str, subprocess.Popen[bytes]]
HOSTS = {"laptop": "10.213.7.1", "studio": "10.213.7.2"}
PORT, RAW_PORT = 7443, 7444
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
class Pace:
    """What a link carries in a second, and how long a byte is under way, in each direction."""

    mbit: float = 1000
    delay_ms: float = 2


PACE = Pace()


@dataclass(frozen=True)
class Moved:
    """One move: bytes of the agent's memory, how long it took, what both stores computed meanwhile, and what arrived
    over the link."""

    memory_bytes: int
    seconds: float
    cpu_seconds: float
    received_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.memory_bytes / self.seconds


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
def linked(pace: Pace = PACE) -> Iterator[dict[str, str]]:
    """The names of two network namespaces that a link of this pace joins, by host."""
    spaces = {name: f"kv-{name}-{os.getpid()}" for name in HOSTS}
    with contextlib.ExitStack() as exits:
        for space in spaces.values():
            _do("ip", "netns", "add", space)
            exits.callback(_do, "ip", "netns", "del", space)
            _do("ip", "-n", space, "link", "set", "lo", "up")
        if not _joined_by_netem(pace, *spaces.values()):
            print("this kernel has no netem: a relay delays and paces", file=sys.stderr)
            exits.enter_context(_joined_by_relay(pace, *spaces.values()))
        for name, space in spaces.items():
            _do("ip", "-n", space, "address", "add", f"{HOSTS[name]}/24", "dev", relay.DEVICE)
            _do("ip", "-n", space, "link", "set", relay.DEVICE, "up")
        yield spaces


def _joined_by_netem(pace: Pace, one: str, other: str) -> bool:
    words = ("netem", "delay", f"{pace.delay_ms}ms", "rate", f"{pace.mbit}mbit", "limit", "20000")
    _do("ip", "-n", one, "link", "add", relay.DEVICE, "type", "veth", "peer", "name", relay.DEVICE, "netns", other)
    try:
        for space in (one, other):
            _do("tc", "-n", space, "qdisc", "add", "dev", relay.DEVICE, "root", *words)
    except (OSError, subprocess.CalledProcessError):  # no netem, or no such program
        _do("ip", "-n", one, "link", "del", relay.DEVICE)
        return False
    return True


@contextlib.contextmanager
def _joined_by_relay(pace: Pace, one: str, other: str) -> Iterator[None]:
    words = ("--mbit", str(pace.mbit), "--delay-ms", str(pace.delay_ms))
    command = [sys.executable, "-m", "tests.campaigns.moves.relay", one, other, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise subprocess.CalledProcessError(process.wait(), command)
            for space in (one, other):
                _do("ip", "-n", space, "link", "set", relay.DEVICE, "mtu", str(relay.MTU_BYTES))
            yield
        finally:
            process.kill()


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
def stores(root: Path, spaces: dict[str, str]) -> Iterator[Stores]:
    """A store on each side of the link, paired with the other; local callers come by a Unix socket."""
    identities = {name: read_or_make_identity(identity_file(root / name / "peers.toml")) for name in HOSTS}
    with contextlib.ExitStack() as exits:
        running = {}
        for name, space in spaces.items():
            [other] = set(HOSTS) - {name}
            door = f"{HOSTS[other]}:{PORT}"
            text = identities[other].certificate.text
            peer = PeerSettings(
                name=other, address=door, certificate=text, namespaces=("default",), gives=("default=move",)
            )
            change_peers(root / name / "peers.toml", lambda book, peer=peer: book.with_peer(peer))  # type: ignore[misc]
            book = root / name / "peers.toml"
            book.write_text(f'listen = "{HOSTS[name]}:{PORT}"\n{book.read_text()}')
            words = ("--data-dir", str(root / name / "data"), "--listen", f"unix:{root / name / 's.sock'}")
            serve = ("-m", "cachestore_svc", "serve", *words, "--peers-file", str(book))
            running[name] = exits.enter_context(_python(space, *serve))
        for name in HOSTS:
            _until_serving(root / name)
        yield running


def move(root: Path, running: Stores, agent: str, size_bytes: int) -> Moved:
    """Publish so much at studio, and move it to laptop."""
    blocks = max(1, round(size_bytes / _BLOCK_BYTES))
    grown = SyntheticAgent(LARGE, hash(agent) & 0xFFFF)
    return _moved(root, running, agent, grown.turn(256 * blocks - 20), 0, ("studio", "laptop"))


def move_back(root: Path, running: Stores, agent: str) -> tuple[Moved, int]:
    """A turn of 50 tokens at laptop, which fills a block, and back to studio; with the bytes that may go over the link:
    a block, the tail, the manifest and 64 KiB."""
    with client_of(root / "laptop") as here:
        head, manifest_bytes = here.get_snapshot(agent)
    grown = SyntheticAgent.remember(manifests.parse(manifest_bytes), seed=hash(agent) & 0xFFFF, turns=1)
    turn = grown.turn(50)
    tail_bytes = sum(digest.size_bytes for digest in turn.new_blobs if digest.size_bytes < _BLOCK_BYTES)
    may = _BLOCK_BYTES + tail_bytes + len(turn.manifest_bytes) + (64 << 10)
    return _moved(root, running, agent, turn, head.version, ("laptop", "studio")), may


def _moved(
    root: Path, running: Stores, agent: str, turn: SyntheticSnapshot, parent: int, way: tuple[str, str]
) -> Moved:
    source, target = way
    with client_of(root / source) as there, client_of(root / target) as here:
        publish(there, agent, turn, parent)
        before, began, had = _cpu_seconds(running), time.monotonic(), _received_bytes(running[target])
        here.move_agent(agent, from_peer=source, timeout_s=300)
        seconds, received = time.monotonic() - began, _received_bytes(running[target]) - had
        size = sum(digest.size_bytes for digest in turn.digests)
        return Moved(size, seconds, _cpu_seconds(running) - before, received)


def _received_bytes(store: subprocess.Popen[bytes]) -> int:
    """What has arrived over the link at a store's namespace, headers included."""
    lines = Path(f"/proc/{store.pid}/net/dev").read_text().splitlines()
    [words] = [line.split() for line in lines if line.strip().startswith(relay.DEVICE)]
    return int(words[1])


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


def _cpu_seconds(running: Stores) -> float:
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


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=PACE.mbit)
    parser.add_argument("--delay-ms", type=float, default=PACE.delay_ms)
    given = parser.parse_args()
    rows = []
    pace = Pace(given.mbit, given.delay_ms)
    with tempfile.TemporaryDirectory(prefix="kvlink") as folder, linked(pace) as spaces:
        root = Path(folder)
        for name in HOSTS:
            (root / name).mkdir(mode=0o700)
        with stores(root, spaces) as running:
            for number in range(given.rounds):
                raw = raw_bytes_per_s(spaces, given.mb * _MB)
                moved = move(root, running, f"ada{number}", given.mb * _MB)
                row = {"raw_mb_per_s": raw / _MB, "moved_mb_per_s": moved.bytes_per_s / _MB}
                back, may = move_back(root, running, f"ada{number}")
                row |= {"of_raw": moved.bytes_per_s / raw, "cpu_s": moved.cpu_seconds}
                rows.append(row | {"back_s": back.seconds, "back_of_allowed_bytes": back.received_bytes / may})
                print(json.dumps({key: round(value, 3) for key, value in rows[-1].items()}), flush=True)
    print(f"median of raw: {statistics.median(row['of_raw'] for row in rows):.2f}")


if __name__ == "__main__":
    main()

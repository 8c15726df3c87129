"""How fast a memory comes from a bucket, as a share of a link: `python -m tests.campaigns.sizes.far [--gbit 10]`.

A real S3 server (versitygw) stands behind a relay that lets so many bits a second pass. Through it come, in turn, the
objects alone, and the same blobs as an engine gets them from a store that keeps no copies; beside it a store reads them
from its disk. The blobs have the size of those of Llama 3.1 8B. The seconds of processor of each program are counted.
"""

import argparse
import asyncio
import fcntl
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import certifi
from kvasir.clients import AioStoreClient
from kvasir_bench.store import measuring

from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket
from tools.fleet.part import free_port
from tools.fleet.servers import BUCKET, S3

_PIECE = 256 << 10
_AT_ONCE = 8  # objects that the plain reader reads beside each other
_BLOCKS_OF_32K = 128
# An engine frees arrays of this size. glibc, which has seen one, keeps the memory of messages; else each of their pages
# is new, for a third of a second more of the reader's processor a GB.
_FREED_BYTES = 31 << 20


class Link:
    """Passes connections on to a port; bytes of all its answers together come at the link's pace."""

    def __init__(self, port: int, own_port: int, bytes_per_s: float) -> None:
        self._port, self._rate = port, bytes_per_s
        self._lock, self._due = threading.Lock(), 0.0
        self._listener = socket.create_server(("127.0.0.1", own_port), backlog=256)

    def serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, is_paced in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=(source, sink, is_paced), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_paced: bool) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIECE)  # a pipe has 64 KiB by itself: four times as many wakes
        with suppress(OSError):
            while count := os.splice(source.fileno(), into, _PIECE):
                if is_paced:
                    self._wait_for(count)
                while count:
                    count -= os.splice(out, sink.fileno(), count)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        os.close(out)
        os.close(into)

    def _wait_for(self, count: int) -> None:
        with self._lock:
            now = time.perf_counter()
            # A link that was idle may not send faster afterwards, but for a late sleep.
            self._due = max(self._due, now - 0.002) + count / self._rate
            left_s = self._due - now
        if left_s > 0:
            time.sleep(left_s)


def _serve(port: int, own_port: int, bytes_per_s: float) -> None:
    Link(port, own_port, bytes_per_s).serve()


@contextmanager
def behind_a_link(root: Path, bytes_per_s: float) -> Iterator[tuple[str, Path]]:
    """The address of a bucket behind a link, and the file of its credentials."""
    (root / "s3").mkdir()
    (root / "logs").mkdir()
    server, own_port = S3(root / "s3", root / "logs"), free_port()
    server.prepare(own_port)
    link = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(server.port, own_port, bytes_per_s), daemon=True
    )
    server.part.start()
    try:
        server.part.wait_until_ready()
        link.start()
        yield f"s3://{BUCKET}/far", server.credentials
    finally:
        link.kill()
        server.part.stop()


def plain_s(bucket: Bucket, names: list[tuple[str, int]]) -> float:
    """Seconds in which all objects come, with nothing done to them."""
    began = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = list(threads.map(lambda each: len(bucket.get(each[0], each[1])), names))
    assert found == [size for _, size in names]
    return time.perf_counter() - began


async def _stored(client: AioStoreClient, memory: measuring.Memory) -> None:
    await client.put_blobs(memory.blobs)


def processor_s(places: Mapping[str, str]) -> dict[str, float]:
    """Of this process and of those that it began, each by the word that its command line has."""
    found = {"reader": time.process_time()}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):
                words = Path("/proc", pid, "cmdline").read_text()
                fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
                name = next((name for name, word in places.items() if word in words), "")
                found[name] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


async def _read_s(client: AioStoreClient, memory: measuring.Memory) -> float:
    began = time.perf_counter()
    async for digest, data in client.get_blobs(list(memory.blobs)):
        assert len(data) == digest.size_bytes
    return time.perf_counter() - began


async def measured(root: Path, gbit: float, blocks: int, repeats: int) -> dict[str, Any]:
    link = gbit * 1e9 / 8
    geometry = measuring.geometries(is_quick=False)[-1]
    memory = measuring._memory(geometry.identity, blocks, 1)
    took: dict[str, list[float]] = {"plain": [], "bucket": [], "disk": []}
    spent: dict[str, Counter[str]] = {name: Counter() for name in took}
    places = {"far store": str(root / "far"), "near store": str(root / "near"), "server": "versitygw", "link": "spawn"}

    async def note(name: str, read: Awaitable[float]) -> None:
        before = processor_s(places)
        took[name].append(await read)
        spent[name] += Counter({each: s - before.get(each, 0.0) for each, s in processor_s(places).items()})

    with ExitStack() as stack:
        url, keys = stack.enter_context(behind_a_link(root, link))
        no_copies = ("--blobs", url, "--blob-credentials-file", str(keys), "--blob-tier-bytes", "0")
        far_at = stack.enter_context(measuring._store(root / "far", *no_copies))
        near_at = stack.enter_context(measuring._store(root / "near"))
        async with AioStoreClient.connect(far_at) as far, AioStoreClient.connect(near_at) as near:
            for client in (far, near):
                await _stored(client, memory)
            bucket = open_bucket(url, keys)
            names = [(name, bucket.size_bytes(name) or 0) for name in bucket.names("")]
            large = [each for each in names if each[1] > 1 << 20]
            assert len(large) == len(memory.blobs)
            for _ in range(repeats):
                await note("plain", asyncio.to_thread(plain_s, bucket, large))
                await note("bucket", _read_s(far, memory))
                await note("disk", _read_s(near, memory))
    seconds = {name: statistics.median(each) for name, each in took.items()}
    rates = {name: memory.size_bytes / each for name, each in seconds.items()}
    of_32k, all_gb = _BLOCKS_OF_32K / blocks, memory.size_bytes * repeats / 1e9
    return {
        **{f"{name}_mb_per_s": round(rate / 1e6) for name, rate in rates.items()},
        "link_mb_per_s": round(link / 1e6),
        "share_of_link": round(rates["bucket"] / link, 3),
        "share_of_plain": round(rates["bucket"] / rates["plain"], 3),
        **{f"{name}_32k_s": round(seconds[name] * of_32k, 3) for name in ("bucket", "disk")},
        "bucket_to_disk": round(seconds["bucket"] / seconds["disk"], 2),
        "processor_s_per_gb": {
            about: {name: round(each / all_gb, 2) for name, each in spent[about].items()} for about in spent
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, nargs="*", default=[1, 10], help="of the link, a second")
    parser.add_argument(
        "--blocks", type=int, default=_BLOCKS_OF_32K, help="of 256 tokens and 9.4 MB; few show its ends"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="on which disk; left out: the one for temporary files")
    given = parser.parse_args()
    os.environ.setdefault("SSL_CERT_FILE", certifi.where())  # the bucket's client wants some
    bytearray(_FREED_BYTES)
    found = {}
    for gbit in given.gbit:
        with tempfile.TemporaryDirectory(prefix="kvasir-far-", dir=given.dir) as directory:
            work = measured(Path(directory), gbit, given.blocks, given.repeats)
            found[f"{gbit:g} Gbit/s"] = measuring._run(work)  # on uvloop, as an engine
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""`kvasir bench store`: rates of real stores, plain and sealed, in turns with this machine's wire, disk and hash."""

import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvasir.cachestore.v1 import identity_pb2
from kvasir.cli.own_services.own_processes import held
from kvasir.clients import AioStoreClient
from kvasir.clients.aio.handed_upload import put_by_files
from kvasir.clients.handed_files import HandedFiles
from kvasir.credentials import write_private_text
from kvasir.errors import Unavailable
from kvasir.formats import manifest
from kvasir.formats.blob_place import blob_place
from kvasir.formats.block_file import FileIdentity, encode
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.tensor_layouts import expected_tensors, plain_policy
from kvasir.syncing import Scratch
from kvasir.waits import HANGS_S

from kvasir_bench.arithmetic import Target, timed
from kvasir_bench.tables import text_table, verdicts
from kvasir_bench.wire import sent_s, write

Say = Callable[[str], None]
Keep = Callable[[Mapping[str, Any]], None]
_READERS = min(8, os.cpu_count() or 1)  # threads that read files
# On one thread and, where named so, on all cores if a blob is large. Files are read from the page cache.
_BASELINES = ("tcp", "write_fsync", "blake3", "blake3_all", "read")
_MEASURED = (*_BASELINES, "put", "get", "pull", "put_files", "get_files", "sealed_put", "sealed_get")
# The baselines of which the slowest bounds each; an engine hashes on all cores.
_LIMITS = {
    "put": ("tcp", "write_fsync", "blake3"),
    "pull": ("tcp", "write_fsync", "blake3"),
    "get": ("tcp", "read", "blake3_all"),
    "put_files": ("write_fsync", "blake3_all"),
    "get_files": ("read", "blake3_all"),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's blocks: the size of one, and the number that is moved."""

    name: str
    identity: identity_pb2.KvIdentity
    blocks: int


@dataclass(frozen=True, slots=True)
class Memory:
    """An agent's blocks and manifest, made of random codes."""

    blobs: Mapping[Digest, bytes]
    manifest: bytes

    @property
    def size_bytes(self) -> int:
        return sum(digest.size_bytes for digest in self.blobs)


def geometries(is_quick: bool) -> list[Geometry]:
    """The shipped model, and Llama 3.1 8B with blocks of 9.4 MB."""
    return [
        Geometry("kvasir-tiny", _identity("tiny", 8, 2, 64), 8 if is_quick else 128),
        Geometry("llama-3.1-8b", _identity("llama", 32, 8, 128), 2 if is_quick else 24),
    ]


def run(directory: Path | None, say: Say, keep: Keep, *, is_quick: bool) -> dict[str, Any]:
    """Measure on the disk of `directory`. `is_quick` moves less. `keep` gets the results after each part: the last one
    fills a store, which takes a slow disk minutes.
    """
    repeats, startup_blobs = (1, 500) if is_quick else (5, 100_000)
    results: dict[str, Any] = {"sizes": []}
    with Scratch("kvasir-bench-", directory) as root:
        for geometry in geometries(is_quick):
            results["sizes"].append(_run(_moving(root / geometry.name, geometry, repeats, say)))
            results["find_missing_1000_ms"] = results["sizes"][0]["find_missing_1000_ms"]
            keep(results)
        say(f"filling a store with {startup_blobs:,} blobs, and starting it")
        results["startup"] = _run(_startup(root / "startup", startup_blobs))
    results["targets"] = [target.row() for target in targets(results)]
    keep(results)
    return results


async def _moving(root: Path, geometry: Geometry, repeats: int, say: Say) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in _MEASURED}
    with ExitStack() as stack:
        sealed_at = stack.enter_context(_store(root / "sealed", *_sealed(root / "sealed")))
        there = stack.enter_context(_store(root / "there"))
        peers = root / "peers.toml"
        write_private_text(peers, f'[[peer]]\nname = "there"\naddress = "{there}"\n')
        here = stack.enter_context(_store(root / "here", "--peers-file", str(peers)))
        beside_at = stack.enter_context(_store(root / "beside"))
        async with (
            AioStoreClient.connect(there) as source,
            AioStoreClient.connect(here) as target,
            AioStoreClient.connect(sealed_at) as sealed,
            AioStoreClient.connect(beside_at) as beside,
        ):
            await beside.get_capabilities()  # makes the place for files
            for repeat in range(repeats + 1):
                say(f"blocks of {geometry.name}: {repeat + 1} of {repeats + 1}")
                memory = _memory(geometry.identity, geometry.blocks, repeat)
                seconds = _baselines(root, memory)
                seconds |= await _transfers(source, target, memory, f"agent-{repeat}")
                seconds |= await _by_files(beside, root / "beside" / "data", memory)
                seconds |= {f"sealed_{name}": value for name, value in (await _put_and_get(sealed, memory)).items()}
                # The first round warms caches, connections and allocators.
                for name, value in seconds.items() if repeat else ():
                    rates[name].append(memory.size_bytes / value / 1e6)
            missing_ms = [await _find_missing_ms(target, memory) for _ in range(20)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    slowest = {name: min(limits, key=lambda each: medians[each]) for name, limits in _LIMITS.items()}
    return {
        "name": geometry.name,
        "block_bytes": next(iter(memory.blobs)).size_bytes,
        "blocks": geometry.blocks,
        "mb_per_s": {name: round(value, 1) for name, value in medians.items()},
        "ratio_to_slowest": {name: round(medians[name] / medians[limit], 3) for name, limit in slowest.items()},
        "slowest": slowest,
        "ratio_of_sealed": {name: round(medians[f"sealed_{name}"] / medians[name], 3) for name in ("put", "get")},
        "find_missing_1000_ms": round(statistics.median(missing_ms), 2),
    }


def _baselines(root: Path, memory: Memory) -> dict[str, float]:
    blobs, plain = list(memory.blobs.values()), root / "plain"
    plain.mkdir()
    seconds = {
        "tcp": sent_s(blobs),
        "write_fsync": timed(lambda: write(plain, blobs, one_by_one=True)),
        "read": timed(lambda: [(plain / str(index)).read_bytes() for index in range(len(blobs))]),
        "blake3": timed(lambda: [blake3(blob).digest() for blob in blobs]),
        "blake3_all": timed(lambda: [Digest.of(blob) for blob in blobs]),
    }
    shutil.rmtree(plain)
    return seconds


async def _transfers(source: AioStoreClient, target: AioStoreClient, memory: Memory, agent_id: str) -> dict[str, float]:
    seconds = await _put_and_get(source, memory)
    await source.commit(agent_id, await source.put_manifest(memory.manifest), 0)
    began = time.perf_counter()
    await target.pull_agent("there", agent_id)
    return seconds | {"pull": time.perf_counter() - began}


async def _put_and_get(client: AioStoreClient, memory: Memory) -> dict[str, float]:
    began = time.perf_counter()
    await client.put_blobs(memory.blobs)
    put_s = time.perf_counter() - began
    began = time.perf_counter()
    async for _ in client.get_blobs(list(memory.blobs)):
        pass
    return {"put": put_s, "get": time.perf_counter() - began}


async def _by_files(client: AioStoreClient, data_dir: Path, memory: Memory) -> dict[str, float]:
    """As an engine on the store's host: it hashes the blobs, hands them over as files, and reads files."""
    began = time.perf_counter()
    digests = await asyncio.to_thread(lambda: [Digest.of(data) for data in memory.blobs.values()])
    blobs = dict(zip(digests, memory.blobs.values(), strict=True))
    missing = await client.find_missing(list(blobs))
    await put_by_files(client, blobs, missing, HandedFiles(data_dir, "default"))
    put_s = time.perf_counter() - began
    with ThreadPoolExecutor(_READERS) as readers:
        began = time.perf_counter()
        found = await asyncio.to_thread(lambda: list(readers.map(lambda each: _read_blob(data_dir, each), digests)))
    assert found == digests, "a file has other bytes than were put"
    return {"put_files": put_s, "get_files": time.perf_counter() - began}


def _read_blob(data_dir: Path, digest: Digest) -> Digest:
    """The digest of what lies there, from one of the readers' threads."""
    data = blob_place(data_dir, "default", digest.hash).read_bytes()
    return Digest(blake3(data).hexdigest(), len(data))


async def _find_missing_ms(client: AioStoreClient, memory: Memory) -> float:
    """A thousand digests, those of a memory among them."""
    asked = [*memory.blobs, *(Digest.of(str(n).encode()) for n in range(1000))][:1000]
    began = time.perf_counter()
    await client.find_missing(asked)
    return (time.perf_counter() - began) * 1000


async def _startup(root: Path, blobs: int) -> dict[str, Any]:
    """From the start of the process until it answers, with many blobs in its directory; and with none."""
    identity = _identity("small", 1, 1, 64)
    empty_s = [await _start_s(root / "empty") for _ in range(3)]
    with _store(root / "full") as address:
        async with AioStoreClient.connect(address) as client:
            filling_s = await _filled_s(client, identity, blobs)
    full_s = [await _start_s(root / "full") for _ in range(3)]
    return {
        "blobs": blobs,
        "seconds": round(statistics.median(full_s), 3),
        "seconds_empty": round(statistics.median(empty_s), 3),
        "small_blobs_put_per_s": round(blobs / filling_s),
    }


async def _filled_s(client: AioStoreClient, identity: identity_pb2.KvIdentity, blobs: int) -> float:
    """Seconds to put so many, four calls at once. They are made before: that is none of its time."""
    files = [_file(identity, f"{number}", 1, "tail") for number in range(blobs)]
    size = min(1000, -(-blobs // 4))
    batches = [{Digest.of(data): data for data in files[start : start + size]} for start in range(0, blobs, size)]

    async def fill(own: Sequence[Mapping[Digest, bytes]]) -> None:
        for batch in own:
            await client.put_blobs(batch)

    began = time.perf_counter()
    await asyncio.gather(*(fill(batches[first::4]) for first in range(4)))
    return time.perf_counter() - began


async def _start_s(root: Path) -> float:
    began = time.perf_counter()
    with _store(root) as address:
        async with AioStoreClient.connect(address) as client:
            await client.get_capabilities()
            return time.perf_counter() - began


@contextmanager
def _store(root: Path, *options: str) -> Iterator[str]:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="kv") as sockets, (root / "log").open("ab") as log:
        address = f"unix:{sockets}/s"
        serve = [sys.executable, "-Pm", "cachestore_svc", "serve", "--data-dir", str(root / "data")]
        pipe, argv = subprocess.PIPE, held([*serve, "--listen", address, *options])
        # A session of its own: the terminal's Ctrl-C comes to this program alone.
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("listening on "):
                raise Unavailable(f"the store did not start: {(root / 'log').read_text()[-2000:]}")
            yield address
        finally:
            process.terminate()
            process.wait(HANGS_S)


def _sealed(root: Path) -> tuple[str, ...]:
    options = ("--seal-key-file", str(root / "seal.key"))
    new = ["keys", "new", "default", "--data-dir", str(root / "data"), *options]
    argv = [sys.executable, "-Pm", "cachestore_svc", *new]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, start_new_session=True)
    return options


def _identity(name: str, layers: int, kv_heads: int, dim: int) -> identity_pb2.KvIdentity:
    layout = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=kv_heads, key_dim=dim, value_dim=dim)
    return identity_pb2.KvIdentity(
        weights_digest=Digest.of(name.encode()).hash, layers=[layout] * layers, policy=plain_policy(4)
    )


def _memory(identity: identity_pb2.KvIdentity, blocks: int, seed: int) -> Memory:
    kv_hash = kv_identity_hash(identity)
    tokens = [seed * 1_000_000 + index for index in range(blocks * BLOCK_TOKENS)]
    blobs: dict[Digest, bytes] = {}
    for index, chain in enumerate(chain_hashes(kv_hash, tokens)):
        data = _file(identity, chain, BLOCK_TOKENS, "block", index * BLOCK_TOKENS)
        blobs[Digest.of(data)] = data
    manifest_bytes = manifest.build(
        kv_identity=identity,
        token_ids=tokens,
        text="x" * len(tokens),
        token_chars=[1] * len(tokens),
        blocks=blobs,
        created_unix_ms=0,
    )
    return Memory(blobs, manifest_bytes)


def _file(identity: identity_pb2.KvIdentity, chain: str, rows: int, kind: str, start: int = 0) -> bytes:
    """A tensor file of random codes, with scales and biases of 0. A `chain` that is no hash is hashed into one."""
    source = random.Random(chain)  # noqa: S311  bytes to move, not secrets
    chain = chain if len(chain) == 64 else Digest.of(chain.encode()).hash
    tensors = [
        (spec, source.randbytes(spec.size_bytes) if spec.dtype == "U32" else bytes(spec.size_bytes))
        for spec in expected_tensors(identity, rows)
    ]
    return encode(FileIdentity(kind, kv_identity_hash(identity), start, rows, chain), tensors)


def _run(work: Any) -> Any:
    """Run it on uvloop where that is installed, as the engine does."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


# The least part of the slowest baseline: of large blobs, and of small ones.
_LARGE, _SMALL = ("put", "put_files", "pull", "get_files"), ("put", "put_files", "pull")


def targets(results: Mapping[str, Any]) -> Iterator[Target]:
    small, large, startup = results["sizes"][0], results["sizes"][-1], results["startup"]
    for size, limit, names in ((large, 0.8, _LARGE), (small, 0.6, _SMALL)):
        for name in names:
            yield Target(f"{name}, {size['name']} / {size['slowest'][name]}", size["ratio_to_slowest"][name], limit)
    yield Target("put into a sealed namespace / put", large["ratio_of_sealed"]["put"], 0.7)
    yield Target("get from a sealed namespace / get", large["ratio_of_sealed"]["get"], 0.7)
    yield Target("find 1,000 digests, ms", results["find_missing_1000_ms"], 10.0, is_most=True)
    yield Target(f"start with {startup['blobs']:,} blobs, s", startup["seconds"], 2.0, is_most=True)


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    sizes = results["sizes"]
    rows = [
        (size["name"], f"{size['block_bytes'] / 1e6:.2f} MB", *(f"{rate:,.0f}" for rate in size["mb_per_s"].values()))
        for size in sizes
    ]
    yield from text_table([("MB/s", "block", *sizes[0]["mb_per_s"]), *rows])
    yield f"small blobs put per second: {results['startup']['small_blobs_put_per_s']:,}"
    yield from text_table(verdicts(results["targets"]))

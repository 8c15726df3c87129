"""What this machine can do, measured in the same run: synced writes, reads with and without the page cache, BLAKE3, a
socket.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3
from kvasir.formats.digest import Digest

from kvasir_bench.arithmetic import median_time
from kvasir_bench.program import measured_by
from kvasir_bench.wire import sent_s, write

# Blobs of this shape's blocks.
BLOCK_BYTES = 256 * 36_864
_BLOCKS = 32
_REPEATS = 3
_READERS = 8  # as an engine has
_MOST_CACHED = 0.05  # of files that were dropped: a file system may keep them all the same


def rates(directory: Path, blocks: int = _BLOCKS, repeats: int = _REPEATS) -> dict[str, float]:
    """Bytes per second: medians. `directory` lies on the disk that is measured. Without `read_dropped` where the
    system keeps files that it should forget.
    """
    blobs = [os.urandom(BLOCK_BYTES) for _ in range(blocks)]
    total = blocks * BLOCK_BYTES
    with tempfile.TemporaryDirectory(dir=directory) as below:
        root = Path(below)
        seconds = {
            "write_synced": median_time(lambda: write(root, blobs, one_by_one=False), repeats),
            "read_cached": median_time(lambda: _read(root), repeats),
            **_read_dropped(root, repeats),
            "blake3_thread": median_time(lambda: [blake3(blob).digest() for blob in blobs], repeats),
            "blake3_all": median_time(lambda: [Digest.of(blob) for blob in blobs], repeats),
            "unix_socket": median_time(lambda: _send(root, blobs), repeats),
        }
    return {name: round(total / value) for name, value in seconds.items()}


def device_rates() -> dict[str, Any]:
    """Of copies from host memory to MLX's device and on it. Raises FailedPrecondition without an engine."""
    return measured_by("engine.link_rates", "the device was not measured", {})


def cached_share(files: Sequence[Path]) -> float:
    """The share of these files' bytes in the page cache, by one page in 256; 1.0 where the system does not know.
    It reads around each page that is looked at, so drop them again."""
    seen = cached = 0
    flags = getattr(os, "RWF_NOWAIT", None)
    if flags is None:
        return 1.0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for offset in range(0, os.fstat(descriptor).st_size, 256 * 4096):
                seen += 1
                cached += _is_cached(descriptor, offset, flags)
        finally:
            os.close(descriptor)
    return cached / seen if seen else 0.0


def drop_cached(files: Sequence[Path]) -> None:
    """Let the system forget what it holds of these files, which nobody has open; without effect on a Mac."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _is_cached(descriptor: int, offset: int, flags: int) -> bool:
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, flags))
    except BlockingIOError:
        return False
    except OSError:  # a file system that does not know
        return True


def _read(root: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    for file in root.iterdir():
        _read_into(buffer, file)


def _read_into(buffer: bytearray, file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        opened.readinto(buffer)


def _read_dropped(root: Path, repeats: int) -> dict[str, float]:
    """Seconds to read all files by several threads, while the page cache has none of them."""
    files, seconds = list(root.iterdir()), list[float]()
    buffers = threading.local()

    def read(file: Path) -> None:
        buffers.own = getattr(buffers, "own", None) or bytearray(BLOCK_BYTES)
        _read_into(buffers.own, file)

    with ThreadPoolExecutor(_READERS) as threads:
        drop_cached(files)
        if cached_share(files) > _MOST_CACHED:
            return {}
        for _ in range(repeats):
            drop_cached(files)
            began = time.perf_counter()
            list(threads.map(read, files))
            seconds.append(time.perf_counter() - began)
    return {"read_dropped": statistics.median(seconds)}


def _send(root: Path, blobs: Sequence[bytes]) -> float:
    """Seconds to another process over a Unix socket."""
    address = root.parent / f"{root.name}.sock"  # beside the files that are read
    try:
        return sent_s(blobs, address)
    finally:
        address.unlink(missing_ok=True)

"""Bytes to this disk, and to another process over a socket, which receives and acknowledges as fast as it can."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvasir.cli.running.program import ended_with_us
from kvasir.formats.frames import FRAME_BYTES

_SINK = """
import socket, sys
path, left = sys.argv[1], int(sys.argv[2])
server = socket.socket(socket.AF_UNIX) if path else socket.socket()
server.bind(path or ("127.0.0.1", 0)); server.listen(); print(path or server.getsockname()[1], flush=True)
buffer = bytearray(1 << 20); connection, _ = server.accept()
while left and (came := connection.recv_into(buffer, min(left, len(buffer)))): left -= came
if not left: connection.sendall(b"!")
"""


def write(directory: Path, blobs: Sequence[bytes], *, one_by_one: bool) -> None:
    """Each blob into a file of its own, a mebibyte at a time. Files are synced `one_by_one` with their names, or all at
    the end, as by a store that groups its syncs."""
    parent, written = os.open(directory, os.O_RDONLY), []
    for number, blob in enumerate(blobs):
        written.append(os.open(directory / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        view = memoryview(blob)
        for offset in range(0, len(blob), FRAME_BYTES):
            os.write(written[-1], view[offset : offset + FRAME_BYTES])
        if one_by_one:
            os.fsync(written[-1])
            os.close(written.pop())
            os.fsync(parent)
    for descriptor in written:
        os.fsync(descriptor)
        os.close(descriptor)
    os.close(parent)


def sent_s(blobs: Sequence[bytes], at: Path | None = None) -> float:
    """Seconds over a Unix socket at this path, or over loopback TCP."""
    argv = [sys.executable, "-c", _SINK, str(at or ""), str(sum(map(len, blobs)))]
    with ended_with_us(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)) as sink:
        assert sink.stdout is not None
        address = sink.stdout.readline().strip()
        with socket.socket(socket.AF_UNIX if at else socket.AF_INET) as wire:
            wire.connect(address if at else ("127.0.0.1", int(address)))
            began = time.perf_counter()
            for blob in blobs:
                view = memoryview(blob)
                for offset in range(0, len(blob), FRAME_BYTES):
                    wire.sendall(view[offset : offset + FRAME_BYTES])
            wire.recv(1)
            return time.perf_counter() - began

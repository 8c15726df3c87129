"""Ports for services of tests: each is given to one process of tests at a time, and to no connection."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_PORTS = range(20_000, 32_000)  # below those that Linux and macOS give to connections
_held: list[int] = []  # descriptors of locks, until the process ends


def free_port() -> int:
    """A port on which nobody listens, and which no other process of tests has been given."""
    locks = Path(tempfile.gettempdir()) / f"kvasir-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        lock = os.open(locks / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
            continue
        _held.append(lock)
        return port
    raise AssertionError("all ports are taken")

"""A service that begins before its command line is known, as the engine of `kvasir up -d`: it imports, and rests."""

import json
import os
import socket
import sys

_RESTS = "resting"  # of Python's -X, as the starter writes it
_MOST_FILES = 8
_READ_BYTES = 1 << 16


def rest() -> bool:
    """Wait for the words, and for the files that a starter hands over: a log first, then what is only held. False in a
    process that has its words. Ends one whose starter has ended.
    """
    if _RESTS not in sys._xoptions:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(0)) as starter:
        _, files, _, _ = socket.recv_fds(starter, 1, _MOST_FILES)
        words = b"".join(iter(lambda: starter.recv(_READ_BYTES), b""))
    if not files or not words:
        os._exit(1)
    sys.argv[1:] = json.loads(words)
    log, null = files[0], os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, log, log)):
        os.dup2(descriptor, number)
    os.close(null)
    os.close(log)
    return True

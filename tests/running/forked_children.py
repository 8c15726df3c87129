"""What a forked program starts with `python -m …`, or `-Pm`, is forked too, by a helper that has the imports and runs
nothing.

Such a child has the parent, pid, streams, session and end that it has anywhere; only the interpreter's start is saved.
Its parent cannot fork it itself, because gRPC may run there by then. So the helper forks twice and the one in between
ends: the child falls to the nearest process above that takes orphans, which is its parent.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvasir.cli.running.program import MODULE

from tests.running import set_clock

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_LONGEST_REQUEST, _MOST_FDS = 1 << 20, 64
TELLS_STACKS = signal.SIGUSR2  # of all threads, to the log


def tell_stacks() -> None:
    """At that signal, also where the process hangs."""
    faulthandler.register(TELLS_STACKS, file=2, all_threads=True)


def start_helper() -> None:
    """For the calling process, which runs nothing else yet, until its end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _run(*_next_child(theirs, parent))
    theirs.close()
    subprocess._fork_exec = _Starting(ours, subprocess._fork_exec)  # type: ignore[attr-defined]


class _Starting:
    """In place of the last step of `subprocess.Popen`, which returns the child's pid."""

    def __init__(self, helper: socket.socket, begin: Callable[..., int]) -> None:
        self._helper = helper
        self._begin = begin
        self._asking = threading.Lock()

    def __call__(self, argv: Sequence[str | bytes], *given: Any) -> int:
        words = [os.fsdecode(each) for each in argv]
        is_module = words[0] == sys.executable and words[1:2] in (["-m"], [MODULE])
        return self._ask(words[2:], *given) if is_module else self._begin(argv, *given)

    def _ask(self, words: list[str], *given: Any) -> int:
        (_, _, kept, cwd, env, stdin, _, _, stdout, _, stderr, _, closed_by_exec, _, is_session, *_) = given
        umask = given[19]
        request = {
            "argv": words,
            "cwd": os.fsdecode(cwd or "."),
            "env": [os.fsdecode(each) for each in env] if env else [f"{key}={os.environ[key]}" for key in os.environ],
            "is_session": bool(is_session),
            "umask": umask,
        }
        streams = [own if given_fd < 0 else given_fd for own, given_fd in enumerate((stdin, stdout, stderr))]
        with self._asking:
            kept_open = [fd for fd in kept if fd != closed_by_exec]
            socket.send_fds(self._helper, [json.dumps(request).encode()], [*streams, *kept_open])
            return int(self._helper.recv(100))


def _next_child(wire: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]]:
    """Returns in each child, once it is the parent's, with what is asked of it. The helper ends with the parent."""
    while True:
        request, fds, _, _ = socket.recv_fds(wire, _LONGEST_REQUEST, _MOST_FDS)
        if not request:
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            wire.send(str(os.getpid()).encode())
            wire.close()
            return json.loads(request), fds
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _run(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """As `python -m` does, up to the process's end."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    if request["is_session"]:
        os.setsid()
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in request["env"])
    # Of its own streams: those of the process above may be files, whose places a pipe does not have.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    start_helper()
    tell_stacks()
    sys.argv = request["argv"]
    if (clock := os.environ.get(set_clock.VARIABLE)) and sys.argv[0] in ("cachestore_svc", "inference_svc"):
        program = importlib.import_module(f"{sys.argv[0]}.__main__")
        set_clock.follow(program, Path(clock))
        sys.exit(program.main())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit(0)

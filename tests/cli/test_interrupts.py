"""A signal that Python notes between a prompt and its wait for keys ends that wait all the same."""

import os
import pty
import select
import subprocess
import sys

import pytest

# A thread's own signal is noted for the main thread, whose wait goes on: as one that comes just before the wait.
_PROGRAM = """
import signal, threading, time
from kvasir.cli.talking.chat import texts

def interrupt():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background ignores it
threading.Thread(target=interrupt).start()
for _ in texts(lambda: "asked> ", print):
    pass
"""


@pytest.mark.parametrize("with_editing", [True, False])
def test_a_signal_that_comes_just_before_the_wait_for_keys_is_answered_without_a_key(*, with_editing: bool) -> None:
    ours, theirs = pty.openpty()
    hides = "" if with_editing else "import sys; sys.modules['readline'] = None\n"
    program = [sys.executable, "-c", hides + _PROGRAM]
    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            screen = ""
            # Up to the next prompt: before it the terminal keeps a line's end for itself.
            while "asked> " not in screen.partition("leaves.")[2] and select.select([ours], [], [], 20)[0]:
                screen += os.read(ours, 4096).decode()
            assert "asked> " in screen.partition("leaves.")[2]
            os.write(ours, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(ours)

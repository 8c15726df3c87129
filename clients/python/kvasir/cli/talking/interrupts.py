"""Lets a signal end a prompt's wait for keys whenever it comes."""

import os
import signal
import threading
import time

from kvasir.waits import LOOK_S

_QUIET = signal.SIGURG  # it does nothing else to a program
_TIMES = 50  # the wait for keys begins meanwhile, on a busy machine, too


def interrupt_prompts() -> None:
    """From now on, in this thread, the main one. Between a prompt's last letter and its wait for keys Python only notes
    a signal, and looks at it once the wait ends: so a quiet one follows, which ends the wait.
    """
    noted, notes = os.pipe()
    os.set_blocking(notes, False)
    signal.signal(_QUIET, lambda *_: None)
    signal.set_wakeup_fd(notes, warn_on_full_buffer=False)
    threading.Thread(target=_follow, args=(noted, threading.get_ident()), daemon=True).start()


def _follow(noted: int, waiting: int) -> None:
    while number := os.read(noted, 1):
        for _ in range(0 if number[0] == _QUIET else _TIMES):
            time.sleep(LOOK_S)
            signal.pthread_kill(waiting, _QUIET)

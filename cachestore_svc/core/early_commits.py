"""Commits that were requested before their last blobs were durable: each is submitted right behind the operation that
lists the last of its blobs, so that one transaction, and one sync, does both.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvasir.formats.digest import Digest


@dataclass(eq=False, slots=True)
class _Early:
    lacking: set[Digest]
    submit: Callable[[], "Future[Any]"]
    answer: "Future[Any]"


class EarlyCommits:
    """From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, list[_Early]] = defaultdict(list)

    def add(
        self,
        namespace: str,
        blobs: Iterable[Digest],
        submit: Callable[[], "Future[Any]"],
        find: Callable[[], Iterable[Digest]],
        answer: "Future[Any]",
    ) -> None:
        """Let `answer` be that of `submit`, which is called once all blobs are listed, unless `answer` was cancelled
        before. `find`: which of the blobs are listed now; it is called when none that comes later can be missed.
        """
        early = _Early(set(blobs), submit, answer)
        with self._lock:
            self._waiting[namespace].append(early)
        answer.add_done_callback(lambda _: self._drop(namespace, early))
        self._listed([early], set(find()))

    def listing(self, namespace: str, blobs: Iterable[Digest]) -> None:
        """An operation was submitted that lists these. A commit that it brings too early, as it fails, is refused."""
        if namespace in self._waiting:
            with self._lock:
                waiting = list(self._waiting.get(namespace, ()))
            self._listed(waiting, set(blobs))

    def _listed(self, waiting: Iterable[_Early], found: set[Digest]) -> None:
        ready = []
        with self._lock:
            for early in waiting:
                if early.lacking:
                    early.lacking -= found
                    ready += [] if early.lacking else [early]
        for early in ready:
            if early.answer.set_running_or_notify_cancel():
                _answer(early)

    def _drop(self, namespace: str, early: _Early) -> None:
        with self._lock:
            waiting = self._waiting[namespace]
            if early in waiting:
                waiting.remove(early)
            if not waiting:
                del self._waiting[namespace]


def _answer(early: _Early) -> None:
    def ended(done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            early.answer.set_exception(error)
        else:
            early.answer.set_result(done.result())

    try:
        early.submit().add_done_callback(ended)
    except Exception as error:  # noqa: BLE001  the store is closed: it belongs to the commit's caller, not to the blob's
        early.answer.set_exception(error)

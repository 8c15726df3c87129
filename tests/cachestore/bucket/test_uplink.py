"""What goes to a bucket at once: as much as the link takes, in turn, and one that hangs keeps others for a while."""

import threading
from collections.abc import Callable

from cachestore_svc.blobs.bucket.uplink import LEAST_AT_ONCE_BYTES, Uplink
from tests.running.waiting import eventually

MIB = 1 << 20


class Sending:
    """Objects that are sent by threads of their own, until the test lets them end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.uplink = Uplink(lambda: self.now_s)
        self.gone: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}
        self.moved: dict[str, Callable[[], None]] = {}

    def begin(self, folder: str, name: str, size_bytes: int) -> None:
        self._ends[name] = threading.Event()

        def send() -> None:
            with self.uplink.sending(folder, size_bytes, size_bytes) as moved:
                self.moved[name] = moved
                self.gone.append(name)
                self._ends[name].wait(20)

        before = self._count()
        self._threads[name] = threading.Thread(target=send, daemon=True)
        self._threads[name].start()
        eventually(lambda: self._count() > before)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            self._threads[name].join(20)

    def _count(self) -> int:
        return len(self.gone) + len(self.uplink._waiting)


def test_namespaces_take_turns_and_a_small_object_waits_for_none() -> None:
    sending = Sending()
    sending.begin("a", "a1", 40 * MIB)  # alone, it may be larger than all
    for name in ("a2", "a3", "b1"):
        sending.begin(name[0], name, 12 * MIB)
    sending.begin("c", "mark", 100)
    assert sending.gone == ["a1", "mark"]
    for before, following in (("a1", "a2"), ("a2", "b1"), ("b1", "a3")):
        sending.now_s += 20
        sending.end(before)
        eventually(lambda name=following: name in sending.gone)  # type: ignore[misc]
    assert sending.gone == ["a1", "mark", "a2", "b1", "a3"]
    sending.end("mark", "a3")


def test_small_objects_of_others_do_not_keep_a_large_one_for_ever() -> None:
    sending = Sending()
    sending.begin("b", "b1", 4 * MIB)
    sending.begin("a", "large", 16 * MIB)
    sending.begin("b", "b2", 4 * MIB)
    sending.begin("c", "c1", 4 * MIB)
    assert sending.gone == ["b1"]
    sending.now_s += 4
    sending.end("b1")
    eventually(lambda: "large" in sending.gone)
    assert sending.gone == ["b1", "large"]
    sending.now_s += 16
    sending.end("large")
    eventually(lambda: len(sending.gone) == 4)
    sending.end("b2", "c1")


def test_as_much_goes_at_once_as_was_taken_within_a_few_seconds() -> None:
    sending = Sending()
    for name, took_s, at_once_bytes in (("1", 2.0, 50 * MIB), ("2", 1.0, 100 * MIB), ("3", 40.0, LEAST_AT_ONCE_BYTES)):
        sending.begin("a", name, 10 * MIB)
        sending.now_s += took_s
        sending.end(name)
        assert sending.uplink.at_once_bytes == at_once_bytes
    assert not sending.uplink._going


def test_an_object_that_hangs_keeps_others_waiting_for_a_while_and_one_of_parts_that_go_on_does_not_hang() -> None:
    sending = Sending()
    sending.begin("a", "hangs", 16 * MIB)
    sending.now_s += 20
    sending.begin("b", "waits", 16 * MIB)
    sending.moved["hangs"]()
    sending.now_s += 20
    sending.begin("c", "looks", 16 * MIB)
    assert sending.gone == ["hangs"]
    sending.now_s += 11
    eventually(lambda: "waits" in sending.gone)
    assert sending.gone == ["hangs", "waits"]
    sending.end("hangs", "waits", "looks")

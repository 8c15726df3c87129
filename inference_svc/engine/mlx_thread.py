"""The one thread that runs MLX: a lazy array can be evaluated only on the thread that made its stream. Plain data or
bytes leave it, and work reaches it through a mailbox, emptied between two steps or cells. No lock is held around MLX.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from inference_svc.engine.device.device_errors import is_lost
from inference_svc.engine.device.device_watch import DeviceWatch
from inference_svc.model.device_memory import forget_frames

_IDLE_POLL_S = 1.0


class Worker(Protocol):
    def step(self, take_mail: Callable[[], None]) -> bool:
        """Do one step; False if there was no work. During a long step `take_mail` delivers letters."""

    def close(self) -> None:
        """End all work: the thread is about to end."""


WorkerT = TypeVar("WorkerT", bound=Worker)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Letter(Generic[WorkerT, ResultT]):
    work: Callable[[WorkerT], ResultT]
    result: "Future[ResultT]"

    def deliver(self, worker: WorkerT) -> Exception | None:
        """Returns an error that means that the device is lost: its sender may be the only one who hears of it."""
        if self.result.set_running_or_notify_cancel():
            try:
                self.result.set_result(self.work(worker))
            except Exception as error:  # noqa: BLE001 - the sender gets it
                DeviceWatch().makes_room(error)  # a device that is lost by now fails the next step, too
                forget_frames(error)
                self.result.set_exception(error)
                return error if is_lost(error) else None
        return None


class MlxThread(Generic[WorkerT]):
    """Runs a worker: mailbox, step, mailbox, step …; sleeps while there is no work."""

    def __init__(
        self, make_worker: Callable[[], WorkerT], name: str = "mlx", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread and make the worker on it. Blocks until it is made; raises the error if that fails."""
        self._mailbox: queue.SimpleQueue[Letter[WorkerT, Any]] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self.failed: Future[None] = (
            Future()
        )  # with the error that ended the thread before `close`; it is set on the thread
        self._clock = clock
        self._seen_s = clock()
        self._is_lost = False  # the device, for this process
        self._kept: WorkerT | None = None
        made: Future[None] = Future()
        # Not a daemon: a daemon that is busy at exit aborts the process.
        self._thread = threading.Thread(target=self._run, args=(make_worker, made), name=name, daemon=False)
        self._thread.start()
        try:
            made.result()
        except BaseException:
            self._thread.join()
            raise

    def post(self, work: Callable[[WorkerT], ResultT]) -> "Future[ResultT]":
        """Do `work` between two steps or cells. The future's callbacks run on the MLX thread; its end cancels it."""
        letter: Letter[WorkerT, ResultT] = Letter(work, Future())
        self._mailbox.put(letter)
        if self._has_ended.is_set():
            self._return_to_senders()
        return letter.result

    @property
    def silent_s(self) -> float:
        """Since when the thread did not look at its mailbox: at most a second, or a cell; infinite once ended."""
        return float("inf") if self._has_ended.is_set() else self._clock() - self._seen_s

    def close(self) -> None:
        """End the worker and the thread; blocks until then. Earlier letters are delivered first. Idempotent."""
        self._is_closing.set()
        self.post(lambda _worker: None)  # wakes it
        self._thread.join()

    def _run(self, make_worker: Callable[[], WorkerT], made: "Future[None]") -> None:
        try:
            worker = make_worker()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._is_lost = is_lost(error)
            made.set_exception(error)
        else:
            made.set_result(None)
            try:
                self._serve(worker)
            except Exception as error:
                self._end()
                if is_lost(error):
                    self._is_lost, self._kept = True, worker  # to free its memory would end the process
                else:
                    forget_frames(error)
                if self._is_lost or not self._is_closing.is_set():
                    self.failed.set_exception(error)
                raise
            finally:
                del worker  # its arrays go before the streams do
        finally:
            self._end()
            if not self._is_lost:
                # Without this the process dies with SIGABRT at exit in one run of three.
                mx.synchronize()
                mx.clear_streams()

    def _end(self) -> None:
        self._has_ended.set()
        self._return_to_senders()

    def _serve(self, worker: WorkerT) -> None:
        is_busy = True
        try:
            while not self._is_over():
                if not is_busy:
                    self._wait(worker)
                self._deliver_all(worker)
                is_busy = worker.step(lambda: self._deliver_all(worker))
            self._deliver_all(worker)
        finally:
            # Even when a step failed: callers that wait for the worker must not wait for ever.
            worker.close()

    def _is_over(self) -> bool:
        # A program that ends without close() must not hang in its exit, which waits for this thread.
        return self._is_closing.is_set() or not threading.main_thread().is_alive()

    def _wait(self, worker: WorkerT) -> None:
        with contextlib.suppress(queue.Empty):
            self._deliver(self._mailbox.get(timeout=_IDLE_POLL_S), worker)

    def _deliver_all(self, worker: WorkerT) -> None:
        self._seen_s = self._clock()
        with contextlib.suppress(queue.Empty):
            while True:
                self._deliver(self._mailbox.get_nowait(), worker)

    def _deliver(self, letter: Letter[WorkerT, Any], worker: WorkerT) -> None:
        if (error := letter.deliver(worker)) is not None:
            raise error

    def _return_to_senders(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._mailbox.get_nowait().result
                result.cancel()
                result.set_running_or_notify_cancel()  # else `futures.wait` goes on waiting for it

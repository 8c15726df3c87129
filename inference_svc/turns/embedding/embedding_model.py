"""The embedding model beside the served ones: on a thread of its own, one text at a time, namespaces in turn."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Priority
from inference_svc.engine.device.device_errors import device_error
from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.model.embedding.pooling import Embedded, Pooling
from inference_svc.model.embedding.text_embedder import TextEmbedder


class _Worker:
    def __init__(self, embedder: TextEmbedder) -> None:
        self.embedder = embedder

    def step(self, take_mail: Callable[[], None]) -> bool:  # noqa: ARG002  as the thread calls it
        return False

    def close(self) -> None:
        """Nothing is under way between two letters."""


class EmbeddingModel:
    def __init__(self, name: str, thread: MlxThread[_Worker], embedder: TextEmbedder) -> None:
        self.name = name
        self.dimensions = embedder.width
        self.context_tokens = embedder.most_tokens
        self.failed = thread.failed  # as `Engine.failed`
        self._thread = thread
        self._working = SharedRoom(1)

    @classmethod
    def open(cls, name: str, model: str, default: Pooling) -> "EmbeddingModel":
        made: list[TextEmbedder] = []

        def make() -> _Worker:
            made.append(TextEmbedder(model, default))
            return _Worker(made[0])

        return cls(name, MlxThread(make, "embeddings"), made[0])

    async def embed(
        self,
        namespace: str,
        given: str | Sequence[int],
        field: str,
        *,
        truncate: bool,
        priority: Priority,  # noqa: ARG002  texts are short, and none waits for another namespace's second
    ) -> Embedded:
        is_left = threading.Event()

        def embedded(worker: _Worker) -> Embedded:
            return worker.embedder.embed(given, field, truncate=truncate, is_cancelled=is_left.is_set)

        async with self._working.held_for(namespace, 1):
            try:
                return await asyncio.wrap_future(self._thread.post(embedded))
            except RuntimeError as error:
                raise device_error(error) or error from None
            finally:
                is_left.set()

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)

"""The one model that is loaded at a time, and the way from one to the next.

Only names that configuration lists exist here; their paths never come from the wire. A change is a task of its own, so
that a caller that goes away does not leave it half done; turns are refused meanwhile, with a time to come back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog
from kvasir.errors import FailedPrecondition, NotFound, Unavailable

_LOG = structlog.get_logger(__name__)
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class MemoriesLeft:
    """What became of hot memories: in the store as they were, or not."""

    stored: int = 0
    unstored: int = 0


class Served(Protocol):
    """One loaded model with all that serves it."""

    async def retire(self) -> MemoriesLeft:
        """Let turns end, or end them, and store what is hot. It can go on serving afterwards."""
        ...

    async def close(self) -> None:
        """Free it. What is hot and not stored is lost."""
        ...


ServedT = TypeVar("ServedT", bound=Served)


class ModelHost(Generic[ServedT]):
    """The models of one service. On one event loop."""

    def __init__(self, models: Mapping[str, str], open_model: Callable[[str, str], Awaitable[ServedT]]) -> None:
        """`models`: what may be loaded, by name. `open_model` loads one, given its name and where it is; it raises
        KvasirError for one that cannot be.
        """
        self._models = dict(models)
        self._open = open_model
        self._served: ServedT | None = None
        self._loaded = ""
        self._change: asyncio.Task[MemoriesLeft] | None = None
        self.loads = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What may be loaded, in configuration's order."""
        return tuple(self._models)

    @property
    def loaded(self) -> str:
        """The loaded model's name; empty if none is."""
        return self._loaded

    @property
    def served(self) -> ServedT | None:
        """The loaded model, also while it is being unloaded."""
        return self._served

    def serving(self, name: str) -> ServedT:
        """The loaded model if it has this name, or none is named. Raises NotFound, FailedPrecondition (another or none
        is loaded), Unavailable (it is being changed).
        """
        if name:
            self._check_known(name)
        if self._change is not None:
            raise Unavailable("models are being changed", reason="MODEL_CHANGING", retry_after_s=_RETRY_AFTER_S)
        if self._served is None:
            raise FailedPrecondition(
                f"no model is loaded; LoadModel (role admin) loads one of {', '.join(map(repr, self._models))}",
                reason="MODEL_NOT_LOADED",
                field="model",
            )
        if name and name != self._loaded:
            raise FailedPrecondition(
                f"model: {name!r} is configured and not loaded, {self._loaded!r} is; leave the name out to use it, or "
                "swap them by LoadModel (role admin)",
                reason="MODEL_NOT_LOADED",
                field="model",
                metadata={"loaded": self._loaded},
            )
        return self._served

    def check_known(self, name: str) -> str:
        """The name, or the loaded model's if it is empty. Raises NotFound."""
        self._check_known(name or self._loaded)
        return name or self._loaded

    async def load(self, name: str, *, drop_unstored: bool = False) -> MemoriesLeft:
        """Make this the loaded model; what became of the memories of the one before. Raises NotFound, Unavailable
        (another change is under way), FailedPrecondition and what loading raises: then the one before is loaded.
        """
        self._check_known(name)
        if name == self._loaded and self._change is None:
            return MemoriesLeft()
        return await self._changing(lambda: self._swap(name, drop_unstored))

    async def unload(self, name: str, *, drop_unstored: bool = False) -> MemoriesLeft:
        """Free the model if it is loaded. Raises as `load` does."""
        if name:
            self._check_known(name)
        if self._change is None and (self._served is None or name not in ("", self._loaded)):
            return MemoriesLeft()
        return await self._changing(lambda: self._unload(drop_unstored))

    async def close(self) -> MemoriesLeft:
        """At the end of the service: whatever is under way ends, hot memories are stored, and the model is freed."""
        if self._change is not None:
            await asyncio.wait({self._change})
        return await self._unload(drop_unstored=True)

    def _check_known(self, name: str) -> None:
        if name not in self._models:
            raise NotFound(
                f"model: {name[:120]!r} is not one of {', '.join(map(repr, self._models))}",
                reason="MODEL_NOT_FOUND",
                field="model",
            )

    async def _changing(self, work: Callable[[], Awaitable[MemoriesLeft]]) -> MemoriesLeft:
        if self._change is not None:
            raise Unavailable(
                "another change of models is under way", reason="MODEL_CHANGING", retry_after_s=_RETRY_AFTER_S
            )

        async def change() -> MemoriesLeft:
            try:
                return await work()
            finally:
                self._change = None

        self._change = asyncio.create_task(change())
        return await asyncio.shield(self._change)

    async def _swap(self, name: str, drop_unstored: bool) -> MemoriesLeft:
        before = self._loaded
        left = await self._unload(drop_unstored)
        try:
            await self._open_as(name)
        except Exception as error:
            _LOG.warning("model.not_loaded", model=name, error=type(error).__name__)
            if before:
                await self._open_as(before)
            raise
        return left

    async def _unload(self, drop_unstored: bool) -> MemoriesLeft:
        if self._served is None:
            return MemoriesLeft()
        left = await self._served.retire()
        if left.unstored and not drop_unstored:
            raise FailedPrecondition(
                f"{left.unstored} hot memories are not in the store and would be lost; try again when the store "
                "answers, or say drop_unstored",
                reason="MEMORIES_NOT_STORED",
                metadata={"unstored": str(left.unstored)},
            )
        served, name = self._served, self._loaded
        self._served, self._loaded = None, ""
        await served.close()
        _LOG.info("model.unloaded", model=name, stored=left.stored, dropped=left.unstored)
        return left

    async def _open_as(self, name: str) -> None:
        self._served = await self._open(name, self._models[name])
        self._loaded = name
        self.loads += 1
        _LOG.info("model.loaded", model=name)

"""The one model that is loaded at a time, of those that the configuration names, and the change to the next: a task of
its own, which no caller that goes away leaves half done. One that nobody uses may sleep: the next turn loads it again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import structlog
from kvasir.errors import FailedPrecondition, KvasirError, NotFound, Unavailable
from kvasir.waits import RETRY_S

from inference_svc.model import device_memory

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoriesLeft:
    """How many hot memories were in the store when their model went, and how many were not."""

    stored: int = 0
    unstored: int = 0


class ModelState(Enum):
    NOT_LOADED = "not_loaded"
    LOADING = "loading"
    LOADED = "loaded"
    RETIRING = "retiring"  # its turns end, and its memories are stored
    ASLEEP = "asleep"  # idleness has unloaded it, and the next turn loads it again


class Served(Protocol):
    @property
    def is_idle(self) -> bool: ...

    async def retire(self) -> MemoriesLeft:
        """Let turns end, or end them, and store hot memories. `stay` or `close` follows."""
        ...

    def stay(self) -> None:
        """Go on serving after a `retire`."""

    async def close(self) -> None:
        """Free the model. Hot memories that are not stored are lost."""
        ...


ServedT = TypeVar("ServedT", bound=Served)


class ModelHost(Generic[ServedT]):
    def __init__(
        self,
        models: Mapping[str, str],
        open_model: Callable[[str, str], Awaitable[ServedT]],
        unloaded: Callable[[], object],
    ) -> None:
        """`models`: the paths of the models that may be loaded, by name. `open_model` loads one by name and path; it
        raises KvasirError if that fails. `unloaded` is called when a model's memory is free, as after a load
        that failed.
        """
        self.names = tuple(models)  # of the models that may be loaded, in the order of the configuration
        self.served: ServedT | None = None  # the loaded model, even while it is being unloaded
        self.loaded = ""  # its name
        self._unloaded = unloaded
        self._models = dict(models)
        self._open = open_model
        self._change: asyncio.Task[MemoriesLeft] | None = None
        self._loading = ""  # the name of the model that is being loaded
        self._target = ""  # the name of the model that the change under way is to load
        self._asleep = ""  # the name of the model that idleness unloads, or has unloaded
        self._was_used = False
        self.loads = 0

    @property
    def sleeps(self) -> bool:
        """Whether idleness has unloaded the model, and the next turn loads it again."""
        return bool(self._asleep) and self.served is None

    def state(self, name: str) -> ModelState:
        if name == self._loading:
            return ModelState.LOADING
        if name != self.loaded:
            return ModelState.ASLEEP if self.sleeps and name == self._asleep else ModelState.NOT_LOADED
        return ModelState.LOADED if self._change is None else ModelState.RETIRING

    def serving(self, name: str) -> ServedT:
        """The loaded model, if it has this name or none is given. Raises NotFound, FailedPrecondition, Unavailable."""
        if name:
            self._check_known(name)
        if self._change is not None:
            raise Unavailable("models are being changed", reason="MODEL_CHANGING", retry_after_s=RETRY_S)
        if self.served is None:
            raise FailedPrecondition(
                f"no model is loaded; LoadModel (role admin) loads one of {', '.join(map(repr, self._models))}",
                reason="MODEL_NOT_LOADED",
                field="model",
            )
        if name and name != self.loaded:
            raise FailedPrecondition.of(
                "model",
                f"{name!r} is configured and not loaded, {self.loaded!r} is; leave the name out to use it, or "
                "swap them by LoadModel (role admin)",
                reason="MODEL_NOT_LOADED",
                loaded=self.loaded,
            )
        return self.served

    async def awake(self, name: str) -> ServedT:
        """As `serving`, after a model that sleeps was loaded again. Raises what loading raises, too."""
        self._was_used = True
        if self._asleep and name in ("", self._asleep):
            asleep = self._asleep
            await self._fallen_asleep()
            if self._asleep == asleep:
                await self.load(asleep)  # or follow the load that another turn has begun
        return self.serving(name)

    async def keep_alive(self, seconds: float) -> None:
        """Let a model sleep whenever no turn has run for so long; for ever. Unstored memories keep it awake."""
        while True:
            self._was_used = self.served is not None and not self.served.is_idle
            await asyncio.sleep(seconds)
            if self._was_used or self._change is not None or self.served is None or not self.served.is_idle:
                continue
            self._asleep = self.loaded
            try:
                await self._changing(lambda: self._unload(drop_unstored=False))
            except KvasirError as error:
                _LOG.warning("model.kept_awake", reason=error.reason)
            except Exception:  # noqa: BLE001 - it is logged, and the model may sleep later
                _LOG.exception("model.kept_awake")
            self._asleep = self._asleep if self.served is None else ""

    async def _fallen_asleep(self) -> None:
        """Wait for a model that is just falling asleep: nobody wanted that, so nobody is refused for it."""
        if self._asleep and self._change is not None and not self._target:
            await asyncio.wait({self._change})

    def check_known(self, name: str) -> str:
        """The name, or the loaded model's if it is empty. Raises NotFound."""
        self._check_known(name or self.loaded)
        return name or self.loaded

    async def load(self, name: str, *, drop_unstored: bool = False) -> MemoriesLeft:
        """Make this the loaded model; returns what became of the previous model's memories. Raises NotFound,
        Unavailable (another change is under way), FailedPrecondition, and the errors of loading: then the previous
        model is loaded again. A load of this model that is under way is followed.
        """
        self._check_known(name)
        await self._fallen_asleep()
        if self._change is not None and name == self._target:
            return await asyncio.shield(self._change)
        if name == self.loaded and self._change is None:
            return MemoriesLeft()
        return await self._changing(lambda: self._swap(name, drop_unstored), name)

    async def unload(self, name: str, *, drop_unstored: bool = False) -> MemoriesLeft:
        if name:
            self._check_known(name)
        await self._fallen_asleep()
        if self._change is None:
            self._asleep = ""  # who unloads a model by hand wants it to stay so
            if self.served is None or name not in ("", self.loaded):
                return MemoriesLeft()
        return await self._changing(lambda: self._unload(drop_unstored))

    async def close(self) -> MemoriesLeft:
        """End the service's model: wait for a change under way, store hot memories, and free the model."""
        if self._change is not None:
            await asyncio.wait({self._change})
        return await self._unload(drop_unstored=True)

    def _check_known(self, name: str) -> None:
        if name not in self._models:
            raise NotFound.of(
                "model",
                f"{name[:120]!r} is not one of {', '.join(map(repr, self._models))}",
                reason="MODEL_NOT_FOUND",
                model=name[:120],
            )

    async def _changing(self, work: Callable[[], Awaitable[MemoriesLeft]], target: str = "") -> MemoriesLeft:
        if self._change is not None:
            raise Unavailable("another change of models is under way", reason="MODEL_CHANGING", retry_after_s=RETRY_S)

        async def change() -> MemoriesLeft:
            try:
                return await work()
            finally:
                self._change, self._target = None, ""

        self._target = target
        # Of no call: a model's tasks last longer than the call that loads it.
        self._change = asyncio.create_task(change(), context=Context())
        return await asyncio.shield(self._change)

    async def _swap(self, name: str, drop_unstored: bool) -> MemoriesLeft:
        before = self.loaded
        left = await self._unload(drop_unstored)
        try:
            await self._open_as(name)
        except Exception:
            if before:
                await self._open_as(before)
            raise
        return left

    async def _unload(self, drop_unstored: bool) -> MemoriesLeft:
        if self.served is None:
            return MemoriesLeft()
        left = await self._retired(self.served, drop_unstored)
        served, name = self.served, self.loaded
        self.served, self.loaded = None, ""
        try:
            await served.close()
        except Exception:  # noqa: BLE001 - it is logged; nobody uses the model any more, and another may be loaded
            _LOG.exception("model.not_closed", model=name)
        del served
        await asyncio.to_thread(device_memory.give_back, is_first=self.loads == 1)
        self._unloaded()
        facts = {"stored": left.stored, "dropped": left.unstored, "left_bytes": device_memory.active_bytes()}
        log = _LOG.error if left.unstored else _LOG.info  # `kvasir down` reads it, at every log level
        log("model.unloaded", model=name, **facts)
        return left

    async def _retired(self, served: ServedT, drop_unstored: bool) -> MemoriesLeft:
        """Raises FailedPrecondition (MEMORIES_NOT_STORED): it goes on serving, as after any error."""
        try:
            left = await served.retire()
            if left.unstored and not drop_unstored:
                raise FailedPrecondition(
                    f"{left.unstored} hot memories are not in the store and would be lost; try again when the store "
                    "answers, or set drop_unstored",
                    reason="MEMORIES_NOT_STORED",
                    metadata={"unstored": str(left.unstored)},
                )
        except BaseException:
            served.stay()
            raise
        return left

    async def _open_as(self, name: str) -> None:
        self._loading = name
        try:
            self.served = await self._open(name, self._models[name])
            self.loaded, self._asleep = name, ""
        except BaseException as error:
            _LOG.warning("model.not_loaded", model=name, error=type(error).__name__)
            device_memory.forget_frames(error)
            await asyncio.to_thread(device_memory.give_back, is_first=False)
            self._unloaded()
            raise
        finally:
            self._loading = ""
        self.loads += 1
        _LOG.info("model.loaded", model=name)

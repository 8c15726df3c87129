"""The changes of a service's models, with models that take as long to go as a test wants."""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable

import pytest
from kvasir.errors import FailedPrecondition
from structlog.testing import capture_logs

from inference_svc.model import device_memory
from inference_svc.model.model_host import MemoriesLeft, ModelHost


class SlowToGo:
    """A model that nobody uses, and that is not free before it is let go."""

    is_idle = True

    def __init__(self) -> None:
        self.is_going, self.let_go = asyncio.Event(), asyncio.Event()

    async def retire(self) -> MemoriesLeft:
        return MemoriesLeft()

    def stay(self) -> None:
        raise AssertionError("nothing keeps it")

    async def close(self) -> None:
        self.is_going.set()
        await self.let_go.wait()


ASKED: dict[str, Callable[[ModelHost[SlowToGo]], Awaitable[object]]] = {
    "a turn": lambda host: host.awake("a"),
    "a load": lambda host: host.load("a"),
    "a load of another": lambda host: host.load("b"),
    "an unload": lambda host: host.unload("a"),
}
LEFT = {"a turn": "a", "a load": "a", "a load of another": "b", "an unload": ""}


@pytest.mark.parametrize("asked", ASKED)
async def test_nobody_is_refused_because_a_model_is_just_falling_asleep(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load an unload by hand met the end of it: "another change of models is under way"."""
    # These models hold no memory, and to collect the garbage of all tests takes seconds.
    monkeypatch.setattr(device_memory, "give_back", lambda *, is_first: None)

    async def open_model(_name: str, _path: str) -> SlowToGo:
        return SlowToGo()

    gone: list[bool] = []
    host = ModelHost({"a": "/a", "b": "/b"}, open_model, lambda: gone.append(host.served is None))
    await host.load("a")
    model = host.serving("a")
    keeping = asyncio.create_task(host.keep_alive(0.001))
    await model.is_going.wait()
    keeping.cancel()
    both = [asyncio.ensure_future(ASKED[asked](host)) for _ in range(2)]
    await asyncio.sleep(0)
    model.let_go.set()
    await asyncio.gather(*both)
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    assert gone == [True], "its memory is another's"
    assert host.loaded == LEFT[asked]


async def test_a_model_that_does_not_load_is_gone_before_the_one_before_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a device with room for one of them would be left with none."""
    freed, read = list[bool](), list[weakref.ref[Weights]]()
    monkeypatch.setattr(device_memory, "give_back", lambda *, is_first: freed.append(is_first))

    def read_weights() -> None:
        weights = Weights()
        read.append(weakref.ref(weights))
        try:
            raise ValueError("no tokenizer")
        except ValueError as error:
            raise FailedPrecondition("no model") from error

    async def open_model(name: str, _path: str) -> SlowToGo:
        if name == "b":
            await asyncio.to_thread(read_weights)
        assert not [each for each in read if each() is not None], "they lie beside the other's"
        assert len(freed) == 2 * len(read), "the one before, and the one that failed"
        model = SlowToGo()
        model.let_go.set()
        return model

    host = ModelHost({"a": "/a", "b": "/b"}, open_model, lambda: None)
    await host.load("a")
    with pytest.raises(FailedPrecondition):
        await host.load("b")
    assert host.loaded == "a"


class Weights:
    """Of a model."""


def test_each_model_that_does_not_load_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one before, after which the service has none."""
    monkeypatch.setattr(device_memory, "give_back", lambda *, is_first: None)
    is_there = True

    async def open_model(name: str, _path: str) -> SlowToGo:
        if name == "b" or not is_there:
            raise FailedPrecondition("model: not loadable")
        model = SlowToGo()
        model.let_go.set()
        return model

    async def scenario() -> str:
        nonlocal is_there
        host = ModelHost({"a": "/a", "b": "/b"}, open_model, lambda: None)
        await host.load("a")
        is_there = False
        with pytest.raises(FailedPrecondition):
            await host.load("b")
        return host.loaded

    with capture_logs() as logs:
        assert asyncio.run(scenario()) == ""
    assert [each["model"] for each in logs if each["event"] == "model.not_loaded"] == ["b", "a"]


async def test_a_model_that_does_not_load_claims_no_memory() -> None:
    async def open_model(_name: str, _path: str) -> SlowToGo:
        raise FailedPrecondition("model: not loadable")

    gone: list[bool] = []
    host = ModelHost({"a": "/a"}, open_model, lambda: gone.append(host.served is None))
    with pytest.raises(FailedPrecondition, match="not loadable"):
        await host.load("a")
    assert gone == [True]


@pytest.mark.parametrize("why", ["a memory is not stored", "the engine is broken"])
async def test_a_model_whose_unload_failed_stays(why: str) -> None:
    class Staying(SlowToGo):
        stays = 0

        async def retire(self) -> MemoriesLeft:
            if why == "the engine is broken":
                raise RuntimeError(why)
            return MemoriesLeft(unstored=1)

        def stay(self) -> None:
            self.stays += 1

    async def open_model(_name: str, _path: str) -> Staying:
        return Staying()

    host = ModelHost({"a": "/a"}, open_model, lambda: None)
    await host.load("a")
    with pytest.raises((FailedPrecondition, RuntimeError)):
        await host.unload("a")
    assert host.serving("a").stays == 1


class FailsOnce(SlowToGo):
    """A model whose end fails at first in one of its steps, and that knows whether it goes on."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.failing, self.stayed = [step], False
        self.let_go.set()

    def _try(self, step: str) -> None:
        if step in self.failing:
            self.failing.remove(step)
            raise OSError("a library failed")

    async def retire(self) -> MemoriesLeft:
        self._try("retire")
        return MemoriesLeft()

    def stay(self) -> None:
        self.stayed = True

    async def close(self) -> None:
        self._try("close")
        await super().close()


@pytest.mark.parametrize("step", ["retire", "close"])
async def test_models_go_on_falling_asleep_after_one_could_not(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task ended, and a model whose memories could not be stored neither woke agents nor warmed up again."""
    monkeypatch.setattr(device_memory, "give_back", lambda *, is_first: None)
    opened: list[FailsOnce] = []
    slept: asyncio.Queue[bool] = asyncio.Queue()

    async def open_model(_name: str, _path: str) -> FailsOnce:
        opened.append(FailsOnce(step if not opened else ""))
        return opened[-1]

    host = ModelHost({"a": "/a"}, open_model, lambda: slept.put_nowait(host.sleeps))
    await host.load("a")
    keeping = asyncio.create_task(host.keep_alive(0.001))
    try:
        assert await asyncio.wait_for(slept.get(), 10)
        assert opened[0].stayed == (step == "retire")
        await host.awake("a")
        assert await asyncio.wait_for(slept.get(), 10)
    finally:
        keeping.cancel()

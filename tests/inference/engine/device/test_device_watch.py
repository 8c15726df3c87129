"""A pass that fails: its arrays outlive what MLX has begun of it, and its turn alone ends; a lost device ends all."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import Cancelled, Internal, InvalidArgument, KvasirError, ResourceExhausted, Unavailable

from inference_svc.engine.api import AgentKey, Hot, Tokens
from inference_svc.engine.device import device_watch
from inference_svc.engine.device.device_errors import DeviceLost, device_error
from inference_svc.engine.device.device_watch import DeviceWatch
from inference_svc.engine.engine import Engine
from inference_svc.model import device_memory
from tests.inference.engine.driving import Driver, Listener, driver_with_room_for, tokens_of
from tests.inference.service.failing_device import LOST, NO_MEMORY

_BITS_OF_A_BATCH = pytest.mark.cpu_only("on a GPU sums round as those of the rows and cells beside them do")
OTHERS = {"max_tokens": 40, "logit_bias": ((0, -1000.0),)}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (NO_MEMORY, ResourceExhausted),
        ("[malloc] Unable to allocate 4294967296 bytes.", ResourceExhausted),
        ("cudaGraphInstantiate(&graph_exec, graph_, NULL, NULL, 0) failed: out of memory", ResourceExhausted),
        ("[METAL] Command buffer execution failed: Insufficient Memory (00000008:k)", ResourceExhausted),
        (LOST, DeviceLost),
        ("cudaPeekAtLastError() failed: unspecified launch failure", DeviceLost),
        ("cudaEventSynchronize(*this) failed: misaligned address", DeviceLost),
        ("cudaStreamSynchronize(stream_) failed: uncorrectable ECC error encountered", DeviceLost),
        ("cudaFreeAsync(p, s) failed: Invalid access of peer GPU memory over nvlink or a hardware error", DeviceLost),
        ("cudaGraphLaunch(graph, stream_) failed: the MPS client has been terminated by the server", DeviceLost),
        ("cudaEventQuery(event_) failed: tensor memory not completely freed", DeviceLost),
        ("cudaEventQuery(event_) failed: an async error has occured in external entity outside of CUDA", DeviceLost),
        ("cudaStreamSynchronize(stream_) failed: unknown error", DeviceLost),
        ("[matmul] Last dimension of first input must match", None),
    ],
)
def test_an_error_of_mlx_shows_what_the_device_lacks_also_behind_another_error(words: str, kind: type | None) -> None:
    def refused() -> None:
        try:
            raise RuntimeError(words)
        except RuntimeError as error:
            raise ResourceExhausted("KV memory: no room for more pages") from error

    found = device_error(RuntimeError(words))
    assert type(found) is (kind or type(None))
    with pytest.raises(ResourceExhausted) as caught:
        refused()
    assert type(device_error(caught.value)) is type(found)
    assert device_error(ValueError(words)) is None


class _Pass:
    """Something that the frames of a pass hold, as they hold arrays."""


class _Seen:
    """Whether the pass that failed was alive, each time that MLX was waited for since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[bool] = []
        self._pass: Callable[[], object | None] | None = None
        wait = mx.synchronize

        def synchronize(*given: Any) -> None:
            if self._pass is not None:
                self.alive.append(self.is_alive)
            wait(*given)

        monkeypatch.setattr(mx, "synchronize", synchronize)

    @property
    def is_alive(self) -> bool:
        return self._pass is not None and self._pass() is not None

    def fail(self, words: str) -> None:
        held = _Pass()
        self._pass = weakref.ref(held)
        raise RuntimeError(words)


def _breaks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, seen: _Seen, words: str, where: str, times: int = 1
) -> None:
    """The next prompt's cell, or the next step, fails so many times."""
    worker, left = driver.engine._worker, [1] * times

    def broken(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **more: Any) -> Any:
            if left:
                left.pop()
                seen.fail(words)
            return work(*given, **more)

        return done

    target: Any = worker._runner if where == "cell" else worker._decoder.batch
    for name in ("prefill", "last_logits", "packed_logits") if where == "cell" else ("step",):
        monkeypatch.setattr(target, name, broken(getattr(target, name)))


@pytest.mark.parametrize("where", ["cell", "step"])
@pytest.mark.parametrize(("words", "kind"), [(NO_MEMORY, ResourceExhausted), ("another fault", Internal)])
def test_a_failed_pass_is_over_before_its_arrays_go_and_memories_stay(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, words: str, kind: type[KvasirError]
) -> None:
    seen = _Seen(monkeypatch)
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        key, state = driver.remember(300)
        stayed, prompt = driver.fork(key), (*state.token_ids, *tokens_of(400, 7))
        expected = driver.turn(prompt, Hot(300), stayed).state
        _breaks(driver, monkeypatch, seen, words, where, times=1 + (words == NO_MEMORY and where == "cell"))
        with pytest.raises(kind):
            driver.turn(prompt, Hot(300), key)
        assert seen.alive[0], "MLX is waited for while the pass' arrays are there"
        memory = driver.engine.memories.get(key)
        assert memory is not None
        assert memory.state == state
        assert driver.turn(prompt, Hot(300), key).state == expected
        assert not driver.engine.failed.done()


@_BITS_OF_A_BATCH
def test_a_prompt_without_room_ends_alone_and_others_speak_as_without_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(monkeypatch)
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        alone = [driver.reply(driver.turn(tokens_of(60, seed), **OTHERS)) for seed in range(2)]
        failing = Listener()

        def begin() -> None:
            _breaks(driver, monkeypatch, seen, NO_MEMORY, "cell", times=2)
            driver.submit(tokens_of(400, 9), listener=failing)

        first = driver.submit(tokens_of(60, 0), listener=Listener().at(Tokens, 3, begin), **OTHERS)
        second = driver.submit(tokens_of(60, 1), **OTHERS)
        with pytest.raises(ResourceExhausted, match="out of memory"):
            failing.end()
        assert [driver.reply(each.end()) for each in (first, second)] == alone


@pytest.mark.parametrize("is_behind_stream", [False, pytest.param(True, marks=_BITS_OF_A_BATCH)])
def test_a_cell_that_had_no_room_is_computed_once_more_and_the_reply_is_the_same(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_behind_stream: bool
) -> None:
    seen = _Seen(monkeypatch)
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        prompt, settings = tokens_of(400, 9), {"temperature": 0.9, "seed": 5}
        expected = driver.turn(prompt, key=driver.key(), **settings)
        beside = driver.submit(tokens_of(30, 2), **OTHERS) if is_behind_stream else None
        if beside is not None:
            beside.wait_for(Tokens, 2)
        _breaks(driver, monkeypatch, seen, NO_MEMORY, "cell")
        again = driver.turn(prompt, key=driver.key(), **settings)
        assert (again.state, driver.reply(again)) == (expected.state, driver.reply(expected))
        assert seen.alive[:2] == [True, False], "the arrays of the first try went before the second"
        if beside is not None:
            beside.end()


@pytest.mark.cpu_only("a GPU computes such a prompt as one cell, which draws")
def test_a_cell_whose_rows_are_stored_already_is_not_computed_once_more(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(monkeypatch)
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        prompt = tokens_of(400, 9)
        expected, runner = driver.turn(prompt, key=driver.key()).state, driver.engine._worker._runner
        work, left = runner.prefill, [1]

        def late(*given: Any, **more: Any) -> None:
            work(*given, **more)
            if left:
                left.pop()
                seen.fail(NO_MEMORY)

        monkeypatch.setattr(runner, "prefill", late)
        with pytest.raises(ResourceExhausted):
            driver.turn(prompt, key=driver.key())
        assert driver.turn(prompt, key=driver.key()).state == expected


def test_turns_that_end_with_one_that_cannot_leave_hear_of_the_fault_and_not_of_its_end(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        worker, long = driver.engine._worker, OTHERS | {"max_tokens": 400}
        beside = driver.submit(tokens_of(600, 1), namespace="beside", **long)
        leaving = driver.submit(tokens_of(20), namespace="leaving", **long)
        for turn in (beside, leaving):
            turn.wait_for(Tokens, 3)

        def refused(_kv: object) -> None:
            monkeypatch.undo()
            raise RuntimeError("another fault")

        monkeypatch.setattr(worker._decoder.batch, "leave", refused)
        leaving.handle.result(30).cancel()
        with pytest.raises(Cancelled):
            leaving.end()
        with pytest.raises(Internal):
            beside.end()
        assert driver.turn(tokens_of(600, 1), namespace="beside").cached_tokens == 0, "no row of a lost turn stays"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_device_ends_every_turn_and_nothing_of_it_is_freed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    driver, seen = Driver(engine), _Seen(monkeypatch)
    closed: list[str] = []
    for part in (engine._worker._runner, engine._worker._pool):
        monkeypatch.setattr(part, "close", lambda: closed.append("closed"))

    def lose() -> None:
        _breaks(driver, monkeypatch, seen, LOST, "step")

    turns = [driver.submit(tokens_of(20, seed), **OTHERS) for seed in range(2)]
    turns.append(driver.submit(tokens_of(20, 5), listener=Listener().at(Tokens, 3, lose), **OTHERS))
    for turn in turns:
        with pytest.raises(Unavailable, match=r"lost its device, and restarts: .*illegal memory access"):
            turn.end()
    assert isinstance(engine.failed.exception(30), DeviceLost)
    with pytest.raises(Unavailable):
        driver.turn(tokens_of(20), key=AgentKey("tests", "late"))
    engine.close()
    assert (closed, seen.alive) == ([], []), "each call of the device would fail"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_when_idle", [False, True])
def test_a_device_that_is_lost_beside_turns_ends_them_and_the_engine(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_when_idle: bool
) -> None:
    """As where a memory is copied for its publication, after the last turn or beside one."""
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    driver = Driver(engine)

    def lost(*_given: Any) -> Any:
        raise RuntimeError(LOST)

    turn = driver.submit(tokens_of(20), **(OTHERS | {"max_tokens": 400}))
    turn.wait_for(Tokens, 3)
    monkeypatch.setattr(mx, "synchronize", lost)
    asked = engine.memories._when_idle(driver.key(), lost) if is_when_idle else engine._thread.post(lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        asked.result(30)
    with pytest.raises(Unavailable, match="lost its device"):
        turn.end()
    assert "illegal memory access" in str(engine.failed.exception(30))
    engine.close()


@pytest.mark.parametrize("is_when_idle", [False, True])
def test_work_between_steps_that_fails_is_over_before_its_arrays_go_and_free_buffers_go_with_them(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_when_idle: bool
) -> None:
    """As a graph of a long step, which a start makes beside turns, or a copy of a memory."""
    seen, given_back = _Seen(monkeypatch), list[bool]()
    monkeypatch.setattr(device_watch, "bound_to_free", lambda: given_back.append(seen.is_alive))
    with driver_with_room_for(4096, model_dir, tmp_path) as driver:
        engine = driver.engine

        def fail(*_given: Any) -> None:
            seen.fail(NO_MEMORY)

        monkeypatch.setattr(engine._worker, "keep_graph", fail)
        asked = engine.memories._when_idle(driver.key(), fail) if is_when_idle else engine.keep_graph(48, 0)
        with pytest.raises(RuntimeError, match="out of memory"):
            asked.result(30)
        assert (seen.alive[:1], given_back) == ([True], [False])
        driver.turn(tokens_of(20))


@pytest.mark.cpu_only("it plays a card, and other engines of a GPU's tests take memory meanwhile")
def test_mlx_counts_on_what_a_card_has_free_and_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.set_memory_limit(1 << 40)
    try:
        monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a processor"})
        device_memory.bound_to_free()
        assert mx.set_memory_limit(1 << 40) == 1 << 40
        assert (device_memory.free_bytes(), device_memory.held_by_others()) == (None, 0)
        facts = {"uuid": "GPU-1", "total_memory": 100 << 30, "free_memory": 8 << 30}
        monkeypatch.setattr(mx, "device_info", lambda: facts)
        monkeypatch.setattr(mx, "get_active_memory", lambda: 3 << 30)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: 1 << 30)
        own = 4 << 30
        device_memory.bound_to_free()
        assert mx.set_memory_limit(1 << 40) == own + (6 << 30)
        assert device_memory.held_by_others() == (92 << 30) - own
        facts["free_memory"] = 99 << 30
        device_memory.bound_to_free()
        assert mx.set_memory_limit(1 << 40) == own + (94 << 30)
    finally:
        mx.set_memory_limit(before)


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (NO_MEMORY, ResourceExhausted, r"no room to compute \(total \d+\.\d\d GiB, own .* out of memory"),
        (LOST, DeviceLost, "illegal memory access"),
    ],
)
def test_an_engine_whose_device_fails_as_it_opens_is_refused_in_words(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: type[KvasirError], told: str
) -> None:
    seen = _Seen(monkeypatch)
    monkeypatch.setattr("inference_svc.engine.engine.EngineWorker", lambda *_given: seen.fail(words))
    with pytest.raises(kind, match=told):
        Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    assert len(seen.alive) == (words == NO_MEMORY), "each call of a lost device fails"


def test_a_refusal_is_no_reason_to_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, watch, refusal = list[int](), DeviceWatch(), InvalidArgument("prompt: no")
    monkeypatch.setattr(mx, "synchronize", lambda: waited.append(1))
    watch.pass_failed(refusal)
    watch.end_step()
    assert (watch.in_words(refusal), waited) == (refusal, [])

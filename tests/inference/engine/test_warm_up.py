"""Before it is ready an engine runs turns of its own, which leave nothing."""

import asyncio
import gc
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from kvasir.errors import ResourceExhausted
from mlx_lm.utils import load_tokenizer
from transformers.utils import chat_template_utils

from inference_svc import warming
from inference_svc.engine import engine_worker
from inference_svc.engine.api import Ended, Event, Listener, TurnPlan
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.kv.batch.short_pass import KEPT_TOKENS
from inference_svc.model import kvasir_tiny
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.prompting import Prompting
from inference_svc.start_phases import StartPhases
from inference_svc.text.token_text import TokenText
from inference_svc.warming import warm_up, warm_up_text, warm_up_while_idle
from tests.inference.engine.driving import Driver
from tests.inference.engine.families import ALL, BUDGET, write_family

_OF_A_CPU = pytest.mark.cpu_only("how long a pass takes decides there whether a turn is run")
_DRAWN = {"temperature": 1.0, "seed": 7}


@pytest.mark.long(3)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=_OF_A_CPU), "any other"])
@pytest.mark.parametrize("name", ["llama3.1", "gemma3", "falcon_h1"])
def test_a_warm_engine_has_computed_and_holds_nothing(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = ModelRunner.forward

    def counted(runner: ModelRunner, tokens, caches):  # type: ignore[no-untyped-def]
        passes.append(tokens.size)
        return forward(runner, tokens, caches)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    engine = Engine.open(write_family(tmp_path, ALL[name]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        before = Driver(engine).turn((5, 6, 7), **_DRAWN).state.token_ids
        counted_tokens = engine.computed_tokens
        engine.device = device  # how much is worth its time is the device's matter, that nothing is left is everyone's
        passes.clear()
        warm_up(engine, lambda: 0.0)
        assert len(passes) >= 2, "a prompt and a decoded token"
        assert engine.computed_tokens == counted_tokens > 0
        assert engine.memories.sizes() == {}
        assert engine.memory_used_bytes == 0
        assert engine.preemptions == 0
        assert Driver(engine).turn((5, 6, 7), **_DRAWN).state.token_ids == before, "a seed draws what it drew"
    finally:
        engine.close()


def test_room_for_files_is_made_with_the_engine_on_its_thread(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(engine_worker, "make_room", lambda: threads.append(threading.current_thread()))
    Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=BUDGET).close()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("device", ["cuda", "any other"])
def test_a_memory_is_copied_for_the_store_and_comes_back(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    namespaces: set[str | None] = set()
    submit = Engine.submit

    def seen(engine: Engine, plan: TurnPlan, on_events: Listener) -> TurnHandle:
        namespaces.add(plan.namespace)

        def listen(events: list[Event]) -> None:
            if any(isinstance(event, Ended) for event in events):
                ended.append(type(plan.reuse).__name__)
            on_events(events)

        return submit(engine, plan, listen)

    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    costs = engine._worker.costs
    try:
        engine.device = device
        monkeypatch.setattr(Engine, "submit", seen)
        warm_up(engine, lambda: 0.0)
        assert costs.knows_tokens == (device != "cuda"), "passes that make graphs cost more than later ones"
        assert (costs.step_s is None) == (device == "cuda")
    finally:
        engine.close()
    assert {"Cold": ended.count("Cold"), "Hot": 1, "Restored": 1} == Counter(ended), "none of them failed"
    assert namespaces == {None}, "company of the first callers"


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_a_device_keeps_graphs_for_each_width_of_the_context(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step and of a question before it is ready, the deepest soon after it, of all short passes while nobody has a
    turn, each once; of crowds only on CUDA: a Mac would take seconds for their passes.
    """
    kept: list[tuple[int, int, int]] = []
    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    monkeypatch.setattr(EngineWorker, "keep_graph", lambda _, *given: kept.append(given))
    try:
        engine.model = replace(engine.model, context_tokens=32_768)
        prompts = list[int]()
        monkeypatch.setattr(warming, "_run_all", lambda _, turns: prompts.extend(each[0] for each in turns) or [])
        engine.device = device
        warm_up(engine, lambda: 0.0)
        assert 32_767 not in prompts
        prompts.clear()
        assert {*kept} == {(tokens, depth, 1) for tokens in (0, 48) for depth in (0, 2049, 4097, 8193)}
        kept.clear()
        asyncio.run(warm_up_while_idle(engine, lambda: True, lambda: 0.0))
        soon = {(0, depth, rows) for depth in (0, 2049) for rows in (2, 4, 8)}
        soon |= {(64, 0, rows) for rows in (4, 6, 8, 12, 16, 20, 24)} | {(256, 0, 1)}
        soon = soon if device == "cuda" else set()
        assert {*kept[: len(soon)]} == soon, "of a crowd that comes at once"
        steps = [(0, depth, rows) for depth in (2049, 0) for rows in (2, 4, 8)]
        first = [*steps, (64, 0, 20), (64, 0, 16), (256, 0, 1), (64, 0, 8)]
        assert kept[:10] == first or device != "cuda", "a lone turn waits for one at most, and a step's is quick"
        soon |= {(tokens, 16_385, 1) for tokens in (0, 48)}
        assert {*kept[: len(soon)]} == soon
        depths = (0, 2049, 4097, 8193, 16_385)
        crowds = {(0, depth, rows) for depth in depths for rows in (2, 4, 8, 16, 32, 64)}
        crowds |= {(64, depth, rows) for depth in (0, 2049) for rows in (2, 4, 6, 8, 12, 16, 20, 24, 28, 32)}
        crowds = crowds if device == "cuda" else set()
        assert {*kept} == {(tokens, depth, 1) for tokens in KEPT_TOKENS for depth in depths} | crowds | soon
        assert len(kept) == len({*kept})
        assert (32_767 in prompts) == (device == "cuda"), "whose attention plans each depth"
        assert (prompts[0] == warming._cell(engine)) == (device == "cuda"), "it teaches costs, before short turns"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("device", "kernels_s", "has_crowd"),
    [("cuda", 30, True), ("cuda", 3, True), ("cuda", 2, False), ("metal", 30, False)],
)
def test_a_start_that_compiles_makes_what_a_first_crowd_needs_too(
    device: str, kernels_s: int, has_crowd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd that came at once waited for its kernels on a machine that had none: for 37 s with 4-bit weights."""
    kept: list[tuple[int, int, int]] = []
    run: list[int] = []
    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    monkeypatch.setattr(EngineWorker, "keep_graph", lambda _, *given: kept.append(given))
    monkeypatch.setattr(warming, "_run_all", lambda _, turns: run.append(len(turns)) or [])
    times = iter([0.0, float(kernels_s)])
    try:
        engine.device = device
        warm_up(engine, lambda: next(times))
    finally:
        engine.close()
    assert ((64, 0, 32) in kept) == has_crowd
    assert ((0, 0, 64) in kept) == has_crowd
    assert (8 in run) == has_crowd


def test_a_graph_that_finds_no_page_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memories of callers may have every page, also before the engine is ready."""

    def fails(*_: object) -> None:
        raise ResourceExhausted("no page is free", reason="MEMORY_BUSY")

    monkeypatch.setattr(EngineWorker, "keep_graph", fails)
    monkeypatch.setattr(warming, "_run_all", lambda *_: [])
    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        engine.device = "any other"
        warm_up(engine, lambda: 0.0)
        asyncio.run(warm_up_while_idle(engine, lambda: True, lambda: 0.0))
        gc.collect()
    finally:
        engine.close()
    assert "never retrieved" not in caplog.text


def test_the_warm_up_waits_until_callers_are_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "RETRY_S", 0.1)
    monkeypatch.setattr(warming, "LOOK_S", 0.001)
    looks = iter([True] * 60 + [False] + [True] * 99 + [False] + [True] * 1000)
    asyncio.run(warming._until_quiet(lambda: next(looks)))
    assert len([*looks]) == 1000 - 100


@pytest.mark.cells_of_a_block
@pytest.mark.long(2)
@pytest.mark.parametrize("comes", [False, True], ids=["nobody comes", "a caller comes"])
def test_an_idle_gpu_takes_every_shape_of_a_first_crowd_and_gives_way(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of rows, and each length of a pass that keeps its graph. Whoever comes waits for none of it."""
    monkeypatch.setattr(warming, "RETRY_S", 0.01)
    rows, lengths, forward = set[int](), set[int](), ModelRunner.forward
    left: list[int] = []  # turns of the engine's own that go on, when a caller comes and a moment later

    def counted(runner: ModelRunner, tokens, caches):  # type: ignore[no-untyped-def]
        rows.add(tokens.shape[0])
        lengths.add(tokens.shape[1])
        return forward(runner, tokens, caches)

    def is_idle() -> bool:
        own = sum(not turn.is_cancelled for turn in engine._worker._turns)
        if not comes or len(left) == 2 or (not left and own < 4):
            return True
        left.append(own)
        return False

    monkeypatch.setattr(ModelRunner, "forward", counted)
    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        is_rounded = warming._rounds_rows(engine)  # by the device that computes, not by its name below
        engine.device = "any other"
        asyncio.run(warm_up_while_idle(engine, is_idle, lambda: 0.0))
        engine._thread.post(lambda _: None).result(60)
        assert engine.memory_used_bytes == 0
        assert engine.memories.sizes() == {}
        assert engine.computed_tokens == 0, "also of a cell that was under way when the caller came"
    finally:
        engine.close()
    assert rows >= ({1, 2, 4, 8} if is_rounded else {1, 2, 3, 4, 5, 6, 7, 8})
    assert lengths >= {*KEPT_TOKENS}
    assert len(left) == 2 * comes
    assert not any(left[1:])


def test_an_idle_gpu_drops_no_memory_of_a_caller_for_its_own_turns(tmp_path: Path) -> None:
    """Of twelve pages five are taken; a crowd would need sixteen."""
    directory = write_family(tmp_path, ALL["llama3.1"])
    engine = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=12 * 55_296)
    try:
        driver = Driver(engine)
        keys = {driver.remember(tokens)[0] for tokens in (600, 300)}
        before = engine.computed_tokens
        engine.device = "any other"
        asyncio.run(warm_up_while_idle(engine, lambda: True, lambda: 0.0))
        assert {*engine.memories.sizes()} == keys
        assert engine.computed_tokens == before
    finally:
        engine.close()


def test_an_idle_gpu_gives_up_what_callers_always_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of its own holds one of them up."""
    monkeypatch.setattr(warming, "RETRY_S", 0.0)
    looks: list[bool] = []

    def is_idle() -> bool:
        looks.append(len(looks) % 2 == 0)
        return looks[-1] if len(looks) < 1000 else pytest.fail("it never gives up")

    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        engine.device = "any other"
        asyncio.run(warm_up_while_idle(engine, is_idle, lambda: 0.0))
    finally:
        engine.close()
    assert True in looks


@_OF_A_CPU
def test_a_cpu_runs_no_turn_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.open(write_family(tmp_path, ALL["llama3.1"]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        engine.model = replace(engine.model, weights_bytes=1 << 30)
        monkeypatch.setattr(Engine, "submit", lambda *_: pytest.fail("seconds of every start"))
        warm_up(engine, lambda: 0.0)
    finally:
        engine.close()


@pytest.mark.parametrize("device", ["cpu", "any other"])
def test_an_engine_without_room_for_the_turn_serves_all_the_same(device: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, ALL["llama3.1"])
    engine = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=1, context_tokens=2)
    try:
        engine.device = device
        warm_up(engine, lambda: 0.0)
        assert engine.computed_tokens == 0
    finally:
        engine.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_template_is_compiled_and_one_that_refuses_is_reported_to_callers(refuses: bool) -> None:
    tokenizer = load_tokenizer(kvasir_tiny.path())
    if refuses:
        tokenizer.chat_template = "{{ raise_exception('no') }}"
    prompting = Prompting(tokenizer, TokenText.of_tokenizer("{}", tokenizer.decode))
    compiled = chat_template_utils._compile_jinja_template
    compiled.cache_clear()
    try:
        asyncio.run(warm_up_text(prompting))
        assert compiled.cache_info().currsize == 1
    finally:
        prompting.close()


def test_phases_follow_each_other_and_end_with_the_start(tmp_path: Path) -> None:
    now = 10.0
    phases = StartPhases("import", 7.0, lambda: now)
    phases.begin("weights")
    now = 12.0
    phases.begin("probing")
    now = 12.5
    phases.begin("weights")
    now = 13.0
    phases.end()
    now = 99.0
    phases.begin("a model that is loaded later")
    assert phases.seconds == {"import": 3.0, "weights": 2.5, "probing": 0.5}
    assert phases.in_words == "import 3.0 s, weights 2.5 s, probing 0.5 s"
    phases.write(tmp_path / "new")
    assert (tmp_path / "new" / "start.json").read_text() == '{"import": 3.0, "weights": 2.5, "probing": 0.5}'
    (tmp_path / "file").touch()
    phases.write(tmp_path / "file")  # which costs the report and nothing else

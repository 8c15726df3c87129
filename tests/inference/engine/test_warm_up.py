"""Before it is ready an engine runs turns of its own, which leave nothing."""

from pathlib import Path

import pytest

from inference_svc.engine.engine import Engine
from inference_svc.model.model_runner import ModelRunner
from inference_svc.start_phases import StartPhases
from inference_svc.warming import warm_up
from tests.inference.engine.families import ALL, BUDGET, write_family


@pytest.mark.parametrize("name", ["llama3.1", "gemma3", "falcon_h1"])
def test_a_warm_engine_has_computed_and_holds_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = ModelRunner.forward

    def counted(runner: ModelRunner, tokens, caches):  # type: ignore[no-untyped-def]
        passes.append(tokens.size)
        return forward(runner, tokens, caches)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    engine = Engine.open(write_family(tmp_path, ALL[name]), cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    try:
        passes.clear()
        warm_up(engine)
        assert len(passes) >= 2, "a prompt and a decoded token"
        assert engine.computed_tokens == 0
        assert engine.hot_keys() == set()
        assert engine.memory_used_bytes == 0
    finally:
        engine.close()


def test_an_engine_without_room_for_the_turn_serves_all_the_same(tmp_path: Path) -> None:
    directory = write_family(tmp_path, ALL["llama3.1"])
    engine = Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=1, context_tokens=2)
    try:
        warm_up(engine)
        assert engine.computed_tokens == 0
    finally:
        engine.close()


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

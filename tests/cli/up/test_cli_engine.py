"""`kvasir stats` and `kvasir models …` against a real engine: tables, JSON, exit codes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvasir.cli.failures import NOT_FOUND

from inference_svc.model import kvasir_tiny
from tests.cli.running import Cli, Ended
from tests.running.system_fixtures import House

ENGINE_KEYS = {
    "kv_memory_bytes",
    "kv_memory_used_bytes",
    "hot_memories",
    "restoring_bytes",
    "publishing_bytes",
    "prompt_bytes",
    "computed_tokens",
    "preemptions",
    "model_loads",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    at = house.engine.options.index("--model")
    tiny = str(kvasir_tiny.path())
    house.engine.options[at : at + 2] = ["--model", f"day={tiny}", "--model", f"night={tiny}"]
    try:
        house.start()
        yield house
    finally:
        house.close()


@pytest.fixture
def kvasir(house: House, tmp_path: Path) -> Callable[..., Ended]:
    cli = Cli(tmp_path)

    def run(*arguments: str, code: int = 0) -> Ended:
        ended = cli("--engine", house.engine.address, *arguments)
        assert ended.code == code, ended.err or ended.out
        return ended

    return run


def test_statistics_are_a_table_for_people_and_json_for_scripts(house: House, kvasir: Callable[..., Ended]) -> None:
    with house.client() as client:
        client.reply(agent_id="ada", prompt="Hello there.", max_tokens=2)
    row = kvasir("stats", "--json").value
    assert set(row) == {"model", "uptime_s", "namespaces", "engine"}
    assert set(row["engine"]) == ENGINE_KEYS
    [namespace] = row["namespaces"]
    assert (namespace["namespace"], namespace["turns"], namespace["misses"]) == ("default", 1, {"new_agent": 1})
    table = kvasir("stats").out
    assert "misses: new agent" in table
    assert "model: day" in table


@pytest.mark.long(3)
def test_models_are_listed_loaded_and_unloaded(kvasir: Callable[..., Ended]) -> None:
    rows = kvasir("models", "ls", "--json").value
    assert [(row["name"], row["is_loaded"]) for row in rows] == [("day", True), ("night", False)]
    assert "loaded" in kvasir("models", "ls").out
    assert kvasir("models", "load", "night", "--json").value["loaded"] == "night"
    assert kvasir("models", "unload", "--json").value["dropped"] == 0
    assert "none is loaded" in kvasir("stats").out
    refused = kvasir("models", "load", "dusk", code=NOT_FOUND)
    assert "'day', 'night'" in refused.err
    kvasir("models", "load", "day")

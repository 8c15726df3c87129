"""A device that has no room ends a turn, one that is lost ends the engine; agents go on token for token."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from kvasir.clients import InferenceClient
from kvasir.errors import KvasirError, ResourceExhausted, Unavailable

from tests.inference.service.failing_device import CARD, LOST, NO_MEMORY, WORDS
from tests.inference.service.memories.test_memory_survives import TALK, say, talk, tokens
from tests.running.system_fixtures import House
from tests.running.waiting import eventually


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the device fail."""
    monkeypatch.setenv(WORDS, str(tmp_path / "words"))
    return tmp_path / "words"


@pytest.fixture
def failing_house(model: Path, tmp_path: Path, words: Path) -> Iterator[House]:
    assert words
    house = House(tmp_path / "house", model)
    house.engine.program = "failing_device"
    try:
        house.start()
        yield house
    finally:
        house.close()


def write(words: Path, text: str) -> None:
    words.with_suffix(".new").write_text(text)
    words.with_suffix(".new").rename(words)


class Stream(Thread):
    """A long turn of another agent, which runs until it is over or refused."""

    def __init__(self, client: InferenceClient, agent: str) -> None:
        super().__init__()
        self.client, self.agent = client, agent
        self.token_ids: list[int] = []
        self.error: KvasirError | None = None
        self.start()
        eventually(lambda: len(self.token_ids) > 2)

    def run(self) -> None:
        sampling = {"max_tokens": 400, "logit_bias": {0: -100.0}}
        try:
            for event in self.client.generate(agent_id=self.agent, prompt="one two three", sampling=sampling):
                self.token_ids += event.delta.token_ids
        except KvasirError as error:
            self.error = error


def test_a_lost_device_ends_the_engine_and_agents_go_on_from_the_store_token_for_token(
    failing_house: House, words: Path
) -> None:
    house = failing_house
    with house.client() as client:
        expected = tokens(talk(client, "never left", TALK))
        replies = talk(client, "restarted", TALK[:2])
        stream = Stream(client, "beside it")
        write(words, LOST)
        with pytest.raises(Unavailable):
            say(client, "restarted", TALK[2])
        stream.join(30)
        assert isinstance(stream.error, Unavailable)
        assert "lost its device, and restarts: " + LOST in stream.error.message
        assert stream.error.retry_after_s
    eventually(lambda: not house.engine.is_running)
    assert house.engine.stop() == 70, "no signal: MLX freed nothing of a device that is gone"
    assert "device.lost" in house.engine.log
    assert "engine.failed" in house.engine.log
    words.unlink()
    house.engine.start()
    with house.client() as client:
        replies += [say(client, "restarted", text) for text in TALK[2:]]
    assert tokens(replies) == expected


def test_a_device_that_an_embedding_finds_lost_ends_the_engine_too(model: Path, tmp_path: Path, words: Path) -> None:
    house = House(tmp_path / "house", model, engine_options=["--embeddings", f"words={model}"])
    house.engine.program = "failing_device"
    try:
        house.start()
        with house.client() as client:
            client.embed(["one"], model="words")
            write(words, LOST)
            with pytest.raises(Unavailable, match="lost its device"):
                client.embed(["two"], model="words")
        eventually(lambda: not house.engine.is_running)
        assert house.engine.stop() == 70
    finally:
        house.close()


def test_a_device_that_is_lost_while_another_model_is_loaded_ends_the_engine_too(
    model: Path, tmp_path: Path, words: Path
) -> None:
    house = House(tmp_path / "house", model, engine_options=["--model", f"other={model}"])
    house.engine.program = "failing_device"
    try:
        house.start()
        with house.client() as client:
            client.unload_model()
            write(words, LOST)
            with pytest.raises(Unavailable, match="lost its device"):
                client.load_model("other")
        eventually(lambda: not house.engine.is_running)
        assert house.engine.stop() == 70
    finally:
        house.close()


def test_a_turn_without_working_memory_is_refused_and_neither_engine_nor_agents_lose_anything(
    failing_house: House, words: Path
) -> None:
    house = failing_house
    with house.client() as client:
        expected = tokens(talk(client, "never left", TALK))
        replies = talk(client, "refused", TALK[:2])
        for text in TALK[2:]:
            write(words, NO_MEMORY)
            with pytest.raises(ResourceExhausted, match=r"no room to compute .*out of memory.*--memory-gib") as refused:
                say(client, "refused", text)
            assert (refused.value.reason, bool(refused.value.retry_after_s)) == ("MEMORY_BUSY", True)
            assert int(refused.value.metadata["total_bytes"]) > 0
            words.unlink()
            replies.append(say(client, "refused", text))
            assert replies[-1].started.cached_tokens > 100, "what it remembered is hot"
        assert tokens(replies) == expected
    assert house.engine.is_running
    assert house.engine.log.count("device.short") == 2 * 2, "each was tried twice"


def test_an_engine_on_a_card_that_others_fill_is_refused_before_it_loads_and_a_size_that_fits_is_named(
    model: Path, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words
    monkeypatch.setenv(CARD, f"{64 << 30} {4 << 30}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where no other engine claims memory
    house = House(tmp_path / "house", model, engine_options=["--memory-gib", "3.5"])
    house.engine.program = "failing_device"
    try:
        house.store.start()
        with pytest.raises(AssertionError, match=r"ended with 78"):
            house.engine.start()
        told = house.engine.log
        assert (
            "--memory-gib 3.5: the device has 64.00 GiB, of which others hold 60.00 (`nvidia-smi` shows them)" in told
        )
        assert "; --memory-gib 2.9 fits" in told
        assert "weights.loaded" not in told
        house.engine.options[-1] = "2.9"
        house.engine.start()
    finally:
        house.close()

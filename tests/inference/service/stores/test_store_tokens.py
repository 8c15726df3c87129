"""The engine's own tokens at its store: nothing goes through before the store has said whose namespace each is."""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.credentials import (
    CLIENT,
    ENGINE,
    Principal,
    engine_of,
    replace_private_text,
    write_credentials,
)
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.programs import run
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 4}
MESSAGE = [{"role": "user", "content": "Hello."}]
SPACES = ("default", "blue", "late")


class Guarded:
    """A house whose engine has tokens of two namespaces, and gets others."""

    def __init__(self, root: Path, model: Path) -> None:
        self.house = House(root, model)
        people = [Principal(f"{space}-client", space, frozenset({CLIENT})) for space in SPACES]
        people += [Principal(engine_of(space), space, frozenset({ENGINE})) for space in SPACES]
        credentials = root / "credentials.toml"
        self.tokens: Mapping[str, str] = write_credentials(credentials, people, lambda: secrets.token_urlsafe(32))
        self.directory = root / "tokens"
        self.directory.mkdir(mode=0o700)
        for service in (self.house.store, self.house.engine):
            service.options += ["--credentials-file", str(credentials)]
        self.house.engine.options += ["--store-token-dir", str(self.directory)]
        self.house.engine.options += ["--store-token-file", str(self.directory / "engine.token")]
        self.give("default")
        self.give("blue")

    def give(self, space: str, token: str | None = None) -> Path:
        """Write the engine's token for a namespace: its own, or another."""
        file = self.directory / f"{engine_of(space)}.token"
        replace_private_text(file, self.tokens[engine_of(space)] if token is None else token)
        return file

    def reload(self) -> str:
        """What the engine says of it."""
        before = len(self.house.engine.log)
        os.kill(self.house.engine.pid, signal.SIGHUP)
        give_up = time.monotonic() + 60
        while "reload.done" not in (said := self.house.engine.log[before:]):
            assert time.monotonic() < give_up
            time.sleep(0.02)
        return said

    def check_nothing_of_another_namespace_is_blues(self) -> None:
        """What blue's caller reads and writes is not the default namespace's."""
        with self.house.client(self.tokens["blue-client"]) as blue:
            with pytest.raises(errors.Unavailable):
                blue.list_agents()
            with pytest.raises((errors.Unavailable, errors.FailedPrecondition)):
                blue.reply(agent_id="ada", append_messages=MESSAGE, expect_existing=True, sampling=GREEDY)
            made = blue.reply(agent_id="ada", messages=MESSAGE, sampling=GREEDY)
            assert made.started.source == pb.CACHE_SOURCE_COLD
            assert made.finished.snapshot.state in (pb.SNAPSHOT_STATE_FAILED, pb.SNAPSHOT_STATE_PENDING)
        with self.house.client(self.tokens["default-client"]) as client:
            [agent] = client.list_agents(name_prefix="ada").agents
            assert [line.version for line in agent.lines] == [1]

    def until_it_commits(self, space: str) -> None:
        with self.house.client(self.tokens[f"{space}-client"]) as client:
            give_up = time.monotonic() + 60
            turn = {"agent_id": f"{time.monotonic()}", "messages": MESSAGE, "sampling": GREEDY}
            while client.reply(**turn).finished.snapshot.state != pb.SNAPSHOT_STATE_COMMITTED:  # type: ignore[arg-type]
                assert time.monotonic() < give_up
                time.sleep(0.05)


@pytest.fixture
def guarded(model: Path, tmp_path: Path) -> Iterator[Guarded]:
    """With an agent of the default namespace, and none of blue."""
    guarded = Guarded(tmp_path, model)
    try:
        guarded.house.start()
        with guarded.house.client(guarded.tokens["default-client"]) as client:
            told = client.reply(agent_id="ada", messages=MESSAGE, sampling=GREEDY)
            assert told.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        yield guarded
    finally:
        guarded.house.close()


@pytest.mark.long(4)
def test_a_token_that_comes_while_the_store_hangs_is_used_when_the_store_knows_whose_it_is(guarded: Guarded) -> None:
    file = guarded.give("blue", guarded.tokens["engine"])
    guarded.house.store.freeze()
    guarded.reload()
    guarded.house.store.thaw()
    guarded.check_nothing_of_another_namespace_is_blues()
    guarded.check_nothing_of_another_namespace_is_blues()  # now the store has answered
    assert f"{file}: the store's token is bound to namespace 'default', expected 'blue'" in guarded.house.engine.log
    guarded.give("blue")
    assert "reload.refused" not in guarded.reload()
    guarded.until_it_commits("blue")


@pytest.mark.long(7)
def test_a_reload_takes_what_is_right_and_names_each_file_that_is_wrong(guarded: Guarded) -> None:
    wrong = [
        guarded.give("blue", guarded.tokens["engine"]),
        guarded.give("aaa", guarded.tokens["engine"]),
        guarded.give("void", ""),
        guarded.give("gone", "x" * 43),
        guarded.directory / "engine@.token",
    ]
    replace_private_text(wrong[-1], guarded.tokens["engine"])
    guarded.give("late")
    said = guarded.reload()
    [refused] = [line for line in said.splitlines() if "reload.refused" in line]
    assert all(str(file) in refused for file in wrong)
    assert "engine@late.token" not in refused
    assert "the old set stays" not in refused, "some of it does not"
    guarded.until_it_commits("late")
    guarded.until_it_commits("default")
    guarded.check_nothing_of_another_namespace_is_blues()


def test_an_engine_that_starts_before_its_store_uses_no_token_of_another_namespace(guarded: Guarded) -> None:
    guarded.house.kill()
    guarded.give("blue", guarded.tokens["engine"])
    guarded.house.engine.start()
    guarded.house.store.start()
    guarded.check_nothing_of_another_namespace_is_blues()


def test_a_token_that_the_store_does_not_know_is_reported_once_and_is_not_waited_for(guarded: Guarded) -> None:
    wrong = [guarded.give("gone", "x" * 43), guarded.give("void", ""), guarded.directory / "engine@.token"]
    replace_private_text(wrong[-1], guarded.tokens["engine"])
    guarded.house.engine.kill()
    before = len(guarded.house.engine.log)
    guarded.house.engine.options += ["--store-wait-s", "30"]
    began = time.monotonic()
    guarded.house.engine.start()
    assert time.monotonic() - began < 20
    guarded.until_it_commits("blue")
    said = [line for line in guarded.house.engine.log[before:].splitlines() if "not_used" in line]
    assert [sum(str(file) in line for line in said) for file in wrong] == [1, 1, 1]
    assert len(said) == 3


@pytest.mark.long(3)
def test_a_namespace_that_comes_while_a_model_is_loaded_has_its_store_under_that_model(guarded: Guarded) -> None:
    costs = guarded.house.root / "state" / "restore-costs.json"  # the last that a model's parts wait for
    with guarded.house.client() as owner, ThreadPoolExecutor() as pool:
        [model] = owner.list_models()
        owner.unload_model()
        costs.unlink(missing_ok=True)
        os.mkfifo(costs, 0o600)
        loading, writing = pool.submit(owner.load_model, model.name), None
        while writing is None and not loading.done():
            with contextlib.suppress(OSError):  # until it is read
                writing = os.open(costs, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.01)
        assert writing is not None
        guarded.give("late")
        guarded.reload()
        os.close(writing)
        loading.result(60)
    guarded.until_it_commits("late")


def test_tokens_of_no_store_are_refused() -> None:
    ended = run("inference_svc", "serve", "--listen", "unix:/tmp/kv-none/s", "--store-token-dir", "/tmp/kv-none")
    assert ended.returncode == 78
    assert "--store-token-dir" in ended.stderr
    assert "--store" in ended.stderr


@pytest.mark.parametrize("named", [[], ["--store-ca-file", "/nowhere/ca.pem"]])
def test_a_store_behind_a_port_wants_a_token(named: list[str]) -> None:
    """The engine started without a store, and nothing was ever stored."""
    ended = run("inference_svc", "serve", "--listen", "unix:/tmp/kv-none/s", "--store", "127.0.0.1:9", *named)
    assert ended.returncode == 78
    assert "--store-token-file" in ended.stderr
    assert "127.0.0.1:9" in ended.stderr

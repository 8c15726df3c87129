"""A sealed namespace as a real service: brought from a plain store, exported, and refused to who lacks the key."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition

from tests.cachestore.sealing.canaries import found_in, secrets_of
from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish, start_here, store_home
from tests.cli.running import in_process
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.programs import run


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningStore]:
    """Another Mac's store, which is plain."""
    with store_home(tmp_path / "there") as home:
        yield home.start()


def test_a_sealed_agent_is_whole_with_the_key_and_unreadable_on_the_disk(home: StoreHome, tmp_path: Path) -> None:
    key = ("--seal-key-file", str(tmp_path / "seal.key"))
    made = run("cachestore_svc", "keys", "new", "default", "--data-dir", str(home.data_dir), *key)
    assert made.returncode == 0
    turn = SyntheticAgent(SMALL, 1).turn(300)
    with home.start(*key).client() as client:
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)
    assert found_in(home.data_dir, secrets_of(turn)) == []


@pytest.mark.long(3)
def test_an_agent_moves_between_a_plain_and_a_sealed_store(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    key = ("--seal-key-file", str(tmp_path / "seal.key"))
    made = run("cachestore_svc", "keys", "new", "default", "--data-dir", str(home.data_dir), *key)
    assert made.returncode == 0
    ada = SyntheticAgent(SMALL, 1)
    first, second = ada.turn(600, is_prompt=True), ada.turn(300)
    with there.client() as theirs:
        publish(theirs, "ada", first, 0)
        here = start_here(home, tmp_path, there.address, *key)
        with here.client() as ours:
            ours.pull_agent("mac", "ada")
            publish(theirs, "ada", second, 1)
            ours.pull_agent("mac", "ada")
            assert_whole(ours, "ada", second)
            archive = b"".join(ours.export_agent("ada"))
            theirs.import_agent("back", [archive])
        assert_whole(theirs, "back", second)
        told = in_process("--address", here.address, "agents", "export", "ada", tmp_path / "ada.tar")
        assert "The namespace is sealed, and" in told.err
        assert "not sealed" in told.out
        quiet = in_process("--address", there.address, "agents", "export", "ada", tmp_path / "theirs.tar")
        assert quiet.err == ""
    hidden = [secret for each in (first, second) for secret in secrets_of(each)]
    assert found_in(home.data_dir, hidden) == []
    assert found_in(there.data_dir, hidden) != []
    assert here.stop() == 0
    again = home.start()
    with again.client() as ours:
        with pytest.raises(FailedPrecondition, match="no master key was given") as refused:
            ours.get_snapshot("ada")
        assert refused.value.reason == "NAMESPACE_SEALED"
    assert "namespace.shut" in again.log

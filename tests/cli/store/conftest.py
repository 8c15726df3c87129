"""A store that runs in a home of its own, and an agent in it, for the command line."""

import shutil
from collections.abc import Iterator

import pytest
from kvasir.cli.running.health import STORE_SERVICE
from kvasir.clients import StoreClient

from tests.cli.running import Cli, answers
from tests.made_models.synthetic import SyntheticAgent, SyntheticSnapshot
from tests.running import in_memory
from tests.running.waiting import eventually


@pytest.fixture(scope="module")
def cli() -> Iterator[Cli]:
    """A home with a store that runs; short, because a socket's path must fit into a hundred bytes."""
    home = in_memory.home()
    command = Cli(home)
    with command.running("store", "serve") as serve:
        eventually(lambda: answers(f"unix:{home}/run/store.sock", STORE_SERVICE) or serve.process.poll() is not None)
        assert serve.process.poll() is None, serve.err
        yield command
    shutil.rmtree(home)


@pytest.fixture
def client(cli: Cli) -> Iterator[StoreClient]:
    with StoreClient.connect(f"unix:{cli.home}/run/store.sock") as client:
        yield client


def publish(client: StoreClient, name: str, snapshot: SyntheticSnapshot, parent: int) -> None:
    client.put_blobs(snapshot.new_blobs)
    client.put_manifest(snapshot.manifest_bytes)
    client.commit(name, snapshot.manifest_digest, parent)


@pytest.fixture
def ada(cli: Cli, client: StoreClient) -> Iterator[SyntheticAgent]:
    """An agent with two versions, of 300 and 340 tokens."""
    agent = SyntheticAgent(seed=1)
    publish(client, "ada", agent.turn(300), 0)
    publish(client, "ada", agent.turn(40), 1)
    yield agent
    for row in client.list_agents().agents:
        client.delete_agent(row.agent_id, force=True)

"""A gateway has one channel to each service and hands on its callers' tokens: nothing of one caller reaches another."""

import asyncio
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir.clients import AioInferenceClient, AioStoreClient, InferenceClient, StoreClient
from kvasir.credentials import CLIENT, ENGINE, Principal, write_credentials
from kvasir.errors import KvasirError, NotFound, Unauthenticated
from kvasir.formats import manifest

from tests.running.system_fixtures import House

SPACES = ("north", "south")
AGENT = "same name"
TURNS = 4


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, dict[str, str]]]:
    """A store and an engine with callers of two namespaces; tokens by namespace."""
    root = tmp_path_factory.mktemp("gateway")
    house = House(root)
    people = [Principal(space, space, frozenset({CLIENT, ENGINE})) for space in SPACES]
    tokens = write_credentials(root / "credentials.toml", people, lambda: secrets.token_urlsafe(32))
    for service in (house.store, house.engine):
        service.options += ["--credentials-file", str(root / "credentials.toml")]
    for space in SPACES:
        path = root / f"{space}.token"
        path.write_text(tokens[space])
        path.chmod(0o600)
        house.engine.options += ["--store-token-file", f"{space}={path}"]
    try:
        house.start()
        yield house, tokens
    finally:
        house.close()


def messages_of(space: str, number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"In the {space} I said {number}."}]


def said_to(data: bytes) -> list[str]:
    """What the caller said, of a memory."""
    return [each.content for each in manifest.parse(data).messages if each.role == "user"]


def test_two_namespaces_over_one_channel_have_nothing_in_common(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    expected = {space: [messages_of(space, number)[0]["content"] for number in range(TURNS)] for space in SPACES}
    with house.client() as engine, house.store_client() as store:

        def live(space: str) -> list[str]:
            mine = engine.with_token(tokens[space])
            mine.reply(agent_id=AGENT, messages=messages_of(space, 0), max_tokens=4)
            for number in range(1, TURNS):
                mine.reply(agent_id=AGENT, append_messages=messages_of(space, number), max_tokens=4)
            _, data = store.with_token(tokens[space]).get_snapshot(AGENT)
            return said_to(data)

        with ThreadPoolExecutor() as pool:
            assert dict(zip(SPACES, pool.map(live, SPACES), strict=True)) == expected
        # The gateway's own calls are as before: those of the sockets' owner, in the default namespace.
        with pytest.raises(NotFound):
            store.get_agent(AGENT)
        assert not store.list_agents().agents

    async def read(space: str, store: AioStoreClient) -> list[str]:
        _, data = await store.with_token(tokens[space]).get_snapshot(AGENT)
        return said_to(data)

    async def read_all() -> list[list[str]]:
        async with AioStoreClient.connect(house.store.address) as store:
            return await asyncio.gather(*(read(space, store) for space in SPACES * 8))

    assert asyncio.run(read_all()) == [expected[space] for space in SPACES * 8]


def test_what_one_caller_was_told_is_in_no_error_of_another(guarded: tuple[House, dict[str, str]]) -> None:
    """A turn that breaks says which version is remembered, of the caller's own agent."""
    house, tokens = guarded
    with house.client() as engine:
        north, south = (engine.with_token(tokens[space]) for space in SPACES)
        north.reply(agent_id="broken", prompt="Hello.", max_tokens=2)
        for client, remembered in ((south, ""), (engine, ""), (north, "1")):
            with pytest.raises(KvasirError) as caught:
                client.reply(agent_id="broken", prompt="Hello again.", timeout_s=0)
            assert caught.value.metadata["remembered_version"] == remembered


def test_a_token_that_the_service_does_not_know_is_refused_and_disturbs_nobody(
    guarded: tuple[House, dict[str, str]],
) -> None:
    house, tokens = guarded
    with house.store_client(tokens["north"]) as store:
        with pytest.raises(Unauthenticated):
            store.with_token("x" * 40).list_agents()
        store.list_agents()


def test_the_channel_is_open_until_its_own_client_closes_it(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    with house.client() as engine, house.store_client() as store:
        with engine.with_token(tokens["north"]) as mine, store.with_token(tokens["north"]) as theirs:
            mine.get_model()
            theirs.list_agents()
        engine.get_model()
        store.list_agents()


def test_a_caller_without_a_token_is_not_taken_for_the_owner(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"

    async def asynchronous() -> None:
        for client in (AioInferenceClient.connect(address), AioStoreClient.connect(address)):
            with pytest.raises(Unauthenticated):
                client.with_token("")
            await client.close()

    for client in (InferenceClient.connect(address), StoreClient.connect(address)):
        for text in ("", " ", "a b", "ü", "a\nb"):
            with pytest.raises(Unauthenticated) as caught:
                client.with_token(text)
            assert caught.value.reason == "NO_CREDENTIAL"
        client.close()
    asyncio.run(asynchronous())

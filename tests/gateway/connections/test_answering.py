"""Turns of the event loop: few requests of a namespace are answered at once, and those of others begin beside them."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.credentials import CLIENT, Credentials, Principal
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.wellness import Wellness
from kvasir.waits import LOOK_S, PAUSE_S
from kvasir_gateway.door import bodies
from kvasir_gateway.door.bodies import MAX_ANSWERING, RequestRoom, Rooms
from kvasir_gateway.door.security import Gate
from kvasir_gateway.engine import CallerAtEngine, EngineLink
from kvasir_gateway.page.look import Sources
from kvasir_gateway.page.numbers.history import History
from kvasir_gateway.page.operating.part import Operating
from kvasir_gateway.page.routes import GatewayPage
from kvasir_gateway.page.sessions import Sessions

from tests.gateway.connections.test_beside_the_loop import app_of

KEYS = {name: f"kvasir-test-key-of-{name}-00000000" for name in ("greedy", "modest")}
CROWD = 50
MOST_OF_ONE = MAX_ANSWERING // 4


class BusyEngine:
    """Counts by token the calls that wait for it. It answers none until it is told to."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.was_asked_by_all, self.open = asyncio.Event(), asyncio.Event()

    def of(self, token: str, beside: Any, *_: Any) -> CallerAtEngine:
        client: Any = SimpleNamespace(
            list_turns=lambda: self._answer(token, []),
            list_models=lambda: self._answer(token, []),
            delete_agent=lambda *_, **__: self._answer(token, Unavailable("gone")),
        )
        client.at = lambda _: client
        return CallerAtEngine(client, beside)

    async def wellness(self) -> Wellness:
        return await self._answer("", Wellness([], {"engine": True}))

    async def _answer(self, token: str, answer: Any) -> Any:
        self.asked[token] += 1
        if self.asked[token] == CROWD:
            self.was_asked_by_all.set()
        await self.open.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def app_of_two(engine: BusyEngine) -> Any:
    principals = {Principal(name, name, frozenset({CLIENT})): key for name, key in KEYS.items()}
    gate = Gate(Credentials(()).with_tokens(principals))
    sessions = Sessions(gate, clock=lambda: 0.0, new_secret=lambda: "secret")
    sources = Sources(lambda: 0.0, lambda: 0.0, lambda: "0")
    needs: Any = engine, sessions, History(lambda: 0.0), None, Operating(None, (), lambda: 0.0)
    return app_of(engine, gate, GatewayPage(*needs, sources))


async def sent(app: Any, method: str, path: str, key: str) -> int:
    """The answer's status."""
    statuses = list[int]()

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"host", b"localhost"), (b"x-api-key", key.encode()), (b"accept", b"text/html")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "root_path": "", "client": None, "scheme": "http", "server": ("127.0.0.1", 1)}
    await app(scope, receive, send)
    return statuses[0]


async def _nothing_moves() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads keep their places however slow the machine is."""
    monkeypatch.setattr(bodies, "PAUSE_S", 60.0)


@pytest.mark.usefixtures("patient_reads")
@pytest.mark.parametrize("path", ["/page/turns", "/v1/models"])
def test_few_requests_of_a_namespace_are_answered_at_once_and_another_waits_for_none_of_them(path: str) -> None:
    async def crowd() -> None:
        engine = BusyEngine()
        app = app_of_two(engine)
        crowd = [asyncio.create_task(sent(app, "GET", path, KEYS["greedy"])) for _ in range(CROWD)]
        await _nothing_moves()
        assert engine.asked == {KEYS["greedy"]: MOST_OF_ONE}
        modest = asyncio.create_task(sent(app, "GET", path, KEYS["modest"]))
        await _nothing_moves()
        assert engine.asked[KEYS["modest"]] == 1
        engine.open.set()
        assert {*await asyncio.wait_for(asyncio.gather(modest, *crowd), 30)} == {200}
        assert engine.asked[KEYS["greedy"]] == CROWD

    asyncio.run(crowd())


@pytest.mark.usefixtures("patient_reads")
def test_strangers_have_the_places_of_one_namespace_and_pages_of_key_holders_wait_for_none_of_them() -> None:
    async def crowd() -> None:
        engine = BusyEngine()
        app = app_of_two(engine)
        crowd = [asyncio.create_task(sent(app, "GET", "/healthz", "")) for _ in range(CROWD)]
        await _nothing_moves()
        assert engine.asked == {"": MOST_OF_ONE}
        refused = asyncio.create_task(sent(app, "GET", "/page/turns", "no key"))
        modest = asyncio.create_task(sent(app, "GET", "/page/turns", KEYS["modest"]))
        await _nothing_moves()
        assert engine.asked[KEYS["modest"]] == 1
        assert not refused.done()
        engine.open.set()
        assert await asyncio.wait_for(asyncio.gather(modest, refused, *crowd), 30) == [200, 401, *[200] * CROWD]

    asyncio.run(crowd())


async def test_a_namespace_has_one_place_while_another_was_here() -> None:
    places = Rooms(CROWD, 1 << 20).answering
    await places.wait_for("modest", 1)
    places.give_back("modest", 1)
    assert [places.take_if_fits("greedy", 1) for _ in range(2)] == [True, False]


async def test_health_checks_that_wait_share_one_answer() -> None:
    stats, opens = list[None](), asyncio.Event()

    async def get_stats() -> pb.GetStatsResponse:
        stats.append(None)
        await opens.wait()
        return pb.GetStatsResponse(model="m", store_is_reachable=True)

    link = EngineLink([SimpleNamespace(get_stats=get_stats, peers={})], None, {})  # type: ignore[arg-type, list-item]
    asking = [asyncio.create_task(link.wellness()) for _ in range(CROWD)]
    await _nothing_moves()
    asking.pop(0).cancel()  # one caller leaves
    opens.set()
    assert all(wellness.http_status == 200 for wellness in await asyncio.gather(*asking))
    assert len(stats) == 1
    assert (await link.wellness()).http_status == 200
    assert len(stats) == 2


def test_a_deletion_that_waits_for_a_lease_keeps_no_other_request_from_beginning() -> None:
    async def crowd() -> None:
        engine = BusyEngine()
        app = app_of_two(engine)
        crowd = [asyncio.create_task(sent(app, "DELETE", "/v1/agents/a", KEYS["greedy"])) for _ in range(CROWD)]
        await asyncio.wait_for(engine.was_asked_by_all.wait(), 30)
        engine.open.set()
        assert {*await asyncio.gather(*crowd)} == {503}

    asyncio.run(crowd())


@pytest.mark.usefixtures("patient_reads")
async def test_a_place_is_given_back_when_the_answer_is_known_and_a_change_keeps_it_for_its_first_steps_alone() -> None:
    rooms = Rooms(10, 1 << 20)
    changing, reading, refused = (RequestRoom(rooms) for _ in range(3))
    for room in (changing, reading, refused):
        room.admit("n")
    await changing.loop_turn.begin(changing.namespace, is_read=False)
    await reading.loop_turn.begin(reading.namespace, is_read=True)
    assert rooms.answering.held_units == 2
    await asyncio.sleep(3 * LOOK_S)
    assert rooms.answering.held_units == 1
    for room in (changing, reading, refused):
        room.answered()
    assert rooms.answering.held_units == 0


async def test_a_read_of_an_engine_that_hangs_keeps_its_place_shortly() -> None:
    rooms = Rooms(10, 1 << 20)
    reading = RequestRoom(rooms)
    reading.admit("n")
    await reading.loop_turn.begin(reading.namespace, is_read=True)
    assert rooms.answering.held_units == 1
    await asyncio.sleep(3 * PAUSE_S)
    assert rooms.answering.held_units == 0

"""A body costs no more than it is counted for, is read where it holds nobody up, and is billed by what it becomes."""

import asyncio
import contextlib
import json
import sys
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.clients.aio.large_requests import _MOST_CALLS, LARGE_BYTES
from kvasir.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway import errors
from kvasir_gateway.agents import AgentTurn
from kvasir_gateway.anthropic_messages import MessagesRequest
from kvasir_gateway.app import GatewayLimits
from kvasir_gateway.door import bodies
from kvasir_gateway.door.bodies import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, RequestRoom, Rooms, count_values
from kvasir_gateway.embedding.asking import Found
from kvasir_gateway.embedding.bodies import EmbeddingsRequest, OllamaEmbed
from kvasir_gateway.ollama.turns import OllamaChat
from kvasir_gateway.openai.chat import ChatRequest
from kvasir_gateway.turn import Body
from starlette.requests import Request

from tests.gateway.conftest import Front
from tests.gateway.connections.test_strange_requests import PATHS, is_in_shape, post

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='k"\\{[,'), inner, max_size=5),
    max_leaves=30,
)


def values_in(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 1


@pytest.mark.long(3)
@settings(deadline=None)
@given(_VALUES, st.sampled_from([None, 1]))
def test_values_are_counted_as_parsing_makes_them(value: object, indent: int | None) -> None:
    counted = count_values(json.dumps(value, indent=indent).encode())
    assert values_in(value) - 1 <= counted <= 2 * values_in(value)


@given(_VALUES, st.integers(1, 9))
def test_where_a_body_is_cut_for_counting_changes_nothing(value: object, part_bytes: int) -> None:
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PART_BYTES", part_bytes)
        in_parts = count_values(body)
    assert in_parts == count_values(body)


def test_counting_gives_the_interpreter_to_other_threads_after_each_part() -> None:
    looked_at = list[int]()

    class Noted(bytearray):
        def __getitem__(self, place: Any) -> Any:
            looked_at.append(len(part := super().__getitem__(place)))
            return part

    count_values(Noted(json.dumps(['a\\"' * (1 << 20)]).encode()))
    assert max(looked_at) <= 16 << 10


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatRequest, {"model": "m"}),
        (MessagesRequest, {"model": "m", "max_tokens": 1}),
        (OllamaChat, {"model": "m"}),
        (AgentTurn, {}),
    ],
)
def test_between_two_messages_that_are_validated_another_thread_may_run(
    kind: type[Body], needed: dict[str, Any]
) -> None:
    """Python changes threads where one of its functions is called, and not inside of pydantic."""
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * 99, **needed})
    called = list[str]()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        kind.model_validate_json(body)
    finally:
        sys.setprofile(None)
    assert called.count("model_post_init") == 99


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b'{"role": "user"},' * MAX_CONTAINERS,
        b"[" + b'"a",' * (MAX_VALUES + 1),
        b'{"a":' * (MAX_DEPTH + 1),
        b"[" * (8 << 20),
    ],
    ids=["containers", "values", "levels", "brackets"],
)
def test_too_much_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        count_values(body)
    assert refused.value.field == "body"


@pytest.mark.parametrize("body", [b'"' + b'\\"' * (4 << 20), b'"' * (8 << 20), b'\\"[' * (2 << 20), b'"a\\'])
def test_each_byte_is_looked_at_once(body: bytes) -> None:
    """Strings that never end, and quotes that may begin one anywhere: a second look at each would take days."""
    with contextlib.suppress(InvalidArgument):
        count_values(body)


@pytest.mark.parametrize("body", [b'{"a":"b"},' * 800_000, b'"",' * (MAX_VALUES - 1), b"]" * (8 << 20)])
def test_counting_takes_less_memory_than_the_body(body: bytes) -> None:
    """Of short strings an object each would take twelve times as much."""
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidArgument):
            count_values(body)
        assert tracemalloc.get_traced_memory()[1] < max(len(body), 1 << 20)
    finally:
        tracemalloc.stop()


async def test_a_large_body_is_read_by_another_thread_and_namespaces_take_turns() -> None:
    rooms, order, threads = Rooms(10, 1 << 30), [], set()
    data = b" " * (1 << 20)

    async def one(namespace: str) -> None:
        room = RequestRoom(rooms)
        room.admit(namespace)
        assert await room.read(_sending([len(data)]), 2 * len(data)) == b"x" * len(data)

        def parse(_: bytearray) -> None:
            order.append(namespace)
            threads.add(threading.current_thread())

        await room.parsed(bytearray(data), parse)
        room.release()

    await asyncio.gather(*(one("greedy") for _ in range(4)), one("modest"))
    assert order.index("modest") <= 2
    assert threading.current_thread() not in threads
    assert (rooms.requests.held_by_all, rooms.bodies.held_by_all, rooms.reading.held_units) == (0, 0, 0)


def test_a_body_is_billed_by_what_it_becomes_until_it_is_answered() -> None:
    rooms = Rooms(10, 1 << 20)
    room = RequestRoom(rooms)
    room.admit("n")
    many = b"[" + b"1," * 4000 + b"1]"
    asyncio.run(room.parsed(bytearray(many), json.loads))
    assert rooms.bodies.held_by_all >= 4000 * 100
    with pytest.raises(ResourceExhausted, match="bodies of open requests"):
        asyncio.run(room.parsed(bytearray(many), json.loads))
    room.release()
    assert rooms.bodies.held_by_all == 0


def test_a_declared_body_without_room_is_refused_before_it_comes() -> None:
    rooms = Rooms(10, 1 << 20)
    first, second = RequestRoom(rooms), RequestRoom(rooms)
    assert asyncio.run(first.read(_sending([200_000, 300_000], declared=500_000), 1 << 20)) == b"x" * 500_000
    with pytest.raises(ResourceExhausted):
        asyncio.run(second.read(_sending([], declared=600_000), 1 << 20))
    assert rooms.bodies.held_by_all == 500_000
    assert asyncio.run(second.read(_sending([10], declared=30), 100)) == b"x" * 10  # it ended early


@pytest.mark.parametrize("is_refused", [False, True])
def test_objects_of_a_large_body_are_freed_by_the_thread(is_refused: bool) -> None:
    rooms, freed_by = Rooms(10, 1 << 30), list[threading.Thread]()

    class Parsed:
        def __del__(self) -> None:
            freed_by.append(threading.current_thread())

    def parse(_: bytearray) -> Parsed:
        made = Parsed()
        if is_refused:
            raise InvalidArgument("a field of it", field="a")
        return made

    async def one(room: RequestRoom) -> None:
        data = await room.read(_sending([1 << 20]), 1 << 20)
        with pytest.raises(InvalidArgument) if is_refused else contextlib.nullcontext():
            await room.parsed(data, parse)
        assert data == b""

    room = RequestRoom(rooms)
    asyncio.run(one(room))
    assert len(freed_by) == is_refused
    room.answered()
    rooms.thread.submit(int).result(5)
    assert len(freed_by) == 1
    assert freed_by[0] is not threading.main_thread()


def test_a_large_answer_is_made_by_the_thread_and_billed_until_it_is_sent() -> None:
    rooms, threads = Rooms(10, 1 << 20), list[threading.Thread]()
    room = RequestRoom(rooms)
    room.admit("n")

    def make() -> bytes:
        threads.append(threading.current_thread())
        return b""

    asyncio.run(room.rendered(make, 700_000))
    asyncio.run(room.rendered(make, 1000))
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()
    with pytest.raises(ResourceExhausted):
        asyncio.run(room.rendered(make, 400_000))
    assert (len(threads), rooms.bodies.held_by_all) == (2, 701_000)
    room.release()
    assert rooms.bodies.held_by_all == 0


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_answer_of_embeddings_takes_no_more_than_is_billed(encoding: str) -> None:
    asked = EmbeddingsRequest.model_validate({"model": "m", "input": "x", "encoding_format": encoding})
    found = Found("m", [pb.Embedding(values=[-0.1234567891 / (place + 1)] * 512) for place in range(200)])
    tracemalloc.start()
    try:
        answer = asked.answer(found)
        assert tracemalloc.get_traced_memory()[1] < asked.answer_bytes(found)
    finally:
        tracemalloc.stop()
    told = json.loads(answer)
    assert [each["index"] for each in told["data"]] == list(range(200))
    if encoding == "float":
        assert [each["embedding"] for each in told["data"]] == [list(each.values) for each in found.embeddings]
    assert json.loads(OllamaEmbed(model="m", input=[]).answer(Found("m")))["embeddings"] == []


def test_requests_beyond_their_places_are_refused_with_a_time_to_retry() -> None:
    rooms = Rooms(4, 100)
    first = [RequestRoom(rooms) for _ in range(3)]
    for room in first:
        room.admit("greedy")
    with pytest.raises(ResourceExhausted) as refused:
        RequestRoom(rooms).admit("greedy")
    assert (refused.value.reason, refused.value.retry_after_s) == ("TOO_MANY_CALLS", 1)
    RequestRoom(rooms).admit("modest")
    for room in first:
        room.release()
        room.release()  # said again it does nothing
    assert rooms.requests.held_by_all == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_of_too_many_messages_is_refused_in_its_apis_shape(front: Front, path: str) -> None:
    said = {"role": "user", "content": "a"}
    asked = {"model": "m", "max_tokens": 1, "messages": [said] * 40_000, "input": "a", "prompt": "a"}
    answer = post(front, path, json.dumps(asked).encode())
    assert answer.status_code == 400
    assert is_in_shape(path, answer.json())
    assert "objects and arrays" in answer.text


@pytest.mark.parametrize("pieces", [[60, 60], [20, 20, 20, 20, 20, 20]])
def test_all_bodies_together_have_a_bound(pieces: list[int]) -> None:
    """A body that finds no room is refused while it comes, and what others hold is theirs until they are answered."""
    rooms = Rooms(10, 100)
    room, first, second = rooms.bodies, RequestRoom(rooms), RequestRoom(rooms)
    first.namespace = second.namespace = "n"
    assert asyncio.run(first.read(_sending([30]), 200)) == b"x" * 30
    with pytest.raises(ResourceExhausted, match="of 100 bytes"):
        asyncio.run(second.read(_sending(pieces), 200))
    second.release()
    assert room.held_by_all == 30
    with pytest.raises(errors.BodyTooLarge):
        asyncio.run(second.read(_sending([10, 10]), 15))
    first.release()
    second.release()
    assert room.held_by_all == 0


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SENDING_S", 0.05)
    with pytest.raises(DeadlineExceeded) as late:
        asyncio.run(RequestRoom(Rooms(10, 100)).read(_sending([10], is_whole=False), 200))
    assert errors.http_status(late.value) == 408


def test_texts_that_a_body_refers_to_are_billed_when_they_are_read_and_once() -> None:
    rooms = Rooms(10, 100_000)
    room = RequestRoom(rooms)
    room.admit("n")

    async def ask(earlier_bytes: int) -> None:
        await room.read(_sending([100]), 200)
        room.bill_earlier(earlier_bytes)
        held = rooms.bodies.held_by_all
        assert held >= 3 * earlier_bytes
        await room.written(lambda: bytes(earlier_bytes + 100))
        assert rooms.bodies.held_by_all == held

    asyncio.run(ask(10_000))
    with pytest.raises(ResourceExhausted):
        asyncio.run(ask(40_000))
    room.release()
    assert rooms.bodies.held_by_all == 0


@pytest.mark.parametrize(("earlier_bytes", "is_beside"), [(10_000, False), (20_000, True)])
async def test_a_request_of_long_earlier_texts_is_made_by_the_thread(earlier_bytes: int, is_beside: bool) -> None:
    room = RequestRoom(Rooms(10, 1 << 20))
    await room.read(_sending([100]), 200)
    room.bill_earlier(earlier_bytes)
    assert (await room.made(threading.current_thread) is not threading.main_thread()) == is_beside


def test_there_is_a_thread_for_each_large_request_that_bodies_room_admits() -> None:
    """Also where little is sent, and much is remembered."""
    rooms, large = Rooms(1000, GatewayLimits().max_bodies_bytes), bytes(LARGE_BYTES)

    async def begun(sent_bytes: int, namespaces: int) -> int:
        count, open_ones = 0, list[RequestRoom]()
        with contextlib.suppress(ResourceExhausted):
            for number in range(1000):
                room = RequestRoom(rooms)
                open_ones.append(room)
                room.admit(f"n{number % namespaces}")
                data = await room.read(_sending([sent_bytes]), 8 << 20)
                await room.parsed(data, bytes)
                assert await room.written(lambda: large) is large
                assert await room.written(lambda: large) is large, "made again, it is billed once"
                count += 1
        for room in open_ones:
            room.release()
        return count

    for sent_bytes in (1000, LARGE_BYTES // 3):
        assert 40 <= asyncio.run(begun(sent_bytes, 1)) < _MOST_CALLS
        assert 40 <= asyncio.run(begun(sent_bytes, 9)) <= _MOST_CALLS
    assert rooms.bodies.held_by_all == 0


def _sending(pieces: list[int], *, is_whole: bool = True, declared: int | None = None) -> Request:
    """A request whose body comes in pieces of these sizes."""
    headers = [(b"content-length", str(declared).encode())] if declared is not None else []
    left = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in pieces]
    left += [{"type": "http.request", "body": b""}] * is_whole

    async def receive() -> Any:
        return left.pop(0) if left else await asyncio.sleep(60)

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)

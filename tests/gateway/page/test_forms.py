"""Forms of the page: read as Python's library reads them, in C, within the room of all bodies."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import InvalidArgument, ResourceExhausted
from kvasir_gateway.door.bodies import RequestRoom, Rooms
from kvasir_gateway.page import look as looks
from kvasir_gateway.page.conversation.talking import SAY_BYTES
from kvasir_gateway.page.look import FORM_BYTES


class Sent:
    """A request whose body is a form of so many bytes."""

    scope: Mapping[str, object] = {}
    headers: Mapping[str, str] = {}

    def __init__(self, length: int) -> None:
        self.length = length

    async def stream(self) -> AsyncIterator[bytes]:
        yield b"text=%20" + b"a" * self.length


def read_form(room: RequestRoom, length: int) -> dict[str, str]:
    return asyncio.run(looks.form_of(Sent(length), room, 1 << 20))  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "is_beside"), [(100, False), (FORM_BYTES + 100, True)])
def test_a_large_form_is_read_beside_the_loop(length: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    read = looks._fields
    monkeypatch.setattr(looks, "_fields", lambda data: threads.append(threading.get_ident()) or read(data))
    assert read_form(RequestRoom(Rooms(10, 1 << 20)), length) == {"text": " " + "a" * length}
    assert (threads != [threading.get_ident()]) == is_beside


_FORM_PARTS = ("a", "=", "&", "%", "+", "%2", "%C3", "%A9", "%c3%a9", "%3D", "%25", "%0a", "\n", "\r", "é", "==", "_")


@given(st.lists(st.sampled_from(_FORM_PARTS), max_size=60), st.integers(3, 20))
def test_a_form_is_read_as_pythons_own_library_reads_it(parts: list[str], cut_bytes: int) -> None:
    data = "".join(parts).encode()

    def read() -> Mapping[str, str] | str:
        try:
            return looks._fields(bytearray(data))
        except InvalidArgument as error:
            return error.message

    try:
        fields = parse_qs(data.decode(), keep_blank_values=True, errors="strict", max_num_fields=16)
        expected: Mapping[str, str] | str = {name: values[-1] for name, values in fields.items()}
    except UnicodeDecodeError:
        expected = "the form is no URL-encoded UTF-8"
    except ValueError:
        expected = "the form has more than 16 fields"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looks, "_PART_BYTES", cut_bytes)
        assert read() == expected


def test_escapes_of_a_form_are_read_in_c_a_part_at_a_time() -> None:
    """Each line of Python would take the interpreter from the event loop; so would one long call into C."""
    lines = 0

    def traced(*_: object) -> Any:
        nonlocal lines
        lines += 1
        return traced

    data = bytearray(b"text=" + b"%C3%A9" * (SAY_BYTES // 6 - 1))
    parts = len(data) // looks._PART_BYTES
    before = sys.gettrace()
    sys.settrace(traced)
    try:
        read = looks._fields(data)
    finally:
        sys.settrace(before)
    assert read == {"text": "é" * (SAY_BYTES // 6 - 1)}
    assert parts < lines < 30 * parts


def test_forms_take_room_with_all_bodies_and_no_namespace_fills_it() -> None:
    rooms = Rooms(10, 10_000)
    first, second = RequestRoom(rooms), RequestRoom(rooms)
    first.admit("greedy")
    assert len(read_form(first, 7_000)["text"]) == 7_001
    second.admit("greedy")
    with pytest.raises(ResourceExhausted, match="bodies of open requests"):
        read_form(second, 1_000)
    modest = RequestRoom(rooms)
    modest.admit("modest")
    assert read_form(modest, 1_000)
    for room in (first, second, modest):
        room.release()
    assert (rooms.bodies.held_by_all, rooms.requests.held_by_all) == (0, 0)
